"""The pages of the docs, and the blocks and commands in them."""

import re
import shlex
from pathlib import Path

import pytest

from agentgym.core.registration import registry, spec

ROOT = Path(__file__).parent.parent
PAGES = [
    ROOT / "README.md",
    ROOT / "CHANGELOG.md",
    ROOT / "benchmarks" / "README.md",
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "agentgym_envs").rglob("README.md")),
]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


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
        for line in block.values[0].replace("\\\n", " ").splitlines()
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
    elif words[1:2] in (["check"], ["eval"]):
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
