"""An e-graph over the store of the search: a value class may be computed by several nodes at once.

A state says which node computes each class; here all that are known stand side by side (Willsey et al., "egg", POPL
2021). The graph of classes is kept free of cycles: a node that would let a class depend on itself is put on a list and
used no more for that class (Yang et al., "Equality Saturation for Tensor Graph Superoptimization", MLSys 2021).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from taso.backends.lowering import Group
from taso.graph.errors import GraphError
from taso.graph.operator import Attrs, Operator, Trait
from taso.graph.types import TensorType
from taso.rules.matcher import Match
from taso.search.state import Setting, State, StateView

Pair = tuple[int, int]
"""A class and a node that computes it."""


class EGraph:
    """Classes and all nodes known to compute them. Numbers are those of the store; a merged class has one of them."""

    def __init__(self, start: State) -> None:
        self.setting: Setting = start.setting
        self.start = start
        self.nodes: dict[int, tuple[int, ...]] = {}
        self.makers: dict[int, dict[int, None]] = {}
        self.readers: dict[int, dict[int, None]] = {}
        self.filtered: set[Pair] = set()
        self.made_by: dict[int, Match] = {}
        self.merges: list[tuple[Match, int]] = []
        self.members: dict[int, list[int]] = {}
        self.changed: dict[int, None] = {}
        self.age: dict[int, int] = {}
        self.size = 0
        self._parents: dict[int, int] = {}
        self._stale: list[int] = []
        self._match: Match | None = None
        for node in start.ordered():
            self._register(node, start.made[node])

    # ── classes ──────────────────────────────────────────────────────────────────────────────────────────────────

    def find(self, value: int) -> int:
        """The class that stands for `value` by now."""
        while value in self._parents:
            value = self._parents[value]
        return value

    @property
    def outputs(self) -> tuple[int, ...]:
        return tuple(self.find(c) for c in self.start.graph_outputs)

    def is_constant(self, value: int) -> bool:
        return self.setting.store.class_constant[value]

    def usable(self, value: int) -> list[int]:
        """The nodes that may be taken to compute a class."""
        return [n for n in self.makers.get(value, ()) if (value, n) not in self.filtered]

    def operands(self, node: int) -> list[int]:
        """Classes that a node reads, each once."""
        return list(dict.fromkeys(c for c in self.setting.store.entries[node].inputs if c is not None))

    def _register(self, node: int, classes: tuple[int, ...]) -> None:
        self.nodes[node] = classes
        self.age.setdefault(node, len(self.age))
        self.changed[node] = None
        self.size += not self.setting.store.entries[node].constant
        if self._match is not None:
            self.made_by.setdefault(node, self._match)
        operands = self.operands(node)
        for value in operands:
            self.readers.setdefault(value, {})[node] = None
        for value in classes:
            self.makers.setdefault(value, {})[node] = None
            if value in operands:
                self.filtered.add((value, node))

    def _forget(self, node: int) -> tuple[int, ...]:
        classes = self.nodes.pop(node)
        self.changed.pop(node, None)
        self.size -= not self.setting.store.entries[node].constant
        for value in self.operands(node):
            self.readers.get(value, {}).pop(node, None)
        for value in classes:
            self.makers.get(value, {}).pop(node, None)
        return classes

    # ── growing ──────────────────────────────────────────────────────────────────────────────────────────────────

    def merge(self, a: int, b: int) -> None:
        """Makes two classes one, which keeps the number of the constant or the older of them."""
        a, b = self.find(a), self.find(b)
        if a == b:
            return
        keep, gone = sorted((a, b), key=lambda c: (not self.is_constant(c), c))
        self._parents[gone] = keep
        self.members[keep] = [*self.members.get(keep, [keep]), *self.members.pop(gone, [gone])]
        self._stale.append(gone)
        if self._match is not None:
            self.merges.append((self._match, keep))
        for node in self.makers.pop(gone):
            self.nodes[node] = tuple(keep if c == gone else c for c in self.nodes[node])
            self.makers[keep][node] = None
            self.changed[node] = None
            if (gone, node) in self.filtered or keep in self.operands(node):
                self.filtered.add((keep, node))
        self.changed.update(dict.fromkeys(self.readers.get(keep, ())))

    def rebuild(self) -> None:
        """Names all nodes by the classes that stand for what they read; equal nodes become one."""
        while self._stale:
            gone = self._stale.pop()
            for node in list(self.readers.pop(gone, ())):
                if node in self.nodes:
                    self._renamed(node)

    def _renamed(self, node: int) -> None:
        store = self.setting.store
        entry = store.entries[node]
        inputs = tuple(self.find(c) if c is not None else None for c in entry.inputs)
        given = entry.types if entry.op.has(Trait.RANDOM) or entry.op.has(Trait.OPAQUE) else None
        fresh = store.intern(entry.op, entry.attrs, inputs, given, entry.origin)
        match, hidden = self.made_by.get(node), [c for c in self.nodes[node] if (c, node) in self.filtered]
        classes = self._forget(node)
        self.age[fresh] = min(self.age[node], self.age.get(fresh, self.age[node]))
        present = self.nodes.get(fresh)
        if present is None:
            for index, value in enumerate(classes):
                store.name(fresh, index, value)
            self._register(fresh, classes)
            if match is not None:
                self.made_by.setdefault(fresh, match)
            self.filtered.update((c, fresh) for c in hidden)
            return
        for value in classes:
            # a class must not be without a maker while it is merged
            self.makers.setdefault(value, {})
        for value, other in zip(classes, present, strict=True):
            self._merge_equal(value, other)

    def _merge_equal(self, a: int, b: int) -> None:
        match, self._match = self._match, None
        self.merge(a, b)
        self._match = match

    # ── what a rewrite asks for (`taso.search.rewrite.Rewritable`) ──────────────────────────────────────────────

    def add(
        self, op: Operator, attrs: Attrs, inputs: Sequence[int | None], wanted: Mapping[int, int], origin: str
    ) -> tuple[int, ...]:
        """Adds the node `op(inputs)` and gives the classes of its outputs; `wanted` are those it computes, too."""
        store = self.setting.store
        resolved = tuple(self.find(c) if c is not None else None for c in inputs)
        node = store.intern(op, attrs, resolved, origin=origin)
        if node not in self.nodes:
            classes = []
            for index in range(len(store.entries[node].types)):
                if index in wanted:
                    classes.append(self.find(wanted[index]))
                    store.name(node, index, classes[-1])
                else:
                    classes.append(self.find(store.natural(node, index)))
            if len(set(classes)) != len(classes):
                raise GraphError("a rewrite would give one value two places")
            self._register(node, tuple(classes))
        for index, value in wanted.items():
            self.merge(value, self.nodes[node][index])
        return self.nodes[node]

    def place_source(self, op: Operator, attrs: Attrs, types: tuple[TensorType, ...], label: str) -> tuple[int, ...]:
        """A new weight; `label` says what it holds."""
        store = self.setting.store
        node = store.intern(op, attrs, (), types, label=label)
        if node not in self.nodes:
            self._register(node, (self.find(store.natural(node, 0)),))
        return self.nodes[node]

    def begin(self, match: Match | None) -> None:
        """What is added from now on comes from `match`."""
        self._match = match

    # ── cycles ───────────────────────────────────────────────────────────────────────────────────────────────────

    def homes(self, constants: bool = False) -> dict[int, int]:
        """For each class a node that computes it from classes that come before it in the dictionary.

        A class that no node computes without going in a circle is not in it. With `constants`, only nodes that depend
        on weights alone are looked at.
        """
        homes: dict[int, int] = {}
        entries = self.setting.store.entries
        missing = {n: len(self.operands(n)) for n in self.nodes if entries[n].constant or not constants}
        ready = [n for n, count in missing.items() if not count]
        place = 0
        while place < len(ready):
            node = ready[place]
            place += 1
            for value in self.nodes[node]:
                if value in homes or (value, node) in self.filtered:
                    continue
                homes[value] = node
                for reader in self.readers.get(value, ()):
                    if reader in missing:
                        missing[reader] -= 1
                        if not missing[reader]:
                            ready.append(reader)
        return homes

    def filter_cycles(self) -> int:
        """Lists nodes until no class depends on itself through the others; gives how many were added to the list.

        Of the nodes of a cycle the newest is listed without which every class of it can still be computed.
        """
        count = 0
        homes = self.homes()
        while True:
            cycles = self._cycles()
            if not cycles:
                return count
            for cycle in cycles:
                if any(pair in self.filtered for pair in cycle):
                    continue
                spare = [p for p in cycle if homes.get(p[0]) != p[1]]
                self.filtered.add(max(spare, key=lambda p: (self.age[p[1]], p)))
                count += 1

    def _cycles(self) -> list[list[Pair]]:
        """One cycle for each edge that goes back in a walk of the graph; none where there are none."""
        found: list[list[Pair]] = []
        state: dict[int, int] = {}
        for root in self.makers:
            if root in state:
                continue
            path: list[Pair] = []
            stack: list[tuple[int, Iterator[Pair]]] = [(root, self._edges(root))]
            state[root] = 1
            while stack:
                value, edges = stack[-1]
                step = next(edges, None)
                if step is None:
                    state[value] = 2
                    stack.pop()
                    if path:
                        path.pop()
                    continue
                target, node = step
                if state.get(target) == 1:
                    start = next(i for i, (v, _) in enumerate(stack) if v == target)
                    found.append([*path[start:], (value, node)])
                elif target not in state:
                    state[target] = 1
                    path.append((value, node))
                    stack.append((target, self._edges(target)))
        return found

    def _edges(self, value: int) -> Iterator[Pair]:
        for node in self.usable(value):
            for operand in self.operands(node):
                yield operand, node

    def below(self) -> tuple[dict[int, int], dict[int, int]]:
        """For each class a bit of its own, and the bits of all classes that it may depend on, itself among them."""
        own = {value: 1 << i for i, value in enumerate(self.makers)}
        bits: dict[int, int] = {}
        for root in self.makers:
            stack = [(root, False)]
            while stack:
                value, ready = stack.pop()
                if ready:
                    total = own[value]
                    for operand, _ in self._edges(value):
                        total |= bits.get(operand, 0)
                    bits[value] = total
                elif value not in bits:
                    bits[value] = 0
                    stack.append((value, True))
                    stack.extend((o, False) for o, _ in self._edges(value) if o not in bits)
        return own, bits


class Spot(StateView):
    """The e-graph as one rewrite sees it: of all that could compute a value, the nodes of a match alone."""

    def __init__(self, egraph: EGraph, nodes: Sequence[int]) -> None:
        self.egraph = egraph
        self.setting = egraph.setting
        self._nodes = nodes
        self._makers: dict[int, int] = {}
        for node in reversed(nodes):
            self._makers.update(dict.fromkeys(egraph.nodes[node], node))
        self._readers: dict[int, tuple[int, ...]] = {}
        for node in nodes:
            for value in egraph.operands(node):
                self._readers[value] = (*self._readers.get(value, ()), node)
                if value in self._makers and self._makers[value] == node:
                    # the node stands for its own operand as well: another one of the match must make that
                    others = [n for n in nodes if n != node and value in egraph.nodes[n]]
                    self._makers[value] = others[0] if others else node
        self._memo: dict[int, int | None] = {}

    def producer(self, value: int) -> int:
        found = self._makers.get(value)
        return self._any_maker(value) if found is None else found

    def _any_maker(self, value: int) -> int:
        # a weight before what computes the same: its content can be looked at
        makers = self.egraph.makers[value]
        entries = self.setting.store.entries
        return next((n for n in makers if entries[n].op.name == "Weight"), next(iter(makers)))

    def outputs(self, node: int) -> tuple[int, ...]:
        return self.egraph.nodes[node]

    def consumers(self, value: int) -> tuple[int, ...]:
        return self._readers.get(value, ())

    def is_output(self, value: int) -> bool:
        # what is replaced stays beside what replaces it
        return False

    def is_live(self, node: int) -> bool:
        return node in self.egraph.nodes

    def live_nodes(self) -> Iterable[int]:
        return self._nodes

    def group_of(self, node: int) -> Group[int, int]:
        return self.setting.lowering.group(self, self.setting.lowering.anchor_of(self, node))

    def memo(self, node: int) -> dict[int, int | None]:
        return self._memo

    def add(
        self, op: Operator, attrs: Attrs, inputs: Sequence[int | None], wanted: Mapping[int, int], origin: str
    ) -> tuple[int, ...]:
        return self.egraph.add(op, attrs, inputs, wanted, origin)

    def place_source(self, op: Operator, attrs: Attrs, types: tuple[TensorType, ...], label: str) -> tuple[int, ...]:
        return self.egraph.place_source(op, attrs, types, label)

    def alias(self, value: int, target: int) -> None:
        self.egraph.merge(value, target)

    def resolve(self, value: int) -> int:
        return self.egraph.find(value)


__all__ = ["EGraph", "Pair", "Spot"]
