"""The command line: `taso optimize in.onnx -o out.onnx`."""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
from collections.abc import Sequence

import taso
from taso.graph.onnx_export import checked_target

FAILED, INTERRUPTED = 1, 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; returns 0, 1 where something cannot be done (one sentence on stderr), 2 for wrong usage.

    Results for machines go to stdout, everything else to stderr.
    """
    settings = _parser().parse_args(arguments)
    logging.basicConfig(stream=sys.stderr, level=_log_level(settings), format="%(levelname)s: %(message)s")
    try:
        return _optimize(settings)
    except taso.TasoError as error:
        print(f"taso: {error}", file=sys.stderr)
        return FAILED
    except MemoryError as error:
        print(f"taso: there is not enough memory: {error}", file=sys.stderr)
        return FAILED
    except KeyboardInterrupt:
        print("taso: interrupted; nothing was written", file=sys.stderr)
        return INTERRUPTED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="taso", description="Makes deep-learning models run faster.")
    parser.add_argument("--version", action="version", version=f"taso {taso.__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    optimize = commands.add_parser("optimize", help="optimize an ONNX file", description=_optimize.__doc__)
    _add_files(optimize)
    _add_search(optimize)
    _add_talk(optimize)
    return parser


def _add_files(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", help="the ONNX file to optimize")
    parser.add_argument("-o", "--output", required=True, help="the ONNX file to write")
    parser.add_argument(
        "--input", action="append", default=[], type=_input_shape, metavar="NAME:1x3x224x224",
        help="the shape to optimize an input for, where the file leaves it open (may be repeated)",
    )  # fmt: skip
    parser.add_argument("--freeze", action="store_true", help="write a model for the shapes of --input alone")


def _add_search(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--alpha", type=float, default=1.0, help="keep candidates below alpha × the best cost")
    parser.add_argument("--budget", type=int, default=1000, help="graphs taken off the queue (default: %(default)s)")
    parser.add_argument("--backend", default="auto", help="where to run and to measure (default: %(default)s)")
    parser.add_argument("--threads", type=int, help="threads of the backend (default: its own choice)")
    parser.add_argument("--time-limit", type=float, metavar="SECONDS", help="stop the search after so long")
    parser.add_argument("--rules", help="a rule file to use in place of the packaged one")
    parser.add_argument("--seed", type=int, default=0, help="seed of the random inputs of the final check")
    parser.add_argument("--no-verify", action="store_true", help="do not compare the outputs of the two graphs")


def _add_talk(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print the report as JSON on stdout")
    talk = parser.add_mutually_exclusive_group()
    talk.add_argument("-q", "--quiet", action="store_true", help="print errors only")
    talk.add_argument("-v", "--verbose", action="store_true", help="tell what is being done")


def _log_level(settings: argparse.Namespace) -> int:
    return logging.ERROR if settings.quiet else logging.INFO if settings.verbose else logging.WARNING


def _input_shape(text: str) -> tuple[str, tuple[int, ...]]:
    """`name:1x3x224x224`; the name may hold colons."""
    name, colon, sizes = text.rpartition(":")
    parts = sizes.split("x")
    if not name or not colon or not all(part.isascii() and part.isdigit() for part in parts):
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form name:1x3x224x224")
    return name, tuple(map(int, parts))


def _optimize(settings: argparse.Namespace) -> int:
    """Searches the graphs equal to an ONNX model for the fastest one and writes it."""
    # before the work: a search may take long
    checked_target(settings.output)
    best = taso.optimize(
        taso.load(settings.model), alpha=settings.alpha, budget=settings.budget, backend=settings.backend,
        threads=settings.threads, time_limit=settings.time_limit, rules=settings.rules, seed=settings.seed,
        verify=not settings.no_verify, input_shapes=dict(settings.input), freeze=settings.freeze,
    )  # fmt: skip
    taso.save(best, settings.output)
    if not settings.quiet:
        print(best.report.summary(), file=sys.stderr)
    if settings.json:
        _print_json(best.report.to_dict())
    return 0


def _print_json(data: dict[str, object]) -> None:
    """Prints to stdout; whoever closed it early (`| head`) has seen enough."""
    try:
        print(json.dumps(data, indent=2), flush=True)
    except BrokenPipeError:
        # what is left in the buffer must not raise again at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except OSError as error:
        raise taso.TasoError(f"the model was written, but not the report: {error.strerror}") from error


if __name__ == "__main__":
    sys.exit(main())
