"""Writes the part of docs/cli.md below its mark out of the parser: every command, its arguments and options.

Run it after a change to a command: .venv/bin/python scripts/command_page.py
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from agentgym.cli import COMMANDS, command_line

PAGE = Path(__file__).resolve().parent.parent / "docs" / "cli.md"
MARK = "<!-- scripts/command_page.py writes what follows -->\n"


def page(before: str) -> str:
    """The whole page: `before` up to the mark, then the commands."""
    commands = next(action for action in command_line()._actions if isinstance(action, argparse._SubParsersAction))
    told = {choice.dest: choice.help or "" for choice in commands._choices_actions}
    parts = []
    for use, modules in COMMANDS.items():
        parts.append(f"## {use[0].upper()}{use[1:]}\n")
        parts += [section(commands.choices[name], told[name]) for name in modules]
    return before.partition(MARK)[0] + MARK + "\n" + "\n".join(parts)


def section(command: argparse.ArgumentParser, about: str) -> str:
    """A command, or each of its commands."""
    below = [action for action in command._actions if isinstance(action, argparse._SubParsersAction)]
    if below:
        told = {choice.dest: choice.help or "" for choice in below[0]._choices_actions}
        return "\n".join(section(sub, told[name]) for name, sub in below[0].choices.items())
    first, second, *own = command._action_groups
    groups = [([], _shown([*first._group_actions, *second._group_actions]))]
    groups += [(_heading(group), _shown(group._group_actions)) for group in own]
    # As argparse: arguments and options first, then the groups that the command made.
    shown = [action for _, actions in groups for action in actions]
    options = any(action.option_strings for action in shown)
    arguments = [_argument(action) for action in shown if not action.option_strings]
    usage = " ".join([command.prog, *arguments, *(["[options]"] if options else [])])
    description = command.description or about
    texts = [f"### `{command.prog}`\n", f"{_sentence(description)}\n", f"```text\n{usage}\n```\n"]
    for heading, actions in groups:
        rows = [f"| `{_names(action)}` | {_cell(_help(command, action))} |" for action in actions]
        if rows:
            texts += [*heading, "\n".join(["| argument | what |", "|---|---|", *rows]) + "\n"]
    if command.epilog:
        texts.append(f"```text\n{command.epilog.strip()}\n```\n")
    return "\n".join(texts)


def _shown(actions: list[argparse.Action]) -> list[argparse.Action]:
    return [action for action in actions if action.help != argparse.SUPPRESS and "--help" not in action.option_strings]


def _heading(group: argparse._ArgumentGroup) -> list[str]:
    """The title of a group that a command made, and what it says of itself."""
    return [f"{_sentence(f'{group.title}: {group.description}' if group.description else group.title or '')}\n"]


def _argument(action: argparse.Action) -> str:
    name = _metavar(action)
    return {"*": f"[{name} ...]", "+": f"{name} [{name} ...]", "?": f"[{name}]"}.get(str(action.nargs), name)


def _names(action: argparse.Action) -> str:
    if not action.option_strings:
        return _metavar(action)
    value = "" if action.nargs == 0 or isinstance(action, argparse.BooleanOptionalAction) else f" {_metavar(action)}"
    return "`, `".join(f"{name}{value}" for name in action.option_strings)


def _metavar(action: argparse.Action) -> str:
    if isinstance(action.metavar, str):
        return action.metavar
    return "|".join(map(str, action.choices)).replace("|", "\\|") if action.choices else action.dest.upper()


def _help(command: argparse.ArgumentParser, action: argparse.Action) -> str:
    """The help as argparse shows it, with %(default)s and the like filled in."""
    return command._get_formatter()._expand_help(action) if action.help else ""


def _cell(text: str) -> str:
    """Text for a cell of a table; what looks like an option or a placeholder stays as it is."""
    text = re.sub(r"\s+", " ", text).replace("|", "\\|")
    return re.sub(r"<([\w-]+)>", r"`<\1>`", text)


def _sentence(text: str) -> str:
    text = text.strip()
    return f"{text[0].upper()}{text[1:]}" + ("" if text.endswith((".", ":")) else ".")


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
