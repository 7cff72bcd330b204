"""Models timed side by side in short blocks that take turns, each in a process of its own.

A process for each, so that nobody's spinning threads take the cores from whoever comes next; blocks in turns, and in
both directions, so that a machine that slows down slows all of them.
"""

from __future__ import annotations

import importlib
import importlib.util
import multiprocessing
import os
import signal
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import metadata
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from typing import Protocol, cast

import numpy as np

from taso import api
from taso.backends.base import Array
from taso.backends.lowering import BF16, INT8
from taso.backends.select import NAMES
from taso.graph.errors import BackendError, BackendUnavailable
from taso.search.verify import median_interval, relative_error

Feeds = Mapping[str, Array]
Outputs = dict[str, Array]
Runner = Callable[[Feeds], Outputs]

FOREIGN = {"onnxruntime": ("onnxruntime",), "openvino": ("openvino",), "torch": ("torch", "onnx2torch")}
"""Runtimes of others, and the modules that each needs."""
RUNTIMES = tuple(dict.fromkeys((*NAMES, f"onednn {BF16}", f"onednn {INT8}", *FOREIGN)))
"""Where a model can be run: our backends and others' runtimes; ONNX Runtime is run as it is by itself."""
LEAST_RUNS = 3
"""Runs that make a block, however long they take."""


@dataclass(frozen=True)
class Contestant:
    """A model file (`path`) on a runtime: the name of a backend of taso's, or one of `FOREIGN`."""

    runtime: str
    path: str
    label: str


@dataclass
class Result:
    """How a contestant did. Times in seconds: `blocks` are the medians of its blocks, `times` all of its runs.

    `failure` says why there are none. `outputs` are those on the common inputs.
    """

    contestant: Contestant
    version: str = ""
    failure: str = ""
    outputs: Outputs = field(default_factory=dict)
    blocks: list[float] = field(default_factory=list)
    times: list[float] = field(default_factory=list)

    def faster_than(self, other: Result) -> tuple[float, float, float]:
        """Time of `other` over this one's: median over the rounds, and the ends of its 95 % interval."""
        ratios = [a / b for a, b in zip(other.blocks, self.blocks, strict=True)]
        return (statistics.median(ratios), *median_interval(ratios))

    def error_against(self, other: Result) -> float:
        """Largest max|a − b| / max|b| of the outputs, where `other` has b."""
        return max((relative_error(self.outputs[k], v) for k, v in other.outputs.items()), default=0.0)


def available(runtime: str) -> bool:
    """Whether the modules of a runtime of others are installed; nothing is imported."""
    return all(map(installed, FOREIGN[runtime]))


def installed(module: str) -> bool:
    """Whether a module can be imported; it is not."""
    return importlib.util.find_spec(module) is not None


def contest(
    contestants: Sequence[Contestant], feeds: Feeds, threads: int, rounds: int = 20, seconds: float = 0.3,
    tell: Callable[[float, str], None] = lambda done, doing: None,
) -> list[Result]:  # fmt: skip
    """Runs every contestant in `rounds` blocks of `seconds`, in turns.

    `tell` hears how much of `rounds` is done and what is going on. A contestant that cannot run has a `failure`.
    """
    results = [Result(c) for c in contestants]
    with _processes() as start:
        pipes: list[tuple[Result, Connection]] = []
        for result in results:
            tell(0, f"starting {result.contestant.label} on {result.contestant.runtime}")
            pipe = start(result.contestant, feeds, threads)
            if _begun(result, pipe):
                pipes.append((result, pipe))
        for turn in range(rounds):
            tell(turn, f"round {turn + 1} of {rounds}")
            for result, pipe in pipes if turn % 2 == 0 else reversed(pipes):
                if not result.failure:
                    _block(result, pipe, seconds)
    return results


def _begun(result: Result, pipe: Connection) -> bool:
    try:
        outputs, said = cast("tuple[Outputs | None, str]", pipe.recv())
    except EOFError:
        outputs, said = None, "its process ended"
    if outputs is None:
        result.failure = said
        return False
    result.outputs, result.version = outputs, said
    return True


def _block(result: Result, pipe: Connection, seconds: float) -> None:
    try:
        pipe.send(seconds)
        times = cast("list[float]", pipe.recv())
    except (EOFError, OSError):
        result.failure = "its process ended while it was timed"
        return
    result.blocks.append(statistics.median(times))
    result.times.extend(times)


Start = Callable[[Contestant, Feeds, int], Connection]


@contextmanager
def _processes() -> Iterator[Start]:
    """Gives what starts a contestant's process; none is left in the end."""
    context = multiprocessing.get_context("spawn")
    started: list[tuple[SpawnProcess, Connection]] = []

    def start(contestant: Contestant, feeds: Feeds, threads: int) -> Connection:
        ours, theirs = context.Pipe()
        process = context.Process(target=_serve, args=(theirs, contestant, feeds, threads), daemon=True)
        process.start()
        theirs.close()
        started.append((process, ours))
        return ours

    try:
        yield start
    finally:
        for _, pipe in started:
            # whoever waits for the next block gets the end of the pipe instead
            pipe.close()
        for process, _ in started:
            process.join(5)
            if process.is_alive():
                process.kill()
                process.join()


# ── in the process of a contestant ───────────────────────────────────────────────────────────────────────────────


def _serve(pipe: Connection, contestant: Contestant, feeds: Feeds, threads: int) -> None:
    """Sends outputs and version, or None and what is wrong; then for each number of seconds the times of a block."""
    # Ctrl-C is the parent's, and so is stdout
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.dup2(2, 1)
    try:
        run, version = runner(contestant.runtime, contestant.path, threads)
        pipe.send((run(feeds), version))
    except Exception as error:  # runtimes of others raise what they like
        pipe.send((None, _first_line(error)))
        return
    try:
        while True:
            pipe.send(_timed(run, feeds, pipe.recv()))
    except (EOFError, OSError):
        return


def _timed(run: Runner, feeds: Feeds, seconds: float) -> list[float]:
    run(feeds)
    times: list[float] = []
    deadline = time.perf_counter() + seconds
    while len(times) < LEAST_RUNS or time.perf_counter() < deadline:
        started = time.perf_counter()
        run(feeds)
        times.append(time.perf_counter() - started)
    return times


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def runner(runtime: str, path: str, threads: int) -> tuple[Runner, str]:
    """What runs the ONNX file `path` on a runtime, and the runtime's name with its version.

    Raises `BackendUnavailable` for a runtime that is not there, `BackendError` for a name that is none.
    """
    if runtime in _RUNNERS:
        if not available(runtime):
            missing = [m for m in FOREIGN[runtime] if not installed(m)]
            raise BackendUnavailable(f"{runtime} needs {' and '.join(missing)}: pip install {' '.join(missing)}")
        return _RUNNERS[runtime](path, threads)
    if runtime not in RUNTIMES:
        raise BackendError(f"there is no runtime '{runtime}': there are {', '.join(RUNTIMES)}")
    program = api.compile(path, runtime, threads)
    return (lambda feeds: program(feeds)), f"taso on {runtime}"


class _OrtSession(Protocol):
    def get_outputs(self) -> list[_Named]: ...
    def run(self, names: list[str], feeds: Feeds) -> list[Array]: ...


class _Named(Protocol):
    name: str


class _OrtOptions(Protocol):
    intra_op_num_threads: int
    inter_op_num_threads: int
    log_severity_level: int


class _Ort(Protocol):
    def SessionOptions(self) -> _OrtOptions: ...
    def InferenceSession(self, path: str, options: _OrtOptions, providers: list[str]) -> _OrtSession: ...


def _onnxruntime(path: str, threads: int) -> tuple[Runner, str]:
    ort = cast(_Ort, importlib.import_module("onnxruntime"))
    options = ort.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    options.log_severity_level = 3
    session = ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    names = [o.name for o in session.get_outputs()]

    def run(feeds: Feeds) -> Outputs:
        return dict(zip(names, session.run(names, feeds), strict=True))

    return run, f"ONNX Runtime {metadata.version('onnxruntime')}"


class _OvPort(Protocol):
    def get_any_name(self) -> str: ...


class _OvCompiled(Protocol):
    outputs: list[_OvPort]

    def __call__(self, feeds: Feeds) -> Mapping[_OvPort, Array]: ...


class _OvCore(Protocol):
    def compile_model(self, model: str, device: str, config: Mapping[str, object]) -> _OvCompiled: ...


class _Ov(Protocol):
    def Core(self) -> _OvCore: ...


def _openvino(path: str, threads: int) -> tuple[Runner, str]:
    core = cast(_Ov, importlib.import_module("openvino")).Core()
    # its CPU plugin computes in bfloat16 where it can, unless it is told what the file says
    wanted = {"INFERENCE_NUM_THREADS": threads, "PERFORMANCE_HINT": "LATENCY", "INFERENCE_PRECISION_HINT": "f32"}
    compiled = core.compile_model(path, "CPU", wanted)

    def run(feeds: Feeds) -> Outputs:
        found = compiled(feeds)
        return {port.get_any_name(): np.array(found[port]) for port in compiled.outputs}

    return run, f"OpenVINO {metadata.version('openvino')}"


class _TorchTensor(Protocol):
    def numpy(self) -> Array: ...


class _Torch(Protocol):
    def set_num_threads(self, threads: int) -> None: ...
    def from_numpy(self, array: Array) -> _TorchTensor: ...
    def inference_mode(self) -> _Mode: ...


class _Mode(Protocol):
    def __enter__(self) -> object: ...
    def __exit__(self, *error: object) -> None: ...


class _TorchModule(Protocol):
    def eval(self) -> _TorchModule: ...
    def __call__(self, *tensors: _TorchTensor) -> _TorchTensor | Sequence[_TorchTensor]: ...


class _Onnx2Torch(Protocol):
    def convert(self, path: str) -> _TorchModule: ...


def _torch(path: str, threads: int) -> tuple[Runner, str]:
    torch = cast(_Torch, importlib.import_module("torch"))
    module = cast(_Onnx2Torch, importlib.import_module("onnx2torch")).convert(path).eval()
    torch.set_num_threads(threads)
    graph = api.load(path)
    inputs, outputs = graph.input_names, [name for name, _ in graph.outputs]

    def run(feeds: Feeds) -> Outputs:
        with torch.inference_mode():
            found = module(*(torch.from_numpy(np.asarray(feeds[name])) for name in inputs))
        tensors = list(found) if isinstance(found, (tuple, list)) else [cast(_TorchTensor, found)]
        return {name: tensor.numpy() for name, tensor in zip(outputs, tensors, strict=True)}

    return run, f"PyTorch {metadata.version('torch')} through onnx2torch"


_RUNNERS: dict[str, Callable[[str, int], tuple[Runner, str]]] = {
    "onnxruntime": _onnxruntime, "openvino": _openvino, "torch": _torch,
}  # fmt: skip
