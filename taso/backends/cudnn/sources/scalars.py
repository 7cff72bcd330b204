"""Element-wise operators as C++: an expression of the elements at one position, by the names of `prelude`."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from taso.graph.operator import Attrs, Operator
from taso.graph.types import DType
from taso.graph.unknown import UnknownReal

REAL = frozenset({DType.FLOAT, DType.DOUBLE, DType.FLOAT16, DType.BFLOAT16})
SIGNED = frozenset({DType.INT8, DType.INT16, DType.INT32, DType.INT64})
UNSIGNED = frozenset({DType.UINT8, DType.UINT16, DType.UINT32, DType.UINT64})
INTEGER = SIGNED | UNSIGNED
NUMBER = REAL | INTEGER
HELD = NUMBER | {DType.BOOL}

_STORED = {
    DType.FLOAT: "float", DType.DOUBLE: "double", DType.FLOAT16: "f16", DType.BFLOAT16: "bf16", DType.BOOL: "bool",
    DType.INT8: "i8", DType.INT16: "i16", DType.INT32: "i32", DType.INT64: "i64",
    DType.UINT8: "u8", DType.UINT16: "u16", DType.UINT32: "u32", DType.UINT64: "u64",
}  # fmt: skip


def stored(dtype: DType) -> str:
    """The C++ type of an element in memory."""
    return _STORED[dtype]


def computed(dtype: DType) -> str:
    """The C++ type in which an element is computed: float32 of what is narrower."""
    return "float" if dtype in (DType.FLOAT16, DType.BFLOAT16) else _STORED[dtype]


def literal(value: float, ctype: str) -> str:
    """A number as C++ of a computed type; integers must fit it."""
    if ctype == "bool":
        return "true" if value else "false"
    if ctype not in ("float", "double"):
        whole = int(value)
        # the least number has no literal of its own: a minus is applied to a literal
        text = f"({whole + 1}LL - 1)" if whole == -(1 << 63) else f"{whole}{'ULL' if whole >= 1 << 63 else 'LL'}"
        return f"({ctype}){text}"
    if math.isnan(value):
        return f"({ctype})__int_as_float(0x7fc00000)"
    if math.isinf(value):
        return f"({ctype})__int_as_float({'0x7f800000' if value > 0 else '(int)0xff800000'})"
    if ctype == "double":
        return f"({float(value)!r})"
    if abs(value) > _LARGEST:
        return literal(math.copysign(math.inf, value), ctype)
    return f"({float(value)!r}f)"


_LARGEST = float.fromhex("0x1.ffffffp127")
"""From here on numbers round to infinity in float32."""

Emit = Callable[[Sequence[str], str, Attrs], str | None]
"""Names of the arguments, the C++ type in which all are, attributes → an expression, or None."""


def expression(
    op: Operator, attrs: Attrs, args: Sequence[tuple[str, DType] | None], result: DType
) -> str | None:  # fmt: skip
    """`op` of elements of these names and types as C++ of the computed type of `result`, None if it is not covered."""
    given = [a for a in args if a is not None]
    if op.domain or len(given) != len(args) or any(d not in HELD for _, d in given) or result not in HELD:
        return None
    if any(isinstance(v, UnknownReal) for v in attrs.values()):
        return None
    names, dtypes = [n for n, _ in given], [d for _, d in given]
    special = _SPECIAL.get(op.name)
    if special is not None:
        return special(names, dtypes, result, attrs)
    emit, allowed = _TABLE.get(op.name, (None, frozenset[DType]()))
    if emit is None or any(d not in allowed or d is not dtypes[0] for d in dtypes):
        return None
    return emit(names, computed(dtypes[0]), attrs)


# ── alike for all types that they are for ────────────────────────────────────────────────────────────────────────


def _format(text: str) -> Emit:
    return lambda a, t, attrs: text.format(*a, T=t)


def _joined(function: str) -> Emit:
    def emit(a: Sequence[str], t: str, attrs: Attrs) -> str:
        total = a[0]
        for name in a[1:]:
            total = f"{function}({total}, {name})"
        return total

    return emit


def _mean(a: Sequence[str], t: str, attrs: Attrs) -> str:
    return f"({_joined('add')(a, t, attrs)} / ({t}){len(a)})"


def _with(text: str, *names: str) -> Emit:
    """An expression in which numbers of attributes stand by their names."""

    def emit(a: Sequence[str], t: str, attrs: Attrs) -> str:
        numbers = {n: literal(attrs.float(n), t) for n in names}
        return text.format(*a, T=t, **numbers)

    return emit


def _clip(a: Sequence[str], t: str, attrs: Attrs) -> str | None:
    found = a[0]
    for name, function in (("min", "most"), ("max", "least")):
        if attrs[name] is None:
            continue
        bound = attrs.float(name) if t in ("float", "double") else attrs[name]
        if not isinstance(bound, (int, float)) or t not in ("float", "double") and not _holds(t, bound):
            return None
        found = f"{function}({found}, {literal(bound, t)})"
    return found


def _holds(t: str, value: float) -> bool:
    """Whether a number is one of an integer type."""
    bits = int(t[1:])
    low, high = (-(1 << bits - 1), (1 << bits - 1) - 1) if t[0] == "i" else (0, (1 << bits) - 1)
    return math.isfinite(value) and value == int(value) and low <= int(value) <= high


def _gelu(a: Sequence[str], t: str, attrs: Attrs) -> str:
    x, half = a[0], literal(0.5, t)
    if attrs.str("approximate") == "tanh":
        slope, cubic = literal(math.sqrt(2 / math.pi), t), literal(0.044715, t)
        return f"({half} * {x} * (({t})1 + tanh_of({slope} * ({x} + {cubic} * {x} * {x} * {x}))))"
    return f"({half} * {x} * (({t})1 + erf_of({x} * {literal(math.sqrt(0.5), t)})))"


def _swish(a: Sequence[str], t: str, attrs: Attrs) -> str:
    return f"({a[0]} * sigmoid({literal(attrs.float('alpha'), t)} * {a[0]}))"


def _swiglu(a: Sequence[str], t: str, attrs: Attrs) -> str:
    return f"({_swish(a, t, attrs)} * {a[1]})"


def _shift(a: Sequence[str], t: str, attrs: Attrs) -> str:
    return f"shifted_{'left' if attrs.str('direction') == 'LEFT' else 'right'}({a[0]}, {a[1]})"


def _is_inf(a: Sequence[str], t: str, attrs: Attrs) -> str:
    sides = [
        f"{a[0]} == {literal(sign * math.inf, t)}"
        for sign, name in ((1, "detect_positive"), (-1, "detect_negative"))
        if attrs.int(name)
    ]
    return f"({' || '.join(sides)})" if sides else "false"


_BOOLS = frozenset({DType.BOOL})
_TABLE: dict[str, tuple[Emit, frozenset[DType]]] = {
    "Add": (_format("add({0}, {1})"), NUMBER),
    "Sub": (_format("sub({0}, {1})"), NUMBER),
    "Mul": (_format("mul({0}, {1})"), NUMBER),
    "Div": (_format("quotient({0}, {1})"), NUMBER),
    "Max": (_joined("most"), NUMBER),
    "Min": (_joined("least"), NUMBER),
    "Sum": (_joined("add"), REAL),
    "Mean": (_mean, REAL),
    "Relu": (_format("most({0}, ({T})0)"), NUMBER),
    "Neg": (_format("negated({0})"), REAL | SIGNED),
    "Abs": (_format("size_of({0})"), NUMBER),
    "Sign": (_format("sign_of({0})"), NUMBER),
    "Reciprocal": (_format("(({T})1 / {0})"), REAL),
    "Sigmoid": (_format("sigmoid({0})"), REAL),
    "Softplus": (_format("softplus({0})"), REAL),
    "Softsign": (_format("({0} / (({T})1 + size_of({0})))"), REAL),
    "Mish": (_format("({0} * tanh_of(softplus({0})))"), REAL),
    "HardSwish": (_format("({0} * least(most({0} + ({T})3, ({T})0), ({T})6) / ({T})6)"), REAL),
    "Gelu": (_gelu, REAL),
    "Swish": (_swish, REAL),
    "SwiGLU": (_swiglu, REAL),
    "Clip": (_clip, NUMBER),
    "LeakyRelu": (_with("({0} < ({T})0 ? {alpha} * {0} : {0})", "alpha"), REAL),
    "PRelu": (_format("({0} < ({T})0 ? mul({1}, {0}) : {0})"), NUMBER),
    "Elu": (_with("({0} < ({T})0 ? {alpha} * expm1_of({0}) : {0})", "alpha"), REAL),
    "Selu": (_with("({gamma} * ({0} > ({T})0 ? {0} : {alpha} * expm1_of({0})))", "alpha", "gamma"), REAL),
    "Celu": (
        _with("(most({0}, ({T})0) + least(({T})0, {alpha} * expm1_of({0} / {alpha})))", "alpha"), REAL
    ),
    "HardSigmoid": (_with("least(most({alpha} * {0} + {beta}, ({T})0), ({T})1)", "alpha", "beta"), REAL),
    "ThresholdedRelu": (_with("({0} > {alpha} ? {0} : ({T})0)", "alpha"), REAL),
    "Shrink": (
        _with("({0} < -{lambd} ? {0} + {bias} : {0} > {lambd} ? {0} - {bias} : ({T})0)", "bias", "lambd"), REAL
    ),
    "Equal": (_format("({0} == {1})"), HELD),
    "Greater": (_format("({0} > {1})"), NUMBER),
    "Less": (_format("({0} < {1})"), NUMBER),
    "GreaterOrEqual": (_format("({0} >= {1})"), NUMBER),
    "LessOrEqual": (_format("({0} <= {1})"), NUMBER),
    "And": (_format("({0} && {1})"), _BOOLS),
    "Or": (_format("({0} || {1})"), _BOOLS),
    "Xor": (_format("({0} != {1})"), _BOOLS),
    "Not": (_format("(!{0})"), _BOOLS),
    "BitwiseAnd": (_format("(({T})({0} & {1}))"), INTEGER),
    "BitwiseOr": (_format("(({T})({0} | {1}))"), INTEGER),
    "BitwiseXor": (_format("(({T})({0} ^ {1}))"), INTEGER),
    "BitwiseNot": (_format("(({T})~{0})"), INTEGER),
    "BitShift": (_shift, INTEGER),
    "IsNaN": (_format("is_nan({0})"), REAL),
    "IsInf": (_is_inf, REAL),
    **{
        name: (_format(function + "_of({0})"), REAL)
        for name, function in {
            "Tanh": "tanh", "Exp": "exp", "Log": "log", "Sqrt": "sqrt", "Erf": "erf", "Floor": "floor", "Ceil": "ceil",
            "Round": "round", "Sin": "sin", "Cos": "cos", "Tan": "tan", "Asin": "asin", "Acos": "acos", "Atan": "atan",
            "Sinh": "sinh", "Cosh": "cosh", "Asinh": "asinh", "Acosh": "acosh", "Atanh": "atanh",
        }.items()
    },
}  # fmt: skip

# ── by their types ───────────────────────────────────────────────────────────────────────────────────────────────


def _cast(names: Sequence[str], dtypes: Sequence[DType], result: DType, attrs: Attrs) -> str:
    """The number rounded to an element of the result's type, whatever it is computed in."""
    return names[0] if dtypes[0] is result else f"widen(narrow<{stored(result)}>({names[0]}))"


def _same(names: Sequence[str], dtypes: Sequence[DType], result: DType, attrs: Attrs) -> str:
    return names[0]


def _where(names: Sequence[str], dtypes: Sequence[DType], result: DType, attrs: Attrs) -> str | None:
    if dtypes[0] is not DType.BOOL or dtypes[1] is not result or dtypes[2] is not result:
        return None
    return f"({names[0]} ? {names[1]} : {names[2]})"


def _mod(names: Sequence[str], dtypes: Sequence[DType], result: DType, attrs: Attrs) -> str | None:
    """What is left has the sign of the dividend where `fmod` is set, else that of the divisor."""
    x, y = names
    if dtypes[0] is not dtypes[1] or dtypes[0] not in NUMBER:
        return None
    return f"{'remainder_of' if attrs.int('fmod') else 'modulo'}({x}, {y})"


def _pow(names: Sequence[str], dtypes: Sequence[DType], result: DType, attrs: Attrs) -> str | None:
    (x, y), (base, exponent) = names, dtypes
    if base in INTEGER and exponent in INTEGER:
        return f"whole_power({x}, {y})"
    if base not in NUMBER or exponent not in NUMBER:
        return None
    # integers that float32 does not hold: their power is computed in float64, as NumPy does
    wide = DType.DOUBLE in dtypes or any(d in INTEGER and d.itemsize > 2 for d in dtypes)
    if base in REAL and exponent in INTEGER:
        wide = base is DType.DOUBLE
    t = "double" if wide else "float"
    found = f"power(({t}){x}, ({t}){y})"
    return found if computed(base) == t else f"narrow<{computed(base)}>({found})"


def _batch(names: Sequence[str], dtypes: Sequence[DType], result: DType, attrs: Attrs) -> str | None:
    """BatchNormalization once scale, bias, mean and variance are those of the element's channel."""
    if any(d not in REAL for d in dtypes):
        return None
    t = computed(result)
    x, scale, bias, mean, variance = (f"({t}){n}" for n in names)
    epsilon = literal(attrs.float("epsilon"), t)
    return f"(({x} - {mean}) * ({scale} / sqrt_of({variance} + {epsilon})) + {bias})"


_RANGES = {
    DType.UINT8: (0, 255), DType.INT8: (-128, 127), DType.UINT16: (0, 65535), DType.INT16: (-32768, 32767),
}  # fmt: skip


def _quantize(names: Sequence[str], dtypes: Sequence[DType], result: DType, attrs: Attrs) -> str | None:
    """saturate(round(x / scale) + zero point), halves to even (QuantizeLinear 10 to 25)."""
    if result not in _RANGES or dtypes[0] not in (DType.FLOAT, DType.FLOAT16, DType.BFLOAT16):
        return None
    if attrs["precision"] is not None or dtypes[1] is not dtypes[0] or any(d is not result for d in dtypes[2:]):
        return None
    low, high = _RANGES[result]
    zero = f" + (float){names[2]}" if len(names) > 2 else ""
    return f"narrow<{stored(result)}>(saturated(round_of({names[0]} / {names[1]}){zero}, {low}.0f, {high}.0f))"


def _dequantize(names: Sequence[str], dtypes: Sequence[DType], result: DType, attrs: Attrs) -> str | None:
    """(x − zero point) · scale (DequantizeLinear 10 to 25)."""
    if dtypes[0] not in (*_RANGES, DType.INT32) or dtypes[1] not in REAL or result not in REAL:
        return None
    if DType.DOUBLE in (dtypes[1], result) or any(d is not dtypes[0] for d in dtypes[2:]):
        return None
    x = f"sub((i32){names[0]}, (i32){names[2]})" if len(names) > 2 else f"{names[0]}"
    return f"((float){x} * {names[1]})"


_SPECIAL: dict[str, Callable[[Sequence[str], Sequence[DType], DType, Attrs], str | None]] = {
    "Cast": _cast, "CastLike": _cast, "Identity": _same, "Dropout": _same, "Where": _where, "Mod": _mod, "Pow": _pow,
    "BatchNormalization": _batch, "QuantizeLinear": _quantize, "DequantizeLinear": _dequantize,
}  # fmt: skip

__all__ = ["HELD", "INTEGER", "NUMBER", "REAL", "SIGNED", "UNSIGNED", "computed", "expression", "literal", "stored"]
