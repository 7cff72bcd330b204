"""An index that points outside is an error on the device, too, and harms neither memory nor the next run."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from fake_cupy import FakeCupy
from hosted import compiler
from hosts import host_backend, kernels
from test_device import device_of
from test_onednn_executor import Build

from taso.backends.cudnn.backend import CudnnBackend
from taso.backends.lowering import lower
from taso.backends.reference import ReferenceBackend
from taso.graph.errors import BackendError, TasoError
from taso.graph.graph import Graph, Value
from taso.graph.types import DType

pytestmark = pytest.mark.skipif(not compiler(), reason="there is no C++ compiler here")

INT = DType.INT64
CASES: dict[str, tuple[Callable[[Build], Value], list[object], list[object]]] = {
    "Gather": (lambda b: b.op("Gather", b.input(3, 4), b.input(2, dtype=INT)), [0, -3], [1, 3]),
    "Gather of an axis behind": (
        lambda b: b.op("Gather", b.input(3, 4), b.input(2, dtype=INT), axis=1), [3, -4], [0, -5]
    ),
    "Gather and a step": (
        lambda b: b.op("Relu", b.op("Gather", b.input(3, 4), b.input(2, dtype=INT))), [2, 2], [-4, 2]
    ),
    "GatherElements": (
        lambda b: b.op("GatherElements", b.input(3, 2), b.input(1, 2, dtype=INT)), [[2, -3]], [[2, 3]]
    ),
    "GatherND": (
        lambda b: b.op("GatherND", b.input(3, 4), b.input(2, 2, dtype=INT)), [[2, 3], [0, -4]], [[2, 4], [0, 0]]
    ),
    "ScatterElements": (
        lambda b: b.op("ScatterElements", b.input(3, 2), b.input(1, 2, dtype=INT), b.input(1, 2)), [[0, -1]], [[0, 9]]
    ),
    "ScatterND": (
        lambda b: b.op("ScatterND", b.input(3, 2), b.input(2, 1, dtype=INT), b.input(2, 2)), [[0], [-1]], [[0], [-4]]
    ),
}  # fmt: skip


def backend(on: str) -> CudnnBackend:
    return host_backend() if on == "host" else CudnnBackend(device=device_of(FakeCupy(compiler=kernels())))


def feeds(graph: Graph, indices: list[object]) -> dict[str, np.ndarray]:
    random = np.random.default_rng(0)
    return {
        name: np.asarray(indices, np.int64) if v.type.dtype is INT
        else random.standard_normal(v.type.static_shape).astype(np.float32)
        for name, v in zip(graph.input_names, graph.inputs, strict=True)
    }  # fmt: skip


@pytest.mark.parametrize("on", ["host", "stand-in"])
@pytest.mark.parametrize("name", CASES)
def test_an_index_that_points_outside_is_an_error_and_the_next_run_is_right(name: str, on: str) -> None:
    make, good, bad = CASES[name]
    b = Build()
    graph = b.outputs(make(b))
    program, others = backend(on).compile(graph), ReferenceBackend().compile(graph)
    assert {how for _, how in program.operators} == {"own"}
    for _ in range(2):
        # an error is told once, and the next run is as if there had been none
        (found,), (wanted,) = (p(feeds(graph, good)).values() for p in (program, others))
        np.testing.assert_array_equal(found, wanted)
        with pytest.raises(BackendError, match="an index lies outside what it points into"):
            program(feeds(graph, bad))


def test_the_error_names_the_kernel_and_other_programs_go_on() -> None:
    b, other = Build(), Build()
    graph = b.outputs(CASES["Gather and a step"][0](b))
    beside = other.outputs(CASES["Gather"][0](other))
    on = backend("host")
    program, second = on.compile(graph), on.compile(beside)
    with pytest.raises(BackendError, match="^Gather: an index"):
        program(feeds(graph, [0, 7]))
    second(feeds(beside, [0, 1]))


def test_an_error_that_nobody_waited_for_comes_with_the_next_run() -> None:
    b = Build()
    graph = b.outputs(CASES["Gather"][0](b))
    fake = FakeCupy(compiler=kernels())
    program = CudnnBackend(device=device_of(fake)).compile(graph)
    fixed = program._fixed
    assert fixed is not None
    (flag,) = fixed._flags  # type: ignore[attr-defined]  # a program of this backend
    # a GPU that is behind: what it reports comes when the call has returned
    flag._cell[0] = 1
    with pytest.raises(BackendError, match="Gather: an index"):
        program(feeds(graph, [0, 1]))
    program(feeds(graph, [0, 1]))


def test_constant_indices_that_point_outside_are_an_error_too() -> None:
    b = Build()
    graph = b.outputs(b.op("Gather", b.input(3, 2), b.constant(np.array([0, 5]))))
    with pytest.raises(TasoError, match="outside"):
        backend("host").compile(graph)({"x0": np.zeros((3, 2), np.float32)})


def test_measuring_a_gather_reports_nothing() -> None:
    b = Build()
    graph = b.outputs(b.op("Gather", b.input(1, 2), b.input(2, dtype=INT)))
    on = backend("host")


    (job,) = lower(graph, on.lowering).jobs
    # random indices are 0 or 1, and the axis has one place
    assert on.measure(job.kernel) > 0
