"""Agents that play by themselves, in training: what the engine samples for them is what is trained, each token once."""

import asyncio
import json
import os
import secrets
import subprocess
import sys
from contextlib import asynccontextmanager
from pathlib import Path

import openai
import pytest
from engine_models import MAX_LEN, build, perturb, reference_logprobs
from named_agents import installed
from working_agents import ANSWERS, COMMANDS, build_working

from agent_train.algorithms.selection import is_truncated, participants, turn_rewards
from agent_train.config.compose import compose
from agent_train.config.schema import AlgorithmConfig, Config, ConfigError
from agent_train.config.validation import validate
from agent_train.data.samples import samples_of
from agent_train.engine.embedded import EmbeddedEngine
from agent_train.report.metrics import read_metrics
from agent_train.rollout.agents import EngineBackend, agents_of
from agent_train.rollout.journal import Journal
from agent_train.rollout.renderer import Renderer
from agentgym.agents.play import play_agent
from agentgym.core.messages import user
from agentgym.core.registration import make, spec
from agentgym.core.trajectory import Group, Tokens, Trajectory, Turn, read_jsonl
from agentgym.gateway import Gateway, Settings
from agentgym.processes.vllm_server import VllmOptions, VllmServer

ROOT = Path(__file__).parents[2]
AGENT = "examples.agents.openai_sdk:play"
LOG = "engine.log"  # of all that the engine of a run sampled


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


def run_in_turn(runs, shared_ray, **more):
    """Runs of two steps, in one process: for each the folder, and its words."""
    small = ["learner.workers=1", "trainer.steps=2", "trainer.name=run"]
    commands = [[str(folder / LOG), *words, *small, f"trainer.runs_dir={folder}"] for folder, words in runs]
    done = subprocess.run(
        [sys.executable, str(Path(__file__).parent / "logged_run.py"), json.dumps(commands)],
        check=False,
        capture_output=True,
        text=True,
        timeout=800,
        env={**os.environ, **shared_ray, **more, "PYTHONPATH": str(ROOT)},
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def trained(folder):
    """The training trajectories of a run, and their samples: all that the engine sampled, and no more."""
    files = sorted((folder / "run/trajectories").glob("*.jsonl"))
    trajectories = [t for path in files if path.name.startswith("train") for t in read_jsonl(path)]
    played = [t for path in files for t in read_jsonl(path)]
    assert not any(t.failed for t in played), [t.error for t in played]

    sampled = [json.loads(line) for line in (folder / LOG).open()]
    told = [[*vars(turn.tokens).values()][:4] for t in played for turn in t.turns]
    assert sorted(told) == sorted(sampled), "log-probabilities and versions are those of the engine's own log too"

    rows = [row for t in trajectories for row in samples_of(t, 1.0, turn_rewards(t, AlgorithmConfig()))]
    ids = sorted(id for row in rows for id, is_trained in zip(row.ids, row.mask, strict=True) if is_trained)
    assert ids == sorted(id for t in trajectories for turn in t.turns for id in turn.tokens.completion_ids)
    steps = [record for record in read_metrics(folder / "run/metrics.jsonl") if record["kind"] == "train"]
    assert [step["agent"]["trainable"] >= 0.995 for step in steps] == [True, True]
    assert sum(step["sampled_tokens"] for step in steps) == len(ids)
    return trajectories, rows


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("engine", ["embedded", pytest.param("vllm", marks=pytest.mark.vllm)])
def test_a_run_trains_what_the_engine_sampled_for_an_agent_with_openai_s_sdk(engine, in_shared_ray, tmp_path):
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
    run_in_turn([(tmp_path, words)], in_shared_ray)
    trajectories, rows = trained(tmp_path)
    assert len(trajectories) == 32
    assert len(rows) < sum(len(t.turns) for t in trajectories), "turns that go on from one another are one row"
    steps = [record for record in read_metrics(tmp_path / "run/metrics.jsonl") if record["kind"] == "train"]
    assert all(step["update"]["grad_norm"] > 0 for step in steps)
    assert (tmp_path / "run/gateway/001/calls.jsonl").stat().st_size > 0


@pytest.fixture(scope="module")
def worked(in_shared_ray, tmp_path_factory):
    """The folder of the run of each agent of another project. A vLLM server as its users start it serves one after the other."""
    for name in ANSWERS:
        installed(name)
    models = build_working(tmp_path_factory.mktemp("models"), max_len := 20_000)
    key = secrets.token_hex()
    arguments = ("--dtype", "float32", "--logprobs-mode", "processed_logprobs", "--enable-scale-out")
    given = {"key": key, "arguments": arguments, "environment": {"VLLM_SERVER_DEV_MODE": "1"}}
    log = tmp_path_factory.mktemp("vllm") / "vllm.log"
    server = VllmServer(VllmOptions(models["codex"], "policy", str(log), gpu=False, context=max_len, **given))
    words = [
        "+env=working_agents:Number",
        "engine=openai",
        f"engine.urls=[{server.launch()}]",
        f"engine.max_model_len={max_len}",
        "agent.incomplete=true",
        "agent.max_turns=5",
        "algorithm.group_size=2",
        "trainer.eval_episodes=1",
        "sampling.max_tokens=20",
    ]
    folders = {name: tmp_path_factory.mktemp(name) for name in ANSWERS}
    groups = {name: ["trainer.groups_per_step=1"] for name in ANSWERS}
    groups["codex"] = over_an_update(folders["codex"])
    runs = [
        (folder, [*words, f"agent={name}", f"model.path={models[name]}", *groups[name]])
        for name, folder in folders.items()
    ]
    try:
        run_in_turn(runs, in_shared_ray, ENGINE_API_KEY=key)
    finally:
        server.stop()
    return folders


def over_an_update(folder):
    """Episodes of the second step begin with the first weights, and go on with the second ones."""
    words = ["algorithm=decoupled_ppo", "trainer.staleness=1", "trainer.groups_per_step=2", "env.kwargs.late=4"]
    words += ["engine.max_concurrent=4"]  # so that the first four are those of the first step
    return [*words, f"env.kwargs.update={folder}/run/trajectories/train-000001.jsonl"]


def works(test):
    """What a test needs that looks at these runs."""
    for name in ("ray", "slow", "vllm", "sandbox"):
        test = getattr(pytest.mark, name)(test)
    return pytest.mark.timeout(900)(test)


@works
@pytest.mark.parametrize("name", ANSWERS)
def test_so_does_one_for_an_unchanged_agent_of_another_project_on_a_vllm_server(name, worked):
    trajectories, _ = trained(worked[name])
    assert len(trajectories) == (8 if name == "codex" else 4)
    assert not any(t.metadata["agent"].get("killed") for t in trajectories), "each has ended by itself, at a limit too"
    names = []
    for t in trajectories:
        actions = [step["action"] for step in t.metadata["steps"]]
        calls = [call["function"] for action in actions for call in action.get("tool_calls") or ()]
        commands = [json.loads(call["arguments"]).get("command") for call in calls]
        written = [COMMANDS.index(command) + 1 for command in commands if command in COMMANDS[:2]]
        assert t.reward == (written[-1:] == [int(t.task_id[-1])]), "what is in the file is judged"
        names += [call["name"] for call in calls]
    assert set(names) == {"bash", "submit"}


@works
def test_episodes_of_codex_may_go_on_over_an_update(worked):
    trajectories, rows = trained(worked["codex"])
    versions = [[set(turn.tokens.versions) for turn in t.turns] for t in trajectories]
    assert all(len(told) == 1 for turns in versions for told in turns)
    assert [{0}, {1}] in [turns[:2] for turns in versions], versions
    assert any({0, 1} <= set(row.versions) for row in rows), "and one row has tokens of both"
