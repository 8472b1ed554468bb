"""Episodes of a group get rewards by comparison. The judge is a double: a real HTTP server that ranks by a rule, or fails."""

import asyncio
import json
import re
from contextlib import asynccontextmanager
from functools import partial

import pytest
from aiohttp import web
from engine_models import MAX_LEN, build

from agent_train.config.combinations import wrong_combinations
from agent_train.config.compose import compose
from agent_train.config.schema import JudgeConfig
from agent_train.engine.base import Sampling
from agent_train.engine.embedded import EmbeddedEngine
from agent_train.rollout.group_judge import METRIC, GroupJudge
from agent_train.rollout.renderer import Renderer
from agent_train.rollout.sampler import Sampler
from agentgym.core.messages import assistant, user
from agentgym.core.tasks import Task
from agentgym.core.trajectory import Group, Trajectory, Turn
from agentgym.rewards.judge import transcript
from agentgym_envs.games.frozen_lake import FrozenLake

CANDIDATE = re.compile(r"candidate \d+ begins\n(.*?)\n#[0-9a-f]{32}# candidate \d+ ends", re.DOTALL)
TASK = Task("t", [user("?")])


def ranked(texts):
    """The more an episode says "good", the better it is."""
    order = sorted(range(1, len(texts) + 1), key=lambda n: -texts[n - 1].count("good"))
    return {"ranking": order}


def scored(texts):
    return {"scores": {str(n): 5 * text.count("good") for n, text in enumerate(texts, 1)}}


@asynccontextmanager
async def judging(rule):
    """The URL of a judge, and the requests that it got."""
    asked = []

    async def answer(request):
        asked.append(await request.json())
        said = rule(CANDIDATE.findall(asked[-1]["messages"][1]["content"])) if rule else "I cannot say."
        text = said if isinstance(said, str) else json.dumps(said)
        choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": text}}
        return web.json_response({"choices": [choice], "usage": {"prompt_tokens": 1, "completion_tokens": 1}})

    app = web.Application()
    app.router.add_post("/v1/chat/completions", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}/v1", asked
    finally:
        await runner.cleanup()


def episode(sample, said, reward=0.0, **more):
    turns = [Turn([user("?")], assistant("first"), 0.25), Turn([user("!")], assistant(said), reward)]
    return Trajectory(f"t/{sample}", "e", "t", sample, turns=turns, end="terminated", **more)


def judged(group, rule, **settings):
    async def go():
        async with judging(rule) as (url, asked):
            await GroupJudge(JudgeConfig(url=url, model="judge", **settings), seed=3).judge(group, TASK)
            return asked

    return asyncio.run(go())


def test_a_ranking_goes_from_0_to_1_into_the_reward_of_the_last_turn_by_its_weight():
    group = Group("t", [episode(0, "good"), episode(1, "bad", 1.0), episode(2, "good good")])
    (asked,) = judged(group, ranked, weight=0.5)
    assert "How well does the agent do" in asked["messages"][0]["content"]
    assert [[turn.reward for turn in t.turns] for t in group.trajectories] == [[0.25, 0.25], [0.25, 1.0], [0.25, 0.5]]
    assert [t.metrics[METRIC] for t in group.trajectories] == [0.5, 0.0, 1.0]
    assert [t.turns[-1].info[METRIC] for t in group.trajectories] == [0.5, 0.0, 1.0]


def test_what_the_judge_pays_is_no_success():
    """Else all but the last of each ranking would have succeeded where the environment tells no success."""
    group = Group("t", [episode(n, "good" * n) for n in range(3)])
    for trajectory in group.trajectories:
        trajectory.turns[0].reward = 0.0
    group.trajectories[0].metrics["success"] = 1.0
    judged(group, ranked)
    assert [t.success for t in group.trajectories] == [1.0, 0.0, 0.0]
    assert group.trajectories[2].reward == 1.0


def test_scores_may_be_equal_and_are_the_mean_of_the_samples():
    group = Group("t", [episode(0, "good"), episode(1, "good"), episode(2, "bad")])
    assert len(judged(group, scored, by="scores", samples=2)) == 2
    assert [t.reward for t in group.trajectories] == [0.75, 0.75, 0.25]


def test_an_episode_that_has_failed_is_not_judged():
    failed = episode(1, "good good")
    failed.end, failed.error = "error", "the endpoint is down"
    group = Group("t", [episode(0, "bad"), failed, episode(2, "good")])
    (asked,) = judged(group, ranked)
    assert len(CANDIDATE.findall(asked["messages"][1]["content"])) == 2
    assert [t.metrics.get(METRIC) for t in group.trajectories] == [0.0, None, 1.0]
    assert (failed.reward, failed.error) == (0.25, "the endpoint is down")


def test_without_a_verdict_the_episodes_have_failed_and_say_why():
    group = Group("t", [episode(0, "bad"), episode(1, "good", 1.0)])
    judged(group, None)
    assert [t.failed for t in group.trajectories] == [True, True]
    assert all("no readable verdict" in t.error for t in group.trajectories)


def test_each_group_of_a_step_is_judged_by_itself_and_no_evaluation(tmp_path):
    folder = build(tmp_path)

    def longest(texts):
        return {"ranking": sorted(range(1, len(texts) + 1), key=lambda n: -len(texts[n - 1]))}

    async def go():
        engine = EmbeddedEngine(folder, MAX_LEN)
        async with judging(longest) as (url, asked):
            judge = GroupJudge(JudgeConfig(url=url, model="judge"), seed=0)
            make_env = partial(FrozenLake, max_turns=2)
            sampler = Sampler(make_env, engine, Renderer.of_folder(folder), Sampling(8), group_size=3, judge=judge)
            tasks = list(FrozenLake.default_tasks("train"))[:2]
            groups = await sampler.collect(tasks, 0)
            count = len(asked)
            await sampler.evaluate(tasks)
            await engine.close()
            return groups, count, len(asked)

    groups, judged_in_training, judged_in_all = asyncio.run(go())
    assert (judged_in_training, judged_in_all) == (2, 2)
    for group in groups:
        ranks = [t.metrics[METRIC] for t in group.trajectories]
        lengths = [len(transcript(t.messages())) for t in group.trajectories]
        assert sorted(ranks) == [0.0, 0.5, 1.0]
        assert [lengths[place] for place in sorted(range(3), key=lambda k: ranks[k])] == sorted(lengths)


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        (["judge.url=nowhere", "judge.model=m"], "is not a URL"),
        (["judge.url=http://127.0.0.1:1/v1"], "needs judge.model"),
        (
            ["judge.url=http://127.0.0.1:1/v1", "judge.model=m", "algorithm.group_size=1"],
            "compares the episodes of a group",
        ),
        (["judge.url=http://127.0.0.1:1/v1", "judge.model=m", "algorithm=remax"], "ReMax's greedy episodes"),
    ],
)
def test_what_a_judge_cannot_do_is_refused(given, problem):
    config = compose(["+env=frozen_lake", "engine=embedded", *given])
    assert any(problem in told for told in wrong_combinations(config))
