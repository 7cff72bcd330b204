"""`taso show`: counts that can be checked by hand."""

from __future__ import annotations

import json
from pathlib import Path

import onnx
import onnx.parser
import pytest

import taso
from taso import cli
from taso.cli_common import DONE, FAILED
from taso.cli_summary import summary
from taso.search.optimize import measuring_sizes

TEXT = """
<ir_version: 8, opset_import: ["": 17, "mine": 1], producer_name: "a maker">
net (float[N, 2, 8, 8] x) => (float[N, 4, 4, 4] pooled, float[N, 4, 8, 8] own)
<float[4, 2, 3, 3] w = {W}>
{
    c = Conv <pads = [1, 1, 1, 1]> (x, w)
    r = Relu (c)
    pooled = MaxPool <kernel_shape = [2, 2], strides = [2, 2]> (r)
    own = mine.Thing (r)
}
""".replace("{W}", "{" + ", ".join(["0.5"] * 72) + "}")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "model.onnx"
    onnx.save(onnx.parser.parse_model(TEXT), path)
    return path


def test_operations_parameters_and_memory_are_counted(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["show", str(model), "--input", "x:3x2x8x8", "--json"]) == DONE
    said = json.loads(capsys.readouterr().out)
    operations = {k["operator"]: k["flops"] for k in said["operators"]}
    assert operations["Conv"] == 2 * (3 * 4 * 8 * 8) * (2 * 3 * 3)
    assert operations["Relu"] == 3 * 4 * 8 * 8 and operations["MaxPool"] == 3 * 4 * 4 * 4 * 4
    assert said["flops"] == sum(operations.values()) and said["uncounted"] == 1
    assert (said["parameters"], said["weights"], said["weight_bytes"]) == (72, 1, 288)
    # r and what is made of it: the pool, whose result is kept, and then the other output
    assert said["peak_bytes"] == 4 * 3 * (4 * 64 + 64 + 4 * 64)
    assert said["sizes"] == {"N": 3} and said["opsets"] == {"": 17, "mine": 1} and said["producer"] == "a maker"


def test_what_passes_through_unchanged_is_told(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["show", str(model)]) == DONE
    told = capsys.readouterr().out
    line = next(line for line in told.splitlines() if "mine.Thing" in line)
    assert "cannot be run here" in line and "modelled" in told and "float[N×2×8×8]" in told
    graph = taso.load(str(model))
    found = summary(graph, measuring_sizes(graph, {}))
    assert [kind.operator for kind in found.operators if kind.state == "unknown"] == ["mine.Thing"]


@pytest.mark.parametrize(
    "text, operator, expected",
    [
        ("float[2, 3, 4] a, float[2, 4, 5] b) => (float[2, 3, 5] y) { y = MatMul (a, b) }", "MatMul", 2 * 30 * 4),
        ("float[4, 3] a, float[4, 5] b) => (float[3, 5] y) { y = Gemm <transA = 1> (a, b) }", "Gemm", 2 * 15 * 4),
        ("float[1, 2, 3, 3] a, float[2, 4, 2, 2] b) => (float[1, 4, 4, 4] y) { y = ConvTranspose (a, b) }",
         "ConvTranspose", 2 * (2 * 9) * (4 * 4)),
        ("float[5, 2, 3] a, float[1, 16, 3] w, float[1, 16, 4] b) => (float[5, 1, 2, 4] y) "
         "{ y = LSTM <hidden_size = 4> (a, w, b) }", "LSTM", 2 * 5 * 2 * 16 * (3 + 4)),
        ("float[2, 3] a) => (float[3, 2] y) { y = Transpose (a) }", "Transpose", 0),
        ("float[2, 300] a) => (float y) { y = ReduceSum <keepdims = 0> (a) }", "ReduceSum", 600),
    ],
)  # fmt: skip
def test_arithmetic_of_an_operator(text: str, operator: str, expected: int) -> None:
    header = '<ir_version: 8, opset_import: ["": 17]> g ('
    graph = taso.load(onnx.parser.parse_model(header + text))
    found = {kind.operator: kind.flops for kind in summary(graph, {}).operators}
    assert found[operator] == expected


def test_a_size_that_does_not_fit_is_one_sentence(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["show", str(model), "--input", "x:3x2x8"]) == FAILED
    told = capsys.readouterr()
    assert told.out == "" and "dimensions" in told.err and len(told.err.splitlines()) == 1
