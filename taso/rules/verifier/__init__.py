"""The gates that a rule passes: trials, a proof for every size, and, where that does not reach, all small sizes.

A rule is `proved` for every size, shape and setting that its conditions admit. The definitions of the operators
themselves, type rules and meanings alike, are run on sizes and settings that are unknown (`cases`); each comparison
that is not settled parts the run in two, so that all ways through them are taken. On each way what the source's type
rules and the rule's conditions ask is assumed (`facts`), that the target has the same types is proved, and an element
at a free index of each output is written down by composing the meanings (`elements`) and brought into a normal form
(`terms`, `simplify`). The rule holds where both sides have the same one.

What is assumed throughout: sizes are at least 1; numbers are real, so that sums may be taken in any order; what is
divided by is not 0 (where it is, both sides are undefined); scalar functions are functions, and what `elements` says of
a few of them.

The trials (`taso.rules.tester`) and the small sizes (`bounded`) share neither code nor assumptions with the proof but
for the definitions: each of the three can refuse a rule.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable
from concurrent.futures import Executor
from dataclasses import replace
from functools import partial

# operators that rule files may speak of besides ONNX's: they are known once these are loaded
from taso.rules import algorithms as algorithms
from taso.rules import primitives as primitives
from taso.rules.pattern import Certificate, Rule, Status
from taso.rules.tester import TRIALS, test_rule
from taso.rules.text import show_rule
from taso.rules.verifier.bounded import Exhaustion, exhaust
from taso.rules.verifier.proof import Proof, prove
from taso.rules.verifier.small import MOST_DIMENSIONS

SECONDS = 60.0
"""Time allowed for the proof of a rule; it is only ever a way out, and no proof needs all of it."""


def verify(
    rule: Rule, *, seconds: float = SECONDS, trials: int = TRIALS, seed: int = 0, both: bool = True,
    small: bool = True,
) -> Rule:  # fmt: skip
    """`rule` with the status that its gates give it: trials modulo primes, a proof, and all small sizes.

    A counterexample refutes whatever the other gates say. What is not proved within `seconds` is looked at on all small
    sizes (unless `small` is off), within `seconds` again; what holds there is `bounded`. Else it keeps the verdict of
    the trials, and its certificate says why there is no more. Only the time can make two runs differ. With `both` off,
    what is proved is not tried as well.
    """
    proof = None if both else prove(rule, seconds)
    if proof is None or not proof.done:
        tested = test_rule(rule, trials=trials, seed=seed)
        if tested.status is Status.REFUTED:
            return tested.judged(Status.REFUTED, replace(tested.certificate, command=command(rule)))
        proof = proof or prove(rule, seconds)
        if not proof.done:
            return _not_proved(tested, proof, exhaust(rule, seconds) if small else None)
    return rule.judged(Status.PROVED, _certificate(rule, proof))


def _not_proved(tested: Rule, proof: Proof, found: Exhaustion | None) -> Rule:
    certificate = replace(tested.certificate, command=command(tested))
    reasons = [tested.certificate.reason, f"not proved: {proof.reason}"]
    if found is None:
        return tested.judged(tested.status, replace(certificate, reason=_joined(reasons)))
    if found.counterexample:
        method = f"polynomial identity over symbolic elements, {found.extent}"
        return tested.judged(
            Status.REFUTED, Certificate(method, command(tested), counterexample=found.counterexample)
        )
    if found.done:
        method = f"polynomial identity over symbolic elements, {found.extent}"
        found_so = Certificate(method, command(tested), reason=_joined(reasons), dimensions=MOST_DIMENSIONS)
        return tested.judged(Status.BOUNDED, found_so)
    reasons.append(f"not found to hold on small sizes: {found.reason}")
    return tested.judged(tested.status, replace(certificate, reason=_joined(reasons)))


def _joined(reasons: Iterable[str]) -> str:
    return "; ".join(reason for reason in reasons if reason)


def verify_rules(
    rules: Iterable[Rule], *, seconds: float = SECONDS, trials: int = TRIALS, seed: int = 0, both: bool = True,
    small: bool = True, executor: Executor | None = None,
) -> list[Rule]:  # fmt: skip
    """`verify` of each, in order; `executor` spreads them over processes."""
    gate = partial(verify, seconds=seconds, trials=trials, seed=seed, both=both, small=small)
    return list(map(gate, rules) if executor is None else executor.map(gate, rules))


def command(rule: Rule) -> str:
    """The command that judges the rule again: by its file and name, or, where it comes from none, by its equation."""
    file, _, number = rule.origin.partition("#")
    if not file:
        return f"taso rules verify {shlex.quote(' '.join(show_rule(replace(rule, id='')).split()))}"
    return f"taso rules verify {shlex.quote(file)} --rule {shlex.quote(rule.id or number or rule.name)}"


def _certificate(rule: Rule, proof: Proof) -> Certificate:
    cases = f"{proof.cases} case{'s' if proof.cases != 1 else ''}"
    method = (
        f"both sides have the same elements in index notation, all sizes ≥ 1 and numeric settings symbolic, variables "
        f"of up to {proof.dimensions} dimensions, in {cases} of ranks and settings"
    )
    return Certificate(method, command(rule), dimensions=proof.dimensions)


__all__ = ["SECONDS", "Exhaustion", "Proof", "command", "exhaust", "prove", "verify", "verify_rules"]
