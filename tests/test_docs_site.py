"""`make docs`: the site has every page and public name, needs no other host and no server; what Troubleshooting quotes is said."""

import ast
import json
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from urllib.parse import unquote, urlsplit

import pytest
from browser import chromium
from docs_pages import ROOT

import agentgym

pytest.importorskip("mkdocs", reason="pip install 'agentgym-toolkit[docs]'")
LOADED = {"img": "src", "link": "href", "script": "src", "iframe": "src", "source": "src"}


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    done = build(ROOT, folder)
    assert done.returncode == 0, done.stderr
    return folder


def build(root, folder):
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    return subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=200, check=False)


class Tags(HTMLParser):
    def __init__(self, page):
        super().__init__()
        self.found = []
        self.feed(page.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))


def pages(site):
    return [page for page in sorted(site.rglob("*.html")) if page.name != "404.html"]


def test_every_page_of_the_docs_is_in_the_navigation(site):
    links = [attrs for tag, attrs in Tags(site / "index.html").found if tag == "a"]
    listed = {attrs["href"] for attrs in links if "md-nav__link" in attrs.get("class", "")}
    docs = [path.relative_to(ROOT) for path in sorted((ROOT / "docs").rglob("*.md"))]
    wanted = {str(path.with_suffix(".html")).replace("README", "index") for path in docs}
    assert len(wanted) > 15
    assert wanted - listed == set()


def test_pages_load_nothing_from_another_host(site):
    for page in pages(site):
        loaded = [attrs.get(LOADED[tag]) or "" for tag, attrs in Tags(page).found if tag in LOADED]
        assert loaded
        assert [url for url in loaded if urlsplit(url).netloc] == [], page
    for sheet in site.rglob("*.css"):
        assert not re.search(r"(url\(|@import)\s*['\"]?(https?:)?//", sheet.read_text(encoding="utf-8")), sheet


def test_what_pages_link_to_and_load_is_in_the_site(site):
    for page in pages(site):
        for tag, attrs in Tags(page).found:
            url = urlsplit(attrs.get(LOADED.get(tag, "href")) or "")
            if not url.scheme and url.path:
                assert (page.parent / unquote(url.path)).is_file(), f"{page}: {url.path}"


def test_links_to_no_page_and_to_no_heading_fail_the_build(tmp_path):
    root = tmp_path / "copy"
    shutil.copytree(ROOT / "docs", root / "docs")
    for name in ("mkdocs.yml", "scripts", "agentgym_envs", "benchmarks", *(path.name for path in ROOT.glob("*.md"))):
        (root / name).symlink_to(ROOT / name)
    (root / "docs" / "api.md").write_text("# API\n\n[no page](nowhere.md) [no heading](training.md#nowhere)\n")
    done = build(root, tmp_path / "site")
    assert done.returncode == 1
    assert "'nowhere.md'" in done.stderr
    assert "'training.md#nowhere'" in done.stderr


def test_search_knows_every_page(site):
    index = json.loads((site / "search" / "search_index.json").read_text(encoding="utf-8"))
    known = {entry["location"].partition("#")[0] for entry in index["docs"]}
    assert {page.relative_to(site).as_posix() for page in pages(site)} <= known


def test_the_api_reference_has_every_public_name(site):
    ids = {attrs.get("id") for _, attrs in Tags(site / "docs" / "api.html").found}
    assert {f"agentgym.{name}" for name in agentgym.__all__} - ids == set()
    assert {"agentgym.gateway.Gateway", "agent_train.config.extensions.losses"} <= ids


@pytest.mark.browser
def test_search_works_from_the_file_system(site):
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        window = playwright.chromium.launch(executable_path=chromium(), args=["--no-sandbox"]).new_page()
        window.goto((site / "docs" / "training.html").as_uri())
        window.get_by_role("textbox", name="Search").fill("bubblewrap")
        window.locator(".md-search-result__link", has_text="Sandboxes").first.wait_for()


# ---- troubleshooting


def test_what_troubleshooting_quotes_is_said():
    quotes = [quote for table in tables_of_messages() for quote in re.findall(r"^\| `([^`]+)` \|", table, re.MULTILINE)]
    assert len(quotes) > 40
    setup = re.sub(r"\$\w+", "…", (ROOT / "scripts" / "setup.sh").read_text())
    said = re.sub("…+", "…", "\n".join([*texts(), setup]))
    assert [quote for quote in quotes if quote not in said] == []


def tables_of_messages():
    page = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    return [table for table in page.split("\n\n") if table.startswith(("| message |", "| what you see |"))]


def texts():
    """The texts in the source; what they are filled with is …"""
    for package in ("agentgym", "agentgym_envs", "agent_train"):
        for path in sorted((ROOT / package).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.JoinedStr):
                    yield "".join(part.value if isinstance(part, ast.Constant) else "…" for part in node.values)
                elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                    yield node.value
