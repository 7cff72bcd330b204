"""ONNX's own tests of single operators, as far as one kernel of ours computes them, run on the host."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hosted import Array, Library, Trial, compiler, run
from models import node_tests, relative_error
from onnx.backend.test.case.test_case import TestCase

import taso
from taso.backends.cudnn.sources.kernels import sourced
from taso.backends.lowering import Lowering, lower
from taso.graph.errors import TasoError
from taso.graph.evaluate import weight_of
from taso.graph.types import DType

TOLERANCES = {DType.FLOAT16: 2e-3, DType.BFLOAT16: 2e-2}


def covered() -> Iterator[Trial]:
    """The tests of which one kernel of ours is the whole."""
    for name, test in node_tests().items():
        inputs, outputs = next(iter(test.data_sets or ()), ((), ()))
        if all(isinstance(a, np.ndarray) for a in (*inputs, *outputs)):
            found = trial_of(name, test, inputs, outputs)
            if found is not None:
                yield found


def trial_of(name: str, test: TestCase, inputs: list[Array], outputs: list[Array]) -> Trial | None:
    try:
        graph = taso.load(test.model)
        jobs = lower(graph, Lowering()).jobs
    except TasoError:
        return None
    found = sourced(jobs[0].kernel) if len(jobs) == 1 else None
    if found is None:
        return None
    fed = dict(zip(graph.inputs, inputs, strict=True))
    arrays = [np.asarray(fed[v]) if v in fed else weight_of(v).array() for v in jobs[0].operands]
    values = [v for _, v in graph.outputs]
    wanted = [np.asarray(outputs[values.index(v)]) if v in values else None for v in jobs[0].results]
    tolerance = max(TOLERANCES.get(r.type.dtype, 1e-4) for r in jobs[0].kernel.results)
    return Trial(name, jobs[0].kernel, arrays, tolerance, found, wanted)  # type: ignore[arg-type]  # None: not in use


@pytest.mark.slow
@pytest.mark.skipif(compiler() is None, reason="there is no C++ compiler here")
def test_kernels_of_ours_pass_the_node_tests_that_they_cover(tmp_path: Path) -> None:
    trials = list(covered())
    assert len(trials) > 500
    library = Library([x.source for t in trials if t.sourced for x in t.sourced.launches], tmp_path, 200)
    failed = {}
    for trial in trials:
        for found, wanted in zip(run(trial, library), trial.truth, strict=True):
            with np.errstate(all="ignore"):
                error = 0.0 if wanted is None else relative_error(found, wanted)
            if not error <= trial.tolerance:
                failed[trial.name] = error
    assert failed == {}
