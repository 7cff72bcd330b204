"""The command line, as a user types it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import onnxruntime as ort
import pytest

import taso
from taso import cli

MODEL = """
<ir_version: 8, opset_import: ["": 17]>
branches (float[N, 4, 6, 6] image) => (float[N, 4, 6, 6] merged)
{
    left = Conv <pads = [1, 1, 1, 1]> (image, left_weight)
    left_positive = Relu (left)
    right = Conv (image, right_weight)
    right_positive = Relu (right)
    merged = Add (left_positive, right_positive)
}
"""


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TASO_CACHE_DIR", str(tmp_path / "cache"))


@pytest.fixture
def model(tmp_path: Path) -> Path:
    parsed = onnx.parser.parse_model(MODEL)
    random = np.random.default_rng(5)
    for name, window in (("left_weight", 3), ("right_weight", 1)):
        values = random.standard_normal((4, 4, window, window)).astype(np.float32) / 4
        parsed.graph.initializer.append(onnx.numpy_helper.from_array(values, name))
    path = tmp_path / "in.onnx"
    onnx.save(parsed, path)
    return path


def optimize(model: Path, output: Path, *more: str) -> int:
    return cli.main(["optimize", str(model), "-o", str(output), "--input", "image:2x4x6x6", "--budget", "4", *more])


def outputs(path: Path, image: np.ndarray) -> np.ndarray:
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    result: np.ndarray = session.run(["merged"], {"image": image})[0]
    return result


def test_the_written_model_is_valid_and_gives_the_same_outputs(model: Path, tmp_path: Path) -> None:
    output = tmp_path / "out.onnx"
    assert optimize(model, output) == 0
    onnx.checker.check_model(str(output), full_check=True)
    image = np.random.default_rng(1).standard_normal((2, 4, 6, 6)).astype(np.float32)
    expected = outputs(model, image)
    assert np.max(np.abs(outputs(output, image) - expected)) <= 1e-4 * np.max(np.abs(expected))


def test_the_model_may_be_written_over_itself(model: Path) -> None:
    assert optimize(model, model, "-q") == 0
    onnx.checker.check_model(str(model), full_check=True)


def test_the_report_goes_to_stderr_and_json_alone_to_stdout(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert optimize(model, tmp_path / "out.onnx") == 0
    told = capsys.readouterr()
    assert told.out == "" and told.err.strip()
    assert optimize(model, tmp_path / "out.onnx", "--json") == 0
    told = capsys.readouterr()
    assert isinstance(json.loads(told.out), dict) and told.err.strip()


def test_quiet_prints_nothing_and_json_still_speaks(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert optimize(model, tmp_path / "out.onnx", "--quiet") == 0
    told = capsys.readouterr()
    assert (told.out, told.err) == ("", "")
    assert optimize(model, tmp_path / "out.onnx", "-q", "--json") == 0
    told = capsys.readouterr()
    assert json.loads(told.out) and told.err == ""


def failing(capsys: pytest.CaptureFixture[str]) -> str:
    """The one sentence that a failed command left."""
    told = capsys.readouterr()
    assert told.out == ""
    lines = told.err.strip().splitlines()
    assert len(lines) == 1 and lines[0].startswith("taso: ") and "Traceback" not in told.err
    return lines[0]


@pytest.mark.parametrize("kind", ["missing", "garbage", "truncated", "empty", "directory"])
def test_a_model_that_cannot_be_read_is_one_sentence_and_no_file(
    kind: str, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bad, output = tmp_path / "bad.onnx", tmp_path / "out.onnx"
    if kind == "directory":
        bad.mkdir()
    elif kind != "missing":
        content = model.read_bytes()
        bad.write_bytes({"garbage": b"not a model", "truncated": content[: len(content) // 2], "empty": b""}[kind])
    assert optimize(bad, output) == 1
    assert "bad.onnx" in failing(capsys)
    assert not output.exists()


def test_a_file_that_was_there_survives_a_failure(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "out.onnx"
    output.write_bytes(b"precious")
    assert optimize(model, output, "--budget", "-1") == 1
    assert "budget" in failing(capsys)
    assert output.read_bytes() == b"precious"
    assert {p.name for p in tmp_path.iterdir()} <= {"in.onnx", "out.onnx", "cache"}


@pytest.mark.parametrize("where", ["directory", "nowhere"])
def test_an_output_that_cannot_be_written_is_refused_before_the_work(
    where: str, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*args: object, **settings: object) -> None:
        raise AssertionError("the search began")

    monkeypatch.setattr(taso, "optimize", never)
    output = tmp_path / "folder" / "out.onnx"
    if where == "directory":
        output.mkdir(parents=True)
    assert optimize(model, output) == 1
    assert "out.onnx" in failing(capsys)


def test_an_input_the_model_does_not_have_is_named(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert optimize(model, tmp_path / "out.onnx", "--input", "picture:1x4x6x6") == 1
    assert "picture" in failing(capsys)


@pytest.mark.parametrize(
    "arguments",
    [
        [], ["optimize"], ["optimize", "a.onnx"], ["improve", "a.onnx"], ["optimize", "a", "-o", "b", "--budget", "x"],
        ["optimize", "a", "-o", "b", "--input", "1x2"], ["optimize", "a", "-o", "b", "--input", "x:1x-2"],
        ["optimize", "a", "-o", "b", "--input", ":1x2"], ["optimize", "a", "-o", "b", "-q", "-v"],
    ],
)  # fmt: skip
def test_wrong_usage_exits_with_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        cli.main(arguments)
    assert left.value.code == 2
    told = capsys.readouterr()
    assert told.out == "" and "usage:" in told.err


def test_options_reach_the_optimizer(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, object] = {}

    def remember(graph: object, **settings: object) -> None:
        seen.update(settings)
        raise taso.TasoError("enough")

    monkeypatch.setattr(taso, "optimize", remember)
    more = [
        "--alpha", "1.1", "--budget", "7", "--backend", "reference", "--threads", "2", "--time-limit", "1.5",
        "--rules", "r.pb", "--seed", "3", "--no-verify", "--freeze", "--input", "scope/x:0:2x3", "--search", "mcts",
        "--workers", "2", "--explain", "a", "--explain", "b", "--checkpoint", "c", "--search-memory-limit", "1.5",
        "--objective", "memory", "--memory-limit", "1.5MB", "--precision", "bf16",
    ]  # fmt: skip
    assert optimize(model, tmp_path / "out.onnx", *more) == 1
    assert seen == {
        "alpha": 1.1, "budget": 7, "backend": "reference", "threads": 2, "time_limit": 1.5, "rules": "r.pb", "seed": 3,
        "verify": False, "input_shapes": {"image": (2, 4, 6, 6), "scope/x:0": (2, 3)}, "freeze": True, "progress": None,
        "search": "mcts", "workers": 2, "explain": ["a", "b"], "checkpoint": "c", "search_memory_limit": 1_500_000_000,
        "objective": "memory", "memory_limit": 1_500_000, "precision": "bf16",
    }  # fmt: skip


def test_an_interrupt_outside_the_search_leaves_no_file(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*args: object, **settings: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(taso, "load", interrupted)
    assert optimize(model, tmp_path / "out.onnx") == 130
    assert "interrupted" in failing(capsys)
    assert not (tmp_path / "out.onnx").exists()


def command_line(*arguments: str) -> subprocess.CompletedProcess[str]:
    folder = Path(taso.__file__).parents[1]
    command = [sys.executable, "-m", "taso.cli", *arguments]
    return subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, cwd=folder)


def test_the_command_works_from_another_process(model: Path, tmp_path: Path) -> None:
    output = tmp_path / "out.onnx"
    done = command_line(
        "optimize", str(model), "-o", str(output), "--budget", "0", "--input", "image:1x4x6x6", "--backend", "reference"
    )
    assert done.returncode == 0, done.stderr
    assert output.exists() and done.stdout == ""
    assert command_line("--version").stdout.strip() == f"taso {taso.__version__}"


def test_a_pipe_as_output_is_refused_before_the_search(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    assert cli.main(["optimize", str(model), "-o", str(pipe)]) == cli.FAILED
    assert "no ordinary file" in capsys.readouterr().err and pipe.is_fifo()


def test_a_reader_that_left_early_is_no_error(model: Path, tmp_path: Path) -> None:
    options = ["-q", "--json", "--budget", "0", "-o", str(tmp_path / "o.onnx")]
    command = [sys.executable, "-m", "taso.cli", "optimize", str(model), *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        said = process.stderr.read()
    assert process.returncode == 0 and said == b""


def test_a_size_beyond_all_memory_is_one_sentence(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["--input", "image:99999999999999999999x4x6x6"]
    assert cli.main(["optimize", str(model), "-o", str(tmp_path / "o.onnx"), *given]) == cli.FAILED
    assert "sizes are whole numbers" in capsys.readouterr().err
