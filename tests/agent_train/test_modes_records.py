"""Data files of the modes: every form that is read, and every mistake by file, line and field."""

import gzip
import json
from pathlib import Path

import pytest
from mode_cases import assistant, call, user, write_lines

from agent_train.trainer.offline.records import DataError, read_examples
from agentgym.core.trajectory import Tokens, Trajectory, Turn, write_jsonl

HI, YES, NO = user("hi"), assistant("yes"), assistant("no")


def read(tmp_path, record, form, **given):
    return read_examples(
        write_lines(tmp_path / "data.jsonl", record if isinstance(record, list) else [record]), form, **given
    )


def parts(example):
    return [(answer.prompt, answer.said) for answer in example.answers]


@pytest.mark.parametrize(
    "record",
    [
        {"messages": [HI, YES]},
        {"prompt": "hi", "completion": "yes"},
        {"prompt": [HI], "completion": [YES]},
        {"messages": [HI, YES, user("nobody answers this")]},
    ],
)
def test_forms_of_a_conversation(tmp_path, record):
    (example,) = read(tmp_path, record, "sft")
    assert parts(example) == [([HI], [YES])]
    assert not example.is_pair


def test_all_that_the_assistant_says_is_learned_and_what_comes_between_is_read(tmp_path):
    system = {"role": "system", "content": "be brief"}
    (example,) = read(tmp_path, {"messages": [system, HI, YES, user("sure?"), NO]}, "sft")
    assert parts(example) == [([system, HI], [YES, user("sure?"), NO])]


@pytest.mark.parametrize(
    "record",
    [
        {"prompt": "hi", "chosen": "yes", "rejected": "no"},
        {"prompt": [HI], "chosen": [YES], "rejected": [NO]},
        {"messages": [HI], "chosen": [YES], "rejected": [NO]},
        {"chosen": [HI, YES], "rejected": [HI, NO]},
        {"prompt": "hi", "chosen": [HI, YES], "rejected": [HI, NO]},
    ],
)
@pytest.mark.parametrize("form", ["dpo", "rm"])
def test_forms_of_a_pair(tmp_path, record, form):
    (example,) = read(tmp_path, record, form)
    assert parts(example) == [([HI], [YES]), ([HI], [NO])]
    assert example.is_pair


def test_answers_of_one_pair_may_share_their_first_turns(tmp_path):
    more = user("sure?")
    (example,) = read(tmp_path, {"chosen": [HI, YES, more, YES], "rejected": [HI, YES, more, NO]}, "dpo")
    assert parts(example) == [([HI, YES, more], [YES]), ([HI, YES, more], [NO])]


def test_labels_and_scores(tmp_path):
    records = [{"prompt": "hi", "completion": "yes", "label": True}, {"messages": [HI, NO], "label": False}]
    assert [e.label for e in read(tmp_path, records, "kto")] == [True, False]
    assert [e.score for e in read(tmp_path, {"messages": [HI, YES], "score": 3}, "rm")] == [3.0]


def test_tools_are_schemas_or_their_json(tmp_path):
    tool = {"type": "function", "function": {"name": "look", "parameters": {}}}
    said = {"messages": [HI, call("look", "{}"), {"role": "tool", "tool_call_id": "c1", "content": "ice"}, YES]}
    for tools in ([tool], json.dumps([tool])):
        (example,) = read(tmp_path, {**said, "tools": tools}, "sft")
        assert example.answers[0].tools == [tool]


def test_compressed_and_empty_lines_and_parquet_read_the_same(tmp_path):
    records = [{"messages": [HI, YES]}, {"messages": [HI, call("look", "{}"), {"role": "tool", "content": "ice"}, NO]}]
    plain = read(tmp_path, records, "sft")
    lines = "\n\n".join(json.dumps(record) for record in records)
    (tmp_path / "data.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    assert [parts(e) for e in read_examples(tmp_path / "data.jsonl.gz", "sft")] == [parts(e) for e in plain]
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    parquet.write_table(pyarrow.Table.from_pylist(records), tmp_path / "data.parquet")
    found = read_examples(tmp_path / "data.parquet", "sft")
    assert [parts(e) for e in found] == [parts(e) for e in plain]
    assert found[1].answers[0].id == f"{tmp_path / 'data.parquet'}: row 1"


@pytest.mark.parametrize(
    ("form", "record", "told"),
    [
        ("sft", {"text": "hi"}, "messages: is missing; the record has text"),
        ("sft", {"messages": "hi"}, "messages: must be a list of messages, not 'hi'"),
        ("sft", {"messages": [HI, {"role": "bot", "content": "x"}]}, "messages: message 2: role must be one of"),
        ("sft", {"messages": [HI]}, "messages: the assistant says nothing in it"),
        ("sft", {"messages": [YES]}, "messages: nothing comes before the assistant's first message"),
        ("sft", {"messages": [HI, assistant("")]}, "messages: message 2: content: is empty"),
        ("sft", {"messages": [HI, YES], "tools": "[{"}, "tools: text that is no JSON"),
        ("sft", {"messages": [HI, YES], "tools": [1]}, "tools: must be a list of tool schemas"),
        (
            "sft",
            {"messages": [HI, {**YES, "tool_calls": [{"name": "f"}]}]},
            "messages: message 2: tool_calls: a call has a function",
        ),
        ("dpo", {"prompt": "hi", "chosen": "yes"}, "rejected: is missing; the record has chosen, prompt"),
        ("dpo", {"prompt": "hi", "chosen": "yes", "rejected": "yes"}, "rejected: says nothing else than chosen"),
        (
            "dpo",
            {"chosen": "yes", "rejected": "no"},
            "prompt: is missing, and chosen and rejected begin with nothing in common",
        ),
        ("dpo", {"prompt": "hi", "chosen": [HI], "rejected": "no"}, "chosen: the assistant says nothing in it"),
        (
            "dpo",
            {"prompt": "hi", "chosen": [user("x"), YES], "rejected": "no"},
            "chosen: must begin with the assistant's answer",
        ),
        ("kto", {"messages": [HI, YES], "label": 1}, "label: must be true or false, not 1"),
        ("kto", {"messages": [HI, YES]}, "label: is missing"),
        ("rm", {"messages": [HI, YES], "score": "3"}, "score: must be a number, not '3'"),
        ("sft", {"turns": [{"x": 1}]}, "turns: not an episode of agentgym"),
    ],
)
def test_a_mistake_is_named_with_file_line_and_field(tmp_path, form, record, told):
    good = {
        "sft": {"messages": [HI, YES]},
        "dpo": {"prompt": "hi", "chosen": "yes", "rejected": "no"},
        "kto": {"messages": [HI, YES], "label": True},
        "rm": {"messages": [HI, YES], "score": 1},
    }
    with pytest.raises(DataError) as raised:
        read(tmp_path, [good[form], record], form)
    assert str(raised.value).startswith(f"{tmp_path / 'data.jsonl'}:2: {told}"), str(raised.value)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ('{"messages": ', "data.jsonl:1: no JSON"),
        ('[\n{"messages": 1}\n]', "the file is JSON Lines: one object a line"),
        ("3\n", "data.jsonl:1: a record is a JSON object, not int"),
        ("", "data.jsonl: nothing to learn from: it has no record with messages or prompt and completion"),
    ],
)
def test_a_file_that_is_something_else_is_refused(tmp_path, text, told):
    (tmp_path / "data.jsonl").write_text(text)
    with pytest.raises(DataError) as raised:
        read_examples(tmp_path / "data.jsonl", "sft")
    assert told in str(raised.value)


def test_what_is_no_file_is_refused(tmp_path):
    with pytest.raises(DataError, match="nope: no such file"):
        read_examples(tmp_path / "nope", "sft")
    with pytest.raises(DataError, match="a folder without episodes"):
        read_examples(tmp_path, "sft")
    (tmp_path / "bad.parquet").write_text("no")
    pytest.importorskip("pyarrow")
    with pytest.raises(DataError, match=r"bad\.parquet: no Parquet file"):
        read_examples(tmp_path / "bad.parquet", "sft")


def test_one_file_has_one_form(tmp_path):
    records = [{"messages": [HI, YES], "score": 1}, {"prompt": "hi", "chosen": "yes", "rejected": "no"}]
    with pytest.raises(DataError, match=r"data.jsonl:2: a pair, where the file began with a score"):
        read(tmp_path, records, "rm")
    with pytest.raises(DataError, match="label: every example is liked: kto needs both kinds"):
        read(tmp_path, [{"messages": [HI, YES], "label": True}] * 2, "kto")


def episode(task, reward, said, end="terminated", sample=0):
    turns = [Turn([user(f"task {task}")], assistant(said)), Turn([user("and now?")], assistant("done"), reward=reward)]
    error = "broke" if end == "error" else None
    return Trajectory(f"{task}/{sample}", "toy", task, sample, turns=turns, end=end, error=error)


@pytest.fixture
def run(tmp_path):
    """The folder of an evaluation: task a with rewards 0, 1 and a failure, task b with reward 1 twice."""
    (tmp_path / "episodes").mkdir()
    write_jsonl(
        Path(tmp_path / "episodes" / "toy@me.jsonl"),
        [
            episode("a", 0.0, "left"),
            episode("b", 1.0, "up"),
            episode("a", 9.0, "never", "error", 1),
            episode("a", 1.0, "right", sample=2),
            episode("b", 1.0, "down", sample=1),
        ],
    )
    return tmp_path


def test_the_episodes_of_a_run_are_imitated(run):
    examples = read_examples(run, "sft")
    assert [e.answers[0].said[0]["content"] for e in examples] == ["left", "up", "right", "down"]
    assert examples[0].answers[0].prompt == [user("task a")]
    assert examples[0].answers[0].said == [assistant("left"), user("and now?"), assistant("done")]
    assert examples[0].answers[0].env == "toy"
    good = read_examples(run, "sft", min_reward=0.5)
    assert [e.answers[0].said[0]["content"] for e in good] == ["up", "right", "down"]
    with pytest.raises(DataError, match=r"none of its 5 episodes .* reached data.min_reward=2 \(the best: 1.0\)"):
        read_examples(run, "sft", min_reward=2)


def test_an_episode_with_an_empty_answer_is_left_out(run):
    write_jsonl(run / "episodes" / "toy@me.jsonl", [episode("c", 1.0, "")])
    assert len(read_examples(run, "sft")) == 4
    assert len(read_examples(run, "kto")) == 4


@pytest.mark.parametrize("branches", [False, True])
def test_an_agent_s_episode_is_one_example_if_its_calls_are_one_conversation(run, branches):
    played = episode("a", 1.0, "left")
    played.metadata["agent"] = {"share": {}}
    for number, turn in enumerate(played.turns):
        prompt = [9] if branches and number else list(range(1 + 2 * number))
        turn.tokens = Tokens(prompt, [len(prompt)], [-0.1], [0])
    write_jsonl(run / "episodes" / "toy@me.jsonl", [played, episode("b", 1.0, "up")])
    assert [e.answers[0].said[0]["content"] for e in read_examples(run, "sft")][-2:] == (
        ["down", "up"] if branches else ["left", "up"]
    )


@pytest.mark.parametrize("form", ["dpo", "rm"])
def test_the_best_episode_of_a_task_is_preferred_to_its_worst(run, form):
    (pair,) = read_examples(run, form)
    assert [answer.said[0]["content"] for answer in pair.answers] == ["right", "left"]


def test_episodes_are_liked_by_their_success_or_by_a_bound(run):
    assert [e.label for e in read_examples(run, "kto")] == [False, True, True, True]
    with pytest.raises(DataError, match="every example is disliked"):
        read_examples(run, "kto", min_reward=5)


def test_a_damaged_archive_and_a_line_that_is_nested_too_deep_are_named(tmp_path):
    packed = bytearray(gzip.compress(json.dumps({"messages": [HI, YES]}).encode() * 20))
    for place in range(12, 30):
        damaged = bytearray(packed)
        damaged[place] ^= 0xFF
        (tmp_path / "data.jsonl.gz").write_bytes(damaged)
        with pytest.raises(DataError, match=r"data\.jsonl\.gz"):
            read_examples(tmp_path / "data.jsonl.gz", "sft")
    (tmp_path / "deep.jsonl").write_text("[" * 100_000 + "\n")
    with pytest.raises(DataError, match=r"deep\.jsonl:1: no JSON"):
        read_examples(tmp_path / "deep.jsonl", "sft")
