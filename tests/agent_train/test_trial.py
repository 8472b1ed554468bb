"""The formulas of an algorithm are tried before anything starts: what they refuse is refused at validation."""

import json
import re

import pytest
from recipe_cases import settings_of

from agent_train.config import combinations, trial
from agent_train.config.compose import choices
from agent_train.config.extensions import advantages
from agent_train.config.schema import settings
from agent_train.config.trial import wrong_formulas, wrong_model


def problems(*overrides):
    return list(wrong_formulas(settings_of(*overrides)))


@pytest.mark.parametrize("name", choices("algorithm"))
def test_every_recipe_computes(name):
    assert problems(f"algorithm={name}") == []


@pytest.mark.parametrize("name", [name for name in advantages.shipped if name != "maxrl"])
def test_every_advantage_computes_with_the_kl_in_the_reward(name):
    assert problems(f"algorithm.advantage.name={name}", "algorithm.kl.coef=0.1", "algorithm.kl.place=reward") == []


@pytest.mark.parametrize("name", [*combinations.CAPPED, *combinations.BANDED])
@pytest.mark.parametrize("proximal", ["recomputed", "interpolated"])
def test_every_correction_computes(name, proximal):
    band = ["algorithm.correction.low=0.5", "algorithm.correction.high=2", "algorithm.correction.drift=0.1"]
    given = [f"algorithm.correction.name={name}", f"algorithm.proximal={proximal}", "algorithm.correction.cap=2", *band]
    assert problems(*given) == []


@pytest.mark.parametrize("value", settings()["algorithm.kl.value"].choices)
@pytest.mark.parametrize("importance", settings()["algorithm.kl.importance"].choices)
def test_every_kl_computes(value, importance):
    assert (
        problems("algorithm.kl.coef=0.1", f"algorithm.kl.value={value}", f"algorithm.kl.importance={importance}") == []
    )


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["algorithm.loss_settings.dual_clip=0.5"], "algorithm.loss=ppo: dual_clip must be above 1"),
        (["algorithm.loss_settings.clip_low=null"], "clip_low must be a number"),
        (["algorithm.loss_settings.clip_low=wide"], "clip_low must be a number"),
        (["algorithm.loss_settings.clip=1"], "'clip'; it has clip_high, clip_low, dual_clip"),
        (["algorithm.loss=agent_train.algorithms.losses:keep"], "no parameter logprobs_T"),
        (["algorithm=dppo", "algorithm.proximal=recomputed"], "set proximal to behaviour"),
        (["algorithm=tis", "algorithm.proximal=behaviour"], "covers it already"),
        (["algorithm=sapo", "algorithm.loss_settings.tau_positive=0"], "not all finite"),
        (["algorithm=sapo", "algorithm.loss_settings.tau_negative=0"], "not all finite"),
        (["algorithm=aipo", "algorithm.loss_settings.cap=0"], "no gradient"),
        (["algorithm=kimi", "algorithm.loss_settings.tau=1.0e+38"], "where the policy has moved"),
        (["algorithm=gspo", "algorithm.advantage.name=turn"], "needs one advantage"),
        (["algorithm.kl.coef=1.0e+38"], "not all finite"),
        (["algorithm=topr", "algorithm.loss=test_trial:of_gains"], "RuntimeError: no gains below 0"),
    ],
)
def test_what_a_formula_refuses_is_refused_with_its_key(overrides, words):
    (problem,) = problems(*overrides)
    assert problem.startswith("algorithm.")
    assert words in problem
    assert "\n" not in problem


def of_gains(logprobs_T, old_T, advantages_T):
    """A loss of one's own that fails where the policy has moved and the advantage is negative."""
    if ((advantages_T < 0) & (logprobs_T < old_T)).any():
        raise RuntimeError("no gains below 0")
    return -logprobs_T * advantages_T


def test_advantages_of_both_signs_meet_ratios_on_both_sides(monkeypatch):
    seen = set()

    def told(self, batch, output, **given):
        logprobs_T = output[0]
        moved_T = (logprobs_T - batch.start_T).detach()[batch.mask_T]
        seen.update(zip((batch.advantages_T[batch.mask_T] > 0).tolist(), moved_T.sign().tolist(), strict=True))
        return (logprobs_T * 1.0).sum(), None, None

    monkeypatch.setattr(trial.PolicyObjective, "contribute", told)
    assert problems() == []
    assert seen == {(positive, side) for positive in (True, False) for side in (-1.0, 0.0, 1.0)}


def above_the_worst(inputs):
    """An advantage as a user writes it: the reward less the worst of its group."""
    return inputs.on_tokens([[reward - min(rewards) for reward in rewards] for rewards in inputs.rewards])


def test_a_users_own_advantage_is_tried_and_one_that_cannot_be_imported_is_refused():
    assert problems(f"algorithm.advantage.name={__name__}:above_the_worst") == []
    (problem,) = problems("algorithm.advantage.name=no_such_module:f")
    assert problem.startswith("algorithm.advantage.name=no_such_module:f: advantage")
    assert "cannot import module" in problem


def backwards(rewards, share):
    return list(reversed(range(len(rewards))))


def best(rewards, share):
    """It forgets that episodes fail."""
    return [number for number, group in enumerate(rewards) if max(group) > share]


def of_nothing(*inputs):
    return inputs[99]


@pytest.mark.parametrize(
    ("override", "words"),
    [
        (f"algorithm.filter.name={__name__}:backwards", "not ascending indices of 3 groups"),
        (f"algorithm.filter.name={__name__}:best", "TypeError: '>' not supported"),
        (f"algorithm.advantage.name={__name__}:of_nothing", "IndexError: "),
    ],
)
def test_a_users_own_function_that_fails_is_told_before_the_run(override, words):
    (problem,) = problems(override)
    assert problem.startswith(f"{override}: ")
    assert words in problem


def by_progress(trajectory):
    """A shaping that reads what its environment tells."""
    return [turn.reward + turn.info["progress"] for turn in trajectory.turns]


def twice(trajectory):
    return [0.0] * (2 * len(trajectory.turns))


def test_a_shaping_that_reads_what_made_up_episodes_lack_is_left_to_the_run():
    assert problems(f"algorithm.reward_shaping={__name__}:by_progress") == []
    (problem,) = problems(f"algorithm.reward_shaping={__name__}:twice")
    assert "not a finite number for each of" in problem


def model_problems(folder, *overrides):
    return list(wrong_model(settings_of(f"model.path={folder}", *overrides)))


SHAPE = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}


@pytest.mark.parametrize(
    ("kind", "overrides", "told"),
    [
        ("qwen3", ["lora.rank=4", "lora.targets=[q_proj,query]"], r"lora.targets: .*no linear layers \['query'\]"),
        ("qwen3", ["learner.workers=4", "learner.tensor_parallel=4"], "tensor_parallel=4 has to divide"),
        ("qwen3", ["learner.workers=3", "learner.sequence_parallel=3"], "sequence_parallel=3 cannot share"),
        ("phi3", ["learner.workers=2", "learner.tensor_parallel=2"], "has a layer 'self_attn.qkv_proj'"),
        ("bloom", [], "would join the tokens of packed samples"),
        ("gpt_oss_of_tomorrow", [], "gpt_oss_of_tomorrow"),
    ],
)
def test_a_model_that_the_learner_cannot_train_is_refused_before_its_weights_are_read(tmp_path, kind, overrides, told):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind, "pad_token_id": 0, **SHAPE}))
    (found,) = model_problems(tmp_path, *overrides)
    assert found.startswith(f"model.path={tmp_path}: ")
    assert re.search(told, found)


@pytest.mark.parametrize("overrides", [["mode=sft"], ["mode=rm"], ["lora.rank=4"], ["learner.tensor_parallel=2"]])
def test_a_model_that_it_can_train_is_not(tmp_path, overrides):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3", **SHAPE}))
    assert model_problems(tmp_path, *overrides) == []
