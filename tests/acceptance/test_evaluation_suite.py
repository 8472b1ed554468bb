"""All shipped environments, played by policies and by real models behind real vLLM servers, and killed again and again.

What must come out: every episode is played once, and the results are those of a run that nobody disturbed.

Greedy answers of a model follow from the prompt alone only if each request is computed alone. In a batch the sums of the
matrix products are taken in another order, their last bits differ, and two tokens that are nearly as likely change places; with
kept prefixes, what was asked before decides how much is computed anew. A killed run meets other batches and other
prefixes than an undisturbed one. The servers here therefore compute in float32, one sequence at a time
(`--max-num-seqs 1`), and keep no prefixes; the evaluation plays several episodes at a time all the same.
"""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from evaluation_process import ENVS, Evaluation, conversations, lines, results, stored, times_played
from instruct_model import NAME, instruct_model

from agent_train.config.schema import TinyConfig
from agent_train.learner.tiny import build_tiny
from agentgym.core.registration import load_plugins, registry
from agentgym.evaluate.serving import serve_model

KILLS = 10  # in all; of those that models play fewer, or none, without AGENTGYM_TEST_ALL
STARTING = 2  # of ten, so many while it still starts
SHORT = ("countdown", "frozen_lake", "gsm8k_tool", "sql", "tic_tac_toe", "wordle")  # quick to read for a real model
CONTEXT = 8192
ALONE = ("--dtype", "float32", "--max-num-seqs", "1", "--no-enable-prefix-caching", "--max-model-len", str(CONTEXT))
GREEDY = ("--temperature", "0", "--seed", "7", "--max-turns", "2", "--concurrency")

pytestmark = [pytest.mark.slow, pytest.mark.sandbox, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Path:
    """A tiny policy with random weights: what it says is noise, which environments must bear."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    shape = TinyConfig(hidden=64, layers=2, heads=2, intermediate=128, vocab=512)
    build_tiny(folder, [Path(__file__).read_text()], shape, CONTEXT, seed=0)
    return folder


@contextlib.contextmanager
def served(model: Path, log: Path) -> Iterator[tuple[str, ...]]:
    """What `agentgym eval` is told of a model that is being served."""
    with serve_model(model, log=log, args=ALONE) as (url, name):
        yield ("--model", name, "--base-url", url)


@pytest.fixture(scope="module")
def tiny_server(tiny, tmp_path_factory) -> Iterator[tuple[str, ...]]:
    """Its server, for the tests that play it. The last of them kills it."""
    with served(tiny, tmp_path_factory.mktemp("logs") / "vllm.log") as model:
        yield model


def check_killed_and_undisturbed(
    folder: Path, seed: int, n: int, kills: int, *options: str, envs: tuple[str, ...] = ENVS
) -> None:
    """Play environments undisturbed, and again with `kill -9` at random moments, from the first second to near the end."""
    asked = (*envs, "-n", str(n), *options)
    whole, torn = folder / "whole", folder / "torn"
    undisturbed = Evaluation(whole, *asked)
    assert undisturbed.ends() == 0, undisturbed.told()
    total = len(envs) * n
    assert lines(whole) == total, undisturbed.told()

    rng = random.Random(seed)
    early = [(rng.uniform(0, 1), 0) for _ in range(STARTING * kills // KILLS)]
    stored_then = sorted(rng.sample(range(1, int(0.9 * total)), kills - len(early)))
    for seconds, episodes in [*early, *((0, count) for count in stored_then)]:
        run = Evaluation(torn, *asked)
        time.sleep(seconds)
        run.wait_for(lambda episodes=episodes: lines(torn) >= episodes)
        assert run.runs, f"it ended before it could be killed: {run.told()}"
        run.kill()
    assert lines(torn) < total
    last = Evaluation(torn, *asked)
    assert last.ends() == 0, last.told()

    assert set(times_played(torn).values()) == {1}
    assert times_played(torn) == times_played(whole)
    assert lines(torn) == total, "an episode failed"
    assert conversations(torn) == conversations(whole)
    assert results(torn) == results(whole)


def test_these_are_all_environments() -> None:
    load_plugins()
    ours = {spec.id for spec in registry.values() if str(spec.entry_point).startswith("agentgym_envs")}
    assert ours == {*ENVS, "swe_bench"}, "whose instances are built first; it has tests of its own"


def test_killed_while_nothing_answers(tmp_path) -> None:
    check_killed_and_undisturbed(tmp_path, 1, 8, KILLS, "--policy", "null", "--concurrency", "4")


@pytest.mark.vllm
def test_killed_while_the_tiny_policy_plays(tmp_path, tiny_server, uncut) -> None:
    kills = KILLS if uncut else 3
    check_killed_and_undisturbed(tmp_path, 2, 3, kills, *tiny_server, *GREEDY, "4", "--max-tokens", "24")


@pytest.mark.vllm
def test_an_instruct_model_plays(tmp_path, uncut) -> None:
    envs, options = ENVS if uncut else SHORT, (*GREEDY, "2", "--max-tokens", "8")
    with served(instruct_model(), tmp_path / "vllm.log") as model:
        if uncut:
            check_killed_and_undisturbed(tmp_path, 3, 1, KILLS, *model, *options, envs=envs)
        else:
            run = Evaluation(tmp_path / "whole", *envs, "-n", "1", *options, *model)
            assert run.ends() == 0, run.told()
    said = {
        message["content"]
        for messages, *_ in conversations(tmp_path / "whole").values()
        for message in messages
        if message["role"] == "assistant"
    }
    assert len(said) > len(envs) / 2, f"{NAME} says the same everywhere: {said}"


@pytest.mark.vllm
def test_an_endpoint_that_dies_and_comes_back(tmp_path, tiny, tiny_server) -> None:
    """What could not be played is recorded as failed, and played when the same evaluation is started again."""
    out, games = tmp_path / "run", ("frozen_lake", "sokoban", "wordle")
    options = (*games, "-n", "10", *GREEDY, "4", "--max-tokens", "24", "--request-retries", "1", "--retries", "0")
    run = Evaluation(out, *options, *tiny_server)
    run.wait_for(lambda: lines(out) >= 5)
    kill_server(tiny_server[-1])
    assert run.ends() == 1, run.told()
    failed = [episode for episode in stored(out) if episode["end"] == "error"]
    played = times_played(out)
    assert len(played) >= 5
    assert len(failed) + len(played) == lines(out) == 30
    assert all("127.0.0.1" in episode["error"] for episode in failed), failed[0]["error"]
    assert not any(cell["episodes"] + cell["errors"] != 10 for cell in results(out)["cells"])

    with served(tiny, tmp_path / "second.log") as model:
        run = Evaluation(out, *options, *model)
        assert run.ends() == 0, run.told()
        assert played.items() <= times_played(out).items()
        assert sorted(times_played(out).values()) == [1] * 30
        assert [(cell["episodes"], cell["errors"]) for cell in results(out)["cells"]] == [(10, 0)] * 3
        undisturbed = Evaluation(tmp_path / "whole", *options, *model)
        assert undisturbed.ends() == 0, undisturbed.told()
    assert conversations(out) == conversations(tmp_path / "whole")


def kill_server(url: str) -> None:
    """Kill what serves a URL, by SIGKILL."""
    port = int(url.split(":")[2].split("/")[0])
    servers = [
        child
        for child in psutil.Process().children(recursive=True)
        if any(c.laddr.port == port for c in child.net_connections("tcp") if c.status == psutil.CONN_LISTEN)
    ]
    assert servers, f"nothing of ours listens at {url}"
    for server in servers:
        server.kill()
