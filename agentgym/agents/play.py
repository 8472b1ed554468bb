"""The rollout of an agent that plays by itself: the loop of every episode with its actions, and the turns of its model calls."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from agentgym.agents.episode import AgentEpisode, EpisodeTools
from agentgym.agents.programs import Agent, Left
from agentgym.core.messages import Message, assistant
from agentgym.core.trajectory import Trajectory, Turn
from agentgym.gateway.episodes import Episode as Recorded
from agentgym.gateway.episodes import Limits as CallLimits
from agentgym.gateway.server import Gateway
from agentgym.policies.base import EndEpisode, EndpointError, EndpointUsage, Reply
from agentgym.rollout.episode import Limits, run_episode
from agentgym.storage.durable import NotWritten

if TYPE_CHECKING:
    from agentgym.core.env import Env
    from agentgym.core.tasks import Task
    from agentgym.policies.base import Caller

EPISODE_SECONDS = 3600.0  # of an episode without a limit of its own
LEAVE_SECONDS = 30.0  # for an agent to end by itself once the environment has ended the episode
_ENDS = {"turns": "max_turns"}
_KILLED = ("time", "error")  # of an agent that was killed in its work


@dataclass(eq=False)
class _Playing:
    """An agent at work, its episode, and the gateway's."""

    recorded: Recorded
    episode: AgentEpisode
    running: asyncio.Task[Left]
    seen: int = 0  # messages of the environment's conversation
    answered: bool = False  # it has given its final answer
    cut_off: bool = False  # it failed at a limit of its episode
    at: list[int | None] = field(default_factory=list)  # the last call that was answered before each action


class AgentPolicy:
    """Lets an agent play one episode: `act` returns what it does to the environment. Play it by `play_agent`.

    An agent that fails has failed the episode; where its last call failed for the engine's sake, the episode is an error.

    Args:
        gateway: in front of the model; it runs in this event loop.
        incomplete: count an episode as complete also where a limit has cut the agent off.
        id: of the gateway's episode, new each time.
    """

    def __init__(
        self, agent: Agent, gateway: Gateway, seed: int | None = None, incomplete: bool = False, id: str | None = None
    ):
        self._agent, self._gateway, self._seed, self._incomplete, self._id = agent, gateway, seed, incomplete, id
        self.limits = CallLimits()
        self._call: Caller | None = None
        self._playing: _Playing | None = None

    def attach(self, env: Env, call: Caller) -> None:
        """Take the way to call a function where the environment runs."""
        self._call = call

    @property
    def calls(self) -> EndpointUsage:
        """Calls of the model so far."""
        found = EndpointUsage()
        for call in self._playing.recorded.tree.calls.values() if self._playing else ():
            found.requests += 1
            for name, count in call.answer.usage.items():
                found.usage[name] = found.usage.get(name, 0) + count
        return found

    async def act(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]]) -> Reply:
        """The agent's next action, at last its final answer. Raises EndEpisode where it has none any more, EndpointError."""
        if self._playing is None:
            self._playing = await self._begun(messages, tools)
        else:
            self._playing.episode.tell(messages[self._playing.seen + 1 :])  # behind the action itself
        playing = self._playing
        playing.seen = len(messages)
        acting = asyncio.ensure_future(playing.episode.acted())
        try:
            await asyncio.wait({acting, playing.running}, return_when=asyncio.FIRST_COMPLETED)
            reply = Reply(acting.result()) if acting.done() else _last(playing, playing.running.result())
        finally:
            acting.cancel()
        playing.at.append(next(reversed(playing.recorded.tree.calls), None))
        return reply

    async def _begun(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]]) -> _Playing:
        gateway = self._gateway
        recorded, key = await gateway.open(self._id, self.limits, seed=self._seed)
        where = f"{gateway.url}/v1", key, gateway.backend.models[0], f"{gateway.url}/mcp"
        episode = AgentEpisode(list(messages), list(tools), *where, socket=gateway.socket, seed=self._seed)
        episode.in_env_thread = self._call
        recorded.tools = EpisodeTools(episode)
        return _Playing(recorded, episode, asyncio.create_task(self._agent.run(episode)))

    async def stop(self, observation: Sequence[Message] = (), patience: float = 0.0) -> None:
        """Answer the agent's last action, and let the agent end; stop it after so many seconds."""
        if (playing := self._playing) is not None:
            playing.episode.tell(observation, over=True)
            await asyncio.wait({playing.running}, timeout=patience)
            playing.running.cancel()
            await asyncio.wait({playing.running})

    async def finish(self, trajectory: Trajectory) -> None:
        """Put the agent's calls in place of its actions, which go to `metadata["steps"]`: a turn for each call, and the rewards there.

        Without any call its actions stay the turns.
        """
        if (playing := self._playing) is None:
            return
        running, recorded, end = playing.running, playing.recorded, trajectory.end
        killed = end in _KILLED
        complete = self._incomplete or not (playing.cut_off or killed)
        await self._gateway.end(recorded.id, end, complete, killed)
        self._gateway.forget(recorded.id)
        facts = {"killed": True} if running.cancelled() or running.exception() else running.result().facts
        trajectory.metadata["agent"] = {"share": recorded.share(), "changed": dict(recorded.changed), **facts}
        if not (turns := _turns_of(recorded)):
            return
        position = {number: place for place, number in enumerate(sorted(recorded.tree.calls))}
        places = [0 if at is None else position[at] for at in playing.at]
        trajectory.metadata["steps"] = [
            {"turn": place, "observation": step.observation, "action": step.reply, "reward": step.reward}
            for place, step in zip(places, trajectory.turns, strict=False)
        ]
        trajectory.turns = rewarded(turns, places, trajectory.turns)


def rewarded(turns: list[Turn], places: Sequence[int], steps: Sequence[Turn]) -> list[Turn]:
    """Turns with the environment's answers to the steps at these places; the last turn gets the last step's info too."""
    for place, step in zip(places, steps, strict=False):
        turn = turns[place]
        turn.reward, turn.info = turn.reward + step.reward, {**turn.info, **step.info}
        turn.step_seconds += step.step_seconds
    if turns and steps:
        turns[-1].info = {**turns[-1].info, **steps[-1].info}
    return turns


def actions_of(trajectory: Trajectory) -> list[Message]:
    """The actions that the environment got."""
    steps = trajectory.metadata.get("steps")
    return [step["action"] for step in steps] if steps is not None else [turn.reply for turn in trajectory.turns]


def _last(playing: _Playing, left: Left) -> Reply:
    """The episode's last reply after the agent has ended, or the error that ended it."""
    limit, refused = playing.recorded.limit, playing.recorded.refused
    if refused is not None and refused.status >= 500:
        raise EndpointError(f"the agent's last call failed: {refused}", refused.engine_status)
    if limit is None and refused is not None and refused.code == "context_length_exceeded" and left.failure is not None:
        limit = "context"
    if left.failure is not None and limit is None:
        return Reply(assistant(""), failure=left.failure)
    if left.failure is None and not playing.answered and (left.answer is not None or not playing.at):
        playing.answered = True
        return Reply(left.answer or assistant(""))
    playing.cut_off = left.failure is not None and limit != "context"  # which is the agent's own doing
    raise EndEpisode("agent" if limit is None else _ENDS.get(limit, limit))


def _turns_of(recorded: Recorded) -> list[Turn]:
    """A turn for each call, in the order in which they came."""
    turns, undelivered = [], recorded.undelivered()
    for _, call in sorted(recorded.tree.calls.items()):
        told: dict[str, Any] = {
            "tokens": call.tokens(),
            "usage": call.answer.usage,
            "finish_reason": call.answer.finish_reason,
        }
        unusable = call.unusable(undelivered, recorded.incomplete)
        turns.append(Turn(call.asked.messages, call.answer.message, **told, unusable=unusable))
    return turns


async def play_agent(
    env: Env,
    policy: AgentPolicy,
    task: Task | None = None,
    *,
    limits: Limits = Limits(),  # noqa: B008 - frozen
    **more: Any,
) -> Trajectory:
    """`run_episode` for an `AgentPolicy`: the limits of turns and tokens are those of its model calls.

    `limits.act_timeout` does not apply; without `limits.episode_timeout` an episode has an hour.
    """
    policy.limits = CallLimits(turns=limits.max_turns, tokens=limits.tokens)
    seconds = EPISODE_SECONDS if limits.episode_timeout is None else limits.episode_timeout
    own = replace(limits, max_turns=None, tokens=None, act_timeout=None, episode_timeout=seconds)
    try:
        trajectory = await run_episode(env, policy, task, limits=own, **more)
        await policy.stop(trajectory.final_observation, 0.0 if trajectory.end in _KILLED else LEAVE_SECONDS)
    finally:
        await policy.stop()
    try:
        await policy.finish(trajectory)
    except NotWritten as error:
        trajectory.end, trajectory.error = "error", f"{trajectory.env}, task {trajectory.task_id!r}: {error}"
    return trajectory
