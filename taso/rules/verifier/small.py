"""All small instances of a rule: every choice of ranks, sizes and settings up to a bound that the rule admits.

Sizes are symbols at first. What a type rule or a condition asks of them as an equation is solved, which loses nothing;
whatever else is open is chosen in all ways, one after the other, and each instance is checked in numbers at the end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from itertools import chain, combinations, permutations, product

import numpy as np

from taso.graph.errors import DimensionMismatch, TasoError
from taso.graph.operator import Attrs, AttrValue
from taso.graph.types import Dim, DType, Larger, SymDim, TensorType, substitute, symbols_of
from taso.graph.unknown import UnknownReal
from taso.rules.expression import (
    Bindings,
    Call,
    Compare,
    DependsOnSymbols,
    Expr,
    ExpressionError,
    Name,
    Value,
    attribute_names,
    evaluate,
    exact_number,
    leaves,
    tensor_names,
    value_of,
)  # fmt: skip
from taso.rules.instances import Instance, asked_numbers, contents_of, not_weights, types_of_nodes
from taso.rules.pattern import PatternNode, Ref, Rule, attribute_value, settled
from taso.rules.solving import is_dim, larger_in, solve

MOST_DIMENSIONS = 4
"""Ranks up to which tensors are looked at."""

SETTINGS = "strides and dilations of 1 and 2, pads of 0 and 1, windows, groups and repeats up to the largest size"

_REALS = frozenset({"alpha", "beta", "gamma", "epsilon", "ratio", "bias", "lambd", "value"})
_FLAGS = frozenset({"keepdims", "ceil_mode", "count_include_pad", "transA", "transB", "flattened", "allowzero"})
_COUNTS = frozenset({"group", "groups", "count", "channels", "size"})


class NotEnumerable(Exception):
    """What cannot be gone through in all ways; carries what."""


class _Dead(Exception):
    """This choice admits nothing."""


class _Open(Exception):
    """Something must be chosen: the states that all choices lead to."""

    def __init__(self, states: Sequence[_State]) -> None:
        super().__init__()
        self.states = states


@dataclass(frozen=True)
class _State:
    """What was chosen and solved so far."""

    ranks: Mapping[str, int] = field(default_factory=dict)
    known: Mapping[str, Dim] = field(default_factory=dict)
    attrs: Mapping[str, Value] = field(default_factory=dict)

    def learn(self, symbol: str, value: Dim) -> _State:
        known = {n: substitute(d, {symbol: value}) for n, d in self.known.items()}
        return replace(self, known={**known, symbol: value})

    def shape(self, name: str) -> tuple[Dim, ...]:
        return tuple(substitute(SymDim.named(f"{name}.{i}"), self.known) for i in range(self.ranks[name]))


class Small:
    """Goes through the instances of `rule` with sizes up to `largest`; `spend` is called at each step and may raise."""

    def __init__(self, rule: Rule, largest: int, spend: Callable[[], None]) -> None:
        self._rule = rule
        self._largest = largest
        self._spend = spend
        self._fills = _fills(rule)
        self._weights = frozenset(rule.variables) - not_weights(rule)
        if asked_numbers(rule):
            raise NotEnumerable("a setting depends on what a weight holds")

    def instances(self) -> Iterator[Instance]:
        """Each admissible instance once; raises `NotEnumerable` where choices are not finite or not known."""
        seen: set[tuple[object, ...]] = set()
        open_states = [_State()]
        while open_states:
            state = open_states.pop()
            self._spend()
            try:
                settled_state = self._settled(state)
            except _Dead:
                continue
            except _Open as choice:
                open_states.extend(reversed(choice.states))
                continue
            for instance in self._numbered(settled_state):
                key = (*instance.types.items(), *instance.attrs.items())
                if key not in seen:
                    seen.add(key)
                    yield instance

    # ── one state ────────────────────────────────────────────────────────────────────────────────────────────────

    def _settled(self, state: _State) -> _State:
        """The state with all its equations solved; raises `_Dead`, or `_Open` where something must be chosen."""
        while True:
            changed = self._by_conditions(state)
            if changed is None:
                changed = self._by_types(state)
            if changed is None:
                return state
            state = changed

    def _environment(self, state: _State) -> Bindings:
        types = {n: TensorType(DType.FLOAT, state.shape(n)) for n in state.ranks}
        return Bindings(types, state.attrs, self._weights, contents_of(self._fills))

    def _by_conditions(self, state: _State) -> _State | None:
        """What follows from a condition, None where nothing does."""
        env = self._environment(state)
        for condition in self._rule.conditions:
            if not (tensor_names(condition) <= state.ranks.keys() and attribute_names(condition) <= state.attrs.keys()):
                continue
            try:
                if evaluate(condition, env) is False:
                    raise _Dead
            except DependsOnSymbols:
                pass
            except ExpressionError as error:
                raise _Dead from error
            for left, right in _equations(condition, env):
                solved = solve(left, right, lambda symbol: 0) if left != right else None
                if solved is not None:
                    return state.learn(*solved)
        return None

    def _by_types(self, state: _State) -> _State | None:
        """What follows from the type rules of the source, None where nothing does."""
        done: list[tuple[TensorType, ...]] = []
        for node in self._rule.source:
            inputs = tuple(self._type_at(ref, state, done) for ref in node.inputs)
            attrs = self._attributes(node, inputs, state)
            try:
                results = node.op.types_of(inputs, attrs)
            except DimensionMismatch as error:
                return self._equated(error.left, error.right, inputs, state)
            except TasoError as error:
                if _whatever_sizes(node, inputs, attrs):
                    raise _Dead from error
                raise self._any_size(inputs, state) from error
            for met in (m for t in results for d in t.shape or () for m in larger_in(d)):
                raise self._met(met, state)
            done.append(results)
        return None

    def _type_at(self, ref: Ref | None, state: _State, done: Sequence[tuple[TensorType, ...]]) -> TensorType | None:
        if ref is None:
            return None
        if not isinstance(ref, str):
            if ref.output >= len(done[ref.node]):
                raise _Dead
            return done[ref.node][ref.output]
        if ref not in state.ranks:
            ranks = range(MOST_DIMENSIONS + 1)
            raise _Open([replace(state, ranks={**state.ranks, ref: rank}) for rank in ranks])
        return TensorType(DType.FLOAT, state.shape(ref))

    def _equated(
        self, left: object, right: object, inputs: Sequence[TensorType | None], state: _State
    ) -> _State:
        if not (is_dim(left) and is_dim(right)) or (isinstance(left, int) and isinstance(right, int)):
            raise _Dead
        solved = solve(left, right, lambda symbol: 0)
        if solved is None:
            raise self._any_size(inputs, state)
        return state.learn(*solved)

    def _any_size(self, inputs: Sequence[TensorType | None], state: _State) -> Exception:
        """All values of one symbol that the inputs have; nothing is admitted where they have none."""
        dims = [d for t in reversed(inputs) if t is not None for d in reversed(t.shape or ())]
        return self._any_value(dims, state)

    def _any_of(self, expr: Expr, state: _State) -> Exception:
        """All values of one symbol that an expression depends on."""
        dims = [d for n in sorted(tensor_names(expr)) for d in state.shape(n)]
        if not any(map(symbols_of, dims)):
            raise NotEnumerable(f"{expr} depends on a real number")
        return self._any_value(dims, state)

    def _any_value(self, dims: Sequence[Dim], state: _State) -> Exception:
        symbols = [s for d in dims for s in sorted(symbols_of(d))]
        if not symbols:
            return _Dead()
        return _Open([state.learn(symbols[0], size) for size in range(1, self._largest + 1)])

    def _met(self, met: Larger, state: _State) -> Exception:
        """The ways in which two sizes can broadcast."""
        ways = [solve(a, b, lambda symbol: 0) for a, b in ((met.left, met.right), (met.left, 1), (met.right, 1))]
        found = [state.learn(*way) for way in ways if way is not None]
        if len(found) < len(ways):
            return self._any_value([met.left, met.right], state)
        return _Open(found)

    # ── settings ─────────────────────────────────────────────────────────────────────────────────────────────────

    def _attributes(self, node: PatternNode, inputs: tuple[TensorType | None, ...], state: _State) -> Attrs:
        given: dict[str, AttrValue] = {}
        for name, expr in node.attrs:
            if isinstance(expr, Name) and expr.name not in state.attrs:
                values = self._values(node, name, expr.name, inputs, given, state)
                raise _Open([replace(state, attrs={**state.attrs, expr.name: v}) for v in values])
            try:
                value = value_of(expr, self._environment(state))
            except DependsOnSymbols as error:
                raise self._any_of(expr, state) from error
            except ExpressionError as error:
                raise _Dead from error
            open_dims = [d for d in leaves(value) if isinstance(d, SymDim)]
            if open_dims:
                raise self._any_value(open_dims, state)
            given[name] = attribute_value(node.op, name, value)
        return settled(node.op, inputs, node.op.complete(given))

    def _values(
        self, node: PatternNode, name: str, variable: str, inputs: Sequence[TensorType | None],
        given: Mapping[str, AttrValue], state: _State,
    ) -> Sequence[Value]:  # fmt: skip
        """All values of a setting within the bounds."""
        asked = self._asked(variable, state)
        if asked is not None:
            return asked
        if name in _REALS or (node.op.name == "Clip" and name in ("min", "max")):
            if any(variable in attribute_names(c) for c in self._rule.conditions):
                raise NotEnumerable(f"a condition speaks of the real number {node.op.name}.{name}")
            return [UnknownReal(variable), *([None] if node.op.name == "Clip" else [])]
        plain = self._plain(node, name)
        if plain is not None:
            return plain
        first = inputs[0] if inputs else None
        if first is None:
            raise NotEnumerable(f"it is not known which values {node.op.name}.{name} can take")
        if name in ("split", "shape", "starts", "ends", "steps") and not first.static:
            raise self._any_size(inputs, state)
        return self._by_shape(node, name, first, given)

    def _asked(self, variable: str, state: _State) -> Sequence[Value] | None:
        """The only value of a setting, where a condition says it."""
        for c in self._rule.conditions:
            if isinstance(c, Compare) and c.ops == ("==",) and Name(variable) in (c.first, c.rest[0]):
                other = c.rest[0] if c.first == Name(variable) else c.first
                known = tensor_names(other) <= state.ranks.keys() and attribute_names(other) <= state.attrs.keys()
                if known and variable not in attribute_names(other):
                    try:
                        value = value_of(other, self._environment(state))
                    except ExpressionError:
                        continue
                    if not any(isinstance(d, SymDim) for d in leaves(value)):
                        return [value]
        return None

    def _plain(self, node: PatternNode, name: str) -> Sequence[Value] | None:
        if name in _FLAGS:
            return (0, 1)
        if name in _COUNTS:
            return range(1, self._largest + 1)
        if name in ("to", "dtype"):
            return (DType.FLOAT, DType.DOUBLE)
        if name == "approximate":
            return ("none", "tanh")
        return None

    def _by_shape(
        self, node: PatternNode, name: str, first: TensorType, given: Mapping[str, AttrValue]
    ) -> Sequence[Value]:
        rank, op = first.rank, node.op.name
        spatial = max(rank - 2, 0)
        sizes = range(1, self._largest + 1)
        if name == "axis":
            return range(rank + 1 if op == "Flatten" else rank)
        if name == "perm":
            return list(permutations(range(rank)))
        if name in ("strides", "dilations"):
            return list(product((1, 2), repeat=spatial))
        if name == "kernel_shape":
            return list(product(sizes, repeat=spatial))
        if name == "pads":
            return list(product((0, 1), repeat=2 * (rank if op == "Pad" else spatial)))
        if name == "repeats":
            return list(product(sizes, repeat=rank))
        if name == "axes":
            return list(_axes(rank, op == "Unsqueeze"))
        if name == "split":
            axis = given.get("axis", 0)
            along = axis if isinstance(axis, int) and -rank <= axis < rank else None
            return [] if along is None else list(_parts(first.static_shape[along], node.n_outputs))
        if name == "shape" and op in ("Reshape", "Expand"):
            return list(_shapes(first.static_shape, op, self._largest))
        if name in ("starts", "ends", "steps") and op == "Slice":
            return list(_sliced(first.static_shape, name, given))
        raise NotEnumerable(f"it is not known which values {op}.{name} can take")

    # ── numbers ──────────────────────────────────────────────────────────────────────────────────────────────────

    def _numbered(self, state: _State) -> Iterator[Instance]:
        """All numbers for the symbols that are left such that source and conditions hold."""
        shapes = {n: state.shape(n) for n in self._rule.variables}
        symbols = sorted({s for shape in shapes.values() for d in shape for s in symbols_of(d)})
        for numbers in product(range(1, self._largest + 1), repeat=len(symbols)):
            self._spend()
            values: dict[str, Dim] = dict(zip(symbols, numbers, strict=True))
            sizes = {n: tuple(substitute(d, values) for d in shape) for n, shape in shapes.items()}
            if all(isinstance(d, int) and 1 <= d <= self._largest for shape in sizes.values() for d in shape):
                types = {n: TensorType(DType.FLOAT, shape) for n, shape in sizes.items()}
                instance = Instance(types, dict(state.attrs), self._weights, self._fills)
                if admits(self._rule, instance):
                    yield instance


def admits(rule: Rule, instance: Instance) -> bool:
    """Whether source and conditions hold of an instance, in numbers."""
    env = instance.environment
    try:
        outputs = [t for _, _, types in types_of_nodes(rule.source, instance.types, env) for t in types]
    except TasoError:
        return False
    return all(t.size > 0 for t in outputs) and rule.check_conditions(env) is None


class _Watched(int):
    """A size that notes whether anything was asked of it."""

    asked: list[bool]

    def __new__(cls, asked: list[bool]) -> _Watched:
        self = super().__new__(cls, 1)
        self.asked = asked
        return self


def _noting(name: str) -> Callable[..., object]:
    plain: Callable[..., object] = getattr(int, name)

    def method(self: _Watched, *args: object) -> object:
        self.asked.append(True)
        return plain(self, *args)

    return method


for _name in (
    "add", "radd", "sub", "rsub", "mul", "rmul", "floordiv", "rfloordiv", "mod", "rmod", "neg", "eq", "ne", "lt", "le",
    "gt", "ge", "bool", "hash", "index", "int", "abs", "divmod", "rdivmod", "pow", "truediv", "rtruediv",
):  # fmt: skip
    setattr(_Watched, f"__{_name}__", _noting(f"__{_name}__"))


def _whatever_sizes(node: PatternNode, inputs: Sequence[TensorType | None], attrs: Attrs) -> bool:
    """Whether an operator refuses inputs of these ranks before it asks for any size."""
    asked: list[bool] = []
    watched = [None if t is None else t.with_shape(tuple(_Watched(asked) for _ in t.dims)) for t in inputs]
    try:
        node.op.types_of(watched, attrs)
    except TasoError:
        return not asked
    return False


# ── what conditions ask ──────────────────────────────────────────────────────────────────────────────────────────


def _equations(condition: Expr, env: Bindings) -> Iterator[tuple[Dim, Dim]]:
    """Pairs of sizes that a condition asks to be equal."""
    try:
        if isinstance(condition, Compare) and set(condition.ops) == {"=="}:
            values = [value_of(e, env) for e in (condition.first, *condition.rest)]
            for a, b in zip(values, values[1:], strict=False):
                yield from _paired(a, b)
        elif isinstance(condition, Call) and condition.function == "same_shape":
            shapes = [env.type_of(n.name).dims for n in condition.args if isinstance(n, Name)]
            for shape in shapes[1:]:
                yield from _paired(shapes[0], shape)
    except ExpressionError:
        return


def _paired(a: Value, b: Value) -> Iterator[tuple[Dim, Dim]]:
    if isinstance(a, tuple) and isinstance(b, tuple) and len(a) == len(b):
        for c, d in zip(a, b, strict=True):
            yield from _paired(c, d)
    elif is_dim(a) and is_dim(b):
        yield a, b


def _fills(rule: Rule) -> dict[str, Fraction]:
    """The numbers that all elements of tensors are, as conditions ask."""
    found: dict[str, Fraction] = {}
    for c in rule.conditions:
        if isinstance(c, Call) and c.function == "filled" and isinstance(c.args[0], Name):
            number = exact_number(c.args[1])
            if number is None:
                raise NotEnumerable(f"{c} asks for a number that is not written out")
            found[c.args[0].name] = number
    return found


# ── all settings ─────────────────────────────────────────────────────────────────────────────────────────────────


def _axes(rank: int, new: bool) -> Iterator[tuple[int, ...]]:
    """All sets of axes; of new ones those that leave no more dimensions than are looked at."""
    for count in range(MOST_DIMENSIONS - rank + 1 if new else rank + 1):
        yield from combinations(range(rank + count if new else rank), count)


def _parts(total: int, count: int) -> Iterator[tuple[int, ...]]:
    """All ways to write a size as a sum of parts of at least 1."""
    for cuts in combinations(range(1, total), count - 1):
        yield tuple(b - a for a, b in zip((0, *cuts), (*cuts, total), strict=True))


def _shapes(sizes: tuple[int, ...], op: str, largest: int) -> Iterator[tuple[int, ...]]:
    if op == "Expand":
        yield from product(*(range(1, largest + 1) if s == 1 else (s,) for s in sizes))
        return
    total = int(np.prod(sizes, dtype=np.int64))
    yield from chain.from_iterable(_factored(total, rank) for rank in range(MOST_DIMENSIONS + 1))


def _factored(total: int, rank: int) -> Iterator[tuple[int, ...]]:
    if rank == 0:
        if total == 1:
            yield ()
        return
    for first in range(1, total + 1):
        if total % first == 0:
            yield from ((first, *rest) for rest in _factored(total // first, rank - 1))


def _sliced(sizes: tuple[int, ...], name: str, given: Mapping[str, AttrValue]) -> Iterator[tuple[int, ...]]:
    axes = given.get("axes")
    chosen = [a for a in axes if isinstance(a, int)] if isinstance(axes, tuple) and axes else list(range(len(sizes)))
    if any(not -len(sizes) <= a < len(sizes) for a in chosen):
        return
    every: dict[str, Callable[[int], Sequence[int]]] = {
        "starts": range, "ends": lambda size: range(1, size + 1), "steps": lambda size: (1, 2)
    }  # fmt: skip
    yield from product(*(every[name](sizes[a]) for a in chosen))
