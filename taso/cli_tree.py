"""The commands as data, read off their parsers: what shell completion and the manual are made of."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from taso.backends.select import NAMES
from taso.cli_contest import RUNTIMES
from taso.search.strategies import SEARCHES

_KNOWN = {"--backend": NAMES, "--search": SEARCHES, "--on": RUNTIMES}
"""Values of options that take others, too, or say more than argparse would of what they do not take."""
_FILES = ("FILE", "DIR", "model", "first", "second")


@dataclass(frozen=True)
class Option:
    """An option (`flags`) or an argument (without). `value` is what it takes ("" for none), `choices` what that may be.

    `is_file` says that the value is the name of a file or folder.
    """

    flags: tuple[str, ...]
    value: str
    help: str
    choices: tuple[str, ...]
    is_file: bool


@dataclass(frozen=True)
class Command:
    """A command by the words that call it, without `taso`; `parts` are the commands below it."""

    words: tuple[str, ...]
    help: str
    description: str
    examples: str
    options: tuple[Option, ...]
    parts: tuple[Command, ...]

    def walk(self) -> Iterator[Command]:
        """This command and all below it, each before its parts."""
        yield self
        for part in self.parts:
            yield from part.walk()


def tree(parser: argparse.ArgumentParser, words: tuple[str, ...] = (), help: str = "") -> Command:
    """What a parser says of its options, and of the commands below it."""
    options, parts = [], []
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            helps = {choice.dest: choice.help or "" for choice in action._choices_actions}
            parts = [tree(p, (*words, name), helps.get(name, "")) for name, p in action.choices.items()]
        elif action.help is not argparse.SUPPRESS:
            options.append(_option(parser, action))
    return Command(words, help, parser.description or "", parser.epilog or "", tuple(options), tuple(parts))


def _option(parser: argparse.ArgumentParser, action: argparse.Action) -> Option:
    takes_none = bool(action.option_strings) and action.nargs == 0
    named = _name(action.metavar) or (action.dest.upper() if action.option_strings else action.dest)
    choices = tuple(map(str, action.choices or ()))
    value = "" if takes_none else "|".join(choices) if choices else named
    for flag in action.option_strings:
        choices = choices or _KNOWN.get(flag, ())
    # help is a template: %(default)s and the like
    told = (action.help or "") % {**vars(action), "prog": parser.prog}
    is_file = not takes_none and named.startswith(_FILES)
    return Option(tuple(action.option_strings), value, told, choices, is_file)


def _name(metavar: str | Sequence[str] | None) -> str:
    return metavar if isinstance(metavar, str) else " ".join(metavar or ())
