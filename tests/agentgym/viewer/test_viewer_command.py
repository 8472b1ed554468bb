"""`agentgym view` as a stranger types it."""

import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import urllib.request

import pytest
from made_runs import write_evaluation

from agentgym.cli import main

PATIENCE = 60.0


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    write_evaluation(folder / "games", n=1, k=1)
    return folder


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nowhere"], "there is no folder nowhere"),
        ([], "there is no folder runs"),
        (["--port", "70000", "."], "--port is from 0"),
        (["--export", "x.txt", "RUNS"], "name a file that ends in .html, not x.txt"),
        (["--export", "x.html", "."], "no runs in"),
        (["--export", "no/such/x.html", "RUNS"], "--export no/such/x.html: cannot be written (No such file"),
        (["--export", "x.html", "--episodes", "-1", "RUNS"], "--episodes is at least 0"),
        (["--host", "300.1.1.1", "--no-open", "."], "cannot listen at 300.1.1.1"),
    ],
)
def test_mistakes_are_told_in_one_line(made, tmp_path, monkeypatch, capsys, arguments, words):
    monkeypatch.chdir(tmp_path)
    assert main(["view", *[str(made) if a == "RUNS" else a for a in arguments]]) == 2
    said = capsys.readouterr()
    error = said.err.splitlines()[-1]
    assert words in error
    assert error.startswith("agentgym view: ")
    assert said.out == ""


def test_a_port_that_is_taken_is_told(made, capsys):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        assert main(["view", str(made), "--port", str(port), "--no-open"]) == 2
    assert f"cannot listen at 127.0.0.1, port {port}" in capsys.readouterr().err


@pytest.mark.parametrize("as_json", [False, True])
def test_an_export_says_what_it_wrote(made, tmp_path, capsys, as_json):
    path = tmp_path / "x.html"
    assert main(["view", str(made), "--export", str(path), "--episodes", "1", *(["--json"] if as_json else [])]) == 0
    said = capsys.readouterr()
    if as_json:
        found = json.loads(said.out)
        assert found == {
            "path": str(path),
            "runs": 1,
            "episodes": 1,
            "bytes": path.stat().st_size,
            "note": found["note"],
        }
        assert "1 of 2 episodes" in found["note"]
    else:
        assert said.out.startswith(f"{path}: 1 run, 1 episode, ")
        assert "1 of 2 episodes" in said.err


def started(*arguments):
    """A real process, and what it prints first."""
    env = {k: v for k, v in os.environ.items() if k not in ("DISPLAY", "WAYLAND_DISPLAY")}
    process = subprocess.Popen(
        [sys.executable, "-m", "agentgym.cli", "view", *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=env,
    )
    with selectors.DefaultSelector() as ready:
        ready.register(process.stdout, selectors.EVENT_READ)
        if not ready.select(PATIENCE):
            process.kill()
            pytest.fail("nothing was printed")
    return process, process.stdout.readline()


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_it_serves_until_it_is_ended(made, how):
    process, said = started(made)
    try:
        assert said.startswith("1 run at http://127.0.0.1:")
        url = said.split(" at ")[1].split()[0]
        with urllib.request.urlopen(f"{url}api/runs", timeout=PATIENCE) as answer:
            assert [run["id"] for run in json.load(answer)["runs"]] == ["games"]
        process.send_signal(how)
        assert process.wait(PATIENCE) == 0
        assert "Traceback" not in process.stderr.read()
    finally:
        process.kill()
        process.communicate()


def test_a_host_of_other_machines_is_warned_of_and_has_a_token(made):
    process, said = started(made, "--host", "0.0.0.0", "--no-open")
    try:
        url = said.split(" at ")[1].split()[0]
        assert len(url.rstrip("/").rpartition("/")[2]) >= 32
        process.send_signal(signal.SIGINT)
        process.wait(PATIENCE)
        assert "anyone with this address can read these runs" in process.stderr.read()
    finally:
        process.kill()
        process.communicate()
