"""`taso bench`: a model as it is and optimized, on taso's backend and on the runtimes of others, side by side."""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

from taso import api
from taso.backends.onednn.backend import processor
from taso.backends.select import PRECISIONS, get_backend
from taso.cli_arrays import feeds_of
from taso.cli_common import (
    DONE,
    FAILED,
    Commands,
    add_backend,
    add_command,
    add_data,
    add_input,
    add_json,
    add_limits,
    add_seed,
    add_talk,
    positive,
    print_json,
    print_text,
    progress,
    say,
    table,
    usable_processors,
    whole,
)
from taso.cli_contest import FOREIGN, RUNTIMES, Contestant, Feeds, Result, available, contest, installed
from taso.cli_run import quartiles
from taso.graph.errors import InputError

EXAMPLES = (
    ("taso bench model.onnx", "optimize, and time both models on everything that is installed"),
    ("taso bench model.onnx --optimized model.taso.onnx --rounds 40", "time a file that was optimized earlier"),
    ("taso bench model.onnx --on onednn,onnxruntime --threads 4 --json > times.json", "choose what runs"),
)
ORIGINAL, OPTIMIZED = "original", "optimized"


def add_parser(commands: Commands[argparse.ArgumentParser]) -> None:
    """Adds `taso bench`."""
    parser = add_command(commands, "bench", run, "time a model on several runtimes", EXAMPLES)
    parser.add_argument("model", help="the ONNX file to time")
    parser.add_argument("--optimized", metavar="FILE", help="time this model instead of optimizing")
    parser.add_argument(
        "--on", action="append", type=_runtimes, metavar="NAME,…",
        help=f"what to run on: {', '.join(RUNTIMES)} (default: --backend, and the others that are installed)",
    )  # fmt: skip
    parser.add_argument("--rounds", type=whole(1), default=20, help="blocks for each of them (default: %(default)s)")
    parser.add_argument(
        "--seconds", type=positive, default=0.3, help="length of a block, of three runs at least (default: %(default)s)"
    )
    add_input(parser, "to time at")
    add_data(parser)
    add_seed(parser, "seed of the random inputs")
    add_backend(parser, "where to optimize for")
    add_limits(parser)
    add_json(parser)
    add_talk(parser)


def _runtimes(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in RUNTIMES:
            raise argparse.ArgumentTypeError(f"'{name}' is none of {', '.join(RUNTIMES)}")
    return names


def run(settings: argparse.Namespace) -> int:
    """Times a model and its optimized form in turns, each in a process of its own.

    Times are medians with the quartiles of all runs. "faster" is the time of the original over that of the optimized
    model on the same runtime, with a 95 % interval of the median over the rounds. "error" is the largest
    max|a − b| / max|b| of an output, against the first in the table. The status is 1 where nothing could be timed.
    """
    threads = settings.threads or usable_processors()
    runtimes = _chosen(settings)
    with progress("reading", settings.quiet):
        graph = api.load(settings.model)
    feeds, _ = feeds_of(graph, settings.data, dict(settings.input), settings.seed)
    with tempfile.TemporaryDirectory(prefix="taso_") as folder:
        paths = _models(settings, graph, feeds, threads, Path(folder))
        contestants = [Contestant(runtime, path, label) for runtime in runtimes for label, path in paths.items()]
        with progress("starting", settings.quiet, settings.rounds) as advance:
            results = contest(contestants, feeds, threads, settings.rounds, settings.seconds, advance)
    if not settings.quiet:
        for result in results:
            if result.failure:
                say(f"{result.contestant.runtime} does not run the {result.contestant.label} model: {result.failure}")
    if settings.json:
        print_json(_document(settings, threads, feeds, results))
    elif any(r.times for r in results):
        print_text(f"{settings.model}, {threads} threads\n{_shown(results)}")
    return DONE if any(r.times for r in results) else FAILED


def _chosen(settings: argparse.Namespace) -> list[str]:
    if settings.on:
        named = (name for names in settings.on for name in names)
        return list(dict.fromkeys(_in_precision(name, settings.precision) for name in named))
    here = [name for name in FOREIGN if available(name)]
    for name in FOREIGN:
        if name not in here and any(map(installed, FOREIGN[name])) and not settings.quiet:
            say(f"{name} is left out: it needs {' and '.join(FOREIGN[name])}")
    return list(dict.fromkeys([get_backend(settings.backend, settings.threads, settings.precision).name, *here]))


def _in_precision(name: str, precision: str) -> str:
    """A backend that computes in the precision that is asked for, by the name that says so; others' as they are."""
    return f"{name} {precision}" if precision in PRECISIONS.get(name, ())[1:] else name


def _models(
    settings: argparse.Namespace, graph: api.Graph, feeds: Feeds, threads: int, folder: Path
) -> dict[str, str]:
    """The files to run, by what to call them. A model that is no ONNX file is written as one."""
    original = settings.model
    if os.path.isdir(original) or not original.endswith(".onnx"):
        original = str(folder / "original.onnx")
        api.save(graph, original)
    optimized = settings.optimized
    if optimized is None:
        optimized = str(folder / "optimized.onnx")
        best = api.optimize(
            graph, budget=settings.budget, backend=settings.backend, threads=threads,
            precision=settings.precision, time_limit=settings.time_limit,
            input_shapes={name: array.shape for name, array in feeds.items()}, seed=settings.seed,
            progress=False if settings.quiet else None,
        )  # fmt: skip
        api.save(best, optimized)
        if not settings.quiet:
            say(best.report.decision)
    else:
        _fits(api.load(optimized), graph, optimized)
    return {ORIGINAL: original, OPTIMIZED: optimized}


def _fits(optimized: api.Graph, graph: api.Graph, path: str) -> None:
    for ours, theirs in ((graph.input_names, optimized.input_names), (_outputs(graph), _outputs(optimized))):
        if sorted(ours) != sorted(theirs):
            raise InputError(f"'{path}' has {sorted(theirs)} where the model has {sorted(ours)}: see `taso diff`")


def _outputs(graph: api.Graph) -> list[str]:
    return [name for name, _ in graph.outputs]


# ── results ──────────────────────────────────────────────────────────────────────────────────────────────────────


def _gain(result: Result, results: Sequence[Result]) -> tuple[float, float, float] | None:
    """How much faster the optimized model is than the original on the same runtime, where both ran."""
    if result.contestant.label != OPTIMIZED or result.failure:
        return None
    same = [r for r in results if r.contestant.runtime == result.contestant.runtime and r.contestant.label == ORIGINAL]
    return None if not same or same[0].failure else result.faster_than(same[0])


def _document(
    settings: argparse.Namespace, threads: int, feeds: Feeds, results: Sequence[Result]
) -> dict[str, object]:
    first = next((r for r in results if r.times), None)
    entries = []
    for result in results:
        gain, said = _gain(result, results), quartiles(result.times) or {}
        error = result.error_against(first) if first is not None and result.times else None
        entries.append({
            "runtime": result.contestant.runtime, "model": result.contestant.label, "version": result.version,
            "failure": result.failure or None, **said, "blocks_ms": [t * 1e3 for t in result.blocks],
            "faster": gain and gain[0], "faster_low": gain and gain[1], "faster_high": gain and gain[2],
            "relative_error": error,
        })  # fmt: skip
    shapes = {name: list(array.shape) for name, array in feeds.items()}
    return {
        "model": settings.model, "threads": threads, "rounds": settings.rounds, "seconds": settings.seconds,
        "inputs": shapes, "processor": processor(), "results": entries,
    }  # fmt: skip


def _shown(results: Sequence[Result]) -> str:
    first = next(r for r in results if r.times)
    rows = []
    for result in results:
        time = quartiles(result.times)
        if time is None:
            continue
        gain = _gain(result, results)
        rows.append((
            result.version, result.contestant.label, f"{time['median_ms']:.3f}",
            f"{time['low_quartile_ms']:.3f} to {time['high_quartile_ms']:.3f}", str(time["runs"]),
            "" if gain is None else f"{gain[0]:.3f} ({gain[1]:.3f} to {gain[2]:.3f})",
            "" if result is first else f"{result.error_against(first):.1e}",
        ))  # fmt: skip
    return table(("runtime", "model", "median ms", "quartiles", "runs", "faster", "error"), rows, "<<>>>>>")
