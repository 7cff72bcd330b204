"""A layered drawing: nothing overlaps, edges lead downwards from border to border, and few of them cross."""

from __future__ import annotations

import random

import pytest

from taso.graph import layered
from taso.graph.layered import layout


def random_case(seed: int, count: int) -> tuple[list[tuple[float, float]], list[tuple[int, int]]]:
    chance = random.Random(seed)
    edges = {(chance.randrange(max(0, n - 12), n), n) for n in range(1, count) for _ in range(chance.randint(1, 3))}
    return [(chance.uniform(20, 200), chance.uniform(15, 60)) for _ in range(count)], sorted(edges)


@pytest.mark.parametrize("seed", range(12))
def test_no_two_nodes_overlap_and_every_edge_leads_from_border_to_border_downwards(seed: int) -> None:
    sizes, edges = random_case(seed, 5 + 20 * seed)
    made = layout(sizes, edges)
    frames = [(x - w / 2, y - h / 2, x + w / 2, y + h / 2) for (x, y), (w, h) in zip(made.centres, sizes, strict=True)]
    for i, (a, b, c, d) in enumerate(frames):
        assert a >= -1e-6 and b >= -1e-6 and c <= made.width + 1e-6 and d <= made.height + 1e-6
        assert all(a >= g or c <= e or b >= h or d <= f for e, f, g, h in frames[:i])
    for (a, b), points in zip(edges, made.routes, strict=True):
        assert all(p[1] <= q[1] + 1e-9 for p, q in zip(points, points[1:], strict=False))
        assert points[0] == pytest.approx((made.centres[a][0], frames[a][3]))
        assert points[-1][1] == pytest.approx(frames[b][1]) and frames[b][0] <= points[-1][0] <= frames[b][2]
        # between its ends an edge passes no node
        for (x, y), (_, v) in list(zip(points, points[1:], strict=False))[1::2]:
            assert not any(e < x < g and f < (y + v) / 2 < h for e, f, g, h in frames)


def test_a_chain_is_drawn_as_a_straight_line_and_a_tree_without_crossings() -> None:
    chain = layout([(40, 20), (90, 20), (10, 20)], [(0, 1), (1, 2)])
    assert len({round(x, 6) for x, _ in chain.centres}) == 1
    tree = layout([(30, 20)] * 15, [((n - 1) // 2, n) for n in range(14, 0, -1)])
    for level in (range(3, 7), range(7, 15)):
        parents = [(n - 1) // 2 for n in sorted(level, key=lambda n: tree.centres[n][0])]
        assert all(parents[i] == parents[i + 1] for i in range(0, len(parents), 2))


def test_a_layout_is_the_same_each_time_and_of_nothing_is_nothing() -> None:
    sizes, edges = random_case(3, 80)
    assert layout(sizes, edges) == layout(sizes, edges)
    assert layout([], []).routes == [] and layout([(5, 5)], []).centres == [(5, 2.5)]


def test_edges_beyond_what_is_routed_are_drawn_straight_through(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layered, "_BENDS", 3)
    edges = [(n, n + 1) for n in range(9)] + [(0, 3), (0, 9)]
    made = layout([(30, 20)] * 10, edges)
    assert len(made.routes[9]) == 2 + 2 * 2 and len(made.routes[10]) == 2
    assert made.routes[10][-1][1] == pytest.approx(made.centres[9][1] - 10)
