"""Values between kernels as bfloat16: where they are stored so, and that what is computed of them is right."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import test_onednn_executor as others
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from test_onednn_executor import Build, feeds_for, worst
from test_precision import ROUNDING, needs_bf16

import taso
from taso.backends import building
from taso.backends.lowering import BF16, FLOAT32, INT8, PLAIN, Kernel, Operand, Plan, Step, is_view, lower
from taso.backends.onednn import kernels
from taso.backends.onednn.backend import OneDNNBackend
from taso.backends.onednn.executor import Program
from taso.backends.onednn.narrow import STORING, NarrowLowering
from taso.backends.ordering import planned_peak
from taso.backends.sampling import RandomSupply
from taso.graph.evaluate import evaluate_graph
from taso.graph.graph import Graph, Value
from taso.graph.onnx_export import export
from taso.graph.operator import REGISTRY, Attrs
from taso.graph.types import DType, TensorType
from taso.search.verify import tolerance_of

pytestmark = needs_bf16

FEW = 6 * ROUNDING
"""A few roundings one after the other, each of which is half a unit at most."""


def compiled(graph: Graph, precision: str, threads: int = 1) -> Program:
    return OneDNNBackend(threads, precision).compile(graph)


def planned(graph: Graph) -> Plan:
    return lower(graph, OneDNNBackend(1, BF16).lowering)


def stored(graph: Graph) -> set[str]:
    """The operators whose results lie in memory as bfloat16."""
    plan = planned(graph)
    return {v.node.op.name for job in plan.jobs for v in job.results if v in plan.narrow}


# ── each operator, with bfloat16 coming in and going out ─────────────────────────────────────────────────────────

Maker = Callable[[Build, Value], Value]


def _image(b: Build, make: Maker, channels: int = 32) -> Graph:
    """The operator between two convolutions, which leave it as a kernel of its own by reading its operand too."""
    x = b.conv(b.input(1, 16, 8, 8), channels, 3)
    made = make(b, x)
    return b.outputs(b.conv(made, 16), b.conv(x, 16))


def _rows(b: Build, make: Maker) -> Graph:
    x = b.op("MatMul", b.input(2, 16, 64), b.weight(64, 64))
    made = make(b, x)
    inner = made.dim(made.type.rank - 1)
    return b.outputs(b.op("MatMul", made, b.weight(inner, 32)), b.op("MatMul", x, b.weight(64, 32)))


def _norm(b: Build, x: Value) -> Value:
    c = x.dim(1)
    return b.op("BatchNormalization", x, b.positive(c), b.weight(c), b.weight(c), b.positive(c))


def _unary(name: str) -> Maker:
    return lambda b, x: b.op(name, x)


IMAGES: dict[str, Maker] = {
    "Conv": lambda b, x: b.conv(x, 48, 3),
    "Conv of few": lambda b, x: b.conv(x, 8, 3),
    "Conv by channel": lambda b, x: b.conv(x, 32, 3, 32),
    "Conv in groups": lambda b, x: b.conv(x, 32, 3, 2),
    "Conv with a stride": lambda b, x: b.conv(x, 32, 3, strides=(2, 2)),
    "ConvTranspose": lambda b, x: b.op("ConvTranspose", x, b.weight(32, 16, 2, 2), strides=(2, 2)),
    "MaxPool": lambda b, x: b.op("MaxPool", x, kernel_shape=(3, 3), strides=(2, 2), pads=(1, 1, 1, 1)),
    "AveragePool": lambda b, x: b.op("AveragePool", x, kernel_shape=(2, 2), strides=(2, 2)),
    "GlobalAveragePool": lambda b, x: b.op("GlobalAveragePool", x),
    "BatchNormalization": _norm,
    "BatchNormalization and a sum": lambda b, x: b.op("Relu", b.op("Add", _norm(b, x), b.conv(x, 32))),
    "a sum of two": lambda b, x: b.op("Relu", b.op("Add", b.conv(x, 32), x)),
    "a gate": lambda b, x: b.op("Mul", x, b.op("Sigmoid", b.conv(b.op("GlobalAveragePool", x), 32))),
    "Mul by channel": lambda b, x: b.op("Mul", x, b.positive(1, 32, 1, 1)),
    "Max": lambda b, x: b.op("Max", x, b.conv(x, 32)),
    "Concat by channel": lambda b, x: b.op("Concat", x, b.conv(x, 16), axis=1),
    "Concat by row": lambda b, x: b.op("Concat", x, b.conv(x, 32), axis=2),
    "Split": lambda b, x: b.op("Add", *b.ops("Split", b.op("Relu", x), axis=1, split=(16, 16))),
    "Slice": lambda b, x: b.op("Slice", b.op("Relu", x), starts=(1,), ends=(5,), axes=(2,)),
    "Transpose": lambda b, x: b.op("Transpose", x, perm=(0, 1, 3, 2)),
    "Reshape": lambda b, x: b.op("Reshape", b.op("Transpose", x, perm=(0, 1, 3, 2)), shape=(0, 0, 4, 16)),
    **{n: _unary(n) for n in ("Relu", "Sigmoid", "Tanh", "Abs", "Elu", "LeakyRelu", "Gelu", "HardSwish", "Mish")},
    **{n: _unary(n) for n in ("Swish", "HardSigmoid", "Softplus", "Neg")},
    "Clip": lambda b, x: b.op("Clip", x, min=-0.5, max=0.5),
}
ROWS: dict[str, Maker] = {
    "MatMul": lambda b, x: b.op("MatMul", x, b.weight(64, 48)),
    "MatMul of few": lambda b, x: b.op("MatMul", x, b.weight(64, 8)),
    "MatMul with a sum": lambda b, x: b.op("Add", b.op("Add", b.op("MatMul", x, b.weight(64, 64)), b.weight(64)), x),
    "MatMul with Gelu": lambda b, x: b.op("Gelu", b.op("Add", b.op("MatMul", x, b.weight(64, 128)), b.weight(128))),
    "two that are computed": lambda b, x: b.op("MatMul", b.op("MatMul", x, b.op("Transpose", x, perm=(0, 2, 1))), x),
    "Gemm": lambda b, x: b.op(
        "Gemm", b.op("Reshape", x, shape=(-1, 64)), b.weight(32, 64), b.weight(32), transB=1, alpha=0.5
    ),
    "Softmax": _unary("Softmax"),
    "Softmax off the last axis": lambda b, x: b.op("Softmax", x, axis=1),
    "LayerNormalization": lambda b, x: b.op("LayerNormalization", x, b.positive(64), b.weight(64)),
    "Split in heads": lambda b, x: b.op("Mul", *b.ops("Split", b.op("Tanh", x), axis=2, split=(32, 32))),
    "Slice of the first": lambda b, x: b.op("Slice", b.op("Tanh", x), starts=(0,), ends=(1,), axes=(1,)),
    "Slice of what lies behind": lambda b, x: b.op("Slice", b.op("Tanh", x), starts=(1,), ends=(2,), axes=(0,)),
    "Squeeze": lambda b, x: b.op("Squeeze", b.op("Unsqueeze", b.op("Tanh", x), axes=(0,)), axes=(0,)),
}
MADE = {
    **{name: lambda make=make: _image(Build(), make) for name, make in IMAGES.items()},
    **{name: lambda make=make: _rows(Build(), make) for name, make in ROWS.items()},
}  # fmt: skip


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("name", MADE)
def test_an_operator_between_values_of_bfloat16_gives_what_its_definition_says(name: str, threads: int) -> None:
    graph = MADE[name]()
    plan = planned(graph)
    assert any(any(o.narrow for o in job.kernel.operands) for job in plan.jobs)
    for seed in (1, 2):
        feeds = feeds_for(graph, seed)
        found = compiled(graph, BF16, threads)(feeds)
        assert worst(found, evaluate_graph(graph, feeds, wide=True)) < FEW


def test_all_operators_that_store_bfloat16_are_among_those_that_are_tried() -> None:
    tried: set[str] = set()
    for make in MADE.values():
        tried |= stored(make()) | {n.op.name for n in make().operators}
    assert tried >= STORING - {"Identity", "Flatten", "Min"}


def attention(rows: int = 32, heads: int = 4, size: int = 64) -> Graph:
    b = Build()
    x = b.op("LayerNormalization", b.input(1, rows, size), b.positive(size), b.weight(size))

    def split_up(name: str) -> Value:
        made = b.op("Add", b.op("MatMul", x, b.weight(size, size)), b.weight(size))
        order = (0, 2, 3, 1) if name == "k" else (0, 2, 1, 3)
        return b.op("Transpose", b.op("Reshape", made, shape=(0, 0, heads, size // heads)), perm=order)

    q, k, v = map(split_up, "qkv")
    scores = b.op("Softmax", b.op("Mul", b.op("MatMul", q, k), b.constant(0.25)))
    seen = b.op("Transpose", b.op("MatMul", scores, v), perm=(0, 2, 1, 3))
    joined = b.op("MatMul", b.op("Reshape", seen, shape=(0, 0, size)), b.weight(size, size))
    y = b.op("LayerNormalization", b.op("Add", joined, x), b.positive(size), b.weight(size))
    wide = b.op("Gelu", b.op("Add", b.op("MatMul", y, b.weight(size, 4 * size)), b.weight(4 * size)))
    z = b.op("Add", b.op("MatMul", wide, b.weight(4 * size, size)), y)
    return b.outputs(b.op("LayerNormalization", z, b.positive(size), b.weight(size)))


def residual(blocks: int = 6) -> Graph:
    b = Build()
    x = b.op("Relu", b.conv(b.input(1, 3, 32, 32), 32, 7, strides=(2, 2)))
    x = b.op("MaxPool", x, kernel_shape=(3, 3), strides=(2, 2), pads=(1, 1, 1, 1))
    for _ in range(blocks):
        x = b.op("Relu", b.op("Add", b.conv(b.op("Relu", b.conv(x, 32, 3)), 32, 3), x))
    pooled = b.op("Flatten", b.op("GlobalAveragePool", x), axis=1)
    return b.outputs(b.op("Gemm", pooled, b.weight(32, 20), b.weight(20)))


MODELS = {"attention": attention, "residual": residual}


@pytest.mark.parametrize("name", MODELS)
def test_models_stay_within_the_documented_tolerance(name: str) -> None:
    graph = MODELS[name]()
    feeds = feeds_for(graph)
    wanted = evaluate_graph(graph, feeds, wide=True)
    found = worst(compiled(graph, BF16)(feeds), wanted)
    assert 1e-5 < found < tolerance_of(graph, BF16)


# ── what is stored so ────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("name", MODELS)
def test_what_lies_between_the_kernels_of_a_model_takes_half_the_bytes(name: str) -> None:
    graph = MODELS[name]()
    plan, exact = planned(graph), lower(graph, OneDNNBackend(1).lowering)
    between = [v for job in plan.jobs for v in job.results if not any(v is out for _, out in graph.outputs)]
    assert between and all(v in plan.narrow for v in between)
    assert not exact.narrow and not any(o.narrow for job in exact.jobs for o in job.kernel.operands)
    bytes_of = [sum(r.nbytes for job in p.jobs for r in job.kernel.results) for p in (plan, exact)]
    ends = sum(v.type.nbytes for _, v in graph.outputs)
    assert 2 * (bytes_of[0] - ends) == bytes_of[1] - ends


def test_an_arena_is_smaller_by_what_its_values_are() -> None:
    graph = attention()
    wide, narrow = (compiled(graph, p).peak_bytes for p in (FLOAT32, BF16))
    assert narrow < 0.7 * wide


def test_an_arena_is_as_large_as_is_planned() -> None:
    graph = residual()
    lowering = OneDNNBackend(1, BF16).lowering
    program = compiled(graph, BF16)
    assert program.peak_bytes == planned_peak(graph, lowering)


def test_views_of_bfloat16_move_nothing() -> None:
    b = Build()
    x = b.conv(b.input(1, 16, 8, 8), 32, 3)
    parts = b.ops("Split", b.op("Relu", x), axis=0, split=(1,))
    whole = b.op("Concat", b.conv(parts[0], 32), b.conv(parts[0], 32, 3), axis=0)
    graph = b.outputs(b.conv(b.op("Reshape", whole, shape=(1, 64, 8, 8)), 16), b.conv(whole, 16))
    plan = planned(graph)
    views = [job.kernel for job in plan.jobs if is_view(job.kernel)]
    assert {k.steps[0].op.name for k in views} >= {"Split", "Concat"}
    assert all(o.narrow for k in views for o in (*k.operands, *k.results))
    feeds = feeds_for(graph)
    found = compiled(graph, BF16)(feeds)
    assert worst(found, evaluate_graph(graph, feeds, wide=True)) < FEW


def test_a_sum_of_bfloat16_is_added_in_place() -> None:
    graph = residual(2)
    plan = planned(graph)
    kernel = next(j.kernel for j in plan.jobs if [s.op.name for s in j.kernel.steps] == ["Conv", "Add", "Relu"])
    lowering = OneDNNBackend(1, BF16).lowering
    (operand,) = lowering.in_place(kernel)
    assert kernel.operands[operand].narrow and kernel.results[0].narrow
    recipe = kernels.design(kernel, lowering.layouts, RandomSupply(kernel), operand, precision=BF16)
    assert len(recipe.launches) == 1, "one convolution, and no change of the element type"


@pytest.mark.parametrize("name", ["Sub", "Div", "Exp", "Sqrt", "Floor", "ReduceMean", "ArgMax", "Cast", "Erf"])
def test_what_would_lose_more_than_a_rounding_is_read_in_float32(name: str) -> None:
    b = Build()
    x = b.conv(b.input(1, 16, 8, 8), 32, 3)
    if name in ("Sub", "Div"):
        made = b.op(name, x, b.conv(x, 32))
    elif name == "Cast":
        made = b.op("Cast", b.op("Cast", x, to=DType.INT32), to=DType.FLOAT)
    elif name == "ArgMax":
        made = b.op("Cast", b.op("ArgMax", x, axis=1), to=DType.FLOAT)
    elif name == "ReduceMean":
        made = b.op(name, x, axes=(1,))
    else:
        made = b.op(name, x)
    graph = b.outputs(b.conv(x, 16), made)
    assert x not in planned(graph).narrow


def test_numbers_that_no_product_makes_stay_in_float32() -> None:
    b = Build()
    position = b.op("Cast", b.input(1, 8, dtype=DType.INT32), to=DType.FLOAT)
    for _ in range(6):
        position = b.op("Add", b.op("Mul", position, b.constant(2.0)), b.constant(1.0))
        position = b.op("Reshape", position, shape=(1, 8))
    graph = b.outputs(b.op("Cast", position, to=DType.INT32))
    assert not planned(graph).narrow
    feeds = {"x0": np.arange(1, 9, dtype=np.int32).reshape(1, 8) * 7}
    found = compiled(graph, BF16)(feeds)["y0"]
    assert np.array_equal(found, evaluate_graph(graph, feeds)["y0"])


def test_inputs_and_outputs_of_a_graph_are_float32() -> None:
    graph = residual()
    plan = planned(graph)
    ends = [*graph.inputs, *(v for _, v in graph.outputs)]
    assert not any(v in plan.narrow for v in ends)
    assert all(a.dtype == np.float32 for a in compiled(graph, BF16)(feeds_for(graph)).values())


@pytest.mark.parametrize("precision", [FLOAT32, INT8])
def test_other_precisions_know_nothing_of_it(precision: str) -> None:
    lowering = OneDNNBackend(1, precision).lowering
    assert not isinstance(lowering, NarrowLowering)
    graph = residual()
    assert not lower(graph, lowering).narrow
    assert not any("bf16" in job.kernel.key for job in lower(graph, lowering).jobs)


def test_a_cost_is_that_of_a_kernel_as_its_values_are_stored() -> None:
    step = Step(REGISTRY["Relu"], Attrs({}), (0,))
    lies = [Operand(TensorType(DType.FLOAT, (4, 8)), PLAIN, False, narrow) for narrow in (False, True)]
    assert len({Kernel((read,), (step,), (made,)).key for read in lies for made in lies}) == 4


def test_each_kernel_of_a_model_is_measured_as_it_is_stored() -> None:
    backend = OneDNNBackend(1, BF16)
    for job in planned(residual(1)).jobs:
        assert is_view(job.kernel) or backend.measure(job.kernel) > 0


def test_weights_that_are_not_finite_are_passed_on() -> None:
    b = Build()
    weight = b.random.standard_normal((32, 32, 1, 1)).astype(np.float32)
    weight[3] = np.inf
    x = b.op("Relu", b.conv(b.input(1, 16, 8, 8), 32, 3))
    graph = b.outputs(b.conv(b.op("Relu", b.op("Conv", x, b.constant(weight))), 16), b.conv(x, 16))
    feeds = feeds_for(graph)
    found, wanted = compiled(graph, BF16)(feeds), evaluate_graph(graph, feeds, wide=True)
    assert {n: np.isfinite(a).all() for n, a in found.items()} == {n: np.isfinite(a).all() for n, a in wanted.items()}


def test_an_offset_in_bytes_of_float32_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = MADE["Slice of what lies behind"]()
    feeds = feeds_for(graph)
    monkeypatch.setattr(building, "slice_offset", lambda kernel: 0)
    found = compiled(graph, BF16)(feeds)
    assert worst(found, evaluate_graph(graph, feeds, wide=True)) > FEW


def test_an_operation_left_out_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = MADE["Max"]()
    feeds = feeds_for(graph)
    monkeypatch.setitem(kernels._BINARY, "Max", "min")
    found = compiled(graph, BF16)(feeds)
    assert worst(found, evaluate_graph(graph, feeds, wide=True)) > FEW


# ── the search ───────────────────────────────────────────────────────────────────────────────────────────────────


def test_what_is_optimized_computes_the_same(tmp_path: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TASO_CACHE_DIR", str(tmp_path))
    b = Build()
    x = b.input(1, 16, 16, 16)
    for _ in range(2):
        x = b.op("Relu", _norm(b, b.conv(x, 32, 3)))
    graph = b.outputs(b.conv(b.op("Concat", b.conv(x, 16), b.conv(x, 16), axis=1), 16))
    best = taso.optimize(
        taso.load(export(graph)), backend="onednn", precision=BF16, threads=1, progress=False, time_limit=5,
        never_slower=False,
    )  # fmt: skip
    feeds = feeds_for(graph)
    (found,) = taso.compile(best, "onednn", 1, BF16)(feeds).values()
    (wanted,) = evaluate_graph(graph, feeds, wide=True).values()
    assert worst({"y": found}, {"y": wanted}) < tolerance_of(graph, BF16)


# ── random graphs ────────────────────────────────────────────────────────────────────────────────────────────────


def _random_rows(draw: st.DrawFn) -> Graph:
    """Products, norms, sums and views of rows, in any order, with branches."""
    b = Build(draw(st.integers(0, 99)))
    first = b.input(2, 8, 32)
    values = [b.op("MatMul", first, b.weight(32, 32))]
    for _ in range(draw(st.integers(2, 9))):
        x = draw(st.sampled_from(values[-3:]))
        y = draw(st.sampled_from([v for v in (first, *values) if v.type == x.type] or [x]))
        kind = draw(st.sampled_from(sorted(_STEPS)))
        values.append(_STEPS[kind](b, x, y))
    return b.outputs(values[-1], draw(st.sampled_from(values)))


def _turned(b: Build, x: Value, y: Value) -> Value:
    turned = b.op("Transpose", b.op("Reshape", x, shape=(0, 0, 4, 8)), perm=(0, 2, 1, 3))
    other = b.op("Transpose", b.op("Reshape", y, shape=(0, 0, 4, 8)), perm=(0, 2, 3, 1))
    seen = b.op("MatMul", b.op("Softmax", b.op("MatMul", turned, other)), turned)
    return b.op("Reshape", b.op("Transpose", seen, perm=(0, 2, 1, 3)), shape=(0, 0, 32))


_STEPS: dict[str, Callable[[Build, Value, Value], Value]] = {
    "product": lambda b, x, y: b.op("Add", b.op("MatMul", x, b.weight(32, 32)), b.weight(32)),
    "sum": lambda b, x, y: b.op("Add", x, y),
    "product and sum": lambda b, x, y: b.op("Add", b.op("MatMul", x, b.weight(32, 32)), y),
    "gate": lambda b, x, y: b.op("Mul", b.op("Sigmoid", x), y),
    "activation": lambda b, x, y: b.op("Gelu", x),
    "norm": lambda b, x, y: b.op("LayerNormalization", x, b.positive(32), b.weight(32)),
    "attention": _turned,
    "halves": lambda b, x, y: b.op("Concat", *b.ops("Split", x, axis=2, split=(16, 16))[::-1], axis=2),
    "rows": lambda b, x, y: b.op(
        "Concat", *(b.op("Slice", v, starts=(s,), ends=(s + 1,), axes=(0,)) for v, s in ((x, 1), (y, 0))), axis=0
    ),
    "other": lambda b, x, y: b.op("Sub", x, b.op("Erf", y)),
}
random_rows = st.composite(_random_rows)


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(st.one_of(random_rows(), others.random_graphs()))
def test_random_graphs_give_what_the_definitions_say(graph: Graph) -> None:
    # a step is no matter of precision
    assume(not any(node.op.name == "Floor" for node in graph.operators))
    program = OneDNNBackend(1, BF16).compile(graph)
    for seed in (1, 2):
        feeds = feeds_for(graph, seed)
        assert worst(program(feeds), evaluate_graph(graph, feeds, wide=True)) <= tolerance_of(graph, BF16)
