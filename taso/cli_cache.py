"""`taso cache`: what taso has measured and kept."""

from __future__ import annotations

import argparse
import sqlite3
from contextlib import closing
from pathlib import Path

from taso.backends.costs import cache_folder
from taso.cli_common import DONE, Commands, add_command, add_json, bytes_text, pairs, print_json, print_text, say, table
from taso.graph.errors import TasoError

EXAMPLES = (
    ("taso cache", "where it is, how large, and what is in it"),
    ("taso cache --clear", "forget all that was measured: it is measured again when it is needed"),
    ("TASO_CACHE_DIR=/fast/disk taso cache", "look at another one"),
)
_FILES = ("costs.sqlite3", "costs.sqlite3-wal", "costs.sqlite3-shm", "costs.damaged")


def add_parser(commands: Commands[argparse.ArgumentParser]) -> None:
    """Adds `taso cache`."""
    parser = add_command(commands, "cache", run, "tell what was measured, or forget it", EXAMPLES)
    parser.add_argument("--clear", action="store_true", help="delete what was measured")
    add_json(parser)


def run(settings: argparse.Namespace) -> int:
    """Tells where measured costs are kept, their size, and how many there are for each device.

    The status is 0, or 1 where the cache cannot be read or cleared.
    """
    folder = cache_folder()
    if settings.clear:
        freed = clear(folder)
        say(f"{bytes_text(freed)} deleted in {folder}")
        if settings.json:
            print_json({"path": str(folder), "deleted_bytes": freed})
        return DONE
    size, devices = sum(f.stat().st_size for f in files(folder)), entries(folder)
    if settings.json:
        found = [{"device": d, "kernels": kernels, "comparisons": graphs} for d, (kernels, graphs) in devices.items()]
        print_json({"path": str(folder), "bytes": size, "devices": found})
        return DONE
    total = sum(kernels for kernels, _ in devices.values())
    text = pairs("cache", {"folder": str(folder), "size": bytes_text(size), "kernels": str(total)})
    if devices:
        rows = [(device, str(kernels), str(graphs)) for device, (kernels, graphs) in devices.items()]
        text += "\n\n" + table(("device", "kernels", "comparisons"), rows, "<>>")
    print_text(text)
    return DONE


def files(folder: Path) -> list[Path]:
    """The files of the cost database that are there."""
    return [folder / name for name in _FILES if (folder / name).is_file()]


def clear(folder: Path) -> int:
    """Deletes the cost database, and nothing else in `folder`; returns the bytes that were freed.

    Raises `TasoError` where that is not allowed.
    """
    freed = 0
    for file in files(folder):
        try:
            size = file.stat().st_size
            file.unlink(missing_ok=True)
        except OSError as error:
            raise TasoError(f"'{file}' cannot be deleted: {error.strerror or error}") from error
        freed += size
    return freed


def entries(folder: Path) -> dict[str, tuple[int, int]]:
    """For each device the numbers of kernels measured and of whole graphs compared; nothing is written.

    Raises `TasoError` for a file that is no such database.
    """
    file = folder / _FILES[0]
    if not file.is_file():
        return {}
    try:
        with closing(sqlite3.connect(f"{file.absolute().as_uri()}?mode=ro", uri=True, timeout=30)) as database:
            kernels = dict(database.execute("select device, count(*) from cost group by device"))
            graphs = dict(database.execute("select device, count(*) from verdict group by device"))
    except sqlite3.DatabaseError as error:
        raise TasoError(f"'{file}' cannot be read ({error}); `taso cache --clear` deletes it") from error
    return {device: (kernels.get(device, 0), graphs.get(device, 0)) for device in sorted({**kernels, **graphs})}
