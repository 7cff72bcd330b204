"""The assembler for each set of instructions."""

from __future__ import annotations

from taso.backends.x86.assembler import AVX2, AVX512, Assembler, Isa
from taso.backends.x86.avx2 import Avx2
from taso.backends.x86.avx512 import Avx512

_ASSEMBLERS: dict[Isa, type[Assembler]] = {AVX512: Avx512, AVX2: Avx2}


def assembler(isa: Isa) -> Assembler:
    """An assembler with nothing written yet."""
    return _ASSEMBLERS[isa]()


__all__ = ["assembler"]
