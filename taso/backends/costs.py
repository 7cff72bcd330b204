"""The database of measured costs, in the user's cache folder."""

from __future__ import annotations

import logging
import os
import sqlite3
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import platformdirs

log = logging.getLogger(__name__)

PATIENCE = 30.0
"""Seconds to wait for another process that holds the file."""

_T = TypeVar("_T")

_SCHEMA = """
create table if not exists cost (device text, kernel text, seconds real, primary key (device, kernel)) without rowid;
create table if not exists verdict (
  device text, original text, best text, original_seconds real, best_seconds real, low real, high real,
  primary key (device, original, best)) without rowid;
create table if not exists spread (
  device text, original text, best text, original_lower real, original_upper real, best_lower real, best_upper real,
  primary key (device, original, best)) without rowid;
"""


def cache_folder() -> Path:
    """Where taso keeps what it measured: `TASO_CACHE_DIR`, else the user's cache folder."""
    given = os.environ.get("TASO_CACHE_DIR")
    return Path(given) if given else Path(platformdirs.user_cache_dir("taso", appauthor=False))


class CostDatabase:
    """Seconds per kernel and whole-graph verdicts, keyed by device.

    Several processes may share the file. A file that is no database is moved aside and begun anew; where no file can
    be written the costs live in memory, and a warning says so.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self.path = (folder or cache_folder()) / "costs.sqlite3"
        self._lock = threading.Lock()
        self._known: dict[tuple[str, str], float] = {}
        self._connection = self._open()

    def _open(self) -> sqlite3.Connection:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            return _patiently(lambda: self._connect(str(self.path)))
        except sqlite3.DatabaseError as error:
            return self._begin_anew(error)
        except OSError as error:
            log.warning("costs are kept in memory only: %s cannot be written (%s)", self.path, error)
            return self._connect(":memory:")

    def _connect(self, target: str) -> sqlite3.Connection:
        connection = sqlite3.connect(target, timeout=PATIENCE, isolation_level=None, check_same_thread=False)
        try:
            if target != ":memory:":
                connection.execute("pragma journal_mode=wal")
                connection.execute("pragma synchronous=normal")
            connection.executescript(_SCHEMA)
            if connection.execute("pragma quick_check(1)").fetchone()[0] != "ok":
                raise sqlite3.DatabaseError("the file is damaged")
        except BaseException:
            connection.close()
            raise
        return connection

    def _begin_anew(self, error: sqlite3.DatabaseError) -> sqlite3.Connection:
        if isinstance(error, sqlite3.OperationalError) and "disk image" not in str(error):
            log.warning("costs are kept in memory only: %s cannot be used (%s)", self.path, error)
            return self._connect(":memory:")
        aside = self.path.with_suffix(".damaged")
        log.warning("%s is damaged (%s); it was moved to %s and costs are measured again", self.path, error, aside)
        try:
            os.replace(self.path, aside)
            for suffix in ("-wal", "-shm"):
                Path(str(self.path) + suffix).unlink(missing_ok=True)
            return self._connect(str(self.path))
        except (OSError, sqlite3.DatabaseError) as second:
            log.warning("costs are kept in memory only: %s", second)
            return self._connect(":memory:")

    def cost(self, device: str, kernel: str) -> float | None:
        """Seconds of a kernel on a device, or None where it was never measured."""
        with self._lock:
            found = self._known.get((device, kernel))
            if found is None:
                row = self._query("select seconds from cost where device=? and kernel=?", device, kernel)
                if row is not None:
                    found = self._known[device, kernel] = float(row[0])
            return found

    def keep_cost(self, device: str, kernel: str, seconds: float) -> float:
        """Stores a measurement and returns the one that counts: the first that any process stored."""
        with self._lock:
            self._write("insert or ignore into cost values (?,?,?)", device, kernel, seconds)
            row = self._query("select seconds from cost where device=? and kernel=?", device, kernel)
            self._known[device, kernel] = float(row[0]) if row is not None else seconds
            return self._known[device, kernel]

    def verdict(self, device: str, original: str, best: str) -> tuple[float, float, float, float] | None:
        """An earlier comparison of two graphs: seconds of each, and the ends of the interval of their ratio."""
        return self._four("original_seconds, best_seconds, low, high from verdict", device, original, best)

    def spread(self, device: str, original: str, best: str) -> tuple[float, float, float, float] | None:
        """Quartiles of the seconds that an earlier comparison measured: two of the original, two of the best."""
        return self._four("original_lower, original_upper, best_lower, best_upper from spread", device, original, best)

    def _four(self, what: str, *keys: str) -> tuple[float, float, float, float] | None:
        """Four numbers that are kept of two graphs on a device."""
        with self._lock:
            row = self._query(f"select {what} where device=? and original=? and best=?", *keys)
        return None if row is None else (float(row[0]), float(row[1]), float(row[2]), float(row[3]))

    def keep_spread(self, device: str, original: str, best: str, quartiles: tuple[float, float, float, float]) -> None:
        with self._lock:
            self._write("insert or replace into spread values (?,?,?,?,?,?,?)", device, original, best, *quartiles)

    def keep_verdict(self, device: str, original: str, best: str, seconds: tuple[float, float, float, float]) -> None:
        with self._lock:
            self._write("insert or replace into verdict values (?,?,?,?,?,?,?)", device, original, best, *seconds)

    def _query(self, sql: str, *values: object) -> tuple[float, ...] | None:
        try:
            row: tuple[float, ...] | None = _patiently(lambda: self._connection.execute(sql, values).fetchone())
        except sqlite3.DatabaseError as error:
            self._lose(error)
            return None
        return row

    def _write(self, sql: str, *values: object) -> None:
        try:
            _patiently(lambda: self._connection.execute(sql, values))
        except sqlite3.DatabaseError as error:
            self._lose(error)

    def _lose(self, error: sqlite3.DatabaseError) -> None:
        """The file broke while in use: go on in memory, with what is known."""
        log.warning("the cost database %s failed (%s); costs are kept in memory from here on", self.path, error)
        self._connection = self._connect(":memory:")

    def close(self) -> None:
        self._connection.close()


def _patiently(action: Callable[[], _T]) -> _T:
    """What `action` gives, tried again while another process holds the file.

    SQLite waits by itself for most locks, but refuses at once where waiting could be a deadlock, as when several
    processes turn a new file to its write-ahead log.
    """
    deadline = time.monotonic() + PATIENCE
    pause = 0.001
    while True:
        try:
            return action()
        except sqlite3.OperationalError as error:
            if "locked" not in str(error) or time.monotonic() > deadline:
                raise
        time.sleep(pause)
        pause = min(2 * pause, 0.1)
