"""What one run of a kernel takes on the device, by its own events.

A run is a replay of a captured graph of so many repetitions that the events' grain does not matter, after replays that
bring the clocks up. In a model a kernel's operands have just been written, and its weights come from memory: the
repetitions read copies of the weights in turn, which together are more than the last cache holds.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from taso.backends.cudnn.device import Device, Flag
from taso.backends.cudnn.kernels import design
from taso.backends.cudnn.launching import replays
from taso.backends.lowering import Kernel, Lowering
from taso.backends.places import Block, tensor_bytes
from taso.backends.recipe import Call, Recipe
from taso.backends.sampling import RandomSupply, random_array

METHOD = 1
"""Goes up when times would come out otherwise: costs measured before count no more."""

_SECONDS_OF_A_REPLAY = 2e-3
_MOST_REPETITIONS = 256
_MOST_COPIES = 16
_COPIES_BYTES = 512 << 20
_WARM = 3
_LEAST_SAMPLES, _MOST_SAMPLES = 5, 25
_NEAR = 1.02


def measured(kernel: Kernel, lowering: Lowering, device: Device) -> float:
    """Seconds of one run on buffers of its own, filled with random numbers: the median of several replays.

    Raises `BackendError` where the device's memory does not hold what the kernel needs, or the kernel fails.
    """
    with device.working("measuring a kernel"):
        supply = RandomSupply(kernel)
        recipe = design(kernel, device, supply, lowering.precision)
        if not recipe.launches:
            return 0.0
        sets = _sets(recipe, kernel, device)
        operands = [_filled(device, kernel, i) for i in range(len(kernel.operands))]
        results = [device.reserve(tensor_bytes(r.type)) for r in kernel.results]
        scratch = [device.reserve(size) for size in recipe.scratch]
        buffers = [[b.address for b in blocks] for blocks in (operands, results, scratch)]
        bound = [replace(recipe, constants=constants).bind(*buffers) for constants in sets]
        runs = [[call for call, _ in calls] for calls in bound]
        if not all(map(replays, recipe.launches)):
            return _median(device, _in_order(runs[0]))
        return _repeated(device, runs)


def _sets(recipe: Recipe, kernel: Kernel, device: Device) -> list[list[Block]]:
    """The weights, and copies of them, so that all together are not at hand."""
    size = sum(tensor_bytes(o.type) for o in kernel.operands if o.constant)
    if not size or not recipe.constants:
        return [recipe.constants]
    count = min(max(2 * device.cache_bytes // size, 1), _MOST_COPIES, max(_COPIES_BYTES // size, 1))
    return [recipe.constants, *([_copied(device, b) for b in recipe.constants] for _ in range(count - 1))]


def _copied(device: Device, block: Block) -> Block:
    if isinstance(block.owner, Flag):
        return block
    size = getattr(block.owner, "nbytes", 0)
    copy = device.reserve(size)
    device.copy(copy.address, block.address, size)
    return copy


def _filled(device: Device, kernel: Kernel, number: int) -> Block:
    operand = kernel.operands[number]
    if operand.constant:
        return Block(0, None)
    # of a random tensor every layout is as good
    return device.lay_out(np.ascontiguousarray(random_array(operand, number)))


def _in_order(calls: Sequence[Call]) -> Call:
    def run() -> None:
        for call in calls:
            call()

    return run


def _repeated(device: Device, runs: Sequence[Sequence[Call]]) -> float:
    """Seconds of one run, from replays of many, which go through `runs` in turn."""
    once = device.seconds(device.replayed(runs[0]))
    wanted = math.ceil(_SECONDS_OF_A_REPLAY / max(once, 1e-7))
    count = min(max(wanted, len(runs)), _MOST_REPETITIONS)
    together = device.replayed([call for turn in range(count) for call in runs[turn % len(runs)]])
    return _median(device, together) / count


def _median(device: Device, call: Call) -> float:
    """Seconds of a call when it has been made a few times: of so many samples that the faster half of them agree."""
    for _ in range(_WARM):
        device.seconds(call)
    samples: list[float] = []
    while len(samples) < _LEAST_SAMPLES or len(samples) < _MOST_SAMPLES and not _stable(samples):
        samples.append(device.seconds(call))
    return statistics.median(samples)


def _stable(samples: Sequence[float]) -> bool:
    ordered = sorted(samples)
    return ordered[len(ordered) // 2] < _NEAR * ordered[0]
