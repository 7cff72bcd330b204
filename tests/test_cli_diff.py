"""`taso diff`: differences that are there are told, and the exit status says whether two models compute the same."""

from __future__ import annotations

import json
from pathlib import Path

import onnx
import onnx.parser
import pytest

from taso import cli
from taso.cli_common import DONE, FAILED, TROUBLE

TEXT = """
<ir_version: 8, opset_import: ["": 17]>
net (float[N, 3] x) => (float[N, 3] y)
<float[3] w = {1.0, 2.0, 3.0}>
{ z = Mul (x, w) y = LeakyRelu <alpha = 0.1> (z) }
"""


def diff(tmp_path: Path, before: str, after: str, *more: str) -> int:
    paths = []
    for name, text in (("a.onnx", before), ("b.onnx", after)):
        onnx.save(onnx.parser.parse_model(text), tmp_path / name)
        paths.append(str(tmp_path / name))
    return cli.main(["diff", *paths, *more])


def found(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], before: str, after: str, *more: str
) -> tuple[int, dict[str, object]]:
    status = diff(tmp_path, before, after, "--json", *more)
    said: dict[str, object] = json.loads(capsys.readouterr().out)
    assert said["same"] == (status == DONE)
    return status, said


def test_a_model_is_the_same_as_itself(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert diff(tmp_path, TEXT, TEXT) == DONE
    told = capsys.readouterr().out
    assert "the same operators and weights" in told and "agree" in told


def test_an_operator_more_is_told_and_is_no_failure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    after = TEXT.replace("y = LeakyRelu <alpha = 0.1> (z)", "u = LeakyRelu <alpha = 0.1> (z) v = Neg (u) y = Neg (v)")
    status, said = found(tmp_path, capsys, TEXT, after)
    assert status == DONE and said["operators"] == {"Neg": [0, 2]} and said["compared"] is True
    assert said["nodes"] == ["'y': LeakyRelu → Neg"]
    assert diff(tmp_path, TEXT, after) == DONE
    assert "+2" in capsys.readouterr().out


@pytest.mark.parametrize(
    "old, new, key, said",
    [
        ("alpha = 0.1", "alpha = 0.2", "nodes", ["'y' (LeakyRelu): alpha 0.1 → 0.2"]),
        ("2.0, 3.0", "2.0, 3.5", "weights_changed", ["w"]),
    ],
)  # fmt: skip
def test_other_outputs_are_status_1_and_the_cause_is_named(
    old: str, new: str, key: str, said: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, report = found(tmp_path, capsys, TEXT, TEXT.replace(old, new))
    assert status == FAILED and report["compared"] is False and report[key] == said
    error = report["relative_error"]
    assert isinstance(error, float) and error > 1e-3


def test_the_tolerance_decides(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    after = TEXT.replace("2.0, 3.0", "2.0, 3.0001")
    assert diff(tmp_path, TEXT, after, "--tolerance", "1e-2") == DONE
    assert diff(tmp_path, TEXT, after, "--tolerance", "1e-7") == FAILED
    assert "where 1e-07 is allowed" in capsys.readouterr().out


@pytest.mark.parametrize(
    "old, new, said",
    [
        ("=> (float[N, 3] y)", "=> (float[N, 3] y, float[N, 3] z)", "output 'z' is new"),
        ("float[N, 3] x", "float[2, 3] x", "input 'x': float[N×3] → float[2×3]"),
        ("net (float[N, 3] x)", "net (float[N, 3] x, float[1] spare)", "input 'spare' is new"),
    ],
)
def test_another_interface_is_status_1(
    old: str, new: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, report = found(tmp_path, capsys, TEXT, TEXT.replace(old, new), "--input", "x:2x3")
    assert status == FAILED and report["interface"] == [said]


def test_the_name_of_an_open_dimension_is_no_difference(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, report = found(tmp_path, capsys, TEXT, TEXT.replace("[N", "[batch"))
    assert status == DONE and report["interface"] == []


def test_inputs_in_another_order_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    two = TEXT.replace("(float[N, 3] x)", "(float[N, 3] x, float[1] s)").replace("Mul (x, w)", "Mul (x, s)")
    turned = two.replace("float[N, 3] x, float[1] s", "float[1] s, float[N, 3] x")
    status, report = found(tmp_path, capsys, two, turned)
    assert status == FAILED and report["interface"] == ["the inputs come in another order: x, s → s, x"]
    assert report["compared"] is True


def test_another_opset_is_told_and_is_no_failure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, report = found(tmp_path, capsys, TEXT, TEXT.replace('"": 17', '"": 16'))
    assert status == DONE and report["header"] == ["opset of ai.onnx: 17 → 16"]


def test_custom_operators_are_compared_around(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    custom = TEXT.replace('"": 17', '"": 17, "mine": 1').replace("LeakyRelu <alpha = 0.1>", "mine.Thing")
    assert found(tmp_path, capsys, custom, custom)[0] == DONE
    changed = custom.replace("2.0, 3.0", "2.0, 4.0")
    assert found(tmp_path, capsys, custom, changed)[0] == FAILED


def test_a_custom_operator_with_another_attribute_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    custom = TEXT.replace('"": 17', '"": 17, "mine": 1').replace("LeakyRelu <alpha = 0.1>", "mine.Thing <a = 1>")
    status, report = found(tmp_path, capsys, custom, custom.replace("a = 1", "a = 2"))
    # the outside of the two is the same, and nothing here can run what differs
    assert status == TROUBLE and report["nodes"] == ["'y' (mine.Thing): its attributes, or its bodies, differ"]


def test_what_cannot_be_compared_has_a_status_of_its_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    open_rank = """
    <ir_version: 8, opset_import: ["": 17]>
    net (seq(float[2]) x) => (int64 y) { y = SequenceLength (x) }
    """
    status, report = found(tmp_path, capsys, open_rank, open_rank)
    assert status == TROUBLE and report["reason"]
    assert found(tmp_path, capsys, open_rank, open_rank, "--no-run")[0] == DONE


def test_an_output_that_is_constant_does_not_make_a_model_another_than_itself(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    constant = TEXT.replace("y = LeakyRelu <alpha = 0.1> (z)", "s = Sub (z, z) y = Relu (s)")
    status, report = found(tmp_path, capsys, constant, constant)
    assert status == DONE and "says nothing" in str(report["reason"])


def test_a_backend_can_compute_the_outputs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert diff(tmp_path, TEXT, TEXT, "--backend", "auto") == DONE
    assert diff(tmp_path, TEXT, TEXT, "--backend", "nothing") == TROUBLE
    assert "there is no backend 'nothing'" in capsys.readouterr().err


def test_long_lists_are_cut_in_text_only(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    chain = " ".join(f"v{i} = Mul (v{i - 1}, w{i})" for i in range(1, 31))
    weights = ", ".join(f"float[1] w{i} = {{{{1.0}}}}" for i in range(1, 31)).replace("{{", "{").replace("}}", "}")
    text = f"""<ir_version: 8, opset_import: ["": 17]>
    net (float[2] v0) => (float[2] y) <{weights}> {{ {chain} y = Relu (v30) }}"""
    changed = text.replace("{1.0}", "{1.5}")
    status, report = found(tmp_path, capsys, text, changed, "--no-run")
    names = report["weights_changed"]
    assert status == DONE and isinstance(names, list) and len(names) == 30
    assert diff(tmp_path, text, changed, "--no-run") == DONE
    assert "… and 10 more" in capsys.readouterr().out
