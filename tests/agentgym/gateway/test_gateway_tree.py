"""The tree of an episode's calls: by exact ids, in whatever order calls come, and why a prompt does not go on from what was said."""

import json
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from toy_model import ToyModel, encode

from agentgym.core.trajectory import Tokens
from agentgym.gateway.calls import ModelAnswer, ModelCall
from agentgym.gateway.tree import Tree

TOOLS = "a digest"


def user(text):
    return {"role": "user", "content": text}


def said(text, **more):
    return {"role": "assistant", "content": text, **more}


def grow(tree, number, messages, answer, prompt, ids, tools=""):
    call = ModelCall("m", messages, after=tree.last_said(messages))
    tokens = Tokens(prompt, ids, [-1.0] * len(ids), [0] * len(ids))
    made = tree.grown(number, call, ModelAnswer(answer, tokens, {"completion_tokens": len(ids)}), tools)
    tree.add(made)
    return made


# ---- any calls, in any order

SHORT = st.lists(st.integers(0, 2), min_size=1, max_size=4)


@st.composite
def sequences(draw):
    """Prompts and what was sampled, of which many go on from others; each behind those that it goes on from."""
    calls = []
    for _ in range(draw(st.integers(1, 10))):
        before = draw(st.sampled_from([*calls, ([], [])]))
        calls.append((before[0] + before[1] + draw(SHORT), draw(SHORT)))
    return calls


def parents_by_hand(calls):
    """For each call the longest prompt and answer that its prompt begins with."""
    wholes = [prompt + ids for prompt, ids in calls]
    fitting = [[one for one in wholes if prompt[: len(one)] == one] for prompt, _ in calls]
    return [max(found, key=len, default=None) for found in fitting]


@settings(deadline=None)
@given(sequences(), st.randoms())
def test_a_call_hangs_on_the_longest_exact_beginning_whatever_the_order_of_the_others(calls, rng):
    order = list(range(len(calls)))
    rng.shuffle(order)
    order.sort(key=lambda place: len(calls[place][0]))  # what goes on from an answer comes behind it
    tree = Tree()
    for place in order:
        grow(tree, place, [], said(""), *calls[place])
    for call in tree.calls.values():
        tokens = call.tokens()
        assert (tokens.prompt_ids, tokens.completion_ids) == calls[call.number]
        above = None if call.parent is None else call.parent.tokens().prompt_ids + call.parent.tokens().completion_ids
        assert above == parents_by_hand(calls)[call.number]


@settings(deadline=None)
@given(sequences())
def test_a_tree_is_read_as_it_was_written(calls):
    tree, again = Tree(), Tree()
    for number, (prompt, ids) in enumerate(calls):
        messages = [user(str(prompt))] if number % 2 else []
        again.add(again.read(json.loads(json.dumps(grow(tree, number, messages, said("x"), prompt, ids).to_json()))))
    for one, other in zip(tree.calls.values(), again.calls.values(), strict=True):
        assert one.tokens() == other.tokens()
        assert one.conversation() == other.conversation()
        assert (one.parent and one.parent.number) == (other.parent and other.parent.number)
        assert one.to_json() == other.to_json()


def test_a_record_whose_calls_do_not_fit_together_is_refused():
    tree, again = Tree(), Tree()
    grow(tree, 0, [], said("x"), [1, 2], [3])
    again.add(again.read(tree.calls[0].to_json()))
    record = grow(tree, 1, [], said("x"), [1, 2, 3, 4], [5]).to_json()
    with pytest.raises(ValueError, match="does not fit its parent"):
        again.read({**record, "shared": 2})


# ---- any messages, looked up as by looking at all calls

SAID = [said("x"), said("x", tool_calls=[]), said("", reasoning_content="hm"), said([{"type": "text", "text": "x"}])]
MESSAGES = [{"role": "system", "content": "s"}, {"role": "system", "content": "t"}, user("x"), user("y"), *SAID]


@st.composite
def answered_calls(draw):
    """Messages, answers and ids, of which many begin as others, and the numbers of their calls."""
    calls = []
    for _ in range(draw(st.integers(1, 24))):
        before = draw(st.sampled_from([*(call[:4] for call in calls), ([], [], [], [])]))
        messages = [*before[0], *before[1], *draw(st.lists(st.sampled_from(MESSAGES), max_size=3))]
        calls.append((messages, [draw(st.sampled_from(SAID))], before[2] + before[3] + draw(SHORT), draw(SHORT)))
    return draw(st.permutations(calls)), draw(st.permutations(range(len(calls))))


def begins(whole, part):
    return whole[: len(part)] == part


def best(calls, size):
    return min(calls, key=lambda call: (-size(call), call.number), default=None)


def last_said_by_hand(calls, messages):
    fitting = [
        each for each in calls if each.asked.messages and begins(messages, [*each.conversation(), each.answer.message])
    ]
    return best(fitting, lambda call: len(call.conversation()))


def longest_by_hand(calls, prompt):
    def whole(call):
        return call.tokens().prompt_ids + call.tokens().completion_ids

    return best([each for each in calls if begins(prompt, whole(each))], lambda call: len(whole(call)))


def forked_by_hand(calls, made):
    """Whether the prompt of a call goes on from none, and whether a prompt differs from it by system messages alone."""

    def own(messages):
        return [message for message in messages if message["role"] != "system"]

    again = [each for each in calls if each.after is made.after and each.asked.messages]
    again = [
        each for each in again if begins(made.asked.messages, each.asked.messages) and each not in made.line("parent")
    ]
    if made.parent is not None or (made.after and made.after.ids) or again or not calls:
        return None
    openings = [each for each in calls if each.after is None and each.asked.messages]
    found = any(begins(own(made.asked.messages), own(each.asked.messages)) for each in openings)
    return "system prompt changed" if found else "new conversation"


@settings(deadline=None, max_examples=300)
@given(answered_calls())
def test_calls_are_found_as_by_looking_at_all_of_them(drawn):
    tree, before = Tree(), []
    for number, (messages, (answer,), prompt, ids) in zip(drawn[1], drawn[0], strict=True):
        made = grow(tree, number, messages, answer, prompt, ids)
        assert made.after is last_said_by_hand(before, messages)
        assert made.parent is longest_by_hand(before, prompt)
        why = made.why if made.why in ("system prompt changed", "new conversation") else None
        assert why == forked_by_hand(before, made)
        before.append(made)


# ---- why a prompt does not go on


def talk(template, first, *changes, tools=(TOOLS, TOOLS)):
    """A call, and a second one that goes on from it after `changes` were made to its messages; the second."""
    tree = Tree()
    answer = said(" the lake", **first)
    messages = [{"role": "system", "content": "s"}, user("q")]
    prompt = encode(template.text(messages))
    grow(tree, 0, messages, answer, prompt, encode(ToyModel().said(answer) + "<end>"), tools[0])
    messages = [*messages, dict(answer), user("and")]
    for change in changes:
        messages = change(messages)
    return grow(tree, 1, messages, said("x"), encode(template.text(messages)), [1], tools[1]), tree


CALLED = {"tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"n":1}'}}]}
OTHERWISE = {"tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"n": 1}'}}]}


def changed(place, **fields):
    def change(messages):
        message = {name: value for name, value in {**messages[place], **fields}.items() if value is not None}
        return [*messages[:place], message, *messages[place + 1 :]]

    return change


@pytest.mark.parametrize(
    ("keeps", "first", "changes", "why"),
    [
        (True, {}, [], None),
        (True, {"reasoning_content": "hm"}, [], None),
        (False, {"reasoning_content": "hm"}, [], "thoughts removed"),
        (True, {"reasoning_content": "hm"}, [changed(2, reasoning_content=None)], "thoughts removed"),
        (True, CALLED, [changed(2, **OTHERWISE)], "tool call rewritten"),
        (True, {}, [changed(0, content="other")], "system prompt changed"),
        (True, {}, [changed(2, content="I said so")], "earlier message edited"),
        (True, {}, [lambda messages: [user("a summary")]], "new conversation"),
        (True, {}, [lambda messages: [messages[0], user("another task")]], "new conversation"),
        (True, {}, [lambda messages: messages[:2]], None),  # asked again
    ],
)
def test_the_reason_why_a_prompt_does_not_go_on_is_found(keeps, first, changes, why):
    second, tree = talk(ToyModel(keeps_thoughts=keeps), first, *changes)
    assert second.why == why
    assert (second.parent is None) == (bool(changes) or why is not None)
    assert tree.share()["forks"] == ({why: 1} if why else {})


def test_thoughts_that_a_client_drops_in_the_middle_are_a_reason_although_the_prompt_goes_on_from_the_call_before():
    template, tree, messages = ToyModel(), Tree(), [user("q")]
    for number, thought in enumerate(({}, {"reasoning_content": "hm"}, {})):
        answer = said(f"the {number}", **thought)
        prompt = encode(template.text(messages))
        call = grow(tree, number, list(messages), answer, prompt, encode(template.said(answer) + "<end>"))
        messages += [said(f"the {number}"), user("on")]
    assert (call.parent, call.why) == (tree.calls[0], "thoughts removed")


def test_other_tools_in_the_prompt_are_a_reason():
    tree = Tree()
    grow(tree, 0, [user("q")], said("x"), [1, 2], [3], "these")
    assert (
        grow(tree, 1, [user("q"), said("x"), user("r")], said("y"), [9, 2, 3, 4], [5], "those").why == "tools changed"
    )


def test_text_that_was_spelt_by_other_ids_is_a_reason():
    tree = Tree()
    grow(tree, 0, [user("q")], said("the"), [1, 2], encode("t") + encode("h") + encode("e"))
    again = grow(tree, 1, [user("q"), said("the"), user("r")], said("y"), [1, 2, *encode("the"), 4], [5])
    assert (again.parent, again.why) == (None, "re-tokenised")


def test_an_edited_last_message_goes_on_from_the_answer_before_it():
    tree = Tree()
    first = grow(tree, 0, [user("q")], said("x"), [1, 2], [3])
    grow(tree, 1, [user("q"), said("x"), user("a")], said("y"), [1, 2, 3, 4], [5])
    edited = grow(tree, 2, [user("q"), said("x"), user("b")], said("z"), [1, 2, 3, 6], [7])
    assert (edited.parent, edited.why) == (first, None)


# ---- the share of tokens


def test_the_share_has_each_token_that_cannot_be_trained_on_under_one_reason():
    tree = Tree()
    for number in range(5):
        grow(tree, number, [user(str(number))], said("x"), [number], [1] * 10)
    tree.calls[1].asked.unusable = ["top_p", "temperature"]
    foreign = tree.grown(5, ModelCall("m", [user("f")]), ModelAnswer(said("x"), usage={"completion_tokens": 7}), "")
    tree.add(foreign)
    share = tree.share(undelivered={1, 2})
    assert share["sampled"] == 57
    assert share["lost"] == {"top_p": 10, "undelivered": 10, "no token ids": 7}
    assert share["trainable"] == 30
    assert tree.share(incomplete=True)["trainable"] == 0
    assert foreign.tokens() is None


def test_a_long_episode_is_linked_fast_enough_to_be_a_test():
    """Thousands of calls with thousands of tokens: each is compared along its own line alone."""
    tree, rng = Tree(), random.Random(0)
    line, messages = [rng.randrange(1000) for _ in range(2000)], [user("q")]
    for number in range(300):
        grow(tree, number, list(messages), said(str(number)), list(line), [number])
        messages += [said(str(number)), user("go on")]
        line += [number, *(rng.randrange(1000) for _ in range(30))]
    assert tree.calls[299].depth == len(line) - 30
    assert all(call.parent is tree.calls[call.number - 1] for call in tree.calls.values() if call.number)
    assert sum(len(call.ids) for call in tree.calls.values()) == 4 * tree.calls[299].depth, "nothing is kept twice"
