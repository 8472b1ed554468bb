"""search in a sandbox: the same passages on both back ends, one sandbox for all, a new one when it fails."""

from __future__ import annotations

import threading

import pytest

import agentgym
from agentgym import sandbox
from agentgym.core.agent_failure import cause_of
from agentgym.sandbox import SandboxError
from agentgym_envs import register_all
from agentgym_envs.search import retrievers
from agentgym_envs.search.corpora import own_questions
from agentgym_envs.search.retrievers import LocalRetriever, SandboxRetriever

register_all()
QUERIES = ["who led the Copper Strike", "otter", "the of", "\x00\ud800 漢字", "salt " * 200]


@pytest.fixture(
    scope="module", params=[pytest.param(name, marks=getattr(pytest.mark, name)) for name in ("docker", "bubblewrap")]
)
def backend(request):
    return request.param


@pytest.fixture(scope="module")
def boxes(backend):
    """Every sandbox that was acquired, the current one last."""
    made, acquire = [], sandbox.acquire
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sandbox, "acquire", lambda *a, **k: made.append(acquire(*a, **k)) or made[-1])
        yield made


@pytest.fixture(scope="module")
def retriever(backend, boxes):
    made = SandboxRetriever("own", 20, backend)
    yield made
    made.close()


def kill_program(box):
    box.exec("for p in /proc/[0-9]*; do grep -q bm2[5].py $p/cmdline && kill -9 ${p#/proc/}; done")


class TestRetriever:
    @pytest.mark.parametrize("query", QUERIES)
    def test_it_finds_what_the_index_in_this_process_finds(self, retriever, query):
        for topk in (1, 5):
            assert retriever.search(query, topk) == LocalRetriever("own").search(query, topk)

    def test_another_one_shares_its_sandbox_and_leaves_it_running(self, retriever, backend, boxes):
        before = len(boxes)
        other = SandboxRetriever("own", 20, backend)
        assert other.search("otter", 1) == retriever.search("otter", 1)
        other.close()
        other.close()
        assert len(boxes) == before
        assert boxes[-1].alive

    def test_many_threads_may_search_at_once(self, retriever):
        found = []
        threads = [
            threading.Thread(target=lambda q=q: found.append((q, retriever.search(q, 3)))) for q in QUERIES[:3] * 5
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert len(found) == 15
        assert all(passages == LocalRetriever("own").search(query, 3) for query, passages in found)

    @pytest.mark.parametrize("lose", [lambda box: box.close(), kill_program], ids=["the sandbox", "its program"])
    def test_a_sandbox_that_fails_is_replaced_and_the_search_repeated(self, retriever, boxes, lose):
        lose(boxes[-1])
        assert retriever.search("otter", 1)[0]["id"] == "corrin-glass"

    def test_a_sandbox_that_goes_on_failing_is_an_error_and_no_empty_result(self, retriever, boxes, monkeypatch):
        monkeypatch.setattr(retrievers, "PROGRAM", "/private/other.py")
        monkeypatch.setattr(retrievers.bm25, "__file__", __file__)  # a program that cannot be imported there
        boxes[-1].close()
        with pytest.raises(SandboxError, match="No module named 'pytest'"):
            retriever.search("otter", 1)
        monkeypatch.undo()
        assert retriever.search("otter", 1)[0]["id"] == "corrin-glass"

    def test_a_query_that_ends_the_program_twice_is_the_agents_doing(self, retriever, boxes, monkeypatch, tmp_path):
        """The program is a double, which answers nothing and dies of any query."""
        program = tmp_path / "dies.py"
        reply = "{'results': [[]]}"
        program.write_text(
            "import json, os, struct, sys\n"
            "while True:\n"
            "    size = struct.unpack('>I', sys.stdin.buffer.read(4))[0]\n"
            "    if json.loads(sys.stdin.buffer.read(size))['queries']: os._exit(3)\n"
            f"    body = json.dumps({reply}).encode()\n"
            "    os.write(3, struct.pack('>I', len(body)) + body)\n"
        )
        monkeypatch.setattr(retrievers.bm25, "__file__", str(program))
        boxes[-1].close()
        with pytest.raises(SandboxError, match="ended with exit code 3"):
            retriever.search("otter", 1)
        before = len(boxes)
        with pytest.raises(SandboxError, match="ended with exit code 3") as raised:
            retriever.search("otter", 1)
        assert len(boxes) == before + 2
        assert cause_of(raised.value) == "sandbox_spoiled"
        monkeypatch.undo()
        assert retriever.search("otter", 1)[0]["id"] == "corrin-glass"

    def test_the_environment_plays_the_same_with_it(self, retriever, backend):
        envs = [agentgym.make("search", retriever="sandbox", sandbox=backend, timeout=20), agentgym.make("search")]
        seen = []
        for env in envs:
            for task in own_questions("test").take(4):
                env.reset(options={"task": task})
                over = False
                while not over:
                    step = env.step(env.expert_action())
                    seen.append(step)
                    over = step[2]
            env.close()
        assert seen[: len(seen) // 2] == seen[len(seen) // 2 :]

    def test_the_last_one_out_gives_the_sandbox_back(self, retriever, backend, boxes):
        env = agentgym.make("search", retriever="sandbox", sandbox=backend, corpus="own")
        env.reset(options={"task": own_questions("test")[0]})
        retriever.close()
        assert boxes[-1].alive
        env.close()
        assert not boxes[-1].alive


def test_a_back_end_that_there_is_not_fails_the_first_task():
    env = agentgym.make("search", retriever="sandbox", sandbox="podman")
    with pytest.raises(ValueError, match="podman"):
        env.init(own_questions("test")[0])
