"""Convolutions and pools in a row, run in bands of rows, against the operators' definitions one after the other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import assume, given, reject, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

import taso
from taso.backends.lowering import (
    IN_TURN,
    LAST,
    Choices,
    Kernel,
    choices_of,
    in_parts,
    lower,
    structure,
)
from taso.backends.onednn import depth_first
from taso.backends.onednn.library import library
from taso.graph.errors import BackendUnavailable, ShapeError
from taso.graph.evaluate import evaluate_graph
from taso.graph.graph import Graph, Value
from taso.graph.operator import REGISTRY, AttrValue, Trait, Weight
from taso.graph.types import DType, TensorType
from taso.search import planning
from taso.search.costs import CostModel

try:
    library()
    _MISSING = ""
except BackendUnavailable as error:
    _MISSING = str(error)
else:
    from taso.backends.onednn.backend import OneDNNBackend

pytestmark = pytest.mark.skipif(bool(_MISSING), reason=_MISSING or "oneDNN loads")

Array = NDArray[np.float32]
# max|a − b| / max|b| of a few sums of some hundred products each
TOLERANCE = 3e-6


@dataclass(frozen=True)
class Layer:
    """A convolution ("Conv") or a pool, and the element-wise steps behind it."""

    op: str = "Conv"
    channels: int = 16
    window: tuple[int, int] = (1, 1)
    stride: tuple[int, int] = (1, 1)
    pads: tuple[int, int, int, int] = (0, 0, 0, 0)
    depthwise: bool = False
    bias: bool = True
    steps: tuple[str, ...] = ("Relu",)
    counts_padding: bool = False


class Chain:
    """A graph of layers, one behind the other, and the plan that has them run as one kernel."""

    def __init__(self, layers: Sequence[Layer], size: tuple[int, int, int, int], seed: int = 0) -> None:
        self.random = np.random.default_rng(seed)
        self.graph = taso.new_graph()
        self.feeds: dict[str, Array] = {}
        self.input = value = self.fed(size)
        for layer in layers:
            value = self.layer(value, layer)
            for step in layer.steps:
                value = self.step(value, step)
        self.graph.set_outputs([("y", value)])

    def fed(self, shape: Sequence[int]) -> Value:
        name = f"x{len(self.feeds)}"
        self.feeds[name] = self.random.standard_normal(shape).astype(np.float32)
        return self.graph.add_input(name, TensorType(DType.FLOAT, tuple(shape)))

    def weight(self, *shape: int, scale: float = 1.0) -> Value:
        array = (self.random.standard_normal(shape) * scale).astype(np.float32)
        return self.graph.add_weight(Weight(TensorType(DType.FLOAT, shape), array))

    def make(self, name: str, inputs: Sequence[Value | None], **attrs: AttrValue) -> Value:
        return self.graph.make(REGISTRY[name], inputs, attrs).output

    def layer(self, x: Value, layer: Layer) -> Value:
        window = {"strides": layer.stride, "pads": layer.pads}
        if layer.op == "MaxPool":
            return self.make("MaxPool", [x], kernel_shape=layer.window, **window)
        if layer.op == "AveragePool":
            counted = int(layer.counts_padding)
            return self.make("AveragePool", [x], kernel_shape=layer.window, count_include_pad=counted, **window)
        inner = x.dim(1)
        out, group = (inner, inner) if layer.depthwise else (layer.channels, 1)
        fan = inner // group * layer.window[0] * layer.window[1]
        weight = self.weight(out, inner // group, *layer.window, scale=fan**-0.5)
        return self.make("Conv", [x, weight, self.weight(out) if layer.bias else None], group=group, **window)

    def step(self, x: Value, name: str) -> Value:
        shape = x.type.static_shape
        if name == "residual":
            return self.make("Add", [x, self.fed(shape)])
        if name == "per channel":
            return self.make("Mul", [x, self.weight(1, shape[1], 1, 1)])
        if name == "number":
            return self.make("Add", [x, self.weight(1)])
        return self.make(name, [x])

    def planned(self) -> Graph:
        """The graph with all of its layers in one kernel."""
        layouts: dict[tuple[int, int], str] = {}
        entries: dict[int, int | None] = {}
        first = True
        for place, node in enumerate(self.graph.nodes):
            if node.constant or node.op.has(Trait.SOURCE):
                continue
            layouts[place, 0] = LAST
            if not first:
                entries[place] = 0
            first = False
        self.graph.plans["onednn"] = Choices(structure(self.graph), layouts, entries)
        return self.graph


def kernels(graph: Graph, threads: int = 1) -> list[Kernel]:
    return [j.kernel for j in lower(graph, OneDNNBackend(threads).lowering, choices_of(graph, "onednn")).jobs]


def error(graph: Graph, feeds: dict[str, Array], threads: int = 1) -> float:
    wanted = evaluate_graph(graph, feeds)["y"]
    got = OneDNNBackend(threads).compile(graph)(feeds)["y"]
    assert np.abs(wanted).max() > 0.1
    return float(np.abs(got.astype(np.float64) - wanted).max() / np.abs(wanted).max())


@pytest.fixture(autouse=True)
def small_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """So small that small pictures take several bands."""
    cache_of(monkeypatch, 128 << 10)


def cache_of(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    monkeypatch.setattr("taso.backends.onednn.kernels.second_level_cache", lambda: size)


INVERTED = [
    Layer(channels=48), Layer(window=(3, 3), pads=(1, 1, 1, 1), depthwise=True, steps=("Relu", "per channel")),
    Layer(channels=24, steps=("residual",)),
]  # fmt: skip
HALVED = [
    Layer(channels=48, steps=("HardSwish",)),
    Layer(window=(3, 3), stride=(2, 2), pads=(1, 1, 1, 1), depthwise=True), Layer(channels=24, steps=()),
]  # fmt: skip
STEM = [
    Layer(channels=32, window=(3, 3), stride=(2, 2)), Layer(channels=32, window=(3, 3), bias=False),
    Layer(channels=64, window=(3, 3), pads=(1, 1, 1, 1), steps=("number", "Relu")),
    Layer("MaxPool", window=(3, 3), stride=(2, 2), steps=()),
]  # fmt: skip
POOLED = [
    Layer(channels=32, window=(7, 7), stride=(2, 2), pads=(3, 3, 3, 3)),
    Layer("AveragePool", window=(3, 3), stride=(2, 2), pads=(1, 1, 1, 1), steps=("Sigmoid",)),
]  # fmt: skip
CHAINS = {"inverted": INVERTED, "halved": HALVED, "stem": STEM, "pooled": POOLED}


@pytest.mark.parametrize("name", CHAINS)
@pytest.mark.parametrize("images", (1, 2))
@pytest.mark.parametrize("threads", (1, 2))
def test_layers_in_a_row_are_computed_in_several_bands(name: str, images: int, threads: int) -> None:
    chain = Chain(CHAINS[name], (images, 16, 61, 35))
    graph = chain.planned()
    (kernel,) = kernels(graph, threads)
    assert kernel.chained
    program = OneDNNBackend(threads).compile(graph)
    assert program.kernels > images * len(CHAINS[name])
    assert error(graph, chain.feeds, threads) < TOLERANCE


def test_what_lies_between_two_layers_takes_no_memory_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    cache_of(monkeypatch, 1 << 20)
    layers = [Layer(channels=256), Layer(channels=16)]
    chain, apart = Chain(layers, (1, 16, 64, 64)), Chain(layers, (1, 16, 64, 64))
    between = 4 * 256 * 64 * 64
    one, several = (OneDNNBackend(1).compile(g) for g in (chain.planned(), apart.graph))
    assert one.peak_bytes < between / 2 < between < several.peak_bytes


DIMENSION = st.integers(1, 3)


@st.composite
def layers(draw: st.DrawFn) -> Layer:
    op = draw(st.sampled_from(["Conv", "Conv", "depthwise", "MaxPool", "AveragePool"]))
    window = (draw(DIMENSION), draw(DIMENSION))
    # a window never lies wholly in the padding
    pads = tuple(draw(st.integers(0, window[i % 2] - 1)) for i in range(4))
    steps = ["Relu", "Sigmoid", "number"]
    if op in ("Conv", "depthwise"):
        steps += ["residual", "per channel"]
    return Layer(
        "Conv" if op == "depthwise" else op, draw(st.sampled_from([16, 24, 32])), window,
        (draw(st.integers(1, 2)), draw(st.integers(1, 2))), (pads[0], pads[1], pads[2], pads[3]), op == "depthwise",
        draw(st.booleans()), tuple(draw(st.lists(st.sampled_from(steps), max_size=2))), draw(st.booleans()),
    )  # fmt: skip


@given(st.lists(layers(), min_size=2, max_size=4), st.integers(9, 40), st.integers(9, 40), st.integers(0, 999))
@settings(max_examples=60)
def test_any_layers_in_a_row_are_right_whether_in_bands_or_not(
    row: list[Layer], height: int, width: int, seed: int
) -> None:
    try:
        chain = Chain(row, (1, 16, height, width), seed)
    except ShapeError:
        # a window that is larger than what there is left
        reject()
    graph = chain.planned()
    assume(np.abs(evaluate_graph(graph, chain.feeds)["y"]).max() > 0.1)
    assert error(graph, chain.feeds) < 3 * TOLERANCE


def test_rows_that_are_not_kept_for_the_next_band_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    chain = Chain(INVERTED, (1, 16, 61, 35))
    graph = chain.planned()

    def forget(bands: depth_first._Bands, act: depth_first._Keep) -> None:
        bands.base[act.layer] = act.start

    monkeypatch.setattr(depth_first._Bands, "keep", forget)
    assert error(graph, chain.feeds) > 1e-2


# ── which layers ─────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("what", ["dilated", "ceil", "one row", "in blocks"])
def test_what_cannot_run_in_bands_runs_one_by_one_and_a_plan_that_asks_for_it_is_left_aside(what: str) -> None:
    chain = Chain([], (1, 16, 40, 40))
    size = 3 if what != "one row" else 40
    x = chain.layer(chain.input, Layer(channels=32))
    if what == "ceil":
        y = chain.make("MaxPool", [x], kernel_shape=(3, 3), strides=(2, 2), ceil_mode=1)
    else:
        weight, dilation = chain.weight(32, 32, size, size, scale=0.1), 2 if what == "dilated" else 1
        y = chain.make("Conv", [x, weight], dilations=(dilation, dilation))
    chain.graph.set_outputs([("y", y)])
    graph = chain.planned()
    if what == "in blocks":
        plan = choices_of(graph, "onednn")
        assert plan is not None
        graph.plans["onednn"] = replace(plan, layouts=dict.fromkeys(plan.layouts, "blocked"))
    assert [k.chained for k in kernels(graph)] == [False, False]
    # a window of 40 by 40 sums 51,200 products
    assert error(graph, chain.feeds) < (1e-5 if what == "one row" else TOLERANCE)


def test_a_value_that_is_read_elsewhere_is_not_between_layers() -> None:
    chain = Chain([], (1, 16, 40, 40))
    x = chain.layer(chain.input, Layer(channels=32))
    y = chain.layer(x, Layer(channels=32, window=(3, 3)))
    chain.graph.set_outputs([("y", y), ("x", x)])
    assert not any(k.chained for k in kernels(chain.planned()))


# ── what it is worth ─────────────────────────────────────────────────────────────────────────────────────────────


class Costs(CostModel):
    """Kernels cost one second each; of several anchors in one kernel all cost `share` of what they do by themselves."""

    def __init__(self, share: float) -> None:
        self.backend = OneDNNBackend(1)
        self.share = share
        self._costs = {}
        self._cheapest = {}

    def cheapest(self, kernel: Kernel) -> tuple[float, str]:
        return self.kernel(kernel), ""

    def kernel(self, kernel: Kernel) -> float:
        return self.share * len(in_parts(kernel)) if kernel.chained else 1.0


@pytest.mark.parametrize("share", (0.5, 1.5))
def test_a_plan_has_layers_run_as_one_where_that_is_cheaper(share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    cache_of(monkeypatch, 2 << 20)
    chain = Chain([Layer(channels=192), Layer(window=(3, 3), depthwise=True), Layer(channels=32)], (1, 16, 64, 64))
    planned = planning.plan(chain.graph, OneDNNBackend(1).lowering, Costs(share))
    chain.graph.plans["onednn"] = planned.choices
    assert any(k.chained for k in kernels(chain.graph)) == (share < 1)
    assert error(chain.graph, chain.feeds) < TOLERANCE


def test_small_values_between_layers_are_not_looked_at() -> None:
    chain = Chain([Layer(channels=32), Layer(channels=32)], (1, 16, 16, 16))
    planned = planning.plan(chain.graph, OneDNNBackend(1).lowering, Costs(0.01))
    chain.graph.plans["onednn"] = planned.choices
    assert not any(k.chained for k in kernels(chain.graph))


def test_its_cost_is_that_of_its_parts_by_how_much_faster_it_is_than_they_are_in_turn() -> None:
    chain = Chain(INVERTED, (1, 16, 61, 35))
    (kernel,) = kernels(chain.planned())
    asked: list[Kernel] = []

    class Timed(OneDNNBackend):
        def measure(self, kernel: Kernel) -> float:
            asked.append(kernel)
            return {"": 3.0, IN_TURN: 4.0}[kernel.algorithm] if kernel.chained else 1.0

    class Forgetful:
        def cost(self, device: str, key: str) -> float | None:
            return None

        def keep_cost(self, device: str, key: str, seconds: float) -> float:
            return seconds

    costs = CostModel(Timed(1), Forgetful())  # type: ignore[arg-type]  # what is asked of a database
    assert costs.kernel(kernel) == pytest.approx(0.75 * 3)
    parts = [k for k in asked if not k.chained]
    assert [[s.op.name for s in k.steps] for k in parts] == [["Conv", "Relu"], ["Conv", "Relu", "Mul"], ["Conv", "Add"]]
    assert [k.results[0].type for k in parts][-1] == kernel.results[0].type
    assert sum(len(k.operands) for k in parts) == len(kernel.operands) + 2


def test_in_turn_is_one_band() -> None:
    chain = Chain(INVERTED, (1, 16, 61, 35))
    (kernel,) = kernels(chain.planned())
    backend = OneDNNBackend(1)
    assert backend.measure(kernel) > 0
    assert backend.measure(replace(kernel, algorithm=IN_TURN)) > 0


def test_the_plan_goes_through_a_file() -> None:
    chain = Chain(INVERTED, (1, 16, 61, 35))
    again = taso.load(taso.export_onnx(chain.planned()))
    assert [k.chained for k in kernels(again)] == [True]
    assert error(again, chain.feeds) < TOLERANCE
