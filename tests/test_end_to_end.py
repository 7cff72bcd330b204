"""From a model to a faster one: what comes out computes the same, looks the same from outside, and is valid ONNX."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path

import models
import numpy as np
import onnx
import onnx.checker
import pytest
from models import Arrays, model
from numpy.typing import NDArray
from onnx import ModelProto
from searching import FormulaBackend, database, rule

import taso
from taso.backends.base import Backend
from taso.backends.lowering import Lowering
from taso.backends.select import get_backend
from taso.graph.errors import TasoError
from taso.search import optimize as search
from taso.search.backtracking import Limits
from taso.search.optimize import Settings
from taso.search.verify import NaNWarning

ROOT = Path(__file__).parents[1]
TOLERANCE = 1e-4


class Unmeasured(FormulaBackend):
    """Lowers as the default backend does, with costs by a formula instead of measurements."""

    def __init__(self) -> None:
        super().__init__()
        self.lowering: Lowering = get_backend("auto").lowering

    def device_key(self) -> str:
        return "formula for the default backend"


def outside(proto: ModelProto) -> tuple[list[bytes], list[bytes], dict[str, int]]:
    """All that a model says of its inputs and outputs, and its opsets; weights listed as inputs left aside."""
    weights = {t.name for t in proto.graph.initializer}
    return (
        [v.SerializeToString(deterministic=True) for v in proto.graph.input if v.name not in weights],
        [v.SerializeToString(deterministic=True) for v in proto.graph.output],
        {o.domain: o.version for o in proto.opset_import},
    )


def truth(proto: ModelProto, feeds: Arrays) -> list[NDArray[np.generic]]:
    """ONNX Runtime with its optimizations off, which refuses nodes of one name: there the reference."""
    named = [n.name for n in proto.graph.node if n.name]
    return (models.by_reference if len(set(named)) < len(named) else models.by_onnxruntime)(proto, feeds)


def assert_close(found: Sequence[NDArray[np.generic]], wanted: Sequence[NDArray[np.generic]]) -> None:
    for position, (a, b) in enumerate(zip(found, wanted, strict=True)):
        error = models.relative_error(np.asarray(a), np.asarray(b))
        assert error <= TOLERANCE, f"output {position} has a relative error of {error:.2e}"


def assert_right(proto: ModelProto, best: taso.Graph, wanted: Sequence[NDArray[np.generic]], feeds: Arrays) -> None:
    """Exports the graph: a valid model, the same from outside, with the outputs of the original."""
    after = taso.export_onnx(best)
    onnx.checker.check_model(after, full_check=True)
    assert outside(after) == outside(proto)
    if proto.ir_version < 4:
        assert {t.name for t in after.graph.initializer} <= {v.name for v in after.graph.input}
    assert_close(truth(after, feeds), wanted)


# ── the small models for known faults ────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("backend", ["default", "formula"])
@pytest.mark.parametrize("name", models.case_names())
def test_every_case_comes_through_optimize_and_export_with_the_right_answer(name: str, backend: str) -> None:
    proto = models.case(name)
    feeds = models.random_feeds(proto)
    before = proto.SerializeToString(deterministic=True)
    if backend == "default":
        best = taso.optimize(proto)
    else:
        best = taso.optimize(proto, 1.1, backend=FormulaBackend(), never_slower=False, verify=False)
    assert proto.SerializeToString(deterministic=True) == before
    wanted = truth(proto, feeds)
    assert_right(proto, best, wanted, feeds)
    outputs = taso.compile(best)(feeds)
    assert_close([outputs[v.name] for v in proto.graph.output], wanted)


def opted_out(name: str) -> bool:
    """Tests of onnx whose data its own reference does not reproduce: random ones, and Scan 8, which it lacks."""
    return any(word in name for word in ("bernoulli", "dropout", "random", "multinomial", "test_scan_sum"))


PARTS = 4


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_every_node_test_of_onnx_comes_through_optimize(part: int) -> None:
    optimized, wrong = 0, dict[str, str]()
    for name, test in list(models.node_tests().items())[part::PARTS]:
        try:
            graph = taso.load(test.model)
        except TasoError:
            continue
        try:
            best = taso.optimize(graph, 1.1, 5, backend=FormulaBackend(), never_slower=False, verify=False)
            if best.report.changed and not opted_out(name):
                optimized += 1
                _compare_with_data(test.model, taso.export_onnx(best), test.data_sets[0][0])
        except Exception as error:  # each one is told with the test's name
            wrong[name] = f"{type(error).__name__}: {error}"
    assert wrong == {}
    assert optimized > 100 / PARTS


def _compare_with_data(before: ModelProto, after: ModelProto, inputs: Sequence[object]) -> None:
    feeds = {v.name: a for v, a in zip(before.graph.input, inputs, strict=False)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        wanted, found = (models.by_reference(p, feeds) for p in (before, after))  # type: ignore[arg-type]  # arrays
    assert_close(_flat(found), _flat(wanted))


def _flat(results: Sequence[object]) -> list[NDArray[np.generic]]:
    """The tensors among outputs, those in sequences too."""
    return [np.asarray(a) for r in results for a in (r if isinstance(r, list) else [r])]


# ── the light models of onnx ─────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.slow
@pytest.mark.parametrize("name", models.LIGHT)
def test_a_light_model_comes_through_load_optimize_export_and_our_executor(name: str) -> None:
    proto = models.seeded_light(name)
    feeds = models.random_feeds(proto)
    wanted = truth(proto, feeds)
    graph = taso.load(proto)
    best = taso.optimize(graph, 1.05, 15, backend=Unmeasured(), never_slower=False, verify=False, time_limit=20)
    assert best.report.changed or name == "zfnet512"
    assert_right(proto, best, wanted, feeds)
    outputs = taso.compile(best)(feeds)
    assert_close([outputs[v.name] for v in proto.graph.output], wanted)


@pytest.mark.slow
def test_a_light_model_comes_through_with_the_default_settings() -> None:
    proto = models.seeded_light("squeezenet")
    feeds = models.random_feeds(proto)
    best = taso.optimize(proto, time_limit=6)
    report = best.report
    assert report.verified is not False, report.verification
    assert report.measured_before is not None or not report.changed
    assert not report.changed or (report.ratio_low or 0) > 1.0
    assert_right(proto, best, truth(proto, feeds), feeds)


CORRUPTED = {
    "squeezenet": "Conv(x, w, b, pads=p, strides=s) => Conv(x, w, pads=p, strides=s)",
    "resnet50": "BatchNormalization(x, scale, bias, mean, var, epsilon=e) => Mul(x, Reshape(scale, shape=(-1, 1, 1)))",
    "shufflenet": "Reshape(Transpose(Reshape(x, shape=s), perm=p), shape=t) => x\n where shape(x) == t",
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", CORRUPTED)
def test_a_corrupted_rewrite_of_a_light_model_fails_the_check_and_is_not_taken(name: str) -> None:
    proto = models.seeded_light(name)
    feeds = models.random_feeds(proto)
    graph = taso.load(proto)
    settings = Settings(FormulaBackend(), [rule(CORRUPTED[name])], database(), never_slower=False)
    settings.limits, settings.verify = Limits(budget=2), False
    spoiled, _ = search.optimize(graph, settings)
    assert spoiled is not graph and isinstance(spoiled, taso.Graph)
    with pytest.raises(AssertionError, match="relative error"):
        assert_right(proto, spoiled, truth(proto, feeds), feeds)
    settings.verify = True
    returned, report = search.optimize(graph, settings)
    assert returned is graph and report.verified is False and "differs" in report.verification


# ── what may be given, and that it stays as it is ────────────────────────────────────────────────────────────────

BRANCHES = """branches (float[N, 4, 6, 6] image) => (float[N, 4, 6, 6] merged)
{
    same = Identity (image)
    left = Relu (same)
    right = Sigmoid (image)
    merged = Add (left, right)
}"""


def test_a_model_may_be_a_path_bytes_a_proto_or_a_graph(tmp_path: Path, formula_backend: FormulaBackend) -> None:
    proto = model(BRANCHES)
    path = tmp_path / "model.onnx"
    onnx.save(proto, path)
    given = [str(path), path, path.read_bytes(), proto, taso.load(proto)]
    results = [taso.optimize(g, backend=formula_backend, never_slower=False) for g in given]
    assert all(r.report.changed for r in results)
    assert len({taso.export_onnx(r).SerializeToString(deterministic=True) for r in results}) == 1


@pytest.mark.parametrize("name", ["conv_used_twice_bn", "if_outer_scope", "dup_output"])
def test_the_graph_that_was_given_is_unchanged_and_can_be_optimized_again(name: str) -> None:
    graph = taso.load(models.case(name))
    before = taso.export_onnx(graph).SerializeToString(deterministic=True)
    results = []
    for _ in range(2):
        best = taso.optimize(graph, backend=FormulaBackend(), never_slower=False)
        results.append(taso.export_onnx(best).SerializeToString(deterministic=True))
        assert taso.export_onnx(graph).SerializeToString(deterministic=True) == before
    assert results[0] == results[1]


@pytest.mark.parametrize("budget", [0, 10])
def test_building_on_the_result_leaves_the_graph_that_was_given_alone(budget: int) -> None:
    for redundant in (True, False):
        graph = taso.new_graph()
        x = graph.new_input(dims=(2, 3))
        graph.relu(graph.identity(x) if redundant else x)
        before = taso.export_onnx(graph).SerializeToString(deterministic=True)
        best = graph.optimize(budget=budget)
        best.add(best.outputs[0][1], best.new_input(dims=(2, 3)))
        assert taso.export_onnx(graph).SerializeToString(deterministic=True) == before


def test_what_was_optimized_can_be_optimized_saved_loaded_and_run_again(tmp_path: Path) -> None:
    proto = model(BRANCHES)
    feeds = models.random_feeds(proto, symbols={"N": 3})
    best = taso.optimize(proto, backend=FormulaBackend(), never_slower=False)
    again = taso.optimize(best, backend=FormulaBackend(), never_slower=False)
    assert not again.report.changed
    taso.save(again, tmp_path / "out.onnx")
    outputs = taso.compile(tmp_path / "out.onnx")(feeds)
    assert_close([outputs["merged"]], truth(proto, feeds))


def test_symbolic_dimensions_stay_symbols_and_may_change_between_calls() -> None:
    proto = model(BRANCHES)
    best = taso.optimize(proto, backend=FormulaBackend(), never_slower=False, input_shapes={"image": (5, 4, 6, 6)})
    assert best.report.changed and any("N=5" in m for m in best.report.messages)
    after = taso.export_onnx(best)
    assert outside(after) == outside(proto)
    program = taso.compile(best)
    for size in (1, 5, 2):
        feeds = models.random_feeds(proto, seed=size, symbols={"N": size})
        wanted = truth(proto, feeds)
        assert_close(truth(after, feeds), wanted)
        assert_close([program(feeds)["merged"]], wanted)


def test_a_graph_built_by_hand_is_optimized_and_told_of() -> None:
    graph = taso.new_graph()
    x = graph.new_input(dims=(1, 16, 8, 8))
    y = graph.conv2d(input=x, weight=graph.new_weight(dims=(16, 16, 3, 3)), strides=(1, 1), padding="SAME")
    graph.relu(graph.add(graph.identity(y), x))
    best = graph.optimize(alpha=1.05, budget=10)
    assert isinstance(best, taso.Graph) and best.report.decision
    assert str(best.report).splitlines()[0] == best.report.decision
    assert graph.cost() > 0 and graph.run_time(seconds=0.05) > 0


def test_outputs_that_are_two_and_one_feeds_the_other_are_both_kept() -> None:
    proto = model("""g (float[1, 4, 6, 6] x) => (float[1, 8, 4, 4] a, float[1, 8, 4, 4] b) {
        w = Constant <value = float[1] {0.5}> () s = Constant <value = int64[4] {8, 4, 3, 3}> ()
        k = Expand (w, s) a = Conv (x, k) c = Identity (a) b = Relu (c) }""")
    feeds = models.random_feeds(proto)
    best = taso.optimize(proto, backend=FormulaBackend(), never_slower=False)
    assert best.report.changed
    assert_right(proto, best, truth(proto, feeds), feeds)


# ── bad input ────────────────────────────────────────────────────────────────────────────────────────────────────


def one_sentence(error: BaseException) -> str:
    text = str(error)
    assert text and "\n" not in text and len(text) < 400
    return text


@pytest.mark.parametrize("kind", ["missing", "empty", "garbage", "truncated", "a folder", "text"])
def test_a_file_that_is_no_model_is_one_sentence_that_names_it(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.onnx"
    whole = models.case("asym_pads_conv").SerializeToString()
    content = {
        "empty": b"", "garbage": np.random.default_rng(1).bytes(500), "truncated": whole[: len(whole) // 2],
        "text": b"this is not a model\n",
    }  # fmt: skip
    if kind == "a folder":
        path.mkdir()
    elif kind != "missing":
        path.write_bytes(content[kind])
    for call in (taso.load, taso.optimize, taso.compile):
        with pytest.raises(TasoError) as caught:
            call(path)
        assert "bad.onnx" in one_sentence(caught.value)


@pytest.mark.parametrize("given", [None, 3, [], {"a": 1}, np.zeros(3), ModelProto(), b"", b"no model"])
def test_what_is_no_model_at_all_is_one_sentence(given: object) -> None:
    for call in (taso.load, taso.optimize, taso.compile):
        with pytest.raises(TasoError) as caught:
            call(given)  # type: ignore[operator]  # wrong on purpose
        one_sentence(caught.value)


@pytest.mark.parametrize(
    "feeds, words",
    [
        ({}, ["image", "missing"]),
        ({"image": np.zeros((2, 4, 6, 5), np.float32)}, ["image", "2×4×6×5"]),
        ({"image": np.zeros((4, 6, 6), np.float32)}, ["image", "4×6×6"]),
        ({"image": np.zeros((2, 4, 6, 6), np.float64)}, ["image", "float64"]),
        ({"image": "a picture"}, ["image"]),
        ({"image": np.zeros((2, 4, 6, 6), np.float32), "more": np.zeros(1)}, ["more"]),
    ],
)
@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_wrong_values_at_run_time_are_one_sentence_that_names_the_input(
    feeds: Arrays, words: list[str], backend: str
) -> None:
    program = taso.compile(model(BRANCHES), backend)
    with pytest.raises(TasoError) as caught:
        program(feeds)
    assert all(word in one_sentence(caught.value) for word in words)


@pytest.mark.parametrize("content", [b"garbage" * 40, b"", b"\x00" * 64])
def test_a_rule_file_that_is_garbage_is_one_sentence(content: bytes, tmp_path: Path) -> None:
    for name in ("bad.pb", "bad.rules"):
        (tmp_path / name).write_bytes(content)
        if name == "bad.rules" and not content:
            continue
        with pytest.raises(TasoError) as caught:
            taso.optimize(model(BRANCHES), rules=tmp_path / name)
        assert name in one_sentence(caught.value)


def test_saving_where_nothing_can_be_written_leaves_nothing_behind(tmp_path: Path) -> None:
    graph = taso.load(model(BRANCHES))
    with pytest.raises(TasoError) as caught:
        taso.save(graph, tmp_path / "nowhere" / "out.onnx")
    assert "out.onnx" in one_sentence(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_an_unknown_backend_is_one_sentence_that_names_those_that_there_are() -> None:
    with pytest.raises(TasoError, match="onednn.*reference") as caught:
        taso.optimize(model(BRANCHES), backend="abacus")
    one_sentence(caught.value)


def test_weights_that_are_nan_come_through_with_one_warning() -> None:
    proto = model("""g (float[2, 3] x) => (float[2, 3] bad, float[2, 3] good) <float[3] w = {1, 2, 3}> {
        y = Identity (x) bad = Mul (y, w) good = Tanh (y) }""")
    values = np.array([1, np.nan, 3], np.float32)
    proto.graph.initializer[0].CopyFrom(onnx.numpy_helper.from_array(values, "w"))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        best = taso.optimize(proto, backend=FormulaBackend(), never_slower=False)
    assert [w.category for w in caught] == [NaNWarning]
    feeds = models.random_feeds(proto)
    assert best.report.changed
    assert_right(proto, best, truth(proto, feeds), feeds)


def test_a_custom_operator_stays_and_what_is_around_it_is_optimized(formula_backend: Backend) -> None:
    proto = model(
        """g (float[2, 3] x) => (float[2, 3] y) <float[2, 3] b> {
        a = Identity (x) t = Tanh (a) b = my.domain.Secret (t) c = Identity (b) y = Relu (c) }""",
        domains={"my.domain": 1},
    )
    best = taso.optimize(proto, backend=formula_backend, never_slower=False)
    assert best.report.changed, best.report.decision
    after = taso.export_onnx(best)
    assert [n.op_type for n in after.graph.node] == ["Tanh", "Secret", "Relu"]
    assert outside(after) == outside(proto)


# ── what a process takes ─────────────────────────────────────────────────────────────────────────────────────────

HEAVY = (
    "onnxruntime", "cupy", "z3", "torch", "tensorflow", "scipy", "rich", "pandas", "matplotlib", "hypothesis",
    "highspy",
)  # fmt: skip
IMPORT = """
import sys, time
import numpy
started = time.perf_counter()
import taso
print(f"{time.perf_counter() - started:.3f}", *sorted({m.split(".")[0] for m in sys.modules}))
"""


def test_importing_taso_loads_nothing_heavy() -> None:
    done = subprocess.run([sys.executable, "-c", IMPORT], capture_output=True, text=True, check=True, cwd=ROOT)
    seconds, *loaded = done.stdout.split()
    print(f"import taso: {seconds} s beyond numpy")
    assert "taso" in loaded and set(HEAVY) & set(loaded) == set()


MEMORY = """
import json, sys
import taso
best = taso.optimize(taso.load(sys.argv[1]), time_limit=3)
# what getrusage says of a new process begins with what its parent took
(line,) = [s for s in open("/proc/self/status") if s.startswith("VmHWM")]
peak = int(line.split()[1]) * 1024
print(json.dumps({"peak": peak, "verified": best.report.verified}))
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="told by Linux only")
def test_load_and_optimize_take_less_than_three_times_the_model_and_500_megabytes(tmp_path: Path) -> None:
    path = tmp_path / "vgg19.onnx"
    path.write_bytes(models.seeded_light("vgg19").SerializeToString())
    done = subprocess.run(
        [sys.executable, "-c", MEMORY, str(path)], capture_output=True, text=True, check=True, cwd=ROOT, env=os.environ
    )
    told = json.loads(done.stdout)
    size = path.stat().st_size
    path.unlink()
    assert size > 500e6 and told["verified"] is not False
    print(f"peak of {told['peak'] / 1e6:.0f} MB for a model of {size / 1e6:.0f} MB")
    assert told["peak"] < 3 * size + 500e6
