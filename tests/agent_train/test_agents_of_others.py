"""Agents of other projects, unchanged, in training: a vLLM server as its users start it serves the run of each, one after the other."""

import json
import secrets

import pytest
from logged_run import run_in_turn, trained
from named_agents import installed
from working_agents import COMMANDS, build_working

from agentgym.agents.named import NAMES
from agentgym.processes.vllm_server import VllmOptions, VllmServer

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.vllm, pytest.mark.sandbox, pytest.mark.timeout(900)]

MAX_LEN = 20_000  # codex says much
WORDS = (
    "+env=working_agents:Number",
    "engine=openai",
    f"engine.max_model_len={MAX_LEN}",
    "sampling.max_tokens=20",
    "agent.incomplete=true",
    "agent.max_turns=5",
    "algorithm.group_size=2",
    "algorithm.advantage.name=constant",  # each step has a gradient, whatever the episodes earn
    "learner.lr=1e-3",  # the first update shows in the log-probabilities of the second step
    "trainer.eval_episodes=1",
)


def served(model, key, log):
    arguments = ("--dtype", "float32", "--logprobs-mode", "processed_logprobs", "--enable-scale-out")
    given = {"key": key, "arguments": arguments, "environment": {"VLLM_SERVER_DEV_MODE": "1"}}
    return VllmServer(VllmOptions(model, "policy", str(log), gpu=False, context=MAX_LEN, **given))


def over_an_update(folder):
    """Episodes of the second step begin with the first weights, and go on with the second ones."""
    words = ["algorithm=decoupled_ppo", "trainer.staleness=1", "trainer.groups_per_step=2", "env.kwargs.late=4"]
    words += ["engine.max_concurrent=4"]  # so that the first four are those of the first step
    return [*words, f"env.kwargs.update={folder}/run/trajectories/train-000001.jsonl"]


@pytest.fixture(scope="module")
def runs(in_shared_ray, forks, tmp_path_factory):
    """The folder of each agent's run."""
    for name in NAMES:
        installed(name)
    folders = {name: tmp_path_factory.mktemp(name) for name in NAMES}
    models = build_working(tmp_path_factory.mktemp("models"), MAX_LEN)
    key = secrets.token_hex()
    server = served(models["codex"], key, tmp_path_factory.mktemp("vllm") / "vllm.log")
    try:
        where = f"engine.urls=[{server.launch()}]"
        words = {name: [*WORDS, where, f"agent={name}", f"model.path={models[name]}"] for name in NAMES}
        more = {name: ["trainer.groups_per_step=1"] for name in NAMES}
        more["codex"] = over_an_update(folders["codex"])
        given = [(folders[name], words[name] + more[name]) for name in NAMES]
        run_in_turn(forks, given, in_shared_ray, ENGINE_API_KEY=key)
    finally:
        server.stop()
    return folders


@pytest.mark.parametrize("name", NAMES)
def test_a_run_trains_what_vllm_sampled_for_an_agent_that_works_in_a_shell(name, runs):
    trajectories, _, steps = trained(runs[name])
    assert len(trajectories) == (8 if name == "codex" else 4)
    assert not any(t.metadata["agent"].get("killed") for t in trajectories), "each has ended by itself, at a limit too"
    if name != "codex":
        assert all(step["update"]["gap_max"] < 1e-3 for step in steps), "new weights sample the second step"
    names = []
    for t in trajectories:
        actions = [step["action"] for step in t.metadata["steps"]]
        calls = [call["function"] for action in actions for call in action.get("tool_calls") or ()]
        commands = [json.loads(call["arguments"]).get("command") for call in calls]
        written = [COMMANDS.index(command) + 1 for command in commands if command in COMMANDS[:2]]
        assert t.reward == (written[-1:] == [int(t.task_id[-1])]), "what is in the file is judged"
        names += [call["name"] for call in calls]
    assert set(names) == {"bash", "submit"}


def test_episodes_of_codex_may_go_on_over_an_update(runs):
    trajectories, rows, _ = trained(runs["codex"])
    versions = [[set(turn.tokens.versions) for turn in t.turns] for t in trajectories]
    assert all(len(told) == 1 for turns in versions for told in turns)
    assert [{0}, {1}] in [turns[:2] for turns in versions], versions
    assert any({0, 1} <= set(row.versions) for row in rows), "and one row has tokens of both"
