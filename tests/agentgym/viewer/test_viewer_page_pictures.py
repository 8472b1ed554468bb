"""The pictures of the documentation, made from real runs. `make pictures` writes them to `docs/pictures`."""

import asyncio
import io
import os
import shutil
import subprocess
import sys
from pathlib import Path

import made_runs
import pytest
from browser import NARROW, colours, elsewhere, outside, overflow, serving
from rich.console import Console

from agentgym.core.registration import spec
from agentgym.evaluate.agents import policy_maker
from agentgym.evaluate.display import LiveDisplay
from agentgym.evaluate.plan import AgentSpec, Cell
from agentgym.evaluate.run import run_plan
from agentgym.evaluate.suite import Suite
from agentgym.evaluate.tables import results_table

pytestmark = pytest.mark.browser

PICTURES = os.environ.get("AGENTGYM_PICTURES")
# A training run that is there already, to draw without training.
TRAINED = os.environ.get("AGENTGYM_PICTURES_TRAINING")
LARGEST = 200_000
GAMES = ["frozen_lake", "tic_tac_toe", "countdown", "wordle"]
# A short real training run, some minutes on two CPU cores. Tests look at one that is written at once, and learns nothing.
TRAINING = (
    "+env=frozen_lake engine=embedded trainer.steps=14 trainer.eval_every=2 trainer.eval_episodes=64 "
    "trainer.name=frozen_lake-grpo"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Evaluations by the command itself, and a training run."""
    folder = tmp_path_factory.mktemp("runs")
    n = "12" if PICTURES else "4"
    common = ["-n", n, "-k", "4", "--quiet"]
    agentgym("eval", *GAMES, "--policy", "random", *common, "--out", folder / "games-random")
    agentgym("eval", *GAMES[:3], "--policy", "expert", *common, "--out", folder / "games-expert")
    if PICTURES and TRAINED:
        shutil.copytree(TRAINED, folder / "frozen_lake-grpo", ignore=shutil.ignore_patterns("*.safetensors"))
    elif PICTURES:
        command = [Path(sys.executable).parent / "agent-train", *TRAINING.split(), f"trainer.runs_dir={folder}"]
        subprocess.run(command, check=True, timeout=2400, stdout=subprocess.DEVNULL)
    else:
        elsewhere(made_runs.write_training, folder / "frozen_lake-grpo", 4)
    return folder


def agentgym(*arguments):
    command = [sys.executable, "-m", "agentgym.cli", *map(str, arguments)]
    return subprocess.run(command, check=True, timeout=120, capture_output=True, text=True)


@pytest.fixture(scope="module")
def served(folder):
    with serving(folder) as server:
        yield server


@pytest.fixture
def keep(chrome, tmp_path):
    """Keeps a picture: `keep(name, png)`. It is neither blank nor large."""

    def check(name, picture):
        folder = Path(PICTURES) if PICTURES else tmp_path
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{name}.png").write_bytes(picture)
        assert colours(chrome, picture) > 20
        assert len(picture) < LARGEST

    return check


LAKE = "#/run/games-random/episode/frozen_lake%40random%3A0?cell=frozen_lake%40random&at=0"
# name: address, what to wait for, and what the window is like
SHOTS = {
    "viewer-runs": ("", "td .interval", {}),
    "viewer-evaluation": ("#/run/games-random", ".card", {}),
    "viewer-episodes": ("#/run/games-random/episodes?sort=turns&order=desc", ".vspace a", {}),
    "viewer-episode": (LAKE, ".turn", {}),
    "viewer-training": ("#/run/frozen_lake-grpo", ".chart polyline >> nth=1", {}),
    "viewer-compare": ("#/compare?a=games-random&b=games-expert", ".compared", {}),
    "viewer-dark": (LAKE, ".turn", {"color_scheme": "dark"}),
    "viewer-narrow": ("#/run/games-random/episodes", ".vspace a", {"viewport": NARROW}),
}


# Those that each test run draws: one of each kind of layout. What the others show, other tests look at.
DRAWN = list(SHOTS) if PICTURES else ["viewer-evaluation", "viewer-training", "viewer-dark", "viewer-narrow"]


@pytest.mark.parametrize("name", DRAWN)
def test_a_picture_of_the_page(window, served, keep, name):
    address, sign, context = SHOTS[name]
    page = window(served.url + address, **context)
    page.locator(sign).first.wait_for(state="attached")
    page.evaluate("() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
    # Where this test keeps its runs is of no interest to a reader.
    page.locator(".facts code").evaluate_all(
        "(all) => all.forEach((e) => e.textContent = 'runs/' + e.textContent.split('/').pop())"
    )
    assert overflow(page) <= 0
    keep(name, page.screenshot())


def test_a_picture_of_tokens(window, served, keep):
    page = window(f"{served.url}#/run/frozen_lake-grpo/episodes?cell=eval-000000")
    page.locator(".vspace a").nth(3).click()
    page.get_by_role("button", name="Show tokens").click()
    page.locator(".tokens .tok:not(.given)").first.hover()
    page.locator(".tok.now").wait_for()
    keep("viewer-tokens", page.screenshot())


def test_a_picture_of_the_terminal(window, chrome, keep, tmp_path):
    """The live display and the table of a real evaluation, as rich draws them."""
    drawn = tmp_path / "terminal.svg"
    elsewhere(evaluate_and_draw, tmp_path / "run", drawn)
    page = chrome.new_page(viewport={"width": 1100, "height": 640})
    # rich names fonts of another host; the picture is drawn with what is here.
    page.route("**/*", lambda route: route.abort() if outside(route.request.url, "") else route.continue_())
    page.set_content(drawn.read_text())
    keep("terminal-eval", page.locator("svg").screenshot())
    page.close()


class Seen:
    """A `Watch` that prints the live picture once, in the middle of the last cell."""

    def __init__(self, console, last, middle):
        self.display = LiveDisplay(Console(quiet=True))
        self.console, self.last, self.left = console, last, middle
        self.started, self.finished = self.display.started, self.display.finished

    def ended(self, cell, trajectory):
        self.display.ended(cell, trajectory)
        self.left -= cell.name == self.last
        if self.left == 0 and cell.name == self.last:
            self.console.print(self.display.picture())


def evaluate_and_draw(run, drawn):
    """Play two environments; the live display at work, and the table at the end, go into one picture."""
    cells = [Cell(spec(env), AgentSpec("random", "random"), n=12, k=4) for env in ("frozen_lake", "tic_tac_toe")]
    console = Console(record=True, width=92, force_terminal=True, file=io.StringIO())
    console.print("[bold]$[/] agentgym eval frozen_lake tic_tac_toe --policy random -n 12 -k 4\n", highlight=False)
    watch = Seen(console, cells[1].name, 30)
    results = asyncio.run(run_plan(Suite(run.name, tuple(cells), 8), run, make=policy_maker, watch=watch))
    assert watch.left < 0
    console.print("", results_table(results))
    drawn.write_text(console.export_svg(title="agentgym eval", clear=False))
