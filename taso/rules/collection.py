"""Where rules come from: the packaged library, files, and lists; and the gate that each passes before it is used."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from functools import cache, lru_cache
from importlib import resources
from pathlib import Path
from typing import Union

from taso.graph.errors import RuleError
from taso.rules.format import load
from taso.rules.pattern import Rule, Status
from taso.rules.tester import test_rule
from taso.rules.text import parse_rules

RuleSource = Union[str, os.PathLike[str], Rule, Sequence[Union[str, "os.PathLike[str]", Rule]]]


@cache
def library() -> tuple[Rule, ...]:
    """The packaged rules, in order of preference."""
    folder = resources.files("taso.rules.library")
    found: list[Rule] = []
    for name in sorted(entry.name for entry in folder.iterdir() if entry.name.endswith(".pb")):
        with resources.as_file(folder / name) as path:
            found.extend(load(path))
    return tuple(found)


def gather(source: RuleSource) -> list[Rule]:
    """Rules from a file (protocol buffers, or text where the name ends in .rules), a rule, or a list of such.

    What a file says of a rule's status is not trusted: each is tried again. Raises `RuleError` for files that cannot be
    read.
    """
    if isinstance(source, Rule):
        return [judged(source)]
    if isinstance(source, (str, os.PathLike)):
        return [judged(r) for r in read(source)]
    if not isinstance(source, Sequence):
        raise RuleError(f"rules are a file, a Rule, or a list of such, not {source!r}")
    return [rule for item in source for rule in gather(item)]


def read(path: str | os.PathLike[str]) -> list[Rule]:
    """The rules of a file, as they stand there."""
    if str(path).endswith(".rules"):
        try:
            text = Path(path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise RuleError(f"the rule file '{path}' cannot be read: {error}") from error
        rules = parse_rules(text, origin=str(path))
        if not rules:
            raise RuleError(f"the rule file '{path}' holds no rule")
        return rules
    return load(path)


@lru_cache(maxsize=1 << 14)
def judged(rule: Rule) -> Rule:
    """The rule with the status that trials give it now; tried once per process."""
    return rule if rule in library() and rule.status is not Status.UNPROVED else test_rule(rule)


def refused(rules: Iterable[Rule]) -> list[Rule]:
    """Those that no search may take."""
    return [r for r in rules if r.status in (Status.REFUTED, Status.UNPROVED)]
