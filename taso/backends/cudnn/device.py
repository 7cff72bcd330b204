"""What programs run on, as the rest of this backend sees it: memory, copies, kernels, replay, time.

`CudaDevice` is an NVIDIA GPU through CuPy, which is imported here alone. `HostDevice` (`taso.backends.cudnn.host`) does
the same in ordinary memory, so that plans can be tried where there is no GPU.
"""

from __future__ import annotations

import functools
import importlib
import logging
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from importlib import metadata
from typing import Protocol, cast

import numpy as np
from numpy.typing import NDArray

from taso.backends.base import Array
from taso.backends.cudnn.description import Description
from taso.backends.cudnn.frontend import DeviceMemoryFull
from taso.backends.places import OPERAND, ArraySpec, Block, Place
from taso.backends.recipe import Call
from taso.graph.errors import BackendError, BackendUnavailable

log = logging.getLogger(__name__)

INSTALL = "pip install 'taso[cuda]' (for drivers of CUDA 13: 'taso[cuda13]')"
Extent = tuple[int, int, int]


class Planned(Protocol):
    """A cuDNN graph made ready on a device."""

    @property
    def workspace(self) -> int:
        """Bytes that it works in beside its tensors."""
        ...

    def bind(self, addresses: Mapping[int, int], workspace: int) -> Call:
        """What runs it on tensors at these addresses, by the numbers that the description gives them."""
        ...


class Tunable(Planned, Protocol):
    """One of which cuDNN has several plans."""

    def tune(self, device: Clock) -> None:
        """Takes the fastest of them."""
        ...


class Clock(Protocol):
    """What plans are timed on."""

    def reserve(self, size: int) -> Block: ...
    def seconds(self, call: Call) -> float: ...


class Flag:
    """A number in the host's memory that kernels make 1; `owner` keeps the memory alive."""

    def __init__(self, cell: NDArray[np.uint32], owner: object, what: str) -> None:
        self._cell = cell
        self._owner = owner
        self._what = what

    def check(self) -> None:
        """Raises `BackendError` where it has been raised, and takes it down."""
        if self._cell[0]:
            self._cell[0] = 0
            raise BackendError(self._what)


class Launchable(Protocol):
    """A kernel of ours, compiled."""

    def __call__(self, grid: Extent, block: Extent, shared: int, arguments: Sequence[object]) -> object: ...


class Device(Protocol):
    """Where programs run. What is asked of it is done in order, on the caller's stream where there are streams."""

    @property
    def compiles(self) -> bool:
        """Whether it compiles kernels of ours (`function`)."""
        ...

    @property
    def label(self) -> str:
        """What tells its memory from another's."""
        ...

    @property
    def number(self) -> int:
        """The number that CUDA gives it."""
        ...

    @property
    def cache_bytes(self) -> int:
        """Of its last level, beyond which nothing is at hand any more."""
        ...

    def key(self) -> str:
        """Everything about it that decides how long a kernel takes."""
        ...

    def reserve(self, size: int) -> Block:
        """So many bytes, all 0. Raises `BackendError` where there is no room."""
        ...

    def lay_out(self, array: Array) -> Block:
        """The bytes of a plain array in its memory."""
        ...

    def flag(self, what: str) -> Block:
        """Four bytes that kernels may write and the host reads (`Flag`, the owner); `what` is said once they are not 0.
        """
        ...

    def view(self, spec: ArraySpec, address: int) -> Array:
        """An array of its own kind over memory that is there."""
        ...

    def copy(self, target: int, source: int, count: int) -> None:
        """Copies bytes within its memory."""
        ...

    def multiply(self, first: Array, second: Array, target: Array) -> None:
        """The matrix product of two views of floats into a third."""
        ...

    def fetched(self, view: Array, dtype: np.dtype[np.generic]) -> Array:
        """A NumPy array of the values of a view, once all that was asked for is done."""
        ...

    def fill(self, view: Array, array: Array) -> None:
        """Writes an array, NumPy's or its own, into a view."""
        ...

    def given(self, array: object) -> Array | None:
        """An array of its own kind over what a caller gives; None for what is in no memory of its."""
        ...

    def own(self, view: Array, dtype: np.dtype[np.generic]) -> Array:
        """A copy of a view, of its own kind, that a caller may keep."""
        ...

    def plan(self, description: Description) -> Planned:
        """A cuDNN graph made ready. Raises `BackendError` where cuDNN has no plan for it."""
        ...

    def function(self, code: str, entry: str) -> Launchable:
        """A kernel of ours from its source."""
        ...

    def replayed(self, calls: Sequence[Call]) -> Call:
        """One call that does what these do, in as few launches as possible."""
        ...

    def seconds(self, call: Call) -> float:
        """How long a call takes by the device's own clock."""
        ...

    def turn(self, last: object) -> AbstractContextManager[Callable[[], object]]:
        """A caller's turn, which waits for the `last`; what is yielded says, in the end, what the next waits for."""
        ...

    def wait(self, last: object) -> None:
        """Waits until a turn is over."""
        ...

    def finish(self) -> None:
        """Waits until everything that was asked for is done."""
        ...

    def release(self) -> None:
        """Gives memory back that is reserved and not used."""
        ...

    def working(self, what: str) -> AbstractContextManager[None]:
        """Makes one sentence (`BackendError`) of whatever fails inside, in which `what` was being done."""
        ...


# ── CuPy, as far as it is used ───────────────────────────────────────────────────────────────────────────────────


class _Stream(Protocol):
    ptr: int

    def begin_capture(self) -> None: ...
    def end_capture(self) -> _Graph: ...
    def synchronize(self) -> None: ...
    def wait_event(self, event: _Event) -> None: ...
    def record(self, event: _Event) -> _Event: ...
    def __enter__(self) -> _Stream: ...
    def __exit__(self, *args: object) -> None: ...


class _Graph(Protocol):
    def launch(self, stream: _Stream | None = None) -> None: ...


class _Event(Protocol):
    def record(self, stream: _Stream | None = None) -> None: ...
    def synchronize(self) -> None: ...


class _Runtime(Protocol):
    memcpyDeviceToDevice: int

    def getDeviceCount(self) -> int: ...
    def driverGetVersion(self) -> int: ...
    def runtimeGetVersion(self) -> int: ...
    def getDevice(self) -> int: ...
    def getDeviceProperties(self, device: int) -> Mapping[str, object]: ...
    def memcpyAsync(self, target: int, source: int, count: int, kind: int, stream: int) -> None: ...


class _Pool(Protocol):
    def free_all_blocks(self) -> None: ...


class _Cuda(Protocol):
    runtime: _Runtime
    Stream: Callable[..., _Stream]
    Event: Callable[..., _Event]
    UnownedMemory: Callable[[int, int, object], object]
    MemoryPointer: Callable[[object, int], object]

    def get_current_stream(self) -> _Stream: ...
    def alloc_pinned_memory(self, size: int) -> _OnDevice: ...
    def get_elapsed_time(self, start: _Event, stop: _Event) -> float: ...


class _Module(Protocol):
    def get_function(self, name: str) -> Callable[..., object]: ...


class _OnDevice(Protocol):
    ptr: int


class _DeviceArray(Protocol):
    data: _OnDevice
    nbytes: int


class Cupy(Protocol):
    """The package cupy."""

    __version__: str
    cuda: _Cuda
    ndarray: type
    RawModule: Callable[..., _Module]

    def zeros(self, shape: int | tuple[int, ...], dtype: object) -> _DeviceArray: ...
    def asarray(self, array: object) -> Array: ...
    def from_dlpack(self, array: object) -> Array: ...
    def asnumpy(self, array: object) -> Array: ...
    def copyto(self, target: object, source: object) -> None: ...
    def matmul(self, first: object, second: object, out: object) -> object: ...
    def get_default_memory_pool(self) -> _Pool: ...


@functools.lru_cache(maxsize=1)
def cupy() -> Cupy:
    """The package cupy, where it and a GPU answer; raises `BackendUnavailable` with what is missing, and how to get it.

    Looked for once; where it failed, a later call looks again.
    """
    return checked_cupy(_imported(), versions())


def _imported() -> Cupy:
    try:
        return cast(Cupy, importlib.import_module("cupy"))
    except ImportError as error:
        if isinstance(error, ModuleNotFoundError) and error.name == "cupy":
            raise BackendUnavailable(f"cuDNN needs CuPy, which is not installed: {INSTALL}") from error
        raise BackendUnavailable(f"CuPy is installed and cannot be imported ({_line(error)}): {INSTALL}") from error


def checked_cupy(found: Cupy, installed: Mapping[str, str]) -> Cupy:
    """CuPy if a GPU answers it and all packages are for one CUDA; `installed` are those there are, by name."""
    runtime = found.cuda.runtime
    built = runtime.runtimeGetVersion() // 1000
    try:
        driver = runtime.driverGetVersion()
    except RuntimeError as error:
        raise BackendUnavailable(f"the NVIDIA driver does not answer ({_line(error)})") from error
    if driver == 0:
        raise BackendUnavailable("there is no NVIDIA driver on this machine, which cuDNN needs")
    if driver // 1000 < built:
        shown = f"{driver // 1000}.{driver % 1000 // 10}"
        raise BackendUnavailable(
            f"CuPy is built for CUDA {built} and the driver is for CUDA {shown}: update the driver, or {INSTALL}"
        )
    try:
        count = runtime.getDeviceCount()
    except RuntimeError as error:
        raise BackendUnavailable(f"no NVIDIA GPU answers ({_line(error)})") from error
    if count == 0:
        raise BackendUnavailable("there is no NVIDIA GPU on this machine, which cuDNN needs")
    others = sorted(n for n in installed if n.startswith("nvidia-cudnn-cu") and n != f"nvidia-cudnn-cu{built}")
    if others and f"nvidia-cudnn-cu{built}" not in installed:
        raise BackendUnavailable(
            f"CuPy is built for CUDA {built} and {others[0]} is for another: pip install nvidia-cudnn-cu{built}"
        )
    return found


PACKAGES = (
    "cupy", "cupy-cuda12x", "cupy-cuda13x", "nvidia-cudnn-frontend", "nvidia-cudnn-cu12", "nvidia-cudnn-cu13",
)  # fmt: skip


def versions() -> dict[str, str]:
    """The versions of those packages of the GPU's that are installed."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__

_DLPACK_DEVICES = (2, 13)
"""DLPack's numbers of CUDA memory, and of managed memory."""


# ── a GPU ────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass
class _Own:
    """A block of device memory that CuPy's pool holds as long as this is."""

    array: _DeviceArray
    nbytes: int


class CudaDevice:
    """The current NVIDIA GPU, through CuPy.

    `planner` makes cuDNN graphs ready, `about` is said of cuDNN in the key. Raises `BackendUnavailable` through
    `cupy()` where there is none.
    """

    compiles = True

    def __init__(
        self, module: Cupy, planner: Callable[[Description, Callable[[], int]], Tunable], about: str = ""
    ) -> None:
        self._cupy = module
        self._cuda = module.cuda
        self._planner = planner
        self._about = about
        self.number = self._cuda.runtime.getDevice()
        self._properties = self._cuda.runtime.getDeviceProperties(self.number)
        self._plans: dict[Hashable, Planned] = {}
        self._functions: dict[tuple[str, str], Launchable] = {}
        self._private = self._cuda.Stream(non_blocking=True)
        self.label = f"cuda {self.number}"
        size = self._properties.get("l2CacheSize", 0)
        self.cache_bytes = size if isinstance(size, int) and size > 0 else 32 << 20

    def key(self) -> str:
        name = self._properties.get("name", b"")
        shown = name.decode(errors="replace") if isinstance(name, bytes) else str(name)
        driver = self._cuda.runtime.driverGetVersion()
        parts = (shown, f"compute {self.compute}", f"driver CUDA {driver // 1000}.{driver % 1000 // 10}",
                 f"CuPy {self._cupy.__version__}", *([self._about] if self._about else []))  # fmt: skip
        return "; ".join(parts)

    @property
    def compute(self) -> str:
        """The GPU's compute capability."""
        return f"{self._properties.get('major', 0)}.{self._properties.get('minor', 0)}"

    # ── memory ───────────────────────────────────────────────────────────────────────────────────────────────────

    def reserve(self, size: int) -> Block:
        with self.working(f"reserving {size} bytes"):
            array = self._cupy.zeros(max(size, 1), np.uint8)
            return Block(array.data.ptr, _Own(array, size))

    def lay_out(self, array: Array) -> Block:
        plain = np.ascontiguousarray(array)
        block = self.reserve(plain.nbytes)
        if plain.nbytes:
            with self.working(f"copying {plain.nbytes} bytes to the GPU"):
                spec = ArraySpec(Place(OPERAND), plain.dtype, plain.shape, plain.strides)
                self.fill(self.view(spec, block.address), plain)
                # a program may run on another stream
                self.finish()
        return block

    def flag(self, what: str) -> Block:
        with self.working("reserving memory of the host"):
            # memory of the host that kernels can write: nobody has to wait for the GPU to read it
            held = self._cuda.alloc_pinned_memory(4)
        cell = ArraySpec(Place(OPERAND), np.dtype(np.uint32), (1,), (4,)).at(held.ptr)
        cell[:] = 0
        return Block(held.ptr, Flag(cast("NDArray[np.uint32]", cell), held, what))

    def view(self, spec: ArraySpec, address: int) -> Array:
        dtype = _carried(spec.dtype)
        if 0 in spec.shape:
            return cast(Array, self._cupy.zeros(spec.shape, dtype))
        span = sum((n - 1) * s for n, s in zip(spec.shape, spec.strides, strict=True)) + dtype.itemsize
        memory = self._cuda.MemoryPointer(self._cuda.UnownedMemory(address, span, self), 0)
        return cast(Array, self._cupy.ndarray(spec.shape, dtype, memory, spec.strides))

    def copy(self, target: int, source: int, count: int) -> None:
        runtime = self._cuda.runtime
        runtime.memcpyAsync(target, source, count, runtime.memcpyDeviceToDevice, self._stream())

    def multiply(self, first: Array, second: Array, target: Array) -> None:
        self._cupy.matmul(first, second, out=target)

    def fetched(self, view: Array, dtype: np.dtype[np.generic]) -> Array:
        return self._cupy.asnumpy(view).view(dtype)

    def fill(self, view: Array, array: Array) -> None:
        if not view.size:
            return
        if isinstance(array, self._cupy.ndarray):
            self._cupy.copyto(view, array.view(view.dtype))
        else:
            carried = np.ascontiguousarray(array).view(_carried(array.dtype)).reshape(view.shape)
            self._cupy.copyto(view, self._cupy.asarray(carried))

    def given(self, array: object) -> Array | None:
        if isinstance(array, np.ndarray):
            return None
        if isinstance(array, self._cupy.ndarray) or hasattr(array, "__cuda_array_interface__"):
            return self._cupy.asarray(array)
        where = getattr(array, "__dlpack_device__", None)
        if where is None or where()[0] not in _DLPACK_DEVICES:
            return None
        return self._cupy.from_dlpack(array)

    def own(self, view: Array, dtype: np.dtype[np.generic]) -> Array:
        copied: Array = view.copy()
        # of the narrow types CuPy has bfloat16 alone; others stay what they are carried as
        return copied.view(dtype) if dtype.kind != "V" or dtype.name == "bfloat16" else copied

    def release(self) -> None:
        self._cupy.get_default_memory_pool().free_all_blocks()

    # ── kernels ──────────────────────────────────────────────────────────────────────────────────────────────────

    def plan(self, description: Description) -> Planned:
        if description.key not in self._plans:
            found = self._planner(description, self._stream)
            found.tune(_Apart(self))
            self._plans[description.key] = found
        return self._plans[description.key]

    def function(self, code: str, entry: str) -> Launchable:
        if (code, entry) not in self._functions:
            with self.working(f"compiling the kernel {entry}"):
                module = self._cupy.RawModule(code=code, options=("-std=c++17",), backend="nvrtc")
                kernel = module.get_function(entry)

            def launch(grid: Extent, block: Extent, shared: int, arguments: Sequence[object]) -> None:
                kernel(grid, block, tuple(arguments), shared_mem=shared)

            self._functions[code, entry] = launch
        return self._functions[code, entry]

    # ── order and time ───────────────────────────────────────────────────────────────────────────────────────────

    def _stream(self) -> int:
        return self._cuda.get_current_stream().ptr

    def replayed(self, calls: Sequence[Call]) -> Call:
        # what was asked for on the caller's stream (zeros, weights) is no other stream's to wait for
        self.finish()
        with self._private:
            # once as they are: what is loaded or compiled at a first launch must not be captured
            for call in calls:
                call()
            self._private.synchronize()
            self._private.begin_capture()
            try:
                for call in calls:
                    call()
            finally:
                # ended in any case, or the stream could not be used again
                graph = self._private.end_capture()

        def launch() -> None:
            graph.launch(self._cuda.get_current_stream())

        return launch

    def seconds(self, call: Call) -> float:
        start, stop = self._cuda.Event(), self._cuda.Event()
        stream = self._cuda.get_current_stream()
        start.record(stream)
        call()
        stop.record(stream)
        stop.synchronize()
        return self._cuda.get_elapsed_time(start, stop) / 1e3

    @contextmanager
    def turn(self, last: object) -> Iterator[Callable[[], object]]:
        stream = self._cuda.get_current_stream()
        if last is not None:
            stream.wait_event(cast(_Event, last))

        def done() -> object:
            event = self._cuda.Event(disable_timing=True)
            event.record(stream)
            return event

        yield done

    def finish(self) -> None:
        self._cuda.get_current_stream().synchronize()

    @contextmanager
    def working(self, what: str) -> Iterator[None]:
        try:
            yield
        except BackendError:
            raise
        except MemoryError as error:
            self.release()
            raise DeviceMemoryFull(f"the GPU's memory is full ({what}): {_line(error)}") from error
        except Exception as error:
            if not _of_the_gpu(error):
                raise
            raise BackendError(f"the GPU failed ({what}): {_line(error)}{_and_now(error)}") from error


    def wait(self, last: object) -> None:
        if last is not None:
            cast(_Event, last).synchronize()


@dataclass
class _Apart:
    """A clock that sees the device alone: several calls in one replay, without what it takes the host to launch them.
    """

    device: CudaDevice
    repetitions: int = 8

    def reserve(self, size: int) -> Block:
        return self.device.reserve(size)

    def seconds(self, call: Call) -> float:
        with self.device.working("timing a plan"):
            return self.device.seconds(self.device.replayed([call] * self.repetitions)) / self.repetitions


def _carried(dtype: np.dtype[np.generic]) -> np.dtype[np.generic]:
    """The element type under which values are moved: whole numbers of as many bytes where CuPy has none such."""
    return np.dtype(f"u{dtype.itemsize}") if dtype.kind == "V" else dtype


def _of_the_gpu(error: Exception) -> bool:
    return type(error).__module__.partition(".")[0] in ("cupy", "cupy_backends", "cudnn") or type(error) is RuntimeError


_FATAL = (
    "IllegalAddress", "LaunchFailure", "LaunchFailed", "HardwareStackError", "IllegalInstruction", "MisalignedAddress",
    "Assert", "illegal", "unspecified launch failure", "misaligned",
)  # fmt: skip


def _and_now(error: Exception) -> str:
    """What a user has to do beside, after errors that a process cannot go on from."""
    if any(word in str(error) for word in _FATAL):
        return "; the GPU answers this process no more: start it anew"
    return ""
