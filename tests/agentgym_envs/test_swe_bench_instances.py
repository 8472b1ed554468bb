"""swe_bench: a record of each data set in its published shape, kinds of files, and what is refused with its place."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from swe_bench_cases import LITE, MODIFIED, TESTS

from agentgym import datasets
from agentgym_envs.swe_bench.instances import Instance, InstanceError, read_instances
from agentgym_envs.swe_bench.patches import parse_patch
from agentgym_envs.swe_bench.tasks import OWN, load_tasks

Record = dict[str, Any]
SWE_BENCH: Record = {
    "repo": "astropy/astropy",
    "instance_id": "astropy__astropy-12907",
    "base_commit": "d16bfe05a744909de4b27f5875fe0d4ed41ce607",
    "patch": MODIFIED,
    "test_patch": TESTS,
    "problem_statement": "Modeling's `separability_matrix` does not compute",
    "hints_text": "",
    "created_at": "2022-03-03T15:14:54Z",
    "version": "4.3",
    "FAIL_TO_PASS": '["tests/test_one.py::test_fix[a-b]"]',
    "PASS_TO_PASS": '["tests/test_one.py::test_old"]',
    "environment_setup_commit": "298ccb478e6bf092953bca67a3d29dc6c35f6752",
}
VERIFIED = {**SWE_BENCH, "difficulty": "15 min - 1 hour"}
VERSION_5 = {
    **SWE_BENCH,
    "image": "docker.io/swebench/sweb.eval.x86_64.astropy_1776_astropy-12907:v2",
    "log_parser": "parse_log_astropy",
    "eval_type": "pass_and_fail",
    "eval_script": "#!/bin/bash\nset -uxo pipefail\ncd /testbed\n: '>>>>> Start Test Output'\n"
    "pytest -rA tests/test_one.py\n: '>>>>> End Test Output'\ngit checkout x\n",
}
MULTIMODAL = {
    **SWE_BENCH,
    "repo": "chartjs/Chart.js",
    "instance_id": "chartjs__Chart.js-8650",
    "image_assets": '{"problem_statement": ["https://example.org/a.png"], "patch": [], "test_patch": []}',
    "FAIL_TO_PASS": ["Bar controller should draw"],
    "PASS_TO_PASS": [],
}
SWE_GYM = {
    "instance_id": "getmoto__moto-5752",
    "hints_text": "",
    "patch": MODIFIED,
    "test_patch": TESTS,
    "created_at": "2022-12-10T23:23:01Z",
    "problem_statement": "Describe parameters",
    "repo": "getmoto/moto",
    "base_commit": "b2300f1eae1323e3e8bc45f97e530ce129dff12e",
    "version": "4.0",
    "PASS_TO_PASS": ["tests/test_one.py::test_old"],
    "FAIL_TO_PASS": ["tests/test_one.py::test_fix"],
}
SWE_SMITH = {
    "instance_id": "oauthlib__oauthlib.1fd52536.combine_file__09vlzwgc",
    "patch": MODIFIED,
    "FAIL_TO_PASS": ["tests/test_one.py::test_fix"],
    "PASS_TO_PASS": ["tests/test_one.py::test_old", "tests/test_other.py::test_x"],
    "image_name": "jyangballin/swesmith.x86_64.oauthlib_1776_oauthlib.1fd52536",
    "repo": "swesmith/oauthlib__oauthlib.1fd52536",
    "problem_statement": "Signing fails",
}
R2E_HUNK = {
    "descriptor": {
        "old_range": {"start": 1, "length": 2},
        "new_range": {"start": 1, "length": 2},
        "section": "def f():",
    },
    "line_group": {
        "all_lines": [
            {"content": "first", "type": "context"},
            {"content": "second", "type": "deleted"},
            {"content": "2nd", "type": "added"},
        ]
    },
}


def r2e_change(path: str) -> Record:
    return {
        "header": {"file": {"path": path}, "misc_line": None},
        "index_line": {"old_commit_hash": "1111111", "new_commit_hash": "2222222", "mode": "100644"},
        "is_binary_file": False,
        "binary_line": None,
        "minus_file": {"path": f"a/{path}"},
        "plus_file": {"path": f"b/{path}"},
        "hunks": [R2E_HUNK],
    }


R2E = {
    "repo_name": "aiohttp",
    "docker_image": "namanjain12/aiohttp_final:f0d74880deec8fcd982bce639c93c5e130d41198",
    "commit_hash": "f0d74880deec8fcd982bce639c93c5e130d41198",
    "parsed_commit_content": json.dumps(
        {"file_diffs": [r2e_change("aiohttp/web.py"), r2e_change("tests/test_web.py")], "old_commit_hash": "0123abcd"}
    ),
    "execution_result_content": "{}",
    "modified_files": ["aiohttp/web.py"],
    "prompt": "",
    "problem_statement": "[ISSUE]\nIt breaks\n[/ISSUE]",
    "expected_output_json": '{"TestWeb.test_fix": "PASSED", "\\u001b[1mtest_known\\u001b[0m": "FAILED"}',
}
NEMO = {
    "responses_create_params": {
        "input": [],
        "metadata": {
            "instance_id": "astropy__astropy-12907",
            "base_commit": SWE_BENCH["base_commit"],
            "dataset_name": "princeton-nlp/SWE-bench_Verified",
            "split": "test",
            "problem_statement": SWE_BENCH["problem_statement"],
            "golden_patch": MODIFIED,
            "instance_dict": json.dumps(VERIFIED),
        },
        "model": "m",
        "temperature": 0.7,
    },
    "agent_ref": {"type": "responses_api_agents", "name": "swe_agents"},
}


def read(tmp_path: Path, *records: Any, name: str = "i.jsonl") -> list[Instance]:
    file = tmp_path / name
    file.write_text("".join(f"{json.dumps(record)}\n" for record in records), encoding="utf-8")
    return read_instances(file)


@pytest.mark.parametrize("record", [SWE_BENCH, VERIFIED], ids=["swe_bench", "verified"])
def test_swe_bench(tmp_path, record):
    (case,) = read(tmp_path, record)
    assert (case.id, case.repo, case.version) == ("astropy__astropy-12907", "astropy/astropy", "4.3")
    assert case.base_commit == "d16bfe05a744909de4b27f5875fe0d4ed41ce607"
    assert (case.patch, case.test_patch) == (MODIFIED, TESTS)
    assert case.fail_to_pass == ("tests/test_one.py::test_fix[a-b]",)
    assert case.pass_to_pass == ("tests/test_one.py::test_old",)
    assert case.image == "swebench/sweb.eval.x86_64.astropy_1776_astropy-12907:latest"
    assert case.test_command is None
    assert case.sdist is None


def test_swe_bench_of_version_5_names_its_image_and_command(tmp_path):
    (case,) = read(tmp_path, VERSION_5)
    assert case.image == "docker.io/swebench/sweb.eval.x86_64.astropy_1776_astropy-12907:v2"
    assert case.test_command == "pytest -rA tests/test_one.py"


def test_multimodal_is_read_without_its_pictures(tmp_path):
    (case,) = read(tmp_path, MULTIMODAL)
    assert case.image == "swebench/sweb.eval.x86_64.chartjs_1776_chart.js-8650:latest"
    assert case.fail_to_pass == ("Bar controller should draw",)


def test_swe_gym(tmp_path):
    (case,) = read(tmp_path, SWE_GYM)
    assert case.image == "xingyaoww/sweb.eval.x86_64.getmoto_s_moto-5752:latest"
    assert case.fail_to_pass == ("tests/test_one.py::test_fix",)


def test_swe_smith_s_patch_is_the_bug_and_its_inverse_the_gold_patch(tmp_path):
    (case,) = read(tmp_path, SWE_SMITH)
    assert case.bug_patch == MODIFIED
    assert "\n-2nd\n" in case.patch
    assert "\n+second\n" in case.patch
    assert parse_patch(case.patch)[0].path == "src/one.py"
    assert case.image == "jyangballin/swesmith.x86_64.oauthlib_1776_oauthlib.1fd52536:latest"
    assert case.base_commit == "1fd52536"
    assert case.pass_to_pass == ("tests/test_one.py::test_old",)  # the other file's tests do not run


def test_older_swe_smith_images_have_no_owner(tmp_path):
    (case,) = read(tmp_path, {**SWE_SMITH, "image_name": "swesmith.x86_64.oauthlib__oauthlib.1fd52536"})
    assert case.image == "jyangballin/swesmith.x86_64.oauthlib_1776_oauthlib.1fd52536:latest"


def test_r2e_gym(tmp_path):
    (case,) = read(tmp_path, R2E)
    assert case.id == f"aiohttp-{R2E['commit_hash']}"
    assert case.repo == "aiohttp"
    assert case.base_commit == "0123abcd"
    assert case.image == R2E["docker_image"]
    assert case.expected == {"TestWeb.test_fix": "PASSED", "test_known": "FAILED"}
    assert case.fail_to_pass == ()
    (change,) = parse_patch(case.patch)
    assert change.path == "aiohttp/web.py"
    assert "@@ -1,2 +1,2 @@ def f():\n first\n-second\n+2nd\n" in case.patch


def test_nemo_gym(tmp_path):
    assert read(tmp_path, NEMO) == read(tmp_path, SWE_BENCH)
    about = NEMO["responses_create_params"]["metadata"]
    inner = {**R2E, "instance_id": "aio-libs__aiohttp-f0d7"}
    given = {**NEMO, "responses_create_params": {"metadata": {**about, "instance_dict": json.dumps(inner)}}}
    (case,) = read(tmp_path, given)
    assert (case.id, case.repo, case.image) == ("aio-libs__aiohttp-f0d7", "aiohttp", R2E["docker_image"])


def test_files_of_all_kinds_hold_the_same_instances(tmp_path):
    wanted = read(tmp_path, SWE_BENCH, SWE_GYM)
    for name, content in (
        ("list.json", [SWE_BENCH, SWE_GYM]),
        ("by_id.json", {record["instance_id"]: record for record in (SWE_BENCH, SWE_GYM)}),
    ):
        (tmp_path / name).write_text(json.dumps(content))
        assert read_instances(tmp_path / name) == wanted
    (tmp_path / "one.json").write_text(json.dumps(SWE_GYM, indent=2))
    assert read_instances(tmp_path / "one.json") == wanted[1:]
    pa = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    table = pa.Table.from_pylist([SWE_GYM, {**SWE_GYM, "instance_id": "getmoto__moto-1", "hints_text": None}])
    parquet.write_table(table, tmp_path / "rows.parquet")
    assert [case.id for case in read_instances(tmp_path / "rows.parquet")] == ["getmoto__moto-5752", "getmoto__moto-1"]


def test_a_data_set_of_the_hub_is_read_from_its_cache(tmp_path, monkeypatch):
    arrow = pytest.importorskip("datasets")
    folder = tmp_path / "owner___swe" / "default" / "0.0.0" / "abc"
    folder.mkdir(parents=True)
    from datasets.arrow_writer import ArrowWriter

    with ArrowWriter(path=str(folder / "swe-test.arrow")) as writer:
        writer.write(SWE_GYM)
        writer.finalize()
    assert arrow.__version__
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path))
    assert [case.id for case in read_instances("owner/swe")] == ["getmoto__moto-5752"]


def test_a_hub_that_may_not_be_asked_is_an_error_with_a_remedy(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(datasets.DownloadError, match=r"cannot read owner/swe: .* or give a file of its records"):
        read_instances("owner/swe")


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"instance_id": None}, "line 1: instance_id: is missing or empty; the record has .*base_commit"),
        ({"problem_statement": 7}, "line 1: problem_statement: must be text, not 7"),
        ({"FAIL_TO_PASS": "[]"}, "line 1: FAIL_TO_PASS: names no test"),
        ({"FAIL_TO_PASS": '["a"'}, "line 1: FAIL_TO_PASS: is not JSON: .*cut off"),
        ({"PASS_TO_PASS": [1]}, "line 1: PASS_TO_PASS: must be a list of test names"),
        ({"patch": MODIFIED[:-9]}, "line 1: patch: is no patch in git's format: line 7: .*cut off"),
        ({"test_patch": "no patch"}, "line 1: test_patch: is no patch in git's format: line 1"),
    ],
)
def test_a_wrong_field_is_named_with_its_line(tmp_path, changes, says):
    with pytest.raises(InstanceError, match=says):
        read(tmp_path, {**SWE_BENCH, **changes})


@pytest.mark.parametrize(
    ("record", "says"),
    [
        ([1], "line 1: is list, not an object"),
        ({**R2E, "expected_output_json": "[1]"}, "expected_output_json: must be an object of statuses"),
        ({**R2E, "parsed_commit_content": "{}"}, "parsed_commit_content: is no parsed commit of R2E-Gym"),
        ({**R2E, "parsed_commit_content": "7"}, "parsed_commit_content: is no parsed commit of R2E-Gym"),
        ({**SWE_SMITH, "patch": ""}, "patch: is empty, but a SWE-smith record's patch makes its bug"),
        ({**SWE_SMITH, "FAIL_TO_PASS": ["TestGin"]}, "'TestGin' is no test of pytest: leave this record out"),
        ({"responses_create_params": {}}, "responses_create_params.metadata: is missing"),
        ({"responses_create_params": {"metadata": {"instance_dict": "[]"}}}, "instance_dict: must be an object"),
    ],
)
def test_a_record_of_a_data_set_that_lacks_its_own_fields_is_refused(tmp_path, record, says):
    with pytest.raises(InstanceError, match=says):
        read(tmp_path, record)


def test_an_id_twice_is_refused_with_both_places(tmp_path):
    with pytest.raises(InstanceError, match=r"line 2: instance_id: 'getmoto__moto-5752' is in .*line 1 too"):
        read(tmp_path, SWE_GYM, SWE_GYM)


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("i.jsonl", b"{}\n{", "i.jsonl, line 1"),
        ("i.jsonl", b"", "there is no instance in it"),
        ("i.json", b"[", "is not JSON"),
        ("i.json", b"7", "is int, not a record"),
        ("i.jsonl", b"\xff", "is not UTF-8"),
        ("i.csv", b"a", "cannot tell its format"),
        ("i.parquet", b"a", "is not Parquet"),
    ],
)
def test_a_file_that_cannot_be_read_is_named(tmp_path, name, content, says):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InstanceError, match=says):
        read_instances(tmp_path / name)


@pytest.mark.parametrize("name", ["nowhere.jsonl", "/nowhere/x", "one", "a/b/c"])
def test_a_missing_file_is_told(name):
    with pytest.raises(FileNotFoundError, match="there is no such file: give a file"):
        read_instances(name)


@pytest.mark.skipif(not LITE.is_file(), reason="needs AGENTGYM_DATA with swe_bench/lite_from_sdist.jsonl")
@pytest.mark.data
def test_instances_that_rebuild_from_source_releases_name_them():
    cases = read_instances(LITE)
    assert len(cases) == 150
    assert cases[0].sdist == "Django==3.0a1"
    assert all(case.sdist and case.patch and case.test_patch and case.fail_to_pass for case in cases)


def test_a_file_of_records_may_lie_in_the_data_folder():
    assert len(load_tasks("all", OWN)) > len(load_tasks("all", None)) > 0
