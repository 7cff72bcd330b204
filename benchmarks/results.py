"""What the suite has measured, and what follows from it: ratios with intervals, geometric means."""

from __future__ import annotations

import json
import math
import random
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from peers import Memory
from roofline import Needs, Peaks

from taso.search.verify import median_interval

FASTEST = ("onnxruntime", "openvino")
"""Of these the faster one is who has to be beaten."""
DRAWS = 2000
"""Times that blocks are drawn anew for the interval of a geometric mean."""

Ratio = tuple[float, float, float]
"""A ratio and the ends of its 95 % interval."""


@dataclass
class Made:
    """A file that `taso.optimize` made: seconds that it took, what it decided and by how many rewrites."""

    path: str
    seconds: float
    decision: str
    rewrites: int
    planned: bool


@dataclass
class Result:
    """How a contestant did. Seconds: `blocks` are the medians of its blocks, `times` all of its runs.

    `error` is the largest relative error of an output against float64; `file_bytes` is the size of the model's file.
    """

    failure: str = ""
    version: str = ""
    start_seconds: float = 0.0
    blocks: list[float] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    error: float | None = None
    memory: Memory = field(default_factory=Memory)
    file_bytes: int = 0

    @property
    def ran(self) -> bool:
        return not self.failure and bool(self.blocks)

    @property
    def median(self) -> float:
        return statistics.median(self.times)

    @property
    def quartiles(self) -> tuple[float, float]:
        low, _, high = statistics.quantiles(self.times, n=4)
        return low, high


@dataclass
class Case:
    """A model at a batch size and a number of threads, with all that came out.

    `disagreement` is the largest relative error of any contestant's output against any other's.
    """

    model: str
    batch: int
    threads: int
    needs: Needs
    peaks: Peaks
    made: dict[str, Made] = field(default_factory=dict)
    results: dict[str, Result] = field(default_factory=dict)
    disagreement: float = 0.0

    def ran(self, name: str) -> bool:
        return name in self.results and self.results[name].ran

    def paired(self, other: str, ours: str) -> list[float]:
        """Time of `other` over that of `ours`, block by block; empty where one of them did not run."""
        if not (self.ran(other) and self.ran(ours)):
            return []
        blocks = zip(self.results[other].blocks, self.results[ours].blocks, strict=True)
        return [a / b for a, b in blocks]

    def ratio(self, other: str, ours: str) -> Ratio | None:
        """The median of the blocks' ratios, with its interval from order statistics."""
        return ratio_of(self.paired(other, ours))

    @property
    def to_beat(self) -> str | None:
        """The faster one of `FASTEST`; None where none ran."""
        here = [name for name in FASTEST if self.ran(name)]
        return min(here, key=lambda name: statistics.median(self.results[name].blocks), default=None)

    @property
    def gain(self) -> Ratio | None:
        """Time of the one to beat over ours."""
        return None if self.to_beat is None else self.ratio(self.to_beat, "taso")

    @property
    def share(self) -> float | None:
        """Of what the machine could do: time at its limit over ours."""
        return self.needs.seconds / self.results["taso"].median if self.ran("taso") else None


def ratio_of(values: Sequence[float]) -> Ratio | None:
    return (statistics.median(values), *median_interval(list(values))) if values else None


def geometric_mean(samples: Sequence[Sequence[float]]) -> Ratio | None:
    """Of the samples' medians, with a 95 % interval by drawing each sample anew; None where there are none."""
    samples = [s for s in samples if s]
    if not samples:
        return None
    draws = random.Random(0)
    found = sorted(_mean([draws.choices(s, k=len(s)) for s in samples]) for _ in range(DRAWS))
    return _mean(samples), found[int(0.025 * DRAWS)], found[int(0.975 * DRAWS)]


def _mean(samples: Sequence[Sequence[float]]) -> float:
    return math.exp(statistics.fmean(math.log(statistics.median(s)) for s in samples))


# ── kept ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass
class Run:
    """What one call of the suite measured, on which processor, how, and who did not take part and why."""

    processor: str
    settings: Mapping[str, object]
    left_out: Mapping[str, str]
    cases: list[Case] = field(default_factory=list)

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self), indent=1) + "\n", "utf-8")


def read(path: Path) -> Run:
    """What `Run.write` has written."""
    said = json.loads(path.read_text("utf-8"))
    cases = []
    for c in said["cases"]:
        results = {name: Result(**{**r, "memory": Memory(**r["memory"])}) for name, r in c["results"].items()}
        made = {name: Made(**m) for name, m in c["made"].items()}
        kept = {**c, "needs": Needs(**c["needs"]), "peaks": Peaks(**c["peaks"]), "made": made, "results": results}
        cases.append(Case(**kept))
    return Run(said["processor"], said["settings"], said["left_out"], cases)
