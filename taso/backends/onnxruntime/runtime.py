"""The package onnxruntime behind typed doors: sessions, their options, and what its profiler says."""

from __future__ import annotations

import functools
import importlib
import json
import os
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Protocol, TypedDict, cast

import onnx
from onnx import ModelProto, TensorProto, helper

from taso.backends.base import Array
from taso.graph.errors import BackendError, BackendUnavailable

PROVIDER = "CPUExecutionProvider"
NCHWC = "com.microsoft.nchwc"
"""The domain of ONNX Runtime's operators on images whose channels lie in blocks."""
_SILENT = 4
"""Of the severities of what is logged that of what ends the process: errors are raised, too."""
_CODES = re.compile(r"^\[ONNXRuntimeError\] : \d+ : \w+ : ")
_TIMED = "_kernel_time"


class _Options(Protocol):
    intra_op_num_threads: int
    inter_op_num_threads: int
    log_severity_level: int
    enable_profiling: bool
    profile_file_prefix: str
    optimized_model_filepath: str

    def add_session_config_entry(self, key: str, value: str) -> None: ...
    def add_external_initializers(self, names: Sequence[str], values: Sequence[object]) -> None: ...


class _Named(Protocol):
    name: str


class Binding(Protocol):
    """An `onnxruntime.IOBinding`."""

    def bind_cpu_input(self, name: str, array: Array) -> None: ...
    def bind_ortvalue_output(self, name: str, value: object) -> None: ...


class Session(Protocol):
    """An `onnxruntime.InferenceSession`."""

    def run(self, names: Sequence[str], feeds: Mapping[str, Array]) -> list[Array]: ...
    def run_with_iobinding(self, binding: Binding) -> None: ...
    def io_binding(self) -> Binding: ...
    def get_outputs(self) -> Sequence[_Named]: ...
    def end_profiling(self) -> str: ...


class _Values(Protocol):
    def ortvalue_from_numpy(self, array: Array) -> object: ...


class _Runtime(Protocol):
    __version__: str
    OrtValue: _Values

    def SessionOptions(self) -> _Options: ...
    def InferenceSession(self, model: bytes | str, options: _Options, providers: Sequence[str]) -> Session: ...


@functools.lru_cache(maxsize=1)
def runtime() -> _Runtime:
    """The package, imported when it is first asked for; raises `BackendUnavailable` where it is not installed."""
    try:
        return cast(_Runtime, importlib.import_module("onnxruntime"))
    except ImportError as error:
        raise BackendUnavailable(
            f"the backend 'onnxruntime' needs the package onnxruntime: pip install 'taso[onnxruntime]' ({error})"
        ) from error


@contextmanager
def failures_as_errors(what: str) -> Iterator[None]:
    """Raises what ONNX Runtime raises, whose exceptions have no common class, as a `BackendError`."""
    try:
        yield
    except BackendError:
        raise
    except Exception as error:
        lines = _CODES.sub("", str(error)).strip().splitlines()
        raise BackendError(f"{what}: {lines[0] if lines else type(error).__name__}") from error


def session(
    model: bytes | str, threads: int, *, weights: Mapping[str, Array] | None = None, profile: str = "",
    optimized: str = "",
) -> Session:  # fmt: skip
    """A session for a model (its bytes, or the path of its file) at ONNX Runtime's default level of optimization.

    Its threads spin while a run lasts, as they do by default, but not between runs, when they would take the cores
    from whoever runs next. `weights` are the values of tensors that the model says are elsewhere; they are not copied.
    `profile` begins the name of the profiler's file, `optimized` is where the optimized model is written. Raises
    `BackendError` with what ONNX Runtime says where it cannot run the model.
    """
    module = runtime()
    options = module.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    options.log_severity_level = _SILENT
    options.add_session_config_entry("session.force_spinning_stop", "1")
    if profile:
        options.enable_profiling, options.profile_file_prefix = True, profile
    if optimized:
        options.optimized_model_filepath = optimized
    with failures_as_errors("ONNX Runtime cannot run the model"):
        if weights:
            values = [module.OrtValue.ortvalue_from_numpy(array) for array in weights.values()]
            options.add_external_initializers(list(weights), values)
        return module.InferenceSession(model, options, [PROVIDER])


# ── what it makes of a model ─────────────────────────────────────────────────────────────────────────────────────


def optimized(model: bytes | str, threads: int = 1) -> ModelProto:
    """The model that ONNX Runtime runs in place of the one given, weights included."""
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "optimized.onnx")
        session(model, threads, optimized=path)
        return onnx.load(path)


@functools.lru_cache(maxsize=1)
def channels_in_block() -> int:
    """How many channels lie together where ONNX Runtime puts them in blocks, 0 where it never does here."""
    weight = helper.make_tensor("w", TensorProto.FLOAT, (1, 1, 1, 1), [1.0])
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, (1, 1, 2, 2)) for name in "xy")
    graph = helper.make_graph([helper.make_node("Conv", ["x", "w"], ["y"])], "probe", [x], [y], [weight])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)
    found = optimized(model.SerializeToString()).graph
    blocked = next((n for n in found.node if n.domain == NCHWC and n.op_type == "Conv"), None)
    sizes = {t.name: t.dims[0] for t in found.initializer if t.dims}
    return sizes[blocked.input[1]] if blocked is not None else 0


# ── the profiler ─────────────────────────────────────────────────────────────────────────────────────────────────


class _Arguments(TypedDict, total=False):
    op_name: str
    node_index: str
    input_type_shape: list[dict[str, list[int]]]
    output_type_shape: list[dict[str, list[int]]]


class _Event(TypedDict):
    cat: str
    name: str
    dur: int
    args: _Arguments


class Event:
    """A node: the name of its `op`, the `shape` of its first input, and the `seconds` of its runs in order.

    Nodes of one operator on operands of the same types have one `signature`; a convolution, with an activation or
    without, that adds a bias takes as long as one without.
    """

    def __init__(self, name: str, arguments: _Arguments) -> None:
        self.name = name
        self.op = arguments.get("op_name", "")
        shapes = arguments.get("input_type_shape") or [{}]
        self.shape = next(iter(shapes[0].values()), None)
        if self.op in ("Conv", "FusedConv"):
            shapes = [s for s in shapes if any(len(shape) > 1 for shape in s.values())]
        self.signature = f"{self.op} {shapes} {arguments.get('output_type_shape')}"
        self.seconds: list[float] = []


def events(profiled: Session) -> list[Event]:
    """Ends the profiling of a session: its nodes with the seconds they took, in order of their first run."""
    path = profiled.end_profiling()
    try:
        told = cast("list[_Event]", json.loads(Path(path).read_text("utf-8")))
    finally:
        with suppress(OSError):
            os.unlink(path)
    found: dict[str, Event] = {}
    for event in told:
        if event.get("cat") == "Node" and event["name"].endswith(_TIMED):
            index = event["args"].get("node_index", "")
            if index not in found:
                found[index] = Event(event["name"][: -len(_TIMED)], event["args"])
            found[index].seconds.append(event["dur"] * 1e-6)
    return list(found.values())
