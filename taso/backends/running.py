"""Operators along an axis, or on blocks of an image, with NumPy in few passes.

CumSum and CumProd, LpNormalization, MeanVarianceNormalization, RotaryEmbedding, Trilu, ReverseSequence, DepthToSpace
and SpaceToDepth, and Einsum.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import cast

import numpy as np

from taso.backends.base import Array
from taso.backends.picking import Maker, Numbers, Run, in_range
from taso.graph.errors import BackendError
from taso.graph.operator import Attrs, Types
from taso.graph.ops.common import normal_axes
from taso.graph.types import DType, TensorType

_REAL = (DType.FLOAT, DType.DOUBLE)
_WIDE = 256
"""Elements behind an axis from which on NumPy runs along it plane by plane."""

# ── running sums ─────────────────────────────────────────────────────────────────────────────────────────────────


def cumulative(name: str, function: np.ufunc, start: int) -> Maker:
    """CumSum (ONNX 11 to 14) or CumProd (ONNX 26): `start` is what an exclusive one begins with."""

    def make(attrs: Attrs, types: Types, results: Sequence[TensorType]) -> Run | None:
        x, exclusive, reverse = types[0], bool(attrs.int("exclusive")), bool(attrs.int("reverse"))
        if x is None or x.dtype is DType.BOOL or types[1] is None or types[1].rank:
            return None
        rank, shape = x.rank, x.static_shape

        def run(inputs: Sequence[Array], outs: Sequence[Array]) -> None:
            axis = int(np.asarray(inputs[1]).item())
            if not -rank <= axis < rank:
                raise BackendError(f"{name}: there is no axis {axis} among {rank}")
            data, out = (cast("Numbers", np.moveaxis(a, axis, 0)) for a in (inputs[0], outs[0]))
            if reverse:
                data, out = data[::-1], out[::-1]
            if exclusive:
                out[0] = start
                data, out = data[:-1], out[1:]
            _accumulate(function, data, out, math.prod(shape[axis % rank + 1 :]))

        return run

    return make


def _accumulate(function: np.ufunc, data: Numbers, out: Numbers, behind: int) -> None:
    if not len(data):
        return
    if behind < _WIDE:
        function.accumulate(data, 0, out.dtype, out=out)
        return
    np.copyto(out[0], data[0])
    for i in range(1, len(data)):
        function(out[i - 1], data[i], out=out[i])


# ── normalisations ───────────────────────────────────────────────────────────────────────────────────────────────


def lp_normalization(attrs: Attrs, types: Types, results: Sequence[TensorType]) -> Run | None:
    """LpNormalization (ONNX 1 to 22); where the norm is 0 all elements are."""
    x, p = types[0], attrs.int("p")
    if x is None or x.dtype not in _REAL or x.rank == 0 or p not in (1, 2):
        return None
    axis = attrs.int("axis") % x.rank
    info = np.finfo(np.float32 if x.dtype is DType.FLOAT else np.float64)
    # squares beyond these are no good numbers any more
    low, high = (float(info.tiny) ** 0.5 * 1e4, float(info.max) ** 0.5) if p == 2 else (float(info.tiny), np.inf)

    def run(inputs: Sequence[Array], outs: Sequence[Array]) -> None:
        data = cast("Numbers", inputs[0])
        (np.square if p == 2 else np.abs)(data, out=outs[0])
        norm: Numbers = np.add.reduce(outs[0], axis, keepdims=True)
        norm = np.sqrt(norm) if p == 2 else norm
        if not (float(norm.min()) > low and float(norm.max()) < high):
            wide = data.astype(np.float64)
            norm = np.linalg.norm(wide, p, axis, keepdims=True)
            outs[0].fill(0)
            np.divide(wide, norm, out=outs[0], where=norm != 0, casting="unsafe")
        else:
            np.divide(data, norm, out=outs[0])

    return run


def mean_variance(attrs: Attrs, types: Types, results: Sequence[TensorType]) -> Run | None:
    """MeanVarianceNormalization (ONNX 9 to 13); means are added up in float64."""
    x = types[0]
    if x is None or x.dtype not in _REAL:
        return None
    axes = tuple(normal_axes(attrs.ints("axes"), x.rank, "MeanVarianceNormalization"))

    def run(inputs: Sequence[Array], outs: Sequence[Array]) -> None:
        data = cast("Numbers", inputs[0])
        mean = np.mean(data, axes, np.float64, keepdims=True)
        np.subtract(data, mean.astype(data.dtype), out=outs[0])
        deviation = np.sqrt(np.mean(np.square(outs[0]), axes, keepdims=True, dtype=np.float64)) + 1e-9
        np.divide(outs[0], deviation.astype(data.dtype), out=outs[0])

    return run


# ── RotaryEmbedding ──────────────────────────────────────────────────────────────────────────────────────────────


def rotary(attrs: Attrs, types: Types, results: Sequence[TensorType]) -> Run | None:
    """RotaryEmbedding (ONNX 23): pairs of elements of each head turned by the angle of their place."""
    x, cos, sin = types[0], types[1], types[2]
    if x is None or cos is None or sin is None or any(t.dtype not in _REAL for t in (x, cos, sin)):
        return None
    dims, heads = x.static_shape, attrs.int("num_heads")
    if x.rank == 3 and (heads < 1 or dims[2] % heads):
        return None
    batch, rows = dims[0], dims[-2]
    size = dims[3] if x.rank == 4 else dims[2] // heads
    turned = attrs.int("rotary_embedding_dim") or size
    half, wanted = turned // 2, (batch, rows, turned // 2)
    by_place = len(types) > 3 and types[3] is not None
    if turned % 2 or turned > size or any(t.static_shape[-1] != half for t in (cos, sin)):
        return None
    if not by_place and any(t.static_shape != wanted for t in (cos, sin)):
        return None
    if by_place and any(t.rank != 2 for t in (cos, sin)):
        return None
    interleaved = bool(attrs.int("interleaved"))

    def in_heads(array: Array) -> Array:
        """As batch, heads, rows, elements."""
        if array.ndim == 4:
            return array
        found: Array = array.reshape(batch, rows, heads, size).transpose(0, 2, 1, 3)
        return found

    def run(inputs: Sequence[Array], outs: Sequence[Array]) -> None:
        data, out = (cast("Numbers", in_heads(a)) for a in (inputs[0], outs[0]))
        angles: list[Numbers] = []
        for cache in inputs[1:3]:
            array = cache
            if by_place:
                array = array.take(in_range(inputs[3], len(array), "RotaryEmbedding"), 0, mode="wrap")
            angles.append(cast("Numbers", array.reshape(batch, 1, rows, half)))
        c, s = angles
        pair = (slice(0, turned, 2), slice(1, turned, 2)) if interleaved else (slice(0, half), slice(half, turned))
        x1, x2 = (data[..., p] for p in pair)
        y1, y2 = (out[..., p] for p in pair)
        np.subtract(c * x1, s * x2, out=y1)
        np.add(s * x1, c * x2, out=y2)
        if turned < size:
            np.copyto(out[..., turned:], data[..., turned:])

    return run


# ── moves ────────────────────────────────────────────────────────────────────────────────────────────────────────


def trilu(attrs: Attrs, types: Types, results: Sequence[TensorType]) -> Run | None:
    """Trilu (ONNX 14): what is left out becomes 0 by masking the bits, whatever they are."""
    x, upper = types[0], bool(attrs.int("upper"))
    if x is None or x.dtype.itemsize not in (1, 2, 4, 8):
        return None
    rows, columns = x.static_shape[-2:]
    bits = np.dtype(f"i{x.dtype.itemsize}")
    masks: dict[int, Array] = {}

    def run(inputs: Sequence[Array], outs: Sequence[Array]) -> None:
        k = int(inputs[1].item()) if len(inputs) > 1 else 0
        k = max(-rows, min(k, columns))
        if k not in masks:
            masks.clear()
            kept = ~np.tri(rows, columns, k - 1, bool) if upper else np.tri(rows, columns, k, bool)
            masks[k] = -kept.astype(bits)
        np.bitwise_and(inputs[0].view(bits), masks[k], out=outs[0].view(bits))

    return run


def reverse_sequence(attrs: Attrs, types: Types, results: Sequence[TensorType]) -> Run | None:
    """ReverseSequence (ONNX 10)."""
    x, first = types[0], attrs.int("time_axis") == 0
    if x is None:
        return None
    shape, steps = x.static_shape, x.static_shape[attrs.int("time_axis")]
    batch, rest = shape[1 if first else 0], shape[2:]

    def run(inputs: Sequence[Array], outs: Sequence[Array]) -> None:
        lengths = inputs[1].astype(np.intp, copy=False)
        if lengths.size and not (0 <= int(lengths.min()) and int(lengths.max()) <= steps):
            raise BackendError(f"ReverseSequence: a length lies outside 0 to {steps}")
        step, row = np.arange(steps)[:, None], np.arange(batch)
        place = np.where(step < lengths, lengths - 1 - step, step)
        flat = place * batch + row if first else (row * steps + place).T
        inputs[0].reshape(-1, *rest).take(flat.reshape(-1), 0, out=outs[0].reshape(-1, *rest), mode="wrap")

    return run


def blocks(attrs: Attrs, x: tuple[int, ...], to_space: bool) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """How DepthToSpace (or SpaceToDepth) is a transpose: six axes that its input has, and their order in the output.
    """
    size, depth_first = attrs.int("blocksize"), attrs.str("mode") == "DCR"
    n, c, h, w = x
    if to_space:
        c //= size * size
        return ((n, size, size, c, h, w), (0, 3, 4, 1, 5, 2)) if depth_first else (
            (n, c, size, size, h, w), (0, 1, 4, 2, 5, 3))  # fmt: skip
    dims = (n, c, h // size, size, w // size, size)
    return dims, (0, 3, 5, 1, 2, 4) if depth_first else (0, 1, 3, 5, 2, 4)


def regrouped(to_space: bool) -> Maker:
    """DepthToSpace (ONNX 1 to 13) or SpaceToDepth (ONNX 1 to 13)."""

    def make(attrs: Attrs, types: Types, results: Sequence[TensorType]) -> Run | None:
        x = types[0]
        if x is None:
            return None
        dims, order = blocks(attrs, x.static_shape, to_space)
        wide = tuple(dims[a] for a in order)
        return lambda inputs, outs: np.copyto(outs[0].reshape(wide), inputs[0].reshape(dims).transpose(order))

    return make


# ── Einsum ───────────────────────────────────────────────────────────────────────────────────────────────────────


def einsum(attrs: Attrs, types: Types, results: Sequence[TensorType]) -> Run | None:
    """Einsum (ONNX 12) by NumPy's, which makes products of matrices where it can; float32 and float64."""
    if any(t is None or t.dtype not in _REAL for t in types):
        return None
    equation = attrs.str("equation").replace(" ", "")
    shapes = [np.broadcast_to(np.float32(0), t.static_shape) for t in types if t is not None]
    path = np.einsum_path(equation, *shapes, optimize="greedy")[0]

    def run(inputs: Sequence[Array], outs: Sequence[Array]) -> None:
        np.copyto(outs[0], np.einsum(equation, *(cast("Numbers", a) for a in inputs), optimize=path))

    return run


RUNNERS: dict[str, Maker] = {
    "CumSum": cumulative("CumSum", np.add, 0),
    "CumProd": cumulative("CumProd", np.multiply, 1),
    "LpNormalization": lp_normalization,
    "MeanVarianceNormalization": mean_variance,
    "RotaryEmbedding": rotary,
    "Trilu": trilu,
    "ReverseSequence": reverse_sequence,
    "DepthToSpace": regrouped(to_space=True),
    "SpaceToDepth": regrouped(to_space=False),
    "Einsum": einsum,
}

__all__ = ["RUNNERS", "blocks"]
