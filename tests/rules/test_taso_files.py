"""TASO's rule files as rules of ours: all load, and mean what their format means."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from published import NAMES, published

from taso.graph.errors import RuleError
from taso.rules import rules_pb2 as pb
from taso.rules.format import dumps, loads
from taso.rules.pattern import Exactness, Rule, Status
from taso.rules.taso_files import Published, PublishedOperator, from_published
from taso.rules.text import parse_rule, show_rule

CONV, MAX_POOL, AVERAGE_POOL, RELU, CONCAT, SPLIT, TRANSPOSE, ADD, MUL, MATMUL, SCALE, ENLARGE, MERGE = (
    3, 6, 7, 8, 12, 13, 15, 16, 17, 18, 19, 20, 21,
)  # fmt: skip
IDENTITY_MATRIX, IDENTITY_KERNEL, ONES, AVERAGING_KERNEL = 22, 23, 24, 25


def _op(type: int, *inputs: int | tuple[int, int], **settings: int) -> PublishedOperator:
    keys = {
        "kh": 4,
        "kw": 5,
        "sh": 6,
        "sw": 7,
        "pad": 8,
        "act": 9,
        "rank": 10,
        "axis": 11,
        "perm": 12,
        "parts": 2,
        "count": 14,
    }
    refs = tuple(i if isinstance(i, tuple) else (i, 0) for i in inputs)
    return PublishedOperator(type, refs, {keys[k]: v for k, v in settings.items()})


def _conv(
    x: int, w: int, k: tuple[int, int] = (3, 3), s: tuple[int, int] = (1, 1), pad: int = 0, act: int = 0
) -> PublishedOperator:
    return _op(CONV, x, w, kh=k[0], kw=k[1], sh=s[0], sw=s[1], pad=pad, act=act)


def _rule(
    source: Iterable[PublishedOperator], target: Iterable[PublishedOperator], *outputs: tuple[int, int, int, int]
) -> Rule:
    source, target = tuple(source), tuple(target)
    return from_published(Published(source, target, outputs or ((len(source) - 1, 0, len(target) - 1, 0),)))


@pytest.mark.parametrize(("name", "count"), list(zip(NAMES, (133, 619), strict=True)))
def test_every_rule_of_the_published_files_becomes_a_rule_named_by_its_equation(name: str, count: int) -> None:
    rules = published(name)
    assert len(rules) == count
    for number, rule in enumerate(rules):
        assert rule.status is Status.UNPROVED and rule.origin == f"{name}#{number}"
        assert " => " in rule.name
        assert parse_rule(show_rule(rule), rule.origin) == rule
    assert loads(dumps(rules)) == list(rules)


def test_most_published_rules_are_among_the_generated_ones() -> None:
    generated = {r.name for r in published(NAMES[1])}
    # a few equal equations became equal names; TASO's own count of shared rules is 123
    assert sum(r.name in generated for r in published(NAMES[0])) >= 123


def test_a_product_merged_is_split_back_where_it_was_joined() -> None:
    rule = published(NAMES[0])[77]
    assert rule == parse_rule(
        """MatMul(x, y) | MatMul(x, z) => Split(MatMul(x, Concat(y, z, axis=1)), axis=1, split=(dim(y, 1), dim(z, 1)))
        where rank(x) == 2 and rank(y) == 2 and rank(z) == 2""",
        rule.origin,
    )


def test_a_split_cuts_at_the_most_recent_join_and_the_rest_keeps_its_own() -> None:
    nested = [_op(RELU, -1), _op(RELU, -2), _op(RELU, -3)]
    joined = [_op(CONCAT, -2, -3, axis=0, rank=2), _op(CONCAT, -1, 0, axis=0, rank=2)]
    cut = [_op(RELU, 1), _op(SPLIT, 2, axis=0, parts=2), _op(SPLIT, (3, 1), axis=0, parts=2)]
    rule = _rule(nested, [*joined, *cut], (0, 0, 3, 0), (1, 0, 4, 0), (2, 0, 4, 1))
    first, second = (dict(n.attrs)["split"] for n in rule.target if n.op.name == "Split")
    assert str(first) == "(dim(x, 0), dim(y, 0) + dim(z, 0))"
    assert str(second) == "(dim(y, 0), dim(z, 0))"


def test_a_split_that_no_concatenation_went_before_is_refused() -> None:
    with pytest.raises(RuleError, match="no concatenation"):
        _rule(
            [_op(TRANSPOSE, -1, rank=2, perm=2)], [_op(TRANSPOSE, -1, rank=2, perm=2), _op(SPLIT, 0, axis=0, parts=2)]
        )


@pytest.mark.parametrize(
    ("kernel", "stride", "pad", "shown"),
    [
        ((3, 3), (1, 1), 0, "pads=(1, 1, 1, 1)"),
        ((1, 3), (1, 1), 0, "pads=(0, 1, 0, 1)"),
        ((2, 4), (1, 1), 0, "pads=(1, 2, 0, 1)"),
        ((3, 3), (2, 2), 0, "pads=same_pads((3, 3), (2, 2), (dim(x, 2), dim(x, 3)))"),
        ((3, 3), (2, 1), 1, "strides=(2, 1)"),
        ((1, 1), (1, 1), 0, "Conv(x, w, group=g)"),
    ],
)
def test_windows_have_the_pads_and_strides_of_the_file(
    kernel: tuple[int, int], stride: tuple[int, int], pad: int, shown: str
) -> None:
    conv = _conv(-1, -2, kernel, stride, pad)
    rule = _rule([conv], [conv])
    assert shown in rule.name
    assert ("pads" in rule.name) is (pad == 0 and kernel != (1, 1))
    conditions = [str(c) for c in rule.conditions]
    assert f"dim(w, 2) == {kernel[0]}" in conditions and f"dim(w, 3) == {kernel[1]}" in conditions


def test_an_activation_is_a_node_of_its_own_and_fusing_it_is_no_change() -> None:
    for code, name in ((1, "Sigmoid"), (2, "Relu"), (3, "Tanh")):
        rule = _rule([_conv(-1, -2, act=code)], [_conv(-1, -2, act=code)])
        assert rule.name.startswith(f"{name}(Conv(") and rule.trivial
    assert published(NAMES[0])[64].trivial
    assert not published(NAMES[0])[0].trivial


def test_groups_are_bound_where_the_rule_leaves_channels_alone_and_one_where_it_joins_them() -> None:
    rules = published(NAMES[0])
    assert rules[60].name.count("group=g") == 3
    assert "group" not in rules[125].name
    assert "group=2" in rules[99].name
    assert any("% 2 == 0" in str(c) for c in rules[99].conditions)


def test_a_target_convolution_whose_groups_are_not_known_divides_on_condition_that_it_comes_out_even() -> None:
    # the target convolves with a weight that no convolution of the source has
    rule = _rule([_conv(-1, -2), _op(RELU, -3)], [_conv(-1, -3), _op(RELU, -3)], (0, 0, 0, 0), (1, 0, 1, 0))
    assert "group=dim(x, 1) // dim(v, 1)" in rule.name
    conditions = [str(c) for c in rule.conditions]
    assert "dim(x, 1) % dim(v, 1) == 0" in conditions
    assert "dim(v, 0) % (dim(x, 1) // dim(v, 1)) == 0" in conditions


def test_element_wise_operators_work_on_equal_shapes_only() -> None:
    open_rank = _rule([_op(ADD, -1, -2)], [_op(ADD, -2, -1)])
    assert [str(c) for c in open_rank.conditions] == ["same_shape(x, y)"]
    target_only = _rule([_op(CONCAT, -1, -2, axis=0, rank=2)], [_op(ADD, -1, -2)])
    assert "same_shape(x, y)" in [str(c) for c in target_only.conditions]


def test_multiplying_by_a_scalar_asks_for_a_scalar() -> None:
    rule = _rule([_op(SCALE, -1, -2)], [_op(SCALE, -1, -2)])
    assert rule.name == "Mul(x, s) => Mul(x, s)" and "rank(s) == 0" in [str(c) for c in rule.conditions]


def test_average_pools_count_their_padding_where_a_convolution_stands_for_them() -> None:
    pool = _op(AVERAGE_POOL, -1, kh=3, kw=3, sh=1, sw=1, pad=0)
    kernel = _op(AVERAGING_KERNEL, kh=3, kw=3)
    rule = _rule([pool], [kernel, _conv(-1, 0)])
    assert "count_include_pad=1" in rule.name and "is_float(x)" in [str(c) for c in rule.conditions]
    assert "AveragingKernel(channels=dim(x, 1), like=x, kernel_shape=(3, 3)), group=dim(x, 1)" in rule.name
    assert "count_include_pad=p" in _rule([pool], [pool]).name


def test_the_shapes_of_constants_follow_from_each_of_their_uses() -> None:
    kernel = _op(IDENTITY_KERNEL, kh=3, kw=3)
    rule = _rule(
        [_op(RELU, -1), _op(RELU, -2)], [kernel, _conv(-1, 0, act=2), _conv(-2, 0, act=2)], (0, 0, 1, 0), (1, 0, 2, 0)
    )
    assert "channels=dim(x, 1), like=x" in rule.name and "channels=dim(y, 1), like=y" in rule.name
    added = _rule([_op(MATMUL, -1, -2), _op(ADD, -1, 0)], [_op(IDENTITY_MATRIX), _op(ADD, -2, 0), _op(MATMUL, -1, 1)])
    assert "IdentityMatrix(like=x, size=dim(x, 1))" in added.name
    assert "dim(x, 1) == dim(y, 1)" in [str(c) for c in added.conditions]
    ones = _rule([_op(MUL, -1, -2)], [_op(ONES), _op(MUL, -1, 0), _op(MUL, 1, -2)])
    assert "Ones(like=x, shape=shape(x))" in ones.name


def test_a_constant_in_the_source_needs_a_match_of_content() -> None:
    rule = _rule([_op(IDENTITY_KERNEL, kh=3, kw=3), _conv(-1, 0)], [_op(RELU, -1)])
    assert rule.needs_content_match and "group" not in rule.name
    assert not published(NAMES[0])[99].needs_content_match


def test_enlarging_by_an_odd_number_is_refused_and_an_unknown_window_gets_a_condition() -> None:
    with pytest.raises(RuleError, match="half an element"):
        _rule([_conv(-1, -2, (2, 2))], [_op(ENLARGE, -2, kh=3, kw=3), _conv(-1, 0)])
    rule = _rule(
        [_op(RELU, -1), _op(RELU, -2)], [_op(ENLARGE, -1, kh=5, kw=5), _op(RELU, -2)], (0, 0, 0, 0), (1, 0, 1, 0)
    )
    assert "(5 - dim(w, 2)) % 2 == 0" in [str(c) for c in rule.conditions]
    two = _rule(
        [_conv(-1, -2, (1, 1)), _conv(-1, -3)],
        [_op(ENLARGE, -2, -3), _conv(-1, 0), _conv(-1, -3)],
        (0, 0, 1, 0),
        (1, 0, 2, 0),
    )
    assert "Enlarge(w, kernel_shape=(3, 3))" in two.name


def test_merging_groups_takes_their_number_from_the_source_s_convolution() -> None:
    rule = _rule([_conv(-1, -2)], [_op(MERGE, -2, count=2), _conv(-1, 0)])
    assert "MergeGroupConv(w, count=2, groups=g)" in rule.name
    assert "g % 2 == 0" in [str(c) for c in rule.conditions]


def test_rules_that_only_move_data_are_exact() -> None:
    rules = published(NAMES[0])
    assert rules[84].exactness is Exactness.EXACT and rules[0].exactness is Exactness.REASSOCIATES


def test_six_published_rules_have_disconnected_sources() -> None:
    def connected(rule: Rule) -> bool:
        groups = [
            {i, *(r if isinstance(r, str) else r.node for r in n.inputs if r is not None)}
            for i, n in enumerate(rule.source)
        ]
        merged: list[set[object]] = []
        for group in groups:
            touching = [m for m in merged if m & group]
            merged = [m for m in merged if not m & group] + [set(group).union(*touching)]
        return len(merged) == 1

    assert [i for i, r in enumerate(published(NAMES[0])) if not connected(r)] == [63, 65, 70, 81, 95, 120]


@pytest.mark.parametrize(
    ("ops", "word"),
    [
        ([_op(99, -1)], "99"),
        ([_op(5, -1)], "number 5"),
        ([_op(CONV, -1, -2)], "parameter"),
        ([_op(ADD, -1)], "1 inputs instead of 2"),
        ([_op(RELU, 0)], "cycle"),
        ([_op(RELU, 7)], "reads operator 7"),
        ([_op(CONCAT, -1, -2, axis=5, rank=2)], "axis 5"),
        ([_op(TRANSPOSE, -1, rank=2, perm=3)], "permutation"),
        ([_conv(-1, -2, act=9)], "activation"),
        ([_conv(-1, -2, pad=7)], "padding"),
        ([_conv(-1, -2, (0, 3))], "window"),
        ([_op(CONCAT, -1, -2, axis=0, rank=2), _conv(-1, -2)], "dimensions"),
        ([_op(IDENTITY_MATRIX)], "constant"),
    ],
)
def test_what_means_nothing_is_refused_with_the_reason(ops: list[PublishedOperator], word: str) -> None:
    outputs = tuple((i, 0, i, 0) for i in range(len(ops)))
    with pytest.raises(RuleError, match=word):
        _rule(ops, ops, *outputs)


def test_an_operator_that_no_one_knows_gets_one_sentence_with_the_rule_s_number() -> None:
    message = pb.RuleCollection()
    rule = message.rule.add()
    for side in (rule.srcOp, rule.dstOp):
        side.add(type=77).input.add(opId=-1, tsId=0)
    rule.mappedOutput.add(srcOpId=0, dstOpId=0, srcTsId=0, dstTsId=0)
    with pytest.raises(RuleError, match=r"odd\.pb, rule 0: .*77"):
        loads(message.SerializeToString(), "odd.pb")


def _written(op: PublishedOperator, message: pb.Operator) -> None:
    message.type = op.type
    for number, output in op.inputs:
        message.input.add(opId=number, tsId=output)
    for key, value in op.settings.items():
        message.para.add(key=key, value=value)


@given(st.data())
def test_damaged_published_files_never_raise_anything_but_a_rule_error(data: st.DataObject) -> None:
    rule = pb.Rule()
    for op in (_conv(-1, -2), _conv(-1, -3)):
        _written(op, rule.srcOp.add())
    for op in (_op(CONCAT, -2, -3, axis=0, rank=4), _conv(-1, 0), _op(SPLIT, 1, axis=1, parts=2)):
        _written(op, rule.dstOp.add())
    for i in range(2):
        rule.mappedOutput.add(srcOpId=i, srcTsId=0, dstOpId=2, dstTsId=i)
    damaged = bytearray(pb.RuleCollection(rule=[rule]).SerializeToString())
    assert loads(bytes(damaged))[0].name.startswith("Conv(x, w")
    for _ in range(data.draw(st.integers(1, 4))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    try:
        loads(bytes(damaged))
    except RuleError:
        pass
