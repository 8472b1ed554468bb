"""A run over several machines: network namespaces that share no loopback, each with a Ray node. See `machines.py`."""

import json
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import ray
from machines import OBJECTS_PORT, ip, machines

from agent_train.cluster.files import PIECE_BYTES, Hand, RunFiles, alive
from agent_train.cluster.network import address_towards, take_interface
from agent_train.cluster.placement import PlacementError
from agentgym import __version__

pytestmark = [pytest.mark.machines, pytest.mark.ray]
RUN_SECONDS = 600  # on a busy machine
SMALL = ["trainer.steps=3", "trainer.eval_episodes=8", "sft.episodes=8"]
SMALL += ["trainer.groups_per_step=2", "trainer.eval_every=10"]
ADAPTERS = ["lora.rank=4", "lora.merge=false"]
SERVERS = ["engine=vllm", "engine.replicas=2", "engine.port=8100", f"engine.start_timeout={RUN_SECONDS}"]


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
    """Three machines of one CPU each, so that two ranks are on two of them; and a folder of which each has one of its own."""
    own = tmp_path_factory.mktemp("own")
    with machines(1, 1, 1, own_disk=own) as made:
        yield made, own


def start(made, runs: Path, *more: str):
    """Start agent-train on machine 0; its output comes with `result`."""
    words = ["+env=frozen_lake", "learner.workers=2", f"trainer.runs_dir={runs}", "trainer.name=run", *more]
    command = made.command(0, sys.executable, "-m", "agent_train.cli", *words)
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=made.environment)


def result(run, seconds: float = RUN_SECONDS):
    """Exit code and output of a run, which is killed after so long."""
    stop = threading.Timer(seconds, run.kill)
    stop.start()
    said, _ = run.communicate()
    stop.cancel()
    return run.returncode, said


def train(three, runs: Path, *more: str, seconds: float = RUN_SECONDS):
    made, _ = three
    return result(start(made, runs, *more), seconds)


def records(runs: Path, kind: str):
    lines = (runs / "run" / "metrics.jsonl").read_text().splitlines()
    return [record for record in map(json.loads, lines) if record["kind"] == kind]


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.timeout(2 * RUN_SECONDS)
def test_ranks_and_vllm_servers_on_three_machines_train_asynchronously_without_a_shared_folder(three):
    made, own = three
    runs = own / "async"
    code, said = train(three, runs, *SMALL, *SERVERS, "trainer.staleness=2")
    assert code == 0, said
    assert [step["step"] for step in records(runs, "train")] == [1, 2, 3]
    assert "what it reads and writes there goes through Ray" in said
    where = [hosts_of_server(made, runs, number) for number in (0, 1)]
    assert all(where), "each has a log"
    assert where[0].isdisjoint(where[1]), "they are on different machines"
    saved = runs / "run" / "checkpoints" / "step-000003" / "state" / "policy"
    assert {file.name for file in saved.glob("rank-*.json")} == {"rank-0.json", "rank-1.json"}


def hosts_of_server(made, runs: Path, number: int) -> set[str]:
    """The machines that have the log of a server that answered."""
    log = runs / "run" / "logs" / f"vllm-{number}.log"
    return {name for name in map(made.name, range(3)) if "http://" in made.read(int(name[-1]), log)}


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


@pytest.mark.slow
@pytest.mark.timeout(2 * RUN_SECONDS)
def test_a_run_that_loses_a_machine_before_its_first_checkpoint_goes_on_with_the_ranks_that_still_fit(tmp_path):
    (own := tmp_path / "own").mkdir()
    with machines(1, 1, own_disk=own) as made:
        run = start(made, tmp_path, *SMALL, "engine=embedded", "learner.timeout=60", "trainer.steps=1")
        wait_until(run, lambda: made.runs(1, "ray::_Actor"))
        made.kill(1)
        code, said = result(run)
    assert code == 0, said
    assert "going on with run from the beginning" in said
    assert [step["step"] for step in records(tmp_path, "train")] == [1]
    assert "the cluster has room for learner.workers=1 of 2, and the run goes on with these" in said, said
    assert "workers: 2" in (tmp_path / "run" / "config.yaml").read_text()


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.timeout(4 * RUN_SECONDS)
@pytest.mark.parametrize(
    ("how", "weights"), [("kill", "collective"), ("cut", "collective"), ("kill", "delta"), ("cut", "adapters")]
)
def test_a_run_that_loses_a_machine_with_a_rank_and_a_server_goes_on_without_them(tmp_path, uncut, how, weights):
    """On machines that share no folder, with environments on them too."""
    if not uncut:
        pytest.skip("takes minutes; set AGENTGYM_TEST_ALL to run it")
    (own := tmp_path / "own").mkdir()
    parts = ["env.placement=ray", "env.workers=2", "env.cpus=0.5"]
    parts += [*SERVERS, *(ADAPTERS if weights == "adapters" else [f"engine.weights={weights}"])]
    with machines(0, 2, 2, own_disk=own) as made:
        run = start(made, own, *SMALL, *parts, "trainer.steps=6", "trainer.save_every=1", "trainer.staleness=1")
        wait_until(run, (own / "run" / "checkpoints" / "step-000001").exists, 2 * RUN_SECONDS)
        lost = max(number for number in (1, 2) if made.runs(number, "ray::_Actor", "vllm.entrypoints"))
        step = records(own, "train")[-1]["step"]
        began = time.monotonic()
        (made.kill if how == "kill" else made.cut)(lost)
        wait_until(run, lambda: records(own, "train")[-1]["step"] > step + 1, 2 * RUN_SECONDS)
        print(f"\n{how}, {weights}: {time.monotonic() - began:.0f} s until two further steps were trained")
        code, said = result(run)
    assert code == 0, said
    assert "; going on with run from step" in said
    assert [step["step"] for step in records(own, "train")] == [1, 2, 3, 4, 5, 6]


def wait_until(run, condition, seconds: float = RUN_SECONDS) -> None:
    """Wait for what a run does."""
    end = time.monotonic() + seconds
    while not condition():
        assert run.poll() is None, result(run)
        if time.monotonic() > end:
            run.kill()
            pytest.fail(f"it did not come within {seconds:g} s: {result(run)[1]}")
        time.sleep(0.1)


def test_a_cluster_with_another_token_is_named(three, tmp_path, monkeypatch):
    monkeypatch.setitem(three[0].environment, "RAY_AUTH_TOKEN", "0" * 64)
    monkeypatch.setitem(three[0].environment, "RAY_NUM_REDIS_GET_RETRIES", "2")  # Ray asks 20 times, once a second
    code, said = train(three, tmp_path, *SMALL, "engine=embedded")
    assert code == 1
    assert "Ray at RAY_ADDRESS=10.77.0.1:6379 did not start" in said, said
    assert "set RAY_AUTH_MODE=token and the cluster's RAY_AUTH_TOKEN" in said, said


def test_folders_go_between_machines_that_share_none(three):
    """What follows runs on the first machine."""
    made, own = three
    words = [sys.executable, "-c", "import asyncio, test_machines as t; asyncio.run(t.move_folders())", str(own)]
    environment = made.environment | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        made.command(0, *words), check=False, capture_output=True, text=True, timeout=120, env=environment
    )
    assert done.returncode == 0, done.stdout + done.stderr


async def move_folders() -> None:
    ray.init(log_to_driver=False)
    own, said = Path(sys.argv[1]), []
    home = ray.get_runtime_context().get_node_id()
    nodes = [home, *(node for node in alive() if node != home)]
    hands = here, one, other = [Hand(), *map(Hand.on, nodes[1:])]
    big = os.urandom(PIECE_BYTES + 1)

    async def write(hand: Hand, path: Path, content: bytes) -> None:
        await hand.call(os.makedirs, str(path.parent), 0o777, True)
        await hand.call(Path.write_bytes, path, content)

    async def seen(path: Path) -> list[bytes | None]:
        """A file as the three see it."""
        return [
            await hand.call(Path.read_bytes, path) if await hand.call(Path.is_file, path) else None for hand in hands
        ]

    def files_of(name: str, model: str) -> RunFiles:
        return RunFiles(own / name, own / model, [own / model], said.append)

    # Each gets what all read from the start.
    run, model = own / "moved", own / "moved" / "model" / "config.json"
    await write(here, model, b"{}")
    await write(here, run / "model" / "weights", big)
    files = files_of("moved", "moved/model")
    await files.look()
    assert {line.partition(" does not see")[0] for line in said} == {one.name, other.name}
    assert await seen(run / "model" / "weights") == [big] * 3

    # What two nodes wrote comes here, and stays at neither.
    state = run / "state"
    await write(one, state / "a", big)
    await write(other, state / "deep" / "b", b"b")
    await files.bring(str(state), set(nodes))
    assert await seen(state / "a") == [big, None, None]
    assert await seen(state / "deep" / "b") == [b"b", None, None]

    # What one node wrote comes to all, and earlier ones go that are no longer here.
    await write(here, run / "weights" / "7" / "all", b"seven")
    await files.give(str(run / "weights" / "7"))
    assert await seen(run / "weights" / "7" / "all") == [b"seven"] * 3
    shutil.rmtree(run / "weights" / "7")
    await write(one, run / "weights" / "8" / "all", b"eight")
    await files.share(str(run / "weights" / "8"), nodes[1:2])
    assert await seen(run / "weights" / "8" / "all") == [b"eight"] * 3
    assert await seen(run / "weights" / "7" / "all") == [None] * 3
    await files.forget(str(run / "weights" / "8"))
    assert await seen(run / "weights" / "8" / "all") == [b"eight", None, None]

    # At the next start copies of the one before go, and logs stay. Files of others are in the way.
    await write(one, run / "logs" / "vllm-0.log", b"log")
    await write(one, run / "adapters" / "0", b"old")
    await files_of("moved", "moved/model").look()
    assert await seen(run / "logs" / "vllm-0.log") == [None, b"log", None]
    assert await seen(run / "adapters" / "0") == [None] * 3
    await write(here, own / "mine" / "model" / "config.json", b"{}")
    await write(other, own / "mine" / "config.yaml", b"of another run")
    with pytest.raises(OSError, match=rf"{other.name}: \S+/mine holds other things there"):
        await files_of("mine", "mine/model").look()

    # A model that the run did not make has to be there.
    with pytest.raises(PlacementError, match=r"node 10\.77\.0\.[23]: \S+/config\.json is not there: model\.path must"):
        await files_of("moved", "mine/model").look()


def doctor(three, shared: Path):
    made, _ = three
    words = made.command(
        0, sys.executable, "-m", "agentgym.cli", "doctor", "--cluster", "--json", "--shared", str(shared)
    )
    done = subprocess.run(words, check=False, capture_output=True, text=True, timeout=120, env=made.environment)
    return done.returncode, json.loads(done.stdout)


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


def test_the_doctor_names_a_folder_that_is_not_shared_and_ways_and_ports_that_are_closed(three):
    made, own = three
    zero, one, two = (made.address(number) for number in range(3))
    way = ["route", "add", "blackhole", one]
    port = ["rule", "add", "to", zero, "ipproto", "tcp", "dport", str(OBJECTS_PORT), "unreachable"]
    ip("-n", made.name(2), *way)
    ip("-n", made.name(1), *port)
    try:
        code, found = doctor(three, own)
    finally:
        ip("-n", made.name(2), "route", "del", *way[2:])
        ip("-n", made.name(1), "rule", "del", *port[2:])
    lines = sorted(f"{problem['state']}: {problem['name']}: {problem['text']}" for problem in found["problems"])
    assert code == 1
    assert len(found["nodes"]) == 3
    patterns = [
        rf"broken: {one}: does not reach {zero} on ports {OBJECTS_PORT}: ",
        rf"broken: {one}: does not reach {two} on ports \d+, \d+, {OBJECTS_PORT}: ",
        rf"broken: {two}: does not reach {one} on ports \d+, \d+, {OBJECTS_PORT}: ",
        rf"warning: {one}: {own} is not shared: ",
        rf"warning: {two}: {own} is not shared: ",
    ]
    for line, pattern in zip(lines, patterns, strict=True):
        assert re.match(pattern, line), line
