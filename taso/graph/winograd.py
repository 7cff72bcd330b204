"""Winograd's minimal filtering: the transforms of F(m, r) over the rationals, found from interpolation points.

F(m, r) gives m outputs of a filter of r taps by n = m + r − 1 products (Winograd 1980; Lavin and Gray 2016, section 4):

    y = Aᵀ [(G g) ⊙ (Bᵀ d)],        in two dimensions  Y = Aᵀ [(G g Gᵀ) ⊙ (Bᵀ d B)] A

The matrices come from Toom and Cook's product of polynomials, transposed: evaluate at n − 1 points and at infinity,
multiply there, interpolate. All is computed with fractions; no entry is written down anywhere. Which points are taken
decides how many digits are lost in floating point (Barabasz, Anderson, Soodhalter and Gregg 2020): see `points`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from itertools import count, islice

from taso.graph.errors import TasoError

Matrix = tuple[tuple[Fraction, ...], ...]


@dataclass(frozen=True)
class Transforms:
    """F(m, r): Aᵀ (m × n) of the outputs, G (n × r) of the filter, Bᵀ (n × n) of the data, n = m + r − 1."""

    output: Matrix
    filter: Matrix
    data: Matrix

    @property
    def outputs(self) -> int:
        return len(self.output)

    @property
    def taps(self) -> int:
        return len(self.filter[0])

    @property
    def products(self) -> int:
        return len(self.data)


# Magnitudes of points that come with both signs, beside 0. Pairs make many entries of Bᵀ zero, and these are the ones
# by which float32 loses least among fractions of 8 or 16, as trials told: a part of what 1, 2, 1/2, 3, … lose
_MAGNITUDES = {
    3: ("1",),
    5: ("5/8", "3/2"),
    7: ("1/2", "1", "2"),
    9: ("7/16", "3/4", "5/4", "9/4"),
    11: ("3/8", "3/4", "1", "3/2", "5/2"),
}


@lru_cache(maxsize=64)
def points(number: int) -> tuple[Fraction, ...]:
    """So many points to interpolate from, beside infinity: 0 first, then pairs ±p."""
    found = _MAGNITUDES.get(number)
    if found is None:
        return tuple(islice(_small_points(), number))
    return (Fraction(0), *(sign * Fraction(p) for p in found for sign in (1, -1)))


def _small_points() -> Iterator[Fraction]:
    """0, ±1, then ±k and ±1/k: small numbers first, since large powers of them are what costs digits."""
    yield Fraction(0)
    yield from (Fraction(1), Fraction(-1))
    for k in count(2):
        yield from (Fraction(k), Fraction(-k), Fraction(1, k), Fraction(-1, k))


@lru_cache(maxsize=64)
def transforms(outputs: int, taps: int) -> Transforms:
    """F(outputs, taps) from `points`; raises `TasoError` for sizes below 1, or both 1."""
    if outputs < 1 or taps < 1 or outputs + taps < 3:
        raise TasoError(f"F({outputs}, {taps}) is no filter: both sizes must be at least 1, and one of them more")
    return from_points(outputs, taps, points(outputs + taps - 2))


def from_points(outputs: int, taps: int, points: Sequence[Fraction]) -> Transforms:
    """F(outputs, taps) from outputs + taps − 2 different points, and infinity.

    A polynomial s of degree n − 1 is Σ s(pᵢ)·Lᵢ(x) / Nᵢ + s∞·L∞(x), where s∞ is its leading coefficient,
    Lᵢ = Π_{j≠i} (x − pⱼ), Nᵢ = Lᵢ(pᵢ) and L∞ = Π (x − pⱼ). Read as a map of coefficients and transposed this is a
    correlation: Bᵀ has the coefficients of the L, Aᵀ and G the powers of the points, G divided by N.
    """
    if len(points) != outputs + taps - 2 or len(set(points)) != len(points):
        raise TasoError(f"F({outputs}, {taps}) takes {outputs + taps - 2} different points, not {len(points)}")
    others = [tuple(q for q in points if q != p) for p in points]
    scales = [_value(_with_roots(rest), p) for p, rest in zip(points, others, strict=True)]
    n = outputs + taps - 1
    data = tuple(_padded(_with_roots(rest), n) for rest in (*others, tuple(points)))
    filters = [tuple(p**k / scale for k in range(taps)) for p, scale in zip(points, scales, strict=True)]
    powers = [tuple(p**k for k in range(outputs)) for p in points]
    leading = [tuple(Fraction(k == size - 1) for k in range(size)) for size in (outputs, taps)]
    return Transforms(tuple(zip(*powers, leading[0], strict=True)), (*filters, leading[1]), data)


def _with_roots(roots: Sequence[Fraction]) -> tuple[Fraction, ...]:
    """Coefficients of Π (x − root), that of x⁰ first."""
    found = [Fraction(1)]
    for root in roots:
        found = [a - root * b for a, b in zip([Fraction(0), *found], [*found, Fraction(0)], strict=True)]
    return tuple(found)


def _value(coefficients: Sequence[Fraction], x: Fraction) -> Fraction:
    return sum((c * x**k for k, c in enumerate(coefficients)), Fraction(0))


def _padded(coefficients: tuple[Fraction, ...], size: int) -> tuple[Fraction, ...]:
    return coefficients + (Fraction(0),) * (size - len(coefficients))


__all__ = ["Matrix", "Transforms", "from_points", "points", "transforms"]
