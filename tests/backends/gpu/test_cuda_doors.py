"""ONNX Runtime's and ONNX's interfaces ask for the GPU: `taso.InferenceSession` and `taso.onnx_backend`."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import numpy as np
import onnx
import onnxruntime
import pytest
from fake_cupy import FakeCupy
from hosts import host_backend
from test_device import device_of

import taso
import taso.onnx_backend
from taso.backends import select
from taso.backends.cudnn.backend import CudnnBackend
from taso.graph.errors import BackendError, BackendUnavailable, FallbackWarning, TasoError

GPU, CPU = "CUDAExecutionProvider", "CPUExecutionProvider"
MISSING = "there is no NVIDIA GPU on this machine"
TEXT = """<ir_version: 9, opset_import: ["": 18]>
g (float[2, 4] x, float[4, 3] w) => (float[2, 3] y) { t = MatMul (x, w)  y = Relu (t) }"""


def model() -> onnx.ModelProto:
    return onnx.parser.parse_model(TEXT)


def feeds() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {"x": rng.standard_normal((2, 4)).astype(np.float32), "w": rng.standard_normal((4, 3)).astype(np.float32)}


def truth() -> np.ndarray:
    session = onnxruntime.InferenceSession(model().SerializeToString(), providers=[CPU])
    found: np.ndarray = session.run(None, feeds())[0]
    return found


@pytest.fixture(params=["host", "stand-in"])
def there(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], CudnnBackend]:
    """A GPU, for which ordinary memory stands, or the stand-in for CuPy."""

    def backend(precision: str) -> CudnnBackend:
        return host_backend(precision) if request.param == "host" else CudnnBackend(precision, device_of(FakeCupy()))

    monkeypatch.setattr(select, "CudnnBackend", backend)
    return backend


@pytest.fixture
def absent(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(precision: str) -> None:
        raise BackendUnavailable(MISSING)

    monkeypatch.setattr(select, "CudnnBackend", missing)


def close(found: object) -> bool:
    return float(np.abs(np.asarray(found) - truth()).max()) <= 1e-6 * float(np.abs(truth()).max())


# ── taso.InferenceSession ────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("providers", [[GPU], [GPU, CPU], [(GPU, {"device_id": 0}), CPU], [(GPU, {"device_id": "0"})]])
def test_the_cuda_provider_is_the_gpu(providers: list[object], there: object) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", FallbackWarning)
        session = taso.InferenceSession(model(), providers=providers, optimize=False)  # type: ignore[arg-type]
    assert session.get_providers() == [GPU, CPU] and list(session.get_provider_options()) == [GPU, CPU]
    found = session.run(None, feeds())[0]
    assert isinstance(found, np.ndarray) and close(found)


def test_a_model_is_optimized_for_the_gpu_that_is_asked_for() -> None:
    backend = host_backend()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(select, "CudnnBackend", lambda precision: backend)
        session = taso.InferenceSession(model(), providers=[GPU], budget=2)
    assert session.graph.report.backend == "cudnn"
    assert close(session.run(None, feeds())[0])


def test_the_cpu_provider_is_the_cpu_where_there_is_a_gpu(there: object) -> None:
    session = taso.InferenceSession(model(), providers=[CPU, GPU], optimize=False)
    assert session.get_providers() == [CPU] and close(session.run(None, feeds())[0])


def test_provider_options_are_taken_beside_the_list(there: object) -> None:
    session = taso.InferenceSession(model(), None, [GPU, CPU], [{"device_id": "0"}, {}], optimize=False)
    assert session.get_providers()[0] == GPU
    with pytest.raises(TasoError, match="1 provider_options are given for 2 providers"):
        taso.InferenceSession(model(), None, [GPU, CPU], [{}], optimize=False)


@pytest.mark.parametrize("number, said", [(3, "the current GPU is number 0, and 3 is asked for"), ("x", "device_id")])
def test_another_gpu_than_the_current_one_is_refused(number: object, said: str, there: object) -> None:
    with pytest.raises(TasoError, match=said):
        taso.InferenceSession(model(), providers=[(GPU, {"device_id": number}), CPU], optimize=False)


def test_without_a_gpu_the_next_provider_serves_and_a_warning_says_why(absent: None) -> None:
    with pytest.warns(FallbackWarning, match=f"{GPU} is not available .{MISSING}.: the model runs on the CPU"):
        session = taso.InferenceSession(model(), providers=[GPU, CPU], optimize=False)
    assert session.get_providers() == [CPU] and close(session.run(None, feeds())[0])


def test_without_a_gpu_and_another_provider_it_is_an_error(absent: None) -> None:
    with pytest.raises(BackendUnavailable, match=MISSING):
        taso.InferenceSession(model(), providers=[GPU], optimize=False)


def test_a_provider_that_taso_has_not_is_passed_over(there: object) -> None:
    with pytest.warns(FallbackWarning, match="taso has no TensorrtExecutionProvider: the model runs on the GPU"):
        session = taso.InferenceSession(model(), providers=["TensorrtExecutionProvider", GPU, CPU], optimize=False)
    assert session.get_providers()[0] == GPU


def test_a_backend_that_is_named_runs_whatever_the_list_says(there: object) -> None:
    with pytest.warns(FallbackWarning, match="on the CPU, by the backend reference, not with CUDAExecutionProvider"):
        session = taso.InferenceSession(model(), providers=[GPU], optimize=False, backend="reference")
    assert session.get_providers() == [CPU]
    assert taso.InferenceSession(model(), providers=[GPU], optimize=False, backend="cudnn").get_providers()[0] == GPU


# ── taso.onnx_backend ────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("device", ["CUDA", "CUDA:0"])
def test_the_device_cuda_is_the_gpu(device: str, there: object) -> None:
    assert taso.onnx_backend.supports_device(device) and taso.onnx_backend.is_compatible(model(), device)
    (found,) = taso.onnx_backend.run_model(model(), [feeds()["x"], feeds()["w"]], device)
    assert close(found)
    node = onnx.helper.make_node("Relu", ["x"], ["y"])
    (found,) = taso.onnx_backend.run_node(node, [feeds()["x"]], device)
    assert np.array_equal(found, np.maximum(feeds()["x"], 0))
    assert type(taso.onnx_backend.prepare(model(), device).program).__module__ == "taso.backends.cudnn.executor"


def test_the_device_cpu_is_the_cpu_where_there_is_a_gpu(there: object) -> None:
    assert "cudnn" not in type(taso.onnx_backend.prepare(model(), "CPU").program).__module__


def test_a_device_that_is_not_there_is_told(absent: None) -> None:
    assert not taso.onnx_backend.supports_device("CUDA") and taso.onnx_backend.supports_device("CPU")
    with pytest.raises(BackendUnavailable, match=MISSING):
        taso.onnx_backend.prepare(model(), "CUDA")


@pytest.mark.parametrize("device, name, said", [
    ("CUDA:2", "auto", "number 0, and 2 is asked for"), ("CUDA", "onednn", "'onednn' does not run on the device"),
    ("TPU", "auto", "'CPU' and 'CUDA', not on 'TPU'"), ("CUDA:x", "auto", "not on 'CUDA:x'"),
])  # fmt: skip
def test_what_does_not_run_on_a_device_is_refused(device: str, name: str, said: str, there: object) -> None:
    with pytest.raises(BackendError, match=said):
        taso.onnx_backend.prepare(model(), device, backend=name)
