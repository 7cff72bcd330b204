"""The pages in docs/ about TASO's own rules say what the gates say."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from published import FOLDER, NAMES, published

from taso.rules.pattern import Status
from taso.rules.verifier import SECONDS
from taso.verdicts import judge_all, markdown, sample

DOCS = Path(__file__).parents[2] / "docs"
ROW = re.compile(r"\| (\d+) \| (\w+) \| `(.*)` \|")
FALSE = {NAMES[0]: {99, 100, 130, 131}, NAMES[1]: {150, 386, 387, 440, 441, 442, 443, 487, 488, 494, 495}}


def page(name: str) -> str:
    return (DOCS / f"verdicts-{Path(name).stem}.md").read_text(encoding="utf-8")


def stated(name: str) -> dict[int, str]:
    """The verdict that the page states of each rule, by its number."""
    return {int(m[1]): m[2] for m in map(ROW.fullmatch, page(name).splitlines()) if m}


@pytest.mark.parametrize("name", NAMES)
def test_a_page_states_one_verdict_on_each_rule_and_reasons_for_the_false_ones(name: str) -> None:
    assert list(stated(name)) == list(range(len(published(name))))
    refuted = {number for number, status in stated(name).items() if status == "refuted"}
    assert refuted == FALSE[name]
    assert {s for n, s in stated(name).items() if n not in refuted} == {"proved"}
    reasons = page(name).split("\n**")[1:]
    assert [int(r.split("**")[0]) for r in reasons] == sorted(refuted)
    assert all("- counterexample: " in r for r in reasons)
    assert all("- holds where also " in r or "- no single equation" in r for r in reasons)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_sample_of_the_rules_gets_the_verdicts_that_the_page_states(name: str) -> None:
    chosen = sample(list(enumerate(published(name))), 8)
    for verdict in judge_all(chosen, seconds=SECONDS, both=False, workers=os.cpu_count() or 1):
        assert verdict.rule.status.value == stated(name)[verdict.number], verdict.rule.name


@pytest.mark.nightly
@pytest.mark.parametrize("name", NAMES)
def test_all_rules_give_the_page_again(name: str) -> None:
    rules = list(enumerate(published(name)))
    verdicts = list(judge_all(rules, seconds=SECONDS, repair=True, workers=os.cpu_count() or 1))
    assert {v.rule.status for v in verdicts} == {Status.PROVED, Status.REFUTED}
    assert markdown(str(FOLDER / name), verdicts) == page(name)
