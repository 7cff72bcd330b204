"""Constant tensors that rules speak of: internal operators without inputs, whose shape is an attribute.

In a target they become weights, made by `constant_weight`; in a source they match only weights that the same operator
made with the same attributes, because only of those the content is known without looking.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fractions import Fraction
from functools import lru_cache
from typing import Union

import numpy as np

from taso.graph.errors import GraphError
from taso.graph.index import Affine, Call, Const, Expr, Meaning, Pick, at, evaluate, same
from taso.graph.numbers import Float64
from taso.graph.operator import REQUIRED, Array, Attrs, AttrValue, Operator, Required, Types, Weight, register
from taso.graph.ops.common import output_loops, single_axes
from taso.graph.ops.elementwise import constant
from taso.graph.types import TensorType
from taso.graph.unknown import UnknownFraction
from taso.graph.winograd import Transforms, transforms

ShapeOf = Callable[[Attrs], tuple[int, ...]]
_ONE = Const(Fraction(1))
_DIAGONAL = at("i0"), at("i1")


def _define(
    name: str, shape: ShapeOf, body: Callable[[Attrs], Expr], needed: tuple[str, ...],
    optional: dict[str, AttrValue] | None = None,
) -> Operator:  # fmt: skip
    def infer(types: Types, attrs: Attrs) -> tuple[TensorType, ...]:
        dims = shape(attrs)
        if any(d < 0 for d in dims):
            raise GraphError(f"{name}: {dims} is no shape")
        dtype, content = attrs.dtype("dtype"), body(attrs)
        if not dtype.is_float and isinstance(content, Const) and _fractional(content.value):
            raise GraphError(f"{name}: {content.value} is no number of {dtype.name}")
        return (TensorType(dtype, dims),)

    def meaning(types: Types, attrs: Attrs) -> tuple[Meaning, ...]:
        return (Meaning(single_axes(output_loops(shape(attrs))), body(attrs)),)

    attributes: dict[str, AttrValue | Required] = {**dict.fromkeys((*needed, "dtype"), REQUIRED), **(optional or {})}
    return register(Operator(name, infer, attributes, meaning=meaning, arity=(0, 0), internal=True))


def _fractional(value: Fraction) -> bool:
    """Whether it is known that a number is not whole."""
    return not isinstance(value, UnknownFraction) and value.denominator != 1


def _kernel_shape(attrs: Attrs) -> tuple[int, ...]:
    channels = attrs.int("channels")
    return (channels, channels, *attrs.ints("kernel_shape"))


def _centre(attrs: Attrs) -> Expr:
    """SAME_LOWER puts the larger half of an even window's padding first, so its centre is element k // 2."""
    window = attrs.ints("kernel_shape")
    centre = [(at(f"i{axis}"), Affine((), size // 2)) for axis, size in enumerate(window, 2)]
    return same(_DIAGONAL, *centre)


def _average(attrs: Attrs) -> Expr:
    size = 1
    for k in attrs.ints("kernel_shape"):
        size *= k
    return Const(Fraction(1, size))


CONSTANT = _define(
    "Constant", lambda a: a.ints("shape"), lambda a: constant(a.float("value")), ("value",), {"shape": ()}
)  # fmt: skip
ONES = _define("Ones", lambda a: a.ints("shape"), lambda a: _ONE, ("shape",))
IDENTITY_MATRIX = _define(
    "IdentityMatrix", lambda a: (a.int("size"), a.int("size")), lambda a: same(_DIAGONAL), ("size",)
)  # fmt: skip
# the kernel of a convolution that reproduces its input
IDENTITY_KERNEL = _define("IdentityKernel", _kernel_shape, _centre, ("channels", "kernel_shape"))
# the kernel of a depthwise convolution that averages, counting the padding
AVERAGING_KERNEL = _define(
    "AveragingKernel", lambda a: (a.int("channels"), 1, *a.ints("kernel_shape")), _average, ("channels", "kernel_shape")
)  # fmt: skip

# ── Winograd's transforms of the two axes of a picture, as weights (`taso.graph.winograd`) ───────────────────────
# `tile` and `taps` have a number for each axis; where both are 1 the axis stays as it is


def _both(attrs: Attrs) -> tuple[Transforms, Transforms]:
    tile, taps = attrs.ints("tile"), attrs.ints("taps")
    if not len(tile) == len(taps) == 2:
        raise GraphError(f"a tile of {tile} and {taps} taps are not two-dimensional")
    down, right = (_UNCHANGED if m == r == 1 else transforms(m, r) for m, r in zip(tile, taps, strict=True))
    return down, right


def _products(attrs: Attrs) -> tuple[int, int]:
    """Positions of a tile along each axis."""
    down, right = _both(attrs)
    return down.products, right.products


def _tile_data(attrs: Attrs) -> Expr:
    """Bᵀ[u, r] · Bᵀ[v, s]."""
    down, right = _both(attrs)
    return Call("mul", (_entry(down.data, ["i0", "i2"]), _entry(right.data, ["i1", "i3"])))


def _tile_output(attrs: Attrs) -> Expr:
    """Aᵀ[i, u] · Aᵀ[j, v]."""
    down, right = _both(attrs)
    return Call("mul", (_entry(down.output, ["i0", "i2"]), _entry(right.output, ["i1", "i3"])))


def _tile_bias(attrs: Attrs) -> Expr:
    """b[u] · b[v], b what the transforms make of a filter whose first tap alone is 1 and of data that are 1 throughout:
    its outputs are all 1."""
    down, right = (
        tuple(taps[0] * sum(row) for taps, row in zip(f.filter, f.data, strict=True)) for f in _both(attrs)
    )
    return Call("mul", (_entry(down, ["i0"]), _entry(right, ["i1"])))


_Entries = Union[Fraction, "tuple[_Entries, ...]"]


def _entry(entries: _Entries, loops: Sequence[str]) -> Expr:
    """The entry of a table of numbers at the positions of loops."""
    if isinstance(entries, Fraction):
        return Const(entries)
    return Pick(loops[0], tuple((1, _entry(part, loops[1:])) for part in entries))


_SAME = ((Fraction(1),),)
_UNCHANGED = Transforms(_SAME, _SAME, _SAME)

# what transforms the data of a tile
TILE_DATA = _define("TileData", lambda a: 2 * _products(a), _tile_data, ("tile", "taps"))
# what makes the outputs of a tile of the products
TILE_OUTPUT = _define("TileOutput", lambda a: a.ints("tile") + _products(a), _tile_output, ("tile", "taps"))
# what to add to the products for 1 to be added to the outputs
TILE_BIAS = _define("TileBias", _products, _tile_bias, ("tile", "taps"))

CONSTANTS = frozenset({
    CONSTANT, ONES, IDENTITY_MATRIX, IDENTITY_KERNEL, AVERAGING_KERNEL, TILE_BIAS, TILE_DATA, TILE_OUTPUT,
})  # fmt: skip


class ConstantWeight(Weight):
    """A weight whose content is that of `op` with `attrs`."""

    __slots__ = ("attrs", "op")

    def __init__(self, op: Operator, attrs: Attrs) -> None:
        (type,) = op.types_of((), attrs)
        super().__init__(type, self._values, op.name)
        self.op = op
        self.attrs = attrs

    def _values(self) -> Array:
        meaning = self.op.meaning
        if meaning is None:
            raise GraphError(f"{self.op.name} has no values")
        (described,) = meaning((), self.attrs)
        return np.array(evaluate(described, (), Float64())).astype(self.type.dtype.numpy)


@lru_cache(maxsize=4096)
def constant_weight(op: Operator, attrs: Attrs) -> ConstantWeight:
    """The weight of a constant operator; the same operator and attributes give the same weight, so that it interns.

    Raises `GraphError` for attributes that give no shape.
    """
    return ConstantWeight(op, attrs)
