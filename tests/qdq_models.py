"""Models that write their quantisation as QuantizeLinear and DequantizeLinear, made by script with fixed seeds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

Array = NDArray[np.generic]


@dataclass
class Builder:
    """Nodes in the making; `signed` activations are int8, others uint8."""

    seed: int = 0
    signed: bool = False
    nodes: list[onnx.NodeProto] = field(default_factory=list)
    stored: list[onnx.TensorProto] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.rng = np.random.default_rng(self.seed)

    def keep(self, values: Array) -> str:
        name = f"c{len(self.stored)}"
        self.stored.append(numpy_helper.from_array(np.asarray(values), name))
        return name

    def node(self, op: str, *inputs: str, **attrs: object) -> str:
        name = f"v{len(self.nodes)}"
        self.nodes.append(helper.make_node(op, inputs, [name], name=f"{op}_{name}", **attrs))
        return name

    def numbers(self, low: float, high: float, signed: bool | None = None) -> tuple[str, str]:
        """Scale and zero point of numbers between two bounds."""
        signed = self.signed if signed is None else signed
        scale = np.float32((high - low) / 255)
        zero = round(-low / float(scale)) - (128 if signed else 0)
        return self.keep(np.array(scale)), self.keep(np.array(zero, np.int8 if signed else np.uint8))

    def around(self, x: str, low: float, high: float, signed: bool | None = None) -> str:
        """A value rounded to 8 bits and back."""
        scale, zero = self.numbers(low, high, signed)
        return self.node("DequantizeLinear", self.node("QuantizeLinear", x, scale, zero), scale, zero)

    def weights(self, *dims: int, axis: int = 0, fan: int | None = None, by_channel: bool = True) -> str:
        """int8 weights, dequantised with a scale for each channel, or one."""
        values = self.rng.integers(-127, 128, dims).astype(np.int8)
        count = fan or int(np.prod(dims[1:]))
        size = (dims[axis],) if by_channel else ()
        scale = (self.rng.uniform(0.5, 1.5, size) / 73 / np.sqrt(count)).astype(np.float32)
        attrs = {"axis": axis} if by_channel else {}
        zero = self.keep(np.zeros(size, np.int8))
        return self.node("DequantizeLinear", self.keep(values), self.keep(np.asarray(scale)), zero, **attrs)

    def bias(self, count: int, quantised: bool = True) -> str:
        if not quantised:
            return self.keep(self.rng.standard_normal(count).astype(np.float32) / 4)
        values = self.rng.integers(-2000, 2000, count).astype(np.int32)
        scale = self.keep(self.rng.uniform(1e-4, 2e-4, count).astype(np.float32))
        return self.node("DequantizeLinear", self.keep(values), scale, self.keep(np.zeros(count, np.int32)), axis=0)

    def model(self, inputs: Sequence[tuple[str, Sequence[int]]], outputs: Sequence[str]) -> onnx.ModelProto:
        given = [helper.make_tensor_value_info(n, TensorProto.FLOAT, d) for n, d in inputs]
        made = [helper.make_tensor_value_info(n, TensorProto.FLOAT, None) for n in outputs]
        graph = helper.make_graph(self.nodes, "quantised", given, made, self.stored)
        whole = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 19)], ir_version=9)
        whole = onnx.shape_inference.infer_shapes(whole, strict_mode=True)
        onnx.checker.check_model(whole)
        return whole


def convnet(seed: int = 0, signed: bool = False, by_channel: bool = True) -> onnx.ModelProto:
    """Convolutions (strided, depthwise, grouped, pointwise), a residual sum, pools, a Concat, and a classifier."""
    b = Builder(seed, signed)

    def conv(
        x: str, out: int, inner: int, k: int, high: float = 4.07, low: float = -3.0, act: str = "Relu", **attrs: object
    ) -> str:
        w = b.weights(out, inner, k, k, by_channel=by_channel)
        y = b.node("Conv", x, w, b.bias(out, k > 1), pads=[k // 2] * 4, kernel_shape=[k, k], **attrs)
        if act == "Clip":
            y = b.node("Clip", y, b.keep(np.array(0, np.float32)), b.keep(np.array(3, np.float32)))
        elif act:
            y = b.node(act, y)
        return b.around(y, 0 if act in ("Relu", "Clip") else low, high)

    x = b.around("x", -3.2, 3.9)
    x = conv(x, 32, 3, 3, strides=[2, 2])
    scale, zero = b.nodes[-1].input[1:]
    x = b.node("MaxPool", x, kernel_shape=[3, 3], strides=[2, 2], pads=[1, 1, 1, 1])
    x = b.node("DequantizeLinear", b.node("QuantizeLinear", x, scale, zero), scale, zero)
    y = conv(x, 32, 32, 1, act="Clip")
    y = conv(y, 32, 1, 3, group=32)
    y = conv(y, 32, 8, 3, act="", group=4)
    x = b.around(b.node("Relu", b.node("Add", x, y)), 0, 6.13)
    left, right = conv(x, 16, 32, 1, act="Sigmoid", low=0, high=1), conv(x, 16, 32, 3, act="HardSwish", low=-0.4)
    x = b.around(b.node("Concat", left, right, axis=1), -0.43, 4.19)
    x = b.around(b.node("GlobalAveragePool", x), -0.2, 2)
    scale, zero = b.nodes[-1].input[1:]
    x = b.node("DequantizeLinear", b.node("QuantizeLinear", b.node("Flatten", x), scale, zero), scale, zero)
    w = b.weights(100, 32, by_channel=by_channel)
    y = b.around(b.node("Gemm", x, w, b.bias(100), transB=1), -3, 3)
    return b.model([("x", (1, 3, 32, 32))], [y])


def transformer(seed: int = 0, signed: bool = False, by_channel: bool = True) -> onnx.ModelProto:
    """One block: attention whose products are quantised, a layer with GELU, residual sums in float."""
    b, (rows, width, heads) = Builder(seed, signed), (24, 64, 4)

    def linear(x: str, inner: int, outer: int, low: float = -4.0, high: float = 4.5) -> str:
        w = b.weights(inner, outer, axis=1, fan=inner, by_channel=by_channel)
        return b.around(b.node("Add", b.node("MatMul", x, w), b.bias(outer, False)), low, high)

    def norm(x: str) -> str:
        scale, shift = b.rng.uniform(0.5, 1.5, width), b.rng.standard_normal(width) / 4
        return b.node("LayerNormalization", x, *(b.keep(v.astype(np.float32)) for v in (scale, shift)))

    def split(x: str, perm: Sequence[int]) -> str:
        scale, zero = b.nodes[-1].input[1:]
        shape = b.keep(np.array([1, rows, heads, width // heads], np.int64))
        x = b.node("DequantizeLinear", b.node("QuantizeLinear", b.node("Reshape", x, shape), scale, zero), scale, zero)
        x = b.node("Transpose", x, perm=perm)
        return b.node("DequantizeLinear", b.node("QuantizeLinear", x, scale, zero), scale, zero)

    given = b.around(norm("x"), -3, 4)
    q = split(linear(given, width, width), (0, 2, 1, 3))
    k = split(linear(given, width, width), (0, 2, 3, 1))
    v = split(linear(given, width, width), (0, 2, 1, 3))
    scores = b.around(b.node("MatMul", q, k), -20, 22)
    scaled = b.node("Mul", scores, b.keep(np.array(0.25, np.float32)))
    weights = b.around(b.node("Softmax", scaled, axis=-1), 0, 1, False)
    mixed = b.node("Transpose", b.around(b.node("MatMul", weights, v), -3, 3.5), perm=(0, 2, 1, 3))
    mixed = b.around(b.node("Reshape", mixed, b.keep(np.array([1, rows, width], np.int64))), -3, 3.5)
    x = b.node("Add", "x", linear(mixed, width, width))
    y = linear(b.around(norm(x), -3, 4), width, 4 * width)
    root, half, one = (b.keep(np.array(n, np.float32)) for n in (np.sqrt(2), 0.5, 1))
    gelu = b.node("Mul", b.node("Mul", y, b.node("Add", b.node("Erf", b.node("Div", y, root)), one)), half)
    y = b.node("Add", x, linear(b.around(gelu, -0.2, 4), 4 * width, width))
    return b.model([("x", (1, rows, width))], [y])
