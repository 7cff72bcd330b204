"""The operators of the zoo in PyTorch: the module that somebody would write, one call for each operator."""

from __future__ import annotations

import operator
import os
from collections.abc import Callable, Mapping
from importlib import metadata

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import helper, numpy_helper

# weights as constants, laid out for oneDNN: what its manual has torch.compile do for inference on CPUs
os.environ.setdefault("TORCHINDUCTOR_FREEZING", "1")

import torch  # noqa: E402  # reads the setting above when it is imported
from torch import fx  # noqa: E402
from torch.nn import functional  # noqa: E402

Array = NDArray[np.generic]
Attributes = Mapping[str, object]


def runner(path: str, threads: int, compiled: bool) -> tuple[Callable[[Mapping[str, Array]], dict[str, Array]], str]:
    """What runs an ONNX file whose operators are all in `MEANINGS`; raises `KeyError` for another one."""
    torch.set_num_threads(threads)
    graph = onnx.load(path).graph
    module = module_of(graph)
    run_module = torch.compile(module) if compiled else module
    inputs, outputs = [i.name for i in graph.input], [o.name for o in graph.output]
    # freezing asks for no_grad
    mode = torch.no_grad if compiled else torch.inference_mode

    def run(feeds: Mapping[str, Array]) -> dict[str, Array]:
        with mode():
            found = run_module(*(torch.from_numpy(feeds[name]) for name in inputs))
        return {name: tensor.numpy() for name, tensor in zip(outputs, found, strict=True)}

    return run, f"PyTorch {metadata.version('torch')}{', torch.compile' if compiled else ''}"


def module_of(graph: onnx.GraphProto) -> fx.GraphModule:
    """The graph as straight-line code; float tensors are its parameters, whole numbers and scalars are written in."""
    arrays = {w.name: numpy_helper.to_array(w) for w in graph.initializer}
    root, code = torch.nn.Module(), fx.Graph()
    values: dict[str, object] = {i.name: code.placeholder(i.name) for i in graph.input}
    for name, array in arrays.items():
        if array.ndim and array.dtype == np.float32:
            root.register_parameter(name, torch.nn.Parameter(torch.from_numpy(array.copy()), requires_grad=False))
            values[name] = code.get_attr(name)
        else:
            values[name] = array.tolist()
    for node in graph.node:
        attributes = {a.name: helper.get_attribute_value(a) for a in node.attribute}
        function, args, settings = MEANINGS[node.op_type](attributes, *(values[name] for name in node.input))
        found = code.call_function(function, args, settings)
        if len(node.output) == 1:
            values[node.output[0]] = found
        else:
            values.update({o: code.call_function(operator.getitem, (found, i)) for i, o in enumerate(node.output)})
    code.output(tuple(values[o.name] for o in graph.output))
    return fx.GraphModule(root, code).eval()


Call = tuple[Callable[..., object], tuple[object, ...], dict[str, object]]
"""A function, and what it is called with."""


def _call(function: Callable[..., object], *args: object, **settings: object) -> Call:
    return function, args, settings


def _pads(attributes: Attributes) -> list[int]:
    top, left, bottom, right = attributes["pads"]
    if (top, left) != (bottom, right):
        raise ValueError(f"PyTorch pads both sides alike, not by {attributes['pads']}")
    return [top, left]


def _conv(a: Attributes, x, weight, bias=None) -> Call:
    return _call(functional.conv2d, x, weight, bias, a["strides"], _pads(a), a["dilations"], a["group"])


def _batch_norm(a: Attributes, x, scale, shift, mean, variance) -> Call:
    return _call(functional.batch_norm, x, mean, variance, scale, shift, False, 0.0, a["epsilon"])


def _layer_norm(a: Attributes, x, scale, shift) -> Call:
    return _call(_normed, x, scale, shift, a["epsilon"])


def _normed(x: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor, epsilon: float) -> torch.Tensor:
    return functional.layer_norm(x, scale.shape, scale, shift, epsilon)


def _max_pool(a: Attributes, x) -> Call:
    return _call(functional.max_pool2d, x, a["kernel_shape"], a["strides"], _pads(a), 1, bool(a.get("ceil_mode")))


def _average(a: Attributes, x) -> Call:
    counted = bool(a.get("count_include_pad"))
    return _call(functional.avg_pool2d, x, a["kernel_shape"], a["strides"], _pads(a), False, counted)


def _gemm(a: Attributes, x, weight, bias) -> Call:
    if not a.get("transB"):
        raise ValueError("a layer's weight has its outputs first")
    return _call(functional.linear, x, weight, bias)


def _transpose(a: Attributes, x) -> Call:
    # exporters make one of the two by which torch.compile knows attention, and other forms of it fail to compile
    return _call(_keys, x) if a["perm"] == [0, 2, 3, 1] else _call(torch.permute, x, a["perm"])


def _keys(x: torch.Tensor) -> torch.Tensor:
    return x.permute(0, 2, 1, 3).transpose(-1, -2)


def _slice(a: Attributes, x, starts, ends, axes) -> Call:
    cut = [slice(None)] * (max(axes) + 1)
    for start, end, axis in zip(starts, ends, axes, strict=True):
        cut[axis] = slice(start, end)
    return _call(operator.getitem, x, tuple(cut))


def _pad(a: Attributes, x, pads) -> Call:
    half = len(pads) // 2
    # from the last axis to the first, before and behind
    return _call(functional.pad, x, [p for i in reversed(range(half)) for p in (pads[i], pads[i + half])])


MEANINGS: dict[str, Callable[..., Call]] = {
    "Conv": _conv,
    "BatchNormalization": _batch_norm,
    "LayerNormalization": _layer_norm,
    "MaxPool": _max_pool,
    "AveragePool": _average,
    "GlobalAveragePool": lambda a, x: _call(functional.adaptive_avg_pool2d, x, 1),
    "Gemm": _gemm,
    "MatMul": lambda a, x, y: _call(torch.matmul, x, y),
    "Add": lambda a, x, y: _call(operator.add, x, y),
    "Mul": lambda a, x, y: _call(operator.mul, x, y),
    "Div": lambda a, x, y: _call(operator.truediv, x, y),
    "Relu": lambda a, x: _call(torch.relu, x),
    "Sigmoid": lambda a, x: _call(torch.sigmoid, x),
    "Tanh": lambda a, x: _call(torch.tanh, x),
    "Erf": lambda a, x: _call(torch.erf, x),
    "Clip": lambda a, x, low, high: _call(torch.clamp, x, low, high),
    "Softmax": lambda a, x: _call(torch.softmax, x, a["axis"]),
    "Concat": lambda a, *parts: _call(torch.cat, parts, a["axis"]),
    "Split": lambda a, x, sizes: _call(torch.split, x, sizes, a["axis"]),
    "Slice": _slice,
    "Pad": _pad,
    "Reshape": lambda a, x, shape: _call(torch.reshape, x, shape),
    "Flatten": lambda a, x: _call(torch.flatten, x, 1),
    "Transpose": _transpose,
    "Squeeze": lambda a, x, axes: _call(torch.squeeze, x, tuple(axes)),
    "Expand": lambda a, x, shape: _call(torch.Tensor.expand, x, shape),
    "Gather": lambda a, x, index: _call(torch.select, x, a["axis"], index),
}
"""What the operators of the zoo mean, with the attributes that the zoo writes."""
