"""The packaged rules: each one is named, tried, applies somewhere, and changes nothing that is computed."""

from __future__ import annotations

import os
import random
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx.checker
import pytest
from models import Arrays
from searching import ROUNDED, by_id, drafted, instances, plant, prepared, rule, run_unoptimized

import taso
from taso.graph.errors import GraphError, RuleError
from taso.graph.evaluate import evaluate_graph
from taso.rules import build
from taso.rules.collection import gather, library, read, spelled_algorithms
from taso.rules.instances import Instance
from taso.rules.matcher import Matcher
from taso.rules.pattern import Certificate, Exactness, Rule, Status
from taso.rules.text import parse_rule
from taso.search.optimize import usable
from taso.search.result import to_graph
from taso.search.rewrite import Refused
from taso.search.state import Cycle, check
from taso.search.verify import relative_error
from taso.verdicts import judge_all, sample

ROOT = Path(__file__).parents[1]
FILES = sorted(build.FOLDER.glob("*.rules"))
TRIED = [r.id for file in FILES if file.stem in ("core", "generated") for r in read(file)]
"""Those of the other files are tried in `tests/rules/test_families.py`, in models of their own."""

SAMPLE = 12
SECONDS = 300.0


# ── the file ─────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.slow
def test_the_packaged_files_are_what_their_texts_say_and_all_is_proved() -> None:
    command = [sys.executable, "-m", "taso.rules.build", "--check"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    told = {line.split(":")[0]: line for line in done.stderr.splitlines() if "all proved" in line}
    for file in FILES:
        assert f"{file.stem}.pb: {len(read(file))} rules, all proved" in told[f"{file.stem}.pb"]


@pytest.mark.slow
def test_a_sample_of_the_packaged_rules_is_proved_from_the_start() -> None:
    for verdict in judge_all(sample(list(enumerate(library())), SAMPLE), seconds=SECONDS, workers=os.cpu_count() or 1):
        assert verdict.rule.status is Status.PROVED, (verdict.rule.id, verdict.rule.certificate.reason)


@pytest.mark.nightly
def test_all_packaged_rules_are_proved_from_the_start() -> None:
    for verdict in judge_all(list(enumerate(library())), seconds=SECONDS, workers=os.cpu_count() or 1):
        assert verdict.rule.status is Status.PROVED, (verdict.rule.id, verdict.rule.certificate.reason)


def test_the_build_refuses_a_rule_that_is_false(tmp_path: Path) -> None:
    text = tmp_path / "false.rules"
    text.write_text("[wrong]\nMul(x, c) => x\n")
    with pytest.raises(RuleError, match=r"\[wrong\].*refuted"):
        build.build(text)


def test_the_build_refuses_what_passes_the_trials_and_is_not_proved(tmp_path: Path) -> None:
    text = tmp_path / "slow.rules"
    text.write_text("[slow]\nRelu(Relu(Relu(x))) => Relu(x)\n")
    with pytest.raises(RuleError, match=r"\[slow\].*not proved: the time allowed"):
        build.build(text, seconds=0.0)


def test_a_verdict_is_kept_while_statement_and_definitions_stay_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    (judged,) = build.judge([parse_rule("[a]\nRelu(Relu(x)) => Relu(x)", "f.rules")])
    assert judged.status is Status.PROVED and judged.certificate.digest
    asked: list[str] = []

    def watched(rules: Sequence[Rule], **more: object) -> list[Rule]:
        asked.extend(r.name for r in rules)
        return [r.judged(Status.UNPROVED, r.certificate) for r in rules]

    monkeypatch.setattr(build, "verify_rules", watched)
    renamed = parse_rule("[b]\nRelu(Relu(x)) => Relu(x)", "f.rules")
    (kept,) = build.judge([renamed], [judged])
    assert kept.status is Status.PROVED and asked == []
    assert kept.id == "b" and kept.certificate.command == "taso rules verify f.rules --rule b"
    weaker = parse_rule("[a]\nRelu(Relu(x)) => Relu(x)\n  where rank(x) == 2", "f.rules")
    build.judge([weaker], [judged])
    assert asked == [weaker.name]
    monkeypatch.setattr(build, "sources", lambda: "other definitions")
    build.judge([renamed], [judged])
    assert asked == [weaker.name, renamed.name]


def test_comments_do_not_change_what_verdicts_depend_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def digest(text: str) -> str:
        (tmp_path / "rules").mkdir(exist_ok=True)
        (tmp_path / "rules" / "tester.py").write_text(text)
        build.sources.cache_clear()
        return build.sources()

    monkeypatch.setattr(build, "_PACKAGE", tmp_path)
    try:
        assert digest("a = 1\n") == digest("# a number\n\na = 1\n") != digest("a = 2\n")
    finally:
        build.sources.cache_clear()


def test_every_rule_has_an_identifier_of_its_own_and_its_equation_as_its_name() -> None:
    names = Counter(r.id for r in library())
    assert all(re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", name) for name in names)
    assert [name for name, count in names.items() if count > 1] == []
    assert [n for n, count in Counter((r.name, r.conditions) for r in library()).items() if count > 1] == []
    assert all("=>" in r.name for r in library())


def test_every_rule_is_one_that_a_search_takes() -> None:
    spelled = spelled_algorithms(library())
    assert usable(library()) + spelled == list(library())
    assert {r.exactness for r in spelled} == {Exactness.APPROXIMATES}
    assert {r.status for r in library()} == {Status.PROVED}
    assert all(r.certificate.method and r.certificate.digest for r in library())
    assert all(r.certificate.command == f"taso rules verify {r.origin} --rule {r.id}" for r in library())


@pytest.mark.parametrize("file", FILES, ids=lambda path: path.name)
def test_text_and_packaged_file_hold_the_same_rules(file: Path) -> None:
    written, packaged = read(file), read(file.with_suffix(".pb"))
    assert [(r.id, r.name, r.conditions, r.exactness) for r in written] == [
        (r.id, r.name, r.conditions, r.exactness) for r in packaged
    ]


def test_what_a_file_says_of_its_rules_is_not_believed(tmp_path: Path) -> None:
    false = rule("Mul(x, c) => x", Status.PROVED)
    assert [r.status for r in gather(false)] == [Status.REFUTED]
    known = by_id()["drop-identity"].judged(Status.UNPROVED, Certificate())
    assert [r.status for r in gather([false, known])] == [Status.REFUTED, Status.PROVED]


def test_only_what_is_proved_is_taken_unless_a_user_admits_more() -> None:
    judged = [rule("Relu(Relu(x)) => Relu(x)", status) for status in Status]
    assert [r.status for r in usable(judged)] == [Status.PROVED]
    assert [r.status for r in usable(judged, statuses=[Status.PROVED, Status.TESTED])] == [
        Status.PROVED, Status.TESTED
    ]  # fmt: skip


# ── what each rule does ──────────────────────────────────────────────────────────────────────────────────────────


def planted(known: Rule, instance: Instance) -> taso.Graph:
    graph = taso.Graph()
    replaced = plant(graph, known, instance, random.Random(1), [], apart=True)
    graph.set_outputs([(f"o{i}", v) for i, v in enumerate(replaced)])
    return graph


def values_for(graph: taso.Graph, seed: int, positive: bool) -> Arrays:
    rng = np.random.default_rng(seed)
    feeds: Arrays = {}
    for name, value in zip(graph.input_names, graph.inputs, strict=True):
        drawn = rng.normal(size=value.type.static_shape)
        feeds[name] = np.asarray(np.abs(drawn) + 0.3 if positive else drawn).astype(value.type.dtype.numpy)
    return feeds


def rewritten(graph: taso.Graph, known: Rule) -> list[taso.Graph]:
    """The graph after each match of the rule that can be carried out."""
    start = prepared(graph)
    results = []
    for match in Matcher([known]).find_all(start.state):
        try:
            state = drafted(start.state, match).commit()
        except (Refused, Cycle, GraphError):
            continue
        check(state)
        result = to_graph(state, graph, start.classes, taso.Graph)
        assert isinstance(result, taso.Graph)
        results.append(result)
    return results


def assert_same(before: taso.Graph, after: taso.Graph, known: Rule) -> None:
    """Float64 throughout; an exact rule keeps every bit."""
    for positive in (True, False):
        feeds = values_for(before, 3, positive)
        with np.errstate(all="ignore"):
            wanted, found = (evaluate_graph(g, feeds, wide=True) for g in (before, after))
        for name, value in wanted.items():
            if known.exactness is Exactness.EXACT:
                assert np.array_equal(found[name], value, equal_nan=True), name
            else:
                assert relative_error(found[name], value) <= ROUNDED, name


@pytest.mark.parametrize("name", TRIED)
def test_a_rule_applies_to_instances_of_its_source_and_changes_no_output(name: str) -> None:
    known = by_id()[name]
    applied = 0
    for instance in instances(known):
        graph = planted(known, instance)
        for result in rewritten(graph, known):
            applied += 1
            assert [(n, v.type) for n, v in result.outputs] == [(n, v.type) for n, v in graph.outputs]
            assert_same(graph, result, known)
    assert applied, f"none of {len(instances(known))} instances"


@pytest.mark.parametrize("name", TRIED)
def test_what_a_rule_makes_can_be_written_and_runs_as_onnx(name: str) -> None:
    known = by_id()[name]
    instance = instances(known)[0]
    graph = planted(known, instance)
    feeds = values_for(graph, 5, positive=True)
    wanted = run_unoptimized(taso.export_onnx(graph), feeds)
    for result in rewritten(graph, known)[:1]:
        proto = taso.export_onnx(result)
        onnx.checker.check_model(proto, full_check=True)
        for a, b in zip(run_unoptimized(proto, feeds), wanted, strict=True):
            assert relative_error(a, b) <= 1e-4


@pytest.mark.parametrize("name", TRIED)
def test_where_the_conditions_of_a_rule_do_not_hold_it_says_why(name: str) -> None:
    known = by_id()[name]
    graph = planted(known, instances(known)[0])
    told = Matcher([known]).explain(prepared(graph).state, 0)
    assert any(reason == "" for _, reason in told)
    assert all(reason == reason.strip() and "\n" not in reason for _, reason in told)
