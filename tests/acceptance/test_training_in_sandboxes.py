"""An environment that acts, trained on: every episode in a container, and no container left."""

import uuid

import pytest
from training_process import Training, training

from agentgym.sandbox.backends.docker import docker_sandboxes

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.docker]
STEPS = 2
# As small as a policy can be: what it writes is noise, which is what a sandbox is for.
SMALL = (
    "engine=embedded",
    "sandbox=docker",
    "learner.workers=1",
    "model.tiny.hidden=64",
    "model.tiny.heads=2",
    "model.tiny.intermediate=128",
    "model.tiny.layers=1",
    "sft.episodes=8",
    "sampling.max_tokens=16",
    "trainer.groups_per_step=2",
    "algorithm.group_size=4",
    "trainer.eval_episodes=4",
    f"trainer.steps={STEPS}",
)


def containers(label: str) -> list[str]:
    return [box.id for box in docker_sandboxes() if box.run == label]


def started(run: Training, label: str) -> list[str]:
    return run.wait_for("its first container", lambda: containers(label))


def test_two_steps_are_trained_in_containers_and_none_is_left(in_shared_ray, forks, tmp_path) -> None:
    label = f"test-{uuid.uuid4().hex[:8]}"
    with training(tmp_path, "+env=code_mbpp", *SMALL, env={**in_shared_ray, "AGENTGYM_RUN": label}, forks=forks) as run:
        assert started(run, label)
        assert run.wait() == 0, run.told()
        assert containers(label) == []
        assert [record["step"] for record in run.of_kind("train")] == list(range(1, STEPS + 1))
        assert all(record["failed"] == 0 for record in run.of_kind("train"))
        assert "docker" in run.out
