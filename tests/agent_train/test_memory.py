"""An episode that fills the context goes on with a summary: exact tokens, in rows of their own, trained like all others."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace

import journal_cases
import pytest
from journal_cases import count_calls, exactly, lines_of
from sample_tokenizers import LAKE, tiny

from agent_train.algorithms.advantage_inputs import AdvantageInputs
from agent_train.algorithms.selection import turn_rewards
from agent_train.algorithms.step_advantages import with_advantages
from agent_train.config.schema import AdvantageConfig, AlgorithmConfig, MemoryConfig
from agent_train.data.packing import weighted
from agent_train.data.samples import samples_of
from agent_train.engine.base import Completion, Engine, Sampling
from agent_train.learner.tiny import train_tokenizer
from agent_train.report.metrics import eval_metrics
from agent_train.report.timeline import Timeline
from agent_train.rollout.memory import HEADING, HELD, REQUEST, SummaryMemory
from agent_train.rollout.renderer import Renderer, RendererError
from agent_train.rollout.sampler import Sampler, TokenPolicy
from agentgym import Env
from agentgym.core.messages import assistant, system, tool_result, user
from agentgym.core.tasks import Task
from agentgym.core.trajectory import Group, Summary, Tokens, Trajectory, Turn
from agentgym.rollout.episode import Limits, run_episode
from agentgym_envs.games.frozen_lake import FrozenLake

ON = MemoryConfig("summary", tokens=40)
ANSWERS = Sampling(max_tokens=60)


class Work(Env):
    """Says a line after each of `turns` answers, and rewards the last; keeps what it was told."""

    tasks = [Task("work", [system("Be brief."), user("Count.")])]  # noqa: RUF012 - as environments do

    def __init__(self, turns: int, line: str = "go on " * 12, tool: bool = False):
        super().__init__()
        self.turns, self.line, self.tool = turns, line, tool

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed, options=options)
        self.told = []
        return list(self.current_task.messages), {}

    def step(self, action):
        self.told.append(action)
        calls = action.get("tool_calls") or [] if isinstance(action, dict) else []
        said = [tool_result(call["id"], f"{self.line}{len(self.told)}") for call in calls]
        over = len(self.told) == self.turns
        return self.outcome(said or [user(f"{self.line}{len(self.told)}")], float(over), terminated=over)


class Scripted(Engine):
    """Not a model: answers each prompt by a function of its text, and keeps all that it was asked and said."""

    def __init__(self, renderer: Renderer, longest: int, summary="I have counted.", answer="so many", stop=True):
        self.renderer, self.max_model_len, self.stop = renderer, longest, stop
        self.summary, self.answer = summary, answer
        self.calls: list[tuple[list[int], list[int]]] = []

    async def generate(self, prompt_ids, sampling, episode=None):
        self.check_request(prompt_ids, sampling)
        asked = self.renderer.tokenizer.decode(prompt_ids[-1000:])[-len(REQUEST) - 100 :]
        text = self.summary if REQUEST in asked else self.answer
        ids = [*self.renderer.encode(text), self.renderer.end_of_turn]
        reason = "stop"
        if REQUEST in asked and not self.stop:
            ids, reason = ids[:-1], "length"
        self.calls.append((list(prompt_ids), ids))
        count = len(self.calls)
        return Completion(ids, [-0.01 * count] * len(ids), [count] * len(ids), reason)


@pytest.fixture(scope="module")
def renderer():
    return Renderer(tiny())


def played(env, engine, memory=ON, limits=None):
    policy = TokenPolicy(engine, engine.renderer, ANSWERS, seed=3, memory=memory)
    return asyncio.run(run_episode(env, policy, Work.tasks[0], limits=limits or Limits()))


def longest(renderer, room=200):
    """A context in which an episode of `Work` is summarised every few turns."""
    return len(renderer.encode(HELD + REQUEST)) + 64 + ON.tokens + ANSWERS.max_tokens + room


def calls_of(trajectory):
    return [(call.tokens.prompt_ids, call.tokens.completion_ids) for call in trajectory.calls()]


# ---- rows, by hand


def tokens(prompt, said, version=0):
    return Tokens(prompt, said, [-0.5] * len(said), [version] * len(said))


def summarised(task="t", sample=0, reward=1.0):
    """Two turns with a summary between them."""
    turns = [
        Turn([user("?")], assistant("a"), 0.0, tokens=tokens([1, 2], [3, 4], 0)),
        Turn([user("!")], assistant("b"), reward, tokens=tokens([1, 7], [8], 2)),
    ]
    summary = Summary(1, [user(REQUEST)], assistant("s"), tokens([1, 2, 3, 4, 9], [5, 6], 1))
    return Trajectory(f"{task}/{sample}", "e", task, sample, turns=turns, summaries=[summary])


def plain(task="t", sample=1, reward=0.0):
    turn = Turn([user("?")], assistant("a"), reward, tokens=tokens([1, 2], [3]))
    return Trajectory(f"{task}/{sample}", "e", task, sample, turns=[turn])


def test_a_summary_ends_its_row_and_its_tokens_are_in_the_mask():
    first, second = samples_of(summarised(), rewards=[0.0, 0.0, 1.0])
    assert first.ids == [1, 2, 3, 4, 9, 5, 6]
    assert first.mask == [False, False, True, True, False, True, True]
    assert first.logprobs == [0.0, 0.0, -0.5, -0.5, 0.0, -0.5, -0.5]
    assert first.versions == [-1, -1, 0, 0, -1, 1, 1]
    assert (first.turn_ends, first.rewards) == ([4, 7], [0.0, 0.0])
    assert (second.ids, second.mask, second.versions) == ([1, 7, 8], [False, False, True], [-1, -1, 2])
    assert (second.turn_ends, second.rewards) == ([3], [1.0])
    assert first.trajectory == second.trajectory == "t/0"
    assert summarised().sampled_tokens == 5


ADVANTAGES = {
    # The episodes count once each: (1 - 0.5) / sqrt(0.5).
    "group": ([0.5**0.5] * 3, [-(0.5**0.5)]),
    # The rewards 0, 0, 1 and 0 less 0.25, over their deviation 0.5, summed from each turn on.
    "turn": ([0.5, 1.0, 1.5], [-0.5]),
    # Of the episode 0.5; of the first turn's state, met twice, 0.95^2 less the mean with 0. A summary's state is like no other.
    "gigpo": ([0.5 + 0.45125, 0.5, 0.5], [-0.5 - 0.45125]),
}


@pytest.mark.parametrize("name", ADVANTAGES)
def test_a_summary_shares_its_episodes_advantage_and_the_baseline_counts_the_episode_once(name):
    algorithm = AlgorithmConfig(advantage=AdvantageConfig(name, std_level="none" if name == "gigpo" else "group"))
    group = Group("t", [summarised(), plain()])
    samples = [s for t in group.trajectories for s in samples_of(t, rewards=turn_rewards(t, algorithm))]
    found = with_advantages(AdvantageInputs(algorithm, [group], samples), samples)
    (one, two, three), (other,) = ADVANTAGES[name]
    assert found[0].advantages == pytest.approx([0, 0, one, one, 0, two, two], abs=1e-5)
    assert found[1].advantages == pytest.approx([0, 0, three], abs=1e-5)
    assert found[2].advantages == pytest.approx([0, 0, other], abs=1e-5)
    assert [s.weight for s in weighted(found, "token-mean", None)] == pytest.approx([1 / 6] * 3)


def test_the_penalty_for_length_counts_summaries_and_lies_on_the_last_turn():
    algorithm = AlgorithmConfig()
    algorithm.overlong.length, algorithm.overlong.buffer = 6, 2
    assert turn_rewards(summarised(), algorithm) == [0.0, 0.0, 0.5]


def test_a_trajectory_with_summaries_is_stored_by_what_is_new_and_read_again():
    record = json.loads(json.dumps(summarised().to_json()))
    assert record["turns"][0]["tokens"]["new_prompt_ids"] == [1, 2]
    assert (record["summaries"][0]["tokens"]["shared"], record["summaries"][0]["tokens"]["new_prompt_ids"]) == (4, [9])
    assert (record["turns"][1]["tokens"]["shared"], record["turns"][1]["tokens"]["new_prompt_ids"]) == (0, [1, 7])
    assert Trajectory.from_json(record) == summarised()
    assert "summaries" not in plain().to_json()


def test_metrics_tell_how_many_episodes_filled_the_context():
    full = replace(plain(), end="context")
    assert eval_metrics(1, [full, plain(), plain(), replace(full, end="error")]).context == pytest.approx(1 / 3)


# ---- an episode


def test_the_episode_goes_on_with_the_opening_the_summary_and_the_last_exchange(renderer):
    engine = Scripted(renderer, longest(renderer))
    env = Work(12)
    trajectory = played(env, engine)
    assert (trajectory.end, trajectory.reward, len(trajectory.turns), len(env.told)) == ("terminated", 1.0, 12, 12)
    assert len(trajectory.summaries) >= 2
    assert calls_of(trajectory) == engine.calls
    for number, summary in enumerate(trajectory.summaries):
        turn = trajectory.turns[summary.turn]
        shown = renderer.tokenizer.decode(turn.tokens.prompt_ids)
        head = f"{HEADING}\n\nI have counted."
        last, now = trajectory.turns[summary.turn - 1], turn.observation
        expected = [system("Be brief."), user(f"Count.\n\n{head}"), last.reply, *now]
        assert shown == renderer.text(expected)
        asked = renderer.tokenizer.decode(summary.tokens.prompt_ids)
        assert asked.endswith(renderer.text([user(REQUEST)]))
        assert (HEADING in asked) == (number > 0)
        assert all(message["content"] not in asked for message in now), "the newest observation stays as it is"
    rows = samples_of(trajectory)
    assert len(rows) == len(trajectory.summaries) + 1
    assert len(rows[0].turn_ends) == trajectory.summaries[0].turn + 1
    assert max(len(row.ids) for row in rows) <= engine.max_model_len
    sampled = [id for _, said in engine.calls for id in said]
    assert [id for row in rows for id, on in zip(row.ids, row.mask, strict=True) if on] == sampled


def test_without_a_memory_the_full_context_ends_the_episode_with_the_reason(renderer):
    trajectory = played(Work(40), Scripted(renderer, longest(renderer)), MemoryConfig())
    assert (trajectory.end, trajectory.failed, trajectory.summaries) == ("context", False, [])
    assert 2 < len(trajectory.turns) < 40
    assert len(samples_of(trajectory)) == 1


@pytest.mark.parametrize(("summary", "stop"), [("I have", False), ("", True), ("<think>long thoughts</think>", True)])
def test_a_summary_that_is_cut_off_or_empty_ends_the_episode_and_is_trained(renderer, summary, stop):
    engine = Scripted(renderer, longest(renderer), summary=summary, stop=stop)
    trajectory = played(Work(12), engine)
    assert (trajectory.end, len(trajectory.summaries)) == ("context", 1)
    last = trajectory.summaries[0]
    assert (last.turn, last.finish_reason) == (len(trajectory.turns), "stop" if stop else "length")
    assert calls_of(trajectory) == engine.calls
    (row,) = samples_of(trajectory, rewards=turn_rewards(trajectory, AlgorithmConfig()))
    assert row.ids == engine.calls[-1][0] + engine.calls[-1][1]
    assert row.mask[-1]
    assert Trajectory.from_json(trajectory.to_json()) == trajectory


def test_the_number_of_summaries_is_bounded(renderer):
    trajectory = played(Work(40), Scripted(renderer, longest(renderer)), replace(ON, summaries=2))
    assert (trajectory.end, len(trajectory.summaries)) == ("context", 2)


def test_what_no_summary_can_shorten_ends_the_episode(renderer):
    """The newest observation is shown whole, and alone fills the context."""
    engine = Scripted(renderer, longest(renderer))
    trajectory = played(Work(12, line="go on " * 400), engine)
    assert (trajectory.end, trajectory.summaries, len(trajectory.turns)) == ("context", [], 1)
    opening = Task("work", [user("Count. " * 400)])
    policy = TokenPolicy(engine, renderer, ANSWERS, seed=3, memory=ON)
    assert "longer than the model's context" in asyncio.run(run_episode(Work(2), policy, opening)).error


def test_a_room_of_ones_own_decides_when_to_summarise(renderer):
    late, early = (
        played(Work(12), Scripted(renderer, 2000), replace(ON, room=room)).summaries for room in (1500, 1800)
    )
    assert len(early) > len(late) > 0
    assert early[0].turn < late[0].turn


def test_a_context_that_a_summary_alone_fills_is_refused_before_anything_is_played(renderer):
    with pytest.raises(RendererError, match=r"memory.tokens=40"):
        Sampler(FrozenLake, Scripted(renderer, 512), renderer, ANSWERS, memory=ON)


def test_limits_of_tokens_count_summaries_and_limits_of_turns_do_not(renderer):
    whole = played(Work(12), Scripted(renderer, longest(renderer)))
    assert len(played(Work(12), Scripted(renderer, longest(renderer)), limits=Limits(max_turns=12)).turns) == 12
    first = whole.summaries[0]
    read = sum(len(prompt) + len(said) for prompt, said in calls_of(whole)[: first.turn + 1])
    limited = played(Work(12), Scripted(renderer, longest(renderer)), limits=Limits(tokens=read))
    assert (limited.end, len(limited.turns), len(limited.summaries)) == ("tokens", first.turn, 1)


CALL = '<tool_call>{"name": "look", "arguments": {"at": 1}}</tool_call>'


def test_after_a_tool_call_a_line_stands_for_its_result_in_the_request(renderer):
    engine = Scripted(renderer, longest(renderer), answer=CALL)
    trajectory = played(Work(12), engine)
    assert trajectory.end == "terminated"
    summary = trajectory.summaries[0]
    held, asked = summary.request
    assert (held["role"], held["content"], asked) == ("tool", HELD, user(REQUEST))
    last = trajectory.turns[summary.turn - 1]
    assert held["tool_call_id"] == last.reply["tool_calls"][0]["id"]
    text = renderer.tokenizer.decode(trajectory.turns[summary.turn].tokens.prompt_ids)
    assert HELD not in text
    assert trajectory.turns[summary.turn].observation[0]["content"] in text
    assert len(samples_of(trajectory)) == len(trajectory.summaries) + 1


STRICT = """\
{%- for message in messages -%}
{%- if message.role == 'user' and not loop.first and messages[loop.index0 - 1].role == 'tool' -%}
{{ raise_exception('a user after a tool') }}
{%- endif -%}
<|{{ message.role }}|>{{ message.content }}{{ message.tool_calls }}<|end|>
{%- endfor -%}
{%- if add_generation_prompt %}<|assistant|>{% endif -%}
"""


def test_a_template_that_takes_no_user_after_a_tool_gets_the_request_in_the_tools_message():
    tokenizer = train_tokenizer(LAKE * 4, 400, 1024)
    tokenizer.chat_template = STRICT
    renderer = Renderer(tokenizer)
    memory = SummaryMemory(ON, renderer, 2000, 30)
    calls = [{"id": "c0", "type": "function", "function": {"name": "look", "arguments": "{}"}}]
    said = {"role": "assistant", "content": "", "tool_calls": calls}
    messages = [user("Count."), said, tool_result("c0", "something", "look")]
    (only,), prompt = memory.request(messages, [], None)
    assert only["role"] == "tool"
    assert only["content"] == f"{HELD}\n\n{REQUEST}"
    assert "something" not in prompt.text


def test_the_timeline_has_the_summaries_among_the_answers(renderer, tmp_path):
    timeline = Timeline(tmp_path / "timeline.json")
    trajectory = played(Work(12), Scripted(renderer, longest(renderer)))
    timeline.episode(trajectory)
    timeline.write()
    text = (tmp_path / "timeline.json").read_text()
    assert text.count('"engine"') == len(trajectory.turns) + len(trajectory.summaries)


# ---- the last turns alone


def test_recent_shows_the_opening_what_is_left_out_and_the_last_turns(renderer):
    engine = Scripted(renderer, 2000)
    trajectory = played(Work(5), engine, MemoryConfig("recent", turns=2))
    assert (trajectory.end, len(trajectory.turns), trajectory.summaries) == ("terminated", 5, [])
    turns = trajectory.turns
    told = user("Count.\n\n(Your first 2 turns are left out here. You have taken 4 turns so far.)")
    last = [turns[2].reply, *turns[3].observation, turns[3].reply, *turns[4].observation]
    assert renderer.tokenizer.decode(engine.calls[4][0]) == renderer.text([system("Be brief."), told, *last])
    whole = [*turns[0].observation, turns[0].reply, *turns[1].observation, turns[1].reply, *turns[2].observation]
    assert renderer.tokenizer.decode(engine.calls[2][0]) == renderer.text(whole)


@pytest.mark.parametrize(("turns", "ends"), [(1, [2, 1, 1, 1]), (2, [3, 1, 1]), (5, [5])])
def test_each_turn_is_a_row_of_its_own_once_turns_are_left_out(renderer, turns, ends):
    engine = Scripted(renderer, 2000, answer=CALL)
    trajectory = played(Work(5), engine, MemoryConfig("recent", turns=turns))
    assert calls_of(trajectory) == engine.calls
    rows = samples_of(trajectory, rewards=turn_rewards(trajectory, AlgorithmConfig()))
    assert [len(row.turn_ends) for row in rows] == ends
    sampled = [id for _, said in engine.calls for id in said]
    assert [id for row in rows for id, on in zip(row.ids, row.mask, strict=True) if on] == sampled


def test_rows_of_single_turns_share_their_episodes_advantage_and_the_baseline_counts_it_once():
    said = [tokens([1, 2], [3]), tokens([1, 5], [6, 7]), tokens([1, 8], [9])]
    turns = [Turn([user("?")], assistant("a"), float(n == 2), tokens=one) for n, one in enumerate(said)]
    algorithm = AlgorithmConfig(advantage=AdvantageConfig("group", std_level="none"))
    group = Group("t", [Trajectory("t/0", "e", "t", 0, turns=turns), plain()])
    samples = [s for t in group.trajectories for s in samples_of(t, rewards=turn_rewards(t, algorithm))]
    found = with_advantages(AdvantageInputs(algorithm, [group], samples), samples)
    assert [row.advantages for row in found] == [[0, 0, 0.5], [0, 0, 0.5, 0.5], [0, 0, 0.5], [0, 0, -0.5]]


# ---- long episodes


def test_100_turns_and_64k_tokens_are_one_row_of_exactly_what_was_sampled_and_shown(renderer):
    observation = "a line of output, and the next one\n" * 18
    engine = Scripted(renderer, 100_000, answer="I look at the next file, and then at the one after it. " * 2)
    policy = TokenPolicy(engine, renderer, Sampling(max_tokens=1024), seed=1)
    trajectory = asyncio.run(run_episode(Work(100, observation), policy, Work.tasks[0]))
    assert (trajectory.end, len(trajectory.turns)) == ("terminated", 100)
    (row,) = samples_of(trajectory)
    prompt, said = engine.calls[-1]
    assert row.ids == prompt + said
    assert len(row.ids) > 64_000
    assert calls_of(trajectory) == engine.calls
    ends = [len(prompt) + len(said) for prompt, said in engine.calls]
    assert row.turn_ends == ends
    begins = [len(prompt) for prompt, _ in engine.calls]
    assert [place for place, on in enumerate(row.mask) if on] == [
        place for begin, end in zip(begins, ends, strict=True) for place in range(begin, end)
    ]


def test_no_text_of_a_long_episode_is_encoded_twice(renderer, monkeypatch):
    """The cost of a turn would grow with all that was said before it."""
    encoded = []
    whole = renderer.encode

    def encode(text):
        encoded.append(len(text))
        return whole(text)

    engine = Scripted(renderer, 100_000)
    policy = TokenPolicy(engine, renderer, ANSWERS, seed=1)
    monkeypatch.setattr(renderer, "encode", encode)
    trajectory = asyncio.run(run_episode(Work(100), policy, Work.tasks[0]))
    prompts = len(trajectory.turns) * len(Work(1).line)
    assert sum(encoded) < 3 * prompts


# ---- the embedded engine

CONTEXT = 2048


@pytest.fixture(scope="module")
def rollout(tmp_path_factory):
    """Plays two tasks, three episodes each, by a journal: the groups, the journal, and how often the engine answered."""
    folder = journal_cases.build(tmp_path_factory.mktemp("policy"), CONTEXT)
    # A model that knows nothing would not stop: a third of all tokens end its answers and summaries.
    stops = (*Renderer.of_folder(folder).stop_token_ids, *range(0, 512, 3))
    given = {"sampling": replace(journal_cases.SAMPLING, stop_token_ids=stops), "context": CONTEXT}
    return lambda path, memory: journal_cases.rollout(folder, path, memory=memory, **given)


def test_an_episode_that_never_fills_the_context_is_the_same_bit_for_bit(rollout, tmp_path):
    without, _, _ = rollout(tmp_path / "a", None)
    beside, _, _ = rollout(tmp_path / "b", MemoryConfig("summary", tokens=12))
    assert exactly(without) == exactly(beside)
    assert not any(t.summaries for group in beside for t in group.trajectories)
    assert lines_of(tmp_path / "a") == lines_of(tmp_path / "b")


def test_a_rollout_that_is_cut_off_before_or_behind_a_summary_ends_as_if_it_had_not_been(rollout, tmp_path):
    memory = MemoryConfig("summary", tokens=12, room=CONTEXT - 200)
    undisturbed, _, asked = rollout(tmp_path / "whole", memory)
    episodes = [t for group in undisturbed for t in group.trajectories]
    assert sum(len(t.summaries) for t in episodes) >= 3
    assert any(t.summaries and len(t.turns) > t.summaries[0].turn for t in episodes), "and they are gone on with"
    assert asked == count_calls(undisturbed)
    lines = (tmp_path / "whole").read_bytes().splitlines(keepends=True)
    for count in (*range(0, len(lines), 4), len(lines)):
        path = tmp_path / f"{count}"
        path.write_bytes(b"".join(lines[:count]) + b'[{"episode":')
        written = sum(len(json.loads(line)) for line in lines[:count])
        groups, journal, asked = rollout(path, memory)
        assert exactly(groups) == exactly(undisturbed)
        assert (journal.answered, journal.diverged, asked) == (written, 0, count_calls(undisturbed) - written)
        assert lines_of(path) == lines_of(tmp_path / "whole")
