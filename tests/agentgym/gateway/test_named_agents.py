"""Agents of other projects, as they are published: what they do to an environment, and that each of their tokens is recorded."""

import pytest
from agent_cases import Counting, played
from named_agents import installed
from test_gateway_agents import exact
from toy_model import END, Sampler, ToyModel, decode

from agentgym.agents import named
from agentgym.agents.episode import OVER
from agentgym.rollout.episode import Limits


def tool(name, argument, kind):
    parameters = {"type": "object", "properties": {argument: {"type": kind}}, "required": [argument]}
    function = {"name": name, "description": f"{name} something", "parameters": parameters}
    return {"type": "function", "function": function}


class CountingOn(Counting):
    tools = (tool("count", "n", "integer"),)


class Shell(Counting):
    tools = (tool("bash", "command", "string"), tool("submit", "why", "string"))


class Calls(Sampler):
    """Samples a call of the environment's tool, until the episode is over."""

    def __init__(self, prompt, used, room):
        super().__init__(prompt, used, room)
        self.over = OVER in decode(prompt)

    def run(self, tools):
        if self.over:
            yield from super().run([])
            return
        (name,) = (tool["function"]["name"] for tool in tools if tool["function"]["name"].endswith("count"))
        self.call(name)
        self.draw([END])
        yield from ()


class Commands(Sampler):
    """Samples a command in mini-swe-agent's form."""

    def run(self, tools):
        command = self.random.choice(["ls", "pwd", "ls /"])
        self.content = f"I look.\n```mswea_bash_command\n{command}\n```"
        self.spell(self.content)
        self.draw([END])
        yield "text", self.content


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", named.NAMES)
def test_an_unchanged_agent_plays_and_each_of_its_tokens_is_recorded(name, tmp_path):
    shell = name == "mini-swe-agent"
    model = ToyModel(context=400_000, sampler=Commands if shell else Calls)
    env = Shell if shell else CountingOn
    limits = Limits(max_turns=3 if shell else 12)  # at its limit it must not ask again for minutes
    trajectory = played(installed(name), tmp_path, env=env, model=model, limits=limits, incomplete=True)
    exact(trajectory, model)
    assert trajectory.end == ("max_turns" if shell else "terminated")
    told = trajectory.metadata["agent"]
    assert trajectory.agent_failure is None, told
    assert told["share"]["trainable"] == told["share"]["sampled"] > 0, told
    assert told["changed"] == {}, "it asks for no settings that spoil tokens"
    actions = [step["action"].get("tool_calls") for step in trajectory.metadata["steps"]]
    assert {call["function"]["name"] for calls in actions if calls for call in calls} == {
        env.tools[0]["function"]["name"]
    }


def test_an_agent_that_works_by_one_tool_needs_an_environment_with_it():
    named.check_tools("mini-swe-agent", Shell())
    named.check_tools("codex", CountingOn())
    with pytest.raises(ValueError, match="works by a tool 'bash' alone, and CountingOn has count: take an environment"):
        named.check_tools("mini-swe-agent", CountingOn())


def test_an_environment_that_tells_its_tools_in_an_episode_is_not_refused_before():
    env = Counting()
    env.tools_at_reset = True
    named.check_tools("mini-swe-agent", env)


def test_an_agent_that_cannot_be_installed_is_refused_with_the_reason(tmp_path, monkeypatch):
    for name, value in {"XDG_CACHE_HOME": str(tmp_path), "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": ""}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=r"'smolagents' cannot be installed into .*Could not find a version"):
        named.command_of("smolagents")
    assert not list(tmp_path.glob("agentgym/agents/*/installed")), "the next try installs it anew"
