"""Operators that look up or place elements by index. Their meaning is that of onnx.reference."""

from __future__ import annotations

import math

import numpy as np

from taso.graph.errors import ShapeError
from taso.graph.operator import (
    REQUIRED,
    Attrs,
    AttrValue,
    FileNode,
    Operator,
    Reading,
    Required,
    Spelling,
    Types,
    Unmodelled,
    Unspellable,
    register,
)  # fmt: skip
from taso.graph.ops.common import (
    element_type,
    normal_axis,
    only_attributes,
    present,
    require_equal,
    require_rank,
    same_as_first,
    writes_changed,
)  # fmt: skip
from taso.graph.types import Dim, DType, Shape, TensorType, show_shape

# ── GatherElements, ScatterElements: one index for each element ──────────────────────────────────────────────────


def _elements_type(op: str, types: Types, attrs: Attrs) -> tuple[TensorType, TensorType]:
    data, indices = present(types, 0, op), present(types, 1, op)
    normal_axis(attrs.int("axis"), data.rank, op)
    if data.rank != indices.rank:
        raise ShapeError(f"{op}: data {show_shape(data.shape)} and indices {show_shape(indices.shape)} differ in rank")
    return data, indices


def _gather_elements_type(types: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    data, indices = _elements_type("GatherElements", types, attrs)
    return (data.with_shape(indices.dims),)


GATHER_ELEMENTS = register(
    Operator(
        "GatherElements", _gather_elements_type, {"axis": 0}, linear=frozenset({0}), arity=(2, 2), since=11,
    )
)  # fmt: skip


def _scatter_elements_type(types: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    data, indices = _elements_type("ScatterElements", types, attrs)
    updates = present(types, 2, "ScatterElements")
    _require_shape(updates, indices.dims, "ScatterElements", "updates and indices")
    _require_dtype(updates, data, "ScatterElements")
    return (data,)


def _require_shape(t: TensorType, dims: Shape, op: str, what: str) -> None:
    require_rank(t, len(dims), op, f"each of {what}")
    for a, b in zip(t.dims, dims, strict=True):
        require_equal(a, b, op, f"sizes of {what}")


def _require_dtype(t: TensorType, data: TensorType, op: str) -> None:
    if t.dtype is not data.dtype:
        raise ShapeError(f"{op}: updates are {t.dtype.name} and the data is {data.dtype.name}; they must agree")


def _write_scatter(
    op: str, defaults: dict[str, AttrValue | Required], attrs: Attrs, types: Types, opset: int
) -> Spelling:
    if attrs.str("reduction") in ("max", "min") and opset < 18:
        raise Unspellable(f"{op} that takes the {attrs.str('reduction')} cannot be written in ONNX opset {opset}")
    return writes_changed(op, defaults, {"reduction": 16})(attrs, types, opset)


_SCATTER_ELEMENTS: dict[str, AttrValue | Required] = {"axis": 0, "reduction": "none"}
SCATTER_ELEMENTS = register(
    Operator(
        "ScatterElements", _scatter_elements_type, _SCATTER_ELEMENTS, arity=(3, 3), since=11,
        write=lambda attrs, types, opset: _write_scatter("ScatterElements", _SCATTER_ELEMENTS, attrs, types, opset),
    )
)  # fmt: skip

# ── GatherND, ScatterND: the last axis of the indices is a position ──────────────────────────────────────────────


def _position_length(indices: TensorType, left: int, op: str) -> int:
    """How many axes one position names; raises `ShapeError` where that is not known or more than there are."""
    if indices.rank < 1:
        raise ShapeError(f"{op}: the indices must have at least 1 dimension")
    length = indices.dims[-1]
    if not isinstance(length, int):
        raise ShapeError(f"{op}: the last size of the indices, {length}, must be known in numbers")
    if not 0 < length <= left:
        raise ShapeError(f"{op}: positions of {length} numbers do not fit data with {left} axes to look up")
    return length


def _gather_nd_type(types: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    data, indices = present(types, 0, "GatherND"), present(types, 1, "GatherND")
    batch = attrs.int("batch_dims")
    if not 0 <= batch < min(data.rank, indices.rank):
        raise ShapeError(
            f"GatherND: batch_dims {batch} does not fit data of {data.rank} and indices of {indices.rank} axes"
        )
    for a, b in zip(data.dims[:batch], indices.dims[:batch], strict=True):
        require_equal(a, b, "GatherND", "batch sizes of data and indices")
    length = _position_length(indices, data.rank - batch, "GatherND")
    return (data.with_shape((*indices.dims[:-1], *data.dims[batch + length :])),)


_GATHER_ND: dict[str, AttrValue | Required] = {"batch_dims": 0}
GATHER_ND = register(
    Operator(
        "GatherND", _gather_nd_type, _GATHER_ND, linear=frozenset({0}), arity=(2, 2), since=11,
        write=writes_changed("GatherND", _GATHER_ND, {"batch_dims": 12}),
    )
)  # fmt: skip


def _scatter_nd_type(types: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    data, indices, updates = (present(types, i, "ScatterND") for i in range(3))
    length = _position_length(indices, data.rank, "ScatterND")
    _require_shape(updates, (*indices.dims[:-1], *data.dims[length:]), "ScatterND", "updates and what is replaced")
    _require_dtype(updates, data, "ScatterND")
    return (data,)


_SCATTER_ND: dict[str, AttrValue | Required] = {"reduction": "none"}
SCATTER_ND = register(
    Operator(
        "ScatterND", _scatter_nd_type, _SCATTER_ND, arity=(3, 3), since=11,
        write=lambda attrs, types, opset: _write_scatter("ScatterND", _SCATTER_ND, attrs, types, opset),
    )
)  # fmt: skip

# ── TensorScatter: a cache with an update written into it ────────────────────────────────────────────────────────


def _tensor_scatter_type(types: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    cache, update = present(types, 0, "TensorScatter"), present(types, 1, "TensorScatter")
    axis = normal_axis(attrs.int("axis"), cache.rank, "TensorScatter")
    if axis == 0:
        raise ShapeError("TensorScatter: the axis of the batch cannot be written along")
    _require_shape(update, (*cache.dims[:axis], update.dims[axis], *cache.dims[axis + 1 :])
                   if update.rank == cache.rank else cache.dims, "TensorScatter", "update and cache")  # fmt: skip
    _require_dtype(update, cache, "TensorScatter")
    return (cache,)


_TENSOR_SCATTER: dict[str, AttrValue | Required] = {"axis": -2, "mode": "linear"}
TENSOR_SCATTER = register(
    Operator("TensorScatter", _tensor_scatter_type, _TENSOR_SCATTER, arity=(2, 3), since=24)
)

# ── TopK: `k` is always a number here ────────────────────────────────────────────────────────────────────────────


def _top_type(types: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    x, k = present(types, 0, "TopK"), attrs.int("k")
    axis = normal_axis(attrs.int("axis"), x.rank, "TopK")
    size = x.dims[axis]
    if k < 0 or isinstance(size, int) and k > size:
        raise ShapeError(f"TopK: {k} elements cannot be taken along axis {axis} of {x}")
    found = x.with_shape((*x.dims[:axis], k, *x.dims[axis + 1 :]))
    return found, TensorType(DType.INT64, found.dims)


def _read_top(node: FileNode) -> Reading:
    """TopK 1 has k as an attribute, 10 and newer as an input; 11 may take the smallest, and leave them unsorted."""
    only_attributes(node, "axis", "k", "largest", "sorted")
    k = node.attrs.get("k") if node.version < 10 else int(node.needs(1).item())
    attrs = {n: node.attrs[n] for n in ("axis", "largest", "sorted") if n in node.attrs}
    return Reading({**attrs, "k": k}, (0,))


def _write_top(attrs: Attrs, types: Types, opset: int) -> Spelling:
    said = {n: attrs.int(n) for n, default in _TOP.items() if attrs[n] != default}
    if opset < 10:
        said["k"] = attrs.int("k")
    if opset < 11 and said.keys() & {"largest", "sorted"}:
        raise Unspellable(f"TopK of the smallest or unsorted cannot be written in ONNX opset {opset}")
    return Spelling("TopK", said, (0,) if opset < 10 else (0, np.asarray([attrs.int("k")], np.int64)))


_TOP: dict[str, int] = {"axis": -1, "largest": 1, "sorted": 1}
TOP_K = register(
    Operator("TopK", _top_type, {**_TOP, "k": REQUIRED}, read=_read_top, write=_write_top)
)

# ── OneHot: `depth` is always a number here ──────────────────────────────────────────────────────────────────────


def _one_hot_type(types: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    indices, values = present(types, 0, "OneHot"), present(types, 1, "OneHot")
    require_rank(values, 1, "OneHot", "the values")
    require_equal(values.dims[0], 2, "OneHot", "number of values and 2")
    axis = normal_axis(attrs.int("axis"), indices.rank + 1, "OneHot")
    return (TensorType(values.dtype, (*indices.dims[:axis], attrs.int("depth"), *indices.dims[axis:])),)


def _read_one_hot(node: FileNode) -> Reading:
    only_attributes(node, "axis")
    depth = node.needs(1)
    if depth.size != 1:
        raise ShapeError(f"OneHot: the depth must be one number, not {depth.size}")
    return Reading({"axis": node.attrs.get("axis", -1), "depth": int(depth.item())}, (0, 2))


ONE_HOT = register(
    Operator(
        "OneHot", _one_hot_type, {"axis": -1, "depth": REQUIRED}, linear=frozenset({1}), arity=(2, 2),
        read=_read_one_hot, since=9,
        write=lambda attrs, types, opset: Spelling(
            "OneHot", {"axis": attrs.int("axis")}, (0, np.asarray(attrs.int("depth"), np.int64), 1)
        ),
    )
)  # fmt: skip

# ── Trilu, EyeLike, Range ────────────────────────────────────────────────────────────────────────────────────────

_TRILU: dict[str, AttrValue | Required] = {"upper": 1}
TRILU = register(
    Operator(
        "Trilu", same_as_first("Trilu", 2), _TRILU, linear=frozenset({0}), arity=(1, 2), since=14,
        write=writes_changed("Trilu", _TRILU),
    )
)  # fmt: skip


def _eye_type(types: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    x = present(types, 0, "EyeLike")
    require_rank(x, 2, "EyeLike", "the input")
    return (TensorType(attrs.dtype("dtype") if attrs["dtype"] is not None else x.dtype, x.dims),)


def _read_eye(node: FileNode) -> Reading:
    only_attributes(node, "dtype", "k")
    dtype = element_type(node.attrs.get("dtype"), "EyeLike")
    return Reading({"dtype": dtype, "k": node.attrs.get("k", 0)}, (0,))


_EYE: dict[str, AttrValue | Required] = {"dtype": None, "k": 0}
EYE_LIKE = register(
    Operator("EyeLike", _eye_type, _EYE, read=_read_eye, write=writes_changed("EyeLike", _EYE), since=9)
)


def range_length(start: float, limit: float, delta: float) -> int:
    """How many numbers Range 11 gives."""
    if delta == 0:
        raise ShapeError("Range: the step is 0")
    return max(math.ceil((limit - start) / delta), 0)


def _range_type(types: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    for i in range(3):
        if present(types, i, "Range").rank > 1:
            raise ShapeError("Range: start, limit and delta must be single numbers")
    return (TensorType(present(types, 0, "Range").dtype, (attrs.int("length"),)),)


def _read_range(node: FileNode) -> Reading:
    """The length, which follows from the three inputs, is an attribute here; they stay inputs."""
    only_attributes(node, "stash_type")
    if node.type(0).dtype in (DType.FLOAT16, DType.BFLOAT16):
        raise Unmodelled("Range of narrow floats, whose length depends on how the quotient is rounded")
    start, limit, delta = (node.needs(i).item() for i in range(3))
    stash = node.attrs.get("stash_type", 1)
    return Reading({"length": range_length(start, limit, delta), "stash_type": stash}, (0, 1, 2))


def _write_range(attrs: Attrs, types: Types, opset: int) -> Spelling:
    said = {} if attrs.int("stash_type") == 1 else {"stash_type": attrs.int("stash_type")}
    if said and opset < 27:
        raise Unspellable(f"Range with a stash_type cannot be written in ONNX opset {opset}")
    return Spelling("Range", said, (0, 1, 2))


RANGE = register(
    Operator(
        "Range", _range_type, {"length": REQUIRED, "stash_type": 1}, arity=(3, 3), read=_read_range, write=_write_range,
        since=11,
    )
)  # fmt: skip

# ── ReverseSequence ──────────────────────────────────────────────────────────────────────────────────────────────


def _reverse_type(types: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    x, lengths = present(types, 0, "ReverseSequence"), present(types, 1, "ReverseSequence")
    if x.rank < 2 or {attrs.int("batch_axis"), attrs.int("time_axis")} != {0, 1}:
        raise ShapeError("ReverseSequence: time and batch must be the first two axes of the input, in either order")
    require_rank(lengths, 1, "ReverseSequence", "the lengths")
    batch: Dim = x.dims[attrs.int("batch_axis")]
    require_equal(lengths.dims[0], batch, "ReverseSequence", "number of lengths and batch size")
    return (x,)


_REVERSE: dict[str, AttrValue | Required] = {"batch_axis": 1, "time_axis": 0}
REVERSE_SEQUENCE = register(
    Operator(
        "ReverseSequence", _reverse_type, _REVERSE, linear=frozenset({0}), arity=(2, 2), since=10,
        write=writes_changed("ReverseSequence", _REVERSE),
    )
)  # fmt: skip
