"""Symbolic dimensions: kept, measured at, frozen, folded where known, and never taken for one of their values."""

from __future__ import annotations

import gc
import logging
from collections.abc import Mapping

import models
import numpy as np
import onnx
import onnx.checker
import pytest
from models import Arrays, model
from onnx import ModelProto, TensorProto, helper, numpy_helper

import taso
from taso.backends import constants
from taso.graph.evaluate import evaluate_graph
from taso.graph.graph import Graph, Value
from taso.graph.known import Known
from taso.graph.onnx_shapes import fold_shapes
from taso.graph.types import SymDim, TensorType
from taso.rules.tester import test_rule as tried
from taso.rules.text import parse_rule

TOLERANCE = 1e-5
SIZES = ({"N": 1, "T": 3}, {"N": 2, "T": 5}, {"N": 4, "T": 1})


def optimized(proto: ModelProto, **settings: object) -> taso.Graph:
    """With the reference backend, whose result depends on no measurement."""
    return taso.optimize(proto, backend="reference", budget=8, **settings)  # type: ignore[arg-type]  # each test gives its own


def op_types(proto: ModelProto) -> list[str]:
    return [node.op_type for node in proto.graph.node]


def same_at(proto: ModelProto, other: ModelProto, sizes: Mapping[str, int]) -> None:
    """Both models give the same outputs in ONNX Runtime."""
    onnx.checker.check_model(other, full_check=True)
    feeds = models.random_feeds(proto, symbols=sizes)
    wanted, found = models.by_onnxruntime(proto, feeds), models.by_onnxruntime(other, feeds)
    for a, b in zip(found, wanted, strict=True):
        assert models.relative_error(a, b) <= TOLERANCE


# ── what a file says of its shapes ───────────────────────────────────────────────────────────────────────────────

NET = """g (float[N,4,H,W] x, float[M] unused) => (float[N,8,H,W] y, float[N,D] z) <float[8,4,1,1] w, float[8] b> {
  c = Conv(x, w, b)  y = Relu(c)  p = GlobalAveragePool(y)  i = Identity(p)  z = Flatten(i)
}"""


def net() -> ModelProto:
    proto = model(NET)
    rng = np.random.default_rng(0)
    del proto.graph.initializer[:]
    for name, shape in (("w", (8, 4, 1, 1)), ("b", (8,))):
        proto.graph.initializer.append(numpy_helper.from_array(rng.standard_normal(shape).astype(np.float32), name))
    proto.graph.value_info.append(helper.make_tensor_value_info("c", TensorProto.FLOAT, ["N", 8, "H", "W"]))
    proto.graph.output[0].doc_string = "what comes out"
    return proto


def test_symbols_of_inputs_and_outputs_come_through_optimize() -> None:
    proto = net()
    best = optimized(proto, input_shapes={"x": (2, 4, 5, 6)})
    assert best.report.changed and best.report.messages[-1] == "measured with H=5, M=1, N=2, W=6"
    again = taso.export_onnx(best)
    assert list(again.graph.input) == list(proto.graph.input)
    assert list(again.graph.output) == list(proto.graph.output)
    for sizes in ({"N": 1, "H": 3, "W": 3, "M": 2}, {"N": 3, "H": 7, "W": 2, "M": 1}):
        same_at(proto, again, sizes)


def test_freeze_makes_inputs_outputs_and_value_infos_numbers() -> None:
    proto = net()
    best = optimized(proto, input_shapes={"x": (2, 4, 5, 6), "unused": (7,)}, freeze=True)
    again = taso.export_onnx(best)
    for declared in (*again.graph.input, *again.graph.output, *again.graph.value_info):
        assert all(d.HasField("dim_value") for d in declared.type.tensor_type.shape.dim), declared
    shapes = [[d.dim_value for d in v.type.tensor_type.shape.dim] for v in (*again.graph.input, *again.graph.output)]
    assert shapes == [[2, 4, 5, 6], [7], [2, 8, 5, 6], [2, 8]]
    assert again.graph.output[0].doc_string == "what comes out"
    assert best.symbols == frozenset()
    same_at(proto, again, {"N": 2, "H": 5, "W": 6, "M": 7})
    with pytest.raises(taso.InputError, match="must be"):
        taso.compile(best, "reference")({"x": np.zeros((1, 4, 5, 6), np.float32), "unused": np.zeros(7, np.float32)})


def test_freeze_needs_every_size() -> None:
    with pytest.raises(taso.InputError, match="dimension 'M' of input 'unused'"):
        optimized(net(), input_shapes={"x": (2, 4, 5, 6)}, freeze=True)


def test_freeze_gives_a_shape_to_an_input_without_rank() -> None:
    proto = model("g (float[N] x) => (float[K] y) { y = Relu(x) }")
    proto.graph.input[0].type.tensor_type.ClearField("shape")
    proto.graph.output[0].type.tensor_type.ClearField("shape")
    with pytest.raises(taso.InputError, match="shape of input 'x'"):
        optimized(proto, freeze=True)
    again = taso.export_onnx(optimized(proto, input_shapes={"x": (2, 3)}, freeze=True))
    for declared in (*again.graph.input, *again.graph.output):
        assert [d.dim_value for d in declared.type.tensor_type.shape.dim] == [2, 3]


@pytest.mark.parametrize(
    "shapes, words",
    [
        ({"x": (1, 4, 5)}, "4 dimensions"),
        ({"x": (1, 5, 5, 5)}, "a dimension of 4"),
        ({"nothing": (1,)}, "'nothing'"),
        ({"x": (0, 4, 5, 6)}, "above 0"),
        ({"x": (-1, 4, 5, 6)}, "above 0"),
    ],
)
def test_input_shapes_that_do_not_fit_are_refused(shapes: dict[str, tuple[int, ...]], words: str) -> None:
    for freeze in (False, True):
        with pytest.raises(taso.InputError, match=words):
            optimized(net(), input_shapes=shapes, freeze=freeze)


def test_freezing_at_a_size_that_an_operator_refuses_says_so() -> None:
    text = "g (float[N,4] x, float[K,4] y) => (float[N,4] z) { t = Transpose(y) m = MatMul(x, t) z = MatMul(m, y) }"
    proto = model(text)
    best = optimized(proto, input_shapes={"x": (3, 4), "y": (2, 4)}, freeze=True)
    assert str(best.outputs[0][1].type) == "float[3×4]"
    proto = model("g (float[N,K] x, float[L,4] y) => (float[N,4] z) { z = MatMul(x, y) }")
    with pytest.raises(taso.TasoError, match="3.*2|2.*3"):
        optimized(proto, input_shapes={"x": (1, 3), "y": (2, 4)}, freeze=True)


# ── rules that hold at some sizes only ───────────────────────────────────────────────────────────────────────────

SUM = "g (float[N,T] x) => (float[N,T] y) { a = Abs(x) s = ReduceSum<keepdims=1>(a, axis) y = Mul(x, s) }"
AXIS = numpy_helper.from_array(np.asarray([0], np.int64), "axis")
AT_ONE_SIZE = [
    ("ReduceSum(x, axes=a, keepdims=1) => x\n where a == (0,) and dim(x, 0) == 1\n exact: exact", {"x": (1, 3)}),
    ("Abs(x) => Abs(Identity(x))\n where dim(x, 1) < 4\n exact: exact", {"x": (1, 3)}),
    ("Abs(x) => Abs(Identity(x))\n where dim(x, 0) == dim(x, 1)\n exact: exact", {"x": (2, 2)}),
    ("Abs(x) => Abs(Identity(x))\n where dim(x, 0) * 2 == dim(x, 1)\n exact: exact", {"x": (2, 4)}),
]


def _applies(rule_text: str, proto: ModelProto, **settings: object) -> bool:
    rule = tried(parse_rule(rule_text))
    seen = taso.optimize(proto, alpha=100.0, budget=4, backend="reference", rules=rule, verify=False, **settings)  # type: ignore[arg-type]  # as above
    return seen.report.candidates > 0


@pytest.mark.parametrize("rule, shapes", AT_ONE_SIZE)
def test_a_rule_that_holds_at_the_measured_size_only_is_not_taken(
    rule: str, shapes: dict[str, tuple[int, int]]
) -> None:
    proto = model(SUM)
    proto.graph.initializer.append(AXIS)
    assert not _applies(rule, proto, input_shapes=shapes)
    assert _applies(rule, proto, input_shapes=shapes, freeze=True), "at this size alone it does hold"


def test_a_rule_whose_condition_holds_for_every_value_is_taken() -> None:
    proto = model(SUM)
    proto.graph.initializer.append(AXIS)
    assert _applies("Abs(x) => Abs(Identity(x))\n where dim(x, 0) + 1 > dim(x, 0)\n exact: exact", proto)


# ── shape arithmetic ─────────────────────────────────────────────────────────────────────────────────────────────

CONSTANTS = "int64 i0 = {0}, int64 i1 = {1}, int64 i2 = {2}, int64[1] v0 = {0}, int64[1] v1 = {1}, int64[1] v2 = {2}"
CHAINS = {
    # name: (inputs => output, body, operators that are left)
    "merge heads": (
        "float[N,T,4,6] x", "float[N,T,K] y",
        """s = Shape(x) n = Gather(s, i0) t = Gather(s, i1) a = Unsqueeze(n, v0) b = Unsqueeze(t, v0)
           g = Concat<axis=0>(a, b, heads) y = Reshape(x, g)""", ["Reshape"],
    ),
    "split heads by division": (
        "float[N,T,24] x", "float[N,T,4,K] y",
        """s = Shape(x) n = Slice(s, v0, v2, v0) d = Gather(s, i2) q = Div(d, four) u = Unsqueeze(q, v0)
           g = Concat<axis=0>(n, v4, u) y = Reshape(x, g)""", ["Reshape"],
    ),
    "a product of symbols": (
        "float[N,T,6] x", "float[M,6] y",
        """s = Shape(x) n = Gather(s, i0) t = Gather(s, i1) p = Mul(n, t) u = Unsqueeze(p, v0) c = Cast<to=7>(v6)
           g = Concat<axis=0>(u, c) y = Reshape(x, g)""", ["Reshape"],
    ),
    "a sum that cancels": (
        "float[N,T,6] x", "float[N,T,3,2] y",
        """s = Shape(x) n = Slice(s, v0, v2, v0) d = Slice(s, v2, v3, v0) e = Sub(d, v3)
           g = Concat<axis=0>(n, e, v2) y = Reshape(x, g)""", ["Reshape"],
    ),
    "expand to what is there": (
        "float[N,T] x", "float[N,T] y",
        """s = Shape(x) r = ConstantOfShape<value=int64[1]{1}>(v2) m = Mul(r, v1) k = Equal(s, m)
           o = Where(no, m, s) y = Expand(x, o)""", ["Expand"],
    ),
    "the torch way of expanding": (
        "float[N,1,4] x", "float[N,3,4] y",
        """s = Shape(x) n = Gather(s, v0) w = Concat<axis=0>(n, v3, minus) r = ConstantOfShape<value=int64[1]{1}>(v3)
           k = Equal(w, minus3) o = Where(k, r, w) y = Expand(x, o)""", ["Expand"],
    ),
    "a slice of everything": (
        "float[N,T] x", "float[N,T] y",
        "s = Shape(x) t = Gather(s, v1) a = Slice(x, v0, t, v1) y = Relu(a)", ["Relu"],
    ),
    "a slice of one known axis": (
        "float[N,T,4] x", "float[N,T,2] y",
        """s = Shape(x) t = Gather(s, v1) e = Concat<axis=0>(t, v2) z = Concat<axis=0>(v0, v0)
           a = Concat<axis=0>(v1, v2) y = Slice(x, z, e, a)""", ["Slice"],
    ),
    "a known range": (
        "float[N,4] x", "float[N,4] y",
        "s = Shape(x) d = Gather(s, i1) r = Range(i0, d, i1) f = Cast<to=1>(r) y = Add(x, f)", ["Add"],
    ),
    "a scale from a shape": (
        "float[N,4] x", "float[N,4] y",
        "s = Shape(x) d = Gather(s, i1) f = Cast<to=1>(d) q = Sqrt(f) y = Div(x, q)", ["Div"],
    ),
    "numel by reduction": (
        "float[N,3,4] x", "float[N,12] y",
        """s = Shape(x) d = Slice(s, v1, v3, v0) p = ReduceProd<keepdims=1>(d) n = Gather(s, v0)
           g = Concat<axis=0>(n, p) y = Reshape(x, g)""", ["Reshape"],
    ),
}  # fmt: skip
MORE = (
    "int64[1] heads = {24}, int64 four = {4}, int64[1] v3 = {3}, int64[1] v4 = {4}, int32[1] v6 = {6}, "
    "int64[1] minus = {-1}, int64[3] minus3 = {-1,-1,-1}, bool no = {0}"
)


def chain(name: str) -> ModelProto:
    given, made, body, _ = CHAINS[name]
    return model(f"g ({given}) => ({made}) <{CONSTANTS}, {MORE}> {{ {body} }}")


@pytest.mark.parametrize("name", CHAINS)
def test_shape_arithmetic_that_nobody_needs_is_gone_from_the_optimized_file(name: str) -> None:
    proto = chain(name)
    best = optimized(proto, verify=False)
    again = taso.export_onnx(best)
    left = CHAINS[name][3]
    assert op_types(again) in (left, [o for o in left if o != "Expand"], ["Identity"])
    assert list(again.graph.output) == list(proto.graph.output)
    for sizes in SIZES:
        same_at(proto, again, sizes)


@pytest.mark.parametrize("name", CHAINS)
def test_loading_and_writing_without_optimizing_computes_the_same(name: str) -> None:
    proto = chain(name)
    for sizes in SIZES:
        same_at(proto, taso.export_onnx(taso.load(proto)), sizes)


@pytest.mark.parametrize("name", CHAINS)
@pytest.mark.parametrize("backend", ["reference", "onednn"])
def test_a_compiled_program_takes_any_size(name: str, backend: str) -> None:
    proto = chain(name)
    program = taso.compile(proto, backend)
    for sizes in SIZES:
        feeds = models.random_feeds(proto, symbols=sizes)
        found = program(feeds)
        for value, wanted in zip(proto.graph.output, models.by_onnxruntime(proto, feeds), strict=True):
            assert models.relative_error(np.asarray(found[value.name]), wanted) <= TOLERANCE


def test_a_program_with_computed_shapes_is_compiled_once_for_each_size(caplog: pytest.LogCaptureFixture) -> None:
    proto = chain("a product of symbols")
    program = taso.compile(proto, "onednn")
    with caplog.at_level(logging.WARNING):
        for sizes in (*SIZES, *SIZES):
            program(models.random_feeds(proto, symbols=sizes))
    assert len(program._cache) == len(SIZES)  # type: ignore[attr-defined]  # how often it compiled shows nowhere else
    assert not caplog.records, "nothing had to be evaluated node by node"


def test_one_number_that_a_caller_gives_becomes_what_is_left() -> None:
    text = f"""g (float[N,6] x, int64[1] rows) => (float[R,3] y) <{CONSTANTS}, {MORE}> {{
      g = Concat<axis=0>(rows, v3) y = Reshape(x, g) }}"""
    proto = model(text)
    best = fold_shapes(taso.load(proto))
    (node,) = best.operators
    assert node.op.name == "Reshape" and node.attrs.ints("shape") == (-1, 3)
    assert best.input_names == ["x", "rows"], "an input that is read no more stays an input"
    for n, rows in ((1, 2), (4, 8), (4, -1), (3, 6)):
        x = np.random.default_rng(0).standard_normal((n, 6)).astype(np.float32)
        feeds: Arrays = {"x": x, "rows": np.asarray([rows], np.int64)}
        (wanted,) = models.by_onnxruntime(proto, feeds)
        assert np.array_equal(evaluate_graph(best, feeds)["y"], wanted)


@pytest.mark.parametrize(
    "body",
    [
        # two numbers that a caller gives
        "g = Concat<axis=0>(rows, rows) y = Reshape(x, g)",
        # a number that a caller gives beside one to infer
        "g = Concat<axis=0>(rows, minus) y = Reshape(x, g)",
    ],
)
def test_a_target_that_is_open_twice_stays_computed(body: str) -> None:
    graph = taso.load(model(f"g (float[N,4] x, int64[1] rows) => (float[A,B] y) <{CONSTANTS}, {MORE}> {{ {body} }}"))
    assert fold_shapes(graph) is graph


def test_a_division_that_rounds_is_not_taken_for_another_size() -> None:
    """(N·T / 2) · 2 is N·T for even ones only."""
    proto = model(
        f"""g (float[N,T] x) => (float[A,B] y) <{CONSTANTS}, {MORE}> {{
          s = Shape(x) n = Gather(s, v0) t = Gather(s, v1) h = Div(n, v2) m = Mul(h, v2)
          g = Concat<axis=0>(m, t) y = Reshape(x, g) }}"""
    )
    graph = fold_shapes(taso.load(proto))
    assert "Reshape" in [n.op.name.removeprefix("opaque ") for n in graph.operators]
    feeds = models.random_feeds(proto, symbols={"N": 3, "T": 2})
    with pytest.raises(taso.TasoError):
        evaluate_graph(graph, feeds)
    feeds = models.random_feeds(proto, symbols={"N": 4, "T": 2})
    assert np.array_equal(evaluate_graph(graph, feeds)["y"], feeds["x"])


def test_shapes_that_are_outputs_stay_outputs() -> None:
    proto = model("g (float[2,3] x, float[N,3] z) => (int64[2] s, int64[2] t) { s = Shape(x) t = Shape(z) }")
    again = taso.export_onnx(optimized(proto))
    assert [v.name for v in again.graph.output] == ["s", "t"]
    same_at(proto, again, {"N": 4})


def test_a_known_value_above_the_limit_is_not_written_into_the_file() -> None:
    text = """g (float[N,5000] x) => (float[N,5000] y) <int64 i0 = {0}, int64 i1 = {1}> {
      s = Shape(x) d = Gather(s, i1) r = Range(i0, d, i1) f = Cast<to=1>(r) y = Add(x, f) }"""
    proto = model(text)
    again = taso.export_onnx(optimized(proto))
    assert "Range" in op_types(again) and again.ByteSize() < 5000
    same_at(proto, again, {"N": 2})


def test_node_names_and_doc_strings_stay_with_operators_that_are_read_again() -> None:
    proto = chain("merge heads")
    proto.graph.node[-1].name, proto.graph.node[-1].doc_string = "the one", "why"
    (node,) = taso.export_onnx(optimized(proto, verify=False)).graph.node
    assert (node.name, node.doc_string, list(node.output)) == ("the one", "why", ["y"])


def test_the_report_tells_what_was_folded() -> None:
    best = optimized(chain("merge heads"))
    assert best.report.shapes_folded == 6 and best.report.changed
    assert "operators fewer" in best.report.summary()
    assert taso.optimize(chain("merge heads"), budget=0, backend="reference").report.shapes_folded == 0


# ── what is known of numbers ─────────────────────────────────────────────────────────────────────────────────────


def _number(graph: Graph, name: str) -> Value:
    return next(v for v, names in graph.info.value_names.items() if name in names)


def test_arithmetic_on_sizes_is_that_of_polynomials() -> None:
    text = f"""g (float[N,T,6] x, int64[2] given) => (int64[1] q) <{CONSTANTS}, {MORE}> {{
      s = Shape(x) n = Gather(s, v0) t = Gather(s, v1) m = Mul(n, t) e = Mul(m, v6l) q = Div(e, v2)
      f = Div(n, v2) back = Div(m, t) minus_n = Neg(n) h = Div(minus_n, v2) u = Add(given, v1) }}"""
    proto = model(text.replace(CONSTANTS, CONSTANTS + ", int64[1] v6l = {6}"))
    proto.graph.output.extend(
        helper.make_tensor_value_info(n, TensorProto.INT64, None) for n in ("f", "back", "h", "u")
    )
    graph, known = taso.load(proto), Known()
    said = {name: known.elements(_number(graph, name)) for name in ("q", "f", "back", "h", "u")}
    n, t = SymDim.named("N"), SymDim.named("T")
    assert said["q"] == [n * t * 3] and said["f"] == [n // 2] and said["back"] == [n]
    assert said["h"] is not None and not isinstance(said["h"][0], int) and "N" not in str(said["h"][0])
    given = said["u"]
    assert given is not None and given[0] != given[1] and not any(map(known.is_size, given))
    assert known(_number(graph, "q")) is None
    assert isinstance(graph.inputs[0].type, TensorType)


def test_weights_are_laid_out_once_for_all_sizes_and_both_graphs_of_a_race() -> None:
    rng = np.random.default_rng(0)
    text = "g (float[N,16,H,W] x, float[16,16,1,1] w) => (float[N,16,H,W] y) { c = Conv(x, w)  y = Relu(c) }"
    proto = model(text, ir_version=3)
    proto.graph.initializer.append(numpy_helper.from_array(rng.standard_normal((16, 16, 1, 1), np.float32), "w"))
    graph = taso.load(proto)
    before = len(constants.LAID_OUT)
    programs = [taso.compile(graph, "onednn"), taso.compile(fold_shapes(graph), "onednn")]
    for program in programs:
        for h in (8, 9, 10):
            program({"x": rng.standard_normal((1, 16, h, h)).astype(np.float32)})
    assert len(constants.LAID_OUT) == before + 1
    del programs, program
    gc.collect()
    assert len(constants.LAID_OUT) == before, "and they go with the programs"
