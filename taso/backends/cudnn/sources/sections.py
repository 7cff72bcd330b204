"""Kernels that make each element of a result by itself, in one pass over memory.

A kernel is one or more sections, each a range of its blocks: a concatenation of many tensors is one launch. Shapes and
strides are constants in the text: divisions become multiplications, loops of size 1 and additions of 0 are gone, and
nothing has to be passed; a module is compiled once per signature and kept, as costs are measured per signature too.

A thread makes V elements that lie side by side, read and written as one (16 bytes where rows allow it); where a buffer
happens to begin elsewhere (it may be a part of another) the kernel sees that and goes element by element.
Where an operand lies side by side along another loop than the result, tiles of 32 × 32 go through shared memory, so
that both are read and written in whole lines.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from taso.backends.cudnn.sources.chains import Chain
from taso.backends.cudnn.sources.fetches import Fetch, Lookup, Straight, looked_up
from taso.backends.cudnn.sources.launches import Place, Source, SourceLaunch
from taso.backends.cudnn.sources.nests import Access, Nest, Parameters
from taso.backends.cudnn.sources.prelude import PRELUDE
from taso.backends.cudnn.sources.scalars import computed, stored

THREADS = 256
_MOST_BLOCKS = 1 << 20
_TILE = 32
_TILE_FROM = 12
"""Extents from which a tile is worth its way through shared memory."""

_MOST_TILES = 4
"""Tiles that a block has at once; with numbers of eight bytes they take 34 of the 48 KiB that every GPU gives."""

_BYTES = 16
_MOST_SECTIONS = 16


@dataclass(frozen=True)
class Section:
    """Elements along `loops` of what `target` says: made by `chain` of what `fetches` read.

    With `head` the first fetch gives what the chain begins with, and the others its uses. Without a chain the one
    fetch is copied. `tables` is text before the kernel that fetches refer to. With `lookups` the target is moved by
    indices that are read, and what they place outside is not written.
    """

    loops: tuple[int, ...]
    fetches: tuple[Fetch, ...]
    target: Access
    chain: Chain | None = None
    head: bool = False
    tables: str = ""
    lookups: tuple[Lookup, ...] = ()

    @cached_property
    def nest(self) -> Nest:
        accesses = [a for f in self.fetches for a in f.accesses] + [x.indices for x in self.lookups]
        pinned = {x for f in self.fetches for x in f.pinned}
        return Nest(self.loops, [*accesses, self.target], pinned)

    @cached_property
    def width(self) -> int:
        """Lanes of a thread."""
        if self.lookups:
            return 1
        nest, sizes = self.nest, [self.target.dtype.itemsize]
        for fetch in self.fetches:
            sizes += [fetch.dtype.itemsize for a in fetch.accesses[:1] if nest.strides(a)[-1] == 1]
        if any(f.together and nest.loop(x) == nest.inner for f in self.fetches for x in f.pinned):
            return 1
        width = _BYTES // max(sizes)
        while width > 1 and not (nest.extents[-1] % width == 0 and nest.steps_evenly(self.target, width)):
            width //= 2
        return max(width, 1)

    @cached_property
    def crossed(self) -> tuple[int, tuple[int, ...]] | None:
        """The loop along which fetches (these) lie side by side though the result does not; None where none does."""
        nest = self.nest
        if self.lookups or nest.strides(self.target)[-1] != 1 or nest.extents[-1] < _TILE_FROM:
            return None
        by_loop: dict[int, list[int]] = {}
        for number, fetch in enumerate(self.fetches):
            if not isinstance(fetch, Straight):
                continue
            strides = nest.strides(fetch.access)
            if strides[-1] in (0, 1) or 1 not in strides:
                continue
            loop = strides.index(1)
            if nest.extents[loop] >= _TILE_FROM:
                by_loop.setdefault(loop, []).append(number)
        if not by_loop:
            return None
        loop = max(by_loop, key=lambda x: (len(by_loop[x]), x))
        return loop, tuple(by_loop[loop][:_MOST_TILES])

    @property
    def shared(self) -> int:
        """Bytes of shared memory for tiles."""
        numbers = () if self.crossed is None else self.crossed[1]
        return sum(_tile_bytes(self.fetches[n]) for n in numbers)

    @cached_property
    def blocks(self) -> int:
        if self.crossed is None:
            return max(min(-(-self.nest.size // self.width // THREADS), _MOST_BLOCKS), 1)
        loop = self.crossed[0]
        return math.prod(-(-n // _TILE) if x in (loop, self.nest.inner) else n for x, n in enumerate(self.nest.extents))

    def elements(self, parameters: Parameters, tiled: Sequence[int] = ()) -> list[str]:
        """Text that makes V elements where the loops stand; of the fetches `tiled` they are there already."""
        nest, lines = self.nest, []
        for number, fetch in enumerate(self.fetches):
            if number not in tiled:
                kind = computed(fetch.dtype) if fetch.computed else stored(fetch.dtype)
                lines.append(f"{kind} a{number}[V];")
                lines += fetch.fill(nest, parameters, 1 if tiled else self.width, f"a{number}")
        out, to = stored(self.target.dtype), parameters.name(self.target.place, self.target.dtype, written=True)
        inner = nest.strides(self.target)[-1]
        place = f"{to} + {nest.offset(self.target)}"
        if self.lookups:
            read, inside, moved = looked_up(nest, parameters, self.lookups, False)
            lines += [*read, f"if (!({inside})) return;"]
            place += moved
        write = f"store<V>({place}, out);" if inner == 1 else f"scattered<V>({place}, {inner}, out);"
        return [*lines, f"{out} out[V];", *self._computation(out), write]

    def _computation(self, out: str) -> list[str]:
        lines = []
        for number, fetch in enumerate(self.fetches):
            name = "head" if self.head and number == 0 else f"x{number - self.head}"
            value = f"a{number}[k]" if fetch.computed else f"widen(a{number}[k])"
            lines.append(f"const {computed(fetch.dtype)} {name} = {value};")
        if self.chain is None:
            plain = not self.fetches[0].computed and self.fetches[0].dtype is self.target.dtype
            lines = [f"out[k] = {'a0[k]' if plain else f'narrow<{out}>(a0[k])'};"]
        else:
            lines += [*self.chain.statements, f"out[k] = narrow<{out}>({self.chain.result});"]
        return ["UNROLL for (int k = 0; k < V; ++k) {", *("    " + x for x in lines), "}"]

    def wide_pointers(self, parameters: Parameters) -> str:
        """Text that says whether every buffer that is read or written widely begins where that is possible."""
        accesses = [self.target, *(a for f in self.fetches for a in f.accesses if a.dtype is f.dtype)]
        names = dict.fromkeys(parameters.name(a.place, a.dtype) for a in accesses if self.nest.strides(a)[-1] == 1)
        return " && ".join(f"aligned<{self.width}>({n})" for n in names) or "true"


def launches(name: str, sections: Sequence[Section], aliased: frozenset[Place] = frozenset()) -> list[SourceLaunch]:
    """One launch for every few sections; those without elements are none."""
    given = [s for s in sections if 0 not in s.loops]
    parts = [given[i : i + _MOST_SECTIONS] for i in range(0, len(given), _MOST_SECTIONS)]
    return [_launch(name, part, aliased) for part in parts]


def _launch(name: str, sections: Sequence[Section], aliased: frozenset[Place]) -> SourceLaunch:
    parameters = Parameters()
    parameters.aliased |= aliased
    bodies = [s.elements(parameters, s.crossed[1] if s.crossed else ()) for s in sections]
    for section in sections:
        if section.crossed:
            for number in section.crossed[1]:
                fetch = section.fetches[number]
                parameters.name(fetch.accesses[0].place, fetch.dtype)
    tables = "\n".join(dict.fromkeys(s.tables for s in sections if s.tables))
    index = "i64" if any(s.nest.wide_index for s in sections) else "i32"
    # one after the other, all sections have the same memory
    shared = max(s.shared for s in sections)
    functions, calls, first = [], [], 0
    for number, (section, body) in enumerate(zip(sections, bodies, strict=True)):
        make = _pointwise if section.crossed is None else _tiled
        function, call = make(number, section, body, parameters, first)
        functions.append(function)
        last = number == len(sections) - 1
        calls.append(call if last else f"if (blockIdx.x < {first + section.blocks}) {{ {call} return; }}")
        first += section.blocks
    lines = [
        PRELUDE, f"typedef {index} I;", tables, *functions,
        f'extern "C" __global__ void __launch_bounds__({THREADS}) ENTRY({parameters.declared}) {{',
        *([f"    alignas(16) __shared__ u8 tiles[{shared}];"] if shared else []), *("    " + c for c in calls), "}", "",
    ]  # fmt: skip
    source = Source.named(name, "\n".join(x for x in lines if x or x == ""))
    return SourceLaunch(source, (first, 1, 1), (THREADS, 1, 1), 0, parameters.places)


def _pointwise(
    number: int, section: Section, body: Sequence[str], parameters: Parameters, first: int
) -> tuple[str, str]:
    width, blocks = section.width, section.blocks
    function = [
        f"template <int V> DEVICE void section{number}(const I item, {parameters.declared}) {{",
        *("    " + x for x in (*section.nest.decoded("item", "V"), *body)), "}",
    ]  # fmt: skip
    start, step = _plus(f"(I)blockIdx.x * {THREADS} + (I)threadIdx.x", -first * THREADS), blocks * THREADS
    call = f"section{number}<{{}}>(i, {parameters.passed});"

    def loop(lanes: int) -> str:
        return f"for (I i = {start}; i < {section.nest.size // lanes}; i += {step}) {call.format(lanes)}"

    if width == 1:
        return "\n".join(function), loop(1)
    wide = section.wide_pointers(parameters)
    return "\n".join(function), f"if ({wide}) {loop(width)} else {loop(1)}"


def _tiled(number: int, section: Section, body: Sequence[str], parameters: Parameters, first: int) -> tuple[str, str]:
    nest, inner = section.nest, section.nest.inner
    if section.crossed is None:
        raise ValueError("a section without tiles")
    loop, fetches = section.crossed
    across, along = nest.name(loop), nest.name(inner)
    counts = {x: -(-nest.extents[x] // _TILE) for x in (loop, inner)}
    rest = [x for x in range(len(nest.extents)) if x not in counts]
    lines = ["constexpr int V = 1;", f"const int x = threadIdx.x % {_TILE}, y = threadIdx.x / {_TILE};"]
    lines += ["I left = tile;"]
    for x in (inner, loop):
        lines.append(f"const I first{x} = left % {counts[x]} * {_TILE}; left /= {counts[x]};")
    lines += nest.decoded("left", loops=rest)
    rows = THREADS // _TILE
    reads, takes, begin = [], [], 0
    for n in fetches:
        fetch = section.fetches[n]
        kind, pointer = stored(fetch.dtype), parameters.name(fetch.accesses[0].place, fetch.dtype)
        # a column more than is used, so that the elements of a column lie in different banks
        row = f"{kind} (*tile{n})[{_TILE + 1}]"
        lines.append(f"{row} = reinterpret_cast<{kind} (*)[{_TILE + 1}]>(tiles + {begin});")
        begin += _tile_bytes(fetch)
        reads.append(f"tile{n}[y + s][x] = {pointer}[{nest.offset(fetch.accesses[0])}];")
        takes.append(f"{kind} a{n}[V]; a{n}[0] = tile{n}[x][y + s];")
    inside = f"{across} < {nest.extents[loop]} && {along} < {nest.extents[inner]}"
    steps = f"UNROLL for (int s = 0; s < {_TILE}; s += {rows}) {{"
    lines += [
        steps, f"    const I {across} = first{loop} + x, {along} = first{inner} + y + s;",
        f"    if ({inside}) {{", *("        " + r for r in reads), "    }", "}",
        "__syncthreads();",
        steps, f"    const I {across} = first{loop} + y + s, {along} = first{inner} + x;",
        f"    if ({inside}) {{", *("        " + t for t in (*takes, *body)), "    }", "}",
    ]  # fmt: skip
    function = [
        f"DEVICE void section{number}(u8* tiles, const I tile, {parameters.declared}) {{",
        *("    " + x for x in lines), "}",
    ]  # fmt: skip
    return "\n".join(function), f"section{number}(tiles, {_plus('(I)blockIdx.x', -first)}, {parameters.passed});"


def _tile_bytes(fetch: Fetch) -> int:
    return -(-_TILE * (_TILE + 1) * fetch.dtype.itemsize // 16) * 16


def _plus(text: str, number: int) -> str:
    return text if not number else f"{text} - {-number}"


__all__ = ["THREADS", "Section", "launches"]
