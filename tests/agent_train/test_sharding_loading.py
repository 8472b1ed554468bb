"""From the files of a model folder into shards: what is read, what is not, and what has to be loaded whole."""

import json
from types import SimpleNamespace

import pytest
import torch
from learner_cases import gradients_of, make_config, make_rows, one_rank, write_model
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    Gemma4Config,
    HunYuanDenseV1Config,
    HunYuanDenseV1ForCausalLM,
    OPTConfig,
    Phi3Config,
    Phi3ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from agent_train.data.samples import TrainingSample
from agent_train.learner.fsdp import blocks_of, check_layers, full_tensors, load_policy
from agent_train.learner.loading import weight_files
from agent_train.learner.parallel import check_model, deal_to_ranks, plan_of
from agent_train.learner.sequence_parallel import check_heads


@pytest.fixture(params=[True, False], ids=["tied", "untied"])
def model_dir(request, tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    return write_model(folder, tied=request.param)


def weights_after_start(model_dir):
    with one_rank(model_dir) as worker:
        return {name: whole.clone() for name, whole in full_tensors(worker.module)}


def assert_loaded_as_transformers_does(model_dir):
    found = weights_after_start(model_dir)
    expected = dict(AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).named_parameters())
    assert found.keys() == expected.keys()
    assert all(torch.equal(weight, expected[name]) for name, weight in found.items())


def test_before_it_is_sharded_a_model_has_buffers_and_no_weights(model_dir):
    model = load_policy(model_dir, 7).model
    whole = AutoModelForCausalLM.from_pretrained(model_dir)
    assert all(parameter.is_meta for parameter in model.parameters())
    buffers = dict(whole.named_buffers())
    assert buffers
    assert all(torch.equal(buffer, buffers[name]) for name, buffer in model.named_buffers())


def test_weights_are_read_as_transformers_reads_them(model_dir):
    assert_loaded_as_transformers_does(model_dir)


def test_tied_weights_are_one_parameter_before_and_after_the_first_forward(model_dir):
    row = TrainingSample([1, 2, 3], [False, True, True], [0.0, -1.0, -1.0])
    with one_rank(model_dir) as worker:
        model = worker.module.model
        for _ in range(2):
            tied = model.lm_head.weight is model.model.embed_tokens.weight
            assert tied == model.config.tie_word_embeddings
            worker.logprobs(deal_to_ranks([row], make_config().learner)[0])


def test_weights_in_several_files_and_in_bfloat16(model_dir):
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.bfloat16)
    (model_dir / "model.safetensors").unlink()
    model.save_pretrained(str(model_dir), max_shard_size="10KB")
    assert len(set(weight_files(model_dir).values())) > 2
    assert load_policy(model_dir, 7).model.lm_head.weight.is_meta
    assert_loaded_as_transformers_does(model_dir)


def test_tensors_that_the_model_does_not_know_are_left_alone(model_dir):
    tensors = load_file(model_dir / "model.safetensors")
    save_file(
        {**tensors, "model.rotary_emb.inv_freq": torch.zeros(4)}, str(model_dir / "model.safetensors"), {"format": "pt"}
    )
    assert_loaded_as_transformers_does(model_dir)


def test_a_file_under_other_names_is_loaded_whole_by_transformers_and_takes_adapters_too(model_dir):
    """Without the prefix of the backbone, as some folders are."""
    tensors = load_file(model_dir / "model.safetensors")
    renamed = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
    save_file(renamed, str(model_dir / "model.safetensors"), {"format": "pt"})
    assert not any(parameter.is_meta for parameter in load_policy(model_dir, 7).model.parameters())
    assert_loaded_as_transformers_does(model_dir)
    config = make_config()
    config.lora.rank = 2
    with one_rank(model_dir, config) as worker:
        adapted = {name: whole.clone() for name, whole in full_tensors(worker.module)}
    assert all(torch.equal(weight, adapted[name]) for name, weight in weights_after_start(model_dir).items())


def test_the_settings_of_generation_are_kept(model_dir, tmp_path):
    settings = {"temperature": 0.6, "do_sample": True, "eos_token_id": [3, 5]}
    (model_dir / "generation_config.json").write_text(json.dumps(settings))
    with one_rank(model_dir) as worker:
        worker.save(str(tmp_path / "saved"))
    saved = json.loads((tmp_path / "saved" / "generation_config.json").read_text())
    assert {name: saved[name] for name in settings} == settings


SHAPE = {
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
}


def written(folder, kind, **settings):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **SHAPE, **settings))
    model.to(torch.float32).save_pretrained(str(folder))
    (folder / "tokenizer_config.json").write_text("{}")
    return model.eval()


@pytest.mark.parametrize(
    ("kind", "settings", "layers"),
    [
        ("qwen3_5_text", {"layer_types": ["linear_attention", "full_attention"]}, "linear_attention"),
        ("lfm2", {"layer_types": ["conv", "full_attention"]}, "conv"),
        ("recurrent_gemma", {"block_types": ["recurrent", "attention"]}, "recurrent"),
        ("bloom", {}, "without transformers' attention interface"),
    ],
)
def test_a_model_whose_layers_would_join_packed_samples_is_refused(tmp_path, kind, settings, layers):
    written(tmp_path, kind, **settings)
    with pytest.raises(ValueError, match=rf"cannot be trained here: it has layers \(.*{layers}.*packed samples"):
        load_policy(tmp_path, 7)


def test_a_model_that_stays_quantised_is_refused():
    """As FP8 on a GPU does: sharding would take its weights for numbers, without their scales."""
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen3", **SHAPE))
    codes = model.model.layers[0].mlp.up_proj.weight.data.to(torch.float8_e4m3fn)
    model.model.layers[0].mlp.up_proj.weight = torch.nn.Parameter(codes, requires_grad=False)
    with pytest.raises(ValueError, match=r"its weights are quantised \(torch.float8_e4m3fn\)"):
        check_layers(model)


WINDOW = {"sliding_window": 4}
LAYERS = {"layer_types": ["sliding_attention", "full_attention"]}


@pytest.mark.parametrize(
    ("kind", "settings"),
    [("phimoe", WINDOW), ("qwen2_moe", {"use_sliding_window": True, "max_window_layers": 2, **WINDOW, **LAYERS})],
)
def test_a_model_whose_window_is_in_a_mask_alone_is_refused(kind, settings):
    """Packed attention gets no mask: the tokens of long samples would see all that came before."""
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **SHAPE, **settings))
    with pytest.raises(ValueError, match="has a sliding window of 4 tokens in a mask alone"):
        check_layers(model)


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("phimoe", {}),
        ("phimoe", {"sliding_window": 64, "max_position_embeddings": 64}),  # as Phi-3.5-MoE: it hides nothing
        ("qwen2_moe", WINDOW),
        ("qwen3", {"use_sliding_window": True, "max_window_layers": 1, **WINDOW}),
        ("mistral", WINDOW),
        ("gemma3_text", {**WINDOW, **LAYERS}),
    ],
)
def test_a_window_that_attention_is_told_of_or_that_hides_nothing_is_not(kind, settings):
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **SHAPE, **settings))
    check_layers(model)


@pytest.mark.parametrize(
    ("kind", "settings"), [("seed_oss", {"residual_dropout": 0.5}), ("opt", {"dropout": 0.5, "layerdrop": 0.5})]
)
def test_the_noise_of_training_is_off_wherever_a_model_makes_it(tmp_path, kind, settings):
    model = written(tmp_path, kind, **settings)
    row = TrainingSample([5, 1, 2, 3], [False, True, True, True], [0.0] * 4)
    with one_rank(tmp_path) as worker:
        ((found,),) = worker.logprobs(deal_to_ranks([row], make_config().learner)[0])
    expected = model(torch.tensor([row.ids])).logits[0].log_softmax(-1)
    assert found[1:] == pytest.approx([expected[n - 1, row.ids[n]].item() for n in (1, 2, 3)], abs=1e-5)


def test_gradient_checkpointing_computes_each_block_again(model_dir):
    for checkpointing, times in ((False, 1), (True, 2)):
        config, calls = make_config(gradient_checkpointing=checkpointing), []
        with one_rank(model_dir, config) as worker:
            for block in worker.module.model.model.layers:
                block.self_attn.register_forward_hook(lambda *_, calls=calls: calls.append(1))
            gradients_of(worker, deal_to_ranks(make_rows(), config.learner)[0])
        assert len(calls) == times * 2


def phi3():
    config = Phi3Config(
        vocab_size=40,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        pad_token_id=0,
    )
    return Phi3ForCausalLM(config)


def test_an_architecture_whose_layers_have_other_names_cannot_be_split():
    model = phi3()
    with pytest.raises(
        ValueError, match=r"Phi3ForCausalLM has a layer 'self_attn.qkv_proj'.*set learner.tensor_parallel=1"
    ):
        plan_of("Phi3ForCausalLM", blocks_of(model)[0], 2)


def test_weights_inside_attention_that_are_no_known_norm_cannot_be_split():
    """Their gradients would be those of one rank's heads, and the ranks would grow apart."""
    block = blocks_of(HunYuanDenseV1ForCausalLM(HunYuanDenseV1Config(**SHAPE, head_dim=8)))[0]
    with pytest.raises(ValueError, match=r"has weights self_attn\.query_layernorm\.'weight'.*tensor_parallel=1"):
        plan_of("HunYuanDenseV1ForCausalLM", block, 2)


def test_layers_that_do_not_divide_are_named():
    config = Qwen3Config(
        vocab_size=40, hidden_size=32, intermediate_size=50, num_hidden_layers=1, num_attention_heads=4, head_dim=8
    )
    block = blocks_of(Qwen3ForCausalLM(config))[0]
    plan_of("Qwen3ForCausalLM", block, 2)
    with pytest.raises(ValueError, match=r"tensor_parallel=4 does not divide the 50 features of 'mlp.gate_proj'"):
        plan_of("Qwen3ForCausalLM", block, 4)


@pytest.mark.parametrize(
    ("query", "key", "ranks", "good"),
    [(8, 2, 2, True), (8, 2, 4, True), (8, 2, 8, True), (8, 3, 2, False), (6, 6, 4, False), (12, 6, 4, False)],
)
def test_heads_that_ranks_cannot_share_are_refused(query, key, ranks, good):
    if good:
        check_heads(query, key, ranks)
    else:
        with pytest.raises(
            ValueError, match=f"sequence_parallel={ranks} cannot share {query} query and {key} key/value"
        ):
            check_heads(query, key, ranks)


@pytest.mark.parametrize(
    ("config", "heads"),
    [
        (Gemma4Config(text_config={"num_attention_heads": 4, "num_key_value_heads": 2}), "4 query and 2 key/value"),
        (OPTConfig(num_attention_heads=4), "4 query and 4 key/value"),  # it knows one number of heads
    ],
)
def test_heads_are_those_of_the_language_model_wherever_its_config_has_them(config, heads):
    model = SimpleNamespace(config=config)
    check_model(model, make_config(workers=2, tensor_parallel=2).learner)
    with pytest.raises(ValueError, match=f"tensor_parallel=3 has to divide the model's {heads} heads"):
        check_model(model, make_config(workers=3, tensor_parallel=3).learner)


def test_ranks_of_one_replica_get_the_same_rows():
    settings = make_config(workers=8, sequence_parallel=2, tensor_parallel=2).learner
    rows = [TrainingSample([1, 2, number], [False, True, True], [0.0, -1.0, -1.0]) for number in range(6)]
    dealt = deal_to_ranks(rows, settings)
    assert [share is dealt[rank // 4 * 4] for rank, share in enumerate(dealt)] == [True] * 8
    assert dealt[0].micro_batches != dealt[4].micro_batches
