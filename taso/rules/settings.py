"""Random values for the attribute variables of a rule under trial."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from taso.graph.operator import AttrValue, Operator
from taso.graph.types import DType, TensorType
from taso.rules.expression import Value


class NeedsNumbers(Exception):
    """A setting depends on sizes that are still symbols."""

    def __init__(self, type: TensorType) -> None:
        super().__init__(f"the sizes of {type} must be numbers")
        self.type = type


class NoDomain(Exception):
    """Nothing is known of which values an attribute can take; carries the reason."""


@dataclass(frozen=True)
class Site:
    """Where a setting is drawn: the operator, its inputs and outputs, and the attributes settled so far."""

    rng: random.Random
    op: Operator
    types: Sequence[TensorType | None]
    n_outputs: int
    known: Mapping[str, AttrValue]

    @property
    def first(self) -> TensorType:
        found = self.types[0] if self.types else None
        if found is None or found.shape is None:
            raise NoDomain(f"{self.op.name} has no input that its settings could follow")
        return found

    @property
    def rank(self) -> int:
        return self.first.rank

    @property
    def sizes(self) -> tuple[int, ...]:
        """Sizes of the first input; raises `NeedsNumbers` while they are symbols."""
        if not self.first.static:
            raise NeedsNumbers(self.first)
        return self.first.static_shape

    def ints(self, count: int, choices: Sequence[int]) -> tuple[int, ...]:
        return tuple(self.rng.choice(choices) for _ in range(count))

    def known_int(self, name: str, default: int = 0) -> int:
        value = self.known.get(name, self.op.attributes.get(name))
        return value if isinstance(value, int) else default


def draw_setting(site: Site, name: str) -> Value:
    """A value that attribute `name` may have there; raises `NoDomain` or `NeedsNumbers`."""
    domain = _DOMAINS.get((site.op.name, name)) or _DOMAINS.get(("", name))
    if domain is not None:
        return domain(site)
    default = site.op.attributes.get(name)
    if isinstance(default, (bool, int, float, str)):
        return default
    raise NoDomain(f"it is not known which values {site.op.name}.{name} can take")


def _axis(site: Site) -> Value:
    if site.rank == 0:
        raise NoDomain("a scalar has no axes")
    return site.rng.randrange(site.rank)


def _perm(site: Site) -> Value:
    perm = list(range(site.rank))
    site.rng.shuffle(perm)
    return tuple(perm)


def _spatial(choices: Sequence[int], per_axis: int = 1) -> Callable[[Site], Value]:
    return lambda site: site.ints(per_axis * max(site.rank - 2, 0), choices)


def _window_pads(site: Site) -> Value:
    """None in one of three drawings, since many rules ask for that; otherwise unequal ones."""
    count = 2 * max(site.rank - 2, 0)
    if site.rng.random() < 0.34:
        return (0,) * count
    kernel = site.known.get("kernel_shape")
    if not isinstance(kernel, tuple):
        return site.ints(count, (0, 1, 1, 2))
    # a pool takes no window that could lie in the padding alone
    reach = [k - 1 for k in kernel if isinstance(k, int)] * 2
    return tuple(site.rng.randint(0, min(r, 2)) for r in reach)


def _axes(site: Site) -> Value:
    axes = [a for a in range(site.rank) if site.rng.random() < 0.5]
    return tuple(axes or [site.rng.randrange(site.rank)]) if site.rank else ()


def _new_axes(site: Site) -> Value:
    count = site.rng.choice((1, 1, 2))
    return tuple(sorted(site.rng.sample(range(site.rank + count), count)))


def _reshape(site: Site) -> Value:
    """Neighbouring sizes multiplied together, or the whole taken apart again."""
    total = 1
    for size in site.sizes:
        total *= size
    shape: list[int] = []
    while total > 1 and len(shape) < 3:
        shape.append(site.rng.choice([d for d in range(1, total + 1) if total % d == 0]))
        total //= shape[-1]
    shape.append(total)
    return tuple(shape)


def _expand(site: Site) -> Value:
    return tuple(s if s != 1 else site.rng.choice((1, 2, 3)) for s in site.sizes)


def _split(site: Site) -> Value:
    if site.rank == 0:
        raise NoDomain("a scalar has no axes")
    axis = site.known_int("axis") % max(site.rank, 1)
    size, count = site.sizes[axis], site.n_outputs
    if size < count:
        raise NeedsNumbers(site.first)
    cuts = sorted(site.rng.sample(range(1, size), count - 1))
    return tuple(b - a for a, b in zip([0, *cuts], [*cuts, size], strict=True))


def _sliced_axes(site: Site) -> list[int]:
    axes = site.known.get("axes")
    given = [a for a in axes if isinstance(a, int)] if isinstance(axes, tuple) else []
    if any(not 0 <= a < site.rank for a in given):
        raise NoDomain(f"{site.op.name} slices axes {given} of {site.rank}")
    return given or list(range(site.rank))


def _ends(site: Site) -> Value:
    return tuple(site.rng.randint(1, site.sizes[a]) for a in _sliced_axes(site))


def _starts(site: Site) -> Value:
    ends = site.known.get("ends")
    if not isinstance(ends, tuple):
        return tuple(0 for _ in _sliced_axes(site))
    return tuple(site.rng.randrange(max(e, 1)) for e in ends if isinstance(e, int))


def _steps(site: Site) -> Value:
    return site.ints(len(_sliced_axes(site)), (1, 1, 2))


def _either(*choices: Value) -> Callable[[Site], Value]:
    return lambda site: site.rng.choice(choices)


_FLAG = _either(0, 1)
_RATIO = _either(0.5, 0.25, 2.0, 0.001, 3.5)

_DOMAINS: dict[tuple[str, str], Callable[[Site], Value]] = {
    ("", "axis"): _axis,
    ("", "perm"): _perm,
    ("", "strides"): _spatial((1, 1, 2, 3)),
    ("", "dilations"): _spatial((1, 1, 2)),
    ("", "pads"): _window_pads,
    ("", "output_padding"): _spatial((0, 0, 1)),
    ("", "kernel_shape"): _spatial((1, 2, 3)),
    ("", "group"): _either(1, 2, 3, 4),
    ("", "groups"): _either(2, 3, 4, 6),
    ("", "count"): _either(1, 2, 3),
    ("", "channels"): _either(1, 2, 3, 4),
    ("", "size"): _either(1, 2, 3, 4),
    ("", "epsilon"): _RATIO,
    ("", "alpha"): _RATIO,
    ("", "beta"): _RATIO,
    ("", "gamma"): _RATIO,
    ("", "ratio"): _either(0.5, 0.1),
    ("", "axes"): _axes,
    ("", "to"): _either(DType.FLOAT, DType.DOUBLE),
    ("", "dtype"): _either(DType.FLOAT),
    ("", "repeats"): lambda site: site.ints(site.rank, (1, 2)),
    ("Pad", "pads"): lambda site: site.ints(2 * site.rank, (0, 0, 1, 2)),
    ("Unsqueeze", "axes"): _new_axes,
    ("Reshape", "shape"): _reshape,
    ("Expand", "shape"): _expand,
    ("Split", "split"): _split,
    ("Slice", "ends"): _ends,
    ("Slice", "starts"): _starts,
    ("Slice", "steps"): _steps,
    ("Clip", "min"): _either(None, -2.0, 0.0),
    ("Clip", "max"): _either(None, 6.0, 0.0),
    ("Gelu", "approximate"): _either("none", "tanh"),
    **{("", name): _FLAG for name in (
        "keepdims", "ceil_mode", "count_include_pad", "transA", "transB", "flattened", "allowzero",
        "select_last_index",
    )},
}  # fmt: skip
