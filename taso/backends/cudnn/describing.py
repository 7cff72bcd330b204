"""From kernels to cuDNN graphs: the anchor as an operation, the steps behind it as pointwise operations.

What cuDNN's graph API cannot say is None here. Whether cuDNN has an engine for what it can say, only cuDNN knows:
`attempts` lists what to ask it for, the most in one graph first.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace

from taso.backends.cudnn import norms, products
from taso.backends.cudnn.description import BF16, FLOAT32, FP16, PRECISIONS, TF32
from taso.backends.cudnn.elementwise import RULES, joined
from taso.backends.cudnn.frames import Unmapped, single
from taso.backends.cudnn.norms import Anchor
from taso.backends.cudnn.products import Stem, result_strides
from taso.backends.cudnn.sketch import FLOATS, CudnnLaunch, Sketch
from taso.backends.lowering import Kernel, Step
from taso.graph.errors import BackendError
from taso.graph.operator import REGISTRY

log = logging.getLogger(__name__)

_ANCHORS: dict[str, Anchor] = {
    "Conv": products.convolution,
    "ConvTranspose": products.transposed,
    "MatMul": products.matmul,
    "Gemm": products.gemm,
    "MaxPool": norms.pool,
    "AveragePool": norms.pool,
    "GlobalAveragePool": norms.global_pool,
    "GlobalMaxPool": norms.global_pool,
    "Softmax": norms.softmax,
    "LogSoftmax": norms.softmax,
    "BatchNormalization": norms.batch_norm,
    "LayerNormalization": norms.layer_norm,
    "RMSNormalization": norms.layer_norm,
    "InstanceNormalization": norms.instance_norm,
    **{name: norms.reduction for name in norms.REDUCTIONS},
}

OPERATORS = frozenset({*_ANCHORS, *RULES})
"""Names of the operators that `described` may find a graph for."""


def described(kernel: Kernel, precision: str = FLOAT32) -> CudnnLaunch | None:
    """The whole kernel as one graph, None where cuDNN's graph API cannot say it.

    Raises `BackendError` for a `precision` that there is not.
    """
    return _sketched(kernel, precision, len(kernel.steps))


def without_epilogue(kernel: Kernel, precision: str = FLOAT32) -> tuple[CudnnLaunch, tuple[Step, ...]] | None:
    """The anchor alone, which writes the kernel's result, and the steps that are left to do in place on it."""
    launch = _sketched(kernel, precision, 1)
    return None if launch is None else (launch, kernel.steps[1:])


def attempts(kernel: Kernel, precision: str = FLOAT32) -> Iterator[tuple[CudnnLaunch, tuple[Step, ...]]]:
    """Graphs for a kernel with the steps that each leaves to be done in place behind it, those that leave least first.

    Among equals, one in which a bias is added behind a residual comes first: for that cuDNN has engines in all layouts
    and types, for the order of the operators only some. Where factors may be rounded to half or bfloat16, TF32 comes
    behind, which keeps as many bits.
    """
    precisions = (precision, TF32) if precision in (FP16, BF16) else (precision,)
    for count in range(len(kernel.steps), 0, -1):
        seen: set[str] = set()
        for kept, late in itertools.product(precisions, (True, False)):
            launch = _sketched(kernel, kept, count, late)
            if launch is not None and launch.description.key not in seen:
                seen.add(launch.description.key)
                yield launch, kernel.steps[count:]


def unbiased(kernel: Kernel) -> Kernel | None:
    """The kernel with a bias of its convolution as a step behind it, None where it has none.

    That step's operand is the bias seen with axes of size 1 behind it, in the same memory. For anchors of which cuDNN
    has no plan with anything added: transposed convolutions in the plain layout.
    """
    first = kernel.steps[0] if kernel.steps else None
    if first is None or first.op.domain or first.op.name not in ("Conv", "ConvTranspose") or len(first.inputs) < 3:
        return None
    index = first.inputs[2]
    if index is None or index < 0 or any(index in step.inputs for step in kernel.steps[1:]):
        return None
    bias, rank = kernel.operands[index], kernel.results[0].type.rank
    seen = replace(bias, type=bias.type.with_shape((*bias.type.dims, *(1,) * (rank - 2))))
    operands = (*kernel.operands[:index], seen, *kernel.operands[index + 1 :])
    add = Step(REGISTRY["Add"], REGISTRY["Add"].complete({}), (-1, index))
    rest = (_later(step) for step in kernel.steps[1:])
    return replace(kernel, operands=operands, steps=(replace(first, inputs=first.inputs[:2]), add, *rest))


def with_addition(kernel: Kernel, index: int) -> Kernel:
    """The kernel with what its Gemm adds, operand number `index`, as a step behind the product."""
    add = Step(REGISTRY["Add"], REGISTRY["Add"].complete({}), (-1, index))
    first = kernel.steps[0]
    rest = (_later(step) for step in kernel.steps[1:])
    return replace(kernel, steps=(replace(first, inputs=first.inputs[:2]), add, *rest))


def _later(step: Step) -> Step:
    """A step with one more before it."""
    return replace(step, inputs=tuple(i - 1 if i is not None and i < 0 else i for i in step.inputs))


def _sketched(kernel: Kernel, precision: str, count: int, late: bool = True) -> CudnnLaunch | None:
    """A graph of the first `count` steps; with `late` a bias is added behind the residual that follows it."""
    if precision not in PRECISIONS:
        raise BackendError(f"{precision!r} is no precision; there are {', '.join(PRECISIONS)}")
    try:
        return _drawn(Sketch(kernel, precision), kernel, count, late)
    except Unmapped as reason:
        log.debug("no cuDNN graph of %s: %s", "+".join(step.op.name for step in kernel.steps), reason)
        return None


def _drawn(s: Sketch, kernel: Kernel, count: int, late: bool) -> CudnnLaunch:
    _check(kernel)
    first, followers = kernel.steps[0], kernel.steps[1:count]
    anchor = _ANCHORS.get(first.op.name) if not first.op.domain else None
    stem = _elementwise(s, first) if anchor is None else anchor(s, first, followers)
    last = _followed(s, stem, followers, late)
    strides = stem.strides if stem.strides is not None else result_strides(s, stem.frame)
    if s.tensors[last].dims != (stem.frame.shape if stem.strides is None else stem.frame.dims):
        raise Unmapped("a result that is smaller than what it is made of")
    return s.finish(last, strides)


def _check(kernel: Kernel) -> None:
    if not kernel.steps or len(kernel.results) != 1:
        raise Unmapped("a kernel without steps, or of several results")
    tensors = (*kernel.operands, *kernel.results)
    if any(not o.type.static or 0 in o.type.static_shape for o in tensors):
        raise Unmapped("a tensor without elements, or of unknown size")
    types = {o.type.dtype for o in tensors}
    if len(types) != 1 or not types <= set(FLOATS):
        raise Unmapped(f"element types {', '.join(sorted(t.name for t in types))}")
    for number, step in enumerate(kernel.steps):
        if any(i is not None and i < 0 and i != -number for i in step.inputs):
            raise Unmapped("a step that reads another than the one before it")


def _elementwise(s: Sketch, step: Step) -> Stem:
    frame = single(s.out_dims, 4)
    return Stem(joined(s, frame, step, None), frame)


def _followed(s: Sketch, stem: Stem, followers: Sequence[Step], late: bool) -> int:
    """The uid of the last step's output."""
    uid, bias = stem.uid, stem.bias
    if bias is not None and not (late and followers and _adds_whole(s, stem, followers[0])):
        uid, bias = s.pointwise("add", uid, bias), None
    for step in followers:
        uid = joined(s, stem.frame, step, uid)
        if bias is not None:
            uid, bias = s.pointwise("add", uid, bias), None
    return uid


def _adds_whole(s: Sketch, stem: Stem, step: Step) -> bool:
    """Whether a step adds a tensor of the result's own shape, a residual."""
    operands = [i for i in step.inputs if i is not None and i >= 0]
    if step.op.domain or step.op.name != "Add" or len(operands) != 1:
        return False
    return s.kernel.operands[operands[0]].type.shape == s.out.type.shape


__all__ = ["OPERATORS", "CudnnLaunch", "attempts", "described", "unbiased", "with_addition", "without_epilogue"]
