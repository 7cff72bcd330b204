"""Operators that are made of others: gathered from their parts, written out where an opset lacks them, and back."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from numpy.typing import NDArray

import taso
from taso.backends.lowering import Choices, structure
from taso.backends.select import get_backend
from taso.graph.composite import gathered, written_out
from taso.graph.errors import BackendUnavailable
from taso.graph.evaluate import evaluate_graph
from taso.graph.graph import Graph, Value
from taso.graph.operator import REGISTRY, AttrValue, Operator, Weight
from taso.graph.types import DType, TensorType
from taso.rules.collection import library

WHOLE = ("Gelu", "HardSwish", "Mish", "Swish")
Array = NDArray[np.float32]
X = np.linspace(-6, 6, 96, dtype=np.float32).reshape(4, 24)
ROOT, SLOPE = math.sqrt(2), math.sqrt(2 / math.pi)


class Build:
    """A graph of float32 in which numbers are weights of one element."""

    def __init__(self, opset: int = 17) -> None:
        self.graph = taso.new_graph()
        self.graph.info.opsets = {"": opset}
        self.x = self.graph.add_input("x", TensorType(DType.FLOAT, X.shape))

    @property
    def vector(self) -> Value:
        array = np.linspace(0.5, 3, X.shape[1], dtype=np.float32)
        return self.graph.add_weight(Weight(TensorType(DType.FLOAT, array.shape), array))

    def number(self, value: float) -> Value:
        return self.graph.add_weight(Weight(TensorType(DType.FLOAT, ()), np.asarray(value, np.float32)))

    def __call__(self, name: str, *inputs: Value | float, **attrs: AttrValue) -> Value:
        given = [v if isinstance(v, Value) else self.number(v) for v in inputs]
        return self.graph.make(REGISTRY[name], given, attrs).output

    def done(self, *values: Value) -> Graph:
        self.graph.set_outputs([(f"y{i}", v) for i, v in enumerate(values)])
        return self.graph


Form = Callable[[Build, Value], Value]
GELU: dict[str, Form] = {
    "as PyTorch writes it": lambda b, x: b("Mul", b("Mul", x, 0.5), b("Add", b("Erf", b("Div", x, ROOT)), 1.0)),
    "as BERT has it": lambda b, x: b("Mul", b("Mul", x, b("Add", b("Erf", b("Div", x, ROOT)), 1.0)), 0.5),
    "with a product": lambda b, x: b("Mul", 0.5, b("Mul", b("Add", 1.0, b("Erf", b("Mul", x, 1 / ROOT))), x)),
    "halved inside": lambda b, x: b("Mul", b("Mul", b("Add", b("Erf", b("Div", x, ROOT)), 1.0), 0.5), x),
    "divided by two": lambda b, x: b("Div", b("Mul", x, b("Add", b("Erf", b("Div", x, ROOT)), 1.0)), 2.0),
}


def _cubed(b: Build, x: Value) -> Value:
    return b("Mul", b("Mul", x, x), x)


def _by_tanh(b: Build, x: Value, cube: Value) -> Value:
    inner = b("Mul", b("Add", x, b("Mul", cube, 0.044715)), SLOPE)
    return b("Mul", b("Mul", x, 0.5), b("Add", b("Tanh", inner), 1.0))


FORMS: dict[str, tuple[str, dict[str, AttrValue], Form]] = {
    **{f"Gelu {name}": ("Gelu", {"approximate": "none"}, form) for name, form in GELU.items()},
    "Gelu by tanh and Pow": ("Gelu", {"approximate": "tanh"}, lambda b, x: _by_tanh(b, x, b("Pow", x, 3.0))),
    "Gelu by tanh and Mul": ("Gelu", {"approximate": "tanh"}, lambda b, x: _by_tanh(b, x, _cubed(b, x))),
    "Swish": ("Swish", {"alpha": 1.0}, lambda b, x: b("Mul", x, b("Sigmoid", x))),
    "Swish turned": ("Swish", {"alpha": 1.0}, lambda b, x: b("Mul", b("Sigmoid", x), x)),
    "Swish with a slope": ("Swish", {"alpha": 1.75}, lambda b, x: b("Mul", x, b("Sigmoid", b("Mul", x, 1.75)))),
    "Mish": ("Mish", {}, lambda b, x: b("Mul", x, b("Tanh", b("Softplus", x)))),
    "HardSwish": ("HardSwish", {}, lambda b, x: b("Mul", x, b("HardSigmoid", x, alpha=1 / 6, beta=0.5))),
    "HardSwish by Clip": (
        "HardSwish", {}, lambda b, x: b("Div", b("Mul", x, b("Clip", b("Add", x, 3.0), min=0.0, max=6.0)), 6.0)
    ),
    "HardSwish by Clip, scaled": (
        "HardSwish", {}, lambda b, x: b("Mul", x, b("Mul", b("Clip", b("Add", x, 3.0), min=0.0, max=6.0), 1 / 6))
    ),
}  # fmt: skip


def names(graph: Graph) -> list[str]:
    return [n.op.name for n in graph.run_time_nodes]


def error(one: Array, other: Array) -> float:
    return float(np.abs(one.astype(np.float64) - other).max() / np.abs(other).max())


@pytest.mark.parametrize("name", FORMS)
def test_each_form_becomes_the_operator_and_computes_the_same(name: str) -> None:
    op, attrs, form = FORMS[name]
    b = Build()
    graph = b.done(form(b, b("Exp", b("Mul", b.x, 0.25))))
    whole, nodes = gathered(graph, WHOLE)
    assert names(whole) == ["Mul", "Exp", op]
    assert dict(whole.run_time_nodes[-1].attrs) == attrs
    assert nodes[graph.run_time_nodes[-1]] is whole.run_time_nodes[-1]
    wanted, got = evaluate_graph(graph, {"x": X})["y0"], evaluate_graph(whole, {"x": X})["y0"]
    assert error(got, wanted) < 4e-7


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("opset", (9, 13, 17))
def test_what_is_gathered_is_written_out_in_opsets_that_lack_it_and_found_again(name: str, opset: int) -> None:
    op, _, form = FORMS[name]
    b = Build(opset)
    whole, _ = gathered(b.done(form(b, b("Exp", b("Mul", b.x, 0.25)))), WHOLE)
    model = taso.export_onnx(whole)
    onnx.checker.check_model(model, full_check=True)
    schemas = [onnx.defs.get_schema(n.op_type, opset) for n in model.graph.node]
    assert op not in {s.name for s in schemas} or op == "HardSwish" and opset >= 14
    again, _ = gathered(taso.load(model), WHOLE)
    assert names(again) == ["Mul", "Exp", op]
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(model.SerializeToString(), options)
    assert error(session.run(None, {"x": X})[0], evaluate_graph(whole, {"x": X})["y0"]) < 1e-6


@pytest.mark.parametrize("op", [o for o in REGISTRY.values() if o.parts is not None], ids=lambda o: o.name)
def test_parts_are_the_operator_in_every_opset_from_which_on_they_are_said_to_be_there(op: Operator) -> None:
    since = op.parts.since if op.parts is not None else op.since
    for opset in range(since, op.since):
        for attrs in SETTINGS.get(op.name, [{}]):
            b = Build(opset)
            graph = b.done(b(op.name, b.x, **attrs))
            spelled = written_out(graph, opset)
            assert op.name not in names(spelled)
            onnx.checker.check_model(taso.export_onnx(graph), full_check=True)
            assert error(evaluate_graph(spelled, {"x": X})["y0"], evaluate_graph(graph, {"x": X})["y0"]) < 4e-7


SETTINGS: dict[str, list[dict[str, AttrValue]]] = {
    "Gelu": [{"approximate": "tanh"}, {"approximate": "none"}], "Swish": [{"alpha": 1.0}, {"alpha": 0.5}],
}  # fmt: skip

NEARLY: dict[str, Form] = {
    "another root": lambda b, x: b("Mul", b("Mul", x, 0.5), b("Add", b("Erf", b("Div", x, 1.4143)), 1.0)),
    "not halved": lambda b, x: b("Mul", x, b("Add", b("Erf", b("Div", x, ROOT)), 1.0)),
    "no one": lambda b, x: b("Mul", b("Mul", x, 0.5), b("Add", b("Erf", b("Div", x, ROOT)), 1.001)),
    "sigmoid of another": lambda b, x: b("Mul", x, b("Sigmoid", b("Exp", x))),
    "a slope for each column": lambda b, x: b("Mul", x, b("Sigmoid", b("Mul", b.vector, x))),
    "a slope for each column, behind": lambda b, x: b("Mul", x, b("Sigmoid", b("Mul", x, b.vector))),
    "a slope that is computed": lambda b, x: b("Mul", x, b("Sigmoid", b("Mul", b("Neg", x), x))),
    "an error of a product": lambda b, x: b(
        "Mul", b("Mul", x, 0.5), b("Add", b("Erf", b("Div", b("Mul", b("Neg", x), x), ROOT)), 1.0)
    ),
    "a bend of a product": lambda b, x: b("Mul", b("Mul", x, 0.5), b("Add", b("Tanh", b("Mul", b("Mul", b("Neg", x), b(
        "Add", x, b("Mul", _cubed(b, x), 0.044715))), SLOPE)), 1.0)),
    "scaled": lambda b, x: b("Mul", b("Mul", x, 2.0), b("Sigmoid", x)),
    "tanh of x": lambda b, x: b("Mul", x, b("Tanh", x)),
    "a wrong clip": lambda b, x: b("Div", b("Mul", x, b("Clip", b("Add", x, 3.0), min=0.0, max=5.0)), 6.0),
    "a wrong shift": lambda b, x: b("Div", b("Mul", x, b("Clip", b("Add", x, 2.0), min=0.0, max=6.0)), 6.0),
    "a wrong slope": lambda b, x: b("Mul", x, b("HardSigmoid", x, alpha=0.2, beta=0.5)),
    "another cube": lambda b, x: _by_tanh(b, x, b("Pow", x, 2.0)),
    "a row for a factor": lambda b, x: b("Mul", b("Slice", x, starts=(0,), ends=(1,), axes=(0,)), b("Sigmoid", x)),
}  # fmt: skip


@pytest.mark.parametrize("name", NEARLY)
def test_what_is_nearly_such_an_operator_is_none(name: str) -> None:
    b = Build()
    graph = b.done(NEARLY[name](b, b("Exp", b("Mul", b.x, 0.25))))
    whole, _ = gathered(graph, WHOLE)
    assert whole is graph


def test_what_others_read_stays() -> None:
    b = Build()
    x = b("Exp", b.x)
    gate = b("Sigmoid", x)
    assert gathered(b.done(b("Mul", x, gate), b("Neg", gate)), WHOLE)[0] is b.graph
    b = Build()
    x = b("Exp", b.x)
    gate = b("Sigmoid", x)
    assert gathered(b.done(b("Mul", x, gate), gate), WHOLE)[0] is b.graph
    assert gathered(b.graph, ())[0] is b.graph


def test_several_readers_of_x_do_not_hinder_it() -> None:
    b = Build()
    x = b("Exp", b.x)
    graph = b.done(b("Mul", x, b("Sigmoid", x)), b("Neg", x))
    assert sorted(names(gathered(graph, WHOLE)[0])) == ["Exp", "Neg", "Swish"]


def test_doubles_and_integers_are_left_as_they_are() -> None:
    graph = taso.new_graph()
    x = graph.add_input("x", TensorType(DType.DOUBLE, (3,)))
    y = graph.make(REGISTRY["Mul"], [x, graph.make(REGISTRY["Sigmoid"], [x]).output]).output
    graph.set_outputs([("y", y)])
    assert gathered(graph, WHOLE)[0] is graph


def test_names_and_metadata_of_what_is_gathered_move_along(tmp_path: Path) -> None:
    b = Build()
    x = b("Exp", b.x)
    last = b("Mul", x, b("Sigmoid", x))
    graph = b.done(b("Neg", last))
    graph.info.value_names[last] = ["activated"]
    graph.info.node_names[last.node] = "silu"
    graph.info.node_docs[last.node] = "why not"
    whole, _ = gathered(graph, WHOLE)
    taso.save(whole, tmp_path / "m.onnx")
    model = onnx.load(tmp_path / "m.onnx")
    (node,) = (n for n in model.graph.node if n.name == "silu")
    assert (node.op_type, node.doc_string, list(node.output)) == ("Mul", "why not", ["activated"])


def test_the_library_proves_that_the_forms_are_the_operators() -> None:
    """The same equations stand in the rule library, whose rules are proved before they ship."""
    proved = {rule.target[0].op.name for rule in library() if len(rule.target) == 1 and len(rule.source) > 1}
    assert set(WHOLE) <= proved


def test_what_is_gathered_runs_as_one_kernel_and_a_plan_finds_it_in_a_file(tmp_path: Path) -> None:
    try:
        get_backend("onednn")
    except BackendUnavailable as missing:
        pytest.skip(str(missing))
    graph = taso.new_graph()
    x = graph.new_input(dims=(1, 16, 8, 8))
    weight = graph.new_weight(dims=(16, 16, 1, 1), data=np.random.default_rng(0).standard_normal((16, 16, 1, 1)))
    y = graph.conv2d(input=x, weight=weight, strides=(1, 1), padding="SAME")
    z = graph.make(REGISTRY["Mul"], [y, graph.make(REGISTRY["Sigmoid"], [y]).output]).output
    graph.set_outputs([("z", z)])
    whole, _ = gathered(graph, WHOLE)
    places = {n.op.name: i for i, n in enumerate(whole.nodes)}
    chosen = {(places["Conv"], 0): "last", (places["Swish"], 0): "last"}
    whole.plans["onednn"] = Choices(structure(whole), chosen, {places["Swish"]: 0})
    taso.save(whole, tmp_path / "m.onnx")
    program = taso.compile(taso.load(tmp_path / "m.onnx"), "onednn", 1)
    feeds = {graph.input_names[0]: np.random.default_rng(1).standard_normal((1, 16, 8, 8)).astype(np.float32)}
    # to channels last, the convolution with its activation, and back
    assert [name for name, _ in program.profile(feeds)] == ["Reorder", "Conv+Swish", "Reorder"]
    assert error(program(feeds)["z"], evaluate_graph(graph, feeds)["z"]) < 1e-5


