"""Winograd's transforms by machine code against float64, amid memory that shows whatever is touched."""

from __future__ import annotations

import random
import signal
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from itertools import product

import numpy as np
import pytest
from guarded import (
    CORRUPTIONS,
    EVERY_POST,
    FUZZ,
    ROUNDING,
    Array,
    Tensor,
    Wide,
    both_at_once,
    corrupted,
    draw_posts,
    in_a_process,
    operands_for,
    with_posts,
)
from hypothesis import given
from hypothesis import strategies as st
from machine_code import BEFORE, BEHIND, isa

from taso.backends.onednn.library import library
from taso.backends.x86 import worker
from taso.backends.x86.functions import Function
from taso.backends.x86.posts import ByColumn, ByElement, Post
from taso.backends.x86.tiles import Axis, Compiled, RowOfTiles, Transform, compiled
from taso.graph.winograd import Matrix, Transforms, transforms

pytestmark = pytest.mark.usefixtures("each_isa")

ALONE = Transforms(((Fraction(1),),), ((Fraction(1),),), ((Fraction(1),),))
SIZES = tuple(product((2, 4, 6), (3, 5, 7)))
TILES: tuple[tuple[Transforms, Transforms], ...] = (
    *((transforms(m, r), ALONE) for m, r in SIZES), *((ALONE, transforms(m, r)) for m, r in SIZES),
    *((transforms(*one), transforms(*other)) for one, other in product(SIZES, SIZES) if one == other),
    (transforms(2, 3), transforms(6, 7)), (transforms(6, 3), transforms(2, 5)), (ALONE, ALONE),
)  # fmt: skip


def of_data(size: int, pad: int, more: int, f: Transforms) -> Axis:
    """Tiles enough for all outputs of a convolution that is padded by that much before and behind."""
    out = max(size + pad + more - f.taps + 1, 1)
    return Axis(size, pad, f.outputs, -(-out // f.outputs), f.data)


def of_outputs(out: int, f: Transforms) -> Axis:
    return Axis(out, 0, f.outputs, -(-out // f.outputs), f.output)


def numbers(matrix: Matrix) -> Wide:
    return np.array([[float(v) for v in row] for row in matrix])


class Bound:
    """A transform of some rows of tiles in memory of its own, and what it should make.

    Tiles lie position by position (by column, then row) with gaps between, which nobody may write to. The picture holds
    numbers only where the rows' tiles read them, or nothing at all.
    """

    def __init__(
        self, transform: Transform, images: int, rows: Sequence[RowOfTiles], seed: int = 0, wall: str = "",
        code: Transform | None = None,
    ) -> None:  # fmt: skip
        """`code` is a transform to run in its stead, with operands as many."""
        transform, code = replace(transform, isa=isa()), None if code is None else replace(code, isa=isa())
        self.t, self.rows, self.random = transform, rows, np.random.default_rng(seed)
        t = self.t
        self.tiles_in_block = len(rows) * t.columns.tiles
        self.picture = Tensor((images, t.rows.size, t.columns.size, t.channels), None, wall)
        positions = t.positions[0] * t.positions[1]
        # the last position has no gap behind it
        self.tiles = Tensor(((positions - 1) * t.apart + self.tiles_in_block * t.channels,), None, wall)
        self.others = operands_for(t.posts, self.picture.shape, self.random, wall)
        if t.outputs:
            for view in self.positions().values():
                view[...] = self.normal(*view.shape)
        else:
            self.fill_picture()
        self.compiled = compiled(code or t, library().parallel_address)
        addresses = [o.address for o in self.others]
        self.call, self.kept = self.compiled.bind(rows, self.picture.address, self.tiles.address, addresses)

    def normal(self, *dims: int) -> Array:
        return self.random.standard_normal(dims).astype(np.float32)

    def positions(self) -> dict[tuple[int, int], Array]:
        """The elements (tiles, channels) of each position."""
        t, count = self.t, self.tiles_in_block * self.t.channels
        height, width = t.positions
        starts = {(u, v): (v * height + u) * t.apart for u in range(height) for v in range(width)}
        return {at: self.tiles.array[s : s + count].reshape(-1, t.channels) for at, s in starts.items()}

    def where(self) -> list[tuple[int, int, int, int]]:
        """Of each tile its number in the block, its image, and its first pixel, which may be padding."""
        t = self.t
        return [
            (r.before + k, r.image, r.row * t.rows.step - t.rows.pad, k * t.columns.step - t.columns.pad)
            for r in self.rows for k in range(t.columns.tiles)
        ]  # fmt: skip

    def inside(self, y: int, x: int) -> tuple[slice, slice]:
        t = self.t
        ends = zip((y, x), t.shape, (t.rows.size, t.columns.size), strict=True)
        found = tuple(slice(max(a, 0), max(min(a + n, size), 0)) for a, n, size in ends)
        return found[0], found[1]

    def fill_picture(self) -> None:
        given = self.normal(*self.picture.shape)
        for _, image, y, x in self.where():
            part = (image, *self.inside(y, x))
            self.picture.array[part] = given[part]

    def exact(self) -> tuple[Wide, Wide, np.ndarray]:
        """What is written (picture or tiles), by how much it may differ, and which elements are written.

        A sum of n products of rounded factors is off by n + 1 roundings of the sum of their sizes, and here are two
        sums, one of the other's results.
        """
        t, left, right = self.t, numbers(self.t.rows.transform), numbers(self.t.columns.transform)
        target = self.picture if t.outputs else self.tiles
        found, allowed, wanted = np.zeros(target.shape), np.zeros(target.shape), np.zeros(target.shape, bool)
        views = self.positions()
        roundings = (left.shape[1] + right.shape[1] + 4) * ROUNDING
        for number, image, y, x in self.where():
            rows, columns = self.inside(y, x)
            if t.outputs:
                part = np.array([[views[u, v][number] for v in range(t.positions[1])] for u in range(t.positions[0])])
                made, sizes = transformed(left, part.astype(np.float64), right)
                at = (image, rows, columns)
                kept = slice(0, rows.stop - rows.start), slice(0, columns.stop - columns.start)
                found[at], allowed[at], wanted[at] = made[kept], roundings * sizes[kept], True
                continue
            part = np.zeros((*t.shape, t.channels))
            held = self.picture.array[image, rows, columns]
            top, leading = rows.start - y, columns.start - x
            if held.size:
                part[top : top + held.shape[0], leading : leading + held.shape[1]] = held
            made, sizes = transformed(left, part, right)
            for u, v in views:
                start = (v * t.positions[0] + u) * t.apart + number * t.channels
                at = (slice(start, start + t.channels),)
                found[at], allowed[at], wanted[at] = made[u, v], roundings * sizes[u, v], True
        if t.outputs:
            found, allowed = with_posts(t.posts, self.others, found, allowed)
        return found, allowed, wanted

    def run(self) -> Tensor:
        assert not self.call()
        return self.picture if self.t.outputs else self.tiles

    def check(self) -> Array:
        """What is written, if it is right and nothing else was touched, twice in the same bits."""
        t = self.t
        read = [self.tiles if t.outputs else self.picture, *self.others]
        before = [tensor.copy() for tensor in read]
        found, allowed, wanted = self.exact()
        target = self.run()
        assert np.array_equal(target.written(), wanted)
        assert target.kept_to_itself()
        got = target.array.astype(np.float64)
        assert np.isfinite(got[wanted]).all()
        assert (np.abs(got - found)[wanted] <= allowed[wanted]).all()
        assert all(np.array_equal(a, b.copy()) for a, b in zip(before, read, strict=True)), "only read"
        once = target.copy()
        target.clear()
        assert np.array_equal(self.run().copy(), once), "nothing is left from one run that changes the next"
        return target.array.copy()


def transformed(left: Wide, part: Wide, right: Wide) -> tuple[Wide, Wide]:
    """left · part · rightᵀ of every channel, and the same of all sizes."""
    one, other = (
        np.einsum("ui,ijc,vj->uvc", a, b, c) for a, b, c in ((left, part, right), map(np.abs, (left, part, right)))
    )
    return one, other


def all_rows(transform: Transform, images: int) -> list[RowOfTiles]:
    t = transform
    return [
        RowOfTiles(i, k, (i * t.rows.tiles + k) * t.columns.tiles) for i in range(images) for k in range(t.rows.tiles)
    ]


def drawn(chance: random.Random) -> tuple[Transform, int, list[RowOfTiles]]:
    """A transform, images, and some rows of tiles in any order, each with a place of its own in the block."""
    one, other = chance.choice(TILES)
    channels = chance.choice([1, 15, 16, 17, 32, chance.randint(1, 70)])
    images, outputs = chance.randint(1, 3), chance.random() < 0.5
    sizes = [chance.choice([1, 2, f.outputs, f.products, chance.randint(1, 26)]) for f in (one, other)]
    axes = [
        of_outputs(size, f) if outputs
        else of_data(size, chance.randint(0, f.taps - 1), chance.randint(0, f.taps - 1), f)
        for size, f in zip(sizes, (one, other), strict=True)
    ]  # fmt: skip
    every = [(image, row) for image in range(images) for row in range(axes[0].tiles)]
    chosen = chance.sample(every, chance.randint(1, len(every))) if chance.random() < 0.5 else every
    rows = [RowOfTiles(image, row, k * axes[1].tiles) for k, (image, row) in enumerate(chosen)]
    apart = len(rows) * axes[1].tiles * channels + chance.choice([0, 0, 1, 16, chance.randint(0, 40)])
    posts = draw_posts(chance) if outputs else ()
    return Transform(*axes, channels, apart, outputs, posts, chance.choice([1, 1, 2, 3])), images, rows


# ── what comes out ───────────────────────────────────────────────────────────────────────────────────────────────


@given(st.integers(0, 1 << 32))
@FUZZ
def test_any_transform_is_that_of_float64_and_touches_nothing_else(seed: int) -> None:
    Bound(*drawn(random.Random(seed)), seed % 1000).check()


def whole(
    tiles: tuple[Transforms, Transforms], sizes: tuple[int, int], channels: int, images: int = 1,
    pads: tuple[int, int, int, int] | None = None, outputs: bool = False, posts: tuple[Post, ...] = (),
    threads: int = 1, gap: int = 16,
) -> Bound:  # fmt: skip
    """All rows of tiles of all images; pads as ONNX has them."""
    before = pads or tuple((f.taps - 1) // 2 for f in (*tiles, *tiles))
    axes = [
        of_outputs(sizes[a], f) if outputs else of_data(sizes[a], before[a], before[2 + a], f)
        for a, f in enumerate(tiles)
    ]
    apart = images * axes[0].tiles * axes[1].tiles * channels + gap
    transform = Transform(*axes, channels, apart, outputs, posts, threads)
    return Bound(transform, images, all_rows(transform, images))


@pytest.mark.parametrize("number", range(len(TILES)))
@pytest.mark.parametrize("outputs", (False, True), ids=["data", "outputs"])
def test_every_tile_has_its_transforms(number: int, outputs: bool) -> None:
    for sizes, channels in (((13, 17), 35), ((6, 12), 16)):
        whole(TILES[number], sizes, channels, outputs=outputs).check()


@pytest.mark.parametrize("channels", range(1, 50))
def test_every_number_of_channels_has_its_vectors(channels: int) -> None:
    for outputs in (False, True):
        whole((transforms(4, 3), transforms(2, 3)), (7, 9), channels, 2, outputs=outputs).check()


@given(st.integers(1, 12), st.integers(1, 12), st.tuples(*[st.integers(0, 2)] * 4), st.sampled_from((2, 4, 6)))
@FUZZ
def test_padding_of_all_kinds_is_0_and_is_not_read(
    height: int, width: int, pads: tuple[int, int, int, int], outputs: int
) -> None:
    whole((transforms(outputs, 3), transforms(outputs, 3)), (height, width), 19, 2, pads).check()


@given(st.integers(1, 30), st.integers(1, 30), st.sampled_from(SIZES), st.sampled_from(SIZES))
@FUZZ
def test_outputs_beyond_the_picture_are_not_written(
    height: int, width: int, one: tuple[int, int], other: tuple[int, int]
) -> None:
    whole((transforms(*one), transforms(*other)), (height, width), 17, outputs=True).check()


def test_a_tile_that_misses_the_picture_is_0() -> None:
    f = transforms(2, 3)
    # the first two rows of tiles are padding, and so is the last
    rows, columns = Axis(3, 8, 2, 9, f.data), Axis(2, 5, 2, 6, f.data)
    transform = Transform(rows, columns, 20, 9 * 6 * 20, False)
    bound = Bound(transform, 1, all_rows(transform, 1))
    bound.check()
    assert not bound.positions()[0, 0][: 2 * 6].any() and bound.positions()[1, 1].any()


@pytest.mark.parametrize("sizes", [(56, 56), (14, 14), (7, 7), (28, 30)], ids=str)
@pytest.mark.parametrize("outputs", (False, True), ids=["data", "outputs"])
def test_pictures_of_the_sizes_that_models_have(sizes: tuple[int, int], outputs: bool) -> None:
    posts = (ByColumn("add"), ByElement("add"), Function("relu")) if outputs else ()
    whole((transforms(4, 3), transforms(4, 3)), sizes, 64, outputs=outputs, posts=posts, threads=2).check()


@pytest.mark.parametrize("post", EVERY_POST, ids=str)
@pytest.mark.parametrize("place", (0, 1, 2))
def test_every_post_runs_at_every_place(post: Post, place: int) -> None:
    posts: list[Post] = [ByColumn("add"), ByElement("mul")]
    posts.insert(place, post)
    for channels in (16, 37):
        whole((transforms(4, 3), transforms(2, 5)), (6, 7), channels, 2, None, True, tuple(posts)).check()


def test_posts_run_in_their_order() -> None:
    orders = [(ByColumn("add"), ByElement("mul")), (ByElement("mul"), ByColumn("add"))]
    found = [whole((transforms(2, 3), ALONE), (5, 5), 20, 1, None, True, posts) for posts in orders]
    # the same operands
    for one, other in zip(found[0].others, reversed(found[1].others), strict=True):
        other.array[...] = one.array
    assert not np.allclose(*(bound.check() for bound in found))


def test_sixteen_posts_are_possible() -> None:
    posts = tuple(ByElement(("add", "sub", "mul")[i % 3]) if i % 2 else ByColumn("add") for i in range(16))
    whole((transforms(4, 3), transforms(4, 3)), (6, 9), 21, 2, None, True, posts).check()


def test_neither_threads_nor_the_distance_of_positions_change_a_bit() -> None:
    for outputs, posts in ((False, ()), (True, (ByColumn("add"), Function("swish", 1.0), ByElement("mul")))):
        results = []
        for threads, gap in product((1, 2, 3, 5), (0, 16, 23)):
            bound = whole((transforms(4, 3), transforms(6, 3)), (21, 18), 33, 2, None, outputs, posts, threads, gap)
            bound.check()
            results.append(bound.picture.array if outputs else np.stack([*bound.positions().values()]))
        assert all(np.array_equal(found, results[0]) for found in results)


def test_what_is_not_finite_stays_in_its_tiles() -> None:
    bound = whole((transforms(2, 3), transforms(2, 3)), (12, 12), 18)
    bound.picture.array[0, 5, 6, 3] = np.nan
    bound.run()
    bad = {number for number in range(36) if any(np.isnan(v[number]).any() for v in bound.positions().values())}
    # of the 4 × 4 pixels from 2 k − 1 on that tile k reads, pixel 5 is in 2 and 3, pixel 6 in 2 and 3
    assert bad == {6 * row + column for row in (2, 3) for column in (2, 3)}
    others = [view[:, np.arange(18) != 3] for view in bound.positions().values()]
    assert all(np.isfinite(view).all() for view in others)


def test_a_result_may_lie_where_what_is_added_does() -> None:
    posts = (ByColumn("add"), ByElement("add"), Function("relu"), ByElement("mul"))
    apart = whole((transforms(4, 3), transforms(4, 3)), (11, 9), 37, 2, None, True, posts, 2)
    wanted = apart.check()
    column, added, factor = apart.others
    others = [column.address, added.address, factor.address]
    call, kept = apart.compiled.bind(apart.rows, added.address, apart.tiles.address, others)
    assert not call() and kept is not None
    assert np.array_equal(added.array, wanted) and added.kept_to_itself()


def magnitudes(most: int) -> st.SearchStrategy[int]:
    return st.integers(0, most).map(lambda bits: 1 << bits)


@given(magnitudes(26), magnitudes(20), magnitudes(26), st.sampled_from(TILES), st.booleans())
@FUZZ
def test_where_it_fits_instructions_reach_all_there_is(
    width: int, channels: int, tiles: int, f: tuple[Transforms, Transforms], outputs: bool
) -> None:
    """Code alone is written: nobody has memory for such tensors."""
    # a few tiles of a row that is as wide
    axes = [replace(of_outputs(9, x) if outputs else of_data(9, 1, 1, x), tiles=3) for x in f]
    axes[1] = replace(axes[1], size=max(width, 9))
    posts = (ByElement("add"),) if outputs else ()
    transform = Transform(*axes, channels, tiles * channels, outputs, posts, isa=isa())
    if transform.fits:
        Compiled(transform, 0)
    else:
        positions = transform.positions[0] * transform.positions[1] * transform.apart
        assert max(positions, 13 * axes[1].size * channels) * 4 >= 1 << 30, "what may be reached is"


# ── the whole convolution ────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("number", range(len(TILES) - 1))
def test_both_transforms_and_a_product_between_are_the_convolution(number: int) -> None:
    """The product is NumPy's, in float64, so that what is off is the transforms'."""
    f = TILES[number]
    pads = tuple((x.taps - 1) // 2 for x in (*f, *f))
    data = whole(f, (9, 8), 5, 2)
    data.check()
    out = whole(f, (9, 8), 3, 2, outputs=True)
    weights = np.random.default_rng(3).standard_normal((3, 5, f[0].taps, f[1].taps))
    turned = np.einsum("ui,mcij,vj->uvcm", numbers(f[0].filter), weights, numbers(f[1].filter))
    read, written = data.positions(), out.positions()
    for at in written:
        written[at][...] = read[at].astype(np.float64) @ turned[at]
    found = out.run().array
    padded = np.pad(data.picture.array.astype(np.float64), ((0, 0), pads[::2], pads[1::2], (0, 0)))
    wanted = sum(
        padded[:, i : i + 9, j : j + 8] @ weights[:, :, i, j].T
        for i, j in product(range(f[0].taps), range(f[1].taps))
    )
    # numbers of a tile grow with its size, and what is rounded of them with that
    grown = np.prod([np.abs(numbers(x.output)).sum(1).max() * np.abs(numbers(x.data)).sum(1).max() for x in f])
    assert np.abs(found - wanted).max() <= 4 * ROUNDING * grown * np.abs(wanted).max()
    assert np.abs(found - wanted).max() <= 2e-4 * np.abs(wanted).max()


# ── threads and memory ───────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("threads", (1, 2))
def test_two_bindings_run_at_the_same_time(threads: int) -> None:
    posts = (ByColumn("add"), ByElement("mul"), Function("swish", 1.0))
    axes = [of_outputs(n, transforms(4, 3)) for n in (30, 29)]
    transform = Transform(*axes, 40, 8 * 8 * 40 + 16, True, posts, threads)
    bounds = [Bound(transform, 1, all_rows(transform, 1), seed) for seed in (1, 2)]
    wanted = [bound.check() for bound in bounds]
    assert bounds[0].compiled is bounds[1].compiled and not np.array_equal(*wanted)

    def again(number: int) -> bool:
        bounds[number].picture.clear()
        return np.array_equal(bounds[number].run().array, wanted[number])

    assert not both_at_once([lambda: again(0), lambda: again(1)])


def between_walls(first: int, count: int) -> None:
    """Random transforms whose tensors end, and begin, at pages that may not be touched: in a process of its own."""
    for seed in range(first, first + count):
        for wall in (BEHIND, BEFORE):
            Bound(*drawn(random.Random(seed)), seed, wall).check()


def displaced(what: str, wall: str, elements: int) -> None:
    """A transform one of whose tensors is taken to lie so many elements nearer to the wall than it does."""
    axes = [of_outputs(6, transforms(2, 3)) if what == "outputs" else of_data(6, 1, 1, transforms(2, 3))] * 2
    transform = Transform(*axes, 20, 9 * 20, what == "outputs")
    bound = Bound(transform, 1, all_rows(transform, 1), 0, wall)
    picture, tiles = bound.picture.address, bound.tiles.address
    nearer = 4 * elements if wall == BEHIND else -4 * elements
    at = (picture, tiles + nearer) if what == "tiles" else (picture + nearer, tiles)
    bound.call, bound.kept = bound.compiled.bind(bound.rows, *at, ())
    bound.run()


def test_nothing_beyond_the_tensors_is_touched() -> None:
    assert in_a_process("test_tiles", "between_walls(0, 60)") == 0


@pytest.mark.parametrize("what", ("data", "outputs", "tiles"))
@pytest.mark.parametrize("wall", (BEHIND, BEFORE))
def test_the_walls_are_walls(what: str, wall: str) -> None:
    assert in_a_process("test_tiles", f"displaced({what!r}, {wall!r}, 0)") == 0
    assert in_a_process("test_tiles", f"displaced({what!r}, {wall!r}, 1)") == -signal.SIGSEGV


# ── the check sees what is wrong ─────────────────────────────────────────────────────────────────────────────────


POSTS = (ByColumn("add"), Function("swish", 1.0), ByElement("add"), Function("relu"), ByColumn("mul"))


def exemplary(outputs: bool) -> Bound:
    return whole((transforms(4, 3), transforms(4, 3)), (9, 10), 20, outputs=outputs, posts=POSTS if outputs else ())


@pytest.mark.parametrize("dropped", range(len(POSTS)))
def test_a_post_that_is_left_out_is_seen(dropped: int) -> None:
    bound = exemplary(True)
    bound.check()
    fewer = Compiled(replace(bound.t, posts=POSTS[:dropped] + POSTS[dropped + 1 :]), library().parallel_address)
    operands = iter(bound.others)
    theirs = [None if isinstance(post, Function) else next(operands).address for post in POSTS]
    left = [address for i, address in enumerate(theirs) if i != dropped and address is not None]
    bound.call, bound.kept = fewer.bind(bound.rows, bound.picture.address, bound.tiles.address, left)
    bound.picture.clear()
    with pytest.raises(AssertionError):
        bound.check()


@pytest.mark.parametrize("outputs", (False, True), ids=["data", "outputs"])
@pytest.mark.parametrize("side", ("rows", "columns"))
def test_a_coefficient_that_is_wrong_is_seen(outputs: bool, side: str) -> None:
    bound = exemplary(outputs)
    matrix = getattr(bound.t, side).transform
    for i, j in product(range(len(matrix)), range(len(matrix[0]))):
        # by a thousandth
        wrong = tuple(
            tuple(v + Fraction(1, 1000) if (k, n) == (i, j) else v for n, v in enumerate(row))
            for k, row in enumerate(matrix)
        )
        changed = replace(bound.t, **{side: replace(getattr(bound.t, side), transform=wrong)})
        with pytest.raises(AssertionError):
            Bound(bound.t, 1, bound.rows, code=changed).check()


@pytest.mark.parametrize("name", CORRUPTIONS)
@pytest.mark.parametrize("which", (0, -1))
@pytest.mark.parametrize("outputs", (False, True), ids=["data", "outputs"])
def test_a_byte_of_the_code_that_is_wrong_is_seen(
    name: str, which: int, outputs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, after = CORRUPTIONS[name]
    changed: list[int] = []
    monkeypatch.setattr(worker, "Code", corrupted(before, after, which, changed))
    monkeypatch.setitem(globals(), "compiled", Compiled)
    with pytest.raises(AssertionError):
        exemplary(outputs).check()
    assert changed


@pytest.mark.parametrize("side", ("rows", "columns"))
def test_padding_that_is_read_is_seen(side: str) -> None:
    bound = exemplary(False)
    axis = getattr(bound.t, side)
    # as if it went on to the right, or below
    larger = replace(bound.t, **{side: replace(axis, size=axis.size + 1)})
    # where a row of the picture ends the next one begins, which is no padding
    with pytest.raises(AssertionError):
        Bound(bound.t, 1, bound.rows, code=larger).check()


def test_outputs_that_are_written_beyond_are_seen() -> None:
    bound = exemplary(True)
    larger = replace(bound.t, rows=replace(bound.t.rows, size=bound.t.rows.size + 1))
    with pytest.raises(AssertionError):
        Bound(bound.t, 1, bound.rows, code=larger).check()


def test_a_thread_that_does_nothing_is_seen() -> None:
    bound = exemplary(True)
    bound.check()
    call, kept = bound.compiled.bind(bound.rows[:-1], bound.picture.address, bound.tiles.address, [
        o.address for o in bound.others
    ])  # fmt: skip
    bound.picture.clear()
    bound.call, bound.kept = call, kept
    with pytest.raises(AssertionError):
        bound.check()
