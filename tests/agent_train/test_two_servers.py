"""Two real vLLM servers, of which one hangs: in a rollout, and while they load weights with an adapter merged. Neither costs
an episode or the run."""

import asyncio
import dataclasses
import logging
import signal

import psutil
import pytest
import torch
from engine_models import build, reference_logprobs
from learner_cases import InProcess, make_config, make_rows, one_rank
from transformers import AutoModelForCausalLM

from agent_train.config.schema import EngineConfig
from agent_train.data.packing import rank_batches
from agent_train.engine import servers, vllm
from agent_train.engine.base import Sampling
from agent_train.engine.vllm import VllmEngine, server_options
from agent_train.learner.fsdp import full_tensors
from agent_train.rollout.renderer import Rendered
from agent_train.trainer.rl import sampler_of
from agent_train.weights.sync import WeightAddress, free_port, sync
from agentgym.core.env import Env
from agentgym.core.messages import user
from agentgym.core.tasks import Task

EPISODES, TURNS = 8, 3


class Talk(Env):
    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed, options=options)
        self.said = 0
        return list(self.current_task.messages), {}

    def step(self, action):
        self.said += 1
        return self.outcome([user("go on")], 0.0, terminated=self.said == TURNS)


class Ids:
    """A renderer: one id for each message."""

    stop_token_ids = (0,)

    def prompt(self, messages, tools, previous):
        return Rendered([*previous.ids, *previous.completion, 7] if previous else [5], "")

    def parse(self, ids, turn):
        return {"role": "assistant", "content": "x"}


class Sending(InProcess):
    """A learner of one rank in a thread. `meanwhile` happens when the receivers wait for what it sends."""

    meanwhile = None

    async def _call(self, method, arguments, what=""):
        return [await asyncio.to_thread(getattr(self.actors[0], method), *arguments[0])]

    def manifest(self):
        return self.actors[0].manifest()

    async def weight_address(self, receivers):
        return WeightAddress("127.0.0.1", free_port("127.0.0.1"), 1 + receivers)

    async def send_weights(self):
        if self.meanwhile:
            await asyncio.sleep(1)
            self.meanwhile()
            self.meanwhile = None
        return await super().send_weights()


async def process_of(engine, number):
    return psutil.Process((await engine.servers.all[number].call("state")).pid).children()[0]


async def core_of(engine, number):
    """Its engine core, which on a GPU is a process of its own; /health is answered without it."""
    (core,) = [child for child in (await process_of(engine, number)).children() if "EngineCore" in child.name()]
    return core


def options_as_on_a_gpu(*arguments, **given):
    options = server_options(*arguments, **given)
    return dataclasses.replace(options, environment={**options.environment, "VLLM_ENABLE_V1_MULTIPROCESSING": "1"})


@pytest.mark.vllm
@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(1000)
def test_a_server_that_hangs_in_a_rollout_or_a_load_costs_itself_alone(workers_as_forks, tmp_path, monkeypatch, caplog):
    import ray

    caplog.set_level(logging.WARNING, logger=servers.__name__)
    monkeypatch.setattr(servers, "HEALTH_SECONDS", 3.0)
    monkeypatch.setattr(vllm, "LOAD_SECONDS", 20.0)
    monkeypatch.setattr(vllm, "server_options", options_as_on_a_gpu)
    folder = build(tmp_path / "model")
    given = EngineConfig(replicas=2, max_model_len=512, kv_cache_bytes=32 << 20, request_timeout=12, max_concurrent=8)
    config = dataclasses.replace(make_config(lr=0.1), engine=given)
    config.lora.rank = 3
    config.algorithm.group_size, config.sampling.max_tokens = 1, 60

    async def run(worker):
        learner, engine = Sending(worker, config), await VllmEngine.start(given, folder, tmp_path / "logs")
        try:
            await sync(learner, engine, 0)
            playing = asyncio.create_task(play(engine))
            while not engine.servers.all[0].limits:
                await asyncio.sleep(0.01)
            cores = [await core_of(engine, number) for number in (0, 1)]
            cores[0].send_signal(signal.SIGSTOP)
            trajectories = await playing
            assert [t.error for t in trajectories] == [None] * EPISODES
            assert await engine.losses() == 1

            await engine.stale()
            worker.update([rank_batches(make_rows(seed=0), 1, 10_000)[0]])
            victim = await process_of(engine, 1)
            learner.meanwhile = lambda: victim.send_signal(signal.SIGSTOP)
            await sync(learner, engine, 1)
            assert await engine.losses() == 2
            assert engine.servers.numbers(servers.HEALTHY) == [0]
            _, left = await asyncio.to_thread(psutil.wait_procs, cores, timeout=30)
            assert not left, "a server that is lost leaves no engine behind"
            base, model = (AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32) for _ in range(2))
            model.load_state_dict(dict(full_tensors(worker.module)), strict=False)
            for answer in await asyncio.gather(*(engine.generate([5, 6], Sampling(20, seed=n)) for n in range(4))):
                gaps = [
                    (reference_logprobs(weights, [5, 6], answer.ids, 1.0) - torch.tensor(answer.logprobs)).abs().max()
                    for weights in (model, base)
                ]
                assert gaps[0] < 1e-3 < gaps[1]
                assert set(answer.versions) == {1}
        finally:
            await engine.close()

    async def play(engine):
        tasks = [Task(str(n), (user("begin"),)) for n in range(EPISODES)]
        groups = await sampler_of(config, Talk, engine, Ids()).collect(tasks, 0)
        return [trajectory for group in groups for trajectory in group.trajectories]

    with workers_as_forks():
        ray.init(address="local", num_cpus=2, include_dashboard=False, logging_level="error", log_to_driver=False)
    try:
        with one_rank(folder, config) as worker:
            asyncio.run(asyncio.wait_for(run(worker), 900))
    finally:
        ray.shutdown()
    ways = [line.split(": ")[1] for line in caplog.text.splitlines() if "vLLM server 0, " in line]
    assert "computed nothing for 3 s" in caplog.text
    told = " ".join(ways)
    assert told.startswith("healthy -> suspect suspect -> dead dead -> restarting restarting -> stale"), told
    assert told.endswith("stale -> healthy")
