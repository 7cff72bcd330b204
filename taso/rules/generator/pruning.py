"""Which equations say something new: what the ones before do not already make equal.

At each size the terms of a class are joined wherever an equation that was kept turns one into another: its pattern is
matched on the rows of the table, by joining columns, against every form that the table holds of their operands. Terms
that stay apart from the representative of their class are the next equations, the most general first.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from taso.rules.generator.equations import Equation, Node, Tree
from taso.rules.generator.universe import Ids, Terms, Universe, looked_up, ranges


@dataclass(frozen=True)
class Rows:
    """Terms of one size beside the classes they belong to (any numbers, equal where the values are)."""

    terms: Terms
    groups: Ids

    def __len__(self) -> int:
        return len(self.groups)

    def __getitem__(self, rows: Ids) -> Rows:
        return Rows(self.terms[rows], self.groups[rows])


@dataclass(frozen=True)
class Way:
    """A direction in which an equation rewrites: its pattern's symbol, and of each operand its bit or 0."""

    source: Node
    target: Tree
    symbol: int
    commutative: bool
    operands: tuple[int, ...]


class _Segment:
    """Terms beside their classes, ordered for both ways of looking them up."""

    def __init__(self, universe: Universe, terms: Terms, classes: Ids) -> None:
        self.by_symbol: dict[int, tuple[Ids, Terms]] = {}
        for symbol in np.unique(terms.symbol):
            rows = np.flatnonzero(terms.symbol == symbol)
            rows = rows[np.argsort(classes[rows], kind="stable")]
            self.by_symbol[int(symbol)] = classes[rows], terms[rows]
        keys = universe.keys(terms)
        order = np.argsort(keys)
        self.keys, self.classes = keys[order], classes[order]


class Members:
    """The terms of the classes that terms of one size are built from: by class and symbol, and by key."""

    def __init__(self, universe: Universe, terms: Terms, classes: Ids) -> None:
        self._universe = universe
        self._symbols_of = np.zeros(len(universe), np.int64)
        self._note(terms, classes)
        self._segments = [_Segment(universe, terms, classes)]
        self._later: list[tuple[Terms, Ids]] = []

    def _note(self, terms: Terms, classes: Ids) -> None:
        np.bitwise_or.at(self._symbols_of, classes, 1 << terms.symbol % _BITS)

    def add(self, terms: Terms, classes: Ids) -> None:
        """Further terms of these classes."""
        self._later.append((terms, classes))
        self._note(terms, classes)
        if len(self._segments) < _SEGMENTS:
            self._segments.append(_Segment(self._universe, terms, classes))
        else:
            every = Terms.joined([t for t, _ in self._later]), np.concatenate([c for _, c in self._later])
            self._segments[1:] = [_Segment(self._universe, *every)]

    def of(self, symbol: int, classes: Ids) -> tuple[Ids, Terms]:
        """The terms of a symbol in each of `classes`: which of `classes`, and the terms."""
        places, found = [], []
        for segment in self._segments:
            if symbol in segment.by_symbol:
                owners, terms = segment.by_symbol[symbol]
                start, end = owners.searchsorted(classes), owners.searchsorted(classes, "right")
                count = end - start
                if count.any():
                    places.append(np.repeat(np.arange(len(classes)), count))
                    found.append(terms[ranges(start, end)])
        if not found:
            return np.empty(0, np.int64), Terms.joined([])
        return np.concatenate(places), Terms.joined(found)

    def may_match(self, way: Way, left: int, right: int) -> bool:
        """False where a term over two classes cannot match, because its operands have no term of the right symbols."""
        held = [int(self._symbols_of[c]) if c >= 0 else 0 for c in (left, right)]
        orders = (held, held[::-1]) if way.commutative else (held,)
        return any(all(bit & has == bit for bit, has in zip(way.operands, order, strict=False)) for order in orders)

    def find(self, terms: Terms) -> Ids:
        """The class of each term, -1 where there is none."""
        keys = self._universe.keys(terms)
        return np.asarray(np.max([looked_up(s.keys, s.classes, keys) for s in self._segments], 0))


_SEGMENTS = 8
_BITS = 62


@dataclass(frozen=True)
class _Matches:
    """Row numbers that match so far, and what each variable of the pattern stands for there."""

    rows: Ids
    bound: dict[int, Ids]

    def __getitem__(self, which: Ids) -> _Matches:
        return _Matches(self.rows[which], {v: c[which] for v, c in self.bound.items()})


_NOTHING = _Matches(np.empty(0, np.int64), {})


class Matcher:
    """Finds where a side of an equation matches rows, and what the other side makes of them."""

    def __init__(self, universe: Universe, members: Members) -> None:
        self._universe, self._members = universe, members
        self._symbols = {(t.name, port): i for i, (t, port) in enumerate(universe.symbols)}

    def _symbol(self, node: Node) -> int:
        return self._symbols[self._universe.space.templates[node.template].name, node.port]

    def ways(self, equation: Equation) -> list[Way]:
        """The directions in which an equation rewrites."""
        return [self._way(source, target) for source, target in equation.ways]

    def _way(self, source: Node, target: Tree) -> Way:
        bits = [1 << self._symbol(o) % _BITS if isinstance(o, Node) else 0 for o in source.operands]
        commutative = self._universe.space.templates[source.template].commutative
        return Way(source, target, self._symbol(source), commutative, tuple(bits))

    def matches(self, pattern: Node, terms: Terms) -> _Matches:
        """All ways in which the pattern matches a row's term."""
        symbol = self._symbol(pattern)
        rows = np.flatnonzero(terms.symbol == symbol)
        if not len(rows):
            return _NOTHING
        return self._operands(pattern, terms[rows], _Matches(rows, {}))

    def _operands(self, pattern: Node, terms: Terms, so_far: _Matches) -> _Matches:
        """`terms` holds a term for each match so far, of the pattern's symbol."""
        template = self._universe.space.templates[pattern.template]
        orders = [(terms.left, terms.right)]
        if template.commutative:
            orders.append((terms.right, terms.left))
        found = []
        for columns in orders:
            state, given = so_far, list(columns[: template.arity])
            for place, operand in enumerate(pattern.operands):
                state, kept = self._extend(operand, given[place], state)
                if not len(kept):
                    break
                given = [c[kept] for c in given]
            else:
                found.append(state)
        return _NOTHING if not found else found[0] if len(found) == 1 else _joined(found)

    def _extend(self, pattern: Tree, classes: Ids, state: _Matches) -> tuple[_Matches, Ids]:
        """The matches that go on where `pattern` stands for `classes`, and which of `state` each comes from."""
        if isinstance(pattern, int):
            if pattern not in state.bound:
                return _Matches(state.rows, state.bound | {pattern: classes}), np.arange(len(classes))
            kept = np.flatnonzero(state.bound[pattern] == classes)
            return state[kept], kept
        owners, terms = self._members.of(self._symbol(pattern), classes)
        if not len(owners):
            return _NOTHING, owners
        # where each match comes from travels along as one more variable
        marked = _Matches(owners, {v: c[owners] for v, c in state.bound.items()})
        result = self._operands(pattern, terms, marked)
        return _Matches(state.rows[result.rows], result.bound), result.rows

    def built(self, tree: Tree, matches: _Matches) -> tuple[Terms, Ids]:
        """The terms that a side becomes, and for which of the matches: those whose operands the table holds."""
        if not isinstance(tree, Node):
            raise TypeError("a variable alone is no term")
        kept = np.arange(len(matches.rows))
        classes = []
        for operand in tree.operands:
            classes.append(self._class_of(operand, matches))
        for column in classes:
            kept = kept[column[kept] >= 0]
        columns = [c[kept] for c in classes] + [np.full(len(kept), -1)] * (2 - len(classes))
        return self._universe.settled(Terms(np.full(len(kept), self._symbol(tree)), *columns)), kept

    def _class_of(self, tree: Tree, matches: _Matches) -> Ids:
        if isinstance(tree, int):
            return matches.bound[tree]
        terms, kept = self.built(tree, matches)
        found = np.full(len(matches.rows), -1)
        found[kept] = self._members.find(terms)
        return found


def _joined(parts: Sequence[_Matches]) -> _Matches:
    names = parts[0].bound
    return _Matches(
        np.concatenate([p.rows for p in parts]), {n: np.concatenate([p.bound[n] for p in parts]) for n in names}
    )


class Level:
    """The terms of one size whose classes have more than one, and which of them are known to be equal.

    `lower` gives for each row the class of smaller terms with the same value, -1 where there is none. The forms of a
    group are joined as equations are applied; `apart` gives those that are not joined with the group's first.
    """

    def __init__(self, universe: Universe, members: tuple[Terms, Ids], rows: Rows, lower: Ids) -> None:
        self._universe, self._members = universe, Members(universe, *members)
        self._matcher = Matcher(universe, self._members)
        self._formed = np.zeros(len(rows), bool)
        self._refused: list[int] = []
        self.rows, self.lower = rows, lower
        keys = universe.keys(rows.terms)
        self._order = np.argsort(keys)
        self._keys = keys[self._order]
        _, first, self._group = np.unique(rows.groups, return_index=True, return_inverse=True)
        # a node for each row, and one for the smaller form of each group
        self._root = len(rows) + self._group
        self._label = np.arange(len(rows) + len(first))
        same = np.flatnonzero(lower[first] < 0)
        self._merge(first[same], len(rows) + same)

    def _merge(self, a: Ids, b: Ids) -> None:
        label = self._label
        while (label[a] != label[b]).any():
            least = np.minimum(label[a], label[b])
            before = label.copy()
            for nodes in (a, b):
                np.minimum.at(label, nodes, least)
                np.minimum.at(label, before[nodes], least)
            label = label[label]
        self._label = label

    def ways(self, equation: Equation) -> list[Way]:
        """The directions in which an equation rewrites."""
        return self._matcher.ways(equation)

    def apply(self, ways: Iterable[Way], rows: Ids) -> None:
        """Joins what an equation makes equal to some rows."""
        for way in ways:
            found = self._matcher.matches(way.source, self.rows.terms[rows])
            if len(found.rows):
                self._merge(*self._targets(way.target, _Matches(rows[found.rows], found.bound)))

    def _targets(self, target: Tree, matches: _Matches) -> tuple[Ids, Ids]:
        """Pairs of nodes that a side of an equation makes equal."""
        if isinstance(target, int):
            smaller = np.flatnonzero(matches.bound[target] == self.lower[matches.rows])
            return matches.rows[smaller], self._root[matches.rows[smaller]]
        terms, kept = self._matcher.built(target, matches)
        rows = matches.rows[kept]
        same = looked_up(self._keys, self._order, self._universe.keys(terms))
        alike = np.flatnonzero((same >= 0) & (self._group[same] == self._group[rows]))
        lower = self._members.find(terms)
        smaller = np.flatnonzero((lower >= 0) & (lower == self.lower[rows]))
        return (
            np.concatenate((rows[alike], rows[smaller])), np.concatenate((same[alike], self._root[rows[smaller]]))
        )  # fmt: skip

    def explained(self, row: int, ways: Mapping[int, Sequence[Way]]) -> bool:
        """Whether a row follows from equations (by the symbols of their patterns), rows joined before taking part."""
        self._take_forms()
        terms = self.rows.terms
        left, right = int(terms.left[row]), int(terms.right[row])
        for way in ways.get(int(terms.symbol[row]), ()):
            if not self._members.may_match(way, left, right):
                continue
            self.apply((way,), np.array([row]))
            if self._label[row] == self._label[self._root[row]]:
                return True
        return False

    def _take_forms(self) -> None:
        """Rows that are joined with smaller terms become further forms of these, under all renamings."""
        forms = (self._label[: len(self.rows)] == self._label[self._root]) & (self.lower >= 0) & ~self._formed
        rows = np.flatnonzero(forms)
        if not len(rows):
            return
        self._formed |= forms
        keys = self._universe.all_keys(self.rows.terms[rows]).ravel()
        owners = self._universe.renamings_of(self.lower[rows]).ravel()
        distinct, first = np.unique(keys, return_index=True)
        self._members.add(self._universe.of_keys(distinct), owners[first])

    def join(self, row: int) -> None:
        """Takes a row as equal to the first form of its group."""
        self._merge(np.array([row]), self._root[[row]])

    def refuse(self, row: int) -> None:
        """Takes a row, and all that is joined with it, as different from the first form of its group."""
        self._refused.append(row)

    def apart(self) -> Ids:
        """The rows that may equal the first form of their group and are not known to."""
        label = self._label[: len(self.rows)]
        apart = label != self._label[self._root]
        if self._refused:
            apart &= ~np.isin(label, self._label[self._refused])
        return np.flatnonzero(apart)

    def first_form(self, row: int) -> tuple[bool, int]:
        """What a row is equal to: (True, a class of smaller terms) or (False, another row)."""
        if self.lower[row] >= 0:
            return True, int(self.lower[row])
        return False, int(np.flatnonzero(self._group == self._group[row])[0])
