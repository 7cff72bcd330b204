"""What other installed packages add, announced as entry points: rules ("taso.rules") and backends ("taso.backends").

Nothing of a package is imported before it is asked for by name.
"""

from __future__ import annotations

import logging
import warnings
from importlib import metadata

from taso.graph.errors import PluginWarning, TasoError

log = logging.getLogger(__name__)

RULES = "taso.rules"
BACKENDS = "taso.backends"


class PluginError(TasoError):
    """An installed package announces something that cannot be used; the message says who, what and why."""


def announced(group: str) -> dict[str, metadata.EntryPoint]:
    """Entry points of a group by name, sorted; of two packages that take one name the first by its own name has it."""
    found = sorted(metadata.entry_points(group=group), key=lambda e: (e.name, _package(e), e.value))
    named: dict[str, metadata.EntryPoint] = {}
    for entry in found:
        first = named.setdefault(entry.name, entry)
        if (first.value, _package(first)) != (entry.value, _package(entry)):
            passed_over(f"{who(entry)} is passed over, for {who(first)} has that name")
    return named


def loaded(entry: metadata.EntryPoint) -> object:
    """What an entry point names; raises `PluginError` where it cannot be imported."""
    try:
        return entry.load()
    except Exception as error:
        # a package of another's may fail in any way
        log.info("%s cannot be loaded", who(entry), exc_info=True)
        raise broken(entry, error) from error


def broken(entry: metadata.EntryPoint, why: BaseException | str) -> PluginError:
    """The sentence on a plugin that cannot be used."""
    said = why if isinstance(why, (str, TasoError)) else f"{type(why).__name__}: {why}"
    return PluginError(f"{who(entry)} cannot be used: {said}")


def passed_over(sentence: str) -> None:
    """Warns of a plugin that is skipped."""
    warnings.warn(sentence, PluginWarning, stacklevel=3)


def who(entry: metadata.EntryPoint) -> str:
    """A plugin as messages call it."""
    package = _package(entry)
    return f"'{entry.name}' ({entry.group}{f' of the package {package}' if package else ''}, {entry.value})"


def _package(entry: metadata.EntryPoint) -> str:
    return entry.dist.name if entry.dist is not None else ""


__all__ = ["BACKENDS", "RULES", "PluginError", "announced", "broken", "loaded", "passed_over", "who"]
