"""Resize with NumPy: every axis on its own, as a sum of few elements with weights that are known beforehand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from taso.backends.base import Array
from taso.graph.operator import Attrs
from taso.graph.types import TensorType

Run = Callable[[Sequence[Array], Sequence[Array]], object]
Numbers = NDArray[np.float64]
Places = NDArray[np.intp]


@dataclass(frozen=True)
class Taps:
    """What makes one axis: for each tap the element that it reads for each output, and that element's weight."""

    axis: int
    places: tuple[Places, ...]
    weights: tuple[Numbers, ...] | None


def resize(attrs: Attrs, x: TensorType, out: TensorType) -> Run | None:
    """What computes a Resize (ONNX Resize 10 to 19), None for antialiasing, regions and ratios that are kept."""
    needed = axis_taps(attrs, x, out)
    if needed is None or attrs.str("mode") != "nearest" and x.dtype.numpy.kind != "f":
        return None
    if not needed:
        return lambda inputs, outs: np.copyto(outs[0], inputs[0])
    factors = _repeats(needed, x, out)
    if factors is not None:
        return _repeated(factors, x)
    # what shrinks first leaves less to do
    needed.sort(key=lambda t: out.static_shape[t.axis] / x.static_shape[t.axis])

    def run(inputs: Sequence[Array], outs: Sequence[Array]) -> None:
        array = inputs[0]
        for number, tap in enumerate(needed):
            array = _apply(array, tap, outs[0] if number == len(needed) - 1 else None)

    return run


def axis_taps(attrs: Attrs, x: TensorType, out: TensorType) -> list[Taps] | None:
    """What each axis that changes is made of, None of what `resize` does not compute."""
    unknown = attrs["antialias"] or attrs.str("coordinate_transformation_mode") not in _COORDINATES
    if unknown or attrs["sizes"] is not None and attrs.str("keep_aspect_ratio_policy") != "stretch":
        return None
    if attrs.str("mode") not in ("nearest", "linear", "cubic"):
        return None
    taps = [_taps(attrs, axis, x.static_shape[axis], out.static_shape[axis], scale)
            for axis, scale in _scales(attrs, x, out)]  # fmt: skip
    return [t for t in taps if not _keeps(t, x.static_shape[t.axis])]


def _scales(attrs: Attrs, x: TensorType, out: TensorType) -> list[tuple[int, float]]:
    """Each axis that is resized with its scale."""
    axes = attrs.ints("axes") if attrs["axes"] is not None else tuple(range(x.rank))
    places = [a % x.rank for a in axes]
    given = attrs["scales"]
    if attrs["sizes"] is not None or not isinstance(given, tuple):
        return [(a, out.static_shape[a] / x.static_shape[a]) for a in places]
    return [(a, float(s)) for a, s in zip(places, given, strict=True) if isinstance(s, (int, float))]


# position in the input of output positions `y`: (y, scale, size, size · scale, output size)
_COORDINATES: dict[str, Callable[[Numbers, float, int, float, int], Numbers]] = {
    "half_pixel": lambda y, scale, size, wide, count: (y + 0.5) / scale - 0.5,
    "asymmetric": lambda y, scale, size, wide, count: y / scale,
    "align_corners": lambda y, scale, size, wide, count: y * 0 if wide == 1 else y * (size - 1) / (wide - 1),
    "pytorch_half_pixel": lambda y, scale, size, wide, count: y * 0 - 0.5 if wide == 1 else (y + 0.5) / scale - 0.5,
    "half_pixel_symmetric": lambda y, scale, size, wide, count: (
        size / 2 * (1 - count / wide) + (y + 0.5) / scale - 0.5
    ),
}


def _taps(attrs: Attrs, axis: int, size: int, count: int, scale: float) -> Taps:
    coordinates = _COORDINATES[attrs.str("coordinate_transformation_mode")]
    x = coordinates(np.arange(count, dtype=np.float64), scale, size, scale * size, count)
    if attrs.str("mode") == "nearest":
        rounded = _NEAREST[attrs.str("nearest_mode")](x)
        return Taps(axis, (np.clip(rounded, 0, size - 1).astype(np.intp),), None)
    # the element at or left of a position; one that lies on an element counts as right at the end of the step before
    left = np.ceil(x) - 1
    ratio = x - left
    linear = attrs.str("mode") == "linear"
    weights = [1 - ratio, ratio] if linear else _cubic(ratio, attrs.float("cubic_coeff_a"))
    places = [left + offset for offset in ((0, 1) if linear else (-1, 0, 1, 2))]
    if attrs["exclude_outside"]:
        weights = [np.where((p >= 0) & (p < size), w, 0) for p, w in zip(places, weights, strict=True)]
        total = np.sum(weights, axis=0)
        weights = [w / total for w in weights]
    return Taps(axis, tuple(np.clip(p, 0, size - 1).astype(np.intp) for p in places), tuple(weights))


_NEAREST: dict[str, Callable[[Numbers], Numbers]] = {
    "round_prefer_floor": lambda x: np.ceil(x - 0.5),
    "round_prefer_ceil": lambda x: np.floor(x + 0.5),
    "floor": np.floor,
    "ceil": np.ceil,
}


def _cubic(ratio: Numbers, a: float) -> list[Numbers]:
    """Weights of the elements at -1, 0, 1, 2 (Keys, Cubic convolution interpolation, 1981)."""

    def far(t: Numbers) -> Numbers:
        return ((a * t - 5 * a) * t + 8 * a) * t - 4 * a

    def near(t: Numbers) -> Numbers:
        return ((a + 2) * t - (a + 3)) * t * t + 1

    return [far(ratio + 1), near(ratio), near(1 - ratio), far(2 - ratio)]


def _keeps(tap: Taps, size: int) -> bool:
    """Whether an axis comes out as it went in."""
    if tap.weights is None:
        return np.array_equal(tap.places[0], np.arange(size))
    return len(tap.places[0]) == size and all(
        np.array_equal(p[w != 0], np.arange(size)[w != 0]) and bool(np.all((w == 0) | (w == 1)))
        for p, w in zip(tap.places, tap.weights, strict=True)
    )


def _apply(array: Array, tap: Taps, out: Array | None) -> Array:
    if tap.weights is None:
        return array.take(tap.places[0], tap.axis, out=out, mode="clip")
    broad = [1] * array.ndim
    broad[tap.axis] = -1
    total: Array | None = None
    for places, weights in zip(tap.places, tap.weights, strict=True):
        part = array.take(places, tap.axis)
        np.multiply(part, weights.astype(array.dtype).reshape(broad), out=part)
        total = part if total is None else np.add(total, part, out=total)
    if total is None:
        raise ValueError("an axis without taps")
    if out is not None:
        np.copyto(out, total)
    return total


# ── each element several times ───────────────────────────────────────────────────────────────────────────────────


def _repeats(taps: Sequence[Taps], x: TensorType, out: TensorType) -> list[int] | None:
    """How often each element comes along each axis, None where it is not that simple."""
    factors = [1] * x.rank
    for tap in taps:
        size, count = x.static_shape[tap.axis], out.static_shape[tap.axis]
        if tap.weights is not None or count % size:
            return None
        factors[tap.axis] = count // size
        if not np.array_equal(tap.places[0], np.arange(count) // factors[tap.axis]):
            return None
    return factors


def _repeated(factors: Sequence[int], x: TensorType) -> Run:
    whole = [n for size, factor in zip(x.static_shape, factors, strict=True) for n in (size, factor)]
    once = [n for size in x.static_shape for n in (size, 1)]
    return lambda inputs, outs: np.copyto(outs[0].reshape(whole), inputs[0].reshape(once))


__all__ = ["Taps", "axis_taps", "resize"]
