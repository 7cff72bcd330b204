"""The way out: other opsets, everything a file says kept through optimize, large files, what may not be unfolded."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import models
import numpy as np
import onnx
import onnx.checker
import onnx.defs
import pytest
from models import model
from onnx import ModelProto, TensorProto, helper, numpy_helper

import taso
from taso.graph import onnx_export, onnx_import, onnx_opset, onnx_weights, onnx_wire
from taso.graph.errors import ModelError
from taso.graph.evaluate import evaluate_graph, weight_of
from taso.graph.graph import Graph
from taso.graph.numbers import Float64
from taso.graph.onnx_weights import External, Filled
from taso.graph.operator import Weight
from taso.graph.ops.linear import MATMUL
from taso.graph.ops.movement import CONCAT, EXPAND, TILE
from taso.graph.types import DType, TensorType

TOLERANCE = 1e-5
NEWEST = onnx.defs.onnx_opset_version()


def opset_of(proto: ModelProto) -> int:
    return next(o.version for o in proto.opset_import if o.domain == "")


def op_types(proto: ModelProto) -> list[str]:
    return [node.op_type for node in proto.graph.node]


def same(proto: ModelProto, other: ModelProto) -> None:
    onnx.checker.check_model(other, full_check=True)
    feeds = models.random_feeds(proto)
    for a, b in zip(models.by_onnxruntime(other, feeds), models.by_onnxruntime(proto, feeds), strict=True):
        assert models.relative_error(a, b) <= TOLERANCE


# ── another opset ────────────────────────────────────────────────────────────────────────────────────────────────

SPELLED = """g (float[2,4,6,6] x) => (float[2,2,6,6] y, float[2,72] z) <int64[2] sizes = {2,2}, int64[1] axes = {1}> {
  a, b = Split<axis=1>(x, sizes)  s = Add(a, b)  y = Clip(s)  u = Unsqueeze(y, axes)  q = Squeeze(u, axes)
  z = Flatten(q) }"""


@pytest.mark.parametrize("opset", [11, 12, 15, 17, 21])
def test_a_graph_is_written_in_the_opset_that_is_asked_for(opset: int) -> None:
    proto = model(SPELLED, opset=13)
    again = taso.export_onnx(taso.load(proto), opset=opset)
    assert opset_of(again) == opset
    assert op_types(again) == op_types(proto)
    same(proto, again)


def test_newer_opsets_get_the_ir_version_that_they_need() -> None:
    proto = model(SPELLED, opset=13, ir_version=7)
    assert taso.export_onnx(taso.load(proto)).ir_version == 7
    assert taso.export_onnx(taso.load(proto), opset=NEWEST).ir_version >= 10


def test_weights_listed_as_inputs_do_not_become_what_callers_may_override() -> None:
    text = "g (float[2,3] x, float[3] w) => (float[2,3] y) { a = Add(x, w)  y = Softmax(a) }"
    proto = model(text, opset=9, ir_version=3)
    proto.graph.initializer.append(numpy_helper.from_array(np.arange(3, dtype=np.float32), "w"))
    for opset in (11, 13, 17):
        again = taso.export_onnx(taso.load(proto), opset=opset)
        assert again.ir_version >= 4 and [v.name for v in again.graph.input] == ["x"]
        same(proto, again)


def test_what_our_operators_cannot_say_goes_through_the_converter_and_keeps_everything_else() -> None:
    proto = model("g (float[2,3,4] x) => (float[2,3,4] y) { h = Softmax(x)  y = Relu(h) }", opset=11)
    proto.graph.node[1].name, proto.graph.node[1].doc_string = "last", "why"
    proto.graph.node[1].metadata_props.add(key="k", value="v")
    proto.producer_name, proto.doc_string, proto.graph.output[0].doc_string = "me", "all of it", "out"
    proto.metadata_props.add(key="a", value="b")
    graph = taso.load(proto)
    assert onnx_opset.respelled(graph, 13) is None, "Softmax means something else from opset 13 on"
    again = taso.export_onnx(graph, opset=13)
    assert opset_of(again) == 13 and again.graph.output[0] == proto.graph.output[0]
    assert (again.producer_name, again.doc_string, again.metadata_props[0].value) == ("me", "all of it", "b")
    last = again.graph.node[-1]
    assert (last.op_type, last.name, last.doc_string, last.metadata_props[0].value) == ("Relu", "last", "why", "v")
    same(proto, again)


def test_large_weights_do_not_pass_through_the_converter(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    convert = onnx.version_converter.convert_version

    def noted(light: ModelProto, opset: int) -> ModelProto:
        seen.append(light.ByteSize())
        return convert(light, opset)

    monkeypatch.setattr(onnx.version_converter, "convert_version", noted)
    proto = model("g (float[2,3,100] x) => (float[2,3,100] y) { h = MatMul(x, w)  y = Softmax(h) }", opset=11)
    values = np.random.default_rng(0).standard_normal((100, 100)).astype(np.float32)
    proto.graph.initializer.append(numpy_helper.from_array(values, "w"))
    again = taso.export_onnx(taso.load(proto), opset=13)
    assert seen and seen[0] < 1000
    assert numpy_helper.to_array(again.graph.initializer[0]).tobytes() == values.tobytes()
    same(proto, again)


@pytest.mark.parametrize("opset", [0, -1, NEWEST + 1])
def test_an_opset_that_does_not_exist_is_refused(opset: int) -> None:
    with pytest.raises(ModelError, match=f"there is no opset {opset}.*{NEWEST}"):
        taso.export_onnx(taso.load(model(SPELLED)), opset=opset)


def test_what_no_older_opset_can_say_is_one_sentence(tmp_path: Path) -> None:
    proto = model("g (float[2,3] x) => (float[2,3] y) { y = Gelu(x) }", opset=20)
    with pytest.raises(ModelError, match="^the model cannot be written in opset 8: ") as raised:
        taso.save(taso.load(proto), tmp_path / "m.onnx", opset=8)
    assert "\n" not in str(raised.value) and not list(tmp_path.iterdir())


def test_constants_are_written_as_the_opset_has_them() -> None:
    proto = model("g (float[2] x) => (float[2] y) { c = Constant<value_floats=[1.0, 2.0]>()  y = Add(x, c) }", opset=13)
    again = taso.export_onnx(taso.load(proto), opset=11)
    assert op_types(again) == ["Add"] and [t.name for t in again.graph.initializer] == ["c"]
    same(proto, again)


def test_save_takes_the_opset_too(tmp_path: Path) -> None:
    graph = taso.load(model("g (float[2,3,4] x) => (float[2,3,4] y) { y = Softmax(x) }", opset=11))
    for opset in (12, 13):
        taso.save(graph, tmp_path / "m.onnx", opset=opset)
        assert opset_of(onnx.load(str(tmp_path / "m.onnx"))) == opset
    assert graph.info.opset == 11, "the graph itself stays as it was"


def test_a_graph_built_by_hand_is_written_in_any_opset_it_can_be_said_in() -> None:
    graph = taso.new_graph()
    x = graph.new_input(dims=(1, 4, 8, 8))
    graph.relu(graph.conv2d(input=x, weight=graph.new_weight(dims=(4, 4, 3, 3)), strides=(1, 1), padding="SAME"))
    for opset in (9, 13, NEWEST):
        again = taso.export_onnx(graph, opset=opset)
        onnx.checker.check_model(again, full_check=True)
        assert opset_of(again) == opset


# ── through optimize ─────────────────────────────────────────────────────────────────────────────────────────────

FULL = """g (float[N,4,6,6] image, float[2] unused)
    => (float[N,8,6,6] second, float[N,8,1,1] first, float[N,4,6,6] same) {
  i = Identity(image)  c = Conv(i, w, b)  r = Relu(c)  second = Relu(r)  p = GlobalAveragePool(second)
  first = Identity(p)  same = Identity(image) }"""


def full() -> ModelProto:
    proto = model(FULL)
    rng = np.random.default_rng(0)
    for name, shape in (("w", (8, 4, 1, 1)), ("b", (8,))):
        tensor = numpy_helper.from_array(rng.standard_normal(shape).astype(np.float32), name)
        tensor.doc_string = f"the weight {name}"
        proto.graph.initializer.append(tensor)
    for node in proto.graph.node:
        node.name, node.doc_string = "twice", f"computes {node.output[0]}"
        node.metadata_props.add(key="from", value=node.output[0])
    proto.producer_name, proto.producer_version, proto.domain, proto.model_version = "me", "1.2", "net.mine", 7
    proto.doc_string, proto.graph.name, proto.graph.doc_string = "the model", "the graph", "about the graph"
    proto.metadata_props.add(key="license", value="mine")
    proto.graph.metadata_props.add(key="made", value="today")
    proto.graph.value_info.append(helper.make_tensor_value_info("c", TensorProto.FLOAT, ["N", 8, 6, 6]))
    for declared in (*proto.graph.input, *proto.graph.output, *proto.graph.value_info):
        declared.doc_string = f"about {declared.name}"
    return proto


def test_everything_that_a_file_says_comes_through_optimize() -> None:
    proto = full()
    best = taso.optimize(proto, backend="reference", budget=20)
    assert best.report.rewrites, "something was changed"
    again = taso.export_onnx(best)
    for said in ("producer_name", "producer_version", "domain", "model_version", "doc_string", "ir_version"):
        assert getattr(again, said) == getattr(proto, said)
    assert list(again.metadata_props) == list(proto.metadata_props)
    assert list(again.opset_import) == list(proto.opset_import)
    for said in ("name", "doc_string", "input", "output", "metadata_props", "value_info"):
        assert getattr(again.graph, said) == getattr(proto.graph, said), said
    assert {t.name: t.doc_string for t in again.graph.initializer} == {"w": "the weight w", "b": "the weight b"}
    feeds = models.random_feeds(proto, symbols={"N": 2})
    for node in proto.graph.node:
        node.name = ""
    for a, b in zip(models.by_onnxruntime(again, feeds), models.by_onnxruntime(proto, feeds), strict=True):
        assert models.relative_error(a, b) <= TOLERANCE


def test_node_names_are_unique_and_doc_strings_stay_with_their_nodes() -> None:
    again = taso.export_onnx(taso.optimize(full(), backend="reference", budget=20))
    names = [n.name for n in again.graph.node if n.name]
    assert len(set(names)) == len(names) and "twice" in names
    conv = next(n for n in again.graph.node if n.op_type == "Conv")
    assert conv.doc_string == "computes c" and conv.metadata_props[0].value == "c"


# ── single files that are mapped and not read ────────────────────────────────────────────────────────────────────


@pytest.fixture
def mapped(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(onnx_import, "MAPPED", 1)
    yield


def heavy(dtype: DType = DType.FLOAT) -> ModelProto:
    """A large initializer, a large Constant and a small one."""
    proto = model("g (float[2,300] x) => (float[2,300] y) { a = MatMul(x, w)  b = MatMul(a, c)  y = Add(b, s) }")
    rng = np.random.default_rng(0)
    w, c = (rng.standard_normal((300, 300)).astype(np.float32) / 17 for _ in range(2))
    proto.graph.initializer.extend([numpy_helper.from_array(w, "w"), numpy_helper.from_array(w[0], "s")])
    proto.graph.initializer[0].data_location = TensorProto.DEFAULT
    proto.graph.initializer[0].doc_string = "large"
    proto.graph.node.insert(0, helper.make_node("Constant", [], ["c"], value=numpy_helper.from_array(c, "c")))
    return proto


def weights(graph: Graph) -> dict[str, Weight]:
    found = [weight_of(n.output) for n in graph.nodes if n.op.name == "Weight"]
    return {w.name: w for w in found}


@pytest.mark.usefixtures("mapped")
def test_large_weights_of_a_single_file_are_views_of_the_mapped_file(tmp_path: Path) -> None:
    onnx.save(heavy(), tmp_path / "m.onnx")
    graph = taso.load(tmp_path / "m.onnx")
    found = weights(graph)
    assert isinstance(found["w"].original, External) and not found["w"].array().flags.owndata
    assert not found["w"].array().flags.writeable and np.shares_memory(found["w"].array(), found["w"].array())
    assert np.shares_memory(found["c"].array(), found["c"].array())
    assert not isinstance(found["s"].original, External), "small ones come along"


@pytest.mark.usefixtures("mapped")
@pytest.mark.parametrize("outside", [False, True])
def test_a_mapped_file_is_written_as_it_was(tmp_path: Path, outside: bool) -> None:
    proto = heavy()
    onnx.save(proto, tmp_path / "m.onnx")
    taso.save(taso.load(tmp_path / "m.onnx"), tmp_path / "n.onnx", external_data=outside)
    assert (tmp_path / "n.onnx.data").exists() == outside
    again = onnx.load(str(tmp_path / "n.onnx"))
    assert [numpy_helper.to_array(t).tobytes() for t in again.graph.initializer] == [
        numpy_helper.to_array(t).tobytes() for t in proto.graph.initializer
    ]
    assert again.graph.initializer[0].doc_string == "large"
    same(proto, again)


@pytest.mark.usefixtures("mapped")
def test_a_mapped_file_may_be_written_over_itself(tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    onnx.save(heavy(), path)
    taso.save(taso.load(path), path)
    taso.save(taso.optimize(path, backend="reference", budget=2), path)
    same(heavy(), onnx.load(str(path)))


@pytest.mark.usefixtures("mapped")
def test_what_is_written_in_pieces_is_what_protobuf_writes(tmp_path: Path) -> None:
    for name in models.case_names():
        graph = taso.load(models.case(name))
        taso.save(graph, tmp_path / "m.onnx")
        assert onnx.load(str(tmp_path / "m.onnx")) == taso.export_onnx(graph), name
        assert taso.export_onnx(taso.load(tmp_path / "m.onnx")) == taso.export_onnx(graph), name


@pytest.mark.usefixtures("mapped")
def test_no_truncation_of_a_mapped_file_loads(tmp_path: Path) -> None:
    data = heavy().SerializeToString()
    path = tmp_path / "m.onnx"
    for stop in {*range(1, len(data), 9973), *range(1, 60), len(data) - 1}:
        path.write_bytes(data[:stop])
        with pytest.raises(ModelError):
            taso.load(path)


@pytest.mark.usefixtures("mapped")
def test_damaged_bytes_of_a_mapped_file_never_crash(tmp_path: Path) -> None:
    data = heavy().SerializeToString()
    rng = np.random.default_rng(0)
    path = tmp_path / "m.onnx"
    for _ in range(150):
        damaged = bytearray(data)
        for place in rng.integers(0, len(data), 3):
            damaged[place if rng.random() < 0.3 else place % 200] = rng.integers(0, 256)
        path.write_bytes(damaged)
        try:
            taso.load(path)
        except taso.TasoError as error:
            assert "\n" not in str(error)


def test_cutting_and_putting_in_are_inverse() -> None:
    data = heavy().SerializeToString()
    skeleton = onnx_wire.cut(memoryview(data))
    assert len(skeleton) < 3000
    model_proto = ModelProto.FromString(skeleton)
    held: dict[bytes, onnx_wire.Held] = {}
    for tensor in (model_proto.graph.initializer[0], model_proto.graph.node[0].attribute[0].t):
        said = {e.key: e.value for e in tensor.external_data}
        offset, length = int(said["offset"]), int(said["length"])
        tensor.ClearField("external_data")
        tensor.data_location = TensorProto.DEFAULT
        tensor.raw_data = b"a mark" + bytes([len(held)])
        piece = memoryview(data)[offset : offset + length]
        held[tensor.raw_data] = onnx_wire.Held(length, lambda piece=piece: piece)  # type: ignore[misc]  # bound at once
    parts = onnx_wire.spliced(model_proto.SerializeToString(), b"a mark", held)
    again = ModelProto.FromString(b"".join(parts))
    again.graph.node[0].attribute[0].t.ClearField("data_location")
    assert again == heavy()


# ── memory ───────────────────────────────────────────────────────────────────────────────────────────────────────

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="memory is read from /proc")
@pytest.mark.parametrize("more", [[], ["--single-file"]])
def test_a_large_model_is_never_held(more: list[str]) -> None:
    """Twenty weights of 16 MB: the peak of anonymous memory stays below half of the model beside what taso takes."""
    script = str(ROOT / "benchmarks" / "large_model.py")
    command = [sys.executable, script, "--gigabytes", "0.32", "--width", "2048", *more]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    told = dict(line.split(": ", 1) for line in done.stdout.splitlines() if ": " in line)
    assert told["verified"] == "True"
    before = float(told["started with"])
    for step in ("load", "optimize", "save"):
        anonymous = float(told[step].split("(")[1].split()[0])
        assert anonymous - before < 170, done.stdout


def test_products_with_large_weights_are_those_of_double_precision() -> None:
    rng = np.random.default_rng(0)
    for left, right in (((1, 2, 300), (1, 300, 50)), ((2, 60, 30), (2, 30, 2))):
        a, b = rng.standard_normal(left), rng.standard_normal(right).astype(np.float32)
        for x, y in ((a, b), (a.astype(np.float32), b), (a.astype(np.float32), b.astype(np.float64))):
            found = Float64().matmul(x, y)
            wanted = np.matmul(x.astype(np.float64), y.astype(np.float64))
            assert found.dtype == np.float64 and np.allclose(found, wanted, rtol=1e-12, atol=1e-12)


def test_wide_evaluation_of_large_weights_is_that_of_double_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    proto = heavy()
    graph, feeds = taso.load(proto), models.random_feeds(proto)
    wanted = evaluate_graph(graph, feeds, wide=True)["y"]
    monkeypatch.setattr("taso.graph.evaluate._LARGE", 1)
    monkeypatch.setattr("taso.graph.numbers._PART", 5000)
    found = evaluate_graph(graph, feeds, wide=True)["y"]
    assert found.dtype == np.float64 and models.relative_error(found, wanted) <= 1e-13


# ── what is not unfolded ─────────────────────────────────────────────────────────────────────────────────────────


def by_rule(op: object, shape: tuple[int, ...], attrs: dict[str, object], weight: Weight) -> Graph:
    """x plus what a rule made of a weight."""
    graph = taso.load(model(f"g (float[{','.join(map(str, shape))}] x) => (float[A,B] y) {{ y = Relu(x) }}"))
    fresh = Graph()
    x = fresh.add_input("x", graph.inputs[0].type)
    made = fresh.make(op, [fresh.add_weight(weight)] * (2 if op is CONCAT else 1), attrs, origin="a rule")  # type: ignore[arg-type]  # rows of a table
    fresh.set_outputs([("y", fresh.make(MATMUL, [x, made.output]).output)])
    return fresh


def filled(*shape: int) -> Weight:
    half = helper.make_tensor("", TensorProto.FLOAT, [1], [0.5])
    dims = Weight(TensorType(DType.INT64, (len(shape),)), np.asarray(shape, np.int64), "s")
    return onnx_weights.filled_weight(helper.make_node("ConstantOfShape", ["s"], ["f"], value=half), dims)


SMALL = Weight(TensorType(DType.FLOAT, (1, 4)), np.ones((1, 4), np.float32), "small")


@pytest.mark.parametrize(
    "op, attrs, weight",
    [
        (EXPAND, {"shape": (2000, 4)}, SMALL),
        (TILE, {"repeats": (2000, 1)}, SMALL),
        (CONCAT, {"axis": 0}, filled(1000, 4)),
    ],
)
def test_what_would_unfold_beyond_the_limit_is_written_as_operators(
    op: object, attrs: dict[str, object], weight: Weight
) -> None:
    graph = by_rule(op, (2, 2000), attrs, weight)
    kept = onnx_export.export(graph, fold_limit=10_000)
    assert kept.ByteSize() < 2000 and len(kept.graph.node) > 1
    unfolded = onnx_export.export(graph, fold_limit=100_000)
    assert unfolded.ByteSize() > 32_000 and op_types(unfolded) == ["MatMul"]
    same(kept, unfolded)


FROM_FILE = {
    "ConstantOfShape": "c = ConstantOfShape<value=float[1]{0.5}>(shape)",
    "Expand": "c = Expand(small, shape)",
    "Tile": "c = Tile(row, repeats)",
}


@pytest.mark.parametrize("kind", FROM_FILE)
def test_what_a_file_makes_of_little_stays_little_through_optimize(kind: str) -> None:
    proto = model(
        f"""g (float[2,4000] x) => (float[2,500] y) <int64[2] shape = {{4000,500}}, int64[2] repeats = {{4000,1}},
          float small = {{0.5}}> {{ {FROM_FILE[kind]}  d = Add(c, small)  e = Identity(x)  y = MatMul(e, d) }}"""
    )
    proto.graph.initializer.append(numpy_helper.from_array(np.ones((1, 500), np.float32), "row"))
    best = taso.optimize(proto, backend="reference", budget=10)
    assert best.report.rewrites
    again = taso.export_onnx(best)
    assert again.ByteSize() < 10_000 and kind in op_types(again)
    same(proto, again)


def test_rewrites_do_not_unfold_generated_weights_beyond_the_limit() -> None:
    """Two products share their input, and what would be concatenated is twice 40 MB that a file does not hold."""
    proto = model(
        """g (float[2,1000] x) => (float[2,10000] y, float[2,10000] z) <int64[2] shape = {1000,10000}> {
          a = ConstantOfShape<value=float[1]{0.5}>(shape)  b = ConstantOfShape<value=float[1]{0.25}>(shape)
          y = MatMul(x, a)  z = MatMul(x, b) }"""
    )
    best = taso.optimize(proto, backend="reference", budget=5, verify=False)
    assert all(isinstance(w.original, Filled) for n, w in weights(best).items() if n in "ab")
    assert taso.export_onnx(best).ByteSize() < 10_000


def test_an_older_opset_without_constant_of_shape_does_not_unfold_it_beyond_the_limit() -> None:
    proto = model(
        """g (float[2,1000] x) => (float[2,1000] y) <int64[2] shape = {1000,1000}> {
          c = ConstantOfShape<value=float[1]{0.5}>(shape)  y = MatMul(x, c) }""", opset=9
    )  # fmt: skip
    graph = taso.load(proto)
    with pytest.raises(ModelError, match="opset 8 has no ConstantOfShape.*4000000 bytes.*limit of 1048576"):
        taso.export_onnx(graph, opset=8)
    same(proto, taso.export_onnx(graph, opset=8, fold_limit=1 << 23))


def test_a_sparse_weight_beyond_the_limit_passes_through_and_is_not_written_out() -> None:
    proto = model("g (int64[2] x) => (float[2,M] y) { y = Gather(w, x) }")
    values = helper.make_tensor("w", TensorProto.FLOAT, [1], [1.0])
    indices = helper.make_tensor("i", TensorProto.INT64, [1], [5])
    proto.graph.sparse_initializer.append(helper.make_sparse_tensor(values, indices, [1 << 20, 1 << 20]))
    graph = taso.load(proto)
    assert list(taso.export_onnx(graph).graph.sparse_initializer) == list(proto.graph.sparse_initializer)
    with pytest.raises(ModelError, match="sparse tensor 'w'.*4398046511104 bytes"):
        evaluate_graph(graph, models.random_feeds(proto))


# ── where a model may be written ─────────────────────────────────────────────────────────────────────────────────


def relu_graph() -> taso.Graph:
    graph = taso.new_graph()
    graph.relu(graph.new_input(dims=(2, 3)))
    return graph


def test_a_link_stays_a_link_and_what_it_leads_to_is_written(tmp_path: Path) -> None:
    real, link = tmp_path / "real.onnx", tmp_path / "link.onnx"
    real.write_bytes(b"old")
    link.symlink_to(real)
    taso.save(relu_graph(), link)
    assert link.is_symlink()
    onnx.checker.check_model(onnx.load(real))


def test_a_pipe_is_not_replaced_by_a_model(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(ModelError, match="no ordinary file"):
        taso.save(relu_graph(), pipe)
    assert pipe.is_fifo() and os.listdir(tmp_path) == ["pipe"]


@pytest.mark.parametrize(
    ("path", "said"), [("", "path"), (None, "path"), (".", "folder"), ("no/such/x.onnx", "no folder")]
)
def test_what_is_no_place_for_a_file_gets_one_sentence(
    path: str | None, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelError, match=said):
        taso.save(relu_graph(), path)  # type: ignore[arg-type]  # None is what is tried


def test_outputs_must_be_tensors() -> None:
    with pytest.raises(taso.GraphError, match="output 'a'"):
        relu_graph().set_outputs([("a", 3)])  # type: ignore[list-item]  # a number is what is tried
