"""Winograd's transforms of data and of outputs, by machine code written for the sizes at hand.

Of F(m, r) in both directions (`taso.graph.winograd`) a tile of n × n pixels, of a register's channels each, is
transformed along rows, then along columns, in registers; what lies between is on the stack. Padding is not read, and
outputs beyond the picture are not written. Tensors have their channels last.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from itertools import chain, groupby
from typing import Union

from taso.backends.recipe import Call
from taso.backends.x86.assembler import AVX2, AVX512, R8, R9, R12, RBX, RCX, RDI, REACH, RSI, RSP, Isa, Mem, Pooled
from taso.backends.x86.posts import Element, Finish, Post, numbered, operands
from taso.backends.x86.vectors import assembler
from taso.backends.x86.worker import Runnable, Worker
from taso.graph.winograd import Matrix

_FLOAT = 4
_TAIL = 1
"""The mask of a last vector of channels that is not whole."""


@dataclass(frozen=True)
class Axis:
    """One direction: pixels of the picture on the side without tiles, padding before it, outputs of a tile (how far
    tiles are apart), tiles, and the transform: Bᵀ for data, Aᵀ for outputs."""

    size: int
    pad: int
    step: int
    tiles: int
    transform: Matrix

    def inside(self, tile: int, count: int) -> tuple[bool, ...]:
        """Which of `count` pixels from the tile's first on are in the picture."""
        first = tile * self.step - self.pad
        return tuple(0 <= first + i < self.size for i in range(count))

    def runs(self, count: int) -> list[tuple[tuple[bool, ...], int]]:
        """Tiles in order, those together of which the same pixels are in the picture."""
        found = groupby(self.inside(tile, count) for tile in range(self.tiles))
        return [(inside, len(list(group))) for inside, group in found]


@dataclass(frozen=True)
class Transform:
    """The transform of all tiles of some rows of tiles. With `outputs` it goes from tiles to the picture, else to them.

    Position u, v of all tiles begins `apart` elements behind position u − 1, v; tile lies behind tile there, channels
    innermost. `posts` are what is done with outputs.
    """

    rows: Axis
    columns: Axis
    channels: int
    apart: int
    outputs: bool
    posts: tuple[Post, ...] = ()
    threads: int = 1
    isa: Isa = AVX2

    @property
    def fits(self) -> bool:
        """Whether instructions reach all positions and all pixels of a tile."""
        pixels = (self.shape[0] + 1) * self.columns.size * self.channels
        return max(self.positions[0] * self.positions[1] * self.apart, pixels) * _FLOAT < REACH

    @property
    def shape(self) -> tuple[int, int]:
        """Pixels of a tile in the picture: data that it reads, or outputs."""
        if self.outputs:
            return len(self.rows.transform), len(self.columns.transform)
        return len(self.rows.transform[0]), len(self.columns.transform[0])

    @property
    def positions(self) -> tuple[int, int]:
        """Positions of a tile in both directions."""
        if self.outputs:
            return len(self.rows.transform[0]), len(self.columns.transform[0])
        return len(self.rows.transform), len(self.columns.transform)


@dataclass(frozen=True)
class RowOfTiles:
    """One row of tiles: which picture it is in, its number there, and how many tiles of the block come before it."""

    image: int
    row: int
    before: int


@dataclass(frozen=True)
class Transformed:
    """A transform of some rows of tiles."""

    transform: Transform
    rows: tuple[RowOfTiles, ...]

    @property
    def isa(self) -> Isa:
        return self.transform.isa

    def bind(self, parallel: int, buffers: Sequence[int], others: Sequence[int]) -> tuple[Call, object]:
        """What runs it on the picture and the tiles (`taso.backends.x86.launch`)."""
        picture, tiles = buffers
        return compiled(self.transform, parallel).bind(self.rows, picture, tiles, others)


class Compiled:
    """The machine code of one transform."""

    def __init__(self, transform: Transform, parallel: int) -> None:
        """`parallel` is the address of libgomp's GOMP_parallel."""
        writer = _Writer(transform, parallel)
        self.transform = transform
        self._runnable = Runnable(writer.asm.finish(), writer.worker.offset)
        self._routines = writer.routines

    def bind(
        self, rows: Sequence[RowOfTiles], picture: int, tiles: int, others: Sequence[int]
    ) -> tuple[Call, object]:
        """What transforms these rows of tiles; `others` are the addresses of its posts' operands, in order.

        `picture` is where the first image is, of data or outputs, `tiles` where the first position of the first tile.
        """
        t = self.transform
        pixel, height = t.channels * _FLOAT, t.rows.size
        tasks = []
        for r in rows:
            routine = self._routines[t.rows.inside(r.row, t.shape[0])]
            first = (r.image * height + r.row * t.rows.step - t.rows.pad) * t.columns.size - t.columns.pad
            tasks.append([routine, picture + first * pixel, tiles + r.before * pixel])
        return self._runnable.bind(tasks, operands(t.posts, picture, others))


@lru_cache(maxsize=256)
def compiled(transform: Transform, parallel: int) -> Compiled:
    """The machine code of a transform, written once."""
    return Compiled(transform, parallel)


# ── writing it ───────────────────────────────────────────────────────────────────────────────────────────────────

@dataclass(frozen=True)
class _Registers:
    """Which registers hold what: the first inputs of a sum, results, temporaries, and what an input without a register
    is loaded into where it is used. Results that have one register each are made together."""

    inputs: range
    results: range
    spare: tuple[int, ...]
    loaded: int = -1

    @property
    def together(self) -> bool:
        return len(self.results) > _PAIR


_PAIR = 2
_REGISTERS = {
    AVX512: _Registers(range(12), range(12, 28), (28, 29, 30, 31)),
    AVX2: _Registers(range(8), range(8, 10), (10, 11, 12, 13), 14),
}
_Read = dict[int, Union[int, tuple[Mem, int]]]
"""Inputs of a sum by number: their register, or where in memory they are and their mask."""


class _Writer:
    """Writes the code: a worker, and a routine for each kind of row of tiles.

    In a routine R12 is where a tile begins in the picture, R8 where it is among tiles; RSI and RBX go through its
    channels, of which R9 says how many bytes are done.
    """

    def __init__(self, transform: Transform, parallel: int) -> None:
        t = self.t = transform
        self.asm = assembler(t.isa)
        self.registers = _REGISTERS[t.isa]
        self.routines: dict[tuple[bool, ...], int] = {}
        masks = {_TAIL: t.channels % t.isa.width} if t.channels % t.isa.width else {}
        between = t.positions[0] * t.shape[1] if not t.outputs else t.shape[0] * t.positions[1]
        self.worker = Worker(self.asm, t.threads, parallel, (R12, R8), masks, between * t.isa.bytes)
        self.finish = Finish(self.asm, self.worker, RSI, R9, self.registers.spare)
        for rows, _ in t.rows.runs(t.shape[0]):
            if rows not in self.routines:
                self._routine(rows)

    def _routine(self, rows: tuple[bool, ...]) -> None:
        a, t, pixel = self.asm, self.t, self.t.channels * _FLOAT
        self.routines[rows] = a.offset(a.here())
        for columns, count in t.columns.runs(t.shape[1]):
            a.constant(RDI, count)
            tile = a.here()
            a.copy(RSI, R12)
            a.copy(RBX, R8)
            a.zero(R9)
            if t.channels >= t.isa.width:
                a.constant(RCX, t.channels // t.isa.width)
                vector = a.here()
                self._tile(rows, columns, 0)
                a.add(RSI, t.isa.bytes)
                a.add(RBX, t.isa.bytes)
                a.add(R9, t.isa.bytes)
                a.add(RCX, -1)
                a.jump(vector, "nonzero")
            if t.channels % t.isa.width:
                self._tile(rows, columns, _TAIL)
            a.add(R12, t.columns.step * pixel)
            a.add(R8, pixel)
            a.add(RDI, -1)
            a.jump(tile, "nonzero")
        a.jump(self.worker.following)

    def _pixel(self, i: int, j: int) -> int:
        return (i * self.t.columns.size + j) * self.t.channels * _FLOAT

    def _position(self, u: int, v: int) -> Mem:
        # by column, then row
        return Mem(RBX, (v * self.t.positions[0] + u) * self.t.apart * _FLOAT)

    def _between(self, row: int, column: int, columns: int) -> Mem:
        return Mem(RSP, (row * columns + column) * self.t.isa.bytes)

    def _tile(self, rows: tuple[bool, ...], columns: tuple[bool, ...], mask: int) -> None:
        if self.t.outputs:
            self._outputs(rows, columns, mask)
        else:
            self._data(rows, columns, mask)

    def _data(self, rows: tuple[bool, ...], columns: tuple[bool, ...], mask: int) -> None:
        a, t = self.asm, self.t
        width = len(columns)
        for j in (j for j, inside in enumerate(columns) if inside):
            read = self._read({i: Mem(RSI, self._pixel(i, j)) for i, inside in enumerate(rows) if inside}, mask)
            for u, register in chain.from_iterable(self._combined(t.rows.transform, read)):
                a.write(self._between(u, j, width), register)
        for u in range(t.positions[0]):
            read = self._read({j: self._between(u, j, width) for j, inside in enumerate(columns) if inside})
            for v, register in chain.from_iterable(self._combined(t.columns.transform, read)):
                a.write(self._position(u, v), register, mask)

    def _outputs(self, rows: tuple[bool, ...], columns: tuple[bool, ...], mask: int) -> None:
        a, t = self.asm, self.t
        height, width = t.positions
        wanted = _only(t.rows.transform, rows)
        for v in range(width):
            read = self._read({u: self._position(u, v) for u in range(height)}, mask)
            for i, register in chain.from_iterable(self._combined(wanted, read)):
                a.write(self._between(i, v, width), register)
        posts = numbered(t.posts)
        for i in (i for i, inside in enumerate(rows) if inside):
            read = self._read({v: self._between(i, v, width) for v in range(width)})
            groups = self._combined(_only(t.columns.transform, columns), read)
            for made in [list(chain.from_iterable(groups))] if self.registers.together else groups:
                elements = [Element(register, self._pixel(i, j), 0, mask) for j, register in made]
                self.finish.write(posts, elements)
                for e in elements:
                    a.write(Mem(RSI, e.offset), e.register, mask)

    def _read(self, places: dict[int, Mem], mask: int = 0) -> _Read:
        """Loads inputs, as many as there are registers for."""
        found: _Read = {}
        for number, place in places.items():
            if number in self.registers.inputs:
                found[number] = self.registers.inputs[number]
                self.asm.move(self.registers.inputs[number], place, mask)
            else:
                found[number] = place, mask
        return found

    def _input(self, read: _Read, number: int) -> int:
        """The register of an input."""
        held = read[number]
        if isinstance(held, int):
            return held
        self.asm.move(self.registers.loaded, *held)
        return self.registers.loaded

    def _combined(self, rows: Sequence[Sequence[Fraction] | None], read: _Read) -> Iterator[list[tuple[int, int]]]:
        """Each row of a matrix (None: none is wanted) times what was read, which is 0 where it is missing.

        Numbers and registers of those that are made at once come together; those made before may be overwritten then.
        """
        done, r = set[int](), self.registers
        for number, row in enumerate(rows):
            if row is None or number in done:
                continue
            later = ((k, rows[k]) for k in range(number + 1, len(rows)) if k not in done)
            twin, other = next(((k, o) for k, o in later if _twins(row, o, read)), (-1, None))
            target, second = (r.results[number], r.results[twin]) if r.together else r.results
            if other is None:
                self._sum(target, {j: row[j] for j in read if row[j]}, read)
                yield [(number, target)]
                continue
            # rows of p and −p: what they share, more and less what they do not
            spare = r.spare[0]
            self._sum(spare, {j: row[j] for j in read if row[j] and row[j] == other[j]}, read)
            self._sum(second, {j: row[j] for j in read if row[j] and row[j] == -other[j]}, read)
            self.asm.vector("add", target, spare, second)
            self.asm.vector("sub", second, spare, second)
            done.add(twin)
            yield [(number, target), (twin, second)]

    def _sum(self, target: int, terms: dict[int, Fraction], read: _Read) -> None:
        """The sum of what was read times factors, in `target`."""
        a = self.asm
        ordered = sorted(terms.items(), key=lambda term: (abs(term[1]) != 1, term[1] < 0))
        if not ordered:
            a.vector("xor", target, target, target)
            return
        (first, factor), *rest = ordered
        if factor != 1:
            a.vector("mul", target, self._input(read, first), Pooled(float(factor)))
        elif rest and abs(rest[0][1]) == 1 and isinstance(read[first], int):
            j, sign = rest.pop(0)
            a.vector("add" if sign == 1 else "sub", target, self._input(read, first), self._input(read, j))
        else:
            a.move(target, self._input(read, first))
        for j, factor in rest:
            if abs(factor) == 1:
                a.vector("add" if factor == 1 else "sub", target, target, self._input(read, j))
            else:
                a.vector("fma231", target, self._input(read, j), Pooled(float(factor)))


def _only(matrix: Matrix, wanted: Sequence[bool]) -> list[tuple[Fraction, ...] | None]:
    return [row if inside else None for row, inside in zip(matrix, wanted, strict=True)]


def _twins(row: Sequence[Fraction], other: Sequence[Fraction] | None, read: _Read) -> bool:
    """Whether two rows are alike but for signs, some of them alike and some not, so that they share work."""
    if other is None or any(abs(row[j]) != abs(other[j]) for j in read):
        return False
    same = sum(row[j] == other[j] != 0 for j in read)
    turned = sum(row[j] == -other[j] != 0 for j in read)
    return same > 0 and turned > 0 and same + turned > 2


__all__ = ["Axis", "Compiled", "RowOfTiles", "Transform", "Transformed", "compiled"]
