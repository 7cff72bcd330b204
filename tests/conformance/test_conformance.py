"""ONNX's backend tests pass on the reference backend, on oneDNN and on cuDNN, each after optimize, as the lists say.

Where there is no GPU, cuDNN's cases run in ordinary memory: those that its kernels, or definitions, compute (what
onnx.reference computes says nothing of them). Large models, and functions written out, whose operators have cases of
their own, run on oneDNN; on the others, where they take long, they run where TASO_NIGHTLY is set.
"""

from __future__ import annotations

import os
import warnings
from collections import Counter

import backend_cases as cases
import numpy as np
import pytest
from hosts import gpu_missing
from onnx import TensorProto, helper

from taso.backends.onednn.backend import OneDNNBackend
from taso.graph.errors import BackendUnavailable
from taso.onnx_backend import TasoBackend

GOAL = 0.95
SAME_VERSION = cases.installed_version() == cases.listed_version()
LISTED = {backend: cases.listed(backend) for backend in cases.BACKENDS}
EXCLUDED = {backend: cases.excluded(backend) for backend in cases.BACKENDS}


def _has_onednn() -> bool:
    try:
        OneDNNBackend()
    except BackendUnavailable:
        return False
    return True


RUN_ON = [
    pytest.param(b, marks=pytest.mark.skipif(b == "onednn" and not _has_onednn(), reason="oneDNN does not load here"))
    for b in cases.BACKENDS
]  # fmt: skip


def _tried(backend: str) -> list[str]:
    found = list(LISTED[backend])
    if backend == "cudnn" and gpu_missing():
        found = [case for case, how in LISTED[backend].items() if how != cases.FALLBACK]
    here = not gpu_missing() if backend == "cudnn" else backend == "onednn" or not _has_onednn()
    if here or os.environ.get("TASO_NIGHTLY"):
        return found
    return [case for case in found if "_expanded" not in case and not _is_large(case)]


def _is_large(case: str) -> bool:
    return case.startswith("light/") and case != "light/test_squeezenet"


def _batches(backend: str, size: int = 50) -> list[list[str]]:
    listed = _tried(backend)
    return [listed[i : i + size] for i in range(0, len(listed), size)]


@pytest.mark.parametrize("backend", RUN_ON)
@pytest.mark.parametrize("number", range(max(len(_batches(b)) for b in cases.BACKENDS)))
def test_listed_cases_pass(backend: str, number: int) -> None:
    known = set(cases.names())
    batch = _batches(backend)[number] if number < len(_batches(backend)) else []
    failed, helped = [], []
    if backend == "cudnn":
        cases.made_ready([case for case in batch if case in known])
    for case in batch:
        if case not in known:
            # another version of onnx does not have it
            assert not SAME_VERSION, f"there is no case {case}"
            continue
        result = cases.run(case, backend)
        if result.error:
            failed.append(f"{case}: {result.error}")
        elif result.how == cases.FALLBACK and LISTED[backend][case] != cases.FALLBACK:
            helped.append(case)
    assert not failed
    assert not helped, "these ran with the help of onnx.reference and should not"


@pytest.mark.parametrize("backend", RUN_ON)
def test_cases_that_are_not_listed_fail_for_the_reason_given(backend: str) -> None:
    left = [case for case in cases.names() if case not in LISTED[backend]]
    if not SAME_VERSION:
        # cases that a newer onnx brings have no reason yet
        new = [case for case in left if case not in EXCLUDED[backend]]
        warnings.warn(f"{len(new)} cases of onnx {cases.installed_version()} are in no list", stacklevel=1)
        return
    assert [case for case in left if case not in EXCLUDED[backend]] == []
    may_pass = {case for case, reason in EXCLUDED[backend].items() if reason.startswith(("random", "needs"))}
    passing = [case for case in left if case not in may_pass and not cases.run(case, backend).error]
    assert passing == [], "these pass and are not listed: run tests/conformance/list_cases.py"


@pytest.mark.skipif(not SAME_VERSION, reason="the lists are of another version of onnx")
def test_the_lists_reach_the_goal() -> None:
    default = cases.default_domain()
    listed = LISTED["reference"]
    assert sum(case in default for case in listed) >= GOAL * len(default)
    missing = Counter(case.split("/")[0] for case in cases.names() if case not in listed and case not in default)
    assert missing["light"] == missing["pytorch-converted"] == missing["pytorch-operator"] == 0
    training = {"simple/test_gradient_of_add", "simple/test_gradient_of_add_and_mul"}
    assert {c for c in cases.names() if c.startswith("simple/") and c not in listed} <= training


def test_no_case_is_both_listed_and_excluded() -> None:
    for backend in cases.BACKENDS:
        assert LISTED[backend].keys() & EXCLUDED[backend].keys() == set()


# ── the comparison itself ────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "found, wanted",
    [
        (np.zeros(2, np.float32), np.zeros(3, np.float32)), (np.zeros(2, np.float32), np.zeros(2)),
        (np.zeros((1, 2)), np.zeros(2)), (np.array([1.0, 2]), np.array([1.0, 2.01])),
        (np.array([1, 2]), np.array([1, 3])), (np.array([np.nan]), np.array([1.0])), (1.0, np.float64(1.0)),
        (np.array(["a"], object), np.array(["b"], object)), ([np.zeros(1)], [np.zeros(1), np.zeros(1)]),
        ([np.zeros(1)], [np.ones(1)]), (np.zeros(1), [np.zeros(1)]), (None, np.zeros(1)), (np.zeros(1), None),
    ],
)  # fmt: skip
def test_a_difference_is_seen(found: object, wanted: object) -> None:
    with pytest.raises(AssertionError):
        cases.Comparing.assert_similar_outputs([wanted], [found], 1e-3, 1e-7)


def test_an_output_too_few_is_seen() -> None:
    with pytest.raises(AssertionError):
        cases.Comparing.assert_similar_outputs([np.zeros(1), np.zeros(1)], [np.zeros(1)], 1e-3, 1e-7)


def test_equal_outputs_are_counted() -> None:
    before = cases.Comparing.compared
    cases.Comparing.assert_similar_outputs([np.ones(2), [np.ones(1), np.array("a", object)], None],
                                           [np.ones(2), [np.ones(1), np.array("a", object)], None], 1e-3, 1e-7)
    assert cases.Comparing.compared == before + 4


class _Wrong(cases.OnReference):
    """Gives results that are off by one part in a hundred."""

    @classmethod
    def prepare(cls, model: object, device: str = "CPU", **kwargs: object) -> cases.WatchedRep:
        rep = super().prepare(model, device, **kwargs)  # type: ignore[arg-type]  # as the runner gives it
        run = rep.run
        rep.run = lambda inputs, **k: tuple(np.asarray(a) * a.dtype.type(1.01) for a in run(inputs, **k))  # type: ignore[method-assign]
        return rep


@pytest.mark.parametrize("case", ["node/test_add", "node/test_softmax_axis_1", "simple/test_single_relu_model"])
def test_a_wrong_backend_fails(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    official = cases.Comparing(_Wrong)
    monkeypatch.setattr(cases, "runner", lambda backend: official)
    assert cases.run(case, "reference").error


def test_a_model_of_several_nodes_is_optimized_before_it_runs() -> None:
    nodes = [helper.make_node("Identity", ["x"], ["a"]), helper.make_node("Transpose", ["a"], ["b"], perm=[1, 0]),
             helper.make_node("Transpose", ["b"], ["y"], perm=[1, 0])]  # fmt: skip
    x, y = (helper.make_tensor_value_info(n, TensorProto.FLOAT, [2, 3]) for n in "xy")
    rep = TasoBackend.prepare(helper.make_model(helper.make_graph(nodes, "g", [x], [y])), backend="reference")
    assert len(rep.graph.operators) < len(nodes)
