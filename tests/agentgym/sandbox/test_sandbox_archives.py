"""Whole folders go into a sandbox and come out of it as tar archives, and no path leaves the folder. On all back ends."""

import bz2
import gzip
import io
import lzma
import os
import tarfile
from contextlib import suppress

import pytest

from agentgym.sandbox import SandboxSpoiled
from agentgym.sandbox.archives import entries_of, tar_of

MEGABYTE = 1 << 20


def member(name, content=b"", kind=tarfile.REGTYPE, to="", mode=0o644, size=None, time=1_000_000_000):
    made = tarfile.TarInfo(name)
    made.type, made.linkname, made.mode, made.mtime = kind, to, mode, time
    made.size = len(content) if size is None else size
    return made, content


def folder(name, mode=0o755):
    return member(name, kind=tarfile.DIRTYPE, mode=mode)


def link(name, to):
    return member(name, kind=tarfile.SYMTYPE, to=to)


def hard(name, to):
    return member(name, kind=tarfile.LNKTYPE, to=to)


def tar(*members, form=tarfile.PAX_FORMAT):
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w", format=form) as archive:
        for entry, content in members:
            archive.addfile(entry, io.BytesIO(content))
    return made.getvalue()


def listed(data):
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        return {entry.name: entry for entry in archive}


def content_of(data, name):
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        return archive.extractfile(name).read()


TREE = tar(
    folder("./"),
    folder("src"),
    member("src/run.sh", b"#!/bin/bash\necho ran\n", mode=0o755),
    member("src/data.bin", os.urandom(3 * MEGABYTE + 17)),
    member("no/parent/listed.txt", b"x"),
    folder("empty"),
    link("latest", "src/run.sh"),
    hard("again.sh", "src/run.sh"),
    member("snow \N{SNOWMAN}", b"cold"),
)


class TestPut:
    def test_a_tree(self, sandbox):
        sandbox.put_archive(TREE, "repo")
        shown = sandbox.exec("src/run.sh; cat latest again.sh | wc -l; cat snow*; find . | LC_ALL=C sort", cwd="repo")
        assert shown.stdout == (
            "ran\n4\ncold.\n./again.sh\n./empty\n./latest\n./no\n./no/parent\n./no/parent/listed.txt\n./snow \N{SNOWMAN}\n"
            "./src\n./src/data.bin\n./src/run.sh\n"
        )
        assert sandbox.read("repo/src/data.bin") == content_of(TREE, "src/data.bin")

    def test_all_of_it_is_the_programs_own(self, sandbox):
        sandbox.put_archive(TREE)
        assert sandbox.exec("find . -mindepth 1 ! -user $(id -u)").stdout == ""
        assert (
            sandbox.exec("echo more >> src/run.sh && rm -r empty && stat -c '%a %Y' again.sh").stdout
            == "755 1000000000\n"
        )

    @pytest.mark.parametrize("pack", [gzip.compress, bz2.compress, lzma.compress, bytes])
    def test_from_a_file_that_may_be_compressed(self, sandbox, tmp_path, pack):
        (tmp_path / "tree").write_bytes(pack(TREE))
        sandbox.put_archive(tmp_path / "tree", "/tmp/tree")
        assert sandbox.exec("/tmp/tree/src/run.sh").stdout == "ran\n"

    @pytest.mark.parametrize("form", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
    def test_every_form_of_tar(self, sandbox, form):
        name = "/".join(["a" * 60] * 3)
        sandbox.put_archive(tar(member(name, b"deep"), form=form))
        assert sandbox.read(name) == b"deep"

    def test_an_empty_one_makes_the_folder(self, sandbox):
        sandbox.put_archive(tar(), "a/b")
        assert sandbox.exec("ls -A a/b && test -O a/b").ok

    def test_under_private_programs_read_and_cannot_write(self, sandbox):
        sandbox.put_archive(tar(member("tests/hidden.py", b"secret", mode=0o777)), "/private")
        assert sandbox.exec("cat /private/tests/hidden.py; stat -c %a /private/tests/hidden.py").stdout == "secret755\n"
        for command in "echo x > /private/tests/hidden.py", "rm -r /private/tests", "touch /private/tests/new":
            assert not sandbox.exec(command).ok

    def test_files_are_replaced_and_others_stay(self, sandbox):
        sandbox.put_archive(tar(member("a", b"old"), member("b", b"kept")))
        sandbox.put_archive(tar(member("a", b"new")))
        assert sandbox.exec("cat a b").stdout == "newkept"

    def test_many_files(self, sandbox):
        sandbox.put_archive(tar(*(member(f"d{n % 7}/f{n}", b"%d" % n) for n in range(3000))))
        assert sandbox.exec("find . -type f | wc -l; cat d3/f2999 d3/f10").stdout == "3000\n299910"


@pytest.mark.parametrize("to", ["/etc", "/", "/private/../etc", "../x", "/proc/1", "/workspacex"])
def test_only_where_the_host_may_write(sandbox, to):
    with pytest.raises(ValueError, match="not under /workspace, /tmp, /private"):
        sandbox.put_archive(TREE, to)


# What an archive that a model wrote can hold to leave the folder or to bring what is no file.
ATTACKS = {
    "a path upwards": [member("../out", b"x")],
    "a path upwards in the middle": [member("a/../../out", b"x")],
    "an absolute path": [member("/tmp/out", b"x")],
    "an absolute link": [link("a", "/tmp")],
    "a link upwards": [link("a", "../x")],
    "a deep link upwards": [link("a/b", "../../x")],
    "a link, then a file below it": [link("a", "b"), member("a/out", b"x")],
    "a file below a link that comes later": [member("a/out", b"x"), link("a", "b")],
    "a file below a file": [member("a", b""), member("a/out", b"x")],
    "links that lead out one after the other": [
        folder("b"),
        link("a", "b"),
        link("c", "a/../.."),
        member("c/out", b"x"),
    ],
    "a hard link to a path outside": [hard("a", "/etc/passwd")],
    "a hard link upwards": [hard("a", "../../etc/passwd")],
    "a hard link to a link": [link("a", "b"), hard("c", "a")],
    "a hard link to itself": [hard("a", "a")],
    "a device": [member("a", kind=tarfile.CHRTYPE)],
    "a disk": [member("a", kind=tarfile.BLKTYPE)],
    "a pipe": [member("a", kind=tarfile.FIFOTYPE)],
    "a zero byte": [member("a\0\N{SNOWMAN}", b"x")],
    "the folder itself as a file": [member(".", b"x")],
}


@pytest.mark.parametrize("attack", ATTACKS.values(), ids=ATTACKS)
def test_an_archive_that_would_leave_the_folder_is_refused_as_a_whole(sandbox, attack):
    with pytest.raises(ValueError, match="the archive cannot be unpacked"):
        sandbox.put_archive(tar(member("first", b"x"), *attack), "inner")
    assert sandbox.exec("ls -A /workspace /tmp /private").stdout == "/private:\n\n/tmp:\n\n/workspace:\n"


def test_links_of_an_archive_are_never_followed_by_a_later_one(sandbox):
    """Each link alone stays inside; together they lead to the folder above."""
    sandbox.put_archive(tar(folder("deep/er"), link("deep/er/up", "../.."), link("out", "deep/er/up/..")), "inner")
    with pytest.raises(NotADirectoryError):
        sandbox.put_archive(tar(member("out/stolen", b"x")), "inner")
    assert sandbox.exec("ls /workspace; ls inner/out").stdout == "inner\ninner\n"
    sandbox.put_archive(tar(member("out/stolen", b"x")), "inner")  # programs have run: the link is replaced
    assert sandbox.exec("ls /workspace; ls inner/out").stdout == "inner\nstolen\n"


def test_private_takes_no_links(sandbox):
    with pytest.raises(ValueError, match="/private takes no links"):
        sandbox.put_archive(tar(folder("a"), link("b", "a")), "/private/tests")


def test_set_user_id_is_dropped(sandbox):
    sandbox.put_archive(tar(member("a", b"x", mode=0o6777), folder("d", mode=0o7777)))
    sandbox.put_archive(tar(member("a", b"x", mode=0o6777), folder("d", mode=0o7777)), "/private")
    shown = sandbox.exec("stat -c %a a d /private/a /private/d").stdout
    assert shown == "755\n755\n755\n755\n"


def test_a_folder_that_forbids_writing_can_be_filled_and_removed(sandbox):
    sandbox.put_archive(tar(folder("d", mode=0), member("d/a", b"x", mode=0)))
    assert sandbox.exec("cat d/a && rm -r d").ok


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "empty"),
        (b"no archive at all" * 100, "header"),
        (TREE[:MEGABYTE], "end of data"),
        (gzip.compress(TREE)[:1000], "end"),
        (b"\x1f\x8b" + os.urandom(600), ""),
        (b"BZh9" + bytes(600), "Invalid data stream"),
        (b"\xfd7zXZ" + bytes(600), ""),
        (gzip.compress(bytes(300 * MEGABYTE)), "over the limit of 268435456 bytes without compression"),
        (tar(member("a")).replace(b"00000000000\0", b"77777777777\0", 1), ""),
    ],
    ids=[
        "nothing",
        "text",
        "cut off",
        "cut off gzip",
        "broken gzip",
        "broken bzip2",
        "broken xz",
        "bomb",
        "a size that is not there",
    ],
)
def test_what_is_no_archive(sandbox, data, why):
    with pytest.raises(ValueError, match=f"the archive cannot be unpacked.*{why}"):
        sandbox.put_archive(data)
    assert sandbox.exec("ls -A").stdout == ""


def test_the_limit_counts_copies_of_hard_links_too(sandbox):
    data = tar(member("a", bytes(100_000)), *(hard(f"b{n}", "a") for n in range(20)))
    with pytest.raises(ValueError, match="over the limit of 1000000 bytes at 'b"):
        sandbox.put_archive(data, limit=1_000_000)
    sandbox.put_archive(data, limit=3_000_000)


def test_a_full_disk(open_sandbox):
    sandbox = open_sandbox(disk=MEGABYTE)
    with pytest.raises(OSError, match="No space left"):
        sandbox.put_archive(TREE)
    assert sandbox.exec("ls -A src").stdout == "run.sh\n"  # no half file stays
    sandbox.exec("true")
    with pytest.raises(SandboxSpoiled, match="No space left"):
        sandbox.put_archive(TREE)
    sandbox.reset()
    sandbox.put_archive(tar(member("a", b"fits")))


# What programs may have laid where the archive of TREE goes.
IN_THE_WAY = {
    "a link in place of a folder": "ln -s /tmp src",
    "a link to private": "ln -s /private src",
    "a link to the system": "ln -s /etc src",
    "a link in place of a file": "mkdir src; ln -s /tmp/caught src/run.sh",
    "a hard link": "mkdir src; echo kept > /workspace/../workspace/other; ln other src/run.sh",
    "a folder in place of a file": "mkdir -p src/run.sh/deep; touch src/run.sh/deep/x; chmod 0 src/run.sh",
    "a file in place of a folder": "echo x > src",
    "a pipe": "mkdir src; mkfifo src/run.sh",
    "a pipe in place of a folder": "mkfifo src",
    "closed folders": "mkdir -p src no; chmod 0 src no",
}


@pytest.mark.parametrize("trap", IN_THE_WAY.values(), ids=IN_THE_WAY)
def test_traps_of_programs_are_replaced_and_not_followed(sandbox, trap):
    sandbox.write("/private/tests.py", "secret")
    assert sandbox.exec(trap).ok
    sandbox.put_archive(TREE)
    assert sandbox.exec("src/run.sh; cat no/parent/listed.txt").stdout == "ran\nx"
    assert sandbox.exec("ls -A /tmp /private; test ! -e other || cat other").stdout in (
        "/private:\ntests.py\n\n/tmp:\n",
        "/private:\ntests.py\n\n/tmp:\nkept\n",
    )


class TestGet:
    def test_what_was_put_comes_back(self, sandbox):
        sandbox.put_archive(TREE, "repo")
        back = sandbox.get_archive("repo")
        found = listed(back)
        assert list(found) == sorted(found, key=lambda name: name.split("/"))
        assert set(found) == {*listed(TREE), "no", "no/parent"} - {"."}
        for name in "src/run.sh", "src/data.bin", "again.sh", "snow \N{SNOWMAN}":
            assert content_of(back, name) == content_of(TREE, name)
        assert (found["latest"].linkname, found["src/run.sh"].mode) == ("src/run.sh", 0o755)
        sandbox.put_archive(back, "other")
        assert sandbox.exec("diff -r repo other").ok
        assert list(listed(sandbox.get_archive("other"))) == list(found)

    def test_one_file(self, sandbox):
        sandbox.write("a/b.txt", "x")
        back = sandbox.get_archive("a/b.txt")
        assert (list(listed(back)), content_of(back, "b.txt")) == (["b.txt"], b"x")

    def test_names_that_are_no_text(self, sandbox):
        sandbox.exec(["python3", "-c", r"open(b'a\xff\n', 'w').write('odd')"])
        back = sandbox.get_archive()
        sandbox.reset()
        sandbox.put_archive(back)
        assert sandbox.exec("cat a*").stdout == "odd"

    def test_owners_and_set_user_id_stay_behind(self, sandbox):
        sandbox.exec("touch a; chmod 6755 a")
        entry = listed(sandbox.get_archive())["a"]
        assert (entry.uid, entry.gid, entry.uname, entry.mode) == (0, 0, "", 0o755)

    def test_what_is_no_file_is_left_out(self, sandbox):
        sandbox.exec("mkfifo pipe; touch a; python3 -c 'import socket; socket.socket(socket.AF_UNIX).bind(\"s\")'")
        assert list(listed(sandbox.get_archive())) == ["a"]

    def test_links_are_packed_and_not_followed(self, sandbox):
        sandbox.write("/private/secret", "x")
        sandbox.exec("ln -s /private/secret a; ln -s / b; ln -s b c; ln -s d d")
        found = listed(sandbox.get_archive())
        assert {name: (entry.type, entry.linkname) for name, entry in found.items()} == {
            "a": (tarfile.SYMTYPE, "/private/secret"),
            "b": (tarfile.SYMTYPE, "/"),
            "c": (tarfile.SYMTYPE, "b"),
            "d": (tarfile.SYMTYPE, "d"),
        }

    @pytest.mark.parametrize(
        ("trap", "error"),
        [
            ("touch a; chmod 0 a", PermissionError),
            ("mkdir a; chmod 0 a", PermissionError),
            ("python3 -c \"import os\nfor _ in range(3000): os.mkdir('d'); os.chdir('d')\"", ValueError),
            ("truncate -s 60M a; truncate -s 60M b", ValueError),
        ],
        ids=["closed file", "closed folder", "deep", "large"],
    )
    def test_what_cannot_be_packed_fails_and_harms_nothing(self, sandbox, trap, error):
        sandbox.exec(trap)
        with pytest.raises(error):
            sandbox.get_archive(limit=100 * MEGABYTE)
        assert sandbox.exec("echo well").stdout == "well\n"

    def test_a_folder_that_is_not_there(self, sandbox):
        with pytest.raises(FileNotFoundError, match="none"):
            sandbox.get_archive("none")

    def test_a_pipe(self, sandbox):
        sandbox.exec("mkfifo pipe")
        with pytest.raises(ValueError, match="pipe"):
            sandbox.get_archive("pipe")

    def test_more_files_than_the_guest_could_list(self, open_sandbox):
        sandbox = open_sandbox(disk=256 * MEGABYTE)
        code = "for n in range(60_000): open('x' * 200 + str(n), 'w').close()"
        assert sandbox.exec(["python3", "-c", code], timeout=60).ok
        assert len(listed(sandbox.get_archive())) == 60_000

    def test_a_file_that_a_program_keeps_changing(self, sandbox):
        session = sandbox.session("shell")
        session.run("while :; do head -c 900000 /dev/urandom > a; : > a; done &")
        for _ in range(10):
            with suppress(ValueError):  # it became shorter
                assert set(listed(sandbox.get_archive())) <= {"a"}
        assert sandbox.exec("true").ok


def test_a_stream_that_a_client_made_up_is_refused(sandbox):
    """The guest trusts no host with paths: a server's clients speak to it themselves."""
    good = b"".join(entries_of(tar(member("a", b"x")), MEGABYTE))
    for stream in (
        good.replace(b'"a"', b'".."'),
        good.replace(b'"a"', b'"/a"'),
        good.replace(b'"a"', b'"a/../../b"'),
        good.replace(b'"a"', b'"' + b"x" * 300 + b'"'),
        good.replace(b'"size": 1', b'"size":-1'),
        good.replace(b'"size": 1', b'"size":"1'),
        good.replace(b'"file"', b'"disk"'),
        good.replace(b'"time"', b'"tame"'),
        b"\xff\xff\xff\xff",
        b"\0\0\0\2[]",
        b"\0\0\0\2{}",
        good[:-1],
    ):
        with pytest.raises((ValueError, OSError)):
            sandbox.call({"do": "unpack", "path": "inner", "part": 0, "last": True}, stream, timeout=30, path="inner")
    with pytest.raises(ValueError, match="first part"):
        sandbox.call({"do": "unpack", "path": "inner", "part": 1, "last": True}, good, timeout=30)
    assert sandbox.exec("find . -type f; ls -A /tmp").stdout == ""


def test_a_stream_of_entries_that_is_cut_off_is_no_archive():
    stream = b"".join(entries_of(TREE, 16 * MEGABYTE))
    with pytest.raises(ValueError, match="cut off"):
        tar_of(stream[:MEGABYTE])
