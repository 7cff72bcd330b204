"""What all kernels of machine code have in common: every task is done once, by all threads."""

from __future__ import annotations

import ctypes
import signal
from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from guarded import both_at_once, in_a_process
from machine_code import isa
from numpy.typing import NDArray

from taso.backends.onednn.library import library
from taso.backends.x86.assembler import (
    R8,
    R9,
    R12,
    R13,
    R14,
    R15,
    RAX,
    RBP,
    RBX,
    RCX,
    RDI,
    RDX,
    RSI,
    RSP,
    Assembler,
    Mem,
)
from taso.backends.x86.code import Code
from taso.backends.x86.vectors import assembler
from taso.backends.x86.worker import Runnable, Worker

pytestmark = pytest.mark.usefixtures("each_isa")

THREADS = (1, 2, 3, 5)
REGISTERS = (R12, R8, RDX, R13, RSI, RDI, R9)
Log = NDArray[np.int64]
Routine = Callable[[Assembler, Worker], None]


class Program:
    """Code with some routines and a log of what they did: how many words are in it, and the words."""

    def __init__(
        self, threads: int, routines: Sequence[Routine], registers: Sequence[int] = (R12,), room: int = 0,
        masks: dict[int, int] | None = None,
    ) -> None:  # fmt: skip
        asm = assembler(isa())
        worker = Worker(asm, threads, library().parallel_address, registers, masks or {}, room)
        self.routines = []
        for routine in routines:
            self.routines.append(asm.offset(asm.here()))
            routine(asm, worker)
            asm.jump(worker.following)
        self.runnable = Runnable(asm.finish(), worker.offset)
        self.log = np.zeros(4096, np.int64)

    def bind(self, tasks: Sequence[Sequence[int]], *others: int) -> tuple[Callable[[], object], object]:
        """Tasks are the number of their routine and their numbers."""
        table = [[self.routines[routine], *numbers] for routine, *numbers in tasks]
        return self.runnable.bind(table, [self.log.ctypes.data, *others])

    def run(self, tasks: Sequence[Sequence[int]], *others: int) -> list[int]:
        call, kept = self.bind(tasks, *others)
        self.log[0] = 0
        assert not call() and kept is not None
        return self.log[1 : 1 + self.log[0]].tolist()


def logging(*registers: int) -> Routine:
    """Writes registers to the log, together."""

    def write(a: Assembler, worker: Worker) -> None:
        worker.other(RBX, 0)
        a.constant(RAX, len(registers))
        a.fetch_add(Mem(RBX), RAX)
        a.shift_left(RAX, 3)
        a.add_register(RBX, RAX)
        for place, register in enumerate(registers):
            a.store(Mem(RBX, 8 + 8 * place), register)

    return write


@pytest.mark.parametrize("threads", THREADS)
@pytest.mark.parametrize("count", (0, 1, 2, 3, 7, 100, 3000))
def test_every_task_is_done_once(threads: int, count: int) -> None:
    program = Program(threads, [logging(R12)])
    tasks = [(0, 10 * i - 5) for i in range(count)]
    for _ in range(3):
        found = program.run(tasks)
        assert Counter(found) == Counter(number for _, number in tasks)
        assert threads > 1 or found == [number for _, number in tasks], "one thread does them in their order"


def test_no_task_of_very_many_is_done_twice() -> None:
    """Threads that take tasks in the same instant take different ones; where there is one core they seldom do."""

    def count(a: Assembler, worker: Worker) -> None:
        a.constant(RAX, 1)
        a.fetch_add(Mem(R12), RAX)

    program, done = Program(2, [count]), np.zeros(100_000, np.int64)
    call, kept = program.bind([(0, done.ctypes.data + 8 * i) for i in range(done.size)])
    for times in range(1, 101):
        assert not call() and kept is not None
        assert (done == times).all()


@pytest.mark.parametrize("threads", (1, 3))
def test_each_task_has_its_routine_and_its_numbers(threads: int) -> None:
    def doubled(a: Assembler, worker: Worker) -> None:
        for register in REGISTERS:
            a.add_register(register, register)
        logging(*REGISTERS)(a, worker)

    program = Program(threads, [logging(*REGISTERS), doubled], REGISTERS)
    tasks = [(i % 2, *(1000 * i + k - (1 << 40) for k in range(7))) for i in range(50)]
    found = program.run(tasks)
    lines = {tuple(found[i : i + 7]) for i in range(0, len(found), 7)}
    assert lines == {tuple((1 + routine) * n for n in numbers) for routine, *numbers in tasks}


def test_further_arguments_are_found_by_their_number() -> None:
    def sum_of_others(a: Assembler, worker: Worker) -> None:
        for number in (1, 2, 3):
            worker.other(RCX, number)
            a.add_register(R12, RCX)
        logging(R12)(a, worker)

    assert Program(1, [sum_of_others]).run([(0, 5)], 10, 200, 3000) == [3215]


@pytest.mark.parametrize("threads", (1, 3))
@pytest.mark.parametrize("room", (64, 640, 12 * 12 * 64))
def test_the_room_on_the_stack_is_there_and_begins_at_a_line(threads: int, room: int) -> None:
    def filling(a: Assembler, worker: Worker) -> None:
        a.copy(RCX, RSP)
        for at in range(0, room, 8):
            a.store(Mem(RSP, at), R12)
        logging(RCX)(a, worker)

    found = Program(threads, [filling], room=room).run([(0, -1)] * 20)
    assert len(found) == 20 and all(address % 64 == 0 for address in found)


def test_masks_let_the_first_elements_pass() -> None:
    def doubling(a: Assembler, worker: Worker) -> None:
        a.move(0, Mem(R12), 3)
        a.vector("add", 0, 0, Mem(R12), mask=3)
        worker.other(RCX, 1)
        a.write(Mem(RCX), 0, 3)

    width = isa().width
    for elements in range(1, width):
        read, written = np.arange(1, width + 1, dtype=np.float32), np.zeros(width, np.float32)
        Program(1, [doubling], masks={3: elements}).run([(0, read.ctypes.data)], written.ctypes.data)
        assert np.array_equal(written, np.where(np.arange(width) < elements, 2 * read, 0))


@pytest.mark.parametrize("threads", (1, 2))
@pytest.mark.parametrize("room", (0, 128))
def test_registers_of_the_caller_are_kept(threads: int, room: int) -> None:
    """What is called may not change RBX, RBP, R12 to R15 (System V AMD64 ABI, figure 3.4)."""
    kept = (RBX, RBP, R12, R13, R14, R15)

    def spoiling(a: Assembler, worker: Worker) -> None:
        # R15 and RBP are the worker's
        for register in (RAX, RBX, RCX, RDX, RSI, RDI, R8, R9, R12, R13, R14):
            a.zero(register)

    program = Program(threads, [spoiling], room=room)
    call, arguments = program.bind([(0, 1)] * 5)
    asm = assembler(isa())
    for register in (*kept, RDX):
        asm.push(register)
    for number, register in enumerate(kept):
        asm.constant(register, 1 << 40 | number)
    asm.call(RSI)
    asm.pop(RDX)
    for place, register in enumerate(kept):
        asm.store(Mem(RDX, 8 * place), register)
    for register in reversed(kept):
        asm.pop(register)
    asm.ret()
    code = Code(asm.finish())
    types = ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p
    wrapped = ctypes.CFUNCTYPE(ctypes.c_int, *types)(code.address)
    found = np.zeros(len(kept), np.int64)
    assert isinstance(arguments, tuple)
    assert wrapped(arguments[2].ctypes.data, program.runnable._code.address, found.ctypes.data) == 0
    assert found.tolist() == [1 << 40 | number for number in range(len(kept))]
    assert not call()


def test_bindings_of_one_program_run_at_the_same_time() -> None:
    def sums(a: Assembler, worker: Worker) -> None:
        worker.other(RBX, 1)
        a.fetch_add(Mem(RBX), R12)

    for threads in (1, 2):
        program = Program(threads, [sums])
        totals = [np.zeros(1, np.int64) for _ in range(3)]
        calls = [program.bind([(0, 3 + n)] * 100, total.ctypes.data) for n, total in enumerate(totals)]

        def works(number: int, calls: Sequence[tuple[Callable[[], object], object]] = calls,
                  totals: Sequence[Log] = totals) -> bool:  # fmt: skip
            totals[number][0] = 0
            return not calls[number][0]() and totals[number][0] == 100 * (3 + number)

        assert not both_at_once([lambda n=n: works(n) for n in range(3)])


# ── all threads ──────────────────────────────────────────────────────────────────────────────────────────────────


def meeting(threads: int, needed: int, seconds: int) -> None:
    """As many tasks as are needed, each of which waits for all the others to have begun: in a process of its own."""

    def wait(a: Assembler, worker: Worker) -> None:
        worker.other(RBX, 1)
        a.constant(RAX, 1)
        a.fetch_add(Mem(RBX), RAX)
        again = a.here()
        a.load(RCX, Mem(RBX))
        a.compare(RCX, Mem(RBX, 8))
        a.jump(again, "below")

    arrived = np.array([0, needed], np.int64)
    program = Program(threads, [wait])
    # the process ends then
    signal.alarm(seconds)
    program.run([(0, 1)] * needed, arrived.ctypes.data)
    assert arrived[0] == needed


@pytest.mark.parametrize("threads", (2, 3))
def test_all_threads_work_at_the_same_time(threads: int) -> None:
    assert in_a_process("test_worker", f"meeting({threads}, {threads}, 100)") == 0


def test_more_threads_than_asked_for_there_are_not() -> None:
    assert in_a_process("test_worker", "meeting(2, 3, 2)") == -signal.SIGALRM
