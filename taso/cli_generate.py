"""`taso rules generate`: makes rules by enumeration, proves them, and writes them down."""

from __future__ import annotations

import argparse
import os
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from taso.cli_common import (
    DONE,
    FAILED,
    Commands,
    add_command,
    add_workers,
    print_text,
    say,
    usable_processors,
    whole,
    write_whole,
)
from taso.graph.errors import RuleError
from taso.graph.onnx_export import checked_target
from taso.rules import build
from taso.rules.collection import read
from taso.rules.generator import SPACES, Generated, generate
from taso.rules.generator.packaging import packaged, text_of
from taso.rules.generator.spaces import PACKAGED

EXAMPLES = (("taso rules generate -o found.rules", "enumerate, prove, and write what is new"),)
_FILE = "generated.rules"


def add_parser(actions: Commands[argparse.ArgumentParser]) -> None:
    """Adds `taso rules generate`."""
    parser = add_command(actions, "generate", run, "find rules by enumeration", EXAMPLES)
    names = ", ".join(SPACES)
    parser.add_argument(
        "spaces", nargs="*", metavar="SPACE",
        help=f"what to enumerate: {names} (default: those that the packaged rules come from)",
    )  # fmt: skip
    target = parser.add_mutually_exclusive_group()
    target.add_argument("-o", "--output", metavar="FILE", help="the text file to write (default: print the rules)")
    target.add_argument("--library", action="store_true", help="make the packaged rules anew")
    parser.add_argument(
        "--size", type=whole(1, 8), metavar="N", help="graphs of up to N operators (default: the space's own)"
    )
    parser.add_argument("--folder", metavar="DIR", help="keep the enumeration there: a run that was stopped goes on")
    add_workers(parser)
    parser.add_argument("--everything", action="store_true", help="also rules that a search has no use for")
    parser.add_argument("--as-found", action="store_true", help="do not make rules more general than they were found")


def run(settings: argparse.Namespace) -> int:
    """Enumerates graphs, keeps what is equal, proved and new, and writes it as rules.

    The status is 0, or 1 where the rules cannot be made or written.
    """
    unknown = [name for name in settings.spaces if name not in SPACES]
    if unknown:
        raise RuleError(f"there is no space called '{unknown[0]}': there are {', '.join(SPACES)}")
    if settings.library and (settings.spaces or settings.size or settings.everything or settings.as_found):
        raise RuleError("--library makes the packaged rules as they are made, and takes no other settings")
    if settings.output:
        checked_target(settings.output)
    if settings.library and not os.access(build.FOLDER, os.W_OK):
        raise RuleError(f"the packaged rules lie in {build.FOLDER}, which cannot be written to")
    workers = settings.workers or usable_processors()
    found = _generated(settings, workers)
    others = [r for f in sorted(build.FOLDER.glob("*.rules")) if f.name != _FILE for r in read(f)]
    result = packaged(found, others, settings.everything)
    left_out = ", ".join(f"{count} {reason}" for reason, count in result.left_out.items())
    say(f"{len(result.rules)} rules; left out: {left_out}")
    text = text_of(result.rules)
    if settings.library:
        return _packaged(text, workers)
    if settings.output:
        _write(Path(settings.output), text)
    else:
        print_text(text)
    return DONE


def _packaged(text: str, workers: int) -> int:
    """Builds the packaged files with a new text; the old one comes back where that fails."""
    target = build.FOLDER / _FILE
    before = target.read_text(encoding="utf-8") if target.exists() else None
    _write(target, text)
    status = FAILED
    try:
        status = build.main(["--workers", str(workers)])
    finally:
        if status and before is not None:
            _write(target, before)
    return status


def _generated(settings: argparse.Namespace, workers: int) -> list[Generated]:
    spaces = [SPACES[name] for name in settings.spaces] or list(PACKAGED)
    found = []
    with ProcessPoolExecutor(workers) as executor:
        for space in spaces:
            if settings.size is not None:
                space = space.of_size(settings.size)
            folder = Path(settings.folder) / space.name if settings.folder else None
            found.append(generate(space, folder=folder, executor=executor, general=not settings.as_found))
            _report(found[-1])
    return found


def _report(found: Generated) -> None:
    fell = ", ".join(f"{count} {name}" for name, count in found.fell.items())
    say(
        f"{found.space.name}: {found.counts.graphs} graphs in {found.seconds['enumerated']:.1f} s, "
        f"{len(found.equations)} independent equations, {len(found.rules)} rules after "
        f"{sum(found.seconds.values()):.1f} s\n  fell: {fell}"
    )


def _write(path: Path, text: str) -> None:
    write_whole(str(path), text.encode())
