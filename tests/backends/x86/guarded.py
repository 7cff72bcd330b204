"""Helpers for tests of transforms and depthwise convolutions: tensors amid memory that is watched, posts in float64."""

from __future__ import annotations

import itertools
import math
import os
import random
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
from hypothesis import HealthCheck, settings
from machine_code import BEHIND, isa, walled
from numpy.typing import NDArray

from taso.backends.x86.assembler import AVX2
from taso.backends.x86.code import Code
from taso.backends.x86.depthwise import Span
from taso.backends.x86.functions import Function
from taso.backends.x86.posts import ByColumn, ByElement, Post

Array = NDArray[np.float32]
Wide = NDArray[np.float64]
ROUNDING = 2.0**-24
"""By how much of itself a result in float32 is rounded at most."""
_PATTERNS = itertools.count(0x7FC00001)
"""Bits of NaNs. Each tensor has one of its own: what one gives is not taken for what nobody wrote in another."""
_AROUND = 4096
FUZZ = settings(
    max_examples=150, deadline=None, derandomize=True, database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)  # fmt: skip


# ── memory ───────────────────────────────────────────────────────────────────────────────────────────────────────


class Tensor:
    """A tensor of float32 amid memory with a pattern that is NaN; elements that are not given hold it, too.

    With a wall it ends right before (`BEHIND`), or begins right behind (`BEFORE`), a page that may not be touched.
    """

    def __init__(self, shape: Sequence[int], fill: Array | None = None, wall: str = "") -> None:
        self.shape, count, self._pattern = tuple(shape), math.prod(shape), np.uint32(next(_PATTERNS))
        if wall:
            self._around = walled(count)
            self._start = self._around.size - count if wall == BEHIND else 0
        else:
            # an odd number of elements behind a line: nothing is aligned
            self._around = np.empty(count + 2 * _AROUND, np.uint32)
            self._start = _AROUND + 5
        self.clear()
        if fill is not None:
            self.array[...] = fill

    def clear(self) -> None:
        self._around[:] = self._pattern

    @property
    def address(self) -> int:
        return self._around.ctypes.data + 4 * self._start

    @property
    def array(self) -> Array:
        found = self._around.view(np.float32)[self._start : self._start + math.prod(self.shape)]
        return found.reshape(self.shape)

    def written(self) -> NDArray[np.bool_]:
        """Which elements do not hold the pattern."""
        bits = self._around[self._start : self._start + math.prod(self.shape)]
        return (bits != self._pattern).reshape(self.shape)

    def kept_to_itself(self) -> bool:
        stop = self._start + math.prod(self.shape)
        around = np.concatenate([self._around[: self._start], self._around[stop:]])
        return bool((around == self._pattern).all())

    def copy(self) -> NDArray[np.uint32]:
        return self._around.copy()


def in_a_process(module: str, call: str) -> int:
    """The exit status of a process of its own that calls a function of a module of tests."""
    here = Path(__file__).parent
    code = (
        "import resource; resource.setrlimit(resource.RLIMIT_CORE, (0, 0)); "
        "import machine_code; from taso.backends.x86.assembler import Isa; "
        f"machine_code.choose({isa()!r}); import {module}; {module}.{call}; print('done')"
    )
    paths = [str(here), str(here.parent), str(here.parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    ran = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert ran.returncode <= 0, ran.stderr
    assert ran.returncode or ran.stdout.strip() == "done"
    return ran.returncode


def both_at_once(works: Sequence[Callable[[], bool]], times: int = 100) -> list[int]:
    """Numbers of those that did not hold, run in threads of their own at the same time, so often each."""
    wrong: list[int] = []
    together = threading.Barrier(len(works))

    def work(number: int) -> None:
        together.wait()
        for _ in range(times):
            if not works[number]():
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(len(works))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return wrong


class Windows(Protocol):
    """The problem of a convolution, depthwise or in groups."""

    @property
    def images(self) -> int: ...
    @property
    def channels(self) -> int: ...
    @property
    def rows(self) -> Span: ...
    @property
    def columns(self) -> Span: ...
    @property
    def posts(self) -> tuple[Post, ...]: ...


class Bindable(Protocol):
    """The machine code of a convolution."""

    def bind(
        self, data: int, filters: int, out: int, others: Sequence[int]
    ) -> tuple[Callable[[], object], object]: ...  # fmt: skip


class Windowed:
    """A convolution bound to tensors of its own: data where windows meet it, filters, result, operands of posts.

    What it should be says `exact`: the result, and by how much it may differ.
    """

    d: Windows
    random: np.random.Generator

    def place(self, channels: int, packed: Array, compiled: Bindable, wall: str) -> None:
        """Makes the tensors and binds the code to them; `channels` are the result's."""
        d = self.d
        self.filters = Tensor(packed.shape, packed, wall)
        self.data = Tensor((d.images, d.rows.size, d.columns.size, d.channels), None, wall)
        met = [
            sorted({s.stride * i - s.pad + tap for i in range(s.out) for tap in range(s.taps)} & set(range(s.size)))
            for s in (d.rows, d.columns)
        ]
        at = np.ix_(range(d.images), *met, range(d.channels))
        self.data.array[at] = self.normal(d.images, len(met[0]), len(met[1]), d.channels)
        self.out = Tensor((d.images, d.rows.out, d.columns.out, channels), None, wall)
        self.others = operands_for(d.posts, self.out.shape, self.random, wall)
        self.compiled = compiled
        addresses = [o.address for o in self.others]
        self.call, self.kept = compiled.bind(self.data.address, self.filters.address, self.out.address, addresses)

    def normal(self, *dims: int) -> Array:
        return self.random.standard_normal(dims).astype(np.float32)

    def taps(self) -> Iterator[tuple[tuple[int, int], Wide]]:
        """Each tap, and what the windows read at it."""
        d = self.d
        ends = [(s.pad, max(s.stride * (s.out - 1) + s.taps - s.pad - s.size, 0)) for s in (d.rows, d.columns)]
        # what no window meets counts for nothing
        held = np.where(self.data.written(), self.data.array, 0).astype(np.float64)
        padded = np.pad(held, ((0, 0), *ends, (0, 0)))
        for i, j in itertools.product(range(d.rows.taps), range(d.columns.taps)):
            rows = slice(i, i + d.rows.stride * (d.rows.out - 1) + 1, d.rows.stride)
            columns = slice(j, j + d.columns.stride * (d.columns.out - 1) + 1, d.columns.stride)
            yield (i, j), padded[:, rows, columns]

    def exact(self) -> tuple[Wide, Wide]:
        raise NotImplementedError

    def run(self) -> Array:
        assert not self.call()
        return self.out.array.copy()

    def check(self) -> Array:
        """The result, if it is right and nothing else was touched, twice in the same bits."""
        read = [self.data, self.filters, *self.others]
        before = [tensor.copy() for tensor in read]
        wanted, allowed = self.exact()
        found = self.run()
        assert self.out.written().all() and self.out.kept_to_itself()
        assert np.isfinite(found).all()
        assert (np.abs(found - wanted) <= allowed).all()
        assert all(np.array_equal(a, b.copy()) for a, b in zip(before, read, strict=True)), "only read"
        self.out.clear()
        assert np.array_equal(self.run(), found), "nothing is left from one run that changes the next"
        return found


# ── posts ────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class _Known:
    """A function in float64 and the largest slope that it has."""

    exact: Callable[[Wide], Wide]
    slope: float


def _logistic(x: Wide) -> Wide:
    return 0.5 + 0.5 * np.tanh(x / 2)


def _normal(x: Wide) -> Wide:
    return np.array([math.erfc(-v / math.sqrt(2)) / 2 for v in x.ravel()]).reshape(x.shape)


FUNCTIONS = {
    Function("relu"): _Known(lambda x: np.maximum(x, 0), 1),
    Function("relu", 0.125): _Known(lambda x: np.where(x > 0, x, 0.125 * x), 1),
    Function("linear", -0.5, 1.0): _Known(lambda x: 1 - 0.5 * x, 0.5),
    Function("clip_v2", 0.0, 6.0): _Known(lambda x: np.clip(x, 0, 6), 1),
    Function("logistic"): _Known(_logistic, 0.25),
    Function("swish", 1.0): _Known(lambda x: x * _logistic(x), 1.1),
    Function("hardswish", 0.25, 0.5): _Known(lambda x: x * np.clip(0.25 * x + 0.5, 0, 1), 1.5),
    Function("hardsigmoid", 0.25, 0.5): _Known(lambda x: np.clip(0.25 * x + 0.5, 0, 1), 0.25),
    Function("gelu_erf"): _Known(lambda x: x * _normal(x), 1.13),
}  # fmt: skip
COMBINED: dict[str, Callable[[Wide, Wide], Wide]] = {"add": np.add, "sub": np.subtract, "mul": np.multiply}
EVERY_POST: tuple[Post, ...] = (*FUNCTIONS, *(kind(name) for kind in (ByColumn, ByElement) for name in COMBINED))


def draw_posts(chance: random.Random, most: int = 4) -> tuple[Post, ...]:
    kinds = [[kind(name) for name in COMBINED] for kind in (ByColumn, ByElement)] + [list(FUNCTIONS)]
    return tuple(chance.choice(chance.choice(kinds)) for _ in range(chance.randint(0, most)))


def operands_for(posts: Sequence[Post], shape: Sequence[int], numbers: np.random.Generator, wall: str) -> list[Tensor]:
    """What the posts of a result (channels last) read."""
    found = []
    for post in posts:
        if not isinstance(post, Function):
            dims = tuple(shape) if isinstance(post, ByElement) else (shape[-1],)
            found.append(Tensor(dims, numbers.standard_normal(dims).astype(np.float32), wall))
    return found


def with_posts(
    posts: Sequence[Post], others: Sequence[Tensor], found: Wide, allowed: Wide
) -> tuple[Wide, Wide]:  # fmt: skip
    """The result behind the posts, and by how much one in float32 may differ.

    Each operation rounds what it gives, and passes on what its operand is off by, times its slope at most. Functions
    are made of some operations on numbers that are about as large as result and 1.
    """
    operands = iter(others)
    for post in posts:
        if isinstance(post, Function):
            known = FUNCTIONS[post]
            found = known.exact(found)
            allowed = known.slope * allowed + 8 * ROUNDING * (np.abs(found) + 2)
            continue
        other = next(operands).array.astype(np.float64)
        allowed = allowed * np.abs(other) if post.operation == "mul" else allowed
        found = COMBINED[post.operation](found, other)
        # and one of what was off before
        allowed = allowed * (1 + ROUNDING) + ROUNDING * np.abs(found)
    return found, allowed


# ── code that is wrong ───────────────────────────────────────────────────────────────────────────────────────────

# EVEX or VEX, what prefix and map they have, opcode: another opcode there
CORRUPTIONS = {
    "a product taken off": (0xB8, 0xBC), "a difference for a sum": (0x58, 0x5C), "a sum for a difference": (0x5C, 0x58),
    "a sum for a product": (0x59, 0x58),
}  # fmt: skip


def operations(code: bytes, opcode: int) -> list[int]:
    """Where the opcodes of operations on vectors are, none of which has a mask, that have this one."""
    if isa() == AVX2:
        # as long as a register, of VEX's three bytes
        return [
            i + 3 for i in range(len(code) - 4)
            if code[i] == 0xC4 and code[i + 1] & 0x1C == 0 and code[i + 2] & 0x84 == 4 and code[i + 3] == opcode
        ]  # fmt: skip
    return [
        i + 4 for i in range(len(code) - 5)
        if code[i] == 0x62 and code[i + 3] & 0x60 == 0x40 and code[i + 4] == opcode and code[i + 2] & 4
    ]  # fmt: skip


def corrupted(before: int, after: int, which: int, changed: list[int]) -> Callable[[bytes], Code]:
    """What makes `Code` with one operation another one: number `which` of those with that opcode."""

    def made(code: bytes) -> Code:
        wrong = bytearray(code)
        places = operations(code, before)
        changed.append(places[which])
        wrong[places[which]] = after
        return Code(bytes(wrong))

    return made
