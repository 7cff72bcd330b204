"""What a backend is."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from taso.backends.lowering import Kernel, Lowering
from taso.graph.errors import BackendError
from taso.graph.graph import Graph

Array = NDArray[np.generic]


def checked_threads(threads: object) -> int:
    """`threads` as a number of threads that a program may have; raises `BackendError` for anything else."""
    # OpenMP ends the process where it cannot start a thread
    most = max(256, 4 * (os.cpu_count() or 1))
    if isinstance(threads, bool) or not isinstance(threads, int) or not 1 <= threads <= most:
        raise BackendError(f"the number of threads must be a whole number from 1 to {most}, not {threads!r}")
    return threads


class Executable(Protocol):
    """A compiled graph. Called with named arrays it returns named arrays of its own, which later calls leave alone.

    Raises `InputError` where names, element types or shapes do not fit the graph's inputs.
    """

    def __call__(self, feeds: Mapping[str, Array]) -> dict[str, Array]: ...

    @property
    def kernels(self) -> int:
        """Kernels that one run launches (changes of layout included)."""
        ...

    @property
    def peak_bytes(self) -> int:
        """Bytes of the arena that holds all intermediate values."""
        ...


class Backend(Protocol):
    """How graphs run on one device, and how long their kernels take there."""

    @property
    def name(self) -> str: ...

    @property
    def measures(self) -> bool:
        """Whether costs are measured; False where a formula stands in."""
        ...

    @property
    def plans(self) -> bool:
        """Whether programs follow what was chosen for a graph (`taso.backends.lowering.Choices`)."""
        ...

    @property
    def lowering(self) -> Lowering: ...

    def device_key(self) -> str:
        """Everything about device, library and settings that decides how long a kernel takes."""
        ...

    def measure(self, kernel: Kernel) -> float:
        """Seconds that one run of `kernel` takes, measured with fresh, written buffers."""
        ...

    def compile(self, graph: Graph, threads: int | None = None) -> Executable:
        """A program for `graph`; raises `BackendError` where it cannot be built."""
        ...


@runtime_checkable
class Surrounded(Protocol):
    """What a backend has beside whose costs depend on the model that a kernel is in."""

    def in_model(self, reads: int) -> Backend:
        """The same backend, with the costs of kernels in a model whose weights have so many bytes."""
        ...

    def cost_key(self, kernel: Kernel) -> str:
        """What the cost of a kernel is kept by: its own key, and what else decides about it in such a model."""
        ...


def in_model(backend: Backend, reads: int) -> Backend:
    """`backend` with the costs of kernels in a model whose weights have `reads` bytes, where these depend on that."""
    return backend.in_model(reads) if isinstance(backend, Surrounded) else backend


def cost_key(backend: Backend, kernel: Kernel) -> str:
    """What the cost of a kernel on `backend` is kept by."""
    return backend.cost_key(kernel) if isinstance(backend, Surrounded) else kernel.key
