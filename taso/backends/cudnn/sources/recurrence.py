"""One step of a recurrent layer (ONNX LSTM, GRU and RNN 7 to 22): what is element-wise behind its products.

Gates lie side by side in a row for each member of the batch, in ONNX's order; a thread has one number of the state.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from taso.backends.cudnn.sources.launches import Source, SourceLaunch
from taso.backends.cudnn.sources.prelude import PRELUDE
from taso.backends.places import Place

THREADS = 128

FUNCTIONS = {"sigmoid": "sigmoid({0})", "tanh": "tanh_of({0})", "relu": "most({0}, 0.0f)"}
"""Activations that there are as text, by ONNX's names in small letters."""

GATES = {"LSTM": 4, "GRU": 3, "RNN": 1}


@dataclass(frozen=True)
class Cell:
    """A kind of step: the operator, its activations, the batch and the size of the state.

    `late` is linear_before_reset of a GRU, `coupled` is input_forget of an LSTM.
    """

    op: str
    functions: tuple[str, ...]
    batch: int
    size: int
    late: bool = False
    coupled: bool = False

    @property
    def gates(self) -> int:
        return GATES[self.op]


@dataclass
class _Text:
    """The text of one kernel in the making; a buffer that is not given is 0 wherever it is read."""

    cell: Cell
    given: Mapping[str, Place]
    lines: list[str] = field(default_factory=list)

    def f(self, number: int, x: str) -> str:
        return FUNCTIONS[self.cell.functions[number]].format(x)

    def read(self, name: str, index: str) -> str:
        return f"{name}[{index}]" if name in self.given else "0.0f"

    def gate(self, name: str, number: int, rows: int) -> str:
        """Number `number` of `rows` gates in a row of a buffer."""
        return self.read(name, f"b * {rows * self.cell.size} + {number * self.cell.size} + j")

    def bias(self, *numbers: int) -> str:
        return " + ".join(self.read("bias", f"{n * self.cell.size} + j") for n in numbers)

    def peep(self, number: int, state: str) -> str:
        return f"{self.read('peep', f'{number * self.cell.size} + j')} * {state}" if "peep" in self.given else "0.0f"


def lstm(cell: Cell, given: Mapping[str, Place]) -> SourceLaunch:
    """Buffers x, g (products of gates i, o, f, c with the input and with h), bias, peep, c; made, h."""
    t = _Text(cell, given)
    for n, name in enumerate("iofc"):
        t.lines.append(f"const float g{name} = {t.gate('x', n, 4)} + {t.gate('g', n, 4)} + {t.bias(n, n + 4)};")
    t.lines.append(f"const float old = {t.read('before', 'n')};")
    t.lines.append(f"const float i = {t.f(0, '(gi + ' + t.peep(0, 'old') + ')')};")
    keep = "1.0f - i" if cell.coupled else t.f(0, f"(gf + {t.peep(2, 'old')})")
    t.lines += [
        f"const float c = ({keep}) * old + i * {t.f(1, 'gc')};",
        f"made[n] = c; h[n] = {t.f(0, '(go + ' + t.peep(1, 'c') + ')')} * {t.f(2, 'c')};",
    ]
    return _launch(cell, "lstm", t)


def rnn(cell: Cell, given: Mapping[str, Place]) -> SourceLaunch:
    """Buffers x, g, bias; h."""
    t = _Text(cell, given)
    total = f"({t.gate('x', 0, 1)} + {t.gate('g', 0, 1)} + {t.bias(0, 1)})"
    t.lines.append(f"h[n] = {t.f(0, total)};")
    return _launch(cell, "rnn", t)


def gru(cell: Cell, given: Mapping[str, Place]) -> SourceLaunch:
    """The whole step where the reset is late: buffers x, g (gates z, r, h), bias, before; h."""
    t = _Text(cell, given)
    _gates(t, 3)
    t.lines += [f"const float from = reset * ({t.gate('g', 2, 3)} + {t.bias(5)});", *_new(t)]
    return _launch(cell, "gru", t)


def gru_reset(cell: Cell, given: Mapping[str, Place]) -> SourceLaunch:
    """What the last product of a step reads: reset · h. Buffers x, g (gates z, r), bias, before; made."""
    t = _Text(cell, given)
    _gates(t, 2)
    t.lines.append("made[n] = reset * old;")
    return _launch(cell, "gru reset", t)


def gru_end(cell: Cell, given: Mapping[str, Place]) -> SourceLaunch:
    """The rest of a step behind that product, `last`. Buffers x, g (gates z, r), last, bias, before; h."""
    t = _Text(cell, given)
    _gates(t, 2)
    t.lines += [f"const float from = {t.gate('last', 0, 1)} + {t.bias(5)};", *_new(t)]
    return _launch(cell, "gru end", t)


def _gates(t: _Text, rows: int) -> None:
    t.lines.append(f"const float old = {t.read('before', 'n')};")
    for n, name in enumerate(("update", "reset")):
        total = f"({t.gate('x', n, 3)} + {t.gate('g', n, rows)} + {t.bias(n, n + 3)})"
        t.lines.append(f"const float {name} = {t.f(0, total)};")


def _new(t: _Text) -> list[str]:
    new = t.f(1, f"({t.gate('x', 2, 3)} + {t.bias(2)} + from)")
    return [f"h[n] = (1.0f - update) * {new} + update * old;"]


_WRITTEN = ("made", "h")


def _launch(cell: Cell, name: str, text: _Text) -> SourceLaunch:
    count = cell.batch * cell.size
    # a state may be written where it is read
    parameters = ", ".join(f"{'' if n in _WRITTEN else 'const '}float* {n}" for n in text.given)
    lines: Sequence[str] = (
        PRELUDE, f'extern "C" __global__ void __launch_bounds__({THREADS}) ENTRY({parameters}) {{',
        f"    const i64 n = (i64)blockIdx.x * {THREADS} + threadIdx.x;", f"    if (n >= {count}) return;",
        f"    const i64 b = n / {cell.size}, j = n % {cell.size};", *("    " + line for line in text.lines), "}", "",
    )  # fmt: skip
    source = Source.named(name, "\n".join(lines))
    return SourceLaunch(source, (-(-count // THREADS), 1, 1), (THREADS, 1, 1), 0, tuple(text.given.values()))


__all__ = ["FUNCTIONS", "GATES", "Cell", "gru", "gru_end", "gru_reset", "lstm", "rnn"]
