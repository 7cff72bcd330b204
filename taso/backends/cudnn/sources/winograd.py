"""The transforms of Winograd's convolution (`taso.graph.winograd`): tiles of the data, and the outputs of tiles.

A convolution of stride 1 takes Bᵀ d B of all tiles; at each of the positions in a tile the product of the transformed
data and the transformed filters; Aᵀ M A. The products are one batch of matrix products, which is cuBLAS's; what is
here is before and behind: one pass over memory each, all coefficients written out in the text, those that are 0 left
out. Bias and the element-wise steps behind run with the last transform.

Positions are numbered by column, then row, as in `transformed_filter`. Where the result has its channels last, data and
products are (positions, tiles, channels), else (positions, channels, tiles): what neighbouring threads write lies side
by side either way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction

from taso.backends.cudnn.sources.chains import Chain, chain
from taso.backends.cudnn.sources.fetches import Straight
from taso.backends.cudnn.sources.launches import Place, Source, SourceLaunch
from taso.backends.cudnn.sources.nests import Parameters, operand_strides
from taso.backends.cudnn.sources.prelude import PRELUDE
from taso.backends.cudnn.sources.scalars import literal
from taso.backends.lowering import LAST, PLAIN, Kernel
from taso.backends.places import OPERAND, RESULT
from taso.graph.ops.linear import conv_settings
from taso.graph.types import DType
from taso.graph.winograd import Matrix, Transforms, transforms

_THREADS = 256
_ALONE = Transforms(((Fraction(1),),), ((Fraction(1),),), ((Fraction(1),),))
"""Of a direction in which the filter has one tap."""


@dataclass(frozen=True)
class TiledConvolution:
    """A convolution in tiles: launches before and after the products, and the sizes of these.

    `data` writes positions × tiles × channels float32 numbers, `outputs` reads positions × tiles × filters of them;
    `last` says whether channels are innermost, else tiles. `rows` and `columns` transform the filters.
    """

    data: SourceLaunch
    outputs: SourceLaunch
    positions: int
    tiles: int
    channels: int
    filters: int
    last: bool
    rows: Transforms
    columns: Transforms


def tiled_convolution(
    kernel: Kernel, height: int, width: int, data: Place, products: Place
) -> TiledConvolution | None:  # fmt: skip
    """The kernel's convolution in tiles of `height` × `width` outputs, None where tiles cannot compute it.

    `data` and `products` are the buffers between. The weight's transform is left to the caller, and so is whether it
    pays.
    """
    tiling = _Tiling.of(kernel, height, width)
    if tiling is None:
        return None
    steps = chain(kernel, 1) if len(kernel.steps) > 1 else None
    reads = steps.fetches(kernel, range(4)) if steps is not None else []
    if len(kernel.steps) > 1 and steps is None or reads is None:
        return None
    return TiledConvolution(
        tiling.transform_data(data), tiling.transform_outputs(products, steps, reads), tiling.positions, tiling.tiles,
        tiling.data[1], tiling.result[1], tiling.last, tiling.rows, tiling.columns,
    )  # fmt: skip


@dataclass(frozen=True)
class _Tiling:
    kernel: Kernel
    data: tuple[int, ...]
    result: tuple[int, ...]
    pads: tuple[int, int]
    rows: Transforms
    columns: Transforms

    @staticmethod
    def of(kernel: Kernel, height: int, width: int) -> _Tiling | None:
        anchor = kernel.anchor
        if anchor is None or anchor.op.domain or anchor.op.name != "Conv" or len(kernel.results) != 1:
            return None
        given = [kernel.operands[i] for i in anchor.inputs if i is not None and i >= 0]
        held = (*given, *kernel.results)
        if len(given) < 2 or any(not o.type.static or o.type.dtype is not DType.FLOAT for o in held):
            return None
        if given[0].type.rank != 4 or any(0 in o.type.static_shape or o.layout not in (PLAIN, LAST) for o in held):
            return None
        full, taps = conv_settings(given[1].type, anchor.attrs), given[1].type.static_shape[2:]
        if full.int("group") != 1 or {*full.ints("strides"), *full.ints("dilations")} != {1}:
            return None
        sizes = (height, width)
        if any(m < 1 or (r == 1) != (m == 1) for m, r in zip(sizes, taps, strict=True)):
            return None
        rows, columns = (_ALONE if m == r == 1 else transforms(m, r) for m, r in zip(sizes, taps, strict=True))
        pads = full.ints("pads")
        shapes = [o.type.static_shape for o in held]
        return _Tiling(kernel, shapes[0], shapes[-1], (pads[0], pads[1]), rows, columns)

    @property
    def positions(self) -> int:
        return self.rows.products * self.columns.products

    @property
    def grid(self) -> tuple[int, int]:
        """Rows and columns of tiles in an image."""
        return -(-self.result[2] // self.rows.outputs), -(-self.result[3] // self.columns.outputs)

    @property
    def tiles(self) -> int:
        return self.data[0] * self.grid[0] * self.grid[1]

    @property
    def last(self) -> bool:
        return self.kernel.results[0].layout == LAST

    def _begin(self, channels: int) -> list[str]:
        """Text that says which tile of which channel a thread has."""
        inner, outer = (channels, "tile") if self.last else (self.tiles, "channel")
        other = "channel" if self.last else "tile"
        rows, columns = self.grid
        return [
            f"const I item = (I)blockIdx.x * {_THREADS} + (I)threadIdx.x;",
            f"if (item >= {self.tiles * channels}) return;",
            f"const I {other} = item % {inner}, {outer} = item / {inner};",
            f"const I column = tile % {columns}, row = tile / {columns} % {rows}, image = tile / {rows * columns};",
        ]

    def transform_data(self, place: Place) -> SourceLaunch:
        """Bᵀ d B of every tile and channel."""
        index = self.kernel.steps[0].inputs[0] or 0
        parameters, (image, channel, row, column) = Parameters(), operand_strides(self.kernel.operands[index])
        source = parameters.name(Place(OPERAND, index), DType.FLOAT)
        target = parameters.name(place, DType.FLOAT, written=True)
        n, m = self.rows.products, self.columns.products
        lines = [
            *self._begin(self.data[1]),
            f"const I top = row * {self.rows.outputs} - {self.pads[0]}, "
            f"left = column * {self.columns.outputs} - {self.pads[1]};",
            f"const float* from = {source} + image * {image} + channel * {channel};", f"float d[{n}][{m}];",
            f"UNROLL for (int i = 0; i < {n}; ++i) UNROLL for (int j = 0; j < {m}; ++j) {{",
            "    const I y = top + i, x = left + j;",
            f"    const bool inside = y >= 0 && y < {self.data[2]} && x >= 0 && x < {self.data[3]};",
            f"    d[i][j] = inside ? from[y * {row} + x * {column}] : 0.0f;", "}",
            *_applied(self.rows.data, self.columns.data, "d", "v"),
            *self._each_position(n, m, lambda i, j, at: f"{target}[{at} + item] = v[{i}][{j}];", self.data[1]),
        ]  # fmt: skip
        return self._launch("winograd data", lines, parameters, self.data[1])

    def transform_outputs(self, place: Place, steps: Chain | None, reads: Sequence[Straight]) -> SourceLaunch:
        """Aᵀ M A of every tile and filter, with bias and the steps behind, where they lie inside the result."""
        parameters, filters = Parameters(), self.result[1]
        source = parameters.name(place, DType.FLOAT)
        target = parameters.name(Place(RESULT), DType.FLOAT, written=True)
        n, m = self.rows.products, self.columns.products
        h, w = self.rows.outputs, self.columns.outputs
        lines = [
            *self._begin(filters), f"float d[{n}][{m}];",
            *self._each_position(n, m, lambda i, j, at: f"d[{i}][{j}] = {source}[{at} + item];", filters),
            *_applied(self.rows.output, self.columns.output, "d", "v"),
            f"UNROLL for (int i = 0; i < {h}; ++i) UNROLL for (int j = 0; j < {w}; ++j) {{",
            f"    const I y = row * {h} + i, x = column * {w} + j;",
            f"    if (y >= {self.result[2]} || x >= {self.result[3]}) continue;",
            *("    " + line for line in self._written(target, parameters, steps, reads)), "}",
        ]  # fmt: skip
        return self._launch("winograd outputs", lines, parameters, filters)

    def _written(
        self, target: str, parameters: Parameters, steps: Chain | None, reads: Sequence[Straight]
    ) -> list[str]:  # fmt: skip
        """Text that makes an element of the result of an output, `v[i][j]`."""

        def at(strides: Sequence[int]) -> str:
            return " + ".join(f"{n} * {s}" for n, s in zip(("image", "channel", "y", "x"), strides, strict=True))

        inputs, bias = self.kernel.steps[0].inputs, ""
        if len(inputs) > 2 and inputs[2] is not None:
            bias = f" + {parameters.name(Place(OPERAND, inputs[2]), DType.FLOAT)}[channel]"
        lines = [f"const float head = v[i][j]{bias};"]
        for n, read in enumerate(reads):
            pointer = parameters.name(read.access.place, read.dtype)
            lines.append(f"const auto x{n} = widen({pointer}[{at(read.access.strides)}]);")
        place = f"{target}[{at(operand_strides(self.kernel.results[0]))}]"
        if steps is None:
            return [*lines, f"{place} = head;"]
        return [*lines, *steps.statements, f"{place} = {steps.result};"]

    def _each_position(self, n: int, m: int, text: Callable[[int, int, int], str], channels: int) -> list[str]:
        size = self.tiles * channels
        return [text(i, j, (j * n + i) * size) for j in range(m) for i in range(n)]

    def _launch(self, name: str, body: Sequence[str], parameters: Parameters, channels: int) -> SourceLaunch:
        wide = self.positions * self.tiles * channels >= 1 << 31
        lines = [
            PRELUDE, f"typedef {'i64' if wide else 'i32'} I;",
            f'extern "C" __global__ void __launch_bounds__({_THREADS}) ENTRY({parameters.declared}) {{',
            *("    " + line for line in body), "}", "",
        ]  # fmt: skip
        blocks = -(-self.tiles * channels // _THREADS)
        return SourceLaunch(
            Source.named(name, "\n".join(lines)), (blocks, 1, 1), (_THREADS, 1, 1), 0, parameters.places
        )


def _applied(rows: Matrix, columns: Matrix, source: str, target: str) -> list[str]:
    """Text of target = rows · source · columnsᵀ, sums of what is not multiplied by 0."""
    size = len(columns[0])
    lines = [f"float {target}_[{len(rows)}][{size}], {target}[{len(rows)}][{len(columns)}];"]
    lines.append(f"UNROLL for (int j = 0; j < {size}; ++j) {{")
    lines += [f"    {target}_[{i}][j] = {_sum(row, lambda k: f'{source}[{k}][j]')};" for i, row in enumerate(rows)]
    lines += ["}", f"UNROLL for (int i = 0; i < {len(rows)}; ++i) {{"]
    lines += [f"    {target}[i][{j}] = {_sum(row, lambda k: f'{target}_[i][{k}]')};" for j, row in enumerate(columns)]
    return [*lines, "}"]


def _sum(coefficients: Sequence[Fraction], name: Callable[[int], str]) -> str:
    terms = [
        name(k) if c == 1 else f"{literal(float(c), 'float')} * {name(k)}" for k, c in enumerate(coefficients) if c
    ]
    return " + ".join(terms) or "0.0f"


__all__ = ["TiledConvolution", "tiled_convolution"]
