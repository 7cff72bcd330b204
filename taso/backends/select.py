"""Choosing a backend by name."""

from __future__ import annotations

import logging
from importlib.metadata import EntryPoint
from typing import cast

from taso.backends.base import Backend, checked_threads
from taso.backends.lowering import BF16, FLOAT32, INT8
from taso.backends.onednn.backend import OneDNNBackend
from taso.backends.onnxruntime.backend import OnnxRuntimeBackend
from taso.backends.reference import ReferenceBackend
from taso.graph import plugins
from taso.graph.errors import BackendError, BackendUnavailable

log = logging.getLogger(__name__)

NAMES = ("auto", "onednn", "onnxruntime", "reference")
"""The backends that come with taso."""
_PLANNED = {"cudnn": "cuDNN"}


def get_backend(
    name: str | Backend = "auto", threads: int | None = None, precision: str = FLOAT32
) -> Backend:  # fmt: skip
    """The backend of that name; one that is given already is passed on.

    "auto" is oneDNN where its library loads, else the reference; the log says which and why. Other names are those that
    installed packages announce as entry points of the group "taso.backends". `precision` is that of products: "float32"
    or, on oneDNN, "bf16" or "int8" ("onednn bf16" is both in one). Raises `BackendError` for a name or a precision that
    is none, `BackendUnavailable` where the backend's library, or an instruction of the processor, is missing.
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
    if name in (f"onednn {BF16}", f"onednn {INT8}"):
        name, precision = "onednn", name.removeprefix("onednn ")
    if name == "onednn" or name == "auto" and precision != FLOAT32:
        return OneDNNBackend(threads, precision)
    if precision != FLOAT32:
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
    return _installed(name, threads)


def backend_names() -> list[str]:
    """The backends that there are: taso's own, and those that installed packages announce ("taso.backends").

    One that takes the name of taso's own is passed over, with a `PluginWarning`.
    """
    return [*NAMES, *_announced()]


def _announced() -> dict[str, EntryPoint]:
    found = plugins.announced(plugins.BACKENDS)
    for name in {*NAMES, *_PLANNED} & found.keys():
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


def _automatic(threads: int | None) -> Backend:
    try:
        chosen: Backend = OneDNNBackend(threads)
    except BackendUnavailable as error:
        log.warning("oneDNN is not available (%s): the slow reference backend is used", error)
        return ReferenceBackend()
    log.info("backend: %s", chosen.name)
    return chosen
