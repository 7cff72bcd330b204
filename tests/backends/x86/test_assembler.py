"""Every instruction of the assembler, with operands of all kinds, as binutils' disassembler reads it."""

from __future__ import annotations

import re
import shutil
import struct
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path

import guarded
import pytest

from taso.backends.x86 import assembler as asm_module
from taso.backends.x86 import products
from taso.backends.x86.assembler import AVX2, AVX512, R15, RAX, RBP, RDI, RSP, Assembler, Isa, Mem, Pooled
from taso.backends.x86.avx2 import Avx2
from taso.backends.x86.avx512 import Avx512
from taso.backends.x86.functions import Function
from taso.backends.x86.products import ByColumn, ByElement, Product
from taso.graph.errors import BackendError

OBJDUMP = shutil.which("objdump")


def _no_objdump() -> str:
    if OBJDUMP is None:
        return "binutils' objdump is not installed"
    known = subprocess.run([OBJDUMP, "-i"], capture_output=True, text=True, check=True).stdout
    return "" if "elf64-x86-64" in known else "objdump does not know x86-64"


NAMES = ("rax", "rcx", "rdx", "rbx", "rsp", "rbp", "rsi", "rdi", *(f"r{i}" for i in range(8, 16)))
LOW = ("eax", "ecx", "edx", "ebx", "esp", "ebp", "esi", "edi")
OFFSETS = (0, 1, 4, 12, 64, 127, 128, 508, 512, 8128, 8192, 1 << 20, -1, -4, -64, -128, -129, -512, -516, -8192, -8256)
VECTORS = (0, 1, 7, 8, 15, 16, 23, 24, 31)
OPCODES = {
    "add": "vaddps", "mul": "vmulps", "sub": "vsubps", "min": "vminps", "div": "vdivps", "max": "vmaxps",
    "fma231": "vfmadd231ps", "fma213": "vfmadd213ps", "fnma231": "vfnmadd231ps", "fnma213": "vfnmadd213ps",
    "xor": "vpxord", "and": "vpandd", "or": "vpord",
}  # fmt: skip
JUMPS = {"": "jmp", "zero": "je", "nonzero": "jne", "below": "jb", "at least": "jae"}


@dataclass
class Listing:
    """Instructions written, each with the text that it should disassemble to."""

    asm: Avx512 = field(default_factory=Avx512)
    wanted: dict[int, str | Callable[[], str]] = field(default_factory=dict)
    constants: dict[int, float] = field(default_factory=dict)

    def add(
        self, text: str | Callable[[], str], write: Callable[..., object], *operands: object,
        constant: float | None = None, **options: object,
    ) -> None:  # fmt: skip
        """`constant` is the number of the pool that the instruction should refer to."""
        at = self.asm.offset(self.asm.here())
        self.wanted[at] = text
        if constant is not None:
            self.constants[at] = constant
        write(*operands, **options)

    def check(self, folder: Path) -> None:
        end = self.asm.offset(self.asm.here())
        code = self.asm.finish()
        found = disassembled(code, end, folder)
        wanted = {at: text if isinstance(text, str) else text() for at, text in self.wanted.items()}
        assert {at: text for at, (text, _) in found.items()} == wanted
        for at, value in self.constants.items():
            to = found[at][1]
            assert to is not None and to >= end and to % 4 == 0
            assert code[to : to + 4] == struct.pack("<f", value), "the number that is meant, to the bit"


def disassembled(code: bytes, end: int, folder: Path) -> dict[int, tuple[str, int | None]]:
    """Instructions by address: text in Intel's way, and the address that a relative operand means."""
    assert OBJDUMP is not None
    (folder / "code").write_bytes(code)
    command = [OBJDUMP, "-D", "-b", "binary", "-m", "i386:x86-64", "-M", "intel", "--no-show-raw-insn", "-z"]
    command += [f"--stop-address={end}", str(folder / "code")]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found: dict[int, tuple[str, int | None]] = {}
    for line in shown.splitlines():
        read = re.match(r"\s*([0-9a-f]+):\t(.*?)\s*(?:# 0x([0-9a-f]+))?$", line)
        if read:
            text = re.sub(r"\s+", " ", read[2].strip())
            # how far a constant is, is told by where it is
            text = re.sub(r"\[rip\+0x[0-9a-f]+\]", "[rip]", text)
            # what later versions call BCST
            text = re.sub(r"DWORD PTR (\[.*\])\{1to16\}", r"DWORD BCST \1", text)
            found[int(read[1], 16)] = (text, int(read[3], 16) if read[3] else None)
    return found


def memory(at: Mem, size: str) -> str:
    """As the disassembler shows what lies there."""
    return (f"{size} PTR " if size else "") + f"[{NAMES[at.base]}{displacement(at)}]"


def displacement(at: Mem) -> str:
    if at.offset == 0:
        # these have no way without an offset
        return "+0x0" if at.base & 7 == RBP else ""
    return f"{'-' if at.offset < 0 else '+'}{abs(at.offset):#x}"


def masked(mask: int) -> str:
    return f"{{k{mask}}}{{z}}" if mask else ""


def places() -> Iterator[Mem]:
    for base, offset in product(range(16), OFFSETS):
        yield Mem(base, offset)


pytestmark = pytest.mark.skipif(bool(_no_objdump()), reason=_no_objdump() or "objdump is there")


def test_general_registers_are_the_ones_that_are_meant(tmp_path: Path) -> None:
    code = Listing()
    a = code.asm
    for one, other in product(range(16), repeat=2):
        x, y = NAMES[one], NAMES[other]
        code.add(f"mov {x},{y}", a.copy, one, other)
        code.add(f"add {x},{y}", a.add_register, one, other)
        code.add(f"cmp {x},{y}", a.compare, one, other)
    for register, name in enumerate(NAMES):
        code.add(f"xor {name},{name}", a.zero, register)
        code.add(f"push {name}", a.push, register)
        code.add(f"pop {name}", a.pop, register)
        code.add(f"call {name}", a.call, register)
        code.add(f"jmp {name}", a.jump_to, register)
        for bits in (1, 6, 63):
            code.add(f"shl {name},{bits:#x}", a.shift_left, register, bits)
        for size in (1, 64, 4096, 1 << 31):
            code.add(f"and {name},{-size % (1 << 64):#x}", a.align_down, register, size)
        for value in (0, 1, 64, 1000, (1 << 31) - 1, -1, -8, -(1 << 31)):
            code.add(f"add {name},{value % (1 << 64):#x}", a.add, register, value)
        for value in (0, 1, -1, -(1 << 63), (1 << 63) - 1, 0x0123456789ABCDEF):
            code.add(f"movabs {name},{value % (1 << 64):#x}", a.constant, register, value)
    code.add("ret", a.ret)
    code.add("vzeroupper", a.end_vectors)
    code.check(tmp_path)


def test_memory_is_where_it_is_meant_behind_any_register(tmp_path: Path) -> None:
    code = Listing()
    a = code.asm
    for at, other in product(places(), (False, True)):
        register = (at.base * 7 + at.offset) % 16 if other else at.base
        name = NAMES[register]
        code.add(f"mov {name},{memory(at, 'QWORD')}", a.load, register, at)
        code.add(f"mov {memory(at, 'QWORD')},{name}", a.store, at, register)
        code.add(f"cmp {name},{memory(at, 'QWORD')}", a.compare, register, at)
        code.add(f"lea {name},{memory(at, '')}", a.lea, register, at)
        code.add(f"lock xadd {memory(at, 'QWORD')},{name}", a.fetch_add, at, register)
    for at in places():
        for level in (1, 2):
            code.add(f"prefetcht{level - 1} {memory(at, 'BYTE')}", a.prefetch, at, level)
        code.add(f"prefetcht0 {memory(at, 'BYTE')}", a.prefetch, at)
        code.add(f"prefetchw {memory(at, 'BYTE')}", a.prefetch_to_write, at)
    code.check(tmp_path)


@pytest.mark.parametrize("name", OPCODES)
def test_operations_on_vectors_take_registers(name: str, tmp_path: Path) -> None:
    code = Listing()
    a = code.asm
    for one, two, three in product(VECTORS, repeat=3):
        for mask in (0, 1 + (one + two + three) % 7):
            text = f"{OPCODES[name]} zmm{one}{masked(mask)},zmm{two},zmm{three}"
            code.add(text, a.vector, name, one, two, three, mask=mask)
    code.check(tmp_path)


@pytest.mark.parametrize("name", OPCODES)
def test_operations_on_vectors_take_memory_and_constants(name: str, tmp_path: Path) -> None:
    code = Listing()
    a = code.asm
    for number, at in enumerate(places()):
        one, two, mask = number % 32, (number * 5 + 3) % 32, number % 8
        text = f"{OPCODES[name]} zmm{one}{masked(mask)},zmm{two},{memory(at, 'ZMMWORD')}"
        code.add(text, a.vector, name, one, two, at, mask=mask)
    for one, two in product(VECTORS, repeat=2):
        for value in (0.0, -0.0, 1.0, float(one) + 0.1, -3.4e38, 1e-45, float("inf")):
            text = f"{OPCODES[name]} zmm{one},zmm{two},DWORD BCST [rip]"
            code.add(text, a.vector, name, one, two, Pooled(value), constant=value)
    code.check(tmp_path)


def test_every_operation_on_vectors_is_among_these() -> None:
    assert set(OPCODES) == set(asm_module.OPCODES) and set(JUMPS) - {""} == set(asm_module._CONDITIONS)
    # one test at least calls each of these, what is on vectors for both kinds of them
    tested = {name for name in dir(Assembler) if not name.startswith("_")} - {"isa", "least_power"}
    wide, short = re.split(r"\n# ── registers of 256 bits ─+\n", Path(__file__).read_text())
    called = [set(re.findall(r"\ba\.(\w+)", text)) for text in (wide, short)]
    assert tested <= called[0] | {"finish", "offset", "here", "label", "set"}
    assert Assembler.__abstractmethods__ - {"least_power"} <= called[1]


def test_moves_of_vectors_respect_masks(tmp_path: Path) -> None:
    code = Listing()
    a = code.asm
    for one, two, mask in product(range(32), VECTORS, (0, 1, 7)):
        code.add(f"vmovups zmm{one}{masked(mask)},zmm{two}", a.move, one, two, mask)
    for number, at in enumerate(places()):
        one, mask = number % 32, number % 8
        code.add(f"vmovups zmm{one}{masked(mask)},{memory(at, 'ZMMWORD')}", a.move, one, at, mask)
        # what is written keeps what the mask leaves out
        kept = f"{{k{mask}}}" if mask else ""
        code.add(f"vmovups {memory(at, 'ZMMWORD')}{kept},zmm{one}", a.write, at, one, mask)
        code.add(f"vbroadcastss zmm{one},{memory(at, 'DWORD')}", a.broadcast, one, at)
    for number, elements in product(range(1, 8), (1, 7, 15)):
        code.add(f"movabs rax,{(1 << elements) - 1:#x}", a.mask, number, elements)
        # behind the ten bytes of that
        code.wanted[a.offset(a.here()) - 4] = f"kmovw k{number},eax"
    code.check(tmp_path)


def test_functions_of_one_vector_are_the_ones_that_are_meant(tmp_path: Path) -> None:
    code = Listing()
    a = code.asm
    for one, two in product(range(32), repeat=2):
        code.add(f"vrndscaleps zmm{one},zmm{two},0x0", a.round, one, two)
        code.add(f"vrcp14ps zmm{one},zmm{two}", a.reciprocal, one, two)
        for element in range(4):
            code.add(f"vpermilps zmm{one},zmm{two},{element * 0x55:#x}", a.spread, one, two, element)
        code.add(f"vscalefps zmm{one},zmm{two},zmm{(one + two) % 32}", a.times_power, one, two, (one + two) % 32)
    for register, value in product(range(32), (2.0, -0.0, 1e-45)):
        code.add(f"vbroadcastss zmm{register},DWORD PTR [rip]", a.broadcast, register, Pooled(value), constant=value)
    code.check(tmp_path)


def test_an_inverse_is_an_estimate_and_a_step_behind_it(tmp_path: Path) -> None:
    code = Listing()
    a = code.asm
    a.inverse(3, 17, 9)
    texts = [text for text, _ in disassembled(a.finish(), a.offset(a.here()), tmp_path).values()]
    assert texts == [
        "vrcp14ps zmm3,zmm17", "vbroadcastss zmm9,DWORD PTR [rip]", "vfnmadd231ps zmm9,zmm17,zmm3",
        "vmulps zmm3,zmm3,zmm9",
    ]  # fmt: skip


@pytest.mark.parametrize("one, two, temporary", [(0, 1, 2), (31, 17, 30), (5, 5, 8), (16, 24, 15)])
def test_the_absolute_value_is_all_but_the_sign(one: int, two: int, temporary: int, tmp_path: Path) -> None:
    code = Listing()
    a = code.asm
    code.add(f"vbroadcastss zmm{temporary},DWORD PTR [rip]", a.absolute, one, two, temporary, constant=-0.0)
    # of the two instructions the second one begins where a broadcast of a constant ends
    code.wanted[10] = f"vpandnd zmm{one},zmm{temporary},zmm{two}"
    code.check(tmp_path)


def test_constants_are_held_once_each() -> None:
    a = Avx512()
    for value in (1.0, 2.0, 1.0, 0.0, -0.0, 2.0):
        a.broadcast(0, Pooled(value))
    code = a.finish()
    pool = code[64 * -(-6 * 10 // 64) :]
    assert pool == struct.pack("<4f", 1.0, 2.0, 0.0, -0.0)


def test_jumps_go_forward_and_back(tmp_path: Path) -> None:
    code = Listing()
    a = code.asm
    before, behind = a.label(), a.label()
    a.set(before)
    for far in (1, 40):
        for condition, name in JUMPS.items():
            for label in (before, behind):
                code.add(lambda n=name, to=label: f"{n} {a.offset(to):#x}", a.jump, label, condition)
        for _ in range(far):
            code.add(f"add {NAMES[RSP]},0x1", a.add, RSP, 1)
    # a jump to itself
    itself = a.here()
    code.add(lambda: f"jne {a.offset(itself):#x}", a.jump, itself, "nonzero")
    a.set(behind)
    code.add("ret", a.ret)
    code.check(tmp_path)


def test_a_label_that_is_never_set_is_an_error() -> None:
    a = Avx512()
    a.jump(a.label(), "zero")
    a.ret()
    with pytest.raises(BackendError, match="label that is not set"):
        a.finish()


def test_places_add_up() -> None:
    assert Mem(RDI, 8) + 56 == Mem(RDI, 64) and Mem(RAX) + -8 == Mem(RAX, -8) and Mem(R15).offset == 0


@pytest.mark.parametrize("byte", range(7))
def test_a_corrupted_instruction_does_not_pass(byte: int, tmp_path: Path) -> None:
    def listing(corrupted: bool) -> Listing:
        code = Listing()
        code.add("vfmadd231ps zmm17,zmm3,ZMMWORD PTR [r12+0x40]", code.asm.vector, "fma231", 17, 3, Mem(12, 64))
        if corrupted:
            code.asm._code[byte] ^= 0x20
        return code

    listing(False).check(tmp_path)
    with pytest.raises(AssertionError):
        listing(True).check(tmp_path)


# ── registers of 256 bits ────────────────────────────────────────────────────────────────────────────────────────


VEX_OPCODES = {name: text.replace("vpxord", "vpxor").replace("vpandd", "vpand").replace("vpord", "vpor")
               for name, text in OPCODES.items()}  # fmt: skip
PASSING = struct.pack("<8I", *(3 * [0xFFFFFFFF]), *(5 * [0]))
"""What lies in the pool for a mask of three elements."""


@dataclass
class Short:
    """Instructions on ymm registers, and their texts: one of the assembler may be several of the processor."""

    asm: Avx2 = field(default_factory=Avx2)
    wanted: list[str] = field(default_factory=list)
    pooled: list[bytes] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.asm.mask(2, 3)

    def add(self, texts: list[str], write: Callable[..., object], *operands: object, **options: object) -> None:
        self.wanted += texts
        write(*operands, **options)

    def check(self, folder: Path) -> None:
        end = self.asm.offset(self.asm.here())
        code = self.asm.finish()
        found = list(disassembled(code, end, folder).values())
        assert [text for text, _ in found] == self.wanted
        places = [to for _, to in found if to is not None]
        assert all(to >= end and to % 32 == 0 for to in places)
        assert [code[to : to + 32] for to in places] == self.pooled, "the numbers that are meant, to the bit"


def each(value: float) -> bytes:
    return struct.pack("<f", value) * 8


@pytest.mark.parametrize("name", VEX_OPCODES)
def test_operations_on_short_vectors_take_registers_memory_and_constants(name: str, tmp_path: Path) -> None:
    code = Short()
    a, text = code.asm, VEX_OPCODES[name]
    for one, two, three in product(range(16), (0, 7, 8, 15), (0, 5, 8, 15)):
        code.add([f"{text} ymm{one},ymm{two},ymm{three}"], a.vector, name, one, two, three)
    for number, at in enumerate(places()):
        one, two = number % 16, (number * 5 + 3) % 16
        code.add([f"{text} ymm{one},ymm{two},{memory(at, 'YMMWORD')}"], a.vector, name, one, two, at)
        code.add(
            ["vmovups ymm15,YMMWORD PTR [rip]", f"vmaskmovps ymm15,ymm15,{memory(at, 'YMMWORD')}",
             f"{text} ymm{one},ymm{two},ymm15"], a.vector, name, one, two, at, mask=2,
        )  # fmt: skip
        code.pooled.append(PASSING)
    for one, value in product((0, 9), (0.0, -0.0, 1.0, -3.4e38, 1e-45, float("inf"))):
        code.add([f"{text} ymm{one},ymm7,YMMWORD PTR [rip]"], a.vector, name, one, 7, Pooled(value))
        code.pooled.append(each(value))
    code.check(tmp_path)


def test_moves_of_short_vectors_respect_masks(tmp_path: Path) -> None:
    code = Short()
    a, load = code.asm, "vmovups ymm15,YMMWORD PTR [rip]"
    for one, two in product(range(16), repeat=2):
        code.add([f"vmovups ymm{one},ymm{two}"], a.move, one, two)
    for number, at in enumerate(places()):
        any_one, one, shown = number % 16, number % 15, memory(at, "YMMWORD")
        code.add([f"vmovups ymm{any_one},{shown}"], a.move, any_one, at)
        code.add([f"vmovups {shown},ymm{any_one}"], a.write, at, any_one)
        code.add([f"vbroadcastss ymm{any_one},{memory(at, 'DWORD')}"], a.broadcast, any_one, at)
        # register 15 is the assembler's own where there is a mask
        code.add(
            [f"vmovups ymm{one},YMMWORD PTR [rip]", f"vmaskmovps ymm{one},ymm{one},{shown}"], a.move, one, at, 2
        )  # fmt: skip
        code.add([load, f"vmaskmovps {shown},ymm15,ymm{one}"], a.write, at, one, 2)
        code.pooled += [PASSING, PASSING]
    code.check(tmp_path)


def test_functions_of_one_short_vector_are_the_ones_that_are_meant(tmp_path: Path) -> None:
    code = Short()
    a = code.asm
    for one, two in product(range(15), repeat=2):
        three = (one + two) % 15
        code.add([f"vroundps ymm{one},ymm{two},0x0"], a.round, one, two)
        for element in range(4):
            code.add([f"vpermilps ymm{one},ymm{two},{element * 0x55:#x}"], a.spread, one, two, element)
        code.add(
            [f"vmovups ymm{three},YMMWORD PTR [rip]", f"vdivps ymm{one},ymm{three},ymm{two}"],
            a.inverse, one, two, three,
        )  # fmt: skip
        code.add(
            [f"vmovups ymm{three},YMMWORD PTR [rip]", f"vpandn ymm{one},ymm{three},ymm{two}"],
            a.absolute, one, two, three,
        )  # fmt: skip
        code.add(
            [f"vcvtps2dq ymm15,ymm{three}", "vpaddd ymm15,ymm15,YMMWORD PTR [rip]", "vpslld ymm15,ymm15,0x17",
             f"vmulps ymm{one},ymm{two},ymm15"], a.times_power, one, two, three,
        )  # fmt: skip
        code.pooled += [each(1.0), each(-0.0), struct.pack("<8i", *(8 * [127]))]
        code.add([f"vmovups ymm{one},YMMWORD PTR [rip]"], a.broadcast, one, Pooled(2.5))
        code.pooled.append(each(2.5))
    code.check(tmp_path)


@pytest.mark.parametrize("write", [
    lambda a: a.move(0, Mem(RAX), 1), lambda a: a.write(Mem(RAX), 0, 1),
    lambda a: a.vector("add", 0, 0, Mem(RAX), mask=1),
], ids=["move", "write", "vector"])  # fmt: skip
def test_a_mask_of_short_vectors_that_is_not_set_is_an_error(write: Callable[[Avx2], object]) -> None:
    a = Avx2()
    a.mask(2, 3)
    with pytest.raises(BackendError, match="no mask 1"):
        write(a)


def test_a_mask_of_short_vectors_is_for_memory_alone() -> None:
    a = Avx2()
    a.mask(1, 3)
    with pytest.raises(BackendError, match="in memory"):
        a.move(0, 1, 1)


@pytest.mark.parametrize("elements", range(1, 8))
def test_masks_of_short_vectors_lie_in_the_pool(elements: int) -> None:
    a = Avx2()
    # no code sets them, and the last one counts
    a.mask(1, 8 - elements)
    a.mask(1, elements)
    a.mask(2, 8)
    assert a.offset(a.here()) == 0
    a.move(0, Mem(RAX), 1)
    a.write(Mem(RAX), 0, 2)
    pool = a.finish()[64:]
    assert struct.unpack("<16i", pool) == (*elements * [-1], *(8 - elements) * [0], *8 * [-1])


def test_constants_of_short_vectors_are_held_once_each_a_register_long() -> None:
    a = Avx2()
    a.mask(1, 5)
    for value in (1.0, 2.0, 1.0, 0.0, -0.0, 2.0):
        a.broadcast(0, Pooled(value))
        a.vector("mul", 0, 1, Pooled(value))
        a.move(0, Mem(RAX), 1)
    end = a.offset(a.here())
    code = a.finish()
    start = 64 * -(-end // 64)
    wanted = each(1.0), struct.pack("<8i", *(5 * [-1]), *(3 * [0])), each(2.0), each(0.0), each(-0.0)
    assert code[start:] == b"".join(wanted) and not any(code[end:start])


@pytest.mark.parametrize("byte", range(7))
def test_a_corrupted_instruction_on_short_vectors_does_not_pass(byte: int, tmp_path: Path) -> None:
    def listing(corrupted: bool) -> Short:
        code = Short()
        code.add(["vfmadd231ps ymm9,ymm3,YMMWORD PTR [r12+0x40]"], code.asm.vector, "fma231", 9, 3, Mem(12, 64))
        if corrupted:
            code.asm._code[byte] ^= 0x20
        return code

    listing(False).check(tmp_path)
    with pytest.raises(AssertionError):
        listing(True).check(tmp_path)


@pytest.mark.parametrize("isa", [AVX512, AVX2], ids=lambda isa: isa.name)
def test_operations_that_other_tests_corrupt_are_those_of_the_code(
    isa: Isa, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guarded, "isa", lambda: isa)
    posts = (ByColumn("add"), Function("gelu_erf"), ByElement("sub"), Function("relu"), ByColumn("mul"))
    a = products._Writer(Product(20, 9, 37, 9, 37, posts, isa=isa), 0).asm
    end = a.offset(a.here())
    code = a.finish()
    listing = disassembled(code, end, tmp_path)
    # behind EVEX's prefix of four bytes, or VEX's of three
    prefix = 4 if isa == AVX512 else 3
    for opcode, name in ((0xB8, "vfmadd231ps"), (0x58, "vaddps"), (0x59, "vmulps"), (0x5C, "vsubps"), (0x5F, "vmaxps")):
        wanted = [at + prefix for at, (text, _) in listing.items() if text.startswith(f"{name} ")]
        assert wanted and guarded.operations(code, opcode) == wanted


@pytest.mark.parametrize("place", (0, 31))
def test_a_corrupted_constant_of_short_vectors_does_not_pass(place: int, tmp_path: Path) -> None:
    code = Short()
    code.add(["vmovups ymm3,YMMWORD PTR [rip]"], code.asm.broadcast, 3, Pooled(1.5))
    code.pooled.append(each(1.5))
    code.check(tmp_path)
    wrong = bytearray(each(1.5))
    wrong[place] ^= 1
    code.pooled[0] = bytes(wrong)
    with pytest.raises(AssertionError, match="to the bit"):
        code.check(tmp_path)
