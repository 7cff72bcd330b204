"""Our CUDA sources: NVRTC compiles them, and run on the host they give what the operators' definitions give."""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import hosted
import numpy as np
import pytest
from drawn import drawn
from hosted import Library, Trial, compiled_by_nvrtc, compiler, nvrtc, run
from models import relative_error
from trials import GROUPS as LISTED

from taso.backends.cudnn.sources.kernels import sourced

GROUPS = {**LISTED, "drawn": drawn}

needs_compiler = pytest.mark.skipif(compiler() is None, reason="there is no C++ compiler here")
needs_nvrtc = pytest.mark.skipif(nvrtc() is None, reason="there is no NVRTC here")


@cache
def trials(group: str) -> dict[str, Trial]:
    found: dict[str, Trial] = {}
    for trial in GROUPS[group]():
        assert trial.name not in found, f"two trials are called '{trial.name}'"
        trial.sourced = sourced(trial.kernel)
        found[trial.name] = trial
    return found


ALL = [(group, name) for group in GROUPS for name in trials(group)]


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Library]]:
    """Every group's sources, compiled when the first trial asks for them."""
    yield Libraries(tmp_path_factory.mktemp("sources"))


class Libraries(dict[str, Library]):
    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder

    def __missing__(self, group: str) -> Library:
        sources = [x.source for t in trials(group).values() if t.sourced for x in t.sourced.launches]
        self[group] = Library(sources, self.folder)
        return self[group]


def wrong(trial: Trial, library: Library, shift: int, backwards: bool) -> str:
    """What is wrong with the results of a trial, empty where nothing is."""
    found = run(trial, library, shift, backwards)
    for a, b in zip(found, trial.truth, strict=True):
        # onnx.reference adds up small integers in large ones
        wanted = np.asarray(b).astype(a.dtype) if a.dtype.kind in "iu" else np.asarray(b)
        if a.dtype.kind in "iu" and not np.array_equal(a, wanted):
            return "other integers"
        with np.errstate(all="ignore"):
            error = relative_error(a, wanted)
        if not error <= trial.tolerance:
            return f"relative error {error}"
    return ""


@needs_compiler
@pytest.mark.parametrize(("group", "name"), ALL)
def test_run_on_the_host_a_kernel_gives_what_its_operators_define(
    libraries: dict[str, Library], group: str, name: str
) -> None:
    trial = trials(group)[name]
    assert trial.sourced is not None, "not covered"
    for shift, backwards in ((0, False), (1, True)):
        # off by one element nothing is aligned; backwards, what a barrier is missing for is read too early
        assert wrong(trial, libraries[group], shift, backwards) == ""


@needs_nvrtc
@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("architecture", ["sm_80", "sm_90"])
def test_nvrtc_compiles_the_sources(group: str, architecture: str) -> None:
    sources = {x.source.entry: x.source for t in trials(group).values() if t.sourced for x in t.sourced.launches}
    if not os.environ.get("TASO_NIGHTLY"):
        # one of every kind, and some more
        kinds = {s.name: s for s in sources.values()}
        sources = {s.entry: s for s in (*kinds.values(), *list(sources.values())[::10])}
    said = {entry: compiled_by_nvrtc(s.code, architecture) for entry, s in sources.items()}
    assert {entry: text for entry, text in said.items() if text} == {}


__all__ = ["hosted"]
