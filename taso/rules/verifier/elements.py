"""An element of one side of a rule, by composing the meanings of its operators (index notation)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from typing import TypeVar

from taso.graph import index as notation
from taso.graph.index import Affine, Meaning
from taso.graph.unknown import UnknownFraction
from taso.rules.pattern import Port, Ref
from taso.rules.verifier import terms as algebra
from taso.rules.verifier.cases import Case, NotUnderstood, SplitIndex, SplitRange
from taso.rules.verifier.polynomials import ONE, ZERO, Atom, Poly, Rational
from taso.rules.verifier.simplify import Simplifier
from taso.rules.verifier.terms import Applied, Bound, Element, Entry, Largest, Setting, Sum

Index = tuple[Poly, ...]
Part = TypeVar("Part")
Scope = Mapping[str, tuple[Poly, Poly]]
"""The position and the extent of each loop."""

# f(f(x)) = f(x), from their definitions: |·|, rounding and sign leave their own values as they are
_IDEMPOTENT = frozenset({"abs", "floor", "ceil", "round", "sign"})
# f(0) = 0, so that f of what is 0 outside a range is 0 there too
_KEEPS_ZERO = frozenset({
    "abs", "floor", "ceil", "round", "sign", "tanh", "sqrt", "erf", "sin", "softsign",
})  # fmt: skip
_WHOLE_POWERS = frozenset({Fraction(1), Fraction(2), Fraction(3)})
_POWERS = _WHOLE_POWERS | {Fraction(1, 2), Fraction(-1), Fraction(-1, 2)}
# no real number for some arguments: by what is taken of them a side can be undefined
_PARTIAL = frozenset({"log", "sqrt", "pow", "tan", "asin", "acos", "acosh", "atanh"})
# of which it is noted what they are made of
_NOTED = _PARTIAL | {"div", "reciprocal"}
_LOWEST = "lowest"
_MOST_SPLITS = 40


def _calls(expr: notation.Expr) -> frozenset[str]:
    """The scalar functions in an expression."""
    if isinstance(expr, notation.Call):
        return frozenset({expr.function}).union(*map(_calls, expr.args))
    if isinstance(expr, notation.Reduce):
        return _calls(expr.body)
    if isinstance(expr, notation.Pick):
        return frozenset[str]().union(*(_calls(piece) for _, piece in expr.pieces))
    return frozenset()


@dataclass(frozen=True)
class Placed:
    """A node ready to be read: where its inputs come from, their shapes, and what its outputs mean."""

    inputs: tuple[Ref | None, ...]
    shapes: tuple[tuple[Poly, ...], ...]
    meanings: tuple[Meaning, ...]


class Elements:
    """Elements of the values of one side, on one way through the rule; `integers` where they can be integers."""

    def __init__(self, case: Case, nodes: Sequence[Placed], fills: Mapping[str, Sum], integers: bool) -> None:
        self._case = case
        self._nodes = nodes
        self._fills = fills
        # a power of integers is rounded where its exponent is negative or a fraction
        self._powers = _WHOLE_POWERS if integers else _POWERS
        self._integers = integers
        self.partial: set[tuple[str, frozenset[str]]] = set()
        """Functions that have no value for some arguments, with the variables that these are made of."""
        self._simplifier = Simplifier(case)
        self._known_ones: dict[int, bool] = {}
        self._total_ones: dict[int, bool] = {}

    def at(self, ref: Ref, index: Index) -> Sum:
        """The element `index` of a value, simplified."""
        return algebra.gathered(self._simplifier.sum(algebra.gathered(self._value(ref, index))))

    def _value(self, ref: Ref, index: Index) -> Sum:
        if isinstance(ref, str):
            return self._fills[ref] if ref in self._fills else algebra.of(Element(ref, index))
        node = self._nodes[ref.node]
        meaning = node.meanings[ref.output]
        scope: dict[str, tuple[Poly, Poly]] = {}
        for axis, position in zip(meaning.axes, index, strict=True):
            self._enter(axis, position, scope)
        return self._expression(meaning.body, node, scope)

    def _enter(self, axis: tuple[notation.Loop, ...], position: Poly, scope: dict[str, tuple[Poly, Poly]]) -> None:
        """The loops along an axis, last one fastest, where their count is `position`."""
        for loop in reversed(axis[1:]):
            extent = self._case.poly(loop.extent)
            whole = self._divide(position, extent)
            scope[loop.name] = self._case.known.now(position - extent * whole), extent
            position = whole
        if axis:
            scope[axis[0].name] = self._case.known.now(position), self._case.poly(axis[0].extent)

    def _divide(self, position: Poly, divisor: Poly) -> Poly:
        """⌊position / divisor⌋, with indices taken apart where that helps."""
        known = self._case.known
        for _ in range(_MOST_SPLITS):
            whole = known.quotient(position, divisor)
            split = self._open_quotient(whole)
            if split is None:
                return whole
            atom, by = split
            if atom.kind == "bound":
                raise SplitIndex(atom, by)
            known.take_apart(atom, by)
            position, divisor = known.now(position), known.now(divisor)
        raise NotUnderstood("an index is taken apart too often")

    @staticmethod
    def _open_quotient(whole: Poly) -> tuple[Atom, Poly] | None:
        """An index that stands divided as a whole, and by what."""
        for atom in sorted(whole.atoms, key=lambda a: a.order):
            if atom.kind == "quotient":
                dividend = atom.args[0].lone_atom
                if dividend is not None and dividend.is_index and not any(a.is_index for a in atom.args[1].within):
                    return dividend, atom.args[1]
        return None

    # ── expressions ──────────────────────────────────────────────────────────────────────────────────────────────

    def _expression(self, expr: notation.Expr, node: Placed, scope: Scope) -> Sum:
        if isinstance(expr, notation.Const):
            return self._constant(expr)
        if isinstance(expr, notation.Read):
            return self._read(expr, node, scope)
        if isinstance(expr, notation.Flat):
            return self._flat(expr, node, scope)
        if isinstance(expr, notation.Inside):
            return algebra.guarded(algebra.number(ONE), self._inside(expr.input, expr.index, node, scope))
        if isinstance(expr, notation.Call):
            if expr.function == "mul":
                return self._multiplied(expr, node, scope)
            return self._call(expr.function, [self._expression(a, node, scope) for a in expr.args])
        if isinstance(expr, notation.Pick):
            return self._pick(expr, node, scope)
        return self._reduce(expr, node, scope)

    def _multiplied(self, expr: notation.Call, node: Placed, scope: Scope) -> Sum:
        """A product; of a factor that is no variable's it is seen first whether it is 0.

        Where it is, the other one is left alone, unless it may have no value, which has to be noted.
        """
        left, right = expr.args
        ahead = (
            isinstance(left, notation.Read) and isinstance(right, notation.Read)
            and self._is_known(self._input(node, right.input)) and self._is_total(self._input(node, left.input))
        )  # fmt: skip
        if not ahead:
            return self._product(self._expression(left, node, scope), self._expression(right, node, scope))
        factor = self._expression(right, node, scope)
        return self._product(self._expression(left, node, scope), factor) if factor else ()

    def _is_known(self, ref: Ref) -> bool:
        """Whether a value is made of no variable."""
        if isinstance(ref, str):
            return False
        if ref.node not in self._known_ones:
            self._known_ones[ref.node] = all(r is None or self._is_known(r) for r in self._nodes[ref.node].inputs)
        return self._known_ones[ref.node]

    def _is_total(self, ref: Ref) -> bool:
        """Whether a value is made of functions alone that have a value for all arguments."""
        if isinstance(ref, str):
            return True
        if ref.node not in self._total_ones:
            node = self._nodes[ref.node]
            self._total_ones[ref.node] = not any(_calls(m.body) & _NOTED for m in node.meanings) and all(
                r is None or self._is_total(r) for r in node.inputs
            )
        return self._total_ones[ref.node]

    def _constant(self, expr: notation.Const) -> Sum:
        if isinstance(expr.value, UnknownFraction):
            return algebra.of(Setting(expr.value.name))
        self._case.poly(expr.value.numerator)
        self._case.poly(expr.value.denominator)
        return algebra.number(Poly.number(expr.value))

    def _affine(self, affine: Affine, scope: Scope) -> Poly:
        total = self._case.poly(affine.constant)
        for name, coefficient in affine.terms:
            position, extent = scope[name]
            total = total + position * self._stepped(extent, self._case.poly(coefficient))
        return self._case.known.now(total)

    def _stepped(self, extent: Poly, factor: Poly) -> Poly:
        """A coefficient; 1 for the step of an axis as long as its loop, which then changes nothing."""
        step = factor.lone_atom
        if step is not None and step.kind == "step" and self._case.known.zero(step.args[0] - extent):
            return ONE
        return factor

    def _read(self, expr: notation.Read, node: Placed, scope: Scope) -> Sum:
        index = tuple(self._affine(a, scope) for a in expr.index)
        if expr.fill == "least":
            raise NotUnderstood("a read that is below every number outside, not directly within a maximum")
        ref = self._input(node, expr.input)
        if not expr.fill:
            return self._value(ref, index)
        guards = self._inside(expr.input, expr.index, node, scope)
        counted = isinstance(ref, Port) and isinstance(self._nodes[ref.node].meanings[ref.output].body, notation.Flat)
        if guards and counted:
            return algebra.guarded(self._value_within(ref, index, node.shapes[expr.input]), guards)
        return algebra.guarded(self._value(ref, index), guards)

    def _value_within(self, ref: Ref, index: Index, shape: Sequence[Poly]) -> Sum:
        """The element `index` of a value, of which guards ask that it lies within `shape`.

        An index that is not known to lie there is replaced by a free one that is, so that what is counted row by row
        comes apart, and put back in the end.
        """
        known = self._case.known
        replaced: dict[Atom, Poly] = {}
        found: list[Poly] = []
        for position, size in zip(index, shape, strict=True):
            if not known.nonneg(size - ONE):
                return self._value(ref, index)
            if position.constant is None and not (known.nonneg(position) and known.nonneg(size - ONE - position)):
                atom = known.index("free", known.now(size))
                replaced[atom] = position
                position = Poly.atom(atom)
            found.append(position)
        trail = self._case.trail
        place = trail.place
        value = self._value(ref, tuple(found))
        names = [a.name for a in replaced]
        if any(d.forked and any(n in d.question for n in names) for d in trail.decisions[place : trail.place]):
            return self._value(ref, index)
        for atom, position in replaced.items():
            if known.now(Poly.atom(atom)) != Poly.atom(atom):
                # it was itself taken apart meanwhile
                return self._value(ref, index)
            value = algebra.change(value, partial(self._put_back, atom, position))
        return value

    def _put_back(self, atom: Atom, position: Poly, poly: Poly) -> Poly:
        return self._case.known.now(self._case.known.substituted(poly, atom, position))

    @staticmethod
    def _input(node: Placed, position: int) -> Ref:
        ref = node.inputs[position]
        if ref is None:
            raise NotUnderstood(f"input {position} is missing")
        return ref

    def _inside(
        self, position: int | None, index: Sequence[Affine], node: Placed, scope: Scope
    ) -> tuple[Poly, ...]:
        guards: list[Poly] = []
        shape = (ONE,) * len(index) if position is None else node.shapes[position]
        for affine, size in zip(index, shape, strict=True):
            at = self._affine(affine, scope)
            guards += [g for g in (at, size - ONE - at) if not self._case.known.nonneg(g)]
        return tuple(guards)

    def _flat(self, expr: notation.Flat, node: Placed, scope: Scope) -> Sum:
        position = self._affine(expr.offset, scope)
        index: list[Poly] = []
        shape = node.shapes[expr.input]
        for size in reversed(shape[1:]):
            whole = self._divide(position, size)
            position = self._case.known.now(position)
            index.append(position - size * whole)
            position = whole
        index.extend([position] if shape else [])
        return self._value(self._input(node, expr.input), tuple(map(self._case.known.now, reversed(index))))

    def _pick(self, expr: notation.Pick, node: Placed, scope: Scope) -> Sum:
        """The piece that the loop is in; the loop runs no further than the last piece does."""
        position, _ = scope[expr.loop]
        number = position.constant
        if number is not None and 0 <= number < len(expr.pieces) and all(extent == 1 for extent, _ in expr.pieces):
            return self._expression(expr.pieces[int(number)][1], node, {**scope, expr.loop: (ZERO, ONE)})
        start = ZERO
        for number, (extent, piece) in enumerate(expr.pieces, 1):
            size = self._case.poly(extent)
            if number == len(expr.pieces) or not self._case.is_nonneg(position - start - size):
                inner = {name: (self._case.known.now(p), e) for name, (p, e) in scope.items()}
                inner[expr.loop] = self._case.known.now(position - start), size
                return self._expression(piece, node, inner)
            start = start + size
        raise NotUnderstood("pieces of nothing")

    # ── scalar functions ─────────────────────────────────────────────────────────────────────────────────────────

    def _call(self, function: str, args: Sequence[Sum]) -> Sum:
        if function in ("add", "sub"):
            return args[0] + (args[1] if function == "add" else algebra.negative(args[1]))
        if function == "neg":
            return algebra.negative(args[0])
        if function == "mul":
            return self._product(args[0], args[1])
        if function in ("div", "reciprocal"):
            divisor = self._simplifier.sum(args[-1])
            self._note("reciprocal", divisor)
            turned = algebra.reciprocal(divisor)
            return turned if function == "reciprocal" else self._product(args[0], turned)
        args = [self._simplifier.sum(a) for a in args]
        if function in ("max", "min", "relu"):
            return self._extreme(function, args)
        if function == "pow" and (exponent := algebra.number_of(args[1])) in self._powers:
            return self._power(args[0], exponent)
        return self._applied(function, args)

    def _note(self, function: str, *args: Sum) -> None:
        names = frozenset[str]().union(*map(algebra.variables_in, args))
        if names:
            self.partial.add((function, names))

    def _power(self, base: Sum, exponent: Rational) -> Sum:
        """A power that products, roots and reciprocals say."""
        times = Fraction(exponent)
        if times.denominator == 2:
            base, times = self._applied("sqrt", [base]), times * 2
        made = base
        for _ in range(abs(times.numerator) - 1):
            made = self._product(made, base)
        return made if times > 0 else self._call("reciprocal", [made])

    def _product(self, left: Sum, right: Sum) -> Sum:
        return algebra.product(left, right, lambda b: (self._case.known.index("bound", b[1]), b[1]))

    def _extreme(self, function: str, args: Sequence[Sum]) -> Sum:
        if function == "relu":
            guards, inner = self._common_guards(args[0])
            found = algebra.largest((*self._candidates_in(inner, ONE), Entry((), (), ())), self._integers)
            return algebra.guarded(found, guards)
        sign = ONE if function == "max" else -ONE
        return self._outermost([e for a in args for e in self._candidates_in(a, sign)], sign)

    def _candidates_in(self, terms: Sum, sign: Poly) -> tuple[Entry, ...]:
        """What `terms` is the largest of, or, where `sign` is −1, the contraries of what it is the smallest of."""
        if sign == ONE or not self._integers:
            return algebra.entries_of(algebra.scaled(terms, sign), self._integers)
        lone = algebra.lone_factor(terms)
        if isinstance(lone, Applied) and lone.function == _LOWEST:
            return algebra.entries_of(lone.args[0], True)
        return (Entry((), (), algebra.negative(terms)),)

    def _outermost(self, entries: Sequence[Entry], sign: Poly) -> Sum:
        """The largest, or, where `sign` is −1, the smallest of what `entries` are the contraries of.

        min(a, b) = −max(−a, −b) in real numbers. The least of all integers is its own contrary, so that of integers the
        smallest is a function of its own of what stands for it.
        """
        found = algebra.largest(entries, self._integers)
        if sign != ONE and self._integers and isinstance(algebra.lone_factor(found), Largest):
            return algebra.of(Applied(_LOWEST, (found,)))
        return algebra.scaled(found, sign)

    def _applied(self, function: str, args: Sequence[Sum]) -> Sum:
        if function in _PARTIAL:
            self._note(function, *args)
        lone = algebra.lone_factor(args[0]) if len(args) == 1 else None
        if function in _IDEMPOTENT and isinstance(lone, Applied) and lone.function == function:
            return args[0]
        if function in _KEEPS_ZERO:
            guards, inner = self._common_guards(args[0])
            return algebra.guarded(algebra.of(Applied(function, (inner,))), guards) if inner else ()
        return algebra.of(Applied(function, tuple(args)))

    @staticmethod
    def _common_guards(terms: Sum) -> tuple[tuple[Poly, ...], Sum]:
        """Guards that all terms share and that speak of no index a term sums over; and the sum without them."""
        if not terms:
            return (), terms
        bound = {atom for t in terms for atom, _ in t.bound}
        first, *others = terms
        shared = [g for g in first.guards if all(g in t.guards for t in others) and bound.isdisjoint(g.within)]
        bare = tuple(
            algebra.Term(t.coefficient, t.bound, tuple(g for g in t.guards if g not in shared), t.factors)
            for t in terms
        )
        return tuple(shared), bare

    # ── sums and extremes over loops ─────────────────────────────────────────────────────────────────────────────

    def _reduce(self, expr: notation.Reduce, node: Placed, scope: Scope) -> Sum:
        ranges = [(loop.name, self._case.poly(loop.extent)) for loop in expr.loops]
        if expr.kind == "sum":
            return self._over(ranges, scope, (), lambda s, b: self._summed(expr.body, node, s, b))
        if expr.kind in ("max", "min"):
            sign = ONE if expr.kind == "max" else -ONE
            entries = self._over(ranges, scope, (), lambda s, b: self._candidates(expr.body, node, s, b, sign))
            kept = [e for e in map(self._simplifier.entry, entries) if e is not None]
            return self._outermost(kept, sign)
        raise NotUnderstood(f"the reduction '{expr.kind}'")

    def _over(
        self, ranges: Sequence[tuple[str, Poly]], scope: Scope, bound: tuple[Bound, ...],
        body: Callable[[Scope, tuple[Bound, ...]], tuple[Part, ...]],
    ) -> tuple[Part, ...]:  # fmt: skip
        """What `body` gives over all loops together, taken apart as often as what it reads asks for."""
        if not ranges:
            return body({n: (self._case.known.now(p), e) for n, (p, e) in scope.items()}, bound)
        (name, extent), rest = ranges[0], ranges[1:]
        return self._along(extent, ZERO, lambda at, b: self._over(rest, {**scope, name: (at, extent)}, bound + b, body))

    def _along(
        self, extent: Poly, start: Poly, body: Callable[[Poly, tuple[Bound, ...]], tuple[Part, ...]], tries: int = 0
    ) -> tuple[Part, ...]:
        """body(start + i) over i < extent."""
        case = self._case
        extent = case.known.now(extent)
        if tries > _MOST_SPLITS:
            raise NotUnderstood("a sum is taken apart too often")
        if not case.is_nonneg(extent - ONE):
            return ()
        if extent == ONE:
            return body(start, ())
        atom = case.known.index("bound", extent)
        try:
            return body(start + Poly.atom(atom), ((atom, extent),))
        except SplitRange as split:
            if split.atom is not atom:
                raise
            if split.threshold is None:
                return self._one_by_one(extent, start, body)
            threshold = split.threshold
        except SplitIndex as split:
            if split.atom is not atom:
                raise
            return self._nested(extent, start, split.divisor, body)
        if not (case.is_nonneg(threshold) and case.is_nonneg(extent - threshold)):
            # it is known now on which side all of the range lies
            return self._along(extent, start, body, tries + 1)
        low = self._along(threshold, start, body, tries + 1)
        return low + self._along(extent - threshold, start + threshold, body, tries + 1)

    @staticmethod
    def _one_by_one(
        extent: Poly, start: Poly, body: Callable[[Poly, tuple[Bound, ...]], tuple[Part, ...]]
    ) -> tuple[Part, ...]:
        count = extent.constant
        if count is None or count > _MOST_SPLITS:
            raise NotUnderstood(f"a sum up to {extent} that is to be written out")
        return tuple(part for i in range(int(count)) for part in body(start + Poly.number(i), ()))

    def _nested(
        self, extent: Poly, start: Poly, divisor: Poly, body: Callable[[Poly, tuple[Bound, ...]], tuple[Part, ...]]
    ) -> tuple[Part, ...]:
        """Σ over i < extent as Σ over q < extent / divisor and r < divisor, i = q · divisor + r."""
        known = self._case.known
        count = known.quotient(extent, divisor)
        if known.now(count * divisor - extent) != ZERO:
            raise NotUnderstood(f"a sum up to {extent} does not divide by {divisor}")
        return self._along(
            count, ZERO, lambda q, b: self._along(divisor, start + q * divisor, lambda at, c: body(at, b + c))
        )

    def _summed(
        self, body: notation.Expr, node: Placed, scope: Scope, bound: tuple[Bound, ...]
    ) -> Sum:
        inner = self._expression(body, node, scope)
        return tuple(algebra.Term(t.coefficient, t.bound + bound, t.guards, t.factors) for t in inner)

    def _candidates(
        self, body: notation.Expr, node: Placed, scope: Scope, bound: tuple[Bound, ...], sign: Poly
    ) -> tuple[Entry, ...]:
        guards: tuple[Poly, ...] = ()
        if isinstance(body, notation.Read) and body.fill == "least" and sign == ONE:
            guards = self._inside(body.input, body.index, node, scope)
            body = notation.Read(body.input, body.index)
        value = self._simplifier.sum(self._expression(body, node, scope))
        return tuple(Entry(e.bound + bound, e.guards + guards, e.value) for e in self._candidates_in(value, sign))
