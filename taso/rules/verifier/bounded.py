"""The gate for what no proof is found of: all small sizes, by identity of polynomials over symbolic elements."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice, product

import numpy as np
from numpy.typing import NDArray

from taso.graph.errors import TasoError
from taso.graph.index import Array, Numbers, evaluate
from taso.graph.numbers import Float64
from taso.graph.types import DType, TensorType
from taso.graph.unknown import UnknownReal
from taso.rules.expression import DependsOnSymbols, Value
from taso.rules.instances import Instance, types_of_nodes
from taso.rules.pattern import Exactness, PatternNode, Port, Ref, Rule
from taso.rules.verifier.forms import Forms, NotPolynomial
from taso.rules.verifier.small import MOST_DIMENSIONS, SETTINGS, NotEnumerable, Small, admits

SIZES = (2, 3, 4)
"""Sizes up to which a rule is looked at, one after the other: what is false mostly shows on the smallest."""

MOST_CASES = 20_000
_MOST_STEPS = 2_000_000
_MOST_PRODUCTS = 20_000_000  # of two monomials, over all cases of one size
_TYPED = 24  # cases on which other element types are tried


@dataclass(frozen=True)
class Exhaustion:
    """Whether a rule holds on all small sizes, and if not why; `extent` says which sizes and settings were covered."""

    done: bool
    reason: str = ""
    extent: str = ""
    counterexample: str = ""


class _Refused(Exception):
    """The sides are not found to be equal; carries how they differ, and whether that is a counterexample."""

    def __init__(self, text: str, certain: bool) -> None:
        super().__init__(text)
        self.certain = certain


class _TooMany(Exception):
    """More cases, steps or time than allowed; carries which."""


class _Effort:
    """What may be spent on one size."""

    def __init__(self, deadline: float) -> None:
        self._deadline = deadline
        self._steps = self._products = 0

    def step(self) -> None:
        self._steps += 1
        if self._steps > _MOST_STEPS:
            raise _TooMany(f"more than {_MOST_STEPS} choices of sizes and settings")
        if self._steps % 64 == 0:
            self.look()

    def multiply(self, count: int) -> None:
        self._products += count
        if self._products > _MOST_PRODUCTS:
            raise _TooMany(f"more than {_MOST_PRODUCTS} products")

    def look(self) -> None:
        """Raises where the time is over."""
        if time.monotonic() > self._deadline:
            raise _TooMany("the time allowed is over")


def exhaust(rule: Rule, seconds: float, sizes: Sequence[int] = SIZES) -> Exhaustion:
    """Compares both sides on all shapes and settings up to each of `sizes`, in polynomials over symbolic elements.

    Tensors have up to `MOST_DIMENSIONS` dimensions; settings are those that `SETTINGS` names. The largest size of which
    all cases were gone through counts; there are at most `MOST_CASES` of one size. Division is by what is not 0.
    """
    deadline, found = time.monotonic() + seconds, Exhaustion(False, "no sizes and settings are admitted")
    done: set[tuple[object, ...]] = set()
    for largest in sizes:
        try:
            count = _all_of(rule, largest, _Effort(deadline), done)
        except _Refused as refused:
            if refused.certain:
                return Exhaustion(False, str(refused), f"on sizes up to {largest}", str(refused))
            return Exhaustion(False, str(refused))
        except (NotEnumerable, NotPolynomial) as error:
            return Exhaustion(False, f"small sizes cannot be gone through: {error}")
        except _TooMany as error:
            unfinished = Exhaustion(False, f"sizes up to {largest} are not all gone through: {error}")
            return found if found.done else unfinished
        if count:
            found = Exhaustion(True, "", _extent(largest, count))
    return found


def _extent(largest: int, count: int) -> str:
    return (
        f"on all sizes up to {largest} of tensors of up to {MOST_DIMENSIONS} dimensions, with {SETTINGS}: "
        f"{count} cases (of at most {MOST_CASES})"
    )


def _all_of(rule: Rule, largest: int, effort: _Effort, done: set[tuple[object, ...]]) -> int:
    """The number of cases; raises `_Refused` at the first where the sides differ."""
    effort.look()
    count = 0
    for instance in Small(rule, largest, effort.step).instances():
        count += 1
        if count > MOST_CASES:
            raise _TooMany(f"more than {MOST_CASES} cases")
        # unknown reals are equal to nothing: written out they have names
        key = (*instance.types.items(), *((n, str(_named(v))) for n, v in instance.attrs.items()))
        if key not in done:
            done.add(key)
            _same(rule, instance, effort)
            if count <= _TYPED:
                _same_types(rule, instance)
    return count


def _named(value: Value) -> object:
    return value.name if isinstance(value, UnknownReal) else value


# ── one case ─────────────────────────────────────────────────────────────────────────────────────────────────────


def _same(rule: Rule, instance: Instance, effort: _Effort) -> None:
    """Raises `_Refused` where the sides differ on an instance."""
    forms = Forms(effort.multiply)
    values = {
        name: np.full(t.static_shape, int(forms.constant(instance.fills[name])), np.int64)
        if name in instance.fills else forms.tensor(name, t.static_shape)
        for name, t in instance.types.items()
    }  # fmt: skip
    left, right = _sides(rule, instance, values, forms)
    for place, (a, b) in enumerate(zip(left, right, strict=True)):
        unequal = np.argwhere(a != b)
        if len(unequal):
            at = tuple(int(i) for i in unequal[0])
            text = f"{_in_numbers(instance)}: output {place} at {at} is {forms.show(int(a[at]))} on the left, "
            raise _Refused(text + f"{forms.show(int(b[at]))} on the right", _differ_in_numbers(rule, instance))


def _sides(
    rule: Rule, instance: Instance, values: Mapping[str, Array], numbers: Numbers
) -> tuple[list[Array], list[Array]]:
    """The outputs of both sides; raises `_Refused` where they do not have the same types."""
    source = _Side(rule.source, instance)
    try:
        target = _Side(rule.target, instance)
    except DependsOnSymbols as error:
        raise NotEnumerable(str(error)) from error
    except TasoError as error:
        raise _Refused(f"{instance}: the source has a value, the target has none: {error}", True) from error
    for place, (old, new) in enumerate(rule.outputs):
        before, after = source.type_of(old), target.type_of(new)
        if before != after:
            raise _Refused(f"{instance}: output {place} is {before} on the left, {after} on the right", True)
    left = source.evaluate([s for s, _ in rule.outputs], values, numbers)
    return left, target.evaluate([t for _, t in rule.outputs], values, numbers)


class _Side:
    """One side of a rule on an instance: its nodes with their types."""

    def __init__(self, nodes: Sequence[PatternNode], instance: Instance) -> None:
        self._nodes = nodes
        self._variables = instance.types
        self._typed = types_of_nodes(nodes, instance.types, instance.environment)
        for node, (_, _, types) in zip(nodes, self._typed, strict=True):
            if len(types) != node.n_outputs:
                raise _Refused(f"{node.op.name} has {len(types)} outputs, the rule says {node.n_outputs}", False)

    def mean_something(self) -> None:
        """Raises `TasoError` where an operator has types here and no meaning over the reals, as dividing integers."""
        for node, (types, attrs, _) in zip(self._nodes, self._typed, strict=True):
            if node.op.meaning is not None:
                node.op.meaning(types, attrs)

    def type_of(self, ref: Ref) -> TensorType:
        return self._variables[ref] if isinstance(ref, str) else self._typed[ref.node][2][ref.output]

    def evaluate(self, outputs: Sequence[Ref], values: Mapping[str, Array], numbers: Numbers) -> list[Array]:
        done: dict[Port, Array] = {}

        def at(ref: Ref) -> Array:
            return values[ref] if isinstance(ref, str) else done[ref]

        for place, (node, (types, attrs, _)) in enumerate(zip(self._nodes, self._typed, strict=True)):
            if node.op.meaning is None:
                raise NotPolynomial(f"no meaning is written down for {node.op.name}")
            try:
                meanings = node.op.meaning(types, attrs)
            except TasoError as error:
                raise NotPolynomial(str(error)) from error
            given = [None if ref is None else at(ref) for ref in node.inputs]
            done.update({Port(place, i): evaluate(m, given, numbers) for i, m in enumerate(meanings)})
        found = [at(ref) for ref in outputs]
        for ref, array in zip(outputs, found, strict=True):
            if array.shape != self.type_of(ref).static_shape:
                raise _Refused(f"an output of shape {array.shape} has the type {self.type_of(ref)}", False)
        return found


def _differ_in_numbers(rule: Rule, instance: Instance) -> bool:
    """Whether the sides differ on random numbers too: else a function taken for unknown may explain the difference."""
    plain = _in_numbers(instance)
    rng = np.random.default_rng(1)
    # signs matter to maxima, and roots and logarithms ask for positive numbers
    for shift in (0.0, 3.0, -3.0, 0.0, 0.0, 0.0):
        values: dict[str, Array] = {}
        for name, t in instance.types.items():
            drawn = rng.normal(size=t.static_shape) + shift
            values[name] = np.full(t.static_shape, float(instance.fills[name])) if name in instance.fills else drawn
        try:
            pairs = zip(*_sides(rule, plain, values, Float64()), strict=True)
        except (TasoError, NotPolynomial):
            return False
        if any(_far(np.asarray(a, np.float64), np.asarray(b, np.float64)) for a, b in pairs):
            return True
    return False


def _in_numbers(instance: Instance) -> Instance:
    """The instance with a number for each unknown real."""
    attrs = {n: 0.75 if isinstance(v, UnknownReal) else v for n, v in instance.attrs.items()}
    return replace(instance, attrs=attrs)


def _far(a: NDArray[np.float64], b: NDArray[np.float64]) -> bool:
    """Whether finite elements differ by more than rounding."""
    known = np.isfinite(a) & np.isfinite(b)
    return bool(np.any(np.abs(a - b)[known] > 1e-8 * (1 + np.abs(a[known]))))


def _same_types(rule: Rule, instance: Instance) -> None:
    """Raises `_Refused` where the rule admits other element types, of which the target has none or others.

    A rule that is not exact applies to floating point alone.
    """
    kinds = [DType.FLOAT, DType.DOUBLE, *([DType.INT64] if rule.exactness is Exactness.EXACT else [])]
    for choice in islice(product(kinds, repeat=len(instance.types)), 1, 1 + 3**5):
        types = {n: TensorType(d, t.shape) for d, (n, t) in zip(choice, instance.types.items(), strict=True)}
        other = replace(instance, types=types)
        if not admits(rule, other):
            continue
        source = _Side(rule.source, other)
        try:
            target = _Side(rule.target, other)
        except TasoError as error:
            raise _Refused(f"{other}: the source has a value, the target has none: {error}", True) from error
        if any(source.type_of(s) != target.type_of(t) for s, t in rule.outputs):
            raise _Refused(f"{other}: the sides have different element types", True)
        try:
            source.mean_something()
            target.mean_something()
        except TasoError as error:
            raise _Refused(f"the conditions admit {other}: {error}", False) from error


__all__ = ["MOST_CASES", "SIZES", "Exhaustion", "exhaust"]
