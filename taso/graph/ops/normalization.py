"""Normalisations at inference, and the softmax family."""

from __future__ import annotations

from fractions import Fraction

from taso.graph.errors import ShapeError
from taso.graph.index import Call, Const, Expr, Loop, Meaning, Read, Reduce, at
from taso.graph.operator import (
    REQUIRED,
    Attrs,
    FileNode,
    Operator,
    Reading,
    Spelling,
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
    require_rank,
    require_same_dtype,
    single_axes,
)  # fmt: skip
from taso.graph.ops.elementwise import constant
from taso.graph.types import Dim, TensorType

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


def _require_shape(t: TensorType, dims: tuple[Dim, ...], what: str) -> None:
    require_rank(t, len(dims), "LayerNormalization", f"the {what}")
    for own, wanted in zip(t.dims, dims, strict=True):
        require_equal(own, wanted, "LayerNormalization", f"sizes of the {what} and of the normalised axes")


def _layer_type(types: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    x = present(types, 0, "LayerNormalization")
    axis = normal_axis(attrs.int("axis"), x.rank, "LayerNormalization")
    scale = present(types, 1, "LayerNormalization")
    require_same_dtype(types, "LayerNormalization")
    _require_shape(scale, x.dims[axis:], "scale")
    if len(types) > 2 and types[2] is not None:
        _require_shape(present(types, 2, "LayerNormalization"), x.dims[axis:], "bias")
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

# ── InstanceNormalization, GroupNormalization, RMSNormalization ──────────────────────────────────────────────────


def _mean(over: tuple[Loop, ...], e: Expr) -> Expr:
    return Call("div", (Reduce("sum", over, e), Reduce("sum", over, Const(Fraction(1)))))


def _normalised(x: Expr, along: Expr, mean: Expr, over: tuple[Loop, ...], epsilon: float) -> Expr:
    """(x − mean) / √(variance + ε), where `along` is x as it runs over the loops `over` (whose means use others)."""
    centred = Call("sub", (along, mean))
    variance = _mean(over, Call("mul", (centred, centred)))
    return Call("div", (Call("sub", (x, mean)), Call("sqrt", (Call("add", (variance, constant(epsilon))),))))


def _channel_weights(types: Types, op: str) -> TensorType:
    """The input, once scale and bias are known to have one number for each of its channels."""
    x = present(types, 0, op)
    if x.rank < 3:
        raise ShapeError(f"{op}: the input must have at least 3 dimensions, not {x.rank}")
    require_same_dtype(types, op)
    for i, what in enumerate(("scale", "bias"), 1):
        t = present(types, i, op)
        require_rank(t, 1, op, f"the {what}")
        require_equal(t.dims[0], x.dims[1], op, f"size of the {what} and channels of the input")
    return x


def _instance_meaning(types: Types, attrs: Attrs) -> tuple[Meaning, ...]:
    x = _channel_weights(types, "InstanceNormalization")
    loops = output_loops(x.dims)

    def swept(prefix: str) -> tuple[tuple[Loop, ...], Expr]:
        inner = tuple(Loop(f"{prefix}{a}", d) for a, d in enumerate(x.dims[2:]))
        return inner, Read(0, (*map(at, loops[:2]), *map(at, inner)))

    over, along = swept("k")
    body = _normalised(Read(0, tuple(map(at, loops))), along, _mean(*swept("m")), over, attrs.float("epsilon"))
    scale, bias = (Read(i, (at(loops[1]),)) for i in (1, 2))
    return (Meaning(single_axes(loops), Call("add", (Call("mul", (body, scale)), bias))),)


INSTANCE_NORMALIZATION = register(
    Operator(
        "InstanceNormalization", lambda types, attrs: (_channel_weights(types, "InstanceNormalization"),),
        {"epsilon": 1e-5}, meaning=_instance_meaning, arity=(3, 3), since=6,
    )
)  # fmt: skip


def _group_type(types: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    x, groups = _channel_weights(types, "GroupNormalization"), attrs.int("num_groups")
    channels = x.dims[1]
    if groups < 1 or isinstance(channels, int) and channels % groups:
        raise ShapeError(f"GroupNormalization: {channels} channels do not divide into {groups} groups")
    return (x,)


def _group_meaning(types: Types, attrs: Attrs) -> tuple[Meaning, ...]:
    (x,) = _group_type(types, attrs)
    n, g = Loop("n", x.dims[0]), Loop("g", attrs.int("num_groups"))
    c = Loop("c", x.dims[1] // attrs.int("num_groups"))
    spatial = tuple(Loop(f"y{a}", d) for a, d in enumerate(x.dims[2:]))

    def read(channel: Loop, position: tuple[Loop, ...]) -> Expr:
        return Read(0, (at(n), at(g, c.extent) + at(channel), *map(at, position)))

    def swept(prefix: str) -> tuple[tuple[Loop, ...], Expr]:
        inner = tuple(Loop(f"{prefix}{loop.name}", loop.extent) for loop in (c, *spatial))
        return inner, read(inner[0], inner[1:])

    over, along = swept("k")
    body = _normalised(read(c, spatial), along, _mean(*swept("m")), over, attrs.float("epsilon"))
    scale, bias = (Read(i, (at(g, c.extent) + at(c),)) for i in (1, 2))
    whole = Call("add", (Call("mul", (body, scale)), bias))
    return (Meaning(((n,), (g, c), *single_axes(spatial)), whole),)


def _read_group(node: FileNode) -> Reading:
    """GroupNormalization 21; 18 has a scale for each group and stays opaque."""
    only_attributes(node, "epsilon", "num_groups", "stash_type")
    if node.version < 21 or node.attrs.get("stash_type", 1) != 1:
        raise Unmodelled("GroupNormalization of version 18, or with another stash_type")
    attrs = {"epsilon": node.attrs.get("epsilon", 1e-5), "num_groups": node.attrs.get("num_groups", 0)}
    return Reading(attrs, (0, 1, 2))


GROUP_NORMALIZATION = register(
    Operator(
        "GroupNormalization", _group_type, {"epsilon": 1e-5, "num_groups": REQUIRED}, meaning=_group_meaning,
        arity=(3, 3), read=_read_group, since=21,
    )
)  # fmt: skip


def _rms_type(types: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    x, scale = present(types, 0, "RMSNormalization"), present(types, 1, "RMSNormalization")
    normal_axis(attrs.int("axis"), x.rank, "RMSNormalization")
    if broadcast([x.dims, scale.dims], "RMSNormalization") != x.dims:
        raise ShapeError(f"RMSNormalization: the scale {scale} does not broadcast to the input {x}")
    return (TensorType(scale.dtype, x.dims),)


def _rms_meaning(types: Types, attrs: Attrs) -> tuple[Meaning, ...]:
    x, scale = present(types, 0, "RMSNormalization"), present(types, 1, "RMSNormalization")
    axis = normal_axis(attrs.int("axis"), x.rank, "RMSNormalization")
    loops = output_loops(x.dims)
    inner = tuple(Loop(f"k{a}", x.dims[a]) for a in range(axis, x.rank))
    along = Read(0, (*map(at, loops[:axis]), *map(at, inner)))
    square = _mean(inner, Call("mul", (along, along)))
    root = Call("sqrt", (Call("add", (square, constant(attrs.float("epsilon")))),))
    ratio = Call("div", (Read(0, tuple(map(at, loops))), root))
    return (Meaning(single_axes(loops), Call("mul", (ratio, broadcast_read(1, scale, loops)))),)


def _read_rms(node: FileNode) -> Reading:
    only_attributes(node, "axis", "epsilon", "stash_type")
    if node.attrs.get("stash_type", 1) != 1:
        raise Unmodelled("RMSNormalization with another stash_type")
    return Reading({"axis": node.attrs.get("axis", -1), "epsilon": node.attrs.get("epsilon", 1e-5)}, (0, 1))


RMS_NORMALIZATION = register(
    Operator(
        "RMSNormalization", _rms_type, {"axis": -1, "epsilon": 1e-5}, linear=frozenset({1}), meaning=_rms_meaning,
        arity=(2, 2), read=_read_rms, since=23,
    )
)  # fmt: skip

# ── MeanVarianceNormalization: what is added to the deviation is that of ONNX's own function ─────────────────────


def _mean_variance_type(types: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    x = present(types, 0, "MeanVarianceNormalization")
    normal_axes(attrs.ints("axes"), x.rank, "MeanVarianceNormalization")
    return (x,)


def _mean_variance_meaning(types: Types, attrs: Attrs) -> tuple[Meaning, ...]:
    (x,) = _mean_variance_type(types, attrs)
    axes = normal_axes(attrs.ints("axes"), x.rank, "MeanVarianceNormalization")
    loops = output_loops(x.dims)

    def swept(prefix: str) -> tuple[tuple[Loop, ...], Expr]:
        inner = {a: Loop(f"{prefix}{a}", x.dims[a]) for a in axes}
        return tuple(inner.values()), Read(0, tuple(at(inner.get(a, loop)) for a, loop in enumerate(loops)))

    over, along = swept("k")
    centred = Call("sub", (along, _mean(*swept("m"))))
    deviation = Call("sqrt", (_mean(over, Call("mul", (centred, centred))),))
    least = Call("add", (deviation, constant(1e-9)))
    own = Call("sub", (Read(0, tuple(map(at, loops))), _mean(*swept("m"))))
    return (Meaning(single_axes(loops), Call("div", (own, least))),)


MEAN_VARIANCE_NORMALIZATION = register(
    Operator(
        "MeanVarianceNormalization", _mean_variance_type, {"axes": (0, 2, 3)}, meaning=_mean_variance_meaning, since=9
    )
)


# ── LpNormalization, Hardmax: their meaning is that of onnx.reference ────────────────────────────────────────────


def _along_axis_type(op: str, types: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    x = present(types, 0, op)
    normal_axis(attrs.int("axis"), x.rank, op)
    return (x,)


LP_NORMALIZATION = register(
    Operator(
        "LpNormalization", lambda types, attrs: _along_axis_type("LpNormalization", types, attrs), {"axis": -1, "p": 2}
    )
)


def _read_hardmax(node: FileNode) -> Reading:
    """Before version 13 the default axis is 1 and the input is flattened there: the same for the last axis alone."""
    only_attributes(node, "axis")
    rank = node.type(0).rank
    axis = node.attrs.get("axis", 1 if node.version < 13 else -1)
    if not isinstance(axis, int) or node.version < 13 and normal_axis(axis, rank, "Hardmax") != rank - 1:
        raise Unmodelled("Hardmax of a version before 13 over several axes")
    return Reading({"axis": normal_axis(axis, rank, "Hardmax")}, (0,))


def _write_hardmax(attrs: Attrs, types: Types, opset: int) -> Spelling:
    x = present(types, 0, "Hardmax")
    if opset < 13 and normal_axis(attrs.int("axis"), x.rank, "Hardmax") != x.rank - 1:
        raise Unspellable(f"Hardmax over axis {attrs.int('axis')} of {x} cannot be written in ONNX opset {opset}")
    return Spelling("Hardmax", {"axis": attrs.int("axis")}, (0,))


HARDMAX = register(
    Operator(
        "Hardmax", lambda types, attrs: _along_axis_type("Hardmax", types, attrs), {"axis": -1}, read=_read_hardmax,
        write=_write_hardmax,
    )
)  # fmt: skip
