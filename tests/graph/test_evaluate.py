"""Evaluation agrees with ONNX's own node tests and with ONNX Runtime, frees what it can, and checks what it is fed."""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Mapping

import models
import numpy as np
import pytest
from models import model
from numpy.typing import NDArray
from onnx import TensorProto, numpy_helper
from onnx.backend.test.case.test_case import TestCase

from taso.graph.errors import GraphError, InputError
from taso.graph.evaluate import constant_value, evaluate_graph, evaluate_node
from taso.graph.graph import Graph
from taso.graph.onnx_import import load
from taso.graph.operator import REGISTRY, Trait, Weight
from taso.graph.ops.elementwise import ADD, MUL, RELU
from taso.graph.types import DType, TensorType

# ── ONNX's node tests ────────────────────────────────────────────────────────────────────────────────────────────

NODE_TESTS = models.node_tests()

# their right answers are written down to four digits
FOUR_DIGITS = (
    "test_averagepool_2d_ceil_last_window_starts_on_pad", "test_roialign_aligned_false", "test_roialign_aligned_true",
)  # fmt: skip

KNOWN_WRONG = {
    # onnx.reference stacks the scalars that a Loop scans along a second axis
    "test_range_float_type_positive_delta_expanded", "test_range_float16_type_positive_delta_expanded",
    "test_range_bfloat16_type_positive_delta_expanded", "test_range_int32_type_negative_delta_expanded",
    # onnx.reference knows no Scan 8
    "test_scan_sum",
}  # fmt: skip


def _random(name: str) -> bool:
    return "bernoulli" in name or "image_decoder" in name or "training" in name and "dropout" in name


def _tolerance(name: str, wanted: NDArray[np.generic]) -> float:
    """What one rounding more or less at the end may change."""
    if name in FOUR_DIGITS:
        return 5e-4
    return {"float64": 1e-6, "float32": 1e-5, "float16": 4e-3, "bfloat16": 2e-2}.get(str(wanted.dtype), 0.2)


def _array(value: object) -> object:
    return numpy_helper.to_array(value) if isinstance(value, TensorProto) else value


def _differences(case: TestCase) -> list[str]:
    inputs, outputs = case.data_sets[0]
    feeds = {v.name: _array(a) for v, a in zip(case.model.graph.input, inputs, strict=True)}
    found = evaluate_graph(load(case.model), feeds)
    wrong = []
    for declared, wanted in zip(case.model.graph.output, map(_array, outputs), strict=True):
        ours = found[declared.name]
        if isinstance(wanted, np.ndarray):
            if ours.shape != wanted.shape or ours.dtype != wanted.dtype:
                wrong.append(f"{case.name}: {ours.dtype}{ours.shape} is not {wanted.dtype}{wanted.shape}")
            elif models.relative_error(ours, wanted) > _tolerance(case.name, wanted):
                wrong.append(f"{case.name}: relative error {models.relative_error(ours, wanted)}")
    return wrong


def _cases_of(op: str) -> list[TestCase]:
    return [c for c in NODE_TESTS.values() if [n.op_type for n in c.model.graph.node] == [op]]


MODELLED = sorted(name for name, op in REGISTRY.items() if not op.internal and _cases_of(name))


@pytest.mark.parametrize("op", MODELLED)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_modelled_operators_pass_the_node_tests_of_onnx(op: str) -> None:
    wrong = [line for case in _cases_of(op) if not _random(case.name) for line in _differences(case)]
    assert not wrong


def test_most_modelled_operators_have_node_tests() -> None:
    assert len(MODELLED) > 70


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_everything_else_passes_the_node_tests_of_onnx() -> None:
    wrong = []
    for name, case in NODE_TESTS.items():
        if name not in KNOWN_WRONG and not _random(name) and name != "test_optional_has_element_empty_optional_input":
            wrong.extend(_differences(case))
    assert not wrong


# ── precision ────────────────────────────────────────────────────────────────────────────────────────────────────

DEEP = "g (float[64,64] x) => (float[64,64] y) { a = MatMul(x, x)  b = MatMul(a, x)  c = Sub(b, a)  y = MatMul(c, c) }"


def test_wide_evaluation_is_that_of_double_precision() -> None:
    x = np.random.default_rng(0).normal(size=(64, 64)).astype(np.float32)
    graph = load(model(DEEP))
    d = x.astype(np.float64)
    c = d @ d @ d - d @ d
    wide = evaluate_graph(graph, {"x": x}, wide=True)["y"]
    assert wide.dtype == np.float64
    assert models.relative_error(wide, c @ c) < 1e-13
    narrow = evaluate_graph(graph, {"x": x})["y"]
    assert narrow.dtype == np.float32
    assert 1e-9 < models.relative_error(narrow.astype(np.float64), c @ c) < 1e-5


def test_wide_evaluation_goes_through_operators_without_a_meaning() -> None:
    text = """g (float[3] x, bool[3] c) => (float[3] y) <int64[3] i = {2,1,0}> {
      a = Mul(x, x)  g = Gather(a, i)  w = Where(c, g, a)  h = Cast<to=10>(w)  f = Cast<to=1>(h)  y = Mul(f, f) }"""
    graph = load(model(text))
    x = np.array([1.1, 0.3, 2.7], np.float32)
    got = evaluate_graph(graph, {"x": x, "c": np.array([True, False, False])}, wide=True)["y"]
    d = x.astype(np.float64) ** 2
    assert models.relative_error(got, np.array([d[2], d[1], d[2]]) ** 2) < 1e-15


def test_narrow_evaluation_rounds_to_the_declared_type_after_each_node() -> None:
    graph = load(model("g (float16[1] x) => (float16[1] y) { a = Mul(x, x)  y = Div(a, x) }"))
    assert np.isinf(evaluate_graph(graph, {"x": np.array([300], np.float16)})["y"]).all()
    assert evaluate_graph(graph, {"x": np.array([300], np.float16)}, wide=True)["y"] == 300


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int64"])
def test_integers_wrap_and_truncate_as_in_onnx(dtype: str) -> None:
    proto = model(f"g ({dtype}[3] x, {dtype}[3] z) => ({dtype}[3] m, {dtype}[3] d) {{ m = Mul(x, z)  d = Div(x, z) }}")
    kind = np.dtype(dtype)
    high = np.iinfo(kind).max
    feeds = {"x": np.array([high, 7, 100], kind), "z": np.array([3, 2, 9], kind)}
    if kind.kind == "i":
        feeds["x"][1] = -7
    found = evaluate_graph(load(proto), feeds)
    for name, wanted in zip(("m", "d"), models.by_onnxruntime(proto, feeds), strict=True):
        assert np.array_equal(found[name], wanted)


def test_data_moves_bit_by_bit_in_any_type() -> None:
    text = "g (T[2,3] x) => (T[3,2,2] y) { t = Transpose(x)  u = Unsqueeze(t, a)  y = Concat<axis=2>(u, u) }"
    for name, array in (
        ("int64", np.array([[2**62 + 1, 2, 3], [4, 5, -(2**61) - 1]])),
        ("string", np.array([["a", "", "ü"], ["x", "yy", "z"]], object)),
        ("bool", np.array([[True, False, True], [False, False, True]])),
        ("double", np.array([[np.nan, 1e300, -0.0], [np.inf, 5, 6]])),
    ):
        proto = model(text.replace("T[", f"{name}[").replace(" {", " <int64[1] a = {2}> {", 1))
        got = evaluate_graph(load(proto), {"x": array})["y"]
        wanted = np.concatenate([array.T[:, :, None]] * 2, 2)
        assert got.dtype == wanted.dtype
        assert got.tolist() == wanted.tolist() if array.dtype == object else got.tobytes() == wanted.tobytes()


# ── symbolic dimensions, optional inputs ─────────────────────────────────────────────────────────────────────────


def test_symbolic_dimensions_take_the_sizes_of_the_arrays() -> None:
    proto = model("g (float[N,K] a, float[K,M] b) => (float[N,M] y) { m = MatMul(a, b)  y = Softmax(m) }")
    graph = load(proto)
    for sizes in ({"N": 1, "K": 2, "M": 3}, {"N": 4, "K": 7, "M": 1}):
        feeds = models.random_feeds(proto, symbols=sizes)
        got = evaluate_graph(graph, feeds)["y"]
        assert models.relative_error(got, models.by_onnxruntime(proto, feeds)[0]) < 1e-6


def test_nodes_evaluate_alone() -> None:
    graph = load(models.case("clip_no_min_relu"))
    clip = graph.operators[-1]
    (got,) = evaluate_node(clip, [np.array([-2, 0, 0.5, 9], np.float32)])
    assert got.tolist() == [-2, 0, 0.5, 1]


def test_an_operator_of_an_unknown_domain_has_no_meaning() -> None:
    graph = load(model("g (float[2] x) => (float[2] y) { y = my.Thing(x) }", domains={"my": 1}))
    with pytest.raises(GraphError, match="Thing"):
        evaluate_graph(graph, {"x": np.zeros(2, np.float32)})


# ── what is fed ──────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"a": None}, "input 'a' of type float.* is missing"), ({"c": np.zeros(2)}, "no input 'c'.*'a', 'b'"),
        ({"a": np.zeros((2, 3))}, "'a' must be float.*float64"), ({"a": np.zeros((2, 3), np.int32)}, "int32"),
        ({"a": np.zeros((2, 3, 1), np.float32)}, "2×3×1"), ({"a": np.zeros((2, 4), np.float32)}, "axis 1 must be 3"),
        ({"a": np.zeros((5, 3), np.float32)}, "'b' must be .*axis 1 must be 5 since 'a' has N = 5"),
    ],
)  # fmt: skip
def test_feeds_that_do_not_fit_are_refused(change: Mapping[str, NDArray[np.generic] | None], message: str) -> None:
    graph = load(model("g (float[N,3] a, float[3,N] b) => (float[N,N] y) { y = MatMul(a, b) }"))
    feeds = {"a": np.zeros((2, 3), np.float32), "b": np.zeros((3, 2), np.float32), **change}
    with pytest.raises(InputError, match=message):
        evaluate_graph(graph, {k: v for k, v in feeds.items() if v is not None})


# ── weights alone, memory ────────────────────────────────────────────────────────────────────────────────────────


def _weight(array: NDArray[np.generic]) -> Weight:
    return Weight(TensorType(DType.from_numpy(array.dtype), array.shape), array)


def test_values_of_weights_alone_are_constant() -> None:
    graph = Graph()
    a = graph.add_weight(_weight(np.array([1, -2], np.float32)))
    b = graph.add_weight(_weight(np.array([10, 20], np.float32)))
    value = graph.make(ADD, [graph.make(MUL, [a, b]).output, b]).output
    assert constant_value(value).tolist() == [20, -20]
    assert constant_value(value) is constant_value(value)
    x = graph.add_input("x", TensorType(DType.FLOAT, (2,)))
    with pytest.raises(GraphError, match="weights alone"):
        constant_value(graph.make(ADD, [x, a]).output)


def _peak(action: object) -> int:
    assert callable(action)
    gc.collect()
    tracemalloc.start()
    try:
        action()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_intermediate_values_are_freed_after_their_last_use() -> None:
    graph = Graph()
    size = 500_000
    value = graph.add_input("x", TensorType(DType.DOUBLE, (size,)))
    one = graph.add_weight(_weight(np.ones(size)))
    for _ in range(30):
        value = graph.make(RELU, [graph.make(ADD, [value, one]).output]).output
    graph.set_outputs([("y", value)])
    assert _peak(lambda: evaluate_graph(graph, {"x": np.zeros(size)})) < 6 * size * 8
    constant = Graph()
    total = constant.add_weight(_weight(np.ones(size)))
    for _ in range(30):
        total = constant.make(RELU, [constant.make(ADD, [total, total]).output]).output
    assert _peak(lambda: constant_value(total)) < 6 * size * 8


def test_not_a_number_and_infinity_pass_through() -> None:
    for name in ("inf_times_zero", "sub_self_nan"):
        feeds = {"x": np.array([np.inf, np.nan, 1], np.float32)}
        wanted = models.by_onnxruntime(models.case(name), feeds)[0]
        assert np.array_equal(evaluate_graph(load(models.case(name)), feeds)["y"], wanted, equal_nan=True)


def test_opaque_nodes_evaluate_with_what_their_bodies_capture() -> None:
    proto = models.case("if_outer_scope")
    graph = load(proto)
    assert any(n.op.has(Trait.OPAQUE) for n in graph.operators)
    for taken in (True, False):
        feeds = {"x": np.array([1, 2], np.float32), "cond": np.array(taken)}
        got = evaluate_graph(graph, feeds)["y"]
        assert np.array_equal(got, models.by_onnxruntime(proto, feeds)[0])
