"""Plans for tests of machine code: layouts, joins and algorithms of a graph's kernels."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

from taso.backends.lowering import LAST, Choices, GraphView, Lowering, structure
from taso.backends.onednn.backend import OneDNNBackend
from taso.graph.graph import Graph

Choose = Callable[[tuple[str, ...]], str]


def lowering() -> Lowering:
    return OneDNNBackend(1).lowering


def possible_layouts(graph: Graph) -> dict[tuple[int, int], tuple[str, ...]]:
    """By place of a node and number of its output."""
    layouts, found = lowering().layouts, {}
    for place, node in enumerate(graph.nodes):
        types = [None if v is None else v.type for v in node.inputs]
        for v in node.outputs if node in set(graph.run_time_nodes) else ():
            found[place, v.index] = layouts.possible(node.op, node.attrs, types, v.type)
    return found


def with_algorithms(graph: Graph, bare: Choices, choose: Choose) -> Choices:
    """Choices with an algorithm for each kernel that has some."""
    low, place = lowering(), {node: i for i, node in enumerate(graph.nodes)}
    view, algorithms = GraphView(graph, low.layouts, bare), {}
    for node in graph.run_time_nodes:
        if low.anchor_of(view, node) is node:
            name = choose(low.algorithms(low.kernel(view, low.group(view, node))[0]))
            if name:
                algorithms[place[node]] = name
    return replace(bare, algorithms=algorithms)


def drawn(graph: Graph, seed: int) -> Choices:
    """Layouts, joins and algorithms at random among those that there are."""
    chance = random.Random(seed)
    lies = {at: LAST if LAST in names and chance.random() < 0.7 else chance.choice(names)
            for at, names in possible_layouts(graph).items() if chance.random() < 0.8}  # fmt: skip
    entries: dict[int, int | None] = {at: None for at, _ in lies if chance.random() < 0.15}
    bare = Choices(structure(graph), lies, entries)
    return with_algorithms(graph, bare, lambda names: chance.choice(names) if names and chance.random() < 0.9 else "")
