"""Packing of memory: nothing that is in use at once overlaps, and little is lost."""

from __future__ import annotations

import random
from itertools import product

import pytest

from taso.backends.packing import Span, most_at_once, packed


def drawn(seed: int, count: int = 30, steps: int = 20) -> list[Span]:
    rng = random.Random(seed)
    spans = []
    for _ in range(count):
        first = rng.randrange(-1, steps)
        spans.append(Span(64 * rng.randrange(0, 40), first, min(steps, first + rng.choice((0, 1, 1, 2, 5, steps)))))
    return spans


@pytest.mark.parametrize("seed", range(30))
def test_spans_in_use_at_once_do_not_overlap_and_lie_within_the_whole(seed: int) -> None:
    spans = drawn(seed)
    offsets, total = packed(spans)
    for (a, x), (b, y) in product(zip(spans, offsets, strict=True), repeat=2):
        assert x >= 0 and x + a.size <= total
        if a is not b and a.first <= b.last and b.first <= a.last and a.size and b.size:
            assert x + a.size <= y or y + b.size <= x


def test_no_packing_takes_less_than_what_is_in_use_at_once_and_most_take_no_more() -> None:
    ratios = []
    for seed in range(60):
        spans = drawn(seed, 15)
        least, total = most_at_once(spans), packed(spans)[1]
        assert total >= least == max(sum(s.size for s in spans if s.first <= at <= s.last) for at in range(-1, 21))
        ratios.append(total / least)
    assert sum(ratio == 1 for ratio in ratios) > 45 and max(ratios) < 1.15


def test_where_the_largest_first_leaves_gaps_other_orders_leave_fewer(monkeypatch: pytest.MonkeyPatch) -> None:
    best = [packed(drawn(seed, 15))[1] for seed in range(60)]
    monkeypatch.setattr("taso.backends.packing.TRIES", 1)
    once = [packed(drawn(seed, 15))[1] for seed in range(60)]
    assert all(a <= b for a, b in zip(best, once, strict=True))
    assert sum(a < b for a, b in zip(best, once, strict=True)) >= 5


def test_the_same_spans_are_packed_alike() -> None:
    assert packed(drawn(3)) == packed(drawn(3))


def test_nothing_takes_nothing() -> None:
    assert packed([]) == ([], 0)
    assert packed([Span(0, 0, 3), Span(0, 2, 2)])[1] == 0
