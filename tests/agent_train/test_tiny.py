"""The tiny policy: a tokenizer that loses nothing, a model that loads as any other, the same files from the same seed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sample_tokenizers import LAKE, tiny
from transformers import AutoModelForCausalLM, AutoTokenizer

import agentgym
from agent_train.config.schema import TinyConfig
from agent_train.learner.tiny import LONG_EPISODE, build_tiny, texts_of_env, train_tokenizer
from agent_train.rollout.renderer import Renderer
from agentgym import Env, Task, TaskSet
from agentgym.core.messages import assistant, system, user
from agentgym.core.registration import UnknownEnvError

SMALL = TinyConfig(hidden=64, layers=2, heads=2, intermediate=96, vocab=320)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    build_tiny(path, LAKE, SMALL, 128, seed=7)
    return path


@given(text=st.text(max_size=60))
def test_any_unicode_round_trips(text):
    assert tiny().decode(tiny().encode(text, add_special_tokens=False)) == text


@pytest.mark.parametrize("grid", [" P _ O\n _ G _", "SFFH\nFHFG", "#.$\n@ #", "1 2 3\n4 X O"])
def test_every_cell_of_a_grid_is_a_token(grid):
    tokens = [tiny().decode([i]) for i in tiny().encode(grid * 2, add_special_tokens=False)]
    assert all(len(token.strip(" ")) <= 1 for token in tokens)
    assert tokens.count("\n") == 2 * grid.count("\n")


def test_words_of_the_texts_become_tokens_and_numbers_do_not():
    tokenizer = train_tokenizer(["Move right 2024 times"] * 9, 400, 128)
    assert [tokenizer.decode([i]) for i in tokenizer.encode("Move right 2024", add_special_tokens=False)] == [
        "Move", " right", " ", "2", "0", "2", "4",
    ]  # fmt: skip


def test_the_vocabulary_is_bounded_and_is_the_model_s(folder):
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    assert len(tokenizer) == model.config.vocab_size == model.get_input_embeddings().weight.shape[0] <= SMALL.vocab
    assert model.config.model_type == "qwen3"
    assert model.config.tie_word_embeddings
    assert model.get_output_embeddings().weight.data_ptr() == model.get_input_embeddings().weight.data_ptr()
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert model.config.max_position_embeddings == 128


def test_the_loaded_tokenizer_is_the_trained_one(folder):
    trained, loaded = train_tokenizer(LAKE, SMALL.vocab, 128), AutoTokenizer.from_pretrained(folder)
    text = loaded.apply_chat_template(
        [system("s"), *map(user, LAKE), assistant("up")], tokenize=False, add_generation_prompt=True
    )
    assert loaded.encode(text, add_special_tokens=False) == trained.encode(text, add_special_tokens=False)
    assert loaded.eos_token == "<|end|>"
    assert loaded.pad_token_id != loaded.eos_token_id
    assert Renderer(loaded).stop_token_ids == (loaded.eos_token_id,)
    assert json.loads((folder / "generation_config.json").read_text())["eos_token_id"] == loaded.eos_token_id


def test_the_template_spends_two_tokens_on_a_message():
    render = Renderer(tiny())
    assert (
        render.text([user("go"), assistant("right"), user("on")])
        == "<|user|>go<|end|><|assistant|>right<|end|><|user|>on<|end|><|assistant|>"
    )
    assert len(render.prompt([user("")]).ids) == 3


def test_tools_are_told_in_a_system_block_with_the_system_message():
    tool = {"type": "function", "function": {"name": "calc", "parameters": {"type": "object"}}}
    text = Renderer(tiny()).text([system("Be brief."), user("1 + 1?")], [tool])
    assert text.startswith('<|system|>Be brief.\nTools:\n{"name": "calc", "parameters": {"type": "object"}}\n')
    assert text.endswith("<|end|><|user|>1 + 1?<|end|><|assistant|>")
    assert text.count("<|system|>") == text.count("Be brief.") == 1


def test_the_same_seed_gives_the_same_files_and_another_does_not(folder, tmp_path):
    for name, seed in (("same", 7), ("other", 8)):
        torch.manual_seed(seed * 100)
        build_tiny(tmp_path / name, LAKE, SMALL, 128, seed=seed)
    files = sorted(path.name for path in folder.iterdir())
    assert files == sorted(path.name for path in (tmp_path / "same").iterdir())
    assert all((tmp_path / "same" / name).read_bytes() == (folder / name).read_bytes() for name in files)
    assert (tmp_path / "other" / "model.safetensors").read_bytes() != (folder / "model.safetensors").read_bytes()


def test_building_leaves_the_random_state_alone(tmp_path):
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    build_tiny(tmp_path, LAKE, SMALL, 128, seed=0)
    assert torch.equal(torch.rand(3), expected)


def test_texts_of_an_env_are_those_of_its_episodes():
    texts = texts_of_env("frozen_lake", {}, 6, seed=3)
    assert texts == texts_of_env("frozen_lake", {}, 6, seed=3)
    assert texts != texts_of_env("frozen_lake", {}, 6, seed=4)
    assert sum("Reach G" in text for text in texts) == 6
    assert {"up", "down", "left", "right"} & set(texts)


class Flawed(Env):
    """Raises for one task, never ends another, and answers a third with no message."""

    max_turns = None

    @classmethod
    def default_tasks(cls, split="train"):
        return TaskSet([Task(id=name) for name in ("raises", "endless", "silent")], name="flawed")

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed, options=options)
        if self.task.id == "raises":
            raise KeyError("no such level")
        return [user(f"It is {self.task.id}.")], {}

    def step(self, action):
        self.read(action)
        return ["silence"] if self.task.id == "silent" else [user("Go on.")], 0.0, False, False, {}

    def expert_action(self):
        return "yes"


def test_an_episode_that_fails_or_never_ends_gives_its_texts_before():
    agentgym.register(id="tiny_test/flawed", entry_point=Flawed)
    texts = texts_of_env("tiny_test/flawed", {}, 6, seed=0)
    assert set(texts) == {"It is endless.", "It is silent.", "Go on.", "yes"}
    assert len(texts) < 6 * 2 * LONG_EPISODE + 6


def test_texts_of_an_unknown_env_are_refused():
    with pytest.raises(UnknownEnvError):
        texts_of_env("frozen_lak")
