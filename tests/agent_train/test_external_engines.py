"""Engines that others run: a real vLLM server that the test starts, and a double of SGLang, which cannot be installed here."""

import asyncio
import dataclasses
import json
import os
import sys
import time
from pathlib import Path

import pytest
import torch
from aiohttp import web
from engine_models import MAX_LEN, build, manifest_of, perturb, reference_greedy, reference_logprobs
from sglang_double import SglangDouble, running
from transformers import AutoConfig, AutoModelForCausalLM

from agent_train.config.extensions import engines
from agent_train.config.schema import EngineConfig
from agent_train.engine import external, servers
from agent_train.engine.base import EngineError, EngineLostError, Sampling
from agent_train.engine.external import OpenAIEngine, SglangEngine
from agent_train.engine.http import open_client, post
from agent_train.report.metrics import read_metrics
from agent_train.weights.files import WHOLE, WeightCopy
from agent_train.weights.sync import sync_files
from agentgym.processes.vllm_server import VllmOptions, VllmServer

PROMPT = [5, 6, 7]
KEY = "a-key-of-the-test"


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return build(tmp_path_factory.mktemp("model"))


def weights_of(model_dir, seed: int | None = None):
    """The model of a folder, or one with other weights."""
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    if seed is not None:
        perturb(model, seed)
    return model


@dataclasses.dataclass
class Writer:
    """Writes a model's weights as rank 0 of a learner does."""

    model: torch.nn.Module

    async def save_weights(self, folder: str | Path, whole: bool) -> dict[str, int]:
        named = list(self.model.named_parameters())
        return WeightCopy().write(manifest_of(named), [tensor for _, tensor in named], Path(folder), keep=False)


def with_engine(model_dir, urls, call, name="sglang", **settings):
    """Run `call(engine)` with an engine on servers, which have no weights of the run yet."""
    given = {"max_model_len": 256, "start_timeout": 0.5, "request_timeout": 20.0, **settings}
    config = EngineConfig(name=name, urls=list(urls), weights="disk", **given)

    async def run():
        engine = await engines.load(name)(config, model_dir, "logs", dtype="float32", seed=0, deterministic=False)
        try:
            return await call(engine)
        finally:
            await engine.close()
            await engine.close()

    return asyncio.run(asyncio.wait_for(run(), 180))  # a vLLM server may have to start first


def untrained(model_dir, **settings) -> SglangDouble:
    """A double that does not stop where its model's config says: random weights may sample anything."""
    double = SglangDouble(model_dir, **settings)
    double.eos = None
    return double


def assert_sampled_by(model, answer, prompt=PROMPT, temperature=1.0):
    gaps = reference_logprobs(model, prompt, answer.ids, temperature) - torch.tensor(answer.logprobs)
    assert gaps.abs().max() < 1e-3


async def send(engine, model, folder, version):
    return await sync_files(Writer(model), engine, folder, version)


# ---- what both promise


@pytest.fixture(scope="module")
def untied_dir(model_dir, tmp_path_factory):
    """vLLM on a CPU keeps its copy of tied output weights."""
    folder = tmp_path_factory.mktemp("untied")
    config = AutoConfig.from_pretrained(model_dir)
    config.tie_word_embeddings = False
    torch.manual_seed(0)  # no file has the head's weights, which are drawn
    model = AutoModelForCausalLM.from_pretrained(model_dir, config=config, dtype=torch.float32)
    perturb(model, seed=2)
    model.save_pretrained(str(folder))
    return str(folder)


@pytest.fixture(scope="module")
def vllm_url(untied_dir, tmp_path_factory):
    """A vLLM server as its users start it, with none of our code but the guard of its key."""
    arguments = (
        "--dtype",
        "float32",
        "--max-num-seqs",
        "16",
        "--logprobs-mode",
        "processed_logprobs",
        "--enable-scale-out",
    )
    log, cache = tmp_path_factory.mktemp("vllm") / "vllm.log", {"context": MAX_LEN, "kv_cache_bytes": 32 << 20}
    given = {"key": KEY, "arguments": arguments, "environment": {"VLLM_SERVER_DEV_MODE": "1"}}
    server = VllmServer(VllmOptions(untied_dir, "policy", str(log), gpu=False, **cache, **given))
    yield server.launch()
    server.stop()


@pytest.fixture(params=["sglang", *(pytest.param(kind, marks=pytest.mark.vllm) for kind in ("openai", "completions"))])
def served(request, untied_dir, monkeypatch):
    """The arguments of `with_engine` for a server that has other weights than the run."""
    monkeypatch.setenv("ENGINE_API_KEY", KEY)
    if request.param != "sglang":
        if request.param == "completions":  # as of a server that does not tell the weights of each token
            monkeypatch.setattr(OpenAIEngine, "ids_path", "/nowhere")
        url = request.getfixturevalue("vllm_url")
        yield {"model_dir": untied_dir, "urls": [f"{url}/v1/"], "name": "openai", "start_timeout": 120}
        return
    double = untrained(untied_dir, key=KEY)
    with running(double):
        yield {"model_dir": untied_dir, "urls": [double.url]}


def test_ids_and_logprobs_are_the_models_and_after_new_weights_by_disk_those_of_the_new(served, tmp_path) -> None:
    first, second = weights_of(served["model_dir"], seed=10), weights_of(served["model_dir"], seed=11)

    async def run(engine):
        for version, model in ((7, first), (8, second)):
            await send(engine, model, tmp_path, version)
            assert engine.version == version
            answers = await asyncio.gather(*(engine.generate(PROMPT, Sampling(9), f"e{i}") for i in range(6)))
            for answer in answers:
                assert_sampled_by(model, answer)
                assert answer.versions == [version] * 9
                assert answer.finish_reason == "length"
            if not isinstance(engine, SglangEngine):  # which is refused with another temperature
                assert_sampled_by(model, await engine.generate(PROMPT, Sampling(9, 0.5, seed=1)), temperature=0.5)
            greedy = await engine.generate(PROMPT, Sampling(6, temperature=0.0))
            assert greedy.ids == reference_greedy(model, PROMPT, 6)
            assert_sampled_by(model, greedy)

    with_engine(call=run, **served)


def test_a_stop_token_ends_the_answer_and_is_part_of_it_and_of_its_reason(served, tmp_path) -> None:
    model = weights_of(served["model_dir"], seed=10)
    said = reference_greedy(model, PROMPT, 8)
    stop = next(token for token in said[3:] if token not in said[:3])
    length = said.index(stop) + 1

    async def run(engine):
        await send(engine, model, tmp_path, 1)
        for limit in (length, length + 1):  # also where it is the last one allowed
            answer = await engine.generate(PROMPT, Sampling(limit, temperature=0.0, stop_token_ids=(stop,)))
            assert (answer.ids, answer.finish_reason) == (said[:length], "stop")

    with_engine(call=run, **served)


def test_a_server_gets_no_request_before_it_has_the_runs_weights(served) -> None:
    async def run(engine):
        with pytest.raises(EngineLostError, match=r"http://127\.0\.0\.1:\d+: it has no weights of this run yet; start"):
            await engine.generate(PROMPT, Sampling(2))

    with_engine(call=run, **served)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"max_model_len": 4096}, r"http://127.*tokens, less than engine\.max_model_len=4096: lower that"),
        ({"key": "another"}, r"http://127.*answered 401.*its key goes into ENGINE_API_KEY; start it with: .*MODEL"),
    ],
)
def test_what_a_run_cannot_use_is_told_at_the_start(served, settings, words, monkeypatch) -> None:
    monkeypatch.setenv("ENGINE_API_KEY", settings.get("key", KEY))
    others = {name: value for name, value in settings.items() if name != "key"}
    with pytest.raises(EngineError, match=words) as refused:
        with_engine(call=None, **{**served, **others})
    assert "another" not in str(refused.value)
    assert KEY not in str(refused.value)


# ---- vLLM


@pytest.mark.vllm
@pytest.mark.parametrize("tells", [True, False])
def test_what_others_load_into_a_vllm_server_is_noticed(vllm_url, untied_dir, tmp_path, monkeypatch, tells) -> None:
    """So is a server that was started again: its weights are named "default"."""
    monkeypatch.setenv("ENGINE_API_KEY", KEY)
    if not tells:
        monkeypatch.setattr(OpenAIEngine, "ids_path", "/nowhere")

    async def run(engine):
        assert engine.servers[0].tells_versions == tells
        await send(engine, weights_of(untied_dir), tmp_path, 1)
        async with open_client(KEY) as other:
            told = await post(other, vllm_url, "/weight_info", None, 5, "asking", method="GET")
            assert told["weight_version"].startswith("1-")
            await post(other, vllm_url, "/update_weight_version", {"new_version": "1"}, 5, "naming")
        with pytest.raises(EngineLostError, match=r"has weights '1', not '1-\w+': it was started again, or somebody"):
            await engine.generate(PROMPT, Sampling(2))
        await send(engine, weights_of(untied_dir), tmp_path, 2)
        assert (await engine.generate(PROMPT, Sampling(2))).versions == [2, 2]

    with_engine(untied_dir, [vllm_url], run, "openai", start_timeout=120)


@pytest.mark.vllm
def test_tied_weights_on_a_cpu_are_refused(vllm_url, model_dir, monkeypatch) -> None:
    monkeypatch.setenv("ENGINE_API_KEY", KEY)
    with pytest.raises(EngineError, match=r"tied output weights.*take engine=vllm"):
        with_engine(model_dir, [vllm_url], None, "openai", start_timeout=120)


def test_a_vllm_server_without_its_development_mode_is_told_how_to_start(model_dir) -> None:
    """A double of one has only the paths that it has all the same."""
    app = web.Application()

    async def health(request):
        return web.Response()

    async def models(request):
        return web.json_response({"data": [{"id": "m", "max_model_len": 512, "parent": None}]})

    app.router.add_get("/health", health)
    app.router.add_get("/v1/models", models)

    async def run():
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        config = EngineConfig(name="openai", urls=[f"http://127.0.0.1:{runner.addresses[0][1]}"], max_model_len=64)
        try:
            await engines.load("openai")(config, model_dir, "logs", dtype="float32")
        finally:
            await runner.cleanup()

    with pytest.raises(
        EngineError, match=r"server_info.* answered 404.*start it with: VLLM_SERVER_DEV_MODE=1 vllm serve"
    ):
        asyncio.run(asyncio.wait_for(run(), 20))


# ---- SGLang, and what goes wrong with servers of either kind


@pytest.fixture
def pair(model_dir):
    doubles = untrained(model_dir), untrained(model_dir)
    with running(*doubles):
        yield doubles


def test_weights_come_as_a_whole_model_folder(pair, model_dir, tmp_path) -> None:
    model = weights_of(model_dir, seed=3)

    async def run(engine):
        await send(engine, model, tmp_path, 4)

    with_engine(model_dir, [double.url for double in pair], run)
    assert [double.loaded for double in pair] == [[tmp_path / "000000"]] * 2
    assert {file.name for file in (tmp_path / "000000").iterdir()} == {WHOLE, "config.json"}
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "000000")
    assert all(torch.equal(one, other) for one, other in zip(loaded.parameters(), model.parameters(), strict=True))


def test_weights_wait_for_requests_in_flight_and_new_requests_for_the_weights(pair, model_dir, tmp_path) -> None:
    old, new = weights_of(model_dir, seed=3), weights_of(model_dir, seed=4)
    pair[0].seconds = pair[1].seconds = 0.4  # they assert that no weights come meanwhile

    async def run(engine):
        await send(engine, old, tmp_path, 1)
        asked = [asyncio.ensure_future(engine.generate(PROMPT, Sampling(5))) for _ in range(4)]
        await asyncio.sleep(0.1)
        loading = asyncio.ensure_future(send(engine, new, tmp_path, 2))
        await asyncio.sleep(0.1)
        late = await engine.generate(PROMPT, Sampling(5))
        await loading
        assert_sampled_by(new, late)
        assert late.versions == [2] * 5
        for answer in await asyncio.gather(*asked):
            assert_sampled_by(old, answer)
            assert answer.versions == [1] * 5

    with_engine(model_dir, [double.url for double in pair], run)


def test_requests_that_do_not_end_stop_the_load_by_the_name_of_their_limit(
    pair, model_dir, tmp_path, monkeypatch
) -> None:
    monkeypatch.setattr(servers, "IDLE_SECONDS", 0.1)

    async def run(engine):
        await send(engine, weights_of(model_dir), tmp_path, 1)
        engine._router.pick([0])  # as one that hangs
        with pytest.raises(EngineError, match=r"in flight took longer than engine\.request_timeout=0\.2 s"):
            await send(engine, weights_of(model_dir), tmp_path, 2)
        assert (await engine.generate(PROMPT, Sampling(2))).versions == [1, 1]

    with_engine(model_dir, [double.url for double in pair], run, request_timeout=0.2)


def test_the_turns_of_an_episode_go_to_one_server(pair, model_dir, tmp_path) -> None:
    async def run(engine):
        await send(engine, weights_of(model_dir), tmp_path, 1)
        for _ in range(3):
            await engine.generate(PROMPT, Sampling(2), "one")
        await asyncio.gather(*(engine.generate(PROMPT, Sampling(2), "other") for _ in range(1)))

    with_engine(model_dir, [double.url for double in pair], run)
    assert sorted(double.generated for double in pair) in ([0, 4], [1, 3])


@pytest.mark.parametrize(("fault", "value"), [("dies", True), ("lies", "default"), ("key", "a new one")])
def test_a_server_that_fails_is_left_out_until_it_has_the_next_weights(pair, model_dir, tmp_path, fault, value) -> None:
    bad, good = pair
    healthy = getattr(bad, fault)

    async def run(engine):
        await send(engine, weights_of(model_dir), tmp_path, 1)
        setattr(bad, fault, value)
        answers = await asyncio.gather(*(engine.generate(PROMPT, Sampling(3)) for _ in range(6)))
        assert {tuple(answer.versions) for answer in answers} == {(1, 1, 1)}
        assert await engine.losses() == 1
        await engine.live()
        setattr(bad, fault, healthy)
        before = bad.generated
        await engine.generate(PROMPT, Sampling(3))
        assert bad.generated == before, "it has not got weights since"
        new = weights_of(model_dir, seed=8)
        await send(engine, new, tmp_path, 2)
        for answer in await asyncio.gather(*(engine.generate(PROMPT, Sampling(3)) for _ in range(6))):
            assert_sampled_by(new, answer)
        assert bad.generated > before

    with_engine(model_dir, [bad.url, good.url], run)


def test_a_server_that_hangs_is_left_out_when_a_turn_has_been_given_up(pair, model_dir, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(external, "HEALTH_SECONDS", 0.2)

    async def run(engine):
        await send(engine, weights_of(model_dir), tmp_path, 1)
        pair[0].hangs = True
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(engine.generate(PROMPT, Sampling(2), "one"), 0.2)
        await asyncio.sleep(0.3)
        assert (await engine.generate(PROMPT, Sampling(2), "one")).versions == [1, 1]
        assert [double.generated for double in pair] == [0, 1]
        pair[0].hangs = False

    with_engine(model_dir, [double.url for double in pair], run)


def test_one_that_still_hangs_holds_up_no_load_of_weights(pair, model_dir, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(external, "HEALTH_SECONDS", 0.2)
    monkeypatch.setattr(external, "IDLE_HEALTH_SECONDS", 0.2)

    async def run(engine):
        await send(engine, weights_of(model_dir), tmp_path, 1)
        pair[0].hangs = True
        assert (await engine.generate(PROMPT, Sampling(2), "one")).versions == [1, 1]
        await asyncio.wait_for(
            send(engine, weights_of(model_dir), tmp_path, 2), 20
        )  # of the 600 s that a load may take
        assert (await engine.generate(PROMPT, Sampling(2), "one")).versions == [2, 2]
        pair[0].hangs = False
        await send(engine, weights_of(model_dir), tmp_path, 3)

    with_engine(model_dir, [double.url for double in pair], run, request_timeout=0.5)
    assert [[folder.name for folder in double.loaded] for double in pair] == [
        ["000000", "000002"],
        ["000000", "000001", "000002"],
    ]


def test_a_run_that_has_lost_all_servers_is_told_which_and_what_to_do(pair, model_dir, tmp_path) -> None:
    async def run(engine):
        await send(engine, weights_of(model_dir), tmp_path, 1)
        pair[0].dies, pair[1].lies = True, "default"
        words = rf"{pair[0].url}: .*; {pair[1].url}: .*has weights 'default'.*start them again with: python -m sglang"
        with pytest.raises(EngineLostError, match=words):
            await engine.generate(PROMPT, Sampling(3))
        with pytest.raises(EngineLostError):
            await engine.live()
        pair[1].dies = True
        with pytest.raises(EngineLostError, match="no server has loaded version 2"):
            await send(engine, weights_of(model_dir), tmp_path, 2)

    with_engine(model_dir, [double.url for double in pair], run)


def test_weights_that_one_server_refuses_serve_from_the_other_and_that_all_refuse_end_the_run(
    pair, model_dir, tmp_path
) -> None:
    async def run(engine):
        pair[0].refuses = "Failed to update weights: size mismatch"
        await send(engine, weights_of(model_dir), tmp_path, 1)
        await asyncio.gather(*(engine.generate(PROMPT, Sampling(2)) for _ in range(3)))
        assert [double.generated for double in pair] == [0, 3]
        pair[1].refuses = "Failed to get weights iterator: no such folder"
        words = r"has loaded version 2: .*size mismatch.*; .*no such folder.*trainer\.runs_dir"
        with pytest.raises(EngineError, match=words) as refused:
            await send(engine, weights_of(model_dir), tmp_path, 2)
        assert not isinstance(refused.value, EngineLostError), "it would come again"

    with_engine(model_dir, [double.url for double in pair], run)


def test_a_torn_folder_reaches_no_server(pair, model_dir, tmp_path) -> None:
    class Torn(Writer):
        async def save_weights(self, folder, whole):
            sums = await super().save_weights(folder, whole)
            return {**sums, "model.norm.weight": 1}

    async def run(engine):
        with pytest.raises(RuntimeError, match=r"model\.norm\.weight"):
            await sync_files(Torn(weights_of(model_dir)), engine, tmp_path, 1)

    with_engine(model_dir, [double.url for double in pair], run)
    assert not pair[0].loaded


def test_an_answer_that_ends_where_the_run_does_not_stop_is_no_answer(pair, model_dir, tmp_path) -> None:
    model = weights_of(model_dir)

    async def run(engine):
        await send(engine, model, tmp_path, 1)
        eos = reference_greedy(model, PROMPT, 3)[2]
        pair[0].eos = eos
        with pytest.raises(EngineError, match=rf"stopped at id {eos}.*generation_config\.json"):
            await engine.generate(PROMPT, Sampling(9, temperature=0.0))

    with_engine(model_dir, [pair[0].url], run)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"context": 128}, "takes 122 tokens, less than"),
        ({"dtype": "bfloat16"}, "--dtype is bfloat16, and model.dtype"),
    ],
)
def test_an_sglang_server_that_does_not_fit_is_refused(model_dir, settings, words) -> None:
    double = SglangDouble(model_dir, **settings)
    with running(double), pytest.raises(EngineError, match=f"{double.url or 'http'}.*{words}"):
        with_engine(model_dir, [double.url], None)


def test_a_server_that_is_not_there_is_waited_for_and_then_named(model_dir) -> None:
    begun = time.monotonic()
    with pytest.raises(
        EngineError, match=r"http://127\.0\.0\.1:9: .*within 0\.5 s \(engine\.start_timeout\); start it"
    ):
        with_engine(model_dir, ["http://127.0.0.1:9"], None)
    assert time.monotonic() - begun < 10


# ---- a whole run


@pytest.mark.ray
@pytest.mark.slow
def test_a_run_trains_on_an_sglang_server(model_dir, in_shared_ray, forks, tmp_path) -> None:
    double = SglangDouble(model_dir)
    small = ("learner.workers=1", "trainer.steps=2", "trainer.groups_per_step=4", "algorithm.group_size=4")
    episodes = ("trainer.eval_episodes=2", "sft.episodes=0", "engine.max_model_len=480", "env.kwargs.shaping=1.0")
    where = ("trainer.name=run", f"trainer.runs_dir={tmp_path}", f"model.path={model_dir}")
    with running(double):
        command = [str(Path(sys.executable).with_name("agent-train")), "+env=frozen_lake", "engine=sglang"]
        words = [*command, f"engine.urls=[{double.url}]", *small, *episodes, *where]
        forks.run(words, {**os.environ, **in_shared_ray, "ENGINE_API_KEY": KEY}, 200, tmp_path)
    steps = [record for record in read_metrics(tmp_path / "run" / "metrics.jsonl") if record["kind"] == "train"]
    assert [record["step"] for record in steps] == [1, 2]
    assert all(record["update"]["gap_max"] < 1e-3 for record in steps), "the second step is sampled by new weights"
    assert [folder.name for folder in double.loaded] == ["000000", "000001", "000002"]
    last = json.loads((tmp_path / "run" / "trajectories" / "train-000002.jsonl").read_text().splitlines()[0])
    assert {version for turn in last["turns"] for version in turn["tokens"]["versions"]} == {1}
    written = b"".join(file.read_bytes() for file in (tmp_path / "run").rglob("*") if file.is_file())
    assert KEY.encode() not in written
