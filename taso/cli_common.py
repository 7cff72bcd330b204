"""What the commands share: exit statuses, talk, tables, progress, and the options that several of them take."""

from __future__ import annotations

import argparse
import contextlib
import inspect
import io
import json
import math
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from taso.backends.lowering import BF16, FLOAT32, INT8
from taso.backends.select import NAMES
from taso.graph.errors import ModelError, TasoError
from taso.search.progress import interactive

DONE, FAILED, USAGE, TROUBLE, INTERRUPTED = 0, 1, 2, 3, 130
"""Exit statuses: done; it cannot be done, or the answer is no; wrong usage; a command that answers cannot; Ctrl-C."""

Commands = argparse._SubParsersAction
Run = Callable[[argparse.Namespace], int]
Advance = Callable[[float, str], None]
Examples = Sequence[tuple[str, str]]
"""(command, what it does) in the order in which help shows them."""

# ── talk ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def say(text: str) -> None:
    """A remark for whoever looks on, on stderr; where nobody reads that any more, it is lost."""
    with contextlib.suppress(OSError):
        print(text, file=sys.stderr, flush=True)


def print_text(text: str) -> None:
    """Prints a result to stdout; whoever closed it early (`| head`) has seen enough."""
    if sys.stdout is None:
        # print would say nothing
        raise TasoError("the result could not be printed: stdout is closed")
    try:
        print(text.rstrip("\n"), flush=True)
    except UnicodeEncodeError:
        printable = text.encode(sys.stdout.encoding, "replace").decode(sys.stdout.encoding)
        print(printable.rstrip("\n"), flush=True)
    except BrokenPipeError:
        # what is left in the buffer must not raise again at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except OSError as error:
        raise TasoError(f"the result could not be printed: {error.strerror}") from error


def print_json(data: object) -> None:
    """Prints a result as JSON: what is not finite becomes null, for JSON has no word for it."""
    print_text(to_json(data))


def to_json(data: object) -> str:
    """JSON that every reader takes."""
    return json.dumps(_plain(data), indent=2, ensure_ascii=False)


def _plain(data: object) -> object:
    if isinstance(data, float):
        return data if math.isfinite(data) else None
    if isinstance(data, Mapping):
        return {str(name): _plain(value) for name, value in data.items()}
    if isinstance(data, (list, tuple)):
        return [_plain(value) for value in data]
    return data


# ── tables ───────────────────────────────────────────────────────────────────────────────────────────────────────


def table(headers: Sequence[str], rows: Iterable[Sequence[str]], align: str) -> str:
    """A table; `align` has "<" (left) or ">" (right) for each column. Colour on a terminal, wrapped to its width."""
    # rich costs more to import than taso itself
    from rich import box
    from rich.table import Table
    from rich.text import Text

    named = any(headers)
    made = Table(box=box.SIMPLE_HEAD if named else None, show_header=named, pad_edge=False, padding=(0, 1))
    for side, header in zip(align, headers, strict=True):
        made.add_column(Text(header), justify="left" if side == "<" else "right", overflow="fold")
    for row in rows:
        made.add_row(*(Text(cell) for cell in row))
    return _rendered(made)


def pairs(title: str, items: Mapping[str, str]) -> str:
    """A heading, and below it a name and a text in each line."""
    from rich.text import Text

    head = _rendered(Text(title, style="bold cyan"))
    body = table(["", ""], [(f"  {name}", said) for name, said in items.items()], "<<")
    return head + "\n" + body if items else head


def _rendered(what: object) -> str:
    from rich.console import Console

    terminal = sys.stdout is not None and sys.stdout.isatty()
    # an output that is read by programs is not cut to any width
    console = Console(
        file=io.StringIO(), force_terminal=True if terminal else None, width=None if terminal else 1000, highlight=False
    )
    with console.capture() as said:
        console.print(what)
    return "\n".join(line.rstrip() for line in said.get().splitlines()).strip("\n")


def bytes_text(count: float) -> str:
    """Bytes with a binary unit: 1536 is "1.5 KiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def count_text(count: float) -> str:
    """A large number with a decimal unit: 25500000 is "25.5 M"."""
    for unit in ("", " k", " M", " G", " T"):
        if count < 1000:
            return f"{count:.0f}" if unit == "" else f"{count:.1f}{unit}"
        count /= 1000
    return f"{count:.1f} P"


# ── progress ─────────────────────────────────────────────────────────────────────────────────────────────────────


@contextmanager
def progress(what: str, quiet: bool, total: float | None = None) -> Iterator[Advance]:
    """A bar on stderr while the block runs, or, without a `total`, a mark that moves; nothing where nobody looks.

    Gives the function that takes how much of `total` is done, and what is being done.
    """
    if quiet or not interactive():
        yield lambda done, doing: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    shown = BarColumn() if total is not None else SpinnerColumn()
    columns = (TextColumn("taso"), shown, TextColumn("{task.description}", markup=False), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=total)
        yield lambda done, doing: bar.update(task, completed=done, description=doing)


# ── parsers ──────────────────────────────────────────────────────────────────────────────────────────────────────


def add_command(
    commands: Commands[argparse.ArgumentParser], name: str, run: Run, help: str, examples: Examples
) -> argparse.ArgumentParser:
    """A command that `run` carries out; its docstring says what the command does."""
    parser = commands.add_parser(name, help=help)
    describe(parser, run.__doc__ or "", examples)
    # wrong usage that only several options together make
    parser.set_defaults(run=run, refuse=parser.error, quiet=False, verbose=False, trouble=FAILED)
    return parser


class _Help(argparse.RawDescriptionHelpFormatter):
    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=28)


def describe(parser: argparse.ArgumentParser, description: str, examples: Examples) -> None:
    """Gives a parser its description, and examples below its options."""
    parser.formatter_class = _Help
    parser.description = inspect.cleandoc(description)
    parser.epilog = "examples:\n" + "\n".join(f"  {command}\n      {what}" for command, what in examples)


def add_input(parser: argparse.ArgumentParser, what: str) -> None:
    parser.add_argument(
        "--input", action="append", default=[], type=input_shape, metavar="NAME:1x3x224x224",
        help=f"the shape {what}, where the file leaves it open: 1 where nothing is said (may be repeated)",
    )  # fmt: skip


def add_data(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--data", action="append", default=[], metavar="FILE",
        help="values of inputs: FILE.npz, FILE.npy or INPUT=FILE.npy (may be repeated; the rest is random)",
    )  # fmt: skip


def add_limits(parser: argparse.ArgumentParser) -> None:
    """How far a search goes; `taso.optimize` says what is no limit."""
    parser.add_argument("--budget", type=int, default=1000, help="graphs taken off the queue (default: %(default)s)")
    parser.add_argument("--time-limit", type=float, metavar="SECONDS", help="stop the search after so long")


def add_backend(parser: argparse.ArgumentParser, help: str = "where to run", default: str | None = "auto") -> None:
    said = f"{help}: {', '.join(NAMES)}" + (" (default: %(default)s)" if default else "")
    parser.add_argument("--backend", default=default, metavar="NAME", help=said)
    parser.add_argument("--threads", type=int, metavar="N", help="threads of the backend (default: its own choice)")
    parser.add_argument(
        "--precision", choices=(FLOAT32, BF16, INT8), default=FLOAT32,
        help="of products: float32, factors rounded to bfloat16, or, of a quantised model, integers (onednn alone; "
        "default: %(default)s)",
    )  # fmt: skip


def add_seed(parser: argparse.ArgumentParser, what: str) -> None:
    parser.add_argument("--seed", type=whole(0), default=0, metavar="N", help=f"{what} (default: %(default)s)")


def add_workers(parser: argparse.ArgumentParser) -> None:
    """Without the option `workers` is None, so that its help is the same on every machine."""
    parser.add_argument("--workers", type=whole(1), metavar="N", help="processes (default: one for each processor)")


def add_json(parser: argparse._ActionsContainer, help: str = "print the result as JSON") -> None:
    parser.add_argument("--json", action="store_true", help=help)


def add_talk(parser: argparse.ArgumentParser) -> None:
    talk = parser.add_mutually_exclusive_group()
    talk.add_argument("-q", "--quiet", action="store_true", help="say nothing on stderr but errors")
    talk.add_argument("-v", "--verbose", action="store_true", help="tell what is being done")


def input_shape(text: str) -> tuple[str, tuple[int, ...]]:
    """`name:1x3x224x224`; the name may hold colons."""
    name, colon, sizes = text.rpartition(":")
    parts = sizes.split("x")
    if not name or not colon or not all(part.isascii() and part.isdigit() for part in parts):
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form name:1x3x224x224")
    return name, tuple(map(int, parts))


def whole(least: int, most: int = (1 << 31) - 1) -> Callable[[str], int]:
    """The type of an option that is a whole number from `least` to `most`."""

    def parse(text: str) -> int:
        if not (text.isascii() and text.isdigit() and least <= int(text) <= most):
            raise argparse.ArgumentTypeError(f"{text!r} is no whole number from {least} to {most}")
        return int(text)

    return parse


def positive(text: str) -> float:
    """The type of an option that is a number above 0."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is no number above 0")
    return value


def usable_processors() -> int:
    """Processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def write_whole(path: str, content: bytes) -> None:
    """Writes a file that appears whole or not at all; raises `ModelError` where it cannot be written."""
    part = f"{path}.{os.getpid()}.part"
    try:
        with open(part, "wb") as file:
            file.write(content)
        os.replace(part, path)
    except OSError as error:
        raise ModelError(f"'{path}' cannot be written: {error.strerror or error}") from error
    finally:
        with contextlib.suppress(OSError):
            os.unlink(part)
