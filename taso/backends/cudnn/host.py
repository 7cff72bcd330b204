"""A device in ordinary memory: plans, memory and launches of this backend where there is no GPU, for tests.

cuDNN graphs are interpreted; kernels of ours run where somebody compiles them for the host, else nothing is sourced.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from taso.backends.base import Array
from taso.backends.cudnn.description import Description
from taso.backends.cudnn.device import Flag, Launchable, Planned
from taso.backends.cudnn.interpreted import Interpreted
from taso.backends.pages import zeroed
from taso.backends.places import OPERAND, ArraySpec, Block, Place
from taso.backends.recipe import Call
from taso.graph.errors import BackendError


class HostDevice:
    """Ordinary memory. `compiler` makes a kernel of ours from its source and the name of its entry, where there is one.
    """

    label = "host"
    number = 0
    cache_bytes = 1 << 20

    def __init__(self, compiler: Callable[[str, str], Launchable] | None = None) -> None:
        self._compiler = compiler
        self.compiles = compiler is not None

    def key(self) -> str:
        return "host memory, cuDNN interpreted"

    def reserve(self, size: int) -> Block:
        with self.working(f"reserving {size} bytes"):
            return Block.of(zeroed(size))

    def lay_out(self, array: Array) -> Block:
        plain = np.ascontiguousarray(array)
        block = zeroed(plain.nbytes)
        np.copyto(block, plain.reshape(-1).view(np.uint8))
        return Block.of(block)

    def flag(self, what: str) -> Block:
        cell = np.zeros(1, np.uint32)
        return Block(cell.ctypes.data, Flag(cell, cell, what))

    def view(self, spec: ArraySpec, address: int) -> Array:
        return spec.at(address)

    def copy(self, target: int, source: int, count: int) -> None:
        np.copyto(_bytes_at(target, count), _bytes_at(source, count))

    def multiply(self, first: Array, second: Array, target: Array) -> None:
        np.matmul(first, second, out=target)

    def fetched(self, view: Array, dtype: np.dtype[np.generic]) -> Array:
        return np.array(view)

    def fill(self, view: Array, array: Array) -> None:
        np.copyto(view, array)

    def given(self, array: object) -> Array | None:
        return None

    def own(self, view: Array, dtype: np.dtype[np.generic]) -> Array:
        return np.array(view)

    def plan(self, description: Description) -> Planned:
        return Interpreted(description)

    def function(self, code: str, entry: str) -> Launchable:
        if self._compiler is None:
            raise BackendError("nothing compiles kernels for this device")
        return self._compiler(code, entry)

    def replayed(self, calls: Sequence[Call]) -> Call:
        def replay() -> None:
            for call in calls:
                call()

        return replay

    def seconds(self, call: Call) -> float:
        started = time.perf_counter()
        call()
        return time.perf_counter() - started

    @contextmanager
    def turn(self, last: object) -> Iterator[Callable[[], object]]:
        yield lambda: None

    def wait(self, last: object) -> None:
        """All is done already."""

    def finish(self) -> None:
        """All is done already."""

    def release(self) -> None:
        """Nothing is held."""

    @contextmanager
    def working(self, what: str) -> Iterator[None]:
        try:
            yield
        except MemoryError as error:
            raise BackendError(f"the memory is full ({what})") from error


def _bytes_at(address: int, count: int) -> Array:
    return ArraySpec(Place(OPERAND), np.dtype(np.uint8), (count,), (1,)).at(address)
