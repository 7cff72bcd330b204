"""Choosing a backend by name."""

from __future__ import annotations

import logging

from taso.backends.base import Backend, checked_threads
from taso.backends.lowering import BF16, FLOAT32
from taso.backends.onednn.backend import OneDNNBackend
from taso.backends.onnxruntime.backend import OnnxRuntimeBackend
from taso.backends.reference import ReferenceBackend
from taso.graph.errors import BackendError, BackendUnavailable

log = logging.getLogger(__name__)

NAMES = ("auto", "onednn", "onnxruntime", "reference")
_PLANNED = {"cudnn": "cuDNN"}


def get_backend(
    name: str | Backend = "auto", threads: int | None = None, precision: str = FLOAT32
) -> Backend:  # fmt: skip
    """The backend of that name; one that is given already is passed on.

    "auto" is oneDNN where its library loads, else the reference; the log says which and why. `precision` is that of
    products of float32 tensors: "float32", or on oneDNN "bf16" ("onednn bf16" is both in one). Raises `BackendError`
    for a name or a precision that is none, `BackendUnavailable` where the backend's library, or an instruction of the
    processor, is missing.
    """
    if threads is not None:
        threads = checked_threads(threads)
    if not isinstance(name, str):
        if not hasattr(name, "compile"):
            raise BackendError(f"a backend is a name or an object with a backend's methods, not {name!r}")
        if precision not in (FLOAT32, name.lowering.precision):
            raise BackendError(f"the backend {name.name} that was given computes in {name.lowering.precision}")
        return name
    if name == f"onednn {BF16}":
        name, precision = "onednn", BF16
    if name == "onednn" or name == "auto" and precision != FLOAT32:
        return OneDNNBackend(threads, precision)
    if name in NAMES and precision != FLOAT32:
        raise BackendError(f"the backend '{name}' computes in {FLOAT32} alone; '{precision}' is for oneDNN")
    if name == "auto":
        return _automatic(threads)
    if name == "onnxruntime":
        return OnnxRuntimeBackend(threads)
    if name == "reference":
        return ReferenceBackend()
    if name in _PLANNED:
        raise BackendUnavailable(
            f"the backend '{name}' ({_PLANNED[name]}) is not part of this version of taso; it has {', '.join(NAMES)}"
        )
    raise BackendError(f"there is no backend '{name}'; known are {', '.join(NAMES)}")


def _automatic(threads: int | None) -> Backend:
    try:
        chosen: Backend = OneDNNBackend(threads)
    except BackendUnavailable as error:
        log.warning("oneDNN is not available (%s): the slow reference backend is used", error)
        return ReferenceBackend()
    log.info("backend: %s", chosen.name)
    return chosen
