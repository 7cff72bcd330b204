"""Depthwise and tiled convolutions by machine code, in kernels and in whole graphs, by plans forced and at random."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from choices import Choose, drawn, lowering, possible_layouts, with_algorithms
from guarded import both_at_once
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from machine_code import isa
from test_onednn_executor import Array, Build, feeds_for, worst
from test_winograd import TOLERANCE as OF_TILES
from test_winograd import Case, operands_of, run

import taso
import taso.graph.ops  # noqa: F401  # registers the operators
from taso.backends.lowering import BLOCKED, LAST, PLAIN, Choices, Job, Kernel, lower, structure
from taso.backends.onednn import channelwise, coded
from taso.backends.onednn.backend import OneDNNBackend
from taso.backends.onednn.kernels import NotInPlace, design
from taso.backends.onednn.needs import overwritable
from taso.backends.onednn.recipe import Recipe, embed
from taso.backends.places import OPERAND, RESULT, Block, Place
from taso.backends.recipe import Call
from taso.backends.x86 import launch
from taso.backends.x86.tiles import Transformed
from taso.graph import onnx_export
from taso.graph.evaluate import evaluate_graph
from taso.graph.graph import Graph, Value
from taso.graph.operator import AttrValue, Weight
from taso.graph.types import DType

pytestmark = pytest.mark.usefixtures("code_of_isa")

NAME = channelwise.NAME
TOLERANCE = 5e-6
"""max|a − b| / max|b|: some times what sums of some hundred terms in float32 lose."""
TILED = 3e-5
"""The same where tiles of 4 by 4 outputs take part."""
FUZZ = settings(
    max_examples=60, deadline=None, derandomize=True, database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)  # fmt: skip


# ── plans and what they make ─────────────────────────────────────────────────────────────────────────────────────


def by_code() -> str:
    """The name of a launch of machine code."""
    return f"x86:{isa().name}"


def by(name: str) -> Choose:
    """That algorithm, or one of those that begin so, where it is offered."""
    return lambda offered: next((found for found in offered if found.startswith(name)), "")


def planned(graph: Graph, choose: Choose | None = None) -> Choices:
    """Channels last wherever they can be, and an algorithm for every kernel that has it."""
    lies = {at: LAST for at, names in possible_layouts(graph).items() if LAST in names}
    return with_algorithms(graph, Choices(structure(graph), lies), choose or by(NAME))


def jobs(graph: Graph, choices: Choices | None = None) -> list[Job]:
    return list(lower(graph, lowering(), choices or planned(graph)).jobs)


def evaluated(value: Value) -> Array:
    held = value.node.attrs["data"]
    assert isinstance(held, Weight)
    return held.array()


class _Constants:
    def __init__(self, job: Job) -> None:
        self._arrays = [evaluated(v) if v.node.constant else None for v in job.operands]

    def array(self, operand: int) -> Array:
        found = self._arrays[operand]
        assert found is not None
        return found

    def keep(self, operand: int, label: str, make: Callable[[Array], Block]) -> Block:
        return make(self.array(operand))


def recipe_of(job: Job) -> Recipe:
    return design(job.kernel, lowering().layouts, _Constants(job), None)


def launched(job: Job) -> list[str]:
    return [found.name for found in recipe_of(job).launches]


def coded_jobs(graph: Graph, choices: Choices, name: str = "") -> list[Job]:
    """Kernels by an algorithm that begins so, all of which begin with machine code."""
    found = [job for job in jobs(graph, choices) if job.kernel.algorithm and job.kernel.algorithm.startswith(name)]
    assert all(launched(job)[0] == by_code() for job in found if job.kernel.algorithm == NAME)
    return found


def check(
    graph: Graph, kernels: int = 1, alone: bool = True, choices: Choices | None = None, tolerance: float = TOLERANCE,
    name: str = NAME, threads: Sequence[int] = (1, 2),
) -> list[Job]:  # fmt: skip
    """Runs the graph and compares; `kernels` of it are by that algorithm, `alone` if nothing else runs in them."""
    choices = choices or planned(graph, by(name))
    found = coded_jobs(graph, choices, name)
    assert len(found) == kernels
    assert not alone or all(set(launched(job)) == {by_code()} for job in found)
    graph.plans["onednn"] = choices
    for count in threads:
        program = OneDNNBackend(count).compile(graph)
        for seed in (1, 2):
            feeds = feeds_for(graph, seed)
            assert worst(program(feeds), evaluate_graph(graph, feeds, wide=True)) <= tolerance
    return found


def offered(graph: Graph) -> list[tuple[str, ...]]:
    """What is offered for each convolution, channels last."""
    kernels = [job.kernel for job in jobs(graph, planned(graph, lambda names: ""))]
    low = lowering()
    return [low.algorithms(k) for k in kernels if k.anchor is not None and k.anchor.op.name == "Conv"]


def depthwise(
    build: Build, x: Value, taps: tuple[int, int], bias: bool = True, strides: tuple[int, int] = (1, 1),
    pads: tuple[int, ...] | None = None, **attrs: AttrValue,
) -> Value:  # fmt: skip
    channels = x.type.dims[1]
    assert isinstance(channels, int)
    given = [x, build.weight(channels, 1, *taps), *([build.weight(channels)] if bias else [])]
    around = pads or (taps[0] // 2, taps[1] // 2, taps[0] // 2, taps[1] // 2)
    return build.op("Conv", *given, group=channels, strides=strides, pads=around, **attrs)


# ── depthwise convolutions ───────────────────────────────────────────────────────────────────────────────────────


IMAGES = [
    (1, 16, 7, 7), (2, 24, 9, 5), (1, 1, 6, 6), (3, 5, 4, 8), (1, 33, 1, 12), (2, 17, 12, 1), (1, 64, 14, 14),
    (4, 96, 3, 3),
]  # fmt: skip
WINDOWS = [((3, 3), (1, 1)), ((5, 5), (2, 2)), ((1, 7), (1, 1)), ((7, 1), (2, 1)), ((2, 3), (1, 2)), ((1, 1), (1, 1))]


@pytest.mark.parametrize("dims", IMAGES, ids=str)
@pytest.mark.parametrize("taps, strides", WINDOWS, ids=str)
@pytest.mark.parametrize("bias", (True, False))
def test_a_depthwise_convolution_is_one(
    dims: tuple[int, ...], taps: tuple[int, int], strides: tuple[int, int], bias: bool
) -> None:
    build = Build()
    check(build.outputs(depthwise(build, build.input(*dims), taps, bias, strides)))


@pytest.mark.parametrize("taps", [(1, 5), (7, 7), (11, 3), (3, 11), (2, 20)], ids=str)
@pytest.mark.parametrize("step", ("Relu 6", "Gelu"))
def test_rows_of_more_taps_than_there_are_registers_for_are_read_where_they_are_used(
    taps: tuple[int, int], step: str
) -> None:
    build = Build()
    value = depthwise(build, build.input(2, 21, 13, 22), taps)
    check(build.outputs(STEPS[step](build, value)))


def test_a_bias_that_is_computed_is_added() -> None:
    build = Build()
    given = build.input(2, 20, 6, 6), build.weight(20, 1, 3, 3), build.op("Relu", build.input(20))
    check(build.outputs(build.op("Conv", *given, group=20, pads=(1, 1, 1, 1))))


pairs = st.tuples(st.integers(1, 12), st.integers(1, 12))


@given(pairs, pairs, st.tuples(*[st.integers(1, 3)] * 2), st.tuples(*[st.integers(0, 13)] * 4), st.booleans())
@FUZZ
def test_it_is_offered_where_every_window_meets_the_picture_and_elsewhere_runs_as_usual(
    sizes: tuple[int, int], taps: tuple[int, int], strides: tuple[int, int], pads: tuple[int, ...], bias: bool
) -> None:
    out = [(sizes[a] + pads[a] + pads[2 + a] - taps[a]) // strides[a] + 1 for a in range(2)]
    assume(min(out) > 0)
    met = all(
        set(range(i * strides[a] - pads[a], i * strides[a] - pads[a] + taps[a])) & set(range(sizes[a]))
        for a in range(2) for i in range(out[a])
    )  # fmt: skip
    build = Build()
    graph = build.outputs(build.op("Relu", depthwise(build, build.input(2, 19, *sizes), taps, bias, strides, pads)))
    assert offered(graph) == [(NAME,) * met]
    check(graph, kernels=int(met))


@pytest.mark.parametrize("mode", ("SAME_UPPER", "SAME_LOWER", "VALID"))
@pytest.mark.parametrize("taps, strides", [((3, 3), (1, 1)), ((4, 5), (2, 2)), ((2, 2), (1, 2)), ((5, 3), (3, 1))])
def test_padding_that_the_model_leaves_to_us_is_that_of_onnxruntime(
    mode: str, taps: tuple[int, int], strides: tuple[int, int]
) -> None:
    weights = np.random.default_rng(0).standard_normal((20, 1, *taps)).astype(np.float32)
    node = onnx.helper.make_node("Conv", ["x", "w"], ["y"], auto_pad=mode, group=20, strides=strides)
    x, y = (onnx.helper.make_tensor_value_info(n, 1, s) for n, s in (("x", (2, 20, 9, 10)), ("y", None)))
    held = onnx.numpy_helper.from_array(weights, "w")
    model = onnx.helper.make_model(
        onnx.helper.make_graph([node], "g", [x], [y], [held]), ir_version=8,
        opset_imports=[onnx.helper.make_opsetid("", 17)],
    )  # fmt: skip
    graph = taso.load(model)
    check(graph)
    feeds = feeds_for(graph)
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    wanted = dict(zip([name for name, _ in graph.outputs], session.run(None, feeds), strict=True))
    assert worst(OneDNNBackend(1).compile(graph)(feeds), wanted) <= TOLERANCE


def _unfit() -> dict[str, Callable[[Build], Value]]:
    def conv(build: Build, weight: tuple[int, ...], group: int, **attrs: AttrValue) -> Value:
        return build.op("Conv", build.input(1, 32, 9, 9), build.weight(*weight), group=group, **attrs)

    return {
        "gaps": lambda b: conv(b, (32, 1, 3, 3), 32, dilations=(2, 2)),
        "a gap along one axis": lambda b: conv(b, (32, 1, 3, 3), 32, dilations=(1, 2)),
        "two filters a channel": lambda b: conv(b, (64, 1, 3, 3), 32),
        "two channels a group": lambda b: conv(b, (32, 2, 3, 3), 16),
        "no groups": lambda b: conv(b, (32, 32, 3, 3), 1),
        "computed filters": lambda b: b.op("Conv", b.input(1, 32, 9, 9), b.input(32, 1, 3, 3), group=32),
        "one axis": lambda b: b.op("Conv", b.input(1, 32, 9), b.weight(32, 1, 3), group=32),
        "three axes": lambda b: b.op("Conv", b.input(1, 32, 5, 5, 5), b.weight(32, 1, 3, 3, 3), group=32),
        "too many taps": lambda b: b.op("Conv", b.input(1, 8, 9, 30), b.weight(8, 1, 3, 21), group=8),
        "no images": lambda b: b.op("Conv", b.input(0, 8, 9, 30), b.weight(8, 1, 3, 3), group=8),
        "numbers of 64 bits": lambda b: b.op(
            # of one channel, that lies last wherever it lies
            "Conv", b.input(1, 1, 9, 9, dtype=DType.DOUBLE), b.constant(np.ones((1, 1, 3, 3))), group=1),
    }  # fmt: skip


@pytest.mark.parametrize("name", _unfit())
def test_it_is_not_offered_elsewhere(name: str) -> None:
    build = Build()
    graph = build.outputs(_unfit()[name](build))
    assert all(NAME not in names for names in offered(graph))
    check(graph, kernels=0)


def test_it_is_not_offered_where_channels_lie_in_blocks() -> None:
    build = Build()
    graph = build.outputs(build.op("Relu", depthwise(build, build.op("Relu", build.input(1, 32, 6, 6)), (3, 3))))
    for layout, names in ((BLOCKED, ()), (LAST, (NAME,))):
        lies = {at: layout for at, possible in possible_layouts(graph).items() if layout in possible}
        found = jobs(graph, Choices(structure(graph), lies))
        conv = next(j.kernel for j in found if j.kernel.anchor and j.kernel.anchor.op.name == "Conv")
        assert conv.results[0].layout == layout and lowering().algorithms(conv) == names


def test_costs_are_kept_apart_and_measured() -> None:
    build, backend = Build(), OneDNNBackend(1)
    value = depthwise(build, build.input(1, 24, 9, 9), (3, 3))
    (job,) = [j for j in jobs(build.outputs(build.op("Relu", value))) if j.kernel.algorithm == NAME]
    usual = replace(job.kernel, algorithm="")
    assert job.kernel.key != usual.key
    assert all(0 < backend.measure(k) < 10 for k in (job.kernel, usual))


# ── what stands behind ───────────────────────────────────────────────────────────────────────────────────────────


def channel(build: Build, v: Value, make: Callable[..., Value], lead: bool = False) -> Value:
    return make(*((1,) if lead else ()), v.type.static_shape[1], 1, 1)


Steps = dict[str, Callable[[Build, Value], Value]]
WITH_CODE: Steps = {
    **{name: lambda b, v, n=name: b.op(n, v) for name in (  # type: ignore[misc]  # of what is named it says nothing
        "Relu", "Sigmoid", "HardSwish", "Gelu", "HardSigmoid", "LeakyRelu", "Swish", "Neg")},
    "Relu 6": lambda b, v: b.op("Clip", v, min=0.0, max=6.0),
    "Clip below": lambda b, v: b.op("Clip", v, min=-0.25),
    "times sigmoid": lambda b, v: b.op("Mul", v, b.op("Sigmoid", v)),
    "times 3": lambda b, v: b.op("Mul", v, b.constant(3.0)),
    "minus 0.5": lambda b, v: b.op("Sub", v, b.constant(0.5)),
    "add": lambda b, v: b.op("Add", v, b.input(*v.type.static_shape)),
    "add before": lambda b, v: b.op("Add", b.input(*v.type.static_shape), v),
    "mul": lambda b, v: b.op("Mul", v, b.input(*v.type.static_shape)),
    "sub": lambda b, v: b.op("Sub", v, b.input(*v.type.static_shape)),
    "plus channel": lambda b, v: b.op("Add", v, channel(b, v, b.weight)),
    "times channel": lambda b, v: b.op("Mul", channel(b, v, b.positive, True), v),
    "minus channel": lambda b, v: b.op("Sub", v, channel(b, v, b.weight, True)),
    "plus channel computed": lambda b, v: b.op("Add", v, channel(b, v, b.input, True)),
}  # fmt: skip
WITHOUT: Steps = {
    **{name: lambda b, v, n=name: b.op(n, v) for name in ("Tanh", "Abs", "Softplus", "Elu")},  # type: ignore[misc]  # as above
    "Gelu by tanh": lambda b, v: b.op("Gelu", v, approximate="tanh"),
    "max": lambda b, v: b.op("Max", v, b.input(*v.type.static_shape)),
    "by channel": lambda b, v: b.op("Div", v, channel(b, v, b.positive)),
    "of each image": lambda b, v: b.op("Mul", v, b.input(*v.type.static_shape[:2], 1, 1)),
    "add constant": lambda b, v: b.op("Add", v, b.weight(*v.type.static_shape)),
}  # fmt: skip
STEPS: Steps = {**WITH_CODE, **WITHOUT}


def started(build: Build, anchor: str) -> Value:
    if anchor == "depthwise":
        return depthwise(build, build.input(2, 37, 9, 8), (3, 5), strides=(2, 1))
    return build.conv(build.input(2, 40, 12, 11), 37, 3)


def followed(build: Build, value: Value, steps: Sequence[str]) -> Value:
    for name in steps:
        value = STEPS[name](build, value)
    return value


ANCHORS = {"depthwise": (NAME, TOLERANCE), "tiled": ("winograd 4x4", TILED)}


@pytest.mark.parametrize("anchor", ANCHORS)
@pytest.mark.parametrize("step", STEPS)
def test_every_step_runs_behind_it(anchor: str, step: str) -> None:
    name, tolerance = ANCHORS[anchor]
    build = Build()
    graph = build.outputs(followed(build, started(build, anchor), [step]))
    (job,) = check(graph, alone=step in WITH_CODE, tolerance=tolerance, name=name)
    assert len(job.kernel.steps) == 1 + (step != "times sigmoid")
    if step in WITHOUT:
        assert set(launched(job)) != {by_code()}, "there is no code for it, or this list is out of date"


@pytest.mark.parametrize("dims", [(2, 1, 6, 6), (3, 20, 3, 3)], ids=str)
@pytest.mark.parametrize("step", ("add constant", "plus channel", "mul", "times channel computed"))
def test_where_layouts_are_alike_constants_are_added_by_code(dims: tuple[int, ...], step: str) -> None:
    """Of one channel, or one pixel: a constant of the result's shape then lies as it does, wherever that is."""
    build = Build()
    value = depthwise(build, build.input(*dims), (3, 3), pads=(0, 0, 0, 0))
    factor = channel(build, value, build.input)
    made = build.op("Mul", value, factor) if "computed" in step else STEPS[step](build, value)
    (job,) = check(build.outputs(build.op("Relu", made)))
    assert not recipe_of(job).shares & {i for i, v in enumerate(job.operands) if v.node.constant}


@pytest.mark.parametrize("anchor", ANCHORS)
@pytest.mark.parametrize("one", ["Relu 6", "add", "times channel", "Tanh", "sub", "of each image"])
@pytest.mark.parametrize("two", ["Swish", "add", "plus channel computed", "max", "mul", "Gelu"])
def test_steps_behind_what_has_no_code_run_too(anchor: str, one: str, two: str) -> None:
    name, tolerance = ANCHORS[anchor]
    build = Build()
    graph = build.outputs(followed(build, started(build, anchor), [one, two, "Relu"]))
    check(graph, alone={one, two} <= set(WITH_CODE), tolerance=tolerance, name=name)


@pytest.mark.parametrize("anchor", ANCHORS)
def test_more_steps_than_there_are_places_for_run_behind(anchor: str) -> None:
    name, tolerance = ANCHORS[anchor]
    for count in (15, 16, 17, 40):
        build = Build()
        steps = (["plus channel", "Clip below", "add", "times 3", "minus channel", "Sigmoid"] * 8)[:count]
        graph = build.outputs(followed(build, started(build, anchor), steps))
        (job,) = check(graph, alone=count <= 16, tolerance=2 * tolerance, name=name)
        assert len(job.kernel.steps) == count + 1
        assert (set(launched(job)) == {by_code()}) == (count <= 16), "there are places for 16"


@pytest.mark.parametrize("anchor", ANCHORS)
@pytest.mark.parametrize("step", ["Add", "Mul", "Sub"])
def test_what_is_convolved_may_be_combined_with_the_result(anchor: str, step: str) -> None:
    name, tolerance = ANCHORS[anchor]
    build = Build()
    x = build.op("Relu", build.input(2, 40, 12, 12))
    value = depthwise(build, x, (3, 3)) if anchor == "depthwise" else build.conv(x, 40, 3)
    graph = build.outputs(build.op("Relu", build.op(step, value, x)))
    (job,) = check(graph, tolerance=tolerance, name=name)
    assert not recipe_of(job).shares, "the data would be overwritten while it is read"


# ── tiles of all sizes ───────────────────────────────────────────────────────────────────────────────────────────


TILED_CASES = [
    # the tile, then the filter: F(2×2, 3×3), F(4×4, 3×3), F(6, 7) and F(4, 5) along either axis
    ((2, 2), (3, 3)), ((4, 4), (3, 3)), ((1, 6), (1, 7)), ((6, 1), (7, 1)), ((1, 4), (1, 5)), ((4, 1), (5, 1)),
]  # fmt: skip


@pytest.mark.parametrize("tile, taps", TILED_CASES, ids=str)
@pytest.mark.parametrize("channels, filters", [(33, 45), (5, 3), (12, 20)], ids=str)
@pytest.mark.parametrize("behind", [(), ("add", "Sigmoid", "by channel")], ids=str)
def test_tiles_have_channels_that_fill_no_register(
    tile: tuple[int, int], taps: tuple[int, int], channels: int, filters: int, behind: tuple[str, ...]
) -> None:
    pads = taps[0] // 2, taps[1] // 2, taps[0] // 2, taps[1] // 2
    case = Case((2, channels, 13, 11), filters, taps, pads, behind=behind)
    graph = case.graph()
    arrays, wanted = operands_of(case, graph)
    for threads in (1, 2):
        found, recipe = run(case.kernel(graph, f"winograd {tile[0]}x{tile[1]}"), arrays, threads)
        assert {made.name for made in recipe.launches} == {by_code()}
        assert close(found, wanted, OF_TILES[max(tile)])


# ── in place ─────────────────────────────────────────────────────────────────────────────────────────────────────


def kernel_with_arrays(graph: Graph, name: str) -> tuple[Kernel, list[Array], Array]:
    (job,) = [job for job in jobs(graph, planned(graph, by(name))) if job.kernel.algorithm == name]
    feeds = feeds_for(graph)
    named = dict(zip(graph.inputs, graph.input_names, strict=True))
    arrays = [evaluated(v) if v.node.constant else feeds[named[v]] for v in job.operands]
    (wanted,) = evaluate_graph(graph, feeds, wide=True).values()
    return job.kernel, arrays, wanted


def close(found: Array, wanted: Array, tolerance: float) -> bool:
    return float(np.abs(found - wanted).max()) <= tolerance * float(np.abs(wanted).max())


@pytest.mark.parametrize("anchor", ANCHORS)
@pytest.mark.parametrize("steps", [("add",), ("add", "Relu"), ("Relu", "add before"), ("times channel", "add", "Gelu"),
                                   ("add", "Tanh"), ("mul", "add")], ids=str)  # fmt: skip
@pytest.mark.parametrize("threads", (1, 2))
def test_a_result_takes_the_memory_of_what_is_added(anchor: str, steps: tuple[str, ...], threads: int) -> None:
    name, tolerance = ANCHORS[anchor]
    build = Build()
    graph = build.outputs(followed(build, started(build, anchor), steps))
    kernel, arrays, wanted = kernel_with_arrays(graph, name)
    (added,) = overwritable(kernel)
    apart, recipe = run(kernel, arrays, threads)
    assert recipe.shares == {added}
    here, _ = run(kernel, arrays, threads, in_place=added)
    assert close(apart, wanted, tolerance) and np.array_equal(apart, here)
    with pytest.raises(NotInPlace):
        run(kernel, arrays, in_place=0)


@pytest.mark.parametrize("anchor", ANCHORS)
def test_what_is_added_behind_a_step_without_code_keeps_its_memory(anchor: str) -> None:
    name, tolerance = ANCHORS[anchor]
    build = Build()
    graph = build.outputs(followed(build, started(build, anchor), ("Tanh", "add")))
    kernel, arrays, wanted = kernel_with_arrays(graph, name)
    found, recipe = run(kernel, arrays)
    assert close(found, wanted, tolerance) and not recipe.shares


@pytest.mark.parametrize("anchor", ANCHORS)
def test_what_lies_otherwise_than_the_result_keeps_its_memory(anchor: str) -> None:
    name, tolerance = ANCHORS[anchor]
    build = Build()
    graph = build.outputs(followed(build, started(build, anchor), ("add", "Relu")))
    kernel, arrays, wanted = kernel_with_arrays(graph, name)
    other = replace(kernel, operands=(*kernel.operands[:-1], replace(kernel.operands[-1], layout=PLAIN)))
    found, recipe = run(other, arrays)
    assert close(found, wanted, tolerance) and not recipe.shares


def test_residuals_in_a_row_run_in_few_buffers() -> None:
    """Each sum may take the memory of the one before, which nobody reads any more."""
    build = Build()
    x = build.op("Relu", build.input(2, 40, 8, 8))
    for _ in range(6):
        x = build.op("Add", depthwise(build, build.op("Sigmoid", x), (3, 3)), x)
    graph = build.outputs(build.op("GlobalAveragePool", x))
    found = check(graph, kernels=6, tolerance=2e-5)
    assert all(recipe_of(job).shares for job in found)


@pytest.mark.parametrize("anchor", ("depthwise", "tiled", "pointwise"))
def test_launches_move_to_other_buffers_as_a_whole(anchor: str) -> None:
    """As part of another recipe, which has scratch memory and constants of its own and its operands in other places."""
    name, tolerance = {**ANCHORS, "pointwise": ("panels", TOLERANCE)}[anchor]
    build = Build()
    value = build.conv(build.input(2, 40, 12, 11), 37, 1) if anchor == "pointwise" else started(build, anchor)
    graph = build.outputs(followed(build, value, ("add", "times channel", "mul")))
    (job,) = [job for job in jobs(graph, planned(graph, by(name))) if job.kernel.algorithm == name]
    kernel, arrays, wanted = kernel_with_arrays(graph, name)
    inner, outer, count = recipe_of(job), Recipe(), len(arrays)
    outer.add_scratch(64)
    outer.add_constant(Block.of(np.zeros(5, np.float32)))
    turned = [Place(OPERAND, count - 1 - i) for i in range(count)]
    embed(outer, inner, turned, [Place(RESULT, 1)])
    lies = [np.array(a if a.ndim < 4 else np.moveaxis(a, 1, -1), np.float32, order="C") for a in arrays]
    scratch = [np.full(size // 4, np.nan, np.float32) for size in outer.scratch]
    (n, channels, height, width), = [o.type.static_shape for o in kernel.results]
    out = np.full((n, height, width, channels), np.nan, np.float32)
    calls = outer.bind([a.ctypes.data for a in reversed(lies)], [0, out.ctypes.data], [a.ctypes.data for a in scratch])
    assert {found.name for found in outer.launches} == {by_code()} and not any(call() for call, _ in calls)
    assert close(np.moveaxis(out, -1, 1), wanted, tolerance)


# ── blocks of models ─────────────────────────────────────────────────────────────────────────────────────────────


def mobile_block(build: Build, x: Value, wide: int, out: int, stride: int = 1, act: str = "Relu 6") -> Value:
    """Pointwise, depthwise, pointwise, added to what came in where that is possible; after Sandler et al. 2018."""
    y = STEPS[act](build, build.conv(x, wide, 1))
    y = STEPS[act](build, depthwise(build, y, (3, 3), strides=(stride, stride)))
    y = build.conv(y, out, 1)
    return build.op("Add", x, y) if y.type == x.type else y


def residual_block(build: Build, x: Value, narrow: int) -> Value:
    """Pointwise, 3 × 3, pointwise, added to what came in; after He et al. 2015."""
    channels = x.type.dims[1]
    assert isinstance(channels, int)
    y = build.op("Relu", build.conv(x, narrow, 1))
    y = build.op("Relu", build.conv(y, narrow, 3))
    return build.op("Relu", build.op("Add", build.conv(y, channels, 1), x))


def mobile(batch: int | str = 1) -> Graph:
    build = Build()
    x = STEPS["HardSwish"](build, build.conv(build.input(batch, 3, 24, 24), 16, 3, strides=(2, 2)))
    for wide, out, stride, act in ((48, 24, 2, "Relu 6"), (96, 24, 1, "HardSwish"), (96, 24, 1, "times sigmoid")):
        x = mobile_block(build, x, wide, out, stride, act)
    return build.outputs(build.op("GlobalAveragePool", x))


def resnet(batch: int | str = 1) -> Graph:
    build = Build()
    x = build.op("Relu", build.conv(build.input(batch, 3, 24, 24), 64, 3, strides=(2, 2)))
    for narrow in (32, 48, 32):
        x = residual_block(build, x, narrow)
    return build.outputs(build.op("GlobalAveragePool", x))


MODELS = {"mobile": mobile, "resnet": resnet}


def whatever(names: tuple[str, ...]) -> str:
    """Machine code of any kind, rather than the usual way."""
    return names[-1] if names else ""


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("batch", (1, 3))
def test_blocks_of_models_by_machine_code_are_what_they_are_by_definition(name: str, batch: int) -> None:
    graph = MODELS[name](batch)
    choices = planned(graph, whatever)
    used = {job.kernel.algorithm for job in jobs(graph, choices)}
    assert used >= ({"panels", NAME} if name == "mobile" else {"panels", "winograd 4x4"})
    for job in jobs(graph, choices):
        if job.kernel.algorithm:
            assert set(launched(job)) == {by_code()}
    check(graph, kernels=3 if name == "mobile" else 0, choices=choices, tolerance=TILED)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("threads", (1, 2))
def test_a_plan_is_for_every_size_of_a_batch(name: str, threads: int) -> None:
    twin = MODELS[name](2)
    graph = MODELS[name]("n")
    assert structure(graph) == structure(twin)
    graph.plans["onednn"] = planned(twin, whatever)
    program = OneDNNBackend(threads).compile(graph)
    for size in (2, 1, 5, 2, 3):
        feeds = feeds_for(graph, size, n=size)
        bound = MODELS[name](size)
        assert [j.kernel.algorithm for j in jobs(bound, graph.plans["onednn"]) if j.kernel.algorithm]
        assert worst(program(feeds), evaluate_graph(bound, feeds, wide=True)) <= TILED


@pytest.mark.parametrize("threads", (1, 2))
def test_two_programs_run_at_the_same_time(threads: int) -> None:
    works = []
    for name, build in MODELS.items():
        graph = build(1)
        graph.plans["onednn"] = planned(graph, whatever)
        # two of each, of whose kernels the code is one
        for seed in (1, 2):
            program, feeds = OneDNNBackend(threads).compile(graph), feeds_for(graph, seed)
            wanted = program(feeds)
            assert worst(wanted, evaluate_graph(graph, feeds, wide=True)) <= TILED, name
            works.append(lambda p=program, f=feeds, w=wanted: all(np.array_equal(p(f)[k], v) for k, v in w.items()))
    assert not both_at_once(works, 30)


def test_one_program_may_be_called_from_two_threads() -> None:
    graph = mobile()
    graph.plans["onednn"] = planned(graph, whatever)
    program, given = OneDNNBackend(1).compile(graph), [feeds_for(graph, seed) for seed in (1, 2)]
    wanted = [program(feeds)["y0"] for feeds in given]
    assert not np.array_equal(*wanted)
    works = [lambda f=f, w=w: np.array_equal(program(f)["y0"], w) for f, w in zip(given, wanted, strict=True)]
    assert not both_at_once(works, 30)


# ── plans in files ───────────────────────────────────────────────────────────────────────────────────────────────


def in_a_file(name: str) -> taso.Graph:
    """A model as it is read from a file, with a plan."""
    graph = taso.load(onnx_export.export(MODELS[name](1)))
    graph.plans["onednn"] = planned(graph, whatever)
    return graph


def kinds(graph: Graph) -> list[str]:
    """The algorithm of each kernel that a graph runs by."""
    plan = graph.plans["onednn"]
    assert isinstance(plan, Choices)
    return [job.kernel.algorithm for job in jobs(graph, plan)]


def _no_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coded, "runs_here", lambda: False)


def _no_avx2(monkeypatch: pytest.MonkeyPatch) -> None:
    class Other:
        isa = "avx"
        parallel_address = 1

    monkeypatch.setattr(coded, "library", Other)


def _no_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Machine code that is run is an error."""

    def refuse(self: object, address: object) -> None:
        raise AssertionError("machine code was bound")

    monkeypatch.setattr(launch.CodeLaunch, "bind", refuse)


@pytest.mark.parametrize("name", MODELS)
def test_a_plan_goes_through_a_file(name: str, tmp_path: Path) -> None:
    graph = in_a_file(name)
    path = tmp_path / "model.onnx"
    onnx.save(taso.export_onnx(graph), path)
    back = taso.load(path)
    assert kinds(back) == kinds(graph) and {"panels"} < set(kinds(back)) - {""}
    feeds = feeds_for(graph)
    found = OneDNNBackend(1).compile(back)(feeds)
    assert worst(found, OneDNNBackend(1).compile(graph)(feeds)) == 0, "the same kernels, the same bits"
    assert worst(found, evaluate_graph(graph, feeds, wide=True)) <= TILED


@pytest.mark.parametrize("without", (_no_code, _no_avx2))
@pytest.mark.parametrize("name", MODELS)
def test_where_machine_code_does_not_run_the_plan_of_a_file_runs_by_other_kernels(
    name: str, without: Callable[[pytest.MonkeyPatch], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph = in_a_file(name)
    path = tmp_path / "model.onnx"
    onnx.save(taso.export_onnx(graph), path)
    feeds = feeds_for(graph)
    wanted = evaluate_graph(graph, feeds, wide=True)
    _no_launch(monkeypatch)
    with pytest.raises(AssertionError, match="machine code"):
        OneDNNBackend(1).compile(taso.load(path))
    without(monkeypatch)
    back = taso.load(path)
    # tiles are there without code, too
    assert {kind.split()[0] for kind in kinds(back) if kind} == (set() if name == "mobile" else {"winograd"})
    for threads in (1, 2):
        assert worst(OneDNNBackend(threads).compile(back)(feeds), wanted) <= TILED
    again = taso.load(taso.export_onnx(back))
    monkeypatch.undo()
    assert kinds(again) == kinds(graph), "what cannot run here stays in the plan"


# ── graphs at random ─────────────────────────────────────────────────────────────────────────────────────────────


class _Growing:
    """A graph of convolutions of all kinds, and of what stands between them, at random."""

    def __init__(self, seed: int) -> None:
        self.chance, self.build = random.Random(seed), Build(seed % 1000)
        channels, size = self.chance.choice([16, 32, 33, 64]), self.chance.choice([4, 9, 12, 14])
        width = self.chance.choice([size, size, 5])
        self.values = [self.build.input(self.chance.choice([1, 1, 2]), channels, size, width)]
        for _ in range(self.chance.randint(4, 12)):
            self.grow()

    def grow(self) -> None:
        build, chance = self.build, self.chance
        value = chance.choice(self.values[-3:])
        kind = chance.random()
        alike = [v for v in self.values if v.type == value.type and v is not value]
        if kind < 0.55:
            self.values.append(self.convolved(value))
        elif alike and kind < 0.75:
            # half of the sum, so that nothing grows
            total = build.op(chance.choice(["Add", "Sub", "Add"]), value, chance.choice(alike))
            self.values.append(build.op("Mul", total, build.constant(0.5)) if chance.random() < 0.5 else total)
        else:
            self.values.append(STEPS[chance.choice(list(STEPS))](build, value))

    def convolved(self, value: Value) -> Value:
        build, chance, (_, channels, *sizes) = self.build, self.chance, value.type.static_shape
        kind, bias = chance.random(), chance.random() < 0.6
        if kind < 0.4:
            taps = chance.choice([(3, 3), (5, 5), (3, 1), (1, 3), (2, 2), (7, 7)])
            strides = chance.choice([(1, 1), (1, 1), (2, 2), (1, 2)]) if min(sizes) > 3 else (1, 1)
            pads = (taps[0] // 2, taps[1] // 2, (taps[0] - 1) // 2, (taps[1] - 1) // 2)
            # of stride 1 the size stays
            return depthwise(build, value, taps, bias, strides, pads)
        out = chance.choice([channels, channels, 32, 48, 24])
        return build.conv(value, out, 3 if kind > 0.6 else 1, bias=bias)

    def graph(self) -> Graph:
        consumed = {v for node in self.build.graph.operators for v in node.inputs}
        ends = [v for v in self.values if v not in consumed and v.node.op.name != "Input"]
        return self.build.outputs(*(ends or self.values[-1:]))


@given(st.integers(0, (1 << 32) - 1))
@FUZZ
def test_random_graphs_by_random_plans_are_what_they_are_by_definition(seed: int) -> None:
    graph = _Growing(seed).graph()
    graph.plans["onednn"] = choices = drawn(graph, seed)
    coded_jobs(graph, choices)
    feeds = feeds_for(graph, seed % 100)
    wanted = evaluate_graph(graph, feeds, wide=True)
    usual = replace(choices, algorithms={})
    for threads in (1, 2):
        got = OneDNNBackend(threads).compile(graph)(feeds)
        for name, array in wanted.items():
            assert np.isfinite(got[name]).all()
            # values are about 1; where they cancel out rounding is all there is
            assert np.abs(got[name] - array).max() <= 2e-4 * max(np.abs(array).max(), 0.1), kinds(graph)
    assert [j.kernel.steps for j in jobs(graph, usual)] == [j.kernel.steps for j in jobs(graph, choices)]


def test_the_random_graphs_have_kernels_of_all_kinds() -> None:
    counts = dict.fromkeys(("panels", NAME, "winograd"), 0)
    for seed in range(40):
        graph = _Growing(seed).graph()
        for job in jobs(graph, drawn(graph, seed)):
            if job.kernel.algorithm:
                counts[job.kernel.algorithm.split()[0]] += 1
    assert min(counts.values()) >= 20, counts


# ── the checks see what is wrong ─────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("anchor", ANCHORS)
@pytest.mark.parametrize("dropped", (0, 1, 2))
def test_a_step_that_is_left_out_is_seen(anchor: str, dropped: int, monkeypatch: pytest.MonkeyPatch) -> None:
    name, tolerance = ANCHORS[anchor]
    build = Build()
    graph = build.outputs(followed(build, started(build, anchor), ("times channel", "add", "Relu")))
    check(graph, tolerance=tolerance, name=name)
    bind, place = launch.CodeLaunch.bind, dropped + 1

    def fewer(self: launch.CodeLaunch, address: Callable[[Place], int]) -> tuple[Call, object]:
        of_tiles = isinstance(self.coded, Transformed)
        problem = self.coded.transform if isinstance(self.coded, Transformed) else self.coded
        posts = getattr(problem, "posts", ())
        if not posts:
            return bind(self, address)
        # bias, factor and sum have operands
        others = self.others[:place] + self.others[place + 1 :] if place < 3 else self.others
        less = replace(problem, posts=posts[:place] + posts[place + 1 :])  # type: ignore[type-var]  # a dataclass
        coded = replace(self.coded, transform=less) if of_tiles else less  # type: ignore[type-var]  # one with posts
        return bind(replace(self, coded=coded, others=others), address)

    monkeypatch.setattr(launch.CodeLaunch, "bind", fewer)
    with pytest.raises(AssertionError):
        check(graph, tolerance=tolerance, name=name)


def test_a_filter_that_lies_otherwise_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    build = Build()
    graph = build.outputs(started(build, "depthwise"))
    check(graph)
    right = channelwise.by_vector
    monkeypatch.setattr(channelwise, "by_vector", lambda filters, isa: right(filters[:, ::-1, :], isa))
    with pytest.raises(AssertionError):
        check(graph)
