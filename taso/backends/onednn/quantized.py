"""Products of 8-bit integers, and the steps into them and out of them, by oneDNN.

ONNX's ConvInteger, MatMulInteger, QLinearConv and QLinearMatMul (operator set 10) on processors whose sums of 8-bit
products do not saturate (VNNI). Zero points of weights are taken off when weights are laid out, so that what is left
must fit int8; scales and zero points must be constants. All else is left to the operators' definitions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from taso.backends.base import Array
from taso.backends.lowering import LAST, PLAIN, Kernel, Layouts, Operand, Step
from taso.backends.onednn import primitives as p
from taso.backends.onednn.attributes import Attributes
from taso.backends.onednn.library import library
from taso.backends.onednn.memory import DataType, MemoryDesc
from taso.backends.onednn.places import RESULT, ArraySpec, Block, Place, describe, lay_out, plain_spec
from taso.backends.onednn.primitives import Primitive, Unimplemented, is_slow
from taso.backends.onednn.recipe import ArrayLaunch, Recipe, Supply
from taso.graph.ops.linear import conv_settings
from taso.graph.types import DType, TensorType

TYPES = {
    DType.UINT8: DataType.U8, DType.INT8: DataType.S8, DType.INT32: DataType.S32, DType.FLOAT: DataType.F32,
}  # fmt: skip
SATURATING = ("default", "sse41", "avx", "avx2", "avx512_core")
"""Instruction sets without VNNI: they add two products of 8 bits in 16."""
Integers = NDArray[np.int32]


class Host(Protocol):
    """The kernel that is designed."""

    kernel: Kernel
    layouts: Layouts
    recipe: Recipe
    supply: Supply

    def operand(self, step: Step, position: int) -> Operand: ...
    def index(self, step: Step, position: int) -> int: ...
    def has(self, step: Step, position: int) -> bool: ...
    def place(self, index: int) -> Place: ...
    def constant(self, index: int, label: str, make: Callable[[Array], Block]) -> Place: ...
    def reorder(self, source: MemoryDesc, at: Place, target: MemoryDesc, to: Place) -> None: ...
    def launch(
        self, primitive: Primitive, arguments: dict[int, Place], extra: Mapping[int, MemoryDesc] | None = None
    ) -> None: ...


@dataclass(frozen=True)
class _Positions:
    """Which inputs of an operator are what; None where it has no such input."""

    x: int
    w: int
    x_zero: int
    w_zero: int
    x_scale: int | None = None
    w_scale: int | None = None
    y_scale: int | None = None
    y_zero: int | None = None
    bias: int | None = None


_INTEGER = _Positions(0, 1, 2, 3)
QLINEAR_MATMUL = _Positions(0, 3, 2, 5, 1, 4, 6, 7)
QLINEAR_CONV = _Positions(0, 3, 2, 5, 1, 4, 6, 7, 8)


def convolution(host: Host, step: Step) -> None:
    """ConvInteger and QLinearConv: data brought into the layout with channels last, and back."""
    Product(host, step, QLINEAR_CONV if step.op.name == "QLinearConv" else _INTEGER).convolution()


def matmul(host: Host, step: Step) -> None:
    """MatMulInteger and QLinearMatMul."""
    Product(host, step, QLINEAR_MATMUL if step.op.name == "QLinearMatMul" else _INTEGER).matmul()


class Product:
    """A product of integers in the making."""

    def __init__(self, host: Host, step: Step, at: _Positions) -> None:
        if library().isa in SATURATING:
            raise Unimplemented("sums of 8-bit products may saturate on this processor")
        self.host, self.step, self.at = host, step, at
        self.x, self.w = host.operand(step, at.x), host.operand(step, at.w)
        self.out = host.kernel.results[0]
        self.scales: list[tuple[int, int]] = []
        self.zeros: list[tuple[int, int]] = []
        self.extra: dict[int, tuple[MemoryDesc, Place]] = {}

    # ── numbers beside the data ──────────────────────────────────────────────────────────────────────────────────

    def vector(self, position: int | None, default: float) -> Array:
        """The values of a constant scale or zero point, as a vector."""
        if position is None or not self.host.has(self.step, position):
            return np.array([default])
        index = self.host.index(self.step, position)
        if not self.host.kernel.operands[index].constant:
            raise Unimplemented("a scale or zero point that is no constant")
        values = self.host.supply.array(index)
        if values.ndim > 1:
            raise Unimplemented("scales and zero points of more than one axis")
        return values.reshape(-1)

    def single(self, position: int | None, default: float) -> float:
        values = self.vector(position, default)
        if values.size != 1:
            raise Unimplemented("data with more than one scale or zero point")
        return float(values[0])

    def weights(self, axis: int) -> Integers:
        """Constant weights less their zero points, those of output channels along `axis`."""
        if not self.w.constant:
            raise Unimplemented("weights that are no constants")
        values = self.host.supply.array(self.host.index(self.step, self.at.w)).astype(np.int32)
        zero = self.vector(self.at.w_zero, 0).astype(np.int32)
        if zero.size > 1:
            zero = zero.reshape([-1 if a == axis % values.ndim else 1 for a in range(values.ndim)])
        found: Integers = values - zero
        if found.size and (found.min() < -128 or found.max() > 127):
            raise Unimplemented("weights that do not fit int8 without their zero point")
        return found

    def number(self, kind: int, argument: int, values: Array, dtype: DataType, mask: int = 0) -> None:
        """Passes scales or zero points of an argument, where they say something."""
        neutral = 1 if kind == p.SCALES else 0
        if values.size == 1 and values[0] == neutral:
            return
        (self.scales if kind == p.SCALES else self.zeros).append((argument, mask))
        wanted = np.float32 if dtype == DataType.F32 else np.int32
        block = Block.of(np.ascontiguousarray(values, wanted))
        self.extra[kind | argument] = MemoryDesc.plain((values.size,), dtype), self.host.recipe.add_constant(block)

    def quantization(self, mask: int) -> None:
        """Scales and zero points; `mask` has a bit for each dimension of the weights along which scales differ."""
        self.number(p.ZERO_POINTS, p.SRC, np.array([self.single(self.at.x_zero, 0)]), DataType.S32)
        if self.at.y_scale is None:
            return
        w_scale = self.vector(self.at.w_scale, 1)
        self.number(p.SCALES, p.SRC, np.array([self.single(self.at.x_scale, 1)]), DataType.F32)
        self.number(p.SCALES, p.WEIGHTS, w_scale, DataType.F32, mask if w_scale.size > 1 else 0)
        self.number(p.SCALES, p.DST, np.array([self.single(self.at.y_scale, 1)]), DataType.F32)
        self.number(p.ZERO_POINTS, p.DST, np.array([self.single(self.at.y_zero, 0)]), DataType.S32)

    def attributes(self) -> Attributes:
        return Attributes(scales=tuple(self.scales), zero_points=tuple(self.zeros))

    def dtypes(self) -> tuple[DataType, DataType]:
        try:
            return TYPES[self.x.type.dtype], TYPES[self.out.type.dtype]
        except KeyError as missing:
            raise Unimplemented(f"products of {missing.args[0].name}") from None

    def check_sums(self, values: Integers, axis: int) -> None:
        """Raises `Unimplemented` where a sum may have more bits than float32, which zero points take oneDNN through."""
        others = tuple(a for a in range(values.ndim) if a != axis % values.ndim)
        largest = int(np.abs(values).sum(axis=others, dtype=np.int64).max(initial=0)) * 255
        if self.at.y_scale is None and self.zeros and largest >= 1 << 24:
            raise Unimplemented("sums of more than 24 bits with a zero point")

    # ── launches ─────────────────────────────────────────────────────────────────────────────────────────────────

    def launch(self, primitive: Primitive, arguments: dict[int, Place]) -> None:
        if is_slow(primitive):
            raise Unimplemented(f"oneDNN has no fast {self.step.op.name} of these sizes")
        places = {number: place for number, (_, place) in self.extra.items()}
        descs = {number: desc for number, (desc, _) in self.extra.items()}
        self.host.launch(primitive, {**arguments, **places}, descs)

    def laid_out(self, values: Integers, plain: MemoryDesc, wanted: MemoryDesc) -> Place:
        def make(_: Array) -> Block:
            return lay_out(np.ascontiguousarray(values, np.int8), plain, wanted)

        index = self.host.index(self.step, self.at.w)
        zero = self.vector(self.at.w_zero, 0)
        # behind them oneDNN keeps their sums for data of int8 and for zero points of data, of which keys say nothing
        shifted = any(argument == p.SRC for argument, _ in self.zeros)
        sums = f"for {self.x.type.dtype.name}{' with a zero point' if shifted else ''}"
        return self.host.constant(index, f"int8 less {zero.tolist()} {sums} from {plain.key} as {wanted.key}", make)

    # ── convolutions ─────────────────────────────────────────────────────────────────────────────────────────────

    def convolution(self) -> None:
        source, target = self.dtypes()
        x, w, y = (o.type.static_shape for o in (self.x, self.w, self.out))
        values, full, n = self.weights(0), conv_settings(self.w.type, self.step.attrs), len(w) - 2
        groups, pads = full.int("group"), full.ints("pads")
        plain = MemoryDesc.plain(w, DataType.S8)
        if groups > 1:
            plain = p.convolution_weights(plain, groups)
        self.quantization(3 if groups > 1 else 1)
        self.check_sums(values, 0)
        bias = self.bias(w[0])
        src, dst = describe(x, LAST, 1, source), describe(y, LAST, 1, target)
        primitive = p.convolution(
            src, plain.with_any_layout(), dst, bias=None if bias is None else bias[0], strides=full.ints("strides"),
            dilations=full.ints("dilations"), pads_begin=pads[:n], pads_end=pads[n:], groups=groups,
            attributes=self.attributes(),
        )  # fmt: skip
        given, made = self.host.recipe.add_scratch(src.size), self.host.recipe.add_scratch(dst.size)
        arguments = {p.SRC: given, p.DST: made, p.WEIGHTS: self.laid_out(values, plain, primitive.weights_desc())}
        if bias is not None:
            arguments[p.BIAS] = bias[1]
        at = self.host.place(self.host.index(self.step, self.at.x))
        self.host.reorder(describe(x, PLAIN, 1, source), at, src, given)
        self.launch(primitive, arguments)
        self.host.reorder(dst, made, describe(y, PLAIN, 1, target), Place(RESULT))

    def bias(self, channels: int) -> tuple[MemoryDesc, Place] | None:
        """Whole numbers of products of the scales of data and weights, as oneDNN adds them: in float32."""
        if self.at.bias is None or not self.host.has(self.step, self.at.bias):
            return None
        scale = self.single(self.at.x_scale, 1) * self.vector(self.at.w_scale, 1).astype(np.float64)
        values = (self.vector(self.at.bias, 0).astype(np.float64) * scale).astype(np.float32)
        place = self.host.recipe.add_constant(Block.of(np.ascontiguousarray(values)))
        return MemoryDesc.plain((channels,), DataType.F32), place

    # ── matrix products ──────────────────────────────────────────────────────────────────────────────────────────

    def matmul(self) -> None:
        source, target = self.dtypes()
        x, w, y = (o.type.static_shape for o in (self.x, self.w, self.out))
        if len(x) < 2 or len(w) != 2:
            raise Unimplemented("products of vectors, or of stacks of weights")
        values = self.weights(-1)
        rows, inner, columns = int(np.prod(x[:-1])), w[0], w[1]
        self.quantization(2)
        shift = self.without_zero(values) if self.at.y_scale is None else None
        plain = MemoryDesc.plain((inner, columns), DataType.S8)
        primitive = p.matmul(
            MemoryDesc.plain((rows, inner), source), plain.with_any_layout(), MemoryDesc.plain((rows, columns), target),
            attributes=self.attributes(),
        )  # fmt: skip
        self.launch(primitive, {
            p.SRC: self.host.place(self.host.index(self.step, self.at.x)), p.DST: Place(RESULT),
            p.WEIGHTS: self.laid_out(values, plain, primitive.weights_desc()),
        })  # fmt: skip
        if shift is not None:
            self.subtract(shift, rows, columns)

    def without_zero(self, values: Integers) -> Integers | None:
        """What the data's zero point adds to each column, where oneDNN is not to deal with it: it would in float32."""
        zero = int(self.single(self.at.x_zero, 0))
        if not zero:
            return None
        self.zeros.clear()
        self.extra.clear()
        total = values.sum(axis=0, dtype=np.int64) * zero
        # sums of 32 bits wrap, as those of the definition do
        found: Integers = total.astype(np.int32)
        return found

    def subtract(self, shift: Integers, rows: int, columns: int) -> None:
        spec = ArraySpec(Place(RESULT), np.dtype(np.int32), (rows, columns), (4 * columns, 4))

        def run(inputs: Sequence[Array], outs: Sequence[Array]) -> None:
            np.subtract(inputs[0], shift, out=outs[0])

        self.host.recipe.launches.append(ArrayLaunch("numpy:Sub", run, (spec,), (spec,)))


# ── into 8 bits and out of them ──────────────────────────────────────────────────────────────────────────────────


def quantize(host: Host, step: Step) -> None:
    """QuantizeLinear to 8 bits: round(x / scale) + zero point, halves to even, saturated."""
    x, out = host.operand(step, 0), host.kernel.results[0]
    if x.type.dtype is not DType.FLOAT or out.type.dtype not in (DType.UINT8, DType.INT8):
        raise Unimplemented("quantization of other types than float32 to 8 bits")
    scale, zero = (_spread(host, step, i, x.type, v, np.float32) for i, v in ((1, 1), (2, 0)))
    low, high = (0, 255) if out.type.dtype is DType.UINT8 else (-128, 127)

    def run(inputs: Sequence[Array], outs: Sequence[Array]) -> None:
        scaled = np.empty(inputs[0].shape, np.float32)
        np.divide(inputs[0], scale, out=scaled)
        np.rint(scaled, out=scaled)
        np.add(scaled, zero, out=scaled)
        np.clip(scaled, low, high, out=scaled)
        np.copyto(outs[0], scaled, casting="unsafe")

    _by_numpy(host, step, run)


def dequantize(host: Host, step: Step) -> None:
    """DequantizeLinear of whole numbers to float32: (x − zero point) · scale."""
    x, out = host.operand(step, 0), host.kernel.results[0]
    if x.type.dtype not in TYPES or x.type.dtype is DType.FLOAT or out.type.dtype is not DType.FLOAT:
        raise Unimplemented("other types than 8-bit and 32-bit whole numbers to float32")
    scale = _spread(host, step, 1, x.type, 1, np.float32)
    zero = _spread(host, step, 2, x.type, 0, np.int32)

    def run(inputs: Sequence[Array], outs: Sequence[Array]) -> None:
        np.multiply(np.subtract(inputs[0], zero, dtype=np.int32).astype(np.float32), scale, out=outs[0])

    _by_numpy(host, step, run)


def _spread(host: Host, step: Step, position: int, t: TensorType, default: float, dtype: type[np.generic]) -> Array:
    """A constant scale or zero point, so shaped that it broadcasts along its axis."""
    if not host.has(step, position):
        return np.full((), default, dtype)
    index = host.index(step, position)
    if not host.kernel.operands[index].constant or step.attrs.int("block_size"):
        raise Unimplemented("scales that are no constants, or those of blocks")
    values = host.supply.array(index).astype(dtype)
    if values.size == 1:
        return values.reshape(())
    axis = step.attrs.int("axis") % t.rank
    return values.reshape([-1 if a == axis else 1 for a in range(t.rank)])


def _by_numpy(host: Host, step: Step, run: Callable[[Sequence[Array], Sequence[Array]], None]) -> None:
    source = plain_spec(host.place(host.index(step, 0)), host.operand(step, 0).type)
    target = plain_spec(Place(RESULT), host.kernel.results[0].type)
    host.recipe.launches.append(ArrayLaunch(f"numpy:{step.op.name}", run, (source,), (target,)))


ANCHORS: dict[str, Callable[[Host, Step], None]] = {
    "ConvInteger": convolution, "QLinearConv": convolution, "MatMulInteger": matmul, "QLinearMatMul": matmul,
    "QuantizeLinear": quantize, "DequantizeLinear": dequantize,
}  # fmt: skip

__all__ = ["ANCHORS", "QLINEAR_CONV", "QLINEAR_MATMUL", "SATURATING", "TYPES", "Host", "Product"]
