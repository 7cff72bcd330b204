"""Kernels that our CUDA sources are tried on, by group: rows of operator, attributes, shapes and element types."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np
from hosted import Array, Trial, kernel_of

from taso.backends.fallback import evaluated
from taso.backends.lowering import LAST, PLAIN, Operand
from taso.graph.types import DType, TensorType

F32, F64, F16, BF16, BOOL = DType.FLOAT, DType.DOUBLE, DType.FLOAT16, DType.BFLOAT16, DType.BOOL
REAL = (F32, F64, F16, BF16)
SIGNED = (DType.INT8, DType.INT16, DType.INT32, DType.INT64)
UNSIGNED = (DType.UINT8, DType.UINT16, DType.UINT32, DType.UINT64)
INTEGER = SIGNED + UNSIGNED
TOLERANCES = {F32: 2e-6, F64: 1e-14, F16: 1e-3, BF16: 8e-3}
"""Relative errors, of a few roundings to each type."""


def rng_of(name: str) -> np.random.Generator:
    return np.random.default_rng(list(name.encode()))


def values(shape: Sequence[int], dtype: DType, rng: np.random.Generator, kind: str = "any") -> Array:
    """Numbers of a type: of both signs, between −2 and 2 where they are floats."""
    if dtype is BOOL:
        return rng.random(shape) < 0.5
    if dtype in INTEGER:
        info = np.iinfo(dtype.numpy)  # type: ignore[type-var]  # an integer type
        low, high = (info.min, info.max) if kind == "any" else (0 if dtype in UNSIGNED else -9, 10)
        return rng.integers(low, high, shape, endpoint=True, dtype=dtype.numpy)  # type: ignore[arg-type]  # as above
    found = rng.uniform(-2, 2, shape)
    if kind == "wild" and found.size:
        flat = found.reshape(-1)
        special = [np.nan, np.inf, -np.inf, 0.0, -0.0, 0.5, 1.5, -0.5, 2.5, -2.5, 1e4, -1e4]
        places = rng.choice(flat.size, min(flat.size // 2, 2 * len(special)), replace=False)
        flat[places] = np.resize(special, len(places))
    if kind == "positive":
        found = np.abs(found) + 0.25
    return found.astype(dtype.numpy)


def tensor(shape: Sequence[int], dtype: DType = F32, layout: str = PLAIN, constant: bool = False) -> Operand:
    return Operand(TensorType(dtype, tuple(shape)), layout, constant)


def trial(
    name: str,
    steps: Sequence[tuple[str, Mapping[str, object], Sequence[int | None]]],
    operands: Sequence[Operand],
    kind: str = "small",
    given: Mapping[int, object] | None = None,
    layout: str = PLAIN,
    tolerance: float | None = None,
    wanted: Callable[[Sequence[Array]], Sequence[Array]] | None = None,
) -> Trial:
    rng = rng_of(name)
    kernel = kernel_of(steps, operands, layout=layout)
    arrays = [
        np.asarray(given[i], o.type.dtype.numpy)
        if given and i in given
        else values(o.type.static_shape, o.type.dtype, rng, kind)
        for i, o in enumerate(operands)
    ]
    floats = [r.type.dtype for r in (*kernel.results, *operands) if r.type.dtype in REAL]
    found = tolerance if tolerance is not None else max((TOLERANCES[d] for d in floats), default=0.0)
    made = Trial(name, kernel, arrays, found)
    if wanted is not None:
        made.wanted = wanted(arrays)
    return made


def one(
    op: str,
    shapes: Sequence[Sequence[int]],
    dtypes: DType | Sequence[DType] = F32,
    name: str = "",
    kind: str = "small",
    layouts: Sequence[str] | str = PLAIN,
    layout: str = PLAIN,
    given: Mapping[int, object] | None = None,
    tolerance: float | None = None,
    absent: Sequence[int] = (),
    **attrs: object,
) -> Trial:
    """A kernel of one operator."""
    dtypes = [dtypes] * len(shapes) if isinstance(dtypes, DType) else list(dtypes)
    layouts = [layouts] * len(shapes) if isinstance(layouts, str) else list(layouts)
    operands = [tensor(s, d, x) for s, d, x in zip(shapes, dtypes, layouts, strict=True)]
    inputs: list[int | None] = list(range(len(shapes)))
    for position in absent:
        inputs.insert(position, None)
    shown = " ".join(
        [op, name, *dict.fromkeys(d.name.lower() for d in dtypes), *("x".join(map(str, s)) for s in shapes)]
    )
    more = " ".join(f"{k}={v.name if isinstance(v, DType) else v}" for k, v in attrs.items())
    lies = " ".join(["->".join(["/".join(layouts), layout])] if {*layouts, layout} != {PLAIN} else [])
    full = " ".join(x for x in (shown, more, lies, kind if kind != "small" else "") if x)
    return trial(full, [(op, attrs, inputs)], operands, kind, given, layout, tolerance)


# ── element-wise ─────────────────────────────────────────────────────────────────────────────────────────────────

SHAPE = (3, 4, 8)
UNARY = (
    "Relu Sigmoid Tanh Exp Neg Abs Reciprocal Floor Ceil Round Erf Sin Cos Sign Softplus Softsign Tan Atan Sinh Cosh "
    "Asinh LeakyRelu Elu Selu HardSigmoid Mish HardSwish Gelu Celu ThresholdedRelu Shrink Swish IsNaN IsInf"
).split()


def element_wise() -> Iterable[Trial]:
    for op in UNARY:
        yield one(op, [SHAPE], kind="wild")
        yield one(op, [SHAPE], F16 if op in ("Relu", "Sigmoid", "Gelu", "Round", "IsInf") else F64)
    yield one("Gelu", [SHAPE], BF16, approximate="tanh")
    yield one("Swish", [SHAPE], alpha=1.7)
    yield one("SwiGLU", [SHAPE, SHAPE], alpha=0.7)
    yield one("Shrink", [SHAPE], bias=0.25, lambd=0.75)
    yield one("Celu", [SHAPE], alpha=2.5)
    yield one("IsInf", [SHAPE], kind="wild", detect_negative=0)
    yield one("IsInf", [SHAPE], kind="wild", detect_negative=0, detect_positive=0)
    for op in ("Log", "Sqrt", "Acosh", "Asin", "Acos", "Atanh"):
        scale = {"Acosh": (1, 5), "Log": (0.1, 9), "Sqrt": (0, 9)}.get(op, (-0.95, 0.95))
        for dtype in (F32, F64):
            yield one(op, [SHAPE], dtype, given={0: rng_of(op).uniform(*scale, SHAPE)})
    for op in ("Log", "Sqrt", "Acosh", "Asin", "Atanh", "Exp"):
        yield one(op, [SHAPE], kind="wild", name="wild")
    for dtype in (*INTEGER, F16, BF16, F64):
        yield one("Add", [SHAPE, (8,)], dtype, kind="any")
        yield one("Sub", [SHAPE, (4, 1)], dtype, kind="any")
        yield one("Mul", [(3, 1, 8), (4, 1)], dtype, kind="any")
        yield one("Max", [SHAPE, SHAPE, (8,)], dtype, kind="wild")
        yield one("Min", [SHAPE, (1,), SHAPE], dtype, kind="wild")
        yield one("Less", [SHAPE, SHAPE], dtype)
        yield one("Abs", [SHAPE], dtype, kind="any")
        if dtype not in UNSIGNED:
            yield one("Neg", [SHAPE], dtype, kind="any")
        yield one("Sign", [SHAPE], dtype, name="of")
        yield one("Clip", [SHAPE], dtype, min=2, max=7)
        yield one("PRelu", [SHAPE, (4, 1)], dtype)
    for op in ("Max", "Min", "Add", "Div", "Equal", "GreaterOrEqual", "LessOrEqual", "Greater"):
        yield one(op, [SHAPE, SHAPE], kind="wild", name="wild")
    yield one("Equal", [SHAPE, SHAPE], BOOL)
    yield one("Sum", [SHAPE, (8,), (4, 1)])
    yield one("Mean", [SHAPE, (8,), SHAPE], F16)
    yield one("Clip", [SHAPE], kind="wild", min=-0.5, max=1.25)
    yield one("Clip", [SHAPE], kind="wild", max=1.25)
    yield one("Clip", [SHAPE], min=3.0, max=1.0)
    for op in ("And", "Or", "Xor"):
        yield one(op, [SHAPE, (8,)], BOOL)
    yield one("Not", [SHAPE], BOOL)
    for dtype in INTEGER:
        divisor = values(SHAPE, dtype, rng_of("divisor"))
        divisor = np.where(divisor == 0, 3, divisor)
        yield one("Div", [SHAPE, SHAPE], dtype, kind="any", given={1: divisor})
        yield one("Mod", [SHAPE, SHAPE], dtype, kind="any", given={1: divisor})
        yield one("Mod", [SHAPE, SHAPE], dtype, kind="any", given={1: divisor}, fmod=1)
        for op in ("BitwiseAnd", "BitwiseOr", "BitwiseXor"):
            yield one(op, [SHAPE, SHAPE], dtype, kind="any")
        yield one("BitwiseNot", [SHAPE], dtype, kind="any")
    for dtype in (F32, F64, F16):
        yield one("Mod", [SHAPE, SHAPE], dtype, given={1: rng_of("mod").uniform(0.3, 2, SHAPE)}, fmod=1)
        yield one("Mod", [SHAPE, SHAPE], dtype, given={1: rng_of("mod").uniform(-2, -0.3, SHAPE)})
    for dtype in INTEGER:
        shifts = rng_of("shift").integers(0 if dtype in UNSIGNED else -2, 8 * dtype.itemsize + 2, SHAPE)
        for direction in ("LEFT", "RIGHT"):
            yield one("BitShift", [SHAPE, SHAPE], dtype, kind="any", given={1: shifts}, direction=direction)
    for dtype in (F32, DType.INT64, F16, BOOL, DType.UINT8):
        yield one("Where", [SHAPE, SHAPE, (4, 1)], [BOOL, dtype, dtype])
    exponents = rng_of("power").integers(0, 5, SHAPE)
    for base, exponent in (
        (F32, F32),
        (F64, F64),
        (F32, DType.INT64),
        (DType.INT32, DType.INT32),
        (DType.INT64, F32),
        (F16, F16),
        (F32, F64),
    ):
        yield one("Pow", [SHAPE, SHAPE], [base, exponent], given={1: exponents})
    yield one("Pow", [SHAPE, ()], given={0: rng_of("base").uniform(0.2, 3, SHAPE), 1: 0.37}, tolerance=4e-6)
    yield one("BatchNormalization", [(2, 6, 5, 4), (6,), (6,), (6,), (6,)], kind="positive", epsilon=1e-3)
    yield one("BatchNormalization", [(2, 6, 5, 4), (6,), (6,), (6,), (6,)], kind="positive", layouts=LAST, layout=LAST)
    yield one("BatchNormalization", [(5, 6), (6,), (6,), (6,), (6,)], F16, kind="positive")
    yield from casts()
    yield from quantized()
    yield from chains()


def casts() -> Iterable[Trial]:
    all_types = (*REAL, *INTEGER, BOOL)
    numbers = np.concatenate([np.arange(-3, 13), [0.5, -0.5, 1.5, 2.5, 100.25, 0.99, 3.999, 77.7]])
    for source in all_types:
        for target in all_types:
            given = np.abs(numbers) if target in UNSIGNED or source in (*UNSIGNED, BOOL) else numbers
            yield one("Cast", [(24,)], source, given={0: given.astype(source.numpy)}, to=target, tolerance=0.0)
    for source, target in (
        (DType.INT64, DType.INT8),
        (DType.INT32, DType.UINT8),
        (DType.UINT64, DType.INT32),
        (DType.INT8, DType.UINT64),
        (DType.INT64, F32),
        (DType.UINT64, F64),
    ):
        yield one("Cast", [(64,)], source, kind="any", to=target, tolerance=0.0)
    fine = rng_of("fine").uniform(-70000, 70000, 4096)
    halves = np.arange(4096) * 2.0**-11 + 2.0**-12
    for target in (F16, BF16, F32):
        for source in (F64, F32):
            for name, given in (("fine", fine), ("halves", halves), ("small", fine * 1e-10), ("large", fine * 1e34)):
                if name == "large" and source is F32:
                    continue
                yield one("Cast", [(4096,)], source, name=name, given={0: given}, to=target, tolerance=0.0)
    yield one("Cast", [(64,)], F32, kind="wild", to=F16, tolerance=0.0)
    yield one("Cast", [(64,)], F32, kind="wild", to=BOOL)
    yield one("Cast", [(64,)], BF16, kind="wild", to=F64, tolerance=0.0)
    yield one("CastLike", [(6, 4), (1,)], [F32, DType.INT32], kind="any")


def quantized() -> Iterable[Trial]:
    x = (2, 4, 8)
    numbers = rng_of("quantized").uniform(-300, 300, x)
    numbers.reshape(-1)[:8] = (0.5, 1.5, 2.5, -0.5, -1.5, 1000, -1000, 3.5)
    for dtype in (DType.UINT8, DType.INT8, DType.UINT16, DType.INT16):
        yield one("QuantizeLinear", [x, (), ()], [F32, F32, dtype], given={0: numbers, 1: 1.0, 2: 3})
        yield one(
            "QuantizeLinear", [x, (4,), (4,)], [F32, F32, dtype], given={0: numbers, 1: [1, 2, 0.5, 4], 2: [0, 1, 2, 3]}
        )
        yield one("DequantizeLinear", [x, (4,), (4,)], [dtype, F32, dtype], kind="any", given={1: [1, 2, 0.5, 4]})
    yield one("QuantizeLinear", [x, (8,)], given={0: numbers, 1: np.arange(1, 9) / 4}, axis=-1)
    yield one("DequantizeLinear", [x, ()], [DType.INT32, F32], kind="small")
    yield one("DequantizeLinear", [x, (1,), (1,)], [DType.UINT8, F16, DType.UINT8], kind="small")


def chains() -> Iterable[Trial]:
    relu = ("Relu", {}, (-1,))
    yield trial(
        "chain add relu mul",
        [("Add", {}, (0, 1)), relu, ("Mul", {}, (-2, 2))],
        [tensor((2, 8, 6, 4)), tensor((8, 1, 1)), tensor((2, 8, 6, 4))],
    )
    yield trial("chain of its own operand twice", [("Mul", {}, (0, 0)), ("Add", {}, (-1, 0))], [tensor((5, 12))])
    yield trial(
        "chain channels last with a plain operand",
        [("Add", {}, (0, 1)), relu],
        [tensor((2, 16, 5, 6), layout=LAST), tensor((2, 16, 5, 6))],
        layout=LAST,
    )
    yield trial(
        "chain through halves",
        [("Cast", {"to": F16}, (0,)), ("Cast", {"to": F32}, (-1,)), ("Sub", {}, (-2, 0))],
        [tensor((64,))],
        tolerance=1e-6,
    )
    yield trial(
        "chain of comparisons",
        [("Greater", {}, (0, 1)), ("Where", {}, (-1, 0, 1)), ("Sqrt", {}, (-2,))],
        [tensor((7, 9)), tensor((9,))],
        kind="positive",
    )
    yield trial(
        "chain of halves",
        [("Mul", {}, (0, 1)), ("Sigmoid", {}, (-1,)), ("Mul", {}, (-2, 0))],
        [tensor((3, 40), F16), tensor((3, 1), F16)],
    )
    yield one("Add", [(1, 1), ()], name="of one element")
    yield one("Add", [(), ()], name="of scalars")
    yield one("Add", [(3, 5, 7), (3, 5, 7)], name="of odd sizes")
    yield one("Add", [(0, 5), (1, 5)], name="of nothing")
    yield one("Mul", [(300, 37), (37,)], name="of many blocks")
    yield one("Identity", [(4, 6)], DType.INT16)
    yield one("Dropout", [(4, 6)])
    for a, b in ((LAST, PLAIN), (PLAIN, LAST)):
        for shape in ((2, 40, 5, 9), (2, 3, 7, 6), (3, 33, 35), (1, 16, 2, 3, 8)):
            for dtype in (F32, F16, DType.INT8):
                shown = f"layout {a} to {b} {dtype.name} {shape}"
                yield trial(shown, [], [tensor(shape, dtype, a)], kind="any", layout=b)


# ── moves of data ────────────────────────────────────────────────────────────────────────────────────────────────


def movement() -> Iterable[Trial]:
    any_type = (F32, F16, DType.INT64, DType.INT8, BOOL)
    for dtype in any_type:
        yield one("Transpose", [(2, 36, 50)], dtype, perm=(0, 2, 1))
        yield one("Transpose", [(2, 5, 3, 8)], dtype, perm=(0, 2, 1, 3))
    yield one("Transpose", [(3, 20, 4, 40)], perm=(3, 0, 2, 1))
    yield one("Transpose", [(2, 3, 4, 5)])
    yield one("Transpose", [(2, 13, 14, 15)], layouts=LAST, perm=(0, 2, 3, 1))
    yield one("Slice", [(5, 9, 16)], starts=(1, -3), ends=(4, 9), axes=(0, 1))
    yield one("Slice", [(5, 9, 16)], starts=(8, 15), ends=(-100, 0), axes=(1, 2), steps=(-2, -3))
    yield one("Slice", [(5, 9, 16)], DType.INT32, starts=(4,), ends=(12,), axes=(2,), steps=(1,))
    yield one("Slice", [(5, 9, 16)], starts=(3,), ends=(3,), axes=(1,))
    yield one("Expand", [(3, 1, 8)], shape=(2, 3, 5, 1))
    yield one("Expand", [(1,)], DType.INT64, shape=(4, 6))
    yield one("Tile", [(2, 3, 4)], repeats=(2, 1, 3))
    yield one("Tile", [(2, 3, 4)], F16, repeats=(1, 2, 2))
    yield one("Tile", [(3,)], repeats=(0,))
    for mode in ("DCR", "CRD"):
        yield one("DepthToSpace", [(2, 12, 3, 5)], blocksize=2, mode=mode)
        yield one("SpaceToDepth", [(2, 3, 6, 4)], blocksize=2, mode=mode)
        yield one("DepthToSpace", [(1, 18, 4, 3)], F16, layouts=LAST, layout=LAST, blocksize=3, mode=mode)
        yield one("SpaceToDepth", [(1, 2, 6, 9)], layouts=LAST, layout=LAST, blocksize=3, mode=mode)
    for op, attrs in (
        ("Reshape", {"shape": (6, -1)}),
        ("Flatten", {"axis": 2}),
        ("Squeeze", {"axes": (1,)}),
        ("Unsqueeze", {"axes": (0, 3)}),
    ):
        yield one(op, [(2, 1, 3, 4)], **attrs)
    yield one("Concat", [(2, 3, 4), (2, 5, 4), (2, 1, 4)], axis=1)
    yield one("Concat", [(2, 3), (2, 4), (2, 8)], DType.INT64, axis=-1)
    yield one("Concat", [(2, 4, 3, 5), (2, 8, 3, 5)], layouts=LAST, layout=LAST, axis=1)
    yield one("Concat", [(2, 4, 3, 5), (2, 8, 3, 5)], layouts=(LAST, PLAIN), axis=1)
    yield one("Concat", [(1, 2)] * 35, F16, axis=0)
    yield one("Concat", [(2, 0, 3), (2, 2, 3)], axis=1)
    # tiles of all sections share one memory
    shapes, many = [(1, 20, 4, 5)] * 18, [LAST] * 18
    yield one("Concat", shapes, F64, name="of many tensors in another layout", layouts=many, axis=2)
    yield one("Split", [(2, 9, 4)], axis=1, split=(2, 3, 4))
    yield one("Split", [(2, 9, 4)], F16, axis=1, split=(9,))
    yield one("Split", [(3, 8)], axis=-1, split=(3, 0, 5))
    yield one("Split", [(2, 12, 3, 3)], layouts=LAST, layout=LAST, axis=1, split=(4, 8))
    yield from pads()
    yield from lookups()
    yield trial(
        "Transpose then add",
        [("Transpose", {"perm": (1, 0)}, (0,)), ("Add", {}, (-1, 1)), ("Relu", {}, (-2,))],
        [tensor((20, 30)), tensor((20,))],
    )
    yield trial(
        "DepthToSpace then mul",
        [("DepthToSpace", {"blocksize": 2}, (0,)), ("Mul", {}, (-1, 1))],
        [tensor((1, 8, 3, 3)), tensor((1, 2, 6, 6))],
    )
    yield trial(
        "Gather then add",
        [("Gather", {}, (0, 1)), ("Add", {}, (-1, 2))],
        [tensor((9, 8)), tensor((2, 3), DType.INT64), tensor((3, 8))],
        given={1: [[0, -1, 4], [8, 2, 2]]},
    )


def pads() -> Iterable[Trial]:
    x = (2, 5, 8)
    for dtype in (F32, F16, DType.INT64, BOOL):
        yield one("Pad", [x], dtype, pads=(0, 1, 2, 1, 0, 3), value=1)
    yield one("Pad", [x], pads=(1, 0, 0, 0, 2, 0), value=-7.5)
    yield one("Pad", [x], pads=(0, -1, 2, 0, -2, -3))
    yield one("Pad", [x], pads=(0,) * 6)
    for mode in ("reflect", "edge", "wrap"):
        yield one("Pad", [x], pads=(0, 2, 3, 1, 0, 4), mode=mode)
        yield one("Pad", [x], DType.INT32, pads=(0, 3, 0, 0, 2, 0), mode=mode)
    yield one("Pad", [(1, 3, 4)], pads=(0, 5, 0, 0, 7, 0), mode="reflect")
    yield one("Pad", [(2, 6, 4, 4)], layouts=LAST, layout=LAST, pads=(0, 0, 1, 1, 0, 0, 1, 1))


def lookups() -> Iterable[Trial]:
    rng = rng_of("lookups")
    for axis, dtype in ((0, F32), (1, F16), (2, DType.INT64), (-1, BOOL)):
        for index in (DType.INT64, DType.INT32):
            size = (6, 7, 8)[axis]
            yield one(
                "Gather", [(6, 7, 8), (3, 2)], [dtype, index], axis=axis, given={1: rng.integers(-size, size, (3, 2))}
            )
    yield one("Gather", [(6, 7), ()], [F32, DType.INT64], given={1: 4})
    for axis in (0, 1, 2):
        size = (4, 5, 8)[axis]
        indices = rng.integers(-size, size, [6 if a == axis else n for a, n in enumerate((4, 5, 8))])
        yield one("GatherElements", [(4, 5, 8), indices.shape], [F32, DType.INT64], axis=axis, given={1: indices})
    yield one("GatherND", [(4, 5, 8), (3, 2)], [F32, DType.INT64], given={1: [[0, -1], [3, 4], [-4, 2]]})
    yield one("GatherND", [(4, 5, 8), (2, 2, 1)], [F16, DType.INT64], given={1: [[[0], [-1]], [[2], [3]]]})
    yield one(
        "GatherND", [(3, 5, 8), (3, 2, 2)], [F32, DType.INT64], batch_dims=1, given={1: rng.integers(0, 5, (3, 2, 2))}
    )
    for axis in (0, 1):
        places = np.stack([rng.permutation(6)[:4] for _ in range(4)])
        places = places if axis == 1 else places.T
        for index in (DType.INT64, DType.INT32):
            yield one("ScatterElements", [(6, 6), (4, 4), (4, 4)], [F32, index, F32], axis=axis, given={1: places})
    yield one("ScatterND", [(6, 5), (3, 1), (3, 5)], [F32, DType.INT64, F32], given={1: [[4], [0], [-2 + 4]]})
    yield one("ScatterND", [(4, 5, 3), (2, 2), (2, 3)], [F16, DType.INT64, F16], given={1: [[0, 1], [3, 4]]})
    for dtype, axis in ((DType.INT64, -1), (DType.INT32, 1), (F32, 0)):
        yield one(
            "OneHot",
            [(2, 6), (2,)],
            [dtype, F32],
            axis=axis,
            depth=5,
            given={0: rng.integers(-5, 5, (2, 6)), 1: [0, 3]},
        )
    yield one("OneHot", [(6,), (2,)], [DType.INT64, DType.INT32], depth=4, given={0: [0, 4, -4, -5, 3, 9], 1: [2, 7]})
    for upper in (0, 1):
        yield one("Trilu", [(2, 5, 6)], upper=upper)
        yield one("Trilu", [(7, 5), ()], [DType.INT64, DType.INT64], upper=upper, given={1: -2})
    yield one("EyeLike", [(4, 6)], k=1)
    yield one("EyeLike", [(5, 3)], F32, k=-1, dtype=DType.INT32)
    yield one("Range", [(), (), ()], length=7, given={0: 1.5, 1: 5.0, 2: 0.5})
    yield one("Range", [(), (), ()], DType.INT64, length=4, given={0: 10, 1: -2, 2: -3})
    for batch in (0, 1):
        yield one(
            "ReverseSequence",
            [(4, 5, 3), ((4, 5)[batch],)],
            [F32, DType.INT64],
            batch_axis=batch,
            time_axis=1 - batch,
            given={1: [1, 3, 4, 2, 0][: (4, 5)[batch]]},
        )


# ── rows ─────────────────────────────────────────────────────────────────────────────────────────────────────────

REDUCTIONS = (
    "ReduceSum ReduceMean ReduceMax ReduceMin ReduceProd ReduceSumSquare ReduceL1 ReduceL2 ReduceLogSum ReduceLogSumExp"
).split()


def rows() -> Iterable[Trial]:
    for op in REDUCTIONS:
        positive = "positive" if op in ("ReduceLogSum", "ReduceProd") else "small"
        for axes, keep in (((2,), 1), ((1,), 0), ((0, 2), 0), ((), 1)):
            yield one(op, [(3, 6, 40)], kind=positive, axes=axes, keepdims=keep, tolerance=1e-5)
        yield one(op, [(4, 24)], F64, kind=positive, axes=(1,), tolerance=1e-12)
        yield one(op, [(4, 24)], F16, kind=positive, axes=(1,), tolerance=2e-3)
    for dtype in INTEGER:
        for op in ("ReduceMax", "ReduceMin"):
            yield one(op, [(5, 17)], dtype, kind="any", axes=(1,))
            yield one(op, [(5, 17)], dtype, kind="any", axes=(0,))
    for dtype in (DType.INT32, DType.INT64, DType.UINT32, DType.UINT64):
        for op in ("ReduceSum", "ReduceL1", "ReduceSumSquare", "ReduceProd"):
            yield one(op, [(5, 17)], dtype, axes=(1,))
    yield one("ReduceMax", [(5, 17)], kind="wild", axes=(1,))
    yield one("ReduceMin", [(5, 17)], kind="wild", axes=(0,))
    yield one("ReduceSum", [(3, 1500)], axes=(1,), name="by a block", tolerance=1e-5)
    yield one("ReduceSum", [(2, 40000)], axes=(1,), name="in parts", tolerance=1e-4)
    yield one("ReduceMax", [(40000, 2)], axes=(0,), name="in parts")
    yield one("ReduceSum", [(40000, 9)], axes=(0,), name="in parts across", tolerance=1e-4)
    yield one("ReduceMax", [(2, 35000, 1)], F16, axes=(1, 2), name="in parts")
    yield one("ReduceL2", [(70, 50, 10, 1)], axes=(0, 1, 2, 3), name="in parts", tolerance=1e-5)
    yield one("ReduceSum", [(1,)], axes=(0,))
    yield one("ReduceSum", [(3, 1, 4)], axes=(1,))
    yield one("ReduceMean", [(300, 9, 5)], axes=(1,), name="many rows across", tolerance=1e-5)
    yield one("ReduceSum", [(2, 600, 40)], axes=(1,), name="long rows across", tolerance=1e-5)
    yield trial(
        "ReduceMean in parts then relu",
        [("ReduceMean", {"axes": (1, 2)}, (0,)), ("Add", {}, (-1, 1)), ("Relu", {}, (-2,))],
        [tensor((2, 200, 200)), tensor((2, 1, 1))],
        tolerance=1e-4,
    )
    yield trial(
        "ReduceSum then mul",
        [("ReduceSum", {"axes": (1,), "keepdims": 0}, (0,)), ("Mul", {}, (-1, 1))],
        [tensor((4, 9, 6)), tensor((6,))],
        tolerance=1e-5,
    )
    for op in ("GlobalAveragePool", "GlobalMaxPool", "GlobalLpPool"):
        for layout in (PLAIN, LAST):
            yield one(op, [(2, 20, 7, 7)], layouts=layout, layout=layout, tolerance=1e-5)
    yield one("GlobalLpPool", [(2, 3, 5, 4)], p=3, tolerance=1e-5)
    yield one("GlobalLpPool", [(2, 3, 5, 4)], p=1, tolerance=1e-5)
    for op in ("ArgMax", "ArgMin"):
        for axis, last in ((1, 0), (0, 1), (1, 1), (2, 0)):
            yield one(op, [(3, 37, 4)], DType.INT32, axis=axis, select_last_index=last)
        yield one(op, [(5, 40)], kind="wild", axis=-1, keepdims=0)
        yield one(op, [(5, 40)], F16, axis=0)
        yield one(op, [(2, 1500)], axis=1)
    yield from soft()
    yield from normalized()


def soft() -> Iterable[Trial]:
    for op in ("Softmax", "LogSoftmax"):
        for shape, axis in (((4, 50), 1), ((2, 6, 40), 1), ((3, 5, 7), 0), ((2, 3000), 1), ((3, 1), 1), ((9, 7), -1)):
            yield one(op, [shape], axis=axis, tolerance=1e-5)
        yield one(op, [(2, 70000)], axis=1, name="too long for registers", tolerance=1e-4)
        yield one(op, [(2, 3, 20)], axis=1, flattened=1, tolerance=1e-5)
        yield one(op, [(6, 64)], F16, tolerance=2e-3)
        yield one(op, [(6, 64)], BF16, tolerance=1e-2)
        yield one(op, [(6, 64)], F64, tolerance=1e-12)
        yield one(op, [(2, 12, 5, 5)], axis=1, layouts=LAST, layout=LAST, tolerance=1e-5)
    yield one(
        "Softmax",
        [(3, 40)],
        name="of large numbers",
        given={0: rng_of("large").uniform(-500, 500, (3, 40))},
        tolerance=1e-4,
    )
    yield trial(
        "Softmax then mul",
        [("Softmax", {}, (0,)), ("Mul", {}, (-1, 1))],
        [tensor((6, 24)), tensor((6, 1))],
        tolerance=1e-5,
    )
    yield one("Hardmax", [(4, 9)], DType.FLOAT, axis=1)
    yield one("Hardmax", [(4, 9)], F16, axis=0)


def normalized() -> Iterable[Trial]:
    for shape, axis in (((4, 64), -1), ((2, 3, 40), 1), ((3, 2000), -1), ((5, 7), 0), ((2, 3, 5), -1)):
        inner = shape[axis % len(shape) :]
        yield one("LayerNormalization", [shape, inner, inner], axis=axis, tolerance=2e-5)
        yield one("LayerNormalization", [shape, inner], axis=axis, epsilon=0.1, tolerance=2e-5)
        yield one("RMSNormalization", [shape, inner], axis=axis, tolerance=2e-5)
    yield one("LayerNormalization", [(4, 48), (48,), (48,)], F16, tolerance=4e-3)
    yield one("LayerNormalization", [(2, 70000), (70000,)], name="too long for registers", tolerance=1e-4)
    yield one("RMSNormalization", [(4, 6, 8), (6, 1)], axis=-1, tolerance=2e-5)
    yield one("RMSNormalization", [(4, 40), (40,)], [F16, F32], tolerance=4e-3)
    for layout in (PLAIN, LAST):
        yield one(
            "GroupNormalization",
            [(2, 12, 5, 4), (12,), (12,)],
            layouts=(layout, PLAIN, PLAIN),
            layout=layout,
            num_groups=3,
            tolerance=2e-5,
        )
        yield one(
            "InstanceNormalization",
            [(2, 12, 5, 4), (12,), (12,)],
            layouts=(layout, PLAIN, PLAIN),
            layout=layout,
            tolerance=2e-5,
        )
        yield one("MeanVarianceNormalization", [(3, 8, 5, 4)], layouts=layout, layout=layout, tolerance=2e-5)
    yield one("MeanVarianceNormalization", [(3, 8, 5)], axes=(1,), tolerance=2e-5)
    yield one("GroupNormalization", [(2, 4, 30), (4,), (4,)], num_groups=4, tolerance=2e-5)
    yield one("GroupNormalization", [(2, 4, 30), (4,), (4,)], num_groups=2, epsilon=0.01, tolerance=2e-5)
    for p in (1, 2):
        yield one("LpNormalization", [(3, 9, 4)], axis=1, p=p, tolerance=1e-5)
        yield one("LpNormalization", [(3, 40)], F64, axis=-1, p=p, tolerance=1e-12)
    yield one("LpNormalization", [(2, 5)], name="of nothing but zeros", given={0: np.zeros((2, 5))})
    yield trial(
        "LayerNormalization then gelu",
        [("LayerNormalization", {}, (0, 1, 2)), ("Gelu", {}, (-1,)), ("Add", {}, (-2, 3))],
        [tensor((6, 32)), tensor((32,)), tensor((32,)), tensor((6, 32))],
        tolerance=2e-5,
    )


# ── windows ──────────────────────────────────────────────────────────────────────────────────────────────────────


def windows() -> Iterable[Trial]:
    for layout in (PLAIN, LAST):
        lies = {"layouts": layout, "layout": layout}
        for op in ("MaxPool", "AveragePool", "LpPool"):
            yield one(
                op, [(2, 8, 9, 10)], **lies, kernel_shape=(3, 3), strides=(2, 2), pads=(1, 1, 1, 1), tolerance=1e-5
            )
            yield one(
                op,
                [(2, 8, 9, 10)],
                **lies,
                kernel_shape=(2, 3),
                ceil_mode=1,
                strides=(2, 3),
                pads=(0, 1, 1, 0),
                tolerance=1e-5,
            )
            yield one(op, [(1, 8, 9, 7)], **lies, kernel_shape=(2, 2), dilations=(2, 3), tolerance=1e-5)
            yield one(op, [(1, 8, 9, 3)], **lies, kernel_shape=(2, 3), name="to one column", tolerance=1e-5)
        yield one(
            "AveragePool",
            [(2, 8, 6, 6)],
            **lies,
            kernel_shape=(3, 3),
            pads=(1, 0, 1, 1),
            count_include_pad=1,
            tolerance=1e-5,
        )
        yield one("LRN", [(2, 12, 4, 5)], **lies, size=5, alpha=0.3, beta=0.6, bias=1.5, tolerance=1e-5)
        yield one("LRN", [(2, 5, 4, 3)], **lies, size=4, tolerance=1e-5)
    yield one("MaxPool", [(2, 3, 15)], kernel_shape=(4,), strides=(3,))
    yield one("MaxPool", [(1, 2, 5, 6, 7)], kernel_shape=(2, 3, 2), strides=(1, 2, 1), pads=(1, 0, 0, 0, 1, 1))
    yield one("MaxPool", [(1, 4, 8, 8)], F16, kernel_shape=(3, 3), pads=(1, 1, 1, 1), layouts=LAST, layout=LAST)
    # onnx.reference pads with NaN, which no integer is: the same in float64
    settings = {"kernel_shape": (3, 3), "pads": (1, 1, 1, 1)}
    in_doubles = kernel_of([("MaxPool", settings, (0,))], [tensor((1, 4, 8, 8), F64)])
    yield trial(
        "MaxPool int8 with pads",
        [("MaxPool", settings, (0,))],
        [tensor((1, 4, 8, 8), DType.INT8)],
        kind="any",
        wanted=lambda arrays: evaluated(in_doubles)([arrays[0].astype(np.float64)]),
    )
    yield one("MaxPool", [(1, 4, 8, 8)], DType.UINT8, kind="any", kernel_shape=(2, 2))
    yield one("MaxPool", [(1, 4, 8, 8)], kind="wild", kernel_shape=(2, 2), strides=(2, 2))
    yield one("LpPool", [(1, 4, 8, 8)], kernel_shape=(2, 2), p=3, tolerance=1e-5)
    yield one("LpPool", [(1, 4, 8, 8)], kernel_shape=(2, 2), p=1, tolerance=1e-5)
    yield one("AveragePool", [(2, 4, 8, 8)], F16, kernel_shape=(2, 2), tolerance=2e-3)
    yield trial(
        "MaxPool then add relu",
        [("MaxPool", {"kernel_shape": (2, 2)}, (0,)), ("Add", {}, (-1, 1)), ("Relu", {}, (-2,))],
        [tensor((1, 8, 5, 5), layout=LAST), tensor((8, 1, 1))],
        layout=LAST,
    )
    yield trial(
        "AveragePool then mul",
        [("AveragePool", {"kernel_shape": (3, 3)}, (0,)), ("Mul", {}, (-1, 1))],
        [tensor((1, 8, 5, 5)), tensor((1, 8, 3, 3))],
        tolerance=1e-5,
    )
    yield from resized()


def resized() -> Iterable[Trial]:
    modes = ("half_pixel", "asymmetric", "align_corners", "pytorch_half_pixel", "half_pixel_symmetric")
    for mode in ("nearest", "linear", "cubic"):
        for coordinates in modes:
            for scales in ((1.0, 1.0, 2.0, 2.0), (1.0, 1.0, 0.6, 1.7)):
                yield one(
                    "Resize",
                    [(1, 3, 5, 4)],
                    mode=mode,
                    coordinate_transformation_mode=coordinates,
                    scales=scales,
                    tolerance=2e-5,
                )
        yield one("Resize", [(2, 8, 5, 4)], mode=mode, sizes=(2, 8, 9, 3), layouts=LAST, layout=LAST, tolerance=2e-5)
    for rounding in ("round_prefer_floor", "round_prefer_ceil", "floor", "ceil"):
        yield one("Resize", [(1, 2, 7)], nearest_mode=rounding, scales=(1.0, 1.0, 1.5))
    yield one("Resize", [(1, 2, 7)], DType.INT32, sizes=(1, 3, 14), coordinate_transformation_mode="asymmetric")
    yield one("Resize", [(1, 4, 6, 6)], F16, mode="linear", scales=(1.0, 1.0, 2.0, 2.0), tolerance=2e-3)
    yield one("Resize", [(1, 2, 6, 6)], mode="cubic", exclude_outside=1, scales=(1.0, 1.0, 1.5, 2.0), tolerance=2e-5)
    yield one("Resize", [(1, 2, 6, 6)], mode="linear", axes=(3,), sizes=(9,), tolerance=2e-5)
    yield one("Resize", [(1, 2, 6, 6)], mode="linear", scales=(1.0, 1.0, 1.0, 1.0))
    yield trial(
        "Resize then add",
        [("Resize", {"mode": "nearest", "scales": (1.0, 1.0, 2.0, 2.0)}, (0,)), ("Add", {}, (-1, 1))],
        [tensor((1, 8, 3, 4), layout=LAST), tensor((1, 8, 6, 8), layout=LAST)],
        layout=LAST,
    )


def scans() -> Iterable[Trial]:
    for op in ("CumSum", "CumProd"):
        for axis in (0, 1, -1):
            for exclusive, reverse in ((0, 0), (1, 0), (0, 1), (1, 1)):
                yield one(
                    op,
                    [(4, 5, 40), ()],
                    [F32, DType.INT64],
                    given={1: axis},
                    exclusive=exclusive,
                    reverse=reverse,
                    name=f"along {axis}",
                    tolerance=2e-5,
                )
        yield one(op, [(70,), ()], [DType.INT64, DType.INT32], given={1: 0}, exclusive=1)
    yield one("CumSum", [(9, 33), ()], [F16, DType.INT64], given={1: 1}, tolerance=1e-2)
    yield one("CumSum", [(9, 33), ()], [F64, DType.INT64], given={1: 0}, tolerance=1e-12)


def orders() -> Iterable[Trial]:
    for dtype in (F32, F16, DType.INT32, DType.INT64):
        for axis, largest in ((-1, 1), (0, 0), (1, 1)):
            yield one("TopK", [(4, 30, 6)], dtype, axis=axis, k=3, largest=largest)
    yield one("TopK", [(4, 300)], k=300)
    yield one("TopK", [(4, 30)], k=0)
    yield one("BitCast", [(4, 30)], to=DType.INT32)
    yield one("BitCast", [(4, 30)], BOOL, to=DType.UINT8)
    yield one("BitCast", [(4, 30)], DType.UINT16, kind="any", to=DType.INT16)
    yield from rotations()


def rotations() -> Iterable[Trial]:
    positions = rng_of("positions").integers(0, 9, (2, 5))
    for interleaved in (0, 1):
        for part in (0, 4):
            half = (part or 8) // 2
            attrs = {"interleaved": interleaved, "rotary_embedding_dim": part}
            angles = [(9, half), (9, half), (2, 5)]
            types = [F32, F32, F32, DType.INT64]
            yield one("RotaryEmbedding", [(2, 3, 5, 8), *angles], types, given={3: positions}, **attrs)
            yield one("RotaryEmbedding", [(2, 5, 24), *angles], types, given={3: positions}, num_heads=3, **attrs)
            plain = [(2, 5, half)] * 2
            yield one("RotaryEmbedding", [(2, 3, 5, 8), *plain], **attrs)
            yield one("RotaryEmbedding", [(2, 5, 24), *plain], F16, num_heads=3, **attrs)


GROUPS: dict[str, Callable[[], Iterable[Trial]]] = {
    "element-wise": element_wise,
    "movement": movement,
    "rows": rows,
    "windows": windows,
    "scans": scans,
    "orders": orders,
}
