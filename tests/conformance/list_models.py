"""Counts for each real model of the `models` extra what runs its operators on oneDNN, and writes real_models.txt.

    python tests/conformance/list_models.py           writes the list and prints the counts
    python tests/conformance/list_models.py --check   writes nothing; fails where the list says something else

An operator that is fused into another's kernel counts like any other; what is computed from weights or shapes alone
before the first run does not run and does not count. Of an If the branch that is taken counts.
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

HERE = Path(__file__).resolve().parent
for folder in (HERE.parent, HERE.parent / "graph", HERE.parent / "search"):
    sys.path.append(str(folder))

import test_real_models as real_models  # noqa: E402  # found by the path set above

import taso  # noqa: E402
from taso.graph import onnx_reference  # noqa: E402

LIST = HERE / "real_models.txt"
HEAD = "# Real models, each at the shapes of tests/test_real_models.py: how many operators run on oneDNN, and on what."
WAYS = ("own", "definition", "fallback")


@dataclass(frozen=True)
class Share:
    """How many operators run on kernels of the backend, by definitions of ours, by onnx.reference."""

    own: int
    definition: int
    fallback: int

    def __str__(self) -> str:
        return ", ".join(f"{getattr(self, way)} {way}" for way in WAYS)


def share(real: real_models.Real, which: int) -> Share:
    """The share of one model at its shapes number `which`."""
    program = taso.compile(taso.load(real.model()), backend="onednn")
    feeds = real.feeds(which, 0, real.types())
    program(feeds)
    asked: list[str] = []
    by_reference = onnx_reference.run

    def counted(op: taso.graph.operator.Operator, *args: object, **kwargs: object) -> object:
        asked.append(op.label)
        return by_reference(op, *args, **kwargs)  # type: ignore[arg-type]  # passed on as they came

    with mock.patch.object(onnx_reference, "run", counted):
        program(feeds)
    how = Counter(way for _, way in program.operators)
    return Share(how["own"], how["evaluated"] - len(asked), len(asked))


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--check", action="store_true", help="compare with the list instead of writing it")
    check = arguments.parse_args().check
    logging.disable(logging.WARNING)
    missing = [p for p in real_models.PACKAGES if not real_models.files(p)]
    if missing:
        print(f"{', '.join(missing)} must be installed (the `models` extra of taso)")
        return 1
    found = {f"{real.name} {which}": share(real, which) for real in real_models.REAL
             for which in range(len(real.shapes))}  # fmt: skip
    total = Share(*(sum(getattr(s, way) for s in found.values()) for way in WAYS))
    every = total.own + total.definition + total.fallback
    told = f"{total.own} of {every} operators ({100 * total.own / every:.1f} %) on kernels of the backend: {total}"
    text = "\n".join([HEAD, f"# {told}", "", *(f"{name}: {s}" for name, s in found.items())]) + "\n"
    print(f"real models on onednn: {told}")
    differs = not LIST.exists() or LIST.read_text("utf-8") != text
    if differs:
        print(f"{LIST.name} {'is not up to date' if check else 'was written'}")
        if not check:
            LIST.write_text(text, "utf-8")
    return int(check and differs)


if __name__ == "__main__":
    sys.exit(main())
