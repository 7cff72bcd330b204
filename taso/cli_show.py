"""`taso show`: what is in a model."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import asdict

from taso import api
from taso.cli_common import (
    DONE,
    Commands,
    add_command,
    add_input,
    add_json,
    add_talk,
    bytes_text,
    count_text,
    pairs,
    print_json,
    print_text,
    progress,
    table,
)
from taso.cli_summary import Kind, Summary, summary
from taso.search.optimize import measuring_sizes

EXAMPLES = (
    ("taso show model.onnx", "operators, parameters, arithmetic, memory"),
    ("taso show model.onnx --input image:8x3x224x224", "the same for batches of 8"),
    ("taso show model.onnx --json | jq .parameters", "in a script"),
)
_SAID = {
    "modelled": "",
    "opaque": "passes through unchanged; runs by its ONNX definition",
    "unknown": "passes through unchanged; cannot be run here",
}


def add_parser(commands: Commands[argparse.ArgumentParser]) -> None:
    """Adds `taso show`."""
    parser = add_command(commands, "show", run, "tell what is in a model", EXAMPLES)
    parser.add_argument("model", help="the ONNX file to look at")
    add_input(parser, "to count arithmetic and memory for")
    add_json(parser)
    add_talk(parser)


def run(settings: argparse.Namespace) -> int:
    """Tells what is in a model as taso reads it, and which operators it optimizes, or passes through unchanged.

    Nodes that compute the same count once, constants are weights, and what no output depends on is left out. A
    multiplication and an addition are two operations. The status is 0, or 1 where the model cannot be read.
    """
    with progress("reading", settings.quiet):
        graph = api.load(settings.model)
        found = summary(graph, measuring_sizes(graph, dict(settings.input)))
    if settings.json:
        print_json({"model": settings.model, **asdict(found)})
    else:
        print_text("\n\n".join(_parts(settings.model, found)))
    return DONE


def _parts(model: str, found: Summary) -> Iterator[str]:
    opsets = ", ".join(f"{domain or 'ai.onnx'} {version}" for domain, version in found.opsets.items())
    said = {"opset": opsets, "IR version": str(found.ir_version), "made by": found.producer or "nobody says"}
    yield pairs(model, said)
    yield pairs("inputs", dict(found.inputs) or {"": "none"})
    yield pairs("outputs", dict(found.outputs))
    yield pairs("size", _numbers(found))
    yield table(("operator", "nodes", "operations", "in taso"), map(_row, found.operators), "<>><")
    if found.bodies:
        yield pairs("bodies, optimized on their own", {str(i + 1): body for i, body in enumerate(found.bodies)})


def _numbers(found: Summary) -> dict[str, str]:
    said = {
        "nodes": str(sum(kind.count for kind in found.operators)),
        "parameters": f"{count_text(found.parameters)} in {found.weights} weights, {bytes_text(found.weight_bytes)}",
        "operations": count_text(found.flops) + (f"; {found.uncounted} nodes not counted" if found.uncounted else ""),
        "intermediate values": "not known" if found.peak_bytes is None else f"{bytes_text(found.peak_bytes)} at most",
    }
    if found.sizes:
        said["counted with"] = ", ".join(f"{name} = {size}" for name, size in found.sizes.items())
    return said


def _row(kind: Kind) -> tuple[str, str, str, str]:
    said = _SAID[kind.state] + (f" ({kind.why})" if kind.why else "")
    return kind.operator, str(kind.count), count_text(kind.flops) if kind.flops else "", said or "modelled"
