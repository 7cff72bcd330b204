"""Choosing a backend by name."""

from __future__ import annotations

import logging

from taso.backends.base import Backend, checked_threads
from taso.backends.onednn.backend import OneDNNBackend
from taso.backends.onnxruntime.backend import OnnxRuntimeBackend
from taso.backends.reference import ReferenceBackend
from taso.graph.errors import BackendError, BackendUnavailable

log = logging.getLogger(__name__)

NAMES = ("auto", "onednn", "onnxruntime", "reference")
_PLANNED = {"cudnn": "cuDNN"}


def get_backend(name: str | Backend = "auto", threads: int | None = None) -> Backend:
    """The backend of that name; one that is given already is passed on.

    "auto" is oneDNN where its library loads, else the reference; the log says which and why. Raises `BackendError`
    for a name that is none, `BackendUnavailable` where the backend's library is missing.
    """
    if threads is not None:
        threads = checked_threads(threads)
    if not isinstance(name, str):
        if not hasattr(name, "compile"):
            raise BackendError(f"a backend is a name or an object with a backend's methods, not {name!r}")
        return name
    if name == "auto":
        return _automatic(threads)
    if name == "onednn":
        return OneDNNBackend(threads)
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
