"""The benchmark suite: the models of its zoo are the published ones, everybody computes the same, the command runs."""

from __future__ import annotations

import importlib
import json
import math
import statistics
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from xml.etree import ElementTree

import numpy as np
import onnx
import onnx.checker
import pytest
from numpy.typing import NDArray

import taso
from taso.backends.onednn.backend import OneDNNBackend
from taso.backends.select import get_backend
from taso.graph.errors import BackendUnavailable
from taso.graph.evaluate import evaluate_graph

ort = pytest.importorskip("onnxruntime")

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"
NAMES = (
    "resnet50", "resnext50", "nasnet_a", "nasrnn", "bert_base", "inception_v3", "squeezenet", "vgg16", "densenet121",
    "mobilenet_v2", "efficientnet_b0", "vit_s16",
)  # fmt: skip
OPERATIONS = {
    "resnet50": 4.09e9, "resnext50": 4.23e9, "nasnet_a": 23.8e9, "inception_v3": 5.71e9, "squeezenet": 0.35e9,
    "vgg16": 15.47e9, "densenet121": 2.83e9, "mobilenet_v2": 0.30e9, "efficientnet_b0": 0.39e9, "vit_s16": 4.6e9,
}  # fmt: skip
"""Published multiplications (each with an addition) at a batch of 1: papers, torchvision's and timm's tables."""

Array = NDArray[np.generic]


@pytest.fixture(autouse=True, scope="module")
def benchmarks_are_importable() -> Iterator[None]:
    sys.path.insert(0, str(BENCHMARKS))
    yield
    sys.path.remove(str(BENCHMARKS))


def module(name: str) -> ModuleType:
    return importlib.import_module(name)


def feeds_of(model: onnx.ModelProto, seed: int) -> dict[str, Array]:
    rng = np.random.default_rng(seed)
    shapes = {i.name: [d.dim_value for d in i.type.tensor_type.shape.dim] for i in model.graph.input}
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


def by_onnxruntime(model: onnx.ModelProto, feeds: dict[str, Array]) -> dict[str, Array]:
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.intra_op_num_threads = 1
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return dict(zip([o.name for o in session.get_outputs()], session.run(None, feeds), strict=True))


def error(found: dict[str, Array], wanted: dict[str, Array]) -> float:
    assert set(found) == set(wanted)
    return max(float(np.max(np.abs(found[k] - v)) / np.max(np.abs(v))) for k, v in wanted.items())


# ── the zoo ──────────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_zoo_has_the_twelve_models() -> None:
    assert tuple(module("zoo").ZOO) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_model_has_the_published_number_of_parameters_and_operations(name: str) -> None:
    zoo, roofline = module("zoo"), module("roofline")
    model, entry = zoo.build(name), zoo.ZOO[name]
    assert zoo.parameters(model) == pytest.approx(entry.parameters - entry.left_out, rel=0.01)
    graph = taso.load(model)
    products = sum(roofline.operations_of(n) for n in graph.operators if n.op.name in ("Conv", "MatMul", "Gemm")) / 2
    if name in OPERATIONS:
        assert products == pytest.approx(OPERATIONS[name], rel=0.03)


@pytest.mark.parametrize("name", NAMES)
def test_model_is_valid_and_the_same_on_onnx_runtime_and_on_taso(name: str) -> None:
    zoo = module("zoo")
    model = zoo.build(name, batch=2, size=zoo.ZOO[name].small)
    onnx.checker.check_model(model, full_check=True)
    feeds = feeds_of(model, 0)
    wanted = by_onnxruntime(model, feeds)
    try:
        backend: object = OneDNNBackend(threads=1)
    except BackendUnavailable:
        backend = "reference"
    graph = taso.load(model)
    assert error(taso.compile(graph, backend=backend)(feeds), wanted) < 1e-5
    assert error(evaluate_graph(graph, feeds, wide=True), wanted) < 1e-5


@pytest.mark.parametrize("name", NAMES)
def test_values_stay_near_one_and_outputs_depend_on_the_input(name: str) -> None:
    zoo = module("zoo")
    model = zoo.build(name, size=zoo.ZOO[name].small)
    outputs = [o.name for o in model.graph.output]
    # all values become outputs
    inner = (o for node in model.graph.node for o in node.output if o not in outputs)
    model.graph.output.extend([onnx.ValueInfoProto(name=o) for o in inner])
    one, other = (by_onnxruntime(model, feeds_of(model, seed)) for seed in (0, 1))
    spreads = [float(np.sqrt(np.mean(np.square(array, dtype=np.float64)))) for array in one.values()]
    assert all(map(math.isfinite, spreads)) and max(spreads) < 100
    assert all(0.01 < np.std(one[o]) < 100 for o in outputs)
    assert error({o: one[o] for o in outputs}, {o: other[o] for o in outputs}) > 1e-3


def test_the_seed_makes_the_weights_and_nothing_else_does() -> None:
    zoo = module("zoo")
    one, same, other = (zoo.build("squeezenet", seed=seed, size=64).SerializeToString() for seed in (0, 0, 1))
    assert one == same != other


# ── runtimes of others ───────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.slow
@pytest.mark.parametrize("runtime", ["openvino", "torch", "xla"])
@pytest.mark.parametrize("name", NAMES)
def test_runtimes_of_others_compute_the_same_for_every_model(name: str, runtime: str, tmp_path: Path) -> None:
    lacking = module("peers").missing(runtime)
    if lacking:
        pytest.skip(f"{runtime} needs {' and '.join(lacking)}")
    assert_runs(name, runtime, tmp_path)


@pytest.mark.parametrize("runtime", ["taso", "onnxruntime"])
def test_a_process_of_its_own_runs_times_and_tells_its_memory(runtime: str, tmp_path: Path) -> None:
    assert_runs("squeezenet", runtime, tmp_path)


def assert_runs(name: str, runtime: str, folder: Path) -> None:
    zoo, peers = module("zoo"), module("peers")
    model = zoo.build(name, size=zoo.ZOO[name].small)
    path = folder / "model.onnx"
    onnx.save(model, path)
    feeds = feeds_of(model, 0)
    peer = peers.Peer(runtime, str(path), 1)
    try:
        begun = peer.begin(feeds, 300)
        assert begun.failure == ""
        assert error(begun.outputs, by_onnxruntime(model, feeds)) < 1e-5
        assert len(peer.block(0.0)) == peers.LEAST_RUNS
        memory = peer.memory()
        if sys.platform == "linux":
            weights = sum(len(w.raw_data) for w in model.graph.initializer)
            assert memory.ever >= memory.before + weights // 2
    finally:
        peer.end()


def test_a_peer_that_cannot_run_a_model_says_why(tmp_path: Path) -> None:
    peers = module("peers")
    path = tmp_path / "model.onnx"
    path.write_bytes(b"no model")
    peer = peers.Peer("onnxruntime", str(path), 1)
    try:
        assert "protobuf" in peer.begin({}, 60).failure.lower()
    finally:
        peer.end()


# ── what follows from measurements ───────────────────────────────────────────────────────────────────────────────


def case_of(**blocks: list[float]):
    results, roofline = module("results"), module("roofline")
    made = {name.replace("_", "-"): results.Result(blocks=b, times=b) for name, b in blocks.items()}
    return results.Case("m", 1, 1, roofline.Needs(2e9, 1e6, 1e10, 0.5), roofline.Peaks(4e9, 1e10), {}, made)


def test_ratios_are_of_paired_blocks_against_the_faster_peer() -> None:
    case = case_of(taso=[1.0, 2.0, 4.0], onnxruntime=[3.0, 6.0, 12.0], openvino=[2.0, 4.0, 8.0])
    assert case.to_beat == "openvino"
    assert case.gain == (2.0, 2.0, 2.0)
    assert case.share == 0.25


def test_geometric_mean_of_known_ratios_and_its_interval_holds_it() -> None:
    results = module("results")
    mean, low, high = results.geometric_mean([[2.0] * 9, [8.0] * 9, []])
    assert (mean, low, high) == pytest.approx((4.0, 4.0, 4.0))
    rng = np.random.default_rng(0)
    samples = [list(np.exp(rng.normal(0.1, 0.3, 40))) for _ in range(12)]
    mean, low, high = results.geometric_mean(samples)
    wanted = math.exp(statistics.fmean(math.log(statistics.median(s)) for s in samples))
    assert mean == pytest.approx(wanted)
    assert low < mean < high < 1.3 * low


def test_a_model_loses_only_where_its_whole_interval_is_below_one() -> None:
    tables, results = module("tables"), module("results")
    slow = replace(case_of(taso=[2.0] * 5, onnxruntime=[1.0] * 5), model="slow")
    fast = replace(case_of(taso=[1.0] * 5, onnxruntime=[2.0] * 5), model="fast")
    even = replace(case_of(taso=[1.0, 2.0] * 4, onnxruntime=[2.0, 1.0] * 4), model="even")
    text = tables.whole(results.Run("p", {}, {"xla": "no reason"}, [slow, fast, even]))
    assert "against the faster peer: faster: fast; slower: slow; undecided: even" in text
    assert "xla is left out: no reason" in text


def test_operations_and_bytes_of_a_small_graph_are_those_counted_by_hand() -> None:
    roofline = module("roofline")
    graph = taso.new_graph()
    x = graph.new_input(dims=(1, 4, 8, 8))
    weight = graph.new_weight(dims=(6, 2, 3, 3))
    y = graph.conv2d(input=x, weight=weight, strides=(2, 2), padding="SAME")
    graph.relu(y)
    operations, held, edges = roofline.counted(graph)
    assert sorted(operations) == [6 * 16, 2 * 6 * 16 * 2 * 9]
    assert sum(held) == 4 * 6 * 2 * 9
    assert edges == 4 * (4 * 64 + 6 * 16)


# ── the command ──────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.slow
def test_the_suite_runs_a_tiny_model_to_its_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    suite, results = module("suite"), module("results")
    there, plot = tmp_path / "suite.json", tmp_path / "suite.svg"
    own = ["taso", "taso-plan", "taso-unoptimized", "onnxruntime", "onnxruntime-exported"]
    told = ["nasrnn", "--small", "--quick", "--rounds", "2", "--seconds", "0.01", "--budget", "2", "--time-limit", "5",
            "--on", ",".join(own), "--json", str(there), "--plot", str(plot)]  # fmt: skip
    assert suite.main(told) == 0
    said = capsys.readouterr().out
    assert "small pictures" in said and "geometric means" in said
    (case,) = results.read(there).cases
    assert list(case.results) == own
    assert set(case.made) == {"optimized", "planned", "exported"}
    assert all(len(r.blocks) == 2 and r.error < 1e-5 and r.file_bytes > 0 for r in case.results.values())
    assert case.disagreement < 1e-5
    assert case.needs.operations > 0 and case.needs.seconds > 0
    assert ElementTree.parse(plot).getroot().tag.endswith("svg")
    assert suite.main(["--from", str(there), "--plot", str(plot)]) == 0
    assert said.endswith(capsys.readouterr().out)
    assert json.loads(there.read_text("utf-8"))["settings"]["small"] is True


def test_the_gpu_benchmark_says_what_is_missing_and_shows_what_ran(capsys: pytest.CaptureFixture[str]) -> None:
    gpu, results, roofline = module("gpu"), module("results"), module("roofline")
    case = results.Case("bert_base", 1, 1, roofline.Needs(0, 0, 0, 0), roofline.Peaks(0, 0))
    case.results["taso-cuda"] = results.Result(blocks=[1e-3] * 5, times=[1e-3] * 5, error=1e-6, version="taso")
    case.results["torch-cuda"] = results.Result(blocks=[2e-3] * 5, times=[2e-3] * 5, error=1e-6, version="PyTorch")
    case.results["tensorrt"] = results.Result("no GPU answers")
    said = gpu.shown(case)
    assert "2.000 (2.000 to 2.000)" in said and "no GPU answers" in said and "1.5 times faster" in said
    if hosts_lack_a_gpu():
        assert gpu.main(["bert_base"]) == 1
        assert "nothing can be measured" in capsys.readouterr().err


def hosts_lack_a_gpu() -> bool:
    try:
        get_backend("cudnn")
    except BackendUnavailable:
        return True
    return False


def test_the_experiment_on_grouped_convolutions_names_the_best_factor(capsys: pytest.CaptureFixture[str]) -> None:
    gpu = module("gpu")
    assert gpu.main(["--groups", "--backend", "reference", "--budget", "5"]) == 0
    assert "merge factor 1; the search comes to 1" in capsys.readouterr().out


def test_contestants_on_gpus_are_named_once() -> None:
    suite, peers = module("suite"), module("peers")
    assert set(suite.ON_CPU) | set(suite.ON_GPU) == set(suite.VARIANTS)
    assert {suite.VARIANTS[name].runtime for name in suite.VARIANTS} <= set(peers.RUNNERS)
    assert set(peers.RUNNERS) == set(peers.NEEDS)


def test_the_suite_names_the_models_where_it_is_asked_for_another(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        module("suite").main(["resnet51"])
    assert "resnet50" in capsys.readouterr().err
