"""What the final comparison must not let through: each of these passed an earlier version of it."""

from __future__ import annotations

import numpy as np
import onnx
import onnx.checker
import onnx.parser
import pytest
from searching import FormulaBackend

import taso
from taso.backends.lowering import Kernel
from taso.backends.onednn.library import library
from taso.graph.errors import BackendUnavailable
from taso.graph.evaluate import evaluate_graph
from taso.graph.graph import Graph, Value
from taso.graph.operator import REGISTRY, Weight
from taso.graph.types import DType, SymDim, TensorType
from taso.search.verify import check_program, compare, random_feeds, relative_error


def graph_of(dtype: DType, *dims: int | str) -> tuple[taso.Graph, Value]:
    graph = taso.Graph()
    shape = tuple(SymDim.named(d) if isinstance(d, str) else d for d in dims)
    return graph, graph.add_input("x", TensorType(dtype, shape))


def make(graph: Graph, op: str, *inputs: Value, **attrs: object) -> Value:
    return graph.make(REGISTRY[op], inputs, attrs).output  # type: ignore[arg-type]  # attributes of a test


def weight(graph: Graph, array: np.ndarray) -> Value:
    return graph.add_weight(Weight(TensorType(DType.from_numpy(array.dtype), array.shape), array))


def named(graph: taso.Graph, value: Value) -> taso.Graph:
    graph.set_outputs([("y", value)])
    return graph


def test_integers_that_differ_by_little_are_different() -> None:
    results = []
    for added in (1_000_000, 1_000_003):
        graph, x = graph_of(DType.INT64, 50)
        results.append(named(graph, make(graph, "Add", x, weight(graph, np.asarray(added, np.int64)))))
    assert compare(results[0], results[0], {}).passed
    assert not compare(results[0], results[1], {}).passed


def test_large_integers_are_compared_in_all_their_bits() -> None:
    a = np.asarray([2**60, 2**60 + 1])
    assert relative_error(a, a) == 0.0
    assert relative_error(a, a + 2) == float("inf")


def test_another_element_type_is_another_result() -> None:
    first, x = graph_of(DType.FLOAT, 3)
    second, y = graph_of(DType.FLOAT, 3)
    named(first, make(first, "Relu", x))
    named(second, make(second, "Cast", make(second, "Relu", y), to=DType.DOUBLE))
    assert not compare(first, second, {}).passed


def test_symbolic_graphs_are_compared_at_a_second_size() -> None:
    first, x = graph_of(DType.FLOAT, "N", 4)
    second, y = graph_of(DType.FLOAT, "N", 4)
    named(first, make(first, "Softmax", x, axis=1))
    # over all elements: the same for one row alone
    named(second, make(second, "Softmax", y, axis=0, flattened=1))
    assert compare(first, first, {"N": 1}).passed
    assert not compare(first, second, {"N": 1}).passed


def test_float16_batch_norms_are_folded() -> None:
    graph, x = graph_of(DType.FLOAT16, 1, 8, 6, 6)
    rng = np.random.default_rng(0)
    parts = [weight(graph, (np.abs(rng.standard_normal(8)) + 0.5).astype(np.float16)) for _ in range(4)]
    kernel = weight(graph, (rng.standard_normal((8, 8, 3, 3)) / 8).astype(np.float16))
    named(graph, make(graph, "BatchNormalization", make(graph, "Conv", x, kernel, pads=(1, 1, 1, 1)), *parts))
    best = taso.optimize(graph, backend="reference", never_slower=False)
    assert best.report.verified, best.report.verification
    assert [n.op.name for n in best.run_time_nodes] == ["Conv"]


class Off:
    """A program whose kernel is wrong by a thousandth."""

    kernels, peak_bytes = 1, 0

    def __init__(self, graph: Graph) -> None:
        self.graph = graph

    def __call__(self, feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        return {name: array * 1.001 for name, array in evaluate_graph(self.graph, feeds).items()}


def test_a_compiled_program_with_a_wrong_kernel_is_found_out() -> None:
    graph, x = graph_of(DType.FLOAT, 2, 3)
    named(graph, make(graph, "Tanh", x))
    feeds = random_feeds(graph, {}, 0)
    assert "off by" in check_program(Off(graph), graph, feeds)
    assert check_program(taso.compile(graph, backend="reference"), graph, feeds) == ""


@pytest.mark.parametrize(
    ("shape", "axis", "other"), [((2, 3), 0, (3,)), ((1, 16, 5, 5), 2, (1, 16, 1, 1)), ((5, 64), 0, (64,))]
)
def test_softmax_off_the_last_axis_is_right_with_a_fused_operand(
    shape: tuple[int, ...], axis: int, other: tuple[int, ...]
) -> None:
    try:
        library()
    except BackendUnavailable as error:
        pytest.skip(str(error))
    graph, x = graph_of(DType.FLOAT, *shape)
    bias = weight(graph, np.random.default_rng(1).standard_normal(other).astype(np.float32))
    for op in ("Softmax", "LogSoftmax"):
        graph.set_outputs([("y", make(graph, "Add", make(graph, op, x, axis=axis), bias))])
        assert check_program(taso.compile(graph, backend="onednn"), graph, random_feeds(graph, {}, 0)) == ""


TEXT = """<ir_version: 8, opset_import: ["" : {opset}]> g (float[1,4,9,9] x) => (float[?,?,?,?] y) {{ {node} }}"""


@pytest.mark.parametrize(
    ("opset", "to", "node"),
    [
        (12, 9, "y = MaxPool<kernel_shape=[2,2], strides=[2,2], ceil_mode=1>(x)"),
        (12, 9, "y = AveragePool<kernel_shape=[2,2], strides=[2,2], ceil_mode=1>(x)"),
        (12, 9, "y = MaxPool<kernel_shape=[2,2], dilations=[2,2]>(x)"),
        (21, 17, "y = AveragePool<kernel_shape=[2,2], dilations=[2,2]>(x)"),
        (13, 11, "y = Softmax<axis=1>(x)"),
        (13, 9, "a = ArgMax<axis=1, select_last_index=1>(x) y = Cast<to=1>(a)"),
    ],
)
def test_what_an_older_opset_cannot_say_is_refused_and_never_written_as_something_else(
    opset: int, to: int, node: str
) -> None:
    graph = taso.load(onnx.parser.parse_model(TEXT.format(opset=opset, node=node)))
    with pytest.raises(taso.ModelError, match=f"opset {to}"):
        taso.export_onnx(graph, opset=to)


def test_a_new_value_does_not_inherit_the_type_of_one_that_is_gone() -> None:
    model = onnx.parser.parse_model(
        """<ir_version: 8, opset_import: ["" : 17]>
        g (float[1,8,6,6] a, float[1,8,6,6] b) => (float[1,4,6,6] y)
        <float[4,8,1,1] v, float[4,8,1,1] w, float[1,4,6,6] concat>
        { concat = Conv(a, v)  c = Conv(b, w)  y = Add(concat, c) }"""
    )
    rng = np.random.default_rng(0)
    for name in "vw":
        array = rng.standard_normal((4, 8, 1, 1)).astype(np.float32)
        model.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    kept = [i for i in model.graph.value_info if i.name == "concat"]
    del model.graph.value_info[:]
    model.graph.value_info.extend(kept)
    rule = "Add(Conv(x, v), Conv(y, w)) => Conv(Concat(x, y, axis=1), Concat(v, w, axis=1))"
    condition = "is_weight(v) and is_weight(w) and shape(v) == shape(w) and shape(x) == shape(y) and rank(x) == 4"
    from taso.rules.text import parse_rule

    best = taso.optimize(
        model, backend="reference", never_slower=False,
        rules=parse_rule(f"{rule}\n  where {condition}\n"),
    )  # fmt: skip
    assert "Concat" in [n.op.name for n in best.run_time_nodes]
    onnx.checker.check_model(taso.export_onnx(best), full_check=True)


@pytest.mark.parametrize("threads", [0, -3, 100_000, 1.5, "two", True])
@pytest.mark.parametrize("backend", ["reference", "auto"])
def test_a_number_of_threads_that_makes_no_sense_is_one_sentence(threads: object, backend: str) -> None:
    graph = taso.new_graph()
    graph.relu(graph.new_input(dims=(2, 3)))
    with pytest.raises(taso.BackendError, match="threads must be a whole number from 1 to"):
        taso.compile(graph, backend=backend, threads=threads)  # type: ignore[arg-type]  # what is tried


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"seed": "a"}, "seed"),
        ({"seed": -1}, "seed"),
        ({"input_shapes": 3}, "input_shapes"),
        ({"input_shapes": {"input": 3}}, "no shape"),
        ({"rules": 7}, "rules are a file"),
    ],
)
def test_settings_that_make_no_sense_are_one_sentence(settings: dict[str, object], said: str) -> None:
    graph = taso.new_graph()
    graph.relu(graph.new_input(dims=(2, 3)))
    with pytest.raises(taso.TasoError, match=said):
        taso.optimize(graph, backend="reference", **settings)  # type: ignore[arg-type]  # what is tried


def test_a_program_is_fed_by_name() -> None:
    graph = taso.new_graph()
    graph.relu(graph.new_input(dims=(2, 3)))
    program = taso.compile(graph, backend="reference")
    for feeds in (None, 5, [np.zeros((2, 3), np.float32)]):
        with pytest.raises(taso.InputError, match="dictionary"):
            program(feeds)  # type: ignore[arg-type]  # what is tried


def test_a_kernel_of_the_original_that_cannot_be_measured_does_not_hide_what_else_can_be_saved(
    formula_backend: FormulaBackend,
) -> None:
    class Failing(FormulaBackend):
        def measure(self, kernel: Kernel) -> float:
            if kernel.anchor is not None and kernel.anchor.op.name == "Sigmoid":
                raise taso.BackendError("this one never runs")
            return super().measure(kernel)

    graph = taso.new_graph()
    x = graph.new_input(dims=(1, 3))
    graph.transpose(graph.transpose(graph.sigmoid(x), (1, 0)), (1, 0))
    best = taso.optimize(graph, backend=Failing(), never_slower=False)
    assert [n.op.name for n in best.run_time_nodes] == ["Sigmoid"]
    # in milliseconds; a penalty would be a million
    assert best.report.cost_before < 1000 and any("could not be measured" in m for m in best.report.messages)
