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
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, ValueInfoProto, helper, numpy_helper
from searching import FormulaBackend, drafted, prepared, rule
from strategy import THEMES, Generated, bodies_of, generated_models
from test_type_rules import PLAIN

import taso
from taso.graph.errors import GraphError, TasoError
from taso.graph.graph import Node
from taso.graph.onnx_bodies import Body, body_labels, read_body, with_bodies
from taso.rules.collection import library
from taso.rules.matcher import Matcher
from taso.rules.pattern import Rule
from taso.search.optimize import measuring_sizes, usable
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


def text_of(proto: ModelProto) -> str:
    """A model as ONNX text, followed by the values of such tensors as the printer leaves out."""
    tensors: list[TensorProto] = []
    for graph in (proto.graph, *bodies_of(proto.graph)):
        tensors.extend(graph.initializer)
        tensors.extend(a.t for node in graph.node for a in node.attribute if a.HasField("t"))
    left_out = [t for t in tensors if "= ..." in onnx.printer.to_text(GraphProto(name="g", initializer=[t]))]
    lines = [f"where {t.name} = {numpy_helper.to_array(t).tolist()}" for t in left_out]
    return "\n".join((onnx.printer.to_text(proto), *lines))


# ── oracles ──────────────────────────────────────────────────────────────────────────────────────────────────────


def nameless(proto: ModelProto) -> ModelProto:
    """A copy of which no node has a name: ONNX Runtime refuses two of one name."""
    copy = ModelProto()
    copy.CopyFrom(proto)
    for graph in (copy.graph, *bodies_of(copy.graph)):
        for node in graph.node:
            node.name = ""
    return copy


def by_onnxruntime(proto: ModelProto, feeds: Arrays) -> Outputs:
    odd = [v for v in (*proto.graph.input, *proto.graph.output) if v.type.tensor_type.elem_type not in PLAIN | {8}]
    if odd:
        raise NotImplementedError("ONNX Runtime gives no NumPy arrays of these types")
    return models.by_onnxruntime(nameless(proto), feeds)


def by_reference(proto: ModelProto, feeds: Arrays) -> Outputs:
    if any(n.op_type in ("Loop", "Scan") for g in (proto.graph, *bodies_of(proto.graph)) for n in g.node):
        raise NotImplementedError("the reference stacks scalars as rows and takes a missing condition for a false one")
    return [np.asarray(a) for a in models.by_reference(nameless(proto), feeds)]


def node_by_node(proto: ModelProto, feeds: Arrays) -> Outputs:
    """Each node as a model of its own, by the first of both that knows it, and bodies node by node in their turn."""
    known = onnx.shape_inference.infer_shapes(proto)
    values = run_graph(proto, known.graph, {**feeds})
    return [values[v.name] for v in proto.graph.output]


def run_graph(proto: ModelProto, graph: GraphProto, values: Arrays) -> Arrays:
    """`values` and all that the nodes of a graph make of them."""
    infos = {v.name: v for v in (*graph.value_info, *graph.input, *graph.output)}
    values = {**values, **{t.name: numpy_helper.to_array(t) for t in graph.initializer if t.name not in values}}
    for node in graph.node:
        if node.op_type in BY_HAND:
            found = BY_HAND[node.op_type](proto, node, values)
        else:
            found = run_node(proto, node, values, infos)
        values.update((name, array) for name, array in zip(node.output, found, strict=True) if name)
    return values


def run_node(proto: ModelProto, node: NodeProto, values: Arrays, infos: dict[str, ValueInfoProto]) -> Outputs:
    names = list(dict.fromkeys(n for n in node.input if n))
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
    found = iter(first_that_runs(one, {n: values[n] for n in names}))
    return [next(found) if n else np.zeros(0) for n in node.output]


def run_body(proto: ModelProto, body: GraphProto, given: Sequence[NDArray[np.generic]], values: Arrays) -> Outputs:
    inner = run_graph(proto, body, {**values, **dict(zip((v.name for v in body.input), given, strict=True))})
    return [inner[v.name] for v in body.output]


def attributes_of(node: NodeProto) -> dict[str, list[int]]:
    return {a.name: list(a.ints) for a in node.attribute}


def run_if(proto: ModelProto, node: NodeProto, values: Arrays) -> Outputs:
    branch = "then_branch" if bool(values[node.input[0]].item()) else "else_branch"
    return run_body(proto, next(a.g for a in node.attribute if a.name == branch), [], values)


def run_loop(proto: ModelProto, node: NodeProto, values: Arrays) -> Outputs:
    body = node.attribute[0].g
    trips, going, *state = [values[n] if n else None for n in node.input]
    carried, on, i = [a for a in state if a is not None], going is None or bool(going.item()), 0
    rows: list[Outputs] = []
    while on and (trips is None or i < trips.item()):
        again, *made = run_body(proto, body, [np.array(i), np.array(on), *carried], values)
        carried, on, i = made[: len(carried)], bool(again.item()), i + 1
        rows.append(made[len(carried) :])
    if not rows and len(body.output) > 1 + len(carried):
        raise NotImplementedError("no iteration says of what type that is which is scanned")
    return [*carried, *(np.stack(column) for column in zip(*rows, strict=True))]


def run_scan(proto: ModelProto, node: NodeProto, values: Arrays) -> Outputs:
    said = attributes_of(node)
    body = next(a.g for a in node.attribute if a.name == "body")
    count = next(a.i for a in node.attribute if a.name == "num_scan_inputs")
    carried = [values[n] for n in node.input[:-count]]
    axes, ways = said.get("scan_input_axes", [0] * count), said.get("scan_input_directions", [0] * count)
    steps = [np.moveaxis(values[n], axis, 0) for n, axis in zip(node.input[-count:], axes, strict=True)]
    rows: list[Outputs] = []
    for i in range(len(steps[0])):
        items = [np.asarray(s[-1 - i] if way else s[i]) for s, way in zip(steps, ways, strict=True)]
        made = run_body(proto, body, [*carried, *items], values)
        carried = made[: len(carried)]
        rows.append(made[len(carried) :])
    width = len(body.output) - len(carried)
    axes, ways = said.get("scan_output_axes", [0] * width), said.get("scan_output_directions", [0] * width)
    columns = [c[::-1] if way else c for c, way in zip(zip(*rows, strict=True), ways, strict=True)] if width else []
    return [*carried, *(np.stack(column, axis) for column, axis in zip(columns, axes, strict=True))]


BY_HAND = {"If": run_if, "Loop": run_loop, "Scan": run_scan}


def first_that_runs(proto: ModelProto, feeds: Arrays) -> Outputs:
    try:
        return by_onnxruntime(proto, feeds)
    except Exception:
        return by_reference(proto, feeds)


# the reference takes BatchNormalization of opset 9 for training (onnx 1.23): what ONNX Runtime knows it does
ORACLES: tuple[Oracle, ...] = (by_onnxruntime, node_by_node, by_reference)


def told(oracle: Oracle, proto: ModelProto, feeds: Arrays) -> Outputs | None:
    """What an oracle says; None where it does not run the model, or gives what has not the shapes that ONNX infers."""
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        try:
            found = oracle(proto, feeds)
        except Exception:
            return None
    return found if all(map(fits, found, proto.graph.output)) else None


def fits(array: NDArray[np.generic], value: ValueInfoProto) -> bool:
    dims = value.type.tensor_type.shape.dim
    known = [(size, d.dim_value) for size, d in zip(np.shape(array), dims, strict=False) if d.HasField("dim_value")]
    return np.ndim(array) == len(dims) and all(size == stated for size, stated in known)


def narrowest(*protos: ModelProto) -> float:
    """The error allowed: of a model that computes in few bits, that of these."""
    types = {t for p in protos for v in all_values(p) for t in [v.type.tensor_type.elem_type]}
    return max([TOLERANCE, *(FEW_BITS[t] for t in types if t in FEW_BITS)])


def all_values(proto: ModelProto) -> Sequence[ValueInfoProto]:
    graph = onnx.shape_inference.infer_shapes(proto).graph
    return [v for g in (graph, *bodies_of(graph)) for v in (*g.input, *g.output, *g.value_info)]


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


def checked(made: Generated, verify: bool = False) -> taso.Report:
    """Optimizes and exports a model; fails with its text where what comes out is not what went in.

    With `verify` our own comparison looks at it first; without, nothing that is wrong is held back.
    """
    try:
        onnx.checker.check_model(made.model, full_check=True)
    except Exception as error:
        event(f"not a valid model: {type(error).__name__}")
        assume(False)
    shapes = {n: s for n, s in made.sizes.items() if 0 not in s and n in made.feeds(0)}
    text = text_of(made.model)
    report: taso.Report | None = None
    try:
        with warnings.catch_warnings(), np.errstate(all="ignore"):
            warnings.simplefilter("ignore")
            best = taso.optimize(
                taso.load(made.model), 1.05, 20, backend=BACKEND, verify=verify, never_slower=False,
                progress=False, input_shapes=shapes,
            )  # fmt: skip
            report = best.report
            after = taso.export_onnx(best)
    except Exception as error:
        raise AssertionError(f"{type(error).__name__}: {error}\n{text}") from error
    assert report is not None
    problems = wrong(made, after)
    said = [report.decision, *report.messages]
    problems += [m for m in said if "could not be used" in m or "differs: relative error" in m]
    if not verify:
        problems += [m for m in said if m.startswith("shape arithmetic stays as it is")]
    took = ", ".join(r.rule for r in report.rewrites)
    shown = "\n".join(problems)
    assert not problems, f"{shown}\nafter {took or 'no rewrite'}\n{text}\nbecame\n{text_of(after)}"
    event("rewritten" if report.changed else "not rewritten")
    return report


@given(generated_models())
@SETTINGS
def test_what_comes_out_is_valid_and_equal(made: Generated) -> None:
    checked(made)


@pytest.mark.parametrize("theme", sorted(set(THEMES)))
def test_every_operator_and_type_comes_out_valid_and_equal(theme: str) -> None:
    """As above, of models of which each has this operator or element type: chance alone gives most of some."""

    @given(generated_models(theme), st.booleans())
    @settings(SETTINGS, max_examples=max(3, SETTINGS.max_examples // len(set(THEMES))))
    def holds(made: Generated, verify: bool) -> None:
        checked(made, verify)

    holds()


Rewritten = tuple[taso.Graph, list[str]]


def at_will(made: Generated, choices: Sequence[int], known: Sequence[Rule]) -> list[str]:
    """Carries out rewrites, in bodies too, whether they pay or not; gives their ids, and fails as `checked`."""
    try:
        onnx.checker.check_model(made.model, full_check=True)
    except Exception:
        assume(False)
    text = text_of(made.model)
    path: list[str] = []
    try:
        with warnings.catch_warnings(), np.errstate(all="ignore"):
            warnings.simplefilter("ignore")
            graph, inside = with_bodies_rewritten(taso.load(made.model), choices, known)
            graph, outside = rewritten(graph, choices, known)
            path = [*inside, *outside]
            after = taso.export_onnx(graph) if path else None
    except Exception as error:
        raise AssertionError(f"{type(error).__name__}: {error}\nafter {', '.join(path)}\n{text}") from error
    if after is not None:
        problems = wrong(made, after)
        became = text_of(after)
        assert not problems, "\n".join((*problems, f"after {', '.join(path)}", text, "became", became))
    return path


def rewritten(graph: taso.Graph, choices: Sequence[int], known: Sequence[Rule]) -> Rewritten:
    """The graph after one rewrite for each choice, and the ids of these."""
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
    return (to_graph(state, graph, start.classes, taso.Graph), path) if path else (graph, path)


def with_bodies_rewritten(graph: taso.Graph, choices: Sequence[int], known: Sequence[Rule]) -> Rewritten:
    """The graph with rewrites carried out in the bodies of its nodes; what cannot be read alone stays."""
    sizes = {k: v for k, v in measuring_sizes(graph, {}).items() if isinstance(v, int)}
    changed: dict[Node, list[tuple[Body, taso.Graph]]] = {}
    path: list[str] = []
    for node in graph.operators:
        for position, _ in enumerate(body_labels(node)):
            try:
                body = read_body(graph, node, position, sizes)
                inner, names = rewritten(body.graph, choices, known)
                with_bodies(graph, {node: [(body, inner)]} if names else {})
            except TasoError as reason:
                event(f"body left alone: {reason}")
                continue
            if names:
                changed.setdefault(node, []).append((body, inner))
                path.extend(names)
    event("bodies rewritten" if changed else "no body rewritten")
    return (with_bodies(graph, changed), path) if changed else (graph, path)


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


def test_what_the_printer_leaves_out_is_shown_too() -> None:
    weight = helper.make_tensor("w", TensorProto.INT4, [3], [1, -2, 7])
    value = helper.make_tensor("c", TensorProto.UINT2, [2], [3, 1])
    constant = helper.make_node("Constant", [], ["c"], value=value)
    body = helper.make_graph([constant], "b", [], [ValueInfoProto(name="c")])
    nodes = [helper.make_node("If", ["x"], ["y"], then_branch=body, else_branch=body)]
    text = text_of(helper.make_model(helper.make_graph(nodes, "g", [], [], [weight])))
    assert "where w = [1, -2, 7]" in text and "where c = [3, 1]" in text


def test_a_corrupted_rewrite_is_caught() -> None:
    """The property fails for a rule that forgot to ask for a factor of one, and shows the model."""
    broken = rule(BROKEN)

    @given(generated_models())
    @settings(SETTINGS, max_examples=300, derandomize=True, phases=[Phase.generate])
    def holds(made: Generated) -> None:
        at_will(made, [0], [broken])

    with pytest.raises(AssertionError, match="after drop-any-product"):
        holds()
