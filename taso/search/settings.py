"""How to optimize: what the search, the last word and the bodies of a graph all have to know."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field

from taso.backends.base import Backend
from taso.backends.costs import CostDatabase
from taso.rules.pattern import Rule
from taso.search.backtracking import Limits
from taso.search.clock import Clock
from taso.search.frugal import Aim
from taso.search.watching import Watch


@dataclass
class Settings:
    """How to optimize. `threads` and `backend` say where the result is to run, `search` is one of `SEARCHES`.

    `explain` names rules or nodes that the report is to explain; `checkpoint` is the file that keeps the search's
    state. With `plan` the last few graphs get exact plans, and with `algorithms` kernels may be computed by others than
    the usual ones. With `pieces` a large graph is searched in pieces first, as many at once as there are `workers`.
    `aim` says what memory matters. `clock` tells where the time went, `watch` tells a caller while it goes;
    `check_every_step` recomputes everything incremental and compares.
    """

    backend: Backend
    rules: Sequence[Rule]
    database: CostDatabase
    limits: Limits = field(default_factory=Limits)
    search: str = "auto"
    threads: int | None = None
    verify: bool = True
    never_slower: bool = True
    sizes: Mapping[str, int] = field(default_factory=dict)
    seed: int = 0
    progress: bool | None = None
    print_measurements: bool = False
    check_every_step: bool = False
    explain: Sequence[str] = ()
    checkpoint: str | None = None
    plan: bool = True
    algorithms: bool = True
    pieces: bool = True
    workers: int | Executor | None = None
    aim: Aim = field(default_factory=Aim)
    clock: Clock = field(default_factory=Clock)
    watch: Watch = field(default_factory=Watch)
