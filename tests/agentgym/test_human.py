"""A person as a policy, and what is shown of an episode. Lines that a test types stand for the person."""

import asyncio
import io
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

import agentgym
from agentgym.cli.terminal_text import RewardedSteps, Screen, ShownPolicy, plain
from agentgym.core.messages import user
from agentgym.policies.base import EndEpisode, ExpertPolicy, HumanPolicy, ScriptedPolicy
from agentgym.rollout.episode import run_episode


def schema(name, properties, required=()):
    parameters = {"type": "object", "properties": properties, "required": list(required)}
    return {"type": "function", "function": {"name": name, "description": f"Does\n{name}.", "parameters": parameters}}


TEXT = {"type": "string"}
TOOLS = [
    schema("look", {}),
    schema("python", {"code": TEXT}, ["code"]),
    schema("add", {"a": {"type": "integer"}, "b": {"type": "integer"}}, ["a"]),
]


def typed(*lines, tools=TOOLS):
    """The message of a person who types these lines, and what they were told."""
    left, told = list(lines), []

    def read(prompt):
        if not left:
            raise EOFError
        line = left.pop(0)
        if isinstance(line, type):
            raise line
        return line

    reply = asyncio.run(HumanPolicy(read, told.append).act([user("?")], tools))
    assert not left, "it asked for fewer lines than there are"
    return reply.message, "\n".join(told)


@pytest.mark.parametrize(
    ("lines", "answer"),
    [
        (["hello"], "hello"),
        ([""], ""),
        (["//quit"], "/quit"),
        (["/long", "a", "", "/b", "."], "a\n\n/b"),
        (["/help", "hello"], "hello"),
    ],
)
def test_a_line_is_an_answer(lines, answer):
    assert typed(*lines)[0] == {"role": "assistant", "content": answer}


@pytest.mark.parametrize(
    ("lines", "name", "arguments"),
    [
        (["/call look"], "look", {}),
        (['/call add {"a": 1, "b": 2}'], "add", {"a": 1, "b": 2}),
        (["/call python print(2)"], "python", {"code": "print(2)"}),
        (["/call python 7"], "python", {"code": "7"}),
        (["/call python", "x = 1", "print(x)", "."], "python", {"code": "x = 1\nprint(x)"}),
        (['/call python {"code": "1"}'], "python", {"code": "1"}),
    ],
)
def test_tools_are_called_by_name(lines, name, arguments):
    [call] = typed(*lines)[0]["tool_calls"]
    assert (call["function"]["name"], json.loads(call["function"]["arguments"])) == (name, arguments)
    assert call["id"]


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("/call lok", "there is no tool 'lok': did you mean look? There are look, python, add"),
        ("/call add 3", "add: its arguments are a JSON object, not 3"),
        ('/call add {"a": 1', "add: its arguments are no JSON"),
        ("/call add", "add: its arguments are no JSON"),
        ("/hepl", r"there is no command /hepl: did you mean /help? (//hepl answers /hepl)"),
        ("/call", '/call NAME {"argument": 1}'),
        ("/tools", '/call add {"a": integer, "b": integer?}    Does add.'),
    ],
)
def test_mistakes_and_questions_are_told_and_cost_no_turn(line, told):
    message, said = typed(line, "go on")
    assert message["content"] == "go on"
    assert told in said


@pytest.mark.parametrize(("lines", "reason"), [(["/quit"], "quit"), ([], "quit"), ([KeyboardInterrupt], "interrupted")])
def test_leaving_ends_the_episode(lines, reason):
    with pytest.raises(EndEpisode, match=reason):
        typed(*lines)


# ---- what is shown


def shown(policy, env, **settings):
    console = Console(file=io.StringIO(), width=100, force_terminal=False)
    screen, steps = Screen(console), RewardedSteps(env)
    watching = ShownPolicy(policy, screen, steps.rewards, **settings)
    trajectory = asyncio.run(run_episode(steps, watching, seed=3))
    screen.end(trajectory, watching.seen)
    return console.file.getvalue(), trajectory


def test_an_episode_is_shown_once_from_the_first_message_to_the_end():
    text, trajectory = shown(ExpertPolicy(), agentgym.make("frozen_lake"))
    assert trajectory.success
    roles = [line.split()[0] for line in text.splitlines() if " ───" in line]
    assert roles == [message["role"] for message in trajectory.messages()]
    for message in trajectory.messages():
        assert message["content"].splitlines()[0] in text
    assert text.rstrip().endswith(f"terminated after {len(trajectory.turns)} turns: reward 1, success")


def test_what_was_not_seen_is_shown_at_the_end_and_nothing_twice():
    text, _ = shown(ScriptedPolicy(["jump"]), agentgym.make("frozen_lake"), replies=False)
    assert text.count("invalid") == 1
    assert "assistant" not in text
    text, _ = shown(ScriptedPolicy(lambda messages: "jump"), agentgym.make("frozen_lake", max_turns=2))
    assert text.count("invalid") == 2


def test_a_failure_is_named_and_has_no_reward():
    def broken(messages):
        raise ValueError("[bold]no[/bold] idea")

    text, _ = shown(ScriptedPolicy(broken), agentgym.make("frozen_lake"))
    assert "[bold]no[/bold] idea" in text.replace("\n", " ")
    assert "reward" not in text


HOSTILE = "[red]not markup[/red] [/] :smile: \x1b[2J\x1b]0;title\x07 \x9b31m \u202egnp.exe"


def test_nothing_that_is_written_commands_the_terminal():
    console = Console(file=io.StringIO(), width=200, force_terminal=True, color_system=None)
    call = {"function": {"name": HOSTILE, "arguments": HOSTILE}}
    Screen(console).message({"role": "tool", "name": HOSTILE, "content": HOSTILE})
    Screen(console).message(
        {
            "role": "assistant",
            "content": [{"type": "text", "text": HOSTILE}],
            "reasoning": HOSTILE,
            "tool_calls": [call],
        }
    )
    text = console.file.getvalue()
    assert "[red]not markup[/red] [/] :smile:" in text
    assert not set(text) & set("\x1b\x07\x9b\u202e")


@given(st.text())
def test_plain_text_has_no_control_characters_and_can_be_encoded(text):
    made = plain(text)
    made.encode()
    assert all(c in "\n\t" or c.isprintable() or c.isspace() or ord(c) > 0x9F for c in made)
    assert plain(made) == made
