"""Images: their recipes, and building them by both ways. Real packages are downloaded and unpacked."""

import contextlib
import os
import shutil
import signal
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from agentgym.sandbox import SandboxError, SandboxSpec
from agentgym.sandbox.backends import engine
from agentgym.sandbox.images import build as images
from agentgym.sandbox.images import debian

TINY = "# as little as can be\npython3-minimal\nbase-files\nbash\ncoreutils\n"
BUILD = """
import sys, pathlib
from agentgym.cli import main
from agentgym.sandbox.images import build as images
images.image_folder = lambda: pathlib.Path(sys.argv[1])
sys.exit(main(["sandbox", "build", "--no-docker", "--how", "packages"]))
"""


def make_tiny(folder):
    """A folder of images with one, `tiny`; gives that one's folder."""
    tiny = folder / "sandboxes" / "tiny"
    tiny.mkdir(parents=True)
    (tiny / "packages.txt").write_text(TINY)
    (tiny / "Dockerfile").write_text("FROM no-registry.invalid/nothing:1\n")
    return tiny


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder of images in place of the project's, with one, `tiny`; and an empty cache."""
    tiny = make_tiny(tmp_path)
    monkeypatch.setattr(images, "image_folder", lambda: tmp_path / "sandboxes")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tiny


@pytest.fixture(scope="session")
def needs_packages():
    """Skips where this machine cannot download Debian packages."""
    if missing := debian.missing_tools():
        pytest.skip(f"{', '.join(missing)} not found: packages are unpacked on Debian and Ubuntu only")
    asked = subprocess.run(["apt-get", "download", "--print-uris", "base-files"], capture_output=True, check=False)
    if asked.returncode:
        pytest.skip(f"no package lists here: {asked.stderr.decode().strip()}")


@pytest.fixture(scope="session")
def two_builds(needs_packages, tmp_path_factory):
    """One image asked of two builders at once: what each returned, what each said."""
    folder = tmp_path_factory.mktemp("two")
    make_tiny(folder)
    built, said = {}, {0: [], 1: []}

    def make(number):
        built[number] = images.build("tiny", "packages", docker=False, say=said[number].append)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(images, "image_folder", lambda: folder / "sandboxes")
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        threads = [threading.Thread(target=make, args=[number]) for number in said]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(200)
        digest = images.recipe("tiny").digest
    return built, said, digest


@pytest.fixture(scope="session")
def tiny_root(two_builds):
    """A root folder that was really unpacked."""
    return two_builds[0][0].rootfs


def leftovers():
    """What lies in the cache besides the lock and finished images."""
    cache = images.cache_folder()
    return [p.relative_to(cache).as_posix() for p in cache.rglob("*") if p.name != "lock" and p.is_file()][:5]


class TestRecipe:
    def test_the_images_of_the_project(self):
        assert images.image_names() == ["python", "search", "sql", "swe"]

    @pytest.mark.parametrize("name", ["python", "search", "sql", "swe"])
    def test_each_has_what_a_sandbox_needs(self, name):
        recipe = images.recipe(name)
        assert {"python3", "bash", "coreutils", "grep", "sed", "findutils"} <= set(recipe.packages)
        assert recipe.packages == sorted(recipe.packages)
        dockerfile = (recipe.folder / "Dockerfile").read_text()
        assert images.base_of(recipe.folder / "Dockerfile") == "debian:bookworm-slim"
        assert "packages.txt" in dockerfile
        assert (recipe.requirements is not None) == ("requirements.txt" in dockerfile)
        assert images.docker_tag(name) == f"agentgym/{name}:{recipe.digest}"

    def test_an_unknown_name_lists_those_that_there_are(self):
        for ask in (images.recipe, images.docker_tag, images.rootfs, images.build):
            with pytest.raises(ValueError, match="no image 'rust'; there are python, search, sql, swe"):
                ask("rust")

    def test_any_change_in_its_folder_gives_another_image(self, folder):
        seen = {images.docker_tag("tiny")}
        for change in (
            lambda: (folder / "packages.txt").write_text(TINY + "git\n"),
            lambda: (folder / "Dockerfile").write_text("FROM other\n"),
            lambda: (folder / "requirements.txt").write_text("bm25s==1\n"),
            lambda: (folder / "requirements.txt").rename(folder / "renamed.txt"),
        ):
            change()
            assert images.docker_tag("tiny") not in seen
            seen.add(images.docker_tag("tiny"))

    def test_comments_and_empty_lines_are_no_packages(self, folder):
        (folder / "packages.txt").write_text("# one\n\nbash  # two\n  python3\n")
        assert images.recipe("tiny").packages == ["bash", "python3"]

    def test_what_was_not_built_has_no_root_folder(self, folder):
        assert images.rootfs("tiny") is None

    @pytest.mark.parametrize(
        ("text", "base"),
        [("# x\nFROM a:1\n", "a:1"), ("from --platform=linux/amd64 b AS c\nRUN x\n", "b"), ("ARG X\nFROM c\n", "c")],
    )
    def test_the_base_of_a_dockerfile(self, tmp_path, text, base):
        (tmp_path / "Dockerfile").write_text(text)
        assert images.base_of(tmp_path / "Dockerfile") == base

    def test_a_dockerfile_without_a_base_is_an_error(self, tmp_path):
        (tmp_path / "Dockerfile").write_text("RUN true\n")
        with pytest.raises(SandboxError, match="no FROM"):
            images.base_of(tmp_path / "Dockerfile")


class TestRootFolder:
    def test_has_the_folders_and_files_that_a_sandbox_needs(self, tiny_root):
        root = tiny_root
        for name in ("proc", "dev", "sys", "tmp", "workspace", "private"):
            assert (root / name).is_dir()
            assert not any((root / name).iterdir())
        assert "nobody:x:65534:65534" in (root / "etc/passwd").read_text()
        assert (root / "bin").is_symlink()
        assert (root / "bin/sh").resolve().name in ("bash", "dash")
        assert (root / "usr/bin/python3").exists()

    def test_has_no_set_user_id_programs_and_no_documents(self, tiny_root):
        root = tiny_root
        files = [Path(folder, name) for folder, _, names in os.walk(root) for name in names]
        assert len(files) > 300
        assert not [f for f in files if f.lstat().st_mode & (stat.S_ISUID | stat.S_ISGID)]
        assert not (root / "usr/share/doc").exists()

    def test_its_python_is_compiled_for_the_place_where_it_will_be(self, tiny_root):
        root = tiny_root
        (compiled,) = root.glob("usr/lib/python3.*/__pycache__/os.*.pyc")
        assert str(root).encode() not in compiled.read_bytes()
        assert b"/usr/lib/python3" in compiled.read_bytes()

    def test_the_archives_are_not_kept(self, tiny_root):
        root = tiny_root
        assert not list(root.parent.rglob("*.deb"))


class TestBuild:
    def test_two_builders_at_once_make_it_once(self, two_builds):
        built, said, digest = two_builds
        assert sorted(b.fresh for b in built.values()) == [False, True]
        assert built[0].rootfs == built[1].rootfs
        assert any("waiting for another build" in line for lines in said.values() for line in lines)
        assert built[0].bytes > 10_000_000
        assert built[0].tag is None
        assert not any("not compiled" in line for lines in said.values() for line in lines)
        assert [p.name for p in built[0].rootfs.parent.parent.iterdir() if p.is_dir()] == [digest]

    def test_an_unknown_package_is_named_and_nothing_is_left(self, folder, needs_packages):
        (folder / "packages.txt").write_text("python3\nno-such-package-anywhere\n")
        with pytest.raises(SandboxError, match="no-such-package-anywhere"):
            images.build("tiny", "packages", docker=False)
        assert images.rootfs("tiny") is None
        assert leftovers() == []

    def test_a_machine_that_is_no_debian_is_told_so(self, folder, monkeypatch, tmp_path):
        monkeypatch.setenv("PATH", str(tmp_path))
        with pytest.raises(SandboxError, match=r"apt-get, dpkg-deb, tar: not found.*Debian"):
            images.build("tiny", "packages", docker=False)

    def test_a_cache_that_cannot_be_written_to_is_named(self, folder, monkeypatch, tmp_path):
        (tmp_path / "file").touch()
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
        with pytest.raises(SandboxError, match="XDG_CACHE_HOME"):
            images.build("tiny", "packages", docker=False)

    @pytest.mark.parametrize(
        ("arguments", "text"), [({"how": "magic"}, "magic"), ({"how": "registry", "docker": False}, "by Docker")]
    )
    def test_what_cannot_be_asked_for(self, folder, arguments, text):
        with pytest.raises(ValueError, match=text):
            images.build("tiny", **arguments)

    @pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small disk takes root")
    def test_a_full_disk_leaves_nothing(self, folder, needs_packages, tmp_path):
        small = tmp_path / "cache"
        small.mkdir()
        mounted = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", small], capture_output=True, check=False
        )
        if mounted.returncode:
            pytest.skip(f"no mounting here: {mounted.stderr.decode().strip()}")
        try:
            with pytest.raises(SandboxError, match=r"(?i)space"):
                images.build("tiny", "packages", docker=False)
            assert images.rootfs("tiny") is None
            assert leftovers() == []
        finally:
            subprocess.run(["umount", small], check=True)

    @pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
    def test_an_interrupted_build_leaves_nothing_that_counts(self, needs_packages, tmp_path, number):
        make_tiny(tmp_path)
        env = os.environ | {"XDG_CACHE_HOME": str(tmp_path), "DOCKER_HOST": "unix:///none"}
        command = [sys.executable, "-c", BUILD, str(tmp_path / "sandboxes")]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env) as process:
            for line in process.stdout:
                if "unpacking" in line:
                    process.send_signal(number)
                    break
            process.stdout.read()
        assert process.returncode == (130 if number == signal.SIGINT else -signal.SIGKILL)
        place = tmp_path / "agentgym" / "sandboxes" / "tiny"
        left = [p.suffix for p in place.iterdir() if p.is_dir()]
        assert left == ([] if number == signal.SIGINT else [".part"])
        if number == signal.SIGKILL:
            again = subprocess.run(command, capture_output=True, text=True, env=env, timeout=200, check=False)
            assert again.returncode == 0, again.stderr
            (made,) = (p for p in place.iterdir() if p.is_dir())
            assert (made / "rootfs" / "usr/bin/python3").exists()


@pytest.mark.docker
class TestWithDocker:
    def test_auto_takes_packages_where_the_base_cannot_be_pulled_and_says_why(self, folder, needs_packages):
        said = []
        try:
            built = images.build("tiny", say=said.append)
            assert (built.way, built.tag) == ("packages", images.docker_tag("tiny"))
            assert any("from Debian packages: no-registry.invalid/nothing:1 cannot be pulled" in line for line in said)
            assert engine.way_of(engine.client(), built.tag) == "packages"

            engine.client().remove_image(built.tag)
            assert images.build("tiny").fresh  # only imported again
            assert not images.build("tiny").fresh
        finally:
            remove_image(images.docker_tag("tiny"))

    def test_auto_builds_the_dockerfile_where_its_base_is_at_hand_and_copies_the_files_out(self, folder, monkeypatch):
        from agentgym.sandbox.backends.docker import open_docker

        base = TAG_OF_PYTHON
        lines = "COPY packages.txt /made-here\nRUN echo ran >>/made-here && mkdir -p /srv/dev && touch /srv/dev/kept\n"
        (folder / "Dockerfile").write_text(f"FROM {base}\n{lines}")
        said = []
        try:
            built = images.build("tiny", say=said.append)
            assert (built.way, built.tag, built.fresh) == ("registry", images.docker_tag("tiny"), True)
            assert any(f"{base} is at hand" in line for line in said)
            assert (images.rootfs("tiny") / "made-here").read_text() == TINY + "ran\n"
            assert (images.rootfs("tiny") / "srv/dev/kept").exists(), "of /dev alone nothing is copied"
            assert not images.build("tiny").fresh
            box = open_docker(SandboxSpec(image="tiny"), "test-images")
            assert box.read("/made-here").decode() == TINY + "ran\n"
            box.close()

            # The root folder alone is lost: it comes from the Docker image again.
            shutil.rmtree(images.rootfs("tiny").parent)
            assert images.build("tiny").fresh
            assert (images.rootfs("tiny") / "made-here").exists()
        finally:
            remove_image(images.docker_tag("tiny"))

    def test_a_dockerfile_that_fails_is_an_error_with_its_last_words(self, folder):
        (folder / "Dockerfile").write_text(f"FROM {TAG_OF_PYTHON}\nRUN echo it is over; exit 3\n")
        with pytest.raises(SandboxError, match=r"(?s)Dockerfile failed.*it is over"):
            images.build("tiny", "registry")
        assert images.rootfs("tiny") is None
        assert engine.way_of(engine.client(), images.docker_tag("tiny")) is None

    def test_one_that_holds_this_project_is_refused_and_nothing_is_left(self, folder):
        package = "/opt/venv/lib/python3.11/site-packages/agentgym_envs"
        (folder / "Dockerfile").write_text(f"FROM {TAG_OF_PYTHON}\nRUN mkdir -p {package} && touch {package}/x.py\n")
        with pytest.raises(SandboxError, match=f"the image holds files of agentgym, such as {package}"):
            images.build("tiny", "registry")
        assert images.rootfs("tiny") is None
        assert engine.way_of(engine.client(), images.docker_tag("tiny")) is None

    def test_an_engine_that_must_be_there_and_is_not_is_an_error(self, folder, monkeypatch):
        monkeypatch.setenv("DOCKER_HOST", "unix:///no/such/docker.sock")
        with pytest.raises(SandboxError, match=r"unix:///no/such/docker\.sock"):
            images.build("tiny", docker=True)

    @pytest.mark.parametrize(
        ("name", "command", "shows"),
        [
            (
                "python",
                "python3 -c 'import ssl, sqlite3, ctypes, decimal, json; print(1)' | grep 1 | sed s/1/2/ | awk '{print $1}'",
                "2\n",
            ),
            ("sql", "sqlite3 :memory: 'select 6 * 7'", "42\n"),
            ("search", "python3 -c 'import numpy, bm25s; print(int(numpy.ones(3).sum()))'", "3\n"),
        ],
    )
    def test_the_images_have_what_they_promise(self, name, command, shows):
        from agentgym.sandbox.backends.docker import open_docker

        if engine.way_of(engine.client(), images.docker_tag(name)) is None:
            pytest.skip(f"run `agentgym sandbox build {name}`")
        box = open_docker(SandboxSpec(image=name), "test-images")
        try:
            result = box.exec(command, timeout=60)
            assert (result.stdout, result.stderr) == (shows, "")
        finally:
            box.close()


TAG_OF_PYTHON = images.docker_tag("python")  # before a test puts another folder in the project's place


def remove_image(tag):
    from docker.errors import ImageNotFound

    with contextlib.suppress(ImageNotFound):
        engine.client().remove_image(tag, force=True)
