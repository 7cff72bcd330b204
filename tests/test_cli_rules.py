"""`taso rules list | show | verify`, as a user types it."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from taso import cli, verdicts
from taso.cli_common import FAILED, TROUBLE
from taso.rules.collection import library
from taso.rules.format import save
from taso.rules.pattern import Status
from taso.rules.text import parse_rules

ROOT = Path(__file__).parents[1]

TEXT = """
[twice]
Relu(Relu(x)) => Relu(x)
  exact: exact

[false]
Mul(x, c) => x
  where same_shape(x, c)

[joined]
Concat(Conv(x, w, pads=(1, 1, 1, 1)), Conv(y, v, pads=(1, 1, 1, 1)), axis=1) => Conv(Concat(x, y, axis=1), Concat(w, v, axis=0), group=2, pads=(1, 1, 1, 1))
  where rank(x) == 4 and shape(w)[1:] == shape(v)[1:] and shape(w)[2:] == (3, 3) and (dim(w, 0) + dim(v, 0)) % 2 == 0
"""  # noqa: E501  # equations are not broken into lines


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "mine.rules"
    path.write_text(TEXT)
    return path


def run(*arguments: object) -> int:
    return cli.main(["rules", *map(str, arguments)])


def verify(*arguments: object) -> int:
    return run("verify", "--workers", 1, *arguments)


# ── list ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_all_packaged_rules_are_listed_one_to_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("list") == 0
    told = capsys.readouterr()
    lines = told.out.splitlines()
    assert [line.split()[0] for line in lines] == [r.id for r in library()]
    assert all(line.split()[1] == "proved" for line in lines)
    assert told.err == f"{len(library())} rules, {len(library())} proved\n"


def test_a_file_is_listed_as_it_states_its_rules_and_by_status(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rules = parse_rules(TEXT)
    stated = tmp_path / "stated.pb"
    save([rules[0].judged(Status.TESTED, rules[0].certificate), *rules[1:]], stated)
    assert run("list", stated, "--status", "tested", "--json") == 0
    told = capsys.readouterr()
    (only,) = json.loads(told.out)
    assert only["id"] == "twice" and only["status"] == "tested" and only["equation"] == rules[0].name
    assert run("list", stated, "--status", "proved") == 0
    assert capsys.readouterr().out == ""
    assert run("list", file) == 0
    assert len(capsys.readouterr().out.splitlines()) == 3


# ── show ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_rule_is_shown_with_condition_exactness_status_and_certificate(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("show", "merge-matmul") == 0
    shown = capsys.readouterr().out
    rule = next(r for r in library() if r.id == "merge-matmul")
    for part in (rule.name, "rank(a) == 2", "reassociates", "proved", rule.certificate.method, "core.rules"):
        assert part in shown
    assert "taso rules verify core.rules --rule merge-matmul" in shown


@pytest.mark.parametrize("name", ["false", "Mul(x, c) => x", "1"])
def test_a_rule_is_found_by_name_by_equation_and_by_number(
    name: str, file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("show", name, file, "--json") == 0
    (shown,) = json.loads(capsys.readouterr().out)
    assert shown["number"] == 1 and shown["id"] == "false" and shown["condition"] == ["same_shape(x, c)"]


# ── verify ───────────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_status_is_1_where_a_rule_is_refuted_and_the_counterexample_is_told(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert verify(file) == 1
    told = capsys.readouterr()
    assert "twice" not in told.out and "false" in told.out and "on the left" in told.out
    assert "3 rules, 1 proved, 2 refuted" in told.err


def test_only_the_rules_asked_for_are_judged(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert verify(file, "--rule", "twice", "--all") == 0
    told = capsys.readouterr()
    assert told.out.split()[:2] == ["twice", "proved"] and "1 rule, 1 proved" in told.err


def test_the_command_in_a_certificate_runs_again(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for first in (["core.rules", "--rule", "drop-identity"], [file, "--rule", "twice"], ["Relu(Relu(x)) => Relu(x)"]):
        assert verify(*first, "--json") == 0
        (told,) = json.loads(capsys.readouterr().out)
        _, *command = shlex.split(told["certificate"]["command"])
        assert cli.main([*command, "--json", "--workers", "1"]) == 0
        (again,) = json.loads(capsys.readouterr().out)
        assert {**again, "seconds": 0, "file": ""} == {**told, "seconds": 0, "file": ""}


def test_what_a_file_claims_and_does_not_reach_is_a_failure(tmp_path: Path) -> None:
    (rule,) = parse_rules("[slow]\nRelu(Relu(Relu(x))) => Relu(x)")
    save([rule.judged(Status.PROVED, rule.certificate)], tmp_path / "claimed.pb")
    save([rule], tmp_path / "unclaimed.pb")
    assert verify(tmp_path / "claimed.pb", "--seconds", 0) == 1
    assert verify(tmp_path / "unclaimed.pb", "--seconds", 0) == 0
    assert verify(tmp_path / "claimed.pb") == 0


def test_the_table_names_the_condition_under_which_a_false_rule_holds(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert verify(file, "--markdown") == 1
    page = capsys.readouterr().out
    assert "| twice | proved | `Relu(Relu(x)) => Relu(x)` |" in page
    assert "holds where also dim(w, 0) == dim(v, 0) (proved)" in page
    assert "counterexample: " in page and "taso rules verify mine.rules --markdown" in page


def test_several_processes_tell_what_one_does(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    told = []
    for workers in (1, 2):
        assert run("verify", file, "--json", "--workers", workers) == 1
        told.append([{**v, "seconds": 0} for v in json.loads(capsys.readouterr().out)])
    assert told[0] == told[1]


def test_a_sample_is_the_same_each_time_whatever_else_the_file_holds() -> None:
    numbered = list(enumerate(library()))
    chosen = verdicts.sample(numbered, 5)
    assert chosen == verdicts.sample(list(reversed(numbered)), 5) and len(chosen) == 5
    assert [n for n in chosen if n[0] % 2 == 0] == [
        n for n in verdicts.sample([n for n in numbered if n[0] % 2 == 0], 5) if n in chosen
    ]


# ── what goes wrong ──────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "arguments",
    [
        ["list", "missing.rules"], ["list", ""], ["show", "no-such-rule"], ["verify", "missing.pb"], ["verify", ""],
        ["verify", "Relu(x => x"], ["verify", "--rule", "no-such-rule"], ["verify", "Frobnicate(x) => x"],
    ],
)  # fmt: skip
def test_what_cannot_be_done_is_one_sentence_and_no_verdict(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(*arguments) == (TROUBLE if arguments[0] == "verify" else FAILED)
    told = capsys.readouterr()
    assert told.out == "" and told.err.startswith("taso: ") and len(told.err.splitlines()) == 1


@pytest.mark.parametrize(
    "arguments",
    [[], ["list", "--status", "true"], ["verify", "--seconds", "-1"], ["verify", "--workers", "0"], ["show"],
     ["verify", "--json", "--markdown"], ["verify", "--sample", "some"]],
)  # fmt: skip
def test_wrong_usage_is_status_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        run(*arguments)
    assert stopped.value.code == 2
    assert "usage: taso rules" in capsys.readouterr().err


def test_output_that_is_closed_early_is_no_error() -> None:
    command = f"{shlex.quote(sys.executable)} -m taso.cli rules list --json | head -n 1"
    done = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {command}"], capture_output=True, text=True, cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 0 and done.stdout == "[\n" and "Error" not in done.stderr
