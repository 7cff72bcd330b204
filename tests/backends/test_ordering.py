"""The order of execution: producers first, and no other order needs less memory where all can be gone through."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import permutations

import numpy as np
import pytest
from numpy.typing import NDArray

import taso
from taso.backends.lowering import Plan, lower
from taso.backends.onednn.backend import OneDNNBackend
from taso.backends.ordering import Schedule, ordered
from taso.backends.reference import ReferenceBackend

PLAIN_LOWERING = ReferenceBackend().lowering


def plan_of(graph: taso.Graph) -> Plan:
    return lower(graph, PLAIN_LOWERING)


def orders(plan: Plan) -> Iterator[tuple[int, ...]]:
    """All orders with producers first."""
    maker = {v: i for i, job in enumerate(plan.jobs) for v in job.results}
    needed = [{maker[v] for v in job.operands if v in maker} for job in plan.jobs]
    for order in permutations(range(len(plan.jobs))):
        if all(needed[job] <= set(order[:place]) for place, job in enumerate(order)):
            yield order


def wide_then_narrow() -> taso.Graph:
    """Four branches that grow wide and shrink again: one after the other holds one wide value, side by side four."""
    graph = taso.new_graph()
    x = graph.new_input(dims=(4, 8))
    wide = [graph.matmul(x, graph.new_weight(dims=(8, 512), data=drawn(8, 512, i))) for i in range(4)]
    thin = [graph.matmul(graph.tanh(w), graph.new_weight(dims=(512, 2), data=drawn(512, 2, 4))) for w in wide]
    total = thin[0]
    for value in thin[1:]:
        total = graph.add(total, value)
    return graph


def drawn(rows: int, columns: int, seed: int) -> NDArray[np.float32]:
    return np.random.default_rng(seed).standard_normal((rows, columns), np.float32) / rows


def random_graph(seed: int) -> taso.Graph:
    rng = random.Random(seed)
    graph = taso.new_graph()
    values = [graph.new_input(dims=(4, rng.choice((8, 64))))]
    for _ in range(rng.randint(4, 6)):
        value = rng.choice(values)
        kind = rng.choice(("grow", "split", "tanh", "concat"))
        width = value.type.static_shape[1]
        if kind == "grow":
            columns = rng.choice((8, 64))
            weight = graph.new_weight(dims=(width, columns), data=drawn(width, columns, seed))
            values.append(graph.matmul(value, weight))
        elif kind == "split":
            values += graph.split(value, 1, [width // 2, width - width // 2])
        elif kind == "tanh":
            values.append(graph.tanh(value))
        else:
            values.append(graph.concat(1, [value, rng.choice(values)]))
    return graph


@pytest.mark.parametrize("seed", range(40))
def test_no_order_of_a_small_graph_needs_less(seed: int) -> None:
    graph = random_graph(seed)
    plan = plan_of(graph)
    schedule = Schedule(graph, plan)
    possible = list(orders(plan))
    chosen = tuple(schedule.lowest())
    assert chosen in possible
    assert schedule.peak(chosen) == min(map(schedule.peak, possible))


def test_the_small_graphs_tell_orders_apart() -> None:
    peaks = []
    for seed in range(40):
        graph = random_graph(seed)
        plan = plan_of(graph)
        peaks.append({Schedule(graph, plan).peak(order) for order in orders(plan)})
    assert sum(len(p) > 1 for p in peaks) >= 10


def test_branches_run_one_after_the_other_where_that_saves_memory() -> None:
    graph = wide_then_narrow()
    plan = plan_of(graph)
    better = ordered(graph, plan)
    schedule = Schedule(graph, plan)
    assert schedule.peak(schedule.lowest()) < 0.5 * schedule.peak(range(len(plan.jobs)))
    assert better.jobs != plan.jobs and set(better.jobs) == set(plan.jobs)


def test_a_program_takes_less_memory_and_computes_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = wide_then_narrow()
    feeds = {graph.input_names[0]: np.random.default_rng(0).standard_normal((4, 8)).astype(np.float32)}
    backend = OneDNNBackend(1)
    best = backend.compile(graph)
    found = best(feeds)
    monkeypatch.setattr("taso.backends.onednn.executor.ordered", lambda graph, plan: plan)
    given = backend.compile(graph)
    for name, value in given(feeds).items():
        np.testing.assert_array_equal(found[name], value)
    assert best.peak_bytes < 0.6 * given.peak_bytes


def test_a_plan_that_gains_nothing_stays_as_it_is() -> None:
    graph = taso.new_graph()
    x = graph.new_input(dims=(4, 8))
    for _ in range(3):
        x = graph.tanh(x)
    plan = plan_of(graph)
    assert ordered(graph, plan) is plan


def test_the_report_says_what_is_held_between_kernels_before_and_after() -> None:
    graph = wide_then_narrow()
    before = taso.optimize(graph, backend="reference", never_slower=False, budget=0).report
    assert before.peak_before is None and before.peak_after is None  # nothing was found, nothing is compared
    twice = taso.new_graph()
    x = twice.new_input(dims=(64, 64))
    left = twice.matmul(x, twice.new_weight(dims=(64, 64), data=drawn(64, 64, 0)))
    right = twice.matmul(x, twice.new_weight(dims=(64, 64), data=drawn(64, 64, 1)))
    twice.add(left, right)
    report = taso.optimize(twice, backend="reference", never_slower=False).report
    assert report.peak_before == 3 * 64 * 64 * 4 and report.peak_after == 2 * 64 * 64 * 4
    assert "memory between kernels: 0.049 MB → 0.033 MB" in report.summary()
