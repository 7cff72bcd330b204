"""A stand-in for CuPy over ordinary memory, as strict as the real one where that matters here.

Arrays are no NumPy arrays and do not turn into such by themselves; while a stream captures, work is noted and not done,
and what has to wait (copies to the host, reservations) fails; memory ends at `limit` bytes.
"""

from __future__ import annotations

import ctypes
import time
import weakref
from collections.abc import Callable, Sequence
from types import SimpleNamespace

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.generic]


class CUDARuntimeError(RuntimeError):
    pass


class OutOfMemoryError(MemoryError):
    pass


class CompileException(Exception):
    pass


CUDARuntimeError.__module__ = "cupy_backends.cuda.api.runtime"
OutOfMemoryError.__module__ = "cupy.cuda.memory"
CompileException.__module__ = "cupy.cuda.compiler"


class DeviceArray:
    """An array on the device; `held` is what a host must not see."""

    def __init__(
        self, shape: Sequence[int], dtype: object = np.float32, memptr: MemoryPointer | None = None,
        strides: Sequence[int] | None = None, held: Array | None = None,
    ) -> None:  # fmt: skip
        if held is None:
            assert memptr is not None and strides is not None
            memory = (ctypes.c_ubyte * memptr.memory.size).from_address(memptr.ptr)
            held = np.ndarray(tuple(shape), np.dtype(dtype), memory, 0, tuple(strides))  # type: ignore[call-overload]  # any dtype
        self.held = held

    @property
    def shape(self) -> tuple[int, ...]:
        return self.held.shape

    @property
    def dtype(self) -> np.dtype[np.generic]:
        return self.held.dtype

    @property
    def size(self) -> int:
        return self.held.size

    @property
    def nbytes(self) -> int:
        return self.held.nbytes

    @property
    def data(self) -> SimpleNamespace:
        return SimpleNamespace(ptr=self.held.ctypes.data)

    def view(self, dtype: object) -> DeviceArray:
        return DeviceArray((), held=self.held.view(dtype))  # type: ignore[call-overload]  # any dtype

    def copy(self) -> DeviceArray:
        return DeviceArray((), held=self.held.copy())

    def __array__(self, *args: object, **kwargs: object) -> Array:
        raise TypeError("Implicit conversion to a NumPy array is not allowed.")


class UnownedMemory:
    def __init__(self, ptr: int, size: int, owner: object) -> None:
        self.ptr, self.size, self.owner = ptr, size, owner


class MemoryPointer:
    def __init__(self, memory: UnownedMemory, offset: int) -> None:
        self.memory, self.ptr = memory, memory.ptr + offset


class Event:
    def __init__(self, fake: FakeCupy) -> None:
        self.fake, self.at = fake, 0.0

    def record(self, stream: Stream | None = None) -> None:
        self.at = time.perf_counter()
        self.fake.said.append("record")

    def synchronize(self) -> None:
        self.fake.said.append("wait for an event")


class Graph:
    def __init__(self, fake: FakeCupy, work: list[Callable[[], object]]) -> None:
        self.fake, self.work = fake, work

    def launch(self, stream: Stream | None = None) -> None:
        self.fake.said.append(f"launch on {stream.ptr if stream else 0}")
        if self.fake.failing:
            raise CUDARuntimeError(self.fake.failing)
        for act in self.work:
            act()


class Stream:
    def __init__(self, fake: FakeCupy, ptr: int) -> None:
        self.fake, self.ptr, self.work = fake, ptr, None

    work: list[Callable[[], object]] | None

    def begin_capture(self) -> None:
        self.work = []

    def end_capture(self) -> Graph:
        assert self.work is not None
        graph, self.work = Graph(self.fake, self.work), None
        return graph

    def synchronize(self) -> None:
        self.fake.not_captured("synchronize")

    def wait_event(self, event: Event) -> None:
        self.fake.said.append(f"{self.ptr} waits")

    def __enter__(self) -> Stream:
        self.fake.streams.append(self)
        return self

    def __exit__(self, *args: object) -> None:
        self.fake.streams.pop()


class FakeCupy:
    """The module. `failing` is the message of an error that the next launch ends in; `said` has what was asked for."""

    __version__ = "14.2.0"
    ndarray = DeviceArray

    def __init__(
        self, limit: int = 1 << 40, devices: int = 1, driver: int = 12080, built: int = 12090,
        compiler: Callable[[str, str], Callable[..., object]] | None = None,
    ) -> None:  # fmt: skip
        self.limit, self.failing = limit, ""
        self.used = 0
        self.said: list[str] = []
        self.streams = [Stream(self, 0)]
        self._compiler = compiler
        self._devices = devices
        self._made = 0
        runtime = SimpleNamespace(
            memcpyDeviceToDevice=3, getDeviceCount=self._count, driverGetVersion=lambda: driver,
            runtimeGetVersion=lambda: built, getDevice=lambda: 0, memcpyAsync=self._copy,
            getDeviceProperties=lambda number: {"name": b"Some GPU", "major": 9, "minor": 0, "l2CacheSize": 1 << 20},
        )  # fmt: skip
        self.cuda = SimpleNamespace(
            runtime=runtime, Stream=self._stream, Event=lambda **settings: Event(self), UnownedMemory=UnownedMemory,
            MemoryPointer=MemoryPointer, get_current_stream=lambda: self.streams[-1],
            alloc_pinned_memory=self._pinned, get_elapsed_time=lambda start, stop: (stop.at - start.at) * 1e3,
        )  # fmt: skip

    # ── the device ───────────────────────────────────────────────────────────────────────────────────────────────

    def _count(self) -> int:
        if self._devices < 0:
            raise CUDARuntimeError("cudaErrorNoDevice: no CUDA-capable device is detected")
        return self._devices

    def _stream(self, **settings: object) -> Stream:
        self._made += 1
        return Stream(self, self._made)

    def enqueue(self, act: Callable[[], object]) -> None:
        """Does some work, or notes it where the current stream captures."""
        work = self.streams[-1].work
        if work is None:
            act()
        else:
            work.append(act)

    def not_captured(self, what: str) -> None:
        if self.streams[-1].work is not None:
            raise CUDARuntimeError(f"cudaErrorStreamCaptureUnsupported: {what} while a stream is captured")

    def _copy(self, target: int, source: int, count: int, kind: int, stream: int) -> None:
        assert stream == self.streams[-1].ptr
        self.enqueue(lambda: ctypes.memmove(target, source, count))

    # ── arrays ───────────────────────────────────────────────────────────────────────────────────────────────────

    def zeros(self, shape: int | tuple[int, ...], dtype: object) -> DeviceArray:
        self.not_captured("a reservation")
        held = np.zeros(shape, np.dtype(dtype))  # type: ignore[call-overload]  # any dtype
        if self.used + held.nbytes > self.limit:
            raise OutOfMemoryError(f"Out of memory allocating {held.nbytes} bytes (allocated so far: {self.used})")
        self.used += held.nbytes
        weakref.finalize(held, self._freed, held.nbytes)
        return DeviceArray((), held=held)

    def _freed(self, size: int) -> None:
        self.used -= size

    def _pinned(self, size: int) -> SimpleNamespace:
        self.not_captured("a reservation")
        held = np.full(size, 0xFB, np.uint8)
        return SimpleNamespace(ptr=held.ctypes.data, held=held)

    def asarray(self, array: object) -> DeviceArray:
        if isinstance(array, DeviceArray):
            return array
        self.not_captured("a copy from the host")
        interface = getattr(array, "__cuda_array_interface__", None)
        if interface is not None:
            return array.on_device  # type: ignore[attr-defined,no-any-return]  # the tests' own class
        return DeviceArray((), held=np.array(array))

    def from_dlpack(self, array: object) -> DeviceArray:
        return array.on_device  # type: ignore[attr-defined,no-any-return]  # the tests' own class

    def asnumpy(self, array: DeviceArray) -> Array:
        self.not_captured("a copy to the host")
        return array.held.copy()

    def copyto(self, target: DeviceArray, source: DeviceArray) -> None:
        assert isinstance(target, DeviceArray) and isinstance(source, DeviceArray)
        self.enqueue(lambda: np.copyto(target.held, source.held))

    def matmul(self, first: DeviceArray, second: DeviceArray, out: DeviceArray) -> None:
        self.enqueue(lambda: np.matmul(first.held, second.held, out=out.held))

    def get_default_memory_pool(self) -> SimpleNamespace:
        return SimpleNamespace(free_all_blocks=lambda: self.said.append("free"))

    # ── kernels ──────────────────────────────────────────────────────────────────────────────────────────────────

    def RawModule(self, code: str, options: tuple[str, ...], backend: str) -> SimpleNamespace:
        assert backend == "nvrtc"
        compiler = self._compiler
        if compiler is None:
            raise CompileException("nvrtc: error: failed to compile")

        def get_function(entry: str) -> Callable[..., None]:
            function = compiler(code, entry)

            def launch(grid: object, block: object, arguments: object, shared_mem: int) -> None:
                self.enqueue(lambda: function(grid, block, shared_mem, arguments))

            return launch

        return SimpleNamespace(get_function=get_function)
