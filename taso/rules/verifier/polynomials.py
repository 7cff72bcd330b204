"""Polynomials over unknown integers: sizes, settings, indices, and what is made of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from fractions import Fraction
from typing import Union

Rational = Union[int, Fraction]


class Atom:
    """An unknown. `kind` says what it is: "size", "free" and "bound" (indices), or made of others (`args`).

    Of the latter there are "quotient" (⌊a / b⌋), "joined" (what broadcasting sizes a and b gives) and "step" (0 where a
    size is 1, else 1). Equal ones are the same object.
    """

    __slots__ = ("args", "kind", "name", "order", "within")

    def __init__(self, kind: str, name: str, args: tuple[Poly, ...], number: int) -> None:
        self.kind = kind
        self.name = name
        self.args = args
        # of what is made of others by what it is made of: when it was first made can differ from run to run
        self.order = (1, 0, f"{kind} {', '.join(map(str, args))}") if args else (0, number, "")
        inner = (a.within for arg in args for a in arg.atoms)
        self.within: frozenset[Atom] = frozenset({self}).union(*inner)

    @property
    def is_index(self) -> bool:
        return self.kind in ("free", "bound")

    def __repr__(self) -> str:
        return self.name


Monomial = tuple[Atom, ...]


class Poly:
    """A polynomial with rational coefficients, in normal form: equal ones are equal objects to Python."""

    # no functools.cached_property: before Python 3.12 each first look takes a lock, and millions are taken here
    __slots__ = ("_atoms", "_hash", "_within", "terms")

    def __init__(self, terms: Mapping[Monomial, Rational]) -> None:
        self.terms = terms
        self._hash: int | None = None
        self._atoms: frozenset[Atom] | None = None
        self._within: frozenset[Atom] | None = None

    @staticmethod
    def number(value: Rational) -> Poly:
        return Poly({(): value} if value else {})

    @staticmethod
    def atom(atom: Atom) -> Poly:
        return Poly({(atom,): 1})

    def __hash__(self) -> int:
        found = self._hash
        if found is None:
            found = self._hash = hash(frozenset(self.terms.items()))
        return found

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        return isinstance(other, Poly) and hash(self) == hash(other) and self.terms == other.terms

    def __add__(self, other: Poly | Rational) -> Poly:
        other = _poly(other)
        if not other.terms:
            return self
        total = dict(self.terms)
        for monomial, coefficient in other.terms.items():
            new = total.get(monomial, 0) + coefficient
            if new:
                total[monomial] = new
            else:
                del total[monomial]
        return Poly(total)

    def __neg__(self) -> Poly:
        return Poly({m: -c for m, c in self.terms.items()})

    def __sub__(self, other: Poly | Rational) -> Poly:
        other = _poly(other)
        if not other.terms:
            return self
        total = dict(self.terms)
        for monomial, coefficient in other.terms.items():
            new = total.get(monomial, 0) - coefficient
            if new:
                total[monomial] = new
            else:
                del total[monomial]
        return Poly(total)

    def __mul__(self, other: Poly | Rational) -> Poly:
        if not isinstance(other, Poly):
            return Poly({m: c * other for m, c in self.terms.items()}) if other else ZERO
        total: dict[Monomial, Rational] = {}
        for m, c in self.terms.items():
            for n, d in other.terms.items():
                key = times(m, n)
                new = total.get(key, 0) + c * d
                if new:
                    total[key] = new
                else:
                    total.pop(key, None)
        return Poly(total)

    @property
    def constant(self) -> Rational | None:
        """The number that this is, or None."""
        if not self.terms:
            return 0
        return self.terms.get(()) if len(self.terms) == 1 else None

    @property
    def offset(self) -> Rational:
        """The term without atoms."""
        return self.terms.get((), 0)

    @property
    def atoms(self) -> frozenset[Atom]:
        """The atoms it is written in, without those that these are made of."""
        found = self._atoms
        if found is None:
            found = self._atoms = frozenset([a for m in self.terms for a in m])
        return found

    @property
    def within(self) -> frozenset[Atom]:
        """All atoms it depends on."""
        found = self._within
        if found is None:
            found = self._within = frozenset[Atom]().union(*[a.within for a in self.atoms])
        return found

    @property
    def lone_atom(self) -> Atom | None:
        """The atom that this is, or None."""
        if len(self.terms) != 1:
            return None
        ((monomial, coefficient),) = self.terms.items()
        return monomial[0] if len(monomial) == 1 and coefficient == 1 else None

    def split(self, atom: Atom) -> tuple[Poly, Poly] | None:
        """(c, rest) with self = c · atom + rest, neither with the atom in it; None where that is not its form."""
        factor: dict[Monomial, Rational] = {}
        rest: dict[Monomial, Rational] = {}
        for monomial, coefficient in self.terms.items():
            count = monomial.count(atom)
            if count > 1 or any(atom in a.within for a in monomial if a is not atom):
                return None
            if count:
                position = monomial.index(atom)
                factor[monomial[:position] + monomial[position + 1 :]] = coefficient
            else:
                rest[monomial] = coefficient
        return Poly(factor), Poly(rest)

    def replace(self, values: Mapping[Atom, Poly]) -> Poly:
        """With atoms replaced; not within the atoms that others are made of."""
        if values.keys().isdisjoint(self.atoms):
            return self
        total = ZERO
        for monomial, coefficient in self.terms.items():
            term = Poly({tuple(a for a in monomial if a not in values): coefficient})
            for atom in monomial:
                if atom in values:
                    term = term * values[atom]
            total = total + term
        return total

    def __str__(self) -> str:
        return show(self, {})

    __repr__ = __str__


def _poly(value: Poly | Rational) -> Poly:
    return value if isinstance(value, Poly) else Poly.number(value)


def times(m: Monomial, n: Monomial) -> Monomial:
    """The product of two monomials."""
    if not m or not n:
        return m or n
    return tuple(sorted(m + n, key=lambda a: a.order))


def without(m: Monomial, n: Monomial) -> Monomial | None:
    """m / n, or None where n does not divide m."""
    rest = list(m)
    for atom in n:
        if atom not in rest:
            return None
        rest.remove(atom)
    return tuple(rest)


ZERO, ONE = Poly({}), Poly.number(1)


def show(poly: Poly, names: Mapping[Atom, str]) -> str:
    """A text that is the same for the same polynomial, with the names that `names` gives."""
    return " + ".join(sorted(_term(m, c, names) for m, c in poly.terms.items())) or "0"


def _term(monomial: Monomial, coefficient: Rational, names: Mapping[Atom, str]) -> str:
    factors = sorted(_name(a, names) for a in monomial)
    if coefficient != 1 or not factors:
        factors.insert(0, str(coefficient))
    return "*".join(factors)


def _name(atom: Atom, names: Mapping[Atom, str]) -> str:
    if atom in names:
        return names[atom]
    if not atom.args:
        return atom.name
    return f"{atom.kind}({', '.join(show(a, names) for a in atom.args)})"


def indices(polys: Iterable[Poly]) -> Iterator[Atom]:
    """The index atoms that polynomials depend on."""
    for poly in polys:
        yield from (a for a in poly.within if a.is_index)
