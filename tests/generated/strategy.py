"""Random valid ONNX models, made with the onnx package alone: nothing of what is tested helps to make them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import TypeVar

import numpy as np
import onnx
import onnx.checker
import onnx.defs
import onnx.shape_inference
import test_type_rules as rules
from hypothesis import strategies as st
from models import Arrays
from numpy.typing import NDArray
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, TypeProto, helper, numpy_helper

T = TypeVar("T")
F32, U8, I8, I32, I64, STRING, BOOL, F16, F64 = (
    TensorProto.FLOAT, TensorProto.UINT8, TensorProto.INT8, TensorProto.INT32, TensorProto.INT64, TensorProto.STRING,
    TensorProto.BOOL, TensorProto.FLOAT16, TensorProto.DOUBLE,
)  # fmt: skip
BF16 = TensorProto.BFLOAT16
MOST_DTYPES = (*(F32,) * 12, F64, F16, BF16, I32, I64, U8, I8, BOOL, STRING, TensorProto.UINT16,
               TensorProto.INT16, TensorProto.UINT32, TensorProto.UINT64, TensorProto.FLOAT8E4M3FN)  # fmt: skip
FLOATS = frozenset({F32, F64, F16, BF16})
OPSETS = (7, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22, 23, 24, 25, rules.NEWEST)
MOST_ELEMENTS = 4096
NAMES = ("", "n", "n", "a node", "block.0/conv:1", "größe", "\\", "0", "Identity_1", "x0")
VALUE_NAMES = ("x", "v", "layer/out:0", "ein wert", "0", "größe.", "a-b", "node_", "weight#")

UNARY = (
    "Relu Sigmoid Tanh Exp Sqrt Neg Abs Reciprocal Floor Ceil Softplus Softsign Sin Cos Atan Erf Sign Round Mish "
    "HardSwish Gelu Swish Elu Selu LeakyRelu HardSigmoid Celu ThresholdedRelu IsNaN IsInf Not BitwiseNot Identity "
    "Dropout Shrink Log"
).split()
BINARY = (
    "Add Sub Mul Div Pow Max Min Sum Mean Equal Greater Less GreaterOrEqual LessOrEqual And Or Xor BitwiseAnd "
    "BitwiseOr BitwiseXor PRelu"
).split()
MAPS = "Relu Sigmoid Tanh Exp Abs Neg Sqrt Erf Softplus HardSwish LeakyRelu Floor Not".split()
REDUCE = (
    "ReduceSum ReduceMean ReduceMax ReduceMin ReduceProd ReduceL1 ReduceL2 ReduceSumSquare ReduceLogSumExp"
).split()
# of these all inputs may be values of any sort; of others only the first
FREE = {
    *BINARY, "MatMul", "Gemm", "Concat", "Einsum", "Where", "Conv", "ConvTranspose", "Attention", "SwiGLU",
    "LayerNormalization", "InstanceNormalization", "RMSNormalization", "ScatterND", "ScatterElements",
}  # fmt: skip
# of these no input may: a value that is not finite or a bad scale means nothing
BOUND = {row.op for row in rules.QUANTIZED} | {
    "RoiAlign", "MaxRoiPool", "GridSample", "DeformConv", "BitCast", "NegativeLogLikelihoodLoss", "Range",
}  # fmt: skip


@dataclass
class Generated:
    """A model, and what its inputs hold: `index` (0 and 1), `lengths`, `positive` below 1, or `any`."""

    model: ModelProto
    kinds: dict[str, str]
    sizes: dict[str, tuple[int, ...]]
    built: list[str] = field(default_factory=list)

    def feeds(self, seed: int) -> Arrays:
        rng = np.random.default_rng(seed)
        weights = {t.name for t in self.model.graph.initializer}
        return {
            v.name: array_of(rng, v.type.tensor_type.elem_type, self.sizes[v.name], self.kinds[v.name])
            for v in self.model.graph.input
            if v.name not in weights
        }


def array_of(rng: np.random.Generator, dtype: int, shape: Sequence[int], kind: str) -> NDArray[np.generic]:
    """Values in which sums and products of a few are exact, none of them 0 unless they are indices."""
    np_dtype = helper.tensor_dtype_to_np_dtype(dtype)
    if kind == "lengths":
        return np.arange(1, math.prod(shape) + 1).reshape(shape).astype(np_dtype)
    if kind == "index" or dtype == BOOL:
        return rng.integers(0, 2, shape).astype(np_dtype)
    if kind in ("zero", "one"):
        return np.full(shape, float(kind == "one")).astype(np_dtype)
    if dtype == STRING:
        return np.array(rng.integers(0, 3, shape).astype(str), dtype=object).reshape(shape)
    if kind == "positive":
        return (rng.integers(1, 64, shape) / 64).astype(np_dtype)
    values = rng.integers(1, 9, shape) / (4 if np_dtype.kind not in "iu" else 1)
    if np_dtype.kind != "u":
        values = values * rng.choice([-1, 1], shape)
    return np.asarray(values).astype(np_dtype)


# ── single operators from the table of type rules ────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Operand:
    name: str
    dtype: int
    shape: tuple[int, ...]
    constant: TensorProto | None


@cache
def operands(row: rules.Row) -> tuple[NodeProto, dict[str, Operand]]:
    node = onnx.parser.parse_node(row.node)
    constants = f"<{row.constants}>" if row.constants else ""
    graph = onnx.parser.parse_graph(f"g ({row.inputs}) => () {constants} {{}}")
    found = {t.name: Operand(t.name, t.data_type, tuple(t.dims), t) for t in graph.initializer}
    for value in graph.input:
        said = value.type.tensor_type
        shape = tuple(d.dim_value if d.HasField("dim_value") else rules.SIZES[d.dim_param] for d in said.shape.dim)
        found.setdefault(value.name, Operand(value.name, said.elem_type, shape, None))
    return node, found


@cache
def by_operator() -> dict[str, list[rules.Row]]:
    return {op: [r for r in rules.TABLE if r.op == op] for op in rules.OPERATORS}


@cache
def fitting(opset: int) -> tuple[rules.Row, ...]:
    """The rows of which the operator is at this opset what it is at theirs."""
    return tuple(r for r in rules.TABLE if same_operator(r.op, r.opset, opset))


def same_operator(name: str, one: int, other: int) -> bool:
    if one == other:
        return True
    a, b = schema_of(name, one), schema_of(name, other)
    return a is not None and b is not None and a.since_version == b.since_version


@cache
def schema_of(name: str, opset: int) -> onnx.defs.OpSchema | None:
    try:
        schema = onnx.defs.get_schema(name, opset, "")
    except onnx.defs.SchemaError:
        return None
    return None if schema.deprecated else schema


def takes(name: str, opset: int, position: int, dtype: int) -> bool:
    schema = schema_of(name, opset)
    if schema is None or not schema.inputs:
        return False
    said = schema.inputs[min(position, len(schema.inputs) - 1)]
    return f"tensor({TensorProto.DataType.Name(dtype).lower()})" in said.types


# ── growing a graph ──────────────────────────────────────────────────────────────────────────────────────────────


class Growing:
    """A graph under construction; a step that does not fit adds nothing."""

    def __init__(self, draw: st.DrawFn) -> None:
        self.draw = draw
        self.first = draw(st.sampled_from(by_operator()[draw(st.sampled_from(rules.OPERATORS))]))
        alike = [o for o in OPSETS if same_operator(self.first.op, self.first.opset, o)]
        self.opset = draw(st.sampled_from([*alike, max(self.first.opset, OPSETS[0])]))
        self.graph = GraphProto(name=draw(st.sampled_from(("g", "a graph", "größe"))))
        self.types: dict[str, tuple[int, tuple[int, ...]]] = {}
        self.constants: dict[str, TensorProto] = {}
        self.kinds: dict[str, str] = {}
        self.wild: set[str] = set()
        self.read: set[str] = set()
        self.built: list[str] = []

    # names and values

    def fresh(self) -> str:
        return f"{self.draw(st.sampled_from(VALUE_NAMES))}{len(self.types) + 1000}"

    def chance(self, percent: int) -> bool:
        return self.draw(st.integers(0, 99)) >= 100 - percent

    def pick(self, options: Iterable[T]) -> T:
        return self.draw(st.sampled_from(list(options)))

    def input(self, dtype: int, shape: Sequence[int], kind: str = "any") -> str:
        name = self.fresh()
        self.graph.input.append(helper.make_tensor_value_info(name, dtype, shape))
        self.types[name], self.kinds[name] = (dtype, tuple(shape)), kind
        return name

    def weight(self, dtype: int, shape: Sequence[int], kind: str = "any") -> str:
        alike = [n for n, t in self.constants.items() if self.types[n] == (dtype, tuple(shape)) and n in self.kinds
                 and self.kinds[n] == kind]  # fmt: skip
        if alike and self.chance(50):
            return self.pick(alike)
        array = array_of(np.random.default_rng(len(self.types)), dtype, shape, kind)
        return self.constant(numpy_helper.from_array(array) if dtype != STRING else strings(array), kind)

    def numbers(self, values: Sequence[float], dtype: int = I64, shape: Sequence[int] | None = None) -> str:
        array = np.array(values, helper.tensor_dtype_to_np_dtype(dtype))
        return self.constant(numpy_helper.from_array(array if shape is None else array.reshape(shape)), "numbers")

    def constant(self, tensor: TensorProto, kind: str) -> str:
        held = TensorProto()
        held.CopyFrom(tensor)
        held.name = name = self.fresh()
        self.types[name], self.constants[name], self.kinds[name] = (held.data_type, tuple(held.dims)), held, kind
        if self.chance(25):
            self.node(NodeProto(op_type="Constant", output=[name], attribute=[helper.make_attribute("value", held)]))
        else:
            self.graph.initializer.append(held)
        return name

    def operand(self, dtype: int, shape: Sequence[int], kind: str = "any") -> str:
        """A value of that type: one that is there, a new weight or a new input."""
        alike = [n for n, t in self.types.items() if t == (dtype, tuple(shape)) and self.kinds.get(n, "any") == kind]
        if alike and self.chance(60):
            return self.pick(alike)
        return self.input(dtype, shape, kind) if self.chance(40) else self.weight(dtype, shape, kind)

    def node(self, node: NodeProto) -> None:
        node.name = self.pick(NAMES)
        self.graph.node.append(node)

    def add(self, op: str, inputs: Sequence[str], outputs: int = 1, **attributes: object) -> list[str]:
        """Adds a node and gives its outputs; none, and no node, where it does not fit."""
        made = [self.fresh() + f".{i}" for i in range(outputs)]
        return self.append(helper.make_node(op, inputs, made, **attributes))

    def append(self, node: NodeProto) -> list[str]:
        schema = schema_of(node.op_type, self.opset)
        if schema is None:
            return []
        found = inferred(schema, node, self)
        if found is None or not all(n in found for n in node.output if n):
            return []
        made = {n: static(found[n]) for n in node.output if n}
        if any(t is None or math.prod(t[1]) > MOST_ELEMENTS or len(t[1]) > 5 for t in made.values()):
            return []
        self.node(node)
        self.read.update(node.input)
        self.types.update({n: t for n, t in made.items() if t is not None})
        self.built.append(node.op_type)
        return list(made)

    # steps

    def step(self) -> None:
        values = [n for n, (_, s) in self.types.items() if self.kinds.get(n, "any") == "any"]
        if not values or self.chance(20):
            dtype = self.pick(MOST_DTYPES)
            shape = self.draw(st.sampled_from(SHAPES))
            values.append(self.input(dtype, shape))
        x = self.pick(values[-5:] if self.chance(70) else values)
        self.pick(STEPS)(self, x)

    def row(self, x: str) -> None:
        row = self.pick(fitting(self.opset))
        self.one_of(row)

    def one_of(self, row: rules.Row) -> None:
        said, given = operands(row)
        node = NodeProto()
        node.CopyFrom(said)
        for i, name in enumerate(said.input):
            if name:
                node.input[i] = self.bound(row.op, i, given[name])
        made = {name: self.fresh() + "." for name in said.output if name}
        for i, name in enumerate(said.output):
            node.output[i] = made.get(name, "")
        self.append(node)

    def bound(self, op: str, position: int, operand: Operand) -> str:
        if operand.constant is not None:
            return self.constant(operand.constant, "numbers")
        kind = "lengths" if operand.name == "n" else "positive" if operand.dtype in FLOATS else "index"
        free = operand.dtype in FLOATS and op not in BOUND and (position == 0 or op in FREE)
        if free and self.chance(70):
            alike = [n for n, (d, _) in self.types.items() if d == operand.dtype and self.kinds.get(n, "any") == "any"]
            if alike:
                name = self.reshaped_to(self.pick(alike), operand.shape)
                if name:
                    return name
        return self.input(operand.dtype, operand.shape, kind) if self.chance(50) else self.weight(
            operand.dtype, operand.shape, kind
        )

    def reshaped_to(self, name: str, shape: tuple[int, ...]) -> str:
        """A value of this shape made of another by repeating or cutting, "" where that does not go."""
        have, want = math.prod(self.types[name][1]), math.prod(shape)
        if self.types[name][1] == shape:
            return name
        if not have or not want or not takes("Reshape", self.opset, 0, self.types[name][0]):
            return ""
        steps: list[tuple[str, list[str], dict[str, list[int]]]] = [("Reshape", [self.numbers([-1])], {})]
        if have < want:
            steps.append(("Tile", [self.numbers([-(-want // have)])], {}))
        if have != want and self.opset >= 10:
            steps.append(("Slice", [self.numbers([0]), self.numbers([want])], {}))
        elif have != want:
            steps.append(("Slice", [], {"starts": [0], "ends": [want]}))
        steps.append(("Reshape", [self.numbers(shape, shape=(len(shape),))], {}))
        for op, rest, attributes in steps:
            made = self.add(op, [name, *rest], **attributes)
            if not made:
                return ""
            name = made[0]
        return name

    def unary(self, x: str) -> None:
        names = [n for n in UNARY if takes(n, self.opset, 0, self.types[x][0])]
        if names:
            self.add(self.pick(names), [x])

    def twice(self, x: str) -> None:
        """Two of the same or two that undo each other."""
        names = [n for n in ("Relu", "Neg", "Abs", "Not", "Identity", "Floor", "Reciprocal", "Sigmoid")
                 if takes(n, self.opset, 0, self.types[x][0])]  # fmt: skip
        if names:
            name = self.pick(names)
            for y in self.add(name, [x]):
                self.add(name, [y])

    def binary(self, x: str) -> None:
        dtype, shape = self.types[x]
        names = [n for n in BINARY if takes(n, self.opset, 0, dtype) and takes(n, self.opset, 1, dtype)]
        if not names:
            return
        name = self.pick(names)
        equal = self.opset < 8 and name in ("Max", "Min", "Sum", "Mean")
        y = self.operand(dtype, shape if equal else self.broadcast(shape, up=name != "PRelu"))
        self.add(name, [y, x] if name not in ("Div", "Pow", "PRelu") and self.chance(40) else [x, y])

    def broadcast(self, shape: tuple[int, ...], up: bool = True) -> tuple[int, ...]:
        if self.chance(40):
            return shape
        dims = [1 if self.chance(40) else d for d in shape]
        if up:
            dims = [self.pick((1, 2, 3)) if d == 1 and self.chance(20) else d for d in dims]
        dims = dims[self.draw(st.integers(0, len(dims))) :] if self.chance(40) else dims
        return (2, *dims) if up and len(dims) == len(shape) < 5 and self.chance(15) else tuple(dims)

    def neutral(self, x: str) -> None:
        dtype, shape = self.types[x]
        op, kind = self.pick((("Add", "zero"), ("Sub", "zero"), ("Mul", "one"), ("Div", "one"), ("Mul", "zero"),
                              ("Pow", "one")))  # fmt: skip
        if takes(op, self.opset, 0, dtype) and dtype != BOOL:
            self.add(op, [x, self.weight(dtype, self.broadcast(shape), kind)])

    def itself(self, x: str) -> None:
        known = ("Add", "Sub", "Mul", "Max", "Equal", "Concat")
        names = [n for n in known if takes(n, self.opset, 0, self.types[x][0])]
        if names and self.types[x][1]:
            name = self.pick(names)
            self.add(name, [x, x], **({"axis": 0} if name == "Concat" else {}))

    def where(self, x: str) -> None:
        dtype, shape = self.types[x]
        if takes("Where", self.opset, 1, dtype):
            condition = self.operand(BOOL, self.broadcast(shape))
            self.add("Where", [condition, x, self.operand(dtype, self.broadcast(shape))])

    def cast(self, x: str) -> None:
        to = self.pick([d for d in (F32, F64, F16, I32, I64, BOOL, BF16) if takes("Cast", self.opset, 0, d)])
        if takes("Cast", self.opset, 0, self.types[x][0]) and self.types[x][0] != STRING:
            self.add("Cast", [x], to=to)

    def transpose(self, x: str) -> None:
        rank = len(self.types[x][1])
        perm = self.draw(st.permutations(range(rank)))
        for y in self.add("Transpose", [x], **({"perm": perm} if self.chance(80) and rank else {})):
            if self.chance(40):
                back = np.argsort(perm).tolist() if self.chance(50) else self.draw(st.permutations(range(rank)))
                self.add("Transpose", [y], **({"perm": back} if rank else {}))

    def reshape(self, x: str) -> None:
        shape = self.types[x][1]
        for _ in range(self.draw(st.integers(1, 2))):
            size = math.prod(shape)
            first = self.pick([d for d in range(1, min(size, 12) + 1) if size % d == 0] or [0])
            options = [[-1], [first, -1], list(shape), [1, *shape[:4]], [0, -1] if shape else [-1]]
            target = self.pick(options) if size else list(shape)
            made = self.add("Reshape", [x, self.numbers(target, shape=(len(target),))])
            if not made:
                return
            x = made[0]
            shape = self.types[x][1]

    def shaped(self, x: str) -> None:
        """A reshape to what arithmetic on shapes gives."""
        if not self.types[x][1]:
            return
        made = self.add("Shape", [x])
        if made:
            first = self.add("Gather", [made[0], self.numbers([0])])
            if first:
                joined = self.add("Concat", [first[0], self.numbers([-1])], axis=0)
                if joined and math.prod(self.types[x][1]):
                    node = helper.make_node("Reshape", [x, joined[0]], [self.fresh()])
                    dtype, shape = self.types[x]
                    self.node(node)
                    self.types[node.output[0]] = dtype, (shape[0], math.prod(shape[1:]))
                    self.built.append("Reshape")

    def squeeze(self, x: str) -> None:
        shape = self.types[x][1]
        axis = self.draw(st.integers(0, len(shape)))
        axes = {"axes": [axis]} if self.opset < 13 else {}
        made = self.add("Unsqueeze", [x] if axes else [x, self.numbers([axis])], **axes)
        if made and self.chance(50):
            self.add("Squeeze", [made[0]] if axes else [made[0], self.numbers([axis])], **axes)

    def concat(self, x: str) -> None:
        dtype, shape = self.types[x]
        if not shape or not takes("Concat", self.opset, 0, dtype):
            return
        axis = self.draw(st.integers(0, len(shape) - 1))
        y = self.operand(dtype, [2 if i == axis else d for i, d in enumerate(shape)])
        parts = [x, y, x][: self.draw(st.integers(1, 3))]
        for joined in self.add("Concat", parts, axis=axis - (len(shape) if self.chance(30) else 0)):
            if self.chance(30):
                self.split(joined, axis)

    def split(self, x: str, axis: int | None = None) -> None:
        shape = self.types[x][1]
        if not shape:
            return
        axis = self.draw(st.integers(0, len(shape) - 1)) if axis is None else axis
        if shape[axis] < 2:
            return
        sizes = [1, shape[axis] - 1]
        made = (
            self.add("Split", [x], 2, axis=axis, split=sizes)
            if self.opset < 13
            else self.add("Split", [x, self.numbers(sizes)], 2, axis=axis)
        )
        if made and self.chance(40):
            self.add("Concat", made, axis=axis)

    def slice(self, x: str) -> None:
        shape = self.types[x][1]
        if not shape:
            return
        axis = self.draw(st.integers(0, len(shape) - 1))
        start, end = self.draw(st.integers(-3, 2)), self.draw(st.sampled_from((1, 2, 5, -1, 1 << 40)))
        if self.opset < 10:
            self.add("Slice", [x], starts=[start], ends=[end], axes=[axis])
        else:
            step = self.draw(st.sampled_from((1, 1, 2, -1)))
            self.add("Slice", [x, *(self.numbers([n]) for n in (start, end, axis, step))])

    def reduce(self, x: str) -> None:
        dtype, shape = self.types[x]
        names = [n for n in REDUCE if takes(n, self.opset, 0, dtype)]
        if not names or not shape:
            return
        name, axis = self.pick(names), self.draw(st.integers(-len(shape), len(shape) - 1))
        keep = self.draw(st.integers(0, 1))
        schema = schema_of(name, self.opset)
        assert schema is not None
        if "axes" in schema.attributes:
            self.add(name, [x], axes=[axis], keepdims=keep)
        else:
            self.add(name, [x, self.numbers([axis])], keepdims=keep)

    def normalized(self, x: str) -> None:
        dtype, shape = self.types[x]
        if dtype not in FLOATS or not shape:
            return
        op = self.pick(("Softmax", "LogSoftmax", "BatchNormalization", "LayerNormalization"))
        if op == "BatchNormalization" and len(shape) >= 2:
            parts = [self.weight(dtype, [shape[1]], k) for k in ("any", "any", "any", "positive")]
            self.add(op, [x, *parts])
        elif op == "LayerNormalization":
            self.add(op, [x, self.weight(dtype, [shape[-1]]), self.weight(dtype, [shape[-1]])])
        elif op != "BatchNormalization":
            self.add(op, [x], axis=self.draw(st.integers(0, len(shape) - 1)))

    def matmul(self, x: str) -> None:
        dtype, shape = self.types[x]
        if not shape or dtype not in FLOATS | {I32, I64}:
            return
        y = self.operand(dtype, [shape[-1], self.pick((1, 3, 4))])
        for z in self.add("MatMul", [x, y]):
            out = self.types[z][1]
            if self.chance(40):
                self.add("Add", [z, self.operand(dtype, [out[-1]])])
            elif self.chance(40):
                self.add("MatMul", [z, self.operand(dtype, [out[-1], 3])])

    def products(self, x: str) -> None:
        """Two products of one value, or of which the sum is taken."""
        dtype, shape = self.types[x]
        if len(shape) != 2 or dtype not in FLOATS:
            return
        made = [y for _ in range(2) for y in self.add("MatMul", [x, self.weight(dtype, [shape[1], 4])])]
        if len(made) == 2 and self.chance(60):
            self.add(self.pick(("Add", "Mul", "Max")), made)

    def gemm(self, x: str) -> None:
        dtype, shape = self.types[x]
        if len(shape) != 2 or dtype not in FLOATS:
            return
        ta, tb = self.draw(st.integers(0, 1)), self.draw(st.integers(0, 1))
        inner = shape[0] if ta else shape[1]
        w = self.operand(dtype, [3, inner] if tb else [inner, 3])
        bias = [self.operand(dtype, self.draw(st.sampled_from(([3], [1], [1, 3]))))] if self.opset >= 11 else []
        self.add("Gemm", [x, w, *bias], transA=ta, transB=tb, alpha=self.draw(st.sampled_from((1.0, 0.5))))

    def convolution(self, x: str) -> None:
        dtype, shape = self.types[x]
        if len(shape) not in (3, 4, 5) or dtype not in (F32, F64, F16) or not math.prod(shape):
            dtype, shape = F32, self.draw(st.sampled_from(((1, 4, 6, 6), (2, 4, 5, 4))))
            x = self.input(dtype, shape)
        rank, group = len(shape) - 2, self.draw(st.sampled_from((1, 1, shape[1])))
        k = [self.draw(st.sampled_from((1, 1, 2, 3))) for _ in range(rank)]
        pads = [min(k[i % rank] - 1, self.draw(st.integers(0, 1))) for i in range(2 * rank)]
        w = self.operand(dtype, [2 * group if group > 1 else 3, shape[1] // group, *k])
        inputs = [x, w] + ([self.operand(dtype, [self.types[w][1][0]])] if self.chance(50) else [])
        strides = [self.draw(st.sampled_from((1, 1, 2)))] * rank
        for y in self.add("Conv", inputs, group=group, pads=pads, strides=strides, kernel_shape=k):
            channels = self.types[y][1][1]
            after = self.draw(st.integers(0, 4))
            if after == 1:
                parts = [self.weight(dtype, [channels], kind) for kind in ("any", "any", "any", "positive")]
                self.add("BatchNormalization", [y, *parts])
            elif after == 2:
                name = self.pick(("Add", "Mul"))
                self.add(name, [y, self.operand(dtype, [channels] + [1] * rank)])
            elif after == 3:
                self.add("Relu", [y])
            elif after == 4:
                same = self.weight(dtype, self.types[w][1])
                z = self.add("Conv", [x, same], group=group, pads=pads, strides=strides, kernel_shape=k)
                if z and self.chance(50):
                    self.add("Add", [y, z[0]])

    def mapped(self, x: str, op: str = "") -> str:
        """One of the functions of single elements, of the value; the value where it does not fit."""
        dtype = self.types[x][0]
        names = [op] if op else [n for n in MAPS if takes(n, self.opset, 0, dtype)]
        return self.add(self.pick(names), [x])[0] if names else x

    def around_concat(self, x: str) -> None:
        """The same function before or after a concatenation, or of the parts of a split."""
        dtype, shape = self.types[x]
        names = [n for n in MAPS if takes(n, self.opset, 0, dtype)]
        if not shape or not names or not takes("Concat", self.opset, 0, dtype):
            return
        op, axis = self.pick(names), self.draw(st.integers(0, len(shape) - 1))
        y = self.operand(dtype, [self.draw(st.integers(1, 3)) if i == axis else d for i, d in enumerate(shape)])
        how = self.draw(st.integers(0, 3))
        if how == 0:
            self.add("Concat", [self.mapped(x, op), self.mapped(y, op)], axis=axis)
        elif how == 1:
            for joined in self.add("Concat", [x, y], axis=axis):
                self.mapped(joined, op)
        elif how == 2 and len(shape) >= 3:
            for joined in self.add("Concat", [x, y], axis=1):
                self.pool(joined)
        else:
            for joined in self.add("Concat", [self.mapped(x), y], axis=axis):
                for again in self.add("Concat", [y, joined] if self.chance(50) else [joined, y], axis=axis):
                    self.split(again, axis)

    def constants_in_turn(self, x: str) -> None:
        dtype, shape = self.types[x]
        op = self.pick(("Add", "Mul", "Sub", "Div"))
        if dtype == BOOL or not takes(op, self.opset, 0, dtype):
            return
        for y in self.add(op, [x, self.weight(dtype, self.broadcast(shape, up=False))]):
            other = op if self.chance(70) else self.pick(("Add", "Mul"))
            self.add(other, [y, self.weight(dtype, self.broadcast(shape, up=False))])

    def of_one(self, x: str) -> None:
        name = self.pick(("Sum", "Max", "Min", "Mean", "Concat"))
        if takes(name, self.opset, 0, self.types[x][0]) and self.types[x][1]:
            self.add(name, [x], **({"axis": 0} if name == "Concat" else {}))

    def scaled_product(self, x: str) -> None:
        """A product with constants before, after or on both sides of it."""
        dtype, shape = self.types[x]
        if not shape or dtype not in (F32, F64, F16):
            dtype, shape = F32, self.draw(st.sampled_from(((2, 3), (4, 4), (2, 3, 4))))
            x = self.input(dtype, shape)
        op = self.pick(("Mul", "Div", "Add", "MatMul", "Transpose"))
        w = self.weight(dtype, [shape[-1], 4])
        if op == "Transpose" and len(shape) >= 2:
            perm = [*range(len(shape) - 2), len(shape) - 1, len(shape) - 2]
            w = self.weight(dtype, [shape[-2], 4])
            for y in self.add("Transpose", [x], perm=perm):
                self.add(self.pick(("MatMul", "Gemm")), [y, w])
            return
        if self.chance(30) and op in ("Mul", "Add"):
            x = (self.add(op, [x, self.weight(dtype, self.draw(st.sampled_from(((), (shape[-1],)))))]) or [x])[0]
        for y in self.add("Gemm" if len(shape) == 2 and self.opset >= 11 and self.chance(40) else "MatMul", [x, w]):
            if op == "MatMul":
                self.add("MatMul", [y, self.weight(dtype, [4, 3])])
            elif op != "Transpose":
                out = self.weight(dtype, self.draw(st.sampled_from(((), (4,), (1,)))))
                self.add(op, [y, out] if op == "Div" or self.chance(70) else [out, y])

    def side_by_side(self, x: str) -> None:
        """Two convolutions or products of one value or with one weight, of which something is made together."""
        dtype, shape = self.types[x]
        if dtype not in (F32, F64) or len(shape) not in (2, 4) or not math.prod(shape):
            dtype, shape = F32, self.draw(st.sampled_from(((1, 4, 6, 6), (2, 4, 5, 4), (2, 3), (4, 4))))
            x = self.input(dtype, shape)
        one_weight, bias, made = self.chance(30), self.chance(50), list[str]()
        y = self.operand(dtype, shape) if self.chance(40) or one_weight else x
        kernels = self.draw(st.sampled_from((((1, 1), (1, 1)), ((3, 3), (3, 3)), ((1, 1), (3, 3)), ((1, 3), (3, 1)))))
        group = self.draw(st.sampled_from((1, 1, 2))) if shape[1] % 2 == 0 else 1
        w = ""
        for value, kernel in zip((x, y), kernels[:1] * 2 if one_weight else kernels, strict=True):
            if len(shape) == 2:
                w = w if one_weight and w else self.weight(dtype, [shape[1], self.draw(st.sampled_from((4, 4, 3)))])
                ending = [self.weight(dtype, [self.types[w][1][1]])] if bias and self.opset >= 11 else []
                made += self.add("Gemm" if ending or self.chance(30) and self.opset >= 11 else "MatMul",
                                 [value, w, *ending])  # fmt: skip
                continue
            out = self.draw(st.sampled_from((4, 4, 2)))
            w = w if one_weight and w else self.weight(dtype, [out, shape[1] // group, *kernel])
            ending = [self.weight(dtype, [self.types[w][1][0]])] if bias else []
            pads = [kernel[0] // 2, kernel[1] // 2] * 2
            made += self.add("Conv", [value, w, *ending], pads=pads, kernel_shape=kernel, group=group)
        after = self.draw(st.sampled_from(("", "Relu", "Sigmoid")))
        made = [self.mapped(v, after) for v in made] if after else made
        if len(made) == 2:
            op = self.pick(("Add", "Concat", "Mul", ""))
            if op:
                self.add(op, made, **({"axis": 1} if op == "Concat" else {}))

    def factored(self, x: str) -> None:
        """x·a + x·b."""
        dtype, shape = self.types[x]
        if dtype not in FLOATS:
            return
        others = [self.operand(dtype, self.broadcast(shape, up=False)) for _ in range(2)]
        parts = [y for other in others for y in self.add("Mul", [x, other])]
        if len(parts) == 2:
            self.add(self.pick(("Add", "Sub")), parts)

    def pool(self, x: str) -> None:
        dtype, shape = self.types[x]
        if len(shape) not in (3, 4, 5) or dtype not in (F32, F64, F16) or not math.prod(shape):
            return
        op = self.pick(("MaxPool", "AveragePool", "GlobalAveragePool", "GlobalMaxPool"))
        window = [min(2, d) for d in shape[2:]]
        self.add(op, [x], **({} if op.startswith("Global") else {"kernel_shape": window}))

    def pad(self, x: str) -> None:
        dtype, shape = self.types[x]
        if not shape or not takes("Pad", self.opset, 0, dtype):
            return
        pads = [self.draw(st.integers(0, 1)) for _ in range(2 * len(shape))]
        made = self.add("Pad", [x], pads=pads) if self.opset < 11 else self.add("Pad", [x, self.numbers(pads)])
        if made and len(shape) == 4:
            self.convolution(made[0])

    def expand(self, x: str) -> None:
        shape = self.types[x][1]
        target = self.broadcast(shape)
        self.add("Expand", [x, self.numbers(target, shape=(len(target),))])

    def tile(self, x: str) -> None:
        rank = len(self.types[x][1])
        repeats = [self.draw(st.integers(1, 2)) for _ in range(rank)]
        if rank:
            self.add("Tile", [x, self.numbers(repeats)])

    def gather(self, x: str) -> None:
        shape = self.types[x][1]
        if shape:
            axis = self.draw(st.integers(0, len(shape) - 1))
            if shape[axis] >= 2:
                index = self.operand(I64, self.pick(((), (2,), (1, 3))), "index")
                self.add("Gather", [x, index], axis=axis)

    def clip(self, x: str) -> None:
        dtype, _ = self.types[x]
        low, high = self.draw(st.sampled_from(((0.0, 1.0), (0.0, 6.0), (-1.0, 2.0))))
        if self.opset < 11:
            made = self.add("Clip", [x], min=low, max=high) if dtype in FLOATS else []
        elif takes("Clip", self.opset, 0, dtype) and dtype in FLOATS | {I32, I64}:
            made = self.add("Clip", [x, self.numbers([low], dtype, ()), self.numbers([high], dtype, ())])
        else:
            made = []
        if made and takes("Relu", self.opset, 0, dtype) and self.chance(40):
            self.add("Relu", made)

    def flatten(self, x: str) -> None:
        if self.opset >= 9 or self.types[x][0] in FLOATS:
            self.add("Flatten", [x], axis=self.draw(st.integers(0, len(self.types[x][1]))))

    def branch(self, x: str) -> None:
        """An If of which both branches read what is outside."""
        dtype, shape = self.types[x]
        if not takes("Neg", self.opset, 0, dtype):
            return
        out, bodies = [self.fresh() + f".{i}" for i in range(3)], []
        for body, op in zip(out[1:], ("Neg", "Abs"), strict=True):
            info = helper.make_tensor_value_info(body, dtype, shape)
            inner = [helper.make_node("Identity", [x], [body + "i"]), helper.make_node(op, [body + "i"], [body])]
            bodies.append(helper.make_graph(inner, "body", [], [info]))
        condition = self.input(BOOL, (), "index")
        self.node(helper.make_node("If", [condition], [out[0]], then_branch=bodies[0], else_branch=bodies[1]))
        self.types[out[0]] = dtype, shape
        self.read.update((condition, x))
        self.built.append("If")

    # the whole

    def finished(self) -> Generated:
        listed = [n for n in self.types if n not in self.constants]
        if not listed:
            listed = [self.input(F32, (2, 3))]
        made = [n for n in listed if n not in self.kinds]
        outputs = [n for n in made if n not in self.read]
        for _ in range(self.draw(st.integers(0, 2))):
            outputs.append(self.pick(made or listed))
        if self.graph.input and self.chance(10):
            outputs.append(self.pick([v.name for v in self.graph.input]))
        outputs = list(dict.fromkeys(outputs or listed[-1:]))
        outputs = list(self.draw(st.permutations(outputs))) if self.chance(30) else outputs
        for name in outputs:
            info = helper.make_tensor_value_info(name, *self.types[name])
            if len(outputs) == 1 and name in made:
                info.doc_string = "what comes out"
            self.graph.output.append(info)
        if self.chance(20):
            self.graph.input.append(helper.make_tensor_value_info("never read", F32, (2, 3)))
            self.types["never read"], self.kinds["never read"] = (F32, (2, 3)), "any"
        ir = 3 if self.opset < 9 else 10 if self.opset > 18 else self.draw(st.sampled_from((7, 8, 10)))
        if ir == 3 or self.chance(10):
            for tensor in self.graph.initializer:
                self.graph.input.append(helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims))
        model = helper.make_model(self.graph, opset_imports=[helper.make_opsetid("", self.opset)], ir_version=ir,
                                  producer_name="größe", doc_string="a doc")  # fmt: skip
        helper.set_model_props(model, {"key": "value"})
        sizes = {v.name: self.types[v.name][1] for v in self.graph.input}
        if self.chance(25):
            symbolic(model, [n for n, k in self.kinds.items() if k == "any"])
        return Generated(model, self.kinds, sizes, self.built)


def symbolic(model: ModelProto, names: Sequence[str]) -> None:
    """Lets the first dimension of inputs be a symbol, and outputs say nothing of their shapes but the rank."""
    weights = {t.name for t in model.graph.initializer}
    changed = False
    for value in model.graph.input:
        dims = value.type.tensor_type.shape.dim
        if value.name in names and value.name not in weights and dims and dims[0].dim_value > 1:
            dims[0].dim_param, changed = f"N{dims[0].dim_value}", True
    inputs = {v.name: v for v in model.graph.input}
    for value in model.graph.output if changed else ():
        if value.name in inputs:
            value.type.CopyFrom(inputs[value.name].type)
        else:
            for dim in value.type.tensor_type.shape.dim:
                dim.Clear()


def strings(array: NDArray[np.generic]) -> TensorProto:
    return helper.make_tensor("", STRING, array.shape, [str(s).encode() for s in array.ravel()])


def inferred(schema: onnx.defs.OpSchema, node: NodeProto, growing: Growing) -> dict[str, TypeProto] | None:
    types = {n: helper.make_tensor_type_proto(*growing.types[n]) for n in node.input if n}
    data = {n: growing.constants[n] for n in node.input if n in growing.constants}
    ids = [helper.make_opsetid("", growing.opset)]
    infer = onnx.shape_inference.infer_node_outputs
    try:
        return dict(infer(schema, node, types, data, opset_imports=ids, ir_version=10))
    except (onnx.shape_inference.InferenceError, onnx.checker.ValidationError, RuntimeError):
        return None


def static(said: TypeProto) -> tuple[int, tuple[int, ...]] | None:
    tensor = said.tensor_type
    if not tensor.HasField("shape") or not all(d.HasField("dim_value") for d in tensor.shape.dim):
        return None
    return tensor.elem_type, tuple(d.dim_value for d in tensor.shape.dim)


SHAPES = (
    (2, 3), (2, 3, 4), (2, 4, 5, 4), (3,), (), (1, 3, 1), (1,), (4, 4), (2, 1, 3, 2, 2), (1, 2, 3, 3, 3), (1, 4, 6, 6),
    (2, 8), (0, 3), (2, 2, 2),
)  # fmt: skip
STEPS = (
    Growing.unary, Growing.row, Growing.row, Growing.row, Growing.twice, Growing.binary, Growing.binary,
    Growing.around_concat, Growing.around_concat, Growing.constants_in_turn, Growing.of_one, Growing.scaled_product,
    Growing.scaled_product, Growing.side_by_side, Growing.side_by_side, Growing.side_by_side, Growing.factored,
    Growing.neutral, Growing.itself, Growing.where, Growing.cast, Growing.transpose, Growing.reshape, Growing.shaped,
    Growing.squeeze, Growing.concat, Growing.split, Growing.slice, Growing.reduce, Growing.normalized, Growing.matmul,
    Growing.products, Growing.gemm, Growing.convolution, Growing.convolution, Growing.pool, Growing.pad,
    Growing.expand, Growing.tile, Growing.gather, Growing.clip, Growing.flatten, Growing.branch,
)  # fmt: skip


@st.composite
def generated_models(draw: st.DrawFn, most: int = 10) -> Generated:
    """A model of up to `most` steps, one of which is an operator drawn evenly from all that are modelled."""
    growing = Growing(draw)
    before, after = draw(st.integers(0, most - 4)), draw(st.integers(0, 4))
    for _ in range(before):
        growing.step()
    growing.one_of(growing.first)
    for _ in range(after):
        growing.step()
    if not growing.types:
        growing.step()
    return growing.finished()


__all__ = ["Generated", "generated_models"]
