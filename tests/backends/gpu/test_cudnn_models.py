"""The models of the benchmark suite, small, on the cuDNN backend: against the operators' definitions in float64."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import numpy as np
import pytest
from hosts import gpu_missing, host_backend
from test_cudnn_executor import ON, static
from test_onednn_executor import feeds_for, worst

import taso
from taso.backends.cudnn.backend import CudnnBackend
from taso.graph.evaluate import evaluate_graph

BENCHMARKS = Path(__file__).resolve().parents[3] / "benchmarks"
NAMES = (
    "resnet50", "resnext50", "nasnet_a", "nasrnn", "bert_base", "inception_v3", "squeezenet", "vgg16", "densenet121",
    "mobilenet_v2", "efficientnet_b0", "vit_s16",
)  # fmt: skip
TOLERANCE = 1e-5
NARROW = {"tf32": 2.0**-7, "fp16": 2.0**-7, "bf16": 2.0**-4}


@pytest.fixture(autouse=True)
def benchmarks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))


def model(name: str) -> taso.Graph:
    zoo = sys.modules.get("zoo") or importlib.import_module("zoo")
    return taso.load(zoo.build(name, 1, 0, zoo.ZOO[name].small))


@pytest.mark.slow
@pytest.mark.parametrize("on", ON)
@pytest.mark.parametrize("name", NAMES)
def test_a_model_gives_what_its_definitions_say_in_one_captured_graph(name: str, on: str) -> None:
    graph = model(name)
    program = (host_backend() if on == "host" else CudnnBackend()).compile(graph)
    feeds = feeds_for(graph)
    assert worst(program(feeds), evaluate_graph(graph, feeds, wide=True)) <= TOLERANCE
    assert {how for _, how in program.operators} == {"own"}
    assert static(program).replays == 1


@pytest.mark.slow
@pytest.mark.parametrize("precision", NARROW)
@pytest.mark.parametrize("name", ["resnet50", "bert_base"])
def test_a_model_in_lower_precision_stays_within_its_error(name: str, precision: str) -> None:
    graph = model(name)
    backend = host_backend(precision) if gpu_missing() else CudnnBackend(precision)
    feeds = feeds_for(graph)
    found = backend.compile(graph)(feeds)
    assert worst(found, evaluate_graph(graph, feeds, wide=True)) <= NARROW[precision]
    assert all(np.isfinite(array).all() for array in found.values())
