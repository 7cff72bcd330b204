"""What our CUDA sources promise beside their results: nothing wrong, nothing twice, faults that would be seen."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hosted import Buffer, Library, Trial, buffer_of, compiled_by_nvrtc, compiler, kernel_of, nvrtc, run
from models import relative_error
from trials import F16, F32, LAST, PLAIN, tensor, trial, values

from taso.backends.cudnn.sources.kernels import sourced
from taso.backends.cudnn.sources.launches import Source, Sourced
from taso.backends.cudnn.sources.winograd import tiled_convolution
from taso.backends.fallback import evaluated
from taso.backends.lowering import BLOCKED, Kernel
from taso.backends.onednn.winograd import transformed_filter
from taso.backends.places import OPERAND, RESULT, SCRATCH, Place
from taso.graph.operator import Attrs
from taso.graph.ops.structure import opaque
from taso.graph.types import DType, SymDim, TensorType

needs_compiler = pytest.mark.skipif(compiler() is None, reason="there is no C++ compiler here")
needs_nvrtc = pytest.mark.skipif(nvrtc() is None, reason="there is no NVRTC here")

# ── what is covered, and what is not ─────────────────────────────────────────────────────────────────────────────


def test_what_is_not_covered_is_none() -> None:
    add = [("Add", {}, (0, 1))]
    chains = {
        "a convolution": kernel_of([("Conv", {}, (0, 1))], [tensor((1, 3, 4, 4)), tensor((2, 3, 3, 3))]),
        "a product": kernel_of([("MatMul", {}, (0, 1))], [tensor((3, 4)), tensor((4, 5))]),
        "a long row to sort": kernel_of([("TopK", {"k": 3}, (0,))], [tensor((2, 10000))]),
        "eight-bit floats": kernel_of([("Cast", {"to": DType.FLOAT8E4M3FN}, (0,))], [tensor((3,))]),
        "complex numbers": kernel_of(add, [tensor((3,), DType.COMPLEX64)] * 2),
        "text": kernel_of([("Identity", {}, (0,))], [tensor((3,), DType.STRING)]),
        "channels in blocks": kernel_of(add, [tensor((1, 8, 4, 4), layout=BLOCKED)] * 2, layout=BLOCKED),
        "a reduction of nothing": kernel_of([("ReduceSum", {"axes": (1,)}, (0,))], [tensor((3, 0))]),
        "sums of updates": kernel_of(
            [("ScatterElements", {"reduction": "add"}, (0, 1, 2))],
            [tensor((4, 4)), tensor((2, 4), DType.INT64), tensor((2, 4))],
        ),
        "antialiasing": kernel_of(
            [("Resize", {"antialias": 1, "mode": "linear", "scales": (1.0, 1.0, 0.5)}, (0,))], [tensor((1, 1, 8))]
        ),
        "scales of blocks": kernel_of(
            [("DequantizeLinear", {"block_size": 2, "axis": 0}, (0, 1))], [tensor((4, 3), DType.INT8), tensor((2, 3))]
        ),
    }
    assert {name for name, kernel in chains.items() if sourced(kernel) is not None} == set()


def test_a_symbolic_size_or_an_unknown_operator_is_none() -> None:
    kernel = kernel_of([("Relu", {}, (0,))], [tensor((3, 4))])
    symbolic = TensorType(F32, (SymDim.named("n"), 4))
    operands = (replace(kernel.operands[0], type=symbolic),)
    assert sourced(replace(kernel, operands=operands)) is None
    unknown = opaque("Relu", "")
    step = replace(kernel.steps[0], op=unknown, attrs=Attrs({"proto": b"", "captures": (), "outputs": 1, "opset": 17}))
    assert sourced(replace(kernel, steps=(step,))) is None


def test_a_result_of_no_elements_is_launched_by_nothing() -> None:
    found = sourced(kernel_of([("Add", {}, (0, 1))], [tensor((0, 4)), tensor((1, 4))]))
    assert found is not None and found.launches == ()


def test_equal_kernels_on_other_buffers_have_one_source() -> None:
    first = kernel_of([("Add", {}, (0, 1)), ("Relu", {}, (-1,))], [tensor((4, 8)), tensor((8,))])
    second = kernel_of([("Add", {}, (1, 0)), ("Relu", {}, (-1,))], [tensor((8,)), tensor((4, 8))])
    sources = {found.launches[0].source for found in map(sourced, (first, second)) if found}
    assert len(sources) == 1


def test_only_what_is_read_where_it_is_written_shares_its_memory() -> None:
    def shares(*steps, operands, layout=PLAIN) -> set[int]:  # type: ignore[no-untyped-def]
        found = sourced(kernel_of(steps, operands, layout=layout))
        assert found is not None
        return set(found.shares)

    x, row, half = tensor((4, 16)), tensor((16,)), tensor((4, 16), F16)
    assert shares(("Add", {}, (0, 1)), operands=[x, row]) == {0}
    assert shares(("Add", {}, (0, 1)), operands=[x, x]) == {0, 1}
    assert shares(("Cast", {"to": F16}, (0,)), operands=[x]) == set()
    assert shares(("Relu", {}, (0,)), operands=[half]) == {0}
    assert shares(("Transpose", {"perm": (1, 0)}, (0,)), operands=[tensor((4, 4))]) == set()
    assert shares(("Softmax", {}, (0,)), operands=[x]) == set()
    image, other = tensor((1, 16, 4, 4), layout=LAST), tensor((1, 16, 4, 4))
    assert shares(("Add", {}, (0, 1)), operands=[image, other], layout=LAST) <= {0}


@needs_compiler
def test_in_place_over_an_operand_the_result_is_the_same(tmp_path: Path) -> None:
    made = trial("in place", [("Mul", {}, (0, 0)), ("Add", {}, (-1, 1)), ("Tanh", {}, (-2,))],
                 [tensor((6, 40)), tensor((40,))])  # fmt: skip
    made.sourced = sourced(made.kernel)
    assert made.sourced is not None and made.sourced.shares == {0}
    launch = made.sourced.launches[0]
    both, row = (buffer_of(o, a, 0) for o, a in zip(made.kernel.operands, made.arrays, strict=True))
    table = {(OPERAND, 0): both, (OPERAND, 1): row, (RESULT, 0): both}
    addresses = [table[a.kind, a.index].address for a in launch.arguments if isinstance(a, Place)]
    Library([launch.source], tmp_path).run(launch, addresses, False)
    assert relative_error(both.view(made.kernel.results[0]), np.asarray(made.truth[0])) < made.tolerance


# ── how elements are read ────────────────────────────────────────────────────────────────────────────────────────


def loads(kernel: Kernel) -> str:
    found = sourced(kernel)
    assert found is not None
    return found.launches[0].source.code.partition("section0")[2]


@pytest.mark.parametrize(("dtype", "lanes"), [(F32, 4), (F16, 8), (DType.INT8, 16), (DType.INT64, 2)])
def test_sixteen_bytes_are_read_at_once(dtype: DType, lanes: int) -> None:
    text = loads(kernel_of([("Abs", {}, (0,))], [tensor((3, 64), dtype)]))
    assert f"section0<{lanes}>" in text and f"aligned<{lanes}>" in text and "load<V>" in text


def test_rows_that_sixteen_bytes_do_not_divide_are_read_in_smaller_parts() -> None:
    row = tensor((3, 1, 6)), tensor((1, 5, 6))
    assert "section0<2>" in loads(kernel_of([("Add", {}, (0, 1))], row))
    odd = tensor((3, 1, 7)), tensor((1, 5, 7))
    assert "section0<1>" in loads(kernel_of([("Add", {}, (0, 1))], odd))


def test_axes_that_lie_as_one_are_one_loop() -> None:
    text = loads(kernel_of([("Add", {}, (0, 1))], [tensor((2, 3, 4, 5)), tensor((2, 3, 4, 5))]))
    assert "l0" in text and "l1" not in text


def test_more_than_a_billion_elements_are_counted_in_sixty_four_bits() -> None:
    small, large = (kernel_of([("Relu", {}, (0,))], [tensor((n, 1 << 16))]) for n in (8, 1 << 15))
    codes = [found.launches[0].source.code for found in map(sourced, (small, large)) if found]
    assert "typedef i32 I;" in codes[0] and "typedef i64 I;" in codes[1]


# ── Winograd ─────────────────────────────────────────────────────────────────────────────────────────────────────

CONVOLUTIONS = [
    ((2, 2), (3, 3), (2, 5, 9, 8), 4, (1, 1, 1, 1), LAST),
    ((4, 4), (3, 3), (1, 6, 10, 13), 5, (1, 1, 1, 1), LAST),
    ((4, 4), (3, 3), (2, 3, 8, 11), 4, (0, 2, 1, 0), PLAIN),
    ((2, 2), (3, 3), (1, 3, 4, 4), 2, (0, 0, 0, 0), PLAIN),
    ((1, 4), (1, 7), (1, 4, 5, 12), 3, (0, 3, 0, 3), LAST),
    ((6, 1), (5, 1), (1, 4, 13, 3), 3, (2, 0, 2, 0), PLAIN),
]


@needs_compiler
@pytest.mark.parametrize("behind", [False, True])
@pytest.mark.parametrize(("tile", "taps", "shape", "filters", "pads", "layout"), CONVOLUTIONS)
def test_tiles_give_the_convolution(
    tile: tuple[int, int], taps: tuple[int, int], shape: tuple[int, ...], filters: int, pads: tuple[int, ...],
    layout: str, behind: bool, tmp_path: Path,
) -> None:  # fmt: skip
    steps = [("Conv", {"pads": pads}, (0, 1, 2))]
    operands = [tensor(shape, layout=layout), tensor((filters, shape[1], *taps), constant=True), tensor((filters,))]
    if behind:
        out = kernel_of(steps, operands).results[0].type.static_shape
        operands.append(tensor(out, layout=layout))
        steps += [("Add", {}, (-1, 3)), ("Relu", {}, (-2,))]
    kernel = kernel_of(steps, operands, layout=layout)
    found = tiled_convolution(kernel, *tile, Place(SCRATCH, 0), Place(SCRATCH, 1))
    assert found is not None
    rng = np.random.default_rng(3)
    arrays = [values(o.type.static_shape, F32, rng, "small") for o in operands]
    library = Library([found.data.source, found.outputs.source], tmp_path)
    buffers = {(OPERAND, i): buffer_of(o, a, 0) for i, (o, a) in enumerate(zip(operands, arrays, strict=True))}
    buffers[RESULT, 0] = buffer_of(kernel.results[0], None, 0)
    sizes = [found.positions * found.tiles * n * 4 for n in (found.channels, found.filters)]
    data, products = (Buffer(size) for size in sizes)
    buffers |= {(SCRATCH, 0): data, (SCRATCH, 1): products}
    pieces = [
        np.ndarray((found.positions, found.tiles, n) if found.last else (found.positions, n, found.tiles), np.float32,
                   b.held.data, b.start)
        for n, b in ((found.channels, data), (found.filters, products))
    ]  # fmt: skip
    weights = transformed_filter(arrays[1], found.rows, found.columns)
    for launch in (found.data, found.outputs):
        addresses = [buffers[a.kind, a.index].address for a in launch.arguments if isinstance(a, Place)]
        library.run(launch, addresses, False)
        if launch is found.data:
            moved = pieces[0] if found.last else pieces[0].transpose(0, 2, 1)
            product = moved @ weights
            pieces[1][...] = product if found.last else product.transpose(0, 2, 1)
    (truth,) = evaluated(kernel)(arrays)
    assert relative_error(buffers[RESULT, 0].view(kernel.results[0]), truth) < 1e-5
    assert all(b.unharmed for b in buffers.values())


@needs_nvrtc
def test_nvrtc_compiles_the_transforms_of_tiles() -> None:
    for tile, taps, shape, filters, pads, layout in CONVOLUTIONS[:3]:
        operands = [tensor(shape, layout=layout), tensor((filters, shape[1], *taps), constant=True)]
        kernel = kernel_of([("Conv", {"pads": pads}, (0, 1)), ("Relu", {}, (-1,))], operands, layout=layout)
        found = tiled_convolution(kernel, *tile, Place(SCRATCH, 0), Place(SCRATCH, 1))
        assert found is not None
        assert [compiled_by_nvrtc(x.source.code, "sm_90") for x in (found.data, found.outputs)] == ["", ""]


@pytest.mark.parametrize("attrs", [{"strides": (2, 2)}, {"dilations": (2, 2)}, {"group": 2}])
def test_a_convolution_that_tiles_cannot_compute_is_none(attrs: dict[str, object]) -> None:
    weight = tensor((4, 2 if "group" in attrs else 4, 3, 3), constant=True)
    kernel = kernel_of([("Conv", attrs, (0, 1))], [tensor((1, 4, 9, 9)), weight])
    assert tiled_convolution(kernel, 2, 2, Place(SCRATCH, 0), Place(SCRATCH, 1)) is None


# ── faults that are put in are seen ──────────────────────────────────────────────────────────────────────────────


def corrupted(made: Trial, old: str, new: str) -> Trial:
    """The trial with the first place in its kernel's text changed."""
    assert made.sourced is not None
    head, entry, text = made.sourced.launches[-1].source.code.partition("typedef i32 I;")
    assert re.search(old, text), f"there is no {old} in it"
    source = made.sourced.launches[-1].source
    changed = Source(source.name, head + entry + re.sub(old, new, text, count=1), source.entry)
    launches = (*made.sourced.launches[:-1], replace(made.sourced.launches[-1], source=changed))
    return replace(made, sourced=Sourced(launches, made.sourced.scratch))


FAULTS = {
    "an operation": (("Add", [(6, 8), (8,)]), r"add\(x0, x1\)", "sub(x0, x1)"),
    "a stride": (("Add", [(6, 8), (6, 1)]), r"p(\d) \+ l0", r"p\1 + l1"),
    "a barrier": (("Transpose", [(40, 50)]), r"__syncthreads\(\);", ""),
    "a bound": (("Add", [(300, 7), (7,)]), r"i < (\d+)", "i < 1000"),
    "an end": (("ReduceSum", [(5, 1500)]), r"at < (\d+)", "at < 1400"),
    "a join": (("Softmax", [(4, 40)]), r"joined_in_group<\d+, Add>\(sum\)", "sum"),
    "writing too far": (("Relu", [(5, 7)]), r"i < (\d+); i", "i < 40; i"),
}


@needs_compiler
@pytest.mark.parametrize("fault", FAULTS)
def test_a_corrupted_source_is_caught(fault: str, tmp_path: Path) -> None:
    (op, shapes), old, new = FAULTS[fault]
    attrs = {"ReduceSum": {"axes": (1,)}}.get(op, {})
    made = trial(f"fault {fault}", [(op, attrs, tuple(range(len(shapes))))], [tensor(s) for s in shapes])
    made.sourced = sourced(made.kernel)
    assert not fails(made, tmp_path / "right")
    assert fails(corrupted(made, old, new), tmp_path / "wrong")


def fails(made: Trial, folder: Path) -> bool:
    folder.mkdir()
    assert made.sourced is not None
    library = Library([x.source for x in made.sourced.launches], folder)
    for shift, backwards in ((0, False), (1, True)):
        try:
            found = run(made, library, shift, backwards)
        except AssertionError:
            return True
        if any(not relative_error(a, np.asarray(b)) < 1e-4 for a, b in zip(found, made.truth, strict=True)):
            return True
    return False


@needs_nvrtc
def test_nvrtc_says_what_is_wrong_with_a_corrupted_source() -> None:
    found = sourced(kernel_of([("Relu", {}, (0,))], [tensor((8,))]))
    assert found is not None
    code = found.launches[0].source.code
    assert "error" in compiled_by_nvrtc(code.replace("most(x0", "moist(x0"), "sm_80")
