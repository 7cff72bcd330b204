"""How well the sum of a graph's kernel costs predicts how long the whole graph takes, on each backend that measures.

    python benchmarks/predictions.py example:resnet50 light:shufflenet --threads 1 --finalists 6

prints a line for each model and backend: the sum of its kernels (and of changes of layout), measured anew one by one;
the median of whole runs with its quartiles; and by how much the sum is off. With `--finalists` each model is searched,
too, and graphs on the way to the best one, the original among them, and some that are worse than the best are
compiled: of these the rank correlation (Spearman) of sums and medians is printed, with both for each graph, and how
many pairs of graphs, among those that the clock tells apart (their quartiles do not overlap), the sums have in order.

Kernels are measured in one process, whole graphs in another, as they are deployed; there programs run in turns, every
other round the other way round.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from models import EXAMPLES, load
from zoo import ZOO

import taso
from taso.backends.costs import CostDatabase
from taso.backends.select import get_backend
from taso.graph.errors import GraphError, TasoError
from taso.graph.onnx_export import save
from taso.rules.collection import library
from taso.rules.matcher import Matcher
from taso.search.moves import Limits, Outcome
from taso.search.optimize import UNFOLDED, Prepared, Settings, measuring_sizes, prepare, usable
from taso.search.result import to_graph
from taso.search.rewrite import Refused, apply
from taso.search.state import Cycle, Draft, State
from taso.search.strategies import Search
from taso.search.verify import random_feeds, turns

BACKENDS = ("onednn", "onnxruntime")
LIGHT = (
    "resnet50", "squeezenet", "shufflenet", "inception_v1", "inception_v2", "densenet121", "vgg19", "bvlc_alexnet",
)  # fmt: skip
KINDS = {"zoo": tuple(ZOO), "example": EXAMPLES, "light": LIGHT}
MODELS = tuple(f"{kind}:{name}" for kind, names in KINDS.items() for name in names)
LEAST_RUNS = 12
MOST_RUNS = 1000


@dataclass(frozen=True)
class Graph:
    """A graph with the sum of its kernels' costs, and the median and quartiles of whole runs, in ms."""

    name: str
    predicted: float
    measured: float = math.nan
    quartiles: tuple[float, float] = (math.nan, math.nan)

    @property
    def error(self) -> float:
        """By which share the sum is above what was measured."""
        return self.predicted / self.measured - 1


# ── measuring ────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Job:
    """A model and a backend, what to do with them, and a folder for graphs."""

    model: str
    backend: str
    threads: int
    seconds: float
    finalists: int
    budget: int
    folder: str


def predicted(job: Job) -> list[tuple[Graph, str]]:
    """The original and as many finalists as are asked for, with their sums and the files that they are saved in."""
    graph = load(job.model)
    settings = Settings(
        get_backend(job.backend, job.threads), usable(library()), CostDatabase(Path(job.folder)), threads=job.threads,
        sizes={name: size for name, size in measuring_sizes(graph, {}).items() if isinstance(size, int)},
    )  # fmt: skip
    prepared = prepare(graph, settings)
    states = [("original", prepared.state)]
    if job.finalists:
        states = finalists(prepared, settings, job.finalists, job.budget)
    found = []
    for number, (name, state) in enumerate(states):
        path = str(Path(job.folder) / f"{number}.onnx")
        save(to_graph(state, graph, prepared.classes, type(graph)), path)
        found.append((Graph(name, state.cost * 1e3), path))
    return found


def measured(job: Job, paths: Sequence[str]) -> list[list[float]]:
    """Seconds of whole runs of each graph."""
    graphs = [taso.load(path) for path in paths]
    feeds = random_feeds(graphs[0], measuring_sizes(graphs[0], {}), 0)
    programs = [taso.compile(g, job.backend, job.threads) for g in graphs]
    return turns(programs, feeds, job.seconds * len(programs), LEAST_RUNS, MOST_RUNS)


def results(job: Job) -> list[Graph]:
    """The original and the finalists, each half of the work in a process of its own."""
    context = multiprocessing.get_context("spawn")
    with context.Pool(1) as pool:
        found = pool.apply(predicted, (job,))
    with context.Pool(1) as pool:
        times = pool.apply(measured, (job, [path for _, path in found]))
    return [_described(graph, seconds) for (graph, _), seconds in zip(found, times, strict=True)]


def _described(graph: Graph, seconds: Sequence[float]) -> Graph:
    low, middle, high = (q * 1e3 for q in statistics.quantiles(seconds, n=4))
    return replace(graph, measured=middle, quartiles=(low, high))


# ── finalists ────────────────────────────────────────────────────────────────────────────────────────────────────


def finalists(prepared: Prepared, settings: Settings, number: int, budget: int) -> list[tuple[str, State]]:
    """The original, about `number` graphs on the way from it to the best, and as many that are rewrites worse."""
    limits = Limits(1.05, budget, constant_bytes=2 * prepared.state.constant_bytes + UNFOLDED)
    outcome = Search(prepared.state, Matcher(settings.rules), limits).run("backtracking")
    walked = list(on_the_way(outcome))
    found = [("original" if i == 0 else f"{i} rewrites", walked[i]) for i in spread(len(walked), number + 1)]
    # ever more of what makes it worse, so that there is something to rank
    worse = sorted((m for m in outcome.near_misses if m.change > 0), key=lambda m: -m.change)
    state, taken = outcome.best, 0
    wanted = [2**i for i in range(number)]
    for miss in worse:
        if not wanted:
            break
        draft = Draft(state)
        try:
            apply(miss.match, draft)
            state, taken = _committed(draft), taken + 1
        except (Cycle, Refused, GraphError):
            continue
        if taken == wanted[0]:
            found.append((f"worse by {wanted.pop(0)} rewrites", state))
    return found


def spread(length: int, number: int) -> list[int]:
    """At most `number` places in a list, evenly from its first to its last."""
    if length <= number:
        return list(range(length))
    return [round(i * (length - 1) / max(number - 1, 1)) for i in range(number)]


def on_the_way(outcome: Outcome) -> Iterator[State]:
    """The states on the way to the best one, the original first, as far as its rewrites can be taken one by one."""
    state = outcome.initial
    yield state
    for taken in outcome.path:
        draft = Draft(state)
        try:
            apply(taken.match, draft)
            state = _committed(draft)
        except (Cycle, Refused, GraphError):
            return
        yield state


def _committed(draft: Draft) -> State:
    draft.sweep()
    draft.check_acyclic()
    return draft.commit()


def spearman(one: Sequence[float], other: Sequence[float]) -> float:
    """The correlation of ranks; NaN where all of one are equal."""
    a, b = ranks(one), ranks(other)
    try:
        return statistics.correlation(a, b)
    except statistics.StatisticsError:
        return math.nan


def ranks(values: Sequence[float]) -> list[float]:
    """Places in ascending order; equal values share the mean of theirs."""
    return [sum(w < v for w in values) + (sum(w == v for w in values) - 1) / 2 for v in values]


# ── the command ──────────────────────────────────────────────────────────────────────────────────────────────────

HEAD = f"{'model':22} {'backend':12} {'predicted':>10} {'measured':>10} {'quartiles':>19} {'off by':>8}  finalists"


def line(job: Job, found: Sequence[Graph]) -> str:
    original, (low, high) = found[0], found[0].quartiles
    text = (
        f"{job.model:22} {job.backend:12} {original.predicted:10.3f} {original.measured:10.3f} "
        f"{low:9.3f} {high:9.3f} {original.error:+8.1%}"
    )
    if len(found) > 2:
        right, pairs = in_order(found)
        text += f"  {len(found)}, rank correlation {spearman(*_pairs(found)):.3f}, in order {right} of {pairs} pairs"
    return text


def in_order(found: Sequence[Graph]) -> tuple[int, int]:
    """Of how many pairs the sums have the order of the medians, and of how many: those whose quartiles lie apart."""
    apart = [(a, b) for a in found for b in found if a.quartiles[1] < b.quartiles[0]]
    return sum(a.predicted < b.predicted for a, b in apart), len(apart)


def _pairs(found: Sequence[Graph]) -> tuple[list[float], list[float]]:
    return [g.predicted for g in found], [g.measured for g in found]


def options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=MODELS, help="zoo:, light: or example:NAME, or a file (all)")
    parser.add_argument("--backends", nargs="+", default=BACKENDS, help="(default: %(default)s)")
    parser.add_argument("--threads", type=int, default=1, help="(default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=2.0, help="of whole runs of each graph (default: %(default)s)")
    parser.add_argument("--finalists", type=int, default=0, metavar="N", help="search, and rank about 2 N graphs")
    parser.add_argument("--budget", type=int, default=100, help="graphs that a search expands (default: %(default)s)")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the table; 1 where a model could not be run on a backend."""
    told = options().parse_args(arguments)
    print(HEAD, flush=True)
    failed = False
    for model in told.models:
        for backend in told.backends:
            with tempfile.TemporaryDirectory() as folder:
                job = Job(model, backend, told.threads, told.seconds, told.finalists, told.budget, folder)
                try:
                    found = results(job)
                except TasoError as error:
                    failed = True
                    print(f"{model:22} {backend:12} {error}", flush=True)
                    continue
            print(line(job, found), flush=True)
            for graph in found[1:]:
                print(f"{'':22} {graph.name:50} {graph.predicted:10.3f} {graph.measured:10.3f} {graph.error:+8.1%}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
