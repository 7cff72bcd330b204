"""The language of conditions and attributes: expressions over a rule's tensors and attribute variables.

Texts are read with Python's grammar and a list of what is allowed; nothing is ever executed as Python. Dimensions may
be symbols: a comparison that does not come out the same for every value of the symbols is *undecided*, and a condition
that is undecided does not hold.
"""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Protocol, Union

import numpy as np
from numpy.typing import NDArray

from taso.graph.errors import GraphError, RuleError
from taso.graph.ops.common import broadcast
from taso.graph.ops.movement import divide_exactly
from taso.graph.types import Dim, DType, SymDim, TensorType, ceil_div, show_shape
from taso.graph.unknown import UnknownInteger, UnknownReal

Value = Union[None, bool, int, float, str, DType, SymDim, tuple["Value", ...]]
Array = NDArray[np.generic]

_LONGEST = 1024  # elements of a tuple; a text cannot ask for more
_DEEPEST = 60  # levels of nesting


class ExpressionError(RuleError):
    """An expression that cannot be read, or has no value here."""


class DependsOnSymbols(ExpressionError):
    """A value that is not the same for every value of the symbols."""


class Undecided:
    """The truth of a comparison that depends on the values of symbols."""

    def __repr__(self) -> str:
        return "undecided"


UNDECIDED = Undecided()
Result = Union[Value, Undecided]


class Environment(Protocol):
    """What an expression speaks of. Each method raises `ExpressionError` for a name that it does not know."""

    def type_of(self, tensor: str) -> TensorType: ...
    def attribute(self, name: str) -> Value: ...
    def is_weight(self, tensor: str) -> bool: ...

    def content(self, tensor: str) -> Array | None:
        """The values of a tensor that depends on weights alone, where they are at hand."""
        ...

    def number(self, tensor: str) -> Value:
        """The number that all elements of a weight are; raises `ExpressionError` where there is no such number."""
        ...


@dataclass
class Bindings:
    """An environment made of tables."""

    types: Mapping[str, TensorType]
    attrs: Mapping[str, Value] = field(default_factory=dict)
    weights: frozenset[str] = frozenset()
    contents: Mapping[str, Array] = field(default_factory=dict)

    def type_of(self, tensor: str) -> TensorType:
        if tensor not in self.types:
            raise ExpressionError(f"'{tensor}' is not a tensor of this rule")
        return self.types[tensor]

    def attribute(self, name: str) -> Value:
        if name not in self.attrs:
            raise ExpressionError(f"'{name}' is not an attribute variable of this rule")
        return self.attrs[name]

    def is_weight(self, tensor: str) -> bool:
        return tensor in self.weights

    def content(self, tensor: str) -> Array | None:
        return self.contents.get(tensor)

    def number(self, tensor: str) -> Value:
        array = self.content(tensor) if self.is_weight(tensor) else None
        first = array.flat[0] if array is not None and array.size else None
        if first is None or not np.all(array == first):
            raise ExpressionError(f"the elements of '{tensor}' are not known to be one number")
        number = np.asarray(first).item()
        if isinstance(number, bool) or not isinstance(number, (int, float)):
            raise ExpressionError(f"the elements of '{tensor}' are no numbers")
        return number


# ── what an expression is made of ────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Literal:
    value: None | bool | int | float | str | DType
    # 1, 1.0 and True are equal in Python and different literals
    kind: str = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "kind", type(self.value).__name__)

    def __str__(self) -> str:
        return show(self)


@dataclass(frozen=True)
class Name:
    """A tensor where a function takes one, else an attribute variable."""

    name: str

    def __str__(self) -> str:
        return show(self)


@dataclass(frozen=True)
class Tuple:
    items: tuple[Expr, ...]

    def __str__(self) -> str:
        return show(self)


@dataclass(frozen=True)
class Unary:
    """`op` is "-" or "not"."""

    op: str
    operand: Expr

    def __str__(self) -> str:
        return show(self)


@dataclass(frozen=True)
class Binary:
    """`op` is one of + - * / // %."""

    op: str
    left: Expr
    right: Expr

    def __str__(self) -> str:
        return show(self)


@dataclass(frozen=True)
class Compare:
    """first ops[0] rest[0] ops[1] rest[1] …, all of which must hold."""

    first: Expr
    ops: tuple[str, ...]
    rest: tuple[Expr, ...]

    def __str__(self) -> str:
        return show(self)


@dataclass(frozen=True)
class Logic:
    """`op` is "and" or "or"."""

    op: str
    items: tuple[Expr, ...]

    def __str__(self) -> str:
        return show(self)


@dataclass(frozen=True)
class Choice:
    """then if test else otherwise."""

    test: Expr
    then: Expr
    otherwise: Expr

    def __str__(self) -> str:
        return show(self)


@dataclass(frozen=True)
class Index:
    base: Expr
    index: Expr

    def __str__(self) -> str:
        return show(self)


@dataclass(frozen=True)
class Span:
    """base[start:stop:step]."""

    base: Expr
    start: Expr | None
    stop: Expr | None
    step: Expr | None

    def __str__(self) -> str:
        return show(self)


@dataclass(frozen=True)
class Call:
    function: str
    args: tuple[Expr, ...]

    def __str__(self) -> str:
        return show(self)


Expr = Union[Literal, Name, Tuple, Unary, Binary, Compare, Logic, Choice, Index, Span, Call]


def children(expr: Expr) -> Iterator[Expr]:
    """Direct parts of `expr`."""
    if isinstance(expr, (Tuple, Logic)):
        yield from expr.items
    elif isinstance(expr, Unary):
        yield expr.operand
    elif isinstance(expr, Binary):
        yield from (expr.left, expr.right)
    elif isinstance(expr, Compare):
        yield expr.first
        yield from expr.rest
    elif isinstance(expr, Choice):
        yield from (expr.test, expr.then, expr.otherwise)
    elif isinstance(expr, Index):
        yield from (expr.base, expr.index)
    elif isinstance(expr, Span):
        yield from (e for e in (expr.base, expr.start, expr.stop, expr.step) if e is not None)
    elif isinstance(expr, Call):
        yield from expr.args


def tensor_names(expr: Expr) -> frozenset[str]:
    """The tensors that `expr` speaks of."""
    found: set[str] = set()
    if isinstance(expr, Call):
        tensors, values = _split_args(expr)
        found.update(t.name for t in tensors)
        parts: Sequence[Expr] = values
    else:
        parts = list(children(expr))
    for part in parts:
        found |= tensor_names(part)
    return frozenset(found)


def attribute_names(expr: Expr) -> frozenset[str]:
    """The attribute variables that `expr` speaks of."""
    if isinstance(expr, Name):
        return frozenset({expr.name})
    parts = _split_args(expr)[1] if isinstance(expr, Call) else list(children(expr))
    return frozenset(name for part in parts for name in attribute_names(part))


def exact_number(expr: Expr) -> Fraction | None:
    """The number that literals and + - * / say, without rounding: 1 / 1.5 is ⅔; None for any other expression."""
    if isinstance(expr, Literal):
        plain = isinstance(expr.value, (int, float)) and not isinstance(expr.value, bool)
        return Fraction(repr(expr.value)) if plain else None
    if isinstance(expr, Unary):
        operand = exact_number(expr.operand) if expr.op == "-" else None
        return None if operand is None else -operand
    if not isinstance(expr, Binary) or expr.op not in ("+", "-", "*", "/"):
        return None
    left, right = exact_number(expr.left), exact_number(expr.right)
    if left is None or right is None or (expr.op == "/" and right == 0):
        return None
    operation: Callable[[Fraction, Fraction], Fraction] = {
        "+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv
    }[expr.op]  # fmt: skip
    return operation(left, right)


def leaves(value: Value) -> Iterator[Value]:
    """All that stands in a value and is no tuple."""
    if isinstance(value, tuple):
        for item in value:
            yield from leaves(item)
    else:
        yield value


def literal(value: Value) -> Expr:
    """The expression that stands for a value without symbols."""
    if isinstance(value, tuple):
        return Tuple(tuple(map(literal, value)))
    if isinstance(value, SymDim):
        raise ExpressionError(f"the dimension {value} cannot be written as a number")
    if isinstance(value, (int, float)) and not isinstance(value, bool) and value < 0:
        return Unary("-", Literal(-value))
    return Literal(value)


# ── functions ────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Function:
    """`arity` is (least, most); the first `tensors` arguments name tensors (all of them where it is −1)."""

    arity: tuple[int, int]
    tensors: int
    call: Callable[[Environment, Sequence[str], Sequence[Value]], Result]


def _split_args(call: Call) -> tuple[list[Name], list[Expr]]:
    count = FUNCTIONS[call.function].tensors
    count = len(call.args) if count < 0 else count
    return [a for a in call.args[:count] if isinstance(a, Name)], list(call.args[count:])


def _int(value: Value, what: str) -> int:
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    kind = DependsOnSymbols if isinstance(value, (SymDim, UnknownReal)) else ExpressionError
    raise kind(f"{what} must be an integer, not {show_value(value)}")


def _position(value: Value, what: str) -> int:
    """An integer that something is counted off by, which an unknown one cannot do."""
    found = _int(value, what)
    if isinstance(found, UnknownInteger):
        raise DependsOnSymbols(f"{what} depends on a size that is not known")
    return found


def _dim(value: Value, what: str) -> Dim:
    return value if isinstance(value, SymDim) else _int(value, what)


def _tuple(value: Value, what: str) -> tuple[Value, ...]:
    if isinstance(value, tuple):
        return value
    raise ExpressionError(f"{what} must be a tuple, not {show_value(value)}")


def _dims(value: Value, what: str) -> tuple[Dim, ...]:
    return tuple(_dim(v, f"an element of {what}") for v in _tuple(value, what))


def _ints(value: Value, what: str) -> tuple[int, ...]:
    return tuple(_int(v, f"an element of {what}") for v in _tuple(value, what))


def _shape_of(env: Environment, tensor: str) -> tuple[Dim, ...]:
    try:
        return env.type_of(tensor).dims
    except GraphError as error:
        raise ExpressionError(f"the rank of '{tensor}' is unknown") from error


def _dim_of(env: Environment, tensors: Sequence[str], values: Sequence[Value]) -> Result:
    dims, axis = _shape_of(env, tensors[0]), _position(values[0], "an axis")
    if not -len(dims) <= axis < len(dims):
        raise ExpressionError(f"'{tensors[0]}' has no axis {axis}: its shape is {show_shape(dims)}")
    return dims[axis]


def _size(env: Environment, tensors: Sequence[str], values: Sequence[Value]) -> Result:
    total: Dim = 1
    for dim in _shape_of(env, tensors[0]):
        total = total * dim
    return total


def _same_shape(env: Environment, tensors: Sequence[str], values: Sequence[Value]) -> Result:
    first = _shape_of(env, tensors[0])
    return every([equal(first, _shape_of(env, t)) for t in tensors[1:]])


def _same_dtype(env: Environment, tensors: Sequence[str], values: Sequence[Value]) -> Result:
    return len({env.type_of(t).dtype for t in tensors}) <= 1


def _filled(env: Environment, tensors: Sequence[str], values: Sequence[Value]) -> Result:
    """Whether every element of a weight is the given number."""
    wanted = values[0]
    if not isinstance(wanted, (int, float)):
        raise ExpressionError(f"filled() compares with a number, not {show_value(wanted)}")
    array = env.content(tensors[0]) if env.is_weight(tensors[0]) else None
    if array is None:
        return False
    given = np.asarray(wanted)
    # a decimal is rounded as the weight was, but no weight of integers holds ½
    rounded = given.astype(array.dtype) if DType.from_numpy(array.dtype).is_float else given
    return bool(np.all(array == rounded))


def _broadcasts_to(env: Environment, tensors: Sequence[str], values: Sequence[Value]) -> Result:
    """Whether the first shape broadcasts to the second without changing it."""
    small, big = _dims(values[0], "a shape"), _dims(values[1], "a shape")
    if len(small) > len(big):
        return False
    pairs = zip(reversed(small), reversed(big), strict=False)
    return every([any_of([equal(a, 1), equal(a, b)]) for a, b in pairs])


def _broadcast(env: Environment, tensors: Sequence[str], values: Sequence[Value]) -> Result:
    try:
        return broadcast([_dims(v, "a shape") for v in values], "broadcast")
    except GraphError as error:
        raise ExpressionError(str(error)) from error


def _all_equal(env: Environment, tensors: Sequence[str], values: Sequence[Value]) -> Result:
    return every([equal(v, values[1]) for v in _tuple(values[0], "the first argument of all_equal")])


def _compose(env: Environment, tensors: Sequence[str], values: Sequence[Value]) -> Result:
    """The permutation of transposing by the first and then by the second: x.transpose(p).transpose(q)."""
    p, q = _permutation(values[0]), _permutation(values[1])
    if len(p) != len(q):
        raise ExpressionError(f"permutations {p} and {q} have different lengths")
    return tuple(p[i] for i in q)


def _inverse(env: Environment, tensors: Sequence[str], values: Sequence[Value]) -> Result:
    p = _permutation(values[0])
    return tuple(p.index(i) for i in range(len(p)))


def _permutation(value: Value) -> tuple[int, ...]:
    p = tuple(_position(v, "an element of a permutation") for v in _tuple(value, "a permutation"))
    if sorted(p) != list(range(len(p))):
        raise ExpressionError(f"{p} is not a permutation")
    return p


def _permuted(env: Environment, tensors: Sequence[str], values: Sequence[Value]) -> Result:
    items, p = _tuple(values[0], "the first argument of permuted"), _permutation(values[1])
    if len(items) != len(p):
        raise ExpressionError(f"{show_value(items)} cannot be permuted by {p}")
    return tuple(items[i] for i in p)


def _same_pads(env: Environment, tensors: Sequence[str], values: Sequence[Value]) -> Result:
    """ONNX's SAME_LOWER pads: of a kernel at stride 1, or of kernel, strides and sizes; larger half first."""
    kernel = _ints(values[0], "a kernel")
    if len(values) == 1:
        totals = [k - 1 for k in kernel]
    elif len(values) == 3:
        strides, sizes = _ints(values[1], "strides"), _ints(values[2], "sizes")
        if not len(kernel) == len(strides) == len(sizes) or min(strides, default=1) < 1:
            raise ExpressionError("same_pads() takes a kernel, strides and sizes of equal length")
        totals = [max((-(-n // s) - 1) * s + k - n, 0) for k, s, n in zip(kernel, strides, sizes, strict=True)]
    else:
        raise ExpressionError("same_pads() takes a kernel, or a kernel, strides and sizes")
    return tuple(t - t // 2 for t in totals) + tuple(t // 2 for t in totals)


def _range(env: Environment, tensors: Sequence[str], values: Sequence[Value]) -> Result:
    numbers = [_position(v, "an argument of range") for v in values]
    if len(numbers) == 3 and numbers[2] == 0:
        raise ExpressionError("range() with step 0")
    made = range(*numbers)
    if made[_LONGEST:]:
        raise ExpressionError(f"{made} has more than {_LONGEST} elements")
    return tuple(made)


def _extreme(pick: Callable[[Sequence[int]], int]) -> Callable[..., Result]:
    def call(env: Environment, tensors: Sequence[str], values: Sequence[Value]) -> Result:
        given = _tuple(values[0], "the argument") if len(values) == 1 else tuple(values)
        if not given:
            raise ExpressionError("max() and min() need an element")
        return pick([_int(v, "an argument of max or min") for v in given])

    return call


def _sum(env: Environment, tensors: Sequence[str], values: Sequence[Value]) -> Result:
    total: Dim = 0
    for dim in _dims(values[0], "the argument of sum"):
        total = total + dim
    return total


def _product(env: Environment, tensors: Sequence[str], values: Sequence[Value]) -> Result:
    total: Dim = 1
    for dim in _dims(values[0], "the argument of product"):
        total = total * dim
    return total


def _ceil_div(env: Environment, tensors: Sequence[str], values: Sequence[Value]) -> Result:
    divisor = _int(values[1], "a divisor")
    if divisor < 1:
        raise ExpressionError(f"ceil_div() by {divisor}")
    return ceil_div(_dim(values[0], "a dividend"), divisor)


def _is_static(env: Environment, tensors: Sequence[str], values: Sequence[Value]) -> Result:
    """Whether a dimension, or all of a tuple, are numbers; undecided of sizes that stand for symbols as well."""
    given = values[0] if isinstance(values[0], tuple) else (values[0],)
    if any(isinstance(v, UnknownInteger) for v in given):
        return UNDECIDED
    return all(not isinstance(v, SymDim) for v in given)


FUNCTIONS: dict[str, Function] = {
    "dim": Function((2, 2), 1, _dim_of),
    "rank": Function((1, 1), 1, lambda env, t, v: len(_shape_of(env, t[0]))),
    "shape": Function((1, 1), 1, lambda env, t, v: _shape_of(env, t[0])),
    "dtype": Function((1, 1), 1, lambda env, t, v: env.type_of(t[0]).dtype),
    "size": Function((1, 1), 1, _size),
    "is_weight": Function((1, 1), 1, lambda env, t, v: env.is_weight(t[0])),
    "is_float": Function((1, 1), 1, lambda env, t, v: env.type_of(t[0]).dtype.is_float),
    "is_integer": Function((1, 1), 1, lambda env, t, v: env.type_of(t[0]).dtype.is_integer),
    "same_shape": Function((2, 8), -1, _same_shape),
    "same_dtype": Function((2, 8), -1, _same_dtype),
    "filled": Function((2, 2), 1, _filled),
    "value": Function((1, 1), 1, lambda env, t, v: env.number(t[0])),
    "len": Function((1, 1), 0, lambda env, t, v: len(_tuple(v[0], "the argument of len"))),
    "min": Function((1, 8), 0, _extreme(min)),
    "max": Function((1, 8), 0, _extreme(max)),
    "sum": Function((1, 1), 0, _sum),
    "product": Function((1, 1), 0, _product),
    "abs": Function((1, 1), 0, lambda env, t, v: abs(_int(v[0], "the argument of abs"))),
    "range": Function((1, 3), 0, _range),
    "sorted": Function((1, 1), 0, lambda env, t, v: tuple(sorted(_ints(v[0], "the argument of sorted")))),
    "ceil_div": Function((2, 2), 0, _ceil_div),
    "all_equal": Function((2, 2), 0, _all_equal),
    "broadcast": Function((2, 8), 0, _broadcast),
    "broadcasts_to": Function((2, 2), 0, _broadcasts_to),
    "compose": Function((2, 2), 0, _compose),
    "inverse": Function((1, 1), 0, _inverse),
    "permuted": Function((2, 2), 0, _permuted),
    "same_pads": Function((1, 3), 0, _same_pads),
    "static": Function((1, 1), 0, _is_static),
}


# ── truth ────────────────────────────────────────────────────────────────────────────────────────────────────────


def every(parts: Sequence[Result]) -> bool | Undecided:
    """Whether all hold: False as soon as one is false, else undecided if one is."""
    if any(p is False for p in parts):
        return False
    return UNDECIDED if any(p is UNDECIDED for p in parts) else True


def any_of(parts: Sequence[Result]) -> bool | Undecided:
    """Whether one holds: True as soon as one does, else undecided if one is."""
    if any(p is True for p in parts):
        return True
    return UNDECIDED if any(p is UNDECIDED for p in parts) else False


def equal(a: Value, b: Value) -> bool | Undecided:
    """Whether two values are equal for every value of their symbols, for none, or undecided."""
    if isinstance(a, tuple) and isinstance(b, tuple):
        return len(a) == len(b) and every([equal(x, y) for x, y in zip(a, b, strict=True)])
    if isinstance(a, SymDim) or isinstance(b, SymDim):
        if not (isinstance(a, (int, SymDim)) and isinstance(b, (int, SymDim))):
            return False
        difference = a - b
        return UNDECIDED if isinstance(difference, SymDim) else difference == 0
    if isinstance(a, UnknownReal) or isinstance(b, UnknownReal):
        return _equal_to_unknown(a, b)
    if isinstance(a, (int, float)) and isinstance(b, (int, float)):
        return a == b
    return type(a) is type(b) and a == b


def _equal_to_unknown(a: Value, b: Value) -> bool | Undecided:
    if not (isinstance(a, (int, float)) and isinstance(b, (int, float))):
        return False
    ruled_out = isinstance(a, UnknownReal) and b in a.other_than or isinstance(b, UnknownReal) and a in b.other_than
    return False if ruled_out else UNDECIDED


def _less(a: Value, b: Value, strictly: bool) -> bool | Undecided:
    if isinstance(a, SymDim) or isinstance(b, SymDim):
        difference = _dim(a, "what is compared") - _dim(b, "what is compared")
        return UNDECIDED if isinstance(difference, SymDim) else difference < 0 if strictly else difference <= 0
    if isinstance(a, (int, float)) and isinstance(b, (int, float)):
        if isinstance(a, UnknownReal) or isinstance(b, UnknownReal):
            return UNDECIDED
        return a < b if strictly else a <= b
    raise ExpressionError(f"{show_value(a)} and {show_value(b)} have no order")


def _not(value: Result) -> bool | Undecided:
    if isinstance(value, Undecided):
        return UNDECIDED
    return not _bool(value)


def _bool(value: Result) -> bool:
    if isinstance(value, bool):
        return value
    raise ExpressionError(f"{show_value(value)} is neither true nor false")


def _contains(a: Value, b: Value) -> bool | Undecided:
    return any_of([equal(a, item) for item in _tuple(b, "what follows 'in'")])


_COMPARISONS: dict[str, Callable[[Value, Value], bool | Undecided]] = {
    "==": equal,
    "!=": lambda a, b: _not(equal(a, b)),
    "<": lambda a, b: _less(a, b, True),
    "<=": lambda a, b: _less(a, b, False),
    ">": lambda a, b: _less(b, a, True),
    ">=": lambda a, b: _less(b, a, False),
    "in": _contains,
    "not in": lambda a, b: _not(_contains(a, b)),
}


# ── value ────────────────────────────────────────────────────────────────────────────────────────────────────────


def evaluate(expr: Expr, env: Environment) -> Result:
    """The value of `expr`; raises `ExpressionError` where it has none."""
    if isinstance(expr, Literal):
        return expr.value
    if isinstance(expr, Name):
        return env.attribute(expr.name)
    if isinstance(expr, Call):
        tensors, values = _split_args(expr)
        return FUNCTIONS[expr.function].call(env, [t.name for t in tensors], [value_of(v, env) for v in values])
    if isinstance(expr, Tuple):
        return tuple(value_of(e, env) for e in expr.items)
    if isinstance(expr, Compare):
        return _compare(expr, env)
    if isinstance(expr, Logic):
        return _logic(expr, env)
    if isinstance(expr, Binary):
        return _arithmetic(expr.op, value_of(expr.left, env), value_of(expr.right, env))
    if isinstance(expr, Unary):
        return _unary(expr, env)
    if isinstance(expr, Choice):
        return evaluate(expr.then if _bool(value_of(expr.test, env)) else expr.otherwise, env)
    return _element(expr, env)


def value_of(expr: Expr, env: Environment) -> Value:
    """As `evaluate`, but an undecided truth is an error."""
    result = evaluate(expr, env)
    if isinstance(result, Undecided):
        raise DependsOnSymbols(f"{expr} depends on the value of symbols")
    return result


def _compare(expr: Compare, env: Environment) -> bool | Undecided:
    values = [value_of(e, env) for e in (expr.first, *expr.rest)]
    return every([_COMPARISONS[op](values[i], values[i + 1]) for i, op in enumerate(expr.ops)])


def _logic(expr: Logic, env: Environment) -> bool | Undecided:
    """Left to right, up to the part that settles it: what stands behind may have no value."""
    stop = expr.op == "or"
    found: list[Result] = []
    for item in expr.items:
        result = evaluate(item, env)
        found.append(result if isinstance(result, Undecided) else _bool(result))
        if found[-1] is stop:
            return stop
    return any_of(found) if stop else every(found)


def _unary(expr: Unary, env: Environment) -> Result:
    if expr.op == "not":
        return _not(evaluate(expr.operand, env))
    value = value_of(expr.operand, env)
    if isinstance(value, UnknownReal):
        raise DependsOnSymbols(f"{expr} is computed with a number that is not known")
    if isinstance(value, (int, float, SymDim)) and not isinstance(value, bool):
        return -value
    raise ExpressionError(f"{show_value(value)} has no negative")


_NUMERIC: dict[str, Callable[[float, float], float]] = {
    "+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv, "//": operator.floordiv,
    "%": operator.mod,
}  # fmt: skip


def _arithmetic(op: str, a: Value, b: Value) -> Value:
    if isinstance(a, tuple) or isinstance(b, tuple):
        return _joined(op, a, b)
    if isinstance(a, SymDim) or isinstance(b, SymDim):
        return _symbolic(op, _dim(a, "an operand"), _dim(b, "an operand"))
    for operand in (a, b):
        if isinstance(operand, bool) or not isinstance(operand, (int, float)):
            raise ExpressionError(f"{show_value(operand)} is not a number")
        if isinstance(operand, UnknownReal):
            raise DependsOnSymbols("an expression computes with a number that is not known")
    try:
        result = _NUMERIC[op](a, b)  # type: ignore[arg-type]  # both were found to be numbers above
    except (ZeroDivisionError, OverflowError) as error:
        raise ExpressionError(f"{a} {op} {b} has no value") from error
    if type(result) is int and abs(result) >= 1 << 128:
        raise ExpressionError("a number grew beyond 128 bits")
    return result


def _joined(op: str, a: Value, b: Value) -> Value:
    if op == "+" and isinstance(a, tuple) and isinstance(b, tuple) and len(a) + len(b) <= _LONGEST:
        return a + b
    if op == "*" and isinstance(a, tuple):
        count = _position(b, "a number of copies")
        if len(a) * count <= _LONGEST:
            return a * count
    raise ExpressionError(f"{show_value(a)} {op} {show_value(b)} has no value")


def _symbolic(op: str, a: Dim, b: Dim) -> Value:
    if op == "+":
        return a + b
    if op == "-":
        return a - b
    if op == "*":
        return a * b
    if op in ("//", "%"):
        if b == 0:
            raise ExpressionError(f"{a} {op} 0 has no value")
        quotient = 1 if a == b else divide_exactly(a, b)
        if quotient is not None:
            return quotient if op == "//" else 0
        if op == "//" and isinstance(a, SymDim) and isinstance(b, int):
            return a // b
    raise DependsOnSymbols(f"({a}) {op} ({b}) depends on the value of symbols")


def _element(expr: Index | Span, env: Environment) -> Value:
    base = _tuple(value_of(expr.base, env), "what is indexed")
    if isinstance(expr, Index):
        position = _position(value_of(expr.index, env), "an index")
        if not -len(base) <= position < len(base):
            raise ExpressionError(f"{show_value(base)} has no element {position}")
        return base[position]
    bounds = (expr.start, expr.stop, expr.step)
    ends = [None if e is None else _position(value_of(e, env), "a bound") for e in bounds]
    if ends[2] == 0:
        raise ExpressionError("a slice with step 0")
    return base[slice(*ends)]


def reason_against(condition: Expr, env: Environment) -> str | None:
    """None where the condition holds, else a sentence that says what it is and which values it met."""
    try:
        result = evaluate(condition, env)
    except ExpressionError as error:
        return f"the condition {condition} has no value: {error}"
    if result is True:
        return None
    if result is UNDECIDED:
        return f"the condition {condition} is not decided for every value of the symbols ({_met(condition, env)})"
    return f"the condition {condition} does not hold ({_met(condition, env)})"


def _met(condition: Expr, env: Environment) -> str:
    tensors = [f"{t}: {env.type_of(t)}" for t in sorted(tensor_names(condition))]
    attrs = [f"{a} = {show_value(env.attribute(a))}" for a in sorted(attribute_names(condition))]
    return ", ".join(tensors + attrs) or "whatever the match"


# ── text ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def show_value(value: Result) -> str:
    """A value as a reader of rules sees it."""
    if isinstance(value, tuple):
        inner = ", ".join(map(show_value, value))
        return f"({inner},)" if len(value) == 1 else f"({inner})"
    if isinstance(value, DType):
        return value.name
    return str(value) if isinstance(value, (SymDim, Undecided)) else repr(value)


_LEVELS = {"or": 1, "and": 2, "+": 5, "-": 5, "*": 6, "/": 6, "//": 6, "%": 6}
_CHOICE, _NOT, _COMPARE, _NEGATIVE, _ATOM = 0, 3, 4, 7, 8


def show(expr: Expr) -> str:
    """The text of `expr`; reading it gives `expr` back."""
    return _show(expr)[0]


def _show(expr: Expr) -> tuple[str, int]:
    """The text and how tightly it binds."""
    if isinstance(expr, Literal):
        return show_value(expr.value), _ATOM
    if isinstance(expr, Name):
        return expr.name, _ATOM
    if isinstance(expr, Tuple):
        items = ", ".join(show(e) for e in expr.items)
        return (f"({items},)" if len(expr.items) == 1 else f"({items})"), _ATOM
    if isinstance(expr, Call):
        return f"{expr.function}({', '.join(show(a) for a in expr.args)})", _ATOM
    if isinstance(expr, Index):
        return f"{_at(expr.base, _ATOM)}[{show(expr.index)}]", _ATOM
    if isinstance(expr, Span):
        return f"{_at(expr.base, _ATOM)}[{_show_span(expr)}]", _ATOM
    if isinstance(expr, Binary):
        level = _LEVELS[expr.op]
        return f"{_at(expr.left, level)} {expr.op} {_at(expr.right, level + 1)}", level
    if isinstance(expr, Unary):
        level = _NOT if expr.op == "not" else _NEGATIVE
        return ("not " if expr.op == "not" else "-") + _at(expr.operand, level), level
    if isinstance(expr, Logic):
        level = _LEVELS[expr.op]
        return f" {expr.op} ".join(_at(e, level + 1) for e in expr.items), level
    if isinstance(expr, Choice):
        test, then = _at(expr.test, _CHOICE + 1), _at(expr.then, _CHOICE + 1)
        return f"{then} if {test} else {_at(expr.otherwise, _CHOICE)}", _CHOICE
    parts = [f"{op} {_at(e, _COMPARE + 1)}" for op, e in zip(expr.ops, expr.rest, strict=True)]
    return " ".join([_at(expr.first, _COMPARE + 1), *parts]), _COMPARE


def _at(expr: Expr, level: int) -> str:
    text, own = _show(expr)
    return text if own >= level else f"({text})"


def _show_span(expr: Span) -> str:
    ends = ["" if e is None else show(e) for e in (expr.start, expr.stop)]
    return ":".join(ends if expr.step is None else [*ends, show(expr.step)])


def parse(text: str) -> Expr:
    """The expression that `text` says; raises `ExpressionError` for anything outside the language."""
    try:
        tree = ast.parse(text.strip(), mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ExpressionError(f"'{text.strip()[:80]}' is not an expression: {getattr(error, 'msg', error)}") from error
    return from_ast(tree.body)


_BINARY: dict[type[ast.operator], str] = {
    ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/", ast.FloorDiv: "//", ast.Mod: "%",
}  # fmt: skip
_COMPARE_OPS: dict[type[ast.cmpop], str] = {
    ast.Eq: "==", ast.NotEq: "!=", ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">=", ast.In: "in",
    ast.NotIn: "not in",
}  # fmt: skip


def from_ast(tree: ast.expr, depth: int = 0) -> Expr:
    """As `parse`, of a part of a text that Python's grammar has taken apart already."""
    if depth > _DEEPEST:
        raise ExpressionError(f"an expression is nested more than {_DEEPEST} levels deep")

    def part(tree: ast.expr) -> Expr:
        return from_ast(tree, depth + 1)

    if isinstance(tree, ast.Constant):
        return _constant(tree.value)
    if isinstance(tree, ast.Name):
        return Literal(DType[tree.id]) if tree.id in DType.__members__ else Name(tree.id)
    if isinstance(tree, (ast.Tuple, ast.List)):
        return Tuple(tuple(map(part, tree.elts)))
    if isinstance(tree, ast.BinOp) and type(tree.op) in _BINARY:
        return Binary(_BINARY[type(tree.op)], part(tree.left), part(tree.right))
    if isinstance(tree, ast.UnaryOp) and isinstance(tree.op, (ast.USub, ast.Not)):
        return Unary("-" if isinstance(tree.op, ast.USub) else "not", part(tree.operand))
    if isinstance(tree, ast.BoolOp):
        return Logic("and" if isinstance(tree.op, ast.And) else "or", tuple(map(part, tree.values)))
    if isinstance(tree, ast.Compare) and all(type(op) in _COMPARE_OPS for op in tree.ops):
        ops = tuple(_COMPARE_OPS[type(op)] for op in tree.ops)
        return Compare(part(tree.left), ops, tuple(map(part, tree.comparators)))
    if isinstance(tree, ast.IfExp):
        return Choice(part(tree.test), part(tree.body), part(tree.orelse))
    if isinstance(tree, ast.Subscript):
        return _subscript(tree, part)
    if isinstance(tree, ast.Call):
        return _call(tree, part)
    raise ExpressionError(f"'{written(tree)}' is outside the language of conditions and attributes")


def written(tree: ast.AST) -> str:
    """The beginning of the text of a syntax tree, for messages."""
    try:
        return ast.unparse(tree)[:80]
    except RecursionError:
        return "a deeply nested term"


def _constant(value: object) -> Expr:
    if value is None or isinstance(value, (bool, int, str)):
        return Literal(value)
    if isinstance(value, float) and math.isfinite(value):
        return Literal(value)
    raise ExpressionError(f"the constant {value!r} is outside the language of conditions and attributes")


def _subscript(tree: ast.Subscript, part: Callable[[ast.expr], Expr]) -> Expr:
    base, index = part(tree.value), tree.slice
    if isinstance(index, ast.Slice):
        ends = [None if e is None else part(e) for e in (index.lower, index.upper, index.step)]
        return Span(base, *ends)
    return Index(base, part(index))


def _call(tree: ast.Call, part: Callable[[ast.expr], Expr]) -> Expr:
    if not isinstance(tree.func, ast.Name) or tree.func.id not in FUNCTIONS:
        raise ExpressionError(f"'{written(tree.func)}' is not a function; there are {', '.join(FUNCTIONS)}")
    name, function = tree.func.id, FUNCTIONS[tree.func.id]
    low, high = function.arity
    if tree.keywords or not low <= len(tree.args) <= high:
        raise ExpressionError(f"{name}() takes {low if low == high else f'{low} to {high}'} arguments without names")
    args = tuple(map(part, tree.args))
    tensors = args if function.tensors < 0 else args[: function.tensors]
    for arg in tensors:
        if not isinstance(arg, Name):
            raise ExpressionError(f"{name}() takes the name of a tensor, not {arg}")
    return Call(name, args)


def conjuncts(expr: Expr) -> tuple[Expr, ...]:
    """The parts of which all must hold."""
    if isinstance(expr, Logic) and expr.op == "and":
        return tuple(part for item in expr.items for part in conjuncts(item))
    return (expr,)
