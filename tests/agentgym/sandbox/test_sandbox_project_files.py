"""Nothing of this project, its data or its caches is seen in a sandbox, wherever on the machine or in an image it lies."""

import io
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import uuid
from contextlib import closing
from pathlib import Path

import pytest

from agentgym.sandbox import SandboxSpec
from agentgym.sandbox.guest.project_files import project_files
from agentgym.sandbox.images import build as images

REPOSITORY = Path(__file__).parents[3]
SITE = f"lib/python{sys.version_info.major}.{sys.version_info.minor}/site-packages"
SECRET = "tasks.jsonl"
SEARCH = """
import os
for folder, folders, files in os.walk("/"):
    for name in folders + files:
        if name == "tasks.jsonl" or name == "hidden" or "agentgym" in name or name == "agent_train":
            path = os.path.join(folder, name)
            if os.path.isdir(path) and os.listdir(path) or os.path.isfile(path) and os.path.getsize(path): print("SEEN", path)
    folders[:] = [name for name in folders if os.path.join(folder, name) not in ("/proc", "/sys")]
import importlib.util
for name in ("agentgym", "agentgym_envs", "agent_train"):
    found = importlib.util.find_spec(name)
    if found and found.loader: print("SEEN as a module", found)  # an empty folder has none
import sqlite3, ssl, ctypes, zoneinfo, decimal, multiprocessing
print("searched", len(os.listdir("/usr/bin")) > 10)
"""
HOST = f"""
import sys
from agentgym.sandbox import SandboxSpec
from agentgym.sandbox.backends import bubblewrap
from agentgym.sandbox.images import build as images
if sys.argv[1] == "machine":
    images.rootfs = lambda name: None
box = bubblewrap.open_bubblewrap(SandboxSpec(), "tests")
print(box.exec(["python3", "-c", {SEARCH!r}], timeout=60))
print(box.exec("find / -name tasks.jsonl -size +0 2>/dev/null; find / -name 'agentgym*' -size +0 -not -type d 2>/dev/null").stdout, "found")
box.close()
"""


def install(folder):
    """The project as an installer leaves it: its packages, and a record of each."""
    for name in ("agentgym", "agentgym_envs", "agent_train"):
        shutil.copytree(REPOSITORY / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "agentgym-1.dist-info").mkdir()
    (folder / "agentgym-1.dist-info" / "RECORD").write_text("agentgym_envs/code/tasks.jsonl\n")
    (folder / "_agentgym_toolkit.pth").write_text("/somewhere\n")
    (folder / "another").mkdir()
    (folder / "another" / "kept.py").write_text("")
    return folder


def furnish(folder):
    """All that people keep of it: a virtual environment, a checkout, data, downloads."""
    install(folder / "venv" / SITE)
    (folder / "venv" / "pyvenv.cfg").write_text("home = /usr/bin\n")
    checkout = install(folder / "work")
    (checkout / "pyproject.toml").write_text("[project]\n")
    (checkout / "history" / "objects").mkdir(parents=True)
    (checkout / "history" / "objects" / "hidden").write_text("x")
    for name in ("data", "downloads"):
        (folder / name / "gsm8k").mkdir(parents=True)
        (folder / name / "gsm8k" / SECRET).write_text("{}\n")
    return folder


@pytest.fixture(scope="module")
def furnished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("furnished")
    return furnish(folder)


def test_what_is_found(furnished):
    found = {Path(path).relative_to(furnished).as_posix() for path in project_files(str(furnished))}
    names = ("agentgym", "agentgym_envs", "agent_train", "agentgym-1.dist-info", "_agentgym_toolkit.pth")
    assert found == {"work"} | {f"venv/{SITE}/{name}" for name in names}
    found = {Path(path).relative_to(furnished).as_posix() for path in project_files(str(furnished), installed=True)}
    assert found == {"work", f"venv/{SITE}"}


@pytest.mark.bubblewrap
@pytest.mark.skipif(os.getuid() != 0, reason="mounts the project at other places, as root can")
@pytest.mark.parametrize("root", ["machine", "image"])
def test_a_program_that_looks_everywhere_finds_nothing(root, furnished, tmp_path):
    """The project lies in this Python's own packages and the system's, in a virtual environment, in a checkout."""
    if root == "machine":
        site, share = Path(sysconfig.get_path("purelib", vars={"base": sys.base_prefix})), Path("/usr/share")
        packages = [
            site,
            *Path("/usr/lib/python3").glob("dist-packages"),
            *Path("/usr/local/lib").glob("python3*/*-packages"),
        ]
    else:
        image = images.rootfs("python")
        if image is None:
            pytest.skip("the image python is not built")
        share = image / "usr/share"
        packages = [*image.glob("usr/lib/python3/dist-packages")]
    place = next(
        folder for folder in (share / "doc", share / "man", share / "misc", share / "perl5") if folder.is_dir()
    )
    mounts = [(furnished, place), *((furnished / "venv" / SITE, folder) for folder in packages)]
    script = "".join(f"mount --bind {what} {where} && " for what, where in mounts)
    settings = {"AGENTGYM_DATA": f"{place}/data", "HF_HOME": f"{place}/downloads"} if root == "machine" else {}
    if root == "image":  # data in an image are its maker's own
        script += f"mount -t tmpfs none {place}/data && mount -t tmpfs none {place}/downloads && "
    (tmp_path / "host.py").write_text(HOST)
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", f"{script} exec {sys.executable} {tmp_path}/host.py {root}"],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY), **settings},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "SEEN" not in done.stdout
    assert "stdout='searched True\\n', stderr=''" in done.stdout
    assert done.stdout.endswith("\n found\n")
    assert done.stdout.count("\n") == 2


@pytest.mark.docker
def test_an_image_of_docker_s_that_holds_it(furnished):
    from agentgym.sandbox.backends import engine
    from agentgym.sandbox.backends.docker import open_docker

    tag = f"agentgym-test/holds-it:{uuid.uuid4().hex[:8]}"
    dockerfile = f"FROM {images.docker_tag('python')}\nCOPY venv /opt/venv\nCOPY work /opt/work\n".encode()
    context = io.BytesIO()
    with tarfile.open(fileobj=context, mode="w") as tar:
        entry = tarfile.TarInfo("Dockerfile")
        entry.size = len(dockerfile)
        tar.addfile(entry, io.BytesIO(dockerfile))
        for name in ("venv", "work"):
            tar.add(furnished / name, name)
    context.seek(0)
    api = engine.client()
    try:
        said = list(api.build(fileobj=context, custom_context=True, tag=tag, rm=True, decode=True))
        assert not any("error" in line for line in said), said
        with closing(open_docker(SandboxSpec(image=tag), "tests")) as box:
            result = box.exec(["python3", "-c", SEARCH], timeout=60)
            assert (result.stdout, result.stderr) == ("searched True\n", "")
            assert box.exec(f"ls /opt/venv/{SITE}/another").stdout == "kept.py\n"  # what is not ours stays
            assert "No such" not in box.exec("cat /proc/keys /proc/timer_list").stderr  # as covered as ever
            assert box.exec("cat /proc/keys /proc/timer_list").stdout == ""
    finally:
        api.remove_image(tag, force=True)
