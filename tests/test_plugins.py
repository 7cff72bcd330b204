"""Rules and backends of other packages: found by name, judged as all are, and a broken one harms nobody."""

from __future__ import annotations

import json
import logging
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import taso
from taso import cli
from taso.backends.reference import ReferenceBackend
from taso.backends.select import NAMES, backend_names, get_backend

Install = Callable[[str, str, str], None]

CODE = '''
import taso
from taso.backends.reference import ReferenceBackend

ONE = taso.rule("Relu(Relu(x)) => Relu(x)", exact="exact")
EQUATION = "Abs(Abs(x)) => Abs(x)"
FALSE = "Exp(x) => Relu(x)"
NUMBER = 7

def several():
    return [ONE, EQUATION]

def fails():
    raise OSError("no licence")

class Slow(ReferenceBackend):
    name = "slow"
    def __init__(self, threads=None):
        super().__init__()
        self.threads = threads

def half(threads):
    return object()
'''


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Lays out a package of that name with entry points, as pip would."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def lay_out(package: str, group: str, lines: str) -> None:
        module = tmp_path / f"plugin_{package}.py"
        module.write_text(CODE)
        info = tmp_path / f"{package}-1.0.dist-info"
        info.mkdir(exist_ok=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
        before = (info / "entry_points.txt").read_text() if (info / "entry_points.txt").exists() else ""
        (info / "entry_points.txt").write_text(f"{before}[{group}]\n{lines.replace('$', f'plugin_{package}')}\n")

    return lay_out


def doubled() -> taso.Graph:
    graph = taso.new_graph()
    graph.relu(graph.relu(graph.new_input(dims=(4,))))
    return graph


def names(best: taso.Graph) -> set[str]:
    return {r.rule for r in best.report.rewrites}


# ── rules ────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("what", ["ONE", "several"])
def test_rules_of_a_package_are_used_by_their_name(install: Install, what: str) -> None:
    install("mine", "taso.rules", f"more = $:{what}")
    best = taso.optimize(doubled(), rules=["@more"], backend="reference")
    assert names(best) == {"Relu(Relu(x)) => Relu(x)"}
    # none is used unless it is asked for
    assert taso.optimize(doubled(), rules=["Abs(Abs(x)) => Abs(x)"], backend="reference").report.rewrites == []


def test_rules_of_a_package_stand_in_a_list_with_others(install: Install) -> None:
    install("mine", "taso.rules", "one = $:ONE\ntwo = $:EQUATION")
    best = taso.optimize(doubled(), rules=["-*", "@*"], backend="reference")
    assert names(best) == {"Relu(Relu(x)) => Relu(x)"}


def test_a_false_rule_of_a_package_does_not_pass_the_gate(
    install: Install, caplog: pytest.LogCaptureFixture
) -> None:
    install("mine", "taso.rules", "false = $:FALSE")
    graph = taso.new_graph()
    graph.exp(input=graph.new_input(dims=(4,)))
    with caplog.at_level(logging.WARNING):
        best = taso.optimize(graph, rules=["@false"], backend="reference")
    assert not best.report.changed
    assert "Exp(x) => Relu(x): it is refuted" in caplog.text


@pytest.mark.parametrize(
    "lines, said",
    [
        ("bad = $:nothing", "AttributeError"),
        ("bad = not_there:x", "No module named 'not_there'"),
        ("bad = $:fails", "OSError: no licence"),
        ("bad = $:NUMBER", "not 7"),
    ],
)
def test_a_broken_entry_is_one_sentence_and_the_others_are_used(install: Install, lines: str, said: str) -> None:
    install("mine", "taso.rules", "good = $:ONE")
    install("other", "taso.rules", lines)
    with pytest.warns(taso.PluginWarning) as caught:
        best = taso.optimize(doubled(), rules=["@*"], backend="reference")
    assert names(best) == {"Relu(Relu(x)) => Relu(x)"}
    told = [str(w.message) for w in caught if w.category is taso.PluginWarning]
    assert len(told) == 1
    assert said in told[0] and "'bad'" in told[0] and "package other" in told[0] and "\n" not in told[0]


def test_a_name_that_no_package_announces_is_refused(install: Install) -> None:
    with pytest.raises(taso.RuleError, match="no package announces any"):
        taso.optimize(doubled(), rules=["@more"], backend="reference")
    install("mine", "taso.rules", "one = $:ONE")
    with pytest.raises(taso.RuleError, match="called 'more': there are one"):
        taso.optimize(doubled(), rules=["@more"], backend="reference")


def test_of_two_packages_with_one_name_the_first_has_it_and_the_other_is_told_of(install: Install) -> None:
    install("aaa", "taso.rules", "one = $:ONE")
    install("bbb", "taso.rules", "one = $:EQUATION")
    with pytest.warns(taso.PluginWarning, match="package bbb.*passed over"):
        best = taso.optimize(doubled(), rules=["@one"], backend="reference")
    assert names(best) == {"Relu(Relu(x)) => Relu(x)"}


# ── backends ─────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_backend_of_a_package_costs_and_runs_by_its_name(install: Install) -> None:
    install("mine", "taso.backends", "slow = $:Slow")
    backend = get_backend("slow", 1)
    assert (backend.name, backend.threads) == ("slow", 1)  # type: ignore[attr-defined]  # the plugin's own
    best = taso.optimize(doubled(), backend="slow")
    assert best.report.backend == "slow"
    found = taso.compile(best, backend="slow")({"input": np.asarray([-1, 2, 0, 3], np.float32)})
    assert found["output"].tolist() == [0, 2, 0, 3]
    assert backend_names() == [*NAMES, "slow"]


@pytest.mark.parametrize(
    "what, said",
    [("$:nothing", "AttributeError"), ("$:fails", "TypeError"), ("$:half", "no 'name', which a backend has")],
)
def test_a_broken_backend_is_one_sentence_when_it_is_asked_for(install: Install, what: str, said: str) -> None:
    install("mine", "taso.backends", f"bad = {what}")
    with pytest.raises(taso.BackendError, match=said) as caught:
        get_backend("bad")
    assert "package mine" in str(caught.value) and "\n" not in str(caught.value)


def test_an_unknown_name_lists_those_of_packages_too(install: Install) -> None:
    install("mine", "taso.backends", "slow = $:Slow")
    with pytest.raises(taso.BackendError, match="reference, slow"):
        get_backend("fast")


def test_taso_keeps_its_own_names(install: Install) -> None:
    install("mine", "taso.backends", "reference = $:Slow")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert type(get_backend("reference")) is ReferenceBackend
    with pytest.warns(taso.PluginWarning, match="taso has a backend of that name"):
        assert backend_names() == list(NAMES)


def test_the_doctor_names_what_is_installed_and_what_is_broken(
    install: Install, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TASO_CACHE_DIR", str(tmp_path / "cache"))
    install("mine", "taso.rules", "one = $:ONE")
    install("mine", "taso.backends", "slow = $:Slow\nbad = $:nothing")
    cli.main(["doctor", "--json"])
    said = json.loads(capsys.readouterr().out)
    assert "package mine" in said["rules of packages"]["one"]
    assert said["backends"]["slow"] == ReferenceBackend().device_key()
    assert "cannot be used" in said["backends"]["bad"]
