"""Numbers that are polynomials over the elements of tensors, each in its one normal form: a domain to evaluate in.

An array holds handles: the same polynomial always has the same one, so that comparing handles compares polynomials.
Functions that are no polynomials are unknowns, one for each function and argument, of which little is used: a maximum
is that of the set of its arguments, 1 / (a · b) = 1/a · 1/b and a · 1/a = 1 for unknowns a, and some functions leave 0
or their own values as they are.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from functools import partial
from typing import Union

import numpy as np

from taso.graph.index import Array
from taso.graph.unknown import UnknownFraction

Rational = Union[int, Fraction]
Polynomial = dict[int, Rational]
"""Coefficients by monomial; a monomial is the product of the primes of its unknowns."""

ZERO, ONE, LEAST = 0, 1, 2
"""Handles of 0, of 1, and of what is below every number."""

_KEEPS_ZERO = frozenset({"abs", "floor", "ceil", "round", "sign", "tanh", "sqrt", "erf", "sin"})
_IDEMPOTENT = frozenset({"abs", "floor", "ceil", "round", "sign"})
_MOST_DIGITS = 400  # of a polynomial that is shown


class NotPolynomial(Exception):
    """What this domain cannot say; carries what."""


def primes() -> Iterator[int]:
    """2, 3, 5, …"""
    found: list[int] = []
    for candidate in itertools.count(2):
        if all(candidate % p for p in found if p * p <= candidate):
            found.append(candidate)
            yield candidate


class Forms:
    """The domain. `spend` is told how many products are made, and may raise to give up."""

    def __init__(self, spend: Callable[[int], None]) -> None:
        self._spend = spend
        self._polys: list[Polynomial] = [{}, {1: 1}, {}]
        self._handles: dict[frozenset[tuple[int, Rational]], int] = {frozenset(): ZERO, frozenset({(1, 1)}): ONE}
        self._primes = primes()
        self._unknowns: dict[object, int] = {}
        self._names: dict[int, Callable[[], str]] = {}
        self._inverse: dict[int, int] = {}
        self._maxima: dict[int, frozenset[int]] = {}
        self._made_by: dict[int, str] = {}
        self._products: dict[tuple[int, int], int] = {}

    # ── unknowns ─────────────────────────────────────────────────────────────────────────────────────────────────

    def tensor(self, name: str, shape: tuple[int, ...]) -> Array:
        """An array of unknowns."""
        handles = [self._unknown((name, i), partial(_element_name, name, i)) for i in np.ndindex(*shape)]
        return np.asarray(handles, np.int64).reshape(shape)

    def _unknown(self, key: object, name: Callable[[], str]) -> int:
        if key not in self._unknowns:
            prime = next(self._primes)
            self._names[prime] = name
            self._unknowns[key] = self._handle({prime: 1})
        return self._unknowns[key]

    def _handle(self, poly: Polynomial) -> int:
        key = frozenset(poly.items())
        found = self._handles.get(key)
        if found is None:
            found = self._handles[key] = len(self._polys)
            self._polys.append(poly)
        return found

    def _poly(self, handle: int) -> Polynomial:
        if handle == LEAST:
            raise NotPolynomial("what is below every number, in a sum or product")
        return self._polys[handle]

    def _factors(self, monomial: int) -> list[int]:
        """The primes of its unknowns, each as often as it divides it."""
        found: list[int] = []
        for prime in self._names:
            if monomial == 1:
                break
            while monomial % prime == 0:
                monomial //= prime
                found.append(prime)
        return found

    def show(self, handle: int) -> str:
        """A polynomial as text, cut off where it is long."""
        if handle == LEAST:
            return "less than any number"
        parts = []
        for monomial, c in sorted(self._polys[handle].items()):
            names = [self._names[prime]() for prime in self._factors(monomial)]
            parts.append("·".join(([] if c == 1 and names else [str(c)]) + names))
        text = " + ".join(parts) or "0"
        return text if len(text) <= _MOST_DIGITS else text[:_MOST_DIGITS] + "…"

    # ── the domain ───────────────────────────────────────────────────────────────────────────────────────────────

    def constant(self, value: Fraction) -> Array:
        if isinstance(value, UnknownFraction):
            return np.asarray(self._unknown(("setting", value.name), partial(str, value.name)), np.int64)
        return np.asarray(self._number(value), np.int64)

    def _number(self, value: Fraction) -> int:
        plain: Rational = value.numerator if value.denominator == 1 else value
        return self._handle({1: plain} if plain else {})

    def least(self) -> int:
        return LEAST

    def call(self, function: str, args: Sequence[Array]) -> Array:
        spread = np.broadcast_arrays(*args)
        known: dict[tuple[int, ...], int] = {}
        out = np.empty(spread[0].size, np.int64)
        for place, given in enumerate(zip(*(a.ravel().tolist() for a in spread), strict=True)):
            if given not in known:
                known[given] = self._called(function, given)
            out[place] = known[given]
        return out.reshape(spread[0].shape)

    def reduce(self, kind: str, array: Array, axes: tuple[int, ...]) -> Array:
        kept = [a for a in range(array.ndim) if a not in axes]
        moved = np.transpose(array, [*kept, *axes])
        shape = moved.shape[: len(kept)]
        count = int(np.prod(moved.shape[len(kept) :], dtype=np.int64))
        rows = np.ascontiguousarray(moved).reshape(-1, count).tolist() if array.size else [[]] * int(np.prod(shape))
        combine = {"sum": self._sum, "max": self._largest, "min": self._smallest, "prod": self._product}[kind]
        return np.asarray([combine(row) for row in rows], np.int64).reshape(shape)

    def matmul(self, left: Array, right: Array) -> Array:
        out = np.empty((left.shape[0], left.shape[1], right.shape[2]), np.int64)
        for batch in range(left.shape[0]):
            rows, columns = left[batch].tolist(), right[batch].T.tolist()
            for i, row in enumerate(rows):
                for j, column in enumerate(columns):
                    out[batch, i, j] = self._dot(row, column)
        return out

    # ── one number ───────────────────────────────────────────────────────────────────────────────────────────────

    def _dot(self, row: Sequence[int], column: Sequence[int]) -> int:
        return self._sum([self._times(a, b) for a, b in zip(row, column, strict=True) if a and b])

    def _sum(self, handles: Sequence[int]) -> int:
        total: Polynomial = {}
        for handle in handles:
            for monomial, c in self._poly(handle).items():
                new = total.get(monomial, 0) + c
                if new:
                    total[monomial] = new
                else:
                    del total[monomial]
        self._spend(len(handles))
        return self._handle(total)

    def _product(self, handles: Sequence[int]) -> int:
        total = ONE
        for handle in handles:
            total = self._times(total, handle)
        return total

    def _times(self, a: int, b: int) -> int:
        key = (a, b) if a < b else (b, a)
        found = self._products.get(key)
        if found is None:
            found = self._products[key] = self._multiplied(self._poly(a), self._poly(b))
        return found

    def _multiplied(self, a: Polynomial, b: Polynomial) -> int:
        self._spend(len(a) * len(b))
        total: Polynomial = {}
        for m, c in a.items():
            for n, d in b.items():
                monomial = self._cancelled(m * n)
                new = total.get(monomial, 0) + c * d
                if new:
                    total[monomial] = new
                else:
                    total.pop(monomial, None)
        return self._handle(total)

    def _cancelled(self, monomial: int) -> int:
        for prime, inverse in self._inverse.items():
            while monomial % (prime * inverse) == 0:
                monomial //= prime * inverse
        return monomial

    def _scaled(self, handle: int, factor: Rational) -> int:
        return self._handle({m: c * factor for m, c in self._poly(handle).items()})

    def _called(self, function: str, args: tuple[int, ...]) -> int:
        simple = {
            "add": lambda: self._sum(args), "mul": lambda: self._times(*args), "neg": lambda: self._scaled(args[0], -1),
            "sub": lambda: self._sum((args[0], self._scaled(args[1], -1))),
            "div": lambda: self._times(args[0], self._reciprocal(args[1])),
            "reciprocal": lambda: self._reciprocal(args[0]), "max": lambda: self._largest(args),
            "min": lambda: self._smallest(args), "relu": lambda: self._largest((args[0], ZERO)),
        }  # fmt: skip
        return simple[function]() if function in simple else self._applied(function, args)

    def _applied(self, function: str, args: tuple[int, ...]) -> int:
        for arg in args:
            self._poly(arg)
        power = self._poly(args[1]).get(1) if function == "pow" and len(self._poly(args[1])) == 1 else None
        if power in (1, 2, 3):
            return self._product([args[0]] * int(power or 0))
        if function in _KEEPS_ZERO and args == (ZERO,):
            return ZERO
        if function in _IDEMPOTENT and self._made_by.get(args[0]) == function:
            return args[0]
        made = self._unknown((function, args), lambda: f"{function}({', '.join(map(self.show, args))})")
        self._made_by[made] = function
        return made

    def _reciprocal(self, handle: int) -> int:
        poly = self._poly(handle)
        if not poly:
            raise NotPolynomial("a division by what is 0")
        if len(poly) > 1:
            # of all multiples of a sum one is an unknown: the one whose first coefficient is 1
            first = Fraction(poly[min(poly)])
            plain = self._handle({m: _plain(c / first) for m, c in poly.items()})
            made = self._unknown(("reciprocal", plain), lambda: f"1/({self.show(plain)})")
            return self._scaled(made, _plain(1 / first))
        ((monomial, c),) = poly.items()
        made = self._number(1 / Fraction(c))
        for prime in self._factors(monomial):
            made = self._times(made, self._inverse_of(prime))
        return made

    def _inverse_of(self, prime: int) -> int:
        for other, inverse in self._inverse.items():
            if prime == inverse:
                return self._handle({other: 1})
        handle = self._unknown(("inverse", prime), lambda: f"1/{self._names[prime]()}")
        ((monomial, _),) = self._polys[handle].items()
        self._inverse[prime] = monomial
        return handle

    def _largest(self, handles: Sequence[int]) -> int:
        candidates = {c for h in handles for c in self._maxima.get(h, (h,))} - {LEAST}
        numbers = {c: self._polys[c].get(1, 0) for c in candidates if self._polys[c].keys() <= {1}}
        if len(numbers) > 1:
            top = max(numbers, key=lambda c: numbers[c])
            candidates -= numbers.keys() - {top}
        if len(candidates) <= 1:
            return candidates.pop() if candidates else LEAST
        kept = sorted(candidates)
        made = self._unknown(("max", frozenset(kept)), lambda: f"max({', '.join(map(self.show, kept))})")
        self._maxima[made] = frozenset(candidates)
        return made

    def _smallest(self, handles: Sequence[int]) -> int:
        found = self._largest([self._scaled(h, -1) for h in handles])
        return self._scaled(found, -1)


def _element_name(tensor: str, index: tuple[int, ...]) -> str:
    return f"{tensor}[{', '.join(map(str, index))}]"


def _plain(value: Rational) -> Rational:
    return int(value) if Fraction(value).denominator == 1 else value
