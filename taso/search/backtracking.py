"""Cost-guided backtracking search (Jia et al., "TASO", SOSP 2019, section 5, algorithm 2).

Best-first over whole graphs: the cheapest candidate is taken off the queue, every rewrite that applies to it makes a
new candidate, and a candidate is queued where its cost lies below α times the best. What is on the queue is expanded,
whatever the best has come to since; a search that is not thorough leaves out what no longer lies below the bound.
"""

from __future__ import annotations

import heapq
from typing import Protocol

from taso.rules.matcher import Matcher
from taso.search.moves import (
    IMPROVEMENT,
    Candidate,
    Evaluation,
    Key,
    Limits,
    Moves,
    NearMiss,
    Outcome,
    Position,
    Progress,
    Refusal,
    Statistics,
    Taken,
)
from taso.search.state import State

MANY = 16
"""Candidates on the queue that are not worth a look at which of them are dead."""


class Keeper(Protocol):
    """What keeps the state of a search in a file (`taso.search.checkpoint`)."""

    def resume(self, search: Backtracking, start: Position) -> bool:
        """Brings `search` to where an earlier run was; False where there is nothing to go on from."""

    def keep(self, search: Backtracking, last: bool = False) -> None:
        """Called after each graph that was expanded, and at the end."""


class Backtracking(Moves):
    """One run of the search. `verify` recomputes everything after each step and compares (for tests).

    `thorough`, as published, it ends when the queue is empty or the budget used up; else when the cheapest on the queue
    does not lie below α times the best, which is much sooner and hardly ever misses anything.
    """

    name = "backtracking"

    def __init__(
        self, initial: State, matcher: Matcher, limits: Limits, progress: Progress | None = None, verify: bool = False,
        earlier: Outcome | None = None, keeper: Keeper | None = None, thorough: bool = True,
    ) -> None:  # fmt: skip
        super().__init__(initial, matcher, limits, progress, verify, earlier)
        self.keeper = keeper
        self.thorough = thorough
        self.queue: list[Candidate] = []
        self.opened: Candidate | None = None
        self.reached: list[Position] = []
        self.pruned = 0
        # how many rewrites of the opened candidate were dealt with, and the statistics after the last of them
        self.place = -1
        self.counted = self._counts()
        # false while something is being entered in the books: what an interruption leaves then is no state to keep
        self.whole = True

    def run(self) -> Outcome:
        """Searches until the queue, the budget or the time is used up, or Ctrl-C: the best so far comes back."""
        start = self.best = self._start()
        if self.keeper is None or not self.keeper.resume(self, start):
            root = Candidate(start.state.cost, start.state.fingerprint, next(self._numbers), start, None, 0)
            self.queue.append(root)
            self._note(start)
        else:
            self._resumed()
        with self._stopping():
            while self._open() and self._expand():
                self._report()
                if self.keeper is not None:
                    self.keeper.keep(self)
        if self.keeper is not None:
            with self._stopping():
                self.keeper.keep(self, last=True)
        return self._outcome(self.best)

    def _resumed(self) -> None:
        """Brings up what follows from the candidates that an earlier run left."""
        candidates = self.queue if self.opened is None else [self.opened, *self.queue]
        for position in {id(p): p for p in (*(c.position for c in candidates), self.best)}.values():
            for key, found in position.findings.items():
                self._remember(key, found)
        if self.opened is not None:
            self.reached = [c.position for c in self.queue if c.position.parent is self.opened.position]

    def _open(self) -> bool:
        """Takes the cheapest candidate off the queue, unless one is open already; False where the search is over."""
        while True:
            if self.opened is None:
                if not self.queue or self._spent():
                    return False
                self.whole = False
                self.opened, self.place = heapq.heappop(self.queue), -1
                self.whole = True
            if self.place >= 0:
                return True
            if not self._worth(self.opened):
                # the queue is sorted
                return False
            position = self._take(self.opened)
            self.whole = False
            self.opened = None if position is None else self.opened.taken(position)
            self.place = 0 if position is not None else -1
            self.statistics.expanded += position is not None
            self.counted = self._counts()
            self.whole = True

    def _expand(self) -> bool:
        """Every rewrite of the opened candidate becomes one of its own; False where time or memory were up before."""
        if self.opened is None:
            return True
        position = self.opened.position
        keys = position.keys
        while self.place < len(keys):
            if self._late():
                return False
            if self._pass_over(position, keys):
                continue
            candidate = self._candidate(position, keys[self.place])
            reached = None
            if candidate is not None and candidate.cost < self.best.state.cost - IMPROVEMENT:
                reached = self._take(candidate)
            self._enter(candidate, reached)
        self._close()
        return True

    def _pass_over(self, position: Position, keys: list[Key]) -> bool:
        """Enters at once those rewrites, next in turn, that are known to lead to nothing below the bound."""
        cost, findings, bound = position.state.cost, position.findings, self._bound
        place, refused = self.place, 0
        while place < len(keys) and (found := findings.get(keys[place])) is not None:
            if isinstance(found, Refusal):
                refused += 1
            elif cost + found.cost < bound:
                break
            place += 1
        passed = place - self.place
        if passed:
            self.whole = False
            self.place = place
            self.statistics.reused += passed
            self.statistics.refused += refused
            self.statistics.candidates += passed - refused
            self.counted = self._counts()
            self.whole = True
        return passed > 0

    def _worth(self, candidate: Candidate) -> bool:
        """Whether a candidate on the queue is to be expanded."""
        return self.thorough or candidate.position is self.best or candidate.cost < self._bound

    @property
    def _bound(self) -> float:
        return self.limits.alpha * self.best.state.cost

    def _close(self) -> None:
        """What was found out about the opened candidate is complete: those reached from it take it over."""
        self.whole = False
        for reached in self.reached:
            if self.thorough or reached is self.best or reached.state.cost < self._bound:
                reached.complete()
            else:
                reached.part()
            if self.verify:
                self._check_findings(reached)
        self.opened, self.reached = None, []
        if len(self.queue) > 2 * self.pruned + MANY:
            # what is not worth expanding any more would only end the search, and holds whole states until then
            self.queue = [c for c in self.queue if self._worth(c)]
            heapq.heapify(self.queue)
            self.pruned = len(self.queue)
        self.whole = True

    def _enter(self, candidate: Candidate | None, reached: Position | None) -> None:
        """Enters a rewrite in the books; an interruption in here leaves them unfit for a checkpoint."""
        self.whole = False
        self.place += 1
        if candidate is not None and candidate.cost < self._bound:
            # what is not below the bound now never will be: it needs not be known again
            self._seen.add(candidate.known_as)
            if reached is not None:
                self.best = reached
                self.reached.append(reached)
                self._note(reached)
                heapq.heappush(self.queue, candidate.taken(reached))
            elif not candidate.cost < self.best.state.cost - IMPROVEMENT:
                heapq.heappush(self.queue, candidate)
        self.counted = self._counts()
        self.whole = True

    def _counts(self) -> tuple[int, int, int, int]:
        told = self.statistics
        return told.candidates, told.reused, told.duplicates, told.refused


def backtrack(
    initial: State, matcher: Matcher, limits: Limits, progress: Progress | None = None, verify: bool = False,
    earlier: Outcome | None = None, keeper: Keeper | None = None, thorough: bool = True,
) -> Outcome:  # fmt: skip
    """The best state that TASO's search finds from `initial`, or from the best of `earlier`.

    Raises `SearchError` for limits that make no sense.
    """
    return Backtracking(initial, matcher, limits, progress, verify, earlier, keeper, thorough).run()


__all__ = [
    "IMPROVEMENT", "Backtracking", "Candidate", "Evaluation", "Key", "Limits", "NearMiss", "Outcome", "Position",
    "Progress", "Refusal", "Statistics", "Taken", "backtrack",
]  # fmt: skip
