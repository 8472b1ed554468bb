"""Agents that play an episode by themselves: a command in its own folder or in a sandbox, or a Python function."""

from __future__ import annotations

import asyncio
import inspect
import os
import re
import shlex
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from agentgym.agents.episode import AgentEpisode, BlockingEpisode
from agentgym.agents.named import NAMES, command_of
from agentgym.agents.target import find, words_of
from agentgym.core.agent_failure import AGENT_FAILED, cause_of
from agentgym.core.executor import EnvExecutor
from agentgym.core.messages import Message, assistant
from agentgym.core.tracebacks import traceback_of
from agentgym.processes.child_process import GONE_SECONDS, STOP_SECONDS, supervised
from agentgym.sandbox import WORKSPACE, Sandbox, SandboxError, SandboxSpec, acquire, choose
from agentgym.sandbox.api import SOCKET
from agentgym.sandbox.guest.guest_sandbox import source

COMMAND = "command:"
PORT = 8100  # of the gateway in a sandbox, where nothing else has one
INSIDE = f"http://127.0.0.1:{PORT}"
MOST_SECONDS = 24 * 3600.0  # of a command in a sandbox, as of an episode's key; limits of an episode come before
PATIENCE_SECONDS = 600.0  # for a sandbox while others have all the room
LONGEST_ANSWER, LONGEST_TAIL = 1 << 20, 2000  # of a command's output: the answer, and what a trajectory has of stderr
LONGEST_WORD = (128 << 10) - 1  # bytes of a word or a variable that Linux starts a program with


@dataclass(frozen=True)
class Left:
    """An agent's end: its final answer, if any, or the cause of its failure; and facts for the trajectory."""

    answer: Message | None = None
    failure: str | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)


class Agent(Protocol):
    async def run(self, episode: AgentEpisode) -> Left:
        """Play an episode. If cancelled, end everything that it has started."""


def agent_of(text: str, image: str | None = None, sandbox: str | None = None) -> Agent:
    """The agent of `command:WORDS`, `package.module:function` or a name of `named.NAMES`. Raises ValueError if it cannot play.

    With an image a command runs in a sandbox; see `BoxedCommand`.
    """
    if image is not None:
        if not text.startswith(COMMAND):
            raise ValueError(f"agent {text}: only a command, {COMMAND}WORDS, runs in an image")
        return BoxedCommand(text.removeprefix(COMMAND), image, sandbox)
    if text in NAMES:
        return Command(shlex.join(command_of(text)))
    return Command(text.removeprefix(COMMAND)) if text.startswith(COMMAND) else Function(text)


class Command:
    """A command. Its words may have {task}, {base_url}, {key}, {model}, {mcp_url} and {folder}; a word that is a file is found from here.

    It has the opening on its standard input too, and all in variables, but for an opening that is too long for one. What it writes to
    its standard output is its final answer. It runs in a folder of its own, which is empty, with another as its home; both are removed.
    """

    def __init__(self, line: str):
        self.words = [os.path.abspath(word) if os.path.isfile(word) else word for word in _words(line)]
        if shutil.which(self.words[0]) is None:
            raise ValueError(f"agent command:{line}: there is no program {self.words[0]!r}")

    async def run(self, episode: AgentEpisode) -> Left:
        place = tempfile.mkdtemp(prefix="agentgym-agent-")
        try:
            folder, home, out, err, given = (Path(place) / name for name in ("work", "home", "out", "err", "in"))
            folder.mkdir()
            home.mkdir()
            given.write_text(episode.opening, encoding="utf-8")
            words = [_filled(word, episode, str(folder)) for word in self.words]
            with given.open("rb") as reads, out.open("wb") as says, err.open("wb") as errors:
                starting: dict[str, Any] = {"stdin": reads, "stdout": says, "stderr": errors}
                env = {**os.environ, **_variables(episode), "HOME": str(home)}
                starting |= {"cwd": folder, "env": env, "start_new_session": True}
                process = await asyncio.create_subprocess_exec(*supervised(words, stdin=True), **starting)
                try:
                    code = await process.wait()
                finally:
                    await _ended(process)
            return _left(code, _tail(out, LONGEST_ANSWER), _tail(err, LONGEST_TAIL))
        finally:
            # In a thread: an agent may leave so many files that other episodes would stand still meanwhile.
            await asyncio.shield(asyncio.to_thread(shutil.rmtree, place, True))


class BoxedCommand:
    """A command in a sandbox of its own, whose only network is the gateway. Its words and its files are the image's.

    Args:
        image, sandbox: see `SandboxSpec` and `agentgym.sandbox.acquire`.
    """

    def __init__(self, line: str, image: str, sandbox: str | None = None):
        self.words, self.sandbox = _words(line), sandbox
        self.spec = SandboxSpec(image, memory=1 << 30, pids=256, disk=128 << 20, output=LONGEST_ANSWER)
        try:
            chosen = choose(sandbox, image).name
        except SandboxError as error:
            raise ValueError(f"agent command:{line}: {error}") from error
        if "://" in chosen:
            raise ValueError(f"agent command:{line}: sandboxes at {chosen} do not reach the gateway; those here do")

    async def run(self, episode: AgentEpisode) -> Left:
        if not episode.socket:
            raise ValueError("the gateway has no socket for sandboxes: make it with local=True")
        lane = EnvExecutor(f"agentgym agent in {self.spec.image}")
        spec = replace(self.spec, socket=episode.socket)
        inside = replace(episode, base_url=f"{INSIDE}/v1", mcp_url=f"{INSIDE}/mcp")
        words = [_filled(word, inside, WORKSPACE) for word in self.words]
        try:
            # Where all who hold a sandbox wait for a second, the pool helps: it knows them by their threads.
            asking = episode.in_env_thread or lane.call
            box = await asking(acquire, spec, self.sandbox, patience=PATIENCE_SECONDS, first=True)
            try:
                return await lane.call(_boxed, box, words, inside)
            except asyncio.CancelledError:
                await asyncio.to_thread(box.kill)
                raise
            finally:
                box.close()
        finally:
            lane.stop()


def _boxed(box: Sandbox, words: Sequence[str], episode: AgentEpisode) -> Left:
    """A command's end in a sandbox. Raises SandboxError if the sandbox was lost by no fault of the command."""
    looked = box.exec(["bash", "-c", 'type -P -- "$0"', words[0]], timeout=box.spec.start_timeout)
    if looked.exit_code is None:
        raise SandboxError(f"the sandbox did not look for the program {words[0]!r} in {box.spec.start_timeout:g} s")
    if not looked.ok:
        raise ValueError(f"there is no program {words[0]!r} in the image {box.spec.image!r}")
    relay = ["python3", "-I", "-S", "-c", source("relay"), SOCKET, str(PORT), *words]
    env = {**_variables(episode), "HOME": "/tmp"}
    try:
        result = box.exec(relay, stdin=episode.opening, timeout=MOST_SECONDS, env=env)
    except (SandboxError, OSError, ValueError) as error:
        if (cause := cause_of(error)) is None:
            raise
        return Left(failure=cause, facts={"raised": words_of(error)})
    return _left(137 if result.exit_code is None else result.exit_code, result.stdout, result.stderr[-LONGEST_TAIL:])


class Function:
    """A function of an `AgentEpisode`, `async def` or `def`; what it returns, a text or an assistant message, is its final answer."""

    def __init__(self, target: str):
        found, _ = find(target)
        if not callable(found):
            raise ValueError(f"agent {target!r} is {found!r:.40}: a function of an episode is needed")
        try:
            inspect.signature(found).bind(None)
        except TypeError as error:
            raise ValueError(f"agent {target!r} must take one argument, the episode: {error}") from error
        self.target, self._play = target, found

    async def run(self, episode: AgentEpisode) -> Left:
        playing = asyncio.create_task(self._played(episode))
        try:
            await asyncio.wait({playing})
            if playing.cancelled():  # by its own code: who cancels the episode ends the wait
                return Left(failure=AGENT_FAILED, facts={"raised": "CancelledError: the agent cancelled itself"})
            return playing.result()
        finally:  # one that swallows its cancellation is left alone
            playing.cancel()
            await asyncio.wait({playing}, timeout=STOP_SECONDS)

    async def _played(self, episode: AgentEpisode) -> Left:
        lane = EnvExecutor(f"agentgym agent {self.target}")
        try:
            if any(map(inspect.iscoroutinefunction, (self._play, type(self._play).__call__))):
                answer = await self._play(episode)
            else:
                answer = await lane.call(self._blocking, BlockingEpisode(episode, asyncio.get_running_loop()))
            return Left(None if answer in (None, "") else assistant(answer))
        except (Exception, SystemExit) as error:
            return Left(failure=AGENT_FAILED, facts={"raised": words_of(error), "traceback": traceback_of(error)})
        finally:
            lane.stop()

    def _blocking(self, episode: BlockingEpisode) -> Any:
        answer = self._play(episode)
        if inspect.iscoroutine(answer):  # in the event loop, which would run it, its `step` would wait for ever
            answer.close()
            raise TypeError(f"agent {self.target!r} is a def that returns a coroutine: make it an async def")
        return answer


def plays_episodes(target: str) -> bool:
    """True for a command, a name, and a function whose first parameter is called "episode"; other functions answer turn by turn."""
    if target.startswith(COMMAND) or target in NAMES:
        return True
    found, _ = find(target)
    try:
        return not inspect.isclass(found) and next(iter(inspect.signature(found).parameters), None) == "episode"
    except (TypeError, ValueError):
        return False


def _words(line: str) -> list[str]:
    try:
        words = shlex.split(line)
    except ValueError as error:
        raise ValueError(f"agent command:{line}: {error}") from error
    if not words:
        raise ValueError(f"agent command:{line}: there is no program")
    return words


def _left(code: int, out: str, err: str) -> Left:
    """A command's end."""
    answer, facts = out.strip(), {"exit_code": code} | ({"stderr": err} if err else {})
    if code:
        return Left(failure=AGENT_FAILED, facts={**facts, "output": answer[-LONGEST_TAIL:]})
    return Left(assistant(answer) if answer else None, facts=facts)


def _filled(word: str, episode: AgentEpisode, folder: str) -> str:
    names = {**{name: getattr(episode, name) for name in ("base_url", "key", "model", "mcp_url")}, "folder": folder}
    names["task"] = episode.opening
    filled = re.sub(r"\{(\w+)\}", lambda found: names.get(found[1], found[0]), word)
    if (size := _size(filled)) > LONGEST_WORD:
        why = f"a word of the command would have {size:,} bytes, more than a program can be started with"
        raise ValueError(f"{why} ({LONGEST_WORD:,}): leave {{task}} out, and read the task from standard input")
    return filled


def _size(text: str) -> int:
    return len(text.encode(errors="replace"))


def _variables(episode: AgentEpisode) -> dict[str, str]:
    """The variables in which agents of all kinds look for their model, the task and the tools."""
    own = {"AGENTGYM_TASK": episode.opening, "AGENTGYM_MODEL": episode.model, "AGENTGYM_MCP_URL": episode.mcp_url}
    if _size(f"AGENTGYM_TASK={episode.opening}") > LONGEST_WORD:
        del own["AGENTGYM_TASK"]
    keys = dict.fromkeys(("OPENAI_API_KEY", "ANTHROPIC_API_KEY"), episode.key)
    urls = dict.fromkeys(("OPENAI_BASE_URL", "OPENAI_API_BASE"), episode.base_url)
    return {**own, **keys, **urls, "ANTHROPIC_BASE_URL": episode.base_url.removesuffix("/v1")}


async def _ended(process: asyncio.subprocess.Process) -> None:
    """Tell a supervised command to end, and wait until it and all that it started have ended."""
    if process.returncode is not None:
        return
    process.terminate()
    try:
        await asyncio.wait_for(process.wait(), STOP_SECONDS + 2 * GONE_SECONDS)
    except TimeoutError:
        process.kill()
        await process.wait()


def _tail(path: Path, most: int) -> str:
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - most))
        return file.read().decode("utf-8", "replace")
