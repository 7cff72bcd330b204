"""A plan goes into an ONNX file and comes out of it; what is damaged or no plan for the graph is left aside."""

from __future__ import annotations

import logging
import random
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from hypothesis import assume, given
from searching import FUZZ, SEEDS, random_graph, random_inputs

import taso
from taso.backends.lowering import Choices, Kernel, Layouts, Lowering, choices_of, lower, structure
from taso.backends.plans import KEY, with_plans
from taso.graph.graph import Graph
from taso.graph.operator import Attrs, operator_named
from taso.search.verify import random_feeds


def both(kernel: Kernel) -> tuple[str, ...]:
    return ("first", "second with 2x2") if kernel.steps else ()


LOWERING = Lowering(Layouts(16), algorithms=both)


def drawn(graph: Graph, seed: int) -> Choices:
    """Layouts, joins and algorithms at random, such as are possible."""
    chance, places = random.Random(seed), {node: i for i, node in enumerate(graph.nodes)}
    layouts, entries, algorithms = {}, dict[int, int | None](), {}
    for node in graph.run_time_nodes:
        types = [None if v is None else v.type for v in node.inputs]
        for value in node.outputs:
            possible = LOWERING.layouts.possible(node.op, node.attrs, types, value.type)
            layouts[places[node], value.index] = chance.choice(possible)
        if chance.random() < 0.5:
            entries[places[node]] = None
        if chance.random() < 0.5:
            algorithms[places[node]] = chance.choice(["first", "second with 2x2"])
    return Choices(structure(graph), layouts, entries, algorithms)


def kernels(graph: Graph) -> list[tuple[Kernel, list[str]]]:
    """What is launched, and what it makes by the names in the file."""
    jobs = lower(graph, LOWERING, choices_of(graph, "here")).jobs
    return sorted(((j.kernel, [str(v.type) for v in j.results]) for j in jobs), key=lambda k: k[0].key)


@given(SEEDS)
@FUZZ
def test_a_graph_that_comes_out_of_a_file_runs_by_the_plan_that_it_went_in_with(seed: int) -> None:
    # an output that is another's value, too, is an Identity in a file and a node after that
    graph = taso.load(taso.export_onnx(taso.load(taso.export_onnx(random_graph(random.Random(seed))))))
    # interning makes one of two Identities of a value, and a file has one more for the second name
    assume(len({value for _, value in graph.outputs}) == len(graph.outputs))
    assert not graph.plans
    bare = [k for k, _ in kernels(graph)]
    graph.plans["here"] = drawn(graph, seed)
    written = taso.export_onnx(graph)
    back = taso.load(written)
    assert kernels(back) == kernels(graph)
    assert kernels(taso.load(taso.export_onnx(back))) == kernels(graph)
    del back.plans["here"]
    assert [k for k, _ in kernels(back)] == bare, "without the plan nothing of it is left"
    assert KEY not in taso.export_onnx(back).SerializeToString().decode("latin1")
    feeds = random_inputs(graph)
    session = onnxruntime.InferenceSession(written.SerializeToString(), providers=["CPUExecutionProvider"])
    assert len(session.run(None, {n: feeds[n] for n in (i.name for i in session.get_inputs())})) == len(graph.outputs)


def planned() -> taso.Graph:
    graph = taso.new_graph()
    x = graph.new_input(dims=(1, 16, 8, 8))
    y = graph.conv2d(input=x, weight=graph.new_weight(dims=(16, 16, 3, 3)), strides=(1, 1), padding="SAME")
    graph.set_outputs([("y", graph.relu(y))])
    graph.plans["here"] = Choices(structure(graph), {}, {}, {2: "first"})
    return graph


def test_a_plan_stays_where_operators_are_written_out_and_nodes_have_no_names() -> None:
    graph = taso.new_graph()
    value = graph.new_input(dims=(1, 16, 8, 8))
    for _ in range(2):
        weight = graph.new_weight(dims=(16, 16, 1, 1))
        value = graph.conv2d(input=value, weight=weight, strides=(1, 1), padding="SAME")
        value = graph.make(operator_named("HardSwish"), [value], Attrs({})).output
    graph.set_outputs([("y", value)])
    convolutions = [i for i, node in enumerate(graph.nodes) if node.op.name == "Conv"]
    graph.plans["here"] = Choices(structure(graph), {}, {}, dict.fromkeys(convolutions, "first"))
    graph.info.opsets = {"": 13}
    written = taso.export_onnx(graph)
    # HardSwish came with opset 14
    assert "HardSwish" not in {node.op_type for node in written.graph.node}
    back = taso.load(written)
    told = choices_of(back, "here")
    assert told is not None and [back.nodes[i].op.name for i in told.algorithms] == ["Conv", "Conv"]


def test_other_metadata_of_a_node_stays_as_it_is() -> None:
    proto = taso.export_onnx(planned())
    proto.graph.node[0].metadata_props.add(key="mine", value="kept")
    graph = taso.load(proto)
    (said,) = graph.info.node_metadata.values()
    assert said == (("mine", "kept"),)
    again = taso.export_onnx(graph)
    assert {p.key for p in again.graph.node[0].metadata_props} == {"mine", f"{KEY}here"}
    assert with_plans(graph) is not graph and graph.info.node_metadata == {next(iter(graph.info.node_metadata)): said}


@pytest.mark.parametrize(
    "text",
    [
        "layout 0 upside-down", "join 7", "join x", "layout a plain", "layout 99 blocked", "layout -1 last", "nonsense",
        "algorithm ", "", "alone 3",
    ],
)  # fmt: skip
def test_a_damaged_plan_is_left_out_with_a_warning(text: str, caplog: pytest.LogCaptureFixture) -> None:
    proto = taso.export_onnx(planned())
    (found,) = proto.graph.node[0].metadata_props
    found.value = text
    with caplog.at_level(logging.WARNING):
        graph = taso.load(proto)
    assert "here" not in graph.plans and "plan for here" in caplog.text


def test_a_plan_for_what_the_graph_once_was_is_not_followed() -> None:
    proto = taso.export_onnx(planned())
    (found,) = proto.graph.node[0].metadata_props
    # a join that the operator cannot make, and an algorithm that is none
    found.value = "join 0; algorithm none"
    graph = taso.load(proto)
    assert [j.kernel.algorithm for j in lower(graph, LOWERING, choices_of(graph, "here")).jobs] == [""]


def test_exact_results_take_no_other_algorithm_from_a_file() -> None:
    graph = planned()
    graph.plans["onednn"] = graph.plans.pop("here")
    best = taso.optimize(graph, exactness=("exact",), budget=0, progress=False)
    plan = best.plans["onednn"]
    assert isinstance(plan, Choices) and not plan.algorithms
    assert isinstance(graph.plans["onednn"], Choices) and graph.plans["onednn"].algorithms


@pytest.mark.slow
def test_an_optimized_model_runs_from_its_file_as_it_ran_at_once(tmp_path: Path) -> None:
    graph = taso.new_graph()
    y = x = graph.new_input(dims=(1, 64, 56, 56))
    for seed in range(2):
        data = np.random.default_rng(seed).standard_normal((64, 64, 3, 3), np.float32) / 24
        weight = graph.new_weight(dims=(64, 64, 3, 3), data=data)
        y = graph.relu(graph.conv2d(input=y, weight=weight, strides=(1, 1), padding="SAME"))
    graph.set_outputs([("y", graph.add(x, y))])
    best = taso.optimize(graph, backend="onednn", threads=1, never_slower=False, progress=False)
    assert "onednn" in best.plans, "there is a plan, or this says nothing"
    taso.save(best, tmp_path / "best.onnx")
    onnx.checker.check_model(str(tmp_path / "best.onnx"))
    feeds = random_feeds(graph, {}, 0)
    here, there = (taso.compile(g, "onednn", 1) for g in (best, taso.load(tmp_path / "best.onnx")))
    assert here.kernels == there.kernels
    assert all(np.array_equal(a, b) for a, b in zip(here(feeds).values(), there(feeds).values(), strict=True))
