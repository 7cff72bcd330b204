"""The searches by name, and `auto`, which is several of them one after the other."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, replace

from taso.graph.errors import SearchError
from taso.rules.matcher import Matcher
from taso.rules.pattern import Rule
from taso.search.backtracking import Keeper, backtrack
from taso.search.mcts import search_tree
from taso.search.moves import IMPROVEMENT, Limits, Outcome, Progress, Statistics
from taso.search.pieces import FROM, in_pieces
from taso.search.saturation import Bounds, saturate
from taso.search.state import State

log = logging.getLogger(__name__)

SEARCHES = ("backtracking", "mcts", "saturation", "auto")

AUTO_BOUNDS = Bounds(nodes=3000, kernels=1000, looks=30_000, seconds=math.inf, solver_nodes=100)
"""How far `auto` lets an e-graph grow, and how long its integer program is worked at: none of it in seconds, so that
the result is the same on any machine. Of more kernels the solver makes little in the seconds that a search should take:
on seven models of `benchmarks/` that took most of the time, and what was found was taken on one alone."""


@dataclass
class Search:
    """What all searches are given. `seed` is for what is drawn at random, `bounds` for the e-graph of the saturation.
    A keeper keeps the backtracking's state.

    With `rules`, those of the matcher, a large graph is searched in pieces first (`taso.search.pieces`), `workers` of
    them at once on an `executor`; not with a keeper, which knows of whole graphs alone.
    """

    initial: State
    matcher: Matcher
    limits: Limits
    progress: Progress | None = None
    verify: bool = False
    keeper: Keeper | None = None
    seed: int = 0
    bounds: Bounds | None = None
    rules: Sequence[Rule] = ()
    executor: Executor | None = None
    workers: int = 1

    def run(self, name: str, earlier: Outcome | None = None) -> Outcome:
        """The outcome of the search `name`, from the initial state or from the best of `earlier`.

        Raises `SearchError` for a name that is none of `SEARCHES`, and for a keeper where there is no backtracking.
        """
        check_name(name)
        if self.keeper is not None and name in ("mcts", "saturation"):
            raise SearchError(f"a checkpoint keeps the state of the backtracking, and search='{name}' has none")
        searches: dict[str, Callable[[Outcome | None], Outcome]] = {
            "backtracking": self._backtracking, "mcts": self._mcts, "saturation": self._saturation, "auto": self._auto,
        }  # fmt: skip
        if earlier is not None or not self._has_pieces():
            return searches[name](earlier)
        started = time.perf_counter()
        pieces = in_pieces(
            self.initial, self.matcher, self.rules, self.limits, self.executor, self.workers, self.verify,
            self.progress,
        )  # fmt: skip
        if self._over(pieces):
            return replace(pieces, statistics=replace(pieces.statistics, search=name))
        limits = replace(self._part(started, 1), budget=max(self.limits.budget - pieces.statistics.expanded, 0))
        return _after_pieces(pieces, replace(self, limits=limits).run(name, pieces))

    def _has_pieces(self) -> bool:
        return bool(self.rules) and self.keeper is None and self.limits.budget > 0 and self.initial.size >= FROM

    def _backtracking(self, earlier: Outcome | None, thorough: bool = True) -> Outcome:
        return backtrack(
            self.initial, self.matcher, self.limits, self.progress, self.verify, earlier, self.keeper, thorough
        )

    def _mcts(self, earlier: Outcome | None) -> Outcome:
        return search_tree(
            self.initial, self.matcher, self.limits, self.progress, self.verify, earlier, seed=self.seed
        )

    def _saturation(self, earlier: Outcome | None) -> Outcome:
        return saturate(self.initial, self.matcher, self.limits, self.progress, self.verify, earlier, self.bounds)

    def _auto(self, earlier: Outcome | None) -> Outcome:
        """Backtracking, then saturation, then backtracking from what that found; the best of them.

        Backtracking, which is not thorough here, is quick and takes all that pays at once, saturation finds what has to
        become dearer first, and what a sum of costs cannot say is left to the second backtracking.
        """
        started = time.perf_counter()
        first = replace(self, limits=self._part(started, 3))._backtracking(earlier, thorough=False)
        stages = [("backtracking", first)]
        # where no rule fits anywhere an e-graph has nothing to grow by either
        fits = first.path or first.statistics.candidates or first.statistics.refused
        try:
            if fits and not self._over(first):
                rest = replace(self, keeper=None, limits=self._part(started, 2), bounds=self.bounds or AUTO_BOUNDS)
                stages.append(("saturation", rest._saturation(earlier)))
            if len(stages) == 2 and not self._over(stages[1][1]):
                rest = replace(self, keeper=None, limits=self._part(started, 1))
                stages.append(("backtracking from there", rest._backtracking(stages[1][1], thorough=False)))
        except (KeyboardInterrupt, MemoryError) as reason:
            # in a search whatever ends it is dealt with there; this came between two of them
            log.warning("the search ended between two of its stages")
            together = _together(stages, started)
            together.statistics.stopped = "interrupted" if isinstance(reason, KeyboardInterrupt) else "no memory left"
            return together
        return _together(stages, started)

    def _part(self, started: float, stages: int) -> Limits:
        """The limits of a stage when so many are still to come."""
        if self.limits.time_limit is None:
            return self.limits
        left = self.limits.time_limit - (time.perf_counter() - started)
        return replace(self.limits, time_limit=max(left, 0.0) / stages)

    def _over(self, outcome: Outcome) -> bool:
        return self.limits.budget == 0 or outcome.statistics.stopped not in ("", "budget", "time limit")


def _after_pieces(pieces: Outcome, whole: Outcome) -> Outcome:
    """The outcome of a search of the whole graph with what was found in its pieces counted in."""
    told, before = whole.statistics, pieces.statistics
    for count in ("expanded", "candidates", "reused", "duplicates", "refused"):
        setattr(told, count, getattr(told, count) + getattr(before, count))
    told.details = {**before.details, **told.details}
    told.stopped = before.stopped or told.stopped
    told.course = [*before.course, *((before.seconds + second, cost) for second, cost in told.course)]
    told.seconds += before.seconds
    return whole


def check_name(name: str) -> None:
    """Raises `SearchError` where there is no such search."""
    if name not in SEARCHES:
        raise SearchError(f"search is one of {', '.join(SEARCHES)}; '{name}' is none of these")


def _together(stages: list[tuple[str, Outcome]], started: float) -> Outcome:
    """One outcome of several: the best state, the counts of all, and what each came to."""
    best = stages[0][1]
    told = Statistics("auto")
    before = 0.0
    for name, outcome in stages:
        each = outcome.statistics
        for count in ("expanded", "candidates", "reused", "duplicates", "refused"):
            setattr(told, count, getattr(told, count) + getattr(each, count))
        told.details[f"{name}: cost_ms"] = outcome.best.cost * 1e3
        told.details[f"{name}: seconds"] = each.seconds
        told.details.update((f"{name}: {key}", value) for key, value in each.details.items())
        told.stopped = told.stopped or each.stopped
        for second, cost in each.course:
            if not told.course or cost < told.course[-1][1]:
                told.course.append((before + second, cost))
        before += each.seconds
        if outcome.best.cost < best.best.cost - IMPROVEMENT:
            best, told.details["taken"] = outcome, name
        elif outcome.best.fingerprint == best.best.fingerprint and not best.near_misses:
            # an e-graph knows of no rewrites that nearly pay
            best = replace(best, near_misses=outcome.near_misses)
    told.details.setdefault("taken", stages[0][0])
    told.seconds = time.perf_counter() - started
    return replace(best, statistics=told)


__all__ = ["SEARCHES", "Search", "check_name"]
