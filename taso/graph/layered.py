"""Where to draw the nodes of a directed acyclic graph: in layers, edges downwards, few crossings, few bends.

The steps are those of Sugiyama, Tagawa and Toda (1981): layers, an order within each by medians of neighbours, and
places. Places are found as Brandes and Köpf (2001) do: four extreme alignments of nodes with their median neighbours,
and of the four places of each node the mean of the inner two.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

Point = tuple[float, float]

_ROUNDS = 10
_WITHOUT_GAIN = 3
_BEND_WIDTH = 10.0
_BENDS = 20_000
"""Places where edges pass layers, of a whole drawing; the longest edges beyond that are drawn straight through."""


@dataclass
class Layout:
    """Centres of nodes, and for each edge the points that it passes, its ends on the borders of its nodes."""

    width: float
    height: float
    centres: list[Point]
    routes: list[list[Point]]


def layout(sizes: Sequence[tuple[float, float]], edges: Sequence[tuple[int, int]], gap: Point = (22.0, 44.0)) -> Layout:
    """Places for nodes of the given widths and heights; `edges` are pairs of nodes, without a cycle.

    `gap` is the distance between neighbours of a layer, and between layers. The result depends on nothing else.
    """
    if not sizes:
        return Layout(0.0, 0.0, [], [])
    levels = _levels(len(sizes), edges)
    chains, widths, layers = _bent(sizes, edges, levels)
    above, below = _neighbours(len(widths), chains)
    _order(layers, above, below)
    across = _across(layers, above, below, widths, gap[0], len(sizes))
    return _placed(sizes, edges, levels, layers, chains, across, gap[1])


# ── layers ───────────────────────────────────────────────────────────────────────────────────────────────────────


def _levels(count: int, edges: Sequence[tuple[int, int]]) -> list[int]:
    """The layer of each node: below all that it reads; those that feed more than they read lie as low as they can."""
    outs: list[list[int]] = [[] for _ in range(count)]
    ins: list[list[int]] = [[] for _ in range(count)]
    for a, b in edges:
        outs[a].append(b)
        ins[b].append(a)
    waiting = [len(i) for i in ins]
    order = [n for n in range(count) if not waiting[n]]
    levels = [0] * count
    for node in order:
        for follower in outs[node]:
            levels[follower] = max(levels[follower], levels[node] + 1)
            waiting[follower] -= 1
            if not waiting[follower]:
                order.append(follower)
    for node in reversed(order):
        if len(outs[node]) > len(ins[node]):
            levels[node] = min(levels[f] for f in outs[node]) - 1
    return levels


def _bent(
    sizes: Sequence[tuple[float, float]], edges: Sequence[tuple[int, int]], levels: list[int]
) -> tuple[list[list[int]], list[float], list[list[int]]]:
    """For each edge the vertices that it passes, nodes and bends; widths of vertices; vertices of each layer."""
    widths = [w for w, _ in sizes]
    layers: list[list[int]] = [[] for _ in range(max(levels) + 1)]
    for node, level in enumerate(levels):
        layers[level].append(node)
    chains: list[list[int]] = [[] for _ in edges]
    left = _BENDS
    for number in sorted(range(len(edges)), key=lambda e: levels[edges[e][1]] - levels[edges[e][0]]):
        a, b = edges[number]
        left -= levels[b] - levels[a] - 1
        if left < 0:
            break
        chain = [a]
        for level in range(levels[a] + 1, levels[b]):
            chain.append(len(widths))
            layers[level].append(len(widths))
            widths.append(_BEND_WIDTH)
        chains[number] = [*chain, b]
    return chains, widths, layers


def _neighbours(count: int, chains: Sequence[Sequence[int]]) -> tuple[list[list[int]], list[list[int]]]:
    above: list[list[int]] = [[] for _ in range(count)]
    below: list[list[int]] = [[] for _ in range(count)]
    for chain in chains:
        for a, b in zip(chain, chain[1:], strict=False):
            below[a].append(b)
            above[b].append(a)
    return above, below


# ── order ────────────────────────────────────────────────────────────────────────────────────────────────────────


def _order(layers: list[list[int]], above: list[list[int]], below: list[list[int]]) -> None:
    """Orders each layer, in place, so that few edges cross: sweeps by medians, of which the best result stays."""
    _first_order(layers, above, below)
    best, fewest, idle = [list(layer) for layer in layers], _crossings(layers, below), 0
    for number in range(_ROUNDS):
        if not fewest or idle == _WITHOUT_GAIN:
            break
        down = number % 2 == 0
        _sweep(layers if down else layers[::-1], above if down else below, number % 4 > 1)
        crossings = _crossings(layers, below)
        idle += 1
        if crossings < fewest:
            best, fewest, idle = [list(layer) for layer in layers], crossings, 0
    layers[:] = best


def _first_order(layers: list[list[int]], above: list[list[int]], below: list[list[int]]) -> None:
    """The order of a walk into depth, in which what belongs together lies together."""
    rank: dict[int, int] = {}
    stack = [v for layer in reversed(layers) for v in reversed(layer) if not above[v]]
    while stack:
        vertex = stack.pop()
        if vertex not in rank:
            rank[vertex] = len(rank)
            stack.extend(reversed(below[vertex]))
    for layer in layers:
        layer.sort(key=lambda v: rank[v])


def _sweep(layers: Sequence[list[int]], fixed: list[list[int]], later_first: bool) -> None:
    """Sorts each layer by the medians of neighbours in the one before; what has none stays where it is."""
    place: dict[int, int] = {}
    for layer in layers:
        tied = layer[::-1] if later_first else layer
        keyed = [(_median([place[u] for u in fixed[v] if u in place]), v) for v in tied]
        free = [v for median, v in sorted((k for k in keyed if k[0] is not None), key=_first) if median is not None]
        moved = iter(free)
        known = set(free)
        layer[:] = [next(moved) if v in known else v for v in layer]
        place.update((v, i) for i, v in enumerate(layer))


def _first(pair: tuple[float | None, int]) -> float:
    return pair[0] or 0.0


def _median(places: list[int]) -> float | None:
    if not places:
        return None
    places.sort()
    middle = len(places) // 2
    if len(places) % 2:
        return float(places[middle])
    return (places[middle - 1] + places[middle]) / 2


def _crossings(layers: Sequence[Sequence[int]], below: list[list[int]]) -> int:
    """How many pairs of edges cross, counted layer by layer with a tree of sums."""
    total = 0
    for upper, lower in zip(layers, layers[1:], strict=False):
        place = {v: i for i, v in enumerate(lower)}
        tree = [0] * (len(lower) + 1)
        seen = 0
        for vertex in upper:
            ends = sorted(place[w] for w in below[vertex])
            for end in ends:
                total += seen - _sum(tree, end + 1)
            for end in ends:
                _add(tree, end + 1)
            seen += len(ends)
    return total


def _sum(tree: list[int], i: int) -> int:
    found = 0
    while i:
        found += tree[i]
        i &= i - 1
    return found


def _add(tree: list[int], i: int) -> None:
    while i < len(tree):
        tree[i] += 1
        i += i & -i


# ── places across ────────────────────────────────────────────────────────────────────────────────────────────────


def _across(
    layers: list[list[int]], above: list[list[int]], below: list[list[int]], widths: list[float], gap: float, nodes: int
) -> list[float]:
    """The place of each vertex in its layer: of four extreme ones the mean of the middle two."""
    conflicts = _conflicts(layers, above, nodes)
    found: list[list[float]] = []
    for downwards in (True, False):
        for leftmost in (True, False):
            ordered = layers if downwards else layers[::-1]
            ordered = ordered if leftmost else [layer[::-1] for layer in ordered]
            roots = _aligned(ordered, above if downwards else below, conflicts, len(widths))
            places = _compacted(ordered, roots, widths, gap)
            found.append(places if leftmost else [-x for x in places])
    spans = [(max(p) - min(p), p) for p in found]
    narrowest = min(spans, key=lambda s: s[0])[1]
    for number, places in enumerate(found):
        side: Callable[[Sequence[float]], float] = min if number % 2 == 0 else max
        shift = side(narrowest) - side(places)
        places[:] = [x + shift for x in places]
    return [sum(sorted(xs)[1:3]) / 2 for xs in zip(*found, strict=True)]


def _conflicts(layers: Sequence[Sequence[int]], above: list[list[int]], nodes: int) -> set[tuple[int, int]]:
    """Edges that cross the inner part of a long one, which is to stay straight: pairs of (upper, lower)."""
    found: set[tuple[int, int]] = set()
    for upper, lower in zip(layers, layers[1:], strict=False):
        place = {v: i for i, v in enumerate(upper)}
        first = scanned = 0
        for i, vertex in enumerate(lower):
            inner = next((u for u in above[vertex] if u >= nodes), None) if vertex >= nodes else None
            if inner is None and i < len(lower) - 1:
                continue
            last = len(upper) if inner is None else place[inner]
            for other in lower[scanned : i + 1]:
                found.update(
                    (u, other) for u in above[other]
                    if not first <= place[u] <= last and not (u >= nodes and other >= nodes)
                )  # fmt: skip
            scanned, first = i + 1, last
    return found


def _aligned(
    layers: Sequence[Sequence[int]], neighbours: list[list[int]], conflicts: set[tuple[int, int]], count: int
) -> list[int]:
    """The root of the block of each vertex: blocks are chains of medians, and no two of them cross."""
    root, taken = list(range(count)), set[int]()
    place: dict[int, int] = {}
    for layer in layers:
        reached = -1
        for vertex in layer:
            near = sorted((u for u in neighbours[vertex] if u in place), key=lambda u: place[u])
            if not near:
                continue
            for u in dict.fromkeys((near[(len(near) - 1) // 2], near[len(near) // 2])):
                crossing = (u, vertex) in conflicts or (vertex, u) in conflicts
                if u not in taken and place[u] > reached and not crossing:
                    root[vertex], reached = root[u], place[u]
                    taken.add(u)
                    break
        place = {v: i for i, v in enumerate(layer)}
    return root


def _compacted(layers: Sequence[Sequence[int]], root: list[int], widths: list[float], gap: float) -> list[float]:
    """Places of vertices, equal within a block: as far left as neighbours allow, then right towards neighbours."""
    apart: dict[int, dict[int, float]] = {r: {} for r in root}
    behind: dict[int, dict[int, float]] = {r: {} for r in root}
    for layer in layers:
        for u, v in zip(layer, layer[1:], strict=False):
            a, b = root[u], root[v]
            distance = (widths[u] + widths[v]) / 2 + gap
            apart[b][a] = max(distance, apart[b].get(a, 0.0))
            behind[a][b] = apart[b][a]
    order = _topological(apart, behind)
    place: dict[int, float] = {}
    for block in order:
        place[block] = max((place[a] + d for a, d in apart[block].items()), default=0.0)
    for block in reversed(order):
        if behind[block]:
            place[block] = max(place[block], min(place[b] - d for b, d in behind[block].items()))
    return [place[r] for r in root]


def _topological(before: dict[int, dict[int, float]], after: dict[int, dict[int, float]]) -> list[int]:
    waiting = {block: len(others) for block, others in before.items()}
    order = [block for block, count in waiting.items() if not count]
    for block in order:
        for other in after[block]:
            waiting[other] -= 1
            if not waiting[other]:
                order.append(other)
    return order


# ── the drawing ──────────────────────────────────────────────────────────────────────────────────────────────────


def _placed(
    sizes: Sequence[tuple[float, float]], edges: Sequence[tuple[int, int]], levels: list[int],
    layers: list[list[int]], chains: list[list[int]], across: list[float], gap: float,
) -> Layout:  # fmt: skip
    heights = [max((sizes[v][1] for v in layer if v < len(sizes)), default=0.0) for layer in layers]
    tops, y = [], 0.0
    for height in heights:
        tops.append(y)
        y += height + gap
    left = min(across[n] - w / 2 for n, (w, _) in enumerate(sizes))
    left = min(left, *(across[v] - _BEND_WIDTH / 2 for layer in layers for v in layer))
    x = [a - left for a in across]
    right = max(x[n] + w / 2 for n, (w, _) in enumerate(sizes))
    width = max(right, *(x[v] + _BEND_WIDTH / 2 for layer in layers for v in layer))
    centres = [(x[n], tops[levels[n]] + heights[levels[n]] / 2) for n in range(len(sizes))]
    entries = _entries(sizes, edges, chains, x)
    routes = []
    for number, (a, b) in enumerate(edges):
        points = [(x[a], centres[a][1] + sizes[a][1] / 2)]
        for step, vertex in enumerate(chains[number][1:-1], start=levels[a] + 1):
            points += [(x[vertex], tops[step]), (x[vertex], tops[step] + heights[step])]
        routes.append([*points, (entries[number], centres[b][1] - sizes[b][1] / 2)])
    return Layout(width, y - gap, centres, routes)


def _entries(
    sizes: Sequence[tuple[float, float]], edges: Sequence[tuple[int, int]], chains: list[list[int]], x: list[float]
) -> list[float]:
    """Where each edge ends on top of its node: side by side, in the order in which they come."""
    coming: dict[int, list[tuple[float, int]]] = {}
    for number, (a, b) in enumerate(edges):
        last = chains[number][-2] if len(chains[number]) > 1 else a
        coming.setdefault(b, []).append((x[last], number))
    found = [0.0] * len(edges)
    for node, its in coming.items():
        step = min(18.0, 0.7 * sizes[node][0] / len(its))
        for i, (_, number) in enumerate(sorted(its)):
            found[number] = x[node] + (i - (len(its) - 1) / 2) * step
    return found


__all__ = ["Layout", "layout"]
