"""What README and docs say is so: settings and fields are all there, links lead somewhere, names are right."""

import dataclasses
import pkgutil
import re
import subprocess
import tomllib
from pathlib import Path

import pytest
from docs_pages import PAGES, ROOT
from packaging.requirements import Requirement

from agent_train.config.table import with_tables
from agent_train.learner.measures import UpdateMetrics
from agent_train.report.metrics import EvalMetrics, SftMetrics, StepMetrics
from agentgym.cli import main as agentgym
from agentgym.core.registration import adapters, registry
from agentgym.evaluate import CellResult

# Made by whole training runs, which come last.
MADE_BY_RUNS = {"docs/results/frozen_lake.svg", "docs/results/README.md"}
OPTION = re.compile(r"(?<![\w-])--?[a-z][a-z-]*")


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


def test_the_tables_of_settings_are_made_from_the_schema():
    page = (ROOT / "docs/settings.md").read_text(encoding="utf-8")
    assert page == with_tables(page), "run: python -m agent_train.config.table"


@pytest.mark.parametrize(
    ("page", "kinds"),
    [("docs/metrics.md", (SftMetrics, EvalMetrics, StepMetrics, UpdateMetrics)), ("docs/evaluation.md", (CellResult,))],
)
def test_every_field_that_is_measured_is_explained(page, kinds):
    told = {name for row in rows(page) for name in code_words(row[0])}
    fields = {field.name for kind in kinds for field in dataclasses.fields(kind)} - {"step"}
    assert fields - told == set()


def test_options_of_eval_in_the_tables_exist(capsys):
    with pytest.raises(SystemExit):
        agentgym(["eval", "--help"])
    named = {word.split()[0] for row in rows("docs/evaluation.md") for word in code_words(row[0]) if word[0] == "-"}
    assert len(named) > 15
    assert named <= set(OPTION.findall(capsys.readouterr().out))


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


@pytest.mark.parametrize(
    "page", [page for page in PAGES if page.name != "CHANGELOG.md"], ids=lambda p: str(p.relative_to(ROOT))
)
def test_python_names_that_are_told_can_be_imported(page):
    for name in re.findall(r"`((?:agentgym|agentgym_envs|agent_train)(?:\.\w+){2,})", page.read_text(encoding="utf-8")):
        assert resolves(name), f"{page.name}: {name}"


def resolves(name):
    """Whether a dotted name is a module, or leads from one to an attribute."""
    try:
        pkgutil.resolve_name(name)
    except (ImportError, AttributeError):
        return False
    return True


def test_each_dependency_says_what_it_is_for():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = {
        name: packages for name, packages in project["optional-dependencies"].items() if name not in ("dev", "envs")
    }
    wanted = {Requirement(one).name for packages in (project["dependencies"], *extras.values()) for one in packages}
    page = (ROOT / "docs" / "dependencies.md").read_text(encoding="utf-8")
    assert set(re.findall(r"^\| (?:`\w+` \| )?`([\w-]+)` \|", page, re.MULTILINE)) == wanted


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
