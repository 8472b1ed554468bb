"""Which models a run has, where each starts, which of them learn, and that the others stay what they were."""

import dataclasses
from pathlib import Path

import pytest
import torch
from learner_cases import make_config, make_rows, one_rank, write_model
from sample_tokenizers import LAKE, tiny

from agent_train.data.packing import rank_batches
from agent_train.learner.actor_group import Learner
from agent_train.learner.role_start import Models, check_vocabularies, learning
from agent_train.learner.roles import (
    VocabularyError,
    check_folder,
    learning_rate,
    learns,
    roles_of,
    source_of,
    start_of,
)
from agent_train.learner.tiny import train_tokenizer


def config_with(**settings):
    """A config with dotted settings, dots as two underscores."""
    config = make_config()
    for key, value in settings.items():
        *path, name = key.split("__")
        place = config
        for part in path:
            place = getattr(place, part)
        setattr(place, name, value)
    return config


@pytest.mark.parametrize(
    ("settings", "roles"),
    [
        ({}, ()),
        ({"algorithm__kl__coef": 0.1}, ("reference",)),
        ({"algorithm__advantage__name": "gae"}, ("critic",)),
        ({"algorithm__advantage__name": "bilevel_gae", "algorithm__kl__coef": 0.1}, ("reference", "critic")),
        ({"algorithm__advantage__name": "prime"}, ("reference", "prm")),
        ({"algorithm__advantage__name": "distill", "teacher__path": "there"}, ("teacher",)),
        ({"algorithm__advantage__name": "distill", "teacher__url": "http://there"}, ()),
        ({"reward_model__path": "there"}, ("reward_model",)),
    ],
)
def test_a_run_has_the_roles_that_its_settings_ask_for(settings, roles):
    assert roles_of(config_with(**settings)) == ("policy", *roles)


def test_what_learns_beside_the_policy_and_at_which_rate():
    config = config_with(critic__lr=0.5, critic__warmup_steps=7, learner__lr=0.1, learner__warmup_steps=3)
    assert [
        role for role in ("policy", "critic", "prm", "reference", "teacher", "reward_model") if learns(config, role)
    ] == ["policy", "critic", "prm"]
    assert learning_rate(config, "policy") == (0.1, 3)
    assert learning_rate(config, "critic") == learning_rate(config, "prm") == (0.5, 7)


def test_a_reward_model_that_is_what_is_trained_learns_at_the_learners_rate():
    config = config_with(mode="rm", learner__lr=0.1, learner__warmup_steps=3)
    assert roles_of(config) == ("reward_model",)
    assert learns(config, "reward_model")
    assert learning_rate(config, "reward_model") == (0.1, 3)


def test_a_role_starts_where_the_settings_say_and_else_as_the_policy_does(tmp_path):
    config = config_with()
    for role in ("reference", "critic", "prm"):
        assert start_of(config, role, tmp_path) == tmp_path
    config = config_with(critic__path="/a/critic", reference__path="/a/reference")
    assert start_of(config, "reference", tmp_path) == Path("/a/reference")
    assert start_of(config, "critic", tmp_path) == start_of(config, "prm", tmp_path) == Path("/a/critic")
    # Without one of its own, PRIME's reward model starts where its rewards do, so that they begin as 0.
    assert source_of(config_with(reference__path="/a/reference"), "prm") == "/a/reference"
    assert start_of(config_with(), "policy", tmp_path) == tmp_path


def test_a_checkpoint_holds_what_learns_beside_the_policy():
    config = make_config()
    policy, critic, reference = (Learner([], config, role) for role in ("policy", "critic", "reference"))
    assert learning(config, Models(policy, reference, critic)) == [policy, critic]


# The ranks themselves.


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("model"))


def whole_weights(worker):
    return {name: p.detach().full_tensor().clone() for name, p in worker.module.named_parameters()}


@pytest.mark.parametrize("role", ["reference", "teacher", "reward_model"])
def test_a_frozen_role_answers_has_no_optimizer_and_keeps_every_bit(model_dir, role):
    share = rank_batches(make_rows(), 1, 30)[0]
    with one_rank(model_dir, role=role) as worker:
        before = whole_weights(worker)
        assert not any(p.requires_grad for p in worker.module.parameters())
        first = worker.scores(share) if role == "reward_model" else worker.logprobs(share)
        for update in (
            lambda: worker.update([share]),
            lambda: worker.sft(share, 1.0),
            lambda: worker.update_prm(share),
        ):
            with pytest.raises(RuntimeError, match=f"the {role} is frozen"):
                update()
        again = worker.scores(share) if role == "reward_model" else worker.logprobs(share)
        assert first == again
        after = whole_weights(worker)
        assert {name: torch.equal(value, after[name]) for name, value in before.items()} == dict.fromkeys(before, True)
        assert all(p.grad is None for p in worker.module.parameters())


def test_the_reference_says_what_the_policy_said_when_it_started(model_dir):
    share = rank_batches(make_rows(), 1, 30)[0]
    with one_rank(model_dir) as policy:
        start = policy.logprobs(share)
        policy.update([share])
        assert policy.logprobs(share) != start
    with one_rank(model_dir, role="reference") as reference:
        assert reference.logprobs(share) == start


def test_a_role_that_loads_another_folder_is_as_if_it_had_started_there(model_dir, tmp_path):
    other = write_model(tmp_path, seed=1)
    share = rank_batches(make_rows(), 1, 30)[0]
    with one_rank(other) as there:
        expected = there.logprobs(share)
        expected_update = there.update([share])
    with one_rank(model_dir) as worker:
        worker.update([share])
        worker.load(str(other))
        assert worker.logprobs(share) == expected
        again = worker.update([share])
    assert dataclasses.replace(again, seconds=0.0) == dataclasses.replace(expected_update, seconds=0.0)


def test_the_learning_rate_of_a_role_is_its_own_and_warms_up(model_dir):
    rows = [dataclasses.replace(row, targets=row.spread(1.0)) for row in make_rows()]
    config = config_with(critic__lr=0.4, critic__warmup_steps=4)
    with one_rank(model_dir, config, "critic") as critic:
        rates = [
            critic.update_critic(rank_batches(rows, 1, 100), lr_scale=s).lr for s in (1.0, 1.0, 1.0, 1.0, 1.0, 0.5)
        ]
    assert rates == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.4, 0.2])


# Vocabularies.


@pytest.fixture(scope="module")
def policy_dir(tmp_path_factory):
    folder = tmp_path_factory.mktemp("policy")
    tiny().save_pretrained(str(folder))
    return folder


def test_the_same_tokenizer_and_one_that_knows_more_are_taken(policy_dir, tmp_path):
    check_folder(policy_dir, policy_dir, "reference.path")
    more = train_tokenizer(LAKE * 4, 400, 1024)
    more.add_tokens(["<another>"])
    more.save_pretrained(str(tmp_path))
    check_folder(tmp_path, policy_dir, "reference.path")
    with pytest.raises(VocabularyError, match=r"token '<another>' is \d+ for the policy and unknown there"):
        check_folder(policy_dir, tmp_path, "reference.path")


def test_a_role_that_means_something_else_by_an_id_is_refused_by_its_setting(policy_dir, tmp_path):
    train_tokenizer(["quite other words " * 9] * 4, 400, 1024).save_pretrained(str(tmp_path))
    for key, settings in {
        "critic.path": {"algorithm__advantage__name": "gae"},
        "reference.path": {"algorithm__kl__coef": 0.1},
        "reward_model.path": {},
    }.items():
        config = config_with(**settings, **{key.replace(".", "__"): str(tmp_path)})
        with pytest.raises(
            VocabularyError, match=rf"{key}=.*: another vocabulary than the policy's: token .* is \d+ for"
        ):
            check_vocabularies(config, policy_dir)
    # A folder that no role of the run is loaded from is not looked at.
    check_vocabularies(config_with(critic__path=str(tmp_path)), policy_dir)


def test_a_model_without_a_tokenizer_is_refused_with_the_remedy(policy_dir, tmp_path):
    with pytest.raises(VocabularyError, match=r"teacher\.path=.* has no tokenizer.*copy the policy's"):
        check_folder(tmp_path, policy_dir, "teacher.path")
