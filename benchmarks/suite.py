"""The benchmark suite: twelve models on taso and on what people use today; one command, a table and a plot.

    python benchmarks/suite.py --json suite.json --plot suite.svg
    python benchmarks/suite.py resnet50 bert_base --threads 1 2 --batch 1 8 --on taso,onnxruntime,openvino
    python benchmarks/suite.py --from suite.json --plot suite.svg

docs/benchmarks.md says what is measured and what the columns mean.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import ParamSpec, TypeVar

import numpy as np
import onnx
import roofline
import tables
import zoo
from peers import Array, Begun, Feeds, Outputs, Peer, missing
from results import Case, Made, Result, Run, read
from roofline import Needs, Peaks

import taso
from taso.backends.onednn.backend import processor
from taso.graph.evaluate import evaluate_graph
from taso.search.verify import relative_error

# ── who takes part ───────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Variant:
    """A contestant: the runtime, which of a model's files it runs, and whether with the plan that was made for it."""

    runtime: str
    file: str


VARIANTS: Mapping[str, Variant] = {
    "taso": Variant("taso", "optimized"),
    "taso-plan": Variant("taso", "planned"),
    "taso-unoptimized": Variant("taso", "original"),
    "onnxruntime": Variant("onnxruntime", "original"),
    "onnxruntime-exported": Variant("onnxruntime", "exported"),
    "openvino": Variant("openvino", "original"),
    "torch": Variant("torch", "original"),
    "torch-compile": Variant("torch-compile", "original"),
    "xla": Variant("xla", "original"),
    "taso-bf16": Variant("taso-bf16", "bf16"),
    "openvino-bf16": Variant("openvino-bf16", "original"),
    "taso-cuda": Variant("taso-cuda", "for-gpu"),
    "taso-cuda-unoptimized": Variant("taso-cuda", "original"),
    "torch-cuda": Variant("torch-cuda", "original"),
    "torch-cuda-compile": Variant("torch-cuda-compile", "original"),
    "onnxruntime-cuda": Variant("onnxruntime-cuda", "original"),
    "onnxruntime-tensorrt": Variant("onnxruntime-tensorrt", "original"),
    "tensorrt": Variant("tensorrt", "original"),
}
ON_GPU = ("taso-cuda", "taso-cuda-unoptimized", "torch-cuda", "torch-cuda-compile", "onnxruntime-cuda",
          "onnxruntime-tensorrt", "tensorrt")  # fmt: skip
"""Those that run on an NVIDIA GPU (`benchmarks/gpu.py`)."""
ON_CPU = tuple(name for name in VARIANTS if name not in ON_GPU)
NARROW = ("taso-bf16", "openvino-bf16")
"""Contestants that round factors to bfloat16: where they are asked for, and where the processor can."""

MADE: Mapping[str, Mapping[str, object]] = {
    "optimized": {"backend": "onednn"},
    "planned": {"backend": "onednn", "rules": ["-*"]},
    "exported": {"backend": "onnxruntime"},
    "bf16": {"backend": "onednn", "precision": "bf16"},
    "for-gpu": {"backend": "cudnn"},
}
"""The files that `taso.optimize` makes, and how: as by default, without any rule, and for what the others run on."""


@dataclass(frozen=True)
class Settings:
    """How to measure: rounds of blocks of so many seconds, `pause` between them; what searches may take."""

    rounds: int
    seconds: float
    pause: float
    start_seconds: float
    budget: int
    time_limit: float | None
    small: bool
    seed: int
    on: tuple[str, ...]


# ── a model ──────────────────────────────────────────────────────────────────────────────────────────────────────


def measured(name: str, batch: int, threads: int, peaks: Peaks, settings: Settings) -> Case:
    """Builds, optimizes and times a model."""
    with tempfile.TemporaryDirectory(prefix="taso_suite_") as folder:
        paths = {"original": str(Path(folder) / "original.onnx")}
        size = zoo.ZOO[name].small if settings.small else None
        onnx.save(zoo.build(name, batch, settings.seed, size), paths["original"])
        graph = taso.load(paths["original"])
        feeds = random_feeds(graph, settings.seed)
        del graph
        case = Case(name, batch, threads, apart(limit, paths["original"], peaks, threads), peaks)
        for file in dict.fromkeys(VARIANTS[on].file for on in settings.on):
            if file in MADE:
                say(f"{name}: optimizing ({file})")
                case.made[file] = apart(optimized, paths["original"], file, threads, settings)
                paths[file] = case.made[file].path
        say(f"{name}: evaluating in float64")
        exact = apart(evaluated, paths["original"], feeds)
        contest(case, paths, feeds, exact, settings)
    return case


def limit(path: str, peaks: Peaks, threads: int) -> Needs:
    return roofline.needs(taso.load(path), peaks, threads)


def random_feeds(graph: taso.Graph, seed: int) -> Feeds:
    """Normal float32 for each input."""
    rng = np.random.default_rng(seed + 1)
    shapes = zip(graph.input_names, (v.type.static_shape for v in graph.inputs), strict=True)
    return {name: rng.standard_normal(shape, np.float32) for name, shape in shapes}


def optimized(path: str, file: str, threads: int | None, settings: Settings) -> Made:
    """Optimizes a model and writes it, with its plan if it has one, beside the original."""
    how = {"budget": settings.budget, "time_limit": settings.time_limit, **MADE[file]}
    started = time.perf_counter()
    best = taso.optimize(path, threads=threads, progress=False, **how)
    seconds = time.perf_counter() - started
    written = str(Path(path).with_name(f"{file}.onnx"))
    taso.save(best, written)
    return Made(written, seconds, best.report.decision, len(best.report.rewrites), bool(best.plans))


def evaluated(path: str, feeds: Feeds) -> dict[str, Array]:
    """The outputs in float64, by the operators' definitions."""
    return evaluate_graph(taso.load(path), feeds, wide=True)


# ── timing ───────────────────────────────────────────────────────────────────────────────────────────────────────


def contest(case: Case, paths: Mapping[str, str], feeds: Feeds, exact: Outputs, settings: Settings) -> None:
    """Times all contestants in blocks that take turns, each in a process of its own; fills in the case's results."""
    with ExitStack() as stack:
        peers: dict[str, Peer] = {}
        outputs: dict[str, Outputs] = {}
        for on in settings.on:
            say(f"{case.model}: starting {on}")
            path = paths[VARIANTS[on].file]
            peer = stack.enter_context(started(VARIANTS[on].runtime, path, case.threads))
            begun = peer.begin(feeds, settings.start_seconds)
            case.results[on] = _opened(begun, path, exact)
            if not begun.failure:
                peers[on], outputs[on] = peer, begun.outputs
        case.disagreement = disagreement(list(outputs.values()))
        for turn in range(settings.rounds):
            say(f"{case.model}: round {turn + 1} of {settings.rounds}")
            for on in list(peers) if turn % 2 == 0 else list(reversed(peers)):
                # threads that spin after their last call come to rest
                time.sleep(settings.pause)
                times = peers[on].block(settings.seconds)
                if times is None:
                    case.results[on].failure = "its process ended while it was timed"
                    del peers[on]
                    continue
                case.results[on].blocks.append(statistics.median(times))
                case.results[on].times.extend(times)
        for on, peer in peers.items():
            case.results[on].memory = peer.memory()


@contextmanager
def started(runtime: str, path: str, threads: int) -> Iterator[Peer]:
    peer = Peer(runtime, path, threads)
    try:
        yield peer
    finally:
        peer.end()


def _opened(begun: Begun, path: str, exact: Outputs) -> Result:
    if begun.failure:
        return Result(begun.failure)
    size = Path(path).stat().st_size
    return Result("", begun.version, begun.seconds, error=worst(begun.outputs, exact), file_bytes=size)


def worst(found: Outputs, wanted: Outputs) -> float:
    """Largest max|a − b| / max|b| of the outputs."""
    return max(relative_error(found[name], array) for name, array in wanted.items())


def disagreement(outputs: Sequence[Outputs]) -> float:
    """The largest error of any of them against any other."""
    return max((worst(a, b) for a in outputs for b in outputs if a is not b), default=0.0)


# ── processes of their own ───────────────────────────────────────────────────────────────────────────────────────

P = ParamSpec("P")
T = TypeVar("T")


def apart(function: Callable[P, T], *arguments: P.args, **settings: P.kwargs) -> T:
    """Calls a function in a process of its own, so that nothing of it is left when others are timed."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(function, arguments, settings)


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


# ── the command ──────────────────────────────────────────────────────────────────────────────────────────────────


def contestants(wanted: Sequence[str]) -> tuple[tuple[str, ...], dict[str, str]]:
    """Of those wanted who can take part, and why the others cannot."""
    left_out = {}
    for name in wanted:
        lacking = missing(VARIANTS[name].runtime)
        if lacking:
            left_out[name] = f"{' and '.join(lacking)} cannot be imported"
    return tuple(name for name in wanted if name not in left_out), left_out


def _names(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in VARIANTS:
            raise argparse.ArgumentTypeError(f"'{name}' is none of {', '.join(VARIANTS)}")
    return names


def options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", metavar="MODEL", help=f"{', '.join(zoo.ZOO)} (default: all)")
    parser.add_argument("--threads", type=int, nargs="+", default=[1], help="(default: 1)")
    parser.add_argument("--batch", type=int, nargs="+", default=[1], help="(default: 1)")
    default = [name for name in ON_CPU if name not in NARROW]
    parser.add_argument(
        "--on", type=_names, default=default, metavar="NAME,…",
        help=f"{', '.join(VARIANTS)} (default: all on the processor but {' and '.join(NARROW)})",
    )  # fmt: skip
    parser.add_argument("--rounds", type=int, default=20, help="blocks for each contestant (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=0.3, help="length of a block (default: %(default)s)")
    parser.add_argument("--pause", type=float, default=0.05, help="seconds before a block (default: %(default)s)")
    parser.add_argument("--start-seconds", type=float, default=900, help="that a contestant may take to start")
    parser.add_argument("--budget", type=int, default=1000, help="of each search (default: %(default)s)")
    parser.add_argument("--time-limit", type=float, help="seconds of each search (default: none)")
    parser.add_argument("--seed", type=int, default=0, help="of weights and inputs (default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="few and short blocks, and at most 20 s for each search")
    parser.add_argument("--small", action="store_true", help="small pictures, to try the command: not the real models")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all that was measured, after each model")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="write the plot as SVG")
    parser.add_argument("--from", dest="source", type=Path, metavar="FILE", help="measure nothing: show such a file")
    return parser


def settings_of(told: argparse.Namespace, on: tuple[str, ...]) -> Settings:
    settings = Settings(
        told.rounds, told.seconds, told.pause, told.start_seconds, told.budget, told.time_limit, told.small, told.seed,
        on,
    )  # fmt: skip
    if not told.quick:
        return settings
    limit = 20.0 if told.time_limit is None else told.time_limit
    return replace(settings, rounds=min(told.rounds, 5), seconds=min(told.seconds, 0.1), time_limit=limit)


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the table; 1 where a contestant failed on a model."""
    parser = options()
    told = parser.parse_args(arguments)
    for name in told.models:
        if name not in zoo.ZOO:
            parser.error(f"there is no model '{name}': there are {', '.join(zoo.ZOO)}")
    if told.source is not None:
        found = read(told.source)
    else:
        on, left_out = contestants(told.on)
        found = run(told, settings_of(told, on), left_out)
    print(tables.whole(found), flush=True)
    if told.plot is not None:
        told.plot.write_text(tables.picture(found.cases), "utf-8")
    return int(any(r.failure for c in found.cases for r in c.results.values()))


def run(told: argparse.Namespace, settings: Settings, left_out: Mapping[str, str]) -> Run:
    """Measures all cases; each is printed when it is done, and the JSON file written anew."""
    found = Run(processor(), asdict(settings), left_out)
    for threads in told.threads:
        say(f"measuring what this machine reaches on {tables.threads_of(threads)}")
        peaks = apart(roofline.peaks, threads, seconds=0.3 if told.quick else 2.0)
        for batch in told.batch:
            for name in told.models or zoo.ZOO:
                found.cases.append(measured(name, batch, threads, peaks, settings))
                print(tables.details(found.cases[-1]), flush=True)
                if told.json is not None:
                    found.write(told.json)
    return found


if __name__ == "__main__":
    sys.exit(main())
