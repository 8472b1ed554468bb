"""Images in layers: a folder with a `base`. Built from packages and the package index; on both back ends, and on a server."""

import fcntl
import os
import stat
import subprocess
import sys

import pytest
from opened import open_on
from remote_sandboxes import SandboxServer
from test_sandbox_image_folders import OTHER, PACKAGES

from agentgym.sandbox import SandboxError, SandboxSpec
from agentgym.sandbox.backends import docker, engine
from agentgym.sandbox.images import build as images
from agentgym.sandbox.images import debian

MEGABYTE = 1 << 20


def write(folder, **files):
    folder.mkdir(parents=True)
    for name, text in files.items():
        (folder / name.replace("_", "-").replace("-txt", ".txt")).write_text(text)
    return folder


def fill(root):
    """What a program adds: a file, and the removal of one that the layer below has."""
    (root / "srv").mkdir()
    (root / "srv/new").write_text("new")
    os.mknod(root / "srv/old", stat.S_IFCHR, os.makedev(0, 0))


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """Three images on each other, of which the uppermost is given, with its folder."""
    if missing := debian.missing_tools():
        pytest.skip(f"{', '.join(missing)} not found")
    if OTHER is None or os.getuid():
        pytest.skip("there is no other Python on this machine, or no root")
    place = tmp_path_factory.mktemp("layers")
    version = ".".join(OTHER.split(".")[:2])
    write(place / "bottom", packages_txt=PACKAGES)
    write(place / "middle", base="../bottom", python_version=f"{version}\n", requirements_txt="sqlparse==0.4.4\n")
    (place / "middle/files/srv").mkdir(parents=True)
    for name in "old", "kept":
        (place / "middle/files/srv" / name).write_text(name)
    top = write(place / "top", base="../middle", made_by="make it so")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(place / "cache"))
        patch.setenv(docker.UNLIMITED, "1")
        try:
            yield images.build(str(top), "packages", fill=fill), top
        finally:
            if engine.unavailable() is None:
                for name in "top", "middle", "bottom":
                    engine.client().remove_image(images.recipe(str(place / name)).tag, force=True)


@pytest.fixture(params=["bubblewrap", "docker", "remote"])
def open_top(built, request):
    """Opens sandboxes of the uppermost image."""
    boxes = []

    def start(where, **settings):
        boxes.append(open_on(where, SandboxSpec(image=str(built[1]), **settings)))
        return boxes[-1]

    if request.param == "docker" and built[0].tag is None:
        pytest.skip("no Docker Engine")
    if request.param == "remote":
        with SandboxServer("--sandbox-backend", "bubblewrap", env=dict(os.environ)) as server:
            yield lambda **settings: start(server.url, **settings)
            for box in boxes:
                box.close()
        return
    yield lambda **settings: start(request.param, **settings)
    for box in boxes:
        box.close()


def test_programs_see_all_layers_as_one_image(open_top):
    box = open_top()
    assert box.exec("ls /srv; cat /srv/*").stdout == "kept\nnew\nkeptnew"
    shown = box.exec(
        "sqlformat --version; python -c 'import sqlparse; print(sqlparse.__file__)'; python3 -c 'import sys; print(sys.prefix)'"
    )
    version, place, prefix = shown.stdout.split()
    assert (version, prefix) == ("0.4.4", "/usr")
    assert place.startswith(f"/opt/python{'.'.join(OTHER.split('.')[:2])}/lib/")


def test_the_root_is_read_only_unless_it_is_asked_for(open_top):
    assert "Read-only" in open_top().exec("mkdir /x; touch /srv/new").stderr


def test_a_writable_root_changes_no_layer(open_top, built):
    box = open_top(writable_root=True, disk=16 * MEGABYTE)
    box.write("/mine/x", "x")
    box.protect(["/mine/x"])
    assert not box.exec("echo y > /mine/x").ok
    box.reset()
    assert not box.exec("test -e /mine").ok
    assert sorted(path.name for path in (built[0].rootfs / "srv").iterdir()) == ["new", "old"]


def test_a_layer_holds_only_what_it_adds(built):
    top, middle, bottom = images.layers_of(built[0].rootfs)
    assert sorted(path.name for path in top.iterdir()) == ["srv"]
    assert sorted(path.name for path in middle.iterdir()) == ["opt", "srv", "usr"]
    assert not (middle / "usr/bin").exists()
    assert (bottom / "usr/bin/python3").exists()
    assert built[0].bytes < 1000


def test_it_is_not_built_again(built):
    assert not images.build(str(built[1]), docker=built[0].tag is not None).fresh


def test_a_missing_base_is_told(built):
    middle = images.layers_of(built[0].rootfs)[1].parent
    middle.rename(middle.with_name("gone"))
    try:
        with pytest.raises(SandboxError, match=r"needs the image agentgym/middle:.* build it again"):
            open_on("bubblewrap", SandboxSpec(image=str(built[1])))
    finally:
        middle.with_name("gone").rename(middle)


def test_sandboxes_of_a_killed_process_leave_no_mount(built):
    code = (
        "import os, signal; from opened import open_on; from agentgym.sandbox import SandboxSpec\n"
        f"box = open_on('bubblewrap', SandboxSpec(image={str(built[1])!r}, writable_root=True))\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    subprocess.run([sys.executable, "-c", code], cwd=os.path.dirname(__file__), timeout=60, check=False)
    with open("/proc/self/mountinfo") as mounts:
        assert "agentgym-bubblewrap" not in mounts.read()


class TestTheLeastRecentlyUsedGo:
    """The cache is a copy, since other tests go on to use what is removed from it."""

    @pytest.fixture
    def cache(self, built, tmp_path, monkeypatch):
        (tmp_path / "agentgym").mkdir()
        subprocess.run(["cp", "-al", images.cache_folder(), tmp_path / "agentgym"], check=True)
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        monkeypatch.setenv("DOCKER_HOST", "unix:///no/such/docker.sock")
        return images.cache_folder()

    @pytest.fixture
    def left(self, cache):
        return lambda: {place.parent.name for place in cache.glob("*/*") if (place / "image.json").is_file()}

    def test_a_new_image_takes_the_room_of_old_ones(self, built, left, monkeypatch, tmp_path):
        bottom = images.recipe(str(built[1])).base.base
        monkeypatch.setenv(images.BYTES, str(images.shelf.read(bottom.place)["bytes"] + 1000))
        said = []
        images.build(str(write(tmp_path / "new", base=str(bottom.folder))), say=said.append)
        assert left() == {"bottom", "new"}
        assert [line.split(":")[0] for line in said if "removed" in line] == [
            "removed the image agentgym/top",
            "removed the image agentgym/middle",
        ]

    def test_but_not_of_those_in_use_or_below_others(self, built, cache, left):
        box = open_on("bubblewrap", SandboxSpec(image=str(built[1])))
        said = []
        images.shelf.evict(cache, 1, cache, lambda tag: True, said.append)
        assert left() == {"top", "middle", "bottom"}
        assert "none can be removed" in said[-1]
        assert box.exec("cat /srv/new").stdout == "new"
        box.close()
        images.shelf.evict(cache, 1, cache, lambda tag: "top" in tag, said.append)
        assert left() == {"middle", "bottom"}, "docker has a container of the second"

    def test_what_a_killed_build_left_goes_and_what_a_build_makes_stays(self, cache):
        for name in ("dead", "running"):
            (cache / name / "0123456789ab.part").mkdir(parents=True)
        with (cache / "running" / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            images.shelf.evict(cache, 1 << 60, cache, lambda tag: True)
        assert [place.parent.name for place in cache.glob("*/*.part")] == ["running"]

    def test_use_is_what_counts_and_not_age(self, cache, left, tmp_path):
        for number, name in enumerate(("one", "two", "three")):
            (cache / name / "0123456789ab").mkdir(parents=True)
            record = cache / name / "0123456789ab/image.json"
            record.write_text('{"way": "packages", "bytes": 1}')
            os.utime(record, (number, number))
        images.used("agentgym/one:0123456789ab")
        total = sum(images.shelf.read(place)["bytes"] for place in cache.glob("*/*") if (place / "image.json").exists())
        images.shelf.evict(cache, total - 1, cache, lambda tag: True)
        assert left() >= {"one", "three"}
        assert "two" not in left()


class TestRecipes:
    def test_the_digest_depends_on_the_base_and_not_on_its_place(self, tmp_path):
        for place in "one", "two":
            write(tmp_path / place / "below", packages_txt=PACKAGES)
            write(tmp_path / place / "above", base="../below\n")
        write(tmp_path / "three", base=str(tmp_path / "one/below"))
        one, two = (images.recipe(str(tmp_path / place / "above")) for place in ("one", "two"))
        assert one.tag == two.tag
        assert images.recipe(str(tmp_path / "three")).digest == one.digest
        (tmp_path / "two/below/packages.txt").write_text(PACKAGES + "git\n")
        assert images.recipe(str(tmp_path / "two/above")).tag != one.tag

    def test_a_base_by_its_name(self, tmp_path):
        assert images.recipe(str(write(tmp_path / "x", base="python"))).base == images.recipe("python")

    @pytest.mark.parametrize(
        ("files", "text"),
        [
            ({"base": "no-such"}, "there is no image 'no-such'"),
            ({"base": "../nowhere"}, "an image's folder has a packages.txt"),
            ({"base": ""}, "write the name of an image, or the path of its folder"),
            ({"base": "../x"}, "is its own base"),
            ({"base": "python", "packages_txt": "git\n"}, "has a base, so it takes no packages.txt"),
        ],
    )
    def test_mistakes(self, tmp_path, files, text):
        with pytest.raises(ValueError, match=text):
            images.recipe(str(write(tmp_path / "x", **files)))

    def test_one_that_a_program_makes_names_its_command(self, built, tmp_path):
        write(tmp_path / "x", base=str(built[1]), made_by="agentgym sandbox build swe --instances FILE")
        with pytest.raises(SandboxError, match="run `agentgym sandbox build swe --instances FILE`"):
            images.build(str(tmp_path / "x"), docker=False)
        assert images.docker_command(str(tmp_path / "x")) == "agentgym sandbox build swe --instances FILE"

    def test_a_folder_that_would_hide_a_link_of_the_base_is_refused(self, built, tmp_path):
        (write(tmp_path / "x", base=str(built[1])) / "files/bin").mkdir(parents=True)
        (tmp_path / "x/files/bin/tool").write_text("x")
        with pytest.raises(SandboxError, match="/bin cannot be added: it is a link"):
            images.build(str(tmp_path / "x"), docker=False)
