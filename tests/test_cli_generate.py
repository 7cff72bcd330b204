"""`taso rules generate` writes rules that the other commands read, and says what is wrong in one sentence."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from taso import cli
from taso.rules.collection import library, read
from taso.rules.generator.packaging import SAID, instance_of, packaged
from taso.rules.pattern import Rule
from taso.rules.text import parse_rule
from taso.rules.verifier import verify


def generated(*arguments: str) -> int:
    return cli.main(["rules", "generate", "depthwise", "--size", "2", "--workers", "1", *arguments])


def test_rules_are_written_and_hold(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "mine.rules"
    assert generated("-o", str(target), "--everything") == 0
    said = capsys.readouterr()
    assert said.out == "" and "independent equations" in said.err
    rules = read(target)
    assert rules and all(verify(r, both=False).status.value == "proved" for r in rules)
    assert stat.S_IMODE(target.stat().st_mode) & 0o444 == 0o444
    assert [p.name for p in tmp_path.iterdir()] == ["mine.rules"]


def test_without_a_file_the_rules_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert generated("--as-found") == 0
    assert "=>" in capsys.readouterr().out


def test_a_folder_keeps_the_work(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "work"
    assert generated("--folder", str(folder), "--as-found") == 0
    first, kept = capsys.readouterr().out, {p: p.stat().st_mtime_ns for p in (folder / "depthwise").glob("piece-*")}
    assert kept
    assert generated("--folder", str(folder), "--as-found") == 0
    assert capsys.readouterr().out == first
    assert {p: p.stat().st_mtime_ns for p in kept} == kept


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nothing"], "there is no space called 'nothing'"),
        (["depthwise", "-o", "/nowhere/at/all.rules"], "/nowhere/at"),
    ],
)
def test_what_cannot_be_done_is_one_sentence(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:  # fmt: skip
    assert cli.main(["rules", "generate", *arguments]) == 1
    told = capsys.readouterr()
    assert said in told.err and told.err.count("\n") == 1 and told.out == ""


@pytest.mark.parametrize(
    "arguments", [["--size", "0"], ["--size", "9"], ["--workers", "0"], ["--library", "-o", "x.rules"]]
)
def test_wrong_usage_is_status_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        cli.main(["rules", "generate", "depthwise", *arguments])
    assert left.value.code == 2 and capsys.readouterr().out == ""


# ── what is packaged ─────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("special", "general", "said"),
    [
        ("MatMul(MatMul(x, y), y) => MatMul(x, MatMul(y, y))",
         "MatMul(MatMul(x, y), z) => MatMul(x, MatMul(y, z))", True),
        ("MatMul(MatMul(x, y), z) => MatMul(x, MatMul(y, z))",
         "MatMul(MatMul(x, y), y) => MatMul(x, MatMul(y, y))", False),
        ("Add(y, Add(x, x)) => Add(x, Add(y, x))", "Add(Add(x, y), z) => Add(x, Add(y, z))", True),
        ("Sub(y, Sub(x, x)) => Sub(x, Sub(y, x))", "Sub(Sub(x, y), z) => Sub(x, Sub(y, z))", False),
        ("Relu(Transpose(x, perm=(1, 0))) => Transpose(Relu(x), perm=(1, 0))",
         "Relu(Transpose(x, perm=p)) => Transpose(Relu(x), perm=p)", True),
        ("Relu(Transpose(x, perm=p)) => Transpose(Relu(x), perm=p)",
         "Relu(Transpose(x, perm=(1, 0))) => Transpose(Relu(x), perm=(1, 0))", False),
        ("Relu(Concat(x, y, axis=0)) => Concat(Relu(x), Relu(y), axis=0)",
         "Relu(Concat(x, y, axis=1)) => Concat(Relu(x), Relu(y), axis=1)", False),
        ("Relu(Concat(x, y, axis=0)) => Concat(Relu(y), Relu(x), axis=0)",
         "Relu(Concat(x, y, axis=i)) => Concat(Relu(x), Relu(y), axis=i)", False),
    ],
)  # fmt: skip
def test_a_rule_is_recognised_in_more_general_words(special: str, general: str, said: bool) -> None:
    assert instance_of(parse_rule(special), parse_rule(general)) is said


class _Found:
    def __init__(self, rules: list[Rule]) -> None:
        self.rules = rules


def test_only_what_a_search_can_use_is_packaged_and_how_much_fell_is_told() -> None:
    rules = [
        parse_rule("Relu(Transpose(x, perm=(1, 0))) => Transpose(Relu(x), perm=(1, 0))"),
        parse_rule("Relu(Transpose(y, perm=(1, 0))) => Transpose(Relu(y), perm=(1, 0))"),
        parse_rule("MatMul(z, Add(x, y)) => Add(MatMul(z, x), MatMul(z, y))"),
        parse_rule("Abs(Abs(Abs(x))) => Abs(x)"),
    ]
    known = [parse_rule("Abs(Abs(x)) => Abs(x)"), parse_rule("Abs(Abs(Abs(x))) => Abs(x)")]
    result = packaged([_Found(rules)], known)  # type: ignore[list-item]  # all that is read of what was generated
    assert [r.name for r in result.rules] == [rules[0].name]
    assert result.left_out == {"of no use to a search": 1, SAID: 1}
    assert len(packaged([_Found(rules)], known, everything=True).rules) == 2  # type: ignore[list-item]  # as above


def test_the_packaged_rules_that_were_found_say_nothing_twice() -> None:
    found = [r for r in library() if r.id.startswith("found-")]
    assert len(found) > 100
    for i, rule in enumerate(found):
        assert not any(instance_of(rule, other) for j, other in enumerate(found) if j != i), rule.name
