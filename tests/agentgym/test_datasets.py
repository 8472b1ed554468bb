"""Finding real data: the user's folder, Hugging Face, what an environment ships."""

from __future__ import annotations

import logging
import socket
import time

import pytest

from agentgym import datasets
from agentgym.core.tasks import Task, TaskSet

HUB = datasets.HubData("openai/gsm8k", "main")


def parse(record, place):
    return Task(f"t{place}", answer=record["answer"])


def shipped():
    return TaskSet([Task("own")], name="gsm8k/test", source="the project's own problems")


def load(hub=HUB):
    return datasets.load("gsm8k/test.jsonl", "test", name="gsm8k/test", parse=parse, shipped=shipped, hub=hub)


@pytest.fixture(autouse=True)
def alone(monkeypatch, tmp_path):
    """No folder, an empty cache, no network."""
    for name in ("AGENTGYM_DATA", "HF_DATASETS_CACHE", "HF_ENDPOINT", "HF_DATASETS_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(datasets, "noticed", set())


@pytest.fixture
def data(monkeypatch, tmp_path):
    (tmp_path / "data" / "gsm8k").mkdir(parents=True)
    file = tmp_path / "data" / "gsm8k" / "test.jsonl"
    file.write_text('{"answer": "1"}\n{"answer": "é"}\n', encoding="utf-8")
    monkeypatch.setenv("AGENTGYM_DATA", str(tmp_path / "data"))
    return file


@pytest.fixture
def cache(tmp_path):
    """A cache written by the `datasets` package itself, in the layout that it gives a data set of the hub."""
    hf = pytest.importorskip("datasets")
    hf.disable_progress_bars()

    class Builder(hf.GeneratorBasedBuilder):
        BUILDER_CONFIGS = (hf.BuilderConfig(name="main"),)

        def _info(self):
            return hf.DatasetInfo(features=hf.Features({"answer": hf.Value("string")}))

        def _split_generators(self, dl_manager):
            return [hf.SplitGenerator(name="test", gen_kwargs={"count": 7})]

        def _generate_examples(self, count):
            yield from ((n, {"answer": str(n)}) for n in range(count))

    folder = tmp_path / "hf" / "datasets"
    for repo in ("openai/gsm8k", "HuggingFaceH4/MATH-500"):
        name = repo.partition("/")[2]
        Builder(cache_dir=str(folder), dataset_name=name, hash="0123abcd", repo_id=repo).download_and_prepare()
    return folder


class TestFolder:
    def test_a_file_in_the_folder_is_found(self, data):
        assert datasets.locate("gsm8k/test.jsonl") == data
        assert datasets.locate("gsm8k/other.jsonl") is None

    def test_no_folder_named_means_none(self):
        assert datasets.locate("gsm8k/test.jsonl") is None

    def test_a_folder_that_is_not_there_is_an_error_that_names_it(self, monkeypatch, tmp_path):
        monkeypatch.setenv("AGENTGYM_DATA", str(tmp_path / "nowhere"))
        with pytest.raises(FileNotFoundError, match=r"AGENTGYM_DATA is .*nowhere.*gsm8k/test\.jsonl"):
            load()

    def test_it_comes_first_and_the_source_says_so(self, data, cache):
        tasks = load()
        assert [task.answer for task in tasks] == ["1", "é"]
        assert tasks.source == str(data)

    def test_a_broken_line_is_named(self, data):
        data.write_text('{"answer": "1"}\n{"question": "1"}\n')
        with pytest.raises(ValueError, match=r"test\.jsonl:2"):
            load()


class TestHuggingFace:
    def test_a_prepared_cache_is_read_without_the_network(self, cache):
        assert list(cache.glob("openai___gsm8k/main/0.0.0/0123abcd/gsm8k-test.arrow"))
        tasks = load()
        assert [task.answer for task in tasks] == [str(n) for n in range(7)]
        assert tasks.source == "Hugging Face cache: openai/gsm8k (main, test)"

    def test_a_name_with_capitals_is_found(self, cache):
        rows, source = datasets.from_cache(datasets.HubData("HuggingFaceH4/MATH-500", "main"), "test")
        assert len(rows) == 7
        assert source == "Hugging Face cache: HuggingFaceH4/MATH-500 (main, test)"

    def test_another_split_is_not_taken_for_it(self, cache):
        assert datasets.from_cache(HUB, "te") is None
        assert datasets.from_cache(HUB, "train") is None

    def test_a_broken_cache_is_passed_over(self, cache):
        for file in cache.glob("**/*.arrow"):
            file.write_bytes(b"not arrow")
        assert load().source == "the project's own problems"

    def test_offline_the_hub_is_not_asked(self, monkeypatch):
        monkeypatch.setattr(datasets, "_hub_answers", lambda endpoint: pytest.fail("asked"))
        assert load().source == "the project's own problems"

    def test_without_the_package_nothing_is_asked(self, monkeypatch):
        monkeypatch.delenv("HF_HUB_OFFLINE")
        monkeypatch.setattr(datasets, "is_installed", lambda: False)
        monkeypatch.setattr(datasets, "_hub_answers", lambda endpoint: pytest.fail("asked"))
        assert load().source == "the project's own problems"

    def test_a_hub_that_refuses_costs_no_time(self, monkeypatch):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        monkeypatch.delenv("HF_HUB_OFFLINE")
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{port}")
        monkeypatch.setattr(datasets, "PROBE_SECONDS", 60.0)
        start = time.monotonic()
        assert load().source == "the project's own problems"
        assert time.monotonic() - start < 30

    def test_a_hub_that_never_answers_costs_a_few_seconds_once(self, monkeypatch):
        # A double for a fault: a server that accepts the connection and says nothing.
        with socket.create_server(("127.0.0.1", 0)) as silent:
            monkeypatch.delenv("HF_HUB_OFFLINE")
            monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{silent.getsockname()[1]}")
            monkeypatch.setattr(datasets, "PROBE_SECONDS", 0.5)
            start = time.monotonic()
            assert load().source == "the project's own problems"
            assert time.monotonic() - start < 30
            monkeypatch.setattr(datasets, "PROBE_SECONDS", 60.0)
            start = time.monotonic()
            load()
            assert time.monotonic() - start < 30

    def test_a_download_that_fails_is_passed_over(self, monkeypatch, caplog):
        monkeypatch.delenv("HF_HUB_OFFLINE")
        monkeypatch.setattr(datasets, "_hub_answers", lambda endpoint: True)

        def fail(seconds, work, name):
            raise TimeoutError(f"{name}: no answer")

        monkeypatch.setattr(datasets, "call_within", fail)
        with caplog.at_level(logging.INFO):
            assert load().source == "the project's own problems"
        assert "download of openai/gsm8k: no answer" in caplog.text


class TestShipped:
    def test_a_notice_says_so_once(self, caplog):
        for _ in range(3):
            assert load().source == "the project's own problems"
        notices = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
        assert len(notices) == 1
        assert "\n" not in notices[0]
        for part in ("gsm8k/test", "the project's own problems (1 tasks)", "AGENTGYM_DATA", "openai/gsm8k"):
            assert part in notices[0]

    def test_real_data_needs_no_notice(self, data, caplog):
        load()
        assert not caplog.records

    def test_a_set_without_a_hub_asks_none(self, monkeypatch):
        monkeypatch.delenv("HF_HUB_OFFLINE")
        monkeypatch.setattr(datasets, "_hub_answers", lambda endpoint: pytest.fail("asked"))
        assert load(hub=None).source == "the project's own problems"


def test_work_that_takes_too_long_is_left_behind_by_name():
    with pytest.raises(TimeoutError, match=r"nap: no answer within 0\.05 s"):
        datasets.call_within(0.05, lambda: time.sleep(0.5), "nap")
