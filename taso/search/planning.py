"""The exact plan of a graph: fusions, layouts and algorithms chosen together, by their measured costs.

The search costs a graph by a local rule: what fuses with what, and how values lie, follows from the neighbourhood. For
the few graphs that come last the best plan is found instead. Every kernel that could be built is costed in every layout
it could work in, and an integer program chooses: each operator runs in one kernel, every value lies as those who read
it ask, or is brought to it by a change of layout that is paid once.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from taso.backends.lowering import (
    LAST,
    PLAIN,
    Choices,
    GraphView,
    Group,
    Kernel,
    Lowering,
    change_of_layout,
    in_parts,
    is_view,
    lower,
    structure,
)
from taso.graph.graph import Graph, Node, Value
from taso.graph.operator import Trait
from taso.search.costs import CostModel
from taso.search.integer import MICRO, IntegerProgram, available

log = logging.getLogger(__name__)

SECONDS = 60.0
"""How long the plan of one graph may take, measuring kernels included, where there is no other limit."""

MOST_NODES = 2000
"""Nodes of the solver's tree that are looked at: it ends by this, and not by the time, wherever the machine allows."""

MOST_OPERATORS = 2000
"""Operators of a graph above which the local rule stays: a program of that size is not solved in seconds."""

WORTH = 1e-3
"""Share of the summed costs that a plan must save to be taken instead of the local rule's."""

MOST_ANCHORS = 4
"""Anchors in a row that are looked at as one kernel."""

SLOWEST = 5e9
"""Bytes that a core moves in a second at the least where values between two anchors do not fit its cache."""

Lie = tuple[Value, str]


@dataclass(frozen=True)
class Planned:
    """A plan: what is chosen (None: the local rule does as well), its cost and that of the local rule's plan, in
    seconds, and what the solver said."""

    choices: Choices | None
    cost: float
    local_cost: float
    told: dict[str, float | str] = field(default_factory=dict)


@dataclass(frozen=True)
class _Option:
    """A kernel that may be chosen: what it reads and how, what it makes and how, and its cost in seconds.

    `layouts` are those its results come out in; `reads` and `makes` have one name for all that are alike.
    """

    group: Group[Node, Value]
    kernel: Kernel
    layouts: tuple[str, ...]
    reads: tuple[Lie, ...]
    makes: tuple[Lie, ...]
    cost: float
    algorithm: str


class _View(GraphView):
    """A graph in which the values that a kernel makes lie as we say."""

    def __init__(self, graph: Graph, lowering: Lowering) -> None:
        super().__init__(graph, lowering.layouts)
        self.asked: dict[Value, str] = {}

    def layout(self, value: Value) -> str:
        return self.asked.get(value) or super().layout(value)


def plan(graph: Graph, lowering: Lowering, costs: CostModel, seconds: float = SECONDS) -> Planned:
    """The best plan for a graph of static types.

    Fusions and layouts are the local rule's where nothing is cheaper, where there is no solver, or where time or size
    do not allow more.
    """
    planner = _Planner(graph, lowering, costs, time.perf_counter() + seconds)
    usual = planner.cost([planner.usually(o) for o in planner.local()])
    best, choices = planner.cost(planner.local()), planner.choices(planner.local())
    if available() and seconds > 0 and len(graph.operators) <= MOST_OPERATORS:
        found = planner.best()
        if found is not None and planner.cost(found) < (1 - WORTH) * best:
            best, choices = planner.cost(found), planner.choices(found)
    if best >= (1 - WORTH) * usual:
        return Planned(None, usual, usual, planner.told)
    return Planned(choices, best, usual, planner.told)


def cost_of(graph: Graph, lowering: Lowering, costs: CostModel, choices: Choices | None) -> float:
    """Seconds of the plan that a program of a graph of static types follows: kernels, and changes of layout."""
    return sum(costs.kernel(kernel) for kernel in _launched(graph, lowering, choices))


def kernels_of(graph: Graph, lowering: Lowering, choices: Choices | None) -> int:
    """How many kernels a program of a graph of static types runs, changes of layout included."""
    return sum(1 for _ in _launched(graph, lowering, choices))


def _launched(graph: Graph, lowering: Lowering, choices: Choices | None) -> Iterator[Kernel]:
    name = lowering.layouts.canonical
    lowered = lower(graph, lowering, choices)
    yield from (job.kernel for job in lowered.jobs if not is_view(job.kernel))
    reads = [(v, o.layout) for j in lowered.jobs for v, o in zip(j.operands, j.kernel.operands, strict=True)]
    reads += [(v, PLAIN) for _, v in graph.outputs]
    for value, target in dict.fromkeys((v, name(v.type, x)) for v, x in reads if not v.node.constant):
        source = name(value.type, lowered.layouts[value])
        if source != target:
            yield change_of_layout(value.type, source, target, value in lowered.narrow)


class _Planner:
    """The integer program of one graph."""

    def __init__(self, graph: Graph, lowering: Lowering, costs: CostModel, deadline: float = math.inf) -> None:
        self.graph = graph
        self.deadline = deadline
        self.lowering = lowering
        self.layouts = lowering.layouts
        self.costs = costs
        self.view = _View(graph, lowering)
        self.place = {node: i for i, node in enumerate(graph.nodes)}
        self.told: dict[str, float | str] = {}

    # ── the local rule ───────────────────────────────────────────────────────────────────────────────────────────

    def local(self) -> list[_Option]:
        """The kernels by the local rule."""
        groups: dict[Node, Group[Node, Value]] = {}
        for node in self.graph.run_time_nodes:
            anchor: Node = self.lowering.anchor_of(self.view, node)
            if anchor not in groups:
                groups[anchor] = self.lowering.group(self.view, anchor)
        return [self._option(g, [GraphView.layout(self.view, v) for v in g.last.outputs]) for g in groups.values()]

    def usually(self, option: _Option) -> _Option:
        """The kernel by the algorithm that it has where nobody asks for another."""
        return replace(option, algorithm="", cost=self.costs.kernel(option.kernel)) if option.algorithm else option

    def cost(self, chosen: Sequence[_Option]) -> float:
        """Seconds of these kernels, with the changes of layout between them."""
        return sum(o.cost for o in chosen) + sum(self._change(*c) for c in self._changes(chosen))

    def _changes(self, chosen: Sequence[_Option]) -> list[tuple[Value, str, str]]:
        """The changes of layout that kernels imply: value, how it lies, how it is asked for."""
        made = {value: layout for option in chosen for value, layout in option.makes}
        asked = dict.fromkeys(lie for option in chosen for lie in option.reads)
        asked.update(dict.fromkeys((v, self._name(v, PLAIN)) for _, v in self.graph.outputs if not v.node.constant))
        given = ((v, made.get(v, self._name(v, PLAIN)), layout) for v, layout in asked)
        return [(v, source, target) for v, source, target in given if source != target]

    # ── options ──────────────────────────────────────────────────────────────────────────────────────────────────

    def _name(self, value: Value, layout: str) -> str:
        return self.layouts.canonical(value.type, layout)

    def _options(self) -> list[_Option]:
        # of layouts that are alike for all that a kernel reads and makes the first will do
        found: dict[object, _Option] = {}
        for node in self.graph.run_time_nodes:
            if time.perf_counter() > self.deadline:
                break
            for group in self._groups(node):
                for layouts in self._possible(group):
                    lies = self._lies(group, layouts)
                    if lies not in found:
                        found[lies] = self._option(group, layouts)
        return [*found.values(), *self._chains()]

    def _chains(self) -> Iterator[_Option]:
        """Kernels of several anchors in a row, where what lies between them is more than a cache holds."""
        least = self.lowering.fusion.least_between
        whole = {node: list(self._groups(node))[-1] for node in self.graph.run_time_nodes if self._in_chain(node)}
        for first in whole.values():
            chain = first
            for _ in range(MOST_ANCHORS - 1):
                value = chain.last.outputs[0]
                readers = self.view.consumers(value)
                follower = next(iter(readers)) if len(readers) == 1 else None
                if follower not in whole or value.type.nbytes < least or not self._continues(follower, value):
                    break
                behind = whole[follower]
                chain = Group((*chain.nodes, *behind.nodes), (*chain.entries, 0, *behind.entries[1:]))
                if time.perf_counter() > self.deadline:
                    return
                for layout in self._of_chain(first, behind):
                    layouts = [layout] * len(chain.last.outputs)
                    kernel = self._kernel(chain, layouts)[0]
                    if self.lowering.runs_chain(kernel) and self._may_pay(kernel):
                        yield self._option(chain, layouts)

    def _of_chain(self, first: Group[Node, Value], last: Group[Node, Value]) -> list[str]:
        """The layouts that a kernel of several anchors may work in: rows of an image are whole with channels last."""
        possible = [
            self.layouts.possible(g.anchor.op, g.anchor.attrs, [v.type if v is not None else None for v in
            g.anchor.inputs], g.anchor.outputs[0].type) for g in (first, last)
        ]  # fmt: skip
        return [LAST] if LAST in possible[0] else list(possible[1])

    def _may_pay(self, kernel: Kernel) -> bool:
        """Whether what several anchors in one kernel save of memory can make up for the algorithms that each has alone.

        A kernel that cannot is not measured.
        """
        parts = in_parts(kernel)
        between = sum(part.results[0].type.nbytes for part in parts[:-1])
        lost = sum(self.costs.kernel(part) - self.costs.cheapest(part)[0] for part in parts)
        return lost < 2 * between / SLOWEST

    def _in_chain(self, node: Node) -> bool:
        types = [v.type if v is not None else None for v in node.inputs]
        return len(node.outputs) == 1 and self.lowering.fusion.chains(node.op, node.attrs, types, node.outputs[0].type)

    def _continues(self, node: Node, value: Value) -> bool:
        return node.inputs[0] is value and self.lowering.continues(self.view, node)

    def _groups(self, node: Node) -> Iterator[Group[Node, Value]]:
        """The kernels that may start at `node`; none where it always joins what comes before."""
        if not self._may_start(node):
            return
        nodes: list[Node] = [node]
        entries: list[int | None] = [None]
        while True:
            follower = self._follower(nodes[-1])
            if follower is None or self._may_start(follower[0]):
                # an operator of two values may run elsewhere instead, with the other one or alone
                yield Group(tuple(nodes), tuple(entries))
            if follower is None:
                return
            nodes.append(follower[0])
            entries.append(follower[1])

    def _follower(self, node: Node) -> tuple[Node, int] | None:
        """The node that may run in one kernel with `node`, and the input by which it is entered."""
        value = node.outputs[0] if len(node.outputs) == 1 else None
        consumers = self.view.consumers(value) if value is not None else ()
        if value is None or len(consumers) != 1:
            return None
        follower = next(iter(consumers))
        entry = next(i for i, v in enumerate(follower.inputs) if v is value)
        return (follower, entry) if self.lowering.joins(self.view, follower, entry) is not None else None

    def _may_start(self, node: Node) -> bool:
        """Whether a kernel may start here: nothing takes it along, or it reads another value and may wait for that."""
        joined = [i for i, v in enumerate(node.inputs) if v is not None and not v.node.constant]
        return not any(self.lowering.joins(self.view, node, i) is not None for i in joined) or len(joined) > 1

    def _possible(self, group: Group[Node, Value]) -> Iterator[list[str]]:
        """The layouts of a kernel's results that are worth a look: each result in the same, where it can."""
        node = group.anchor
        types = [v.type if v is not None else None for v in node.inputs]
        each = [self.layouts.possible(node.op, node.attrs, types, v.type) for v in node.outputs]
        ways = [[x if x in own else own[0] for own in each] for x in dict.fromkeys(x for own in each for x in own)]
        local = [GraphView.layout(self.view, v) for v in group.last.outputs]
        yield local
        yield from (way for way in ways if way != local)

    def _lies(self, group: Group[Node, Value], layouts: Sequence[str]) -> tuple[object, ...]:
        """What a kernel reads and makes, and how."""
        _, reads, makes = self._kernel(group, layouts)
        return group, reads, makes

    def _kernel(
        self, group: Group[Node, Value], layouts: Sequence[str]
    ) -> tuple[Kernel, tuple[Lie, ...], tuple[Lie, ...]]:
        self.view.asked = dict(zip(group.last.outputs, layouts, strict=True))
        kernel, operands = self.lowering.kernel(self.view, group)
        self.view.asked = {}
        read = zip(operands, kernel.operands, strict=True)
        reads = tuple(dict.fromkeys((v, self._name(v, o.layout)) for v, o in read if not o.constant))
        # outputs that nobody reads may not be made
        made = list(zip(group.last.outputs, layouts, strict=True))[: len(kernel.results)]
        return kernel, reads, tuple((v, self._name(v, x)) for v, x in made)

    def _option(self, group: Group[Node, Value], layouts: Sequence[str]) -> _Option:
        kernel, reads, makes = self._kernel(group, layouts)
        cost, algorithm = (0.0, "") if is_view(kernel) else self.costs.cheapest(kernel)
        return _Option(group, kernel, tuple(layouts), reads, makes, cost, algorithm)

    def _change(self, value: Value, source: str, target: str) -> float:
        narrow = self.lowering.narrow(self.view, value)
        return self.costs.kernel(change_of_layout(value.type, source, target, narrow))

    # ── the program ──────────────────────────────────────────────────────────────────────────────────────────────

    def best(self) -> list[_Option] | None:
        """The kernels of the cheapest plan; None where it is not found in time."""
        options = self._options()
        left = self.deadline - time.perf_counter()
        if left <= 0:
            self.told["exact"] = "left out: the time was up"
            return None
        program = IntegerProgram()
        for option in options:
            program.variable(option.cost * MICRO)
        self._demand(program, options)
        values = program.solve(left, MOST_NODES)
        self.told = program.told
        if values is None:
            return None
        return [o for o, x in zip(options, values, strict=False) if x > 0.5]

    def _demand(self, program: IntegerProgram, options: Sequence[_Option]) -> None:
        """Each operator runs once, and what is read lies as it is read, or is brought there by a change of layout."""
        covering: dict[Node, dict[int, float]] = {}
        makers: dict[Value, dict[str, dict[int, float]]] = {}
        readers: dict[Lie, list[int]] = {}
        for number, option in enumerate(options):
            for node in option.group.nodes:
                covering.setdefault(node, {})[number] = 1.0
            for value, layout in option.makes:
                makers.setdefault(value, {}).setdefault(layout, {})[number] = 1.0
            for lie in option.reads:
                readers.setdefault(lie, []).append(number)
        for terms in covering.values():
            program.row(terms, 1.0)
            program.row({i: -1.0 for i in terms}, -1.0)
        outputs = dict.fromkeys((v, self._name(v, PLAIN)) for _, v in self.graph.outputs if not v.node.constant)
        for value, layout in dict.fromkeys((*readers, *outputs)):
            supply = self._supply(program, value, layout, makers.get(value, {}))
            if supply is None:
                continue
            for number in readers.get((value, layout), ()):
                program.row({**supply, number: supply.get(number, 0.0) - 1.0}, 0.0)
            if (value, layout) in outputs:
                program.row(supply, 1.0)

    def _supply(
        self, program: IntegerProgram, value: Value, target: str, makers: dict[str, dict[int, float]]
    ) -> dict[int, float] | None:
        """The variables of which one must be 1 for a value to lie so; None where it always does."""
        given = self._name(value, PLAIN) if value.node.op.has(Trait.SOURCE) else None
        if given == target:
            return None
        supply = dict(makers.get(target, {}))
        for source in (*makers, *(() if given is None else (given,))):
            if source != target:
                change = program.variable(self._change(value, source, target) * MICRO)
                supply[change] = 1.0
                if source in makers:
                    # a change of layout starts from how the value was made
                    program.row({**makers[source], change: -1.0}, 0.0)
        return supply

    def choices(self, chosen: Sequence[_Option]) -> Choices:
        """These kernels as what a backend is told."""
        layouts: dict[tuple[int, int], str] = {}
        entries: dict[int, int | None] = {}
        algorithms: dict[int, str] = {}
        for option in chosen:
            for value, layout in zip(option.group.last.outputs, option.layouts, strict=True):
                layouts[self.place[value.node], value.index] = layout
            for node, entry in zip(option.group.nodes, option.group.entries, strict=True):
                if node.op.has(Trait.ELEMENTWISE) or entry is not None:
                    entries[self.place[node]] = entry
            if option.algorithm:
                algorithms[self.place[option.group.anchor]] = option.algorithm
        return Choices(structure(self.graph), layouts, entries, algorithms)


__all__ = ["Planned", "cost_of", "plan"]
