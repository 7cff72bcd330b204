"""Graphs that need little memory: what `memory_limit=` and `objective="memory"` search for.

The ordinary search looks at time alone. From its best state, from the initial one, and from what its rewrites come to
without those that cost memory, a descent goes on by rewrites of what lies in memory while most is in use: nothing else
lowers the peak. From the states that need little enough the ordinary search runs once more, among states alone that
need no more, so that no more time is lost than the memory is worth.
"""

from __future__ import annotations

import heapq
import logging
import time
from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Union

from taso.graph.errors import GraphError, SearchError
from taso.rules.matcher import Match, Matcher
from taso.rules.pattern import Rule
from taso.search.backtracking import Backtracking
from taso.search.costs import PENALTY
from taso.search.held import Held, Memory
from taso.search.moves import (
    Candidate,
    Evaluation,
    Key,
    Limits,
    Moves,
    Outcome,
    Position,
    Refusal,
    Statistics,
    Taken,
)
from taso.search.rewrite import Refused
from taso.search.state import Cycle, Draft, State

log = logging.getLogger(__name__)

OBJECTIVES = ("time", "memory")

PATIENCE = 8
"""States that are expanded without a lower peak before a descent gives up."""

WIDTH = 16
"""Rewrites of a state that leave its peak as it is and are gone on from where none lowers it."""

LOOKS = 4000
"""Rewrites that one descent looks at."""

STAGES = 10
"""Searches among which the time is shared."""

ROUNDS = 3
"""Searches for what keeps to a limit, each within a lower one than the last, as far as that was missed."""

STARTS = 2
"""States from which faster ones are looked for."""


# ── what is wanted ───────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Aim:
    """What a search is for: the least time, within a limit in bytes where there is one, or the least memory.

    Raises `SearchError` for an objective that there is not, and for a limit that is no whole number above 0.
    """

    objective: str = "time"
    limit: int | None = None

    def __post_init__(self) -> None:
        if self.objective not in OBJECTIVES:
            raise SearchError(f"objective is one of {', '.join(OBJECTIVES)}, not {self.objective!r}")
        limit = self.limit
        if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int) or limit <= 0):
            raise SearchError(f"the memory limit is a whole number of bytes above 0, not {limit!r}")

    @property
    def frugal(self) -> bool:
        """Whether memory matters."""
        return self.objective == "memory" or self.limit is not None

    @property
    def least(self) -> bool:
        """Whether no amount of memory is little enough."""
        return self.objective == "memory"

    def fits(self, peak: int) -> bool:
        """Whether so many bytes are few enough."""
        return not self.least and (self.limit is None or peak <= self.limit)

    def order(self, peak: int, cost: float) -> tuple[int, float]:
        """What is better comes first: what fits by its time, all else by its memory and then by its time."""
        return -1 if self.fits(peak) else peak, cost

    def trades(self, before: int, after: int) -> bool:
        """Whether a graph that needs `after` bytes is wanted even where it is slower than one that needs `before`."""
        return after < before and not self.fits(before)

    def allows(self, before: int, after: int) -> bool:
        """Whether it may come back in place of the original, which needs `before`."""
        return after <= before or self.fits(after)

    def missed(self, peak: int) -> str:
        """What to say of a limit that `peak` is not within; "" where it is."""
        if self.limit is None or peak <= self.limit:
            return ""
        return f"the memory limit of {shown(self.limit)} is missed by {shown(peak - self.limit)}"

    def share(self, limits: Limits) -> Limits:
        """The limits of the ordinary search: half of the time where another one is to follow."""
        if not self.frugal or limits.time_limit is None:
            return limits
        return replace(limits, time_limit=limits.time_limit / 2)


def shown(count: int) -> str:
    """Bytes for people."""
    return f"{count / 1e6:.3f} MB" if count >= 100_000 else f"{count} bytes"


# ── moves ────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Footing:
    """A position of a search, what its state holds in memory, and which values changed since that last fell."""

    position: Position
    held: Held
    changed: frozenset[int] | None = None

    @property
    def state(self) -> State:
        return self.position.state

    @property
    def known_as(self) -> tuple[int, int]:
        return self.state.fingerprint, self.state.witness


@dataclass(order=True)
class _Sideways:
    """A state whose peak is that of another, in the order in which to go on from them."""

    rank: tuple[int, int]
    cost: float
    known_as: tuple[int, int]
    footing: Footing = field(compare=False)


class _Onward(Moves):
    """Moves from where another search came to, whose matches there are taken over."""

    def __init__(
        self, start: Footing, initial: State, matcher: Matcher, limits: Limits, memory: Memory, verify: bool = False
    ) -> None:
        super().__init__(initial, matcher, limits, None, verify)
        self.start = start
        self.memory = memory

    def _start(self) -> Position:
        position = self.start.position
        self._seen.add(self.start.known_as)
        return Position(position.state, position.matches, {}, position.path)


class Descent(_Onward):
    """Lowers the peak of a state step by step, until it is at most `goal` or no rewrite lowers it any more.

    Each step takes the rewrite that leads to the lowest peak; where `sparing`, the one that costs the least time for
    what it saves of the bytes beyond the goal.
    """

    name = "descent"

    def run(self, goal: int = 0, sparing: bool = False) -> Footing:
        """The state with the lowest peak that was found; the best so far where something ends the descent."""
        self.goal, self.sparing = goal, sparing
        self.best = self.start
        with self._stopping():
            self.best = replace(self.start, position=self._start(), changed=None)
            self._descend()
        self.statistics.seconds = time.perf_counter() - self._started
        return self.best

    def _descend(self) -> None:
        waiting: list[_Sideways] = []
        at, patience = self.best, PATIENCE
        while self.best.held.peak > self.goal and self.statistics.candidates < LOOKS and not self._spent():
            self.statistics.expanded += 1
            lower, level = self._next(at)
            if lower is not None:
                at, patience, waiting = lower, PATIENCE, []
                continue
            waiting = heapq.nsmallest(WIDTH, [*waiting, *level])
            patience -= 1
            if not waiting or not patience:
                break
            at = heapq.heappop(waiting).footing

    def _next(self, at: Footing) -> tuple[Footing | None, list[_Sideways]]:
        """The step down from here, which is the best so far, or the states on the same level where there is none."""
        chosen: tuple[tuple[float, ...], Footing] | None = None
        level: list[_Sideways] = []
        for footing in self._around(at):
            if footing.held.rank < self.best.held.rank:
                score = (*self._score(at, footing), *footing.known_as)
                if chosen is None or score < chosen[0]:
                    chosen = score, footing
            elif chosen is None:
                level.append(_Sideways(footing.held.rank, footing.state.cost, footing.known_as, footing))
        if chosen is None:
            return None, level
        self.best = self._settled(chosen[1])
        return self.best, []

    def _score(self, at: Footing, to: Footing) -> tuple[float, ...]:
        rank = (*to.held.rank, to.state.cost)
        if not self.sparing:
            return rank
        saved = max(at.held.excess(self.goal) - to.held.excess(self.goal), 1)
        return max(to.state.cost - at.state.cost, 0.0) / saved, *rank

    def _settled(self, footing: Footing) -> Footing:
        """The same state in the best order that is found for it."""
        if self.verify:
            self._check(footing.position)
        return replace(footing, held=self.memory.improved(footing.held, footing.state), changed=None)

    def _around(self, at: Footing) -> Iterator[Footing]:
        """States that one rewrite leads to, which need no more memory; not such as were met before.

        From a state that was no step down only by what has to do with the steps that led there: the others did not
        lower the peak before, and would not now.
        """
        crowd = self.memory.crowd(at.held, at.state, at.held.peak)
        for key in at.position.keys:
            if self._late() or self.statistics.candidates >= LOOKS:
                return
            match = at.position.matches[key]
            if not _touches(at.state, match, crowd):
                continue
            if at.changed is not None and not _touches(at.state, match, at.changed):
                continue
            try:
                found = self._tried(at, match)
            except (Cycle, Refused, GraphError):
                self.statistics.refused += 1
                continue
            if found is not None:
                yield found

    def _tried(self, at: Footing, match: Match) -> Footing | None:
        """The state that a rewrite leads to, None where it needs more memory, is too large or was met before."""
        with self.clock("evaluating"):
            draft = self._draft(at.state, match)
            self.statistics.candidates += 1
            known = draft.fingerprint(), draft.witness()
            if known in self._seen:
                self.statistics.duplicates += 1
                return None
            self._seen.add(known)
            if not self._may_be(at.state, draft):
                return None
            held = self.memory.after(at.held, draft)
        if held.rank > at.held.rank:
            return None
        # what it costs is asked only now: a kernel may have to be measured for it
        reached = self._reached(at.position, match)
        if reached.state.cost >= at.state.cost + PENALTY / 2:
            # a kernel of it fails
            return None
        return Footing(reached, held, frozenset(draft.changed_classes).union(at.changed or ()))

    def _may_be(self, state: State, draft: Draft) -> bool:
        small = state.size + draft.size_change() <= self._most_nodes
        return small and draft.constant_bytes() <= self.limits.constant_bytes


def _touches(state: State, match: Match, values: Set[int]) -> bool:
    """Whether a match reads or makes one of these values."""
    near = (v for n in match.nodes for v in (*state.outputs(n), *state.inputs(n)))
    return any(v in values for v in near)


TOO_MUCH = "it needs more memory than is allowed"


class Within(_Onward, Backtracking):
    """The backtracking search, among states alone that need at most `limit` bytes."""

    name = "within"

    def __init__(
        self, start: Footing, initial: State, matcher: Matcher, limits: Limits, memory: Memory, limit: int,
        verify: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(start, initial, matcher, limits, memory, verify)
        self.limit = limit
        self.held = {start.known_as: start.held}

    def found(self) -> Footing:
        """The fastest state found, and what it holds."""
        self.run()
        state = self.best.state
        return Footing(self.best, self.held[state.fingerprint, state.witness])

    def _take(self, candidate: Candidate) -> Position | None:
        parent = candidate.position
        reached = super()._take(candidate)
        if candidate.match is None or reached is None:
            return reached
        before, state = parent.state, reached.state
        held = fitting(self.memory, self.held[before.fingerprint, before.witness], state, self.limit)
        if held.peak > self.limit:
            self._refuse(parent, candidate.match.key)
            return None
        self.held[state.fingerprint, state.witness] = held
        return reached

    def _refuse(self, parent: Position, key: Key) -> None:
        """Notes that a rewrite needs too much, here and in what follows as long as nothing near it changes."""
        self.statistics.refused += 1
        found = parent.findings.get(key)
        if isinstance(found, Evaluation):
            refusal = parent.findings[key] = Refusal(TOO_MUCH, found.footprint)
            self._remember(key, refusal)

    def _check_findings(self, position: Position) -> None:
        # what needs too much is looked at where it was found alone: what else lies in memory then matters too
        kept = position.findings
        position.findings = {k: f for k, f in kept.items() if not isinstance(f, Refusal) or f.reason != TOO_MUCH}
        super()._check_findings(position)
        position.findings = kept


def fitting(memory: Memory, before: Held, state: State, limit: int) -> Held:
    """What a state holds, in an order within the limit if one is found; `before` is of one that differs little."""
    held = memory.after(before, state)
    return held if held.peak <= limit else memory.improved(held, state, limit + 1)


class Replay(_Onward):
    """Takes the rewrites of another search again, in order, but for those that would need more than is allowed."""

    name = "replay"

    def run(self, path: Sequence[Taken], limit: int) -> Footing:
        """The fastest state on the way; none on it needs more than `limit`, or than the one before it."""
        best = self.start
        with self._stopping():
            at = Footing(self._start(), best.held)
            for taken in path:
                if self._late():
                    break
                match = at.position.matches.get(taken.match.key)
                if match is None:
                    continue
                try:
                    position = self._reached(at.position, match)
                except (Cycle, Refused, GraphError):
                    continue
                allowed = max(limit, at.held.peak)
                held = fitting(self.memory, at.held, position.state, allowed)
                if held.peak <= allowed:
                    at = Footing(position, held)
                    position.part()
                    if (held.peak > limit, position.state.cost) <= (best.held.peak > limit, best.state.cost):
                        best = at
        return best


# ── the search ───────────────────────────────────────────────────────────────────────────────────────────────────

Needs = Callable[[State, Union[tuple[int, ...], None]], int]

ENDED = ("", "budget", "time limit")
"""Why a search may have ended so that another one may follow."""


class _Frugal:
    """One search after the ordinary one, of which `outcome` is. `needs` says what the graph of a state takes."""

    def __init__(
        self, outcome: Outcome, matcher: Matcher, limits: Limits, aim: Aim, needs: Needs, verify: bool
    ) -> None:
        self.outcome = outcome
        self.matcher = matcher
        self.limits = limits
        self.aim = aim
        self.needs = needs
        self.verify = verify
        self.initial = outcome.initial
        self.memory = Memory(outcome.initial.setting)
        self.told = outcome.statistics
        self.found: list[Footing] = []
        self._known: dict[tuple[int, int], int] = {}
        self._started = time.perf_counter()
        self._stages = STAGES

    def run(self) -> Outcome:
        """The best by the aim, the ordinary best where that fits; whatever ends it early, the best so far."""
        if self.aim.fits(self.needs(self.outcome.best, None)):
            return self.outcome
        original = self._standing(self.initial, ())
        fastest = self._standing(self.outcome.best, self.outcome.path)
        self.found = [fastest, original]
        try:
            if not self.aim.fits(self._exactly(fastest)):
                self._search(original, fastest)
        except KeyboardInterrupt:
            self.told.stopped = "interrupted"
        best = self._chosen()
        for name, footing in (("original", original), ("fastest", fastest), ("taken", best)):
            self.told.details[f"memory: {name}_bytes"] = self._exactly(footing)
        self.told.details["memory: seconds"] = time.perf_counter() - self._started
        order = self.memory.nodes(best.held, best.state)
        missed = self.outcome.near_misses if best is fastest else []
        return replace(self.outcome, best=best.state, path=best.position.path, order=order, near_misses=missed)

    def _standing(self, state: State, path: Sequence[Taken]) -> Footing:
        def matches() -> dict[Key, Match]:
            with self.initial.setting.costs.clock("matching"):
                return {match.key: match for match in self.matcher.find_all(state)}

        return Footing(Position(state, matches, {}, tuple(path)), self.memory.of(state))

    # ── which is best ────────────────────────────────────────────────────────────────────────────────────────────

    def _order(self, footing: Footing) -> tuple[float, float, int, int]:
        return *self.aim.order(footing.held.peak, footing.state.cost), *footing.known_as

    def _best(self) -> Footing:
        return min(self.found, key=self._order)

    def _exactly(self, footing: Footing) -> int:
        """Bytes that the graph of a state takes; where a rewrite has changed layouts the state knows them roughly."""
        found = self._known.get(footing.known_as)
        if found is None:
            needs = self.needs(footing.state, self.memory.nodes(footing.held, footing.state))
            found = self._known[footing.known_as] = needs
        return found

    def _chosen(self) -> Footing:
        """The best by what graphs take exactly: of what seems best that is found out until it does so no more."""
        while True:
            best = min(self.found, key=self._exact_order)
            if best.known_as in self._known:
                return best
            self._exactly(best)

    def _exact_order(self, footing: Footing) -> tuple[float, float, int, int]:
        peak = self._known.get(footing.known_as, footing.held.peak)
        return *self.aim.order(peak, footing.state.cost), *footing.known_as

    # ── stages ───────────────────────────────────────────────────────────────────────────────────────────────────

    def _search(self, original: Footing, fastest: Footing) -> None:
        if self.aim.least:
            for start in (fastest, original):
                self._lower(start, 0, sparing=False)
            self._keep_to(self._best().held.peak, original, fastest)
            # other kernels, other ways down
            least = self._best()
            self._lower(least, 0, sparing=False)
            if self._best().held.peak < least.held.peak:
                self._hasten(self._best().held.peak)
            return
        goal = limit = self.aim.limit or 0
        for _ in range(ROUNDS):
            self._keep_to(goal, original, fastest)
            fits = [footing for footing in self.found if footing.held.peak <= goal]
            if not fits or self.aim.fits(self._exactly(self._chosen())) or self._over():
                return
            # they need more than it seems
            goal = max(goal - min(self._exactly(footing) - limit for footing in fits), 1)

    def _keep_to(self, goal: int, original: Footing, fastest: Footing) -> None:
        """Looks for the fastest state that needs at most `goal` bytes, or the least found where none does."""
        replayed = self._replay(original, goal)
        starts = {start.known_as: start for start in (replayed, fastest, original)}
        for start in starts.values():
            self._lower(start, goal, sparing=True)
        least = min(footing.held.peak for footing in self.found)
        if least > goal:
            return self._keep_to(least, original, fastest)
        self._hasten(goal)

    def _hasten(self, limit: int) -> None:
        """Looks for faster states from those that need little enough, and that need no more than `limit`."""
        fits = [footing for footing in self.found if footing.held.peak <= limit]
        self._replay(min(fits, key=self._cost), limit)
        fits = sorted((footing for footing in self.found if footing.held.peak <= limit), key=self._cost)
        for start in [*{start.known_as: start for start in fits}.values()][:STARTS]:
            if not self._over():
                within = Within(start, self.initial, self.matcher, self._part(), self.memory, limit, self.verify)
                self.found.append(within.found())
                self._count(within.statistics)

    def _cost(self, footing: Footing) -> tuple[float, int, int]:
        return footing.state.cost, *footing.known_as

    def _replay(self, start: Footing, limit: int) -> Footing:
        """What the rewrites of the ordinary search come to without those that cost memory."""
        if self._over():
            return start
        replay = Replay(start, self.initial, self.matcher, self._part(), self.memory, self.verify)
        self.found.append(replay.run(self.outcome.path, limit))
        self._count(replay.statistics)
        return self.found[-1]

    def _lower(self, start: Footing, goal: int, sparing: bool) -> None:
        """Lowers the peak of a state as far as it takes, or as it goes."""
        if start.held.peak <= goal or self._over():
            return
        descent = Descent(start, self.initial, self.matcher, self._part(), self.memory, self.verify)
        self.found.append(descent.run(goal, sparing))
        self._count(descent.statistics)

    def _count(self, statistics: Statistics) -> None:
        for count in ("expanded", "candidates", "reused", "duplicates", "refused"):
            setattr(self.told, count, getattr(self.told, count) + getattr(statistics, count))
        self.told.seconds += statistics.seconds
        if statistics.stopped:
            self.told.stopped = statistics.stopped

    def _over(self) -> bool:
        return self.told.stopped not in ENDED

    def _part(self) -> Limits:
        """The limits of the next stage: of the time that is left its share with those that are still to come."""
        stages, self._stages = self._stages, max(self._stages - 1, 1)
        if self.limits.time_limit is None:
            return self.limits
        left = self.limits.time_limit - (time.perf_counter() - self._started)
        return replace(self.limits, time_limit=max(left, 0.0) / stages)


def frugal(
    outcome: Outcome, rules: Sequence[Rule], limits: Limits, aim: Aim, needs: Needs, verify: bool = False
) -> Outcome:
    """The best by `aim` that follows from an ordinary search's `outcome`; that itself where memory does not matter.

    `limits` bound each of the searches that follow, their time all of them together. `needs` gives the bytes that the
    graph of a state takes, its nodes in an order, by default its own.
    """
    if not aim.frugal or limits.budget == 0:
        return outcome
    return _Frugal(outcome, Matcher(rules), limits, aim, needs, verify).run()


__all__ = ["OBJECTIVES", "Aim", "Descent", "Replay", "Within", "frugal", "shown"]
