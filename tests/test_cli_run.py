"""`taso run`: inputs from seeds and files, outputs as a summary and as a file, times."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import onnxruntime as ort
import pytest

from taso import cli
from taso.cli_arrays import npz
from taso.cli_common import DONE, FAILED
from taso.cli_run import described

TEXT = """
<ir_version: 8, opset_import: ["": 17]>
joined (float[N, 3] left, float[N, 3] right) => (float[N, 3] total, int64[N, 3] whole)
{ total = Add (left, right) whole = Cast <to = 7> (total) }
"""
HALF = """
<ir_version: 8, opset_import: ["": 17]>
half (bfloat16[2] x) => (bfloat16[2] y) { y = Identity (x) }
"""


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "model.onnx"
    onnx.save(onnx.parser.parse_model(TEXT), path)
    return path


def run(model: Path, *more: object) -> int:
    return cli.main(["run", str(model), *map(str, more)])


def arrays(path: Path) -> dict[str, np.ndarray]:
    with np.load(path) as found:
        return {name: found[name] for name in found.files}


def test_outputs_for_given_inputs_are_those_of_onnx_runtime(model: Path, tmp_path: Path) -> None:
    random = np.random.default_rng(3)
    feeds = {name: random.standard_normal((4, 3)).astype(np.float32) for name in ("left", "right")}
    np.savez(tmp_path / "in.npz", **feeds)
    assert run(model, "-q", "--data", tmp_path / "in.npz", "-o", tmp_path / "out.npz") == DONE
    session = ort.InferenceSession(str(model), providers=["CPUExecutionProvider"])
    total, whole = session.run(["total", "whole"], feeds)
    found = arrays(tmp_path / "out.npz")
    assert np.allclose(found["total"], total) and np.array_equal(found["whole"], whole)


def test_the_seed_decides_and_given_inputs_set_the_sizes_of_the_others(model: Path, tmp_path: Path) -> None:
    np.save(tmp_path / "left.npy", np.zeros((5, 3), np.float32))
    results = []
    for seed, name in ((1, "a"), (1, "b"), (2, "c")):
        data = f"left={tmp_path / 'left.npy'}"
        assert run(model, "-q", "--data", data, "--seed", seed, "-o", tmp_path / f"{name}.npz") == DONE
        results.append(arrays(tmp_path / f"{name}.npz")["total"])
    assert results[0].shape == (5, 3)
    assert np.array_equal(results[0], results[1]) and not np.array_equal(results[0], results[2])


def test_json_describes_inputs_outputs_and_times(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(model, "--json", "--repeat", 3, "--input", "left:2x3", "--backend", "reference") == DONE
    told = capsys.readouterr()
    said = json.loads(told.out)
    assert [o["name"] for o in said["outputs"]] == ["total", "whole"]
    assert said["outputs"][0]["shape"] == [2, 3] and said["outputs"][1]["dtype"] == "int64"
    assert said["random_inputs"] == ["left", "right"] and said["time"]["runs"] == 3
    assert "random inputs (seed 0): left [2, 3]" in told.err


def test_the_table_names_every_output(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(model, "-q", "--repeat", 2) == DONE
    told = capsys.readouterr().out
    assert "total" in told and "whole" in told and "1×3" in told and "2 runs" in told


@pytest.mark.parametrize(
    "data, said",
    [
        (["nothing.npy"], "nothing.npy"), (["one.npy"], "say which"), (["middle=one.npy"], "'middle'"),
        (["left=one.npy", "left=one.npy"], "twice"), (["left=both.npz"], "names its arrays itself"),
        (["other.npz"], "'strange'"), (["left=text.npy"], "text.npy"), (["left=wrong.npy"], "left"),
        (["left=pickled.npy"], "pickled.npy"), (["left=."], "cannot be read"),
    ],
)  # fmt: skip
def test_data_that_does_not_fit_is_one_sentence(
    data: list[str], said: str, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    one = np.zeros((1, 3), np.float32)
    np.save("one.npy", one)
    np.save("wrong.npy", np.zeros((1, 4), np.float32))
    np.save("pickled.npy", np.array([{}], object), allow_pickle=True)
    np.savez("both.npz", left=one, right=one)
    np.savez("other.npz", strange=one)
    Path("text.npy").write_text("no array")
    assert run(model, *(word for d in data for word in ("--data", d))) == FAILED
    told = capsys.readouterr()
    assert told.out == "" and len(told.err.splitlines()) == 1 and said in told.err


def test_a_file_for_the_only_input_that_is_left_needs_no_name(model: Path, tmp_path: Path) -> None:
    np.save(tmp_path / "one.npy", np.ones((1, 3), np.float32))
    one = tmp_path / "one.npy"
    assert run(model, "-q", "--data", f"left={one}", "--data", one, "-o", tmp_path / "out.npz") == DONE
    assert np.array_equal(arrays(tmp_path / "out.npz")["total"], np.full((1, 3), 2.0))


def test_types_that_numpy_files_do_not_know_go_round(tmp_path: Path) -> None:
    path = tmp_path / "half.onnx"
    onnx.save(onnx.parser.parse_model(HALF), path)
    assert run(path, "-q", "--backend", "reference", "-o", tmp_path / "y.npz") == DONE
    first = arrays(tmp_path / "y.npz")["y"]
    np.save(tmp_path / "x.npy", first)
    assert run(path, "-q", "--backend", "reference", "--data", tmp_path / "x.npy", "-o", tmp_path / "z.npz") == DONE
    assert arrays(tmp_path / "z.npz")["y"].tobytes() == first.tobytes()


def test_an_output_file_that_cannot_be_written_is_refused(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(model, "-o", tmp_path / "nowhere" / "out.npz") == FAILED
    assert "nowhere" in capsys.readouterr().err


def test_an_npz_holds_any_name_and_strings(tmp_path: Path) -> None:
    held = {"file": np.arange(3), "a/b:0": np.array(["x", "yy"], object), "allow_pickle": np.full((), 2.0)}
    (tmp_path / "x.npz").write_bytes(npz(held))
    found = arrays(tmp_path / "x.npz")
    assert sorted(found) == sorted(held) and found["a/b:0"].tolist() == ["x", "yy"]


def test_a_description_counts_what_is_not_finite() -> None:
    said = described(np.array([1.0, np.nan, np.inf, 3.0], np.float32))
    assert said == {"dtype": "float", "shape": [4], "not_finite": 2, "min": 1.0, "max": 3.0, "mean": 2.0}
    assert described(np.array(["a"], object)) == {"dtype": "string", "shape": [1]}
    assert described(np.zeros((0, 2), bool)) == {"dtype": "bool", "shape": [0, 2]}
