"""An assembler for the few x86-64 instructions that the kernels here are made of.

Encodings are those of Intel's Software Developer's Manual, volume 2: REX for the general registers, for vectors EVEX at
512 bits (`taso.backends.x86.avx512`) or VEX at 256 (`taso.backends.x86.avx2`). Registers are numbers: general ones 0 to
15 (`RAX` …), and those for vectors from 0 on.
"""

from __future__ import annotations

import struct
from abc import ABC, abstractmethod
from dataclasses import dataclass

from taso.graph.errors import BackendError

RAX, RCX, RDX, RBX, RSP, RBP, RSI, RDI = range(8)
R8, R9, R10, R11, R12, R13, R14, R15 = range(8, 16)

REACH = (1 << 31) - (1 << 16)
"""Bytes that an offset may have: instructions hold them in 32 bits, signed."""

LINE = 64
"""Bytes in a line of the caches."""


@dataclass(frozen=True)
class Isa:
    """Instructions for vectors: how many numbers of float32 a register has, and how many registers code may use."""

    name: str
    width: int
    registers: int

    @property
    def bytes(self) -> int:
        """In a register."""
        return self.width * 4


AVX512 = Isa("avx512", 16, 32)
AVX2 = Isa("avx2", 8, 15)
"""With FMA3. Register 15 is the assembler's own."""


@dataclass(frozen=True)
class Mem:
    """What lies `offset` bytes behind the address in a general register."""

    base: int
    offset: int = 0

    def __add__(self, offset: int) -> Mem:
        return Mem(self.base, self.offset + offset)


@dataclass(frozen=True)
class Pooled:
    """A number of the pool of constants behind the code."""

    value: float


@dataclass(frozen=True)
class Label:
    """A place in the code, set once by `Assembler.set`."""

    number: int


@dataclass(frozen=True)
class Opcode:
    """An instruction on vectors, with which prefix and in which map; EVEX and VEX have the same numbers for both."""

    prefix: int
    map: int
    number: int


NONE, _66 = 0, 1
_0F, _0F38, _0F3A = 1, 2, 3
OPCODES = {
    "add": Opcode(NONE, _0F, 0x58), "mul": Opcode(NONE, _0F, 0x59), "sub": Opcode(NONE, _0F, 0x5C),
    "min": Opcode(NONE, _0F, 0x5D), "div": Opcode(NONE, _0F, 0x5E), "max": Opcode(NONE, _0F, 0x5F),
    "fma231": Opcode(_66, _0F38, 0xB8), "fma213": Opcode(_66, _0F38, 0xA8), "fnma231": Opcode(_66, _0F38, 0xBC),
    "fnma213": Opcode(_66, _0F38, 0xAC), "xor": Opcode(_66, _0F, 0xEF), "and": Opcode(_66, _0F, 0xDB),
    "or": Opcode(_66, _0F, 0xEB),
}  # fmt: skip
"""VADDPS … VMAXPS, VFMADD231PS, VFMADD213PS, VFNMADD231PS, VFNMADD213PS, VPXOR, VPAND, VPOR (with D in EVEX)."""
LOAD, STORE = Opcode(NONE, _0F, 0x10), Opcode(NONE, _0F, 0x11)
"""VMOVUPS."""
BROADCAST = Opcode(_66, _0F38, 0x18)
"""VBROADCASTSS."""
AND_NOT = Opcode(_66, _0F, 0xDF)
"""VPANDN (VPANDND): not the first, and the second."""
ROUND = Opcode(_66, _0F3A, 0x08)
"""VROUNDPS (VRNDSCALEPS): with 0, to the nearest whole number."""
PERMUTE = Opcode(_66, _0F3A, 0x04)
"""VPERMILPS: two bits for each of four elements say which of the four it becomes."""
QUAD = 4
"""Elements among which `Assembler.spread` works."""
_CONDITIONS = {"zero": 0x84, "nonzero": 0x85, "below": 0x82, "at least": 0x83}


class Assembler(ABC):
    """Code in the making: instructions in order, labels, and a pool of constants behind them."""

    isa: Isa

    def __init__(self) -> None:
        self._code = bytearray()
        self._labels: dict[Label, int] = {}
        self._jumps: list[tuple[int, Label]] = []
        self._pool: dict[bytes, list[int]] = {}
        self._made = 0

    # ── labels and the end ───────────────────────────────────────────────────────────────────────────────────────

    def label(self) -> Label:
        self._made += 1
        return Label(self._made)

    def set(self, label: Label) -> None:
        self._labels[label] = len(self._code)

    def here(self) -> Label:
        label = self.label()
        self.set(label)
        return label

    def offset(self, label: Label) -> int:
        """Bytes from the beginning of the code to a label that is set."""
        return self._labels[label]

    def finish(self) -> bytes:
        """The code, its pool behind it. Raises `BackendError` for a jump to a label that was never set."""
        code = bytearray(self._code)
        for at, label in self._jumps:
            if label not in self._labels:
                raise BackendError("machine code jumps to a label that is not set")
            struct.pack_into("<i", code, at, self._labels[label] - (at + 4))
        code += bytes(-len(code) % LINE)
        for number, uses in self._pool.items():
            for at, behind in ((u & 0xFFFFFFFF, u >> 32) for u in uses):
                struct.pack_into("<i", code, at, len(code) - (at + 4 + behind))
            code += number
        return bytes(code)

    # ── general registers ────────────────────────────────────────────────────────────────────────────────────────

    def _refer(self, constant: bytes, behind: int) -> None:
        """The offset of a constant in the pool from the instruction's end, `behind` bytes behind the offset."""
        self._pool.setdefault(constant, []).append(len(self._code) | behind << 32)
        self._code += bytes(4)

    def _rex(self, opcode: bytes, reg: int, rm: int | Mem, *, wide: bool = True) -> None:
        base = rm.base if isinstance(rm, Mem) else rm
        rex = 0x40 | wide << 3 | (reg >> 3) << 2 | base >> 3
        if rex != 0x40:
            self._code.append(rex)
        self._code += opcode
        self._operand(reg, rm, 1)

    def _operand(self, reg: int, rm: int | Mem, unit: int) -> None:
        """ModRM, SIB and offset; one byte holds an offset that is a small multiple of `unit`."""
        field = (reg & 7) << 3
        if not isinstance(rm, Mem):
            self._code.append(0xC0 | field | rm & 7)
            return
        low, offset = rm.base & 7, rm.offset
        short = offset % unit == 0 and -128 <= offset // unit < 128
        mode = 0 if offset == 0 and low != RBP else 0x40 if short else 0x80
        self._code.append(mode | field | low)
        if low == RSP:
            self._code.append(0x24)
        if mode:
            self._code += struct.pack("<b", offset // unit) if mode == 0x40 else struct.pack("<i", offset)

    def load(self, register: int, source: Mem) -> None:
        self._rex(b"\x8b", register, source)

    def store(self, target: Mem, register: int) -> None:
        self._rex(b"\x89", register, target)

    def copy(self, register: int, source: int) -> None:
        self._rex(b"\x8b", register, source)

    def constant(self, register: int, value: int) -> None:
        self._code += bytes([0x48 | register >> 3, 0xB8 | register & 7]) + struct.pack("<q", value)

    def zero(self, register: int) -> None:
        self._rex(b"\x33", register, register)

    def add(self, register: int, value: int) -> None:
        """Adds a number; the flags say whether the result is zero."""
        self._rex(b"\x81", 0, register)
        self._code += struct.pack("<i", value)

    def add_register(self, register: int, other: int) -> None:
        self._rex(b"\x03", register, other)

    def align_down(self, register: int, size: int) -> None:
        """To the multiple of `size`, a power of two, that is next below."""
        self._rex(b"\x81", 4, register)
        self._code += struct.pack("<i", -size)

    def shift_left(self, register: int, bits: int) -> None:
        self._rex(b"\xc1", 4, register)
        self._code.append(bits)

    def compare(self, register: int, other: int | Mem) -> None:
        self._rex(b"\x3b", register, other)

    def lea(self, register: int, source: Mem) -> None:
        self._rex(b"\x8d", register, source)

    def push(self, register: int) -> None:
        self._code += bytes([0x41] * (register >> 3)) + bytes([0x50 | register & 7])

    def pop(self, register: int) -> None:
        self._code += bytes([0x41] * (register >> 3)) + bytes([0x58 | register & 7])

    def fetch_add(self, target: Mem, register: int) -> None:
        """Adds the register to memory, as one step for all threads; the register gets what was there (LOCK XADD)."""
        self._code.append(0xF0)
        self._rex(b"\x0f\xc1", register, target)

    def prefetch(self, source: Mem, level: int = 1) -> None:
        """Asks for a line of memory in the first- or second-level cache (PREFETCHT0, PREFETCHT1)."""
        self._rex(b"\x0f\x18", level, source, wide=False)

    def prefetch_to_write(self, source: Mem) -> None:
        """Asks for a line of memory that will be written to (PREFETCHW)."""
        self._rex(b"\x0f\x0d", 1, source, wide=False)

    def jump(self, label: Label, condition: str = "") -> None:
        self._code += bytes([0x0F, _CONDITIONS[condition]]) if condition else b"\xe9"
        self._jumps.append((len(self._code), label))
        self._code += bytes(4)

    def call(self, register: int) -> None:
        self._rex(b"\xff", 2, register, wide=False)

    def jump_to(self, register: int) -> None:
        self._rex(b"\xff", 4, register, wide=False)

    def ret(self) -> None:
        self._code.append(0xC3)

    # ── vectors ──────────────────────────────────────────────────────────────────────────────────────────────────

    @abstractmethod
    def mask(self, number: int, elements: int) -> None:
        """Mask `number` (from 1 on) lets the first elements pass; RAX may be overwritten."""

    @abstractmethod
    def vector(self, name: str, target: int, first: int, second: int | Mem | Pooled, *, mask: int = 0) -> None:
        """target = first `name` second, element by element; of a pooled constant one number goes with all.

        fma231 is target + first · second, fma213 first · target + second, with n the product is taken off. Of two
        operands one of which is no number, min and max give the second. Elements of memory outside the mask are not
        read, and there the target is not defined.
        """

    @abstractmethod
    def move(self, target: int, source: int | Mem, mask: int = 0) -> None:
        """Elements outside the mask become 0, and are not read."""

    @abstractmethod
    def write(self, target: Mem, source: int, mask: int = 0) -> None:
        """Elements outside the mask are not written."""

    @abstractmethod
    def broadcast(self, target: int, source: Mem | Pooled) -> None:
        """One number to all elements."""

    @abstractmethod
    def spread(self, target: int, source: int, element: int) -> None:
        """Of each four elements one to all four."""

    @abstractmethod
    def absolute(self, target: int, source: int, temporary: int) -> None:
        """|source|; the temporary register is overwritten."""

    @abstractmethod
    def round(self, target: int, source: int) -> None:
        """To the nearest whole number, of two to the even one."""

    @abstractmethod
    def inverse(self, target: int, source: int, temporary: int) -> None:
        """1 / source to a few units in the last place; the temporary register is overwritten."""

    @abstractmethod
    def times_power(self, target: int, value: int, power: int) -> None:
        """value · 2^power, of whole powers from `least_power` on to 127."""

    @property
    @abstractmethod
    def least_power(self) -> float:
        """The lowest power that `times_power` takes: where that is not minus infinity, 2 to it stands for 0."""

    def end_vectors(self) -> None:
        """Before code that uses shorter vectors (VZEROUPPER)."""
        self._code += b"\xc5\xf8\x77"
