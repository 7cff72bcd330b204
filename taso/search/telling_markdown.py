"""A report as Markdown."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import PurePath
from typing import TYPE_CHECKING

from taso.search.telling import Files, Table, sections

if TYPE_CHECKING:
    from taso.search.result import Report


def markdown(report: Report, files: Files) -> str:
    """The report as Markdown, which ends with a line break."""
    lines = [f"# {escaped(PurePath(files.model).name)}, optimized\n", f"{escaped(report.decision)}.\n"]
    for section in sections(report, files):
        lines.append(f"## {section.title}\n")
        if section.table is not None and section.table.rows:
            lines += [*_rows(section.table), ""]
        if section.sentences:
            lines += [*(f"- {escaped(sentence)}" for sentence in section.sentences), ""]
    return "\n".join(lines).rstrip("\n") + "\n"


def _rows(table: Table) -> Iterator[str]:
    yield f"| {' | '.join(table.headers)} |"
    yield f"| {' | '.join('---' if side == '<' else '---:' for side in table.align)} |"
    for row in table.rows:
        cells = (_code(cell) if i in table.code else escaped(cell) for i, cell in enumerate(row))
        yield f"| {' | '.join(cells)} |"


def _code(text: str) -> str:
    """Text as code in a cell: fenced by more backticks than it holds in a row."""
    longest = run = 0
    for c in text:
        run = run + 1 if c == "`" else 0
        longest = max(longest, run)
    fence, pad = "`" * (longest + 1), " " if longest else ""
    said = text.replace("|", "\\|").replace("\n", " ")
    return f"{fence}{pad}{said}{pad}{fence}" if text else ""


def escaped(text: str) -> str:
    """Text in which Markdown finds no marks of its own."""
    return "".join("\\" + c if c in "\\`*_[]<>|#" else c for c in text).replace("\n", " ")


__all__ = ["escaped", "markdown"]
