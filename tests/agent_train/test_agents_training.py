"""Agents that play by themselves, in training: what the engine samples for them is what is trained, each token once."""

import asyncio
from contextlib import asynccontextmanager
from pathlib import Path

import openai
import pytest
from engine_models import MAX_LEN, build, perturb, reference_logprobs
from logged_run import run_in_turn, trained

from agent_train.algorithms.selection import is_truncated, participants, turn_rewards
from agent_train.config.compose import compose
from agent_train.config.schema import AlgorithmConfig, Config, ConfigError
from agent_train.config.validation import validate
from agent_train.data.samples import samples_of
from agent_train.engine.embedded import EmbeddedEngine
from agent_train.rollout.agents import EngineBackend, agents_of
from agent_train.rollout.journal import Journal
from agent_train.rollout.renderer import Renderer
from agentgym.agents.play import play_agent
from agentgym.core.messages import user
from agentgym.core.registration import make, spec
from agentgym.core.trajectory import Group, Tokens, Trajectory, Turn
from agentgym.gateway import Gateway, Settings

ROOT = Path(__file__).parents[2]
AGENT = "examples.agents.openai_sdk:play"


# ---- rows of a tree


def turn(prompt, sampled, reward=0.0, unusable=None):
    tokens = Tokens(prompt, sampled, [-0.5] * len(sampled), [0] * len(sampled))
    return Turn([], {"role": "assistant", "content": ""}, reward, tokens=tokens, unusable=unusable)


def tree():
    """A main line, a title, a branch of the first answer, and the main line's second call, of which one is spoiled."""
    turns = [
        turn([1, 2], [3, 4], 1.0),
        turn([8], [9]),
        turn([1, 2, 3, 4, 5], [6], 2.0, unusable="top_p"),
        turn([1, 2, 3, 4, 7], [7]),
        turn([1, 2, 3, 4, 5, 6, 1], [2], 4.0),
    ]
    return Trajectory("t/0", "env", "t", turns=turns, metadata={"agent": {}})


def test_calls_of_a_tree_become_rows_by_the_longest_beginning_and_each_token_is_trained_once():
    rewards = turn_rewards(tree(), AlgorithmConfig())
    assert rewards == [1.0, 2.0, 0.0, 4.0], "what a spoiled call earned goes to the one before"
    main, title, branch = samples_of(tree(), rewards=rewards)
    assert (main.ids, main.turn_ends, main.rewards) == ([1, 2, 3, 4, 5, 6, 1, 2], [4, 8], [1.0, 4.0])
    assert main.mask == [False] * 2 + [True] * 2 + [False] * 3 + [True]
    assert main.logprobs[5] == 0.0
    assert main.versions[5] == -1
    assert (title.ids, title.mask, title.rewards) == ([8, 9], [False, True], [2.0])
    assert (branch.ids, branch.mask) == ([1, 2, 3, 4, 7, 7], [False] * 5 + [True])
    assert len({row.id for row in (main, title, branch)}) == 3


def test_an_agent_that_leaves_by_itself_was_cut_off_by_no_limit():
    left, cut = tree(), tree()
    left.end, cut.end = "agent", "max_turns"
    assert (is_truncated(left), is_truncated(cut)) == (False, True)


def test_an_episode_of_which_nothing_can_be_trained_takes_no_part():
    spoiled = Trajectory("t/1", "env", "t", sample=1, turns=[turn([1], [2], 9.0, unusable="incomplete episode")])
    group = Group("t", [tree(), spoiled])
    assert [t.id for t, _ in participants(group, AlgorithmConfig().overlong)] == ["t/0"]
    assert samples_of(spoiled) == []


# ---- the engine behind the gateway


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return build(tmp_path_factory.mktemp("model"))


@asynccontextmanager
async def asking(model_dir, folder, journal=None, settings=None):
    """A client of one episode, the episode, what the engine was asked and said, and the engine."""
    engine, renderer, log = EmbeddedEngine(model_dir, MAX_LEN), Renderer.of_folder(model_dir), []
    generate = engine.generate

    async def logged(prompt_ids, sampling, episode=None):
        completion = await generate(prompt_ids, sampling, episode)
        log.append((list(prompt_ids), completion.ids, sampling))
        return completion

    engine.generate = logged
    backend = EngineBackend(engine, renderer)
    try:
        async with Gateway(backend, folder, settings=settings or Settings(temperature=1.0, max_tokens=12)) as gateway:
            backend.begin("e", "key", journal or Journal())
            episode, key = await gateway.open("e", seed=1)
            async with openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key=key, max_retries=0) as client:
                yield client, episode, log, engine
    finally:
        await engine.close()


async def ask(client, messages, **more):
    answer = await client.chat.completions.create(model="policy", messages=messages, **more)
    return answer.choices[0].message.model_dump(exclude_none=True)


def calls_in(episode):
    return list(episode.tree.calls.values())


def test_a_conversation_goes_on_from_the_exact_sampled_ids(model_dir, tmp_path):
    async def play():
        async with asking(model_dir, tmp_path) as (client, episode, log, _):
            messages = [user("up or down?")]
            for _ in range(3):
                messages += [await ask(client, messages), user("and now?")]
            await ask(client, [user("a title")], n=2)
            calls = calls_in(episode)
            told = [(call.tokens().prompt_ids, call.tokens().completion_ids) for call in calls]
            assert sorted(told) == sorted(each[:2] for each in log)
            assert [call.parent and call.parent.number for call in calls] == [None, 0, 1, None, None]
            assert [call.why for call in calls] == [None, None, None, "new conversation", "new conversation"]
            assert episode.share()["trainable"] == sum(len(ids) for _, ids, _ in log)
            assert len({sampling.seed for *_, sampling in log}) == 5

    asyncio.run(play())


def test_a_weight_update_in_the_middle_of_an_episode_is_told_for_each_token(model_dir, tmp_path):
    async def play():
        async with asking(model_dir, tmp_path) as (client, episode, log, engine):
            messages = [user("up or down?")]
            references = []
            for version in range(2):
                messages += [await ask(client, messages), user("and now?")]
                prompt, ids, _ = log[version]
                references += reference_logprobs(engine.model, prompt, ids, 1.0).tolist()
                perturb(engine.model, seed=5)
                engine.version += 1
            turns = [turn_of(call) for call in calls_in(episode)]
            return log, references, samples_of(Trajectory("t/0", "env", "t", turns=turns))

    def turn_of(call):
        return Turn(call.asked.messages, call.answer.message, tokens=call.tokens())

    log, references, rows = asyncio.run(play())
    (row,) = rows
    told = [(version, logprob) for version, logprob, on in zip(row.versions, row.logprobs, row.mask, strict=True) if on]
    assert [version for version, _ in told] == [0] * len(log[0][1]) + [1] * len(log[1][1])
    assert [logprob for _, logprob in told] == pytest.approx(references, abs=1e-4)


def test_a_stop_string_keeps_the_ids_up_to_its_end(model_dir, tmp_path):
    stops = list("abcdefghijklmnopqrstuvwxyz")  # one of which the answer has for certain
    settings = Settings(temperature=1.0, max_tokens=200)

    async def play():
        async with asking(model_dir, tmp_path, settings=settings) as (client, episode, log, _):
            decode = Renderer.of_folder(model_dir).decode
            answer = await client.chat.completions.create(model="policy", messages=[user("up?")], stop=stops)
            (call,) = calls_in(episode)
            ids, whole = call.tokens().completion_ids, log[0][1]
            assert ids == whole[: len(ids)]
            assert len(ids) < len(whole)
            assert any(stop in decode(ids) for stop in stops)
            assert not any(stop in decode(ids[:-1]) for stop in stops)
            assert answer.choices[0].finish_reason == "stop"
            assert not any(stop in answer.choices[0].message.content for stop in stops)
            text = await client.completions.create(model="policy", prompt=log[0][0], stop=stops)
            assert not any(stop in text.choices[0].text for stop in stops)
            assert calls_in(episode)[1].tokens().prompt_ids == log[0][0]

    asyncio.run(play())


def test_an_empty_stop_string_stops_nothing(model_dir, tmp_path):
    async def play():
        async with asking(model_dir, tmp_path) as (client, episode, log, _):
            await ask(client, [user("up?")], stop="")
            await client.completions.create(model="policy", prompt=log[0][0], stop=[""])
            assert [call.tokens().completion_ids for call in calls_in(episode)] == [ids for _, ids, _ in log]

    asyncio.run(play())


def test_a_prompt_without_room_is_refused_in_words_that_agents_know(model_dir, tmp_path):
    async def play():
        async with asking(model_dir, tmp_path) as (client, episode, *_):
            with pytest.raises(openai.BadRequestError) as refused:
                await ask(client, [user("0123456789" * 60)])
            assert refused.value.code == "context_length_exceeded"
            assert "maximum context length" in str(refused.value)
            assert episode.refused.code == "context_length_exceeded"
            with pytest.raises(openai.BadRequestError, match="token ids"):
                await client.completions.create(model="policy", prompt=[10**6])
            long = await ask(client, [user("0123456789" * 40)], max_tokens=10_000)
            assert long["role"] == "assistant"

    asyncio.run(play())


def test_settings_that_spoil_tokens_are_not_used_or_marked(model_dir, tmp_path):
    async def play(policy):
        settings = Settings(policy, temperature=1.0, max_tokens=8)
        async with asking(model_dir, tmp_path / policy, settings=settings) as (client, episode, log, _):
            await ask(client, [user("up?")], temperature=0.25, top_p=0.5)
            return log[0][2].temperature, episode.share()["lost"], sorted(episode.changed)

    assert asyncio.run(play("override")) == (1.0, {}, ["temperature", "top_p"])
    temperature, lost, changed = asyncio.run(play("mask"))
    assert (temperature, list(lost), changed) == (0.25, ["temperature"], ["top_p"])


def test_a_free_choice_of_tools_spoils_nothing_and_no_choice_leaves_them_out(model_dir, tmp_path):
    tools = [{"type": "function", "function": {"name": "count", "parameters": {"type": "object", "properties": {}}}}]

    async def play():
        async with asking(model_dir, tmp_path, settings=Settings("strict", 1.0, 8)) as (client, episode, log, _):
            for choice in ("auto", "none"):
                await ask(client, [user("up?")], tools=tools, tool_choice=choice)
            decode = Renderer.of_folder(model_dir).decode
            return ["count" in decode(prompt) for prompt, *_ in log], dict(episode.changed)

    assert asyncio.run(play()) == ([True, False], {})


def test_an_agent_that_is_run_again_gets_the_answers_that_it_had(model_dir, tmp_path):
    async def play(folder, last):
        with Journal(tmp_path / "journal") as journal:
            async with asking(model_dir, folder, journal) as (client, episode, log, _):
                messages = [user("up or down?")]
                messages += [await ask(client, messages), user("and now?")]
                messages += [await ask(client, messages), user(last)]
                await ask(client, messages)
                return [call.tokens() for call in calls_in(episode)], len(log), journal.answered, journal.diverged

    first, asked, *_ = asyncio.run(play(tmp_path / "1", "go on"))
    again, asked_again, answered, diverged = asyncio.run(play(tmp_path / "2", "go on"))
    assert (asked, asked_again, answered, diverged) == (3, 0, 3, 0)
    assert again == first
    other, asked_again, answered, diverged = asyncio.run(play(tmp_path / "3", "stop"))
    assert (asked_again, answered, diverged) == (1, 2, 1)
    assert other[:2] == first[:2]


@pytest.mark.bubblewrap
def test_a_command_in_a_sandbox_asks_the_run_s_engine(model_dir, tmp_path):
    program = (
        "import json, os, urllib.request;"
        "head = {'Content-Type': 'application/json', 'Authorization': 'Bearer ' + os.environ['OPENAI_API_KEY']};"
        "body = {'model': 'policy', 'max_tokens': 4, 'messages': [{'role': 'user', 'content': 'up or down?'}]};"
        "url = os.environ['OPENAI_BASE_URL'] + '/chat/completions';"
        "print(urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), head)).status)"
    )
    command = f'command:python3 -c "{program}"'
    config = compose(
        ["+env=frozen_lake", "engine=embedded", "sandbox=bubblewrap", f"agent={command}", "agent.image=python"]
    )
    validate(config)

    async def play():
        engine, env = EmbeddedEngine(model_dir, MAX_LEN), make("frozen_lake")
        try:
            async with agents_of(config, tmp_path, engine, Renderer.of_folder(model_dir)) as agents:
                return await play_agent(env, agents.policy("key", 1, Journal()), spec("frozen_lake").tasks()[0])
        finally:
            await engine.close()

    trajectory = asyncio.run(play())
    assert trajectory.metadata["agent"]["exit_code"] == 0, trajectory.metadata
    assert (len(trajectory.turns), trajectory.metadata["steps"][0]["action"]["content"]) == (1, "200")
    assert len(trajectory.turns[0].tokens.completion_ids) == trajectory.metadata["agent"]["share"]["trainable"] == 4


# ---- settings


def test_agent_is_short_for_its_setting_and_takes_any_words():
    words = 'command:python -c "print({task})" --n=3'
    config = compose(["+env=frozen_lake", "engine=embedded", f"agent={words}", "agent.max_turns=4"])
    assert (config.agent.run, config.agent.max_turns) == (words, 4)
    assert compose(["+env=frozen_lake"]).agent == Config().agent


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["agent=nowhere:play"], "there is no module 'nowhere'"),
        (["agent=command:no-such-program"], "there is no program"),
        ([f"agent={AGENT}", "agent.image=python"], "only a command"),
        (["agent=mini-swe-agent"], "works by a tool 'bash' alone, and FrozenLake has no tools"),
        ([f"agent={AGENT}", "algorithm=gigpo"], "the calls of agent.run may branch"),
        ([f"agent={AGENT}", "memory.name=summary"], "memory.name=summary: agent.run plays whole episodes itself"),
        ([f"agent={AGENT}", "agent.passed=['judge=nowhere']"], "base_url must begin with http"),
    ],
)
def test_what_an_agent_cannot_have_is_refused(words, why, monkeypatch):
    monkeypatch.chdir(ROOT)
    with pytest.raises(ConfigError) as refused:
        validate(compose(["+env=frozen_lake", "engine=embedded", *words]))
    assert any(why in problem for problem in refused.value.problems), refused.value.problems


# ---- a run


TINY = ("model.tiny.hidden=64", "model.tiny.heads=2", "model.tiny.intermediate=128", "model.tiny.layers=1")
FROZEN_LAKE = ("+env=frozen_lake", *TINY, "sft.batch_rows=8", "env.kwargs.shaping=1.0", "trainer.eval_episodes=4")


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("engine", ["embedded", pytest.param("vllm", marks=pytest.mark.vllm)])
def test_a_run_trains_what_the_engine_sampled_for_an_agent_with_openai_s_sdk(engine, in_shared_ray, forks, tmp_path):
    """Two steps; the second may be played ahead of the first's update."""
    words = [
        *FROZEN_LAKE,
        f"engine={engine}",
        "algorithm=decoupled_ppo",
        f"agent={AGENT}",
        "sft.episodes=128",
        "sft.lr=5e-3",
    ]
    words += ["algorithm.group_size=4", "trainer.groups_per_step=4", "trainer.staleness=1"]
    run_in_turn(forks, [(tmp_path, words)], in_shared_ray)
    trajectories, rows, _ = trained(tmp_path)
    assert len(trajectories) == 32
    assert len(rows) < sum(len(t.turns) for t in trajectories), "turns that go on from one another are one row"
    assert (tmp_path / "run/gateway/001/calls.jsonl").stat().st_size > 0
