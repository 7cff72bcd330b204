"""Operators that work element by element, broadcasting their inputs as NumPy does (ONNX opset 7 and newer)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from fractions import Fraction

import numpy as np

from taso.graph.errors import GraphError, ShapeError
from taso.graph.index import Call, Const, Expr, Meaning
from taso.graph.operator import (
    REQUIRED,
    Attrs,
    AttrValue,
    FileNode,
    InferFunction,
    M,
    Maker,
    MeaningFunction,
    Operator,
    Parts,
    PartsFunction,
    Reading,
    Required,
    Spelling,
    Trait,
    Types,
    Unmodelled,
    register,
)  # fmt: skip
from taso.graph.ops.common import (
    broadcast,
    broadcast_read,
    only_attributes,
    output_loops,
    present,
    require_equal,
    single_axes,
    writes_changed,
)  # fmt: skip
from taso.graph.types import DType, TensorType
from taso.graph.unknown import UnknownReal

_E = Trait.ELEMENTWISE


def _same_dtype(op: str, types: Types) -> DType:
    dtypes = [present(types, i, op).dtype for i in range(len(types))]
    for i, dtype in enumerate(dtypes):
        if dtype is not dtypes[0]:
            raise ShapeError(f"{op}: input 0 is {dtypes[0].name} and input {i} is {dtype.name}; they must agree")
    return dtypes[0]


def _rule(op: str, result: DType | None = None) -> InferFunction:
    def infer(types: Types, attrs: Attrs) -> tuple[TensorType, ...]:
        dtype = _same_dtype(op, types)
        shape = broadcast([present(types, i, op).dims for i in range(len(types))], op)
        return (TensorType(result or dtype, shape),)

    return infer


def _means(op: str, body: Callable[[list[Expr], Attrs], Expr]) -> MeaningFunction:
    def meaning(types: Types, attrs: Attrs) -> tuple[Meaning, ...]:
        given = [present(types, i, op) for i in range(len(types))]
        loops = output_loops(broadcast([t.dims for t in given], op))
        reads = [broadcast_read(i, t, loops) for i, t in enumerate(given)]
        return (Meaning(single_axes(loops), body(reads, attrs)),)

    return meaning


def _call(function: str) -> Callable[[list[Expr], Attrs], Expr]:
    return lambda args, attrs: Call(function, tuple(args))


def constant(value: float) -> Const:
    """A literal that is exact: the decimal that a reader sees, not the nearest binary fraction."""
    if isinstance(value, UnknownReal):
        return Const(value.exact)
    return Const(Fraction(repr(float(value))))


# ── of one argument ──────────────────────────────────────────────────────────────────────────────────────────────


def _unary(name: str, function: str, *traits: Trait, since: int = 1, linear: bool = False) -> Operator:
    return register(
        Operator(
            name, _rule(name), {}, frozenset({_E, *traits}), frozenset({0} if linear else ()),
            _means(name, _call(function)), since=since,
        )
    )  # fmt: skip


RELU = _unary("Relu", "relu", Trait.IDEMPOTENT)
SIGMOID = _unary("Sigmoid", "sigmoid")
TANH = _unary("Tanh", "tanh")
EXP = _unary("Exp", "exp")
LOG = _unary("Log", "log")
SQRT = _unary("Sqrt", "sqrt")
NEG = _unary("Neg", "neg", linear=True)
ABS = _unary("Abs", "abs", Trait.IDEMPOTENT)
RECIPROCAL = _unary("Reciprocal", "reciprocal")
FLOOR = _unary("Floor", "floor", Trait.IDEMPOTENT)
CEIL = _unary("Ceil", "ceil", Trait.IDEMPOTENT)
ROUND = _unary("Round", "round", Trait.IDEMPOTENT, since=11)
ERF = _unary("Erf", "erf", since=9)
SIN = _unary("Sin", "sin", since=7)
COS = _unary("Cos", "cos", since=7)
SIGN = _unary("Sign", "sign", Trait.IDEMPOTENT, since=9)
SOFTPLUS = _unary("Softplus", "softplus")
SOFTSIGN = _unary("Softsign", "softsign")
NOT = register(Operator("Not", _rule("Not"), {}, frozenset({_E})))


def _with_constants(name: str, function: str, defaults: dict[str, float], since: int = 1) -> Operator:
    names = list(defaults)
    body = _means(name, lambda args, attrs: Call(function, (*args, *(constant(attrs.float(n)) for n in names))))
    return register(Operator(name, _rule(name), dict(defaults), frozenset({_E}), meaning=body, since=since))


LEAKY_RELU = _with_constants("LeakyRelu", "leaky_relu", {"alpha": 0.01})
ELU = _with_constants("Elu", "elu", {"alpha": 1.0})
SELU = _with_constants("Selu", "selu", {"alpha": 1.67326319217681884765625, "gamma": 1.05070102214813232421875})
HARD_SIGMOID = _with_constants("HardSigmoid", "hard_sigmoid", {"alpha": 0.2, "beta": 0.5})


# ── activations that are made of others ──────────────────────────────────────────────────────────────────────────


def _times(*factors: Expr) -> Expr:
    whole, *rest = factors
    for factor in rest:
        whole = Call("mul", (whole, factor))
    return whole


def _mish(args: list[Expr], attrs: Attrs) -> Expr:
    return _times(args[0], Call("tanh", (Call("softplus", (args[0],)),)))


def _hard_swish(args: list[Expr], attrs: Attrs) -> Expr:
    """x · min(max(x + 3, 0), 6) / 6, which in whole numbers stays in whole numbers up to the end."""
    shifted = Call("max", (Call("add", (args[0], constant(3))), constant(0)))
    return Call("div", (_times(args[0], Call("min", (shifted, constant(6)))), constant(6)))


def _mish_parts(make: Maker[M], inputs: Sequence[M], attrs: Attrs) -> M:
    return make("Mul", [inputs[0], make("Tanh", [make("Softplus", inputs)])])


def _hard_swish_parts(make: Maker[M], inputs: Sequence[M], attrs: Attrs) -> M:
    return make("Mul", [inputs[0], make("HardSigmoid", inputs, {"alpha": 1 / 6, "beta": 0.5})])


def _made(name: str, body: Callable[[list[Expr], Attrs], Expr], since: int, parts: PartsFunction) -> Operator:
    said = Parts(7, parts)
    return register(
        Operator(name, _rule(name), {}, frozenset({_E}), meaning=_means(name, body), since=since, parts=said)
    )


MISH = _made("Mish", _mish, 18, _mish_parts)
HARD_SWISH = _made("HardSwish", _hard_swish, 14, _hard_swish_parts)

_ROOT = constant(math.sqrt(2))  # the decimal that stands for √2, here and in rules
_TANH_SLOPE = constant(math.sqrt(2 / math.pi))


def _gelu_meaning(args: list[Expr], attrs: Attrs) -> Expr:
    (x,) = args
    half, one = constant(0.5), constant(1)
    if attrs.str("approximate") == "tanh":
        cubed = Call("pow", (x, constant(3)))
        inner = _times(_TANH_SLOPE, Call("add", (x, _times(constant(0.044715), cubed))))
        return _times(half, x, Call("add", (one, Call("tanh", (inner,)))))
    return _times(half, x, Call("add", (one, Call("erf", (Call("div", (x, _ROOT)),)))))


def _gelu_parts(make: Maker[M], inputs: Sequence[M], attrs: Attrs) -> M:
    """As exporters write it, which runtimes recognise."""
    (x,) = inputs
    if attrs.str("approximate") == "tanh":
        cubed = make("Mul", [make("Pow", [x, 3.0]), 0.044715])
        inner = make("Mul", [make("Add", [x, cubed]), math.sqrt(2 / math.pi)])
        return make("Mul", [make("Mul", [x, 0.5]), make("Add", [make("Tanh", [inner]), 1.0])])
    error = make("Erf", [make("Div", [x, math.sqrt(2)])])
    return make("Mul", [make("Mul", [x, make("Add", [error, 1.0])]), 0.5])


GELU = register(
    Operator(
        "Gelu", _rule("Gelu"), {"approximate": "none"}, frozenset({_E}), meaning=_means("Gelu", _gelu_meaning),
        since=20, parts=Parts(9, _gelu_parts),
    )
)  # fmt: skip

# ── Clip ─────────────────────────────────────────────────────────────────────────────────────────────────────────
# `min` and `max` are numbers or None; bounds that are computed leave the node opaque


def _clip(args: list[Expr], attrs: Attrs) -> Expr:
    body = args[0]
    if attrs["min"] is not None:
        body = Call("max", (body, constant(attrs.float("min"))))
    if attrs["max"] is not None:
        body = Call("min", (body, constant(attrs.float("max"))))
    return body


def _read_clip(node: FileNode) -> Reading:
    """Clip 6 has its bounds as attributes, Clip 11 and newer as inputs."""
    only_attributes(node, "min", "max")
    bounds: dict[str, AttrValue] = {}
    for position, name in ((1, "min"), (2, "max")):
        value = node.attrs.get(name)
        if node.has(position):
            value = node.needs(position).item()
        if isinstance(value, float) and not np.isfinite(value):
            raise Unmodelled("Clip with a bound that is not finite")
        bounds[name] = value
    return Reading(bounds, (0,))


def _write_clip(attrs: Attrs, types: Types, opset: int) -> Spelling:
    bounds = {n: attrs[n] for n in ("min", "max") if attrs[n] is not None}
    if opset < 11:
        return Spelling("Clip", {n: float(attrs.float(n)) for n in bounds}, (0,))
    dtype = present(types, 0, "Clip").dtype.numpy
    given = [np.asarray(bounds[n], dtype) if n in bounds else None for n in ("min", "max")]
    while given and given[-1] is None:
        given.pop()
    return Spelling("Clip", {}, (0, *given))


CLIP = register(
    Operator(
        "Clip", _rule("Clip"), {"min": None, "max": None}, frozenset({_E, Trait.IDEMPOTENT}),
        meaning=_means("Clip", _clip), read=_read_clip, write=_write_clip, since=6,
    )
)  # fmt: skip

# ── of two arguments ─────────────────────────────────────────────────────────────────────────────────────────────


def _read_binary(node: FileNode) -> Reading:
    """Before opset 7 an attribute says how to broadcast: only equal shapes mean the same as now."""
    if node.version < 7 and node.type(0).shape != node.type(1).shape:
        raise Unmodelled(f"{node.op_type} {node.version} with broadcasting")
    only_attributes(node, "broadcast", "axis", "consumed_inputs", "fmod") if node.version < 7 else only_attributes(node)
    return Reading({}, (0, 1))


def _integer_division(types: Types) -> bool:
    t = types[0]
    return t is not None and not t.dtype.is_float


def _binary(
    name: str, function: str, *traits: Trait, linear: frozenset[int] = frozenset(), exact_on_floats: bool = False
) -> Operator:
    real = _means(name, _call(function))

    def meaning(types: Types, attrs: Attrs) -> tuple[Meaning, ...]:
        if exact_on_floats and _integer_division(types):
            raise GraphError(f"{name} of integers has no meaning over the reals")
        return real(types, attrs)

    return register(
        Operator(
            name, _rule(name), {}, frozenset({_E, *traits}), linear, meaning, (2, 2), read=_read_binary, since=7,
        )
    )  # fmt: skip


_AC = (Trait.COMMUTATIVE, Trait.ASSOCIATIVE)
ADD = _binary("Add", "add", *_AC)
SUB = _binary("Sub", "sub")
MUL = _binary("Mul", "mul", *_AC, linear=frozenset({0, 1}))
DIV = _binary("Div", "div", linear=frozenset({0}), exact_on_floats=True)


def _pow_type(types: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    base, exponent = present(types, 0, "Pow"), present(types, 1, "Pow")
    return (TensorType(base.dtype, broadcast([base.dims, exponent.dims], "Pow")),)


POW = register(
    Operator(
        "Pow", _pow_type, {}, frozenset({_E}), meaning=_means("Pow", _call("pow")), arity=(2, 2), read=_read_binary,
        since=7,
    )
)  # fmt: skip


def _slope_type(types: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    dtype = _same_dtype("PRelu", types)
    given = [present(types, i, "PRelu").dims for i in range(2)]
    shape = broadcast(given, "PRelu")
    if shape != given[0]:
        raise ShapeError("PRelu: the slope must broadcast to the input's shape, not the other way")
    return (TensorType(dtype, shape),)


PRELU = register(
    Operator(
        "PRelu", _slope_type, {}, frozenset({_E}), meaning=_means("PRelu", _call("leaky_relu")), arity=(2, 2), since=7
    )
)

# ── of any number of arguments ───────────────────────────────────────────────────────────────────────────────────


def _chain(function: str, finish: Callable[[Expr, int], Expr] = lambda e, n: e) -> Callable[[list[Expr], Attrs], Expr]:
    def body(args: list[Expr], attrs: Attrs) -> Expr:
        total = args[0]
        for arg in args[1:]:
            total = Call(function, (total, arg))
        return finish(total, len(args))

    return body


def _read_variadic(node: FileNode) -> Reading:
    """One argument is a copy; before opset 8 all shapes are equal."""
    only_attributes(node, "consumed_inputs")
    return Reading({}, tuple(range(len(node.types))))


def _variadic(name: str, body: Callable[[list[Expr], Attrs], Expr], *traits: Trait) -> Operator:
    return register(
        Operator(
            name, _rule(name), {}, frozenset({_E, *traits}), meaning=_means(name, body), arity=(1, 1 << 20),
            read=_read_variadic, since=6,
        )
    )  # fmt: skip


MAX = _variadic("Max", _chain("max"), *_AC)
MIN = _variadic("Min", _chain("min"), *_AC)
SUM = _variadic("Sum", _chain("add"), *_AC)
MEAN = _variadic("Mean", _chain("add", lambda e, n: Call("mul", (e, Const(Fraction(1, n))))), Trait.COMMUTATIVE)

# ── comparison, logic, selection: their meaning is that of onnx.reference ────────────────────────────────────────


def _comparison(name: str, *traits: Trait, since: int = 7) -> Operator:
    return register(
        Operator(
            name, _rule(name, DType.BOOL), {}, frozenset({_E, *traits}), arity=(2, 2), read=_read_binary, since=since
        )
    )


EQUAL = _comparison("Equal", Trait.COMMUTATIVE)
GREATER = _comparison("Greater")
LESS = _comparison("Less")
GREATER_OR_EQUAL = _comparison("GreaterOrEqual", since=12)
LESS_OR_EQUAL = _comparison("LessOrEqual", since=12)
AND = _comparison("And", *_AC)
OR = _comparison("Or", *_AC)
XOR = _comparison("Xor", *_AC)


def _where_type(types: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    chosen = _same_dtype("Where", types[1:])
    if present(types, 0, "Where").dtype is not DType.BOOL:
        raise ShapeError("Where: the condition must be BOOL")
    return (TensorType(chosen, broadcast([present(types, i, "Where").dims for i in range(3)], "Where")),)


WHERE = register(Operator("Where", _where_type, {}, frozenset({_E}), arity=(3, 3), since=9))

# ── trigonometric and hyperbolic functions ───────────────────────────────────────────────────────────────────────

TAN = _unary("Tan", "tan", since=7)
ASIN = _unary("Asin", "asin", since=7)
ACOS = _unary("Acos", "acos", since=7)
ATAN = _unary("Atan", "atan", since=7)
SINH = _unary("Sinh", "sinh", since=9)
COSH = _unary("Cosh", "cosh", since=9)
ASINH = _unary("Asinh", "asinh", since=9)
ACOSH = _unary("Acosh", "acosh", since=9)
ATANH = _unary("Atanh", "atanh", since=9)

# ── further activations ──────────────────────────────────────────────────────────────────────────────────────────

CELU = _with_constants("Celu", "celu", {"alpha": 1.0}, since=12)
THRESHOLDED_RELU = _with_constants("ThresholdedRelu", "thresholded_relu", {"alpha": 1.0}, since=10)
SHRINK = _with_constants("Shrink", "shrink", {"bias": 0.0, "lambd": 0.5}, since=9)


def _swish(x: Expr, attrs: Attrs) -> Expr:
    alpha = attrs.float("alpha")
    return _times(x, Call("sigmoid", (x if alpha == 1 else _times(constant(alpha), x),)))


def _swish_parts(make: Maker[M], inputs: Sequence[M], attrs: Attrs) -> M:
    (x,) = inputs
    alpha = attrs.float("alpha")
    return make("Mul", [x, make("Sigmoid", [x if alpha == 1 else make("Mul", [x, alpha])])])


SWISH = register(
    Operator(
        "Swish", _rule("Swish"), {"alpha": 1.0}, frozenset({_E}),
        meaning=_means("Swish", lambda args, attrs: _swish(args[0], attrs)), since=24, parts=Parts(7, _swish_parts),
    )
)  # fmt: skip


def _swiglu_type(types: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    _same_dtype("SwiGLU", types)
    gate, value = present(types, 0, "SwiGLU"), present(types, 1, "SwiGLU")
    if gate.rank != value.rank:
        raise ShapeError(f"SwiGLU: the gate is {gate} and the value {value}; they must have one shape")
    for a, b in zip(gate.dims, value.dims, strict=True):
        require_equal(a, b, "SwiGLU", "sizes of gate and value")
    return (gate,)


def _swiglu(args: list[Expr], attrs: Attrs) -> Expr:
    return _times(_swish(args[0], attrs), args[1])


SWIGLU = register(
    Operator(
        "SwiGLU", _swiglu_type, {"alpha": 1.0}, frozenset({_E}), frozenset({1}), _means("SwiGLU", _swiglu), (2, 2),
        since=28,
    )
)  # fmt: skip

# ── tests of one element, and bits: their meaning is that of onnx.reference ──────────────────────────────────────

IS_NAN = register(Operator("IsNaN", _rule("IsNaN", DType.BOOL), {}, frozenset({_E}), since=9))
_INF: dict[str, AttrValue | Required] = {"detect_negative": 1, "detect_positive": 1}
IS_INF = register(
    Operator("IsInf", _rule("IsInf", DType.BOOL), _INF, frozenset({_E}), since=10, write=writes_changed("IsInf", _INF))
)


def _on_bits(name: str, *traits: Trait, since: int = 18, attrs: dict[str, AttrValue | Required] | None = None,
             arity: int = 2) -> Operator:  # fmt: skip
    return register(
        Operator(name, _rule(name), attrs or {}, frozenset({_E, *traits}), arity=(arity, arity), since=since)
    )


BITWISE_AND = _on_bits("BitwiseAnd", *_AC)
BITWISE_OR = _on_bits("BitwiseOr", *_AC)
BITWISE_XOR = _on_bits("BitwiseXor", *_AC)
BITWISE_NOT = _on_bits("BitwiseNot", arity=1)
BIT_SHIFT = _on_bits("BitShift", since=11, attrs={"direction": REQUIRED})
_FMOD: dict[str, AttrValue | Required] = {"fmod": 0}
MOD = register(
    Operator(
        "Mod", _rule("Mod"), _FMOD, frozenset({_E}), arity=(2, 2), since=10, write=writes_changed("Mod", _FMOD),
    )
)  # fmt: skip


# ── CastLike: a Cast to the element type of the second input ─────────────────────────────────────────────────────


def _cast_like_type(types: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    target = types[1]
    if target is None or target.dtype is DType.UNDEFINED:
        raise GraphError("CastLike needs the element type of its input 1")
    return (TensorType(target.dtype, present(types, 0, "CastLike").shape),)


_CAST_LIKE: dict[str, AttrValue | Required] = {"saturate": 1, "round_mode": "up"}
CAST_LIKE = register(
    Operator(
        "CastLike", _cast_like_type, _CAST_LIKE, arity=(2, 2), since=15,
        write=writes_changed("CastLike", _CAST_LIKE, {"saturate": 19, "round_mode": 24}),
    )
)  # fmt: skip
