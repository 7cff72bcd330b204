"""`taso optimize`: what it writes beside the model, and what it leaves alone."""

from __future__ import annotations

import json
from pathlib import Path

import onnx
import onnx.parser
import pytest

import taso
from taso import cli
from taso.cli_common import DONE, FAILED
from taso.search.result import Report, Rewrite
from taso.search.telling import Files

TEXT = """
<ir_version: 8, opset_import: ["": 17]>
twice (float[2, 3] x) => (float[2, 3] y) { z = Relu (x) y = Relu (z) }
"""


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "model.onnx"
    onnx.save(onnx.parser.parse_model(TEXT), path)
    return path


def optimize(model: Path, *more: object) -> int:
    return cli.main(["optimize", str(model), "--backend", "reference", "--budget", "5", *map(str, more)])


def test_a_dry_run_writes_no_model_and_reports(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = model.read_bytes()
    assert optimize(model, "--dry-run", "-o", tmp_path / "out.onnx", "--json") == DONE
    told = capsys.readouterr()
    said = json.loads(told.out)
    assert len(said["rewrites"]) == 1 and said["output"] is None and said["model_bytes"] == len(before)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["model.onnx"] and model.read_bytes() == before


def test_neither_output_nor_dry_run_is_wrong_usage(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        optimize(model)
    assert left.value.code == 2 and "--dry-run" in capsys.readouterr().err


def test_the_report_has_the_form_of_its_suffix(model: Path, tmp_path: Path) -> None:
    output = tmp_path / "out.onnx"
    assert optimize(model, "-o", output, "-q", "--report", tmp_path / "r.json") == DONE
    said = json.loads((tmp_path / "r.json").read_text("utf-8"))
    assert said["output_bytes"] == output.stat().st_size and said["backend"] == "reference"
    assert optimize(model, "--dry-run", "-q", "--report", tmp_path / "r.MD") == DONE
    text = (tmp_path / "r.MD").read_text("utf-8")
    assert text.startswith("# model.onnx, optimized\n") and "| 1 | `Relu(Relu(x)) => Relu(x)` |" in text


@pytest.mark.parametrize("name", ["r.pdf", "r", "r.txt", "nowhere/r.md", "folder.md"])
def test_a_report_that_cannot_be_written_is_refused_before_the_search(
    name: str, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*args: object, **settings: object) -> None:
        raise AssertionError("the search began")

    monkeypatch.setattr("taso.optimize", never)
    (tmp_path / "folder.md").mkdir()
    assert optimize(model, "--dry-run", "--report", tmp_path / name) == FAILED
    told = capsys.readouterr()
    assert told.out == "" and len(told.err.splitlines()) == 1


def test_a_search_that_there_is_not_is_told(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert optimize(model, "--dry-run", "-q", "--search", "backtracking") == DONE
    with pytest.raises(SystemExit) as left:
        optimize(model, "--dry-run", "--search", "annealing")
    assert left.value.code == 2 and "no search 'annealing', only backtracking" in capsys.readouterr().err


def test_markdown_keeps_what_rules_and_names_say(tmp_path: Path) -> None:
    report = Report("b", "a_device", decision="1 rewrites", verified=False, verification="output 'a_b' differs")
    report.relative_error = float("inf")
    report.rewrites = [Rewrite("a | b => b | a", "", "", 0.5, "exact", "proved")]
    text = report.to_markdown(Files("dir/a*b.onnx"))
    assert "# a\\*b.onnx, optimized" in text and "`a \\| b => b \\| a`" in text and "a\\_device" in text
    assert "not shown equal" in text


def test_why_a_rule_did_not_apply_is_explained(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = tmp_path / "r.md"
    asked = ("--explain", "relu-twice", "--explain", "z", "--explain", "merge-conv")
    assert optimize(model, "--dry-run", "--json", "--report", report, *asked) == DONE
    told = capsys.readouterr()
    found = json.loads(told.out)["explanations"]
    assert found[0]["outcome"] == "taken" and found[0]["nodes"] == ["Relu 'z'", "Relu 'y'"]
    assert any("the graph holds no Conv" in e["reason"] for e in found)
    assert "taken" in told.err and "## Explained" in report.read_text("utf-8")
    assert optimize(model, "--dry-run", "--explain", "nobody") == FAILED
    assert "'nobody'" in capsys.readouterr().err


def test_a_search_goes_on_from_its_checkpoint(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "search.taso"
    assert optimize(model, "--dry-run", "--budget", "1", "--checkpoint", file) == DONE
    assert file.is_file() and "went on" not in capsys.readouterr().err
    assert optimize(model, "--dry-run", "--checkpoint", file, "--search-memory-limit", "4") == DONE
    assert "went on from" in " ".join(capsys.readouterr().err.split())
    assert optimize(model, "--dry-run", "--checkpoint", tmp_path / "no" / "folder") == FAILED


def test_a_report_may_be_the_picture_of_the_search(model: Path, tmp_path: Path) -> None:
    assert optimize(model, "--dry-run", "-q", "--report", tmp_path / "course.svg") == DONE
    assert (tmp_path / "course.svg").read_text("utf-8").startswith("<svg")


def test_memory_may_be_limited_or_the_objective(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert optimize(model, "--dry-run", "--json", "--memory-limit", "16B", "--objective", "memory") == DONE
    said = json.loads(capsys.readouterr().out)
    assert said["peak_after"] <= said["peak_before"] and "memory limit of 16 bytes is missed by" in said["decision"]


@pytest.mark.parametrize(
    ("text", "size"),
    [("1", 1), ("1234567", 1234567), ("12MB", 12_000_000), ("1.5kB", 1500), ("2GiB", 2 << 30), ("0.5 MiB", 1 << 19)],
)
def test_sizes_are_bytes_or_have_a_unit(text: str, size: int, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[object] = []

    def noted(graph: object, **settings: object) -> object:
        given.append(settings["memory_limit"])
        raise taso.SearchError("of this test")

    monkeypatch.setattr("taso.optimize", noted)
    assert optimize(model, "--dry-run", "--memory-limit", text) == FAILED and given == [size]


@pytest.mark.parametrize("text", ["0", "-1", "0.5", "12mb", "MB", "1e400", "nan", "12 M B", "", "1kMB"])
def test_what_is_no_size_is_wrong_usage(text: str, model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        optimize(model, "--dry-run", f"--memory-limit={text}")
    assert left.value.code == 2 and "is no size of at least one byte" in capsys.readouterr().err


def test_an_objective_that_there_is_not_is_wrong_usage(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        optimize(model, "--dry-run", "--objective", "space")
    assert left.value.code == 2 and "invalid choice: 'space'" in capsys.readouterr().err
