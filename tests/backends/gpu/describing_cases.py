"""Kernels for the tests of cuDNN graphs, what they give by their operators' definitions, and by the graph."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

import taso.graph.ops  # noqa: F401  # registers the operators
from taso.backends.cudnn.interpreted import Interpreted
from taso.backends.cudnn.sketch import CudnnLaunch, laid_out
from taso.backends.fallback import evaluated
from taso.backends.lowering import PLAIN, Kernel, Operand, Step
from taso.backends.onednn.places import OPERAND, strides_of
from taso.graph.operator import REGISTRY, AttrValue
from taso.graph.types import DType, TensorType

Array = NDArray[np.generic]


@dataclass(frozen=True)
class Given:
    """An operand of a test's kernel."""

    dims: tuple[int, ...]
    layout: str = PLAIN
    constant: bool = False
    dtype: DType = DType.FLOAT


@dataclass(frozen=True)
class Part:
    """A step: operator, attributes, and further operands by number (−1: what the step before made)."""

    name: str
    inputs: tuple[int | None, ...]
    attrs: tuple[tuple[str, AttrValue], ...] = ()


def part(name: str, *inputs: int | None, **attrs: AttrValue) -> Part:
    return Part(name, inputs, tuple(attrs.items()))


def made(given: Sequence[Given], parts: Sequence[Part], layout: str = PLAIN) -> Kernel:
    """A kernel of these operands and steps; inputs of −1 are what the step before makes."""
    operands = tuple(Operand(TensorType(g.dtype, g.dims), g.layout, g.constant) for g in given)
    steps: list[Step] = []
    last: tuple[TensorType, ...] = ()
    for number, p in enumerate(parts):
        op = REGISTRY[p.name]
        attrs = op.complete(dict(p.attrs))
        types = [None if i is None else last[0] if i < 0 else operands[i].type for i in p.inputs]
        last = tuple(op.types_of(types, attrs))
        steps.append(Step(op, attrs, tuple(-number if i == -1 else i for i in p.inputs)))
    return Kernel(operands, tuple(steps), tuple(Operand(t, layout, False) for t in last))


def arrays_of(kernel: Kernel, seed: int = 0, positive: bool = False) -> list[Array]:
    """Random values of a sane scale for all operands, plain."""
    rng = np.random.default_rng(seed)
    found = []
    for operand in kernel.operands:
        values = rng.standard_normal(operand.type.static_shape)
        found.append((np.abs(values) + 0.1 if positive else values).astype(operand.type.dtype.numpy))
    return found


def in_memory(array: Array, layout: str) -> Array:
    """The bytes of an array in a layout, as an array of one axis."""
    memory = np.zeros(array.size, array.dtype)
    steps = tuple(s * array.itemsize for s in strides_of(array.shape, layout))
    np.lib.stride_tricks.as_strided(memory, array.shape, steps)[...] = array
    return memory


def by_graph(kernel: Kernel, launch: CudnnLaunch, arrays: Sequence[Array]) -> Array:
    """What the launch's graph writes, as a plain array of the result's shape."""
    result = kernel.results[0]
    target = np.full(result.type.static_shape, np.nan, np.float32).astype(result.type.dtype.numpy).reshape(-1)
    memories: dict[int, Array] = {}
    tensors = launch.description.by_uid
    for uid, constant in launch.constants.items():
        memories[uid] = laid_out(arrays[constant.operand], constant, tensors[uid])
    for uid, place in launch.arguments.items():
        if place.kind == OPERAND:
            operand = kernel.operands[place.index]
            memories[uid] = in_memory(arrays[place.index], PLAIN if operand.constant else operand.layout)
        else:
            memories[uid] = target
    Interpreted(launch.description).bind({uid: m.ctypes.data for uid, m in memories.items()}, 0)()
    steps = tuple(s * target.itemsize for s in strides_of(result.type.static_shape, result.layout))
    return np.lib.stride_tricks.as_strided(target, result.type.static_shape, steps)


def by_definition(kernel: Kernel, arrays: Sequence[Array]) -> Array:
    return evaluated(kernel)(arrays)[0]


def apart(found: Array, wanted: Array) -> float:
    """max|a − b| / max|b|."""
    a, b = found.astype(np.float64), wanted.astype(np.float64)
    assert a.shape == b.shape
    return float(np.abs(a - b).max() / max(float(np.abs(b).max()), 1e-30))
