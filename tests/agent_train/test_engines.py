"""What both engines promise, on the embedded one and on a real vLLM server."""

import asyncio
import copy
import dataclasses
import json
import random
import signal
import time
from dataclasses import dataclass, field

import openai
import psutil
import pytest
import torch
from engine_models import MAX_LEN, build, manifest_of, perturb, reference_greedy, reference_logprobs
from learner_cases import InProcess, make_config, make_rows, one_rank
from transformers import AutoModelForCausalLM

from agent_train.config.extensions import engines
from agent_train.config.schema import Config, EngineConfig
from agent_train.data.packing import rank_batches
from agent_train.data.samples import TrainingSample
from agent_train.engine.base import EngineError, Load, Sampling
from agent_train.engine.embedded import EmbeddedEngine
from agent_train.engine.http import get
from agent_train.engine.teacher import Teacher
from agent_train.engine.vllm import MODEL_NAME
from agent_train.learner.fsdp import full_tensors
from agent_train.report.timeline import Timeline
from agent_train.rollout import places
from agent_train.rollout.agents import EngineBackend
from agent_train.rollout.journal import Journal
from agent_train.rollout.places import Places, fitting, follow_load
from agent_train.rollout.renderer import Renderer
from agent_train.weights.collective import broadcast_buckets, make_group
from agent_train.weights.files import CHANGES, WHOLE
from agent_train.weights.sync import WeightAddress, checksum_of_all, free_port, sync_files
from agentgym.core.messages import text_of, user
from agentgym.gateway import Gateway, Settings


@dataclass
class Served:
    """An engine, and a transformers model that always has the weights that the engine should have."""

    engine: object
    config: EngineConfig
    model: torch.nn.Module
    runner: asyncio.Runner
    progress: list = field(default_factory=list)
    group: object = None

    def run(self, coroutine, seconds: float = 60.0):
        return self.runner.run(asyncio.wait_for(coroutine, seconds))

    def generate(self, prompts, sampling_of):
        async def all_of_them():
            return await asyncio.gather(
                *(self.engine.generate(prompt, sampling_of(i)) for i, prompt in enumerate(prompts))
            )

        return self.run(all_of_them())

    def sync(self, version: int) -> tuple[dict, dict]:
        return self.run(self.syncing(version))

    async def syncing(self, version: int) -> tuple[dict, dict]:
        """Send the model's weights over a real collective while the engine receives."""
        if self.group is None:
            address = WeightAddress("127.0.0.1", free_port("127.0.0.1"), 1 + self.engine.receivers)
            self.group, _ = await asyncio.gather(
                asyncio.to_thread(make_group, address, 0, "cpu"), self.engine.connect_weights(address)
            )
        named = list(self.model.named_parameters())
        manifest = manifest_of(named)
        receiving = asyncio.ensure_future(self.engine.receive_weights(manifest, version))
        await asyncio.sleep(0.3)
        assert not receiving.done()
        sent = await asyncio.to_thread(broadcast_buckets, self.group, manifest, [p for _, p in named])
        return sent, await receiving


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return build(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module", params=["embedded", pytest.param("vllm", marks=[pytest.mark.vllm, pytest.mark.ray])])
def served(request, model_dir, workers_as_forks, tmp_path_factory):
    torch.set_num_threads(1)
    logs = tmp_path_factory.mktemp("logs")
    config = EngineConfig(name=request.param, max_model_len=MAX_LEN, kv_cache_bytes=32 << 20, start_timeout=240)
    config.adaptive = config.name == "vllm"
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    progress: list = []
    if request.param == "vllm":
        import ray

        with workers_as_forks():
            ray.init(address="local", num_cpus=2, include_dashboard=False, logging_level="error", log_to_driver=False)
    with asyncio.Runner() as runner:
        engine = runner.run(
            engines.load(config.name)(
                config,
                model_dir,
                logs,
                dtype="float32",
                deterministic=False,
                timeline=Timeline(logs / "timeline.json"),
                on_progress=lambda line, seconds: progress.append((line, seconds)),
            )
        )
        pids = [pid_of(runner, server) for server in servers_of(engine)]
        family = [p for pid in pids for p in (psutil.Process(pid), *psutil.Process(pid).children(recursive=True))]
        yield Served(engine, config, model, runner, progress)
        begun = time.monotonic()
        runner.run(engine.close())
        runner.run(engine.close())
        assert time.monotonic() - begun < 60
        _, left = psutil.wait_procs(family, timeout=30)
        assert not left
        if request.param == "vllm":
            assert (logs / "vllm-0.log").stat().st_size > 0
            ray.shutdown()


@pytest.fixture
def learner(served, model_dir):
    """A learner that sends its weights by files; `engine.weights` is the engine's."""
    config = dataclasses.replace(make_config(lr=0.01), engine=served.config)
    with one_rank(model_dir, config) as worker:
        yield InProcess(worker, config)


def update(learner, served, seed: int) -> None:
    """One update, after which the model has the learner's weights."""
    worker = learner.actors[0]
    worker.update([rank_batches(make_rows(seed=seed), 1, 10_000)[0]])
    served.model.load_state_dict(dict(full_tensors(worker.module)), strict=False)


def servers_of(engine) -> list:
    return engine.servers.all if hasattr(engine, "servers") else []


def pid_of(runner, server) -> int:
    return runner.run(server.call("state")).pid


def some_prompts(count: int, longest: int, seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(3, 260) for _ in range(rng.randrange(1, longest))] for _ in range(count)]


def test_ids_come_back_with_a_logprob_and_a_version_each(served) -> None:
    (completion,) = served.generate([[5, 6, 7]], lambda i: Sampling(9, seed=0))
    assert len(completion.ids) == len(completion.logprobs) == len(completion.versions) == 9
    assert all(0 <= token < served.model.config.vocab_size for token in completion.ids)
    assert set(completion.versions) == {served.engine.version}
    assert completion.finish_reason == "length"


def test_a_stop_token_ends_the_completion_and_is_part_of_it(served) -> None:
    prompt = [5, 6, 7]
    free = served.generate([prompt], lambda i: Sampling(9, seed=3))[0]
    stop = free.ids[4]
    cut = served.generate([prompt], lambda i: Sampling(9, seed=3, stop_token_ids=(stop,)))[0]
    first = free.ids.index(stop)
    assert cut.ids == free.ids[: first + 1]
    assert cut.logprobs == pytest.approx(free.logprobs[: first + 1], abs=1e-5)
    assert cut.finish_reason == "stop"


def test_a_stop_token_that_is_the_last_one_allowed_is_a_stop(served) -> None:
    prompt = [5, 6, 7]
    first = served.generate([prompt], lambda i: Sampling(1, seed=3))[0].ids[0]
    assert served.generate([prompt], lambda i: Sampling(1, seed=3, stop_token_ids=(first,)))[0].finish_reason == "stop"


def test_only_the_given_stop_tokens_stop(served) -> None:
    """The end-of-sequence id of the model's config does not: what stops is the renderer's decision."""
    eos = served.model.config.eos_token_id
    hot = served.generate([[5, 6]] * 48, lambda i: Sampling(60, temperature=2.0, seed=i))
    assert any(eos in completion.ids[:-1] for completion in hot)
    assert {completion.finish_reason for completion in hot} == {"length"}


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_logprobs_are_those_of_logits_over_temperature(served, temperature: float) -> None:
    prompts = some_prompts(24, 200)
    completions = served.generate(prompts, lambda i: Sampling(12, temperature=temperature, seed=i))
    gaps = torch.cat(
        [
            (reference_logprobs(served.model, prompt, c.ids, temperature) - torch.tensor(c.logprobs)).abs()
            for prompt, c in zip(prompts, completions, strict=True)
        ]
    )
    assert gaps.mean() < 1e-4
    assert gaps.max() < 1e-3


def test_a_server_is_a_teacher_that_scores_exact_ids_as_transformers_does(served, model_dir, monkeypatch) -> None:
    if not servers_of(served.engine):
        pytest.skip("the embedded engine has no endpoint")
    config = Config()
    config.teacher.url, config.teacher.model = f"{served.engine.servers.all[0].url}/v1", MODEL_NAME
    monkeypatch.setenv("TEACHER_API_KEY", served.engine.key)
    rng = random.Random(3)
    rows = [
        TrainingSample(ids, [t > 0 and rng.random() < 0.5 for t in range(len(ids))], [0.0] * len(ids), temperature=0.5)
        for ids in some_prompts(12, 60, seed=8)
    ]

    async def scored():
        teacher = await Teacher.connect(config, model_dir)
        try:
            return await teacher.logprobs(rows)
        finally:
            await teacher.close()

    for row, found in zip(rows, served.run(scored()), strict=True):
        expected = (
            [0.0, *reference_logprobs(served.model, row.ids[:1], row.ids[1:], 1.0).tolist()] if row.sampled else found
        )
        wanted = [x if on else 0.0 for x, on in zip(expected, row.mask, strict=True)]
        assert found == pytest.approx(wanted, abs=1e-3)


def test_temperature_zero_is_greedy(served) -> None:
    for prompt in some_prompts(4, 40, seed=5):
        (completion,) = served.generate([prompt], lambda i: Sampling(8, temperature=0.0))
        assert completion.ids == reference_greedy(served.model, prompt, 8)


def test_a_seed_decides_whatever_comes_with_it(served) -> None:
    prompts = some_prompts(12, 60, seed=2)
    together = served.generate(prompts, lambda i: Sampling(12, seed=100 + i))
    alone = [served.generate([p], lambda _, i=i: Sampling(12, seed=100 + i))[0] for i, p in enumerate(prompts)]
    assert [c.ids for c in alone] == [c.ids for c in together]
    other = served.generate(prompts, lambda i: Sampling(12, seed=200 + i))
    assert [c.ids for c in other] != [c.ids for c in together]


def test_without_a_seed_samples_differ(served) -> None:
    completions = served.generate([[5, 6, 7]] * 8, lambda i: Sampling(12))
    assert len({tuple(c.ids) for c in completions}) > 1


def test_samples_follow_the_distribution(served) -> None:
    """2,000 first tokens against transformers' probabilities; the bound is 5 standard deviations of each share."""
    count = 2000
    with torch.no_grad():
        probabilities = served.model(torch.tensor([[9, 8, 7]])).logits[0, -1].float().softmax(-1)
    drawn = served.generate([[9, 8, 7]] * count, lambda i: Sampling(1, seed=i))
    shares = torch.bincount(torch.tensor([c.ids[0] for c in drawn]), minlength=len(probabilities)) / count
    bound = 5 * (probabilities * (1 - probabilities) / count).sqrt() + 1.0 / count
    assert ((shares - probabilities).abs() < bound).all()


def test_many_seeded_long_prompts_at_once_are_all_answered(served) -> None:
    """More prompt tokens than one scheduling step holds: prefill in chunks used to kill a vLLM server on a CPU."""
    prompts = [[3 + (i * 7 + j) % 250 for j in range(400)] for i in range(64)]
    assert all(len(c.ids) == 4 for c in served.generate(prompts, lambda i: Sampling(4, seed=i)))


def test_a_request_that_does_not_fit_is_refused_at_once_with_its_numbers(served) -> None:
    with pytest.raises(ValueError, match=rf"{MAX_LEN - 4} prompt tokens and 5 new ones .* {MAX_LEN}"):
        served.generate([[5] * (MAX_LEN - 4)], lambda i: Sampling(5))
    assert len(served.generate([[5] * (MAX_LEN - 5)], lambda i: Sampling(5))[0].ids) == 5
    with pytest.raises(ValueError, match="no token ids"):
        served.generate([[]], lambda i: Sampling(5))
    with pytest.raises(ValueError, match="max_tokens"):
        served.generate([[5]], lambda i: Sampling(0))


def test_a_cancelled_request_leaves_the_engine_well(served) -> None:
    async def cancel_some():
        tasks = [asyncio.ensure_future(served.engine.generate([5, 6, i + 3], Sampling(200))) for i in range(8)]
        await asyncio.sleep(0.05)
        for task in tasks[::2]:
            task.cancel()
        return await asyncio.gather(*tasks, return_exceptions=True)

    results = served.run(cancel_some())
    assert all(isinstance(r, asyncio.CancelledError) for r in results[::2])
    assert all(len(r.ids) == 200 for r in results[1::2])
    served.run(served.engine.live())


def test_new_weights_arrive_whole_and_answer_from_then_on(served) -> None:
    """Also a long prompt whose prefix was cached under the old weights, and twice, because the second sync reuses the group."""
    long_prompt = [3 + i % 200 for i in range(300)]
    for round_number in (1, 2):
        version = served.engine.version + 1
        before = served.generate([long_prompt, long_prompt[:20]], lambda i: Sampling(12, temperature=0.0))
        perturb(served.model, seed=100 + version)
        sent, arrived = served.sync(version)
        assert sent == arrived
        assert len(sent) == len(list(served.model.parameters()))
        assert served.engine.version == version, round_number
        after = served.generate([long_prompt, long_prompt[:20]], lambda i: Sampling(12, temperature=0.0))
        for prompt, old, new in zip([long_prompt, long_prompt[:20]], before, after, strict=True):
            assert new.ids == reference_greedy(served.model, prompt, 12)
            gaps = reference_logprobs(served.model, prompt, new.ids, 1.0) - torch.tensor(new.logprobs)
            assert gaps.abs().mean() < 1e-4
            assert new.logprobs != pytest.approx(old.logprobs, abs=1e-3)
            assert set(new.versions) == {version}
            assert set(old.versions) == {version - 1}


def test_a_server_that_sleeps_answers_nothing_until_weights_wake_it(served) -> None:
    """A vLLM on a CPU keeps its memory asleep. Its scheduler stops all the same, and the order of the calls is the same."""
    if not servers_of(served.engine):
        pytest.skip("the embedded engine does not sleep")
    version = served.engine.version + 1

    async def through_the_night():
        url = served.engine.servers.all[0].url
        await served.engine.sleep()
        asked = asyncio.ensure_future(served.engine.generate([5, 6, 7], Sampling(9, temperature=0.0)))
        paused = await get(served.engine.servers.client, f"{url}/is_paused", 5.0)
        perturb(served.model, seed=900)
        await served.syncing(version)
        return json.loads(paused)["is_paused"], await asked

    paused, completion = served.run(through_the_night())
    assert paused
    assert completion.ids == reference_greedy(served.model, [5, 6, 7], 9)
    assert set(completion.versions) == {version}


def test_equal_weights_have_equal_checksums_and_equal_answers(served) -> None:
    sampling = Sampling(12, seed=1)
    before = served.generate([[5, 6, 7]], lambda i: sampling)[0]
    first, _ = served.sync(served.engine.version + 1)
    second, _ = served.sync(served.engine.version + 1)
    assert first == second
    after = served.generate([[5, 6, 7]], lambda i: sampling)[0]
    assert after.ids == before.ids
    assert after.logprobs == before.logprobs


@pytest.mark.parametrize("transport", ["disk", "delta"])
def test_weights_arrive_by_files_as_they_do_by_the_collective(
    served, learner, transport, tmp_path, monkeypatch
) -> None:
    """By delta the folders after the first hold changes, until they change what a worker does not hold."""
    if not servers_of(served.engine):
        pytest.skip("the embedded engine reads no files")
    monkeypatch.setattr(served.config, "weights", transport)
    prompt, rank = [3 + i % 37 for i in range(300)], learner.actors[0]
    delta = transport == "delta"
    for number, newest in enumerate(("000000", "000001", "000002", "000004" if delta else "000003")):
        update(learner, served, seed=number)
        if number == 3:
            rank._written.sums["lm_head.weight"] = 1
        version = served.engine.version + 1
        found = served.run(sync_files(learner, served.engine, tmp_path, version))
        assert max(folder.name for folder in tmp_path.iterdir()) == newest
        assert (tmp_path / newest / CHANGES).is_file() == (delta and number in (1, 2))
        (answer,) = served.generate([prompt], lambda i: Sampling(12, seed=1))
        gaps = reference_logprobs(served.model, prompt, answer.ids, 1.0) - torch.tensor(answer.logprobs)
        assert gaps.abs().max() < 1e-3
        assert set(answer.versions) == {version}
    sent, _ = served.sync(version)
    assert found == checksum_of_all(sent)


def test_a_torn_folder_is_refused_and_the_weights_that_served_go_on(served, learner, tmp_path) -> None:
    if not servers_of(served.engine):
        pytest.skip("the embedded engine reads no files")
    (before,) = served.generate([[5, 6, 7]], lambda i: Sampling(9, seed=0))
    served.run(learner.save_weights(tmp_path / "0", whole=True))
    file = tmp_path / "0" / WHOLE
    file.write_bytes(file.read_bytes()[:-1000])
    with pytest.raises(EngineError, match=r"fetch_weights.*"):
        served.run(served.engine.fetch_weights(tmp_path / "0"))
    assert served.generate([[5, 6, 7]], lambda i: Sampling(9, seed=0)) == [before]


@pytest.mark.parametrize("keep_cache", [False, True])
def test_an_update_in_mid_answer_leaves_no_token_with_a_wrong_version(served, keep_cache, monkeypatch) -> None:
    """Answers that it interrupts go on, by new keys and values or with those that they have; others never see old ones."""
    monkeypatch.setattr(served.config, "keep_cache", keep_cache)
    served.sync(served.engine.version + 1)  # which makes the weight group, if no test before has
    version = served.engine.version + 1
    before = copy.deepcopy(served.model)
    prompts = [[3 + (i * 11 + j) % 250 for j in range(120)] for i in range(4)]

    async def interrupted():
        asked = [asyncio.ensure_future(served.engine.generate(p, Sampling(380, seed=i))) for i, p in enumerate(prompts)]
        await asyncio.sleep(0.2)
        if servers_of(served.engine):  # when a later one is answered, these have begun
            await served.engine.generate(prompts[0][:9], Sampling(2))
        perturb(served.model, seed=100 + version)
        loading = asyncio.ensure_future(served.syncing(version))
        await asyncio.sleep(0.1)
        late = await served.engine.generate(prompts[0], Sampling(20, seed=9))
        await loading
        return await asyncio.gather(*asked), late

    answers, late = served.run(interrupted())
    again = served.generate(prompts, lambda i: Sampling(20, seed=i))
    for prompt, found in [(prompts[0], late), *zip(prompts, again, strict=True)]:
        assert set(found.versions) == {version}
        gaps = reference_logprobs(served.model, prompt, found.ids, 1.0) - torch.tensor(found.logprobs)
        assert gaps.abs().max() < 1e-3
    in_parts = 0
    for prompt, found in zip(prompts, answers, strict=True):
        assert len(found.ids) == 380
        assert found.versions == sorted(found.versions)
        assert set(found.versions) <= {version - 1, version}
        at = found.versions.count(version - 1)
        in_parts += 0 < at < 380
        said = torch.tensor(found.logprobs)
        assert (reference_logprobs(before, prompt, found.ids, 1.0) - said)[:at].abs().max() < 1e-3
        gaps = (reference_logprobs(served.model, prompt, found.ids, 1.0) - said)[at:].abs()
        if at < 380:
            assert (gaps.mean() > 1e-3) if keep_cache else (gaps.max() < 1e-3)
    # The embedded engine loads between its batches.
    assert in_parts == (len(prompts) if servers_of(served.engine) else 0)


def test_a_stream_tells_the_ids_of_the_answer_as_they_are_sampled(served) -> None:
    pieces: list[list[int]] = []
    sampling = Sampling(40, seed=3)
    whole = served.run(served.engine.generate([5, 6, 7], sampling))
    streamed = served.run(served.engine.stream([5, 6, 7], sampling, "e", pieces.append))
    assert (streamed.ids, streamed.versions, streamed.finish_reason) == (whole.ids, whole.versions, whole.finish_reason)
    assert streamed.logprobs == pytest.approx(whole.logprobs, abs=1e-4)
    if servers_of(served.engine):
        assert len(pieces) > 1
        assert [id for piece in pieces for id in piece] == streamed.ids
    else:
        assert pieces == []


def test_an_agent_reads_its_answer_as_it_is_sampled(served, model_dir, tmp_path) -> None:
    async def play() -> tuple[list[str], str]:
        backend = EngineBackend(served.engine, Renderer.of_folder(model_dir))
        async with Gateway(backend, tmp_path, settings=Settings(temperature=1.0, max_tokens=60)) as gateway:
            backend.begin("e", "key", Journal())
            episode, key = await gateway.open("e", seed=1)
            async with openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key=key, max_retries=0) as client:
                asked = {"model": "policy", "messages": [user("up or down?")]}
                stream = await client.chat.completions.create(**asked, stream=True)
                said = [chunk.choices[0].delta.content async for chunk in stream if chunk.choices]
        (call,) = episode.tree.calls.values()
        return [piece for piece in said if piece], text_of(call.answer.message)

    pieces, text = served.run(play())
    assert "".join(pieces) == text
    assert (len(pieces) > 1) == bool(servers_of(served.engine))


def test_places_follow_the_load_that_a_server_tells(served, monkeypatch) -> None:
    """Its cache holds 64 of these requests: 62 at once are too many, and 8 too few."""
    if not servers_of(served.engine):
        assert served.run(served.engine.loads()) == []
        pytest.skip("the embedded engine tells no load")
    monkeypatch.setattr(places, "SECONDS", 0.05)
    engine, rng, room = served.engine, random.Random(0), Places(62)

    async def episode() -> None:
        await room.take(0)
        prompt = [rng.randrange(3, 260) for _ in range(450)]
        assert len((await engine.generate(prompt, Sampling(60, seed=1))).ids) == 60
        room.leave()

    async def fullest(count: int) -> Load:
        episodes, seen = asyncio.gather(*(episode() for _ in range(count))), []
        while not episodes.done():
            seen += await engine.loads()
            await asyncio.sleep(0.02)
        await episodes
        return max(seen, key=lambda load: load.cache)

    async def run() -> None:
        full = max([await fullest(62) for _ in range(3)], key=lambda load: load.cache)  # a look may miss the moment
        assert full.cache > 0.9
        assert fitting(62, 62, 62, [full]) == 55
        following = asyncio.create_task(follow_load(room, 32, engine, Timeline()))
        await asyncio.sleep(0)
        assert room.size == 8
        await fullest(60)
        following.cancel()
        assert room.size > 8
        (idle,) = await engine.loads()
        assert idle.waiting == 0

    served.run(run(), 120)


def test_sessions_are_counted(served) -> None:
    async def episode():
        served.engine.open_session()
        assert served.engine.live_sessions == 1
        completion = await served.engine.generate([5, 6], Sampling(2, seed=0))
        served.engine.close_session()
        return completion

    assert len(served.run(episode()).ids) == 2
    assert served.engine.live_sessions == 0
    with pytest.raises(ValueError, match="only 0 are open"):
        served.engine.close_session()


def test_startup_progress_is_told(served) -> None:
    if isinstance(served.engine, EmbeddedEngine):
        assert served.progress == []
        return
    seconds = [seconds for _, seconds in served.progress]
    assert len(seconds) > 3
    assert seconds == sorted(seconds)
    assert len({line for line, _ in served.progress}) > 3


def test_a_server_that_dies_is_started_again_and_its_answers_come_with_the_present_weights(
    served, learner, tmp_path, monkeypatch
) -> None:
    """One that hangs is in `test_two_servers.py`."""
    if not servers_of(served.engine):
        pytest.skip("the embedded engine has no server")
    monkeypatch.setattr(served.config, "weights", "delta")
    update(learner, served, seed=0)
    served.run(sync_files(learner, served.engine, tmp_path, served.engine.version + 1))
    engine, version = served.engine, served.engine.version

    async def run() -> None:
        before = engine.servers.all[0]
        state = await before.call("state")
        supervisor = psutil.Process(state.pid)
        family = supervisor.children(recursive=True)
        prompts = [[5, 6, i + 3] for i in range(16)]
        asked = [asyncio.ensure_future(engine.generate(p, Sampling(100, seed=0))) for p in prompts]
        await asyncio.sleep(0.1)
        family[0].send_signal(signal.SIGKILL)
        await engine.stale()
        assert engine.servers.all[0] is not before
        assert not engine.connected, "nobody joins a weight group that has lost a member"
        late = asyncio.ensure_future(engine.generate([5, 6], Sampling(5)))
        await asyncio.sleep(0.2)
        assert not late.done(), "a new server answers nobody before it has weights"
        # Of no change, which only the new server cannot take.
        await sync_files(learner, engine, tmp_path, version)
        assert (tmp_path / "000001" / CHANGES).is_file()
        assert (tmp_path / "000002" / WHOLE).is_file()
        for prompt, answer in zip(prompts, await asyncio.gather(*asked), strict=True):
            assert set(answer.versions) == {version}
            gaps = reference_logprobs(served.model, prompt, answer.ids, 1.0) - torch.tensor(answer.logprobs)
            assert gaps.abs().max() < 1e-3
        await late
        engine.servers.timeline.write()
        told = engine.servers.timeline.path.read_text()
        assert all(words in told for words in ("starts again", f"loads version {version}", "requests of engine 0"))
        _, left = psutil.wait_procs([supervisor, *family], timeout=30)
        assert not left

    served.run(run(), 200)
