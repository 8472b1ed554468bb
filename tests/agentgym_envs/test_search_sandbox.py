"""search in a sandbox: the same passages on both back ends, one sandbox for all, a new one when it fails."""

from __future__ import annotations

import threading

import pytest

import agentgym
from agentgym.core.agent_failure import cause_of
from agentgym.sandbox import SandboxError
from agentgym_envs import register_all
from agentgym_envs.search import sandboxed
from agentgym_envs.search.questions import own_questions
from agentgym_envs.search.retrievers import LocalRetriever
from agentgym_envs.search.sandboxed import SandboxRetriever

register_all()
QUERIES = ["who led the Copper Strike", "otter", "the of", "\x00\ud800 漢字", "salt " * 200]


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=getattr(pytest.mark, name)) for name in ("docker", "bubblewrap")],
)
def retriever(request):
    made = SandboxRetriever("own", 20, request.param)
    yield made
    made.close()


class TestRetriever:
    @pytest.mark.parametrize("query", QUERIES)
    def test_it_finds_what_the_index_in_this_process_finds(self, retriever, query):
        for topk in (1, 5):
            assert retriever.search(query, topk) == LocalRetriever("own").search(query, topk)

    def test_another_one_shares_its_sandbox_and_leaves_it_running(self, retriever):
        box = retriever._service._box
        other = SandboxRetriever("own", 20, retriever._key[1])
        assert other.search("otter", 1) == retriever.search("otter", 1)
        other.close()
        other.close()
        assert retriever._service._box is box
        assert box.alive

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

    @pytest.mark.parametrize("what", ["_session", "_box"])
    def test_a_sandbox_that_fails_is_replaced_and_the_search_repeated(self, retriever, what):
        getattr(retriever._service, what).close()
        assert retriever.search("otter", 1)[0]["id"] == "corrin-glass"

    def test_a_sandbox_that_goes_on_failing_is_an_error_and_no_empty_result(self, retriever, monkeypatch):
        monkeypatch.setattr(sandboxed, "PROGRAM", "/private/other.py")
        monkeypatch.setattr(sandboxed.bm25, "__file__", __file__)  # a program that cannot be imported there
        retriever._service.close()
        with pytest.raises(SandboxError, match="No module named 'pytest'"):
            retriever.search("otter", 1)
        monkeypatch.undo()
        assert retriever.search("otter", 1)[0]["id"] == "corrin-glass"

    def test_a_query_that_ends_the_program_twice_is_the_agents_doing(self, retriever, monkeypatch, tmp_path):
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
        monkeypatch.setattr(sandboxed.bm25, "__file__", str(program))
        retriever._service.close()
        with pytest.raises(SandboxError, match="ended with exit code 3") as raised:
            retriever.search("otter", 1)
        assert cause_of(raised.value) == "sandbox_spoiled"
        monkeypatch.undo()
        assert retriever.search("otter", 1)[0]["id"] == "corrin-glass"

    def test_the_environment_plays_the_same_with_it(self, retriever):
        envs = [
            agentgym.make("search", retriever="sandbox", sandbox=retriever._key[1], timeout=20),
            agentgym.make("search"),
        ]
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

    def test_the_last_one_out_gives_the_sandbox_back(self, retriever):
        env = agentgym.make("search", retriever="sandbox", sandbox=retriever._key[1], corpus="own")
        env.reset(options={"task": own_questions("test")[0]})
        key, service = retriever._key, retriever._service
        assert sandboxed._services[key] is service
        retriever.close()
        assert service._box.alive
        env.close()
        assert service._box is None
        assert key not in sandboxed._services


def test_a_back_end_that_there_is_not_fails_the_first_task_and_leaves_nothing():
    env = agentgym.make("search", retriever="sandbox", sandbox="podman")
    with pytest.raises(ValueError, match="podman"):
        env.init(own_questions("test")[0])
    assert ("own", "podman") not in sandboxed._services
