"""The equations of a space that the table of its classes does not derive from one another."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from taso.rules.generator.equations import Equation, Tree, Writer
from taso.rules.generator.levels import Stage
from taso.rules.generator.pruning import Level, Way
from taso.rules.generator.universe import Ids, Universe

Holds = Callable[[Equation], bool]
"""Whether an equation that holds on the tensors of a space may hold on others."""


def find_equations(universe: Universe, stages: Sequence[Stage], holds: Holds) -> list[Equation]:
    """All sizes in turn: what the equations kept so far do not explain is the next equation.

    Equations that do not hold elsewhere are left out and explain nothing.
    """
    found: list[Equation] = []
    for stage in stages:
        found.extend(_unexplained(universe, stage, found, holds))
    return found


def _unexplained(universe: Universe, stage: Stage, known: Sequence[Equation], holds: Holds) -> list[Equation]:
    """Equations that join all that is apart, the most general first."""
    level = Level(universe, stage.members, stage.rows, stage.lower)
    writer, by_symbol = Writer(universe), dict[int, list[Way]]()

    def use(equation: Equation) -> None:
        ways = level.ways(equation)
        for way in ways:
            by_symbol.setdefault(way.symbol, []).append(way)
        level.apply(ways, level.apart())

    for equation in known:
        use(equation)
    fresh: list[Equation] = []
    for row in _apart(level, _generality(universe, stage)):
        if level.explained(row, by_symbol):
            continue
        equation = _equation(writer, level, row)
        if not holds(equation):
            level.refuse(row)
            continue
        fresh.append(equation)
        use(equation)
        level.join(row)
    return fresh


def _apart(level: Level, ranked: Ids) -> Iterator[int]:
    """The rows of `ranked` that are apart when their turn comes."""
    place = 0
    while place < len(ranked):
        apart = np.zeros(len(ranked), bool)
        apart[level.apart()] = True
        waiting = np.flatnonzero(apart[ranked[place:]])
        if not len(waiting):
            return
        place += int(waiting[0])
        yield int(ranked[place])
        place += 1


def _equation(writer: Writer, level: Level, row: int) -> Equation:
    smaller, other = level.first_form(row)
    terms = level.rows.terms

    def term(i: int) -> Tree:
        return writer.of_term(int(terms.symbol[i]), int(terms.left[i]), int(terms.right[i]))

    return Equation(term(row), writer.of_class(other) if smaller else term(other))


def _generality(universe: Universe, stage: Stage) -> Ids:
    """The rows in the order in which they are asked: fewest repeated variables first, then the least nested."""
    count = len(universe) + 1
    leaves, depth, used = (np.zeros(count, np.int64) for _ in range(3))
    left, right, symbol = (universe.column(n) for n in ("left", "right", "symbol"))
    for number in range(len(universe)):
        if symbol[number] < 0:
            leaves[number], used[number] = 1, 1 << number
        else:
            a, b = left[number], right[number]
            leaves[number], used[number] = leaves[a] + leaves[b], used[a] | used[b]
            depth[number] = 1 + max(depth[a], depth[b])
    terms = stage.rows.terms
    total = leaves[terms.left] + leaves[terms.right]
    bits = used[terms.left] | used[terms.right]
    distinct = np.array([int(b).bit_count() for b in bits], np.int64)
    deepest = np.maximum(depth[terms.left], depth[terms.right])
    return np.lexsort((universe.keys(terms), total, deepest, total - distinct))
