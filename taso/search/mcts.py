"""Monte Carlo tree search (UCT: Kocsis and Szepesvári, "Bandit Based Monte-Carlo Planning", ECML 2006) over states.

The moves are those of the backtracking. Where that drops a graph that is dearer than α times the best, this one keeps
it in a tree and comes back to it as often as what was found below it is promising. Chance is drawn from a seed: the
same seed and costs give the same result.
"""

from __future__ import annotations

import heapq
import math
import random
from dataclasses import dataclass, field

from taso.rules.matcher import Matcher
from taso.search.moves import IMPROVEMENT, Candidate, Limits, Moves, Outcome, Position, Progress
from taso.search.state import State

EXPLORATION = 0.4
"""How much a branch that was rarely visited is preferred; 0 follows the best known one alone."""
WIDTH = 48
"""Rewrites of a state that are kept, the cheapest first."""
PATIENCE = 3
"""Steps of a playout in a row that may leave the cost as it is or raise it."""
GREED = 0.8
"""How often the cheapest rewrite is tried next; otherwise any other of those kept is."""


@dataclass
class Branch:
    """A state in the tree: rewrites not tried yet, states reached by those tried, and the costs found below."""

    position: Position
    parent: Branch | None
    untried: list[Candidate]
    children: list[Branch] = field(default_factory=list)
    visits: int = 0
    total: float = 0.0
    best: float = math.inf
    done: bool = False

    def wide(self) -> bool:
        """Whether as many rewrites were tried as its visits deserve (progressive widening)."""
        return not self.untried or len(self.children) > math.sqrt(self.visits)


class TreeSearch(Moves):
    """One run of the search. `verify` recomputes everything after each step and compares (for tests)."""

    name = "mcts"

    def __init__(
        self, initial: State, matcher: Matcher, limits: Limits, progress: Progress | None = None, verify: bool = False,
        earlier: Outcome | None = None, seed: int = 0,
    ) -> None:  # fmt: skip
        super().__init__(initial, matcher, limits, progress, verify, earlier)
        self._chance = random.Random(seed)
        self._dearest = -math.inf
        self._playouts = 0
        self._deepest = 0

    def run(self) -> Outcome:
        """Plays until the tree, the budget or the time is used up, or Ctrl-C: the best so far comes back."""
        self.best = self._start()
        self._note(self.best)
        with self._stopping():
            if not self._spent():
                root = self._branch(self.best, None)
                while not root.done and not self._spent():
                    self._play(self._selected(root))
        self.statistics.details.update(playouts=self._playouts, deepest=self._deepest)
        return self._outcome(self.best)

    def _branch(self, position: Position, parent: Branch | None) -> Branch:
        """A state with its cheapest rewrites that lead somewhere new; what is kept counts as seen."""
        self.statistics.expanded += 1
        self._dearest = max(self._dearest, position.state.cost)
        # all rewrites of the parent were looked at before one of them was taken
        position.complete()
        found: dict[tuple[int, int], Candidate] = {}
        for key in position.keys:
            if self._late():
                break
            candidate = self._candidate(position, key)
            if candidate is not None:
                found.setdefault(candidate.known_as, candidate)
        kept = heapq.nsmallest(WIDTH, found.values())
        self._seen.update(c.known_as for c in kept)
        return Branch(position, parent, kept, done=not kept)

    def _selected(self, root: Branch) -> Branch:
        """The branch to grow next: down from the root to the first that deserves another rewrite."""
        branch = root
        while branch.wide():
            going_on = [b for b in branch.children if not b.done]
            if not going_on:
                break
            branch = max(going_on, key=self._promise)
        return branch

    def _promise(self, branch: Branch) -> tuple[float, int]:
        """The upper confidence bound of a branch; its fingerprint breaks ties."""
        above = branch.parent.visits if branch.parent is not None else branch.visits
        mean = branch.total / max(branch.visits, 1)
        worth = (self._reward(branch.best) + self._reward(mean)) / 2
        bound = EXPLORATION * math.sqrt(math.log(above + 1) / max(branch.visits, 1))
        return worth + bound, branch.position.state.fingerprint

    def _reward(self, cost: float) -> float:
        """1 for the best cost known, 0 for the dearest state of the tree."""
        best = self.best.state.cost
        return (self._dearest - cost) / max(self._dearest - best, IMPROVEMENT)

    def _play(self, branch: Branch) -> None:
        """Grows the tree by one branch of steps, until nothing is left to do or several in a row lead nowhere."""
        self._playouts += 1
        waiting, least = PATIENCE, math.inf
        while waiting and branch.untried and not self._spent():
            reached = self._take(self._drawn(branch))
            if reached is None:
                continue
            if reached.state.cost < self.best.state.cost - IMPROVEMENT:
                self.best = reached
                self._note(reached)
            child = self._branch(reached, branch)
            branch.children.append(child)
            branch = child
            waiting = PATIENCE if reached.state.cost < least - IMPROVEMENT else waiting - 1
            least = min(least, reached.state.cost)
        self._deepest = max(self._deepest, len(branch.position.path))
        self._learn(branch, min(least, branch.position.state.cost))

    def _drawn(self, branch: Branch) -> Candidate:
        """A rewrite to try next, mostly the cheapest, taken off the list."""
        greedy = len(branch.untried) == 1 or self._chance.random() < GREED
        return branch.untried.pop(0 if greedy else self._chance.randrange(1, len(branch.untried)))

    def _learn(self, branch: Branch, cost: float) -> None:
        """Tells all branches above what a playout came to, and closes those that have nothing left."""
        above: Branch | None = branch
        while above is not None:
            above.visits += 1
            above.total += cost
            above.best = min(above.best, cost)
            above.done = not above.untried and all(b.done for b in above.children)
            above = above.parent


def search_tree(
    initial: State, matcher: Matcher, limits: Limits, progress: Progress | None = None, verify: bool = False,
    earlier: Outcome | None = None, seed: int = 0,
) -> Outcome:  # fmt: skip
    """The best state that the tree search finds from `initial`, or from the best of `earlier`.

    `limits.budget` bounds the states in the tree; α has no say. Raises `SearchError` for limits that make no sense.
    """
    return TreeSearch(initial, matcher, limits, progress, verify, earlier, seed).run()


__all__ = ["TreeSearch", "search_tree"]
