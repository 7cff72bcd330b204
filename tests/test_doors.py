"""Models of PyTorch and TensorFlow come in where those packages are there, and a sentence says what is missing."""

from __future__ import annotations

import importlib.util
import sys
import types
from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import pytest

import taso
from taso import doors

HAS_TORCH = all(importlib.util.find_spec(name) is not None for name in ("torch", "onnxscript"))
needs_torch = pytest.mark.skipif(not HAS_TORCH, reason="torch and onnxscript are not installed")
TOLERANCE = 1e-5


def class_of(module: str, name: str, **members: object) -> type:
    return type(name, (), {"__module__": module, **members})


# ── without the packages ─────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def without(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if nothing but taso were installed."""
    monkeypatch.setattr(doors, "_is_there", lambda module: False)


@pytest.mark.usefixtures("without")
@pytest.mark.parametrize(
    "module, name", [("torch.nn.modules.module", "Module"), ("torch.export.exported_program", "ExportedProgram")]
)
def test_a_pytorch_model_without_pytorch_says_what_to_install(module: str, name: str) -> None:
    mine = type("Mine", (class_of(module, name),), {})
    with pytest.raises(taso.ModelError, match=r"^the PyTorch model Mine needs .* pip install torch onnxscript$"):
        taso.load(mine(), example_inputs=(1,))


@pytest.mark.usefixtures("without")
def test_tensorflow_models_without_tensorflow_say_what_to_install(tmp_path: Path) -> None:
    (tmp_path / "saved_model.pb").write_bytes(b"")
    (tmp_path / "net.keras").write_bytes(b"")
    for path, what in ((tmp_path, "SavedModel"), (tmp_path / "net.keras", "Keras file")):
        with pytest.raises(taso.ModelError, match=rf"{what} '.*' needs .* pip install tensorflow tf2onnx$"):
            taso.load(path)


def test_what_is_no_model_is_refused_by_its_type() -> None:
    for thing in (3, None, class_of("elsewhere", "Module")()):
        with pytest.raises(taso.ModelError, match=type(thing).__name__):
            taso.load(thing)


def test_a_folder_that_is_no_saved_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(taso.ModelError, match="without a saved_model.pb"):
        taso.load(tmp_path)


def test_a_keras_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(taso.ModelError, match="is not there"):
        taso.load(tmp_path / "net.h5")


def test_examples_are_for_pytorch_models_only(tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    onnx.save(onnx.parser.parse_model(RELU), path)
    with pytest.raises(taso.ModelError, match="example_inputs"):
        taso.load(path, example_inputs=(1,))


# ── with stand-ins for the exporters ─────────────────────────────────────────────────────────────────────────────

RELU = '<ir_version: 8, opset_import: ["": 17]> g (float[N, 3] x) => (float[N, 3] y) { y = Relu(x) }'


class Part:
    def __init__(self, training: bool) -> None:
        self.training = training


class Exporter(types.ModuleType):
    """Stands in for `torch.onnx` and notes what it was asked for."""

    def __init__(self, fails: bool = False) -> None:
        super().__init__("torch.onnx")
        self.calls: list[tuple[object, ...]] = []
        self.fails = fails

    def export(self, model: object, args: object, **settings: object) -> Exporter:
        self.calls.append((args, settings["kwargs"], settings["dynamic_shapes"], [p.training for p in PARTS]))
        if self.fails:
            raise RuntimeError("advice\nmore advice") from ValueError("\x1b[96mthe cause\x1b[0m\nand its story")
        return self

    def save(self, path: str, external_data: bool) -> None:
        onnx.save(onnx.parser.parse_model(RELU), path)


PARTS = [Part(True), Part(False), Part(True)]
Net = type("Net", (class_of("torch.nn.modules.module", "Module", modules=lambda self: iter(PARTS)),), {})


def install(monkeypatch: pytest.MonkeyPatch, exporter: Exporter) -> None:
    monkeypatch.setitem(sys.modules, "torch", types.ModuleType("torch"))
    monkeypatch.setitem(sys.modules, "torch.onnx", exporter)
    monkeypatch.setattr(doors, "_is_there", lambda module: True)


@pytest.mark.parametrize(
    "examples, args, kwargs",
    [((1, 2), (1, 2), None), ([1], (1,), None), (1, (1,), None), ({"x": 1}, (), {"x": 1})],
)
def test_examples_reach_the_exporter(
    monkeypatch: pytest.MonkeyPatch, examples: object, args: object, kwargs: object
) -> None:
    exporter = Exporter()
    install(monkeypatch, exporter)
    graph = taso.load(Net(), example_inputs=examples, dynamic_shapes=("d",))
    assert [n.op.name for n in graph.operators] == ["Relu"]
    assert exporter.calls == [(args, kwargs, ("d",), [False, False, False])]
    assert [p.training for p in PARTS] == [True, False, True], "every part is as it was before"


def test_a_module_without_examples_says_that_it_needs_them(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, Exporter())
    with pytest.raises(taso.ModelError, match="example_inputs="):
        taso.load(Net())


def test_what_the_exporter_refuses_is_one_sentence_with_the_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, Exporter(fails=True))
    with pytest.raises(taso.ModelError, match="^the PyTorch model Net cannot be written as ONNX: the cause$"):
        taso.load(Net(), example_inputs=1)
    assert [p.training for p in PARTS] == [True, False, True]


FAKE_TF2ONNX = """
import sys, onnx, onnx.parser
kind, source, _, target = sys.argv[1:]
if "bad" in source:
    print("a warning", file=sys.stderr)
    sys.exit("ValueError: it cannot")
model = onnx.parser.parse_model('''MODEL''')
model.doc_string = kind
onnx.save(model, target)
""".replace("MODEL", RELU)


@pytest.fixture
def fake_tf2onnx(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "packages" / "tf2onnx"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "convert.py").write_text(FAKE_TF2ONNX)
    monkeypatch.setenv("PYTHONPATH", str(package.parent))
    monkeypatch.setattr(doors, "_is_there", lambda module: True)


@pytest.mark.usefixtures("fake_tf2onnx")
def test_tensorflow_models_go_through_the_command_of_tf2onnx(tmp_path: Path) -> None:
    (tmp_path / "saved_model.pb").write_bytes(b"")
    (tmp_path / "net.h5").write_bytes(b"")
    assert taso.export_onnx(taso.load(tmp_path)).doc_string == "--saved-model"
    graph = taso.load(str(tmp_path / "net.h5"))
    assert taso.export_onnx(graph).doc_string == "--keras"
    found = taso.compile(graph, "reference")({"x": -np.ones((2, 3), np.float32)})
    assert not found["y"].any(), "the model is there when its file is gone"


@pytest.mark.usefixtures("fake_tf2onnx")
def test_what_tf2onnx_refuses_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "bad.keras").write_bytes(b"")
    with pytest.raises(taso.ModelError, match="^the Keras file '.*' cannot be written as ONNX: ValueError: it cannot$"):
        taso.load(tmp_path / "bad.keras")


# ── with PyTorch itself ──────────────────────────────────────────────────────────────────────────────────────────


@needs_torch
def test_a_pytorch_module_computes_what_it_computed() -> None:
    torch = importlib.import_module("torch")
    torch.manual_seed(0)
    nn = torch.nn
    net = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(0.5), nn.Flatten(), nn.Linear(512, 5)
    )
    net[1].running_mean.normal_()
    x = torch.randn(2, 3, 8, 8)
    graph = taso.load(net, example_inputs=x)
    best = taso.optimize(graph, backend="reference", budget=10)
    assert net.training and net[3].training
    with torch.no_grad():
        wanted = net.eval()(x).numpy()
    (found,) = taso.compile(best, "reference")({graph.input_names[0]: x.numpy()}).values()
    assert np.max(np.abs(found - wanted)) <= TOLERANCE * np.max(np.abs(wanted))


@needs_torch
def test_an_exported_program_with_an_open_batch_needs_no_examples() -> None:
    torch = importlib.import_module("torch")
    net, x = torch.nn.Linear(4, 3).eval(), torch.randn(2, 4)
    program = torch.export.export(net, (x,), dynamic_shapes=({0: torch.export.Dim("batch")},))
    graph = taso.load(program)
    assert len(graph.symbols) == 1
    given = np.random.default_rng(0).standard_normal((5, 4)).astype(np.float32)
    (found,) = taso.compile(graph, "reference")({graph.input_names[0]: given}).values()
    wanted = net(torch.from_numpy(given)).detach().numpy()
    assert np.max(np.abs(found - wanted)) <= TOLERANCE * np.max(np.abs(wanted))


@needs_torch
def test_a_module_that_cannot_be_exported_is_refused_with_the_cause() -> None:
    torch = importlib.import_module("torch")

    class Branches(torch.nn.Module):  # type: ignore[misc, name-defined]  # torch is not there when types are checked
        def forward(self, x: object) -> object:
            return x if x.sum() > 0 else -x  # type: ignore[attr-defined, operator]  # as above

    with pytest.raises(taso.ModelError, match="^the PyTorch model Branches cannot be written as ONNX: .*data-dep"):
        taso.load(Branches(), example_inputs=torch.randn(2, 3))
