"""The proof of a rule: on every way through its definitions, both sides have one type and the same elements."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from taso.graph.errors import TasoError
from taso.graph.types import DType, TensorType
from taso.rules.expression import ExpressionError
from taso.rules.pattern import Rule
from taso.rules.verifier import terms as algebra
from taso.rules.verifier.cases import Case, Inadmissible, NotUnderstood, OutOfTime, Trail
from taso.rules.verifier.elements import Elements, Placed
from taso.rules.verifier.polynomials import ONE, ZERO, Poly
from taso.rules.verifier.simplify import Simplifier
from taso.rules.verifier.symbolic import SymbolicRule


@dataclass(frozen=True)
class Proof:
    """Whether a rule was proved, and if not why; the ranks for which cases were found, and how many cases."""

    done: bool
    reason: str = ""
    ranks: tuple[str, ...] = ()
    cases: int = 0


class _Failure(Exception):
    """The two sides were not found to be equal; carries how they differ."""


def prove(rule: Rule, most_dimensions: int, deadline: float, dtypes: Mapping[str, DType] | None = None) -> Proof:
    """Proves that both sides are equal for variables of at most `most_dimensions` dimensions."""
    trail = Trail(deadline)
    ranks: dict[str, None] = {}
    cases = 0
    for _ in trail.ways():
        case = Case(trail)
        try:
            found = _case(rule, case, most_dimensions, dtypes or {})
        except Inadmissible:
            continue
        except OutOfTime:
            return Proof(False, "the time allowed is over", tuple(ranks), cases)
        except (_Failure, NotUnderstood) as failure:
            if case.known.impossible:
                continue
            return Proof(False, str(failure), tuple(ranks), cases)
        if time.monotonic() > deadline:
            return Proof(False, "the time allowed is over", tuple(ranks), cases)
        cases += 1
        ranks[", ".join(f"{name}: {rank}" for name, rank in found.items())] = None
    if not cases:
        return Proof(False, "no sizes and settings were found that source and conditions admit")
    return Proof(True, "", tuple(ranks), cases)


def _case(rule: Rule, case: Case, most: int, dtypes: Mapping[str, DType]) -> Mapping[str, int]:
    symbolic = SymbolicRule(rule, case, most, dtypes)
    try:
        source, before = symbolic.side(rule.source)
    except (TasoError, ZeroDivisionError) as error:
        raise Inadmissible(str(error)) from error
    if case.known.contradictory:
        raise Inadmissible("the assumptions contradict one another")
    case.in_source = False
    try:
        target, after = symbolic.side(rule.target)
    except (TasoError, ZeroDivisionError) as error:
        raise _Failure(f"the target has no type: {error}") from error
    for place, (old, new) in enumerate(rule.outputs):
        left, right = symbolic.type_at(old, before), symbolic.type_at(new, after)
        if left is None or right is None:
            raise _Failure(f"output {place} is missing")
        _same_type(case, left, right, place)
    for place, (old, new) in enumerate(rule.outputs):
        left = symbolic.type_at(old, before)
        if left is not None:
            _same_elements(case, left, (source, target), (old, new), symbolic.fills, place)
    return symbolic.tensors.ranks


def _same_type(case: Case, left: TensorType, right: TensorType, place: int) -> None:
    shown = f"output {place} is {left} on the left, {right} on the right"
    if left.dtype is not right.dtype or left.rank != right.rank:
        raise _Failure(shown)
    for a, b in zip(left.dims, right.dims, strict=True):
        if case.known.zero(case.poly(a) - case.poly(b)) is not True:
            raise _Failure(shown)


def _same_elements(
    case: Case, type: TensorType, sides: tuple[Sequence[Placed], Sequence[Placed]], refs: tuple[object, object],
    fills: Mapping[str, algebra.Sum], place: int,
) -> None:  # fmt: skip
    index: list[Poly] = []
    for dim in type.dims:
        extent = case.poly(dim)
        if not case.is_nonneg(extent - ONE):
            return
        index.append(ZERO if extent == ONE else Poly.atom(case.known.index("free", extent)))
    found = []
    for nodes, ref in zip(sides, refs, strict=True):
        at = tuple(map(case.known.now, index))
        found.append(Elements(case, nodes, fills).at(ref, at))  # type: ignore[arg-type]  # outputs are references
    simplifier = Simplifier(case)
    # the second side may have made more known than was when the first was written down
    texts = [algebra.text(simplifier.sum(simplifier.sum(side)), {}) for side in found]
    if texts[0] != texts[1]:
        raise _Failure(f"output {place} at ({', '.join(map(str, index))}): {texts[0]}  ≠  {texts[1]}")


__all__ = ["ExpressionError", "Proof", "prove"]
