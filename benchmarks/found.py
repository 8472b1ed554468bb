"""What a benchmark has found, as JSON, beside the machine that it was found on."""

from __future__ import annotations

import json
import os
import platform
from pathlib import Path
from typing import Any


def write(path: Path | None, **found: Any) -> None:
    if path is not None:
        machine = {"python": platform.python_version(), "cpus": os.cpu_count(), "machine": platform.machine()}
        text = json.dumps({**machine, "load": os.getloadavg(), **found}, indent=2)
        path.write_text(text + "\n")
