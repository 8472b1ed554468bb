"""`agentgym eval` as a stranger types it: what it prints, its exit codes, and its errors."""

import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from parity import Parity

from agentgym.cli import main
from agentgym.core import registration
from agentgym.core.registration import register
from agentgym.evaluate.store import read_cell, read_run


class Broken(Parity):
    """Fails on odd numbers."""

    def step(self, action):
        if self.task.answer == "odd":
            raise RuntimeError("out of order")
        return super().step(action)


class Dead(Parity):
    def init(self, task):
        raise OSError("no licence")


class Cursed(Parity):
    def __init__(self, **kwargs):
        raise KeyError("why")


class Unchecked(Parity):
    """Compares a setting without a look at its type."""

    def __init__(self, rows=1, **kwargs):
        super().__init__(**kwargs)
        if rows < 1:
            raise ValueError


class Uninstalled(Parity):
    def __init__(self, **kwargs):
        import nowhere_to_be_found  # noqa: F401

        super().__init__(**kwargs)


class Needy(Parity):
    """Needs a package when it plays."""

    def step(self, action):
        import nowhere_to_be_found  # noqa: F401


class Loud(Parity):
    """Prints what it does."""

    def step(self, action):
        print("step")
        return super().step(action)


@pytest.fixture(autouse=True)
def registered(tmp_path, monkeypatch):
    registration.load_plugins()
    before = dict(registration.registered_specs)
    monkeypatch.chdir(tmp_path)
    for name in ("OPENAI_BASE_URL", "OPENAI_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    for env in (Parity, Broken, Dead, Cursed, Unchecked, Uninstalled, Loud):
        register(f"test/{env.__name__.lower()}", env)
    register("test/needy", Needy, needs=["nowhere_to_be_found:acme[found]"])
    yield
    registration.registered_specs.clear()
    registration.registered_specs.update(before)


def json_of(capsys, *words, code=0):
    capsys.readouterr()
    assert main(["eval", *words, "--json"]) == code
    return json.loads(capsys.readouterr().out)


# ---- what it prints and leaves behind


def test_all_pairs_of_environments_and_agents_are_played_into_a_new_folder(capsys):
    words = ["test/parity", "frozen_lake", "--policy", "expert", "--policy", "null", "-n", "5", "-k", "2"]
    assert main(["eval", *words]) == 0
    shown = capsys.readouterr()
    assert "100.0%" in shown.out
    [folder] = Path("runs").iterdir()
    assert re.fullmatch(r"test-parity\+1-2-agents-\d{8}-\d{6}", folder.name)
    assert f"stored in runs/{folder.name}; to look at the episodes: agentgym view runs/{folder.name}" in shown.err
    assert [cell["name"] for cell in read_run(folder)["cells"]] == [
        f"{env}@{agent}" for env in ("test/parity", "frozen_lake") for agent in ("expert", "null")
    ]
    assert read_run(folder)["command"] == ["agentgym", "eval", *words]
    assert sorted(p.name for p in folder.iterdir()) == ["episodes", "lock", "report.html", "results.json", "run.json"]


def test_json_is_the_only_thing_on_standard_output(capsys):
    record = json_of(capsys, "test/parity", "--policy", "random", "-n", "20", "-k", "2", "--out", "r")
    [cell] = record["cells"]
    assert 0.3 < cell["success"] < 1
    assert (cell["episodes"], record["folder"], record["stopped"]) == (40, "r", None)


def test_what_an_environment_prints_is_no_part_of_the_json(capsys):
    assert main(["eval", "test/loud", "--policy", "expert", "-n", "2", "--no-store", "--json"]) == 0
    shown = capsys.readouterr()
    assert json.loads(shown.out)["cells"][0]["episodes"] == 2
    assert shown.err.count("step\n") == 2


def test_other_arguments_may_need_other_packages(capsys):
    """What an environment needs it needs as it is registered: with a setting of the user's it is tried."""
    record = json_of(
        capsys, "test/needy", "--policy", "null", "-n", "1", "--kwargs", '{"max_turns": 1}', "--no-store", code=1
    )
    assert "nowhere_to_be_found" in str(record["cells"][0]["error_texts"])


def test_started_again_it_plays_only_what_is_missing(capsys):
    json_of(capsys, "test/parity", "--policy", "expert", "-n", "3", "--out", "r")
    record = json_of(capsys, "test/parity", "--policy", "expert", "-n", "all", "--out", "r")
    assert record["cells"][0]["episodes"] == 20
    assert len(Path("r/episodes/test-parity@expert.jsonl").read_text().splitlines()) == 20
    assert main(["eval", "test/parity", "--policy", "expert", "--seed", "1", "--out", "r"]) == 2
    assert "seed was 0, is now 1" in capsys.readouterr().err


def test_nothing_is_kept_where_nothing_shall_be(capsys):
    assert main(["eval", "test/parity", "--policy", "expert", "-n", "2", "--no-store", "--quiet"]) == 0
    shown = capsys.readouterr()
    assert "100.0%" in shown.out
    assert shown.err == ""
    assert not Path("runs").exists()


def test_where_tasks_are_from_is_said(capsys, monkeypatch):
    monkeypatch.setenv("AGENTGYM_DATA", "")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert main(["eval", "gsm8k", "--policy", "expert", "-n", "1"]) == 0
    assert "gsm8k: tasks: the project's own word problems\n" in capsys.readouterr().err


def test_tables_by_tag_are_there_for_the_asking(capsys):
    assert main(["eval", "test/parity", "--policy", "expert", "-n", "2", "--parts"]) == 0
    assert "number" in capsys.readouterr().out


def test_a_users_own_agents_play(capsys, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "my_own_agent.py").write_text("def run(messages, word='even'):\n    return word\n")
    (tmp_path / "answers.txt").write_text("even\nodd\n")
    own = ["--agent", "my_own_agent:run", "--agent-kwargs", '{"word": "odd"}', "--script", "answers.txt"]
    record = json_of(capsys, "test/parity", *own, "--out", "r")
    assert [(cell["agent"], cell["success"], cell["turns"]) for cell in record["cells"]] == [
        ("my_own_agent:run", 0.5, 1.5),
        ("answers", 1.0, 1.5),
    ]
    assert json_of(capsys, "test/parity", "--policy", "expert", "--name", "me")["cells"][0]["agent"] == "me"


# ---- exit codes


def test_failed_episodes_are_exit_code_1_and_can_be_played_again(capsys):
    assert main(["eval", "test/broken", "--policy", "expert", "--out", "r"]) == 1
    shown = capsys.readouterr()
    assert "10 episodes failed, and are in no mean; to play them again: agentgym eval --resume r" in shown.err
    assert "out of order" in shown.out
    assert main(["eval", "test/dead", "--policy", "expert", "-n", "3"]) == 1
    assert "OSError: no licence" in capsys.readouterr().out


def test_a_limit_is_exit_code_3_and_more_of_it_goes_on(capsys):
    words = ["test/parity", "--policy", "expert", "--concurrency", "1", "--episode-limit", "4", "--out", "r"]
    assert main(["eval", *words]) == 3
    shown = capsys.readouterr()
    assert "agentgym eval --resume r --episode-limit MORE" in shown.err
    assert "16 of 20 episodes were not played" in shown.out
    assert main(["eval", "--resume", "r"]) == 3
    assert main(["eval", "--resume", "r", "--episode-limit", "100"]) == 0
    assert len(read_cell(Path("r/episodes/test-parity@expert.jsonl"))) == 20


@pytest.mark.parametrize(("option", "bad", "least"), [("concurrency", -1, 1), ("retries", -1, 0)])
def test_a_value_that_is_refused_is_not_stored(option, bad, least, capsys):
    assert main(["eval", "test/parity", "--policy", "expert", "-n", "2", "--out", "r"]) == 0
    stored = Path("r/run.json").read_text()
    assert main(["eval", "--resume", "r", f"--{option}", str(bad)]) == 2
    assert f"{option} must be at least {least}, not {bad}" in capsys.readouterr().err
    assert Path("r/run.json").read_text() == stored
    assert main(["eval", "--resume", "r"]) == 0
    record = json.loads(stored)
    Path("r/run.json").write_text(json.dumps({**record, "settings": {**record["settings"], option: bad}}))
    assert main(["eval", "--resume", "r", f"--{option}", "1"]) == 0, "a folder that holds such a value is of use again"
    assert main(["eval", "--resume", "r"]) == 0


# ---- mistakes


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ([], "name an environment"),
        (["test/parity"], "--model and --base-url are needed, or --policy expert"),
        (["test/parity", "--policy", "chat"], "--model and --base-url are needed"),
        (["test/parity", "--model", "m"], "--model and --base-url are needed (or OPENAI_BASE_URL"),
        (["test/parit", "--policy", "expert"], "did you mean 'test/parity'"),
        (["test/parity", "--model", "m", "--base-url", "here"], "must begin with http"),
        (["test/parity", "--model", "m", "--base-url", "http://a", "--base-url", "http://b"], "2 --base-url for 1"),
        (["test/parity", "--policy", "expert", "--split", "tset"], "no split 'tset'"),
        (["test/parity", "--policy", "expert", "--kwargs", '{"turns": 3}'], "takes no argument 'turns'"),
        (["test/parity", "--policy", "expert", "-n", "0"], "at least 1"),
        (["test/parity", "--policy", "expert", "-k", "0"], "at least 1"),
        (["test/parity", "--policy", "expert", "--concurrency", "0"], "at least 1"),
        (["test/parity", "--policy", "expert", "--retries", "-1"], "at least 0"),
        (["test/parity", "--policy", "expert", "--token-limit", "0"], "must be positive"),
        (["test/parity", "--policy", "expert", "--temperature", "1"], "temperature: only with --model"),
        (["test/parity", "--policy", "expert", "--agent-kwargs", '{"a": 1}'], "--agent-kwargs needs --agent"),
        (
            ["test/parity", "--agent", "codex", "--model", "m", "--base-url", "http://a", "--agent-kwargs", '{"a": 1}'],
            "--agent codex plays by itself",
        ),
        (["test/parity", "--policy", "expert", "--policy", "null", "--name", "a"], "--name names one agent"),
        (["test/parity", "--policy", "expert", "--no-store", "--out", "r"], "leave out --out"),
        (["test/parity", "--policy", "expert", "--prices", "gone.yaml"], "gone.yaml: No such file"),
        (["test/parity", "--model", "m", "--base-url", "http://a", "--cost-limit", "1"], "needs a table of prices"),
        (["test/uninstalled", "--policy", "expert"], "No module named 'nowhere_to_be_found'"),
        (
            ["test/needy", "--policy", "expert"],
            "test/needy needs acme[found], which is not installed: pip install 'acme",
        ),
        (["test/parity", "two.yaml", "--policy", "expert"], "two.yaml: a suite has its own environments"),
        (["test/parity", "--policy", "expert", "--out", "/proc/x"], "/proc/x: cannot be written (No such file or dir"),
        (["test/parity", "--serve", ".", "--serve-args", "'a"], "--serve-args: No closing quotation: 'a"),
        (
            ["test/parity", "--model", "m", "--base-url", "http://a", "--max-tokens", "0"],
            "max_tokens must be at least 1",
        ),
        (["test/cursed", "--policy", "expert"], "test/cursed: cannot be made: KeyError: 'why'"),
        (["tests.nowhere:Env", "--policy", "expert"], "cannot import module"),
        (["test/parity", "--agent", "no_such_module:run"], "no_such_module"),
        (["test/parity", "--serve", "no-such-folder"], "no-such-folder: no folder"),
        (["gone.yaml"], "gone.yaml: No such file"),
        (["--resume", "gone"], "gone holds no evaluation"),
        (["--resume", "gone", "-n", "4"], "leave out --n"),
        (["--resume", "gone", "--seed", "0"], "leave out --seed"),
        (["--resume", "gone", "--temperature", "0"], "leave out --temperature, or repeat the whole command with --out"),
        (["--resume", "gone", "--base-url", "http://127.0.0.1:2"], "leave out --base-url"),
        (["test/parity", "--policy", "expert", "--kwargs", "{"], "not valid JSON"),
        (["test/parity", "--policy", "expert", "--kwargs", "[]"], "must be a JSON object"),
        (["frozen_lake", "--policy", "expert", "--kwargs", '{"tasks": ["a"]}'], "tasks must be a TaskSet, not a list"),
        (
            ["test/unchecked", "--policy", "expert", "--kwargs", '{"rows": "3"}'],
            "test/unchecked: cannot be made with {'rows': '3'}: '<' not",
        ),
        (["test/parity", "--policy", "expert", "-n", "some"], "a whole number or all, not 'some'"),
        (["test/parity", "--policy", "expert", "--time-limit", "soon"], "a time: 90, 90s, 10m, 2h, not 'soon'"),
        (["test/parity", "--polcy", "expert"], "did you mean --policy?"),
        (["test/parity", "--policy", "expert", "--temp", "1"], "did you mean --temperature?"),
        (["test/parity", "--policy", "expert", "--episodes=5"], "no option --episodes: did you mean -n?"),
        (["test/parity", "--policy", "expert", "--rollouts", "4"], "did you mean -k?"),
    ],
)
def test_mistakes_are_one_line_and_exit_code_2_and_leave_nothing_behind(words, told, capsys):
    try:
        code = main(["eval", *words])
    except SystemExit as ended:
        code = ended.code
    err = capsys.readouterr().err
    assert code == 2
    assert told in err
    assert err.count("\n") == 1
    assert not Path("runs").exists()


# ---- endpoints


class Endpoint(BaseHTTPRequestHandler):
    """An OpenAI-compatible endpoint that says "even" and counts 100 tokens, or `refusal`, or has no list of models."""

    models = ("m", "model-b")
    refusal = 0
    asked: list[dict] = []  # noqa: RUF012 - shared on purpose

    def do_GET(self):
        self.answer(200 if self.models else 404, {"data": [{"id": name} for name in self.models]})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.asked.append(body)
        message = {"role": "assistant", "content": "even"}
        self.answer(200, {"choices": [{"message": message}], "usage": {"prompt_tokens": 90, "completion_tokens": 10}})

    def answer(self, status, record):
        content = json.dumps(record).encode()
        self.send_response(self.refusal or (404 if "/v1/" not in self.path else status))
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *args):
        pass


@pytest.fixture
def endpoint():
    Endpoint.asked.clear()
    server = ThreadingHTTPServer(("127.0.0.1", 0), Endpoint)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_models_of_one_endpoint_play_with_all_that_was_asked_for(endpoint, capsys):
    words = [
        "test/parity",
        "--model",
        "m",
        "--model",
        "model-b",
        "--base-url",
        f"{endpoint}/v1",
        "--n",
        "4",
        "--k",
        "2",
    ]
    words += ["--temperature", "0.5", "--top-p", "0.9", "--max-tokens", "7", "--reasoning-effort", "low"]
    words += ["--extra", '{"min_p": 0.1}', "--seed", "3"]
    record = json_of(capsys, *words)
    assert [(cell["agent"], cell["success"], cell["requests"]) for cell in record["cells"]] == [
        ("m", 0.5, 12),
        ("model-b", 0.5, 12),
    ]
    fields = {name: value for name, value in Endpoint.asked[0].items() if name not in ("messages", "model", "seed")}
    assert fields == {"temperature": 0.5, "top_p": 0.9, "max_tokens": 7, "reasoning_effort": "low", "min_p": 0.1}
    seeds = [{body["seed"] for body in Endpoint.asked if body["model"] == model} for model in Endpoint.models]
    assert seeds[0] == seeds[1], "models are compared with the same draws"
    assert len(seeds[0]) == 12, "each turn of each episode has draws of its own"
    assert "OPENAI" not in Path(record["folder"], "run.json").read_text()


@pytest.mark.parametrize(
    ("limit", "option"), [(["--token-limit", "450"], "--token-limit"), (["--cost-limit", "0.00045"], "--cost-limit")]
)
def test_limits_of_tokens_and_cost_stop_the_run(endpoint, capsys, limit, option):
    Path("prices.yaml").write_text("m: {input: 1, output: 1}")
    words = [
        "test/parity",
        "--model",
        "m",
        "--base-url",
        f"{endpoint}/v1",
        "--prices",
        "prices.yaml",
        "--max-turns",
        "1",
    ]
    assert main(["eval", *words, *limit, "--concurrency", "1", "--out", "r", "--json"]) == 3
    shown = capsys.readouterr()
    assert f"({option}); to go on: agentgym eval --resume r {option} MORE" in shown.err
    [cell] = json.loads(shown.out)["cells"]
    assert (cell["episodes"], cell["tokens"]["prompt_tokens"]) == (5, 450)
    assert cell["cost"] == pytest.approx(500e-6)


def test_an_episode_ends_at_its_own_limit_of_tokens(endpoint, capsys):
    words = ["test/parity", "--model", "m", "--base-url", f"{endpoint}/v1", "--max-episode-tokens", "100"]
    [cell] = json_of(capsys, *words)["cells"]
    assert cell["ends"] == {"terminated": 10, "tokens": 10}


def test_an_endpoint_that_lists_no_models_is_asked_for_one_token(endpoint, capsys, monkeypatch):
    monkeypatch.setattr(Endpoint, "models", ())
    words = ["test/parity", "--model", "anything", "--base-url", f"{endpoint}/v1", "-n", "2"]
    assert main(["eval", *words]) == 0
    assert [body.get("max_tokens") for body in Endpoint.asked].count(1) == 1
    Endpoint.asked.clear()
    assert main(["eval", *words, "--no-probe"]) == 0
    assert [body.get("max_tokens") for body in Endpoint.asked].count(1) == 0


@pytest.mark.parametrize(
    ("model", "path", "refusal", "told"),
    [
        ("model-c", "/v1", 0, "has no model 'model-c': did you mean model-b?; it has m, model-b"),
        ("m", "", 0, "is not a chat endpoint"),
        ("m", "/v1", 401, "refuses the key, or needs one, in OPENAI_API_KEY (401"),
    ],
)
def test_an_endpoint_that_cannot_play_is_found_before_anything_is_played(
    endpoint, capsys, monkeypatch, model, path, refusal, told
):
    monkeypatch.setattr(Endpoint, "refusal", refusal)
    assert main(["eval", "test/parity", "--model", model, "--base-url", endpoint + path]) == 2
    err = capsys.readouterr().err
    assert told in err
    assert err.count("\n") == 1
    assert not Path("runs").exists()


def test_a_key_that_an_endpoint_refuses_and_repeats_is_not_printed(endpoint, capsys, monkeypatch):
    monkeypatch.setattr(Endpoint, "refusal", 401)
    monkeypatch.setattr(Endpoint, "models", ("no such key: sk-mine",))
    monkeypatch.setenv("OPENAI_API_KEY", "sk-mine")
    assert main(["eval", "test/parity", "--model", "m", "--base-url", f"{endpoint}/v1"]) == 2
    err = capsys.readouterr().err
    assert "no such key: [the key]" in err
    assert "sk-mine" not in err


def test_a_dead_endpoint_is_found_before_anything_is_played(capsys):
    assert main(["eval", "test/parity", "--model", "m", "--base-url", "http://127.0.0.1:9/v1"]) == 2
    assert "nothing answers there" in capsys.readouterr().err


# ---- suites


def test_a_suite_plays_and_the_command_line_goes_over_it(capsys):
    text = "k: 3\nagents: [expert]\nenvs: [{id: test/parity, n: 5, agents: [expert]}, frozen_lake]\n"
    Path("two.yaml").write_text(text)
    assert main(["eval", "two.yaml"]) == 0
    [folder] = Path("runs").iterdir()
    assert folder.name.startswith("two-expert-")
    [parity, lake] = json_of(capsys, "two.yaml", "-n", "2", "--policy", "null", "--out", "r")["cells"]
    assert (parity["agent"], parity["tasks"], parity["samples"]) == ("null", 2, 3)
    assert lake["tasks"] == 2
    assert (
        json_of(capsys, "--suite", "two.yaml", "-n", "2", "--policy", "null", "--out", "r")["cells"][0]["episodes"] == 6
    )


def test_a_suites_mistake_names_the_file(capsys):
    Path("two.yaml").write_text("agents: [expert]\nenvs: [frozen_lake]\nconcurency: 3\n")
    assert main(["eval", "two.yaml"]) == 2
    assert "two.yaml: the suite has no 'concurency': did you mean concurrency?" in capsys.readouterr().err
    Path("two.yaml").write_text("agents: [expert]\nenvs: [frozen_lake]\n")
    assert main(["eval", "--suite", "two.yaml", "test/parity"]) == 2
    assert "test/parity: the suite two.yaml sets the environments: leave test/parity out" in capsys.readouterr().err
    Path("two.yaml").write_text("agents: [expert]\nenvs: [test/parit]\n")
    assert main(["eval", "two.yaml"]) == 2
    assert "eval: two.yaml: no environment 'test/parit': did you mean 'test/parity'" in capsys.readouterr().err
