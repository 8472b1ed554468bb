"""The checks, one function each: values, repeated episodes, any action, the end, closing, tools, tasks; and that an environment shares
nothing with its process and other environments, repeats elsewhere, and leaks no memory.
"""

import asyncio
import gc
import itertools
import json
import os
import pickle
import random
import re
import sys
import time
import tracemalloc
import warnings
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
from gymnasium.utils.env_checker import check_env as gymnasium_check

from agentgym.checks.subject import MAX_STEPS, Finding, Played, Subject, note, ok, problem, problems_of, said
from agentgym.core.env import Blocking
from agentgym.core.messages import Action
from agentgym.core.registration import EnvSpec, registry
from agentgym.core.tasks import Task, TaskSet
from agentgym.rollout.episode import Episode, Limits
from agentgym.rollout.replays import ElsewhereError, replay_elsewhere
from agentgym.rollout.replays import shown as shown_by
from agentgym.service.client.address import REMOTE_ENV, Full

SPLITS = ("train", "validation", "test")
SEEDS = (11, 12, 13)
_TOOL_CALL = {"id": "1", "type": "function", "function": {"name": "unknown", "arguments": "{"}}
_ACTIONS: tuple[Action, ...] = (
    "",
    "  \n\t ",
    "héllo wörld 漢字 🙂 \u202eabc",
    '{"a": [',
    "\x00\x07",
    "\ud83d",  # half of a surrogate pair
    "x" * 10_000,
    {"role": "assistant", "content": [{"type": "text", "text": "parts"}]},
    {"role": "assistant", "content": None, "tool_calls": [_TOOL_CALL]},
)
_SOLE = "not looked at: the server allows no second session beside this one"
_AN_OBJECT = "not looked at: the environment was given as an object without a spec"
_MEMORY_RESETS, _MEMORY_SECONDS, _MEMORY_GROWTH = 60, 2.0, 50_000  # bytes that each reset may keep
_DRAWS = re.compile(r"random\.(random|randint|randrange|choice|choices|shuffle|sample|uniform|seed|gauss|rand)\(")
_SETTINGS = re.compile("chdir|environ")


async def values(subject: Subject, alone: list[Played]) -> list[Finding]:
    """Three random episodes return valid values. Later checks compare with them."""
    for seed in SEEDS:
        alone.append(await subject.play(seed))
    return problem(*dict.fromkeys(text for played in alone for text in played.problems))


async def repeats(subject: Subject, alone: list[Played]) -> list[Finding]:
    """The same seed and actions give the same episode, after others were played; no message is given out twice."""
    again = await subject.play(alone[0].seed, alone[0].actions)
    if difference := alone[0].difference(again):
        advice = "draw only from self.np_random and the task, and put no clock or address into observations and info"
        return problem(f"two episodes with the same seed and actions differ {difference}: {advice}")
    if {id(message) for message in alone[0].opening} & {id(message) for message in again.opening}:
        advice = "copy the task's messages, [dict(m) for m in task.messages]"
        return problem(f"reset() returns the same message dicts twice: {advice}")
    return []


async def any_action(subject: Subject, alone: list[Played]) -> list[Finding]:
    """A model may say anything: step answers it and does not raise."""
    found: list[Finding] = []
    raised: dict[tuple[str, str], list[Action]] = {}
    for action in _ACTIONS:
        await subject.reset(1)
        try:
            observation, reward, _, _, info = await subject.step(action)
        except Exception as error:
            raised.setdefault((said(error), subject.home.place_of(error)), []).append(action)
        else:
            found += problem(*problems_of(observation, reward, info))
    for (error_text, place), actions in raised.items():
        others = f" and {len(actions) - 1} other(s)" if len(actions) > 1 else ""
        text = f"step raises for the action {actions[0]!r:.80}{others} ({error_text}): answer what you cannot read, do not raise"
        found += problem(text, place=place)
    return list(dict.fromkeys(found))


async def end(subject: Subject, alone: list[Played]) -> list[Finding]:
    """An episode ends, and a step after its end raises."""
    if endless := [played for played in alone if not played.ended]:
        steps = len(endless[0].actions)
        if steps >= MAX_STEPS:
            return problem(f"no end after {MAX_STEPS} steps: set max_turns and return self.outcome(...) from step")
        return note(f"a random episode was left after {subject.timeout:g} s and {steps} steps, not ended")
    played = await subject.play(alone[0].seed, alone[0].actions)
    if not played.ended:
        return []  # `repeats` has said so
    try:
        await subject.step("x")
    except Exception:
        return []
    return problem("step() after the end of an episode must raise: begin step with `text = self.read(action)`")


async def rewards(subject: Subject, alone: list[Played]) -> list[Finding]:
    text = f"{len(alone)} random episodes earned {spread([sum(played.rewards) for played in alone], ' each')}"
    if any(played.ended and played.success is None for played in alone):
        missing = "info has no 'success' on the last step"
        return note(f"{text}; {missing}, so that an episode with a positive reward counts as a success")
    return ok(f"{text}, {sum(played.success is True for played in alone)} of them a success")


def spread(rewards: Sequence[float], each: str = "") -> str:
    low, high = min(rewards), max(rewards)
    return f"{low:g}{each}" if low == high else f"{low:g} to {high:g}"


async def close(subject: Subject, alone: list[Played]) -> list[Finding]:
    """An environment can be closed twice, and without a reset."""
    found = []
    given = subject.spec
    fresh = [(await Subject.made(given, subject.timeout), "before any reset")] if given is not None else []
    for one, when in (*fresh, (subject, "twice")):
        try:
            if one is subject:
                await one.call("close", one.env.close)
            await one.call("close", one.env.close)
            await one.close()
        except Exception as error:
            text = f"close() must be callable {when}; it raised {said(error)}"
            found += problem(text, place=one.home.place_of(error))
    return found


async def tools(subject: Subject, alone: list[Played]) -> list[Finding]:
    schemas = subject.env.get_wrapper_attr("tools")
    if not isinstance(schemas, list):
        return problem(f"tools must be a list of schemas, not {type(schemas).__name__}: tools = ToolSet([...]).schemas")
    texts = [f"tool {index}: {wrong}" for index, schema in enumerate(schemas) if (wrong := _wrong_with_tool(schema))]
    names = [schema["function"]["name"] for schema in schemas] if not texts else []
    texts += [f"two tools are called {name!r}: rename one" for name in dict.fromkeys(names) if names.count(name) > 1]
    if not texts:
        return ok(", ".join(names) or "none")
    return problem(*(f"{text}; ToolSet([...]).schemas makes valid ones" for text in texts))


def _wrong_with_tool(schema: Any) -> str:
    try:
        json.dumps(schema, allow_nan=False)
        function = schema["function"]
        parameters = function.get("parameters", {"type": "object", "properties": {}})
        if schema.get("type") != "function":
            return f"its type must be 'function', not {schema.get('type')!r}"
        if not isinstance(function["name"], str) or not re.fullmatch(r"[A-Za-z0-9_-]{1,64}", function["name"]):
            return f"its name must be 1 to 64 letters, digits, _ or -, not {function['name']!r:.100}"
        if not isinstance(function.get("description"), str) or not function["description"].strip():
            return f"{function['name']} has no description: it is what the agent reads about the tool"
        if parameters.get("type") != "object" or not isinstance(parameters.get("properties", {}), dict):
            return f"the parameters of {function['name']} must be a JSON schema of type 'object' with properties"
        strangers = set(parameters.get("required", ())) - set(parameters.get("properties", {}))
        if strangers:
            return f"{function['name']} requires {min(strangers)!r}, which is none of its properties"
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        return f"is no schema of the OpenAI form ({said(error)}): {schema!r:.100}"
    return ""


async def tasks(subject: Subject, alone: list[Played]) -> list[Finding]:
    """The first tasks of each split are JSON, their ids unique, and no id is in two splits."""
    owner: dict[str, str] = {}
    read: dict[str, tuple[list[Task], int]] = {}
    source = subject.spec.tasks if subject.spec is not None else subject.bare.default_tasks
    for split in SPLITS:

        def first(split: str = split) -> tuple[list[Task], int]:
            try:
                tasks = source(split)
            except ValueError:
                return [], 0
            return first_tasks(tasks, 2_000, min(2.0, subject.timeout / 2)), len(tasks)

        read[split] = await subject.call(f"tasks of the split {split!r}", first)
        for task in read[split][0]:
            if wrong := _wrong_with_task(task, split, owner):
                return problem(wrong)
    sizes = sizes_of({split: found for split, found in read.items() if found[1]})
    if not sizes:
        return note("it has no task set: default_tasks(split) or tasks= of register gives it train and test")
    return ok(sizes) if read["test"][1] else note(sizes)


def _wrong_with_task(task: Any, split: str, owner: dict[str, str]) -> str:
    if not isinstance(task, Task):
        return f"split {split!r} has a {type(task).__name__} that is no agentgym.Task: {task!r:.100}"
    if task.id in owner:
        return f"task id {task.id!r} of split {split!r} is in {owner[task.id]!r} already: ids are unique"
    owner[task.id] = split
    try:
        same = Task.from_json(json.loads(json.dumps(task.to_json(), allow_nan=False))).to_json() == task.to_json()
    except (TypeError, ValueError) as error:
        return f"task {task.id!r} is no plain JSON ({said(error)}): use lists, numbers and texts"
    return "" if same else f"task {task.id!r} changes on its way through JSON: use lists and text keys, no tuples"


def first_tasks(tasks: TaskSet, most: int, seconds: float) -> list[Task]:
    until = time.monotonic() + seconds
    return list(itertools.takewhile(lambda _: time.monotonic() < until, itertools.islice(tasks, most)))


def sizes_of(read: Mapping[str, tuple[list[Task], int]]) -> str:
    """The sizes of splits in words, given the tasks of each that were read, and their number in all."""
    parts = (
        f"{split} {total:,}" + (f" ({len(tasks):,} read)" if len(tasks) < total else "")
        for split, (tasks, total) in read.items()
    )
    return ", ".join(parts)


async def gymnasium(subject: Subject, alone: list[Played]) -> list[Finding]:
    """Gymnasium's own check."""

    def run() -> None:
        env = Blocking(subject.bare) if subject.is_async else subject.bare
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                gymnasium_check(env, skip_render_check=subject.is_async, skip_close_check=True)
        finally:
            if env is not subject.bare:
                env.release()

    try:
        await subject.call("Gymnasium's check", run, patience=5.0)
    except Exception as error:
        text = f"gymnasium.utils.env_checker.check_env says {said(error)}"
        return problem(text, place=subject.home.place_of(error))
    return []


async def spec(subject: Subject, alone: list[Played]) -> list[Finding]:
    """The spec can be sent to other processes, and describes the environment."""
    given = subject.spec
    if given is None:
        advice = "give an id or module:Class, to see whether others like it can be made elsewhere"
        return note(f"it was given as an object: {advice}")
    if _lives_in_a_script(given):
        return note("it lives in the script that runs: no other process can make it until it is moved to a module")
    try:
        again = EnvSpec.from_json(json.loads(json.dumps(given.to_json())))
        if pickle.loads(pickle.dumps(given)) != given or again != given:
            text = f"the spec is another one after pickle or JSON: use plain JSON values as kwargs, not {dict(given.kwargs)}"
            return problem(text)
    except Exception as error:
        advice = "define the class at the top of a module, kwargs as JSON"
        return problem(f"the spec cannot go to another process ({said(error)}): {advice}")
    if given.entry_point == REMOTE_ENV:  # its server has the registered one
        return ok(given.description)
    if given.id not in registry:
        return note("named by value, not registered: agentgym.register gives it an id and a description")
    missing = [] if given.description else ["a description: register(..., description='one line')"]
    missing += [] if _readme(subject) else ["a README.md beside its module or at the root of its package"]
    return note(f"a reader misses {' and '.join(missing)}") if missing else ok(given.description)


def _readme(subject: Subject) -> bool:
    """True if there is a README beside the environment's module, above it up to the package's root, or in its metadata."""
    kind = type(subject.bare)
    file = getattr(sys.modules.get(kind.__module__), "__file__", None)
    depth = kind.__module__.count(".") + 1
    folders = itertools.islice(Path(file).resolve().parents, depth) if file else ()
    if any(list(folder.glob("README*")) for folder in folders):
        return True
    packages = metadata.packages_distributions().get(kind.__module__.partition(".")[0], ())
    texts = [metadata.distribution(name).read_text("METADATA") or "" for name in packages]
    return any(text.partition("\n\n")[2].strip() for text in texts)  # what stands after the fields


async def seeds(subject: Subject, alone: list[Played]) -> list[Finding]:
    if len({(played.shown[0], (played.task or {}).get("id")) for played in alone}) > 1:
        return []
    count = len(await subject.call("tasks", lambda: subject.bare.tasks)) if alone[0].task is not None else 0
    if count < 2:
        return ok("one task, so every seed draws it")
    return note(f"seeds {', '.join(map(str, SEEDS))} all draw the same task, though there are {count:,} tasks")


async def process_state(subject: Subject, alone: list[Played]) -> list[Finding]:
    """The environment uses and changes no global state: random generators, working folder, environment variables."""
    own = random.getstate(), np.random.get_state()
    # States of our own, or a second seeding by the same seed would change nothing.
    random.seed("agentgym check")
    np.random.seed(20_240_229)
    before = _state()
    given = None if subject.sole else subject.spec
    another = None if given is None else await Subject.made(given, subject.timeout)
    try:
        await (another or subject).play(alone[0].seed, alone[0].actions)
        after = _state()
    finally:
        random.setstate(own[0])
        np.random.set_state(own[1])
        if another is not None:
            await another.close()
    found = []
    for name, advice in _ADVICE.items():
        if before[name] != after[name]:
            place = subject.home.line_with(type(subject.bare), _DRAWS if "random" in name else _SETTINGS)
            found += problem(f"an episode changes {name}: {advice}", place=place)
    return found


_ADVICE = {
    "Python's global random state": "draw from self.np_random or a random.Random of your own, and seed nothing global",
    "NumPy's global random state": "draw from self.np_random, and seed nothing global",
    "the current folder": "give paths in full instead: other environments run in the same process",
    "the environment variables": "pass settings as arguments instead: other environments run in the same process",
}


def _state() -> dict[str, object]:
    numpy_state = np.random.get_state(legacy=True)
    state = (random.getstate(), (str(numpy_state[1].tobytes()), numpy_state[2:]), os.getcwd(), dict(os.environ))  # type: ignore[union-attr,index]
    return dict(zip(_ADVICE, state, strict=True))


async def concurrency(subject: Subject, alone: list[Played]) -> list[Finding]:
    """Two environments in turn, and three in threads at a time, play the episodes that each played alone."""
    if subject.spec is None:
        return note(_AN_OBJECT)
    three = [await Subject.made(subject.spec, subject.timeout) for _ in SEEDS]
    try:
        in_turn = await _in_turn(three[:2], alone[:2])
        playing = (one.play(was.seed, was.actions) for one, was in zip(three, alone, strict=True))
        at_once = await asyncio.gather(*playing, return_exceptions=True)
        for how, played in (("in turn", in_turn), ("at the same time", at_once)):
            for now, was in zip(played, alone, strict=False):
                if isinstance(now, BaseException):
                    raise now
                if difference := was.difference(now):
                    advice = "keep what an episode changes in self, not in the class, the module or the task"
                    text = f"environments that play {how} play other episodes than alone, {difference}: {advice}"
                    return problem(text)
    except Full as full:
        subject.sole = True
        return note(f"{_SOLE}: {full}")
    finally:
        for one in three:
            await one.close()
    return []


async def _in_turn(envs: list[Subject], alone: list[Played]) -> list[Played]:
    going = [env.playing(was.seed, was.actions) for env, was in zip(envs, alone, strict=True)]
    played = [await anext(player) for player in going]
    while going:
        going = [player for player in going if await anext(player, None) is not None]
    return played


def _lives_in_a_script(spec: EnvSpec) -> bool:
    return getattr(spec.entry_point, "__module__", "") == "__main__"


async def other_process(subject: Subject, alone: list[Played]) -> list[Finding]:
    """Another process, in which texts have other hashes, plays the same episodes."""
    if subject.spec is None:
        return note(_AN_OBJECT)
    if _lives_in_a_script(subject.spec):
        return note("not looked at: the environment lives in the script that runs")
    if subject.sole:
        return note(_SOLE)
    if any(played.task is None for played in alone):
        return note("not looked at: the environment binds no task")
    limit = subject.timeout
    limits = Limits(init_timeout=limit, reset_timeout=limit, step_timeout=limit)
    episodes = [
        (Episode(Task.from_json(played.task or {}), sample, played.seed), played.actions)
        for sample, played in enumerate(alone)
    ]
    try:
        there = await replay_elsewhere(subject.spec, episodes, limits=limits, timeout=3 * limit + 10)
    except (ElsewhereError, ValueError, TypeError) as error:
        return problem(str(error))
    for played, trajectory in zip(alone, there, strict=True):
        if trajectory.error:
            return problem(f"another process fails to play the same episode: {trajectory.error}")
        if difference := _difference(played, shown_by(trajectory)):
            advice = "do not depend on the order of sets, on hash() or on what else was played before"
            text = f"another process plays the same task, seed and actions differently, {difference}: {advice}"
            return problem(text)
    return []


def _difference(here: Played, there: list[str]) -> str:
    ours = [json.loads(text) for text in here.shown]
    texts = [json.dumps(values[0] if turn == 0 else values[:2], ensure_ascii=False) for turn, values in enumerate(ours)]
    for turn, (one, two) in enumerate(zip(texts, there, strict=False)):
        if one != two:
            return f"at turn {turn}: {one:.120} here, {two:.120} there"
    return "" if len(texts) + 1 == len(there) else f"in length: {len(texts) - 1} turns here, {len(there) - 2} there"


async def memory(subject: Subject, alone: list[Played]) -> list[Finding]:
    if tracemalloc.is_tracing():
        return []
    task = getattr(subject.bare, "task", None)
    first = alone[0].actions[:1]
    tracemalloc.start()
    try:
        until = time.monotonic() + min(_MEMORY_SECONDS, subject.timeout / 2)
        await _again(subject, first, task, 5, until)
        gc.collect()
        before, snapshot = tracemalloc.get_traced_memory()[0], tracemalloc.take_snapshot()
        count = await _again(subject, first, task, _MEMORY_RESETS, until)
        if count < 10:
            return note(f"not looked at: only {count} resets were done in {_MEMORY_SECONDS:g} s")
        gc.collect()
        growth = (tracemalloc.get_traced_memory()[0] - before) / count
        if growth <= _MEMORY_GROWTH:
            return []
        grown = tracemalloc.take_snapshot().compare_to(snapshot, "lineno")
        lines = (line.traceback[0] for line in grown if line.size_diff > 0)
        place = subject.home.first((line.filename, line.lineno) for line in lines)
    finally:
        tracemalloc.stop()
    text = f"each of {count} resets kept {growth / 1e3:,.0f} kB more: let go in reset of what the last episode made"
    return problem(text, place=place)


async def _again(subject: Subject, actions: list[Action], task: Task | None, times: int, until: float) -> int:
    for done in range(times):
        await subject.play(1_000 + done, actions, task)
        if time.monotonic() > until:
            return done + 1
    return times
