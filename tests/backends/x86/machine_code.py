"""Helpers for tests of code written at run time: whether it runs here, functions of one element, guarded matrices."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from taso.backends.onednn.library import library
from taso.backends.x86.assembler import AVX2, AVX512, RAX, RDI, RDX, RSI, Assembler, Isa, Mem
from taso.backends.x86.code import Code, runs_here
from taso.backends.x86.functions import Function, write
from taso.backends.x86.vectors import assembler
from taso.graph.errors import BackendUnavailable

Array = NDArray[np.float32]
CANARY = np.uint32(0x7FC0BEEF)
"""The bits of a NaN that no computation makes: what is read of it makes a result NaN, what is written over is seen."""


def why_not(isa: Isa = AVX2) -> str:
    """Why machine code of these instructions does not run here, or nothing: what runs anywhere is made of AVX2."""
    if not runs_here():
        return "this process may not run machine code for x86-64 that it makes"
    try:
        name = library().isa
    except BackendUnavailable as error:
        return str(error)
    has = name.startswith("avx512") or isa == AVX2 and name.startswith("avx2")
    return "" if has else f"the processor has no {isa.name}: oneDNN uses {name}"


HERE = [isa for isa in (AVX512, AVX2) if not why_not(isa)]
"""The instructions that run here, the widest first."""
_CHOSEN = HERE[:1] or [AVX2]


def isa() -> Isa:
    """The instructions that are tested now."""
    return _CHOSEN[0]


def choose(isa: Isa) -> None:
    _CHOSEN[0] = isa


def elementwise(writing: Callable[[Assembler], object], registers: tuple[int, ...] = ()) -> Callable[[Array], Array]:
    """A function of arrays by code that replaces the elements in register 0; `registers` are filled with NaN before."""
    asm, width = assembler(isa()), isa().width
    top = asm.here()
    for register in registers:
        asm.vector("xor", register, register, register)
        asm.vector("div", register, register, register)
    asm.move(0, Mem(RDI))
    writing(asm)
    asm.write(Mem(RSI), 0)
    for register, step in ((RDI, isa().bytes), (RSI, isa().bytes), (RDX, -1)):
        asm.add(register, step)
    asm.jump(top, "nonzero")
    asm.end_vectors()
    asm.zero(RAX)
    asm.ret()
    code = Code(asm.finish())
    call = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64)(code.address)

    def run(x: Array, code: Code = code) -> Array:
        given = np.zeros(-(-max(x.size, 1) // width) * width, np.float32)
        given[: x.size] = x
        found = np.full_like(given, 7)
        assert call(given.ctypes.data, found.ctypes.data, given.size // width) == 0
        return found[: x.size]

    return run


def by_code(function: Function) -> Callable[[Array], Array]:
    """A function of one element as products apply it."""
    temporaries = tuple(range(isa().registers))[-4:]
    return elementwise(lambda asm: write(asm, function, 0, temporaries), temporaries)


BEHIND, BEFORE = "behind", "before"


class Rows:
    """Matrices of float32 with gaps between rows and memory around them that hold the canary; the last row has no gap.

    Of a batch matrices begin `apart` elements apart. With a `wall` they begin right behind, or end right before, a page
    that may not be touched.
    """

    def __init__(
        self, rows: int, columns: int, stride: int, fill: Array | None = None, wall: str = "", batch: int = 1,
        apart: int = 0,
    ) -> None:  # fmt: skip
        self.shape = (batch, rows, columns)
        self._strides = (apart or rows * stride, stride, 1)
        count = 1 + sum((n - 1) * step for n, step in zip(self.shape, self._strides, strict=True))
        if wall:
            self._around = walled(count)
            self._start = 0 if wall == BEFORE else self._around.size - count
        else:
            self._around = np.empty(count + 96, np.uint32)
            self._start = 32
        self._around[:] = CANARY
        if fill is not None:
            self.array[:] = fill.reshape(self.array.shape)

    @property
    def address(self) -> int:
        return self._around.ctypes.data + 4 * self._start

    @property
    def array(self) -> Array:
        """All rows of all matrices, as they are."""
        held = self._around.view(np.float32)[self._start :]
        found = np.lib.stride_tricks.as_strided(held, self.shape, tuple(4 * s for s in self._strides))
        return found[0] if self.shape[0] == 1 else found

    @property
    def kept_to_itself(self) -> bool:
        """Whether nothing but the rows was written to."""
        touched = np.ones(self._around.shape, bool)
        np.lib.stride_tricks.as_strided(touched[self._start :], self.shape, self._strides)[:] = False
        return bool((self._around[touched] == CANARY).all())


def walled(count: int) -> NDArray[np.uint32]:
    """Whole pages between two that may not be touched; mapped as long as the array lives."""
    page = mmap.PAGESIZE
    size = -(-4 * count // page) * page
    memory = mmap.mmap(-1, size + 2 * page)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    protect = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)(
        ("mprotect", ctypes.CDLL(None))
    )
    for wall in (start, start + page + size):
        assert protect(wall, page, 0) == 0
    return np.frombuffer(memory, np.uint32, size // 4, page)
