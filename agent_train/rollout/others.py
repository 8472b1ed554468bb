"""Players of an episode that do not learn: each is played by an agent as evaluation knows them."""

from collections.abc import Mapping, Sequence
from typing import Any

from agentgym.core.env import Env
from agentgym.core.messages import Message
from agentgym.evaluate.agents import BUILT_IN, MakePolicy, built_in, chat, policy_maker, python
from agentgym.policies.base import Policy, Reply


def maker_of(agent: str) -> MakePolicy:
    """The maker of the policies of an agent: expert, random or null, a model as NAME@URL, or `package.module:name`. Raises ValueError."""
    if agent in BUILT_IN:
        return policy_maker(built_in(agent))
    model, at, url = agent.rpartition("@")
    return policy_maker(chat(model, url) if at else python(agent))


class Beside:
    """A policy that learns, for all players but those of `others`."""

    def __init__(self, learning: Any, others: Mapping[str, Policy]):
        self._learning, self._others = learning, others

    def attach(self, env: Env, call: Any) -> None:
        for each in self._others.values():
            if hasattr(each, "attach"):
                each.attach(env, call)

    def for_player(self, name: str) -> Policy:
        found: Policy = self._others.get(name) or self._learning.for_player(name)
        return found

    async def act(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]]) -> Reply:
        reply: Reply = await self._learning.act(messages, tools)
        return reply
