"""ONNX's backend tests (`onnx.backend.test`), run one by one on a backend of taso, each compared in earnest."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
import unittest
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from unittest import mock

import numpy as np
import onnx
from onnx import ModelProto
from onnx.backend.test import BackendTest
from onnx.backend.test.loader import load_model_tests

from taso.backends import fallback, stages
from taso.graph import onnx_reference
from taso.onnx_backend import Inputs, TasoBackend, TasoRep

sys.path.append(str(Path(__file__).resolve().parents[1] / "backends" / "gpu"))

from hosts import gpu_or_host  # noqa: E402  # found by the path set above

BACKENDS = ("reference", "onednn", "cudnn")
"""cuDNN is on the GPU where there is one, else in ordinary memory: graphs interpreted, our kernels on the processor."""
KINDS = {
    "node": "NodeModel", "light": "RealModel", "simple": "SimpleModel", "pytorch-converted": "PyTorchConvertedModel",
    "pytorch-operator": "PyTorchOperatorModel",
}  # fmt: skip
FOLDER = Path(__file__).resolve().parent

OWN, DEFINITION, FALLBACK = "own", "definition", "fallback"
"""How a case ran: by kernels of the backend (the reference backend: by taso's own definitions), with the help of
taso's definitions where the backend has no kernel, or with the help of onnx.reference."""


class _Watch:
    """What ran while a program was called."""

    def __init__(self) -> None:
        self.used: set[str] = set()

    def calls(self, owner: object, name: str, what: str) -> contextlib.AbstractContextManager[object]:
        function = getattr(owner, name)

        def counted(*args: object, **kwargs: object) -> object:
            self.used.add(what)
            return function(*args, **kwargs)

        return mock.patch.object(owner, name, counted)


class WatchedRep(TasoRep):
    """A prepared model that notes whether kernels, definitions or onnx.reference ran."""

    watch = _Watch()

    def run(self, inputs: Inputs, **kwargs: object) -> tuple[object, ...]:
        watch = type(self).watch
        with (
            watch.calls(onnx_reference, "run", FALLBACK),
            watch.calls(fallback, "evaluate_operator", DEFINITION),
            watch.calls(stages, "evaluate_node", DEFINITION),
        ):
            return super().run(inputs, **kwargs)


class _Watched(TasoBackend):
    @classmethod
    def prepare(cls, model: ModelProto, device: str = "CPU", **kwargs: object) -> WatchedRep:
        rep = super().prepare(model, device, **kwargs)
        return WatchedRep(rep.graph, rep.program)


class OnReference(_Watched):
    backend = "reference"


class OnOneDNN(_Watched):
    backend = "onednn"


class OnCuDNN(_Watched):
    builds_only = False

    @classmethod
    def prepare(cls, model: ModelProto, device: str = "CPU", **kwargs: object) -> WatchedRep:
        rep = super().prepare(model, device, backend="reference", **kwargs)
        program = gpu_or_host().compile(rep.graph)
        if cls.builds_only:
            raise unittest.SkipTest("it was built")
        return WatchedRep(rep.graph, program)


def made_ready(batch: Sequence[str]) -> None:
    """Has programs for cuDNN built, so that the kernels of all of them are compiled at once when the first runs."""
    with mock.patch.object(OnCuDNN, "builds_only", True):
        for case in batch:
            if not case.startswith("light/"):
                run(case, "cudnn")


class Comparing(BackendTest):
    """The official runner with a comparison that also looks into sequences and optionals, and that counts."""

    compared = 0

    @classmethod
    def assert_similar_outputs(
        cls, ref_outputs: Sequence[object], outputs: Sequence[object], rtol: float, atol: float,
        model_dir: str | None = None,
    ) -> None:  # fmt: skip
        if len(outputs) != len(ref_outputs):
            raise AssertionError(f"{len(outputs)} outputs where {len(ref_outputs)} are expected")
        for position, (found, wanted) in enumerate(zip(outputs, ref_outputs, strict=True)):
            cls.compare(found, wanted, rtol, atol, f"output {position}")

    @classmethod
    def compare(cls, found: object, wanted: object, rtol: float, atol: float, what: str) -> None:
        if isinstance(wanted, (list, tuple)):
            if not isinstance(found, (list, tuple)) or len(found) != len(wanted):
                raise AssertionError(f"{what}: {found!r} where a sequence of {len(wanted)} is expected")
            for position, (a, b) in enumerate(zip(found, wanted, strict=True)):
                cls.compare(a, b, rtol, atol, f"{what}, element {position}")
            cls.compared += not wanted
        elif wanted is None:
            if found is not None:
                raise AssertionError(f"{what}: {found!r} where nothing is expected")
            cls.compared += 1
        else:
            cls.compare_arrays(found, np.asarray(wanted), rtol, atol, what)

    @classmethod
    def compare_arrays(cls, found: object, wanted: np.ndarray, rtol: float, atol: float, what: str) -> None:
        """Shape and element type must be the same, and values too: within the test's tolerance for floats."""
        if not isinstance(found, np.ndarray) or found.shape != wanted.shape:
            raise AssertionError(f"{what}: {_shown(found)} where {_shown(wanted)} is expected")
        if wanted.dtype.kind in "OUS":
            if found.dtype.kind not in "OUS" or found.tolist() != wanted.tolist():
                raise AssertionError(f"{what}: {found.tolist()} where {wanted.tolist()} is expected")
        elif found.dtype != wanted.dtype:
            raise AssertionError(f"{what}: {_shown(found)} where {_shown(wanted)} is expected")
        elif wanted.dtype.kind in "biu":
            np.testing.assert_array_equal(found, wanted, what)
        else:
            # as the official comparison has it: two units in the last place of a bfloat16
            rtol = max(rtol, 2**-6) if wanted.dtype.name == "bfloat16" else rtol
            a, b = (x if x.dtype.kind in "fc" else x.astype(np.float32) for x in (found, wanted))
            np.testing.assert_allclose(a, b, rtol, atol, err_msg=what)
        cls.compared += 1


def _shown(found: object) -> str:
    return f"{found.dtype}{list(found.shape)}" if isinstance(found, np.ndarray) else repr(found)


# ── cases ────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Result:
    """How a case went: `error` is "" where it passed, `how` says what ran."""

    error: str
    how: str


@cache
def runner(backend: str) -> Comparing:
    with warnings.catch_warnings():
        # making the expected outputs divides by zero here and there
        warnings.simplefilter("ignore", RuntimeWarning)
        return Comparing({"reference": OnReference, "onednn": OnOneDNN, "cudnn": OnCuDNN}[backend])


def names() -> list[str]:
    """All cases as kind/name, sorted."""
    items = runner("reference")._test_items
    return sorted(f"{kind}/{name.removesuffix('_cpu')}" for kind, category in KINDS.items()
                  for name in items[category] if name.endswith("_cpu"))  # fmt: skip


@contextlib.contextmanager
def _models_elsewhere() -> Iterator[None]:
    """The runner writes inputs and outputs of the light models into the user's home if not told otherwise."""
    with tempfile.TemporaryDirectory() as folder, mock.patch.dict(os.environ, {"ONNX_MODELS": folder}):
        yield


def run(case: str, backend: str) -> Result:
    """Runs one case; a test that compared nothing, or was skipped, did not pass."""
    kind, _, name = case.partition("/")
    official = runner(backend)
    WatchedRep.watch = watch = _Watch()
    Comparing.compared = 0
    try:
        with _models_elsewhere(), warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            official._test_items[KINDS[kind]][f"{name}_cpu"].func(None)
    except unittest.SkipTest as reason:
        return Result(f"skipped: {reason}", "")
    except Exception as error:
        return Result(f"{type(error).__name__}: {_one_line(error)}", "")
    if not Comparing.compared:
        return Result("nothing was compared", "")
    return Result("", FALLBACK if FALLBACK in watch.used else DEFINITION if DEFINITION in watch.used else OWN)


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:160]


@cache
def default_domain() -> frozenset[str]:
    """The node tests whose operators are all of ONNX's default domain."""
    found = set()
    for test in load_model_tests(kind="node"):
        if test.model is not None and all(node.domain in ("", "ai.onnx") for node in test.model.graph.node):
            found.add(f"node/{test.name}")
    return frozenset(found)


# ── the lists ────────────────────────────────────────────────────────────────────────────────────────────────────


def listed(backend: str) -> dict[str, str]:
    """case → how it runs, of the cases that must pass."""
    return dict(_lines(f"{backend}.txt"))


def excluded(backend: str) -> dict[str, str]:
    """case → why it need not pass."""
    return {case: reason for (case, on, reason) in (
        (case, *rest.split(None, 1)) for case, rest in _lines("excluded.txt")) if on in (backend, "all")}  # fmt: skip


def _lines(file: str) -> Iterator[tuple[str, str]]:
    for line in (FOLDER / file).read_text("utf-8").splitlines():
        if line and not line.startswith("#"):
            case, rest = line.split(None, 1)
            yield case, rest


def listed_version() -> str:
    """The version of onnx whose cases the lists hold."""
    first = (FOLDER / "reference.txt").read_text("utf-8").splitlines()[0]
    return first.split("onnx ")[1].split(":")[0].split()[0]


def installed_version() -> str:
    return onnx.__version__
