"""One runtime in a process of its own, which times blocks of runs when it is asked to.

`started` starts such a process. It imports the one runtime that it is for and nothing else (taso for its own alone), so
that its memory is that of somebody who uses this runtime. Messages are pickles between parent and child: the feeds
come first, then numbers of seconds, each answered with the times of a block; None ends it with what it needed.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import pickle
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import IO, Protocol, cast

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.generic]
Feeds = Mapping[str, Array]
Outputs = dict[str, Array]
Runner = Callable[[Feeds], Outputs]

LEAST_RUNS = 3
"""Runs that make a block, however long they take."""


# ── seen from the parent ─────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Begun:
    """What a peer says once it has run: `failure` is empty where `outputs` are there. Bytes and seconds."""

    failure: str = ""
    version: str = ""
    outputs: Outputs = field(default_factory=dict)
    seconds: float = 0.0


@dataclass(frozen=True)
class Memory:
    """Bytes resident: before the runtime was imported, the most while it ran, the most ever; None where unknown."""

    before: int | None = None
    running: int | None = None
    ever: int | None = None


class Peer:
    """A started process of a runtime. Every method gives None where the process has ended or is ended for its time."""

    def __init__(self, runtime: str, path: str, threads: int) -> None:
        command = [sys.executable, str(Path(__file__).resolve()), runtime, path, str(threads)]
        # what can be imported here can be imported there
        there = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=there)

    def begin(self, feeds: Feeds, limit: float) -> Begun:
        """Loads and runs the model once; `limit` in seconds."""
        found = self._asked(dict(feeds), limit)
        if isinstance(found, Begun):
            return found
        return Begun(f"it did not start within {limit:.0f} s" if found is _LATE else "its process ended")

    def block(self, seconds: float, limit: float = 600.0) -> list[float] | None:
        """Seconds of the runs of a block."""
        found = self._asked(seconds, limit)
        return found if isinstance(found, list) else None

    def memory(self) -> Memory:
        found = self._asked(None, 60.0)
        return found if isinstance(found, Memory) else Memory()

    def end(self) -> None:
        """Leaves no process behind."""
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                try:
                    pipe.close()
                except OSError:
                    continue
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _asked(self, message: object, limit: float) -> object:
        ours, theirs = self._process.stdin, self._process.stdout
        assert ours is not None and theirs is not None
        try:
            _send(ours, message)
            if not select.select([theirs], [], [], limit)[0]:
                self._process.kill()
                return _LATE
            return cast(object, pickle.load(theirs))
        except (EOFError, OSError, pickle.UnpicklingError):
            return None


_LATE = object()


def _send(pipe: IO[bytes], message: object) -> None:
    pickle.dump(message, pipe, protocol=5)
    pipe.flush()


# ── in the process of a runtime ──────────────────────────────────────────────────────────────────────────────────


def serve(runtime: str, path: str, threads: int) -> None:
    # what libraries print goes to stderr, and Ctrl-C is the parent's
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    replies, requests = os.fdopen(os.dup(1), "wb"), sys.stdin.buffer
    os.dup2(2, 1)
    feeds: Feeds = pickle.load(requests)
    before, started = resident("VmRSS"), time.perf_counter()
    try:
        run, version = RUNNERS[runtime](path, threads)
        outputs = {name: np.array(array) for name, array in run(feeds).items()}
        run(feeds)
    except Exception as error:  # runtimes raise what they like
        # the first line of some names nothing but who failed
        _send(replies, Begun(f"{type(error).__name__}: {' '.join(str(error).strip().splitlines()[:2])}"))
        return
    ever = resident("VmHWM")
    forgotten = forget_peak()
    _send(replies, Begun("", version, outputs, time.perf_counter() - started))
    while (seconds := pickle.load(requests)) is not None:
        _send(replies, timed(run, feeds, seconds))
    running = resident("VmHWM")
    _send(replies, Memory(before, running if forgotten else None, max(ever or 0, running or 0) or None))


def timed(run: Runner, feeds: Feeds, seconds: float) -> list[float]:
    """Seconds of runs, after one to warm up."""
    run(feeds)
    times: list[float] = []
    deadline = time.perf_counter() + seconds
    while len(times) < LEAST_RUNS or time.perf_counter() < deadline:
        started = time.perf_counter()
        run(feeds)
        times.append(time.perf_counter() - started)
    return times


def resident(which: str) -> int | None:
    """Bytes of this process by a line of Linux' /proc/self/status; None elsewhere."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return None
    found = [int(line.split()[1]) << 10 for line in lines if line.startswith(f"{which}:")]
    return found[0] if found else None


def forget_peak() -> bool:
    """Has the kernel forget the peak of this process's memory; whether it could."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


# ── runtimes ─────────────────────────────────────────────────────────────────────────────────────────────────────


class _Executable(Protocol):
    def __call__(self, feeds: Feeds) -> Outputs: ...


class _TasoGraph(Protocol): ...


class _Taso(Protocol):
    __version__: str

    def load(self, path: str) -> _TasoGraph: ...
    def compile(self, graph: _TasoGraph, *, backend: str, threads: int) -> _Executable: ...


def _taso(path: str, threads: int, backend: str) -> tuple[Runner, str]:
    """The graph by the plan that its file holds, where it holds one."""
    taso = cast(_Taso, importlib.import_module("taso"))
    program = taso.compile(taso.load(path), backend=backend, threads=threads)
    return (lambda feeds: program(feeds)), f"taso {taso.__version__}"


class _Named(Protocol):
    name: str


class _OrtSession(Protocol):
    def get_outputs(self) -> list[_Named]: ...
    def run(self, names: list[str], feeds: Feeds) -> list[Array]: ...


class _OrtOptions(Protocol):
    intra_op_num_threads: int
    inter_op_num_threads: int
    log_severity_level: int
    graph_optimization_level: object


class _OrtLevels(Protocol):
    ORT_ENABLE_ALL: object


class _Ort(Protocol):
    GraphOptimizationLevel: _OrtLevels

    def SessionOptions(self) -> _OrtOptions: ...
    def InferenceSession(self, path: str, options: _OrtOptions, providers: list[str]) -> _OrtSession: ...


def _onnxruntime(path: str, threads: int) -> tuple[Runner, str]:
    ort = cast(_Ort, importlib.import_module("onnxruntime"))
    options = ort.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    options.log_severity_level = 3
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_ALL
    session = ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    names = [o.name for o in session.get_outputs()]

    def run(feeds: Feeds) -> Outputs:
        return dict(zip(names, session.run(names, feeds), strict=True))

    return run, f"ONNX Runtime {metadata.version('onnxruntime')}"


class _OvPort(Protocol):
    def get_any_name(self) -> str: ...


class _OvRequest(Protocol):
    def infer(self, feeds: Feeds, share_inputs: bool, share_outputs: bool) -> Mapping[_OvPort, Array]: ...


class _OvCompiled(Protocol):
    outputs: list[_OvPort]

    def create_infer_request(self) -> _OvRequest: ...


class _OvCore(Protocol):
    def compile_model(self, model: str, device: str, config: Mapping[str, object]) -> _OvCompiled: ...


class _Ov(Protocol):
    def Core(self) -> _OvCore: ...


def _openvino(path: str, threads: int, precision: str = "f32") -> tuple[Runner, str]:
    core = cast(_Ov, importlib.import_module("openvino")).Core()
    # its CPU plugin computes in bfloat16 where it can, unless it is told what the file says
    wanted = {"INFERENCE_NUM_THREADS": threads, "PERFORMANCE_HINT": "LATENCY", "INFERENCE_PRECISION_HINT": precision}
    compiled = core.compile_model(path, "CPU", wanted)
    request = compiled.create_infer_request()
    names = {port: port.get_any_name() for port in compiled.outputs}

    def run(feeds: Feeds) -> Outputs:
        found = request.infer(feeds, share_inputs=True, share_outputs=True)
        return {name: found[port] for port, name in names.items()}

    return run, f"OpenVINO {metadata.version('openvino')}"


class _PyTorch(Protocol):
    def runner(self, path: str, threads: int, compiled: bool) -> tuple[Runner, str]: ...


def _torch(path: str, threads: int) -> tuple[Runner, str]:
    return cast(_PyTorch, importlib.import_module("pytorch")).runner(path, threads, compiled=False)


def _torch_compile(path: str, threads: int) -> tuple[Runner, str]:
    return cast(_PyTorch, importlib.import_module("pytorch")).runner(path, threads, compiled=True)


def _xla(path: str, threads: int) -> tuple[Runner, str]:
    return cast(_Xla, importlib.import_module("xla")).runner(path, threads)


class _Xla(Protocol):
    def runner(self, path: str, threads: int) -> tuple[Runner, str]: ...


class _Cuda(Protocol):
    def taso_runner(self, path: str, threads: int) -> tuple[Runner, str]: ...
    def torch_runner(self, path: str, threads: int, compiled: bool) -> tuple[Runner, str]: ...
    def onnxruntime_runner(self, path: str, threads: int, provider: str) -> tuple[Runner, str]: ...
    def tensorrt_runner(self, path: str, threads: int) -> tuple[Runner, str]: ...


def _cuda() -> _Cuda:
    return cast(_Cuda, importlib.import_module("cuda_runtimes"))


RUNNERS: dict[str, Callable[[str, int], tuple[Runner, str]]] = {
    "taso": partial(_taso, backend="onednn"), "onnxruntime": _onnxruntime, "openvino": _openvino, "torch": _torch,
    "torch-compile": _torch_compile, "xla": _xla,
    "taso-bf16": partial(_taso, backend="onednn bf16"),
    "openvino-bf16": partial(_openvino, precision="bf16"),
    "taso-cuda": lambda path, threads: _cuda().taso_runner(path, threads),
    "torch-cuda": lambda path, threads: _cuda().torch_runner(path, threads, False),
    "torch-cuda-compile": lambda path, threads: _cuda().torch_runner(path, threads, True),
    "onnxruntime-cuda": lambda path, threads: _cuda().onnxruntime_runner(path, threads, "CUDAExecutionProvider"),
    "onnxruntime-tensorrt": lambda path, threads: _cuda().onnxruntime_runner(
        path, threads, "TensorrtExecutionProvider"
    ),
    "tensorrt": lambda path, threads: _cuda().tensorrt_runner(path, threads),
}  # fmt: skip

NEEDS: dict[str, tuple[str, ...]] = {
    "taso": ("taso",), "onnxruntime": ("onnxruntime",), "openvino": ("openvino",), "torch": ("torch",),
    "torch-compile": ("torch",), "xla": ("tensorflow",), "taso-bf16": ("taso",), "openvino-bf16": ("openvino",),
    "taso-cuda": ("taso", "cupy", "cudnn"),
    "torch-cuda": ("torch",), "torch-cuda-compile": ("torch",), "onnxruntime-cuda": ("onnxruntime",),
    "onnxruntime-tensorrt": ("onnxruntime", "tensorrt"), "tensorrt": ("tensorrt", "cupy"),
}  # fmt: skip
"""The modules that each runtime needs."""


def missing(runtime: str) -> list[str]:
    """What a runtime needs and what is not installed; nothing is imported."""
    return [module for module in NEEDS[runtime] if importlib.util.find_spec(module) is None]


if __name__ == "__main__":
    # so that pickles speak of this module by the name that the parent knows
    sys.modules["peers"] = sys.modules["__main__"]
    for kind in (Begun, Memory):
        kind.__module__ = "peers"
    serve(sys.argv[1], sys.argv[2], int(sys.argv[3]))
