"""The search itself: its limits, its course, and that the best so far always comes back."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from searching import FormulaBackend, by_id, database, prepared, random_inputs, rule

import taso
from taso.backends.lowering import Kernel
from taso.graph.errors import BackendError, RuleError, SearchError, TasoError
from taso.graph.evaluate import evaluate_graph
from taso.rules.collection import library
from taso.rules.matcher import Match, Matcher
from taso.search import decision
from taso.search import optimize as search
from taso.search.backtracking import Limits, Outcome, backtrack
from taso.search.costs import PENALTY
from taso.search.optimize import Settings
from taso.search.verify import relative_error

ROOT = Path(__file__).parents[2]


def redundant(layers: int = 6) -> taso.Graph:
    """Each layer holds a transposition and an addition that change nothing."""
    graph = taso.new_graph()
    x = graph.new_input(dims=(8, 8))
    for _ in range(layers):
        x = graph.tanh(graph.add(graph.transpose(x, (0, 1)), graph.new_weight(dims=(8, 8), data=np.zeros((8, 8)))))
    return graph


def optimized(graph: taso.Graph, backend: object, **settings: object) -> taso.Graph:
    given = {"backend": backend, "never_slower": False, **settings}
    return taso.optimize(graph, **given)  # type: ignore[arg-type]  # settings of optimize


def searched(graph: taso.Graph, backend: FormulaBackend | None = None, **limits: object) -> Outcome:
    state = prepared(graph, backend).state
    return backtrack(state, Matcher(library()), Limits(**limits))  # type: ignore[arg-type]  # limits of the search


def assert_same_outputs(graph: taso.Graph, other: taso.Graph) -> None:
    feeds = random_inputs(graph)
    for name, value in evaluate_graph(graph, feeds, wide=True).items():
        assert relative_error(evaluate_graph(other, feeds, wide=True)[name], value) <= 1e-5


# ── limits ───────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_budget_of_zero_gives_the_original_back(formula_backend: FormulaBackend) -> None:
    graph = redundant()
    best = optimized(graph, formula_backend, budget=0)
    assert best.report.expanded == best.report.candidates == 0 and not best.report.changed
    assert "budget is 0" in best.report.decision
    exported = [taso.export_onnx(g).SerializeToString(deterministic=True) for g in (graph, best)]
    assert exported[0] == exported[1]


@pytest.mark.parametrize(
    "settings, word",
    [
        ({"budget": -1}, "budget"), ({"budget": 1.5}, "budget"), ({"budget": "many"}, "budget"),
        ({"alpha": 0.99}, "alpha"), ({"alpha": float("nan")}, "alpha"),
        ({"alpha": "1.05"}, "alpha"), ({"time_limit": -1}, "time limit"),
        ({"time_limit": "soon"}, "time limit"), ({"backend": "cuda!"}, "cuda!"),
        ({"exactness": ["close"]}, "close"), ({"exactness": "exactly"}, "exactness"),
        ({"rules": "/nowhere/at/all.pb"}, "/nowhere/at/all.pb"), ({"input_shapes": {"nobody": (1,)}}, "nobody"),
        ({"input_shapes": {"input": (8,)}}, "dimensions"), ({"input_shapes": {"input": (8, 9)}}, "dimension of 8"),
    ],
)  # fmt: skip
def test_a_setting_that_makes_no_sense_is_one_sentence(
    settings: dict[str, object], word: str, formula_backend: FormulaBackend
) -> None:
    given = {"backend": formula_backend, **settings}
    with pytest.raises(TasoError, match=word) as caught:
        taso.optimize(redundant(1), **given)  # type: ignore[arg-type]  # wrong on purpose
    assert "\n" not in str(caught.value)


def test_the_budget_bounds_the_graphs_that_are_expanded() -> None:
    for budget in (1, 2, 5):
        outcome = searched(redundant(), budget=budget, alpha=1.05)
        assert outcome.statistics.expanded == budget and outcome.statistics.stopped == "budget"


def test_more_budget_is_never_worse() -> None:
    costs = [searched(redundant(), budget=b).best.cost for b in (0, 1, 2, 4, 50)]
    assert costs == sorted(costs, reverse=True) and costs[-1] < costs[0]


def test_no_time_gives_the_original_and_says_so(formula_backend: FormulaBackend) -> None:
    best = optimized(redundant(), formula_backend, time_limit=0)
    assert not best.report.changed and best.report.stopped == "time limit"


def test_without_a_limit_the_search_stops_when_nothing_is_left() -> None:
    outcome = searched(redundant(3), budget=10_000)
    assert outcome.statistics.stopped == "" and outcome.statistics.expanded < 10_000
    assert [n for n in outcome.best.made if outcome.best.op(n).name == "Transpose"] == []


def test_larger_alpha_lets_the_search_pass_through_dearer_graphs() -> None:
    # the sum is dearer than what it replaces, and its double cancels
    rules = [rule("Relu(x) => Relu(Tanh(x))", by_id()["relu-twice"].status), rule("Relu(Tanh(x)) => x")]
    graph = taso.new_graph()
    graph.sigmoid(graph.relu(graph.transpose(graph.new_input(dims=(256, 256)), (1, 0))))

    def cost(alpha: float) -> float:
        return backtrack(prepared(graph).state, Matcher(rules), Limits(alpha=alpha, budget=50)).best.cost

    assert cost(10.0) < cost(1.0)


def test_a_graph_may_grow_to_twice_its_size_and_no_further() -> None:
    grow = rule("Tanh(x) => Tanh(Neg(x))")
    graph = taso.new_graph()
    x = graph.new_input(dims=(4, 4))
    graph.sigmoid(graph.tanh(x))
    outcome = backtrack(prepared(graph).state, Matcher([grow]), Limits(alpha=1e6, budget=100))
    assert outcome.statistics.expanded <= 3


# ── what comes back when something goes wrong ────────────────────────────────────────────────────────────────────


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


def distinct(layers: int = 6) -> taso.Graph:
    """Layers of different sizes, each with a product of three matrices, so that each needs kernels of its own."""
    graph = taso.new_graph()
    x = graph.new_input(dims=(64, 32))
    for i in range(layers):
        for columns in (64 + i, 32 + i):
            x = graph.matmul(x, graph.new_weight(dims=(x.dim(1), columns)))
        x = graph.tanh(x)
    return graph


def test_an_interrupt_in_the_middle_gives_the_best_so_far() -> None:
    full = optimized(distinct(), FormulaBackend())
    needed = Interrupting(10_000)
    optimized(distinct(), needed)
    count, found = 10_000 - needed.left, set()
    for after in range(count):
        graph = distinct()
        best = optimized(graph, Interrupting(after))
        assert_same_outputs(graph, best)
        assert best.report.cost_after <= best.report.cost_before
        if best.report.cost_before:
            drawn = "interrupted before the graphs were drawn" in best.report.messages
            assert best.report.stopped == "interrupted" or drawn
        else:
            assert "interrupted" in best.report.decision
        found.add(len(best.report.rewrites))
    assert 0 in found and max(found) > 0 and len(full.report.rewrites) >= max(found)


def test_an_interrupt_while_matches_are_looked_for_gives_the_best_so_far(monkeypatch: pytest.MonkeyPatch) -> None:
    found_at, calls = Matcher.find_at, iter(range(100))

    def interrupted(self: Matcher, view: object, nodes: object) -> list[Match]:
        if next(calls) == 2:
            raise KeyboardInterrupt
        return found_at(self, view, nodes)  # type: ignore[arg-type]  # as it was called

    monkeypatch.setattr(Matcher, "find_at", interrupted)
    graph = redundant()
    best = optimized(graph, FormulaBackend())
    assert best.report.stopped == "interrupted" and best.report.changed
    assert_same_outputs(graph, best)


def test_an_interrupt_while_outputs_are_compared_gives_the_original_and_says_so(
    monkeypatch: pytest.MonkeyPatch, formula_backend: FormulaBackend
) -> None:
    def interrupted(*args: object, **settings: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(decision, "compare", interrupted)
    graph = redundant()
    best = optimized(graph, formula_backend)
    assert not best.report.changed and "interrupted" in best.report.decision
    assert len(best.operators) == len(graph.operators)


class Failing(FormulaBackend):
    """Cannot run a product of more than 100 columns."""

    def measure(self, kernel: Kernel) -> float:
        anchor = kernel.anchor
        if anchor is not None and anchor.op.name == "MatMul" and kernel.results[0].type.static_shape[-1] > 100:
            raise BackendError("this product is too wide")
        return super().measure(kernel)


def test_a_candidate_whose_kernel_cannot_run_is_passed_over_and_told() -> None:
    graph = taso.new_graph()
    x = graph.identity(graph.new_input(dims=(1, 64)))
    for _ in range(2):
        graph.matmul(x, graph.new_weight(dims=(64, 64)))
    for backend, merged in ((FormulaBackend(), True), (Failing(), False)):
        report = optimized(graph, backend).report
        taken = [r.identifier for r in report.rewrites]
        assert "drop-identity" in taken and ("merge-matmul" in taken) == merged
        assert any("too wide" in m for m in report.messages) == (not merged)
        assert report.cost_after < PENALTY


def test_an_error_in_carrying_a_match_out_passes_over_that_match(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = rule("Tanh(x) => Reshape(Tanh(x), shape=(7,))")
    graph = redundant(2)
    outcome = backtrack(prepared(graph).state, Matcher([broken, *library()]), Limits(budget=20))
    assert outcome.statistics.refused > 0
    assert outcome.path and all(taken.match.rule.name != broken.name for taken in outcome.path)


# ── what is told ─────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_course_of_the_best_cost_only_falls() -> None:
    course = searched(redundant()).statistics.course
    assert len(course) > 3
    assert all(a[0] <= b[0] and a[1] > b[1] for a, b in zip(course, course[1:], strict=False))


def test_two_ways_to_the_same_graph_meet() -> None:
    outcome = searched(redundant(), alpha=2.0, budget=30)
    assert outcome.statistics.duplicates > 10


class ByProducts(FormulaBackend):
    """Counts products alone, all alike but for a little that sums in another order differ by."""

    name = "by products"

    def measure(self, kernel: Kernel) -> float:
        return 0.1 if any(step.op.name == "MatMul" for step in kernel.steps) else 1e-15 / (1 + len(kernel.steps))


@pytest.mark.parametrize("seed", range(4))
def test_blocks_that_are_alike_are_rewritten_alike_and_share_the_weights_that_come_of_it(seed: int) -> None:
    graph = taso.new_graph()
    rng = np.random.default_rng(seed)
    weights = [graph.new_weight(dims=(8, 8), data=rng.standard_normal((8, 8), np.float32)) for _ in range(5)]
    x = graph.new_input(dims=(4, 8))
    for _ in range(3):
        parts = [graph.matmul(x, w) for w in weights]
        for part in parts[1:]:
            parts[0] = graph.tanh(graph.mul(parts[0], part))
        x = parts[0]
    merging = [r for r in library() if r.id == "merge-matmul"]
    assert len(merging) == 1
    state = prepared(graph, ByProducts()).state
    best = backtrack(state, Matcher(merging), Limits()).best
    found = [best.inputs(n)[1] for n in best.made if best.is_live(n) and best.op(n).name == "MatMul"]
    assert len(found) == 3 and len(set(found)) == 1


def test_print_subst_prints_the_equation_of_each_rewrite(
    capsys: pytest.CaptureFixture[str], formula_backend: FormulaBackend
) -> None:
    best = optimized(redundant(2), formula_backend, print_subst=True)
    assert capsys.readouterr().out.splitlines() == [r.rule for r in best.report.rewrites] != []


def test_a_search_whose_output_is_piped_is_silent(
    capfd: pytest.CaptureFixture[str], formula_backend: FormulaBackend
) -> None:
    optimized(redundant(2), formula_backend)
    assert capfd.readouterr() == ("", "")


def test_progress_is_told_of_every_candidate() -> None:
    told: list[tuple[int, float, float]] = []
    state = prepared(redundant()).state
    backtrack(
        state, Matcher(library()), Limits(budget=3), lambda s, before, best: told.append((s.candidates, before, best))
    )
    assert told and all(before == state.cost and best <= before for _, before, best in told)
    assert [t[0] for t in told] == sorted(t[0] for t in told)


# ── the same on every run ────────────────────────────────────────────────────────────────────────────────────────

PROGRAM = """
import hashlib, random, sys
sys.path[:0] = sys.argv[1:]
import taso, models
from searching import FormulaBackend, random_graph
backend = FormulaBackend()
graphs = [random_graph(random.Random(seed), 16) for seed in range(8)]
graphs.append(taso.load(models.seeded_light("squeezenet")))
for graph in graphs:
    for alpha in (1.0, 1.1):
        best = taso.optimize(graph, alpha, 15, backend=backend, never_slower=False, verify=False)
        exported = taso.export_onnx(best).SerializeToString()
        print(hashlib.sha256(exported).hexdigest(), best.report.candidates, [r.where for r in best.report.rewrites])
"""


def told_under(hash_seed: str) -> str:
    folders = [str(ROOT / "tests" / "graph"), str(ROOT / "tests" / "search"), str(ROOT)]
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *folders], capture_output=True, text=True, check=True, cwd=ROOT,
        env={**os.environ, "PYTHONHASHSEED": hash_seed},
    )  # fmt: skip
    return done.stdout


def test_the_result_is_the_same_bytes_whatever_the_hash_seed() -> None:
    first = told_under("1")
    assert len(first.splitlines()) == 18 and "[]" not in first.splitlines()[0]
    for seed in ("2", "31337"):
        assert told_under(seed) == first


def test_the_result_does_not_depend_on_what_was_optimized_before(formula_backend: FormulaBackend) -> None:
    def digest() -> str:
        best = optimized(distinct(), formula_backend)
        return hashlib.sha256(taso.export_onnx(best).SerializeToString()).hexdigest()

    alone = digest()
    optimized(redundant(), formula_backend)
    assert digest() == alone


# ── a rule that is false ─────────────────────────────────────────────────────────────────────────────────────────

FALSE = {
    "concat-order": (
        "MatMul(x, a) | MatMul(x, b) => "
        "Split(MatMul(x, Concat(b, a, axis=1)), axis=1, split=(dim(a, 1), dim(b, 1)))\n"
        " where is_weight(a) and is_weight(b)"
    ),
    "factor-dropped": "Mul(MatMul(x, w), c) => MatMul(x, w)\n where is_weight(c)",
    "branch-dropped": "Sub(MatMul(x, w), c) => MatMul(x, w)",
    "transposed": "Transpose(Transpose(x, perm=p), perm=q) => x",
}  # fmt: skip


def victim() -> taso.Graph:
    graph = taso.new_graph()
    x = graph.new_input(dims=(1, 6))
    left = graph.mul(graph.matmul(x, graph.new_weight(dims=(6, 8))), graph.new_weight(dims=(), data=np.float32(1.001)))
    right = graph.sub(x=graph.matmul(x, graph.new_weight(dims=(6, 8))), y=graph.new_input(dims=(1, 8)))
    turned = graph.transpose(graph.transpose(graph.new_input(dims=(3, 3, 3)), (1, 2, 0)), (1, 2, 0))
    both = [graph.matmul(graph.tanh(x), graph.new_weight(dims=(6, 8))) for _ in range(2)]
    graph.set_outputs([*zip("abcde", (left, right, graph.tanh(turned), *both), strict=True)])
    return graph


@pytest.mark.parametrize("name", FALSE)
def test_a_false_rule_admitted_by_force_fails_the_check_and_the_original_comes_back(name: str) -> None:
    graph = victim()
    settings = Settings(FormulaBackend(), [rule(FALSE[name])], database(), never_slower=False)
    settings.limits = Limits(alpha=2.0, budget=20)
    best, report = search.optimize(graph, settings)
    assert best is graph and report.verified is False and not report.changed
    assert "differs" in report.verification and "original graph" in report.decision
    settings.verify = False
    assert search.optimize(graph, settings)[0] is not graph


@pytest.mark.parametrize("name", FALSE)
def test_a_false_rule_does_not_pass_the_gate(name: str, formula_backend: FormulaBackend) -> None:
    with pytest.raises(RuleError, match="it is refuted"):
        optimized(victim(), formula_backend, rules=rule(FALSE[name]))


def test_limits_say_which_of_them_is_wrong() -> None:
    for wrong in ({"budget": -1}, {"alpha": 0.5}, {"time_limit": -2.0}):
        with pytest.raises(SearchError, match=next(iter(wrong)).replace("_", " ")):
            Limits(**wrong)  # type: ignore[arg-type]  # wrong on purpose
