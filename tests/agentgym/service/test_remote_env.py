"""A served environment, used from here: the same episodes as a local one, whatever happens to its connections."""

import asyncio
import json
import pickle
import random
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from faulty_server import FaultyServer, cutting, running
from served import certificate, served
from service_harness import tally

import agentgym
from agentgym.cli import main
from agentgym.core.env import Blocking
from agentgym.core.registration import UnknownEnvError, spec
from agentgym.core.trajectory import Trajectory
from agentgym.policies.base import ExpertPolicy, Policy, RandomPolicy
from agentgym.rollout.episode import Episode, close_env, run_episode, run_many
from agentgym.service.client import lookup
from agentgym.service.client.address import RemoteEnvError, RemoteError, SessionLost, Unavailable, parse
from agentgym.service.protocol.frames import ServiceLimits
from agentgym.service.server.env_server import EnvServer

SERVED = ("frozen_lake", "sokoban", "gsm8k", "wordle", "countdown", "sql", "gsm8k_tool")
EXPERT, RANDOM, MIXED = "expert", "random", "mixed"
POLICIES: dict[str, Callable[[int], Policy]] = {
    EXPERT: lambda seed: ExpertPolicy(),
    RANDOM: lambda seed: RandomPolicy(rng=random.Random(seed)),
    MIXED: lambda seed: ExpertPolicy(mistakes=0.5, rng=random.Random(seed)),
}


@pytest.fixture(autouse=True)
def _nothing_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ports are used again: what was told by another server at one must not be believed."""
    monkeypatch.setattr(lookup, "known_records", {})
    monkeypatch.delenv("AGENTGYM_TOKEN", raising=False)


@pytest.fixture(scope="module")
def server() -> Iterator[EnvServer]:
    with served(*SERVED) as server:
        yield server


def said(trajectory: Trajectory) -> Any:
    """All that an episode showed and was told, times left out."""
    turns = [(turn.observation, turn.reply, turn.reward, turn.info) for turn in trajectory.turns]
    shown = (trajectory.task_id, turns, trajectory.final_observation, trajectory.end, trajectory.error)
    return json.loads(json.dumps(shown))


async def episodes(env: Any, policy: str, n: int = 3) -> list[Any]:
    tasks = await asyncio.to_thread(lambda: list(env.tasks.take(n)))
    played = [await run_episode(env, POLICIES[policy](i), task, seed=i) for i, task in enumerate(tasks)]
    await close_env(env)
    return [said(trajectory) for trajectory in played]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("id", SERVED)
def test_its_episodes_are_those_of_a_local_one(server: EnvServer, id: str, policy: str) -> None:
    remote = asyncio.run(episodes(agentgym.make(f"{server.url}/{id}"), policy))
    assert remote == asyncio.run(episodes(agentgym.make(id), policy))


def test_its_tasks_tools_and_turns_are_those_of_a_local_one(server: EnvServer) -> None:
    for id in SERVED:
        remote, local = agentgym.make(f"{server.url}/{id}"), agentgym.make(id)
        assert (remote.tools, remote.max_turns) == (local.tools, local.max_turns)
        for split in ("train", "test"):
            theirs, ours = spec(f"{server.url}/{id}").tasks(split), spec(id).tasks(split)
            assert (len(theirs), theirs.name) == (len(ours), ours.name)
            n = min(len(ours), 250)
            places = [0, n - 1, n // 2]
            assert [theirs[i].to_json() for i in places] == [ours[i].to_json() for i in places]


def test_a_drawn_task_is_the_one_that_the_environment_draws_here(server: EnvServer) -> None:
    async def drawn(env: Any) -> list[Any]:
        shown = []
        for seed in (3, 4):
            result = env.reset(seed=seed)
            shown.append((await result if asyncio.iscoroutine(result) else result, env.task.to_json()))
        await close_env(env)
        return shown

    remote = asyncio.run(drawn(agentgym.make(f"{server.url}/sokoban")))
    assert json.dumps(remote) == json.dumps(asyncio.run(drawn(agentgym.make("sokoban"))))


def test_plain_calls_go_through_a_wrapper(server: EnvServer) -> None:
    def play(env: Any) -> list[Any]:
        rng = random.Random(1)
        shown = [env.reset(seed=5)]
        over = False
        while not over:
            shown.append(env.step(env.random_action(rng)))
            over = shown[-1][2] or shown[-1][3]
        env.close()
        return shown

    remote = play(Blocking(agentgym.make(f"{server.url}/frozen_lake")))
    assert json.dumps(remote) == json.dumps(play(agentgym.make("frozen_lake")))


def test_one_session_serves_many_episodes_and_closing_frees_its_slot(server: EnvServer) -> None:
    before = tally(server).opened
    asyncio.run(episodes(agentgym.make(f"{server.url}/frozen_lake"), EXPERT, n=5))
    assert tally(server).opened == before + 1
    until = time.monotonic() + 30
    while server.sessions.open and time.monotonic() < until:
        time.sleep(0.01)
    assert not server.sessions.open


def test_many_at_a_time_are_as_one_after_another(server: EnvServer) -> None:
    def play(id: str, concurrency: int) -> list[Any]:
        made = spec(id)
        todo = [Episode(task, 0, i) for i, task in enumerate(made.tasks("train").take(12))]
        make_policy = lambda episode: POLICIES[MIXED](episode.seed)  # noqa: E731
        return list(map(said, asyncio.run(run_many(made.make, make_policy, todo, concurrency=concurrency))))

    assert play(f"{server.url}/sokoban", 6) == play("sokoban", 1)


@pytest.mark.parametrize("seed", range(4))
def test_a_network_that_cuts_connections_changes_no_episode(server: EnvServer, seed: int) -> None:
    rng = random.Random(seed)
    local = asyncio.run(episodes(agentgym.make("sokoban"), MIXED))
    before = tally(server).counters["steps"]
    # From the sixth on: a resume token is used up when its connection is opened, so its hello must arrive.
    with cutting(server.port, [40, *(rng.randint(6, 25) for _ in range(12))]) as proxy:
        remote = asyncio.run(episodes(agentgym.make(f"http://127.0.0.1:{proxy.port}/sokoban"), MIXED))
    assert proxy.made > 2
    assert remote == local
    assert tally(server).counters["steps"] - before == sum(len(turns) for _, turns, *_ in local)  # none run twice


@pytest.mark.parametrize("fault", ["before", "after", "half", "twice"])
def test_no_step_is_run_twice(fault: str) -> None:
    server = FaultyServer(spec("sokoban"))
    local = asyncio.run(episodes(agentgym.make("sokoban"), EXPERT))
    with running(server):
        for _ in range(10):
            server.messages.extend(["ok", "ok", fault])
        assert asyncio.run(episodes(agentgym.make(server.url), EXPERT)) == local
    assert server.run == {"step": sum(len(turns) for _, turns, *_ in local), "reset": 3}
    assert server.opened == 1
    assert (server.resumes > 0) == (fault != "twice")


def stepped(server: FaultyServer, *messages: str) -> Any:
    """Reset and step an environment whose messages after the reset meet these faults; then see that a new episode works."""

    async def play() -> None:
        env: Any = await asyncio.to_thread(agentgym.make, server.url)
        await env.reset(seed=1)
        server.messages.extend(messages)
        try:
            await env.step("up")
        finally:
            server.messages.clear()
            await env.reset(seed=1)
            await env.step("up")
            await env.close()

    with running(server):
        asyncio.run(play())


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ("no json", "it sent no JSON: 'no json'"),
        ("[]]", "it sent no JSON"),
        ('{"id": 99, "result": []}', "it sent an invalid answer"),
        ('{"id": 2}', "it sent an invalid answer"),
        ("7", "it sent an invalid answer"),
        ('{"id": 2, "result": [1, 2]}', r"the server answered with an invalid result: \[1, 2\]"),
        ('{"id": 2, "result": [[], "much", false, false, {}]}', "an invalid result"),
        ('{"id": 2, "error": {"code": "DEADLINE", "message": "5 s", "fatal": true}}', "DEADLINE: 5 s"),
        ('{"id": null, "error": {"code": "WORKER_DIED", "message": "killed", "fatal": true}}', "WORKER_DIED: killed"),
    ],
)
def test_nonsense_and_fatal_errors_cost_the_episode_and_say_where(answer: str, words: str) -> None:
    server = FaultyServer(spec("frozen_lake"))
    with pytest.raises(SessionLost, match=words) as caught:
        stepped(server, answer)
    assert f"frozen_lake at http://127.0.0.1:{server.port}: the session is lost" in str(caught.value)
    assert server.opened == 2


def test_a_connection_that_drops_while_the_policy_thinks_is_opened_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentgym.service.client.session_client.LOOK_SECONDS", 0.02)
    server = FaultyServer(spec("frozen_lake"))

    async def play() -> None:
        env: Any = await asyncio.to_thread(agentgym.make, server.url)
        await env.reset(seed=1)
        for resumes in (1, 2):
            server.cut_all()
            until = time.monotonic() + 30
            while server.resumes < resumes and time.monotonic() < until:
                await asyncio.sleep(0.01)
            assert server.resumes == resumes
        await env.step("up")
        await env.close()

    with running(server):
        asyncio.run(play())
    assert server.opened == 1


def test_a_session_that_the_server_does_not_have_any_more_is_lost() -> None:
    server = FaultyServer(spec("frozen_lake"))

    class Forgetful(dict[str, Any]):
        def __contains__(self, key: object) -> bool:
            return False

    server.sessions = Forgetful()
    with pytest.raises(SessionLost, match=r"could not be opened again: it does not have the session any more \(409\)"):
        stepped(server, "after")


def test_a_session_that_is_not_ours_is_left() -> None:
    server = FaultyServer(spec("frozen_lake"))
    server.openings.extend(["ok", "other"])
    with pytest.raises(SessionLost, match="another session than the one that was asked for"):
        stepped(server, "after")


def test_a_server_that_is_away_for_a_moment_is_waited_for() -> None:
    server = FaultyServer(spec("frozen_lake"))
    server.openings.extend(["ok", "503", "reset", "500"])
    stepped(server, "after")
    assert (server.opened, server.resumes) == (1, 1)


def test_a_server_that_drops_every_connection_is_given_up() -> None:
    with pytest.raises(SessionLost, match=r"its connection dropped \d+ times without an answer"):
        stepped(FaultyServer(spec("frozen_lake")), *["before"] * 20)


def test_a_silent_server_is_not_waited_for_longer_than_its_own_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentgym.service.client.session_client.CONNECT_SECONDS", 0.2)
    server = FaultyServer(spec("frozen_lake"), ServiceLimits(step_seconds=0.1, message_seconds=0.1))
    stepped(server, "mute")  # it is asked again, and has the answer
    assert (server.opened, server.resumes) == (1, 1)


def test_what_the_environment_raises_is_an_error_and_the_session_goes_on(server: EnvServer) -> None:
    async def play() -> None:
        env: Any = await asyncio.to_thread(agentgym.make, f"{server.url}/frozen_lake")
        await env.reset(seed=1)
        over = False
        while not over:
            *_, terminated, truncated, _ = await env.step(await env.expert_action())
            over = terminated or truncated
        session = env.session
        with pytest.raises(RemoteEnvError, match=r"frozen_lake at http.*RuntimeError: FrozenLake.*call reset"):
            await env.step("up")
        await env.reset(seed=1)
        assert env.session is session
        await env.close()
        await asyncio.sleep(0)
        await env.close()  # twice
        with pytest.raises(RuntimeError, match=r"call reset\(\)"):
            await env.step("up")

    asyncio.run(play())


def test_what_is_too_large_is_not_sent(server: EnvServer) -> None:
    async def play() -> None:
        env: Any = await asyncio.to_thread(agentgym.make, f"{server.url}/frozen_lake")
        await env.reset(seed=1)
        with pytest.raises(RemoteError, match=r"step would send 9,0.* bytes, and the server takes 8,388,608"):
            await env.step("x" * 9_000_000)
        await env.step("up")
        await env.close()

    asyncio.run(play())


@pytest.mark.parametrize("action", ["", "\x00", "\ud83d", "漢字 🙂", {"role": "assistant", "content": None}])
def test_any_action_arrives(server: EnvServer, action: Any) -> None:
    async def play(env: Any) -> Any:
        reset, step = env.reset(seed=1), None
        await reset if asyncio.iscoroutine(reset) else reset
        step = env.step(action)
        step = await step if asyncio.iscoroutine(step) else step
        await close_env(env)
        return json.dumps(step)

    assert asyncio.run(play(agentgym.make(f"{server.url}/wordle"))) == asyncio.run(play(agentgym.make("wordle")))


def test_a_call_that_is_given_up_ends_its_session() -> None:
    server = FaultyServer(spec("frozen_lake"))

    async def play() -> None:
        env: Any = await asyncio.to_thread(agentgym.make, server.url)
        await env.reset(seed=1)
        server.messages.append("mute")
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(env.step("up"), 0.2)
        with pytest.raises(RuntimeError, match=r"call reset\(\)"):
            await env.step("up")
        await env.reset(seed=1)
        await env.close()

    with running(server):
        asyncio.run(play())
    assert (server.opened, server.closes) == (2, 2)


def test_an_event_loop_that_ends_takes_no_session_with_it(server: EnvServer) -> None:
    env: Any = agentgym.make(f"{server.url}/frozen_lake")
    opened = tally(server).opened
    first = asyncio.run(env.reset(seed=1))
    steps = [asyncio.run(env.step(word)) for word in ("up", "down")]
    asyncio.run(env.close())
    assert tally(server).opened == opened + 1
    local = agentgym.make("frozen_lake")
    assert json.dumps([first, *steps]) == json.dumps([local.reset(seed=1), local.step("up"), local.step("down")])


def test_it_evaluates_and_checks_as_a_local_one(
    server: EnvServer, tmp_path: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    rewards = {}
    for id in (f"{server.url}/sokoban", "sokoban"):
        out = tmp_path / str(len(rewards))
        assert main(["eval", id, "--policy", "random", "-n", "6", "--out", str(out), "--json"]) == 0
        [file] = (out / "episodes").glob("*.jsonl")
        lines = map(json.loads, file.read_text().splitlines())
        rewards[id] = sorted((line["task_id"], [turn["reward"] for turn in line["turns"]]) for line in lines)
    assert len({json.dumps(r) for r in rewards.values()}) == 1
    capsys.readouterr()
    assert main(["check", f"{server.url}/frozen_lake"]) == 0, capsys.readouterr()


def test_its_spec_is_a_value() -> None:
    found = spec("http://h:1/acme/gsm8k/, https://[::1]/acme/gsm8k")
    assert found.id == "http://h:1/acme/gsm8k,https://[::1]/acme/gsm8k"
    assert pickle.loads(pickle.dumps(found)) == found
    assert type(found).from_json(json.loads(json.dumps(found.to_json()))) == found


def test_its_task_set_can_be_pickled(server: EnvServer) -> None:
    tasks = spec(f"{server.url}/frozen_lake").tasks("test").shuffled(3)
    again = pickle.loads(pickle.dumps(tasks))
    assert [task.id for task in again.take(5)] == [task.id for task in tasks.take(5)]


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("http://h:1", "names no environment: write http://h:1/ENV"),
        ("http://h:1/a?b=1", "bad URL"),
        ("http://h:x/a", "bad URL 'http://h:x/a': Port"),
        ("http://user:secret@h/a", "must not hold a secret"),
        ("http://h/a,http://h/b", "name different environments, 'a' and 'b'"),
        ("http://h/a,gsm8k", "bad URL 'gsm8k'"),
        ("http://h/a b", "no environment's id"),
        ("http:///a", "bad URL"),
    ],
)
def test_a_bad_url_is_refused(url: str, words: str) -> None:
    with pytest.raises(UnknownEnvError, match=words) as caught:
        agentgym.make(url)
    assert "secret@" not in str(caught.value)


def test_a_mistaken_name_split_or_server_is_told(server: EnvServer) -> None:
    with pytest.raises(ValueError, match="serves no environment 'sokobann': did you mean sokoban"):
        agentgym.make(f"{server.url}/sokobann")
    with pytest.raises(ValueError, match="trian"):
        spec(f"{server.url}/sokoban").tasks("trian")
    with pytest.raises(Unavailable, match=r"sokoban: no server answers: http://127.0.0.1:1: .*refused"):
        agentgym.make("http://127.0.0.1:1/sokoban")
    with pytest.raises(ValueError, match=r"sokoban at http.*: size=3 is expected, and the server makes it with size=6"):
        agentgym.make(f"{server.url}/sokoban", size=3)
    agentgym.make(f"{server.url}/sokoban", size=6)


def test_tokens_come_from_the_variable_or_a_file_and_never_from_the_spec(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = FaultyServer(spec("frozen_lake"), token="s3cret-token")
    file = tmp_path / "token"
    file.write_text("s3cret-token\n")
    with running(server):
        with pytest.raises(Unavailable, match="401 wrong token: set AGENTGYM_TOKEN or token_file="):
            agentgym.make(server.url)
        env: Any = agentgym.make(server.url, token_file=str(file))
        assert "s3cret" not in json.dumps(env.spec.to_json())
        asyncio.run(episodes(env, EXPERT, 1))
        monkeypatch.setenv("AGENTGYM_TOKEN", "s3cret-token")
        asyncio.run(episodes(agentgym.make(server.url), EXPERT, 1))
        lookup.known_records[parse(server.url)] = (float("inf"), {})
        monkeypatch.setenv("AGENTGYM_TOKEN", "another")
        with pytest.raises(Unavailable, match=r"refuses the bearer token \(401\)"):
            asyncio.run(agentgym.make(server.url).reset(seed=1))  # type: ignore[arg-type]
        with pytest.raises(Unavailable, match="cannot be read"):
            agentgym.make(server.url, token_file=str(tmp_path / "absent"))


def test_tls_by_a_certificate_of_ones_own(tmp_path: Any) -> None:
    tls = certificate(tmp_path)
    cert = tls["cert"]
    with served("frozen_lake", **tls) as server:
        url = f"https://localhost:{server.port}/frozen_lake"
        with pytest.raises(Unavailable, match=r"(?i)certificate"):
            agentgym.make(url)
        remote = asyncio.run(episodes(agentgym.make(url, ca_file=cert), MIXED))
        assert remote == asyncio.run(episodes(agentgym.make("frozen_lake"), MIXED))
        lookup.known_records[parse(url)] = (float("inf"), {})
        with pytest.raises(Unavailable, match=r"TLS failed: .* a certificate of your own needs ca_file="):
            asyncio.run(agentgym.make(url).reset(seed=1))  # type: ignore[arg-type]
