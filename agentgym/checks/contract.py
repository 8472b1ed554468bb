"""Checks of the contract: values, episodes that repeat, any action, the end, closing, tools, tasks."""

import itertools
import json
import re
import time
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from gymnasium.utils.env_checker import check_env as gymnasium_check

from agentgym.checks.findings import Finding, note, ok, problem, said
from agentgym.checks.subject import MAX_STEPS, Played, Subject, problems_of
from agentgym.core.env import Blocking
from agentgym.core.messages import Action
from agentgym.core.tasks import Task, TaskSet

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


async def values(subject: Subject, alone: list[Played]) -> list[Finding]:
    """Three random episodes return valid values. Later checks compare with them."""
    for seed in SEEDS:
        alone.append(await subject.play(seed))
    texts = dict.fromkeys(text for played in alone for text in played.problems)
    return [finding for text in texts for finding in problem(text)]


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
    found = []
    raised: dict[tuple[str, str], list[Action]] = {}
    for action in _ACTIONS:
        await subject.reset(1)
        try:
            observation, reward, _, _, info = await subject.step(action)
        except Exception as error:
            raised.setdefault((said(error), subject.home.place_of(error)), []).append(action)
        else:
            found += [finding for text in problems_of(observation, reward, info) for finding in problem(text)]
    for (error_text, place), actions in raised.items():
        others = f" and {len(actions) - 1} other(s)" if len(actions) > 1 else ""
        text = f"step raises for the action {actions[0]!r:.80}{others} ({error_text}): answer what you cannot read, do not raise"
        found += problem(text, place)
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
    fresh = [(await subject.another(), "before any reset")] if subject.spec is not None else []
    for one, when in (*fresh, (subject, "twice")):
        try:
            if one is subject:
                await one.call("close", one.env.close)
            await one.call("close", one.env.close)
            await one.close()
        except Exception as error:
            text = f"close() must be callable {when}; it raised {said(error)}"
            found += problem(text, one.home.place_of(error))
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
    return [finding for text in texts for finding in problem(f"{text}; ToolSet([...]).schemas makes valid ones")]


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
    for split in SPLITS:

        def first(split: str = split) -> tuple[list[Task], int]:
            tasks = tasks_of(subject, split)
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


def tasks_of(subject: Subject, split: str) -> TaskSet:
    source = subject.spec.tasks if subject.spec is not None else subject.bare.default_tasks
    try:
        return source(split)
    except ValueError:
        return TaskSet([])


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
        return problem(text, subject.home.place_of(error))
    return []
