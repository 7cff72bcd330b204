"""What a caller is told while `taso.optimize` runs, and that no callback can lose the result."""

from __future__ import annotations

import ast
import logging
import subprocess
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import taso
from taso.search import watching
from taso.search.moves import Statistics
from taso.search.progress import busy

PACKAGE = Path(taso.__file__).parent


def graph() -> taso.Graph:
    """Products that share an input, which pay to be merged."""
    made = taso.new_graph()
    for x in (made.new_input(dims=(16, 32)), made.new_input(dims=(16, 32))):
        for _ in range(3):
            made.relu(made.matmul(x, made.new_weight(dims=(32, 32))))
    return made


def optimized(callback: watching.Callback | None, **settings: object) -> taso.Graph:
    return taso.optimize(graph(), backend="reference", callback=callback, **settings)  # type: ignore[arg-type]  # settings of any kind


def rewrites(best: taso.Graph) -> list[str]:
    return [r.rule for r in best.report.rewrites]


def test_phases_come_in_order_and_the_best_cost_never_rises() -> None:
    told: list[taso.Progress] = []
    best = optimized(told.append)
    phases = list(dict.fromkeys(p.phase for p in told))
    assert phases == ["preparing", "searching", "planning", "comparing", "done"]
    assert [p.seconds for p in told] == sorted(p.seconds for p in told)
    costs = [p.cost_best for p in told if p.cost_best is not None]
    assert costs == sorted(costs, reverse=True)
    assert costs[-1] == pytest.approx(best.report.cost_after)
    assert {p.budget for p in told} == {1000}
    assert rewrites(best)


def test_the_best_cost_does_not_rise_where_a_search_begins_anew() -> None:
    told: list[float | None] = []
    watch = watching.Watch(lambda progress: told.append(progress.cost_best))
    follow = watch.following(None)
    assert follow is not None
    for best in (3.0, 2.0, 3.0, 1.0):
        follow(Statistics("auto"), 3.0, best)
    watch.enter("planning")
    assert told == [3000.0, 2000.0, 1000.0, 1000.0]


def test_every_better_graph_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watching, "EVERY", float("inf"))
    costs: list[float | None] = []
    best = optimized(lambda p: costs.append(p.cost_best))
    assert len(set(costs) - {None}) > 1
    assert best.report.cost_before > best.report.cost_after


def test_an_exception_is_warned_of_and_the_result_is_the_same(caplog: pytest.LogCaptureFixture) -> None:
    calls: list[str] = []

    def broken(progress: taso.Progress) -> None:
        calls.append(progress.phase)
        if progress.phase == "searching":
            raise ZeroDivisionError("my mistake")

    with pytest.warns(taso.CallbackWarning, match="ZeroDivisionError: my mistake"):
        best = optimized(broken)
    assert calls == ["preparing", "searching"], "it is not called again"
    assert rewrites(best) == rewrites(optimized(None))
    assert any("my mistake" in said for said in best.report.messages)
    assert "in broken" in caplog.text, "the log tells the place"


def test_a_warning_made_an_error_carries_the_result() -> None:
    def broken(progress: taso.Progress) -> None:
        raise ValueError("no")

    with warnings.catch_warnings():
        warnings.simplefilter("error", taso.CallbackWarning)
        with pytest.raises(taso.CallbackWarning) as caught:
            optimized(broken)
    assert isinstance(caught.value.graph, taso.Graph)
    assert rewrites(caught.value.graph) == rewrites(optimized(None))


@pytest.mark.parametrize("search", ["mcts", "saturation", "auto"])
@pytest.mark.parametrize("how", ["true", "interrupt"])
def test_true_and_ctrl_c_end_the_search_with_the_best_so_far(how: str, search: str) -> None:
    def enough(progress: taso.Progress) -> bool:
        better = progress.cost_best is not None and progress.cost_best < (progress.cost_before or 0)
        if better and how == "interrupt":
            raise KeyboardInterrupt
        return better

    best = optimized(enough, search=search)
    assert best.report.stopped == "the callback"
    assert rewrites(best)


def test_stopping_before_the_search_gives_the_original() -> None:
    best = optimized(lambda progress: True)
    assert not best.report.changed
    assert best.report.stopped == "the callback"


def test_other_answers_than_true_do_not_stop() -> None:
    assert rewrites(optimized(lambda progress: 1)) == rewrites(optimized(None))


def test_what_cannot_be_called_is_refused() -> None:
    with pytest.raises(taso.SearchError, match="callback is a function"):
        optimized("print")  # type: ignore[arg-type]  # that is the point


def test_all_warnings_are_of_one_family() -> None:
    for kind in (taso.NaNWarning, taso.CallbackWarning, taso.PluginWarning, taso.FallbackWarning):
        assert issubclass(kind, taso.TasoWarning)
    assert issubclass(taso.TasoWarning, UserWarning)


def test_every_module_logs_below_taso_and_none_to_the_root() -> None:
    for module in PACKAGE.rglob("*.py"):
        source = module.read_text("utf-8")
        # a program of its own sets logging up
        for node in ast.walk(ast.parse(source)) if "__main__" not in source else ():
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "logging":
                assert node.attr not in ("debug", "info", "warning", "error", "exception", "basicConfig"), module
    for name in logging.root.manager.loggerDict:
        assert name != "taso" or not logging.getLogger(name).handlers, "handlers are the application's"


def test_warnings_given_here_are_tasos_own() -> None:
    for module in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(module.read_text("utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "warnings.warn":
                assert len(node.args) == 2 and ast.unparse(node.args[1]).endswith("Warning"), module


def test_optimizing_says_nothing_on_stdout_and_logs_where_asked() -> None:
    code = (
        "import logging, sys, taso\n"
        "if sys.argv[1:]: logging.basicConfig(level=logging.DEBUG)\n"
        "g = taso.new_graph(); g.relu(g.new_input(dims=(2, 2)))\n"
        "taso.optimize(g)\n"
    )
    said = [
        subprocess.run([sys.executable, "-c", code, *more], capture_output=True, text=True, check=True)
        for more in ([], ["loudly"])
    ]
    assert [s.stdout for s in said] == ["", ""]
    assert ":taso." in said[1].stderr


def test_whoever_looks_is_told_of_all_that_takes_long(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []

    @contextmanager
    def noted(doing: str, wanted: bool | None = None) -> Iterator[None]:
        said.append(doing)
        yield

    monkeypatch.setattr("taso.search.optimize.busy", noted)
    made = taso.new_graph()
    made.relu(made.relu(made.new_input(dims=(4, 4))))
    assert taso.optimize(made, backend="reference").report.changed
    assert [word.split()[0] for word in said] == ["costing", "planning", "comparing"]


@pytest.mark.parametrize("wanted", [True, False])
def test_what_is_going_on_is_said_where_somebody_looks_and_an_error_passes(wanted: bool) -> None:
    with pytest.raises(ZeroDivisionError), busy("dividing", wanted):
        raise ZeroDivisionError
