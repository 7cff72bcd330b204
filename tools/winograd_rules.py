"""Writes taso/rules/library/winograd.rules: Winograd's minimal filtering out of ONNX's operators, shape by shape.

    python tools/winograd_rules.py > taso/rules/library/winograd.rules

and then `python -m taso.rules.build`, which proves what is there. A convolution of T taps on tiles of M outputs is
F(M, T) of Lavin and Gray (arXiv 1509.09308); tiles of two extents are F along each. The rules are long because each
size is written out where it is needed; no two of them differ in more than the tile, the taps and what stands for the
filter and the bias.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass

HEAD = """\
# Convolutions by Winograd's minimal filtering, F(m, r) along one axis or both, made of ONNX's operators: for runtimes
# that have no such kernels. A convolution of one channel, over all images and channels as a batch, transforms the data,
# one with the positions of a tile as groups multiplies, a product of matrices makes the outputs of each tile. The
# transforms are those of taso/graph/winograd.py; the filter's depends on weights alone. A bias goes in among the
# products, a batch normalization behind goes into filter and bias. The last tile is cut off. Made by
# tools/winograd_rules.py. Heights and widths must be known where a rule is applied: they stand in its shapes.
"""
FORMS = (
    ((3, 3), (4, 4)), ((3, 3), (2, 2)), ((1, 7), (1, 4)), ((1, 7), (1, 2)), ((7, 1), (4, 1)), ((7, 1), (2, 1)),
    ((1, 3), (1, 4)), ((3, 1), (4, 1)), ((1, 3), (1, 2)), ((3, 1), (2, 1)),
)  # fmt: skip
"""Taps and tiles, rows first."""
_SIZES = ("dim(x, 2)", "dim(x, 3)")
_FACTOR = "Div(scale, Sqrt(Add(var, Constant(e, like=var))))"
_NORMALIZED = ("scale", "bias", "mean", "var")


@dataclass(frozen=True)
class Form:
    """A convolution of `taps` on tiles of so many outputs; without taps along an axis both are 1 there."""

    taps: tuple[int, int]
    tile: tuple[int, int]

    @property
    def axes(self) -> list[int]:
        return [axis for axis in (0, 1) if self.taps[axis] > 1]

    @property
    def area(self) -> tuple[int, int]:
        """What a tile reads."""
        rows, columns = (m + r - 1 for m, r in zip(self.tile, self.taps, strict=True))
        return rows, columns

    @property
    def positions(self) -> int:
        return self.area[0] * self.area[1]

    @property
    def outputs(self) -> int:
        return self.tile[0] * self.tile[1]

    def padded(self, axis: int) -> str:
        return f"{_SIZES[axis]} + p[{axis}] + p[{axis + 2}]"

    def tiles(self, axis: int, factor: bool = False) -> str:
        """How many tiles there are along an axis; as a `factor` in brackets."""
        if axis not in self.axes:
            return _SIZES[axis]
        # there are padded - taps + 1 outputs, rounded up to whole tiles
        more = self.tile[axis] - self.taps[axis]
        count = f"({self.padded(axis)} {'-' if more < 0 else '+'} {abs(more)}) // {self.tile[axis]}"
        return f"({count})" if factor else count

    def pads(self) -> str:
        before = [f"p[{axis}]" if axis in self.axes else "0" for axis in (0, 1)]
        behind = [
            f"({self.tiles(axis)}) * {self.tile[axis]} + {self.taps[axis] - 1} - {_SIZES[axis]} - p[{axis}]"
            if axis in self.axes
            else "0"
            for axis in (0, 1)
        ]
        return ", ".join((*before, *behind))

    # ── the parts ────────────────────────────────────────────────────────────────────────────────────────────────

    def table(self, name: str, shape: str) -> str:
        return f"Reshape({name}(like=x, tile={self.tile}, taps={self.taps}), shape=({shape}))"

    def data(self) -> str:
        """The transformed data: positions of a tile before channels."""
        rows, columns = self.tiles(0), self.tiles(1)
        n = self.positions
        planes = f"Reshape(x, shape=(-1, 1, {', '.join(_SIZES)}))"
        window = self.table("TileData", f"{n}, 1, {self.area[0]}, {self.area[1]}")
        moved = f"Conv({planes}, {window}, strides={self.tile}, pads=({self.pads()}))"
        apart = f"Reshape({moved}, shape=(-1, dim(x, 1), {n}, {rows}, {columns}))"
        return f"Reshape(Transpose({apart}, perm=(0, 2, 1, 3, 4)), shape=(-1, {n} * dim(x, 1), {rows}, {columns}))"

    def filter(self, w: str) -> str:
        for axis in reversed(self.axes):
            w = f"winograd_filter({w}, axis={axis + 2}, tile={self.tile[axis]}, taps={self.taps[axis]})"
        return w

    def bias(self, b: str) -> str:
        return f"Reshape(Mul({self.table('TileBias', f'{self.positions}, 1')}, {b}), shape=(-1,))"

    def products(self, w: str, b: str | None) -> str:
        """Of each position of a tile a product over the channels; as rows of positions."""
        given = ", ".join((self.data(), self.filter(w), *([] if b is None else [self.bias(b)])))
        columns = f"dim(w, 0) * {self.tiles(0, True)} * {self.tiles(1, True)}"
        return f"Reshape(Conv({given}, group={self.positions}), shape=(-1, {self.positions}, {columns}))"

    def outputs_of(self, products: str) -> str:
        """The outputs of tiles, put where they belong."""
        rows, columns = self.tiles(0), self.tiles(1)
        table = self.table("TileOutput", f"{self.outputs}, {self.positions}")
        if len(self.axes) == 2:
            shape = f"-1, {self.outputs} * dim(w, 0), {rows}, {columns}"
            return f"DepthToSpace(Reshape(MatMul({table}, {products}), shape=({shape})), blocksize={self.tile[0]})"
        if self.axes == [1]:
            beside = f"MatMul(Transpose({products}, perm=(0, 2, 1)), Transpose({table}, perm=(1, 0)))"
            return f"Reshape({beside}, shape=(-1, dim(w, 0), {rows}, ({columns}) * {self.tile[1]}))"
        under = f"Reshape(MatMul({table}, {products}), shape=(-1, {self.outputs}, dim(w, 0) * ({rows}), {columns}))"
        moved = f"Transpose({under}, perm=(0, 2, 1, 3))"
        return f"Reshape({moved}, shape=(-1, dim(w, 0), ({rows}) * {self.tile[0]}, {columns}))"

    def target(self, w: str, b: str | None) -> str:
        ends = [f"{self.padded(axis)} - {self.taps[axis] - 1}" for axis in self.axes]
        axes, starts = tuple(axis + 2 for axis in self.axes), tuple(0 for _ in self.axes)
        end = ", ".join(ends) + ("," if len(ends) == 1 else "")
        return f"Slice({self.outputs_of(self.products(w, b))}, axes={axes}, starts={starts}, ends=({end}))"

    def conditions(self, weights: list[str]) -> str:
        found = [f"rank(x) == 4 and shape(w)[2:] == {self.taps}", *(f"is_weight({name})" for name in weights)]
        found += [f"p[{axis}] == 0 and p[{axis + 2}] == 0" for axis in (0, 1) if axis not in self.axes]
        return " and ".join((*found, *(f"{self.tiles(axis)} >= 1" for axis in self.axes)))


def rules() -> Iterator[str]:
    """Each rule as it stands in the file."""
    for taps, tile in FORMS:
        form = Form(taps, tile)
        name = f"winograd-{taps[0]}x{taps[1]}-tile-{tile[0]}x{tile[1]}"
        for normalized in (False, True):
            for biased in (False, True):
                source = "Conv(x, w, b, pads=p)" if biased else "Conv(x, w, pads=p)"
                weights = ["w", "b"] if biased else ["w"]
                w, b = "w", "b" if biased else None
                conditions = ""
                if normalized:
                    source = f"BatchNormalization({source}, {', '.join(_NORMALIZED)}, epsilon=e)"
                    w = f"Mul(w, Reshape({_FACTOR}, shape=(-1, 1, 1, 1)))"
                    b = f"Add(bias, Mul(Sub(b, mean), {_FACTOR}))" if biased else f"Sub(bias, Mul(mean, {_FACTOR}))"
                    weights += _NORMALIZED
                    conditions = f"is_float(x) and same_dtype(x, {', '.join(_NORMALIZED)}) and "
                suffix = ("-batchnorm" if normalized else "") + ("-bias" if biased else "")
                rule = f"{source} => {form.target(w, b)}"
                where = f"  where {conditions}{form.conditions(weights)}"
                yield f"[{name}{suffix}]\n{rule}\n{where}\n  exact: approximates\n"


def text() -> str:
    """The whole file."""
    return "\n".join((HEAD, *rules()))


if __name__ == "__main__":
    sys.stdout.write(text())
