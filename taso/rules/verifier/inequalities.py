"""Whether linear inequalities over the integers can hold together (elimination of Fourier 1826 and Motzkin 1936)."""

from __future__ import annotations

import math
from collections.abc import Iterable

from taso.rules.verifier.polynomials import Monomial, Poly

Constraint = dict[Monomial, int]

_MOST = 160  # constraints at which elimination is given up


def impossible(polys: Iterable[Poly]) -> bool:
    """Whether no integers make all polynomials ≥ 0, each monomial taken as an unknown of its own.

    False says nothing: rational solutions, or too many constraints.
    """
    constraints: dict[frozenset[tuple[Monomial, int]], Constraint] = {}
    for poly in polys:
        made = _tightened({m: int(c) for m, c in poly.terms.items()})
        constraints[frozenset(made.items())] = made
    left = list(constraints.values())
    while True:
        if any(len(c) <= 1 and c.get((), 0) < 0 and () in c for c in left):
            return True
        variable = _cheapest(left)
        if variable is None:
            return False
        left = _without(left, variable)
        if len(left) > _MOST:
            return False


def _tightened(constraint: Constraint) -> Constraint:
    """Divided by the common factor of its coefficients, the constant rounded down: integers satisfy both alike."""
    factor = math.gcd(*(c for m, c in constraint.items() if m))
    if factor <= 1:
        return constraint
    return {m: c // factor for m, c in constraint.items() if m or c // factor}


def _cheapest(constraints: list[Constraint]) -> Monomial | None:
    """The unknown whose elimination makes the fewest new constraints."""
    counts: dict[Monomial, list[int]] = {}
    for constraint in constraints:
        for monomial, coefficient in constraint.items():
            if monomial:
                counts.setdefault(monomial, [0, 0])[coefficient > 0] += 1
    if not counts:
        return None
    return min(counts, key=lambda m: (counts[m][0] * counts[m][1] - sum(counts[m]), [a.order for a in m]))


def _without(constraints: list[Constraint], variable: Monomial) -> list[Constraint]:
    lower = [c for c in constraints if c.get(variable, 0) > 0]
    upper = [c for c in constraints if c.get(variable, 0) < 0]
    found = {frozenset(c.items()): c for c in constraints if variable not in c}
    for low in lower:
        for high in upper:
            made = _combined(low, high, variable)
            # what only says that a number is not negative says nothing
            if made.keys() - {()} or made.get((), 0) < 0:
                found[frozenset(made.items())] = made
            if len(found) > _MOST:
                return list(found.values())
    return list(found.values())


def _combined(low: Constraint, high: Constraint, variable: Monomial) -> Constraint:
    a, b = low[variable], -high[variable]
    shared = math.gcd(a, b)
    p, q = b // shared, a // shared
    total = {m: c * p for m, c in low.items()}
    for monomial, coefficient in high.items():
        new = total.get(monomial, 0) + coefficient * q
        if new:
            total[monomial] = new
        else:
            total.pop(monomial, None)
    return _tightened(total)
