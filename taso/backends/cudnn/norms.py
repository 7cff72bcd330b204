"""Pools, reductions, softmax and normalisations as cuDNN operations."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from taso.backends.cudnn.description import Attribute
from taso.backends.cudnn.frames import Frame, Unmapped, single, spatial
from taso.backends.cudnn.products import Stem, result_strides
from taso.backends.cudnn.sketch import Sketch
from taso.backends.lowering import PLAIN, Step
from taso.backends.places import row_major_strides, strides_of
from taso.graph.ops.pooling import pool_settings
from taso.graph.ops.reduction import reduced_axes

# ── pools ────────────────────────────────────────────────────────────────────────────────────────────────────────


def pool(s: Sketch, step: Step, followers: Sequence[Step]) -> Stem:
    """MaxPool and AveragePool as resample, which has no dilations."""
    full, frame = pool_settings(step.attrs), spatial(s.out_dims)
    kernel = full.ints("kernel_shape")
    if any(d > 1 and k > 1 for d, k in zip(full.ints("dilations"), kernel, strict=True)):
        raise Unmapped("a dilated pool")
    begin, end, extra = _pool_pads(s, step)
    counted = step.op.name == "AveragePool" and bool(step.attrs.int("count_include_pad"))
    if counted and any(extra):
        raise Unmapped("an average that counts the padding, but not what ceil_mode adds to it")
    most = step.op.name == "MaxPool"
    lifted, one = ((0,), (1,)) if len(kernel) == 1 else ((), ())
    attributes: dict[str, Attribute] = {
        "mode": "MAXPOOL" if most else "AVGPOOL_INCLUDE_PADDING" if counted else "AVGPOOL_EXCLUDE_PADDING",
        "padding_mode": "NEG_INF_PAD" if most else "ZERO_PAD", "window": one + kernel,
        "stride": one + full.ints("strides"), "pre_padding": lifted + begin, "post_padding": lifted + end,
    }  # fmt: skip
    y = s.apply("resample", {"X": _seen(s, step)}, "Y", frame.shape, result_strides(s, frame), attributes)
    return Stem(y, frame)


def _pool_pads(s: Sketch, step: Step) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Padding before and behind, and how much of the latter ceil_mode adds."""
    full, sizes = pool_settings(step.attrs), s.dims(step, 0)[2:]
    kernel, strides = full.ints("kernel_shape"), full.ints("strides")
    n = len(kernel)
    begin, end = full.ints("pads")[:n], full.ints("pads")[n:]
    if any(p < 0 for p in (*begin, *end)):
        raise Unmapped("negative pads")
    reach = [(s.out_dims[2 + a] - 1) * strides[a] + kernel[a] - sizes[a] - begin[a] for a in range(n)]
    if any(max(b, r) >= k for b, r, k in zip(begin, reach, kernel, strict=True)):
        raise Unmapped("a window of a pool that lies wholly in the padding")
    extra = tuple(max(0, r - e) for r, e in zip(reach, end, strict=True))
    return begin, tuple(e + more for e, more in zip(end, extra, strict=True)), extra


def _seen(s: Sketch, step: Step) -> int:
    """Input 0 of batch, channels and at least two more axes, as it lies."""
    index, x = s.index(step, 0), s.given(step, 0)
    dims = x.type.static_shape
    if x.constant:
        return s.constant(index, spatial(dims).shape)
    return s.data(index, *spatial(dims).placed(dims, strides_of(dims, x.layout)))


def global_pool(s: Sketch, step: Step, followers: Sequence[Step]) -> Stem:
    """GlobalAveragePool and GlobalMaxPool as a reduction of all axes behind the channels."""
    frame = spatial(s.out_dims)
    mode = "AVG" if step.op.name == "GlobalAveragePool" else "MAX"
    return Stem(_reduced(s, _seen(s, step), frame.shape, result_strides(s, frame), mode), frame)


# ── reductions ───────────────────────────────────────────────────────────────────────────────────────────────────

_REDUCTIONS = {
    "ReduceSum": "ADD", "ReduceMean": "AVG", "ReduceMax": "MAX", "ReduceMin": "MIN", "ReduceProd": "MUL",
    "ReduceL1": "NORM1", "ReduceL2": "NORM2", "ReduceSumSquare": "ADD", "ReduceLogSum": "ADD",
}  # fmt: skip


def _reduced(s: Sketch, uid: int, dims: Sequence[int], strides: Sequence[int], mode: str) -> int:
    return s.apply("reduction", {"input": uid}, "OUT_0", dims, strides, {"mode": mode})


def reduction(s: Sketch, step: Step, followers: Sequence[Step]) -> Stem:
    """A reduction over any axes; the result has them with size 1, whether it keeps them or not."""
    if followers:
        raise Unmapped("steps behind a reduction")
    index, x = s.index(step, 0), s.given(step, 0)
    dims = x.type.static_shape
    gone = reduced_axes(x.type, step.attrs, step.op.name)
    frame = single(dims, 4)
    seen, strides = frame.placed(dims, strides_of(dims, x.layout))
    front = len(seen) - len(dims)
    kept = tuple(1 if a - front in gone else d for a, d in enumerate(seen))
    if s.out.layout != PLAIN:
        raise Unmapped("a reduction whose result does not lie plainly")
    data = s.constant(index, seen) if x.constant else s.data(index, seen, strides)
    if step.op.name == "ReduceSumSquare":
        data = s.pointwise("mul", data, data)
    y = _reduced(s, data, kept, row_major_strides(kept), _REDUCTIONS[step.op.name])
    if step.op.name == "ReduceLogSum":
        y = s.pointwise("log", y)
    return Stem(y, single(kept, 4), strides=row_major_strides(kept))


# ── softmax ──────────────────────────────────────────────────────────────────────────────────────────────────────


def softmax(s: Sketch, step: Step, followers: Sequence[Step]) -> Stem:
    """exp(x − max x) / Σ exp(x − max x) by reductions and pointwise operations, or its logarithm."""
    rank = len(s.out_dims)
    axis = step.attrs.int("axis") % rank
    behind = rank if step.attrs.int("flattened") else axis + 1
    frame = Frame(s.out_dims, (tuple(range(axis)), tuple(range(axis, behind)), tuple(range(behind, rank))))
    x = s.operand(s.index(step, 0), frame)
    dims = frame.shape
    single_one = (dims[0], 1, dims[2])
    strides = row_major_strides(single_one)
    most = _reduced(s, x, single_one, strides, "MAX")
    shifted = s.pointwise("sub", x, most)
    powers = s.pointwise("exp", shifted)
    total = _reduced(s, powers, single_one, strides, "ADD")
    if step.op.name == "LogSoftmax":
        return Stem(s.pointwise("sub", shifted, s.pointwise("log", total)), frame)
    return Stem(s.pointwise("div", powers, total), frame)


# ── normalisations ───────────────────────────────────────────────────────────────────────────────────────────────


def batch_norm(s: Sketch, step: Step, followers: Sequence[Step]) -> Stem:
    """(x − mean) · (scale / √(variance + ε)) + bias by pointwise operations."""
    frame = spatial(s.out_dims) if len(s.out_dims) > 2 else Frame(s.out_dims, ((0,), (1,), (), ()))
    rank = len(frame.groups)
    x = s.operand(s.index(step, 0), frame)
    scale, bias, mean, variance = (s.vector(s.index(step, i), rank) for i in range(1, 5))
    spread = s.pointwise("rsqrt", s.pointwise("add", variance, s.scalar(step.attrs.float("epsilon"), rank)))
    factor = s.pointwise("mul", scale, spread)
    return Stem(s.pointwise("add", s.pointwise("mul", s.pointwise("sub", x, mean), factor), bias), frame)


def layer_norm(s: Sketch, step: Step, followers: Sequence[Step]) -> Stem:
    """LayerNormalization and RMSNormalization of rows: the normalised axes are the graph's channels."""
    rank = len(s.out_dims)
    axis = step.attrs.int("axis") % rank
    frame = Frame(s.out_dims, (tuple(range(axis)), tuple(range(axis, rank)), (), ()))
    size = math.prod(s.out_dims[axis:])
    inputs = {"input": s.operand(s.index(step, 0), frame)}
    for position, role in enumerate(("scale", "bias"), 1):
        if s.has(step, position):
            if s.given(step, position).type.size != size:
                raise Unmapped(f"a {role} that broadcasts over what is normalised")
            inputs[role] = s.vector(s.index(step, position), 4)
    inputs["epsilon"] = s.scalar(step.attrs.float("epsilon"), 4)
    kind = "layernorm" if step.op.name == "LayerNormalization" else "rmsnorm"
    return Stem(s.apply(kind, inputs, "Y", frame.shape, result_strides(s, frame)), frame)


def instance_norm(s: Sketch, step: Step, followers: Sequence[Step]) -> Stem:
    frame = spatial(s.out_dims)
    rank = len(frame.groups)
    inputs = {
        "input": s.operand(s.index(step, 0), frame), "scale": s.vector(s.index(step, 1), rank),
        "bias": s.vector(s.index(step, 2), rank), "epsilon": s.scalar(step.attrs.float("epsilon"), rank),
    }  # fmt: skip
    return Stem(s.apply("instancenorm", inputs, "Y", frame.shape, result_strides(s, frame)), frame)


Anchor = Callable[[Sketch, Step, Sequence[Step]], Stem]

REDUCTIONS = tuple(_REDUCTIONS)
