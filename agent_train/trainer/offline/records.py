"""The files of the modes sft, dpo and rm: records read and checked, not yet tokens. Imports no torch.

A file is JSON Lines (gzipped if its name ends in `.gz`) or Parquet; a folder stands for the files of episodes of the run in it.
docs/training.md lists the fields of a record. Every error names the file, the line and the field.
"""

import gzip
import json
import math
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from agent_train.config.schema import Config
from agent_train.data.players import parts
from agent_train.data.samples import samples_of
from agentgym.core.messages import Message, problem_of, user
from agentgym.core.trajectory import Trajectory

Record = dict[str, Any]
Episodes = list[tuple[str, Trajectory]]  # each with its place

MESSAGES = "messages"
# Fields of a file written by people, of which a record has one.
FORMS = {
    "sft": ("messages", "prompt and completion"),
    "dpo": ("prompt (or messages), chosen and rejected",),
    "kto": ("messages and label", "prompt, completion and label"),
    "rm": ("prompt (or messages), chosen and rejected", "messages and score"),
}


class DataError(ValueError):
    """A data file that cannot be trained on. Names file, line and field."""


@dataclass(frozen=True)
class Conversation:
    """The learned part of a record: the assistant's messages in `said`, each at its place after `prompt`."""

    id: str  # its place, "train.jsonl:12"
    prompt: list[Message]  # messages that are only read; the last one is not the assistant's
    said: list[Message]  # begins and ends with the assistant's
    tools: list[dict[str, Any]] = field(default_factory=list)  # OpenAI tool schemas, which are part of the prompt
    env: str = ""  # whose tools are asked for when the prompt is written; "" where `tools` has them all


@dataclass(frozen=True)
class Example:
    """One thing to learn from: an answer, with a label or a score where its mode asks for one; or a pair, the better one first."""

    answers: tuple[Conversation, ...]
    label: bool | None = None
    score: float | None = None

    @property
    def is_pair(self) -> bool:
        return len(self.answers) == 2


def form_of(config: Config) -> str:
    """The form of a run's files, one of `FORMS`."""
    return "kto" if config.mode == "dpo" and config.data.loss == "kto" else config.mode


def read_examples(path: str | Path, form: str, min_reward: float | None = None) -> list[Example]:
    """The examples of a file (`.jsonl`, `.json`, `.jsonl.gz`, `.parquet`) or the folder of an evaluation or a run, in order.

    `form` is of `FORMS`. Episodes with less than `min_reward` are left out where whole episodes are imitated, and disliked in "kto".
    DataError: no such file, nothing in it, a broken line, a field that is missing or wrong, or examples of two kinds.
    """
    examples: list[Example] = []
    episodes: Episodes = []
    for where, record in _records(Path(path).expanduser()):
        if "turns" not in record:
            try:
                example = _example(form, record)
            except DataError as error:
                raise DataError(f"{where}: {error}") from error
            examples.append(replace(example, answers=tuple(replace(a, id=where) for a in example.answers)))
            continue
        try:
            episodes.append((where, Trajectory.from_json(record)))
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise DataError(f"{where}: turns: not an episode of agentgym: {error!r}") from error
    examples += _of_episodes(episodes, form, min_reward)
    if not examples:
        raise DataError(f"{path}: nothing to learn from: {_why_nothing(form, episodes, min_reward)}")
    first = examples[0]
    if form == "kto" and len({example.label for example in examples}) == 1:
        raise DataError(f"{path}: label: every example is {'' if first.label else 'dis'}liked: kto needs both kinds")
    if other := next((example for example in examples if example.is_pair != first.is_pair), None):
        began, then = ("a pair", "a score") if first.is_pair else ("a score", "a pair")
        raise DataError(f"{other.answers[0].id}: {then}, where the file began with {began}: use one form")
    return examples


def _why_nothing(form: str, episodes: Episodes, min_reward: float | None) -> str:
    if not episodes:
        return f"it has no record with {' or '.join(FORMS[form])}"
    if form in ("dpo", "rm"):
        return f"none of its {len(episodes)} episodes has a task that another one ended with another reward"
    best = max((e.reward for _, e in episodes if not e.failed), default=None)
    bound = "" if min_reward is None else f" and reached data.min_reward={min_reward:g} (the best: {best})"
    return f"none of its {len(episodes)} episodes was played to its end, said something{bound}"


def _records(path: Path) -> Iterator[tuple[str, Record]]:
    """Each record with its place, "FILE:LINE"."""
    for file in _files(path):
        try:
            yield from _parquet(file) if file.suffix == ".parquet" else _json_lines(file)
        except (OSError, EOFError, UnicodeDecodeError, zlib.error) as error:
            raise DataError(f"{file}: cannot be read: {getattr(error, 'strerror', None) or error}") from error


def _files(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    if not path.exists():
        raise DataError(f"{path}: no such file")
    found = [*sorted(path.glob("episodes/*.jsonl")), *sorted(path.glob("trajectories/train-*.jsonl"))]
    if not found:
        raise DataError(f"{path}: a folder without episodes: name a file, or the folder of a run")
    return found


def _json_lines(path: Path) -> Iterator[tuple[str, Record]]:
    with gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                record = json.loads(line)
            except (ValueError, RecursionError) as error:
                hint = "; the file is JSON Lines: one object a line" if line.strip() in "[{" else ""
                raise DataError(f"{path}:{number}: no JSON: {error}{hint}") from error
            if not isinstance(record, dict):
                raise DataError(f"{path}:{number}: a record is a JSON object, not {type(record).__name__}")
            yield f"{path}:{number}", record


def _parquet(path: Path) -> Iterator[tuple[str, Record]]:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        raise DataError(f"{path}: reading Parquet needs pyarrow: pip install pyarrow") from error
    try:
        rows = parquet.read_table(path).to_pylist()
    except pyarrow.ArrowException as error:
        raise DataError(f"{path}: no Parquet file: {str(error).splitlines()[0]}") from error
    for number, row in enumerate(rows):
        yield f"{path}: row {number}", _without_nulls(row)


def _without_nulls(value: Any) -> Any:
    """Parquet gives every message all fields that any message has; those that one does not have are null."""
    if isinstance(value, dict):
        return {name: _without_nulls(inner) for name, inner in value.items() if inner is not None}
    return [_without_nulls(inner) for inner in value] if isinstance(value, list) else value


def _example(form: str, record: Record) -> Example:
    if form == "dpo" or (form == "rm" and "score" not in record):
        return _preferred(record)
    label, score = None, None
    if form == "kto" and not isinstance(label := _need(record, "label"), bool):
        raise DataError(f"label: must be true or false, not {label!r}")
    if form == "rm":
        score = record["score"]
        if isinstance(score, bool) or not isinstance(score, int | float) or not math.isfinite(score):
            raise DataError(f"score: must be a number, not {score!r}")
    return Example((_conversation(record),), label, None if score is None else float(score))


def _preferred(record: Record) -> Example:
    tools = _tools(record)
    both = [_messages(name, _need(record, name), "assistant") for name in ("chosen", "rejected")]
    opening = next((name for name in ("prompt", MESSAGES) if name in record), None)
    if opening is not None:
        prompt = _messages(opening, record[opening], "user")
        # The hub's files repeat the prompt.
        both = [said[len(prompt) :] if said[: len(prompt)] == prompt else said for said in both]
    elif both[0] != both[1]:
        # The prompt ends where the assistant first answers differently.
        shared = next((i for i, (a, b) in enumerate(zip(*both, strict=False)) if a != b), min(map(len, both)))
        prompt, both = both[0][:shared], [said[shared:] for said in both]
        if not prompt:
            raise DataError("prompt: is missing, and chosen and rejected begin with nothing in common")
    if both[0] == both[1]:
        raise DataError("rejected: says nothing else than chosen")
    names = ("chosen", "rejected")
    return Example(tuple(_whole(name, prompt, said, tools) for name, said in zip(names, both, strict=True)))


def _conversation(record: Record) -> Conversation:
    """Of "messages", all of whose assistant messages are learned, or of "prompt" and "completion"."""
    tools = _tools(record)
    if "completion" in record:
        name = "prompt" if "prompt" in record else MESSAGES
        prompt = _messages(name, _need(record, name), "user")
        return _whole("completion", prompt, _messages("completion", record["completion"], "assistant"), tools)
    messages = _messages(MESSAGES, _need(record, MESSAGES))
    first = next((i for i, message in enumerate(messages) if message["role"] == "assistant"), len(messages))
    return _whole(MESSAGES, messages[:first], messages[first:], tools)


def _whole(name: str, prompt: list[Message], said: list[Message], tools: list[dict[str, Any]]) -> Conversation:
    while said and said[-1]["role"] != "assistant":  # unanswered messages are not learned from
        said = said[:-1]
    if not said:
        raise DataError(f"{name}: the assistant says nothing in it")
    if said[0]["role"] != "assistant":
        raise DataError(f"{name}: must begin with the assistant's answer, not with the role {said[0]['role']!r}")
    if not prompt:
        raise DataError(f"{name}: nothing comes before the assistant's first message")
    for number, message in enumerate(said, start=len(prompt) + 1):
        if message["role"] == "assistant" and not _says(message):
            raise DataError(f"{name}: message {number}: content: is empty")
    return Conversation("", prompt, said, tools)


def _says(message: Message) -> bool:
    return bool(message.get("content") or message.get("tool_calls"))


def _need(record: Record, name: str) -> Any:
    if name not in record:
        raise DataError(f"{name}: is missing; the record has {', '.join(sorted(record)) or 'nothing'}")
    return record[name]


def _messages(name: str, value: Any, role: str = "") -> list[Message]:
    """The messages of a field. With a role, a text is one message of it."""
    if role and isinstance(value, str):
        return [user(value)] if role == "user" else [{"role": role, "content": value}]
    if not isinstance(value, list) or not value:
        raise DataError(f"{name}: must be a list of messages, not {value!r:.80}")
    for number, message in enumerate(value, start=1):
        if problem := problem_of(message) or _wrong_calls(message):
            raise DataError(f"{name}: message {number}: {problem}")
    return [dict(message) for message in value]


def _wrong_calls(message: Message) -> str | None:
    calls = message.get("tool_calls")
    if calls is None:
        return None
    if not isinstance(calls, list):
        return f"tool_calls must be a list, not {type(calls).__name__}"
    for call in calls:
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str) or "arguments" not in function:
            return "tool_calls: a call has a function with a name and arguments"
    return None


def _tools(record: Record) -> list[dict[str, Any]]:
    tools = record.get("tools") or []
    if isinstance(tools, str):  # so that one column holds schemas of any shape
        try:
            tools = json.loads(tools)
        except ValueError as error:
            raise DataError(f"tools: text that is no JSON: {error}") from error
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise DataError(f"tools: must be a list of tool schemas, not {tools!r:.80}")
    return tools


def _of_episodes(episodes: Episodes, form: str, min_reward: float | None) -> list[Example]:
    """Examples of stored episodes, of each player apart.

    Failed ones have no reward and are left out, and so are those in which a reply is empty, and those of an agent that plays
    by itself whose calls are not one conversation.
    """
    told = [
        (where, e) for where, e in episodes if not e.failed and ("agent" not in e.metadata or len(samples_of(e)) == 1)
    ]
    whole = [(where, part) for where, e in told for part in parts(e) if part.turns]
    played = [(where, part) for where, part in whole if all(map(_says, (turn.reply for turn in part.turns)))]
    if form in ("dpo", "rm"):
        return _best_and_worst(played)
    spoken = [(_played(where, e), e) for where, e in played]
    if form == "sft":
        return [Example((said,)) for said, e in spoken if min_reward is None or e.reward >= min_reward]
    good = [e.success > 0.5 if min_reward is None else e.reward >= min_reward for _, e in spoken]
    return [Example((said,), label=liked) for (said, _), liked in zip(spoken, good, strict=True)]


def _best_and_worst(played: Episodes) -> list[Example]:
    """One pair for each opening that was played with different rewards: the first best episode and the first worst one."""
    tasks: dict[tuple[str, str, str], Episodes] = {}
    for where, episode in played:
        opening = json.dumps(episode.turns[0].observation, sort_keys=True, default=str)
        tasks.setdefault((episode.env, episode.task_id, opening), []).append((where, episode))
    ends = [[choose(of_task, key=lambda one: one[1].reward) for choose in (max, min)] for of_task in tasks.values()]
    return [Example((_played(*best), _played(*worst))) for best, worst in ends if best[1].reward > worst[1].reward]


def _played(where: str, episode: Trajectory) -> Conversation:
    first, *later = episode.turns
    said = [first.reply, *(message for turn in later for message in (*turn.observation, turn.reply))]
    try:
        return replace(_whole("turns", first.observation, said, []), id=where, env=episode.env)
    except DataError as error:
        raise DataError(f"{where}: {error}") from error
