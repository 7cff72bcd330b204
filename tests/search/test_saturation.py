"""Equality saturation: what grows, what is filtered, what is taken out, and what happens where a limit is met."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from searching import (
    FUZZ,
    ROUNDED,
    SEEDS,
    FormulaBackend,
    by_id,
    database,
    planted_graph,
    prepared,
    random_graph,
    random_inputs,
    rule,
)

import taso
from taso.backends.lowering import Kernel
from taso.backends.reference import ReferenceBackend
from taso.graph.evaluate import evaluate_graph
from taso.graph.ops.elementwise import NEG
from taso.rules.collection import library
from taso.rules.matcher import Matcher
from taso.rules.pattern import Rule
from taso.search import integer
from taso.search.backtracking import backtrack
from taso.search.egraph import EGraph
from taso.search.extraction import Extractor
from taso.search.moves import Limits, Outcome
from taso.search.optimize import Prepared, Settings, prepare
from taso.search.result import to_graph
from taso.search.saturation import Bounds, Saturation, saturate
from taso.search.verify import relative_error

FEW = settings(FUZZ, max_examples=12)
SMALL = Bounds(nodes=200, matches=30, looks=2000, seconds=2.0)


class Priced(ReferenceBackend):
    """Every kernel is one node and costs what a table says of its operator, in milliseconds."""

    name = "priced"
    measures = False

    def __init__(self, **prices: float) -> None:
        super().__init__()
        self.prices = prices

    def device_key(self) -> str:
        return "priced for tests"

    def measure(self, kernel: Kernel) -> float:
        return sum(self.prices.get(s.op.name, 1.0) for s in kernel.steps) * 1e-3


def priced(graph: taso.Graph, **prices: float) -> Prepared:
    return prepare(graph, Settings(Priced(**prices), (), database()))


def saturated(start: Prepared, *rules: Rule, bounds: Bounds | None = None, **limits: float) -> Outcome:
    given_limits = Limits(**{"budget": 20, **limits})  # type: ignore[arg-type]  # limits of the search
    return saturate(start.state, Matcher(rules or library()), given_limits, verify=True, bounds=bounds)


def grown(start: Prepared, *rules: Rule, bounds: Bounds | None = None) -> EGraph:
    """The e-graph that a search works on."""
    search = Saturation(start.state, Matcher(rules or library()), Limits(budget=20), bounds=bounds)
    search._note(search._start())
    egraph = EGraph(start.state)
    search._saturate(egraph)
    return egraph


def operators(outcome: Outcome) -> list[str]:
    state = outcome.best
    return sorted(state.op(n).name for n in state.made if state.op(n).name not in ("Input", "Weight"))


def assert_equal(graph: taso.Graph, start: Prepared, outcome: Outcome) -> None:
    best = to_graph(outcome.best, graph, start.classes, taso.Graph)
    feeds = random_inputs(graph)
    with np.errstate(all="ignore"):
        wanted, found = (evaluate_graph(g, feeds, wide=True) for g in (graph, best))
    for name, value in wanted.items():
        assert relative_error(found[name], value) <= ROUNDED, name


# ── what it finds ────────────────────────────────────────────────────────────────────────────────────────────────

DEARER = (rule("Relu(x) => Relu(Tanh(x))"), rule("Relu(Tanh(x)) => x"))
"""The first makes any graph dearer; only after it the second applies."""


def test_it_finds_what_needs_a_step_that_makes_the_graph_dearer() -> None:
    graph = taso.new_graph()
    graph.sigmoid(graph.relu(graph.transpose(graph.new_input(dims=(256, 256)), (1, 0))))
    start = prepared(graph)
    stuck = backtrack(start.state, Matcher(DEARER), Limits(budget=50))
    found = saturated(start, *DEARER)
    assert stuck.path == () and "Relu" not in operators(found)
    assert found.best.cost < stuck.best.cost
    assert {t.match.rule.name for t in found.path} == {r.name for r in DEARER}
    assert sum(t.gain for t in found.path) == pytest.approx(start.state.cost - found.best.cost)


MERGE = "MatMul(x, a) | MatMul(x, b) => Split(MatMul(x, Concat(a, b, axis=1)), axis=1, split=(dim(a, 1), dim(b, 1)))\n"
MERGED = rule(MERGE + " where is_weight(a) and is_weight(b) and rank(a) == 2 and rank(b) == 2")


def products() -> taso.Graph:
    graph = taso.new_graph()
    x = graph.new_input(dims=(2, 4))
    for _ in range(2):
        graph.matmul(x, graph.new_weight(dims=(4, 4)))
    return graph


def test_exact_extraction_shares_what_the_greedy_one_counts_twice() -> None:
    # two products cost 20, one with a split 11: as a tree each half of it costs 11, which is more than 10
    graph = products()
    start = priced(graph, MatMul=10.0, Split=1.0)
    exact = saturated(start, MERGED)
    greedy = saturated(priced(graph, MatMul=10.0, Split=1.0), MERGED, bounds=Bounds(exact=False))
    assert operators(greedy) == ["MatMul", "MatMul"] and greedy.path == ()
    assert operators(exact) == ["Concat", "MatMul", "Split"]
    assert exact.statistics.details["exact"] == "Optimal" and exact.statistics.details["gap"] == 0.0
    assert exact.best.cost == pytest.approx(11e-3, rel=1e-5)
    assert_equal(graph, start, exact)


@FEW
@given(SEEDS)
def test_the_sum_of_the_exact_extraction_lies_between_its_bound_and_the_greedy_one(seed: int) -> None:
    told = saturated(prepared(random_graph(random.Random(seed))), bounds=SMALL).statistics.details
    if "exact_sum_ms" not in told:
        return
    assert float(told["exact_sum_ms"]) <= float(told["greedy_sum_ms"]) * (1 + 1e-9)
    assert float(told["bound_ms"]) <= float(told["exact_sum_ms"]) * (1 + 1e-9)


def test_a_sum_counts_a_chain_as_the_one_kernel_that_it_becomes() -> None:
    graph = taso.new_graph()
    x = graph.new_input(dims=(64, 64))
    y = graph.add(graph.matmul(x, graph.new_weight(dims=(64, 64))), graph.new_weight(dims=(64,)))
    graph.tanh(graph.relu(graph.relu(y)))
    start = prepared(graph)
    outcome = saturated(start, by_id()["relu-twice"])
    told = outcome.statistics.details
    (anchor,) = outcome.best.kernel_costs
    assert len(outcome.best.group_of(anchor).nodes) == 4
    assert float(told["exact_sum_ms"]) == pytest.approx(outcome.best.cost * 1e3, rel=1e-9)


# ── cycles ───────────────────────────────────────────────────────────────────────────────────────────────────────


def test_rules_that_undo_each_other_leave_no_cycle_and_the_cheaper_side_is_taken() -> None:
    graph = taso.new_graph()
    x = graph.sigmoid(graph.new_input(dims=(4, 4)))
    for _ in range(2):
        x = graph.make(NEG, (x,)).output
    graph.tanh(x)
    rules = [rule("Neg(Neg(x)) => x"), rule("Tanh(x) => Neg(Tanh(Neg(x)))"), rule("Neg(Tanh(Neg(x))) => Tanh(x)")]
    start = prepared(graph)
    egraph = grown(start, *rules)
    assert egraph.filtered and not egraph._cycles()
    outcome = saturated(start, *rules)
    assert operators(outcome) == ["Sigmoid", "Tanh"]
    assert_equal(graph, start, outcome)


def test_products_that_depend_on_each_other_are_not_merged_into_a_cycle() -> None:
    # both read x, and what the second one reads besides depends on the first
    graph = taso.new_graph()
    x = graph.new_input(dims=(4, 4))
    graph.matmul(x, graph.tanh(graph.matmul(x, graph.new_weight(dims=(4, 4)))))
    loose = rule(MERGE + " where rank(a) == 2 and rank(b) == 2 and rank(x) == 2")
    start = priced(graph, MatMul=10.0, Split=0.1, Concat=0.1)
    egraph = grown(start, loose)
    assert not egraph._cycles()
    outcome = saturated(start, loose)
    assert outcome.statistics.refused > 0
    assert "Split" not in operators(outcome)
    assert_equal(graph, start, outcome)


@FEW
@given(SEEDS)
def test_after_growing_no_class_depends_on_itself_and_none_of_the_start_is_lost(seed: int) -> None:
    start = prepared(random_graph(random.Random(seed)))
    egraph = grown(start, bounds=SMALL)
    assert egraph._cycles() == []
    homes = egraph.homes()
    assert all(egraph.find(c) in homes for c in start.state.graph_outputs)
    place = {c: i for i, c in enumerate(homes)}
    for value, node in homes.items():
        assert all(place[c] < place[value] for c in egraph.operands(node))
    for node, classes in egraph.nodes.items():
        assert all(egraph.find(c) == c for c in (*classes, *egraph.operands(node)))


# ── limits ───────────────────────────────────────────────────────────────────────────────────────────────────────


def test_rules_of_several_outputs_apply_in_the_first_iterations_only() -> None:
    graph = products()
    for several, merged in ((0, False), (1, True)):
        outcome = saturated(
            priced(graph, MatMul=10.0, Split=1.0), MERGED, bounds=Bounds(several=several)
        )
        assert ("Split" in operators(outcome)) == merged


def test_an_endless_rule_stops_at_the_bound_of_nodes_and_at_that_of_iterations() -> None:
    graph = taso.new_graph()
    graph.tanh(graph.new_input(dims=(4, 4)))
    grow = rule("Tanh(x) => Tanh(Neg(Neg(x)))")
    for bounds, reason in ((Bounds(nodes=5, iterations=99), "nodes"), (Bounds(iterations=3), "iterations")):
        told = saturated(prepared(graph), grow, bounds=bounds, budget=1000).statistics
        assert told.details["ended_by"] == reason
        assert float(told.details["nodes"]) <= 12 and told.expanded <= 10
    # one class stands for all that this rule makes, and what reads its own class is of no use: nothing is left to grow
    again = saturated(prepared(graph), rule("Tanh(x) => Tanh(Tanh(x))"))
    assert again.statistics.details["ended_by"] == "saturated" and again.path == ()


def test_without_the_solver_the_greedy_graph_comes_back_and_the_report_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, formula_backend: FormulaBackend
) -> None:
    monkeypatch.setattr(integer, "solver", lambda: None)
    graph = taso.new_graph()
    graph.relu(graph.relu(graph.new_input(dims=(64, 64))))
    report = taso.optimize(graph, search="saturation", backend=formula_backend, never_slower=False).report
    assert report.changed and "needs the package highspy" in report.summary()


def test_a_graph_that_computes_nothing_at_run_time_is_left_as_it_is() -> None:
    graph = taso.new_graph()
    graph.new_input(dims=(2, 2))
    graph.set_outputs([("y", graph.tanh(graph.new_weight(dims=(2, 2))))])
    outcome = saturated(prepared(graph))
    assert outcome.path == () and outcome.statistics.stopped == ""


def test_a_solver_that_has_no_time_leaves_the_best_that_is_known() -> None:
    start = prepared(products())
    outcome = saturated(start, bounds=Bounds(seconds=0.0))
    assert outcome.best.cost <= start.state.cost
    assert "time" in str(outcome.statistics.details["exact"]).lower()


def test_matching_in_an_e_graph_finds_all_that_matching_in_the_state_finds() -> None:
    for seed in range(3):
        start = prepared(planted_graph(random.Random(seed)))
        search = Saturation(start.state, Matcher(library()), Limits(), bounds=Bounds(matches=1 << 30))
        search._looks = 1 << 30
        found = {(m.rule.name, frozenset(m.nodes)) for _, m in search._matches(EGraph(start.state), True)}
        wanted = {(m.rule.name, frozenset(m.nodes)) for m in Matcher(library()).find_all(start.state)}
        assert found == wanted


def test_matches_beyond_the_bound_of_an_iteration_are_found_in_the_next() -> None:
    graph = taso.new_graph()
    x = graph.new_input(dims=(4, 8))
    for _ in range(6):
        graph.matmul(x, graph.new_weight(dims=(8, 8)))
    merge = rule("""MatMul(x, a) | MatMul(x, b) => Split(MatMul(x, Concat(a, b, axis=1)), axis=1,
        split=(dim(a, 1), dim(b, 1)))
        where is_weight(a) and is_weight(b) and rank(a) == 2 and rank(b) == 2 and rank(x) == 2""")
    found = []
    for matches in (2, 1000):
        start = prepared(graph)
        egraph = EGraph(start.state)
        search = Saturation(start.state, Matcher([merge]), Limits(), bounds=Bounds(matches=matches))
        search._looks = 1000
        found.append({m.nodes for _ in range(20) for _, m in search._matches(egraph, True)})
    assert found[0] == found[1] and len(found[1]) == 15


def test_without_time_to_cost_its_kernels_no_graph_is_taken_out_of_an_e_graph() -> None:
    costed = []

    class Slow(FormulaBackend):
        def measure(self, kernel: Kernel) -> float:
            costed.append(kernel)
            return super().measure(kernel)

    start = prepared(products(), Slow())
    costed.clear()
    extractor = Extractor(EGraph(start.state), Limits(), lambda: 0.0)
    assert list(extractor.run(1.0, 1000)) == [] and not costed
    assert "time was up" in str(extractor.told["greedy"])
    assert list(Extractor(EGraph(start.state), Limits(), lambda: None).run(None, 1000))
