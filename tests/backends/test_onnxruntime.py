"""The ONNX Runtime backend: what it runs, which nodes it takes for one kernel, and how a kernel is measured."""

from __future__ import annotations

import importlib
import math
from collections import Counter
from fnmatch import fnmatchcase
from pathlib import Path

import models
import numpy as np
import onnx
import pytest
from numpy.typing import NDArray
from onnx import ModelProto, numpy_helper

import taso
from taso.backends.costs import CostDatabase
from taso.backends.lowering import BLOCKED, PLAIN, Kernel, Operand, Step, lower
from taso.backends.onnxruntime import executor, measuring, runtime
from taso.backends.onnxruntime import trial as trials
from taso.backends.onnxruntime.backend import OnnxRuntimeBackend
from taso.backends.onnxruntime.lowering import BlockedChannels, RuntimeLowering, in_blocks
from taso.backends.onnxruntime.trial import trial
from taso.backends.reference import ReferenceBackend
from taso.backends.select import get_backend
from taso.graph.errors import BackendError, BackendUnavailable, InputError
from taso.graph.graph import Graph
from taso.graph.operator import Attrs, Weight, operator_named
from taso.graph.types import DType, TensorType
from taso.rules import collection, constants
from taso.rules.matcher import Matcher
from taso.search import optimize as optimizing
from taso.search.result import Report
from taso.search.settings import Settings

Array = NDArray[np.generic]
ROUNDING = 2e-6
LIGHT = ("squeezenet", "shufflenet", "inception_v2")


def with_weights(text: str, opset: int = 17, **weights: Array) -> ModelProto:
    """A model from the text of its graph, with weights of these names and random or given values."""
    proto = models.model(text, opset=opset, ir_version=9)
    proto.graph.initializer.extend(numpy_helper.from_array(a, name) for name, a in weights.items())
    return proto


def normal(*shape: int) -> Array:
    return np.random.default_rng(math.prod(shape)).normal(size=shape).astype(np.float32)


def positive(*shape: int) -> Array:
    return np.abs(normal(*shape)) + np.float32(0.5)


def number(value: float) -> Array:
    return np.float32(value).reshape(())


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels run as often as it takes to see what they are made of."""
    monkeypatch.setattr(measuring, "_SECONDS_WANTED", 0.0)
    monkeypatch.setattr(measuring, "_LEAST_RUNS", 1)


@pytest.fixture(scope="module")
def backend() -> OnnxRuntimeBackend:
    return OnnxRuntimeBackend(1)


# ── choosing it ──────────────────────────────────────────────────────────────────────────────────────────────────


def test_it_is_found_by_name_and_says_what_its_costs_depend_on() -> None:
    backend = get_backend("onnxruntime", 2)
    version = importlib.import_module("onnxruntime").__version__
    assert backend.name == "onnxruntime" and backend.measures and not backend.plans
    assert f"ONNX Runtime {version}" in backend.device_key() and "2 threads" in backend.device_key()
    assert backend.device_key() != get_backend("onnxruntime", 1).device_key()


def test_without_its_package_it_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise ImportError(f"No module named '{name}'")

    monkeypatch.setattr(runtime.importlib, "import_module", missing)
    runtime.runtime.cache_clear()
    try:
        with pytest.raises(BackendUnavailable, match=r"pip install 'taso\[onnxruntime\]'"):
            get_backend("onnxruntime")
    finally:
        runtime.runtime.cache_clear()


@pytest.mark.parametrize("threads", [0, -1, 10**6, 1.5])
def test_a_number_of_threads_that_is_none_is_refused(threads: object) -> None:
    with pytest.raises(BackendError, match="number of threads"):
        OnnxRuntimeBackend(threads)  # type: ignore[arg-type]  # what a user may give


# ── running graphs ───────────────────────────────────────────────────────────────────────────────────────────────

NETWORK = with_weights(
    """g (float[N,8,12,12] x) => (float[N,16,12,12] y, float[16,8,3,3] w)
    { c = Conv<pads=[1,1,1,1]>(x, w) b = BatchNormalization(c, s, s, s, s) y = Relu(b) }""",
    w=normal(16, 8, 3, 3), s=positive(16),
)  # fmt: skip


@pytest.mark.parametrize("batch", [1, 3])
def test_programs_compute_what_the_model_means_at_every_size(backend: OnnxRuntimeBackend, batch: int) -> None:
    feeds = models.random_feeds(NETWORK, symbols={"N": batch})
    found = backend.compile(taso.load(NETWORK))(feeds)
    wanted = models.by_reference(NETWORK, feeds)
    assert list(found) == ["y", "w"]
    assert models.relative_error(found["y"], wanted[0]) < ROUNDING


def test_what_does_not_fit_the_inputs_is_refused(backend: OnnxRuntimeBackend) -> None:
    program = backend.compile(taso.load(NETWORK))
    with pytest.raises(InputError, match="'x'"):
        program({"x": np.zeros((1, 9, 12, 12), np.float32)})
    with pytest.raises(InputError, match="'x'"):
        program({"x": np.zeros((1, 8, 12, 12), np.float64)})


def test_outputs_are_arrays_of_their_own(backend: OnnxRuntimeBackend) -> None:
    program = backend.compile(taso.load(NETWORK))
    feeds = models.random_feeds(NETWORK, symbols={"N": 1})
    first = program(feeds)
    kept = {name: array.copy() for name, array in first.items()}
    program({"x": -feeds["x"]})
    assert all(np.array_equal(first[name], kept[name]) for name in kept)
    for array in first.values():
        array[...] = 0
    again = program(feeds)
    assert all(np.array_equal(again[name], kept[name]) for name in kept)


def test_kernels_are_the_nodes_that_are_run(backend: OnnxRuntimeBackend) -> None:
    proto = with_weights("g (float[4,8] x) => (float[4,8] y) { a = MatMul(x, w) b = Add(a, c) y = Exp(b) }",
                         w=normal(8, 8), c=normal(8))  # fmt: skip
    program = backend.compile(taso.load(proto))
    assert program.kernels == 0
    program(models.random_feeds(proto))
    assert program.kernels == 2
    program(models.random_feeds(proto))
    assert program.kernels == 2
    assert program.peak_bytes >= 4 * 8 * 4


def test_a_program_leaves_no_files_behind(
    backend: OnnxRuntimeBackend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(executor.tempfile, "tempdir", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    program = backend.compile(taso.load(NETWORK))
    program(models.random_feeds(NETWORK, symbols={"N": 1}))
    assert list(tmp_path.iterdir()) == []
    unused = backend.compile(taso.load(NETWORK))
    del unused
    assert list(tmp_path.iterdir()) == []


def test_weights_beyond_one_protobuf_pass_through_a_file(
    backend: OnnxRuntimeBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(executor, "LIMIT", 100)
    feeds = models.random_feeds(NETWORK, symbols={"N": 1})
    found = backend.compile(taso.load(NETWORK))(feeds)
    assert models.relative_error(found["y"], models.by_reference(NETWORK, feeds)[0]) < ROUNDING


def test_an_operator_that_it_does_not_have_is_named_with_its_node(backend: OnnxRuntimeBackend) -> None:
    text = "g (float[2] x) => (float[2] y) { a = Relu(x) y = my.Own(a) }"
    proto = models.model(text, domains={"my": 1})
    proto.graph.node[1].name = "the odd one"
    with pytest.raises(BackendError, match="my:Own.*'the odd one'"):
        backend.compile(taso.load(proto))


def test_an_element_type_that_it_does_not_have_is_named_with_its_node(backend: OnnxRuntimeBackend) -> None:
    text = "g (float[2,2] x) => (float[2,2] y) { a = Cast<to=16>(x) b = MatMul(a, a) y = Cast<to=1>(b) }"
    proto = models.model(text)
    proto.graph.node[1].name = "the odd one"
    with pytest.raises(BackendError, match="MatMul.*'the odd one'"):
        backend.compile(taso.load(proto))


def test_arrays_that_cannot_be_passed_to_it_are_named(backend: OnnxRuntimeBackend) -> None:
    proto = models.model("g (bfloat16[2] x) => (float[2] y) { y = Cast<to=1>(x) }")
    with pytest.raises(BackendError, match="BFLOAT16.*'x'"):
        backend.compile(taso.load(proto))


def test_operators_of_onnxruntimes_own_domain_run(backend: OnnxRuntimeBackend) -> None:
    text = "g (float[2] x) => (float[2] y) { y = com.microsoft.QuickGelu<alpha=1.0>(x) }"
    proto = models.model(text, domains={"com.microsoft": 1})
    x = np.array([-1, 2], np.float32)
    found = backend.compile(taso.load(proto))({"x": x})["y"]
    assert models.relative_error(found, (x / (1 + np.exp(-x))).astype(np.float32)) < ROUNDING


# ── which nodes are one kernel ───────────────────────────────────────────────────────────────────────────────────


def nodes_run(graph: Graph, threads: int = 1) -> Counter[str]:
    """The nodes that ONNX Runtime runs of a graph, by operator and types."""
    program = executor.RuntimeProgram(graph, RuntimeLowering(), threads)
    found: list[runtime.Event] = []
    wanted = executor.events

    def noted(session: runtime.Session) -> list[runtime.Event]:
        found.extend(wanted(session))
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(executor, "events", noted)
        program({n: np.zeros(v.type.static_shape, v.type.dtype.numpy) for n, v in zip(
            graph.input_names, graph.inputs, strict=True)})  # fmt: skip
    return Counter(event.signature for event in found)


def kernels_of(graph: Graph, lowering: RuntimeLowering) -> list[Kernel]:
    """The kernels of a graph, changes of layout included."""
    plan = lower(graph, lowering)
    asked = [(v, o.layout) for job in plan.jobs for v, o in zip(job.operands, job.kernel.operands, strict=True)
             if not o.constant]  # fmt: skip
    asked += [(v, PLAIN) for _, v in graph.outputs if not v.node.constant]
    changes = {
        (v, in_blocks(wanted)): Kernel(
            (Operand(v.type, plan.layouts[v], False),), (), (Operand(v.type, wanted, False),)
        )
        for v, wanted in asked if not lowering.layouts.alike(v.type, plan.layouts[v], wanted)
    }  # fmt: skip
    return [*(job.kernel for job in plan.jobs), *changes.values()]


def nodes_counted(kernel: Kernel) -> list[str]:
    """The nodes of a kernel that its measurement counts, by operator and types."""
    found = measuring.profiled(trial(kernel), 1)
    return [e.signature for e in found if not measuring._is_around(e, kernel)]


def nodes_of_kernels(graph: Graph, lowering: RuntimeLowering) -> Counter[str]:
    made = [nodes_counted(k) for k in kernels_of(graph, lowering) if not all(s.op.name == "Identity" for s in k.steps)
            or not k.steps]  # fmt: skip
    return Counter(signature for signatures in made for signature in signatures)


IMAGE = "g (float[1,32,14,14] x) => (float[a,b,c,d] y) "
MATRIX = "g (float[1,16,64] x, float[1,16,64] q) => (float[a,b,c] y) "
CONV = "c = Conv<pads=[1,1,1,1]>(x, w) "
K = {"w": normal(32, 32, 3, 3), "v": normal(32, 32, 3, 3), "p": positive(32), "scale": positive(32, 1, 1)}
M = {"w": normal(64, 64), "v": normal(64, 64), "b": normal(64)}
GELU = {"r": number(math.sqrt(2)), "one": number(1), "half": number(0.5)}

FUSED = {
    "convolution, batch norm, residual and activation": with_weights(
        IMAGE + "{" + CONV + "b = BatchNormalization(c, p, p, p, p) r = Relu(b) d = Conv<pads=[1,1,1,1]>(r, v)"
        " e = BatchNormalization(d, p, p, p, p) s = Add(e, r) y = Relu(s) }", **K),
    "scale and shift folded into a convolution": with_weights(
        IMAGE + "{" + CONV + "m = Mul(c, scale) a = Add(m, scale) y = Clip(a, lo, hi) }",
        lo=number(0), hi=number(6), **K),
    "scale after a pool, and a shift that nothing folds": with_weights(
        IMAGE + "{ m = MaxPool<kernel_shape=[2,2]>(x) n = Mul(m, scale) a = Add(n, scale) r = Relu(a)"
        " y = Conv<pads=[1,1,1,1]>(r, w) }", **K),
    "activations that leave the blocks, and one that does not": with_weights(
        IMAGE + "{" + CONV + "e = Elu(c) d = Conv<pads=[1,1,1,1]>(e, v) t = Tanh(d) s = Softplus(d) y = Mul(t, s) }",
        **K),
    "swish": with_weights(IMAGE + "{" + CONV + "s = Sigmoid(c) m = Mul(c, s) y = Conv<pads=[1,1,1,1]>(m, v) }", **K),
    "hard swish": with_weights(IMAGE + "{" + CONV + "h = HardSwish(c) y = Conv<pads=[1,1,1,1]>(h, v) }", **K),
    "groups that are no whole blocks": with_weights(
        IMAGE + "{ c = Conv<pads=[1,1,1,1], group=4>(x, g) r = Relu(c) y = Conv<pads=[1,1,1,1]>(r, w) }",
        g=normal(32, 8, 3, 3), **K),
    "a depthwise convolution and padding": with_weights(
        IMAGE + "{ p = Pad(x, pads) d = Conv<group=32>(p, g) r = LeakyRelu(d) y = Conv(r, n) }",
        pads=np.array([0, 0, 1, 1, 0, 0, 1, 1]), g=normal(32, 1, 3, 3), n=normal(24, 32, 1, 1)),
    "concatenation and pools": with_weights(
        IMAGE + "{" + CONV + "d = Conv<pads=[1,1,1,1]>(x, v) k = Concat<axis=1>(c, d)"
        " m = MaxPool<kernel_shape=[2,2]>(k) y = GlobalAveragePool(m) }", **K),
    "a concatenation of parts that are no whole blocks": with_weights(
        IMAGE + "{ a = Conv(x, n) b = Conv(x, o) y = Concat<axis=1>(a, b) }",
        n=normal(24, 32, 1, 1), o=normal(20, 32, 1, 1)),
    "squeeze and excitation": with_weights(
        IMAGE + "{" + CONV + "g = GlobalAveragePool(c) h = Conv(g, n) s = Sigmoid(h) m = Mul(c, s)"
        " y = Conv<pads=[1,1,1,1]>(m, v) }", n=normal(32, 32, 1, 1), **K),
    "a transposition between images": with_weights(
        IMAGE + "{" + CONV + "t = Transpose<perm=[0,1,3,2]>(c) y = Conv<pads=[1,1,1,1]>(t, v) }", **K),
    "a whole product with bias and activation": with_weights(
        "g (float[16,64] x, float[16,64] q) => (float[a,b] y)"
        "{ m = MatMul(x, w) a = Add(m, b) r = Relu(a) n = MatMul(r, v) s = Add(n, q) y = Tanh(s) }", **M),
    "GELU by erf": with_weights(
        MATRIX + "{ m = MatMul(x, w) d = Div(m, r) e = Erf(d) f = Add(e, one) g = Mul(m, f) y = Mul(g, half) }",
        **M, **GELU),
    "a sum before a layer norm": with_weights(
        MATRIX + "{ m = MatMul(x, w) s = Add(m, q) y = LayerNormalization<axis=-1>(s, b, b) }", **M),
    "a sum before a layer norm that others read": with_weights(
        MATRIX + "{ m = MatMul(x, w) s = Add(m, q) n = LayerNormalization<axis=-1>(s, b, b) y = Add(n, s) }", **M),
    "a scaled product, and a softmax": with_weights(
        "g (float[1,4,16,16] x, float[1,4,16,16] q) => (float[a,b,c,d] y)"
        "{ m = MatMul(x, q) d = Div(m, r) s = Softmax<axis=-1>(d) y = MatMul(s, q) }", **GELU),
    "transpositions taken into a product": with_weights(
        "g (float[16,4,64] x, float[16,4,64] q) => (float[a,b,c] y)"
        "{ t = Transpose<perm=[1,0,2]>(x) u = Transpose<perm=[1,2,0]>(q) m = MatMul(t, u) y = Softmax<axis=-1>(m) }"),
    "a transposition that no product takes in": with_weights(
        "g (float[1,16,4,8] x, float[1,4,8,16] q) => (float[a,b,c,d] y)"
        "{ t = Transpose<perm=[0,2,1,3]>(x) y = MatMul(t, q) }"),
}  # fmt: skip


NEWER = {"scale after a pool, and a shift that nothing folds"}
"""What ONNX Runtime 1.18 does otherwise, so that sums of kernels count changes of layout too many there."""


@pytest.mark.parametrize("name", FUSED)
@pytest.mark.usefixtures("quick")
def test_kernels_are_made_of_the_nodes_that_onnxruntime_runs(backend: OnnxRuntimeBackend, name: str) -> None:
    version = tuple(map(int, runtime.runtime().__version__.split(".")[:2]))
    if name in NEWER and version < (1, 32):
        pytest.skip("older versions do not multiply by a number for each channel in blocks")
    graph = taso.load(onnx.shape_inference.infer_shapes(FUSED[name]))
    assert nodes_of_kernels(graph, backend.lowering) == nodes_run(graph)


@pytest.mark.parametrize("name", LIGHT)
@pytest.mark.slow
@pytest.mark.usefixtures("quick")
def test_kernels_of_whole_models_are_made_of_the_nodes_that_onnxruntime_runs(name: str) -> None:
    backend = OnnxRuntimeBackend(1)
    graph = taso.load(models.seeded_light(name))
    assert nodes_of_kernels(graph, backend.lowering) == nodes_run(graph)


def names(graph: Graph, lowering: RuntimeLowering) -> list[str]:
    return ["+".join(s.op.name for s in k.steps) or "change of layout" for k in kernels_of(graph, lowering)]


def test_a_chain_ends_where_others_read_it(backend: OnnxRuntimeBackend) -> None:
    proto = with_weights(IMAGE[:-len(" => (float[a,b,c,d] y) ")] + " => (float[a,b,c,d] y, float[e,f,g,h] z) {" + CONV
                         + "y = Relu(c) z = Tanh(c) }", **K)  # fmt: skip
    graph = taso.load(onnx.shape_inference.infer_shapes(proto))
    assert "Conv" in names(graph, backend.lowering)


def test_where_channels_are_never_put_in_blocks_everything_is_plain() -> None:
    lowering = RuntimeLowering(BlockedChannels(0))
    graph = taso.load(onnx.shape_inference.infer_shapes(FUSED["concatenation and pools"]))
    assert set(lower(graph, lowering).layouts.values()) == {PLAIN}
    assert "change of layout" not in names(graph, lowering)


# ── measuring a kernel ───────────────────────────────────────────────────────────────────────────────────────────


def image(channels: int = 32, size: int = 14) -> TensorType:
    return TensorType(DType.FLOAT, (1, channels, size, size))


def kernel(model_name: str, number: int, lowering: RuntimeLowering) -> Kernel:
    graph = taso.load(onnx.shape_inference.infer_shapes(FUSED[model_name]))
    return lower(graph, lowering).jobs[number].kernel


def test_a_change_of_layout_is_measured_as_the_node_that_makes_it(backend: OnnxRuntimeBackend) -> None:
    if not backend.lowering.layouts.block:
        pytest.skip("ONNX Runtime does not put channels in blocks on this processor")
    there = Kernel((Operand(image(), PLAIN, False),), (), (Operand(image(), BLOCKED, False),))
    back = Kernel((Operand(image(), BLOCKED, False),), (), (Operand(image(), PLAIN, False),))
    assert [s.split()[0] for s in nodes_counted(there)] == ["ReorderInput"]
    assert [s.split()[0] for s in nodes_counted(back)] == ["ReorderOutput"]
    assert 0 < backend.measure(there) < 1 and 0 < backend.measure(back) < 1


def test_what_is_left_out_costs_nothing(backend: OnnxRuntimeBackend) -> None:
    proto = models.model("g (float[1,32,14,14] x) => (float[1,32,14,14] y) { d = Dropout(x) y = Relu(d) }")
    (left_out, relu) = (job.kernel for job in lower(taso.load(proto), backend.lowering).jobs)
    assert backend.measure(left_out) == 0 and backend.measure(relu) > 0


def test_kernels_that_become_the_same_nodes_cost_the_same(backend: OnnxRuntimeBackend) -> None:
    two = with_weights("g (float[16,64] x) => (float[16,64] y) { m = MatMul(x, w) y = Add(m, b) }", **M)
    one = with_weights("g (float[16,64] x) => (float[16,64] y) { y = Gemm(x, w, b) }", **M)
    kernels = [lower(taso.load(proto), backend.lowering).jobs[0].kernel for proto in (two, one)]
    assert kernels[0].key != kernels[1].key
    assert backend.measure(kernels[0]) == backend.measure(kernels[1])


def test_a_convolution_costs_the_same_with_a_bias_and_another_with_a_residual(backend: OnnxRuntimeBackend) -> None:
    def signatures(text: str) -> list[str]:
        proto = with_weights(IMAGE + "{" + text + "}", **K, bias=normal(32))
        graph = taso.load(onnx.shape_inference.infer_shapes(proto))
        return [s for s in nodes_run(graph) if s.startswith("Conv ")]

    plain, biased = signatures("y = Conv<pads=[1,1,1,1]>(x, w)"), signatures("y = Conv<pads=[1,1,1,1]>(x, w, bias)")
    assert plain == biased and len(plain) == 1
    if backend.lowering.layouts.block:
        first = "c = Conv<pads=[1,1,1,1]>(x, w)"
        assert signatures(first + "d = Conv<pads=[1,1,1,1]>(x, v) y = Add(c, d)") != plain


@pytest.mark.parametrize("channels, swept", [(8, trials._LEAST_SWEPT), (512, trials._MOST_SWEPT)])
def test_what_is_larger_than_a_cache_is_measured_where_nothing_has_been(channels: int, swept: int) -> None:
    operand, result = (Operand(image(channels, 28), PLAIN, False) for _ in range(2))
    relu = Kernel((operand,), (Step(operator_named("Relu"), Attrs({}), (0,)),), (result,))
    assert trial(relu).feeds[trials._SWEEP].nbytes == swept


def test_what_nothing_is_known_of_is_costed_by_the_formula(backend: OnnxRuntimeBackend) -> None:
    opaque = models.model("g (float[2] x) => (float[2] y) { y = my.Own(x) }", domains={"my": 1})
    found = lower(taso.load(opaque), backend.lowering).jobs[0].kernel
    assert backend.measure(found) == ReferenceBackend().measure(found)


@pytest.mark.parametrize(
    "text, weights",
    [
        ("g (float[5,1] x) => (float[3,1] y) { y = Gather(x, i) }", {"i": np.array([0, 4, 2])}),
        ("g (int64[4] x, int64[4] q) => (int64[4] y) { y = Div(x, q) }", {}),
        ("g (bool[4] c, float[4] a, float[4] b) => (float[4] y) { y = Where(c, a, b) }", {}),
        ("g (double[4,4] x) => (double[4,2] y, double[4,2] z) { y, z = Split<axis=1>(x) }", {}),
        ("g (float[2,3,4] x) => (float[2,12] y) { y = Reshape(x, s) }", {"s": np.array([2, 12])}),
        ("g (float16[4] x) => (float[4] y) { y = Cast<to=1>(x) }", {}),
        ("g (float[8] x, float[8] q) => (float[8] y) { y = Pow(x, q) }", {}),
    ],
)
@pytest.mark.usefixtures("quick")
def test_kernels_of_all_kinds_can_be_measured(
    backend: OnnxRuntimeBackend, text: str, weights: dict[str, Array]
) -> None:
    opset = 13 if "Split" in text else 17
    jobs = lower(taso.load(with_weights(text, opset, **weights)), backend.lowering).jobs
    assert jobs and all(backend.measure(job.kernel) >= 0 for job in jobs)


def test_disturbed_runs_do_not_count() -> None:
    assert measuring.typical([10e-6, 10e-6, 11e-6, 500e-6]) == pytest.approx(31e-6 / 3)
    assert measuring.typical([3e-6, 4e-6, 3e-6, 4e-6]) == pytest.approx(3.5e-6)
    assert measuring.typical([2.0]) == 2.0


# ── optimizing for it ────────────────────────────────────────────────────────────────────────────────────────────


def test_a_model_is_optimized_and_its_export_computes_the_same() -> None:
    proto = with_weights(
        IMAGE + "{" + CONV + "d = Conv<pads=[1,1,1,1]>(x, v) a = Add(c, d) r = Relu(a) y = Relu(r) }", **K
    )
    best = taso.optimize(proto, backend="onnxruntime", threads=1, never_slower=False, progress=False)
    assert best.report.costs_are_measured and best.report.rewrites
    feeds = models.random_feeds(proto)
    (found,) = models.by_onnxruntime(taso.export_onnx(best), feeds)
    assert models.relative_error(found, models.by_onnxruntime(proto, feeds)[0]) < ROUNDING


# ── convolutions by another algorithm ────────────────────────────────────────────────────────────────────────────


def _by_products(kernel: Kernel) -> float:
    """Costs by which every rule for convolutions of few taps pays: products alone, and nothing for what moves."""
    total = 1e-9
    for step in kernel.steps:
        if step.op.name == "Conv":
            weight = kernel.operands[step.inputs[1]].type.static_shape
            total += 1e-9 * math.prod(weight[1:]) * math.prod(kernel.results[0].type.static_shape)
    return total


def _convolutions(batch: int | str = 2) -> ModelProto:
    """3×3 with a batch normalization, 1×7 with a bias, 3×1 and 7×1, of sizes that are no multiples of tiles."""
    rng = np.random.default_rng(5)

    def scaled(*shape: int) -> Array:
        return np.asarray(rng.normal(size=shape) / math.sqrt(math.prod(shape[1:])), np.float32)

    text = (
        f"g (float[{batch},16,11,13] x) => (float[a,b,c,d] y) {{"
        "c = Conv<pads=[1,1,1,1]>(x, w) n = BatchNormalization(c, s, b, m, v) r = Relu(n)"
        "d = Conv<pads=[0,3,0,3]>(r, k, b) e = Conv<pads=[1,0,1,0]>(d, h) y = Conv<pads=[3,0,3,0]>(e, l) }"
    )
    filters = {"w": (24, 16, 3, 3), "k": (24, 24, 1, 7), "h": (24, 24, 3, 1), "l": (24, 24, 7, 1)}
    weights = {name: scaled(*shape) for name, shape in filters.items()}
    return with_weights(text, **weights, s=positive(24), b=normal(24), m=normal(24), v=positive(24))


def test_convolutions_become_products_of_tiles_where_that_is_cheaper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OnnxRuntimeBackend, "measure", lambda self, kernel: _by_products(kernel))
    monkeypatch.setattr(OnnxRuntimeBackend, "device_key", lambda self: "by products alone")
    proto = _convolutions()
    best = taso.optimize(proto, backend="onnxruntime", threads=1, never_slower=False, progress=False)
    assert best.report.verified
    groups = sorted(n.attrs.int("group") for n in best.run_time_nodes if n.op.name == "Conv")
    # a transform of the data for each, and the products of F(4, 3) in both directions, F(4, 7) and F(4, 3) in one
    assert groups == [1, 1, 1, 1, 6, 10, 10, 36]
    assert not any(n.op.name == "BatchNormalization" for n in best.nodes)
    feeds = models.random_feeds(proto)
    exported = taso.export_onnx(best)
    onnx.checker.check_model(exported, full_check=True)
    (found,), (wanted,) = models.by_onnxruntime(exported, feeds), models.by_onnxruntime(proto, feeds)
    # F(4×4, 3×3) loses some 20 times what a direct convolution does, and one follows the other here
    assert ROUNDING / 100 < models.relative_error(found, wanted) < 5e-5


def test_convolutions_become_products_of_tiles_at_any_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OnnxRuntimeBackend, "measure", lambda self, kernel: _by_products(kernel))
    monkeypatch.setattr(OnnxRuntimeBackend, "device_key", lambda self: "by products alone")
    proto = _convolutions("n")
    best = taso.optimize(
        proto, backend="onnxruntime", threads=1, never_slower=False, progress=False, input_shapes={"x": (2, 16, 11, 13)}
    )
    assert max(n.attrs.int("group") for n in best.run_time_nodes if n.op.name == "Conv") == 36
    exported = taso.export_onnx(best)
    for batch in (1, 3):
        feeds = {"x": normal(batch, 16, 11, 13)}
        (found,), (wanted,) = models.by_onnxruntime(exported, feeds), models.by_onnxruntime(proto, feeds)
        assert found.shape == wanted.shape and models.relative_error(found, wanted) < 5e-5


def test_a_wrong_transform_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rule whose matrix of outputs is off in one entry, as if its proof had been wrong."""
    monkeypatch.setattr(OnnxRuntimeBackend, "measure", lambda self, kernel: _by_products(kernel))
    monkeypatch.setattr(OnnxRuntimeBackend, "device_key", lambda self: "by products alone")
    right = constants.ConstantWeight._values

    def off(weight: constants.ConstantWeight) -> Array:
        values = right(weight).copy()
        if weight.op is constants.TILE_OUTPUT:
            values.flat[1] += 2e-3
        return values

    monkeypatch.setattr(constants.ConstantWeight, "_values", off)
    constants.constant_weight.cache_clear()
    try:
        best = taso.optimize(_convolutions(), backend="onnxruntime", threads=1, never_slower=False, progress=False)
    finally:
        constants.constant_weight.cache_clear()
    assert "could not be shown equal" in best.report.decision and not best.report.rewrites


@pytest.mark.parametrize(
    ("dtype", "places"), [(DType.FLOAT, 2), (DType.DOUBLE, 2), (DType.FLOAT16, 0), (DType.BFLOAT16, 0)]
)
def test_no_digits_are_given_up_where_there_are_few(dtype: DType, places: int) -> None:
    graph = taso.new_graph()
    x = graph.add_input("x", TensorType(dtype, (1, 4, 8, 8)))
    weight = graph.add_weight(Weight(TensorType(dtype, (4, 4, 3, 3)), np.ones((4, 4, 3, 3), dtype.numpy)))
    graph.set_outputs([("y", graph.make(operator_named("Conv"), (x, weight)).output)])
    spelled = [r for r in collection.library() if fnmatchcase(r.id, collection.ALGORITHMS)]
    found = Matcher(spelled).find_all(optimizing.prepare(graph, Settings(ReferenceBackend(), [], CostDatabase())).state)
    assert len(list(found)) == places


_WINOGRAD = next(r for r in collection.library() if r.id == "winograd-3x3-tile-4x4")
_WINOGRAD_FILE = Path(collection.__file__).parent / "library" / "winograd.pb"


@pytest.mark.parametrize(
    ("backend", "rules", "exactness", "taken"),
    [
        ("onnxruntime", None, ("exact", "reassociates"), True),
        ("onnxruntime", ["+*"], ("exact", "reassociates"), True),
        ("onnxruntime", None, ("exact",), False),
        ("onnxruntime", ["-winograd-*"], ("exact", "reassociates"), False),
        ("reference", None, ("exact", "reassociates"), False),
        ("reference", ["+*"], ("exact", "reassociates", "approximates"), False),
        ("reference", ["+winograd-3x3-tile-4x4"], ("exact", "reassociates", "approximates"), True),
        ("reference", ["+winograd-3x3-tile-4x4"], ("exact", "reassociates"), False),
        ("reference", ["+winograd-*"], ("exact", "reassociates", "approximates"), True),
        ("reference", ["+*"], ("exact", "reassociates", "approximates"), False),
        ("reference", [_WINOGRAD], ("exact", "reassociates", "approximates"), True),
        ("reference", str(_WINOGRAD_FILE), ("exact", "reassociates", "approximates"), True),
    ],
)
def test_rules_that_spell_an_algorithm_are_for_runtimes_without_it(
    monkeypatch: pytest.MonkeyPatch, backend: str, rules: list[str] | None, exactness: tuple[str, ...], taken: bool
) -> None:
    given: list[bool] = []

    def noted(graph: Graph, settings: Settings) -> tuple[Graph, Report]:
        given.append(any(fnmatchcase(r.id, collection.ALGORITHMS) for r in settings.rules))
        return graph, Report(settings.backend.name, settings.backend.device_key())

    monkeypatch.setattr(optimizing, "optimize", noted)
    taso.optimize(_convolutions(), backend=backend, rules=rules, exactness=exactness)
    assert given == [taken]
