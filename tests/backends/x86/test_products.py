"""Products by machine code against float64, in memory where whatever is not to be touched is seen to be."""

from __future__ import annotations

import math
import random
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import pytest
from guarded import in_a_process, operations
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from machine_code import BEFORE, BEHIND, Array, Rows, isa
from numpy.typing import NDArray

from taso.backends.onednn.library import library
from taso.backends.x86 import products, worker
from taso.backends.x86.assembler import AVX2, AVX512, Isa
from taso.backends.x86.code import Code
from taso.backends.x86.functions import Function, temporaries_of
from taso.backends.x86.products import ByColumn, ByElement, Post, Product, compiled, in_panels

pytestmark = pytest.mark.usefixtures("each_isa")

Wide = NDArray[np.float64]
ROUNDING = 2.0**-24
"""By how much of itself a result is rounded at most."""
FUZZ = settings(
    max_examples=120, deadline=None, derandomize=True, database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)  # fmt: skip


@dataclass(frozen=True)
class _Known:
    """A function in float64 and the largest slope that it has."""

    exact: Callable[[Wide], Wide]
    slope: float


FUNCTIONS = {
    Function("logistic"): _Known(lambda x: _logistic(x), 0.25),
    Function("swish", 1.0): _Known(lambda x: x * _logistic(x), 1.1),
    Function("relu"): _Known(lambda x: np.maximum(x, 0), 1),
    Function("relu", 0.25): _Known(lambda x: np.where(x > 0, x, 0.25 * x), 1),
    Function("linear", 0.5, 2.0): _Known(lambda x: 0.5 * x + 2, 0.5),
    Function("clip_v2", -0.75, 1.5): _Known(lambda x: np.clip(x, -0.75, 1.5), 1),
    Function("hardsigmoid", 0.25, 0.5): _Known(lambda x: np.clip(0.25 * x + 0.5, 0, 1), 0.25),
    Function("hardswish", 0.25, 0.5): _Known(lambda x: x * np.clip(0.25 * x + 0.5, 0, 1), 1.5),
    # where it is at most 1
    Function("square"): _Known(np.square, 2),
    Function("gelu_erf"): _Known(lambda x: x * _normal(x), 1.13),
}  # fmt: skip


def _logistic(x: Wide) -> Wide:
    return 0.5 + 0.5 * np.tanh(x / 2)


def _normal(x: Wide) -> Wide:
    return np.array([math.erfc(-v / math.sqrt(2)) / 2 for v in x.ravel()]).reshape(x.shape)


COMBINED: dict[str, Callable[[Wide, Wide], Wide]] = {"add": np.add, "sub": np.subtract, "mul": np.multiply}


class Bound:
    """A product on matrices of its own, and what it should be; memory around all of them is the canary's."""

    def __init__(self, product: Product, seed: int = 0, wall: str = "", code: Product | None = None) -> None:
        """`code` is a product to run in its stead, with operands as many."""
        product, code = replace(product, isa=isa()), None if code is None else replace(code, isa=isa())
        self.product, self.random = product, np.random.default_rng(seed)
        rows, p = product.batch * product.rows, product
        weights = self.normal(p.batch, p.inner, p.columns)
        self.left = Rows(
            p.rows, p.inner, p.left_stride, self.normal(rows, p.inner), wall, p.batch, p.left_apart
        )  # fmt: skip
        packed = in_panels(weights, isa())
        self.panels = Rows(1, packed.size, packed.size, packed, wall)
        self.out = Rows(p.rows, p.columns, p.out_stride, None, wall, p.batch, p.out_apart)
        self.others = [self._operand(post, wall) for post in p.posts if not isinstance(post, Function)]
        self.wanted, self.allowed = self._exact(weights)
        run = compiled(code or product, library().parallel_address)
        others = [o.address for o in self.others]
        self.call, self.kept = run.bind(self.left.address, self.panels.address, self.out.address, others)

    def normal(self, *dims: int) -> Array:
        return self.random.standard_normal(dims).astype(np.float32)

    def _operand(self, post: Post, wall: str) -> Rows:
        p = self.product
        if isinstance(post, ByColumn):
            return Rows(1, p.columns, p.columns, self.normal(1, p.columns), wall)
        values = self.normal(p.batch, p.rows, p.columns)
        return Rows(p.rows, p.columns, p.out_stride, values, wall, p.batch, p.out_apart)

    def _exact(self, weights: Array) -> tuple[Wide, Wide]:
        """The result, and by how much one in float32 may differ: each operation rounds, each slope passes that on."""
        p = self.product
        left = self.left.array.astype(np.float64).reshape(p.batch, p.rows, p.inner)
        found = (left @ weights.astype(np.float64)).reshape(-1, p.columns)
        sizes = (np.abs(left) @ np.abs(weights.astype(np.float64))).reshape(-1, p.columns)
        # what is added first is a term of the sum
        off = (p.inner + 1) * ROUNDING * (sizes + 4)
        others = iter(self.others)
        for post in p.posts:
            if isinstance(post, Function):
                known = FUNCTIONS[post]
                slope = 2 * np.abs(found) + off if post.name == "square" else known.slope
                off, found = slope * off, known.exact(found)
                off = off + 8 * ROUNDING * (np.abs(found) + 2)
            else:
                other = next(others).array.astype(np.float64).reshape(-1, p.columns)
                off = off * np.abs(other) if post.operation == "mul" else off
                found = COMBINED[post.operation](found, other)
                off = off + 4 * ROUNDING * np.abs(found)
        return found, off

    def run(self) -> Array:
        assert not self.call()
        return self.out.array.reshape(-1, self.product.columns).copy()

    def check(self) -> Array:
        """The result, if it is right and nothing else was touched, twice in the same bits."""
        kept = [m.array.copy() for m in (self.left, self.panels, *self.others)]
        found = self.run()
        assert np.isfinite(found).all()
        assert (np.abs(found - self.wanted) <= self.allowed).all()
        assert all(m.kept_to_itself for m in (self.left, self.panels, self.out, *self.others))
        for before, m in zip(kept, (self.left, self.panels, *self.others), strict=True):
            assert np.array_equal(before, m.array), "what is read is not written"
        self.out.array[:] = np.nan
        assert np.array_equal(self.run(), found), "nothing is left from one run that changes the next"
        return found


def draw_posts(chance: random.Random, most: int = 5) -> tuple[Post, ...]:
    """At most one square, before which values are no larger than a few."""
    posts: list[Post] = []
    for _ in range(chance.randint(0, most)):
        kind = chance.choice([ByColumn, ByElement, Function])
        if kind is Function:
            posts.append(chance.choice([f for f in FUNCTIONS if f.name != "square" or f not in posts]))
        else:
            posts.append(kind(chance.choice(["add", "sub", "mul"])))
    return tuple(posts)


def draw_product(chance: random.Random) -> Product:
    rows = chance.choice([1, 2, 13, 14, 15, chance.randint(1, 61)])
    inner = chance.choice([1, 3, 4, chance.randint(1, 70)])
    columns = chance.choice([1, 15, 16, 17, 31, 32, 33, 64, chance.randint(1, 150)])
    left, out = inner + chance.choice([0, 0, 1, 7]), columns + chance.choice([0, 0, 1, 5, 16])
    return Product(
        rows, inner, columns, left, out, draw_posts(chance), chance.choice([1, 1, 2, 3]),
        chance.choice([1 << 20, chance.randint(1, 30)]), chance.choice([1, 1, 2, 3]),
        chance.choice([0, rows * left + 3]), chance.choice([0, rows * out + 11]),
    )  # fmt: skip


# ── what comes out ───────────────────────────────────────────────────────────────────────────────────────────────


@given(st.integers(0, 1 << 32))
@FUZZ
def test_any_product_is_that_of_float64_and_touches_nothing_else(seed: int) -> None:
    Bound(draw_product(random.Random(seed)), seed % 1000).check()


@given(
    st.integers(1, 60), st.integers(1, 40), st.integers(1, 100), st.integers(0, 9), st.integers(0, 20),
    st.integers(1, 3), st.integers(1, 64), st.integers(1, 3),
)  # fmt: skip
@FUZZ
def test_sizes_strides_batches_and_chunks_of_all_kinds(
    rows: int, inner: int, columns: int, left: int, out: int, batch: int, chunk: int, threads: int
) -> None:
    posts = (ByColumn("add"), Function("relu"), ByElement("sub"))
    Bound(Product(rows, inner, columns, inner + left, columns + out, posts, batch, chunk, threads)).check()


@pytest.mark.parametrize("rows", range(1, 44))
def test_every_number_of_rows_has_its_blocks(rows: int) -> None:
    Bound(Product(rows, 9, 33, 9, 33, (ByColumn("add"),))).check()
    # behind which blocks of AVX2 have fewer rows
    Bound(Product(rows, 9, 33, 9, 33, (ByColumn("add"), Function("gelu_erf")), chunk=30)).check()


@pytest.mark.parametrize("columns", range(1, 70))
def test_every_number_of_columns_has_its_panels(columns: int) -> None:
    Bound(Product(16, 6, columns, 8, columns + 3, (ByElement("add"), ByColumn("mul")))).check()


@pytest.mark.parametrize("inner", range(1, 20))
def test_every_length_of_sums_has_its_turns(inner: int) -> None:
    Bound(Product(15, inner, 40, inner, 40)).check()


@pytest.mark.parametrize("product", [
    Product(300, 700, 200, 700, 200, (ByColumn("add"), Function("gelu_erf")), threads=2),
    Product(1000, 64, 96, 64, 96, (ByElement("add"), Function("relu")), chunk=112, threads=2),
    Product(7, 1024, 1000, 1030, 1111, (ByColumn("add"),), threads=3),
    Product(49, 33, 65, 33, 65, (Function("swish", 1.0),), batch=12, chunk=20, threads=2),
], ids=str)  # fmt: skip
def test_products_of_the_sizes_that_models_have(product: Product) -> None:
    Bound(product).check()


@pytest.mark.parametrize("post", [*FUNCTIONS, *(kind(name) for kind in (ByColumn, ByElement) for name in COMBINED)],
                         ids=str)  # fmt: skip
@pytest.mark.parametrize("place", (0, 1, 2))
def test_every_post_runs_at_every_place(post: Post, place: int) -> None:
    posts: list[Post] = [ByColumn("add"), ByElement("mul")]
    posts.insert(place, post)
    for columns in (32, 37):
        Bound(Product(17, 5, columns, 5, columns, tuple(posts))).check()


def test_posts_run_in_their_order() -> None:
    one, other = (ByColumn("add"), ByColumn("mul")), (ByColumn("mul"), ByColumn("add"))
    results = [Bound(Product(5, 5, 20, 5, 20, posts)).check() for posts in (one, other)]
    assert not np.allclose(*results)


def test_sixteen_posts_are_possible() -> None:
    posts = tuple(ByColumn(("add", "sub", "mul")[i % 3]) if i % 2 else ByElement("add") for i in range(16))
    Bound(Product(15, 7, 35, 7, 35, posts)).check()


@pytest.mark.parametrize("bad", (np.nan, np.inf, -np.inf))
def test_what_is_not_finite_stays_in_its_row(bad: float) -> None:
    bound = Bound(Product(30, 12, 50, 12, 50, (ByColumn("add"),)))
    bound.left.array[17, 5] = bad
    found = bound.run()
    assert not np.isfinite(found[17]).any()
    rest = np.delete(np.arange(30), 17)
    assert (np.abs(found - bound.wanted) <= bound.allowed)[rest].all()


def test_neither_threads_nor_chunks_change_a_bit() -> None:
    plain = Product(61, 45, 77, 45, 77, (ByColumn("add"), Function("swish", 1.0)), 2)
    wanted = Bound(plain).check()
    for threads in (1, 2, 3, 5):
        for chunk in (1, 14, 20, 60, 61, 1000):
            assert np.array_equal(Bound(replace(plain, threads=threads, chunk=chunk)).check(), wanted)


def test_a_result_may_lie_where_what_is_added_does() -> None:
    product = Product(29, 17, 53, 17, 60, (ByElement("add"), Function("relu"), ByElement("mul")), threads=2)
    apart = Bound(product)
    wanted = apart.check()
    here = compiled(apart.product, library().parallel_address)
    added, factor = apart.others
    call, kept = here.bind(apart.left.address, apart.panels.address, added.address, [added.address, factor.address])
    assert not call() and kept is not None
    assert np.array_equal(added.array, wanted) and added.kept_to_itself


def test_sums_in_parts_add_up() -> None:
    whole = Product(20, 30, 40, 30, 40, (ByColumn("add"),))
    bound = Bound(whole)
    wanted = bound.check()
    weights = np.random.default_rng(0).standard_normal((1, 30, 40)).astype(np.float32)
    assert np.array_equal(in_panels(weights, isa()), bound.panels.array[0]), "as it was drawn"
    out = Rows(20, 40, 40)
    for start, stop, post in ((0, 17, ByColumn("add")), (17, 30, ByElement("add"))):
        part = Product(20, stop - start, 40, 30, 40, (post,), isa=isa())
        panels = in_panels(weights[:, start:stop], isa())
        other = bound.others[0].address if start == 0 else out.address
        call, kept = compiled(part, 0).bind(bound.left.address + 4 * start, panels.ctypes.data, out.address, [other])
        assert not call() and kept is not None
    assert np.abs(out.array - wanted).max() <= 1e-5 * np.abs(wanted).max()


@pytest.mark.parametrize("isa, rows", [(AVX512, (14, 14, 14)), (AVX2, (6, 6, 5))], ids=str)
def test_sums_fill_the_registers(isa: Isa, rows: tuple[int, ...]) -> None:
    kinds = (), (Function("swish", 1.0), ByColumn("add")), (Function("relu"), Function("gelu_erf"))
    problems = [Product(20, 5, 40, 5, 40, posts, isa=isa) for posts in kinds]
    assert tuple(p.block for p in problems) == rows
    for p in problems:
        temporaries = max((temporaries_of(f) for f in p.posts if isinstance(f, Function)), default=0)
        assert 2 * p.block + temporaries <= isa.registers


# ── how the second matrix lies ───────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("columns", (1, 15, 16, 17, 31, 32, 33, 48, 49, 63, 64, 65, 100))
def test_panels_hold_every_element_once_in_its_place(columns: int) -> None:
    batch, inner = 2, 3
    matrices = np.arange(1, batch * inner * columns + 1, dtype=np.float32).reshape(batch, inner, columns)
    found = in_panels(matrices, isa())
    width = isa().width
    padded = -(-columns // width) * width
    assert found.size == batch * inner * padded and found.dtype == np.float32
    wanted = np.zeros_like(found)
    for m, k, n in np.ndindex(batch, inner, columns):
        first = n // (2 * width) * 2 * width
        wide = min(2 * width, padded - first)
        wanted[m * inner * padded + first * inner + k * wide + n - first] = matrices[m, k, n]
    assert np.array_equal(found, wanted)


@given(st.integers(1, 3000), st.integers(1, 3000))
@FUZZ
def test_chunks_are_all_rows_in_order(rows: int, chunk: int) -> None:
    found = Product(rows, 1, 1, 1, 1, chunk=chunk).chunks
    assert [row for start, count in found for row in range(start, start + count)] == list(range(rows))
    assert all(0 < count <= chunk for _, count in found)
    assert len({count for _, count in found[:-1]}) <= 1, "all but the last are alike"


# ── threads and memory ───────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("threads", (1, 2))
def test_two_bindings_run_at_the_same_time(threads: int) -> None:
    product = Product(50, 64, 100, 64, 100, (ByColumn("add"), ByElement("mul")), threads=threads)
    bindings = [Bound(product, seed) for seed in (1, 2)]
    wanted = [b.check() for b in bindings]
    assert not np.array_equal(*wanted)
    wrong: list[int] = []
    together = threading.Barrier(2)

    def work(number: int) -> None:
        together.wait()
        for _ in range(200):
            bindings[number].out.array[:] = np.nan
            if not np.array_equal(bindings[number].run(), wanted[number]):
                wrong.append(number)

    both = [threading.Thread(target=work, args=(n,)) for n in range(2)]
    for thread in both:
        thread.start()
    for thread in both:
        thread.join()
    assert not wrong


def between_walls(first: int, count: int) -> None:
    """Random products whose matrices end, and begin, at pages that may not be touched: run in a process of its own."""
    for seed in range(first, first + count):
        product = draw_product(random.Random(seed))
        for wall in (BEHIND, BEFORE):
            Bound(product, seed, wall).check()


def too_large(more_rows: int, more_columns: int, more_inner: int, wall: str) -> None:
    """A product that is larger than its matrices."""
    product = Product(14, 8, 32, 8, 32)
    larger = Product(14 + more_rows, 8 + more_inner, 32 + more_columns, 8, 32)
    Bound(product, 0, wall, larger).run()


def test_nothing_beyond_the_matrices_is_touched() -> None:
    assert in_a_process("test_products", "between_walls(0, 120)") == 0


@pytest.mark.parametrize("more", [(1, 0, 0), (0, 1, 0), (0, 0, 1)], ids=["row", "column", "term"])
def test_the_walls_are_walls(more: tuple[int, int, int]) -> None:
    assert in_a_process("test_products", f"too_large({more[0]}, {more[1]}, {more[2]}, 'behind')") == -signal.SIGSEGV


def test_without_more_there_is_nothing_to_hit() -> None:
    assert in_a_process("test_products", "too_large(0, 0, 0, 'behind')") == 0


# ── the check sees what is wrong ─────────────────────────────────────────────────────────────────────────────────


POSTS = (ByColumn("add"), Function("swish", 1.0), ByElement("add"), Function("relu"), ByColumn("mul"))


@pytest.mark.parametrize("dropped", range(len(POSTS)))
def test_a_post_that_is_left_out_is_seen(dropped: int) -> None:
    product = Product(20, 9, 40, 9, 40, POSTS)
    fewer = replace(product, posts=POSTS[:dropped] + POSTS[dropped + 1 :])
    bound = Bound(product)
    bound.check()
    operands = iter(bound.others)
    theirs = [None if isinstance(post, Function) else next(operands).address for post in POSTS]
    left = [address for i, address in enumerate(theirs) if i != dropped and address is not None]
    code = compiled(replace(fewer, isa=isa()), 0)
    bound.call, bound.kept = code.bind(bound.left.address, bound.panels.address, bound.out.address, left)
    with pytest.raises(AssertionError):
        bound.check()


CORRUPTIONS = {
    "a product taken off": (0xB8, 0xBC), "the other product": (0xB8, 0xA8), "a sum for a product": (0x59, 0x58),
    "a difference for a sum": (0x58, 0x5C), "a least for a largest": (0x5F, 0x5D),
}  # fmt: skip


@pytest.mark.parametrize("name", CORRUPTIONS)
@pytest.mark.parametrize("which", (0, -1))
def test_a_byte_of_the_code_that_is_wrong_is_seen(name: str, which: int, monkeypatch: pytest.MonkeyPatch) -> None:
    before, after = CORRUPTIONS[name]
    product = Product(20, 9, 40, 9, 40, POSTS)
    Bound(product).check()
    changed: list[int] = []

    def corrupted(code: bytes) -> Code:
        wrong = bytearray(code)
        places = operations(code, before)
        changed.append(places[which])
        wrong[places[which]] = after
        return Code(bytes(wrong))

    monkeypatch.setattr(worker, "Code", corrupted)
    monkeypatch.setattr(products, "compiled", products.Compiled)
    monkeypatch.setitem(globals(), "compiled", products.Compiled)
    with pytest.raises(AssertionError):
        Bound(product).check()
    assert changed


def test_a_write_outside_the_rows_is_seen() -> None:
    product = Product(10, 5, 20, 5, 24)
    with pytest.raises(AssertionError):
        Bound(product, code=replace(product, columns=22)).check()


def test_a_read_of_the_gaps_is_seen() -> None:
    product = Product(10, 5, 20, 7, 20)
    with pytest.raises(AssertionError):
        Bound(product, code=replace(product, inner=6)).check()
