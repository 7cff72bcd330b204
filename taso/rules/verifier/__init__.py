"""The gate that makes a rule `proved`: for every size, shape and setting that its conditions admit.

The definitions of the operators themselves, type rules and meanings alike, are run on sizes and settings that are
unknown (`cases`); each comparison that is not settled parts the run in two, so that all ways through them are taken.
On each way what the source's type rules and the rule's conditions ask is assumed (`facts`), that the target has the
same types is proved, and an element at a free index of each output is written down by composing the meanings
(`elements`) and brought into a normal form (`terms`, `simplify`). The rule holds where both sides have the same one.

What is assumed throughout: sizes are at least 1; numbers are real, so that sums may be taken in any order; what is
divided by is not 0 (where it is, both sides are undefined); scalar functions are functions, and what `elements` says of
a few of them.
"""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import Executor
from dataclasses import replace
from functools import partial

from taso.rules.pattern import Certificate, Rule, Status
from taso.rules.tester import TRIALS, test_rule
from taso.rules.verifier.proof import Proof, prove

SECONDS = 60.0
"""Time allowed for the proof of a rule; it is only ever a way out, and no proof needs all of it."""


def verify(
    rule: Rule, *, seconds: float = SECONDS, trials: int = TRIALS, seed: int = 0, both: bool = True
) -> Rule:  # fmt: skip
    """`rule` with the status that two independent gates give it: trials modulo primes, and a proof.

    A counterexample refutes whatever the proof says. What is not proved within `seconds` keeps the verdict of the
    trials, and its certificate says why there is no proof. Only the time can make two runs differ. With `both` off,
    what is proved is not tried as well.
    """
    proof = None if both else prove(rule, seconds)
    if proof is None or not proof.done:
        tested = test_rule(rule, trials=trials, seed=seed)
        proof = proof or (Proof(False) if tested.status is Status.REFUTED else prove(rule, seconds))
        if not proof.done:
            return _unproved(tested, proof)
    return rule.judged(Status.PROVED, _certificate(proof))


def _unproved(tested: Rule, proof: Proof) -> Rule:
    if tested.status is Status.REFUTED:
        return tested
    reason = "; ".join(text for text in (tested.certificate.reason, f"not proved: {proof.reason}") if text)
    return tested.judged(tested.status, replace(tested.certificate, reason=reason))


def verify_rules(
    rules: Iterable[Rule], *, seconds: float = SECONDS, trials: int = TRIALS, seed: int = 0, both: bool = True,
    executor: Executor | None = None,
) -> list[Rule]:  # fmt: skip
    """`verify` of each, in order; `executor` spreads them over processes."""
    gate = partial(verify, seconds=seconds, trials=trials, seed=seed, both=both)
    return list(map(gate, rules) if executor is None else executor.map(gate, rules))


def _certificate(proof: Proof) -> Certificate:
    cases = f"{proof.cases} case{'s' if proof.cases != 1 else ''}"
    method = (
        f"both sides have the same elements in index notation, all sizes ≥ 1 and numeric settings symbolic, variables "
        f"of up to {proof.dimensions} dimensions, in {cases} of ranks and settings"
    )
    return Certificate(method, "taso.rules.verifier.verify(rule)")


__all__ = ["SECONDS", "Proof", "prove", "verify", "verify_rules"]
