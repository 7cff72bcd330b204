"""Equations between terms, written out: what the table of classes says with numbers, as trees over named variables."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Union

from taso.rules.generator.universe import Universe


@dataclass(frozen=True)
class Node:
    """Output `port` of a template (by its number in the space) applied to operands."""

    template: int
    port: int
    operands: tuple[Tree, ...]


Tree = Union[int, Node]
"""A variable, by its number in the space, or an operator."""


@dataclass(frozen=True)
class Equation:
    """left = right: `left` is what the enumeration met later, `right` the simpler form."""

    left: Tree
    right: Tree

    @property
    def size(self) -> int:
        """Operators of the larger side."""
        return max(len(operators(side)) for side in (self.left, self.right))

    @cached_property
    def ways(self) -> tuple[tuple[Node, Tree], ...]:
        """The directions in which it rewrites: from an operator, to what holds no further variables."""
        both = (self.left, self.right), (self.right, self.left)
        return tuple((a, b) for a, b in both if isinstance(a, Node) and set(variables(b)) <= set(variables(a)))


def operators(*trees: Tree) -> list[tuple[int, tuple[Tree, ...]]]:
    """The distinct operators of some trees, operands first."""
    found: dict[tuple[int, tuple[Tree, ...]], None] = {}

    def visit(tree: Tree) -> None:
        if isinstance(tree, Node) and (tree.template, tree.operands) not in found:
            for operand in tree.operands:
                visit(operand)
            found[tree.template, tree.operands] = None

    for tree in trees:
        visit(tree)
    return list(found)


def variables(tree: Tree) -> Iterator[int]:
    """The variables as they occur, from left to right."""
    if isinstance(tree, int):
        yield tree
    else:
        for operand in tree.operands:
            yield from variables(operand)


class Writer:
    """Writes out the representatives of a universe's classes."""

    def __init__(self, universe: Universe) -> None:
        self._numbers = {t.name: i for i, t in enumerate(universe.space.templates)}
        self._symbols = universe.symbols
        self._parts = [universe.column(name) for name in ("symbol", "left", "right")]
        self._made: dict[int, Tree] = {}

    def of_class(self, number: int) -> Tree:
        """The representative of a class."""
        if number not in self._made:
            symbol, left, right = (int(p[number]) for p in self._parts)
            self._made[number] = number if symbol < 0 else self.of_term(symbol, left, right)
        return self._made[number]

    def of_term(self, symbol: int, left: int, right: int) -> Tree:
        """A term over classes."""
        template, port = self._symbols[symbol]
        operands = tuple(self.of_class(c) for c in (left, right)[: template.arity])
        return Node(self._numbers[template.name], port, operands)
