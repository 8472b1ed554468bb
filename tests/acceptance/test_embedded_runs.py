"""What must hold of whole runs to the last bit, shown with the embedded engine: equal batches give equal numbers."""

from pathlib import Path

import pytest
import yaml
from checkpoints import weights_checksum
from equal_runs import assert_equal_runs, played, sampled, without_times
from safetensors.torch import load_file
from serving_process import serving
from training_process import SMALL, Training, training

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(600)]
ROOT = Path(__file__).parents[2]
STEPS = 2
SETTINGS = ("+env=frozen_lake", "engine=embedded", *SMALL, f"trainer.steps={STEPS}", "trainer.eval_every=1")


@pytest.fixture(scope="module")
def finished(forks, tmp_path_factory):
    """A function that makes a run with more settings and waits for its end; the same settings again are another run."""
    runs = tmp_path_factory.mktemp("runs")
    opened = []

    def run(*settings: str, env: dict[str, str] | None = None) -> Training:
        opened.append(training(runs, *settings, env=env, forks=forks))
        made = opened[-1].__enter__()
        assert made.wait() == 0, made.told()
        return made

    yield run
    for each in opened:
        each.__exit__(None, None, None)


@pytest.fixture(scope="module")
def first(finished) -> Training:
    return finished(*SETTINGS)


@pytest.fixture(scope="module")
def frozen(finished, in_shared_ray) -> Training:
    """Learning rate 0, and another seed. Nothing before the first update depends on the learning rate."""
    return finished(*SETTINGS, "learner.lr=0", "trainer.seed=1", env=in_shared_ray)


def test_the_same_seed_twice_gives_identical_metrics_and_identical_tokens(finished, first) -> None:
    """The second time with environments that Ray places, which must change nothing either."""
    placed = finished(*SETTINGS, "env.placement=ray", "env.workers=2")
    assert placed.saw("ray::EnvWorker")
    assert not first.saw("ray::EnvWorker")
    assert_equal_runs(placed, first)
    assert len(first.of_kind("train")) == STEPS
    assert any(record["update"]["grad_norm"] > 0 for record in first.of_kind("train"))
    assert len(sampled(first)) == 2 * STEPS + 1


SERVED = ("frozen_lake", "--kwargs", '{"view": "near", "holes": 0.12, "max_turns": 14, "shaping": 1.0}')


def of_file(env: str) -> list[str]:
    """The settings of an environment's files as one would type them, but for what the environment is made with."""
    files = [ROOT / "configs" / group / f"{env}.yaml" for group in ("env", "tiny")]

    def typed(table: dict, prefix: str) -> list[str]:
        found = []
        for key, value in table.items():
            name = f"{prefix}{key}"
            if isinstance(value, dict):
                found += typed(value, f"{name}.")
            elif not name.startswith("env."):
                found.append(f"{name}={value}")
        return found

    return [word for file in files for word in typed(yaml.safe_load(file.read_text()), "")]


def test_an_environment_on_two_servers_gives_the_same_run_until_one_is_killed_which_costs_no_episode(
    first, tmp_path: Path
) -> None:
    token = "of-the-acceptance-test"
    (tmp_path / "tokens").write_text(f"{token}\n")
    served = (*SERVED, "--token-file", str(tmp_path / "tokens"))
    with serving(*served, token=token) as stays, serving(*served, token=token) as dies:
        urls = f"env.url=[{stays.url}/frozen_lake,{dies.url}/frozen_lake]"
        words = ("env=remote", urls, *of_file("frozen_lake"), *SETTINGS[1:])
        with training(tmp_path, *words, env={"AGENTGYM_TOKEN": token}) as run:
            run.wait_for("episodes of the second step", lambda: run.of_kind("train") and dies.load()["sessions"])
            opened = stays.opened(), dies.opened()
            dies.kill()
            assert run.wait() == 0, run.told()
    assert min(opened) > 0.3 * sum(opened) > 0, opened
    assert not any(token in file.read_text(errors="replace") for file in run.folder.rglob("*") if file.is_file())
    # Until then nothing differs. Afterwards episodes are run again from their seed; the engine's batches are others, and so may be the
    # last bits.
    assert [without_times(r) for r in run.metrics[:-3]] == [without_times(r) for r in first.metrics[:-3]]
    for ours, theirs in ((sampled(run), sampled(first)), (played(run), played(first))):
        assert all(ours[file] == theirs[file] for file in ("eval-000000.jsonl", "train-000001.jsonl"))
    assert [r["failed"] for r in run.metrics if r["kind"] != "sft"] == [0] * (2 * STEPS + 1)
    ids, ours = ({file: sorted(id for id, _ in of) for file, of in sampled(r).items()} for r in (run, first))
    assert ids == ours


def test_another_seed_gives_other_weights_tasks_and_tokens(first, frozen) -> None:
    tokens = [sampled(run)["train-000001.jsonl"] for run in (first, frozen)]
    assert {id for id, _ in tokens[0]} != {id for id, _ in tokens[1]}
    assert [turns for _, turns in tokens[0]] != [turns for _, turns in tokens[1]]
    assert first.of_kind("sft")[0]["loss"] != frozen.of_kind("sft")[0]["loss"]


def test_with_learning_rate_0_the_weights_stay_what_they_were(first, frozen) -> None:
    start = weights_checksum(frozen.folder / "checkpoints" / "step-000000")
    assert {record["weights_checksum"] for record in frozen.of_kind("train")} == {start}
    assert any(record["update"]["grad_norm"] > 0 for record in frozen.of_kind("train"))
    end = load_file(frozen.checkpoint / "model.safetensors")
    for name, tensor in load_file(frozen.folder / "checkpoints" / "step-000000" / "model.safetensors").items():
        assert tensor.equal(end[name]), name
    # With another rate they do not, so the above can fail.
    assert len({record["weights_checksum"] for record in first.of_kind("train")}) == STEPS


def test_with_learning_rate_0_the_evaluation_is_flat(frozen) -> None:
    curve = [without_times({**record, "step": None}) for record in frozen.of_kind("eval")]
    assert len(curve) == STEPS + 1
    assert all(point == curve[0] for point in curve)
    tokens = sampled(frozen)
    played = [[ids for ids, _ in turns] for _, turns in tokens["eval-000000.jsonl"]]
    assert all(played == [[i for i, _ in turns] for _, turns in tokens[f"eval-{s:06d}.jsonl"]] for s in (1, STEPS))
