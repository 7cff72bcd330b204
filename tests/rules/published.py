"""Where TASO's own rule files lie; they are read from there and are no part of the project."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from taso.rules.format import load
from taso.rules.pattern import Rule

FOLDER = Path(__file__).resolve().parents[2].parent / "shared" / "data" / "taso"
NAMES = ("graph_subst.pb", "generated_depth3.pb")


@cache
def published(name: str) -> tuple[Rule, ...]:
    """The rules of one of TASO's files; skips the test, with the reason, where the file is not there."""
    path = FOLDER / name
    if not path.exists():
        pytest.skip(f"TASO's rule file is not at {path}")
    return tuple(load(path))
