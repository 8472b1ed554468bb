"""search: corpora, the BM25 index, and the retrievers over HTTP."""

from __future__ import annotations

import collections
import http.server
import io
import itertools
import json
import math
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentgym_envs.search import bm25, corpora
from agentgym_envs.search.corpora import index_of, load_questions, own_questions, passages_of
from agentgym_envs.search.retrievers import HttpRetriever, LocalRetriever, RetrieverError, open_retriever

REAL = pytest.mark.data
WORDS = ["salt", "ledger", "otter", "lamp", "sea", "the"]


def passage(id, text, title=""):
    return {"id": id, "title": title, "text": text}


def reference_scores(passages, query, k1=1.5, b=0.75):
    """Lucene's BM25, written out from its formula, in double precision."""
    texts = [bm25.words_of(f"{p['title']} {p['text']}") for p in passages]
    mean = sum(map(len, texts)) / len(texts)
    scores = {}
    for p, words in zip(passages, texts, strict=True):
        counts, score = collections.Counter(words), 0.0
        for word in bm25.words_of(query):
            holding = sum(word in text for text in texts)
            idf = math.log(1 + (len(texts) - holding + 0.5) / (holding + 0.5))
            f = counts[word]
            score += idf * f / (f + k1 * (1 - b + b * len(words) / mean)) if f else 0.0
        scores[p["id"]] = score
    return scores


def check_against_reference(passages, query, topk):
    found = bm25.Index(passages).search(query, topk)
    expected = reference_scores(passages, query)
    matching = [score for score in expected.values() if score > 0]
    assert len(found) == min(topk, len(matching))
    for hit, score in found:
        assert score == pytest.approx(expected[hit["id"]], rel=1e-5)
    # Nothing that was left out is better, and what comes first is not worse.
    assert [score for _, score in found] == pytest.approx(sorted(matching, reverse=True)[:topk], rel=1e-5)


class TestIndex:
    @pytest.mark.parametrize(
        "query", ["who led the Copper Strike", "otter lighthouse glass", "Quillmark Quillmark", "of"]
    )
    def test_scores_are_those_of_the_formula_over_our_own_corpus(self, query):
        check_against_reference(passages_of("own"), query, 10)

    @settings(deadline=None, max_examples=60)
    @given(
        texts=st.lists(st.lists(st.sampled_from(WORDS), max_size=6).map(" ".join), min_size=1, max_size=8),
        query=st.lists(st.sampled_from([*WORDS, "unknown"]), max_size=5).map(" ".join),
        topk=st.integers(1, 9),
    )
    def test_scores_are_those_of_the_formula_over_any(self, texts, query, topk):
        passages = [passage(f"p{n}", text) for n, text in enumerate(["salt", *texts])]
        check_against_reference(passages, query, topk)

    def test_passages_of_equal_score_come_in_the_order_of_their_ids_whatever_the_order_of_the_corpus(self):
        passages = [passage(id, "salt and sea") for id in "hbgadcfe"] + [passage("z", "salt salt salt")]
        for order in (passages, passages[::-1], sorted(passages, key=lambda p: p["id"])):
            for topk in range(1, 9):
                assert [p["id"] for p, _ in bm25.Index(order).search("salt", topk)] == list("zabcdefgh")[:topk]

    @pytest.mark.parametrize("query", ["", "the of and", "?!", "\x00", "zyxwv", "\ud800"])
    def test_a_query_without_a_known_word_finds_nothing(self, query):
        assert index_of("own").search(query, 3) == []

    def test_the_corpus_may_be_in_any_script(self):
        index = bm25.Index([passage("a", "Straße und Öl"), passage("b", "漢字 テスト"), passage("c", "")])
        assert [p["id"] for p, _ in index.search("STRASSE", 3)] == ["a"]
        assert [p["id"] for p, _ in index.search("漢字", 3)] == ["b"]

    @pytest.mark.parametrize("passages", [[], [passage("a", "the"), passage("b", "")]])
    def test_a_corpus_without_a_word_is_refused(self, passages):
        with pytest.raises(ValueError, match="no word"):
            bm25.Index(passages)

    def test_it_is_built_once_for_all_threads(self, monkeypatch):
        built = []

        class Slow(bm25.Index):
            def __init__(self, passages):
                built.append(len(passages))
                time.sleep(0.05)
                super().__init__(passages)

        monkeypatch.setattr(corpora, "Index", Slow)
        monkeypatch.setattr(corpora, "_indexes", {})
        found = []
        threads = [threading.Thread(target=lambda: found.append(LocalRetriever("own").index)) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert built == [81]
        assert len(found) == 8
        assert len(set(map(id, found))) == 1

    def test_no_optional_accelerator_is_used(self):
        assert index_of("own").bm25.backend == "numpy"

    def test_another_process_with_another_hash_seed_finds_the_same(self):
        code = (
            "import json\nfrom agentgym_envs.search.corpora import index_of\n"
            "from agentgym_envs.search.corpora import own_questions\n"
            "seen = [[[p['id'], s] for p, s in index_of('own').search(t.messages[0]['content'], 20)]"
            " for t in own_questions('train')]\nprint(json.dumps(seen))"
        )
        runs = [
            subprocess.run(
                [sys.executable, "-c", code],
                capture_output=True,
                text=True,
                timeout=60,
                check=True,
                env={"PYTHONHASHSEED": seed},
            ).stdout
            for seed in ("1", "2")
        ]
        assert runs[0] == runs[1]
        assert len(json.loads(runs[0])) == 38


class TestProgram:
    """bm25.py as the program that it is inside a sandbox."""

    def test_it_answers_frames_as_the_index_does(self):
        requests = [{"queries": ["copper strike", "the"], "topk": 2}, {"queries": [], "topk": 1}]
        framed = b"".join(len(r).to_bytes(4, "big") + r for r in (json.dumps(r).encode() for r in requests))
        out = io.BytesIO()
        bm25.serve(index_of("own"), io.BytesIO(framed), out)
        data, replies = out.getvalue(), []
        while data:
            size = int.from_bytes(data[:4], "big")
            replies.append(json.loads(data[4 : 4 + size]))
            data = data[4 + size :]
        hits = index_of("own").search("copper strike", 2)
        assert [h["document"]["id"] for h in replies[0]["result"][0]] == [p["id"] for p, _ in hits]
        assert [h["score"] for h in replies[0]["result"][0]] == [score for _, score in hits]
        assert (replies[0]["result"][1], replies[1]) == ([], {"result": []})

    def test_it_knows_nothing_of_agentgym(self):
        lines = Path(bm25.__file__).read_text(encoding="utf-8").splitlines()
        imported = {
            line.split()[1].partition(".")[0] for line in lines if line.strip().startswith(("import ", "from "))
        }
        assert imported - sys.stdlib_module_names == {"numpy", "bm25s"}


class TestCorpora:
    def test_our_own_has_81_short_passages(self):
        passages = passages_of("own")
        assert len(passages) == 81
        assert max(len(p["text"]) for p in passages) < 250

    @REAL
    def test_xquad_has_240_paragraphs_of_48_articles(self):
        passages = passages_of("xquad")
        assert (len(passages), len({p["title"] for p in passages})) == (240, 48)

    @REAL
    def test_a_search_for_the_question_finds_the_paragraph_of_most_xquad_questions(self):
        tasks = [task for split in ("train", "test") for task in load_questions(split, "xquad")]
        found = [
            task.metadata["hops"][0]["passage"]
            in [p["id"] for p, _ in index_of("xquad").search(task.messages[0]["content"], 3)]
            for task in tasks
        ]
        assert sum(found) / len(found) > 0.97

    def test_a_file_may_have_titles_and_texts_or_contents(self, tmp_path):
        file = tmp_path / "corpus.jsonl"
        lines = [
            {"id": 1, "title": "Otter", "text": "An otter swims."},
            {"id": "2", "contents": '"Lamp"\nA lamp shines.\nBrightly.'},
            {"id": "3", "contents": "One line."},
        ]
        file.write_text("\n".join(map(json.dumps, lines)))
        assert passages_of(str(file)) == (
            passage("1", "An otter swims.", "Otter"),
            passage("2", "A lamp shines.\nBrightly.", "Lamp"),
            passage("3", "One line."),
        )

    @pytest.mark.parametrize(
        ("text", "says"),
        [
            ("", "no passages"),
            ('{"id": "1", "text": "x"}\nnonsense', ":2: not a passage"),
            ('{"id": "1"}', ":1: not a passage"),
            ('{"text": "x"}', ":1: not a passage"),
            ('{"id": "1", "text": "x"}\n{"id": "1", "text": "y"}', "two passages with the id '1'"),
        ],
    )
    def test_a_broken_file_is_refused_by_line(self, tmp_path, text, says):
        file = tmp_path / "broken.jsonl"
        file.write_text(text)
        with pytest.raises(ValueError, match=says):
            passages_of(str(file))

    def test_an_unknown_corpus_or_a_missing_file_is_named(self, tmp_path, monkeypatch):
        monkeypatch.setenv("AGENTGYM_DATA", str(tmp_path))
        monkeypatch.setattr(corpora, "_corpora", {})
        with pytest.raises(ValueError, match="no corpus 'wiki'"):
            passages_of("wiki")
        with pytest.raises(FileNotFoundError, match="nowhere"):
            passages_of("nowhere.jsonl")
        for name in ("xquad", "hotpot_qa"):
            with pytest.raises(FileNotFoundError, match=f"agentgym data get {name}"):
                passages_of(name)


class Answers(http.server.BaseHTTPRequestHandler):
    """A retrieval server: our own index, or the faults that the test lists, one for each request until none is left."""

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.seen.append(body)
        fault = self.server.faults.pop(0) if self.server.faults else None
        if fault == "hang":
            time.sleep(1.0)
        if fault == "close":
            return
        reply = json.dumps(bm25.answer(index_of("own"), body)).encode()
        if isinstance(fault, bytes):
            reply = fault
        self.send_response(fault if isinstance(fault, int) else 200)
        self.send_header("Content-Length", str(len(reply)))
        self.end_headers()
        self.wfile.write(reply[:-10] if fault == "short" else reply)

    def log_message(self, *args):
        pass


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setattr("agentgym_envs.search.retrievers.WAITS", (0.01, 0.01))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answers) as made:
        made.faults, made.seen = [], []
        made.url = f"http://127.0.0.1:{made.server_port}/retrieve"
        thread = threading.Thread(target=made.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield made
        made.shutdown()
        thread.join()


class TestHttp:
    def test_it_finds_what_the_server_finds(self, server):
        found = HttpRetriever(server.url, 5).search("copper \x00 strike é", 3)
        assert found == LocalRetriever("own").search("copper strike é", 3)
        assert server.seen == [{"queries": ["copper \x00 strike é"], "topk": 3, "return_scores": True}]

    @pytest.mark.parametrize("fault", [503, 429, 500, "close", "short"])
    def test_a_passing_fault_is_tried_again(self, server, fault):
        server.faults = [fault, fault]
        assert HttpRetriever(server.url, 5).search("copper strike", 1)[0]["id"] == "copper-strike"
        assert len(server.seen) == 3

    def test_a_server_that_hangs_once_is_asked_again(self, server):
        server.faults = ["hang"]
        assert HttpRetriever(server.url, 0.3).search("copper strike", 1)[0]["id"] == "copper-strike"

    def test_a_lasting_fault_is_an_error_that_names_the_server_and_the_fault(self, server):
        server.faults = [503] * 3
        with pytest.raises(RetrieverError, match=rf"{server.url} answered 503 \(asked 3 times"):
            HttpRetriever(server.url, 5).search("copper", 1)

    def test_a_refused_request_is_not_repeated(self, server):
        server.faults = [404]
        with pytest.raises(RetrieverError, match="answered 404"):
            HttpRetriever(server.url, 5).search("copper", 1)
        assert len(server.seen) == 1

    def test_nobody_there_is_an_error_within_the_limits(self, monkeypatch):
        monkeypatch.setattr("agentgym_envs.search.retrievers.WAITS", (0.01, 0.01))
        start = time.monotonic()
        with pytest.raises(RetrieverError, match="cannot be reached"):
            HttpRetriever("http://127.0.0.1:9/retrieve", 1).search("copper", 1)
        assert time.monotonic() - start < 10

    @pytest.mark.parametrize(
        "reply",
        [
            *(b"<html>", b"[]", b"{}", b'{"result": []}', b'{"result": [[1]]}', b'{"result": [[{"document": {}}]]}'),
            *(
                b'{"result": [[], []]}',
                b'{"result": [{}, {}]}',
                b'{"result": "x"}',
                b'{"result": [[{"document": null}]]}',
            ),
        ],
    )
    def test_nonsense_is_an_error_that_shows_it(self, server, reply):
        server.faults = [reply]
        with pytest.raises(RetrieverError, match="answered"):
            HttpRetriever(server.url, 5).search("copper", 1)

    @pytest.mark.parametrize(
        "hit",
        [
            {"document": {"id": "7", "contents": '"Lamp"\nIt shines.'}, "score": 1.5},
            {"document": {"id": 7, "title": "Lamp", "text": "It shines."}, "score": 1.5},
            {"id": "7", "contents": "Lamp\nIt shines."},
        ],
    )
    def test_the_usual_forms_of_a_document_are_read(self, server, hit):
        server.faults = [json.dumps({"result": [[hit, hit]]}).encode()]
        assert HttpRetriever(server.url, 5).search("lamp", 1) == [passage("7", "It shines.", "Lamp")]


class TestOpen:
    @pytest.mark.parametrize("kind", ["bm26", "", "ftp://x", "localhost:8000"])
    def test_an_unknown_retriever_is_refused(self, kind):
        with pytest.raises(ValueError, match='must be "bm25", "sandbox" or a URL'):
            open_retriever(kind, "own", 1.0, None)

    @pytest.mark.parametrize("kind", ["bm25", "sandbox"])
    def test_one_of_our_own_needs_a_corpus(self, kind):
        with pytest.raises(ValueError, match="names no corpus"):
            open_retriever(kind, None, 1.0, None)


class TestOwnQuestions:
    def test_every_search_of_every_chain_finds_its_passage_and_the_last_one_holds_the_answer(self):
        from agentgym_envs.search.env import normalised

        by_id = {p["id"]: p for p in passages_of("own")}
        for task in [*own_questions("train"), *own_questions("test")]:
            hops = task.metadata["hops"]
            assert len(hops) in (2, 3)
            for hop in hops:
                found = [p["id"] for p, _ in index_of("own").search(hop["query"], 3)]
                assert hop["passage"] in found, (task.id, hop, found)
            texts = [f" {normalised(by_id[h['passage']]['title'] + ' ' + by_id[h['passage']]['text'])} " for h in hops]
            golds = [f" {normalised(gold)} " for gold in task.answer]
            assert any(gold in texts[-1] for gold in golds), task.id
            question = f" {normalised(task.messages[0]['content'])} "
            assert not any(gold in text for gold in golds for text in [*texts[:-1], question]), task.id

    def test_each_search_needs_what_the_one_before_has_found(self):
        by_id = {p["id"]: p for p in passages_of("own")}
        for task in [*own_questions("train"), *own_questions("test")]:
            hops = task.metadata["hops"]
            for before, after in itertools.pairwise(hops):
                new = set(bm25.words_of(after["query"])) - set(bm25.words_of(task.messages[0]["content"]))
                read = bm25.words_of(f"{by_id[before['passage']]['title']} {by_id[before['passage']]['text']}")
                assert new & set(read), (task.id, after)

    def test_a_search_for_the_question_itself_seldom_finds_the_last_passage(self):
        tasks = [*own_questions("train"), *own_questions("test")]
        found = sum(
            task.metadata["hops"][-1]["passage"]
            in [p["id"] for p, _ in index_of("own").search(task.messages[0]["content"], 3)]
            for task in tasks
        )
        assert found / len(tasks) < 0.2

    def test_no_fact_is_asked_in_both_splits(self):
        facts = [
            {(t.metadata["hops"][-1]["passage"], gold) for t in own_questions(split) for gold in t.answer}
            for split in ("train", "test")
        ]
        assert not facts[0] & facts[1]
