"""`agentgym export openenv` to its end: the folder's Dockerfile is built, validated and played by the real package.

No registry is asked: the base image is ours (that of the search environment, which has the libraries that NumPy takes), with pip
and all that OpenEnv and agentgym need; the build itself has no network.
"""

import json
import os
import shutil
import subprocess
import sys
from importlib.metadata import distribution

import pytest
from openenv_package import FOREIGN, ROOT, clean_environment, openenv_python

from agentgym.core.registration import spec
from agentgym.service.openenv.export import export_openenv

pytestmark = [pytest.mark.docker, pytest.mark.slow, pytest.mark.timeout(900)]

BASE = """\
FROM {image}
COPY site /opt/site
# pip reads 0 here as --no-build-isolation.
ENV PYTHONPATH=/opt/site PIP_NO_INDEX=1 PIP_NO_DEPS=1 PIP_NO_BUILD_ISOLATION=0
RUN mkdir -p -m 1777 /tmp
"""
OURS = (
    *("aiohappyeyeballs", "aiohttp", "aiosignal", "cloudpickle", "Farama-Notifications", "frozenlist", "gymnasium"),
    *("multidict", "numpy", "pip", "propcache", "setuptools", "yarl"),
)


@pytest.fixture(scope="module")
def python(pytestconfig):
    return openenv_python(pytestconfig.cache)


@pytest.fixture(scope="module")
def docker():
    from docker import DockerClient

    from agentgym.sandbox.backends import engine

    if shutil.which("docker") is None:
        missing = "no docker on the PATH, which openenv validate calls"
        (pytest.fail if os.environ.get("AGENTGYM_NEED_SANDBOXES") else pytest.skip)(missing)
    client = DockerClient(base_url=engine.address(), timeout=120)
    yield client
    client.close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """An exported environment, and beside it the wheel of this tree."""
    made = tmp_path_factory.mktemp("exported")
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", made / "dist", ROOT]
    subprocess.run(command, check=True, timeout=300, capture_output=True)
    export_openenv(spec("openenv_envs:Sum"), made / "sum", wheels=list((made / "dist").glob("*.whl")))
    return made / "sum"


@pytest.fixture(scope="module")
def image(docker, python, folder, tmp_path_factory):
    """The folder's image."""
    from agentgym.sandbox.images import build as images

    context, tag = tmp_path_factory.mktemp("base"), f"agentgym-openenv-base:{os.getpid()}"
    # What was compiled before is kept: the container would compile it at every start.
    older = shutil.ignore_patterns("pip", "pip-*", "setuptools*", "pkg_resources", "_distutils_hack", "*.pth")
    (theirs,) = python.parent.parent.glob("lib/python*/site-packages")
    shutil.copytree(theirs, context / "site", ignore=older)
    for name in OURS:
        package = distribution(name)
        for part in {file.parts[0] for file in package.files or [] if len(file.parts) > 1} - {".."}:
            shutil.copytree(package.locate_file(part), context / "site" / part, dirs_exist_ok=True)
    (context / "Dockerfile").write_text(BASE.format(image=images.docker_tag("search")))
    quietly = {"rm": True, "forcerm": True, "network_mode": "none"}
    docker.images.build(path=str(context), tag=tag, **quietly)
    try:
        built, _ = docker.images.build(
            path=str(folder), dockerfile="server/Dockerfile", buildargs={"BASE_IMAGE": tag}, **quietly
        )
        yield built.id
        docker.images.remove(built.id, force=True)
    finally:
        docker.images.remove(tag, force=True)


def foreign(python, *command):
    """What a script prints that the real package's Python runs."""
    done = subprocess.run(
        [python, *map(str, command)],
        capture_output=True,
        text=True,
        timeout=300,
        env=clean_environment(PYTHONPATH=str(FOREIGN)),
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def test_openenv_validates_the_image_at_every_level(python, folder, image):
    report = json.loads(foreign(python, FOREIGN / "validate_image.py", folder, image))
    found = {result["check_id"]: result for result in report["results"]}
    passed = {name for name, result in found.items() if result["status"] == "pass"}
    assert passed >= {
        "static.manifest",
        "runtime.startup",
        "runtime.reward_well_formed",
        "runtime.observation_schema",
        "runtime.state_contract",
    }, found
    # The rest are those that OpenEnv lists and has not written yet, and the network, which the host's cannot show.
    unmade = [result["evidence"] for name, result in found.items() if name not in passed | {"runtime.network_policy"}]
    assert all(evidence == ["grader not implemented in this build"] for evidence in unmade), found
    assert report["verdict"] == "warn"  # its verdict where anything was skipped


def test_its_client_plays_in_the_container(docker, python, image):
    container = docker.containers.run(
        image, detach=True, network_mode="host", environment={"PORT": "0", "PYTHONUNBUFFERED": "1"}, read_only=True
    )
    try:
        url = foreign(python, "-c", f"from validate_image import url_of; print(url_of({container.id!r}))").strip()
        found = json.loads(foreign(python, FOREIGN / "drive_clients.py", "generic", url).splitlines()[-1])
        assert found["task"]["metadata"]["task_id"] == "test-1"
        assert (found["right"]["reward"], found["right"]["done"]) == (1.0, True)
        assert found["raised"] == "Server error: asked to (code: EXECUTION_ERROR)"
        assert "VALIDATION_ERROR" in found["invalid"]
        code, told = container.exec_run(["python3", "-m", "pip", "show", "openenv-openenv-envs-sum"])
        assert code == 0, told
        uid = container.exec_run(["python3", "-c", "import os; print(os.getuid())"]).output.strip()
        assert uid == b"65534"
    finally:
        container.remove(force=True)
