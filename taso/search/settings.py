"""How to optimize: what the search, the last word and the bodies of a graph all have to know."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from taso.backends.base import Backend
from taso.backends.costs import CostDatabase
from taso.rules.pattern import Rule
from taso.search.backtracking import Limits


@dataclass
class Settings:
    """How to optimize. `threads` and `backend` say where the result is to run."""

    backend: Backend
    rules: Sequence[Rule]
    database: CostDatabase
    limits: Limits = field(default_factory=Limits)
    threads: int | None = None
    verify: bool = True
    never_slower: bool = True
    sizes: Mapping[str, int] = field(default_factory=dict)
    seed: int = 0
    progress: bool | None = None
    print_measurements: bool = False
    check_every_step: bool = False
