"""What README and docs say is so: code runs, commands exist, settings and fields are all there, links lead somewhere."""

import dataclasses
import json
import re
import shlex
import subprocess
import sys
from itertools import takewhile
from pathlib import Path

import pytest
import yaml

from agent_train.cli import main as agent_train
from agent_train.compose import compose, settings_keys
from agent_train.config import Config
from agent_train.learner.measures import UpdateMetrics
from agent_train.tracking import EvalMetrics, SftMetrics, StepMetrics
from agent_train.validation import get
from agentgym.catalogue import data_sets, missing_files
from agentgym.cli import main as agentgym
from agentgym.evaluate import CellResult
from agentgym.registration import adapters, registry, spec
from agentgym.sandbox.images import WAYS, image_names, rootfs

ROOT = Path(__file__).parent.parent
PAGES = [
    ROOT / "README.md",
    ROOT / "CHANGELOG.md",
    ROOT / "benchmarks" / "README.md",
    *sorted((ROOT / "docs").rglob("*.md")),
]
# Made by whole training runs, which come last.
MADE_BY_RUNS = {"docs/results/frozen_lake.svg", "docs/results/README.md"}
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
OPTION = re.compile(r"(?<![\w-])--?[a-z][a-z-]*")


def blocks(*languages):
    """(page and number, text) of every fenced block in one of these languages; "" is a block of shell commands."""
    found = []
    for page in PAGES:
        for number, (language, text) in enumerate(FENCE.findall(page.read_text(encoding="utf-8"))):
            if language in languages:
                found.append(pytest.param(text, id=f"{page.relative_to(ROOT)}-{number}"))
    return found


def commands(program):
    """The command lines of one program in all shell blocks, comments left out."""
    lines = [
        shlex.split(line, comments=True)
        for block in blocks("", "bash")
        for line in block.values[0].splitlines()
        if line
    ]
    return [
        pytest.param(words[1:], id=" ".join(words), marks=needs(words))
        for words in lines
        if words and words[0] == program
    ]


def needs(words):
    """Markers of the back end of sandboxes that a command takes: conftest.py says where there is none, and skips it."""
    if words[0] == "agent-train":
        named = [word.removeprefix("+env=") for word in words]
    elif words[1:2] in (["check"], ["eval"]) and "--model" not in words:
        named = words[2:]
    else:
        return []
    if not any(image_of(name) for name in named if name in registry):
        return []
    chosen = next((word.partition("=")[2] for word in words if word.startswith("sandbox=")), "sandbox")
    return [getattr(pytest.mark, chosen)]


def image_of(name):
    """Of the sandboxes of an environment; None where it has none."""
    env = spec(name).make()
    env.close()
    return getattr(env.unwrapped, "sandbox_image", None)


def code_blocks():
    """All blocks of Python; those that take a sandbox say so."""
    acts = "|".join(sorted(name for name in registry if image_of(name)))
    takes_one = re.compile(rf"\bacquire\(|\bmake\(\"(?:{acts})\"")
    return [
        pytest.param(
            *block.values, id=block.id, marks=[pytest.mark.sandbox] if takes_one.search(block.values[0]) else []
        )
        for block in blocks("python")
    ]


# ---- code


@pytest.mark.parametrize("code", code_blocks())
def test_every_python_block_runs(code, tmp_path):
    """Blocks that ask a chat endpoint are only compiled: none answers here."""
    compiled = compile(code, "block", "exec")
    assert compiled.co_code
    if "http://localhost" in code:
        return
    done = subprocess.run(
        [sys.executable, "-W", "error::RuntimeWarning", "-c", code],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=tmp_path,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_there_is_code_to_run():
    assert len(blocks("python")) >= 8


# ---- commands


def help_of(*words, capsys):
    with pytest.raises(SystemExit) as ended:
        agentgym([*words, "--help"])
    assert ended.value.code == 0
    return capsys.readouterr().out


def without_marks(parameters):
    """The same cases for a test that runs nothing, and so needs nothing."""
    return [pytest.param(*case.values, id=case.id) for case in parameters]


@pytest.mark.parametrize("words", without_marks(commands("agentgym")))
def test_agentgym_commands_and_their_options_exist(words, capsys):
    assert words[0] in help_of(capsys=capsys)
    verbs = words[:2] if words[0] in ("sandbox", "data", "export") else words[:1]
    if len(verbs) == 2:
        assert verbs[1] in help_of(verbs[0], capsys=capsys)
    options = set(OPTION.findall(help_of(*verbs, capsys=capsys)))
    assert {word for word in words if word.startswith("-")} <= options
    named = list(takewhile(lambda word: not word.startswith("-"), words[len(verbs) :]))
    if verbs == ["sandbox", "build"]:
        assert set(named) <= set(image_names())
    elif verbs == ["data", "get"]:
        assert set(named) <= set(data_sets())
        assert named, "the command names no data set"
    elif words[0] in ("check", "eval", "serve"):
        assert named or "--sandbox" in words, "the command names no environment"
        for name in named:
            spec(name).load()


@pytest.mark.parametrize("words", commands("agentgym"))
def test_agentgym_commands_run(words, tmp_path, monkeypatch):
    """In a folder of their own: runs and files that they make are left in no checkout."""
    if reason := why_not_run(words):
        pytest.skip(reason)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    assert agentgym(words) == 0


def why_not_run(words):
    """Why a command is only looked at; "" where it is run. Commands of sandboxes work with an engine and without one."""
    if "--model" in words:
        return "no chat endpoint answers here"
    if words[0] == "play" and not {"--policy", "--agent"} & set(words):
        return "a person is needed to play"
    if words[0] == "serve" or (words[0] == "view" and "--export" not in words):
        return "it serves until it is interrupted"
    if words[0] in ("view", "compare", "rescore"):
        return "it takes runs of the reader's own"
    if words[:3] == ["sandbox", "cleanup", "--all"]:
        return "it would end the sandboxes of everybody on this machine"
    if words[:2] == ["sandbox", "build"]:
        names = [word for word in words[2:] if word in image_names()] or image_names()
        way = words[words.index("--how") + 1] if "--how" in words else None
        missing = [name for name in names if way_of(name) not in ((way,) if way else WAYS)]
        return f"not built here, which takes minutes and package mirrors: {', '.join(missing)}" if missing else ""
    if words[:2] == ["data", "get"]:
        absent = [name for name in words[2:] if name in data_sets() and missing_files(data_sets()[name])]
        return f"not here, and fetching it takes a network: {', '.join(absent)}" if absent else ""
    return ""


def way_of(image):
    """How an image was made; None where it was not."""
    root = rootfs(image)
    return json.loads((root.parent / "image.json").read_text())["way"] if root else None


@pytest.mark.parametrize("words", commands("agent-train"))
def test_training_commands_would_run(words, tmp_path, monkeypatch, capsys):
    """Planned with the embedded engine, so that vLLM need not be there. A model folder and files that only
    validation looks at stand in for the reader's own.
    """
    if any(word.startswith("env.url=") for word in words):
        assert compose(words).env.url, "it names no server"  # which is asked before anything else, and is not there
        return
    monkeypatch.chdir(tmp_path)
    for name in ("config.json", "tokenizer.json", "chat_template.jinja", "model.safetensors"):
        (tmp_path / name).write_text("{}")
    words = [f"model.path={tmp_path}" if word.startswith("model.path=") else word for word in words]
    for word in [word for word in words if word.startswith(("data.train=", "data.test="))]:
        path = tmp_path / word.partition("=")[2]
        path.parent.mkdir(parents=True, exist_ok=True)
        record = {
            "prompt": "hi",
            **({"completion": "yes"} if "mode=sft" in words else {"chosen": "yes", "rejected": "no"}),
        }
        path.write_text(json.dumps(record))
    extra = [] if "--list" in words else ["engine=embedded", "--dry-run"]
    code = agent_train([*dict.fromkeys([*words, *extra])])
    assert code == 0, capsys.readouterr().err


@pytest.mark.parametrize("words", commands("make"))
def test_make_targets_exist(words):
    assert re.search(rf"^{words[0]}:", (ROOT / "Makefile").read_text(), re.MULTILINE)


@pytest.mark.parametrize("words", commands("python"))
def test_scripts_exist(words):
    if words[0] == "-c":
        compile(words[1], "-c", "exec")
        return
    path = words[1].replace(".", "/") + ".py" if words[0] == "-m" else words[0]
    assert (ROOT / path).is_file()


def test_there_are_commands_of_every_kind():
    assert all(len(commands(program)) >= 2 for program in ("agentgym", "agent-train", "make", "python"))


# ---- tables


def rows(page, section=""):
    """The cells of the rows of a page's tables that begin with code; of one section if it is named."""
    text = (ROOT / page).read_text(encoding="utf-8")
    text = text.partition(section)[2].partition("\n#")[0] if section else text
    return [
        [cell.strip() for cell in line.strip("|").split(" | ")] for line in text.splitlines() if line.startswith("| `")
    ]


def code_words(cell):
    return re.findall(r"`([^`]+)`", cell)


def test_readme_lists_every_environment_and_no_other():
    listed = [name for row in rows("README.md", "## Environments") for name in code_words(row[0])]
    ours = [name for name, found in registry.items() if _ships(found)]
    assert sorted(listed) == sorted([*ours, *(f"{prefix}:NAME" for prefix in adapters)])


def _ships(found):
    return str(found.entry_point).startswith("agentgym_envs.")


def test_the_settings_table_is_the_dataclasses():
    told = {
        code_words(row[0])[0]: yaml.safe_load(code_words(row[1])[0]) for row in rows("docs/training.md", "## Settings")
    }
    true = {key: get(Config(), key) for key, kind in settings_keys().items() if not dataclasses.is_dataclass(kind)}
    assert told == true


@pytest.mark.parametrize(
    ("page", "kinds"),
    [
        ("docs/training.md", (SftMetrics, EvalMetrics, StepMetrics, UpdateMetrics)),
        ("docs/evaluation.md", (CellResult,)),
    ],
)
def test_every_field_that_is_measured_is_explained(page, kinds):
    told = {name for row in rows(page) for name in code_words(row[0])}
    fields = {field.name for kind in kinds for field in dataclasses.fields(kind)} - {"step"}
    assert fields - told == set()


def test_every_option_of_eval_is_explained(capsys):
    told = {word.split()[0] for row in rows("docs/evaluation.md") for word in code_words(row[0])}
    assert set(OPTION.findall(help_of("eval", capsys=capsys))) - {"--help", "-h"} <= told


# ---- links and names


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        if target.startswith(("http://", "https://")):
            continue
        path, _, anchor = target.partition("#")
        there = (page.parent / path).resolve() if path else page
        if str(there.relative_to(ROOT.resolve())) in MADE_BY_RUNS and not there.exists():
            continue
        assert there.exists(), f"{page.name}: {target}"
        if anchor:
            headings = re.findall(r"^#+ (.+)$", there.read_text(encoding="utf-8"), re.MULTILINE)
            slugs = {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}
            assert anchor in slugs, f"{page.name}: {target}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_files_that_are_named_exist(page):
    folders = "agentgym|agentgym_envs|agent_train|configs|examples|benchmarks|tests|docs|scripts"
    for name in re.findall(rf"`((?:{folders})/[\w./-]*)`", page.read_text(encoding="utf-8")):
        assert (ROOT / name).exists() or name in ("agent_train/configs", *MADE_BY_RUNS), f"{page.name}: {name}"


def test_nobody_is_told_to_install_the_other_project_that_the_index_calls_agentgym():
    listed = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True, timeout=60
    ).stdout
    wrong = re.compile(
        r"pip install (?:[^\s`]*\s)*?['\"]?agentgym(?![\w-])|\bagentgym\[[a-z]|^ARG AGENTGYM=agentgym$|[\"']agentgym[>=]="
    )
    for name in listed.splitlines():
        path = ROOT / name
        if path.suffix in {".png", ".svg", ".gz"} or not path.is_file() or path == Path(__file__):
            continue
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            assert not wrong.search(line), f"{name}: {line.strip()}"
