"""A progress line on a terminal or in a notebook; silence where output is piped."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from taso.search.backtracking import Progress, Statistics

_EVERY = 0.2  # seconds between two updates


def interactive() -> bool:
    """Whether somebody is looking: a terminal, or a notebook's kernel."""
    return sys.stderr.isatty() or "ipykernel" in sys.modules


@contextmanager
def progress_line(budget: int, wanted: bool | None = None) -> Iterator[Progress | None]:
    """Gives the function that a search reports to, or None where nobody is looking (`wanted` overrides)."""
    if not (interactive() if wanted is None else wanted):
        yield None
        return
    # rich costs more to import than taso itself and is needed by those who look only
    from rich.console import Console
    from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bar

    columns = (TextColumn("taso"), BarColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Bar(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=budget)
        last = [0.0]

        def report(statistics: Statistics, before: float, best: float) -> None:
            now = time.monotonic()
            if now - last[0] >= _EVERY:
                last[0] = now
                said = f"{before * 1e3:.3f} → {best * 1e3:.3f} ms, {statistics.candidates} candidates"
                bar.update(task, completed=statistics.expanded, description=said)

        yield report
