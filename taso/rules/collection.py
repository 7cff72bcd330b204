"""Where rules come from: the packaged library, files, equations, names; and the gates that each passes before use."""

from __future__ import annotations

import difflib
import logging
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import cache, lru_cache
from importlib import resources
from pathlib import Path
from typing import NamedTuple, Union, cast

from taso.graph import plugins
from taso.graph.errors import RuleError
from taso.rules.format import load
from taso.rules.pattern import Certificate, Rule, Status
from taso.rules.text import parse_rules
from taso.rules.verifier import verify

log = logging.getLogger(__name__)

RuleItem = Union[str, "os.PathLike[str]", Rule]
RuleSource = Union[RuleItem, Mapping[str, bool], Sequence[RuleItem]]

ADMISSIBLE = (Status.PROVED, Status.BOUNDED, Status.TESTED)
GATE_SECONDS = 20.0
"""Time allowed for the proof of a rule that a user brings along."""

_SHOWN = 5


@cache
def library() -> tuple[Rule, ...]:
    """The packaged rules, in order of preference; raises `RuleError` where two have one identifier."""
    folder = resources.files("taso.rules.library")
    found: list[Rule] = []
    for name in sorted(entry.name for entry in folder.iterdir() if entry.name.endswith(".pb")):
        with resources.as_file(folder / name) as path:
            found.extend(load(path))
    twice = [name for name, count in Counter(r.id for r in found).items() if count > 1]
    if twice:
        raise RuleError(f"several packaged rules are called '{twice[0]}'")
    return tuple(found)


ALGORITHMS = "winograd-*"
"""What packaged rules are called that compute an operator by another algorithm, made of operators."""


def spelled_algorithms(rules: Iterable[Rule], source: RuleSource | None = None) -> list[Rule]:
    """Those of `rules` that are packaged ones of `ALGORITHMS` and that `source` does not ask for.

    It does by a name or a pattern, unless that means all rules there are, by a Rule, an equation or a file.
    """
    items = [] if source is None else _items(source)
    patterns = [str(item)[1:] for item in items if _is_name(item) and str(item)[0] == "+" and item != "+*"]
    own = [item for item in items if not _is_name(item) and not (isinstance(item, str) and item[:1] == "@")]
    asked = {statement(given.rule) for item in own for given in _added(item)}
    named = [r for r in rules if fnmatchcase(r.id, ALGORITHMS) and statement(r) in _packaged()]
    return [r for r in named if statement(r) not in asked and not any(fnmatchcase(r.id, p) for p in patterns)]


def statement(rule: Rule) -> tuple[object, ...]:
    """What a rule says, apart from its name and what is known of it."""
    return rule.source, rule.target, rule.outputs, rule.conditions, rule.exactness


@cache
def _packaged() -> dict[tuple[object, ...], Rule]:
    return {statement(r): r for r in library()}


# ── reading ──────────────────────────────────────────────────────────────────────────────────────────────────────


def read(path: str | os.PathLike[str]) -> list[Rule]:
    """The rules of a file (protocol buffers, or text where the name ends in .rules), as they stand there."""
    if not os.fspath(path):
        raise RuleError("the name of the rule file is empty")
    if str(path).endswith(".rules"):
        try:
            text = Path(path).read_text(encoding="utf-8")
        except OSError as error:
            raise RuleError(f"the rule file '{path}' cannot be read: {error.strerror or error}") from error
        except UnicodeDecodeError as error:
            raise RuleError(f"the rule file '{path}' is no text: {error.reason} at byte {error.start}") from error
        rules = parse_rules(text, origin=str(path))
        if not rules:
            raise RuleError(f"the rule file '{path}' holds no rule")
        return rules
    return load(path)


def is_equation(text: object) -> bool:
    """Whether a string is the text of a rule, and no file's name."""
    return isinstance(text, str) and "=>" in text


def equations(text: str) -> list[Rule]:
    """The rules that a text says (`taso.rules.text`); its parts may stand in one line: "… => … where … exact: …"."""
    return parse_rules(re.sub(r"[ \t]+(where|exact:)[ \t]+", r"\n\1 ", text))


# ── rules of installed packages ──────────────────────────────────────────────────────────────────────────────────


def installed(pattern: str) -> list[Rule]:
    """The rules that installed packages announce under a name ("taso.rules"; * stands for any letters).

    An entry point is a rule, an equation, the path of a rule file, a list of these, or a function without arguments
    that returns such. One that cannot be used is passed over, with a `PluginWarning` that says why. Raises `RuleError`
    where no package announces the name.
    """
    known = plugins.announced(plugins.RULES)
    meant = [entry for name, entry in known.items() if fnmatchcase(name, pattern)]
    if not meant:
        said = f"there are {', '.join(known)}" if known else "no package announces any"
        raise RuleError(f"no installed package has rules called '{pattern}': {said}")
    rules: list[Rule] = []
    for entry in meant:
        try:
            what = plugins.loaded(entry)
            rules += _of_plugin(what() if callable(what) else what)
        except plugins.PluginError as error:
            plugins.passed_over(str(error))
        except Exception as error:
            # a function of another's may fail in any way
            plugins.passed_over(str(plugins.broken(entry, error)))
    return rules


def _of_plugin(what: object) -> list[Rule]:
    items = list(what) if isinstance(what, (list, tuple)) else [what]
    for item in items:
        if not isinstance(item, (str, os.PathLike, Rule)) or isinstance(item, str) and item[:1] in ("+", "-", "@"):
            raise RuleError(f"an entry point gives rules, equations or rule files, not {item!r}")
    return [given.rule for item in items for given in _added(cast(RuleItem, item))]


# ── what a user asks for ─────────────────────────────────────────────────────────────────────────────────────────


class _Given(NamedTuple):
    rule: Rule
    own: bool
    """Whether it was handed over itself, and not as one of a file's."""


def gather(source: RuleSource, *, small: bool = True) -> list[Rule]:
    """The rules that `source` speaks of, each judged; `taso.optimize` says what `source` can be.

    What a file says of a rule's status is not trusted. Raises `RuleError` for what cannot be read, or names no rule.
    """
    return [judged(given.rule, small) for given in _given(source)]


def admitted(source: RuleSource, statuses: Sequence[Status] = (Status.PROVED,)) -> list[Rule]:
    """Those rules of `source` that a search may take, which are those of the given statuses.

    Of a file's rules the others are passed over, with a warning that says why. Raises `RuleError` for one that was
    handed over itself, naming the counterexample or the reason.
    """
    taken, passed_over = list[Rule](), list[Rule]()
    for rule, own in _given(source):
        found = judged(rule, Status.BOUNDED in statuses)
        if found.status in statuses:
            taken.append(found)
        elif own:
            raise RuleError(f"the rule {found.name} is not used: {refusal(found)}{_advice(found)}")
        else:
            passed_over.append(found)
    for rule in passed_over[:_SHOWN]:
        log.warning("not used: %s: %s", rule.name, refusal(rule))
    if len(passed_over) > _SHOWN:
        log.warning("and %d more rules are not used: see taso rules verify", len(passed_over) - _SHOWN)
    return taken


def refusal(rule: Rule) -> str:
    """Why a rule is no better than its status, as a sentence."""
    why = rule.certificate.counterexample or rule.certificate.reason or "no reason is known"
    return f"it is {rule.status.value} ({why})"


def _advice(rule: Rule) -> str:
    return f"; rule_statuses admits what is {rule.status.value}" if rule.status in ADMISSIBLE else ""


def _given(source: RuleSource) -> list[_Given]:
    """The rules asked for, read from left to right, each statement once."""
    items = _items(source)
    taken: dict[tuple[object, ...], _Given] = {}
    if items and _is_name(items[0]):
        taken.update((statement(r), _Given(r, False)) for r in library())
    for item in items:
        if _is_name(item):
            _switch(taken, str(item))
        else:
            for given in _added(item):
                taken.setdefault(statement(given.rule), given)
    return list(taken.values())


def _items(source: RuleSource) -> list[RuleItem]:
    if isinstance(source, Mapping):
        for name, on in source.items():
            if not isinstance(name, str) or not isinstance(on, bool):
                raise RuleError(f"a mapping of rules says True or False of names, not {on!r} of {name!r}")
        # an empty mapping changes nothing of the library, as one of names does
        return [f"+{name}" if on else f"-{name}" for name, on in source.items()] or ["+*"]
    if isinstance(source, (str, os.PathLike, Rule)):
        return [source]
    if not isinstance(source, Sequence):
        raise RuleError(f"rules are a file, an equation, a Rule, names, or a list of such, not {source!r}")
    for item in source:
        if not isinstance(item, (str, os.PathLike, Rule)):
            raise RuleError(f"rules are a file, an equation, a Rule, names, or a list of such, not {item!r}")
    return list(source)


def _is_name(item: RuleItem) -> bool:
    return isinstance(item, str) and item[:1] in ("+", "-") and not is_equation(item)


def _added(item: RuleItem) -> Iterator[_Given]:
    if isinstance(item, Rule):
        yield _Given(item, True)
    elif isinstance(item, str) and is_equation(item):
        yield from (_Given(r, True) for r in equations(item))
    elif isinstance(item, str) and item[:1] == "@":
        yield from (_Given(r, False) for r in installed(item[1:]))
    else:
        yield from (_Given(r, False) for r in read(item))


def _switch(taken: dict[tuple[object, ...], _Given], item: str) -> None:
    """Adds the packaged rules of a name (+name), or takes away those called so (-name); * stands for anything."""
    pattern = item[1:]
    known = list(library()) if item[0] == "+" else [g.rule for g in taken.values()]
    meant = [r for r in known if r.id and fnmatchcase(r.id, pattern)]
    if not meant:
        near = difflib.get_close_matches(pattern, [r.id for r in known], 1)
        raise RuleError(f"no rule is called '{pattern}'" + (f": is it '{near[0]}'?" if near else ""))
    for rule in meant:
        if item[0] == "+":
            taken.setdefault(statement(rule), _Given(rule, False))
        else:
            del taken[statement(rule)]


# ── the gates ────────────────────────────────────────────────────────────────────────────────────────────────────


def judged(rule: Rule, small: bool = True) -> Rule:
    """The rule with the status that the gates give it now; what the library says too was judged when it was packaged.

    With `small` off, what is not proved is not looked at on all small sizes.
    """
    packaged = _packaged().get(statement(rule))
    if packaged is not None and packaged.status in ADMISSIBLE:
        return rule.judged(packaged.status, packaged.certificate)
    return _judged(rule.judged(Status.UNPROVED, Certificate()), small)


@lru_cache(maxsize=1 << 14)
def _judged(rule: Rule, small: bool) -> Rule:
    """Judged once per process."""
    return verify(rule, seconds=GATE_SECONDS, both=False, small=small)


def refused(rules: Iterable[Rule]) -> list[Rule]:
    """Those that no search may take."""
    return [r for r in rules if r.status not in ADMISSIBLE]
