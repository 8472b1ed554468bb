"""The files of examples/deploy say what is so: schemas, options, ports, probes, metrics; and the image serves."""

import asyncio
import http.client
import json
import re
import shutil
import socket
import subprocess
import sys
import time
import tomllib
import urllib.error
import urllib.request
from pathlib import Path

import kubernetes_validate
import pytest
import yaml
from base_image import base_image
from compose_spec import PyCompose

from agentgym.cli import command_line
from agentgym.cli.serve import settings_of
from agentgym.core.registration import make
from agentgym.policies.base import ExpertPolicy
from agentgym.rollout.episode import run_episode

sys.path.insert(0, str(Path(__file__).parent / "agentgym" / "service"))
from served import served

ROOT = Path(__file__).parent.parent
DEPLOY = ROOT / "examples" / "deploy"
MANIFESTS = sorted(path for path in (DEPLOY / "kubernetes").glob("*.yaml") if path.stem != "kustomization")
TOKEN = "a-token-that-only-tests-have"


def read(path):
    return yaml.safe_load(path.read_text(encoding="utf-8"))


COMPOSE = read(DEPLOY / "compose.yaml")
KINDS = {read(path)["kind"]: read(path) for path in MANIFESTS}
POD = KINDS["Deployment"]["spec"]["template"]
(CONTAINER,) = POD["spec"]["containers"]
SERVICE = COMPOSE["services"]["envs"]


def options(arguments):
    return command_line(["serve"]).parse_args(["serve", *arguments])


def seconds(text):
    return float(re.fullmatch(r"(\d+)s", text)[1])


# ---- what others read


@pytest.mark.parametrize("version", ["1.29", kubernetes_validate.latest_version()])
@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.stem)
def test_manifests_are_those_of_kubernetes(path, version):
    kubernetes_validate.validate(read(path), version, strict=True)


def test_a_wrong_manifest_would_be_seen():
    wrong = read(DEPLOY / "kubernetes" / "deployment.yaml")
    wrong["spec"]["template"]["spec"]["containers"][0]["readinesProbe"] = {}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(wrong, "1.29", strict=True)


def test_kustomize_takes_all_of_them_into_one_namespace():
    kustomization = read(DEPLOY / "kubernetes" / "kustomization.yaml")
    assert sorted(kustomization["resources"]) == [path.name for path in MANIFESTS]
    assert [image["name"] for image in kustomization["images"]] == [CONTAINER["image"]]
    assert not any("namespace" in manifest["metadata"] for manifest in KINDS.values())
    monitor = read(DEPLOY / "kubernetes" / "monitoring" / "pod-monitor.yaml")
    assert monitor["metadata"]["namespace"] == kustomization["namespace"]


def test_the_compose_file_is_one():
    compose = PyCompose.from_yaml((DEPLOY / "compose.yaml").read_text(encoding="utf-8"))
    compose.validate()
    with pytest.raises(ValueError, match="helthcheck"):
        PyCompose.from_yaml("services: {a: {image: x, helthcheck: {}}}")
    assert COMPOSE["secrets"].keys() == set(SERVICE["secrets"])


# ---- what the files say of the server


@pytest.mark.parametrize("arguments", [SERVICE["command"], CONTAINER["args"]], ids=["compose", "kubernetes"])
def test_the_server_takes_the_arguments(arguments, tmp_path):
    given = options(arguments)
    given.token_file = tmp_path / "tokens"
    given.token_file.write_text(f"trainer {TOKEN}\n")
    settings = settings_of(given)
    assert settings.host == "0.0.0.0"
    assert list(settings.envs) == ["frozen_lake", "sokoban"]


def test_sessions_may_end_by_themselves_before_they_are_killed():
    close = 15  # what an end takes at most, after the drain
    assert seconds(SERVICE["stop_grace_period"]) >= options(SERVICE["command"]).drain_timeout + close
    assert POD["spec"]["terminationGracePeriodSeconds"] >= options(CONTAINER["args"]).drain_timeout + close


def test_ports_are_one_port():
    (port,) = CONTAINER["ports"]
    (of_service,) = KINDS["Service"]["spec"]["ports"]
    (rule,) = KINDS["NetworkPolicy"]["spec"]["ingress"]
    assert port["containerPort"] == options(CONTAINER["args"]).port == of_service["port"] == 8000
    named = [CONTAINER[f"{probe}Probe"]["httpGet"]["port"] for probe in ("startup", "liveness", "readiness")]
    monitor = read(DEPLOY / "kubernetes" / "monitoring" / "pod-monitor.yaml")
    named += [of_service["targetPort"], rule["ports"][0]["port"], monitor["spec"]["podMetricsEndpoints"][0]["port"]]
    assert set(named) == {port["name"]}
    assert SERVICE["ports"] == [f"8000:{options(SERVICE['command']).port}"]
    assert "EXPOSE 8000" in (DEPLOY / "Dockerfile").read_text()


def test_everything_means_the_pods_of_the_deployment():
    labels = POD["metadata"]["labels"]
    monitor = read(DEPLOY / "kubernetes" / "monitoring" / "pod-monitor.yaml")
    for selector in (
        KINDS["Deployment"]["spec"]["selector"]["matchLabels"],
        KINDS["Service"]["spec"]["selector"],
        KINDS["PodDisruptionBudget"]["spec"]["selector"]["matchLabels"],
        KINDS["NetworkPolicy"]["spec"]["podSelector"]["matchLabels"],
        monitor["spec"]["selector"]["matchLabels"],
    ):
        assert selector == labels
    target = KINDS["HorizontalPodAutoscaler"]["spec"]["scaleTargetRef"]
    assert (target["kind"], target["name"]) == ("Deployment", KINDS["Deployment"]["metadata"]["name"])


def test_tokens_come_from_a_secret_that_is_not_in_the_files():
    (volume,) = [volume for volume in POD["spec"]["volumes"] if "secret" in volume]
    (mount,) = [mount for mount in CONTAINER["volumeMounts"] if mount["name"] == volume["name"]]
    (item,) = volume["secret"]["items"]
    assert str(options(CONTAINER["args"]).token_file) == f"{mount['mountPath']}/{item['path']}"
    assert volume["secret"]["defaultMode"] & 0o007 == 0
    assert str(options(SERVICE["command"]).token_file) == f"/run/secrets/{SERVICE['secrets'][0]}"
    assert "Secret" not in KINDS
    monitor = read(DEPLOY / "kubernetes" / "monitoring" / "pod-monitor.yaml")
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    assert endpoint["authorization"]["credentials"]["name"] == volume["secret"]["secretName"]


def test_nothing_runs_as_root_or_may_become_it():
    assert POD["spec"]["securityContext"]["runAsNonRoot"] is True
    assert POD["spec"]["automountServiceAccountToken"] is False
    context = CONTAINER["securityContext"]
    assert context == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert SERVICE["read_only"] is True
    assert (SERVICE["cap_drop"], SERVICE["security_opt"]) == (["ALL"], ["no-new-privileges:true"])
    assert SERVICE["deploy"]["resources"]["limits"]["pids"] > options(SERVICE["command"]).max_sessions


def test_probes_and_metrics_are_what_a_server_answers():
    (metric,) = KINDS["HorizontalPodAutoscaler"]["spec"]["metrics"]
    name = metric["pods"]["metric"]["name"]
    target = float(metric["pods"]["target"]["averageValue"])
    assert 0 < target < options(CONTAINER["args"]).max_sessions
    (rule,) = read(DEPLOY / "kubernetes" / "monitoring" / "prometheus-adapter.yaml")["rules"]["custom"]
    assert rule["seriesQuery"].startswith(name + "{")
    assert re.fullmatch(rule["name"]["matches"], name)
    monitor = read(DEPLOY / "kubernetes" / "monitoring" / "pod-monitor.yaml")["spec"]["podMetricsEndpoints"][0]
    with served("frozen_lake", tokens={"trainer": TOKEN}) as server:
        for probe in ("startup", "liveness", "readiness"):
            path = CONTAINER[f"{probe}Probe"]["httpGet"]["path"]
            assert urllib.request.urlopen(server.url + path, timeout=30).status == 200
        with pytest.raises(urllib.error.HTTPError, match="401"):
            urllib.request.urlopen(server.url + monitor["path"], timeout=30)
        asked = urllib.request.Request(server.url + monitor["path"], headers={"Authorization": f"Bearer {TOKEN}"})
        told = urllib.request.urlopen(asked, timeout=30).read().decode()
    assert re.search(rf"^{name} 0(\.0)?$", told, re.MULTILINE)
    known = set(re.findall(r"^# TYPE (\w+)", told, re.MULTILINE))
    explained = set(re.findall(r"`(agentgym_\w+)`", (ROOT / "docs" / "services.md").read_text()))
    assert name in explained
    assert explained <= known


# ---- the image for GPUs, which nothing here can build


def test_the_gpu_image_has_a_pinned_base_files_that_exist_and_the_pins_of_setup():
    text = (DEPLOY / "gpu.Dockerfile").read_text()
    lines = re.sub(r"(^#.*\n)|\\\n", "", text, flags=re.MULTILINE).splitlines()
    steps = [tuple(line.split(maxsplit=1)) for line in lines]
    assert {word for word, _ in steps} == {"FROM", "RUN", "ENV", "WORKDIR", "COPY", "ENTRYPOINT", "CMD"}
    assert re.fullmatch(r"nvidia/cuda:\d+\.\d+\.\d+-runtime-ubuntu24\.04", steps[0][1])
    copied = [path for word, words in steps if word == "COPY" for path in words.split()[:-1]]
    assert [path for path in copied if not (ROOT / path).exists()] == []
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    parts = [
        *project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"],
        "pyproject.toml",
        "README.md",
        "LICENSE",
    ]
    assert set(parts) | {"configs", "sandboxes"} < set(copied), "the build needs them"
    (install,) = (words for word, words in steps if word == "RUN" and "pip install" in words)
    (extras,) = re.findall(r"\.\[([\w,-]+)\]", install)
    assert set(extras.split(",")) <= project["project"]["optional-dependencies"].keys()
    pins = re.compile(r"grep -vE '(\S+)' constraints")
    assert pins.findall(install) == pins.findall((ROOT / "scripts" / "setup.sh").read_text())
    for word, words in steps:
        if word == "RUN":
            subprocess.run(["bash", "-n", "-c", words], check=True, timeout=30)
        if word in ("ENTRYPOINT", "CMD"):
            assert all(isinstance(each, str) for each in json.loads(words))
    assert json.loads(dict(steps)["ENTRYPOINT"])[0] in project["project"]["scripts"]
    assert "NOT BUILT YET" in text


# ---- the image


@pytest.fixture(scope="module")
def docker():
    from docker import DockerClient

    from agentgym.sandbox.backends import engine

    client = DockerClient(base_url=engine.address(), timeout=120)
    yield client
    client.close()


@pytest.fixture(scope="module")
def image(docker, tmp_path_factory):
    """What examples/deploy/Dockerfile builds of this tree's wheel, on a base that needs no registry."""
    folder = tmp_path_factory.mktemp("deploy") / "files"
    shutil.copytree(DEPLOY, folder, ignore=shutil.ignore_patterns("wheels"))
    (folder / "tokens.txt").write_text(TOKEN)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", folder / "wheels", ROOT]
    subprocess.run(command, check=True, timeout=300, capture_output=True)
    with base_image(docker, tmp_path_factory.mktemp("base")) as base:
        built, _ = docker.images.build(
            path=str(folder), buildargs={"BASE": base}, rm=True, forcerm=True, network_mode="none"
        )
        try:
            yield built
        finally:
            docker.images.remove(built.id, force=True)


@pytest.fixture
def running(docker, image, tmp_path):
    """The service as compose.yaml has it, and its port; in the host's network, where a test's engine has no other."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    tokens = tmp_path / "tokens.txt"
    tokens.write_text(f"trainer {TOKEN}\n")
    tokens.chmod(0o644)
    command = [word.replace("8000", str(port)) for word in SERVICE["command"]]
    test = [word.replace("8000", str(port)) for word in SERVICE["healthcheck"]["test"]]
    limits = SERVICE["deploy"]["resources"]["limits"]
    container = docker.containers.run(
        image,
        command,
        detach=True,
        network_mode="host",
        user=SERVICE["user"],
        read_only=SERVICE["read_only"],
        tmpfs=dict([SERVICE["tmpfs"][0].split(":", 1)]),
        cap_drop=SERVICE["cap_drop"],
        security_opt=SERVICE["security_opt"],
        mem_limit=limits["memory"],
        pids_limit=limits["pids"],
        healthcheck={"test": test, "interval": 10**9, "timeout": 10**10, "start_period": 10**11},
        volumes={str(tokens): {"bind": "/run/secrets/tokens", "mode": "ro"}},
    )
    try:
        yield container, port
    finally:
        container.remove(force=True)


def wait_for(what, condition):
    deadline = time.monotonic() + 90
    while not (found := condition()):
        assert time.monotonic() < deadline, f"{what} did not happen"
        time.sleep(0.1)
    return found


def ask(port, path):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read())
    except OSError:
        return 0, {}
    finally:
        connection.close()


@pytest.mark.docker
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_service_of_the_compose_file_serves_and_leaves_in_good_order(running, tmp_path):
    container, port = running

    def healthy():
        container.reload()
        assert container.status == "running", container.logs().decode()
        return container.attrs["State"]["Health"]["Status"] == "healthy"

    wait_for("health", healthy)
    assert ask(port, "/ready")[1]["max_sessions"] == options(SERVICE["command"]).max_sessions
    assert ask(port, "/envs")[0] == 401
    token_file = tmp_path / "token"
    token_file.write_text(TOKEN)

    async def play():
        env = make(f"http://127.0.0.1:{port}/frozen_lake", token_file=str(token_file))
        task = env.tasks[0]
        trajectory = await run_episode(env, ExpertPolicy(), task, seed=1)
        await env.close()
        return trajectory

    trajectory = asyncio.run(asyncio.wait_for(play(), 60))
    assert (trajectory.error, trajectory.reward) == (None, 1.0)
    program = "import os; print(os.getuid()); open('/opt/x', 'w')"
    code, (said, refused) = container.exec_run(["python3", "-c", program], demux=True)
    assert (code, said) == (1, b"65534\n")
    assert b"Read-only file system" in refused
    # No token of the build's folder came into the image.
    assert container.exec_run(["ls", "-A", "/opt/agentgym"])[1].decode().split() == ["wheels"]
    container.kill("SIGTERM")
    assert container.wait(timeout=60)["StatusCode"] == 0, container.logs().decode()
