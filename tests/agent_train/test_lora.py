"""Adapters in place of all weights: what is trained, what is written, what PEFT and vLLM make of it."""

import asyncio
import dataclasses
import json

import pytest
import torch
from engine_models import build, reference_logprobs
from learner_cases import make_config, make_rows, one_rank, write_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from agent_train.config.schema import Config, EngineConfig
from agent_train.engine.base import EngineError, Sampling
from agent_train.engine.vllm import VllmEngine
from agent_train.learner.fsdp import full_tensors, load_policy
from agent_train.learner.lora import add_adapters, initial_adapter
from agent_train.learner.parallel import deal_to_ranks
from agent_train.learner.roles import reference_is_base, roles_of, sends_adapters
from agent_train.weights.sync import WeightSyncError, sync_adapter


def config_of(rank=4, **learner):
    config = make_config(lr=0.1, **learner)
    config.lora.rank, config.lora.merge = rank, False
    return config


def share_of(rows):
    return deal_to_ranks(rows, make_config().learner)[0]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def trained(model_dir, tmp_path_factory):
    """What a learner with adapters said before and after two updates, and the folders that it wrote."""
    folder, share = tmp_path_factory.mktemp("trained"), share_of(make_rows())
    (model_dir / "tokenizer.json").write_text("{}")
    with one_rank(model_dir, config_of()) as worker:
        begin = worker.logprobs(share)
        base = {name: p.detach().clone() for name, p in worker.module.named_parameters() if ".lora_" not in name}
        names = [name for group in worker.optimizer.param_groups for name in group["params"]]
        learned = sum(p.numel() for p in names)
        worker.update([share])
        worker.update([share])
        found = {
            "begin": begin,
            "learned": learned,
            "after": worker.logprobs(share),
            "off": worker.logprobs_without_adapters(share),
            "after_again": worker.logprobs(share),
            "kept": all(torch.equal(p, base[n]) for n, p in worker.module.named_parameters() if n in base),
            "merged": {name: whole.clone() for name, whole in full_tensors(worker.module)},
            "sums": worker.save_adapter(str(folder / "adapter")),
            "without_engine": worker.checksums(),
            "manifest": worker.manifest(),
        }
        worker.save(str(folder / "whole"))
    return found | {"folder": folder}


@pytest.fixture(scope="module")
def base_logprobs(model_dir):
    with one_rank(model_dir) as worker:
        return worker.logprobs(share_of(make_rows()))


def test_an_adapter_changes_nothing_at_first_and_learns(trained, base_logprobs):
    assert trained["begin"] == base_logprobs
    assert trained["after"] != base_logprobs


def test_the_seed_decides_the_adapter_that_a_run_begins_with():
    name = "layers.0.q_proj.lora_A.weight"
    first, again, other = (initial_adapter(name, (4, 32), seed) for seed in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_only_the_adapters_are_trained(trained):
    assert trained["kept"]
    per_layer = 4 * ((32 + 32) + 2 * (32 + 16) + (32 + 32) + 3 * (32 + 48))
    assert trained["learned"] == 2 * per_layer


def test_without_its_adapters_the_model_is_the_reference_bit_for_bit(trained, base_logprobs):
    assert trained["off"] == base_logprobs
    assert trained["after_again"] == trained["after"]


@pytest.mark.parametrize(("role", "rank"), [("policy", 4), ("reference", 0)])
def test_frozen_weights_are_kept_in_the_models_type_which_changes_no_number(model_dir, role, rank):
    def half(config):
        return dataclasses.replace(config, model=dataclasses.replace(config.model, dtype="bfloat16"))

    share = share_of(make_rows())
    with one_rank(model_dir, half(make_config())) as worker:  # fp32 weights, rounded whenever a layer is gathered
        assert {p.dtype for p in worker.module.parameters()} == {torch.float32}
        expected = worker.logprobs(share)
    with one_rank(model_dir, half(config_of(rank)), role) as worker:
        types = {(".lora_" in name, p.dtype) for name, p in worker.module.named_parameters()}
        assert types == {(False, torch.bfloat16), *([(True, torch.float32)] if rank else [])}
        assert worker.logprobs(share) == expected


def test_an_adapter_is_merged_into_frozen_weights_in_fp32(model_dir):
    config = config_of()
    config.model = dataclasses.replace(config.model, dtype="bfloat16")
    with one_rank(model_dir, config) as worker:
        worker.update([share_of(make_rows())])
        name, layer = next((n, m) for n, m in worker.module.model.named_modules() if hasattr(m, "lora_A"))
        base, up, down = (
            part.weight.full_tensor() for part in (layer.base_layer, layer.lora_B["default"], layer.lora_A["default"])
        )
        exact = base.float() + layer.scaling["default"] * (up @ down)
        assert not torch.equal(exact.bfloat16().float(), exact)
        assert torch.equal(dict(full_tensors(worker.module))[f"{name}.weight"], exact)


def test_peft_reads_the_adapter_and_merges_it_to_the_same_weights(trained, model_dir):
    from peft import PeftModel

    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model_dir), trained["folder"] / "adapter")
    merged = dict(model.merge_and_unload().named_parameters())
    assert merged.keys() == trained["merged"].keys()
    for name, weight in trained["merged"].items():
        torch.testing.assert_close(weight, merged[name], atol=1e-6, rtol=0)


def test_the_adapters_folder_holds_the_adapters_alone_and_the_tokenizer(trained, model_dir):
    folder = trained["folder"] / "adapter"
    assert sorted(path.name for path in folder.iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    record = json.loads((folder / "adapter_config.json").read_text())
    assert (record["peft_type"], record["r"], record["lora_alpha"]) == ("LORA", 4, 32.0)
    assert record["base_model_name_or_path"] == str(model_dir)
    assert load_file(folder / "adapter_model.safetensors").keys() == trained["sums"].keys()
    assert trained["without_engine"] == trained["sums"], "a replay tells what vLLM would be given"


def test_whole_weights_have_the_adapters_in_them_under_the_models_own_names(trained, model_dir):
    saved = load_file(trained["folder"] / "whole" / "model.safetensors")
    assert saved.keys() == load_file(model_dir / "model.safetensors").keys()
    assert all(torch.equal(saved[name], weight) for name, weight in trained["merged"].items())
    assert [info.name for info in trained["manifest"]] == list(trained["merged"])
    AutoModelForCausalLM.from_pretrained(trained["folder"] / "whole")


def test_a_target_that_the_model_lacks_is_named(model_dir):
    config = config_of()
    config.lora.targets = ["q_proj", "query"]
    with pytest.raises(ValueError, match=r"no linear layers \['query'\]: it has \['down_proj'"):
        add_adapters(load_policy(model_dir, 7).model, config.lora)


@pytest.mark.parametrize(
    ("lora", "path", "warm", "own"),
    [(0, None, 0, True), (4, None, 0, False), (4, "other", 0, True), (4, None, 100, True)],
)
def test_the_reference_is_a_model_of_its_own_unless_it_is_the_policy_without_adapters(lora, path, warm, own):
    config = Config()
    config.algorithm.kl.coef, config.lora.rank, config.reference.path, config.sft.episodes = 0.1, lora, path, warm
    assert ("reference" in roles_of(config)) == own == (not reference_is_base(config))


@pytest.mark.parametrize(
    ("rank", "merge", "engine", "sent"),
    [(4, False, "vllm", True), (4, True, "vllm", False), (0, False, "vllm", False), (4, False, "embedded", False)],
)
def test_adapters_alone_go_to_vllm_if_they_are_not_to_be_merged(rank, merge, engine, sent):
    config = Config()
    config.lora.rank, config.lora.merge, config.engine.name = rank, merge, engine
    assert sends_adapters(config) == sent


class Writer:
    """A learner of one rank as `sync_adapter` sees it."""

    def __init__(self, worker):
        self.worker = worker

    async def save_adapter(self, folder):
        return self.worker.save_adapter(str(folder))


class Misread:
    """A double for an engine whose disk gives other bytes than were written."""

    def __init__(self):
        self.folders = []

    async def load_adapter(self, folder, version):
        self.folders.append(folder)
        return {"a": 1, "b": 2 + version}

    async def losses(self):
        return 0


class Wrote:
    async def save_adapter(self, folder):
        folder.mkdir()
        return {"a": 1, "b": 2}


def test_an_adapter_that_arrives_otherwise_than_it_was_written_is_an_error(tmp_path):
    assert asyncio.run(sync_adapter(Wrote(), Misread(), tmp_path, 0)) > 0
    with pytest.raises(WeightSyncError, match=r"version 3, .*: 1 of 2 tensors .* first 'b'"):
        asyncio.run(sync_adapter(Wrote(), Misread(), tmp_path, 3))


def test_each_sync_has_a_folder_of_its_own_and_the_last_two_stay(tmp_path):
    engine = Misread()
    for _ in range(12):
        asyncio.run(sync_adapter(Wrote(), engine, tmp_path / "adapters", 0))
    assert len({str(folder) for folder in engine.folders}) == 12
    assert sorted(path.name for path in (tmp_path / "adapters").iterdir()) == ["000010", "000011"]


@pytest.mark.vllm
@pytest.mark.ray
def test_vllm_serves_the_adapter_as_the_learner_computes_it(workers_as_forks, tmp_path):
    import ray

    model = build(tmp_path / "model")
    config = dataclasses.replace(config_of(rank=3), engine=EngineConfig(max_model_len=128, kv_cache_bytes=64 << 20))
    prompt = [5, 9, 17, 40, 23, 8] * 6

    async def run(worker):
        engine = await VllmEngine.start(config.engine, model, tmp_path / "logs", adapter_rank=3)
        try:
            base = await engine.generate(prompt, Sampling(8, 0.0))
            sums = [await sync_adapter(Writer(worker), engine, tmp_path / "adapters", 1)]
            same = await engine.generate(prompt, Sampling(8, 0.0))
            assert (same.ids, set(same.versions)) == (base.ids, {1}), "an adapter that has learned nothing"
            for version in (2, 3):
                worker.update([share_of(make_rows(seed=version))])
                sums.append(await sync_adapter(Writer(worker), engine, tmp_path / "adapters", version))
                merged = AutoModelForCausalLM.from_pretrained(model)
                merged.load_state_dict(dict(full_tensors(worker.module)), strict=False)
                completion = await engine.generate(prompt, Sampling(8, 1.0, seed=version))
                expected = reference_logprobs(merged, prompt, completion.ids, 1.0)
                torch.testing.assert_close(torch.tensor(completion.logprobs), expected, atol=2e-3, rtol=0)
                assert set(completion.versions) == {version}
            assert len(set(sums)) == 3
            with pytest.raises(EngineError, match="adapter_checksums"):
                await engine.load_adapter(tmp_path / "nowhere", 4)
            asked = asyncio.create_task(engine.generate(prompt, Sampling(1)))
            await asyncio.sleep(1)
            assert not asked.done(), "nobody knows which adapter would answer"
            asked.cancel()
        finally:
            await engine.close()

    with workers_as_forks():
        ray.init(address="local", num_cpus=2, include_dashboard=False, logging_level="error", log_to_driver=False)
    try:
        with one_rank(model, config) as worker:
            asyncio.run(asyncio.wait_for(run(worker), 250))
    finally:
        ray.shutdown()
