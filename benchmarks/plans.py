"""Plans carried from an optimized graph to the graph that its ONNX file loads as.

A file says nothing of a plan, and lists weights in another order than the graph had them.
"""

from __future__ import annotations

from dataclasses import replace

import taso
from taso.backends.lowering import Choices, structure

Source = str
Parsed = list[tuple[str, tuple[Source, ...]]]


def carried(choices: Choices, graph: taso.Graph) -> Choices | None:
    """The choices for `graph`, the one that they were made for but for the places of its weights; None for another."""
    old, new = _parsed(choices.operators), _parsed(structure(graph))
    places = _places(old, new)
    if places is None:
        return None
    found = replace(
        choices, operators=structure(graph),
        layouts={(places[node], output): layout for (node, output), layout in choices.layouts.items()},
        entries={places[node]: entry for node, entry in choices.entries.items()},
        algorithms={places[node]: name for node, name in choices.algorithms.items()},
    )  # fmt: skip
    return found if _moved(old, places) == dict(enumerate(new)) else None


def _parsed(operators: tuple[str, ...]) -> Parsed:
    return [(name, tuple(sources)) for name, *sources in (text.split(" ") for text in operators)]


def _places(old: Parsed, new: Parsed) -> dict[int, int] | None:
    """Where each node is in the new graph: operators by their order, weights by who reads them first."""
    ours, theirs = ([i for i, (name, _) in enumerate(p) if name != "Weight"] for p in (old, new))
    if len(old) != len(new) or len(ours) != len(theirs):
        return None
    places = dict(zip(ours, theirs, strict=True))
    for before, after in list(places.items()):
        if len(old[before][1]) != len(new[after][1]):
            return None
        for source, target in zip(old[before][1], new[after][1], strict=True):
            if source and source != "-" and old[_place(source)][0] == "Weight":
                places.setdefault(_place(source), _place(target))
    return places if len(places) == len(old) else None


def _place(source: Source) -> int:
    return int(source.split(".")[0]) if source not in ("", "-") else -1


def _moved(old: Parsed, places: dict[int, int]) -> dict[int, tuple[str, tuple[Source, ...]]]:
    def moved(source: Source) -> Source:
        if source in ("", "-"):
            return source
        place, output = source.split(".")
        return f"{places[int(place)]}.{output}"

    return dict(sorted((places[i], (name, tuple(map(moved, sources)))) for i, (name, sources) in enumerate(old)))
