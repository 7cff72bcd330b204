"""Judges rule files: `python -m taso.rules.verifier FILE...` prints a verdict for each rule, and how many there are."""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Sequence

from taso.graph.errors import TasoError
from taso.rules.collection import read
from taso.rules.pattern import Rule, Status
from taso.rules.verifier import SECONDS, verify

_WIDTH = 110


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the table of verdicts; the exit status is 1 where a rule is refuted or unproved."""
    parser = argparse.ArgumentParser(prog="python -m taso.rules.verifier", description=__doc__)
    parser.add_argument("files", nargs="+", metavar="FILE", help="rule files: text (.rules) or protocol buffers (.pb)")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="time allowed for each proof (%(default)g)")
    parser.add_argument("--all", action="store_true", help="also list the rules that are proved")
    parser.add_argument("--quick", action="store_true", help="try only what is not proved")
    options = parser.parse_args(arguments)
    total: Counter[Status] = Counter()
    for path in options.files:
        try:
            rules = read(path)
        except TasoError as error:
            sys.stderr.write(f"{error}\n")
            return 2
        total += _judge(path, rules, options)
    return int(bool(total[Status.REFUTED] + total[Status.UNPROVED]))


def _judge(path: str, rules: Sequence[Rule], options: argparse.Namespace) -> Counter[Status]:
    start, counts = time.perf_counter(), Counter[Status]()
    for number, rule in enumerate(rules):
        begun = time.perf_counter()
        judged = verify(rule, seconds=options.seconds, both=not options.quick)
        counts[judged.status] += 1
        if options.all or judged.status is not Status.PROVED:
            _show(rule.id or str(number), judged, time.perf_counter() - begun)
    shown = ", ".join(f"{counts[status]} {status.value}" for status in Status if counts[status])
    sys.stdout.write(f"{path}: {len(rules)} rules, {shown or 'none'}, {time.perf_counter() - start:.1f} s\n")
    return counts


def _show(name: str, rule: Rule, seconds: float) -> None:
    sys.stdout.write(f"{name:28s} {rule.status.value:9s} {seconds:6.2f} s  {_short(rule.name)}\n")
    said = rule.certificate.counterexample or rule.certificate.reason
    if said:
        sys.stdout.write(f"    {said}\n")


def _short(text: str) -> str:
    return text if len(text) <= _WIDTH else text[: _WIDTH - 1] + "…"


if __name__ == "__main__":
    sys.exit(main())
