"""Defaults are for a real instruct model; a tiny one has its own. What is far from usual is told before a run starts."""

import json

import pytest

from agent_train.config import combinations
from agent_train.config import compose as composing
from agent_train.config.combinations import unusual
from agent_train.config.compose import compose
from agent_train.config.model_folder import is_tiny, shape_of

REAL = {"hidden_size": 896, "num_hidden_layers": 24, "vocab_size": 151936, "intermediate_size": 4864}
TINY = {"hidden_size": 128, "num_hidden_layers": 4, "vocab_size": 512, "intermediate_size": 384}


def folder(tmp_path, shape, longest=32768):
    (tmp_path / "config.json").write_text(json.dumps({**shape, "max_position_embeddings": longest}))
    return f"model.path={tmp_path}"


@pytest.fixture
def gpu(monkeypatch):
    for module in (composing, combinations):
        monkeypatch.setattr(module, "visible_gpus", lambda: 1)


@pytest.mark.parametrize(
    ("mode", "rate"), [("mode=rl", 1e-6), ("mode=sft", 1e-5), ("mode=dpo", 5e-7), ("mode=rm", 1e-5)]
)
def test_the_learning_rate_of_a_real_model_is_that_of_the_mode(tmp_path, mode, rate):
    env = ["+env=sokoban"] if mode == "mode=rl" else []
    config = compose([mode, folder(tmp_path, REAL), *env])
    assert config.learner.lr == rate
    assert list(unusual(config)) == []


def test_a_real_model_gives_long_answers_in_any_environment(tmp_path):
    for env in ("frozen_lake", "tic_tac_toe", "wordle", "sokoban"):
        config = compose([f"+env={env}", folder(tmp_path, REAL)])
        assert (config.sampling.max_tokens, config.engine.max_model_len, config.sft.episodes) == (1024, 8192, 0)


def test_the_context_is_no_longer_than_the_model_reads(tmp_path):
    config = compose(["+env=sokoban", folder(tmp_path, REAL, longest=1024)])
    assert (config.engine.max_model_len, config.sampling.max_tokens) == (1024, 512)


def test_a_real_model_recomputes_activations_and_the_tiny_one_does_not(tmp_path):
    assert compose(["+env=sokoban", folder(tmp_path, REAL)]).learner.gradient_checkpointing
    assert not compose(["+env=sokoban"]).learner.gradient_checkpointing


def test_a_gpu_computes_in_bfloat16_but_for_the_tiny_model(tmp_path, gpu):
    assert compose(["+env=sokoban", folder(tmp_path, REAL)]).model.dtype == "bfloat16"
    assert compose(["+env=sokoban"]).model.dtype == "float32"


def test_a_folder_of_a_tiny_model_has_the_defaults_of_the_tiny_model(tmp_path):
    built = compose(["+env=frozen_lake"])
    found = compose(["+env=frozen_lake", folder(tmp_path, TINY)])
    found.model.path = None
    assert found == built
    assert (built.learner.lr, built.sampling.max_tokens, built.sft.episodes) == (8e-4, 4, 4096)


def test_the_size_of_a_model_is_read_from_its_folder(tmp_path):
    folder(tmp_path, REAL)
    assert shape_of(tmp_path).parameters == pytest.approx(0.66e9, rel=0.01)
    assert not is_tiny(tmp_path)
    assert is_tiny(None)
    (tmp_path / "config.json").write_text("{}")
    assert shape_of(tmp_path) is None
    assert not is_tiny(tmp_path)


@pytest.mark.parametrize(
    ("shape", "overrides", "words"),
    [
        (REAL, ["mode=dpo", "learner.lr=1e-3"], "learner.lr=0.001: high for a model of this size with mode=dpo"),
        (REAL, ["+env=sokoban", "learner.lr=1e-9"], "learner.lr=1e-09: low for a model of this size"),
        (REAL, ["+env=sokoban", "sampling.max_tokens=8"], "sampling.max_tokens=8: short for an instruct model"),
        (REAL, ["+env=sokoban", "algorithm=ppo", "critic.lr=0.01"], "critic.lr=0.01: high"),
        (REAL, ["+env=sokoban", "model.dtype=float16"], "model.dtype=float16: overflows"),
        (TINY, ["+env=sokoban", "learner.lr=1e-6"], "learner.lr=1e-06: low for a tiny model"),
        (TINY, ["+env=sokoban", "engine.max_model_len=2048", "sampling.max_tokens=1024"], "max_tokens=1024: long"),
        (TINY, ["+env=sokoban", "model.dtype=bfloat16"], "model.dtype=bfloat16: coarse for a tiny model"),
    ],
)
def test_what_is_far_from_usual_is_told_in_one_line(tmp_path, shape, overrides, words):
    (line,) = unusual(compose([folder(tmp_path, shape), *overrides]))
    assert words in line
    assert "\n" not in line


def test_adapters_learn_at_higher_rates(tmp_path):
    model = folder(tmp_path, REAL)
    assert list(unusual(compose(["+env=sokoban", model, "lora.rank=16", "learner.lr=1e-4"]))) == []


def test_float32_on_a_gpu_is_told(tmp_path, gpu):
    (line,) = unusual(compose(["+env=sokoban", folder(tmp_path, REAL), "model.dtype=float32"]))
    assert line.startswith("model.dtype=float32: takes twice the memory")
