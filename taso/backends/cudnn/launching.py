"""What a kernel launches on a device: cuDNN graphs, kernels of ours, copies, and definitions on the host."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from taso.backends.base import Array
from taso.backends.cudnn.device import Device, Extent, Launchable, Planned
from taso.backends.places import OPERAND, RESULT, SCRATCH, ArraySpec, Place
from taso.backends.recipe import Call, Launch

Address = Callable[[Place], int]


@dataclass(frozen=True)
class GraphLaunch:
    """A cuDNN graph; `arguments` are the places of its tensors by their numbers."""

    name: str
    planned: Planned
    arguments: Mapping[int, Place]
    workspace: Place | None

    def bind(self, address: Address) -> tuple[Call, object]:
        addresses = {number: address(place) for number, place in self.arguments.items()}
        return self.planned.bind(addresses, 0 if self.workspace is None else address(self.workspace)), self.planned


@dataclass(frozen=True)
class KernelLaunch:
    """A kernel of ours."""

    name: str
    function: Launchable
    grid: Extent
    block: Extent
    shared: int
    arguments: tuple[Place | int | float, ...]

    def bind(self, address: Address) -> tuple[Call, object]:
        arguments = tuple(_argument(a, address) for a in self.arguments)
        function, grid, block, shared = self.function, self.grid, self.block, self.shared
        return lambda: function(grid, block, shared, arguments), None


def _argument(argument: Place | int | float, address: Address) -> object:
    """As kernels declare them: addresses and integers of 64 bits, float32."""
    if isinstance(argument, Place):
        return np.uint64(address(argument))
    return np.int64(argument) if isinstance(argument, int) else np.float32(argument)


@dataclass(frozen=True)
class MoveLaunch:
    """Elements moved from where one array lies to where another of the same shape does."""

    name: str
    device: Device
    source: ArraySpec
    target: ArraySpec

    def bind(self, address: Address) -> tuple[Call, object]:
        source, target = (self.device.view(s, address(s.place)) for s in (self.source, self.target))
        return lambda: self.device.fill(target, source), None


@dataclass(frozen=True)
class ProductLaunch:
    """A matrix product by the library of the device's arrays."""

    name: str
    device: Device
    inputs: tuple[ArraySpec, ...]
    target: ArraySpec

    def bind(self, address: Address) -> tuple[Call, object]:
        first, second = (self.device.view(spec, address(spec.place)) for spec in self.inputs)
        target = self.device.view(self.target, address(self.target.place))
        return lambda: self.device.multiply(first, second, target), None


@dataclass(frozen=True)
class BytesLaunch:
    """A stretch of memory copied."""

    name: str
    device: Device
    source: Place
    target: Place
    count: int

    def bind(self, address: Address) -> tuple[Call, object]:
        source, target = address(self.source), address(self.target)
        return lambda: self.device.copy(target, source, self.count), None


@dataclass(frozen=True)
class HostLaunch:
    """Arrays fetched to the host, a function of them there, and its results brought back: what nothing replays."""

    name: str
    device: Device
    function: Callable[[Sequence[Array]], Sequence[Array]]
    inputs: tuple[ArraySpec, ...]
    outputs: tuple[ArraySpec, ...]

    def bind(self, address: Address) -> tuple[Call, object]:
        device, function = self.device, self.function
        given = [(device.view(spec, address(spec.place)), spec.dtype) for spec in self.inputs]
        made = [device.view(spec, address(spec.place)) for spec in self.outputs]

        def run() -> None:
            for view, array in zip(made, function([device.fetched(v, dtype) for v, dtype in given]), strict=True):
                device.fill(view, array)

        return run, None


@dataclass(frozen=True)
class PartLaunch:
    """A launch of a kernel that is a part of another: where in the other's buffers those of the part are."""

    launch: Launch
    operands: tuple[Place, ...]
    results: tuple[Place, ...]
    scratch: tuple[Place, ...]
    constants: tuple[Place, ...]

    @property
    def name(self) -> str:
        return self.launch.name

    def bind(self, address: Address) -> tuple[Call, object]:
        return self.launch.bind(lambda place: address(self.whole(place)))

    def whole(self, place: Place) -> Place:
        """A place of the part, as one of the whole."""
        table = {OPERAND: self.operands, RESULT: self.results, SCRATCH: self.scratch}
        found = table.get(place.kind, self.constants)[place.index]
        return replace(found, offset=found.offset + place.offset)


def replays(launch: Launch) -> bool:
    """Whether a launch does the same each time without the host, so that it can be captured."""
    return replays(launch.launch) if isinstance(launch, PartLaunch) else not isinstance(launch, HostLaunch)
