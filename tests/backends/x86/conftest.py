"""Tests of machine code run once for each set of instructions that there is code for."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
from machine_code import choose, isa, why_not

from taso.backends.onednn import coded
from taso.backends.onednn.library import library
from taso.backends.x86.assembler import AVX2, AVX512


@pytest.fixture(scope="module", params=[AVX512, AVX2], ids=lambda isa: isa.name)
def each_isa(request: pytest.FixtureRequest) -> Iterator[None]:
    """The instructions that `machine_code.isa` names are those of the parameter."""
    why = why_not(request.param)
    if why:
        pytest.skip(why)
    before = isa()
    choose(request.param)
    yield
    choose(before)


@pytest.fixture
def code_of_isa(each_isa: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The backend's machine code is made of these instructions, too, where the processor has wider ones."""
    found = library()
    chosen = SimpleNamespace(isa=isa().name, parallel_address=found.parallel_address)
    monkeypatch.setattr(coded, "library", lambda: chosen)
