"""Random valid ONNX models, made with the onnx package alone: nothing of what is tested helps to make them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import TypeVar

import ml_dtypes
import numpy as np
import onnx
import onnx.checker
import onnx.defs
import onnx.shape_inference
import test_type_rules as rules
from hypothesis import strategies as st
from models import Arrays
from numpy.typing import NDArray
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, TypeProto, ValueInfoProto, helper, numpy_helper

T = TypeVar("T")
F32, U8, I8, I32, I64, STRING, BOOL, F16, F64 = (
    TensorProto.FLOAT, TensorProto.UINT8, TensorProto.INT8, TensorProto.INT32, TensorProto.INT64, TensorProto.STRING,
    TensorProto.BOOL, TensorProto.FLOAT16, TensorProto.DOUBLE,
)  # fmt: skip
BF16 = TensorProto.BFLOAT16
DTYPES = tuple(sorted(code for _, code in TensorProto.DataType.items() if code != TensorProto.UNDEFINED))
"""All element types that the installed onnx knows."""
MOST_DTYPES = (*(F32,) * 30, F64, F64, F16, F16, BF16, I32, I64, BOOL, *DTYPES)
FLOATS = frozenset({F32, F64, F16, BF16})
COMPLEX = frozenset({TensorProto.COMPLEX64, TensorProto.COMPLEX128})
# these hold few numbers, and these are the ones to draw from
FEW: dict[str, tuple[float, ...]] = {
    "float4_e2m1fn": (0.5, 1, 1.5, 2, 3, -0.5, -1, -1.5, -2), "float8_e8m0fnu": (0.25, 0.5, 1, 2, 4),
    "int4": (1, 2, 3, 5, 7, -1, -2, -4, -8), "uint4": (1, 2, 3, 5, 8, 15), "int2": (1, -1, -2), "uint2": (1, 2, 3),
}  # fmt: skip
# an IR version before these does not have the type
FIRST_IR = {
    code: ir
    for ir, names in {
        9: "FLOAT8E4M3FN FLOAT8E4M3FNUZ FLOAT8E5M2 FLOAT8E5M2FNUZ", 10: "UINT4 INT4", 11: "FLOAT4E2M1",
        12: "FLOAT8E8M0", 13: "UINT2 INT2", 14: "FLOAT6E2M3 FLOAT6E3M2",
    }.items()
    for name in names.split()
    for known, code in TensorProto.DataType.items()
    if known == name
}  # fmt: skip
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
    """A model, and what its inputs hold: `index` (0 and 1), `counts` (1 to 3), `lengths`, `positive` below 1, or `any`.

    `built` are its operators, `marks` what else is in it.
    """

    model: ModelProto
    kinds: dict[str, str]
    sizes: dict[str, tuple[int, ...]]
    built: list[str] = field(default_factory=list)
    marks: set[str] = field(default_factory=set)

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
    if kind == "counts":
        return rng.integers(1, 4, shape).astype(np_dtype)
    if kind in ("zero", "one"):
        return np.full(shape, float(kind == "one")).astype(np_dtype)
    if dtype == STRING:
        return np.array(rng.integers(0, 3, shape).astype(str), dtype=object).reshape(shape)
    if np_dtype.name in FEW:
        return np.asarray(rng.choice(FEW[np_dtype.name], shape)).astype(np_dtype)
    if kind == "positive":
        return (rng.integers(1, 64, shape) / 64).astype(np_dtype)
    values = rng.integers(1, 9, shape) / (4 if np_dtype.kind not in "iu" else 1)
    if np_dtype.kind != "u":
        values = values * rng.choice([-1, 1], shape)
    if dtype in COMPLEX:
        values = values + 1j * rng.integers(-8, 9, shape) / 4
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
def fitting(opset: int) -> dict[str, list[rules.Row]]:
    """Of each operator that this opset has the rows in which it is what it is at this opset."""
    rows = {op: [r for r in of if same_operator(op, r.opset, opset)] for op, of in by_operator().items()}
    return {op: of for op, of in rows.items() if of}


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
    return schema is not None and admits(schema.inputs, position, dtype)


def gives(name: str, opset: int, dtype: int) -> bool:
    schema = schema_of(name, opset)
    return schema is not None and admits(schema.outputs, 0, dtype)


def admits(formal: Sequence[onnx.defs.OpSchema.FormalParameter], position: int, dtype: int) -> bool:
    if not formal:
        return False
    return f"tensor({TensorProto.DataType.Name(dtype).lower()})" in formal[min(position, len(formal) - 1)].types


# ── growing a graph ──────────────────────────────────────────────────────────────────────────────────────────────


class Growing:
    """A graph under construction; a step that does not fit adds nothing.

    Inside of another (`outer`) it is the body of an If, a Loop or a Scan, which may read what is outside.
    """

    def __init__(self, draw: st.DrawFn, opset: int, outer: Growing | None = None) -> None:
        self.draw = draw
        self.opset = opset
        self.outer = outer
        self.depth: int = outer.depth + 1 if outer else 0
        self.graph = GraphProto(name=draw(st.sampled_from(("g", "a graph", "größe"))))
        self.types: dict[str, tuple[int, tuple[int, ...]]] = dict(outer.types) if outer else {}
        self.constants: dict[str, TensorProto] = dict(outer.constants) if outer else {}
        self.kinds: dict[str, str] = dict(outer.kinds) if outer else {}
        self.read: set[str] = set()
        self.built: list[str] = outer.built if outer else []
        self.marks: set[str] = outer.marks if outer else set()
        self.number: int = outer.number if outer else 1000
        self.open: dict[str, ValueInfoProto] = {}

    # names and values

    def fresh(self) -> str:
        self.number += 1
        return f"{self.draw(st.sampled_from(VALUE_NAMES))}{self.number}"

    def chance(self, percent: int) -> bool:
        return self.draw(st.integers(0, 99)) >= 100 - percent

    def pick(self, options: Iterable[T]) -> T:
        return self.draw(st.sampled_from(list(options)))

    def input(self, dtype: int, shape: Sequence[int], kind: str = "any") -> str:
        """An input of the model; a body reads it from outside."""
        if self.outer is not None:
            self.outer.number = self.number
            name = self.outer.input(dtype, shape, kind)
            self.number = self.outer.number
        else:
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
        if self.outer is not None and (self.opset < 9 or self.chance(40)):
            # a model of opset 8 is of IR version 3, in which initializers of a body would have to be inputs of it
            self.outer.number = self.number
            name = self.outer.constant(tensor, kind)
            self.number = self.outer.number
            self.types[name], self.constants[name] = self.outer.types[name], self.outer.constants[name]
            self.kinds[name] = kind
            return name
        held.name = name = self.fresh()
        self.types[name], self.constants[name], self.kinds[name] = (held.data_type, tuple(held.dims)), held, kind
        if self.chance(25) and gives("Constant", self.opset, held.data_type):
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
        if not all(admits(schema.inputs, i, self.types[n][0]) for i, n in enumerate(node.input) if n):
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
        values = [n for n in self.types if self.kinds.get(n, "any") == "any"]
        if not values or self.chance(20):
            dtype = self.pick(MOST_DTYPES)
            shape = self.draw(st.sampled_from(SHAPES))
            values.append(self.input(dtype, shape))
        x = self.pick(values[-5:] if self.chance(70) else values)
        self.pick(STEPS)(self, x)

    def row(self, x: str) -> None:
        known = fitting(self.opset)
        self.one_of(self.pick(known[self.pick(known)]))

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
        if op in ("Div", "Mod") and position == 1 and kind == "index":
            kind = "counts"
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
        # ONNX Runtime dies of whole numbers divided by 0, and of the least divided by -1
        kind = "counts" if name == "Div" and dtype not in FLOATS else "any"
        other = shape if equal else self.broadcast(shape, up=name != "PRelu")
        y = self.weight(dtype, other, kind) if kind == "counts" else self.operand(dtype, other)
        if self.add(name, [y, x] if name not in ("Div", "Pow", "PRelu") and self.chance(40) else [x, y]):
            self.marks.update(["operands that broadcast"] * (self.types[y][1] != shape))

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
        """A Cast that fits in any case: among numbers what overflows is left open."""
        to = self.pick([d for d in (*FLOATS, I32, I64, BOOL, *SMALL_FLOATS) if gives("Cast", self.opset, d)])
        if self.types[x][0] != STRING:
            self.add("Cast", [x], to=to)

    def themed(self, theme: str, row: rules.Row | None) -> None:
        """The step that a theme asks for."""
        if row is not None:
            self.one_of(row)
        elif theme in TensorProto.DataType.keys():
            for made in self.draw(st.sampled_from(((False,), (True,), (False, True)))):
                self.of_any_type("", TensorProto.DataType.Value(theme), made)
        else:
            dtype = self.pick((F32,) * 8 + MOST_DTYPES)
            x = self.operand(dtype, self.draw(st.sampled_from(SHAPES)))
            self.pick({"If": BODIES[:1], "Loop": BODIES[1:2] * 4 + BODIES[3:], "Scan": BODIES[2:3]}[theme])(self, x)

    def of_any_type(self, x: str, dtype: int = 0, made: bool | None = None) -> None:
        """A value of any element type, which comes in, is a weight, or is made, and is moved or made a number."""
        dtype = dtype or self.pick(DTYPES)
        shape = self.draw(st.sampled_from(SHAPES))
        given, making = (self.input, self.weight), (self.cast_from, self.quantized, self.filled)
        sources = (*given, *making) if made is None else making if made else given
        y = self.pick(sources)(dtype, shape)
        if not y:
            return
        for _ in range(self.draw(st.integers(0, 2))):
            before = len(self.types)
            self.pick(MOVES)(self, y)
            moved = [n for n in list(self.types)[before:] if n not in self.kinds and self.types[n][0] == dtype]
            y = self.pick(moved) if moved else y
        if y in self.kinds or self.chance(50):
            self.pick(SINKS)(self, y)

    def identity(self, x: str) -> None:
        self.add("Identity", [x])

    def cast_from(self, dtype: int, shape: Sequence[int]) -> str:
        """A value cast to this type from one that does not overflow in it."""
        sources = [d for d in DTYPES if d != dtype and takes("Cast", self.opset, 0, d)]
        if not sources or not gives("Cast", self.opset, dtype):
            return ""
        source = self.pick(sources)
        few = {TensorProto.DataType.Name(d) for d in (source, dtype)} & {"INT2", "BOOL"}
        y = self.operand(source, shape, "index" if few or source == STRING else "counts")
        return (self.add("Cast", [y], to=dtype) or [""])[0]

    def quantized(self, dtype: int, shape: Sequence[int]) -> str:
        if not gives("QuantizeLinear", self.opset, dtype):
            return ""
        sources = [d for d in FLOATS if takes("QuantizeLinear", self.opset, 0, d)]
        source = self.pick(sources)
        scale = self.numbers([self.pick((0.25, 0.5))], source, ())
        zero = self.weight(dtype, (), "zero")
        return (self.add("QuantizeLinear", [self.operand(source, shape), scale, zero]) or [""])[0]

    def filled(self, dtype: int, shape: Sequence[int]) -> str:
        """A value of which all elements are one, where this type can be filled."""
        if not gives("ConstantOfShape", self.opset, dtype):
            return ""
        value = numpy_helper.from_array(array_of(np.random.default_rng(1), dtype, (1,), "any"))
        return (self.add("ConstantOfShape", [self.numbers(shape, shape=(len(shape),))], value=value) or [""])[0]

    def as_number(self, x: str) -> None:
        if takes("Cast", self.opset, 0, self.types[x][0]):
            self.add("Cast", [x], to=self.pick((F32, F32, F64, F16)))

    def dequantized(self, x: str) -> None:
        if takes("DequantizeLinear", self.opset, 0, self.types[x][0]):
            self.add("DequantizeLinear", [x, self.numbers([self.pick((0.25, 0.5))], F32, ())])

    def bits(self, x: str) -> None:
        """The same bits as an integer."""
        same = [d for d in INTEGERS if BITS[d] == BITS.get(self.types[x][0]) and d != self.types[x][0]]
        if same:
            self.add("BitCast", [x], to=self.pick(same))

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
        kind = "counts" if op == "Div" and dtype not in FLOATS else "any"
        for y in self.add(op, [x, self.weight(dtype, self.broadcast(shape, up=False), kind)]):
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
        # no oracle pads strings, and a scale of eight bits has no zero to pad with
        odd = TensorProto.DataType.Name(dtype) in ("STRING", "FLOAT8E8M0")
        if odd or not shape or not takes("Pad", self.opset, 0, dtype):
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

    # bodies

    def inside(self) -> Growing:
        return Growing(self.draw, self.opset, self)

    def declared(self, dtype: int, shape: Sequence[int], stated: bool = True) -> str:
        """An input of this body."""
        name = self.fresh()
        info = helper.make_tensor_value_info(name, dtype, shape if stated else None)
        self.graph.input.append(info)
        self.types[name] = dtype, tuple(shape)
        return name

    def own(self) -> list[str]:
        """What this body takes and makes itself."""
        outside = self.outer.types if self.outer else {}
        return [n for n in self.types if n not in outside and n not in self.kinds]

    def grown(self, *begin: str) -> Growing:
        """This body after a few steps, of which the first are made with `begin`."""
        for x in begin:
            self.pick(INSIDE)(self, x)
        for _ in range(self.draw(st.integers(0, 2))):
            self.step()
        return self

    def returned(self, dtype: int, shape: tuple[int, ...], instead: str) -> str:
        """Makes a value of this type an output of the body: one of its own, or what is made of `instead`."""
        listed = {v.name for v in self.graph.output}
        alike = [n for n in self.own() if self.types[n] == (dtype, shape) and n not in listed and n in self.made()]
        name = self.pick(alike[-3:]) if alike and self.chance(80) else (self.add("Identity", [self.mapped(instead)]))[0]
        self.graph.output.append(helper.make_tensor_value_info(name, dtype, shape))
        self.read.add(name)
        return name

    def passes(self, op: str, dtype: int) -> bool:
        """Whether a Loop or a Scan carries values of this type."""
        return gives(op, self.opset, dtype) and takes(op, self.opset, 2, dtype) and gives("Identity", self.opset, dtype)

    def stackable(self, op: str) -> list[str]:
        """What this body makes and what may be given for each iteration."""
        own = [n for n in self.own() if n in self.made() and len(self.types[n][1]) < 5]
        # ONNX Runtime dies of a Scan that stacks what is empty along another axis than the first
        whole = [n for n in own if op == "Loop" or math.prod(self.types[n][1])]
        return [n for n in whole if self.passes(op, self.types[n][0])]

    def made(self) -> set[str]:
        return {n for node in self.graph.node for n in node.output}

    def surrounds(self, op: str, inputs: Sequence[str], bodies: Sequence[Growing], outputs: int,
                  attributes: dict[str, object]) -> list[str]:  # fmt: skip
        """Adds the node with these bodies; its outputs have no types yet."""
        names = ["then_branch", "else_branch"] if op == "If" else ["body"]
        self.number = max(self.number, *(b.number for b in bodies))
        outside = [n for b in bodies for n in b.read if n in self.types]
        made = [self.fresh() + f".{i}" for i in range(outputs)]
        graphs = dict(zip(names, (b.graph for b in bodies), strict=True))
        self.node(helper.make_node(op, inputs, made, **graphs, **attributes))
        self.read.update(inputs, outside)
        self.built.append(op)
        self.marks.update(f"{op} that captures a {'weight' if n in self.constants else 'value'}" for n in outside)
        return made

    def mark_carried(self, op: str, states: int, scanned: int) -> None:
        said = {"state": states, "scanned outputs": scanned, "both": states and scanned, "two states": states > 1}
        self.marks.update(f"{op} with {what}" for what, holds in said.items() if holds)

    def stated(self, name: str, dtype: int, shape: tuple[int, ...]) -> None:
        """Says of what type a value is that ONNX's inference leaves open."""
        self.types[name] = dtype, shape
        if self.chance(50):
            self.graph.value_info.append(helper.make_tensor_value_info(name, dtype, shape))

    def branch(self, x: str) -> None:
        """An If of which the branches make values of one type."""
        if self.depth > 1:
            return
        yes = self.inside().grown(x)
        own = [n for n in yes.own() if n in yes.made()]
        like = yes.pick(own[-3:]) if own else x
        types = [yes.types[like]] + ([yes.types[x]] if yes.chance(30) else [])
        self.number = yes.number
        no = self.inside().grown(x)
        if not all(gives("If", self.opset, t[0]) and takes("Identity", self.opset, 0, t[0]) for t in types):
            return
        for body, instead in ((yes, like), (no, "")):
            for i, (dtype, shape) in enumerate(types):
                body.returned(dtype, shape, x if i else instead or body.operand(dtype, shape))
        self.number = max(yes.number, no.number)
        condition = self.input(BOOL, (), "index") if self.chance(80) else self.weight(BOOL, (), "index")
        if self.chance(50):
            # names need only be unique in each of the branches
            made_in = ([n for n in body.own() if n in body.made()] for body in (no, yes))
            renamed(no.graph, dict(zip(*made_in, strict=False)))
        made = self.surrounds("If", [condition], [yes, no], len(types), {})
        for name, (dtype, shape) in zip(made, types, strict=True):
            self.stated(name, dtype, shape)

    def loop(self, x: str) -> None:
        """A Loop with state, scanned outputs and any of its three ways to end."""
        if self.depth > 1 or not self.passes("Loop", self.types[x][0]):
            return
        starts = [x, *([self.operand(*self.types[x])] if self.chance(40) else [])]
        if self.opset >= 13 and self.chance(10):
            starts = []
        body, stated = self.inside(), self.chance(70)
        i, on = body.declared(I64, ()), body.declared(BOOL, ())
        states = [body.declared(*self.types[s], stated) for s in starts]
        body.grown(*(states or [x]))
        ends = self.draw(st.sampled_from(("count", "count", "input", "condition")))
        if ends == "condition" and not takes("Less", self.opset, 0, I64):
            ends = "count"
        if ends == "condition":
            again = body.add("Less", [i, body.numbers([self.draw(st.integers(0, 2))], I64, ())])[0]
        else:
            again = body.add("Identity", [on])[0]
        body.graph.output.append(helper.make_tensor_value_info(again, BOOL, ()))
        for s in states:
            body.returned(*body.types[s], s)
        scans = body.stackable("Loop")
        scanned = [body.types[body.pick(scans)] for _ in range(self.draw(st.integers(0, 2)))] if scans else []
        for dtype, shape in scanned:
            alike = [n for n in scans if body.types[n] == (dtype, shape)]
            body.returned(dtype, shape, alike[0])
        if not states and not scanned:
            return
        self.number = body.number
        count = self.draw(st.integers(0, 3))
        trips = {"count": self.numbers([count], I64, ()), "input": "", "condition": ""}[ends]
        trips = self.input(I64, (), "index") if ends == "input" else trips
        first = self.pick(("", self.numbers([1], BOOL, ())))
        made = self.surrounds("Loop", [trips, first, *starts], [body], len(states) + len(scanned), {})
        self.mark_carried("Loop", len(states), len(scanned))
        self.marks.add(f"Loop ended by {ends}")
        for name, s in zip(made, starts, strict=False):
            self.stated(name, *self.types[s])
        for name, (dtype, shape) in zip(made[len(states) :], scanned, strict=True):
            if ends == "count":
                self.stated(name, dtype, (count, *shape))
            else:
                self.open[name] = helper.make_tensor_value_info(name, dtype, [None, *shape])

    def growing_state(self, x: str) -> None:
        """A Loop whose state is longer after each iteration."""
        dtype, shape = self.types[x]
        if self.depth > 1 or not shape or not takes("Concat", self.opset, 0, dtype) or not self.passes("Loop", dtype):
            return
        count = self.draw(st.integers(0, 2))
        more = self.operand(dtype, (1, *shape[1:]))
        body = self.inside()
        body.declared(I64, ())
        on = body.declared(BOOL, ())
        state = body.declared(dtype, shape, stated=False)
        longer = body.mapped(body.mapped(state))
        joined = body.fresh()
        body.node(helper.make_node("Concat", [longer, more], [joined], axis=0))
        body.read.update((longer, more))
        again = body.add("Identity", [on])[0]
        body.graph.output.append(helper.make_tensor_value_info(again, BOOL, ()))
        body.graph.output.append(helper.make_tensor_value_info(joined, dtype, None))
        self.number = body.number
        inputs = [self.numbers([count], I64, ()), "", x]
        for name in self.surrounds("Loop", inputs, [body], 1, {}):
            self.stated(name, dtype, (shape[0] + count, *shape[1:]))
            self.marks.add("Loop whose state grows")

    def scan(self, x: str) -> None:
        """A Scan over one value or two, with state or without, along any axes and directions."""
        dtype, shape = self.types[x]
        if self.depth > 1 or self.opset < 9 or not shape or not math.prod(shape):
            return
        if not self.passes("Scan", dtype):
            return
        axis = self.draw(st.integers(0, len(shape) - 1))
        length = shape[axis]
        begin = [self.operand(dtype, self.draw(st.sampled_from(SHAPES[:6])))] if self.chance(70) else []
        over = [(x, axis), *([(self.operand(dtype, (length, 2)), 0)] if self.chance(30) else [])]
        body, stated = self.inside(), self.chance(70)
        states = [body.declared(*self.types[s], stated) for s in begin]
        items = []
        for name, along in over:
            full = self.types[name][1]
            items.append(body.declared(self.types[name][0], full[:along] + full[along + 1 :], stated))
        body.grown(*(states[:1] + items[:1]))
        for s in states:
            body.returned(*body.types[s], s)
        scans = body.stackable("Scan") or items
        scanned = [body.types[body.pick(scans)] for _ in range(self.draw(st.integers(0 if states else 1, 2)))]
        for one, size in scanned:
            alike = [n for n in scans if body.types[n] == (one, size)]
            body.returned(one, size, alike[0])
        attributes: dict[str, object] = {"num_scan_inputs": len(over)}
        self.marks.update(["Scan of two values"] * (len(over) > 1))
        axes = [self.draw(st.integers(0, len(size))) for _, size in scanned]
        if self.chance(50) or any(a for _, a in over):
            attributes["scan_input_axes"] = [a for _, a in over]
        if any(axes):
            attributes["scan_output_axes"] = axes
        if self.chance(50):
            attributes["scan_input_directions"] = [self.draw(st.integers(0, 1)) for _ in over]
        if self.chance(50) and scanned:
            attributes["scan_output_directions"] = [self.draw(st.integers(0, 1)) for _ in scanned]
        outputs = len(states) + len(scanned)
        made = self.surrounds("Scan", [*begin, *(n for n, _ in over)], [body], outputs, attributes)
        self.mark_carried("Scan", len(states), len(scanned))
        for name, s in zip(made, begin, strict=False):
            self.stated(name, *self.types[s])
        for name, (one, size), along in zip(made[len(states) :], scanned, axes, strict=True):
            self.stated(name, one, (*size[:along], length, *size[along:]))

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
        self.graph.output.extend(self.open.values())
        if self.chance(20):
            self.graph.input.append(helper.make_tensor_value_info("never read", F32, (2, 3)))
            self.types["never read"], self.kinds["never read"] = (F32, (2, 3)), "any"
        ir = 3 if self.opset < 9 else 10 if self.opset > 18 else self.draw(st.sampled_from((7, 8, 10)))
        ir = max([ir, *(FIRST_IR[d] for d, _ in self.types.values() if d in FIRST_IR)])
        if ir == 3 or self.chance(10):
            for tensor in self.graph.initializer:
                self.graph.input.append(helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims))
        model = helper.make_model(self.graph, opset_imports=[helper.make_opsetid("", self.opset)], ir_version=ir,
                                  producer_name="größe", doc_string="a doc")  # fmt: skip
        helper.set_model_props(model, {"key": "value"})
        sizes = {v.name: self.types[v.name][1] for v in self.graph.input}
        if self.chance(25):
            symbolic(model, [n for n, k in self.kinds.items() if k == "any"])
        return Generated(model, self.kinds, sizes, self.built, self.marks)


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
            forget_sizes(value)
    if changed:
        del model.graph.value_info[:]
        for body in bodies_of(model.graph):
            for value in (*body.input, *body.output, *body.value_info):
                forget_sizes(value)


def forget_sizes(value: ValueInfoProto) -> None:
    for dim in value.type.tensor_type.shape.dim:
        dim.Clear()


def bodies_of(graph: GraphProto, deep: bool = True) -> Iterator[GraphProto]:
    """The bodies of If, Loop and Scan in a graph, at any depth if `deep`."""
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.HasField("g"):
                yield attribute.g
                if deep:
                    yield from bodies_of(attribute.g)


def renamed(graph: GraphProto, names: Mapping[str, str]) -> None:
    """Gives values of a body, where they are made and wherever they are read, other names."""
    for node in graph.node:
        node.input[:] = [names.get(n, n) for n in node.input]
        node.output[:] = [names.get(n, n) for n in node.output]
    for value in (*graph.input, *graph.output, *graph.value_info):
        value.name = names.get(value.name, value.name)
    for body in bodies_of(graph, deep=False):
        renamed(body, names)


def strings(array: NDArray[np.generic]) -> TensorProto:
    return helper.make_tensor("", STRING, array.shape, [str(s).encode() for s in array.ravel()])


def inferred(schema: onnx.defs.OpSchema, node: NodeProto, growing: Growing) -> dict[str, TypeProto] | None:
    types = {n: helper.make_tensor_type_proto(*growing.types[n]) for n in node.input if n}
    data = {n: growing.constants[n] for n in node.input if n in growing.constants}
    ids = [helper.make_opsetid("", growing.opset)]
    infer = onnx.shape_inference.infer_node_outputs
    try:
        found = dict(infer(schema, node, types, data, opset_imports=ids, ir_version=10))
    except (onnx.shape_inference.InferenceError, onnx.checker.ValidationError, RuntimeError):
        return None
    if all(static(t) for t in found.values()) or not schema.has_function and not schema.has_context_dependent_function:
        return found
    if node.op_type in ("GroupNormalization", "MeanVarianceNormalization"):
        # of these ONNX infers no shape
        return {node.output[0]: types[node.input[0]]}
    # of an operator that is a function the inference of whole models says more
    graph = helper.make_graph([node], "one", [helper.make_value_info(n, t) for n, t in types.items()],
                              [ValueInfoProto(name=n) for n in node.output if n], list(data.values()))  # fmt: skip
    again = onnx.shape_inference.infer_shapes(helper.make_model(graph, opset_imports=ids), data_prop=True).graph
    return {v.name: v.type for v in again.output}


def static(said: TypeProto) -> tuple[int, tuple[int, ...]] | None:
    tensor = said.tensor_type
    known = tensor.elem_type and tensor.HasField("shape")
    if not known or not all(d.HasField("dim_value") and d.dim_value >= 0 for d in tensor.shape.dim):
        return None
    return tensor.elem_type, tuple(d.dim_value for d in tensor.shape.dim)


SHAPES = (
    (2, 3), (2, 3, 4), (2, 4, 5, 4), (3,), (), (1, 3, 1), (1,), (4, 4), (2, 1, 3, 2, 2), (1, 2, 3, 3, 3), (1, 4, 6, 6),
    (2, 8), (0, 3), (2, 2, 2),
)  # fmt: skip
SMALL_FLOATS = tuple(d for d in DTYPES if "FLOAT" in TensorProto.DataType.Name(d) and d not in (F32, F16, BF16))
BITS: dict[int, int] = {
    d: getattr(ml_dtypes, "finfo" if "float" in helper.tensor_dtype_to_np_dtype(d).name else "iinfo")(
        helper.tensor_dtype_to_np_dtype(d)
    ).bits
    for d in DTYPES
    if d not in (STRING, BOOL, *COMPLEX)
}  # fmt: skip
INTEGERS = tuple(d for d in BITS if "INT" in TensorProto.DataType.Name(d))
# what moves elements of any type
MOVES = (
    Growing.transpose, Growing.reshape, Growing.squeeze, Growing.concat, Growing.split, Growing.slice, Growing.pad,
    Growing.expand, Growing.tile, Growing.gather, Growing.flatten, Growing.where, Growing.shaped, Growing.identity,
)  # fmt: skip
SINKS = (Growing.identity, Growing.identity, Growing.as_number, Growing.dequantized, Growing.bits)
BODIES = (Growing.branch, Growing.loop, Growing.scan, Growing.growing_state)
# what a body begins with: much of it can be rewritten
INSIDE = (
    Growing.twice, Growing.twice, Growing.unary, Growing.binary, Growing.matmul, Growing.products, Growing.neutral,
    Growing.transpose, Growing.scaled_product, Growing.factored, Growing.around_concat, Growing.reduce,
    Growing.constants_in_turn, Growing.where, Growing.row, *BODIES,
)  # fmt: skip
STEPS = (
    Growing.unary, Growing.row, Growing.row, Growing.row, Growing.twice, Growing.binary, Growing.binary,
    Growing.around_concat, Growing.around_concat, Growing.constants_in_turn, Growing.of_one, Growing.scaled_product,
    Growing.scaled_product, Growing.side_by_side, Growing.side_by_side, Growing.side_by_side, Growing.factored,
    Growing.neutral, Growing.itself, Growing.where, Growing.cast, Growing.transpose, Growing.reshape, Growing.shaped,
    Growing.squeeze, Growing.concat, Growing.split, Growing.slice, Growing.reduce, Growing.normalized, Growing.matmul,
    Growing.products, Growing.gemm, Growing.convolution, Growing.convolution, Growing.pool, Growing.pad,
    Growing.expand, Growing.tile, Growing.gather, Growing.clip, Growing.flatten, *BODIES, Growing.of_any_type,
    Growing.of_any_type, Growing.of_any_type,
)  # fmt: skip
THEMES = (*rules.OPERATORS, *(TensorProto.DataType.Name(d) for d in DTYPES * 2), *("If", "Loop", "Scan") * 8)


@st.composite
def generated_models(draw: st.DrawFn, theme: str = "", most: int = 10) -> Generated:
    """A model of up to `most` steps, one of which is the theme: an operator or an element type, drawn evenly."""
    theme = theme or draw(st.sampled_from(THEMES))
    row = draw(st.sampled_from(by_operator()[theme])) if theme in by_operator() else None
    growing = Growing(draw, draw(st.sampled_from(opsets_for(theme, row))))
    for _ in range(draw(st.integers(0, most - 4))):
        growing.step()
    growing.themed(theme, row)
    for _ in range(draw(st.integers(0, 4))):
        growing.step()
    if not growing.types:
        growing.step()
    return growing.finished()


def opsets_for(theme: str, row: rules.Row | None) -> list[int]:
    """The opsets in which a theme means something; the first that the row is meant in comes last."""
    if row is not None:
        alike = [o for o in OPSETS if same_operator(row.op, row.opset, o)]
        return [*alike, max(row.opset, OPSETS[0])]
    if theme in TensorProto.DataType.keys():
        dtype = TensorProto.DataType.Value(theme)
        return [o for o in OPSETS if takes("Identity", o, 0, dtype) or takes("Cast", o, 0, dtype)]
    return [o for o in OPSETS if theme != "Scan" or o >= 9]


__all__ = ["DTYPES", "THEMES", "Generated", "bodies_of", "generated_models"]
