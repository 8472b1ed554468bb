"""The real `openenv` package in a virtual environment of its own, and servers to test with. For tests of this folder."""

import contextlib
import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
FOREIGN = Path(__file__).parent / "openenv_foreign"
PINS = FOREIGN / "packages.txt"
UNREACHABLE = re.compile(r"NewConnectionError|NameResolutionError|Network is unreachable|ConnectTimeout|ProxyError")


def openenv_python(cache):
    """The Python of a virtual environment with the packages of `openenv_foreign/packages.txt`, made once and kept."""
    kept = cache.mkdir("agentgym_openenv")
    folder = kept / hashlib.sha256(PINS.read_bytes() + sys.version.encode()).hexdigest()[:12]
    with (kept / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # of two test runs, one fills it and the other waits
        if not (folder / "done").exists():
            for old in kept.iterdir():
                if old.is_dir():
                    shutil.rmtree(old)
            venv.create(folder, with_pip=True)
            install(folder / "bin" / "python")
            (folder / "done").touch()
    return folder / "bin" / "python"


def install(python):
    options = ["--quiet", "--disable-pip-version-check", "--no-deps", "--no-compile"]
    command = [python, "-m", "pip", "install", *options, "--requirement", PINS]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    if done.returncode and UNREACHABLE.search(done.stderr):
        pytest.skip(f"no package index can be reached, so openenv is not at hand: {done.stderr[-300:]}")
    assert done.returncode == 0, done.stderr


def clean_environment(**more):
    dropped = ("AGENTGYM_DATA", "AGENTGYM_TOKEN", "PYTHONHOME", "PYTHONPATH", "ENABLE_WEB_INTERFACE", "OPENENV_MODE")
    # Without it every process would compile the package again, which takes longer than most tests.
    dropped += ("PYTHONDONTWRITEBYTECODE",)
    return {key: value for key, value in os.environ.items() if key not in dropped} | more


@contextlib.contextmanager
def running(*command, until_stdin_ends=False, **more):
    """A process that prints one line when it serves; that line. It is ended afterwards, and waited for."""
    process = subprocess.Popen(
        [*map(str, command)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=clean_environment(**more)
    )
    try:
        line = process.stdout.readline().strip()
        assert line, f"{command} ended with {process.wait(10)}"
        yield line
    finally:
        process.stdin.close()  # which ends ours in good order
        if not until_stdin_ends:
            process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()


@contextlib.contextmanager
def our_server(*envs, sessions=8):
    """Our own server of these environments, in a process of its own; its URL."""
    paths = os.pathsep.join([str(ROOT), str(Path(__file__).parent)])
    script = FOREIGN / "serve_ours.py"
    with running(sys.executable, script, str(sessions), *envs, until_stdin_ends=True, PYTHONPATH=paths) as url:
        yield url


@contextlib.contextmanager
def their_servers(python, *kinds):
    """Servers of the real package; their URLs by kind."""
    with running(python, FOREIGN / "serve_envs.py", *kinds) as ports:
        yield {kind: f"http://127.0.0.1:{port}" for kind, port in zip(kinds, ports.split(), strict=True)}


def our_packages():
    return sysconfig.get_paths()["purelib"]
