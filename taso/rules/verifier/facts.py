"""What is assumed of unknown integers, and what follows from it.

Equations are solved and substituted; inequalities are combined. Nothing here guesses: where something does not follow,
or does not follow by the means at hand, the answer is that it is not known.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from taso.rules.verifier.inequalities import impossible
from taso.rules.verifier.polynomials import ONE, ZERO, Atom, Monomial, Poly, show, times, without

_ROUNDS = 3  # steps from what a question speaks of to what may bear on it
_FACTS = 90  # inequalities that are combined at most
_COMBINING = 10  # steps that combining inequalities counts as
_DEPTH = 12  # alternatives tried one within the other
_VACUOUS = "vacuous"


@dataclass(frozen=True)
class Statement:
    """poly = 0, or poly ≥ 0."""

    poly: Poly
    equation: bool


Clause = tuple[tuple[Statement, ...], ...]
"""Alternatives of which one holds; each is several statements that hold together."""


class OutOfTime(Exception):
    """The time allowed is over."""


class TooMuch(Exception):
    """More steps than allowed; unlike time these are the same on every run."""


@dataclass
class Effort:
    """How much may be spent on a proof: until when, and how many steps (None: any number).

    `memory` holds answers about sizes alone, by the question with its atoms numbered: they serve each axis of a tensor.
    """

    deadline: float
    most: int | None = None
    steps: int = 0
    memory: dict[object, object] = field(default_factory=dict)

    def spend(self, steps: int = 1) -> None:
        """Counts steps; raises `TooMuch` or `OutOfTime`."""
        before, self.steps = self.steps, self.steps + steps
        if self.most is not None and self.steps > self.most:
            raise TooMuch
        if before // 64 != self.steps // 64 and time.monotonic() > self.deadline:
            raise OutOfTime


def is_zero(poly: Poly) -> Statement:
    return Statement(poly, True)


class Knowledge:
    """Atoms and what is known of them."""

    def __init__(self, effort: Effort) -> None:
        self._effort = effort
        self._table: dict[tuple[str, str, tuple[Poly, ...]], Atom] = {}
        self._count = self._made_up = 0
        self._solved: dict[Atom, Poly] = {}
        self._least: dict[Atom, int] = {}
        # bounds on atoms that are made of others, which may come to be something else
        self._bounds: dict[Atom, int] = {}
        self.extents: dict[Atom, Poly] = {}
        self._inequalities: list[Poly] = []
        self._nonzero: list[Poly] = []
        self._rewrites: list[tuple[Monomial, Poly]] = []
        self._clauses: list[Clause] = []
        # (a, b, q) with a = b · q: an equation may have been turned round so that a / b no longer shows it
        self._divisions: list[tuple[Poly, Poly, Poly]] = []
        self.contradictory = False
        self._forget()

    def copy(self) -> Knowledge:
        """The same knowledge, to try an assumption on."""
        other = Knowledge.__new__(Knowledge)
        # its own new atoms must not change the order of those that are made later
        other._table, other._effort = dict(self._table), self._effort
        other._count, other._made_up = self._count, self._made_up
        other._solved, other._least = dict(self._solved), dict(self._least)
        other._bounds = dict(self._bounds)
        other.extents = dict(self.extents)
        other._inequalities, other._nonzero = list(self._inequalities), list(self._nonzero)
        other._divisions = list(self._divisions)
        other._rewrites, other._clauses = list(self._rewrites), list(self._clauses)
        other.contradictory = self.contradictory
        other._forget()
        return other

    def _forget(self) -> None:
        self._now: dict[Poly, Poly] = {}
        self._values: dict[Atom, Poly] = {}
        self._learnt()

    def _learnt(self) -> None:
        """Forgets the answers to questions, which may now be others."""
        self._answers: dict[Poly, bool] = {}
        self._zeros: dict[Poly, bool | None] = {}

    # ── atoms ────────────────────────────────────────────────────────────────────────────────────────────────────

    def atom(self, kind: str, name: str, least: int | None = None, args: tuple[Poly, ...] = ()) -> Atom:
        """The atom of that name (or of these parts); `least` is a number that it does not fall below."""
        key = (kind, name, args)
        made = self._table.get(key)
        if made is None:
            made = self._table[key] = Atom(kind, name, args, self._count)
            self._count += not args
        if least is not None and least > self._least.get(made, least - 1):
            self._least[made] = least
            self._learnt()
        return made

    def fresh(self, kind: str, least: int | None = None) -> Atom:
        # no variable of a rule can have this name
        self._made_up += 1
        return self.atom(kind, f"{kind[0]}~{self._made_up}", least)

    def index(self, kind: str, extent: Poly) -> Atom:
        """A new index that runs from 0 to extent − 1, where the extent is at least 1."""
        made = self.fresh(kind, 0)
        self.extents[made] = extent
        return made

    def joined(self, a: Poly, b: Poly) -> Poly:
        """What broadcasting two sizes gives, of which it is known that they can meet."""
        first, second = sorted((self.now(a), self.now(b)), key=str)
        made = Poly.atom(self.atom("joined", "", 1, (first, second)))
        clause = (
            (is_zero(first - second), is_zero(made - first)),
            (is_zero(second - ONE), is_zero(made - first)),
            (is_zero(first - ONE), is_zero(made - second)),
        )
        self._add_clause(clause)
        return made

    def step(self, size: Poly) -> Poly:
        """0 where a size is 1, else 1."""
        size = self.now(size)
        if size == ONE or self._answered(size - 2):
            return ZERO if size == ONE else ONE
        made = Poly.atom(self.atom("step", "", 0, (size,)))
        self._add_clause(((is_zero(size - ONE), is_zero(made)), (Statement(size - 2, False), is_zero(made - ONE))))
        return made

    def _add_clause(self, clause: Clause) -> None:
        if clause not in self._clauses:
            self._clauses.append(clause)
            self._learnt()

    # ── normal form ──────────────────────────────────────────────────────────────────────────────────────────────

    def now(self, poly: Poly) -> Poly:
        """`poly` with everything replaced that an equation says more about."""
        found = self._now.get(poly)
        if found is None:
            found = self._now[poly] = self._tidied(self._replaced(poly))
        return found

    def _replaced(self, poly: Poly) -> Poly:
        self._effort.spend()
        values = {a: v for a in poly.atoms if (v := self._value(a)).lone_atom is not a}
        return poly.replace(values)

    def _value(self, atom: Atom) -> Poly:
        found = self._values.get(atom)
        if found is None:
            found = self._values[atom] = self._fresh_value(atom)
        return found

    def _fresh_value(self, atom: Atom) -> Poly:
        if atom in self._solved:
            return self.now(self._solved[atom])
        if not atom.args:
            return Poly.atom(atom)
        args = tuple(map(self.now, atom.args))
        if args == atom.args:
            return Poly.atom(atom)
        if atom.kind == "quotient":
            # by bounds alone: a longer argument would ask for the value that is being found here
            return self._quotient(args[0], args[1], self._answered)
        return self.step(*args) if atom.kind == "step" else self._rejoined(*args)

    def _rejoined(self, a: Poly, b: Poly) -> Poly:
        if a == b or b == ONE:
            return a
        return b if a == ONE else self.joined(a, b)

    def _tidied(self, poly: Poly) -> Poly:
        for monomial, value in self._rewrites:
            for m in list(poly.terms):
                rest = without(m, monomial)
                if rest is not None:
                    poly = self.now(poly + (value * Poly({rest: 1}) - Poly({m: 1})) * poly.terms[m])
                    return poly
        if any(a.kind == "step" for a in poly.atoms):
            made = ZERO
            for m, c in poly.terms.items():
                made = made + Poly({self._stepped(m): c})
            return made
        return poly

    def _stepped(self, monomial: Monomial) -> Monomial:
        """A monomial without the steps that make no difference in it."""
        steps = [a for a in dict.fromkeys(monomial) if a.kind == "step"]
        if not steps:
            return monomial
        others = [a for a in monomial if a.kind != "step"]
        extents = [self.now(self.extents[a]) for a in others if a in self.extents]
        kept = [s for s in steps if s.args[0] not in extents]
        for s in list(kept):
            if any(t is not s and self._narrower(t.args[0], s.args[0]) for t in kept):
                kept.remove(s)
        return times(tuple(sorted(others, key=lambda a: a.order)), tuple(kept))

    def _narrower(self, small: Poly, large: Poly) -> bool:
        """Whether `small` is 1 wherever `large` is."""
        trial = self.copy()
        trial.assume_zero(large - ONE)
        return trial.contradictory or trial.zero(small - ONE) is True

    def substituted(self, poly: Poly, atom: Atom, value: Poly) -> Poly:
        """`poly` with an atom replaced, also within those that are made of it."""
        if atom not in poly.within:
            return poly
        values = {atom: value}
        for other in poly.atoms:
            if other is not atom and atom in other.within:
                args = [self.substituted(a, atom, value) for a in other.args]
                values[other] = self._made(other.kind, args)
        return poly.replace(values)

    def _made(self, kind: str, args: Sequence[Poly]) -> Poly:
        if kind == "quotient":
            return self.quotient(args[0], args[1])
        return self.step(args[0]) if kind == "step" else self._rejoined(args[0], args[1])

    def quotient(self, a: Poly, b: Poly) -> Poly:
        """⌊a / b⌋ for b ≥ 1."""
        return self._quotient(self.now(a), self.now(b), self.nonneg)

    def _quotient(self, a: Poly, b: Poly, nonneg: Callable[[Poly], bool]) -> Poly:
        if b.constant is not None and b.constant < 1:
            self.contradictory = True
            return ZERO
        for dividend, divisor, known in self._divisions:
            if self.now(divisor) == b and self.now(dividend) == a:
                return self.now(known)
        whole, rest = _divided(a, b)
        if not rest.terms:
            return whole
        if nonneg(rest) and nonneg(b - ONE - rest):
            return whole
        if nonneg(-rest - ONE) and nonneg(b + rest):
            return whole - ONE
        content, core = _content(b)
        if content > 1 and core.constant is None:
            return whole + self._quotient(self._quotient(rest, core, nonneg), Poly.number(content), nonneg)
        least = 1 if nonneg(rest - b) else 0 if nonneg(rest) else None
        return whole + Poly.atom(self.atom("quotient", "", least, (rest, b)))

    def take_apart(self, atom: Atom, divisor: Poly) -> None:
        """Writes a free index as q · divisor + r with new indices q and r < divisor; divisor ≥ 1 is known."""
        extent = self.now(self.extents[atom])
        whole = self.index("free", self.quotient(extent - ONE, divisor) + ONE)
        rest = self.index("free", divisor)
        self._learn(atom, Poly.atom(whole) * divisor + Poly.atom(rest))

    # ── assumptions ──────────────────────────────────────────────────────────────────────────────────────────────

    def assume(self, statements: Iterable[Statement]) -> None:
        for s in statements:
            if s.equation:
                self.assume_zero(s.poly)
            else:
                self.assume_nonneg(s.poly)

    def assume_one_of(self, clause: Clause) -> None:
        self._add_clause(clause)

    def assume_zero(self, poly: Poly) -> None:
        poly = self._without_common(self.now(poly))
        number = poly.constant
        if number is not None:
            self.contradictory |= number != 0
        elif self._answered(poly - ONE) or self._answered(-poly - ONE):
            self.contradictory = True
        elif not (self._assume_whole(poly) or self._assume_ones(poly) or self._solve(poly)):
            self._rewrite(poly)

    def _assume_whole(self, poly: Poly) -> bool:
        """a − b·⌊a / b⌋ = 0: b divides a."""
        for atom in sorted(poly.atoms, key=lambda a: a.order):
            if atom.kind == "quotient":
                a, b = atom.args
                if a - b * Poly.atom(atom) in (poly, -poly):
                    self.assume_division(a, b)
                    return True
        return False

    def assume_division(self, a: Poly, b: Poly) -> None:
        """b, which is at least 1, divides a."""
        a, b = self.now(a), self.now(b)
        least = 1 if self.nonneg(a - ONE) else 0 if self.nonneg(a) else None
        whole, quotient = Poly.atom(self.fresh("size", least)), self.quotient(a, b).lone_atom
        if quotient is not None and quotient not in self._solved:
            self._solved[quotient] = whole
            self._forget()
        self.assume_zero(a - b * whole)
        self._divisions.append((a, b, whole))

    def _without_common(self, poly: Poly) -> Poly:
        """Divided by what all terms share and is not 0."""
        if poly.terms and all(isinstance(c, int) for c in poly.terms.values()):
            poly = _content(poly)[1]
        while len(poly.terms) > 1 and () not in poly.terms:
            shared = next((a for a in sorted(poly.atoms, key=lambda a: a.order)
                           if self._least.get(a, 0) >= 1 and all(a in m for m in poly.terms)), None)  # fmt: skip
            if shared is None:
                return poly
            poly = Poly({m[: m.index(shared)] + m[m.index(shared) + 1 :]: c for m, c in poly.terms.items()})
        return poly

    def _assume_ones(self, poly: Poly) -> bool:
        """A product of positive numbers that is 1."""
        if len(poly.terms) != 2 or abs(poly.offset) != 1:
            return False
        ((monomial, coefficient),) = ((m, c) for m, c in poly.terms.items() if m)
        if coefficient != -poly.offset or len(monomial) < 2 or any(self._least.get(a, 0) < 1 for a in monomial):
            return False
        for atom in dict.fromkeys(monomial):
            self.assume_zero(Poly.atom(atom) - ONE)
        return True

    def _solve(self, poly: Poly) -> bool:
        found: list[tuple[bool, bool, tuple[int, int, str], Atom, Poly]] = []
        for monomial, coefficient in poly.terms.items():
            if len(monomial) == 1 and coefficient in (1, -1):
                atom = monomial[0]
                value = (poly - Poly({monomial: coefficient})) * -coefficient
                if atom not in value.within:
                    positive = all(c > 0 for c in value.terms.values())
                    found.append((positive, not atom.args, atom.order, atom, value))
        if not found:
            return False
        _, _, _, atom, value = max(found, key=lambda f: f[:3])
        self._learn(atom, value)
        return True

    def _learn(self, atom: Atom, value: Poly) -> None:
        facts = self._of_atom(atom)
        self._solved[atom] = value
        self._forget()
        self._renew()
        for fact in facts:
            self.assume_nonneg(fact)

    def _renew(self) -> None:
        """Looks at all facts again after something was learnt."""
        for atom, least in list(self._bounds.items()):
            if self._value(atom).lone_atom is not atom:
                del self._bounds[atom]
                self.assume_nonneg(Poly.atom(atom) - least)
        old, self._inequalities = self._inequalities, []
        for poly in old:
            self.assume_nonneg(poly)
        if any(self.now(p).constant == 0 for p in self._nonzero):
            self.contradictory = True
        equations, self._rewrites = self._rewrites, []
        for monomial, value in equations:
            self._forget()
            self.assume_zero(Poly({monomial: 1}) - value)

    def _rewrite(self, poly: Poly) -> None:
        """An equation that no atom can be had from: its largest product stands for the rest, where it has one."""
        found = [m for m, c in poly.terms.items() if len(m) > 1 and c in (1, -1)]
        if found:
            monomial = max(found, key=lambda m: (len(m), [a.order for a in m]))
            coefficient = poly.terms[monomial]
            value = (poly - Poly({monomial: coefficient})) * -int(coefficient)
            if not _mentions(value, monomial):
                self._rewrites.append((monomial, value))
                self._forget()
                return
        self._inequalities.extend((poly, -poly))
        self._learnt()

    def assume_nonneg(self, poly: Poly) -> None:
        poly = self.now(poly)
        number = poly.constant
        if number is not None:
            self.contradictory |= number < 0
            return
        while self._told(poly):
            poly = poly - ONE
        if self._answered(poly):
            return
        if self._raise_least(poly):
            return
        self._inequalities.append(poly)
        self._learnt()
        self._assume_quotients(poly)
        if len(poly.terms) <= 3 and self.nonneg(-poly):
            # what followed from it may have replaced it already
            self._inequalities = [p for p in self._inequalities if p != poly]
            self.assume_zero(poly)

    def _assume_quotients(self, poly: Poly) -> None:
        """From s·a + b ≥ 0 follows a ≥ 0 where b < s, and a ≥ 1 where b < 0."""
        for unit in sorted((a for a in poly.atoms if self._least.get(a, 0) >= 1), key=lambda a: a.order):
            parts = poly.split(unit)
            if parts is None or parts[0].constant is not None:
                continue
            a, b = parts
            if self.nonneg(-b - ONE):
                self.assume_nonneg(a - ONE)
            elif self.nonneg(Poly.atom(unit) - ONE - b):
                self.assume_nonneg(a)

    def _raise_least(self, poly: Poly) -> bool:
        """Notes a bound on a lone atom."""
        atom = (poly - Poly.number(poly.offset)).lone_atom
        if atom is None or atom.is_index:
            return False
        self._least[atom] = max(self._least.get(atom, -int(poly.offset)), -int(poly.offset))
        if atom.args:
            self._bounds[atom] = self._least[atom]
        self._learnt()
        if self.nonneg(Poly.number(self._least[atom]) - Poly.atom(atom)):
            self.assume_zero(Poly.atom(atom) - self._least[atom])
        return True

    def assume_nonzero(self, poly: Poly) -> None:
        poly = self.now(poly)
        if poly.constant is not None:
            self.contradictory |= poly.constant == 0
        elif self.nonneg(poly):
            self.assume_nonneg(poly - ONE)
        elif self.nonneg(-poly):
            self.assume_nonneg(-poly - ONE)
        else:
            self._nonzero.append(poly)

    # ── questions ────────────────────────────────────────────────────────────────────────────────────────────────

    def zero(self, poly: Poly) -> bool | None:
        """Whether poly = 0: always, never, or not known."""
        poly = self.now(poly)
        number = poly.constant
        if number is not None:
            return number == 0
        if poly not in self._zeros:
            self._zeros[poly] = self._fresh_zero(poly)
        return self._zeros[poly]

    def _fresh_zero(self, poly: Poly) -> bool | None:
        if self._told(poly):
            return False
        if self.nonneg(poly - ONE) or self.nonneg(-poly - ONE):
            return False
        if self.nonneg(poly) and self.nonneg(-poly):
            return True
        return self._by_cases(poly, lambda k: k.zero(poly))

    def nonneg(self, poly: Poly) -> bool:
        """Whether poly ≥ 0 follows."""
        poly = self.now(poly)
        if poly.constant is not None:
            return poly.constant >= 0
        found = self._answers.get(poly)
        if found is None:
            found = self._answers[poly] = self._answered(poly) or self._combined(poly)
        return found

    def one_of(self, clause: Clause) -> bool:
        """Whether one of the alternatives, of single statements each, follows."""
        trial = self.copy()
        for (statement,) in clause:
            if statement.equation:
                trial.assume_nonzero(statement.poly)
            else:
                trial.assume_nonneg(-statement.poly - ONE)
        if trial.contradictory:
            return True
        # asked as whether 1 = 0, which only holds where there is no case
        return trial._by_cases(ONE, lambda k: None, {a for (s,) in clause for a in trial.now(s.poly).within}) is True

    @property
    def impossible(self) -> bool:
        """Whether the assumptions are found to contradict one another."""
        if self.contradictory:
            return True
        every: set[Atom] = set()
        for poly in (*self._inequalities, *self._nonzero):
            every |= self.now(poly).within
        every |= {a for c in self._clauses for alternative in c for s in alternative for a in s.poly.within}
        if impossible(self._bearing_on(every, ())):
            return True
        trial = self.copy()
        trial._clauses = []
        return trial._in_cases(self._clauses, lambda k: None, _DEPTH) is _VACUOUS

    def _answered(self, poly: Poly) -> bool:
        """poly ≥ 0 by signs and bounds alone."""
        if self._positive(poly):
            return True
        for atom in sorted((a for a in poly.atoms if a in self.extents), key=lambda a: a.order, reverse=True):
            parts = poly.split(atom)
            if parts is None:
                return False
            factor, rest = parts
            if self._positive(factor):
                poly = rest
            elif self._positive(-factor):
                poly = self.now(rest + factor * (self.extents[atom] - ONE))
            else:
                return False
        return self._positive(poly)

    def _positive(self, poly: Poly) -> bool:
        """Whether all coefficients are ≥ 0 once each atom is counted from its least value."""
        if all(c >= 0 for c in poly.terms.values()) and all(self._least.get(a, -1) >= 0 for a in poly.atoms):
            return True
        if any(a not in self._least for a in poly.atoms):
            return False
        if all(len(m) <= 1 for m in poly.terms):
            # a negative multiple of what has no upper bound
            if any(m and c < 0 for m, c in poly.terms.items()):
                return False
            return sum(c * (self._least[m[0]] if m else 1) for m, c in poly.terms.items()) >= 0
        shifted = poly.replace({a: Poly.atom(a) + self._least[a] for a in poly.atoms if self._least[a]})
        return all(c >= 0 for c in shifted.terms.values())

    def _combined(self, poly: Poly) -> bool:
        """poly ≥ 0 because its contrary contradicts what is known."""
        if not all(isinstance(c, int) for c in poly.terms.values()) or self._bounds_alone(poly):
            return False
        self._effort.spend(_COMBINING)
        return impossible([*self._bearing_on(set(poly.atoms), poly.terms), -poly - ONE])

    def _bounds_alone(self, poly: Poly) -> bool:
        """Whether nothing but their bounds is known of what a linear polynomial speaks of, so that signs say all."""
        plain = all(len(m) <= 1 for m in poly.terms) and not any(a.args or a in self.extents for a in poly.atoms)
        return plain and not any(poly.atoms & self.now(p).within for p in self._inequalities)

    def _bearing_on(self, atoms: set[Atom], monomials: Iterable[Monomial]) -> list[Poly]:
        """Inequalities that speak of `atoms`, or of atoms that these speak of, and products of them."""
        facts: dict[Poly, None] = {}
        done: set[Atom] = set()
        known = [p for p in map(self.now, self._inequalities)]
        for _ in range(_ROUNDS):
            for atom in sorted(atoms - done, key=lambda a: a.order):
                facts.update(dict.fromkeys(map(self.now, self._of_atom(atom))))
            done |= atoms
            facts.update(dict.fromkeys(p for p in known if not p.atoms.isdisjoint(atoms)))
            atoms = atoms.union(*(p.atoms for p in facts))
            if atoms <= done or len(facts) > _FACTS:
                break
        wanted = [m for m in (*monomials, *(m for p in facts for m in p.terms)) if len(m) > 1]
        for monomial in dict.fromkeys(wanted):
            facts.update(dict.fromkeys(self._products(monomial, list(facts))))
        return list(facts)[: 2 * _FACTS]

    def _of_atom(self, atom: Atom) -> list[Poly]:
        own = Poly.atom(atom)
        facts = [own - self._least[atom]] if atom in self._least else []
        if atom in self.extents:
            facts.append(self.extents[atom] - ONE - own)
        if atom.kind == "quotient":
            a, b = atom.args
            facts += [a - b * own, b - ONE - a + b * own]
        elif atom.kind == "joined":
            facts += [own - arg for arg in atom.args]
        elif atom.kind == "step":
            facts += [ONE - own, atom.args[0] - ONE - own]
        return facts

    def _products(self, monomial: Monomial, facts: Sequence[Poly]) -> list[Poly]:
        """Bounds on a product: those on one factor times the others, where these are not negative."""
        made: list[Poly] = []
        for position, atom in enumerate(monomial):
            others = monomial[:position] + monomial[position + 1 :]
            if all(self._least.get(a, -1) >= 0 for a in others):
                rest = Poly({others: 1})
                bounds = self._of_atom(atom)
                bounds += [f for f in facts if (atom,) in f.terms and len(f.terms) <= 4]
                made.extend(self.now(b * rest) for b in bounds[:6])
        return made

    # ── alternatives ─────────────────────────────────────────────────────────────────────────────────────────────

    def _by_cases(
        self, poly: Poly, outcome: Callable[[Knowledge], bool | None], about: Iterable[Atom] = ()
    ) -> bool | None:
        """What `outcome` says alike in all cases that the clauses about `poly` leave; None where it does not."""
        poly = self.now(poly)
        clauses = self._clauses_about({*poly.within, *about})
        if not clauses:
            return None
        key = self._question(poly, clauses)
        if key is None or key not in self._effort.memory:
            trial = self.copy()
            trial._clauses = []
            found = trial._in_cases(clauses, outcome, _DEPTH)
            answer = True if found is _VACUOUS else found if isinstance(found, bool) else None
            if key is None or self.contradictory:
                # anything follows from a contradiction, which the question does not tell
                return answer
            self._effort.memory[key] = answer
        known = self._effort.memory[key]
        return known if isinstance(known, bool) else None

    def _question(self, poly: Poly, clauses: Sequence[Clause]) -> object:
        """The question whether poly = 0 under clauses, apart from names; None where more facts bear on it."""
        spoken = [poly, *(self.now(s.poly) for c in clauses for alternative in c for s in alternative)]
        atoms = frozenset[Atom]().union(*(p.within for p in spoken))
        facts = (*self._inequalities, *self._nonzero, *(Poly({m: 1}) - v for m, v in self._rewrites))
        if any(a in self.extents for a in atoms) or any(not self.now(f).within.isdisjoint(atoms) for f in facts):
            return None
        ordered = sorted(atoms, key=lambda a: a.order)
        names = {a: f"#{i}" for i, a in enumerate(a for a in ordered if not a.args)}
        told = tuple(tuple((tuple((show(self.now(s.poly), names), s.equation) for s in alternative))
                           for alternative in c) for c in clauses)  # fmt: skip
        bounds = tuple((show(Poly.atom(a), names), self._least.get(a)) for a in ordered)
        return show(poly, names), told, bounds

    def _clauses_about(self, atoms: set[Atom]) -> list[Clause]:
        """Clauses that speak of `atoms`, or of atoms that these speak of."""
        about = {c: {a for alternative in c for s in alternative for a in self.now(s.poly).within}
                 for c in self._clauses}  # fmt: skip
        found: list[Clause] = []
        while True:
            more = [c for c, spoken in about.items() if c not in found and not spoken.isdisjoint(atoms)]
            if not more:
                return found
            found += more
            atoms = atoms.union(*(about[c] for c in more))

    def _in_cases(
        self, clauses: Sequence[Clause], outcome: Callable[[Knowledge], bool | None], depth: int
    ) -> object:
        """True, False, None (they differ, or it is not known) or _VACUOUS (no case is possible)."""
        left = self._propagated(clauses)
        if left is None:
            return _VACUOUS
        answer = outcome(self)
        if answer is not None or depth == 0 or not left:
            return answer
        found: set[object] = set()
        for alternative in self._alternatives(left):
            trial = self.copy()
            trial.assume(alternative)
            part = _VACUOUS if trial.contradictory else trial._in_cases(left, outcome, depth - 1)
            if part is None:
                return None
            found.add(part)
        found.discard(_VACUOUS)
        return _VACUOUS if not found else found.pop() if len(found) == 1 else None

    def _propagated(self, clauses: Sequence[Clause]) -> list[Clause] | None:
        """The clauses that still leave a choice, all others taken as assumptions; None for a contradiction."""
        left = list(clauses)
        while True:
            before, left = left, []
            for clause in before:
                alive = [alternative for alternative in clause if not any(map(self._refuted, alternative))]
                if not alive:
                    return None
                if any(all(map(self._certain, alternative)) for alternative in alive):
                    continue
                if len(alive) > 1:
                    left.append(tuple(alive))
                    continue
                self.assume(alive[0])
                if self.contradictory:
                    return None
            if len(left) == len(before):
                return left

    def _alternatives(self, clauses: Sequence[Clause]) -> Clause:
        """What to tell apart next: whether a size is 1, else the alternatives of a clause."""
        for clause in clauses:
            for alternative in clause:
                for statement in alternative:
                    size = self.now(statement.poly + ONE)
                    lone = size.lone_atom
                    if statement.equation and lone is not None and self._least.get(lone, 0) == 1:
                        return ((is_zero(size - ONE),), (Statement(size - 2, False),))
        return clauses[0]

    def _refuted(self, statement: Statement) -> bool:
        poly = self.now(statement.poly)
        return self._answered(-poly - ONE) or (statement.equation and (self._answered(poly - ONE) or self._told(poly)))

    def _certain(self, statement: Statement) -> bool:
        poly = self.now(statement.poly)
        return not poly.terms if statement.equation else self._answered(poly)

    def _told(self, poly: Poly) -> bool:
        """Whether it was assumed that poly ≠ 0."""
        return any(self.now(p) in (poly, -poly) for p in self._nonzero)


def _divided(a: Poly, b: Poly) -> tuple[Poly, Poly]:
    """(q, r) with a = q·b + r, as far as terms divide; coefficients of r lie between 0 and that of b."""
    lead = max(b.terms, key=lambda m: (len(m), [x.order for x in m]))
    unit = int(b.terms[lead])
    if unit < 0:
        lead = next((m for m in b.terms if b.terms[m] > 0), lead)
        unit = int(b.terms[lead])
    whole, rest, seen = ZERO, a, set[Monomial]()
    while True:
        for monomial in sorted(rest.terms, key=lambda m: (-len(m), [x.order for x in m])):
            quotient = without(monomial, lead)
            count = int(rest.terms[monomial]) // unit if unit > 0 else 0
            if quotient is not None and count and monomial not in seen:
                seen.add(monomial)
                part = Poly({quotient: count})
                whole, rest = whole + part, rest - part * b
                break
        else:
            return whole, rest


def _content(poly: Poly) -> tuple[int, Poly]:
    """The common factor of the coefficients, and what it leaves."""
    factor = math.gcd(*(int(c) for c in poly.terms.values()))
    return factor, Poly({m: int(c) // factor for m, c in poly.terms.items()})


def _mentions(poly: Poly, monomial: Monomial) -> bool:
    """Whether a product is part of a term, here or within an atom."""
    if any(without(m, monomial) is not None for m in poly.terms):
        return True
    return any(_mentions(arg, monomial) for a in poly.atoms for arg in a.args)
