"""Verdicts on the rules of a file: rules judged one by one or in several processes, and what is told of them."""

from __future__ import annotations

import hashlib
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from taso.rules.expression import show
from taso.rules.pattern import Certificate, Rule, Status
from taso.rules.tester import repairs
from taso.rules.text import show_rule
from taso.rules.verifier import verify

Numbered = tuple[int, Rule]
"""A rule and its place in its file."""

_CELL = 160
_REPAIRS = 3
_REFUSED = (Status.REFUTED, Status.UNPROVED)
_RANKS = (Status.REFUTED, Status.UNPROVED, Status.TESTED, Status.BOUNDED, Status.PROVED)


class Verdict(NamedTuple):
    """What became of a rule that its file `claimed` something of; `missing` are conditions under which it holds."""

    number: int
    rule: Rule
    claimed: Status
    seconds: float
    missing: tuple[str, ...] = ()

    @property
    def failed(self) -> bool:
        """Whether it is refuted or unproved, or less than its file says."""
        return self.rule.status in _REFUSED or _RANKS.index(self.rule.status) < _RANKS.index(self.claimed)


def judge(numbered: Numbered, *, seconds: float, both: bool = True, repair: bool = False) -> Verdict:
    """The verdict on one rule, of which nothing is believed; with `repair` a refuted one is tried with a condition."""
    number, rule = numbered
    started = time.perf_counter()
    judged = verify(rule.judged(Status.UNPROVED, Certificate()), seconds=seconds, both=both)
    missing = tuple(_repaired(rule, seconds)) if repair and judged.status is Status.REFUTED else ()
    return Verdict(number, judged, rule.status, time.perf_counter() - started, missing)


def judge_all(
    rules: Sequence[Numbered], *, seconds: float, both: bool = True, repair: bool = False, workers: int = 1
) -> Iterator[Verdict]:
    """`judge` of each, in order, as they are done."""
    gate = partial(judge, seconds=seconds, both=both, repair=repair)
    if min(workers, len(rules)) <= 1:
        yield from map(gate, rules)
        return
    with ProcessPoolExecutor(min(workers, len(rules))) as executor:
        yield from executor.map(gate, rules)


def _repaired(rule: Rule, seconds: float) -> Iterator[str]:
    """Conditions that a refuted rule needs, each with what the gates say of it then."""
    for found in islice(repairs(rule), _REPAIRS):
        judged = verify(found, seconds=seconds, both=False)
        yield f"{show(found.conditions[-1])} ({judged.status.value})"


def sample(rules: Sequence[Numbered], count: int) -> list[Numbered]:
    """`count` of the rules, chosen by what they say: the same ones each time, whatever else the file holds."""
    chosen = sorted(rules, key=lambda n: hashlib.sha256(show_rule(n[1]).encode()).digest())[:count]
    return sorted(chosen, key=lambda n: n[0])


def named(number: int, rule: Rule) -> str:
    """What a rule is called: its identifier, or its place in its file."""
    return rule.id or str(number)


def shortened(rule: Rule, width: int) -> str:
    """The equation of a rule, cut where it is longer than `width`."""
    return rule.name if len(rule.name) <= width else rule.name[: width - 1] + "…"


def summary(rules: Iterable[Rule]) -> str:
    """How many rules there are, and how many of each status."""
    counts = Counter(r.status for r in rules)
    total = counts.total()
    each = [f"{counts[s]} {s.value}" for s in Status if counts[s]]
    return ", ".join([f"{total} rule{'s' if total != 1 else ''}", *each])


def markdown(file: str, verdicts: Sequence[Verdict]) -> str:
    """A page: the verdicts as a table, then, of each rule not proved, why, and under which condition it holds."""
    name = Path(file).name
    lines = [
        f"# Verdicts on the rules of {name}", "",
        f"`taso rules verify {name} --markdown` made this page; [rules.md](rules.md) says what the words mean.", "",
        f"{summary(v.rule for v in verdicts)}.", "", "| rule | verdict | equation |", "| --- | --- | --- |",
    ]  # fmt: skip
    lines += [f"| {named(v.number, v.rule)} | {v.rule.status.value} | {_code(v.rule)} |" for v in verdicts]
    for v in verdicts:
        if v.rule.status is not Status.PROVED:
            lines += ["", *_reasons(v)]
    return "\n".join(lines) + "\n"


def _reasons(verdict: Verdict) -> Iterator[str]:
    rule = verdict.rule
    yield f"**{named(verdict.number, rule)}** is {rule.status.value}: `{rule.name}`"
    yield ""
    if rule.conditions:
        yield f"- where `{' and '.join(map(show, rule.conditions))}`"
    if rule.certificate.counterexample:
        yield f"- counterexample: {rule.certificate.counterexample}"
    if rule.certificate.reason:
        yield f"- {rule.certificate.reason}"
    for condition in verdict.missing:
        yield f"- holds where also {condition}"
    if rule.status is Status.REFUTED and not verdict.missing:
        yield "- no single equation between two dimensions of its tensors makes it hold"


def _code(rule: Rule) -> str:
    """An equation in a cell of a table."""
    return "`" + shortened(rule, _CELL).replace("|", "\\|") + "`"
