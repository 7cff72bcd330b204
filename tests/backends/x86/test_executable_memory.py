"""Memory that may be run: where the system forbids it nothing is offered, and it lives as long as somebody runs it."""

from __future__ import annotations

import ctypes
import gc
import mmap
import os
import platform
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from machine_code import why_not
from test_onednn_executor import Build, feeds_for, worst

from taso.backends.lowering import Choices, lower, structure
from taso.backends.onednn import coded, panels
from taso.backends.onednn.backend import OneDNNBackend
from taso.backends.onednn.coded import isa_here, needed_isa
from taso.backends.onednn.library import library
from taso.backends.onednn.primitives import Unimplemented
from taso.backends.x86 import code
from taso.backends.x86.assembler import AVX2, AVX512, Isa
from taso.backends.x86.code import Code, runs_here
from taso.backends.x86.products import ByColumn, Product, compiled, in_panels
from taso.graph.errors import BackendError
from taso.graph.evaluate import evaluate_graph
from taso.graph.graph import Graph

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not() or "it runs here")

ANSWER = b"\x48\x89\xf8\xc3"
"""mov rax, rdi; ret"""


def call(address: int, value: int) -> int:
    found: int = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64)(address)(value)
    return found


@pytest.fixture
def asked_anew() -> Iterator[None]:
    """What has been found out of this process is found out again, before and behind."""
    runs_here.cache_clear()
    yield
    runs_here.cache_clear()


def graph_with_plan() -> Graph:
    build = Build()
    value = build.op("Relu", build.op("Gemm", build.input(14, 20), build.weight(20, 40), build.weight(40)))
    graph = build.outputs(value)
    graph.plans["onednn"] = Choices(structure(graph), algorithms={place: panels.NAME for place in range(9)})
    return graph


def algorithms(graph: Graph) -> list[str]:
    plan = graph.plans["onednn"]
    assert isinstance(plan, Choices)
    return [job.kernel.algorithm for job in lower(graph, OneDNNBackend(1).lowering, plan).jobs]


def check(graph: Graph) -> None:
    feeds = feeds_for(graph)
    assert worst(OneDNNBackend(1).compile(graph)(feeds), evaluate_graph(graph, feeds, wide=True)) < 1e-5


# ── where it is forbidden ────────────────────────────────────────────────────────────────────────────────────────


def _no_protection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(code, "_protect", lambda: lambda address, size, how: -1)


def _no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*given: object) -> None:
        raise PermissionError("not here")

    monkeypatch.setattr(mmap, "mmap", refuse)


def _another_system(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "win32")


def _another_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")


@pytest.mark.parametrize("forbid", [_no_protection, _no_memory, _another_system, _another_processor])
def test_where_no_code_may_be_made_kernels_run_as_usual(
    forbid: Callable[[pytest.MonkeyPatch], None], asked_anew: None
) -> None:
    graph = graph_with_plan()
    assert runs_here() and algorithms(graph) == [panels.NAME]
    check(graph)
    with pytest.MonkeyPatch.context() as changed:
        forbid(changed)
        runs_here.cache_clear()
        assert not runs_here()
    # only the answer is kept: what else reads the platform or maps memory is not to see the change
    assert not runs_here() and algorithms(graph) == [""]
    check(graph)


@pytest.mark.parametrize("name, isa", [
    ("avx512_core_amx", AVX512), ("avx512_core", AVX512), ("avx2_vnni_2", AVX2), ("avx2", AVX2), ("avx", None),
    ("sse41", None), ("default", None), ("isa_0x2fef", None),
])  # fmt: skip
def test_code_is_made_of_the_widest_instructions_that_onednn_uses(
    name: str, isa: Isa | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(coded, "library", lambda: SimpleNamespace(isa=name, parallel_address=1))
    assert isa_here() == isa
    if isa is None:
        with pytest.raises(Unimplemented, match="no machine code runs here"):
            needed_isa()
    else:
        assert needed_isa() == isa
    # threads could not be had together
    monkeypatch.setattr(coded, "library", lambda: SimpleNamespace(isa=name, parallel_address=0))
    assert isa_here() is None


def test_no_code_is_run_on_other_processors(asked_anew: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def made(given: bytes) -> Code:
        raise AssertionError("this would be run")

    monkeypatch.setattr(code, "Code", made)
    for change in (_another_system, _another_processor):
        with pytest.MonkeyPatch.context() as changed:
            change(changed)
            runs_here.cache_clear()
            assert not runs_here()


def test_code_that_may_not_run_is_an_error_that_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    _no_protection(monkeypatch)
    with pytest.raises(BackendError, match="does not let this process run code"):
        Code(ANSWER)


def test_memory_that_there_is_not_is_an_error_that_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    _no_memory(monkeypatch)
    with pytest.raises(BackendError, match="no memory for machine code: not here"):
        Code(ANSWER)


def test_the_system_refuses_what_is_not_mapped() -> None:
    """That a refusal is told apart from success."""
    assert code._protect()(1 << 46, mmap.PAGESIZE, mmap.PROT_READ) != 0


# ── how it lies ──────────────────────────────────────────────────────────────────────────────────────────────────


def permissions(address: int) -> str | None:
    for line in Path("/proc/self/maps").read_text().splitlines():
        ends, how = line.split()[:2]
        start, stop = (int(end, 16) for end in ends.split("-"))
        if start <= address < stop:
            return how
    return None


@pytest.mark.parametrize("size", (0, 1, mmap.PAGESIZE - 4, mmap.PAGESIZE, 3 * mmap.PAGESIZE + 5))
def test_code_can_be_read_and_run_and_not_written(size: int) -> None:
    held = Code(ANSWER + bytes(size))
    assert held.address % mmap.PAGESIZE == 0
    for at in (held.address, held.address + size):
        found = permissions(at)
        assert found is not None and found[:3] == "r-x"
    assert ctypes.string_at(held.address, len(ANSWER)) == ANSWER
    assert call(held.address, 12345) == 12345


def test_empty_code_has_an_address() -> None:
    assert Code(b"").address


def test_memory_is_given_back_when_nobody_holds_the_code() -> None:
    addresses = []
    for _ in range(50):
        held = Code(ANSWER + bytes(1 << 16))
        addresses.append(held.address)
        del held
    gc.collect()
    alive = [a for a in addresses if (permissions(a) or "")[2:3] == "x" and ctypes.string_at(a, 4) == ANSWER]
    assert not alive


def bound(threads: int = 1) -> tuple[Callable[[], object], object, Callable[[], bool]]:
    """A product's call, what keeps it alive, and whether its result is right."""
    random = np.random.default_rng(0)
    x, w, b = (random.standard_normal(dims).astype(np.float32) for dims in ((20, 30), (30, 40), (40,)))
    out, packed = np.full((20, 40), np.nan, np.float32), in_panels(w[None])
    product = Product(20, 30, 40, 30, 40, (ByColumn("add"),), threads=threads)
    addresses = [x.ctypes.data, packed.ctypes.data, out.ctypes.data, [b.ctypes.data]]
    run, kept = compiled(product, library().parallel_address).bind(*addresses)

    def right() -> bool:
        good = bool(np.abs(out - (x.astype(np.float64) @ w + b)).max() < 1e-5)
        out[:] = np.nan
        return good

    return run, (kept, x, packed, b), right


def test_what_is_bound_runs_on_when_the_code_is_forgotten() -> None:
    run, kept, right = bound()
    compiled.cache_clear()
    gc.collect()
    # memory that was given back would be taken by these
    others = [Code(b"\xcc" * 8192) for _ in range(200)]
    assert not run() and right() and kept is not None and len(others) == 200


def test_what_is_bound_runs_in_a_child_process_and_both_go_on() -> None:
    """A fork copies the mapping; one thread, since OpenMP's others are not copied."""
    run, kept, right = bound()
    assert not run() and right()
    child = os.fork()
    if child == 0:
        code_of_exit = 1
        try:
            again, own, fine = bound()
            code_of_exit = 0 if not run() and right() and not again() and fine() and own is not None else 2
        finally:
            os._exit(code_of_exit)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert not run() and right() and kept is not None


def test_a_program_whose_last_holder_is_running_it_comes_to_its_end() -> None:
    graph = graph_with_plan()
    feeds = feeds_for(graph)
    wanted = evaluate_graph(graph, feeds, wide=True)
    programs = [OneDNNBackend(1).compile(graph)]
    started, off = threading.Event(), list[float]()

    def work() -> None:
        run = programs.pop().__call__
        for _ in range(500):
            off.append(worst(run(feeds), wanted))
            started.set()

    worker = threading.Thread(target=work)
    worker.start()
    started.wait()
    compiled.cache_clear()
    gc.collect()
    worker.join()
    assert len(off) == 500 and max(off) < 1e-5
