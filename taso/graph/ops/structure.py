"""Inputs, weights, opaque nodes, and operators that pass their input on."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

from taso.graph.errors import GraphError, ShapeError
from taso.graph.graph import define_sources
from taso.graph.index import Meaning
from taso.graph.operator import (
    REQUIRED,
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
    broadcast_read,
    element_type,
    one_output,
    only_attributes,
    output_loops,
    present,
    single_axes,
    writes_changed,
)  # fmt: skip
from taso.graph.types import DType, TensorType, is_static

# ── Input, Weight ────────────────────────────────────────────────────────────────────────────────────────────────


def _no_rule(types: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    raise GraphError("inputs and weights are given their types")


INPUT = register(
    Operator("Input", _no_rule, {"name": REQUIRED}, frozenset({Trait.SOURCE}), arity=(0, 0), internal=True)
)
WEIGHT = register(
    Operator("Weight", _no_rule, {"data": REQUIRED}, frozenset({Trait.SOURCE}), arity=(0, 0), internal=True)
)
define_sources(INPUT, WEIGHT)

# ── Opaque ───────────────────────────────────────────────────────────────────────────────────────────────────────
# attributes: `proto` the serialized node; `captures` the outer names that bodies read, one input each, after the
# node's own; `outputs` which of the node's outputs are in use (an empty name is kept empty). An opaque Slice is not
# named Slice: a table of operators, asked by name, must not take it for one whose attributes it knows.

_OPAQUE = "opaque "


@cache
def opaque(op_type: str, domain: str = "", random: bool = False) -> Operator:
    """The operator of nodes that pass through unchanged; `random` ones are never merged."""
    traits = {Trait.OPAQUE, Trait.RANDOM} if random else {Trait.OPAQUE}
    return _Opaque(
        _OPAQUE + op_type, _no_rule, {"proto": REQUIRED, "captures": (), "outputs": REQUIRED, "opset": 0},
        frozenset(traits), arity=(0, 1 << 30), domain=domain,
    )  # fmt: skip


class _Opaque(Operator):
    def __reduce__(self) -> tuple[object, tuple[str, str, bool]]:  # type: ignore[override]  # it is in no registry
        return opaque, (self.label, self.domain, Trait.RANDOM in self.traits)

    @property
    def label(self) -> str:
        return self.name.removeprefix(_OPAQUE)


# ── Identity, Dropout at inference ───────────────────────────────────────────────────────────────────────────────


def _same(types: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    given = types[0]
    if given is None:
        raise GraphError("Identity needs its input 0")
    return (given,)


def _copy(types: Types, attrs: Attrs) -> tuple[Meaning, ...]:
    t = present(types, 0, "Identity")
    loops = output_loops(t.dims)
    return (Meaning(single_axes(loops), broadcast_read(0, t, loops)),)


_PASSES = frozenset({Trait.IDENTITY, Trait.ELEMENTWISE, Trait.MOVES_DATA, Trait.IDEMPOTENT})

IDENTITY = register(Operator("Identity", _same, {}, _PASSES, frozenset({0}), _copy))


def _read_dropout(node: FileNode) -> Reading:
    """Dropout 1 to 22 at inference; in training mode it stays opaque."""
    one_output(node)
    if node.version < 7 and not node.attrs.get("is_test", 0):
        raise Unmodelled("Dropout in training mode")
    if node.has(2) and bool(node.needs(2).any()):
        raise Unmodelled("Dropout in training mode")
    ratio = node.attrs.get("ratio", 0.5)
    if node.has(1):
        ratio = float(node.needs(1).item())
    only_attributes(node, "ratio", "seed", "is_test", "consumed_inputs")
    return Reading({"ratio": ratio}, (0,))


def _write_dropout(attrs: Attrs, types: Types, opset: int) -> Spelling:
    if opset >= 12:
        # the ratio is without effect at inference and a default is as good
        return Spelling("Dropout", {}, (0,))
    extra = {"is_test": 1} if opset < 7 else {}
    return Spelling("Dropout", {"ratio": attrs.float("ratio"), **extra}, (0,))


DROPOUT = register(
    Operator("Dropout", _same, {"ratio": 0.5}, _PASSES, frozenset({0}), _copy, read=_read_dropout, write=_write_dropout)
)

# ── Cast ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def _cast_type(types: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    return (TensorType(attrs.dtype("to"), present(types, 0, "Cast").shape),)


def _cast_meaning(types: Types, attrs: Attrs) -> tuple[Meaning, ...]:
    if present(types, 0, "Cast").dtype is not attrs.dtype("to"):
        raise GraphError("a Cast to another element type has no meaning over the reals")
    return _copy(types, attrs)


def _read_cast(node: FileNode) -> Reading:
    only_attributes(node, "to", "saturate", "round_mode")
    dtype = element_type(node.attrs.get("to"), node.op_type)
    if dtype is None:
        raise Unmodelled(f"{node.op_type} to no element type")
    return Reading({**node.attrs, "to": dtype}, (0,))


_CAST: dict[str, AttrValue | Required] = {"to": REQUIRED, "saturate": 1, "round_mode": "up"}


CAST = register(
    Operator(
        "Cast", _cast_type, _CAST, frozenset({Trait.ELEMENTWISE}), meaning=_cast_meaning, read=_read_cast, since=6,
        write=writes_changed("Cast", _CAST, {"saturate": 19, "round_mode": 24}),
    )
)  # fmt: skip

# ── BitCast: the same bits as another element type of as many ────────────────────────────────────────────────────


def _bit_cast_type(types: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    x, to = present(types, 0, "BitCast"), attrs.dtype("to")
    if x.dtype.itemsize != to.itemsize:
        raise ShapeError(f"BitCast: {x.dtype.name} and {to.name} have elements of different sizes")
    return (TensorType(to, x.dims),)


BIT_CAST = register(
    Operator("BitCast", _bit_cast_type, {"to": REQUIRED}, frozenset({Trait.TYPED}), read=_read_cast, since=26)
)

# ── Shape, Size ──────────────────────────────────────────────────────────────────────────────────────────────────


def _shape_type(types: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    rank = present(types, 0, "Shape").rank
    start, stop = shape_range(rank, attrs)
    return (TensorType(DType.INT64, (max(stop - start, 0),)),)


def shape_range(rank: int, attrs: Attrs) -> tuple[int, int]:
    """The axes `start` … `stop` that Shape gives of a tensor of `rank` dimensions (Shape 15)."""
    start = attrs.int("start")
    end = attrs["end"]
    stop = end if isinstance(end, int) else rank
    start, stop = (i + rank if i < 0 else i for i in (start, stop))
    return min(max(start, 0), rank), min(max(stop, 0), rank)


def _write_shape(attrs: Attrs, types: Types, opset: int) -> Spelling:
    said: dict[str, int] = {}
    if opset < 15 and (attrs.int("start") or attrs["end"] is not None):
        raise Unspellable(f"Shape of some axes cannot be written in ONNX opset {opset}")
    if attrs.int("start"):
        said["start"] = attrs.int("start")
    if attrs["end"] is not None:
        said["end"] = attrs.int("end")
    return Spelling("Shape", said, (0,))


SHAPE = register(Operator("Shape", _shape_type, {"start": 0, "end": None}, write=_write_shape))

SIZE = register(Operator("Size", lambda types, attrs: (TensorType(DType.INT64, ()),)))


def known_shape(op: Operator, types: Sequence[TensorType | None], attrs: Attrs) -> tuple[int, ...] | None:
    """The value of Shape or Size of a static type, else None."""
    t = types[0]
    if op not in (SHAPE, SIZE) or t is None or t.shape is None:
        return None
    if op is SIZE:
        return (t.size,) if t.static else None
    start, stop = shape_range(t.rank, attrs)
    kept = t.dims[start:stop]
    return tuple(d for d in kept if isinstance(d, int)) if is_static(kept) else None


__all__ = ["CAST", "DROPOUT", "IDENTITY", "INPUT", "SHAPE", "SIZE", "WEIGHT", "known_shape", "opaque", "ShapeError"]
