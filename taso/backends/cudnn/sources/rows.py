"""Kernels that bring many elements down to one number: reductions, and what is made of a row and its numbers.

A row is what the reduced axes span. Where a row lies side by side in memory, a group of neighbouring lanes or a whole
block takes it (along); where rows lie side by side, each thread of a line takes its own, several lines share a row
(across): either way neighbouring threads read neighbouring elements. What has to be seen several times stays in
registers while a row is short enough. Sums are kept in float32 of narrower floats, in the type itself otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from taso.backends.cudnn.sources.chains import Chain
from taso.backends.cudnn.sources.fetches import Fetch, Straight, filled
from taso.backends.cudnn.sources.launches import Place, Source, SourceLaunch
from taso.backends.cudnn.sources.nests import Access, Nest, Parameters
from taso.backends.cudnn.sources.prelude import PRELUDE
from taso.backends.cudnn.sources.scalars import computed, stored
from taso.backends.places import SCRATCH
from taso.graph.types import DType

_THREADS = 256
_BYTES = 16
_HELD = 32
"""Elements of a row that a thread keeps in registers."""

_LONG = 1024
"""Elements of a row from which on a whole block takes it."""

_FEW_ROWS = 256
_SHARE = 1 << 14
"""Elements of a row, of which there are few, from which on several blocks take parts of it."""


@dataclass(frozen=True)
class Pass:
    """A number of a row: `element` (of `x`, of earlier numbers, and of the place `at_k`) joined over all elements.

    `after` are statements that follow once it is known.
    """

    name: str
    ctype: str
    start: str
    element: str
    join: str
    after: tuple[str, ...] = ()


@dataclass(frozen=True)
class Rows:
    """A kernel of rows. Accesses run along the loops `kept`, then along `reduced`, outermost in memory first.

    `value` is the text of what a row, or (`each`) each of its elements, gives, of type `made`; `extras` are read by
    name where it is made. `chain` and its `reads` are the steps behind.
    """

    name: str
    kept: tuple[int, ...]
    reduced: tuple[int, ...]
    x: Access
    target: Access
    passes: tuple[Pass, ...]
    value: str
    made: DType
    each: bool = False
    extras: tuple[tuple[str, Fetch], ...] = ()
    chain: Chain | None = None
    reads: tuple[Fetch, ...] = ()
    parts: int = 1

    # ── how threads are laid over it ─────────────────────────────────────────────────────────────────────────────

    @cached_property
    def nest(self) -> Nest:
        others = [a for f in (*(f for _, f in self.extras), *self.reads) for a in f.accesses]
        return Nest((*self.kept, *self.reduced), [self.x, self.target, *others], cut=len(self.kept))

    @property
    def rows(self) -> int:
        return math.prod(self.kept)

    @property
    def length(self) -> int:
        return math.prod(self.reduced)

    @cached_property
    def across(self) -> bool:
        """Whether neighbouring threads take neighbouring rows."""
        nest, strides = self.nest, self.nest.strides(self.x)
        side_by_side = nest.outer > 0 and strides[nest.outer - 1] == 1
        return side_by_side and strides[-1] != 1 and (nest.extents[nest.outer - 1] >= 8 or self.length < 32)

    @cached_property
    def width(self) -> int:
        """Elements that a thread reads at once."""
        if self.across:
            return 1
        width = _BYTES // max(self.x.dtype.itemsize, self.target.dtype.itemsize if self.each else 1)
        while width > 1 and not (self.nest.extents[-1] % width == 0 and self.nest.steps_evenly(self.x, width)):
            width //= 2
        return max(width, 1)

    @cached_property
    def shape(self) -> tuple[int, int]:
        """Rows that a block takes, and threads for each."""
        if self.across:
            many = self.rows >= 1 << 17 or self.length < 8
            threads = 1 if many else 8 if self.rows >= 1 << 13 or self.length < 256 else 32
            return (_THREADS if threads == 1 else 32), threads
        steps = -(-self.length // self.width // self.parts)
        if self.length <= _LONG:
            lanes = min(32, _power_of_two(steps))
            return _THREADS // lanes, lanes
        return 1, min(max(_power_of_two(-(-steps // 4)), 128), 1024)

    @property
    def join(self) -> str:
        """The function that joins numbers of a row's threads."""
        rows, threads = self.shape
        if self.across:
            return f"joined_in_column<{rows}, {threads}, "
        return f"joined_in_group<{threads}, " if rows > 1 or threads <= 32 else f"joined_in_block<{threads}, "

    @property
    def held(self) -> bool:
        """Whether a row stays in registers between passes."""
        seen = len(self.passes) + self.each
        return seen > 1 and -(-self.length // (self.shape[1] * self.width)) * self.width <= _HELD

    # ── text ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def launch(self) -> SourceLaunch:
        parameters, nest = Parameters(), self.nest
        pointer = parameters.name(self.x.place, self.x.dtype)
        rows, threads = self.shape
        # all buffers are named before parameters are written out
        finish = [] if self.each else self._finish(parameters)
        ends = self._each(parameters) if self.each else self._hand_over(parameters)
        body = [*self._begin(), *self._passes(pointer), *ends]
        function = f"template <int V> DEVICE void rows({parameters.declared}) {{"
        aligned = f"aligned<{self.width}>({pointer})"
        if self.each and nest.strides(self.target)[-1] == 1:
            aligned += f" && aligned<{self.width}>({parameters.name(self.target.place, self.target.dtype, True)})"
        aligned += "".join(
            f" && aligned<{self.width}>({parameters.name(a.place, a.dtype)})"
            for f in (*(f for _, f in self.extras), *self.reads) if self.each
            for a in f.accesses if nest.strides(a)[-1] == 1 and nest.steps_evenly(a, self.width)
        )  # fmt: skip
        call = f"rows<{{}}>({parameters.passed});"
        choice = f"if ({aligned}) {call.format(self.width)} else {call.format(1)}"
        lines = [
            PRELUDE, f"typedef {nest.index_type} I;", *self._function(finish, parameters), function,
            *("    " + x for x in body), "}",
            f'extern "C" __global__ void __launch_bounds__({rows * threads}) ENTRY({parameters.declared}) {{',
            f"    {choice if self.width > 1 else call.format(1)}", "}", "",
        ]  # fmt: skip
        grid = (-(-self.rows // rows), self.parts, 1)
        return SourceLaunch(
            Source.named(self.name, "\n".join(lines)), grid, (rows * threads, 1, 1), 0, parameters.places
        )

    def _begin(self) -> list[str]:
        nest, (rows, threads) = self.nest, self.shape
        along = f"threadIdx.x / {rows}" if self.across else f"threadIdx.x % {threads}"
        own = f"threadIdx.x % {rows}" if self.across else f"threadIdx.x / {threads}"
        lines = [
            f"const int lane = {along};",
            f"const I unit = (I)blockIdx.x * {rows} + (I)({own});",
            f"const bool live = unit < {self.rows};",
            f"const I row = live ? unit : {self.rows - 1};",
            *nest.decoded("row", loops=range(nest.outer)),
        ]
        if self.parts > 1:
            share = self._share
            lines.append(f"const I begin = (I)blockIdx.y * {share};")
            lines.append(f"const I end = begin + {share} < {self.length} ? begin + {share} : {self.length};")
        if self.held:
            lines += [
                f"constexpr int K = ({self.length} / V + {threads - 1}) / {threads};",
                f"{stored(self.x.dtype)} held[K][V];",
            ]
        return lines

    @property
    def _share(self) -> int:
        """Elements of a row that one of several blocks takes."""
        step = self.shape[1] * self.width
        return -(-self.length // (self.parts * step)) * step

    def _sweep(self, body: Sequence[str], load: bool, pointer: str) -> list[str]:
        """Text that runs for every V elements of the row that are a thread's, which stand in the array `a`."""
        nest, threads = self.nest, self.shape[1]
        decode = nest.decoded("at", loops=range(nest.outer, len(nest.extents)))
        read = filled(nest, self.x, pointer, self.width, "held[i]" if self.held else "a")
        if self.held:
            inner = [*decode, read] if load else [f"{stored(self.x.dtype)} (&a)[V] = held[i];", *body]
            return [
                "UNROLL for (int i = 0; i < K; ++i) {", f"    const I at = (lane + i * {threads}) * V;",
                f"    if (at < {self.length}) {{", *("        " + x for x in inner), "    }", "}",
            ]  # fmt: skip
        begin, end = ("begin + ", "end") if self.parts > 1 else ("", str(self.length))
        return [
            f"for (I at = {begin}(I)lane * V; at < {end}; at += {threads} * V) {{",
            *("    " + x for x in (*decode, f"{stored(self.x.dtype)} a[V];", read, *body)), "}",
        ]  # fmt: skip

    def _passes(self, pointer: str) -> list[str]:
        lines = self._sweep([], True, pointer) if self.held else []
        x = f"const {computed(self.x.dtype)} x = widen(a[k]);"
        for number in self.passes:
            element = number.element.replace("at_k", "(at + k)")
            body = [
                "UNROLL for (int k = 0; k < V; ++k) {", f"    {x}",
                f"    {number.name} = {number.join}::join({number.name}, {element});", "}",
            ]  # fmt: skip
            lines += [f"{number.ctype} {number.name} = {number.start};", *self._sweep(body, False, pointer)]
            lines += [f"{number.name} = {self.join}{number.join}>({number.name});", *number.after]
        return lines

    def _each(self, parameters: Parameters) -> list[str]:
        """Text that makes and writes each element of the row."""
        nest, out, lines = self.nest, stored(self.target.dtype), list[str]()
        if self.held:
            lines += nest.decoded("at", loops=range(nest.outer, len(nest.extents)))
        made = [f"const {computed(self.x.dtype)} x = widen(a[k]);"]
        for number, (name, fetch) in enumerate(self.extras):
            lines += [f"{stored(fetch.dtype)} e{number}[V];", *fetch.fill(nest, parameters, self.width, f"e{number}")]
            made.append(f"const {computed(fetch.dtype)} {name} = widen(e{number}[k]);")
        value = self.value.replace("at_k", "(at + k)")
        reads, behind = self._behind(parameters, self.width, value)
        to = parameters.name(self.target.place, self.target.dtype, written=True)
        place, inner = f"{to} + {nest.offset(self.target)}", nest.strides(self.target)[-1]
        even = nest.steps_evenly(self.target, self.width)
        write = f"store<V>({place}, out);" if even else f"scattered<V>({place}, {inner}, out);"
        lines += [
            *reads, f"{out} out[V];", "UNROLL for (int k = 0; k < V; ++k) {",
            *("    " + x for x in (*made, *behind)), "}", write,
        ]  # fmt: skip
        return ["if (live) {", *("    " + x for x in self._sweep(lines, False, self._pointer(parameters))), "}"]

    def _pointer(self, parameters: Parameters) -> str:
        return parameters.name(self.x.place, self.x.dtype)

    def _behind(self, parameters: Parameters, width: int, value: str) -> tuple[list[str], list[str]]:
        """Text that reads what the steps behind need, and text that makes `out[k]` of the value."""
        lines, out = [], stored(self.target.dtype)
        if self.chain is None:
            return [], [f"out[k] = narrow<{out}>({value});"]
        made = [f"const {computed(self.made)} head = {value};"]
        for number, fetch in enumerate(self.reads):
            lines += [f"{stored(fetch.dtype)} b{number}[V];"]
            lines += fetch.fill(self.nest, parameters, width, f"b{number}")
            made.append(f"const {computed(fetch.dtype)} x{number} = widen(b{number}[k]);")
        return lines, [*made, *self.chain.statements, f"out[k] = narrow<{out}>({self.chain.result});"]

    def _finish(self, parameters: Parameters) -> list[str]:
        """Text that writes a row's number, `value`; with several parts, that of each to its own place."""
        reads, behind = self._behind(parameters, 1, "value")
        to = parameters.name(self.target.place, self.target.dtype, written=True)
        place = f"{to} + {self.nest.offset(self.target)}{' + part' if self.parts > 1 else ''}"
        return [
            "constexpr int V = 1, k = 0;", f"const I {self.nest.name(self.nest.inner)} = 0;", *reads,
            f"{stored(self.target.dtype)} out[V];", *behind, f"store<V>({place}, out);",
        ]  # fmt: skip

    def _function(self, finish: Sequence[str], parameters: Parameters) -> list[str]:
        """The function around that text."""
        if not finish:
            return []
        places = "".join(f"const I {self.nest.name(n)}, " for n in range(self.nest.outer))
        part = "const I part, " if self.parts > 1 else ""
        head = f"DEVICE void finish({places}{part}const {computed(self.made)} value, {parameters.declared}) {{"
        return [head, *("    " + x for x in finish), "}"]

    def _hand_over(self, parameters: Parameters) -> list[str]:
        places = "".join(f"{self.nest.name(n)}, " for n in range(self.nest.outer))
        part = "(I)blockIdx.y, " if self.parts > 1 else ""
        return [f"if (live && lane == 0) finish({places}{part}{self.value}, {parameters.passed});"]

    # ── few long rows ────────────────────────────────────────────────────────────────────────────────────────────

    def launches(self) -> tuple[tuple[SourceLaunch, ...], tuple[int, ...]]:
        """The launches, and the bytes of scratch memory: of few long rows parts are reduced first."""
        parts = self._useful_parts()
        if parts < 2:
            return (self.launch(),), ()
        (only,) = self.passes
        kind = _HOLDS[only.ctype]
        scratch, kept = Place(SCRATCH, 0), len(self.kept)
        strides = tuple(math.prod(self.kept[n + 1 :]) * parts for n in range(kept))
        first = replace(
            self, name=self.name + " parts", parts=parts, value=only.name, made=kind, chain=None, reads=(), extras=(),
            passes=(replace(only, after=()),), target=Access(scratch, kind, (*strides, *(0,) * len(self.reduced))),
        )  # fmt: skip
        reads = tuple(_shortened(f, kept) for f in self.reads)
        second = replace(
            self, reduced=(parts,), x=Access(scratch, kind, (*strides, 1)), passes=(replace(only, element="x"),),
            target=replace(self.target, strides=(*self.target.strides[:kept], 0)), reads=reads,
        )  # fmt: skip
        return (first.launch(), second.launch()), (self.rows * parts * kind.itemsize,)

    def _useful_parts(self) -> int:
        """How many blocks share each row."""
        single = not self.each and len(self.passes) == 1 and self.passes[0].ctype in _HOLDS
        busy = -(-self.rows // self.shape[0])
        if not single or busy >= _FEW_ROWS or self.length < 2 * _SHARE:
            return 1
        parts = min(-(-self.length // _SHARE), -(-2 * _FEW_ROWS // busy))
        share = replace(self, parts=parts)._share
        return -(-self.length // share)


def _shortened(fetch: Fetch, kept: int) -> Fetch:
    if not isinstance(fetch, Straight):
        raise ValueError("steps behind read operands straight")
    return replace(fetch, access=replace(fetch.access, strides=(*fetch.access.strides[:kept], 0)))


def _power_of_two(number: int) -> int:
    """The least power of two that is not below."""
    return 1 << max(number - 1, 0).bit_length()


_HOLDS = {
    "float": DType.FLOAT, "double": DType.DOUBLE, "i32": DType.INT32, "i64": DType.INT64, "u32": DType.UINT32,
    "u64": DType.UINT64, "i8": DType.INT8, "u8": DType.UINT8, "i16": DType.INT16, "u16": DType.UINT16,
}  # fmt: skip
"""Element types of memory that holds a number of a row."""

__all__ = ["Pass", "Rows"]
