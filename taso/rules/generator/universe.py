"""All graphs of a few operators, as one table: what is equal is one class, and graphs are built from classes alone.

A *term* is a template applied to classes; a *class* is a set of terms that have the same value, named by its
fingerprint and represented by the first of them. Because a term's operands are classes, whose representatives contain
nothing that a smaller equation rewrites, no graph is ever built around a subgraph that has a simpler form. The size of
a term is the number of distinct operators of the graph that it stands for. Renaming the variables permutes the
classes, and only the least of all renamings of a term is kept.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import permutations, product
from math import prod

import numpy as np
from numpy.typing import NDArray

from taso.rules.generator.arithmetic import Fingerprints, Values, drawn, fingerprints
from taso.rules.generator.templates import Shape, Template

Ids = NDArray[np.int64]

CHUNK = 1 << 19
"""Elements of the values that are worked on at once."""

BLOCK = 1 << 16
"""Terms that are worked on at once."""

PIECE = 1 << 20
"""About how many pairs of classes make up a piece."""


@dataclass(frozen=True)
class Space:
    """What is enumerated: templates over variables of given shapes, up to `size` operators."""

    name: str
    templates: tuple[Template, ...]
    variables: tuple[tuple[str, Shape], ...]
    size: int

    @property
    def symbols(self) -> tuple[tuple[Template, int], ...]:
        """Each output of each template."""
        return tuple((t, port) for t in self.templates for port in range(t.outputs))

    def of_size(self, size: int) -> Space:
        """The same space up to another number of operators."""
        return replace(self, size=size)

    def renamings(self) -> list[tuple[int, ...]]:
        """All permutations of the variables that keep shapes; the identity first."""
        shapes = [shape for _, shape in self.variables]
        groups = [[i for i, s in enumerate(shapes) if s == shape] for shape in dict.fromkeys(shapes)]
        found = []
        for choice in product(*(permutations(g) for g in groups)):
            renamed = list(range(len(shapes)))
            for group, images in zip(groups, choice, strict=True):
                for source, image in zip(group, images, strict=True):
                    renamed[source] = image
            found.append(tuple(renamed))
        return found


@dataclass(frozen=True)
class Terms:
    """Rows of the table: a symbol and the classes of its operands, -1 where it has fewer than two."""

    symbol: Ids
    left: Ids
    right: Ids

    def __len__(self) -> int:
        return len(self.symbol)

    def __getitem__(self, rows: Ids | NDArray[np.bool_] | slice) -> Terms:
        return Terms(self.symbol[rows], self.left[rows], self.right[rows])

    @classmethod
    def joined(cls, parts: Sequence[Terms]) -> Terms:
        if not parts:
            return cls(*(np.empty(0, np.int64) for _ in range(3)))
        return cls(*(np.concatenate([getattr(p, f) for p in parts]) for f in ("symbol", "left", "right")))


@dataclass(frozen=True)
class Piece:
    """The terms of one symbol and size over operands of the sizes `left` and `right`, one of `parts` parts of them."""

    symbol: int
    size: int
    left: int
    right: int
    part: int
    parts: int


class Column:
    """A growing array; `rows` is what is filled."""

    def __init__(self, dtype: type[np.generic], inner: tuple[int, ...] = ()) -> None:
        self._data: NDArray[np.generic] = np.empty((1024, *inner), dtype)
        self._count = 0

    @property
    def rows(self) -> NDArray[np.generic]:
        return self._data[: self._count]

    def extend(self, values: NDArray[np.generic]) -> None:
        needed = self._count + len(values)
        if needed > len(self._data):
            grown = np.empty((max(needed, 2 * len(self._data)), *self._data.shape[1:]), self._data.dtype)
            grown[: self._count] = self._data[: self._count]
            self._data = grown
        self._data[self._count : needed] = values
        self._count = needed


class Universe:
    """The classes found so far, with their values, and what builds larger terms from them."""

    def __init__(self, space: Space) -> None:
        self.space = space
        self.symbols = space.symbols
        self.renamings = space.renamings()
        self._shapes: list[Shape] = []
        self._values: list[Column] = []
        self._columns = {n: Column(np.int64) for n in ("symbol", "left", "right", "size", "shape", "row", "node")}
        self._nodes = Column(np.int64, (max(space.size, 1),))
        self._renamed = Column(np.int64, (len(self.renamings),))
        self._prints = Column(np.uint64)
        self._order: Ids = np.empty(0, np.int64)
        self._images: Ids = np.empty((0, 0), np.int64)
        self._commutative = np.array([t.commutative for t, _ in self.symbols], bool)
        self._operators = 0
        self._operator_of: dict[tuple[int, int, int], int] = {}
        self._add_variables()

    # classes

    def __len__(self) -> int:
        return len(self._prints.rows)

    def column(self, name: str) -> Ids:
        """`symbol`, `left`, `right` (of the representative; -1 for variables), `size` or `shape` of each class."""
        return self._columns[name].rows.astype(np.int64, copy=False)

    def nodes(self) -> Ids:
        """Of each class, the operators of its representative, filled up with -1."""
        return self._nodes.rows.astype(np.int64, copy=False)

    def renamings_of(self, classes: Ids) -> Ids:
        """The classes under each renaming of the variables (along the second axis); -1 stays -1."""
        if len(self._images) != len(self) + 1:
            last = np.full((1, len(self.renamings)), -1)
            self._images = np.concatenate((self._renamed.rows.astype(np.int64, copy=False), last))
        return self._images[classes]

    def find(self, prints: Fingerprints) -> Ids:
        """The class of each fingerprint, -1 where there is none."""
        known = self._prints.rows[self._order]
        if not len(known):
            return np.full(len(prints), -1)
        places = np.minimum(np.searchsorted(known, prints), len(known) - 1)
        return np.where(known[places] == prints, self._order[places], -1)

    def _add_variables(self) -> None:
        values = [drawn(shape, 100 + i)[None] for i, (_, shape) in enumerate(self.space.variables)]
        count = len(values)
        none = np.full(count, -1)
        nodes = np.full((count, max(self.space.size, 1)), -1)
        prints = np.concatenate([fingerprints(v) for v in values])
        self._append(Terms(none, none, none), values, prints, 0, none, nodes)
        self._renamed.extend(np.array(self.renamings).T)

    def add(self, terms: Terms, prints: Fingerprints, size: int) -> tuple[Terms, Ids]:
        """Makes classes of terms of one size, the first term of a new one its representative; gives each term's class.

        A renaming of a graph has as many operators, but may be counted as more where its operands are represented by
        graphs that share less. It is then not among the terms, and is added to them.
        """
        first = self._first_new(prints)
        distinct = np.unique(self.all_keys(terms[first]))
        more = self.of_keys(np.setdiff1d(distinct, self.keys(terms), assume_unique=True))
        terms, prints = Terms.joined([terms, more]), np.concatenate((prints, self.prints(more)))
        first, start = self._first_new(prints), len(self)
        self._represent(terms[first], prints[first], size)
        classes, keys = self.find(prints), self.keys(terms)
        order = np.argsort(keys)
        made = Terms(*(self.column(name)[start:] for name in ("symbol", "left", "right")))
        self._renamed.extend(looked_up(keys[order], classes[order], self.all_keys(made)))
        return terms, classes

    def _first_new(self, prints: Fingerprints) -> Ids:
        """The first places of fingerprints that no class has yet."""
        new = np.flatnonzero(self.find(prints) < 0)
        return new[np.sort(np.unique(prints[new], return_index=True)[1])]

    def _represent(self, terms: Terms, prints: Fingerprints, size: int) -> None:
        operators, nodes = self._operators_of(terms)
        order = [np.empty(0, np.int64)]
        values: list[Values] = []
        for rows, found in self._evaluated(terms):
            order.append(rows)
            values.extend(found[i : i + 1] for i in range(len(rows)))
        places = np.concatenate(order)
        self._append(terms[places], values, prints[places], size, operators[places], nodes[places])

    def _append(
        self, terms: Terms, values: Sequence[Values], prints: Fingerprints, size: int, operators: Ids, nodes: Ids
    ) -> None:  # fmt: skip
        shapes = np.array([self._shape_number(v.shape[1:]) for v in values], np.int64)
        rows = np.empty(len(values), np.int64)
        for number in np.unique(shapes):
            places = np.flatnonzero(shapes == number)
            rows[places] = len(self._values[int(number)].rows) + np.arange(len(places))
            self._values[int(number)].extend(np.concatenate([values[i] for i in places.tolist()]))
        for name, column in (
            ("symbol", terms.symbol), ("left", terms.left), ("right", terms.right), ("row", rows), ("shape", shapes),
            ("size", np.full(len(values), size)), ("node", operators),
        ):  # fmt: skip
            self._columns[name].extend(column)
        self._nodes.extend(nodes)
        self._prints.extend(prints)
        self._order = np.argsort(self._prints.rows, kind="stable")

    def _shape_number(self, shape: Shape) -> int:
        if shape not in self._shapes:
            self._shapes.append(shape)
            self._values.append(Column(np.int32, shape))
        return self._shapes.index(shape)

    def _operators_of(self, terms: Terms) -> tuple[Ids, Ids]:
        """A number for each term's own operator, shared by its outputs, and all operators of its graph."""
        own = np.empty(len(terms), np.int64)
        for i, (symbol, left, right) in enumerate(
            zip(terms.symbol.tolist(), terms.left.tolist(), terms.right.tolist(), strict=True)
        ):
            template, port = self.symbols[symbol]
            key = (symbol - port, left, right)
            if template.outputs == 1 or key not in self._operator_of:
                self._operators += 1
                if template.outputs > 1:
                    self._operator_of[key] = self._operators
            own[i] = self._operators if template.outputs == 1 else self._operator_of[key]
        return own, self._united(terms.left, terms.right, own)

    def _united(self, left: Ids, right: Ids, own: Ids) -> Ids:
        """The operators below two classes together with one more, each once, filled up with -1."""
        nodes = self.nodes()
        empty = np.full((1, nodes.shape[1]), -1)
        padded = np.concatenate((nodes, empty))
        every = np.concatenate((padded[left], padded[right], own[:, None]), 1)
        every = -np.sort(-every, 1)
        every[:, 1:][every[:, 1:] == every[:, :-1]] = -1
        return -np.sort(-every, 1)[:, : nodes.shape[1]]

    def united_size(self, left: Ids, right: Ids) -> Ids:
        """How many operators the representatives of two classes have together."""
        nodes = self.nodes()
        a, b = nodes[left], nodes[right]
        shared = np.zeros(len(left), np.int64)
        for i in range(nodes.shape[1]):
            shared += ((b == a[:, i : i + 1]) & (a[:, i : i + 1] >= 0)).any(1)
        sizes = self.column("size")
        return sizes[left] + sizes[right] - shared

    def counted(self, terms: Terms) -> Ids:
        """How many operators terms have as they are enumerated, from the representatives of their operands."""
        inner = np.zeros(len(terms), np.int64)
        one, two = (terms.left >= 0) & (terms.right < 0), terms.right >= 0
        inner[one] = self.column("size")[terms.left[one]]
        inner[two] = self.united_size(terms.left[two], terms.right[two])
        return inner + 1

    # terms

    def settled(self, terms: Terms) -> Terms:
        """Operands of commutative operators in order."""
        swap = self._commutative[terms.symbol] & (terms.left > terms.right)
        if not swap.any():
            return terms
        return Terms(
            terms.symbol, np.where(swap, terms.right, terms.left), np.where(swap, terms.left, terms.right)
        )

    def images(self, terms: Terms) -> Terms:
        """The terms under each renaming of the variables, one after the other, written as they are enumerated."""
        left, right = self.renamings_of(terms.left).ravel(), self.renamings_of(terms.right).ravel()
        return self.settled(Terms(np.repeat(terms.symbol, len(self.renamings)), left, right))

    def keys(self, terms: Terms) -> Ids:
        """A number for each term, in the order of enumeration."""
        count = len(self) + 1
        return (terms.symbol * count + terms.left + 1) * count + terms.right + 1

    def all_keys(self, terms: Terms) -> Ids:
        """The keys of each term under each renaming of the variables (along the second axis)."""
        return self.keys(self.images(terms)).reshape(len(terms), len(self.renamings))

    def of_keys(self, keys: Ids) -> Terms:
        """The terms with these keys."""
        count = len(self) + 1
        rest, right = np.divmod(keys, count)
        symbol, left = np.divmod(rest, count)
        return Terms(symbol, left - 1, right - 1)

    def prints(self, terms: Terms) -> Fingerprints:
        """The fingerprint of each term's value."""
        found = np.empty(len(terms), np.uint64)
        for rows, values in self._evaluated(terms):
            found[rows] = fingerprints(values)
        return found

    def _evaluated(self, terms: Terms) -> Iterator[tuple[Ids, Values]]:
        """Rows of `terms` with their values, a few at a time; rows of one symbol and shape together."""
        shapes = np.append(self.column("shape"), -1)
        groups = (terms.symbol * (len(self._shapes) + 1) + shapes[terms.left] + 1) * (len(self._shapes) + 1)
        groups = groups + shapes[terms.right] + 1
        for group in np.unique(groups):
            rows = np.flatnonzero(groups == group)
            template, port = self.symbols[terms.symbol[rows[0]]]
            operands = [self._shapes[shapes[c[rows[0]]]] for c in (terms.left, terms.right)[: template.arity]]
            shape = template.shape(*operands)
            step = max(1, CHUNK // max(1, *map(prod, (*operands, shape or (1,)))))
            for start in range(0, len(rows), step):
                some = rows[start : start + step]
                given = [self.values(c[some]) for c in (terms.left, terms.right)[: template.arity]]
                made = template.value(*given)[port]
                yield some, np.broadcast_to(made, (len(some), *made.shape[1:]))

    def values(self, classes: Ids) -> Values:
        """The values of classes that have one shape."""
        number = int(self.column("shape")[classes[0]])
        return np.asarray(self._values[number].rows[self.column("row")[classes]], np.int64)

    # enumeration

    def pieces(self, size: int) -> list[Piece]:
        """What the terms of a size are made in: pieces that do not depend on one another."""
        found = []
        for symbol, (template, _) in enumerate(self.symbols):
            if template.arity < 2:
                found.append(Piece(symbol, size, size - 1, -1, 0, 1))
                continue
            for left, right in product(range(size), range(size)):
                if left + right == size - 1:
                    pairs = int((self.column("size") == left).sum()) * int((self.column("size") == right).sum())
                    parts = 1 + pairs // PIECE
                elif left + right > size - 1:
                    parts = 1
                else:
                    continue
                found.extend(Piece(symbol, size, left, right, part, parts) for part in range(parts))
        return found

    def candidates(self, size: int) -> Iterator[Terms]:
        """All terms of exactly this many operators over the classes of fewer."""
        for piece in self.pieces(size):
            yield from self.of_piece(piece)

    def of_piece(self, piece: Piece) -> Iterator[Terms]:
        """The terms of a piece, a few at a time."""
        template, _ = self.symbols[piece.symbol]
        if template.arity == 0:
            if piece.size == 1:
                yield Terms(np.array([piece.symbol]), np.array([-1]), np.array([-1]))
        elif template.arity == 1:
            yield from self._unary(piece.symbol, template, piece.size)
        else:
            yield from self._binary(template, piece)

    def _of(self, size: int) -> dict[int, Ids]:
        """The classes of a size, by shape."""
        classes = np.flatnonzero(self.column("size") == size)
        shapes = self.column("shape")[classes]
        return {int(s): classes[shapes == s] for s in np.unique(shapes)}

    def _unary(self, symbol: int, template: Template, size: int) -> Iterator[Terms]:
        for shape, classes in self._of(size - 1).items():
            if template.shape(self._shapes[shape]) is not None:
                yield Terms(np.full(len(classes), symbol), classes, np.full(len(classes), -1))

    def _binary(self, template: Template, piece: Piece) -> Iterator[Terms]:
        for left, right in self._pairs(template, piece):
            if template.commutative:
                kept = left <= right
                left, right = left[kept], right[kept]
            kept = self.united_size(left, right) == piece.size - 1
            if kept.any():
                yield Terms(np.full(int(kept.sum()), piece.symbol), left[kept], right[kept])

    def _pairs(self, template: Template, piece: Piece) -> Iterator[tuple[Ids, Ids]]:
        """Pairs of classes that the template takes and that may have as many operators in common as the size asks."""
        if piece.left + piece.right == piece.size - 1:
            for a, lefts in self._of(piece.left).items():
                for b, rights in self._of(piece.right).items():
                    if template.shape(self._shapes[a], self._shapes[b]) is not None:
                        yield from _products(lefts[piece.part :: piece.parts], rights)
            return
        left, right = self._overlapping(piece.left, piece.right, piece.left + piece.right - (piece.size - 1))
        shapes = self.column("shape")
        both = shapes[left] * len(self._shapes) + shapes[right]
        for pair in np.unique(both):
            a, b = divmod(int(pair), len(self._shapes))
            if template.shape(self._shapes[a], self._shapes[b]) is not None:
                rows = np.flatnonzero(both == pair)
                for start in range(0, len(rows), BLOCK):
                    some = rows[start : start + BLOCK]
                    yield left[some], right[some]

    def _overlapping(self, left_size: int, right_size: int, excess: int) -> tuple[Ids, Ids]:
        """Pairs of classes of these sizes that share at least one operator; where one lies within the other, all."""
        if excess >= min(left_size, right_size):
            if left_size >= right_size:
                return self._within(left_size, right_size)
            right, left = self._within(right_size, left_size)
            return left, right
        owners, members = self._holding(left_size)
        others, parts = self._holding(right_size)
        order = np.argsort(parts, kind="stable")
        others, parts = others[order], parts[order]
        start, end = np.searchsorted(parts, members), np.searchsorted(parts, members, "right")
        left = np.repeat(owners, end - start)
        right = others[ranges(start, end)]
        pairs = np.unique(left * len(self) + right)
        return pairs // len(self), pairs % len(self)

    def _holding(self, size: int) -> tuple[Ids, Ids]:
        """Each class of a size beside each operator that it has."""
        classes = np.flatnonzero(self.column("size") == size)
        nodes = self.nodes()[classes]
        filled = nodes >= 0
        return np.repeat(classes, filled.sum(1)), nodes[filled]

    def _within(self, outer: int, inner: int) -> tuple[Ids, Ids]:
        """Classes of size `outer` beside those of size `inner` whose own operator is among theirs."""
        owners, members = self._holding(outer)
        classes = np.flatnonzero(self.column("size") == inner)
        own = self.column("node")[classes]
        order = np.argsort(own, kind="stable")
        classes, own = classes[order], own[order]
        start, end = np.searchsorted(own, members), np.searchsorted(own, members, "right")
        return np.repeat(owners, end - start), classes[ranges(start, end)]


def looked_up(keys: Ids, values: Ids, wanted: Ids) -> Ids:
    """Of each wanted key its value, -1 where it is missing; `keys` ascend."""
    if not len(keys):
        return np.full(wanted.shape, -1)
    places = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
    return np.where(keys[places] == wanted, values[places], -1)


def _products(left: Ids, right: Ids) -> Iterator[tuple[Ids, Ids]]:
    step = max(1, BLOCK // len(right))
    for start in range(0, len(left), step):
        some = left[start : start + step]
        yield np.repeat(some, len(right)), np.tile(right, len(some))


def ranges(start: Ids, end: Ids) -> Ids:
    """The numbers from each start up to its end, one range after the other."""
    counts = end - start
    if not counts.sum():
        return np.empty(0, np.int64)
    first = np.repeat(start - np.concatenate(([0], np.cumsum(counts)[:-1])), counts)
    return first + np.arange(counts.sum())
