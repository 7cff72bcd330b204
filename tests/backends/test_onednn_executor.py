"""The oneDNN executor against the operators' definitions, evaluated in float64."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

import taso.graph.ops  # noqa: F401  # registers the operators
from taso.backends.arena import Region, place_regions
from taso.backends.lowering import BLOCKED, LAST, PLAIN, Kernel, Layouts, Lowering, Operand, is_view, lower
from taso.backends.onednn import executor, kernels
from taso.backends.onednn.library import library
from taso.graph.errors import BackendError, BackendUnavailable, InputError, TasoError
from taso.graph.evaluate import evaluate_graph
from taso.graph.graph import Graph, Value
from taso.graph.operator import REGISTRY, AttrValue, Weight
from taso.graph.ops.structure import opaque
from taso.graph.types import DType, SymDim, TensorType

try:
    library()
    _MISSING = ""
except BackendUnavailable as error:
    _MISSING = str(error)
else:
    from taso.backends.onednn.backend import OneDNNBackend

pytestmark = pytest.mark.skipif(bool(_MISSING), reason=_MISSING or "oneDNN loads")

Array = NDArray[np.generic]
TOLERANCE = 1e-4


class Build:
    """A graph under construction; all weights are seeded."""

    def __init__(self, seed: int = 0) -> None:
        self.graph = Graph()
        self.random = np.random.default_rng(seed)

    def input(self, *dims: int | str, dtype: DType = DType.FLOAT) -> Value:
        shape = tuple(SymDim.named(d) if isinstance(d, str) else d for d in dims)
        return self.graph.add_input(f"x{len(self.graph.inputs)}", TensorType(dtype, shape))

    def constant(self, array: Array | float) -> Value:
        held = np.asarray(array, np.float32) if isinstance(array, float) else np.asarray(array)
        return self.graph.add_weight(Weight(TensorType(DType.from_numpy(held.dtype), held.shape), held))

    def weight(self, *dims: int) -> Value:
        fan_in = max(int(np.prod(dims[1:])), 1)
        return self.constant((self.random.standard_normal(dims) / np.sqrt(fan_in)).astype(np.float32))

    def positive(self, *dims: int) -> Value:
        return self.constant(self.random.uniform(0.5, 1.5, dims).astype(np.float32))

    def op(self, name: str, *inputs: Value | None, **attrs: AttrValue) -> Value:
        return self.ops(name, *inputs, **attrs)[0]

    def ops(self, name: str, *inputs: Value | None, **attrs: AttrValue) -> tuple[Value, ...]:
        return self.graph.make(REGISTRY[name], inputs, attrs).outputs

    def conv(self, x: Value, out: int, kernel: int = 1, group: int = 1, bias: bool = True, **attrs: AttrValue) -> Value:
        n = x.type.rank - 2
        w = self.weight(out, x.dim(1) // group, *(kernel,) * n)
        given = (x, w, self.weight(out)) if bias else (x, w)
        full = {"pads": (kernel // 2,) * (2 * n), "group": group, **attrs}
        return self.op("Conv", *given, **full)

    def outputs(self, *values: Value) -> Graph:
        self.graph.set_outputs([(f"y{i}", v) for i, v in enumerate(values)])
        return self.graph


def feeds_for(graph: Graph, seed: int = 1, **sizes: int) -> dict[str, Array]:
    random = np.random.default_rng(seed)
    feeds: dict[str, Array] = {}
    for name, value in zip(graph.input_names, graph.inputs, strict=True):
        shape = value.type.bind(sizes).static_shape
        if value.type.dtype.is_float:
            feeds[name] = random.standard_normal(shape).astype(value.type.dtype.numpy)
        else:
            feeds[name] = random.integers(0, 2, shape).astype(value.type.dtype.numpy)
    return feeds


def relative_error(got: Array, wanted: Array) -> float:
    """max |a − b| / max |b|; infinite where shapes or what is not finite differ."""
    if got.shape != wanted.shape:
        return np.inf
    a, b = got.astype(np.float64), wanted.astype(np.float64)
    if not np.array_equal(np.isfinite(a), np.isfinite(b)) or not np.array_equal(np.isnan(a), np.isnan(b)):
        return np.inf
    finite = np.isfinite(b)
    if not finite.any():
        return 0.0
    return float(np.abs(a[finite] - b[finite]).max() / max(float(np.abs(b[finite]).max()), 1e-30))


def worst(got: Mapping[str, Array], wanted: Mapping[str, Array]) -> float:
    assert list(got) == list(wanted)
    return max((relative_error(got[n], wanted[n]) for n in wanted if wanted[n].size), default=0.0)


def check(graph: Graph, threads: int = 2, tolerance: float = TOLERANCE, **sizes: int) -> executor.Program:
    """Compiles, runs twice on different inputs, compares with the definitions in float64; returns the program."""
    program = OneDNNBackend(threads).compile(graph)
    for seed in (1, 2):
        feeds = feeds_for(graph, seed, **sizes)
        got, wanted = program(feeds), evaluate_graph(graph, feeds, wide=True)
        for (name, value), array in zip(graph.outputs, got.values(), strict=True):
            assert array.dtype == value.type.dtype.numpy, name
        assert worst(got, wanted) <= tolerance, [s.op.name for s in graph.operators]
    return program


def implementations(program: executor.Program) -> list[str]:
    fixed = program._fixed
    assert fixed is not None
    found = []
    for kept in fixed._kept:
        primitive = getattr(kept, "primitive", None)
        if primitive is not None:
            found.append(primitive.implementation)
    return found


# ── rows: one operator each ──────────────────────────────────────────────────────────────────────────────────────

Make = Callable[[Build], Value | Sequence[Value]]

CONVOLUTIONS: dict[str, Make] = {
    "1x1": lambda b: b.conv(b.input(1, 32, 9, 9), 48),
    "3x3 batch 2": lambda b: b.conv(b.input(2, 32, 9, 9), 32, 3),
    "image": lambda b: b.conv(b.input(1, 3, 20, 20), 16, 7, strides=(2, 2)),
    "image to odd channels": lambda b: b.conv(b.input(1, 3, 20, 20), 10, 3),
    "one channel": lambda b: b.conv(b.input(1, 1, 12, 12), 16, 3),
    "odd channels": lambda b: b.conv(b.input(1, 20, 9, 9), 24, 3),
    "32 to odd": lambda b: b.conv(b.input(1, 32, 9, 9), 21, 1),
    "depthwise": lambda b: b.conv(b.input(1, 32, 9, 9), 32, 3, 32),
    "depthwise odd": lambda b: b.conv(b.input(1, 20, 9, 9), 20, 3, 20),
    "depthwise multiplied": lambda b: b.conv(b.input(1, 16, 9, 9), 32, 3, 16),
    "groups of 4": lambda b: b.conv(b.input(1, 32, 9, 9), 32, 3, 8),
    "groups of 16": lambda b: b.conv(b.input(1, 32, 9, 9), 64, 3, 2),
    "dilated": lambda b: b.conv(b.input(1, 16, 12, 12), 16, 3, dilations=(2, 3)),
    "asymmetric pads": lambda b: b.conv(b.input(1, 16, 9, 9), 16, 3, pads=(0, 2, 1, 0)),
    "pads beyond the window": lambda b: b.conv(b.input(1, 16, 5, 5), 16, 3, pads=(4, 5, 4, 3)),
    "strided": lambda b: b.conv(b.input(1, 16, 10, 11), 32, 3, strides=(2, 1)),
    "without bias": lambda b: b.conv(b.input(1, 16, 9, 9), 16, 3, bias=False),
    "1d": lambda b: b.conv(b.input(1, 16, 30), 32, 3),
    "3d": lambda b: b.conv(b.input(1, 16, 5, 6, 7), 16, 3),
    "3d depthwise": lambda b: b.conv(b.input(1, 16, 5, 6, 7), 16, 3, 16),
    "3d odd": lambda b: b.conv(b.input(2, 5, 5, 6, 7), 7, 2, pads=(0, 1, 0, 1, 0, 1)),
    "weights at run time": lambda b: b.op("Conv", b.input(1, 16, 9, 9), b.input(16, 16, 3, 3)),
    "grouped weights at run time": lambda b: b.op("Conv", b.input(1, 16, 9, 9), b.input(16, 4, 3, 3), group=4),
    "bias at run time": lambda b: b.op("Conv", b.input(1, 16, 9, 9), b.weight(16, 16, 3, 3), b.input(16)),
}

PRODUCTS: dict[str, Make] = {
    "matmul": lambda b: b.op("MatMul", b.input(5, 7), b.weight(7, 6)),
    "matmul at run time": lambda b: b.op("MatMul", b.input(5, 7), b.input(7, 6)),
    "matmul batch, one weight": lambda b: b.op("MatMul", b.input(2, 3, 5, 7), b.weight(7, 6)),
    "matmul batch": lambda b: b.op("MatMul", b.input(2, 3, 5, 7), b.input(2, 3, 7, 6)),
    "matmul broadcast both ways": lambda b: b.op("MatMul", b.input(2, 1, 5, 7), b.input(3, 7, 6)),
    "matmul weights batch": lambda b: b.op("MatMul", b.input(5, 7), b.weight(3, 7, 6)),
    "matmul vector right": lambda b: b.op("MatMul", b.input(4, 5, 7), b.weight(7)),
    "matmul vector left": lambda b: b.op("MatMul", b.input(7), b.weight(3, 7, 6)),
    "matmul vectors": lambda b: b.op("MatMul", b.input(7), b.weight(7)),
    "matmul constant left": lambda b: b.op("MatMul", b.weight(4, 5), b.input(5, 6)),
    "gemm": lambda b: b.op("Gemm", b.input(5, 7), b.weight(7, 6), b.weight(6)),
    "gemm transposed": lambda b: b.op("Gemm", b.input(7, 5), b.weight(6, 7), b.weight(1, 6), transA=1, transB=1),
    "gemm scaled": lambda b: b.op("Gemm", b.input(5, 7), b.weight(7, 6), b.weight(6), alpha=0.5, beta=2.0),
    "gemm rows of bias": lambda b: b.op("Gemm", b.input(5, 7), b.weight(7, 6), b.weight(5, 1)),
    "gemm full bias": lambda b: b.op("Gemm", b.input(5, 7), b.input(7, 6), b.input(5, 6), alpha=0.25),
    "gemm scalar bias": lambda b: b.op("Gemm", b.input(5, 7), b.weight(7, 6), b.constant(0.5), beta=3.0),
    "gemm run time beta": lambda b: b.op("Gemm", b.input(5, 7), b.weight(7, 6), b.input(6), beta=3.0),
    "gemm without bias": lambda b: b.op("Gemm", b.input(5, 7), b.weight(7, 6), alpha=2.0),
}


def _pool(name: str, dims: Sequence[int] = (2, 16, 9, 10), **attrs: AttrValue) -> Make:
    return lambda b: b.op(name, b.input(*dims), **attrs)


def _blocked_pool(name: str, **attrs: AttrValue) -> Make:
    return lambda b: b.op(name, b.conv(b.input(1, 16, 9, 10), 32, 3), **attrs)


POOLS: dict[str, Make] = {
    "max": _pool("MaxPool", kernel_shape=(3, 3), strides=(2, 2), pads=(1, 1, 1, 1)),
    "max blocked": _blocked_pool("MaxPool", kernel_shape=(3, 3), strides=(2, 2), pads=(1, 0, 0, 1)),
    "max ceil": _pool("MaxPool", kernel_shape=(3, 3), strides=(2, 2), ceil_mode=1),
    "max dilated": _blocked_pool("MaxPool", kernel_shape=(2, 3), dilations=(2, 2)),
    "max 1d": _pool("MaxPool", (1, 4, 11), kernel_shape=(3,), strides=(2,)),
    "average": _pool("AveragePool", kernel_shape=(3, 3), strides=(2, 2), pads=(1, 1, 1, 1)),
    "average counting pads": _pool("AveragePool", kernel_shape=(3, 3), pads=(1, 0, 1, 2), count_include_pad=1),
    "average ceil": _pool("AveragePool", kernel_shape=(2, 3), strides=(2, 2), ceil_mode=1),
    "average blocked": _blocked_pool("AveragePool", kernel_shape=(2, 2), strides=(2, 2)),
    "average 3d": _pool("AveragePool", (1, 3, 5, 6, 7), kernel_shape=(2, 2, 2)),
    "global average": _pool("GlobalAveragePool"),
    "global average blocked": _blocked_pool("GlobalAveragePool"),
    "global max": _pool("GlobalMaxPool"),
    "global max blocked": _blocked_pool("GlobalMaxPool"),
}


def _batch_norm(b: Build, x: Value) -> Value:
    c = x.dim(1)
    return b.op("BatchNormalization", x, b.positive(c), b.weight(c), b.weight(c), b.positive(c), epsilon=1e-3)


NORMS: dict[str, Make] = {
    "batch": lambda b: _batch_norm(b, b.input(2, 5, 6, 7)),
    "batch of rank 2": lambda b: _batch_norm(b, b.input(4, 6)),
    "batch blocked": lambda b: _batch_norm(b, b.conv(b.input(1, 16, 6, 7), 32, 3)),
    "batch last": lambda b: _batch_norm(b, b.conv(b.input(1, 10, 6, 7), 12, 3)),
    "batch at run time": lambda b: b.op(
        "BatchNormalization", b.input(2, 5, 6), b.input(5), b.input(5), b.input(5), b.op("Exp", b.input(5))
    ),
    "layer": lambda b: b.op("LayerNormalization", b.input(3, 4, 10), b.positive(10), b.weight(10)),
    "layer without bias": lambda b: b.op("LayerNormalization", b.input(3, 4, 10), b.positive(10)),
    "layer axis 1": lambda b: b.op("LayerNormalization", b.input(3, 4, 10), b.positive(4, 10), b.weight(4, 10), axis=1),
    "lrn": lambda b: b.op("LRN", b.input(1, 16, 5, 5), size=5, alpha=0.1, beta=0.6, bias=1.5),
    "lrn blocked": lambda b: b.op("LRN", b.conv(b.input(1, 16, 5, 5), 16), size=3, alpha=0.1),
    "lrn even": lambda b: b.op("LRN", b.input(1, 16, 5, 5), size=4, alpha=0.1),
    "softmax": lambda b: b.op("Softmax", b.input(3, 4, 10)),
    "softmax axis 1": lambda b: b.op("Softmax", b.input(3, 4, 10), axis=1),
    "softmax axis 0": lambda b: b.op("Softmax", b.input(6, 4), axis=0),
    "softmax flattened": lambda b: b.op("Softmax", b.input(3, 4, 10), axis=1, flattened=1),
    "log softmax": lambda b: b.op("LogSoftmax", b.input(3, 4, 10), axis=-2),
}

REDUCTIONS: dict[str, Make] = {
    f"{name} {axes} {keep}": (
        lambda b, name=name, axes=axes, keep=keep: b.op(name, b.input(3, 4, 5, 6), axes=axes, keepdims=keep)
    )
    for name in (
        "ReduceSum", "ReduceMean", "ReduceMax", "ReduceMin", "ReduceProd", "ReduceL1", "ReduceL2", "ReduceSumSquare",
    )
    for axes in ((), (3,), (2, 3), (1,), (0, 2))
    for keep in (0, 1)
}  # fmt: skip

_ATTRS: dict[str, dict[str, AttrValue]] = {
    "Clip": {"min": -0.5, "max": 0.75}, "Elu": {"alpha": 0.7}, "LeakyRelu": {"alpha": 0.2},
    "HardSigmoid": {"alpha": 0.3, "beta": 0.4},
}  # fmt: skip
UNARY = [
    *("Relu", "Sigmoid", "Tanh", "Exp", "Log", "Sqrt", "Neg", "Abs", "Reciprocal", "Floor", "Ceil", "Round", "Erf"),
    *("Sin", "Cos", "Sign", "Softplus", "Softsign", "Mish", "HardSwish", "LeakyRelu", "Elu", "Selu", "HardSigmoid"),
    *("Gelu", "Clip"),
]


def _unary(name: str, lay: Callable[[Build], Value]) -> Make:
    def make(b: Build) -> Value:
        x = lay(b)
        if name in ("Log", "Sqrt", "Reciprocal"):
            x = b.op("Add", b.op("Abs", x), b.constant(0.25))
        return b.op(name, x, **_ATTRS.get(name, {}))

    return make


def _plain(b: Build) -> Value:
    return b.input(2, 5, 3, 4)


def _blocked(b: Build) -> Value:
    return b.op("MaxPool", b.conv(b.input(1, 16, 6, 6), 32), kernel_shape=(2, 2))


def _last(b: Build) -> Value:
    return b.op("MaxPool", b.conv(b.input(1, 10, 6, 6), 12), kernel_shape=(2, 2))


UNARIES: dict[str, Make] = {
    f"{name} {lay.__name__}": _unary(name, lay) for name in UNARY for lay in (_plain, _blocked, _last)
}

_SHAPES: list[tuple[tuple[int, ...], tuple[int, ...]]] = [
    ((2, 5, 3, 4), (2, 5, 3, 4)), ((2, 5, 3, 4), (5, 1, 1)), ((5, 1, 1), (2, 5, 3, 4)), ((2, 5, 3, 4), ()),
    ((), (2, 5, 3, 4)), ((2, 5, 3, 4), (3, 1)), ((4, 1), (1, 5)), ((2, 5, 3, 4), (4,)), ((1,), (2, 3)),
    ((2, 5, 3, 4), (2, 1, 3, 1)), ((), ()),
]  # fmt: skip


def _binary(name: str, left: tuple[int, ...], right: tuple[int, ...], constant: bool) -> Make:
    def make(b: Build) -> Value:
        x = b.input(*left)
        y = b.positive(*right) if constant else b.op("Exp", b.input(*right))
        return b.op(name, x, y)

    return make


BINARIES: dict[str, Make] = {
    f"{name} {left} {right} {constant}": _binary(name, left, right, constant)
    for name in ("Add", "Sub", "Mul", "Div", "Max", "Min")
    for left, right in _SHAPES
    for constant in (False, True)
}


def _mixed(name: str, other: Callable[[Build], Value], lay: Callable[[Build], Value], reverse: bool) -> Make:
    def make(b: Build) -> Value:
        x, y = lay(b), other(b)
        return b.op(name, y, x) if reverse else b.op(name, x, y)

    return make


_OTHERS: dict[str, Callable[[Build], Value]] = {
    "channels": lambda b: b.positive(1, 32, 1, 1),
    "channels at run time": lambda b: b.op("Exp", b.input(32, 1, 1)),
    "positions": lambda b: b.positive(5, 5),
    "one channel": lambda b: b.op("Exp", b.input(1, 1, 5, 5)),
    "row": lambda b: b.positive(1, 32, 1, 5),
    "full": lambda b: b.positive(1, 32, 5, 5),
    "full at run time": lambda b: b.op("Exp", b.input(1, 32, 5, 5)),
    "scalar": lambda b: b.constant(1.5),
    "scalar at run time": lambda b: b.op("Exp", b.input(1)),
}
BLOCKED_BINARIES: dict[str, Make] = {
    f"{name} blocked {what} {reverse}": _mixed(name, other, _blocked, reverse)
    for name in ("Add", "Sub", "Mul", "Div", "Max")
    for what, other in _OTHERS.items()
    for reverse in (False, True)
}

MOVES: dict[str, Make] = {
    "transpose": lambda b: b.op("Transpose", b.input(2, 3, 4, 5), perm=(0, 2, 1, 3)),
    "transpose reversed": lambda b: b.op("Transpose", b.input(3, 4, 5)),
    "slice": lambda b: b.op("Slice", b.input(4, 6, 8), starts=(1, 2), ends=(3, 7), axes=(1, 2)),
    "slice steps": lambda b: b.op("Slice", b.input(4, 6, 8), starts=(5, -1), ends=(0, -9), axes=(1, 2), steps=(-2, -3)),
    "slice view": lambda b: b.op("Slice", b.input(6, 8), starts=(2,), ends=(5,), axes=(0,)),
    "split": lambda b: b.ops("Split", b.input(2, 10, 3), axis=1, split=(2, 5, 3)),
    "concat": lambda b: b.op("Concat", b.input(2, 3, 4), b.input(2, 5, 4), axis=1),
    "concat constant": lambda b: b.op("Concat", b.input(1, 3), b.constant(np.ones((1, 2), np.float32)), axis=1),
    "expand": lambda b: b.op("Expand", b.input(3, 1), shape=(2, 3, 4)),
    "tile": lambda b: b.op("Tile", b.input(2, 3), repeats=(2, 3)),
    "pad": lambda b: b.op("Pad", b.input(2, 3, 4), pads=(0, 1, 2, 1, 0, 3), value=1.5),
    "pad that cuts": lambda b: b.op("Pad", b.input(2, 3, 4), pads=(0, 1, 2, 1, -1, -1)),
    "pad reflecting": lambda b: b.op("Pad", b.input(5, 6), pads=(1, 2, 2, 1), mode="reflect"),
    "gather": lambda b: b.op("Gather", b.input(5, 6), b.constant(np.array([[0, -1], [3, 2]])), axis=0),
    "gather a scalar": lambda b: b.op("Gather", b.input(5, 6), b.constant(np.array(-2)), axis=1),
    "where": lambda b: b.op("Where", b.op("Greater", b.input(3, 4), b.input(4)), b.input(3, 1), b.constant(2.0)),
    "cast": lambda b: b.op("Cast", b.op("Cast", b.input(3, 4), to=DType.INT32), to=DType.FLOAT),
    "pow": lambda b: b.op("Pow", b.op("Abs", b.input(3, 4)), b.constant(1.7)),
    "square": lambda b: b.op("Pow", b.input(3, 4), b.constant(2.0)),
    "prelu": lambda b: b.op("PRelu", b.input(2, 3, 4), b.positive(3, 1)),
    "sum of three": lambda b: b.op("Sum", b.input(2, 3), b.input(3), b.input(2, 1)),
    "mean of three": lambda b: b.op("Mean", b.input(2, 3), b.input(3), b.input(2, 1)),
    "max of three": lambda b: b.op("Max", b.input(2, 3), b.input(3), b.input(2, 1)),
    "sum of two": lambda b: b.op("Sum", b.input(2, 3), b.input(3)),
    "argmax": lambda b: b.op("ArgMax", b.input(2, 3, 4), axis=1),
    "shape": lambda b: b.op("Shape", b.input(2, 3, 4)),
    "flatten": lambda b: b.op("Flatten", b.input(2, 3, 4), axis=2),
    "identity": lambda b: b.op("Identity", b.input(2, 3)),
}

ROWS: dict[str, Make] = {
    **{f"conv {k}": v for k, v in CONVOLUTIONS.items()}, **PRODUCTS, **{f"{k} pool": v for k, v in POOLS.items()},
    **NORMS, **REDUCTIONS, **UNARIES, **BINARIES, **BLOCKED_BINARIES, **MOVES,
}  # fmt: skip


@pytest.mark.parametrize("name", ROWS)
def test_an_operator_gives_what_its_definition_says(name: str) -> None:
    build = Build()
    made = ROWS[name](build)
    check(build.outputs(*(made if isinstance(made, tuple) else (made,))))  # type: ignore[arg-type]


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_no_convolution_runs_by_the_slow_reference(name: str) -> None:
    build = Build()
    program = OneDNNBackend(1).compile(build.outputs(CONVOLUTIONS[name](build)))  # type: ignore[arg-type]
    found = implementations(program)
    assert found and not any(i.startswith("ref") for i in found)


@pytest.mark.parametrize("dtype", [DType.DOUBLE, DType.INT64, DType.INT32, DType.UINT8, DType.FLOAT16])
@pytest.mark.parametrize("name", ["Add", "Sub", "Mul", "Max"])
def test_arithmetic_of_other_types(name: str, dtype: DType) -> None:
    b = Build()
    x, y = b.input(3, 4, dtype=dtype), b.input(4, dtype=dtype)
    check(b.outputs(b.op(name, x, b.op(name, x, y))), tolerance=1e-2 if dtype is DType.FLOAT16 else 1e-12)


def test_integers_beyond_float32_stay_exact() -> None:
    b = Build()
    x = b.input(3, dtype=DType.INT32)
    graph = b.outputs(b.op("Add", x, b.constant(np.array([1, 2, 3], np.int32))), b.op("Concat", x, x, axis=0))
    big = np.array([2**24 + 1, 2**30 + 7, -(2**29) - 3], np.int32)
    got = OneDNNBackend(1).compile(graph)({"x0": big})
    assert np.array_equal(got["y0"], big + [1, 2, 3]) and np.array_equal(got["y1"], np.tile(big, 2))


def test_products_and_convolutions_in_double_precision_keep_it() -> None:
    b = Build()
    x = b.input(3, 4, dtype=DType.DOUBLE)
    c = b.op("Conv", b.input(1, 2, 5, 5, dtype=DType.DOUBLE), b.constant(b.random.standard_normal((2, 2, 3, 3))))
    check(b.outputs(b.op("MatMul", x, b.constant(b.random.standard_normal((4, 5)))), c), tolerance=1e-12)


# ── fusion ───────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_chain_behind_a_convolution_is_one_launch() -> None:
    b = Build()
    y = b.conv(b.input(1, 16, 8, 8), 32, 3)
    y = b.op("Relu", b.op("Add", b.op("Mul", y, b.positive(1, 32, 1, 1)), b.weight(32, 1, 1)))
    program = check(b.outputs(b.op("Sigmoid", y)))
    assert program.kernels == 3  # the layout of the input, the convolution with its chain, that of the output


def test_a_value_with_two_consumers_is_stored() -> None:
    b = Build()
    c = b.conv(b.input(1, 16, 8, 8), 16, 3)
    check(b.outputs(b.op("Add", b.op("Relu", c), b.op("Sigmoid", c)), b.op("Mul", c, c)))


def test_an_intermediate_that_is_an_output_too_is_not_lost() -> None:
    b = Build()
    c = b.conv(b.input(1, 16, 8, 8), 16, 3)
    r = b.op("Relu", c)
    check(b.outputs(c, r, b.op("Exp", r)))


def test_a_sum_of_two_convolutions_adds_in_place() -> None:
    b = Build()
    x = b.input(1, 16, 8, 8)
    both = b.op("Add", b.conv(x, 32, 3), b.conv(x, 32, 1))
    program = check(b.outputs(b.op("Relu", both)))
    assert program.kernels == 4


def test_a_residual_that_is_needed_later_is_not_overwritten() -> None:
    b = Build()
    x = b.op("Relu", b.conv(b.input(1, 16, 8, 8), 16, 3))
    y = b.op("Relu", b.op("Add", b.conv(x, 16, 3), x))
    check(b.outputs(b.op("Concat", y, x, axis=1)))


def test_a_residual_that_is_the_convolutions_own_input_is_not_overwritten() -> None:
    b = Build()
    x = b.conv(b.input(1, 16, 8, 8), 16, 3)
    check(b.outputs(b.op("Exp", b.op("Add", b.conv(x, 16, 3), x))))


def test_a_sum_behind_an_activation() -> None:
    b = Build()
    x = b.input(1, 16, 8, 8)
    other = b.conv(x, 48, 1)
    check(b.outputs(b.op("Tanh", b.op("Add", b.op("Relu", b.conv(x, 48, 3)), other))))


@pytest.mark.parametrize("outer", [32, 20])
def test_two_residuals_in_one_chain(outer: int) -> None:
    b = Build()
    x = b.input(1, 16, 8, 8)
    one, two = b.conv(x, outer, 1), b.conv(x, outer, 1)
    check(b.outputs(b.op("Relu", b.op("Add", b.op("Add", b.conv(x, outer, 3), one), two))))


def test_more_steps_than_one_primitive_takes() -> None:
    b = Build()
    y = b.conv(b.input(1, 16, 4, 4), 16)
    for i in range(40):
        y = b.op("Tanh", b.op("Add", y, b.weight(16, 1, 1))) if i % 2 else b.op("Mul", y, b.positive(1, 16, 1, 1))
    check(b.outputs(y))


def test_chains_of_every_kind_behind_products() -> None:
    b = Build()
    x = b.input(2, 5, 8)
    full = b.input(2, 5, 6)
    y = b.op("Add", b.op("MatMul", x, b.weight(8, 6)), b.weight(6))
    z = b.op("Mul", b.op("MatMul", x, b.weight(8, 6)), b.input(2, 1, 6))
    w = b.op("Sub", b.op("MatMul", x, b.weight(8, 6)), full)
    v = b.op("Max", b.op("Gemm", b.input(5, 7), b.weight(7, 6), b.weight(6)), b.input(6))
    check(b.outputs(b.op("Gelu", y), z, b.op("Div", w, b.constant(3.0)), v))


def test_a_reversed_difference_is_not_fused_the_wrong_way_round() -> None:
    b = Build()
    x = b.input(1, 16, 5, 5)
    check(b.outputs(b.op("Sub", b.positive(1, 16, 1, 1), b.conv(x, 16)), b.op("Div", b.constant(2.0), b.conv(x, 16))))


def test_gelu_written_out() -> None:
    b = Build()
    x = b.op("Add", b.op("MatMul", b.input(4, 8), b.weight(8, 16)), b.weight(16))
    e = b.op("Add", b.op("Erf", b.op("Div", x, b.constant(float(np.sqrt(2))))), b.constant(1.0))
    check(b.outputs(b.op("Mul", b.op("Mul", x, e), b.constant(0.5))))


def test_attention() -> None:
    b = Build()
    x = b.input(1, 6, 16)

    def heads(perm: tuple[int, ...]) -> Value:
        y = b.op("Add", b.op("MatMul", x, b.weight(16, 16)), b.weight(16))
        return b.op("Transpose", b.op("Reshape", y, shape=(1, 6, 4, 4)), perm=perm)

    q, k, v = heads((0, 2, 1, 3)), heads((0, 2, 3, 1)), heads((0, 2, 1, 3))
    scores = b.op("Add", b.op("Div", b.op("MatMul", q, k), b.constant(2.0)), b.input(1, 1, 1, 6))
    mixed = b.op("Transpose", b.op("MatMul", b.op("Softmax", scores), v), perm=(0, 2, 1, 3))
    flat = b.op("Reshape", mixed, shape=(1, 6, 16))
    y = b.op("Add", b.op("MatMul", flat, b.weight(16, 16)), x)
    check(b.outputs(b.op("LayerNormalization", y, b.positive(16), b.weight(16))))


def test_squeeze_and_excitation() -> None:
    b = Build()
    x = b.op("Relu", b.conv(b.input(1, 16, 6, 6), 32, 3))
    s = b.op("Relu", b.conv(b.op("GlobalAveragePool", x), 16))
    s = b.op("Sigmoid", b.conv(s, 32))
    check(b.outputs(b.conv(b.op("Mul", x, s), 16)))


_ANCHORS: dict[str, Make] = {
    "conv": lambda b: b.conv(b.input(1, 16, 6, 7), 32, 3),
    "conv 1x1": lambda b: b.conv(b.input(2, 32, 6, 7), 32),
    "conv last": lambda b: b.conv(b.input(1, 20, 6, 7), 24, 3),
    "conv of an image": lambda b: b.conv(b.input(1, 3, 6, 7), 32, 3),
    "conv depthwise": lambda b: b.conv(b.input(1, 32, 6, 7), 32, 3, 32),
    "conv groups": lambda b: b.conv(b.input(1, 32, 6, 7), 32, 3, 8),
    "conv of one position": lambda b: b.conv(b.input(2, 16, 1, 1), 32),
    "conv of one position last": lambda b: b.conv(b.input(2, 20, 1, 1), 24),
    "conv depthwise of one position": lambda b: b.conv(b.input(2, 32, 1, 1), 32, 3, 32),
    "conv in a batch": lambda b: b.conv(b.input(3, 16, 4, 4), 32, 3),
    "conv 1d": lambda b: b.conv(b.input(1, 16, 9), 16, 3),
    "conv 3d": lambda b: b.conv(b.input(1, 16, 4, 5, 6), 16, 3),
    "matmul": lambda b: b.op("MatMul", b.input(2, 5, 7), b.weight(7, 6)),
    "matmul batch": lambda b: b.op("MatMul", b.input(2, 5, 7), b.input(2, 7, 6)),
    "matmul matrix": lambda b: b.op("MatMul", b.input(5, 7), b.weight(7, 6)),
    "gemm": lambda b: b.op("Gemm", b.input(5, 7), b.weight(6, 7), b.weight(6), transB=1),
    "max pool": POOLS["max"],
    "max pool blocked": POOLS["max blocked"],
    "average pool": POOLS["average"],
    "average pool blocked": POOLS["average blocked"],
    "global average": POOLS["global average"],
    "global average blocked": POOLS["global average blocked"],
    "global max": POOLS["global max"],
    "norm": NORMS["batch"],
    "norm blocked": NORMS["batch blocked"],
    "norm last": NORMS["batch last"],
    "norm of one position": lambda b: _batch_norm(b, b.input(2, 16, 1, 1)),
    "unary of one position": lambda b: b.op("Tanh", b.input(2, 16, 1)),
    "layer norm": NORMS["layer"],
    "softmax": NORMS["softmax"],
    "softmax axis": NORMS["softmax axis 1"],
    "softmax of 4": lambda b: b.op("Softmax", b.input(2, 3, 4, 5), axis=-1),
    "unary": lambda b: b.op("Tanh", b.input(2, 16, 3, 4)),
    "unary blocked": lambda b: b.op("Tanh", _blocked(b)),
    "binary": lambda b: b.op("Sub", b.input(2, 16, 3, 4), b.input(16, 1, 1)),
    "binary blocked": lambda b: b.op("Sub", _blocked(b), b.positive(1, 32, 1, 1)),
    "erf": lambda b: b.op("Erf", b.input(3, 40)),
}


def _step(b: Build, y: Value, kind: str) -> Value:
    dims = y.type.static_shape
    name, _, what = kind.partition(" ")
    if not what:
        return b.op(name, y, **_ATTRS.get(name, {}))
    vector = (1, dims[1], *(1 for _ in dims[2:]))
    last = tuple(1 if a < len(dims) - 1 else d for a, d in enumerate(dims))
    other = {
        "full": lambda: b.op("Exp", b.input(*dims)), "constant": lambda: b.positive(*dims),
        "channel": lambda: b.positive(*vector), "channel at run time": lambda: b.op("Exp", b.input(*vector)),
        "scalar": lambda: b.constant(1.5), "last": lambda: b.positive(*last),
        "first": lambda: b.op("Exp", b.input(dims[0], *(1 for _ in dims[1:]))),
        "conv": lambda: b.conv(b.input(*dims), dims[1]) if len(dims) > 2 else b.op("Exp", b.input(*dims)),
    }[what]()  # fmt: skip
    return b.op(name, y, other)


_STEPS = [
    *("Add full", "Mul full", "Sub full", "Max full", "Div full", "Add constant", "Mul constant", "Add channel"),
    *("Mul channel at run time", "Sub channel", "Mul scalar", "Div scalar", "Max scalar", "Add last", "Mul last"),
    *("Add first", "Add conv", "Relu", "Gelu", "HardSwish", "LeakyRelu", "Clip", "Exp"),
]


@pytest.mark.parametrize("second", ["", "Add full", "Mul channel", "Relu"])
@pytest.mark.parametrize("anchor", _ANCHORS)
def test_every_step_behind_every_anchor(anchor: str, second: str) -> None:
    for first in _STEPS:
        b = Build()
        y = _step(b, _ANCHORS[anchor](b), first)  # type: ignore[arg-type]
        graph = b.outputs(_step(b, y, second) if second else y)
        feeds = feeds_for(graph)
        got = OneDNNBackend(1).compile(graph)(feeds)
        assert worst(got, evaluate_graph(graph, feeds, wide=True)) <= TOLERANCE, first


# ── views and memory ─────────────────────────────────────────────────────────────────────────────────────────────


def test_parts_of_parts_are_views() -> None:
    b = Build()
    first, second = b.ops("Split", b.input(12, 4), axis=0, split=(8, 4))
    left, right = b.ops("Split", first, axis=0, split=(3, 5))
    program = check(b.outputs(left, b.op("Reshape", right, shape=(4, 5)), second))
    assert program.kernels == 0


def test_parts_of_channels_in_blocks_are_views() -> None:
    b = Build()
    c = b.conv(b.input(1, 16, 6, 6), 48, 1)
    one, two = b.ops("Split", c, axis=1, split=(16, 32))
    program = check(b.outputs(b.conv(one, 16, 3), b.conv(two, 16, 3)))
    assert program.kernels == 6


def test_concatenated_convolutions_are_computed_where_they_belong() -> None:
    b = Build()
    x = b.input(1, 16, 6, 6)
    whole = b.op("Concat", b.op("Relu", b.conv(x, 16, 3)), b.conv(x, 32, 1), axis=1)
    again = b.op("Concat", whole, b.conv(whole, 16, 3), axis=1)
    program = check(b.outputs(b.conv(again, 16)))
    assert program.kernels == 6


def test_concat_of_what_lies_elsewhere_copies() -> None:
    b = Build()
    x = b.op("Relu", b.input(4, 5))
    one, two = b.ops("Split", x, axis=0, split=(2, 2))
    first = b.op("Concat", two, one, axis=0)
    check(b.outputs(first, b.op("Concat", x, b.op("Exp", two), axis=0), b.op("Concat", x, b.op("Neg", x), axis=0)))


def test_concat_of_one_value_twice() -> None:
    b = Build()
    x = b.op("Relu", b.input(1, 5))
    check(b.outputs(b.op("Concat", x, x, axis=1), b.op("Concat", x, axis=1)))


def test_concat_of_graph_inputs() -> None:
    b = Build()
    x, y = b.input(1, 3), b.input(1, 4)
    check(b.outputs(b.op("Concat", x, y, axis=1), b.op("Concat", y, x, axis=1), x))


def test_overlapping_views_are_not_overwritten() -> None:
    b = Build()
    x = b.op("Relu", b.input(6, 8))
    low = b.op("Slice", x, starts=(0,), ends=(4,), axes=(0,))
    high = b.op("Slice", x, starts=(2,), ends=(6,), axes=(0,))
    check(b.outputs(b.op("Add", low, high)))


def test_a_view_that_is_read_later_keeps_its_memory() -> None:
    b = Build()
    x = b.op("Exp", b.input(2, 8))
    view = b.op("Reshape", x, shape=(4, 4))
    y = b.op("Tanh", b.op("Tanh", b.op("Neg", x)))
    check(b.outputs(b.op("MatMul", y, b.op("Reshape", view, shape=(8, 2)))))


def test_elementwise_results_take_the_memory_of_dead_operands() -> None:
    b = Build()
    y = b.input(1, 4096)
    for _ in range(10):
        y = b.op("Softmax", y)
        y = b.op("Mul", y, b.positive(1, 4096))
        y = b.op("Floor", y)
    program = check(b.outputs(y))
    assert program.peak_bytes <= 2 * 4096 * 4


def test_the_arena_is_far_smaller_than_all_values() -> None:
    b = Build()
    y = b.input(1, 16, 32, 32)
    for _ in range(10):
        y = b.conv(y, 16, 3)
    program = check(b.outputs(y))
    assert program.peak_bytes <= 3 * 16 * 32 * 32 * 4


def test_regions_in_use_at_once_do_not_overlap() -> None:
    random = np.random.default_rng(3)
    regions = []
    for _ in range(200):
        region = Region(int(random.integers(1, 5000)))
        first = int(random.integers(0, 100))
        region.live(first, first + int(random.integers(0, 20)))
        regions.append(region)
    total = place_regions(regions)
    for i, a in enumerate(regions):
        assert a.offset % 64 == 0 and a.offset + a.size <= total
        for c in regions[:i]:
            apart_in_time = a.first > c.last or c.first > a.last
            assert apart_in_time or a.offset >= c.offset + c.size or c.offset >= a.offset + a.size


def test_weights_that_were_laid_out_are_not_kept_twice() -> None:
    import gc
    import weakref

    b = Build()
    array = b.random.standard_normal((16, 16, 3, 3)).astype(np.float32)
    seen = weakref.ref(array)
    w = b.graph.add_weight(Weight(TensorType(DType.FLOAT, array.shape), array))
    graph = b.outputs(b.op("Conv", b.input(1, 16, 8, 8), w))
    program = OneDNNBackend(1).compile(graph)
    feeds = feeds_for(graph)
    before = program(feeds)["y0"]
    del array, w, graph, b
    gc.collect()
    assert seen() is None
    assert np.array_equal(program(feeds)["y0"], before)


# ── programs ─────────────────────────────────────────────────────────────────────────────────────────────────────


def test_outputs_are_the_callers_own() -> None:
    b = Build()
    x = b.input(1, 3, 4)
    graph = b.outputs(b.op("Relu", x), x, b.weight(2, 2))
    program = OneDNNBackend(1).compile(graph)
    one = program({"x0": np.ones((1, 3, 4), np.float32)})
    kept = {k: v.copy() for k, v in one.items()}
    one["y2"][:] = 7
    two = program({"x0": np.full((1, 3, 4), 2, np.float32)})
    assert np.array_equal(one["y0"], kept["y0"]) and np.array_equal(one["y1"], kept["y1"])
    assert (two["y0"] == 2).all() and np.array_equal(two["y2"], kept["y2"])


def test_inputs_are_left_alone_and_need_not_be_contiguous() -> None:
    b = Build()
    graph = b.outputs(b.op("Tanh", b.op("Neg", b.input(4, 6))))
    base = np.random.default_rng(0).standard_normal((6, 8)).astype(np.float32)
    fed = base[:, ::2].T
    before = base.copy()
    got = OneDNNBackend(1).compile(graph)({"x0": fed})["y0"]
    assert relative_error(got, np.tanh(-fed)) < 1e-6 and np.array_equal(base, before)


def test_repeated_calls_agree_bit_by_bit() -> None:
    b = Build()
    x = b.input(1, 16, 8, 8)
    graph = b.outputs(b.op("Add", b.conv(x, 16, 3), b.conv(x, 16, 3)))
    program, feeds = OneDNNBackend(2).compile(graph), feeds_for(graph)
    first = program(feeds)["y0"]
    assert all(np.array_equal(program(feeds)["y0"], first) for _ in range(5))


def test_programs_run_side_by_side_in_threads() -> None:
    def made(channels: int) -> Graph:
        b = Build(channels)
        y = b.input(1, 16, 12, 12)
        for _ in range(4):
            y = b.op("Relu", b.conv(y, channels, 3))
        return b.outputs(y)

    graphs = [made(16), made(32)]
    programs = [OneDNNBackend(1).compile(g) for g in graphs]
    feeds = [[feeds_for(g, seed) for seed in range(4)] for g in graphs]
    wanted = [[p(f)["y0"] for f in fs] for p, fs in zip(programs, feeds, strict=True)]
    wrong: list[object] = []

    def work(which: int, turn: int) -> None:
        for i in range(60):
            seed = (i + turn) % 4
            if not np.array_equal(programs[which](feeds[which][seed])["y0"], wanted[which][seed]):
                wrong.append((which, seed))

    # two programs, and two threads that share each
    threads = [threading.Thread(target=work, args=(i % 2, i)) for i in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong


def test_threads_are_set_for_the_run_only() -> None:
    before = library().get_max_threads()
    b = Build()
    graph = b.outputs(b.conv(b.input(1, 16, 8, 8), 16, 3))
    program = OneDNNBackend().compile(graph, threads=before + 1)
    assert library().get_max_threads() == before
    program(feeds_for(graph))
    assert library().get_max_threads() == before
    with pytest.raises(BackendError, match="from 1 to"):
        OneDNNBackend(0)


def test_wrong_inputs_get_one_sentence() -> None:
    b = Build()
    program = OneDNNBackend(1).compile(b.outputs(b.op("Add", b.input("n", 4), b.input("n", 4))))
    good = np.zeros((2, 4), np.float32)
    for feeds, words in (
        ({"x0": good}, "'x1'.*missing"),
        ({"x0": good, "x1": good, "z": good}, "no input 'z'"),
        ({"x0": good, "x1": good.astype(np.float64)}, "'x1' must be float.*float64"),
        ({"x0": good, "x1": np.zeros((2, 5), np.float32)}, "'x1'.*2×5"),
        ({"x0": good, "x1": np.zeros((3, 4), np.float32)}, "'x1'.*n = 2"),
        ({"x0": good, "x1": np.zeros(4, np.float32)}, "'x1'"),
    ):
        with pytest.raises(InputError, match=words):
            program(feeds)


def test_symbolic_sizes_are_compiled_once_each() -> None:
    b = Build()
    x = b.input("n", 16, "h", 8)
    y = b.op("Relu", b.conv(x, 32, 3))
    graph = b.outputs(b.op("Reshape", b.op("GlobalAveragePool", y), shape=(0, -1)), b.op("Shape", x))
    program = OneDNNBackend(1).compile(graph)
    assert program.kernels == 0
    for n, h in ((1, 8), (3, 5), (1, 8)):
        feeds = feeds_for(graph, n=n, h=h)
        assert worst(program(feeds), evaluate_graph(graph, feeds, wide=True)) <= TOLERANCE
    assert len(program._cache) == 2 and program.kernels > 0 and program.peak_bytes > 0


def test_graphs_without_operators() -> None:
    b = Build()
    x = b.input(2, 3)
    program = check(b.outputs(x, b.weight(2), x))
    assert program.kernels == 0
    empty = Build()
    assert OneDNNBackend(1).compile(empty.outputs())({}) == {}


def test_scalars_and_empty_tensors() -> None:
    b = Build()
    s = b.op("ReduceSum", b.input(3, 4), keepdims=0)
    e = b.op("Relu", b.input(0, 4))
    m = b.op("MatMul", e, b.weight(4, 5))
    k = b.op("MatMul", b.input(3, 0), b.input(0, 2))
    check(b.outputs(b.op("Exp", b.op("Mul", s, b.constant(0.1))), e, m, b.op("Concat", m, m, axis=0), k))


def test_an_unused_input_is_asked_for_and_ignored() -> None:
    b = Build()
    x, _ = b.input(2), b.input(3)
    check(b.outputs(b.op("Neg", x)))


def test_a_default_stands_in_for_an_input_left_out() -> None:
    b = Build()
    x = b.input(2)
    graph = b.outputs(b.op("Neg", x))
    graph.info.input_defaults["x0"] = Weight(x.type, np.array([1, 2], np.float32))
    program = OneDNNBackend(1).compile(graph)
    assert program({})["y0"].tolist() == [-1, -2]
    assert program({"x0": np.zeros(2, np.float32)})["y0"].tolist() == [0, 0]


# ── what is not modelled ─────────────────────────────────────────────────────────────────────────────────────────


def _opaque(b: Build, op_type: str, inputs: Sequence[Value], types: Sequence[TensorType], **attrs: object) -> Value:
    from onnx import helper

    proto = helper.make_node(op_type, [f"i{i}" for i in range(len(inputs))], ["o0"], **attrs)
    full: dict[str, AttrValue] = {"proto": proto.SerializeToString(), "outputs": (True,), "opset": 21}
    return b.graph.make(opaque(op_type), inputs, full, types).outputs[0]


def test_an_opaque_node_runs_between_kernels() -> None:
    b = Build()
    x = b.op("Relu", b.conv(b.input(1, 16, 5, 5), 16, 3))
    t = _opaque(b, "ThresholdedRelu", [x], [x.type], alpha=0.3)
    check(b.outputs(b.op("Exp", t), x))


def test_strings_pass_through() -> None:
    b = Build()
    x = b.input(3, dtype=DType.STRING)
    y = b.op("Concat", x, b.op("Identity", x), axis=0)
    graph = b.outputs(y, b.op("Equal", x, x), x)
    fed = np.array(["a", "", "ä"], object)
    got = OneDNNBackend(1).compile(graph)({"x0": fed})
    assert got["y0"].tolist() == ["a", "", "ä"] * 2 and got["y1"].all() and got["y2"].tolist() == fed.tolist()


def test_a_shape_known_at_run_time_only_is_evaluated_and_said_once(caplog: pytest.LogCaptureFixture) -> None:
    b = Build()
    x = b.input(2, 3)
    found = _opaque(b, "NonZero", [x], [TensorType(DType.INT64, (2, SymDim.named("found")))])
    graph = b.outputs(b.op("Cast", found, to=DType.FLOAT))
    program = OneDNNBackend(1).compile(graph)
    fed = np.array([[1, 0, 2], [0, 0, 3]], np.float32)
    with caplog.at_level("WARNING"):
        for _ in range(2):
            assert program({"x0": fed})["y0"].tolist() == [[0, 0, 1], [0, 2, 2]]
    assert sum("known at run time only" in r.message for r in caplog.records) == 1


def test_an_index_out_of_range_is_an_error() -> None:
    b = Build()
    program = OneDNNBackend(1).compile(b.outputs(b.op("Gather", b.input(3, 2), b.input(2, dtype=DType.INT64))))
    with pytest.raises(TasoError, match="outside"):
        program({"x0": np.zeros((3, 2), np.float32), "x1": np.array([0, 5])})


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_weights_that_are_not_finite_give_what_the_definitions_give(bad: float) -> None:
    b = Build()
    w = b.random.standard_normal((16, 16, 1, 1)).astype(np.float32)
    w[3, 2] = bad
    y = b.op("Relu", b.op("Conv", b.input(1, 16, 6, 6), b.constant(w)))
    y = b.op("MaxPool", y, kernel_shape=(2, 2))
    y = b.op("HardSigmoid", b.op("Clip", y, min=-1.0, max=1.0))
    z = b.op("ReduceMax", b.conv(y, 16), axes=(2, 3))
    graph = b.outputs(y, z, b.op("Gelu", z))
    feeds = feeds_for(graph)
    wanted = evaluate_graph(graph, feeds)
    assert any(not np.isfinite(v).all() for v in wanted.values()) or np.isinf(bad)
    assert worst(OneDNNBackend(1).compile(graph)(feeds), wanted) <= TOLERANCE


def test_a_mask_of_minus_infinity_keeps_the_fast_kernels() -> None:
    b = Build()
    mask = np.triu(np.full((6, 6), -np.inf, np.float32), 1)
    scores = b.op("Add", b.op("MatMul", b.input(2, 6, 4), b.input(2, 4, 6)), b.constant(mask))
    program = check(b.outputs(b.op("MatMul", b.op("Softmax", scores), b.input(2, 6, 3))))
    assert len(implementations(program)) == program.kernels


# ── the search measures what runs ────────────────────────────────────────────────────────────────────────────────


def test_every_kernel_of_a_plan_can_be_measured() -> None:
    b = Build()
    x = b.input(1, 16, 8, 8)
    y = b.op("Relu", b.op("Add", b.conv(x, 32, 3), b.conv(x, 32, 1)))
    one, two = b.ops("Split", y, axis=1, split=(16, 16))
    g = b.op("Gather", b.op("Flatten", b.op("Concat", two, one, axis=1)), b.constant(np.array([1, 0])), axis=1)
    backend = OneDNNBackend(1)
    plan = lower(b.outputs(b.op("Softmax", g)), backend.lowering)
    for job in plan.jobs:
        seconds = backend.measure(job.kernel)
        assert seconds == 0 if is_view(job.kernel) else 0 < seconds < 1


def test_a_change_between_layouts_with_the_same_bytes_is_free() -> None:
    backend = OneDNNBackend(1)
    for dims, same in (((1, 32, 1, 1), True), ((1, 32, 4, 4), False)):
        t = TensorType(DType.FLOAT, dims)
        kernel = Kernel((Operand(t, PLAIN, False),), (), (Operand(t, BLOCKED, False),))
        assert (backend.measure(kernel) == 0) == same


def test_layouts_agree_with_the_bytes_they_promise() -> None:
    from taso.backends.onednn.places import describe

    layouts = Layouts(16)
    for dims in ((1, 16, 3, 3), (2, 32, 1, 1), (1, 1, 4, 5), (2, 16, 1, 4), (1, 20, 3, 3), (3, 16, 2), (1, 20, 1)):
        t, order = TensorType(DType.FLOAT, dims), {}
        for layout in (PLAIN, BLOCKED, LAST):
            desc = describe(dims, layout, 16)
            target = np.arange(np.prod(dims), dtype=np.float32)
            from taso.backends.onednn.places import lay_out

            block = lay_out(target, describe(dims, PLAIN, 16), desc)
            order[layout] = _raw(block.address, target.size)
        for a in order:
            for c in order:
                if layouts.alike(t, a, c):
                    assert np.array_equal(order[a], order[c]), (dims, a, c)


def _raw(address: int, count: int) -> Array:
    import ctypes

    return np.array((ctypes.c_float * count).from_address(address), np.float32)


def test_the_device_key_names_what_decides_the_time() -> None:
    one, two = OneDNNBackend(1), OneDNNBackend(2)
    assert one.device_key() != two.device_key() and library().version_string in one.device_key()


def test_profile_names_each_kernel() -> None:
    b = Build()
    graph = b.outputs(b.op("Relu", b.op("MatMul", b.input(4, 8), b.weight(8, 8))))
    (entry,) = OneDNNBackend(1).compile(graph).profile(feeds_for(graph))
    assert entry[0] == "MatMul+Relu" and entry[1] > 0


# ── random graphs ────────────────────────────────────────────────────────────────────────────────────────────────

_ACTIVATIONS = ["Relu", "Sigmoid", "Tanh", "Abs", "Neg", "HardSwish", "Gelu", "Erf", "Softsign", "Floor"]


def _random_graph(draw: st.DrawFn) -> Graph:
    """Convolutional blocks with branches, splits, concats and residuals, in and out of the blocked layouts."""
    b = Build(draw(st.integers(0, 99)))
    batch = draw(st.sampled_from([1, 2]))
    values = [b.input(batch, draw(st.sampled_from([3, 16, 20])), 6, 6)]
    for _ in range(draw(st.integers(2, 9))):
        x = draw(st.sampled_from(values))
        values.extend(_random_step(b, draw, x, values))
    outputs = draw(st.lists(st.sampled_from(values[1:]), min_size=1, max_size=3))
    return b.outputs(*outputs, values[-1])


def _random_step(b: Build, draw: st.DrawFn, x: Value, values: list[Value]) -> list[Value]:
    kinds = ["conv", "conv", "unary", "binary", "channel", "split", "concat", "pool", "norm", "move"]
    kind = draw(st.sampled_from(kinds))
    c = x.dim(1)
    if kind == "conv":
        group = draw(st.sampled_from([1, 1, c]))
        out = c if group == c else draw(st.sampled_from([8, 16, 32]))
        return [b.conv(x, out, draw(st.sampled_from([1, 3])), group)]
    if kind == "unary":
        return [b.op(draw(st.sampled_from(_ACTIVATIONS)), x)]
    if kind == "binary":
        alike = [v for v in values if v.type == x.type]
        return [b.op(draw(st.sampled_from(["Add", "Mul", "Sub", "Max"])), x, draw(st.sampled_from(alike)))]
    if kind == "channel":
        return [b.op(draw(st.sampled_from(["Add", "Mul", "Sub", "Div"])), x, b.positive(1, c, 1, 1))]
    if kind == "split" and c > 1:
        first = draw(st.sampled_from([n for n in (1, 4, 16, c // 2) if 0 < n < c]))
        return list(b.ops("Split", x, axis=1, split=(first, c - first)))
    if kind == "concat":
        fitting = [v for v in values if v.type.dims[2:] == x.type.dims[2:] and v.dim(1) + c <= 128]
        others = draw(st.lists(st.sampled_from(fitting), max_size=2)) if fitting else []
        return [b.op("Concat", x, *others[: (128 - c) // max(1, max((v.dim(1) for v in others), default=1))], axis=1)]
    if kind == "pool":
        return [b.op(draw(st.sampled_from(["MaxPool", "AveragePool"])), x, kernel_shape=(3, 3), pads=(1, 1, 1, 1))]
    if kind == "norm":
        return [_batch_norm(b, x)]
    turned = b.op("Transpose", x, perm=(0, 1, 3, 2))
    return [b.op("Reshape", b.op("Reshape", turned, shape=(0, -1)), shape=(0, *x.type.static_shape[1:]))]


random_graphs = st.composite(_random_graph)


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(random_graphs())
def test_random_graphs_give_what_the_definitions_say(graph: Graph) -> None:
    program = OneDNNBackend(1).compile(graph)
    for seed in (1, 2):
        feeds = feeds_for(graph, seed)
        assert worst(program(feeds), evaluate_graph(graph, feeds, wide=True)) <= TOLERANCE


def test_a_corrupted_kernel_is_caught_by_the_same_comparison(monkeypatch: pytest.MonkeyPatch) -> None:
    b = Build()
    graph = b.outputs(b.op("Relu", b.op("Mul", b.conv(b.input(1, 16, 6, 6), 16, 3), b.positive(1, 16, 1, 1))))
    monkeypatch.setitem(kernels._BINARY, "Mul", "add")
    with pytest.raises(AssertionError):
        check(graph)


def test_a_lowering_without_blocks_gives_the_same() -> None:
    b = Build()
    x = b.input(1, 16, 6, 6)
    graph = b.outputs(b.op("Relu", b.op("Add", b.conv(x, 16, 3), b.conv(x, 16, 1))))
    plain = executor.Program(graph, Lowering(Layouts(0), kernels.OneDNNFusion()), 1)
    feeds = feeds_for(graph)
    assert worst(plain(feeds), evaluate_graph(graph, feeds, wide=True)) <= TOLERANCE
