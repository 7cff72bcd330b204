"""The GPU through CuPy, as far as a stand-in for CuPy shows it: order, capture, arrays of others, failures."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest
from fake_cupy import CUDARuntimeError, DeviceArray, FakeCupy
from hosted import compiler
from hosts import kernels
from test_cudnn_executor import blocks
from test_onednn_executor import TOLERANCE, Build, feeds_for, worst

import taso.graph.ops  # noqa: F401  # registers the operators
from taso.backends import select
from taso.backends.cudnn import device as devices
from taso.backends.cudnn.backend import CudnnBackend
from taso.backends.cudnn.description import Description
from taso.backends.cudnn.device import Clock, CudaDevice, Cupy, Tunable, checked_cupy
from taso.backends.cudnn.frontend import GraphUnsupported
from taso.backends.cudnn.interpreted import Interpreted
from taso.backends.places import OPERAND, ArraySpec, Place
from taso.backends.select import get_backend
from taso.graph.errors import BackendError, BackendUnavailable, InputError
from taso.graph.evaluate import evaluate_graph
from taso.graph.graph import Graph
from taso.graph.operator import REGISTRY
from taso.graph.types import DType, SymDim, TensorType

ALL = {"cupy-cuda12x": "14.2.0", "nvidia-cudnn-cu12": "9.28", "nvidia-cudnn-frontend": "1.32"}


def no_plan(description: Description, stream: object) -> Tunable:
    raise GraphUnsupported("there is no cuDNN here")


def device_of(fake: FakeCupy) -> CudaDevice:
    return CudaDevice(cast(Cupy, fake), no_plan, "cuDNN 9")


class Enqueued:
    """A cuDNN graph interpreted when its turn comes on the stand-in's stream."""

    workspace = 256

    def __init__(self, fake: FakeCupy, description: Description) -> None:
        self._fake, self._plan = fake, Interpreted(description)
        self.timed: list[float] = []

    def tune(self, clock: Clock) -> None:
        blocks = {t.uid: clock.reserve(4 * t.span) for t in self._plan.description.stored}
        call = self.bind({uid: block.address for uid, block in blocks.items()}, 0)
        self.timed.append(clock.seconds(call))

    def bind(self, addresses: Mapping[int, int], workspace: int) -> Callable[[], None]:
        run = self._plan.bind(addresses, workspace)
        return lambda: self._fake.enqueue(run)


def transposed(*shape: int | SymDim, dtype: DType = DType.FLOAT) -> Graph:
    """A model that moves its input on the device, by no kernel of ours."""
    graph = Graph()
    x = graph.add_input("x", TensorType(dtype, shape))
    y = graph.make(REGISTRY["Transpose"], (x,), {"perm": (1, 0)}).output
    graph.set_outputs([("y", y)])
    return graph


X = np.arange(6, dtype=np.float32).reshape(2, 3)


class Foreign:
    """An array of somebody else's that lies on the GPU."""

    def __init__(self, array: np.ndarray, how: str) -> None:
        self.on_device = DeviceArray((), held=array)
        if how == "interface":
            self.__cuda_array_interface__ = {"shape": array.shape}
        else:
            self.__dlpack__ = lambda: None
            self.__dlpack_device__ = lambda: (2, 0)


# ── what is missing ──────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "fake, installed, message",
    [
        (FakeCupy(driver=0), ALL, "no NVIDIA driver on this machine"),
        (FakeCupy(devices=0), ALL, "no NVIDIA GPU on this machine"),
        (FakeCupy(devices=-1), ALL, "no NVIDIA GPU answers .*NoDevice"),
        (FakeCupy(driver=11040), ALL, "CuPy is built for CUDA 12 and the driver is for CUDA 11.4: update the driver"),
        (FakeCupy(driver=13000, built=13000), ALL, "CuPy is built for CUDA 13 and nvidia-cudnn-cu12 is for another"),
    ],
)
def test_what_is_missing_is_one_sentence(fake: FakeCupy, installed: dict[str, str], message: str) -> None:
    with pytest.raises(BackendUnavailable, match=message) as caught:
        checked_cupy(cast(Cupy, fake), installed)
    assert "\n" not in str(caught.value)


def test_a_driver_that_does_not_answer_is_told() -> None:
    def refuses() -> int:
        raise CUDARuntimeError("cudaErrorSystemDriverMismatch: system has unsupported\n display driver")

    fake = FakeCupy()
    fake.cuda.runtime.driverGetVersion = refuses
    with pytest.raises(BackendUnavailable, match="driver does not answer .*unsupported display driver"):
        checked_cupy(cast(Cupy, fake), ALL)


def test_a_newer_driver_runs_what_is_built_for_an_older_cuda() -> None:
    fake = FakeCupy(driver=13010, built=12090)
    assert checked_cupy(cast(Cupy, fake), ALL) is cast(Cupy, fake)


@pytest.mark.parametrize(
    "error, message",
    [
        (ModuleNotFoundError("No module named 'cupy'", name="cupy"), "CuPy, which is not installed: pip install"),
        (ImportError("libcudart.so.12: cannot open"), "cannot be imported .*libcudart"),
    ],
)
def test_a_package_that_is_missing_or_broken_is_told(
    error: ImportError, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(name: str) -> None:
        raise error

    monkeypatch.setattr(devices, "importlib", SimpleNamespace(import_module=fails))
    devices.cupy.cache_clear()
    with pytest.raises(BackendUnavailable, match=message):
        devices.cupy()


@pytest.mark.parametrize("there, level", [({}, logging.INFO), (ALL, logging.WARNING)])
def test_auto_takes_onednn_where_no_gpu_answers_and_says_so(
    there: dict[str, str], level: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def missing(precision: str) -> None:
        raise BackendUnavailable("there is no NVIDIA GPU on this machine")

    monkeypatch.setattr(select, "CudnnBackend", missing)
    monkeypatch.setattr(select, "versions", lambda: there)
    with caplog.at_level(logging.INFO):
        assert get_backend().name in ("onednn", "reference")
    said = [r for r in caplog.records if "the GPU is not used (there is no NVIDIA GPU" in r.getMessage()]
    assert [r.levelno for r in said] == [level]


def test_auto_takes_the_gpu_where_one_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(select, "CudnnBackend", lambda precision: CudnnBackend(precision, device_of(FakeCupy())))
    assert get_backend().name == "cudnn"
    assert get_backend(precision="bf16").name == "cudnn bf16"
    assert get_backend("cudnn tf32").name == "cudnn tf32"


def test_a_precision_that_is_none_is_refused() -> None:
    with pytest.raises(BackendError, match="float32, tf32, fp16, bf16, not 'fp8'"):
        CudnnBackend("fp8", device_of(FakeCupy()))


def test_importing_the_backend_imports_neither_cupy_nor_cudnn() -> None:
    code = "import sys, taso, taso.backends.cudnn.backend; print({'cupy', 'cudnn'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_the_key_names_gpu_driver_and_versions() -> None:
    key = CudnnBackend("tf32", device_of(FakeCupy())).device_key()
    parts = ("Some GPU", "compute 9.0", "driver CUDA 12.8", "CuPy 14.2.0", "cuDNN 9", "tf32", "kernels", "measured")
    for part in parts:
        assert part in key
    assert key != CudnnBackend("float32", device_of(FakeCupy())).device_key()


# ── arrays ───────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("dtype", [DType.FLOAT, DType.BFLOAT16, DType.FLOAT16, DType.INT64, DType.BOOL])
def test_arrays_of_every_type_come_back_as_they_went(dtype: DType) -> None:
    device = device_of(FakeCupy())
    array = np.array([[1, 0, 1], [0, 1, 1]]).astype(dtype.numpy)
    block = device.lay_out(array)
    spec = ArraySpec(Place(OPERAND), array.dtype, array.shape, array.strides)
    found = device.fetched(device.view(spec, block.address), array.dtype)
    assert found.dtype == array.dtype and np.array_equal(found, array)


def test_numpy_in_numpy_out_and_the_results_are_the_callers() -> None:
    program = CudnnBackend(device=device_of(FakeCupy())).compile(transposed(2, 3))
    first = program({"x": X})["y"]
    assert isinstance(first, np.ndarray) and np.array_equal(first, X.T)
    program({"x": X + 1})
    assert np.array_equal(first, X.T)


@pytest.mark.parametrize("how", ["cupy", "interface", "dlpack"])
def test_arrays_on_the_gpu_stay_there(how: str) -> None:
    program = CudnnBackend(device=device_of(FakeCupy())).compile(transposed(2, 3))
    given = DeviceArray((), held=X.copy()) if how == "cupy" else Foreign(X.copy(), how)
    found = cast(DeviceArray, program({"x": cast(np.ndarray, given)})["y"])
    assert isinstance(found, DeviceArray) and np.array_equal(found.held, X.T)
    program({"x": X + 1})
    assert np.array_equal(found.held, X.T)


def test_arrays_on_the_gpu_run_models_of_symbolic_shapes() -> None:
    n = SymDim.named("N")
    program = CudnnBackend(device=device_of(FakeCupy())).compile(transposed(n, 3))
    for rows in (2, 4):
        held = np.arange(rows * 3, dtype=np.float32).reshape(rows, 3)
        found = cast(DeviceArray, program({"x": cast(np.ndarray, DeviceArray((), held=held))})["y"])
        assert np.array_equal(found.held, held.T)


@pytest.mark.parametrize("array", [X.astype(np.float64), X[:1]])
def test_arrays_on_the_gpu_that_do_not_fit_are_refused(array: np.ndarray) -> None:
    program = CudnnBackend(device=device_of(FakeCupy())).compile(transposed(2, 3))
    with pytest.raises(InputError, match="input 'x' must be"):
        program({"x": cast(np.ndarray, DeviceArray((), held=array))})


def test_a_model_runs_as_one_captured_graph_as_its_definitions_say() -> None:
    """Convolutions by (interpreted) cuDNN, the rest by kernels of ours where they can be compiled."""
    fake = FakeCupy(compiler=kernels() if compiler() else None)
    plans: list[Enqueued] = []

    def planner(description: Description, stream: object) -> Tunable:
        plans.append(Enqueued(fake, description))
        return plans[-1]

    backend = CudnnBackend(device=CudaDevice(cast(Cupy, fake), planner))
    b = Build()
    graph = b.outputs(blocks(b))
    program = backend.compile(graph)
    fake.said.clear()
    feeds = feeds_for(graph)
    found = program(feeds)
    assert worst(found, evaluate_graph(graph, feeds, wide=True)) <= TOLERANCE
    if compiler():
        assert sum(s.startswith("launch") for s in fake.said) == 1
    assert plans and all(plan.timed for plan in plans)
    assert len({plan._plan.description.key for plan in plans}) == len(plans), "a graph is planned once"


# ── order ────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_launches_are_captured_once_and_replayed_on_the_callers_stream() -> None:
    fake = FakeCupy()
    program = CudnnBackend(device=device_of(fake)).compile(transposed(2, 3))
    fake.said.clear()
    with fake.cuda.Stream() as stream:
        program({"x": X})
        program({"x": X})
    assert [s for s in fake.said if s.startswith("launch")] == [f"launch on {stream.ptr}"] * 2


def test_a_run_on_another_stream_waits_for_the_one_before() -> None:
    fake = FakeCupy()
    program = CudnnBackend(device=device_of(fake)).compile(transposed(2, 3))
    program({"x": X})
    fake.said.clear()
    with fake.cuda.Stream() as stream:
        program({"x": X})
    said = [s for s in fake.said if not s.startswith("free")]
    assert said[:2] == [f"{stream.ptr} waits", f"launch on {stream.ptr}"]


def test_a_program_that_goes_away_waits_for_its_last_run() -> None:
    fake = FakeCupy()
    program = CudnnBackend(device=device_of(fake)).compile(transposed(2, 3))
    program({"x": cast(np.ndarray, DeviceArray((), held=X.copy()))})
    fake.said.clear()
    del program
    assert fake.said[:1] == ["wait for an event"]


# ── failures ─────────────────────────────────────────────────────────────────────────────────────────────────────


def test_memory_that_is_full_is_told_and_given_back() -> None:
    fake = FakeCupy(limit=1000)
    with pytest.raises(BackendError, match="the GPU's memory is full .*Out of memory") as caught:
        CudnnBackend(device=device_of(fake)).compile(transposed(100, 100))
    assert "\n" not in str(caught.value) and "free" in fake.said


def test_memory_that_is_full_while_measuring_skips_the_kernel() -> None:
    from taso.backends.costs import CostDatabase
    from taso.backends.lowering import lower
    from taso.search.costs import PENALTY, CostModel

    backend = CudnnBackend(device=device_of(FakeCupy(limit=100_000)))
    costs = CostModel(backend, CostDatabase())
    kernels = [lower(g, backend.lowering).jobs[0].kernel for g in (transposed(200, 200), transposed(20, 20))]
    assert costs.kernel(kernels[0]) == PENALTY
    assert "memory is full" in costs.failures[kernels[0].key]
    assert 0 < costs.kernel(kernels[1]) < PENALTY


@pytest.mark.parametrize(
    "failing, more",
    [("cudaErrorInvalidValue: invalid argument", ""), ("cudaErrorIllegalAddress: an illegal memory access", "anew")],
)
def test_a_kernel_that_fails_is_one_sentence(failing: str, more: str) -> None:
    fake = FakeCupy()
    program = CudnnBackend(device=device_of(fake)).compile(transposed(2, 3))
    fake.failing = failing
    with pytest.raises(BackendError, match=f"the GPU failed .running a model.: {failing}.*{more}"):
        program({"x": X})


def test_a_kernel_that_does_not_compile_is_told() -> None:
    with pytest.raises(BackendError, match="compiling the kernel add_1.*failed to compile"):
        device_of(FakeCupy()).function("nonsense", "add_1")
