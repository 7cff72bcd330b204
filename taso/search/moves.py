"""Moves: from a state to those that a rewrite of it makes. What all searches that go from state to state share.

A candidate is a difference from its parent, and what was found out about a rewrite is carried from a state to its
successors while nothing near it changed.
"""

from __future__ import annotations

import itertools
import logging
import os
import time
from collections.abc import Callable, Iterator, Set
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from taso.graph.errors import GraphError, SearchError
from taso.rules.matcher import Match, Matcher
from taso.search.memory import resident_bytes
from taso.search.rewrite import Refused, apply
from taso.search.state import Cycle, Draft, State, check

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Taken:
    """One rewrite on the way to a state: which rule, where, and what it changed (seconds)."""

    match: Match
    gain: float
    cost: float


@dataclass
class Statistics:
    """What a search did. `details` are what a search counts that others do not."""

    search: str = "backtracking"
    expanded: int = 0
    candidates: int = 0
    reused: int = 0
    duplicates: int = 0
    refused: int = 0
    seconds: float = 0.0
    stopped: str = ""
    course: list[tuple[float, float]] = field(default_factory=list)
    details: dict[str, float | str] = field(default_factory=dict)


@dataclass
class NearMiss:
    """A rewrite that applied to the best graph and was not taken: it would have cost `change` seconds more."""

    match: Match
    change: float


@dataclass
class Outcome:
    """The best state found, how it was reached, and what was tried.

    `order` are the nodes of the best in the order in which it is to be written, where that matters.
    """

    initial: State
    best: State
    path: tuple[Taken, ...]
    statistics: Statistics
    near_misses: list[NearMiss] = field(default_factory=list)
    order: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Evaluation:
    """What a rewrite changes, as long as nothing in `footprint` is touched and each value of `crowded` keeps readers.

    `crowded` says of how many readers a value must not have fewer: as long as it has several, nothing is fused with it.
    `constant_bytes` is what it was when it was found: a weight that another rewrite has come to share since is counted
    by both. The state itself, once made, counts it once.
    """

    cost: float
    fingerprint: int
    witness: int
    size: int
    constant_bytes: int
    footprint: frozenset[int]
    crowded: tuple[tuple[int, int], ...]

    def holds(self, state: State, disturbed: Set[int]) -> bool:
        """Whether it is the same in `state`, which differs in what was `disturbed` from where it was found."""
        return self.footprint.isdisjoint(disturbed) and all(len(state.consumers(v)) >= n for v, n in self.crowded)


@dataclass(frozen=True)
class Refusal:
    """Why a rewrite does not apply, as long as nothing in `footprint` is touched."""

    reason: str
    footprint: frozenset[int]

    def holds(self, state: State, disturbed: Set[int]) -> bool:
        """Whether it is the same in `state`, which differs in what was `disturbed` from where it was found."""
        return bool(self.footprint) and self.footprint.isdisjoint(disturbed)


Key = tuple[object, ...]
Findings = dict[Key, Evaluation | Refusal]


class Position:
    """A state with the matches in it and what was found out about each.

    Most positions that are reached are never looked at again, so both are worked out when somebody asks: `matches` and
    `carried`, what holds here of what is known at `parent`, may be given as functions.
    """

    def __init__(
        self, state: State, matches: dict[Key, Match] | Callable[[], dict[Key, Match]], findings: Findings | None,
        path: tuple[Taken, ...], parent: Position | None = None, carried: Callable[[], Findings] | None = None,
    ) -> None:  # fmt: skip
        self.state = state
        self.path = path
        self.parent = parent
        self._matches = matches
        self._keys: list[Key] | None = None
        self._findings = findings
        self._carried = carried

    @property
    def matches(self) -> dict[Key, Match]:
        if not isinstance(self._matches, dict):
            self._matches = self._matches()
        return self._matches

    @property
    def keys(self) -> list[Key]:
        """The matches in the order in which they have their turn."""
        if self._keys is None:
            # mostly those of the parent, in order already
            self._keys = sorted(self.matches)
        return self._keys

    @property
    def findings(self) -> Findings:
        if self._findings is None:
            self._findings = {} if self._carried is None else self._carried()
        return self._findings

    @findings.setter
    def findings(self, findings: Findings) -> None:
        self._findings = findings

    def complete(self) -> None:
        """Takes over what is known by now of the rewrites of the parent, of which nothing more is to come."""
        if self._carried is not None:
            self._findings = {**self._carried(), **(self._findings or {})}
        self.part()

    def part(self) -> None:
        """Lets go of the parent's findings."""
        self.parent = self._carried = None


@dataclass(eq=False)
class Candidate:
    """A rewrite of a state, ordered by cost and then by when it was met: of rewrites that are worth the same the first
    in the graph comes first, so that blocks that are alike are rewritten alike, and share what becomes of weights."""

    cost: float
    fingerprint: int
    number: int
    position: Position
    match: Match | None
    witness: int = 0

    def __lt__(self, other: Candidate) -> bool:
        return self._order < other._order

    @property
    def _order(self) -> tuple[int, int]:
        # sums in another order differ by less
        return round(self.cost / IMPROVEMENT), self.number

    @property
    def known_as(self) -> tuple[int, int]:
        """What tells the graph from all others: neither half of it needs to do so alone."""
        return self.fingerprint, self.witness

    def taken(self, position: Position) -> Candidate:
        """The same candidate with its rewrite carried out."""
        return Candidate(position.state.cost, self.fingerprint, self.number, position, None, self.witness)


@dataclass
class Limits:
    """When to stop, and what a candidate may grow to.

    `memory` bounds by how many bytes the process may grow, from `held` on: (process, bytes), without which each search
    begins anew.
    """

    alpha: float = 1.0
    budget: int = 1000
    time_limit: float | None = None
    constant_bytes: int = 1 << 62
    memory: int | None = None
    held: tuple[int, int] | None = None

    def from_now(self) -> Limits:
        """The same, with all searches that follow bounded together by `memory`."""
        return self if self.memory is None else replace(self, held=(os.getpid(), resident_bytes()))

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
        if self.memory is not None:
            if isinstance(self.memory, bool) or not isinstance(self.memory, int) or self.memory < 0:
                raise SearchError(f"the search memory limit is a whole number of bytes and cannot be {self.memory!r}")


IMPROVEMENT = 1e-10
"""Seconds by which a graph must be cheaper to count as better: less is what sums in another order differ by."""

Progress = Callable[[Statistics, float, float], None]
_MASK = (1 << 64) - 1
ALWAYS = -1 << 62
"""What every rewrite disturbs."""
_LOOK = 16
"""Steps from one look at the memory of the process to the next."""


def _held(limits: Limits) -> int:
    """Bytes that this process held when the search began that a memory limit is for."""
    if limits.memory is None:
        return 0
    process, held = limits.held or (None, 0)
    return held if process == os.getpid() else resident_bytes()


class Moves:
    """One run of a search. `verify` recomputes everything after each step and compares (for tests).

    It starts from what another search has found, `earlier`, where that is given.
    """

    name = ""

    def __init__(
        self, initial: State, matcher: Matcher, limits: Limits, progress: Progress | None = None, verify: bool = False,
        earlier: Outcome | None = None,
    ) -> None:  # fmt: skip
        self.initial = initial
        self.matcher = matcher
        self.limits = limits
        self.progress = progress
        self.verify = verify
        self.statistics = Statistics(self.name)
        self.earlier = earlier
        self._numbers = itertools.count()
        self.clock = initial.setting.costs.clock
        self._seen = {(initial.fingerprint, initial.witness)}
        self._most_nodes = 2 * initial.size
        # rules whose source nothing connects
        self._scattered = {
            c.number: c.rule for c in matcher.rules if any(h.kind == "anywhere" for r in c.routes for h in r)
        }
        self._scattered_matcher = Matcher([self._scattered[n] for n in sorted(self._scattered)])
        # by what they depend on: nodes, values as ~value, or on what cannot be told
        self._found_at: dict[int, set[Key]] = {}
        self._started = time.perf_counter()
        # seconds that earlier calls spent on the same search
        self.seconds_before = 0.0
        self._held = _held(limits)
        self._looks = 0

    def _start(self) -> Position:
        """Where the search starts, with all matches there."""
        state, path = (self.initial, ()) if self.earlier is None else (self.earlier.best, self.earlier.path)
        self._seen.add((state.fingerprint, state.witness))
        with self.clock("matching"):
            found = {m.key: m for m in self.matcher.find_all(state)}
            return Position(state, dict(sorted(found.items())), {}, path)

    def _outcome(self, best: Position) -> Outcome:
        self.statistics.seconds = time.perf_counter() - self._started
        return Outcome(self.initial, best.state, best.path, self.statistics, self._near_misses(best))

    def _spent(self) -> bool:
        if self.statistics.expanded >= self.limits.budget:
            self.statistics.stopped = "budget"
            return True
        return self._late()

    def _late(self) -> bool:
        limit = self.limits.time_limit
        if limit is not None and time.perf_counter() - self._started >= limit:
            self.statistics.stopped = "time limit"
            return True
        return self._too_large()

    def _too_large(self) -> bool:
        if self.limits.memory is None:
            return False
        self._looks += 1
        if self._looks % _LOOK != 1 or resident_bytes() - self._held < self.limits.memory:
            return False
        self.statistics.stopped = "memory limit"
        return True

    @contextmanager
    def _stopping(self) -> Iterator[None]:
        """Whatever ends a search in its midst is told, and what it has found until then is kept."""
        try:
            yield
        except KeyboardInterrupt:
            self.statistics.stopped = "interrupted"
        except MemoryError:
            log.warning("the search ran out of memory")
            self.statistics.stopped = "no memory left"
        except SearchError:
            # a test mode that found a difference, or a setting that makes no sense
            raise
        except Exception as error:
            log.exception("the search ended early")
            self.statistics.stopped = f"an error ({type(error).__name__}: {error})"

    def _note(self, best: Position) -> None:
        self.statistics.course.append((self.elapsed, best.state.cost))

    @property
    def elapsed(self) -> float:
        """Seconds since the search began, those of earlier calls that it goes on from included."""
        return self.seconds_before + time.perf_counter() - self._started

    def _take(self, candidate: Candidate) -> Position | None:
        """The candidate as a state of its own, or None where its rewrite turns out to close a cycle."""
        if candidate.match is None:
            return candidate.position
        parent = candidate.position
        try:
            reached = self._reached(parent, candidate.match)
        except (Cycle, Refused, GraphError) as reason:
            # what a cached evaluation cannot know: the nodes above a match decide whether it closes a cycle
            self.statistics.refused += 1
            refusal = parent.findings[candidate.match.key] = Refusal(str(reason), frozenset())
            self._remember(candidate.match.key, refusal)
            return None
        if self.verify:
            self._check(reached)
        return reached

    def _reached(self, parent: Position, match: Match) -> Position:
        """The position that a rewrite leads to; raises `Cycle`, `Refused` or `GraphError` where it does not apply."""
        with self.clock("evaluating"):
            draft = self._draft(parent.state, match)
            state = draft.commit()
        taken = Taken(match, parent.state.cost - state.cost, state.cost)
        gone = {n for n, classes in draft.made.items() if classes is None}
        fresh = [n for n in draft.new_nodes if n in state.made]
        disturbed = gone | draft.disturbed()

        def matches() -> dict[Key, Match]:
            return self._inherited(parent, state, gone, fresh)

        def carried() -> Findings:
            return self._carried(parent, state, disturbed)

        return Position(state, matches, None, (*parent.path, taken), parent, carried)

    def _check(self, position: Position) -> None:
        """Compares all that was followed from the parent with what comes out anew; raises `SearchError`."""
        state = position.state
        check(state)
        anew = {m.key for m in self.matcher.find_all(state)}
        if anew != position.matches.keys():
            odd = sorted(anew ^ position.matches.keys())
            raise SearchError(f"the matches followed step by step are not those found anew: {odd} are in one alone")
        self._check_findings(position)

    def _check_findings(self, position: Position) -> None:
        for key, carried in sorted(position.findings.items()):
            _check_finding(position.matches[key], carried, self._evaluated(position.state, position.matches[key]))

    def _inherited(self, parent: Position, state: State, gone: Set[int], fresh: list[int]) -> dict[Key, Match]:
        """Matches of the parent that still hold, and those that the new nodes made possible."""
        with self.clock("matching"):
            matches = dict(parent.matches)
            for key in [k for k, m in matches.items() if not gone.isdisjoint(m.nodes)]:
                del matches[key]
            for match in self.matcher.find_at(state, fresh):
                matches.setdefault(match.key, match)
            if self._scattered:
                self._follow_scattered(matches, parent.state, state, gone, fresh)
            return matches

    def _follow_scattered(
        self, matches: dict[Key, Match], before: State, state: State, gone: Set[int], fresh: list[int]
    ) -> None:
        """Matches of nodes that nothing but a common reader connects come and go with that reader."""
        near = {before.producer(v) for n in gone if before.is_live(n) for v in before.inputs(n) if v is not None}
        near.update(state.producer(v) for n in fresh for v in state.inputs(n) if v is not None)
        near = {n for n in near if state.is_live(n)}
        for key, match in [*matches.items()]:
            if match.number in self._scattered and not near.isdisjoint(match.nodes):
                del matches[key]
        numbers = sorted(self._scattered)
        for match in self._scattered_matcher.find_at(state, sorted(near)):
            found = replace(match, number=numbers[match.number])
            matches[found.key] = found

    def _carried(self, parent: Position, state: State, disturbed: Set[int]) -> Findings:
        """What was found out about the parent's rewrites and holds here too."""
        findings = dict(parent.findings)
        for place in (ALWAYS, *disturbed):
            for key in self._found_at.get(place, ()):
                if key in findings and not findings[key].holds(state, disturbed):
                    del findings[key]
        return findings

    def _remember(self, key: Key, found: Evaluation | Refusal) -> None:
        """Notes what a finding depends on, for those findings to be found that a rewrite makes void."""
        places = [*found.footprint] or [ALWAYS]
        if isinstance(found, Evaluation):
            places += [~value for value, _ in found.crowded]
        for place in places:
            self._found_at.setdefault(place, set()).add(key)

    def _draft(self, state: State, match: Match) -> Draft:
        draft = Draft(state)
        apply(match, draft)
        draft.sweep()
        draft.check_acyclic()
        return draft

    def _candidate(self, position: Position, key: Key) -> Candidate | None:
        """One rewrite of a state, None where it does not apply, leads nowhere new or makes the graph too big."""
        state, match = position.state, position.matches[key]
        found = self._evaluation(position, match, key)
        if isinstance(found, Refusal):
            self.statistics.refused += 1
            return None
        self.statistics.candidates += 1
        fingerprint = (state.fingerprint + found.fingerprint) & _MASK
        witness = (state.witness + found.witness) & _MASK
        if (fingerprint, witness) in self._seen:
            self.statistics.duplicates += 1
            return None
        if state.size + found.size > self._most_nodes:
            return None
        if state.constant_bytes + found.constant_bytes > self.limits.constant_bytes:
            return None
        self._report()
        return Candidate(state.cost + found.cost, fingerprint, next(self._numbers), position, match, witness)

    def _evaluation(self, position: Position, match: Match, key: Key | None = None) -> Evaluation | Refusal:
        key = match.key if key is None else key
        found = position.findings.get(key)
        if found is not None:
            self.statistics.reused += 1
            return found
        with self.clock("evaluating"):
            found = position.findings[key] = self._evaluated(position.state, match)
            self._remember(key, found)
        return found

    def _evaluated(self, state: State, match: Match) -> Evaluation | Refusal:
        try:
            draft = self._draft(state, match)
            return Evaluation(
                draft.cost() - state.cost, (draft.fingerprint() - state.fingerprint) & _MASK,
                (draft.witness() - state.witness) & _MASK, draft.size_change(),
                draft.constant_bytes() - state.constant_bytes, draft.footprint(match.nodes), draft.crowded(),
            )  # fmt: skip
        except Cycle as reason:
            return Refusal(str(reason), frozenset())
        except (Refused, GraphError) as reason:
            # it follows from the nodes matched, from what they read, and from who reads what they make
            return Refusal(str(reason), frozenset(match.nodes))

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


def _check_finding(match: Match, carried: Evaluation | Refusal, anew: Evaluation | Refusal) -> None:
    """Compares what was carried over about a rewrite with what comes out now; raises `SearchError`.

    Constant bytes are left out: `Evaluation` says why they may differ. Who closes a cycle is decided when it is taken.
    """
    if isinstance(carried, Evaluation) and isinstance(anew, Evaluation):
        same = (carried.fingerprint, carried.witness, carried.size) == (anew.fingerprint, anew.witness, anew.size)
        if same and abs(carried.cost - anew.cost) <= 1e-9 * max(abs(anew.cost), 1e-6):
            return
    elif isinstance(anew, Refusal) and (isinstance(carried, Refusal) or not anew.footprint):
        return
    raise SearchError(f"what was found out about {match.rule.name} at {match.nodes} is {carried}, and anew {anew}")
