"""Code that does tasks from a table: an entry that has all threads work, and what each of them does.

A kernel's code is a set of routines. A table has a line for each task: the address of its routine and the numbers that
the routine finds in registers. Every thread takes the next task that nobody has taken, until there is none.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from functools import partial

import numpy as np

from taso.backends.recipe import Call
from taso.backends.x86.assembler import R12, R13, R14, R15, RAX, RBP, RBX, RCX, RDI, RDX, RSI, RSP, Assembler, Mem
from taso.backends.x86.code import Code

_WORD = 8
_COUNTER, _TASKS, _TABLE, _WORKER, _OTHERS = range(0, 5 * _WORD, _WORD)
"""Where the arguments of a run are: the number of the next task, how many there are, their table, the address of the
worker, and further numbers of the kernel's."""
_LINE_BITS = 6
_LINE_WORDS = 8
_ALIGNED = 64
_SAVED = (RBX, RBP, R12, R13, R14, R15)


class Worker:
    """Writes entry and worker; routines follow, and end with a jump to `following`.

    In a routine R15 is kept, by which `other` finds further arguments, and RSP has `room` bytes above it.
    """

    def __init__(
        self, asm: Assembler, threads: int, parallel: int, registers: Sequence[int], masks: Mapping[int, int],
        room: int = 0,
    ) -> None:  # fmt: skip
        """`registers` get the numbers of a task, in order. `masks` has how many elements each mask lets pass.

        `parallel` is the address of libgomp's GOMP_parallel.
        """
        self._asm, self.following = asm, asm.label()
        start = asm.label()
        asm.zero(RAX)
        asm.store(Mem(RDI, _COUNTER), RAX)
        if threads == 1:
            asm.jump(start)
        else:
            self._on_all(threads, parallel)
        asm.set(start)
        self.offset = asm.offset(start)
        self._work(registers, masks, room)

    def _on_all(self, threads: int, parallel: int) -> None:
        """GOMP_parallel(worker, arguments, threads, 0), with the stack aligned as calls want it."""
        a = self._asm
        a.add(RSP, -_WORD)
        a.copy(RSI, RDI)
        a.load(RDI, Mem(RSI, _WORKER))
        a.constant(RDX, threads)
        a.zero(RCX)
        a.constant(RAX, parallel)
        a.call(RAX)
        a.add(RSP, _WORD)
        a.zero(RAX)
        a.ret()

    def _work(self, registers: Sequence[int], masks: Mapping[int, int], room: int) -> None:
        a, done = self._asm, self._asm.label()
        for register in _SAVED:
            a.push(register)
        a.copy(RBP, RSP)
        if room:
            a.add(RSP, -room)
            a.align_down(RSP, _ALIGNED)
        a.copy(R15, RDI)
        for number, elements in masks.items():
            a.mask(number, elements)
        a.set(self.following)
        a.constant(RAX, 1)
        a.fetch_add(Mem(R15, _COUNTER), RAX)
        a.compare(RAX, Mem(R15, _TASKS))
        a.jump(done, "at least")
        a.shift_left(RAX, _LINE_BITS)
        a.load(R14, Mem(R15, _TABLE))
        a.add_register(R14, RAX)
        for place, register in enumerate((RAX, *registers)):
            a.load(register, Mem(R14, place * _WORD))
        a.jump_to(RAX)
        a.set(done)
        a.end_vectors()
        a.copy(RSP, RBP)
        for register in reversed(_SAVED):
            a.pop(register)
        a.zero(RAX)
        a.ret()

    def other(self, register: int, number: int) -> None:
        """Loads further argument `number` into a register."""
        self._asm.load(register, Mem(R15, _OTHERS + number * _WORD))


class Runnable:
    """Code that does tasks, in memory."""

    def __init__(self, code: bytes, worker: int) -> None:
        """`worker` is where in the code the worker begins."""
        self._code = Code(code)
        self._worker = self._code.address + worker
        self._run = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(self._code.address)

    def bind(self, tasks: Sequence[Sequence[int]], others: Sequence[int]) -> tuple[Call, object]:
        """What does these tasks, each the offset of a routine and its numbers, and what is to be kept for it."""
        table = np.zeros((len(tasks), _LINE_WORDS), np.int64)
        for line, (routine, *numbers) in zip(table, tasks, strict=True):
            line[: 1 + len(numbers)] = [self._code.address + routine, *numbers]
        arguments = np.array([0, len(table), table.ctypes.data, self._worker, *others], np.int64)
        return partial(self._run, arguments.ctypes.data), (self, table, arguments)
