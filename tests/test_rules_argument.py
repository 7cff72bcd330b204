"""What `taso.optimize(rules=…)` takes: files, equations, Python, names; and what it refuses, with the reason."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from searching import FormulaBackend

import taso
from taso.graph.errors import RuleError, SearchError
from taso.rules.collection import admitted, gather, library
from taso.rules.format import save
from taso.rules.pattern import Certificate, Rule, Status
from taso.rules.text import parse_rule
from taso.rules.verifier import proof

EQUATION = "Relu(Relu(x)) => Relu(x)"


def twice() -> taso.Graph:
    graph = taso.new_graph()
    graph.relu(graph.relu(graph.new_input(dims=(2, 3))))
    return graph


def ids(rules: list[Rule]) -> list[str]:
    return [r.id for r in rules]


EVERY = [r.id for r in library()]


# ── what is taken ────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "rules",
    [
        EQUATION, f"{EQUATION} where rank(x) == 2 exact: exact", taso.rule(EQUATION), [taso.rule(EQUATION)],
        taso.rule(lambda op, x: (op.Relu(op.Relu(x)), op.Relu(x))), ["+relu-*"], {"relu-twice": True},
    ],
    ids=str,
)  # fmt: skip
def test_a_rule_in_each_form_is_judged_and_applied(rules: object, formula_backend: FormulaBackend) -> None:
    best = taso.optimize(twice(), rules=rules, backend=formula_backend)  # type: ignore[arg-type]  # each of its forms
    assert [n.op.name for n in best.run_time_nodes] == ["Relu"]
    assert {r.status for r in best.report.rewrites} == {"proved"}


def test_names_switch_packaged_rules_off(formula_backend: FormulaBackend) -> None:
    for off in ("-relu-twice", ["-relu-twice"], {"relu-twice": False}):
        assert ids(admitted(off)) == [i for i in EVERY if i != "relu-twice"]
    best = taso.optimize(twice(), rules={"relu-twice": False}, backend=formula_backend)
    assert [n.op.name for n in best.run_time_nodes] == ["Relu", "Relu"]


def test_a_list_is_read_from_left_to_right() -> None:
    assert ids(admitted([])) == [] and ids(admitted({})) == EVERY
    assert ids(admitted(["+*", "-*", "+relu-twice"])) == ["relu-twice"]
    assert ids(admitted([taso.rule(EQUATION, name="mine"), "-mi*", "+drop-cast"])) == ["drop-cast"]
    assert ids(admitted(["+*", taso.rule("Relu(Neg(Neg(x))) => Relu(x)", name="mine")])) == [*EVERY, "mine"]
    # said twice, counted once
    assert len(admitted([EQUATION, EQUATION])) == 1


def test_a_file_is_judged_again_whatever_it_says(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    true, false = taso.rule(EQUATION, name="true"), taso.rule("Mul(x, c) => x", name="false")
    save([r.judged(Status.PROVED, Certificate("by my word")) for r in (true, false)], tmp_path / "claimed.pb")
    with caplog.at_level(logging.WARNING):
        assert ids(admitted(tmp_path / "claimed.pb")) == ["true"]
    assert "Mul(x, c) => x: it is refuted" in caplog.text and "on the left" in caplog.text


def test_what_the_library_says_too_needs_no_proof_at_run_time(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*args: object, **more: object) -> Rule:
        raise AssertionError("nothing is to be judged")

    monkeypatch.setattr("taso.rules.collection.verify", never)
    again = [r.judged(Status.UNPROVED, Certificate()) for r in library()]
    assert {r.status for r in gather(again)} == {Status.PROVED}
    assert ids(admitted("+*")) == EVERY


# ── what is refused ──────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("rules", ["Mul(x, c) => x", taso.rule("Mul(x, c) => x"), ["+*", "Mul(x, c) => x"]], ids=str)
def test_a_false_rule_of_a_user_is_an_error_that_tells_the_counterexample(rules: object) -> None:
    with pytest.raises(RuleError, match=r"it is refuted \(x: .*on the left, .*on the right"):
        taso.optimize(twice(), rules=rules)  # type: ignore[arg-type]  # each of its forms


def test_a_rule_that_is_not_proved_is_refused_with_the_reason_unless_it_is_admitted(
    monkeypatch: pytest.MonkeyPatch, formula_backend: FormulaBackend
) -> None:
    rule = taso.rule(EQUATION, where="rank(x) == 2", name="unreached")
    monkeypatch.setattr("taso.rules.verifier.prove", lambda rule, seconds: proof.Proof(False, "it is out of reach"))
    with pytest.raises(RuleError, match="it is tested .*not proved: it is out of reach.*rule_statuses admits"):
        taso.optimize(twice(), rules=rule, backend=formula_backend)
    best = taso.optimize(twice(), rules=rule, rule_statuses=["proved", "tested"], backend=formula_backend)
    assert [n.op.name for n in best.run_time_nodes] == ["Relu"]
    assert [r.status for r in best.report.rewrites] == ["tested"]
    (bounded,) = admitted(rule, [Status.PROVED, Status.BOUNDED])
    assert bounded.status is Status.BOUNDED and "all sizes up to" in bounded.certificate.method


@pytest.mark.parametrize("status", ["refuted", "unproved", "true"])
def test_no_other_status_can_be_admitted(status: str) -> None:
    with pytest.raises(SearchError, match=f"'{status}' is none of these"):
        taso.optimize(twice(), rule_statuses=["proved", status])


@pytest.mark.parametrize(
    "rules, said",
    [
        ("-relu-twise", "no rule is called 'relu-twise': is it 'relu-twice'"), ({"nothing-such": True}, "no rule"),
        ({"relu-twice": "off"}, "True or False"), (5, "rules are a file"), ([5], "rules are a file"),
        ("no-such-file.pb", "cannot be read"), ("", "the name of the rule file is empty"),
        ("Relu(x => x", "cannot be read"), ("Relu(x) => Frob(x)", "Frob"),
    ],
)  # fmt: skip
def test_what_is_no_rule_is_said(rules: object, said: str) -> None:
    with pytest.raises(RuleError, match=said):
        taso.optimize(twice(), rules=rules)  # type: ignore[arg-type]  # wrong on purpose


# ── rules written in Python ──────────────────────────────────────────────────────────────────────────────────────


@taso.rule(where="rank(x) == 2 and rank(a) == 2 and rank(b) == 2")
def merge_products(op, x, a, b):  # type: ignore[no-untyped-def]  # as a user writes it
    both = op.MatMul(x, op.Concat(a, b, axis=1))
    return [op.MatMul(x, a), op.MatMul(x, b)], op.Split(both, axis=1, split=("dim(a, 1)", "dim(b, 1)"))


def test_a_function_makes_the_rule_that_its_text_says() -> None:
    text = (
        "[merge-products]\nMatMul(x, a) | MatMul(x, b) => "
        "Split(MatMul(x, Concat(a, b, axis=1)), axis=1, split=(dim(a, 1), dim(b, 1)))\n"
        "  where rank(x) == 2 and rank(a) == 2 and rank(b) == 2"
    )
    assert merge_products == parse_rule(text)


def test_settings_outputs_and_missing_inputs_can_be_said() -> None:
    made = taso.rule(
        lambda op, x: (
            [op.Split(x, axis="a", split="s", outputs=2)[1]],
            op.Slice(x, starts=("s[0]",), ends=("dim(x, a)",), axes=("a",)),
        ),
        exact="exact", name="part",
    )  # fmt: skip
    assert made == parse_rule(
        "[part]\nSplit(x, axis=a, split=s, outputs=2)[1] => "
        "Slice(x, starts=(s[0],), ends=(dim(x, a),), axes=(a,))\nexact: exact"
    )
    clipped = taso.rule(lambda op, x: (op.Clip(x, min=None, max=2.5), op.Min(x, op.Constant(2.5, like=x))))
    assert "Clip(x, max=2.5, min=None)" in clipped.name and "Constant(like=x, value=2.5)" in clipped.name


@pytest.mark.parametrize(
    "build, said",
    [
        (lambda op, x: op.Relu(x), "two sides"), (lambda op, x: (op.Relu(x), 5), "a term or a list of terms"),
        (lambda op, x: (x, op.Relu(x)), "cannot be the variable"), (5, "an equation or a function"),
        (lambda op, x: (op.Relu(x), op.Gelu(x, approximate=object())), "cannot speak of the setting"),
    ],
)  # fmt: skip
def test_a_function_that_makes_no_rule_is_told(build: object, said: str) -> None:
    with pytest.raises(RuleError, match=said):
        taso.rule(build)  # type: ignore[call-overload]  # wrong on purpose


def test_a_function_that_fails_or_takes_nothing_is_one_sentence() -> None:
    def failing(op: object, x: object) -> object:
        raise ZeroDivisionError("division by zero")

    with pytest.raises(RuleError, match="the function of a rule failed: ZeroDivisionError"):
        taso.rule(failing)  # type: ignore[arg-type]  # a builder that gives nothing
    with pytest.raises(RuleError, match="takes `op` and then"):
        taso.rule(lambda: None)  # type: ignore[arg-type, misc, return-value]  # a builder without arguments


def test_one_exactness_may_be_given_as_a_word() -> None:
    graph = taso.new_graph()
    graph.relu(graph.new_input(dims=(2, 3)))
    with pytest.raises(SearchError, match="exactness is a list of .*'nope' is none of these"):
        taso.optimize(graph, exactness="nope")
