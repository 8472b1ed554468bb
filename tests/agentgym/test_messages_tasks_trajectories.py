"""What is stored: messages, tasks and trajectories, in any unicode, through JSON and back."""

import copy
import json
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentgym.core.env import ActionSpace, MessagesSpace
from agentgym.core.messages import assistant, problem_of, system, text_of, tool_result, user
from agentgym.core.tasks import Task, TaskSet
from agentgym.core.trajectory import Tokens, Trajectory, Turn, read_jsonl, write_jsonl

any_text = st.text(st.characters())  # surrogates too
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | any_text,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(any_text, inner, max_size=3),
    max_leaves=8,
)
messages = st.lists(st.builds(user, any_text), max_size=3)


@given(any_text)
def test_any_text_is_a_message_and_an_action(text):
    for message in (system(text), user(text), assistant(text), tool_result("1", text, "f")):
        assert problem_of(message) is None
        assert text_of(message) == text
        assert [message] in MessagesSpace()
    assert text in ActionSpace()
    assert assistant(text) in ActionSpace()


@given(
    st.recursive(
        st.none() | st.integers() | any_text, lambda x: st.lists(x) | st.dictionaries(any_text, x), max_leaves=9
    )
)
def test_spaces_answer_for_anything(value):
    assert (value in MessagesSpace()) in (True, False)
    assert (value in ActionSpace()) == isinstance(value, str)


@pytest.mark.parametrize("space", [MessagesSpace(), ActionSpace()])
def test_samples_are_in_their_space_and_repeat_by_seed(space):
    space.seed(5)
    first = [space.sample() for _ in range(50)]
    assert all(sample in space for sample in first)
    space.seed(5)
    assert [space.sample() for _ in range(50)] == first
    assert copy.deepcopy(space) == space


@pytest.mark.parametrize(
    ("message", "words"),
    [
        ("text", "a message is a dict, not str"),
        ({"content": "x"}, "role must be one of system, user, assistant, tool, not None"),
        ({"role": "king", "content": "x"}, "not 'king'"),
        ({"role": "user"}, "content is missing"),
        ({"role": "user", "content": 3}, "not int"),
        ({"role": "user", "content": ["x"]}, "list of typed parts"),
        (
            {"role": "user", "content": [{"type": "text", "text": None}]},
            "a content part must be a string, not NoneType",
        ),
    ],
)
def test_what_is_wrong_with_a_message_is_said(message, words):
    assert words in problem_of(message)


def test_an_action_is_text_or_an_assistant_message():
    call = {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}
    assert assistant(call) == call
    assert assistant(call) is not call
    with pytest.raises(ValueError, match="role is 'user'"):
        assistant(user("x"))
    with pytest.raises(ValueError, match="text of a content part"):
        assistant({"role": "assistant", "content": [{"type": "text", "text": "x"}, {"type": "text", "text": 3}]})
    with pytest.raises(TypeError, match="not int"):
        assistant(3)


tasks = st.builds(
    Task,
    id=any_text,
    messages=messages.map(tuple),
    answer=json_values,
    seed=st.none() | st.integers(),
    metadata=st.dictionaries(any_text, json_values, max_size=3),
)


@given(tasks)
def test_a_task_survives_json(task):
    assert Task.from_json(json.loads(json.dumps(task.to_json()))) == task


@pytest.mark.parametrize(
    ("record", "words"), [({}, "no field 'id'"), ({"id": "a", "anser": 1}, "unknown field 'anser'")]
)
def test_a_bad_task_is_refused(record, words):
    with pytest.raises(ValueError, match=words):
        Task.from_json(record)


def numbers(count):
    return TaskSet([Task(str(i), answer=i) for i in range(count)], name="numbers", source="made here")


@given(st.integers(0, 60), st.integers(), st.integers(0, 70))
def test_shuffling_keeps_every_task_and_depends_on_the_seed_alone(count, seed, n):
    ids = [t.id for t in numbers(count).shuffled(seed)]
    assert sorted(ids, key=int) == [str(i) for i in range(count)]
    assert [t.id for t in numbers(count).shuffled(seed)] == ids
    assert [t.id for t in numbers(count).shuffled(seed).take(n)] == ids[:n]


@given(st.slices(20))
def test_slices_are_those_of_a_list(cut):
    assert [t.answer for t in numbers(20)[cut]] == list(range(20))[cut]


def test_a_set_is_a_sequence():
    ten = numbers(10)
    assert len(ten) == 10
    assert ten[-1].answer == 9
    assert [t.answer for t in ten.shuffled(1)] != list(range(10))
    assert "numbers" in repr(ten)
    with pytest.raises(IndexError):
        ten[10]


def number_task(seed):
    return Task(f"n{seed}", seed=seed)


def test_generated_tasks_are_made_when_asked_for_and_travel():
    made = []

    def make(seed):
        made.append(seed)
        return number_task(seed)

    million = TaskSet.generate(make, range(10**6), name="many")
    assert len(million) == 10**6
    assert million[123456].id == "n123456"
    assert made == [123456]
    travelled = pickle.loads(pickle.dumps(TaskSet.generate(number_task, range(5), name="few").shuffled(1)))
    assert sorted(t.id for t in travelled) == ["n0", "n1", "n2", "n3", "n4"]
    with pytest.raises(ValueError, match="needs size="):
        TaskSet(make)


def test_a_set_of_other_things_than_tasks_is_refused():
    with pytest.raises(TypeError, match="task set 'mine': not a Task, but a dict"):
        TaskSet([Task(id="b"), {"id": "a"}], name="mine")


def test_an_id_names_one_task():
    twice = Task("a", answer=1)
    assert len(TaskSet([twice, Task("b"), twice])) == 3
    with pytest.raises(ValueError, match="task set 'mine': two different tasks have the id 'a'"):
        TaskSet([twice, Task("a", answer=2)], name="mine")


@given(st.lists(tasks, max_size=4, unique_by=lambda task: task.id))
def test_jsonl_round_trip(tmp_path_factory, found):
    path = tmp_path_factory.mktemp("tasks") / "t.jsonl"
    path.write_text("".join(f"{json.dumps(task.to_json())}\n" for task in found), encoding="utf-8")
    assert list(TaskSet.from_jsonl(path)) == found


def test_jsonl_errors_name_file_and_line(tmp_path):
    path = tmp_path / "bad.jsonl"
    path.write_text('{"id": "a"}\n\n{"id": \n')
    with pytest.raises(ValueError, match=r"bad\.jsonl:3: not a task"):
        TaskSet.from_jsonl(path)
    path.write_text('{"id": "a"}\n[1]\n')
    with pytest.raises(ValueError, match=r"bad\.jsonl:2"):
        TaskSet.from_jsonl(path)
    path.write_text('{"question": "q"}\n')
    with pytest.raises(ValueError, match=r"bad\.jsonl:1.*frage"):
        TaskSet.from_jsonl(path, parse=lambda record, number: Task(record["frage"]))
    parsed = TaskSet.from_jsonl(path, parse=lambda record, number: Task(f"{number}", answer=record["question"]))
    assert parsed[0] == Task("0", answer="q")
    with pytest.raises(FileNotFoundError):
        TaskSet.from_jsonl(tmp_path / "none.jsonl")


def test_parquet_round_trip_and_errors(tmp_path):
    arrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    path = tmp_path / "t.parquet"
    parquet.write_table(arrow.table({"id": ["a", "b"], "answer": ["1", None], "seed": [None, 4]}), path)
    assert list(TaskSet.from_parquet(path)) == [Task("a", answer="1"), Task("b", seed=4)]
    with pytest.raises(ValueError, match=r"t\.parquet: row 1: not a task"):
        TaskSet.from_parquet(path, parse=lambda row, number: Task(row["id"], answer=int(row["answer"])))


ids = st.lists(st.integers(0, 9), max_size=6)


@st.composite
def token_turns(draw):
    """Turns whose prompts sometimes extend what was there before, exactly or nearly, and sometimes do not."""
    turns, context = [], []
    for _ in range(draw(st.integers(0, 4))):
        kept = draw(st.integers(0, len(context))) if draw(st.booleans()) else len(context)
        prompt = context[:kept] + draw(ids)
        completion = draw(ids)
        tokens = None
        if draw(st.booleans()):
            logprobs = draw(st.lists(st.floats(-50, 0), min_size=len(completion), max_size=len(completion)))
            tokens = Tokens(
                prompt, completion, logprobs, [3] * len(completion), draw(st.sampled_from(["stop", "length"]))
            )
        turns.append(Turn([user("q")], assistant("a"), reward=1.0, info={"x": 1}, tokens=tokens))
        context = prompt + completion
    return turns


@given(token_turns())
def test_tokens_survive_the_delta_encoding(turns):
    trajectory = Trajectory("t/0", "e", "t", turns=turns, metrics={"success": 1.0}, seed=3)
    assert Trajectory.from_json(json.loads(json.dumps(trajectory.to_json()))) == trajectory


def test_a_prompt_that_extends_the_last_one_is_stored_once():
    first, second = Tokens([1, 2, 3], [4], [-1.0], [0]), Tokens([1, 2, 3, 4, 5], [6], [-1.0], [0])
    turns = [Turn([], assistant("a"), tokens=first), Turn([], assistant("b"), tokens=second)]
    stored = Trajectory("t/0", "e", "t", turns=turns).to_json()["turns"][1]["tokens"]
    assert (stored["shared"], stored["new_prompt_ids"]) == (4, [5])


@given(messages, any_text)
def test_trajectories_survive_a_file(tmp_path_factory, observation, text):
    path = tmp_path_factory.mktemp("trajectories") / "t.jsonl"
    trajectory = Trajectory("t/0", "e", "t", turns=[Turn(observation, assistant(text))], final_observation=observation)
    write_jsonl(path, [trajectory])
    write_jsonl(path, [trajectory])
    assert list(read_jsonl(path)) == [trajectory, trajectory]


def test_numpy_values_and_objects_in_info_are_stored_as_numbers_and_text(tmp_path):
    import numpy as np

    path = tmp_path / "t.jsonl"
    info = {"n": np.int64(3), "a": np.arange(2), "path": tmp_path}
    write_jsonl(path, [Trajectory("t/0", "e", "t", turns=[Turn([], assistant("x"), info=info)])])
    [read] = read_jsonl(path)
    assert read.turns[0].info == {"n": 3, "a": [0, 1], "path": str(tmp_path)}


def test_a_line_cut_off_by_a_crash_is_left_out_and_mended(tmp_path):
    path = tmp_path / "t.jsonl"
    one, two = Trajectory("a/0", "e", "a"), Trajectory("b/0", "e", "b")
    write_jsonl(path, [one, two])
    path.write_text(path.read_text()[:-20])
    assert list(read_jsonl(path)) == [one]
    write_jsonl(path, [two])
    assert list(read_jsonl(path)) == [one, two]
    path.write_text(path.read_text()[:-1])  # only the end of the line is missing
    write_jsonl(path, [one])
    assert list(read_jsonl(path)) == [one, two, one]
    path.write_bytes('{"a": "漢'.encode()[:-1])  # within a character
    assert list(read_jsonl(path)) == []
    path.write_text("{\n")
    with pytest.raises(ValueError, match=r"t\.jsonl:1: not a trajectory"):
        list(read_jsonl(path))


def test_success_is_what_the_env_said_or_a_positive_reward():
    won = Trajectory("a/0", "e", "a", turns=[Turn([], assistant("x"), reward=0.5)])
    assert won.success == 1.0
    won.metrics["success"] = 0.0
    assert won.success == 0.0
