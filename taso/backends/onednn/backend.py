"""The oneDNN backend: costs measured kernel by kernel, graphs compiled into bound programs."""

from __future__ import annotations

import functools
import itertools
import math
import os
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from taso.backends.base import Array, checked_threads
from taso.backends.lowering import Kernel, Layouts, Lowering, Operand, is_view
from taso.backends.onednn.executor import NAME, Program, threads_in_force
from taso.backends.onednn.kernels import KERNEL_FORMAT, NotInPlace, OneDNNFusion, design
from taso.backends.onednn.library import library
from taso.backends.onednn.needs import overwritable, scratch_of
from taso.backends.onednn.places import Block, tensor_bytes
from taso.backends.onednn.recipe import Call, Recipe
from taso.backends.onednn.winograd import algorithms
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
# weights of a kernel that is measured lie in as many places as make up _COLD_BYTES together; where the most copies
# that are made would fit a second-level cache all the same, one will do
_COLD_BYTES = 16 << 20
_MOST_COPIES = 16
_CACHED_BYTES = 4 << 20


class OneDNNBackend:
    """Runs graphs with oneDNN on `threads` threads (by default as many as OpenMP would use).

    Raises `BackendUnavailable` where the library cannot be loaded.
    """

    name = NAME
    measures = True
    plans = True

    def __init__(self, threads: int | None = None) -> None:
        self._library = library()
        self.threads = checked_threads(threads) if threads is not None else self._library.get_max_threads()
        # vectors of 16 floats, or 8: a block of channels is one
        block = 16 if self._library.isa.startswith("avx512") else 8
        layouts = Layouts(block)
        self.lowering = Lowering(
            layouts, OneDNNFusion(), algorithms, in_place=overwritable, scratch=scratch_of(layouts, self.threads)
        )

    def device_key(self) -> str:
        """Processor, instruction set, version of oneDNN, threads, and the version of what is built around it."""
        parts = (
            processor(), self._library.isa, f"oneDNN {self._library.version_string}", f"{self.threads} threads",
            f"block {self.lowering.layouts.block}", f"kernels {KERNEL_FORMAT}",
        )  # fmt: skip
        return "; ".join(parts)

    def measure(self, kernel: Kernel) -> float:
        """Seconds of one run, on buffers of its own filled with random numbers (the same each time).

        A low quantile of repeated runs after a warm-up. Runs go round over several copies of the kernel's weights: in a
        model it meets its weights once per inference, when those of all other kernels have passed through the cache.
        0 for what moves nothing. Kernels of opaque operators are not run, since nothing says which inputs they take:
        the reference backend's formula stands in.
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
            return timed(_copies(kernel, layouts))

    def compile(self, graph: Graph, threads: int | None = None) -> Program:
        """A program for `graph` on `threads` threads (by default the backend's)."""
        return Program(graph, self.lowering, self.threads if threads is None else checked_threads(threads))


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
    """Constants of a kernel that is measured: random, laid out in blocks of its own, kept as long as this is.

    `arrays` and `taken` are what several supplies of one kernel share: random values, and addresses of blocks in use.
    """

    def __init__(self, kernel: Kernel, arrays: dict[int, Array], taken: set[int]) -> None:
        self._kernel = kernel
        self._blocks: dict[tuple[int, str], Block] = {}
        self._arrays = arrays
        self._taken = taken

    def array(self, operand: int) -> Array:
        if operand not in self._arrays:
            self._arrays[operand] = random_array(self._kernel.operands[operand], operand)
        return self._arrays[operand]

    def keep(self, operand: int, label: str, make: Callable[[Array], Block]) -> Block:
        key = (operand, label)
        if key not in self._blocks:
            block = make(self.array(operand))
            if block.address in self._taken:
                # the array itself, which another copy of the kernel works on already
                block = make(self.array(operand).copy())
            self._taken.add(block.address)
            self._blocks[key] = block
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


def _copies(kernel: Kernel, layouts: Layouts) -> list[list[tuple[Call, object]]]:
    """The kernel bound to weights in several places, as many as it takes to keep them from staying in the cache.

    What it computes from and into lies in one place: there, in a model, the kernel before has just been.
    """
    weights = sum(o.type.nbytes for o in kernel.operands if o.constant)
    count = min(_MOST_COPIES, -(-_COLD_BYTES // weights)) if weights * _MOST_COPIES > _CACHED_BYTES else 1
    arrays: dict[int, Array] = {}
    taken: set[int] = set()
    supplies = [_RandomSupply(kernel, arrays, taken) for _ in range(count)]
    recipe, shared = _recipe(kernel, layouts, supplies[0])
    recipes = [recipe, *(design(kernel, layouts, supply, shared) for supply in supplies[1:])]
    buffers = [_filled(o, i) for i, o in enumerate(kernel.operands)]
    results = [_buffer(tensor_bytes(r.type)) for r in kernel.results]
    if shared is not None:
        results[0] = buffers[shared]
    scratch = [_buffer(size) for size in recipe.scratch]
    kept = (buffers, results, scratch, recipes)
    places = [[b.address for b in blocks] for blocks in (buffers, results, scratch)]
    return [[(call, (own, kept)) for call, own in r.bind(*places)] for r in recipes]


def _recipe(kernel: Kernel, layouts: Layouts, supply: _RandomSupply) -> tuple[Recipe, int | None]:
    """How the kernel runs, and the operand whose memory its result takes, as in a program where that is mostly free."""
    recipe = design(kernel, layouts, supply)
    for operand in recipe.sums:
        try:
            return design(kernel, layouts, supply, operand), operand
        except NotInPlace:
            continue
    return recipe, None


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


def timed(copies: list[list[tuple[Call, object]]]) -> float:
    """Seconds that one copy's calls take: the lower quartile of repeated, warmed-up rounds, each of some 50 µs."""
    rounds = itertools.cycle([[call for call, _ in calls] for calls in copies])

    def once() -> None:
        for run in next(rounds):
            if run():
                raise BackendError("oneDNN failed to run a kernel that was to be measured")

    started = time.perf_counter()
    for _ in copies:
        once()
    if time.perf_counter() - started > _SECONDS_AT_MOST * len(copies):
        return (time.perf_counter() - started) / len(copies)
    started = time.perf_counter()
    for _ in copies:
        once()
    estimate = max((time.perf_counter() - started) / len(copies), 1e-7)
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


__all__ = ["OneDNNBackend", "processor", "random_array", "timed"]
