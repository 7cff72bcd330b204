"""`taso completion`: scripts that make bash, zsh and fish complete commands, options, values and files.

The scripts know the commands themselves: completing starts no Python.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator

from taso.cli_common import DONE, Commands, add_command, print_text
from taso.cli_tree import Command, Option, tree

EXAMPLES = (
    ('eval "$(taso completion bash)"', "in ~/.bashrc"),
    ("taso completion zsh > ~/.zfunc/_taso", "where ~/.zfunc is in $fpath, before compinit"),
    ("taso completion fish > ~/.config/fish/completions/taso.fish", "for fish"),
)


def add_parser(commands: Commands[argparse.ArgumentParser], root: argparse.ArgumentParser) -> None:
    """Adds `taso completion` for the commands of `root`."""
    parser = add_command(commands, "completion", run, "print a script for shell completion", EXAMPLES)
    parser.add_argument("shell", choices=list(SHELLS), help="the shell that is to complete")
    parser.set_defaults(root=root)


def run(settings: argparse.Namespace) -> int:
    """Prints a script that teaches a shell to complete taso's commands and options.

    The status is 0.
    """
    print_text(SHELLS[settings.shell](tree(settings.root)))
    return DONE


def _quoted(text: str) -> str:
    """Text as one word of a shell."""
    return "'" + text.replace("'", "'\\''") + "'"


# ── bash ─────────────────────────────────────────────────────────────────────────────────────────────────────────

_BASH = """\
# bash completion for taso
_taso() {
    local word="${COMP_WORDS[COMP_CWORD]}" before="${COMP_WORDS[COMP_CWORD-1]}" at="" options="" choices="" files="" i
    for ((i = 1; i < COMP_CWORD; i++)); do
        case "$at ${COMP_WORDS[i]}" in
@COMMANDS@
        esac
    done
    case "$at" in
@OPTIONS@
    esac
    case "$at:$before" in
@VALUES@
    esac
    if [[ $word == -* ]]; then
        COMPREPLY=($(compgen -W "$options" -- "$word"))
    elif [[ -n $choices ]]; then
        COMPREPLY=($(compgen -W "$choices" -- "$word"))
    elif [[ -n $files ]]; then
        compopt -o filenames 2> /dev/null
        local IFS=$'\\n'
        COMPREPLY=($(compgen -f -- "$word"))
    fi
}
complete -F _taso taso
"""


def bash(root: Command) -> str:
    """A script for bash."""
    commands, options, values = [], [], []
    for command in root.walk():
        here = "".join(f" {word}" for word in command.words)
        if command.words:
            commands.append(f"{_quoted(here)}) at={_quoted(here)} ;;")
        flags = " ".join(flag for option in command.options for flag in option.flags)
        words = " ".join(_words(command))
        files = "1" if any(o.is_file for o in command.options if not o.flags) else ""
        options.append(f"{_quoted(here)}) options={_quoted(flags)} choices={_quoted(words)} files={files} ;;")
        for option in command.options:
            if option.flags and option.value:
                pattern = " | ".join(_quoted(f"{here}:{flag}") for flag in option.flags)
                chosen, files = _quoted(" ".join(option.choices)), "1" if option.is_file else ""
                values.append(f"{pattern}) options= choices={chosen} files={files} ;;")
    filled = _BASH
    for mark, lines in (("@COMMANDS@", commands), ("@OPTIONS@", options), ("@VALUES@", values)):
        filled = filled.replace(mark, "\n".join(f"            {line}" for line in lines))
    return filled


def _words(command: Command) -> list[str]:
    """What may stand for an argument, where that is a choice of words."""
    chosen = [choice for option in command.options if not option.flags for choice in option.choices]
    return [part.words[-1] for part in command.parts] + chosen


# ── zsh ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def zsh(root: Command) -> str:
    """A script for zsh."""
    functions = [line for command in root.walk() for line in _zsh_function(command)]
    end = ['if [[ $funcstack[1] == _taso ]]; then', '    _taso "$@"', "else", "    compdef _taso taso", "fi"]
    return "\n".join(["#compdef taso", *functions, *end])


def _zsh_function(command: Command) -> Iterator[str]:
    name = "_".join(("_taso", *command.words))
    yield f"{name}() {{"
    yield "    local context state state_descr line"
    yield "    typeset -A opt_args"
    specs = [_zsh_option(o, flag) for o in command.options for flag in o.flags]
    specs += [_zsh_argument(o) for o in command.options if not o.flags]
    if not command.parts:
        yield "    _arguments " + " ".join(specs)
    else:
        told = " ".join(_quoted(f"{p.words[-1]}:{_zsh_text(p.help)}") for p in command.parts)
        yield "    _arguments -C " + " ".join([*specs, "'1:command:->command'", "'*::argument:->argument'"])
        yield "    case $state in"
        yield f"        command) local -a found=({told}); _describe command found ;;"
        yield "        argument) case $line[1] in"
        yield from (f"            {p.words[-1]}) {name}_{p.words[-1]} ;;" for p in command.parts)
        yield "        esac ;;"
        yield "    esac"
    yield "}"


def _zsh_option(option: Option, flag: str) -> str:
    value = f":{_zsh_text(option.value)}:{_zsh_values(option)}" if option.value else ""
    return _quoted(f"*{flag}[{_zsh_text(option.help)}]{value}")


def _zsh_argument(option: Option) -> str:
    return _quoted(f"*:{_zsh_text(option.value)}:{_zsh_values(option)}")


def _zsh_values(option: Option) -> str:
    return f"({' '.join(option.choices)})" if option.choices else "_files" if option.is_file else " "


def _zsh_text(text: str) -> str:
    return "".join("\\" + c if c in "[]:\\" else c for c in text)


# ── fish ─────────────────────────────────────────────────────────────────────────────────────────────────────────

_FISH = """\
# fish completion for taso
function __taso_at
    set -l at
    for word in (commandline -opc)[2..-1]
        if contains -- (string join -- ' ' $at $word) @COMMANDS@
            set at $at $word
        end
    end
    set -l here (string join -- ' ' $at)
    test "$here" = "$argv"
end
complete -c taso -f"""


def fish(root: Command) -> str:
    """A script for fish."""
    known = " ".join(_fish_quoted(" ".join(c.words)) for c in root.walk() if c.words)
    lines = [_FISH.replace("@COMMANDS@", known)]
    for command in root.walk():
        start = f"complete -c taso -n {_fish_quoted('__taso_at ' + ' '.join(command.words))}".rstrip()
        lines += [f"{start} -a {p.words[-1]} -d {_fish_quoted(p.help)}" for p in command.parts]
        for option in command.options:
            lines.append(f"{start} {_fish_option(option)}")
    return "\n".join(lines)


def _fish_option(option: Option) -> str:
    flags = [f"-l {f[2:]}" if f.startswith("--") else f"-s {f[1:]}" for f in option.flags]
    values = f"-a {_fish_quoted(' '.join(option.choices))}" if option.choices else "-F" if option.is_file else ""
    takes = ("-r" if option.is_file else "-x") if option.value and option.flags else ""
    told = f"-d {_fish_quoted(option.help)}" if option.flags else ""
    return " ".join(part for part in (*flags, takes, values, told) if part)


def _fish_quoted(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


SHELLS: dict[str, Callable[[Command], str]] = {"bash": bash, "zsh": zsh, "fish": fish}
