"""`taso diff`: what differs between two models, and whether they compute the same."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import asdict

from taso import api
from taso.backends.lowering import FLOAT32
from taso.backends.select import get_backend
from taso.cli_common import (
    DONE,
    FAILED,
    TROUBLE,
    Commands,
    add_backend,
    add_command,
    add_input,
    add_json,
    add_seed,
    add_talk,
    pairs,
    positive,
    print_json,
    print_text,
    progress,
    table,
)
from taso.cli_difference import Difference, difference, numeric
from taso.graph.errors import InputError
from taso.search.optimize import measuring_sizes
from taso.search.verify import Check, tolerance_of

EXAMPLES = (
    ("taso diff model.onnx model.taso.onnx", "what the optimizer changed, and the largest error of any output"),
    ("taso diff a.onnx b.onnx --tolerance 1e-6 --backend onednn", "as a runtime computes them"),
    ("taso diff a.onnx b.onnx -q > /dev/null && mv b.onnx a.onnx", "in a script: go on only if they compute the same"),
)
_MOST = 20
"""Lines that a list may have in text; JSON has them all."""


def add_parser(commands: Commands[argparse.ArgumentParser]) -> None:
    """Adds `taso diff`."""
    parser = add_command(commands, "diff", run, "compare two models", EXAMPLES)
    # status 1 says that they differ, so that what went wrong needs another
    parser.set_defaults(trouble=TROUBLE)
    parser.add_argument("first", help="the ONNX file to compare with")
    parser.add_argument("second", help="the ONNX file to compare")
    add_input(parser, "to compare outputs at")
    add_seed(parser, "seed of the random inputs")
    parser.add_argument(
        "--tolerance", type=positive,
        help="largest max|a − b| / max|b| of an output (default: by the narrowest float type in the first model)",
    )  # fmt: skip
    add_backend(parser, "compute outputs there, instead of in float64 by the operators' definitions", None)
    parser.add_argument("--no-run", action="store_true", help="do not compare outputs")
    add_json(parser)
    add_talk(parser)


def run(settings: argparse.Namespace) -> int:
    """Tells what differs between two models, and compares their outputs on the same random inputs.

    The status is 0 where inputs and outputs look the same and the outputs agree within the tolerance (operators and
    weights may differ), 1 where they do not, and 3 where that could not be found out. Where inputs or outputs look
    different it is 1, whether or not the models can be run on the same values.
    """
    with progress("reading", settings.quiet) as advance:
        first, second = api.load(settings.first), api.load(settings.second)
        found = difference(first, second)
        advance(0, "comparing outputs")
        check, why = _checked(settings, first, second)
    tolerance = _tolerance(settings, first)
    status = _status(settings, found, check)
    if settings.json:
        print_json({
            "first": settings.first, "second": settings.second, "same": status == DONE, **asdict(found),
            "tolerance": tolerance, "relative_error": check and check.error, "compared": check and check.passed,
            "reason": check.reason if check else why,
        })  # fmt: skip
    else:
        print_text("\n\n".join(_parts(settings, found, _said(check, why, tolerance))))
    return status


def _tolerance(settings: argparse.Namespace, first: api.Graph) -> float:
    precision = settings.precision if settings.backend else FLOAT32
    return float(settings.tolerance or tolerance_of(first, precision))


def _checked(settings: argparse.Namespace, first: api.Graph, second: api.Graph) -> tuple[Check | None, str]:
    """The comparison of outputs, or None and why there is none."""
    if settings.no_run:
        return None, "not asked for"
    sizes = measuring_sizes(first, dict(settings.input))
    backend = get_backend(settings.backend, settings.threads, settings.precision) if settings.backend else None
    try:
        return numeric(first, second, sizes, settings.seed, _tolerance(settings, first), backend), ""
    except InputError as error:
        return None, str(error)


def _status(settings: argparse.Namespace, found: Difference, check: Check | None) -> int:
    if found.interface or (check is not None and not check.passed and not check.inconclusive):
        return FAILED
    if check is None:
        return DONE if settings.no_run else TROUBLE
    # trials that ran and agreed say little where an output is constant, but they say nothing against it
    return DONE if check.passed or check.trials else TROUBLE


def _said(check: Check | None, why: str, tolerance: float) -> str:
    if check is None:
        return f"not compared: {why}"
    if check.passed:
        return f"agree: largest relative error {check.error:.1e}, where {tolerance:.0e} is allowed"
    if check.inconclusive:
        return f"nothing shows that they differ, but nothing is shown either: {check.reason}"
    return f"differ: {check.reason}"


def _parts(settings: argparse.Namespace, found: Difference, outputs: str) -> Iterator[str]:
    said = {"first": settings.first, "second": settings.second, "outputs": outputs}
    if not found.any:
        said["files"] = "the same operators and weights"
    yield pairs("models", said)
    if found.interface or found.header:
        yield _listed("interface", [*found.interface, *found.header])
    if found.operators:
        rows = [(name, str(a), str(b), f"{b - a:+d}") for name, (a, b) in found.operators.items()]
        yield table(("operator", "before", "after", "change"), rows, "<>>>")
    if found.nodes:
        yield _listed("nodes", found.nodes)
    signs = (("+", found.weights_added), ("−", found.weights_removed), ("≠", found.weights_changed))
    weights = [f"{sign} {name}" for sign, names in signs for name in names]
    if weights:
        yield _listed("weights (+ new, − gone, ≠ changed)", weights)


def _listed(title: str, lines: list[str]) -> str:
    shown = [f"  {line}" for line in lines[:_MOST]]
    more = len(lines) - _MOST
    return "\n".join([title, *shown, *([f"  … and {more} more (--json has them all)"] if more > 0 else [])])
