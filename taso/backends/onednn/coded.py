"""What kernels of machine code (`taso.backends.x86`) take along of the steps behind them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Protocol

from taso.backends.base import Array
from taso.backends.lowering import PLAIN, Kernel, Layouts, Step
from taso.backends.onednn.attributes import EltwisePostOp
from taso.backends.onednn.library import library
from taso.backends.onednn.places import Block, Place, layouts_alike
from taso.backends.onednn.primitives import Unimplemented
from taso.backends.onednn.recipe import Recipe
from taso.backends.x86.assembler import AVX2, AVX512, Isa
from taso.backends.x86.code import runs_here
from taso.backends.x86.functions import Function, knows
from taso.backends.x86.launch import Coded, CodeLaunch
from taso.backends.x86.posts import ByColumn, ByElement, Post
from taso.graph.types import DType

_MOST_POSTS = 16


def isa_here() -> Isa | None:
    """The instructions that machine code is made of here, unless oneDNN is told to do without; None: there is none.
    """
    if not library().parallel_address or not runs_here():
        return None
    # oneDNN's own kernels for avx2 take FMA3 for granted, too
    return next((isa for isa in (AVX512, AVX2) if library().isa.startswith(isa.name)), None)


def needed_isa() -> Isa:
    """The same where it was asked for; raises `Unimplemented` where there is none."""
    isa = isa_here()
    if isa is None:
        raise Unimplemented("no machine code runs here")
    return isa


class Host(Protocol):
    """What the builder of a kernel's recipe does for these algorithms."""

    @property
    def kernel(self) -> Kernel: ...
    @property
    def layouts(self) -> Layouts: ...
    @property
    def recipe(self) -> Recipe: ...

    def index(self, step: Step, position: int) -> int: ...
    def has(self, step: Step, position: int) -> bool: ...
    def place(self, index: int) -> Place: ...
    def constant(self, index: int, label: str, make: Callable[[Array], Block]) -> Place: ...
    def behind(self, followers: Sequence[Step]) -> None: ...

    def functions(self, step: Step) -> tuple[EltwisePostOp, ...] | None:
        """A step as functions of the result so far alone, None where it is more than that."""
        ...

    def combination(self, step: Step) -> tuple[str, int] | None:
        """oneDNN's name of a binary step and the operand that the result so far is combined with, or None."""
        ...


@dataclass(frozen=True)
class Planned:
    """A post and where its operand is."""

    post: Post
    place: Place | None = None


@dataclass(frozen=True)
class Taken:
    """The first `count` steps as posts, and the operands among them whose memory may be the result's."""

    posts: tuple[Planned, ...]
    count: int
    added: frozenset[int]


def bias_of(host: Host, step: Step) -> tuple[Planned, ...]:
    """What a convolution adds to each channel, where it adds anything."""
    return (Planned(ByColumn("add"), host.place(host.index(step, 2))),) if host.has(step, 2) else ()


def launch(host: Host, coded: Coded, buffers: Sequence[Place], posts: Sequence[Planned] = ()) -> None:
    """Adds a launch of machine code, which does these posts."""
    others = tuple(planned.place for planned in posts if planned.place is not None)
    host.recipe.launches.append(CodeLaunch(coded, library().parallel_address, tuple(buffers), others))


def take(host: Host, followers: Sequence[Step], axis: int) -> Taken:
    """Steps behind an anchor as posts, as many as there is code for; `axis` of the result is that of its columns."""
    posts: list[Planned] = []
    added: set[int] = set()
    for count, step in enumerate(followers):
        more = _posts(host, step, axis)
        if more is None or len(posts) + len(more) > _MOST_POSTS:
            return Taken(tuple(posts), count, frozenset(added))
        posts += more
        if isinstance(more[0].post, ByElement):
            added |= {i for i in step.inputs if i is not None and i >= 0 and _free(host, i)}
    return Taken(tuple(posts), len(followers), frozenset(added))


def _free(host: Host, index: int) -> bool:
    """Whether an operand that lies as the result is read nowhere else in the kernel, and may be overwritten."""
    operand, out = host.kernel.operands[index], host.kernel.results[0]
    uses = [i for s in host.kernel.steps for i in s.inputs].count(index)
    return uses == 1 and not operand.constant and operand.layout == out.layout


def _posts(host: Host, step: Step, axis: int) -> list[Planned] | None:
    """One step as posts, None where there is no code for it."""
    functions = host.functions(step)
    if functions is not None:
        own = [Function(f.algorithm, f.alpha, f.beta) for f in functions]
        return [Planned(f) for f in own] if all(map(knows, own)) else None
    found = host.combination(step)
    if found is None or found[0] not in ("add", "mul", "sub"):
        return None
    name, index = found
    operand, out = host.kernel.operands[index], host.kernel.results[0]
    if operand.type.dtype is not DType.FLOAT:
        return None
    if operand.type == out.type:
        # constants lie plainly
        if not layouts_alike(host.layouts, out.type, PLAIN if operand.constant else operand.layout, out.layout):
            return None
        return [Planned(ByElement(name), host.place(index))]
    extended = (1,) * (out.type.rank - operand.type.rank) + operand.type.static_shape
    if prod(extended) == extended[axis] == out.type.static_shape[axis]:
        return [Planned(ByColumn(name), host.place(index))]
    return None


__all__ = ["Host", "Planned", "Taken", "bias_of", "isa_here", "launch", "needed_isa", "take"]
