"""The backtracking against algorithm 2 of the TASO paper (SOSP 2019, section 5), on a case worked out by hand."""

from __future__ import annotations

import pytest
from searching import database, rule
from test_saturation import Priced

import taso
from taso.graph.ops.elementwise import ABS
from taso.rules.matcher import Matcher
from taso.search.backtracking import Backtracking, Limits
from taso.search.optimize import Settings, prepare
from taso.search.state import State

# Every graph is one operator on the input, so that a rule is an edge between graphs. Milliseconds:
PRICES = {
    "Abs": 10.0, "Exp": 12.0, "Tanh": 13.0, "Neg": 9.0, "Sigmoid": 11.0, "Relu": 8.0, "Softplus": 9.9, "Sqrt": 10.5,
    "Log": 7.0,
}  # fmt: skip
EDGES = (
    ("Abs", "Exp"), ("Abs", "Tanh"), ("Abs", "Neg"), ("Neg", "Sigmoid"), ("Neg", "Abs"), ("Sigmoid", "Relu"),
    ("Relu", "Softplus"), ("Softplus", "Sqrt"), ("Exp", "Log"),
)  # fmt: skip

# By hand, with α = 1.25 ("queue" is what waits, cheapest first; what is not below α × best is not queued):
#   take Abs 10      best 10     Exp 12 < 12.5 queued; Tanh 13 is not; Neg 9 is the best, queued; queue Neg, Exp
#   take Neg 9       best 9      Sigmoid 11 < 11.25 queued; Abs was seen; queue Sigmoid, Exp
#   take Sigmoid 11  best 9      Relu 8 is the best, queued; queue Relu, Exp
#   take Relu 8      best 8      Softplus 9.9 < 10 queued; queue Softplus, Exp
#   take Softplus    best 8      Sqrt 10.5 is not below 10; queue Exp
#   take Exp 12      best 8      Log 7 is the best, queued: Exp was queued when the best was 10, and stays there
#   take Log 7       best 7      nothing
ORDER = ["Abs", "Neg", "Sigmoid", "Relu", "Softplus", "Exp", "Log"]


class Recording(Backtracking):
    """Notes the graphs that are expanded, in order."""

    def __init__(self, state: State, limits: Limits, thorough: bool) -> None:
        rules = [rule(f"{a}(x) => {b}(x)") for a, b in EDGES]
        super().__init__(state, Matcher(rules), limits, thorough=thorough)
        self.order: list[str] = []

    def _expand(self) -> bool:
        if self.opened is not None:
            state = self.opened.position.state
            self.order += [state.op(n).name for n in state.made if state.op(n).name != "Input"]
        return super()._expand()


def run(alpha: float, budget: int = 100, thorough: bool = True) -> tuple[list[str], str]:
    graph = taso.new_graph()
    graph.make(ABS, (graph.new_input(dims=(4, 4)),))
    state = prepare(graph, Settings(Priced(**PRICES), (), database())).state
    search = Recording(state, Limits(alpha, budget), thorough)
    best = search.run().best
    return search.order, next(best.op(n).name for n in best.made if best.op(n).name != "Input")


def test_graphs_are_expanded_in_the_order_of_algorithm_2() -> None:
    assert run(1.25) == (ORDER, "Log")


@pytest.mark.parametrize("budget", range(8))
def test_the_budget_cuts_that_order_off(budget: int) -> None:
    best = ["Abs", "Neg", "Neg", "Relu", "Relu", "Relu", "Log", "Log"][budget]
    assert run(1.25, budget) == (ORDER[:budget], best)


@pytest.mark.parametrize(
    "alpha, order, best",
    [
        # Sigmoid 11 is not below 9: the search is stuck
        (1.0, ["Abs", "Neg"], "Neg"),
        # 11 < 1.23 × 9; then Softplus 9.9 is not below 1.23 × 8
        (1.23, ["Abs", "Neg", "Sigmoid", "Relu", "Exp", "Log"], "Log"),
        # Sqrt 10.5 < 1.51 × 8
        (1.51, ["Abs", "Neg", "Sigmoid", "Relu", "Softplus", "Sqrt", "Exp", "Log", "Tanh"], "Log"),
    ],
)
def test_alpha_decides_which_dearer_graphs_are_passed_through(alpha: float, order: list[str], best: str) -> None:
    assert run(alpha) == (order, best)


def test_a_search_that_is_not_thorough_ends_where_nothing_below_the_bound_is_left() -> None:
    # α × best is 10 when Exp 12 has its turn
    assert run(1.25, thorough=False) == (ORDER[:5], "Relu")
    # 12 < 1.51 × 8, and 13 is not below 1.51 × 7
    order, best = run(1.51)
    assert run(1.51, thorough=False) == (order[:-1], best)
