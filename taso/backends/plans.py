"""Plans in ONNX files: what was chosen for a graph goes along as metadata of its nodes.

A node has a property `taso.plan.BACKEND` that says how its outputs lie, which input's kernel it joins and by which
algorithm its kernel is computed: "layout 0 blocked; join 0; algorithm winograd 4x4". Other runtimes pass over it.
"""

from __future__ import annotations

import copy
import logging
import re
from collections.abc import Iterator
from dataclasses import replace

from taso.backends.lowering import AXES, BLOCKED, LAST, PLAIN, Choices, structure
from taso.graph.graph import Graph, Node

log = logging.getLogger(__name__)

KEY = "taso.plan."
_ALONE = "alone"
_AXES = re.compile(AXES + "[0-4]{3,5}")
Properties = dict[Node, tuple[tuple[str, str], ...]]


def with_plans(graph: Graph) -> Graph:
    """The graph with its plans said of its nodes; the graph itself where it has none."""
    plans = {name: plan for name, plan in graph.plans.items() if isinstance(plan, Choices) and plan.fits(graph)}
    if not plans:
        return graph
    nodes, said = graph.nodes, dict[Node, tuple[tuple[str, str], ...]](graph.info.node_metadata)
    for backend, plan in plans.items():
        for place, text in _texts(plan).items():
            node, key = nodes[place], KEY + backend
            others = tuple(p for p in said.get(node, ()) if p[0] != key)
            said[node] = (*others, (key, text))
    annotated = copy.copy(graph)
    annotated.info = replace(graph.info, node_metadata=said)
    return annotated


def _texts(plan: Choices) -> dict[int, str]:
    parts: dict[int, list[str]] = {}
    for (place, output), layout in sorted(plan.layouts.items()):
        parts.setdefault(place, []).append(f"layout {output} {layout}")
    for place, entry in sorted(plan.entries.items()):
        parts.setdefault(place, []).append(_ALONE if entry is None else f"join {entry}")
    for place, algorithm in sorted(plan.algorithms.items()):
        if algorithm:
            parts.setdefault(place, []).append(f"algorithm {algorithm}")
    return {place: "; ".join(found) for place, found in parts.items()}


def with_usual_algorithms(graph: Graph) -> Graph:
    """The graph with the plans that it has, but for algorithms other than the usual ones."""
    if not any(isinstance(plan, Choices) and plan.algorithms for plan in graph.plans.values()):
        return graph
    bare = copy.copy(graph)
    for name, plan in graph.plans.items():
        if isinstance(plan, Choices):
            bare.plans[name] = replace(plan, algorithms={})
    return bare


def take_plans(graph: Graph) -> None:
    """Makes plans of what a file says of its nodes, and keeps the rest of their metadata.

    What cannot be read is left out, with a warning: the graph is then run by the local rule. Whether a plan is one for
    the graph is seen when it is lowered.
    """
    if not any(key.startswith(KEY) for said in graph.info.node_metadata.values() for key, _ in said):
        return
    kept: Properties = {}
    found: dict[str, list[tuple[int, str]]] = {}
    places = {node: i for i, node in enumerate(graph.nodes)}
    for node, said in graph.info.node_metadata.items():
        rest = tuple(p for p in said if not p[0].startswith(KEY))
        if rest:
            kept[node] = rest
        for key, text in said:
            if key.startswith(KEY) and node in places:
                found.setdefault(key.removeprefix(KEY), []).append((places[node], text))
    graph.info.node_metadata = kept
    for backend, texts in found.items():
        try:
            graph.plans[backend] = _read(graph, texts)
        except ValueError as reason:
            log.warning("the plan for %s in the file is not used: %s", backend, reason)


def _read(graph: Graph, texts: list[tuple[int, str]]) -> Choices:
    layouts: dict[tuple[int, int], str] = {}
    entries: dict[int, int | None] = {}
    algorithms: dict[int, str] = {}
    for place, text in texts:
        for kind, told in _parts(text):
            if kind == "layout":
                output, _, layout = told.partition(" ")
                if layout not in (PLAIN, BLOCKED, LAST) and not _AXES.fullmatch(layout):
                    raise ValueError(f"'{layout}' is no layout")
                layouts[place, _output(graph, place, output)] = layout
            elif kind == "join":
                entries[place] = _input(graph, place, told)
            elif kind == _ALONE and not told:
                entries[place] = None
            elif kind == "algorithm" and told:
                algorithms[place] = told
            else:
                raise ValueError(f"'{kind} {told}' says nothing of a plan")
    return Choices(structure(graph), layouts, entries, algorithms)


def _parts(text: str) -> Iterator[tuple[str, str]]:
    for part in text.split(";"):
        kind, _, told = part.strip().partition(" ")
        yield kind, told


def _output(graph: Graph, place: int, told: str) -> int:
    if not told.isdecimal() or int(told) >= len(graph.nodes[place].outputs):
        raise ValueError(f"node {place} has no output {told}")
    return int(told)


def _input(graph: Graph, place: int, told: str) -> int:
    inputs, entry = graph.nodes[place].inputs, int(told)
    if not 0 <= entry < len(inputs) or inputs[entry] is None:
        raise ValueError(f"node {place} has no input {entry}")
    return entry


__all__ = ["KEY", "take_plans", "with_plans", "with_usual_algorithms"]
