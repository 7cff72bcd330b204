"""Any valid model comes through: what is exported after optimizing is valid, looks the same and computes the same."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Sequence

import models
import numpy as np
import onnx
import onnx.checker
import onnx.printer
import onnx.shape_inference
import pytest
from hypothesis import HealthCheck, Phase, assume, event, given, settings
from hypothesis import strategies as st
from models import Arrays
from numpy.typing import NDArray
from onnx import ModelProto, TensorProto, ValueInfoProto, helper, numpy_helper
from searching import FormulaBackend, drafted, prepared, rule
from strategy import Generated, generated_models
from test_type_rules import PLAIN

import taso
from taso.graph.errors import GraphError
from taso.rules.collection import library
from taso.rules.matcher import Matcher
from taso.rules.pattern import Rule
from taso.search.optimize import usable
from taso.search.result import to_graph
from taso.search.rewrite import Refused
from taso.search.state import Cycle

NIGHTLY = bool(os.environ.get("TASO_NIGHTLY"))
SETTINGS = settings(
    max_examples=int(os.environ.get("TASO_EXAMPLES", "2000")) if NIGHTLY else 200, deadline=None,
    derandomize=not NIGHTLY, database=None, print_blob=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much,
                           HealthCheck.large_base_example],
)  # fmt: skip
BACKEND = FormulaBackend()
SHAKEN = (TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.DOUBLE)
FEW_BITS: dict[int, float] = {TensorProto.FLOAT16: 2e-2, TensorProto.BFLOAT16: 1e-1}
TOLERANCE = 1e-4

Outputs = list[NDArray[np.generic]]
Oracle = Callable[[ModelProto, Arrays], Outputs]


# ── oracles ──────────────────────────────────────────────────────────────────────────────────────────────────────


def nameless(proto: ModelProto) -> ModelProto:
    """A copy of which no node has a name: ONNX Runtime refuses two of one name."""
    copy = ModelProto()
    copy.CopyFrom(proto)
    for node in copy.graph.node:
        node.name = ""
    return copy


def by_onnxruntime(proto: ModelProto, feeds: Arrays) -> Outputs:
    odd = [v for v in (*proto.graph.input, *proto.graph.output) if v.type.tensor_type.elem_type not in PLAIN | {8}]
    if odd:
        raise NotImplementedError("ONNX Runtime gives no NumPy arrays of these types")
    return models.by_onnxruntime(nameless(proto), feeds)


def by_reference(proto: ModelProto, feeds: Arrays) -> Outputs:
    return [np.asarray(a) for a in models.by_reference(nameless(proto), feeds)]


def node_by_node(proto: ModelProto, feeds: Arrays) -> Outputs:
    """Each node as a model of its own, by the first of both that knows it."""
    known = onnx.shape_inference.infer_shapes(proto)
    infos = {v.name: v for v in (*known.graph.value_info, *known.graph.input, *known.graph.output)}
    values: Arrays = {t.name: numpy_helper.to_array(t) for t in proto.graph.initializer} | feeds
    for node in proto.graph.node:
        inner = {n for a in node.attribute if a.HasField("g") for b in a.g.node for n in b.input}
        names = list(dict.fromkeys(n for n in (*node.input, *sorted(inner)) if n in values))
        given_types = [
            helper.make_tensor_value_info(n, helper.np_dtype_to_tensor_dtype(values[n].dtype), values[n].shape)
            if values[n].dtype != object
            else helper.make_tensor_value_info(n, TensorProto.STRING, values[n].shape)
            for n in names
        ]
        outputs = [ValueInfoProto(name=n) for n in node.output if n]
        for info in outputs:
            if info.name in infos:
                info.type.tensor_type.elem_type = infos[info.name].type.tensor_type.elem_type
        graph = helper.make_graph([node], "one", given_types, outputs)
        one = helper.make_model(graph, opset_imports=proto.opset_import, ir_version=proto.ir_version)
        values.update(zip((o.name for o in outputs), first_that_runs(one, {n: values[n] for n in names}), strict=True))
    return [values[v.name] for v in proto.graph.output]


def first_that_runs(proto: ModelProto, feeds: Arrays) -> Outputs:
    try:
        return by_onnxruntime(proto, feeds)
    except Exception:
        return by_reference(proto, feeds)


# the reference takes BatchNormalization of opset 9 for training (onnx 1.23): what ONNX Runtime knows it does
ORACLES: tuple[Oracle, ...] = (by_onnxruntime, node_by_node, by_reference)


def told(oracle: Oracle, proto: ModelProto, feeds: Arrays) -> Outputs | None:
    """What an oracle says; None where it does not run the model."""
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        try:
            return oracle(proto, feeds)
        except Exception:
            return None


def narrowest(*protos: ModelProto) -> float:
    """The error allowed: of a model that computes in few bits, that of these."""
    types = {t for p in protos for v in all_values(p) for t in [v.type.tensor_type.elem_type]}
    return max([TOLERANCE, *(FEW_BITS[t] for t in types if t in FEW_BITS)])


def all_values(proto: ModelProto) -> Sequence[ValueInfoProto]:
    graph = onnx.shape_inference.infer_shapes(proto).graph
    return (*graph.input, *graph.output, *graph.value_info)


def errors(found: Outputs, wanted: Outputs) -> list[float]:
    result = []
    with np.errstate(all="ignore"):
        for a, b in zip(found, wanted, strict=True):
            if np.shape(a) != np.shape(b) or a.dtype != b.dtype:
                result.append(float("inf"))
            elif b.dtype.kind in "iu":
                result.append(0.0 if np.array_equal(a, b) else float("inf"))
            else:
                result.append(models.relative_error(np.asarray(a), np.asarray(b)))
    return result


def shaken(proto: ModelProto, feeds: Arrays, size: float) -> tuple[ModelProto, Arrays]:
    """The model and its inputs with every float, of weights and of what nodes make, moved by about `size` of itself."""
    rng = np.random.default_rng(1)

    def moved(array: NDArray[np.generic]) -> NDArray[np.generic]:
        noise = 1 + size * rng.choice([-1.0, 1.0], array.shape)
        return np.asarray(array.astype(np.float64) * noise).astype(array.dtype)

    copy = nameless(proto)
    types = {v.name: v.type.tensor_type for v in all_values(proto)}
    nodes = list(copy.graph.node)
    del copy.graph.node[:]
    for node in nodes:
        products = []
        for i, name in enumerate(node.output):
            said = types.get(name)
            if said is None or said.elem_type not in SHAKEN or not said.HasField("shape"):
                continue
            raw, noise = name + "~raw", name + "~noise"
            node.output[i] = raw
            shape = [d.dim_value for d in said.shape.dim]
            ones = np.ones(shape if all(shape) else (), helper.tensor_dtype_to_np_dtype(said.elem_type))
            copy.graph.initializer.append(numpy_helper.from_array(moved(ones), noise))
            products.append(helper.make_node("Mul", [raw, noise], [name]))
        copy.graph.node.extend([node, *products])
    for tensor in copy.graph.initializer:
        if tensor.data_type in SHAKEN and tensor.dims and max(tensor.dims) > 1 and not tensor.name.endswith("~noise"):
            tensor.CopyFrom(numpy_helper.from_array(moved(numpy_helper.to_array(tensor)), tensor.name))
    floating = {v.name for v in proto.graph.input if v.type.tensor_type.elem_type in SHAKEN}
    return copy, {n: moved(a) if n in floating else a for n, a in feeds.items()}


def says_nothing(oracle: Oracle, proto: ModelProto, feeds: Arrays, wanted: Outputs, limit: float) -> list[bool]:
    """For each output whether rounding alone moves it by more than is allowed."""
    size = {TOLERANCE: 1e-6, 2e-2: 2e-3, 1e-1: 1e-2}[limit]
    again = [told(oracle, *shaken(proto, feeds, s)) for s in (size, 3 * size)]
    return [any(o is not None and errors([o[i]], [w])[0] > limit / 4 for o in again) for i, w in enumerate(wanted)]


# ── the property ─────────────────────────────────────────────────────────────────────────────────────────────────


def wrong(made: Generated, after: ModelProto, seeds: Sequence[int] = (0, 1)) -> list[str]:
    """In what an optimized model differs from the one it was made of; gives the example up where no oracle can tell."""
    proto = made.model
    found = [] if after.graph.output == proto.graph.output else ["outputs"]
    weights = {t.name for t in proto.graph.initializer}
    kept = {t.name for t in after.graph.initializer}
    if [v for v in proto.graph.input if v.name not in weights] != [v for v in after.graph.input if v.name not in kept]:
        found.append("inputs")
    if list(proto.opset_import) != list(after.opset_import) or proto.metadata_props != after.metadata_props:
        found.append("opset or metadata")
    try:
        onnx.checker.check_model(after, full_check=True)
    except Exception as error:
        return [*found, f"not valid: {error}"]
    limit, judged = narrowest(proto, after), False
    for seed in seeds:
        feeds = made.feeds(seed)
        for oracle in ORACLES:
            wanted = told(oracle, proto, feeds)
            got = told(oracle, after, feeds) if wanted is not None else None
            if wanted is None or got is None:
                continue
            judged = True
            event(f"oracle: {oracle.__name__}")
            bad = [i for i, e in enumerate(errors(got, wanted)) if e > limit]
            blind = says_nothing(oracle, proto, feeds, wanted, limit) if bad else []
            event("ill conditioned" if any(blind) else "well conditioned")
            found += [
                f"output {i} ({proto.graph.output[i].name}), by {oracle.__name__}: {got[i]} is not {wanted[i]}"
                for i in bad
                if not blind[i]
            ]
            break
    if not judged and not found:
        if all(told(o, proto, made.feeds(0)) is None for o in ORACLES):
            event("no oracle")
            assume(False)
        found.append("no oracle runs both")
    return found


def checked(made: Generated, budget: int = 20) -> taso.Report:
    """Optimizes and exports a model; fails with its text where what comes out is not what went in."""
    try:
        onnx.checker.check_model(made.model, full_check=True)
    except Exception as error:
        event(f"not a valid model: {type(error).__name__}")
        assume(False)
    shapes = {n: s for n, s in made.sizes.items() if 0 not in s and n in made.feeds(0)}
    text = onnx.printer.to_text(made.model)
    report: taso.Report | None = None
    try:
        with warnings.catch_warnings(), np.errstate(all="ignore"):
            warnings.simplefilter("ignore")
            best = taso.optimize(
                taso.load(made.model), 1.05, budget, backend=BACKEND, verify=False, never_slower=False,
                progress=False, input_shapes=shapes,
            )  # fmt: skip
            report = best.report
            after = taso.export_onnx(best)
    except Exception as error:
        raise AssertionError(f"{type(error).__name__}: {error}\n{text}") from error
    assert report is not None
    problems = wrong(made, after)
    if "could not be used" in report.decision:
        problems.append(report.decision)
    problems += [m for m in report.messages if m.startswith("shape arithmetic stays as it is")]
    took = ", ".join(r.rule for r in report.rewrites)
    shown = "\n".join(problems)
    assert not problems, f"{shown}\nafter {took or 'no rewrite'}\n{text}\nbecame\n{onnx.printer.to_text(after)}"
    event("rewritten" if report.changed else "not rewritten")
    return report


@given(generated_models())
@SETTINGS
def test_what_comes_out_is_valid_and_equal(made: Generated) -> None:
    checked(made)


def at_will(made: Generated, choices: Sequence[int], known: Sequence[Rule]) -> list[str]:
    """Carries out rewrites whether they pay or not; gives their ids, and fails as `checked`."""
    try:
        onnx.checker.check_model(made.model, full_check=True)
    except Exception:
        assume(False)
    graph = taso.load(made.model)
    start = prepared(graph)
    state, path, matcher = start.state, list[str](), Matcher(known)
    for choice in choices:
        found = sorted(matcher.find_all(state), key=lambda m: m.key)
        if not found:
            break
        # by rule first: of those that undo what is there already there are many everywhere
        names = sorted({m.rule.id for m in found})
        alike = [m for m in found if m.rule.id == names[choice % len(names)]]
        match = alike[choice // len(names) % len(alike)]
        try:
            state = drafted(state, match).commit()
        except (Refused, Cycle, GraphError):
            continue
        path.append(match.rule.id)
    if path:
        text = onnx.printer.to_text(made.model)
        try:
            with warnings.catch_warnings(), np.errstate(all="ignore"):
                warnings.simplefilter("ignore")
                after = taso.export_onnx(to_graph(state, graph, start.classes, taso.Graph))
        except Exception as error:
            raise AssertionError(f"{type(error).__name__}: {error}\nafter {', '.join(path)}\n{text}") from error
        problems = wrong(made, after)
        became = onnx.printer.to_text(after)
        assert not problems, "\n".join((*problems, f"after {', '.join(path)}", text, "became", became))
    return path


@given(generated_models(), st.lists(st.integers(0, 999), min_size=1, max_size=6))
@SETTINGS
def test_every_rewrite_that_applies_keeps_what_is_computed(made: Generated, choices: list[int]) -> None:
    for name in at_will(made, choices, usable(library())):
        event(f"rule: {name}")


BROKEN = """
[drop-any-product]
Mul(x, c) => x
  where broadcasts_to(shape(c), shape(x))
  exact: exact
"""


def test_a_corrupted_rewrite_is_caught() -> None:
    """The property fails for a rule that forgot to ask for a factor of one, and shows the model."""
    broken = rule(BROKEN)

    @given(generated_models())
    @settings(SETTINGS, max_examples=300, derandomize=True, phases=[Phase.generate])
    def holds(made: Generated) -> None:
        at_will(made, [0], [broken])

    with pytest.raises(AssertionError, match="after drop-any-product"):
        holds()
