"""The contract: environments with `def` methods, with `async def` ones, and with some of each."""

import asyncio
import threading

import pytest

from agentgym import AsyncEnv, Blocking, Env, ScriptedPolicy, Task, TaskSet, Wrapper, run_episode, user
from agentgym.core.env import is_async

TASKS = TaskSet([Task(f"t{number}") for number in range(50)])


class Echo(Env):
    def __init__(self):
        super().__init__(TASKS, max_turns=3)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed, options=options)
        return [user(f"say something, {self.task.id}")], {}

    def step(self, action):
        return self.outcome(self.read(action), 1.0, terminated=action == "bye")


class AsyncEcho(AsyncEnv):
    def __init__(self):
        super().__init__(TASKS, max_turns=3)
        self.seen = set()

    async def init(self, task):
        self._see()
        await super().init(task)

    async def reset(self, *, seed=None, options=None):
        await super().reset(seed=seed, options=options)
        self._see()
        return [user(f"say something, {self.task.id}")], {}

    async def step(self, action):
        self._see()
        return self.outcome(self.read(action), 1.0, terminated=action == "bye")

    def _see(self):
        self.seen.add((asyncio.current_task(), threading.get_ident()))


class Mixed(Echo):
    """`async def step`, the others `def`."""

    async def step(self, action):
        self.step_thread = threading.get_ident()
        return super().step(action)

    def reset(self, *, seed=None, options=None):
        self.reset_thread = threading.get_ident()
        return super().reset(seed=seed, options=options)


class Doubled(Wrapper):
    """Written for environments with `def` methods."""

    def step(self, action):
        observation, reward, *rest = super().step(action)
        return observation, 2 * reward, *rest


class AsyncDoubled(Wrapper):
    async def step(self, action):
        observation, reward, *rest = await super().step(action)
        return observation, 2 * reward, *rest


def test_a_class_knows_which_of_its_methods_are_async():
    assert Echo.async_methods == frozenset()
    assert AsyncEcho.async_methods == {"init", "reset", "step", "cut_off", "close"}
    assert Mixed.async_methods == {"step"}


def test_an_async_environment_with_a_plain_method_is_refused():
    with pytest.raises(TypeError, match="Half is an AsyncEnv: step must be `async def`"):

        class Half(AsyncEnv):
            def step(self, action):
                return self.outcome("")


def test_a_set_without_tasks_has_none_to_draw():
    with pytest.raises(ValueError, match="Env: mine/train has no task to draw: bind one"):
        Env(tasks=TaskSet([], name="mine/train")).reset(seed=0)


def test_a_task_set_is_no_list_as_a_command_line_would_give():
    with pytest.raises(TypeError, match="tasks must be a TaskSet, not a list"):
        Env(tasks=["t1"])


@pytest.mark.parametrize("turns", [0, "3", float("nan")])
def test_turns_are_a_number_of_at_least_one(turns):
    with pytest.raises(ValueError, match="max_turns must be a number of at least 1, not"):
        Env(max_turns=turns)


def test_a_class_without_a_number_of_turns_is_told():
    class Endless(Echo):
        def __init__(self):
            super().__init__()
            self.max_turns = None

    env = Endless()
    env.reset(seed=0)
    with pytest.raises(ValueError, match=r"Endless\.max_turns must be a number of at least 1, not None"):
        env.step("hello")


def test_an_async_environment_draws_its_task_as_a_plain_one_does():
    async def drawn(env):
        return [(await env.reset(seed=seed))[0] for seed in range(5)]

    plain = Echo()
    assert asyncio.run(drawn(AsyncEcho())) == [plain.reset(seed=seed)[0] for seed in range(5)]
    blocking = Blocking(AsyncEcho())
    assert [blocking.reset(seed=seed)[0] for seed in range(5)] == [plain.reset(seed=seed)[0] for seed in range(5)]
    blocking.close()


def test_a_task_that_was_bound_stays_if_init_alone_is_async():
    class Half(Echo):
        async def init(self, task):
            super().init(task)

    blocking = Blocking(Half())
    blocking.init(Task("mine"))
    blocking.reset(seed=1)
    assert blocking.task.id == "mine"
    blocking.reset(options={"task": Task("other")})
    assert blocking.task.id == "other"
    drawn = Blocking(Half())
    ids = [drawn.reset(seed=seed) and drawn.task.id for seed in range(5)]
    assert len({*ids}) > 1, "a task that was drawn is drawn again"


def test_the_loop_runs_async_methods_in_one_task_and_plain_ones_in_a_thread():
    env, mixed = AsyncEcho(), Mixed()
    for each in (env, mixed):
        assert asyncio.run(run_episode(each, ScriptedPolicy(["a", "bye"]), Task("t"))).reward == 2.0
    assert [thread for _, thread in env.seen] == [threading.get_ident()]
    assert mixed.step_thread == threading.get_ident() != mixed.reset_thread


@pytest.mark.parametrize(
    ("make", "reward"),
    [
        (lambda: Doubled(Echo()), 4.0),
        (lambda: AsyncDoubled(AsyncEcho()), 4.0),
        (lambda: Wrapper(AsyncEcho()), 2.0),
        (lambda: Wrapper(AsyncDoubled(Mixed())), 4.0),
        (lambda: Blocking(AsyncEcho()), 2.0),
    ],
)
def test_wrapped_environments_are_played(make, reward):
    env = make()
    done = asyncio.run(run_episode(env, ScriptedPolicy(["a", "bye"]), Task("t")))
    assert (done.error, done.reward) == (None, reward)
    assert is_async(env, "step") is (not isinstance(env, Doubled | Blocking))
