"""The tests of the oneDNN executor, on the cuDNN backend: in ordinary memory, and on a GPU where there is one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
import pytest
import test_onednn_executor as others
from hosted import compiler
from hosts import gpu_missing, host_backend, kernels
from test_onednn_executor import ROWS, TOLERANCE, Build, check, feeds_for, worst

import taso
from taso.backends.cudnn.backend import CudnnBackend
from taso.backends.cudnn.description import Description
from taso.backends.cudnn.device import Planned
from taso.backends.cudnn.executor import DeviceProgram, Program
from taso.backends.cudnn.frontend import GraphUnsupported
from taso.backends.cudnn.host import HostDevice
from taso.backends.lowering import LAST, PLAIN, Choices, lower, structure
from taso.graph.errors import TasoError
from taso.graph.evaluate import evaluate_graph
from taso.graph.graph import Graph, Value

ON_ONEDNN_ALONE = {
    "test_no_convolution_runs_by_the_slow_reference": "of oneDNN's implementations",
    "test_a_chain_behind_a_convolution_is_one_launch": "counts oneDNN's changes of layout",
    "test_a_sum_of_two_convolutions_adds_in_place": "cuDNN does not add in place",
    "test_parts_of_parts_are_views": "parts here begin where the GPU reads several elements at once, or are copied",
    "test_parts_of_channels_in_blocks_are_views": "of channels in blocks",
    "test_concatenated_convolutions_are_computed_where_they_belong": "counts oneDNN's changes of layout",
    "test_regions_in_use_at_once_do_not_overlap": "of no backend",
    "test_threads_are_set_for_the_run_only": "of threads",
    "test_a_mask_of_minus_infinity_keeps_the_fast_kernels": "of oneDNN's implementations",
    "test_a_change_between_layouts_with_the_same_bytes_is_free": "of channels in blocks",
    "test_layouts_agree_with_the_bytes_they_promise": "of channels in blocks",
    "test_the_device_key_names_what_decides_the_time": "of threads",
    "test_random_graphs_give_what_the_definitions_say": "drawn: below",
    "test_a_corrupted_kernel_is_caught_by_the_same_comparison": "corrupts oneDNN's kernels: below",
    "test_a_lowering_without_blocks_gives_the_same": "of channels in blocks",
    "test_an_operator_gives_what_its_definition_says": "by operators: below",
    "test_every_step_behind_every_anchor": "by anchors: below",
}

needs_gpu = pytest.mark.skipif(bool(gpu_missing()), reason=gpu_missing() or "there is a GPU")
ON = ["host", pytest.param("gpu", marks=[pytest.mark.gpu, needs_gpu])]


@pytest.fixture(params=ON)
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> CudnnBackend:
    """The backend, which the tests of the oneDNN executor then run on, too."""
    found = host_backend() if request.param == "host" else CudnnBackend()
    monkeypatch.setattr(others, "OneDNNBackend", lambda threads=None: found)
    return found


def the_same() -> Iterator[tuple[str, Mapping[str, object]]]:
    """The tests of the oneDNN executor that are of all executors, each with values of its parameters."""
    for name, function in sorted(vars(others).items()):
        if not name.startswith("test_") or name in ON_ONEDNN_ALONE:
            continue
        cases: list[dict[str, object]] = [{}]
        for mark in getattr(function, "pytestmark", ()):
            if mark.name == "parametrize":
                cases = [{**case, mark.args[0]: value} for case in cases for value in mark.args[1]]
        for case in cases:
            yield name, case


def named(what: object) -> str:
    return "-".join(map(str, what.values())) if isinstance(what, dict) else str(what)


@pytest.mark.parametrize("name, settings", list(the_same()), ids=named)
def test_the_same_holds_on_cudnn(
    name: str, settings: Mapping[str, object], backend: CudnnBackend, request: pytest.FixtureRequest
) -> None:
    function: Callable[..., None] = getattr(others, name)
    asked = function.__code__.co_varnames[: function.__code__.co_argcount]
    function(**settings, **{n: request.getfixturevalue(n) for n in asked if n not in settings})


def test_what_is_left_to_onednn_is_there() -> None:
    assert all(hasattr(others, name) for name in ON_ONEDNN_ALONE)


# ── operators ────────────────────────────────────────────────────────────────────────────────────────────────────


def row(name: str) -> Graph:
    build = Build()
    made = ROWS[name](build)
    return build.outputs(*(made if isinstance(made, tuple) else (made,)))  # type: ignore[arg-type]  # one value


def in_parts(names: Sequence[str], size: int = 60) -> list[list[str]]:
    return [list(names[i : i + size]) for i in range(0, len(names), size)]


@pytest.mark.parametrize("number", range(len(in_parts(list(ROWS)))))
def test_operators_give_what_their_definitions_say(number: int, backend: CudnnBackend) -> None:
    """In parts, since what compiles kernels for the host is slow to start."""
    names = in_parts(list(ROWS))[number]
    graphs = {name: row(name) for name in names}
    programs = {name: backend.compile(graph) for name, graph in graphs.items()}
    wrong = {}
    for name, graph in graphs.items():
        for seed in (1, 2):
            feeds = feeds_for(graph, seed)
            error = worst(programs[name](feeds), evaluate_graph(graph, feeds, wide=True))
            if not error <= TOLERANCE:
                wrong[name] = error
    assert wrong == {}


@pytest.mark.parametrize("anchor", others._ANCHORS)
def test_every_step_behind_every_anchor_on_cudnn(anchor: str, backend: CudnnBackend) -> None:
    graphs = []
    for first in others._STEPS:
        for second in ("", "Add full", "Mul channel", "Relu"):
            b = Build()
            y = others._step(b, others._ANCHORS[anchor](b), first)  # type: ignore[arg-type]  # one value
            graphs.append((f"{first}, {second}", b.outputs(others._step(b, y, second) if second else y)))
    programs = [backend.compile(graph) for _, graph in graphs]
    wrong = {}
    for (what, graph), program in zip(graphs, programs, strict=True):
        feeds = feeds_for(graph)
        error = worst(program(feeds), evaluate_graph(graph, feeds, wide=True))
        if not error <= TOLERANCE:
            wrong[what] = error
    assert wrong == {}


def blocks(b: Build) -> Value:
    """Convolutions with branches, a Concat, a residual, pools and a product behind."""
    x = b.op("Relu", b.conv(b.input(2, 3, 12, 12), 16, 3))
    one, two = b.op("Relu", b.conv(x, 16, 3)), b.conv(x, 24, 1)
    both = b.op("Concat", one, two, b.op("MaxPool", x, kernel_shape=(3, 3), pads=(1, 1, 1, 1)), axis=1)
    y = b.op("Relu", b.op("Add", b.conv(both, 56, 3, 8), both))
    return b.op("Gemm", b.op("Flatten", b.op("GlobalAveragePool", y)), b.weight(56, 10), b.weight(10))


def test_channels_last_give_the_same(backend: CudnnBackend) -> None:
    b = Build()
    graph = b.outputs(blocks(b))
    plain = backend.compile(graph)
    layouts = {
        (i, 0): LAST for i, n in enumerate(graph.nodes)
        if n.op.name in ("Conv", "Relu", "MaxPool", "Add", "Concat") and n.outputs[0].type.rank == 4 and not n.constant
    }  # fmt: skip
    graph.plans["cudnn"] = Choices(structure(graph), layouts)
    last = backend.compile(graph)
    assert LAST in lower(graph, backend.lowering, graph.plans["cudnn"]).layouts.values()  # type: ignore[arg-type]  # as put
    feeds = feeds_for(graph)
    wanted = evaluate_graph(graph, feeds, wide=True)
    assert worst(plain(feeds), wanted) <= TOLERANCE and worst(last(feeds), wanted) <= TOLERANCE


@pytest.mark.parametrize("precision, error", [("tf32", 2.0**-7), ("fp16", 2.0**-7), ("bf16", 2.0**-4)])
def test_lower_precisions_stay_within_their_error(precision: str, error: float) -> None:
    b = Build()
    graph = b.outputs(blocks(b))
    feeds = feeds_for(graph)
    wanted = evaluate_graph(graph, feeds, wide=True)
    found = worst(host_backend(precision).compile(graph)(feeds), wanted)
    assert found <= error
    if precision != "tf32":
        # what is rounded differs from what is not
        assert found > worst(host_backend().compile(graph)(feeds), wanted)


def test_every_way_to_compute_a_kernel_gives_the_same(backend: CudnnBackend) -> None:
    b = Build()
    x = b.op("Softmax", b.op("MatMul", b.input(4, 8), b.weight(8, 8)))
    y = b.op("MaxPool", b.input(1, 4, 6, 6), kernel_shape=(2, 2))
    z = b.op("Relu", b.op("Add", b.conv(b.input(1, 16, 9, 7), 24, 3), b.input(1, 24, 9, 7)))
    graph = b.outputs(b.op("Relu", b.op("Add", b.op("MatMul", x, b.weight(8, 6)), b.weight(6))), y, z)
    feeds = feeds_for(graph)
    wanted = evaluate_graph(graph, feeds, wide=True)
    place = {node: i for i, node in enumerate(graph.nodes)}
    tried = set()
    for job in lower(graph, backend.lowering).jobs:
        for way in backend.lowering.algorithms(job.kernel):
            anchor = next(n for n in graph.nodes if n.op is job.kernel.steps[0].op and n.inputs[0] in job.operands)
            graph.plans["cudnn"] = Choices(structure(graph), algorithms={place[anchor]: way})
            assert worst(backend.compile(graph)(feeds), wanted) <= TOLERANCE, way
            tried.add((anchor.op.name, way))
    assert {("MatMul", "cublas"), ("Softmax", "cudnn"), ("MaxPool", "ours"), ("Conv", "winograd 4x4")} <= tried


@pytest.mark.parametrize("layout", [PLAIN, LAST])
@pytest.mark.parametrize("way", ["winograd 2x2", "winograd 4x4"])
def test_convolutions_in_tiles_are_transforms_and_products(way: str, layout: str, backend: CudnnBackend) -> None:
    if not backend.device.compiles:
        pytest.skip("there is no C++ compiler here")
    b = Build()
    graph = b.outputs(b.op("Relu", b.conv(b.input(2, 16, 9, 7), 24, 3)))
    found = {n.op.name: i for i, n in enumerate(graph.nodes)}
    layouts = {(found["Conv"], 0): layout, (found["Relu"], 0): layout}
    graph.plans["cudnn"] = Choices(structure(graph), layouts, algorithms={found["Conv"]: way})
    program = check(graph)
    # two transforms and the products between them; a change of layout on either side
    assert program.kernels == (3 if layout == PLAIN else 5)


class Refusing(HostDevice):
    """A device with no plans for what cuDNN 9.28 has none for in float32: products of matrices (`test_cudnn_plans.py`),
    pools, reductions, and transposed convolutions with anything behind them."""

    def plan(self, description: Description) -> Planned:
        kinds = [operation.kind for operation in description.operations]
        if {"matmul", "resample", "reduction"} & set(kinds) or "conv_dgrad" in kinds and len(kinds) > 1:
            raise GraphUnsupported(f"no plan for {kinds}")
        return super().plan(description)


def refused() -> CudnnBackend:
    return CudnnBackend(device=Refusing(kernels() if compiler() else None))


PRODUCTS = {
    "MatMul": lambda b: b.op("Relu", b.op("Add", b.op("MatMul", b.input(2, 5, 6), b.weight(6, 7)), b.weight(7))),
    "MatMul of two": lambda b: b.op("MatMul", b.input(2, 3, 5, 6), b.input(2, 3, 6, 4)),
    "MatMul with broadcasting": lambda b: b.op("MatMul", b.input(2, 3, 5, 6), b.input(3, 6, 4)),
    "Gemm": lambda b: b.op("Relu", b.op("Gemm", b.input(5, 6), b.weight(6, 7), b.weight(7))),
    "Gemm turned": lambda b: b.op("Gemm", b.input(6, 5), b.weight(7, 6), b.weight(5, 7), transA=1, transB=1),
    "Gemm alone": lambda b: b.op("Sigmoid", b.op("Gemm", b.input(5, 6), b.weight(7, 6), transB=1)),
    "ConvTranspose": lambda b: b.op(
        "Relu", b.op("ConvTranspose", b.input(1, 4, 5, 5), b.weight(4, 6, 3, 3), b.weight(6), strides=(2, 2))
    ),
}  # fmt: skip


@pytest.mark.skipif(not compiler(), reason="there is no C++ compiler here")
@pytest.mark.parametrize("name", PRODUCTS)
def test_what_cudnn_has_no_plan_for_stays_on_the_device(name: str) -> None:
    b = Build()
    graph = b.outputs(PRODUCTS[name](b))
    program = refused().compile(graph)
    assert {how for _, how in program.operators} == {"own"}
    assert worst(program(feeds_for(graph)), evaluate_graph(graph, feeds_for(graph), wide=True)) <= TOLERANCE


# ── programs ─────────────────────────────────────────────────────────────────────────────────────────────────────


def static(program: Program) -> DeviceProgram:
    assert isinstance(program._fixed, DeviceProgram)
    return program._fixed


def test_what_needs_no_host_is_one_graph(backend: CudnnBackend) -> None:
    b = Build()
    program = static(check(b.outputs(blocks(b))))  # type: ignore[arg-type]  # a program of this backend
    assert program.replays == 1 and program.kernels > 5 and {how for _, how in program.operators} == {"own"}


def test_what_the_host_evaluates_parts_the_graph_in_two(backend: CudnnBackend) -> None:
    b = Build()
    x = b.op("Relu", b.conv(b.input(1, 16, 5, 5), 16, 3))
    t = others._opaque(b, "ThresholdedRelu", [x], [x.type], alpha=0.3)
    program = static(check(b.outputs(b.op("Exp", t))))  # type: ignore[arg-type]  # a program of this backend
    assert program.replays == 2
    assert dict(program.operators)["ThresholdedRelu"] == "evaluated"


def test_tensors_begin_where_the_gpu_reads_several_elements_at_once(backend: CudnnBackend) -> None:
    b = Build()
    parts = b.ops("Split", b.op("Relu", b.input(12, 3)), axis=0, split=(1, 4, 7))
    whole = b.op("Concat", *(b.op("Exp", p) for p in reversed(parts)), axis=0)
    check(b.outputs(whole, *(b.op("Tanh", p) for p in parts)))


def test_a_corrupted_kernel_is_caught(backend: CudnnBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    b = Build()
    graph = b.outputs(b.op("Relu", b.op("Mul", b.conv(b.input(1, 16, 6, 6), 16, 3), b.positive(1, 16, 1, 1))))
    run = DeviceProgram._enter
    monkeypatch.setattr(DeviceProgram, "_enter", lambda self, given: run(self, {n: a * 1.01 for n, a in given.items()}))
    with pytest.raises(AssertionError):
        check(graph)


def test_seeded_random_graphs_give_what_the_definitions_say(backend: CudnnBackend) -> None:
    graphs = [drawn(seed) for seed in range(25)]
    programs = [backend.compile(graph) for graph in graphs]
    for graph, program in zip(graphs, programs, strict=True):
        feeds = feeds_for(graph)
        assert worst(program(feeds), evaluate_graph(graph, feeds, wide=True)) <= TOLERANCE


def drawn(seed: int) -> Graph:
    random = np.random.default_rng(seed)
    b = Build(seed)
    values = [b.input(int(random.choice([1, 2])), int(random.choice([3, 16, 20])), 6, 6)]
    for _ in range(8):
        x = values[int(random.integers(len(values)))]
        values += step(b, x, values, random)
    return b.outputs(values[-1], values[len(values) // 2], values[-1])


def step(b: Build, x: Value, values: Sequence[Value], random: np.random.Generator) -> list[Value]:
    c = x.dim(1)
    alike = [v for v in values if v.type == x.type]
    other = alike[int(random.integers(len(alike)))]
    match random.choice(["conv", "depthwise", "unary", "binary", "channel", "split", "concat", "pool", "move"]):
        case "conv":
            return [b.conv(x, int(random.choice([8, 16, 32])), int(random.choice([1, 3])))]
        case "depthwise":
            return [b.conv(x, c, 3, c)]
        case "unary":
            return [b.op(str(random.choice(others._ACTIVATIONS)), x)]
        case "binary":
            return [b.op(str(random.choice(["Add", "Mul", "Sub", "Max"])), x, other)]
        case "channel":
            return [b.op(str(random.choice(["Add", "Mul", "Sub", "Div"])), x, b.positive(1, c, 1, 1))]
        case "split" if c > 1:
            first = int(random.choice([1, c // 2]))
            return list(b.ops("Split", x, axis=1, split=(first, c - first)))
        case "concat" if 2 * c <= 128:
            return [b.op("Concat", x, other, axis=1)]
        case "pool":
            name = str(random.choice(["MaxPool", "AveragePool"]))
            return [b.op(name, x, kernel_shape=(3, 3), pads=(1, 1, 1, 1))]
    turned = b.op("Transpose", x, perm=(0, 1, 3, 2))
    return [b.op("Reshape", b.op("Reshape", turned, shape=(0, -1)), shape=(0, *x.type.static_shape[1:]))]


def test_a_model_is_optimized_for_the_device(backend: CudnnBackend) -> None:
    graph = taso.new_graph()
    x = graph.new_input(dims=(1, 16, 8, 8))
    weights = [graph.new_weight(dims=(8, 16, 3, 3)) for _ in range(2)]
    arms = [graph.conv2d(input=x, weight=w, strides=(1, 1), padding="SAME", activation="RELU") for w in weights]
    graph.concat(1, arms)
    best = taso.optimize(graph, backend=backend, budget=5, progress=False)
    feeds = feeds_for(graph)
    found = taso.compile(best, backend)(feeds)
    assert worst(found, evaluate_graph(graph, feeds, wide=True)) <= TOLERANCE
    assert taso.compile(graph, backend).kernels > 0 and graph.cost(backend) > 0


@pytest.mark.parametrize("wrong", [{"x0": np.zeros((2, 2), np.float32)}, {}, {"x0": "text"}])
def test_wrong_feeds_are_refused(wrong: dict[str, np.ndarray], backend: CudnnBackend) -> None:
    b = Build()
    with pytest.raises(TasoError):
        backend.compile(b.outputs(b.op("Relu", b.input(2, 3))))(wrong)
