"""Instructions for vectors of 256 bits (VEX, AVX2 and FMA3): registers ymm 0 to 14; 15 is the assembler's own.

There are no mask registers: what a mask lets pass lies in the pool and is loaded where it is used. Constants lie in the
pool as often as a register has elements.
"""

from __future__ import annotations

import struct

from taso.backends.x86.assembler import (
    AND_NOT,
    AVX2,
    BROADCAST,
    LOAD,
    OPCODES,
    PERMUTE,
    ROUND,
    STORE,
    Assembler,
    Mem,
    Opcode,
    Pooled,
)
from taso.graph.errors import BackendError

_OWN = 15
_MASKED_LOAD, _MASKED_STORE = Opcode(1, 2, 0x2C), Opcode(1, 2, 0x2E)
"""VMASKMOVPS."""
_TO_INTEGER = Opcode(1, 1, 0x5B)
"""VCVTPS2DQ."""
_ADD_INTEGER = Opcode(1, 1, 0xFE)
"""VPADDD."""
_SHIFT = Opcode(1, 1, 0x72)
"""VPSLLD, with 6 for its first register."""
_SHIFT_LEFT = 6
_BIAS, _EXPONENT = 127, 23
"""What is added to the exponent of a float32, and at which bit that begins."""


class Avx2(Assembler):
    """Code for processors with AVX2 and FMA3."""

    isa = AVX2
    least_power = -126.0

    def __init__(self) -> None:
        super().__init__()
        self._masks: dict[int, bytes] = {}

    def _vex(
        self, how: Opcode, reg: int, second: int, rm: int | Mem | bytes, immediate: int | None = None
    ) -> None:
        """An instruction on ymm registers; bytes are a constant of the pool."""
        base = rm.base if isinstance(rm, Mem) else rm if isinstance(rm, int) else 0
        self._code += bytes([
            0xC4, (~reg >> 3 & 1) << 7 | 1 << 6 | (~base >> 3 & 1) << 5 | how.map,
            (~second & 15) << 3 | 4 | how.prefix, how.number,
        ])  # fmt: skip
        if isinstance(rm, bytes):
            self._code.append((reg & 7) << 3 | 5)
            self._refer(rm, immediate is not None)
        else:
            self._operand(reg, rm, 1)
        if immediate is not None:
            self._code.append(immediate)

    def mask(self, number: int, elements: int) -> None:
        # VMASKMOVPS looks at signs
        self._masks[number] = b"\xff\xff\xff\xff" * elements + bytes(4 * (self.isa.width - elements))

    def _passing(self, mask: int) -> bytes:
        if mask not in self._masks:
            raise BackendError(f"no mask {mask} is set")
        return self._masks[mask]

    def vector(self, name: str, target: int, first: int, second: int | Mem | Pooled, *, mask: int = 0) -> None:
        rm = _each(second.value) if isinstance(second, Pooled) else second
        if mask and isinstance(rm, Mem):
            self.move(_OWN, rm, mask)
            rm = _OWN
        self._vex(OPCODES[name], target, first, rm)

    def move(self, target: int, source: int | Mem, mask: int = 0) -> None:
        if not mask:
            self._vex(LOAD, target, 0, source)
            return
        if isinstance(source, int):
            raise BackendError("a mask is for what is in memory")
        self._vex(LOAD, target, 0, self._passing(mask))
        self._vex(_MASKED_LOAD, target, target, source)

    def write(self, target: Mem, source: int, mask: int = 0) -> None:
        if not mask:
            self._vex(STORE, source, 0, target)
            return
        self._vex(LOAD, _OWN, 0, self._passing(mask))
        self._vex(_MASKED_STORE, source, _OWN, target)

    def broadcast(self, target: int, source: Mem | Pooled) -> None:
        if isinstance(source, Pooled):
            self._vex(LOAD, target, 0, _each(source.value))
        else:
            self._vex(BROADCAST, target, 0, source)

    def spread(self, target: int, source: int, element: int) -> None:
        self._vex(PERMUTE, target, 0, source, element * 0x55)

    def absolute(self, target: int, source: int, temporary: int) -> None:
        self.broadcast(temporary, Pooled(-0.0))
        self._vex(AND_NOT, target, temporary, source)

    def round(self, target: int, source: int) -> None:
        self._vex(ROUND, target, 0, source, 0)

    def inverse(self, target: int, source: int, temporary: int) -> None:
        self.broadcast(temporary, Pooled(1.0))
        self.vector("div", target, temporary, source)

    def times_power(self, target: int, value: int, power: int) -> None:
        # the number that has the power for its exponent, and nothing behind the point
        self._vex(_TO_INTEGER, _OWN, 0, power)
        self._vex(_ADD_INTEGER, _OWN, _OWN, struct.pack("<i", _BIAS) * self.isa.width)
        self._vex(_SHIFT, _SHIFT_LEFT, _OWN, _OWN, _EXPONENT)
        self.vector("mul", target, value, _OWN)


def _each(value: float) -> bytes:
    return struct.pack("<f", value) * AVX2.width


__all__ = ["Avx2"]
