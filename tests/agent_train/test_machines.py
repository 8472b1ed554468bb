"""A run over several machines: network namespaces that share no loopback, each with a Ray node. See `machines.py`."""

import json
import os
import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from machines import ip, machines, missing

from agent_train.cluster.network import address_towards, take_interface
from agentgym import __version__

RUN_SECONDS = 240
SMALL = ["trainer.steps=3", "trainer.eval_episodes=8", "sft.episodes=8"]
SMALL += ["trainer.groups_per_step=2", "trainer.eval_every=10"]
SERVERS = ["engine=vllm", "engine.replicas=2", "engine.port=8100"]


def test_the_address_towards_a_host_is_the_one_that_reaches_it():
    assert address_towards("127.0.0.1", 80) == "127.0.0.1"
    with pytest.raises(OSError, match=r"."):
        address_towards("no.such.host.invalid", 80)


def test_gloo_and_nccl_take_the_interface_that_reaches_a_host(monkeypatch):
    monkeypatch.setattr(os, "environ", {"NCCL_SOCKET_IFNAME": "chosen"})
    take_interface("127.0.0.1", 80)
    assert os.environ == {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "chosen"}, "the user's choice stays"


@pytest.fixture(scope="module")
def three(tmp_path_factory):
    """Three machines of one CPU each, so that two ranks are on two of them."""
    if reason := missing():
        pytest.skip(reason)
    own = tmp_path_factory.mktemp("own")
    with machines(1, 1, 1, own_disk=own) as made:
        yield made, own


def train(three, runs: Path, *more: str, seconds: float = RUN_SECONDS):
    """Run agent-train on machine 0: exit code and output."""
    made, _ = three
    words = ["+env=frozen_lake", "learner.workers=2", f"trainer.runs_dir={runs}", "trainer.name=run", *more]
    command = made.command(0, sys.executable, "-m", "agent_train.cli", *words)
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=seconds, env=made.environment)
    return done.returncode, done.stdout + done.stderr


def records(runs: Path, kind: str):
    lines = (runs / "run" / "metrics.jsonl").read_text().splitlines()
    return [record for record in map(json.loads, lines) if record["kind"] == kind]


@pytest.mark.ray
@pytest.mark.vllm
@pytest.mark.slow
def test_ranks_and_vllm_servers_on_three_machines_train_asynchronously(three, tmp_path):
    code, said = train(three, tmp_path, *SMALL, *SERVERS, "trainer.staleness=2")
    assert code == 0, said
    assert [step["step"] for step in records(tmp_path, "train")] == [1, 2, 3]
    logs = [(tmp_path / "run" / "logs" / f"vllm-{number}.log").read_text() for number in (0, 1)]
    hosts = {re.search(r"http://([\d.]+):810\d", log)[1] for log in logs}
    # Ray spreads them as it can: on the trainer's machine loopback serves, on the others their address.
    assert hosts <= {"127.0.0.1", three[0].address(1), three[0].address(2)}


@pytest.mark.ray
@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.timeout(6 * 3600)
@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("staleness", [0, 2])
def test_the_default_job_learns_on_three_machines(three, tmp_path, uncut, staleness, seed):
    if not uncut:
        pytest.skip("takes minutes; set AGENTGYM_TEST_ALL to run it")
    clipped = ["algorithm.proximal=behaviour"] if staleness else []
    settings = [*SERVERS, f"trainer.staleness={staleness}", f"trainer.seed={seed}", *clipped]
    code, said = train(three, tmp_path, *settings, seconds=3 * 3600)
    assert code == 0, said
    assert records(tmp_path, "eval")[-1]["success"] >= 0.86, said  # 90% less two standard errors of 200 episodes


@pytest.mark.ray
@pytest.mark.slow
def test_a_run_that_loses_a_machine_goes_on_with_the_ranks_that_still_fit(tmp_path, uncut):
    if not uncut:
        pytest.skip("takes a minute; set AGENTGYM_TEST_ALL to run it")
    if reason := missing():
        pytest.skip(reason)
    (own := tmp_path / "own").mkdir()
    with machines(1, 1, own_disk=own) as made, ThreadPoolExecutor(1) as pool:
        more = [*SMALL, "engine=embedded", "trainer.steps=4", "trainer.save_every=1", "learner.timeout=60"]
        run = pool.submit(train, (made, own), tmp_path, *more)
        while not (tmp_path / "run" / "checkpoints" / "step-000001").exists():
            assert not run.done(), run.result()
            time.sleep(0.1)
        made.kill(1)
        code, said = run.result()
    assert code == 0, said
    assert [step["step"] for step in records(tmp_path, "train")] == [1, 2, 3, 4]
    assert "learner.workers=2: the cluster has room for 1, and the run goes on with these" in said, said
    assert "workers: 2" in (tmp_path / "run" / "config.yaml").read_text()


@pytest.mark.ray
def test_a_cluster_with_another_token_is_named(three, tmp_path, monkeypatch):
    monkeypatch.setitem(three[0].environment, "RAY_AUTH_TOKEN", "0" * 64)
    monkeypatch.setitem(three[0].environment, "RAY_NUM_REDIS_GET_RETRIES", "2")  # Ray asks 20 times, once a second
    code, said = train(three, tmp_path, *SMALL, "engine=embedded")
    assert code == 1
    assert "Ray at RAY_ADDRESS=10.77.0.1:6379 did not start" in said, said
    assert "set RAY_AUTH_MODE=token and the cluster's RAY_AUTH_TOKEN" in said, said


@pytest.mark.ray
def test_a_run_folder_that_a_node_does_not_see_is_refused_before_the_start(three):
    _, own = three
    code, said = train(three, own / "runs", *SMALL, "engine=embedded")
    assert code == 1
    refused = r"node 10\.77\.0\.[23]: \S+config\.yaml is not there: trainer\.runs_dir must name a folder"
    assert re.search(refused, said), said  # by whichever node looked first


def doctor(three, shared: Path):
    made, _ = three
    words = made.command(
        0, sys.executable, "-m", "agentgym.cli", "doctor", "--cluster", "--json", "--shared", str(shared)
    )
    done = subprocess.run(words, check=False, capture_output=True, text=True, timeout=120, env=made.environment)
    return done.returncode, json.loads(done.stdout)


@pytest.mark.ray
def test_the_doctor_of_a_healthy_cluster_lists_its_nodes_and_finds_no_problem(three, tmp_path):
    code, found = doctor(three, tmp_path)
    assert (code, found["problems"]) == (0, [])
    assert sorted(node["address"] for node in found["nodes"]) == [three[0].address(number) for number in range(3)]
    for node in found["nodes"]:
        assert node["versions"]["agentgym"] == __version__
        # Machines that share a kernel have one clock.
        ahead, bound = re.fullmatch(r"([+-][\d.]+) ms, within ([\d.]+)", node["clock"]).groups()
        assert abs(float(ahead)) <= float(bound) + 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.ray
def test_the_doctor_names_a_folder_that_is_not_shared_and_a_way_that_is_blocked(three):
    made, own = three
    way = ["route", "add", "blackhole", made.address(1)]
    ip("-n", made.name(2), *way)
    try:
        code, found = doctor(three, own)
    finally:
        ip("-n", made.name(2), "route", "del", *way[2:])
    lines = sorted(f"{problem['name']}: {problem['text']}" for problem in found["problems"])
    assert code == 1
    assert len(found["nodes"]) == 3
    for line, words in zip(
        lines,
        [
            f"{made.address(1)}: {own} is not shared: ",
            f"{made.address(1)}: does not reach {made.address(2)} on port ",
            f"{made.address(2)}: {own} is not shared: ",
            f"{made.address(2)}: does not reach {made.address(1)} on port ",
        ],
        strict=True,
    ):
        assert line.startswith(words)
