"""The exact plan is the cheapest there is, computes the same, and is asked for nothing that it cannot do."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
import pytest
from hypothesis import given
from searching import FUZZ, SEEDS, FormulaBackend, by_id, database, random_graph, random_inputs

import taso
from taso.backends.lowering import BLOCKED, LAST, PLAIN, Choices, Fusion, Kernel, Layouts, Lowering, lower, structure
from taso.backends.onednn.library import library
from taso.backends.select import get_backend
from taso.graph.errors import BackendUnavailable
from taso.graph.evaluate import evaluate_graph
from taso.graph.graph import Node
from taso.graph.onnx_shapes import freeze
from taso.graph.types import DType, SymDim, TensorType
from taso.search import integer
from taso.search import optimize as search
from taso.search.costs import CostModel, PlannedCosts, anchor_alone, with_channels_last
from taso.search.planning import _Option, _Planner, cost_of, plan
from taso.search.settings import Settings
from taso.search.verify import relative_error

try:
    library()
    _MISSING = ""
except BackendUnavailable as error:
    _MISSING = str(error)

needs_library = pytest.mark.skipif(bool(_MISSING), reason=_MISSING or "oneDNN loads")
needs_solver = pytest.mark.skipif(not integer.available(), reason="highspy is not installed")


@dataclass
class DrawnBackend(FormulaBackend):
    """Costs drawn at random, the same for kernels that do the same: nothing about a plan is likely beforehand."""

    seed: int = 0
    lowering: Lowering = field(default_factory=lambda: Lowering(Layouts(16), Fusion()))

    def measure(self, kernel: Kernel) -> float:
        one_name = [replace(o, layout=self.lowering.layouts.canonical(o.type, o.layout)) for o in kernel.operands]
        key = replace(kernel, operands=tuple(one_name)).key
        return random.Random(f"{self.seed} {key}").uniform(1e-6, 1e-4)


def planner(graph: taso.Graph, seed: int = 0) -> _Planner:
    backend = DrawnBackend(seed)
    return _Planner(graph, backend.lowering, CostModel(backend, database()))


def covers(options: Sequence[_Option], nodes: Sequence[Node]) -> Iterator[list[_Option]]:
    """All ways to have each node in one kernel."""
    if not nodes:
        yield []
        return
    first = nodes[0]
    for option in options:
        if first in option.group.nodes and set(option.group.nodes) <= set(nodes):
            rest = [n for n in nodes if n not in option.group.nodes]
            yield from ([option, *others] for others in covers(options, rest))


def small(seed: int) -> taso.Graph:
    """Some convolutions, sums and pools of 16 channels, so that every layout is one."""
    chance, graph = random.Random(seed), taso.new_graph()
    values = [graph.new_input(dims=(1, 16, 6, 6))]
    for number in range(4):
        x = chance.choice(values)
        kind = chance.choice(("conv", "add", "relu", "pool", "concat"))
        if kind == "conv" or kind == "add" and len(values) < 2:
            weight = graph.new_weight(dims=(16, x.dim(1), 3, 3), data=np.full((16, x.dim(1), 3, 3), number + 1.0))
            y = graph.conv2d(input=x, weight=weight, strides=(1, 1), padding="SAME")
        elif kind == "add":
            y = graph.add(x, chance.choice([v for v in values if v.type == x.type]))
        elif kind == "pool":
            y = graph.maxpool2d(x, kernels=(3, 3), strides=(1, 1), padding="SAME")
        elif kind == "concat":
            y = graph.concat(1, [x, values[0]])
        else:
            y = graph.relu(x)
        values.append(y)
    return graph


@needs_solver
@pytest.mark.parametrize("seed", range(40))
def test_no_choice_of_kernels_and_layouts_is_cheaper_than_the_plan(seed: int) -> None:
    graph = small(seed)
    made = planner(graph, seed)
    ways = [made.cost(way) for way in covers(made._options(), graph.run_time_nodes)]
    found = made.best()
    assert found is not None and len(ways) > 1
    # the solver stops within 1e-3 µs of the best
    assert made.cost(found) == pytest.approx(min(ways), rel=1e-4)
    assert made.cost(found) <= made.cost(made.local()) * (1 + 1e-6)


@needs_solver
def test_a_cost_that_is_told_wrong_is_noticed_by_the_comparison_with_all_ways() -> None:
    graph, wrong = small(3), 0
    for seed in range(20):
        made = planner(graph, seed)
        options = made._options()
        best = min(made.cost(way) for way in covers(options, graph.run_time_nodes))
        turned = [replace(o, cost=1e-4 - o.cost) for o in options]
        made._options = partial(list, turned)  # type: ignore[method-assign]
        found = made.best()
        true = {(o.group, o.layouts): o for o in options}
        wrong += found is not None and made.cost([true[o.group, o.layouts] for o in found]) > best * 1.001
    assert wrong >= 5


@needs_solver
@FUZZ
@given(SEEDS)
def test_the_plan_of_a_random_graph_costs_what_lowering_by_it_costs(seed: int) -> None:
    graph = random_graph(random.Random(seed), 8)
    backend = DrawnBackend(seed)
    costs = CostModel(backend, database())
    found = plan(graph, backend.lowering, costs)
    assert found.cost <= found.local_cost * (1 + 1e-9)
    assert cost_of(graph, backend.lowering, costs, found.choices) == pytest.approx(found.cost, rel=1e-9)
    assert cost_of(graph, backend.lowering, costs, None) == pytest.approx(found.local_cost, rel=1e-9)


def chosen_at_random(graph: taso.Graph, lowering: Lowering, seed: int) -> Choices:
    """A plan that nobody would choose."""
    backend = DrawnBackend(seed)
    made = _Planner(graph, lowering, CostModel(backend, database()))
    chance, left = random.Random(seed), graph.run_time_nodes
    taken: list[_Option] = []
    options = made._options()
    while left:
        fitting = [o for o in options if left[0] in o.group.nodes and set(o.group.nodes) <= set(left)]
        taken.append(chance.choice(fitting))
        left = [n for n in left if n not in taken[-1].group.nodes]
    return made.choices(taken)


@needs_library
@FUZZ
@given(SEEDS)
def test_whatever_is_chosen_the_outputs_are_the_same(seed: int) -> None:
    graph = random_graph(random.Random(seed), 8)
    backend = get_backend("onednn")
    planned = copy.copy(graph)
    planned.plans[backend.name] = chosen_at_random(graph, backend.lowering, seed)
    feeds = random_inputs(graph, seed)
    expected = evaluate_graph(graph, feeds, wide=True)
    found = backend.compile(planned)(feeds)
    for name, value in expected.items():
        # what cancels out is 0 in the one and a rounding in the other
        cancelled = np.abs(value).max(initial=0) < 1e-6 and np.abs(found[name]).max(initial=0) < 1e-6
        assert cancelled or relative_error(found[name], value) < 1e-4


@needs_library
@pytest.mark.parametrize("seed", range(12))
def test_what_was_chosen_at_one_size_is_right_at_others(seed: int) -> None:
    graph = taso.Graph()
    n = SymDim.named("n")
    x = graph.add_input("x", TensorType(DType.FLOAT, (n, 16, 8, 8)))
    y = graph.add_input("y", TensorType(DType.FLOAT, (1, 16, 8, 8)))
    weight = graph.new_weight(dims=(16, 16, 3, 3), data=np.random.default_rng(0).normal(size=(16, 16, 3, 3)))
    # at n = 1 the sum could run behind either of its parts
    a = graph.conv2d(input=x, weight=weight, strides=(1, 1), padding="SAME")
    b = graph.relu(y)
    graph.relu(graph.add(a, b))
    backend = get_backend("onednn")
    at_one = freeze(graph, {"n": 1}, {})
    graph.plans[backend.name] = chosen_at_random(at_one, backend.lowering, seed)
    program = backend.compile(graph)
    for size in (1, 3):
        rng = np.random.default_rng(size)
        feeds = {k: rng.normal(size=(m, 16, 8, 8)).astype(np.float32) for k, m in (("x", size), ("y", 1))}
        expected = evaluate_graph(graph, feeds, wide=True)
        for name, value in program(feeds).items():
            assert relative_error(value, expected[name]) < 1e-5


def test_choices_for_another_graph_are_left_aside() -> None:
    graph, lowering = small(1), Lowering(Layouts(16), Fusion())
    other = Choices(("Input",), {(0, 0): LAST}, {0: 0}, {0: "winograd"})
    assert lower(graph, lowering, other) == lower(graph, lowering)


def test_choices_that_ask_for_what_is_not_possible_are_left_aside() -> None:
    graph = taso.new_graph()
    product = graph.matmul(graph.new_input(dims=(4, 8)), graph.new_weight(dims=(8, 4)))
    graph.add(product, graph.tanh(product))
    names = tuple(n.op.name for n in graph.nodes)
    lowering = Lowering(Layouts(16), Fusion())
    place = names.index("Tanh")
    # the product has two readers, so that nothing is fused with it, and no layout but the plain one
    wild = Choices(structure(graph), {(names.index("MatMul"), 0): LAST}, {place: 0})
    found = lower(graph, lowering, wild)
    assert set(found.layouts.values()) == {PLAIN}
    assert sorted(len(j.kernel.steps) for j in found.jobs) == sorted(len(j.kernel.steps) for j in lower(
        graph, lowering).jobs)  # fmt: skip


def test_a_layout_that_the_anchor_of_a_kernel_cannot_work_in_is_left_aside() -> None:
    graph = taso.new_graph()
    x, weight = graph.new_input(dims=(1, 10, 6, 6)), graph.new_weight(dims=(10, 10, 3, 3))
    graph.relu(graph.conv2d(input=x, weight=weight, strides=(1, 1), padding="SAME"))
    lowering = Lowering(Layouts(16), Fusion())
    place = [n.op.name for n in graph.nodes].index("Relu")
    local = lower(graph, lowering)
    # ten channels are no whole block, though a Relu alone could lie in blocks
    for layout in (BLOCKED, PLAIN):
        assert lower(graph, lowering, Choices(structure(graph), {(place, 0): layout}, {place: 0})) == local


def test_choices_do_not_fit_a_graph_of_the_same_operators_in_another_order_of_reading() -> None:
    graphs = []
    for left in (True, False):
        graph = taso.new_graph()
        a, b, c = (graph.new_input(dims=(8, 8)) for _ in range(3))
        graph.matmul(graph.matmul(a, b), c) if left else graph.matmul(a, graph.matmul(b, c))
        graphs.append(graph)
    assert Choices(structure(graphs[0])).fits(graphs[0]) and not Choices(structure(graphs[0])).fits(graphs[1])


def test_without_the_solver_the_local_rule_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(integer, "solver", lambda: None)
    backend = DrawnBackend(0)
    found = plan(small(0), backend.lowering, CostModel(backend, database()))
    assert found.choices is None and found.cost == found.local_cost


class TwoWays(DrawnBackend):
    """A backend that knows a second way to compute a convolution, which takes half as long."""

    def __init__(self) -> None:
        super().__init__()
        self.lowering = Lowering(Layouts(16), Fusion(), _another)

    def measure(self, kernel: Kernel) -> float:
        usual = 1e3 * super().measure(replace(kernel, algorithm=""))
        return usual / 2 if kernel.algorithm else usual


def _another(kernel: Kernel) -> tuple[str, ...]:
    return ("another",) if kernel.anchor is not None and kernel.anchor.op.name == "Conv" else ()


def convolution() -> taso.Graph:
    graph = taso.new_graph()
    x, weight = graph.new_input(dims=(1, 16, 6, 6)), graph.new_weight(dims=(16, 16, 3, 3))
    graph.conv2d(input=x, weight=weight, strides=(1, 1), padding="SAME")
    return graph


@pytest.mark.parametrize("solver", [True, False])
def test_the_cheapest_algorithm_is_chosen_with_and_without_the_solver(
    solver: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not solver:
        monkeypatch.setattr(integer, "solver", lambda: None)
    backend, graph = TwoWays(), convolution()
    found = plan(graph, backend.lowering, CostModel(backend, database(), algorithms=True))
    assert found.choices is not None and list(found.choices.algorithms.values()) == ["another"]
    assert found.cost < found.local_cost
    jobs = lower(graph, backend.lowering, found.choices).jobs
    assert [j.kernel.algorithm for j in jobs] == ["another"]


def test_no_other_algorithm_is_tried_for_a_kernel_that_takes_next_to_no_time() -> None:
    tried: list[str] = []

    class Quick(TwoWays):
        def measure(self, kernel: Kernel) -> float:
            tried.append(kernel.algorithm)
            return super().measure(kernel) * 1e-6

    backend = Quick()
    found = plan(convolution(), backend.lowering, CostModel(backend, database(), algorithms=True))
    assert tried and not any(tried) and (found.choices is None or not found.choices.algorithms)


def test_no_other_algorithm_is_chosen_where_none_may_be() -> None:
    backend = TwoWays()
    found = plan(convolution(), backend.lowering, CostModel(backend, database()))
    assert found.choices is None or not found.choices.algorithms


# ── what a search expects of plans ───────────────────────────────────────────────────────────────────────────────


class LastIsQuick(DrawnBackend):
    """A second way to compute a convolution, where channels are last: it takes a tenth. All is counted."""

    plans = True

    def __init__(self) -> None:
        super().__init__()
        self.lowering = Lowering(Layouts(16), Fusion(), _where_last)
        self.asked: list[Kernel] = []

    def measure(self, kernel: Kernel) -> float:
        self.asked.append(kernel)
        anchor = next(iter(kernel.steps), None)
        usual = 1e-3 * (1 + len(kernel.steps)) if anchor is not None and anchor.op.name == "Conv" else 1e-5
        return usual / 10 if kernel.algorithm else usual


def _where_last(kernel: Kernel) -> tuple[str, ...]:
    conv = kernel.anchor is not None and kernel.anchor.op.name == "Conv"
    return ("last",) if conv and {o.layout for o in (kernel.operands[0], *kernel.results)} == {LAST} else ()


def with_steps(*behind: str) -> taso.Graph:
    graph = taso.new_graph()
    # more channels than a block: of one block they are last
    x, weight = graph.new_input(dims=(1, 32, 6, 6)), graph.new_weight(dims=(32, 32, 3, 3))
    value = graph.conv2d(input=x, weight=weight, strides=(1, 1), padding="SAME")
    for name in behind:
        other = graph.new_input(dims=(1, 32, 6, 6))
        value = graph.add(value, other) if name == "add" else getattr(graph, name)(value)
    graph.set_outputs([("y", value)])
    return graph


def kernel_of(graph: taso.Graph, backend: LastIsQuick) -> Kernel:
    return next(j.kernel for j in lower(graph, backend.lowering).jobs if j.kernel.anchor is not None)


def test_a_search_costs_kernels_by_the_best_way_of_their_anchors() -> None:
    backend = LastIsQuick()
    costs = PlannedCosts(CostModel(backend, database(), algorithms=True))
    kernels = [kernel_of(with_steps(*steps), backend) for steps in ((), ("relu",), ("add", "relu"))]
    assert [len(k.steps) for k in kernels] == [1, 2, 3]
    for kernel in kernels:
        assert costs.kernel(kernel) == pytest.approx(backend.measure(kernel) / 10)
    ways = [k for k in backend.asked if k.algorithm]
    assert len(ways) == 1 and len(ways[0].steps) == 1, "measured once for all that stands behind it"
    graph = taso.new_graph()
    graph.relu(graph.new_input(dims=(1, 32, 6, 6)))
    assert costs.kernel(kernel_of(graph, backend)) == 1e-5


def test_an_anchor_alone_reads_what_it_computes_from_alone() -> None:
    backend = LastIsQuick()
    whole = kernel_of(with_steps("add", "relu"), backend)
    alone = anchor_alone(whole)
    assert alone == kernel_of(with_steps(), backend) and anchor_alone(alone) == alone
    assert anchor_alone(replace(whole, algorithm="last")) is None
    assert anchor_alone(replace(whole, steps=())) is None
    last = with_channels_last(whole)
    assert {o.layout for o in (last.operands[0], *last.results)} == {LAST}


def test_a_report_tells_what_the_original_costs_as_it_runs_and_the_result_by_its_plan() -> None:
    backend, graph = LastIsQuick(), with_steps("relu", "relu")
    settings = Settings(backend, [by_id()["drop-transpose"]], database())
    usual = search.cost(graph, settings)
    prepared = search.prepare(graph, settings, planned=True)
    assert prepared.usual == pytest.approx(usual, rel=1e-3) and prepared.state.cost < usual / 5
    best, report = search.optimize(graph, settings)
    assert report.cost_before == pytest.approx(usual * 1e3, rel=1e-3)
    assert report.cost_after == pytest.approx(search.cost(best, settings) * 1e3, rel=1e-3) and best.plans


@pytest.mark.parametrize("more, used", [({}, True), ({"plan": False}, False), ({"algorithms": False}, False)])
def test_a_search_expects_plans_where_they_are_made(
    more: dict[str, bool], used: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[CostModel] = []
    monkeypatch.setattr(search, "PlannedCosts", lambda model: made.append(model) or PlannedCosts(model))
    search.optimize(with_steps("relu"), Settings(LastIsQuick(), [by_id()["drop-transpose"]], database(), **more))
    assert bool(made) == used


def test_a_plan_moves_along_with_copies_of_its_graph() -> None:
    graph = small(2)
    graph.plans["formula"] = Choices(structure(graph))
    taken = copy.copy(graph)
    taken.plans["other"] = "theirs"
    assert "other" not in graph.plans and taken.plans["formula"] is graph.plans["formula"]
    assert freeze(graph, {}, {}).plans == graph.plans
