"""swe_bench: a JavaScript repository, from its record to its grade, in real sandboxes with Node.js."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest
from swe_bench_cases import installed, require

import agentgym
from agentgym.sandbox.backends.select import close_pools
from agentgym.sandbox.images import build as images
from agentgym.sandbox.images import debian, layers
from agentgym.tools.text_forms import call_text
from agentgym_envs import register_all
from agentgym_envs.swe_bench import worktree
from agentgym_envs.swe_bench.grading import GradingError, grade
from agentgym_envs.swe_bench.instances import read_instances
from agentgym_envs.swe_bench.tasks import load_tasks

register_all()
pytestmark = [pytest.mark.bubblewrap]
SOURCE = "exports.add = (a, b) => a - b;\nexports.negate = (a) => -a;\n"
TEST = """\
const test = require("node:test");
const assert = require("node:assert");
const { add, negate } = require("../dist/sums.js");
test("negates", () => assert.equal(negate(2), -2));
"""
FILES = {
    "src/sums.js": SOURCE,
    "test/sums.test.js": TEST,
    "package.json": '{"scripts": {"test": "node --test-reporter=tap test/sums.test.js"}}\n',
    "build.sh": "mkdir -p dist && cp src/*.js dist/ && echo 'ok 9 - adds' && echo built > test/built\n",
    ".gitignore": "dist/\ntest/built\n",
}
FIX = """\
diff --git a/src/sums.js b/src/sums.js
--- a/src/sums.js
+++ b/src/sums.js
@@ -1,2 +1,2 @@
-exports.add = (a, b) => a - b;
+exports.add = (a, b) => a + b;
 exports.negate = (a) => -a;
"""
TESTS = """\
diff --git a/test/sums.test.js b/test/sums.test.js
--- a/test/sums.test.js
+++ b/test/sums.test.js
@@ -4 +4,2 @@ const { add, negate } = require("../dist/sums.js");
 test("negates", () => assert.equal(negate(2), -2));
+test("adds", () => assert.equal(add(2, 3), 5));
"""
SCRIPT = """\
#!/bin/bash
set -uxo pipefail
cd /testbed
git apply --verbose --reject - <<'EOF_114329324912'
EOF_114329324912
bash build.sh
: '>>>>> Start Test Output'
node --version
node --test-reporter=tap test/sums.test.js
: '>>>>> End Test Output'
"""
RECORD = {
    "instance_id": "axios__axios-1",
    "repo": "axios/axios",
    "version": "1",
    "base_commit": "0" * 40,
    "problem_statement": "It subtracts.",
    "patch": FIX,
    "test_patch": TESTS,
    "FAIL_TO_PASS": ["- adds"],
    "PASS_TO_PASS": ["- negates"],
    "eval_script": SCRIPT,
    "log_parser": "parse_log_tap",
    "eval_type": "pass_and_fail",
}


def patched(*lines):
    """A patch that puts lines at the end of the source, and mends nothing."""
    added = "".join(f"+{line}\n" for line in lines)
    head, _, _ = FIX.partition("@@")
    body = "".join(f" {line}\n" for line in SOURCE.splitlines())
    return f"{head}@@ -1,2 +1,{2 + len(lines)} @@\n{body}{added}"


def new(path, text):
    return f"diff --git a/{path} b/{path}\nnew file mode 100644\n--- /dev/null\n+++ b/{path}\n@@ -0,0 +1 @@\n+{text}\n"


def fill(root: Path) -> None:
    """Node.js of this machine, and the repository with one commit."""
    (root / "opt/node").mkdir(parents=True)
    shutil.copy(Path(shutil.which("node") or "").resolve(), root / "opt/node/node")
    variables = root / worktree.ENVIRONMENT[1:]
    variables.parent.mkdir()
    variables.write_text("export PATH='/opt/node:/usr/bin:/bin'\n")
    for name, text in FILES.items():
        file = root / "testbed" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    git = ["git", "-C", str(root / "testbed"), "-c", "user.name=a", "-c", "user.email=a@b"]
    for words in (["init", "-q"], ["add", "-A"], ["commit", "-qm", "base"]):
        subprocess.run([*git, *words], check=True)
    subprocess.run(["chmod", "-R", "a+rwX", str(root / "testbed")], check=True)


@pytest.fixture(scope="module")
def image(tmp_path_factory):
    if missing := [*debian.missing_tools(), *([] if shutil.which("node") else ["node"])]:
        pytest.skip(f"{', '.join(missing)} not found")
    folder = tmp_path_factory.mktemp("made") / f"swe-bench-javascript-{os.getpid()}"
    folder.mkdir()
    (folder / layers.BASE).write_text("swe")
    (folder / layers.MADE_BY).write_text("pytest")
    images.build("swe", docker=False)
    images.build(str(folder), docker=False, fill=fill)
    yield str(folder)
    close_pools()
    shutil.rmtree(images.recipe(str(folder)).place.parent, ignore_errors=True)


@pytest.fixture
def judged(image, tmp_path, monkeypatch):
    """Grades a patch; the record's fields may be changed."""
    backend = require("bubblewrap", monkeypatch)
    # In place of the image that SWE-bench publishes.
    monkeypatch.setattr(worktree, "image_of", lambda instance, tests: image)

    def judge(patch, **changes):
        (tmp_path / "records.json").write_text(json.dumps([{**RECORD, **changes}]))
        (instance,) = read_instances(tmp_path / "records.json")
        with installed(5):
            return grade(instance, patch, sandbox=backend)

    return judge


def test_the_gold_patch_resolves_what_no_patch_does(judged):
    gold, none = judged(FIX), judged("")
    assert gold.resolved, gold
    assert (gold.patch, gold.verdict.doubt, gold.dropped) == ("applied", "", ())
    assert "+ node --version" in gold.log  # all commands between the markers ran, as SWE-bench runs them
    assert (none.patch, none.resolved, none.verdict.doubt) == ("empty", False, "")
    assert [(test.name, test.status) for test in none.verdict.tests] == [("- adds", "FAILED"), ("- negates", "PASSED")]


@pytest.fixture
def env(judged, tmp_path):
    (tmp_path / "records.json").write_text(json.dumps([RECORD]))
    made = agentgym.make("swe_bench", sandbox="bubblewrap", tasks=load_tasks("all", str(tmp_path / "records.json")))
    yield made
    made.close()


def test_an_episode_is_played_from_the_issue_to_the_reward(env):
    with installed(5):
        env.reset(seed=0)
        env.step(
            call_text("bash", command="bash build.sh && node -e \"console.log(require('./dist/sums.js').add(2, 3))\"")
        )
        env.step(call_text("edit", command="str_replace", path="src/sums.js", old_str="a - b", new_str="a + b"))
        _, reward, _, _, info = env.step(call_text("submit"))
    assert (reward, info["resolution"], info["dropped"]) == (1.0, "RESOLVED_FULL", 0)


def test_without_the_package_an_episode_does_not_begin(env):
    with pytest.raises(Exception, match=r"'axios/axios' is not in agentgym's tables .* pip install 'swebench>=4.1,<6'"):
        env.reset(seed=0)


def test_what_the_build_prints_is_no_result(judged):
    found = judged("", FAIL_TO_PASS=["- adds"])
    assert "ok 9 - adds" not in found.log


def test_a_patch_of_tests_and_their_settings_alone_has_nothing_left(judged):
    settings = new("jest.config.js", "process.exit(0)") + new("node_modules/x/index.js", "process.exit(0)")
    found = judged(TESTS + settings + new("src/types.test.ts", "x"))
    assert (found.resolved, found.verdict.doubt) == (False, "")
    names = ("test/sums.test.js", "jest.config.js", "node_modules/x/index.js", "src/types.test.ts")
    assert set(found.dropped) == set(names)


def test_a_new_file_may_have_the_name_of_a_module_of_python(judged):
    found = judged(FIX + new("src/types.js", "exports.x = 1"))
    assert (found.resolved, found.dropped) == (True, ())


@pytest.mark.parametrize(
    ("lines", "doubt"),
    [
        (
            ["process.on('exit', () => { process.exitCode = 0; console.log('ok 1 - adds'); });"],
            "the log calls - adds both good and bad",
        ),
        (
            ["console.log('ok 1 - adds\\nok 2 - negates'); process.exit(3);"],
            "the test command ended with exit code 3, but the log has no failed test",
        ),
        (
            ["console.log('ok 1 - adds\\nok 2 - negates'); process.exit(0);"],
            "- adds is reported as PASSED even without the test patch",
        ),
    ],
)
def test_printed_results_are_not_believed(judged, lines, doubt):
    found = judged(patched(*lines))
    assert (found.resolved, found.verdict.doubt) == (False, doubt)


def test_tests_that_the_patch_s_code_changes_are_not_believed(judged):
    writes = "require('fs').writeFileSync('test/sums.test.js', \"console.log('ok 1 - adds')\")"
    locked = judged(patched(f"try {{ {writes} }} catch (error) {{ console.log(error.code); }}"))
    assert "EACCES" in locked.log
    assert (locked.resolved, locked.verdict.doubt) == (False, "")
    built = (
        FIX
        + new("more.sh", "x")
        + (
            "diff --git a/build.sh b/build.sh\n--- a/build.sh\n+++ b/build.sh\n@@ -1 +1,2 @@\n "
            + FILES["build.sh"]
            + "+echo \"console.log('ok 1 - adds\\\\nok 2 - negates')\" > test/sums.test.js\n"
        )
    )
    assert judged(built).verdict.doubt == "the tests changed test/sums.test.js"


def test_a_build_that_fails_is_told(judged):
    broken = (
        "diff --git a/build.sh b/build.sh\n--- a/build.sh\n+++ b/build.sh\n@@ -1 +1 @@\n"
        f"-{FILES['build.sh']}+echo no compiler; exit 1\n"
    )
    found = judged(broken)
    assert (found.resolved, found.failure) == (False, "no test runs")
    assert found.log.startswith("the build failed: ")
    assert "no compiler" in found.log


def test_a_gold_patch_whose_tests_do_not_run_is_an_error(judged):
    with pytest.raises(GradingError, match="its tests do not run in its image: no test runs"):
        judged(FIX, eval_script=SCRIPT.replace("node --test-reporter", "mocha --test-reporter"))


def test_a_log_of_failures_alone_needs_the_end_of_a_run(judged):
    runner = "node test/sums.test.js | sed -n 's/^# pass \\([1-9]\\)/\\1 passing/p; s/^not ok \\([0-9]\\) - /\\1) /p'"
    changes = {"log_parser": "parse_log_marked", "eval_type": "fail_only"}
    changes |= {"eval_script": SCRIPT.replace("node --test-reporter=tap test/sums.test.js", runner)}
    changes |= {"FAIL_TO_PASS": ["adds"], "PASS_TO_PASS": ["negates"]}
    assert judged(FIX, **changes).resolved
    none = judged("", **changes)
    assert [(test.name, test.status) for test in none.verdict.tests] == [("adds", "FAILED"), ("negates", "PASSED")]
