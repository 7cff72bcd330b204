"""States of the search, as differences over one store.

A `State` says which node computes each live value class. A `Draft` is a state with a rewrite applied, held as what
differs from its parent: cost, fingerprint and live nodes follow in time proportional to the rewrite and its
neighbourhood. Nothing is copied until a draft is taken (`Draft.commit`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TypeVar

from taso.backends.lowering import PLAIN, Group, Lowering, change_of_layout, is_view
from taso.graph.errors import SearchError
from taso.graph.onnx_weights import Filled
from taso.graph.operator import Array, Attrs, Operator, Trait, Weight
from taso.graph.types import TensorType
from taso.search.costs import Costs
from taso.search.store import Store

_MASK = (1 << 64) - 1

NODE_COST = 1e-9
"""Seconds charged for each run-time node: of two graphs that run equally long the smaller one is better."""


class Cycle(Exception):
    """A rewrite would make a node depend on itself."""


@dataclass
class Setting:
    """What all states of a search share."""

    store: Store
    lowering: Lowering
    costs: Costs
    _group_costs: dict[tuple[tuple[int, ...], int, Hashable], float] = field(default_factory=dict)
    _changeable: dict[int, bool] = field(default_factory=dict)
    _asked: dict[tuple[int, int], tuple[tuple[int, str], ...]] = field(default_factory=dict)

    def group_cost(self, view: StateView, group: Group[int, int]) -> float:
        """Seconds of a kernel; it depends on the nodes in it, the class it ends in, and what lowering looks at beside.
        """
        outs = view.outputs(group.last)
        key = (group.nodes, outs[0] if outs else -1, self.lowering.beside(view, group))
        found = self._group_costs.get(key)
        if found is None:
            kernel, _ = self.lowering.kernel(view, group)
            found = self._group_costs[key] = 0.0 if is_view(kernel) else self.costs.kernel(kernel)
        return found

    def may_change_layout(self, value: int) -> bool:
        """Whether there is more than one layout that the value could lie in."""
        found = self._changeable.get(value)
        if found is None:
            store = self.store
            found = self.lowering.layouts.applies(store.class_sized[value]) and not store.class_constant[value]
            self._changeable[value] = found
        return found

    def asked(self, view: StateView, node: int, out: int) -> tuple[tuple[int, str], ...]:
        """In which layout a node of a kernel that ends in the class `out` reads what could lie in several."""
        found = self._asked.get((node, out))
        if found is None:
            layouts, wanted = self.store.class_layouts, self.lowering.layouts.wanted
            op, attrs = view.op(node), view.attrs(node)
            found = self._asked[node, out] = tuple(
                (value, wanted(op, attrs, position, view.type(value), layouts[value], layouts[out]))
                for position, value in enumerate(view.inputs(node))
                if value is not None and self.may_change_layout(value)
            )
        return found

    def relayout_cost(self, view: StateView, value: int) -> float:
        """Seconds of the changes of layout that readers of `value` ask for, each once however many ask for it."""
        if not self.may_change_layout(value):
            return 0.0
        layout = self.store.class_layouts[value]
        wanted: dict[str, None] = {PLAIN: None} if view.is_output(value) else {}
        for node in view.consumers(value):
            out = view.outputs(view.group_of(node).last)[0]
            wanted.update((w, None) for v, w in self.asked(view, node, out) if v == value)
        changes = [w for w in wanted if w != layout]
        narrow = bool(changes) and self.lowering.narrow(view, value)
        return sum(self.costs.kernel(change_of_layout(view.type(value), layout, w, narrow)) for w in changes)


class StateView(ABC):
    """What states and drafts have in common: the graph as matching and lowering see it."""

    setting: Setting

    @abstractmethod
    def producer(self, value: int) -> int: ...

    @abstractmethod
    def outputs(self, node: int) -> tuple[int, ...]: ...

    @abstractmethod
    def consumers(self, value: int) -> tuple[int, ...]: ...

    @abstractmethod
    def is_output(self, value: int) -> bool: ...

    @abstractmethod
    def is_live(self, node: int) -> bool: ...

    @abstractmethod
    def live_nodes(self) -> Iterable[int]: ...

    @abstractmethod
    def group_of(self, node: int) -> Group[int, int]:
        """The kernel that a run-time node runs in."""

    def op(self, node: int) -> Operator:
        return self.setting.store.entries[node].op

    def attrs(self, node: int) -> Attrs:
        return self.setting.store.entries[node].attrs

    def inputs(self, node: int) -> tuple[int | None, ...]:
        return self.setting.store.entries[node].inputs

    def is_constant(self, value: int) -> bool:
        return self.setting.store.class_constant[value]

    def type(self, value: int) -> TensorType:
        return self.setting.store.class_sized[value]

    def symbolic_type(self, value: int) -> TensorType:
        return self.setting.store.class_types[value]

    def layout(self, value: int) -> str:
        return self.setting.store.class_layouts[value]

    @abstractmethod
    def memo(self, node: int) -> dict[int, int | None]: ...

    def content(self, value: int) -> Array | None:
        """The values of a small weight, None for anything else."""
        entry = self.setting.store.entries[self.producer(value)]
        weight = entry.attrs.get("data")
        if not isinstance(weight, Weight) or not weight.type.static or weight.type.size > MOST_CONTENT:
            return None
        return weight.array()


MOST_CONTENT = 1 << 16
"""Elements of a weight that a condition may look at."""


def _distinct(inputs: Iterable[int | None]) -> list[int]:
    return list(dict.fromkeys(c for c in inputs if c is not None))


@dataclass
class State(StateView):
    """A whole graph: live nodes, the classes they compute, who reads them, and what it costs (seconds).

    `size` is the number of nodes that do work at run time. `fingerprint` names the graph by content, the same in every
    process; `witness` names it by numbers of the store, so that of two graphs that differ hardly ever both are equal.
    """

    setting: Setting
    made: dict[int, tuple[int, ...]]
    producers: dict[int, int]
    readers: dict[int, tuple[int, ...]]
    graph_outputs: tuple[int, ...]
    kernel_costs: dict[int, float] = field(default_factory=dict)
    layout_costs: dict[int, float] = field(default_factory=dict)
    cost: float = 0.0
    fingerprint: int = 0
    witness: int = 0
    constant_bytes: int = 0
    size: int = 0
    _memo: dict[int, int | None] = field(default_factory=dict)
    _groups: dict[int, Group[int, int]] = field(default_factory=dict)
    _order: dict[int, float] | None = None

    def memo(self, node: int) -> dict[int, int | None]:
        return self._memo

    def group_of(self, node: int) -> Group[int, int]:
        found = self._groups.get(node)
        if found is None:
            lowering = self.setting.lowering
            found = lowering.group(self, lowering.anchor_of(self, node))
            self._groups.update(dict.fromkeys(found.nodes, found))
        return found

    @cached_property
    def output_set(self) -> frozenset[int]:
        return frozenset(self.graph_outputs)

    @property
    def order(self) -> dict[int, float]:
        """Places of the run-time nodes in an order with producers first; successors keep most of it."""
        if self._order is None:
            run_time = {n: None for n in self.made if is_costed(self, n)}
            self._order = {n: float(i) for i, n in enumerate(self._sorted(run_time))}
        return self._order

    def producer(self, value: int) -> int:
        return self.producers[value]

    def outputs(self, node: int) -> tuple[int, ...]:
        return self.made[node]

    def consumers(self, value: int) -> tuple[int, ...]:
        return self.readers.get(value, ())

    def is_output(self, value: int) -> bool:
        return value in self.output_set

    def is_live(self, node: int) -> bool:
        return node in self.made

    def live_nodes(self) -> Iterable[int]:
        return self.made

    def ordered(self) -> list[int]:
        """Live nodes, producers first; the same for the same state."""
        return self._sorted(self.made)

    def _sorted(self, nodes: Mapping[int, object]) -> list[int]:
        """These of the live nodes, producers first; raises `Cycle` where one depends on itself."""
        placed: dict[int, None] = {}
        open_nodes: set[int] = set()
        entries = self.setting.store.entries
        stack = [(n, False) for n in sorted(nodes, reverse=True)]
        while stack:
            node, ready = stack.pop()
            if ready:
                open_nodes.discard(node)
                placed[node] = None
            elif node in open_nodes:
                raise Cycle("a node depends on itself")
            elif node not in placed:
                open_nodes.add(node)
                stack.append((node, True))
                needed = (self.producers[c] for c in reversed(_distinct(entries[node].inputs)))
                stack.extend((n, False) for n in needed if n in nodes and n not in placed)
        return list(placed)


def initial_state(setting: Setting, nodes: Sequence[int], outputs: Sequence[int]) -> State:
    """The state of a graph whose nodes are all natural, inputs that nobody reads among them."""
    store = setting.store
    made: dict[int, tuple[int, ...]] = {}
    producers: dict[int, int] = {}
    for node in nodes:
        classes = tuple(store.natural(node, i) for i in range(len(store.entries[node].types)))
        made[node] = classes
        producers.update(dict.fromkeys(classes, node))
    return _recosted(State(setting, made, producers, _readers(store, made), tuple(outputs)))


def _readers(store: Store, nodes: Iterable[int]) -> dict[int, tuple[int, ...]]:
    """For each class the nodes that read it."""
    found: dict[int, list[int]] = {}
    for node in nodes:
        for value in _distinct(store.entries[node].inputs):
            found.setdefault(value, []).append(node)
    return {value: tuple(readers) for value, readers in found.items()}


def _recosted(state: State) -> State:
    """Everything incremental computed from scratch."""
    setting, store = state.setting, state.setting.store
    state.size = sum(is_costed(state, n) for n in state.made)
    state.kernel_costs, state.layout_costs, state.fingerprint, state.witness = {}, {}, 0, 0
    for node in state.made:
        if is_costed(state, node):
            state.fingerprint = (state.fingerprint + _node_hash(state, node)) & _MASK
            state.witness = (state.witness + _node_witness(state, node)) & _MASK
            group = state.group_of(node)
            if group.anchor not in state.kernel_costs:
                state.kernel_costs[group.anchor] = setting.group_cost(state, group)
    for value in state.producers:
        cost = setting.relayout_cost(state, value)
        if cost:
            state.layout_costs[value] = cost
    state.fingerprint = (state.fingerprint + _outputs_hash(state, state.graph_outputs)) & _MASK
    state.witness = (state.witness + _outputs_witness(state.graph_outputs)) & _MASK
    state.cost = sum(state.kernel_costs.values()) + sum(state.layout_costs.values()) + NODE_COST * state.size
    state.constant_bytes = sum(_folded_bytes(state, v) for v in state.producers)
    if len(store.entries) < len(state.made):
        raise SearchError("a state holds nodes that its store does not know")
    return state


def recomputed(state: State) -> State:
    """A copy of `state` with every incremental quantity computed anew, for tests to compare with."""
    readers = _readers(state.setting.store, state.ordered())
    return _recosted(State(state.setting, dict(state.made), dict(state.producers), readers, state.graph_outputs))


def check(state: State) -> None:
    """Compares every incremental quantity with its value from scratch; `SearchError` names the first that differs."""
    fresh = recomputed(state)
    live = {v for v, n in state.producers.items() if n not in state.made or v not in state.made[n]}
    if live:
        raise SearchError(f"classes {sorted(live)} have producers that do not compute them")
    for name, a, b in (
        ("readers", {v: set(r) for v, r in state.readers.items() if r}, {v: set(r) for v, r in fresh.readers.items()}),
        ("fingerprint", state.fingerprint, fresh.fingerprint),
        ("witness", state.witness, fresh.witness),
        ("kernel costs", state.kernel_costs, fresh.kernel_costs),
        ("layout costs", state.layout_costs, fresh.layout_costs),
        ("constant bytes", state.constant_bytes, fresh.constant_bytes),
        ("size", state.size, fresh.size),
        ("kernels", *({n: s.group_of(n) for n in state.made if is_costed(state, n)} for s in (state, fresh))),
        ("nodes in order", set(state.order), set(fresh.order)),
    ):
        if a != b:
            raise SearchError(f"the incremental {name} of a state differ from those computed anew: {a} and {b}")
    if abs(state.cost - fresh.cost) > 1e-9 * max(fresh.cost, 1e-6):
        raise SearchError(f"the incremental cost {state.cost} of a state is not {fresh.cost}")
    for node in state.order:
        for value in _distinct(state.inputs(node)):
            if state.order.get(state.producers[value], -1.0) >= state.order[node]:
                raise SearchError(f"the order kept of a state has node {node} before what it reads")


def is_costed(view: StateView, node: int) -> bool:
    """Whether a node does work at run time."""
    entry = view.setting.store.entries[node]
    return not entry.constant and not entry.op.has(Trait.SOURCE)


def _node_hash(view: StateView, node: int) -> int:
    # which classes a node defines belongs to the state, so it belongs to the fingerprint
    store = view.setting.store
    value = store.entries[node].hash
    for place, c in enumerate(view.outputs(node)):
        value = (value * 0x100000001B3 ^ (store.class_hashes[c] + place)) & _MASK
    return value * 0xD6E8FEB86659FD93 & _MASK


def _outputs_hash(view: StateView, outputs: Sequence[int]) -> int:
    value = 0
    for c in outputs:
        value = (value * 0x100000001B3 + view.setting.store.class_hashes[c]) & _MASK
    return value


def _node_witness(view: StateView, node: int) -> int:
    # numbers of nodes and classes name them exactly, and nothing here is shared with the fingerprint
    value = node + 1
    for c in view.outputs(node):
        value = ((value ^ value >> 29) * 0xBF58476D1CE4E5B9 + c + 1) & _MASK
    return (value ^ value >> 32) * 0x94D049BB133111EB & _MASK


def _outputs_witness(outputs: Sequence[int]) -> int:
    # a sum over places, so that what one rewrite changes of it does not depend on another's
    total = 0
    for place, c in enumerate(outputs, 1):
        value = place << 32 | c + 1
        value = ((value ^ value >> 29) * 0xBF58476D1CE4E5B9) & _MASK
        total += ((value ^ value >> 31) * 0x94D049BB133111EB) & _MASK
    return total & _MASK


def _folded_bytes(view: StateView, value: int) -> int:
    """Bytes of a constant that run-time nodes read; 0 of one that a file holds as a shape and an element."""
    store = view.setting.store
    if not store.class_constant[value]:
        return 0
    weight = store.entries[view.producer(value)].attrs.get("data")
    if isinstance(weight, Weight) and isinstance(weight.original, Filled):
        return 0
    if not any(not store.entries[n].constant for n in view.consumers(value)):
        return 0
    t = store.class_sized[value]
    return t.nbytes if t.static and t.other is None else 0


class Draft(StateView):
    """A state with one rewrite applied, as what differs from `parent`."""

    def __init__(self, parent: State) -> None:
        self.parent = parent
        self.setting = parent.setting
        self.made: dict[int, tuple[int, ...] | None] = {}
        self.producers: dict[int, int] = {}
        self.readers: dict[int, tuple[int, ...]] = {}
        self.aliases: dict[int, int] = {}
        self.graph_outputs = parent.graph_outputs
        self.new_nodes: list[int] = []
        # what follows is made once, when the rewrite is complete
        self._changed: list[int] | None = None
        self._touched: dict[int, None] | None = None
        self._costs: tuple[dict[int, float | None], dict[int, float]] | None = None
        self._memo: dict[int, int | None] = {}
        self._groups_here: dict[int, Group[int, int]] = {}
        self._looked_at: set[int] = set()
        self._crowded: dict[int, int] = {}

    # ── the graph ────────────────────────────────────────────────────────────────────────────────────────────────

    def producer(self, value: int) -> int:
        found = self.producers.get(value)
        return self.parent.producers[value] if found is None else found

    def outputs(self, node: int) -> tuple[int, ...]:
        found = self.made.get(node)
        return self.parent.made[node] if found is None else found

    def consumers(self, value: int) -> tuple[int, ...]:
        found = self.readers.get(value)
        return self.parent.readers.get(value, ()) if found is None else found

    def is_output(self, value: int) -> bool:
        if self.graph_outputs is self.parent.graph_outputs:
            return value in self.parent.output_set
        return value in self.graph_outputs

    def is_live(self, node: int) -> bool:
        return self.made[node] is not None if node in self.made else node in self.parent.made

    def group_of(self, node: int) -> Group[int, int]:
        found = self._groups_here.get(node)
        return self.parent.group_of(node) if found is None else found

    def memo(self, node: int) -> dict[int, int | None]:
        return self._memo if node in self.touched() else self.parent._memo

    def is_defined(self, value: int) -> bool:
        """Whether some live node computes the class."""
        node = self.producers.get(value, self.parent.producers.get(value))
        return node is not None and self.is_live(node) and value in self.outputs(node)

    def resolve(self, value: int) -> int:
        while value in self.aliases:
            value = self.aliases[value]
        return value

    def live_nodes(self) -> Iterable[int]:
        return [n for n in dict.fromkeys([*self.parent.made, *self.made]) if self.is_live(n)]

    # ── rewriting ────────────────────────────────────────────────────────────────────────────────────────────────

    def add(
        self, op: Operator, attrs: Attrs, inputs: Sequence[int | None], wanted: Mapping[int, int], origin: str
    ) -> tuple[int, ...]:
        """Adds the node `op(inputs)` and gives the classes of its outputs.

        `wanted` maps output indices to the classes they are to define from now on. A node that is there already, or
        whose values are computed otherwise, is not added twice: the wanted classes become aliases.
        """
        store = self.setting.store
        resolved = tuple(self.resolve(c) if c is not None else None for c in inputs)
        node = store.intern(op, attrs, resolved, origin=origin)
        if self.is_live(node):
            present = self.outputs(node)
            for index, value in wanted.items():
                self.alias(value, present[index])
            return tuple(self.resolve(c) for c in self.outputs(node)) if self.is_live(node) else present
        classes = []
        for index in range(len(store.entries[node].types)):
            if index in wanted:
                value = self.resolve(wanted[index])
                store.name(node, index, value)
            else:
                value = store.natural(node, index)
            classes.append(value)
        if not wanted and all(self.is_defined(self.resolve(c)) for c in classes):
            return tuple(self.resolve(c) for c in classes)
        if len(set(classes)) != len(classes):
            raise Cycle("a rewrite would give one value two places")
        self._place(node, tuple(classes))
        return self.outputs(node)

    def place_source(
        self, op: Operator, attrs: Attrs, types: tuple[TensorType, ...], label: str
    ) -> tuple[int, ...]:
        """A new weight; `label` says what it holds."""
        node = self.setting.store.intern(op, attrs, (), types, label=label)
        if not self.is_live(node):
            self._place(node, (self.setting.store.natural(node, 0),))
        return self.outputs(node)

    def _place(self, node: int, classes: tuple[int, ...]) -> None:
        self.made[node] = classes
        self.new_nodes.append(node)
        for value in _distinct(self.inputs(node)):
            self.readers[value] = (*self.consumers(value), node)
        for value in classes:
            old = self.producers.get(value, self.parent.producers.get(value))
            self.producers[value] = node
            if old is not None and old != node and self.is_live(old):
                self._retire(old)

    def alias(self, value: int, target: int) -> None:
        """From now on `target` stands for `value`, whose readers read it instead."""
        value, target = self.resolve(value), self.resolve(target)
        if value == target:
            return
        old = self.producer(value)
        self.aliases[value] = target
        if self.is_output(value):
            self.graph_outputs = tuple(target if c == value else c for c in self.graph_outputs)
        for reader in self.consumers(value):
            if self.is_live(reader):
                self._redirect(reader)
        self._retire(old)

    def _redirect(self, node: int) -> None:
        """Replaces a node by itself on resolved inputs; its outputs keep their classes, or merge with equal ones."""
        store = self.setting.store
        entry = store.entries[node]
        inputs = tuple(self.resolve(c) if c is not None else None for c in entry.inputs)
        if inputs == entry.inputs:
            return
        classes = self.outputs(node)
        if entry.op.has(Trait.RANDOM) or entry.op.has(Trait.OPAQUE):
            fresh = store.intern(entry.op, entry.attrs, inputs, entry.types, entry.origin)
        else:
            fresh = store.intern(entry.op, entry.attrs, inputs, origin=entry.origin)
        if self.is_live(fresh):
            for value, present in zip(classes, self.outputs(fresh), strict=True):
                self.alias(value, present)
            self._retire(node)
            return
        for index, value in enumerate(classes):
            store.name(fresh, index, value)
        self._place(fresh, classes)

    def _retire(self, node: int) -> None:
        """Removes a node none of whose outputs is wanted any more, and what only it needed."""
        if not self.is_live(node) or self.op(node).name == "Input":
            return
        for value in self.outputs(node):
            computed_here = self.producer(value) == node and value not in self.aliases
            if computed_here and (self.is_output(value) or self.consumers(value)):
                return
        self._remove(node)

    def _remove(self, node: int) -> None:
        self.made[node] = None
        for value in _distinct(self.inputs(node)):
            self.readers[value] = tuple(n for n in self.consumers(value) if n != node)
        for value in _distinct(self.inputs(node)):
            if not self.readers[value] and not self.is_output(value) and self.is_defined(value):
                self._retire(self.producer(value))

    def sweep(self) -> None:
        """Removes new nodes that nothing uses (parts of a target that turned out to be there already)."""
        for node in reversed(self.new_nodes):
            if self.is_live(node):
                self._retire(node)

    def check_acyclic(self) -> None:
        """Raises `Cycle` where a new node depends on itself.

        A cycle runs through a class that was redefined, so no node above the highest of those needs a look; and never
        through what depends on weights alone.
        """
        order, parent = self.parent.order, self.parent
        redefined = [parent.producers[v] for v in (*self.producers, *self.aliases) if v in parent.producers]
        floor = min((order[n] for n in redefined if n in order), default=0.0)
        done: set[int] = set()
        for start in self.new_nodes:
            if self.is_live(start) and is_costed(self, start):
                self._visit(start, floor, done)

    def _visit(self, start: int, floor: float, done: set[int]) -> None:
        order = self.parent.order
        open_nodes: set[int] = set()
        stack = [(start, False)]
        while stack:
            node, ready = stack.pop()
            if ready:
                open_nodes.discard(node)
                done.add(node)
            elif node in open_nodes:
                raise Cycle("a rewrite would make a value depend on itself")
            elif node not in done and (node not in order or order[node] >= floor):
                open_nodes.add(node)
                stack.append((node, True))
                producers = (self.producer(c) for c in _distinct(self.inputs(node)))
                stack.extend((n, False) for n in producers if is_costed(self, n))

    # ── what follows from the parent's ───────────────────────────────────────────────────────────────────────────

    @property
    def changed_classes(self) -> list[int]:
        """Classes whose producer, readers or use as an output differ from the parent's."""
        if self._changed is None:
            self._changed = self._changed_now()
        return self._changed

    def _changed_now(self) -> list[int]:
        changed = dict.fromkeys([*self.producers, *self.readers, *self.aliases])
        if self.graph_outputs is not self.parent.graph_outputs:
            outputs = self.parent.output_set.symmetric_difference(self.graph_outputs)
            changed.update(dict.fromkeys(v for v in (*self.parent.graph_outputs, *self.graph_outputs) if v in outputs))
        for node, classes in self.made.items():
            changed.update(dict.fromkeys(classes if classes is not None else self.parent.made.get(node, ())))
        return list(changed)

    def fingerprint(self) -> int:
        """The commutative sum over live run-time nodes, followed from the parent's."""
        total = self.parent.fingerprint
        for node, classes in self.made.items():
            if not is_costed(self, node):
                # constants are named by the classes that run-time nodes read
                continue
            if node in self.parent.made:
                total -= _node_hash(self.parent, node)
            if classes is not None:
                total += _node_hash(self, node)
        if self.graph_outputs is not self.parent.graph_outputs:
            total += _outputs_hash(self, self.graph_outputs) - _outputs_hash(self.parent, self.parent.graph_outputs)
        return total & _MASK

    def witness(self) -> int:
        """The second fingerprint, over numbers of the store, followed from the parent's."""
        total = self.parent.witness
        for node, classes in self.made.items():
            if is_costed(self, node):
                if node in self.parent.made:
                    total -= _node_witness(self.parent, node)
                if classes is not None:
                    total += _node_witness(self, node)
        if self.graph_outputs is not self.parent.graph_outputs:
            total += _outputs_witness(self.graph_outputs) - _outputs_witness(self.parent.graph_outputs)
        return total & _MASK

    def size_change(self) -> int:
        """How many more run-time nodes there are than in the parent."""
        change = 0
        for node, classes in self.made.items():
            if is_costed(self, node):
                change += (classes is not None) - (node in self.parent.made)
        return change

    def constant_bytes(self) -> int:
        """Bytes of constants that run-time nodes read, followed from the parent's."""
        total = self.parent.constant_bytes
        for value in self.changed_classes:
            if value in self.parent.producers:
                total -= _folded_bytes(self.parent, value)
            if self.is_defined(value):
                total += _folded_bytes(self, value)
        return total

    def touched(self) -> dict[int, None]:
        """Nodes, in the parent or here, to whose fusion the change may make a difference."""
        if self._touched is None:
            self._touched = self._touched_now()
        return self._touched

    def _touched_now(self) -> dict[int, None]:
        # what depends on weights alone has no cost, and who else reads it changes nobody's
        nodes: dict[int, None] = dict.fromkeys(n for n in self.made if is_costed(self, n))
        for value in self.changed_classes:
            if self.is_constant(value) or self._stays_crowded(value):
                continue
            if value in self.parent.producers:
                nodes[self.parent.producers[value]] = None
                nodes.update(dict.fromkeys(self.parent.consumers(value)))
            if self.is_defined(value):
                nodes[self.producer(value)] = None
                nodes.update(dict.fromkeys(self.consumers(value)))
        return nodes

    def _stays_crowded(self, value: int) -> bool:
        """Whether nothing changes but readers of a value that has several: none of them is fused with its producer."""
        producer = self.parent.producers.get(value)
        if producer is None or not self.is_defined(value) or self.producer(value) != producer:
            return False
        if self.setting.lowering.minds_readers(self.op(producer)):
            return False
        before, after = len(self.parent.consumers(value)), len(self.consumers(value))
        if before < 2 or after < 2 or self.parent.is_output(value) != self.is_output(value):
            return False
        self._crowded[value] = max(2, 2 + before - after)
        return True

    def disturbed(self) -> set[int]:
        """What another rewrite must not depend on to have the same effect in the parent and here: nodes, and ~values.

        A value stands for the number of its readers.
        """
        found = set(self.touched())
        found.update(self.producer(value) for value in self._crowded)
        found.update(~value for value in self.changed_classes)
        return found

    def crowded(self) -> tuple[tuple[int, int], ...]:
        """Values, and how many readers each needs for the costs of this draft to stay as they are."""
        self.touched()
        return tuple(self._crowded.items())

    def costs(self) -> tuple[dict[int, float | None], dict[int, float]]:
        """Kernel costs by anchor (None: no longer one) and layout-change costs by class that may differ from before."""
        if self._costs is None:
            self._costs = self._changed_costs()
        return self._costs

    def _changed_costs(self) -> tuple[dict[int, float | None], dict[int, float]]:
        before, after = self.regrouped()
        self._looked_at.update(self.touched())
        kernels: dict[int, float | None] = dict.fromkeys(before)
        for anchor, group in after.items():
            kernels[anchor] = self.setting.group_cost(self, group)
        for group in (*before.values(), *after.values()):
            self._looked_at.update(group.nodes)
        return kernels, self._changed_layouts(before.values(), after.values())

    def regrouped(self) -> tuple[dict[int, Group[int, int]], dict[int, Group[int, int]]]:
        """The kernels, by anchor, that touched nodes were in, and those that they are in now."""
        parent, lowering = self.parent, self.setting.lowering
        touched = [n for n in self.touched() if is_costed(self, n)]
        before = {g.anchor: g for g in (parent.group_of(n) for n in touched if n in parent.made)}
        anchors = [lowering.anchor_of(self, n) for n in touched if self.is_live(n)]
        anchors += [a for a in before if self.is_live(a) and lowering.anchor_of(self, a) == a]
        after = {a: lowering.group(self, a) for a in dict.fromkeys(anchors)}
        for group in after.values():
            self._groups_here.update(dict.fromkeys(group.nodes, group))
        return before, after

    def _changed_layouts(
        self, before: Iterable[Group[int, int]], after: Iterable[Group[int, int]]
    ) -> dict[int, float]:
        """What the values cost whose readers ask for other layouts now."""
        if not self.setting.lowering.layouts.block:
            return {}
        old, new = self._asked_by(self.parent, before), self._asked_by(self, after)
        layouts: dict[int, float] = {}
        for value in dict.fromkeys([*old, *new]):
            # of the other readers it does not matter what they ask for, as long as these ask for the same
            if old.get(value) != new.get(value):
                layouts[value] = self.setting.relayout_cost(self, value) if self.is_defined(value) else 0.0
                for view in (self.parent, self):
                    if self.is_defined(value) if view is self else value in self.parent.producers:
                        self._looked_at.add(view.producer(value))
                        for reader in view.consumers(value):
                            self._looked_at.update(view.group_of(reader).nodes)
        return layouts

    def _asked_by(self, view: StateView, groups: Iterable[Group[int, int]]) -> dict[int, set[str]]:
        """Which layouts kernels ask for, by value; outputs of the graph that differ from the parent's are asked for."""
        asked: dict[int, set[str]] = {}
        for group in groups:
            out = view.outputs(group.last)[0]
            for node in group.nodes:
                for value, layout in self.setting.asked(view, node, out):
                    asked.setdefault(value, set()).add(layout)
        if self.graph_outputs is not self.parent.graph_outputs:
            for value in {*self.parent.graph_outputs} ^ {*self.graph_outputs}:
                if view.is_output(value) and self.setting.may_change_layout(value):
                    asked.setdefault(value, set()).add(PLAIN)
        return asked

    def footprint(self, matched: Iterable[int]) -> frozenset[int]:
        """Nodes that the costs of this draft looked at: while none of them is touched, they stay as they are."""
        self.costs()
        return frozenset(self._looked_at.union(matched))

    def cost(self) -> float:
        """Seconds, followed from the parent's."""
        kernels, layouts = self.costs()
        return self._total(kernels, layouts)

    def _total(self, kernels: Mapping[int, float | None], layouts: Mapping[int, float]) -> float:
        total = self.parent.cost + NODE_COST * self.size_change()
        for anchor, cost in kernels.items():
            total += (cost or 0.0) - self.parent.kernel_costs.get(anchor, 0.0)
        for value, cost in layouts.items():
            total += cost - self.parent.layout_costs.get(value, 0.0)
        return total

    def commit(self) -> State:
        """The draft as a state of its own."""
        parent = self.parent
        made, producers, readers = self._committed_graph()
        kernels, layouts = self.costs()
        state = State(
            self.setting, made, producers, readers, self.graph_outputs,
            _updated(parent.kernel_costs, kernels),
            _updated(parent.layout_costs, {v: cost or None for v, cost in layouts.items()}),
            self._total(kernels, layouts), self.fingerprint(), self.witness(), self.constant_bytes(),
            size=parent.size + self.size_change(),
        )  # fmt: skip
        state._memo = _updated(parent._memo, dict.fromkeys(self.touched()))
        state._groups = _updated(parent._groups, dict.fromkeys(n for n, c in self.made.items() if c is None))
        state._groups.update(self._groups_here)
        state._order = self._committed_order()
        return state

    def _committed_graph(self) -> tuple[dict[int, tuple[int, ...]], dict[int, int], dict[int, tuple[int, ...]]]:
        parent = self.parent
        gone = {v for n, c in self.made.items() if c is None for v in parent.made.get(n, ())}
        producers = _updated(parent.producers, dict.fromkeys(gone))
        producers.update((v, n) for v, n in self.producers.items() if self.is_live(n) and v in self.outputs(n))
        for value in gone:
            if self.is_defined(value):
                producers[value] = self.producer(value)
        readers = _updated(parent.readers, {v: r if r and v in producers else None for v, r in self.readers.items()})
        return _updated(parent.made, self.made), producers, readers

    def _committed_order(self) -> dict[int, float] | None:
        """The parent's order with the new nodes between what they read and what reads them; None where that fails."""
        order = _updated(self.parent.order, dict.fromkeys(self.made))
        fresh = {n for n in self.new_nodes if self.is_live(n) and is_costed(self, n)}
        for node in self._producers_first(fresh):
            read = (self.producer(v) for v in _distinct(self.inputs(node)))
            low = max((order[n] for n in read if n in order), default=-1.0)
            readers = (n for v in self.outputs(node) for n in self.consumers(v))
            high = min((order[n] for n in readers if n in order), default=low + 2.0)
            middle = (low + high) / 2
            if not low < middle < high:
                return None
            order[node] = middle
        return order

    def _producers_first(self, nodes: set[int]) -> list[int]:
        placed: dict[int, None] = {}
        stack = sorted(nodes, reverse=True)
        while stack:
            node = stack[-1]
            read = {self.producer(v) for v in _distinct(self.inputs(node))}
            needed = [n for n in sorted(read, reverse=True) if n in nodes and n not in placed]
            if needed:
                stack.extend(needed)
            else:
                placed[stack.pop()] = None
        return list(placed)


K = TypeVar("K")
T = TypeVar("T")


def _updated(old: Mapping[K, T], changes: Mapping[K, T | None]) -> dict[K, T]:
    """A copy with changes, where None takes an entry away."""
    new = dict(old)
    for key, value in changes.items():
        if value is None:
            new.pop(key, None)
        else:
            new[key] = value
    return new


__all__ = ["Cycle", "Draft", "Setting", "State", "StateView", "check", "initial_state", "recomputed"]
