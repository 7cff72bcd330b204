"""What onnx.reference computes otherwise than ONNX says, or box by box: Loop, Scan, LpNormalization, NonMaxSuppression.

Of a Loop it takes a missing condition for a false one, lets outer values hide the body's own, and stacks scanned
scalars as rows; of a Scan it knows the first axes and the forward direction alone; of neither does it know the shapes
that no iteration leaves behind. It adds up the elements themselves, not their sizes, where it normalizes by p = 1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Union

import numpy as np
from numpy.typing import NDArray
from onnx import ModelProto, TypeProto

from taso.graph.onnx_protos import element_type
from taso.graph.operator import Array

if TYPE_CHECKING:
    from onnx.reference import ReferenceEvaluator
    from onnx.reference.op_run import OpRun

_AT_ONCE = 64
"""Boxes that are looked at together."""

Item = Union[Array, list[Array], None]
Attributes = Union[dict[str, object], None]


class _Repeated:
    op_domain = ""
    body: ReferenceEvaluator

    def need_context(self) -> bool:
        return True

    def _once(self, given: Sequence[Item], context: Mapping[str, Item] | None, attributes: Attributes) -> list[Item]:
        """What the body gives for its inputs; its own names hide those of the surrounding graph."""
        feeds = {**(context or {}), **dict(zip(self.body.input_names, given, strict=True))}
        found = self.body.run(None, feeds, attributes=attributes)
        return [found[name] for name in self.body.output_names] if isinstance(found, dict) else found

    def _stacked(self, items: Sequence[Item], position: int, axis: int = 0) -> Array:
        """What output `position` of the body gave in each iteration, along a new axis."""
        if items:
            arrays = [np.asarray(i, object if isinstance(i, str) else None) for i in items]
            return np.stack(arrays, axis if axis >= 0 else axis + arrays[0].ndim + 1)
        return _empty(self.body.output_types[position], axis)


class Loop(_Repeated):
    """Loop (versions 1 to 25)."""

    def _run(
        self, trips: Array | None = None, going: Array | None = None, *state: Item, body: object = None,
        context: Mapping[str, Item] | None = None, attributes: Attributes = None, **_: object,
    ) -> tuple[Item, ...]:  # fmt: skip
        carried = list(state)
        scanned: list[list[Item]] = [[] for _ in self.body.output_names[1 + len(carried) :]]
        most = None if trips is None else int(np.asarray(trips).item())
        on, i = going is None or bool(np.asarray(going).item()), 0
        while on and (most is None or i < most):
            found = self._once([np.asarray(i, np.int64), np.asarray(on), *carried], context, attributes)
            on, i = bool(np.asarray(found[0]).item()), i + 1
            carried = found[1 : 1 + len(carried)]
            for items, item in zip(scanned, found[1 + len(carried) :], strict=True):
                items.append(item)
        return (*carried, *(self._stacked(s, 1 + len(carried) + k) for k, s in enumerate(scanned)))


class Scan(_Repeated):
    """Scan (versions 9 to 25)."""

    num_scan_inputs: int
    scan_input_axes: Sequence[int] | None
    scan_input_directions: Sequence[int] | None
    scan_output_axes: Sequence[int] | None
    scan_output_directions: Sequence[int] | None

    def _run(
        self, *given: Array, context: Mapping[str, Item] | None = None, attributes: Attributes = None, **_: object
    ) -> tuple[Item, ...]:
        count = self.num_scan_inputs
        carried: list[Item] = list(given[: len(given) - count])
        axes, backwards = self.scan_input_axes or [0] * count, self.scan_input_directions or [0] * count
        over = [
            np.flip(np.moveaxis(a, axis, 0), 0) if back else np.moveaxis(a, axis, 0)
            for a, axis, back in zip(given[len(carried) :], axes, backwards, strict=True)
        ]
        results = len(self.body.output_names) - len(carried)
        scanned: list[list[Item]] = [[] for _ in range(results)]
        for steps in zip(*over, strict=True):
            found = self._once([*carried, *map(np.asarray, steps)], context, attributes)
            carried = found[: len(carried)]
            for items, item in zip(scanned, found[len(carried) :], strict=True):
                items.append(item)
        axes, backwards = self.scan_output_axes or [0] * results, self.scan_output_directions or [0] * results
        ordered = [s[::-1] if back else s for s, back in zip(scanned, backwards, strict=True)]
        stacked = [
            self._stacked(s, len(carried) + k, axis) for k, (s, axis) in enumerate(zip(ordered, axes, strict=True))
        ]
        return (*carried, *stacked)


def _empty(type: TypeProto, axis: int) -> Array:
    """What is left of a scanned output of this type after no iteration; a size that is not known counts as 0."""
    dims = [d.dim_value for d in type.tensor_type.shape.dim]
    dims.insert(axis if axis >= 0 else axis + len(dims) + 1, 0)
    dtype = element_type(type.tensor_type.elem_type)
    if dtype is None:
        raise RuntimeError("what is scanned has no element type, and no iteration says which it is")
    return np.empty(dims, dtype.numpy)


class LpNormalization:
    """LpNormalization (versions 1 to 22); where the norm is 0 all elements are."""

    op_domain = ""
    axis: int
    p: int

    def _run(self, x: Array, **_: object) -> tuple[Array]:
        norm = np.linalg.norm(x.astype(np.float64), self.p, self.axis, keepdims=True)
        return (np.divide(x, norm, out=np.zeros(x.shape), where=norm != 0).astype(x.dtype),)


class NonMaxSuppression:
    """NonMaxSuppression (versions 10 and 11), of each box against all that are left at once."""

    op_domain = ""
    center_point_box: int

    def _run(
        self, boxes: Array, scores: Array, most: Array | None = None, overlap: Array | None = None,
        least: Array | None = None, **_: object,
    ) -> tuple[Array]:  # fmt: skip
        limit = 0 if most is None or not most.size else max(int(most.reshape(-1)[0]), 0)
        bound = np.float32(0) if overlap is None or not overlap.size else np.float32(overlap.reshape(-1)[0])
        lowest = None if least is None or not least.size else np.float32(least.reshape(-1)[0])
        found: list[tuple[int, int, int]] = []
        for image, own in enumerate(np.asarray(boxes, np.float32)):
            corners = _corners(own, bool(self.center_point_box))
            for label, rank in enumerate(np.asarray(scores[image], np.float32)):
                kept = np.arange(len(rank)) if lowest is None else np.flatnonzero(rank > lowest)
                # the greatest first, and of equal ones the first
                order = kept[np.argsort(-rank[kept], kind="stable")]
                found += [(image, label, box) for box in _apart(corners[:, order], bound, limit, order)]
        return (np.array(found, np.int64).reshape(-1, 3),)


def _corners(boxes: NDArray[np.float32], centred: bool) -> NDArray[np.float32]:
    """Rows of the least and greatest x, the least and greatest y, and the area of boxes."""
    if centred:
        x, y, half_width, half_height = boxes[:, 0], boxes[:, 1], boxes[:, 2] / 2, boxes[:, 3] / 2
        sides = [x - half_width, x + half_width, y - half_height, y + half_height]
    else:
        one, two = boxes[:, :2], boxes[:, 2:]
        low, high = np.minimum(one, two), np.maximum(one, two)
        sides = [low[:, 1], high[:, 1], low[:, 0], high[:, 0]]
    return np.stack([*sides, (sides[1] - sides[0]) * (sides[3] - sides[2])])


def _apart(corners: NDArray[np.float32], bound: np.float32, limit: int, names: NDArray[np.intp]) -> list[int]:
    """The names of boxes, in their order, each of which overlaps none of these before it by more than the bound."""
    found: list[int] = []
    for start in range(0, len(names), _AT_ONCE):
        part = corners[:, start : start + _AT_ONCE]
        left = np.arange(start, start + part.shape[1])
        if found:
            left = left[~_overlap(part, corners[:, found], bound).any(1)]
        own = _overlap(corners[:, left], corners[:, left], bound)
        hidden = np.zeros(len(left), bool)
        for number, box in enumerate(left.tolist()):
            if len(found) == limit:
                return [int(n) for n in names[found]]
            if not hidden[number]:
                found.append(box)
                hidden |= own[number]
    return [int(n) for n in names[found]]


def _overlap(one: NDArray[np.float32], two: NDArray[np.float32], bound: np.float32) -> NDArray[np.bool_]:
    """For each of some boxes and each of others whether what they share is more than that part of both."""
    low_x, high_x, low_y, high_y, area = one[:, :, None]
    wide = np.minimum(high_x, two[1]) - np.maximum(low_x, two[0])
    tall = np.minimum(high_y, two[3]) - np.maximum(low_y, two[2])
    shared = wide * tall
    both = area + two[4] - shared
    real = (wide > 0) & (tall > 0) & (shared > 0) & (area > 0) & (two[4] > 0) & (both > 0)
    share = np.divide(shared, both, out=np.zeros_like(shared), where=real)
    found: NDArray[np.bool_] = real & (share > bound)
    return found


def reference(model: ModelProto) -> ReferenceEvaluator:
    """ONNX's reference for a model, with these operators in place of its own.

    It is imported here: it takes ten megabytes, and a process that only runs models needs nothing of it.
    """
    from onnx.reference import ReferenceEvaluator
    from onnx.reference.op_run import OpRun

    opset = next(said.version for said in model.opset_import if said.domain == "")
    # Scan of version 8 is another operator, which the reference does not know either
    own = [Loop, LpNormalization, NonMaxSuppression, *([Scan] if opset >= 9 else [])]
    made: list[type[OpRun]] = [type(meaning.__name__, (meaning, OpRun), {}) for meaning in own]
    return ReferenceEvaluator(model, new_ops=made)


__all__ = ["reference"]
