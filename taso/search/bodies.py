"""The bodies of If, Loop and Scan: each is searched like a graph of its own before the graph around it is."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from taso.backends.base import Executable
from taso.graph.cut import without_unrunnable
from taso.graph.errors import GraphError, TasoError
from taso.graph.graph import Graph, Node
from taso.graph.onnx_bodies import Body, body_labels, read_body, with_bodies
from taso.search.result import Report
from taso.search.settings import Settings
from taso.search.verify import Feeds, compare, programs, race, random_feeds
from taso.search.watching import Watch

log = logging.getLogger(__name__)

_DRAWS = 4
_TRIES = 3

Search = Callable[[Graph, Settings, Report], Graph]
Changed = dict[Node, list[tuple[Body, Graph]]]


def optimize_bodies(graph: Graph, settings: Settings, report: Report, search: Search) -> Graph:
    """`graph` with its bodies optimized by `search`; itself where none got better, or where that cannot be shown.

    Bodies take at most half of the budget and of the time. All of them together are compared with the original and
    measured against it within the whole graph, for nobody can tell how often a body runs.
    """
    if settings.limits.budget == 0:
        return graph
    if not any(body_labels(node) for node in graph.operators):
        return graph
    found = _Bodies(graph, settings, report, search)
    found.run()
    report.bodies_expanded = found.spent
    if not found.changed:
        return graph
    try:
        best = with_bodies(graph, found.changed)
        refused = _refused(graph, best, settings)
    except (TasoError, MemoryError) as error:
        refused = str(error)
    if refused:
        log.warning("the bodies stay as they are: %s", refused)
        report.messages.append(f"the bodies stay as they are: {refused}")
        return graph
    report.body_rewrites = found.rewrites
    return best


class _Bodies:
    """Searches all bodies of one graph, within one budget."""

    def __init__(self, graph: Graph, settings: Settings, report: Report, search: Search) -> None:
        self.graph = graph
        self.settings = settings
        self.report = report
        self.search = search
        self.changed: Changed = {}
        self.rewrites = 0
        self.spent = 0
        self.budget = settings.limits.budget - settings.limits.budget // 2
        limit = settings.limits.time_limit
        self.deadline = None if limit is None else time.perf_counter() + limit / 2

    def run(self) -> None:
        for node in self.graph.operators:
            for position, label in enumerate(body_labels(node)):
                which = f"{label} of {self._name(node)}"
                if self.spent >= self.budget or self._left() == 0.0:
                    self._say(which, "budget or time are used up")
                    continue
                try:
                    self._one(node, position, which)
                except (TasoError, MemoryError) as error:
                    log.info("%s stays as it is: %s", which, error)
                    self._say(which, str(error))

    def _one(self, node: Node, position: int, which: str) -> None:
        body = read_body(self.graph, node, position, self.settings.sizes)
        inner = Report(self.report.backend, self.report.device)
        best = self.search(body.graph, self._settings(body), inner)
        self.spent += inner.expanded + inner.bodies_expanded
        if not inner.changed:
            self._say(which, inner.decision)
            return
        # written once here, so that a body that cannot be written leaves the others alone
        with_bodies(self.graph, {node: [(body, best)]})
        self.changed.setdefault(node, []).append((body, best))
        self.rewrites += len(inner.rewrites) + inner.body_rewrites + bool(inner.shapes_folded)
        rules = ", ".join(r.rule for r in inner.rewrites)
        self.report.messages.append(f"{which}: {len(inner.rewrites)} rewrites{': ' if rules else ''}{rules}")
        self.report.messages.extend(f"{which}: {said}" for said in inner.messages)

    def _say(self, which: str, why: str) -> None:
        self.report.messages.append(f"{which} stays as it is: {why}")

    def _name(self, node: Node) -> str:
        name = self.graph.info.node_names.get(node)
        return f"{node.op.label} '{name}'" if name else node.op.label

    def _left(self) -> float | None:
        return None if self.deadline is None else max(self.deadline - time.perf_counter(), 0.0)

    def _settings(self, body: Body) -> Settings:
        """As those around, but compared in any case and not timed: only the whole graph can be."""
        limits = replace(self.settings.limits, budget=self.budget - self.spent, time_limit=self._left())
        return replace(
            self.settings, limits=limits, verify=True, never_slower=False, sizes=dict(body.like), progress=False,
            seed=_telling_seed(body, self.settings.seed), watch=Watch(),
        )  # fmt: skip


def _telling_seed(body: Body, seed: int) -> int:
    """A seed whose first two trials feed different conditions and counters: equal ones would say nothing of them."""
    try:
        for candidate in range(seed, seed + 32):
            first, second = (random_feeds(body.graph, body.like, candidate + i, positive=i == 1) for i in (0, 1))
            if all(a.size != 1 or not np.array_equal(a, second[name]) for name, a in first.items()):
                return candidate
    except TasoError as error:
        log.debug("%s: no random inputs: %s", body.label, error)
    return seed


def _refused(graph: Graph, best: Graph, settings: Settings) -> str:
    """Why the graph with new bodies may not be used; "" where it may."""
    before, after = without_unrunnable(graph), without_unrunnable(best)
    if settings.verify:
        check = compare(before, after, settings.sizes, settings.seed)
        if not check.passed:
            return check.reason
    if not settings.never_slower or not settings.backend.measures:
        return ""
    original, candidate = programs(settings.backend, before, after, settings.threads)
    timing = race(original, candidate, _busiest(original, before, settings))
    return "" if timing.faster else "the whole graph with the new ones is not measurably faster"


def _busiest(program: Executable, graph: Graph, settings: Settings) -> Feeds:
    """Of some random inputs those on which the program takes longest: a Loop of no iterations would say nothing."""
    slowest, found = -1.0, None
    for seed in range(settings.seed, settings.seed + _DRAWS):
        feeds = random_feeds(graph, settings.sizes, seed)
        try:
            taken = min(_seconds(program, feeds) for _ in range(_TRIES))
        except TasoError as error:
            log.debug("not timed on the inputs of seed %d: %s", seed, error)
            continue
        if taken > slowest:
            slowest, found = taken, feeds
    if found is None:
        raise GraphError("the original does not run on random inputs")
    return found


def _seconds(program: Executable, feeds: Feeds) -> float:
    started = time.perf_counter()
    program(feeds)
    return time.perf_counter() - started


__all__ = ["optimize_bodies"]
