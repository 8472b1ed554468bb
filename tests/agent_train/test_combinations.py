"""Settings of an algorithm that do not go together are refused before anything starts, each by its key and with what to do."""

import subprocess
import sys

import pytest
from recipe_cases import settings_of

from agent_train.algorithms import kl, reductions
from agent_train.config import combinations, extensions
from agent_train.config.combinations import wrong_combinations, wrong_learner
from agent_train.config.compose import choices
from agent_train.config.schema import settings
from agent_train.config.validation import wrong_values

OPENAI, SGLANG = ([f"engine.name={name}", "engine.weights=disk"] for name in ("openai", "sglang"))  # as `engine=` sets
AT_H = ["engine.urls=[http://h:1]", "model.path=/model"]


def problems(*overrides):
    config = settings_of(*overrides)
    return [*wrong_values(config), *wrong_combinations(config), *wrong_learner(config)]


@pytest.mark.parametrize("name", choices("algorithm"))
def test_every_recipe_goes_together(name):
    needs = {"opd": ["teacher.url=http://127.0.0.1:9"], "vapo": ["trainer.steps=51"]}.get(name, [])
    assert problems(f"algorithm={name}", *needs) == []


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["algorithm.loss=pppo"], ["algorithm.loss=pppo", "did you mean ppo", "package.module:function"]),
        (["algorithm.loss_settings.clip_low=-1"], ["algorithm.loss_settings.clip_low=-1", "0 or more"]),
        (["algorithm=tis", "algorithm.correction.cap=null"], ["correction.name=tis", "correction.cap"]),
        (["algorithm.correction.cap=2"], ["correction.cap=2", "without algorithm.correction.name"]),
        (["algorithm.correction.name=icepop"], ["correction.name=icepop", "low and"]),
        (
            ["algorithm=icepop", "algorithm.correction.low=9"],
            ["algorithm.correction.low=9", "below algorithm.correction.high"],
        ),
        (["algorithm.correction.low=0.5"], ["correction.low=0.5", "without algorithm.correction.name"]),
        (["algorithm=tis", "algorithm.correction.low=0.5"], ["correction.low=0.5", "name=tis does not use it"]),
        (
            [f"algorithm.correction.{given}" for given in ("name=sequence-is", "cap=2", "high=3")],
            ["correction.high=3", "name=sequence-is does not use it"],
        ),
        (
            [f"algorithm.correction.{given}" for given in ("name=geometric-mask", "low=0.5", "high=2", "cap=2")],
            ["correction.cap=2", "name=geometric-mask does not use it"],
        ),
        (["engine.name=embedded", "engine.weights=disk"], ["engine.weights=disk", "without engine.name=vllm"]),
        (
            ["engine.name=vllm", "engine.weights=delta", "lora.rank=4", "lora.merge=false"],
            ["engine.weights=delta", "lora.rank=4", "leave it out", "lora.merge=true"],
        ),
        ([*OPENAI], ["engine.name=openai", "has no server", "engine.urls=[http"]),
        ([*SGLANG, "engine.urls=[http://h:1]"], ["model.path", "already have a model"]),
        (["engine.urls=[http://h:1]"], ["engine.urls=", "without engine.name=openai or sglang"]),
        ([*OPENAI, "engine.urls=[h:1]"], ["engine.urls", "'h:1' is not a URL", "http://HOST:PORT"]),
        ([*OPENAI, "engine.urls=[http://h:no]"], ["engine.urls", "'http://h:no' is not a URL"]),
        ([*OPENAI, "engine.urls=[http://h/model]"], ["engine.urls", "'http://h/model' is not a URL"]),
        ([*OPENAI, "engine.urls=['http://me:secret@h:1']"], ["engine.urls", "ENGINE_API_KEY"]),
        ([*OPENAI, "engine.urls=[http://h:1,http://h:1/v1]"], ["engine.urls", "twice"]),
        ([*OPENAI, *AT_H, "engine.weights=collective"], ["weights=collective", "set engine.weights=disk"]),
        ([*SGLANG, *AT_H, "engine.weights=delta"], ["engine.weights=delta", "set engine.weights=disk"]),
        ([*OPENAI, *AT_H, "engine.replicas=2"], ["engine.replicas=2", "started by others"]),
        ([*OPENAI, *AT_H, "engine.adaptive=true"], ["engine.adaptive=True", "without engine.name=vllm"]),
        ([*SGLANG, *AT_H, "engine.keep_cache=true"], ["keep_cache=True", "without engine.name=vllm"]),
        ([*SGLANG, *AT_H, "sampling.temperature=0.7"], ["temperature=0.7", "SGLANG_RETURN_ORIGINAL_LOGPROB"]),
        (["algorithm.reduction=constant"], ["reduction=constant", "reduction_length"]),
        (["algorithm.reduction_length=5"], ["reduction_length=5", "without algorithm.reduction=constant"]),
        (["memory.name=sumary"], ["memory.name=sumary", "did you mean summary"]),
        (["memory.tokens=99"], ["memory.tokens=99", "without memory.name=summary"]),
        (["memory.name=summary", "memory.tokens=50", "memory.room=53"], ["memory.room=53", "at least the 54 tokens"]),
        (["memory.name=summary", "memory.tokens=50", "memory.room=512"], ["memory.room=512", "max_model_len=512"]),
        (["memory.name=summary", "memory.tokens=508"], ["memory.tokens=508", "engine.max_model_len=512"]),
        (["memory.name=summary", "reward_model.path=/"], ["reward_model.path=/", "memory.name=none"]),
        (["algorithm=gspo", "algorithm.advantage.name=gigpo"], ["loss=gspo", "advantage gigpo", "loss=gspo_token"]),
        (["algorithm=gmpo", "algorithm.advantage.name=turn"], ["loss=gmpo", "advantage turn", "gspo_token or ppo"]),
        (["algorithm=gspo", "algorithm.reduction=token-mean"], ["reduction=token-mean", "seq-mean", "gspo_token"]),
        (["algorithm=gmpo", "algorithm.reduction=prompt-mean"], ["reduction=prompt-mean", "seq-mean-token-mean"]),
        (["algorithm.group_size=1"], ["group_size=1", "at least 2"]),
        (["algorithm=rloo", "algorithm.group_size=1"], ["group_size=1", "advantage rloo", "at least 2"]),
        (["algorithm=remax", "algorithm.filter.name=spread"], ["filter.name=spread", "never differ"]),
        (["algorithm.filter.rounds=3"], ["filter.rounds=3", "filter.name=spread"]),
        (["algorithm.kl.target=0.1"], ["kl.target=0.1", "without algorithm.kl.coef"]),
        (["algorithm.kl.coef=1", "algorithm.kl.target=1", "algorithm.kl.horizon=9"], ["kl.horizon=9", "192 episodes"]),
        (["algorithm=rloo", "algorithm.kl.gradient=k2"], ["kl.gradient=k2", "kl.place=loss"]),
        (["algorithm.overlong.buffer=3"], ["overlong.buffer=3", "overlong.length"]),
        (["algorithm.overlong.factor=2"], ["overlong.factor=2", "without algorithm.overlong.length"]),
        (["algorithm.overlong.baseline=false"], ["overlong.baseline=False", "without algorithm.overlong.mask"]),
        (["algorithm.overlong.length=3", "algorithm.overlong.buffer=4"], ["overlong.buffer=4", "at most"]),
        (["algorithm=maxrl", "algorithm.overlong.length=3"], ["advantage.name=maxrl", "overlong.length"]),
        (["algorithm=reinforce_pp", "algorithm.advantage.whiten=true"], ["whiten=true", "by itself"]),
        (["algorithm.advantage.whiten=true"], ["whiten=true", "without spread", "reinforce_pp_baseline"]),
        (["critic.alone_steps=3"], ["critic.alone_steps=3", "no critic", "gae"]),
        (["critic.path=/nowhere"], ["critic.path=/nowhere", "no critic"]),
        (["algorithm=prime", "critic.clip=0.2"], ["critic.clip=0.2", "prime has no critic"]),
        (["algorithm=vapo", "trainer.steps=50"], ["critic.alone_steps=50", "never learns"]),
        (["algorithm=ppo", "critic.path=/nowhere"], ["critic.path=/nowhere", "config.json"]),
        (["reference.path=/nowhere"], ["reference.path=/nowhere", "kl.coef"]),
        (["algorithm=remax", "reward_model.path=/nowhere"], ["reward_model.path=/nowhere", "greedy", "remax"]),
        (["algorithm=opd"], ["advantage.name=distill", "teacher.path", "teacher.url"]),
        (["algorithm=opd", "teacher.url=host:1"], ["teacher.url=host:1", "http://"]),
        (["teacher.url=http://h:1"], ["teacher.url=http://h:1", "advantage.name=distill"]),
        (
            ["algorithm=opd", "teacher.url=http://h:1", "algorithm.overlong.length=9"],
            ["overlong.length=9", "no reward"],
        ),
        (["learner.workers=4", "learner.tensor_parallel=3"], ["learner.tensor_parallel=3", "divide"]),
        (["learner.tensor_parallel=2", "learner.sequence_parallel=2"], ["sequence_parallel=2", "together"]),
    ],
)
def test_what_does_not_go_together_is_refused_with_what_to_do(overrides, words):
    found = problems(*overrides)
    assert found
    assert any(all(word in text for word in words) for text in found), found
    assert all("\n" not in text for text in found)


@pytest.mark.parametrize(
    "overrides",
    [
        ["algorithm.overlong.mask=true", "algorithm.overlong.baseline=false"],
        ["algorithm.overlong.length=3", "algorithm.overlong.factor=2"],
        ["algorithm=icepop", "algorithm.correction.cap=2"],
        ["algorithm.correction.name=seq-mask-tis", "algorithm.correction.low=0.5", "algorithm.correction.cap=2"],
        ["algorithm.correction.name=sequence-mask", "algorithm.correction.low=0.5"],
        ["algorithm.correction.name=math:fsum", *(f"algorithm.correction.{key}=1.5" for key in ("cap", "low"))],
        ["algorithm=ppo", "critic.clip=0.2"],
    ],
)
def test_what_is_used_is_accepted(overrides):
    assert problems(*overrides) == []


DIFFERING = ("gae", "bilevel_gae", "turn", "gigpo", "prime", "distill", "remax", "reinforce_pp")


@pytest.mark.parametrize("loss", sorted(extensions.WHOLE_SAMPLE_LOSSES))
@pytest.mark.parametrize("name", [*DIFFERING, *combinations.OF_EPISODES])
def test_a_loss_of_whole_samples_takes_one_advantage_for_an_episode(loss, name):
    told = [text for text in problems(f"algorithm={loss}", f"algorithm.advantage.name={name}") if "credit" in text]
    assert bool(told) == (name in DIFFERING)
    assert problems("algorithm=gspo_token", "algorithm.advantage.name=gigpo") == []


def test_every_advantage_is_said_to_be_of_episodes_or_not():
    assert {*DIFFERING, *combinations.OF_EPISODES} == set(extensions.advantages.shipped)


def test_the_names_are_those_of_the_formulas():
    """Validation imports no torch, so it names them once more."""
    assert choices("algorithm.reduction") == set(reductions.MODES)
    assert {*combinations.CAPPED, *combinations.BANDED} == set(extensions.corrections.shipped)
    assert choices("algorithm.kl.value") == set(kl.ESTIMATORS)


def choices(key):
    return set(settings()[key].choices)


def test_nothing_of_this_imports_torch():
    code = "import sys; import agent_train.config.validation; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=120, check=False).returncode == 0


@pytest.mark.parametrize("own", [OPENAI, SGLANG])
def test_engines_that_others_run_go_with_adapters_and_with_rollouts_ahead(own):
    assert problems(*own, *AT_H, "lora.rank=4", "trainer.staleness=2") == []


def test_merged_adapters_go_to_vllm_in_every_way_and_at_every_rank():
    for weights in choices("engine.weights"):
        assert problems("engine.name=vllm", f"engine.weights={weights}", "lora.rank=1024", "lora.merge=true") == []


def test_a_secret_in_a_url_is_not_repeated():
    told = problems(*OPENAI, "engine.urls=['http://me:secret@h:1']")
    assert told
    assert "secret@" not in "".join(told)
