"""Instructions for vectors of 512 bits (EVEX): registers zmm 0 to 31, masks 1 to 7."""

from __future__ import annotations

import math
import struct

from taso.backends.x86.assembler import (
    AND_NOT,
    AVX512,
    BROADCAST,
    LOAD,
    OPCODES,
    PERMUTE,
    RAX,
    ROUND,
    STORE,
    Assembler,
    Mem,
    Opcode,
    Pooled,
)

_FLOAT_BYTES = 4
_SCALE = Opcode(1, 2, 0x2C)
"""VSCALEFPS."""
_RECIPROCAL = Opcode(1, 2, 0x4C)
"""VRCP14PS."""


class Avx512(Assembler):
    """Code for processors with AVX-512F."""

    isa = AVX512
    least_power = -math.inf

    def _evex(
        self, how: Opcode, reg: int, second: int, rm: int | Mem | Pooled, unit: int, *, each: bool = False,
        mask: int = 0, zeroing: bool = False, immediate: int | None = None,
    ) -> None:  # fmt: skip
        """An instruction on zmm registers; with `each` its memory operand is one number for all elements."""
        base = rm.base if isinstance(rm, Mem) else rm if isinstance(rm, int) else 0
        high = base >> 4 & 1 if isinstance(rm, int) else 0
        one = (~reg >> 3 & 1) << 7 | (~high & 1) << 6 | (~base >> 3 & 1) << 5 | (~reg >> 4 & 1) << 4 | how.map
        two = (~second & 15) << 3 | 4 | how.prefix
        three = zeroing << 7 | 2 << 5 | each << 4 | (~second >> 4 & 1) << 3 | mask
        self._code += bytes([0x62, one, two, three, how.number])
        if isinstance(rm, Pooled):
            self._code.append((reg & 7) << 3 | 5)
            self._refer(struct.pack("<f", rm.value), immediate is not None)
        else:
            self._operand(reg, rm, unit)
        if immediate is not None:
            self._code.append(immediate)

    def mask(self, number: int, elements: int) -> None:
        # KMOVW
        self.constant(RAX, (1 << elements) - 1)
        self._code += bytes([0xC5, 0xF8, 0x92, 0xC0 | number << 3 | RAX])

    def vector(self, name: str, target: int, first: int, second: int | Mem | Pooled, *, mask: int = 0) -> None:
        each = isinstance(second, Pooled)
        unit = _FLOAT_BYTES if each else self.isa.bytes
        # what a mask leaves out of memory is not read
        self._evex(OPCODES[name], target, first, second, unit, each=each, mask=mask, zeroing=bool(mask))

    def move(self, target: int, source: int | Mem, mask: int = 0) -> None:
        self._evex(LOAD, target, 0, source, self.isa.bytes, mask=mask, zeroing=bool(mask))

    def write(self, target: Mem, source: int, mask: int = 0) -> None:
        self._evex(STORE, source, 0, target, self.isa.bytes, mask=mask)

    def broadcast(self, target: int, source: Mem | Pooled) -> None:
        self._evex(BROADCAST, target, 0, source, _FLOAT_BYTES)

    def spread(self, target: int, source: int, element: int) -> None:
        self._evex(PERMUTE, target, 0, source, self.isa.bytes, immediate=element * 0x55)

    def absolute(self, target: int, source: int, temporary: int) -> None:
        self.broadcast(temporary, Pooled(-0.0))
        self._evex(AND_NOT, target, temporary, source, self.isa.bytes)

    def round(self, target: int, source: int) -> None:
        self._evex(ROUND, target, 0, source, self.isa.bytes, immediate=0)

    def reciprocal(self, target: int, source: int) -> None:
        """1 / source with a relative error below 2⁻¹⁴."""
        self._evex(_RECIPROCAL, target, 0, source, self.isa.bytes)

    def inverse(self, target: int, source: int, temporary: int) -> None:
        # one step of Newton's behind an estimate
        self.reciprocal(target, source)
        self.broadcast(temporary, Pooled(2.0))
        self.vector("fnma231", temporary, source, target)
        self.vector("mul", target, target, temporary)

    def times_power(self, target: int, value: int, power: int) -> None:
        self._evex(_SCALE, target, value, power, self.isa.bytes)


__all__ = ["Avx512"]
