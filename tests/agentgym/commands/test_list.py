"""`agentgym list`: every environment and adapter, what each needs, and what of that is missing here."""

import json
import shutil
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from agentgym.cli import main
from agentgym.core import registration
from agentgym.core.env import Env
from agentgym.core.registration import adapters, register, registry


class Plain(Env):
    """Stands in the registry."""

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed, options=options)
        return [], {}

    def step(self, action):
        return self.outcome("", 0.0, terminated=True)


@pytest.fixture(autouse=True)
def registered():
    registration.load_plugins()
    before = dict(registration.registered_specs)
    register("test/plain", Plain, description="nothing", tags=["test"])
    register("test/needy", Plain, needs=["not_installed_here:not-installed-here>=2", "json:json", "sandbox:search"])
    yield
    registration.registered_specs.clear()
    registration.registered_specs.update(before)


def listed(capsys, *options):
    assert main(["list", "--json", *options]) == 0
    return {row["id"]: row for row in json.loads(capsys.readouterr().out)}


def test_every_environment_and_adapter_is_listed(capsys):
    rows = listed(capsys)
    assert set(rows) == {*registry, *(f"{prefix}:NAME" for prefix in adapters)}
    assert rows["test/plain"] == {
        "id": "test/plain",
        "kind": "environment",
        "description": "nothing",
        "tags": ["test"],
        "needs": [],
        "example": "test/plain",
    }
    assert rows["gymnasium:NAME"]["kind"] == "adapter"
    assert rows["gymnasium:NAME"]["example"].startswith("gymnasium:")
    assert rows["gymnasium:NAME"]["needs"] == [{"what": "gymnasium", "here": True, "remedy": None}]
    assert main(["list"]) == 0
    table = capsys.readouterr().out
    assert all(id in table for id in rows)


def test_what_is_missing_is_told_with_its_remedy(capsys):
    first, second, third = listed(capsys)["test/needy"]["needs"]
    assert first == {"what": "not-installed-here>=2", "here": False, "remedy": "pip install 'not-installed-here>=2'"}
    assert second == {"what": "json", "here": True, "remedy": None}
    assert third["what"] == "sandbox search"
    main(["list"])
    assert "not-installed-here>=2, missing: pip install 'not-installed-here>=2'; json" in capsys.readouterr().out


def test_where_no_back_end_is_installed_a_sandbox_is_missing(capsys, monkeypatch):
    found = {True: "/bin/bwrap", False: None}
    for docker, bwrap, here in ((False, False, False), (True, False, None), (False, True, None)):
        monkeypatch.setattr(
            "importlib.util.find_spec", lambda name, d=docker: object() if d or name != "docker" else None
        )
        monkeypatch.setattr(shutil, "which", lambda name, b=bwrap: found[b])
        monkeypatch.setattr("agentgym.sandbox.images.build.rootfs", lambda name: None)
        need = listed(capsys)["test/needy"]["needs"][2]
        assert need["here"] is here
        assert need["remedy"] == ("agentgym sandbox build search" if bwrap else "agentgym doctor")


def test_tags_choose(capsys):
    assert set(listed(capsys, "--tag", "test")) == {"test/plain"}
    both = listed(capsys, "--tag", "math", "--tag", "sandbox")
    assert both
    assert all({"math", "sandbox"} <= set(row["tags"]) for row in both.values())
    assert main(["list", "--tag", "gamee"]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("agentgym list: no environment has the tag 'gamee': did you mean game? There are ")


@pytest.fixture
def told():
    """What a server at `url` tells at each path: a double, as no real one tells such things."""
    answers = {}

    class Server(BaseHTTPRequestHandler):
        def do_GET(self):
            content = json.dumps(answers.get(self.path)).encode()
            self.send_response(200 if self.path in answers else 404)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *args):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Server)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    answers["url"] = f"http://127.0.0.1:{server.server_port}"
    yield answers
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize(
    ("record", "words"),
    [
        ({"tags": 3}, "its tags are no list of texts: 3"),
        ({"splits": {"test": {}}}, "its split 'test' has no size: {}"),
        ({"splits": [1]}, "its splits are no table: [1]"),
        ({"kwargs": [1]}, "its kwargs are no table: [1]"),
    ],
)
def test_a_server_whose_records_are_none_is_told_in_one_line(record, words, told, capsys, tmp_path):
    told |= {"/health": {}, "/envs": {"envs": [{"id": "x", **record}]}, "/envs/x": {"id": "x", **record}}
    play = ["eval", f"{told['url']}/x", "--policy", "random", "--out", str(tmp_path / "r")]
    for command in (["list", told["url"]], ["list", told["url"], "--tag", "a"], play):
        assert main(command) == 2
        said = capsys.readouterr()
        assert words in said.err
        assert (said.err.count("\n"), said.out) == (1, "")


def test_a_server_may_tell_nothing_of_an_environment(told, capsys):
    told["/envs"] = {"envs": [{"id": "x", "tags": None, "splits": None, "kwargs": None}]}
    assert main(["list", told["url"]]) == 0
    assert f"{told['url']}/x" in capsys.readouterr().out
    assert main(["list", told["url"], "--tag", "a"]) == 0
    assert f"{told['url']}/x" not in capsys.readouterr().out


def test_a_need_is_written_in_one_of_two_ways():
    for bad in ("agentgym-toolkit[math]", "sandbox:", ":x"):
        with pytest.raises(ValueError, match="sandbox:IMAGE"):
            register("test/bad", Plain, needs=[bad])


@pytest.mark.parametrize(
    "id", [id for id, spec in registry.items() if str(spec.entry_point).startswith("agentgym_envs.")]
)
def test_shipped_environments_declare_the_sandboxes_that_they_take(id):
    env = registry[id].make()
    image = env.unwrapped.sandbox_image
    env.close()
    declared = [need.removeprefix("sandbox:") for need in registry[id].needs if need.startswith("sandbox:")]
    assert declared == ([image] if image else [])
    assert ("sandbox" in registry[id].tags) == bool(image)


def test_needs_travel_as_json():
    spec = registry["math_python"]
    assert spec.needs
    assert registration.EnvSpec.from_json(json.loads(json.dumps(spec.to_json()))) == spec


@pytest.mark.parametrize(("version", "here"), [("0.3.1", True), ("0.4.0", False), ("0.1.9.post3", False)])
def test_a_package_in_a_version_that_will_not_do_is_missing(version, here, tmp_path, monkeypatch, capsys):
    installed = tmp_path / f"verifiers-{version}.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text(f"Metadata-Version: 2.1\nName: verifiers\nVersion: {version}\n")
    monkeypatch.syspath_prepend(tmp_path)
    wanted = "verifiers>=0.1.14,<0.4"
    [need] = listed(capsys)["verifiers:NAME"]["needs"]
    missing = {"what": f"{wanted} (here is {version})", "here": False, "remedy": f"pip install {wanted!r}"}
    assert need == ({"what": wanted, "here": True, "remedy": None} if here else missing)
