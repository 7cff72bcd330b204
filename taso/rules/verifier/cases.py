"""Running the definitions of operators on unknown sizes: each comparison that is not settled parts the run in two.

A run is repeated until every way through has been taken. What was decided on a way is known from there on, so that
what a type rule asks of its inputs (it raises otherwise) becomes an assumption where a source is typed, and something
to be proved where a target is.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from taso.graph.errors import DimensionMismatch
from taso.graph.unknown import IMPOSSIBLE, UnknownInteger, is_number
from taso.rules.verifier.facts import Effort, Knowledge, is_zero
from taso.rules.verifier.polynomials import ONE, Atom, Poly


class NotUnderstood(Exception):
    """Something that this verifier cannot reason about; carries what."""


class Inadmissible(Exception):
    """The source, or the rule's conditions, do not admit this case."""


class SplitRange(Exception):
    """A sum must be taken apart: its index `atom` below and from `threshold` on, or each of its values by itself."""

    def __init__(self, atom: Atom, threshold: Poly | None = None) -> None:
        super().__init__(f"{atom} at {threshold}")
        self.atom = atom
        self.threshold = threshold


class SplitIndex(Exception):
    """A sum must run over two indices: `atom` is divided by `divisor`."""

    def __init__(self, atom: Atom, divisor: Poly) -> None:
        super().__init__(f"{atom} by {divisor}")
        self.atom = atom
        self.divisor = divisor


_APART = 2
"""What is taken where the answer depends on an index that is summed over: neither no nor yes."""


@dataclass
class _Decision:
    """What was asked and chosen, what else could be, and whether there was a choice at all."""

    question: str
    taken: int
    others: list[int]
    forked: bool


@dataclass
class Trail:
    """The decisions on the way that is being taken."""

    effort: Effort
    decisions: list[_Decision] = field(default_factory=list)
    place: int = 0

    def ways(self) -> Iterator[None]:
        """Once for each way, depth first."""
        while True:
            self.place = 0
            yield
            while self.decisions and not self.decisions[-1].others:
                self.decisions.pop()
            if not self.decisions:
                return
            self.decisions[-1].taken = self.decisions[-1].others.pop(0)

    def take(self, question: str, options: Callable[[], list[int]]) -> tuple[int, bool]:
        """(what is taken here, whether there was a choice); `options` is asked the first time only."""
        if self.place == len(self.decisions):
            first, *others = options()
            self.decisions.append(_Decision(question, first, others, bool(others)))
        decision = self.decisions[self.place]
        if decision.question != question:
            raise NotUnderstood(f"a way does not repeat: it asks {question} where it asked {decision.question}")
        self.place += 1
        return decision.taken, decision.forked


class Case:
    """One way through a rule: what is known on it."""

    def __init__(self, trail: Trail) -> None:
        self.trail = trail
        self.known = Knowledge(trail.effort)
        self.in_source = True
        self._broadcasts: dict[tuple[Poly, Poly], Poly] = {}

    # ── choices ──────────────────────────────────────────────────────────────────────────────────────────────────

    def choose(self, count: int) -> int:
        """One of 0 … count − 1; each is taken on some way."""
        if count < 1:
            raise Inadmissible("there is nothing to choose from")
        return self.trail.take(f"one of {count}", lambda: list(range(count)))[0]

    def is_zero(self, poly: Poly) -> bool:
        """Whether poly = 0 on this way."""
        poly = self.known.now(poly)
        number = poly.constant
        if number is not None:
            return number == 0

        def options() -> list[int]:
            answer = self.known.zero(poly)
            return self._both(poly) if answer is None else [int(answer)]

        taken, forked = self._taken(f"{poly} = 0", poly, options)
        if forked:
            if taken:
                self.known.assume_zero(poly)
            else:
                self.known.assume_nonzero(poly)
        return bool(taken)

    def is_nonneg(self, poly: Poly) -> bool:
        """Whether poly ≥ 0 on this way."""
        poly = self.known.now(poly)
        number = poly.constant
        if number is not None:
            return number >= 0

        def options() -> list[int]:
            if self.known.nonneg(poly):
                return [1]
            return [0] if self.known.nonneg(-poly - ONE) else self._both(poly)

        taken, forked = self._taken(f"{poly} ≥ 0", poly, options)
        if forked:
            self.known.assume_nonneg(poly if taken else -poly - ONE)
        return bool(taken)

    def divides(self, a: Poly, b: Poly, rest: Poly) -> bool:
        """Whether b, at least 1, divides a, which leaves `rest`."""
        rest = self.known.now(rest)
        number = rest.constant
        if number is not None:
            return number == 0

        def options() -> list[int]:
            answer = self.known.zero(rest)
            return self._both(rest) if answer is None else [int(answer)]

        taken, forked = self._taken(f"{rest} = 0", rest, options)
        if forked and taken:
            self.known.assume_division(a, b)
        elif forked:
            self.known.assume_nonzero(rest)
        return bool(taken)

    def _taken(self, question: str, poly: Poly, options: Callable[[], list[int]]) -> tuple[int, bool]:
        """What is taken of `options`, and whether there was a choice; a sum that is taken apart is so on every way."""

        def or_apart() -> list[int]:
            try:
                return options()
            except SplitRange:
                return [_APART]

        taken, forked = self.trail.take(question, or_apart)
        if taken == _APART:
            self._both(poly)
            raise NotUnderstood(f"a way does not repeat: {question} depends on no index that is summed over")
        return taken, forked

    def _both(self, poly: Poly) -> list[int]:
        poly = self.known.now(poly)
        bound = sorted((a for a in poly.within if a.kind == "bound"), key=lambda a: a.order)
        if not bound:
            return [1, 0]
        parts = poly.split(bound[-1]) if len(bound) == 1 else None
        if parts is not None and parts[0] in (ONE, -ONE) and not any(a.is_index for a in parts[1].within):
            factor, rest = parts
            # atom + rest ≥ 0 from −rest on; −atom + rest ≥ 0 up to rest
            raise SplitRange(bound[0], -rest if factor == ONE else rest + ONE)
        for atom in bound:
            if self.known.extents[atom].constant is not None:
                raise SplitRange(atom)
        raise NotUnderstood(f"whether {poly} is positive depends on an index that is summed over")

    # ── numbers ──────────────────────────────────────────────────────────────────────────────────────────────────

    def number(self, poly: Poly) -> int:
        """`poly` as the definitions of operators see it."""
        poly = self.known.now(poly)
        value = poly.constant
        return int(value) if value is not None else Size(self, poly)

    def poly(self, value: object) -> Poly:
        """What the definitions of operators hand back."""
        if isinstance(value, Size):
            return self.known.now(value.poly)
        if isinstance(value, int) and is_number(value):
            return Poly.number(int(value))
        raise NotUnderstood(f"a definition does not compute with unknown sizes: it gave {str(value)[:40]}")

    def size(self, name: str, least: int | None) -> int:
        return self.number(Poly.atom(self.known.atom("size", name, least)))

    def broadcast(self, a: Poly, b: Poly) -> Poly:
        """What broadcasting gives, all ways at once; in a target that the sizes meet must follow."""
        a, b = self.known.now(a), self.known.now(b)
        if a == b or b == ONE:
            return a
        if a == ONE:
            return b
        if (a, b) not in self._broadcasts:
            self._broadcasts[a, b] = self._broadcast(a, b)
        return self._broadcasts[a, b]

    def _broadcast(self, a: Poly, b: Poly) -> Poly:
        wanted = (is_zero(a - b), is_zero(b - ONE), is_zero(a - ONE))
        clause = tuple((statement,) for statement in wanted)

        # 0: the sizes are equal; 1: the second is 1; 2: the first is 1; 3: one of these; 4: none of them, or not known
        def options() -> list[int]:
            answers = [self.known.zero(statement.poly) for statement in wanted]
            if True in answers:
                return [answers.index(True)]
            open_one = self.in_source and not all(answer is False for answer in answers)
            return [3] if open_one or self.known.one_of(clause) else [4]

        answer, _ = self.trail.take(f"broadcast {a}, {b}", options)
        if answer == 4:
            raise DimensionMismatch(f"sizes {a} and {b} do not broadcast", 0, 0)
        if answer < 3:
            return b if answer == 2 else a
        if self.in_source:
            self.known.assume_one_of(clause)
        return self.known.joined(a, b)


_WORTHS = itertools.count(1)


class Size(UnknownInteger):
    """A size or setting as the definitions of operators meet it; comparisons decide, or part the run."""

    case: Case
    poly: Poly
    division: tuple[Poly, Poly] | None
    """(a, b) where this is the remainder of a divided by b."""

    def __new__(cls, case: Case, poly: Poly) -> Size:
        # never twice the same, so that the worth of two does not cancel
        self = super().__new__(cls, IMPOSSIBLE + next(_WORTHS))
        self.case = case
        self.poly = poly
        self.division = None
        return self

    def _other(self, other: object) -> Poly:
        return self.case.poly(other)

    def __add__(self, other: int) -> int:
        return self.case.number(self.poly + self._other(other))

    def __sub__(self, other: int) -> int:
        return self.case.number(self.poly - self._other(other))

    def __rsub__(self, other: int) -> int:
        return self.case.number(self._other(other) - self.poly)

    def __mul__(self, other: int) -> int:
        if isinstance(other, (tuple, list, str)):
            raise NotUnderstood("as many copies as an unknown size says")
        return self.case.number(self.poly * self._other(other))

    __radd__ = __add__
    __rmul__ = __mul__

    def __neg__(self) -> int:
        return self.case.number(-self.poly)

    def __pos__(self) -> int:
        return self

    def __abs__(self) -> int:
        return self if self >= 0 else -self

    def __floordiv__(self, other: int) -> int:
        return _quotient(self.case, self.poly, self._other(other))

    def __rfloordiv__(self, other: int) -> int:
        return _quotient(self.case, self._other(other), self.poly)

    def __mod__(self, other: int) -> int:
        return _remainder(self.case, self.poly, self._other(other))

    def __rmod__(self, other: int) -> int:
        return _remainder(self.case, self._other(other), self.poly)

    def __eq__(self, other: object) -> bool:
        if self.division and isinstance(other, int) and not isinstance(other, Size) and other == 0:
            return self.case.divides(*self.division, self.poly)
        return isinstance(other, int) and self.case.is_zero(self.poly - self._other(other))

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __ge__(self, other: int) -> bool:
        return self.case.is_nonneg(self.poly - self._other(other))

    def __gt__(self, other: int) -> bool:
        return self.case.is_nonneg(self.poly - self._other(other) - ONE)

    def __le__(self, other: int) -> bool:
        return self.case.is_nonneg(self._other(other) - self.poly)

    def __lt__(self, other: int) -> bool:
        return self.case.is_nonneg(self._other(other) - self.poly - ONE)

    def __bool__(self) -> bool:
        return not self == 0

    def __hash__(self) -> int:
        # equal sizes may be written in different ways, so that no hash but a constant one agrees with equality
        return 0

    def __repr__(self) -> str:
        return str(self.poly)

    __str__ = __repr__

    def __format__(self, spec: str) -> str:
        return str(self.poly)

    def _refused(self, *args: object) -> int:
        raise NotUnderstood("a definition computes with a size in a way that is not understood")

    __int__ = __index__ = __trunc__ = __pow__ = __lshift__ = __rshift__ = __and__ = __or__ = __xor__ = _refused  # type: ignore[assignment]  # none of them has a symbolic value
    __float__ = __truediv__ = __rtruediv__ = __divmod__ = __rdivmod__ = _refused  # type: ignore[assignment]  # nor these

    def broadcast_with(self, other: int) -> int:
        return self.case.number(self.case.broadcast(self.poly, self._other(other)))

    @property
    def step(self) -> int:
        return self.case.number(self.case.known.step(self.case.known.now(self.poly)))


def _quotient(case: Case, dividend: Poly, divisor: Poly) -> int:
    if case.is_zero(divisor):
        raise ZeroDivisionError("division by a size that may be 0")
    if not case.is_nonneg(divisor):
        raise NotUnderstood("division by a negative number")
    return case.number(case.known.quotient(dividend, divisor))


def _remainder(case: Case, dividend: Poly, divisor: Poly) -> int:
    whole = case.poly(_quotient(case, dividend, divisor))
    rest = case.number(dividend - divisor * whole)
    if isinstance(rest, Size):
        rest.division = (dividend, divisor)
    return rest

