"""Equality saturation (Yang et al., "Equality Saturation for Tensor Graph Superoptimization", MLSys 2021).

All rewrites are carried out at once in an e-graph, which keeps both sides; then the cheapest graph in it is taken out.
A step that makes a graph dearer for a while costs nothing here. Rules of several outputs make an e-graph explode and
are applied in the first iterations only; cycles are filtered after each.
"""

from __future__ import annotations

import copy
import itertools
import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from taso.graph.errors import GraphError
from taso.graph.operator import Operator, Trait
from taso.graph.ops import WEIGHT
from taso.rules.constants import CONSTANTS
from taso.rules.matcher import CompiledRule, Hop, Match, Matcher
from taso.rules.pattern import PatternNode, Port
from taso.search.egraph import EGraph, Spot
from taso.search.extraction import Extraction, Extractor
from taso.search.moves import IMPROVEMENT, Limits, Moves, Outcome, Position, Progress, Taken
from taso.search.rewrite import Refused, apply
from taso.search.state import Cycle, State, check

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Bounds:
    """How far an e-graph may grow, and how long the integer program may be worked on.

    `iterations` in which rules are applied, those of several outputs in the first `several` of them only; `nodes` that
    do work at run time, at most `matches` of one rule in an iteration, found in at most ten times as many places;
    `looks` at places in all. `seconds` are for the integer program, of whose tree at most `solver_nodes` are looked at;
    it is left out where there are more than `kernels` to choose from.
    """

    iterations: int = 12
    several: int = 2
    nodes: int = 4000
    matches: int = 400
    looks: int = 60_000
    seconds: float = 20.0
    kernels: int = 20_000
    exact: bool = True
    solver_nodes: int | None = None


class _Judge(Matcher):
    """The matcher of one rule, which has the last word on where it applies."""

    def __init__(self, compiled: CompiledRule) -> None:
        super().__init__(())
        # alone it is the first
        self.rules = [copy.copy(compiled)]
        self.rules[0].number = 0

    def at(self, spot: Spot, place: int, nodes: tuple[int, ...]) -> Iterator[Match]:
        """Matches of the rule's source to `nodes` in this order; `place` is where to begin."""
        for match in self._from(spot, self.rules[0], place, nodes[place]):
            if match.nodes == nodes:
                yield match


@dataclass
class _Known:
    """A rule, where it was looked at, and where it is still to be looked for."""

    compiled: CompiledRule
    judge: _Judge
    seen: set[tuple[int, ...]] = field(default_factory=set)
    merged: set[tuple[int, ...]] = field(default_factory=set)
    waiting: list[tuple[int, int]] = field(default_factory=list)

    @property
    def several(self) -> bool:
        return len(self.compiled.rule.outputs) > 1

    def at(self, egraph: EGraph, place: int, nodes: tuple[int, ...]) -> Iterator[Match]:
        """The matches to `nodes` where they were not looked at; of several outputs side by side one order is enough."""
        together = tuple(sorted(nodes))
        if nodes in self.seen or together in self.merged:
            return
        self.seen.add(nodes)
        for match in self.judge.at(Spot(egraph, nodes), place, nodes):
            if self.several:
                self.merged.add(together)
            yield match


class Saturation(Moves):
    """One run of the search. `verify` recomputes everything about the state taken out and compares (for tests)."""

    name = "saturation"

    def __init__(
        self, initial: State, matcher: Matcher, limits: Limits, progress: Progress | None = None, verify: bool = False,
        earlier: Outcome | None = None, bounds: Bounds | None = None,
    ) -> None:  # fmt: skip
        super().__init__(initial, matcher, limits, progress, verify, earlier)
        self.bounds = bounds or Bounds()
        self._rules = [_Known(c, _Judge(c)) for c in matcher.rules]
        self._by_op: dict[Operator, list[tuple[_Known, int]]] = {}
        for known in self._rules:
            for place, node in enumerate(known.compiled.rule.source):
                self._by_op.setdefault(_stands_for(node), []).append((known, place))

    def run(self) -> Outcome:
        """Grows the e-graph until nothing is new or a limit is met, then takes the cheapest graph out.

        The best so far comes back after Ctrl-C: what the search started from, or what extraction had found.
        """
        state, path = (self.initial, ()) if self.earlier is None else (self.earlier.best, self.earlier.path)
        self.best = Position(state, {}, {}, path)
        self._note(self.best)
        with self._stopping():
            if not self._spent():
                self._search(EGraph(state))
        return self._outcome(self.best)

    def _search(self, egraph: EGraph) -> None:
        started = time.perf_counter()
        self._saturate(egraph)
        details = self.statistics.details
        details.update(
            iterations=self.statistics.expanded, nodes=egraph.size, classes=len(egraph.makers),
            filtered=len(egraph.filtered), saturation_seconds=time.perf_counter() - started,
        )  # fmt: skip
        extractor = Extractor(egraph, self.limits, self._left)
        seconds = self.bounds.seconds if self.bounds.exact else None
        for found in extractor.run(seconds, self.bounds.kernels, self.bounds.solver_nodes):
            self._consider(egraph, found)
        details.update(extractor.told)

    def _left(self) -> float | None:
        """Seconds until the time limit."""
        if self.limits.time_limit is None:
            return None
        return max(self.limits.time_limit - (time.perf_counter() - self._started), 0.0)

    def _consider(self, egraph: EGraph, found: Extraction) -> None:
        """Takes a graph that was extracted for the best one where its lowering plan is cheaper and it may be as big."""
        state = found.state
        self.statistics.details[f"{found.how}_cost_ms"] = state.cost * 1e3
        if state.constant_bytes > self.limits.constant_bytes or state.cost >= self.best.state.cost - IMPROVEMENT:
            return
        if self.verify:
            check(state)
        self.best = Position(state, {}, {}, self._path(egraph, state))
        self._note(self.best)
        self._report()

    def _path(self, egraph: EGraph, state: State) -> tuple[Taken, ...]:
        """The rewrites that made what is in the state, in the order in which they were carried out.

        They were taken all at once: what they gain together is said of the last one.
        """
        before, so_far = egraph.start, self.earlier.path if self.earlier is not None else ()
        used = {id(m): m for n in state.made if n not in before.made and (m := egraph.made_by.get(n)) is not None}
        for match, value in egraph.merges:
            members = egraph.members.get(egraph.find(value), ())
            if egraph.find(value) in state.producers and sum(c in before.producers for c in members) > 1:
                used[id(match)] = match
        stack = list(used.values())
        while stack:
            # what a match was found on may have been made by another one and be gone from the state
            for node in stack.pop().nodes:
                maker = egraph.made_by.get(node)
                if maker is not None and id(maker) not in used:
                    used[id(maker)] = maker
                    stack.append(maker)
        ordered = [m for m in self._applied if id(m) in used]
        taken = [Taken(m, 0.0, before.cost) for m in ordered]
        if taken:
            taken[-1] = replace(taken[-1], gain=before.cost - state.cost, cost=state.cost)
        return (*so_far, *taken)

    # ── growing ──────────────────────────────────────────────────────────────────────────────────────────────────

    def _saturate(self, egraph: EGraph) -> None:
        self._applied: list[Match] = []
        self._looks = self.bounds.looks
        reason = "iterations"
        for iteration in range(min(self.bounds.iterations, self.limits.budget)):
            with self.clock("matching"):
                matches = list(self._matches(egraph, iteration < self.bounds.several))
            self.statistics.expanded += 1
            before = len(self._applied)
            with self.clock("evaluating"):
                full = self._apply(egraph, matches)
                egraph.begin(None)
                egraph.rebuild()
                egraph.filter_cycles()
            self._report()
            if full or self._late() or not self._looks:
                reason = "nodes" if full else "looks" if not self._looks else "time"
                break
            if len(self._applied) == before and not self._waiting(iteration + 1 < self.bounds.several):
                reason = "saturated"
                break
        self.statistics.details["ended_by"] = reason

    def _waiting(self, several: bool) -> bool:
        return any(r.waiting for r in self._rules if several or not r.several)

    def _apply(self, egraph: EGraph, matches: Sequence[tuple[_Known, Match]]) -> bool:
        """Carries matches out; True where the e-graph is full."""
        own, below = egraph.below()
        for known, match in matches:
            if egraph.size >= self.bounds.nodes:
                return True
            if self._late():
                return False
            self.statistics.candidates += 1
            if known.several and _closes_cycle(egraph, match, own, below):
                self.statistics.refused += 1
                continue
            if any(n not in egraph.nodes for n in match.nodes):
                continue
            egraph.begin(match)
            try:
                apply(match, Spot(egraph, match.nodes))
            except (Cycle, Refused, GraphError) as reason:
                log.debug("%s does not apply: %s", match.rule.name, reason)
                self.statistics.refused += 1
                continue
            self._applied.append(match)
        return False

    # ── matching ─────────────────────────────────────────────────────────────────────────────────────────────────

    def _matches(self, egraph: EGraph, several: bool) -> Iterator[tuple[_Known, Match]]:
        """Matches that were not there before, rule by rule, those of one output first and those of `several` last."""
        changed, egraph.changed = sorted(n for n in egraph.changed if n in egraph.nodes), {}
        for node in changed:
            for known, place in self._by_op.get(egraph.setting.store.entries[node].op, ()):
                known.waiting.append((place, node))
        for known in sorted(self._rules, key=lambda r: (r.several, r.compiled.number)):
            if several or not known.several:
                for match in self._found(egraph, known):
                    yield known, match

    def _found(self, egraph: EGraph, known: _Known) -> Iterator[Match]:
        """New matches of a rule, no more than the bound; where to look for the rest is kept for the next iteration."""
        count, place, least = 0, 0, self._looks - 10 * self.bounds.matches
        while place < len(known.waiting) and count < self.bounds.matches and self._looks > max(least, 0):
            if self._late():
                break
            for match in self._at(egraph, known, *known.waiting[place]):
                yield match
                count += 1
                if count >= self.bounds.matches:
                    break
            else:
                place += 1
        del known.waiting[:place]

    def _at(self, egraph: EGraph, known: _Known, place: int, node: int) -> Iterator[Match]:
        """Matches of a rule whose source node `place` is `node`, of the first places where its shape fits."""
        if node not in egraph.nodes:
            return
        found = _placements(egraph, known.compiled, {place: node}, known.compiled.routes[place])
        fresh = (n for n in (tuple(f[i] for i in range(len(f))) for f in found) if n not in known.seen)
        for nodes in itertools.islice(fresh, min(self.bounds.matches, self._looks)):
            self._looks -= 1
            yield from known.at(egraph, place, nodes)


def _stands_for(node: PatternNode) -> Operator:
    return WEIGHT if node.op in CONSTANTS else node.op


def _placements(
    egraph: EGraph, compiled: CompiledRule, nodes: dict[int, int], hops: Sequence[Hop]
) -> Iterator[dict[int, int]]:
    """Where the operators and edges of a rule's source fit; the rest is the matcher's to judge."""
    if not hops:
        yield nodes
        return
    hop, source = hops[0], compiled.rule.source
    wanted = _stands_for(source[hop.node])
    for candidate in dict.fromkeys(_reached(egraph, source, nodes, hop)):
        if egraph.setting.store.entries[candidate].op is not wanted or candidate in nodes.values():
            continue
        extended = {**nodes, hop.node: candidate}
        if _joined(egraph, source, extended, hop.node):
            yield from _placements(egraph, compiled, extended, hops[1:])


def _reached(egraph: EGraph, source: Sequence[PatternNode], nodes: dict[int, int], hop: Hop) -> Iterator[int]:
    if hop.kind == "up":
        for value in _read(egraph, source, nodes, hop.other, hop.slot):
            yield from egraph.usable(value)
    elif hop.kind == "down":
        classes = egraph.nodes[nodes[hop.other]]
        if hop.slot < len(classes):
            yield from egraph.readers.get(classes[hop.slot], ())
    elif hop.kind == "beside":
        for place, pattern in enumerate(source):
            if place in nodes and hop.variable in pattern.inputs:
                for value in _read(egraph, source, nodes, place, pattern.inputs.index(hop.variable)):
                    yield from egraph.readers.get(value, ())
                return
    else:
        for node in nodes.values():
            for value in egraph.operands(node):
                yield from egraph.readers.get(value, ())
            for value in egraph.nodes[node]:
                for reader in egraph.readers.get(value, ()):
                    for other in egraph.operands(reader):
                        yield from egraph.usable(other)


def _read(
    egraph: EGraph, source: Sequence[PatternNode], nodes: dict[int, int], place: int, slot: int
) -> Sequence[int]:
    """What a source node may read by an input: a commutative operator either of its two."""
    inputs = egraph.setting.store.entries[nodes[place]].inputs
    if source[place].op.has(Trait.COMMUTATIVE) and len(inputs) == 2:
        return [c for c in inputs if c is not None]
    value = inputs[slot] if slot < len(inputs) else None
    return [] if value is None else [value]


def _joined(egraph: EGraph, source: Sequence[PatternNode], nodes: dict[int, int], place: int) -> bool:
    """Whether the edges between a source node and the others found so far are there."""
    for reader in nodes:
        for slot, ref in enumerate(source[reader].inputs):
            if isinstance(ref, Port) and ref.node in nodes and place in (reader, ref.node):
                maker = nodes[ref.node]
                classes = egraph.nodes[maker]
                if ref.output >= len(classes):
                    return False
                value = classes[ref.output]
                if value not in _read(egraph, source, nodes, reader, slot) or (value, maker) in egraph.filtered:
                    return False
    return True


def _closes_cycle(egraph: EGraph, match: Match, own: dict[int, int], below: dict[int, int]) -> bool:
    """Whether a rule of several outputs would make one of them depend on another, or on itself."""
    made = 0
    for port, _ in match.rule.outputs:
        node = match.nodes[port.node]
        if node in egraph.nodes:
            made |= own.get(egraph.nodes[node][port.output], 0)
    return any(below.get(egraph.find(c), 0) & made for c in match.variables.values())


def saturate(
    initial: State, matcher: Matcher, limits: Limits, progress: Progress | None = None, verify: bool = False,
    earlier: Outcome | None = None, bounds: Bounds | None = None,
) -> Outcome:  # fmt: skip
    """The cheapest state of the e-graph that grows from `initial`, or from the best of `earlier`.

    `limits.budget` bounds the iterations, `bounds` the rest; α has no say. Raises `SearchError` for limits that make no
    sense.
    """
    return Saturation(initial, matcher, limits, progress, verify, earlier, bounds).run()


__all__ = ["Bounds", "Saturation", "saturate"]
