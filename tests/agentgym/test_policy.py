"""Policies that need no endpoint."""

import asyncio
import random

import pytest

import agentgym
from agentgym.core.messages import user
from agentgym.policies.base import EndEpisode, ExpertPolicy, NullPolicy, Policy, RandomPolicy, ScriptedPolicy
from agentgym.policies.chat import ChatPolicy

HELLO = [user("hello")]


def test_scripts_are_lists_or_functions():
    async def go():
        listed = ScriptedPolicy(["a", {"role": "assistant", "content": "b"}])
        said = [(await listed.act(HELLO, [])).message["content"] for _ in range(2)]
        with pytest.raises(EndEpisode, match="script"):
            await listed.act(HELLO, [])
        shouted = await ScriptedPolicy(lambda messages: messages[-1]["content"].upper()).act(HELLO, [])
        return said, shouted.message["content"]

    assert asyncio.run(go()) == (["a", "b"], "HELLO")


class Choosing:
    """Not an environment: only the two methods that these policies call."""

    unwrapped = property(lambda self: self)

    def expert_action(self):
        return "best"

    def random_action(self, rng):
        return f"random {rng.randrange(10)}"


def test_an_expert_makes_the_share_of_mistakes_that_was_asked_for():
    async def call(function, *args):
        return function(*args)

    async def play(mistakes):
        policy = ExpertPolicy(mistakes, random.Random(3))
        policy.attach(Choosing(), call)
        return [(await policy.act(HELLO, [])).message["content"] for _ in range(400)]

    assert set(asyncio.run(play(0.0))) == {"best"}
    assert "best" not in asyncio.run(play(1.0))
    some = asyncio.run(play(0.25))
    assert 60 < sum(a != "best" for a in some) < 140
    assert some == asyncio.run(play(0.25))


def test_policies_say_what_is_missing():
    class Plain:
        unwrapped = property(lambda self: self)

    with pytest.raises(TypeError, match=r"Plain has no expert_action\(\)"):
        ExpertPolicy().attach(Plain(), print)
    with pytest.raises(TypeError, match=r"Plain has no random_action\(\)"):
        RandomPolicy().attach(Plain(), print)
    with pytest.raises(ValueError, match="chance from 0 to 1"):
        ExpertPolicy(mistakes=2)
    with pytest.raises(RuntimeError, match="plays in no environment yet"):
        asyncio.run(ExpertPolicy().act(HELLO, []))


def test_null_says_nothing_whatever_it_is_shown():
    assert asyncio.run(NullPolicy().act(HELLO, [])).message == {"role": "assistant", "content": ""}


@pytest.mark.parametrize(
    "policy", [ScriptedPolicy([]), ExpertPolicy(), RandomPolicy(), NullPolicy(), ChatPolicy("m", "http://x")]
)
def test_all_are_policies(policy):
    assert isinstance(policy, Policy)


def test_an_unknown_public_name_is_an_attribute_error():
    assert agentgym.ChatPolicy is ChatPolicy
    with pytest.raises(AttributeError, match="no attribute 'ChatPolcy'"):
        agentgym.ChatPolcy  # noqa: B018
