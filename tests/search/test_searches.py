"""All searches behind one call: equal outputs, limits, interruptions, each from another's best, what is told."""

from __future__ import annotations

import hashlib
import json
import os
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from searching import (
    FUZZ,
    ROUNDED,
    SEEDS,
    FormulaBackend,
    database,
    planted_graph,
    prepared,
    random_graph,
    random_inputs,
    rule,
)

import taso
from taso.backends.lowering import Kernel
from taso.graph.errors import SearchError
from taso.graph.evaluate import evaluate_graph
from taso.rules.collection import library
from taso.rules.matcher import Matcher
from taso.search import optimize as optimizing
from taso.search.moves import Limits, Outcome
from taso.search.optimize import Prepared, Settings
from taso.search.result import Report, to_graph
from taso.search.saturation import Bounds
from taso.search.state import check
from taso.search.strategies import SEARCHES, Search
from taso.search.verify import relative_error

ROOT = Path(__file__).parents[2]
SMALL = Bounds(nodes=200, matches=30, looks=2000, seconds=2.0)
FEW = settings(FUZZ, max_examples=8)


def searched(
    start: Prepared, name: str, earlier: Outcome | None = None, matcher: Matcher | None = None, verify: bool = False,
    **limits: object,
) -> Outcome:  # fmt: skip
    given_limits = Limits(**{"budget": 12, **limits})  # type: ignore[arg-type]  # limits of the search
    search = Search(start.state, matcher or Matcher(library()), given_limits, verify=verify, bounds=SMALL)
    return search.run(name, earlier)


def assert_equal(graph: taso.Graph, start: Prepared, outcome: Outcome) -> None:
    check(outcome.best)
    best = to_graph(outcome.best, graph, start.classes, taso.Graph)
    feeds = random_inputs(graph)
    with np.errstate(all="ignore"):
        wanted, found = (evaluate_graph(g, feeds, wide=True) for g in (graph, best))
    assert list(found) == list(wanted)
    for name, value in wanted.items():
        assert relative_error(found[name], value) <= ROUNDED, name


def assert_all_equal(graph: taso.Graph) -> None:
    outcomes: dict[str, Outcome] = {}
    for name in SEARCHES:
        # a store of its own, so that no search sees what another one has put there
        start = prepared(graph)
        outcomes[name] = searched(start, name)
        assert outcomes[name].statistics.stopped in ("", "budget")
        assert outcomes[name].best.cost <= start.state.cost
        assert_equal(graph, start, outcomes[name])
    least = min(outcomes[n].best.cost for n in ("backtracking", "saturation"))
    assert outcomes["auto"].best.cost <= least * (1 + 1e-9)


@FEW
@given(SEEDS)
def test_what_any_search_finds_in_a_random_graph_computes_the_same(seed: int) -> None:
    assert_all_equal(random_graph(random.Random(seed)))


@FEW
@given(SEEDS)
def test_what_any_search_finds_where_rules_apply_computes_the_same(seed: int) -> None:
    assert_all_equal(planted_graph(random.Random(seed)))


@FEW
@given(SEEDS)
def test_each_search_goes_on_from_another_and_is_never_worse(seed: int) -> None:
    graph = planted_graph(random.Random(seed))
    start = prepared(graph)
    outcome: Outcome | None = None
    for name in random.Random(seed).sample(["backtracking", "mcts", "saturation"] * 2, 4):
        after = searched(start, name, outcome)
        assert after.initial is start.state
        if outcome is not None:
            assert after.best.cost <= outcome.best.cost
            assert after.path[: len(outcome.path)] == outcome.path
        outcome = after
        assert_equal(graph, start, outcome)


# ── limits ───────────────────────────────────────────────────────────────────────────────────────────────────────


def redundant(layers: int = 4) -> taso.Graph:
    """Each layer holds two products of one value and an addition that changes nothing."""
    graph = taso.new_graph()
    x = graph.new_input(dims=(16, 32))
    for _ in range(layers):
        a, b = (graph.matmul(x, graph.new_weight(dims=(32, 32))) for _ in range(2))
        x = graph.tanh(graph.add(graph.mul(a, b), graph.new_weight(dims=(16, 32), data=np.zeros((16, 32)))))
    return graph


@pytest.mark.parametrize("name", SEARCHES)
def test_without_budget_or_time_no_search_changes_anything(name: str) -> None:
    for limits in ({"budget": 0}, {"time_limit": 0.0}):
        start = prepared(redundant())
        outcome = searched(start, name, **limits)
        assert outcome.best is start.state and outcome.path == ()
        assert outcome.statistics.stopped == ("budget" if limits == {"budget": 0} else "time limit")


@pytest.mark.parametrize("name", SEARCHES)
def test_whenever_time_is_up_the_best_so_far_comes_back(name: str) -> None:
    graph = redundant()
    for seconds in (0.001, 0.01, 0.05, 0.2):
        start = prepared(graph)
        outcome = searched(start, name, time_limit=seconds, budget=1000)
        assert outcome.best.cost <= start.state.cost
        assert_equal(graph, start, outcome)


class Interrupting(FormulaBackend):
    """Ctrl-C arrives while the n-th kernel is costed."""

    def __init__(self, after: int) -> None:
        super().__init__()
        self.left = after

    def measure(self, kernel: Kernel) -> float:
        self.left -= 1
        if self.left < 0:
            raise KeyboardInterrupt
        return super().measure(kernel)


@pytest.mark.parametrize("name", SEARCHES)
def test_whenever_ctrl_c_comes_the_best_so_far_comes_back(name: str) -> None:
    graph = redundant(2)
    counting = Interrupting(100_000)
    start = prepared(graph, counting)
    known = 100_000 - counting.left
    full = searched(start, name)
    kernels = 100_000 - counting.left
    assert kernels > known + 3 and full.best.cost < start.state.cost
    for after in range(known, kernels):
        start = prepared(graph, Interrupting(after))
        outcome = searched(start, name)
        assert outcome.statistics.stopped == "interrupted"
        assert full.best.cost <= outcome.best.cost * (1 + 1e-9) and outcome.best.cost <= start.state.cost
        assert_equal(graph, start, outcome)


@pytest.mark.parametrize("name", SEARCHES)
def test_weights_that_outgrow_the_folding_budget_are_not_made(name: str) -> None:
    graph = taso.new_graph()
    x = graph.new_input(dims=(4, 64))
    # merged, all weights count once; multiplied out, the product of two is larger than both
    graph.matmul(graph.matmul(x, graph.new_weight(dims=(64, 2))), graph.new_weight(dims=(2, 64)))
    multiply = rule("MatMul(MatMul(x, a), b) => MatMul(x, MatMul(a, b))\n where is_weight(a) and is_weight(b)")
    start = prepared(graph)
    bytes_now = start.state.constant_bytes
    for most, taken in ((bytes_now, False), (1 << 30, True)):
        outcome = searched(start, name, matcher=Matcher([multiply]), alpha=10.0, constant_bytes=most)
        assert outcome.best.constant_bytes <= most
        assert not outcome.path or taken


# ── one call ─────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("name", SEARCHES)
def test_optimize_takes_any_search_and_reports_which(name: str, formula_backend: FormulaBackend) -> None:
    graph = redundant()
    best = taso.optimize(graph, search=name, budget=10, backend=formula_backend, never_slower=False)
    report = best.report
    assert report.search == name and report.changed and report.verified
    assert bool(report.search_details) == (name != "backtracking")
    assert all(name in line for line in report.summary().splitlines() if line.startswith(f"{name}:"))
    again = Report.from_json(report.to_json())
    assert (again.search, again.search_details) == (name, report.search_details)
    assert json.loads(report.to_json())["search"] == name


@pytest.mark.parametrize("name", ["", "annealing", "MCTS"])
def test_a_search_that_does_not_exist_is_one_sentence(name: str, formula_backend: FormulaBackend) -> None:
    with pytest.raises(SearchError, match="search is one of backtracking, mcts, saturation, auto"):
        taso.optimize(redundant(1), search=name, backend=formula_backend)


@pytest.mark.parametrize("name", ["mcts", "saturation"])
def test_a_checkpoint_of_a_search_that_keeps_none_is_refused(
    name: str, tmp_path: Path, formula_backend: FormulaBackend
) -> None:
    with pytest.raises(SearchError, match="a checkpoint keeps the state of the backtracking"):
        taso.optimize(redundant(1), search=name, checkpoint=tmp_path / "search", backend=formula_backend)


def test_auto_tells_what_each_of_its_searches_came_to() -> None:
    outcome = searched(prepared(redundant()), "auto")
    told = outcome.statistics.details
    costs = [float(told[f"{stage}: cost_ms"]) for stage in ("backtracking", "saturation", "backtracking from there")]
    assert min(costs) == pytest.approx(outcome.best.cost * 1e3)
    assert told["taken"] in ("backtracking", "saturation", "backtracking from there")
    course = outcome.statistics.course
    assert all(a[0] <= b[0] and a[1] > b[1] for a, b in zip(course, course[1:], strict=False))


@pytest.mark.parametrize("name", SEARCHES)
def test_a_false_rule_admitted_by_force_fails_the_check_whatever_the_search(name: str) -> None:
    graph = taso.new_graph()
    x = graph.new_input(dims=(4, 6))
    graph.mul(graph.matmul(x, graph.new_weight(dims=(6, 8))), graph.new_weight(dims=(), data=np.float32(1.01)))
    false = rule("Mul(MatMul(x, w), c) => MatMul(x, w)\n where is_weight(c)")
    given_settings = Settings(FormulaBackend(), [false], database(), Limits(budget=10), name, never_slower=False)
    best, report = optimizing.optimize(graph, given_settings)
    assert best is graph and report.verified is False and not report.changed


# ── the same on every run ────────────────────────────────────────────────────────────────────────────────────────

PROGRAM = """
import hashlib, random, sys
sys.path[:0] = sys.argv[1:]
import taso
from searching import FormulaBackend, planted_graph, random_graph
backend = FormulaBackend()
for seed in range(3):
    for graph in (random_graph(random.Random(seed), 12), planted_graph(random.Random(seed))):
        for search in ("mcts", "saturation", "auto"):
            best = taso.optimize(graph, 1.05, 10, search=search, seed=seed, backend=backend, never_slower=False,
                                 verify=False)
            exported = hashlib.sha256(taso.export_onnx(best).SerializeToString()).hexdigest()
            print(search, exported, best.report.candidates, [r.where for r in best.report.rewrites])
"""


def told_under(hash_seed: str) -> str:
    folders = [str(ROOT / "tests" / "graph"), str(ROOT / "tests" / "search"), str(ROOT)]
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *folders], capture_output=True, text=True, check=True, cwd=ROOT,
        env={**os.environ, "PYTHONHASHSEED": hash_seed},
    )  # fmt: skip
    return done.stdout


def test_every_search_gives_the_same_bytes_whatever_the_hash_seed() -> None:
    first = told_under("1")
    assert len(first.splitlines()) == 18 and first.count("[]") < 9
    assert told_under("31337") == first


def test_nothing_but_the_result_is_printed(
    capfd: pytest.CaptureFixture[str], formula_backend: FormulaBackend
) -> None:
    for name in SEARCHES:
        taso.optimize(redundant(1), search=name, budget=5, backend=formula_backend)
    assert capfd.readouterr() == ("", "")


def test_the_seed_decides_what_the_tree_search_draws() -> None:
    def course(seed: int) -> str:
        start = prepared(redundant(6))
        search = Search(start.state, Matcher(library()), Limits(budget=40), seed=seed)
        statistics = search.run("mcts").statistics
        told = (statistics.candidates, statistics.duplicates, sorted(statistics.details.items()))
        return hashlib.sha256(repr(told).encode()).hexdigest()

    assert course(1) == course(1)
    assert len({course(seed) for seed in range(6)}) > 1
