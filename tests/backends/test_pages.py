"""Memory on large pages: zeroed, aligned, apart from each other, and given back when nothing refers to it."""

from __future__ import annotations

import gc
import mmap
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import taso
from taso.backends import aside, pages
from taso.backends.onednn.executor import Program, StaticProgram
from taso.backends.pages import zeroed


@given(st.lists(st.integers(0, 1 << 20), min_size=1, max_size=20))
def test_blocks_are_zeroed_aligned_and_do_not_overlap(sizes: list[int]) -> None:
    blocks = [zeroed(size) for size in sizes]
    for number, (block, size) in enumerate(zip(blocks, sizes, strict=True)):
        assert block.dtype == np.uint8 and block.shape == (size,) and not block.any()
        assert not size or block.ctypes.data % pages.ALIGNMENT == 0
        block.fill(number + 1)
    assert all(np.all(block == number + 1) for number, block in enumerate(blocks))


def test_a_view_keeps_its_bytes_when_the_block_itself_is_gone() -> None:
    def view() -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
        block = zeroed(1 << 20)
        block.view(np.float32)[:] = 7
        return block.view(np.float32)[4096:8192].reshape(64, 64)[3:]

    found = view()
    gc.collect()
    others = [zeroed(1 << 20) for _ in range(4)]
    assert np.all(found == 7) and not any(o.any() for o in others)


def test_memory_that_the_system_does_not_take_back_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    class Locked:
        def madvise(self, *given: int) -> None:
            raise OSError(22, "Invalid argument")

    pages._give_back(Locked(), 0, 1 << 20)  # type: ignore[arg-type]  # stands in for a mapping


def test_what_measuring_keeps_is_counted_as_long_as_it_is_there() -> None:
    before, block = aside.held(), zeroed(1 << 20)
    aside.set_aside(block)
    assert aside.held() == before + (1 << 20)
    del block
    gc.collect()
    assert aside.held() == before


def test_without_large_pages_or_address_space_there_is_memory_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "_HAS_LARGE_PAGES", False)
    assert zeroed(1 << 20).ctypes.data % pages.ALIGNMENT == 0
    monkeypatch.undo()

    def none_left(size: int) -> None:
        raise OSError("Cannot allocate memory")

    monkeypatch.setattr(pages, "_Reservation", none_left)
    monkeypatch.setattr(pages, "_current", None)
    found = zeroed(1 << 20)
    assert found.shape == (1 << 20,) and not found.any() and found.ctypes.data % pages.ALIGNMENT == 0


@pytest.mark.skipif(sys.platform != "linux", reason="reads Linux's account of memory")
def test_memory_goes_back_to_the_system_while_its_neighbours_are_in_use() -> None:
    def resident() -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon"))

    size = 8 << 20
    neighbours = [zeroed(4096)]
    blocks = []
    before = resident()
    for _ in range(6):
        blocks.append(zeroed(size))
        blocks[-1].fill(1)
        neighbours.append(zeroed(4096))
    assert resident() - before > 5 * size
    blocks.clear()
    gc.collect()
    assert resident() - before < 2 * size
    assert not any(n.any() for n in neighbours)


@pytest.mark.skipif(not pages._HAS_LARGE_PAGES, reason="asks for large pages, which only Linux gives")
def test_a_program_and_its_weights_ask_for_large_pages() -> None:
    def asked(address: int) -> bool:
        """Whether the mapping that holds an address is one for which large pages were asked (`hg` in its flags)."""
        inside = False
        for line in Path("/proc/self/smaps").read_text().splitlines():
            first, _, rest = line.partition(" ")
            if "-" in first and not first.endswith(":"):
                start, stop = (int(part, 16) for part in first.split("-"))
                inside = start <= address < stop
            elif inside and first == "VmFlags:":
                return "hg" in rest.split()
        return False

    graph = taso.new_graph()
    # filters lie in blocks, wherever products of matrices take theirs as they are
    x, weight = graph.new_input(dims=(1, 256, 16, 16)), graph.new_weight(dims=(256, 256, 3, 3))
    graph.conv2d(input=x, weight=weight, strides=(1, 1), padding="SAME")
    program = taso.compile(graph, "onednn", 1)
    assert isinstance(program, Program) and isinstance(program._fixed, StaticProgram)
    arena, *kept = program._fixed._kept
    ((weights,),) = [found for found in kept if isinstance(found, list) and found]
    assert isinstance(arena, np.ndarray) and asked(arena.ctypes.data) and asked(weights.address)
    # memory for which nobody asked, in a mapping of its own
    assert not asked(np.frombuffer(mmap.mmap(-1, 1 << 16), np.uint8).ctypes.data)
