"""Kernels that move data: elements of the result are elements of operands, at places that are known or looked up."""

from __future__ import annotations

import math
from collections.abc import Callable

from taso.backends.cudnn.sources.fetches import Fetch, Guarded, Looked, Lookup, Mapped, Straight
from taso.backends.cudnn.sources.launches import Place, Sourced
from taso.backends.cudnn.sources.nests import Access, Nest, Parameters, broadcast_strides, operand_strides
from taso.backends.cudnn.sources.results import (
    LoopOf,
    Loops,
    made_of,
    one_by_one,
    operand_access,
    result_access,
)  # fmt: skip
from taso.backends.cudnn.sources.scalars import HELD, INTEGER, REAL, computed, literal, stored
from taso.backends.cudnn.sources.sections import Section, launches
from taso.backends.lowering import PLAIN, Kernel, Operand
from taso.backends.places import OPERAND, RESULT
from taso.graph.ops.movement import permutation, slice_ranges
from taso.graph.types import DType

# ── places that are known: affine in the loops ───────────────────────────────────────────────────────────────────


def change_of_layout(kernel: Kernel) -> Sourced | None:
    """A kernel without steps: its operand in the layout of its result."""
    loops = Loops.of(kernel.results[0])
    access = operand_access(kernel, 0, loops.strides(operand_strides(kernel.operands[0])))
    section = Section(loops.extents, (Straight(access),), result_access(kernel, loops))
    return Sourced(tuple(launches("layout", [section])))


def _data(kernel: Kernel, position: int = 0) -> int:
    """The operand that is input number `position` of the anchor."""
    reference = kernel.steps[0].inputs[position]
    if reference is None or reference < 0:
        raise ValueError(f"input {position} of {kernel.steps[0].op.name} is no operand")
    return reference


def _straight(
    name: str, kernel: Kernel, loops: Loops, strides: tuple[int, ...], offset: int = 0
) -> Sourced | None:  # fmt: skip
    """Elements of the anchor's input 0 at an affine place."""
    return made_of(name, kernel, Straight(operand_access(kernel, _data(kernel), strides, offset)), loops)


def reshape(kernel: Kernel) -> Sourced | None:
    operand, result = kernel.operands[_data(kernel)], kernel.results[0]
    if operand.layout != PLAIN or result.layout != PLAIN:
        return None
    loops = Loops.of(result)
    return _straight("copy", kernel, loops, result_access(kernel, loops).strides)


def transpose(kernel: Kernel) -> Sourced | None:
    operand, loops = kernel.operands[_data(kernel)], Loops.of(kernel.results[0])
    strides, order = operand_strides(operand), permutation(operand.type.rank, kernel.steps[0].attrs)
    return _straight("transpose", kernel, loops, loops.strides([strides[p] for p in order]))


def slice_of(kernel: Kernel) -> Sourced | None:
    operand, loops = kernel.operands[_data(kernel)], Loops.of(kernel.results[0])
    strides, offset = list(operand_strides(operand)), 0
    for axis, (start, _, step) in slice_ranges(operand.type, kernel.steps[0].attrs).items():
        offset += start * strides[axis]
        strides[axis] *= step
    return _straight("slice", kernel, loops, loops.strides(strides), offset)


def expand(kernel: Kernel) -> Sourced | None:
    loops = Loops.of(kernel.results[0])
    strides = broadcast_strides(kernel.operands[_data(kernel)], kernel.results[0].type.static_shape)
    if strides is None:
        return None
    return _straight("expand", kernel, loops, loops.strides(strides))


def tile(kernel: Kernel) -> Sourced | None:
    operand, result = kernel.operands[_data(kernel)], kernel.results[0]
    dims = operand.type.static_shape
    if 0 in result.type.static_shape:
        return Sourced(())
    loops = Loops.of(result, dict(enumerate(dims)))
    strides = operand_strides(operand)
    # an axis over again: the outer loop of its two stays where it is
    outer = {n for n, x in enumerate(loops.loops) if n + 1 < len(loops.loops) and loops.loops[n + 1].axis == x.axis}
    steps = tuple(0 if n in outer else strides[x.axis] for n, x in enumerate(loops.loops))
    return _straight("tile", kernel, loops, steps)


def depth_to_space(kernel: Kernel) -> Sourced | None:
    step, operand, result = kernel.steps[0], kernel.operands[_data(kernel)], kernel.results[0]
    block, depth = step.attrs.int("blocksize"), result.type.static_shape[1]
    n, c, h, w = operand_strides(operand)
    if step.attrs.str("mode") == "DCR":
        channel, row, column = c, c * depth * block, c * depth
    else:
        channel, row, column = c * block * block, c * block, c
    loops = Loops.of(result, {2: block, 3: block})
    whole, part = {0: n, 1: channel, 2: h, 3: w}, {2: row, 3: column}
    return _straight("depth to space", kernel, loops, _in_two(loops, whole, part))


def space_to_depth(kernel: Kernel) -> Sourced | None:
    step, operand, result = kernel.steps[0], kernel.operands[_data(kernel)], kernel.results[0]
    block, depth = step.attrs.int("blocksize"), operand.type.static_shape[1]
    n, c, h, w = operand_strides(operand)
    # channels of the result: (row, column, channel) or (channel, row, column), three loops over one axis
    within, channel = [(block, h), (block, w)], [(depth, c)]
    parts = within + channel if step.attrs.str("mode") == "DCR" else channel + within
    found: list[LoopOf] = []
    strides: list[int] = []
    for loop in Loops.of(result).loops:
        if loop.axis == 1:
            inner = math.prod(extent for extent, _ in parts)
            for extent, stride in parts:
                inner //= extent
                found.append(LoopOf(extent, 1, inner))
                strides.append(stride)
        else:
            found.append(loop)
            strides.append({0: n, 2: h * block, 3: w * block}[loop.axis])
    loops = Loops(tuple(found))
    return _straight("space to depth", kernel, loops, tuple(strides))


def _in_two(loops: Loops, whole: dict[int, int], part: dict[int, int]) -> tuple[int, ...]:
    """Strides where the axes in `part` have two loops each: that of the outer one, then that of the inner one."""
    seen: set[int] = set()
    strides = []
    for loop in loops.loops:
        strides.append(part[loop.axis] if loop.axis in seen else whole[loop.axis])
        seen.add(loop.axis)
    return tuple(strides)


# ── several tensors into one, one into several ───────────────────────────────────────────────────────────────────


def concat(kernel: Kernel) -> Sourced | None:
    if len(kernel.steps) > 1:
        return None
    step, result = kernel.steps[0], kernel.results[0]
    axis, start, sections = step.attrs.int("axis") % result.type.rank, 0, []
    for position in range(len(step.inputs)):
        operand = kernel.operands[_data(kernel, position)]
        loops = Loops.of(Operand(operand.type, result.layout, False))
        read = operand_access(kernel, _data(kernel, position), loops.strides(operand_strides(operand)))
        whole = operand_strides(result)
        target = Access(Place(RESULT), result.type.dtype, loops.strides(whole), start * whole[axis])
        sections.append(Section(loops.extents, (Straight(read),), target))
        start += operand.type.static_shape[axis]
    return Sourced(tuple(launches("concat", sections)))


def split(kernel: Kernel) -> Sourced | None:
    if len(kernel.steps) > 1:
        return None
    index, operand = _data(kernel), kernel.operands[_data(kernel)]
    axis, start, sections = kernel.steps[0].attrs.int("axis") % operand.type.rank, 0, []
    strides = operand_strides(operand)
    for number, result in enumerate(kernel.results):
        loops = Loops.of(result)
        read = operand_access(kernel, index, loops.strides(strides), start * strides[axis])
        sections.append(Section(loops.extents, (Straight(read),), result_access(kernel, loops, number)))
        start += result.type.static_shape[axis]
    return Sourced(tuple(launches("split", sections)))


# ── Pad ──────────────────────────────────────────────────────────────────────────────────────────────────────────

_BEYOND = {"edge": "clamped", "reflect": "mirrored", "wrap": "wrapped"}


def pad(kernel: Kernel) -> Sourced | None:
    step, operand = kernel.steps[0], kernel.operands[_data(kernel)]
    mode, pads = step.attrs.str("mode"), step.attrs.ints("pads")
    dims, strides, loops = operand.type.static_shape, operand_strides(operand), Loops.of(kernel.results[0])
    before, after = pads[: len(dims)], pads[len(dims) :]
    if mode == "constant":
        offset = -sum(b * s for b, s in zip(before, strides, strict=True))
        access = operand_access(kernel, _data(kernel), loops.strides(strides), offset)
        bounds = tuple(
            (loops.number(a), before[a], before[a] + n) for a, n in enumerate(dims) if before[a] > 0 or after[a] > 0
        )
        value = step.attrs["value"]
        if not isinstance(value, (int, float)):
            return None
        t = operand.type.dtype
        filling = f"narrow<{stored(t)}>({literal(value, computed(t))})"
        head: Fetch = Guarded(access, bounds, filling) if bounds else Straight(access)
        return made_of("pad", kernel, head, loops)
    if mode not in _BEYOND or min(pads, default=0) < 0 or 0 in dims:
        return None
    padded = [a for a in range(len(dims)) if before[a] or after[a]]
    kept = [0 if a in padded else s for a, s in enumerate(strides)]
    maps = tuple((loops.number(a), f"{_BEYOND[mode]}<I>({{}} - {before[a]}, {dims[a]})", strides[a]) for a in padded)
    access = operand_access(kernel, _data(kernel), loops.strides(kept))
    return made_of(f"pad {mode}", kernel, Mapped(access, maps) if maps else Straight(access), loops)


# ── places that are looked up ────────────────────────────────────────────────────────────────────────────────────


def gather(kernel: Kernel) -> Sourced | None:
    operand, indices = kernel.operands[_data(kernel)], kernel.operands[_data(kernel, 1)]
    axis, rank = kernel.steps[0].attrs.int("axis") % operand.type.rank, indices.type.rank
    strides, loops = operand_strides(operand), Loops.of(kernel.results[0])
    along, tail = operand_strides(indices), operand.type.rank - axis - 1
    data = operand_access(kernel, _data(kernel), loops.strides((*strides[:axis], *(0,) * rank, *strides[axis + 1 :])))
    places = operand_access(kernel, _data(kernel, 1), loops.strides((*(0,) * axis, *along, *(0,) * tail)))
    head = Looked(data, (Lookup(places, operand.type.static_shape[axis], strides[axis]),))
    return made_of("gather", kernel, head, loops)


def gather_elements(kernel: Kernel) -> Sourced | None:
    operand, indices = kernel.operands[_data(kernel)], kernel.operands[_data(kernel, 1)]
    axis = kernel.steps[0].attrs.int("axis") % operand.type.rank
    strides, loops = operand_strides(operand), Loops.of(kernel.results[0])
    kept = [0 if a == axis else s for a, s in enumerate(strides)]
    data = operand_access(kernel, _data(kernel), loops.strides(kept))
    places = operand_access(kernel, _data(kernel, 1), loops.strides(operand_strides(indices)))
    head = Looked(data, (Lookup(places, operand.type.static_shape[axis], strides[axis]),))
    return made_of("gather elements", kernel, head, loops)


def gather_nd(kernel: Kernel) -> Sourced | None:
    operand, indices = kernel.operands[_data(kernel)], kernel.operands[_data(kernel, 1)]
    batch, length = kernel.steps[0].attrs.int("batch_dims"), indices.type.static_shape[-1]
    strides, along, loops = operand_strides(operand), operand_strides(indices), Loops.of(kernel.results[0])
    middle, tail = indices.type.rank - 1 - batch, operand.type.rank - batch - length
    data = operand_access(
        kernel, _data(kernel), loops.strides((*strides[:batch], *(0,) * middle, *strides[batch + length :]))
    )
    steps = loops.strides((*along[:-1], *(0,) * tail))
    lookups = tuple(
        Lookup(operand_access(kernel, _data(kernel, 1), steps, n * along[-1]), operand.type.static_shape[batch + n],
               strides[batch + n])
        for n in range(length)
    )  # fmt: skip
    return made_of("gather nd", kernel, Looked(data, lookups), loops)


def scatter_elements(kernel: Kernel) -> Sourced | None:
    """A copy of the data, then each update to its place. ONNX allows no place twice, so that no order is needed."""
    result = kernel.results[0]
    if len(kernel.steps) > 1 or kernel.steps[0].attrs.str("reduction") != "none":
        return None
    indices, updates = kernel.operands[_data(kernel, 1)], kernel.operands[_data(kernel, 2)]
    axis, strides = kernel.steps[0].attrs.int("axis") % result.type.rank, operand_strides(result)
    loops = Loops.of(Operand(updates.type, PLAIN, False))
    kept = [0 if a == axis else s for a, s in enumerate(strides)]
    places = operand_access(kernel, _data(kernel, 1), loops.strides(operand_strides(indices)))
    lookup = Lookup(places, result.type.static_shape[axis], strides[axis])
    return _scattered(kernel, loops, kept, (lookup,), operand_strides(updates))


def scatter_nd(kernel: Kernel) -> Sourced | None:
    """As `scatter_elements`, by positions."""
    result = kernel.results[0]
    if len(kernel.steps) > 1 or kernel.steps[0].attrs.str("reduction") != "none":
        return None
    indices, updates = kernel.operands[_data(kernel, 1)], kernel.operands[_data(kernel, 2)]
    length, strides, along = indices.type.static_shape[-1], operand_strides(result), operand_strides(indices)
    loops = Loops.of(Operand(updates.type, PLAIN, False))
    tail = result.type.rank - length
    steps = loops.strides((*along[:-1], *(0,) * tail))
    lookups = tuple(
        Lookup(operand_access(kernel, _data(kernel, 1), steps, n * along[-1]), result.type.static_shape[n], strides[n])
        for n in range(length)
    )
    kept = [*(0,) * (indices.type.rank - 1), *strides[length:]]
    return _scattered(kernel, loops, kept, lookups, operand_strides(updates))


def _scattered(
    kernel: Kernel, loops: Loops, kept: list[int], lookups: tuple[Lookup, ...], updates: tuple[int, ...]
) -> Sourced:
    result = kernel.results[0]
    all_of = Loops.of(result)
    copied = operand_access(kernel, _data(kernel), all_of.strides(operand_strides(kernel.operands[_data(kernel)])))
    copy = Section(all_of.extents, (Straight(copied),), result_access(kernel, all_of))
    target = Access(Place(RESULT), result.type.dtype, loops.strides(kept))
    read = operand_access(kernel, _data(kernel, 2), loops.strides(updates))
    write = Section(loops.extents, (Straight(read),), target, lookups=lookups)
    return Sourced((*launches("copy", [copy]), *launches("scatter", [write])))


# ── elements that follow from where they stand ───────────────────────────────────────────────────────────────────


def one_hot(kernel: Kernel) -> Sourced | None:
    indices, result = kernel.operands[_data(kernel)], kernel.results[0]
    axis, depth = kernel.steps[0].attrs.int("axis") % result.type.rank, kernel.steps[0].attrs.int("depth")
    loops, along = Loops.of(result), list(operand_strides(indices))
    along.insert(axis, 0)
    read = operand_access(kernel, _data(kernel), loops.strides(along))
    own, t, number = loops.number(axis), result.type.dtype, _data(kernel, 1)

    def text(nest: Nest, parameters: Parameters) -> tuple[list[str], str]:
        index = f"widen({parameters.name(read.place, read.dtype)}[{nest.offset(read, lanes=True)}])"
        values = parameters.name(Place(OPERAND, number), t)
        return [], f"{values}[place_of({index}, {depth}) == {nest.at(own, lanes=True)}]"

    return made_of("one hot", kernel, one_by_one(t, [read], frozenset({own}), text), loops)


def trilu(kernel: Kernel) -> Sourced | None:
    step, operand, result = kernel.steps[0], kernel.operands[_data(kernel)], kernel.results[0]
    rank, loops, upper = result.type.rank, Loops.of(result), step.attrs.int("upper")
    read = operand_access(kernel, _data(kernel), loops.strides(operand_strides(operand)))
    row, column = loops.number(rank - 2), loops.number(rank - 1)
    moved = _data(kernel, 1) if len(step.inputs) > 1 and step.inputs[1] is not None else None

    def text(nest: Nest, parameters: Parameters) -> tuple[list[str], str]:
        k = "0" if moved is None else f"*{parameters.name(Place(OPERAND, moved), DType.INT64)}"
        lines = [f"const i64 above = (i64){nest.at(column, True)} - {nest.at(row, True)} - ({k});"]
        element = f"{parameters.name(read.place, read.dtype)}[{nest.offset(read, lanes=True)}]"
        return lines, f"above {'>=' if upper else '<='} 0 ? {element} : {stored(read.dtype)}()"

    return made_of("trilu", kernel, one_by_one(read.dtype, [read], frozenset({row, column}), text), loops)


def eye_like(kernel: Kernel) -> Sourced | None:
    result, k = kernel.results[0], kernel.steps[0].attrs.int("k")
    loops, t = Loops.of(result), computed(result.type.dtype)
    row, column = loops.number(0), loops.number(1)

    def text(nest: Nest, parameters: Parameters) -> tuple[list[str], str]:
        return [], f"({t})({nest.at(column, True)} - {nest.at(row, True)} == {k})"

    head = one_by_one(result.type.dtype, [], frozenset({row, column}), text, computed=True)
    return made_of("eye", kernel, head, loops)


def range_of(kernel: Kernel) -> Sourced | None:
    """start + n · delta, floats in float64."""
    result = kernel.results[0]
    dtype = result.type.dtype
    loops, t = Loops.of(result), "i64" if dtype in INTEGER else "double"
    ends = [_data(kernel, 0), _data(kernel, 2)]

    def text(nest: Nest, parameters: Parameters) -> tuple[list[str], str]:
        start, delta = (f"({t})widen(*{parameters.name(Place(OPERAND, n), dtype)})" for n in ends)
        return [], f"narrow<{computed(dtype)}>({start} + {delta} * ({t}){nest.at(0, True)})"

    return made_of("range", kernel, one_by_one(dtype, [], frozenset({0}), text, computed=True), loops)


def reverse_sequence(kernel: Kernel) -> Sourced | None:
    step, operand, lengths = kernel.steps[0], kernel.operands[_data(kernel)], kernel.operands[_data(kernel, 1)]
    batch, time = step.attrs.int("batch_axis"), step.attrs.int("time_axis")
    loops, strides = Loops.of(kernel.results[0]), operand_strides(operand)
    kept = [0 if a == time else s for a, s in enumerate(strides)]
    read = operand_access(kernel, _data(kernel), loops.strides(kept))
    along, which = loops.number(time), loops.number(batch)

    def text(nest: Nest, parameters: Parameters) -> tuple[list[str], str]:
        own, count = nest.at(along, True), parameters.name(Place(OPERAND, _data(kernel, 1)), lengths.type.dtype)
        lines = [
            f"const I length = (I){count}[{nest.at(which, True)}];",
            f"const I at = {own} < length ? length - 1 - {own} : {own};",
        ]
        place = f"{nest.offset(read, lanes=True)} + at * {strides[time]}"
        return lines, f"{parameters.name(read.place, read.dtype)}[{place}]"

    head = one_by_one(read.dtype, [read], frozenset({along, which}), text)
    return made_of("reverse sequence", kernel, head, loops)


def bit_cast(kernel: Kernel) -> Sourced | None:
    """The same bits: read as elements of the result's type."""
    operand, result = kernel.operands[_data(kernel)], kernel.results[0]
    made = kernel.steps[0].attrs.dtype("to")
    if made not in HELD or made is DType.BOOL or len(kernel.steps) > 1:
        return None
    loops = Loops.of(result)
    read = Access(Place(OPERAND, _data(kernel)), made, loops.strides(operand_strides(operand)))
    return made_of("bit cast", kernel, Straight(read), loops)


# ── RotaryEmbedding ──────────────────────────────────────────────────────────────────────────────────────────────


def rotary_embedding(kernel: Kernel) -> Sourced | None:
    """Pairs of elements turned by the angles of their position (RotaryEmbedding 23); the rest of a head is copied."""
    step, x = kernel.steps[0], kernel.operands[_data(kernel)]
    heads, dims = step.attrs.int("num_heads"), x.type.static_shape
    size = dims[3] if len(dims) == 4 else dims[2] // max(heads, 1)
    turned = step.attrs.int("rotary_embedding_dim") or size
    cosines, sines = (kernel.operands[_data(kernel, n)] for n in (1, 2))
    looked_up = len(step.inputs) > 3 and step.inputs[3] is not None
    if any(o.type.dtype not in REAL for o in (x, cosines, sines)) or turned % 2:
        return None
    if len(dims) == 3 and (heads < 1 or dims[2] % heads):
        return None
    loops = Loops.of(kernel.results[0], {2: size} if len(dims) == 3 else None)
    # of the two loops over heads that lie side by side the inner one is that over their elements
    own = max(n for n, loop in enumerate(loops.loops) if loop.axis == len(dims) - 1)
    position = (0, 1) if len(dims) == 3 else (0, 2)
    return _rotated(kernel, loops, own, turned, position, looked_up)


def _rotated(
    kernel: Kernel, loops: Loops, own: int, turned: int, position: tuple[int, int], looked_up: bool
) -> Sourced | None:  # fmt: skip
    step, x = kernel.steps[0], kernel.operands[_data(kernel)]
    strides, rank = loops.strides(operand_strides(x)), x.type.rank
    data = operand_access(kernel, _data(kernel), tuple(0 if n == own else s for n, s in enumerate(strides)))

    def by_position(input_number: int, along: tuple[int, ...]) -> Access:
        by_axis = [along[position.index(a)] if a in position else 0 for a in range(rank)]
        return operand_access(kernel, _data(kernel, input_number), loops.strides(by_axis))

    angles = kernel.operands[_data(kernel, 1)]
    along = (0, 0) if looked_up else operand_strides(angles)[:2]
    tables = [by_position(n, along) for n in (1, 2)]
    places = by_position(3, operand_strides(kernel.operands[_data(kernel, 3)])) if looked_up else None
    row, column = operand_strides(angles)[-2:]
    half, t = turned // 2, computed(x.type.dtype)
    across = bool(step.attrs.int("interleaved"))

    def text(nest: Nest, parameters: Parameters) -> tuple[list[str], str]:
        source = parameters.name(data.place, data.dtype)
        element = f"widen({source}[{nest.offset(data, True)} + {{}} * {strides[own]}])"
        lines = [
            f"const I d = {nest.at(own, True)};", f"const bool first = {'d % 2 == 0' if across else f'd < {half}'};",
            f"const I angle = {'d / 2' if across else f'd % {half}'}, other = first ? d + {1 if across else half} "
            f": d - {1 if across else half};", f"{t} turned = {element.format('d')};", f"if (d < {turned}) {{",
        ]  # fmt: skip
        moved = f"angle * {column}"
        if places is not None:
            read = f"{parameters.name(places.place, places.dtype)}[{nest.offset(places, True)}]"
            lines.append(f"    const i64 at = place_of({read}, {angles.type.static_shape[0]});")
            moved += f" + (at < 0 ? 0 : at) * {row}"
        for name, table in zip(("c", "s"), tables, strict=True):
            pointer = parameters.name(table.place, table.dtype)
            lines.append(f"    const {t} {name} = widen({pointer}[{nest.offset(table, True)} + {moved}]);")
        lines += [
            f"    const {t} y = {element.format('other')};",
            "    turned = turned * c + (first ? -y : y) * s;",
            "}",
        ]
        return lines, "turned"

    accesses = [data, *tables, *([places] if places is not None else [])]
    head = one_by_one(x.type.dtype, accesses, frozenset({own}), text, computed=True)
    return made_of("rotary embedding", kernel, head, loops)


MOVERS: dict[str, Callable[[Kernel], Sourced | None]] = {
    "Reshape": reshape, "Flatten": reshape, "Squeeze": reshape, "Unsqueeze": reshape, "Transpose": transpose,
    "Slice": slice_of, "Expand": expand, "Tile": tile, "DepthToSpace": depth_to_space, "SpaceToDepth": space_to_depth,
    "Concat": concat, "Split": split, "Pad": pad, "Gather": gather, "GatherElements": gather_elements,
    "GatherND": gather_nd, "ScatterElements": scatter_elements, "ScatterND": scatter_nd, "OneHot": one_hot,
    "Trilu": trilu, "EyeLike": eye_like, "Range": range_of, "ReverseSequence": reverse_sequence, "BitCast": bit_cast,
    "RotaryEmbedding": rotary_embedding,
}  # fmt: skip

__all__ = ["MOVERS", "change_of_layout"]
