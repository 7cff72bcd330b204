"""`taso run`: a model's outputs on random inputs, or on inputs from files, and how long it takes."""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping

import numpy as np

from taso import api
from taso.backends.base import Array, Executable
from taso.backends.select import get_backend
from taso.cli_arrays import Feeds, feeds_of, npz
from taso.cli_common import (
    DONE,
    Commands,
    add_backend,
    add_command,
    add_data,
    add_input,
    add_json,
    add_seed,
    add_talk,
    bytes_text,
    print_json,
    print_text,
    progress,
    say,
    table,
    whole,
    write_whole,
)
from taso.graph.graph import Graph
from taso.graph.onnx_export import checked_target
from taso.graph.types import DType

EXAMPLES = (
    ("taso run model.onnx", "run on random inputs, and print a summary of each output"),
    ("taso run model.onnx --data image.npy --output out.npz", "run on a file, and keep the outputs"),
    ("taso run model.onnx --input image:8x3x224x224 --repeat 100", "time a hundred runs at batch size 8"),
)


def add_parser(commands: Commands[argparse.ArgumentParser]) -> None:
    """Adds `taso run`."""
    parser = add_command(commands, "run", run, "run a model", EXAMPLES)
    parser.add_argument("model", help="the ONNX file to run")
    add_data(parser)
    add_input(parser, "of an input whose values are random")
    add_seed(parser, "seed of the random inputs")
    add_backend(parser)
    parser.add_argument("-o", "--output", metavar="FILE.npz", help="write the outputs there, by name")
    parser.add_argument("--repeat", type=whole(1), metavar="N", help="time N more runs, after a first one")
    add_json(parser)
    add_talk(parser)


def run(settings: argparse.Namespace) -> int:
    """Runs a model once, and prints type, range and mean of each output.

    The status is 0, or 1 where the model cannot be run.
    """
    if settings.output:
        checked_target(settings.output)
    with progress("reading", settings.quiet) as advance:
        graph = api.load(settings.model)
        feeds, drawn = feeds_of(graph, settings.data, dict(settings.input), settings.seed)
        backend = get_backend(settings.backend, settings.threads, settings.precision)
        if drawn and not settings.quiet:
            # before anything is run: what fails may fail because of these
            shapes = ", ".join(f"{name} {list(feeds[name].shape)}" for name in drawn)
            say(f"random inputs (seed {settings.seed}): {shapes}")
        advance(0, "compiling")
        program = backend.compile(graph, settings.threads)
        advance(0, "running")
        outputs = program(feeds)
        advance(0, f"running {settings.repeat or 0} times")
        times = timed(program, feeds, settings.repeat or 0)
    if settings.output:
        write_whole(settings.output, npz(outputs))
    if not settings.quiet:
        say(f"ran on {backend.name}" + (f"; outputs are in {settings.output}" if settings.output else ""))
    if settings.json:
        print_json({
            "model": settings.model, "backend": backend.name, "random_inputs": drawn, "seed": settings.seed,
            "kernels": program.kernels, "peak_bytes": program.peak_bytes,
            "inputs": [{"name": n, **described(a)} for n, a in feeds.items()],
            "outputs": [{"name": n, **described(a)} for n, a in outputs.items()], "time": quartiles(times),
        })  # fmt: skip
    else:
        print_text(_shown(graph, outputs, quartiles(times), program))
    return DONE


def timed(program: Executable, feeds: Feeds, count: int) -> list[float]:
    """Seconds that each of `count` runs took."""
    times = []
    for _ in range(count):
        started = time.perf_counter()
        program(feeds)
        times.append(time.perf_counter() - started)
    return times


def quartiles(times: list[float]) -> dict[str, float] | None:
    """Median, quartiles and number of `times` (seconds) in milliseconds; None where nothing was timed."""
    if not times:
        return None
    low, middle, high = (float(q) * 1e3 for q in np.quantile(times, [0.25, 0.5, 0.75]))
    return {"median_ms": middle, "low_quartile_ms": low, "high_quartile_ms": high, "runs": len(times)}


def described(array: Array) -> dict[str, object]:
    """Type, shape, and of numbers the range, the mean and how many are not finite; what is no array says so."""
    if not isinstance(array, np.ndarray):
        return {"dtype": "non-tensor", "length": len(array) if isinstance(array, list) else None}
    held = "string" if array.dtype == object else DType.from_numpy(array.dtype).name.lower()
    said: dict[str, object] = {"dtype": held, "shape": list(array.shape)}
    if array.dtype.kind in "OUSc" or not array.size:
        return said
    values = np.asarray(array, np.float64)
    finite = values[np.isfinite(values)]
    said["not_finite"] = int(values.size - finite.size)
    if finite.size:
        said |= {"min": float(finite.min()), "max": float(finite.max()), "mean": float(finite.mean())}
    return said


def _shown(graph: Graph, outputs: Mapping[str, Array], times: dict[str, float] | None, program: Executable) -> str:
    rows = []
    for name, _ in graph.outputs:
        said = described(outputs[name])
        shape = "×".join(map(str, outputs[name].shape)) if "shape" in said else ""
        numbers = [f"{value:.6g}" if isinstance(value := said.get(k), float) else "" for k in ("min", "mean", "max")]
        rows.append((name, str(said["dtype"]), shape, *numbers, str(said.get("not_finite", ""))))
    text = table(("output", "type", "shape", "min", "mean", "max", "not finite"), rows, "<<<>>>>")
    if times:
        text += (
            f"\n\none run: {times['median_ms']:.3f} ms (quartiles {times['low_quartile_ms']:.3f} to "
            f"{times['high_quartile_ms']:.3f}, {times['runs']} runs); {program.kernels} kernels"
        )
        text += f", {bytes_text(program.peak_bytes)} of intermediate values" if program.peak_bytes else ""
    return text
