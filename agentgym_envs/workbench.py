"""A shell and an editor over a sandbox: the tools of an agent that works on a folder of files."""

import json
import posixpath
import re
import shlex
from dataclasses import replace
from typing import Literal, TypeVar

from agentgym.sandbox import ExecResult, Sandbox, SandboxError, Session
from agentgym.tools.toolset import ToolError, shortened
from agentgym_envs.settings import check_number
from agentgym_envs.text_edits import around, in_range, inserted, lines_of, numbered, replaced

T = TypeVar("T")
# Of the shell: programs that wait for a key, draw bars or colour their output are of no use to an agent.
_VARIABLES = {
    "PAGER": "cat",
    "GIT_PAGER": "cat",
    "MANPAGER": "cat",
    "LESS": "-R",
    "TERM": "dumb",
    "PIP_PROGRESS_BAR": "off",
    "TQDM_DISABLE": "1",
    "GIT_TERMINAL_PROMPT": "0",
}
LONGEST_FILE = 4 << 20  # bytes of a file that the editor takes
LONGEST_COMMAND = 1 << 20  # characters
_BEGIN_SECONDS = 30.0
_LOOK_SECONDS = 20.0  # for what the editor itself asks the sandbox
RESTARTED = "Note: the shell had ended since the last command; this one ran in a new shell."
_TERMINAL = re.compile(r"^bash: \[.*\] tcsetattr: .*\n?", re.MULTILINE)  # of a shell whose command was killed
_ABOUT = '{ stat -L -c "%a %F" -- "$1" || echo; } && realpath -m -- "$1"'  # a path may have line breaks
_LISTED = 'cd -- "$1" && find -L . -mindepth 1 -maxdepth 2 -not -path "*/.*" -printf "%P%y\\n" | head -n 2000'
# In the sandbox: its Python is that of the files, and text of an agent can exhaust a parser.
_PARSES = """
import ast, json, sys
def problem(text):
    try:
        ast.parse(text)
    except SyntaxError as error:
        return "line %s: %s" % (error.lineno, error.msg)
    except ValueError as error:
        return str(error)
before, after = json.load(sys.stdin)
if before is None or problem(before) is None:
    print(problem(after) or "")
"""


class Workbench:
    """Tools for a sandbox that is given by `begin`, one at a time: `ToolSet([bench.bash, bench.edit])`.

    A failing command is answered; SandboxError and OSError of a failing sandbox are raised.

    Args:
        command_timeout: seconds for one command.
        max_output: characters of an answer; the middle of a longer one is left out.
    """

    def __init__(self, command_timeout: float = 60.0, max_output: int = 16_000):
        check_number("command_timeout", command_timeout, 0.1, 86_400)
        check_number("max_output", max_output, 200, 10_000_000, whole=True)
        self.command_timeout, self.max_output = float(command_timeout), max_output
        self._sandbox: Sandbox | None = None
        self._shell: Session | None = None
        self._folder, self._prelude = "/", ""
        self._restarts = False

    def begin(self, sandbox: Sandbox, folder: str, prelude: str = "") -> None:
        """Work in a folder of this sandbox from now on. A new shell runs `prelude` first, a command."""
        self._sandbox, self._folder, self._prelude = sandbox, folder, prelude
        self._shell, self._restarts = None, False

    def end(self) -> None:
        """Kill the shell and all that its commands started. The sandbox stays open."""
        sandbox, shell = self._sandbox, self._shell
        self._sandbox = self._shell = None
        if shell is not None and sandbox is not None and sandbox.alive:
            shell.close()

    def run(self, command: str, timeout: float | None = None) -> ExecResult:
        """Run a command in the shell, which keeps its folder, variables and background jobs. `stdout` has stderr too.

        Args:
            timeout: seconds, if less than `command_timeout`.
        """
        seconds = self.command_timeout if timeout is None else min(timeout, self.command_timeout)
        # "eval" keeps what the command sets, and its output in the order in which it is written.
        text = f"eval {shlex.quote(command)} 2>&1"
        restarted = False
        if self._shell is None or not self._shell.alive:
            restarted = self._open()
        try:
            result = self._opened.run(text, timeout=seconds)
        except ValueError:  # a background job has ended it since the last command
            self._open()
            restarted = True
            result = self._opened.run(text, timeout=seconds)
        if not self._opened.alive:
            result = replace(result, stdout=result.stdout.removesuffix("exit\n"))
        notes = [RESTARTED] if restarted else []
        parts = (*notes, *(_TERMINAL.sub("", text) for text in (result.stdout, result.stderr)))
        output = "\n".join(part.strip("\n") for part in parts if part.strip())
        return replace(result, stdout=output, stderr="")

    def bash(self, command: str) -> str:
        """Run a command in a bash shell and see what it prints. The shell keeps its folder, variables and background
        jobs from one command to the next. There is no network and no input.

        Args:
            command: one or more lines of bash.
        """
        if "\0" in command or len(command) > LONGEST_COMMAND:
            raise ToolError(f"a command must have no zero byte and at most {LONGEST_COMMAND} characters")
        return self.told(self.run(command))

    def told(self, result: ExecResult) -> str:
        """A result as an agent reads it: the output, and why the command ended if not with 0."""
        parts = [shortened(result.stdout, self.max_output)] if result.stdout else []
        alive = self._shell is not None and self._shell.alive
        after = "the shell goes on" if alive else "the next one runs in a new shell"
        if result.timed_out:
            parts.append(
                f"Error: the command did not end within {self.command_timeout:g} seconds and was stopped; {after}."
            )
        elif result.oom_killed:
            parts.append(f"Error: the memory was used up, and processes were killed; {after}.")
        elif not alive:
            parts.append(f"The command ended the shell (exit code {result.exit_code}); {after}.")
        elif result.exit_code:
            parts.append(f"(exit code {result.exit_code})")
        return "\n".join(parts) or "(no output)"

    def edit(
        self,
        command: Literal["view", "create", "str_replace", "insert"],
        path: str,
        file_text: str | None = None,
        old_str: str | None = None,
        new_str: str | None = None,
        insert_line: int | None = None,
        view_range: list[int] | None = None,
    ) -> str:
        """View a file with line numbers or list a folder; create a file; replace a text that is once in a file; or
        insert lines. After an edit of a Python file, tells if it no longer parses.

        Args:
            command: what to do.
            path: of the file or folder.
            file_text: for create: the file's content; an existing file is overwritten.
            old_str: for str_replace: the text to replace, exactly as in the file, with all spaces.
            new_str: for str_replace: the text in its place, "" to delete it; for insert: the lines.
            insert_line: for insert: the number of the line after which they go, 0 for the beginning.
            view_range: for view: the first and last line, [1, 40]; a last of -1 is the end.
        """
        if not path or "\0" in path:
            raise ToolError("path must name a file or folder")
        _encoded(path)
        if command == "view":
            return self._view(path, view_range)
        if command == "create":
            return self._create(path, _needed("file_text", file_text))
        place, mode = self._file(path)
        before = self._read(place)
        if command == "str_replace":
            new = new_str or ""
            after, line = replaced(before, _needed("old_str", old_str), new)
        else:
            new, line = _needed("new_str", new_str), _needed("insert_line", insert_line)
            after, line = inserted(before, line, new), line + 1
        self._write(place, after, mode)
        told = f"Edited {path}:\n{around(after, line, len(lines_of(new)))}"
        return shortened(told, self.max_output) + self._syntax(place, before, after)

    def _view(self, path: str, view_range: list[int] | None) -> str:
        place, kind = self._about(path)
        if kind is None:
            raise ToolError(f"{path}: there is no such file or folder")
        if kind.endswith("directory"):
            return shortened(self._list(place, path), self.max_output)
        text = self._read(place)
        first, last = (1, None) if view_range is None else in_range(text, view_range)
        return shortened(numbered(text, first, last) or "(the file is empty)", self.max_output)

    def _create(self, path: str, text: str) -> str:
        place, kind = self._about(path)
        if kind is not None and kind.endswith("directory"):
            raise ToolError(f"{path}: is a folder")
        before = None if kind is None else self._read(place)
        if before is None:
            self._make_folder(posixpath.dirname(place))
        self._write(place, text, _mode(kind))
        told = f"{'Created' if kind is None else 'Overwrote'} {path}: {len(lines_of(text))} lines."
        return told + self._syntax(place, before, text)

    def _list(self, place: str, path: str) -> str:
        found = self._ask(["bash", "-c", _LISTED, "list", place])
        names = sorted(f"{line[:-1]}/" if line[-1] == "d" else line[:-1] for line in found.split("\n") if line)
        return f"{path}, two levels deep, without hidden files:\n" + ("\n".join(names) or "(empty)")

    def _about(self, path: str) -> tuple[str, str | None]:
        """The path without links, and "MODE KIND" of what is there, or None."""
        found = self._ask(["bash", "-c", _ABOUT, "about", posixpath.join(self._folder, path)])
        kind, _, place = found.partition("\n")
        if not place.startswith("/"):
            raise ToolError(f"{path}: cannot be looked at")
        return place.removesuffix("\n"), kind or None

    def _file(self, path: str) -> tuple[str, int]:
        place, kind = self._about(path)
        if kind is None:
            raise ToolError(f"{path}: there is no such file: create it, or look for its name with bash")
        return place, _mode(kind)

    def _read(self, place: str) -> str:
        try:
            data = self._given.read(place, LONGEST_FILE)
        except (OSError, ValueError) as error:
            raise ToolError(f"cannot be read: {error}") from None
        if b"\0" in data:
            raise ToolError(f"{place}: is no text file")
        return data.decode("utf-8", "surrogateescape")

    def _write(self, place: str, text: str, mode: int) -> None:
        data = _encoded(text)
        if len(data) > LONGEST_FILE:
            raise ToolError(f"{place}: would have more than {LONGEST_FILE} bytes")
        try:
            self._given.write(place, data, mode)
        except (OSError, ValueError) as error:
            raise ToolError(f"cannot be written: {error}") from None

    def _make_folder(self, place: str) -> None:
        """As the agent's own program would: the host's writes replace a file that is in the way of a folder."""
        if failed := self._ask(["bash", "-c", 'mkdir -p -- "$1" 2>&1', "make", place]):
            raise ToolError(failed.strip()[-300:])

    def _syntax(self, place: str, before: str | None, after: str) -> str:
        """A warning if a Python file parsed and no longer does. The edit stands: the next one may complete it."""
        if not place.endswith(".py"):
            return ""
        python = "$(command -v python || command -v python3 || echo true)"
        command = f"{self._prelude or ':'} >/dev/null 2>&1; exec {python} -I -S -B -c {shlex.quote(_PARSES)}"
        found = self._ask(["bash", "-c", command], json.dumps([before, after])).strip()
        return f"\nWarning: it is no valid Python now: {found[:300]}" if found else ""

    def _ask(self, command: list[str], stdin: str = "") -> str:
        result = self._given.exec(command, stdin=stdin, timeout=_LOOK_SECONDS, cwd="/")
        if result.timed_out or result.exit_code in (126, 127):
            raise ToolError(f"the sandbox is too busy to answer: {result.stderr.strip()[-200:] or 'time-out'}")
        return result.stdout

    @property
    def _given(self) -> Sandbox:
        if self._sandbox is None:
            raise SandboxError("the workbench has no sandbox: call begin() first")
        return self._sandbox

    @property
    def _opened(self) -> Session:
        if self._shell is None:
            raise SandboxError("the workbench has no shell: call begin() first")
        return self._shell

    def _open(self) -> bool:
        """A new shell in the folder. True if there was one before."""
        again, self._restarts = self._restarts, True
        self._shell = self._given.session("shell")
        exports = " ".join(f"{name}={value}" for name, value in _VARIABLES.items())
        begin = f"{self._prelude or ':'}\nexport {exports}\ncd {shlex.quote(self._folder)}"
        self._shell.run(begin, timeout=_BEGIN_SECONDS)
        return again


def _encoded(text: str) -> bytes:
    try:
        return text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        raise ToolError("the text has half of a surrogate pair, which no file can hold") from None


def _needed(name: str, value: T | None) -> T:
    if value is None:
        raise ToolError(f"the argument {name} is missing")
    return value


def _mode(kind: str | None) -> int:
    return int(kind.split()[0], 8) & 0o777 if kind else 0o644
