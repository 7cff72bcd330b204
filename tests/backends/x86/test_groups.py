"""Convolutions in groups by machine code, in kernels of the backend."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from machine_code import isa
from test_channelwise import STEPS, WITH_CODE, by_code, check, followed, launched, offered, planned
from test_onednn_executor import Build, feeds_for, worst

from taso.backends.onednn import coded, direct
from taso.backends.onednn.backend import OneDNNBackend
from taso.graph.evaluate import evaluate_graph
from taso.graph.graph import Value
from taso.graph.operator import AttrValue

pytestmark = pytest.mark.usefixtures("code_of_isa")

NAME = direct.NAME


def grouped(
    build: Build, dims: tuple[int, ...], filters: int, groups: int, taps: tuple[int, int] = (3, 3), bias: bool = True,
    **attrs: AttrValue,
) -> Value:  # fmt: skip
    weight = build.weight(filters, dims[1] // groups, *taps)
    given = [build.input(*dims), weight, *([build.weight(filters)] if bias else [])]
    return build.op("Conv", *given, group=groups, **{"pads": (taps[0] // 2, taps[1] // 2) * 2, **attrs})


SHAPES = [
    ((1, 64, 9, 11), 64, 16), ((2, 32, 7, 7), 32, 2), ((1, 96, 5, 13), 192, 3), ((3, 10, 6, 6), 64, 2),
    ((1, 128, 4, 4), 128, 4), ((1, 32, 14, 14), 96, 2), ((1, 256, 3, 3), 256, 64),
]  # fmt: skip
WINDOWS = [((3, 3), (1, 1)), ((3, 3), (2, 2)), ((1, 1), (1, 1)), ((5, 3), (1, 2)), ((1, 7), (3, 1)), ((2, 4), (1, 1))]


@pytest.mark.parametrize("dims, filters, groups", SHAPES, ids=str)
@pytest.mark.parametrize("taps, strides", WINDOWS, ids=str)
@pytest.mark.parametrize("bias", (True, False))
def test_a_convolution_in_groups_is_one(
    dims: tuple[int, ...], filters: int, groups: int, taps: tuple[int, int], strides: tuple[int, int], bias: bool
) -> None:
    build = Build()
    check(build.outputs(grouped(build, dims, filters, groups, taps, bias, strides=strides)), name=NAME)


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("dims, groups", [((2, 64, 9, 8), 16), ((2, 64, 9, 8), 2)], ids=["four channels", "registers"])
def test_every_step_runs_behind_it(step: str, dims: tuple[int, ...], groups: int) -> None:
    build = Build()
    graph = build.outputs(followed(build, grouped(build, dims, 64, groups), [step]))
    (job,) = check(graph, alone=step in WITH_CODE, name=NAME)
    assert job.kernel.algorithm == NAME and launched(job)[0] == by_code()


def _unfit() -> dict[str, Callable[[Build], Value]]:
    def conv(b: Build, channels: int, filters: int, groups: int, **attrs: AttrValue) -> Value:
        return grouped(b, (1, channels, 9, 9), filters, groups, **attrs)

    return {
        "no groups": lambda b: conv(b, 32, 32, 1),
        "as many groups as channels": lambda b: conv(b, 32, 32, 32),
        "two filters a group": lambda b: conv(b, 32, 32, 16),
        "four filters of eight channels": lambda b: conv(b, 64, 32, 8),
        "filters that leave a register half empty": lambda b: conv(b, 24, 24, 2),
        "four channels, and less than a register of them": lambda b: conv(b, 12, 12, 3),
        "gaps": lambda b: conv(b, 64, 64, 16, dilations=(2, 2)),
        "windows that miss the picture": lambda b: conv(b, 64, 64, 16, pads=(3, 3, 3, 3)),
        "computed filters": lambda b: b.op("Conv", b.input(1, 64, 9, 9), b.input(64, 4, 3, 3), group=16),
    }


@pytest.mark.parametrize("name", _unfit())
def test_it_is_not_offered_elsewhere(name: str) -> None:
    build = Build()
    assert all(NAME not in names for names in offered(build.outputs(_unfit()[name](build))))


def test_where_no_code_runs_a_plan_with_it_runs_as_usual(monkeypatch: pytest.MonkeyPatch) -> None:
    build = Build()
    graph = build.outputs(build.op("Relu", grouped(build, (1, 64, 9, 9), 64, 16)))
    assert offered(graph) == [(NAME,)]
    graph.plans["onednn"] = planned(graph, lambda names: NAME if NAME in names else "")
    monkeypatch.setattr(coded, "runs_here", lambda: False)
    assert offered(graph) == [()]
    feeds = feeds_for(graph)
    assert worst(OneDNNBackend(1).compile(graph)(feeds), evaluate_graph(graph, feeds, wide=True)) <= 5e-6


def test_eight_filters_fill_a_register_of_eight() -> None:
    build = Build()
    found = offered(build.outputs(grouped(build, (1, 64, 9, 9), 64, 8)))
    assert found == [(NAME,) if isa().width == 8 else ()]
