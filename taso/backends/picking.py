"""Operators that find or place elements, with NumPy: TopK, ArgMax and ArgMin, Hardmax, Gather…, Scatter…, OneHot.

Ties and NaN are as ONNX and its reference have them: of equal elements the one of lower index comes first, and NaN
counts as what is looked for, the greatest or the least.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import cast

import numpy as np
from numpy.typing import NDArray

from taso.backends.base import Array
from taso.graph.errors import BackendError
from taso.graph.operator import Attrs, Types
from taso.graph.types import DType, TensorType

Run = Callable[[Sequence[Array], Sequence[Array]], object]
Maker = Callable[[Attrs, Types, Sequence[TensorType]], "Run | None"]
Numbers = NDArray[np.float32]
"""What is computed with: float32, or another element type that has an order."""
Places = NDArray[np.intp]

_FEW = 64
"""Elements behind an axis below which NumPy looks along it by itself."""

# ── indices ──────────────────────────────────────────────────────────────────────────────────────────────────────


def in_range(indices: Array, size: int, what: str) -> Places:
    """The indices, negative ones counted from the end; raises `BackendError` where one lies outside."""
    found: Places = indices.astype(np.intp, copy=False)
    if found.size:
        low, high = int(found.min()), int(found.max())
        if low < -size or high >= size:
            raise BackendError(f"{what}: an index lies outside the {size} elements")
        if low < 0:
            found = np.where(found < 0, found + size, found)
    return found


def _flat_places(indices: Array, sizes: Sequence[int], what: str) -> Places:
    """Numbers of the positions that the last axis names, among elements of these sizes in row-major order."""
    total = np.zeros(indices.shape[:-1], np.intp)
    for axis, size in enumerate(sizes):
        total = total * size + in_range(indices[..., axis], size, what)
    return total


def _along(indices: Places, shape: Sequence[int], axis: int) -> Places:
    """Numbers, among all elements, of those at `indices` along an axis and where the indices stand on the others."""
    step = math.prod(shape[axis + 1 :])
    total = indices * step
    for a, size in enumerate(indices.shape):
        if a != axis and size > 1:
            own = np.arange(size, dtype=np.intp) * math.prod(shape[a + 1 :])
            total += own.reshape([-1 if k == a else 1 for k in range(indices.ndim)])
    return total


# ── gathers ──────────────────────────────────────────────────────────────────────────────────────────────────────


def gather_elements(attrs: Attrs, types: Types, results: Sequence[TensorType]) -> Run | None:
    """GatherElements (ONNX 11 to 13)."""
    x = types[0]
    if x is None:
        return None
    shape, axis = x.static_shape, attrs.int("axis") % x.rank

    def run(inputs: Sequence[Array], outs: Sequence[Array]) -> None:
        places = _along(in_range(inputs[1], shape[axis], "GatherElements"), shape, axis)
        inputs[0].reshape(-1).take(places, out=outs[0], mode="wrap")

    return run


def gather_nd(attrs: Attrs, types: Types, results: Sequence[TensorType]) -> Run | None:
    """GatherND (ONNX 11 to 13)."""
    x, indices = types[0], types[1]
    if x is None or indices is None:
        return None
    shape, batch, length = x.static_shape, attrs.int("batch_dims"), indices.static_shape[-1]
    count, sizes, rest = math.prod(shape[:batch]), shape[batch : batch + length], shape[batch + length :]
    rows = math.prod(sizes)

    def run(inputs: Sequence[Array], outs: Sequence[Array]) -> None:
        places = _flat_places(inputs[1], sizes, "GatherND").reshape(count, -1)
        if count > 1:
            places = places + np.arange(count)[:, None] * rows
        data = inputs[0].reshape(count * rows, *rest)
        data.take(places.reshape(-1), 0, out=outs[0].reshape(-1, *rest), mode="wrap")

    return run


# ── scatters ─────────────────────────────────────────────────────────────────────────────────────────────────────

_REDUCTIONS: dict[str, np.ufunc] = {"add": np.add, "mul": np.multiply, "max": np.maximum, "min": np.minimum}


def _place(data: Array, places: Places, updates: Array, reduction: str) -> None:
    """Writes rows of updates to the rows `places` of data, or combines them with what is there."""
    function = _REDUCTIONS.get(reduction)
    if function is None:
        data[places] = updates
    elif updates.size < _FEW * len(places) or len(np.unique(places)) < len(places):
        function.at(data, places, updates)
    else:
        # whole rows at once, each of which comes once
        data[places] = function(data[places], updates)


def scatter_elements(attrs: Attrs, types: Types, results: Sequence[TensorType]) -> Run | None:
    """ScatterElements (ONNX 11 to 18), Scatter 9 as well."""
    x, reduction = types[0], attrs.str("reduction")
    if x is None or reduction != "none" and (x.dtype is DType.BOOL or reduction not in _REDUCTIONS):
        return None
    shape, axis = x.static_shape, attrs.int("axis") % x.rank

    def run(inputs: Sequence[Array], outs: Sequence[Array]) -> None:
        places = _along(in_range(inputs[1], shape[axis], "ScatterElements"), shape, axis)
        np.copyto(outs[0], inputs[0])
        _place(outs[0].reshape(-1), places.reshape(-1), inputs[2].reshape(-1), reduction)

    return run


def scatter_nd(attrs: Attrs, types: Types, results: Sequence[TensorType]) -> Run | None:
    """ScatterND (ONNX 11 to 18)."""
    x, indices, reduction = types[0], types[1], attrs.str("reduction")
    if x is None or indices is None or reduction != "none" and (x.dtype is DType.BOOL or reduction not in _REDUCTIONS):
        return None
    shape, length = x.static_shape, indices.static_shape[-1]
    sizes, rest = shape[:length], shape[length:]

    def run(inputs: Sequence[Array], outs: Sequence[Array]) -> None:
        places = _flat_places(inputs[1], sizes, "ScatterND").reshape(-1)
        np.copyto(outs[0], inputs[0])
        _place(outs[0].reshape(-1, *rest), places, inputs[2].reshape(-1, *rest), reduction)

    return run


def one_hot(attrs: Attrs, types: Types, results: Sequence[TensorType]) -> Run | None:
    """OneHot (ONNX 9 to 11) of integers; an index outside has no element that is on."""
    indices, out, depth = types[0], results[0], attrs.int("depth")
    if indices is None or indices.dtype.is_float:
        return None
    axis, count = attrs.int("axis") % out.rank, math.prod(indices.static_shape)
    before = math.prod(out.static_shape[:axis])

    def run(inputs: Sequence[Array], outs: Sequence[Array]) -> None:
        off, on = inputs[1][0], inputs[1][1]
        outs[0].fill(off)
        found: Places = inputs[0].astype(np.intp, copy=False).reshape(-1)
        inside = (found >= -depth) & (found < depth)
        after = count // before
        place = np.arange(count)
        rows = (place // after * depth + np.where(found < 0, found + depth, found)) * after + place % after
        outs[0].reshape(-1)[rows[inside]] = on

    return run


# ── the greatest ─────────────────────────────────────────────────────────────────────────────────────────────────


def _greatest(x: Numbers, axis: int, last: bool) -> Places:
    """Where the greatest element along an axis is, the first one, or the last one of several."""
    found: Places
    if not last:
        found = x.argmax(axis)
    else:
        found = x.shape[axis] - 1 - np.flip(x, axis).argmax(axis)
    return found


def _greatest_of_planes(x: Numbers, axis: int, last: bool, least: bool) -> Places | None:
    """The same in a few passes over whole planes, where many elements lie behind the axis; None with NaN."""
    count = x.shape[axis]
    best = x.min(axis) if least else x.max(axis)
    if best.dtype.kind == "f" and np.isnan(best).any():
        return None
    dtype = np.uint8 if count < 1 << 8 else np.uint16
    found, seen = np.zeros(best.shape, dtype), np.empty(best.shape, bool)
    weighed = np.empty(best.shape, dtype)
    for i in range(count):
        np.equal(x[(slice(None),) * axis + (i,)], best, out=seen)
        np.multiply(seen.view(np.uint8), dtype(i + 1 if last else count - i), out=weighed)
        np.maximum(found, weighed, out=found)
    wide = found.astype(np.intp)
    return wide - 1 if last else count - wide


def arg_of(least: bool) -> Maker:
    """ArgMax, or with `least` ArgMin (ONNX 1 to 13)."""

    def make(attrs: Attrs, types: Types, results: Sequence[TensorType]) -> Run | None:
        x = types[0]
        if x is None or x.rank == 0 or x.dtype is DType.BOOL:
            return None
        axis, last = attrs.int("axis") % x.rank, bool(attrs.int("select_last_index"))
        behind, count = math.prod(x.static_shape[axis + 1 :]), x.static_shape[axis]

        def run(inputs: Sequence[Array], outs: Sequence[Array]) -> None:
            data = cast("Numbers", inputs[0])
            found = None
            if _FEW <= behind and count < 1 << 16:
                found = _greatest_of_planes(data, axis, last, least)
            if found is None and least:
                flipped = np.flip(data, axis) if last else data
                found = flipped.argmin(axis)
                found = count - 1 - found if last else found
            elif found is None:
                found = _greatest(data, axis, last)
            np.copyto(outs[0], found.reshape(outs[0].shape))

        return run

    return make


def hardmax(attrs: Attrs, types: Types, results: Sequence[TensorType]) -> Run | None:
    """Hardmax (ONNX 13)."""
    x = types[0]
    if x is None or x.rank == 0:
        return None
    axis = attrs.int("axis") % x.rank

    def run(inputs: Sequence[Array], outs: Sequence[Array]) -> None:
        found = np.expand_dims(_greatest(cast("Numbers", inputs[0]), axis, False), axis)
        outs[0].fill(0)
        np.put_along_axis(outs[0], found, 1, axis)

    return run


# ── the k greatest ───────────────────────────────────────────────────────────────────────────────────────────────


def top_k(attrs: Attrs, types: Types, results: Sequence[TensorType]) -> Run | None:
    """TopK (ONNX 1 to 24), sorted whether that is asked for or not."""
    x = types[0]
    if x is None or x.rank == 0 or x.dtype is DType.BOOL:
        return None
    axis, k, largest = attrs.int("axis") % x.rank, attrs.int("k"), bool(attrs.int("largest"))
    size, inner = x.static_shape[axis], axis == x.rank - 1

    def run(inputs: Sequence[Array], outs: Sequence[Array]) -> None:
        data = cast("Numbers", inputs[0] if inner else np.ascontiguousarray(np.moveaxis(inputs[0], axis, -1)))
        rows = data.reshape(-1, size)
        found = _top(rows, k, largest)
        values = np.take_along_axis(rows, found, 1)
        both: tuple[Array, Array] = (values, found)
        for out, array in zip(outs, both, strict=False):
            whole = array.reshape(*data.shape[:-1], k)
            np.copyto(out, whole if inner else np.moveaxis(whole, -1, axis))

    return run


def _top(rows: Numbers, k: int, largest: bool) -> Places:
    """Where the k greatest (or least) of each row are, in order."""
    count, size = rows.shape
    if 4 * k < size:
        candidates = _candidates(rows, k, largest)
        if candidates is not None:
            places, values = candidates
            order = _order(values, largest)[:, :k]
            return np.take_along_axis(places, order, 1)
    return _order(rows, largest)[:, :k]


def _order(rows: Numbers, largest: bool) -> Places:
    """How to sort each row; of equal elements the first one comes first."""
    if not largest:
        return np.argsort(rows, 1, kind="stable")
    # backwards twice: equal ones stay in order, and NaN comes first
    backwards = np.argsort(rows[:, ::-1], 1, kind="stable")
    found: Places = rows.shape[1] - 1 - backwards[:, ::-1]
    return found


def _candidates(rows: Numbers, k: int, largest: bool) -> tuple[Places, Numbers] | None:
    """Some elements of each row, in order of place, among them the k greatest; None where there are few others.

    The greatest of each of several groups are k elements at least as great as the k-th of them: none below that is
    among the k greatest. Rows with fewer candidates are filled up with what comes last.
    """
    count, size = rows.shape
    groups = size // max(2, size // (4 * k))
    members = size // groups
    grouped = rows[:, : groups * members].reshape(count, members, groups)
    best = grouped.max(1) if largest else grouped.min(1)
    if best.dtype.kind == "f" and np.isnan(best).any():
        return None
    bound = np.partition(best, groups - k if largest else k - 1, 1)[:, groups - k if largest else k - 1, None]
    chosen = np.flatnonzero(rows >= bound if largest else rows <= bound)
    if rows.dtype.kind == "f" and np.isnan(rows[:, groups * members :]).any():
        return None
    numbers, places = np.divmod(chosen, size)
    each = np.bincount(numbers, minlength=count)
    width = int(each.max())
    if 2 * width > size:
        return None
    if width * count == len(chosen):
        return places.reshape(count, width), rows.reshape(-1)[chosen].reshape(count, width)
    last: object = _last(rows.dtype, largest)
    values = np.full((count, width), last, rows.dtype)
    own = np.zeros((count, width), np.intp)
    at = np.arange(len(chosen)) - np.repeat(np.cumsum(each) - each, each)
    values[numbers, at] = rows.reshape(-1)[chosen]
    own[numbers, at] = places
    return own, values


def _last(dtype: np.dtype[np.generic], largest: bool) -> object:
    """What comes last among numbers of a type."""
    if dtype.kind == "f":
        return -np.inf if largest else np.inf
    info = np.iinfo(np.dtype(dtype.str))
    return info.min if largest else info.max


PICKERS: dict[str, Maker] = {
    "GatherElements": gather_elements,
    "GatherND": gather_nd,
    "ScatterElements": scatter_elements,
    "ScatterND": scatter_nd,
    "OneHot": one_hot,
    "ArgMax": arg_of(least=False),
    "ArgMin": arg_of(least=True),
    "Hardmax": hardmax,
    "TopK": top_k,
}

__all__ = ["PICKERS", "Maker", "Numbers", "Places", "Run", "in_range"]
