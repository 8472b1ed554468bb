"""Settings come from configs/, the environment's file and the command line; a wrong word is refused by name."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from agent_train.config.compose import (
    ELSEWHERE,
    GROUPS,
    choices,
    compose,
    config_folder,
    config_from_yaml,
    environment_names,
    to_yaml,
)
from agent_train.config.schema import Config, ConfigError, TrainerConfig, settings
from agentgym.core.env import Env
from agentgym.core.registration import registry

PRESETS = {"swe_bench_small": "swe_bench"}  # further files of configs/env, and the environment that each is for


class Unlisted(Env):
    """An environment with no id and no file in configs/."""


def problem(*overrides: str) -> str:
    """The only problem that composing these raises."""
    with pytest.raises(ConfigError) as refused:
        compose(overrides)
    assert len(refused.value.problems) == 1
    return refused.value.problems[0]


@pytest.mark.parametrize("form", ["+env=frozen_lake", "env=frozen_lake", "++env=frozen_lake", "env.id=frozen_lake"])
def test_an_environment_is_chosen_in_any_form(form):
    assert compose([form]) == compose(["+env=frozen_lake"])
    assert compose([form]).env.id == "frozen_lake"


def test_the_last_environment_counts_in_whatever_form():
    for form in ("+env", "env.id"):
        for last in ("+env", "env.id"):
            assert compose([f"{form}=sokoban", f"{last}=frozen_lake"]) == compose(["+env=frozen_lake"])


def test_the_environments_file_sets_defaults_of_other_sections_and_the_command_line_has_the_last_word():
    assert compose(["+env=frozen_lake"]).sft.episodes > 0
    config = compose(["sft.episodes=7", "+env=frozen_lake", "trainer.steps=3", "learner.lr=1e-4", "trainer.name=a b"])
    assert (config.sft.episodes, config.trainer.steps, config.learner.lr, config.trainer.name) == (7, 3, 1e-4, "a b")


def test_an_environments_file_may_choose_an_algorithm_and_the_command_line_another():
    found = compose(["+env=swe_bench", "model.path=/no/such"]).algorithm
    assert (found.name, found.correction.cap, found.overlong.mask) == ("drgrpo_tis", 2.0, True)
    for words in ["+env=swe_bench", "algorithm=dapo"], ["algorithm=dapo", "+env=swe_bench"]:
        assert (
            compose([*words, "model.path=/no/such"]).algorithm
            == compose(["+env=frozen_lake", "algorithm=dapo"]).algorithm
        )


def test_a_choice_of_a_group():
    assert compose(["+env=frozen_lake"]).engine.name == "vllm"
    assert compose(["+env=frozen_lake", "engine=embedded", "algorithm=grpo", "model=tiny"]).engine.name == "embedded"


@pytest.mark.parametrize("loss", ["dppo", "reinforce", "cispo", "mine:signed"])
def test_another_loss_than_the_recipe_s_takes_its_own_settings(loss, tmp_path):
    recipe = compose(["+env=sokoban", "algorithm=ppo", "algorithm.loss=ppo", "algorithm.loss_settings.dual_clip=3"])
    assert recipe.algorithm.loss_settings == {"clip_low": 0.2, "clip_high": 0.2, "dual_clip": 3}
    (tmp_path / "config.yaml").write_text(to_yaml(recipe), encoding="utf-8")
    for begun in (["+env=sokoban"], [f"trainer.resume={tmp_path}"]):  # a replay composes its run's settings again
        assert compose([*begun, f"algorithm.loss={loss}"]).algorithm.loss_settings == {}
        for width in ("algorithm.loss_settings.width=0.3", "algorithm.loss_settings={width: 0.3}"):
            assert compose([*begun, f"algorithm.loss={loss}", width]).algorithm.loss_settings == {"width": 0.3}


def test_an_environment_without_a_file_runs_on_the_defaults():
    by_value = f"{__name__}:Unlisted"
    config = compose([f"+env={by_value}"])
    assert config.env.id == by_value
    assert config.sft.episodes == 0


def test_arguments_of_the_environment_are_free():
    config = compose(["+env=tic_tac_toe", "env.kwargs.size=8", "+env.kwargs.slippery=true", "env.kwargs.words=[a,b]"])
    assert config.env.kwargs == {"size": 8, "slippery": True, "words": ["a", "b"]}
    assert compose(["+env=tic_tac_toe", "env.kwargs={size: 5}"]).env.kwargs == {"size": 5}


def test_null_and_paths_are_values():
    config = compose(["+env=gsm8k", "model.path=/data/models/Qwen-0.5B", "trainer.name=null"])
    assert (config.model.path, config.trainer.name) == ("/data/models/Qwen-0.5B", None)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ([], ["no environment", "+env=", "frozen_lake", "gsm8k"]),
        (["trainer.steps=3"], ["no environment", "+env="]),
        (["+env=frozn_lake"], ["'frozn_lake'", "did you mean frozen_lake"]),
        (["env=gsm9k"], ["'gsm9k'", "did you mean gsm8k"]),
        (["+env=sokoban", "agent.max_tokens=9"], ["'agent.max_tokens'", "did you mean agent.max_episode_tokens?"]),
        (["+env=sokoban", "trainer.stps=3"], ["'trainer.stps'", "trainer.steps"]),
        (["+env=sokoban", "lr=3"], ["'lr'", "learner.lr or critic.lr or sft.lr"]),
        (["+env=sokoban", "trianer.steps=3"], ["'trianer.steps'", "trainer.steps"]),
        (["+env=sokoban", "trainer.step=9"], ["'trainer.step'", "did you mean trainer.steps?"]),
        (["+env=sokoban", "step=9"], ["'step'", "did you mean trainer.steps or "]),
        (["+env=sokoban", "learning_rate=1"], ["'learning_rate'", "did you mean learner.lr?"]),
        (["+env=sokoban", "sft.learning_rate=1"], ["did you mean sft.lr?"]),
        (["+env=sokoban", "model_path=here"], ["'model_path'", "did you mean model.path?"]),
        (["+env=sokoban", "engine=vlm"], ["engine=vlm", "did you mean engine=vllm", "embedded"]),
        (["+env=sokoban", "algorithm=GSPO"], ["algorithm=GSPO", "did you mean algorithm=gspo?"]),
        (["+env=sokoban", "algorithm=drgpro"], ["algorithm=drgpro", "did you mean algorithm=drgrpo"]),
        (["+env=sokoban", "trainer=3"], ["'trainer' is a section", "trainer.steps"]),
        (["+env=sokoban", "engine={name: vllm}"], ["engine", "engine.key=value"]),
        (["+env=sokoban", "trainer.steps=abc"], ["trainer.steps", "whole number", "abc"]),
        (["+env=sokoban", "trainer.steps=1.5"], ["trainer.steps", "whole number", "1.5"]),
        (["+env=sokoban", "trainer.steps=null"], ["trainer.steps", "whole number"]),
        (["+env=sokoban", "learner.lr=fast"], ["learner.lr", "a number", "fast"]),
        (["+env=sokoban", "learner.gradient_checkpointing=maybe"], ["learner.gradient_checkpointing", "true or false"]),
        (["+env=sokoban", "env.kwargs=3"], ["env.kwargs"]),
        (["+env=sokoban", "model.path=[1,2]"], ["model.path"]),
        (["+env=sokoban", "trainer.seed=0,1"], ["trainer.seed=0,1", "one value"]),
        (["+env=sokoban", "~env=sokoban"], ["~env=sokoban", "one value"]),
        (["+env=sokoban", "trainer.name=[a"], ["trainer.name=[a", "quotes"]),
        (["frozen_lake"], ["'frozen_lake'", "+env=frozen_lake"]),
        (["+env=sokoban", "go"], ["'go'", "key=value"]),
    ],
)
def test_a_wrong_word_is_refused_with_the_nearest_right_one(overrides, words):
    text = problem(*overrides)
    assert "\n" not in text
    for word in words:
        assert word in text


def test_every_registered_environment_is_offered():
    assert set(registry) <= set(environment_names())


def test_every_file_of_configs_composes():
    for group in GROUPS:
        assert choices(group), f"configs/{group} is empty"
    for env in choices("env"):
        assert compose([f"+env={env}"]).env.id == PRESETS.get(env, env)
    for group in set(GROUPS) - {"env", "algorithm"}:  # recipes of algorithms: test_recipes.py
        for name in choices(group):
            assert compose(["+env=frozen_lake", f"{group}={name}"])


def test_every_shipped_environment_has_a_file():
    shipped = {spec.id for spec in registry.values() if str(spec.entry_point).startswith("agentgym_envs.")}
    assert shipped == set(choices("env")) - {"remote", *PRESETS}


def test_swe_bench_has_settings_for_a_node_of_gpus_a_small_model_and_the_tiny_policy(tmp_path):
    (tmp_path / "config.json").write_text('{"hidden_size": 4096}')
    node, small = (compose([f"+env={name}", f"model.path={tmp_path}"]) for name in ("swe_bench", "swe_bench_small"))
    tiny = compose(["+env=swe_bench"])
    assert node.engine.replicas * node.engine.tensor_parallel + node.learner.workers == 8
    assert node.engine.replicas * node.engine.max_concurrent == node.trainer.groups_per_step * node.algorithm.group_size
    assert small.env.kwargs["interface"] == "text"
    assert node.pools.groups
    assert small.pools.groups
    assert (tiny.engine.replicas, tiny.learner.lr, tiny.trainer.staleness) == (1, 1e-3, 0)
    assert tiny.env.kwargs["max_turns"] < node.env.kwargs["max_turns"]


def test_configs_is_found_in_the_checkout_and_in_the_package():
    folder = config_folder()
    assert (folder / "config.yaml").is_file()
    assert folder in (Path(__file__).parents[2] / "configs", Path(__file__).parents[2] / "agent_train" / "configs")


def test_yaml_round_trip():
    config = compose(
        ["+env=gsm8k_tool", "env.kwargs.a=[1,x]", "model.path=/m", "learner.lr=3e-7", "trainer.name='a: b'"]
    )
    assert config_from_yaml(to_yaml(config)) == config


@hypothesis_settings(max_examples=40, deadline=None)
@given(
    name=st.none()
    | st.text(min_size=1, max_size=20).filter(str.isprintable)
    | st.sampled_from(["${a}", r"\${a}", r"\\${a.b", "x\\y${oc.env:HOME}z\\"]),
    steps=st.integers(-(2**40), 2**40),
    lr=st.floats(allow_nan=False, allow_infinity=False),
)
def test_yaml_round_trip_of_any_value(name, steps, lr):
    config = Config(trainer=TrainerConfig(name=name, steps=steps))
    config.learner.lr = lr
    assert config_from_yaml(to_yaml(config)) == config


def test_an_agent_s_words_are_taken_as_they_are():
    words = r"""command:sh -c 'python a.py --url ${OPENAI_BASE_URL} "\${x}" \\'"""
    config = compose(["+env=gsm8k", f"agent={words}"])
    assert config.agent.run == words
    assert config_from_yaml(to_yaml(config)) == config


def test_yaml_that_leaves_keys_out_keeps_their_defaults():
    assert config_from_yaml("trainer:\n  steps: 3\n") == Config(trainer=TrainerConfig(steps=3))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("trainer:\n  stps: 3\n", ["trainer.stps", "did you mean trainer.steps"]),
        ("trainer:\n  steps: many\n", ["trainer.steps", "whole number"]),
        ("trainer: [1, 2]\n", ["TrainerConfig"]),
        ("[1, 2]", ["not a YAML of settings"]),
        ("42", ["not a YAML of settings: 42"]),
        ("trainer: {", []),
    ],
)
def test_yaml_with_a_wrong_key_or_value_is_refused(text, words):
    with pytest.raises(ConfigError) as refused:
        config_from_yaml(text)
    for word in words:
        assert word in str(refused.value)


def test_keys_of_the_settings_have_their_types():
    keys = settings()
    assert keys["trainer.steps"].kind is int
    assert keys["model.tiny.hidden"].kind is int
    assert "trainer" not in keys


def test_what_other_toolkits_call_a_setting_is_not_one_of_ours_and_stands_for_one():
    assert set(ELSEWHERE.values()) <= set(settings())
    assert not {key.rpartition(".")[2] for key in settings()} & set(ELSEWHERE)
