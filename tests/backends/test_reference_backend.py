"""The reference backend, and choosing a backend by name."""

from __future__ import annotations

import logging

import numpy as np
import pytest

import taso.graph.ops  # noqa: F401  # registers the operators
from taso.backends import select
from taso.backends.lowering import lower
from taso.backends.reference import BYTES_PER_SECOND, OPERATIONS_PER_SECOND, SECONDS_PER_KERNEL, ReferenceBackend
from taso.backends.select import get_backend
from taso.graph.errors import BackendError, BackendUnavailable, InputError
from taso.graph.graph import Graph
from taso.graph.operator import REGISTRY, Weight
from taso.graph.types import DType, TensorType


def product_of(rows: int) -> Graph:
    graph = Graph()
    x = graph.add_input("x", TensorType(DType.FLOAT, (rows, 8)))
    w = np.random.default_rng(0).standard_normal((8, 4)).astype(np.float32)
    weight = graph.add_weight(Weight(TensorType(DType.FLOAT, w.shape), w))
    product = graph.make(REGISTRY["MatMul"], (x, weight)).output
    graph.set_outputs([("y", graph.make(REGISTRY["Reshape"], (product,), {"shape": (4, -1)}).output), ("w", weight)])
    return graph


def test_the_reference_computes_in_numpy() -> None:
    graph = product_of(6)
    x = np.random.default_rng(1).standard_normal((6, 8)).astype(np.float32)
    got = ReferenceBackend().compile(graph)({"x": x})
    wanted = (x.astype(np.float64) @ got["w"]).reshape(4, 6)
    assert np.abs(got["y"] - wanted).max() <= 1e-6 * np.abs(wanted).max()


def test_outputs_that_are_weights_are_copies() -> None:
    program = ReferenceBackend().compile(product_of(6))
    feeds = {"x": np.zeros((6, 8), np.float32)}
    first = program(feeds)["w"]
    kept = first.copy()
    first[:] = 0
    assert np.array_equal(program(feeds)["w"], kept)


def test_wrong_inputs_are_refused() -> None:
    with pytest.raises(InputError, match="'x'"):
        ReferenceBackend().compile(product_of(6))({"x": np.zeros((5, 8), np.float32)})


def test_costs_follow_the_stated_formula() -> None:
    backend = ReferenceBackend()
    product, view = lower(product_of(6), backend.lowering).jobs
    size = 4 * (6 * 8 + 8 * 4 + 6 * 4)
    wanted = 2 * 6 * 8 * 4 / OPERATIONS_PER_SECOND + size / BYTES_PER_SECOND + SECONDS_PER_KERNEL
    assert backend.measure(product.kernel) == pytest.approx(wanted)
    assert backend.measure(view.kernel) == 0 and not backend.measures


def test_a_backend_is_found_by_name_and_passed_on_as_it_is() -> None:
    backend = get_backend("reference")
    assert backend.name == "reference" and get_backend(backend) is backend


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(BackendError, match="onednn.*reference"):
        get_backend("fastest")


def test_auto_falls_back_to_the_reference_and_says_why(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def missing(*given: object) -> None:
        raise BackendUnavailable("the library is not installed")

    monkeypatch.setattr(select, "CudnnBackend", missing)
    monkeypatch.setattr(select, "OneDNNBackend", missing)
    with caplog.at_level(logging.WARNING):
        assert get_backend().name == "reference"
    assert "not installed" in caplog.text
