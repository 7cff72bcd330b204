"""Shell completion, tried in a real bash (and zsh and fish where they are), and the manual made of the same data."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from taso import cli, cli_page
from taso.cli_common import DONE
from taso.cli_completion import SHELLS
from taso.cli_tree import tree

ROOT = Path(__file__).parents[1]


def script(shell: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert cli.main(["completion", shell]) == DONE
    told = capsys.readouterr()
    assert told.err == ""
    return told.out


def completed(script: str, folder: Path, *words: str) -> list[str]:
    """What bash offers for the last of `words`."""
    line = " ".join(f"'{word}'" for word in words)
    ask = f"{script}\nCOMP_WORDS=({line}); COMP_CWORD={len(words) - 1}; _taso; printf '%s\\n' \"${{COMPREPLY[@]}}\""
    done = subprocess.run(["bash", "-c", ask], capture_output=True, text=True, cwd=folder, check=True)
    return done.stdout.split("\n")[:-1]


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
@pytest.mark.parametrize(
    "words, offered",
    [
        (["taso", "d"], ["diff", "doctor"]),
        (["taso", "rules", ""], ["list", "show", "verify", "generate"]),
        (["taso", "optimize", "--no"], ["--no-verify"]),
        (["taso", "completion", "f"], ["fish"]),
        (["taso", "run", "a.onnx", "--backend", "ref"], ["reference"]),
        (["taso", "rules", "list", "--status", "bo"], ["bounded"]),
        (["taso", "show", "my"], ["my model.onnx"]),
        (["taso", "optimize", "-o", "my"], ["my model.onnx"]),
        (["taso", "optimize", "--budget", "my"], [""]),
    ],
)  # fmt: skip
def test_bash_completes(
    words: list[str], offered: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "my model.onnx").touch()
    assert completed(script("bash", capsys), tmp_path, *words) == offered


@pytest.mark.parametrize("shell", sorted(SHELLS))
def test_a_script_is_right_to_its_shell_and_knows_every_option(
    shell: str, capsys: pytest.CaptureFixture[str]
) -> None:
    text = script(shell, capsys)
    for command in tree(cli.parser()).walk():
        for option in command.options:
            assert all(flag.lstrip("-") in text for flag in option.flags)
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed: its script was not parsed")
    subprocess.run([shell, "-n"], input=text, text=True, check=True)


def test_the_manual_is_what_the_commands_say() -> None:
    written = (ROOT / "docs" / "command-line.md").read_text("utf-8")
    assert written == cli_page.page(), "run `python -m taso.cli_page > docs/command-line.md`"
