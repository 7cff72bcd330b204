"""`taso rules generate`: makes rules by enumeration, proves them, and writes them down."""

from __future__ import annotations

import argparse
import os
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from taso.cli_common import print_text, write_whole
from taso.graph.errors import RuleError
from taso.graph.onnx_export import checked_target
from taso.rules import build
from taso.rules.collection import read
from taso.rules.generator import SPACES, Generated, generate
from taso.rules.generator.packaging import packaged, text_of
from taso.rules.generator.spaces import PACKAGED

_FILE = "generated.rules"


def add_parser(parser: argparse.ArgumentParser) -> None:
    """Fills the parser of `taso rules generate`; sets `run`, which takes the settings and gives the exit status."""
    names = ", ".join(SPACES)
    parser.add_argument(
        "spaces", nargs="*", metavar="SPACE",
        help=f"what to enumerate: {names} (default: those that the packaged rules come from)",
    )  # fmt: skip
    target = parser.add_mutually_exclusive_group()
    target.add_argument("-o", "--output", metavar="FILE", help="the text file to write (default: print the rules)")
    target.add_argument("--library", action="store_true", help="make the packaged rules anew")
    parser.add_argument("--size", type=int, metavar="N", help="graphs of up to N operators (default: the space's own)")
    parser.add_argument("--folder", metavar="DIR", help="keep the enumeration there: a run that was stopped goes on")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="processes (default: %(default)s)")
    parser.add_argument("--everything", action="store_true", help="also rules that a search has no use for")
    parser.add_argument("--as-found", action="store_true", help="do not make rules more general than they were found")
    parser.set_defaults(run=run, quiet=False, verbose=False)


def run(settings: argparse.Namespace) -> int:
    """Enumerates graphs, keeps what is equal, proved and new, and writes it as rules."""
    unknown = [name for name in settings.spaces if name not in SPACES]
    if unknown:
        raise RuleError(f"there is no space called '{unknown[0]}': there are {', '.join(SPACES)}")
    if settings.workers < 1 or (settings.size is not None and not 1 <= settings.size <= 8):
        raise RuleError("a size is from 1 to 8, and the number of workers at least 1")
    if settings.library and (settings.spaces or settings.size or settings.everything or settings.as_found):
        raise RuleError("--library makes the packaged rules as they are made, and takes no other settings")
    if settings.output:
        checked_target(settings.output)
    if settings.library and not os.access(build.FOLDER, os.W_OK):
        raise RuleError(f"the packaged rules lie in {build.FOLDER}, which cannot be written to")
    found = _generated(settings)
    others = [r for f in sorted(build.FOLDER.glob("*.rules")) if f.name != _FILE for r in read(f)]
    result = packaged(found, others, settings.everything)
    left_out = ", ".join(f"{count} {reason}" for reason, count in result.left_out.items())
    _say(f"{len(result.rules)} rules; left out: {left_out}")
    text = text_of(result.rules)
    if settings.library:
        return _packaged(text, settings.workers)
    if settings.output:
        _write(Path(settings.output), text)
    else:
        print_text(text.rstrip("\n"))
    return 0


def _packaged(text: str, workers: int) -> int:
    """Builds the packaged files with a new text; the old one comes back where that fails."""
    target = build.FOLDER / _FILE
    before = target.read_text(encoding="utf-8") if target.exists() else None
    _write(target, text)
    status = 1
    try:
        status = build.main(["--workers", str(workers)])
    finally:
        if status and before is not None:
            _write(target, before)
    return status


def _generated(settings: argparse.Namespace) -> list[Generated]:
    spaces = [SPACES[name] for name in settings.spaces] or list(PACKAGED)
    found = []
    with ProcessPoolExecutor(settings.workers) as executor:
        for space in spaces:
            if settings.size is not None:
                space = space.of_size(settings.size)
            folder = Path(settings.folder) / space.name if settings.folder else None
            found.append(generate(space, folder=folder, executor=executor, general=not settings.as_found))
            _report(found[-1])
    return found


def _report(found: Generated) -> None:
    fell = ", ".join(f"{count} {name}" for name, count in found.fell.items())
    _say(
        f"{found.space.name}: {found.counts.graphs} graphs in {found.seconds['enumerated']:.1f} s, "
        f"{len(found.equations)} independent equations, {len(found.rules)} rules after "
        f"{sum(found.seconds.values()):.1f} s\n  fell: {fell}"
    )


def _write(path: Path, text: str) -> None:
    write_whole(str(path), text.encode())


def _say(text: str) -> None:
    print(text, file=sys.stderr)
