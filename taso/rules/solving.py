"""Equations between symbolic dimensions: which symbol they fix."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeGuard

from taso.graph.ops.movement import divide_exactly
from taso.graph.types import Dim, FloorDiv, Larger, Monomial, SymDim, symbols_of


def is_dim(value: object) -> TypeGuard[Dim]:
    """Whether a value is a dimension: an integer or a symbolic one."""
    return isinstance(value, SymDim) or (isinstance(value, int) and not isinstance(value, bool))


def larger_in(dim: Dim) -> Iterator[Larger]:
    """The sizes that broadcasting made of two of which it is not known how they meet."""
    if isinstance(dim, SymDim):
        for atom in (a for monomial, _ in dim.terms for a in monomial):
            if isinstance(atom, Larger):
                yield atom
            elif isinstance(atom, FloorDiv):
                yield from larger_in(atom.dividend)


def solve(left: Dim, right: Dim, preference: Callable[[str], int]) -> tuple[str, Dim] | None:
    """(symbol, its value) such that left = right holds, or None where no symbol can be expressed by the others.

    Of several the one that `preference` rates highest is taken; a negative rating excludes a symbol. Values without
    negative terms go first, because sizes are positive.
    """
    difference = left - right
    if isinstance(difference, int):
        return None
    found: list[tuple[bool, int, str, Dim]] = []
    for monomial, coefficient in difference.terms:
        if len(monomial) != 1 or not isinstance(monomial[0], str):
            continue
        symbol = monomial[0]
        value = _expressed(difference, symbol, coefficient)
        if value is not None and preference(symbol) >= 0:
            found.append((_positive(value), preference(symbol), symbol, value))
    if not found:
        return None
    _, _, symbol, value = max(found, key=lambda f: f[:3])
    return symbol, value


def _expressed(difference: SymDim, symbol: str, coefficient: int) -> Dim | None:
    """The value of `symbol` where `difference` is 0, if it is a whole polynomial without the symbol."""
    rest: Dim = difference - SymDim((((symbol,), coefficient),))
    if symbol in symbols_of(rest):
        return None
    return divide_exactly(-rest, coefficient)


def _positive(dim: Dim) -> bool:
    terms: tuple[tuple[Monomial, int], ...] = dim.terms if isinstance(dim, SymDim) else (((), dim),)
    return all(c > 0 for _, c in terms)


def quotient(total: Dim, divisor: Dim) -> Dim | None:
    """total / divisor where that is whole for every value of the symbols, else None."""
    return 1 if total == divisor else divide_exactly(total, divisor)
