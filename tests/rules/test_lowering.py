"""What the oneDNN backend replaces is proved: each entry of its tables has a rule, and oneDNN computes what it says."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

import taso
from taso.backends.onednn import kernels
from taso.backends.onednn import primitives as p
from taso.backends.onednn.attributes import EltwisePostOp
from taso.backends.onednn.library import library
from taso.graph.errors import BackendError, BackendUnavailable
from taso.graph.evaluate import evaluate_graph
from taso.graph.graph import Graph, Value
from taso.graph.index import evaluate
from taso.graph.numbers import Float64
from taso.graph.operator import REGISTRY, Attrs, AttrValue, Trait, Weight
from taso.graph.types import DType, TensorType
from taso.rules import primitives
from taso.rules.collection import library as packaged
from taso.rules.collection import read
from taso.rules.expression import Bindings, Literal, show, value_of
from taso.rules.expression import Value as RuleValue
from taso.rules.instances import Instance, draw_instances
from taso.rules.pattern import PatternNode, Port, Ref, Rule, Status
from taso.rules.tester import test_rule as try_rule
from taso.rules.text import parse_rule
from taso.rules.verifier import prove, verify

Array = NDArray[np.generic]
SECONDS = 60.0
RULES = read(Path(taso.__file__).parent / "rules" / "lowering" / "onednn.rules")
BY_NAME = {rule.id: rule for rule in RULES}
X = TensorType(DType.FLOAT, (3, 4))
ONE = TensorType(DType.FLOAT, (1,))

try:
    library()
    _MISSING = ""
except BackendUnavailable as error:
    _MISSING = str(error)
else:
    from taso.backends.onednn.backend import OneDNNBackend

needs_library = pytest.mark.skipif(bool(_MISSING), reason=_MISSING or "oneDNN loads")


# ── the proofs ───────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.id)
def test_every_replacement_is_proved_and_no_trial_refutes_it(rule: Rule) -> None:
    found = verify(rule, seconds=SECONDS, trials=4, small=False)
    assert found.status is Status.PROVED, found.certificate


def test_names_are_there_once_and_no_rule_is_packaged() -> None:
    assert all(BY_NAME) and len(BY_NAME) == len(RULES)
    used = {node.op.domain for rule in packaged() for node in rule.source}
    made = {node.op.name for rule in packaged() for node in rule.target if node.op.domain}
    # what transforms a filter is folded, for it reads weights alone
    assert used == {""} and made == {"winograd_filter"}


# ── the backend's tables ─────────────────────────────────────────────────────────────────────────────────────────

_SAMPLES: dict[str, list[dict[str, AttrValue]]] = {
    "Clip": [{"min": low, "max": high} for low in (None, -0.5) for high in (None, 0.75)],
    "Gelu": [{"approximate": "none"}, {"approximate": "tanh"}],
}


def _settings(name: str) -> Iterator[Attrs]:
    """Attributes to ask a table for: unequal numbers where an operator has numbers."""
    op = REGISTRY[name]
    numbers: dict[str, AttrValue] = {n: 0.3 + 0.4 * i for i, n in enumerate(op.attributes)}
    for given in _SAMPLES.get(name, [numbers]):
        yield op.complete(given)


def _matched(
    types: Sequence[TensorType], name: str, attrs: Attrs, numbers: Mapping[int, float]
) -> Iterator[list[EltwisePostOp]]:
    """What rules with one operator on the left say of it, as oneDNN's algorithms; `numbers` are constant inputs."""
    for rule in RULES:
        node = rule.source[0]
        bound: dict[str, RuleValue] = {}
        if len(rule.source) > 1 or node.op.name != name or len(node.inputs) != len(types):
            continue
        if node.bind(types, attrs, bound) is not None:
            continue
        variables = {str(ref): t for ref, t in zip(node.inputs, types, strict=True)}
        held = {str(node.inputs[i]): np.asarray(value) for i, value in numbers.items()}
        env = Bindings(variables, bound, frozenset(held), held)
        if rule.check_conditions(env) is None and (found := _algorithms(rule, env)) is not None:
            yield found


def _algorithms(rule: Rule, env: Bindings) -> list[EltwisePostOp] | None:
    """The target as a chain of oneDNN's functions of one element; None where it is something else."""
    found = []
    for place, node in enumerate(rule.target):
        known = {op: name for name, op in primitives.ELTWISE.items()}
        before: Ref = Port(place - 1, 0)
        if node.op not in known or place and node.inputs != (before,):
            return None
        alpha, beta = (_number(node, name, env) for name in ("alpha", "beta"))
        found.append(EltwisePostOp(known[node.op], alpha, beta))
    return found


def _number(node: PatternNode, name: str, env: Bindings) -> float:
    """A parameter as the backend gives it to oneDNN: 0 where there is none."""
    if name not in node.op.attributes:
        return 0.0
    value = value_of(dict(node.attrs).get(name, Literal(0)), env)
    if value is None:
        return -math.inf if name == "alpha" else math.inf
    over, under = value if isinstance(value, tuple) else (value, 1)
    assert isinstance(over, (int, float)) and isinstance(under, (int, float))
    return over / under


@pytest.mark.parametrize("name", sorted(kernels._UNARY))
def test_each_function_of_one_element_has_a_rule_with_the_parameters_that_the_backend_passes(name: str) -> None:
    for attrs in _settings(name):
        wanted = list(kernels._UNARY[name](attrs))
        assert wanted in list(_matched([X], name, attrs, {})), (attrs, wanted)


@pytest.mark.parametrize("reverse", [False, True])
def test_each_operator_with_a_number_has_a_rule_with_the_parameters_that_the_backend_passes(reverse: bool) -> None:
    seen = set()
    for name, op in REGISTRY.items():
        for value in (0.0, 0.25, 1.0, 1.5, 2.0, -4.0):
            ops = kernels._with_scalar(name, value, reverse)
            if ops is not None:
                seen.add(name)
                types = [ONE, X] if reverse else [X, ONE]
                found = list(_matched(types, name, op.complete({}), {0 if reverse else 1: value}))
                assert list(ops) in found, (name, value, ops, found)
    assert {"Add", "Mul", "Sub", "Div", "Max"} <= seen


@pytest.mark.parametrize("name", sorted(kernels._BINARY))
def test_each_operator_of_two_operands_has_a_rule_both_ways_round(name: str) -> None:
    algorithm = f"dnnl_binary_{kernels._BINARY[name]}"
    texts = {f"{name}(x, y) => {algorithm}(x, y)"}
    if REGISTRY[name].has(Trait.COMMUTATIVE):
        texts.add(f"{name}(y, x) => {algorithm}(x, y)")
    if name == "Sub":
        texts.add(f"Sub(y, x) => dnnl_eltwise_linear({algorithm}(x, y), alpha=-1, beta=0)")
    assert texts <= {rule.name for rule in RULES}


PRIMITIVES = {
    "Conv": {"dnnl_convolution"}, "ConvTranspose": {"dnnl_deconvolution"}, "MatMul": {"dnnl_matmul"},
    "Gemm": {"dnnl_matmul"}, "MaxPool": {"dnnl_pooling_max"},
    "AveragePool": {"dnnl_pooling_avg_include_padding", "dnnl_pooling_avg_exclude_padding"},
    "GlobalAveragePool": {"dnnl_pooling_avg_exclude_padding", "dnnl_reduction_mean"},
    "GlobalMaxPool": {"dnnl_pooling_max", "dnnl_reduction_max"}, "ReduceSum": {"dnnl_reduction_sum"},
    "ReduceMean": {"dnnl_reduction_mean"}, "ReduceMax": {"dnnl_reduction_max"}, "ReduceMin": {"dnnl_reduction_min"},
    "BatchNormalization": {"dnnl_binary_mul", "dnnl_binary_add"}, "Softmax": {"dnnl_softmax"},
    "LogSoftmax": {"dnnl_logsoftmax"}, "LayerNormalization": {"dnnl_layer_normalization"},
    **dict.fromkeys(("InstanceNormalization", "GroupNormalization"),
                    {"dnnl_layer_normalization", "dnnl_binary_mul", "dnnl_binary_add"}),
    "RMSNormalization": {"dnnl_eltwise_square", "dnnl_reduction_mean", "dnnl_eltwise_pow", "dnnl_binary_mul"},
    "LRN": {"dnnl_lrn_across_channels"}, "Concat": {"dnnl_concat"}, "Split": {"dnnl_reorder"},
    "Slice": {"dnnl_reorder"}, "Transpose": {"dnnl_reorder"},
}  # fmt: skip


def test_each_anchor_has_rules_to_each_primitive_that_it_becomes() -> None:
    assert PRIMITIVES.keys() == kernels._ANCHORS.keys()
    for name, wanted in PRIMITIVES.items():
        own = [r for r in RULES if len(r.source) == 1 and r.source[0].op.name == name]
        assert wanted <= {node.op.name for rule in own for node in rule.target}, name


def test_what_is_taken_apart_becomes_what_there_are_rules_for() -> None:
    # an equation is no pattern: tests/backends/test_operator_kernels.py compares these with their definitions
    assert kernels._TAKEN_APART.keys() == {"Einsum", "DepthToSpace", "SpaceToDepth"}
    assert not kernels._TAKEN_APART.keys() & kernels._ANCHORS.keys()


def test_a_table_with_another_parameter_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(kernels._UNARY, "HardSwish", kernels._one("hardswish", 1 / 5, 0.5))
    attrs = REGISTRY["HardSwish"].complete({})
    assert list(kernels._UNARY["HardSwish"](attrs)) not in list(_matched([X], "HardSwish", attrs, {}))


# ── oneDNN computes what the rules say ───────────────────────────────────────────────────────────────────────────

_POSITIVE = {"Log", "Sqrt", "Reciprocal", "Div", "Pow", "BatchNormalization", "LRN"}
"""Operators that are tried on positive numbers away from 0."""


def _instance(rule: Rule) -> Instance | None:
    """A small case in which all tensors are float32."""
    for seed in range(20):
        for instance in draw_instances(rule, random.Random(seed), 12):
            if all(t.dtype is DType.FLOAT for t in instance.types.values()) and not _is_odd(rule, instance):
                return instance
    return None


def _is_odd(rule: Rule, instance: Instance) -> bool:
    """Settings that oneDNN 3.2 calls invalid: output padding not below the stride."""
    strides, extra = (instance.attrs.get(name) for name in "se")
    transposed = rule.source[0].op.name == "ConvTranspose"
    if transposed and isinstance(extra, tuple) and isinstance(strides, tuple):
        return any(int(str(e)) >= int(str(s)) for e, s in zip(extra, strides, strict=True))
    return False


def _values(rule: Rule, instance: Instance) -> dict[str, Array]:
    rng = np.random.default_rng(3)
    positive = any(node.op.name in _POSITIVE for node in rule.source)
    values: dict[str, Array] = {}
    for name, t in instance.types.items():
        drawn = rng.uniform(0.5, 2, t.static_shape) if positive else rng.normal(size=t.static_shape)
        filled = instance.fills.get(name)
        values[name] = (drawn if filled is None else np.full(t.static_shape, float(filled))).astype(np.float32)
    return values


def _constants(rule: Rule) -> set[str]:
    """Variables that a rule wants to be weights, or the number of which it speaks of."""
    asked = " ".join([*map(show, rule.conditions), *(show(e) for node in rule.target for _, e in node.attrs)])
    return {n for n in rule.variables if any(f"{word}({n}" in asked for word in ("is_weight", "filled", "value"))}


def _source_graph(rule: Rule, instance: Instance, values: Mapping[str, Array]) -> Graph:
    graph, constants = Graph(), _constants(rule)
    held: dict[str, Value] = {
        name: graph.add_weight(Weight(t, values[name])) if name in constants else graph.add_input(name, t)
        for name, t in instance.types.items()
    }
    made: list[tuple[Value, ...]] = []
    for node in rule.source:
        inputs = [None if r is None else held[r] if isinstance(r, str) else made[r.node][r.output] for r in node.inputs]
        attrs = node.attributes([None if v is None else v.type for v in inputs], instance.environment)
        made.append(graph.make(node.op, inputs, attrs).outputs)
    ports = [old for old, _ in rule.outputs if isinstance(old, Port)]
    graph.set_outputs([(f"y{i}", made[port.node][port.output]) for i, port in enumerate(ports)])
    return graph


def _target_values(rule: Rule, instance: Instance, values: Mapping[str, Array]) -> list[Array]:
    """The right side by oneDNN's formulas in float64."""
    done: list[tuple[Array, ...]] = []
    types: list[tuple[TensorType, ...]] = []
    for node in rule.target:
        given = [None if r is None else values[r] if isinstance(r, str) else done[r.node][r.output]
                 for r in node.inputs]  # fmt: skip
        kinds = [None if r is None else instance.types[r] if isinstance(r, str) else types[r.node][r.output]
                 for r in node.inputs]  # fmt: skip
        attrs = node.attributes(kinds, instance.environment)
        assert node.op.meaning is not None
        done.append(tuple(evaluate(m, given, Float64()) for m in node.op.meaning(kinds, attrs)))
        types.append(node.op.types_of(kinds, attrs))
    return [done[new.node][new.output] for _, new in rule.outputs if isinstance(new, Port)]


def relative_error(got: Array, wanted: Array) -> float:
    a, b = got.astype(np.float64), wanted.astype(np.float64)
    assert a.shape == b.shape and np.isfinite(b).all()
    return float(np.abs(a - b).max() / max(float(np.abs(b).max()), 1e-30))


RUN = [rule for rule in RULES if not any(node.op.internal for node in rule.source)]


@needs_library
@pytest.mark.parametrize("rule", RUN, ids=lambda rule: rule.id)
def test_the_backend_computes_what_the_right_side_says(rule: Rule) -> None:
    instance = _instance(rule)
    assert instance is not None, "no small case was found"
    values = _values(rule, instance)
    graph = _source_graph(rule, instance, values)
    feeds = {name: values[name] for name in graph.input_names}
    got = OneDNNBackend().compile(graph)(feeds)
    for made, wanted in zip(got.values(), _target_values(rule, instance, values), strict=True):
        assert relative_error(made, wanted) < 1e-4


_PARAMETERS: dict[str, dict[str, float]] = {
    "relu": {"alpha": 0.25}, "elu": {"alpha": 0.75}, "linear": {"alpha": -1.5, "beta": 0.25},
    "hardsigmoid": {"alpha": 0.25, "beta": 0.375}, "hardswish": {"alpha": 0.25, "beta": 0.375},
    "swish": {"alpha": 1.5}, "soft_relu": {"alpha": 1.5}, "clip_v2": {"alpha": -0.5, "beta": 0.75},
    "pow": {"alpha": 1.5, "beta": 3.0},
}  # fmt: skip


def _eltwise(name: str, x: NDArray[np.float32], parameters: Mapping[str, float]) -> tuple[Array, Array]:
    """What oneDNN's eltwise gives, and its formula."""
    desc = p.MemoryDesc.of_array(x)
    primitive = p.eltwise(desc, desc, name, alpha=parameters.get("alpha", 0.0), beta=parameters.get("beta", 0.0))
    memories = {p.SRC: p.Memory.from_array(x), p.DST: p.Memory.allocate(desc)}
    if p.SCRATCHPAD in primitive.arguments:
        memories[p.SCRATCHPAD] = p.Memory.allocate(primitive.arguments[p.SCRATCHPAD])
    primitive.bind(memories)()
    op, t = primitives.ELTWISE[name], TensorType(DType.FLOAT, x.shape)
    assert op.meaning is not None
    (meaning,) = op.meaning([t], op.complete(parameters))
    return memories[p.DST].array().copy(), evaluate(meaning, [x], Float64())


@needs_library
@pytest.mark.parametrize("name", sorted(primitives.ELTWISE))
def test_the_formula_of_an_algorithm_is_what_the_library_computes(name: str) -> None:
    x = np.linspace(-6, 6, 97, dtype=np.float32)
    x = np.abs(x) + np.float32(0.25) if name in ("log", "sqrt") else x
    got, wanted = _eltwise(name, x, _PARAMETERS.get(name, {}))
    assert relative_error(got, wanted) < 1e-5


@needs_library
def test_the_library_takes_no_clip_whose_bounds_are_the_wrong_way_round() -> None:
    with pytest.raises(BackendError, match="invalid_arguments"):
        _eltwise("clip_v2", np.linspace(-6, 6, 97, dtype=np.float32), {"alpha": 3.0, "beta": -2.0})


@needs_library
def test_erf_by_gelu_is_right_to_rounding_where_its_clipping_and_offset_matter() -> None:
    x = np.concatenate([np.linspace(-20, 20, 401), [0.0, 1e-30, -1e-30, 1e-38, 1e-20, 1e-7, 9.9, -9.9, 1e30]])
    graph = Graph()
    y = graph.make(REGISTRY["Erf"], (graph.add_input("x", TensorType(DType.FLOAT, x.shape)),), {}).output
    graph.set_outputs([("y", y)])
    feeds: dict[str, Array] = {"x": x.astype(np.float32)}
    got, wanted = OneDNNBackend().compile(graph)(feeds)["y"], evaluate_graph(graph, feeds)["y"]
    assert relative_error(got, wanted) < 1e-6


# ── wrong parameters ─────────────────────────────────────────────────────────────────────────────────────────────

WRONG = {
    "hard swish with 1/5": "HardSwish(x) => dnnl_eltwise_hardswish(x, alpha=(1, 5), beta=(1, 2))",
    "hard swish without its shift": "HardSwish(x) => dnnl_eltwise_hardswish(x, alpha=(1, 6), beta=0)",
    "gelu by tanh": "Gelu(x) => dnnl_eltwise_gelu_tanh(x)",
    "gelu by erf": "Gelu(x, approximate='tanh') => dnnl_eltwise_gelu_erf(x)",
    "clip the wrong way round": "Clip(x, min=-1, max=2) => dnnl_eltwise_clip_v2(x, alpha=2, beta=-1)",
    "clip by other names": "Clip(x, min=a, max=b) => dnnl_eltwise_clip_v2(x, alpha=b, beta=a)",
    "leaky relu by elu": "LeakyRelu(x, alpha=a) => dnnl_eltwise_elu(x, alpha=a)",
    "leaky relu by relu": "LeakyRelu(x, alpha=a) => dnnl_eltwise_relu(x)",
    "selu without gamma": "Selu(x, alpha=a, gamma=g) => dnnl_eltwise_elu(x, alpha=a)",
    "hard sigmoid swapped": "HardSigmoid(x, alpha=a, beta=b) => dnnl_eltwise_hardsigmoid(x, alpha=b, beta=a)",
    "softplus of twice": "Softplus(x) => dnnl_eltwise_soft_relu(x, alpha=2)",
    "reciprocal of the square": "Reciprocal(x) => dnnl_eltwise_pow(x, alpha=1, beta=-2)",
    "number subtracted": "Sub(x, c) => dnnl_eltwise_linear(x, alpha=1, beta=value(c)) where rank(c) == 0",
    "divided by a number": "Div(c, x) => dnnl_eltwise_linear(x, alpha=(1, value(c)), beta=0) where rank(c) == 0",
    "max with one": "Max(x, c) => dnnl_eltwise_relu(x) where filled(c, 1) and size(c) == 1 and rank(c) == 0",
    "swapped difference": "Sub(y, x) => dnnl_binary_sub(x, y) where same_shape(x, y)",
    "sum twice": "Add(x, y) => dnnl_sum(x, y, scale=2) where same_shape(x, y)",
    "dilations not counted from 0": "Conv(x, w, dilations=d) => dnnl_convolution(x, w, strides=(1,), dilations=d, "
    "padding_l=(0,), padding_r=(0,)) where rank(x) == 3",
    "padding behind before": "Conv(x, w, pads=p) => dnnl_convolution(x, w, strides=(1,), dilations=(0,), "
    "padding_l=(p[1],), padding_r=(p[0],)) where rank(x) == 3",
    "groups not told apart": "Conv(x, w, group=2) => dnnl_convolution(x, w, strides=(1,), dilations=(0,), "
    "padding_l=(0,), padding_r=(0,)) where rank(x) == 3",
    "weights of a deconvolution as they are": "ConvTranspose(x, w) => dnnl_deconvolution(x, w, strides=(1,), "
    "dilations=(0,), padding_l=(0,), padding_r=(0,)) where rank(x) == 3 and dim(w, 0) == dim(w, 1)",
    "output padding forgotten": "ConvTranspose(x, w, output_padding=e) => dnnl_deconvolution(x, dnnl_permute_axes(w, "
    "order=(1, 0, 2)), strides=(1,), dilations=(0,), padding_l=(0,), padding_r=(0,)) where rank(x) == 3",
    "factor forgotten": "Gemm(a, b, c, alpha=f) => dnnl_matmul(a, b, c) where rank(c) == 1 and dim(c, 0) == dim(b, 1)",
    "padding counted": "AveragePool(x, kernel_shape=k, pads=p) => dnnl_pooling_avg_include_padding(x, kernel=k, "
    "strides=(1,), dilations=(0,), padding_l=p[:1], padding_r=p[1:]) where rank(x) == 3",
    "padding not counted": "AveragePool(x, kernel_shape=k, pads=p, count_include_pad=1) => "
    "dnnl_pooling_avg_exclude_padding(x, kernel=k, strides=(1,), dilations=(0,), padding_l=p[:1], padding_r=p[1:]) "
    "where rank(x) == 3",
    "rounded down": "MaxPool(x, kernel_shape=k, strides=s, ceil_mode=1) => dnnl_pooling_max(x, kernel=k, strides=s, "
    "dilations=(0,), padding_l=(0,), padding_r=(0,)) where rank(x) == 3",
    "mean by sum": "ReduceMean(x, axes=(1,)) => dnnl_reduction_sum(x) where rank(x) == 2",
    "scale and shift swapped": "BatchNormalization(x, s, b, m, v, epsilon=e) => dnnl_binary_add(dnnl_binary_mul(x, "
    "Sub(b, Mul(m, Div(s, Sqrt(dnnl_eltwise_linear(v, alpha=1, beta=e)))))), Div(s, Sqrt(dnnl_eltwise_linear(v, "
    "alpha=1, beta=e)))) where rank(x) == 2 and same_dtype(x, s, b, m, v)",
    "softmax along another axis": "Softmax(x, axis=0) => dnnl_softmax(x, axis=1) where rank(x) == 2",
    "softmax's logarithm": "LogSoftmax(x, axis=1) => dnnl_softmax(x, axis=1) where rank(x) == 2",
    "scale for shift": "LayerNormalization(x, s, b, axis=1, epsilon=e) => dnnl_layer_normalization(x, b, s, epsilon=e) "
    "where rank(x) == 2",
    "a window of even size": "LRN(x, size=4, alpha=a, beta=b, bias=k) => dnnl_lrn_across_channels(x, local_size=4, "
    "alpha=a, beta=b, k=k) where rank(x) == 3",
    "concat in another order": "Concat(x, y, axis=0) => dnnl_concat(y, x, axis=0) where rank(x) == 2",
    "transposed back": "Transpose(x, perm=(1, 2, 0)) => dnnl_reorder(dnnl_permute_axes(x, order=(2, 0, 1))) "
    "where rank(x) == 3",
    "steps in another order": "Relu(Add(Conv(x, w), y)) => dnnl_sum(dnnl_eltwise_relu(dnnl_convolution(x, w, "
    "strides=(1,), dilations=(0,), padding_l=(0,), padding_r=(0,))), y, scale=1) where rank(x) == 3 and "
    "dim(w, 2) == 1 and rank(y) == 3 and dim(y, 0) == dim(x, 0) and dim(y, 1) == dim(w, 0) and dim(y, 2) == dim(x, 2)",
}  # fmt: skip


@pytest.mark.parametrize("text", list(WRONG.values()), ids=list(WRONG))
def test_a_wrong_parameter_is_refused_by_trials_and_by_the_proof(text: str) -> None:
    rule = parse_rule(text.replace(" where ", "\nwhere "))
    assert try_rule(rule).status is Status.REFUTED
    found = prove(rule, SECONDS)
    assert not found.done and "time allowed" not in found.reason


# ── the second normal form of the proof ──────────────────────────────────────────────────────────────────────────


def _lattice(rng: random.Random, depth: int) -> tuple[str, str]:
    """A random term of maxima and minima, as rule text and as Python."""
    if depth == 0 or rng.random() < 0.15:
        name = rng.choice(("x", "y", "z", "k"))
        return name, name
    if rng.random() < 0.25:
        text, code = _lattice(rng, depth - 1)
        return f"Neg({text})", f"-({code})"
    (a, b), (c, d) = _lattice(rng, depth - 1), _lattice(rng, depth - 1)
    name = rng.choice(("max", "min"))
    return f"{name.title()}({a}, {c})", f"{name}({b}, {d})"


_GRID = [(x, y, z) for x in (-2, -1, -0.5, 0.5, 1, 2) for y in (-1.5, -0.75, 0.25, 1.25) for z in (-3, -0.6, 0.6, 3)]


def test_maxima_and_minima_are_found_equal_where_they_are_and_nowhere_else() -> None:
    """Of terms in three variables and the number 1, whose equality few points decide."""
    rng, equal = random.Random(11), 0
    for _ in range(400):
        (left, a), (right, b) = _lattice(rng, 2), _lattice(rng, 2)
        if not left.startswith(("Max", "Min", "Neg")) or {"x", "y", "z"} & set(right) > {"x", "y", "z"} & set(left):
            continue
        text = f"Max(Max(Max({left}, x), Max(y, z)), k) => Max(Max(Max({right}, x), Max(y, z)), k)"
        one, two = (f"max({code}, x, y, z, k)" for code in (a, b))
        if rng.random() < 0.5:
            text = f"Min(Min(Min({left}, x), Min(y, z)), k) => Min(Min(Min({right}, x), Min(y, z)), k)"
            one, two = (f"min({code}, x, y, z, k)" for code in (a, b))
        rule = parse_rule(f"{text}\nwhere filled(k, 1) and " + " and ".join(f"rank({v}) == 0" for v in "kxyz"))
        points = [{"x": x, "y": y, "z": z, "k": 1} for x, y, z in _GRID]
        same = all(eval(one, {}, {**at, "max": max, "min": min}) == eval(two, {}, {**at, "max": max, "min": min})
                   for at in points)  # fmt: skip
        assert prove(rule, SECONDS).done == same, text
        equal += same
    assert equal > 20


CLAMPS = {
    "Min(Max(x, a), b) => Max(Min(x, b), a) where filled(a, -1) and filled(b, 3)": True,
    "Min(Max(x, a), b) => Max(Min(x, b), a) where filled(a, 3) and filled(b, -1)": False,
    "Max(x, Min(y, z)) => Min(Max(x, y), Max(x, z)) where rank(x) >= 0": True,
    "Max(x, Min(y, z)) => Max(Min(x, y), Min(x, z)) where rank(x) >= 0": False,
    "Max(x, Min(x, y)) => x where same_shape(x, y)": True,
    "Max(x, Min(x, y)) => Min(x, y) where same_shape(x, y)": False,
    "Min(Neg(Max(x, y)), z) => Neg(Max(Max(x, y), Neg(z))) where rank(x) >= 0": True,
}


@pytest.mark.parametrize("text, true", list(CLAMPS.items()))
def test_bounds_change_places_only_where_they_may(text: str, true: bool) -> None:
    equation, condition = text.split(" where ")
    variables = [v for v in "xyzab" if re.search(rf"\b{v}\b", equation)]
    rule = parse_rule(f"{equation}\nwhere {condition} and same_shape({', '.join(variables)})")
    assert prove(rule, SECONDS).done is true


ONE_AS_THE_OTHER = {
    "Reciprocal(Add(Exp(Neg(x)), k)) => Sigmoid(x) where filled(k, 1) and rank(k) == 0": True,
    "Reciprocal(Add(Exp(x), k)) => Sigmoid(x) where filled(k, 1) and rank(k) == 0": False,
    "Log(Add(Exp(x), k)) => Softplus(x) where filled(k, 1) and rank(k) == 0": True,
    "Elu(x, alpha=a) => LeakyRelu(x, alpha=a)": False,
    "LeakyRelu(x, alpha=1) => x": False,  # max(x, 0) + min(x, 0) = x is no law of this normal form
    "HardSigmoid(x, alpha=0.5, beta=0.5) => Clip(HardSigmoid(x, alpha=0.5, beta=0.5), min=0, max=1)": True,
    "HardSigmoid(x, alpha=0.5, beta=0.5) => Clip(HardSigmoid(x, alpha=0.5, beta=0.5), min=0, max=0.75)": False,
}


@pytest.mark.parametrize("text, found", list(ONE_AS_THE_OTHER.items()))
def test_functions_are_opened_by_their_definitions(text: str, found: bool) -> None:
    assert prove(parse_rule(text.replace(" where ", "\nwhere ")), SECONDS).done is found
