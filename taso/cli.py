"""The command line, `taso COMMAND …`: each command has a module `taso.cli_COMMAND`, which adds its parser and runs it.

Results go to stdout, everything else to stderr. A command ends with one of the statuses of `taso.cli_common`.
"""

from __future__ import annotations

import argparse
import logging
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import taso
from taso import (
    cli_bench,
    cli_cache,
    cli_completion,
    cli_diff,
    cli_doctor,
    cli_optimize,
    cli_rules,
    cli_run,
    cli_show,
)
from taso.cli_common import DONE, FAILED, INTERRUPTED, TROUBLE, USAGE, describe, say

EXAMPLES = (
    ("taso optimize model.onnx -o model.taso.onnx", "make a model faster"),
    ("taso bench model.onnx", "see how much, on everything that is installed"),
    ("taso COMMAND --help", "what a command takes, with examples"),
)
STATUSES = (
    f"exit status: {DONE} done; {FAILED} it cannot be done, or the answer is no; {USAGE} wrong usage; "
    f"{TROUBLE} there is no answer (diff, rules verify); {INTERRUPTED} interrupted"
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; returns its exit status. Wrong usage raises `SystemExit` with status 2, as argparse does.

    Where something cannot be done there is one sentence on stderr, and the status is 1, or 3 for a command whose 1
    is an answer (`taso diff`, `taso rules verify`).
    """
    settings = parser().parse_args(arguments)
    trouble: int = getattr(settings, "trouble", FAILED)
    with _talking(settings):
        try:
            status: int = settings.run(settings)
            return status
        except taso.TasoError as error:
            say(f"taso: {error}")
            return trouble
        except MemoryError as error:
            say(f"taso: there is not enough memory: {error}")
            return trouble
        except KeyboardInterrupt:
            say("taso: interrupted; nothing was written")
            return INTERRUPTED


def parser() -> argparse.ArgumentParser:
    """The parser of `taso` with all commands; each sets `run`, which takes the settings and gives the status."""
    root = argparse.ArgumentParser(prog="taso")
    describe(root, "Makes deep-learning models run faster without changing what they compute.", EXAMPLES)
    root.epilog = f"{root.epilog}\n\n{STATUSES}"
    root.add_argument("--version", action="version", version=f"taso {taso.__version__}")
    commands = root.add_subparsers(required=True, metavar="COMMAND")
    for module in (cli_optimize, cli_run, cli_bench, cli_show, cli_diff, cli_rules, cli_cache, cli_doctor):
        module.add_parser(commands)
    cli_completion.add_parser(commands, root)
    return root


@contextmanager
def _talking(settings: argparse.Namespace) -> Iterator[None]:
    """Log and warnings as lines on stderr while a command runs."""
    quiet, verbose = getattr(settings, "quiet", False), getattr(settings, "verbose", False)
    log, handler = logging.getLogger("taso"), logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(levelname)s: %(message)s"))
    before = log.level, log.propagate
    log.setLevel(logging.ERROR if quiet else logging.INFO if verbose else logging.WARNING)
    log.propagate = False
    log.addHandler(handler)

    def warn(message: Warning | str, category: type[Warning], *where: object, **more: object) -> None:
        log.warning("%s", message)

    try:
        with warnings.catch_warnings():
            warnings.showwarning = warn
            yield
    finally:
        log.removeHandler(handler)
        log.level, log.propagate = before[0], before[1]


if __name__ == "__main__":
    sys.exit(main())
