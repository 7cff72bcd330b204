"""Writes which of ONNX's backend tests pass on which backend: reference.txt, onednn.txt, and excluded.txt.

    python tests/conformance/list_cases.py           writes the lists and prints the counts
    python tests/conformance/list_cases.py --check   writes nothing; fails where the lists say something else

Reasons in excluded.txt are written by hand and kept; a failure without one makes the script fail.
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections import Counter

import backend_cases as cases


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--check", action="store_true", help="compare with the lists instead of writing them")
    check = arguments.parse_args().check
    # the log tells of every node that no kernel runs
    logging.disable(logging.WARNING)
    results = {backend: {case: cases.run(case, backend) for case in cases.names()} for backend in cases.BACKENDS}
    _leave_out_what_varies(results)
    texts = {f"{backend}.txt": _list(backend, found) for backend, found in results.items()}
    texts["excluded.txt"], unexplained = _exclusions(results)
    for backend, found in results.items():
        print(_counts(backend, found))
    for line in unexplained:
        print(f"no reason is given for: {line}")
    differ = [f for f, text in texts.items() if not (cases.FOLDER / f).exists() or _read(f) != text]
    for file in differ:
        print(f"{file} {'is not up to date' if check else 'was written'}")
        if not check:
            (cases.FOLDER / file).write_text(texts[file], "utf-8")
    return int(bool(unexplained) or check and bool(differ))


def _leave_out_what_varies(results: dict[str, dict[str, cases.Result]]) -> None:
    """A case that is random passes by luck at times, one that needs a package where it is there: nobody lists them."""
    for found in results.values():
        for case in found:
            reasons = [cases.excluded(b).get(case, "") for b in cases.BACKENDS]
            varies = next((r for r in reasons if r.startswith(("random", "needs"))), "")
            if varies:
                found[case] = cases.Result(varies, found[case].how)


def _read(file: str) -> str:
    return (cases.FOLDER / file).read_text("utf-8")


def _list(backend: str, results: dict[str, cases.Result]) -> str:
    lines = [
        f"# Backend tests of onnx {cases.installed_version()} that pass on the backend '{backend}' after optimize, "
        "and what runs them.", f"# {_counts(backend, results)}", "",
    ]  # fmt: skip
    lines += [f"{case} {result.how}" for case, result in results.items() if not result.error]
    return "\n".join(lines) + "\n"


def _counts(backend: str, results: dict[str, cases.Result]) -> str:
    """How many cases pass, by kind, and the share of node tests of the default domain."""
    passed = [case for case, result in results.items() if not result.error]
    of = Counter(case.split("/")[0] for case in results)
    good = Counter(case.split("/")[0] for case in passed)
    parts = [f"{kind} {good[kind]} of {of[kind]}" for kind in cases.KINDS]
    default = [case for case in results if case in cases.default_domain()]
    right = [case for case in default if not results[case].error]
    how = Counter(results[case].how for case in right)
    ways = ", ".join(f"{how[w]} {w}" for w in (cases.OWN, cases.DEFINITION, cases.FALLBACK) if how[w])
    share = f"{100 * len(right) / len(default):.1f} %"
    of_default = f"{len(right)} of {len(default)} node tests ({share}: {ways})"
    return f"{backend}: {'; '.join(parts)}; of the default domain {of_default}"


def _exclusions(results: dict[str, dict[str, cases.Result]]) -> tuple[str, list[str]]:
    """The text of excluded.txt, and the failures for which it has no reason."""
    reasons = {backend: cases.excluded(backend) if (cases.FOLDER / "excluded.txt").exists() else {}
               for backend in cases.BACKENDS}  # fmt: skip
    lines = [
        "# Backend tests of onnx that need not pass: the case, the backend that it concerns, and the reason. A reason",
        "# that begins with 'random' or 'needs' is of a case that may pass all the same.", "",
    ]  # fmt: skip
    unexplained = []
    for case in cases.names():
        failed = [backend for backend in cases.BACKENDS if results[backend][case].error]
        known = {b: reasons[b].get(case, "") for b in failed}
        unexplained += [f"{case} on {b}: {results[b][case].error}" for b in failed if not known[b]]
        if len(failed) == len(cases.BACKENDS) and len(set(known.values())) == 1:
            lines += [f"{case} all {known[failed[0]]}"] if known[failed[0]] else []
        else:
            lines += [f"{case} {b} {known[b]}" for b in failed if known[b]]
    return "\n".join(lines) + "\n", unexplained


if __name__ == "__main__":
    sys.exit(main())
