"""Models that people use come through: loaded, optimized with a small budget, equal at two shapes on random inputs.

On oneDNN every operator of them runs on a kernel of the backend (conformance/list_models.py counts them).

The packages that hold them are the `models` extra (silero-vad apart, which wants PyTorch: `pip install --no-deps`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from pathlib import Path

import models
import numpy as np
import onnx
import onnx.checker
import pytest
from models import Arrays
from numpy.typing import NDArray
from onnx import ModelProto
from searching import FormulaBackend

import taso
from taso.backends.onednn.backend import OneDNNBackend
from taso.backends.onednn.executor import Program
from taso.graph.errors import BackendUnavailable
from taso.graph.operator import Trait

pytestmark = [pytest.mark.models, pytest.mark.slow]

SHARES = Path(__file__).parent / "conformance" / "real_models.txt"
LISTED = dict(
    line.split(": ", 1) for line in SHARES.read_text("utf-8").splitlines() if line and not line.startswith("#")
)
"""Model and number of its shapes → how many operators run how on oneDNN, as conformance/list_models.py has written."""


def _backend() -> str:
    try:
        OneDNNBackend()
    except BackendUnavailable:
        return "reference"
    return "onednn"


BACKEND = _backend()

TOLERANCE = 1e-4
PACKAGES = ("rapidocr-onnxruntime", "silero-vad", "magika", "nudenet")


@dataclass(frozen=True)
class Real:
    """A file of a package, and shapes of its inputs: what is optimized for first, then another that it admits.

    Inputs of 0 dimensions are sampling rates, given as numbers.
    """

    package: str
    file: str
    shapes: tuple[dict[str, tuple[int, ...]], ...]
    numbers: tuple[dict[str, int], ...] = ({}, {})
    saturates: bool = False

    @property
    def name(self) -> str:
        return f"{self.package}/{self.file}"

    def types(self) -> dict[str, np.dtype[np.generic]]:
        """Element types of the inputs."""
        to_numpy = onnx.helper.tensor_dtype_to_np_dtype
        return {v.name: np.dtype(to_numpy(v.type.tensor_type.elem_type)) for v in self.model().graph.input}

    def model(self) -> ModelProto:
        """The model; one whose last sigmoid is 0 on anything but a photograph gives what that sigmoid takes."""
        proto = onnx.load(located(self))
        if self.saturates:
            (output,) = proto.graph.output
            (last,) = (n for n in proto.graph.node if n.output[0] == output.name)
            assert last.op_type == "Sigmoid"
            output.name = last.input[0]
            proto.graph.node.remove(last)
        return proto

    def feeds(self, which: int, seed: int, types: dict[str, np.dtype[np.generic]]) -> Arrays:
        rng = np.random.default_rng(seed)
        found: Arrays = {n: np.asarray(v, types[n]) for n, v in self.numbers[which].items()}
        for name, shape in self.shapes[which].items():
            kind = types[name].kind
            make = octets if kind == "i" else drawn if len(shape) == 4 else sound
            found[name] = make(rng, shape).astype(types[name])
        return found


def drawn(rng: np.random.Generator, shape: tuple[int, ...]) -> NDArray[np.generic]:
    """Bright images with dark strokes, so that there is something to find: between -1 and 1."""
    images = 1 - 0.1 * rng.random(shape)
    for one in images:
        for _ in range(12):
            top, left = rng.integers(0, shape[2] - 12), rng.integers(0, shape[3] - 12)
            high, wide = ((12, 3), (3, 12), (8, 2), (2, 8))[rng.integers(0, 4)]
            one[:, top : top + high, left : left + wide] = -1
    return np.asarray(images)


def octets(rng: np.random.Generator, shape: tuple[int, ...]) -> NDArray[np.generic]:
    return np.asarray(rng.integers(0, 257, shape))


def sound(rng: np.random.Generator, shape: tuple[int, ...]) -> NDArray[np.generic]:
    return np.asarray(rng.normal(size=shape) * 0.2)


def image(*shapes: tuple[int, ...], name: str = "x") -> tuple[dict[str, tuple[int, ...]], ...]:
    return tuple({name: shape} for shape in shapes)


def speech(*sizes: tuple[int, int]) -> tuple[dict[str, tuple[int, ...]], ...]:
    return tuple({"input": (batch, samples), "state": (2, batch, 128)} for batch, samples in sizes)


RATES = ({"sr": 16000}, {"sr": 8000})
REAL = (
    Real("rapidocr-onnxruntime", "ch_PP-OCRv4_det_infer.onnx", image((1, 3, 64, 96), (2, 3, 96, 64)),
         saturates=True),
    Real("rapidocr-onnxruntime", "ch_PP-OCRv4_rec_infer.onnx", image((1, 3, 48, 160), (2, 3, 48, 96))),
    Real("rapidocr-onnxruntime", "ch_ppocr_mobile_v2.0_cls_infer.onnx", image((1, 3, 48, 192), (3, 3, 48, 96))),
    Real("silero-vad", "silero_vad.onnx", speech((1, 512), (3, 256)), RATES),
    Real("silero-vad", "silero_vad_16k_op15.onnx", speech((1, 512), (3, 512)), (RATES[0],) * 2),
    Real("silero-vad", "silero_vad_16k_sequence.onnx",
         tuple({"input": (n, 576), "h": (1, 1, 128), "c": (1, 1, 128)} for n in (4, 9))),
    Real("silero-vad", "silero_vad_half.onnx", speech((1, 512), (3, 512))),
    Real("silero-vad", "silero_vad_op18_ifless.onnx", speech((1, 512), (3, 256)), RATES),
    Real("silero-vad", "silero_vad_openvino_16k.onnx", speech((1, 576))),
    Real("magika", "model.onnx", image((1, 2048), (3, 2048), name="bytes")),
    Real("nudenet", "320n.onnx", image((1, 3, 320, 320), (2, 3, 192, 256), name="images")),
)  # fmt: skip


@cache
def files(package: str) -> dict[str, Path]:
    """The ONNX files of an installed package by their names; empty where it is not installed."""
    try:
        listed = metadata.files(package) or []
    except metadata.PackageNotFoundError:
        return {}
    return {f.name: Path(str(f.locate())) for f in listed if f.name.endswith(".onnx")}


def located(real: Real) -> Path:
    if not files(real.package):
        pytest.skip(f"the package {real.package} is not installed (the `models` extra of taso)")
    assert real.file in files(real.package), f"{real.package} has no {real.file}, only {sorted(files(real.package))}"
    return files(real.package)[real.file]


def opaque(graph: taso.Graph) -> Counter[str]:
    """Operators without a type rule of ours, those with bodies left aside."""
    return Counter(n.op.label for n in graph.operators if n.op.has(Trait.OPAQUE))


@pytest.mark.parametrize("real", REAL, ids=lambda r: r.name)
def test_real_model_comes_through(real: Real, record_property: Callable[[str, object], None]) -> None:
    proto = real.model()
    graph = taso.load(proto if real.saturates else located(real))
    types = real.types()
    best = taso.optimize(graph, budget=30, time_limit=30, backend=FormulaBackend(), verify=False, never_slower=False,
                         progress=False, input_shapes=real.shapes[0])  # fmt: skip
    after = taso.export_onnx(best)
    onnx.checker.check_model(after, full_check=True)
    weights = {t.name for t in proto.graph.initializer}
    assert [v for v in proto.graph.input if v.name not in weights] == list(after.graph.input)[: len(graph.inputs)]
    assert after.graph.output == proto.graph.output
    record_property("opaque", dict(opaque(graph)))
    record_property("operators", len(graph.operators))
    record_property("rewrites", len(best.report.rewrites) if best.report else 0)
    wrong = []
    for which in range(len(real.shapes)):
        program = taso.compile(best, backend=BACKEND)
        for seed in range(3):
            feeds = real.feeds(which, seed, types)
            wanted = models.by_onnxruntime(proto, feeds)
            ours = list(program(feeds).values())
            for what, found in (("exported", models.by_onnxruntime(after, feeds)), ("on our backend", ours)):
                worst = max(
                    models.relative_error(np.asarray(a), np.asarray(b)) for a, b in zip(found, wanted, strict=True)
                )
                if worst > TOLERANCE:
                    wrong.append(f"{what}, at {real.shapes[which]}, seed {seed}: the relative error is {worst:.2e}")
        if isinstance(program, Program):
            wrong += [f"{op} has no kernel, at {real.shapes[which]}" for op in without_kernel(program)]
    assert not wrong


def without_kernel(program: Program) -> list[str]:
    """Operators of the latest run that were evaluated by their definitions."""
    assert program.operators, "nothing ran"
    return [op for op, how in program.operators if how != "own"]


@pytest.mark.skipif(BACKEND != "onednn", reason="oneDNN does not load here")
@pytest.mark.parametrize("real", REAL, ids=lambda r: r.name)
def test_every_operator_of_a_real_model_runs_on_a_kernel_of_onednns_backend(real: Real) -> None:
    located(real)
    program = taso.compile(taso.load(real.model()), backend="onednn")
    assert isinstance(program, Program)
    for which in range(len(real.shapes)):
        program(real.feeds(which, 0, real.types()))
        assert without_kernel(program) == []
        assert LISTED[f"{real.name} {which}"].endswith(" own, 0 definition, 0 fallback")


def test_the_list_of_own_kernels_has_every_model() -> None:
    assert set(LISTED) == {f"{real.name} {which}" for real in REAL for which in range(len(real.shapes))}


@pytest.mark.parametrize("package", PACKAGES)
def test_no_model_of_the_packages_is_left_out(package: str) -> None:
    if not files(package):
        pytest.skip(f"the package {package} is not installed (the `models` extra of taso)")
    assert set(files(package)) == {r.file for r in REAL if r.package == package}
