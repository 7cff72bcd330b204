"""Products of matrices of float32, by machine code written for their sizes.

oneDNN's products are fast while the second matrix is in a cache, and in a model it is not: it holds weights, which an
inference meets once. Waiting for them then comes on top of computing. Here the columns that come next are asked for
(PREFETCHT1) while these are multiplied, so that reading them takes no time as long as computing takes longer.

The second matrix lies in panels of two registers' columns, one behind the other. A block of some rows times a panel
stays in registers for the whole sum (Goto and van de Geijn 2008, "Anatomy of High-Performance Matrix Multiplication"),
and what is done with each element follows before it is stored. Of AVX-512's registers 28 hold 14 rows, of AVX2's 12
hold 6.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from taso.backends.pages import zeroed
from taso.backends.recipe import Call
from taso.backends.x86.assembler import (
    AVX2,
    AVX512,
    LINE,
    R8,
    R9,
    R11,
    R12,
    R13,
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
from taso.backends.x86.functions import Function, temporaries_of
from taso.backends.x86.posts import ByColumn, ByElement, Element, Finish, Post, numbered, operands
from taso.backends.x86.vectors import assembler
from taso.backends.x86.worker import Runnable, Worker

PANEL = 2
"""Registers in a row of a panel."""
_SPARE = {AVX512: 2, AVX2: 1}
"""Registers that elements of the left matrix are read into."""
_UNROLLED = 4
"""Steps of a sum in one turn of its loop."""
_FLOAT = 4
_TAIL = 1
"""The mask of a last vector that is not whole."""
_MOST_TEMPORARIES = 4


@dataclass(frozen=True)
class Product:
    """Matrices (rows × inner) · (inner × columns), `batch` of them; strides are between rows, in elements.

    Of a batch, left matrices and results begin so many elements apart (0: one behind the other), and panels lie one
    behind the other. `chunk` rows are multiplied with all columns before the next ones are.
    """

    rows: int
    inner: int
    columns: int
    left_stride: int
    out_stride: int
    posts: tuple[Post, ...] = ()
    batch: int = 1
    chunk: int = 1 << 20
    threads: int = 1
    left_apart: int = 0
    out_apart: int = 0
    isa: Isa = AVX2

    def bind(self, parallel: int, buffers: Sequence[int], others: Sequence[int]) -> tuple[Call, object]:
        """What runs it on the left matrix, the panels and the result (`taso.backends.x86.launch`)."""
        left, panels, out = buffers
        return compiled(self, parallel).bind(left, panels, out, others)

    @property
    def fits(self) -> bool:
        """Whether instructions reach all rows of a block."""
        return (most_rows(self.isa) + 1) * max(self.left_stride, self.out_stride) * _FLOAT < REACH

    @property
    def block(self) -> int:
        """Rows of a block: as many as there are registers for, beside those that what is done with elements takes."""
        temporaries = max((temporaries_of(p) for p in self.posts if isinstance(p, Function)), default=0)
        spare = max(temporaries, PANEL + _SPARE[self.isa])
        return (self.isa.registers - spare) // PANEL

    @property
    def chunks(self) -> list[tuple[int, int]]:
        """First row and number of rows of each chunk; all but the last are alike."""
        size = -(-self.rows // -(-self.rows // self.chunk))
        return [(start, min(size, self.rows - start)) for start in range(0, self.rows, size)]

    @property
    def panels(self) -> list[_Panels]:
        """The panels of one matrix, the last one by itself where it has fewer columns."""
        whole, rest = divmod(self.columns, PANEL * self.isa.width)
        last = _Panels(whole, 1, -(-rest // self.isa.width), bool(rest % self.isa.width))
        return [_Panels(0, whole, PANEL, False)] * bool(whole) + [last] * bool(rest)

    @property
    def packed_columns(self) -> int:
        """Columns of the second matrix as it lies in panels."""
        return -(-self.columns // self.isa.width) * self.isa.width


@dataclass(frozen=True)
class _Panels:
    """Panels of equal width from number `first` on; `masked` where the last vector is not whole."""

    first: int
    count: int
    vectors: int
    masked: bool


def most_rows(isa: Isa) -> int:
    """Rows of the largest block."""
    return (isa.registers - PANEL - _SPARE[isa]) // PANEL


def in_panels(matrices: NDArray[np.float32], isa: Isa = AVX2) -> NDArray[np.float32]:
    """The second matrices (batch, inner, columns) as a product reads them: what is missing in a last vector is 0."""
    batch, inner, columns = matrices.shape
    width = PANEL * isa.width
    whole, rest = divmod(columns, width)
    padded = -(-rest // isa.width) * isa.width
    length = inner * (whole * width + padded)
    # in lines of the cache, and on large pages
    out = zeroed(batch * length * _FLOAT).view(np.float32).reshape(batch, length)
    edge = inner * whole * width
    panels = matrices[:, :, : whole * width].reshape(batch, inner, whole, width)
    out[:, :edge] = panels.transpose(0, 2, 1, 3).reshape(batch, -1)
    out[:, edge:].reshape(batch, inner, padded)[:, :, :rest] = matrices[:, :, whole * width :]
    return out.reshape(-1)


# ── running it ───────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class _Task:
    """A chunk of rows of one matrix of the batch times some panels."""

    matrix: int
    row: int
    rows: int
    panels: _Panels


class Compiled:
    """The machine code of one product."""

    def __init__(self, product: Product, parallel: int) -> None:
        """`parallel` is the address of libgomp's GOMP_parallel."""
        writer = _Writer(product, parallel)
        self.product = product
        self._runnable = Runnable(writer.asm.finish(), writer.worker.offset)
        self._routines = writer.routines

    def bind(self, left: int, panels: int, out: int, others: Sequence[int]) -> tuple[Call, object]:
        """What runs the product on matrices at these addresses; `others` are those of its posts' operands, in order."""
        tasks = [self._line(task, left, panels, out) for task in _tasks(self.product)]
        return self._runnable.bind(tasks, operands(self.product.posts, out, others))

    def _line(self, task: _Task, left: int, panels: int, out: int) -> list[int]:
        product, width = self.product, PANEL * self.product.isa.width
        column = task.panels.first * width
        left_apart = product.left_apart or product.rows * product.left_stride
        out_apart = product.out_apart or product.rows * product.out_stride
        row, above = task.matrix * left_apart + task.row * product.left_stride, task.matrix * out_apart
        weight = task.matrix * product.inner * product.packed_columns + product.inner * column
        routine = self._routines[task.rows, task.panels.vectors, task.panels.masked]
        return [
            routine, left + row * _FLOAT, panels + weight * _FLOAT,
            out + (above + task.row * product.out_stride + column) * _FLOAT, column * _FLOAT, task.panels.count,
        ]  # fmt: skip


def _tasks(product: Product) -> list[_Task]:
    """What is done, in order, in parts that keep all threads busy."""
    whole = [
        _Task(matrix, start, count, panels)
        for matrix in range(product.batch) for start, count in product.chunks for panels in product.panels
    ]  # fmt: skip
    if product.threads == 1:
        return whole
    wanted = -(-_PARTS * product.threads // len(whole))
    return [
        _Task(t.matrix, t.row, t.rows, _Panels(t.panels.first + start, count, t.panels.vectors, t.panels.masked))
        for t in whole for start, count in _parts(t.panels.count, wanted)
    ]  # fmt: skip


_PARTS = 4
"""Parts of a product for each of several threads, so that none waits long for another."""


def _parts(count: int, wanted: int) -> list[tuple[int, int]]:
    size = -(-count // wanted)
    return [(start, min(size, count - start)) for start in range(0, count, size)]


@lru_cache(maxsize=256)
def compiled(product: Product, parallel: int) -> Compiled:
    """The machine code of a product, written once."""
    return Compiled(product, parallel)


# ── writing it ───────────────────────────────────────────────────────────────────────────────────────────────────


class _Writer:
    """Writes the code: a worker, and a routine for each kind of task.

    In a routine R12 is the first row of the left matrix, RDX the panel, R8 its column of the result, R9 how many bytes
    of a row are before it, R13 how many panels are left, R11 what is asked for next; RSI, RAX and RBX go through them.
    """

    def __init__(self, product: Product, parallel: int) -> None:
        self.p = product
        self.asm = assembler(product.isa)
        self.bytes = product.isa.bytes
        # behind the sums
        first = product.isa.registers - PANEL - _SPARE[product.isa]
        self.factors, self.spare = range(first, first + PANEL), range(first + PANEL, product.isa.registers)
        self.routines: dict[tuple[int, int, bool], int] = {}
        masks = {_TAIL: product.columns % product.isa.width} if product.columns % product.isa.width else {}
        self.worker = Worker(self.asm, product.threads, parallel, (R12, RDX, R8, R9, R13), masks)
        temporaries = tuple(range(PANEL * product.block, product.isa.registers))[-_MOST_TEMPORARIES:]
        self.finish = Finish(self.asm, self.worker, RBX, R9, temporaries)
        for rows in dict.fromkeys(count for _, count in product.chunks):
            for panels in product.panels:
                self._routine(rows, panels.vectors, panels.masked)

    def _routine(self, rows: int, vectors: int, masked: bool) -> None:
        """Some rows times panels of that width; blocks of rows are as equal as can be."""
        a, size = self.asm, self.p.inner * vectors * self.bytes
        self.routines[rows, vectors, masked] = a.offset(a.here())
        blocks = -(-rows // self.p.block)
        low, more = divmod(rows, blocks)
        lines = -(-_UNROLLED * vectors * self.bytes // (LINE * blocks))
        panel = a.here()
        a.lea(R11, Mem(RDX, size))
        a.copy(RSI, R12)
        a.copy(RBX, R8)
        for count, height in ((more, low + 1), (blocks - more, low)):
            if count:
                a.constant(RDI, count)
                block = a.here()
                self._block(height, vectors, masked, lines)
                a.add(RDI, -1)
                a.jump(block, "nonzero")
        a.add(RDX, size)
        a.add(R8, vectors * self.bytes)
        a.add(R9, vectors * self.bytes)
        a.add(R13, -1)
        a.jump(panel, "nonzero")
        a.jump(self.worker.following)

    def _block(self, rows: int, vectors: int, masked: bool, lines: int) -> None:
        """A block of rows times a panel, which asks for `lines` of the next one at each turn of its loop."""
        a, stride = self.asm, self.p.left_stride * _FLOAT
        sums = [[i * vectors + j for j in range(vectors)] for i in range(rows)]
        elements = [
            Element(
                z, i * self.p.out_stride * _FLOAT + j * self.bytes, j * self.bytes,
                _TAIL * (masked and j == vectors - 1),
            )
            for i, row in enumerate(sums) for j, z in enumerate(row)
        ]  # fmt: skip
        posts = self._start(elements[:vectors], elements)
        for element in elements:
            a.prefetch_to_write(Mem(RBX, element.offset))
        a.copy(RAX, RDX)
        turns, rest = divmod(self.p.inner, _UNROLLED)
        if turns:
            a.constant(RCX, turns)
            loop = a.here()
            for k in range(_UNROLLED):
                for line in range(k, lines, _UNROLLED):
                    a.prefetch(Mem(R11, line * LINE), 2)
                self._step(sums, k)
            a.add(R11, lines * LINE)
            a.add(RSI, _UNROLLED * _FLOAT)
            a.add(RAX, _UNROLLED * vectors * self.bytes)
            a.add(RCX, -1)
            a.jump(loop, "nonzero")
        for k in range(rest):
            self._step(sums, k)
        self.finish.write(posts, elements)
        for element in elements:
            a.write(Mem(RBX, element.offset), element.register, element.mask)
        a.add(RBX, rows * self.p.out_stride * _FLOAT)
        a.add(RSI, rows * stride - turns * _UNROLLED * _FLOAT)

    def _start(self, row: Sequence[Element], elements: Sequence[Element]) -> list[tuple[int, Post]]:
        """Sums begin with what is added to every row, or with 0; the posts that are left, and of which operand."""
        a, posts = self.asm, numbered(self.p.posts)
        if not posts or posts[0][1] != ByColumn("add"):
            for element in elements:
                a.vector("xor", *(element.register,) * 3)
            return posts
        self.finish.vector(0)
        for first in row:
            a.move(first.register, Mem(RAX, first.column), first.mask)
        for number, element in enumerate(elements[len(row) :]):
            a.move(element.register, row[number % len(row)].register)
        return posts[1:]

    def _step(self, sums: list[list[int]], k: int) -> None:
        """Adds the products of one column of the left matrix and one row of the panel."""
        a, vectors = self.asm, len(sums[0])
        for j in range(vectors):
            a.move(self.factors[j], Mem(RAX, (k * vectors + j) * self.bytes))
        for i, row in enumerate(sums):
            factor = self.spare[i % len(self.spare)]
            a.broadcast(factor, Mem(RSI, (i * self.p.left_stride + k) * _FLOAT))
            for j, z in enumerate(row):
                a.vector("fma231", z, factor, self.factors[j])


__all__ = ["ByColumn", "ByElement", "Compiled", "Post", "Product", "compiled", "in_panels"]
