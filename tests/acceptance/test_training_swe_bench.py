"""Issues of a real repository, trained on: every episode in sandboxes with its image, graded by its tests in a fresh one."""

import json
import os
from pathlib import Path

import pytest
from training_process import training

from agentgym.core.trajectory import read_jsonl
from agentgym.sandbox.backends import docker
from agentgym_envs.swe_bench.images import build
from agentgym_envs.swe_bench.instances import read_instances

LITE = Path(os.environ.get("AGENTGYM_DATA", "/nowhere")) / "swe_bench" / "lite_from_sdist.jsonl"
IDS = ("pallets__flask-5063", "pallets__flask-4992")  # the splits of the first and the second: train, test
STEPS = 2
# As small as a policy can be: what it writes is noise. The expert's episodes show it a call of a tool.
SMALL = (
    "engine=embedded",
    "learner.workers=1",
    "model.tiny.hidden=64",
    "model.tiny.heads=2",
    "model.tiny.intermediate=128",
    "model.tiny.layers=1",
    "sft.episodes=1",
    "sft.mistakes=0",
    "engine.max_concurrent=4",
    "env.kwargs.max_turns=2",
    "env.kwargs.test_timeout=120",
    "env.kwargs.reward=fraction",
    "trainer.groups_per_step=1",
    "algorithm.group_size=4",
    "trainer.eval_episodes=1",
    f"trainer.steps={STEPS}",
)
# A summary of the first turn, in place of it: less room than this is left from the beginning.
SUMMARIES = ("memory.name=summary", "memory.tokens=8", "memory.room=8000", "env.kwargs.max_turns=3")
BOTH = [pytest.param("bubblewrap", marks=pytest.mark.bubblewrap), pytest.param("docker", marks=pytest.mark.docker)]
pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.data, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def instances(tmp_path_factory) -> Path:
    """A file of two instances whose images are built."""
    if not LITE.is_file():
        pytest.skip("needs AGENTGYM_DATA with swe_bench/lite_from_sdist.jsonl")
    lines = {json.loads(line)["instance_id"]: line for line in LITE.read_text().splitlines()}
    file = tmp_path_factory.mktemp("instances") / "two.jsonl"
    file.write_text("".join(f"{lines[id]}\n" for id in IDS))
    for image in build(read_instances(file)):
        assert image.built, image.error
    return file


@pytest.mark.parametrize("sandbox", BOTH)
def test_two_steps_are_trained_on_real_repositories(
    sandbox, instances: Path, in_shared_ray, forks, uncut: bool, tmp_path: Path
) -> None:
    if sandbox == "docker" and not uncut:
        pytest.skip("takes a minute or two; set AGENTGYM_TEST_ALL to run it")
    memory = SUMMARIES if sandbox == "bubblewrap" else ()
    given = (*SMALL, *memory, f"sandbox={sandbox}", f"env.kwargs.data={instances}")
    # The engine of the tests is on ext4, where it cannot limit layers. Workers of a Ray that runs already would not know.
    env = {docker.UNLIMITED: "1"} if sandbox == "docker" else in_shared_ray
    with training(tmp_path, "+env=swe_bench", *given, env=env, forks=forks) as run:
        assert run.wait(560) == 0, run.told()
        assert [record["step"] for record in run.of_kind("train")] == list(range(1, STEPS + 1))
        assert all(record["failed"] == 0 for record in run.of_kind("train") + run.of_kind("eval"))
        episodes = [t for file in sorted((run.folder / "trajectories").iterdir()) for t in read_jsonl(file)]
        assert {episode.task_id for episode in episodes} == set(IDS)
        ended = [episode.turns[-1].info for episode in episodes if episode.turns]
        assert ended, [episode.end for episode in episodes]
        assert all(info["exit"] in ("submitted", "turns", "time", "context") for info in ended)
        records = run.of_kind("train") + run.of_kind("eval")
        assert all({"submitted", "doubted", "dropped"} <= record["env"].keys() for record in records)
        assert all(isinstance(info["model_patch"], str) for info in ended)
        trained = run.of_kind("train")
        assert all(record["update"]["tokens"] == record["sampled_tokens"] > 0 for record in trained)
        assert all((record.get("summaries", 0) > 0) == bool(memory) for record in trained)
