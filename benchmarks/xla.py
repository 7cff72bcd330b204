"""The operators of the zoo in TensorFlow, compiled as one program by XLA."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from importlib import metadata

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import helper, numpy_helper

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import tensorflow as tf  # noqa: E402  # reads the level above when it is imported

Array = NDArray[np.generic]
Attributes = Mapping[str, object]
Meaning = Callable[..., object]


def runner(path: str, threads: int) -> tuple[Callable[[Mapping[str, Array]], dict[str, Array]], str]:
    """What runs an ONNX file whose operators are all in `MEANINGS`; raises `KeyError` for another one."""
    tf.config.threading.set_intra_op_parallelism_threads(threads)
    tf.config.threading.set_inter_op_parallelism_threads(1)
    graph = onnx.load(path).graph
    arrays = {w.name: numpy_helper.to_array(w) for w in graph.initializer}
    # float tensors stay outside of the program, which would otherwise hold them once more
    variables = {k: tf.Variable(a, trainable=False) for k, a in arrays.items() if a.dtype == np.float32 and a.ndim}
    inputs, outputs = [i.name for i in graph.input], [o.name for o in graph.output]

    @tf.function(jit_compile=True, autograph=False)
    def program(*given):
        values = {**arrays, **variables, **dict(zip(inputs, given, strict=True))}
        for node in graph.node:
            attributes = {a.name: helper.get_attribute_value(a) for a in node.attribute}
            found = MEANINGS[node.op_type](attributes, *(values[name] for name in node.input))
            results = found if isinstance(found, list) else [found]
            values.update(zip(node.output, results, strict=True))
        return [values[name] for name in outputs]

    def run(feeds: Mapping[str, Array]) -> dict[str, Array]:
        found = program(*(tf.convert_to_tensor(feeds[name]) for name in inputs))
        return {name: tensor.numpy() for name, tensor in zip(outputs, found, strict=True)}

    return run, f"TensorFlow {metadata.version(tf_package())}, XLA"


def tf_package() -> str:
    """Under which of its names TensorFlow is installed."""
    return next(n for n in ("tensorflow", "tensorflow-cpu") if any(True for _ in metadata.distributions(name=n)))


def _padded(x, attributes: Attributes, value: float):
    """x with its pads (and what rounding up asks for) written out; the window and strides are those of NCHW."""
    (high, wide), strides = attributes["kernel_shape"], attributes["strides"]
    top, left, bottom, right = attributes["pads"]
    if attributes.get("ceil_mode"):
        bottom += -(x.shape[2] + top + bottom - high) % strides[0]
        right += -(x.shape[3] + left + right - wide) % strides[1]
    if not (top or left or bottom or right):
        return x
    return tf.pad(x, [[0, 0], [0, 0], [top, bottom], [left, right]], constant_values=value)


def _conv(attributes: Attributes, x, weight, bias=None):
    top, left, bottom, right = attributes["pads"]
    pads = [[0, 0], [0, 0], [top, bottom], [left, right]]
    kernel = tf.transpose(weight, [2, 3, 1, 0])
    y = tf.nn.conv2d(x, kernel, attributes["strides"], pads, "NCHW", attributes["dilations"])
    return y if bias is None else y + tf.reshape(bias, [1, -1, 1, 1])


def _batch_norm(attributes: Attributes, x, scale, shift, mean, variance):
    factor = scale * tf.math.rsqrt(variance + attributes["epsilon"])
    rows = (tf.reshape(t, [1, -1] + [1] * (len(x.shape) - 2)) for t in (factor, shift - mean * factor))
    return x * next(rows) + next(rows)


def _layer_norm(attributes: Attributes, x, scale, shift):
    mean, variance = tf.nn.moments(x, [-1], keepdims=True)
    return (x - mean) * tf.math.rsqrt(variance + attributes["epsilon"]) * scale + shift


def _max_pool(attributes: Attributes, x):
    x = _padded(x, attributes, -np.inf)
    return tf.nn.max_pool2d(x, attributes["kernel_shape"], attributes["strides"], "VALID", "NCHW")


def _average(attributes: Attributes, x):
    window, strides = attributes["kernel_shape"], attributes["strides"]
    y = tf.nn.avg_pool2d(_padded(x, attributes, 0.0), window, strides, "VALID", "NCHW")
    if attributes.get("count_include_pad") or not any(attributes["pads"]):
        return y
    ones = _padded(tf.ones([1, 1, *x.shape[2:]]), attributes, 0.0)
    return y / tf.nn.avg_pool2d(ones, window, strides, "VALID", "NCHW")


def _gemm(attributes: Attributes, x, weight, bias):
    return tf.matmul(x, weight, transpose_b=bool(attributes.get("transB"))) + bias


def _slice(attributes: Attributes, x, starts, ends, axes):
    cut = [slice(None)] * len(x.shape)
    for start, end, axis in zip(starts, ends, axes, strict=True):
        cut[axis] = slice(int(start), min(int(end), x.shape[axis]))
    return x[tuple(cut)]


def _pad(attributes: Attributes, x, pads):
    rank = len(x.shape)
    return tf.pad(x, [[int(pads[i]), int(pads[i + rank])] for i in range(rank)])


def _split(attributes: Attributes, x, sizes):
    return list(tf.split(x, [int(s) for s in sizes], attributes["axis"]))


MEANINGS: dict[str, Meaning] = {
    "Conv": _conv,
    "BatchNormalization": _batch_norm,
    "LayerNormalization": _layer_norm,
    "MaxPool": _max_pool,
    "AveragePool": _average,
    "GlobalAveragePool": lambda a, x: tf.reduce_mean(x, [2, 3], keepdims=True),
    "Gemm": _gemm,
    "MatMul": lambda a, x, y: tf.matmul(x, y),
    "Add": lambda a, x, y: x + y,
    "Mul": lambda a, x, y: x * y,
    "Div": lambda a, x, y: x / y,
    "Relu": lambda a, x: tf.nn.relu(x),
    "Sigmoid": lambda a, x: tf.sigmoid(x),
    "Tanh": lambda a, x: tf.tanh(x),
    "Erf": lambda a, x: tf.math.erf(x),
    "Clip": lambda a, x, low, high: tf.clip_by_value(x, low, high),
    "Softmax": lambda a, x: tf.nn.softmax(x, a["axis"]),
    "Concat": lambda a, *parts: tf.concat(parts, a["axis"]),
    "Split": _split,
    "Slice": _slice,
    "Pad": _pad,
    "Reshape": lambda a, x, shape: tf.reshape(x, shape),
    "Flatten": lambda a, x: tf.reshape(x, [x.shape[0], -1]),
    "Transpose": lambda a, x: tf.transpose(x, a["perm"]),
    "Squeeze": lambda a, x, axes: tf.squeeze(x, [int(i) for i in axes]),
    "Expand": lambda a, x, shape: tf.broadcast_to(x, shape),
    "Gather": lambda a, x, indices: tf.gather(x, indices, axis=a["axis"]),
}
"""What the operators of the zoo mean, with the attributes that the zoo writes."""
