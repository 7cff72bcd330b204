"""Choosing a backend by name."""

from __future__ import annotations

import logging
from importlib.metadata import EntryPoint
from typing import cast

from taso.backends.base import Backend, checked_threads
from taso.backends.cudnn.backend import PRECISIONS as GPU_PRECISIONS
from taso.backends.cudnn.backend import CudnnBackend
from taso.backends.cudnn.device import versions
from taso.backends.lowering import BF16, FLOAT32, INT8
from taso.backends.onednn.backend import OneDNNBackend
from taso.backends.onnxruntime.backend import OnnxRuntimeBackend
from taso.backends.reference import ReferenceBackend
from taso.graph import plugins
from taso.graph.errors import BackendError, BackendUnavailable

log = logging.getLogger(__name__)

NAMES = ("auto", "cudnn", "onednn", "onnxruntime", "reference")
"""The backends that come with taso."""
PRECISIONS = {"onednn": (FLOAT32, BF16, INT8), "cudnn": GPU_PRECISIONS}
"""What backends compute products of float32 tensors in; others in float32 alone."""


def get_backend(
    name: str | Backend = "auto", threads: int | None = None, precision: str = FLOAT32
) -> Backend:  # fmt: skip
    """The backend of that name; one that is given already is passed on.

    "auto" is cuDNN where its packages and a GPU answer, else oneDNN where its library loads, else the reference; the
    log says which and why. Other names are those that installed packages announce as entry points of the group
    "taso.backends". `precision` is that of products: "float32", on oneDNN or cuDNN "bf16", on oneDNN "int8", on cuDNN
    "tf32" or "fp16" ("onednn bf16" is both in one). Raises `BackendError` for a name or a precision that is none,
    `BackendUnavailable` where the backend's library, a GPU, or an instruction of the processor is missing.
    """
    if threads is not None:
        threads = checked_threads(threads)
    if not isinstance(name, str):
        lacking = [member for member in _MEMBERS if not hasattr(name, member)]
        if lacking:
            raise BackendError(
                f"a backend is a name or an object with a backend's methods, not {name!r}, which has no '{lacking[0]}'"
            )
        if precision not in (FLOAT32, name.lowering.precision):
            raise BackendError(f"the backend {name.name} that was given computes in {name.lowering.precision}")
        return name
    base, _, asked = name.partition(" ")
    if asked in PRECISIONS.get(base, ()):
        if precision not in (FLOAT32, asked):
            raise BackendError(f"the backend '{name}' computes in {asked}, and precision='{precision}' is asked for")
        name, precision = base, asked
    if name == "auto":
        return _automatic(threads, precision)
    if name == "onednn":
        return OneDNNBackend(threads, precision)
    if name == "cudnn":
        return CudnnBackend(precision)
    if precision != FLOAT32:
        raise BackendError(f"the backend '{name}' computes in {FLOAT32} alone; '{precision}' is for oneDNN or cuDNN")
    if name == "onnxruntime":
        return OnnxRuntimeBackend(threads)
    if name == "reference":
        return ReferenceBackend()
    return _installed(name, threads)


def on_cpu(threads: int | None = None, precision: str = FLOAT32) -> Backend:
    """What "auto" is where there is no GPU. Raises as `get_backend` does."""
    return _on_cpu(threads if threads is None else checked_threads(threads), precision)


def on_gpu(number: int | None = None, precision: str = FLOAT32) -> Backend:
    """The cuDNN backend on the current GPU, which has this number if one is asked for.

    Raises `BackendUnavailable` where there is none, `BackendError` where another is the current one.
    """
    found = CudnnBackend(precision)
    if number is not None and number != found.device.number:
        raise BackendError(
            f"the current GPU is number {found.device.number}, and {number} is asked for: "
            f"call cupy.cuda.Device({number}).use() before, or set CUDA_VISIBLE_DEVICES"
        )
    return found


def backend_names() -> list[str]:
    """The backends that there are: taso's own, and those that installed packages announce ("taso.backends").

    One that takes the name of taso's own is passed over, with a `PluginWarning`.
    """
    return [*NAMES, *_announced()]


def _announced() -> dict[str, EntryPoint]:
    found = plugins.announced(plugins.BACKENDS)
    for name in set(NAMES) & found.keys():
        plugins.passed_over(f"{plugins.who(found.pop(name))} is passed over, for taso has a backend of that name")
    return found


def _installed(name: str, threads: int | None) -> Backend:
    """A backend of another package: its entry point is a class, or a function, that takes the number of threads."""
    known = _announced()
    if name not in known:
        raise BackendError(f"there is no backend '{name}'; known are {', '.join([*NAMES, *known])}")
    try:
        make = plugins.loaded(known[name])
        backend = make(threads) if callable(make) else make
    except BackendError:
        raise
    except plugins.PluginError as error:
        raise BackendError(str(error)) from error
    except Exception as error:
        # a package of another's may fail in any way
        log.info("the backend '%s' failed", name, exc_info=True)
        raise BackendError(str(plugins.broken(known[name], error))) from error
    lacking = [member for member in _MEMBERS if not hasattr(backend, member)]
    if lacking:
        raise BackendError(str(plugins.broken(known[name], f"it has no '{lacking[0]}', which a backend has")))
    return cast(Backend, backend)


_MEMBERS = ("name", "measures", "plans", "lowering", "device_key", "measure", "compile")


def _automatic(threads: int | None, precision: str) -> Backend:
    """The fastest that is there, of those that compute in that precision."""
    if precision not in PRECISIONS["cudnn"]:
        return _on_cpu(threads, precision)
    try:
        chosen: Backend = CudnnBackend(precision)
    except BackendUnavailable as error:
        # who has installed what a GPU needs wants to know why it is not used
        log.log(logging.WARNING if versions() else logging.INFO, "the GPU is not used (%s): trying oneDNN", error)
        return _on_cpu(threads, precision)
    log.info("backend: %s", chosen.name)
    return chosen


def _on_cpu(threads: int | None, precision: str) -> Backend:
    try:
        chosen: Backend = OneDNNBackend(threads, precision)
    except BackendUnavailable as error:
        if precision != FLOAT32:
            raise
        log.warning("oneDNN is not available (%s): the slow reference backend is used", error)
        return ReferenceBackend()
    log.info("backend: %s", chosen.name)
    return chosen
