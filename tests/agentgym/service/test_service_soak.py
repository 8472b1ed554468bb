"""A short run of the benchmark that watches a server's memory: 5,000 episodes, in sessions that come and go and in ones that stay."""

import json
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[3] / "benchmarks" / "service_soak.py"


def test_memory_and_files_stay_as_they_are(tmp_path):
    words = [sys.executable, str(SCRIPT), "--episodes", "5000", "--out", "found.json"]
    done = subprocess.run(words, cwd=tmp_path, check=False, capture_output=True, text=True, timeout=280)
    assert (tmp_path / "found.json").exists(), done.stderr
    told = json.loads((tmp_path / "found.json").read_text())
    assert told["grows"] == []
    assert done.returncode == 0
    rows = told["readings"]
    assert [row["episodes"] for row in rows if row["part"] == "sessions"] == list(range(0, 501, 50))
    assert [row["episodes"] for row in rows if row["part"] == "episodes"] == list(range(0, 4501, 450))
    for part in ("sessions", "episodes"):
        warm, *_, last = [row for row in rows if row["part"] == part][2:]
        for process in ("server", "supervisor", "zygote"):
            assert last["own"][process] > 0
            assert last["own"][process] - warm["own"][process] < 2, (part, process)
            assert last["files"][process] <= warm["files"][process], (part, process)


def test_a_rise_is_told(tmp_path):
    """The judgement itself: numbers that rise, and a file that stays open."""
    code = (
        f"import sys; sys.path.insert(0, {str(SCRIPT.parent)!r}); import service_soak as soak\n"
        "names = ('server', 'supervisor', 'zygote', 'workers')\n"
        "def row(part, count, server, files):\n"
        "    own = {**dict.fromkeys(names, 5.0), 'server': server}\n"
        "    return soak.Reading(part, count, 1.0, own, own, dict.fromkeys(names, files))\n"
        "flat = [row(part, count, 30 + count % 2, 9) for part in ('sessions', 'episodes') for count in range(11)]\n"
        "rises = [*flat[:11], *(row('episodes', count, 30 + count / 2, 9 + (count > 9)) for count in range(11))]\n"
        "print(soak.growth(flat), soak.growth(rises))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=60)
    assert done.stdout.startswith(
        "[] ['episodes: server grows by 500.000 MiB per 1,000 episodes', 'episodes: server has 10"
    )
