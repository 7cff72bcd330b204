"""Faults that real and generated models brought to light stay away."""

from __future__ import annotations

import ml_dtypes
import models
import numpy as np
import onnx.checker
import pytest
from models import Arrays, model
from numpy.typing import NDArray
from onnx import ModelProto, TensorProto, helper, numpy_helper
from searching import FormulaBackend

import taso
from taso.graph.evaluate import evaluate_graph
from taso.search.verify import compare, random_feeds


def test_dimensions_called_question_mark_need_not_be_equal() -> None:
    proto = model("g (float[1,?,?] x) => (float[1,?,?] y) { y = Relu(x) }")
    best = taso.optimize(proto, backend=FormulaBackend(), progress=False, input_shapes={"x": (1, 3, 5)})
    feeds = {"x": np.arange(-7, 8, dtype=np.float32).reshape(1, 3, 5)}
    assert np.array_equal(taso.compile(best, backend="reference")(feeds)["y"], np.maximum(feeds["x"], 0))
    assert taso.export_onnx(best).graph.output == proto.graph.output


@pytest.mark.parametrize("operator", ["ReduceMean<axes=[1]>", "ReduceMax<axes=[1]>", "ReduceSum<axes=[1]>"])
def test_reductions_of_one_element_run(operator: str) -> None:
    proto = model(f"g (float[2,1] x) => (float[2,1] y) {{ y = {operator}(x) }}", opset=11)
    feeds = models.random_feeds(proto)
    assert np.array_equal(taso.compile(taso.load(proto))(feeds)["y"], models.by_onnxruntime(proto, feeds)[0])


def test_pooled_regions_of_constants_come_through() -> None:
    image = ",".join(str(i % 7) for i in range(30))
    proto = model(f"""
        g (float[1] u) => (float[1,1,2,3] y, float[1] z)
        <float[1,1,5,6] x = {{{image}}}, float[1,5] r = {{0,1,1,3,3}}> {{
            a = MaxRoiPool<pooled_shape=[2,3]>(x, r)
            y = Relu(a)
            b = Identity(u)
            z = Relu(b)
        }}""")
    best = taso.optimize(proto, backend=FormulaBackend(), verify=False, never_slower=False, progress=False)
    feeds = models.random_feeds(proto)
    found, wanted = (models.by_onnxruntime(p, feeds) for p in (taso.export_onnx(best), proto))
    assert all(np.array_equal(a, b) for a, b in zip(found, wanted, strict=True))


def test_pooled_regions_are_those_of_onnx_runtime() -> None:
    proto = model("""g (float[2,2,5,6] x, float[40,5] r) => (float[40,2,2,3] y) {
        y = MaxRoiPool<pooled_shape=[2,3], spatial_scale=0.5>(x, r) }""")
    rng = np.random.default_rng(0)
    # some regions lie outside, some end before they begin, some corners fall on halves
    corners = rng.integers(-2, 14, (40, 4))
    regions = np.concatenate([rng.integers(0, 2, (40, 1)), corners], 1).astype(np.float32)
    feeds = {"x": rng.normal(size=(2, 2, 5, 6)).astype(np.float32), "r": regions}
    ours = taso.compile(taso.load(proto), backend="reference")(feeds)["y"]
    assert np.array_equal(ours, models.by_onnxruntime(proto, feeds)[0])


# ── Loop and Scan ────────────────────────────────────────────────────────────────────────────────────────────────

REPEATED = {
    "a state that grows": """g (int64 n, int64[2] x) => (int64[k] y) <int64[1] c = {4}> {
        y = Loop (n, "", x) <body = b (int64 i, bool on, int64[] s) => (bool o, int64[] t) {
            a = Abs (s)  t = Concat<axis = 0> (a, c)  o = Identity (on) }>
    }""",
    "scanned scalars": """g (int64 n, float x) => (float y, float[k] z, bool[k] w) {
        y, z, w = Loop (n, "", x) <body = b (int64 i, bool on, float s) => (bool o, float t, float u, bool v) {
            t = Add (s, s)  u = Relu (s)  o = Identity (on)  v = Not (on) }>
    }""",
    "an end by condition": """g (int64 n, float[2] x) => (float[2] y, int64[k] z) {
        y, z = Loop ("", "", x) <body = b (int64 i, bool on, float[2] s) => (bool o, float[2] t, int64 j) {
            t = Add (s, s)  j = Identity (i)  o = Less (i, n) }>
    }""",
    "axes and directions": """g (int64 n, float[2] q, float[2,3,4] x, float[3,2] z)
        => (float[2] e, float[2,4,3] a, float[3,2] b) {
        e, a, b = Scan<num_scan_inputs = 2, scan_input_axes = [1, 0], scan_input_directions = [1, 0],
            scan_output_axes = [-1, 0], scan_output_directions = [0, 1],
            body = o (float[2] s, float[2,4] p, float[2] r) => (float[2] t, float[2,4] u, float[2] v) {
                t = Add (s, r)  u = Neg (p)  v = Mul (t, r) }> (q, x, z)
    }""",
}  # fmt: skip


def feeds_of(proto: ModelProto, count: int) -> Arrays:
    return {**models.random_feeds(proto), "n": np.asarray(count, np.int64)}


@pytest.mark.parametrize("what", REPEATED)
@pytest.mark.parametrize("count", [0, 1, 3])
def test_loops_and_scans_are_those_of_onnx_runtime(what: str, count: int) -> None:
    proto = model(REPEATED[what])
    feeds = feeds_of(proto, count)
    ours = taso.compile(taso.load(proto), backend="reference")(feeds)
    for value, wanted in zip(proto.graph.output, models.by_onnxruntime(proto, feeds), strict=True):
        assert models.relative_error(np.asarray(ours[value.name]), wanted) == 0


def test_a_loop_of_constants_is_folded_to_what_it_gives_or_kept() -> None:
    proto = model("""g (float[0,3] x) => (int64[4] y) <int64 n = {2}, int64[1] zero = {0}, int64[1] more = {4}> {
        s = Shape (x)  d = Gather (s, zero)  first = Concat<axis = 0> (d, more)
        y = Loop (n, "", first) <body = b (int64 i, bool on, int64[] s1) => (bool o, int64[] t) {
            t = Concat<axis = 0> (s1, more)  o = Identity (on) }>
    }""")
    best = taso.optimize(proto, backend=FormulaBackend(), verify=False, never_slower=False, progress=False)
    feeds = {"x": np.zeros((0, 3), np.float32)}
    assert models.by_onnxruntime(taso.export_onnx(best), feeds)[0].tolist() == [0, 4, 4, 4]


def test_bodies_of_old_models_hold_no_initializers() -> None:
    proto = model("""g (bool c, float[2,3] x) => (float[2,3] y) {
        y = If (c) <
            then_branch = t () => (float[2,3] a) {
                w = Constant<value = float[3] {1, 2, 3}> ()  v = Constant<value = float[3] {4, 5, 6}> ()
                p = Mul (x, w)  a = Mul (p, v) },
            else_branch = e () => (float[2,3] b) { b = Neg (x) }>
    }""", opset=8, ir_version=3)
    best = taso.optimize(proto, backend=FormulaBackend(), never_slower=False, progress=False)
    after = taso.export_onnx(best)
    onnx.checker.check_model(after, full_check=True)
    assert best.report is not None and best.report.body_rewrites
    for chosen in (True, False):
        feeds = {**models.random_feeds(proto), "c": np.asarray(chosen)}
        found, wanted = (models.by_onnxruntime(p, feeds)[0] for p in (after, proto))
        assert models.relative_error(found, wanted) < 1e-6


# ── element types ────────────────────────────────────────────────────────────────────────────────────────────────

NAMES = {code: name for name, code in TensorProto.DataType.items() if code != TensorProto.UNDEFINED}


def some_of(dtype: int, size: int) -> NDArray[np.generic]:
    if dtype == TensorProto.STRING:
        return np.array(["a", "b"] * size, object)[:size]
    return np.asarray(np.arange(size) % 2 + 1).astype(helper.tensor_dtype_to_np_dtype(dtype))


@pytest.mark.parametrize("dtype", NAMES, ids=NAMES.values())
def test_every_element_type_is_optimized_compared_and_run(dtype: int) -> None:
    moves = "FLOAT6" not in NAMES[dtype]
    given, made = helper.make_tensor_value_info("x", dtype, [2, 3]), helper.make_tensor_value_info("y", dtype, [2, 3])
    nodes = [helper.make_node("Transpose", ["x"], ["t"]), helper.make_node("Transpose", ["t"], ["y"])]
    if not moves:
        # of these Cast is the only operator that has them in and out
        nodes = [helper.make_node("Cast", ["x"], ["t"], to=1), helper.make_node("Cast", ["t"], ["y"], to=dtype)]
    graph = helper.make_graph(nodes, "g", [given], [made])
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 28)], ir_version=14)
    loaded = taso.load(proto)
    check = compare(loaded, loaded, {})
    assert check.passed or check.inconclusive and "depend" in check.reason, check.reason
    best = taso.optimize(loaded, backend=FormulaBackend(), never_slower=False, progress=False)
    assert [n.op_type for n in taso.export_onnx(best).graph.node] == (["Identity"] if moves else ["Cast", "Cast"])
    x = some_of(dtype, 6).reshape(2, 3)
    y = taso.compile(best, backend="reference")({"x": x})["y"]
    assert y.dtype == x.dtype and np.asarray(y).tolist() == x.tolist()


@pytest.mark.parametrize("name", ["float6_e2m3fn", "float6_e3m2fn"])
def test_floats_of_six_bits_come_out_packed_as_onnx_packs_them(name: str) -> None:
    dtype = np.dtype(getattr(ml_dtypes, name))
    for size in (0, 1, 2, 3, 4, 5, 9):
        held = numpy_helper.from_array(np.linspace(-4, 4, size).astype(dtype), "w")
        out = helper.make_tensor_value_info("y", 1, [size])
        given = helper.make_tensor_value_info("x", 1, [size])
        nodes = [helper.make_node("Cast", ["w"], ["c"], to=1), helper.make_node("Add", ["x", "c"], ["y"])]
        graph = helper.make_graph(nodes, "g", [given], [out], [held])
        loaded = taso.load(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 28)], ir_version=14))
        after = taso.export_onnx(loaded)
        assert after.graph.initializer[0].raw_data == held.raw_data
        found = evaluate_graph(loaded, {"x": np.zeros(size, np.float32)})["y"]
        assert np.array_equal(found, numpy_helper.to_array(held).astype(np.float32))


def test_a_constant_rounded_to_eight_bits_is_rounded_in_the_comparison_too() -> None:
    proto = model("g (float[2] x) => (float[2] y) <float[2] w = {3.3, 5.7}> { y = Add (x, w) }", opset=24)
    before = model("""g (float[2] x) => (float[2] y) <float[2] w = {3.3, 5.7}> {
        c = Cast<to = 17> (w)  d = Cast<to = 1> (c)  y = Add (x, d) }""", opset=24)
    rounded = np.array([3.3, 5.7], np.float32).astype(ml_dtypes.float8_e4m3fn).astype(np.float32)
    proto.graph.initializer[0].CopyFrom(numpy_helper.from_array(rounded, "w"))
    assert compare(taso.load(before), taso.load(proto), {}).passed


# ── what the comparison feeds ────────────────────────────────────────────────────────────────────────────────────


def test_shapes_that_are_inputs_with_defaults_keep_them_in_trials() -> None:
    proto = model("""g (float[2,3] x, int64[1] s) => (float[6] y) <int64[1] s = {-1}> {
        r = Reshape (x, s)  y = Relu (r) }""")
    graph = taso.load(proto)
    assert random_feeds(graph, {}, 0)["s"].tolist() == [-1]
    assert compare(graph, graph, {}).passed


def test_indices_that_point_outside_are_refused_in_a_sentence() -> None:
    graph = taso.load(model("""g (float[1,1,4,4] x, float[1,5] r) => (float[1,1,2,2] y) {
        y = MaxRoiPool<pooled_shape = [2, 2]> (x, r) }"""))
    feeds = {"x": np.ones((1, 1, 4, 4), np.float32), "r": np.array([[3, 0, 0, 2, 2]], np.float32)}
    with pytest.raises(taso.TasoError, match="MaxRoiPool cannot be computed of these inputs"):
        evaluate_graph(graph, feeds)


# ── constants ────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_constant_that_the_reference_cannot_compute_is_left_to_the_runtime() -> None:
    proto = model("""g (int32[2] x) => (int32[2] z) <int32[2,3] w = {1, 2, 3, 4, 5, 6}> {
        c = ReduceLogSumExp<axes = [1], keepdims = 0> (w)
        a = Identity (x)  z = Add (a, c) }""", opset=11)
    best = taso.optimize(proto, backend=FormulaBackend(), verify=False, never_slower=False, progress=False)
    after = taso.export_onnx(best)
    feeds = {"x": np.array([1, 2], np.int32)}
    assert np.array_equal(models.by_onnxruntime(after, feeds)[0], models.by_onnxruntime(proto, feeds)[0])
    assert [n.op_type for n in after.graph.node] == ["ReduceLogSumExp", "Add"]


@pytest.mark.parametrize("norm", [1, 2])
def test_norms_are_of_the_sizes_of_elements(norm: int) -> None:
    proto = model(f"""g (float[2,3] x) => (float[2,3] y, float[2,3] z) <float[2,3] w = {{-1, 2, -3, 0, 0, 0}}> {{
        y = LpNormalization<p = {norm}> (x)
        c = LpNormalization<p = {norm}> (w)  z = Add (y, c) }}""")
    feeds = {"x": np.array([[1, -2, 3], [-4, 5, -6]], np.float32)}
    wanted = models.by_onnxruntime(proto, feeds)
    ours = taso.compile(taso.load(proto), backend="reference")(feeds)
    best = taso.optimize(proto, backend=FormulaBackend(), verify=False, never_slower=False, progress=False)
    for found in (list(ours.values()), models.by_onnxruntime(taso.export_onnx(best), feeds)):
        assert all(models.relative_error(np.asarray(a), b) < 1e-6 for a, b in zip(found, wanted, strict=True))


def test_padded_strings_are_empty_where_they_are_padded() -> None:
    proto = model("""g (string[2] x) => (string[3] y) <int64[2] p = {1, 0}> { y = Pad (x, p) }""", opset=19)
    found = taso.compile(taso.load(proto), backend="reference")({"x": np.array(["a", "b"], object)})["y"]
    assert found.tolist() == ["", "a", "b"]


def test_a_number_that_became_an_attribute_is_written_in_the_type_that_it_had() -> None:
    proto = model("""g (int64[2,3] i, int32[2] v) => (int32[2,4,3] y) <float[1] d = {4}> {
        y = OneHot<axis = 1> (i, d, v) }""", opset=14)
    best = taso.optimize(proto, backend=FormulaBackend(), never_slower=False, progress=False)
    feeds = {"i": np.array([[0, 1, 3], [2, 2, 0]]), "v": np.array([0, 1], np.int32)}
    # ONNX Runtime has no OneHot of whole numbers of 64 bits that gives some of 32
    found, wanted = (models.by_onnxruntime(p, feeds)[0] for p in (taso.export_onnx(best), proto))
    assert np.array_equal(found, wanted)
