"""Operators on images: blocks of pixels into channels and back, resizing, sampling, regions."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np

from taso.graph.errors import GraphError, ShapeError
from taso.graph.index import Loop, Meaning, Read, at
from taso.graph.operator import (
    REQUIRED,
    Array,
    Attrs,
    AttrValue,
    FileNode,
    Operator,
    Reading,
    Required,
    Spelling,
    Trait,
    Types,
    Unmodelled,
    Unspellable,
    register,
)  # fmt: skip
from taso.graph.ops.common import (
    normal_axes,
    only_attributes,
    present,
    require_equal,
    require_rank,
    small_ints,
    writes_changed,
)  # fmt: skip
from taso.graph.types import Dim, TensorType

# ── DepthToSpace, SpaceToDepth ───────────────────────────────────────────────────────────────────────────────────
# mode DCR counts the position in the block before the channel, CRD behind it


def _block_input(op: str, types: Types, attrs: Attrs) -> tuple[TensorType, int]:
    x, block = present(types, 0, op), attrs.int("blocksize")
    require_rank(x, 4, op, "the input")
    if block < 1:
        raise ShapeError(f"{op}: blocksize must be at least 1, not {block}")
    if attrs.str("mode") not in ("DCR", "CRD"):
        raise ShapeError(f"{op}: the mode must be DCR or CRD, not {attrs.str('mode')}")
    return x, block


def _require_divides(size: Dim, divisor: int, op: str, what: str) -> None:
    if isinstance(size, int) and size % divisor:
        raise ShapeError(f"{op}: {what} {size} is no multiple of {divisor}")


def _to_space_type(types: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    x, block = _block_input("DepthToSpace", types, attrs)
    n, c, h, w = x.dims
    _require_divides(c, block * block, "DepthToSpace", "the number of channels")
    return (x.with_shape((n, c // (block * block), h * block, w * block)),)


def _to_space_meaning(types: Types, attrs: Attrs) -> tuple[Meaning, ...]:
    x, block = _block_input("DepthToSpace", types, attrs)
    n, c, h, w = (Loop(name, d) for name, d in zip("nchw", x.dims, strict=True))
    c, i, j = Loop("c", c.extent // (block * block)), Loop("i", block), Loop("j", block)
    if attrs.str("mode") == "DCR":
        channel = at(i, c.extent * block) + at(j, c.extent) + at(c)
    else:
        channel = at(c, block * block) + at(i, block) + at(j)
    return (Meaning(((n,), (c,), (h, i), (w, j)), Read(0, (at(n), channel, at(h), at(w)))),)


_TO_SPACE: dict[str, AttrValue | Required] = {"blocksize": REQUIRED, "mode": "DCR"}
DEPTH_TO_SPACE = register(
    Operator(
        "DepthToSpace", _to_space_type, _TO_SPACE, frozenset({Trait.MOVES_DATA}), frozenset({0}), _to_space_meaning,
        write=writes_changed("DepthToSpace", _TO_SPACE, {"mode": 11}),
    )
)  # fmt: skip


def _to_depth_type(types: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    x, block = _block_input("SpaceToDepth", types, attrs)
    n, c, h, w = x.dims
    for size, what in ((h, "the height"), (w, "the width")):
        _require_divides(size, block, "SpaceToDepth", what)
    return (x.with_shape((n, c * (block * block), h // block, w // block)),)


def _to_depth_meaning(types: Types, attrs: Attrs) -> tuple[Meaning, ...]:
    x, block = _block_input("SpaceToDepth", types, attrs)
    n, c = Loop("n", x.dims[0]), Loop("c", x.dims[1])
    h, w = Loop("h", x.dims[2] // block), Loop("w", x.dims[3] // block)
    i, j = Loop("i", block), Loop("j", block)
    channel = (i, j, c) if attrs.str("mode") == "DCR" else (c, i, j)
    read = Read(0, (at(n), at(c), at(h, block) + at(i), at(w, block) + at(j)))
    return (Meaning(((n,), channel, (h,), (w,)), read),)


_TO_DEPTH: dict[str, AttrValue | Required] = {"blocksize": REQUIRED, "mode": "DCR"}
SPACE_TO_DEPTH = register(
    Operator(
        "SpaceToDepth", _to_depth_type, _TO_DEPTH, frozenset({Trait.MOVES_DATA}), frozenset({0}), _to_depth_meaning,
        write=writes_changed("SpaceToDepth", _TO_DEPTH, {"mode": 28}),
    )
)  # fmt: skip

# ── Resize: `scales` or `sizes` are numbers here, as is `roi`; its meaning is that of onnx.reference ─────────────

_RESIZE: dict[str, AttrValue | Required] = {
    "mode": "nearest", "coordinate_transformation_mode": "half_pixel", "cubic_coeff_a": -0.75, "exclude_outside": 0,
    "extrapolation_value": 0.0, "nearest_mode": "round_prefer_floor", "antialias": 0, "axes": None,
    "keep_aspect_ratio_policy": "stretch",
}  # fmt: skip


def _resized(x: TensorType, attrs: Attrs) -> tuple[Dim, ...]:
    axes = attrs.ints("axes") if attrs["axes"] is not None else tuple(range(x.rank))
    places = normal_axes(axes, x.rank, "Resize")
    given = attrs["sizes"] if attrs["sizes"] is not None else attrs["scales"]
    numbers = [v for v in given if isinstance(v, (int, float))] if isinstance(given, tuple) else []
    if len(numbers) != len(places):
        raise ShapeError(f"Resize: {len(numbers)} numbers were given for {len(places)} axes of {x}")
    if attrs["sizes"] is not None and attrs.str("keep_aspect_ratio_policy") != "stretch":
        numbers = _keeping_ratio(x, places, numbers, attrs.str("keep_aspect_ratio_policy"))
    dims = list(x.dims)
    for axis, number in zip(places, numbers, strict=True):
        dims[axis] = number if isinstance(number, int) else _scaled(dims[axis], number)
    return tuple(dims)


def _scaled(size: Dim, scale: float) -> Dim:
    if scale <= 0:
        raise ShapeError(f"Resize: the scale {scale} is not above 0")
    if isinstance(size, int):
        return math.floor(size * scale)
    if scale.is_integer():
        return size * int(scale)
    raise ShapeError(f"Resize: the size {size} times {scale} is not known in numbers")


def _keeping_ratio(x: TensorType, places: Sequence[int], sizes: Sequence[float], policy: str) -> list[float]:
    """Sizes of all axes scaled alike: as large as fits ("not_larger"), or as small as covers ("not_smaller")."""
    static = [x.dims[a] for a in places]
    ratios = [size / dim for size, dim in zip(sizes, static, strict=True) if isinstance(dim, int) and dim]
    if len(ratios) != len(static):
        raise ShapeError(f"Resize: the ratio of the sizes of {x} is not known in numbers")
    scale = min(ratios) if policy == "not_larger" else max(ratios)
    return [math.floor(scale * dim + 0.5) for dim in static if isinstance(dim, int)]


def _resize_type(types: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    x = present(types, 0, "Resize")
    return (x.with_shape(_resized(x, attrs)),)


def _read_resize(node: FileNode) -> Reading:
    """Resize 10 (whose coordinates are asymmetric, rounded down), 11 and newer."""
    attrs: dict[str, AttrValue] = {k: v for k, v in node.attrs.items() if k in _RESIZE}
    only_attributes(node, *_RESIZE)
    node.type(0)
    if node.version < 11:
        attrs.update(coordinate_transformation_mode="asymmetric", nearest_mode="floor")
        return Reading({**attrs, "scales": _floats(node.needs(1))}, (0,))
    if node.has(1) and node.needs(1).size:
        attrs["roi"] = _floats(node.needs(1))
    if node.has(3) and node.needs(3).size:
        attrs["sizes"] = small_ints(node, 3)
    elif node.has(2) and node.needs(2).size:
        attrs["scales"] = _floats(node.needs(2))
    else:
        raise Unmodelled("Resize without scales and sizes")
    return Reading(attrs, (0,))


def _floats(array: Array) -> tuple[float, ...]:
    return tuple(float(v) for v in np.asarray(array).reshape(-1).tolist())


def _write_resize(attrs: Attrs, types: Types, opset: int) -> Spelling:
    said = {n: v for n, v in attrs.items() if n in _RESIZE and v != _RESIZE[n]}
    said["mode"] = attrs.str("mode")
    if opset < 11:
        return _write_resize_10(attrs, said, opset)
    newer = said.keys() & {"antialias", "axes", "keep_aspect_ratio_policy"}
    if newer and opset < 18:
        raise Unspellable(f"Resize with '{sorted(newer)[0]}' cannot be written in ONNX opset {opset}")
    dtype = present(types, 0, "Resize").dtype.numpy
    roi = np.asarray(attrs["roi"] or (), dtype if dtype in (np.float16, np.float32, np.float64) else np.float32)
    scales = np.asarray(attrs["scales"] or (), np.float32)
    inputs: list[int | Array | None] = [0, roi, scales] if opset < 13 else [0, roi if roi.size else None, None]
    if attrs["sizes"] is not None:
        inputs.append(np.asarray(attrs.ints("sizes"), np.int64))
    else:
        inputs[2] = scales
    return Spelling("Resize", said, tuple(inputs))


def _write_resize_10(attrs: Attrs, said: dict[str, AttrValue], opset: int) -> Spelling:
    mode, nearest = said.pop("coordinate_transformation_mode", None), said.pop("nearest_mode", None)
    if attrs["scales"] is None or mode != "asymmetric" or nearest != "floor" or said.keys() - {"mode"}:
        raise Unspellable(f"this Resize cannot be written in ONNX opset {opset}")
    return Spelling("Resize", said, (0, np.asarray(attrs["scales"], np.float32)))


RESIZE = register(
    Operator(
        "Resize", _resize_type, {**_RESIZE, "roi": None, "scales": None, "sizes": None}, linear=frozenset({0}),
        read=_read_resize, write=_write_resize, since=10,
    )
)  # fmt: skip

# ── GridSample, RoiAlign: their meaning is that of onnx.reference; MaxRoiPool ────────────────────────────────────


def _grid_type(types: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    x, grid = present(types, 0, "GridSample"), present(types, 1, "GridSample")
    if x.rank < 3 or grid.rank != x.rank:
        raise ShapeError(f"GridSample: input {x} and grid {grid} must have equal rank of at least 3")
    require_equal(x.dims[0], grid.dims[0], "GridSample", "batch sizes of input and grid")
    require_equal(grid.dims[-1], x.rank - 2, "GridSample", "last size of the grid and number of spatial axes")
    return (x.with_shape((*x.dims[:2], *grid.dims[1:-1])),)


_MODES = {"bilinear": "linear", "bicubic": "cubic"}


def _read_grid(node: FileNode) -> Reading:
    """GridSample 16 calls its modes bilinear and bicubic."""
    only_attributes(node, "align_corners", "mode", "padding_mode")
    mode = node.attrs.get("mode", "linear")
    said = {n: node.attrs[n] for n in ("align_corners", "padding_mode") if n in node.attrs}
    return Reading({**said, "mode": _MODES.get(str(mode), mode)}, (0, 1))


def _write_grid(attrs: Attrs, types: Types, opset: int) -> Spelling:
    said: dict[str, AttrValue] = dict(attrs)
    if opset < 20:
        said["mode"] = {new: old for old, new in _MODES.items()}.get(attrs.str("mode"), attrs.str("mode"))
    return Spelling("GridSample", said, (0, 1))


GRID_SAMPLE = register(
    Operator(
        "GridSample", _grid_type, {"align_corners": 0, "mode": "linear", "padding_mode": "zeros"},
        linear=frozenset({0}), arity=(2, 2), read=_read_grid, write=_write_grid, since=16,
    )
)  # fmt: skip


def _align_type(types: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    x, rois, batch = (present(types, i, "RoiAlign") for i in range(3))
    require_rank(x, 4, "RoiAlign", "the input")
    require_rank(rois, 2, "RoiAlign", "the regions")
    require_rank(batch, 1, "RoiAlign", "the batch indices")
    require_equal(rois.dims[1], 4, "RoiAlign", "numbers that describe a region and 4")
    require_equal(rois.dims[0], batch.dims[0], "RoiAlign", "numbers of regions and of batch indices")
    return (x.with_shape((rois.dims[0], x.dims[1], attrs.int("output_height"), attrs.int("output_width"))),)


def _read_align(node: FileNode) -> Reading:
    """RoiAlign 16 and newer; 10 does not shift by half a pixel."""
    only_attributes(node, *_ALIGN)
    mode = "half_pixel" if node.version >= 16 else "output_half_pixel"
    return Reading({"coordinate_transformation_mode": mode, **node.attrs}, (0, 1, 2))


def _write_align(attrs: Attrs, types: Types, opset: int) -> Spelling:
    said = {n: v for n, v in attrs.items() if v != _ALIGN[n]}
    if opset < 16:
        if said.pop("coordinate_transformation_mode", None) != "output_half_pixel":
            raise Unspellable(f"RoiAlign with half a pixel's shift cannot be written in ONNX opset {opset}")
    return Spelling("RoiAlign", said, (0, 1, 2))


_ALIGN: dict[str, AttrValue | Required] = {
    "coordinate_transformation_mode": "half_pixel", "mode": "avg", "output_height": 1, "output_width": 1,
    "sampling_ratio": 0, "spatial_scale": 1.0,
}  # fmt: skip
ROI_ALIGN = register(
    Operator("RoiAlign", _align_type, _ALIGN, arity=(3, 3), read=_read_align, write=_write_align, since=10)
)


def _roi_pool_type(types: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    x, rois = present(types, 0, "MaxRoiPool"), present(types, 1, "MaxRoiPool")
    require_rank(x, 4, "MaxRoiPool", "the input")
    require_rank(rois, 2, "MaxRoiPool", "the regions")
    require_equal(rois.dims[1], 5, "MaxRoiPool", "numbers that describe a region and 5")
    return (x.with_shape((rois.dims[0], x.dims[1], *attrs.ints("pooled_shape"))),)


def _roi_pooled(arrays: Sequence[Array | None], attrs: Attrs) -> tuple[Array, ...]:
    """Largest element of each part of each region; 0 of a part that lies outside (Girshick, Fast R-CNN, section 2.1).

    A region is its image and the first and last column and row, rounded with halves away from 0 after scaling.
    """
    x, rois = arrays
    if x is None or rois is None:
        raise GraphError("MaxRoiPool needs both its inputs")
    scale, pooled = attrs.float("spatial_scale"), attrs.ints("pooled_shape")
    result = np.zeros((len(rois), x.shape[1], *pooled), x.dtype)
    for number, roi in enumerate(np.asarray(rois, np.float64)):
        left, top, right, bottom = (math.floor(abs(v) * scale + 0.5) * (1 if v >= 0 else -1) for v in roi[1:])
        rows = _parts(top, bottom, pooled[0], x.shape[2])
        columns = _parts(left, right, pooled[1], x.shape[3])
        for (i, (a, b)), (j, (c, d)) in itertools.product(enumerate(rows), enumerate(columns)):
            if a < b and c < d:
                result[number, :, i, j] = x[int(roi[0]), :, a:b, c:d].max((1, 2))
    return (result,)


def _parts(first: int, last: int, parts: int, size: int) -> list[tuple[int, int]]:
    """Where each of the overlapping parts of a side begins and ends, within the image."""
    length = max(last - first + 1, 1)
    edges = [(first + i * length // parts, first - (-(i + 1) * length // parts)) for i in range(parts)]
    return [(min(max(a, 0), size), min(max(b, 0), size)) for a, b in edges]


MAX_ROI_POOL = register(
    Operator(
        "MaxRoiPool", _roi_pool_type, {"pooled_shape": REQUIRED, "spatial_scale": 1.0}, arity=(2, 2),
        compute=_roi_pooled,
    )
)  # fmt: skip
