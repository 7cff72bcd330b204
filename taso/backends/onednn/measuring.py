"""What one run of a kernel takes in a model: timed among surroundings like those that it has there.

In a model a kernel meets its weights once per inference, when those of all other kernels have gone through the caches,
and its operands where a kernel before has just written them. So each run that counts is preceded by a sweep through
memory and by a write of what it computes from, both by oneDNN on the threads that will run it.
"""

from __future__ import annotations

import math
import statistics
import sys
import threading
import time
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from taso.backends import aside
from taso.backends.lowering import Kernel, Lowering, Operand
from taso.backends.onednn.kernels import NotInPlace, design
from taso.backends.onednn.memory import DataType, Memory, MemoryDesc
from taso.backends.onednn.primitives import DST, SCRATCHPAD, SRC, Primitive, reduction, reorder
from taso.backends.onednn.recipe import Call, Recipe
from taso.backends.pages import zeroed
from taso.backends.sampling import RandomSupply, random_array
from taso.graph.errors import BackendError

METHOD = 2
"""Goes up when times would come out otherwise: costs measured before count no more."""

_SAMPLES = 15
_LEAST_SAMPLES = 5
_SECONDS_WANTED = 0.04
_SECONDS_AT_MOST = 0.25
_LEAST_SWEPT, _MOST_SWEPT = 8 << 20, 128 << 20
_WEIGHTS_SWEPT = 64
"""How many times the bytes of a kernel's weights are read before it: a model reads so much between two uses of them."""
_ROOM_BYTES = 1 << 20
"""What a kernel's operands and results may have together for its results to lie where others have just been."""
_ROW = 1 << 14
_NEAR = 1.02

Bytes = NDArray[np.uint8]


def measured(kernel: Kernel, lowering: Lowering, sweeps: Sweeps, reads: int | None = None) -> float:
    """Seconds of one run on buffers of its own, filled with random numbers (the same each time).

    The median of single runs in such surroundings as a model has, one whose weights have `reads` bytes where that is
    given. Runs during which the system gave the processor to others do not count while there are enough without; all
    ends after a bounded time.
    """
    supply = RandomSupply(kernel)
    recipe, shared = _recipe(kernel, lowering, supply)
    operands = [_room(o) for o in kernel.operands]
    results = [zeroed(r.nbytes) for r in kernel.results]
    if shared is not None:
        results[0] = operands[shared]
    scratch = [zeroed(size) for size in recipe.scratch]
    bound = recipe.bind(*([b.ctypes.data for b in blocks] for blocks in (operands, results, scratch)))
    around = [sweeps.of(swept_before(kernel, reads))]
    if sum(b.nbytes for b in (*operands, *results)) <= _ROOM_BYTES:
        around += [_write(b, np.ones(b.nbytes, np.uint8)) for b in results if b.nbytes]
    for number, (block, operand) in enumerate(zip(operands, kernel.operands, strict=True)):
        if block.nbytes:
            around.append(_write(block, _stored(operand, number)))
    return timed([call for call, _ in bound], around)


def _recipe(kernel: Kernel, lowering: Lowering, supply: RandomSupply) -> tuple[Recipe, int | None]:
    """How the kernel runs, and the operand whose memory its result takes, as in a program where that is mostly free."""
    recipe = design(kernel, lowering.layouts, supply, precision=lowering.precision)
    for operand in recipe.sums:
        try:
            return design(kernel, lowering.layouts, supply, operand, precision=lowering.precision), operand
        except NotInPlace:
            continue
    return recipe, None


def _room(operand: Operand) -> Bytes:
    return zeroed(0 if operand.constant else operand.nbytes)


def _stored(operand: Operand, seed: int) -> Bytes:
    """The bytes of random values as an operand lies in memory."""
    values = np.ascontiguousarray(random_array(operand, seed)).reshape(-1)
    # the upper half of a float32 is a bfloat16
    return (values.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8) if operand.narrow else values.view(np.uint8)


# ── surroundings ─────────────────────────────────────────────────────────────────────────────────────────────────


def swept_before(kernel: Kernel, reads: int | None = None) -> int:
    """Bytes that are read before a kernel: of all the model's weights those that are not its own, at most."""
    weights = sum(o.type.nbytes for o in kernel.operands if o.constant)
    wanted = min(max(_WEIGHTS_SWEPT * weights, _LEAST_SWEPT), _MOST_SWEPT)
    # whole powers of two, so that there are few
    most = 1 << (wanted - 1).bit_length()
    if reads is None:
        return most
    others = max(reads - weights, _LEAST_SWEPT)
    return min(1 << round(math.log2(others)), most)


class Sweeps:
    """Reads of much memory, which take everything else out of the caches; they share what they read."""

    def __init__(self) -> None:
        self._read: Bytes | None = None
        self._made: dict[int, Call] = {}
        self._lock = threading.Lock()

    def release(self) -> None:
        """Gives the memory back; the next sweep takes it anew."""
        with self._lock:
            self._read = None
            self._made.clear()

    def of(self, size: int) -> Call:
        """One that reads so many bytes."""
        with self._lock:
            if self._read is None:
                self._read = zeroed(_MOST_SWEPT)
                # pages that nobody has written to are all one
                self._read.fill(1)
                aside.set_aside(self._read)
            if size not in self._made:
                rows = size // (4 * _ROW)
                source = MemoryDesc.strided((rows, _ROW), DataType.F32, (_ROW, 1))
                target = MemoryDesc.strided((rows, 1), DataType.F32, (1, 1))
                memory = Memory(source, self._read.ctypes.data, self._read)
                self._made[size] = _bound(reduction(source, target, "max"), memory, Memory.allocate(target))
            return self._made[size]


def _write(block: Bytes, values: Bytes) -> Call:
    """Writes values into a buffer; of a random tensor every layout is as good."""
    size = block.nbytes
    # in floats where they divide it; nothing is computed with them
    dtype, count = (DataType.F32, size // 4) if size % 4 == 0 else (DataType.U8, size)
    desc = MemoryDesc.strided((count,), dtype, (1,))
    source = zeroed(size)
    np.copyto(source, values)
    return _bound(reorder(desc, desc), Memory(desc, source.ctypes.data, source), Memory(desc, block.ctypes.data, block))


def _bound(primitive: Primitive, source: Memory, target: Memory) -> Call:
    arguments = {SRC: source, DST: target}
    if SCRATCHPAD in primitive.arguments:
        arguments[SCRATCHPAD] = Memory.allocate(primitive.arguments[SCRATCHPAD])
    return primitive.bind(arguments)


# ── the clock ────────────────────────────────────────────────────────────────────────────────────────────────────


def timed(calls: Sequence[Call], around: Sequence[Call] = ()) -> float:
    """Seconds that the calls take, one after the other, when `around` has run: the median of several times."""

    def once() -> float:
        for prepare in around:
            prepare()
        started = time.perf_counter()
        for call in calls:
            if call():
                raise BackendError("oneDNN failed to run a kernel that was to be measured")
        return time.perf_counter() - started

    begun = time.perf_counter()
    first = once()
    if first > _SECONDS_AT_MOST:
        return first
    undisturbed: list[float] = []
    every: list[float] = []
    while not _enough(undisturbed, every, time.perf_counter() - begun):
        interrupted = interruptions()
        every.append(once())
        if interruptions() == interrupted:
            undisturbed.append(every[-1])
    return statistics.median(undisturbed if len(undisturbed) >= 3 else every)


def _enough(undisturbed: Sequence[float], every: Sequence[float], spent: float) -> bool:
    if len(every) < 3:
        return False
    if spent > _SECONDS_AT_MOST or len(every) >= 4 * _SAMPLES:
        return True
    return len(undisturbed) >= _SAMPLES or len(undisturbed) >= _LEAST_SAMPLES and (
        spent > _SECONDS_WANTED or _stable(undisturbed)
    )  # fmt: skip


if sys.platform == "win32":

    def interruptions() -> int:
        """How often the system has taken the processor from this process, where it says so."""
        return 0

else:
    import resource

    def interruptions() -> int:
        """How often the system has taken the processor from this process, where it says so."""
        return resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw


def _stable(samples: Sequence[float]) -> bool:
    """Whether the faster half of the runs agree."""
    ordered = sorted(samples)
    return ordered[len(ordered) // 2] < _NEAR * ordered[0]


__all__ = ["METHOD", "RandomSupply", "Sweeps", "measured", "random_array", "timed"]
