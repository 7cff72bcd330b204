"""The benchmark of machine code: its layers, the kernels that it measures, and what it says of them."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from test_onednn_executor import feeds_for

from taso.backends.lowering import lower
from taso.backends.onednn.coded import isa_here
from taso.backends.onednn.library import library
from taso.graph.errors import BackendUnavailable
from taso.graph.evaluate import evaluate_graph

SCRIPT = Path(__file__).resolve().parents[1] / "benchmarks" / "machine_code.py"

try:
    library()
    _MISSING = ""
except BackendUnavailable as error:
    _MISSING = str(error)
else:
    from taso.backends.onednn.backend import OneDNNBackend

pytestmark = pytest.mark.skipif(bool(_MISSING), reason=_MISSING or "oneDNN loads")


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("machine_code_benchmark", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # dataclasses look up their module
    monkeypatch.setitem(sys.modules, "machine_code_benchmark", module)
    spec.loader.exec_module(module)
    return module


def small(benchmark: ModuleType) -> list[object]:
    """Layers of all its kinds that take no time."""
    layer = benchmark.Layer
    return [
        layer("product", (16, 32), 48), layer("pointwise", (1, 32, 6, 6), 32), layer("3×3", (1, 32, 14, 14), 32, 3),
        layer("depthwise", (1, 32, 9, 9), 32, 3, 1, 32), layer("strided", (1, 32, 9, 9), 32, 5, 2, 32),
        layer("in groups", (1, 32, 9, 9), 32, 3, 1, 8),
    ]  # fmt: skip


def test_operations_are_those_of_the_direct_way(benchmark: ModuleType) -> None:
    """Counted as the products and sums of the layer's definition: two for each weight that each result sees."""
    for layer in (*small(benchmark), *benchmark.LAYERS):
        graph = layer.graph()
        (result,) = [value.type.static_shape for node in graph.operators for value in node.outputs]
        weight = next(v.type.static_shape for node in graph.operators for v in node.inputs if v.node.constant)
        inner = weight[0] if len(result) == 2 else int(np.prod(weight[1:]))
        assert layer.operations == 2 * int(np.prod(result)) * inner


def test_the_layers_run_and_are_as_large_as_they_say(benchmark: ModuleType) -> None:
    for layer in small(benchmark):
        graph = layer.graph()
        found = evaluate_graph(graph, feeds_for(graph))
        assert all(np.isfinite(array).all() for array in found.values())
    assert {len(layer.data) for layer in benchmark.LAYERS} == {2, 4}
    assert {layer.taps for layer in benchmark.LAYERS} >= {1, 3, 5, 7}


def test_every_algorithm_of_a_layer_is_measured_in_layouts_that_have_it(benchmark: ModuleType) -> None:
    backend = OneDNNBackend(1)
    seen = set()
    for layer in small(benchmark):
        usual, *others = found = list(benchmark.by_algorithm(layer, backend))
        assert usual[0] == "" and len(usual[1]) == (1 if len(layer.data) == 2 else 2)
        for name, kernels in found:
            seen.add(name)
            for kernel in kernels:
                assert kernel.algorithm == name
                assert not name or name in backend.lowering.algorithms(replace(kernel, algorithm=""))
        if isa_here() is not None:
            assert others, "each layer is one that machine code computes"
    if isa_here() is not None:
        assert seen >= {"", "panels", "channelwise", "direct", "winograd 2x2"}


def test_the_layers_that_come_with_it_are_each_computed_in_several_ways(benchmark: ModuleType) -> None:
    if isa_here() is None:
        pytest.skip("no machine code runs here")
    backend = OneDNNBackend(1)
    for layer in benchmark.LAYERS:
        assert len(list(benchmark.by_algorithm(layer, backend))) > 1
        assert len(lower(layer.graph(), backend.lowering).jobs) == 1


def test_it_says_a_line_for_every_algorithm(
    benchmark: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    layers = small(benchmark)[2:4]
    monkeypatch.setattr(benchmark, "LAYERS", layers)
    monkeypatch.setattr(benchmark, "SERIES", 1)
    monkeypatch.setattr(sys, "argv", ["machine_code.py", "--threads", "1"])
    # what is counted: how long a kernel takes is told by others
    monkeypatch.setattr(OneDNNBackend, "measure", lambda self, kernel: 2e-6 if kernel.algorithm else 1e-6)
    benchmark.main()
    first, *lines = capsys.readouterr().out.splitlines()
    assert first == OneDNNBackend(1).device_key()
    said = [line for line in lines if "GFLOP/s" in line]
    backend = OneDNNBackend(1)
    names = [(layer, name or "primitive") for layer in layers for name, _ in benchmark.by_algorithm(layer, backend)]
    assert len(said) == len(names)
    for line, (layer, name) in zip(said, names, strict=True):
        seconds = 1e-6 if name == "primitive" else 2e-6
        assert line.split() == [
            *name.split(), f"{seconds * 1e6:.1f}", "µs", f"{layer.operations / seconds / 1e9:.1f}", "GFLOP/s",
        ]  # fmt: skip
    assert sum("depthwise" in line for line in lines) == 1


def test_it_explains_itself() -> None:
    ran = subprocess.run([sys.executable, str(SCRIPT), "--help"], capture_output=True, text=True)
    assert ran.returncode == 0 and "--threads" in ran.stdout and "machine code" in ran.stdout
