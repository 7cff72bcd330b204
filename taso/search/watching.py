"""What a caller is told while an optimization runs: `taso.optimize(callback=…)`."""

from __future__ import annotations

import logging
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from taso.graph.errors import CallbackWarning
from taso.search.moves import Progress as Follow
from taso.search.moves import Statistics

log = logging.getLogger(__name__)

EVERY = 0.1
"""Seconds between two calls within a search that has found nothing better meanwhile."""


@dataclass(frozen=True)
class Progress:
    """Where an optimization stands.

    `phase` is "preparing", "searching", "planning", "comparing" or "done", `seconds` have passed since the call. The
    counts are those of the search that runs: `expanded` graphs of at most `budget`, `candidates` looked at. Costs are
    in milliseconds, of the original and of the best graph so far, as the search counts them: where plans are made
    behind it, by the best layouts and algorithms. None until they are known.
    """

    phase: str
    seconds: float
    expanded: int = 0
    candidates: int = 0
    budget: int = 0
    cost_before: float | None = None
    cost_best: float | None = None


Callback = Callable[[Progress], object]


_SEARCHING = ("preparing", "searching")


class Stopped(KeyboardInterrupt):
    """A callback asked to stop, which ends a search as Ctrl-C does."""


class Watch:
    """Tells a callback of each phase, of each better graph, and otherwise every `EVERY` seconds of a search.

    What the callback raises is the caller's error and no reason to lose what was found: it is logged with its place,
    the callback is not called again, and `complain` warns of it once the result is safe. True stops the search, and so
    does KeyboardInterrupt.
    """

    def __init__(self, callback: Callback | None = None, budget: int = 0) -> None:
        self._callback = callback
        self._budget = budget
        self._started = time.perf_counter()
        self._told = self._started
        self._last = Progress("", 0.0, budget=budget)
        self.failure = ""
        self.stopped = False

    def enter(self, phase: str) -> None:
        """Tells that a phase begins; raises `Stopped` where the callback wants it to end there."""
        self._tell(replace(self._last, phase=phase))

    def found(self, statistics: Statistics, before: float, best: float) -> None:
        """Takes down what a search came to, for what is told next; costs in seconds."""
        counts = statistics.expanded, statistics.candidates, self._budget
        self._last = Progress("searching", 0.0, *counts, before * 1e3, best * 1e3)

    def following(self, line: Follow | None) -> Follow | None:
        """The function that a search reports to, for `line`, a progress line, and for the callback."""
        if self._callback is None:
            return line

        def follow(statistics: Statistics, before: float, best: float) -> None:
            if line is not None:
                line(statistics, before, best)
            self._follow(statistics, before, best)

        return follow

    def complain(self) -> None:
        """Warns of what the callback raised, where it did."""
        if self.failure:
            warnings.warn(f"the callback of taso.optimize failed: {self.failure}", CallbackWarning, stacklevel=4)

    def _follow(self, statistics: Statistics, before: float, best: float) -> None:
        known = self._last.cost_best
        better = known is None or best * 1e3 < known
        # a search that begins anew knows less than the one before it
        best = best if known is None else min(best, known / 1e3)
        if better or time.perf_counter() - self._told >= EVERY:
            self.found(statistics, before, best)
            self._tell(self._last)

    def _tell(self, progress: Progress) -> None:
        self._told = time.perf_counter()
        self._last = replace(progress, seconds=self._told - self._started)
        if self._callback is None or self.stopped:
            return
        try:
            stop = self._callback(self._last)
        except KeyboardInterrupt:
            if progress.phase not in _SEARCHING:
                if progress.phase == "done":
                    # nothing is left to interrupt
                    log.warning("interrupted when all was done")
                    return
                raise
            stop = True
        except Exception as error:
            self.failure = f"{type(error).__name__}: {error}"
            self._callback = None
            log.warning("the callback failed and is not called again; the search goes on", exc_info=True)
            return
        # what comes after a search is the way to its result
        if isinstance(stop, (bool, np.bool_)) and stop and progress.phase in _SEARCHING:
            self.stopped = True
            raise Stopped


__all__ = ["Callback", "Progress", "Stopped", "Watch"]
