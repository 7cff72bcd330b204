"""`taso.InferenceSession` is ONNX Runtime's session: same calls, same answers."""

from __future__ import annotations

import inspect
from pathlib import Path

import numpy as np
import onnx
import pytest

import taso
from taso.search.verify import relative_error

ort = pytest.importorskip("onnxruntime")

TEXT = """<ir_version: 9, opset_import: ["": 18], producer_name: "tests", model_version: 3>
g (float[n, 3] x, int64[?] k, float16[] h, seq(float[m]) q, float[2] d)
=> (float[n, 3] y, int64[?] k2, float16 h2, seq(float[m]) q2, float[2] d2)
<float[2] d = {1.0, 2.0}> {
    y = Relu (x)
    k2 = Identity (k)
    h2 = Identity (h)
    q2 = Identity (q)
    d2 = Identity (d)
}"""


def model() -> onnx.ModelProto:
    return onnx.parser.parse_model(TEXT)


def simple() -> onnx.ModelProto:
    text = """<ir_version: 9, opset_import: ["": 18]>
    g (float[n, 4] x, float[n, 4] z) => (float[n, 4] y, float[n, 4] s) { y = Relu (x)  s = Add (x, z) }"""
    return onnx.parser.parse_model(text)


def feeds() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {name: rng.standard_normal((2, 4)).astype(np.float32) for name in ("x", "z")}


def plain(model: onnx.ModelProto) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    return ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def test_names_types_and_shapes_are_told_as_onnx_runtime_tells_them() -> None:
    ours, theirs = taso.InferenceSession(model(), optimize=False, backend="reference"), plain(model())
    for call in ("get_inputs", "get_outputs", "get_overridable_initializers"):
        said = [(a.name, a.type, a.shape) for a in getattr(ours, call)()]
        assert said == [(a.name, a.type, a.shape) for a in getattr(theirs, call)()], call
    assert ours.get_providers() == theirs.get_providers()
    told = ours.get_modelmeta()
    assert (told.producer_name, told.graph_name, told.version) == ("tests", "g", 3)


def test_all_outputs_and_some_are_those_of_onnx_runtime() -> None:
    ours, theirs = taso.InferenceSession(simple(), budget=3, backend="reference"), plain(simple())
    for names in (None, [], ["s"], ["s", "y"]):
        found, expected = ours.run(names, feeds()), theirs.run(names, feeds())
        assert len(found) == len(expected)
        for a, b in zip(found, expected, strict=True):
            assert relative_error(a, b) <= 1e-6


@pytest.mark.parametrize("form", ["path", "string", "bytes", "proto", "graph"])
def test_a_model_is_taken_in_every_form(form: str, tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    onnx.save(simple(), path)
    given = {
        "path": path, "string": str(path), "bytes": path.read_bytes(), "proto": simple(), "graph": taso.load(simple()),
    }[form]  # fmt: skip
    session = taso.InferenceSession(given, providers=["CPUExecutionProvider"], backend="reference")
    np.testing.assert_array_equal(session.run(["y"], feeds())[0], np.maximum(feeds()["x"], 0))


def test_a_graph_runs_as_it_is_and_a_file_is_optimized() -> None:
    graph = taso.load(simple())
    assert taso.InferenceSession(graph, backend="reference").graph is graph
    assert taso.InferenceSession(simple(), backend="reference", budget=1).graph.report is not None
    with pytest.raises(taso.TasoError, match="'budget' is a setting of the search"):
        taso.InferenceSession(graph, budget=3)


def test_onnx_runtimes_options_are_followed() -> None:
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.intra_op_num_threads = 1
    session = taso.InferenceSession(simple(), sess_options=options, backend="reference")
    with pytest.raises(taso.GraphError, match="no report"):
        _ = session.graph.report
    assert session.get_session_options() is options


def test_the_callers_arguments_have_the_names_that_onnx_runtime_gives_them() -> None:
    for name in ("__init__", "run"):
        theirs = list(inspect.signature(getattr(ort.InferenceSession, name)).parameters)
        ours = list(inspect.signature(getattr(taso.InferenceSession, name)).parameters)
        common = theirs[: theirs.index("provider_options") + 1] if name == "__init__" else theirs
        assert ours[: len(common)] == common


def test_another_provider_is_warned_of_and_the_cpu_serves() -> None:
    with pytest.warns(taso.FallbackWarning, match="CUDAExecutionProvider"):
        taso.InferenceSession(simple(), providers=["CUDAExecutionProvider"], optimize=False, backend="reference")


def test_lists_become_arrays_and_sequences_stay() -> None:
    session = taso.InferenceSession(model(), optimize=False, backend="reference")
    given = {"x": [[1, -2, 3.5]], "k": [1, 2], "h": 0.5, "q": [np.ones(2, np.float32), np.zeros(2, np.float32)]}
    y, k, h, q, d = session.run(None, given)
    np.testing.assert_array_equal(y, np.asarray([[1, 0, 3.5]], np.float32))
    assert (y.dtype, k.dtype, h.dtype) == (np.float32, np.int64, np.float16)
    assert [a.tolist() for a in q] == [[1, 1], [0, 0]]
    assert d.tolist() == [1, 2]


@pytest.mark.parametrize(
    "names, change, said",
    [
        (None, {"z": None}, "input 'z' of type .* is missing"),
        (None, {"w": np.zeros(1)}, "no input 'w'.*\\['x', 'z'\\]"),
        (None, {"z": np.zeros((2, 4))}, "input 'z' must be float.*float64"),
        (None, {"z": np.zeros((2, 5), np.float32)}, "input 'z' must be float.*2×5"),
        (None, {"z": np.zeros((3, 4), np.float32)}, "n"),
        (None, {"z": [["a"]]}, "input 'z' must be"),
        (["q"], {}, "no output 'q'.*\\['y', 's'\\]"),
    ],
)
def test_a_wrong_feed_or_name_is_told_in_a_sentence(
    names: list[str] | None, change: dict[str, object], said: str
) -> None:
    session = taso.InferenceSession(simple(), optimize=False, backend="reference")
    given = {name: value for name, value in {**feeds(), **change}.items() if value is not None}
    with pytest.raises(taso.InputError, match=said):
        session.run(names, given)


def test_feeds_that_are_no_mapping_are_refused() -> None:
    session = taso.InferenceSession(simple(), optimize=False, backend="reference")
    with pytest.raises(taso.InputError, match="dictionary"):
        session.run(None, [np.zeros(2)])
