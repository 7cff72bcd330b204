"""Winograd kernels of the oneDNN backend against convolutions computed in float64, and their transforms' proof."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import product

import numpy as np
import pytest
from numpy.typing import NDArray

import taso.graph.ops  # noqa: F401  # registers the operators
from taso.backends.lowering import BLOCKED, LAST, PLAIN, Kernel, Layouts, Operand, lower
from taso.backends.onednn import coded, winograd
from taso.backends.onednn.kernels import NotInPlace, design
from taso.backends.onednn.library import library
from taso.backends.onednn.places import Block, Place, from_plain, logical_spec, tensor_bytes, to_plain
from taso.backends.onednn.recipe import Recipe
from taso.graph.errors import BackendError, BackendUnavailable, TasoError
from taso.graph.evaluate import evaluate_graph
from taso.graph.graph import Graph, Value
from taso.graph.operator import REGISTRY, AttrValue, Weight
from taso.graph.types import DType, TensorType
from taso.graph.winograd import from_points, points, transforms
from taso.rules import algorithms as rules

try:
    library()
    _MISSING = ""
except BackendUnavailable as error:
    _MISSING = str(error)
else:
    from taso.backends.onednn.backend import OneDNNBackend
    from taso.backends.onednn.executor import threads_in_force

pytestmark = pytest.mark.skipif(bool(_MISSING), reason=_MISSING or "oneDNN loads")



@pytest.fixture(params=["machine code", "primitives"], autouse=True)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both ways to compute transforms and products: by machine code of our own, and by oneDNN's primitives."""
    if request.param == "primitives":
        monkeypatch.setattr(winograd, "isa_here", lambda: None)
    elif not _MISSING and winograd.isa_here() is None:
        pytest.skip("no machine code runs here")
    return str(request.param)


Array = NDArray[np.float32]
LAYOUTS = (PLAIN, BLOCKED, LAST)
BLOCK = Layouts(16)
TILES = {(3, 3): ((2, 2), (4, 4)), **{(1, r): ((1, 4), (1, 6)) for r in (3, 5, 7)},
         **{(r, 1): ((4, 1), (6, 1)) for r in (3, 5, 7)}}  # fmt: skip
# max|a − b| / max|b|, by the larger side of a tile: some times what is found, a fraction of what a wrong entry makes
TOLERANCE = {2: 2e-6, 4: 1e-5, 6: 3e-5}


# ── transforms ───────────────────────────────────────────────────────────────────────────────────────────────────


PAIRS = sorted({(m, r) for filters, tiles in TILES.items() for tile in tiles
                for m, r in zip(tile, filters, strict=True) if r > 1})  # fmt: skip


@pytest.mark.parametrize("outputs, taps", PAIRS)
def test_the_transforms_are_those_that_the_rules_prove(outputs: int, taps: int) -> None:
    ours = transforms(outputs, taps)
    theirs = rules.from_points(outputs, taps, points(outputs + taps - 2))
    assert (ours.output, ours.filter, ours.data) == (theirs.output, theirs.filter, theirs.data)
    assert rules.tile_defect(theirs, 1) == ""


@pytest.mark.parametrize("outputs", (2, 4))
def test_in_two_dimensions_a_tile_is_the_convolution_coefficient_by_coefficient(outputs: int) -> None:
    ours = transforms(outputs, 3)
    assert rules.tile_defect(rules.Transforms(ours.output, ours.filter, ours.data), 2) == ""


@pytest.mark.parametrize("outputs, taps", list(product(range(1, 8), range(1, 8))))
def test_any_tile_is_the_convolution(outputs: int, taps: int) -> None:
    if outputs + taps == 2:
        with pytest.raises(TasoError, match="no filter"):
            transforms(outputs, taps)
        return
    ours = transforms(outputs, taps)
    assert rules.tile_defect(rules.Transforms(ours.output, ours.filter, ours.data), 1) == ""


def test_points_that_are_too_few_or_equal_are_refused() -> None:
    for given in ([Fraction(0)], [Fraction(0), Fraction(1), Fraction(1)]):
        with pytest.raises(TasoError, match="different points"):
            from_points(2, 3, given)


# ── kernels ──────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Case:
    """A convolution of stride 1 and the steps behind it; layouts of data, result, and what is added."""

    data: tuple[int, int, int, int]
    filters: int
    taps: tuple[int, int] = (3, 3)
    pads: tuple[int, int, int, int] = (1, 1, 1, 1)
    bias: bool = True
    behind: tuple[str, ...] = ()
    layouts: tuple[str, str] = (LAST, LAST)

    def graph(self) -> Graph:
        build = _Build()
        weight = build.weight(self.filters, self.data[1], *self.taps)
        inputs = [build.input(*self.data), weight, *([build.weight(self.filters)] if self.bias else [])]
        value = build.call("Conv", inputs, pads=self.pads, strides=(1, 1), dilations=(1, 1), group=1)
        for name in self.behind:
            value = self.step(build, name, value)
        build.graph.set_outputs([("y", value)])
        return build.graph

    def step(self, build: _Build, name: str, value: Value) -> Value:
        shape = value.type.static_shape
        if name in ("add", "mul", "sub"):
            return build.call(name.capitalize(), [value, build.input(*shape)])
        if name == "by channel":
            return build.call("Mul", [value, build.weight(shape[1], 1, 1)])
        if name == "plus channel":
            return build.call("Add", [build.weight(1, shape[1], 1, 1), value])
        if name == "by channel of each image":
            return build.call("Mul", [value, build.input(shape[0], shape[1], 1, 1)])
        if name == "times 3":
            return build.call("Mul", [value, build.constant(np.float32(3))])
        return build.call(name, [value])

    def kernel(self, graph: Graph, algorithm: str = "") -> Kernel:
        """The graph's one kernel, with operands in the case's layouts."""
        (job,) = lower(graph, OneDNNBackend(1).lowering).jobs
        out = job.kernel.results[0]
        operands = tuple(
            replace(o, layout=self.layouts[int(i > 0 and o.type == out.type)]) if _image(o) else o
            for i, o in enumerate(job.kernel.operands)
        )
        return Kernel(operands, job.kernel.steps, (replace(out, layout=self.layouts[1]),), algorithm)


def _image(o: Operand) -> bool:
    return not o.constant and o.type.rank == 4 and o.type.static_shape[2:] != (1, 1)


class _Build:
    def __init__(self) -> None:
        self.graph = Graph()
        self.random = np.random.default_rng(5)

    def input(self, *dims: int) -> Value:
        return self.graph.add_input(f"x{len(self.graph.inputs)}", TensorType(DType.FLOAT, dims))

    def constant(self, array: NDArray[np.generic] | np.generic) -> Value:
        held = np.asarray(array)
        return self.graph.add_weight(Weight(TensorType(DType.FLOAT, held.shape), held))

    def weight(self, *dims: int) -> Value:
        scale = np.sqrt(np.prod(dims[1:]))
        return self.constant((self.random.standard_normal(dims) / scale).astype(np.float32))

    def call(self, name: str, inputs: Sequence[Value], **attrs: AttrValue) -> Value:
        return self.graph.make(REGISTRY[name], inputs, attrs).outputs[0]


class _Supply:
    def __init__(self, arrays: Sequence[NDArray[np.generic]]) -> None:
        self._arrays = arrays

    def array(self, operand: int) -> NDArray[np.generic]:
        return self._arrays[operand]

    def keep(self, operand: int, label: str, make: Callable[[NDArray[np.generic]], Block]) -> Block:
        return make(self._arrays[operand])


GUARD = 4096
PATTERN = np.uint8(0xFF)  # four of them are NaN


class _Memory:
    """Bytes that are NaN all over, with some more around them that nobody may touch."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.bytes = np.full(size + 2 * GUARD + 64, PATTERN)
        self.start = GUARD + -(self.bytes.ctypes.data + GUARD) % 64

    @property
    def address(self) -> int:
        return self.bytes.ctypes.data + self.start

    @property
    def kept_to_itself(self) -> bool:
        around = np.concatenate([self.bytes[: self.start], self.bytes[self.start + self.size :]])
        return bool((around == PATTERN).all())


def run(
    kernel: Kernel, arrays: Sequence[NDArray[np.generic]], threads: int = 1, in_place: int | None = None
) -> tuple[Array, Recipe]:
    """The kernel's result on plain operands, computed in memory that is NaN wherever nothing was written."""
    with threads_in_force(library(), threads):
        recipe = design(kernel, BLOCK, _Supply(arrays), in_place)
        operands = [_Memory(tensor_bytes(o.type)) for o in kernel.operands]
        for memory, operand, array in zip(operands, kernel.operands, arrays, strict=True):
            view = logical_spec(Place("operand"), operand.type, operand.layout, 16).at(memory.address)
            from_plain(view, array, operand.type, operand.layout, 16)
        out = kernel.results[0]
        result = _Memory(tensor_bytes(out.type)) if in_place is None else operands[in_place]
        scratch = [_Memory(size) for size in recipe.scratch]
        calls = recipe.bind([m.address for m in operands], [result.address], [m.address for m in scratch])
        # twice: nothing may be left from one run that changes the next
        for _ in range(1 if in_place is not None else 2):
            assert not any(call() for call, _ in calls)
        assert all(m.kept_to_itself for m in (*operands, result, *scratch))
        view = logical_spec(Place("result"), out.type, out.layout, 16).at(result.address)
        return to_plain(view, out.type, out.layout, 16).astype(np.float32), recipe


def error(found: NDArray[np.floating], wanted: NDArray[np.floating]) -> float:
    return float(np.abs(found - wanted).max() / np.abs(wanted).max())


def feeds(graph: Graph) -> dict[str, Array]:
    random = np.random.default_rng(11)
    return {
        name: random.standard_normal(v.type.static_shape).astype(np.float32)
        for name, v in zip(graph.input_names, graph.inputs, strict=True)
    }


def in_float64(case: Case, graph: Graph, given: dict[str, Array], weights: Sequence[Array]) -> NDArray[np.float64]:
    """The case by sums of shifted products; no code of the library takes part."""
    x = np.pad(given["x0"].astype(np.float64), ((0, 0), (0, 0), case.pads[::2], case.pads[1::2]))
    w = weights[0].astype(np.float64)
    height, width = (x.shape[2 + a] - case.taps[a] + 1 for a in range(2))
    found = sum(
        np.einsum("nchw,mc->nmhw", x[:, :, i : i + height, j : j + width], w[:, :, i, j], optimize=True)
        for i, j in product(*map(range, case.taps))
    )
    assert isinstance(found, np.ndarray)
    rest = list(weights[1:])
    if case.bias:
        found = found + rest.pop(0).reshape(-1, 1, 1)
    others = iter(given[name].astype(np.float64) for name in graph.input_names[1:])
    for name in case.behind:
        if name in ("add", "mul", "sub", "by channel of each image"):
            other = next(others)
        elif name in ("by channel", "plus channel"):
            other = rest.pop(0).astype(np.float64)
        else:
            other = np.float64(3)
        found = _STEPS[name](found, other)
    return found


_STEPS: dict[str, Callable[..., NDArray[np.float64]]] = {
    "add": np.add, "mul": np.multiply, "sub": np.subtract, "by channel": np.multiply, "plus channel": np.add,
    "by channel of each image": np.multiply, "times 3": np.multiply,
    "Relu": lambda a, _: np.maximum(a, 0), "Sigmoid": lambda a, _: 1 / (1 + np.exp(-a)),
    "Tanh": lambda a, _: np.tanh(a), "HardSwish": lambda a, _: a * np.clip(a / 6 + 0.5, 0, 1),
}  # fmt: skip


def operands_of(case: Case, graph: Graph) -> tuple[list[NDArray[np.generic]], NDArray[np.float64]]:
    """Plain operands of the case's kernel, in its order, and the result that is wanted."""
    given = feeds(graph)
    (job,) = lower(graph, OneDNNBackend(1).lowering).jobs
    arrays: list[NDArray[np.generic]] = []
    named = dict(zip(graph.inputs, graph.input_names, strict=True))
    for value in job.operands:
        held = value.node.attrs.get("data")
        arrays.append(held.array() if isinstance(held, Weight) else given[named[value]])
    tensors = [a.astype(np.float32) for a, v in zip(arrays, job.operands, strict=True) if v.node.constant and a.ndim]
    return arrays, in_float64(case, graph, given, tensors)


def check(case: Case, tile: tuple[int, int], threads: int = 1) -> None:
    graph = case.graph()
    arrays, wanted = operands_of(case, graph)
    found, _ = run(case.kernel(graph, f"winograd {tile[0]}x{tile[1]}"), arrays, threads)
    assert error(found, wanted) < TOLERANCE[max(tile)]


def both_sizes(case: Case) -> list[tuple[Case, tuple[int, int]]]:
    return [(case, tile) for tile in TILES[case.taps]]


SHAPES = [
    Case((1, 32, 8, 8), 32),
    Case((1, 32, 9, 7), 48),
    Case((2, 32, 10, 13), 16),
    Case((1, 20, 11, 6), 37),
    Case((3, 7, 5, 5), 3, bias=False),
    Case((1, 1, 6, 6), 1),
    Case((1, 16, 1, 1), 16),
    Case((2, 16, 2, 3), 16),
    Case((1, 16, 3, 1), 32, bias=False),
    Case((1, 40, 57, 57), 40),
    Case((2, 64, 30, 31), 64),
    *(Case((1, 16, 9, 8), 16, pads=pads) for pads in (
        (0, 0, 0, 0), (2, 2, 2, 2), (0, 1, 2, 0), (2, 0, 0, 1), (1, 2, 0, 2), (0, 0, 1, 1), (2, 1, 1, 0))),
    *(Case((1, 16, h, w), 16, pads=pads) for h, w in ((3, 4), (4, 3), (5, 9), (1, 2)) for pads in (
        (2, 0, 0, 2), (0, 2, 2, 0), (2, 2, 2, 2))),
    *(Case((1, 24, 17, 17), 24, taps, tuple((k - 1) // 2 for k in (*taps, *taps)))  # type: ignore[arg-type]  # four of them
      for taps in TILES if taps != (3, 3)),
    Case((2, 16, 6, 5), 16, (1, 7), (0, 3, 0, 3)),
    Case((2, 16, 6, 5), 16, (7, 1), (3, 0, 3, 0)),
    Case((3, 16, 6, 9), 16, (1, 5), (0, 4, 0, 0)),
    Case((3, 16, 9, 6), 16, (5, 1), (0, 0, 4, 0), bias=False),
    Case((1, 16, 4, 1), 16, (1, 7), (0, 6, 0, 6)),
    Case((2, 16, 1, 4), 16, (7, 1), (6, 0, 6, 0)),
    Case((1, 16, 40, 33), 16, (7, 1), (3, 0, 2, 0)),
]  # fmt: skip


@pytest.mark.parametrize("case, tile", [pair for case in SHAPES for pair in both_sizes(case)], ids=str)
def test_the_result_is_the_convolution(case: Case, tile: tuple[int, int]) -> None:
    if all(a >= 1 for a in case.graph().outputs[0][1].type.static_shape):
        check(case, tile)


@pytest.mark.parametrize("layouts", list(product(LAYOUTS, LAYOUTS)), ids="-".join)
@pytest.mark.parametrize("shape", [(1, 32, 11, 10), (2, 48, 8, 9), (1, 20, 5, 6)], ids=str)
@pytest.mark.parametrize("tile", [(2, 2), (4, 4)], ids=str)
def test_data_and_result_may_lie_in_any_layout(
    shape: tuple[int, int, int, int], layouts: tuple[str, str], tile: tuple[int, int]
) -> None:
    check(Case(shape, 32, behind=("add", "Relu"), layouts=layouts), tile)


@pytest.mark.parametrize("taps", [t for t in TILES if t != (3, 3)], ids=str)
@pytest.mark.parametrize("layouts", [(PLAIN, BLOCKED), (BLOCKED, PLAIN), (BLOCKED, BLOCKED)], ids="-".join)
def test_filters_along_one_axis_read_and_write_any_layout(taps: tuple[int, int], layouts: tuple[str, str]) -> None:
    pads = tuple((k - 1) // 2 for k in (*taps, *taps))
    case = Case((2, 32, 10, 9), 32, taps, pads, behind=("Relu",), layouts=layouts)  # type: ignore[arg-type]  # four pads
    for tile in TILES[taps]:
        check(case, tile)


CHAINS = [
    ("Relu",), ("add",), ("add", "Relu"), ("Relu", "add"), ("Relu", "add", "Relu"), ("times 3", "Sigmoid"),
    ("by channel", "plus channel", "Relu"), ("by channel", "add", "Tanh"), ("mul", "Relu"), ("sub", "Relu"),
    ("add", "add", "Relu"), ("add", "mul", "add", "Relu"), ("HardSwish", "by channel of each image"),
    ("Relu", "times 3", "plus channel", "add", "Sigmoid", "mul"),
]  # fmt: skip


@pytest.mark.parametrize("chain", CHAINS, ids="-".join)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_steps_behind_run_with_it(chain: tuple[str, ...], layout: str) -> None:
    check(Case((2, 32, 9, 10), 32, behind=chain, layouts=(layout, layout)), (4, 4))
    check(Case((1, 16, 9, 10), 16, (1, 3), (0, 1, 0, 1), False, chain, (layout, layout)), (1, 6))


def test_steps_that_do_not_run_well_with_it_run_behind(monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    if way == "primitives" and not library().isa.startswith("avx512"):
        pytest.skip(f"oneDNN's products take no sum along with {library().isa}")
    case = Case((2, 32, 9, 10), 32, behind=("by channel", "add", "Relu"))
    together = run(case.kernel(case.graph(), "winograd 4x4"), operands_of(case, case.graph())[0])[1]
    if way == "primitives":
        monkeypatch.setattr(winograd.p, "is_slow", lambda primitive: True)
    else:
        monkeypatch.setattr(coded, "knows", lambda function: False)
        monkeypatch.setattr(coded, "_MOST_POSTS", 1)
    apart = run(case.kernel(case.graph(), "winograd 4x4"), operands_of(case, case.graph())[0])[1]
    assert together.shares and not apart.shares
    check(case, (4, 4))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_result_may_take_the_memory_of_what_is_added(layout: str) -> None:
    case = Case((2, 32, 11, 9), 32, behind=("add", "Relu"), layouts=(layout, layout))
    graph = case.graph()
    arrays, wanted = operands_of(case, graph)
    kernel = case.kernel(graph, "winograd 4x4")
    added = len(kernel.operands) - 1
    found, recipe = run(kernel, arrays, in_place=added)
    assert recipe.shares == {added}
    assert error(found, wanted) < TOLERANCE[4]
    with pytest.raises(NotInPlace):
        design(kernel, BLOCK, _Supply(arrays), 0)


def test_what_lies_otherwise_than_the_result_keeps_its_memory() -> None:
    case = Case((1, 32, 8, 8), 32, behind=("add",))
    kernel = case.kernel(case.graph(), "winograd 2x2")
    arrays, _ = operands_of(case, case.graph())
    other = replace(kernel, operands=(*kernel.operands[:-1], replace(kernel.operands[-1], layout=PLAIN)))
    assert run(kernel, arrays)[1].shares and not run(other, arrays)[1].shares


@pytest.mark.parametrize("case, tile", [
    (Case((1, 64, 40, 44), 64, behind=("add", "Relu")), (4, 4)),
    (Case((4, 64, 14, 14), 96), (2, 2)),
    (Case((2, 64, 17, 17), 64, (1, 7), (0, 3, 0, 3)), (1, 4)),
    (Case((2, 64, 17, 17), 64, (7, 1), (3, 0, 3, 0)), (4, 1)),
], ids=str)  # fmt: skip
@pytest.mark.parametrize("threads", (1, 2, 3))
def test_any_number_of_threads_gives_the_same(case: Case, tile: tuple[int, int], threads: int) -> None:
    check(case, tile, threads)


@pytest.mark.parametrize("cache", (1, 50_000, 400_000, 1 << 30))
@pytest.mark.parametrize("case, tile", [
    (Case((2, 32, 29, 31), 48, behind=("add", "Relu")), (4, 4)),
    (Case((5, 32, 9, 9), 32, layouts=(BLOCKED, BLOCKED)), (2, 2)),
    (Case((3, 32, 21, 20), 32, (1, 5), (0, 2, 0, 2), layouts=(PLAIN, LAST)), (1, 4)),
    (Case((3, 32, 37, 20), 32, (5, 1), (2, 0, 1, 0), layouts=(BLOCKED, PLAIN)), (4, 1)),
], ids=str)  # fmt: skip
def test_blocks_of_any_size_give_the_same(
    case: Case, tile: tuple[int, int], cache: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(winograd, "_FEWEST_TILES", 1)
    monkeypatch.setattr(winograd, "_FEWEST_BY_CODE", 1)
    monkeypatch.setattr(winograd, "second_level_cache", lambda: cache)
    check(case, tile)


def test_a_block_of_tiles_fits_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    tiled = winograd._Tiled(1, 64, 64, *(winograd._Axis(224, 224, 1, transforms(4, 3)) for _ in range(2)))
    for cache in (1 << 20, 2 << 20, 4 << 20):
        bands = list(winograd._bands(tiled, cache, 1))
        assert sum(b.height for b in bands) == 56
        # a row of tiles at least
        assert all(b.height == 1 or b.height * 56 * 36 * 128 * 4 <= cache for b in bands)


# ── errors are of rounding, and only of rounding ─────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("tile", [(2, 2), (4, 4)], ids=str)
@pytest.mark.parametrize("part", ("output", "filter", "data"))
def test_a_corrupted_transform_is_caught(
    tile: tuple[int, int], part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case((1, 16, 9, 9), 16)
    check(case, tile)
    good = transforms(tile[0], 3)
    for i, row in enumerate(getattr(good, part)):
        for j, value in enumerate(row):
            wrong = tuple(
                tuple(value + Fraction(1, 100) if (k, n) == (i, j) else v for n, v in enumerate(r))
                for k, r in enumerate(getattr(good, part))
            )
            bad = replace(good, **{part: wrong})
            monkeypatch.setattr(winograd, "transforms", lambda outputs, taps, bad=bad: bad)
            with pytest.raises(AssertionError):
                check(case, tile)


@pytest.mark.parametrize("taps, tile, times", [
    ((3, 3), (2, 2), 1.5), ((3, 3), (4, 4), 4), ((1, 3), (1, 6), 4), ((1, 5), (1, 4), 6), ((7, 1), (4, 1), 8),
    ((1, 7), (1, 6), 12),
], ids=str)  # fmt: skip
def test_it_loses_few_digits_more_than_the_direct_way(
    taps: tuple[int, int], tile: tuple[int, int], times: float
) -> None:
    pads = (taps[0] // 2, taps[1] // 2, taps[0] // 2, taps[1] // 2)
    case = Case((1, 128, 28, 28), 64, taps, pads)
    graph = case.graph()
    arrays, wanted = operands_of(case, graph)

    def spread(algorithm: str) -> float:
        found, _ = run(case.kernel(graph, algorithm), arrays)
        return float(np.sqrt(np.square(found - wanted).mean() / np.square(wanted).mean()))

    assert spread(f"winograd {tile[0]}x{tile[1]}") < times * spread("")


# ── how the backend offers them ──────────────────────────────────────────────────────────────────────────────────


def offered(case: Case, **changes: object) -> tuple[str, ...]:
    graph = case.graph()
    return tiles_of(OneDNNBackend(1).lowering.algorithms(replace(case.kernel(graph), **changes)))


def tiles_of(algorithms: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(name for name in algorithms if name.startswith("winograd"))


def test_names_are_offered_where_there_are_tiles_for_the_filter() -> None:
    assert offered(Case((1, 64, 28, 28), 64)) == ("winograd 2x2", "winograd 4x4")
    assert offered(Case((1, 64, 28, 28), 64, (1, 7), (0, 3, 0, 3))) == ("winograd 1x4", "winograd 1x6")
    assert offered(Case((1, 64, 28, 28), 64, (5, 1), (2, 0, 2, 0))) == ("winograd 4x1", "winograd 6x1")


@pytest.mark.parametrize("case", [
    Case((1, 64, 28, 28), 64, (5, 5), (2, 2, 2, 2)),
    Case((1, 64, 28, 28), 64, (1, 1), (0, 0, 0, 0)),
    Case((1, 8, 28, 28), 64),
    Case((1, 64, 28, 28), 8),
    Case((1, 64, 1, 1), 64),
    Case((1, 64, 28, 28), 64, (3, 1), (1, 1, 1, 1)),
    Case((1, 64, 28, 28), 64, pads=(3, 3, 3, 3)),
], ids=str)  # fmt: skip
def test_no_names_are_offered_elsewhere(case: Case) -> None:
    assert offered(case) == ()


@pytest.mark.parametrize("attrs", [
    {"strides": (2, 2)}, {"dilations": (2, 2), "pads": (2, 2, 2, 2)}, {"strides": (1, 2)},
], ids=str)  # fmt: skip
def test_strides_and_dilations_are_left_to_the_direct_way(attrs: dict[str, AttrValue]) -> None:
    build = _Build()
    full: dict[str, AttrValue] = {"pads": (1, 1, 1, 1), "strides": (1, 1), "dilations": (1, 1), "group": 1, **attrs}
    value = build.call("Conv", [build.input(1, 64, 28, 28), build.weight(64, 64, 3, 3)], **full)
    build.graph.set_outputs([("y", value)])
    lowering = OneDNNBackend(1).lowering
    assert [tiles_of(lowering.algorithms(job.kernel)) for job in lower(build.graph, lowering).jobs] == [()]


def test_groups_and_weights_that_are_computed_are_left_to_the_direct_way() -> None:
    lowering = OneDNNBackend(1).lowering
    for grouped in (True, False):
        build = _Build()
        x = build.input(1, 64, 28, 28)
        w = build.weight(64, 32, 3, 3) if grouped else build.input(64, 64, 3, 3)
        value = build.call("Conv", [x, w], pads=(1, 1, 1, 1), strides=(1, 1), dilations=(1, 1), group=1 + grouped)
        build.graph.set_outputs([("y", value)])
        assert [tiles_of(lowering.algorithms(job.kernel)) for job in lower(build.graph, lowering).jobs] == [()]


OFFERS = [
    Case((1, 64, 14, 14), 64, behind=("add", "Relu"), layouts=(BLOCKED, BLOCKED)),
    Case((1, 33, 15, 14), 40),
    Case((1, 64, 7, 7), 64),
    Case((8, 32, 4, 4), 32),
    Case((1, 64, 17, 17), 64, (1, 7), (0, 3, 0, 3), layouts=(PLAIN, LAST)),
    Case((1, 64, 17, 17), 64, (7, 1), (3, 0, 3, 0)),
    Case((1, 64, 8, 8), 64, (1, 3), (0, 1, 0, 1)),
    Case((1, 64, 8, 8), 64, (3, 1), (1, 0, 1, 0)),
    Case((1, 48, 9, 9), 64, (5, 1), (2, 0, 2, 0)),
]  # fmt: skip


@pytest.mark.parametrize("case", OFFERS, ids=str)
def test_every_name_that_is_offered_runs_and_can_be_measured(case: Case) -> None:
    graph, backend = case.graph(), OneDNNBackend(1)
    arrays, wanted = operands_of(case, graph)
    kernel = case.kernel(graph)
    names = backend.lowering.algorithms(kernel)
    assert names
    for name in names:
        chosen = replace(kernel, algorithm=name)
        found, recipe = run(chosen, arrays)
        assert error(found, wanted) < TOLERANCE[6]
        slow = ("numpy", "evaluated", "ref", "gemm" if library().isa.startswith("avx512") else "ref")
        assert not any(word in launch.name for launch in recipe.launches for word in slow)
        assert 0 < backend.measure(chosen) < 10


def test_each_way_has_a_cost_of_its_own() -> None:
    case = Case((1, 64, 14, 14), 64)
    kernel = case.kernel(case.graph())
    keys = {replace(kernel, algorithm=name).key for name in ("", *winograd.algorithms(kernel))}
    assert len(keys) == 3


@pytest.mark.parametrize("name", ("winograd 3x3", "winograd 1x4", "winograd 6x6", "winograd", "other", "winograd 4x4 "))
def test_a_name_that_is_none_is_refused(name: str) -> None:
    case = Case((1, 32, 8, 8), 32)
    graph = case.graph()
    arrays, _ = operands_of(case, graph)
    with pytest.raises(BackendError, match="no algorithm"):
        run(case.kernel(graph, name), arrays)


def test_the_oracle_agrees_with_the_operators_definitions() -> None:
    case = Case((2, 3, 6, 5), 4, pads=(0, 1, 2, 0), behind=("by channel", "add", "Relu"))
    graph = case.graph()
    _, wanted = operands_of(case, graph)
    (found,) = evaluate_graph(graph, feeds(graph)).values()
    assert error(np.asarray(found, np.float64), wanted) < 1e-6
