"""Makes the packaged rule files: `python -m taso.rules.build` tries each rule of library/*.rules and writes *.pb.

`--check` writes nothing and fails where a packaged file is not what its text says, or where a trial no longer passes.
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence
from pathlib import Path

from taso.graph.errors import RuleError
from taso.rules.format import load, save
from taso.rules.pattern import Rule, Status
from taso.rules.tester import test_rule
from taso.rules.text import parse_rules

log = logging.getLogger(__name__)

FOLDER = Path(__file__).parent / "library"


def build(text: Path) -> list[Rule]:
    """The rules of a text file, each tried; raises `RuleError` where one does not pass."""
    rules = parse_rules(text.read_text(encoding="utf-8"), origin=text.name)
    judged = []
    for rule in rules:
        result = test_rule(rule)
        if result.status is not Status.TESTED:
            said = result.certificate.counterexample or result.certificate.reason
            raise RuleError(f"[{rule.id}] {rule.name} is {result.status.value}: {said}")
        judged.append(result)
    return judged


def main(arguments: Sequence[str] | None = None) -> int:
    """Builds or checks all packaged rule files; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; fail where a file is out of date")
    check = parser.parse_args(arguments).check
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    for text in sorted(FOLDER.glob("*.rules")):
        target = text.with_suffix(".pb")
        try:
            rules = build(text)
        except RuleError as error:
            log.error("%s: %s", text.name, error)
            return 1
        if check and (not target.exists() or load(target) != rules):
            log.error("%s is not what %s says: run python -m taso.rules.build", target.name, text.name)
            return 1
        if not check:
            save(rules, target)
        log.info("%s: %d rules, all %s", target.name, len(rules), Status.TESTED.value)
    return 0


if __name__ == "__main__":
    sys.exit(main())
