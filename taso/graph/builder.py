"""Graphs built by hand and asked about, through the interface of TASO 0.1.0."""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TypedDict, Union

import numpy as np
from numpy.typing import NDArray

from taso.graph.errors import GraphError
from taso.graph.graph import Graph, Node, Value
from taso.graph.operator import Array, AttrValue, Operator, Weight
from taso.graph.ops import elementwise, linear, movement, normalization, pooling, reduction, structure
from taso.graph.ops.common import normal_axes, normal_axis
from taso.graph.ops.windows import same_pads
from taso.graph.types import Dim, DType, SymDim, TensorType

Numbers = Union[Sequence[float], NDArray[np.generic]]

ACTIVATIONS: dict[str, Operator | None] = {
    "NONE": None, "SIGMOID": elementwise.SIGMOID, "RELU": elementwise.RELU, "TANH": elementwise.TANH,
}  # fmt: skip
PADDINGS = ("SAME", "VALID")
DATATYPES = {d.name: d for d in DType if d.is_float or d.is_integer or d is DType.BOOL}
DEFAULT_EPSILON = 1e-5
WEIGHT_SEED = 2019


class OperatorHandle(TypedDict):
    """An operator as scripts see it; `guid` is its number, `node` the node itself."""

    guid: int
    node: Node


class Edge(TypedDict):
    """Output `srcIdx` of `srcOp` is input `dstIdx` of `dstOp`."""

    srcOp: OperatorHandle
    dstOp: OperatorHandle
    srcIdx: int
    dstIdx: int


class GraphBuilder(Graph):
    """A graph with TASO's methods to build it and to look at it.

    Every method that takes tensors adds one operator (two with an `activation`) and returns its output. All raise
    `GraphError`, naming the argument at fault, and leave the graph as it was.
    """

    def __init__(self) -> None:
        super().__init__()
        self.prints_measurements = False
        self._random_weights = 0

    def transfer(self, fresh: Graph, mapping: Mapping[Value, Value]) -> None:
        super().transfer(fresh, mapping)
        if isinstance(fresh, GraphBuilder):
            fresh.prints_measurements = self.prints_measurements
            fresh._random_weights = self._random_weights

    def print_measurements(self) -> None:
        """Lets every cost that is measured for this graph be printed."""
        self.prints_measurements = True

    # ── inputs and weights ───────────────────────────────────────────────────────────────────────────────────────

    def new_input(self, *, dims: Sequence[int | str], name: str | None = None, dtype: str = "FLOAT") -> Value:
        """A graph input of shape `dims` (a string is a symbolic dimension).

        Without a `name` it is called `input`, `input_1`, … `dtype` is one of ONNX's names, such as "FLOAT".
        """
        shape = tuple(_dimension("new_input", d) for d in _sequence("new_input", "dims", dims))
        if name is not None and (not isinstance(name, str) or not name):
            raise GraphError(f"new_input: 'name' must be a string that is not empty, not {name!r}")
        element = _datatype("new_input", "dtype", dtype)
        return self.add_input(self._free_input_name() if name is None else name, TensorType(element, shape))

    def _free_input_name(self) -> str:
        taken, number = set(self.input_names), 0
        while (name := f"input_{number}" if number else "input") in taken:
            number += 1
        return name

    def new_weight(self, *, dims: Sequence[int], data: Numbers | None = None, dtype: str = "FLOAT") -> Value:
        """A constant tensor of shape `dims`, converted to `dtype`.

        `data` is a NumPy array of that shape, or all its elements as one flat sequence in row-major order. None draws
        from a normal distribution with standard deviation √(2 / fan-in) (He et al. 2015), the same for the same
        position among the random weights of a graph; a vector gets absolute values, since it may serve as a variance.
        """
        shape = _integers("new_weight", "dims", dims)
        if any(d < 0 for d in shape):
            raise GraphError(f"new_weight: 'dims' must not be negative, but is {shape}")
        t = TensorType(_datatype("new_weight", "dtype", dtype), shape)
        if data is not None:
            return self.add_weight(Weight(t, _filled(data, t)))
        number = self._random_weights
        self._random_weights += 1
        return self.add_weight(Weight(t, partial(random_weight, t, number)))

    # ── element by element ───────────────────────────────────────────────────────────────────────────────────────

    def add(self, x: Value, y: Value) -> Value:
        """x + y, broadcast as NumPy does (ONNX Add)."""
        return self._binary("add", elementwise.ADD, x, y)

    def sub(self, *, x: Value, y: Value) -> Value:
        """x − y, broadcast (ONNX Sub)."""
        return self._binary("sub", elementwise.SUB, x, y)

    def mul(self, x: Value, y: Value) -> Value:
        """x · y element by element, broadcast (ONNX Mul)."""
        return self._binary("mul", elementwise.MUL, x, y)

    def div(self, *, x: Value, y: Value) -> Value:
        """x / y, broadcast (ONNX Div: integers round towards zero)."""
        return self._binary("div", elementwise.DIV, x, y)

    def max(self, x: Value, y: Value) -> Value:
        """The larger of x and y, broadcast (ONNX Max)."""
        return self._binary("max", elementwise.MAX, x, y)

    def min(self, x: Value, y: Value) -> Value:
        """The smaller of x and y, broadcast (ONNX Min)."""
        return self._binary("min", elementwise.MIN, x, y)

    def equal(self, *, x: Value, y: Value) -> Value:
        """x = y as BOOL, broadcast (ONNX Equal)."""
        return self._binary("equal", elementwise.EQUAL, x, y)

    def greater(self, *, x: Value, y: Value) -> Value:
        """x > y as BOOL, broadcast (ONNX Greater)."""
        return self._binary("greater", elementwise.GREATER, x, y)

    def less(self, *, x: Value, y: Value) -> Value:
        """x < y as BOOL, broadcast (ONNX Less)."""
        return self._binary("less", elementwise.LESS, x, y)

    def prelu(self, *, x: Value, slope: Value) -> Value:
        """x where x ≥ 0, slope · x below; `slope` broadcasts to x (ONNX PRelu)."""
        inputs = (self._own("prelu", "x", x), self._own("prelu", "slope", slope))
        return self._node(elementwise.PRELU, inputs)

    def relu(self, input: Value, inplace: bool = False) -> Value:
        """max(input, 0) (ONNX Relu). `inplace` is without effect: tensors never change."""
        return self._unary("relu", elementwise.RELU, input)

    def sigmoid(self, input: Value, inplace: bool = False) -> Value:
        """1 / (1 + exp(−input)) (ONNX Sigmoid). `inplace` is without effect."""
        return self._unary("sigmoid", elementwise.SIGMOID, input)

    def tanh(self, input: Value, inplace: bool = False) -> Value:
        """The hyperbolic tangent (ONNX Tanh). `inplace` is without effect."""
        return self._unary("tanh", elementwise.TANH, input)

    def leakyrelu(self, input: Value, alpha: float, inplace: bool = False) -> Value:
        """input where it is ≥ 0, alpha · input below (ONNX LeakyRelu). `inplace` is without effect."""
        attrs = {"alpha": _number("leakyrelu", "alpha", alpha)}
        return self._unary("leakyrelu", elementwise.LEAKY_RELU, input, attrs)

    def exp(self, *, input: Value) -> Value:
        """e to the power of `input` (ONNX Exp)."""
        return self._unary("exp", elementwise.EXP, input)

    def log(self, *, input: Value) -> Value:
        """The natural logarithm (ONNX Log)."""
        return self._unary("log", elementwise.LOG, input)

    def sqrt(self, *, input: Value) -> Value:
        """The square root (ONNX Sqrt)."""
        return self._unary("sqrt", elementwise.SQRT, input)

    def ceil(self, *, input: Value) -> Value:
        """The next integer upwards (ONNX Ceil)."""
        return self._unary("ceil", elementwise.CEIL, input)

    def round(self, input: Value) -> Value:
        """The nearest integer, halves to the even one (ONNX Round)."""
        return self._unary("round", elementwise.ROUND, input)

    def logical_not(self, *, input: Value) -> Value:
        """Not `input`, which is BOOL (ONNX Not)."""
        own = self._own("logical_not", "input", input)
        if own.type.dtype is not DType.BOOL:
            raise GraphError(f"logical_not: 'input' must be BOOL, not {own.type.dtype.name}")
        return self._node(elementwise.NOT, (own,))

    def cast(self, *, input: Value, datatype: str) -> Value:
        """`input` with elements of type `datatype`: "FLOAT", "DOUBLE", "FLOAT16", "INT64", … (ONNX Cast)."""
        return self._unary("cast", structure.CAST, input, {"to": _datatype("cast", "datatype", datatype)})

    def identity(self, input: Value) -> Value:
        """`input` itself (ONNX Identity)."""
        return self._unary("identity", structure.IDENTITY, input)

    def dropout(self, input: Value, rate: float = 0) -> Value:
        """Dropout at inference: `input` itself (ONNX Dropout), whatever the `rate` (at least 0, below 1)."""
        ratio = _number("dropout", "rate", rate)
        if not 0 <= ratio < 1:
            raise GraphError(f"dropout: 'rate' must be at least 0 and below 1, not {rate!r}")
        return self._unary("dropout", structure.DROPOUT, input, {"ratio": ratio})

    # ── products, convolutions, pools, normalisation ─────────────────────────────────────────────────────────────

    def matmul(self, input: Value, weight: Value, activation: str = "NONE") -> Value:
        """The matrix product, batched over leading axes that broadcast (ONNX MatMul)."""
        follower = _activation("matmul", activation)
        inputs = (self._own("matmul", "input", input), self._own("matmul", "weight", weight))
        return self._activated(self._node(linear.MATMUL, inputs), follower)

    def conv2d(
        self, *, input: Value, weight: Value, strides: Sequence[int], padding: str, activation: str = "NONE"
    ) -> Value:
        """A convolution over data N×C×H×W (ONNX Conv).

        `weight` is O×(C / groups)×kH×kW; the number of groups is what its second size makes it. `padding` is "VALID"
        (none) or "SAME": ⌈size / stride⌉ outputs, the larger half of an odd total first (ONNX SAME_LOWER).
        """
        follower = _activation("conv2d", activation)
        x, w = self._image("conv2d", "input", input), self._image("conv2d", "weight", weight)
        kernel = w.type.with_shape(w.type.dims[2:]).static_shape
        attrs = _window("conv2d", x, kernel, strides, padding)
        return self._activated(self._node(linear.CONV, (x, w), {**attrs, "group": _groups(x, w)}), follower)

    def maxpool2d(
        self, input: Value, kernels: Sequence[int], strides: Sequence[int], padding: str, activation: str = "NONE"
    ) -> Value:
        """The maximum over windows of data N×C×H×W (ONNX MaxPool); `padding` as in `conv2d`."""
        return self._pool("maxpool2d", pooling.MAX_POOL, input, kernels, strides, padding, activation)

    def avgpool2d(
        self, *, input: Value, kernels: Sequence[int], strides: Sequence[int], padding: str, activation: str = "NONE"
    ) -> Value:
        """The mean over windows of data N×C×H×W, padding not counted (ONNX AveragePool); `padding` as in `conv2d`."""
        return self._pool("avgpool2d", pooling.AVERAGE_POOL, input, kernels, strides, padding, activation)

    def batchnorm(
        self, input: Value, scale: Value, bias: Value, mean: Value, var: Value, epsilon: float = -1
    ) -> Value:
        """scale · (input − mean) / √(var + epsilon) + bias per channel (ONNX BatchNormalization at inference).

        A negative `epsilon` stands for the default, 1e-5.
        """
        given = _number("batchnorm", "epsilon", epsilon)
        named = (("input", input), ("scale", scale), ("bias", bias), ("mean", mean), ("var", var))
        inputs = tuple(self._own("batchnorm", name, value) for name, value in named)
        attrs = {"epsilon": DEFAULT_EPSILON if given < 0 else given}
        return self._node(normalization.BATCH_NORMALIZATION, inputs, attrs)

    # ── reductions ───────────────────────────────────────────────────────────────────────────────────────────────

    def reduce_max(self, *, input: Value, axes: Sequence[int], keepdims: bool = True) -> Value:
        """The maximum over `axes` (ONNX ReduceMax)."""
        return self._reduction("reduce_max", reduction.REDUCE_MAX, input, axes, keepdims)

    def reduce_mean(self, *, input: Value, axes: Sequence[int], keepdims: bool = True) -> Value:
        """The mean over `axes` (ONNX ReduceMean)."""
        return self._reduction("reduce_mean", reduction.REDUCE_MEAN, input, axes, keepdims)

    def reduce_min(self, *, input: Value, axes: Sequence[int], keepdims: bool = True) -> Value:
        """The minimum over `axes` (ONNX ReduceMin)."""
        return self._reduction("reduce_min", reduction.REDUCE_MIN, input, axes, keepdims)

    def reduce_prod(self, *, input: Value, axes: Sequence[int], keepdims: bool = True) -> Value:
        """The product over `axes` (ONNX ReduceProd)."""
        return self._reduction("reduce_prod", reduction.REDUCE_PROD, input, axes, keepdims)

    def reduce_sum(self, *, input: Value, axes: Sequence[int], keepdims: bool = True) -> Value:
        """The sum over `axes` (ONNX ReduceSum)."""
        return self._reduction("reduce_sum", reduction.REDUCE_SUM, input, axes, keepdims)

    def reduce_argmax(self, *, input: Value, axes: Sequence[int], keepdims: bool = True) -> Value:
        """Where along its one axis the maximum is, the first of several, as INT64 (ONNX ArgMax)."""
        return self._arg("reduce_argmax", reduction.ARG_MAX, input, axes, keepdims)

    def reduce_argmin(self, *, input: Value, axes: Sequence[int], keepdims: bool = True) -> Value:
        """Where along its one axis the minimum is, the first of several, as INT64 (ONNX ArgMin)."""
        return self._arg("reduce_argmin", reduction.ARG_MIN, input, axes, keepdims)

    # ── shapes and moves ─────────────────────────────────────────────────────────────────────────────────────────

    def concat(self, axis: int, inputs: Sequence[Value]) -> Value:
        """`inputs` one after the other along `axis` (ONNX Concat)."""
        given = _sequence("concat", "inputs", inputs)
        if not given:
            raise GraphError("concat: 'inputs' is empty")
        own = [self._own("concat", f"inputs[{i}]", value) for i, value in enumerate(given)]
        return self._node(movement.CONCAT, own, {"axis": _axis("concat", axis, own[0])})

    def split(self, input: Value, axis: int, sizes: Sequence[int] | int) -> list[Value]:
        """Parts of `input` along `axis` (ONNX Split): of the given sizes, or that many equal ones."""
        own = self._own("split", "input", input)
        place = _axis("split", axis, own)
        lengths = _equal_parts(own, place, sizes) if isinstance(sizes, int) else _integers("split", "sizes", sizes)
        return list(self.make(movement.SPLIT, (own,), {"axis": place, "split": lengths}).outputs)

    def slice(
        self, input: Value, start: Sequence[int], end: Sequence[int], axes: Sequence[int] | None,
        steps: Sequence[int] | None,
    ) -> Value:  # fmt: skip
        """Elements `start[i]` to before `end[i]`, every `steps[i]`-th, along `axes[i]` (ONNX Slice).

        Without `axes` the first axes are meant, without `steps` every element.
        """
        own = self._own("slice", "input", input)
        starts, ends = _integers("slice", "start", start), _integers("slice", "end", end)
        places = _integers("slice", "axes", () if axes is None else axes) or tuple(range(len(starts)))
        by = _integers("slice", "steps", () if steps is None else steps) or (1,) * len(starts)
        if not len(starts) == len(ends) == len(places) == len(by):
            raise GraphError(
                f"slice: 'start', 'end', 'axes' and 'steps' must be equally long, not {len(starts)}, {len(ends)}, "
                f"{len(places)} and {len(by)}"
            )
        along = normal_axes(places, own.type.rank, "slice")
        return self._node(movement.SLICE, (own,), {"starts": starts, "ends": ends, "axes": along, "steps": by})

    def transpose(self, input: Value, perm: Sequence[int], shuffle: bool = False) -> Value:
        """Axis i of the result is axis `perm[i]` of `input` (ONNX Transpose). `shuffle` is without effect."""
        return self._unary("transpose", movement.TRANSPOSE, input, {"perm": _permutation(input, perm)})

    def reshape(self, input: Value, shape: Sequence[int]) -> Value:
        """The same elements in another shape (ONNX Reshape): 0 keeps a size, −1 takes what is left."""
        return self._unary("reshape", movement.RESHAPE, input, {"shape": _integers("reshape", "shape", shape)})

    def squeeze(self, *, input: Value, axes: Sequence[int]) -> Value:
        """`input` without `axes`, which have size 1 (ONNX Squeeze)."""
        own = self._own("squeeze", "input", input)
        places = normal_axes(_integers("squeeze", "axes", axes), own.type.rank, "squeeze")
        return self._node(movement.SQUEEZE, (own,), {"axes": tuple(sorted(places))})

    def unsqueeze(self, input: Value, axes: Sequence[int]) -> Value:
        """`input` with axes of size 1 at the places `axes` of the result (ONNX Unsqueeze)."""
        own = self._own("unsqueeze", "input", input)
        given = _integers("unsqueeze", "axes", axes)
        places = normal_axes(given, own.type.rank + len(given), "unsqueeze")
        return self._node(movement.UNSQUEEZE, (own,), {"axes": tuple(sorted(places))})

    def shape(self, input: Value) -> Value:
        """The sizes of `input` as a vector of INT64 (ONNX Shape)."""
        return self._unary("shape", structure.SHAPE, input)

    def size(self, *, input: Value) -> Value:
        """The number of elements of `input` as a scalar of INT64 (ONNX Size)."""
        return self._unary("size", structure.SIZE, input)

    # ── questions ────────────────────────────────────────────────────────────────────────────────────────────────

    def get_operator_list(self) -> list[OperatorHandle]:
        """All operators, producers first; inputs and weights are not among them but appear as sources of edges."""
        return [_handle(node) for node in self.operators]

    def get_input_edges(self, op: Mapping[str, object]) -> list[Edge]:
        """Where the inputs of `op` come from, in order; an optional input that is left out has no edge."""
        node = self._asked("get_input_edges", op)
        return [
            Edge(srcOp=_handle(value.node), dstOp=_handle(node), srcIdx=value.index, dstIdx=i)
            for i, value in enumerate(node.inputs)
            if value is not None
        ]

    def get_operator_type(self, op: Mapping[str, object]) -> str:
        """ONNX's name of the operator, such as "Conv"; "Input" and "Weight" for sources."""
        return self._asked("get_operator_type", op).op.label

    def get_operator_attr(self, op: Mapping[str, object], name: str) -> object:
        """Attribute `name`, defaults written out; several numbers come as a list (`perm` as a tuple)."""
        node = self._asked("get_operator_attr", op)
        attrs = written_out(node)
        if name not in attrs:
            known = ", ".join(sorted(attrs)) or "none"
            raise GraphError(f"get_operator_attr: {node.op.name} has no attribute {name!r}; it has: {known}")
        value = attrs[name]
        return list(value) if isinstance(value, tuple) and name != "perm" else value

    def get_input_dims(self, op: Mapping[str, object], idx: int) -> list[int]:
        """Shape of input `idx`; an input or a weight of the graph is its own input 0."""
        node = self._asked("get_input_dims", op)
        values = node.inputs or node.outputs
        value = values[_place("get_input_dims", idx, len(values))]
        if value is None:
            raise GraphError(f"get_input_dims: input {idx} of {node.op.name} is left out")
        return list(value.type.static_shape)

    def get_output_dims(self, op: Mapping[str, object], idx: int) -> list[int]:
        """Shape of output `idx`."""
        node = self._asked("get_output_dims", op)
        return list(node.outputs[_place("get_output_dims", idx, len(node.outputs))].type.static_shape)

    def get_num_outputs(self, op: Mapping[str, object]) -> int:
        """Number of outputs."""
        return len(self._asked("get_num_outputs", op).outputs)

    def get_split_lens(self, op: Mapping[str, object]) -> list[int]:
        """Sizes of the parts of a Split."""
        node = self._asked("get_split_lens", op)
        if node.op is not movement.SPLIT:
            raise GraphError(f"get_split_lens: 'op' must be a Split, not {node.op.name}")
        return list(node.attrs.ints("split"))

    def get_weight_value(self, op: Mapping[str, object]) -> list[float]:
        """All elements of a Weight, row by row."""
        node = self._asked("get_weight_value", op)
        weight = node.attrs["data"] if node.op is structure.WEIGHT else None
        if not isinstance(weight, Weight):
            raise GraphError(f"get_weight_value: 'op' must be a Weight, not {node.op.name}")
        elements: list[float] = weight.array().astype(np.float64).reshape(-1).tolist()
        return elements

    # ── shared ───────────────────────────────────────────────────────────────────────────────────────────────────

    def _own(self, method: str, argument: str, value: object) -> Value:
        """`value`, once it is known to be a tensor of this graph."""
        if not isinstance(value, Value):
            raise GraphError(f"{method}: '{argument}' must be a tensor of this graph, not {type(value).__name__}")
        if value.node not in self._created:
            raise GraphError(f"{method}: '{argument}' belongs to another graph")
        return value

    def _image(self, method: str, argument: str, value: object) -> Value:
        own = self._own(method, argument, value)
        if own.type.rank != 4:
            raise GraphError(f"{method}: '{argument}' must have 4 dimensions, but is {own.type}")
        return own

    def _node(
        self, op: Operator, inputs: Sequence[Value], attrs: Mapping[str, AttrValue] | None = None
    ) -> Value:
        return self.make(op, inputs, attrs).output

    def _unary(
        self, method: str, op: Operator, input: Value, attrs: Mapping[str, AttrValue] | None = None
    ) -> Value:
        return self._node(op, (self._own(method, "input", input),), attrs)

    def _binary(self, method: str, op: Operator, x: Value, y: Value) -> Value:
        return self._node(op, (self._own(method, "x", x), self._own(method, "y", y)))

    def _activated(self, value: Value, follower: Operator | None) -> Value:
        return value if follower is None else self._node(follower, (value,))

    def _pool(
        self, method: str, op: Operator, input: Value, kernels: Sequence[int], strides: Sequence[int], padding: str,
        activation: str,
    ) -> Value:  # fmt: skip
        follower = _activation(method, activation)
        x = self._image(method, "input", input)
        kernel = _positive_pair(method, "kernels", kernels)
        attrs = {"kernel_shape": kernel, **_window(method, x, kernel, strides, padding)}
        return self._activated(self._node(op, (x,), attrs), follower)

    def _reduction(self, method: str, op: Operator, input: Value, axes: Sequence[int], keepdims: bool) -> Value:
        own = self._own(method, "input", input)
        places = normal_axes(_integers(method, "axes", axes), own.type.rank, method)
        if not places:
            raise GraphError(f"{method}: 'axes' is empty")
        return self._node(op, (own,), {"axes": tuple(sorted(places)), "keepdims": int(bool(keepdims))})

    def _arg(self, method: str, op: Operator, input: Value, axes: Sequence[int], keepdims: bool) -> Value:
        own = self._own(method, "input", input)
        given = _integers(method, "axes", axes)
        if len(given) != 1:
            raise GraphError(f"{method}: 'axes' must name exactly one axis, not {given}")
        return self._node(op, (own,), {"axis": _axis(method, given[0], own), "keepdims": int(bool(keepdims))})

    def _asked(self, method: str, op: Mapping[str, object]) -> Node:
        """The node that a handle, or a bare {'guid': number}, stands for."""
        if not isinstance(op, Mapping) or "guid" not in op:
            raise GraphError(f"{method}: 'op' must be an operator of get_operator_list or get_input_edges, not {op!r}")
        node = op.get("node")
        if isinstance(node, Node):
            return node
        found = next((n for n in self.nodes if n.guid == op["guid"]), None)
        if found is None:
            raise GraphError(f"{method}: the graph has no operator with guid {op['guid']!r}")
        return found


def random_weight(t: TensorType, number: int) -> Array:
    """Values of random weight `number` of a graph: normal, standard deviation √(2 / fan-in), vectors positive."""
    generator = np.random.default_rng([WEIGHT_SEED, number])
    values = generator.standard_normal(t.static_shape) * math.sqrt(2 / _fan_in(t.static_shape))
    return np.asarray(np.abs(values) if t.rank == 1 else values, t.dtype.numpy)


def _fan_in(dims: tuple[int, ...]) -> int:
    """How many products one output element of an operator with this weight adds up."""
    if len(dims) == 4:
        return max(math.prod(dims[1:]), 1)
    return max(dims[-2] if len(dims) > 1 else math.prod(dims), 1)


def written_out(node: Node) -> Mapping[str, AttrValue]:
    """Attributes of a node with those that a window or a permutation leaves open filled in."""
    types = [value.type if value is not None else None for value in node.inputs]
    if node.op is linear.CONV and types[1] is not None:
        kernel = types[1].with_shape(types[1].dims[2:]).static_shape
        return {**linear.conv_settings(types[1], node.attrs), "kernel_shape": kernel}
    if node.op in (pooling.MAX_POOL, pooling.AVERAGE_POOL):
        return pooling.pool_settings(node.attrs)
    if node.op is movement.TRANSPOSE and types[0] is not None:
        return {"perm": movement.permutation(types[0].rank, node.attrs)}
    return node.attrs


def _handle(node: Node) -> OperatorHandle:
    return OperatorHandle(guid=node.guid, node=node)


def _filled(data: Numbers, t: TensorType) -> Array:
    """A copy of `data` as an array of type `t`."""
    try:
        values = np.array(data, t.dtype.numpy)
    except (TypeError, ValueError) as error:
        raise GraphError(f"new_weight: 'data' must hold numbers of type {t.dtype.name}: {error}") from error
    if values.shape != t.static_shape and (values.ndim != 1 or values.size != t.size):
        raise GraphError(
            f"new_weight: 'data' has shape {values.shape}, but must have the shape 'dims' {t.static_shape} or be flat "
            f"with {t.size} elements"
        )
    return values.reshape(t.static_shape)


def _activation(method: str, activation: object) -> Operator | None:
    if not isinstance(activation, str) or activation not in ACTIVATIONS:
        raise GraphError(f"{method}: 'activation' must be one of {', '.join(ACTIVATIONS)}, not {activation!r}")
    return ACTIVATIONS[activation]


def _datatype(method: str, argument: str, name: object) -> DType:
    if not isinstance(name, str) or name not in DATATYPES:
        raise GraphError(f"{method}: '{argument}' must be one of {', '.join(DATATYPES)}, not {name!r}")
    return DATATYPES[name]


def _window(
    method: str, x: Value, kernel: tuple[int, ...], strides: Sequence[int], padding: object
) -> dict[str, AttrValue]:
    """Strides, explicit pads and dilations of a sliding window over `x`."""
    by = _positive_pair(method, "strides", strides)
    if padding not in PADDINGS:
        raise GraphError(f"{method}: 'padding' must be one of {', '.join(PADDINGS)}, not {padding!r}")
    pads = (0, 0, 0, 0)
    if padding == "SAME":
        pairs = [_same(method, size, kernel[a], by[a]) for a, size in enumerate(x.type.dims[2:])]
        pads = (pairs[0][0], pairs[1][0], pairs[0][1], pairs[1][1])
    return {"strides": by, "pads": pads, "dilations": (1, 1)}


def _same(method: str, size: Dim, kernel: int, stride: int) -> tuple[int, int]:
    pads = same_pads(size, kernel, stride, 1, lower=True)
    if pads is None:
        raise GraphError(f"{method}: 'padding' SAME with a stride of {stride} needs a size in numbers, not {size}")
    return pads


def _groups(x: Value, weight: Value) -> int:
    channels, per_group = x.dim(1), weight.dim(1)
    if per_group == 0 or channels % per_group or channels == 0:
        raise GraphError(
            f"conv2d: 'weight' {weight.type} reads {per_group} channels a group, which does not divide the {channels} "
            f"channels of 'input' {x.type}"
        )
    return channels // per_group


def _equal_parts(x: Value, axis: int, count: int) -> tuple[int, ...]:
    size = x.dim(axis)
    if count < 1 or size % count:
        raise GraphError(f"split: 'sizes' {count} does not divide axis {axis} of {x.type} into equal parts")
    return (size // count,) * count


def _permutation(input: object, perm: object) -> tuple[int, ...]:
    given = _integers("transpose", "perm", perm)
    if isinstance(input, Value) and sorted(given) != list(range(input.type.rank)):
        raise GraphError(f"transpose: 'perm' {given} is no permutation of the {input.type.rank} axes of 'input'")
    return given


def _axis(method: str, axis: object, value: Value) -> int:
    return normal_axis(_integer(method, "axis", axis), value.type.rank, method)


def _place(method: str, idx: object, count: int) -> int:
    place = _integer(method, "idx", idx)
    if not 0 <= place < count:
        raise GraphError(f"{method}: 'idx' must lie between 0 and {count - 1}, not {place}")
    return place


def _dimension(method: str, dim: object) -> Dim:
    if isinstance(dim, str) and dim:
        return SymDim.named(dim)
    size = _integer(method, "dims", dim)
    if size < 0:
        raise GraphError(f"{method}: 'dims' must not be negative, but has {size}")
    return size


def _positive_pair(method: str, argument: str, given: object) -> tuple[int, int]:
    pair = _integers(method, argument, given)
    if len(pair) != 2 or min(pair) < 1:
        raise GraphError(f"{method}: '{argument}' must be two positive integers (height, width), not {given!r}")
    return pair[0], pair[1]


def _number(method: str, argument: str, given: object) -> float:
    if isinstance(given, (int, float, np.floating, np.integer)):
        return float(given)
    raise GraphError(f"{method}: '{argument}' must be a number, not {given!r}")


def _integer(method: str, argument: str, given: object) -> int:
    if isinstance(given, (int, np.integer)) and not isinstance(given, bool):
        return operator.index(given)
    raise GraphError(f"{method}: '{argument}' must be an integer, not {given!r}")


def _integers(method: str, argument: str, given: object) -> tuple[int, ...]:
    return tuple(_integer(method, argument, number) for number in _sequence(method, argument, given))


def _sequence(method: str, argument: str, given: object) -> list[object]:
    if isinstance(given, (list, tuple, np.ndarray, range)):
        return list(given)
    raise GraphError(f"{method}: '{argument}' must be a list or tuple, not {given!r}")
