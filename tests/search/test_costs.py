"""Costs are measured once, kept, shared between processes, and never a reason to fail."""

from __future__ import annotations

import json
import os
import random
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import onnx
import pytest
from searching import FormulaBackend, random_graph

import taso
from taso import api
from taso.backends.costs import CostDatabase, cache_folder
from taso.backends.lowering import Kernel
from taso.rules.collection import library
from taso.search import optimize as search
from taso.search.optimize import Settings, usable

ROOT = Path(__file__).parents[2]


class Counting(FormulaBackend):
    """Says that it measures, and counts how often."""

    measures = True

    def __init__(self, device: str = "counting", factor: float = 1.0) -> None:
        super().__init__()
        self.count = 0
        self.device = device
        self.factor = factor

    def device_key(self) -> str:
        return self.device

    def measure(self, kernel: Kernel) -> float:
        self.count += 1
        return super().measure(kernel) * self.factor


class Surrounded(Counting):
    """Its kernels cost the same, but are kept by what the model reads."""

    reads = 0

    def in_model(self, reads: int) -> Surrounded:
        self.reads = reads
        return self

    def cost_key(self, kernel: Kernel) -> str:
        return f"{kernel.key} of {self.reads}"


def optimized(graph: taso.Graph, backend: FormulaBackend, cache: CostDatabase, **more: object) -> taso.Graph:
    settings = Settings(backend, usable(library()), cache, verify=False, **more)  # type: ignore[arg-type]  # fields
    settings.limits.budget = 10
    best, report = search.optimize(graph, settings)
    assert isinstance(best, taso.Graph)
    if best is graph:
        best = taso.load(taso.export_onnx(graph))
    best._report = report
    return best


def bytes_of(graph: taso.Graph) -> bytes:
    return taso.export_onnx(graph).SerializeToString(deterministic=True)


def test_costs_are_those_of_the_model_that_is_optimized(tmp_path: Path) -> None:
    cache = CostDatabase(tmp_path)

    def graph(columns: int) -> taso.Graph:
        made = taso.new_graph()
        product = made.matmul(made.new_input(dims=(4, 8)), made.new_weight(dims=(8, columns)))
        made.relu(made.relu(made.transpose(product, (1, 0), shuffle=True)))
        return made

    for columns in (16, 24):
        backend = Surrounded()
        optimized(graph(columns), backend, cache)
        assert backend.reads == 4 * 8 * columns and backend.count > 0
        again = Surrounded()
        assert optimized(graph(columns), again, cache).report.kernels_measured == again.count == 0
        assert search.cost(graph(columns), Settings(again, (), cache)) > 0 and again.count == 0


def test_what_a_model_with_bodies_reads_is_not_known(tmp_path: Path) -> None:
    text = """<ir_version: 10, opset_import: ["": 21]> choosing (bool on, float[4, 8] x) => (float[4, 8] y)
    <float[4, 8] w = {%s}>
    {
        z = Add (x, w)
        y = If (on) <
            then_branch = more () => (float[4, 8] a) { a = Relu (z) },
            else_branch = less () => (float[4, 8] b) { b = Neg (z) }
        >
    }"""
    backend = Surrounded()
    optimized(taso.load(onnx.parser.parse_model(text % ", ".join(["1.5"] * 32))), backend, CostDatabase(tmp_path))
    assert backend.reads == 0


# ── measured once ────────────────────────────────────────────────────────────────────────────────────────────────


def test_each_kernel_is_measured_once_and_a_second_run_measures_nothing_and_decides_the_same(tmp_path: Path) -> None:
    first, second = Counting(), Counting()
    cache = CostDatabase(tmp_path)
    one = optimized(random_graph(random.Random(5), 16), first, cache)
    assert first.count == one.report.kernels_measured > 5
    two = optimized(random_graph(random.Random(5), 16), second, CostDatabase(tmp_path))
    assert second.count == two.report.kernels_measured == 0
    assert two.report.kernels_known == one.report.kernels_measured + one.report.kernels_known
    assert two.report.decision == one.report.decision
    assert (two.report.measured_before, two.report.ratio_low) == (one.report.measured_before, one.report.ratio_low)
    assert bytes_of(two) == bytes_of(one)


def test_what_is_stored_counts_even_where_it_would_be_measured_otherwise_by_now(tmp_path: Path) -> None:
    one = optimized(random_graph(random.Random(5)), Counting(), CostDatabase(tmp_path), never_slower=False)
    two = optimized(random_graph(random.Random(5)), Counting(factor=7.0), CostDatabase(tmp_path), never_slower=False)
    assert two.report.cost_before == one.report.cost_before and two.report.cost_after == one.report.cost_after


def test_another_device_is_measured_anew(tmp_path: Path) -> None:
    for device in ("one", "other"):
        backend = Counting(device)
        optimized(random_graph(random.Random(5)), backend, CostDatabase(tmp_path))
        assert backend.count > 5


def test_costs_by_a_formula_are_not_stored(tmp_path: Path) -> None:
    optimized(random_graph(random.Random(5)), FormulaBackend(), CostDatabase(tmp_path))
    connection = sqlite3.connect(tmp_path / "costs.sqlite3")
    assert connection.execute("select count(*) from cost").fetchone() == (0,)
    connection.close()


def test_the_first_measurement_of_a_kernel_is_the_one_that_counts(tmp_path: Path) -> None:
    first, second = CostDatabase(tmp_path), CostDatabase(tmp_path)
    assert first.keep_cost("d", "k", 1.0) == 1.0
    assert second.keep_cost("d", "k", 2.0) == 1.0
    assert first.cost("d", "k") == second.cost("d", "k") == 1.0
    assert first.cost("d", "other") is None and first.cost("other", "k") is None


def test_verdicts_are_kept_by_device_and_both_graphs(tmp_path: Path) -> None:
    CostDatabase(tmp_path).keep_verdict("d", "a", "b", (1.0, 2.0, 0.4, 0.6))
    again = CostDatabase(tmp_path)
    assert again.verdict("d", "a", "b") == (1.0, 2.0, 0.4, 0.6)
    assert [again.verdict(*key) for key in (("e", "a", "b"), ("d", "b", "a"), ("d", "a", "c"))] == [None] * 3


def test_the_spread_of_times_is_kept_beside_a_verdict(tmp_path: Path) -> None:
    CostDatabase(tmp_path).keep_spread("d", "a", "b", (1.0, 1.5, 0.5, 0.75))
    again = CostDatabase(tmp_path)
    assert again.spread("d", "a", "b") == (1.0, 1.5, 0.5, 0.75) and again.spread("d", "b", "a") is None


def test_measurements_are_printed_where_that_was_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    optimized(random_graph(random.Random(5)), Counting(), CostDatabase(tmp_path), print_measurements=True)
    assert capsys.readouterr().out.startswith("measured ")


# ── where it is kept ─────────────────────────────────────────────────────────────────────────────────────────────


def test_the_cache_folder_can_be_moved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TASO_CACHE_DIR", str(tmp_path / "moved" / "here"))
    assert cache_folder() == tmp_path / "moved" / "here"
    taso.optimize(random_graph(random.Random(1)), backend=Counting("moved"), never_slower=False, budget=2)
    assert (tmp_path / "moved" / "here" / "costs.sqlite3").exists()
    api._databases.pop(str(tmp_path / "moved" / "here")).close()


@pytest.mark.parametrize("kind", ["garbage", "truncated", "empty", "another database", "zeros in the middle"])
def test_a_file_that_is_damaged_is_begun_anew(kind: str, tmp_path: Path) -> None:
    graph = random_graph(random.Random(5), 16)
    cache = CostDatabase(tmp_path)
    wanted = bytes_of(optimized(graph, Counting(), cache, never_slower=False))
    for number in range(2000):
        cache.keep_cost("filling", f"kernel {number}", 1.0)
    cache.close()
    path = tmp_path / "costs.sqlite3"
    whole = path.read_bytes()
    if kind == "another database":
        path.unlink()
        other = sqlite3.connect(path)
        other.execute("create table cost (something text)")
        other.commit()
        other.close()
    else:
        middle = len(whole) // 2
        path.write_bytes(
            {
                "garbage": random.Random(1).randbytes(5000), "truncated": whole[: middle - 100], "empty": b"",
                "zeros in the middle": whole[: middle - 9000] + bytes(18000) + whole[middle + 9000 :],
            }[kind]
        )  # fmt: skip
    for _ in range(2):
        backend = Counting()
        again = CostDatabase(tmp_path)
        assert bytes_of(optimized(graph, backend, again, never_slower=False)) == wanted
        again.close()
    assert backend.count == 0 or kind == "another database"


def test_a_file_that_breaks_while_in_use_is_left_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    cache = CostDatabase(tmp_path)
    cache.keep_cost("d", "k", 1.0)
    cache._connection.close()
    assert cache.cost("d", "k") == 1.0
    assert cache.keep_cost("d", "new", 2.0) == 2.0 and cache.cost("d", "new") == 2.0
    assert "memory" in caplog.text


def test_a_folder_that_cannot_be_written_is_no_reason_to_fail(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("no folder")
    cache = CostDatabase(tmp_path / "file")
    backend = Counting()
    assert optimized(random_graph(random.Random(5)), backend, cache).report.kernels_measured == backend.count > 0
    assert "memory only" in caplog.text
    assert cache.keep_cost("d", "k", 1.0) == 1.0 == cache.cost("d", "k")


@pytest.mark.skipif(os.geteuid() == 0, reason="the superuser may write anywhere")
def test_a_folder_without_permission_is_no_reason_to_fail(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    try:
        assert CostDatabase(tmp_path / "below").keep_cost("d", "k", 1.0) == 1.0
        assert CostDatabase(tmp_path).keep_cost("d", "k", 1.0) == 1.0
    finally:
        tmp_path.chmod(0o700)


# ── other processes ──────────────────────────────────────────────────────────────────────────────────────────────

PROGRAM = """
import hashlib, json, random, sys
sys.path[:0] = sys.argv[1:]
import taso
from searching import random_graph
from taso.search import decision
held = decision.contest
def sure(*given):
    # a contest that leaves the question open is held again by the next process
    timings = held(*given)
    for t in timings:
        t.low, t.high = (t.low, t.high) if t.decided else (1.001, 1.002)
    return timings
decision.contest = sure
best = taso.optimize(random_graph(random.Random(5), 16), budget=5)
r = best.report
print(json.dumps({
    "measured": r.kernels_measured, "known": r.kernels_known, "decision": r.decision, "cost": r.cost_after,
    "times": [r.measured_before, r.measured_after, r.ratio_low],
    "file": hashlib.sha256(taso.export_onnx(best).SerializeToString()).hexdigest(),
}))
"""


def started(cache: Path) -> subprocess.Popen[str]:
    folders = [str(ROOT / "tests" / "graph"), str(ROOT / "tests" / "search"), str(ROOT)]
    environment = {**os.environ, "TASO_CACHE_DIR": str(cache)}
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, *folders], stdout=subprocess.PIPE, text=True, env=environment, cwd=ROOT
    )


def told(process: subprocess.Popen[str]) -> dict[str, object]:
    out, _ = process.communicate()
    assert process.returncode == 0
    found = json.loads(out)
    assert isinstance(found, dict)
    return found


def test_a_fresh_process_measures_nothing_and_decides_the_same_on_the_default_backend(tmp_path: Path) -> None:
    first, second = told(started(tmp_path)), told(started(tmp_path))
    assert second["measured"] == 0
    assert {k: second[k] for k in ("decision", "cost", "times", "file")} == {
        k: first[k] for k in ("decision", "cost", "times", "file")
    }


def test_two_processes_at_once_share_one_database(tmp_path: Path) -> None:
    results = [told(p) for p in [started(tmp_path) for _ in range(2)]]
    assert not [r["decision"] for r in results if "could not" in str(r["decision"])]
    assert CostDatabase(tmp_path)._connection.execute("pragma integrity_check").fetchone() == ("ok",)
    third = told(started(tmp_path))
    assert third["measured"] == 0


WRITER = """
import sys
from pathlib import Path
from taso.backends.costs import CostDatabase
cache = CostDatabase(Path(sys.argv[1]))
for i in range(400):
    kept = cache.keep_cost("device", f"kernel {i}", float(sys.argv[2]))
    assert kept in (1.0, 2.0, 3.0)
print(sum(cache.cost("device", f"kernel {i}") for i in range(400)))
"""


def test_processes_that_write_the_same_kernels_agree_on_every_one(tmp_path: Path) -> None:
    commands = [[sys.executable, "-c", WRITER, str(tmp_path), str(n)] for n in (1, 2, 3)]
    running = [subprocess.Popen(c, stdout=subprocess.PIPE, text=True, cwd=ROOT) for c in commands]
    sums = {p.communicate()[0] for p in running}
    assert all(p.returncode == 0 for p in running)
    assert len(sums) == 1


OPENER = """
import sys, time
from pathlib import Path
from taso.backends.costs import CostDatabase
for i in range(150):
    # all processes at once, as nearly as clocks say
    while time.time() < float(sys.argv[2]) + 0.02 * i:
        pass
    database = CostDatabase(Path(sys.argv[1]) / str(i))
    database.keep_cost("device", "kernel", float(sys.argv[3]))
    print(database.cost("device", "kernel"))
    database.close()
"""


def test_processes_that_open_a_new_database_at_once_all_share_it(tmp_path: Path) -> None:
    start = str(time.time() + 2)
    commands = [[sys.executable, "-c", OPENER, str(tmp_path), start, str(n)] for n in (1, 2, 3, 4)]
    pipe = subprocess.PIPE
    running = [subprocess.Popen(c, stdout=pipe, stderr=pipe, text=True, cwd=ROOT) for c in commands]
    told = [p.communicate() for p in running]
    assert len({out for out, _ in told}) == 1 and told[0][0]
    assert [warned for _, warned in told] == [""] * 4
