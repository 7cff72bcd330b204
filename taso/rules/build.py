"""Makes the packaged rule files: `python -m taso.rules.build` judges each rule of library/*.rules and writes *.pb.

Only what is proved is packaged. A rule keeps its verdict while its statement stays the same and so do the definitions
and gates that judged it, which the digest in its certificate tells; `--all` judges every rule again. `--check` writes
nothing and fails where a packaged file is not what its text says, or where what has to be judged again is not proved.
With names of text files only these are built.
Nothing is believed of a file that someone else made: `taso rules verify` judges all rules from the start.
"""

from __future__ import annotations

import argparse
import hashlib
import logging
import os
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from dataclasses import replace
from functools import cache
from pathlib import Path

from taso.graph.errors import RuleError
from taso.rules.collection import statement
from taso.rules.format import load, save
from taso.rules.pattern import Rule, Status
from taso.rules.text import parse_rules, show_rule
from taso.rules.verifier import SECONDS, command, verify_rules

log = logging.getLogger(__name__)

FOLDER = Path(__file__).parent / "library"

PATIENCE = 300.0
"""Time allowed for a proof while packaging, where a busy machine must not make the difference."""

_PACKAGE = Path(__file__).parents[1]
_JUDGES = (
    "graph/index.py", "graph/numbers.py", "graph/operator.py", "graph/types.py", "graph/unknown.py",
    "graph/winograd.py", "graph/ops/*.py",
    "rules/constants.py", "rules/expression.py", "rules/instances.py", "rules/pattern.py", "rules/settings.py",
    "rules/primitives.py", "rules/algorithms.py", "rules/solving.py", "rules/tester.py", "rules/verifier/*.py",
)  # fmt: skip
"""The definitions of operators, the language of rules, and the gates: all that a verdict depends on."""


@cache
def sources() -> str:
    """A digest of the definitions and gates as they are now; comments and empty lines do not count."""
    total = hashlib.sha256()
    for pattern in _JUDGES:
        for path in sorted(_PACKAGE.glob(pattern)):
            total.update(path.name.encode())
            for line in path.read_text(encoding="utf-8").splitlines():
                if line.strip() and not line.lstrip().startswith("#"):
                    total.update(line.rstrip().encode() + b"\n")
    return total.hexdigest()


def digest(rule: Rule) -> str:
    """What the verdict on a rule depends on: its statement, and `sources`."""
    return hashlib.sha256(f"{show_rule(replace(rule, id=''))}\n{sources()}".encode()).hexdigest()[:32]


def judge(
    rules: Iterable[Rule], known: Iterable[Rule] = (), *, seconds: float = SECONDS, executor: Executor | None = None
) -> list[Rule]:
    """The rules with their verdicts, a digest in each certificate; verdicts in `known` that still hold are kept."""
    kept = {statement(k): k for k in known if k.status is Status.PROVED and k.certificate.digest == digest(k)}
    given = list(rules)
    open_ones = [r for r in given if statement(r) not in kept]
    if open_ones and kept:
        log.info("%d verdicts still hold, %d rules are to be judged", len(given) - len(open_ones), len(open_ones))
    judged = iter(verify_rules(open_ones, seconds=seconds, executor=executor))
    return [_kept(r, kept[statement(r)]) if statement(r) in kept else _dated(next(judged)) for r in given]


def _kept(rule: Rule, known: Rule) -> Rule:
    """`rule` with the verdict on `known`, the same statement; the command names the rule as it is called now."""
    return rule.judged(known.status, replace(known.certificate, command=command(rule)))


def _dated(rule: Rule) -> Rule:
    return rule.judged(rule.status, replace(rule.certificate, digest=digest(rule)))


def build(
    text: Path, known: Iterable[Rule] = (), *, seconds: float = SECONDS, executor: Executor | None = None
) -> list[Rule]:
    """The rules of a text file, each proved; raises `RuleError` naming all that are not."""
    rules = judge(
        parse_rules(text.read_text(encoding="utf-8"), origin=text.name), known, seconds=seconds, executor=executor
    )
    refused = [r for r in rules if r.status is not Status.PROVED]
    if refused:
        raise RuleError("\n".join(f"[{r.id}] {r.name} is {r.status.value}: {_why(r)}" for r in refused))
    return rules


def _why(rule: Rule) -> str:
    return rule.certificate.counterexample or rule.certificate.reason


def main(arguments: Sequence[str] | None = None) -> int:
    """Builds or checks all packaged rule files; returns the exit status."""
    texts = sorted(FOLDER.glob("*.rules"))
    parser = argparse.ArgumentParser(description=__doc__)
    known = ", ".join(t.name for t in texts)
    parser.add_argument("files", nargs="*", metavar="FILE", help=f"of {known} (default: all)")
    parser.add_argument("--check", action="store_true", help="write nothing; fail where a file is out of date")
    parser.add_argument("--all", action="store_true", help="judge every rule again, whatever is packaged")
    parser.add_argument("--seconds", type=float, default=PATIENCE, help="time allowed for each proof (%(default)g)")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="processes (%(default)d)")
    options = parser.parse_args(arguments)
    unknown = sorted(set(options.files) - {t.name for t in texts})
    if unknown:
        parser.error(f"{unknown[0]} is none of the library's text files")
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    wanted = [t for t in texts if t.name in options.files or not options.files]
    with ProcessPoolExecutor(options.workers) as executor:
        failed = [text for text in wanted if not _one(text, options, executor)]
    return int(bool(failed) or not _unique(texts))


def _one(text: Path, options: argparse.Namespace, executor: Executor) -> bool:
    target = text.with_suffix(".pb")
    try:
        packaged = _packaged(target)
        known = () if options.all else packaged
        rules = build(text, known, seconds=options.seconds, executor=executor)
    except RuleError as error:
        log.error("%s: %s", text.name, error)
        return False
    if options.check and [_said(r) for r in packaged] != [_said(r) for r in rules]:
        log.error("%s is not what %s says: run python -m taso.rules.build", target.name, text.name)
        return False
    if not options.check:
        save(rules, target)
    log.info("%s: %d rules, all %s", target.name, len(rules), Status.PROVED.value)
    return True


def _packaged(target: Path) -> list[Rule]:
    """The rules of the packaged file, none where it cannot be read: then all are judged again."""
    try:
        return load(target) if target.exists() else []
    except RuleError as error:
        log.warning("%s", error)
        return []


def _said(rule: Rule) -> tuple[object, ...]:
    """All that a packaged rule says but how its proof went, which need not be the same with every version."""
    return statement(rule), rule.id, rule.status, rule.origin


def _unique(texts: Sequence[Path]) -> bool:
    """Whether no two rules of all files have the same identifier or statement."""
    rules = [r for text in texts for r in parse_rules(text.read_text(encoding="utf-8"), origin=text.name)]
    twice = [name or "(none)" for name, count in Counter(r.id for r in rules).items() if count > 1 or not name]
    counts = Counter(map(statement, rules))
    same = [r.id for r in rules if counts[statement(r)] > 1]
    for name in twice:
        log.error("the identifier %s is missing or stands twice in the library", name)
    if same:
        log.error("these rules of the library say the same: %s", ", ".join(same))
    return not twice and not same


if __name__ == "__main__":
    sys.exit(main())
