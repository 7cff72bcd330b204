"""The proof of a rule: on every way through its definitions, both sides have one type and the same elements."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product

from taso.graph.errors import TasoError
from taso.graph.types import DType, TensorType
from taso.rules.expression import DependsOnSymbols
from taso.rules.pattern import Exactness, Ref, Rule
from taso.rules.verifier import terms as algebra
from taso.rules.verifier.cases import Case, Inadmissible, NotUnderstood, Trail
from taso.rules.verifier.elements import Elements, Placed
from taso.rules.verifier.facts import Effort, OutOfTime, TooMuch
from taso.rules.verifier.finer import finer
from taso.rules.verifier.polynomials import ONE, ZERO, Poly
from taso.rules.verifier.simplify import Simplifier
from taso.rules.verifier.symbolic import (
    ELEMENT_TYPES,
    SymbolicRule,
    names_element_types,
    ranks_told_apart,
    types_depend_on_more,
)

MOST_DIMENSIONS = (6, 5, 4)
"""Ranks up to which a proof goes: the first of these that takes no more than `_STEPS`, at least the last."""

_STEPS = 80_000


@dataclass(frozen=True)
class Proof:
    """Whether a rule was proved, and if not why; up to which rank, in how many cases, and the ranks in the first."""

    done: bool
    reason: str = ""
    dimensions: int = 0
    cases: int = 0
    ranks: Mapping[str, int] = field(default_factory=dict)


class _Failure(Exception):
    """The two sides were not found to be equal; carries how they differ."""


def prove(rule: Rule, seconds: float, steps: int | None = None) -> Proof:
    """Proves that both sides are equal for all sizes of at least 1, or says why that was not found.

    The same rule always gives the same answer, unless the time runs out. `steps` bounds the work as well, so that a
    proof that is only tried costs little and its outcome does not depend on how fast the machine is.
    """
    deadline = time.monotonic() + seconds
    apart = ranks_told_apart(rule)
    for most in MOST_DIMENSIONS:
        if apart > most:
            return Proof(False, f"it tells ranks up to {apart} apart, and a proof goes up to {most} dimensions")
        try:
            effort = Effort(deadline, _STEPS if steps is None and most != MOST_DIMENSIONS[-1] else steps)
            found = _prove(rule, most, effort)
            return found if not found.done else _element_types(rule, found, deadline)
        except TooMuch:
            continue
        except OutOfTime:
            break
        except RecursionError:
            return Proof(False, "the sizes are nested too deeply in one another")
    else:
        return Proof(False, f"it takes more than {steps} steps")
    return Proof(False, f"the time allowed, {seconds:g} s, is over")


def _prove(rule: Rule, most: int, effort: Effort) -> Proof:
    trail = Trail(effort)
    cases, ranks = 0, dict[str, int]()
    for _ in trail.ways():
        case = Case(trail)
        try:
            found = _case(rule, case, most)
        except Inadmissible:
            continue
        except (_Failure, NotUnderstood) as failure:
            if case.known.impossible:
                continue
            return Proof(False, str(failure), most, cases)
        cases, ranks = cases + 1, ranks or found
    if not cases:
        return Proof(False, "no sizes and settings were found that source and conditions admit", most)
    return Proof(True, "", most, cases, ranks)


def _case(rule: Rule, case: Case, most: int) -> dict[str, int]:
    """Proves one case; gives the ranks of its variables."""
    symbolic, source, target = _typed(case, SymbolicRule(rule, case, most), rule)
    for place, (old, new) in enumerate(rule.outputs):
        type = symbolic.type_at(old, source.types)
        if type is not None:
            _same_elements(case, type, (source.nodes, target.nodes), (old, new), symbolic, place)
    return symbolic.tensors.ranks


@dataclass(frozen=True)
class _Side:
    nodes: Sequence[Placed]
    types: Sequence[tuple[TensorType, ...]]


def _typed(case: Case, symbolic: SymbolicRule, rule: Rule) -> tuple[SymbolicRule, _Side, _Side]:
    """Both sides, found to have the same types."""
    try:
        source = _Side(*symbolic.side(rule.source))
    except DependsOnSymbols as error:
        # it may be admitted for some values and not for others
        raise NotUnderstood(str(error)) from error
    except (TasoError, ZeroDivisionError) as error:
        raise Inadmissible(str(error)) from error
    if case.known.contradictory:
        raise Inadmissible("the assumptions contradict one another")
    case.in_source = False
    try:
        target = _Side(*symbolic.side(rule.target))
    except (TasoError, ZeroDivisionError) as error:
        raise _Failure(f"the target has no type: {error}") from error
    for place, (old, new) in enumerate(rule.outputs):
        left, right = symbolic.type_at(old, source.types), symbolic.type_at(new, target.types)
        if left is None or right is None:
            raise _Failure(f"output {place} is missing")
        _same_type(case, left, right, place)
    return symbolic, source, target


def _same_type(case: Case, left: TensorType, right: TensorType, place: int) -> None:
    shown = f"output {place} is {left} on the left, {right} on the right"
    if left.dtype is not right.dtype or left.rank != right.rank:
        raise _Failure(shown)
    for a, b in zip(left.dims, right.dims, strict=True):
        if case.known.zero(case.poly(a) - case.poly(b)) is not True:
            raise _Failure(shown)


def _same_elements(
    case: Case, type: TensorType, sides: tuple[Sequence[Placed], Sequence[Placed]], refs: tuple[Ref, Ref],
    symbolic: SymbolicRule, place: int,
) -> None:  # fmt: skip
    index: list[Poly] = []
    for dim in type.dims:
        extent = case.poly(dim)
        if not case.is_nonneg(extent - ONE):
            return
        index.append(ZERO if extent == ONE else Poly.atom(case.known.index("free", extent)))
    found, elements = [], [Elements(case, nodes, symbolic.fills, symbolic.integers) for nodes in sides]
    for side, ref in zip(elements, refs, strict=True):
        found.append(side.at(ref, tuple(map(case.known.now, index))))
    simplifier = Simplifier(case)
    # the second side may have made more known than was when the first was written down
    sums = [simplifier.sum(simplifier.sum(side)) for side in found]
    texts = [algebra.text(side, {}) for side in sums]
    if texts[0] != texts[1]:
        opened = [algebra.text(finer(case, side, symbolic.integers), {}) for side in sums]
        if opened[0] != opened[1]:
            raise _Failure(f"output {place} at ({', '.join(map(str, index))}): {texts[0]}  ≠  {texts[1]}")
    new = _named(elements[1].partial) - _named(elements[0].partial)
    if new:
        _kept(new, finer(case, sums[1], symbolic.integers), place)


def _named(partial: Iterable[tuple[str, frozenset[str]]]) -> set[tuple[str, str]]:
    return {(function, name) for function, names in partial for name in names}


def _kept(new: set[tuple[str, str]], result: algebra.Sum, place: int) -> None:
    """Raises `_Failure` where the target divides by, or takes the root of, what neither the source nor the result does.

    Such a part cancels among real numbers, and where it has no value, the source still has one.
    """
    left = {(f.function, name) for f in algebra.applied_in(result) for a in f.args for name in algebra.variables_in(a)}
    for function, name in sorted(new - left):
        raise _Failure(f"output {place}: {function} of {name} cancels, and may have no value where the source has one")


# ── element types ────────────────────────────────────────────────────────────────────────────────────────────────


def _element_types(rule: Rule, proof: Proof, deadline: float) -> Proof:
    """`proof`, unless another choice of element types is admitted of which it does not hold.

    What type rules say of element types does not depend on sizes, so that one case of each choice is enough, unless the
    rule itself makes more of it. A rule that is not exact applies to floating point alone.
    """
    exact = rule.exactness is Exactness.EXACT
    kinds = [DType.FLOAT, DType.DOUBLE, *([DType.INT64] if exact else [])]
    if names_element_types(rule):
        kinds = [t for t in ELEMENT_TYPES if exact or t.is_float]
    for choice in product(kinds, repeat=len(rule.variables)):
        reason = _of_types(rule, proof, dict(zip(rule.variables, choice, strict=True)), Effort(deadline))
        if reason:
            return Proof(False, reason, proof.dimensions, proof.cases)
    return proof


def _of_types(rule: Rule, proof: Proof, dtypes: Mapping[str, DType], effort: Effort) -> str:
    """Why the rule does not hold of these element types; "" where it does, or does not apply."""
    every = types_depend_on_more(rule)
    trail = Trail(effort)
    shown = ", ".join(f"{name}: {dtype.name}" for name, dtype in dtypes.items())
    for _ in trail.ways():
        case = Case(trail)
        try:
            _typed(case, SymbolicRule(rule, case, proof.dimensions, {} if every else proof.ranks, dtypes), rule)
        except Inadmissible:
            continue
        except (_Failure, NotUnderstood) as failure:
            if not case.known.impossible:
                return f"{failure} ({shown})"
            continue
        if not every:
            return ""
    return ""
