"""Where the time of a search goes: seconds per phase, each second counted once."""

from __future__ import annotations

import time
from types import TracebackType


class Clock:
    """Seconds per phase. Phases may be entered within one another; the outer one stands still meanwhile."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._phases: dict[str, _Phase] = {}
        self._entered: list[str] = []
        self._since = 0.0

    def __call__(self, phase: str) -> _Phase:
        """The phase to be entered by `with`."""
        found = self._phases.get(phase)
        if found is None:
            found = self._phases[phase] = _Phase(self, phase)
        return found

    def enter(self, phase: str) -> None:
        self._count()
        self._entered.append(phase)

    def leave(self) -> None:
        self._count()
        self._entered.pop()

    def _count(self) -> None:
        now = time.perf_counter()
        if self._entered:
            phase = self._entered[-1]
            self.seconds[phase] = self.seconds.get(phase, 0.0) + now - self._since
        self._since = now


class _Phase:
    """A context manager without the price of a generator: phases are entered for each candidate."""

    __slots__ = ("_clock", "_name")

    def __init__(self, clock: Clock, name: str) -> None:
        self._clock = clock
        self._name = name

    def __enter__(self) -> None:
        self._clock.enter(self._name)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._clock.leave()
