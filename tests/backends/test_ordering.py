"""The order of execution: producers first, and no other order needs less memory where all can be gone through."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import permutations, product

import numpy as np
import pytest
from numpy.typing import NDArray
from searching import random_graph as images_and_matrices

import taso
from taso.backends.lowering import Choices, Plan, choices_of, is_view, lower, no_scratch, nowhere, structure
from taso.backends.onednn.backend import OneDNNBackend
from taso.backends.onednn.kernels import NotInPlace, design
from taso.backends.onednn.library import library
from taso.backends.onednn.measuring import RandomSupply
from taso.backends.onednn.needs import overwritable
from taso.backends.ordering import ordered, planned_peak, schedule
from taso.backends.reference import ReferenceBackend
from taso.graph.errors import BackendUnavailable

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
    works = schedule(graph, plan, PLAIN_LOWERING)
    possible = list(orders(plan))
    chosen = tuple(works.lowest() or ())
    assert chosen in possible
    assert works.course(chosen).peak == min(works.course(order).peak for order in possible)


def test_the_small_graphs_tell_orders_apart() -> None:
    peaks = []
    for seed in range(40):
        graph = random_graph(seed)
        plan = plan_of(graph)
        peaks.append({schedule(graph, plan, PLAIN_LOWERING).course(order).peak for order in orders(plan)})
    assert sum(len(p) > 1 for p in peaks) >= 10


def test_branches_run_one_after_the_other_where_that_saves_memory() -> None:
    graph = wide_then_narrow()
    plan = plan_of(graph)
    better = ordered(graph, plan, PLAIN_LOWERING)
    works = schedule(graph, plan, PLAIN_LOWERING)
    assert works.course(works.lowest()).peak < 0.5 * works.course().peak
    assert better.jobs != plan.jobs and set(better.jobs) == set(plan.jobs)


def test_a_program_takes_less_memory_and_computes_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = wide_then_narrow()
    feeds = {graph.input_names[0]: np.random.default_rng(0).standard_normal((4, 8)).astype(np.float32)}
    backend = OneDNNBackend(1)
    best = backend.compile(graph)
    found = best(feeds)
    monkeypatch.setattr("taso.backends.building.ordered", lambda graph, plan, lowering: plan)
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
    assert ordered(graph, plan, PLAIN_LOWERING) is plan


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


# ── the plan and the program ─────────────────────────────────────────────────────────────────────────────────────


def grown(seed: int) -> taso.Graph:
    """Convolutions, pools, products and movements on images and matrices, some in layouts that have to be changed."""
    return images_and_matrices(random.Random(seed))


def _isa() -> str:
    try:
        return library().isa
    except BackendUnavailable as error:
        return f"none ({error})"


# without, oneDNN's products take no sum along, which is seen when they are built and not beforehand
needs_avx512 = pytest.mark.skipif(not _isa().startswith("avx512"), reason=f"oneDNN's products of {_isa()} take no sum")


@needs_avx512
@pytest.mark.parametrize("first", range(0, 120, 20))
def test_a_program_takes_as_much_memory_as_its_plan_says(first: int) -> None:
    """To the byte: shared, overwritten and copied values, scratch memory, and how all of it is packed."""
    backend = OneDNNBackend(1)
    for seed in range(first, first + 20):
        graph = grown(seed)
        assert planned_peak(graph, backend.lowering) == backend.compile(graph).peak_bytes, seed


def image_graph(op: str) -> taso.Graph:
    graph = taso.new_graph()
    x = graph.new_input(dims=(1, 32, 16, 16))
    a = graph.conv2d(input=x, weight=graph.new_weight(dims=(32, 32, 1, 1)), strides=(1, 1), padding="SAME")
    b = graph.conv2d(input=x, weight=graph.new_weight(dims=(32, 32, 3, 3)), strides=(1, 1), padding="SAME")
    if op == "sum":
        graph.relu(graph.add(a, b))
    elif op == "parts":
        graph.split(graph.relu(graph.concat(1, [graph.sigmoid(a), b])), 1, 2)
    elif op == "twice":
        # a part of two wholes is made in one and copied to the other
        graph.concat(1, [graph.concat(1, [a, b]), graph.concat(1, [b, a])])
    else:
        graph.relu(graph.reshape(graph.transpose(graph.add(a, b), (0, 2, 3, 1)), (256, 32)))
    return graph


@pytest.mark.parametrize("op", ["sum", "parts", "twice", "turned"])
def test_a_program_takes_what_its_plan_says_whatever_shares_memory(op: str) -> None:
    for threads in (1, 2):
        backend = OneDNNBackend(threads)
        graph = image_graph(op)
        assert planned_peak(graph, backend.lowering) == backend.compile(graph).peak_bytes


def test_a_sum_takes_the_place_of_what_it_is_added_to() -> None:
    graph, backend = image_graph("sum"), OneDNNBackend(1)
    course = schedule(graph, lower(graph, backend.lowering), backend.lowering).course()
    apart = replace(backend.lowering, in_place=nowhere)
    assert course.peak < schedule(graph, lower(graph, apart), apart).course().peak


def test_scratch_memory_counts() -> None:
    graph = taso.new_graph()
    x = graph.new_input(dims=(1, 64, 56, 56))
    y = graph.conv2d(input=x, weight=graph.new_weight(dims=(64, 64, 1, 1)), strides=(1, 1), padding="SAME")
    graph.conv2d(input=y, weight=graph.new_weight(dims=(128, 64, 1, 1)), strides=(2, 2), padding="SAME")
    backend = OneDNNBackend(2)
    plan = lower(graph, backend.lowering)
    plain = replace(backend.lowering, scratch=no_scratch)
    most = [schedule(graph, plan, lowering).course().most for lowering in (backend.lowering, plain)]
    scratch = backend.lowering.scratch(plan.jobs[1].kernel)
    if not scratch:
        pytest.skip("on this processor this kernel takes no scratch memory")
    assert most[0][1] - most[1][1] == scratch
    assert planned_peak(graph, backend.lowering) == backend.compile(graph).peak_bytes


@needs_avx512
@pytest.mark.parametrize("seed", range(0, 60, 3))
def test_what_a_kernel_may_overwrite_is_told_beforehand(seed: int) -> None:
    """The kernel alone says what its recipe will say."""
    backend = OneDNNBackend(1)
    graph = grown(seed)
    for job in lower(graph, backend.lowering).jobs:
        if is_view(job.kernel):
            continue
        supply = RandomSupply(job.kernel)
        recipe = design(job.kernel, backend.lowering.layouts, supply)
        summed = set()
        for operand in recipe.sums:
            try:
                design(job.kernel, backend.lowering.layouts, supply, operand)
                summed.add(operand)
            except NotInPlace:
                pass
        assert set(overwritable(job.kernel)) == (summed or set(recipe.shares)), job.kernel.key


def test_a_program_takes_what_its_plan_says_whichever_way_it_convolves() -> None:
    graph, backend = image_graph("sum"), OneDNNBackend(1)
    convolutions = [i for i, n in enumerate(graph.nodes) if n.op.name == "Conv"]
    jobs = lower(graph, backend.lowering).jobs
    ways = {way for job in jobs for way in backend.lowering.algorithms(job.kernel)}
    for way, place in product(sorted(ways), convolutions):
        other = copy.copy(graph)
        other.plans[backend.name] = Choices(structure(graph), algorithms={place: way})
        planned = planned_peak(other, backend.lowering, choices_of(other, backend.name))
        assert planned == backend.compile(other).peak_bytes, (way, place)


def test_values_that_lie_while_most_is_in_use_are_told() -> None:
    graph = wide_then_narrow()
    works = schedule(graph, plan_of(graph), PLAIN_LOWERING)
    course = works.course(works.lowest())
    held = course.held(course.peak)
    wide = {v for n in graph.nodes for v in n.outputs if n.op.name == "Tanh"}
    assert held & wide and graph.inputs[0] in held
    assert graph.outputs[0][1] not in held, "when it is made all that is wide is gone"
    assert course.held(course.peak + 1) == set()


def test_an_order_that_stays_below_a_bound_is_found_or_none() -> None:
    graph = wide_then_narrow()
    works = schedule(graph, plan_of(graph), PLAIN_LOWERING)
    lowest = works.course(works.lowest()).peak
    assert works.lowest(below=lowest) is None
    within = works.lowest(below=lowest + 1)
    assert within is not None and works.course(within).peak == lowest
