"""The oneDNN backend: costs measured kernel by kernel, graphs compiled into bound programs."""

from __future__ import annotations

import functools
import math
import os
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from taso.backends.base import Array
from taso.backends.lowering import Kernel, Layouts, Lowering, Operand, is_view
from taso.backends.onednn.executor import Program, threads_in_force
from taso.backends.onednn.kernels import KERNEL_FORMAT, NotInPlace, OneDNNFusion, design
from taso.backends.onednn.library import library
from taso.backends.onednn.places import Block, tensor_bytes
from taso.backends.onednn.recipe import Call, Recipe
from taso.backends.reference import ReferenceBackend
from taso.graph.errors import BackendError
from taso.graph.graph import Graph
from taso.graph.operator import Trait
from taso.graph.types import DType, TensorType

_SAMPLES = 15
_SECONDS_WANTED = 0.02
_SECONDS_AT_MOST = 0.25
_SECONDS_PER_SAMPLE = 5e-5
_ALIGNMENT = 64


class OneDNNBackend:
    """Runs graphs with oneDNN on `threads` threads (by default as many as OpenMP would use).

    Raises `BackendUnavailable` where the library cannot be loaded.
    """

    name = "onednn"
    measures = True

    def __init__(self, threads: int | None = None) -> None:
        self._library = library()
        self.threads = checked_threads(threads) if threads is not None else self._library.get_max_threads()
        # vectors of 16 floats, or 8: a block of channels is one
        block = 16 if self._library.isa.startswith("avx512") else 8
        self.lowering = Lowering(Layouts(block), OneDNNFusion())

    def device_key(self) -> str:
        """Processor, instruction set, version of oneDNN, threads, and the version of what is built around it."""
        parts = (
            processor(), self._library.isa, f"oneDNN {self._library.version_string}", f"{self.threads} threads",
            f"block {self.lowering.layouts.block}", f"kernels {KERNEL_FORMAT}",
        )  # fmt: skip
        return "; ".join(parts)

    def measure(self, kernel: Kernel) -> float:
        """Seconds of one run, on buffers of its own filled with random numbers (the same each time).

        A low quantile of repeated runs after a warm-up. 0 for what moves nothing. Kernels of opaque operators are not
        run, since nothing says which inputs they take: the reference backend's formula stands in.
        """
        layouts = self.lowering.layouts
        if is_view(kernel) or not kernel.steps and layouts.alike(
            kernel.operands[0].type, kernel.operands[0].layout, kernel.results[0].layout
        ):
            return 0.0
        tensors = [o.type for o in (*kernel.operands, *kernel.results)]
        if any(s.op.has(Trait.OPAQUE) for s in kernel.steps) or not all(map(_measurable, tensors)):
            return ReferenceBackend().measure(kernel)
        with threads_in_force(self._library, self.threads), np.errstate(all="ignore"):
            return timed(_bound(kernel, layouts))

    def compile(self, graph: Graph, threads: int | None = None) -> Program:
        """A program for `graph` on `threads` threads (by default the backend's)."""
        return Program(graph, self.lowering, self.threads if threads is None else checked_threads(threads))


def checked_threads(threads: int) -> int:
    most = max(256, 4 * (os.cpu_count() or 1))
    if not 1 <= threads <= most:
        # OpenMP ends the process where it cannot start a thread
        raise BackendError(f"the number of threads must be from 1 to {most}, not {threads}")
    return threads


@functools.lru_cache(maxsize=1)
def processor() -> str:
    """The processor's name, family, model and stepping as Linux tells them."""
    wanted = ("model name", "cpu family", "model", "stepping")
    found: dict[str, str] = {}
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            name, _, value = line.partition(":")
            if name.strip() in wanted:
                found.setdefault(name.strip(), value.strip())
    except OSError:
        return f"unknown processor ({os.cpu_count()} cores)"
    return " ".join(found[w] for w in wanted if w in found)


# ── measuring ────────────────────────────────────────────────────────────────────────────────────────────────────


def _measurable(t: TensorType) -> bool:
    return t.other is None and t.static and t.dtype not in (DType.STRING, DType.UNDEFINED)


class _RandomSupply:
    """Constants of a kernel that is measured: random, kept as long as this is."""

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel
        self._blocks: dict[tuple[int, str], Block] = {}
        self._arrays: dict[int, Array] = {}

    def array(self, operand: int) -> Array:
        if operand not in self._arrays:
            self._arrays[operand] = random_array(self._kernel.operands[operand], operand)
        return self._arrays[operand]

    def keep(self, operand: int, label: str, make: Callable[[Array], Block]) -> Block:
        key = (operand, label)
        if key not in self._blocks:
            self._blocks[key] = make(self.array(operand))
        return self._blocks[key]


def random_array(operand: Operand, seed: int) -> Array:
    """Reproducible values: normal floats (weights scaled by 1 / √fan-in, vectors positive), else 0 or 1."""
    shape, dtype = operand.type.static_shape, operand.type.dtype
    generator = np.random.default_rng(seed)
    if not dtype.is_float:
        return generator.integers(0, 2, shape).astype(dtype.numpy)
    values = generator.standard_normal(shape, np.float32)
    if operand.constant and len(shape) < 2:
        values = np.abs(values) + np.float32(0.5)
    elif operand.constant:
        values /= np.float32(math.sqrt(max(math.prod(shape[1:]), 1)))
    return values.astype(dtype.numpy, copy=False)


def _bound(kernel: Kernel, layouts: Layouts) -> list[tuple[Call, object]]:
    supply = _RandomSupply(kernel)
    recipe, shared = design(kernel, layouts, supply), None
    for operand in recipe.sums:
        # as in a program, where the memory of what is added last is mostly free
        try:
            recipe, shared = design(kernel, layouts, supply, operand), operand
            break
        except NotInPlace:
            continue
    return _on_buffers(kernel, recipe, shared)


def _on_buffers(kernel: Kernel, recipe: Recipe, shared: int | None) -> list[tuple[Call, object]]:
    buffers = [_filled(o, i) for i, o in enumerate(kernel.operands)]
    results = [_buffer(tensor_bytes(r.type)) for r in kernel.results]
    if shared is not None:
        results[0] = buffers[shared]
    scratch = [_buffer(size) for size in recipe.scratch]
    calls = recipe.bind([b.address for b in buffers], [b.address for b in results], [b.address for b in scratch])
    return [(call, (kept, buffers, results, scratch, recipe)) for call, kept in calls]


def _buffer(size: int) -> Block:
    array = np.ones(size + _ALIGNMENT, np.uint8)
    return Block(array.ctypes.data + -array.ctypes.data % _ALIGNMENT, array)


def _filled(operand: Operand, seed: int) -> Block:
    """A buffer with random values; of a random tensor every layout is as good."""
    if operand.constant:
        return Block(0, None)
    values = random_array(operand, seed)
    block = _buffer(values.nbytes)
    if values.nbytes:
        owner = block.owner
        if isinstance(owner, np.ndarray):
            start = block.address - owner.ctypes.data
            owner[start : start + values.nbytes] = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
    return block


def timed(calls: list[tuple[Call, object]]) -> float:
    """Seconds that all calls take together: the lower quartile of repeated, warmed-up runs, each of some 50 µs."""
    runs = [call for call, _ in calls]

    def once() -> None:
        for run in runs:
            if run():
                raise BackendError("oneDNN failed to run a kernel that was to be measured")

    started = time.perf_counter()
    once()
    first = time.perf_counter() - started
    if first > _SECONDS_AT_MOST:
        return first
    once()
    started = time.perf_counter()
    once()
    estimate = max(time.perf_counter() - started, 1e-7)
    batch = max(1, math.ceil(_SECONDS_PER_SAMPLE / estimate))
    samples: list[float] = []
    spent, budget = 0.0, min(max(_SECONDS_WANTED, 3 * estimate), _SECONDS_AT_MOST)
    while len(samples) < 3 or spent < budget and (len(samples) < _SAMPLES or not _stable(samples)):
        started = time.perf_counter()
        for _ in range(batch):
            once()
        taken = time.perf_counter() - started
        samples.append(taken / batch)
        spent += taken
        if spent > _SECONDS_AT_MOST:
            break
    return _quartile(samples)


def _quartile(samples: list[float]) -> float:
    return sorted(samples)[len(samples) // 4]


def _stable(samples: list[float]) -> bool:
    """Whether the fastest half of the runs agree to one in a hundred."""
    ordered = sorted(samples)
    return ordered[len(ordered) // 2] < 1.01 * ordered[0]


__all__ = ["OneDNNBackend", "checked_threads", "processor", "random_array", "timed"]
