"""The raw oneDNN layer against plain NumPy."""

from __future__ import annotations

import ctypes
import itertools
import math
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from taso.backends.onednn import library as onednn_library
from taso.backends.onednn import primitives as p
from taso.backends.onednn.library import Library, explain_load_error, find_library, isa_name, library, status_error
from taso.backends.onednn.primitives import Attributes, DataType, Memory, MemoryDesc, Primitive, Unimplemented
from taso.graph.errors import BackendError, BackendUnavailable

try:
    library()
    _MISSING = ""
except BackendUnavailable as error:
    _MISSING = str(error)

needs_library = pytest.mark.skipif(bool(_MISSING), reason=_MISSING or "oneDNN loads")

Array = NDArray[np.generic]
F32 = DataType.F32


def rng() -> np.random.Generator:
    return np.random.default_rng(7)


def normal(*dims: int) -> NDArray[np.float32]:
    return rng().standard_normal(dims).astype(np.float32)


def relative_error(got: Array, wanted: Array) -> float:
    assert got.shape == wanted.shape
    assert np.isfinite(got).all()
    scale = float(np.abs(wanted).max())
    assert scale > 0
    return float(np.abs(got.astype(np.float64) - wanted.astype(np.float64)).max()) / scale


def laid_out(source: Memory, desc: MemoryDesc) -> Memory:
    """A copy of the source in the layout of `desc`."""
    if source.desc == desc:
        return source
    target = Memory.allocate(desc)
    execute(p.reorder(source.desc, desc), {p.SRC: source, p.DST: target})
    return target


def execute(primitive: Primitive, memories: dict[int, Memory]) -> None:
    if p.SCRATCHPAD in primitive.arguments:
        memories = memories | {p.SCRATCHPAD: Memory.allocate(primitive.arguments[p.SCRATCHPAD])}
    primitive.bind(memories)()


def run(primitive: Primitive, inputs: Mapping[int, Array | Memory], before: Array | None = None) -> Array:
    """Runs it on arrays, put into the layouts that it asks for; `before` is what dst holds at first."""
    memories = {}
    for argument, given in inputs.items():
        memory = given if isinstance(given, Memory) else Memory.from_array(given)
        memories[argument] = laid_out(memory, primitive.arguments.get(argument, memory.desc))
    dst = primitive.arguments[p.DST]
    plain = MemoryDesc.plain(dst.dims, dst.dtype)
    held = Memory.allocate(dst) if before is None else laid_out(Memory.from_array(before.copy()), dst)
    execute(primitive, memories | {p.DST: held})
    return laid_out(held, plain).array().copy()


def desc_of(array: Array) -> MemoryDesc:
    return MemoryDesc.of_array(array)


def open_desc(array: Array) -> MemoryDesc:
    return MemoryDesc.any(array.shape, DataType.of_numpy(array.dtype))


def plain(*dims: int) -> MemoryDesc:
    return MemoryDesc.plain(dims, F32)


def open_f32(*dims: int) -> MemoryDesc:
    return MemoryDesc.any(dims, F32)


# NumPy twins, in float64.


def windows(
    x: Array, kernel: Sequence[int], out: Sequence[int], strides: Sequence[int], dilations: Sequence[int]
) -> dict[tuple[int, ...], Array]:
    """For each kernel position, the elements of padded x that it meets, `out` in spatial dimensions."""
    found = {}
    for position in itertools.product(*map(range, kernel)):
        region = tuple(
            slice(at * dilation, at * dilation + stride * (extent - 1) + 1, stride)
            for at, dilation, stride, extent in zip(position, dilations, strides, out, strict=True)
        )
        found[position] = x[(slice(None), slice(None), *region)]
    return found


def padded(x: Array, begin: Sequence[int], end: Sequence[int], value: float = 0.0) -> Array:
    widths = [(0, 0), (0, 0), *zip(begin, end, strict=True)]
    return np.pad(x.astype(np.float64), widths, constant_values=value)


def out_dims(
    x: Sequence[int],
    kernel: Sequence[int],
    strides: Sequence[int],
    dilations: Sequence[int],
    begin: Sequence[int],
    end: Sequence[int],
) -> tuple[int, ...]:
    return tuple(
        (extent + b + e - dilation * (k - 1) - 1) // stride + 1
        for extent, k, stride, dilation, b, e in zip(x, kernel, strides, dilations, begin, end, strict=True)
    )


def numpy_conv(
    x: Array,
    w: Array,
    strides: Sequence[int],
    dilations: Sequence[int],
    begin: Sequence[int],
    end: Sequence[int],
    groups: int,
) -> Array:
    kernel = w.shape[2:]
    out = out_dims(x.shape[2:], kernel, strides, dilations, begin, end)
    result = np.zeros((x.shape[0], w.shape[0], *out))
    ins, outs = w.shape[1], w.shape[0] // groups
    for position, part in windows(padded(x, begin, end), kernel, out, strides, dilations).items():
        for g in range(groups):
            weights = w[(slice(g * outs, (g + 1) * outs), slice(None), *position)].astype(np.float64)
            values = np.tensordot(weights, part[:, g * ins : (g + 1) * ins], axes=(1, 1))
            result[:, g * outs : (g + 1) * outs] += np.moveaxis(values, 0, 1)
    return result


def numpy_deconv(
    x: Array,
    w: Array,
    strides: Sequence[int],
    dilations: Sequence[int],
    begin: Sequence[int],
    out: Sequence[int],
    groups: int,
) -> Array:
    """Scatters each input through ONNX ConvTranspose weights, then crops."""
    kernel = w.shape[2:]
    spatial = x.shape[2:]
    room = [
        max(s * (n - 1) + d * (k - 1) + 1, b + o)
        for s, n, d, k, b, o in zip(strides, spatial, dilations, kernel, begin, out, strict=True)
    ]
    ins, outs = w.shape[0] // groups, w.shape[1]
    full = np.zeros((x.shape[0], outs * groups, *room))
    for position, part in windows(full, kernel, spatial, strides, dilations).items():
        for g in range(groups):
            weights = w[(slice(g * ins, (g + 1) * ins), slice(None), *position)].astype(np.float64)
            values = np.tensordot(weights, x[:, g * ins : (g + 1) * ins].astype(np.float64), axes=(0, 1))
            part[:, g * outs : (g + 1) * outs] += np.moveaxis(values, 0, 1)
    return full[(slice(None), slice(None), *(slice(b, b + o) for b, o in zip(begin, out, strict=True)))]


def numpy_pool(
    x: Array,
    kind: str,
    kernel: Sequence[int],
    strides: Sequence[int],
    dilations: Sequence[int],
    begin: Sequence[int],
    end: Sequence[int],
) -> Array:
    out = out_dims(x.shape[2:], kernel, strides, dilations, begin, end)
    fill = -math.inf if kind == "max" else 0.0
    parts = list(windows(padded(x, begin, end, fill), kernel, out, strides, dilations).values())
    if kind == "max":
        return np.max(parts, axis=0)
    ones = padded(np.ones_like(x), begin, end, 1.0 if kind == "avg_include_padding" else 0.0)
    counts = np.sum(list(windows(ones, kernel, out, strides, dilations).values()), axis=0)
    return np.sum(parts, axis=0) / counts


# Convolution.

CONVOLUTIONS = [
    # x, weights (ONNX order), strides, dilations, pads begin, pads end, groups
    ((2, 5, 9, 7), (6, 5, 3, 2), (1, 1), (1, 1), (0, 0), (0, 0), 1),
    ((2, 5, 9, 7), (6, 5, 3, 2), (2, 1), (1, 2), (2, 0), (1, 1), 1),
    ((1, 6, 11, 8), (9, 2, 3, 3), (1, 2), (2, 1), (0, 1), (3, 2), 3),
    ((2, 8, 6, 7), (8, 1, 3, 3), (1, 1), (1, 1), (1, 1), (1, 0), 8),
    ((2, 32, 10, 9), (64, 16, 3, 3), (1, 1), (1, 1), (1, 1), (1, 1), 2),
    ((1, 3, 8, 8), (4, 3, 2, 2), (1, 1), (1, 1), (3, 0), (0, 4), 1),
    ((2, 4, 13), (6, 2, 4), (3,), (2,), (1,), (4,), 2),
    ((1, 4, 5, 6, 7), (6, 2, 2, 3, 1), (1, 2, 1), (2, 1, 1), (1, 0, 0), (0, 2, 1), 2),
    ((1, 20, 5, 5), (24, 20, 1, 1), (2, 2), (1, 1), (0, 0), (0, 0), 1),
]


@needs_library
@pytest.mark.parametrize("layout", ["plain", "chosen"])
@pytest.mark.parametrize("case", CONVOLUTIONS, ids=str)
def test_convolution_equals_numpy(case: tuple[tuple[int, ...], ...], layout: str) -> None:
    dims, weight_dims, strides, dilations, begin, end, groups = case
    assert isinstance(groups, int)
    x, w, bias = normal(*dims), normal(*weight_dims), normal(weight_dims[0])
    wanted = numpy_conv(x, w, strides, dilations, begin, end, groups)
    wanted = wanted + bias.reshape(-1, *[1] * (len(dims) - 2))
    make = open_f32 if layout == "chosen" else plain
    conv = p.convolution(
        make(*dims),
        make(*weight_dims),
        make(*wanted.shape),
        bias=plain(weight_dims[0]),
        strides=strides,
        dilations=dilations,
        pads_begin=begin,
        pads_end=end,
        groups=groups,
    )
    weights = w if groups == 1 else w.reshape(groups, weight_dims[0] // groups, *weight_dims[1:])
    got = run(conv, {p.SRC: x, p.WEIGHTS: weights, p.BIAS: bias})
    assert relative_error(got, wanted) < 1e-5


@needs_library
def test_an_open_layout_lets_the_convolution_choose_blocks() -> None:
    conv = p.convolution(open_f32(1, 32, 10, 10), open_f32(64, 32, 3, 3), open_f32(1, 64, 8, 8))
    for desc in (conv.src_desc(), conv.weights_desc(), conv.dst_desc()):
        assert not desc.is_any
    assert not conv.weights_desc().is_plain
    assert conv.src_desc(0).dims == (1, 32, 10, 10)
    assert conv.weights_desc(1).ndims == 0
    assert conv.workspace_desc().ndims == 0
    assert conv.implementation


@needs_library
@pytest.mark.parametrize("algorithm", ["winograd", "auto"])
def test_algorithms_other_than_direct_equal_numpy_or_say_unimplemented(algorithm: str) -> None:
    x, w = normal(1, 32, 28, 28), normal(32, 32, 3, 3)
    wanted = numpy_conv(x, w, (1, 1), (1, 1), (1, 1), (1, 1), 1)
    descs = (open_desc(x), open_desc(w), open_f32(*wanted.shape))
    try:
        conv = p.convolution(*descs, pads_begin=(1, 1), pads_end=(1, 1), algorithm=algorithm)
    except Unimplemented:
        assert algorithm == "winograd"
        return
    assert relative_error(run(conv, {p.SRC: x, p.WEIGHTS: w}), wanted) < 1e-4


@needs_library
def test_every_further_implementation_gives_the_same_result() -> None:
    x, w = normal(1, 16, 9, 9), normal(16, 16, 3, 3)
    wanted = numpy_conv(x, w, (1, 1), (1, 1), (0, 0), (0, 0), 1)
    conv: Primitive | None = p.convolution(open_desc(x), open_desc(w), open_f32(*wanted.shape))
    names = []
    while conv is not None:
        names.append(conv.implementation)
        assert relative_error(run(conv, {p.SRC: x, p.WEIGHTS: w}), wanted) < 1e-5
        conv = conv.next_implementation()
    assert len(names) > 1


DECONVOLUTIONS = [
    # x, weights (ONNX order), strides, dilations, pads begin, pads end, output padding, groups
    ((2, 5, 4, 6), (5, 3, 3, 2), (1, 1), (1, 1), (0, 0), (0, 0), (0, 0), 1),
    ((1, 6, 5, 4), (6, 2, 3, 3), (2, 3), (1, 2), (1, 0), (0, 2), (1, 2), 3),
    ((2, 16, 5, 5), (16, 32, 2, 2), (2, 2), (1, 1), (0, 0), (0, 0), (0, 0), 1),
    ((1, 4, 7), (4, 3, 4), (3,), (1,), (2,), (1,), (0,), 2),
]


@needs_library
@pytest.mark.parametrize("case", DECONVOLUTIONS, ids=str)
def test_deconvolution_equals_numpy(case: tuple[tuple[int, ...], ...]) -> None:
    dims, weight_dims, strides, dilations, begin, end, extra, groups = case
    assert isinstance(groups, int)
    out = tuple(
        s * (n - 1) + o + d * (k - 1) + 1 - b - e
        for s, n, o, d, k, b, e in zip(
            strides, dims[2:], extra, dilations, weight_dims[2:], begin, end, strict=True
        )
    )
    x, w = normal(*dims), normal(*weight_dims)
    wanted = numpy_deconv(x, w, strides, dilations, begin, out, groups)
    deconv = p.deconvolution(
        open_desc(x),
        p.deconvolution_weights(open_desc(w), groups),
        open_f32(*wanted.shape),
        strides=strides,
        dilations=dilations,
        pads_begin=begin,
        pads_end=[e - o for e, o in zip(end, extra, strict=True)],
        groups=groups,
    )
    weights = Memory.from_array(w, p.deconvolution_weights(desc_of(w), groups))
    assert relative_error(run(deconv, {p.SRC: x, p.WEIGHTS: weights}), wanted) < 1e-5


# Matrix products.


@needs_library
@pytest.mark.parametrize(
    "left, right, bias",
    [
        ((5, 7), (7, 3), (1, 3)),
        ((5, 7), (7, 3), (5, 1)),
        ((4, 5, 7), (4, 7, 3), None),
        ((4, 5, 7), (1, 7, 3), (1, 1, 3)),
        ((2, 1, 5, 7), (1, 3, 7, 9), (1, 3, 1, 9)),
        ((1, 33, 65), (6, 65, 17), None),
    ],
)
def test_matmul_equals_numpy(
    left: tuple[int, ...], right: tuple[int, ...], bias: tuple[int, ...] | None
) -> None:
    a, b = normal(*left), normal(*right)
    wanted = a.astype(np.float64) @ b
    inputs: dict[int, Array] = {p.SRC: a, p.WEIGHTS: b}
    if bias is not None:
        inputs[p.BIAS] = normal(*bias)
        wanted = wanted + inputs[p.BIAS]
    bias_desc = None if bias is None else plain(*bias)
    product = p.matmul(desc_of(a), open_desc(b), plain(*wanted.shape), bias=bias_desc)
    assert relative_error(run(product, inputs), wanted) < 1e-5


@needs_library
def test_matmul_reads_transposed_and_sliced_arrays_in_place() -> None:
    a = normal(9, 12)[1:6, 2:9]
    b = normal(3, 7).T
    product = p.matmul(desc_of(a), desc_of(b), plain(5, 3))
    assert product.arguments[p.WEIGHTS].strides == (1, 7)
    assert relative_error(run(product, {p.SRC: a, p.WEIGHTS: b}), a.astype(np.float64) @ b) < 1e-5


@needs_library
def test_inner_product_equals_numpy() -> None:
    x, w, bias = normal(3, 4, 5, 2), normal(7, 4, 5, 2), normal(7)
    wanted = x.reshape(3, -1).astype(np.float64) @ w.reshape(7, -1).T + bias
    product = p.inner_product(open_desc(x), open_desc(w), open_f32(3, 7), bias=plain(7))
    assert relative_error(run(product, {p.SRC: x, p.WEIGHTS: w, p.BIAS: bias}), wanted) < 1e-5


# Windows.


@needs_library
@pytest.mark.parametrize("kind", ["max", "avg_include_padding", "avg_exclude_padding"])
@pytest.mark.parametrize(
    "dims, kernel, strides, dilations, begin, end",
    [
        ((2, 5, 9, 7), (3, 2), (2, 1), (1, 1), (1, 0), (0, 1)),
        ((1, 16, 9, 7), (3, 3), (1, 2), (2, 1), (1, 2), (2, 0)),
        ((2, 3, 11), (4,), (3,), (1,), (2,), (1,)),
        ((1, 3, 4, 5, 6), (2, 2, 3), (1, 2, 2), (1, 1, 1), (0, 1, 1), (1, 0, 1)),
    ],
)
@pytest.mark.parametrize("layout", ["abcd", "blocked"])
def test_pooling_equals_numpy(
    kind: str,
    dims: tuple[int, ...],
    kernel: tuple[int, ...],
    strides: tuple[int, ...],
    dilations: tuple[int, ...],
    begin: tuple[int, ...],
    end: tuple[int, ...],
    layout: str,
) -> None:
    x = normal(*dims)
    wanted = numpy_pool(x, kind, kernel, strides, dilations, begin, end)
    tag = {3: "aBc8b", 4: "aBcd16b", 5: "aBcde4b"}[len(dims)]
    src = MemoryDesc.tagged(dims, F32, tag) if layout == "blocked" else plain(*dims)
    pool = p.pooling(
        *(src, open_f32(*wanted.shape), kernel),
        kind=kind,
        strides=strides,
        dilations=dilations,
        pads_begin=begin,
        pads_end=end,
    )
    assert relative_error(run(pool, {p.SRC: x}), wanted) < 1e-6


# Elementwise.


def logistic(x: Array) -> Array:
    return 1 / (1 + np.exp(-x))


def gelu_erf(x: NDArray[np.float64]) -> Array:
    erf = np.vectorize(math.erf)
    return 0.5 * x * (1 + erf(x / math.sqrt(2)))


ELTWISE: dict[str, tuple[float, float, Callable[[NDArray[np.float64]], Array]]] = {
    "relu": (0.25, 0, lambda x: np.where(x > 0, x, 0.25 * x)),
    "tanh": (0, 0, np.tanh),
    "elu": (0.7, 0, lambda x: np.where(x > 0, x, 0.7 * np.expm1(x))),
    "square": (0, 0, np.square),
    "abs": (0, 0, np.abs),
    "sqrt": (0, 0, np.sqrt),
    "linear": (1.5, -0.25, lambda x: 1.5 * x - 0.25),
    "soft_relu": (2.0, 0, lambda x: np.log1p(np.exp(2 * x)) / 2),
    "hardsigmoid": (0.3, 0.4, lambda x: np.clip(0.3 * x + 0.4, 0, 1)),
    "logistic": (0, 0, logistic),
    "exp": (0, 0, np.exp),
    "gelu_tanh": (0, 0, lambda x: 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))),
    "swish": (1.3, 0, lambda x: x * logistic(1.3 * x)),
    "log": (0, 0, np.log),
    "clip": (-0.5, 0.75, lambda x: np.clip(x, -0.5, 0.75)),
    "clip_v2": (-0.5, 0.75, lambda x: np.clip(x, -0.5, 0.75)),
    "pow": (1.5, 3.0, lambda x: 1.5 * x**3.0),
    "gelu_erf": (0, 0, gelu_erf),
    "round": (0, 0, np.round),
    "mish": (0, 0, lambda x: x * np.tanh(np.log1p(np.exp(x)))),
    "hardswish": (0.2, 0.4, lambda x: x * np.clip(0.2 * x + 0.4, 0, 1)),
}


def test_every_eltwise_algorithm_has_a_twin() -> None:
    assert set(ELTWISE) == set(p.ELTWISE)


@needs_library
@pytest.mark.parametrize("name", ELTWISE)
def test_eltwise_equals_numpy_alone_and_as_post_op(name: str) -> None:
    alpha, beta, twin = ELTWISE[name]
    x = 3 * normal(3, 5, 7)
    if name in ("sqrt", "log"):
        x = np.abs(x) + np.float32(0.1)
    wanted = twin(x.astype(np.float64))
    alone = p.eltwise(desc_of(x), desc_of(x), name, alpha=alpha, beta=beta)
    assert relative_error(run(alone, {p.SRC: x}), wanted) < 1e-5
    fused = Attributes(post_ops=(p.EltwisePostOp(name, alpha, beta),))
    same = p.binary(desc_of(x), plain(1, 1, 1), desc_of(x), "mul", attributes=fused)
    assert relative_error(run(same, {p.SRC: x, p.SRC_1: np.ones((1, 1, 1), np.float32)}), wanted) < 1e-5


BINARY: dict[str, Callable[[Array, Array], Array]] = {
    "add": np.add,
    "mul": np.multiply,
    "max": np.maximum,
    "min": np.minimum,
    "div": np.divide,
    "sub": np.subtract,
    "ge": np.greater_equal,
    "gt": np.greater,
    "le": np.less_equal,
    "lt": np.less,
    "eq": np.equal,
    "ne": np.not_equal,
}


def test_every_binary_algorithm_has_a_twin() -> None:
    assert set(BINARY) == set(p.BINARY)


@needs_library
@pytest.mark.parametrize("name", BINARY)
def test_binary_equals_numpy_with_broadcasting_alone_and_as_post_op(name: str) -> None:
    a = np.round(2 * normal(2, 5, 3, 4))
    b = np.round(2 * normal(1, 5, 1, 4)) + np.float32(0.5)
    if name in ("eq", "ne"):
        b -= np.float32(0.5)
    wanted = BINARY[name](a, b).astype(np.float64)
    alone = p.binary(desc_of(a), desc_of(b), desc_of(a), name)
    assert relative_error(run(alone, {p.SRC: a, p.SRC_1: b}), wanted) < 1e-6
    for second in (np.float32(0.5) + normal(1, 5, 1, 1), b[:, :1, :1, :1], np.resize(b, a.shape)):
        attributes = Attributes(post_ops=(p.BinaryPostOp(name, desc_of(second)),))
        fused = p.eltwise(desc_of(a), desc_of(a), "linear", alpha=1.0, attributes=attributes)
        wanted = BINARY[name](a, second).astype(np.float64)
        got = run(fused, {p.SRC: a, p.post_op_src(0): second})
        assert np.abs(got - wanted).max() <= 1e-6 * max(1.0, float(np.abs(wanted).max()))


@needs_library
@pytest.mark.parametrize("weights", [(1, 5, 1, 1), (2, 5, 3, 4), (1, 1, 1, 1)])
def test_prelu_equals_numpy(weights: tuple[int, ...]) -> None:
    x, w = normal(2, 5, 3, 4), normal(*weights)
    primitive = p.prelu(desc_of(x), open_desc(w), desc_of(x))
    assert relative_error(run(primitive, {p.SRC: x, p.WEIGHTS: w}), np.where(x > 0, x, x * w)) < 1e-6


# Post-ops.


@needs_library
def test_post_ops_run_in_the_order_given() -> None:
    x, w = normal(2, 16, 6, 5), normal(32, 16, 3, 3)
    before, scale, offset = normal(2, 32, 4, 3), normal(1, 32, 1, 1), normal(2, 32, 4, 3)[::-1].copy()
    conv = numpy_conv(x, w, (1, 1), (1, 1), (0, 0), (0, 0), 1)
    steps: list[tuple[p.PostOp, Callable[[Array], Array]]] = [
        (p.SumPostOp(0.5), lambda y: y + 0.5 * before),
        (p.EltwisePostOp("relu"), lambda y: np.maximum(y, 0)),
        (p.BinaryPostOp("mul", desc_of(scale)), lambda y: y * scale),
        (p.BinaryPostOp("add", open_desc(offset)), lambda y: y + offset),
        (p.EltwisePostOp("linear", 2.0, 1.0), lambda y: 2 * y + 1),
    ]
    seen = []
    for order in ([0, 1, 2, 3, 4], [0, 4, 3, 1, 2], [0, 2, 1, 4, 3]):
        wanted = conv
        for step in order:
            wanted = steps[step][1](wanted)
        attributes = Attributes(post_ops=tuple(steps[step][0] for step in order))
        primitive = p.convolution(open_desc(x), open_desc(w), open_f32(*wanted.shape), attributes=attributes)
        inputs: dict[int, Array] = {p.SRC: x, p.WEIGHTS: w}
        inputs[p.post_op_src(order.index(2))] = scale
        inputs[p.post_op_src(order.index(3))] = offset
        seen.append(run(primitive, inputs, before))
        assert relative_error(seen[-1], wanted) < 1e-5
    assert relative_error(seen[0], seen[1]) > 1e-2


@needs_library
@pytest.mark.parametrize("mask", [0, 2, 15])
def test_prelu_post_op_equals_numpy(mask: int) -> None:
    x, w = normal(2, 4, 6, 5), normal(6, 4, 3, 3)
    conv = numpy_conv(x, w, (1, 1), (1, 1), (0, 0), (0, 0), 1)
    slope = normal(*(extent if mask >> axis & 1 else 1 for axis, extent in enumerate(conv.shape)))
    attributes = Attributes(post_ops=(p.EltwisePostOp("linear", 1.0, -0.5), p.PreluPostOp(mask)))
    primitive = p.convolution(open_desc(x), open_desc(w), open_f32(*conv.shape), attributes=attributes)
    shifted = conv - 0.5
    wanted = np.where(shifted > 0, shifted, shifted * slope)
    got = run(primitive, {p.SRC: x, p.WEIGHTS: w, p.post_op_weights(1): slope})
    assert relative_error(got, wanted) < 1e-5


@needs_library
def test_depthwise_post_op_equals_two_convolutions() -> None:
    x, w, deep = normal(1, 32, 12, 12), normal(32, 32, 1, 1), normal(32, 1, 1, 3, 3)
    bias, deep_bias = normal(32), normal(32)[::-1].copy()
    first = numpy_conv(x, w, (1, 1), (1, 1), (0, 0), (0, 0), 1) + bias.reshape(-1, 1, 1)
    first = np.maximum(first, 0)
    second = numpy_conv(first, deep.reshape(32, 1, 3, 3), (1, 1), (1, 1), (1, 1), (1, 1), 32)
    wanted = second + deep_bias.reshape(-1, 1, 1)
    post_ops = (p.EltwisePostOp("relu"), p.DepthwisePostOp(3, 1, 1, bias_dtype=F32))
    try:
        primitive = p.convolution(
            *(open_desc(x), open_desc(w), open_f32(*wanted.shape)),
            bias=plain(32),
            attributes=Attributes(post_ops=post_ops),
        )
    except Unimplemented:
        pytest.skip(f"oneDNN fuses no depthwise convolution on {library().isa}")
    inputs: dict[int, Array] = {p.SRC: x, p.WEIGHTS: w, p.BIAS: bias}
    inputs |= {p.DEPTHWISE | p.WEIGHTS: deep, p.DEPTHWISE | p.BIAS: deep_bias}
    assert relative_error(run(primitive, inputs), wanted) < 1e-5


# Many inputs.


@needs_library
def test_concat_and_sum_equal_numpy() -> None:
    parts = [normal(2, channels, 4, 3) for channels in (3, 16, 1, 5)]
    joined = p.concat([desc_of(part) for part in parts], 1)
    inputs: dict[int, Array] = {p.multiple_src(index): part for index, part in enumerate(parts)}
    assert np.array_equal(run(joined, inputs), np.concatenate(parts, 1))

    terms = [normal(2, 3, 5), normal(2, 3, 5) * 2, normal(2, 3, 5) - 1]
    added = p.sum_of([desc_of(term) for term in terms], (1.0, -0.5, 2.0), plain(2, 3, 5))
    inputs = {p.multiple_src(index): term for index, term in enumerate(terms)}
    assert relative_error(run(added, inputs), terms[0] - 0.5 * terms[1] + 2 * terms[2]) < 1e-6


@needs_library
def test_concat_takes_blocked_sources_and_a_given_output() -> None:
    parts = [normal(2, 16, 4, 3), normal(2, 32, 4, 3)]
    joined = p.concat(
        [MemoryDesc.tagged(part.shape, F32, "aBcd16b") for part in parts], 1, plain(2, 48, 4, 3)
    )
    assert joined.dst_desc().is_dense_row_major
    inputs: dict[int, Array] = {p.multiple_src(index): part for index, part in enumerate(parts)}
    assert np.array_equal(run(joined, inputs), np.concatenate(parts, 1))


# Normalizations and reductions.


@needs_library
@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize("log", [False, True])
def test_softmax_equals_numpy(axis: int, log: bool) -> None:
    x = 4 * normal(3, 5, 7)
    shifted = np.exp(x.astype(np.float64) - x.max(axis, keepdims=True))
    wanted = shifted / shifted.sum(axis, keepdims=True)
    primitive = p.softmax(desc_of(x), desc_of(x), axis, log=log)
    assert relative_error(run(primitive, {p.SRC: x}), np.log(wanted) if log else wanted) < 1e-5


@needs_library
@pytest.mark.parametrize(
    "scale, shift, relu", [(True, True, False), (False, False, False), (True, False, True)]
)
@pytest.mark.parametrize("tag", ["abcd", "acdb", "aBcd16b"])
def test_batch_normalization_equals_numpy(scale: bool, shift: bool, relu: bool, tag: str) -> None:
    x = normal(2, 16, 3, 4)
    mean, variance = normal(16), np.abs(normal(16)) + np.float32(0.1)
    gamma, beta = normal(16)[::-1].copy(), normal(17)[1:].copy()
    column = (-1, 1, 1)
    wanted = (x.astype(np.float64) - mean.reshape(column)) / np.sqrt(variance.reshape(column) + 1e-3)
    inputs: dict[int, Array] = {p.SRC: x, p.MEAN: mean, p.VARIANCE: variance}
    if scale:
        wanted = wanted * gamma.reshape(column)
        inputs[p.SCALE] = gamma
    if shift:
        wanted = wanted + beta.reshape(column)
        inputs[p.SHIFT] = beta
    desc = MemoryDesc.tagged(x.shape, F32, tag)
    primitive = p.batch_normalization(desc, desc, 1e-3, scale=scale, shift=shift, relu=relu)
    assert relative_error(run(primitive, inputs), np.maximum(wanted, 0) if relu else wanted) < 1e-5


@needs_library
def test_layer_normalization_equals_numpy() -> None:
    x, gamma, beta = normal(3, 5, 17), normal(17), normal(18)[1:].copy()
    wide = x.astype(np.float64)
    wanted = (wide - wide.mean(-1, keepdims=True)) / np.sqrt(wide.var(-1, keepdims=True) + 1e-2)
    primitive = p.layer_normalization(desc_of(x), desc_of(x), 1e-2)
    got = run(primitive, {p.SRC: x, p.SCALE: gamma, p.SHIFT: beta})
    assert relative_error(got, wanted * gamma + beta) < 1e-5


@needs_library
def test_lrn_equals_numpy_across_channels_and_within() -> None:
    x = normal(2, 7, 5, 6)
    square = x.astype(np.float64) ** 2
    around = np.pad(square, [(0, 0), (2, 2), (0, 0), (0, 0)])
    total = sum(around[:, at : at + 7] for at in range(5))
    wanted = x / (1.5 + 0.3 / 5 * total) ** 0.75
    primitive = p.lrn(desc_of(x), desc_of(x), 5, 0.3, 0.75, 1.5)
    assert relative_error(run(primitive, {p.SRC: x}), wanted) < 1e-5

    around = np.pad(square, [(0, 0), (0, 0), (1, 1), (1, 1)])
    total = sum(around[:, :, i : i + 5, j : j + 6] for i in range(3) for j in range(3))
    wanted = x / (1.5 + 0.3 / 9 * total) ** 0.75
    primitive = p.lrn(desc_of(x), desc_of(x), 3, 0.3, 0.75, 1.5, kind="within_channel")
    assert relative_error(run(primitive, {p.SRC: x}), wanted) < 1e-5


REDUCTION: dict[str, Callable[[Array, tuple[int, ...]], Array]] = {
    "max": lambda x, axes: x.max(axes, keepdims=True),
    "min": lambda x, axes: x.min(axes, keepdims=True),
    "sum": lambda x, axes: x.sum(axes, keepdims=True),
    "mul": lambda x, axes: x.prod(axes, keepdims=True),
    "mean": lambda x, axes: x.mean(axes, keepdims=True),
    "norm_lp_max": lambda x, axes: np.maximum((np.abs(x) ** 3).sum(axes, keepdims=True), 0.5) ** (1 / 3),
    "norm_lp_sum": lambda x, axes: ((np.abs(x) ** 3).sum(axes, keepdims=True) + 0.5) ** (1 / 3),
    "norm_lp_power_p_max": lambda x, axes: np.maximum((np.abs(x) ** 3).sum(axes, keepdims=True), 0.5),
    "norm_lp_power_p_sum": lambda x, axes: (np.abs(x) ** 3).sum(axes, keepdims=True) + 0.5,
}


@needs_library
@pytest.mark.parametrize("name", p.REDUCTION)
@pytest.mark.parametrize("axes", [(2, 3), (1,), (0, 3)])
def test_reduction_equals_numpy(name: str, axes: tuple[int, ...]) -> None:
    x = normal(2, 5, 3, 4)
    wanted = REDUCTION[name](x.astype(np.float64), axes)
    primitive = p.reduction(desc_of(x), open_f32(*wanted.shape), name, p=3.0, epsilon=0.5)
    assert relative_error(run(primitive, {p.SRC: x}), wanted) < 1e-5


def numpy_linear(x: Array, axis: int, extent: int) -> Array:
    size = x.shape[axis]
    centre = np.clip((np.arange(extent) + 0.5) * size / extent - 0.5, 0, size - 1)
    low = np.floor(centre).astype(int)
    part = (centre - low).reshape([-1 if at == axis else 1 for at in range(x.ndim)])
    return np.take(x, low, axis) * (1 - part) + np.take(x, np.minimum(low + 1, size - 1), axis) * part


@needs_library
@pytest.mark.parametrize("out", [(8, 9), (5, 3), (4, 7)])
def test_resampling_equals_numpy(out: tuple[int, int]) -> None:
    x = normal(2, 3, 4, 6)
    linear = numpy_linear(numpy_linear(x.astype(np.float64), 2, out[0]), 3, out[1])
    primitive = p.resampling(desc_of(x), plain(2, 3, *out), "linear")
    assert relative_error(run(primitive, {p.SRC: x}), linear) < 1e-5


@needs_library
def test_nearest_resampling_repeats_for_whole_factors() -> None:
    x = normal(2, 3, 4, 6)
    primitive = p.resampling(desc_of(x), plain(2, 3, 8, 18), "nearest", factors=(2.0, 3.0))
    assert np.array_equal(run(primitive, {p.SRC: x}), x.repeat(2, 2).repeat(3, 3))


@needs_library
def test_shuffle_equals_numpy() -> None:
    x = normal(2, 6, 3, 4)
    wanted = x.reshape(2, 2, 3, 3, 4).transpose(0, 2, 1, 3, 4).reshape(x.shape)
    assert np.array_equal(run(p.shuffle(desc_of(x), desc_of(x), 1, 3), {p.SRC: x}), wanted)


# Element types.


def bf16_bits(x: NDArray[np.float32]) -> NDArray[np.uint16]:
    return (x.view(np.uint32) >> 16).astype(np.uint16)


@needs_library
def test_bfloat16_and_float16_convolution_equal_numpy_within_their_precision() -> None:
    x, w = normal(1, 16, 6, 6), normal(16, 16, 3, 3)
    wanted = numpy_conv(x, w, (1, 1), (1, 1), (0, 0), (0, 0), 1)
    for dtype, bound in ((DataType.BF16, 2e-2), (DataType.F16, 2e-3)):
        try:
            conv = p.convolution(
                MemoryDesc.any(x.shape, dtype),
                MemoryDesc.any(w.shape, dtype),
                MemoryDesc.any(wanted.shape, F32),
            )
        except Unimplemented:
            continue
        assert relative_error(run(conv, {p.SRC: x, p.WEIGHTS: w}), wanted) < bound


@needs_library
def test_bfloat16_arrays_are_read_by_their_bits() -> None:
    x = bf16_bits(normal(3, 5)).astype(np.uint32) << 16
    exact = x.view(np.float32)
    bits = bf16_bits(exact)
    memory = Memory(MemoryDesc.plain((3, 5), DataType.BF16), bits.ctypes.data, bits)
    assert np.array_equal(laid_out(memory, plain(3, 5)).array(), exact)
    assert np.array_equal(memory.array(), bits)


@needs_library
def test_integer_matmul_is_exact_with_scales_and_zero_points() -> None:
    # Below 128, so that processors without VNNI do not saturate.
    a = rng().integers(0, 128, (5, 9)).astype(np.uint8)
    b = rng().integers(-127, 127, (9, 4)).astype(np.int8)
    exact = a.astype(np.int64) @ b.astype(np.int64)
    dst = MemoryDesc.plain((5, 4), DataType.S32)
    product = p.matmul(desc_of(a), desc_of(b), dst)
    assert np.array_equal(run(product, {p.SRC: a, p.WEIGHTS: b}), exact)

    attributes = Attributes(scales=((p.SRC, 0), (p.WEIGHTS, 2)), zero_points=((p.SRC, 0),))
    scaled = p.matmul(desc_of(a), desc_of(b), plain(5, 4), attributes=attributes)
    factors = np.abs(normal(4)) + np.float32(0.1)
    inputs: dict[int, Array] = {p.SRC: a, p.WEIGHTS: b}
    inputs |= {p.SCALES | p.SRC: np.array([0.25], np.float32), p.SCALES | p.WEIGHTS: factors}
    inputs[p.ZERO_POINTS | p.SRC] = np.array([3], np.int32)
    wanted = (a.astype(np.float64) - 3) @ b.astype(np.float64) * 0.25 * factors
    assert relative_error(run(scaled, inputs), wanted) < 1e-6


@needs_library
def test_reorder_converts_element_types() -> None:
    x = np.round(3 * normal(2, 5, 3))
    for dtype in (DataType.S32, DataType.S8, DataType.F16):
        there = laid_out(Memory.from_array(x), MemoryDesc.tagged(x.shape, dtype, "cab"))
        assert np.array_equal(there.array().astype(np.float32), x)


_STRICT = """
import numpy as np
from taso.backends.onednn import primitives as p
a = np.random.default_rng(1).standard_normal((256, 512)).astype(np.float32)
b = np.random.default_rng(2).standard_normal((512, 256)).astype(np.float32)
out = np.zeros((256, 256), np.float32)
plain = p.MemoryDesc.of_array
m = p.matmul(plain(a), p.MemoryDesc.any(b.shape, p.DataType.F32), plain(out))
weights = p.Memory.allocate(m.weights_desc())
p.reorder(plain(b), weights.desc).bind({p.SRC: p.Memory.from_array(b), p.DST: weights})()
held = {p.SRC: p.Memory.from_array(a), p.WEIGHTS: weights, p.DST: p.Memory.from_array(out)}
if p.SCRATCHPAD in m.arguments:
    held[p.SCRATCHPAD] = p.Memory.allocate(m.arguments[p.SCRATCHPAD])
m.bind(held)()
exact = a.astype(np.float64) @ b
print(float(np.abs(out - exact).max() / np.abs(exact).max()))
"""


@needs_library
def test_float32_stays_float32_whatever_the_environment_allows() -> None:
    environment = os.environ | {"ONEDNN_DEFAULT_FPMATH_MODE": "BF16"}
    root = str(Path(__file__).resolve().parents[2])
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, (root, environment.get("PYTHONPATH"))))
    done = subprocess.run(
        [sys.executable, "-c", _STRICT], env=environment, capture_output=True, text=True, check=True
    )
    assert float(done.stdout) < 1e-5


# Descriptors.


@needs_library
def test_descriptor_says_what_it_was_made_of() -> None:
    desc = MemoryDesc.tagged((2, 20, 5, 7), F32, "aBcd16b")
    assert (desc.ndims, desc.dims, desc.dtype) == (4, (2, 20, 5, 7), F32)
    assert desc.padded_dims == (2, 32, 5, 7)
    assert desc.inner_blocks == ((1, 16),)
    assert desc.strides == (2 * 5 * 7 * 16, 5 * 7 * 16, 7 * 16, 16)
    assert desc.size == 2 * 32 * 5 * 7 * 4
    assert desc.layout == "aBcd16b"
    assert not desc.is_plain and not desc.is_dense_row_major and not desc.is_any


@needs_library
@pytest.mark.parametrize(
    "tag", ["aBc4b", "aBc8b", "aBc16b", "aBc32b", "aBcd4b", "aBcd8b", "aBcd16b", "aBcd32b"]
)
def test_blocked_tags_lie_in_memory_as_their_letters_say(tag: str) -> None:
    ndims = sum(letter.isalpha() for letter in tag) - 1
    block = int("".join(letter for letter in tag if letter.isdigit()))
    x = normal(2, 2 * block, *(3, 5)[: ndims - 2])
    split = x.reshape(2, 2, block, *x.shape[2:])
    wanted = np.moveaxis(split, 2, -1).ravel()
    memory = laid_out(Memory.from_array(x), MemoryDesc.tagged(x.shape, F32, tag))
    assert memory.desc.layout == tag
    flat = Memory(plain(x.size), memory.address, memory)
    assert np.array_equal(flat.array(), wanted)


@needs_library
@pytest.mark.parametrize(
    "tag", ["aBcde4b", "aBcde8b", "aBcde16b", "aBcde32b", "abc", "cab", "acdb", "dcba", "bca"]
)
def test_layout_of_a_tag_is_the_tag(tag: str) -> None:
    ndims = len(set(tag.lower()) & set("abcde"))
    assert MemoryDesc.tagged((2, 64, 3, 4, 5)[:ndims], F32, tag).layout == tag


@needs_library
def test_equal_descriptors_have_equal_keys_and_others_do_not() -> None:
    dims = (2, 16, 3, 5)
    descs = [
        *(MemoryDesc.tagged(dims, F32, tag) for tag in ("abcd", "acdb", "aBcd16b", "aBcd8b", "abdc")),
        MemoryDesc.any(dims, F32),
        MemoryDesc.plain(dims, DataType.BF16),
        MemoryDesc.plain((2, 16, 15), F32),
        MemoryDesc.plain((2, 32, 3, 5), F32).submemory(dims, (0, 0, 0, 0)),
        MemoryDesc.plain((2, 32, 3, 5), F32).submemory(dims, (0, 16, 0, 0)),
    ]
    assert MemoryDesc.strided(dims, F32, (240, 15, 5, 1)) == descs[0]
    for first, second in itertools.product(range(len(descs)), repeat=2):
        assert (descs[first] == descs[second].clone()) == (first == second)
        assert (descs[first].key == descs[second].clone().key) == (first == second)
        if first == second:
            assert hash(descs[first]) == hash(descs[second].clone())
    assert descs[0] != "abcd"


@needs_library
def test_submemory_reshape_and_permute_address_the_same_bytes() -> None:
    x = normal(4, 6, 5)
    whole = desc_of(x)
    part = Memory.from_array(x, whole.submemory((2, 3, 5), (1, 2, 0)))
    assert part.desc.offset == 40
    assert part.desc.size <= x.nbytes
    assert np.array_equal(part.array(), x[1:3, 2:5])
    assert np.array_equal(laid_out(part, plain(2, 3, 5)).array(), x[1:3, 2:5])
    assert np.array_equal(Memory.from_array(x, whole.reshape((4, 2, 3, 5))).array(), x.reshape(4, 2, 3, 5))
    assert np.array_equal(Memory.from_array(x, whole.permute((2, 0, 1))).array(), x.transpose(2, 0, 1))
    assert whole.permute((2, 0, 1)).dims == (5, 4, 6)


@needs_library
def test_a_region_of_a_blocked_output_is_written_in_place() -> None:
    parts = [normal(1, 16, 3, 3), normal(1, 32, 3, 3)]
    whole = Memory.allocate(MemoryDesc.tagged((1, 48, 3, 3), F32, "aBcd16b"))
    at = 0
    for part in parts:
        region = whole.desc.submemory(part.shape, (0, at, 0, 0))
        target = Memory(region, whole.address, whole)
        source = Memory.from_array(part)
        execute(p.reorder(source.desc, region), {p.SRC: source, p.DST: target})
        at += part.shape[1]
    assert np.array_equal(laid_out(whole, plain(1, 48, 3, 3)).array(), np.concatenate(parts, 1))


# Binding and running.


@needs_library
def test_a_bound_call_follows_a_moved_address() -> None:
    first, second, out = normal(8), normal(9)[1:].copy(), np.zeros(8, np.float32)
    source = Memory.from_array(first)
    primitive = p.eltwise(desc_of(first), desc_of(out), "square")
    call = primitive.bind({p.SRC: source, p.DST: Memory.from_array(out)})
    call()
    assert relative_error(out, first**2) < 1e-6
    source.set_data_handle(second.ctypes.data, second)
    assert source.address == second.ctypes.data
    assert call.run() == 0
    assert relative_error(out, second**2) < 1e-6


@needs_library
def test_a_bound_call_keeps_what_it_needs_alive() -> None:
    x = normal(2, 8, 5, 5)
    out = Memory.allocate(plain(2, 8, 3, 3))

    def make() -> p.BoundCall:
        w = normal(8, 8, 3, 3)
        conv = p.convolution(desc_of(x), desc_of(w), out.desc)
        memories = {p.SRC: Memory.from_array(x.copy()), p.WEIGHTS: Memory.from_array(w), p.DST: out}
        if p.SCRATCHPAD in conv.arguments:
            memories[p.SCRATCHPAD] = Memory.allocate(conv.arguments[p.SCRATCHPAD])
        return conv.bind(memories)

    call = make()
    garbage = [normal(1000) for _ in range(50)]
    call()
    del garbage
    wanted = numpy_conv(x, normal(8, 8, 3, 3), (1, 1), (1, 1), (0, 0), (0, 0), 1)
    assert relative_error(out.array(), wanted) < 1e-5


@needs_library
def test_bind_refuses_missing_unknown_and_ill_fitting_arguments() -> None:
    x = normal(4, 3)
    primitive = p.eltwise(desc_of(x), desc_of(x), "abs")
    source, target = Memory.from_array(x), Memory.allocate(desc_of(x))
    with pytest.raises(BackendError, match="dst is missing"):
        primitive.bind({p.SRC: source})
    with pytest.raises(BackendError, match="takes no argument weights"):
        primitive.bind({p.SRC: source, p.DST: target, p.WEIGHTS: source})
    with pytest.raises(BackendError, match="src is MemoryDesc"):
        primitive.bind({p.SRC: Memory.allocate(plain(3, 4)), p.DST: target})


@needs_library
def test_scratchpad_of_the_caller_is_asked_for_unless_the_library_keeps_it() -> None:
    x, w = normal(2, 16, 9, 9), normal(16, 16, 3, 3)
    wanted = numpy_conv(x, w, (1, 1), (1, 1), (0, 0), (0, 0), 1)
    sizes = set()
    for attributes in (Attributes(), Attributes(user_scratchpad=False)):
        conv: Primitive | None = p.convolution(
            open_desc(x), open_desc(w), open_f32(*wanted.shape), attributes=attributes
        )
        while conv is not None:
            size = conv.scratchpad_desc().size
            assert (p.SCRATCHPAD in conv.arguments) == (size > 0)
            assert attributes.user_scratchpad or size == 0
            sizes.add(size)
            assert relative_error(run(conv, {p.SRC: x, p.WEIGHTS: w}), wanted) < 1e-5
            conv = conv.next_implementation()
    assert len(sizes) > 1


@needs_library
def test_threads_are_set_for_the_calling_thread() -> None:
    before = library().get_max_threads()
    try:
        for count in (1, 2):
            library().set_num_threads(count)
            assert library().get_max_threads() == count
            x, w = normal(2, 16, 9, 9), normal(16, 16, 3, 3)
            wanted = numpy_conv(x, w, (1, 1), (1, 1), (0, 0), (0, 0), 1)
            conv = p.convolution(open_desc(x), open_desc(w), open_f32(*wanted.shape))
            assert relative_error(run(conv, {p.SRC: x, p.WEIGHTS: w}), wanted) < 1e-5
        with pytest.raises(BackendError, match="at least 1"):
            library().set_num_threads(0)
    finally:
        library().set_num_threads(before)


# What does not fit.

REFUSED: dict[str, Callable[[], object]] = {
    "conv output": lambda: p.convolution(plain(1, 3, 5, 5), plain(4, 3, 3, 3), plain(1, 4, 4, 4)),
    "conv channels": lambda: p.convolution(plain(1, 3, 5, 5), plain(4, 2, 3, 3), plain(1, 4, 3, 3)),
    "conv strides": lambda: p.convolution(
        plain(1, 3, 5, 5), plain(4, 3, 3, 3), plain(1, 4, 3, 3), strides=(1,)
    ),
    "conv dilation 0": lambda: p.convolution(
        plain(1, 3, 5, 5), plain(4, 3, 3, 3), plain(1, 4, 3, 3), dilations=(0, 1)
    ),
    "conv groups": lambda: p.convolution(plain(1, 4, 5, 5), plain(5, 2, 3, 3), plain(1, 5, 3, 3), groups=2),
    "conv grouped weights": lambda: p.convolution(
        plain(1, 4, 5, 5), plain(2, 3, 2, 3, 3), plain(1, 6, 3, 3), groups=4
    ),
    "conv of a matrix": lambda: p.convolution(plain(3, 5), plain(4, 3), plain(3, 4)),
    "conv algorithm": lambda: p.convolution(
        plain(1, 3, 5, 5), plain(4, 3, 3, 3), plain(1, 4, 3, 3), algorithm="fft"
    ),
    "deconv output": lambda: p.deconvolution(plain(1, 3, 5, 5), plain(4, 3, 3, 3), plain(1, 4, 5, 5)),
    "matmul inner": lambda: p.matmul(plain(3, 4), plain(5, 6), plain(3, 6)),
    "matmul batch": lambda: p.matmul(plain(2, 3, 4), plain(3, 4, 5), plain(6, 3, 5)),
    "matmul bias": lambda: p.matmul(plain(3, 4), plain(4, 6), plain(3, 6), bias=plain(6)),
    "inner product": lambda: p.inner_product(plain(3, 4), plain(6, 5), plain(3, 6)),
    "pool output": lambda: p.pooling(plain(1, 3, 5, 5), plain(1, 3, 5, 5), (2, 2), kind="max"),
    "pool kind": lambda: p.pooling(plain(1, 3, 5, 5), plain(1, 3, 4, 4), (2, 2), kind="median"),
    "eltwise dims": lambda: p.eltwise(plain(3, 4), plain(4, 3), "relu"),
    "eltwise name": lambda: p.eltwise(plain(3, 4), plain(3, 4), "sinh"),
    "binary dims": lambda: p.binary(plain(3, 4), plain(3, 2), plain(3, 4), "add"),
    "concat dims": lambda: p.concat([plain(3, 4), plain(2, 4)], 1),
    "concat axis": lambda: p.concat([plain(3, 4), plain(3, 4)], 2),
    "concat of nothing": lambda: p.concat([], 0),
    "sum scales": lambda: p.sum_of([plain(3, 4)], (1.0, 2.0)),
    "sum dims": lambda: p.sum_of([plain(3, 4), plain(4, 3)]),
    "softmax axis": lambda: p.softmax(plain(3, 4), plain(3, 4), -1),
    "batch norm dims": lambda: p.batch_normalization(plain(1, 3, 4, 4), plain(1, 4, 4, 4), 1e-5),
    "layer norm dims": lambda: p.layer_normalization(plain(3, 4), plain(4, 3), 1e-5),
    "reduction dims": lambda: p.reduction(plain(3, 4), plain(3, 2), "sum"),
    "reduction name": lambda: p.reduction(plain(3, 4), plain(3, 1), "median"),
    "resampling channels": lambda: p.resampling(plain(1, 3, 4, 4), plain(1, 4, 8, 8), "linear"),
    "resampling factors": lambda: p.resampling(
        plain(1, 3, 4, 4), plain(1, 3, 8, 8), "linear", factors=(2.0,)
    ),
    "prelu dims": lambda: p.prelu(plain(1, 3, 4, 4), plain(1, 2, 1, 1), plain(1, 3, 4, 4)),
    "shuffle axis": lambda: p.shuffle(plain(3, 4), plain(3, 4), 3, 2),
    "shuffle group": lambda: p.shuffle(plain(3, 4), plain(3, 4), 1, 0),
    "reorder dims": lambda: p.reorder(plain(3, 4), plain(4, 3)),
    "no dimensions": lambda: MemoryDesc.plain((), F32),
    "13 dimensions": lambda: MemoryDesc.plain((1,) * 13, F32),
    "negative dimension": lambda: MemoryDesc.plain((2, -3), F32),
    "strides count": lambda: MemoryDesc.strided((2, 3), F32, (3,)),
    "tag": lambda: MemoryDesc.tagged((2, 3), F32, "abc"),
    "blocked tag": lambda: MemoryDesc.tagged((2, 3, 4), F32, "aBcd16b"),
    "reshape": lambda: plain(3, 4).reshape((5, 2)),
    "permutation": lambda: plain(3, 4).permute((0, 0)),
    "region": lambda: plain(3, 4).submemory((2, 2), (0, 3)),
    "open memory": lambda: Memory(open_f32(3, 4)),
    "short array": lambda: Memory.from_array(np.zeros(3, np.float32), plain(4)),
    "reversed array": lambda: Memory.from_array(np.zeros(3, np.float32)[::-1]),
    "int64 array": lambda: Memory.from_array(np.zeros(3, np.int64)),
    "blocked view": lambda: Memory.allocate(MemoryDesc.tagged((1, 16, 2), F32, "aBc16b")).array(),
}


@needs_library
@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_fit_raises_backend_error(name: str) -> None:
    with pytest.raises(BackendError) as caught:
        REFUSED[name]()
    assert not isinstance(caught.value, Unimplemented)


@needs_library
def test_a_refusal_by_the_library_names_function_status_and_descriptors() -> None:
    with pytest.raises(BackendError) as caught:
        REFUSED["matmul inner"]()
    for part in ("dnnl_matmul_primitive_desc_create", "invalid_arguments", "f32:3x4", "weights f32:5x6"):
        assert part in str(caught.value)


@needs_library
def test_an_unsupported_combination_raises_unimplemented() -> None:
    with pytest.raises(Unimplemented):
        p.matmul(plain(3, 4), MemoryDesc.plain((4, 5), DataType.S8), MemoryDesc.plain((3, 5), DataType.U8))


@needs_library
def test_wrong_shapes_stay_an_error_when_types_are_mixed_too() -> None:
    with pytest.raises(BackendError) as caught:
        p.matmul(plain(3, 4), MemoryDesc.plain((5, 5), DataType.S8), MemoryDesc.plain((3, 5), DataType.U8))
    assert not isinstance(caught.value, Unimplemented)


@needs_library
def test_lrn_of_an_even_size_is_refused_because_onednn_means_another_window() -> None:
    with pytest.raises(Unimplemented, match="even size 4"):
        p.lrn(plain(1, 6, 2, 2), plain(1, 6, 2, 2), 4, 1.0, 1.0, 1.0)


# Finding and loading.


def test_load_errors_name_the_package_to_install() -> None:
    text = explain_load_error(
        "/lib/libdnnl.so.3", "libgomp.so.1: cannot open shared object file: No such file"
    )
    assert "apt install libgomp1" in text and "dnf install libgomp" in text
    text = explain_load_error("/lib/libdnnl.so.3", "libstdc++.so.6: cannot open shared object file")
    assert "apt install libstdc++6" in text and "dnf install libstdc++" in text
    text = explain_load_error("libdnnl.so.3", "libdnnl.so.3: cannot open shared object file")
    assert "pip install onednn-cpu-gomp" in text and "x86-64" in text


def test_a_file_that_is_no_library_makes_the_backend_unavailable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    garbage = tmp_path / "libdnnl.so.3"
    garbage.write_bytes(b"not a library")
    monkeypatch.setenv("TASO_ONEDNN_LIBRARY", str(garbage))
    with pytest.raises(BackendUnavailable, match="cannot be loaded"):
        Library(find_library())
    monkeypatch.setenv("TASO_ONEDNN_LIBRARY", str(tmp_path / "absent.so"))
    with pytest.raises(BackendUnavailable, match="not a file"):
        find_library()


@needs_library
def test_another_library_is_not_taken_for_onednn() -> None:
    with pytest.raises(BackendUnavailable, match="not a oneDNN"):
        Library("libm.so.6")


@needs_library
def test_library_describes_itself() -> None:
    assert library() is library()
    assert library().version >= (3, 2, 0)
    assert library().version_string.startswith("3.")
    assert library().isa


def test_status_errors_tell_unimplemented_from_the_rest() -> None:
    assert isinstance(status_error("f", 3), Unimplemented)
    assert not isinstance(status_error("f", 2), Unimplemented)
    assert "f failed with status invalid_arguments" in str(status_error("f", 2))
    assert "unknown status 99" in str(status_error("f", 99))


def test_importing_the_layer_loads_no_library() -> None:
    script = "import taso.backends.onednn.primitives; print('libdnnl' in open('/proc/self/maps').read())"
    root = str(Path(__file__).resolve().parents[2])
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
    }
    if not Path("/proc/self/maps").exists():
        pytest.skip("this system does not list what a process has loaded")
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "False"


@pytest.mark.parametrize("given", [{}, {"GOMP_SPINCOUNT": "77"}, {"OMP_WAIT_POLICY": "active"}])
def test_openmp_spins_shortly_unless_the_user_says_otherwise(
    given: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        monkeypatch.delenv(name, raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    seen: list[str | None] = []
    monkeypatch.setattr(ctypes, "CDLL", lambda path: seen.append(os.environ.get("GOMP_SPINCOUNT")))
    onednn_library._load("libdnnl.so.3")
    assert seen == [given.get("GOMP_SPINCOUNT") if given else onednn_library._SPIN_COUNT]
    assert os.environ.get("GOMP_SPINCOUNT") == given.get("GOMP_SPINCOUNT")


# The instructions' name.


@pytest.mark.parametrize(
    "code, name",
    [
        (0x7, "avx2"), (0xFEF, "avx512_core_amx"), (0x21EF, "avx512_core_fp16+0x21ef"),
        (0x7FEF, "avx512_core_amx_fp16+0x7fef"),
    ],
)  # fmt: skip
def test_instructions_newer_than_these_names_are_called_by_what_they_extend(code: int, name: str) -> None:
    assert isa_name(code) == name
