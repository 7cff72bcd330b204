"""Graphs, reports and rules survive a pickle and a deep copy, and are then independent of what they came from."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import taso
from taso.rules import collection

Trip = Callable[[object], object]


def pickled(thing: object) -> object:
    return pickle.loads(pickle.dumps(thing))


@pytest.fixture(params=[pickled, copy.deepcopy], ids=["pickle", "deepcopy"])
def trip(request: pytest.FixtureRequest) -> Trip:
    return request.param


def again(graph: taso.Graph, trip: Trip) -> taso.Graph:
    found = trip(graph)
    assert isinstance(found, taso.Graph)
    return found


def with_weights(count: int = 2) -> onnx.ModelProto:
    """x → (x · w0 + c) → … with initializers, a Constant and an If, names and doc strings."""
    rng = np.random.default_rng(5)
    weights = [numpy_helper.from_array(rng.standard_normal((8, 8)).astype(np.float32), f"w{i}") for i in range(count)]
    constant = numpy_helper.from_array(rng.standard_normal(8).astype(np.float32), "c")
    nodes = [helper.make_node("Constant", [], ["c"], value=constant)]
    for i in range(count):
        nodes.append(helper.make_node("MatMul", [f"h{i}", f"w{i}"], [f"p{i}"], name=f"product{i}", doc_string="why"))
        nodes.append(helper.make_node("Add", [f"p{i}", "c"], [f"h{i + 1}"]))
    float_2d = helper.make_tensor_type_proto(TensorProto.FLOAT, ["n", 8])
    graph = helper.make_graph(
        nodes, "g", [helper.make_value_info("h0", float_2d)], [helper.make_value_info(f"h{count}", float_2d)], weights
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)


def test_a_graph_says_the_same_in_onnx_after_the_trip(trip: Trip) -> None:
    graph = taso.load(with_weights())
    assert taso.export_onnx(again(graph, trip)).SerializeToString() == taso.export_onnx(graph).SerializeToString()


def test_a_graph_by_hand_keeps_outputs_random_weights_and_what_comes_next(trip: Trip) -> None:
    graph = taso.new_graph()
    x = graph.new_input(dims=(2, 8))
    graph.relu(graph.matmul(x, graph.new_weight(dims=(8, 8))))
    graph.tanh(x)
    same = again(graph, trip)
    assert [(n, str(v.type)) for n, v in same.outputs] == [(n, str(v.type)) for n, v in graph.outputs]
    assert [op["guid"] for op in same.get_operator_list()] == [op["guid"] for op in graph.get_operator_list()]
    # the next node and the next random weight are what they would have been
    drawn = [taso.compile(_longer(g), "reference")({"input": np.ones((2, 8), np.float32)}) for g in (graph, same)]
    assert drawn[0].keys() == drawn[1].keys()
    for name, array in drawn[0].items():
        np.testing.assert_array_equal(drawn[1][name], array)


def _longer(graph: taso.Graph) -> taso.Graph:
    graph.matmul(graph.inputs[0], graph.new_weight(dims=(8, 8)))
    return graph


def test_adding_to_a_copy_leaves_the_original_alone(trip: Trip) -> None:
    graph = taso.new_graph()
    graph.relu(graph.new_input(dims=(2, 8)))
    same = again(graph, trip)
    same.exp(input=same.inputs[0])
    assert (len(graph.outputs), len(same.outputs)) == (1, 2)


def test_equal_nodes_are_still_one_node_after_the_trip(trip: Trip) -> None:
    graph = taso.new_graph()
    graph.relu(graph.new_input(dims=(2, 8)))
    same = again(graph, trip)
    assert same.relu(same.inputs[0]) is same.outputs[0][1]


def test_a_graph_of_ten_thousand_nodes_in_a_row_is_not_too_deep(trip: Trip) -> None:
    graph = taso.new_graph()
    x = graph.new_input(dims=(2,))
    for _ in range(5000):
        x = graph.exp(input=graph.tanh(x))
    assert len(again(graph, trip).operators) == 10_000


def test_weights_mapped_from_a_file_are_right_after_the_file_is_gone(trip: Trip, tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    taso.save(taso.load(with_weights()), path, external_data=True)
    expected = [numpy_helper.to_array(t) for t in with_weights().graph.initializer]
    same = again(taso.load(path), trip)
    if trip is pickled:
        for file in tmp_path.iterdir():
            file.unlink()
    exported = {t.name: numpy_helper.to_array(t) for t in taso.export_onnx(same).graph.initializer}
    for number, array in enumerate(expected):
        np.testing.assert_array_equal(exported[f"w{number}"], array)


def test_a_pickle_is_read_by_a_process_with_other_hashes(tmp_path: Path) -> None:
    graph = taso.optimize(with_weights(), backend="reference", budget=3)
    path, model = tmp_path / "graph.pickle", tmp_path / "model.onnx"
    path.write_bytes(pickle.dumps(graph))
    code = (
        "import pickle, sys, taso\n"
        "graph = pickle.load(open(sys.argv[1], 'rb'))\n"
        "first = graph.operators[0]\n"
        "assert graph.make(first.op, first.inputs, dict(first.attrs)) is first, 'equal nodes are one node'\n"
        "taso.save(graph, sys.argv[2]); print(graph.report.decision)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(path), str(model)], capture_output=True, text=True, check=False,
        env={"PYTHONHASHSEED": "7", "PYTHONPATH": str(Path(taso.__file__).parents[1])},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == graph.report.decision
    assert onnx.load(model) == taso.export_onnx(graph)


def test_an_optimized_graph_keeps_report_and_plan(trip: Trip) -> None:
    graph = taso.optimize(with_weights(), backend="reference", budget=3)
    same = again(graph, trip)
    assert same.report == graph.report
    assert same.plans == graph.plans


def test_a_body_and_what_it_captures_survive(trip: Trip) -> None:
    model = onnx.parser.parse_model(
        """<ir_version: 9, opset_import: ["": 18]>
        g (bool c, float[4] x) => (float[4] y) {
            z = Exp (x)
            y = If (c) <
                then_branch = t () => (float[4] a) { a = Neg (z) },
                else_branch = e () => (float[4] b) { b = Abs (z) }
            >
        }"""
    )  # fmt: skip
    graph = taso.load(model)
    assert taso.export_onnx(again(graph, trip)).SerializeToString() == taso.export_onnx(graph).SerializeToString()


def test_reports_and_rules_are_equal_after_the_trip(trip: Trip) -> None:
    report = taso.optimize(with_weights(), backend="reference", budget=3).report
    rules = [*collection.library(), taso.rule("Relu(Relu(x)) => Relu(x)")]
    assert trip(report) == report
    assert trip(rules) == rules
    assert str(trip(report)) == str(report)
