"""`agentgym data`: what is listed, what is fetched, what is said when it cannot be."""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import http.server
import io
import json
import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from agentgym import cli, datasets
from agentgym.core.registration import registry
from agentgym.datasets import DataSet, DownloadError, HubData, data_sets, fetch

REAL = pytest.mark.data
HUB = HubData("me/lamps")


@pytest.fixture
def folder(monkeypatch, tmp_path):
    """A data folder that does not exist yet, and no hub."""
    monkeypatch.setenv("AGENTGYM_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return tmp_path / "data"


@pytest.fixture
def hub(monkeypatch):
    """Rows by repository and split, in place of the hub's client."""
    rows = {("me/lamps", "train"): [{"word": "lamp"}], ("me/lamps", "test"): [{"word": "é"}]}
    monkeypatch.setattr(datasets, "no_hub", lambda: None)
    monkeypatch.setattr(datasets, "download", lambda hub, split, seconds: rows[hub.repo, split])
    return rows


def lamps(**changes):
    settings = {
        "name": "lamps",
        "items": "2",
        "licence": "MIT",
        "source": "https://example.org",
        "files": ("lamps/train.txt", "lamps/test.txt"),
        "parts": ((HUB, "train"), (HUB, "test")),
        "write": lambda parts: {
            f"lamps/{split}.txt": rows[0]["word"].encode() for split, rows in zip(("train", "test"), parts, strict=True)
        },
    }
    return DataSet(**settings | changes)


class TestFetch:
    def test_missing_files_are_written_and_those_there_are_left(self, folder, hub):
        (folder / "lamps").mkdir(parents=True)
        (folder / "lamps" / "train.txt").write_text("mine")
        assert fetch(lamps()) == [folder / "lamps" / "test.txt"]
        assert (folder / "lamps" / "train.txt").read_text() == "mine"
        assert (folder / "lamps" / "test.txt").read_text() == "é"
        assert fetch(lamps()) == []

    def test_force_writes_all_of_them(self, folder, hub):
        fetch(lamps())
        hub["me/lamps", "train"] = [{"word": "otter"}]
        assert len(fetch(lamps(), force=True)) == 2
        assert (folder / "lamps" / "train.txt").read_text() == "otter"

    def test_nothing_but_whole_files_is_left(self, folder, hub, monkeypatch):
        monkeypatch.setattr("pathlib.Path.replace", lambda *args: (_ for _ in ()).throw(OSError(28, "disk full")))
        with pytest.raises(DownloadError, match=r"cannot write .*train\.txt: .*disk full"):
            fetch(lamps())
        assert list((folder / "lamps").iterdir()) == []

    def test_rows_of_another_form_are_an_error_that_names_the_repository(self, folder, hub):
        hub["me/lamps", "test"] = [{"text": "x"}]
        with pytest.raises(DownloadError, match=r"me/lamps has an unexpected format.*'word'"):
            fetch(lamps())
        assert not folder.exists()

    def test_a_client_that_fails_is_an_error_that_names_repository_and_split(self, folder, hub):
        del hub["me/lamps", "test"]
        with pytest.raises(DownloadError, match=r"cannot fetch me/lamps \(default, test\)"):
            fetch(lamps())

    def test_what_the_hub_does_not_have_says_where_it_comes_from(self, folder):
        with pytest.raises(DownloadError, match=r"not on the Hugging Face hub: put lamps/train.txt.*example\.org"):
            fetch(lamps(parts=(), write=None))

    def test_without_a_folder_it_says_so(self, monkeypatch):
        monkeypatch.setenv("AGENTGYM_DATA", "")
        with pytest.raises(DownloadError, match="AGENTGYM_DATA is empty"):
            fetch(lamps())

    @pytest.mark.parametrize(
        ("change", "says"),
        [
            (lambda m: m.setattr(datasets, "is_installed", lambda: False), r"pip install .*\[data\]'"),
            (lambda m: None, "HF_HUB_OFFLINE"),
        ],
    )
    def test_why_the_hub_cannot_be_asked_is_said_with_the_way_around(self, folder, monkeypatch, change, says):
        change(monkeypatch)
        with pytest.raises(DownloadError, match=rf"cannot fetch lamps: .*{says}.*by hand"):
            fetch(lamps())

    def test_a_hub_out_of_reach_costs_seconds_and_is_named(self, folder, monkeypatch):
        # A double for a fault: a server that accepts the connection and says nothing.
        with socket.create_server(("127.0.0.1", 0)) as silent:
            monkeypatch.delenv("HF_HUB_OFFLINE")
            monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{silent.getsockname()[1]}")
            start = time.monotonic()
            with pytest.raises(DownloadError, match=r"http://127\.0\.0\.1:\d+ does not answer.*HF_ENDPOINT"):
                fetch(lamps())
            assert time.monotonic() - start < datasets.PROBE_SECONDS + 3


class TestFolder:
    def test_without_the_variable_it_is_in_the_cache_and_found_there(self, monkeypatch, tmp_path, hub):
        monkeypatch.delenv("AGENTGYM_DATA", raising=False)
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        assert datasets.locate("lamps/test.txt") is None
        fetch(lamps())
        assert datasets.locate("lamps/test.txt") == tmp_path / "agentgym" / "data" / "lamps" / "test.txt"

    def test_an_empty_variable_means_none(self, monkeypatch):
        monkeypatch.setenv("AGENTGYM_DATA", "")
        assert (datasets.folder(), datasets.locate("lamps/test.txt")) == (None, None)


class TestCatalogue:
    def test_every_environment_that_is_named_is_registered(self):
        assert {env for data in data_sets().values() for env in data.envs} <= set(registry)

    def test_two_of_one_name_and_half_a_recipe_are_refused(self, monkeypatch):
        monkeypatch.setattr(datasets, "_sources", {f"{__name__}:twice": None})
        with pytest.raises(ValueError, match="two data sets 'lamps'"):
            data_sets()
        monkeypatch.setattr(datasets, "_sources", {f"{__name__}:half": None})
        with pytest.raises(ValueError, match=r"'lamps'.*belong together"):
            data_sets()

    @REAL
    @pytest.mark.parametrize("name", ["gsm8k", "mbpp", "humaneval", "svamp", "xquad"])
    def test_rows_of_the_hub_become_the_official_files(self, name, tmp_path):
        """The official files, taken apart into rows as the hub has them, and put together again."""
        data, root = data_sets()[name], Path(os.environ["AGENTGYM_DATA"])
        rows = ROWS[name](root)
        made = data.write(rows)
        assert set(made) == set(data.files)
        for path, content in made.items():
            written = tmp_path / Path(path).name
            written.write_bytes(content)
            if path.endswith(".json"):
                assert json.loads(content)["data"] == json.loads((root / path).read_bytes())["data"]
            else:
                # SVAMP's file has one key more, a row's number.
                official = [{k: v for k, v in row.items() if k != "idx"} for row in read_lines(root / path)]
                assert read_lines(written) == official

    @REAL
    def test_what_is_listed_as_here_is_what_the_folder_has(self):
        here = {name for name, data in data_sets().items() if not datasets.missing_files(data)}
        assert here >= {"gsm8k", "mbpp", "humaneval", "svamp", "xquad", "defog", "chinook", "wordle"}


def twice():
    return [lamps(), lamps()]


def half():
    return [lamps(write=None)]


def read_lines(file):
    text = gzip.decompress(file.read_bytes()) if file.suffix == ".gz" else file.read_bytes()
    return [json.loads(line) for line in text.splitlines()]


def xquad_rows(root):
    questions, titles = [], []
    for article in json.loads((root / "xquad" / "xquad.en.json").read_text(encoding="utf-8"))["data"]:
        for paragraph in article["paragraphs"]:
            for asked in paragraph["qas"]:
                answers = {key: [answer[key] for answer in asked["answers"]] for key in ("text", "answer_start")}
                row = {"id": asked["id"], "question": asked["question"], "answers": answers}
                questions.append(row | {"context": paragraph["context"]})
                titles.append({"id": asked["id"], "title": article["title"]})
    return [questions, titles[::-1]]


def mbpp_rows(root):
    rows = read_lines(root / "mbpp" / "mbpp.jsonl")
    return [rows[:10], rows[10:510], rows[510:600], rows[600:]]


ROWS = {
    "gsm8k": lambda root: [read_lines(root / "gsm8k" / f"{split}.jsonl") for split in ("train", "test")],
    "svamp": lambda root: [
        read_lines(root / "svamp" / "svamp.jsonl")[:700],
        read_lines(root / "svamp" / "svamp.jsonl")[700:],
    ],
    "humaneval": lambda root: [read_lines(root / "humaneval" / "HumanEval.jsonl.gz")],
    "mbpp": mbpp_rows,
    "xquad": xquad_rows,
}


class TestCommand:
    def test_list_says_what_is_here_and_how_to_get_the_rest(self, folder, capsys):
        (folder / "wordle").mkdir(parents=True)
        (folder / "wordle" / "words").write_text("otter\n")
        (folder / "gsm8k").mkdir()
        (folder / "gsm8k" / "test.jsonl").write_text("")
        assert cli.main(["data", "list", "--json"]) == 0
        rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
        assert rows["wordle"]["where"] == str(folder / "wordle" / "words")
        assert rows["gsm8k"]["where"] == "1 of 2 files missing: agentgym data get gsm8k"
        assert rows["xquad"]["where"] == "missing: agentgym data get xquad"
        assert rows["chinook"]["where"].startswith("missing: see https://github.com/")
        assert rows["xquad"] == rows["xquad"] | {"licence": "CC BY-SA 4.0", "envs": "search"}
        assert cli.main(["data", "list"]) == 0
        table = capsys.readouterr().out
        assert str(folder) in table.replace("\n", "")
        assert all(name in table for name in rows)

    def test_an_unknown_name_is_the_users_mistake_and_nothing_is_fetched(self, folder, capsys, hub):
        assert cli.main(["data", "get", "gsm8k", "xqaud"]) == 2
        assert "no data set 'xqaud': did you mean xquad?" in capsys.readouterr().err
        assert not folder.exists()

    def test_what_cannot_be_fetched_leaves_the_others(self, folder, capsys, hub):
        hub["openai/gsm8k", "train"] = hub["openai/gsm8k", "test"] = [{"question": "q", "answer": "#### 1"}]
        assert cli.main(["data", "get", "chinook", "gsm8k"]) == 1
        told = capsys.readouterr()
        assert "chinook is not on the Hugging Face hub" in told.err
        assert told.out.splitlines() == [
            f"gsm8k: {folder}/gsm8k/{split}.jsonl, 38 bytes" for split in ("train", "test")
        ]
        assert cli.main(["data", "get", "gsm8k"]) == 0
        assert capsys.readouterr().out == "gsm8k: already there; --force writes it again\n"

    def test_an_impossible_timeout_is_refused(self, folder, capsys):
        assert cli.main(["data", "get", "gsm8k", "--timeout", "0"]) == 2
        assert "--timeout must be positive" in capsys.readouterr().err


class Hub(http.server.BaseHTTPRequestHandler):
    """As much of the hub as its own client asks for, with one data set; a double, since the hub is not always in reach."""

    commit = "1" * 40

    def do_GET(self):
        path, files = urlsplit(self.path).path, self.server.files
        entries = [
            {"type": "file", "path": p, "size": len(c), "oid": hashlib.sha1(c).hexdigest()} for p, c in files.items()
        ]
        api, resolve = "/api/datasets/openai/gsm8k", "/datasets/openai/gsm8k/resolve/"
        if path.startswith(f"{api}/tree/"):
            folder = path.removeprefix(f"{api}/tree/").partition("/")[2]
            found = [e for e in entries if e["path"].rpartition("/")[0] == folder]
            if not folder:
                found += [{"type": "directory", "path": "main", "size": 0, "oid": "0" * 40}]
            self.reply(json.dumps(found).encode())
        elif path.startswith((f"{api}/revision/", api)):
            siblings = [{"rfilename": name} for name in files]
            self.reply(
                json.dumps({"id": "openai/gsm8k", "sha": self.commit, "siblings": siblings, "tags": []}).encode()
            )
        elif (
            path.startswith(resolve)
            and (content := files.get(path.removeprefix(resolve).partition("/")[2])) is not None
        ):
            self.reply(content, ETag=f'"{hashlib.sha1(content).hexdigest()}"')
        else:
            self.reply(b"", 200 if path == "/" else 404, **{"X-Error-Code": "EntryNotFound"})

    do_HEAD = do_GET

    def reply(self, body, code=200, **headers):
        self.send_response(code)
        for name, value in ({"Content-Length": str(len(body)), "X-Repo-Commit": self.commit} | headers).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *args):
        pass


@contextlib.contextmanager
def serving(files):
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        server.files = files
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def test_the_hubs_own_client_fetches_from_a_hub(tmp_path):
    pytest.importorskip("datasets")
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")

    def file_of(rows):
        out = io.BytesIO()
        parquet.write_table(arrow.Table.from_pylist(rows), out)
        return out.getvalue()

    rows = {"train": [{"question": f"{n}?", "answer": f"#### {n}"} for n in range(5)]}
    rows["test"] = [{"question": "é?", "answer": "#### 7"}]
    card = "---\nconfigs:\n- config_name: main\n  data_files:\n" + "".join(
        f"  - split: {split}\n    path: main/{split}-*\n" for split in rows
    )
    files = {f"main/{split}-00000-of-00001.parquet": file_of(found) for split, found in rows.items()}
    with serving({"README.md": f"{card}---\n".encode(), **files}) as endpoint:
        settings = {"HF_ENDPOINT": endpoint, "HF_HOME": str(tmp_path / "hf"), "AGENTGYM_DATA": str(tmp_path / "data")}
        kept = {k: v for k, v in os.environ.items() if k not in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE")}
        done = subprocess.run(
            [sys.executable, "-m", "agentgym.cli", "data", "get", "gsm8k"],
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
            env=kept | settings,
        )
    assert done.returncode == 0, done.stderr
    for split, expected in rows.items():
        assert read_lines(tmp_path / "data" / "gsm8k" / f"{split}.jsonl") == expected
