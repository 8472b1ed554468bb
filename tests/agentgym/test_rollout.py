"""The agent loop. The environments here are fault doubles: they raise, hang, lie and block on purpose."""

import asyncio
import sqlite3
import threading
import time
from functools import reduce

import pytest

from agentgym.core.env import Env
from agentgym.core.messages import user
from agentgym.core.tasks import Task
from agentgym.core.trajectory import read_jsonl, write_jsonl
from agentgym.policies.base import EndEpisode, ExpertPolicy, Reply, ScriptedPolicy
from agentgym.rollout.episode import Episode, Limits, close_env, run_episode, run_many

TASK = Task("t")
QUICK = Limits(step_timeout=0.3, reset_timeout=0.3, init_timeout=0.3, act_timeout=0.3, close_timeout=0.3)


class Echo(Env):
    """Says back what it was told; ends at "stop". The task's answer names the fault of its step, if any."""

    max_turns = 5

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.closed = 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed, options=options)
        return [user(f"say something, {seed}")], {}

    def step(self, action):
        text = self.read(action)
        return self.outcome(
            f"you said {text}", 1.0, text == "stop", success=text == "stop", length=len(text), word=text
        )

    def expert_action(self):
        return "stop"

    def close(self):
        self.closed += 1
        super().close()


class Faulty(Echo):
    def step(self, action):
        if self.task.answer == "raise":
            raise ValueError("no such luck")
        if self.task.answer == "exit":
            raise SystemExit(3)
        if self.task.answer == "hang":
            time.sleep(20)
        if self.task.answer == "nan":
            return [], float("nan"), True, False, {}
        if self.task.answer == "four":
            return [], 1.0, True, {}
        if self.task.answer == "object":
            return "text", 1.0, True, False, {}
        return super().step(action)


class AsyncFaulty(Echo):
    async def step(self, action):
        if self.task.answer == "raise":
            raise ValueError("no such luck")
        if self.task.answer == "hang":
            await asyncio.sleep(30)
        if self.task.answer == "cancel":
            raise asyncio.CancelledError
        await asyncio.sleep(0)
        return super().step(action)


def run(coroutine):
    return asyncio.run(coroutine)


def stop(_episode=None):
    return ScriptedPolicy(["stop"])


def test_an_episode_leaves_turns_rewards_and_numbers():
    trajectory = run(run_episode(Echo(), ScriptedPolicy(["a", "stop"]), TASK, seed=7, sample=2, env_id="echo"))
    assert (trajectory.id, trajectory.env, trajectory.task_id, trajectory.seed) == ("t/2", "echo", "t", 7)
    assert trajectory.end == "terminated"
    assert trajectory.reward == 2.0
    assert [t.reply["content"] for t in trajectory.turns] == ["a", "stop"]
    assert [t.observation for t in trajectory.turns] == [[user("say something, 7")], [user("you said a")]]
    assert trajectory.final_observation == [user("you said stop")]
    assert trajectory.metrics == {"success": 1.0, "length": 4.0}
    assert trajectory.error is None


@pytest.mark.parametrize("task", [TASK, None])
def test_the_state_that_a_reset_names_is_kept_with_the_episode(task):
    """That of each step is in its turn's info."""

    class Named(Echo):
        def reset(self, *, seed=None, options=None):
            return super().reset(seed=seed, options=options or {"task": TASK})[0], {"state": [0, 0], "other": 1}

        def step(self, action):
            return [user("on")], 0.0, True, False, {"state": [0, 1]}

    trajectory = asyncio.run(run_episode(Named(), ScriptedPolicy(["go"]), task))
    assert trajectory.metadata == {"state": [0, 0]}
    assert trajectory.turns[0].info == {"state": [0, 1]}


def test_the_policy_sees_the_whole_conversation_and_the_tools():
    seen = []

    class Watcher:
        async def act(self, messages, tools):
            seen.append((list(messages), list(tools)))
            return Reply({"role": "assistant", "content": f"{len(seen)}"})

    env = Echo(max_turns=2)
    env.tools = [{"type": "function", "function": {"name": "f"}}]
    trajectory = run(run_episode(env, Watcher(), TASK))
    assert seen[1][0] == trajectory.messages()[:3]
    assert seen[0][1] == env.tools
    assert trajectory.end == "truncated"


@pytest.mark.parametrize(
    ("limits", "script", "end"),
    [(Limits(max_turns=2), ["a"] * 9, "max_turns"), (Limits(), ["a"] * 9, "truncated"), (Limits(), ["a"], "script")],
)
def test_how_an_episode_ends_without_failing(limits, script, end):
    trajectory = run(run_episode(Echo(), ScriptedPolicy(script), TASK, limits=limits))
    assert trajectory.end == end
    assert not trajectory.failed
    assert trajectory.final_observation == [user("you said a")]


def test_a_policy_may_end_an_episode_at_once():
    class Full:
        async def act(self, messages, tools):
            raise EndEpisode("full")

    trajectory = run(run_episode(Echo(), Full(), TASK))
    assert (trajectory.end, trajectory.turns, trajectory.error) == ("full", [], None)
    assert trajectory.final_observation == [user("say something, None")]


class Slow:
    async def act(self, messages, tools):
        await asyncio.sleep(30)


def test_the_time_of_an_episode_is_a_limit_and_no_error():
    trajectory = run(run_episode(Echo(), Slow(), TASK, limits=Limits(episode_timeout=0.2)))
    assert (trajectory.end, trajectory.error) == ("time", None)


def test_a_policy_that_does_not_answer_is_an_error_that_says_so():
    trajectory = run(run_episode(Echo(), Slow(), TASK, limits=QUICK))
    assert trajectory.end == "error"
    assert trajectory.error == "Echo, task 't', turn 0: act took longer than its limit of 0.3 s"


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("raise", "step failed after 0.0 s: ValueError: no such luck"),
        ("exit", "step failed after 0.0 s: RuntimeError: SystemExit(3)"),
        ("hang", "step took longer than its limit of 0.3 s"),
        ("nan", "step must return a finite number as its reward, not nan"),
        ("four", "step must return (observation, reward, terminated, truncated, info)"),
        ("object", "step must return a list of messages as its observation, not str"),
    ],
)
def test_what_goes_wrong_in_a_step_is_named(fault, words):
    trajectory = run(run_episode(Faulty(), stop(), Task("t", answer=fault), limits=QUICK))
    assert trajectory.failed
    assert words in trajectory.error
    assert "task 't', turn 1" in trajectory.error
    assert [t.reply["content"] for t in trajectory.turns] == ["stop"]


@pytest.mark.parametrize("fault", ["raise", "hang", "cancel"])
def test_faults_of_async_environments_are_contained_too(fault):
    env = AsyncFaulty()

    async def both():
        bad = await run_episode(env, stop(), Task("t", answer=fault), limits=QUICK)
        await asyncio.sleep(0.01)
        return bad, await run_episode(env, stop(), Task("u"), limits=QUICK)

    bad, good = run(both())
    assert bad.failed
    assert "step" in bad.error
    assert good.end == "terminated"


@pytest.mark.parametrize("env_class", [Faulty, AsyncFaulty])
def test_bad_episodes_leave_the_others_alone_and_the_order_as_it_was(env_class):
    faults = {3: "raise", 5: "hang", 11: "raise", 14: "hang"}
    episodes = [Episode(Task(f"t{i}", answer=faults.get(i)), seed=i) for i in range(20)]
    started = time.perf_counter()
    out = run(run_many(env_class, stop, episodes, concurrency=4, limits=QUICK, retries=0))
    assert [t.task_id for t in out] == [f"t{i}" for i in range(20)]
    assert {i for i, t in enumerate(out) if t.failed} == set(faults)
    assert time.perf_counter() - started < 15


def test_many_environments_block_at_the_same_time_and_never_more_than_allowed():
    lock, now, most = threading.Lock(), [0], [0]

    class Sleeper(Echo):
        def step(self, action):
            with lock:
                now[0] += 1
                most[0] = max(most[0], now[0])
            time.sleep(0.05)
            with lock:
                now[0] -= 1
            return super().step(action)

    started = time.perf_counter()
    out = run(run_many(Sleeper, stop, [Episode(Task(str(i))) for i in range(40)], concurrency=10))
    took = time.perf_counter() - started
    assert most[0] == 10
    assert took < 40 * 0.05 / 2
    assert not any(t.failed for t in out)


def test_environments_are_made_used_again_and_closed():
    made = []

    def make():
        made.append(Faulty())
        return made[-1]

    episodes = [Episode(Task(str(i), answer="raise" if i == 4 else None)) for i in range(10)]
    run(run_many(make, stop, episodes, concurrency=2, retries=0))
    assert len(made) == 3, "two places, and one new environment after the failure"
    assert all(env.closed == 1 for env in made)


def test_all_calls_of_an_environment_run_in_one_thread():
    class Database(Echo):
        def __init__(self):
            super().__init__()
            self.db = sqlite3.connect(":memory:")  # refuses every other thread
            self.threads = {threading.get_ident()}

        def init(self, task):
            self.db.execute("select 1")
            self.threads.add(threading.get_ident())
            super().init(task)

        def step(self, action):
            self.db.execute("select 1")
            self.threads.add(threading.get_ident())
            return super().step(action)

        def close(self):
            self.db.close()
            self.threads.add(threading.get_ident())
            super().close()

    made = []

    def make():
        made.append(Database())
        return made[-1]

    out = run(run_many(make, stop, [Episode(Task(str(i))) for i in range(12)], concurrency=3, retries=0))
    assert [t.error for t in out] == [None] * 12
    assert [len(env.threads) for env in made] == [1, 1, 1]
    assert threading.get_ident() not in set.union(*(env.threads for env in made))


def test_all_async_calls_of_an_environment_run_in_one_task():
    class Scoped(Echo):
        async def init(self, task):
            self.tasks_seen = {asyncio.current_task()}
            super().init(task)

        async def step(self, action):
            self.tasks_seen.add(asyncio.current_task())
            return super().step(action)

        async def close(self):
            self.tasks_seen.add(asyncio.current_task())

    async def play():
        env = Scoped()
        await run_episode(env, stop(), TASK)
        await close_env(env)
        return env

    assert len(run(play()).tasks_seen) == 1


def test_a_failed_episode_is_run_again_with_its_seed():
    seeds = []

    class Flaky(Echo):
        def reset(self, *, seed=None, options=None):
            seeds.append(seed)
            if len(seeds) < 3:
                raise OSError(f"failure {len(seeds)}")
            return super().reset(seed=seed, options=options)

    [out] = run(run_many(Flaky, stop, [Episode(TASK, seed=9)], retries=2))
    assert not out.failed
    assert seeds == [9, 9, 9]
    assert ["failure 1" in out.metadata["errors"][0], "failure 2" in out.metadata["errors"][1]] == [True, True]
    seeds.clear()
    [out] = run(run_many(Flaky, stop, [Episode(TASK, seed=9)], retries=1))
    assert "failure 2" in out.error
    assert len(out.metadata["errors"]) == 1
    seeds.clear()
    [out] = run(run_many(Flaky, stop, [Episode(TASK, seed=9)], retries=lambda failed: "failure 1" in failed.error))
    assert ("failure 2" in out.error, len(seeds)) == (True, 2), "a function says whether it is"


def test_an_environment_that_cannot_be_made_fails_its_episode():
    def make():
        raise FileNotFoundError("no database at /x")

    [out] = run(run_many(make, stop, [Episode(TASK, sample=3)], env_id="e", retries=0))
    assert out.id == "t/3"
    assert out.failed
    assert "making the environment failed" in out.error
    assert "no database at /x" in out.error


def test_cancelling_closes_the_environments():
    made, stepping = [], threading.Event()

    class Sleeper(Echo):
        def step(self, action):
            stepping.set()
            time.sleep(0.2)
            return super().step(action)

    def make():
        made.append(Sleeper())
        return made[-1]

    async def cancelled():
        running = asyncio.create_task(run_many(make, stop, [Episode(TASK)] * 8, concurrency=4))
        await asyncio.to_thread(stepping.wait)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running

    started = time.perf_counter()
    run(cancelled())
    while time.perf_counter() - started < 30 and not all(env.closed for env in made):
        time.sleep(0.01)  # one that was being made when the rest was cancelled closes as soon as it is there
    assert [env.closed for env in made] == [1] * len(made)


def test_cancelled_while_environments_close_they_are_closed_all_the_same():
    made = []

    class ClosesLater(Echo):
        closing = False

        def __init__(self):
            super().__init__()
            made.append(self)

        async def close(self):
            self.closing = True
            await asyncio.sleep(0.2)
            super().close()

    async def scene():
        going = asyncio.create_task(run_many(ClosesLater, stop, [Episode(TASK)]))
        while not (made and made[0].closing):
            await asyncio.sleep(0.01)
        going.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(going, 10)
        return [env.closed for env in made]

    assert run(scene()) == [1]


LOOP: dict = {}
LOOP["again"] = LOOP
DEEP = reduce(lambda inner, _: [inner], range(3000), "x")
ODD = ({"huge": 10**400}, {"endless": 10**5000}, {3: 1.0, (1, 2): [{None: "x"}]}, LOOP, {"deep": DEEP})


@pytest.mark.parametrize("info", ODD, ids=["huge", "endless", "keys", "loop", "deep"])
def test_no_info_is_too_odd_to_be_told(info, tmp_path):
    class Odd(Echo):
        def step(self, action):
            return *super().step(action)[:4], info

    trajectory = run(run_episode(Odd(), stop(), TASK))
    assert (trajectory.end, trajectory.reward) == ("terminated", 1.0)
    write_jsonl(tmp_path / "t.jsonl", [trajectory])
    assert [again.reward for again in read_jsonl(tmp_path / "t.jsonl")] == [1.0]


def test_what_on_end_raises_stops_everything_and_closes_the_environments():
    made = []

    def make():
        made.append(Echo())
        return made[-1]

    def on_end(_trajectory):
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        run(run_many(make, stop, [Episode(TASK)] * 8, concurrency=2, on_end=on_end))
    assert all(env.closed == 1 for env in made)


def test_one_environment_given_twice_is_refused():
    class Slow(Echo):
        def step(self, action):
            time.sleep(0.2)  # the first place still holds it when the second is given it
            return super().step(action)

    env = Slow()
    with pytest.raises(ValueError, match="must make a new one on every call"):
        run(run_many(lambda: env, stop, [Episode(TASK)] * 4, concurrency=2))


@pytest.mark.parametrize("bad", [{"concurrency": 0}, {"retries": -1}])
def test_settings_out_of_range_are_refused(bad):
    with pytest.raises(ValueError, match="at least"):
        run(run_many(Echo, stop, [Episode(TASK)], **bad))


def test_limits_out_of_range_are_refused():
    with pytest.raises(ValueError, match="step_timeout must be positive"):
        Limits(step_timeout=0)


def test_a_step_may_take_as_long_as_the_environment_says():
    """At least a minute, unless the caller sets another limit."""
    slow, quick = Echo(), Echo()
    slow.step_seconds, quick.step_seconds = 900.0, 5.0
    assert [Limits().step_limit(env) for env in (Echo(), quick, slow)] == [60.0, 60.0, 900.0]
    assert [Limits(step_timeout=limit).step_limit(slow) for limit in (2.0, None)] == [2.0, None]


def test_a_stuck_environment_is_not_used_again():
    env = Faulty()

    async def twice():
        await run_episode(env, stop(), Task("t", answer="hang"), limits=QUICK)
        return await run_episode(env, stop(), Task("u"), limits=QUICK)

    assert "still in an earlier call" in run(twice()).error


def test_the_expert_plays_the_environment_that_runs():
    made = []

    def make():
        made.append(Echo())
        return made[-1]

    out = run(run_many(make, lambda _: ExpertPolicy(), [Episode(Task(str(i))) for i in range(6)], concurrency=3))
    assert [t.success for t in out] == [1.0] * 6


def test_threads_end_with_their_environments():
    before = threading.active_count()
    run(run_many(Echo, stop, [Episode(Task(str(i))) for i in range(20)], concurrency=20))
    deadline = time.monotonic() + 60
    while threading.active_count() > before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert threading.active_count() <= before


def test_an_abandoned_thread_does_not_keep_the_process_alive(tmp_path):
    import subprocess
    import sys

    script = tmp_path / "hang.py"
    script.write_text(
        "import asyncio, threading\n"
        "from agentgym.core.env import Env\nfrom agentgym.core.messages import user\n"
        "from agentgym.policies.base import ScriptedPolicy\nfrom agentgym.rollout.episode import *\nfrom agentgym.core.tasks import Task\n"
        "class Hang(Env):\n"
        "    def reset(self, *, seed=None, options=None):\n"
        "        threading.Event().wait()\n"
        "limits = Limits(reset_timeout=0.2, close_timeout=0.2)\n"
        "out = asyncio.run(run_many(Hang, lambda e: ScriptedPolicy([]), [Episode(Task('t'))], limits=limits, retries=0))\n"
        "print(out[0].error)\n"
    )
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=30, check=True)
    assert "reset took longer than its limit of 0.2 s" in done.stdout


def test_the_task_of_the_next_episode_is_prepared_before_one_is_played():
    told = []

    class Prepared(Echo):
        def prepare(self, task):
            told.append(task.id)

        def init(self, task):
            super().init(task)
            told.append(f"init {task.id}")

    episodes = [Episode(Task(name)) for name in "abc"]
    asyncio.run(run_many(Prepared, lambda episode: ExpertPolicy(), episodes, concurrency=1))
    assert told == ["b", "init a", "c", "init b", "init c"]


def test_an_environment_that_hangs_as_it_prepares_a_task_is_not_used_again():
    made, gate = [], threading.Event()

    class Hangs(Echo):
        def __init__(self):
            super().__init__()
            made.append(self)

        def prepare(self, task):
            if self is made[0]:
                gate.wait(30)

    episodes = [Episode(Task(name)) for name in "abc"]
    limits = Limits(init_timeout=0.2, close_timeout=0.2)
    played = run_many(Hangs, lambda episode: ExpertPolicy(), episodes, concurrency=1, limits=limits, retries=0)
    ended = asyncio.run(played)
    gate.set()
    assert [trajectory.end for trajectory in ended] == ["error", "terminated", "terminated"]
    assert "prepare took longer than its limit of 0.2 s" in ended[0].error


def test_an_environment_that_is_made_too_late_is_closed():
    gate, closed = threading.Event(), threading.Event()

    class Late(Echo):
        def __init__(self):
            gate.wait(30)
            super().__init__()

        def close(self):
            super().close()
            closed.set()

    limits = Limits(init_timeout=0.1, close_timeout=0.1)
    (ended,) = asyncio.run(run_many(Late, lambda e: ExpertPolicy(), [Episode(Task("a"))], limits=limits, retries=0))
    gate.set()
    assert ended.failed
    assert closed.wait(30)


@pytest.mark.parametrize(("seconds", "failed"), [(None, True), (30.0, False)])
def test_an_environment_may_say_that_its_init_takes_long(seconds, failed):
    class Slow(Echo):
        init_seconds = seconds

        def init(self, task):
            time.sleep(0.5)
            super().init(task)

    played = asyncio.run(run_episode(Slow(), ExpertPolicy(), TASK, limits=Limits(init_timeout=0.1)))
    assert played.failed == failed
