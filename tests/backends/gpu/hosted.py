"""Our CUDA sources compiled and run by the host's C++ compiler, on arrays; and by NVRTC, as far as machine code."""

from __future__ import annotations

import ctypes
import hashlib
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from taso.backends.cudnn.sources.launches import OUTSIDE, Source, Sourced, SourceLaunch
from taso.backends.cudnn.sources.nests import operand_strides
from taso.backends.cudnn.sources.prelude import PRELUDE
from taso.backends.fallback import evaluated
from taso.backends.lowering import PLAIN, Kernel, Operand, Step
from taso.backends.places import OPERAND, RESULT, Place
from taso.graph.operator import operator_named
from taso.graph.types import TensorType

Array = NDArray[np.generic]
HERE = Path(__file__).resolve().parent
_MARGIN = 256
_POISON = 0xFB
"""What surrounds a tensor in memory: as floats it is far too large for any result."""


def compiler() -> str | None:
    return shutil.which("g++") or shutil.which("clang++")


# ── kernels to try ───────────────────────────────────────────────────────────────────────────────────────────────

Given = tuple[int, ...] | Array


def kernel_of(
    steps: Sequence[tuple[str, Mapping[str, object], Sequence[int | None]]],
    operands: Sequence[Operand],
    results: int = 1,
    layout: str = PLAIN,
) -> Kernel:
    """A kernel of steps (name, attributes, inputs as in `Step`), whose results' types follow."""
    made: list[Step] = []
    types: list[tuple[TensorType, ...]] = []
    for name, attrs, inputs in steps:
        op = operator_named(name)
        full = op.complete(attrs)  # type: ignore[arg-type]  # values of attributes
        given = [None if r is None else operands[r].type if r >= 0 else types[-1 - r][0] for r in inputs]
        types.append(op.types_of(given, full))
        made.append(Step(op, full, tuple(inputs)))
    outs = types[-1] if made else tuple(o.type for o in operands)
    return Kernel(tuple(operands), tuple(made), tuple(Operand(t, layout, False) for t in outs))


@dataclass
class Trial:
    """A kernel, arrays for its operands, how far off its results may be, and whether it may be left to others."""

    name: str
    kernel: Kernel
    arrays: list[Array]
    tolerance: float
    sourced: Sourced | None = None
    wanted: Sequence[Array] | None = None
    seen: list[str] = field(default_factory=list)

    @cached_property
    def truth(self) -> Sequence[Array]:
        if self.wanted is not None:
            return self.wanted
        if not self.kernel.steps:
            return self.arrays
        with np.errstate(all="ignore"):
            return evaluated(self.kernel)(self.arrays)


# ── buffers ──────────────────────────────────────────────────────────────────────────────────────────────────────


class Buffer:
    """Memory with a margin on either side, and `shift` bytes off the alignment that allocations have."""

    def __init__(self, size: int, shift: int = 0) -> None:
        self.size = size
        self.held = np.full(size + 2 * _MARGIN + 64, _POISON, np.uint8)
        base = self.held.ctypes.data
        self.start = (-base) % 64 + _MARGIN + shift
        if self.start + size > len(self.held):
            self.held = np.full(size + 4 * _MARGIN + 64, _POISON, np.uint8)
            self.start = (-self.held.ctypes.data) % 64 + _MARGIN + shift
        self.address = self.held.ctypes.data + self.start

    @property
    def unharmed(self) -> bool:
        """Whether nothing was written in the margins."""
        around = np.concatenate([self.held[: self.start], self.held[self.start + self.size :]])
        return bool(np.all(around == _POISON))

    def view(self, operand: Operand) -> Array:
        t = operand.type
        strides = tuple(s * t.dtype.itemsize for s in operand_strides(operand))
        return np.ndarray(t.static_shape, t.dtype.numpy, self.held.data, self.start, strides)


def buffer_of(operand: Operand, array: Array | None, shift: int) -> Buffer:
    made = Buffer(operand.type.nbytes, shift * operand.type.dtype.itemsize)
    if array is not None and array.size:
        made.view(operand)[...] = array
    return made


# ── the host's compiler ──────────────────────────────────────────────────────────────────────────────────────────


class Library:
    """Many sources in few translation units, compiled at once."""

    def __init__(self, sources: Sequence[Source], folder: Path, per_unit: int = 1 << 30) -> None:
        self.sources = {s.entry: s for s in sources}
        entries = list(self.sources)
        self._functions: dict[str, ctypes._NamedFuncPointer] = {}
        for start in range(0, len(entries), per_unit):
            part = [self.sources[e] for e in entries[start : start + per_unit]]
            library = ctypes.CDLL(str(_compiled(part, folder)))
            self._functions.update((s.entry, getattr(library, f"run_{s.entry}")) for s in part)

    def run(self, launch: SourceLaunch, addresses: Sequence[int], backwards: bool) -> None:
        values = [ctypes.c_uint64(a) for a in addresses]
        pointers = (ctypes.c_void_p * len(values))(*(ctypes.addressof(v) for v in values))
        geometry = (ctypes.c_uint * 6)(*launch.grid, *launch.block)
        body = launch.source.code.removeprefix(PRELUDE)
        switched = bool(re.search(r"__sync|joined|__shfl|scanned", body))
        status = self._functions[launch.source.entry](pointers, geometry, int(switched), int(backwards))
        assert status == 0, f"{launch.source.name}: threads wait for others that never come"


def _compiled(sources: Sequence[Source], folder: Path) -> Path:
    parts = ['#include "host.hpp"', PRELUDE]
    for source in sources:
        assert source.code.startswith(PRELUDE)
        parts += [f"namespace n_{source.entry} {{", source.code.removeprefix(PRELUDE), "}"]
        call = f"return host::launch(&n_{source.entry}::{source.entry}, values, geometry, switched, reversed);"
        parts.append(
            f'extern "C" int run_{source.entry}(void** values, const unsigned* geometry, int switched, int reversed) '
            f"{{ {call} }}"
        )
    text = "\n".join(parts)
    name = folder / hashlib.sha256(text.encode()).hexdigest()[:16]
    file, library = name.with_suffix(".cpp"), name.with_suffix(".so")
    file.write_text(text)
    command = [
        str(compiler()), "-std=c++17", "-O1", "-w", "-shared", "-fPIC", "-fno-strict-aliasing", "-ffp-contract=off",
        "-I", str(HERE), str(file), "-o", str(library),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[:6000]
    return library


# ── a trial run ──────────────────────────────────────────────────────────────────────────────────────────────────


def run(trial: Trial, library: Library, shift: int = 0, backwards: bool = False) -> list[Array]:
    """Results of the trial's launches on buffers that begin `shift` elements behind an aligned address."""
    kernel, sourced = trial.kernel, trial.sourced
    assert sourced is not None
    operands = [buffer_of(o, a, shift) for o, a in zip(kernel.operands, trial.arrays, strict=True)]
    results = [buffer_of(r, None, shift) for r in kernel.results]
    scratch = [Buffer(size) for size in sourced.scratch]
    table = {OPERAND: operands, RESULT: results, "scratch": scratch, OUTSIDE.kind: [Buffer(4)]}

    def address(place: object) -> int:
        assert isinstance(place, Place)
        return table[place.kind][place.index].address + place.offset

    before = [b.held.copy() for b in operands]
    for launch in sourced.launches:
        library.run(launch, [address(a) for a in launch.arguments], backwards)
    assert all(np.array_equal(b.held, kept) for b, kept in zip(operands, before, strict=True)), "an operand was written"
    assert all(b.unharmed for b in (*results, *scratch)), "something beside a result was written"
    return [b.view(r).copy() for b, r in zip(results, kernel.results, strict=True)]


# ── NVRTC ────────────────────────────────────────────────────────────────────────────────────────────────────────


@cache
def nvrtc() -> ctypes.CDLL | None:
    """NVRTC's library where a package or the system has it."""
    names = [p for d in sys.path for p in Path(d).glob("nvidia/cu*/lib/libnvrtc.so.*")]
    names += [p for d in sys.path for p in Path(d).glob("nvidia/cuda_nvrtc/lib/libnvrtc.so.*")]
    for name in (*map(str, names), "libnvrtc.so", "libnvrtc.so.12", "libnvrtc.so.13"):
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    return None


def compiled_by_nvrtc(code: str, architecture: str) -> str:
    """What NVRTC says against the code; empty where it compiles to machine code."""
    library = nvrtc()
    assert library is not None
    program = ctypes.c_void_p()
    text = code.encode()
    assert library.nvrtcCreateProgram(ctypes.byref(program), text, b"kernel.cu", 0, None, None) == 0
    options = [f"--gpu-architecture={architecture}".encode(), b"--std=c++17"]
    given = (ctypes.c_char_p * len(options))(*options)
    status = library.nvrtcCompileProgram(program, len(options), given)
    size = ctypes.c_size_t()
    library.nvrtcGetProgramLogSize(program, ctypes.byref(size))
    log = ctypes.create_string_buffer(size.value)
    library.nvrtcGetProgramLog(program, log)
    machine = ctypes.c_size_t()
    library.nvrtcGetCUBINSize(program, ctypes.byref(machine))
    library.nvrtcDestroyProgram(ctypes.byref(program))
    said = log.value.decode()
    return said or "failed" if status or not machine.value else ""
