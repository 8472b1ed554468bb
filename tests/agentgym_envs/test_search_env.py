"""search: its README, its players, its replies to any text, its rewards, and what a failing retriever means."""

from __future__ import annotations

import asyncio
import json
import random
import re
from pathlib import Path

import pytest
from gymnasium.utils.env_checker import check_env
from hypothesis import given, settings
from hypothesis import strategies as st
from one_episode import play
from other_process import played_twice
from readme_parts import replay

import agentgym
from agentgym.checks.check_env import check_env as check_author
from agentgym.core.messages import assistant
from agentgym.core.tasks import Task
from agentgym.policies.base import ExpertPolicy
from agentgym.rollout.episode import run_episode
from agentgym_envs import register_all, search
from agentgym_envs.search import corpora
from agentgym_envs.search.corpora import load_questions, own_questions
from agentgym_envs.search.env import NOTHING
from agentgym_envs.search.retrievers import RetrieverError

README = Path(search.__file__).with_name("README.md").read_text(encoding="utf-8")
DATA = ["own", pytest.param("xquad", marks=pytest.mark.data)]
register_all()


def call(query, **more):
    return f"<tool_call>{json.dumps({'name': 'search', 'arguments': {'query': query, **more}})}</tool_call>"


def question(answer="Lirren", **metadata):
    return Task("mine", ({"role": "user", "content": "Where?"},), answer, metadata={"corpus": "own", **metadata})


def started(task=None, **kwargs):
    env = agentgym.make("search", **kwargs)
    env.reset(options={"task": task or question()})
    return env


def all_tasks(data):
    return [task for split in ("train", "test") for task in load_questions(split, data)]


class TestReadme:
    def test_it_replays(self):
        info = replay(README, agentgym.make("search"), own_questions("test"))
        assert info["searches"] == 2

    @pytest.mark.parametrize("data", DATA)
    def test_it_has_the_numbers_of_simple_players(self, data):
        cells = re.search(rf"^\| `{data}` \| (.*%.*) \|$", README, re.M)[1].split(" | ")
        for player, cell in zip(("expert", "random", "null"), cells, strict=True):
            em, overlap, turns = cell.replace("%", "").split(", ")
            rng, env = random.Random(0), agentgym.make("search")
            replies = {
                "expert": lambda e: e.expert_action(),
                "random": lambda e, rng=rng: e.random_action(rng),
                "null": lambda e: "",
            }
            ends = [play(env, task, replies[player]) for task in all_tasks(data)]
            assert f"{100 * sum(info['em'] for *_, info in ends) / len(ends):.1f}" == em
            assert f"{sum(info['f1'] for *_, info in ends) / len(ends):.3f}" == overlap
            assert f"{sum(n for _, n, _ in ends) / len(ends):.2f}" == turns


@pytest.mark.parametrize("data", DATA)
@pytest.mark.parametrize("reward", ["em", "f1"])
class TestPlayers:
    def test_every_gold_scores_1(self, data, reward):
        env = agentgym.make("search", reward=reward)
        for task in all_tasks(data):
            for gold in task.answer:
                total, _, info = play(env, task, lambda e, gold=gold: f"<answer>{gold}</answer>")
                assert (total, info["em"], info["f1"], info["success"]) == (1.0, 1.0, 1.0, True), task.id

    def test_the_expert_scores_1_and_searches_as_often_as_the_chain_is_long(self, data, reward):
        env = agentgym.make("search", reward=reward)
        for task in all_tasks(data):
            total, turns, info = play(env, task, lambda e: e.expert_action())
            assert (total, info["searches"]) == (1.0, len(task.metadata["hops"])), task.id
            assert turns == info["searches"] + 1

    def test_a_null_player_scores_0(self, data, reward):
        env = agentgym.make("search", reward=reward)
        for task in all_tasks(data):
            total, turns, info = play(env, task, lambda e: "")
            assert (total, turns) == (0.0, env.max_turns)
            assert info == {"success": False, "em": 0.0, "f1": 0.0, "searches": 0}

    def test_a_random_player_scores_next_to_nothing(self, data, reward):
        rng, env = random.Random(1), agentgym.make("search", reward=reward)
        totals = [play(env, task, lambda e: e.random_action(rng))[0] for task in all_tasks(data)]
        assert sum(totals) / len(totals) < {"em": 0.005, "f1": 0.03}[reward]


class TestSplits:
    def test_our_own_are_38_and_14(self):
        assert [len(own_questions(split)) for split in ("train", "test")] == [38, 14]

    @pytest.mark.data
    def test_xquad_is_split_by_article(self):
        articles = [{t.metadata["article"] for t in load_questions(split, "xquad")} for split in ("train", "test")]
        assert [len(a) for a in articles] == [44, 4]
        assert not articles[0] & articles[1]
        assert [len(load_questions(split, "xquad")) for split in ("train", "test")] == [1093, 97]
        assert len({task.id for task in all_tasks("xquad")}) == 1190

    @pytest.mark.data
    def test_auto_takes_xquad_where_it_is(self):
        assert agentgym.spec("search").tasks("test").source.endswith("xquad.en.json")

    def test_without_a_folder_auto_takes_our_own(self, monkeypatch, caplog):
        monkeypatch.setenv("AGENTGYM_DATA", "")
        monkeypatch.setattr("agentgym.datasets.noticed", set())
        assert agentgym.spec("search").tasks("test").source == "the project's own questions"
        assert "agentgym data get xquad" in caplog.text

    def test_unknown_splits_and_data_are_refused(self):
        with pytest.raises(ValueError, match="no split 'dev'"):
            agentgym.spec("search").tasks("dev")
        with pytest.raises(ValueError, match="data must be one of auto, own, xquad, hotpot_qa, not 'squad'"):
            load_questions("test", "squad")
        with pytest.raises(ValueError, match="data must be one of"):
            agentgym.make("search", data="squad")

    def test_what_is_asked_for_and_is_not_there_says_how_to_get_it(self, monkeypatch):
        monkeypatch.setenv("AGENTGYM_DATA", "")
        for data in ("xquad", "hotpot_qa"):
            with pytest.raises(FileNotFoundError, match=f'"agentgym data get {data}"'):
                load_questions("train", data)

    def test_hotpot_qa_is_read_from_rows_of_the_hub(self, monkeypatch, tmp_path):
        rows = [
            {
                "id": f"5a{n}",
                "question": f"Which is lamp {n}?",
                "answer": "yes",
                "type": "bridge",
                "level": "hard",
                "supporting_facts": {"title": ["Lamp", "Otter", "Lamp"], "sent_id": [0, 1, 1]},
                "context": {
                    "title": ["Lamp", "Otter", f"Sea {n}"],
                    "sentences": [["A lamp shines.", " Brightly."], ["Otters swim."], ["Salt."]],
                },
            }
            for n in range(20)
        ]
        (tmp_path / "hotpot_qa").mkdir()
        (tmp_path / "hotpot_qa" / "validation.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        monkeypatch.setenv("AGENTGYM_DATA", str(tmp_path))
        monkeypatch.setattr(corpora, "_corpora", {})
        monkeypatch.setattr(corpora, "_indexes", {})
        assert len(corpora.passages_of("hotpot_qa")) == 22
        tasks = all_tasks("hotpot_qa")
        assert sorted(task.id for task in tasks) == sorted(f"hotpot-5a{n}" for n in range(20))
        assert [hop["query"] for hop in tasks[0].metadata["hops"]] == ["Lamp", "Otter"]
        env = agentgym.make("search", data="hotpot_qa")
        assert play(env, tasks[0], lambda e: e.expert_action())[0] == 1.0
        observation = started(tasks[0], data="hotpot_qa").step(call("lamp"))[0]
        assert "[1] Lamp (Lamp)\nA lamp shines. Brightly." in observation[0]["content"]


class TestSearch:
    def test_it_tells_its_tool_to_both_kinds_of_model(self):
        env = agentgym.make("search")
        assert env.tools[0]["function"]["name"] == "search"
        assert list(env.tools[0]["function"]["parameters"]["properties"]) == ["query"]
        observation, _ = env.reset(options={"task": question()})
        example = re.search(r"<tool_call>.*</tool_call>", observation[0]["content"])[0]
        answer = env.step(example)[0][0]["content"]
        assert answer.startswith("<tool_response>\n[1] ")
        assert env.step("<answer>Lirren</answer>")[1] == 1.0

    def test_passages_come_with_title_and_id_the_best_first(self):
        for topk in (1, 3):
            content = started(topk=topk).step(call("Copper Strike"))[0][0]["content"]
            assert len(re.findall(r"^\[\d\] ", content, re.M)) == topk
            assert "[1] Copper Strike (copper-strike)\nThe Copper Strike of 1926 lasted" in content

    def test_long_passages_are_cut_with_a_mark(self):
        content = started(topk=1, passage_chars=20).step(call("Copper Strike"))[0][0]["content"]
        assert (
            content
            == "<tool_response>\n[1] Copper Strike (copper-strike)\nThe Copper Strike of [...]\n</tool_response>"
        )

    def test_native_calls_are_answered_by_tool_messages(self):
        env = started()
        calls = [
            {"id": f"c{n}", "type": "function", "function": {"name": "search", "arguments": json.dumps({"query": q})}}
            for n, q in enumerate(["Gull Rock", "zyxwv"])
        ]
        observation, reward, terminated, truncated, info = env.step({**assistant(""), "tool_calls": calls})
        assert [m["tool_call_id"] for m in observation] == ["c0", "c1"]
        assert observation[0]["content"].startswith("[1] Gull Rock (gull-rock)\n")
        assert observation[1]["content"] == NOTHING
        assert (reward, terminated, truncated, info["searches"]) == (0.0, False, False, 2)

    @pytest.mark.parametrize(
        ("reply", "says", "searches"),
        [
            (call(""), "the query is empty", 0),
            (call("  \n"), "the query is empty", 0),
            (call("salt " * 20_000), "100000 characters; 1000 is the limit", 0),
            (call("the of and"), "No passage has a word", 1),
            (call("\x00\ud800 漢字 🙂"), "No passage has a word", 1),
            (call("\x00copper\x00strike"), "Copper Strike (copper-strike)", 1),
            (call("x", topk=5), 'no argument "topk"', 0),
            ('<tool_call>{"name": "google", "arguments": {"query": "x"}}</tool_call>', "the tools are: search", 0),
            ('<tool_call>{"name": "search", "arguments": {"query": 5}}</tool_call>', "must be string", 0),
            ("<tool_call>", "without </tool_call>", 0),
            ("<answer></answer>", "is empty", 0),
            ("<answer>Lirren", "without </answer>", 0),
            ("It is Lirren.", "neither a search nor an answer", 0),
        ],
    )
    def test_a_wrong_reply_is_told_and_the_episode_goes_on(self, reply, says, searches):
        env = started()
        observation, reward, terminated, truncated, info = env.step(reply)
        assert says in observation[0]["content"]
        assert (reward, terminated, truncated, env.turn, info["searches"]) == (0.0, False, False, 1, searches)
        json.dumps([observation, info], ensure_ascii=False).encode("utf-8")
        assert env.step("<answer>Lirren</answer>")[1] == 1.0

    def test_one_reply_has_five_searches_at_most(self):
        env = started()
        content = env.step(call("otter") * 8)[0][0]["content"]
        assert content.count("(corrin-glass)") == 5
        assert content.count("5 searches in one reply is the limit") == 3
        assert env.step(call("otter"))[4]["searches"] == 6

    def test_an_answer_beside_a_call_does_not_count(self):
        env = started()
        assert env.step(f"<answer>Lirren</answer>{call('Lirren')}")[2] is False

    @settings(max_examples=60, deadline=None)
    @given(text=st.text(st.characters(), max_size=60), query=st.text(st.characters(), max_size=60))
    def test_any_text_is_an_action_and_a_query(self, text, query):
        env = started()
        for action in (text, call(query)):
            observation, reward, _, _, info = env.step(action)
            assert observation in env.observation_space
            assert reward == float(info["success"])
            json.dumps([observation, info], ensure_ascii=False).encode("utf-8")
            env.reset(options={"task": question()})


class TestAnswer:
    @pytest.mark.parametrize(
        ("reply", "em", "overlap"),
        [
            ("<answer>Lirren</answer>", 1.0, 1.0),
            ("I read it. <answer>the LIRREN.</answer>", 1.0, 1.0),
            ("<answer>the beach of Lirren</answer>", 0.0, 0.5),
            ("<answer>Vantry</answer>", 0.0, 0.0),
        ],
    )
    @pytest.mark.parametrize("reward", ["em", "f1"])
    def test_it_ends_the_episode_with_the_chosen_reward(self, reply, em, overlap, reward):
        observation, got, terminated, truncated, info = started(reward=reward).step(reply)
        assert got == (em if reward == "em" else overlap)
        assert (terminated, truncated) == (True, False)
        assert (info["em"], info["f1"], info["success"], info["expected"]) == (em, overlap, em == 1.0, "Lirren")
        assert observation == [{"role": "user", "content": "Correct." if em else "Wrong."}]

    def test_the_last_turn_truncates_without_a_reward(self):
        env = started(max_turns=2)
        assert env.step(call("otter"))[2:4] == (False, False)
        assert env.step(call("otter"))[1:4] == (0.0, False, True)
        with pytest.raises(RuntimeError, match="reset"):
            env.step("<answer>Lirren</answer>")

    def test_a_short_episode_still_lets_the_expert_answer(self):
        env = agentgym.make("search", max_turns=2)
        assert all(play(env, task, lambda e: e.expert_action())[0] == 1.0 for task in own_questions("test"))

    def test_questions_may_have_many_messages_and_parts(self):
        shots = ({"role": "system", "content": "Ünï"}, {"role": "user", "content": [{"type": "text", "text": "Wo?"}]})
        task = Task("mine", shots, ["Lirren", "Vantry"], metadata={"corpus": "own"})
        env = agentgym.make("search")
        observation, _ = env.reset(options={"task": task})
        assert observation[0] == shots[0]
        assert "<answer>" in observation[1]["content"][1]["text"]
        assert task.messages == shots
        assert env.random_action(random.Random(0))
        assert env.step("<answer>Vantry</answer>")[1] == 1.0

    @pytest.mark.parametrize("answer", [None, [], "", [""], 5, ["x", 5]])
    def test_a_task_without_a_gold_answer_is_refused_by_its_id(self, answer):
        with pytest.raises(ValueError, match="'mine': the answer must be"):
            agentgym.make("search").init(question(answer))

    def test_a_task_without_a_question_or_a_corpus_is_refused(self):
        env = agentgym.make("search")
        with pytest.raises(ValueError, match="'mine' has no messages"):
            env.init(Task("mine", answer="x"))
        with pytest.raises(ValueError, match="names no corpus"):
            env.init(Task("mine", ({"role": "user", "content": "?"},), "x"))
        with pytest.raises(ValueError, match="no corpus 'wiki'"):
            env.init(question(corpus="wiki"))

    def test_the_corpus_may_be_named_by_the_environment(self, tmp_path):
        file = tmp_path / "mine.jsonl"
        file.write_text('{"id": "1", "title": "Lamp", "text": "It shines."}\n')
        env = started(corpus=str(file))
        assert "[1] Lamp (1)\nIt shines." in env.step(call("lamp"))[0][0]["content"]

    def test_each_task_is_searched_in_its_own_corpus(self, tmp_path):
        file = tmp_path / "lamps.jsonl"
        file.write_text('{"id": "1", "title": "Lamp", "text": "An otter with a lamp."}\n')
        env = agentgym.make("search")
        for corpus, id in (("own", "corrin-glass"), (str(file), "1"), ("own", "corrin-glass")):
            env.reset(options={"task": question(corpus=corpus)})
            assert f"({id})" in env.step(call("otter"))[0][0]["content"]

    @pytest.mark.parametrize(
        "setting",
        [
            {"reward": "rouge"},
            {"topk": 0},
            {"topk": 2.5},
            {"topk": "3"},
            {"passage_chars": 0},
            {"passage_chars": 2.5},
            {"timeout": 0},
            {"timeout": float("inf")},
            {"retriever": "bm26"},
        ],
    )
    def test_an_impossible_setting_is_refused(self, setting):
        with pytest.raises(ValueError, match="must be"):
            agentgym.make("search", **setting)


class TestFailure:
    def test_a_retriever_that_cannot_be_reached_fails_the_episode_and_is_no_wrong_answer(self, monkeypatch):
        monkeypatch.setattr("agentgym_envs.search.retrievers.WAITS", (0.01, 0.01))
        env = started(retriever="http://127.0.0.1:9/retrieve", timeout=1)
        with pytest.raises(RetrieverError, match=r"http://127.0.0.1:9/retrieve cannot be reached"):
            env.step(call("otter"))
        trajectory = asyncio.run(run_episode(env, ExpertPolicy(), own_questions("test")[0]))
        assert trajectory.end == "error"
        assert "RetrieverError" in trajectory.error

    def test_a_thousand_environments_cost_nothing(self):
        envs = [agentgym.make("search", retriever="sandbox") for _ in range(1_000)]
        for env in envs:
            env.close()
            env.close()


class TestContract:
    @pytest.fixture(autouse=True)
    def own(self, monkeypatch):
        monkeypatch.setenv("AGENTGYM_DATA", "")

    def test_gymnasium_and_our_own_checker_find_nothing(self):
        check_env(agentgym.make("search"))
        assert check_author("search") == []

    def test_another_process_plays_the_same(self):
        one, other = played_twice("search")
        assert one == other
        assert len(one) > 16

    def test_a_step_before_the_start_is_refused(self):
        env = agentgym.make("search")
        for use in (lambda: env.step("1"), env.expert_action, lambda: env.random_action(random.Random(0))):
            with pytest.raises(RuntimeError, match="reset"):
                use()
