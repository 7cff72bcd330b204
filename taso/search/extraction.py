"""The cheapest graph of an e-graph: by a greedy rule, and exactly, as an integer program.

What is chosen are kernels, not nodes: a node alone, or an anchor with a chain of element-wise nodes behind it, so that
fusion is part of an additive cost. What a sum cannot say (a value in the midst of a chain that others read as well)
comes out when the state is costed anew by the lowering plan.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from taso.backends.lowering import PLAIN, Group, change_of_layout
from taso.graph.operator import Trait
from taso.search.egraph import EGraph
from taso.search.integer import MICRO, IntegerProgram, available
from taso.search.moves import Limits
from taso.search.state import NODE_COST, Cycle, State, StateView, recomputed

log = logging.getLogger(__name__)

LONGEST = 6
"""Nodes of a chain that is chosen as one kernel."""
MOST_CHAINS = 24
"""Chains that are looked at for one last node."""

MISSING = "exact extraction needs the package highspy: the greedy one was used"


@dataclass(frozen=True)
class Pick:
    """A kernel that may be chosen: the classes it makes, the nodes in it, what it reads, and its cost in seconds.

    `relayouts` are the changes of layout it asks for, each a class and a layout.
    """

    makes: tuple[int, ...]
    nodes: tuple[int, ...]
    reads: tuple[int, ...]
    relayouts: tuple[tuple[int, str], ...]
    constants: tuple[int, ...]
    cost: float


@dataclass(frozen=True)
class Extraction:
    """A state taken out of an e-graph, costed by its lowering plan, and how it was found."""

    how: str
    state: State


class _Chain(StateView):
    """The e-graph as lowering sees one chain of nodes: each value in its midst has the next node as its one reader."""

    def __init__(self, egraph: EGraph, nodes: Sequence[int], outputs: frozenset[int]) -> None:
        self.egraph = egraph
        self.setting = egraph.setting
        self._makers = {c: n for n in nodes for c in egraph.nodes[n]}
        self._readers = {egraph.nodes[a][0]: (b,) for a, b in zip(nodes, nodes[1:], strict=False)}
        self._outputs = outputs

    def producer(self, value: int) -> int:
        found = self._makers.get(value)
        # what the chain reads may be computed in several ways: the first is how it was in the beginning
        return next(iter(self.egraph.makers[value])) if found is None else found

    def outputs(self, node: int) -> tuple[int, ...]:
        return self.egraph.nodes[node]

    def consumers(self, value: int) -> tuple[int, ...]:
        return self._readers.get(value, ())

    def is_output(self, value: int) -> bool:
        return value in self._outputs

    def is_live(self, node: int) -> bool:
        return node in self.egraph.nodes

    def live_nodes(self) -> Iterator[int]:
        return iter(self._makers.values())

    def group_of(self, node: int) -> Group[int, int]:
        return self.setting.lowering.group(self, self.setting.lowering.anchor_of(self, node))

    def memo(self, node: int) -> dict[int, int | None]:
        return {}


@dataclass
class _Best:
    """What is known of the cheapest way to a class, as a tree."""

    cost: float
    pick: Pick


class Extractor:
    """Takes graphs out of one e-graph. `left` gives the seconds that remain, None without a limit."""

    def __init__(self, egraph: EGraph, limits: Limits, left: Callable[[], float | None]) -> None:
        self.egraph = egraph
        self.limits = limits
        self.left = left
        self.told: dict[str, float | str] = {}
        self._outputs = frozenset(egraph.outputs)
        self._picks: list[Pick] = []
        self._of: dict[int, list[int]] = {}
        self._chains: dict[int, list[tuple[tuple[int, ...], tuple[int | None, ...]]]] = {}

    def run(self, seconds: float | None, most: int, nodes: int | None = None) -> Iterator[Extraction]:
        """The greedy graph, then the exact one, which `seconds` and `nodes` of the solver's tree bound.

        Without `seconds`, and where there are more than `most` kernels to choose from, the greedy one alone.
        """
        self._collect()
        self.told["kernels"] = len(self._picks)
        chosen = self._greedy()
        if chosen is None:
            self.told["greedy"] = "no graph: the time was up before all kernels were costed"
            return
        yield from self._extracted("greedy", chosen)
        if seconds is None or not chosen:
            return
        if not available():
            log.warning(MISSING)
            self.told["exact"] = MISSING
            return
        if len(self._picks) > most:
            self.told["exact"] = f"left out: more than {most} kernels to choose from"
            return
        better = self._exact(seconds, nodes)
        if better is not None:
            yield from self._extracted("exact", better)

    def _late(self) -> bool:
        left = self.left()
        return left is not None and left <= 0.0

    # ── kernels ──────────────────────────────────────────────────────────────────────────────────────────────────

    def _collect(self) -> None:
        """All kernels that could compute what the outputs need, those of the state that the e-graph grew from first.

        Without time for those there is no graph to take out.
        """
        egraph = self.egraph
        old = {n for n in egraph.nodes if egraph.age[n] < len(egraph.start.made)}
        seen: set[int] = set()
        # the old nodes first: when the time is up there is a graph in any case
        for nodes, first in ((old, True), (set(egraph.nodes), False)):
            stack = [c for c in sorted(self._outputs) if not egraph.is_constant(c)]
            reached = set(stack)
            while stack:
                value = stack.pop()
                for node in egraph.usable(value):
                    if node not in nodes:
                        continue
                    if node not in seen:
                        if self._late():
                            if not first:
                                continue
                            self._picks.clear()
                            self._of.clear()
                            return
                        seen.add(node)
                        self._add_picks(node)
                    for operand in egraph.operands(node):
                        if operand not in reached and not egraph.is_constant(operand):
                            reached.add(operand)
                            stack.append(operand)

    def _add_picks(self, node: int) -> None:
        makes = tuple(dict.fromkeys(c for c in self.egraph.nodes[node] if (c, node) not in self.egraph.filtered))
        least = self._least_alone(node)
        for nodes, entries in self._chains_to(node):
            pick = self._pick(makes, nodes, entries)
            if len(nodes) == 1 and pick.cost < least:
                pick = replace(pick, cost=least)
            for value in makes:
                self._of.setdefault(value, []).append(len(self._picks))
            self._picks.append(pick)

    def _least_alone(self, node: int) -> float:
        """What a node must cost as a kernel of its own, so that it does not seem cheaper to take it out of a chain.

        Lowering fuses where it can, though a fused kernel may have been measured to be dearer than its parts.
        """
        longer = [(n, e) for n, e in self._chains_to(node) if len(n) > 1]
        return min((self._alone(n, e) - self._alone(n[:-1], e[:-1]) for n, e in longer), default=0.0)

    def _alone(self, nodes: tuple[int, ...], entries: tuple[int | None, ...]) -> float:
        view = _Chain(self.egraph, nodes, self._outputs)
        return self.egraph.setting.group_cost(view, Group(nodes, entries)) + NODE_COST * len(nodes)

    def _chains_to(self, node: int) -> list[tuple[tuple[int, ...], tuple[int | None, ...]]]:
        """The chains that end in a node, with the input by which each node is entered; the node alone is one."""
        found = self._chains.get(node)
        if found is None:
            found = self._chains[node] = [((node,), (None,)), *self._longer(node)][:MOST_CHAINS]
        return found

    def _longer(self, node: int) -> Iterator[tuple[tuple[int, ...], tuple[int | None, ...]]]:
        egraph, setting = self.egraph, self.egraph.setting
        entry = setting.store.entries[node]
        if not setting.lowering.may_join(entry.op) or entry.constant:
            return
        self._chains[node] = []  # a node that reads itself through others ends here
        for position, value in enumerate(entry.inputs):
            if value is None or value in self._outputs or egraph.is_constant(value):
                continue
            for maker in egraph.usable(value):
                view = _Chain(egraph, (maker, node), self._outputs)
                if setting.store.entries[maker].constant or len(egraph.nodes[maker]) != 1:
                    continue
                if setting.lowering.entry(view, node) != position:
                    continue
                for nodes, entries in self._chains_to(maker):
                    if len(nodes) < LONGEST and node not in nodes:
                        yield (*nodes, node), (*entries, position)

    def _pick(self, makes: tuple[int, ...], nodes: tuple[int, ...], entries: tuple[int | None, ...]) -> Pick:
        egraph, setting = self.egraph, self.egraph.setting
        store = setting.store
        if store.entries[nodes[-1]].constant or store.entries[nodes[-1]].op.has(Trait.SOURCE):
            return Pick(makes, nodes, (), (), (), 0.0)
        view = _Chain(egraph, nodes, self._outputs)
        out = egraph.nodes[nodes[-1]][0]
        reads: dict[int, None] = {}
        constants: dict[int, None] = {}
        asked: dict[tuple[int, str], None] = {}
        for node, entered in zip(nodes, entries, strict=True):
            inputs = store.entries[node].inputs
            chained = None if entered is None else inputs[entered]
            for value in egraph.operands(node):
                if value != chained:
                    (constants if egraph.is_constant(value) else reads)[value] = None
            for value, layout in setting.asked(view, node, out):
                if value != chained and layout != store.class_layouts[value]:
                    asked[value, layout] = None
        return Pick(makes, nodes, tuple(reads), tuple(asked), tuple(constants), self._alone(nodes, entries))

    def _relayout(self, change: tuple[int, str]) -> float:
        value, target = change
        setting = self.egraph.setting
        t, source = setting.store.class_sized[value], setting.store.class_layouts[value]
        return setting.costs.kernel(change_of_layout(t, source, target))

    # ── greedy ───────────────────────────────────────────────────────────────────────────────────────────────────

    def _greedy(self) -> list[Pick] | None:
        """For each class the kernel that is cheapest with all that it needs, shared or not."""
        best: dict[int, _Best] = {}
        costs = [p.cost + sum(self._relayout(c) for c in p.relayouts) for p in self._picks]
        readers: dict[int, list[int]] = {}
        for number, pick in enumerate(self._picks):
            for value in pick.reads:
                readers.setdefault(value, []).append(number)
        waiting = dict.fromkeys(range(len(self._picks)))
        while waiting:
            number = next(iter(waiting))
            del waiting[number]
            pick = self._picks[number]
            if any(c not in best for c in pick.reads):
                continue
            total = costs[number] + sum(best[c].cost for c in pick.reads)
            for value in pick.makes:
                known = best.get(value)
                if known is None or total < known.cost * (1 - 1e-12):
                    best[value] = _Best(total, pick)
                    waiting.update(dict.fromkeys(readers.get(value, ())))
        chosen: dict[Pick, None] = {}
        stack = [c for c in sorted(self._outputs) if not self.egraph.is_constant(c)]
        while stack:
            value = stack.pop()
            if value not in best:
                return None
            pick = best[value].pick
            if pick not in chosen:
                chosen[pick] = None
                stack.extend(pick.reads)
        return list(chosen)

    # ── exact ────────────────────────────────────────────────────────────────────────────────────────────────────

    def _exact(self, seconds: float, nodes: int | None) -> list[Pick] | None:
        """The cheapest set of kernels by an integer program; None where none is found in time."""
        left = self.left()
        limit = seconds if left is None else min(seconds, left)
        program = _Program()
        for pick in self._picks:
            program.variable(pick.cost * MICRO)
        self._demand(program)
        if limit <= 0.0:
            self.told["exact"] = "left out: the time was up"
            return None
        result = program.solve(limit, nodes)
        self.told.update(program.told)
        if result is None:
            return None
        return [p for p, x in zip(self._picks, result, strict=False) if x > 0.5]

    def _demand(self, program: _Program) -> None:
        """What a set of kernels must fulfil: outputs are made, and all that a chosen kernel reads."""
        egraph = self.egraph
        for value in sorted(self._outputs):
            if not egraph.is_constant(value):
                program.row(dict.fromkeys(self._of.get(value, ()), 1.0), 1.0)
        for number, pick in enumerate(self._picks):
            for value in pick.reads:
                makers = dict.fromkeys(self._of.get(value, ()), 1.0)
                makers[number] = makers.get(number, 0.0) - 1.0
                program.row(makers, 0.0)
        for number, pick in enumerate(self._picks):
            for change in pick.relayouts:
                if change not in program.changes:
                    program.changes[change] = program.variable(self._relayout(change) * MICRO)
                program.row({program.changes[change]: 1.0, number: -1.0}, 0.0)
        for value in sorted(self._outputs):
            change = (value, PLAIN)
            if egraph.setting.may_change_layout(value) and egraph.setting.store.class_layouts[value] != PLAIN:
                if change not in program.changes:
                    program.changes[change] = program.variable(self._relayout(change) * MICRO)
                program.row({program.changes[change]: 1.0}, 1.0)
        self._bound_constants(program)

    def _bound_constants(self, program: _Program) -> None:
        """What depends on weights alone has to fit the folding budget."""
        store = self.egraph.setting.store
        readers: dict[int, list[int]] = {}
        for number, pick in enumerate(self._picks):
            for value in pick.constants:
                readers.setdefault(value, []).append(number)
        sizes = {c: t.nbytes for c in readers if (t := store.class_sized[c]).static and t.other is None}
        if sum(sizes.values()) <= self.limits.constant_bytes:
            return
        for value in sizes:
            program.kept[value] = program.variable(0.0)
            for number in readers[value]:
                program.row({program.kept[value]: 1.0, number: -1.0}, 0.0)
        scale = float(self.limits.constant_bytes)
        program.row({program.kept[c]: -size / scale for c, size in sizes.items()}, -1.0)

    # ── states ───────────────────────────────────────────────────────────────────────────────────────────────────

    def _extracted(self, how: str, chosen: Sequence[Pick]) -> Iterator[Extraction]:
        """The state that consists of the kernels chosen; none where they close a cycle after all."""
        self.told[f"{how}_sum_ms"] = self._sum(chosen) * 1e3
        try:
            yield Extraction(how, self._state(chosen))
        except Cycle as reason:
            log.info("%s extraction gave no graph: %s", how, reason)
            self.told[how] = f"no graph: {reason}"

    def _sum(self, chosen: Sequence[Pick]) -> float:
        changes = {c for p in chosen for c in p.relayouts}
        store = self.egraph.setting.store
        changes |= {
            (c, PLAIN) for c in self._outputs
            if self.egraph.setting.may_change_layout(c) and store.class_layouts[c] != PLAIN
        }  # fmt: skip
        return sum(p.cost for p in chosen) + sum(self._relayout(c) for c in sorted(changes))

    def _state(self, chosen: Sequence[Pick]) -> State:
        egraph = self.egraph
        entries = egraph.setting.store.entries
        makers: dict[int, int] = {}
        for pick in chosen:
            for value in pick.makes:
                makers.setdefault(value, pick.nodes[-1])
        for pick in chosen:
            for node in pick.nodes[:-1]:
                makers.setdefault(egraph.nodes[node][0], node)
        homes = egraph.homes(constants=True)
        live: dict[int, None] = {n: None for n in egraph.nodes if entries[n].op.name == "Input"}
        stack = list(self._outputs)
        seen = set(stack)
        while stack:
            value = stack.pop()
            node = makers[value] if not egraph.is_constant(value) else homes[value]
            live[node] = None
            fresh = [c for c in egraph.operands(node) if c not in seen]
            seen.update(fresh)
            stack.extend(fresh)
        made: dict[int, tuple[int, ...]] = {}
        producers: dict[int, int] = {}
        for node in sorted(live):
            made[node] = _apart(egraph, node)
            for value in made[node]:
                chosen_node = homes.get(value) if egraph.is_constant(value) else makers.get(value)
                if chosen_node == node or value not in seen:
                    producers.setdefault(value, node)
        return recomputed(State(egraph.setting, made, producers, {}, egraph.outputs))


def _apart(egraph: EGraph, node: int) -> tuple[int, ...]:
    """The classes of a node's outputs; two that turned out equal get two of the numbers that stand for them."""
    taken: list[int] = []
    for value in egraph.nodes[node]:
        members = [value, *egraph.members.get(value, ())]
        taken.append(next(c for c in members if c not in taken))
    return tuple(taken)


@dataclass
class _Program(IntegerProgram):
    """The program of an extraction, with the variables of changes of layout and of weights that are kept."""

    changes: dict[tuple[int, str], int] = field(default_factory=dict)
    kept: dict[int, int] = field(default_factory=dict)


__all__ = ["Extraction", "Extractor", "MISSING", "Pick"]
