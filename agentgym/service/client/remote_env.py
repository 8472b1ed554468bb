"""`RemoteEnv`: an environment that another machine serves, used like a local one; `agentgym.make(URL)` makes it."""

import random
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import gymnasium

from agentgym.core.agent_failure import SESSION_LOST, STEP_TIMEOUT, AgentFailure
from agentgym.core.env import AsyncEnv, Step
from agentgym.core.messages import Action, Observation, assistant
from agentgym.core.tasks import Task, TaskSet
from agentgym.service.client import lookup
from agentgym.service.client.address import Address, RemoteError, SessionLost, parse
from agentgym.service.client.balance import PATIENCE_SECONDS, Server, look_around, open_session, pool_of
from agentgym.service.client.connection import difference
from agentgym.service.client.session_client import RemoteSession, Request
from agentgym.service.protocol import frames

# Codes of sessions that ended in a step and that the agent's programs can have ended.
_AGENTS = {frames.DEADLINE: STEP_TIMEOUT, frames.OUT_OF_MEMORY: SESSION_LOST, frames.WORKER_DIED: SESSION_LOST}
# How often the beginning of an episode moves to another session before it counts as failed.
MOVES = 8


class RemoteEnv(AsyncEnv):
    """A served environment, with the observations, rewards, infos, tools and tasks of the one on the server.

    One session serves many episodes; at the beginning of one it may move to a server with more room. A lost session
    raises `SessionLost` and costs its episode; the next `init` or `reset` opens another. If the environment runs the
    agent's programs, a step that took too long, ran out of memory or killed its process is an `AgentFailure` instead.
    """

    def __init__(
        self,
        address: Address,
        patience: float = PATIENCE_SECONDS,
        expects: Mapping[str, Any] | None = None,
        tasks: TaskSet | None = None,
        render_mode: str | None = None,
    ):
        super().__init__(tasks, render_mode=render_mode)
        if not patience > 0:
            raise ValueError(f"patience must be positive, not {patience!r}")
        self.address = address
        self.patience = patience
        self._session: RemoteSession | None = None
        self._server: Server | None = None
        self._abandon: weakref.finalize[Any, RemoteEnv] | None = None
        self.watch: Callable[[str, int], None] = lambda url, more: None  # told of each call's begin (1) and end (-1)
        self._methods: tuple[str, ...] = ()
        self._runs_programs = False  # of the agent's
        record = lookup.record_of(self.address)
        if wrong := difference(expects or {}, record.get("kwargs")):
            raise ValueError(f"{self.address}: {wrong}")
        self.expects: dict[str, Any] = {**(record.get("kwargs") or {}), **(expects or {})}
        self._learn(record)

    def __getattr__(self, name: str) -> Any:
        # These exist only where the served environment has them: policies and checks look.
        if name in frames.METHODS and name in vars(self).get("_methods", ()):
            return self._expert_action if name == "expert_action" else self._random_action
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    @property
    def session(self) -> RemoteSession | None:
        """The current session; None before the first episode and after a lost one."""
        return self._session if self._session is not None and not self._session.lost else None

    @property
    def tasks(self) -> TaskSet:
        if self._tasks is None:
            self._tasks = lookup.tasks_at(self.address, "train")
        return self._tasks

    async def init(self, task: Task) -> None:  # type: ignore[override]
        """Bind a task on the server; opens a session if there is none."""
        await self._begin([("init", {"task": task.to_json()})])
        self.task, self._drawn, self.running = task, False, False

    async def reset(  # type: ignore[override]  # Gymnasium knows no async methods
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        """Start an episode of the bound task; if there is none, the server draws one."""
        gymnasium.Env.reset(self, seed=seed)
        task: Task | None = (options or {}).get("task")
        given = None if options is None else {**options, **({"task": task.to_json()} if task else {})}
        bound = self.task is not None and not self._drawn and task is None
        self.running = False
        # A generator that no seed starts anew is on the server: only then must the session stay.
        may_move, rebind = seed is not None and not bound, self.task if bound else None
        *_, result = await self._begin([("reset", {"seed": seed, "options": given})], may_move, rebind)
        observation, info = self._read(result, lambda: _checked(result["observation"], result["info"]))
        if task is not None:
            self.task, self._drawn = task, False
        elif not bound:
            drawn = result.get("task")
            self.task = self._read(result, lambda: Task.from_json(drawn)) if drawn else self.task
            self._drawn = True
        self.turn = 0
        self.running = True
        self._earned, self._earned_by = 0.0, {}
        return observation, info

    async def step(self, action: Action) -> Step:  # type: ignore[override]
        """One step on the server; never run twice, even if the connection drops."""
        said = action if isinstance(action, str) else assistant(action)
        result = await self._stepped("step", {"action": said})
        step: Step = self._read(result, lambda: _step_of(result))
        self.turn += 1
        self.running = self.running and not (step[2] or step[3])
        return step

    async def cut_off(self, reason: str) -> Step | None:  # type: ignore[override]
        if "cut_off" not in self._methods or not self.running:
            return None
        result = await self._stepped("cut_off", {"reason": reason})
        step: Step | None = None if result is None else self._read(result, lambda: _step_of(result))
        self.running = step is None
        return step

    async def _stepped(self, call: str, fields: dict[str, Any]) -> Any:
        try:
            [result] = await self._calls([(call, fields)])
        except SessionLost as lost:
            cause = _AGENTS.get(lost.code)
            if cause is None or not self._runs_programs:
                raise
            raise AgentFailure(cause, str(lost)) from lost
        return result

    async def close(self) -> None:  # type: ignore[override]
        session = self.session
        try:
            if session is not None:
                await session.close()
        finally:
            self._leave()

    def hung_by_agent(self) -> bool:
        if self._server is None or not self._runs_programs:
            return False
        its_server = replace(self.address, servers=(self._server.service or self._server.url,))
        try:
            return bool(lookup.ask(its_server, "/health"))
        except (RemoteError, ValueError):
            return False

    async def _expert_action(self) -> Action:
        [result] = await self._calls([("expert_action", {})])
        return self._read(result, lambda: result["action"])

    async def _random_action(self, rng: random.Random) -> Action:
        [result] = await self._calls([("random_action", {"rng": frames.rng_to_json(rng)})])
        moved = self._read(result, lambda: frames.rng_of_json(result["rng"]))
        rng.setstate(moved.getstate())
        return self._read(result, lambda: result["action"])

    async def _calls(self, requests: list[Request]) -> list[Any]:
        session = self.session
        if session is None and self._session is not None:  # it was lost since the last call
            why = self._session.lost
            self._leave()
            raise SessionLost(f"{why}; call reset() before anything else")
        if session is None:
            raise RuntimeError(f"{self.address}: no session is open; call reset() before anything else")
        self.watch(session.server, 1)
        try:
            return await session.calls(requests)
        except SessionLost:
            self._leave()
            raise
        finally:
            self.watch(session.server, -1)

    async def _begin(self, requests: list[Request], may_move: bool = True, rebind: Task | None = None) -> list[Any]:
        """The results of calls that begin an episode, on a new session if the present one is gone or better left."""
        pool = pool_of(self.address.servers)
        if self._server is not None and may_move:
            look_around(self.address)
            if pool.better_than(self._server):
                self._leave()
        for move in range(MOVES + 1):
            fresh = self.session is None
            if fresh:
                self._leave()
                self._session, self._server = await open_session(self.address, self.patience, self.expects)
                # Also if the environment is never closed.
                self._abandon = weakref.finalize(self, self._session.abandon, "it was left")
                self._abandon.atexit = False
                self._learn(self._session.hello.env)
            first = [("init", {"task": rebind.to_json()})] if fresh and rebind is not None else []
            try:
                results = await self._calls([*first, *requests])
                break
            except SessionLost as lost:
                # A session that had ended between two episodes, or whose server is leaving, costs no episode.
                away = lost.code == frames.DRAINING or (not fresh and lost.code in ("", frames.IDLE))
                if not away or move == MOVES:
                    raise
        for result in results:
            if not isinstance(result, dict):
                raise self._nonsense(result)
            self._learn(result)
        return results

    def _learn(self, record: Mapping[str, Any]) -> None:
        if isinstance(record.get("tools"), list):
            self.tools = record["tools"]  # type: ignore[misc]  # a class variable where they are always the same
        if type(record.get("max_turns")) is int:
            self.max_turns = record["max_turns"]
        if isinstance(record.get("floor"), int | float):
            self.floor = float(record["floor"])
        if isinstance(record.get("step_seconds"), int | float):
            self.step_seconds = float(record["step_seconds"])
        if type(record.get("runs_programs")) is bool:
            self._runs_programs = record["runs_programs"]
        if isinstance(record.get("methods"), list):
            self._methods = tuple(name for name in frames.METHODS if name in record["methods"])

    def _read(self, result: Any, reader: Callable[[], Any]) -> Any:
        try:
            return reader()
        except (KeyError, TypeError, ValueError, AttributeError, frames.Refused):
            raise self._nonsense(result) from None

    def _nonsense(self, result: Any) -> RemoteError:
        where = f"{self.address.env} at {self._server.url}" if self._server is not None else str(self.address)
        self._leave()
        return SessionLost(f"{where}: the session is lost: the server answered with an invalid result: {result!r:.200}")

    def _leave(self) -> None:
        self.running = False
        self._session = self._server = None
        if self._abandon is not None:
            self._abandon()


def remote_env(
    url: str | Sequence[str],
    token_file: str | None = None,
    ca_file: str | None = None,
    patience: float = PATIENCE_SECONDS,
    expects: Mapping[str, Any] | None = None,
    tasks: TaskSet | None = None,
    render_mode: str | None = None,
    **made_with: Any,
) -> RemoteEnv:
    """A `RemoteEnv`.

    Args:
        url: `http://HOST:PORT/ENV`, several joined by commas, or a list; all must make the same environment.
        token_file: holds the bearer token in its first line. None: the variable AGENTGYM_TOKEN, if it is set.
        ca_file: certificates to trust beside the system's, for https.
        patience: seconds to wait for a session while all servers are full or away.
        expects: arguments that the servers must have made the environment with.
        made_with: more of them, given as to a local environment.

    Raises:
        ValueError: a bad URL, or the servers do not serve this environment as expected.
        Unavailable: no server answers, or they refuse the token.
    """
    address = parse(url, token_file, ca_file)
    return RemoteEnv(address, patience, {**(expects or {}), **made_with}, tasks, render_mode)


def _checked(observation: Any, info: Any) -> tuple[Observation, dict[str, Any]]:
    if not isinstance(observation, list) or not isinstance(info, dict):
        raise TypeError
    return observation, info


def _step_of(result: Any) -> Step:
    observation, reward, terminated, truncated, info = result
    if isinstance(reward, str | list | dict):
        raise TypeError
    observation, info = _checked(observation, info)
    return observation, reward, bool(terminated), bool(truncated), info


def remote_tasks(
    split: str = "train", url: str | Sequence[str] = "", token_file: str | None = None, ca_file: str | None = None
) -> TaskSet:
    """The tasks of a split of a served environment, read in pages. Raises ValueError or `Unavailable`."""
    return lookup.tasks_at(parse(url, token_file, ca_file), split)
