"""GridSample and RoiAlign with NumPy: elements between those of an image, found by places and weights for each axis."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import product
from typing import cast

import numpy as np

from taso.backends.base import Array
from taso.backends.picking import Maker, Numbers, Places, Run, in_range
from taso.graph.operator import Attrs, Types
from taso.graph.types import DType, TensorType

_REAL = (DType.FLOAT, DType.DOUBLE)
_AT_ONCE = 1 << 16
"""Numbers that are gathered at a time: so many that they stay near."""
_FEW_CHANNELS = 8

# ── GridSample ───────────────────────────────────────────────────────────────────────────────────────────────────

_TAPS = {"nearest": (0,), "linear": (0, 1), "cubic": (-1, 0, 1, 2)}


def grid_sample(attrs: Attrs, types: Types, results: Sequence[TensorType]) -> Run | None:
    """GridSample (ONNX 16 to 22), any number of spatial axes."""
    x, grid = types[0], types[1]
    mode, padding, corners = attrs.str("mode"), attrs.str("padding_mode"), bool(attrs.int("align_corners"))
    if x is None or grid is None or x.dtype not in _REAL or grid.dtype not in _REAL or mode not in _TAPS:
        return None
    if padding not in ("zeros", "border", "reflection"):
        return None
    batch, channels, *sizes = x.static_shape
    elements = math.prod(sizes)

    def run(inputs: Sequence[Array], outs: Sequence[Array]) -> None:
        data = cast("Numbers", inputs[0]).reshape(batch, channels, elements)
        out = cast("Numbers", outs[0]).reshape(batch, channels, -1)
        for n in range(batch):
            spots = cast("Numbers", inputs[1][n]).reshape(-1, len(sizes))
            axes = [
                _taps(spots[:, len(sizes) - 1 - a], size, mode, padding, corners) for a, size in enumerate(sizes)
            ]  # fmt: skip
            _sum_of_taps(data[n], axes, sizes, out[n])

    return run


def _taps(spots: Numbers, size: int, mode: str, padding: str, corners: bool) -> list[tuple[Places, Numbers]]:
    """For each tap of an axis the element that it reads (`size`: none, which counts as 0) and that one's weight."""
    one, two = spots.dtype.type(1), spots.dtype.type(2)
    x = (spots + one) / two * (size - 1) if corners else ((spots + one) * size - one) / two
    low, high = (0.0, size - 1.0) if corners else (-0.5, size - 0.5)
    if mode == "nearest":
        x = np.rint(x)
    if padding == "border":
        x = np.where((x < low) | (x > high), np.clip(x, 0, size - 1), x)
    elif padding == "reflection":
        x = _reflected(x, low, high)
    else:
        # further out there is as little
        x = np.clip(x, -4, size + 4)
    if mode == "nearest":
        return [(_element(np.trunc(x), size, padding, low, high), np.ones_like(x))]
    left = np.floor(x)
    ratio = x - left
    weights = [1 - ratio, ratio] if mode == "linear" else _cubic(ratio)
    return [
        (_element(left + tap, size, padding, low, high), w) for tap, w in zip(_TAPS[mode], weights, strict=True)
    ]  # fmt: skip


def _cubic(ratio: Numbers) -> list[Numbers]:
    """Weights of the elements at -1, 0, 1, 2 (Keys, Cubic convolution interpolation, 1981, with a = −0.75)."""
    a = -0.75

    def far(t: Numbers) -> Numbers:
        return ((a * t - 5 * a) * t + 8 * a) * t - 4 * a

    def near(t: Numbers) -> Numbers:
        return ((a + 2) * t - (a + 3)) * t * t + 1

    return [far(ratio + 1), near(ratio), near(1 - ratio), far(2 - ratio)]


def _element(place: Numbers, size: int, padding: str, low: float, high: float) -> Places:
    if padding == "zeros":
        return np.where((place >= 0) & (place < size), place, size).astype(np.intp)
    if padding == "reflection":
        place = np.trunc(_reflected(place, low, high))
    # what is no number has no place
    return np.clip(np.nan_to_num(place), 0, size - 1).astype(np.intp)


def _reflected(x: Numbers, low: float, high: float) -> Numbers:
    """Places mirrored at the borders until they lie within."""
    wide = high - low
    if wide <= 0:
        return np.full_like(x, low)
    below = x < low
    over = np.where(below, low - x, x - high)
    times = np.trunc(over / wide)
    rest = over - times * wide
    from_low = below == (np.mod(times, 2) == 0)
    found: Numbers = np.where(below | (x > high), np.where(from_low, low + rest, high - rest), x).astype(x.dtype)
    return found


def _sum_of_taps(
    data: Numbers, axes: Sequence[Sequence[tuple[Places, Numbers]]], sizes: Sequence[int], out: Numbers
) -> None:
    """Σ weight · element over all taps of all axes, for channels by elements and channels by spots."""
    channels, elements = data.shape
    last = channels >= _FEW_CHANNELS
    # one more element, which is 0
    padded = np.zeros((elements + 1, channels) if last else (channels, elements + 1), data.dtype)
    np.copyto(padded[:elements] if last else padded[:, :elements], data.T if last else data)
    taps = list(_combined(axes, sizes, elements))
    step = max(_AT_ONCE // channels, 1)
    for start in range(0, out.shape[1], step):
        total: Numbers | None = None
        for places, weights in taps:
            at, w = places[start : start + step], weights[start : start + step].astype(data.dtype, copy=False)
            part = padded.take(at, 0 if last else 1)
            np.multiply(part, w[:, None] if last else w, out=part)
            total = part if total is None else np.add(total, part, out=total)
        if total is not None:
            np.copyto(out[:, start : start + step], total.T if last else total)


def _combined(
    axes: Sequence[Sequence[tuple[Places, Numbers]]], sizes: Sequence[int], elements: int
) -> Iterator[tuple[Places, Numbers]]:
    """Taps of all axes together; what lies outside along one of them is element number `elements`."""
    for taps in product(*axes):
        flat, outside = taps[0][0], taps[0][0] >= sizes[0]
        weight = taps[0][1]
        for (places, w), size in zip(taps[1:], sizes[1:], strict=True):
            flat, outside, weight = flat * size + places, outside | (places >= size), weight * w
        yield np.where(outside, elements, flat), weight


# ── RoiAlign ─────────────────────────────────────────────────────────────────────────────────────────────────────


def roi_align(attrs: Attrs, types: Types, results: Sequence[TensorType]) -> Run | None:
    """RoiAlign (ONNX 10 to 22) that averages: a mean along rows of means along columns, which are two products."""
    x, regions = types[0], types[1]
    if x is None or regions is None or x.dtype not in _REAL or attrs.str("mode").lower() != "avg":
        return None
    batch, channels, height, width = x.static_shape
    parts = (attrs.int("output_height"), attrs.int("output_width"))
    ratio, scale = attrs.int("sampling_ratio"), attrs.float("spatial_scale")
    half = attrs.str("coordinate_transformation_mode").lower() == "half_pixel"

    def run(inputs: Sequence[Array], outs: Sequence[Array]) -> None:
        images = in_range(inputs[2], batch, "RoiAlign")
        corners = cast("Numbers", inputs[1]) * inputs[1].dtype.type(scale) - inputs[1].dtype.type(0.5 if half else 0)
        starts, extents = corners[:, :2], corners[:, 2:] - corners[:, :2]
        if not half:
            extents = np.maximum(extents, extents.dtype.type(1))
        columns, rows = (
            _means(starts[:, i], extents[:, i], parts[1 - i], ratio, size) for i, size in ((0, width), (1, height))
        )
        data = np.ascontiguousarray(np.moveaxis(cast("Numbers", inputs[0]), 1, 3))
        found = np.zeros((len(images), *parts, channels), data.dtype)
        for i, image in enumerate(images.tolist()):
            (y, down), (x, across) = rows[i], columns[i]
            if down.size and across.size:
                piece = data[image, y : y + down.shape[1], x : x + across.shape[1]]
                lines = np.matmul(across.astype(data.dtype), piece).reshape(down.shape[1], -1)
                np.matmul(down.astype(data.dtype), lines, out=found[i].reshape(parts[0], -1))
        np.copyto(outs[0], np.moveaxis(found, 3, 1))

    return run


def _means(starts: Numbers, extents: Numbers, parts: int, ratio: int, size: int) -> list[tuple[int, Numbers]]:
    """For each region the first element along an axis that it reads, and the weights of those from there on."""
    each = extents / parts
    counts = np.full(len(each), ratio) if ratio > 0 else np.ceil(each).astype(np.intp)
    found: list[tuple[int, Numbers]] = [(0, np.zeros((parts, 0), each.dtype))] * len(each)
    for count in np.unique(counts[counts > 0]).tolist():
        chosen = np.flatnonzero(counts == count)
        steps = np.arange(parts, dtype=each.dtype)[:, None] + (np.arange(count, dtype=each.dtype) + 0.5) / count
        spots = starts[chosen, None, None] + steps.astype(each.dtype) * each[chosen, None, None]
        inside = (spots >= -1) & (spots <= size)
        spots = np.clip(spots, 0, size - 1)
        left = np.minimum(spots.astype(np.intp), max(size - 2, 0))
        part = spots - left
        low, high = left.min((1, 2)), np.minimum(left.max((1, 2)) + 1, size - 1)
        for number, region in enumerate(chosen.tolist()):
            first, weights = int(low[number]), np.zeros((parts, int(high[number] - low[number]) + 1), np.float64)
            rows = np.repeat(np.arange(parts), count)
            here, ahead = (left[number] - first).reshape(-1), part[number].reshape(-1)
            kept = inside[number].reshape(-1) / count
            np.add.at(weights, (rows, here), (1 - ahead) * kept)
            np.add.at(weights, (rows, np.minimum(here + 1, weights.shape[1] - 1)), ahead * kept)
            found[region] = (first, weights.astype(each.dtype))
    return found


REGIONS: dict[str, Maker] = {"GridSample": grid_sample, "RoiAlign": roi_align}

__all__ = ["REGIONS"]
