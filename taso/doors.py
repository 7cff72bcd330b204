"""Models of other frameworks, turned into ONNX by those who know them: PyTorch's exporter, and tf2onnx.

None of these packages is needed, or imported, unless such a model is given.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Protocol, Union, cast

from taso.graph.errors import ModelError

Inputs = Union[Sequence[object], Mapping[str, object], object]

_PYTORCH = ("Module", "ExportedProgram")
_KERAS = (".keras", ".h5")


def is_pytorch(source: object) -> bool:
    """Whether `source` is a `torch.nn.Module` or a `torch.export.ExportedProgram`; torch is not imported to know."""
    return any(c.__module__.split(".")[0] == "torch" and c.__name__ in _PYTORCH for c in type(source).__mro__)


def is_tensorflow(source: object) -> bool:
    """Whether `source` is the folder of a TensorFlow SavedModel, or a Keras file."""
    if not isinstance(source, (str, os.PathLike)):
        return False
    path = Path(source)
    return path.is_dir() or path.suffix.lower() in _KERAS


@contextlib.contextmanager
def onnx_file(source: object, example_inputs: Inputs | None, dynamic_shapes: object = None) -> Iterator[Path]:
    """A file with the ONNX form of a model of PyTorch or TensorFlow, there as long as the block runs.

    Raises `ModelError` where a package is missing, examples are needed, or the exporter refuses the model.
    """
    with tempfile.TemporaryDirectory(prefix="taso_") as folder:
        path = Path(folder) / "model.onnx"
        if is_pytorch(source):
            _export_pytorch(source, example_inputs, dynamic_shapes, path)
        else:
            _export_tensorflow(Path(cast("str | os.PathLike[str]", source)), example_inputs, path)
        yield path


# ── PyTorch ──────────────────────────────────────────────────────────────────────────────────────────────────────


class _Program(Protocol):
    def save(self, destination: str, *, external_data: bool | None = None) -> None: ...


class _Exporter(Protocol):
    """`torch.onnx`, as far as it is used (its exporter built on torch.export, of PyTorch 2.5 and newer)."""

    def export(
        self, model: object, args: tuple[object, ...], *, kwargs: dict[str, object] | None, dynamo: bool,
        dynamic_shapes: object, verbose: bool,
    ) -> _Program | None: ...  # fmt: skip


class _Part(Protocol):
    training: bool


class _Module(Protocol):
    def modules(self) -> Iterator[_Part]: ...


def _export_pytorch(source: object, example_inputs: Inputs | None, dynamic_shapes: object, path: Path) -> None:
    what = f"the PyTorch model {type(source).__name__}"
    _require(what, {"torch": "torch", "onnxscript": "onnxscript"})
    if example_inputs is None and hasattr(source, "modules"):
        raise ModelError(f"{what} is traced on examples of its inputs: give them, load(model, example_inputs=(...,))")
    exporter = cast(_Exporter, importlib.import_module("torch.onnx"))
    args, kwargs = _arguments(example_inputs)
    try:
        with _at_inference(source):
            program = exporter.export(
                source, args, kwargs=kwargs or None, dynamo=True, dynamic_shapes=dynamic_shapes, verbose=False
            )
        if program is None:
            raise ModelError(f"{what} cannot be written as ONNX: this PyTorch has no exporter built on torch.export")
        program.save(str(path), external_data=True)
    except ModelError:
        raise
    except Exception as error:
        # whatever the exporter meets in a user's code comes out as it was raised there
        raise ModelError(f"{what} cannot be written as ONNX: {_first_line(error)}") from error


def _arguments(example_inputs: Inputs | None) -> tuple[tuple[object, ...], dict[str, object]]:
    if example_inputs is None:
        return (), {}
    if isinstance(example_inputs, Mapping):
        return (), {str(name): value for name, value in example_inputs.items()}
    if isinstance(example_inputs, (tuple, list)):
        return tuple(example_inputs), {}
    return (example_inputs,), {}


@contextlib.contextmanager
def _at_inference(source: object) -> Iterator[None]:
    """Has every part of a module behave as at inference, and puts back what was."""
    parts = list(cast(_Module, source).modules()) if hasattr(source, "modules") else []
    before = [part.training for part in parts]
    for part in parts:
        part.training = False
    try:
        yield
    finally:
        for part, training in zip(parts, before, strict=True):
            part.training = training


# ── TensorFlow ───────────────────────────────────────────────────────────────────────────────────────────────────


def _export_tensorflow(source: Path, example_inputs: Inputs | None, path: Path) -> None:
    keras = not source.is_dir()
    what = f"the Keras file '{source}'" if keras else f"the TensorFlow SavedModel '{source}'"
    if keras and not source.is_file():
        raise ModelError(f"{what} cannot be read: it is not there")
    if not keras and not (source / "saved_model.pb").is_file():
        raise ModelError(f"'{source}' is a folder without a saved_model.pb: neither an ONNX file nor a SavedModel")
    if example_inputs is not None:
        raise ModelError(f"{what} says itself what its inputs are: example_inputs is for PyTorch models")
    _require(what, {"tensorflow": "tensorflow", "tf2onnx": "tf2onnx"})
    # a process of its own: TensorFlow keeps its memory and its threads for as long as a process lives
    command = [
        sys.executable, "-m", "tf2onnx.convert", "--keras" if keras else "--saved-model", str(source),
        "--output", str(path),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    if done.returncode or not path.is_file():
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        raise ModelError(f"{what} cannot be written as ONNX: {lines[-1] if lines else 'tf2onnx says nothing'}")


# ── what both need ───────────────────────────────────────────────────────────────────────────────────────────────


def _require(what: str, packages: Mapping[str, str]) -> None:
    """Raises `ModelError` where a module is missing; `packages` gives, for each, what to install."""
    missing = [package for module, package in packages.items() if not _is_there(module)]
    if missing:
        raise ModelError(f"{what} needs the packages {' and '.join(missing)}: pip install {' '.join(missing)}")


def _is_there(module: str) -> bool:
    try:
        return module in sys.modules or importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False


def _first_line(error: BaseException) -> str:
    """What was wrong in the end, in one line: exporters wrap their errors in advice."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return _COLOURS.sub("", lines[0]) if lines else type(error).__name__


_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
