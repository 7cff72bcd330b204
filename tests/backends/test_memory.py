"""Weights are never in memory more than once: read from the mapped file, laid out for a backend, measured, saved."""

from __future__ import annotations

import gc
import importlib.util
import json
import os
import subprocess
import sys
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import taso
from taso.backends.constants import LAID_OUT
from taso.backends.lowering import PLAIN, Kernel, Operand, Step
from taso.backends.onednn.backend import OneDNNBackend
from taso.backends.onednn.memory import Memory
from taso.backends.onednn.places import Block
from taso.graph import onnx_import
from taso.graph.errors import BackendUnavailable
from taso.graph.evaluate import constant_value, weight_of
from taso.graph.graph import Graph, Value
from taso.graph.operator import Attrs
from taso.graph.ops.linear import MATMUL
from taso.graph.types import DType, TensorType

pytestmark = pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="reads Linux's account of memory")

ROOT = Path(__file__).resolve().parents[2]
WIDTH = 1024
MEGABYTES = 320
BESIDE = 160
"""MB that the way may take beside the weights and what the interpreter holds: half of what they are."""


def _has_onednn() -> bool:
    try:
        OneDNNBackend()
    except BackendUnavailable:
        return False
    return True


needs_onednn = pytest.mark.skipif(not _has_onednn(), reason="oneDNN does not load here")

# ── a model on its whole way ─────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def benchmark() -> ModuleType:
    spec = importlib.util.spec_from_file_location("large_model", ROOT / "benchmarks" / "large_model.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def sent_through(benchmark: ModuleType, folder: Path, backend: str, single_file: bool) -> dict[str, object]:
    """What the benchmark says of its process: peaks of each step, and of all."""
    source = benchmark.build(folder, MEGABYTES / 1024, WIDTH, single_file)
    command = [
        sys.executable, str(ROOT / "benchmarks" / "large_model.py"), "--backend", backend, "--budget", "1",
        "--width", str(WIDTH), "--worker", str(source), str(folder / "best.onnx"),
        *(["--single-file"] if single_file else []),
    ]  # fmt: skip
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TASO_CACHE_DIR": str(folder / "cache")}
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment)
    found: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.slow
@pytest.mark.parametrize("single_file", [False, True], ids=["external", "single"])
@pytest.mark.parametrize("backend", ["reference", pytest.param("onednn", marks=needs_onednn)])
def test_a_model_goes_through_with_its_weights_resident_once(
    benchmark: ModuleType, tmp_path: Path, backend: str, single_file: bool
) -> None:
    found = sent_through(benchmark, tmp_path, backend, single_file)
    started, peak = found["started with"], found["VmHWM"]
    assert isinstance(started, float) and isinstance(peak, float)
    assert peak - started < MEGABYTES + BESIDE
    ran = found["compile and run the best graph"]
    assert isinstance(ran, dict)
    if backend == "onednn":
        assert ran["VmRSS"] - started > MEGABYTES, "the program holds them, or this says nothing"
    else:
        assert ran["VmRSS"] - started < BESIDE, "the reference reads weight by weight"


# ── pages of a mapped file ───────────────────────────────────────────────────────────────────────────────────────


def resident(path: Path) -> int:
    """Bytes of a mapped file that this process has resident."""
    total, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split(" ", 1)[0] and ":" not in line.split(" ", 1)[0]:
            inside = line.endswith(str(path))
        elif inside and line.startswith("Rss:"):
            total += int(line.split()[1]) << 10
    return total


SIZE = 1 << 22


@pytest.fixture(params=["external", "single"])
def stored(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The path of a model with an initializer and a Constant of `SIZE` bytes; beside it, or in it, its bytes."""
    monkeypatch.setattr(onnx_import, "MAPPED", 1)
    w, c = (np.full((1024, 1024), v, np.float32) for v in (0.5, 0.25))
    x, y = (helper.make_tensor_value_info(n, TensorProto.FLOAT, [2, 1024]) for n in "xy")
    nodes = [
        helper.make_node("Constant", [], ["c"], value=numpy_helper.from_array(c, "c")),
        helper.make_node("MatMul", ["x", "w"], ["m"]), helper.make_node("MatMul", ["m", "c"], ["y"]),
    ]  # fmt: skip
    graph = helper.make_graph(nodes, "g", [x], [y], [numpy_helper.from_array(w, "w")])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    external = request.param == "external"
    onnx.save(model, tmp_path / "m.onnx", save_as_external_data=external, location="m.bin", convert_attribute=True)
    yield tmp_path / "m.onnx"


def bytes_file(path: Path) -> Path:
    return path.with_suffix(".bin") if path.with_suffix(".bin").exists() else path


def constants(graph: Graph) -> list[Value]:
    found = [n.output for n in graph.nodes if n.op.name == "Weight"]
    assert [v.type.nbytes for v in found] == [SIZE, SIZE]
    return found


SLACK = 1 << 17
"""Bytes at the ends of weights, and what the system reads around them."""


def test_pages_of_a_weight_are_dropped_once_nothing_reads_them(stored: Path) -> None:
    graph = taso.load(stored)
    file = bytes_file(stored)
    assert resident(file) <= SLACK
    first, second = (constant_value(v) for v in constants(graph))
    view = first.reshape(-1)[10:]
    assert float(first.sum()) == 2**19 and float(second.sum()) == 2**18
    assert resident(file) >= 2 * SIZE - SLACK
    del first
    assert resident(file) >= 2 * SIZE - SLACK, "a view still reads them"
    del view
    assert resident(file) <= SIZE + SLACK
    del second
    assert resident(file) <= SLACK
    assert float(constant_value(constants(graph)[0]).sum()) == 2**19, "they come again from the file"


def test_evaluating_and_saving_leave_no_pages_behind(stored: Path) -> None:
    graph = taso.load(stored)
    file = bytes_file(stored)
    x = np.ones((2, 1024), np.float32)
    for _ in range(2):
        (y,) = taso.compile(graph, backend="reference")({"x": x}).values()
        assert np.all(y == 2.0**17)
        assert resident(file) <= SLACK
    for number, outside in enumerate((False, True)):
        taso.save(graph, stored.parent / f"again{number}.onnx", external_data=outside)
        assert resident(file) <= SLACK
        assert taso.load(stored.parent / f"again{number}.onnx")


@needs_onednn
def test_a_compiled_program_has_its_weights_laid_out_or_in_the_file_not_both(stored: Path) -> None:
    graph = taso.load(stored)
    file = bytes_file(stored)
    program = taso.compile(graph, backend="onednn")
    x = np.ones((2, 1024), np.float32)
    (y,) = program({"x": x}).values()
    assert np.all(y == 2.0**17)
    laid_out = sum(b.owner.desc.size for b in _blocks() if isinstance(b.owner, Memory))
    assert laid_out + resident(file) <= 2 * SIZE + SLACK


def _blocks() -> list[Block]:
    return list(LAID_OUT.values())


@needs_onednn
def test_a_weight_that_a_kernel_reads_as_it_is_is_read_from_the_file(stored: Path) -> None:
    proto = onnx.load(stored)
    proto.graph.node[1].CopyFrom(helper.make_node("Add", ["x", "w"], ["m"]))
    proto.graph.input[0].type.tensor_type.shape.dim[0].dim_value = 1
    proto.graph.output[0].type.tensor_type.shape.dim[0].dim_value = 1024
    path = stored.parent / "added.onnx"
    # in a file of its own it begins where numbers may begin
    onnx.save(proto, path, save_as_external_data=True, location="added.bin", convert_attribute=True)
    graph = taso.load(path)
    before = _blocks()
    program = taso.compile(graph, backend="onednn")
    blocks = [b for b in _blocks() if b not in before]
    weight = next(weight_of(v) for v in constants(graph) if weight_of(v).name == "w")
    array = weight.array()
    assert array.ctypes.data in [b.address for b in blocks]
    x = np.ones((1, 1024), np.float32)
    (y,) = program({"x": x}).values()
    assert np.all(y == 1.5 * 1024 * 0.25)


# ── measuring ────────────────────────────────────────────────────────────────────────────────────────────────────


@needs_onednn
def test_the_weights_of_a_measured_kernel_are_gone_when_it_returns() -> None:
    f = DType.FLOAT
    rows, weight = TensorType(f, (1, 1024)), TensorType(f, (1024, 1024))
    kernel = Kernel(
        (Operand(rows, PLAIN, False), Operand(weight, PLAIN, True)), (Step(MATMUL, Attrs({}), (0, 1)),),
        (Operand(rows, PLAIN, False),),
    )  # fmt: skip
    backend = OneDNNBackend()
    backend.measure(kernel)
    gc.disable()
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        backend.measure(kernel)
        after, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
        gc.enable()
    assert peak - before >= weight.nbytes, "there are some, or this says nothing"
    assert after - before < weight.nbytes / 4
