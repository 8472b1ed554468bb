"""Environments that Ray places: where they go, that they play as local ones do, and what becomes of those that die."""

import asyncio
import dataclasses
import os
import random
import socket
from contextlib import asynccontextmanager
from types import SimpleNamespace

import journal_cases
import psutil
import pytest
import ray
from ray.cluster_utils import Cluster
from test_timeline import events

from agent_train.cluster.placement import PlacementError, env_workers_wanted, own_ray_cpus
from agent_train.config.compose import compose
from agent_train.config.schema import ConfigError
from agent_train.config.validation import env_spec, validate
from agent_train.report.timeline import Timeline
from agent_train.rollout import env_workers
from agent_train.rollout.env_workers import EnvWorkers, placed_env
from agentgym.policies.base import ExpertPolicy
from agentgym.rollout.episode import Episode, run_many
from agentgym.service.client.balance import pool_of

SECONDS = 120.0


def settings(*overrides):
    return compose(["+env=frozen_lake", "engine=embedded", "env.placement=ray", "learner.workers=1", *overrides])


@pytest.fixture(autouse=True)
def _no_cluster_is_named(monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)


@pytest.fixture(scope="module")
def cluster():
    """Two nodes, of two and of three CPUs; this process is on the first."""
    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False})
    try:
        made.add_node(num_cpus=3)
        ray.init(address=made.address, log_to_driver=False)
        yield made
    finally:
        ray.shutdown()
        made.shutdown()


def policy(episode):
    return ExpertPolicy(mistakes=0.5, rng=random.Random(episode.seed))


async def play(make, count=12):
    tasks = env_spec(settings()).tasks("train").take(count)
    episodes = [Episode(task, 0, seed) for seed, task in enumerate(tasks)]
    return await asyncio.wait_for(run_many(make, policy, episodes, concurrency=6), SECONDS)


def what_happened(trajectories):
    def of(turn):
        return turn.observation, turn.reply, turn.reward, turn.info

    return [(t.env, t.id, t.end, t.error, t.final_observation, [of(turn) for turn in t.turns]) for t in trajectories]


@asynccontextmanager
async def placed(*overrides, notes=None, timeline=None, **changes):
    config = settings(*overrides)
    spec = dataclasses.replace(env_spec(config), **changes)
    note = [].append if notes is None else notes.append
    async with asyncio.timeout(SECONDS), placed_env(config, spec, note, timeline or Timeline()) as env:
        yield env


async def only_start(*overrides, **changes):
    async with placed(*overrides, **changes):
        pass


def asked(actor, question):
    return actor.__ray_call__.remote(lambda self: question())


@pytest.mark.ray
def test_workers_go_to_all_nodes_and_their_episodes_are_those_of_a_local_environment(cluster):
    async def there():
        async with placed("env.workers=2") as env:
            nodes = [await asked(a, lambda: ray.get_runtime_context().get_node_id()) for a in env.actors.values()]
            pids = [await asked(actor, os.getpid) for actor in env.actors.values()]
            workers = [psutil.Process(pid) for pid in pids]
            family = [*workers, *(child for worker in workers for child in worker.children(recursive=True))]
            return nodes, env.urls, family, await play(env.make)

    nodes, urls, family, remote = asyncio.run(there())
    assert len(family) >= 4
    assert not psutil.wait_procs(family, SECONDS)[1], "something is left of the workers"
    assert set(nodes) == {node["NodeID"] for node in ray.nodes()}
    here = nodes.index(ray.get_runtime_context().get_node_id())
    # Where the trainer is, only this machine reaches them.
    assert [number for number, url in urls.items() if url.startswith("http://127.0.0.1:")] == [here]
    local = asyncio.run(play(env_spec(settings()).make))
    assert all(trajectory.error is None for trajectory in local)
    assert what_happened(remote) == what_happened(local)


@pytest.mark.ray
def test_workers_leave_each_rank_of_the_learner_a_whole_cpu_on_one_node(cluster):
    """On nodes of 2 and 3 CPUs, a worker of half a CPU on each would leave room for three ranks."""

    async def there():
        async with placed("env.workers=2", "env.cpus=0.5", "learner.workers=4"):
            ranks = [ray.remote(num_cpus=1)(env_workers.EnvWorker).remote() for _ in range(4)]
            try:
                return await asyncio.gather(*(rank.where.remote() for rank in ranks))
            finally:
                for rank in ranks:
                    ray.kill(rank)

    assert len(asyncio.run(there())) == 4


@pytest.mark.ray
def test_a_worker_that_is_killed_is_placed_again_and_costs_no_turn_of_its_episodes(cluster, tmp_path):
    """Killed in the engine's tenth answer, when all episodes have turns. It is alone: they can only go on once it is back."""
    folder, notes, timeline = journal_cases.build(tmp_path / "policy"), [], Timeline(tmp_path / "timeline.json")
    tasks, make = env_spec(settings()).tasks("train").take(2), env_spec(settings()).make
    undisturbed, _, count = journal_cases.rollout(folder, None, make, tasks)
    urls, answers = [], []

    async def there():
        async with placed("env.workers=1", notes=notes, timeline=timeline) as env:
            urls.append(env.urls[0])
            victim = await asked(env.actors[0], os.getpid)

            async def kill():
                answers.append(1)
                if len(answers) == 10:
                    process = psutil.Process(victim)
                    process.kill()
                    await asyncio.to_thread(process.wait, SECONDS)  # it may live on for some answers on a busy machine

            played = await journal_cases.collect(folder, None, env.make, tasks, before=kill)
            while not any("is back" in note for note in notes):
                await asyncio.sleep(0.05)
            urls.append(env.urls[0])
            assert await asked(env.actors[0], os.getpid) != victim
            return played

    groups, journal, again = asyncio.run(there())
    assert journal_cases.exactly(groups) == journal_cases.exactly(undisturbed)
    assert again == count, "the engine is asked for nothing twice"
    assert journal.retried > 0
    assert any("errors" in t.metadata for t in journal_cases.episodes_of(groups))
    assert urls[0] != urls[1]
    assert f"env worker 0 at {urls[0]} died and is placed again" in notes[0]
    timeline.write()
    rows = events(tmp_path / "timeline.json")
    calls = [each["args"]["count"] for each in rows["env worker 0"]]
    assert max(calls) > 1
    assert calls[-1] == 0, "at last it waits"
    assert [each["name"] for each in rows["env worker restart 0"]] == ["starts again"]


def test_a_worker_is_placed_again_whatever_the_first_tries_to_do_so_fail_with(monkeypatch, caplog):
    """The actors are doubles, since Ray's do not fail so when they are asked."""
    monkeypatch.setattr(env_workers, "FIRST_REST", 0.01)
    notes, tries = [], iter([KeyError("CPU"), PlacementError("no room"), None])
    ended = asyncio.Event()

    async def wait():
        await ended.wait()
        raise RuntimeError("a bug")

    class Workers(EnvWorkers):
        async def _start(self, number):
            if failure := next(tries):
                raise failure
            self.urls[number] = "http://new"
            ended.clear()

        def _kill(self, number):
            pass

    async def keep():
        workers = Workers(settings(), None, notes.append, 1, Timeline())
        workers.actors[0] = SimpleNamespace(wait=SimpleNamespace(remote=wait))
        workers.urls[0], workers.first = "http://old", ("http://old",)
        keeping = asyncio.create_task(workers.keep(0))
        ended.set()
        while len(notes) < 2:
            await asyncio.sleep(0.01)
        assert not keeping.done()
        keeping.cancel()

    asyncio.run(asyncio.wait_for(keep(), 20))
    assert notes == [
        "env worker 0 at http://old died and is placed again: a bug",
        "env worker 0 is back, at http://new",
    ]
    assert "KeyError('CPU')" in caplog.text
    assert [server.url for server in pool_of(("http://old",)).servers] == ["http://new"]


@pytest.mark.ray
def test_an_environment_that_no_node_can_import_is_told_with_its_name(cluster):
    with pytest.raises(PlacementError, match=r"env worker 0: .*nowhere_to_be_found"):
        asyncio.run(only_start("env.workers=1", entry_point="nowhere_to_be_found:Env"))


@pytest.mark.ray
def test_more_cpus_than_the_cluster_has_are_refused_at_once(cluster):
    with pytest.raises(PlacementError, match=r"env.workers=5 .* the cluster has 5 \(.*room for 4: lower"):
        asyncio.run(only_start("env.workers=5"))


@pytest.mark.parametrize(
    ("nodes", "workers", "cpus", "wanted"),
    [
        ([4, 4], 0, 1, 7),
        ([4, 4], 0, 2, 3),
        ([8], 2, 1, 2),
        ([4, 4], 7, 1, 7),
        ([3, 3], 0, 2, 2),
        ([2], 0, 0.25, 4),
        ([1, 1, 1], 0, 0.6, 2),
    ],
)
def test_as_many_workers_as_fit_beside_the_learner_unless_a_number_is_given(monkeypatch, nodes, workers, cpus, wanted):
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    assert env_workers_wanted(settings(f"env.workers={workers}", f"env.cpus={cpus}"), nodes) == wanted


@pytest.mark.parametrize(
    ("nodes", "overrides", "words"),
    [
        ([4, 4], ["env.workers=8"], "env.workers=8 of env.cpus=1 do not fit beside the learner's 1 CPUs"),
        ([3, 3], ["env.workers=3", "env.cpus=2"], r"room for 2"),
        ([4, 4], ["env.cpus=8"], r"env.cpus=8: no worker fits"),
        ([1], [], "no worker fits"),
    ],
)
def test_too_few_cpus_are_told_with_what_there_is(nodes, overrides, words):
    with pytest.raises(PlacementError, match=words) as caught:
        env_workers_wanted(settings(*overrides), nodes)
    assert f"the cluster has {sum(nodes)}" in str(caught.value)


def test_a_ray_of_the_runs_own_has_room_for_all_that_the_settings_allow(monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    for overrides in (["env.workers=2"], ["env.workers=0"], ["env.cpus=2"], ["learner.workers=3", "env.workers=1"]):
        config = settings(*overrides)
        count = env_workers_wanted(config, [own_ray_cpus(config)])
        assert 1 <= count <= 2
        assert config.env.workers in (0, count)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["env.placement=rayy"], "did you mean ray?"),
        (["env.placement=local", "env.workers=2"], "env.workers=2: has no effect without env.placement=ray"),
        (["env.workers=3"], "env.workers=3 x env.cpus=1: this machine has 2 CPUs"),
        (["env.cpus=4"], "env.cpus=4: this machine has 2 CPUs: lower it, or name a larger cluster by RAY_ADDRESS"),
        (["env.cpus=1.5"], "Ray takes whole CPUs only"),
        (["env.cpus=0"], "env.cpus=0.0: must be positive"),
        (["env.workers=-1"], "env.workers=-1: must be 0 or more"),
        (["env.url=[http://127.0.0.1:1/frozen_lake]"], "leave one of the two out"),
    ],
)
def test_what_cannot_be_placed_is_refused_before_anything_starts(monkeypatch, tmp_path, overrides, words):
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    with pytest.raises(ConfigError) as caught:
        validate(settings(*overrides, f"trainer.runs_dir={tmp_path}"))
    assert words in str(caught.value)


@pytest.mark.parametrize("address", ["127.0.0.1:{}", "ray://127.0.0.1:{}"])
def test_a_cluster_that_is_not_there_is_told_at_once(monkeypatch, tmp_path, address):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))  # and does not listen
        monkeypatch.setenv("RAY_ADDRESS", address.format(free.getsockname()[1]))
        with pytest.raises(ConfigError, match=r"RAY_ADDRESS=.*: no Ray cluster there \(Connection refused\): start it"):
            validate(settings(f"trainer.runs_dir={tmp_path}"))
