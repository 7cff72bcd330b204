"""From a space to rules: enumerate, find what is equal, drop what follows from the rest, prove, and make general."""

from __future__ import annotations

import logging
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from taso.graph.errors import RuleError
from taso.rules.generator.egraph import LIMITS, Limits, cancels, minimal, values_of
from taso.rules.generator.equations import Equation, operators, variables
from taso.rules.generator.finding import find_equations
from taso.rules.generator.generality import distinct, generalised
from taso.rules.generator.levels import Counts, Enumeration
from taso.rules.generator.spelling import spelled
from taso.rules.generator.statement import rules, splitting
from taso.rules.generator.universe import Space
from taso.rules.pattern import Rule, Status
from taso.rules.tester import repairs, test_rule
from taso.rules.verifier import prove, verify

log = logging.getLogger(__name__)

_A = TypeVar("_A")
_B = TypeVar("_B")

SECONDS = 10.0
"""Time allowed for the proof of a rule."""

_REPAIRS, _FEW, _SOME = 2, 3, 8


@dataclass
class Generated:
    """What a space gave.

    `equations` hold on all sizes for which both sides have types and do not follow from one another; `refused` hold on
    the sizes of the space only, or were not proved. `fell` counts what each step gave up, `seconds` what it took.
    """

    space: Space
    counts: Counts
    rules: list[Rule] = field(default_factory=list)
    equations: list[Equation] = field(default_factory=list)
    refused: list[Equation] = field(default_factory=list)
    fell: dict[str, int] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)


def generate(
    space: Space, *, folder: Path | None = None, executor: Executor | None = None, limits: Limits = LIMITS,
    general: bool = True,
) -> Generated:  # fmt: skip
    """The proved rules of a space.

    `folder` keeps what was enumerated, so that a run that was killed goes on there; `executor` works on the pieces of
    the enumeration and on the proofs. Without `general`, rules keep the settings and ranks they were found with.
    """
    if folder is None:
        with tempfile.TemporaryDirectory(prefix="taso-rules-") as temporary:
            return _generate(space, Path(temporary), executor, limits, general)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RuleError(f"the folder {folder} cannot be made: {error.strerror or error}") from error
    return _generate(space, folder, executor, limits, general)


def _generate(space: Space, folder: Path, executor: Executor | None, limits: Limits, general: bool) -> Generated:
    enumeration = Enumeration(space, folder, executor)
    found = Generated(space, enumeration.counts)
    clock = _Clock(found.seconds)
    stages = list(enumeration.stages())
    clock.next("enumerated")
    log.info("%s: %d graphs, %d classes", space.name, found.counts.graphs, found.counts.classes)
    judge = _Judge(space, executor)
    equal = sum(len(s.rows) for s in stages)
    settled = False
    while not settled:
        equations = find_equations(enumeration.universe, stages, judge.plausible)
        clock.next("found")
        settled = judge.settle(equations)
        clock.next("proved")
    kept = minimal(equations, space.templates, values_of(space.variables), limits)
    clock.next("pruned")
    log.info("%s: %d equations, %d of them independent", space.name, len(equations), len(kept))
    found.equations, found.refused = kept, list(judge.refused)
    found.fell = {
        "renaming": found.counts.renamings, "equal by smaller rules": equal - len(equations),
        "composition of others": len(equations) - len(kept), "not proved": len(judge.refused),
    }  # fmt: skip
    found.rules = _ordered(_mapped(_proved, [*judge.stated(kept), *judge.several(kept)], executor))
    found.rules = _ordered([*found.rules, *judge.repaired(limits)])
    clock.next("proved")
    if general:
        before = len(found.rules)
        wider = generalised(found.rules, map if executor is None else executor.map)
        found.rules = _ordered(_mapped(_settled, wider, executor))
        found.fell["the same once general"] = before - len(found.rules)
        clock.next("made general")
    return found


class _Clock:
    """Adds up the time between calls under names."""

    def __init__(self, seconds: dict[str, float]) -> None:
        self._seconds, self._last = seconds, time.perf_counter()

    def next(self, name: str) -> None:
        now = time.perf_counter()
        self._seconds[name] = self._seconds.get(name, 0.0) + now - self._last
        self._last = now


class _Judge:
    """Tries and proves equations; what is the same but for the names of its variables once.

    An equation whose statements are all trivial, as where an activation is only fused in TASO's format, holds by
    definition; one that cannot be stated as a rule is taken for false, and so is one that holds of numbers only.
    """

    def __init__(self, space: Space, executor: Executor | None) -> None:
        self._templates, self._executor = space.templates, executor
        self._inputs = values_of(space.variables)
        self._stated: dict[Equation, list[Rule]] = {}
        self._tried: dict[str, bool] = {}
        self._proved: dict[tuple[str, ...], bool] = {}
        self.refused: dict[Equation, None] = {}

    def plausible(self, equation: Equation) -> bool:
        """Whether an equation passes a few trials on other sizes, and was not refused before."""
        if equation not in self._stated:
            stated = [] if cancels(equation, self._templates, self._inputs) else rules(equation, self._templates, "")
            self._stated[equation] = stated
            if not any(rule.trivial or self._passes(rule) for rule in stated):
                self.refused[equation] = None
        return equation not in self.refused

    def _passes(self, rule: Rule) -> bool:
        name = spelled(rule)
        if name not in self._tried:
            self._tried[name] = test_rule(rule, trials=_FEW).status is not Status.REFUTED
        return self._tried[name]

    def settle(self, equations: Sequence[Equation]) -> bool:
        """Whether all equations are proved, each in one direction; those that are not are refused from now on."""
        names = {e: tuple(spelled(r) for r in self.stated([e])) for e in equations}
        fresh = {name: self.stated([e]) for e, name in names.items() if name not in self._proved}
        self._proved.update(zip(fresh, _mapped(_any_proved, list(fresh.values()), self._executor), strict=True))
        false = [e for e, name in names.items() if not self._proved[name]]
        self.refused.update(dict.fromkeys(false))
        return not false

    def stated(self, equations: Iterable[Equation]) -> list[Rule]:
        """The rules that equations stand for."""
        return [r for e in equations for r in self._stated[e] if not r.trivial]

    def several(self, equations: Iterable[Equation]) -> list[Rule]:
        """What equations say of several outputs at once."""
        return [r for e in equations if (r := splitting(e, self._templates, "")) is not None]

    def repaired(self, limits: Limits) -> list[Rule]:
        """What equations that are false as they stand say under one more condition.

        Of those that follow from one another the most general are asked: what these say holds for the others too.
        """
        false = minimal([e for e in self.refused if _linear(e)], self._templates, self._inputs, limits)
        refuted = distinct(self.stated(false))
        return [r for found in _mapped(_repaired, refuted, self._executor) for r in found]


def _linear(equation: Equation) -> bool:
    """Whether no variable is used twice on a side, and no constant: only then is one more condition worth a search."""
    sides = (equation.left, equation.right)
    used = [list(variables(side)) for side in sides]
    return all(len(set(u)) == len(u) for u in used) and all(o for side in sides for _, o in operators(side))


def _any_proved(stated: Sequence[Rule]) -> bool:
    """Whether one of some rules is proved; where there is none, both sides are one graph."""
    return not stated or any(prove(rule, SECONDS).done for rule in stated)


def _proved(rule: Rule) -> Rule:
    return verify(rule, seconds=SECONDS, both=False, small=False)


def _repaired(rule: Rule) -> list[Rule]:
    found: list[Rule] = []
    if test_rule(rule).status is not Status.REFUTED:
        return found
    for variant in repairs(rule, trials=_SOME):
        judged = _proved(variant)
        if judged.status is Status.PROVED:
            found.append(judged)
        if len(found) == _REPAIRS:
            break
    return found


def _mapped(work: Callable[[_A], _B], items: Sequence[_A], executor: Executor | None) -> list[_B]:
    return list(map(work, items) if executor is None else executor.map(work, items))


def _settled(rule: Rule) -> Rule:
    """A rule that was widened, proved for good: its proof is bounded in work, so that only a stopped machine fails."""
    return rule if rule.status is Status.PROVED else verify(rule, both=False, small=False)


def _ordered(rules: Iterable[Rule]) -> list[Rule]:
    """The proved rules, each statement once, the shortest first."""
    proved = distinct(r for r in rules if r.status is Status.PROVED)
    return sorted(proved, key=lambda r: (len(r.source) + len(r.target), len(r.name), r.name))
