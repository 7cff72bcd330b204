"""Pictures of the graph that was given and of the one that came back: kernels as boxes, their costs, what differs."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from taso.backends.lowering import (
    PLAIN,
    Choices,
    Job,
    Kernel,
    Lowering,
    Plan,
    change_of_layout,
    choices_of,
    is_view,
    lower,
)
from taso.graph.graph import Graph, Node, Value
from taso.graph.picture import OPERATOR, PLANNED, REWRITTEN, Box, Drawing, Picture, counterparts, drawn

KnownCost = Callable[[Kernel], float | None]
"""Seconds of a kernel, None where they are not known."""


def pictured(graph: Graph, lowering: Lowering, cost: KnownCost, choices: Choices | None) -> Drawing:
    """The picture of a graph of static types as a program runs it: kernels, and changes of layout between them."""
    lowered = lower(graph, lowering, choices)
    drawing = Drawing(graph)
    numbers: dict[int, Job] = {}
    for node in graph.operators:
        if node.constant:
            drawing.add_node(node)
    for job in lowered.jobs:
        numbers[len(drawing.boxes)] = job
        box = drawing.add(_nodes(job))
        seconds = 0.0 if is_view(job.kernel) else cost(job.kernel)
        box.cost_ms = None if seconds is None else seconds * 1e3
        box.algorithm = job.kernel.algorithm
        layouts = dict.fromkeys(r.layout for r in job.kernel.results if r.layout != PLAIN)
        box.layout = ", ".join(layouts)
    changed = _Changes(drawing, lowering, lowered, cost)
    for number, job in numbers.items():
        for value, operand in zip(job.operands, job.kernel.operands, strict=True):
            changed.read(number, value, operand.layout)
    for _, value in graph.outputs:
        changed.read(-1, value, PLAIN)
    drawing.finish(changed.instead)
    return drawing


class _Changes:
    """The changes of layout that kernels imply, each drawn once."""

    def __init__(self, drawing: Drawing, lowering: Lowering, plan: Plan, cost: KnownCost) -> None:
        self.drawing, self.lies, self.narrow, self.cost = drawing, plan.layouts, plan.narrow, cost
        self.name = lowering.layouts.canonical
        self.made: dict[tuple[Value, str], int] = {}
        self.instead: dict[tuple[int, Value], int] = {}

    def read(self, number: int, value: Value, layout: str) -> None:
        """Box `number` (−1: an output of the graph) reads a value in a layout."""
        if value.node.constant:
            return
        source, target = self.name(value.type, self.lies[value]), self.name(value.type, layout)
        if source == target:
            return
        if (value, target) not in self.made:
            kernel = change_of_layout(value.type, source, target, value in self.narrow)
            self.made[value, target] = self.drawing.add_change(value, f"{source} → {target}")
            seconds = self.cost(kernel)
            self.drawing.boxes[-1].cost_ms = None if seconds is None else seconds * 1e3
        self.instead[number, value] = self.made[value, target]


def _nodes(job: Job) -> list[Node]:
    """The nodes that a kernel runs, producers first: all between its operands and its result."""
    given, found, waiting = set(job.operands), dict[Node, None](), [job.results[0].node]
    while waiting:
        node = waiting.pop()
        if node not in found:
            found[node] = None
            waiting += [v.node for v in node.inputs if v is not None and v not in given and not v.node.constant]
    return sorted(found, key=lambda n: n.guid)


# ── before and after ─────────────────────────────────────────────────────────────────────────────────────────────


def before_and_after(
    before: Graph, after: Graph, bound: Callable[[Graph], Graph | None], backend: str, lowering: Lowering,
    cost: KnownCost,
) -> tuple[Picture, Picture]:  # fmt: skip
    """Pictures of two graphs, with marks on what differs; `bound` gives a graph at the sizes measured at, if it can.

    A graph whose sizes stay open is drawn operator by operator, without costs.
    """
    drawings = []
    for graph in (before, after):
        static = bound(graph)
        choices = choices_of(graph, backend)
        drawings.append(drawn(graph) if static is None else pictured(static, lowering, cost, choices))
    _mark(*drawings)
    return drawings[0].picture, drawings[1].picture


def _mark(first: Drawing, second: Drawing) -> None:
    """Marks operators that have no counterpart, and kernels of the same operators that run otherwise."""
    same = counterparts(first.graph, second.graph)
    kept = set(same.values())
    names = {node: step.name for node, step in first.steps()}
    for node, step in first.steps():
        step.changed = node not in kept
    for node, step in second.steps():
        step.changed = node not in same
        # what a name without a name in the file says is a place, and that is one in the graph that was given
        step.name = names.get(same[node], step.name) if node in same else "" if "#" in step.name else step.name
    ways = {_way(box, nodes, {}) for box, nodes in first.boxes_and_nodes()}
    others = {_way(box, nodes, same) for box, nodes in second.boxes_and_nodes()}
    for drawing, renamed, other in ((first, {}, others), (second, same, ways)):
        for box, nodes in drawing.boxes_and_nodes():
            if any(step.changed for step in box.steps):
                box.change = REWRITTEN
            elif box.kind == OPERATOR and _way(box, nodes, renamed) not in other:
                box.change = PLANNED


def _way(box: Box, nodes: tuple[Node, ...], same: Mapping[Node, Node]) -> object:
    """What runs in a box, and how."""
    return tuple(same.get(node, node) for node in nodes), box.algorithm, box.layout


__all__ = ["before_and_after", "pictured"]
