"""A search that was cut off and goes on from its checkpoint comes to what it would have come to at once."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx.parser
import pytest
from searching import FormulaBackend, planted_graph, prepared, random_graph

import taso
from taso.graph.errors import SearchError
from taso.graph.ops import WEIGHT
from taso.rules.collection import library
from taso.rules.constants import CONSTANTS, ConstantWeight
from taso.rules.matcher import Matcher
from taso.search import checkpoint as keeping
from taso.search.backtracking import Backtracking
from taso.search.checkpoint import Checkpoint, Unfit, kept_store, packed, restore_store, unpacked
from taso.search.moves import Limits
from taso.search.state import State

ROOT = Path(__file__).parents[2]
ALPHA, BUDGET = 1.05, 24


def graph_of(seed: int) -> taso.Graph:
    return random_graph(random.Random(seed), 14)


def optimized(graph: taso.Graph, **settings: object) -> taso.Graph:
    given = {"alpha": ALPHA, "budget": BUDGET, "backend": FormulaBackend(), "never_slower": False, "verify": False}
    return taso.optimize(graph, search="backtracking", **{**given, **settings})  # type: ignore[arg-type]  # settings


def told(best: taso.Graph) -> tuple[object, ...]:
    """The bytes of the result and all that its report says of the search, the seconds aside."""
    report = best.report
    return (
        taso.export_onnx(best).SerializeToString(deterministic=True), report.rewrites, report.cost_after,
        report.expanded, report.candidates, report.duplicates, report.refused, report.near_misses,
        [cost for _, cost in report.course],
    )  # fmt: skip


# ── going on ─────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("seed", range(6))
def test_a_search_cut_off_by_its_budget_goes_on_to_the_same_end(seed: int, tmp_path: Path) -> None:
    graph = graph_of(seed)
    whole = told(optimized(graph))
    for number, budgets in enumerate([(1,), (5,), (2, 3, 9, 17), (BUDGET,)]):
        file = tmp_path / f"{number}.taso"
        for budget in budgets:
            optimized(graph, budget=budget, checkpoint=file)
        best = optimized(graph, checkpoint=file)
        assert told(best) == whole
        assert best.report.resumed > 0 and any("went on from" in m for m in best.report.messages)
        assert [p.name for p in tmp_path.iterdir() if p.name.startswith(file.stem)] == [file.name]


@pytest.mark.parametrize("seed", range(3))
def test_an_interrupted_search_goes_on_to_the_same_end(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph = graph_of(seed)
    whole = told(optimized(graph))
    evaluated, reached = Backtracking._evaluated, Backtracking._reached
    left = [0]

    def count() -> None:
        left[0] -= 1
        if left[0] == 0:
            raise KeyboardInterrupt

    def counting_evaluated(self: Backtracking, *given: object) -> object:
        found = evaluated(self, *given)  # type: ignore[arg-type]  # as it was called
        count()
        return found

    def counting_reached(self: Backtracking, *given: object) -> object:
        count()
        return reached(self, *given)  # type: ignore[arg-type]  # as it was called

    monkeypatch.setattr(Backtracking, "_evaluated", counting_evaluated)
    monkeypatch.setattr(Backtracking, "_reached", counting_reached)
    for after in (1, 2, 7, 20, 33, 46):
        file = tmp_path / f"{after}.taso"
        left[0] = after
        stopped = optimized(graph, checkpoint=file).report.stopped
        assert stopped == "interrupted" or left[0] > 0
        left[0] = 0
        assert told(optimized(graph, checkpoint=file)) == whole


def test_a_search_cut_off_by_time_goes_on_to_the_same_end(tmp_path: Path) -> None:
    graph = graph_of(1)
    whole = told(optimized(graph))
    for number, seconds in enumerate((0.0, 0.02, 0.05, 0.1)):
        file = tmp_path / f"{number}.taso"
        optimized(graph, checkpoint=file, time_limit=seconds)
        assert told(optimized(graph, checkpoint=file)) == whole


@pytest.mark.parametrize("seed", range(4))
def test_graphs_in_which_many_rules_apply_go_on_to_the_same_end(seed: int, tmp_path: Path) -> None:
    graph = planted_graph(random.Random(seed))
    whole = told(optimized(graph, budget=12))
    optimized(graph, budget=4, checkpoint=tmp_path / "c")
    assert told(optimized(graph, budget=12, checkpoint=tmp_path / "c")) == whole


KILLED = """
import os, random, sys
sys.path[:0] = sys.argv[3:]
import taso
from searching import FormulaBackend, random_graph
from taso.search import checkpoint
from taso.search.backtracking import Backtracking
checkpoint.EVERY = 0.0
left, evaluated = [int(sys.argv[2])], Backtracking._evaluated
def dying(self, *given):
    left[0] -= 1
    if left[0] == 0:
        os._exit(9)
    return evaluated(self, *given)
Backtracking._evaluated = dying
taso.optimize(random_graph(random.Random(1), 14), 1.05, 24, backend=FormulaBackend(), never_slower=False, verify=False,
              search="backtracking", checkpoint=sys.argv[1])
"""


def test_a_killed_process_leaves_a_checkpoint_that_another_goes_on_from(tmp_path: Path) -> None:
    graph = graph_of(1)
    whole = told(optimized(graph))
    for after, some in ((3, False), (25, True)):
        file = tmp_path / str(after)
        folders = [str(ROOT / "tests" / "graph"), str(ROOT / "tests" / "search"), str(ROOT)]
        program = [sys.executable, "-c", KILLED, str(file), str(after), *folders]
        assert subprocess.run(program, cwd=ROOT, env={**os.environ, "PYTHONHASHSEED": str(after)}).returncode == 9
        best = optimized(graph, checkpoint=file)
        assert (best.report.resumed > 0) == some and told(best) == whole


def test_an_ended_search_is_not_searched_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    graph = graph_of(0)
    whole = told(optimized(graph, budget=1000, checkpoint=tmp_path / "c"))
    monkeypatch.setattr(Backtracking, "_candidate", lambda self, position, key: pytest.fail("searched again"))
    assert told(optimized(graph, budget=2000, checkpoint=tmp_path / "c")) == whole


def test_with_every_step_checked_a_search_goes_on_as_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TASO_CHECK_EVERY_STEP", "1")
    graph = graph_of(1)
    whole = told(optimized(graph, budget=8))
    optimized(graph, budget=3, checkpoint=tmp_path / "c")
    assert told(optimized(graph, budget=8, checkpoint=tmp_path / "c")) == whole


# ── what cannot be gone on from ──────────────────────────────────────────────────────────────────────────────────


def assert_begins_anew(graph: taso.Graph, file: Path, why: str, **settings: object) -> None:
    whole = told(optimized(graph, **settings))
    best = optimized(graph, checkpoint=file, **settings)
    assert told(best) == whole and best.report.resumed == 0
    (said,) = (m for m in best.report.messages if "checkpoint" in m)
    assert why in said and ".unfit" in said
    assert Path(f"{file}.unfit").exists()
    assert told(optimized(graph, checkpoint=file, **settings)) == whole


def spoiled(content: bytes, how: str) -> bytes:
    middle = len(content) // 2
    return {
        "cut": content[:middle], "empty": b"", "flipped": content[:middle] + b"\0\1" + content[middle + 2 :],
        "longer": content + b"more", "no checkpoint": b"\x80\x04\x95", "head alone": content[:20],
        "old": content.replace(b"checkpoint 1", b"checkpoint 0"),
    }[how]  # fmt: skip


@pytest.mark.parametrize("how", ["cut", "empty", "flipped", "longer", "no checkpoint", "head alone", "old"])
def test_a_damaged_checkpoint_is_one_warning_and_a_new_beginning(
    how: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    graph, file = graph_of(2), tmp_path / "c"
    optimized(graph, budget=3, checkpoint=file)
    file.write_bytes(spoiled(file.read_bytes(), how))
    caplog.clear()
    assert_begins_anew(graph, file, "cannot be used")
    assert [r.levelname for r in caplog.records if "checkpoint" in r.message] == ["WARNING"]


@pytest.mark.parametrize("what", ["graph", "weight", "rules", "alpha", "costs"])
def test_a_checkpoint_of_another_search_is_not_gone_on_from(what: str, tmp_path: Path) -> None:
    def given(value: float) -> taso.Graph:
        graph = taso.new_graph()
        x = graph.transpose(graph.relu(graph.relu(graph.new_input(dims=(4, 4)))), (1, 0))
        graph.tanh(graph.add(x, graph.new_weight(dims=(4, 4), data=np.full((4, 4), value, np.float32))))
        return graph

    class Dearer(FormulaBackend):
        def measure(self, kernel: object) -> float:
            return 2 * super().measure(kernel)  # type: ignore[arg-type]  # as it was called

    file = tmp_path / "c"
    optimized(given(0.0), budget=2, checkpoint=file)
    settings: dict[str, object] = {
        "rules": {"rules": ["-relu-twice"]}, "alpha": {"alpha": 1.2}, "costs": {"backend": Dearer()}
    }.get(what, {})  # fmt: skip
    graph = graph_of(4) if what == "graph" else given(1.0) if what == "weight" else given(0.0)
    assert_begins_anew(graph, file, "another graph, other rules, other costs or another alpha", **settings)


def test_a_forged_checkpoint_never_ends_in_anything_but_a_result(tmp_path: Path) -> None:
    graph, file, rng = graph_of(1), tmp_path / "c", random.Random(0)
    original = optimized(graph, budget=0)
    optimized(graph, budget=4, checkpoint=file)
    content = file.read_bytes()
    for _ in range(40):
        data = unpacked(content)
        changed(data, rng)
        file.write_bytes(packed(data))
        best = optimized(graph, checkpoint=file, verify=True, budget=6)
        assert best.report.verified is not False
        assert len(best.outputs) == len(original.outputs)


def changed(data: object, rng: random.Random) -> None:
    """Changes one leaf somewhere below."""
    while True:
        keys = list(data) if isinstance(data, dict) else list(range(len(data))) if isinstance(data, list) else []
        key = rng.choice([k for k in keys if k != "identity"])
        below = data[key]  # type: ignore[index]  # a container with that key
        if isinstance(below, (dict, list)) and below:
            data = below
            continue
        data[key] = rng.choice([None, -1, 0, 7, 1 << 70, 0.5, "x", [], {}, [[]]])  # type: ignore[index]  # as above
        return


def test_what_claims_to_be_endless_is_not_unpacked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keeping, "_MOST", 1000)
    with pytest.raises(Unfit, match="damaged"):
        unpacked(packed({"zeros": "0" * 5000}))


def test_a_file_that_cannot_be_written_is_told_before_the_search(tmp_path: Path) -> None:
    for path in (tmp_path / "no" / "folder" / "c", tmp_path, ""):
        with pytest.raises(SearchError, match="no checkpoint can be kept"):
            optimized(graph_of(0), checkpoint=path)


def test_a_checkpoint_that_fails_to_be_written_does_not_end_the_search(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*given: object) -> None:
        raise OSError(28, "No space left on device")

    graph = graph_of(1)
    whole = told(optimized(graph))
    monkeypatch.setattr(keeping.os, "fsync", full)
    best = optimized(graph, checkpoint=tmp_path / "c")
    assert told(best) == whole and list(tmp_path.iterdir()) == []
    assert [m for m in best.report.messages if "No space left" in m]


def test_an_interruption_while_the_last_checkpoint_is_written_leaves_the_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*given: object) -> None:
        raise KeyboardInterrupt

    graph = graph_of(1)
    whole = told(optimized(graph))
    optimized(graph, budget=3, checkpoint=tmp_path / "c")
    before = (tmp_path / "c").read_bytes()
    monkeypatch.setattr(keeping.os, "fsync", interrupted)
    best = optimized(graph, checkpoint=tmp_path / "c")
    assert told(best) == whole and best.report.stopped == "interrupted"
    assert [p.read_bytes() for p in tmp_path.iterdir()] == [before]


def test_a_graph_with_random_operators_is_searched_without_a_checkpoint(tmp_path: Path) -> None:
    model = onnx.parser.parse_model(
        """<ir_version: 8, opset_import: ["" : 17]>
        g (float[2,3] x) => (float[2,3] z) { y = RandomUniformLike(x)  a = Relu(y)  z = Relu(a) }"""
    )
    best = optimized(taso.load(model), checkpoint=tmp_path / "c")
    assert best.report.changed and list(tmp_path.iterdir()) == []
    assert any("random operators" in m for m in best.report.messages)


# ── the store ────────────────────────────────────────────────────────────────────────────────────────────────────


def searched(graph: taso.Graph) -> tuple[State, int, int]:
    state = prepared(graph).state
    store = state.setting.store
    before = len(store.entries), len(store.class_types)
    Backtracking(state, Matcher(library()), Limits(alpha=1.1, budget=2)).run()
    return state, *before


def test_a_store_comes_back_under_the_same_numbers() -> None:
    constants = 0
    making = [r for r in library() if any(n.op in CONSTANTS for n in r.target)]
    for seed in range(6):
        graph = planted_graph(random.Random(seed), None if seed < 3 else making)
        state, nodes, classes = searched(graph)
        store, other = state.setting.store, prepared(graph).state.setting.store
        data = unpacked(packed(kept_store(store, nodes, classes)))
        restore_store(other, data, nodes, classes)
        for a, b in zip(store.entries, other.entries, strict=True):
            assert (a.op, a.inputs, a.types, a.constant, a.hash, a.origin) == (
                b.op, b.inputs, b.types, b.constant, b.hash, b.origin
            )  # fmt: skip
            assert a.classes == b.classes
            assert a.op is WEIGHT or a.attrs == b.attrs
        assert store.class_hashes == other.class_hashes and store.class_origins == other.class_origins
        assert store.class_types == other.class_types and store.class_layouts == other.class_layouts
        constants += sum(isinstance(e.attrs.get("data"), ConstantWeight) for e in store.entries[nodes:])
    assert constants > 0


def test_a_keeper_says_whether_there_was_something_to_go_on_from(tmp_path: Path) -> None:
    state = prepared(graph_of(0)).state
    keeper = Checkpoint(tmp_path / "c")
    search = Backtracking(state, Matcher(library()), Limits(budget=2), keeper=keeper)
    search.run()
    assert keeper.resumed == 0 and keeper.messages == []
