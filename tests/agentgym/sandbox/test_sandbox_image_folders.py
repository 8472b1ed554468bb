"""Images of folders anywhere, and images with a Python of this machine beside their own."""

import os
import sys

import pytest
from opened import open_on
from remote_sandboxes import SandboxServer

from agentgym.cli import main
from agentgym.sandbox import SandboxError, SandboxSpec
from agentgym.sandbox.backends import engine, remote, select
from agentgym.sandbox.guest.project_files import project_files
from agentgym.sandbox.images import build as images
from agentgym.sandbox.images import debian, interpreters

PACKAGES = "base-files\nbash\ncoreutils\ngrep\npython3\n"
OWN = "{}.{}".format(*sys.version_info)
# Another Python than the image's own, if this machine has one.
OTHERS = sorted(
    {found.version for program in interpreters._programs() if (found := interpreters._asked(program)) is not None},
    key=interpreters._order,
)
OTHER = next((version for version in OTHERS if version.startswith(("3.9.", "3.8.", "3.10."))), None)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder outside the project, and an empty cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    made = tmp_path / "My Images" / "Repo_1"
    made.mkdir(parents=True)
    (made / "packages.txt").write_text(PACKAGES)
    return made


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """An image with another Python, built from a folder by its path; its record, folder and cache."""
    if missing := debian.missing_tools():
        pytest.skip(f"{', '.join(missing)} not found")
    if OTHER is None:
        pytest.skip("no other Python on this machine")
    place = tmp_path_factory.mktemp("folders")
    made = place / "my image"
    made.mkdir()
    (made / "packages.txt").write_text(PACKAGES)
    (made / "python-version").write_text(".".join(OTHER.split(".")[:2]) + "\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(place / "cache"))
        try:
            yield images.build(str(made), "packages"), made
        finally:
            if engine.unavailable() is None:
                engine.client().remove_image(images.recipe(str(made)).tag, force=True)


class TestPaths:
    def test_what_is_a_path_and_what_is_a_reference(self):
        for path in "/a/b", "./a", "../a":
            assert images.is_path(path)
            assert not images.is_reference(path)
        for reference in "a/b", "a:1", "registry.example/mine:1", ".hidden/x":
            assert images.is_reference(reference)
            assert not images.is_path(reference)
        assert not images.is_reference("python")

    def test_the_image_depends_on_the_content_and_not_on_the_place(self, folder, tmp_path):
        recipe = images.recipe(str(folder))
        assert recipe.name == "repo-1"
        other = tmp_path / "repo-1"
        other.mkdir()
        (other / "packages.txt").write_text(PACKAGES)
        assert images.recipe(str(other)).place == recipe.place
        (other / "packages.txt").write_text(PACKAGES + "git\n")
        assert images.recipe(str(other)).place != recipe.place

    def test_the_image_depends_on_which_files_can_be_run(self, folder):
        tool = folder / "files" / "tool"
        tool.parent.mkdir()
        tool.write_text("true")
        before = images.recipe(str(folder)).place
        tool.chmod(0o755)
        assert images.recipe(str(folder)).place != before

    def test_so_does_a_folder_that_is_written_for_an_image(self, folder, tmp_path):
        tool = folder / "tool"
        tool.write_text("true")
        written = [images.written_folder({"tool": tool, "Dockerfile": "FROM x"}, lambda digest: tmp_path / digest)]
        tool.chmod(0o755)
        written.append(images.written_folder({"tool": tool, "Dockerfile": "FROM x"}, lambda digest: tmp_path / digest))
        assert [os.access(made / "tool", os.X_OK) for made in written] == [False, True]

    def test_a_relative_path(self, folder, monkeypatch):
        monkeypatch.chdir(folder.parent)
        assert images.recipe("./Repo_1") == images.recipe(str(folder))

    @pytest.mark.parametrize("path", ["/nowhere", "/etc", "./nothing"])
    def test_a_folder_that_is_no_image(self, path):
        with pytest.raises(ValueError, match=f"{path}: an image's folder has a packages.txt or a Dockerfile"):
            images.recipe(path)

    def test_one_that_is_not_built_says_how_to_build_it(self, folder):
        with pytest.raises(SandboxError, match=f"agentgym sandbox build {folder}"):
            select.choose("bubblewrap", str(folder))

    def test_the_command_takes_a_path_and_says_what_is_wrong_with_it(self, capsys):
        assert main(["sandbox", "build", "./nowhere"]) == 2
        assert "nowhere: an image's folder has a packages.txt" in capsys.readouterr().err

    def test_a_dockerfile_alone_needs_an_engine(self, folder):
        (folder / "packages.txt").unlink()
        (folder / "Dockerfile").write_text("FROM python:3.9-slim\n")
        with pytest.raises(SandboxError, match=r"no packages\.txt: without a Docker Engine"):
            images.build(str(folder), docker=False)

    def test_a_server_reads_no_folder_that_a_client_names(self, folder):
        with SandboxServer("--sandbox-backend", "bubblewrap") as server:
            with pytest.raises(SandboxError, match="is not built"):
                remote.open_remote(server.url, SandboxSpec(image=str(folder)), "tests")
            channel = remote.RemoteChannel(remote._address(server.url), server.url)
            with pytest.raises(SandboxError, match="takes names and Docker references, and no paths"):
                channel.start({"image": "/etc"}, "tests", 30)
            channel.close()


class TestFiles:
    def test_a_folders_own_files_are_added(self, folder, tmp_path):
        (folder / "files/etc").mkdir(parents=True)
        (folder / "files/etc/setting").write_text("x")
        (folder / "files/etc/setting").chmod(0o6600)
        (tmp_path / "root").mkdir()
        images._add_files(folder / "files", tmp_path / "root")
        added = tmp_path / "root/etc/setting"
        assert (added.read_text(), added.stat().st_mode & 0o7777) == ("x", 0o644)

    def test_a_link_stays_a_link_and_another_target_is_another_image(self, folder, tmp_path):
        (folder / "files/opt/v1").mkdir(parents=True)
        (folder / "files/opt/current").symlink_to("v1")
        (folder / "files/opt/v1/host").symlink_to("/etc/hostname")
        (folder / "files/tool").symlink_to("/opt/current/tool")
        (tmp_path / "root").mkdir()
        images._add_files(folder / "files", tmp_path / "root")
        added = [(tmp_path / "root" / name).readlink() for name in ("opt/current", "opt/v1/host", "tool")]
        assert [str(target) for target in added] == ["v1", "/etc/hostname", "/opt/current/tool"]
        before = images.recipe(str(folder)).digest
        (folder / "files/tool").unlink()
        (folder / "files/tool").symlink_to("/opt/v1/tool")
        assert images.recipe(str(folder)).digest != before

    def test_but_not_through_links_of_the_image(self, folder, tmp_path):
        (folder / "files/var/run").mkdir(parents=True)
        (folder / "files/var/run/x").write_text("x")
        (tmp_path / "root/var").mkdir(parents=True)
        (tmp_path / "outside").mkdir()
        (tmp_path / "root/var/run").symlink_to(tmp_path / "outside")
        with pytest.raises(SandboxError, match="is a link in the image"):
            images._add_files(folder / "files", tmp_path / "root")
        assert not list((tmp_path / "outside").iterdir())

    def test_a_link_in_place_of_a_file_is_replaced(self, folder, tmp_path):
        (folder / "files").mkdir()
        (folder / "files/x").write_text("new")
        (tmp_path / "root").mkdir()
        (tmp_path / "outside").write_text("old")
        (tmp_path / "root/x").symlink_to(tmp_path / "outside")
        images._add_files(folder / "files", tmp_path / "root")
        assert ((tmp_path / "outside").read_text(), (tmp_path / "root/x").read_text()) == ("old", "new")

    def test_git_in_the_swe_image_trusts_repositories_of_others(self):
        files = images.image_folder() / "swe" / "files"
        assert "directory = *" in (files / "etc/gitconfig").read_text()
        assert "COPY files/ /" in (files.parent / "Dockerfile").read_text()


class TestTags:
    @pytest.mark.parametrize(
        "tag",
        [
            "agentgym/../x:0123456789ab",
            "agentgym/a/b:0123456789ab",
            "agentgym/.:0123456789ab",
            "agentgym/a:../../etc/xx",
        ],
    )
    def test_one_that_would_leave_the_cache_is_none(self, tag):
        assert not images.TAG.fullmatch(tag)


class TestPython:
    @pytest.mark.parametrize("text", ["", "three", "2.7", "3", "3.9/../..", "3.9; true", "3.x"])
    def test_what_is_no_version(self, folder, text):
        (folder / "python-version").write_text(text)
        with pytest.raises(SandboxError, match=r"python-version says .* write a version such as 3\.9"):
            images.build(str(folder), "packages", docker=False)

    def test_one_that_is_not_here_lists_those_that_are_and_what_to_do(self, folder):
        (folder / "python-version").write_text("3.99\n")
        with pytest.raises(SandboxError, match=rf"no Python 3.99 here.*{OWN}.*pyenv install 3.99.*Dockerfile"):
            images.build(str(folder), "packages", docker=False)
        assert images.rootfs(str(folder)) is None

    def test_3_1_is_not_3_11(self):
        with pytest.raises(SandboxError, match=r"no Python 3\.1 here"):
            interpreters.find("3.1")

    def test_the_newest_that_fits(self):
        assert interpreters.find(OWN).version.startswith(OWN)

    def test_the_copy_holds_no_installed_packages_and_nothing_of_this_project(self, built):
        root = built[0].rootfs
        place = next((root / "opt").iterdir())
        assert not next(project_files(str(root)), None)
        assert [path.name for path in place.rglob("site-packages/*")] == []
        assert not [path for path in place.rglob("*") if path.is_symlink() and not path.resolve().is_relative_to(root)]
        assert not [path for path in place.rglob("*") if path.lstat().st_mode & 0o6000]

    @pytest.fixture(params=["bubblewrap", "docker", "remote"])
    def box(self, built, request):
        if request.param == "docker":
            if built[0].tag is None:
                pytest.skip("no Docker Engine")
            opened = open_on("docker", SandboxSpec(image=str(built[1])))
            yield opened
            opened.close()
        elif request.param == "bubblewrap":
            opened = open_on("bubblewrap", SandboxSpec(image=str(built[1])))
            yield opened
            opened.close()
        else:
            with SandboxServer("--sandbox-backend", "bubblewrap", env=dict(os.environ)) as server:
                opened = open_on(server.url, SandboxSpec(image=str(built[1])))
                yield opened
                opened.close()

    def test_programs_have_it_beside_the_images_own(self, box):
        short = ".".join(OTHER.split(".")[:2])
        asked = "import sys, ssl, sqlite3, ctypes, zlib, bz2, lzma, json; print(sys.version.split()[0], sys.prefix)"
        for name in f"python{short}", "python":
            result = box.exec([name, "-c", asked])
            assert result.stdout.split()[0].startswith(short), result
            assert result.stdout.split()[1] == f"/opt/python{short}"
        assert not box.exec(["python3", "--version"]).stdout.startswith(f"Python {short}.")
        assert box.session("python").run("1 + 1").stdout == "2\n"

    def test_it_makes_environments_without_a_network(self, box):
        made = box.exec("python -m venv env && env/bin/python -m pip --version", timeout=50)
        assert made.ok, made
        assert "/workspace/env/lib" in made.stdout

    def test_a_dockerfile_must_bring_it_itself(self, folder, tmp_path):
        (folder / "python-version").write_text("3.9")
        root = tmp_path / "work" / "rootfs"
        (root / "usr/bin").mkdir(parents=True)
        (root / "usr/bin/python3").touch()
        with pytest.raises(SandboxError, match=r"has no python3\.9, which python-version asks for"):
            images._publish(root, images.recipe(str(folder)), "registry")
