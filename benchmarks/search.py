"""How long the search takes, how much it tries, and how much memory: TASO's examples, repeated blocks, a large graph.

    python benchmarks/search.py --published DIR --course course.svg

prints five tables. The first is TASO's examples with TASO's rules, as many graphs expanded as the original expands: its
published file, read and proved, from the folder that holds it (graph_subst.pb), and those rules of the library that
stand for what the original has built in. Without the folder that table is left out. The second is the same examples
with the whole library, the default budget and the default search (`--search`); `--course` also draws best cost against
seconds (an .svg, or a .json with the points). The third is graphs of one block repeated, for the time of a candidate;
the fourth one large graph. The fifth compares the default search with what the others find from the original in ten
times its seconds.

Costs are warm: a formula by default, which nothing has to measure; with `--backend onednn` each search runs twice and
the second is timed. Every search has a process of its own; its memory is the most that it took beside what the process
began with. Seconds are elapsed ones; those of the processor stand beside them, for machines that others use too. Of
the candidates some are worked out anew, others carried over from the graph before; distinct graphs are those of a
backtracking that lay below α times the best. The first table is the backtracking as published.
"""

from __future__ import annotations

import argparse
import json
import logging
import multiprocessing
import resource
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from models import load

import taso
from taso.backends.base import Backend
from taso.backends.costs import CostDatabase
from taso.backends.lowering import Fusion, Layouts, Lowering
from taso.backends.reference import ReferenceBackend
from taso.backends.select import get_backend
from taso.rules.collection import admitted, library
from taso.rules.matcher import Matcher
from taso.rules.pattern import Exactness, Rule
from taso.search import strategies
from taso.search.backtracking import Backtracking, Limits, Outcome
from taso.search.optimize import UNFOLDED, Settings, prepare, usable

EXAMPLES = {"nasnet_a": 101, "nasrnn": 101, "bert": 101, "resnext50": 53, "inception_v3": 31}
"""TASO's examples, and how many graphs the original expands of each."""
OTHERS = ("squeezenet", "resnet50")
BUILT_IN = (
    "batchnorm-into-conv", "concat-conv", "conv-sum-of-products", "enlarge-conv-sum", "enlarge-merge-conv",
    "enlarge-merge-conv-relu", "merge-conv", "merge-conv-relu", "merge-conv-sum", "merge-groups-2",
)  # fmt: skip
"""What the original does beside its file: its operators merge, enlarge and fold for any window and stride."""
TABLES = ("taso", "library", "flat", "large", "others")
SIZES = (50, 500, 5000)
LAYER = 26
"""Operators of one layer of `transformer`."""


class FormulaBackend(ReferenceBackend):
    """Costs of a formula, with the layouts and fusions of a backend that has them: what a search weighs on oneDNN."""

    name = "formula"

    def __init__(self) -> None:
        super().__init__()
        self.lowering = Lowering(Layouts(16), Fusion())


@dataclass(frozen=True)
class Figures:
    """What one search did. Costs in ms, memory in MB; `course` has seconds and the best cost from then on."""

    nodes: int
    seconds: float
    processor: float
    preparing: float
    expanded: int
    candidates: int
    worked_out: int
    distinct: int
    before: float
    after: float
    stopped: str
    memory: float
    course: tuple[tuple[float, float], ...]


@dataclass(frozen=True)
class Search:
    """A search to be made in a process of its own."""

    build: Callable[[], taso.Graph]
    rules: Sequence[Rule]
    backend: str
    alpha: float
    budget: int
    name: str = "backtracking"
    limit: float | None = None


def figures(search: Search) -> Figures:
    """Runs a search in a process of its own."""
    with multiprocessing.get_context("fork").Pool(1) as pool:
        return pool.apply(_figures, (search,))


def _figures(search: Search) -> Figures:
    began = _most_memory()
    graph = search.build()
    backend: Backend = FormulaBackend() if search.backend == "formula" else get_backend(search.backend)
    if backend.measures:
        _searched(graph, search, backend)
    preparing, seconds, processor, distinct, outcome = _searched(graph, search, backend)
    told = outcome.statistics
    return Figures(
        nodes=len(graph.operators), seconds=seconds, processor=processor, preparing=preparing, expanded=told.expanded,
        candidates=told.candidates, worked_out=told.candidates + told.refused - told.reused, distinct=distinct,
        before=outcome.initial.cost * 1e3, after=outcome.best.cost * 1e3, stopped=told.stopped,
        memory=_most_memory() - began, course=tuple((s, c * 1e3) for s, c in told.course),
    )  # fmt: skip


def _searched(graph: taso.Graph, search: Search, backend: Backend) -> tuple[float, float, float, int, Outcome]:
    """Seconds until the graph had its costs, of the search, and of the processor; graphs that were kept; the rest."""
    started = time.perf_counter()
    rules = search.rules
    prepared = prepare(graph, Settings(backend, rules, CostDatabase()))
    most = 2 * prepared.state.constant_bytes + UNFOLDED
    limits = Limits(search.alpha, search.budget, search.limit, constant_bytes=most)
    begun, used = time.perf_counter(), time.process_time()
    kept = 0
    if search.name == "backtracking":
        run = Backtracking(prepared.state, Matcher(rules), limits)
        outcome = run.run()
        kept = len(run._seen)
    else:
        outcome = strategies.Search(prepared.state, Matcher(rules), limits, rules=rules).run(search.name)
    seconds, processor = time.perf_counter() - begun, time.process_time() - used
    return begun - started, seconds, processor, kept, outcome


def _most_memory() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


# ── graphs ───────────────────────────────────────────────────────────────────────────────────────────────────────


def example(name: str) -> Callable[[], taso.Graph]:
    return partial(load, f"example:{name}")


def transformer(nodes: int, width: int = 512, heads: int = 8, tokens: int = 128) -> taso.Graph:
    """Encoder layers of about `nodes` operators in all; every layer is the same, with weights of its own."""
    graph = taso.new_graph()
    x = graph.new_input(dims=(tokens, width))
    for _ in range(max(1, round(nodes / LAYER))):
        x = _layer(graph, x, width, heads)
    return graph


def _layer(graph: taso.Graph, x: taso.Tensor, width: int, heads: int) -> taso.Tensor:
    def product(t: taso.Tensor, columns: int) -> taso.Tensor:
        y = graph.matmul(t, graph.new_weight(dims=(t.dim(1), columns)))
        return graph.add(y, graph.new_weight(dims=(columns,)))

    def head(t: taso.Tensor, perm: tuple[int, int, int]) -> taso.Tensor:
        shaped = graph.reshape(product(t, width), shape=(t.dim(0), heads, width // heads))
        return graph.transpose(shaped, perm=perm)

    query, key, value = (head(x, perm) for perm in ((1, 0, 2), (1, 2, 0), (1, 0, 2)))
    attended = graph.matmul(graph.sigmoid(graph.matmul(query, key)), value)
    joined = graph.reshape(graph.transpose(attended, perm=(1, 0, 2)), shape=(x.dim(0), width))
    x = graph.add(x, product(joined, width))
    return graph.add(x, product(graph.relu(product(x, 4 * width)), width))


# ── tables ───────────────────────────────────────────────────────────────────────────────────────────────────────

HEAD = (
    f"{'graph':14} {'nodes':>5} {'seconds':>8} {'processor':>9} {'expanded':>8} {'candidates':>10} {'anew':>7} "
    f"{'distinct':>8} {'MB':>5} {'ms before':>10} {'after':>10}  ended by"
)


def line(name: str, f: Figures) -> str:
    return (
        f"{name:14} {f.nodes:5} {f.seconds:8.2f} {f.processor:9.2f} {f.expanded:8} {f.candidates:10} {f.worked_out:7} "
        f"{f.distinct:8} {f.memory:5.0f} {f.before:10.4f} {f.after:10.4f}  {f.stopped or 'nothing left to expand'}"
    )


def table(title: str, searches: Iterable[tuple[str, Search]]) -> dict[str, Figures]:
    print(f"\n{title}\n{HEAD}", flush=True)
    found = {}
    for name, search in searches:
        found[name] = figures(search)
        print(line(name, found[name]), flush=True)
    return found


def published(folder: Path) -> list[Rule]:
    """The proved rules of TASO's file, and ours for what the original has built in."""
    log = logging.getLogger("taso.rules.collection")
    log.setLevel(logging.ERROR)
    return [*admitted(folder / "graph_subst.pb"), *(r for r in library() if r.id in BUILT_IN)]


def flatness(rules: Sequence[Rule], backend: str, budget: int) -> None:
    """Time of a candidate by the size of the graph: all, and those alone that were worked out and not carried over."""
    found = table(
        f"one layer repeated, whole library, {budget} graphs expanded",
        ((f"{n} nodes", Search(partial(transformer, n), rules, backend, 1.05, budget)) for n in SIZES),
    )
    for name, f in found.items():
        each = f.processor / max(f.candidates, 1) * 1e6
        fresh = f.processor / max(f.worked_out, 1) * 1e6
        print(f"  {name}: {each:.0f} µs of processor a candidate, {fresh:.0f} µs for each that was worked out anew")


def against_others(rules: Sequence[Rule], told: argparse.Namespace) -> None:
    """The cost that the default search ends with beside what the others end with in ten times its seconds."""
    print(f"\n{told.search} and, in ten times its seconds, the others: ms by the sum of kernels")
    others = [("backtracking", 1.0), ("backtracking", 1.05), ("mcts", 1.0), ("saturation", 1.0)]
    names = " ".join(f"{f'{n} {a:g}':>18}" for n, a in others)
    print(f"{'graph':14} {told.search:>12} {'seconds':>8} {names}  of best")
    for model in told.models:
        own = figures(Search(example(model), rules, told.backend, told.alpha, told.budget, told.search))
        limit = max(10 * own.seconds, 1.0)
        costs = [
            figures(Search(example(model), rules, told.backend, alpha, 10**6, name, limit)).after
            for name, alpha in others
        ]
        best = min(own.after, *costs)
        each = " ".join(f"{c:18.4f}" for c in costs)
        print(f"{model:14} {own.after:12.4f} {own.seconds:8.2f} {each} {own.after / best:8.4f}", flush=True)


# ── the course ───────────────────────────────────────────────────────────────────────────────────────────────────

WIDTH, HEIGHT, LEFT, TOP = 640, 360, 60, 20
COLOURS = ("#4269d0", "#efb118", "#ff725c", "#6cc5b0", "#3ca951", "#a463f2", "#97bbf5")


def draw(found: dict[str, Figures], path: Path) -> None:
    """Best cost, as a share of the original's, against seconds: a picture (.svg) or the points (.json)."""
    courses = {
        name: [(s, c / f.before) for s, c in f.course] + [(f.seconds, f.after / f.before)] for name, f in found.items()
    }
    text = json.dumps(courses, indent=1) if path.suffix == ".json" else svg(courses)
    path.write_text(text, encoding="utf-8")
    print(f"\nbest cost against seconds: {path}")


def svg(courses: dict[str, list[tuple[float, float]]]) -> str:
    longest = max(s for points in courses.values() for s, _ in points) or 1.0
    least = min(c for points in courses.values() for _, c in points)
    scale = 1.0 - least or 1.0

    def place(seconds: float, cost: float) -> tuple[float, float]:
        return LEFT + WIDTH * seconds / longest, TOP + HEIGHT * (1 - (cost - least) / scale)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {LEFT + WIDTH + 130} {TOP + HEIGHT + 50}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect x="{LEFT}" y="{TOP}" width="{WIDTH}" height="{HEIGHT}" fill="none" stroke="#999"/>',
        f'<text x="{LEFT + WIDTH / 2}" y="{TOP + HEIGHT + 40}" text-anchor="middle">seconds of search</text>',
    ]
    for tenth in range(0, 11, 2):
        seconds, cost = longest * tenth / 10, least + scale * tenth / 10
        x, y = place(seconds, cost)
        parts.append(f'<text x="{x:.1f}" y="{TOP + HEIGHT + 18}" text-anchor="middle">{seconds:.2g}</text>')
        parts.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{cost:.3f}</text>')
    for number, (name, points) in enumerate(courses.items()):
        colour, row = COLOURS[number % len(COLOURS)], TOP + 12 + 18 * number
        steps: list[str] = []
        for seconds, cost in points:
            x, y = place(seconds, cost)
            steps.append(f"M{x:.1f} {y:.1f}" if not steps else f"H{x:.1f}V{y:.1f}")
        parts.append(f'<path d="{"".join(steps)}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts.append(f'<text x="{LEFT + WIDTH + 10}" y="{row}" fill="{colour}">{name}</text>')
    return "\n".join([*parts, "</svg>", ""])


# ── the command ──────────────────────────────────────────────────────────────────────────────────────────────────


def options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tables", nargs="*", metavar="TABLE", help=f"{', '.join(TABLES)} (default: all)")
    parser.add_argument("--published", type=Path, help="a folder with TASO's rule file, graph_subst.pb")
    parser.add_argument("--models", nargs="+", default=[*EXAMPLES, *OTHERS], help="examples (default: all of these)")
    parser.add_argument("--backend", default="formula", help="whose costs (default: %(default)s)")
    parser.add_argument("--alpha", type=float, default=1.0, help="of the first two tables (default: %(default)s)")
    parser.add_argument("--search", default="auto", choices=strategies.SEARCHES, help="of the second and fourth table")
    parser.add_argument("--budget", type=int, default=1000, help="of the second table (default: %(default)s)")
    parser.add_argument("--nodes", type=int, default=5000, help="of the large graph (default: %(default)s)")
    parser.add_argument("--course", type=Path, help="where to put best cost against seconds: an .svg or .json file")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the tables that are asked for; 2 for wrong usage."""
    parser = options()
    told = parser.parse_args(arguments)
    tables = told.tables or TABLES
    for name in tables:
        if name not in TABLES:
            parser.error(f"there is no table '{name}'; there are {', '.join(TABLES)}")
    if "taso" in told.tables and told.published is None:
        parser.error("the table 'taso' needs the folder of TASO's rule file: --published DIR")
    whole = usable(library(), (Exactness.EXACT, Exactness.REASSOCIATES))
    if "taso" in tables and told.published is not None:
        rules = published(told.published)
        for alpha in dict.fromkeys((told.alpha, 1.05)):
            table(
                f"TASO's {len(rules)} rules, alpha {alpha}, at most as many graphs expanded as the original expands",
                ((m, Search(example(m), rules, told.backend, alpha, EXAMPLES.get(m, 101))) for m in told.models),
            )
    if "library" in tables:
        found = table(
            f"the library's {len(whole)} rules, {told.search}, alpha {told.alpha}, budget {told.budget}",
            ((m, Search(example(m), whole, told.backend, told.alpha, told.budget, told.search)) for m in told.models),
        )
        if told.course is not None:
            draw(found, told.course)
    if "flat" in tables:
        flatness(whole, told.backend, 5)
    if "large" in tables:
        build = partial(transformer, told.nodes)
        search = Search(build, whole, told.backend, told.alpha, told.budget, told.search)
        title = f"a large graph, whole library, {told.search}, alpha {told.alpha}, budget {told.budget}"
        table(title, [("transformer", search)])
    if "others" in tables:
        against_others(whole, told)
    return 0


if __name__ == "__main__":
    sys.exit(main())
