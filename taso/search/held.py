"""What a state holds in memory: its kernels in an order to run them in, and the bytes that are in use meanwhile.

The order of a state that a rewrite leads to is its parent's with the new kernels put in, which takes no search; where
that is not good enough, `Memory.improved` looks for a better one. A state's graph is written in this order, so that
a program of it needs no more than is said here.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Union

from taso.backends.lowering import Group
from taso.backends.ordering import Course, Lie, Schedule, Work, asked_for, work_of
from taso.search.state import Draft, Setting, State, is_costed

Kernels = Mapping[tuple[int, ...], Group[int, int]]
"""Kernels by their nodes."""
View = Union[State, Draft]


@dataclass(frozen=True)
class Held:
    """Kernels in an order, and the most bytes in use during each of them, at last those of the outputs."""

    groups: tuple[Group[int, int], ...]
    most: tuple[int, ...]

    @property
    def peak(self) -> int:
        """Bytes in use at most."""
        return max(self.most)

    @property
    def crests(self) -> list[int]:
        """Bytes in use at each height from which they fall again."""
        padded = (-1, *self.most, -1)
        return [now for before, now, after in zip(padded, self.most, padded[2:], strict=False) if before < now >= after]

    @property
    def rank(self) -> tuple[int, int]:
        """The peak, and how often it is reached: what is lower is better."""
        peak = self.peak
        return peak, self.crests.count(peak)

    def excess(self, limit: int) -> int:
        """Bytes beyond a limit, summed over crests."""
        return sum(max(crest - limit, 0) for crest in self.crests)


class Memory:
    """The memory of the states of one search."""

    def __init__(self, setting: Setting) -> None:
        self._setting = setting
        self._works: dict[tuple[tuple[int, ...], tuple[int, ...], Hashable], Work[int]] = {}

    def of(self, state: State) -> Held:
        """That of a state of which nothing is known: in its own order, or in the one found to need the least."""
        place = {node: i for i, node in enumerate(state.ordered())}
        groups = sorted(_kernels(state).values(), key=lambda g: place[g.last])
        return self.improved(self._held(state, groups), state)

    def after(self, before: Held, view: View) -> Held:
        """That of a state which differs little from one with that `before`."""
        kernels = _kernels(view) if isinstance(view, State) else _redrawn(before, view)
        orders = _Orders(before.groups, kernels, lambda group: self._work(view, group))
        late = orders.put_in(eagerly=False)
        found = self._held(view, late)
        if found.rank < before.rank:
            return found
        early = orders.put_in(eagerly=True)
        return found if early == late else min(found, self._held(view, early), key=lambda held: held.rank)

    def improved(self, held: Held, state: State, below: int | None = None) -> Held:
        """The same kernels in an order that needs less, where one is found; only if it stays `below` so many bytes."""
        schedule = Schedule([self._work(state, g) for g in held.groups], self._outputs(state))
        order = schedule.lowest(below)
        if order is None:
            return held
        other = self._held(state, [held.groups[i] for i in order])
        return other if other.rank < held.rank else held

    def crowd(self, held: Held, state: State, at_least: int) -> set[int]:
        """Values that lie in memory while so many bytes or more are in use."""
        return self._course(state, held.groups).held(at_least)

    def nodes(self, held: Held, state: State) -> tuple[int, ...]:
        """All nodes of a state in an order in which its kernels run so."""
        sources = [n for n in state.ordered() if not is_costed(state, n)]
        return (*sources, *(n for g in held.groups for n in g.nodes))

    def _held(self, view: View, groups: Sequence[Group[int, int]]) -> Held:
        return Held(tuple(groups), tuple(self._course(view, groups).most))

    def _course(self, view: View, groups: Iterable[Group[int, int]]) -> Course[int]:
        return Course([self._work(view, g) for g in groups], self._outputs(view))

    def _work(self, view: View, group: Group[int, int]) -> Work[int]:
        results = view.outputs(group.last)
        lowering = self._setting.lowering
        key = (group.nodes, results, lowering.beside(view, group))
        found = self._works.get(key)
        if found is None:
            kernel, operands = lowering.kernel(view, group)
            found = self._works[key] = work_of(
                kernel, operands, results[: len(kernel.results)], view.layout, lowering
            )  # fmt: skip
        return found

    def _outputs(self, view: View) -> list[tuple[Lie[int], int]]:
        lowering, outputs = self._setting.lowering, view.graph_outputs
        return [asked_for(v, view.type(v), view.layout(v), lowering) for v in outputs if not view.is_constant(v)]


def _kernels(state: State) -> Kernels:
    groups = (state.group_of(anchor) for anchor in state.kernel_costs)
    return {group.nodes: group for group in groups}


def _redrawn(before: Held, draft: Draft) -> Kernels:
    """The kernels of a draft, of whose parent those `before` are."""
    gone, fresh = draft.regrouped()
    kept = {g.nodes: g for g in before.groups if g.anchor not in gone and g.anchor not in fresh}
    return {**kept, **{group.nodes: group for group in fresh.values()}}


class _Orders:
    """Orders of kernels, producers first, that keep the `old` one as far as its kernels are still there."""

    def __init__(
        self, old: Sequence[Group[int, int]], now: Kernels, work: Callable[[Group[int, int]], Work[int]]
    ) -> None:
        self._now = now
        known = {group.nodes for group in old}
        self._kept = [group.nodes for group in old if group.nodes in now]
        self._fresh = sorted(nodes for nodes in now if nodes not in known)
        works = {nodes: work(group) for nodes, group in now.items()}
        maker = {value: nodes for nodes, made in works.items() for (value, _), _ in made.makes}
        self._needed = {
            nodes: [maker[value] for (value, _), _ in made.reads if value in maker] for nodes, made in works.items()
        }
        self._fresh_readers: dict[tuple[int, ...], list[tuple[int, ...]]] = {}
        for nodes in self._fresh:
            for needed in self._needed[nodes]:
                self._fresh_readers.setdefault(needed, []).append(nodes)

    def put_in(self, eagerly: bool) -> list[Group[int, int]]:
        """New kernels just before somebody needs them, or `eagerly` as soon as they could run."""
        placed: dict[tuple[int, ...], None] = {}
        for nodes in (*self._kept, *self._fresh):
            stack = [nodes]
            while stack:
                at = stack[-1]
                missing = [n for n in self._needed[at] if n not in placed]
                if missing and at not in placed:
                    stack.extend(reversed(missing))
                    continue
                self._place(stack.pop(), placed, eagerly)
        return [self._now[nodes] for nodes in placed]

    def _place(self, nodes: tuple[int, ...], placed: dict[tuple[int, ...], None], eagerly: bool) -> None:
        waiting = [nodes]
        while waiting:
            at = waiting.pop(0)
            placed.setdefault(at)
            if eagerly:
                ready = (n for n in self._fresh_readers.get(at, ()) if n not in placed)
                waiting.extend(n for n in ready if all(needed in placed for needed in self._needed[n]))


__all__ = ["Held", "Memory"]
