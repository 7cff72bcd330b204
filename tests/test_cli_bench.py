"""`taso bench`: who takes part, what is told of them, and what becomes of those that cannot."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import pytest

from taso import cli, cli_bench, cli_contest
from taso.cli_common import DONE, FAILED
from taso.cli_contest import Contestant, Result, contest
from taso.graph.errors import BackendError, BackendUnavailable

TEXT = """
<ir_version: 8, opset_import: ["": 17]>
twice (float[N, 3] x) => (float[N, 3] y) { z = Relu (x) y = Relu (z) }
"""
QUICK = ("--rounds", "2", "--seconds", "0.001", "--budget", "3")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "model.onnx"
    onnx.save(onnx.parser.parse_model(TEXT), path)
    return path


def bench(model: Path, *more: object) -> int:
    return cli.main(["bench", str(model), *QUICK, *map(str, more)])


def pretend(runner: cli_contest.Runner, path: str) -> Result:
    """A contestant that runs in this process."""
    result = Result(Contestant("reference", path, path), "pretended", outputs=runner({}))
    result.blocks, result.times = [0.002, 0.004], [0.002, 0.002, 0.004, 0.004]
    return result


def test_both_models_run_on_every_runtime_asked_for_and_agree(
    model: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    given = ("--on", "reference,onnxruntime", "--backend", "reference", "--threads", "1", "--input", "x:4x3", "--json")
    assert bench(model, *given) == DONE
    said = json.loads(capfd.readouterr().out)
    assert [(r["runtime"], r["model"]) for r in said["results"]] == [
        ("reference", "original"), ("reference", "optimized"), ("onnxruntime", "original"), ("onnxruntime", "optimized")
    ]  # fmt: skip
    assert said["inputs"] == {"x": [4, 3]} and said["threads"] == 1
    for result in said["results"]:
        assert result["failure"] is None and result["relative_error"] == 0.0
        assert result["runs"] == len(result["blocks_ms"]) * 3 or result["runs"] > 6
        assert (result["faster"] is None) == (result["model"] == "original")


def test_a_model_that_dies_or_cannot_run_is_told_and_the_others_run_on(model: Path, tmp_path: Path) -> None:
    bad = tmp_path / "bad.onnx"
    bad.write_bytes(b"no model")
    given = [
        Contestant("nothing", str(model), "a"), Contestant("reference", str(bad), "b"),
        Contestant("reference", str(model), "c"),
    ]  # fmt: skip
    told: list[str] = []
    feeds = {"x": np.ones((1, 3), np.float32)}
    results = contest(given, feeds, 1, rounds=1, seconds=0.001, tell=lambda done, doing: told.append(doing))
    assert "there is no runtime 'nothing'" in results[0].failure and "bad.onnx" in results[1].failure
    assert results[2].failure == "" and len(results[2].times) >= 3
    assert any("round 1 of 1" in line for line in told)


def test_a_table_has_medians_ratios_and_errors(
    model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def quick(contestants: list[Contestant], *more: object) -> list[Result]:
        results = []
        for number, contestant in enumerate(contestants):
            scale = 1.0 + number
            result = Result(contestant, "a runtime", outputs={"y": np.full(2, scale)})
            result.blocks, result.times = [0.004 / scale, 0.004 / scale], [0.004 / scale] * 4
            results.append(result)
        return results

    monkeypatch.setattr(cli_bench, "contest", quick)
    assert bench(model, "--on", "reference", "--backend", "reference", "-q") == DONE
    told = capsys.readouterr()
    assert told.err == "" and "4.000 to 4.000" in told.out
    assert "2.000 (2.000 to 2.000)" in told.out and "1.0e+00" in told.out


def test_nothing_that_runs_is_status_1_with_the_reasons(
    model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cli_bench, "contest", lambda contestants, *more: [Result(c, failure="no") for c in contestants])
    assert bench(model, "--on", "reference", "--backend", "reference", "-q", "--json") == FAILED
    told = capsys.readouterr()
    assert [r["failure"] for r in json.loads(told.out)["results"]] == ["no", "no"] and told.err == ""
    assert bench(model, "--on", "reference", "--backend", "reference") == FAILED
    told = capsys.readouterr()
    assert told.out == "" and "reference does not run the original model: no" in told.err


def test_a_file_optimized_earlier_must_fit(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "other.onnx"
    onnx.save(onnx.parser.parse_model(TEXT.replace("y", "out")), other)
    assert bench(model, "--on", "reference", "--optimized", other) == FAILED
    told = capsys.readouterr()
    assert len(told.err.splitlines()) == 1 and "other.onnx" in told.err and "out" in told.err


@pytest.mark.parametrize("more", [("--on", "nothing"), ("--rounds", "0"), ("--seconds", "x"), ("--seconds", "nan")])
def test_wrong_usage_exits_with_2(more: tuple[str, str], model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        bench(model, *more)
    assert left.value.code == 2 and capsys.readouterr().out == ""


def test_by_default_every_installed_runtime_takes_part(
    model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []

    def remember(contestants: list[Contestant], *more: object) -> list[Result]:
        seen.extend(c.runtime for c in contestants)
        return []

    monkeypatch.setattr(cli_bench, "contest", remember)
    monkeypatch.setattr(cli_contest, "installed", lambda module: module in ("openvino", "torch"))
    monkeypatch.setattr(cli_bench, "installed", lambda module: module in ("openvino", "torch"))
    assert bench(model, "--backend", "reference") == FAILED
    assert seen == ["reference", "reference", "openvino", "openvino"]
    assert "torch is left out: it needs torch and onnx2torch" in capsys.readouterr().err


def test_a_runtime_that_is_not_there_says_how_to_get_it(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli_contest, "installed", lambda module: module != "onnx2torch")
    with pytest.raises(BackendUnavailable, match="pip install onnx2torch"):
        cli_contest.runner("torch", str(model), 1)
    with pytest.raises(BackendError, match="there is no runtime"):
        cli_contest.runner("nothing", str(model), 1)


def test_each_runner_gives_outputs_by_name(model: Path) -> None:
    feeds = {"x": np.array([[-1.0, 0.0, 2.0]], np.float32)}
    for runtime in ("reference", *(name for name in cli_contest.FOREIGN if cli_contest.available(name))):
        run, version = cli_contest.runner(runtime, str(model), 1)
        assert np.array_equal(run(feeds)["y"], [[0.0, 0.0, 2.0]]) and version


def test_ratios_and_errors_are_against_the_other(tmp_path: Path) -> None:
    fast = pretend(lambda feeds: {"y": np.array([1.0, 2.0])}, "fast")
    slow = pretend(lambda feeds: {"y": np.array([1.0, 2.5])}, "slow")
    slow.blocks = [0.006, 0.004]
    assert fast.faster_than(slow) == (2.0, 1.0, 3.0)
    assert fast.error_against(slow) == pytest.approx(0.2)


def test_no_process_is_left(model: Path) -> None:
    feeds = {"x": np.ones((1, 3), np.float32)}
    results = contest([Contestant("reference", str(model), "a")], feeds, 1, rounds=0)
    assert results[0].failure == "" and results[0].times == []
    children = Path(f"/proc/self/task/{os.getpid()}/children")
    if children.exists():
        names = [Path(f"/proc/{pid}/cmdline").read_bytes() for pid in children.read_text().split()]
        assert not any(b"spawn_main" in name for name in names)


def test_backends_that_are_named_compute_in_the_precision_that_is_asked_for() -> None:
    named = {"onednn": "onednn int8", "onnxruntime": "onnxruntime", "onednn bf16": "onednn bf16", "cudnn": "cudnn"}
    assert {name: cli_bench._in_precision(name, "int8") for name in named} == named
    assert cli_bench._in_precision("onednn", "float32") == "onednn"
