"""Operators that only move data."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from taso.graph.errors import DimensionMismatch, GraphError, ShapeError
from taso.graph.index import Affine, Flat, Loop, Meaning, Pick, Read, at
from taso.graph.operator import (
    REQUIRED,
    Array,
    Attrs,
    AttrValue,
    FileNode,
    Operator,
    Reading,
    Spelling,
    Trait,
    Types,
    Unmodelled,
    Unspellable,
    register,
)  # fmt: skip
from taso.graph.ops.common import (
    broadcast,
    broadcast_read,
    normal_axes,
    normal_axis,
    one_output,
    only_attributes,
    output_loops,
    present,
    require_equal,
    single_axes,
    small_ints,
)  # fmt: skip
from taso.graph.types import Dim, Shape, TensorType, product, show_shape

_MOVES = frozenset({Trait.MOVES_DATA})
_ZERO = frozenset({0})

# ── Concat ───────────────────────────────────────────────────────────────────────────────────────────────────────


def _concat_type(types: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    first = present(types, 0, "Concat")
    axis = normal_axis(attrs.int("axis"), first.rank, "Concat")
    total: Dim = 0
    for i in range(len(types)):
        t = present(types, i, "Concat")
        if t.rank != first.rank or t.dtype is not first.dtype:
            raise ShapeError(f"Concat: input 0 is {first} and input {i} is {t}; rank and element type must agree")
        for a, (x, y) in enumerate(zip(first.dims, t.dims, strict=True)):
            if a != axis:
                require_equal(x, y, "Concat", f"sizes along axis {a} of {first} and {t}")
        total = total + t.dims[axis]
    return (first.with_shape((*first.dims[:axis], total, *first.dims[axis + 1 :])),)


def _concat_meaning(types: Types, attrs: Attrs) -> tuple[Meaning, ...]:
    (out,) = _concat_type(types, attrs)
    axis = normal_axis(attrs.int("axis"), out.rank, "Concat")
    loops = output_loops(out.dims)
    index = tuple(map(at, loops))
    pieces = tuple((present(types, i, "Concat").dims[axis], Read(i, index)) for i in range(len(types)))
    return (Meaning(single_axes(loops), Pick(loops[axis].name, pieces)),)


def _read_concat(node: FileNode) -> Reading:
    only_attributes(node, "axis")
    axis = node.attrs.get("axis", 1 if node.version < 4 else None)
    if not isinstance(axis, int):
        raise Unmodelled("Concat without an axis")
    return Reading({"axis": normal_axis(axis, node.type(0).rank, "Concat")}, tuple(range(len(node.types))))


CONCAT = register(
    Operator(
        "Concat", _concat_type, {"axis": REQUIRED}, _MOVES, _ZERO, _concat_meaning, (1, 1 << 20), read=_read_concat
    )
)

# ── Split: `split` are the sizes, always written out ─────────────────────────────────────────────────────────────


def split_sizes(attrs: Attrs) -> tuple[Dim, ...]:
    """Sizes of the parts, in order."""
    sizes = attrs["split"]
    if not isinstance(sizes, tuple) or not sizes:
        raise GraphError(f"Split needs the sizes of its parts, not {sizes!r}")
    return tuple(s for s in sizes if isinstance(s, int))


def _split_type(types: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    x, sizes = present(types, 0, "Split"), split_sizes(attrs)
    axis = normal_axis(attrs.int("axis"), x.rank, "Split")
    if any(isinstance(s, int) and s < 0 for s in sizes):
        raise ShapeError(f"Split: a size in {sizes} is negative")
    total: Dim = 0
    for size in sizes:
        total = total + size
    if total != x.dims[axis]:
        raise DimensionMismatch(f"Split: sizes {sizes} do not add up to axis {axis} of {x}", total, x.dims[axis])
    return tuple(x.with_shape((*x.dims[:axis], s, *x.dims[axis + 1 :])) for s in sizes)


def _split_meaning(types: Types, attrs: Attrs) -> tuple[Meaning, ...]:
    parts = _split_type(types, attrs)
    axis = normal_axis(attrs.int("axis"), parts[0].rank, "Split")
    meanings = []
    start: Dim = 0
    for part in parts:
        loops = output_loops(part.dims)
        index = tuple(at(loop, 1, start if a == axis else 0) for a, loop in enumerate(loops))
        meanings.append(Meaning(single_axes(loops), Read(0, index)))
        start = start + part.dims[axis]
    return tuple(meanings)


def _read_split(node: FileNode) -> Reading:
    """Sizes are an attribute (2, 11), an input (13), or follow from the number of parts (18)."""
    only_attributes(node, "axis", "split", "num_outputs")
    x = node.type(0)
    axis_given = node.attrs.get("axis", 0)
    axis = normal_axis(axis_given if isinstance(axis_given, int) else 0, x.rank, "Split")
    sizes = small_ints(node, 1) if node.has(1) else node.ints("split")
    if sizes is None:
        total, count = x.dims[axis], len(node.outputs)
        if not isinstance(total, int):
            raise Unmodelled("Split of a symbolic size into equal parts")
        if node.version < 18 and total % count:
            raise ShapeError(f"Split: axis {axis} of {x} does not divide into {count} equal parts")
        chunk = -(-total // count)
        sizes = tuple(min(chunk, max(total - i * chunk, 0)) for i in range(count))
    return Reading({"axis": axis, "split": sizes}, (0,))


def _write_split(attrs: Attrs, types: Types, opset: int) -> Spelling:
    if opset < 13:
        return Spelling("Split", {"axis": attrs.int("axis"), "split": attrs.ints("split")}, (0,))
    return Spelling("Split", {"axis": attrs.int("axis")}, (0, np.asarray(attrs.ints("split"), np.int64)))


SPLIT = register(
    Operator(
        "Split", _split_type, {"axis": 0, "split": REQUIRED}, _MOVES, _ZERO, _split_meaning, read=_read_split,
        write=_write_split, since=2,
    )
)  # fmt: skip

# ── Slice: starts, ends, axes and steps, always written out ──────────────────────────────────────────────────────


def slice_ranges(t: TensorType, attrs: Attrs) -> dict[int, tuple[int, int, int]]:
    """axis → (start, count, step) of a slice whose axes are static (Slice 13)."""
    starts, ends = attrs.ints("starts"), attrs.ints("ends")
    axes = normal_axes(attrs.ints("axes") or range(len(starts)), t.rank, "Slice")
    steps = attrs.ints("steps") or (1,) * len(starts)
    if not len(starts) == len(ends) == len(axes) == len(steps):
        raise ShapeError("Slice: starts, ends, axes and steps must be equally long")
    ranges = {}
    for start, end, axis, step in zip(starts, ends, axes, steps, strict=True):
        size = t.dims[axis]
        if step == 0:
            raise ShapeError("Slice: a step is 0")
        if not isinstance(size, int):
            ranges[axis] = _symbolic_range(start, end, step, axis)
            continue
        ranges[axis] = (*_covered(start, end, step, size), step)
    return ranges


def _covered(start: int, end: int, step: int, size: int) -> tuple[int, int]:
    """Where a slice of `size` elements begins, and how many it takes; in arithmetic that unknown sizes take part in."""
    least, most = (0, size) if step > 0 else (-1, size - 1)
    first, last = (_clamped(p + size if p < 0 else p, least, most) for p in (start, end))
    length = last - first if step > 0 else first - last
    if length <= 0:
        return first, 0
    stride = step if step > 0 else -step
    return first, length if stride == 1 else (length - 1) // stride + 1


def _clamped(value: int, least: int, most: int) -> int:
    if value < least:
        return least
    return most if value > most else value


def _symbolic_range(start: int, end: int, step: int, axis: int) -> tuple[int, int, int]:
    raise ShapeError(f"Slice: axis {axis} has a symbolic size, so that {start}:{end}:{step} of it is not known")


def _slice_type(types: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    x = present(types, 0, "Slice")
    ranges = slice_ranges(x, attrs)
    return (x.with_shape(ranges[a][1] if a in ranges else d for a, d in enumerate(x.dims)),)


def _slice_meaning(types: Types, attrs: Attrs) -> tuple[Meaning, ...]:
    x = present(types, 0, "Slice")
    (out,) = _slice_type(types, attrs)
    ranges, loops = slice_ranges(x, attrs), output_loops(out.dims)
    index = tuple(
        at(loop, ranges[a][2], ranges[a][0]) if a in ranges else at(loop) for a, loop in enumerate(loops)
    )
    return (Meaning(single_axes(loops), Read(0, index)),)


def _read_slice(node: FileNode) -> Reading:
    """Slice 1 has attributes, Slice 10 and newer inputs."""
    only_attributes(node, "starts", "ends", "axes")
    if node.version < 10:
        starts, ends, axes, steps = node.ints("starts"), node.ints("ends"), node.ints("axes"), None
    else:
        starts, ends = small_ints(node, 1), small_ints(node, 2)
        axes = small_ints(node, 3) if node.has(3) else None
        steps = small_ints(node, 4) if node.has(4) else None
    if starts is None or ends is None:
        raise Unmodelled("Slice without starts and ends")
    rank = node.type(0).rank
    axes = normal_axes(axes if axes is not None else range(len(starts)), rank, "Slice")
    if not all(isinstance(node.type(0).dims[a], int) for a in axes):
        raise Unmodelled("Slice along a symbolic axis")
    return Reading({"starts": starts, "ends": ends, "axes": axes, "steps": steps or (1,) * len(starts)}, (0,))


def _write_slice(attrs: Attrs, types: Types, opset: int) -> Spelling:
    starts, ends = attrs.ints("starts"), attrs.ints("ends")
    axes = attrs.ints("axes") or tuple(range(len(starts)))
    steps = attrs.ints("steps") or (1,) * len(starts)
    if opset < 10:
        if any(s != 1 for s in steps):
            raise Unspellable(f"Slice with steps cannot be written in ONNX opset {opset}")
        return Spelling("Slice", {"starts": starts, "ends": ends, "axes": axes}, (0,))
    inputs: list[int | Array | None] = [0]
    inputs.extend(np.asarray(part, np.int64) for part in (starts, ends, axes, steps))
    return Spelling("Slice", {}, tuple(inputs))


SLICE = register(
    Operator(
        "Slice", _slice_type, {"starts": REQUIRED, "ends": REQUIRED, "axes": (), "steps": ()}, _MOVES, _ZERO,
        _slice_meaning, read=_read_slice, write=_write_slice,
    )
)  # fmt: skip

# ── Transpose ────────────────────────────────────────────────────────────────────────────────────────────────────


def permutation(rank: int, attrs: Attrs) -> tuple[int, ...]:
    """Axis i of the output is axis perm[i] of the input; none given reverses all axes."""
    perm = attrs.ints("perm") or tuple(reversed(range(rank)))
    if sorted(perm) != list(range(rank)):
        raise ShapeError(f"Transpose: {perm} is no permutation of {rank} axes")
    return perm


def _transpose_type(types: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    x = present(types, 0, "Transpose")
    return (x.with_shape(x.dims[p] for p in permutation(x.rank, attrs)),)


def _transpose_meaning(types: Types, attrs: Attrs) -> tuple[Meaning, ...]:
    x = present(types, 0, "Transpose")
    perm = permutation(x.rank, attrs)
    loops = output_loops(tuple(x.dims[p] for p in perm))
    index = tuple(at(loops[perm.index(a)]) for a in range(x.rank))
    return (Meaning(single_axes(loops), Read(0, index)),)


def _read_transpose(node: FileNode) -> Reading:
    only_attributes(node, "perm")
    return Reading({"perm": node.ints("perm") or tuple(reversed(range(node.type(0).rank)))}, (0,))


TRANSPOSE = register(
    Operator(
        "Transpose", _transpose_type, {"perm": ()}, _MOVES, _ZERO, _transpose_meaning, read=_read_transpose,
        write=lambda attrs, types, opset: Spelling(
            "Transpose", {"perm": permutation(present(types, 0, "Transpose").rank, attrs)}, (0,)
        ),
    )
)  # fmt: skip

# ── Reshape, Flatten, Squeeze, Unsqueeze: the same elements in the same order ────────────────────────────────────


def _reflow_meaning(types: Types, attrs: Attrs, rule_out: TensorType) -> tuple[Meaning, ...]:
    loops = output_loops(rule_out.dims)
    offset, stride = Affine(()), 1
    strides: list[Dim] = []
    running: Dim = stride
    for loop in reversed(loops):
        strides.append(running)
        running = running * loop.extent
    for loop, step in zip(loops, reversed(strides), strict=True):
        offset = offset + at(loop, step)
    return (Meaning(single_axes(loops), Flat(0, offset)),)


def reshaped(x: TensorType, target: Sequence[int], allowzero: bool = False) -> Shape:
    """The shape that Reshape 14 gives: 0 keeps a size, −1 takes what is left."""
    dims: list[Dim] = []
    for position, size in enumerate(target):
        if size == 0 and not allowzero:
            if position >= x.rank:
                raise ShapeError(f"Reshape: 0 at position {position} has no counterpart in {x}")
            dims.append(x.dims[position])
        else:
            dims.append(size)
    if list(target).count(-1) > 1 or any(isinstance(d, int) and d < -1 for d in dims):
        raise ShapeError(f"Reshape: {tuple(target)} is no shape")
    total = product(x.dims)
    if -1 in target:
        place = list(target).index(-1)
        dims[place] = _left_over(total, product(d for i, d in enumerate(dims) if i != place), x, target)
    elif product(dims) != total:
        raise DimensionMismatch(f"Reshape: {x} has not the size of {tuple(target)}", product(dims), total)
    return tuple(dims)


def _left_over(total: Dim, known: Dim, x: TensorType, target: Sequence[int]) -> Dim:
    quotient = divide_exactly(total, known)
    if quotient is None:
        raise ShapeError(f"Reshape: {x} does not divide into {tuple(target)}")
    return quotient


def divide_exactly(total: Dim, known: Dim) -> Dim | None:
    """total / known where that is a whole polynomial for certain, else None."""
    if isinstance(known, int):
        if known == 0:
            return 0 if total == 0 else None
        quotient = total // known
        return quotient if quotient * known == total else None
    if isinstance(total, int) or len(known.terms) != 1:
        return None
    (factors, coefficient), parts = known.terms[0], []
    for monomial, c in total.terms:
        rest = list(monomial)
        for factor in factors:
            if factor not in rest:
                return None
            rest.remove(factor)
        if c % coefficient:
            return None
        parts.append((tuple(rest), c // coefficient))
    result: Dim = 0
    for monomial, c in parts:
        term: Dim = c
        for atom in monomial:
            term = term * type(known)((((atom,), 1),))
        result = result + term
    return result


def _reshape_type(types: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    x = present(types, 0, "Reshape")
    return (x.with_shape(reshaped(x, attrs.ints("shape"), bool(attrs.int("allowzero")))),)


def _read_reshape(node: FileNode) -> Reading:
    """Reshape 1 has an attribute, Reshape 5 and newer an input."""
    only_attributes(node, "shape", "allowzero", "consumed_inputs")
    target = node.ints("shape") if node.version < 5 else small_ints(node, 1)
    if target is None:
        raise Unmodelled("Reshape without a shape")
    node.type(0)
    return Reading({"shape": target, "allowzero": node.attrs.get("allowzero", 0)}, (0,))


def _write_reshape(attrs: Attrs, types: Types, opset: int) -> Spelling:
    target = attrs.ints("shape")
    if attrs.int("allowzero") and 0 in target:
        if opset < 14:
            raise Unspellable(f"Reshape with allowzero cannot be written in ONNX opset {opset}")
        return Spelling("Reshape", {"allowzero": 1}, (0, np.asarray(target, np.int64)))
    if opset < 5:
        return Spelling("Reshape", {"shape": target}, (0,))
    return Spelling("Reshape", {}, (0, np.asarray(target, np.int64)))


RESHAPE = register(
    Operator(
        "Reshape", _reshape_type, {"shape": REQUIRED, "allowzero": 0}, _MOVES, _ZERO,
        lambda types, attrs: _reflow_meaning(types, attrs, _reshape_type(types, attrs)[0]), read=_read_reshape,
        write=_write_reshape,
    )
)  # fmt: skip


def _flatten_type(types: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    x = present(types, 0, "Flatten")
    axis = attrs.int("axis")
    if not -x.rank <= axis <= x.rank:
        raise ShapeError(f"Flatten: axis {axis} is outside a tensor of {x.rank} dimensions")
    axis = axis + x.rank if axis < 0 else axis
    return (x.with_shape((product(x.dims[:axis]), product(x.dims[axis:]))),)


FLATTEN = register(
    Operator(
        "Flatten", _flatten_type, {"axis": 1}, _MOVES, _ZERO,
        lambda types, attrs: _reflow_meaning(types, attrs, _flatten_type(types, attrs)[0]),
    )
)  # fmt: skip


def _squeeze_type(types: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    x = present(types, 0, "Squeeze")
    axes = normal_axes(attrs.ints("axes"), x.rank, "Squeeze")
    for axis in axes:
        require_equal(x.dims[axis], 1, "Squeeze", f"size of axis {axis} of {x} and 1")
    return (x.with_shape(d for a, d in enumerate(x.dims) if a not in axes),)


def _read_squeeze(node: FileNode) -> Reading:
    """Squeeze 1 and 11 have an attribute, 13 and newer an input; no axes means all of size 1."""
    only_attributes(node, "axes")
    x = node.type(0)
    axes = small_ints(node, 1) if node.has(1) else node.ints("axes")
    if axes is None:
        if not x.static:
            raise Unmodelled("Squeeze of all axes of a symbolic shape")
        axes = tuple(a for a, d in enumerate(x.dims) if d == 1)
    return Reading({"axes": tuple(sorted(normal_axes(axes, x.rank, "Squeeze")))}, (0,))


def _write_axes(op: str, attrs: Attrs, opset: int) -> Spelling:
    axes = attrs.ints("axes")
    if opset < 13:
        return Spelling(op, {"axes": axes}, (0,))
    return Spelling(op, {}, (0, np.asarray(axes, np.int64)))


SQUEEZE = register(
    Operator(
        "Squeeze", _squeeze_type, {"axes": REQUIRED}, _MOVES, _ZERO,
        lambda types, attrs: _reflow_meaning(types, attrs, _squeeze_type(types, attrs)[0]), read=_read_squeeze,
        write=lambda attrs, types, opset: _write_axes("Squeeze", attrs, opset),
    )
)  # fmt: skip


def _unsqueeze_type(types: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    x, axes = present(types, 0, "Unsqueeze"), attrs.ints("axes")
    rank = x.rank + len(axes)
    places = normal_axes(axes, rank, "Unsqueeze")
    rest = iter(x.dims)
    return (x.with_shape(1 if a in places else next(rest) for a in range(rank)),)


def _read_unsqueeze(node: FileNode) -> Reading:
    """Unsqueeze 1 and 11 have an attribute, 13 and newer an input."""
    only_attributes(node, "axes")
    axes = small_ints(node, 1) if node.has(1) else node.ints("axes")
    if axes is None:
        raise Unmodelled("Unsqueeze without axes")
    rank = node.type(0).rank + len(axes)
    return Reading({"axes": tuple(sorted(normal_axes(axes, rank, "Unsqueeze")))}, (0,))


UNSQUEEZE = register(
    Operator(
        "Unsqueeze", _unsqueeze_type, {"axes": REQUIRED}, _MOVES, _ZERO,
        lambda types, attrs: _reflow_meaning(types, attrs, _unsqueeze_type(types, attrs)[0]), read=_read_unsqueeze,
        write=lambda attrs, types, opset: _write_axes("Unsqueeze", attrs, opset),
    )
)  # fmt: skip

# ── Expand, Tile, Pad, Gather ────────────────────────────────────────────────────────────────────────────────────


def _expand_type(types: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    x = present(types, 0, "Expand")
    return (x.with_shape(broadcast([x.dims, attrs.ints("shape")], "Expand")),)


def _expand_meaning(types: Types, attrs: Attrs) -> tuple[Meaning, ...]:
    x = present(types, 0, "Expand")
    (out,) = _expand_type(types, attrs)
    loops = output_loops(out.dims)
    return (Meaning(single_axes(loops), broadcast_read(0, x, loops)),)


def _read_shape_input(node: FileNode, name: str) -> Reading:
    only_attributes(node)
    node.type(0)
    return Reading({name: small_ints(node, 1)}, (0,))


EXPAND = register(
    Operator(
        "Expand", _expand_type, {"shape": REQUIRED}, _MOVES, _ZERO, _expand_meaning,
        read=lambda node: _read_shape_input(node, "shape"), since=8,
        write=lambda attrs, types, opset: Spelling("Expand", {}, (0, np.asarray(attrs.ints("shape"), np.int64))),
    )
)  # fmt: skip


def _tile_type(types: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    x, repeats = present(types, 0, "Tile"), attrs.ints("repeats")
    if len(repeats) != x.rank or min(repeats, default=0) < 0:
        raise ShapeError(f"Tile: {repeats} must give one number of repeats for each axis of {x}")
    return (x.with_shape(d * r for d, r in zip(x.dims, repeats, strict=True)),)


def _tile_meaning(types: Types, attrs: Attrs) -> tuple[Meaning, ...]:
    x = present(types, 0, "Tile")
    axes, index = [], []
    for a, (dim, repeat) in enumerate(zip(x.dims, attrs.ints("repeats"), strict=True)):
        axes.append((Loop(f"r{a}", repeat), Loop(f"i{a}", dim)))
        index.append(at(f"i{a}"))
    return (Meaning(tuple(axes), Read(0, tuple(index))),)


def _read_tile(node: FileNode) -> Reading:
    if node.version < 6:
        raise Unmodelled(f"Tile {node.version}")
    return _read_shape_input(node, "repeats")


TILE = register(
    Operator(
        "Tile", _tile_type, {"repeats": REQUIRED}, _MOVES, _ZERO, _tile_meaning, read=_read_tile, since=6,
        write=lambda attrs, types, opset: Spelling("Tile", {}, (0, np.asarray(attrs.ints("repeats"), np.int64))),
    )
)  # fmt: skip


def _pad_type(types: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    x, pads = present(types, 0, "Pad"), attrs.ints("pads")
    if len(pads) != 2 * x.rank:
        raise ShapeError(f"Pad: {pads} must give two numbers for each axis of {x}")
    dims = tuple(d + pads[a] + pads[x.rank + a] for a, d in enumerate(x.dims))
    if any(isinstance(d, int) and d < 0 for d in dims):
        raise ShapeError(f"Pad: {pads} cuts off more than {x} has")
    return (x.with_shape(dims),)


def _pad_meaning(types: Types, attrs: Attrs) -> tuple[Meaning, ...]:
    if attrs.str("mode") != "constant" or attrs["value"] != 0:
        raise GraphError("only padding with zeros has a meaning in index notation")
    (out,) = _pad_type(types, attrs)
    loops, pads = output_loops(out.dims), attrs.ints("pads")
    index = tuple(at(loop, 1, 0 - pads[a]) for a, loop in enumerate(loops))
    return (Meaning(single_axes(loops), Read(0, index, "zero")),)


def _read_pad(node: FileNode) -> Reading:
    """Pad 2 has attributes; Pad 11 inputs; Pad 18 may name axes."""
    only_attributes(node, "mode", "pads", "value")
    rank = node.type(0).rank
    value: AttrValue = node.attrs.get("value", 0.0)
    if node.version < 11:
        pads = node.ints("pads")
    else:
        pads = small_ints(node, 1)
        value = node.needs(2).item() if node.has(2) else 0
    if pads is None:
        raise Unmodelled("Pad without pads")
    if node.has(3):
        axes, full = normal_axes(small_ints(node, 3), rank, "Pad"), [0] * (2 * rank)
        for i, axis in enumerate(axes):
            full[axis], full[rank + axis] = pads[i], pads[len(axes) + i]
        pads = tuple(full)
    # 0 and 0.0 pad alike, and one spelling of zero lets equal pads be one node
    return Reading({"pads": pads, "mode": node.attrs.get("mode", "constant"), "value": value or 0}, (0,))


def _write_pad(attrs: Attrs, types: Types, opset: int) -> Spelling:
    mode, value = attrs.str("mode"), attrs["value"]
    if mode == "wrap" and opset < 19:
        raise Unspellable(f"Pad with wrapping cannot be written in ONNX opset {opset}")
    if opset < 11:
        return Spelling("Pad", {"mode": mode, "pads": attrs.ints("pads"), "value": attrs.float("value")}, (0,))
    inputs: list[int | Array | None] = [0, np.asarray(attrs.ints("pads"), np.int64)]
    if value != 0:
        inputs.append(np.asarray(value, present(types, 0, "Pad").dtype.numpy))
    return Spelling("Pad", {"mode": mode}, tuple(inputs))


PAD = register(
    Operator(
        "Pad", _pad_type, {"pads": REQUIRED, "mode": "constant", "value": 0}, meaning=_pad_meaning, read=_read_pad,
        write=_write_pad, since=2,
    )
)  # fmt: skip


def _gather_type(types: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    x, indices = present(types, 0, "Gather"), present(types, 1, "Gather")
    axis = normal_axis(attrs.int("axis"), x.rank, "Gather")
    return (x.with_shape((*x.dims[:axis], *indices.dims, *x.dims[axis + 1 :])),)


GATHER = register(Operator("Gather", _gather_type, {"axis": 0}, _MOVES, _ZERO, arity=(2, 2)))

__all__ = [
    "CONCAT", "EXPAND", "FLATTEN", "GATHER", "PAD", "RESHAPE", "SLICE", "SPLIT", "SQUEEZE", "TILE", "TRANSPOSE",
    "UNSQUEEZE", "divide_exactly", "one_output", "permutation", "reshaped", "show_shape", "slice_ranges", "split_sizes",
]  # fmt: skip
