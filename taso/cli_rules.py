"""`taso rules …`: what the rules say, what is known of them, and the gates run again."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from taso import cli_generate, verdicts
from taso.graph.errors import RuleError, TasoError
from taso.rules import build
from taso.rules.collection import equations, is_equation, library, read
from taso.rules.expression import show
from taso.rules.pattern import Rule, Status
from taso.rules.verifier import SECONDS
from taso.verdicts import Numbered, Verdict

_WIDTH = 110
_PACKAGED = "the packaged rules"


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds `taso rules` with its actions; each sets `run`, which takes the settings and gives the exit status."""
    parser = commands.add_parser("rules", help="list, show and judge rewrite rules", description=__doc__)
    actions = parser.add_subparsers(required=True, metavar="ACTION")
    _add_list(actions.add_parser("list", help="one line for each rule", description=_list.__doc__))
    _add_show(actions.add_parser("show", help="all that is known of a rule", description=_show.__doc__))
    _add_verify(actions.add_parser("verify", help="judge rules from the start", description=_verify.__doc__))
    cli_generate.add_parser(
        actions.add_parser("generate", help="find rules by enumeration", description=cli_generate.run.__doc__)
    )


def _add_list(parser: argparse.ArgumentParser) -> None:
    _add_file(parser)
    parser.add_argument("--status", choices=[s.value for s in Status], help="only rules of this status")
    parser.add_argument("--json", action="store_true", help="print JSON")
    _add_run(parser, _list)


def _add_show(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("rule", metavar="RULE", help="its identifier, equation, or number within the file")
    _add_file(parser)
    parser.add_argument("--json", action="store_true", help="print JSON")
    _add_run(parser, _show)


def _add_verify(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "files", nargs="*", metavar="FILE", help=f"rule files, .pb or .rules, or an equation (default: {_PACKAGED})"
    )
    parser.add_argument(
        "--rule", action="append", default=[], metavar="RULE",
        help="only this one: identifier, equation or number (may be repeated)",
    )  # fmt: skip
    parser.add_argument("--sample", type=_count, metavar="N", help="only N rules of each file, always the same ones")
    parser.add_argument(
        "--seconds", type=_seconds, default=SECONDS, help="time allowed for each proof (default: %(default)g)"
    )
    parser.add_argument(
        "--workers", type=_count, default=os.cpu_count() or 1, help="processes (default: %(default)s)"
    )
    parser.add_argument("--quick", action="store_true", help="leave the trials of what is proved out")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--all", action="store_true", help="also print the rules that are proved")
    form.add_argument("--json", action="store_true", help="print JSON")
    form.add_argument("--markdown", action="store_true", help="print a table, with conditions that are missing")
    _add_run(parser, _verify)


def _add_file(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", nargs="?", metavar="FILE", help=f"a rule file, .pb or .rules (default: {_PACKAGED})")


def _add_run(parser: argparse.ArgumentParser, run: object) -> None:
    # commands that talk more or less have these set
    parser.set_defaults(run=run, quiet=False, verbose=False)


def _count(text: str) -> int:
    if not (text.isascii() and text.isdigit() and 0 < int(text) < 1 << 20):
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number above 0")
    return int(text)


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < 1e9:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds")
    return value


# ── which rules ──────────────────────────────────────────────────────────────────────────────────────────────────


def _rules(file: str | None) -> list[Numbered]:
    """The rules of a file, as it states them, numbered from 0; a packaged file may be called by its name alone."""
    if file is None:
        return list(enumerate(library()))
    if is_equation(file):
        return list(enumerate(equations(file)))
    packaged = build.FOLDER / file
    by_name = Path(file).name == file and not Path(file).exists() and packaged.exists()
    return list(enumerate(read(packaged if by_name else file)))


def _chosen(rules: Sequence[Numbered], wanted: str) -> list[Numbered]:
    """Those that an identifier, an equation or a number means; raises `RuleError` where it means none."""
    found = [n for n in rules if wanted in (n[1].id, n[1].name)] or [n for n in rules if wanted == str(n[0])]
    if not found:
        raise RuleError(f"none of the {len(rules)} rules is called '{wanted}', or has that equation or number")
    return found


# ── list and show ────────────────────────────────────────────────────────────────────────────────────────────────


def _list(settings: argparse.Namespace) -> int:
    """Lists rules: name, status, exactness, equation. What a file says of a rule's status is repeated, not believed."""
    kept = [n for n in _rules(settings.file) if settings.status in (None, n[1].status.value)]
    if settings.json:
        _print_json([_described(*n) for n in kept])
    elif kept:
        width = max(len(_named(*n)) for n in kept)
        _print("\n".join(
            f"{_named(i, r):{width}}  {r.status.value:8}  {r.exactness.value:12}  {_shortened(r.name)}" for i, r in kept
        ))  # fmt: skip
    counts = Counter(r.status for _, r in kept)
    _say(", ".join([f"{len(kept)} rules", *(f"{counts[s]} {s.value}" for s in Status if counts[s])]))
    return 0


def _show(settings: argparse.Namespace) -> int:
    """Shows a rule: equation, condition, exactness, status and certificate, as its file states them."""
    found = _chosen(_rules(settings.file), settings.rule)
    if settings.json:
        _print_json([_described(*n) for n in found])
    else:
        _print("\n\n".join("\n".join(_lines(*n)) for n in found))
    return 0


def _named(number: int, rule: Rule) -> str:
    return rule.id or str(number)


def _shortened(text: str) -> str:
    return text if len(text) <= _WIDTH else text[: _WIDTH - 1] + "…"


def _lines(number: int, rule: Rule) -> Iterator[str]:
    yield _named(number, rule)
    yield f"  equation        {rule.name}"
    yield f"  condition       {' and '.join(map(show, rule.conditions)) or 'none'}"
    yield f"  exactness       {rule.exactness.value}"
    yield f"  status          {rule.status.value}"
    for name, value in _certified(rule).items():
        yield f"  {name.replace('_', ' '):14}  {value}"
    if rule.origin:
        yield f"  origin          {rule.origin}"


def _certified(rule: Rule) -> dict[str, object]:
    """What a certificate says, without what it leaves open."""
    c = rule.certificate
    said: dict[str, object] = {"method": c.method, "command": c.command}
    if c.trials:
        said |= {"seed": c.seed, "trials": c.trials, "primes": list(c.primes), "error_bound": c.error_bound}
    said |= {"counterexample": c.counterexample, "reason": c.reason, "digest": c.digest}
    return {name: value for name, value in said.items() if value not in ("", None)}


def _described(number: int, rule: Rule) -> dict[str, object]:
    return {
        "number": number, "id": rule.id, "equation": rule.name, "condition": [show(c) for c in rule.conditions],
        "exactness": rule.exactness.value, "status": rule.status.value, "certificate": _certified(rule),
        "origin": rule.origin,
    }  # fmt: skip


# ── verify ───────────────────────────────────────────────────────────────────────────────────────────────────────


def _verify(settings: argparse.Namespace) -> int:
    """Judges rules by trials, a proof and all small sizes, believing nothing that a file says of them.

    The exit status is 1 where a rule is refuted or unproved, or is less than its file says.
    """
    jobs = [(file or _PACKAGED, _selected(_rules(file), settings)) for file in settings.files or [None]]
    found = [(file, _judged(file, rules, settings)) for file, rules in jobs]
    if settings.json:
        _print_json([
            {"file": file, "claimed": v.claimed.value, "seconds": round(v.seconds, 3), **_described(v.number, v.rule)}
            for file, judged in found for v in judged
        ])  # fmt: skip
    return int(any(v.failed for _, judged in found for v in judged))


def _selected(rules: list[Numbered], settings: argparse.Namespace) -> list[Numbered]:
    if settings.rule:
        rules = list(dict.fromkeys(n for wanted in settings.rule for n in _chosen(rules, wanted)))
    return verdicts.sample(rules, settings.sample) if settings.sample else rules


def _judged(file: str, rules: Sequence[Numbered], settings: argparse.Namespace) -> list[Verdict]:
    started, found = time.perf_counter(), list[Verdict]()
    for verdict in verdicts.judge_all(
        rules, seconds=settings.seconds, both=not settings.quick, repair=settings.markdown, workers=settings.workers
    ):
        found.append(verdict)
        if not (settings.json or settings.markdown) and (settings.all or verdict.rule.status is not Status.PROVED):
            _print("\n".join(_told(verdict)))
    if settings.markdown:
        _print(verdicts.markdown(file, found))
    _say(f"{file}: {verdicts.summary(found)}, {time.perf_counter() - started:.1f} s")
    return found


def _told(verdict: Verdict) -> Iterator[str]:
    rule = verdict.rule
    name = _named(verdict.number, rule)
    yield f"{name:28}  {rule.status.value:8}  {verdict.seconds:6.2f} s  {_shortened(rule.name)}"
    said = rule.certificate.counterexample or rule.certificate.reason
    if said:
        yield f"    {said}"


# ── talk ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def _say(text: str) -> None:
    print(text, file=sys.stderr)


def _print_json(data: object) -> None:
    _print(json.dumps(data, indent=2))


def _print(text: str) -> None:
    """Prints to stdout; whoever closed it early (`| head`) has seen enough."""
    try:
        print(text.rstrip("\n"), flush=True)
    except BrokenPipeError:
        # what is left in the buffer must not raise again at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except OSError as error:
        raise TasoError(f"the result could not be printed: {error.strerror}") from error
