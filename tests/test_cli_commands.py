"""What all commands have in common: help, exit statuses, where output goes, colour."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import onnx
import onnx.parser
import pytest

import taso
from taso import cli, cli_common
from taso.cli_common import FAILED, INTERRUPTED, TROUBLE, bytes_text, count_text, to_json
from taso.cli_tree import Command, tree

TEXT = """
<ir_version: 8, opset_import: ["": 17]>
scaled (float[2, 3] x) => (float[2, 3] y) <float[3] w = {1.0, 2.0, 3.0}> { z = Mul (x, w) y = Relu (z) }
"""
LEAVES = [c for c in tree(cli.parser()).walk() if c.words and not c.parts]
READERS = [["run"], ["show"], ["bench"], ["optimize", "--dry-run"], ["diff", "{model}"]]


def named(command: Command) -> str:
    return " ".join(command.words)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "model.onnx"
    onnx.save(onnx.parser.parse_model(TEXT), path)
    return path


def call(*arguments: object) -> int:
    return cli.main([str(a) for a in arguments])


# ── help ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("command", LEAVES, ids=named)
def test_help_describes_a_command_and_shows_examples(
    command: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as left:
        call(*command.words, "--help")
    told = capsys.readouterr().out
    assert left.value.code == 0
    assert command.description.splitlines()[0] in " ".join(told.split())
    assert f"taso {named(command)}" in told.split("examples:")[1]


@pytest.mark.parametrize("command", LEAVES, ids=named)
def test_examples_are_right_usage(command: Command) -> None:
    calls = [words for line in command.examples.splitlines() if (words := shlex.split(line))[:1] == ["taso"]]
    for words in calls:
        end = min(words.index(mark) if mark in words else len(words) for mark in ("|", ">", "&&"))
        settings = cli.parser().parse_args(words[1:end])
        assert callable(settings.run)
    assert calls or command.words == ("completion",)


def test_the_help_of_taso_names_every_command_and_the_exit_statuses(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        call("--help")
    told = capsys.readouterr().out
    assert all(f"    {command.words[0]}" in told for command in LEAVES)
    assert f"{TROUBLE} there is no answer" in told


@pytest.mark.parametrize("command", LEAVES, ids=named)
def test_an_option_that_there_is_not_is_wrong_usage(command: Command, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        call(*command.words, "--nonsense")
    told = capsys.readouterr()
    assert left.value.code == 2 and told.out == "" and "usage:" in told.err


# ── bad input ────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("kind", ["missing", "garbage", "folder"])
@pytest.mark.parametrize("command", READERS, ids=lambda c: c[0])
def test_a_file_that_is_no_model_is_one_sentence(
    command: list[str], kind: str, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bad = tmp_path / "bad.onnx"
    if kind == "garbage":
        bad.write_bytes(b"no model")
    elif kind == "folder":
        bad.mkdir()
    status = call(*(word.format(model=model) for word in command), bad)
    told = capsys.readouterr()
    assert status == (TROUBLE if command[0] == "diff" else FAILED)
    assert told.out == "" and told.err.startswith("taso: ") and len(told.err.splitlines()) == 1
    assert "bad.onnx" in told.err


@pytest.mark.parametrize("command", READERS, ids=lambda c: c[0])
def test_ctrl_c_has_a_status_of_its_own(
    command: list[str], model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*args: object, **settings: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("taso.api.load", interrupted)
    monkeypatch.setattr(taso, "load", interrupted)
    assert call(*(word.format(model=model) for word in command), model) == INTERRUPTED
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_too_little_memory_is_one_sentence(
    model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: object, **settings: object) -> None:
        raise MemoryError("9 TiB were wanted")

    monkeypatch.setattr("taso.api.load", full)
    assert call("show", model) == FAILED
    assert capsys.readouterr().err == "taso: there is not enough memory: 9 TiB were wanted\n"


# ── output ───────────────────────────────────────────────────────────────────────────────────────────────────────


def test_what_is_piped_has_no_colour_and_is_not_cut(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("show", model) == 0
    told = capsys.readouterr().out
    assert "\x1b" not in told and "…" not in told


def in_process(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "taso.cli", *map(str, arguments)]


ROOT = Path(taso.__file__).parents[1]


def on_a_terminal(*arguments: object, environment: dict[str, str]) -> str:
    """What a command shows on a terminal."""
    ours, theirs = os.openpty()
    shown = bytearray()

    def read() -> None:
        try:
            while part := os.read(ours, 1 << 16):
                shown.extend(part)
        except OSError:  # Linux's end of a terminal
            pass

    reader = threading.Thread(target=read)
    reader.start()
    try:
        subprocess.run(
            in_process(*arguments), stdin=theirs, stdout=theirs, stderr=theirs, cwd=ROOT, check=True,
            env={**os.environ, "TERM": "xterm", "COLUMNS": "60", **environment},
        )  # fmt: skip
    finally:
        os.close(theirs)
        reader.join(30)
        os.close(ours)
    return shown.decode()


@pytest.mark.skipif(not hasattr(os, "openpty"), reason="needs a system with terminals of its own making")
def test_a_terminal_gets_colour_unless_it_is_turned_off(model: Path) -> None:
    assert "\x1b[1m" in on_a_terminal("show", model, environment={})
    plain = on_a_terminal("show", "-q", model, environment={"NO_COLOR": "1"})
    assert "\x1b[36m" not in plain and "\x1b[1;36m" not in plain and "operator" in plain


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_a_pipe_that_is_closed_early_is_no_error(stream: str, model: Path) -> None:
    command = in_process("run", model, "--backend", "reference")
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT) as process:
        assert process.stdout is not None and process.stderr is not None
        closed, other = process.stdout, process.stderr
        if stream == "stderr":
            closed, other = other, closed
        closed.close()
        said = other.read()
    assert process.returncode == 0 and b"Traceback" not in said and said


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash, which closes stdout before a command starts")
@pytest.mark.parametrize("words", [["show", "{model}"], ["rules", "list"], ["rules", "list", "--json"]], ids=" ".join)
def test_a_result_that_nobody_can_get_is_one_sentence(words: list[str], model: Path) -> None:
    command = shlex.join(in_process(*(word.format(model=model) for word in words)))
    done = subprocess.run(["bash", "-c", f"{command} >&-"], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == FAILED
    assert done.stderr == "taso: the result could not be printed: stdout is closed\n"


def test_progress_shows_where_somebody_looks_and_only_there(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for looks, quiet, total in ((True, False, 4.0), (True, False, None), (True, True, 4.0), (False, False, 4.0)):
        monkeypatch.setattr(cli_common, "interactive", lambda looks=looks: looks)
        monkeypatch.setenv("FORCE_COLOR", "1")
        with cli_common.progress("at first", quiet, total) as advance:
            advance(2, "then [this]")
        told = capsys.readouterr()
        assert told.out == "" and ("then [this]" in told.err) == (looks and not quiet)


def test_json_has_no_number_that_is_none() -> None:
    data = {"error": float("inf"), "list": [float("nan"), 1.5, (2, "Größe")], "count": 3}
    assert json.loads(to_json(data)) == {"error": None, "list": [None, 1.5, [2, "Größe"]], "count": 3}


@pytest.mark.parametrize(
    "shown, wanted",
    [
        (bytes_text(0), "0 B"), (bytes_text(1023), "1023 B"), (bytes_text(1536), "1.5 KiB"),
        (bytes_text(5 << 40), "5.0 TiB"), (count_text(999), "999"), (count_text(25_500_000), "25.5 M"),
        (count_text(3e15), "3.0 P"),
    ],
)  # fmt: skip
def test_large_numbers_have_units(shown: str, wanted: str) -> None:
    assert shown == wanted


def test_the_log_is_told_apart_by_quiet_and_verbose(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("run", model, "-v") == 0
    assert "INFO: backend:" in capsys.readouterr().err
    assert call("run", model, "-q") == 0
    assert capsys.readouterr().err == ""
