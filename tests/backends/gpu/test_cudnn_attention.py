"""Attention as one kernel of the cuDNN backend: which kernels are, what they compute, when a plan has them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import test_axes as axes
from hosted import compiler
from hosts import host_backend, kernels
from onnx import TensorProto, helper
from test_cudnn_executor import Refusing, static
from test_onednn_executor import Build, feeds_for, worst

import taso
from taso.backends.base import Array
from taso.backends.cudnn.backend import CudnnBackend
from taso.backends.cudnn.description import Description
from taso.backends.cudnn.device import Planned
from taso.backends.cudnn.executor import Program
from taso.backends.cudnn.frontend import GraphUnsupported
from taso.backends.cudnn.host import HostDevice
from taso.backends.cudnn.kernels import design
from taso.backends.fallback import evaluated
from taso.backends.lowering import IN_TURN, Choices, Kernel, in_parts, lower, named_axes, structure, with_wholes
from taso.backends.places import RESULT, Place, plain_spec, tensor_bytes
from taso.backends.plans import with_plans
from taso.backends.recipe import Launch
from taso.backends.sampling import RandomSupply, random_array
from taso.graph import onnx_export
from taso.graph.evaluate import evaluate_graph
from taso.graph.graph import Graph, Value
from taso.graph.operator import Weight
from taso.graph.types import DType, TensorType
from taso.search import planning
from taso.search.costs import CostModel

pytestmark = pytest.mark.skipif(not compiler(), reason="there is no C++ compiler here")

ERRORS = {"tf32": 2.0**-7, "fp16": 2.0**-7, "bf16": 2.0**-4}


def number(b: Build, value: float) -> Value:
    return b.graph.add_weight(Weight(TensorType(DType.FLOAT, ()), np.asarray(value, np.float32)))


def scored(b: Build, q: Value, k: Value, v: Value, scales: Sequence[str], mask: Value | None) -> Value:
    """softmax(scales of q · k + mask) · v."""
    scores = b.op("MatMul", q, k)
    for name in scales:
        scores = b.op(name, scores, number(b, 2.5 if name == "Div" else 0.7))
    scores = scores if mask is None else b.op("Add", scores, mask)
    return b.op("MatMul", b.op("Softmax", scores, axis=-1), v)


def joined(graph: Graph, layouts: dict[int, str] | None = None) -> Graph:
    """The graph with a plan that has its attention as one kernel."""
    place = {node: i for i, node in enumerate(graph.nodes)}
    softmax = next(n for n in graph.nodes if n.op.name == "Softmax")
    second = next(n for n in graph.nodes if n.op.name == "MatMul" and n.inputs[0] is softmax.output)
    entries: dict[int, int | None] = {place[softmax]: 0, place[second]: 0}
    lies = {(i, 0): layout for i, layout in (layouts or {}).items()}
    for name in ("cudnn tf32", "cudnn fp16", "cudnn bf16"):
        graph.plans[name] = Choices(structure(graph), lies, entries)
    return graph


def launched(program: Program) -> list[str]:
    return static(program).names


def attention_kernels(graph: Graph, backend: CudnnBackend) -> list[Kernel]:
    plan = graph.plans[backend.name]
    assert isinstance(plan, Choices)
    return [j.kernel for j in lower(graph, backend.lowering, plan).jobs if j.kernel.chained]


CASES = {
    "plain": lambda b: scored(b, b.input(2, 3, 5, 8), b.input(2, 3, 8, 7), b.input(2, 3, 7, 16), ["Div"], None),
    "no scale": lambda b: scored(b, b.input(2, 3, 5, 8), b.input(2, 3, 8, 7), b.input(2, 3, 7, 8), [], None),
    "scales and a mask": lambda b: scored(
        b, b.input(2, 3, 5, 8), b.input(2, 3, 8, 7), b.input(2, 3, 7, 8), ["Mul", "Div"], b.input(2, 1, 1, 7)
    ),
    "a whole mask": lambda b: scored(
        b, b.input(2, 3, 5, 8), b.input(2, 3, 8, 7), b.input(2, 3, 7, 8), ["Mul"], b.input(2, 3, 5, 7)
    ),
    "a mask of two axes": lambda b: scored(
        b, b.input(2, 3, 5, 8), b.input(2, 3, 8, 7), b.input(2, 3, 7, 8), ["Mul"], b.weight(5, 7)
    ),
    "three axes": lambda b: scored(
        b, b.input(4, 5, 8), b.input(4, 8, 7), b.input(4, 7, 8), ["Mul"], b.input(4, 1, 7)
    ),
    "keys that heads share": lambda b: scored(
        b, b.input(2, 4, 5, 8), b.input(2, 1, 8, 7), b.input(2, 1, 7, 8), ["Mul"], None
    ),
    "constant keys": lambda b: scored(
        b, b.input(2, 3, 5, 8), b.weight(2, 3, 8, 7), b.weight(2, 3, 7, 8), ["Mul"], None
    ),
    "a step behind": lambda b: b.op("Relu", b.op("Add", scored(
        b, b.input(2, 3, 5, 8), b.input(2, 3, 8, 7), b.input(2, 3, 7, 8), ["Mul"], None), b.input(8))),
}  # fmt: skip


@pytest.mark.parametrize("precision", ERRORS)
@pytest.mark.parametrize("name", CASES)
def test_products_around_a_softmax_are_one_kernel_where_a_plan_has_it(name: str, precision: str) -> None:
    b = Build()
    graph = joined(b.outputs(CASES[name](b)))
    backend = host_backend(precision)
    assert len(attention_kernels(graph, backend)) == 1
    program, feeds = backend.compile(graph), feeds_for(graph)
    wanted = evaluate_graph(graph, feeds, wide=True)
    assert worst(program(feeds), wanted) <= ERRORS[precision]
    assert {how for _, how in program.operators} == {"own"} and static(program).replays == 1
    (kernel,) = attention_kernels(graph, backend)
    designed = [launch.name for launch in recipe_of(kernel, backend)]
    assert "cudnn:sdpa" in designed and not any(n.startswith(("cublas", "cudnn:matmul")) for n in designed)
    assert len(designed) <= (8 if precision != "tf32" else 6)


def recipe_of(kernel: Kernel, backend: CudnnBackend) -> list[Launch]:
    return design(kernel, backend.device, RandomSupply(kernel), backend.lowering.precision).launches


def plain_attention() -> Graph:
    b = Build()
    return joined(b.outputs(CASES["scales and a mask"](b)))


class WithoutAttention(HostDevice):
    """A device whose cuDNN has no plan for attention."""

    def plan(self, description: Description) -> Planned:
        if any(operation.kind == "sdpa" for operation in description.operations):
            raise GraphUnsupported("no plan for sdpa")
        return super().plan(description)


def test_what_cudnn_refuses_runs_in_parts() -> None:
    graph, backend = plain_attention(), CudnnBackend("fp16", WithoutAttention(kernels()))
    # no plan has such a kernel there, and one that is built all the same is its parts
    assert not attention_kernels(graph, backend)
    (kernel,) = attention_kernels(graph, host_backend("fp16"))
    designed = [launch.name for launch in recipe_of(kernel, backend)]
    assert "cudnn:sdpa" not in designed and len(designed) > 2
    feeds = feeds_for(graph)
    assert worst(backend.compile(graph)(feeds), evaluate_graph(graph, feeds, wide=True)) <= ERRORS["fp16"]


@pytest.mark.parametrize("name", CASES)
def test_in_turn_is_what_the_parts_give(name: str) -> None:
    b = Build()
    graph, backend = joined(b.outputs(CASES[name](b))), host_backend("bf16")
    plan = graph.plans[backend.name]
    assert isinstance(plan, Choices)
    (kernel,) = attention_kernels(graph, backend)
    arrays = [np.asarray(random_array(o, n)) for n, o in enumerate(kernel.operands)]
    (wanted,) = evaluated(kernel)(arrays)
    for algorithm in ("", IN_TURN):
        found = ran(replace(kernel, algorithm=algorithm), arrays, backend)
        assert np.abs(found - wanted).max() <= ERRORS["bf16"] * np.abs(wanted).max(), algorithm


def ran(kernel: Kernel, arrays: Sequence[Array], backend: CudnnBackend) -> Array:
    """What a kernel's launches give on these operands, which all lie plainly."""
    device = backend.device
    recipe = design(kernel, device, RandomSupply(kernel), backend.lowering.precision)
    operands = [device.lay_out(a) for a in arrays]
    result = device.reserve(tensor_bytes(kernel.results[0].type))
    scratch = [device.reserve(size) for size in recipe.scratch]
    for call, _ in recipe.bind([o.address for o in operands], [result.address], [s.address for s in scratch]):
        call()
    return np.array(device.view(plain_spec(Place(RESULT), kernel.results[0].type), result.address))


def test_a_mask_of_minus_infinity_is_one() -> None:
    b = Build()
    mask = np.where(np.tril(np.ones((5, 5), bool)), 0, -np.inf).astype(np.float32)
    added = b.graph.add_weight(Weight(TensorType(DType.FLOAT, (5, 5)), mask))
    y = scored(b, b.input(2, 3, 5, 8), b.input(2, 3, 8, 5), b.input(2, 3, 5, 8), ["Mul"], added)
    graph, backend = joined(b.outputs(y)), host_backend("fp16")
    feeds = feeds_for(graph)
    assert worst(backend.compile(graph)(feeds), evaluate_graph(graph, feeds, wide=True)) <= ERRORS["fp16"]


# ── how queries, keys and values lie ─────────────────────────────────────────────────────────────────────────────


def of_heads(b: Build, batch: int, tokens: int, heads: int, size: int) -> Value:
    """As exporters write it: heads side by side in one axis, turned before the products and back behind them."""
    x = b.input(batch, tokens, heads * size)

    def turned(*perm: int) -> Value:
        y = b.op("MatMul", x, b.weight(heads * size, heads * size))
        return b.op("Transpose", b.op("Reshape", y, shape=(batch, tokens, heads, size)), perm=perm)

    y = scored(b, turned(0, 2, 1, 3), turned(0, 2, 3, 1), turned(0, 2, 1, 3), ["Div"], b.input(batch, 1, 1, tokens))
    return b.op("Reshape", b.op("Transpose", y, perm=(0, 2, 1, 3)), shape=(batch, tokens, heads * size))


@pytest.mark.parametrize("precision", ERRORS)
@pytest.mark.parametrize("batch, tokens, heads", [(1, 6, 3), (2, 6, 3), (1, 1, 2), (2, 5, 1)])
def test_heads_are_read_and_written_where_they_lie(precision: str, batch: int, tokens: int, heads: int) -> None:
    b = Build()
    graph = b.outputs(of_heads(b, batch, tokens, heads, 8))
    second = [i for i, n in enumerate(graph.nodes) if n.op.name == "MatMul"][-1]
    name = named_axes((0, 2, 1, 3), graph.nodes[second].output.type.dims)
    backend = host_backend(precision)
    program = backend.compile(joined(graph, {second: name}))
    (kernel,) = attention_kernels(graph, backend)
    assert kernel.results[0].layout == name
    names = launched(program)
    assert not any("Transpose" in n or "Reorder" in n for n in names)
    feeds = feeds_for(graph)
    wanted = evaluate_graph(graph, feeds, wide=True)
    assert worst(program(feeds), wanted) <= ERRORS[precision]
    if precision == "tf32":
        # nothing is to be rounded: what lies side by side is read there
        directly = [launch.name for launch in recipe_of(kernel, backend)]
        assert directly[-1] == "cudnn:sdpa" and len(directly) == 1
    # by the local rule, without the kernel
    graph.plans.clear()
    assert worst(backend.compile(graph)(feeds), wanted) <= ERRORS[precision]


# ── plans ────────────────────────────────────────────────────────────────────────────────────────────────────────


class Costs(CostModel):
    """Kernels cost a second each, an attention `share` of what its parts do."""

    def __init__(self, backend: CudnnBackend, share: float) -> None:
        self.backend, self.share, self._costs, self._cheapest = backend, share, {}, {}

    def cheapest(self, kernel: Kernel) -> tuple[float, str]:
        return self.kernel(kernel), ""

    def kernel(self, kernel: Kernel) -> float:
        return self.share * len(in_parts(kernel)) if kernel.chained else 1.0


@pytest.mark.parametrize("share", (0.5, 1.5))
def test_a_plan_has_attention_as_one_kernel_where_that_is_cheaper(share: float) -> None:
    b = Build()
    graph, backend = b.outputs(of_heads(b, 1, 80, 3, 8)), host_backend("fp16")
    planned = planning.plan(graph, backend.lowering, Costs(backend, share))
    if planned.choices is not None:
        graph.plans[backend.name] = planned.choices
    jobs = lower(graph, backend.lowering, planned.choices).jobs
    assert any(j.kernel.chained for j in jobs) == (share < 1)
    feeds = feeds_for(graph)
    assert worst(backend.compile(graph)(feeds), evaluate_graph(graph, feeds, wide=True)) <= ERRORS["fp16"]


def test_in_float32_there_is_no_such_kernel() -> None:
    b = Build()
    graph, backend = b.outputs(of_heads(b, 1, 80, 3, 8)), host_backend()
    planned = planning.plan(graph, backend.lowering, Costs(backend, 0.01))
    assert not any(j.kernel.chained for j in lower(graph, backend.lowering, planned.choices).jobs)


def test_an_attention_is_measured_against_its_parts_and_goes_through_a_file() -> None:
    b = Build()
    graph, backend = b.outputs(of_heads(b, 1, 80, 3, 8)), host_backend("fp16")
    (kernel,) = attention_kernels(joined(graph), backend)
    assert backend.measure(kernel) > 0 and backend.measure(replace(kernel, algorithm=IN_TURN)) > 0
    again = taso.load(onnx_export.export(with_plans(graph)))
    assert len(attention_kernels(again, backend)) == 1


# ── axes in any order ────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("what", [
    "test_what_broadcasts_among_turned_axes_is_right", "test_every_kind_of_reader_reads_turned_axes",
])  # fmt: skip
def test_axes_in_another_order_are_read_as_on_onednn(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(axes, "OneDNNBackend", lambda threads: host_backend("tf32"), raising=False)
    getattr(axes, what)()


def drawn(seed: int) -> Graph:
    """A product of matrices whose axes lie in any order, with steps behind it, written in another order perhaps."""
    random, b = np.random.default_rng(seed), Build(seed)
    rows, inner, columns = (int(n) for n in random.integers(1, 9, 3))
    batch = (int(random.integers(1, 3)), int(random.choice([1, 3])))

    def lying(dims: tuple[int, ...]) -> Value:
        order = [int(a) for a in random.permutation(4)]
        return b.op("Transpose", b.input(*(dims[order.index(a)] for a in range(4))), perm=tuple(order))

    y = b.op("MatMul", lying((*batch, rows, inner)), lying((*batch, inner, columns)))
    for _ in range(int(random.integers(0, 3))):
        shape = [(columns,), (*batch, rows, columns), (rows, 1), (1,)][int(random.integers(4))]
        y = b.op("Add", y, b.input(*shape)) if random.random() < 0.6 else b.op("Relu", y)
    graph = b.outputs(y, b.op("Exp", b.op("Tanh", y)))
    if random.random() < 0.5:
        name = named_axes((0, 2, 1, 3), y.type.dims)
        places = [i for i, n in enumerate(graph.nodes) if n.op.name in ("MatMul", "Add", "Relu", "Tanh", "Exp")]
        graph.plans["cudnn tf32"] = Choices(structure(graph), {(i, 0): name for i in places})
    return graph


@pytest.mark.parametrize("refusing", [False, True])
def test_products_of_matrices_that_lie_in_any_way_are_right(refusing: bool) -> None:
    backend = CudnnBackend("tf32", Refusing(kernels())) if refusing else host_backend("tf32")
    graphs = [drawn(seed) for seed in range(40)]
    programs = [backend.compile(graph) for graph in graphs]
    for graph, program in zip(graphs, programs, strict=True):
        assert {how for _, how in program.operators} == {"own"}
        feeds = feeds_for(graph)
        assert worst(program(feeds), evaluate_graph(graph, feeds, wide=True)) <= 2e-5


# ── ONNX's operator, and Einsum ──────────────────────────────────────────────────────────────────────────────────


def attention_model(**attrs: object) -> Graph:
    names = [("q", (2, 5, 32)), ("k", (2, 7, 32)), ("v", (2, 7, 16)), ("m", (5, 7))]
    node = helper.make_node("Attention", [n for n, _ in names], ["y"], q_num_heads=4, kv_num_heads=2 * 2, **attrs)
    given = [helper.make_tensor_value_info(n, TensorProto.FLOAT, dims) for n, dims in names]
    graph = helper.make_graph([node], "g", given, [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)])
    return taso.load(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)], ir_version=10))


@pytest.mark.parametrize("precision", ["float32", *ERRORS])
def test_onnx_attention_runs_on_the_device(precision: str) -> None:
    graph, backend = attention_model(scale=0.4), host_backend(precision)
    feeds = feeds_for(graph)
    wanted = evaluate_graph(graph, feeds, wide=True)
    program = backend.compile(graph)
    assert {how for _, how in program.operators} == {"own"} and static(program).replays == 1
    assert worst(program(feeds), wanted) <= ERRORS.get(precision, 2e-6)


def test_onnx_attention_is_one_kernel_where_a_plan_has_it() -> None:
    backend = host_backend("fp16")
    graph = joined(with_wholes(attention_model(), backend.lowering))
    assert len(attention_kernels(graph, backend)) == 1
    feeds = feeds_for(graph)
    wanted = evaluate_graph(attention_model(), feeds, wide=True)
    assert worst(backend.compile(graph)(feeds), wanted) <= ERRORS["fp16"]


def test_an_einsum_of_two_operands_runs_on_the_device() -> None:
    b = Build()
    y = b.op("Einsum", b.input(2, 3, 4, 5), b.input(2, 6, 4, 5), equation="bhqd,bkqd->bqhk")
    graph, backend = b.outputs(b.op("Relu", y)), host_backend()
    program, feeds = backend.compile(graph), feeds_for(graph)
    assert {how for _, how in program.operators} == {"own"}
    assert worst(program(feeds), evaluate_graph(graph, feeds, wide=True)) <= 2e-6
