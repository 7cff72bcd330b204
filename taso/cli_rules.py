"""`taso rules …`: what the rules say, what is known of them, and the gates run again."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from taso import cli_generate, verdicts
from taso.cli_common import (
    DONE,
    FAILED,
    TROUBLE,
    Commands,
    add_command,
    add_json,
    add_workers,
    describe,
    print_json,
    print_text,
    say,
    usable_processors,
    whole,
)
from taso.graph.errors import RuleError
from taso.rules import build
from taso.rules.collection import equations, is_equation, library, read
from taso.rules.expression import show
from taso.rules.pattern import Rule, Status
from taso.verdicts import Numbered, Verdict, named, shortened

_LISTED = (
    ("taso rules list", "the packaged rules, a line each"),
    ("taso rules list my.rules --json", "those of a file, as JSON"),
)
_SHOWN = (
    ("taso rules show merge-relu", "all that is known of the rule of this name"),
    ("taso rules show 3 my.rules", "the fourth of a file"),
)
_VERIFIED = (
    ("taso rules verify my.rules", "judge the rules of a file"),
    ("taso rules verify 'Relu(Relu(x)) => Relu(x)'", "judge an equation"),
)
EXAMPLES = (_LISTED[0], _SHOWN[0], _VERIFIED[0], cli_generate.EXAMPLES[0])
_WIDTH = 110
_PACKAGED = "the packaged rules"


def add_parser(commands: Commands[argparse.ArgumentParser]) -> None:
    """Adds `taso rules` with its actions."""
    parser = commands.add_parser("rules", help="list, show and judge rewrite rules")
    describe(parser, __doc__, EXAMPLES)
    actions = parser.add_subparsers(required=True, metavar="ACTION")
    _add_list(actions)
    _add_show(actions)
    _add_verify(actions)
    cli_generate.add_parser(actions)


def _add_list(actions: Commands[argparse.ArgumentParser]) -> None:
    parser = add_command(actions, "list", _list, "one line for each rule", _LISTED)
    _add_file(parser)
    parser.add_argument("--status", choices=[s.value for s in Status], help="only rules of this status")
    add_json(parser)


def _add_show(actions: Commands[argparse.ArgumentParser]) -> None:
    parser = add_command(actions, "show", _show, "all that is known of a rule", _SHOWN)
    parser.add_argument("rule", metavar="RULE", help="its identifier, equation, or number within the file")
    _add_file(parser)
    add_json(parser)


def _add_verify(actions: Commands[argparse.ArgumentParser]) -> None:
    parser = add_command(actions, "verify", _verify, "judge rules from the start", _VERIFIED)
    # status 1 is the answer no, so that what went wrong needs another
    parser.set_defaults(trouble=TROUBLE)
    parser.add_argument(
        "files", nargs="*", metavar="FILE", help=f"rule files, .pb or .rules, or an equation (default: {_PACKAGED})"
    )
    parser.add_argument(
        "--rule", action="append", default=[], metavar="RULE",
        help="only this one: identifier, equation or number (may be repeated)",
    )  # fmt: skip
    parser.add_argument("--sample", type=whole(1), metavar="N", help="only N rules of each file, always the same ones")
    parser.add_argument(
        "--seconds", type=_seconds, default=build.PATIENCE, help="time allowed for each proof (default: %(default)g)"
    )
    add_workers(parser)
    parser.add_argument("--quick", action="store_true", help="leave the trials of what is proved out")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--all", action="store_true", help="also print the rules that are proved")
    add_json(form)
    form.add_argument("--markdown", action="store_true", help="print a table, with conditions that are missing")


def _add_file(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", nargs="?", metavar="FILE", help=f"a rule file, .pb or .rules (default: {_PACKAGED})")


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
    """Lists rules: name, status, exactness, equation. What a file says of a rule's status is repeated, not believed.

    The status is 0, or 1 where the file cannot be read.
    """
    kept = [n for n in _rules(settings.file) if settings.status in (None, n[1].status.value)]
    if settings.json:
        print_json([_described(*n) for n in kept])
    elif kept:
        width = max(len(named(*n)) for n in kept)
        print_text("\n".join(
            f"{named(*n):{width}}  {n[1].status.value:8}  {n[1].exactness.value:12}  {shortened(n[1], _WIDTH)}"
            for n in kept
        ))  # fmt: skip
    say(verdicts.summary(rule for _, rule in kept))
    return DONE


def _show(settings: argparse.Namespace) -> int:
    """Shows a rule: equation, condition, exactness, status and certificate, as its file states them.

    The status is 0, or 1 where the file cannot be read or has no such rule.
    """
    found = _chosen(_rules(settings.file), settings.rule)
    if settings.json:
        print_json([_described(*n) for n in found])
    else:
        print_text("\n\n".join("\n".join(_lines(*n)) for n in found))
    return DONE


def _lines(number: int, rule: Rule) -> Iterator[str]:
    yield named(number, rule)
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
    if c.dimensions:
        said["dimensions"] = c.dimensions
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

    The exit status is 0 where every rule is at least what its file says, 1 where one is less, or refuted or unproved,
    and 3 where a file cannot be read or has no such rule.
    """
    jobs = [(file or _PACKAGED, _selected(_rules(file), settings)) for file in settings.files or [None]]
    found = [(file, _judged(file, rules, settings)) for file, rules in jobs]
    if settings.json:
        print_json([
            {"file": file, "claimed": v.claimed.value, "seconds": round(v.seconds, 3), **_described(v.number, v.rule)}
            for file, judged in found for v in judged
        ])  # fmt: skip
    return FAILED if any(v.failed for _, judged in found for v in judged) else DONE


def _selected(rules: list[Numbered], settings: argparse.Namespace) -> list[Numbered]:
    if settings.rule:
        rules = list(dict.fromkeys(n for wanted in settings.rule for n in _chosen(rules, wanted)))
    return verdicts.sample(rules, settings.sample) if settings.sample else rules


def _judged(file: str, rules: Sequence[Numbered], settings: argparse.Namespace) -> list[Verdict]:
    started, found = time.perf_counter(), list[Verdict]()
    for verdict in verdicts.judge_all(
        rules, seconds=settings.seconds, both=not settings.quick, repair=settings.markdown,
        workers=settings.workers or usable_processors(),
    ):
        found.append(verdict)
        if not (settings.json or settings.markdown) and (settings.all or verdict.rule.status is not Status.PROVED):
            print_text("\n".join(_told(verdict)))
    if settings.markdown:
        print_text(verdicts.markdown(file, found))
    say(f"{file}: {verdicts.summary(v.rule for v in found)}, {time.perf_counter() - started:.1f} s")
    return found


def _told(verdict: Verdict) -> Iterator[str]:
    rule = verdict.rule
    name = named(verdict.number, rule)
    yield f"{name:28}  {rule.status.value:8}  {verdict.seconds:6.2f} s  {shortened(rule, _WIDTH)}"
    said = rule.certificate.counterexample or rule.certificate.reason
    if said:
        yield f"    {said}"
