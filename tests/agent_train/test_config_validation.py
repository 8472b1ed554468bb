"""What cannot run here is refused before anything starts: every problem at once, each with its key."""

import json
import socket
from importlib.util import find_spec
from pathlib import Path

import pytest

from agent_train.config import combinations, validation
from agent_train.config.compose import choices, compose
from agent_train.config.schema import Config, ConfigError
from agent_train.config.validation import validate, visible_gpus
from agentgym.core.env import Env
from agentgym.core.tasks import Task, TaskSet
from agentgym.sandbox.backends import select as backends


class NoExpert(Env):
    """An environment that nobody can show how to play, with a training split only."""

    @classmethod
    def default_tasks(cls, split: str = "train") -> TaskSet:
        if split == "empty":
            return TaskSet([], name="empty")
        if split != "train":
            raise ValueError(f"no split {split!r}: there is train")
        return TaskSet([Task(id="one")], name="train")


class Breaks(Env):
    """An environment that cannot be made."""

    def __init__(self):
        raise RuntimeError("no licence file\nsecond line")


def settings(tmp_path: Path, *overrides: str) -> Config:
    # One worker: this machine may have one GPU or none.
    return compose(
        [
            "+env=frozen_lake",
            "engine=embedded",
            "learner.workers=1",
            f"trainer.runs_dir={tmp_path / 'runs'}",
            *overrides,
        ]
    )


def problems(tmp_path: Path, *overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as refused:
        validate(settings(tmp_path, *overrides))
    return refused.value.problems


def model_folder(
    tmp_path: Path, *, config=True, weights=True, tokenizer=True, template=True, jinja=False, longest=4096
) -> Path:
    """The files that are looked at, with no model in them."""
    folder = tmp_path / "model"
    folder.mkdir()
    if config:
        small = {"hidden_size": 32, "num_hidden_layers": 1, "vocab_size": 64}
        text = {"model_type": "qwen2", "max_position_embeddings": longest, **small}
        (folder / "config.json").write_text(json.dumps(text))
    if weights:
        (folder / "model.safetensors").touch()
    if tokenizer:
        (folder / "tokenizer.json").write_text("{}")
        (folder / "tokenizer_config.json").write_text(
            json.dumps({"chat_template": "{{ messages }}"} if template else {})
        )
    if jinja:
        (folder / "chat_template.jinja").write_text("{{ messages }}")
    return folder


@pytest.mark.parametrize(
    "env",
    [
        pytest.param(env, marks=pytest.mark.data) if env.startswith("swe_bench") else env
        for env in choices("env")
        if env != "remote"
    ],
)
def test_every_shipped_environment_can_be_run(env, tmp_path):
    validate(compose([f"+env={env}", "engine=embedded", "learner.workers=1", f"trainer.runs_dir={tmp_path}"]))
    assert list(tmp_path.iterdir()) == [], "looking must leave nothing behind"


POSITIVE = [
    "engine.replicas",
    "engine.max_model_len",
    "engine.max_concurrent",
    "engine.start_timeout",
    "sampling.temperature",
    "sampling.max_tokens",
    "algorithm.group_size",
    "algorithm.updates_per_step",
    "learner.workers",
    "learner.microbatch_tokens",
    "learner.max_grad_norm",
    "model.tiny.hidden",
    "model.tiny.heads",
    "sft.batch_rows",
    "trainer.steps",
    "trainer.groups_per_step",
    "trainer.eval_every",
    "trainer.save_every",
    "trainer.keep_checkpoints",
]


@pytest.mark.parametrize("value", [0, -1])
@pytest.mark.parametrize("key", POSITIVE)
def test_a_size_that_is_not_positive_is_refused(key, value, tmp_path):
    assert any(p.startswith(f"{key}={value}") and "must be positive" in p for p in problems(tmp_path, f"{key}={value}"))


@pytest.mark.parametrize(
    "override",
    [
        "learner.lr=0",
        "sft.episodes=0",
        "sft.mistakes=1",
        "engine.port=0",
        "learner.warmup_steps=0",
        "trainer.seed=0",
        "env.step_timeout=0",
        "learner.beta1=0",
    ],
)
def test_a_number_that_may_be_zero_may_be_zero(override, tmp_path):
    validate(settings(tmp_path, override))


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("learner.lr=-1", ["learner.lr", "0 or more"]),
        ("learner.lr=nan", ["learner.lr"]),
        ("learner.lr=inf", ["learner.lr"]),
        ("learner.beta2=1", ["learner.beta2", "[0, 1)"]),
        (f"trainer.seed={2**63}", ["trainer.seed", f"[0, {2**63})"]),
        ("sft.mistakes=1.5", ["sft.mistakes", "[0, 1]"]),
        ("engine.port=70000", ["engine.port", "65535"]),
        ("algorithm.group_size=1", ["algorithm.group_size=1", "at least 2"]),
        ("algorithm.advantage.std=smple", ["algorithm.advantage.std=smple", "did you mean sample"]),
        ("algorithm.advantage.eps=-1", ["algorithm.advantage.eps=-1", "0 or more"]),
        ("algorithm.advantage.value_lam=2", ["algorithm.advantage.value_lam=2", "[0, 1]"]),
        ("algorithm.kl.max_value=0", ["algorithm.kl.max_value=0", "positive"]),
        ("algorithm.kl.gradient=k4", ["algorithm.kl.gradient=k4", "null, k1"]),
        ("engine.name=vlm", ["engine.name=vlm", "did you mean vllm"]),
        ("model.dtype=bf16", ["model.dtype=bf16", "bfloat16"]),
        ("sampling.max_tokens=512", ["sampling.max_tokens=512", "engine.max_model_len=512"]),
        ("model.tiny.heads=5", ["model.tiny.heads=5", "model.tiny.hidden=192"]),
        ("model.tiny.heads=8", ["model.tiny.heads=8", "32, 64"]),
        ("model.tiny.vocab=200", ["model.tiny.vocab=200", "at least"]),
        ("env.test_split=train", ["env.test_split=train"]),
        ("env.test_split=tst", ["env.test_split=tst", "frozen_lake", "train, test"]),
        ("env.kwargs.siz=8", ["frozen_lake", "'siz'"]),
        ("sandbox=dokcer", ["sandbox=dokcer", "did you mean docker"]),
        ("sandbox=bubblewrap", ["sandbox=bubblewrap", "frozen_lake has no sandbox"]),
        ("algorithm.credit=team", ["algorithm.credit=team", "frozen_lake has one agent, not players"]),
        ("trainer.name=a/b", ["trainer.name", "folder name"]),
        ("trainer.name=..", ["trainer.name", "folder name"]),
    ],
)
def test_a_value_that_cannot_be_run_is_refused(override, words, tmp_path):
    (text,) = problems(tmp_path, override)
    assert "\n" not in text
    for word in words:
        assert word in text


@pytest.mark.parametrize("credit", ["team", "difference"])
def test_players_may_earn_together(credit, tmp_path):
    validate(settings(tmp_path, "env=tic_tac_toe_self", f"algorithm.credit={credit}"))


@pytest.mark.bubblewrap
def test_the_sandboxs_back_end_reaches_the_environment(tmp_path):
    config = compose(["+env=sql", "sandbox=bubblewrap", f"trainer.runs_dir={tmp_path}"])
    assert validation.env_spec(config).kwargs["sandbox"] == "bubblewrap"
    assert validation.sandbox_choice(config) == "bubblewrap, because it was asked for"
    own = compose(["+env=sql", "sandbox=docker", "env.kwargs.sandbox=bubblewrap"])
    assert validation.env_spec(own).kwargs["sandbox"] == "bubblewrap"


def test_an_environment_without_a_sandbox_is_told_of_none(tmp_path):
    config = settings(tmp_path)
    assert "sandbox" not in validation.env_spec(config).kwargs
    assert validation.sandbox_choice(config) is None


def test_a_sandbox_that_cannot_be_had_is_refused_before_anything_starts(tmp_path, monkeypatch):
    monkeypatch.setenv("DOCKER_HOST", "unix:///no/such/docker.sock")
    monkeypatch.setattr(backends.process_state, "choices", {})  # one that succeeded before would be kept
    config = compose(["+env=sql", "sandbox=docker", "engine=embedded", f"trainer.runs_dir={tmp_path}"])
    with pytest.raises(ConfigError, match=r"sandbox=docker.*unix:///no/such/docker.sock"):
        validate(config)


def test_all_problems_are_told_at_once(tmp_path):
    found = problems(
        tmp_path,
        "trainer.steps=0",
        "algorithm.group_size=1",
        "model.path=/nowhere",
        "learner.lr=-1",
        "algorithm.advantage.std=no",
    )
    assert {p.split("=")[0] for p in found} == {
        "trainer.steps",
        "algorithm.group_size",
        "model.path",
        "learner.lr",
        "algorithm.advantage.std",
    }


def test_a_model_folder_is_accepted_with_either_form_of_chat_template(tmp_path):
    folder = model_folder(tmp_path)
    validate(settings(tmp_path, f"model.path={folder}"))
    (folder / "tokenizer_config.json").write_text("{}")
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    validate(settings(tmp_path, f"model.path={folder}"))


def test_a_model_folder_that_is_not_there(tmp_path):
    (text,) = problems(tmp_path, "model.path=nobody/nothing-1B")
    assert text.startswith("model.path=nobody/nothing-1B: no such folder")
    assert "hf download nobody/nothing-1B" in text
    file = tmp_path / "file"
    file.touch()
    assert "is a file" in problems(tmp_path, f"model.path={file}")[0]


@pytest.mark.parametrize(
    ("missing", "words"),
    [
        ({"config": False}, "no config.json"),
        ({"weights": False}, "no weights"),
        ({"tokenizer": False}, "no tokenizer"),
        ({"template": False}, "no chat template"),
    ],
)
def test_a_model_folder_that_lacks_something(missing, words, tmp_path):
    (text,) = problems(tmp_path, f"model.path={model_folder(tmp_path, **missing)}")
    assert text.startswith("model.path=")
    assert words in text


def test_a_context_that_the_model_cannot_read(tmp_path):
    (text,) = problems(tmp_path, f"model.path={model_folder(tmp_path, longest=256)}", "engine.max_model_len=512")
    assert text.startswith("engine.max_model_len=512")
    assert "256" in text


@pytest.mark.parametrize(
    "config",
    [
        {"rope_scaling": {"type": "longrope"}, "original_max_position_embeddings": 256},
        {"rope_parameters": {"rope_type": "longrope", "original_max_position_embeddings": 256}},
    ],
)
def test_a_model_with_longrope_reads_its_original_length(config, tmp_path):
    """Beyond it the positions of short samples would depend on the longest one packed with them."""
    folder = model_folder(tmp_path)
    (folder / "config.json").write_text(json.dumps({"max_position_embeddings": 4096, **config}))
    (text,) = problems(tmp_path, f"model.path={folder}", "engine.max_model_len=512")
    assert text.endswith("reads at most 256 tokens")


@pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed")
def test_a_port_that_somebody_uses(tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        (text,) = problems(tmp_path, "engine=vllm", f"engine.port={port}")
        assert text.startswith(f"engine.port={port}")
        validate(settings(tmp_path, f"engine.port={port}"))  # the embedded engine opens no port


@pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed")
def test_ports_that_do_not_suffice(tmp_path):
    (text,) = problems(tmp_path, "engine=vllm", "engine.port=65534", "engine.replicas=3")
    assert text.startswith("engine.port=65534: engine.replicas=3 take the ports up to 65536")


def test_the_embedded_engine_is_one(tmp_path):
    assert settings(tmp_path, "engine=embedded", "engine.replicas=4").engine.servers == 1
    assert settings(tmp_path, "engine=vllm", "engine.replicas=4").engine.servers == 4


def test_vllm_that_is_not_installed(tmp_path, monkeypatch):
    """A double stands for a machine without vLLM: the import system says that there is no such module."""
    found = validation.importlib.util.find_spec
    monkeypatch.setattr(validation.importlib.util, "find_spec", lambda name: None if name == "vllm" else found(name))
    (text,) = problems(tmp_path, "engine=vllm")
    assert "vllm is not installed" in text
    assert "engine=embedded" in text


def test_more_workers_or_servers_than_gpus(tmp_path, monkeypatch):
    """A double stands for a machine with one GPU."""
    monkeypatch.setattr(validation, "visible_gpus", lambda: 1)
    (text,) = problems(tmp_path, "learner.workers=2")
    assert text.startswith("learner.workers=2")
    assert any(p.startswith("engine.replicas=2") for p in problems(tmp_path, "engine.name=vllm", "engine.replicas=2"))


def test_a_run_in_a_cluster_may_have_more_workers_than_this_machine_has_gpus(tmp_path, monkeypatch):
    """A double stands for a machine with eight GPUs, where a cluster runs that Ray finds."""
    monkeypatch.setattr(validation, "visible_gpus", lambda: 8)
    assert "this machine shows 8 GPUs" in problems(tmp_path, "learner.workers=12")[0]
    monkeypatch.setenv("RAY_ADDRESS", "auto")
    validate(settings(tmp_path, "learner.workers=12"))


@pytest.mark.parametrize(
    ("override", "cause"),
    [
        ("trainer.staleness=1", "set trainer.staleness=0"),
        ("engine.tensor_parallel=2", "set engine.tensor_parallel=1"),
        ("engine.replicas=3", "engine.replicas=3 servers need one device each"),
        ("learner.placement=own", "set learner.placement=shared"),
    ],
)
def test_what_cannot_share_devices(override, cause, tmp_path):
    shared = ("engine=vllm", "engine.placement=colocated", "learner.workers=2", "algorithm.kl.coef=0.1")
    validate(settings(tmp_path, *shared))
    (text,) = problems(tmp_path, *shared, override)
    assert text.startswith("engine.placement=colocated: ")
    assert cause in text


def test_a_learner_that_would_keep_its_part_of_a_shared_gpu(tmp_path, monkeypatch):
    """A double stands for a machine with one GPU."""
    monkeypatch.setattr(combinations, "visible_gpus", lambda: 1)
    monkeypatch.setattr(validation, "visible_gpus", lambda: 1)
    shared = ("engine=vllm", "engine.placement=colocated", "learner.workers=1")
    (text,) = problems(tmp_path, *shared)
    assert "set learner.offload=true" in text
    validate(settings(tmp_path, *shared, "learner.offload=true"))


def test_no_gpu_is_counted_that_is_hidden(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert visible_gpus() == 0


@pytest.mark.parametrize("where", ["file/runs", "/proc/runs"])
def test_a_run_folder_that_cannot_be_written(where, tmp_path):
    (tmp_path / "file").touch()
    (text,) = problems(tmp_path, f"trainer.runs_dir={tmp_path / where}")
    assert text.startswith("trainer.runs_dir=")
    assert "cannot be written" in text


def test_a_run_folder_that_holds_other_results(tmp_path):
    (tmp_path / "runs" / "mine").mkdir(parents=True)
    validate(settings(tmp_path, "trainer.name=mine"))
    (tmp_path / "runs" / "mine" / "metrics.jsonl").touch()
    (text,) = problems(tmp_path, "trainer.name=mine")
    assert text.startswith("trainer.name=mine")
    assert "already holds" in text


def own_env(tmp_path: Path, name: str, *overrides: str) -> Config:
    return compose(
        [f"+env={__name__}:{name}", "engine=embedded", "learner.workers=1", f"trainer.runs_dir={tmp_path}", *overrides]
    )


def test_a_warm_start_without_an_expert(tmp_path):
    with pytest.raises(ConfigError, match=r"^sft\.episodes=8: .* has no expert"):
        validate(own_env(tmp_path, "NoExpert", "sft.episodes=8"))


def test_a_split_that_is_missing_or_empty(tmp_path):
    with pytest.raises(ConfigError, match=r"^env\.test_split=test: .*no split 'test'"):
        validate(own_env(tmp_path, "NoExpert"))
    with pytest.raises(ConfigError, match=r"^env\.test_split=empty: .*no task"):
        validate(own_env(tmp_path, "NoExpert", "env.test_split=empty"))


def test_an_environment_that_cannot_be_made(tmp_path):
    with pytest.raises(ConfigError, match=r"cannot be made: no licence file$"):
        validate(own_env(tmp_path, "Breaks"))


def test_an_id_that_a_file_names_but_nobody_registered(tmp_path):
    config = settings(tmp_path)
    config.env.id = "frozn_lake"
    with pytest.raises(ConfigError, match="frozen_lake"):
        validate(config)
