"""A kernel is timed among surroundings like those that it has in a model, and these are not part of its time."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest

from taso.backends.base import Surrounded
from taso.backends.lowering import PLAIN, Kernel, Operand, Step
from taso.backends.onednn import measuring
from taso.backends.onednn.backend import OneDNNBackend
from taso.backends.onednn.measuring import Sweeps, measured, timed
from taso.backends.reference import ReferenceBackend
from taso.graph.errors import BackendError
from taso.graph.operator import Attrs
from taso.graph.ops.elementwise import RELU
from taso.graph.ops.linear import MATMUL
from taso.graph.types import DType, TensorType


class Clock:
    """A clock that only calls move."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now

    def taking(self, seconds: Sequence[float], done: list[str], name: str) -> Callable[[], int]:
        left = list(seconds)

        def call() -> int:
            done.append(name)
            self.now += left.pop(0) if len(left) > 1 else left[0]
            return 0

        return call


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr(measuring, "time", found)
    monkeypatch.setattr(measuring, "interruptions", lambda: 0)
    return found


def test_what_is_around_comes_before_each_run_and_is_no_part_of_its_time(clock: Clock) -> None:
    done: list[str] = []
    run, sweep, write = (clock.taking([s], done, n) for s, n in ((1e-3, "run"), (5e-3, "sweep"), (2e-3, "write")))
    assert timed([run], [sweep, write]) == pytest.approx(1e-3)
    assert len(done) > 9 and done == ["sweep", "write", "run"] * (len(done) // 3)


def test_runs_that_were_interrupted_do_not_count_where_others_do(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    # every other run is interrupted and takes longer; the first one warms up
    seconds = [1e-3] + [1e-2, 1e-3] * 100
    looks = iter(n for i in range(1000) for n in ((2 * i, 2 * i + 1) if i % 2 == 0 else (2 * i, 2 * i)))
    monkeypatch.setattr(measuring, "interruptions", lambda: next(looks))
    assert timed([clock.taking(seconds, [], "run")]) == pytest.approx(1e-3)
    monkeypatch.setattr(measuring, "interruptions", iter(range(10_000)).__next__)
    assert timed([clock.taking([2e-3], [], "run")]) == pytest.approx(2e-3), "all were: they are all there is"


def test_a_kernel_that_takes_long_runs_once_and_one_that_fails_is_an_error(clock: Clock) -> None:
    done: list[str] = []
    assert timed([clock.taking([0.5], done, "run")]) == pytest.approx(0.5) and done == ["run"]
    with pytest.raises(BackendError, match="failed to run"):
        timed([lambda: 1])


def tensor(*dims: int) -> TensorType:
    return TensorType(DType.FLOAT, dims)


def matmul(weights: int) -> Kernel:
    """A product with so many bytes of weights."""
    columns = weights // 4 // 64
    operands = Operand(tensor(8, 64), PLAIN, False), Operand(tensor(64, columns), PLAIN, True)
    return Kernel(operands, (Step(MATMUL, Attrs({}), (0, 1)),), (Operand(tensor(8, columns), PLAIN, False),))


@pytest.mark.parametrize(("weights", "swept"), [(1 << 12, 8), (1 << 18, 16), (1 << 20, 64), (1 << 23, 128)])
def test_more_is_read_before_a_kernel_of_more_weights(weights: int, swept: int) -> None:
    assert measuring.swept_before(matmul(weights)) == swept << 20


@pytest.mark.parametrize(
    ("reads", "swept"), [(0, 8), (1 << 20, 8), (14 << 20, 16), (17 << 20, 16), (30 << 20, 32), (100 << 20, 64)]
)
def test_no_more_is_read_before_a_kernel_than_the_model_reads_beside_its_weights(reads: int, swept: int) -> None:
    assert measuring.swept_before(matmul(1 << 20), reads) == swept << 20
    # what are its own weights is not read before
    assert measuring.swept_before(matmul(8 << 20), 17 << 20) == 8 << 20


def test_costs_in_a_model_that_reads_little_are_kept_by_themselves() -> None:
    backend, kernel = OneDNNBackend(1), matmul(1 << 20)
    small, large = backend.in_model(17 << 20), backend.in_model(1 << 30)
    assert backend.cost_key(kernel) == large.cost_key(kernel) == kernel.key != small.cost_key(kernel)
    assert small.cost_key(matmul(1 << 12)) == matmul(1 << 12).key, "so much is read before it in any model"
    assert isinstance(backend, Surrounded) and not isinstance(ReferenceBackend(), Surrounded)


def test_a_kernel_is_measured_behind_what_its_model_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    of = Sweeps.of
    monkeypatch.setattr(Sweeps, "of", lambda self, size: asked.append(size) or of(self, size))
    for backend in (OneDNNBackend(1), OneDNNBackend(1).in_model(17 << 20)):
        assert backend.measure(matmul(1 << 20)) > 0
    assert asked == [64 << 20, 16 << 20]


def test_a_sweep_reads_all_that_it_is_to_read() -> None:
    sweeps = Sweeps()
    sweep = sweeps.of(8 << 20)
    assert sweeps._read is not None
    read = sweeps._read.view(np.float32)
    # the last element read is the largest
    read[(8 << 20) // 4 - 1] = 7
    assert sweep() is None
    (target,) = [m for m in sweep._keep[1] if m.desc.size < 8 << 20][:1]  # type: ignore[attr-defined]  # a bound call's
    assert target.array().max() == 7
    sweeps.release()
    assert sweeps._read is None and sweeps.of(8 << 20) is not sweep


def test_operands_are_written_before_each_run(monkeypatch: pytest.MonkeyPatch) -> None:
    x = Operand(tensor(4, 64), PLAIN, False)
    kernel = Kernel((x,), (Step(RELU, Attrs({}), (0,)),), (x,))
    rooms: list[np.ndarray[tuple[int, ...], np.dtype[np.uint8]]] = []
    zeroed = measuring.zeroed
    monkeypatch.setattr(measuring, "zeroed", lambda size: rooms.append(zeroed(size)) or rooms[-1])

    def looked_at(calls: Sequence[Callable[[], object]], around: Sequence[Callable[[], object]]) -> float:
        operand, result = rooms[0].view(np.float32), rooms[1].view(np.float32)
        for _ in range(2):
            operand[:], result[:] = 0, -1
            for prepare in around:
                prepare()
            assert operand.any() and not np.all(result == -1), "a small result lies where others have just been"
            for call in calls:
                call()
            assert np.array_equal(result, np.maximum(operand, 0))
        return 1.0

    monkeypatch.setattr(measuring, "timed", looked_at)
    backend = OneDNNBackend(1)
    assert measured(kernel, backend.lowering, Sweeps()) == 1.0
