"""Where tensors that are needed for a while lie in one stretch of memory, so that it need not be long."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

TRIES = 30
"""Orders that are tried one after the other, each with what came to lie highest in front of the last one."""

MOST = 10_000
"""Spans that are placed in all these tries, except in the first."""


@dataclass(frozen=True)
class Span:
    """So many bytes, in use from step `first` to step `last` of a program."""

    size: int
    first: int
    last: int


def packed(spans: Sequence[Span]) -> tuple[list[int], int]:
    """An offset for each span, so that those in use at once do not overlap, and the bytes of the whole.

    Each lies at the lowest offset that is free all its time, the largest first, or those that are large for long. What
    comes to lie highest is placed first in the next try, until nothing is lost or the tries are used up.
    """
    if not spans:
        return [], 0
    least = most_at_once(spans)
    tries = max(min(TRIES, MOST // max(len(spans), 1)), 1)
    numbers = range(len(spans))
    best: list[tuple[int, list[int]]] = []
    for order in (
        sorted(numbers, key=lambda i: (-spans[i].size, spans[i].first)),
        sorted(numbers, key=lambda i: (-spans[i].size * (spans[i].last - spans[i].first + 1), spans[i].first)),
    ):
        for _ in range(tries):
            offsets, total, highest = _first_fit(spans, order)
            if not best or total < best[0][0]:
                best = [(total, offsets)]
            if total <= least:
                return offsets, total
            order.remove(highest)
            order.insert(0, highest)
    return best[0][1], best[0][0]


def most_at_once(spans: Sequence[Span]) -> int:
    """The most bytes in use at one time: less than that no packing takes."""
    start = min(span.first for span in spans)
    change = [0] * (max(span.last for span in spans) - start + 2)
    for span in spans:
        change[span.first - start] += span.size
        change[span.last - start + 1] -= span.size
    return max(accumulate(change))


def _first_fit(spans: Sequence[Span], order: Sequence[int]) -> tuple[list[int], int, int]:
    """Offsets, the bytes of the whole, and the number of the span that lies highest."""
    offsets = [0] * len(spans)
    start = min(span.first for span in spans)
    # for each step those that lie somewhere then
    there: list[list[int]] = [[] for _ in range(max(span.last for span in spans) - start + 1)]
    total, highest = 0, 0
    for number in order:
        span = spans[number]
        steps = range(span.first - start, span.last - start + 1)
        others = {other for step in steps for other in there[step]}
        offset = 0
        for begin, end in sorted((offsets[o], offsets[o] + spans[o].size) for o in others):
            if offset + span.size <= begin:
                break
            offset = max(offset, end)
        offsets[number] = offset
        for step in steps:
            there[step].append(number)
        if offset + span.size > total:
            total, highest = offset + span.size, number
    return offsets, total, highest


__all__ = ["Span", "most_at_once", "packed"]
