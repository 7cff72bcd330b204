"""Depthwise convolutions, each channel by itself, by machine code written for the sizes at hand.

Up to eight pixels of a row of the result, of a register's channels each, are summed up in registers together, so that
what a tap reads serves several of them; what is done with each element follows before it is stored. Padding is not
read. Tensors have their channels last.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby

import numpy as np
from numpy.typing import NDArray

from taso.backends.pages import zeroed
from taso.backends.recipe import Call
from taso.backends.x86.assembler import (
    AVX2,
    AVX512,
    R8,
    R9,
    R10,
    R11,
    R12,
    R13,
    R14,
    RAX,
    RBX,
    RCX,
    RDI,
    RDX,
    REACH,
    RSI,
    Isa,
    Mem,
)
from taso.backends.x86.posts import Element, Finish, Post, numbered, operands
from taso.backends.x86.vectors import assembler
from taso.backends.x86.worker import Runnable, Worker

_PIXELS = 8
"""Pixels of the result that are summed up together."""
_MOST_TAPS = 20
"""Taps of a row of a filter."""
_MOST_WINDOWS = 1 << 15
"""Pixels of a row of the result times taps: code is written by looking at each."""
_FLOAT = 4
_TAIL = 1


@dataclass(frozen=True)
class Span:
    """One direction: pixels of data and of the result, taps, how far windows are apart, padding before the data."""

    size: int
    out: int
    taps: int
    stride: int
    pad: int

    def inside(self, place: int) -> tuple[bool, ...]:
        """Which taps of the window of a pixel of the result are in the picture."""
        first = place * self.stride - self.pad
        return tuple(0 <= first + tap < self.size for tap in range(self.taps))

    def blocks(self, most: int) -> list[tuple[tuple[tuple[bool, ...], ...], int]]:
        """Pixels of the result in blocks of at most so many, those together that read alike: which taps each reads, and
        how many blocks."""
        count = -(-self.out // most)
        low, more = divmod(self.out, count)
        places = iter(range(self.out))
        kinds = [
            tuple(self.inside(next(places)) for _ in range(low + (number < more))) for number in range(count)
        ]  # fmt: skip
        return [(kind, len(list(group))) for kind, group in groupby(kinds)]


@dataclass(frozen=True)
class Depthwise:
    """The convolution of each channel with its own filter, of `images` pictures."""

    images: int
    channels: int
    rows: Span
    columns: Span
    posts: tuple[Post, ...] = ()
    threads: int = 1
    isa: Isa = AVX2

    def bind(self, parallel: int, buffers: Sequence[int], others: Sequence[int]) -> tuple[Call, object]:
        """What runs it on data, filters and the result (`taso.backends.x86.launch`)."""
        data, filters, out = buffers
        return compiled(self, parallel).bind(data, filters, out, others)


def possible(rows: Span, columns: Span, channels: int) -> bool:
    """Whether a row of the filter is short, every window meets the picture, and instructions reach all."""
    if (_PIXELS * columns.stride + columns.taps + columns.size) * channels * _FLOAT >= REACH:
        return False
    meets = all(s.pad < s.taps and (s.out - 1) * s.stride - s.pad < s.size for s in (rows, columns))
    return meets and columns.taps <= _MOST_TAPS and columns.out * columns.taps <= _MOST_WINDOWS


def by_vector(filters: NDArray[np.float32], isa: Isa = AVX2) -> NDArray[np.float32]:
    """Filters (channels, rows, columns) as the code reads them: a register's channels at a time, tap by tap."""
    channels, rows, columns = filters.shape
    padded = np.zeros((-(-channels // isa.width) * isa.width, rows, columns), np.float32)
    padded[:channels] = filters
    vectors = padded.reshape(-1, isa.width, rows, columns).transpose(0, 2, 3, 1)
    out = zeroed(vectors.size * _FLOAT).view(np.float32).reshape(vectors.shape)
    out[:] = vectors
    flat: NDArray[np.float32] = out.reshape(-1)
    return flat


class Compiled:
    """The machine code of one convolution."""

    def __init__(self, problem: Depthwise, parallel: int) -> None:
        """`parallel` is the address of libgomp's GOMP_parallel."""
        writer = _Writer(problem, parallel)
        self.problem = problem
        self._runnable = Runnable(writer.asm.finish(), writer.worker.offset)
        self._routine = writer.routine

    def bind(self, data: int, filters: int, out: int, others: Sequence[int]) -> tuple[Call, object]:
        """What runs it on tensors at these addresses; `others` are those of its posts' operands, in order."""
        d, pixel = self.problem, self.problem.channels * _FLOAT
        tasks = []
        for image in range(d.images):
            for row in range(d.rows.out):
                inside = d.rows.inside(row)
                skipped = inside.index(True)
                first = image * d.rows.size + row * d.rows.stride - d.rows.pad + skipped
                tasks.append([
                    self._routine, data + (first * d.columns.size - d.columns.pad) * pixel,
                    out + (image * d.rows.out + row) * d.columns.out * pixel,
                    filters + skipped * d.columns.taps * d.isa.bytes, sum(inside),
                ])  # fmt: skip
        return self._runnable.bind(tasks, operands(d.posts, out, others))


@lru_cache(maxsize=256)
def compiled(problem: Depthwise, parallel: int) -> Compiled:
    """The machine code of a convolution, written once."""
    return Compiled(problem, parallel)


# ── writing it ───────────────────────────────────────────────────────────────────────────────────────────────────

@dataclass(frozen=True)
class _Registers:
    """Which registers hold what: the first ones sums, those before `factors` taps of the filter, the spare ones data.

    Taps for which there is no register from `least` on are read where they are used. Behind the sums, those of `work`
    are free.
    """

    factors: int
    least: int
    spare: tuple[int, ...]
    work: tuple[int, ...]


_REGISTERS = {
    AVX512: _Registers(28, _PIXELS, (28, 29, 30, 31), (28, 29, 30, 31)),
    AVX2: _Registers(14, _PIXELS, (14,), (10, 11, 12, 13)),
}


class _Writer:
    """Writes the code: a worker, and the routine for a row of the result.

    R12 is what the first tap of a block's first pixel reads, R8 that pixel of the result, RDX the filters, R13 how many
    of their rows are read; RSI, RBX and R11 go through the channels, of which R9 says how many bytes are done, and R10,
    R14 and RAX through the rows.
    """

    def __init__(self, problem: Depthwise, parallel: int) -> None:
        d = self.d = problem
        self.asm = assembler(d.isa)
        self.registers = _REGISTERS[d.isa]
        masks = {_TAIL: d.channels % d.isa.width} if d.channels % d.isa.width else {}
        self.worker = Worker(self.asm, d.threads, parallel, (R12, R8, RDX, R13), masks)
        self.finish = Finish(self.asm, self.worker, RBX, R9, self.registers.work)
        self.routine = self.asm.offset(self.asm.here())
        self._row_of_result()

    def _row_of_result(self) -> None:
        a, d, pixel = self.asm, self.d, self.d.channels * _FLOAT
        for columns, count in d.columns.blocks(_PIXELS):
            a.constant(RDI, count)
            block = a.here()
            a.copy(RSI, R12)
            a.copy(RBX, R8)
            a.copy(R11, RDX)
            a.zero(R9)
            if d.channels >= d.isa.width:
                a.constant(RCX, d.channels // d.isa.width)
                vector = a.here()
                self._block(columns, 0)
                for register in (RSI, RBX, R9):
                    a.add(register, d.isa.bytes)
                a.add(R11, d.rows.taps * d.columns.taps * d.isa.bytes)
                a.add(RCX, -1)
                a.jump(vector, "nonzero")
            if d.channels % d.isa.width:
                self._block(columns, _TAIL)
            a.add(R12, len(columns) * d.columns.stride * pixel)
            a.add(R8, len(columns) * pixel)
            a.add(RDI, -1)
            a.jump(block, "nonzero")
        a.jump(self.worker.following)

    def _block(self, columns: tuple[tuple[bool, ...], ...], mask: int) -> None:
        """Some pixels of a row of the result: `columns` has which taps each of them reads."""
        a, d, pixel = self.asm, self.d, self.d.channels * _FLOAT
        elements = [Element(z, z * pixel, 0, mask) for z in range(len(columns))]
        for element in elements:
            a.vector("xor", *(element.register,) * 3)
        a.copy(R10, RSI)
        a.copy(R14, R11)
        a.copy(RAX, R13)
        row = a.here()
        self._row(columns, mask)
        a.add(R10, d.columns.size * pixel)
        a.add(R14, d.columns.taps * d.isa.bytes)
        a.add(RAX, -1)
        a.jump(row, "nonzero")
        self.finish.write(numbered(d.posts), elements)
        for element in elements:
            a.write(Mem(RBX, element.offset), element.register, mask)

    def _row(self, columns: tuple[tuple[bool, ...], ...], mask: int) -> None:
        """Adds what one row of the filter makes of what it reads."""
        a, d, pixel = self.asm, self.d, self.d.channels * _FLOAT
        uses: dict[int, list[tuple[int, int]]] = {}
        for j in range(d.columns.taps):
            for z, inside in enumerate(columns):
                if inside[j]:
                    uses.setdefault(z * d.columns.stride + j, []).append((z, j))
        r = self.registers
        factors: dict[int, int | Mem] = {}
        for j in sorted({j for used in uses.values() for _, j in used}):
            at, register = Mem(R14, j * d.isa.bytes), r.factors - 1 - j
            factors[j] = register if register >= r.least else at
            if register >= r.least:
                a.move(register, at)
        for number, (place, used) in enumerate(sorted(uses.items())):
            read = r.spare[number % len(r.spare)]
            a.move(read, Mem(R10, place * pixel), mask)
            for z, j in used:
                a.vector("fma231", z, read, factors[j])


__all__ = ["Compiled", "Depthwise", "Span", "by_vector", "compiled", "possible"]
