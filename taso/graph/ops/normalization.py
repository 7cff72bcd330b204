"""Normalisations at inference, and the softmax family."""

from __future__ import annotations

from fractions import Fraction

from taso.graph.errors import ShapeError
from taso.graph.index import Call, Const, Expr, Loop, Meaning, Read, Reduce, at
from taso.graph.operator import Attrs, FileNode, Operator, Reading, Spelling, Types, Unmodelled, Unspellable, register
from taso.graph.ops.common import (
    normal_axis,
    one_output,
    only_attributes,
    output_loops,
    present,
    require_equal,
    require_rank,
    require_same_dtype,
    single_axes,
)  # fmt: skip
from taso.graph.ops.elementwise import constant
from taso.graph.types import TensorType

# ── BatchNormalization ───────────────────────────────────────────────────────────────────────────────────────────


def _batch_type(types: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    x = present(types, 0, "BatchNormalization")
    if x.rank < 2:
        raise ShapeError("BatchNormalization: the input needs a channel axis")
    for i, what in enumerate(("scale", "bias", "mean", "variance"), 1):
        t = present(types, i, "BatchNormalization")
        require_rank(t, 1, "BatchNormalization", f"the {what}")
        require_equal(t.dims[0], x.dims[1], "BatchNormalization", f"size of the {what} and channels of the input")
    return (x,)


def _batch_meaning(types: Types, attrs: Attrs) -> tuple[Meaning, ...]:
    loops = output_loops(present(types, 0, "BatchNormalization").dims)
    x = Read(0, tuple(map(at, loops)))
    scale, bias, mean, variance = (Read(i, (at(loops[1]),)) for i in range(1, 5))
    deviation = Call("sqrt", (Call("add", (variance, constant(attrs.float("epsilon")))),))
    centred = Call("sub", (x, mean))
    body = Call("add", (Call("div", (Call("mul", (centred, scale)), deviation)), bias))
    return (Meaning(single_axes(loops), body),)


def _read_batch(node: FileNode) -> Reading:
    """BatchNormalization 7 to 15 at inference; older versions and training mode stay opaque."""
    one_output(node)
    if node.version < 7 or node.attrs.get("training_mode", 0) or node.attrs.get("spatial", 1) == 0:
        raise Unmodelled("BatchNormalization in training mode, of a version before 7, or not per channel")
    only_attributes(node, "epsilon", "momentum", "spatial", "training_mode")
    return Reading({"epsilon": node.attrs.get("epsilon", 1e-5)}, (0, 1, 2, 3, 4))


BATCH_NORMALIZATION = register(
    Operator(
        "BatchNormalization", _batch_type, {"epsilon": 1e-5}, meaning=_batch_meaning, arity=(5, 5), read=_read_batch,
        since=7,
    )
)  # fmt: skip

# ── LayerNormalization ───────────────────────────────────────────────────────────────────────────────────────────


def _layer_type(types: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    x = present(types, 0, "LayerNormalization")
    axis = normal_axis(attrs.int("axis"), x.rank, "LayerNormalization")
    scale = present(types, 1, "LayerNormalization")
    require_same_dtype(types, "LayerNormalization")
    if scale.dims != x.dims[axis:]:
        raise ShapeError("LayerNormalization: the scale must have the shape of the normalised axes")
    if len(types) > 2 and types[2] is not None and present(types, 2, "LayerNormalization").dims != scale.dims:
        raise ShapeError("LayerNormalization: bias and scale must have one shape")
    return (x,)


def _layer_meaning(types: Types, attrs: Attrs) -> tuple[Meaning, ...]:
    x = present(types, 0, "LayerNormalization")
    axis = normal_axis(attrs.int("axis"), x.rank, "LayerNormalization")
    loops = output_loops(x.dims)

    def swept(prefix: str) -> tuple[tuple[Loop, ...], Expr]:
        inner = tuple(Loop(f"{prefix}{a}", x.dims[a]) for a in range(axis, x.rank))
        return inner, Read(0, (*map(at, loops[:axis]), *map(at, inner)))

    def mean(inner: tuple[Loop, ...], e: Expr) -> Expr:
        return Call("div", (Reduce("sum", inner, e), Reduce("sum", inner, Const(Fraction(1)))))

    inner, along = swept("k")
    centred_along = Call("sub", (along, mean(*swept("m"))))
    variance = mean(inner, Call("mul", (centred_along, centred_along)))
    deviation = Call("sqrt", (Call("add", (variance, constant(attrs.float("epsilon")))),))
    centred = Call("sub", (Read(0, tuple(map(at, loops))), mean(*swept("m"))))
    body: Expr = Call("mul", (Call("div", (centred, deviation)), Read(1, tuple(map(at, loops[axis:])))))
    if len(types) > 2 and types[2] is not None:
        body = Call("add", (body, Read(2, tuple(map(at, loops[axis:])))))
    return (Meaning(single_axes(loops), body),)


def _read_layer(node: FileNode) -> Reading:
    one_output(node)
    only_attributes(node, "axis", "epsilon", "stash_type")
    if node.attrs.get("stash_type", 1) != 1:
        raise Unmodelled("LayerNormalization with another stash_type")
    attrs = {"axis": node.attrs.get("axis", -1), "epsilon": node.attrs.get("epsilon", 1e-5)}
    return Reading(attrs, (0, 1, 2) if node.has(2) else (0, 1))


LAYER_NORMALIZATION = register(
    Operator(
        "LayerNormalization", _layer_type, {"axis": -1, "epsilon": 1e-5}, meaning=_layer_meaning, arity=(2, 3),
        read=_read_layer, since=17,
    )
)  # fmt: skip

# ── LRN ──────────────────────────────────────────────────────────────────────────────────────────────────────────
# onnx.reference sums over the channels of the first samples only (onnx 1.23), so the meaning stands here


def _lrn_meaning(types: Types, attrs: Attrs) -> tuple[Meaning, ...]:
    loops = output_loops(present(types, 0, "LRN").dims)
    near = Loop("k", attrs.int("size"))
    channel = at(loops[1]) + at(near, 1, -((attrs.int("size") - 1) // 2))
    square = Read(0, (at(loops[0]), channel, *map(at, loops[2:])), "zero")
    total = Reduce("sum", (near,), Call("mul", (square, square)))
    share = Call("mul", (Call("div", (total, Const(Fraction(attrs.int("size"))))), constant(attrs.float("alpha"))))
    power = Call("pow", (Call("add", (share, constant(attrs.float("bias")))), constant(attrs.float("beta"))))
    return (Meaning(single_axes(loops), Call("div", (Read(0, tuple(map(at, loops))), power))),)


LRN = register(
    Operator(
        "LRN", lambda types, attrs: (present(types, 0, "LRN"),),
        {"alpha": 1e-4, "beta": 0.75, "bias": 1.0, "size": 1}, meaning=_lrn_meaning,
    )
)  # fmt: skip

# ── Softmax, LogSoftmax ──────────────────────────────────────────────────────────────────────────────────────────
# `flattened`: the meaning before opset 13, over all axes from `axis` on; with the last axis both agree and it is 0


def _softmax_axes(op: str, types: Types, attrs: Attrs) -> tuple[int, ...]:
    x = present(types, 0, op)
    axis = normal_axis(attrs.int("axis"), x.rank, op)
    return tuple(range(axis, x.rank)) if attrs.int("flattened") else (axis,)


def _softmax_type(op: str, types: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    _softmax_axes(op, types, attrs)
    return (present(types, 0, op),)


def _softmax_meaning(op: str, types: Types, attrs: Attrs) -> tuple[Meaning, ...]:
    x, axes = present(types, 0, op), _softmax_axes(op, types, attrs)
    loops = output_loops(x.dims)
    inner = tuple(Loop(f"k{a}", x.dims[a]) for a in axes)
    shifted = Call("sub", (Read(0, tuple(map(at, loops))), _along("max", x, axes, loops, inner)))
    again = Call("sub", (_swept(x, axes, loops, inner), _along("max", x, axes, loops, inner)))
    total = Reduce("sum", inner, Call("exp", (again,)))
    if op == "LogSoftmax":
        body = Call("sub", (shifted, Call("log", (total,))))
    else:
        body = Call("div", (Call("exp", (shifted,)), total))
    return (Meaning(single_axes(loops), body),)


def _swept(x: TensorType, axes: tuple[int, ...], loops: tuple[Loop, ...], inner: tuple[Loop, ...]) -> Read:
    swept = dict(zip(axes, inner, strict=True))
    return Read(0, tuple(at(swept.get(a, loops[a])) for a in range(x.rank)))


def _along(kind: str, x: TensorType, axes: tuple[int, ...], loops: tuple[Loop, ...], inner: tuple[Loop, ...]) -> Expr:
    # own names: this stands inside another sum over the same axes
    named = tuple(Loop("m" + loop.name, loop.extent) for loop in inner)
    return Reduce(kind, named, _swept(x, axes, loops, named))


def _read_softmax(node: FileNode) -> Reading:
    """Before opset 13 the default axis is 1 and the input is flattened there."""
    only_attributes(node, "axis")
    x = node.type(0)
    old = node.version < 13
    axis = node.attrs.get("axis", 1 if old else -1)
    if not isinstance(axis, int):
        raise Unmodelled(f"{node.op_type} with an axis that is no integer")
    normal = normal_axis(axis, x.rank, node.op_type)
    return Reading({"axis": normal, "flattened": int(old and normal != x.rank - 1)}, (0,))


def _write_softmax(op: str, attrs: Attrs, types: Types, opset: int) -> Spelling:
    x = present(types, 0, op)
    last = normal_axis(attrs.int("axis"), x.rank, op) == x.rank - 1
    if not last and bool(attrs.int("flattened")) != (opset < 13):
        raise Unspellable(f"{op} over axis {attrs.int('axis')} of {x} cannot be written in ONNX opset {opset}")
    return Spelling(op, {"axis": attrs.int("axis")}, (0,))


def _softmax(name: str) -> Operator:
    return register(
        Operator(
            name, lambda types, attrs: _softmax_type(name, types, attrs), {"axis": -1, "flattened": 0},
            meaning=lambda types, attrs: _softmax_meaning(name, types, attrs), read=_read_softmax,
            write=lambda attrs, types, opset: _write_softmax(name, attrs, types, opset),
        )
    )  # fmt: skip


SOFTMAX = _softmax("Softmax")
LOG_SOFTMAX = _softmax("LogSoftmax")
