"""Training over a served environment: the settings, and that what is made of its episodes is what a local one gives."""

import asyncio
import dataclasses
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from agent_train.config.compose import compose
from agent_train.config.schema import ConfigError
from agent_train.config.validation import env_spec, validate
from agent_train.learner.tiny import texts_of_env
from agent_train.trainer.warm_start import expert_trajectories
from agentgym.core.registration import spec
from agentgym.service.client import lookup

sys.path.insert(0, str(Path(__file__).parents[1] / "agentgym" / "service"))
from served import served


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """Serves what `env=frozen_lake` trains on, and a plain gsm8k."""
    trained = dataclasses.replace(spec("frozen_lake"), kwargs=compose(["+env=frozen_lake"]).env.kwargs)
    with served("gsm8k", specs={"frozen_lake": trained}) as server:
        yield server.url


@pytest.fixture(autouse=True)
def _nothing_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lookup, "known_records", {})
    monkeypatch.delenv("AGENTGYM_TOKEN", raising=False)


def settings(*overrides: str) -> Any:
    return compose([*overrides, "engine=embedded"])


def problems(*overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        validate(settings(*overrides))
    return "\n".join(caught.value.problems)


def test_a_served_environment_is_a_choice_of_its_own_or_an_address_for_a_shipped_one(url: str) -> None:
    for overrides in (
        ["env=remote", f"env.url=[{url}/frozen_lake]"],
        ["+env=frozen_lake", f"env.url=[{url}/frozen_lake]"],
        [f"+env='{url}/frozen_lake'"],
    ):
        config = settings(*overrides)
        validate(config)
        assert env_spec(config).id == f"{url}/frozen_lake"


def test_what_a_tiny_model_reads_and_imitates_is_what_a_local_environment_gives(url: str) -> None:
    local = env_spec(settings("+env=frozen_lake"))
    remote = env_spec(settings("+env=frozen_lake", f"env.url=[{url}/frozen_lake]"))
    assert texts_of_env(remote.id, remote.kwargs, 6, seed=3) == texts_of_env(local.id, local.kwargs, 6, seed=3)
    played = [asyncio.run(expert_trajectories(found, "train", 5, 0.3, seed=1)) for found in (local, remote)]
    shown = [
        json.dumps([[t.task_id, t.end, [(x.observation, x.reply, x.reward, x.info) for x in t.turns]] for t in one])
        for one in played
    ]
    assert shown[0] == shown[1]


def test_mistakes_are_told_in_one_line(url: str) -> None:
    assert problems("env=remote") == "env.url: names no server: set env.url=[http://HOST:PORT/ENV]"
    assert "'gsm8k' is not a URL" in problems("env=remote", "env.url=[gsm8k]")
    assert "no server answers" in problems("env=remote", "env.url=[http://127.0.0.1:1/gsm8k]")
    with pytest.raises(ConfigError, match=r"env\.url: needs a list"):
        settings("env=remote", "env.url=http://127.0.0.1:1/gsm8k")
    told = problems("+env=frozen_lake", f"env.url=[{url}/frozen_lake]", "env.kwargs.holes=0.3")
    assert "holes=0.3 is expected, and the server makes it with holes=0.12" in told
    told = problems("env=remote", f"env.url=[{url}/gsm8k]", "env.kwargs.size=3")
    assert "size=3 is expected, and the server makes it with no size" in told
