"""Depthwise convolutions by machine code against float64, amid memory that shows whatever is touched."""

from __future__ import annotations

import random
import signal
from dataclasses import replace
from itertools import product

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
from hypothesis import assume, given
from hypothesis import strategies as st
from machine_code import BEFORE, BEHIND, isa

from taso.backends.onednn.library import library
from taso.backends.x86 import worker
from taso.backends.x86.depthwise import Compiled, Depthwise, Span, by_vector, compiled, possible
from taso.backends.x86.functions import Function
from taso.backends.x86.posts import ByColumn, ByElement, Post

pytestmark = pytest.mark.usefixtures("each_isa")


class Bound(Windowed):
    """A convolution on tensors of its own, and what it should be.

    Pixels that no window meets hold no numbers, nor do filters where vectors of channels are filled up.
    """

    def __init__(self, problem: Depthwise, seed: int = 0, wall: str = "", code: Depthwise | None = None) -> None:
        """`code` is a convolution to run in its stead, with operands as many."""
        self.d, self.random = replace(problem, isa=isa()), np.random.default_rng(seed)
        self.weights = self.normal(problem.channels, problem.rows.taps, problem.columns.taps)
        found = compiled(replace(code or problem, isa=isa()), library().parallel_address)
        self.place(problem.channels, by_vector(self.weights, isa()), found, wall)

    def exact(self) -> tuple[Wide, Wide]:
        """The result and by how much it may differ: each tap is a product and a sum that is rounded once."""
        d = self.d
        found, sizes = np.zeros(self.out.shape), np.zeros(self.out.shape)
        for (i, j), read in self.taps():
            term = read * self.weights[:, i, j].astype(np.float64)
            found += term
            sizes += np.abs(term)
        return with_posts(d.posts, self.others, found, d.rows.taps * d.columns.taps * ROUNDING * sizes)


def span(size: int, taps: int, stride: int = 1, before: int = 0, behind: int = 0) -> Span:
    return Span(size, (size + before + behind - taps) // stride + 1, taps, stride, before)


def alike(size: int, taps: int, stride: int = 1) -> Span:
    """Padded so that nothing is lost at the edges, as a convolution of stride 1 mostly is."""
    return span(size, taps, stride, taps // 2, (taps - 1) // 2)


def drawn_span(chance: random.Random) -> Span:
    while True:
        taps, stride = chance.randint(1, 11), chance.choice([1, 1, 1, 2, 2, 3, 4, chance.randint(1, 13)])
        size = chance.choice([1, 2, 7, 8, 9, 16, chance.randint(1, 40)])
        before, behind = (chance.randint(0, taps - 1) for _ in range(2))
        found = span(size, taps, stride, before, behind)
        if size + before + behind >= taps and possible(found, found, 1):
            return found


def drawn(chance: random.Random) -> Depthwise:
    channels = chance.choice([1, 15, 16, 17, 32, chance.randint(1, 70)])
    posts, threads = draw_posts(chance), chance.choice([1, 1, 2, 3])
    return Depthwise(chance.randint(1, 3), channels, drawn_span(chance), drawn_span(chance), posts, threads)


# ── what comes out ───────────────────────────────────────────────────────────────────────────────────────────────


@given(st.integers(0, 1 << 32))
@FUZZ
def test_any_convolution_is_that_of_float64_and_touches_nothing_else(seed: int) -> None:
    Bound(drawn(random.Random(seed)), seed % 1000).check()


@pytest.mark.parametrize("rows", range(1, 12))
@pytest.mark.parametrize("columns", range(1, 12))
def test_every_size_of_filter_has_its_code(rows: int, columns: int) -> None:
    Bound(Depthwise(1, 19, alike(9, rows), alike(13, columns))).check()
    Bound(Depthwise(2, 16, alike(12, rows, 2), alike(12, columns, 2))).check()


@pytest.mark.parametrize("taps", range(12, 21))
def test_rows_of_as_many_taps_as_there_are_registers_for(taps: int) -> None:
    Bound(Depthwise(1, 17, alike(30, 3), alike(30, taps), (ByColumn("add"), Function("gelu_erf")))).check()
    Bound(Depthwise(1, 17, alike(30, 25), alike(30, taps, 2))).check()


@pytest.mark.parametrize("channels", range(1, 50))
def test_every_number_of_channels_has_its_vectors(channels: int) -> None:
    posts = (ByColumn("add"), Function("relu"), ByElement("sub"))
    Bound(Depthwise(2, channels, alike(5, 3), alike(9, 3, 2), posts)).check()


@pytest.mark.parametrize("width", range(1, 35))
@pytest.mark.parametrize("stride", (1, 2))
def test_every_width_has_its_blocks(width: int, stride: int) -> None:
    for taps in (1, 3, 5, 7):
        Bound(Depthwise(1, 16, alike(3, 3), alike(width, taps, stride))).check()


def tuples(low: int, high: int) -> st.SearchStrategy[tuple[int, int]]:
    return st.tuples(st.integers(low, high), st.integers(low, high))


@given(tuples(1, 20), tuples(1, 11), tuples(1, 4), tuples(0, 10), tuples(0, 10), st.integers(1, 3))
@FUZZ
def test_sizes_strides_and_uneven_pads_of_all_kinds(
    sizes: tuple[int, int], taps: tuple[int, int], strides: tuple[int, int], before: tuple[int, int],
    behind: tuple[int, int], threads: int,
) -> None:  # fmt: skip
    assume(all(s + b + e >= t for s, t, b, e in zip(sizes, taps, before, behind, strict=True)))
    spans = tuple(map(span, sizes, taps, strides, before, behind))
    assume(possible(*spans, 18))
    Bound(Depthwise(2, 18, *spans, (ByColumn("add"), ByElement("mul")), threads)).check()


@given(tuples(1, 20), tuples(1, 24), tuples(1, 4), tuples(0, 24), tuples(0, 24))
@FUZZ
def test_it_is_possible_where_every_window_meets_the_picture_and_only_there(
    sizes: tuple[int, int], taps: tuple[int, int], strides: tuple[int, int], before: tuple[int, int],
    behind: tuple[int, int],
) -> None:  # fmt: skip
    assume(all(s + b + e >= t for s, t, b, e in zip(sizes, taps, before, behind, strict=True)))
    spans = tuple(map(span, sizes, taps, strides, before, behind))
    met = all(
        set(range(i * s.stride - s.pad, i * s.stride - s.pad + s.taps)) & set(range(s.size))
        for s in spans for i in range(s.out)
    )  # fmt: skip
    assert possible(*spans, 18) == (met and taps[1] <= 20)


def test_a_row_of_more_taps_than_there_are_registers_for_is_not_possible() -> None:
    # of 28 registers eight are sums
    assert possible(alike(30, 99), alike(40, 20), 16) and not possible(alike(30, 3), alike(40, 21), 16)


def magnitudes(most: int) -> st.SearchStrategy[int]:
    return st.integers(0, most).map(lambda bits: 1 << bits)


@given(magnitudes(26), magnitudes(26), magnitudes(20), st.integers(1, 20))
@FUZZ
def test_where_it_is_possible_instructions_reach_all_there_is(size: int, stride: int, channels: int, taps: int) -> None:
    """Code alone is written: nobody has memory for such tensors."""
    columns = Span(size, max(min((size - taps) // stride + 1, 20), 1), min(taps, size), stride, 0)
    if possible(alike(5, 3), columns, channels):
        Compiled(Depthwise(1, channels, alike(5, 3), columns, (ByElement("add"), ByColumn("add")), isa=isa()), 0)
    else:
        assert (size + 8 * stride + taps) * channels * 4 >= 1 << 30, "what may be reached is"


@pytest.mark.parametrize("problem", [
    Depthwise(1, 240, alike(28, 5), alike(28, 5), (ByColumn("add"), Function("swish", 1.0)), 2),
    Depthwise(1, 144, span(56, 3, 2, 0, 1), span(56, 3, 2, 0, 1), (ByColumn("add"), Function("clip_v2", 0.0, 6.0))),
    Depthwise(4, 96, alike(14, 3), alike(14, 3), (ByColumn("add"), ByElement("add")), 3),
    Depthwise(1, 168, alike(42, 7), alike(42, 7)),
    Depthwise(1, 33, alike(112, 3), alike(111, 3), (Function("hardswish", 0.25, 0.5),), 2),
], ids=str)  # fmt: skip
def test_convolutions_of_the_sizes_that_models_have(problem: Depthwise) -> None:
    Bound(problem).check()


@pytest.mark.parametrize("post", EVERY_POST, ids=str)
@pytest.mark.parametrize("place", (0, 1, 2))
def test_every_post_runs_at_every_place(post: Post, place: int) -> None:
    posts: list[Post] = [ByColumn("add"), ByElement("mul")]
    posts.insert(place, post)
    for channels in (16, 37):
        Bound(Depthwise(2, channels, alike(5, 3), alike(11, 5), tuple(posts))).check()


def test_posts_run_in_their_order() -> None:
    orders = [(ByColumn("add"), ByElement("mul")), (ByElement("mul"), ByColumn("add"))]
    bounds = [Bound(Depthwise(1, 20, alike(6, 3), alike(6, 3), posts)) for posts in orders]
    for one, other in zip(bounds[0].others, reversed(bounds[1].others), strict=True):
        other.array[...] = one.array
    assert not np.allclose(*(bound.check() for bound in bounds))


def test_sixteen_posts_are_possible() -> None:
    posts = tuple(ByElement(("add", "sub", "mul")[i % 3]) if i % 2 else ByColumn("add") for i in range(16))
    Bound(Depthwise(1, 21, alike(6, 5), alike(10, 5), posts)).check()


def test_threads_do_not_change_a_bit() -> None:
    posts = (ByColumn("add"), Function("swish", 1.0), ByElement("mul"))
    one = Depthwise(2, 45, alike(21, 5), alike(18, 3, 2), posts)
    wanted = Bound(one).check()
    for threads in (2, 3, 5):
        assert np.array_equal(Bound(replace(one, threads=threads)).check(), wanted)


def test_what_is_not_finite_stays_in_its_windows_and_its_channel() -> None:
    bound = Bound(Depthwise(1, 18, alike(9, 3), alike(20, 5)))
    bound.data.array[0, 4, 10, 3] = np.inf
    bad = ~np.isfinite(bound.run())
    wanted = np.zeros(bad.shape, bool)
    wanted[0, 3:6, 8:13, 3] = True
    assert np.array_equal(bad, wanted)


def test_a_result_may_lie_where_what_is_added_does() -> None:
    posts = (ByColumn("add"), ByElement("add"), Function("relu"), ByElement("mul"))
    bound = Bound(Depthwise(2, 37, alike(11, 3), alike(9, 5), posts, 2))
    wanted = bound.check()
    column, added, factor = bound.others
    call, kept = bound.compiled.bind(
        bound.data.address, bound.filters.address, added.address, [column.address, added.address, factor.address]
    )
    assert not call() and kept is not None
    assert np.array_equal(added.array, wanted) and added.kept_to_itself()


# ── how filters and pixels lie ───────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("channels", (1, 15, 16, 17, 32, 40))
def test_filters_lie_by_a_registers_channels_tap_by_tap(channels: int) -> None:
    filters = np.arange(1, channels * 6 + 1, dtype=np.float32).reshape(channels, 2, 3)
    found, width = by_vector(filters, isa()), isa().width
    wanted = np.zeros(-(-channels // width) * width * 6, np.float32)
    for c, i, j in np.ndindex(channels, 2, 3):
        wanted[(c // width * 6 + i * 3 + j) * width + c % width] = filters[c, i, j]
    assert found.dtype == np.float32 and np.array_equal(found, wanted)
    assert found.ctypes.data % 64 == 0


@given(st.integers(1, 60), st.integers(1, 11), st.integers(1, 5), st.integers(0, 10), st.integers(0, 10))
@FUZZ
def test_blocks_are_all_pixels_in_order_and_say_what_each_reads(
    size: int, taps: int, stride: int, before: int, behind: int
) -> None:
    assume(size + before + behind >= taps)
    s = span(size, taps, stride, before, behind)
    reads = [inside for kind, count in s.blocks(8) for _ in range(count) for inside in kind]
    assert reads == [
        tuple(0 <= i * stride - before + tap < size for tap in range(taps)) for i in range(s.out)
    ]  # fmt: skip
    assert all(0 < len(kind) <= 8 for kind, _ in s.blocks(8))


# ── threads and memory ───────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("threads", (1, 2))
def test_two_bindings_run_at_the_same_time(threads: int) -> None:
    posts = (ByColumn("add"), ByElement("mul"), Function("swish", 1.0))
    problem = Depthwise(1, 40, alike(30, 3), alike(29, 3), posts, threads)
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
    bound = Bound(Depthwise(1, 20, alike(6, 3), alike(6, 3)), 0, wall)
    nearer = 4 * elements if wall == BEHIND else -4 * elements
    at = {name: getattr(bound, name).address + nearer * (name == what) for name in ("data", "filters", "out")}
    bound.call, bound.kept = bound.compiled.bind(at["data"], at["filters"], at["out"], ())
    bound.run()


def test_nothing_beyond_the_tensors_is_touched() -> None:
    assert in_a_process("test_depthwise", "between_walls(0, 80)") == 0


@pytest.mark.parametrize("what", ("data", "filters", "out"))
@pytest.mark.parametrize("wall", (BEHIND, BEFORE))
def test_the_walls_are_walls(what: str, wall: str) -> None:
    assert in_a_process("test_depthwise", f"displaced({what!r}, {wall!r}, 0)") == 0
    assert in_a_process("test_depthwise", f"displaced({what!r}, {wall!r}, 1)") == -signal.SIGSEGV


# ── the check sees what is wrong ─────────────────────────────────────────────────────────────────────────────────


POSTS = (ByColumn("add"), Function("swish", 1.0), ByElement("add"), Function("relu"), ByColumn("mul"))
EXAMPLE = Depthwise(1, 20, alike(7, 3), alike(12, 5), POSTS)


@pytest.mark.parametrize("dropped", range(len(POSTS)))
def test_a_post_that_is_left_out_is_seen(dropped: int) -> None:
    bound = Bound(EXAMPLE)
    bound.check()
    fewer = Compiled(replace(bound.d, posts=POSTS[:dropped] + POSTS[dropped + 1 :]), library().parallel_address)
    operands = iter(bound.others)
    theirs = [None if isinstance(post, Function) else next(operands).address for post in POSTS]
    left = [address for i, address in enumerate(theirs) if i != dropped and address is not None]
    bound.call, bound.kept = fewer.bind(bound.data.address, bound.filters.address, bound.out.address, left)
    bound.out.clear()
    with pytest.raises(AssertionError):
        bound.check()


@pytest.mark.parametrize("tap", range(15))
@pytest.mark.parametrize("channel", (0, 15, 16, 19))
def test_a_coefficient_that_is_wrong_is_seen(tap: int, channel: int) -> None:
    bound = Bound(replace(EXAMPLE, posts=()))
    bound.check()
    # by a thousandth
    width = isa().width
    bound.filters.array.reshape(-1, 15, width)[channel // width, tap, channel % width] += 1e-3
    with pytest.raises(AssertionError):
        bound.check()


@pytest.mark.parametrize("name", [name for name in CORRUPTIONS if name != "a sum for a difference"])
@pytest.mark.parametrize("which", (0, -1))
def test_a_byte_of_the_code_that_is_wrong_is_seen(name: str, which: int, monkeypatch: pytest.MonkeyPatch) -> None:
    before, after = CORRUPTIONS[name]
    changed: list[int] = []
    monkeypatch.setattr(worker, "Code", corrupted(before, after, which, changed))
    monkeypatch.setitem(globals(), "compiled", Compiled)
    with pytest.raises(AssertionError):
        Bound(EXAMPLE).check()
    assert changed


@pytest.mark.parametrize("side, change", [
    *product(("rows", "columns"), ("size", "out", "pad", "taps")), ("columns", "stride"),
])  # fmt: skip
def test_a_direction_that_is_wrong_is_seen(side: str, change: str) -> None:
    right = replace(EXAMPLE, rows=alike(7, 5), columns=alike(12, 5), posts=())
    found = getattr(right, side)
    wrong = replace(found, **{change: getattr(found, change) + (-1 if change in ("pad", "taps") else 1)})
    Bound(right).check()
    with pytest.raises(AssertionError):
        Bound(right, code=replace(right, **{side: wrong})).check()


def test_a_row_that_nobody_computes_is_seen() -> None:
    bound = Bound(EXAMPLE, code=replace(EXAMPLE, rows=replace(EXAMPLE.rows, out=6)))
    with pytest.raises(AssertionError):
        bound.check()
