"""A progress line on a terminal or in a notebook; silence where output is piped."""

from __future__ import annotations

import importlib
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from taso.graph.drawing import safe
from taso.search.backtracking import Progress, Statistics

_EVERY = 0.2  # seconds between two updates


def interactive() -> bool:
    """Whether somebody is looking: a terminal, or a notebook."""
    return sys.stderr.isatty() or in_notebook()


def in_notebook() -> bool:
    """Whether this process is the kernel of a notebook."""
    ipython = sys.modules.get("IPython")
    return ipython is not None and getattr(getattr(ipython, "get_ipython", lambda: None)(), "kernel", None) is not None


@contextmanager
def progress_line(budget: int, wanted: bool | None = None) -> Iterator[Progress | None]:
    """Gives the function that a search reports to, or None where nobody is looking (`wanted` overrides)."""
    if not (interactive() if wanted is None else wanted):
        yield None
        return
    with _notebook_line(budget) if in_notebook() else _terminal_line(budget) as line:
        last = [0.0]

        def report(statistics: Statistics, before: float, best: float) -> None:
            now = time.monotonic()
            if now - last[0] >= _EVERY:
                last[0] = now
                said = f"{before * 1e3:.3f} → {best * 1e3:.3f} ms, {statistics.candidates} candidates"
                line(statistics.expanded, said)

        yield report


@contextmanager
def busy(doing: str, wanted: bool | None = None) -> Iterator[None]:
    """Says what is going on as long as it does, on a terminal; a notebook shows by itself that a cell is at work."""
    if in_notebook() or not (interactive() if wanted is None else wanted):
        yield
        return
    from rich.console import Console

    # seldom, for what is going on may be a measurement
    with Console(stderr=True).status(f"taso: {doing}", refresh_per_second=1):
        yield


@contextmanager
def _terminal_line(budget: int) -> Iterator[Callable[[int, str], None]]:
    # rich costs more to import than taso itself and is needed by those who look only
    from rich.console import Console
    from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bar

    columns = (TextColumn("taso"), BarColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Bar(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=budget)
        yield lambda done, said: bar.update(task, completed=done, description=said)


@contextmanager
def _notebook_line(budget: int) -> Iterator[Callable[[int, str], None]]:
    """A bar below the cell, which makes way for its last words; needs nothing but IPython itself."""
    display = importlib.import_module("IPython.display")
    started, last = time.monotonic(), ["nothing was searched"]
    handle = display.display(display.HTML("<span>taso</span>"), display_id=True)

    def line(done: int, said: str) -> None:
        last[0] = said
        seconds = f"{time.monotonic() - started:.0f} s"
        bar = f'<progress max="{budget}" value="{min(done, budget)}"></progress>'
        handle.update(display.HTML(f"<span>taso {bar} {safe(said)}, {seconds}</span>"))

    try:
        yield line
    finally:
        handle.update(display.HTML(f"<span>taso: {safe(last[0])}, {time.monotonic() - started:.1f} s</span>"))
