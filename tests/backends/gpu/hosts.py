"""Devices for tests: ordinary memory, on which kernels of ours run by the host's compiler where there is one."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from hosted import Library, compiler

from taso.backends.cudnn.backend import CudnnBackend
from taso.backends.cudnn.device import Extent, Launchable
from taso.backends.cudnn.host import HostDevice
from taso.backends.cudnn.sources.launches import Source, SourceLaunch
from taso.backends.lowering import FLOAT32
from taso.graph.errors import BackendUnavailable


class HostKernels:
    """Compiles kernels for the host: all that were asked for, when the first of them runs."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="taso_kernels_")
        self._waiting: dict[str, Source] = {}
        self._compiled: dict[str, Library] = {}

    def __call__(self, code: str, entry: str) -> Launchable:
        source = Source(entry, code, entry)
        if entry not in self._compiled:
            self._waiting[entry] = source

        def launch(grid: Extent, block: Extent, shared: int, arguments: Sequence[object]) -> None:
            addresses = [int(a) for a in arguments]  # type: ignore[call-overload]  # addresses as NumPy has them
            self._library(entry).run(SourceLaunch(source, grid, block, shared, ()), addresses, False)

        return launch

    def _library(self, entry: str) -> Library:
        if entry not in self._compiled:
            sources = list(self._waiting.values())
            library = Library(sources, Path(self._folder.name))
            self._compiled.update((s.entry, library) for s in sources)
            self._waiting.clear()
        return self._compiled[entry]


@cache
def kernels() -> HostKernels:
    """Those of this process."""
    return HostKernels()


@cache
def gpu_missing() -> str:
    """Why there is no GPU here, "" where there is one."""
    try:
        CudnnBackend()
    except BackendUnavailable as reason:
        return str(reason)
    return ""


def gpu_or_host() -> CudnnBackend:
    """The backend on the GPU where there is one, else in ordinary memory."""
    return host_backend() if gpu_missing() else CudnnBackend()


def host_device(compiles: bool = True) -> HostDevice:
    """A device in ordinary memory; kernels of ours run on it where there is a compiler, and where that is wanted."""
    return HostDevice(kernels() if compiles and compiler() else None)


def host_backend(precision: str = FLOAT32, compiles: bool = True) -> CudnnBackend:
    """The cuDNN backend on such a device."""
    return CudnnBackend(precision, host_device(compiles))
