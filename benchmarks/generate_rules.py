"""How long it takes to generate, prune and prove the rules of a space, and how much memory.

    python benchmarks/generate_rules.py taso-matrices taso-images --published DIR

prints for each space the graphs that were built, how many a second, the time of each step and the rules; then the most
memory that a process took (this one and its workers apart). With a folder that holds TASO's rule files
(graph_subst.pb, generated_depth3.pb), it also counts how many of their rules follow from what was found, and how many
a second the verifier judges. Without names, the two spaces of TASO's operators are taken. With --enumerate the graphs
are enumerated and their classes told apart, and nothing is made of them.
"""

from __future__ import annotations

import argparse
import resource
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from pathlib import Path

from taso.rules.collection import read
from taso.rules.format import read_published
from taso.rules.generator import SPACES, Generated, generate
from taso.rules.generator.coverage import derivable_from
from taso.rules.generator.levels import Enumeration
from taso.rules.generator.universe import Space
from taso.rules.pattern import Status
from taso.rules.verifier import verify_rules

MB = 1 << 10
FILES = ("graph_subst.pb", "generated_depth3.pb")


def main(arguments: Sequence[str] | None = None) -> int:
    """Generates and prints; 2 for wrong usage."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("spaces", nargs="*", choices=[*SPACES, []], default=[], metavar="SPACE", help=", ".join(SPACES))
    parser.add_argument("--workers", type=int, default=2, help="processes (default: %(default)s)")
    parser.add_argument("--published", type=Path, help="a folder with TASO's rule files")
    parser.add_argument("--enumerate", action="store_true", help="enumerate only")
    parser.add_argument("--general", action="store_true", help="also make the rules general")
    options = parser.parse_args(arguments)
    if options.enumerate and (options.published or options.general):
        parser.error("with --enumerate there are no rules to compare or to make general")
    with ProcessPoolExecutor(options.workers) as executor:
        found = []
        for name in options.spaces or ("taso-matrices", "taso-images"):
            if options.enumerate:
                enumerate_only(SPACES[name], executor)
                continue
            found.append(generate(SPACES[name], executor=executor, general=options.general))
            show(found[-1])
        if options.published is not None:
            for file in FILES:
                compare(options.published / file, found, executor)
    for who, name in ((resource.RUSAGE_SELF, "this process"), (resource.RUSAGE_CHILDREN, "the largest worker")):
        print(f"most memory of {name}: {resource.getrusage(who).ru_maxrss // MB} MB")
    return 0


def enumerate_only(space: Space, executor: Executor) -> None:
    """How many graphs a space has, and of how many values."""
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        enumeration = Enumeration(space, Path(folder), executor)
        alike = sum(len(stage.rows) for stage in enumeration.stages())
    seconds, counts = time.perf_counter() - start, enumeration.counts
    print(
        f"{space.name}: {space.size} operators of {len(space.templates)} templates over {len(space.variables)} "
        f"variables\n  {counts.graphs} graphs ({counts.graphs / seconds:.0f} a second), {counts.classes} classes, "
        f"{alike} graphs with an equal, {seconds:.1f} s"
    )


def show(found: Generated) -> None:
    """What a space gave."""
    total = sum(found.seconds.values())
    rate = found.counts.graphs / max(found.seconds["enumerated"], 1e-9)
    steps = ", ".join(f"{name} {seconds:.1f}" for name, seconds in found.seconds.items())
    fell = ", ".join(f"{name} {count}" for name, count in found.fell.items())
    print(
        f"{found.space.name}: {found.space.size} operators of {len(found.space.templates)} templates over "
        f"{len(found.space.variables)} variables\n"
        f"  {found.counts.graphs} graphs ({rate:.0f} a second), {found.counts.classes} classes\n"
        f"  fell: {fell}\n"
        f"  {len(found.equations)} equations, {len(found.rules)} rules\n"
        f"  seconds: {steps}; together {total:.1f}"
    )


def compare(path: Path, found: Sequence[Generated], executor: Executor) -> None:
    """How many of the rules in a file of TASO's follow, and how long it takes to judge them all."""
    start = time.perf_counter()
    judged = verify_rules(read(path), executor=executor)
    seconds = time.perf_counter() - start
    true = [i for i, r in enumerate(judged) if r.status is Status.PROVED]
    start = time.perf_counter()
    published = read_published(path)
    missing = [i for i in true if not derivable_from(published[i], found)]
    print(
        f"{path.name}: {len(judged)} rules judged in {seconds:.1f} s, {len(true)} proved; "
        f"{len(true) - len(missing)} of these follow ({time.perf_counter() - start:.1f} s)"
        + (f", not {missing}" if missing else "")
    )


if __name__ == "__main__":
    sys.exit(main())
