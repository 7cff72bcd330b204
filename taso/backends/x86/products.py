"""Products of matrices of float32, by machine code written for their sizes.

oneDNN's products are fast while the second matrix is in a cache, and in a model it is not: it holds weights, which an
inference meets once. Waiting for them then comes on top of computing. Here the columns that come next are asked for
(PREFETCHT1) while these are multiplied, so that reading them takes no time as long as computing takes longer.

The second matrix lies in panels of 32 columns, one behind the other. A block of up to 14 rows times a panel stays in 28
registers for the whole sum (Goto and van de Geijn 2008, "Anatomy of High-Performance Matrix Multiplication"), and what
is done with each element follows before it is stored.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Union

import numpy as np
from numpy.typing import NDArray

from taso.backends.recipe import Call
from taso.backends.x86.assembler import (
    R8,
    R9,
    R11,
    R12,
    R13,
    R14,
    R15,
    RAX,
    RBX,
    RCX,
    RDI,
    RDX,
    RSI,
    RSP,
    Assembler,
    Label,
    Mem,
)  # fmt: skip
from taso.backends.x86.code import Code
from taso.backends.x86.functions import Function, write

WIDTH = 16
"""Columns in a register."""
PANEL = 2
"""Registers in a row of a panel."""
_ROWS = 14
_UNROLLED = 4
"""Steps of a sum in one turn of its loop."""
_LINE, _FLOAT, _WORD = 64, 4, 8
_FACTORS, _SPARE = (28, 29), (30, 31)
_TAIL = 1
"""The mask register of a last vector that is not whole."""


@dataclass(frozen=True)
class ByColumn:
    """Combines each row of the result with a vector: add, mul or sub."""

    operation: str


@dataclass(frozen=True)
class ByElement:
    """Combines the result with a matrix that lies as it does: add, mul or sub."""

    operation: str


Post = Union[ByColumn, ByElement, Function]
"""What is done with each element of a product, in order."""


@dataclass(frozen=True)
class Product:
    """Matrices (rows × inner) · (inner × columns), `batch` of them; strides are between rows, in elements.

    Of a batch all lie one behind the other, rows and panels alike. `chunk` rows are multiplied with all columns before
    the next ones are.
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

    @property
    def chunks(self) -> list[tuple[int, int]]:
        """First row and number of rows of each chunk; all but the last are alike."""
        size = -(-self.rows // -(-self.rows // self.chunk))
        return [(start, min(size, self.rows - start)) for start in range(0, self.rows, size)]

    @property
    def panels(self) -> list[_Panels]:
        """The panels of one matrix, the last one by itself where it has fewer columns."""
        whole, rest = divmod(self.columns, PANEL * WIDTH)
        last = _Panels(whole, 1, -(-rest // WIDTH), bool(rest % WIDTH))
        return [_Panels(0, whole, PANEL, False)] * bool(whole) + [last] * bool(rest)

    @property
    def packed_columns(self) -> int:
        """Columns of the second matrix as it lies in panels."""
        return -(-self.columns // WIDTH) * WIDTH


@dataclass(frozen=True)
class _Panels:
    """Panels of equal width from number `first` on; `masked` where the last vector is not whole."""

    first: int
    count: int
    vectors: int
    masked: bool


def in_panels(matrices: NDArray[np.float32]) -> NDArray[np.float32]:
    """The second matrices (batch, inner, columns) as a product reads them: what is missing in a last vector is 0."""
    batch, inner, columns = matrices.shape
    width = PANEL * WIDTH
    whole, rest = divmod(columns, width)
    padded = -(-rest // WIDTH) * WIDTH
    out = np.zeros((batch, inner * (whole * width + padded)), np.float32)
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
        self._code = Code(writer.finish())
        self._run = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(self._code.address)
        self._worker = self._code.address + writer.worker
        self._routines = {key: self._code.address + offset for key, offset in writer.routines.items()}

    def bind(self, left: int, panels: int, out: int, others: Sequence[int]) -> tuple[Call, object]:
        """What runs the product on matrices at these addresses; `others` are those of its posts' operands, in order."""
        product = self.product
        table = np.array([self._entry(task, left, panels, out) for task in _tasks(product)], np.int64)
        posts = [post for post in product.posts if not isinstance(post, Function)]
        given = [at - out if isinstance(p, ByElement) else at for p, at in zip(posts, others, strict=True)]
        arguments = np.array([0, len(table), table.ctypes.data, self._worker, *given], np.int64)
        return partial(self._run, arguments.ctypes.data), (self, table, arguments)

    def _entry(self, task: _Task, left: int, panels: int, out: int) -> list[int]:
        product, width = self.product, PANEL * WIDTH
        column = task.panels.first * width
        row = task.matrix * product.rows + task.row
        weight = task.matrix * product.inner * product.packed_columns + product.inner * column
        routine = self._routines[task.rows, task.panels.vectors, task.panels.masked]
        return [
            routine, left + row * product.left_stride * _FLOAT, panels + weight * _FLOAT,
            out + (row * product.out_stride + column) * _FLOAT, column * _FLOAT, task.panels.count, 0, 0,
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

_COUNTER, _TASKS, _TABLE, _WORKER, _OTHERS = range(0, 5 * _WORD, _WORD)
"""Where the arguments of a run are: the number of the next task, how many there are, their table, the address of the
code that does them, and addresses of what posts read (of matrices, how far behind the result they are)."""
_ENTRY_BITS = 6
_SAVED = (RBX, R12, R13, R14, R15)


class _Writer:
    """Writes the code: an entry, a worker that takes one task after the other, a routine for each kind of task.

    In a routine R12 is the first row of the left matrix, RDX the panel, R8 its column of the result, R9 how many bytes
    of a row are before it, R13 how many panels are left, R11 what is asked for next; RSI, RAX and RBX go through them.
    """

    def __init__(self, product: Product, parallel: int) -> None:
        self.p = product
        self.asm = Assembler()
        self.routines: dict[tuple[int, int, bool], int] = {}
        self._others = [post for post in product.posts if not isinstance(post, Function)]
        start = self.asm.label()
        self._entry(start, parallel)
        self._next, self.worker = self._take_tasks(start)
        for rows in dict.fromkeys(count for _, count in product.chunks):
            for panels in product.panels:
                self._routine(rows, panels.vectors, panels.masked)

    def finish(self) -> bytes:
        return self.asm.finish()

    def _entry(self, worker: Label, parallel: int) -> None:
        """Sets the counter back and has all threads work (GOMP_parallel of libgomp)."""
        a = self.asm
        a.zero(RAX)
        a.store(Mem(RDI, _COUNTER), RAX)
        if self.p.threads == 1:
            return a.jump(worker)
        a.add(RSP, -_WORD)
        a.copy(RSI, RDI)
        a.load(RDI, Mem(RSI, _WORKER))
        a.constant(RDX, self.p.threads)
        a.zero(RCX)
        a.constant(RAX, parallel)
        a.call(RAX)
        a.add(RSP, _WORD)
        a.zero(RAX)
        a.ret()

    def _take_tasks(self, start: Label) -> tuple[Label, int]:
        a, done = self.asm, self.asm.label()
        a.set(start)
        for register in _SAVED:
            a.push(register)
        a.copy(R15, RDI)
        if self.p.columns % WIDTH:
            a.constant(RAX, (1 << self.p.columns % WIDTH) - 1)
            a.mask(_TAIL, RAX)
        following = a.here()
        a.constant(RAX, 1)
        a.fetch_add(Mem(R15, _COUNTER), RAX)
        a.compare(RAX, Mem(R15, _TASKS))
        a.jump(done, "at least")
        a.shift_left(RAX, _ENTRY_BITS)
        a.load(R14, Mem(R15, _TABLE))
        a.add_register(R14, RAX)
        for place, register in enumerate((RAX, R12, RDX, R8, R9, R13)):
            a.load(register, Mem(R14, place * _WORD))
        a.jump_to(RAX)
        a.set(done)
        a.end_vectors()
        for register in reversed(_SAVED):
            a.pop(register)
        a.zero(RAX)
        a.ret()
        return following, a.offset(start)

    def _routine(self, rows: int, vectors: int, masked: bool) -> None:
        """Some rows times panels of that width; blocks of rows are as equal as can be."""
        a, size = self.asm, self.p.inner * vectors * _LINE
        self.routines[rows, vectors, masked] = a.offset(a.here())
        blocks = -(-rows // _ROWS)
        low, more = divmod(rows, blocks)
        lines = -(-_UNROLLED * vectors // blocks)
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
        a.add(R8, vectors * _LINE)
        a.add(R9, vectors * _LINE)
        a.add(R13, -1)
        a.jump(panel, "nonzero")
        a.jump(self._next)

    def _block(self, rows: int, vectors: int, masked: bool, lines: int) -> None:
        """A block of rows times a panel, which asks for `lines` of the next one at each turn of its loop."""
        a, stride = self.asm, self.p.left_stride * _FLOAT
        sums = [[i * vectors + j for j in range(vectors)] for i in range(rows)]
        posts = self._start(sums, masked)
        a.copy(RAX, RDX)
        turns, rest = divmod(self.p.inner, _UNROLLED)
        if turns:
            a.constant(RCX, turns)
            loop = a.here()
            for k in range(_UNROLLED):
                for line in range(k, lines, _UNROLLED):
                    a.prefetch(Mem(R11, line * _LINE), 2)
                self._step(sums, k)
            a.add(R11, lines * _LINE)
            a.add(RSI, _UNROLLED * _FLOAT)
            a.add(RAX, _UNROLLED * vectors * _LINE)
            a.add(RCX, -1)
            a.jump(loop, "nonzero")
        for k in range(rest):
            self._step(sums, k)
        for number, post in posts:
            self._post(post, number, sums, masked)
        for i, row in enumerate(sums):
            for j, z in enumerate(row):
                a.write(self._element(RBX, i, j), z, _TAIL if masked and j == vectors - 1 else 0)
        a.add(RBX, rows * self.p.out_stride * _FLOAT)
        a.add(RSI, rows * stride - turns * _UNROLLED * _FLOAT)

    def _start(self, sums: list[list[int]], masked: bool) -> list[tuple[int, Post]]:
        """Sums begin with what is added to every row, or with 0; the posts that are left, and of which operand."""
        a, numbered, count = self.asm, list[tuple[int, Post]](), 0
        for post in self.p.posts:
            numbered.append((count, post))
            count += not isinstance(post, Function)
        if not numbered or numbered[0][1] != ByColumn("add"):
            for z in (z for row in sums for z in row):
                a.vector("xor", z, z, z)
            return numbered
        self._column(0)
        for j, z in enumerate(sums[0]):
            a.move(z, Mem(RAX, j * _LINE), _TAIL if masked and j == len(sums[0]) - 1 else 0)
        for row in sums[1:]:
            for z, first in zip(row, sums[0], strict=True):
                a.move(z, first)
        return numbered[1:]

    def _step(self, sums: list[list[int]], k: int) -> None:
        """Adds the products of one column of the left matrix and one row of the panel."""
        a, vectors = self.asm, len(sums[0])
        for j in range(vectors):
            a.move(_FACTORS[j], Mem(RAX, (k * vectors + j) * _LINE))
        for i, row in enumerate(sums):
            factor = _SPARE[i % 2]
            a.broadcast(factor, Mem(RSI, (i * self.p.left_stride + k) * _FLOAT))
            for j, z in enumerate(row):
                a.vector("fma231", z, factor, _FACTORS[j])

    def _column(self, number: int) -> None:
        """RAX: where the vector of operand `number` has the columns of the panel."""
        self.asm.load(RAX, Mem(R15, _OTHERS + number * _WORD))
        self.asm.add_register(RAX, R9)

    def _element(self, base: int, i: int, j: int) -> Mem:
        return Mem(base, i * self.p.out_stride * _FLOAT + j * _LINE)

    def _post(self, post: Post, number: int, sums: list[list[int]], masked: bool) -> None:
        a = self.asm
        if isinstance(post, Function):
            for z in (z for row in sums for z in row):
                write(a, post, z, (*_FACTORS, *_SPARE))
            return
        if isinstance(post, ByColumn):
            self._column(number)
        else:
            a.load(RAX, Mem(R15, _OTHERS + number * _WORD))
            a.add_register(RAX, RBX)
        for i, row in enumerate(sums):
            for j, z in enumerate(row):
                at = Mem(RAX, j * _LINE) if isinstance(post, ByColumn) else self._element(RAX, i, j)
                a.vector(post.operation, z, z, at, mask=_TAIL if masked and j == len(row) - 1 else 0)


__all__ = ["ByColumn", "ByElement", "Compiled", "Post", "Product", "compiled", "in_panels"]
