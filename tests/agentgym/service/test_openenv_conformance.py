"""The real `openenv` package from PyPI against our server: its clients and its `openenv validate`, unchanged.

It lies in a virtual environment of its own (`openenv_package.py`).
"""

import json
import subprocess
import urllib.request

import pytest
from openenv_envs import Counter, Sum
from openenv_package import FOREIGN, clean_environment, openenv_python, our_server

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def python(pytestconfig):
    return openenv_python(pytestconfig.cache)


@pytest.fixture(scope="module")
def url():
    with our_server("openenv_envs:Sum", "openenv_envs:Counter") as url:
        yield url


def driven(python, case, url):
    done = subprocess.run(
        [python, FOREIGN / "drive_clients.py", case, url],
        capture_output=True,
        text=True,
        timeout=120,
        env=clean_environment(),
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def local_episode(env, task, seed, *replies):
    env.init(task)
    return [env.reset(seed=seed), *(env.step(reply) for reply in replies)]


def test_the_generic_client_plays_as_one_plays_here(python, url):
    found = driven(python, "generic", url)
    env = Sum()
    env.reset(seed=5)
    (opening, info), step = local_episode(env, env.task, 5, "x")
    metadata = {"task_id": env.task.id, "info": info}
    assert found["reset"]["observation"] == {"messages": opening, "metadata": metadata}
    assert (found["reset"]["reward"], found["reset"]["done"]) == (None, False)
    assert found["reset"]["metadata"] == metadata
    assert found["step"]["observation"]["messages"] == step[0]
    assert found["step"]["metadata"] == {"info": step[4]}
    assert found["state"] == {
        "episode_id": "e-5",
        "step_count": 1,
        "task_id": env.task.id,
        "reward": 0.0,
        "done": False,
    }
    assert "(code: VALIDATION_ERROR)" in found["invalid"]
    assert "massage" in found["invalid"]
    assert found["raised"] == "Server error: asked to (code: EXECUTION_ERROR)"
    assert found["task"]["metadata"]["task_id"] == "test-1"
    assert (found["right"]["reward"], found["right"]["done"]) == (1.0, True)
    assert "no episode is running" in found["over"]


def test_the_synchronous_client_plays(python, url):
    found = driven(python, "synchronous", url)
    assert found["reset"]["metadata"]["task_id"] == "train-4"
    assert (found["step"]["reward"], found["step"]["done"]) == (1.0, True)
    assert found["state"]["step_count"] == 1


def test_the_tool_client_lists_and_calls_tools_in_the_session_that_it_resets(python, url):
    found = driven(python, "tools", f"{url}/openenv_envs:Counter")
    functions = [tool["function"] for tool in Counter().tools]
    assert found["listed"] == [
        {"name": f["name"], "description": f["description"], "input_schema": f["parameters"]} for f in functions
    ]
    assert found["reset"]["observation"]["messages"][0]["content"] == "Make the total 5."
    assert found["first"] == "2"
    assert "Tool not found: nope" in found["failed"]
    assert found["after"]["step_count"] == 1
    assert found["kind"] == "ListToolsObservation"
    assert found["last"]["observation"]["result"]["data"] == "5"
    assert (found["last"]["reward"], found["last"]["done"]) == (1.0, True)


def test_a_full_server_says_so_and_has_room_when_a_client_has_left(python):
    with our_server("openenv_envs:Sum", sessions=2) as url:
        found = driven(python, "full", url)
    assert "(code: CAPACITY_REACHED)" in found["refused"]
    assert found["then"].startswith("no error")


@pytest.mark.parametrize("path", ["", "/openenv_envs:Counter"])
def test_openenv_validate_passes(python, url, path):
    command = [python.with_name("openenv"), "validate", "--url", url + path, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=clean_environment(), check=False)
    report = json.loads(done.stdout)
    assert report["passed"], report["criteria"]
    assert (done.returncode, report["mode"], report["standard_profile"]) == (0, "simulation", "openenv-http/1.x")
    assert report["summary"]["failed_criteria"] == []


# ---- the HTTP routes, which its clients use little


def asked(url, path, body=None):
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url + path, data, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            return response.status, json.load(response)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def test_http_plays_episodes_of_one_step(url):
    status, opening = asked(url, "/reset", {"seed": 1})
    assert (status, opening["done"], opening["reward"]) == (200, False, None)
    status, result = asked(url, "/step", {"action": {"message": "6"}, "split": "train", "index": 3})
    assert (status, result["reward"], result["done"]) == (200, 1.0, True)
    assert asked(url, "/step", {"action": {"massage": "6"}})[0] == 422
    assert asked(url, "/step", {"action": 3})[0] == 422
    assert asked(url, "/step", {"action": {"message": "raise"}}) == (500, {"detail": "asked to"})
    assert asked(url, "/reset", [1])[0] == 422
    assert asked(url, "/state")[1]["step_count"] == 0


def test_http_lists_environments_splits_and_tasks(url):
    assert asked(url, "/list_environments") == (200, ["openenv_envs:Sum", "openenv_envs:Counter"])
    env = "/openenv_envs:Sum"
    splits = [{"name": "train", "type": "train"}, {"name": "test", "type": "test"}]
    assert asked(url, f"{env}/splits") == (200, splits)
    assert asked(url, f"{env}/num_tasks", {"split": "train"}) == (200, {"num_tasks": 5})
    tasks = [task.to_json() for task in Sum.default_tasks()]
    assert asked(url, f"{env}/tasks", {"split": "train"}) == (200, {"tasks": tasks, "env_name": "openenv_envs:Sum"})
    assert asked(url, f"{env}/task", {"split": "train", "index": 2}) == (200, {"task": tasks[2]})
    assert asked(url, f"{env}/task", {"split": "train", "index": 9})[0] == 400
    assert asked(url, f"{env}/task", {"split": "train"})[0] == 422
    assert asked(url, f"{env}/task_range", {"split": "train", "start": 1, "stop": 3})[1] == {"tasks": tasks[1:3]}
    assert asked(url, f"{env}/task_range", {"split": "train", "start": -1, "stop": None})[1] == {"tasks": tasks[-1:]}
    assert asked(url, f"{env}/num_tasks", {"split": "train", "more": 1})[0] == 422
    assert asked(url, "/nothing/splits")[0] == 404


def test_json_rpc_over_http(url):
    def rpc(method, **params):
        return asked(url, "/openenv_envs:Counter/mcp", {"jsonrpc": "2.0", "id": 1, "method": method, "params": params})[
            1
        ]

    session = rpc("openenv/session/create")["result"]["session_id"]
    call = {"name": "add", "arguments": {"number": 1}, "session_id": session}
    assert [rpc("tools/call", **call)["result"]["data"] for _ in range(2)] == ["1", "2"]
    assert rpc("tools/call", name="add", arguments={"number": 1})["result"]["data"] == "1"  # a session for one call
    assert rpc("openenv/session/close", session_id=session)["result"] == {"session_id": session, "closed": True}
    assert rpc("tools/call", **call)["error"]["code"] == -32602
    assert rpc("openenv/session/close")["error"]["code"] == -32602
    assert rpc("initialize")["error"]["code"] == -32601
    assert asked(url, "/mcp", {})[1]["error"]["code"] == -32600
