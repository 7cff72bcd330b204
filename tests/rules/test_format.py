"""Rule files: ours read back as written, what is no rule file gets one sentence, nothing is half-written."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from taso.graph.errors import RuleError
from taso.rules import rules_pb2 as pb
from taso.rules.format import dumps, load, loads, save
from taso.rules.pattern import Certificate, Exactness, Rule, Status
from taso.rules.text import parse_rules

RULES = parse_rules(
    """
[one]
MatMul(x, a) | MatMul(x, b) => Split(MatMul(x, Concat(a, b, axis=1)), axis=1, split=(dim(a, 1), dim(b, 1)))
  where rank(a) == 2 and (rank(b) == 2 or dim(x, 0) > 3)

Identity(x) => x
  exact: exact

Conv(x, w, _, group=g, strides=s) => Add(Conv(x, w, group=g, strides=s), Constant(0, like=x))
  exact: approximates
""",
    "test",
)
CERTIFICATE = Certificate("by hand", "true", 7, 12, (3, 5), 0.25, "x: float[2]", "because", "digest", 5)


def _judged() -> list[Rule]:
    statuses = [Status.TESTED, Status.REFUTED, Status.PROVED]
    return [
        r.judged(s, CERTIFICATE if s is Status.TESTED else Certificate()) for r, s in zip(RULES, statuses, strict=True)
    ]


def test_a_file_reads_back_as_the_rules_written(tmp_path: Path) -> None:
    path = tmp_path / "rules.pb"
    save(_judged(), path)
    assert load(path) == _judged()
    assert load(path)[0].certificate == CERTIFICATE
    assert stat.S_IMODE(path.stat().st_mode) & 0o044, "a packaged file must be readable by others"
    save([], path)
    assert load(path) == []


def test_the_same_rules_give_the_same_bytes() -> None:
    assert dumps(_judged()) == dumps(_judged())


def test_fields_below_16_are_those_of_the_published_format() -> None:
    wanted = {
        "Parameter": {"key": 1, "value": 2},
        "Tensor": {"opId": 1, "tsId": 2},
        "Operator": {"type": 1, "input": 2, "para": 3},
        "MapOutput": {"srcOpId": 1, "dstOpId": 2, "srcTsId": 3, "dstTsId": 4},
        "Rule": {"srcOp": 1, "dstOp": 2, "mappedOutput": 3},
        "RuleCollection": {"rule": 1},
    }
    for name, fields in wanted.items():
        descriptor = pb.DESCRIPTOR.message_types_by_name[name]
        assert descriptor.full_name == f"GraphSubst.{name}"
        assert {f.name: f.number for f in descriptor.fields if f.number < 16} == fields
        for f in descriptor.fields:
            if f.number >= 16:
                assert not f.is_required


def test_an_unsaid_exactness_or_status_is_the_weakest() -> None:
    message = pb.RuleCollection.FromString(dumps(_judged()))
    for rule in message.rule:
        rule.ClearField("exactness")
        rule.ClearField("status")
    for found in loads(message.SerializeToString()):
        assert found.exactness is Exactness.APPROXIMATES and found.status is Status.UNPROVED


@pytest.mark.parametrize(
    "data",
    [b"", b"hello, I am a text file\n", b"\x00" * 64, b"\xff" * 64, b"\x89PNG\r\n\x1a\n" + bytes(range(256))],
    ids=["empty", "text", "zeros", "ones", "png"],
)
def test_what_is_no_rule_file_is_refused_in_one_sentence(data: bytes, tmp_path: Path) -> None:
    path = tmp_path / "garbage.pb"
    path.write_bytes(data)
    with pytest.raises(RuleError, match="garbage.pb") as caught:
        load(path)
    assert "\n" not in str(caught.value)


def test_every_truncation_of_a_file_is_refused() -> None:
    data = dumps(_judged())
    for length in range(len(data)):
        with pytest.raises(RuleError):
            loads(data[:length])


@given(st.binary(max_size=200))
def test_random_bytes_never_raise_anything_but_a_rule_error(data: bytes) -> None:
    try:
        loads(data)
    except RuleError:
        pass


@given(st.data())
def test_damaged_files_never_raise_anything_but_a_rule_error(data: st.DataObject) -> None:
    damaged = bytearray(dumps(_judged()))
    for _ in range(data.draw(st.integers(1, 4))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    try:
        loads(bytes(damaged))
    except RuleError:
        pass


def test_missing_files_and_folders_are_named(tmp_path: Path) -> None:
    with pytest.raises(RuleError, match="nowhere.pb"):
        load(tmp_path / "nowhere.pb")
    with pytest.raises(RuleError, match="cannot be read"):
        load(tmp_path)
    with pytest.raises(RuleError, match="cannot be written"):
        save(RULES, tmp_path / "no" / "such" / "folder.pb")


def test_a_failed_save_leaves_the_old_file_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "rules.pb"
    save(_judged(), path)

    def fail(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("taso.rules.format.os.replace", fail)
    with pytest.raises(RuleError, match="No space left"):
        save([], path)
    assert [p.name for p in tmp_path.iterdir()] == ["rules.pb"] and load(path) == _judged()


def _changed(change: object) -> bytes:
    message = pb.RuleCollection.FromString(dumps(_judged()[:1]))
    change(message)  # type: ignore[operator]  # a lambda
    return message.SerializeToString()


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (lambda m: setattr(m.rule[0].srcOp[0], "name", "Frobnicate"), "Frobnicate"),
        (lambda m: m.rule[0].srcOp[0].ClearField("name"), "has no name"),
        (lambda m: m.rule[0].condition.append("import os"), "not an expression"),
        (lambda m: setattr(m.rule[0].dstOp[1].input[0], "variable", "nowhere"), "nowhere"),
        (lambda m: setattr(m.rule[0].dstOp[0].input[0], "variable", "two words"), "two words"),
        (lambda m: setattr(m.rule[0], "name", "Identity(x) => x"), "but says"),
        (lambda m: setattr(m.rule[0].mappedOutput[0], "srcOpId", 9), "node 9"),
        (lambda m: m.rule[0].ClearField("mappedOutput"), "at least one output"),
        (lambda m: setattr(m.rule[0].dstOp[2], "outputs", 1 << 30), "outputs"),
        (lambda m: setattr(m, "format_version", 99), "newer"),
        (lambda m: setattr(m, "rules", 2), "cut off"),
    ],
)  # fmt: skip
def test_a_file_that_contradicts_itself_is_refused_with_the_reason(change: object, word: str) -> None:
    with pytest.raises(RuleError, match=word) as caught:
        loads(_changed(change), "some.pb")
    assert str(caught.value).startswith("some.pb")
