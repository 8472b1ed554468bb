"""swe_bench: patches that git wrote are read as git means them; what leaves the repository is refused."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from swe_bench_cases import LITE, MODIFIED, TESTS

from agentgym_envs.swe_bench.instances import read_instances
from agentgym_envs.swe_bench.patches import (
    PatchError,
    check_files,
    check_patch,
    parse_patch,
    reversed_patch,
    touched_files,
    without_files,
)

NEW = """\
diff --git a/{0} b/{0}
new file mode {1}
--- /dev/null
+++ b/{0}
@@ -0,0 +1 @@
+{2}
\\ No newline at end of file
"""
HIDDEN = "diff --git a/link b/link\nnew file mode 120000\nGIT binary patch\nliteral 1\nIcmZP\n\n"
Tree = dict[str, bytes]


class Repository:
    """A real git repository that holds one tree after another."""

    def __init__(self, root: Path):
        self.root = root
        self.ids: dict[tuple[tuple[str, bytes], ...], str] = {}
        self.git("init", "-q")

    def git(self, *words: str, stdin: bytes = b"") -> bytes:
        settings = (
            "-c",
            "user.name=t",
            "-c",
            "user.email=t@t",
            "-c",
            "core.autocrlf=false",
            "-c",
            "core.safecrlf=false",
        )
        env = {**os.environ, "GIT_CONFIG_GLOBAL": "/dev/null", "GIT_CONFIG_SYSTEM": "/dev/null"}
        done = subprocess.run(
            ["git", *settings, *words],
            cwd=self.root,
            input=stdin,
            capture_output=True,
            env=env,
            timeout=30,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def id(self, tree: Tree) -> str:
        """The id of a tree in git."""
        key = tuple(sorted(tree.items()))
        if key not in self.ids:
            self.ids[key] = self.written(tree)
        return self.ids[key]

    def written(self, tree: Tree) -> str:
        """The same, in few processes: they are what these tests take their time for."""
        (self.root / ".git" / "index").unlink(missing_ok=True)
        places = [self.root / ".git" / f"content-{number}" for number in range(len(tree))]
        for place, content in zip(places, tree.values(), strict=True):
            place.write_bytes(content)
        paths = "".join(f"{place}\n" for place in places)
        blobs = self.git("hash-object", "-w", "--no-filters", "--stdin-paths", stdin=paths.encode()).decode().split()
        entries = "".join(f"100644 {blob}\t{name}\0" for blob, name in zip(blobs, tree, strict=True))
        self.git("update-index", "-z", "--index-info", stdin=entries.encode())
        return self.git("write-tree").decode().strip()

    def diff(self, old: Tree, new: Tree, *options: str) -> str:
        return self.git("diff", *options, self.id(old), self.id(new)).decode("utf-8", "surrogateescape")

    def apply(self, tree: Tree, patch: str, *options: str) -> str:
        """The id of the tree after a patch."""
        self.git("read-tree", self.id(tree))
        if patch:
            self.git("apply", "--cached", *options, "-", stdin=patch.encode("utf-8", "surrogateescape"))
        return self.git("write-tree").decode().strip()


@pytest.fixture(scope="module")
def repository(tmp_path_factory):
    return Repository(tmp_path_factory.mktemp("repository"))


NAMES = st.sampled_from(
    ["a.py", "b c.py", "x/y.py", "x/z b/w.py", "é/ü.txt", 'q"uote.py', "tab\t.py", "tests/test_a.py", " b"]
)
LINES = st.sampled_from(
    [
        "one",
        "",
        " ",
        "-- a/x",
        "++ b/x",
        "@@ -1 +1 @@",
        "diff --git a/x b/x",
        "\\ No newline at end of file",
        "é",
        "cr\r",
    ]
)
TEXTS = st.builds(
    lambda lines, end: ("\n".join(lines) + end).encode(), st.lists(LINES, max_size=12), st.sampled_from(["", "\n"])
)
TREES = st.dictionaries(NAMES, TEXTS, max_size=5)
BINARY = st.dictionaries(NAMES, TEXTS | st.binary(min_size=1, max_size=200).map(lambda data: b"\0" + data), max_size=5)
REAL_GIT = settings(
    max_examples=60, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@REAL_GIT
@given(
    old=BINARY,
    new=BINARY,
    options=st.sampled_from([(), ("--binary",), ("-M",), ("-C", "--find-copies-harder"), ("-U0",)]),
)
def test_files_and_kinds_are_those_that_git_names(repository, old, new, options):
    patch = repository.diff(old, new, *options)
    changes = parse_patch(patch)
    assert "".join(change.text for change in changes) == patch
    status = repository.git("diff", "--name-status", "-z", *options, repository.id(old), repository.id(new)).decode()
    words = iter(status.split("\0")[:-1])
    kinds = {"M": "modified", "A": "new", "D": "deleted", "R": "renamed", "C": "copied"}
    wanted = []
    for word in words:
        first = next(words)
        second = next(words) if word[0] in "RC" else first
        wanted.append((kinds[word[0]], None if word == "A" else first, None if word == "D" else second))
    assert [(change.kind, change.old, change.new) for change in changes] == wanted
    for change in changes:
        if change.kind == "modified":
            assert change.binary == (b"\0" in old[change.path] + new[change.path])


@REAL_GIT
@given(old=TREES, new=TREES)
def test_a_reversed_patch_undoes_the_patch(repository, old, new):
    back = reversed_patch(repository.diff(old, new, "--no-renames"))
    assert repository.apply(new, back) == repository.id(old)


@REAL_GIT
@given(old=BINARY, new=BINARY, tests=st.sets(NAMES, max_size=3))
def test_without_test_files_git_changes_all_other_files_only(repository, old, new, tests):
    patch = without_files(parse_patch(repository.diff(old, new, "--binary", "--no-renames")), tests)
    kept = {name: data for name, data in new.items() if name not in tests}
    wanted = kept | {name: data for name, data in old.items() if name in tests}
    assert repository.apply(old, patch) == repository.id(wanted)
    assert not set(touched_files(patch)) & tests


PARTS = MODIFIED.split("\n")[:-1]
STRAYS = st.sampled_from(
    [
        *(
            *PARTS,
            "--- /dev/null",
            "+++ /dev/null",
            "--- a/x",
            "+++ b/x",
            "diff --git a/x b/x",
            "@@ -1 +1 @@",
            "",
            "-x",
            "+x",
        ),
        *(
            "rename from src/one.py",
            "rename to x",
            "new file mode 100644",
            "deleted file mode 100644",
            "old mode 100644",
        ),
        *("Index: x", "*** x", "GIT binary patch", "Binary files a/x and b/x differ", "\\ No newline at end of file"),
    ]
)


@settings(REAL_GIT, max_examples=1500)
@given(edits=st.lists(st.tuples(st.integers(0, 12), st.integers(0, 1), STRAYS), min_size=1, max_size=3))
def test_git_touches_no_file_of_an_edited_patch_that_is_not_read(repository, edits):
    lines = PARTS * 2
    for place, replaced, line in edits:
        lines[place : place + replaced] = [line]
    patch = "".join(f"{line}\n" for line in lines)
    try:
        known = touched_files(patch)
    except PatchError:
        return
    words = ["git", "apply", "--numstat", "-z", "-"]
    told = subprocess.run(
        words, cwd=repository.root, input=patch.encode(), capture_output=True, timeout=30, check=False
    )
    files = {record.split("\t")[-1] for record in told.stdout.decode().split("\0")[:-1]}
    assert files <= set(known)


def test_modes_and_links_are_read(tmp_path):
    repository = Repository(tmp_path)
    (tmp_path / "run.sh").write_text("echo\n")
    (tmp_path / "docs").mkdir()
    repository.git("add", "-A")
    repository.git("commit", "-qm", "start")
    (tmp_path / "run.sh").chmod(0o755)
    (tmp_path / "docs" / "link").symlink_to("../run.sh")
    (tmp_path / "empty").touch()
    repository.git("add", "-A")
    patch = repository.git("diff", "--cached").decode()
    link, empty, run = check_patch(patch)
    assert (link.path, link.kind, link.modes, link.link) == ("docs/link", "new", ("120000",), "../run.sh")
    assert (empty.path, empty.kind, empty.modes) == ("empty", "new", ("100644",))
    assert (run.path, run.kind, run.modes) == ("run.sh", "modified", ("100644", "100755"))
    assert "old mode 100755\n" in reversed_patch(run.text)


def test_a_rename_from_or_to_a_test_file_is_dropped():
    rename = "diff --git a/{0} b/{1}\nsimilarity index 100%\nrename from {0}\nrename to {1}\n"
    patch = rename.format("src/a.py", "tests/a.py") + rename.format("tests/b.py", "b.py") + MODIFIED
    assert without_files(parse_patch(patch), {"tests/a.py", "tests/b.py"}) == MODIFIED


def test_an_empty_patch_has_no_changes():
    assert parse_patch("") == parse_patch("\n") == ()
    assert without_files(parse_patch(MODIFIED + TESTS), touched_files(TESTS)) == MODIFIED


def with_name(name: str) -> str:
    return MODIFIED.replace("src/one.py", name)


@pytest.mark.parametrize(
    ("patch", "says"),
    [
        (with_name("../out.py"), "leaves the repository"),
        (with_name("x/../../out.py"), "leaves the repository"),
        (with_name("/etc/passwd"), "leaves the repository"),
        (with_name("x//y.py"), "leaves the repository"),
        (with_name("./x.py"), "leaves the repository"),
        (with_name(".git/config"), "belongs to git"),
        (with_name("x/.GIT/hooks/post-checkout"), "belongs to git"),
        (with_name("GIT~1/config"), "belongs to git"),
        (with_name(".git./config"), "belongs to git"),
        (with_name(".gitmodules"), "belongs to git"),
        (NEW.format("sub", "160000", "Subproject commit " + "0" * 40), "is a submodule"),
        ("diff --git a/sub b/sub\nindex 1111111..2222222 160000\n", "is a submodule"),
        (NEW.format("link", "120000", "/etc/passwd"), "outside of the repository"),
        (NEW.format("link", "120000", "../out"), "outside of the repository"),
        (NEW.format("a/b/link", "120000", "../../../out"), "outside of the repository"),
        (NEW.format("link", "120000", "other/../../out"), "outside of the repository"),
        (NEW.format("link", "120000", "other/../in"), "outside of the repository"),
        (NEW.format("a/link", "120000", "../.git/hooks"), "in .git"),
        (HIDDEN, "target the patch does not show"),
    ],
)  # fmt: skip
def test_what_leaves_the_repository_is_refused(patch, says):
    with pytest.raises(PatchError, match=says):
        check_patch(patch)


def test_a_link_that_leaves_the_repository_can_be_left_out():
    kept, links = check_files(MODIFIED + NEW.format("venv/bin/python", "120000", "/usr/bin/python"))
    assert [change.path for change in kept] == ["src/one.py"]
    assert [change.path for change in links] == ["venv/bin/python"]


@pytest.mark.parametrize("name", ["git/x.py", ".github/x.yml", ".gitignore", "a..b/c.py", "x/git.py"])
def test_names_that_only_look_like_it_are_allowed(name):
    assert check_patch(with_name(name))[0].path == name


@pytest.mark.parametrize("target", ["a", "x/y", "../src/one.py", "..foo"])
def test_links_inside_the_repository_are_allowed(target):
    assert check_patch(NEW.format("docs/link", "120000", target))[0].link == target


@pytest.mark.parametrize(
    ("patch", "says"),
    [
        ("some words\n" + MODIFIED, "line 1: some words is outside of a file"),
        ("--- a/x\n+++ b/x\n@@ -1 +1 @@\n-a\n+b\n", "line 1: .* outside of a file"),
        (MODIFIED + "--- a/.git/config\n+++ b/.git/config\n@@ -1 +1 @@\n-a\n+b\n", "line 8: .* outside of a file"),
        (MODIFIED.replace("+++ b/src/one.py", "+++ b/src/two.py"), "does not fit"),
        (MODIFIED.replace("--- a/src/one.py", "--- a/src/two.py"), "does not fit"),
        (MODIFIED.replace(" b/src/one.py", " b/src/two.py", 1), "two names"),
        (MODIFIED.replace("--- a/src/one.py", "--- /dev/null"), "does not fit"),  # git would write dev/null
        (MODIFIED.replace("+++ b/src/one.py", "+++ /dev/null"), "does not fit"),
        (MODIFIED.replace("a/src", "src").replace("b/src", "src"), "must begin with a/ and b/"),
        (MODIFIED.replace("--- a/src/one.py\n", ""), "hunk without"),
        (MODIFIED.replace("+2nd\n", ""), "ends too early"),
        (MODIFIED.replace("@@ -1,2 +1,2 @@", "@@ -1,2 +1,x @@"), "no heading of a hunk"),
        (MODIFIED.replace("@@ -1,2 +1,2 @@", "@@ -1,1 +1,2 @@"), "other lines|outside of a file|too early"),
        (MODIFIED.replace("--- a", "Index: x\n--- a"), "no header of a file"),
        (MODIFIED.replace("--- a/src/one.py", "--- a/src/one.py\n--- a/src/one.py"), 'a second "---"'),
        ("diff --git a/x b/y\nrename from z\nrename to y\n", "cannot read names"),
    ],
)
def test_what_git_diff_does_not_write_is_refused_with_its_line(patch, says):
    with pytest.raises(PatchError, match=says):
        parse_patch(patch)


@pytest.mark.parametrize("patch", ["diff --git a/x b/x\nindex 1..2\nBinary files a/x and b/x differ\n"])
def test_binary_files_have_no_inverse(patch):
    with pytest.raises(PatchError, match="'x' is binary"):
        reversed_patch(patch)


@pytest.mark.skipif(not LITE.is_file(), reason="needs AGENTGYM_DATA with swe_bench/lite_from_sdist.jsonl")
@pytest.mark.data
def test_patches_of_real_instances_are_accepted():
    for case in read_instances(LITE):
        for patch in (case.patch, case.test_patch):
            assert "".join(change.text for change in check_patch(patch)) == patch
            assert touched_files(reversed_patch(patch)) == touched_files(patch)
        assert without_files(parse_patch(case.patch + case.test_patch), touched_files(case.test_patch)) == case.patch


def test_files_so_deep_that_a_list_of_them_would_be_cut_off_are_refused():
    deep = "/".join(["d"] * 1500)
    assert [change.path for change in check_patch(NEW.format(f"{deep[:199]}/x.py", "100644", "x"))]
    with pytest.raises(PatchError, match="they lie too deep"):
        check_patch(NEW.format(f"{deep}/x.py", "100644", "x"))
    with pytest.raises(PatchError, match="too many files"):
        check_patch("".join(NEW.format(f"src/module/part/file_{n}.py", "100644", "x") for n in range(20_000)))
