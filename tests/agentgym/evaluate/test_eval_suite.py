"""A suite's file: what it means, and one line for what is wrong in it."""

import json
import re
import textwrap
from pathlib import Path

import pytest

from agentgym.evaluate.budget import Budget
from agentgym.evaluate.store import open_store
from agentgym.evaluate.suite import read_suite, suite_in, suite_of

ROOT = Path(__file__).parents[3]


@pytest.fixture
def written(tmp_path):
    def write(text):
        path = tmp_path / "small.yaml"
        path.write_text(textwrap.dedent(text), encoding="utf-8")
        return path

    return write


WHOLE = """
    n: 50
    k: 4
    seed: 7
    concurrency: 32
    retries: 2
    limits: {cost: 2.5, tokens: 1000, seconds: 60, episodes: 9, episode_tokens: 500, episode_seconds: 30, answer_seconds: 5}
    prices: prices.yaml
    agents:
      - {model: m, base_url: "http://localhost:8000/v1", temperature: 0.7, extra: {top_p: 0.9}}
      - policy: expert
      - random
      - {agent: "agentgym.policies.base:NullPolicy", name: mine}
      - script: answers.txt
    envs:
      - frozen_lake
      - {id: frozen_lake, name: big_lake, kwargs: {size: 6}, n: all, k: 1, max_turns: 9, agents: [expert, mine]}
    """


def test_every_key_arrives(written, tmp_path):
    (tmp_path / "prices.yaml").write_text("m: {input: 1, output: 2}")
    (tmp_path / "answers.txt").write_text("left\nright\n")
    suite = suite_of(read_suite(written(WHOLE)))
    assert (suite.name, suite.concurrency, suite.retries) == ("small", 32, 2)
    assert suite.budget == Budget(episodes=9, tokens=1000, cost=2.5, seconds=60)
    assert (suite.limits.tokens, suite.limits.episode_timeout, suite.limits.act_timeout) == (500, 30, 5)
    assert suite.prices.cost("m", {"prompt_tokens": 1_000_000}) == 1.0
    assert [cell.name for cell in suite.cells] == [
        *(f"frozen_lake@{name}" for name in ("m", "expert", "random", "mine", "answers")),
        "big_lake@expert",
        "big_lake@mine",
    ]
    first, last = suite.cells[0], suite.cells[-1]
    assert (first.n, first.k, first.seed, first.split, first.max_turns) == (50, 4, 7, "test", None)
    assert (last.n, last.k, last.seed, last.max_turns, last.env.kwargs) == (None, 1, 7, 9, {"size": 6})
    assert first.agent.settings["extra"] == {"top_p": 0.9}
    assert suite.cells[4].agent.settings["answers"] == ["left", "right"]
    assert last.env.make().unwrapped.spec.id == "big_lake"


def test_where_nobody_says_how_many_there_are_a_hundred_tasks_once():
    [cell] = suite_of({"agents": ["expert"], "envs": ["frozen_lake"]}).cells
    assert (cell.n, cell.k, cell.seed) == (100, 1, 0)


def test_an_endpoint_may_be_named_by_the_environment_variable(monkeypatch):
    monkeypatch.setenv("OPENAI_BASE_URL", "http://elsewhere/v1")
    [cell] = suite_of({"agents": [{"model": "m"}], "envs": ["frozen_lake"]}).cells
    assert cell.agent.settings["base_url"] == "http://elsewhere/v1"


def test_a_run_folder_gives_its_suite_back(written, tmp_path):
    (tmp_path / "prices.yaml").write_text("m: {input: 1, output: 2}")
    (tmp_path / "answers.txt").write_text("left\n")
    suite = suite_of(read_suite(written(WHOLE)))
    limits = {name: value for name, value in vars(suite.limits).items() if name != "max_turns"}
    settings = {"limits": limits, "budget": suite.budget.to_json(), "retries": 2, "concurrency": 32}
    plan = [{**cell.to_json(), "tasks": 5} for cell in suite.cells]
    with open_store(tmp_path / "small", plan, settings=settings, prices=suite.prices.to_json()):
        assert suite_in(tmp_path / "small") == suite


def test_the_shipped_example_is_a_suite():
    suite = suite_of(read_suite(ROOT / "examples" / "suite.yaml"))
    assert suite.cells


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("agents: [expert]\nenvs: [frozen_lake]\nconcurency: 3", "no 'concurency': did you mean concurrency?"),
        ("agents: [expert]\nenvs: [{id: frozen_lake, kwarg: {}}]", "no 'kwarg': did you mean kwargs?"),
        ("agents: [{model: m, temprature: 1}]\nenvs: [frozen_lake]", "'temprature': did you mean temperature?"),
        ("agents: [expert]\nenvs: [frozen_lake]\nlimits: {cst: 1}", "no 'cst': did you mean cost?"),
        ("agents: [expert]\nenvs: [frozen_lak]", "did you mean 'frozen_lake'"),
        ("agents: [{policy: exprt}]\nenvs: [frozen_lake]", "no policy 'exprt': did you mean expert?"),
        ("agents: [expert]\nenvs: [{id: frozen_lake, agents: [exprt]}]", "no agent 'exprt': did you mean expert?"),
        ("agents: [expert, expert]\nenvs: [frozen_lake]", "two agents are called 'expert'"),
        ("agents: [expert]\nenvs: [frozen_lake, frozen_lake]", "frozen_lake@expert is there twice"),
        ("agents: [expert]\nenvs: []", "the suite needs envs"),
        ("envs: [frozen_lake]", "the suite needs agents"),
        ("agents: [expert]\nenvs: [{id: frozen_lake, agents: []}]", "no environment of the suite has agents"),
        ("agents: [expert]\nenvs: [frozen_lake]\nk: many", "k must be a whole number, not 'many'"),
        ("agents: [expert]\nenvs: [frozen_lake]\nk: true", "k must be a whole number, not True"),
        ("agents: [expert]\nenvs: [frozen_lake]\nk: 0", "k must be at least 1, not 0"),
        ("agents: [expert]\nenvs: [frozen_lake]\nn: some", "n must be a whole number or all, not 'some'"),
        ("agents: [expert]\nenvs: [frozen_lake]\nlimits: {tokens: 1e6}", "tokens must be a whole number, not '1e6'"),
        ("agents: [expert]\nenvs: [frozen_lake]\nlimits: {cost: 0}", "cost must be positive"),
        ("agents: expert\nenvs: [frozen_lake]", "agents must be a list, not 'expert'"),
        ("agents: [{temperature: 1}]\nenvs: [frozen_lake]", "needs one of model, serve, policy, agent, script"),
        ("agents: [{policy: [expert]}]\nenvs: [frozen_lake]", "policy must be a text, not ['expert']"),
        ("agents: [{model: m, base_url: b, timeout: 2m}]\nenvs: [frozen_lake]", "timeout must be a number, not '2m'"),
        ("agents: [{model: m, base_url: b, stream: 1}]\nenvs: [frozen_lake]", "stream must be true or false, not 1"),
        ("agents: [{model: m, base_url: b, extra: 4}]\nenvs: [frozen_lake]", "extra must be a table, not 4"),
        (
            "agents: [{model: m, base_url: b, extra: {a: !!binary aGk=}}]\nenvs: [frozen_lake]",
            "small.yaml:1: could not determine a constructor for the tag 'tag:yaml.org,2002:binary'",
        ),
        ("agents: [{script: 4}]\nenvs: [frozen_lake]", "script must be a text, not 4"),
        ("agents: [expert]\nenvs: [{id: frozen_lake, agents: [[expert]]}]", "no agent ['expert']"),
        ("agents: [3]\nenvs: [frozen_lake]", "an agent is a table with"),
        ("agents: [expert]\nenvs: [{kwargs: {}}]", "an environment is an id, or a table with one"),
        ("agents: [expert]\nenvs: [{id: 'no.such:Env'}]", "cannot import module 'no.such'"),
        ("agents: [{script: gone.txt}]\nenvs: [frozen_lake]", "gone.txt: No such file"),
        ("agents: [expert]\nenvs: [frozen_lake]\nprices: gone.yaml", "gone.yaml: No such file"),
        ("n: 1\nn: 2", "small.yaml:2: 'n' stands twice"),
        ("agents: [\n", "small.yaml:2: expected the node content"),
        ("just words", "a suite is a table with agents and envs, not 'just words'"),
        ("", "a suite is a table with agents and envs, not None"),
    ],
)
def test_mistakes_are_one_line_that_names_what_was_meant(written, text, words):
    with pytest.raises(ValueError, match=re.escape(words)) as refused:
        suite_of(read_suite(written(text)))
    assert "\n" not in str(refused.value)


def test_a_date_is_text_that_can_be_stored(written):
    extra = "{since: 2020-01-01, at: 2020-01-01 10:00:00, 2021-02-03: [1, 1.5, null, true]}"
    text = f"agents: [{{model: m, base_url: b, extra: {extra}}}]\nenvs: [frozen_lake]"
    [cell] = suite_of(read_suite(written(text))).cells
    found = json.loads(json.dumps(cell.to_json()))["agent"]["settings"]["extra"]
    assert found == {"since": "2020-01-01", "at": "2020-01-01 10:00:00", "2021-02-03": [1, 1.5, None, True]}


def test_a_table_may_take_keys_of_others_and_replace_them(written):
    text = "a: &a {n: 1, k: 1}\nb: &b {<<: *a, k: 2}\nc: {<<: *b, n: 3}"
    assert read_suite(written(text)) == {
        "name": "small",
        "a": {"n": 1, "k": 1},
        "b": {"n": 1, "k": 2},
        "c": {"n": 3, "k": 2},
    }


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"gone.yaml: No such file"):
        read_suite(tmp_path / "gone.yaml")
