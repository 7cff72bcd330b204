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
# The pseudo-code goes on with Exp 12, which was queued when the best was 10. Here the search ends: α × best is 10 by
# now, and a graph that would not be queued any more is not taken either.
ORDER = ["Abs", "Neg", "Sigmoid", "Relu", "Softplus"]


class Recording(Backtracking):
    """Notes the graphs that are expanded, in order."""

    def __init__(self, state: State, limits: Limits) -> None:
        rules = [rule(f"{a}(x) => {b}(x)") for a, b in EDGES]
        super().__init__(state, Matcher(rules), limits)
        self.order: list[str] = []

    def _expand(self) -> bool:
        if self.opened is not None:
            state = self.opened.position.state
            self.order += [state.op(n).name for n in state.made if state.op(n).name != "Input"]
        return super()._expand()


def run(alpha: float, budget: int = 100) -> tuple[list[str], str]:
    graph = taso.new_graph()
    graph.make(ABS, (graph.new_input(dims=(4, 4)),))
    state = prepare(graph, Settings(Priced(**PRICES), (), database())).state
    search = Recording(state, Limits(alpha, budget))
    best = search.run().best
    return search.order, next(best.op(n).name for n in best.made if best.op(n).name != "Input")


def test_graphs_are_expanded_in_the_order_of_algorithm_2() -> None:
    assert run(1.25) == (ORDER, "Relu")


@pytest.mark.parametrize("budget", range(6))
def test_the_budget_cuts_that_order_off(budget: int) -> None:
    best = ["Abs", "Neg", "Neg", "Relu", "Relu", "Relu"][budget]
    assert run(1.25, budget) == (ORDER[:budget], best)


@pytest.mark.parametrize(
    "alpha, order, best",
    [
        # Sigmoid 11 is not below 9: the search is stuck
        (1.0, ["Abs", "Neg"], "Neg"),
        # 11 < 1.23 × 9; then Softplus 9.9 is not below 1.23 × 8
        (1.23, ["Abs", "Neg", "Sigmoid", "Relu"], "Relu"),
        # Sqrt 10.5 < 1.51 × 8; so is Exp 12 when its turn comes, and Log 7 is behind it
        (1.51, ["Abs", "Neg", "Sigmoid", "Relu", "Softplus", "Sqrt", "Exp", "Log"], "Log"),
    ],
)
def test_alpha_decides_which_dearer_graphs_are_passed_through(alpha: float, order: list[str], best: str) -> None:
    assert run(alpha) == (order, best)
