"""`taso optimize`: the fastest equal graph that a search finds, written as an ONNX file."""

from __future__ import annotations

import argparse
import re

import taso
from taso.cli_common import (
    DONE,
    Commands,
    add_backend,
    add_command,
    add_input,
    add_json,
    add_limits,
    add_seed,
    add_talk,
    positive,
    print_json,
    progress,
    say,
    whole,
)
from taso.cli_report import check_report_path, document, write_report
from taso.graph.onnx_export import checked_target
from taso.search.frugal import OBJECTIVES
from taso.search.strategies import SEARCHES

EXAMPLES = (
    ("taso optimize model.onnx -o model.taso.onnx", "optimize for this machine"),
    ("taso optimize model.onnx -o fast.onnx --input image:8x3x224x224 --time-limit 60", "for batches of 8, soon"),
    ("taso optimize model.onnx --dry-run --report report.html", "see what would change, and keep the file as it is"),
    ("taso optimize model.onnx --dry-run --explain 'merge-*' --explain conv_3", "ask why rules did not apply"),
    ("taso optimize model.onnx -o small.onnx --memory-limit 12MB", "the fastest within so much memory between kernels"),
    ("taso optimize model.onnx -o fast.onnx --budget 100000 --checkpoint search.taso", "a search that may be resumed"),
    ("taso optimize model.onnx -o fast.onnx -q --json > report.json", "in a script"),
)


def add_parser(commands: Commands[argparse.ArgumentParser]) -> None:
    """Adds `taso optimize`."""
    parser = add_command(commands, "optimize", run, "optimize an ONNX file", EXAMPLES)
    parser.add_argument("model", help="the ONNX file to optimize")
    parser.add_argument("-o", "--output", metavar="FILE", help="the ONNX file to write")
    parser.add_argument("--dry-run", action="store_true", help="search and report, but write no model")
    parser.add_argument(
        "--report", metavar="FILE",
        help="write a report there: .html with both graphs, .md or .json; .svg is the course of the search alone",
    )  # fmt: skip
    add_input(parser, "to optimize an input for")
    parser.add_argument("--freeze", action="store_true", help="write a model for the shapes of --input alone")
    _add_search(parser)
    add_backend(parser, "where to run and to measure")
    add_seed(parser, "seed of the random inputs of the final check")
    parser.add_argument(
        "--verify", action="store_true", default=True,
        help="compare the outputs of the two graphs, and keep the original unless they agree (the default)",
    )  # fmt: skip
    parser.add_argument("--no-verify", dest="verify", action="store_false", help="do not compare them")
    add_json(parser, "print the report as JSON on stdout")
    add_talk(parser)


def _add_search(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--search", type=_search, default=SEARCHES[0], metavar="NAME",
        help=f"how to search: {', '.join(SEARCHES)} (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--alpha", type=float, default=1.0, help="keep candidates below alpha × the best cost (default: %(default)s)"
    )
    add_limits(parser)
    parser.add_argument(
        "--objective", choices=OBJECTIVES, default=OBJECTIVES[0],
        help="what to have the least of: time, or memory between kernels (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--memory-limit", type=_size, metavar="SIZE",
        help="what the values between kernels may take, in bytes or as 1.5MB: slower where it must be, to keep to that",
    )  # fmt: skip
    parser.add_argument(
        "--search-memory-limit", type=positive, metavar="GB", help="stop the search where it has taken so much memory"
    )
    parser.add_argument(
        "--checkpoint", metavar="FILE", help="keep the state of the search there, and go on from it where it is there"
    )
    parser.add_argument(
        "--workers", type=whole(1), metavar="N", help="processes for the pieces of a large graph (default: this one)"
    )
    parser.add_argument(
        "--explain", action="append", default=[], metavar="NAME",
        help="tell why a rule (by name, pattern or equation) did not apply, or which rules fit at a node; repeatable",
    )  # fmt: skip
    parser.add_argument(
        "--rules", metavar="FILE", help="a rule file, or an equation, to use in place of the packaged rules"
    )


def _bytes(gigabytes: float | None) -> int | None:
    return None if gigabytes is None else int(gigabytes * 1e9)


_UNITS = {"B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
_NAMED = ", ".join(_UNITS)
_SIZE = re.compile(rf"([0-9]+(?:\.[0-9]+)?) ?({'|'.join(_UNITS)})?", re.ASCII)


def _size(text: str) -> int:
    found = _SIZE.fullmatch(text)
    size = float(found[1]) * _UNITS[found[2] or "B"] if found else 0.0
    if not 1 <= size < 1 << 63:
        raise argparse.ArgumentTypeError(f"{text!r} is no size of at least one byte: a number, or one with {_NAMED}")
    return int(size)



def _search(text: str) -> str:
    if text not in SEARCHES:
        raise argparse.ArgumentTypeError(f"this version of taso has no search '{text}', only {', '.join(SEARCHES)}")
    return text


def run(settings: argparse.Namespace) -> int:
    """Searches the graphs equal to an ONNX model for the fastest one and writes it.

    Where nothing faster is found, or equality cannot be shown, the original is written and the report says why. The
    status is 0 then, too; 1 where the model cannot be read, optimized or written.
    """
    if settings.output is None and not settings.dry_run:
        settings.refuse("say where to write the model (-o FILE), or --dry-run to write none")
    # before the work: a search may take long
    if settings.report is not None:
        check_report_path(settings.report)
    output = None if settings.dry_run else settings.output
    if output is not None:
        checked_target(output)
    with progress("reading", settings.quiet):
        graph = taso.load(settings.model)
    best = taso.optimize(
        graph, search=settings.search, objective=settings.objective, memory_limit=settings.memory_limit,
        alpha=settings.alpha, budget=settings.budget, backend=settings.backend, threads=settings.threads,
        precision=settings.precision, time_limit=settings.time_limit, rules=settings.rules, seed=settings.seed,
        verify=settings.verify, input_shapes=dict(settings.input), freeze=settings.freeze,
        progress=False if settings.quiet else None, explain=settings.explain, checkpoint=settings.checkpoint,
        search_memory_limit=_bytes(settings.search_memory_limit), workers=settings.workers,
    )  # fmt: skip
    if output is not None:
        with progress("writing", settings.quiet):
            taso.save(best, output)
    if settings.report is not None:
        write_report(settings.report, best.report, settings.model, output)
    if not settings.quiet:
        say(best.report.summary())
    if settings.json:
        print_json(document(best.report, settings.model, output))
    return DONE
