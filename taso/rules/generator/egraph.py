"""Equality saturation on a few small graphs: whether one equation follows from others.

Every class carries the value that its terms have on concrete tensors, and only classes of equal values are joined, so
that an equation used outside of the sizes for which it holds proves nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from taso.rules.generator.arithmetic import Values, fingerprints
from taso.rules.generator.equations import Equation, Node, Tree, variables
from taso.rules.generator.templates import Template

_Key = tuple[int, int, tuple[int, ...]]


@dataclass(frozen=True)
class Limits:
    """When the search for a derivation ends: rounds of applying all equations, and terms that may be made."""

    rounds: int = 4
    terms: int = 400


LIMITS = Limits()


class EGraph:
    """Terms over classes that are joined as they are found to be equal."""

    def __init__(self, templates: Sequence[Template], inputs: Mapping[int, Values]) -> None:
        self._templates, self._inputs = templates, inputs
        self._parent: list[int] = []
        self._value: list[Values] = []
        self._print: list[int] = []
        self._terms: list[dict[_Key, None]] = []
        self._users: list[dict[_Key, int]] = []
        self._known: dict[_Key, int] = {}
        self._by_root: dict[tuple[int, int], dict[_Key, None]] = {}
        self._variables: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._known)

    def find(self, number: int) -> int:
        while self._parent[number] != number:
            self._parent[number] = self._parent[self._parent[number]]
            number = self._parent[number]
        return number

    def add(self, tree: Tree, bound: Mapping[int, int] | None = None) -> int | None:
        """The class of a tree, its variables standing for classes; None where an operator refuses its operands."""
        if isinstance(tree, int):
            return self._variable(tree) if bound is None else self.find(bound[tree])
        operands = []
        for operand in tree.operands:
            number = self.add(operand, bound)
            if number is None:
                return None
            operands.append(number)
        return self._term(tree.template, tree.port, tuple(operands))

    def holds(self, tree: Tree) -> int | None:
        """The class of a tree, None where the graph does not hold it."""
        if isinstance(tree, int):
            return self.find(self._variables[tree]) if tree in self._variables else None
        operands = tuple(o for o in map(self.holds, tree.operands) if o is not None)
        if len(operands) < len(tree.operands):
            return None
        number = self._known.get(self._canonical((tree.template, tree.port, operands)))
        return None if number is None else self.find(number)

    def _variable(self, variable: int) -> int:
        if variable not in self._variables:
            self._variables[variable] = self._new(self._inputs[variable])
        return self.find(self._variables[variable])

    def _new(self, value: Values) -> int:
        self._parent.append(len(self._parent))
        self._value.append(value)
        self._print.append(int(fingerprints(value)[0]))
        self._terms.append({})
        self._users.append({})
        return len(self._parent) - 1

    def _term(self, template: int, port: int, operands: tuple[int, ...]) -> int | None:
        key = self._canonical((template, port, operands))
        if key in self._known:
            return self.find(self._known[key])
        made = self._templates[template]
        values = [self._value[o] for o in key[2]]
        if made.shape(*(v.shape[1:] for v in values)) is None:
            return None
        number = self._new(made.value(*values)[port])
        self._known[key] = number
        self._terms[number][key] = None
        self._by_root.setdefault(key[:2], {})[key] = None
        for operand in key[2]:
            self._users[operand][key] = number
        return number

    def _canonical(self, key: _Key) -> _Key:
        template, port, operands = key
        found = tuple(map(self.find, operands))
        return template, port, tuple(sorted(found)) if self._templates[template].commutative else found

    def join(self, a: int, b: int) -> bool:
        """Makes two classes one where they have the same value, and all that follows; whether anything changed."""
        waiting, changed = [(a, b)], False
        while waiting:
            kept, gone = map(self.find, waiting.pop())
            if kept == gone or self._print[kept] != self._print[gone]:
                continue
            changed = True
            self._parent[gone] = kept
            self._terms[kept].update(self._terms[gone])
            for key, number in list(self._users[gone].items()):
                self._known.pop(key, None)
                self._by_root[key[:2]].pop(key, None)
                owner = self.find(number)
                self._terms[owner].pop(key, None)
                moved = self._canonical(key)
                if moved in self._known:
                    waiting.append((self._known[moved], owner))
                self._known[moved] = owner
                self._by_root[moved[:2]][moved] = None
                self._terms[self.find(owner)][moved] = None
                for operand in moved[2]:
                    self._users[operand].pop(key, None)
                    self._users[operand][moved] = owner
        return changed

    def matches(self, pattern: Node) -> Iterator[tuple[int, dict[int, int]]]:
        """Classes that hold a match of the pattern, with what its variables stand for."""
        for key in list(self._by_root.get((pattern.template, pattern.port), ())):
            number = self._known.get(key)
            if number is not None:
                for bound in self._operands(pattern, key, {}):
                    yield self.find(number), bound

    def _operands(self, pattern: Node, key: _Key, bound: dict[int, int]) -> Iterator[dict[int, int]]:
        yield from self._each(pattern.operands, key[2], bound)
        if self._templates[pattern.template].commutative and key[2][0] != key[2][1]:
            yield from self._each(pattern.operands, key[2][::-1], bound)

    def _each(
        self, patterns: Sequence[Tree], classes: Sequence[int], bound: dict[int, int]
    ) -> Iterator[dict[int, int]]:
        if not patterns:
            yield bound
            return
        for first in self._at(patterns[0], self.find(classes[0]), bound):
            yield from self._each(patterns[1:], classes[1:], first)

    def _at(self, pattern: Tree, number: int, bound: dict[int, int]) -> Iterator[dict[int, int]]:
        if isinstance(pattern, int):
            if pattern not in bound:
                yield bound | {pattern: number}
            elif self.find(bound[pattern]) == number:
                yield bound
            return
        for key in list(self._terms[number]):
            if key[:2] == (pattern.template, pattern.port):
                yield from self._operands(pattern, key, bound)


def cancels(equation: Equation, templates: Sequence[Template], inputs: Mapping[int, Values]) -> bool:
    """Whether an equation holds only because something is taken away again: see `Template.undone`."""
    without = [t if t.undone is None else replace(t, value=t.undone) for t in templates]
    left, right = (evaluated(side, without, inputs) for side in (equation.left, equation.right))
    return not np.array_equal(left, right)


def evaluated(tree: Tree, templates: Sequence[Template], inputs: Mapping[int, Values]) -> Values:
    """The value of a tree on these tensors."""
    if isinstance(tree, int):
        return inputs[tree]
    operands = [evaluated(operand, templates, inputs) for operand in tree.operands]
    return templates[tree.template].value(*operands)[tree.port]


def saturate(graph: EGraph, ways: Sequence[tuple[Node, Tree]], limits: Limits, done: Callable[[], bool]) -> None:
    """Applies rewritings, (pattern, replacement) each, round after round until `done`, nothing new, or the limits."""
    for _ in range(limits.rounds):
        if done():
            return
        changed = False
        found = [(target, number, bound) for source, target in ways for number, bound in graph.matches(source)]
        for target, number, bound in found:
            if len(graph) > limits.terms:
                return
            made = graph.add(target, bound)
            changed |= made is not None and graph.join(number, made)
        if not changed:
            return


def follows(graph: EGraph, goals: Sequence[tuple[int, int]], equations: Sequence[Equation], limits: Limits) -> bool:
    """Whether pairs of classes become one by applying equations within limits."""

    def reached() -> bool:
        return all(graph.find(a) == graph.find(b) for a, b in goals)

    saturate(graph, [way for e in equations for way in e.ways], limits, reached)
    return reached()


def minimal(
    equations: Sequence[Equation], templates: Sequence[Template], inputs: Mapping[int, Values], limits: Limits
) -> list[Equation]:
    """Those of some equations that do not follow from the others, the last and largest given up first.

    One follows where rewriting leads from each of its sides to the other, so that nothing that equations could do to a
    graph is lost.
    """
    order = sorted(range(len(equations)), key=lambda i: (_repeats(equations[i]), equations[i].size, i), reverse=True)
    ways = [e.ways for e in equations]
    gone: set[int] = set()
    for place in order:
        others = [way for i, w in enumerate(ways) if i != place and i not in gone for way in w]
        if all(_leads(source, target, templates, inputs, others, limits) for source, target in ways[place]):
            gone.add(place)
    return [e for i, e in enumerate(equations) if i not in gone]


def _leads(
    source: Tree, target: Tree, templates: Sequence[Template], inputs: Mapping[int, Values],
    ways: Sequence[tuple[Node, Tree]], limits: Limits,
) -> bool:  # fmt: skip
    graph = EGraph(templates, inputs)
    start = graph.add(source)

    def reached() -> bool:
        return start is not None and graph.holds(target) == graph.find(start)

    saturate(graph, ways, limits, reached)
    return reached()


def _repeats(equation: Equation) -> int:
    used = list(variables(equation.left))
    return len(used) - len(set(used))


def values_of(variables: Sequence[tuple[str, tuple[int, ...]]], seed: int = 100) -> dict[int, Values]:
    """Random values of a space's variables."""
    rng = np.random.default_rng(seed)
    return {i: rng.integers(1, 1 << 20, (1, *shape), np.int64) for i, (_, shape) in enumerate(variables)}
