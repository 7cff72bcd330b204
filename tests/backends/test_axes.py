"""Axes in another order than ONNX has them: Transposes that move nothing, and products of tensors that lie so."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import permutations, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

import taso
from taso.backends.lowering import (
    BLOCKED,
    LAST,
    PLAIN,
    Choices,
    Layouts,
    Lowering,
    axes_of,
    choices_of,
    is_view,
    lower,
    named_axes,
    structure,
)
from taso.backends.onednn.library import library
from taso.backends.onednn.places import strides_of
from taso.graph.errors import BackendUnavailable
from taso.graph.evaluate import evaluate_graph
from taso.graph.graph import Graph, Value
from taso.graph.operator import REGISTRY, AttrValue, Weight
from taso.graph.types import DType, TensorType

try:
    library()
    _MISSING = ""
except BackendUnavailable as error:
    _MISSING = str(error)
else:
    from taso.backends.onednn.backend import OneDNNBackend

needs_library = pytest.mark.skipif(bool(_MISSING), reason=_MISSING or "oneDNN loads")

Array = NDArray[np.float32]
LAYOUTS = Layouts(16, permuted=True)


class Build:
    def __init__(self, seed: int = 0) -> None:
        self.graph = taso.new_graph()
        self.random = np.random.default_rng(seed)
        self.feeds: dict[str, Array] = {}

    def input(self, *shape: int) -> Value:
        name = f"x{len(self.feeds)}"
        self.feeds[name] = self.random.standard_normal(shape).astype(np.float32)
        return self.graph.add_input(name, TensorType(DType.FLOAT, shape))

    def weight(self, *shape: int) -> Value:
        array = self.random.standard_normal(shape).astype(np.float32)
        return self.graph.add_weight(Weight(TensorType(DType.FLOAT, shape), array))

    def __call__(self, name: str, *inputs: Value, **attrs: AttrValue) -> Value:
        return self.graph.make(REGISTRY[name], inputs, attrs).output

    def done(self, *values: Value) -> Graph:
        self.graph.set_outputs([(f"y{i}", v) for i, v in enumerate(values)])
        return self.graph


def check(b: Build, graph: Graph, tolerance: float = 2e-6) -> None:
    wanted = evaluate_graph(graph, b.feeds)
    for name, got in OneDNNBackend(1).compile(graph)(b.feeds).items():
        assert np.abs(got.astype(np.float64) - wanted[name]).max() <= tolerance * np.abs(wanted[name]).max()


def launched(graph: Graph) -> list[str]:
    program = OneDNNBackend(1).compile(graph)
    feeds = {n: np.zeros(v.type.static_shape, np.float32) for n, v in zip(graph.input_names, graph.inputs, strict=True)}
    return [name for name, _ in program.profile(feeds)]


# ── names ────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("order", list(permutations(range(4))))
@pytest.mark.parametrize("dims", [(2, 3, 4, 5), (1, 3, 4, 5), (2, 1, 4, 1), (1, 1, 1, 1), (1, 1, 4, 5)])
def test_a_layout_has_the_strides_of_its_axes_in_order(order: tuple[int, ...], dims: tuple[int, ...]) -> None:
    name = named_axes(order, dims)
    lies = np.empty([dims[a] for a in order], np.float32).transpose(np.argsort(order))
    found = np.array(strides_of(dims, name)) * 4
    assert all(found[a] == lies.strides[a] for a in range(4) if dims[a] > 1)
    t = TensorType(DType.FLOAT, dims)
    assert LAYOUTS.canonical(t, name) == name
    assert named_axes(axes_of(name, 4), dims) == name


def test_two_layouts_are_alike_where_the_bytes_are_the_same() -> None:
    dims = (1, 6, 5, 4)
    t = TensorType(DType.FLOAT, dims)
    names = sorted({named_axes(order, dims) for order in permutations(range(4))})
    assert len(names) == 6
    for one, other in product(names, names):
        same = strides_of(dims, one)[1:] == strides_of(dims, other)[1:]
        assert LAYOUTS.alike(t, one, other) == same
    assert not LAYOUTS.alike(t, BLOCKED, "axes 0213")
    assert not LAYOUTS.alike(TensorType(DType.FLOAT, (6, 5, 4)), PLAIN, "axes 0213")


# ── Transposes ───────────────────────────────────────────────────────────────────────────────────────────────────


@needs_library
@given(st.permutations(range(4)), st.permutations(range(4)), st.lists(st.integers(1, 5), min_size=4, max_size=4))
@settings(max_examples=60)
def test_transposes_in_a_row_move_nothing_until_somebody_asks(
    first: list[int], second: list[int], dims: list[int]
) -> None:
    b = Build()
    x = b("Transpose", b.input(*dims), perm=tuple(first))
    y = b("Transpose", b("Relu", x), perm=tuple(second))
    graph = b.done(y)
    plan = lower(graph, OneDNNBackend(1).lowering)
    assert [is_view(j.kernel) for j in plan.jobs] == [True, False, True]
    check(b, graph)
    assert launched(graph).count("Reorder") <= 1


@needs_library
def test_going_over_to_channels_last_and_back_costs_nothing_around_a_convolution_of_such() -> None:
    b = Build()
    x = b("Transpose", b.input(1, 9, 9, 24), perm=(0, 3, 1, 2))
    y = b("Conv", x, b.weight(24, 24, 3, 3))
    graph = b.done(b("Transpose", y, perm=(0, 2, 3, 1)))
    assert launched(graph) == ["Conv"]
    check(b, graph, 1e-5)


@needs_library
def test_what_broadcasts_among_turned_axes_is_right() -> None:
    for shape in ((5, 1, 1), (1, 6, 1), (4,), (1, 5, 6, 4), (1, 1, 6, 4), (1,)):
        b = Build()
        x = b("Transpose", b.input(1, 6, 5, 4), perm=(0, 2, 1, 3))
        y = b("Mul", b("Add", x, b.input(*shape)), b.weight(*shape))
        check(b, b.done(y, b("Transpose", y, perm=(0, 2, 1, 3)), b("Softmax", x, axis=-1)))


@needs_library
def test_every_kind_of_reader_reads_turned_axes() -> None:
    b = Build()
    x = b("Transpose", b.input(2, 16, 5, 4), perm=(0, 3, 1, 2))
    z = b("Transpose", b.input(2, 16, 5, 4), perm=(0, 2, 1, 3))
    one, two = b.graph.make(REGISTRY["Split"], [z], {"axis": 1, "split": (2, 3)}).outputs
    outs = [
        b("Reshape", x, shape=(2, 320)), b("Concat", x, x, axis=1), one, two, b("MaxPool", z, kernel_shape=(2, 2)),
        b("GlobalAveragePool", x), b("ReduceMean", z, axes=(2, 3), keepdims=1), b("Slice", x, starts=(1,), ends=(3,),
        axes=(1,)), b("LayerNormalization", z, b.weight(4), b.weight(4)), b("Conv", z, b.weight(3, 5, 2, 2)),
        b("MatMul", x, b.weight(5, 7)), b("MatMul", b.weight(16, 16), z), b("Pad", x, pads=(0, 1, 0, 0, 0, 0, 2, 0)),
        b("Neg", x), b("Unsqueeze", x, axes=(0,)),
    ]  # fmt: skip
    check(b, b.done(*outs), 1e-5)


# ── products ─────────────────────────────────────────────────────────────────────────────────────────────────────


def attention(b: Build, tokens: int, heads: int, size: int, masked: bool) -> Graph:
    width = heads * size
    x = b.input(1, tokens, width)

    def turned(perm: tuple[int, ...]) -> Value:
        return b("Transpose", b("Reshape", b("MatMul", x, b.weight(width, width)), shape=(1, tokens, heads, size)),
                 perm=perm)  # fmt: skip

    q, k, v = turned((0, 2, 1, 3)), turned((0, 2, 3, 1)), turned((0, 2, 1, 3))
    scores = b("Div", b("MatMul", q, k), b.graph.add_weight(Weight(TensorType(DType.FLOAT, ()), np.float32(width))))
    if masked:
        scores = b("Add", scores, b.input(1, 1, 1, tokens))
    mixed = b("Transpose", b("MatMul", b("Softmax", scores, axis=-1), v), perm=(0, 2, 1, 3))
    return b.done(b("Reshape", mixed, shape=(1, tokens, width)))


def side_by_side(graph: Graph) -> Graph:
    """With what the last product makes put side by side, and its Transpose for nothing."""
    chosen: dict[tuple[int, int], str] = {}
    for place, node in enumerate(graph.nodes):
        if node.op.name == "MatMul" and node.output.type.rank == 4:
            chosen[place, 0] = "axes 0213"
        if node.op.name == "Transpose":
            chosen[place, 0] = PLAIN
    last = max(place for place, _ in chosen)
    first = [p for p, n in enumerate(graph.nodes) if n.op.name == "MatMul" and n.output.type.rank == 4][0]
    del chosen[first, 0]
    plan = {key: name for key, name in chosen.items() if name != PLAIN or key[0] == last}
    graph.plans["onednn"] = Choices(structure(graph), plan)
    return graph


@needs_library
@pytest.mark.parametrize("tokens, heads, size", [(7, 3, 5), (16, 2, 16), (33, 4, 8), (1, 2, 8), (9, 1, 8)])
@pytest.mark.parametrize("masked", (False, True))
def test_an_attention_reads_its_heads_where_they_lie(tokens: int, heads: int, size: int, masked: bool) -> None:
    b = Build()
    graph = attention(b, tokens, heads, size, masked)
    check(b, graph, 1e-5)
    assert "Transpose" not in launched(graph)
    if tokens > 1 and heads > 1:
        assert launched(graph).count("Reorder") == 1
        side_by_side(graph)
        assert choices_of(graph, "onednn") is not None
        assert launched(graph).count("Reorder") == 0
        check(b, graph, 1e-5)


@needs_library
@given(
    st.permutations(range(4)), st.permutations(range(4)), st.sampled_from([(1, 3), (2, 3), (2, 1)]),
    st.integers(1, 20), st.integers(1, 20), st.integers(1, 20), st.booleans(), st.lists(
        st.sampled_from(["Relu", "Sigmoid", "row", "whole", "column", "number"]), max_size=3),
)  # fmt: skip
@settings(max_examples=120)
def test_a_product_of_matrices_that_lie_in_any_way_is_right(
    first: list[int], second: list[int], batch: tuple[int, int], rows: int, inner: int, columns: int, aside: bool,
    behind: Sequence[str],
) -> None:  # fmt: skip
    b = Build(rows)

    def lying(order: list[int], dims: tuple[int, ...]) -> Value:
        source = b.input(*(dims[order.index(a)] for a in range(4)))
        return b("Transpose", source, perm=tuple(order))

    left, right = lying(first, (*batch, rows, inner)), lying(second, (*batch, inner, columns))
    y = b("MatMul", left, right)
    shapes = {"row": (columns,), "whole": (*batch, rows, columns), "column": (rows, 1), "number": (1,)}
    for step in behind:
        y = b("Add", y, b.input(*shapes[step])) if step in shapes else b(step, y)
    graph = b.done(y)
    if aside:
        order = named_axes((0, 2, 1, 3), y.type.dims)
        places = [i for i, n in enumerate(graph.nodes) if n.op.name in ("MatMul", "Add", "Relu", "Sigmoid")]
        graph.plans["onednn"] = Choices(structure(graph), {(i, 0): order for i in places})
    check(b, graph, 2e-5)


@needs_library
def test_layouts_of_axes_go_through_a_file() -> None:
    b = Build()
    graph = side_by_side(attention(b, 16, 2, 16, True))
    again = taso.load(taso.export_onnx(graph))
    assert choices_of(again, "onednn") is not None
    assert launched(again) == launched(graph)
    check(b, again, 1e-5)


def test_backends_of_other_layouts_have_their_transposes_as_they_were() -> None:
    b = Build()
    graph = b.done(b("Transpose", b.input(1, 6, 5, 4), perm=(0, 2, 1, 3)))
    (job,) = lower(graph, Lowering(Layouts(16))).jobs
    assert [r.layout for r in job.kernel.results] == [PLAIN] and not is_view(job.kernel)
    assert LAST not in {o.layout for o in job.kernel.operands}


@needs_library
def test_a_whole_whose_layout_has_two_names_is_parted_by_that_of_its_parts() -> None:
    # sixteen channels lie in a block as they do channels-last, and eight of them do not
    b = Build()
    block = OneDNNBackend(1).lowering.layouts.block
    x = b("Conv", b.input(1, 16, 4, 4), b.weight(block, 16, 1, 1))
    one, two = b.graph.make(REGISTRY["Split"], [x], {"axis": 1, "split": (block // 2, block // 2)}).outputs
    graph = b.done(b("Relu", one), b("Relu", two))
    places = {n.op.name: i for i, n in enumerate(graph.nodes)}
    for other in (PLAIN, LAST):
        parts = {(places["Split"], 0): other, (places["Split"], 1): other}
        graph.plans["onednn"] = Choices(structure(graph), {(places["Conv"], 0): BLOCKED, **parts})
        check(b, graph, 1e-5)


@needs_library
def test_parts_that_lie_in_different_ways_are_copied() -> None:
    b = Build()
    x = b("Conv", b.input(1, 16, 4, 4), b.weight(16, 16, 1, 1))
    one, two = b.graph.make(REGISTRY["Split"], [x], {"axis": 1, "split": (8, 8)}).outputs
    graph = b.done(b("Relu", one), b("Relu", two))
    places = {n.op.name: i for i, n in enumerate(graph.nodes)}
    graph.plans["onednn"] = Choices(structure(graph), {(places["Split"], 1): LAST})
    check(b, graph, 1e-5)


@needs_library
@pytest.mark.parametrize("anchor", ("LayerNormalization", "Softmax", "LogSoftmax", "InstanceNormalization",
                                    "RMSNormalization", "MatMul"))  # fmt: skip
@pytest.mark.parametrize("layout, channels", [(LAST, 8), (BLOCKED, 16)])
def test_what_computes_plainly_takes_no_step_along_that_lies_otherwise(
    anchor: str, layout: str, channels: int
) -> None:
    b = Build()
    x = b.input(1, channels, 4, 5)
    c = b("Conv", x, b.weight(channels, channels, 1, 1))
    more = {"LayerNormalization": [b.weight(5), b.weight(5)], "InstanceNormalization": [b.weight(channels)] * 2,
            "RMSNormalization": [b.weight(5)], "MatMul": [b.weight(5, 5)]}.get(anchor, [])  # fmt: skip
    graph = b.done(b("Add", c, b(anchor, x, *more)))
    places = {n.op.name: i for i, n in enumerate(graph.nodes)}
    lies = {(places["Conv"], 0): layout, (places["Add"], 0): layout}
    graph.plans["onednn"] = Choices(structure(graph), lies, {places["Add"]: 1})
    check(b, graph, 1e-5)
