"""The example programs build the networks they say they build."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

import taso

FOLDER = Path(__file__).parents[1] / "examples"


@pytest.fixture(autouse=True)
def examples_importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))


def built(name: str) -> taso.Graph:
    graph = taso.new_graph()
    importlib.import_module(name).build(graph)
    return graph


@pytest.mark.parametrize(
    "name, operators, inputs, output",
    [
        ("resnet50", {"Conv": 52, "Relu": 52, "Add": 16}, [(1, 64, 56, 56)], (1, 2048, 7, 7)),
        (
            "nasrnn", {"MatMul": 80, "Add": 55, "Mul": 20, "Tanh": 40, "Sigmoid": 25, "Relu": 10}, [(1, 512)] * 5,
            (1, 512),
        ),
        ("two_branch", {"Conv": 3, "Relu": 3, "Add": 1}, [(1, 128, 56, 56)], (1, 128, 56, 56)),
        ("resnext50", {"Conv": 53, "Relu": 53, "Add": 16, "MaxPool": 1}, [(1, 3, 224, 224)], (1, 2048, 7, 7)),
        (
            "nasnet_a", {"Conv": 217, "Relu": 37, "Add": 90, "AveragePool": 36, "MaxPool": 4, "Concat": 18},
            [(1, 3, 224, 224)], (1, 5120, 7, 7),
        ),
        (
            "inception_v3", {"Conv": 94, "Relu": 94, "MaxPool": 4, "AveragePool": 10, "Concat": 15},
            [(1, 3, 299, 299)], (1, 2048, 1, 1),
        ),
        (
            "enas", {"MatMul": 54, "Sigmoid": 27, "Tanh": 9, "Relu": 9, "Identity": 3, "Add": 36, "Mul": 27, "Sub": 24},
            [(1, 512)] * 4, (1, 512),
        ),
        (
            "squeezenet", {"Conv": 26, "Relu": 26, "MaxPool": 3, "AveragePool": 1, "Concat": 8},
            [(1, 3, 224, 224)], (1, 1000, 1, 1),
        ),
    ],
)  # fmt: skip
def test_an_example_has_the_operators_and_shapes_of_its_network(
    name: str, operators: dict[str, int], inputs: list[tuple[int, ...]], output: tuple[int, ...]
) -> None:
    graph = built(name)
    assert Counter(graph.get_operator_type(op) for op in graph.get_operator_list()) == operators
    assert [v.type.static_shape for v in graph.inputs] == inputs
    assert [v.type.static_shape for _, v in graph.outputs] == [output]


def test_resnet_shrinks_three_times_and_projects_four_shortcuts() -> None:
    graph = built("resnet50")
    windows = Counter(
        (tuple(graph.get_operator_attr(op, "kernel_shape")), tuple(graph.get_operator_attr(op, "strides")))  # type: ignore[arg-type]  # both are lists
        for op in graph.get_operator_list()
        if graph.get_operator_type(op) == "Conv"
    )
    assert windows == {((1, 1), (1, 1)): 33, ((3, 3), (1, 1)): 13, ((3, 3), (2, 2)): 3, ((1, 1), (2, 2)): 3}


def test_every_attention_of_bert_is_an_output_of_the_graph() -> None:
    graph = built("bert")
    counts = Counter(graph.get_operator_type(op) for op in graph.get_operator_list())
    assert counts == {"Relu": 1, "MatMul": 48, "Reshape": 32, "Transpose": 32}
    assert [v.type.static_shape for _, v in graph.outputs] == [(64, 1024)] * 9


def test_resnext_works_in_32_groups_and_nasnet_in_one_for_each_channel() -> None:
    assert groups("resnext50") == {1: 37, 32: 16}
    assert groups("nasnet_a") == {1: 127, 128: 25, 256: 30, 512: 30, 1024: 5}


def groups(name: str) -> Counter[object]:
    graph = built(name)
    operators = graph.get_operator_list()
    return Counter(graph.get_operator_attr(op, "group") for op in operators if graph.get_operator_type(op) == "Conv")


SMALL = {
    "resnet50": {"STAGES": ((1, 8, 1), (1, 16, 2))},
    "resnext50": {"SIZE": 32, "GROUPS": 4, "STAGES": ((1, 8, 1), (1, 16, 2))},
    "nasnet_a": {"SIZE": 32, "CHANNELS": 8, "STAGES": 1, "CELLS": 2},
    "nasrnn": {"STEPS": 1, "HIDDEN": 16},
    "batched_resnet": {"CHANNELS": 16, "SIZE": 8, "BLOCKS": 1},
    "enas": {"STEPS": 1, "HIDDEN": 16, "NODES": ((0, "relu"), (0, "tanh"))},
    "bert": {"BLOCKS": 1, "TOKENS": 8, "HEADS": 2, "HIDDEN": 16},
    "inception_v3": {"SIZE": 75},
    "squeezenet": {"SIZE": 32, "CLASSES": 10},
    "two_branch": {"CHANNELS": 8, "SIZE": 8},
}
"""Settings that make each example a matter of seconds on the slowest backend."""


@pytest.mark.parametrize("name", sorted(SMALL))
def test_an_example_runs_and_tells_what_came_of_it(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    module = importlib.import_module(name)
    for setting, value in SMALL[name].items():
        monkeypatch.setattr(module, setting, value)
    options = ["--budget", "2", "--alpha", "1.01", "--backend", "reference", "--threads", "1", "--time-limit", "20"]
    monkeypatch.setattr(sys, "argv", [name, *options])
    module.main()
    report = taso.optimize(built(name), 1.01, 2, backend="reference", threads=1, verify=False).report
    assert "ms" in capsys.readouterr().out
    assert report.cost_after <= report.cost_before


def test_the_nets_of_batched_resnet_share_their_weights() -> None:
    graph = built("batched_resnet")
    weights = [edges[1] for edges in map(graph.get_input_edges, graph.get_operator_list()) if len(edges) == 2]
    convolutions = [op for op in graph.get_operator_list() if graph.get_operator_type(op) == "Conv"]
    assert (len(convolutions), len(graph.inputs), len(graph.outputs)) == (18, 2, 2)
    read = [graph.get_input_edges(op)[1]["srcOp"]["guid"] for op in convolutions]
    assert len(weights) >= 18 and len(set(read)) == 9


OPTIONS = ["--budget", "2", "--backend", "reference", "--threads", "1", "--time-limit", "20"]


def shown(name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> str:
    module = importlib.import_module(name)
    monkeypatch.setattr(sys, "argv", [name, *OPTIONS])
    module.main()
    return capsys.readouterr().out


def test_rules_of_ones_own_are_used_and_a_false_one_is_refused(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    said = shown("own_rule", capsys, monkeypatch)
    assert "MatMul(x, MatMul(a, b))" in said and "Mul(x, Mul(c, d))" in said
    assert "refused, as it should be" in said and "refuted" in said


def test_a_backend_of_ones_own_decides_by_its_own_costs(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "kernels: 4 → 3" in shown("own_backend", capsys, monkeypatch)


@pytest.mark.slow
def test_a_torch_module_runs_in_both_ways_as_in_pytorch(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("onnxscript")
    monkeypatch.setattr(importlib.import_module("torch_module"), "SIZE", 8)
    said = shown("torch_module", capsys, monkeypatch)
    found = re.findall(r"(taso|torch).compile: largest difference from PyTorch (.*)", said)
    assert [name for name, _ in found] == ["taso", "torch"]
    assert all(float(error) < 1e-5 for _, error in found)


@pytest.mark.slow
def test_dasks_workers_search_the_pieces(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("distributed")
    monkeypatch.setattr(importlib.import_module("nasrnn"), "HIDDEN", 16)
    said = shown("dask_workers", capsys, monkeypatch)
    assert re.search(r"pieces [1-9]", said) and "ms" in said


NEEDING = {"torch_module": "torch", "dask_workers": "distributed"}


@pytest.mark.parametrize("name", sorted(NEEDING))
def test_an_example_says_what_it_needs(name: str, tmp_path: Path) -> None:
    (tmp_path / f"{NEEDING[name]}.py").write_text("raise ImportError('blocked')")
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path[:0] = [{str(tmp_path)!r}, {str(FOLDER)!r}]; import {name} as e; "
         f"sys.argv = ['e']; e.main()"], capture_output=True, text=True, check=False, cwd=FOLDER.parent,
    )  # fmt: skip
    assert done.returncode == 1
    assert re.fullmatch(r"error: this example needs .*: pip install 'taso\[\w+\]' .*\n", done.stderr)


def test_every_example_is_tested() -> None:
    named = {path.stem for path in FOLDER.glob("*.py")}
    assert named == {*SMALL, *NEEDING, "common", "onnx_file", "own_rule", "own_backend"}


OTHERS = ("onnx_file", "own_rule", "own_backend", "dask_workers", "torch_module")


@pytest.mark.parametrize("name", [*sorted(SMALL), *OTHERS])
def test_an_example_explains_its_options(name: str) -> None:
    command = [sys.executable, str(FOLDER / f"{name}.py"), "--help"]
    shown = subprocess.run(command, capture_output=True, text=True, check=True, cwd=FOLDER.parent).stdout
    for option in ("--budget", "--alpha", "--backend", "--threads", "--time-limit"):
        assert option in shown
