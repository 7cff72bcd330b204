"""Whether linear inequalities over the integers can hold together (elimination of Fourier 1826 and Motzkin 1936)."""

from __future__ import annotations

import math
from collections.abc import Iterable

from taso.rules.verifier.polynomials import Monomial, Poly

Constraint = dict[Monomial, int]
Constraints = dict[frozenset[tuple[Monomial, int]], Constraint]

_MOST = 160  # constraints at which elimination is given up


def impossible(polys: Iterable[Poly]) -> bool:
    """Whether no integers make all polynomials ≥ 0, each monomial taken as an unknown of its own.

    False says nothing: rational solutions, or too many constraints.
    """
    left: Constraints = {}
    for poly in polys:
        made = _tightened({m: int(c) for m, c in poly.terms.items()})
        if _false(made):
            return True
        left[frozenset(made.items())] = made
    while True:
        found = _cheapest(left)
        if found is None:
            return False
        variable, idle = found
        if idle:
            # bounded on one side only, so that a large enough value satisfies all that speak of it
            left = {k: c for k, c in left.items() if idle.isdisjoint(c)}
        elif _eliminated(left, variable):
            return True
        if len(left) > _MOST:
            return False


def _false(constraint: Constraint) -> bool:
    return len(constraint) == 1 and constraint.get((), 0) < 0


def _tightened(constraint: Constraint) -> Constraint:
    """Divided by the common factor of its coefficients, the constant rounded down: integers satisfy both alike."""
    factor = math.gcd(*(c for m, c in constraint.items() if m))
    if factor <= 1:
        return constraint
    return {m: c // factor for m, c in constraint.items() if m or c // factor}


def _cheapest(constraints: Constraints) -> tuple[Monomial, set[Monomial]] | None:
    """The unknown whose elimination makes the fewest new constraints, and all that have bounds on one side only."""
    lower: dict[Monomial, int] = {}
    upper: dict[Monomial, int] = {}
    for constraint in constraints.values():
        for monomial, coefficient in constraint.items():
            if coefficient > 0:
                lower[monomial] = lower.get(monomial, 0) + 1
            else:
                upper[monomial] = upper.get(monomial, 0) + 1
    idle = lower.keys() ^ upper.keys()
    idle.discard(())
    if idle:
        return (), idle
    made = {m: count * upper[m] - count - upper[m] for m, count in lower.items() if m}
    if not made:
        return None
    fewest = min(made.values())
    tied = [m for m, count in made.items() if count == fewest]
    return (tied[0] if len(tied) == 1 else min(tied, key=lambda m: [a.order for a in m])), idle


def _eliminated(constraints: Constraints, variable: Monomial) -> bool:
    """Replaces all that speak of a variable by what follows without it; True where that is false."""
    spoken = [(k, c) for k, c in constraints.items() if variable in c]
    for key, _ in spoken:
        del constraints[key]
    lower = [c for _, c in spoken if c[variable] > 0]
    upper = [c for _, c in spoken if c[variable] < 0]
    for low in lower:
        for high in upper:
            made = _combined(low, high, variable)
            if _false(made):
                return True
            # what only says that a number is not negative says nothing
            if made.keys() - {()}:
                constraints[frozenset(made.items())] = made
            if len(constraints) > _MOST:
                return False
    return False


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
