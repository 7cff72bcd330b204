"""Operators that nothing here can run are cut out, and what is around them is optimized all the same."""

from __future__ import annotations

import numpy as np
import onnx
import onnx.parser

import taso
from taso.graph.cut import unrunnable, without_unrunnable
from taso.graph.evaluate import evaluate_graph

TEXT = """<ir_version: 8, opset_import: ["" : 17, "my" : 1]>
g (float[N,4,6,6] x) => (float[N,4,6,6] y)
<float[4,4,1,1] w, float[4] s, float[4] b, float[4] m, float[4] v, float[N,4,6,6] q>
{ i = Identity(x)
  c = Conv(i, w)
  n = BatchNormalization(c, s, b, m, v)
  q = my.Foo(n)
  y = Relu(q) }"""


def custom_model() -> onnx.ModelProto:
    model = onnx.parser.parse_model(TEXT)
    rng = np.random.default_rng(0)
    weights = {i.name: i for i in model.graph.value_info if i.name in "wsbmv"}
    for name, info in weights.items():
        shape = [d.dim_value for d in info.type.tensor_type.shape.dim]
        array = (np.abs(rng.standard_normal(shape)) + 0.5).astype(np.float32)
        model.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
        model.graph.value_info.remove(info)
    return model


def test_a_custom_operator_is_cut_out_with_its_inputs_as_outputs_and_its_outputs_as_inputs() -> None:
    graph = taso.load(custom_model())
    assert [n.op.label for n in unrunnable(graph)] == ["Foo"]
    rest = without_unrunnable(graph)
    assert not unrunnable(rest)
    assert len(rest.inputs) == len(graph.inputs) + 1 and len(rest.outputs) == len(graph.outputs) + 1
    feeds = {n: np.ones((2, 4, 6, 6), np.float32) for n in rest.input_names}
    assert np.array_equal(evaluate_graph(rest, feeds)["y"], feeds["x"])


def test_a_graph_without_custom_operators_is_not_cut() -> None:
    graph = taso.new_graph()
    graph.relu(graph.new_input(dims=(2, 3)))
    assert without_unrunnable(graph) is graph


def test_what_is_around_a_custom_operator_is_optimized_and_the_report_says_what_was_left_out() -> None:
    best = taso.optimize(custom_model(), backend="reference", never_slower=False)
    operators = [n.op_type for n in taso.export_onnx(best).graph.node]
    assert "BatchNormalization" not in operators and operators.count("Foo") == 1
    assert best.report.verified
    assert any("Foo" in m for m in best.report.messages)


def test_equal_graphs_are_cut_alike() -> None:
    original = taso.load(custom_model())
    best = taso.optimize(original, backend="reference", never_slower=False)
    a, b = without_unrunnable(original), without_unrunnable(best)
    assert a.input_names == b.input_names
    assert [n for n, _ in a.outputs] == [n for n, _ in b.outputs]
