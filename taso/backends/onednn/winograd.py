"""Winograd convolution, by machine code of our own (`taso.backends.x86`) or out of oneDNN's primitives.

Machine code takes it where it runs and channels are last in data and result: tiles are transformed where they lie. The
other way is depthwise convolutions, batched matmul, matmul and reorders.

Of F(m, r) in both directions (`taso.graph.winograd`) a convolution of stride 1 takes, for each block of tiles that
stays in the second-level cache, by primitives

1. the data's transform Bᵀ d B, first along rows, then along columns. Each row of Bᵀ is a depthwise convolution of
   stride m, padded as the convolution is: that gathers the overlapping tiles and leaves out what is zero in Bᵀ;
2. for each of the n·n positions in a tile the product (tiles × channels) · (channels × filters), with the transformed
   filter G g Gᵀ, which is computed in float64 once, before the first run;
3. Aᵀ M A as one matrix product with Aᵀ ⊗ Aᵀ, into which bias and the element-wise steps behind are fused;
4. a reorder that puts the outputs of all tiles where they belong, in any layout.

All of it is channels-last. What comes in otherwise is changed block by block. A direction of one tap has no transform.
The result is that of the convolution up to rounding; values that are not finite spread over their whole tile.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import lru_cache, partial
from itertools import product
from math import gcd, prod
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from taso.backends.base import Array
from taso.backends.lowering import LAST, Kernel, Operand, Step
from taso.backends.onednn import coded
from taso.backends.onednn import primitives as p
from taso.backends.onednn.attributes import Attributes, BinaryPostOp, EltwisePostOp, PostOp, SumPostOp
from taso.backends.onednn.coded import bias_of, isa_here, launch, take
from taso.backends.onednn.library import library
from taso.backends.onednn.memory import DataType, MemoryDesc
from taso.backends.onednn.places import (
    RESULT,
    Block,
    Place,
    describe,
    is_blocked,
    lay_out,
    layouts_alike,
    strides_of,
)  # fmt: skip
from taso.backends.onednn.primitives import Primitive
from taso.backends.onednn.recipe import PrimitiveLaunch
from taso.backends.tiles import products_of, transformed_filter
from taso.backends.x86.assembler import Isa
from taso.backends.x86.products import Product, in_panels
from taso.backends.x86.tiles import Axis, RowOfTiles, Transform, Transformed
from taso.graph.errors import BackendError
from taso.graph.operator import Attrs
from taso.graph.ops.linear import conv_settings
from taso.graph.types import DType
from taso.graph.winograd import Transforms, transforms

_F32 = DataType.F32
_ITEM = 4

_FEWEST_CHANNELS = 32

_FEWEST_TILES = 112
"""Tiles in a block by which the weights that it reads are paid for, whatever the cache holds."""

_FEWEST_BY_CODE = 56
"""The same where the next weights are asked for while these are multiplied."""

_CHUNK = 140
"""Rows of a product by machine code that are multiplied with all columns before the next ones are."""

_LINE = 16
"""Elements in a line of the caches."""

_MUCH = 48 << 10
"""Bytes of transformed data that are worth a launch of their own on one thread."""

_PAYS = 20
"""Multiplications of the direct way, per weight that is read, from which on reading more of them may pay."""

_MOST_STEPS = 8
"""Steps that run with the last transform."""

_TILES: dict[tuple[int, int], tuple[tuple[int, int], ...]] = {
    (3, 3): ((2, 2), (4, 4)),
    **{(1, r): ((1, 4), (1, 6)) for r in (3, 5, 7)},
    **{(r, 1): ((4, 1), (6, 1)) for r in (3, 5, 7)},
}
"""Sizes of a filter, and how many outputs a tile of it may have."""

_ALONE = Transforms(((Fraction(1),),), ((Fraction(1),),), ((Fraction(1),),))
"""Of a direction in which the filter has one tap."""


# ── which kernels ────────────────────────────────────────────────────────────────────────────────────────────────


def algorithms(kernel: Kernel) -> tuple[str, ...]:
    """Names of the Winograd algorithms that may pay for a kernel: `winograd 4x4` has tiles of 4 by 4 outputs."""
    problem = _problem(kernel)
    if problem is None:
        return ()
    return tuple(f"winograd {h}x{w}" for h, w in _TILES[problem.filter] if problem.tiled(h, w).may_pay)


@dataclass(frozen=True)
class _Axis:
    """One direction: sizes of data and result, padding before the data, and the transforms."""

    size: int
    out: int
    pad: int
    f: Transforms

    @property
    def tiles(self) -> int:
        return -(-self.out // self.f.outputs)

    def runs(self, first: int, count: int) -> Iterator[_Run]:
        """Tiles from `first` on: those with all their outputs, and the last one where it has fewer."""
        m = self.f.outputs
        full = min(count, self.out // m - first)
        if full > 0:
            yield _Run(first, full, m)
        if full < count:
            yield _Run(first + full, 1, self.out - (first + full) * m)


@dataclass(frozen=True)
class _Run:
    """Tiles along one direction, and how many outputs each has."""

    first: int
    count: int
    outputs: int


@dataclass(frozen=True)
class _Tiled:
    """A convolution cut into tiles."""

    images: int
    channels: int
    filters: int
    rows: _Axis
    columns: _Axis

    @property
    def positions(self) -> int:
        return self.rows.f.products * self.columns.f.products

    @property
    def outputs(self) -> int:
        """In one tile."""
        return self.rows.f.outputs * self.columns.f.outputs

    @property
    def may_pay(self) -> bool:
        if min(self.channels, self.filters) < _FEWEST_CHANNELS:
            return False
        direct = self.images * self.rows.out * self.columns.out * self.rows.f.taps * self.columns.f.taps
        products = self.images * self.rows.tiles * self.columns.tiles * self.positions
        return products < direct and direct >= _PAYS * self.positions


@dataclass(frozen=True)
class _Problem:
    """What a kernel's convolution is: sizes of data, weights and result, and padding before the data."""

    data: tuple[int, ...]
    weight: tuple[int, ...]
    result: tuple[int, ...]
    pads: tuple[int, int]

    @property
    def filter(self) -> tuple[int, int]:
        return self.weight[2], self.weight[3]

    def tiled(self, height: int, width: int) -> _Tiled:
        """Cut into tiles of `height` by `width` outputs."""
        axes = (
            _Axis(self.data[2 + a], self.result[2 + a], self.pads[a], _transforms(m, self.filter[a]))
            for a, m in enumerate((height, width))
        )
        return _Tiled(self.data[0], self.data[1], self.weight[0], *axes)


def _transforms(outputs: int, taps: int) -> Transforms:
    return _ALONE if outputs == taps == 1 else transforms(outputs, taps)


def _problem(kernel: Kernel) -> _Problem | None:
    """The kernel's convolution where it is one that tiles can compute, else None."""
    step = kernel.anchor
    if step is None or step.op.domain or step.op.name != "Conv" or kernel.chained:
        return None
    given = [kernel.operands[i] for i in step.inputs if i is not None and i >= 0]
    if len(given) < 2 or given[0].constant or not all(o.constant for o in given[1:]):
        return None
    tensors = [o.type for o in (*given, *kernel.results)]
    if given[0].type.rank != 4 or not all(t.static and t.dtype is DType.FLOAT for t in tensors):
        return None
    shapes = [t.static_shape for t in tensors]
    if any(0 in s for s in shapes) or not _plain_window(step.attrs, given[1]):
        return None
    pads = conv_settings(given[1].type, step.attrs).ints("pads")
    return _Problem(shapes[0], shapes[1], shapes[-1], (pads[0], pads[1]))


def _plain_window(attrs: Attrs, weight: Operand) -> bool:
    """Whether a filter is one that there are tiles for, without gaps and groups, and padded by less than its taps."""
    full, taps = conv_settings(weight.type, attrs), weight.type.static_shape[2:]
    dense = full.int("group") == 1 and set(full.ints("strides")) == set(full.ints("dilations")) == {1}
    small = all(pad < taps[axis % 2] for axis, pad in enumerate(full.ints("pads")))
    return dense and small and taps in _TILES


# ── blocks of tiles ──────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class _Band:
    """A block of tiles: `height` rows of them from row `row` on, in each of `images` images from `image` on.

    Of several images it has all rows.
    """

    image: int
    images: int
    row: int
    height: int


def _bands(t: _Tiled, cache: int, fewest: int) -> Iterator[_Band]:
    """All tiles, in blocks of nearly equal size whose transformed data and products fit `cache` bytes."""
    wanted = max(cache // (t.positions * (t.channels + t.filters) * _ITEM), fewest)
    whole = t.rows.tiles * t.columns.tiles
    if whole <= wanted:
        for start, count in _parts(t.images, wanted // whole):
            yield _Band(start, count, 0, t.rows.tiles)
        return
    for image in range(t.images):
        for start, count in _parts(t.rows.tiles, max(wanted // t.columns.tiles, 1)):
            yield _Band(image, 1, start, count)


def _parts(size: int, most: int) -> Iterator[tuple[int, int]]:
    """Start and length of parts of nearly equal size, none longer than `most`."""
    length = -(-size // -(-size // most))
    for start in range(0, size, length):
        yield start, min(length, size - start)


@lru_cache(maxsize=1)
def second_level_cache() -> int:
    """Bytes of a core's second-level cache; 1 MiB where the system does not tell."""
    try:
        text = Path("/sys/devices/system/cpu/cpu0/cache/index2/size").read_text().strip()
    except OSError:
        text = ""
    found = re.fullmatch(r"(\d+)K", text)
    return int(found[1]) << 10 if found else 1 << 20


@dataclass(frozen=True)
class _Window:
    """A row of Bᵀ as a depthwise kernel: coefficients, the gaps between them, and the padding that it takes."""

    coefficients: tuple[float, ...]
    dilation: int
    begin: int
    end: int

    @property
    def without_gaps(self) -> _Window:
        """The same with zeros in the gaps."""
        between = (0.0,) * (self.dilation - 1)
        full = [value for c in self.coefficients for value in (c, *between)]
        return _Window(tuple(full[: len(full) - len(between)]), 1, self.begin, self.end)


def _window(row: Sequence[Fraction], pad: int, stride: int, count: int, size: int) -> _Window:
    """The window that puts tap 0 at −pad, −pad + stride, … (`count` times) of data of that size.

    Zeros at both ends of the row are left out. Some are put back where the window would begin inside the data or end
    long before its end, or else lie wholly in the padding: oneDNN takes no convolution like that.
    """
    taps = [j for j, value in enumerate(row) if value]
    step = gcd(*(b - a for a, b in zip(taps, taps[1:], strict=False))) or 1
    first, last, start = taps[0], taps[-1], (count - 1) * stride - pad
    while first > pad or start + first > size - 1:
        first -= step
    while last < pad or start + last < size - stride:
        last += step
    held = {j: float(value) for j, value in enumerate(row)}
    coefficients = tuple(held.get(j, 0.0) for j in range(first, last + 1, step))
    return _Window(coefficients, step, pad - first, start + last - (size - 1))


@dataclass(frozen=True)
class _Sweep:
    """A window going over every channel of some images along rows (axis 0) or columns; heights and widths."""

    window: _Window
    axis: int
    stride: int
    images: int
    data: tuple[int, int]
    result: tuple[int, int]

    def along(self, value: int, other: int) -> tuple[int, int]:
        return (value, other) if self.axis == 0 else (other, value)

    def weight(self, channels: int) -> MemoryDesc:
        return MemoryDesc.plain((channels, 1, 1, *self.along(len(self.window.coefficients), 1)), _F32)

    def convolution(self, channels: int) -> Primitive:
        window = self.window
        return p.convolution(
            describe((self.images, channels, *self.data), LAST, 1), self.weight(channels).with_any_layout(),
            describe((self.images, channels, *self.result), LAST, 1), strides=self.along(self.stride, 1),
            dilations=self.along(window.dilation, 1), pads_begin=self.along(window.begin, 0),
            pads_end=self.along(window.end, 0), groups=channels,
        )  # fmt: skip


# ── building ─────────────────────────────────────────────────────────────────────────────────────────────────────


class Host(coded.Host, Protocol):
    """What the builder of a kernel's recipe does for this algorithm, by machine code or by primitives."""

    @property
    def block(self) -> int: ...


def build(host: Host, step: Step, followers: Sequence[Step]) -> frozenset[int]:
    """Adds the launches of a kernel by its algorithm; the operands whose memory may be the result's.

    Raises `BackendError` where there is no algorithm of that name for the kernel.
    """
    problem, name = _problem(host.kernel), re.fullmatch(r"winograd (\d+)x(\d+)", host.kernel.algorithm)
    tile = (int(name[1]), int(name[2])) if name else None
    if problem is None or tile not in _TILES[problem.filter]:
        raise BackendError(f"oneDNN has no algorithm {host.kernel.algorithm!r} for this kernel")
    isa = isa_here()
    if isa is not None and _codes(host, step, problem.tiled(*tile)):
        return _by_code(host, step, followers, problem.tiled(*tile), isa)
    builder = _Builder(host, step, problem.tiled(*tile))
    fused = builder.fuse(followers)
    builder.run()
    host.behind(followers[fused:])
    return frozenset() if builder.added is None else frozenset({builder.added})


@dataclass(frozen=True)
class _Sizes:
    """A block of tiles in numbers: tiles, elements of the transformed data and of the outputs at one position."""

    tiles: int
    data: int
    outputs: int


_Fused = EltwisePostOp | tuple[str, int]
"""A step that runs with the last transform: a function, or an operand to combine the outputs with and how."""


class _Builder:
    """Adds to a recipe what computes one tiled convolution."""

    def __init__(self, host: Host, step: Step, tiled: _Tiled) -> None:
        # all transforms of rows come before those of columns (`at_once`), or each is followed by its columns': fewer
        # launches, or less memory between them
        self.host = host
        self.step = step
        self.t = tiled
        self.fused: list[_Fused] = []
        self.added: int | None = None
        self.made: dict[Hashable, Primitive] = {}
        self.kept: dict[Hashable, Place] = {}
        self.weights: MemoryDesc | None = None
        threads = p.engine().library.get_max_threads()
        # where threads wait for each other at every launch, fewer launches are worth more than the cache
        scale = threads * min(threads, 2)
        self.bands = tuple(_bands(tiled, second_level_cache() * scale, _FEWEST_TILES))
        largest = self.sizes(max(self.bands, key=lambda b: b.images * b.height))
        lines = largest.data // tiled.columns.tiles * tiled.columns.size
        self.at_once = largest.data * _ITEM < _MUCH * scale
        if self.at_once:
            lines *= tiled.rows.f.products
        # data and outputs are never there at once, nor are lines and products
        self.data = self.scratch(max(tiled.positions * largest.data, tiled.outputs * largest.outputs))
        self.products = self.scratch(max(tiled.positions * largest.outputs, lines))

    def sizes(self, band: _Band) -> _Sizes:
        tiles = band.images * band.height * self.t.columns.tiles
        return _Sizes(tiles, tiles * self.t.channels, tiles * self.t.filters)

    def scratch(self, elements: int) -> Place:
        return self.host.recipe.add_scratch(elements * _ITEM)

    def run(self) -> None:
        for band in self.bands:
            self.transform_data(band)
            self.multiply(band)
            if self.added is not None:
                self.move(band, self.added)
            self.transform_outputs(band)
            self.move(band, None)

    def shared(self, name: str, size: int) -> Place:
        """Scratch memory for launches that come one after the other, as large as the largest of them asks for."""
        if name not in self.kept:
            self.kept[name] = self.host.recipe.add_scratch(0)
        sizes, index = self.host.recipe.scratch, self.kept[name].index
        sizes[index] = max(sizes[index], size)
        return self.kept[name]

    def launch(self, primitive: Primitive, arguments: dict[int, Place]) -> None:
        if p.SCRATCHPAD in primitive.arguments:
            pad = self.shared("scratchpad", primitive.arguments[p.SCRATCHPAD].size)
            arguments = {**arguments, p.SCRATCHPAD: pad}
        self.host.recipe.launches.append(PrimitiveLaunch(primitive, arguments))

    def primitive(self, key: Hashable, make: Callable[[], Primitive]) -> Primitive:
        if key not in self.made:
            self.made[key] = make()
        return self.made[key]

    def keep(self, key: Hashable, make: Callable[[], Block]) -> Place:
        if key not in self.kept:
            self.kept[key] = self.host.recipe.add_constant(make())
        return self.kept[key]

    # ── the steps behind ─────────────────────────────────────────────────────────────────────────────────────────

    def fuse(self, followers: Sequence[Step]) -> int:
        """Takes along steps that run well with the last transform, and says how many."""
        count = 0
        for step in followers[:_MOST_STEPS]:
            functions, found = self.host.functions(step), self.host.combination(step)
            if functions is not None:
                self.fused += functions
            elif found is not None and self.takes(*found):
                self.fused.append(found)
            else:
                break
            count += 1
        if p.is_slow(self.last_product(self.sizes(self.bands[0]).outputs)):
            self.fused, self.added, count = [], None, 0
            self.made.clear()
        return count

    def takes(self, name: str, index: int) -> bool:
        """Whether outputs can be combined with an operand: one constant per channel, or one tensor that is added."""
        operand, out = self.host.kernel.operands[index].type, self.host.kernel.results[0].type
        if operand.dtype is not DType.FLOAT:
            return False
        if self.host.kernel.operands[index].constant:
            dims = (1,) * (4 - operand.rank) + operand.static_shape
            return dims == (1, self.t.filters, 1, 1)
        if name != "add" or operand != out or self.added is not None:
            return False
        self.added = index
        return True

    # ── data ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def transform_data(self, band: _Band) -> None:
        """Bᵀ d B of all tiles in a block, position by position; that of rows stands behind that of columns."""
        rows, columns, size = self.t.rows, self.t.columns, self.sizes(band).data
        source, first, height = self.slab(band)
        pad = first - (band.row * rows.f.outputs - rows.pad)
        count = rows.f.products
        if columns.f is _ALONE:
            for u in range(count):
                self.along_rows(band, u, source, height, pad, _at(self.data, u * size))
            return
        length = size // columns.tiles * columns.size
        if rows.f is _ALONE:
            return self.along_columns(band.images * height, source, partial(_positions, size, 1, 0))
        for u in range(count):
            lines = _at(self.products, u * length) if self.at_once else self.products
            self.along_rows(band, u, source, height, pad, lines)
            if not self.at_once:
                self.along_columns(band.images * band.height, lines, partial(_positions, size, count, u))
        if self.at_once:
            self.along_columns(count * band.images * band.height, self.products, partial(_positions, size, count, 0))

    def slab(self, band: _Band) -> tuple[Place, int, int]:
        """The rows of data that a block of tiles reads, channels last: where they are, the first of them, how many."""
        rows, index = self.t.rows, self.host.index(self.step, 0)
        x, dims = self.host.kernel.operands[index], self.host.kernel.operands[index].type.static_shape
        first, last = 0, rows.size
        if band.images == 1:
            start = band.row * rows.f.outputs - rows.pad
            stop = start + (band.height - 1) * rows.f.outputs + rows.f.products
            first, last = max(start, 0), min(stop, rows.size)
        line = self.t.channels * self.t.columns.size
        if layouts_alike(self.host.layouts, x.type, x.layout, LAST):
            return _at(self.host.place(index), (band.image * rows.size + first) * line), first, last - first
        part = (band.images, dims[1], last - first, dims[3])
        read = self.primitive(
            ("slab", band.image, part, first),
            lambda: p.reorder(
                describe(dims, x.layout, self.host.block).submemory(part, (band.image, 0, first, 0)),
                describe(part, LAST, 1),
            ),
        )
        to = self.shared("slab", prod(part) * _ITEM)
        self.launch(read, {p.SRC: self.host.place(index), p.DST: to})
        return to, first, last - first

    def along_rows(self, band: _Band, u: int, source: Place, height: int, pad: int, to: Place) -> None:
        """Row `u` of the rows' Bᵀ; tap 0 of the first tile stands `pad` before the data."""
        row, m = self.t.rows.f.data[u], self.t.rows.f.outputs
        if band.images == 1:
            # what is not read at all at either end is left out, but never all
            taps = [j for j, value in enumerate(row) if value]
            skip = min(max(taps[0] - pad, 0), height - 1)
            source = _at(source, skip * self.t.channels * self.t.columns.size)
            pad += skip
            height = min(height - skip, max((band.height - 1) * m - pad + taps[-1], 0) + 1)
        window, width = _window(row, pad, m, band.height, height), self.t.columns.size
        sweep = _Sweep(window, 0, m, band.images, (height, width), (band.height, width))
        self.depthwise(sweep, source, to)

    def along_columns(self, lines: int, source: Place, offset: Callable[[int], int]) -> None:
        """All rows of the columns' Bᵀ, on so many lines of data, each to its offset."""
        axis, m = self.t.columns, self.t.columns.f.outputs
        for v, row in enumerate(axis.f.data):
            window = _window(row, axis.pad, m, axis.tiles, axis.size)
            sweep = _Sweep(window, 1, m, 1, (lines, axis.size), (lines, axis.tiles))
            self.depthwise(sweep, source, _at(self.data, offset(v)))

    def depthwise(self, sweep: _Sweep, source: Place, to: Place) -> None:
        for found in (sweep, replace(sweep, window=sweep.window.without_gaps)):
            conv = self.primitive(found, partial(found.convolution, self.t.channels))
            # with gaps at the border oneDNN has but a slow way
            if "dw" in conv.implementation:
                break
        plain, wanted = found.weight(self.t.channels), conv.weights_desc()

        def laid_out() -> Block:
            row = np.array(found.window.coefficients, np.float32)
            return lay_out(np.tile(row, (self.t.channels, 1)), plain, wanted)

        weights = self.keep((found.window.coefficients, wanted.key), laid_out)
        self.launch(conv, {p.SRC: source, p.WEIGHTS: weights, p.DST: to})

    # ── products ─────────────────────────────────────────────────────────────────────────────────────────────────

    def multiply(self, band: _Band) -> None:
        """At each position, the transformed data of all tiles times the transformed filter."""
        t, tiles = self.t, self.sizes(band).tiles
        plain = MemoryDesc.plain((t.positions, t.channels, t.filters), _F32)
        given = self.weights or plain.with_any_layout()
        product = self.primitive(
            ("product", tiles),
            lambda: p.matmul(
                MemoryDesc.plain((t.positions, tiles, t.channels), _F32), given,
                MemoryDesc.plain((t.positions, tiles, t.filters), _F32),
            ),
        )  # fmt: skip
        wanted = self.weights = product.weights_desc()

        def make(array: Array) -> Block:
            return lay_out(transformed_filter(array, t.rows.f, t.columns.f), plain, wanted)

        label = f"{self.host.kernel.algorithm} as {wanted.key}"
        if label not in self.kept:
            self.kept[label] = self.host.constant(self.host.index(self.step, 1), label, make)
        self.launch(product, {p.SRC: self.data, p.WEIGHTS: self.kept[label], p.DST: self.products})

    # ── outputs ──────────────────────────────────────────────────────────────────────────────────────────────────

    def transform_outputs(self, band: _Band) -> None:
        """Aᵀ M A of all tiles by one matrix product, with bias and the steps that it takes along."""
        length = self.sizes(band).outputs
        arguments: dict[int, Place] = {p.WEIGHTS: self.products, p.DST: self.data}
        arguments[p.SRC] = self.keep("outputs", lambda: Block.of(_output_matrix(self.t.rows.f, self.t.columns.f)))
        if self.host.has(self.step, 2):
            arguments[p.BIAS] = self.repeated(self.host.index(self.step, 2), length)
        for number, found in enumerate(self.fused):
            if not isinstance(found, EltwisePostOp) and found[1] != self.added:
                arguments[p.post_op_src(number)] = self.repeated(found[1], length)
        self.launch(self.last_product(length), arguments)

    def last_product(self, length: int) -> Primitive:
        """The product with Aᵀ ⊗ Aᵀ, of rows of that length: every channel of every tile."""
        t, row = self.t, MemoryDesc.plain((1, length), _F32)

        def post(found: _Fused) -> PostOp:
            if isinstance(found, EltwisePostOp):
                return found
            return SumPostOp() if found[1] == self.added else BinaryPostOp(found[0], row)

        def make() -> Primitive:
            return p.matmul(
                MemoryDesc.plain((t.outputs, t.positions), _F32), MemoryDesc.plain((t.positions, length), _F32),
                MemoryDesc.plain((t.outputs, length), _F32), bias=row if self.host.has(self.step, 2) else None,
                attributes=Attributes(post_ops=tuple(map(post, self.fused))),
            )  # fmt: skip

        return self.primitive(("outputs", length), make)

    def repeated(self, index: int, length: int) -> Place:
        """A constant of one number per channel, as often as there are tiles."""

        def make(array: Array) -> Block:
            return Block.of(np.tile(array.reshape(-1), length // array.size))

        label = f"repeated {length}"
        if (index, label) not in self.kept:
            self.kept[index, label] = self.host.constant(index, label, make)
        return self.kept[index, label]

    def move(self, band: _Band, operand: int | None) -> None:
        """Puts the outputs of all tiles where they belong in the result; with `operand`, its elements to the tiles."""
        held = self.host.kernel.results[0] if operand is None else self.host.kernel.operands[operand]
        place = Place(RESULT) if operand is None else self.host.place(operand)
        block = self.host.block if is_blocked(held.type.static_shape, held.layout, self.host.block) else 0
        rows, columns = self.t.rows.runs(band.row, band.height), self.t.columns.runs(0, self.t.columns.tiles)
        for run in product(rows, columns):
            ends = [(self.in_tiles(band, run, block), self.data), (self.in_image(band, run, held, block), place)]
            (source, read), (target, written) = ends if operand is None else reversed(ends)
            key = ("move", source.dims, source.strides, target.strides)
            move = self.primitive(key, partial(p.reorder, source.desc, target.desc))
            self.launch(move, {p.SRC: _at(read, source.start), p.DST: _at(written, target.start)})

    def in_tiles(self, band: _Band, run: tuple[_Run, _Run], block: int) -> _Part:
        """Where outputs lie position by position."""
        rows, columns = run
        t, (line, size) = self.t, (self.t.columns.tiles * self.t.filters, self.sizes(band).outputs)
        strides = (band.height * line, line, t.columns.f.outputs * size, t.filters, size)
        channels = ((t.filters // block, block), (block, 1)) if block else ((t.filters, 1),)
        start = (rows.first - band.row) * line + columns.first * t.filters
        return _part(band, run, strides, channels, start)

    def in_image(self, band: _Band, run: tuple[_Run, _Run], held: Operand, block: int) -> _Part:
        """Where outputs lie in a tensor."""
        rows, columns = run
        dims = held.type.static_shape
        channels: tuple[tuple[int, int], ...]
        if block:
            image, (row, column) = prod(dims[1:]), (dims[3] * block, block)
            channels = ((dims[1] // block, dims[2] * row), (block, 1))
        else:
            image, channel, row, column = strides_of(dims, held.layout)
            channels = ((dims[1], channel),)
        m, n = self.t.rows.f.outputs, self.t.columns.f.outputs
        start = band.image * image + rows.first * m * row + columns.first * n * column
        return _part(band, run, (image, m * row, row, n * column, column), channels, start)


@dataclass(frozen=True)
class _Part:
    """Elements of a buffer: dimensions, strides, and the first of them."""

    dims: tuple[int, ...]
    strides: tuple[int, ...]
    start: int

    @property
    def desc(self) -> MemoryDesc:
        return MemoryDesc.strided(self.dims, _F32, self.strides)


def _part(
    band: _Band, run: tuple[_Run, _Run], strides: Sequence[int], channels: Sequence[tuple[int, int]], start: int
) -> _Part:
    """Outputs of a run of tiles: by image, row of tiles, row in a tile, column of tiles, column in a tile, channel."""
    rows, columns = run
    dims = (band.images, rows.count, rows.outputs, columns.count, columns.outputs)
    axes = [(d, s) for d, s in (*zip(dims, strides, strict=True), *channels) if d > 1] or [(1, 1)]
    return _Part(tuple(d for d, _ in axes), tuple(s for _, s in axes), start)


def _positions(size: int, count: int, u: int, v: int) -> int:
    """Where the data at one position is: `count` of them by row for each by column."""
    return (v * count + u) * size


def _at(place: Place, elements: int) -> Place:
    return replace(place, offset=place.offset + elements * _ITEM)


# ── by machine code ──────────────────────────────────────────────────────────────────────────────────────────────


def _codes(host: Host, step: Step, t: _Tiled) -> bool:
    """Whether the transforms can be machine code: channels last in data and result, and none of both too large."""
    given = (host.kernel.operands[host.index(step, 0)], host.kernel.results[0])
    tiles = t.images * t.rows.tiles * t.columns.tiles
    largest = (
        Transform(_data_axis(t.rows), _data_axis(t.columns), t.channels, _apart(tiles * t.channels), False),
        Transform(_output_axis(t.rows), _output_axis(t.columns), t.filters, _apart(tiles * t.filters), True),
    )
    lies = all(layouts_alike(host.layouts, o.type, o.layout, LAST) for o in given)
    return lies and all(transform.fits for transform in largest)


def _by_code(host: Host, step: Step, followers: Sequence[Step], t: _Tiled, isa: Isa) -> frozenset[int]:
    """Transforms and products as machine code (`taso.backends.x86`), with the steps behind in the last transform."""
    threads = library().get_max_threads()
    picture, weight = host.place(host.index(step, 0)), host.index(step, 1)

    def make(array: Array) -> Block:
        return Block.of(in_panels(transformed_filter(array, t.rows.f, t.columns.f), isa))

    panels = host.constant(weight, f"{host.kernel.algorithm} in panels", make)
    taken = take(host, followers, 1)
    posts = (*bias_of(host, step), *taken.posts)
    bands = tuple(_bands(t, second_level_cache() * threads // 2, _FEWEST_BY_CODE * threads))
    most = max(b.images * b.height for b in bands) * t.columns.tiles
    data, made = (
        host.recipe.add_scratch(t.positions * _apart(most * size) * _ITEM) for size in (t.channels, t.filters)
    )
    for band in bands:
        tiles = band.images * band.height * t.columns.tiles
        rows = tuple(
            RowOfTiles(band.image + i, band.row + k, (i * band.height + k) * t.columns.tiles)
            for i in range(band.images) for k in range(band.height)
        )  # fmt: skip
        apart = _apart(tiles * t.channels), _apart(tiles * t.filters)
        read = Transform(_data_axis(t.rows), _data_axis(t.columns), t.channels, apart[0], False, (), threads, isa)
        product = Product(
            tiles, t.channels, t.filters, t.channels, t.filters, (), t.positions, _CHUNK, threads, *apart, isa,
        )  # fmt: skip
        axes = _output_axis(t.rows), _output_axis(t.columns)
        write = Transform(*axes, t.filters, apart[1], True, tuple(p.post for p in posts), threads, isa)
        launch(host, Transformed(read, rows), (picture, data))
        launch(host, product, (data, panels, made))
        launch(host, Transformed(write, rows), (Place(RESULT), made), posts)
    host.behind(followers[taken.count :])
    return taken.added


def _apart(elements: int) -> int:
    """How far positions are from each other: an odd number of lines, so that they do not share a part of the cache."""
    return (-(-elements // _LINE) | 1) * _LINE


def _data_axis(axis: _Axis) -> Axis:
    return Axis(axis.size, axis.pad, axis.f.outputs, axis.tiles, axis.f.data)


def _output_axis(axis: _Axis) -> Axis:
    return Axis(axis.out, 0, axis.f.outputs, axis.tiles, axis.f.output)


# ── constants ────────────────────────────────────────────────────────────────────────────────────────────────────


def _output_matrix(rows: Transforms, columns: Transforms) -> NDArray[np.float32]:
    """Outputs of a tile (by row, then column) from its positions (by column, then row)."""
    both = products_of(rows.output, columns.output)
    both = both.reshape(len(both), rows.products, columns.products).transpose(0, 2, 1)
    return np.ascontiguousarray(both.reshape(len(both), -1), np.float32)


__all__ = ["Host", "algorithms", "build", "second_level_cache"]
