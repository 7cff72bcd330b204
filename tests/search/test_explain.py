"""What a report explains: where a rule's shape fits, why it did not apply there, and what it would have cost."""

from __future__ import annotations

import json
from dataclasses import replace

import onnx.parser
import pytest
from searching import FormulaBackend, rule

import taso
from taso.graph.errors import RuleError, SearchError
from taso.rules.pattern import Status
from taso.search.explain import MOST_PLACES, Explanation
from taso.search.result import Report


def named(text: str) -> taso.Graph:
    return taso.load(onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["" : 17]> {text}'))


def products() -> taso.Graph:
    """Two products of one input and one of another."""
    graph = taso.new_graph()
    x, z = graph.new_input(dims=(1, 64)), graph.new_input(dims=(1, 64))
    made = [graph.matmul(v, graph.new_weight(dims=(64, 64))) for v in (x, x, z)]
    graph.set_outputs([*zip("pqr", made, strict=True)])
    return graph


def explained(graph: taso.Graph, asked: object, **settings: object) -> list[Explanation]:
    given = {"backend": FormulaBackend(), "never_slower": False, "explain": asked, **settings}
    return taso.optimize(graph, **given).report.explanations  # type: ignore[arg-type]  # settings of optimize


def test_a_rule_that_was_taken_is_told_with_its_place_and_its_gain() -> None:
    found = explained(products(), "merge-matmul")
    first = found[0]
    assert (first.graph, first.outcome, first.nodes) == ("original", "taken", ["MatMul 'p'", "MatMul 'q'"])
    assert first.change_ms is not None and first.change_ms < 0 and first.not_used == ""
    assert [e.outcome for e in found if e.graph == "original"] == ["taken"]


def test_a_condition_that_does_not_hold_is_told_with_what_it_met() -> None:
    (said,) = (e for e in explained(products(), "merge-batched-matmul") if e.graph == "original")
    assert (said.outcome, said.change_ms) == ("refused", None)
    assert "rank(a) == 3 does not hold" in said.reason and "64×64" in said.reason


def test_a_rewrite_that_does_not_pay_is_told_with_what_it_would_cost() -> None:
    graph = named("g (float[64,64] x, float[64,64] y) => (float[64,64] z) { z = Add (x, y) }")
    dear = rule("Add(x, y) => Sub(x, Neg(y))")
    (said,) = explained(graph, "Add(x, y) => Sub(x, Neg(y))", rules=dear)
    report = taso.optimize(graph, backend=FormulaBackend(), never_slower=False, rules=dear).report
    assert said.outcome == "applies" and "does not pay" in said.reason and said.nodes == ["Add 'z'"]
    assert said.change_ms == pytest.approx(report.near_misses[0][1], rel=1e-9) and said.change_ms > 0


def test_a_rewrite_that_a_use_outside_forbids_is_told_so() -> None:
    graph = named("""g (float[4,4] x) => (float[4,4] y, float[4,4] z)
        { a = Transpose<perm=[1,0]>(x)  y = Transpose<perm=[1,0]>(a)  z = Sigmoid(a) }""")
    once = rule("Transpose(Transpose(x, perm=p), perm=q) => Identity(x)\n where p == (1, 0) and q == (1, 0)")
    kept = replace(once, status=Status.PROVED)
    found = explained(graph, kept.name, rules=[kept])
    assert [e.outcome for e in found if e.graph == "original"] == ["refused"]
    assert "used outside" in found[0].reason


def test_what_would_pay_and_was_not_reached_is_told_so() -> None:
    graph = taso.new_graph()
    x = graph.new_input(dims=(8, 8))
    for _ in range(3):
        x = graph.tanh(graph.transpose(x, (0, 1)))
    found = explained(graph, "drop-transpose", budget=1, search="backtracking")
    best = [e for e in found if e.graph == "best"]
    assert best and all("the search ended before" in e.reason and "(budget)" in e.reason for e in best)
    assert all(e.change_ms is not None and e.change_ms < 0 for e in best)


@pytest.mark.parametrize(
    ("text", "asked", "reason"),
    [
        ("g (float[4] x) => (float[4] y) { y = Tanh (x) }", "relu-twice", "the graph holds no Relu"),
        (
            "g (float[4] x) => (float[4] y) { [first] a = Tanh (x) [second] y = Relu (a) }", "relu-twice",
            "Tanh 'first' stands where Relu is asked for",
        ),
        (
            "g (float[2,3,4] x) => (float[2,12] y) { [f] y = Flatten <axis=1> (x) }",
            "Flatten(x, axis=2) => Neg(Flatten(x, axis=2))", "Flatten.axis is 1, not 2",
        ),
        (
            "g (float[2,3,4] x) => (float[6,4] y) { [f] y = Flatten <axis=2> (x) }", "Flatten(x) => Neg(Flatten(x))",
            "Flatten.axis is 2, not its default (Flatten 'f')",
        ),
    ],
)  # fmt: skip
def test_a_shape_that_fits_nowhere_is_told_with_what_comes_closest(text: str, asked: str, reason: str) -> None:
    found = [e for e in explained(named(text), asked, budget=1) if e.graph == "original"]
    assert any(reason in e.reason for e in found)
    assert "taken" not in {e.outcome for e in found}


def test_a_pattern_asks_for_all_rules_of_that_name() -> None:
    found = explained(products(), ["merge-matmul", "merge-gemm*"])
    assert "merge-matmul" in {e.identifier for e in found}
    assert {e.identifier.startswith("merge-") for e in found} == {True}


def test_a_rule_that_the_search_does_not_use_says_why() -> None:
    found = explained(products(), ["merge-matmul"], rules=["-merge-matmul"])
    assert "not among the rules of this search" in found[0].not_used
    assert found[0].outcome == "applies" and found[0].change_ms is not None


def test_an_equation_that_nobody_proved_can_be_asked_for() -> None:
    found = explained(products(), "MatMul(x, a) => Neg(MatMul(x, Neg(a)))")
    assert len([e for e in found if e.graph == "original"]) == 3 and "unproved" in found[0].not_used


@pytest.mark.parametrize("name", ["p", "MatMul 'p'"])
def test_a_node_is_asked_for_by_its_name_or_by_what_it_makes(name: str) -> None:
    found = [e for e in explained(products(), name) if e.graph == "original"]
    assert {"merge-matmul", "merge-batched-matmul"} <= {e.identifier for e in found}
    assert all("MatMul 'p'" in e.nodes for e in found)


def test_the_name_of_a_node_in_a_file_asks_for_it() -> None:
    graph = named("g (float[4] x) => (float[4] y) { [one] a = Relu (x) [two] y = Relu (a) }")
    found = explained(graph, "two")
    assert found[0].outcome == "taken" and found[0].nodes == ["Relu 'one'", "Relu 'two'"]


def test_a_node_that_no_rule_takes_in_is_told_so() -> None:
    graph = named("g (float[4] x) => (float[4] y) { y = Erf (x) }")
    (said,) = explained(graph, "y", rules="Relu(Relu(x)) => Relu(x)")
    assert (said.outcome, said.reason) == ("absent", "no rule has a shape that takes it in")


@pytest.mark.parametrize("asked", ["nobody-is-called-so", ["merge-matmul", "nobody"], "", [3], "merge-matmull*"])
def test_what_is_neither_rule_nor_node_is_one_sentence(asked: object) -> None:
    with pytest.raises(SearchError, match="explain") as caught:
        explained(products(), asked)
    assert "\n" not in str(caught.value)


def test_an_equation_that_cannot_be_read_is_refused() -> None:
    with pytest.raises(RuleError):
        explained(products(), "MatMul(x => x")


def test_places_beyond_the_most_are_counted() -> None:
    graph = taso.new_graph()
    x = graph.new_input(dims=(4, 4))
    for _ in range(MOST_PLACES + 5):
        x = graph.tanh(graph.transpose(x, (0, 1)))
    best = taso.optimize(graph, budget=1, backend=FormulaBackend(), never_slower=False, explain="drop-transpose")
    found = [e for e in best.report.explanations if e.graph == "original"]
    assert len(found) == MOST_PLACES and any(f"{MOST_PLACES + 5} places" in m for m in best.report.messages)


def test_explaining_changes_nothing_of_the_result() -> None:
    graph = products()
    results = [
        taso.export_onnx(
            taso.optimize(graph, backend=FormulaBackend(), never_slower=False, explain=asked)
        ).SerializeToString(deterministic=True)
        for asked in ((), ["merge-matmul", "p", "q"])
    ]
    assert results[0] == results[1]


def test_an_interruption_while_it_is_explained_leaves_the_result(monkeypatch: pytest.MonkeyPatch) -> None:
    from taso.search.explain import Explainer

    def interrupted(*given: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Explainer, "_of_rule", interrupted)
    best = taso.optimize(products(), backend=FormulaBackend(), never_slower=False, explain="merge-matmul")
    assert best.report.changed and any("interrupted while it was explained" in m for m in best.report.messages)


def test_what_is_explained_is_data_first_and_text_second() -> None:
    best = taso.optimize(
        products(), backend=FormulaBackend(), never_slower=False, explain=["merge-matmul", "merge-batched-matmul"]
    )
    report = best.report
    data = json.loads(report.to_json())["explanations"]
    assert [Explanation(**d) for d in data] == report.explanations
    assert Report.from_json(report.to_json()) == report
    text = report.summary()
    assert "taken (-" in text and "rank(a) == 3 does not hold" in text and "MatMul 'p', MatMul 'q'" in text
