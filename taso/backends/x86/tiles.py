"""Winograd's transforms of data and of outputs, by machine code written for the sizes at hand.

Of F(m, r) in both directions (`taso.graph.winograd`) a tile of n × n pixels of 16 channels each is transformed along
rows, then along columns, in registers; what lies between is on the stack. Padding is not read, and outputs beyond the
picture are not written. Tensors have their channels last.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from itertools import groupby

from taso.backends.recipe import Call
from taso.backends.x86.assembler import R8, R9, R12, RBX, RCX, RDI, REACH, RSI, RSP, Assembler, Mem, Pooled
from taso.backends.x86.posts import Element, Finish, Post, numbered, operands
from taso.backends.x86.worker import Runnable, Worker
from taso.graph.winograd import Matrix

WIDTH = 16
_LINE, _FLOAT = 64, 4
_TAIL = 1
"""The mask register of a last vector of channels that is not whole."""


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

_INPUTS, _RESULTS = range(12), range(12, 28)
_SPARE = (28, 29, 30, 31)


class _Writer:
    """Writes the code: a worker, and a routine for each kind of row of tiles.

    In a routine R12 is where a tile begins in the picture, R8 where it is among tiles; RSI and RBX go through its
    channels, of which R9 says how many bytes are done.
    """

    def __init__(self, transform: Transform, parallel: int) -> None:
        t = self.t = transform
        self.asm = Assembler()
        self.routines: dict[tuple[bool, ...], int] = {}
        masks = {_TAIL: t.channels % WIDTH} if t.channels % WIDTH else {}
        between = t.positions[0] * t.shape[1] if not t.outputs else t.shape[0] * t.positions[1]
        self.worker = Worker(self.asm, t.threads, parallel, (R12, R8), masks, between * _LINE)
        self.finish = Finish(self.asm, self.worker, RSI, R9, _SPARE)
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
            if t.channels >= WIDTH:
                a.constant(RCX, t.channels // WIDTH)
                vector = a.here()
                self._tile(rows, columns, 0)
                a.add(RSI, _LINE)
                a.add(RBX, _LINE)
                a.add(R9, _LINE)
                a.add(RCX, -1)
                a.jump(vector, "nonzero")
            if t.channels % WIDTH:
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
        return Mem(RSP, (row * columns + column) * _LINE)

    def _tile(self, rows: tuple[bool, ...], columns: tuple[bool, ...], mask: int) -> None:
        if self.t.outputs:
            self._outputs(rows, columns, mask)
        else:
            self._data(rows, columns, mask)

    def _data(self, rows: tuple[bool, ...], columns: tuple[bool, ...], mask: int) -> None:
        a, t = self.asm, self.t
        width = len(columns)
        for j in (j for j, inside in enumerate(columns) if inside):
            read = {i: _INPUTS[i] for i, inside in enumerate(rows) if inside}
            for i, register in read.items():
                a.move(register, Mem(RSI, self._pixel(i, j)), mask)
            for u, register in self._combined(t.rows.transform, read):
                a.write(self._between(u, j, width), register)
        for u in range(t.positions[0]):
            read = {j: _INPUTS[j] for j, inside in enumerate(columns) if inside}
            for j, register in read.items():
                a.move(register, self._between(u, j, width))
            for v, register in self._combined(t.columns.transform, read):
                a.write(self._position(u, v), register, mask)

    def _outputs(self, rows: tuple[bool, ...], columns: tuple[bool, ...], mask: int) -> None:
        a, t = self.asm, self.t
        height, width = t.positions
        wanted = _only(t.rows.transform, rows)
        for v in range(width):
            for u in range(height):
                a.move(_INPUTS[u], self._position(u, v), mask)
            for i, register in self._combined(wanted, dict(enumerate(_INPUTS[:height]))):
                a.write(self._between(i, v, width), register)
        posts = numbered(t.posts)
        for i in (i for i, inside in enumerate(rows) if inside):
            for v in range(width):
                a.move(_INPUTS[v], self._between(i, v, width))
            made = list(self._combined(_only(t.columns.transform, columns), dict(enumerate(_INPUTS[:width]))))
            elements = [Element(register, self._pixel(i, j), 0, mask) for j, register in made]
            self.finish.write(posts, elements)
            for e in elements:
                a.write(Mem(RSI, e.offset), e.register, mask)

    def _combined(
        self, rows: Sequence[Sequence[Fraction] | None], read: dict[int, int]
    ) -> Iterator[tuple[int, int]]:
        """Each row of a matrix (None: none is wanted) times what is in registers; what is missing there is 0."""
        done = set[int]()
        for number, row in enumerate(rows):
            if row is None or number in done:
                continue
            target = _RESULTS[number]
            later = ((k, rows[k]) for k in range(number + 1, len(rows)) if k not in done)
            twin, other = next(((k, r) for k, r in later if _twins(row, r, read)), (-1, None))
            if other is None:
                self._sum(target, {j: row[j] for j in read if row[j]}, read)
                yield number, target
                continue
            # rows of p and −p: what they share, more and less what they do not
            second = _RESULTS[twin]
            spare = _SPARE[0]
            self._sum(spare, {j: row[j] for j in read if row[j] and row[j] == other[j]}, read)
            self._sum(second, {j: row[j] for j in read if row[j] and row[j] == -other[j]}, read)
            self.asm.vector("add", target, spare, second)
            self.asm.vector("sub", second, spare, second)
            done.add(twin)
            yield number, target
            yield twin, second

    def _sum(self, target: int, terms: dict[int, Fraction], read: dict[int, int]) -> None:
        """The sum of registers times factors, in `target`."""
        a = self.asm
        ordered = sorted(terms.items(), key=lambda term: (abs(term[1]) != 1, term[1] < 0))
        if not ordered:
            a.vector("xor", target, target, target)
            return
        (first, factor), *rest = ordered
        if factor != 1:
            a.vector("mul", target, read[first], Pooled(float(factor)))
        elif rest and abs(rest[0][1]) == 1:
            j, sign = rest.pop(0)
            a.vector("add" if sign == 1 else "sub", target, read[first], read[j])
        else:
            a.move(target, read[first])
        for j, factor in rest:
            if abs(factor) == 1:
                a.vector("add" if factor == 1 else "sub", target, target, read[j])
            else:
                a.vector("fma231", target, read[j], Pooled(float(factor)))


def _only(matrix: Matrix, wanted: Sequence[bool]) -> list[tuple[Fraction, ...] | None]:
    return [row if inside else None for row, inside in zip(matrix, wanted, strict=True)]


def _twins(row: Sequence[Fraction], other: Sequence[Fraction] | None, read: dict[int, int]) -> bool:
    """Whether two rows are alike but for signs, some of them alike and some not, so that they share work."""
    if other is None or any(abs(row[j]) != abs(other[j]) for j in read):
        return False
    same = sum(row[j] == other[j] != 0 for j in read)
    turned = sum(row[j] == -other[j] != 0 for j in read)
    return same > 0 and turned > 0 and same + turned > 2


__all__ = ["Axis", "Compiled", "RowOfTiles", "Transform", "Transformed", "compiled"]
