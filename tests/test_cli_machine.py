"""`taso cache` and `taso doctor`: what taso keeps, and what it finds on a machine."""

from __future__ import annotations

import json
import re
import subprocess
from importlib import metadata
from pathlib import Path

import pytest

from taso import cli, cli_doctor
from taso.backends.costs import CostDatabase
from taso.cli_common import DONE, FAILED
from taso.graph.errors import BackendUnavailable

ROOT = Path(__file__).parents[1]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TASO_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def fill(folder: Path) -> None:
    database = CostDatabase(folder)
    database.keep_cost("one device", "a", 1.0)
    database.keep_cost("one device", "b", 2.0)
    database.keep_cost("another", "a", 3.0)
    database.keep_verdict("another", "x", "y", (1.0, 1.0, 1.0, 1.0))
    database.close()


# ── cache ────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_cache_that_there_is_not_is_empty_and_is_not_made(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["cache", "--json"]) == DONE
    assert json.loads(capsys.readouterr().out) == {"path": str(folder), "bytes": 0, "devices": []}
    assert cli.main(["cache", "--clear"]) == DONE
    assert not folder.exists()


def test_entries_are_counted_for_each_device(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fill(folder)
    assert cli.main(["cache", "--json"]) == DONE
    said = json.loads(capsys.readouterr().out)
    assert said["bytes"] > 0 and said["devices"] == [
        {"device": "another", "kernels": 1, "comparisons": 1}, {"device": "one device", "kernels": 2, "comparisons": 0}
    ]  # fmt: skip
    assert cli.main(["cache"]) == DONE
    told = capsys.readouterr().out
    assert str(folder) in told and "one device" in told


def test_clearing_leaves_what_is_not_ours(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fill(folder)
    (folder / "thesis.txt").write_text("precious")
    assert cli.main(["cache", "--clear", "--json"]) == DONE
    told = capsys.readouterr()
    assert json.loads(told.out)["deleted_bytes"] > 0 and "deleted" in told.err
    assert [p.name for p in folder.iterdir()] == ["thesis.txt"]
    assert cli.main(["cache", "--json"]) == DONE


def test_a_damaged_cache_is_one_sentence_that_says_what_helps(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder.mkdir()
    (folder / "costs.sqlite3").write_bytes(b"no database at all" * 100)
    assert cli.main(["cache"]) == FAILED
    told = capsys.readouterr()
    assert told.out == "" and len(told.err.splitlines()) == 1 and "--clear" in told.err
    assert cli.main(["cache", "--clear"]) == DONE and cli.main(["cache"]) == DONE


# ── doctor ───────────────────────────────────────────────────────────────────────────────────────────────────────


def test_doctor_tells_versions_processor_and_cache(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", "--json"]) == DONE
    said = json.loads(capsys.readouterr().out)
    assert said["libraries"]["numpy"] == metadata.version("numpy") and said["wrong"] == []
    assert said["cache"]["folder"] == str(folder) and said["processor"]["name"]
    assert said["backends"]["reference"] and not folder.exists()
    assert cli.main(["doctor"]) == DONE
    told = capsys.readouterr()
    assert "nothing is wrong" in told.out and told.err == "" and "\x1b" not in told.out


def test_what_is_missing_says_how_to_get_it(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cli_doctor, "version", lambda name: None)
    assert cli.main(["doctor", "--json"]) == FAILED
    said = json.loads(capsys.readouterr().out)
    assert "pip install 'taso[onnxruntime]'" in said["optional"]["onnxruntime"]
    assert "numpy is not installed: pip install numpy" in said["wrong"]


def test_the_extras_that_are_recommended_exist() -> None:
    declared = re.findall(r"^(\w+) = \[", (ROOT / "pyproject.toml").read_text("utf-8"), re.MULTILINE)
    named = {extra for optional in cli_doctor.OPTIONAL for extra in re.findall(r"taso\[(\w+)\]", optional.install)}
    assert named and named <= set(declared)


def test_required_libraries_are_those_that_are_declared() -> None:
    text = (ROOT / "pyproject.toml").read_text("utf-8").split("\ndependencies = [")[1].split("\n]")[0]
    assert re.findall(r'"([\w-]+)>=[^;"]*"', text) == list(cli_doctor.REQUIRED)


def test_a_backend_made_for_this_machine_that_does_not_load_is_wrong(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(name: str) -> object:
        raise BackendUnavailable("the library is gone")

    monkeypatch.setattr(cli_doctor, "get_backend", missing)
    monkeypatch.setattr(cli_doctor.sys, "platform", "linux")
    monkeypatch.setattr(cli_doctor.platform, "machine", lambda: "x86_64")
    assert cli.main(["doctor"]) == FAILED
    assert "the library is gone" in capsys.readouterr().out
    monkeypatch.setattr(cli_doctor.platform, "machine", lambda: "aarch64")
    assert cli.main(["doctor"]) == DONE


def test_a_gpu_on_which_cudnn_does_not_work_is_wrong_where_its_packages_are_installed(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    known = cli_doctor.get_backend

    def missing(name: str) -> object:
        if name == "cudnn":
            raise BackendUnavailable("the driver is for CUDA 11.4")
        return known(name)

    monkeypatch.setattr(cli_doctor, "get_backend", missing)
    monkeypatch.setattr(cli_doctor, "_gpus", lambda: {"NVIDIA 0": "Some GPU, 81559 MiB, 470.1"})
    monkeypatch.setattr(cli_doctor, "versions", lambda: {"cupy-cuda12x": "14.2.0"})
    assert cli.main(["doctor"]) == FAILED
    said = capsys.readouterr().out
    assert "cuDNN does not work on it: the driver is for CUDA 11.4" in said and "cupy-cuda12x" in said
    monkeypatch.setattr(cli_doctor, "versions", dict)
    assert cli.main(["doctor"]) == DONE
    assert "pip install 'taso[cuda]'" in capsys.readouterr().out


def test_a_cache_that_cannot_be_written_is_wrong(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TASO_CACHE_DIR", str(tmp_path / "file" / "cache"))
    assert cli.main(["doctor"]) == FAILED
    assert "TASO_CACHE_DIR" in capsys.readouterr().out


def test_gpus_are_listed_and_a_broken_driver_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli_doctor.shutil, "which", lambda name: "/bin/nvidia-smi")
    rows = "0, Some GPU, 81559 MiB, 550.1\n1, Some GPU, 81559 MiB, 550.1\n"
    monkeypatch.setattr(
        cli_doctor.subprocess, "run", lambda *a, **k: subprocess.CompletedProcess(a, 0, stdout=rows, stderr="")
    )
    assert cli_doctor._gpus()["NVIDIA 1"] == "Some GPU, 81559 MiB, 550.1"

    def broken(*given: object, **more: object) -> None:
        raise subprocess.CalledProcessError(9, "nvidia-smi")

    monkeypatch.setattr(cli_doctor.subprocess, "run", broken)
    assert "nvidia-smi fails" in cli_doctor._gpus()["NVIDIA"]
