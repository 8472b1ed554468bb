"""The files of examples/launch say what is so: commands and their options, Ray's, bash, Kubernetes' schema of the pods."""

import re
import shlex
import subprocess

import kubernetes_validate
import pytest
import yaml
from docs_pages import ROOT
from ray.scripts.scripts import start

from agent_train.config.compose import compose
from agentgym.cli import command_line

LAUNCH = ROOT / "examples" / "launch"
FILES = sorted(path for path in LAUNCH.iterdir())
TEXTS = {path.name: path.read_text(encoding="utf-8") for path in FILES}
JOB = yaml.safe_load(TEXTS["kuberay.yaml"])
GROUPS = [JOB["spec"]["rayClusterSpec"]["headGroupSpec"], *JOB["spec"]["rayClusterSpec"]["workerGroupSpecs"]]


def commands(program):
    """The words of every command line of a program, up to what ends it."""
    joined = (re.sub(r"\s+", " ", JOB["spec"]["entrypoint"]), TEXTS["ray-by-hand.md"], TEXTS["slurm.sbatch"])
    lines = re.findall(rf"(?:^ *|&& |\S ){program} ([^\n`&']*)", "\n".join(joined), re.MULTILINE)
    return [shlex.split(line.partition(" # ")[0]) for line in lines]


@pytest.mark.parametrize("name", TEXTS)
def test_each_way_is_short_and_says_what_to_check_when_it_hangs(name):
    assert len(TEXTS[name].splitlines()) < 80
    assert "if it hangs" in TEXTS[name].lower()
    assert "agentgym doctor --cluster" in TEXTS[name]


def test_runs_have_settings_that_are_known():
    found = [words for words in commands("agent-train") if words[0].startswith("+env=") and "..." not in words]
    assert len(found) == 2
    for words in found:
        config = compose(words)
        assert config.trainer.runs_dir == "/shared/runs"
        assert config.engine.replicas + config.learner.workers == 16, "as many as two nodes of eight GPUs have"


def test_the_doctor_takes_its_options():
    found = commands("agentgym")
    assert len(found) == 3
    for words in found:
        assert command_line(["doctor"]).parse_args(words).cluster


def test_ray_takes_its_options():
    known = {option for parameter in start.params for option in parameter.opts}
    found = set(re.findall(r"ray start ([^\n]*)", TEXTS["ray-by-hand.md"] + TEXTS["slurm.sbatch"]))
    options = {option for line in found for option in re.findall(r"--[a-z-]+", line)}
    assert {"--head", "--address", "--block"} <= options <= known


def test_the_script_of_slurm_is_bash_and_its_options_come_first():
    subprocess.run(["bash", "-n", LAUNCH / "slurm.sbatch"], check=True, timeout=30)
    lines = TEXTS["slurm.sbatch"].splitlines()
    first_command = next(number for number, line in enumerate(lines) if line and not line.startswith("#"))
    options = [number for number, line in enumerate(lines) if line.startswith("#SBATCH ")]
    assert options
    assert max(options) < first_command, "SLURM reads no option after the first command"
    assert all(re.fullmatch(r"#SBATCH --[a-z-]+(=\S+)?", lines[number]) for number in options)


@pytest.mark.parametrize("version", ["1.29", kubernetes_validate.latest_version()])
@pytest.mark.parametrize("number", range(len(GROUPS)))
def test_pods_of_the_ray_job_are_those_of_kubernetes(number, version):
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "ray"}, "spec": GROUPS[number]["template"]["spec"]}
    kubernetes_validate.validate(pod, version, strict=True)
    (container,) = pod["spec"]["containers"]
    assert {mount["name"] for mount in container["volumeMounts"]} == {
        volume["name"] for volume in pod["spec"]["volumes"]
    }


def test_the_cluster_of_the_ray_job_has_a_token_and_two_nodes():
    cluster = JOB["spec"]["rayClusterSpec"]
    assert (JOB["apiVersion"], JOB["kind"], cluster["authOptions"]) == ("ray.io/v1", "RayJob", {"mode": "token"})
    (workers,) = cluster["workerGroupSpecs"]
    assert workers["replicas"] == workers["minReplicas"] == workers["maxReplicas"] == 1
