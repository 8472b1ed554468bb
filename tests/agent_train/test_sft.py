"""Warm start: the expert's episodes become samples in the form of sampled ones, and training on them follows the schedule."""

import asyncio
import dataclasses
import random
from itertools import chain

import pytest
from learner_cases import make_rows, one_rank, write_model
from transformers import AutoTokenizer

import agentgym
from agent_train.config.schema import MemoryConfig, SftConfig, TinyConfig
from agent_train.data.packing import rank_batches
from agent_train.data.samples import samples_of
from agent_train.engine.base import Completion, Sampling
from agent_train.learner.tiny import build_tiny
from agent_train.learner.worker import LearnerWorker
from agent_train.rollout.memory import RecentMemory
from agent_train.rollout.renderer import Renderer
from agent_train.rollout.sampler import TokenPolicy
from agent_train.trainer.warm_start import ExpertError, expert_trajectories, sft_samples, warm_start
from agentgym import Env, Task, TaskSet
from agentgym.core.messages import text_of, user
from agentgym.rollout.episode import run_episode


class Corridor(Env):
    """Walk right to the end of a corridor of `task.seed` cells."""

    max_turns = 12

    @classmethod
    def default_tasks(cls, split="train"):
        return TaskSet([Task(f"{split}-{n}", seed=n) for n in range(2, 6)], name=split)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed, options=options)
        self.place = 0
        return [user(f"{self.task.seed} cells. left or right?")], {}

    def step(self, action):
        self.place = max(0, self.place + (1 if self.read(action) == "right" else -1))
        done = self.place == self.task.seed
        return self.outcome(f"at {self.place}", float(done), done, success=done)

    def expert_action(self):
        return "right"

    def random_action(self, rng):
        return rng.choice(["left", "right"])


class NoExpert(Corridor):
    """A corridor that nobody knows the way through."""

    expert_action = property()


class Broken(Corridor):
    """A corridor whose floor gives way."""

    def step(self, action):
        raise OSError("the floor gave way")


class BrokenOnce(Corridor):
    """A corridor of which the first that is made has a floor that gives way in its seventh step."""

    made = steps = 0

    def __init__(self):
        super().__init__()
        BrokenOnce.made += 1
        self.number = BrokenOnce.made

    def step(self, action):
        BrokenOnce.steps += 1
        if self.number == 1 and BrokenOnce.steps == 7:
            raise OSError("the floor gave way")
        return super().step(action)


ENVS = (Corridor, NoExpert, Broken, BrokenOnce)


@pytest.fixture(autouse=True)
def registered():
    for env in ENVS:
        agentgym.register(id=f"sft_test/{env.__name__}", entry_point=env)
    yield
    for env in ENVS:
        agentgym.registry.pop(f"sft_test/{env.__name__}", None)


@pytest.fixture(scope="module")
def renderer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    build_tiny(
        folder,
        ["3 cells. left or right?", "at 1", "right"],
        TinyConfig(hidden=32, layers=1, heads=1, intermediate=32),
        256,
        0,
    )
    return Renderer(AutoTokenizer.from_pretrained(str(folder)))


def play(env="Corridor", **arguments):
    return asyncio.run(
        expert_trajectories(agentgym.spec(f"sft_test/{env}"), **{"episodes": 10, "mistakes": 0.0, **arguments})
    )


def replies(trajectories):
    return [[text_of(turn.reply) for turn in t.turns] for t in trajectories]


def test_the_expert_solves_every_task_without_mistakes_and_fewer_with():
    assert all(t.success for t in play())
    assert 0.05 < sum(t.success for t in play(mistakes=0.9, episodes=200)) / 200 < 0.95


def test_the_share_of_mistakes_is_the_share_of_random_actions():
    said = [text for texts in replies(play(mistakes=0.5, episodes=200)) for text in texts]
    # Half of the random actions are left.
    assert said.count("left") / len(said) == pytest.approx(0.25, abs=0.05)


def test_the_same_seed_gives_the_same_episodes_and_another_seed_others():
    first, again, other = (replies(play(mistakes=0.5, seed=seed)) for seed in (1, 1, 2))
    assert first == again != other


def test_tasks_come_from_the_split_and_begin_again_when_they_run_out():
    trajectories = play(split="test", episodes=10)
    assert {t.task_id for t in trajectories} == {f"test-{n}" for n in range(2, 6)}
    assert len({t.id for t in trajectories}) == 10


def test_an_environment_without_an_expert_is_refused_by_name():
    with pytest.raises(ExpertError, match=r"sft_test/NoExpert.*expert_action.*sft.episodes=0"):
        play("NoExpert")


def test_a_failing_environment_is_an_error_and_no_episode():
    with pytest.raises(ExpertError, match=r"failed 2 times: .*the floor gave way"):
        play("Broken")


def test_an_episode_that_failed_is_played_again_as_it_would_have_been():
    assert replies(play("BrokenOnce", mistakes=0.5)) == replies(play(mistakes=0.5))
    assert BrokenOnce.made == 2


class Recited:
    """An engine that says prepared texts, since the test is about a policy that happens to sample what the expert said."""

    max_model_len, version = 256, 0

    def __init__(self, renderer, texts):
        self.renderer, self.texts = renderer, list(texts)

    async def generate(self, prompt_ids, sampling, *_):
        ids = [*self.renderer.encode(self.texts.pop(0)), self.renderer.stop_token_ids[-1]]
        return Completion(ids, [-1.0] * len(ids), [0] * len(ids), "stop")

    async def close(self):
        pass


@pytest.mark.parametrize("turns", [None, 1])
def test_samples_are_token_for_token_those_of_the_same_episode_when_sampled(renderer, turns):
    settings = None if turns is None else MemoryConfig(name="recent", turns=turns)
    memory = None if turns is None else RecentMemory(turns)
    counts = []
    for trajectory in play(mistakes=0.5):
        texts = replies([trajectory])[0]
        sampling = Sampling(max_tokens=8)
        policy = TokenPolicy(Recited(renderer, texts), renderer, sampling, seed=None, memory=settings)
        env = Corridor()
        task = next(task for task in Corridor.default_tasks("train") if task.id == trajectory.task_id)
        sampled = asyncio.run(run_episode(env, policy, task, seed=trajectory.seed))
        assert sampled.error is None
        shown = [
            [(sample.ids, sample.mask, sample.turn_ends) for sample in samples]
            for samples in (sft_samples([trajectory], renderer, memory=memory), samples_of(sampled))
        ]
        assert shown[0] == shown[1]
        counts.append(len(shown[0]))
    assert max(counts) == 1 if turns is None else max(counts) > 1


def test_exactly_what_the_expert_said_and_the_stop_tokens_are_in_the_mask(renderer):
    (trajectory,) = play(episodes=1)
    (sample,) = sft_samples([trajectory], renderer)
    said = renderer.decode([token for token, on in zip(sample.ids, sample.mask, strict=True) if on])
    stop = renderer.decode([renderer.stop_token_ids[-1]])
    assert said == "".join(text + stop for text in replies([trajectory])[0])


def test_a_reply_with_a_tool_call_is_what_the_template_writes_of_it(renderer):
    (trajectory,) = play(episodes=1)
    function = {"name": "walk", "arguments": '{"to": "right"}'}
    trajectory.turns[0].reply["tool_calls"] = [{"id": "1", "type": "function", "function": function}]
    (sample,) = sft_samples([trajectory], renderer)
    said = renderer.decode([token for token, on in zip(sample.ids, sample.mask, strict=True) if on])
    assert said.startswith('right<tool_call>{"name": "walk", "arguments": {"to": "right"}}</tool_call><|end|>')


@dataclasses.dataclass
class Watched:
    """A learner of one rank that keeps what it was asked to train on."""

    worker: LearnerWorker
    batches: list = dataclasses.field(default_factory=list)
    rates: list = dataclasses.field(default_factory=list)

    async def sft(self, samples, lr):
        self.batches.append([sample.trajectory for sample in samples])
        self.rates.append(lr)
        return self.worker.sft(rank_batches(samples, 1, 1000)[0], lr)


@pytest.fixture(scope="module")
def worker(tmp_path_factory):
    with one_rank(write_model(tmp_path_factory.mktemp("model"))) as worker:
        yield worker


SAMPLES = make_rows(sizes=(6,) * 10)


def test_each_epoch_takes_every_sample_once_in_an_order_of_its_own(worker):
    learner = Watched(worker)
    asyncio.run(warm_start(learner, SAMPLES, SftConfig(epochs=2, batch_rows=4)))
    assert [len(batch) for batch in learner.batches] == [4, 4, 2, 4, 4, 2]
    epochs = [list(chain(*learner.batches[start : start + 3])) for start in (0, 3)]
    assert sorted(epochs[0]) == sorted(epochs[1]) == sorted(sample.trajectory for sample in SAMPLES)
    assert epochs[0] != epochs[1]


def test_the_order_follows_from_the_seed(worker):
    orders = []
    for seed in (3, 3, 4):
        learner = Watched(worker)
        asyncio.run(warm_start(learner, SAMPLES, SftConfig(batch_rows=4), seed=seed))
        orders.append(learner.batches)
    assert orders[0] == orders[1] != orders[2]


def test_the_rate_falls_linearly_and_progress_is_told_after_each_step(worker):
    learner, told = Watched(worker), []
    # Every step sees all samples, so that their losses compare.
    config = SftConfig(epochs=4, batch_rows=10, lr=0.004)
    last = asyncio.run(warm_start(learner, SAMPLES, config, lambda *step: told.append(step)))
    assert learner.rates == pytest.approx([0.004, 0.003, 0.002, 0.001])
    assert told[-1] == (4, 4, last.loss, last.tokens)
    assert [step[:2] for step in told] == [(n, 4) for n in (1, 2, 3, 4)]
    assert last.loss < told[0][2]


def test_random_actions_come_from_the_environment():
    env = Corridor()
    assert {env.random_action(random.Random(n)) for n in range(20)} == {"left", "right"}
