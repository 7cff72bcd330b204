"""Einsum (ONNX Einsum 12) of two operands as one product of matrices of oneDNN, with reorders where it takes any.

Letters are those of both operands and the output (they count matrices), of one operand and the output (rows, columns),
or of both operands alone (what is summed). Whatever else there is, diagonals above all, is left to NumPy.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from taso.backends.lowering import PLAIN, Step
from taso.backends.onednn import primitives as p
from taso.backends.onednn.memory import DataType, MemoryDesc
from taso.backends.onednn.places import RESULT, Place
from taso.backends.onednn.primitives import Primitive, Unimplemented, is_slow
from taso.backends.onednn.quantized import Host
from taso.backends.places import row_major_strides
from taso.graph.ops.einsum import parse

_F32 = DataType.F32
_MOST_AXES = 12
Group = tuple[tuple[int, ...], tuple[int, ...]]
"""Sizes and strides of some axes."""


@dataclass(frozen=True)
class Contraction:
    """Both operands and the result as groups of axes: the first ones count matrices, then rows, then columns."""

    a: tuple[Group, Group, Group]
    b: tuple[Group, Group, Group]
    out: tuple[Group, Group, Group]


def contraction(equation: str, shapes: Sequence[tuple[int, ...]]) -> Contraction | None:
    """The product of matrices that an equation of two operands is; None where it is none."""
    if len(shapes) != 2:
        return None
    said = parse(equation)
    spread = max((len(s) - len(t) + 1 for t, s in zip(said.inputs, shapes, strict=True) if "." in t), default=0)
    a, b = (_letters(t, s, spread) for t, s in zip(said.inputs, shapes, strict=True))
    if a is None or b is None:
        return None
    sizes = {**a.sizes, **b.sizes}
    named = said.output.replace(".", "".join(map(str, range(spread))))
    result = [x for x in named if x in sizes]
    if len(sizes) > _MOST_AXES or any(sizes[x] != t.sizes[x] for t in (a, b) for x in t.sizes):
        return None
    strides = dict(zip(result, row_major_strides([sizes[x] for x in result]), strict=True))
    count = [x for x in result if x in a.sizes and x in b.sizes]
    rows, columns = ([x for x in result if x in one.sizes and x not in two.sizes] for one, two in ((a, b), (b, a)))
    inner = [x for x in b.sizes if x in a.sizes and x not in result]
    left = set(sizes) - {*count, *rows, *columns, *inner}
    if left or not inner or not (rows or columns):
        return None

    def group(letters: Sequence[str], of: dict[str, int]) -> Group:
        return tuple(sizes[x] for x in letters), tuple(of[x] for x in letters)

    return Contraction(
        (group(count, a.strides), group(rows, a.strides), group(inner, a.strides)),
        (group(count, b.strides), group(inner, b.strides), group(columns, b.strides)),
        (group(count, strides), group(rows, strides), group(columns, strides)),
    )


@dataclass(frozen=True)
class _Letters:
    """Size and stride of each letter of an operand; axes of size 1 have none."""

    sizes: dict[str, int]
    strides: dict[str, int]


def _letters(term: str, shape: tuple[int, ...], spread: int) -> _Letters | None:
    here = len(shape) - len(term) + 1 if "." in term else 0
    # the axes of an ellipsis are counted from the last one
    names = list(term.replace(".", "".join(map(str, range(spread - here, spread)))))
    if len(set(names)) < len(names):
        return None
    found = [(x, d, s) for x, d, s in zip(names, shape, row_major_strides(shape), strict=True) if d != 1]
    return _Letters({x: d for x, d, _ in found}, {x: s for x, _, s in found})


def _merged(group: Group) -> tuple[int, int] | None:
    """Some axes as one: its size and stride; None where they do not lie so."""
    sizes, strides = group
    for i in range(len(sizes) - 1):
        if strides[i] != strides[i + 1] * sizes[i + 1]:
            return None
    return math.prod(sizes), strides[-1] if strides else 1


def _matrices(groups: Sequence[Group], counted: bool) -> MemoryDesc | None:
    """Matrices as they lie, by one axis that counts them where they are `counted` together; None where they do not."""
    (count, steps), rows, columns = groups[0], _merged(groups[1]), _merged(groups[2])
    if counted:
        whole = _merged(groups[0])
        if whole is None:
            return None
        count, steps = ((), ()) if whole[0] == 1 else ((whole[0],), (whole[1],))
    if rows is None or columns is None:
        return None
    strides = [rows[1], columns[1]]
    if rows[0] == 1:
        # one row, of whatever stride
        strides[0] = max(columns[0] * columns[1], 1)
    return MemoryDesc.strided((*count, rows[0], columns[0]), _F32, (*steps, *strides))


def _spread(groups: Sequence[Group]) -> tuple[MemoryDesc, MemoryDesc]:
    """All axes as they lie, and one after the other."""
    dims, strides = (tuple(x for g in groups for x in g[i]) or (1,) for i in (0, 1))
    return MemoryDesc.strided(dims, _F32, strides), MemoryDesc.plain(dims, _F32)


class Products(Host, Protocol):
    """What a kernel's designer does for it."""

    def weights(self, index: int, plain: MemoryDesc, wanted: MemoryDesc, factor: float = 1.0) -> Place: ...


def build(host: Products, step: Step, found: Contraction) -> None:
    """Adds the launches of an einsum; raises `Unimplemented` where oneDNN has no fast product of these sizes."""
    if any(host.operand(step, i).layout != PLAIN for i in (0, 1)):
        raise Unimplemented("an operand that lies otherwise than plainly")
    sides = (found.a, found.b, found.out)
    together = all(_merged(side[0]) is not None for side in sides)
    direct = [_matrices(side, together) for side in sides]
    if not _as_they_lie(host, step, direct):
        _one_after_the_other(host, step, found)


def _as_they_lie(host: Products, step: Step, matrices: Sequence[MemoryDesc | None]) -> bool:
    a, b, out = matrices
    if a is None or b is None or out is None:
        return False
    index = host.index(step, 1)
    constant = host.kernel.operands[index].constant
    primitive = _product(a, MemoryDesc.any(b.dims, _F32) if constant else b, out)
    if primitive is None:
        return False
    weights = host.weights(index, b, primitive.weights_desc()) if constant else host.place(index)
    host.launch(primitive, {p.SRC: host.place(host.index(step, 0)), p.WEIGHTS: weights, p.DST: Place(RESULT)})
    return True


def _one_after_the_other(host: Products, step: Step, found: Contraction) -> None:
    """Operands and result brought into rows and columns where they lie otherwise."""
    places, dense = [], []
    for position, side in enumerate((found.a, found.b)):
        lies, wanted = _spread(side)
        places.append(host.weights(host.index(step, position), lies, wanted))
        dense.append(_dense(side))
    out, (lies, wanted) = _dense(found.out), _spread(found.out)
    primitive = _product(dense[0], dense[1], out)
    if primitive is None:
        raise Unimplemented("oneDNN has no fast product of these sizes")
    to = Place(RESULT) if lies == wanted else host.recipe.add_scratch(out.size)
    host.launch(primitive, {p.SRC: places[0], p.WEIGHTS: places[1], p.DST: to})
    if lies != wanted:
        host.reorder(wanted, to, lies, Place(RESULT))


def _dense(side: tuple[Group, Group, Group]) -> MemoryDesc:
    count, rows, columns = (math.prod(group[0]) for group in side)
    return MemoryDesc.plain((rows, columns) if count == 1 else (count, rows, columns), _F32)


def _product(a: MemoryDesc, b: MemoryDesc, out: MemoryDesc) -> Primitive | None:
    try:
        made = p.matmul(a, b, out)
    except Unimplemented:
        return None
    return None if is_slow(made) else made


__all__ = ["Contraction", "build", "contraction"]
