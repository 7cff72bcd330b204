"""How long ONNX Runtime takes for a kernel: what its profiler says, less what profiling adds."""

from __future__ import annotations

import functools
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from onnx import helper

from taso.backends.lowering import Kernel
from taso.backends.onnxruntime.lowering import in_blocks
from taso.backends.onnxruntime.runtime import Event, Session, events, failures_as_errors, runtime, session
from taso.backends.onnxruntime.trial import AROUND, Trial, bare_model, trial
from taso.graph.types import DType, TensorType

_LEAST_RUNS = 8
_SECONDS_WANTED = 0.02
_SECONDS_AT_MOST = 0.25
"""A run behind the largest sweep takes some hundredths of a second; `_LEAST_RUNS` of small kernels are always made."""
_CHAINS = (64, 256)

_AS_OTHERS = frozenset({"Add", "BatchNormalization", "Gemm", "MatMul", "Mul", "Sum"})
"""Operators whose names and attributes say nothing about the time of the node that they become or are folded into."""


@dataclass(frozen=True)
class Measurement:
    """Seconds that a kernel takes, and what ONNX Runtime makes of it: of two kernels that is the same for, one time is
    as good as the other."""

    seconds: float
    made_of: tuple[object, ...]


def measured(kernel: Kernel, threads: int) -> Measurement:
    """One run of the kernel in a graph: its own nodes, without those around it in a model of its own."""
    own = [e for e in profiled(trial(kernel), threads) if not _is_around(e, kernel)]
    overhead = profiling_overhead(threads)
    seconds = sum(max(typical(e.seconds) - overhead, 0.0) for e in own)
    named = tuple((step.op.name, repr(step.attrs)) for step in kernel.steps if step.op.name not in _AS_OTHERS)
    return Measurement(seconds, (tuple(sorted(e.signature for e in own)), named))


def _is_around(event: Event, kernel: Kernel) -> bool:
    """Whether a node belongs to what was put around a kernel."""
    if AROUND in event.name:
        return True
    taken = any(in_blocks(r.layout) for r in kernel.results)
    return taken and event.op == "ReorderOutput" and event.shape is not None and event.shape[2:] == [1, 1]


def typical(seconds: Sequence[float]) -> float:
    """The mean of those runs that took hardly longer than the lower quartile; the rest were disturbed.

    A mean, because the profiler counts in whole microseconds.
    """
    quartile = sorted(seconds)[len(seconds) // 4]
    return statistics.fmean(s for s in seconds if s <= 1.1 * quartile + 1.5e-6)


def profiled(model: Trial, threads: int) -> list[Event]:
    """Runs a model again and again, for a bounded time: what each of its nodes took, without the first run."""
    with tempfile.TemporaryDirectory() as folder:
        running = session(
            model.model.SerializeToString(), threads, weights=model.weights, profile=str(Path(folder) / "profile")
        )
        with failures_as_errors("ONNX Runtime cannot run a kernel"):
            _run(running, model)
            found = events(running)
    for event in found:
        del event.seconds[: len(event.seconds) > 1]
    return found


def _run(running: Session, model: Trial) -> None:
    binding = running.io_binding()
    for name, array in model.feeds.items():
        binding.bind_cpu_input(name, array)
    for name, t in model.results.items():
        place = runtime().OrtValue.ortvalue_from_numpy(np.zeros(t.static_shape, t.dtype.numpy))
        binding.bind_ortvalue_output(name, place)
    running.run_with_iobinding(binding)
    times: list[float] = []
    spent = 0.0
    while spent < _SECONDS_AT_MOST and (
        len(times) < _LEAST_RUNS or spent < _SECONDS_WANTED or spent < 2 * _SECONDS_WANTED and not _stable(times)
    ):
        started = time.perf_counter()
        running.run_with_iobinding(binding)
        times.append(time.perf_counter() - started)
        spent += times[-1]


def _stable(seconds: Sequence[float]) -> bool:
    """Whether the faster half of the runs agree to some in a hundred."""
    ordered = sorted(seconds)
    return ordered[len(ordered) // 2] < 1.05 * ordered[0]


# ── what profiling adds ──────────────────────────────────────────────────────────────────────────────────────────


@functools.cache
def profiling_overhead(threads: int) -> float:
    """Seconds by which the profiler's time of a node is longer than the node, measured on chains of small ones."""
    short, long = (_chain(length) for length in _CHAINS)
    once = [_timer(chain, threads) for chain in (short, long)]
    least = [min(run() for _ in range(300)) for run in once]
    each = (least[1] - least[0]) / (_CHAINS[1] - _CHAINS[0])
    told = min(statistics.fmean(typical(e.seconds) for e in profiled(short, threads)) for _ in range(3))
    return max(told - each, 0.0)


def _chain(length: int) -> Trial:
    t = TensorType(DType.FLOAT, (16,))
    model = bare_model([helper.make_node("Neg", [f"v{i}"], [f"v{i + 1}"], f"n{i}") for i in range(length)])
    model.graph.input.append(helper.make_tensor_value_info("v0", t.dtype.value, t.static_shape))
    model.graph.output.append(helper.make_tensor_value_info(f"v{length}", t.dtype.value, t.static_shape))
    return Trial(model, {}, {"v0": np.ones(16, np.float32)}, {f"v{length}": t})


def _timer(chain: Trial, threads: int) -> Callable[[], float]:
    running = session(chain.model.SerializeToString(), threads)
    names = list(chain.results)

    def once() -> float:
        started = time.perf_counter()
        running.run(names, chain.feeds)
        return time.perf_counter() - started

    return once
