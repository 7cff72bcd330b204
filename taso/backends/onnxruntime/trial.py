"""A kernel as a model of its own, in surroundings like those that it has in a graph.

Before the kernel a sweep through memory takes its weights out of the caches, and a node writes each operand anew. Where
an operand lies with its channels in blocks that is a convolution, and where the result does it goes to one, so that
ONNX Runtime leaves it so. Nodes around the kernel are not counted when it is measured; everything else is.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from onnx import ModelProto, NodeProto, TensorProto, helper

from taso.backends.base import Array
from taso.backends.lowering import Kernel, Operand
from taso.backends.onnxruntime.lowering import OPSET, in_blocks, opset_of
from taso.graph.graph import Graph, Value
from taso.graph.onnx_export import export
from taso.graph.types import DType, TensorType

AROUND = "taso_around_"
"""How the names of the nodes around the kernel begin."""
_IR_VERSION = 10
_LEAST_SWEPT, _MOST_SWEPT = 8 << 20, 128 << 20
_WEIGHTS_SWEPT = 64
"""How many times the bytes of a kernel's weights are read before it: a model reads so much between two uses of them."""
_ROOM_BYTES = 1 << 19
"""What a kernel's operands and results may have together to lie, in a graph, where others have just been."""
_INLINE_BYTES = 1024
_RANDOM = (1 << 20) - 3
_SWEEP, _ROOM, _LEAST = f"{AROUND}sweep", f"{AROUND}room", f"{AROUND}least"
_MAX_OF_INTEGERS = 12
"""The opset from which on Max takes integers."""
_OLDEST = 9


@dataclass
class Trial:
    """A model that computes a kernel, and what to run it on.

    `weights` are values of tensors that the model says are elsewhere; `results` the types of its outputs.
    """

    model: ModelProto
    weights: dict[str, Array] = field(default_factory=dict)
    feeds: dict[str, Array] = field(default_factory=dict)
    results: dict[str, TensorType] = field(default_factory=dict)


def trial(kernel: Kernel) -> Trial:
    """The model of a kernel; that of a change of layout is made of nothing but what is around."""
    found = Trial(_kernel(kernel) if kernel.steps else bare_model([]))
    _add_sweep(found, kernel)
    for i, operand in enumerate(kernel.operands):
        if operand.constant:
            _add_constant(found, _operand(i), values_of(kernel, i))
        else:
            _add_operand(found, _operand(i), kernel, i)
    for j, result in enumerate(kernel.results):
        _add_result(found, _result(j) if kernel.steps else _operand(0), result)
    return found


def _operand(number: int) -> str:
    return f"x{number}"


def _result(number: int) -> str:
    return f"y{number}"


def _kernel(kernel: Kernel) -> ModelProto:
    """The nodes of a kernel; its inputs, weights and outputs are still to be said."""
    graph = Graph()
    graph.info.opsets = {"": max(opset_of(kernel), _OLDEST)}
    operands = [graph.add_input(_operand(i), o.type) for i, o in enumerate(kernel.operands)]
    made: list[tuple[Value, ...]] = []
    for step in kernel.steps:
        read = [None if i is None else operands[i] if i >= 0 else made[-1 - i][0] for i in step.inputs]
        made.append(graph.make(step.op, read, step.attrs).outputs)
    graph.set_outputs((_result(j), value) for j, value in enumerate(made[-1]))
    model = export(graph)
    for number, node in enumerate(model.graph.node):
        node.name = f"n{number}"
    model.ir_version = _IR_VERSION
    del model.graph.input[:], model.graph.output[:], model.graph.value_info[:]
    return model


def bare_model(nodes: Sequence[NodeProto]) -> ModelProto:
    """A model of these nodes, without inputs and outputs so far."""
    graph = helper.make_graph(nodes, "trial", [], [])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=_IR_VERSION)


# ── what is around ───────────────────────────────────────────────────────────────────────────────────────────────


def _add_sweep(found: Trial, kernel: Kernel) -> None:
    """A read of much memory, behind which weights are in no cache; and a write of as much as the kernel's own values
    use, which are laid there later: in a graph they lie where others have just been."""
    inner = found.model.graph
    weights, used = (
        sum(o.type.nbytes for o in (*kernel.operands, *kernel.results) if o.constant is constant)
        for constant in (True, False)
    )
    # what is larger than a cache comes to lie where nothing has been since the model was there the last time
    swept = _MOST_SWEPT if used > _ROOM_BYTES else min(max(_WEIGHTS_SWEPT * weights, _LEAST_SWEPT), _MOST_SWEPT)
    _add_input(found, _SWEEP, _swept()[: swept >> 12])
    _add_input(found, _ROOM, _random((used // 3 if 3 <= used <= _ROOM_BYTES else 1,)))
    nodes = [
        helper.make_node("ReduceMin", [_SWEEP], [f"{_SWEEP}_least"], _SWEEP, keepdims=0),
        helper.make_node("Max", [_ROOM, f"{_SWEEP}_least"], [f"{_ROOM}_written"], _ROOM),
        helper.make_node("ReduceMin", [f"{_ROOM}_written"], [_LEAST], _LEAST, keepdims=0),
    ]
    steps = list(inner.node)
    del inner.node[:]
    inner.node.extend([*nodes, *steps])


def _add_constant(found: Trial, name: str, values: Array) -> None:
    tensor = found.model.graph.initializer.add(name=name, dims=values.shape)
    tensor.data_type = DType.from_numpy(values.dtype).value
    if values.nbytes <= _INLINE_BYTES:
        tensor.raw_data = values.tobytes()
        return
    tensor.data_location = TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value="given along")
    found.weights[name] = values


def _add_operand(found: Trial, name: str, kernel: Kernel, operand: int) -> None:
    """An operand that nodes around the kernel write in each run, behind the sweep; of other types an input."""
    o, source = kernel.operands[operand], f"{AROUND}{name}"
    if not _written_anew(found, o.type):
        return _add_input(found, name, values_of(kernel, operand))
    if not in_blocks(o.layout):
        _put_before(found, name, [_anew(found, source, name, o.type)])
        return _add_input(found, source, values_of(kernel, operand))
    batch, channels, *size = o.type.static_shape
    few = _random((batch, 1, *size))
    _add_constant(found, f"{source}_w", _random((channels, 1, 1, 1)))
    written = _anew(found, source, f"{source}_x", o.type)
    conv = helper.make_node("Conv", [f"{source}_x", f"{source}_w"], [f"{source}_c"], f"{source}_conv")
    # behind an activation nothing of the kernel is fused with this convolution
    leaky = helper.make_node("LeakyRelu", [f"{source}_c"], [name], f"{source}_leaky")
    _put_before(found, name, [written, conv, leaky])
    return _add_input(found, source, few)


def _written_anew(found: Trial, t: TensorType) -> bool:
    """Whether there is a node that copies values of a type."""
    if t.dtype in (DType.INT32, DType.INT64):
        return found.model.opset_import[0].version >= _MAX_OF_INTEGERS
    return t.dtype in (DType.FLOAT, DType.DOUBLE)


def _anew(found: Trial, source: str, target: str, t: TensorType) -> NodeProto:
    """A node that copies a value once the sweep is over."""
    least = _LEAST
    if t.dtype is not DType.FLOAT:
        least = f"{_LEAST}_{t.dtype.name}"
        if all(least not in node.output for node in found.model.graph.node):
            cast = helper.make_node("Cast", [_LEAST], [least], least, to=t.dtype.value)
            found.model.graph.node.insert(3, cast)
    return helper.make_node("Max", [source, least], [target], f"{target}_{AROUND}max")


def _put_before(found: Trial, name: str, nodes: Sequence[NodeProto]) -> None:
    """Has `nodes` compute the value `name` before the kernel does its work; its new name marks who computes it."""
    inner, marked = found.model.graph, f"{AROUND}{name}_y"
    for node in (*inner.node, *nodes):
        node.input[:] = [marked if given == name else given for given in node.input]
        node.output[:] = [marked if given == name else given for given in node.output]
    kernel = [node for node in inner.node if AROUND not in node.name]
    around = [node for node in inner.node if AROUND in node.name]
    del inner.node[:]
    inner.node.extend([*around, *nodes, *kernel])


def _add_input(found: Trial, name: str, values: Array) -> None:
    code = DType.from_numpy(values.dtype).value
    found.model.graph.input.append(helper.make_tensor_value_info(name, code, values.shape))
    found.feeds[name] = values


def _add_result(found: Trial, name: str, result: Operand) -> None:
    """A reader of a result: an output of the model itself would be written elsewhere than results in a graph are."""
    inner, t = found.model.graph, result.type
    made = {value for node in inner.node for value in node.output}
    if name not in made and f"{AROUND}{name}_y" in made:
        name = f"{AROUND}{name}_y"
    taken = f"{AROUND}{name}_taken"
    if in_blocks(result.layout):
        batch, channels, *size = t.static_shape
        _add_constant(found, f"{taken}_w", _random((channels, 1, 1, 1)))
        inner.node.append(
            helper.make_node("Conv", [name, f"{taken}_w"], [taken], f"{taken}_conv", group=channels, strides=size)
        )
        name, t = taken, TensorType(t.dtype, (batch, channels, 1, 1))
    elif _written_anew(found, t):
        inner.node.append(_anew(found, name, taken, t))
        name = taken
    inner.output.append(helper.make_tensor_value_info(name, t.dtype.value, t.static_shape))
    found.results[name] = t


# ── values ───────────────────────────────────────────────────────────────────────────────────────────────────────


def values_of(kernel: Kernel, operand: int) -> Array:
    """Values for an operand, the same each time: indices that exist, else normal floats, ones and truth values.

    A constant of one element is the number that it most likely is.
    """
    o = kernel.operands[operand]
    dtype = o.type.dtype.numpy
    likely = _likely(kernel, operand) if o.constant and o.type.size == 1 and o.type.dtype.is_float else None
    if likely is not None:
        return np.full(o.type.static_shape, likely, dtype)
    values = _random(o.type.static_shape)
    if o.type.dtype.is_integer:
        return np.asarray(np.abs(values) * 1e3 % _least_size(kernel) if _looks_up(kernel) else values**0, dtype)
    if o.type.dtype is DType.BOOL:
        return values > 0
    if o.constant and o.type.rank < 2:
        # a variance among them must not be negative
        values = np.abs(values) + np.float32(0.5)
    return values.astype(dtype, copy=False)


def _likely(kernel: Kernel, operand: int) -> float | None:
    """The number that makes a GELU of what looks like one, and squares of powers."""
    names = [step.op.name for step in kernel.steps]
    number = next(i for i, step in enumerate(kernel.steps) if operand in step.inputs)
    if names[number] == "Pow":
        return 2.0
    if "Erf" not in names:
        return None
    if number < names.index("Erf"):
        return math.sqrt(0.5) if names[number] == "Mul" else math.sqrt(2.0)
    return {"Add": 1.0, "Mul": 0.5}.get(names[number])


def _looks_up(kernel: Kernel) -> bool:
    return any(step.op.name.startswith(("Gather", "Scatter")) for step in kernel.steps)


def _least_size(kernel: Kernel) -> int:
    return min((d for o in kernel.operands for d in o.type.static_shape if d), default=1)


@functools.lru_cache(maxsize=1)
def _pool() -> NDArray[np.float32]:
    return np.random.default_rng(0).standard_normal(_RANDOM, np.float32)


@functools.lru_cache(maxsize=1)
def _swept() -> NDArray[np.float32]:
    return _random((_MOST_SWEPT >> 12, 1 << 10))


def _random(shape: tuple[int, ...]) -> NDArray[np.float32]:
    """Normal numbers; a large array repeats what a smaller one holds."""
    return np.resize(_pool(), math.prod(shape)).reshape(shape)
