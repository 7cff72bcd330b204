"""Kernels that begin with DequantizeLinear or end in QuantizeLinear, on the 8-bit integers themselves.

A product of integers is added up in 32 bits, scaled, given its bias and what follows in float32, and rounded to 8 bits
as it is stored; so the numbers are those of the operators but for roundings of float32, by which one that lies between
two integers may come out as the other one. What oneDNN has no product of integers for is put together of parts: the
factors are dequantised, the operators run in float32, and the result is quantised.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from taso.backends.base import Array
from taso.backends.lowering import LAST, PLAIN, Kernel, Operand, Step
from taso.backends.onednn import primitives as p
from taso.backends.onednn import quantized
from taso.backends.onednn.attributes import Attributes, BinaryPostOp, EltwisePostOp, PostOp
from taso.backends.onednn.memory import DataType, MemoryDesc
from taso.backends.onednn.places import (
    OPERAND,
    RESULT,
    Block,
    Place,
    describe,
    layouts_alike,
    tensor_bytes,
)  # fmt: skip
from taso.backends.onednn.primitives import Primitive, Unimplemented
from taso.backends.onednn.qdq_groups import DEQUANTIZE, MOVED, QUANTIZE, VIEWS
from taso.backends.onednn.quantized import QLINEAR_CONV, QLINEAR_MATMUL, TYPES
from taso.backends.onednn.recipe import Recipe, Supply, embed
from taso.graph.evaluate import evaluate_operator
from taso.graph.ops.linear import conv_settings
from taso.graph.types import DType, TensorType


class Host(quantized.Host, Protocol):
    """The kernel that is designed."""

    @property
    def block(self) -> int: ...
    @property
    def element_dims(self) -> tuple[int, ...]: ...
    def inner(self, kernel: Kernel, supply: Supply) -> Recipe: ...
    def flattens(self, followers: Sequence[Step]) -> bool: ...
    def behind(self, followers: Sequence[Step]) -> None: ...
    def fuse(
        self, make: Callable[[Attributes], Primitive], arguments: Callable[[Primitive], dict[int, Place]],
        frame: tuple[tuple[int, ...], str], followers: Sequence[Step], extra: Mapping[int, MemoryDesc],
        finish: Callable[[], None] | None = None, posts: tuple[PostOp, ...] = (),
    ) -> int | None: ...  # fmt: skip


@dataclass(frozen=True)
class _Parts:
    """The steps of a kernel: those that dequantise, the operator, what follows it, and what quantises the result."""

    before: tuple[Step, ...]
    core: Step
    followers: tuple[Step, ...]
    last: Step | None

    @property
    def beside(self) -> tuple[int, ...]:
        """The steps that dequantise what followers read."""
        read = {-1 - i for step in self.followers for i in step.inputs if i is not None and i < 0}
        return tuple(sorted(i for i in read if i < len(self.before)))

    def source(self, position: int) -> Step | None:
        """The step that dequantises an input of the operator."""
        reference = self.core.inputs[position] if position < len(self.core.inputs) else None
        return self.before[-1 - reference] if reference is not None and reference < 0 else None


def concerns(kernel: Kernel) -> bool:
    """Whether a kernel begins with DequantizeLinear or ends in QuantizeLinear."""
    ends = {kernel.steps[0].op.name, kernel.steps[-1].op.name} if kernel.steps else set[str]()
    return bool(ends & {QUANTIZE, DEQUANTIZE}) and not any(step.op.domain for step in kernel.steps)


def build(host: Host) -> None:
    """Adds the launches of a kernel that `concerns` this file."""
    if len(host.kernel.steps) == 1:
        return _alone(host)
    parts = _parts(host.kernel)
    try:
        return _fused(host, parts)
    except Unimplemented:
        host.recipe = Recipe()
    _in_parts(host, parts)


def _parts(kernel: Kernel) -> _Parts:
    steps = kernel.steps
    count = next(i for i, s in enumerate(steps) if s.op.name != DEQUANTIZE)
    last = steps[-1] if steps[-1].op.name == QUANTIZE else None
    return _Parts(steps[:count], steps[count], steps[count + 1 : len(steps) - (last is not None)], last)


def _fused(host: Host, parts: _Parts) -> None:
    name = parts.core.op.name
    if not parts.before or parts.beside:
        raise Unimplemented("nothing is dequantised, or what is read later on")
    if name == "Conv":
        return _Between(host, parts, QLINEAR_CONV).convolution()
    if name in ("MatMul", "Gemm"):
        return _Between(host, parts, QLINEAR_MATMUL).matmul()
    if name in MOVED:
        return _moved(host, parts)
    if name == "Add" and len(parts.before) == 2:
        return _Between(host, parts, QLINEAR_MATMUL).addition()
    _elements(host, parts)


# ── one step ─────────────────────────────────────────────────────────────────────────────────────────────────────


def _alone(host: Host) -> None:
    """QuantizeLinear or DequantizeLinear with one scale, in whichever layout, by a change of type."""
    (step,), out = host.kernel.steps, host.kernel.results[0]
    index = host.index(step, 0)
    x = host.kernel.operands[index]
    whole = out if step.op.name == DEQUANTIZE else x
    if x.type.dtype not in TYPES or out.type.dtype not in TYPES or whole.type.dtype is not DType.FLOAT:
        raise Unimplemented("other types than float32, 8-bit and 32-bit whole numbers")
    scale, zero = _numbers(host, step)
    if scale is None:
        if any(not o.constant and o.layout != PLAIN for o in (x, out)):
            raise Unimplemented("scales of an axis of what does not lie plainly")
        return quantized.ANCHORS[step.op.name](host, step)
    if not layouts_alike(host.layouts, x.type, x.layout, out.layout):
        raise Unimplemented("what is quantised lies otherwise than the result")
    dims = x.type.static_shape
    source, target = (describe(dims, out.layout, host.block, TYPES[o.type.dtype]) for o in (x, out))
    _convert(host, source, host.place(index), target, Place(RESULT), scale, zero)


def _convert(
    host: Host, source: MemoryDesc, at: Place, target: MemoryDesc, to: Place, scale: float, zero: int
) -> None:
    """Launches the step into integers, or out of them."""
    side = p.DST if source.dtype == DataType.F32 else p.SRC
    primitive = p.reorder(source, target, attributes=Attributes(scales=((side, 0),), zero_points=((side, 0),)))
    single = MemoryDesc.plain((1,), DataType.F32), MemoryDesc.plain((1,), DataType.S32)
    arguments = {
        p.SRC: at, p.DST: to, p.SCALES | side: _constant(host, scale, np.float32),
        p.ZERO_POINTS | side: _constant(host, zero, np.int32),
    }  # fmt: skip
    host.launch(primitive, arguments, dict(zip((p.SCALES | side, p.ZERO_POINTS | side), single, strict=True)))


def _constant(host: Host, value: float, dtype: type[np.generic]) -> Place:
    return host.recipe.add_constant(Block.of(np.full(1, value, dtype)))


def _numbers(host: Host, step: Step) -> tuple[float | None, int]:
    """Scale and zero point of a step, None for the scale where there are several."""
    if not all(host.kernel.operands[host.index(step, i)].constant for i in (1, 2) if host.has(step, i)):
        return None, 0
    found = [
        host.supply.array(host.index(step, i)).reshape(-1) if host.has(step, i) else np.zeros(1, np.float32)
        for i in (1, 2)
    ]
    if any(v.size != 1 for v in found):
        return None, 0
    return float(found[0][0]), int(found[1][0])


# ── products and sums ────────────────────────────────────────────────────────────────────────────────────────────


class _Between(quantized.Product):
    """A product or a sum of dequantised integers, as one of the integers with their scales."""

    host: Host

    def __init__(self, host: Host, parts: _Parts, at: quantized._Positions) -> None:
        self.parts, self.core = parts, parts.core
        self.followers = parts.followers
        (x, x_scale, x_zero), (w, w_scale, w_zero) = (self._read(i) for i in range(2))
        y_scale, y_zero = (*parts.last.inputs[1:], None)[:2] if parts.last is not None else (None, None)
        bias = self.core.inputs[2] if len(self.core.inputs) > 2 else None
        linear = Step(self.core.op, self.core.attrs, (x, x_scale, x_zero, w, w_scale, w_zero, y_scale, y_zero, bias))
        super().__init__(host, linear, at)

    def _read(self, position: int) -> tuple[int | None, int | None, int | None]:
        step = self.parts.source(position)
        if step is None:
            raise Unimplemented("a factor that is not dequantised")
        found = (*step.inputs, None)[:3]
        return found[0], found[1], found[2]

    def quantization(self, mask: int) -> None:
        self.number(p.ZERO_POINTS, p.SRC, np.array([self.single(self.at.x_zero, 0)]), DataType.S32)
        w_scale = self.vector(self.at.w_scale, 1)
        self.number(p.SCALES, p.SRC, np.array([self.single(self.at.x_scale, 1)]), DataType.F32)
        self.number(p.SCALES, p.WEIGHTS, w_scale, DataType.F32, mask if w_scale.size > 1 else 0)
        if self.parts.last is not None:
            self.number(p.SCALES, p.DST, np.array([self.single(self.at.y_scale, 1)]), DataType.F32)
            self.number(p.ZERO_POINTS, p.DST, np.array([self.single(self.at.y_zero, 0)]), DataType.S32)

    def complete(self, attributes: Attributes) -> Attributes:
        return replace(attributes, scales=tuple(self.scales), zero_points=tuple(self.zeros))

    def emit(
        self, make: Callable[[Attributes], Primitive], arguments: Callable[[Primitive], dict[int, Place]],
        dims: tuple[int, ...], layout: str, finish: Callable[[], None] | None = None, posts: tuple[PostOp, ...] = (),
    ) -> None:  # fmt: skip
        """Launches the product with what follows: all of it where the result is rounded."""
        descs = {number: desc for number, (desc, _) in self.extra.items()}
        places = {number: place for number, (_, place) in self.extra.items()}

        def given(primitive: Primitive) -> dict[int, Place]:
            return {**arguments(primitive), **places}

        count = self.host.fuse(make, given, (dims, layout), self.followers, descs, finish, posts)
        if count is None or self.parts.last is not None and count < len(self.followers):
            raise Unimplemented(f"oneDNN has no fast {self.core.op.name} of these integers with all that follows")
        self.host.behind(self.followers[count:])

    # ── convolutions ─────────────────────────────────────────────────────────────────────────────────────────────

    def convolution(self) -> None:
        source, target = self.dtypes()
        host, out = self.host, self.out
        x, w, y = (o.type.static_shape for o in (self.x, self.w, out))
        values, full, n = self.weights(0), conv_settings(self.w.type, self.core.attrs), len(w) - 2
        groups, pads = full.int("group"), full.ints("pads")
        plain = MemoryDesc.plain(w, DataType.S8)
        if groups > 1:
            plain = p.convolution_weights(plain, groups)
        self.quantization(3 if groups > 1 else 1)
        src, dst = describe(x, LAST, 1, source), describe(y, LAST, 1, target)
        bias = MemoryDesc.plain((w[0],), DataType.F32) if host.has(self.step, 8) else None

        def make(attributes: Attributes) -> Primitive:
            return p.convolution(
                src, plain.with_any_layout(), dst, bias=bias, strides=full.ints("strides"),
                dilations=full.ints("dilations"), pads_begin=pads[:n], pads_end=pads[n:], groups=groups,
                attributes=self.complete(attributes),
            )  # fmt: skip

        away = not layouts_alike(host.layouts, out.type, out.layout, LAST)
        into = host.recipe.add_scratch(dst.size) if away else Place(RESULT)

        def arguments(primitive: Primitive) -> dict[int, Place]:
            given = {p.SRC: self.brought(src, source), p.DST: into}
            given[p.WEIGHTS] = self.laid_out(values, plain, primitive.weights_desc())
            if bias is not None:
                given[p.BIAS] = host.place(host.index(self.step, 8))
            return given

        def finish() -> None:
            host.reorder(dst, into, describe(y, out.layout, host.block, target), Place(RESULT))

        self.emit(make, arguments, y, LAST, finish if away else None)

    def brought(self, wanted: MemoryDesc, source: DataType) -> Place:
        """The place of the data with their channels last."""
        host, at = self.host, self.host.place(self.host.index(self.step, self.at.x))
        if layouts_alike(host.layouts, self.x.type, self.x.layout, LAST):
            return at
        scratch = host.recipe.add_scratch(wanted.size)
        host.reorder(describe(self.x.type.static_shape, self.x.layout, host.block, source), at, wanted, scratch)
        return scratch

    # ── matrix products ──────────────────────────────────────────────────────────────────────────────────────────

    def matmul(self) -> None:
        source, target = self.dtypes()
        x, w, y = (o.type.static_shape for o in (self.x, self.w, self.out))
        if not self.w.constant:
            return self.matmul_of_data(source, target)
        if len(x) < 2 or not self.host.flattens(self.followers):
            raise Unimplemented("products of vectors, or with something behind that differs by rows")
        turned = self.core.op.name == "Gemm" and self.core.attrs.int("transB")
        values = self.weights(0 if turned else -1)
        inner, columns = (w[1], w[0]) if turned else (w[0], w[1])
        plain = MemoryDesc.strided((inner, columns), DataType.S8, (1, inner) if turned else (columns, 1))
        self.quantization(2)
        bias = self.column_bias(columns)
        frame = (math.prod(x[:-1]), columns)
        src, dst = MemoryDesc.plain((frame[0], inner), source), MemoryDesc.plain(frame, target)

        def make(attributes: Attributes) -> Primitive:
            return p.matmul(src, plain.with_any_layout(), dst, bias=bias, attributes=self.complete(attributes))

        def arguments(primitive: Primitive) -> dict[int, Place]:
            given = {p.SRC: self.host.place(self.host.index(self.step, self.at.x)), p.DST: Place(RESULT)}
            given[p.WEIGHTS] = self.laid_out(values, plain, primitive.weights_desc())
            if bias is not None:
                given[p.BIAS] = self.host.place(self.host.index(self.step, 8))
            return given

        self.emit(make, arguments, frame, PLAIN)

    def column_bias(self, columns: int) -> MemoryDesc | None:
        if not self.host.has(self.step, 8):
            return None
        t = self.host.operand(self.step, 8).type
        if t.size != columns or t.dims[-1:] != (columns,):
            raise Unimplemented("a bias that is not one number for each column")
        return MemoryDesc.plain((1, columns), DataType.F32)

    def matmul_of_data(self, source: DataType, target: DataType) -> None:
        """A product of two tensors of integers; the second one is brought to int8, which all of oneDNN's are of."""
        host = self.host
        x, w, y = (o.type.static_shape for o in (self.x, self.w, self.out))
        if min(len(x), len(w)) < 2 or len(x) != len(w):
            raise Unimplemented("products of vectors, or of tensors of different ranks")
        zero = int(self.single(self.at.w_zero, 0))
        self.quantization(0)
        shift = 128 if TYPES[self.w.type.dtype] == DataType.U8 else 0
        self.number(p.ZERO_POINTS, p.WEIGHTS, np.array([zero - shift]), DataType.S32)
        src, dst = MemoryDesc.plain(x, source), MemoryDesc.plain(y, target)
        weights = MemoryDesc.plain(w, DataType.S8)

        def make(attributes: Attributes) -> Primitive:
            return p.matmul(src, weights, dst, attributes=self.complete(attributes))

        def arguments(primitive: Primitive) -> dict[int, Place]:
            at = host.place(host.index(self.step, self.at.w))
            if shift:
                signed = host.recipe.add_scratch(weights.size)
                self.to_signed(MemoryDesc.plain(w, DataType.U8), at, weights, signed, shift)
                at = signed
            return {p.SRC: host.place(host.index(self.step, self.at.x)), p.WEIGHTS: at, p.DST: Place(RESULT)}

        self.emit(make, arguments, y, PLAIN)

    def to_signed(self, source: MemoryDesc, at: Place, target: MemoryDesc, to: Place, shift: int) -> None:
        argument = p.ZERO_POINTS | p.SRC
        primitive = p.reorder(source, target, attributes=Attributes(zero_points=((p.SRC, 0),)))
        places = {p.SRC: at, p.DST: to, argument: _constant(self.host, shift, np.int32)}
        self.host.launch(primitive, places, {argument: MemoryDesc.plain((1,), DataType.S32)})

    # ── sums ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def addition(self) -> None:
        """a·s + b·t + c, and what follows, rounded as it is stored."""
        host, out = self.host, self.out
        if self.parts.last is None or not all(
            layouts_alike(host.layouts, o.type, o.layout, out.layout) and o.type.shape == out.type.shape
            for o in (self.x, self.w)
        ):
            raise Unimplemented("a sum that is not rounded, or of what lies otherwise")
        a, b, c = (self.single(i, 1) for i in (self.at.x_scale, self.at.w_scale, self.at.y_scale))
        zeros = [self.single(i, 0) for i in (self.at.x_zero, self.at.w_zero, self.at.y_zero)]
        for argument, scale in ((p.SRC_0, a), (p.SRC_1, b)):
            self.number(p.SCALES, argument, np.array([scale]), DataType.F32)
        dims = host.element_dims
        first, second, dst = (
            describe(dims, out.layout, host.block, TYPES[o.type.dtype]) for o in (self.x, self.w, out)
        )  # fmt: skip
        shift = EltwisePostOp("linear", 1.0, -(zeros[0] * a + zeros[1] * b))
        rounded = EltwisePostOp("linear", 1 / c, zeros[2])

        def make(attributes: Attributes) -> Primitive:
            posts = (*attributes.post_ops, rounded)
            return p.binary(first, second, dst, "add", attributes=self.complete(replace(attributes, post_ops=posts)))

        def arguments(_: Primitive) -> dict[int, Place]:
            read = (host.place(host.index(self.step, i)) for i in (self.at.x, self.at.w))
            return {**dict(zip((p.SRC_0, p.SRC_1), read, strict=True)), p.DST: Place(RESULT)}

        self.emit(make, arguments, dims, out.layout, posts=(shift,))


# ── functions of elements ────────────────────────────────────────────────────────────────────────────────────────


def _elements(host: Host, parts: _Parts) -> None:
    """(a − zero) · scale, then what the operators make of it, rounded as it is stored.

    By oneDNN's binary, which takes all that along behind 8-bit integers. A second integer factor is multiplied by as it
    is where it has no zero point, else it is dequantised before.
    """
    core, last, out = parts.core, parts.last, host.kernel.results[0]
    sources = {i: s for i in range(len(core.inputs)) if (s := parts.source(i)) is not None}
    whole = [i for i, s in sources.items() if host.operand(s, 0).type.shape == out.type.shape]
    if last is None or not whole:
        raise Unimplemented("what is not rounded, or of nothing as large as the result")
    (scale, zero), (unit, shift) = _numbers(host, sources[whole[0]]), _numbers(host, last)
    a = host.operand(sources[whole[0]], 0)
    if scale is None or unit is None or not layouts_alike(host.layouts, a.type, a.layout, out.layout):
        raise Unimplemented("what is quantised along an axis, or lies otherwise than the result")
    steps, posts, seconds = (core, *parts.followers), tuple[PostOp, ...](), tuple[Place, ...]()
    if len(sources) == 2:
        factor, post, place = _factor(host, core, sources[1 - whole[0]])
        scale, posts, seconds, steps = scale * factor, (post,), (place,), parts.followers
    dims = host.element_dims
    first, dst = (describe(dims, out.layout, host.block, TYPES[o.type.dtype]) for o in (a, out))
    one = MemoryDesc.plain((1,) * len(dims), DataType.F32)
    rounded = EltwisePostOp("linear", 1 / unit, shift)
    label = p.SCALES | p.SRC_0
    places = {p.SRC_0: host.place(host.index(sources[whole[0]], 0)), p.DST: Place(RESULT)}
    places |= {p.SRC_1: _constant(host, zero * scale, np.float32), label: _constant(host, scale, np.float32)}
    places |= {p.post_op_src(i): place for i, place in enumerate(seconds)}

    def make(attributes: Attributes) -> Primitive:
        given = Attributes(post_ops=(*attributes.post_ops, rounded), scales=((p.SRC_0, 0),))
        return p.binary(first, one, dst, "sub", attributes=given)

    extra = {label: MemoryDesc.plain((1,), DataType.F32)}
    if host.fuse(make, lambda _: places, (dims, out.layout), steps, extra, posts=posts) != len(steps):
        raise Unimplemented(f"oneDNN does not take all that follows behind {core.op.name} of integers")


def _factor(host: Host, core: Step, step: Step) -> tuple[float, PostOp, Place]:
    """A second factor: by what to multiply the first one's scale, and the post-op with its place."""
    operand, out, index = host.operand(step, 0), host.kernel.results[0], host.index(step, 0)
    scale, zero = _numbers(host, step)
    whole = operand.type.shape == out.type.shape
    if core.op.name != "Mul" or scale is None:
        raise Unimplemented("two dequantised inputs of other operators than Mul")
    if not layouts_alike(host.layouts, operand.type, operand.layout, out.layout if whole else PLAIN):
        raise Unimplemented("a factor that lies otherwise than the result")
    dims = ((1,) * (out.type.rank - operand.type.rank) + operand.type.static_shape)[: len(host.element_dims)]
    by_channel = len(dims) > 2 and all(d == 1 for d in dims[2:])
    layout = out.layout if whole or by_channel else PLAIN
    desc = describe(dims, layout, host.block, TYPES[operand.type.dtype])
    if not zero:
        return scale, BinaryPostOp("mul", desc), host.place(index)
    floats = describe(dims, layout, host.block)
    scratch = host.recipe.add_scratch(floats.size)
    _convert(host, desc, host.place(index), floats, scratch, scale, zero)
    return 1.0, BinaryPostOp("mul", floats), scratch


# ── what only moves ──────────────────────────────────────────────────────────────────────────────────────────────


def _moved(host: Host, parts: _Parts) -> None:
    """An operator that makes of integers what it makes of what they stand for, where these are the same ones."""
    core, last, out = parts.core, parts.last, host.kernel.results[0]
    if last is None or parts.followers:
        raise Unimplemented("what is moved is not quantised again")
    steps = [s for i in range(len(core.inputs)) if (s := parts.source(i)) is not None]
    wanted = _numbers(host, last)
    same = all(_numbers(host, s) == wanted and host.operand(s, 0).type.dtype is out.type.dtype for s in steps)
    if wanted[0] is None or not same or len(steps) != len(core.inputs):
        raise Unimplemented("what is moved is quantised otherwise")
    indices = [host.index(s, 0) for s in steps]
    if core.op.name in VIEWS:
        flat = MemoryDesc.plain((out.type.size,), TYPES[out.type.dtype])
        return host.reorder(flat, host.place(indices[0]), flat, Place(RESULT))
    if core.op.name == "Concat":
        return _concatenated(host, core, indices)
    kernel = Kernel(tuple(host.kernel.operands[i] for i in indices), (replace(core, inputs=(0,)),), (out,))
    recipe = host.inner(kernel, _PartSupply(host.supply, tuple(indices)))
    embed(host.recipe, recipe, [Place(OPERAND, i) for i in indices], [Place(RESULT)])


def _concatenated(host: Host, core: Step, indices: Sequence[int]) -> None:
    out = host.kernel.results[0]
    parts = [host.kernel.operands[i] for i in indices]
    if not all(layouts_alike(host.layouts, o.type, o.layout, out.layout) for o in parts):
        raise Unimplemented("parts of a Concat that lie otherwise than the whole")
    descs = [describe(o.type.static_shape, out.layout, host.block, TYPES[o.type.dtype]) for o in (*parts, out)]
    primitive = p.concat(descs[:-1], core.attrs.int("axis") % out.type.rank, descs[-1])
    places = {p.multiple_src(i): host.place(index) for i, index in enumerate(indices)}
    host.launch(primitive, {**places, p.DST: Place(RESULT)})


# ── kernels of parts ─────────────────────────────────────────────────────────────────────────────────────────────


@dataclass
class _PartSupply:
    """The constants of a part: those of the whole kernel, and such as a part before has made."""

    whole: Supply
    sources: tuple[int | _Made, ...]

    def array(self, operand: int) -> Array:
        source = self.sources[operand]
        return self.whole.array(source) if isinstance(source, int) else source.array

    def keep(self, operand: int, label: str, make: Callable[[Array], Block]) -> Block:
        source = self.sources[operand]
        if isinstance(source, int):
            return self.whole.keep(source, label, make)
        return self.whole.keep(source.of, f"{source.label} {label}", lambda _: make(source.array))


@dataclass(frozen=True)
class _Made:
    """A result between parts: where it is, or its values where it is a constant, made of operand number `of`."""

    operand: Operand
    place: Place = Place(OPERAND)
    of: int = 0
    label: str = ""
    values: Callable[[], Array] = lambda: np.zeros(0)

    @property
    def array(self) -> Array:
        return self.values()


def _in_parts(host: Host, parts: _Parts) -> None:
    """What followers read is dequantised first, and the rest is one kernel; else what quantises is the last part; else
    what dequantises are the first, too."""
    count, end = len(parts.before), len(host.kernel.steps)
    before, body, last = range(count), range(count, end - (parts.last is not None)), range(end)[end - 1 :]
    read = {-1 - i for i in parts.core.inputs if i is not None and i < 0}
    if parts.beside:
        cuts = [*([i] for i in parts.beside), [*(i for i in before if i in read), *range(count, end)]]
    elif parts.last is not None and parts.before:
        cuts = [[*before, *body], [*last]]
    else:
        cuts = [*([i] for i in before), [*body], *([[*last]] if parts.last is not None else [])]
    made: dict[int, _Made] = {}
    for numbers in cuts:
        _part(host, numbers, count, made)


def _part(host: Host, numbers: Sequence[int], count: int, made: dict[int, _Made]) -> None:
    """Designs the kernel of some of the steps, which reads what those before have made.

    Of the first `count`, which dequantise, operators behind the first read what was made of them, if it was.
    """
    whole, steps = host.kernel, [host.kernel.steps[i] for i in numbers]
    if len(steps) == 1 and all(i is None or i >= 0 and whole.operands[i].constant for i in steps[0].inputs):
        made[numbers[0]] = _folded(host, steps[0])
        return
    own = {number: -1 - place for place, number in enumerate(numbers)}
    sources: dict[int, int] = {}
    renumbered = []
    for number, step in zip(numbers, steps, strict=True):
        inputs: list[int | None] = []
        for i in step.inputs:
            inner = i is not None and i < 0 and -1 - i in own and (number <= count or -1 - i not in made)
            inputs.append(i if i is None else own[-1 - i] if inner else sources.setdefault(i, len(sources)))
        renumbered.append(replace(step, inputs=tuple(inputs)))
    given = [whole.operands[i] if i >= 0 else made[-1 - i].operand for i in sources]
    places = [Place(OPERAND, i) if i >= 0 else made[-1 - i].place for i in sources]
    if numbers[-1] == len(whole.steps) - 1:
        result, home = whole.results[0], Place(RESULT)
    else:
        result = _result(whole, given, renumbered)
        home = host.recipe.add_scratch(tensor_bytes(result.type))
        made[numbers[-1]] = _Made(result, home)
    kernel = Kernel(tuple(given), tuple(renumbered), (result,))
    supply = _PartSupply(host.supply, tuple(i if i >= 0 else made[-1 - i] for i in sources))
    if len(steps) == 1 and steps[0].op.name in VIEWS:
        flat = MemoryDesc.plain((result.type.size,), TYPES[result.type.dtype])
        return host.reorder(flat, places[0], flat, home)
    embed(host.recipe, host.inner(kernel, supply), places, [home])


def _result(whole: Kernel, given: Sequence[Operand], steps: Sequence[Step]) -> Operand:
    """What a part makes: a step that dequantises as its data lie, all others as the whole kernel's result does."""
    held: list[TensorType] = []
    for step in steps:
        types = [None if i is None else given[i].type if i >= 0 else held[-1 - i] for i in step.inputs]
        held += step.op.types_of(types, step.attrs)
    first = steps[0].inputs[0]
    alone = len(steps) == 1 and steps[0].op.name == DEQUANTIZE and first is not None
    return Operand(held[-1], given[first].layout if alone and first is not None else whole.results[0].layout, False)


def _folded(host: Host, step: Step) -> _Made:
    """The weights that a step dequantises."""
    whole = host.kernel
    types = [None if i is None else whole.operands[i].type for i in step.inputs]
    (result,) = step.op.types_of(types, step.attrs)

    def values() -> Array:
        arrays = [None if i is None else host.supply.array(i) for i in step.inputs]
        (found,) = evaluate_operator(step.op, step.attrs, types, (result,), arrays)
        return found

    numbers = hashlib.sha256()
    for position in (1, 2):
        if host.has(step, position):
            numbers.update(np.ascontiguousarray(host.supply.array(host.index(step, position))).tobytes())
    label = f"times {numbers.hexdigest()[:16]} along {step.attrs.int('axis')}"
    return _Made(Operand(result, PLAIN, True), of=host.index(step, 0), label=label, values=values)


__all__ = ["build", "concerns"]
