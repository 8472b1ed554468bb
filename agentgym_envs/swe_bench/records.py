"""Turns the records of published data sets into instances. A record's fields tell which data set it is of.

| data set | told by | image | tests |
|---|---|---|---|
| SWE-bench and its kind, Multimodal and Multilingual too | the rest | `swebench/...`, or `image` | both lists, as JSON text or lists |
| SWE-Gym | its repositories | `xingyaoww/...` | both lists |
| SWE-smith | `image_name`, no `test_patch` | `image_name` | both lists; `patch` makes the bug |
| R2E-Gym | `expected_output_json` | `docker_image` | a status for each test |
| NeMo Gym (Nemotron) | `responses_create_params` | any of these | a record of any kind in `metadata.instance_dict` |
"""

import json
from collections.abc import Mapping
from typing import Any

from agentgym_envs.swe_bench.instance import Instance, InstanceError
from agentgym_envs.swe_bench.logs import END, START, has_parser, r2e_name
from agentgym_envs.swe_bench.patches import PatchError, parse_patch, reversed_patch
from agentgym_envs.swe_bench.upstream import script_of

_SWE_GYM = {
    *("python/mypy", "getmoto/moto", "conan-io/conan", "modin-project/modin", "project-monai/monai", "iterative/dvc"),
    *("dask/dask", "bokeh/bokeh", "pandas-dev/pandas", "facebookresearch/hydra", "pydantic/pydantic"),
}
_TEST_FOLDERS = {"test", "tests", "Test", "Tests"}
_R2E_SIGNS = {"context": " ", "added": "+", "deleted": "-", "note": "\\ "}


def instance_of(record: Any, place: str) -> Instance:
    """The instance of a record; `place` begins errors. Raises InstanceError."""
    if not isinstance(record, dict):
        raise InstanceError(f"{place}: is {type(record).__name__}, not an object with fields")
    if "responses_create_params" in record:
        return _nemo(record, place)
    if record.get("expected_output_json") and not record.get("FAIL_TO_PASS"):
        return _r2e(record, place)
    if record.get("image_name") and not record.get("test_patch"):
        return _swe_smith(record, place)
    return _swe_bench(record, place)


def _swe_bench(record: Mapping[str, Any], place: str) -> Instance:
    name, repo = _text(record, "instance_id", place), _text(record, "repo", place)
    image = next((record[key] for key in ("image", "docker_image", "image_name") if record.get(key)), None)
    build, test = _commands(record, repo, place)
    return Instance(
        id=name,
        repo=repo,
        base_commit=_text(record, "base_commit", place),
        problem_statement=_text(record, "problem_statement", place),
        version=_text(record, "version", place, default=""),
        patch=_patch(record, "patch", place),
        test_patch=_patch(record, "test_patch", place),
        fail_to_pass=_tests(record, "FAIL_TO_PASS", place, least=1),
        pass_to_pass=_tests(record, "PASS_TO_PASS", place),
        image=published_image(name, repo) if image is None else str(image).removeprefix("docker://"),
        test_command=test,
        build_command=build,
        log_parser=_text(record, "log_parser", place, default=""),
        eval_type=_text(record, "eval_type", place, default=""),
        sdist=_text(record, "sdist", place, default="") or None,
    )


def published_image(instance: str, repo: str) -> str:
    """The name by which SWE-bench or SWE-Gym publishes an instance's image; Docker allows no "__" in it."""
    owner, between = ("xingyaoww", "_s_") if repo.lower() in _SWE_GYM else ("swebench", "_1776_")
    return f"{owner}/sweb.eval.x86_64.{instance.replace('__', between)}:latest".lower()


def _swe_smith(record: Mapping[str, Any], place: str) -> Instance:
    """The image has the sound repository. Only files with FAIL_TO_PASS tests run, so only theirs must still pass."""
    bug = _patch(record, "patch", place)
    if not bug:
        raise InstanceError(f"{place}: patch: is empty, but a SWE-smith record's patch makes its bug")
    try:
        gold = reversed_patch(bug)
    except PatchError as error:
        raise InstanceError(f"{place}: patch: has no inverse to be the gold patch: {error}") from error
    repo, image = _text(record, "repo", place), _text(record, "image_name", place)
    image = image if "/" in image else f"jyangballin/{image.replace('__', '_1776_')}"
    failing = _tests(record, "FAIL_TO_PASS", place, least=1)
    if other := next((test for test in failing if ".py::" not in test), None):
        raise InstanceError(f"{place}: FAIL_TO_PASS: {other!r} is no test of pytest: leave this record out")
    files = {test.partition("::")[0] for test in failing}
    return Instance(
        id=_text(record, "instance_id", place),
        repo=repo if repo.startswith("swesmith/") else f"swesmith/{repo.replace('/', '__')}",
        base_commit=_text(record, "base_commit", place, default=repo.rpartition(".")[2]),
        problem_statement=_text(record, "problem_statement", place),
        patch=gold,
        bug_patch=bug,
        fail_to_pass=failing,
        pass_to_pass=tuple(t for t in _tests(record, "PASS_TO_PASS", place) if t.partition("::")[0] in files),
        image=image if ":" in image.rpartition("/")[2] else f"{image}:latest",
        test_command=_command(record, place),
    )


def _r2e(record: Mapping[str, Any], place: str) -> Instance:
    repo, commit = _text(record, "repo_name", place), _text(record, "commit_hash", place)
    expected = _json(record, "expected_output_json", place)
    if not isinstance(expected, dict) or not expected or not all(isinstance(said, str) for said in expected.values()):
        raise InstanceError(
            f"{place}: expected_output_json: must be an object of statuses by test, not {expected!r:.80}"
        )
    parsed = _json(record, "parsed_commit_content", place)
    try:
        patch = _r2e_patch(parsed)
        parse_patch(patch)
    except (KeyError, TypeError, AttributeError, PatchError) as error:
        raise InstanceError(f"{place}: parsed_commit_content: is no parsed commit of R2E-Gym: {error!r}") from error
    return Instance(
        id=_text(record, "instance_id", place, default=f"{repo}-{commit}"),
        repo=repo,
        base_commit=str(parsed.get("old_commit_hash") or f"{commit}^"),
        problem_statement=_text(record, "problem_statement", place),
        patch=patch,
        image=_text(record, "docker_image", place),
        test_command=_command(record, place) or "bash run_tests.sh",
        expected={r2e_name(name): status for name, status in expected.items()},
    )


def _r2e_patch(parsed: Mapping[str, Any]) -> str:
    """The git diff of a parsed commit, without its tests, which the image has."""
    lines: list[str] = []
    for change in parsed["file_diffs"]:
        header, index = change["header"], change.get("index_line")
        path: str = header["file"]["path"]
        if _is_test(path) or change.get("is_binary_file"):
            continue
        lines += [f"diff --git a/{path} b/{path}", *([header["misc_line"]] if header.get("misc_line") else [])]
        if index:
            mode = f" {index['mode']}" if index.get("mode") else ""
            lines.append(f"index {index['old_commit_hash']}..{index['new_commit_hash']}{mode}")
        if change.get("minus_file") and change.get("plus_file"):
            lines += [f"--- {change['minus_file']['path']}", f"+++ {change['plus_file']['path']}"]
        for hunk in change.get("hunks") or ():
            at = hunk["descriptor"]
            old, new = (_range(at[side]) for side in ("old_range", "new_range"))
            lines.append(f"@@ -{old} +{new} @@{' ' + at['section'] if at.get('section') else ''}")
            lines += [_R2E_SIGNS[line["type"]] + line["content"] for line in hunk["line_group"]["all_lines"]]
    return "".join(f"{line}\n" for line in lines)


def _range(given: Mapping[str, Any]) -> str:
    return f"{given['start']}" if given.get("length") is None else f"{given['start']},{given['length']}"


def _is_test(path: str) -> bool:
    *folders, name = path.split("/")
    return bool(_TEST_FOLDERS & set(folders)) or name.startswith("test_") or name.endswith("_test.py")


def _nemo(record: Mapping[str, Any], place: str) -> Instance:
    """Fields of the inner record win over those of the metadata, and these over the outer ones."""
    given = record["responses_create_params"]
    about = given.get("metadata") if isinstance(given, dict) else None
    if not isinstance(about, dict):
        raise InstanceError(
            f"{place}: responses_create_params.metadata: is missing: it must hold the instance's fields"
        )
    inner = _json(about, "instance_dict", f"{place}: metadata") if about.get("instance_dict") else {}
    if not isinstance(inner, dict):
        raise InstanceError(f"{place}: metadata.instance_dict: must be an object, not {inner!r:.80}")
    merged = {key: value for part in (record, about, inner) for key, value in part.items() if value is not None}
    merged.setdefault("patch", merged.get("golden_patch", ""))
    del merged["responses_create_params"]
    return instance_of(merged, place)


def _text(record: Mapping[str, Any], key: str, place: str, default: str | None = None) -> str:
    value = record.get(key)
    if value is None or value == "":
        if default is not None:
            return default
        fields = ", ".join(sorted(map(str, record))[:20])
        raise InstanceError(f"{place}: {key}: is missing or empty; the record has {fields}: is it of another format?")
    if not isinstance(value, str):
        raise InstanceError(f"{place}: {key}: must be text, not {value!r:.80}")
    return value


def _json(record: Mapping[str, Any], key: str, place: str) -> Any:
    """A field that is JSON, as text or already read."""
    value = record.get(key)
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError as error:
        raise InstanceError(f"{place}: {key}: is not JSON: {error}; is the record cut off?") from error


def _tests(record: Mapping[str, Any], key: str, place: str, least: int = 0) -> tuple[str, ...]:
    value = _json(record, key, place) if record.get(key) else []
    if not isinstance(value, list) or not all(isinstance(test, str) for test in value):
        raise InstanceError(f"{place}: {key}: must be a list of test names, or its JSON text, not {value!r:.80}")
    if len(value) < least:
        raise InstanceError(f"{place}: {key}: names no test: without one nothing tells if the issue is resolved")
    return tuple(value)


def _patch(record: Mapping[str, Any], key: str, place: str) -> str:
    patch = _text(record, key, place, default="")
    try:
        parse_patch(patch)
    except PatchError as error:
        raise InstanceError(f"{place}: {key}: is no patch in git's format: {error}") from error
    return patch


def _commands(record: Mapping[str, Any], repo: str, place: str) -> tuple[str, str | None]:
    """The record's own commands that build and test; for what is not Python's, all that its script does with the tests."""
    if record.get("test_command") or has_parser(repo):
        return _text(record, "build_command", place, default=""), _command(record, place)
    build, test = script_of(_text(record, "eval_script", place, default=""))
    return build, test or None


def _command(record: Mapping[str, Any], place: str) -> str | None:
    """The record's own command, or that between the markers of its script (SWE-bench's package, version 5)."""
    if record.get("test_command"):
        return _text(record, "test_command", place)
    lines = _text(record, "eval_script", place, default="").split("\n")
    marks = [number for sign in (START, END) for number, line in enumerate(lines) if sign in line]
    return "\n".join(lines[marks[0] + 1 : marks[-1]]).strip() or None if len(marks) > 1 else None
