"""Cost-guided backtracking search (Jia et al., "TASO", SOSP 2019, section 5, algorithm 2).

Best-first over whole graphs: the cheapest candidate is taken off the queue, every rewrite that applies to it makes a
new candidate, and a candidate is queued while its cost lies below α times the best. Here a candidate is a difference
from its parent, and what was found out about a rewrite is carried from a state to its successors while nothing near
it changed.
"""

from __future__ import annotations

import heapq
import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from taso.graph.errors import GraphError, SearchError
from taso.rules.matcher import Match, Matcher
from taso.search.rewrite import Refused, apply
from taso.search.state import Cycle, Draft, State, check


@dataclass(frozen=True)
class Taken:
    """One rewrite on the way to a state: which rule, where, and what it changed (seconds)."""

    match: Match
    gain: float
    cost: float


@dataclass
class Statistics:
    """What a search did."""

    expanded: int = 0
    candidates: int = 0
    reused: int = 0
    duplicates: int = 0
    refused: int = 0
    seconds: float = 0.0
    stopped: str = ""
    course: list[tuple[float, float]] = field(default_factory=list)


@dataclass
class NearMiss:
    """A rewrite that applied to the best graph and was not taken: it would have cost `change` seconds more."""

    match: Match
    change: float


@dataclass
class Outcome:
    """The best state found, how it was reached, and what was tried."""

    initial: State
    best: State
    path: tuple[Taken, ...]
    statistics: Statistics
    near_misses: list[NearMiss] = field(default_factory=list)


@dataclass(frozen=True)
class Evaluation:
    """What a rewrite changes, as long as nothing in `footprint` is touched.

    `constant_bytes` is what it was when it was found: a weight that another rewrite has come to share since is counted
    by both. The state itself, once made, counts it once.
    """

    cost: float
    fingerprint: int
    size: int
    constant_bytes: int
    footprint: frozenset[int]


@dataclass(frozen=True)
class Refusal:
    """Why a rewrite does not apply, as long as nothing in `footprint` is touched."""

    reason: str
    footprint: frozenset[int]


Key = tuple[object, ...]
Findings = dict[Key, Evaluation | Refusal]


@dataclass
class Position:
    """A state with the matches in it and what was found out about each."""

    state: State
    matches: dict[Key, Match]
    findings: Findings
    path: tuple[Taken, ...]


@dataclass(order=True)
class Candidate:
    """A rewrite of a state, ordered by cost and then by content, so that ties fall the same way on every run."""

    cost: float
    fingerprint: int
    number: int
    position: Position = field(compare=False)
    match: Match | None = field(compare=False)

    def taken(self, position: Position) -> Candidate:
        """The same candidate with its rewrite carried out."""
        return Candidate(position.state.cost, self.fingerprint, self.number, position, None)


@dataclass
class Limits:
    """When to stop, and what a candidate may grow to."""

    alpha: float = 1.0
    budget: int = 1000
    time_limit: float | None = None
    constant_bytes: int = 1 << 62

    def __post_init__(self) -> None:
        if isinstance(self.budget, bool) or not isinstance(self.budget, int):
            raise SearchError(f"the budget is a whole number of graphs to expand and cannot be {self.budget!r}")
        for name, value in (("alpha", self.alpha), ("the time limit", self.time_limit or 0)):
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                raise SearchError(f"{name} must be a number, not {value!r}")
        if self.budget < 0:
            raise SearchError(f"the budget is a number of graphs to expand and cannot be {self.budget}")
        if not self.alpha >= 1.0:
            raise SearchError(f"alpha must be at least 1, not {self.alpha}: below it the best itself would be refused")
        if self.time_limit is not None and not self.time_limit >= 0:
            raise SearchError(f"the time limit is in seconds and cannot be {self.time_limit}")


IMPROVEMENT = 1e-10
"""Seconds by which a graph must be cheaper to count as better: less is what sums in another order differ by."""

Progress = Callable[[Statistics, float, float], None]
_MASK = (1 << 64) - 1


class Backtracking:
    """One run of the search. `verify` recomputes everything after each step and compares (for tests)."""

    def __init__(
        self, initial: State, matcher: Matcher, limits: Limits, progress: Progress | None = None, verify: bool = False
    ) -> None:
        self.initial = initial
        self.matcher = matcher
        self.limits = limits
        self.progress = progress
        self.verify = verify
        self.statistics = Statistics()
        self._numbers = itertools.count()
        self._seen = {initial.fingerprint}
        self._most_nodes = 2 * initial.size
        self._started = time.perf_counter()

    def run(self) -> Outcome:
        """Searches until the queue, the budget or the time is used up, or Ctrl-C: the best so far comes back."""
        start = Position(self.initial, {m.key: m for m in self.matcher.find_all(self.initial)}, {}, ())
        best = start
        queue = [Candidate(self.initial.cost, self.initial.fingerprint, next(self._numbers), start, None)]
        self._note(best)
        try:
            while queue and not self._spent():
                cheapest = heapq.heappop(queue)
                if cheapest.position is not best and cheapest.cost >= self.limits.alpha * best.state.cost:
                    # a candidate is kept while its cost lies below the bound, and the queue is sorted
                    break
                position = self._take(cheapest)
                if position is None:
                    continue
                self.statistics.expanded += 1
                for candidate in self._candidates(position):
                    if self._late():
                        break
                    if candidate.cost < best.state.cost - IMPROVEMENT:
                        reached = self._take(candidate)
                        if reached is None:
                            continue
                        best = reached
                        self._note(best)
                        heapq.heappush(queue, candidate.taken(reached))
                    elif candidate.cost < self.limits.alpha * best.state.cost:
                        heapq.heappush(queue, candidate)
        except KeyboardInterrupt:
            self.statistics.stopped = "interrupted"
        self.statistics.seconds = time.perf_counter() - self._started
        return Outcome(self.initial, best.state, best.path, self.statistics, self._near_misses(best))

    def _spent(self) -> bool:
        if self.statistics.expanded >= self.limits.budget:
            self.statistics.stopped = "budget"
            return True
        return self._late()

    def _late(self) -> bool:
        limit = self.limits.time_limit
        if limit is None or time.perf_counter() - self._started < limit:
            return False
        self.statistics.stopped = "time limit"
        return True

    def _note(self, best: Position) -> None:
        self.statistics.course.append((time.perf_counter() - self._started, best.state.cost))

    def _take(self, candidate: Candidate) -> Position | None:
        """The candidate as a state of its own, or None where its rewrite turns out to close a cycle."""
        if candidate.match is None:
            return candidate.position
        parent = candidate.position
        try:
            draft = self._draft(parent.state, candidate.match)
            state = draft.commit()
        except (Cycle, Refused, GraphError) as reason:
            # what a cached evaluation cannot know: the nodes above a match decide whether it closes a cycle
            self.statistics.refused += 1
            parent.findings[candidate.match.key] = Refusal(str(reason), frozenset())
            return None
        if self.verify:
            check(state)
        taken = Taken(candidate.match, parent.state.cost - state.cost, state.cost)
        return Position(state, *self._inherited(parent, draft, state), (*parent.path, taken))

    def _inherited(self, parent: Position, draft: Draft, state: State) -> tuple[dict[Key, Match], Findings]:
        """Matches and findings of the parent that still hold, and the matches that the rewrite made possible."""
        matches = {k: m for k, m in parent.matches.items() if all(n in state.made for n in m.nodes)}
        fresh = [n for n in draft.new_nodes if n in state.made]
        for match in self.matcher.find_at(state, fresh):
            matches.setdefault(match.key, match)
        touched = draft.touched().keys()
        findings: Findings = {
            k: f for k, f in parent.findings.items() if k in matches and f.footprint and f.footprint.isdisjoint(touched)
        }
        return matches, findings

    def _draft(self, state: State, match: Match) -> Draft:
        draft = Draft(state)
        apply(match, draft)
        draft.sweep()
        draft.check_acyclic()
        return draft

    def _candidates(self, position: Position) -> Iterator[Candidate]:
        """Every rewrite of a state that leads somewhere new and is not too big."""
        state = position.state
        for key in sorted(position.matches):
            match = position.matches[key]
            found = self._evaluation(position, match)
            if isinstance(found, Refusal):
                self.statistics.refused += 1
                continue
            self.statistics.candidates += 1
            fingerprint = (state.fingerprint + found.fingerprint) & _MASK
            if fingerprint in self._seen:
                self.statistics.duplicates += 1
                continue
            if state.size + found.size > self._most_nodes:
                continue
            if state.constant_bytes + found.constant_bytes > self.limits.constant_bytes:
                continue
            self._seen.add(fingerprint)
            self._report()
            yield Candidate(state.cost + found.cost, fingerprint, next(self._numbers), position, match)

    def _evaluation(self, position: Position, match: Match) -> Evaluation | Refusal:
        found = position.findings.get(match.key)
        if found is not None:
            self.statistics.reused += 1
            return found
        state = position.state
        try:
            draft = self._draft(state, match)
            found = Evaluation(
                draft.cost() - state.cost, (draft.fingerprint() - state.fingerprint) & _MASK, draft.size_change(),
                draft.constant_bytes() - state.constant_bytes, draft.footprint(),
            )  # fmt: skip
        except Cycle as reason:
            found = Refusal(str(reason), frozenset())
        except (Refused, GraphError) as reason:
            # it follows from the nodes matched, from what they read, and from who reads what they make
            found = Refusal(str(reason), frozenset(match.nodes))
        position.findings[match.key] = found
        return found

    def _report(self) -> None:
        if self.progress is not None:
            best = self.statistics.course[-1][1]
            self.progress(self.statistics, self.initial.cost, best)

    def _near_misses(self, best: Position) -> list[NearMiss]:
        """Rewrites that apply to the best state and do not pay, those closest to paying first."""
        found = [
            NearMiss(best.matches[k], e.cost) for k, e in sorted(best.findings.items()) if isinstance(e, Evaluation)
        ]
        return sorted((m for m in found if m.change >= 0), key=lambda m: m.change)[:20]


def backtrack(
    initial: State, matcher: Matcher, limits: Limits, progress: Progress | None = None, verify: bool = False
) -> Outcome:
    """The best state that TASO's search finds from `initial`.

    Raises `SearchError` for limits that make no sense.
    """
    return Backtracking(initial, matcher, limits, progress, verify).run()
