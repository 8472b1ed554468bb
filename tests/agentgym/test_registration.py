"""Ids, versions, plugins and entry points by value."""

import json
import pickle
import subprocess
import sys
import warnings

import pytest

import agentgym
from agentgym.core import registration
from agentgym.core.env import Env, Wrapper
from agentgym.core.messages import user
from agentgym.core.registration import EnvSpec, UnknownEnvError, make, register, spec
from agentgym.core.tasks import Task, TaskSet


class Guess(Env):
    """Names itself by its size."""

    def __init__(self, size: int = 3, **kwargs):
        super().__init__(**kwargs)
        self.size = size

    @classmethod
    def default_tasks(cls, split="train", size=3):
        return TaskSet([Task(f"{split}-{size}")], name=f"guess/{split}")

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed, options=options)
        return [user("?")], {}


class NoEnv:
    pass


def make_guess(size: int = 3):
    return Guess(size)


@pytest.fixture(autouse=True)
def clean_registry():
    registration.load_plugins()
    before = dict(registration.registered_specs)
    yield
    registration.registered_specs.clear()
    registration.registered_specs.update(before)


def test_register_make_and_spec():
    register("test/guess", Guess, kwargs={"size": 4}, description="a test", tags=["x"])
    env = make("test/guess")
    assert isinstance(env, Guess)
    assert env.size == 4
    assert env.spec.id == "test/guess"
    assert make("test/guess", size=5).size == 5
    assert agentgym.registry["test/guess"] is spec("test/guess")
    assert spec("test/guess").entry_point == f"{__name__}:Guess"


def test_versions_and_namespaces():
    for name in ("v/guess-v1", "v/guess-v10", "v/guess-v2", "w/guess", "w/guess-v1"):
        register(name, Guess)
    assert spec("v/guess").id == "v/guess-v10"
    assert spec("v/guess-v2").id == "v/guess-v2"
    assert spec("w/guess").id == "w/guess-v1"
    with pytest.raises(
        UnknownEnvError, match=r"no environment 'v/guess-v3'; registered versions: v/guess-v1, v/guess-v2, v/"
    ):
        spec("v/guess-v3")
    with pytest.raises(UnknownEnvError, match=r"no environment 'guess'.*'w/guess'"):
        spec("guess")


def test_an_unknown_id_names_the_nearest():
    register("test/guess", Guess)
    with pytest.raises(UnknownEnvError, match="did you mean 'test/guess'") as caught:
        make("test/gues")
    assert isinstance(caught.value, KeyError)
    assert isinstance(caught.value, ValueError)
    with pytest.raises(UnknownEnvError, match="agentgym list"):
        make("zzzzzzzzzz")


@pytest.mark.parametrize("bad", ["", "a b", "a/b/c", "/a", "a/", "ünicode", "a:b:c"])
def test_malformed_ids_are_refused(bad):
    with pytest.raises(ValueError, match="bad environment id"):
        register(bad, Guess)
    with pytest.raises(UnknownEnvError, match="bad environment id"):
        spec(bad)


def test_the_same_registration_twice_is_one_and_another_is_refused():
    assert register("test/guess", Guess) == register("test/guess", Guess)
    with pytest.raises(ValueError, match=r"already registered, as .*Guess with \{\}"):
        register("test/guess", Guess, kwargs={"size": 9})
    with pytest.raises(ValueError, match="bad entry point 'nonsense'"):
        register("test/other", "nonsense")


def test_by_value():
    env = make(f"{__name__}:Guess", size=6)
    assert env.size == 6
    assert env.spec.id == f"{__name__}:Guess"
    assert make(f"{__name__}:make_guess", size=7).size == 7


@pytest.mark.parametrize(
    ("entry", "error", "words"),
    [
        ("no_such_module:X", ImportError, "cannot import module 'no_such_module' of 'no_such_module:X'"),
        (f"{__name__}:Missing", ImportError, f"module '{__name__}' has no 'Missing'"),
        (f"{__name__}:NoEnv", TypeError, "NoEnv is no subclass of agentgym.Env"),
        ("json:dumps", TypeError, "needs the argument 'obj'"),
        (f"{__name__}:__name__", TypeError, "neither a class nor a function"),
        ("os:getcwd", TypeError, "made a str, no agentgym.Env"),
    ],
)
def test_bad_entry_points_are_named(entry, error, words):
    register("test/bad", entry)
    with pytest.raises(error, match=words):
        make("test/bad")


def test_wrong_arguments_name_the_valid_ones():
    with pytest.raises(TypeError, match=r"takes no argument 'sise': did you mean size\? It takes tasks, max_turns"):
        make(f"{__name__}:Guess", sise=3)
    with pytest.raises(TypeError, match="takes no argument 'colour'; it takes tasks, max_turns, render_mode, size"):
        make(f"{__name__}:Guess", colour=3)


def test_a_task_set_is_loaded_with_the_environments_own_settings():
    lake = TaskSet.load("frozen_lake", "test", size=6, view="near")[0]
    assert len(lake.metadata["level"].split("\n")) == 6
    assert TaskSet.load("countdown", min_count=2, max_count=2)[0].metadata["difficulty"] == 2
    register("test/large", "agentgym_envs.games.frozen_lake:FrozenLake", kwargs={"size": 7, "holes": 0.1})
    assert TaskSet.load("test/large", size=5)[0] == TaskSet.load("frozen_lake", size=5, holes=0.1)[0]


@pytest.mark.parametrize(
    ("env_id", "settings", "words"),
    [
        ("wordle", {"word": "own"}, r"'wordle' takes no argument 'word': did you mean words\? It takes words, strict"),
        ("frozen_lake", {"tasks": []}, "'frozen_lake' takes no argument 'tasks'; it takes size, holes"),
        ("gymnasium:Taxi-v4", {"setings": {}}, "takes no argument 'setings': did you mean settings"),
        ("http://127.0.0.1:9/sokoban", {"size": 5}, "takes no argument 'size'; it takes url, token_file"),
    ],
)
def test_a_task_set_refuses_settings_that_the_environment_does_not_take(env_id, settings, words):
    with pytest.raises(TypeError, match=words):
        TaskSet.load(env_id, "test", **settings)


def test_specs_are_picklable_and_json():
    made = register("test/guess", Guess, kwargs={"size": 4}, tags=("a", "b"), tasks=Guess.default_tasks)
    assert pickle.loads(pickle.dumps(made)) == made
    assert EnvSpec.from_json(json.loads(json.dumps(made.to_json()))) == made


def test_a_class_without_an_importable_name_stays_itself():
    class Local(Guess):
        pass

    made = register("test/local", Local)
    assert made.entry_point is Local
    assert isinstance(make("test/local"), Local)
    with pytest.raises(ValueError, match="move it to the top of a module"):
        made.to_json()


def test_tasks_come_from_the_class_with_its_kwargs_or_from_a_function():
    register("test/guess", Guess, kwargs={"size": 4})
    assert [t.id for t in spec("test/guess").tasks("test")] == ["test-4"]
    assert TaskSet.load("test/guess", "train")[0].id == "train-4"
    register("test/other", Guess, tasks=lambda split: TaskSet([Task(f"own-{split}")]))
    assert spec("test/other").tasks("x")[0].id == "own-x"
    env = make("test/other")
    env.reset(seed=0)
    assert env.task.id == "own-train"
    with pytest.raises(ValueError, match="has no tasks of its own"):
        register("test/none", make_guess).tasks()
    register("test/list", Guess, tasks=lambda split: [Task("a")])
    with pytest.raises(TypeError, match="'test/list' must be a TaskSet, not a list"):
        TaskSet.load("test/list")


def test_a_wrapper_can_be_registered_and_keeps_the_spec():
    register("test/wrapped", lambda: Wrapper(Guess()))
    env = make("test/wrapped")
    assert env.spec.id == "test/wrapped"
    env.init(Task("a"))
    assert env.task.id == "a"
    assert env.tools == []


class EntryPoint:
    """Stands for an installed package's entry point."""

    def __init__(self, name, function):
        self.name, self.value, self.function = name, f"{name}:register", function

    def load(self):
        return self.function


def test_plugins_are_loaded_once_and_a_broken_one_breaks_no_other(monkeypatch):
    calls = []

    def broken():
        raise RuntimeError("needs java")

    def good():
        calls.append(1)
        register("plugin/guess", Guess)

    plugins = [EntryPoint("broken", broken), EntryPoint("good", good)]
    monkeypatch.setattr(registration.metadata, "entry_points", lambda group: plugins)
    monkeypatch.setattr(registration, "_plugins_loaded", False)
    monkeypatch.setattr(registration, "broken_plugins", {})
    with pytest.warns(
        RuntimeWarning, match=r"plugin 'broken' \(broken:register\) are missing: RuntimeError: needs java"
    ):
        assert spec("plugin/guess").id == "plugin/guess"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        spec("plugin/guess")
        with pytest.raises(UnknownEnvError, match=r"plugin 'broken' failed to load .*needs java"):
            spec("zzzzzzz")
    assert calls == [1]


HEAVY = ("torch", "ray", "transformers", "vllm", "datasets", "pyarrow")


@pytest.mark.parametrize(
    "code",
    [
        "import agentgym",
        "import agentgym.core.env, agentgym.rollout.episode, agentgym.policies.base, agentgym.evaluate, agentgym.checks.check_env, agentgym.cli",
        "import agentgym; list(agentgym.registry); agentgym.make('frozen_lake').reset(seed=1)",
        "import agentgym; [getattr(agentgym, name) for name in agentgym.__all__]",
    ],
)
def test_nothing_heavy_is_imported(code):
    check = f"{code}\nimport sys\nprint([m for m in {HEAVY!r} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"


def test_import_agentgym_is_fast():
    # CPU time and the best of three: this asks about the package, not about the machine's other work.
    code = "import time; t = time.process_time(); import agentgym; print(time.process_time() - t)"
    times = [
        float(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)
        for _ in "123"
    ]
    assert min(times) < 0.3
