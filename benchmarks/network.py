"""What the models of the zoo are written with: ONNX nodes on named values, weights from one seeded generator."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

OPSET = 17
IR_VERSION = 8
RECTIFIED = math.sqrt(2)
"""Gain of weights behind a rectifier, which halves the mean square (He et al. 2015)."""

Array = NDArray[np.generic]


class Network:
    """A model as it is written: every method adds an operator and gives the name of what it computes.

    `channels` knows the number of channels (of features in the last axis, for sequences) of each value. Weights are
    float32; their scales keep values near 1 where those that come in are.
    """

    def __init__(self, name: str, batch: int, seed: int) -> None:
        self.name = name
        self.batch = batch
        self.channels: dict[str, int] = {}
        self._rng = np.random.default_rng(seed)
        self._nodes: list[onnx.NodeProto] = []
        self._weights: list[onnx.TensorProto] = []
        self._inputs: list[onnx.ValueInfoProto] = []

    # ── what goes in and what comes out ──────────────────────────────────────────────────────────────────────────

    def input(self, name: str, shape: Sequence[int], channels: int) -> str:
        self._inputs.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, list(shape)))
        self.channels[name] = channels
        return name

    def image(self, size: int) -> str:
        """Pictures of three channels, `size` × `size`."""
        return self.input("image", (self.batch, 3, size, size), 3)

    def model(self, **outputs: Sequence[int]) -> onnx.ModelProto:
        """The model that gives these values, with their shapes."""
        infos = [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in outputs.items()]
        graph = helper.make_graph(self._nodes, self.name, self._inputs, infos, self._weights)
        opsets = [helper.make_opsetid("", OPSET)]
        return helper.make_model(graph, producer_name="taso benchmarks", opset_imports=opsets, ir_version=IR_VERSION)

    def scores(self, x: str) -> onnx.ModelProto:
        """The model that gives `x`, a row of numbers for each picture."""
        return self.model(**{x: (self.batch, self.channels[x])})

    # ── weights ──────────────────────────────────────────────────────────────────────────────────────────────────

    def weight(self, shape: Sequence[int], deviation: float, mean: float = 0.0) -> str:
        values = self._rng.standard_normal(tuple(shape), np.float32)
        values *= np.float32(deviation)
        values += np.float32(mean)
        return self.constant(values)

    def constant(self, values: Array) -> str:
        name = f"w{len(self._weights)}"
        self._weights.append(numpy_helper.from_array(values, name))
        return name

    def number(self, value: float) -> str:
        return self.constant(np.asarray(value, np.float32))

    def whole(self, *values: int) -> str:
        return self.constant(np.asarray(values, np.int64))

    # ── operators ────────────────────────────────────────────────────────────────────────────────────────────────

    def apply(self, kind: str, *inputs: str, outputs: int = 1, **attributes: object) -> str:
        """An operator whose (first) output has as many channels as its first input."""
        return self.several(kind, *inputs, outputs=outputs, **attributes)[0]

    def several(self, kind: str, *inputs: str, outputs: int, **attributes: object) -> list[str]:
        first = sum(len(node.output) for node in self._nodes)
        names = [f"v{first + i}" for i in range(outputs)]
        node = helper.make_node(kind, inputs, names, name=f"{kind}_{len(self._nodes)}")
        node.attribute.extend(helper.make_attribute(name, value) for name, value in sorted(attributes.items()))
        self._nodes.append(node)
        self.channels.update({name: self.channels.get(inputs[0], 0) for name in names})
        return names

    def conv(
        self, x: str, channels: int, window: int | tuple[int, int], stride: int = 1, pad: int | tuple[int, int] = 0,
        groups: int = 1, bias: bool = False, gain: float = RECTIFIED,
    ) -> str:  # fmt: skip
        """A convolution; `window` and `pad` are one number, or height and width."""
        high, wide = (window, window) if isinstance(window, int) else window
        top, left = (pad, pad) if isinstance(pad, int) else pad
        fan = self.channels[x] // groups * high * wide
        inputs = [x, self.weight((channels, self.channels[x] // groups, high, wide), gain / math.sqrt(fan))]
        if bias:
            inputs.append(self.weight((channels,), 0.1))
        y = self.apply(
            "Conv", *inputs, kernel_shape=[high, wide], strides=[stride, stride], pads=[top, left, top, left],
            group=groups, dilations=[1, 1],
        )  # fmt: skip
        self.channels[y] = channels
        return y

    def norm(self, x: str, gain: float = 1.0, epsilon: float = 1e-5) -> str:
        """Batch normalization as a trained model has it: statistics near (0, 1), a scale near `gain`, a small shift."""
        count = self.channels[x]
        scale, shift = self.weight((count,), 0.1 * gain, gain), self.weight((count,), 0.1 * gain)
        mean = self.weight((count,), 0.1)
        variance = self.constant(self._rng.uniform(0.8, 1.2, count).astype(np.float32))
        return self.apply("BatchNormalization", x, scale, shift, mean, variance, epsilon=epsilon)

    def layer_norm(self, x: str, epsilon: float) -> str:
        """Over the last axis."""
        count = self.channels[x]
        scale, shift = self.weight((count,), 0.1, 1.0), self.weight((count,), 0.1)
        return self.apply("LayerNormalization", x, scale, shift, axis=-1, epsilon=epsilon)

    def relu(self, x: str) -> str:
        return self.apply("Relu", x)

    def silu(self, x: str) -> str:
        return self.apply("Mul", x, self.apply("Sigmoid", x))

    def gelu(self, x: str) -> str:
        """By the error function, in the five operators that exporters write."""
        error = self.apply("Erf", self.apply("Div", x, self.number(math.sqrt(2))))
        return self.apply("Mul", self.apply("Mul", x, self.apply("Add", error, self.number(1))), self.number(0.5))

    def add(self, x: str, y: str) -> str:
        return self.apply("Add", x, y)

    def concat(self, *parts: str) -> str:
        y = self.apply("Concat", *parts, axis=1)
        self.channels[y] = sum(self.channels[p] for p in parts)
        return y

    def max_pool(self, x: str, window: int, stride: int, pad: int = 0, ceil: bool = False) -> str:
        return self.apply(
            "MaxPool", x, kernel_shape=[window] * 2, strides=[stride] * 2, pads=[pad] * 4, ceil_mode=int(ceil)
        )

    def average(self, x: str, window: int, stride: int, pad: int = 0, counts_pad: bool = False) -> str:
        return self.apply(
            "AveragePool", x, kernel_shape=[window] * 2, strides=[stride] * 2, pads=[pad] * 4,
            count_include_pad=int(counts_pad),
        )  # fmt: skip

    def classifier(self, x: str, classes: int = 1000) -> str:
        """Means over the picture, and the last layer."""
        return self.dense(self.apply("Flatten", self.apply("GlobalAveragePool", x), axis=1), classes)

    def dense(self, x: str, features: int, gain: float = 1.0) -> str:
        """A layer of a classifier, on rows."""
        count = self.channels[x]
        weight = self.weight((features, count), gain / math.sqrt(count))
        y = self.apply("Gemm", x, weight, self.weight((features,), 0.1), transB=1)
        self.channels[y] = features
        return y

    def linear(self, x: str, features: int, gain: float = 1.0) -> str:
        """A layer on the last axis of a sequence: product and bias, as exporters write it."""
        count = self.channels[x]
        y = self.apply("MatMul", x, self.weight((count, features), gain / math.sqrt(count)))
        self.channels[y] = features
        return self.apply("Add", y, self.weight((features,), 0.1))

    def reshape(self, x: str, *shape: int) -> str:
        return self.apply("Reshape", x, self.whole(*shape))

    def transpose(self, x: str, *order: int) -> str:
        return self.apply("Transpose", x, perm=list(order))
