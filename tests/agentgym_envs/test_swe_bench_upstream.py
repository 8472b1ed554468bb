"""swe_bench: instances of SWE-bench Multimodal and Multilingual, whose commands and log parsers are SWE-bench's own."""

from __future__ import annotations

import json
import time
from functools import partial

import pytest
from swe_bench_cases import MODIFIED, TESTS, installed, instance, swebench

from agentgym_envs.swe_bench import upstream
from agentgym_envs.swe_bench.canaries import canaries
from agentgym_envs.swe_bench.commands import build_command_of, command_of
from agentgym_envs.swe_bench.instances import read_instances
from agentgym_envs.swe_bench.inversion import inversion
from agentgym_envs.swe_bench.published import files
from agentgym_envs.swe_bench.records import published_image
from agentgym_envs.swe_bench.tasks import instance_of, task_of
from agentgym_envs.swe_bench.upstream import LogUnreadableError
from agentgym_envs.swe_bench.verdict import contradiction, judge_statuses, reader_of, statuses_of
from agentgym_envs.swe_bench.worktree import ENVIRONMENT

HEAD = "set -uxo pipefail\n"
SCRIPT = """\
#!/bin/bash
set -uxo pipefail
cd /testbed
git checkout 0000 test/a.spec.js
git apply --verbose --reject - <<'EOF_114329324912'
+: '>>>> no marker'
EOF_114329324912
pnpm run build
: '>>>>> Start Test Output'
pnpm run test a
pnpm run test b
: '>>>>> End Test Output'
git checkout 0000 test/a.spec.js
"""
RECORD = {
    "instance_id": "vuejs__core-11899",
    "repo": "vuejs/core",
    "version": "11899",
    "base_commit": "0" * 40,
    "problem_statement": "It breaks.",
    "patch": MODIFIED,
    "test_patch": TESTS.replace("tests/test_one.py", "test/a.spec.js"),
    "FAIL_TO_PASS": '["a > fixed"]',
    "PASS_TO_PASS": "[]",
    "image": "swebench/sweb.eval.x86_64.vuejs_1776_core-11899:latest",
    "eval_script": SCRIPT,
    "log_parser": "parse_log_vitest",
    "eval_type": "pass_and_fail",
}


def of(repo, **changes):
    given = {"id": f"{repo.replace('/', '__')}-2005", "repo": repo, "version": "1", "test_patch": ""}
    return instance(**{**given, "fail_to_pass": ("fixed",), "pass_to_pass": ("old",), **changes})


def read(tmp_path, **changes):
    (tmp_path / "records.json").write_text(json.dumps([{**RECORD, **changes}]))
    (found,) = read_instances(tmp_path / "records.json")
    return found


KARMA = """\
✔ before the browser
Starting browser Chrome
  hooks
    ✔ fixed
    ✖ broken
SUMMARY:
✔ after
"""
MAVEN = "+ mvnd test -Dtest=A#fixed\n[INFO] BUILD SUCCESS\n+ mvnd test -Dtest=A#broken\n[INFO] BUILD FAILURE\n"
CALYPSO = "+ ./node_modules/.bin/jest --verbose x\n  suite\n    ✓ fixed (5ms)\n    ✕ broken\n"
LOGS = {  # by repository and the parser's name in version 5: a log, and what it says
    ("preactjs/preact", "parse_log_karma"): (KARMA, {"hooks > fixed": "PASSED", "hooks > broken": "FAILED"}),
    ("babel/babel", "parse_log_jest"): (
        "PASS a.js\n  ✓ fixed (12 ms)\n  ✕ broken\n  ○ left out\n",
        {"fixed": "PASSED", "broken": "FAILED", "left out": "SKIPPED"},
    ),
    ("immutable-js/immutable-js", "parse_log_immutable_js"): (
        "[PASSED] Map > fixed\n[FAILED] Map > broken\n",
        {"Map > fixed": "PASSED", "Map > broken": "FAILED"},
    ),
    ("vuejs/core", "parse_log_vitest"): (
        " ✓ a > fixed 3ms\n × a > broken\n ↓ a > left out [skipped]\n",
        {"a > fixed": "PASSED", "a > broken": "FAILED", "a > left out": "SKIPPED"},
    ),
    ("axios/axios", "parse_log_tap"): (
        "1..2\nok 1 http fixed\nnot ok 2 http broken\n",
        {"http fixed": "PASSED", "http broken": "FAILED"},
    ),
    ("diegomura/react-pdf", "parse_log_react_pdf"): (
        "PASS packages/a.test.js (5.1 s)\nFAIL packages/b.test.js\n",
        {"packages/a.test.js": "PASSED", "packages/b.test.js": "FAILED"},
    ),
    ("Automattic/wp-calypso", "parse_log_calypso"): (CALYPSO, {"suite - fixed": "PASSED", "suite - broken": "FAILED"}),
    ("gin-gonic/gin", "parse_log_gotest"): (
        "--- PASS: TestFixed (0.00s)\n    --- FAIL: TestTree/broken (0.01s)\n",
        {"TestFixed": "PASSED", "TestTree/broken": "FAILED"},
    ),
    ("tokio-rs/tokio", "parse_log_cargo"): (
        "test fixed ... ok\ntest broken ... FAILED\n",
        {"fixed": "PASSED", "broken": "FAILED"},
    ),
    ("google/gson", "parse_log_maven"): (MAVEN, {"A#fixed": "PASSED", "A#broken": "FAILED"}),
    ("laravel/framework", "parse_log_phpunit"): (
        "Mail (Tests\\Mail)\n ✔ fixed\n ✘ broken\n",
        {"Mail > fixed": "PASSED", "Mail > broken": "FAILED"},
    ),
    ("rubocop/rubocop", "parse_log_rspec_transformed_json"): (
        "fixed - passed\nbroken - failed\n",
        {"fixed": "PASSED", "broken": "FAILED"},
    ),
    ("redis/redis", "parse_log_redis"): (
        "[ok]: fixed (3 ms)\n[err]: broken in tests/unit/a.tcl\n",
        {"fixed": "PASSED", "broken": "FAILED"},
    ),
}
ONLY_FAILURES = {  # the same of runners whose logs name failed tests alone; the end says that some ran
    ("chartjs/Chart.js", "parse_log_chart_js"): (
        "Chrome 1.0 (Linux) fixed FAILED\nExecuted 2 of 2 (1 FAILED)\n",
        "Executed 2 of 2 SUCCESS\n",
        "fixed ",
    ),
    ("markedjs/marked", "parse_log_marked"): ("1) fixed\n2 specs, 1 failure\n", "2 specs, 0 failures\n", "fixed"),
    ("processing/p5.js", "parse_log_p5js"): ("  1 passing\n  1) fixed:\n", "  2 passing\n", "fixed"),
}


@pytest.mark.parametrize(("repo", "name"), LOGS)
@pytest.mark.parametrize("major", [4, 5])
def test_each_kind_of_log_is_read_by_swe_bench_s_parser(major, repo, name):
    log, said = LOGS[repo, name]
    with installed(major):
        assert statuses_of(of(repo, log_parser=name), log) == said


@pytest.mark.parametrize(("repo", "name"), ONLY_FAILURES)
@pytest.mark.parametrize("major", [4, 5])
class TestALogThatNamesFailedTestsAlone:
    def test_says_that_the_others_have_passed(self, major, repo, name):
        failing, sound, test = ONLY_FAILURES[repo, name]
        with installed(major):
            case = of(repo, log_parser=name, fail_to_pass=(test,))
            assert statuses_of(case, failing) == {test: "FAILED", "old": "PASSED"}
            assert statuses_of(case, sound) == {test: "PASSED", "old": "PASSED"}

    def test_says_nothing_if_no_test_ran(self, major, repo, name):
        with installed(major):
            case = of(repo, log_parser=name)
            assert statuses_of(case, "Executed 0 of 0\n0 passing\nError: no browser\n") == {}

    def test_is_doubted_if_the_command_failed_and_no_test(self, major, repo, name):
        _, sound, test = ONLY_FAILURES[repo, name]
        with installed(major):
            case = of(repo, log_parser=name, fail_to_pass=(test,))
            found = judge_statuses(case, statuses_of(case, sound), exit_code=1)
        assert found.doubt == "the test command ended with exit code 1, but the log has no failed test"
        assert judge_statuses(case, dict.fromkeys((test, "old"), "PASSED"), exit_code=0).resolved


def test_numbers_without_end_are_no_sign_that_tests_ran_and_take_no_time():
    start = time.process_time()
    with installed(4):
        assert statuses_of(of("markedjs/marked"), ("1" * 9000 + "\n") * 400) == {}
    assert time.process_time() - start < 20


def test_a_record_says_whether_its_log_names_failed_tests_alone():
    with installed(5):
        case = of("eslint/eslint", log_parser="parse_log_eslint", eval_type="fail_only")
        assert statuses_of(case, "  2 passing\n") == {"fixed": "PASSED", "old": "PASSED"}
        assert statuses_of(of("eslint/eslint", log_parser="parse_log_jest", eval_type="pass_and_fail"), "✓ a\n") == {
            "a": "PASSED"
        }


def test_a_log_that_calls_a_test_both_good_and_bad_is_found():
    with installed(4):
        assert (
            contradiction(of("babel/babel"), "✕ fixed\n✓ fixed (1 ms)\n", ["fixed", "at the beginning of a line"])
            == "fixed"
        )
        assert (
            contradiction(of("babel/babel"), "✕ other\n✓ other\n✓ fixed\n", ["fixed", "at the beginning of a line"])
            == ""
        )
        assert (
            contradiction(
                of("markedjs/marked"), "1) fixed\n2 specs, 1 failure\n", ["fixed", "at the beginning of a line"]
            )
            == ""
        )


def test_a_log_that_the_parser_s_code_cannot_read_is_told():
    with installed(4):
        with pytest.raises(LogUnreadableError, match=r"SWE-bench's parser cannot read the log: .*AttributeError"):
            statuses_of(of("Automattic/wp-calypso"), CALYPSO + "✓ at the beginning of a line\n")
        assert (
            contradiction(
                of("Automattic/wp-calypso"), "✓ at the beginning of a line\n", ["fixed", "at the beginning of a line"]
            )
            == ""
        )
        with pytest.raises(LogUnreadableError, match="Unknown instance id: immutable-js__immutable-js-1"):
            statuses_of(of("immutable-js/immutable-js", id="immutable-js__immutable-js-1"), "")


def test_a_log_on_which_the_parser_takes_too_long_is_told(monkeypatch):
    monkeypatch.setattr(upstream, "PARSE_SECONDS", 1.0)
    log = ("Chrome 1.0 (" + ") " * 4900 + "\n") * 200
    for read in (statuses_of, partial(contradiction, good=["fixed"])):
        with installed(4), pytest.raises(LogUnreadableError, match=r"cannot read the log: .* 1 s"):
            read(of("chartjs/Chart.js"), log)


def test_every_parser_reads_an_empty_log():
    for major, table in ((4, "MAP_REPO_TO_PARSER"), (5, "PARSER_REGISTRY")):
        names = getattr(swebench("harness.log_parsers", major), table)
        with installed(major):
            for name in names:
                repo = name if major == 4 else "a/b"
                case = of(repo, id="jekyll-9141-2005", version="10.0", log_parser=name, eval_type="pass_and_fail")
                assert statuses_of(case, "") == {}, name


def lines_of(script):
    return script.removeprefix(HEAD).split("\n") if script else []


def test_swe_bench_has_the_same_commands_of_every_repository_and_version():
    constants, javascript = swebench("harness.constants", 4), swebench("harness.test_spec.javascript", 4)
    patch = TESTS.replace("tests/test_one.py", "client/lib/a.js")
    compared = 0
    for repo, versions in constants.MAP_REPO_VERSION_TO_SPECS.items():
        if constants.MAP_REPO_TO_EXT[repo] == "py":
            continue
        for version, spec in versions.items():
            case = of(repo.upper(), version=version, test_patch=patch)
            theirs = spec["test_cmd"] if isinstance(spec["test_cmd"], list) else [spec["test_cmd"]]
            if repo == "Automattic/wp-calypso":
                theirs = javascript.get_test_cmds_calypso({"test_patch": patch, "version": version})
            with installed(4):
                assert lines_of(command_of(case)) == "\n".join(theirs).split("\n")
                build = spec.get("build")
                assert lines_of(build_command_of(case)) == ("\n".join(build).split("\n") if build else [])
                reader_of(case)
            compared += 1
    assert compared > 300


def test_a_record_of_version_5_builds_and_tests_by_its_script(tmp_path):
    case = read(tmp_path)
    assert build_command_of(case) == f"{HEAD}pnpm run build"
    assert command_of(case) == f"{HEAD}pnpm run test a\npnpm run test b"
    with installed(5):
        assert statuses_of(case, " ✓ a > fixed 3ms\n") == {"a > fixed": "PASSED"}
    assert instance_of(task_of(case)) == case


def test_a_script_without_a_test_patch_builds_nothing(tmp_path):
    script = "set -x\n: '>>>>> Start Test Output'\nmake check\n: '>>>>> End Test Output'\n"
    case = read(tmp_path, eval_script=script)
    assert (build_command_of(case), command_of(case)) == ("", f"{HEAD}make check")


def test_an_own_command_is_run_without_a_build(tmp_path):
    case = read(tmp_path, test_command="make check")
    assert (build_command_of(case), command_of(case)) == ("", "make check")


@pytest.mark.parametrize("id", ["Automattic__wp-calypso-21409", "chartjs__Chart.js-8650", "redis__redis-13115"])
def test_images_have_the_names_that_swe_bench_publishes(id):
    module = swebench("harness.test_spec.test_spec", 4)
    fields = {
        "instance_id": id,
        "repo": id.rpartition("-")[0].replace("__", "/"),
        "version": "",
        "namespace": "swebench",
    }
    given = dict.fromkeys(module.TestSpec.__dataclass_fields__, "") | fields
    given |= {"arch": "x86_64", "instance_image_tag": "latest"}
    assert published_image(id, fields["repo"]) == module.TestSpec(**given).instance_image_key


def test_a_published_image_of_another_language_keeps_its_variables_and_gets_python(tmp_path):
    case = read(tmp_path)
    made = files(case, case.image, tests=False)["Dockerfile"].split("\n")
    assert made[0] == "FROM swebench/sweb.eval.x86_64.vuejs_1776_core-11899:latest"
    assert f"RUN export -p > {ENVIRONMENT}" in made
    assert any("python3" in line for line in made)
    assert ENVIRONMENT not in files(instance(), "a/b:c", tests=False)["Dockerfile"]


def test_there_are_no_secret_tests_and_no_second_run_for_other_languages(tmp_path):
    case = read(tmp_path)
    found = canaries(case, "", None)
    assert (found.files, found.expected) == ({}, {})
    assert inversion(case, {}, None).tests == frozenset()


def test_without_the_package_the_error_names_the_repository_and_the_cure(tmp_path):
    with pytest.raises(
        ValueError, match=r"vuejs__core-11899: 'vuejs/core' is not in .*pip install 'swebench>=4.1,<6'$"
    ):
        reader_of(read(tmp_path))
    with pytest.raises(ValueError, match=r"pip install 'swebench>=4.1,<6', or give the record a \"test_command\""):
        command_of(of("vuejs/core"))


def test_a_package_that_lacks_the_repository_or_version_says_what_it_has():
    with installed(5):
        with pytest.raises(ValueError, match="no test command of version '1': version 4 has a table of them"):
            command_of(of("vuejs/core"))
        with pytest.raises(ValueError, match="no log parser: version 4 knows repositories, version 5 the name in a"):
            reader_of(of("vuejs/core"))
        with pytest.raises(ValueError, match="no log parser and no 'parse_log_nothing'"):
            reader_of(of("vuejs/core", log_parser="parse_log_nothing"))
    with installed(4):
        with pytest.raises(ValueError, match="no test command of version '1': it knows 11899, 11870"):
            command_of(of("vuejs/core"))
        with pytest.raises(ValueError, match="no test command of version '1': it knows none"):
            command_of(of("a/b"))
        with pytest.raises(ValueError, match="no test command: none of its test patch's files is known"):
            command_of(of("Automattic/wp-calypso", version="10.9.0"))
