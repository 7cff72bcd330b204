"""Convolutions, tap by tap and channel by channel, by machine code written for the sizes at hand.

Some pixels of a row of the result, of one or two registers of channels each, are summed up in registers together. What
is multiplied with a channel of filters is one number for all of a register; where groups have four channels, as many of
them as fit a register are computed at once, and it is one number for each group. What is done with each element follows
before it is stored. Padding is not read. Tensors have their channels last.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import gcd

import numpy as np
from numpy.typing import NDArray

from taso.backends.pages import zeroed
from taso.backends.recipe import Call
from taso.backends.x86.assembler import (
    AVX2,
    QUAD,
    R8,
    R9,
    R10,
    R12,
    R13,
    R14,
    RAX,
    RBX,
    RCX,
    RDI,
    RDX,
    RSI,
    Isa,
    Mem,
)
from taso.backends.x86.depthwise import Span
from taso.backends.x86.functions import Function, temporaries_of
from taso.backends.x86.posts import Element, Finish, Post, numbered, operands
from taso.backends.x86.vectors import assembler
from taso.backends.x86.worker import Runnable, Worker

_FLOAT = 4
_PAIR = 2
_MOST_PIXELS = 14
_UNROLLED = 4
"""Channels of data in one turn of a loop."""
_TEMPORARIES = 4


@dataclass(frozen=True)
class Direct:
    """A convolution of `images` pictures of `channels` by `filters`, in `groups`.

    The filters of a group are whole registers, or there are four of them for four channels. With `by_row` all of a row
    of the result is computed before the next one is, else all rows by some filters.
    """

    images: int
    channels: int
    filters: int
    groups: int
    rows: Span
    columns: Span
    posts: tuple[Post, ...] = ()
    threads: int = 1
    isa: Isa = AVX2
    by_row: bool = True

    @property
    def inner(self) -> int:
        """Channels that a filter reads."""
        return self.channels // self.groups

    @property
    def each(self) -> int:
        """Filters of a group."""
        return self.filters // self.groups

    @property
    def spread(self) -> bool:
        """Whether several groups are in a register."""
        return self.each < self.isa.width

    @property
    def vectors(self) -> int:
        """Registers of channels that are computed together."""
        return _PAIR if self.each % (_PAIR * self.isa.width) == 0 else 1

    @property
    def together(self) -> int:
        """Filters that are computed together."""
        return self.vectors * self.isa.width

    @property
    def possible(self) -> bool:
        """Whether filters fill registers in one of the two ways."""
        quads = self.each == self.inner == QUAD and self.filters % self.isa.width == 0
        return quads or self.each % self.isa.width == 0

    @property
    def pixels(self) -> int:
        """Pixels that are summed up together."""
        own = QUAD + 2 if self.spread else self.vectors + 1
        temporaries = max((temporaries_of(p) for p in self.posts if isinstance(p, Function)), default=0)
        return min((self.isa.registers - max(own, temporaries)) // self.vectors, _MOST_PIXELS)

    def bind(self, parallel: int, buffers: Sequence[int], others: Sequence[int]) -> tuple[Call, object]:
        """What runs it on data, filters and the result (`taso.backends.x86.launch`)."""
        data, filters, out = buffers
        return compiled(self, parallel).bind(data, filters, out, others)


def by_together(filters: NDArray[np.float32], together: int) -> NDArray[np.float32]:
    """Filters (filters, channels, rows, columns) as the code reads them: so many at a time, by tap and channel."""
    count, channels, rows, columns = filters.shape
    vectors = filters.reshape(count // together, together, channels, rows, columns).transpose(0, 3, 4, 2, 1)
    out = zeroed(vectors.size * _FLOAT).view(np.float32).reshape(vectors.shape)
    out[:] = vectors
    flat: NDArray[np.float32] = out.reshape(-1)
    return flat


class Compiled:
    """The machine code of one convolution."""

    def __init__(self, problem: Direct, parallel: int) -> None:
        """`parallel` is the address of libgomp's GOMP_parallel."""
        writer = _Writer(problem, parallel)
        self.problem = problem
        self._runnable = Runnable(writer.asm.finish(), writer.worker.offset)
        self._routine = writer.routine

    def bind(self, data: int, filters: int, out: int, others: Sequence[int]) -> tuple[Call, object]:
        """What runs it on tensors at these addresses; `others` are those of its posts' operands, in order."""
        d = self.problem
        places = [(image, row) for image in range(d.images) for row in range(d.rows.out)]
        parts = range(d.filters // d.together)
        order = (
            [(*place, part) for place in places for part in parts] if d.by_row
            else [(*place, part) for part in parts for place in places]
        )  # fmt: skip
        tasks = [self._task(*task, data, filters, out) for task in order]
        return self._runnable.bind(tasks, operands(d.posts, out, others))

    def _task(self, image: int, row: int, part: int, data: int, filters: int, out: int) -> list[int]:
        d, pixel, column = self.problem, self.problem.channels * _FLOAT, part * self.problem.together
        inside = d.rows.inside(row)
        skipped = inside.index(True)
        first = image * d.rows.size + row * d.rows.stride - d.rows.pad + skipped
        tap = d.columns.taps * d.inner * d.together
        return [
            self._routine,
            data + (first * d.columns.size - d.columns.pad) * pixel + column // d.each * d.inner * _FLOAT,
            out + ((image * d.rows.out + row) * d.columns.out * d.filters + column) * _FLOAT,
            filters + (part * d.rows.taps + skipped) * tap * _FLOAT, sum(inside), column * _FLOAT,
        ]  # fmt: skip


@lru_cache(maxsize=256)
def compiled(problem: Direct, parallel: int) -> Compiled:
    """The machine code of a convolution, written once."""
    return Compiled(problem, parallel)


# ── writing it ───────────────────────────────────────────────────────────────────────────────────────────────────


class _Writer:
    """Writes the code: a worker, and the routine for a row of the result by some filters.

    R12 is what the first tap of a block's first pixel reads, R8 that pixel of the result, RDX the filters, R13 how many
    of their rows are read, R9 how many bytes of a pixel are before; R10, R14 and RAX go through the rows, RSI and RCX
    through the channels, and RBX is R8.
    """

    def __init__(self, problem: Direct, parallel: int) -> None:
        d = self.d = problem
        self.asm = assembler(d.isa)
        sums = d.pixels * d.vectors
        behind = range(sums, d.isa.registers)
        # filters, and what is read of the data
        self.factors, self.read = behind[: QUAD if d.spread else d.vectors], behind[QUAD if d.spread else d.vectors :]
        self.worker = Worker(self.asm, d.threads, parallel, (R12, R8, RDX, R13, R9), {})
        self.finish = Finish(self.asm, self.worker, RBX, R9, tuple(behind)[-_TEMPORARIES:])
        self.routine = self.asm.offset(self.asm.here())
        self._row_of_result()

    def _row_of_result(self) -> None:
        a, d = self.asm, self.d
        for columns, count in d.columns.blocks(d.pixels):
            a.constant(RDI, count)
            block = a.here()
            self._block(columns)
            a.add(R12, len(columns) * d.columns.stride * d.channels * _FLOAT)
            a.add(R8, len(columns) * d.filters * _FLOAT)
            a.add(RDI, -1)
            a.jump(block, "nonzero")
        a.jump(self.worker.following)

    def _block(self, columns: tuple[tuple[bool, ...], ...]) -> None:
        """Some pixels of a row of the result: `columns` has which taps each of them reads."""
        a, d = self.asm, self.d
        elements = [
            Element(z * d.vectors + v, z * d.filters * _FLOAT + v * d.isa.bytes, v * d.isa.bytes)
            for z in range(len(columns)) for v in range(d.vectors)
        ]  # fmt: skip
        for element in elements:
            a.vector("xor", *(element.register,) * 3)
        a.copy(RBX, R8)
        a.copy(R10, R12)
        a.copy(R14, RDX)
        a.copy(RAX, R13)
        row = a.here()
        for tap in range(d.columns.taps):
            used = [z for z, inside in enumerate(columns) if inside[tap]]
            if not used:
                a.add(R14, d.inner * d.together * _FLOAT)
            elif d.spread:
                self._quads(used, tap)
            else:
                self._channels(used, tap)
        a.add(R10, d.columns.size * d.channels * _FLOAT)
        a.add(RAX, -1)
        a.jump(row, "nonzero")
        self.finish.write(numbered(d.posts), elements)
        for element in elements:
            a.write(Mem(RBX, element.offset), element.register)

    def _place(self, z: int, tap: int) -> int:
        """How far what a pixel reads at a tap is behind what the first one reads at the first."""
        return (z * self.d.columns.stride + tap) * self.d.channels * _FLOAT

    def _channels(self, used: Sequence[int], tap: int) -> None:
        """Adds what a tap makes of all channels of the data."""
        a, d = self.asm, self.d
        step = gcd(d.inner, _UNROLLED)
        a.copy(RSI, R10)
        a.constant(RCX, d.inner // step)
        turn = a.here()
        for channel in range(step):
            for v in range(d.vectors):
                a.move(self.factors[v], Mem(R14, (channel * d.vectors + v) * d.isa.bytes))
            for number, z in enumerate(used):
                read = self.read[number % len(self.read)]
                a.broadcast(read, Mem(RSI, self._place(z, tap) + channel * _FLOAT))
                for v in range(d.vectors):
                    a.vector("fma231", z * d.vectors + v, read, self.factors[v])
        a.add(RSI, step * _FLOAT)
        a.add(R14, step * d.together * _FLOAT)
        a.add(RCX, -1)
        a.jump(turn, "nonzero")

    def _quads(self, used: Sequence[int], tap: int) -> None:
        """Adds what a tap makes of the four channels of each group."""
        a, d = self.asm, self.d
        for channel in range(QUAD):
            a.move(self.factors[channel], Mem(R14, channel * d.isa.bytes))
        pixel, one = self.read[:2]
        for z in used:
            a.move(pixel, Mem(R10, self._place(z, tap)))
            for channel in range(QUAD):
                a.spread(one, pixel, channel)
                a.vector("fma231", z, one, self.factors[channel])
        a.add(R14, QUAD * d.isa.bytes)


__all__ = ["Compiled", "Direct", "by_together", "compiled"]
