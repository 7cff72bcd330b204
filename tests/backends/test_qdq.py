"""Models that write quantisation around float operators run on integers where that is asked: to the unit, and faster
kernels for it; nothing else changes."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import cast

import numpy as np
import onnx
import onnx.parser
import onnxruntime
import pytest
import qdq_models
from numpy.typing import NDArray
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator
from qdq_models import Builder

import taso
from taso import cli
from taso.backends.fallback import evaluated
from taso.backends.lowering import INT8, Job, Kernel, choices_of, lower
from taso.backends.onednn import qdq_kernels
from taso.backends.onednn.backend import OneDNNBackend, checked_precision
from taso.backends.onednn.executor import Program
from taso.backends.onednn.kernels import design
from taso.backends.onednn.memory import DataType
from taso.backends.onednn.places import OPERAND, RESULT, Block, Place, from_plain, logical_spec, to_plain
from taso.backends.onednn.recipe import PrimitiveLaunch, Recipe
from taso.backends.pages import zeroed
from taso.backends.select import get_backend
from taso.graph.errors import BackendError, BackendUnavailable
from taso.graph.evaluate import constant_value
from taso.graph.types import DType
from taso.search.costs import CostModel
from taso.search.planning import plan
from taso.search.verify import check_program, random_feeds, relative_error

ROOT = Path(__file__).resolve().parent.parent.parent
Array = NDArray[np.generic]
PRODUCTS = {"Conv", "MatMul", "Gemm"}
MODELS: dict[str, Callable[..., onnx.ModelProto]] = {
    "convnet": qdq_models.convnet, "transformer": qdq_models.transformer,
}  # fmt: skip


def unavailable() -> str:
    """Why there are no products of integers here, "" where there are."""
    try:
        OneDNNBackend(1, INT8)
    except BackendUnavailable as error:
        return str(error)
    return ""


pytestmark = pytest.mark.skipif(bool(unavailable()), reason=unavailable() or "there are products of integers here")


def compiled(proto: onnx.ModelProto) -> Program:
    program = taso.compile(taso.load(proto), "onednn", 1, INT8)
    assert isinstance(program, Program)
    return program


def drawn(proto: onnx.ModelProto, seed: int) -> dict[str, Array]:
    return random_feeds(taso.load(proto), {}, seed)


def theirs(proto: onnx.ModelProto, feeds: dict[str, Array]) -> Array:
    """What ONNX Runtime makes of it without optimizations."""
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(proto.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return np.asarray(session.run(None, feeds)[0])


def unit(proto: onnx.ModelProto) -> float:
    """The scale of the last rounding in a model."""
    scales = {t.name: onnx.numpy_helper.to_array(t) for t in proto.graph.initializer}
    last = [n for n in proto.graph.node if n.op_type == "QuantizeLinear"][-1]
    return float(scales[last.input[1]])


# ── whole models ─────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("signed", [False, True])
@pytest.mark.parametrize("by_channel", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_a_model_is_off_by_what_a_few_units_on_the_way_make(name: str, by_channel: bool, signed: bool) -> None:
    for seed in range(3):
        proto = MODELS[name](seed, signed, by_channel)
        program = compiled(proto)
        feeds = drawn(proto, seed)
        (ours,) = program(feeds).values()
        defined = np.asarray(ReferenceEvaluator(proto).run(None, feeds)[0])
        assert all(how == "own" for _, how in program.operators) and len(np.unique(ours)) >= 8
        for other in (defined, theirs(proto, feeds)):
            off = np.abs(ours.astype(np.float64) - other) / unit(proto)
            assert off.max() < 2.01 and np.mean(off > 0.01) < 0.15


@pytest.mark.parametrize("isa", ["AVX2_VNNI", "AVX512_CORE_VNNI"])
def test_other_instructions_give_the_same_but_for_a_few_units(isa: str) -> None:
    script = (
        "import numpy as np, taso, qdq_models, test_qdq as t\n"
        "for make in t.MODELS.values():\n"
        "    proto = make(); feeds = t.drawn(proto, 0)\n"
        "    (ours,) = taso.compile(taso.load(proto), 'onednn', 1, 'int8')(feeds).values()\n"
        "    off = np.abs(ours.astype(float) - t.theirs(proto, feeds)) / t.unit(proto)\n"
        "    assert off.max() < 2.01 and np.mean(off > 0.01) < 0.15, off.max()\n"
    )
    paths = os.pathsep.join(str(ROOT / p) for p in ("", "tests", "tests/graph", "tests/backends"))
    environment = {**os.environ, "ONEDNN_MAX_CPU_ISA": isa, "PYTHONPATH": paths}
    found = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=False)
    if "no instructions for products of 8-bit integers" in found.stderr:
        pytest.skip(f"{isa} is not here")
    assert found.returncode == 0, found.stderr


# ── kernel by kernel ─────────────────────────────────────────────────────────────────────────────────────────────


class Supply:
    """The constants of a kernel in a graph."""

    def __init__(self, job: Job) -> None:
        self._job = job

    def array(self, operand: int) -> Array:
        return constant_value(self._job.operands[operand])

    def keep(self, operand: int, label: str, make: Callable[[Array], Block]) -> Block:
        return make(np.ascontiguousarray(self.array(operand)))


def designed(job: Job) -> Recipe:
    backend = OneDNNBackend(1, INT8)
    return design(job.kernel, backend.lowering.layouts, Supply(job), precision=INT8)


def jobs(proto: onnx.ModelProto) -> list[Job]:
    found = lower(taso.load(proto), OneDNNBackend(1, INT8).lowering).jobs
    return [j for j in found if qdq_kernels.concerns(j.kernel)]


def computed(job: Job, seed: int = 0) -> tuple[Array, Array]:
    """What the recipe of a kernel makes of random operands, and what the operators say."""
    rng, block = np.random.default_rng(seed), OneDNNBackend(1, INT8).lowering.layouts.block
    recipe, plain, held = designed(job), [], []
    for value, operand in zip(job.operands, job.kernel.operands, strict=True):
        t, shape = operand.type, operand.type.static_shape
        if operand.constant:
            array = constant_value(value)
        elif t.dtype.is_float:
            array = rng.standard_normal(shape).astype(np.float32)
        else:
            bounds = np.iinfo(t.dtype.numpy)
            array = rng.integers(bounds.min, bounds.max + 1, shape).astype(t.dtype.numpy)
        plain.append(array)
        held.append(zeroed(array.nbytes))
        if not operand.constant:
            spec = logical_spec(Place(OPERAND), t, operand.layout, block).at(held[-1].ctypes.data)
            from_plain(spec, array, t, operand.layout, block)
    (result,) = job.kernel.results
    out, scratch = zeroed(result.type.nbytes), [zeroed(size) for size in recipe.scratch]
    for call, _ in recipe.bind(*([a.ctypes.data for a in arrays] for arrays in (held, [out], scratch))):
        assert not call()
    spec = logical_spec(Place(RESULT), result.type, result.layout, block).at(out.ctypes.data)
    return to_plain(spec, result.type, result.layout, block).copy(), np.asarray(evaluated(job.kernel)(plain)[0])


@pytest.mark.parametrize("signed", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_every_kernel_is_off_by_a_unit_at_most_and_hardly_anywhere(name: str, signed: bool) -> None:
    found = jobs(MODELS[name](0, signed))
    assert len(found) > 10
    for job in found:
        ours, defined = computed(job)
        label = "+".join(s.op.name for s in job.kernel.steps)
        if job.kernel.results[0].type.dtype is DType.FLOAT:
            assert relative_error(ours, defined) < 1e-5, label
            continue
        off = np.abs(ours.astype(int) - defined.astype(int))
        assert off.max() <= 1 and np.mean(off) < 0.01 and len(np.unique(defined)) > 4, label


@pytest.mark.parametrize("name", MODELS)
def test_products_are_of_integers_in_one_primitive_and_nothing_is_dequantised_for_them(name: str) -> None:
    found = [j for j in jobs(MODELS[name]()) if PRODUCTS & {s.op.name for s in j.kernel.steps}]
    assert len(found) >= 7
    for job in found:
        launches = designed(job).launches
        assert all(isinstance(launch, PrimitiveLaunch) for launch in launches)
        # uint8 as a second factor is brought to int8 first
        *before, product = (launch.primitive for launch in launches if isinstance(launch, PrimitiveLaunch))
        assert product.src_desc().dtype in (DataType.U8, DataType.S8)
        assert product.weights_desc().dtype is DataType.S8 and product.dst_desc().dtype in (DataType.U8, DataType.S8)
        assert all(p.dst_desc().dtype is DataType.S8 for p in before)
    alone = [j for j in jobs(MODELS[name]()) if [s.op.name for s in j.kernel.steps] == ["DequantizeLinear"]]
    assert len(alone) <= 5


def test_without_being_asked_everything_runs_as_before() -> None:
    for make in MODELS.values():
        graph = taso.load(make())
        for precision in ("float32",):
            kernels = [j.kernel for j in lower(graph, OneDNNBackend(1, precision).lowering).jobs]
            assert not any(qdq_kernels.concerns(k) and len(k.steps) > 1 for k in kernels)


# ── what is not to be of integers, or in parts ───────────────────────────────────────────────────────────────────


def one_layer(
    weights: Array, zero: Array, scale: Array, axis: int, other: bool = False, output: bool = False
) -> onnx.ModelProto:
    """A convolution of a rounded image; `other` readers of it, and what was rounded as an `output`."""
    b = Builder()
    x = b.around("x", -3, 4)
    w = b.node("DequantizeLinear", b.keep(weights), b.keep(scale), b.keep(zero), axis=axis)
    y = b.around(b.node("Conv", x, w, pads=[1, 1, 1, 1]), -4, 4)
    outputs = [y, *([b.node("Tanh", x)] if other else []), *([x] if output else [])]
    return b.model([("x", (1, weights.shape[1], 9, 9))], outputs)


def weights(dtype: type[np.generic], low: int, high: int) -> Array:
    return np.random.default_rng(3).integers(low, high, (16, 8, 3, 3)).astype(dtype)


SCALE = np.float32(0.002)
LAYERS: dict[str, tuple[onnx.ModelProto, bool]] = {
    "uint8 weights around 128": (one_layer(weights(np.uint8, 1, 256), np.uint8(128), SCALE, 0), True),
    "zero points of channels": (
        one_layer(weights(np.int8, -60, 61), np.arange(16, dtype=np.int8), np.full(16, SCALE), 0), True,
    ),
    "weights that int8 does not hold": (one_layer(weights(np.uint8, 0, 256), np.uint8(3), SCALE, 0), False),
    "scales along another axis": (
        one_layer(weights(np.int8, -127, 128), np.zeros(8, np.int8), np.linspace(1, 2, 8, dtype=np.float32) * SCALE, 1),
        False,
    ),
    "another reader": (one_layer(weights(np.int8, -127, 128), np.int8(0), SCALE, 0, other=True), True),
    "an output between": (one_layer(weights(np.int8, -127, 128), np.int8(0), SCALE, 0, output=True), True),
}  # fmt: skip


@pytest.mark.parametrize("name", LAYERS)
def test_what_is_out_of_the_ordinary_is_as_defined(name: str) -> None:
    proto, integer = LAYERS[name]
    feeds = drawn(proto, 0)
    graph = taso.load(proto)
    program = OneDNNBackend(1, INT8).lowering
    products = [j for j in lower(graph, program).jobs if any(s.op.name == "Conv" for s in j.kernel.steps)]
    (product,) = products
    fused = any(
        isinstance(launch, PrimitiveLaunch) and launch.primitive.src_desc().dtype is DataType.U8
        and "conv" in launch.name or "amx" in launch.name or "int8" in launch.name
        for launch in designed(product).launches
    )  # fmt: skip
    assert fused is integer
    backend = OneDNNBackend(1, INT8)
    found = Program(graph, backend.lowering, 1)(feeds)
    for (key, ours), exact in zip(found.items(), ReferenceEvaluator(proto).run(None, feeds), strict=True):
        off = np.abs(ours.astype(np.float64) - np.asarray(exact)) / unit(proto)
        assert off.max() < 1.01 and np.mean(off > 0.01) < 0.01, key


def residual() -> onnx.ModelProto:
    """A sum that is not rounded on one side, and whose other side several read."""
    b = Builder()
    x = b.around("x", -3, 4)
    y = b.node("Conv", b.around(b.node("Relu", x), 0, 4), b.weights(8, 8, 3, 3), b.bias(8), pads=[1, 1, 1, 1])
    y = b.around(b.node("Relu", b.node("Add", y, x)), 0, 6.1)
    z = b.around(b.node("Mul", b.node("Sigmoid", y), y), -0.3, 4.3)
    return b.model([("x", (1, 8, 6, 6))], [b.around(b.node("Conv", z, b.weights(8, 8, 1, 1)), -3, 3)])


def test_a_sum_in_the_kernel_of_a_product_reads_integers_that_nothing_else_dequantises() -> None:
    proto = residual()
    found = {"+".join(s.op.name for s in j.kernel.steps): j for j in jobs(proto)}
    assert "DequantizeLinear" in found and len([k for k in found if k == "DequantizeLinear"]) == 1
    for label, job in found.items():
        ours, defined = computed(job)
        assert np.abs(ours.astype(np.float64) - defined).max() <= 1, label
    (job,) = [j for label, j in found.items() if "Conv+Add+Relu+QuantizeLinear" in label]
    launches = [launch for launch in designed(job).launches if isinstance(launch, PrimitiveLaunch)]
    assert [launch.primitive.src_desc().dtype for launch in launches] == [DataType.U8] * 2
    assert launches[1].primitive.dst_desc().dtype is DataType.U8
    (ours,) = compiled(proto)(drawn(proto, 0)).values()
    off = np.abs(ours.astype(np.float64) - theirs(proto, drawn(proto, 0))) / unit(proto)
    assert off.max() < 1.01 and np.mean(off > 0.01) < 0.05


def moved(op: str, same: bool) -> onnx.ModelProto:
    b = Builder()
    x = b.around("x", -3, 4)
    scale, zero = b.nodes[-1].input[1:]
    w = b.weights(8, 8, 1, 1)
    window = {"kernel_shape": [3, 3], "pads": [1, 1, 1, 1]}
    attrs = {"MaxPool": window, "Transpose": {"perm": [0, 1, 3, 2]}, "Flatten": {}}
    y = b.node(op, x, **attrs[op])
    if not same:
        scale, zero = b.numbers(-2, 5)
    y = b.node("DequantizeLinear", b.node("QuantizeLinear", y, scale, zero), scale, zero)
    return b.model([("x", (1, 8, 6, 6))], [y, b.around(b.node("Conv", x, w), -3, 3)])


@pytest.mark.parametrize("same", [True, False])
@pytest.mark.parametrize("op", ["MaxPool", "Transpose", "Flatten"])
def test_what_moves_data_moves_the_integers_where_they_stand_for_the_same(op: str, same: bool) -> None:
    proto = moved(op, same)
    (job,) = [j for j in jobs(proto) if any(s.op.name == op for s in j.kernel.steps)]
    assert (len(designed(job).launches) == 1) is same
    ours, defined = computed(job)
    assert np.abs(ours.astype(int) - defined.astype(int)).max() <= (0 if same else 1)


# ── what would be wrong is seen ──────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("position", ["x_scale", "x_zero", "w_scale", "y_scale", "y_zero"])
def test_a_wrong_scale_or_zero_point_is_seen(position: str, monkeypatch: pytest.MonkeyPatch) -> None:
    usual = qdq_kernels._Between.vector

    def wrong(self: qdq_kernels._Between, at: int | None, default: float) -> Array:
        values = np.asarray(usual(self, at, default), np.float64)
        if at is None or at != getattr(self.at, position):
            return values
        return values + 16 if position.endswith("zero") else values * 1.25

    proto = qdq_models.convnet()
    graph, feeds = taso.load(proto), drawn(proto, 0)
    assert check_program(compiled(proto), graph, feeds, INT8) == ""
    monkeypatch.setattr(qdq_kernels._Between, "vector", wrong)
    (job,) = [j for j in jobs(proto) if "Clip" in {s.op.name for s in j.kernel.steps}]
    ours, defined = computed(job)
    assert np.abs(ours.astype(int) - defined.astype(int)).max() > 1
    assert "is off by" in check_program(compiled(proto), graph, feeds, INT8)


# ── asking for it ────────────────────────────────────────────────────────────────────────────────────────────────


def floats() -> onnx.ModelProto:
    nodes = [helper.make_node("Relu", ["x"], ["y"])]
    given, made = (helper.make_tensor_value_info(n, TensorProto.FLOAT, [2, 3]) for n in "xy")
    return helper.make_model(helper.make_graph(nodes, "g", [given], [made]))


def test_a_model_that_is_not_quantised_is_one_clear_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    graph = taso.load(floats())
    for ask in (
        lambda: taso.compile(graph, "onednn", 1, INT8), lambda: taso.optimize(graph, precision=INT8),
        lambda: graph.cost("onednn", 1, INT8),
    ):  # fmt: skip
        with pytest.raises(BackendError, match="no product of 8-bit integers: .* quantise it first, or use 'float32'"):
            ask()
    path = tmp_path / "floats.onnx"
    onnx.save(floats(), path)
    assert cli.main(["run", str(path), "--precision", "int8"]) != 0
    assert "quantise it first" in capsys.readouterr().err


def test_other_processors_and_backends_say_what_they_lack() -> None:
    with pytest.raises(BackendUnavailable, match="no instructions for products of 8-bit integers .*: use 'float32'"):
        checked_precision(INT8, "avx512_core")
    for name in ("reference", "onnxruntime"):
        with pytest.raises(BackendError, match=f"'{name}' computes in float32 alone"):
            get_backend(name, 1, INT8)
    assert get_backend("onednn int8", 1).name == "onednn int8" and "int8" in get_backend("onednn int8", 1).device_key()


def test_operators_of_integers_are_products_of_integers(tmp_path: Path) -> None:
    node = helper.make_node("MatMulInteger", ["a", "w"], ["y"])
    w = onnx.numpy_helper.from_array(np.arange(-6, 6, dtype=np.int8).reshape(4, 3), "w")
    given = helper.make_tensor_value_info("a", TensorProto.UINT8, [2, 4])
    made = helper.make_tensor_value_info("y", TensorProto.INT32, [2, 3])
    proto = helper.make_model(helper.make_graph([node], "g", [given], [made], [w]))
    a = np.arange(8, dtype=np.uint8).reshape(2, 4)
    assert np.array_equal(compiled(proto)({"a": a})["y"], a.astype(np.int32) @ np.arange(-6, 6).reshape(4, 3))


# ── the search ───────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("name", MODELS)
def test_the_search_measures_and_plans_for_integers_and_leaves_the_form_of_the_file(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TASO_CHECK_EVERY_STEP", "1")
    monkeypatch.setenv("TASO_CACHE_DIR", str(tmp_path))
    proto = MODELS[name]()
    graph, feeds = taso.load(proto), drawn(proto, 0)
    best = taso.optimize(graph, budget=5, backend="onednn", threads=1, precision=INT8)
    assert best.report is not None and best.report.backend == "onednn int8"
    kinds = {n.op.name for n in best.nodes}
    assert {"QuantizeLinear", "DequantizeLinear"} <= kinds and not any(k.startswith("QLinear") for k in kinds)
    assert best.report.after is not None and best.report.stopped in ("", "budget") and best.report.verified is not False
    (planned,) = taso.compile(best, "onednn", 1, INT8)(feeds).values()
    off = np.abs(planned.astype(np.float64) - theirs(proto, feeds)) / unit(proto)
    assert off.max() < 2.01 and np.mean(off > 0.01) < 0.15
    taso.save(best, tmp_path / "best.onnx")
    again = taso.load(tmp_path / "best.onnx")
    assert choices_of(again, "onednn int8") == choices_of(best, "onednn int8")


class Drawn:
    """Costs of kernels that say nothing, by which any plan may come out."""

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def kernel(self, kernel: Kernel) -> float:
        said = hashlib.sha256(f"{self._seed} {kernel.key}".encode()).digest()
        return 1e-5 + int.from_bytes(said[:4], "little") / 2**32 * 1e-4

    def cheapest(self, kernel: Kernel) -> tuple[float, str]:
        return self.kernel(kernel), ""


@pytest.mark.parametrize("signed", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_whatever_layouts_and_fusions_are_planned_the_numbers_stay(name: str, signed: bool) -> None:
    proto, backend = MODELS[name](0, signed), OneDNNBackend(1, INT8)
    feeds, plans = drawn(proto, 0), set[str]()
    (usual,) = backend.compile(taso.load(proto))(feeds).values()
    for seed in range(8):
        graph = taso.load(proto)
        found = plan(graph, backend.lowering, cast(CostModel, Drawn(seed)))
        graph.plans["onednn int8"] = found.choices
        plans.add(repr(found.choices))
        (planned,) = backend.compile(graph)(feeds).values()
        off = np.abs(planned.astype(np.float64) - usual) / unit(proto)
        assert off.max() < 2.01 and np.mean(off > 0.01) < 0.15
    assert len(plans) > 1


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", MODELS)
def test_whatever_is_rewritten_the_numbers_stay(
    name: str, seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TASO_CHECK_EVERY_STEP", "1")
    monkeypatch.setenv("TASO_CACHE_DIR", str(tmp_path))
    proto, backend = MODELS[name](), OneDNNBackend(1, INT8)
    monkeypatch.setattr(backend, "measure", Drawn(seed).kernel)
    best = taso.optimize(
        taso.load(proto), budget=5, alpha=1.1, backend=backend, threads=1, precision=INT8, never_slower=False
    )  # fmt: skip
    assert best.report is not None and best.report.stopped in ("", "budget")
    feeds = drawn(proto, 0)
    (found,) = taso.compile(best, "onednn", 1, INT8)(feeds).values()
    off = np.abs(found.astype(np.float64) - theirs(proto, feeds)) / unit(proto)
    assert off.max() < 2.01 and np.mean(off > 0.01) < 0.15


def test_a_rewrite_elsewhere_leaves_weights_as_the_integers_that_they_were(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TASO_CACHE_DIR", str(tmp_path))
    b = Builder()
    y = b.node("Conv", b.around("x", -3, 4), b.weights(8, 8, 3, 3), pads=[1, 1, 1, 1])
    y = b.around(b.node("Relu", b.node("Relu", y)), 0, 4)
    proto = b.model([("x", (1, 8, 9, 9))], [y])
    for precision in ("float32", INT8):
        backend = OneDNNBackend(1, precision)
        monkeypatch.setattr(backend, "measure", lambda kernel: 1e-4 * len(kernel.steps))
        best = taso.optimize(
            taso.load(proto), budget=5, backend=backend, threads=1, precision=precision, never_slower=False,
            rules="Relu(Relu(x)) => Relu(x)",
        )  # fmt: skip
        assert best.report is not None and len(best.report.rewrites) == 1
        (conv,) = [n for n in taso.export_onnx(best).graph.node if n.op_type == "Conv"]
        (made,) = [n for n in taso.export_onnx(best).graph.node if conv.input[1] in n.output]
        held = {t.name: t.data_type for t in taso.export_onnx(best).graph.initializer}
        assert made.op_type == "DequantizeLinear" and held[made.input[0]] == TensorProto.INT8


def test_a_planned_cost_is_below_that_of_float32(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TASO_CACHE_DIR", str(tmp_path))
    b = Builder()
    x = b.around("x", -3, 4)
    for _ in range(2):
        x = b.around(b.node("Relu", b.node("Conv", x, b.weights(128, 128, 3, 3), pads=[1, 1, 1, 1])), 0, 4)
    graph = taso.load(b.model([("x", (1, 128, 28, 28))], [x]))
    assert graph.cost("onednn", 1, INT8) < graph.cost("onednn", 1)


# ── what is not known beforehand, and whole numbers in pools ─────────────────────────────────────────────────────

DYNAMIC = """g (float[2,4] x) => (float[2,3] y, float[2,3] y2) {
 wi = Constant<value = int8[4,3]{1,2,3,4,5,6,7,8,9,10,11,12}>()
 ws = Constant<value_float = 0.01>()  wz = Constant<value = int8 {0}>()  w = DequantizeLinear(wi, ws, wz)
 s = Constant<value_float = 0.03>()  z = Constant<value = uint8 {100}>()
 a = QuantizeLinear(x, s, z)  d = DequantizeLinear(a, s, z)  y = MatMul(d, w)
 q, ds, dz = DynamicQuantizeLinear(x)  d2 = DequantizeLinear(q, ds, dz)  y2 = MatMul(d2, w) }"""
POOLED = """g (float[1,3,5,5] x) => (float[1,2,5,5] y) {
 s = Constant<value_float = 0.03>()  z = Constant<value = int8 {-7}>()
 wi = Constant<value = int8[2,3,1,1]{1,2,3,4,5,6}>()  ws = Constant<value_float = 0.01>()
 wz = Constant<value = int8 {0}>()  w = DequantizeLinear(wi, ws, wz)
 a = QuantizeLinear(x, s, z)  d = DequantizeLinear(a, s, z)  p = MaxPool<kernel_shape = [3,3], pads = [1,1,1,1]>(d)
 q = QuantizeLinear(p, s, z)  d2 = DequantizeLinear(q, s, z)  y = Conv(d2, w) }"""


@pytest.mark.parametrize("text", [DYNAMIC, POOLED], ids=["a scale that is computed", "a padded pool of int8"])
def test_what_integers_cannot_take_along_runs_all_the_same(text: str) -> None:
    proto = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["" : 21]> {text}')
    feeds = drawn(proto, 3)
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    wanted = onnxruntime.InferenceSession(proto.SerializeToString(), options).run(None, feeds)
    found = compiled(proto)(feeds)
    for one, other in zip(found.values(), wanted, strict=True):
        assert np.abs(one - other).max() <= 2 * 0.03 * 0.06 + 1e-5


@pytest.mark.parametrize("dtype", ["int8", "uint8"])
def test_a_padded_pool_of_whole_numbers_is_by_its_definition(dtype: str) -> None:
    shape = f"{dtype}[1,2,5,5]"
    text = f"g ({shape} x) => ({shape} y) {{ y = MaxPool<kernel_shape = [3,3], pads = [1,1,1,1]>(x) }}"
    proto = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["" : 20]> {text}')
    x = np.random.default_rng(0).integers(0, 100, (1, 2, 5, 5)).astype(dtype)
    wanted = onnxruntime.InferenceSession(proto.SerializeToString()).run(None, {"x": x})[0]
    for backend in ("onednn", "reference"):
        got = taso.compile(taso.load(proto), backend)({"x": x})["y"]
        assert got.dtype == x.dtype
        np.testing.assert_array_equal(got, wanted)


def test_two_precisions_at_once_are_an_error() -> None:
    for name, precision in (("onednn bf16", INT8), ("onednn int8", "bf16"), ("onednn int8", "nonsense")):
        with pytest.raises(BackendError, match=f"computes in {name[7:]}, and precision='{precision}' is asked for"):
            get_backend(name, 1, precision)
    assert get_backend("onednn int8", 1, INT8).lowering.precision == INT8
