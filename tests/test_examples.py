"""The example programs build the networks they say they build."""

from __future__ import annotations

import importlib
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


@pytest.mark.parametrize("name", ["resnet50", "nasrnn", "two_branch", "onnx_file"])
def test_an_example_explains_its_options(name: str) -> None:
    command = [sys.executable, str(FOLDER / f"{name}.py"), "--help"]
    shown = subprocess.run(command, capture_output=True, text=True, check=True, cwd=FOLDER.parent).stdout
    for option in ("--budget", "--alpha", "--backend", "--threads", "--time-limit"):
        assert option in shown
