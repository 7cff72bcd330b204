"""What plans of memory know of kernels on the device: workspaces of cuDNN's plans, and what programs take."""

from __future__ import annotations

import ctypes
import random
from collections.abc import Callable, Mapping

import numpy as np
import pytest
from hosted import compiler
from hosts import host_backend, kernels
from searching import random_graph as images_and_matrices
from test_onednn_executor import Build, feeds_for, worst

from taso.backends.cudnn.backend import CudnnBackend
from taso.backends.cudnn.description import Description
from taso.backends.cudnn.device import Planned
from taso.backends.cudnn.host import HostDevice
from taso.backends.cudnn.interpreted import Interpreted
from taso.backends.lowering import lower
from taso.backends.ordering import planned_peak
from taso.graph.evaluate import evaluate_graph
from taso.graph.graph import Graph

WORKSPACE = 1 << 20


class Working(Interpreted):
    """A graph that writes all over its workspace before it runs."""

    workspace = WORKSPACE

    def bind(self, addresses: Mapping[int, int], workspace: int) -> Callable[[], None]:
        run = super().bind(addresses, workspace)
        memory = np.ctypeslib.as_array((ctypes.c_ubyte * WORKSPACE).from_address(workspace))

        def spoiled() -> None:
            memory[:] = 0xFB
            run()

        return spoiled


class Spacious(HostDevice):
    """A device whose cuDNN needs room."""

    def plan(self, description: Description) -> Planned:
        return Working(description)


def spacious(precision: str = "float32") -> CudnnBackend:
    return CudnnBackend(precision, Spacious(kernels() if compiler() else None))


def convolutions() -> Graph:
    b = Build()
    x = b.op("Relu", b.conv(b.input(1, 8, 9, 9), 8, 3))
    return b.outputs(b.op("Exp", b.op("Add", b.conv(x, 8, 3), x)))


def test_the_workspace_of_a_plan_is_scratch_memory_of_its_kernel() -> None:
    graph, backend = convolutions(), spacious()
    jobs = lower(graph, backend.lowering).jobs
    convolving = [j.kernel for j in jobs if j.kernel.steps[0].op.name == "Conv"]
    assert convolving and all(backend.lowering.scratch(k) >= WORKSPACE for k in convolving)
    plain = host_backend()
    more = [backend.lowering.scratch(k) - plain.lowering.scratch(k) for k in convolving]
    assert more == [WORKSPACE] * len(convolving)


def test_programs_take_what_their_plans_say_workspaces_included() -> None:
    graph, backend = convolutions(), spacious()
    program = backend.compile(graph)
    assert program.peak_bytes == planned_peak(graph, backend.lowering) > WORKSPACE
    assert program.peak_bytes > host_backend().compile(graph).peak_bytes
    feeds = feeds_for(graph)
    assert worst(program(feeds), evaluate_graph(graph, feeds, wide=True)) <= 1e-5


@pytest.mark.parametrize("precision", ["float32", "fp16"])
def test_random_programs_take_as_much_memory_as_their_plans_say(precision: str) -> None:
    """To the byte, but for parts of tensors that begin where the GPU cannot read them: these are copied."""
    backend, more = spacious(precision), []
    for seed in range(30):
        graph = images_and_matrices(random.Random(seed))
        planned = planned_peak(graph, backend.lowering)
        assert planned is not None
        more.append(backend.compile(graph).peak_bytes - planned)
    assert sum(m == 0 for m in more) >= 27 and all(0 <= m < 4096 for m in more)
