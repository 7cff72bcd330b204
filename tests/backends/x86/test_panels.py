"""The algorithm `panels` of the oneDNN backend, in kernels and in graphs, against the operators' definitions."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from choices import drawn, lowering, possible_layouts
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from machine_code import isa
from test_onednn_executor import Array, Build, feeds_for, worst
from test_winograd import run

import taso.graph.ops  # noqa: F401  # registers the operators
from taso.backends.lowering import BLOCKED, LAST, PLAIN, Choices, Job, Kernel, lower, structure
from taso.backends.onednn import coded, panels
from taso.backends.onednn.backend import OneDNNBackend
from taso.backends.onednn.kernels import NotInPlace, design
from taso.backends.onednn.needs import overwritable
from taso.backends.onednn.recipe import Recipe
from taso.backends.places import Block
from taso.backends.x86.functions import Function, knows
from taso.backends.x86.products import Product
from taso.graph.evaluate import evaluate_graph
from taso.graph.graph import Graph, Value
from taso.graph.operator import Weight

pytestmark = pytest.mark.usefixtures("code_of_isa")

NAME = panels.NAME
TOLERANCE = 5e-6
"""max|a − b| / max|b|: some times what sums of a thousand terms in float32 lose."""
PRODUCTS = frozenset({"Conv", "MatMul", "Gemm"})


# ── plans and what they make ─────────────────────────────────────────────────────────────────────────────────────


def everywhere(graph: Graph) -> Choices:
    """Channels last from convolutions on, and panels for every kernel that has them."""
    last: set[Value] = set()
    possible, lies = possible_layouts(graph), {}
    for place, node in enumerate(graph.nodes):
        for v in node.outputs:
            if LAST in possible.get((place, v.index), ()) and (node.op.name == "Conv" or last & set(node.inputs)):
                last.add(v)
                lies[place, v.index] = LAST
    return Choices(structure(graph), lies, {}, {place: NAME for place in range(len(graph.nodes))})


def jobs(graph: Graph, choices: Choices | None = None) -> list[Job]:
    return list(lower(graph, lowering(), choices or everywhere(graph)).jobs)


def constants(job: Job) -> list[Array | None]:
    """Constant operands of a job, None for the others."""
    return [evaluated(v) if v.node.constant else None for v in job.operands]


def evaluated(value: Value) -> Array:
    held = value.node.attrs["data"]
    assert isinstance(held, Weight)
    return held.array()


class _Constants:
    def __init__(self, arrays: Sequence[Array | None]) -> None:
        self._arrays = arrays

    def array(self, operand: int) -> Array:
        found = self._arrays[operand]
        assert found is not None
        return found

    def keep(self, operand: int, label: str, make: Callable[[Array], Block]) -> Block:
        return make(self.array(operand))


def recipe_of(job: Job, in_place: int | None = None) -> Recipe:
    return design(job.kernel, lowering().layouts, _Constants(constants(job)), in_place)


def launched(job: Job) -> list[str]:
    return [launch.name for launch in recipe_of(job).launches]


def check(
    graph: Graph, kernels: int = 1, alone: bool = True, threads: Sequence[int] = (1, 2), choices: Choices | None = None,
    tolerance: float = TOLERANCE,
) -> list[Job]:  # fmt: skip
    """Runs the graph by panels and compares; `kernels` of it are such, `alone` if nothing else runs in them."""
    choices = choices or everywhere(graph)
    found = jobs(graph, choices)
    chosen = [job for job in found if job.kernel.algorithm == NAME]
    assert len(chosen) == kernels
    for job in chosen:
        names = launched(job)
        code = f"x86:{isa().name}"
        assert names[0] == code and not any(word in name for name in names for word in ("evaluated", "numpy"))
        assert not alone or set(names) == {code}
    graph.plans["onednn"] = choices
    for count in threads:
        program = OneDNNBackend(count).compile(graph)
        for seed in (1, 2):
            feeds = feeds_for(graph, seed)
            assert worst(program(feeds), evaluate_graph(graph, feeds, wide=True)) <= tolerance
    return chosen


def offered(graph: Graph) -> list[tuple[str, ...]]:
    """What is offered for each kernel with a product."""
    choices = everywhere(graph)
    bare = replace(choices, algorithms={})
    kernels = [job.kernel for job in jobs(graph, bare)]
    return [lowering().algorithms(k) for k in kernels if k.anchor is not None and k.anchor.op.name in PRODUCTS]


# ── anchors ──────────────────────────────────────────────────────────────────────────────────────────────────────


MATRICES = [
    ((4, 8), (8, 16)), ((5, 7), (7, 33)), ((1, 4, 3), (3, 5)), ((2, 3, 20), (20, 48)), ((2, 3, 4, 9), (9, 31)),
    ((197, 64), (64, 100)), ((1, 49, 96), (96, 1)), ((6, 1), (1, 40)), ((3, 5, 8), (1, 8, 20)),
    ((4, 8), (1, 1, 8, 20)), ((30, 1024), (1024, 17)), ((4, 1), (1, 1)),
]  # fmt: skip


@pytest.mark.parametrize("left, right", MATRICES, ids=str)
def test_a_product_of_matrices_is_one(left: tuple[int, ...], right: tuple[int, ...]) -> None:
    build = Build()
    check(build.outputs(build.op("MatMul", build.input(*left), build.weight(*right))))


BIASES: list[tuple[int, ...] | None] = [None, (33,), (1, 33), (9, 1), (9, 33), (), (1,), (1, 1)]


@pytest.mark.parametrize("bias", BIASES, ids=str)
@pytest.mark.parametrize("turned", (0, 1))
@pytest.mark.parametrize("alpha, beta", [(1.0, 1.0), (0.5, 1.0), (1.0, 2.0), (-3.0, 0.25), (1.0, 0.0)])
def test_a_gemm_adds_whatever_is_constant(
    bias: tuple[int, ...] | None, turned: int, alpha: float, beta: float
) -> None:
    build = Build()
    given = [build.input(9, 20), build.weight(33, 20) if turned else build.weight(20, 33)]
    given += [] if bias is None else [build.weight(*bias)]
    check(build.outputs(build.op("Gemm", *given, transB=turned, alpha=alpha, beta=beta)))


@pytest.mark.parametrize("rows, columns", [(9, 1), (4, 4), (4, 16)])
@pytest.mark.parametrize("shape", ["row", "column", "all"])
def test_sizes_that_are_alike_are_not_taken_for_each_other(rows: int, columns: int, shape: str) -> None:
    dims = {"row": (1, columns), "column": (rows, 1), "all": (rows, columns)}[shape]
    build = Build()
    value = build.op("Gemm", build.input(rows, 5), build.weight(5, columns), build.weight(*dims))
    check(build.outputs(build.op("Relu", value)))


@pytest.mark.parametrize("dims", [(33,), (1, 33)])
def test_a_gemm_adds_a_row_that_is_computed(dims: tuple[int, ...]) -> None:
    build = Build()
    check(build.outputs(build.op("Gemm", build.input(9, 20), build.weight(20, 33), build.input(*dims))))


@pytest.mark.parametrize("dims, beta", [((9, 33), 1.0), ((9, 1), 1.0), ((), 1.0), ((1, 1), 1.0), ((33,), 0.5)], ids=str)
def test_what_else_a_gemm_adds_that_is_computed_is_left_to_the_usual_way(dims: tuple[int, ...], beta: float) -> None:
    build = Build()
    value = build.op("Gemm", build.input(9, 20), build.weight(20, 33), build.input(*dims), beta=beta)
    check(build.outputs(value), kernels=0)


IMAGES = [
    ((1, 16, 5, 7), 32), ((2, 3, 4, 4), 5), ((1, 64, 1, 4), 17), ((1, 8, 14, 14), 24), ((3, 20, 2, 2), 1),
    ((2, 1, 3, 3), 16), ((1, 12, 50), 20), ((2, 6, 3, 4, 5), 18), ((4, 10, 1, 1), 33), ((1, 256, 7, 7), 40),
]  # fmt: skip


@pytest.mark.parametrize("bias", (True, False))
@pytest.mark.parametrize("data, filters", IMAGES, ids=str)
def test_a_convolution_of_one_tap_is_one(data: tuple[int, ...], filters: int, bias: bool) -> None:
    build = Build()
    check(build.outputs(build.conv(build.input(*data), filters, bias=bias)))


def test_a_convolution_adds_a_bias_that_is_computed() -> None:
    build = Build()
    value = build.op("Conv", build.input(1, 8, 5, 5), build.weight(20, 8, 1, 1), build.op("Relu", build.input(20)))
    check(build.outputs(value))


@pytest.mark.parametrize("inner", (1025, 1500, 2048, 2049, 3100))
@pytest.mark.parametrize("behind", [(), ("plus channel",), ("add",), ("add", "Relu", "times channel", "Gelu")], ids=str)
def test_long_sums_are_taken_in_parts(inner: int, behind: tuple[str, ...]) -> None:
    for anchor in ("MatMul", "Gemm", "Gemm whole", "Conv"):
        build = Build()
        value = followed(build, started(build, anchor, inner), behind)
        graph = build.outputs(value)
        (job,) = check(graph)
        assert len(launched(job)) == -(-inner // 1024)
        assert not recipe_of(job).shares, "what is added would be overwritten by the first part"


# ── what stands behind ───────────────────────────────────────────────────────────────────────────────────────────


def started(build: Build, anchor: str, inner: int = 12) -> Value:
    if anchor == "Conv":
        return build.conv(build.input(2, inner, 3, 5), 37)
    x = build.input(2, 7, inner) if anchor == "MatMul" else build.input(14, inner)
    if anchor == "MatMul":
        return build.op("MatMul", x, build.weight(inner, 37))
    bias = build.weight(14, 37) if anchor == "Gemm whole" else build.weight(37)
    return build.op("Gemm", x, build.weight(37, inner), bias, transB=1, alpha=0.75)


def per_channel(build: Build, value: Value, make: Callable[..., Value], lead: bool = False) -> Value:
    dims = value.type.static_shape
    if len(dims) == 4:
        return make(1, dims[1], 1, 1) if lead else make(dims[1], 1, 1)
    return make(*(1,) * (len(dims) - 1), dims[-1]) if lead else make(dims[-1])


STEPS: dict[str, Callable[[Build, Value], Value]] = {
    **{name: lambda b, v, n=name: b.op(n, v) for name in (  # type: ignore[misc]  # of what is named it says nothing
        "Relu", "Sigmoid", "HardSwish", "Gelu", "HardSigmoid", "LeakyRelu", "Swish", "Tanh", "Abs", "Softplus", "Neg")},
    "Clip": lambda b, v: b.op("Clip", v, min=0.0, max=0.5),
    "Clip below": lambda b, v: b.op("Clip", v, min=-0.25),
    "Clip above": lambda b, v: b.op("Clip", v, max=0.25),
    "Clip wrongly": lambda b, v: b.op("Clip", v, min=0.5, max=-0.5),
    "Swish 1.7": lambda b, v: b.op("Swish", v, alpha=1.7),
    "Gelu by tanh": lambda b, v: b.op("Gelu", v, approximate="tanh"),
    "times 3": lambda b, v: b.op("Mul", v, b.constant(3.0)),
    "plus 0.5": lambda b, v: b.op("Add", b.constant(0.5), v),
    "minus 0.5": lambda b, v: b.op("Sub", v, b.constant(0.5)),
    "by 4": lambda b, v: b.op("Div", v, b.constant(4.0)),
    "by 3": lambda b, v: b.op("Div", v, b.constant(3.0)),
    "add": lambda b, v: b.op("Add", v, b.input(*v.type.static_shape)),
    "add before": lambda b, v: b.op("Add", b.input(*v.type.static_shape), v),
    "mul": lambda b, v: b.op("Mul", v, b.input(*v.type.static_shape)),
    "sub": lambda b, v: b.op("Sub", v, b.input(*v.type.static_shape)),
    "max": lambda b, v: b.op("Max", v, b.input(*v.type.static_shape)),
    "add constant": lambda b, v: b.op("Add", v, b.weight(*v.type.static_shape)),
    "plus channel": lambda b, v: b.op("Add", v, per_channel(b, v, b.weight)),
    "times channel": lambda b, v: b.op("Mul", per_channel(b, v, b.positive, True), v),
    "minus channel": lambda b, v: b.op("Sub", v, per_channel(b, v, b.weight, True)),
    "plus channel computed": lambda b, v: b.op("Add", v, per_channel(b, v, b.input, True)),
    "times channel computed": lambda b, v: b.op("Mul", v, per_channel(b, v, b.input)),
    "by channel": lambda b, v: b.op("Div", v, per_channel(b, v, b.positive)),
    "times row": lambda b, v: b.op("Mul", v, b.input(*v.type.static_shape[:-1], 1)),
    "times columns of some": lambda b, v: b.op("Mul", v, b.input(*_columns_of_some(v))),
    "times number computed": lambda b, v: b.op("Mul", v, b.input(1)),
}


def _columns_of_some(value: Value) -> tuple[int, ...]:
    """Columns that are not the same for all rows: channels of each image, or rows of a matrix for a batch of them."""
    dims = value.type.static_shape
    return (*dims[:2], 1, 1) if len(dims) == 4 else dims[1:] if len(dims) == 3 else (1, *dims[1:])


BY_CODE = {
    "Relu", "Sigmoid", "HardSwish", "Gelu", "HardSigmoid", "LeakyRelu", "Swish", "Neg", "Clip", "Clip below",
    "Clip above", "Clip wrongly", "Swish 1.7", "times 3", "plus 0.5", "minus 0.5", "by 4", "add", "add before", "mul",
    "sub", "plus channel", "times channel", "minus channel", "plus channel computed", "times channel computed",
}  # fmt: skip


def followed(build: Build, value: Value, steps: Sequence[str]) -> Value:
    for name in steps:
        value = STEPS[name](build, value)
    return value


ANCHORS = ("MatMul", "Gemm", "Gemm whole", "Conv")


# one is evaluated by definition behind any convolution; of a single matrix columns are the same for all rows
LEFT_OUT = {("Conv", "times row"), ("Gemm", "times columns of some"), ("Gemm whole", "times columns of some")}


@pytest.mark.parametrize("anchor, step", [pair for pair in product(ANCHORS, STEPS) if pair not in LEFT_OUT])
def test_every_step_runs_behind_it(anchor: str, step: str) -> None:
    build = Build()
    (job,) = check(build.outputs(followed(build, started(build, anchor), [step])), alone=step in BY_CODE)
    assert len(job.kernel.steps) == 2
    if step not in BY_CODE and not (anchor != "Conv" and step == "add constant"):
        assert len(launched(job)) > 1, "there is no code for it, or this list is out of date"


@pytest.mark.parametrize("one", ["Relu", "add", "times channel", "Tanh", "sub", "max", "Gelu"])
@pytest.mark.parametrize("two", ["Clip", "add", "plus channel computed", "by channel", "mul", "Swish"])
def test_steps_behind_what_has_no_code_run_too(one: str, two: str) -> None:
    for anchor in ("Gemm", "Conv"):
        build = Build()
        check(build.outputs(followed(build, started(build, anchor), [one, two, "Relu"])), alone={one, two} <= BY_CODE)


@pytest.mark.parametrize("rows", (1, 4, 5, 6, 7, 10, 11, 12, 31))
def test_functions_that_take_more_registers_run_behind_any_number_of_rows(rows: int) -> None:
    """Behind a Gelu blocks have five rows with AVX2, elsewhere six."""
    for steps in (["Gelu"], ["Swish", "Gelu", "add"], ["Swish"]):
        build = Build()
        value = build.op("MatMul", build.input(rows, 20), build.weight(20, 37))
        check(build.outputs(followed(build, value, steps)))


def test_more_steps_than_there_are_places_for_run_behind() -> None:
    for count in (15, 16, 17, 40):
        build = Build()
        steps = ["plus channel", "Clip below", "add", "times 3", "minus channel"] * 8
        value = build.op("MatMul", build.input(9, 20), build.weight(20, 33))
        (job,) = check(build.outputs(followed(build, value, steps[:count])), alone=count <= 16, tolerance=2e-5)
        assert len(job.kernel.steps) == count + 1
        assert (len(launched(job)) == 1) == (count <= 16)


def test_a_number_taken_from_or_by_what_is_found_is_right() -> None:
    for name, value in (("Sub", 2.0), ("Div", 0.5)):
        build = Build()
        found = build.op("Sigmoid", build.op("MatMul", build.input(6, 8), build.weight(8, 20)))
        check(build.outputs(build.op(name, build.constant(value), found)), alone=False, kernels=1)


@pytest.mark.parametrize("steps", [("Add",), ("Mul", "Add"), ("Sub",), ("Add", "Add")], ids=str)
def test_what_is_multiplied_may_be_added_as_well(steps: tuple[str, ...]) -> None:
    for conv in (False, True):
        build = Build()
        x = build.input(2, 24, 3, 3) if conv else build.input(15, 24)
        value = build.conv(x, 24) if conv else build.op("Gemm", x, build.weight(24, 24), build.weight(24))
        for name in steps:
            value = build.op(name, value, x)
        graph = build.outputs(build.op("Relu", value))
        jobs_of = check(graph)
        assert all(not recipe_of(job).shares for job in jobs_of)


def test_a_residual_that_is_used_twice_keeps_its_memory() -> None:
    build = Build()
    x, r = build.input(15, 24), build.op("Sigmoid", build.input(15, 24))
    value = build.op("Add", build.op("Mul", build.op("MatMul", x, build.weight(24, 24)), r), r)
    (job,) = check(build.outputs(value))
    assert not recipe_of(job).shares


def test_one_weight_serves_kernels_of_several_kinds() -> None:
    build = Build()
    x, w = build.input(24, 24), build.weight(24, 24)
    values = [build.op("MatMul", x, w), build.op("Gemm", x, w, transB=1)]
    values.append(build.op("Gemm", x, w, w, alpha=0.5, beta=3.0))
    check(build.outputs(*values, build.op("Gemm", x, w, w, alpha=0.5)), kernels=4)


def test_chains_of_products_run_in_few_buffers() -> None:
    build = Build()
    value = x = build.input(2, 40, 6, 6)
    for i in range(6):
        value = build.op("Add", build.conv(build.op("Relu", build.conv(value, 56)), 40), value if i % 2 else x)
    check(build.outputs(build.op("GlobalAveragePool", value)), kernels=12, tolerance=2e-5)


# ── in place ─────────────────────────────────────────────────────────────────────────────────────────────────────


def kernel_with_arrays(graph: Graph) -> tuple[Kernel, list[Array], Array]:
    (job,) = [job for job in jobs(graph) if job.kernel.algorithm == NAME]
    feeds = feeds_for(graph)
    named = dict(zip(graph.inputs, graph.input_names, strict=True))
    # what is read is made channels last by a kernel of its own in a graph; here it lies as the kernel asks for it
    arrays = [evaluated(v) if v.node.constant else feeds[named[v]] for v in job.operands]
    (wanted,) = evaluate_graph(graph, feeds, wide=True).values()
    return job.kernel, arrays, wanted


def close(found: Array, wanted: Array) -> bool:
    return float(np.abs(found - wanted).max()) <= TOLERANCE * float(np.abs(wanted).max())


@pytest.mark.parametrize("anchor", ANCHORS)
@pytest.mark.parametrize("steps", [("add",), ("add", "Relu"), ("Relu", "add before"), ("times channel", "add", "Gelu")],
                         ids=str)  # fmt: skip
@pytest.mark.parametrize("threads", (1, 2))
def test_a_result_takes_the_memory_of_what_is_added(anchor: str, steps: tuple[str, ...], threads: int) -> None:
    build = Build()
    kernel, arrays, wanted = kernel_with_arrays(build.outputs(followed(build, started(build, anchor), steps)))
    (added,) = overwritable(kernel)
    apart, recipe = run(kernel, arrays, threads)
    assert recipe.shares == {added}
    here, _ = run(kernel, arrays, threads, in_place=added)
    assert close(apart, wanted) and np.array_equal(apart, here)


@pytest.mark.parametrize("name", ("mul", "sub"))
def test_what_is_combined_otherwise_may_give_its_memory_too(name: str) -> None:
    build = Build()
    kernel, arrays, wanted = kernel_with_arrays(build.outputs(followed(build, started(build, "Gemm"), [name])))
    _, recipe = run(kernel, arrays)
    for other in recipe.shares:
        assert close(run(kernel, arrays, in_place=other)[0], wanted)


def test_of_two_operands_either_may_give_its_memory() -> None:
    build = Build()
    kernel, arrays, wanted = kernel_with_arrays(
        build.outputs(followed(build, started(build, "MatMul"), ["add", "Relu", "add"]))
    )
    _, recipe = run(kernel, arrays)
    assert len(recipe.shares) == 2
    for other in recipe.shares:
        assert close(run(kernel, arrays, in_place=other)[0], wanted)


@pytest.mark.parametrize("graph", ["parts", "no code before", "the data", "a weight"])
def test_where_the_sum_cannot_be_in_place_it_says_so(graph: str) -> None:
    build = Build()
    if graph == "parts":
        value = followed(build, started(build, "MatMul", 1500), ["add"])
    elif graph == "no code before":
        value = followed(build, started(build, "MatMul"), ["Tanh", "add"])
    else:
        value = followed(build, started(build, "MatMul"), ["add"])
    kernel, arrays, wanted = kernel_with_arrays(build.outputs(value))
    index = {"the data": 0, "a weight": 1}.get(graph, len(kernel.operands) - 1)
    found, recipe = run(kernel, arrays)
    assert close(found, wanted) and index not in recipe.shares
    with pytest.raises(NotInPlace):
        run(kernel, arrays, in_place=index)


def test_what_lies_otherwise_than_the_result_keeps_its_memory() -> None:
    build = Build()
    kernel, arrays, wanted = kernel_with_arrays(build.outputs(followed(build, started(build, "Conv"), ["add", "Relu"])))
    last = kernel.operands[-1]
    assert last.layout == LAST
    other = replace(kernel, operands=(*kernel.operands[:-1], replace(last, layout=PLAIN)))
    found, recipe = run(other, arrays)
    assert close(found, wanted) and not recipe.shares


# ── how the backend offers them ──────────────────────────────────────────────────────────────────────────────────


def test_it_is_offered_for_products_with_constant_matrices() -> None:
    for anchor in ANCHORS:
        build = Build()
        assert offered(build.outputs(started(build, anchor))) == [(NAME,)]


def _unfit() -> dict[str, Callable[[Build], Value]]:
    def conv(build: Build, *data: int, filters: int = 32, kernel: int = 1, **attrs: object) -> Value:
        return build.conv(build.input(*data), filters, kernel, **attrs)  # type: ignore[arg-type]  # attributes

    return {
        "a stride": lambda b: conv(b, 1, 16, 8, 8, strides=(2, 2)),
        "pads": lambda b: conv(b, 1, 16, 8, 8, pads=(1, 0, 0, 0)),
        "groups": lambda b: conv(b, 1, 16, 8, 8, group=2),
        "more taps": lambda b: conv(b, 1, 3, 8, 8, kernel=3),
        "one tap along one axis": lambda b: b.op("Conv", b.input(1, 3, 8, 8), b.weight(5, 3, 1, 2)),
        "few rows of many terms": lambda b: b.op("MatMul", b.input(3, 1024), b.weight(1024, 513)),
        "a computed matrix": lambda b: b.op("MatMul", b.input(8, 8), b.input(8, 8)),
        "computed filters": lambda b: b.op("Conv", b.input(1, 8, 4, 4), b.input(8, 8, 1, 1)),
        "a constant first matrix": lambda b: b.op("MatMul", b.weight(8, 8), b.input(8, 8)),
        "matrices of a batch": lambda b: b.op("MatMul", b.input(2, 8, 8), b.weight(2, 8, 8)),
        "the first one turned": lambda b: b.op("Gemm", b.input(8, 9), b.weight(8, 8), transA=1),
        "a vector": lambda b: b.op("MatMul", b.input(8), b.weight(8, 8)),
        "times a vector": lambda b: b.op("MatMul", b.input(9, 8), b.weight(8)),
        "no columns": lambda b: b.op("MatMul", b.input(9, 8), b.weight(8, 0)),
        "no terms": lambda b: b.op("MatMul", b.input(9, 0), b.weight(0, 8)),
    }


@pytest.mark.parametrize("name", _unfit())
def test_it_is_not_offered_elsewhere(name: str) -> None:
    build = Build()
    found = offered(build.outputs(_unfit()[name](build)))
    assert all(NAME not in names for names in found)


def test_it_is_not_offered_where_channels_lie_in_blocks() -> None:
    build = Build()
    graph = build.outputs(build.op("Relu", build.conv(build.op("Relu", build.input(1, 32, 6, 6)), 32)))
    for layout, names in ((BLOCKED, ()), (LAST, (NAME,))):
        choices = Choices(structure(graph), {at: layout for at in possible_layouts(graph)})
        conv = next(j.kernel for j in jobs(graph, choices) if j.kernel.anchor and j.kernel.anchor.op.name == "Conv")
        assert conv.results[0].layout == layout and lowering().algorithms(conv) == names
    # one of the two alone
    blocked = replace(conv, results=(replace(conv.results[0], layout=BLOCKED),))
    assert lowering().algorithms(blocked) == ()
    data = replace(conv, operands=(replace(conv.operands[0], layout=BLOCKED), *conv.operands[1:]))
    assert lowering().algorithms(data) == ()


def _no_avx2(monkeypatch: pytest.MonkeyPatch) -> None:
    class Other:
        isa = "avx"
        parallel_address = 1

    monkeypatch.setattr(coded, "library", Other)


def _no_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coded, "runs_here", lambda: False)


@pytest.mark.parametrize("without", [_no_avx2, _no_code])
@pytest.mark.parametrize("anchor", ANCHORS)
def test_elsewhere_nothing_is_offered_and_a_plan_with_it_runs_as_usual(
    anchor: str, without: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    build = Build()
    graph = build.outputs(followed(build, started(build, anchor), ["add", "Relu"]))
    choices = everywhere(graph)
    assert [job.kernel.algorithm for job in jobs(graph, choices) if len(job.kernel.steps) > 1] == [NAME]
    without(monkeypatch)
    assert offered(graph) == [()]
    check(graph, kernels=0, choices=choices)


def test_costs_are_kept_apart_and_measured() -> None:
    build, backend = Build(), OneDNNBackend(1)
    (job,) = jobs(build.outputs(followed(build, started(build, "Gemm"), ["add", "Relu"])))
    usual = replace(job.kernel, algorithm="")
    assert job.kernel.key != usual.key
    assert all(0 < backend.measure(k) < 10 for k in (job.kernel, usual))


def test_the_memory_that_plans_count_on_is_what_recipes_take() -> None:
    build = Build()
    for job in jobs(build.outputs(followed(build, started(build, "Conv", 1500), ["Tanh", "add"]))):
        if job.kernel.algorithm == NAME:
            assert lowering().scratch(job.kernel) == sum(-(-n // 64) * 64 for n in recipe_of(job).scratch)


# ── graphs at random ─────────────────────────────────────────────────────────────────────────────────────────────


class _Growing:
    """A graph of products of both kinds and of what stands between them, at random."""

    def __init__(self, seed: int) -> None:
        self.chance, self.build = random.Random(seed), Build(seed % 1000)
        rows = self.chance.choice([(5,), (2, 7), (33,)])
        image = self.chance.choice([(1, 8, 5, 5), (2, 16, 4, 3), (1, 32, 6, 6), (1, 1100, 2, 2)])
        self.values = [self.build.input(*rows, self.chance.choice([8, 24, 1030])), self.build.input(*image)]
        for _ in range(self.chance.randint(4, 14)):
            self.grow()

    def grow(self) -> None:
        build, chance = self.build, self.chance
        value = chance.choice(self.values[-4:])
        if chance.random() < 0.4:
            self.values.append(self.multiplied(value))
            return
        alike = [v for v in self.values if v.type == value.type and v is not value]
        if alike and chance.random() < 0.4:
            # half of the sum, so that nothing grows
            total = build.op(chance.choice(["Add", "Sub", "Add"]), value, chance.choice(alike))
            self.values.append(build.op("Mul", total, build.constant(0.5)))
            return
        # what has one number for a row of pixels is evaluated by definition behind any convolution
        names = [n for n in STEPS if n != "times row" or value.type.rank < 4]
        self.values.append(STEPS[chance.choice(names)](build, value))

    def multiplied(self, value: Value) -> Value:
        build, chance, dims = self.build, self.chance, value.type.static_shape
        columns = chance.choice([8, 16, 24, 33, 64, dims[1] if len(dims) == 4 else dims[-1]])
        if len(dims) == 4:
            return build.conv(value, columns, chance.choice([1, 1, 1, 3]), bias=chance.random() < 0.5)
        weight = build.constant(np.float32(build.random.standard_normal((dims[-1], columns)) / np.sqrt(dims[-1])))
        if len(dims) == 2 and chance.random() < 0.5:
            bias = build.weight(*chance.choice([(columns,), (1, columns), (dims[0], columns), (dims[0], 1), (1,)]))
            alpha, beta = chance.choice([1.0, 0.5]), chance.choice([1.0, 1.5])
            return build.op("Gemm", value, weight, bias, alpha=alpha, beta=beta)
        return build.op("MatMul", value, weight)

    def graph(self) -> Graph:
        consumed = {v for node in self.build.graph.operators for v in node.inputs}
        ends = [v for v in self.values if v not in consumed and v.node.op.name != "Input"]
        return self.build.outputs(*(ends or self.values[-1:]))


@given(st.integers(0, (1 << 32) - 1))
@settings(
    max_examples=60, deadline=None, derandomize=True, database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)  # fmt: skip
def test_random_graphs_by_random_plans_are_what_they_are_by_definition(seed: int) -> None:
    graph = _Growing(seed).graph()
    choices = drawn(graph, seed)
    found = [job for job in jobs(graph, choices) if job.kernel.algorithm == NAME]
    assert all(launched(job)[0] == f"x86:{isa().name}" for job in found)
    graph.plans["onednn"] = choices
    feeds = feeds_for(graph, seed % 100)
    got, wanted = OneDNNBackend(1 + seed % 2).compile(graph)(feeds), evaluate_graph(graph, feeds, wide=True)
    for name, array in wanted.items():
        assert np.isfinite(got[name]).all()
        # values are about 1; where they cancel out rounding is all there is
        assert np.abs(got[name] - array).max() <= 1e-4 * max(np.abs(array).max(), 0.1)


def test_the_random_graphs_have_such_kernels() -> None:
    counts = [
        sum(job.kernel.algorithm == NAME for job in jobs(graph, drawn(graph, seed)))
        for seed in range(20) for graph in [_Growing(seed).graph()]
    ]  # fmt: skip
    assert sum(map(bool, counts)) >= 10 and max(counts) >= 3


def test_what_instructions_do_not_reach_is_left_to_others() -> None:
    assert Product(14, 1 << 20, 16, 1 << 20, 16).fits and not Product(14, 1 << 27, 16, 1 << 27, 16).fits
    assert not Product(14, 16, 1 << 27, 16, 1 << 27).fits
    assert knows(Function("swish", 1.7)) and not knows(Function("swish", 3e38)) and not knows(Function("linear", 1e300))
    assert knows(Function("clip_v2", -math.inf, 6.0))


@pytest.mark.parametrize("inner, shared", [(1024, True), (1025, False)])
def test_a_plan_of_memory_knows_whose_partial_sums_lie_in_the_result(inner: int, shared: bool) -> None:
    build = Build()
    x, y = build.input(8, inner), build.input(8, 16)
    graph = build.outputs(build.op("Add", build.op("MatMul", x, build.weight(inner, 16)), y))
    kernel = jobs(graph)[0].kernel
    assert kernel.algorithm == NAME and len(kernel.steps) == 2
    assert bool(overwritable(kernel)) == shared == bool(recipe_of(jobs(graph)[0]).shares)
    assert overwritable(replace(kernel, algorithm="")), "oneDNN's own product adds up in registers"


def test_costs_with_machine_code_are_none_without(monkeypatch: pytest.MonkeyPatch) -> None:
    with_code = OneDNNBackend(1).device_key()
    monkeypatch.setattr(coded, "runs_here", lambda: False)
    assert OneDNNBackend(1).device_key() != with_code
