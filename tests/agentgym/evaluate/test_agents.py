"""Specs of agents, and the policies that they make."""

import asyncio
import json
import re
import sys
import threading
import time

import pytest

import agentgym
from agentgym import Env, Task
from agentgym.core.messages import user
from agentgym.evaluate import agents
from agentgym.evaluate.agents import AgentError, check_plays, located, policy_maker, python
from agentgym.evaluate.plan import AgentSpec
from agentgym.policies.base import EndEpisode, EndpointUsage, NullPolicy
from agentgym.policies.chat import ChatPolicy
from agentgym.rollout.episode import Episode, run_episode, run_many

HELLO = [user("hello")]
EPISODE = Episode(Task("t"), 1, 8)


def answer(spec, episode=EPISODE, messages=HELLO, tools=()):
    return asyncio.run(policy_maker(spec)(episode).act(messages, tools)).message


ALL = [
    agents.chat("m", "http://x/v1", temperature=0.5, extra={"top_p": 1}, stream=True),
    agents.chat("m", serve="folder"),
    agents.built_in("expert", 0.1),
    agents.built_in("random"),
    agents.built_in("null"),
    agents.scripted(["a", {"role": "assistant", "content": "b"}]),
    agents.scripted({"t": ["a"]}),
    agents.python("agentgym.policies.base:NullPolicy"),
]


@pytest.mark.parametrize("spec", ALL, ids=lambda spec: spec.kind)
def test_every_spec_goes_through_json_and_makes_policies(spec):
    again = AgentSpec(**json.loads(json.dumps(vars(spec))))
    assert again == spec
    if "serve" in spec.settings:
        spec = located(spec, "http://127.0.0.1:1/v1")
    make = policy_maker(spec)
    assert make(EPISODE) is not make(EPISODE)


def test_a_chat_asks_with_a_seed_that_depends_on_seed_and_task():
    make = policy_maker(agents.chat("m", "http://x/v1", max_tokens=5))
    policy = make(EPISODE)
    assert isinstance(policy, ChatPolicy)
    assert policy.fields.keys() == {"model", "max_tokens", "seed"}
    others = [make(Episode(Task(task), 0, seed)) for seed in (1, 2) for task in ("t", "u")]
    assert len({each.fields["seed"] for each in others}) == 4
    assert make(EPISODE).fields["seed"] == policy.fields["seed"]


def test_random_play_depends_on_seed_task_and_sample_alone():
    def played(seed, sample=0, task="t"):
        policy = policy_maker(agents.built_in("random"))(Episode(Task(task), sample, seed + sample))
        policy.attach(agentgym.make("frozen_lake"), None)
        return policy.rng.random()

    assert played(3) == played(3)
    assert len({played(3), played(4), played(3, 1), played(3, 0, "u")}) == 4


def test_scripts_are_for_all_tasks_or_by_task():
    assert answer(agents.scripted(["a"]))["content"] == "a"
    by_task = agents.scripted({"t": ["mine"], "u": ["other"]})
    assert answer(by_task)["content"] == "mine"
    with pytest.raises(EndEpisode, match="script"):
        answer(by_task, Episode(Task("no script")))


def test_scripts_come_from_files(tmp_path):
    (tmp_path / "lines.txt").write_text("right\ndown\n")
    (tmp_path / "tasks.json").write_text('{"t": ["x"]}')
    spec = agents.scripted_file(tmp_path / "lines.txt")
    assert (spec.name, spec.settings["answers"]) == ("lines", ["right", "down"])
    assert answer(agents.scripted_file(tmp_path / "tasks.json"))["content"] == "x"
    (tmp_path / "bad.json").write_text("{")
    (tmp_path / "number.json").write_text("3")
    for name, words in (
        ("none.txt", "No such file"),
        ("bad.json", "not valid JSON"),
        ("number.json", "a list of answers"),
    ):
        with pytest.raises(ValueError, match=words):
            agents.scripted_file(tmp_path / name)


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        (AgentSpec("a", "chta"), "no kind 'chta', only chat, expert"),
        (
            AgentSpec("a", "chat", {"model": "m", "base_url": "http://x", "tempratur": 1}),
            "unexpected keyword argument 'tempratur'",
        ),
        (AgentSpec("a", "chat", {"base_url": "http://x"}), "argument: 'model'"),
        (agents.chat("m"), "base_url of its endpoint is missing"),
        (agents.chat("m", serve="folder"), "folder, which is not served yet"),
        (agents.chat("m", "localhost:80"), "did you mean http://localhost:80"),
        (agents.chat("m", "http://x", timeout=0), "timeout must be positive"),
        (agents.chat("m", "http://x", timeout=float("nan")), "timeout must be positive"),
        (agents.built_in("expert", 2), "chance from 0 to 1"),
        (agents.scripted(["a", 3]), "the script's answer 2"),
        (AgentSpec("a", "scripted", {"answers": {"t": "abc"}}), "a list of answers"),
    ],
)
def test_what_cannot_play_is_said_before_anything_is_played(spec, words):
    with pytest.raises(ValueError, match=words):
        policy_maker(spec)


def test_an_environment_without_an_expert_is_named():
    class Plain(Env):
        pass

    for spec, method in ((agents.built_in("expert"), "expert_action"), (agents.built_in("random"), "random_action")):
        with pytest.raises(ValueError, match=rf"cannot play Plain: it has no {method}\(\)"):
            check_plays(spec, Plain())
    check_plays(agents.built_in("null"), Plain())
    check_plays(agents.built_in("expert"), agentgym.make("frozen_lake"))


# ---- the user's own, in Python

OWN = """
import asyncio, threading, time
from agentgym import Reply
from agentgym.policies.base import EndpointUsage, EndEpisode

def plain(messages): return "plain " + messages[-1]["content"]
def with_tools(messages, tools): return f"{len(tools)} tools"
def by_keyword(messages, *, tools=()): return "keyword"
def with_setting(messages, word="default"): return word
async def later(messages, tools):
    await asyncio.sleep(0)
    return {"role": "assistant", "content": "later"}
def makes_coroutine(messages): return later(messages, [])
def replies(messages): return Reply({"role": "assistant", "content": "reply"}, usage={"prompt_tokens": 3})
class Pydantic:
    def model_dump(self, exclude_none): return {"role": "assistant", "content": "model"}
def dumps(messages): return Pydantic()
TOGETHER = threading.Barrier(20)
def slow(messages): TOGETHER.wait(60); return threading.current_thread().name
def writes(messages): messages[0]["content"] = "overwritten"; return "wrote"

class Counting:
    def __init__(self, start=0): self.count, self.calls = start, EndpointUsage()
    def act(self, messages):
        self.count += 1; self.calls.requests += 1
        return str(self.count)
class Async:
    def __init__(self, word): self.word, self.loop = word, asyncio.get_running_loop()
    async def act(self, messages, tools): return self.word
class Static:
    @staticmethod
    def act(messages, tools): return f"static {len(tools)}"
class OfClass:
    @classmethod
    def act(cls, messages): return cls.__name__
class Called:
    def __call__(self, messages): return "called"
class Attached:
    def attach(self, env, call): self.env = env
    async def act(self, messages, tools): return self.env.expert_action()
shared = Counting(10)

def breaks(messages): return inner({})
def inner(given): return given["no"]
async def breaks_later(messages): raise RuntimeError("two\\nlines")
def leaves(messages): raise SystemExit(3)
def gives_up(messages): raise EndEpisode("enough")
def nothing(messages): pass
def three(a, b, c): pass
class NoAct: pass
class CannotBeMade:
    def __init__(self): raise OSError("no licence")
    def act(self, messages): pass
number = 3
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
    """A module of the user's in the current directory, which is in no path."""
    name = f"own_agents_{abs(hash(str(tmp_path)))}"
    (tmp_path / f"{name}.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [p for p in sys.path if p])
    return lambda target, **kwargs: python(f"{name}:{target}", kwargs)


@pytest.mark.parametrize(
    ("target", "kwargs", "said"),
    [
        ("plain", {}, "plain hello"),
        ("with_tools", {}, "2 tools"),
        ("by_keyword", {}, "keyword"),
        ("with_setting", {}, "default"),
        ("with_setting", {"word": "given"}, "given"),
        ("later", {}, "later"),
        ("makes_coroutine", {}, "later"),
        ("replies", {}, "reply"),
        ("dumps", {}, "model"),
        ("Counting", {}, "1"),
        ("Counting", {"start": 5}, "6"),
        ("Async", {"word": "async"}, "async"),
        ("Static", {}, "static 2"),
        ("OfClass", {}, "OfClass"),
        ("Called", {}, "called"),
        ("shared", {}, "11"),
    ],
)
def test_functions_classes_and_objects_are_agents(own, target, kwargs, said):
    assert answer(own(target, **kwargs), tools=[{}, {}]) == {"role": "assistant", "content": said}


def test_a_class_is_made_for_each_episode_and_an_object_is_shared(own):
    async def go(spec):
        make = policy_maker(spec)
        policies = [make(EPISODE), make(EPISODE)]
        said = [(await p.act(HELLO, [])).message["content"] for p in policies for _ in range(2)]
        return said, policies[0].calls

    assert asyncio.run(go(own("Counting"))) == (["1", "2", "1", "2"], EndpointUsage(requests=2))
    # Whose the calls of a shared object were, nobody knows.
    assert asyncio.run(go(own("shared"))) == (["11", "12", "13", "14"], None)


def test_a_def_never_blocks_the_others_and_its_threads_end(own):
    before = threading.active_count()
    make = policy_maker(own("slow"))

    async def go():
        policies = [make(EPISODE) for _ in range(20)]
        return await asyncio.gather(*(policy.act(HELLO, []) for policy in policies))

    names = {reply.message["content"] for reply in asyncio.run(go())}
    assert all("slow" in name for name in names)
    deadline = time.monotonic() + 60
    while threading.active_count() > before:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_what_an_agent_writes_into_its_messages_stays_its_own(own):
    messages = [user("kept")]
    answer(own("writes"), messages=messages)
    assert messages == [user("kept")]


def test_an_agent_may_want_to_know_its_environment(own):
    trajectory = asyncio.run(run_episode(agentgym.make("frozen_lake"), policy_maker(own("Attached"))(EPISODE), seed=3))
    assert trajectory.success


@pytest.mark.parametrize(
    ("target", "words", "line", "function"),
    [
        ("breaks", "KeyError: 'no'", 'return given["no"]', "inner"),
        ("breaks_later", "RuntimeError: two lines", "raise RuntimeError", "breaks_later"),
        ("leaves", "SystemExit: 3", "raise SystemExit", "leaves"),
        ("CannotBeMade", "OSError: no licence", "raise OSError", "__init__"),
    ],
)
def test_what_an_agent_raises_fails_its_episode_and_names_the_place(own, target, words, line, function):
    make = policy_maker(own(target))
    episodes = [Episode(task) for task in agentgym.spec("frozen_lake").tasks("test").take(3)]
    found = asyncio.run(run_many(lambda: agentgym.make("frozen_lake"), make, episodes, retries=0))
    number = next(i for i, text in enumerate(OWN.splitlines(), start=1) if line in text)
    for trajectory in found:
        assert trajectory.failed
        assert "turn 0: act failed after" in trajectory.error
        assert re.search(rf"{words} \(own_agents_\d+\.py:{number} in {function}\)$", trajectory.error), trajectory.error


def test_an_answer_that_is_none_is_a_failure_too(own):
    with pytest.raises(
        AgentError, match=r"own_agents_\d+:nothing answered with no text, message, completion or Reply: .*NoneType"
    ):
        answer(own("nothing"))


def test_an_agent_may_end_its_episode(own):
    with pytest.raises(EndEpisode, match="enough"):
        answer(own("gives_up"))


@pytest.mark.parametrize(
    ("target", "kwargs", "words"),
    [
        ("plian", {}, "has no 'plian'; it has .*plain"),
        ("three", {}, r"must take \(messages\) or \(messages, tools\): missing a required argument: 'c'"),
        ("plain", {"word": 1}, "unexpected keyword argument 'word'"),
        ("Counting", {"begin": 1}, "Counting cannot be made: got an unexpected keyword argument 'begin'"),
        ("Async", {}, "missing a required argument: 'word'"),
        ("shared", {"start": 1}, "an object, not a class"),
        ("number", {}, "a function or something with act"),
        ("NoAct", {}, r"class NoAct has no act\(messages, tools\)"),
    ],
)
def test_a_target_that_does_not_fit_is_said_at_once(own, target, kwargs, words):
    with pytest.raises(ValueError, match=words):
        policy_maker(own(target, **kwargs))


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("no_such_module_at_all:run", "there is no module 'no_such_module_at_all'"),
        ("agentgym.no_such:run", "there is no module 'agentgym.no_such'"),
        ("needs_more:run", "needs 'not_installed_at_all', which is not installed"),
        ("half_written:run", r"importing it failed: SyntaxError: .* \(half_written\.py:2\)"),
        ("raises:run", r"importing it failed: ZeroDivisionError: division by zero \(raises\.py:1 in <module>\)"),
        ("my/agent.py:run", r"write my\.agent:run for a file my/agent\.py"),
        ("run", "write package.module:name"),
        ("a:b:c", "write package.module:name"),
    ],
)
def test_a_module_that_cannot_be_imported_is_said_at_once(target, words, tmp_path, monkeypatch):
    (tmp_path / "needs_more.py").write_text("import not_installed_at_all\n")
    (tmp_path / "half_written.py").write_text("\ndef run(:\n")
    (tmp_path / "raises.py").write_text("1 / 0\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", list(sys.path))
    with pytest.raises(ValueError, match=words):
        policy_maker(python(target))


def test_an_agent_named_by_value_needs_no_file():
    assert isinstance(policy_maker(agents.built_in("null"))(EPISODE), NullPolicy)
    assert answer(python("agentgym.policies.base:NullPolicy"))["content"] == ""
