"""The way through a space: from size to size, classes are found, and the terms of each class kept for the pruning.

Terms of the largest size are not built upon. They are made in pieces that any `concurrent.futures.Executor` may work
on; each piece leaves its terms in a file, ordered by fingerprint, so that a run that was killed goes on where it was,
and what is in memory at once is a share of all fingerprints.
"""

from __future__ import annotations

import hashlib
import logging
import os
import pickle
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import product
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np

from taso.graph.errors import RuleError
from taso.rules.generator.arithmetic import Fingerprints, drawn, fingerprints
from taso.rules.generator.pruning import Rows
from taso.rules.generator.universe import Ids, Piece, Space, Terms, Universe

log = logging.getLogger(__name__)

SHARE = 1 << 22
"""Terms of the largest size that are held in memory at once."""

BATCH = 1 << 14
"""Terms that are renamed at once."""


@dataclass
class Counts:
    """What was met on the way: graphs evaluated, those that were renamings of others, and classes told apart."""

    graphs: int = 0
    renamings: int = 0
    classes: int = 0


@dataclass(frozen=True)
class Stage:
    """One size, ready for pruning: its terms by class, and for each row the class of smaller terms or -1."""

    members: tuple[Terms, Ids]
    rows: Rows
    lower: Ids


class Enumeration:
    """A space on its way, size by size."""

    def __init__(self, space: Space, folder: Path, executor: Executor | None = None) -> None:
        _claimed(folder, space)
        self.universe = Universe(space)
        self.counts = Counts(classes=len(self.universe))
        self._space, self._folder, self._executor = space, folder, executor
        self._terms: list[Terms] = []
        self._classes: list[Ids] = []

    def stages(self) -> Iterator[Stage]:
        """Each size in turn."""
        for size in range(1, self._space.size):
            yield self._inner(size)
        yield self._outer(self._space.size)

    def _members(self) -> tuple[Terms, Ids]:
        """All terms so far and their classes."""
        classes = np.concatenate(self._classes) if self._classes else np.empty(0, np.int64)
        return Terms.joined(self._terms), classes

    def _inner(self, size: int) -> Stage:
        """A size that larger terms are built upon: all its classes are kept."""
        universe, members = self.universe, self._members()
        terms = Terms.joined(list(universe.candidates(size)))
        terms, classes = universe.add(terms, universe.prints(terms), size)
        self._terms.append(terms)
        self._classes.append(classes)
        # a class stands for all its renamings
        kept = np.flatnonzero(universe.renamings_of(classes).min(1) == classes)
        self._count(len(terms), len(kept))
        lower = np.where(universe.column("size")[classes] < size, classes, -1)[kept]
        return _stage(members, Rows(terms[kept], classes[kept]), lower)

    def _count(self, graphs: int, kept: int) -> None:
        self.counts.graphs += graphs
        self.counts.renamings += graphs - kept
        self.counts.classes = len(self.universe)

    def _outer(self, size: int) -> Stage:
        """The largest size: made piece by piece, and only what has an equal is kept."""
        # what lies there from another run is not trusted
        _written(self._folder / "universe.pickle", pickle.dumps(self.universe))
        pieces = self.universe.pieces(size)
        work = partial(make_piece, self._folder)
        totals = list(map(work, pieces) if self._executor is None else self._executor.map(work, pieces))
        graphs, kept = (sum(t[i] for t in totals) for i in range(2))
        self._count(graphs, kept)
        files = [_file(self._folder, piece) for piece in pieces]
        shares = max(1, -(-kept // SHARE))
        found = [self._share(files, share, shares) for share in range(shares)]
        self.counts.classes += sum(classes for _, _, _, classes in found)
        terms = Terms.joined([f[0] for f in found])
        groups = np.unique(np.concatenate([f[1] for f in found]), return_inverse=True)[1]
        return _stage(self._members(), Rows(terms, groups), np.concatenate([f[2] for f in found]))

    def _share(self, files: Sequence[Path], share: int, shares: int) -> tuple[Terms, Fingerprints, Ids, int]:
        """Of the fingerprints in a share of their range: terms that are not alone, and how many classes are new."""
        keys, prints = [], []
        low, high = (np.uint64(min((1 << 64) - 1, (1 << 64) * s // shares)) for s in (share, share + 1))
        for file in files:
            with _opened(file) as data:
                found = data["prints"]
                end = len(found) if share + 1 == shares else np.searchsorted(found, high)
                rows = slice(np.searchsorted(found, low), end)
                prints.append(found[rows])
                keys.append(data["keys"][rows])
        every, key = np.concatenate(prints), np.concatenate(keys)
        lower = self.universe.find(every)
        distinct, group, count = np.unique(every, return_inverse=True, return_counts=True)
        kept = np.flatnonzero((lower >= 0) | (count[group] > 1))
        kept = kept[np.argsort(key[kept], kind="stable")]
        classes = len(distinct) - len(np.unique(every[lower >= 0]))
        return self.universe.of_keys(key[kept]), every[kept], lower[kept], classes


def _claimed(folder: Path, space: Space) -> None:
    """Raises `RuleError` where the folder holds pieces of another space, or of another version of this one."""
    templates = [t.name for t in space.templates]
    said = f"{space.name}: {templates}, {space.variables}, {space.size} operators, {_version(space)}"
    mark = folder / "space.txt"
    try:
        if not mark.exists():
            _written(mark, said.encode())
        elif mark.read_bytes() != said.encode():
            raise RuleError(f"{folder} holds pieces of another space or version: give {space.name} a folder of its own")
    except OSError as error:
        raise RuleError(f"the folder {folder} cannot be used: {error.strerror or error}") from error


def _version(space: Space) -> str:
    """A digest of what the pieces depend on: this package's source, and what each template makes of its operands."""
    total = hashlib.sha256()
    for source in sorted(Path(__file__).parent.glob("*.py")):
        total.update(source.read_bytes())
    for template in space.templates:
        shapes = [shape for _, shape in space.variables]
        for given in product(shapes, repeat=template.arity):
            if template.shape(*given) is not None:
                made = template.value(*(drawn(s, i)[None] for i, s in enumerate(given)))
                total.update(repr([fingerprints(m).tolist() for m in made]).encode())
    return total.hexdigest()[:16]


def _stage(members: tuple[Terms, Ids], rows: Rows, lower: Ids) -> Stage:
    _, group, count = np.unique(rows.groups, return_inverse=True, return_counts=True)
    kept = np.flatnonzero((count[group] > 1) | (lower >= 0))
    return Stage(members, rows[kept], lower[kept])


# ── pieces ───────────────────────────────────────────────────────────────────────────────────────────────────────


@lru_cache(maxsize=2)
def _universe(path: Path, written: int) -> Universe:
    """The classes that pieces are built upon, read once by each process; `written` tells one file from the next."""
    universe = pickle.loads(path.read_bytes())
    if not isinstance(universe, Universe):
        raise RuleError(f"{path} does not hold the classes of a space")
    return universe


def make_piece(folder: Path, piece: Piece) -> tuple[int, int]:
    """Makes the terms of a piece and leaves them in a file: how many there were, and how many but for renaming."""
    file, saved = _file(folder, piece), folder / "universe.pickle"
    if file.exists():
        try:
            with np.load(file) as data:
                if str(data["piece"]) == repr(piece):
                    return int(data["graphs"]), int(data["kept"])
        except (BadZipFile, EOFError, ValueError, KeyError, OSError):
            log.warning("%s is damaged and is made again", file)
    universe = _universe(saved, saved.stat().st_mtime_ns)
    found = [_unrenamed(universe, terms) for terms in _batches(universe.of_piece(piece))]
    keys = np.concatenate([np.empty(0, np.int64), *(f[0] for f in found)])
    prints = np.concatenate([np.empty(0, np.uint64), *(f[1] for f in found)])
    graphs, kept = sum(f[2] for f in found), sum(f[3] for f in found)
    order = np.argsort(prints, kind="stable")
    with tempfile.NamedTemporaryFile(dir=folder, suffix=".part", delete=False) as target:
        np.savez(target, keys=keys[order], prints=prints[order], graphs=graphs, kept=kept, piece=repr(piece))
    os.replace(target.name, file)
    return graphs, kept


def _unrenamed(universe: Universe, terms: Terms) -> tuple[Ids, Fingerprints, int, int]:
    """Of terms that are the least of their renamings: those renamings whose fingerprint is the least, with it.

    Terms of one class that differ by a renaming only are all among them, so that no equation between them is lost.
    """
    keys = universe.all_keys(terms)
    least = keys.min(1)
    # a renaming that is counted as of another size is not enumerated here and cannot stand for this one
    absent = universe.counted(universe.of_keys(least)) != universe.counted(terms)
    leaders = np.flatnonzero((keys[:, 0] == least) | absent)
    keys = keys[leaders]
    distinct, place = np.unique(keys, return_inverse=True)
    prints = universe.prints(universe.of_keys(distinct))[place].reshape(keys.shape)
    least = prints.min(1)
    row, which = np.nonzero(prints == least[:, None])
    found = keys[row, which]
    _, first = np.unique(found, return_index=True)
    return found[first], least[row[first]], len(terms), len(leaders)


def _batches(parts: Iterator[Terms]) -> Iterator[Terms]:
    """The same terms, small parts put together and large ones cut."""
    waiting: list[Terms] = []
    count = 0
    for part in parts:
        for start in range(0, len(part), BATCH):
            waiting.append(part[start : start + BATCH])
            count += len(waiting[-1])
            if count >= BATCH:
                yield Terms.joined(waiting)
                waiting, count = [], 0
    if waiting:
        yield Terms.joined(waiting)


@contextmanager
def _opened(file: Path) -> Iterator[Mapping[str, Any]]:
    """The arrays of a piece; raises `RuleError` where the file is damaged."""
    try:
        with np.load(file) as data:
            yield data
    except (BadZipFile, EOFError, ValueError, KeyError, OSError) as error:
        raise RuleError(f"{file} is damaged: delete it and start again") from error


def _file(folder: Path, piece: Piece) -> Path:
    return folder / f"piece-{piece.symbol}-{piece.left}-{piece.right}-{piece.part}.npz"


def _written(path: Path, content: bytes) -> None:
    with tempfile.NamedTemporaryFile(dir=path.parent, suffix=".part", delete=False) as file:
        file.write(content)
    os.replace(file.name, path)
