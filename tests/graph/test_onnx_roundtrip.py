"""Models go through import and export with nothing lost: against ONNX Runtime with its optimizations off."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import models
import numpy as np
import onnx
import onnx.checker
import pytest
from models import Arrays, model
from onnx import ModelProto, TensorProto, helper, numpy_helper

from taso.graph import onnx_export
from taso.graph.errors import InputNotFoundError, ModelError
from taso.graph.evaluate import constant_value, evaluate_graph
from taso.graph.graph import Graph
from taso.graph.onnx_export import export, save
from taso.graph.onnx_import import load
from taso.graph.operator import Trait, Weight
from taso.graph.ops.elementwise import ADD, RELU
from taso.graph.ops.linear import ENLARGE
from taso.graph.ops.movement import CONCAT, TILE
from taso.graph.types import DType, TensorType

ROUNDING = 2e-6
EVALUATION = 1e-5


def interface(proto: ModelProto) -> tuple[list[bytes], list[bytes]]:
    """Everything that a model says of its inputs and outputs."""
    return (
        [v.SerializeToString(deterministic=True) for v in proto.graph.input],
        [v.SerializeToString(deterministic=True) for v in proto.graph.output],
    )


def round_trip(
    proto: ModelProto, feeds: Arrays | None = None, *, check: bool = True, evaluate: bool = True,
    symbols: dict[str, int] | None = None,
) -> tuple[Graph, ModelProto]:  # fmt: skip
    """Loads and exports `proto`, and compares what both compute, and how they look from outside."""
    feeds = models.random_feeds(proto, symbols=symbols) if feeds is None else feeds
    before = proto.SerializeToString(deterministic=True)
    graph = load(proto)
    again = export(graph)
    assert proto.SerializeToString(deterministic=True) == before, "load changed the model that it was given"
    if check:
        onnx.checker.check_model(again, full_check=True)
    assert interface(again) == interface(proto)
    assert again.ir_version == proto.ir_version
    assert {o.domain: o.version for o in again.opset_import} == {o.domain: o.version for o in proto.opset_import}
    names = [n.name for n in proto.graph.node if n.name]
    duplicates = len(set(names)) < len(names)
    wanted = (models.by_reference if duplicates else models.by_onnxruntime)(proto, feeds)
    found = models.by_onnxruntime(again, feeds)
    for a, b in zip(found, wanted, strict=True):
        assert models.relative_error(a, b) <= (ROUNDING if duplicates else 0)
    if evaluate:
        ours = evaluate_graph(graph, feeds)
        for value, b in zip(proto.graph.output, wanted, strict=True):
            assert models.relative_error(ours[value.name], b) <= EVALUATION
    return graph, again


def modelled(graph: Graph) -> bool:
    return all(not node.op.has(Trait.OPAQUE) for node in graph.operators)


def op_types(proto: ModelProto) -> list[str]:
    return [node.op_type for node in proto.graph.node]


# ── whole files ──────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("name", models.case_names())
def test_every_case_comes_through_unchanged(name: str) -> None:
    round_trip(models.case(name))


@pytest.mark.parametrize("name", [
    pytest.param(n, marks=pytest.mark.slow if n in ("bvlc_alexnet", "vgg19", "zfnet512") else ()) for n in models.LIGHT
])  # fmt: skip
def test_light_models_with_random_weights_come_through_unchanged(name: str) -> None:
    proto = models.seeded_light(name)
    feeds = models.random_feeds(proto)
    graph, again = round_trip(proto, feeds)
    moved = models.by_onnxruntime(proto, {k: v + 1 for k, v in feeds.items()})
    assert models.relative_error(moved[0], models.by_onnxruntime(proto, feeds)[0]) > 1e-2, "the output is blind"
    assert modelled(graph)
    assert [n.name for n in again.graph.node] == [n.name for n in proto.graph.node]


@pytest.mark.parametrize("name", models.LIGHT)
def test_light_models_as_shipped_keep_their_size_and_their_generated_weights(name: str) -> None:
    proto = models.light(name)
    again = export(load(proto))
    onnx.checker.check_model(again, full_check=True)
    assert len(again.SerializeToString()) < 1.25 * len(proto.SerializeToString())
    assert op_types(again).count("ConstantOfShape") == op_types(proto).count("ConstantOfShape")


def test_every_node_test_of_onnx_comes_through_the_checker() -> None:
    changed, refused = [], []
    for case in models.node_tests().values():
        again = export(load(case.model))
        if interface(again) != interface(case.model):
            changed.append(case.name)
        if passes_checker(case.model) and not passes_checker(again):
            refused.append(case.name)
    assert len(models.node_tests()) > 1000
    assert not changed and not refused


def passes_checker(proto: ModelProto) -> bool:
    try:
        onnx.checker.check_model(proto, full_check=True)
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError):
        return False
    return True


# ── 1: attributes ────────────────────────────────────────────────────────────────────────────────────────────────

CONV = "g (float[1,4,7,9] x) => (float[N,C,H,W] y) <float[4,2,3,2] w = {%s}> { y = Conv<group=2, %s>(x, w) }"
NUMBERS = ",".join(str(round(float(v), 3)) for v in np.random.default_rng(1).normal(size=48))


@pytest.mark.parametrize(
    "attributes",
    [
        "pads=[0,1,2,0]", "pads=[3,3,3,3], strides=[2,3]", "dilations=[2,3], pads=[2,0,1,2]", 'auto_pad="SAME_UPPER"',
        'auto_pad="SAME_LOWER", strides=[2,2]', 'auto_pad="VALID"',
        "kernel_shape=[3,2]",
    ],
)  # fmt: skip
def test_convolutions_keep_pads_strides_dilations_and_groups(attributes: str) -> None:
    graph, _ = round_trip(model(CONV % (NUMBERS, attributes)))
    assert modelled(graph)


@pytest.mark.parametrize("operator", ["MaxPool", "AveragePool"])
@pytest.mark.parametrize(
    "attributes",
    [
        "kernel_shape=[3,2], pads=[0,1,2,0], strides=[2,3]", "kernel_shape=[2,2], strides=[2,2], ceil_mode=1",
        'kernel_shape=[3,3], auto_pad="SAME_LOWER", strides=[2,2]',
    ],
)  # fmt: skip
def test_pools_keep_their_windows(operator: str, attributes: str) -> None:
    round_trip(model(f"g (float[1,2,7,9] x) => (float[A,B,C,D] y) {{ y = {operator}<{attributes}>(x) }}"))


@pytest.mark.parametrize("counted", [0, 1])
def test_average_pool_keeps_count_include_pad(counted: int) -> None:
    text = "g (float[1,1,5,5] x) => (float[1,1,5,5] y) "
    text += f"{{ y = AveragePool<kernel_shape=[3,3], pads=[1,1,1,1], count_include_pad={counted}>(x) }}"
    round_trip(model(text))


def test_gemm_keeps_alpha_beta_and_transpositions() -> None:
    text = "g (float[4,3] a, float[5,4] b, float[5] c) => (float[3,5] y) "
    text += "{ y = Gemm<alpha=0.3, beta=-1.7, transA=1, transB=1>(a, b, c) }"
    round_trip(model(text))


def test_shape_keeps_start_and_end() -> None:
    round_trip(model("g (float[2,3,4,5] x) => (int64[2] y) { y = Shape<start=-3, end=3>(x) }"))


def test_attributes_are_the_decimals_that_were_written() -> None:
    graph = load(model("g (float[2] x) => (float[2] y) { y = LeakyRelu<alpha=0.1>(x) }"))
    assert graph.operators[0].attrs["alpha"] == 0.1


# ── 4: inputs and outputs ────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "text",
    [
        "g (float[2] x) => (float[2] x) { }",
        "g (float[2] x) => (float[2] x, float[2] y) { y = Relu(x) }",
        "g (float[2] x) => (float[2] y, float[2] y) { y = Relu(x) }",
        "g (float[2] x) => (float[2] y, float[2] z) { y = Relu(x)  z = Relu(y) }",
        "g (float[2] x) => (float[2] z, float[2] y) { y = Relu(x)  z = Relu(x) }",
        "g (float[2] b, float[3] unused, float[2] a) => (float[2] y) { y = Sub(a, b) }",
        "g (float[2] x) => (float[2] w, float[2] y) <float[2] w = {1,2}> { y = Add(x, w) }",
        "g (float[2] x) => (float[2] c, float[2] y) { c = Constant<value_floats=[1.0, 2.0]>()  y = Add(x, c) }",
        "g (float[2] x) => (float[2] y) { y = Identity(x) }",
        "g (float[2] x) => (float[2] y, float[2] z) { h = Identity(x)  y = Identity(h)  z = Relu(h) }",
    ],
)
def test_inputs_and_outputs_keep_name_order_and_number(text: str) -> None:
    round_trip(model(text))


def test_an_output_that_became_an_input_or_a_weight_gets_an_identity() -> None:
    proto = model("g (float[2] x) => (float[2] y, float[2] z) <float[2] w = {1,2}> { y = Relu(x)  z = Relu(w) }")
    graph = load(proto)
    weight = next(n for n in graph.nodes if n.op.name == "Weight").output
    graph.set_outputs([("y", graph.inputs[0]), ("z", weight)])
    again = export(graph)
    onnx.checker.check_model(again, full_check=True)
    x = np.array([-1, 5], np.float32)
    assert [a.tolist() for a in models.by_onnxruntime(again, {"x": x})] == [[-1, 5], [1, 2]]
    assert op_types(again) == ["Identity", "Identity"]


def test_an_output_may_not_take_the_name_of_an_input() -> None:
    graph = load(model("g (float[2] x) => (float[2] y) { y = Relu(x) }"))
    graph.set_outputs([("x", graph.outputs[0][1])])
    with pytest.raises(ModelError, match="output 'x'"):
        export(graph)


# ── 5: names and sharing ─────────────────────────────────────────────────────────────────────────────────────────


def test_a_shared_weight_is_written_once_and_stays_shared() -> None:
    text = "g (float[2] x) => (float[2] y) <float[2] w = {1,2}> { a = Add(x, w)  b = Mul(a, w)  y = Sub(w, b) }"
    _, again = round_trip(model(text))
    assert [t.name for t in again.graph.initializer] == ["w"]


def test_new_names_never_clash_with_names_of_the_file() -> None:
    text = """g (float[2] relu, bool add) => (float[2] weight) <float[2] constant = {1,2}> {
      add_1 = Add(relu, constant)
      weight = If<then_branch = t () => (float[2] relu_1) { relu_1 = Neg(add_1) },
                  else_branch = e () => (float[2] weight_1) { weight_1 = Abs(add_1) }>(add)
    }"""
    graph = load(model(text))
    (_, old), = graph.outputs
    extra = graph.make(ADD, [old, graph.add_weight(_floats([3, 4]))]).output
    graph.set_outputs([("weight", graph.make(RELU, [extra]).output), ("more", extra)])
    again = export(graph)
    onnx.checker.check_model(again, full_check=True)
    feeds = {"relu": np.array([1, -9], np.float32), "add": np.array(False)}
    (out, _) = models.by_onnxruntime(again, feeds)
    assert out.tolist() == [5, 11]


def _floats(values: object) -> Weight:
    array = np.asarray(values, np.float32)
    return Weight(TensorType(DType.FLOAT, array.shape), array)


# ── 8: operators and domains that nobody knows ───────────────────────────────────────────────────────────────────


def test_an_unknown_domain_stays_in_the_middle_of_what_is_known() -> None:
    text = 'g (float[2,N] x) => (float[2,N] y) { a = Relu(x)  b, c = my.own.Thing<k=3, s="q">(a, , a)  y = Add(b, c) }'
    proto = model(text, domains={"my.own": 7})
    graph = load(proto)
    again = export(graph)
    onnx.checker.check_model(again, full_check=True)
    assert op_types(again) == ["Relu", "Thing", "Add"]
    assert again.graph.node[1] == proto.graph.node[1]
    assert {o.domain: o.version for o in again.opset_import} == {"": 17, "my.own": 7}


def test_an_operator_that_onnx_does_not_know_is_kept() -> None:
    proto = model("g (float[2] x) => (float[2] y) { a = Foo<q=1>(x)  y = Relu(a) }")
    again = export(load(proto))
    assert list(again.graph.node) == list(proto.graph.node)


def test_declared_types_around_foreign_operators_are_kept() -> None:
    text = "g (float[2] x) => (float[3,4] y) <float[3,4] a> { a = my.own.Thing(x)  y = Relu(a) }"
    proto = model(text, domains={"my.own": 1})
    graph = load(proto)
    assert graph.operators[1].output.type == TensorType(DType.FLOAT, (3, 4))
    assert [v.name for v in export(graph).graph.value_info] == ["a"]


def test_non_tensor_values_pass_through() -> None:
    text = """g (float[6] x) => (float[2] y) <int64 two = {2}, int64 one = {1}> {
      parts = SplitToSequence<axis=0>(x, two)  y = SequenceAt(parts, one) }"""
    round_trip(model(text))


# ── 9: node names ────────────────────────────────────────────────────────────────────────────────────────────────


def test_node_names_survive_and_duplicates_become_unique() -> None:
    text = "g (float[2] x) => (float[2] y) { [n] a = Relu(x)  [n] b = Sigmoid(x)  c = Tanh(a)  "
    text += "[m] d = Add(b, c)  y = Neg(d) }"
    _, again = round_trip(model(text))
    assert [n.name for n in again.graph.node] == ["n", "n_1", "", "m", ""]


def test_nodes_in_any_order_are_sorted() -> None:
    proto = model("g (float[2] x) => (float[2] y) { y = Relu(z)  z = Neg(x) }")
    again = export(load(proto))
    onnx.checker.check_model(again, full_check=True)
    assert op_types(again) == ["Neg", "Relu"]


# ── 10: optional inputs ──────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "text",
    [
        "g (float[4] x, float m) => (float[4] y) { y = Clip(x, , m) }",
        "g (float[4] x) => (float[4] y) <float m = {0.5}> { y = Clip(x, , m) }",
        "g (float[4] x) => (float[4] y) { y = Clip(x, , ) }",
        "g (float[1,1,2,2] x) => (float[1,1,4,4] y) <int64[4] s = {1,1,4,4}> { y = Resize(x, , , s) }",
        """g (float[3,1,2] x, float[1,4,2] w, float[1,4,1] r, float[1,1,1] h) => (float[3,1,1,1] y)
           { y = LSTM<hidden_size=1>(x, w, r, , , h) }""",
        "g (float[4] x) => (float[4] y) { y, mask = Dropout(x) }",
        """g (float[3,1,2] x, float[1,4,2] w, float[1,4,1] r) => (float[1,1,1] c)
           { , , c = LSTM<hidden_size=1>(x, w, r) }""",
    ],
)
def test_inputs_and_outputs_left_out_stay_left_out(text: str) -> None:
    round_trip(model(text))


# ── 11: element types ────────────────────────────────────────────────────────────────────────────────────────────

NUMERIC = [d for d in DType if d not in (DType.UNDEFINED, DType.STRING)]


@pytest.mark.parametrize("dtype", NUMERIC, ids=lambda d: d.name)
@pytest.mark.parametrize("outside", [False, True])
def test_weights_of_every_element_type_keep_their_bits(dtype: DType, outside: bool, tmp_path: Path) -> None:
    rng = np.random.default_rng(2)
    array = rng.integers(0, 2, (37, 29)).astype(dtype.numpy)
    if dtype.is_float or dtype is DType.COMPLEX64:
        array = rng.normal(size=(37, 29)).astype(np.float32).astype(dtype.numpy)
    written = numpy_helper.from_array(array, "w")
    proto = model("g (float[1] x) => (float[1] x) {}", opset=25, ir_version=13)
    proto.graph.initializer.append(written)
    proto.graph.output.append(helper.make_tensor_value_info("w", dtype.value, array.shape))
    graph = load(proto)
    value = dict(graph.outputs)["w"]
    assert value.type == TensorType(dtype, (37, 29))
    assert evaluate_graph(graph, {"x": np.zeros(1, np.float32)})["w"].tobytes() == array.tobytes()
    save(graph, tmp_path / "m.onnx", external_data=outside)
    back = onnx.load(str(tmp_path / "m.onnx"))
    assert back.graph.initializer[0].raw_data == written.raw_data
    assert back.graph.initializer[0].data_type == dtype.value
    reread = dict(load(tmp_path / "m.onnx").outputs)["w"]
    assert constant_value(reread).tobytes() == array.tobytes()


@pytest.mark.parametrize("dtype", NUMERIC, ids=lambda d: d.name)
def test_weights_in_typed_fields_read_as_onnx_reads_them(dtype: DType) -> None:
    raw = numpy_helper.from_array(np.arange(6).reshape(2, 3).astype(dtype.numpy), "w")
    values = numpy_helper.to_array(raw)
    plain = values.astype(np.complex128 if "COMPLEX" in dtype.name else np.float32).reshape(-1).tolist()
    typed = helper.make_tensor("w", dtype.value, [2, 3], plain)
    assert not typed.HasField("raw_data")
    proto = model("g (float[1] x) => (float[1] x) {}", opset=25, ir_version=13)
    proto.graph.initializer.append(typed)
    proto.graph.output.append(helper.make_tensor_value_info("w", dtype.value, [2, 3]))
    found = constant_value(dict(load(proto).outputs)["w"])
    assert found.dtype == values.dtype and found.tobytes() == values.tobytes()


def test_strings_pass_through() -> None:
    text = "g (string[2] x) => (string[4] y) { c = Constant<value_strings=[\"é\", \"\"]>()  y = Concat<axis=0>(x, c) }"
    round_trip(model(text), {"x": np.array(["a", "ß"], object)})


@pytest.mark.parametrize("dtype", ["double", "float16", "int64", "int32", "uint8", "int8"])
def test_arithmetic_keeps_its_element_type(dtype: str) -> None:
    text = f"g ({dtype}[3] x) => ({dtype}[3] y) <{dtype}[3] w = {{1,2,3}}> {{ a = Mul(x, w)  y = Max(a, x) }}"
    round_trip(model(text), evaluate=dtype != "float16")


@pytest.mark.parametrize("field", ["value_int=3", "value_ints=[1,2]", "value_float=0.5", "value_floats=[0.5,1.5]"])
def test_constants_keep_their_form(field: str) -> None:
    kind = "int64" if "int" in field else "float"
    _, again = round_trip(model(f"g ({kind}[2] x) => ({kind}[2] y) {{ [k] c = Constant<{field}>()  y = Add(x, c) }}"))
    assert again.graph.node[0].attribute[0].name == field.split("=")[0]
    assert again.graph.node[0].name == "k"


def test_sparse_weights_survive() -> None:
    values = numpy_helper.from_array(np.array([2, -3], np.float32), "w")
    indices = numpy_helper.from_array(np.array([1, 5], np.int64), "w_indices")
    proto = model("g (float[2,3] x) => (float[2,3] y) { y = Add(x, w) }")
    proto.graph.sparse_initializer.add().CopyFrom(helper.make_sparse_tensor(values, indices, [2, 3]))
    # ONNX's inference takes no sparse operand, so its full check refuses the model as it is
    _, again = round_trip(proto, check=False)
    assert again.graph.sparse_initializer == proto.graph.sparse_initializer


# ── 13: randomness ───────────────────────────────────────────────────────────────────────────────────────────────


def test_equal_nodes_are_merged_and_random_ones_are_not() -> None:
    text = """g (float[50] x, bool c) => (float[50] s, float[50] r, float[50] i) {
      a = Relu(x)  b = Relu(x)  s = Sub(a, b)
      p = RandomNormalLike(x)  q = RandomNormalLike(x)  r = Sub(p, q)
      u = If<then_branch = t () => (float[50] m) { m = RandomUniformLike(x) },
             else_branch = e () => (float[50] n) { n = Neg(x) }>(c)
      v = If<then_branch = t () => (float[50] m) { m = RandomUniformLike(x) },
             else_branch = e () => (float[50] n) { n = Neg(x) }>(c)
      i = Sub(u, v)
    }"""
    graph = load(model(text))
    assert [n.op.name for n in graph.operators].count("Relu") == 1
    again = export(graph)
    onnx.checker.check_model(again, full_check=True)
    s, r, _ = models.by_onnxruntime(again, {"x": np.ones(50, np.float32), "c": np.array(True)})
    assert not s.any() and r.all()
    assert op_types(again).count("If") == 2


@pytest.mark.parametrize(
    "text",
    [
        "g (float[9] x) => (float[9] y) <bool t = {1}, float r = {0.5}> { y = Dropout(x, r, t) }",
        """g (float[2,3] x, float[3] s, float[3] b, float[3] m, float[3] v) => (float[2,3] y)
           { y, rm, rv = BatchNormalization<training_mode=1>(x, s, b, m, v) }""",
    ],
)
def test_training_mode_stays_as_it_is(text: str) -> None:
    graph = load(model(text))
    (node,) = graph.operators
    assert node.op.has(Trait.OPAQUE) and node.op.has(Trait.RANDOM)
    onnx.checker.check_model(export(graph), full_check=True)


# ── 14: folding ──────────────────────────────────────────────────────────────────────────────────────────────────


def test_generated_weights_are_written_as_they_were() -> None:
    text = """g (float[1000,1000] x) => (float[1000,1000] y) <int64[2] s = {1000,1000}, float[1,1] one = {1}> {
      z = ConstantOfShape(s)  t = Tile(one, s)  e = Expand(one, s)
      a = Add(x, z)  b = Add(a, t)  y = Add(b, e) }"""
    _, again = round_trip(model(text))
    assert len(again.SerializeToString()) < 1000
    assert sorted(op_types(again)) == ["Add", "Add", "Add", "ConstantOfShape", "Expand", "Tile"]


def _with_rule_made_node(repeats: int) -> Graph:
    graph = Graph()
    x = graph.add_input("x", TensorType(DType.FLOAT, (2 * 1000 * repeats,)))
    w = graph.add_weight(_floats(np.arange(1000)))
    both = graph.make(CONCAT, [w, w], {"axis": 0}, origin="rule").output
    tiled = graph.make(TILE, [both], {"repeats": (repeats,)}, origin="rule").output
    graph.set_outputs([("y", graph.make(ADD, [x, tiled]).output)])
    return graph


def test_what_rules_make_of_weights_is_folded_while_it_stays_small() -> None:
    assert op_types(export(_with_rule_made_node(1), fold_limit=4000)) == ["Add"]
    big = export(_with_rule_made_node(1000), fold_limit=4000)
    onnx.checker.check_model(big, full_check=True)
    assert op_types(big) == ["Tile", "Add"] and len(big.SerializeToString()) < 10000


def test_operators_without_an_onnx_name_are_always_folded() -> None:
    graph = load(model("g (float[1,1,5,5] x) => (float[1,1,5,5] y) <float[1,1,1,1] w = {2}> { y = Conv(x, w) }"))
    (conv,) = graph.operators
    wide = graph.make(ENLARGE, [conv.inputs[1]], {"kernel_shape": (3, 3)}, origin="rule").output
    fresh = graph.make(conv.op, [conv.inputs[0], wide], {**conv.attrs, "pads": (1, 1, 1, 1)})
    graph.set_outputs([("y", fresh.output)])
    again = export(graph, fold_limit=0)
    onnx.checker.check_model(again, full_check=True)
    x = np.random.default_rng(0).normal(size=(1, 1, 5, 5)).astype(np.float32)
    assert models.relative_error(models.by_onnxruntime(again, {"x": x})[0], 2 * x) <= ROUNDING


# ── 15: external data, size, memory ──────────────────────────────────────────────────────────────────────────────


def _external(folder: Path) -> Path:
    proto = model("g (float[40,30] x) => (float[40,30] y) { y = Add(x, w) }")
    array = np.random.default_rng(3).normal(size=(40, 30)).astype(np.float32)
    proto.graph.initializer.append(numpy_helper.from_array(array, "w"))
    path = folder / "m.onnx"
    onnx.save(proto, str(path), save_as_external_data=True, location="m.bin", size_threshold=0)
    return path


def test_external_data_is_read_and_written(tmp_path: Path) -> None:
    path = _external(tmp_path)
    x = {"x": np.ones((40, 30), np.float32)}
    wanted = models.by_onnxruntime(onnx.load(str(path)), x)
    graph = load(path)
    assert models.relative_error(models.by_onnxruntime(export(graph), x)[0], wanted[0]) == 0
    (tmp_path / "out").mkdir()
    save(graph, tmp_path / "out" / "n.onnx", external_data=True)
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["n.onnx", "n.onnx.data"]
    onnx.checker.check_model(str(tmp_path / "out" / "n.onnx"), full_check=True)
    again = onnx.load(str(tmp_path / "out" / "n.onnx"))
    assert models.relative_error(models.by_onnxruntime(again, x)[0], wanted[0]) == 0
    assert models.relative_error(evaluate_graph(load(tmp_path / "out" / "n.onnx"), x)["y"], wanted[0]) == 0


def test_a_model_can_be_saved_over_the_files_it_was_read_from(tmp_path: Path) -> None:
    path = _external(tmp_path)
    x = {"x": np.ones((40, 30), np.float32)}
    wanted = evaluate_graph(load(path), x)["y"]
    os.rename(tmp_path / "m.bin", tmp_path / "m.onnx.data")
    proto = onnx.load(str(path), load_external_data=False)
    next(e for e in proto.graph.initializer[0].external_data if e.key == "location").value = "m.onnx.data"
    path.write_bytes(proto.SerializeToString())
    graph = load(path)
    save(graph, path, external_data=True)
    assert np.array_equal(evaluate_graph(graph, x)["y"], wanted)
    assert np.array_equal(evaluate_graph(load(path), x)["y"], wanted)


def test_weights_of_external_data_are_views_of_the_mapped_file(tmp_path: Path) -> None:
    graph = load(_external(tmp_path))
    weight = next(n for n in graph.nodes if n.op.name == "Weight").attrs["data"]
    assert isinstance(weight, Weight)
    assert not weight.array().flags.owndata


def _damage(folder: Path, **fields: str) -> Path:
    path = _external(folder)
    proto = onnx.load(str(path), load_external_data=False)
    for entry in proto.graph.initializer[0].external_data:
        entry.value = fields.pop(entry.key, entry.value)
    for key, value in fields.items():
        proto.graph.initializer[0].external_data.add(key=key, value=value)
    path.write_bytes(proto.SerializeToString())
    return path


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"location": "../secret.bin"}, "outside the folder"),
        ({"location": "/etc/passwd"}, "outside the folder"),
        ({"location": "link.bin"}, "outside the folder"),
        ({"location": ""}, "outside the folder"),
        ({"location": "gone.bin"}, "is not there"),
        ({"length": "4804"}, "has only"),
        ({"length": "4796"}, "needs 4800 bytes"),
        ({"length": "x"}, "not a number of bytes"),
        ({"offset": "4"}, "has only"),
        ({"offset": "-4"}, "not a number of bytes"),
    ],
)
def test_external_data_that_is_not_there_as_said_is_refused(
    tmp_path: Path, fields: dict[str, str], message: str
) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "secret.bin").write_bytes(bytes(4800))
    os.symlink(tmp_path / "secret.bin", tmp_path / "in" / "link.bin")
    with pytest.raises(ModelError, match=message) as raised:
        load(_damage(tmp_path / "in", **fields))
    assert "'w'" in str(raised.value)


def test_external_data_of_a_model_without_a_path_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="path"):
        load(_external(tmp_path).read_bytes())


def test_external_data_inside_bodies_and_constants_comes_along(tmp_path: Path) -> None:
    text = """g (bool c) => (float[2] y) { k = Constant<value = float[2] {5, 6}>()
      y = If<then_branch = t () => (float[2] r) <float[2] w = {1, 2}> { r = Add(w, k) },
             else_branch = e () => (float[2] s) { s = Neg(k) }>(c) }"""
    proto = model(text)
    wanted = models.by_onnxruntime(proto, {"c": np.array(True)})
    tensors = [proto.graph.node[0].attribute[0].t, proto.graph.node[1].attribute[0].g.initializer[0]]
    data = b""
    for tensor in tensors:
        raw = numpy_helper.to_array(tensor).tobytes()
        tensor.ClearField("float_data")
        tensor.ClearField("raw_data")
        tensor.data_location = TensorProto.EXTERNAL
        for key, value in {"location": "d.bin", "offset": str(len(data)), "length": str(len(raw))}.items():
            tensor.external_data.add(key=key, value=value)
        data += raw
    (tmp_path / "d.bin").write_bytes(data)
    (tmp_path / "m.onnx").write_bytes(proto.SerializeToString())
    again = export(load(tmp_path / "m.onnx"))
    onnx.checker.check_model(again, full_check=True)
    assert models.by_onnxruntime(again, {"c": np.array(True)})[0].tolist() == wanted[0].tolist()


def test_a_model_above_the_limit_goes_to_two_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onnx_export, "LIMIT", 4000)
    graph = load(_external(tmp_path))
    with pytest.raises(ModelError, match="2 GB"):
        export(graph)
    (tmp_path / "out").mkdir()
    save(graph, tmp_path / "out" / "n.onnx")
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["n.onnx", "n.onnx.data"]


@pytest.mark.parametrize("outside", [False, True])
def test_a_failed_save_leaves_nothing_behind_and_the_old_file_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, outside: bool
) -> None:
    graph = load(models.case("add_zero_broadcasts"))
    target = tmp_path / "m.onnx"
    target.write_bytes(b"old")

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(onnx_export.os, "fsync", full)
    with pytest.raises(ModelError, match="No space left"):
        save(graph, target, external_data=outside)
    assert [p.name for p in tmp_path.iterdir()] == ["m.onnx"]
    assert target.read_bytes() == b"old"


def test_saving_where_nothing_can_be_written_says_so(tmp_path: Path) -> None:
    graph = load(models.case("add_zero_broadcasts"))
    with pytest.raises(ModelError, match="cannot be written"):
        save(graph, tmp_path / "no" / "such" / "folder.onnx")
    (tmp_path / "folder").mkdir()
    for outside in (False, True):
        with pytest.raises(ModelError):
            save(graph, tmp_path / "folder", external_data=outside)
    assert [p.name for p in tmp_path.iterdir()] == ["folder"]


# ── 16: bodies ───────────────────────────────────────────────────────────────────────────────────────────────────

NESTED = """g (float[2] x, bool c) => (float[2] y) <float[2] k = {1,2}> {
  h = Relu(x)  h2 = Relu(x)
  y = If<then_branch = t () => (float[2] r) {
           q = Mul(h2, k)
           r = If<then_branch = tt () => (float[2] p) { p = Add(q, h) },
                  else_branch = ee () => (float[2] o) { o = Sub(h2, k) }>(c)
         }, else_branch = e () => (float[2] s) { s = Neg(h) }>(c)
}"""


@pytest.mark.parametrize("taken", [True, False])
def test_names_that_bodies_capture_follow_their_values(taken: bool) -> None:
    proto = model(NESTED)
    feeds = {"x": np.array([1, -2], np.float32), "c": np.array(taken)}
    graph, again = round_trip(proto, feeds)
    assert op_types(again) == ["Relu", "If"], "h2 is h, inside the bodies too"


def test_body_names_give_way_to_new_names_outside() -> None:
    graph = load(model(NESTED))
    h = next(n for n in graph.operators if n.op is RELU)
    # the outer value takes a name that a body uses for its own
    graph.info.value_names[h.output] = ["q"]
    again = export(graph)
    onnx.checker.check_model(again, full_check=True)
    feeds = {"x": np.array([1, -2], np.float32), "c": np.array(True)}
    assert models.by_onnxruntime(again, feeds)[0].tolist() == models.by_onnxruntime(model(NESTED), feeds)[0].tolist()


def test_bodies_with_large_weights_come_through() -> None:
    text = """g (float[600,600] x, bool c) => (float[600,600] y) {
      y = If<then_branch = t () => (float[600,600] r) { r = Add(x, w) },
             else_branch = e () => (float[600,600] s) { s = Sub(x, v) }>(c) }"""
    proto = model(text)
    rng = np.random.default_rng(5)
    branches = [a.g for a in proto.graph.node[0].attribute]
    held = numpy_helper.from_array(rng.normal(size=(600, 600)).astype(np.float32), "w")
    branches[0].initializer.append(held)
    made = helper.make_node("Constant", [], ["v"], value=numpy_helper.from_array(numpy_helper.to_array(held) + 1))
    branches[1].node.insert(0, made)
    for taken in (True, False):
        graph, again = round_trip(proto, {**models.random_feeds(proto), "c": np.array(taken)})
    assert [a.g for a in again.graph.node[0].attribute] == branches
    assert graph.outputs[0][1].type == TensorType(DType.FLOAT, (600, 600))


def test_loops_keep_what_they_capture_and_carry() -> None:
    text = """g (float[2] x, int64 n) => (float[2] y, float[K,2] all) <float[2] step = {1, 0.5}, bool go = {1}> {
      d = Mul(x, step)
      y, all = Loop<body = b (int64 i, bool cin, float[2] v) => (bool cout, float[2] w, float[2] o) {
        cout = Identity(cin)  w = Add(v, d)  o = Identity(w) }>(n, go, x)
    }"""
    round_trip(model(text), {"x": np.array([1, 2], np.float32), "n": np.array(3, np.int64)})


# ── 17: operator sets ────────────────────────────────────────────────────────────────────────────────────────────

BY_OPSET = [
    (11, "g (float[2,3,4] x) => (float[2,3,4] y) { y = Softmax(x) }"),
    (13, "g (float[2,3,4] x) => (float[2,3,4] y) { y = Softmax(x) }"),
    (11, "g (float[2,3,4] x) => (float[2,3,4] y) { y = LogSoftmax<axis=0>(x) }"),
    (11, "g (float[1,3,1] x) => (float[3] y) { y = Squeeze<axes=[0,-1]>(x) }"),
    (13, "g (float[1,3,1] x) => (float[3] y) <int64[2] a = {0,-1}> { y = Squeeze(x, a) }"),
    (11, "g (float[3] x) => (float[1,3,1] y) { y = Unsqueeze<axes=[0,-1]>(x) }"),
    (13, "g (float[3] x) => (float[1,3,1] y) <int64[2] a = {0,-1}> { y = Unsqueeze(x, a) }"),
    (11, "g (float[6] x) => (float[2] a, float[4] b) { a, b = Split<axis=0, split=[2,4]>(x) }"),
    (13, "g (float[6] x) => (float[2] a, float[4] b) <int64[2] s = {2,4}> { a, b = Split(x, s) }"),
    (18, "g (float[7] x) => (float[4] a, float[3] b) { a, b = Split<num_outputs=2>(x) }"),
    (7, "g (float[4] x) => (float[4] y) { y = Dropout<ratio=0.3>(x) }"),
    (12, "g (float[4] x) => (float[4] y) <float r = {0.3}> { y = Dropout(x, r) }"),
    (8, "g (float[4] x) => (float[4] y) { y = Clip<min=-0.5>(x) }"),
    (11, "g (float[4] x) => (float[4] y) <float lo = {-0.5}> { y = Clip(x, lo) }"),
    (11, "g (float[2,3] x) => (float[2,1] y) { y = ReduceSum<axes=[-1]>(x) }"),
    (13, "g (float[2,3] x) => (float[2] y) <int64[1] a = {-1}> { y = ReduceSum<keepdims=0>(x, a) }"),
    (17, "g (float[2,3] x) => (float[2,1] y) { y = ReduceMean<axes=[1]>(x) }"),
    (18, "g (float[2,3] x) => (float[2,1] y) <int64[1] a = {1}> { y = ReduceMean(x, a) }"),
    (9, "g (float[5,5] x) => (float[2,5] y) { y = Slice<starts=[1], ends=[3]>(x) }"),
    (13, """g (float[5,5] x) => (float[5,2] y)
            <int64[1] s = {-1}, int64[1] e = {-9}, int64[1] a = {1}, int64[1] t = {-3}>
            { y = Slice(x, s, e, a, t) }"""),
    (9, "g (float[2,3] x) => (float[4,4] y) { y = Pad<pads=[1,0,1,1], value=0.5>(x) }"),
    (13, "g (float[2,3] x) => (float[4,4] y) <int64[4] p = {1,0,1,1}, float v = {0.5}> { y = Pad(x, p, v) }"),
    (9, """g (float[1,2,3] x) => (float[1,2,3] y)
           <float[2] s = {1,2}, float[2] b = {0,1}, float[2] m = {1,1}, float[2] v = {4,1}>
            { y = BatchNormalization<epsilon=0.1>(x, s, b, m, v) }"""),
    (15, """g (float[1,2,3] x) => (float[1,2,3] y)
            <float[2] s = {1,2}, float[2] b = {0,1}, float[2] m = {1,1}, float[2] v = {4,1}>
            { y = BatchNormalization<epsilon=0.1>(x, s, b, m, v) }"""),
    (9, "g (float[2,3] a, float[3,4] b, float[4] c) => (float[2,4] y) { y = Gemm(a, b, c) }"),
    (13, "g (float[2,3] a, float[3,4] b) => (float[2,4] y) { y = Gemm(a, b) }"),
    (13, "g (float[2,3] x) => (int64[2] y) { y = ArgMax<axis=1, keepdims=0, select_last_index=1>(x) }"),
]  # fmt: skip


@pytest.mark.parametrize(("opset", "text"), BY_OPSET)
def test_operators_keep_the_meaning_of_their_opset(opset: int, text: str) -> None:
    graph, again = round_trip(model(text, opset=opset, ir_version=7))
    assert modelled(graph)


def test_an_old_version_that_can_be_read_and_not_written_stays_as_it_is() -> None:
    text = "g (float[2,3] x, float[2,3] z) => (float[2,3] y) { y = Add<broadcast=1>(x, z) }"
    proto = model(text, opset=6, ir_version=3)
    again = export(load(proto))
    assert again.graph.node[0] == proto.graph.node[0]


# ── 18: symbolic dimensions ──────────────────────────────────────────────────────────────────────────────────────


def test_symbolic_dimensions_stay_symbols_and_models_run_at_any_size() -> None:
    text = """g (float[batch,3,H,W] x, float[4,3,3,3] w) => (float[batch,K,h2,w2] y, float[batch,12] z)
      <int64[2] s = {0,-1}> {
      y = Conv<pads=[1,1,1,1], strides=[2,2]>(x, w)
      p = GlobalAveragePool(y)  f = Flatten(p)  c = Concat<axis=1>(f, f, f)  z = Reshape(c, s)
    }"""
    proto = model(text)
    for symbols in ({"batch": 1, "H": 5, "W": 6}, {"batch": 4, "H": 9, "W": 2}):
        graph, _ = round_trip(proto, symbols=symbols)
    assert modelled(graph)
    assert str(graph.inputs[0].type) == "float[batch×3×H×W]"


def test_shape_arithmetic_around_a_symbolic_batch_is_understood() -> None:
    text = """g (float[N,3,4] x) => (float[3,M] y)
      <int64 one = {1}, int64[1] minus = {-1}, int64[1] zero = {0}> {
      s = Shape(x)  d = Gather<axis=0>(s, one)  u = Unsqueeze(d, zero)  t = Concat<axis=0>(u, minus)
      y = Reshape(x, t) }"""
    graph, again = round_trip(model(text), symbols={"N": 2})
    assert [n.op.name for n in graph.operators] == ["Reshape"]


def test_dimensions_of_which_nothing_is_known_get_names_of_their_own() -> None:
    text = "g (float[unk__0, 2] x, float[unk__1] z) => (float[2, A] y, float[B] w) { y = Transpose(x)  w = Relu(z) }"
    proto = model(text)
    proto.graph.input[1].type.tensor_type.shape.dim[0].ClearField("dim_param")
    graph = load(proto)
    free = graph.inputs[1].type.dims[0]
    assert str(free) not in ("unk__0", "")
    assert interface(export(graph)) == interface(proto)


# ── weights as inputs ────────────────────────────────────────────────────────────────────────────────────────────


def test_up_to_ir_version_3_weights_are_listed_as_inputs_and_stay_so() -> None:
    text = "g (float[2] w, float[2] x, int64[2] s) => (float[1,2] y) { a = Add(x, w)  y = Reshape(a, s) }"
    proto = model(text, opset=8, ir_version=3)
    proto.graph.initializer.append(numpy_helper.from_array(np.array([1, 2], np.float32), "w"))
    proto.graph.initializer.append(numpy_helper.from_array(np.array([1, 2], np.int64), "s"))
    graph, again = round_trip(proto)
    assert graph.input_names == ["x"] and modelled(graph)


def test_from_ir_version_4_an_input_with_a_default_can_be_overridden_and_is_not_folded() -> None:
    text = "g (float[2] x, float[2] w, int64[2] s) => (float[A,B] y) { a = Add(x, w)  y = Reshape(a, s) }"
    proto = model(text)
    proto.graph.initializer.append(numpy_helper.from_array(np.array([1, 2], np.float32), "w"))
    proto.graph.initializer.append(numpy_helper.from_array(np.array([1, 2], np.int64), "s"))
    x = {"x": np.array([5, 6], np.float32)}
    graph, again = round_trip(proto, x)
    assert graph.input_names == ["x", "w", "s"]
    assert not graph.outputs[0][1].type.static
    other = {**x, "w": np.zeros(2, np.float32), "s": np.array([2, 1], np.int64)}
    assert models.by_onnxruntime(again, other)[0].tolist() == [[5], [6]]
    assert evaluate_graph(graph, other)["y"].tolist() == [[5], [6]]


# ── functions ────────────────────────────────────────────────────────────────────────────────────────────────────

FUNCTION = """g (float[2] x) => (float[2] y) { h = my.twice<k=0.25>(x)  y = my.twice(h) }
<domain: "my", opset_import: ["" : %d]>
twice <k: float = 0.5>(a) => (b) { t = LeakyRelu<alpha: float = @k>(a)  b = Add(t, t) }"""


@pytest.mark.parametrize("opset", [17, 13])
def test_functions_of_the_model_are_inlined(opset: int) -> None:
    proto = model(FUNCTION % opset, domains={"my": 1})
    graph = load(proto)
    again = export(graph)
    onnx.checker.check_model(again, full_check=True)
    x = {"x": np.array([1, -3], np.float32)}
    assert models.by_onnxruntime(again, x)[0].tolist() == models.by_onnxruntime(proto, x)[0].tolist()
    assert modelled(graph) and op_types(again) == ["LeakyRelu", "Add", "LeakyRelu", "Add"]


# ── everything else that a file says ─────────────────────────────────────────────────────────────────────────────


def test_metadata_and_doc_strings_survive() -> None:
    proto = model("g (float[2] x) => (float[2] y) { [n] a = Relu(x)  y = Neg(a) }", ir_version=10)
    proto.producer_name, proto.producer_version, proto.domain = "someone", "1.2", "a.b"
    proto.model_version, proto.doc_string, proto.graph.doc_string = 7, "model", "graph"
    proto.metadata_props.add(key="k", value="v")
    proto.graph.metadata_props.add(key="gk", value="gv")
    for node in proto.graph.node:
        node.ClearField("domain")
    proto.graph.node[0].doc_string = "node"
    proto.graph.node[0].metadata_props.add(key="nk", value="nv")
    proto.graph.input[0].doc_string = "input"
    proto.graph.value_info.add().CopyFrom(helper.make_tensor_value_info("a", TensorProto.FLOAT, [2], "middle"))
    again = export(load(proto))
    assert again == proto


def test_names_survive_a_rebuilt_graph() -> None:
    proto = models.case("conv_used_twice_bn")
    graph = load(proto)
    same = graph.rebuilt(
        lambda g, node, inputs: g.make(node.op, inputs, node.attrs, [v.type for v in node.outputs]).outputs
    )
    assert export(same).SerializeToString() == export(graph).SerializeToString()


def test_graphs_built_by_hand_are_written_with_taso_names() -> None:
    graph = Graph()
    x = graph.add_input("input", TensorType(DType.FLOAT, (2, 3)))
    y = graph.make(ADD, [x, graph.add_weight(_floats([[1, 2, 3]]))]).output
    graph.make(RELU, [y])
    graph.make(RELU, [x])
    proto = export(graph)
    onnx.checker.check_model(proto, full_check=True)
    assert [v.name for v in proto.graph.input] == ["input"]
    assert [v.name for v in proto.graph.output] == ["output", "output_1"]
    assert proto.ir_version == 10 and proto.opset_import[0].version == 21
    assert len({n.name for n in proto.graph.node}) == 3


def test_export_is_the_same_every_time() -> None:
    proto = models.light("squeezenet")
    assert export(load(proto)).SerializeToString() == export(load(proto)).SerializeToString()


# ── bad input ────────────────────────────────────────────────────────────────────────────────────────────────────


def _broken(name: str) -> ModelProto:
    proto = model("g (float[2] x) => (float[2] y) <float[2] w = {1,2}> { [first] h = Add(x, w)  [second] y = Relu(h) }")
    graph = proto.graph
    if name == "missing input":
        graph.node[1].input[0] = "nowhere"
    elif name == "missing capture":
        return model(
            """g (bool c) => (float[2] y) { [second] y = If<then_branch = t () => (float[2] r) { r = Neg(nowhere) },
               else_branch = e () => (float[2] s) { s = Neg(nowhere) }>(c) }"""
        )
    elif name == "cycle":
        graph.node[0].input[1] = "y"
    elif name == "no opset":
        del proto.opset_import[:]
    elif name == "domain not imported":
        graph.node[1].domain = "other"
    elif name == "name computed twice":
        graph.node[0].output[0] = "y"
    elif name == "name of an input computed":
        graph.node[0].output[0] = "x"
    elif name == "initializer twice":
        graph.initializer.append(graph.initializer[0])
    elif name == "input twice":
        graph.input.append(graph.input[0])
    elif name == "output not computed":
        graph.output[0].name = "z"
    elif name == "no operator":
        graph.node[1].op_type = ""
    elif name == "future opset":
        proto.opset_import[0].version = 9999
    elif name == "short weight":
        graph.initializer[0].CopyFrom(numpy_helper.from_array(np.zeros(3, np.float32), "w"))
        graph.initializer[0].dims[0] = 2
    elif name == "shapes do not fit":
        graph.initializer[0].CopyFrom(numpy_helper.from_array(np.zeros(3, np.float32), "w"))
    elif name == "untyped input":
        graph.input[0].ClearField("type")
    elif name == "two versions":
        proto.opset_import.add(domain="ai.onnx", version=11)
    return proto


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("missing input", "'second'.*'nowhere'"), ("missing capture", "'second'.*'nowhere'"), ("cycle", "cycle"),
        ("no opset", "opset"), ("domain not imported", "'second'.*'other'"), ("name computed twice", "'y'.*already"),
        ("name of an input computed", "'x'.*already"), ("initializer twice", "'w'"), ("input twice", "'x'"),
        ("output not computed", "'z'"), ("no operator", "without an operator"), ("future opset", "9999"),
        ("short weight", "'w'.*8 bytes.*12"), ("shapes do not fit", "'first' \\(Add\\).*2 and 3"),
        ("two versions", "two versions"), ("untyped input", "'x'.*no type"),
    ],
)  # fmt: skip
def test_broken_models_are_refused_with_one_sentence(name: str, message: str) -> None:
    with pytest.raises(ModelError, match=message) as raised:
        load(_broken(name))
    assert "\n" not in str(raised.value)
    assert isinstance(raised.value, InputNotFoundError) == name.startswith("missing")


def test_files_that_are_no_models_are_refused(tmp_path: Path) -> None:
    whole = models.light("squeezenet").SerializeToString()
    for data in (b"", b"hello, world", bytes(100), whole[:100], whole[:-1], whole[: len(whole) // 2], os.urandom(1000)):
        (tmp_path / "m.onnx").write_bytes(data)
        with pytest.raises(ModelError, match="m.onnx"):
            load(tmp_path / "m.onnx")
        with pytest.raises(ModelError):
            load(data)
    for missing in (tmp_path / "none.onnx", tmp_path):
        with pytest.raises(ModelError, match="cannot be read"):
            load(missing)


def test_no_truncation_of_a_model_loads() -> None:
    whole = models.case("if_outer_scope").SerializeToString()
    for length in range(len(whole)):
        with pytest.raises(ModelError):
            load(whole[:length])


def test_damaged_bytes_are_refused_or_read_but_never_crash() -> None:
    rng = np.random.default_rng(11)
    sources = [models.case(name).SerializeToString() for name in models.case_names()]
    refused = 0
    for trial in range(2000):
        data = bytearray(sources[trial % len(sources)])
        for position in rng.integers(0, len(data), 2):
            data[position] = rng.integers(0, 256)
        try:
            export(load(bytes(data)))
        except ModelError:
            refused += 1
    assert refused > 1000


def test_a_node_that_stays_opaque_says_why(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, "taso.graph.onnx_import"):
        load(model("g (float[4] x, int64[1] s) => (float[N] y) { [r] y = Reshape(x, s) }"))
    assert "'r' (Reshape)" in caplog.text and "not a constant" in caplog.text
