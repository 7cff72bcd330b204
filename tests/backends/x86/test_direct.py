"""Convolutions in groups by machine code against float64, amid memory that shows whatever is touched."""

from __future__ import annotations

import random
import signal
from dataclasses import replace
from itertools import product

import guarded
import numpy as np
import pytest
from guarded import (
    CORRUPTIONS,
    EVERY_POST,
    FUZZ,
    ROUNDING,
    Wide,
    Windowed,
    both_at_once,
    corrupted,
    draw_posts,
    in_a_process,
    with_posts,
)
from hypothesis import given
from hypothesis import strategies as st
from machine_code import BEFORE, BEHIND, HERE, why_not
from test_depthwise import alike, drawn_span, span

from taso.backends.onednn.library import library
from taso.backends.x86 import worker
from taso.backends.x86.assembler import AVX2, AVX512, Isa
from taso.backends.x86.direct import Compiled, Direct, by_together, compiled
from taso.backends.x86.functions import Function
from taso.backends.x86.posts import ByColumn, ByElement, Post

pytestmark = pytest.mark.skipif(not HERE, reason=why_not(AVX2) or "it runs here")
EVERYWHERE = pytest.mark.parametrize("isa", HERE or [AVX2], ids=lambda isa: isa.name)


class Bound(Windowed):
    """A convolution on tensors of its own, and what it should be. Pixels that no window meets hold no numbers."""

    def __init__(self, problem: Direct, seed: int = 0, wall: str = "", code: Direct | None = None) -> None:
        """`code` is a convolution to run in its stead, with operands as many."""
        self.d, self.random = problem, np.random.default_rng(seed)
        self.weights = self.normal(problem.filters, problem.inner, problem.rows.taps, problem.columns.taps)
        found = compiled(code or problem, library().parallel_address)
        self.place(problem.filters, by_together(self.weights, problem.together), found, wall)

    def exact(self) -> tuple[Wide, Wide]:
        """The result and by how much it may differ: each tap and channel is a product and a sum that is rounded once.
        """
        d = self.d
        found, sizes = np.zeros(self.out.shape), np.zeros(self.out.shape)
        grouped = self.weights.astype(np.float64).reshape(d.groups, d.each, d.inner, d.rows.taps, d.columns.taps)
        for (i, j), read in self.taps():
            data, weights = read.reshape(*self.out.shape[:3], d.groups, d.inner), grouped[..., i, j]
            for total, x, w in ((found, data, weights), (sizes, np.abs(data), np.abs(weights))):
                total += np.einsum("nhwgc,gkc->nhwgk", x, w).reshape(total.shape)
        terms = d.inner * d.rows.taps * d.columns.taps
        return with_posts(d.posts, self.others, found, terms * ROUNDING * sizes)


def of_quads(isa: Isa, registers: int, **more: object) -> Direct:
    """Groups of four channels, so many registers of them."""
    channels = registers * isa.width
    given = {"rows": alike(7, 3), "columns": alike(12, 3), **more}
    return Direct(1, channels, channels, channels // 4, isa=isa, **given)  # type: ignore[arg-type]  # fields


def of_registers(isa: Isa, groups: int, inner: int, registers: int, **more: object) -> Direct:
    """Groups whose filters fill so many registers."""
    given = {"rows": alike(7, 3), "columns": alike(12, 3), **more}
    filters = groups * registers * isa.width
    return Direct(1, groups * inner, filters, groups, isa=isa, **given)  # type: ignore[arg-type]  # fields


def drawn(chance: random.Random) -> Direct:
    isa = chance.choice(HERE)
    more = {
        "rows": drawn_span(chance), "columns": drawn_span(chance), "posts": draw_posts(chance),
        "threads": chance.choice([1, 1, 2, 3]), "by_row": chance.choice([True, False]),
    }  # fmt: skip
    if chance.random() < 0.3:
        return replace(of_quads(isa, chance.randint(1, 4), **more), images=chance.randint(1, 2))
    groups, inner, registers = chance.choice([1, 2, 3]), chance.randint(1, 13), chance.choice([1, 2, 3, 4])
    return replace(of_registers(isa, groups, inner, registers, **more), images=chance.randint(1, 2))


# ── what comes out ───────────────────────────────────────────────────────────────────────────────────────────────


@given(st.integers(0, 1 << 32))
@FUZZ
def test_any_convolution_is_that_of_float64_and_touches_nothing_else(seed: int) -> None:
    Bound(drawn(random.Random(seed)), seed % 1000).check()


@EVERYWHERE
@pytest.mark.parametrize("inner", range(1, 18))
def test_every_number_of_channels_has_its_turns(isa: Isa, inner: int) -> None:
    for registers in (1, 2, 3):
        Bound(of_registers(isa, 2, inner, registers)).check()


@EVERYWHERE
@pytest.mark.parametrize("width", range(1, 31))
def test_every_width_has_its_blocks(isa: Isa, width: int) -> None:
    for taps, stride in ((1, 1), (3, 1), (3, 2), (5, 3)):
        columns = alike(width, taps, stride)
        Bound(of_quads(isa, 1, columns=columns)).check()
        Bound(of_registers(isa, 2, 4, 1, columns=columns)).check()
        Bound(of_registers(isa, 1, 3, 2, columns=columns)).check()


@EVERYWHERE
@pytest.mark.parametrize("post", EVERY_POST, ids=str)
@pytest.mark.parametrize("place", (0, 1, 2))
def test_every_post_runs_at_every_place(isa: Isa, post: Post, place: int) -> None:
    posts: list[Post] = [ByColumn("add"), ByElement("mul")]
    posts.insert(place, post)
    for problem in (of_quads(isa, 2), of_registers(isa, 2, 5, 1), of_registers(isa, 1, 5, 2)):
        Bound(replace(problem, posts=tuple(posts))).check()


@pytest.mark.parametrize("isa, pixels", [(AVX512, (14, 14, 14)), (AVX2, (9, 13, 6))], ids=str)
def test_sums_fill_the_registers(isa: Isa, pixels: tuple[int, ...]) -> None:
    problems = of_quads(isa, 1), of_registers(isa, 2, 4, 1), of_registers(isa, 2, 4, 2)
    assert tuple(p.pixels for p in problems) == pixels
    for problem in problems:
        for post in (Function("relu"), Function("gelu_erf")):
            full = replace(problem, posts=(post,))
            temporaries = 4 if post.name == "gelu_erf" else 3
            assert full.pixels * full.vectors + temporaries <= isa.registers


def test_threads_and_order_do_not_change_a_bit() -> None:
    posts = (ByColumn("add"), Function("swish", 1.0), ByElement("mul"))
    for isa in HERE:
        one = replace(of_registers(isa, 3, 6, 1, posts=posts), images=2)
        wanted = Bound(one).check()
        for threads, by_row in product((1, 2, 3), (True, False)):
            assert np.array_equal(Bound(replace(one, threads=threads, by_row=by_row)).check(), wanted)


@EVERYWHERE
def test_what_is_not_finite_stays_in_its_windows_and_its_group(isa: Isa) -> None:
    for problem in (of_quads(isa, 2, columns=alike(20, 5)), of_registers(isa, 3, 4, 1, columns=alike(20, 5))):
        bound = Bound(problem)
        bound.data.array[0, 4, 10, 5] = np.inf
        bad = ~np.isfinite(bound.run())
        wanted = np.zeros(bad.shape, bool)
        wanted[0, 3:6, 8:13, problem.each : 2 * problem.each] = True
        assert np.array_equal(bad, wanted)


@EVERYWHERE
def test_a_result_may_lie_where_what_is_added_does(isa: Isa) -> None:
    posts = (ByColumn("add"), ByElement("add"), Function("relu"), ByElement("mul"))
    bound = Bound(of_registers(isa, 2, 5, 2, posts=posts, threads=2))
    wanted = bound.check()
    column, added, factor = bound.others
    call, kept = bound.compiled.bind(
        bound.data.address, bound.filters.address, added.address, [column.address, added.address, factor.address]
    )
    assert not call() and kept is not None
    assert np.array_equal(added.array, wanted) and added.kept_to_itself()


# ── which are possible, and how filters lie ──────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("isa, channels, filters, groups, possible", [
    (AVX2, 32, 32, 8, True), (AVX2, 12, 12, 3, False), (AVX2, 16, 32, 4, True), (AVX2, 32, 64, 8, True),
    (AVX2, 16, 16, 8, False), (AVX2, 64, 32, 8, False), (AVX2, 8, 24, 2, False), (AVX512, 32, 32, 8, True),
    (AVX512, 32, 32, 4, False), (AVX512, 64, 64, 4, True), (AVX512, 24, 24, 6, False),
], ids=str)  # fmt: skip
def test_filters_fill_registers_or_are_four_for_four_channels(
    isa: Isa, channels: int, filters: int, groups: int, possible: bool
) -> None:
    assert Direct(1, channels, filters, groups, alike(7, 3), alike(7, 3), isa=isa).possible == possible


def test_filters_lie_so_many_together_by_tap_and_channel() -> None:
    filters = np.arange(1, 16 * 3 * 2 * 5 + 1, dtype=np.float32).reshape(16, 3, 2, 5)
    found = by_together(filters, 8)
    for k, c, i, j in np.ndindex(*filters.shape):
        assert found[(((k // 8 * 2 + i) * 5 + j) * 3 + c) * 8 + k % 8] == filters[k, c, i, j]
    assert found.size == filters.size and found.ctypes.data % 64 == 0


# ── threads and memory ───────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("threads", (1, 2))
def test_two_bindings_run_at_the_same_time(threads: int) -> None:
    posts = (ByColumn("add"), ByElement("mul"), Function("swish", 1.0))
    problem = of_registers(HERE[0], 2, 8, 2, rows=alike(20, 3), columns=alike(21, 3), posts=posts, threads=threads)
    bounds = [Bound(problem, seed) for seed in (1, 2)]
    wanted = [bound.check() for bound in bounds]
    assert bounds[0].compiled is bounds[1].compiled and not np.array_equal(*wanted)

    def again(number: int) -> bool:
        bounds[number].out.clear()
        return np.array_equal(bounds[number].run(), wanted[number])

    assert not both_at_once([lambda: again(0), lambda: again(1)])


def between_walls(first: int, count: int) -> None:
    """Random convolutions whose tensors end, and begin, at pages that may not be touched: in a process of its own."""
    for seed in range(first, first + count):
        for wall in (BEHIND, BEFORE):
            Bound(drawn(random.Random(seed)), seed, wall).check()


def displaced(what: str, wall: str, elements: int) -> None:
    """A convolution one of whose tensors is taken to lie so many elements nearer to the wall than it does."""
    bound = Bound(of_quads(HERE[0], 1, columns=span(12, 3, 1, 0, 0), rows=span(7, 3)), 0, wall)
    nearer = 4 * elements if wall == BEHIND else -4 * elements
    at = {name: getattr(bound, name).address + nearer * (name == what) for name in ("data", "filters", "out")}
    bound.call, bound.kept = bound.compiled.bind(at["data"], at["filters"], at["out"], ())
    bound.run()


def test_nothing_beyond_the_tensors_is_touched() -> None:
    assert in_a_process("test_direct", "between_walls(0, 60)") == 0


@pytest.mark.parametrize("what", ("data", "filters", "out"))
@pytest.mark.parametrize("wall", (BEHIND, BEFORE))
def test_the_walls_are_walls(what: str, wall: str) -> None:
    assert in_a_process("test_direct", f"displaced({what!r}, {wall!r}, 0)") == 0
    assert in_a_process("test_direct", f"displaced({what!r}, {wall!r}, 1)") == -signal.SIGSEGV


# ── the check sees what is wrong ─────────────────────────────────────────────────────────────────────────────────


POSTS = (ByColumn("add"), Function("swish", 1.0), ByElement("add"), Function("relu"), ByColumn("mul"))


def examples(isa: Isa) -> list[Direct]:
    return [of_quads(isa, 2, posts=POSTS), of_registers(isa, 2, 3, 1, posts=POSTS)]


@EVERYWHERE
@pytest.mark.parametrize("dropped", range(len(POSTS)))
def test_a_post_that_is_left_out_is_seen(isa: Isa, dropped: int) -> None:
    for example in examples(isa):
        bound = Bound(example)
        bound.check()
        fewer = Compiled(replace(example, posts=POSTS[:dropped] + POSTS[dropped + 1 :]), library().parallel_address)
        operands = iter(bound.others)
        theirs = [None if isinstance(post, Function) else next(operands).address for post in POSTS]
        left = [address for i, address in enumerate(theirs) if i != dropped and address is not None]
        bound.call, bound.kept = fewer.bind(bound.data.address, bound.filters.address, bound.out.address, left)
        bound.out.clear()
        with pytest.raises(AssertionError):
            bound.check()


@EVERYWHERE
@pytest.mark.parametrize("place", (0, 1, 50, -50, -2, -1))
def test_a_coefficient_that_is_wrong_is_seen(isa: Isa, place: int) -> None:
    for example in examples(isa):
        bound = Bound(replace(example, posts=()))
        bound.check()
        bound.filters.array[place] += 1e-3
        with pytest.raises(AssertionError):
            bound.check()


@EVERYWHERE
@pytest.mark.parametrize("name", [name for name in CORRUPTIONS if name != "a sum for a difference"])
@pytest.mark.parametrize("which", (0, -1))
def test_a_byte_of_the_code_that_is_wrong_is_seen(
    isa: Isa, name: str, which: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, after = CORRUPTIONS[name]
    changed: list[int] = []
    # it looks for them in the code of these instructions
    monkeypatch.setattr(guarded, "isa", lambda: isa)
    monkeypatch.setattr(worker, "Code", corrupted(before, after, which, changed))
    monkeypatch.setitem(globals(), "compiled", Compiled)
    for example in examples(isa):
        with pytest.raises(AssertionError):
            Bound(example).check()
    assert len(changed) == 2


@EVERYWHERE
def test_an_element_that_is_spread_wrongly_is_seen(isa: Isa, monkeypatch: pytest.MonkeyPatch) -> None:
    from taso.backends.x86 import direct

    right = direct.assembler

    def wrong(isa: Isa) -> object:
        made = right(isa)
        spread = made.spread
        monkeypatch.setattr(made, "spread", lambda target, source, element: spread(target, source, element ^ 1))
        return made

    monkeypatch.setattr(direct, "assembler", wrong)
    monkeypatch.setitem(globals(), "compiled", Compiled)
    with pytest.raises(AssertionError):
        Bound(of_quads(isa, 1)).check()


@EVERYWHERE
@pytest.mark.parametrize("side, change", [
    *product(("rows", "columns"), ("size", "out", "pad", "taps")), ("columns", "stride"),
])  # fmt: skip
def test_a_direction_that_is_wrong_is_seen(isa: Isa, side: str, change: str) -> None:
    right = of_registers(isa, 2, 3, 1, rows=alike(7, 5), columns=alike(12, 5))
    found = getattr(right, side)
    wrong = replace(found, **{change: getattr(found, change) + (-1 if change in ("pad", "taps") else 1)})
    Bound(right).check()
    with pytest.raises(AssertionError):
        Bound(right, code=replace(right, **{side: wrong})).check()
