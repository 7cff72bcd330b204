"""The manual of the command line as Markdown, made from what `--help` says.

    python -m taso.cli_page > docs/command-line.md
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

from taso.cli import STATUSES, parser
from taso.cli_tree import Command, Option, tree

_START = f"""\
# Command line

`pip install` puts the command `taso` in place; `python -m taso.cli` is the same. Results go to stdout (tables, or JSON
with `--json`), everything else to stderr: progress bars where it is a terminal, remarks unless `-q` is given, the log
with `-v`. Colour is used on a terminal only; `NO_COLOR` turns it off.

{STATUSES[0].upper()}{STATUSES[1:]}. What goes wrong is one sentence on stderr.

This page is made from what `taso COMMAND --help` says, by `python -m taso.cli_page`."""


def page() -> str:
    """The manual: one section for each command, with its options and examples."""
    root = tree(parser())
    sections = [_section(command) for command in root.walk() if command.words and not command.parts]
    return "\n\n".join([_START, "\n".join(_contents(root)), *sections]) + "\n"


def _contents(root: Command) -> Iterator[str]:
    yield "| command | what it does |\n| --- | --- |"
    for command in root.walk():
        if command.words and not command.parts:
            name = " ".join(("taso", *command.words))
            yield f"| [`{name}`](#{name.replace(' ', '-')}) | {command.help} |"


def _section(command: Command) -> str:
    arguments = [o for o in command.options if not o.flags]
    options = [o for o in command.options if o.flags and "--help" not in o.flags]
    called = " ".join(["taso", *command.words, *(["[options]"] if options else []), *(o.value for o in arguments)])
    parts = [f"## taso {' '.join(command.words)}", f"```text\n{called}\n```", command.description]
    if arguments or options:
        parts.append("\n".join(["| option | meaning |", "| --- | --- |", *map(_row, (*arguments, *options))]))
    examples = command.examples.removeprefix("examples:\n")
    if examples:
        parts.append("```sh\n" + "\n".join(_commented(examples.splitlines())) + "\n```")
    return "\n\n".join(parts)


def _row(option: Option) -> str:
    value = f" {option.value}" if option.value else ""
    named = ", ".join(f"`{flag}{value}`" for flag in option.flags) or f"`{option.value}`"
    return f"| {_cell(named)} | {_cell(option.help)} |"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def _commented(lines: list[str]) -> Iterator[str]:
    """Examples, each below what it does."""
    for command, said in zip(lines[::2], lines[1::2], strict=True):
        yield f"# {said.strip()}"
        yield command.strip()


if __name__ == "__main__":
    sys.stdout.write(page())
