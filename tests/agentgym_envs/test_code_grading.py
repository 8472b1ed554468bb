"""Grading code: it agrees with HumanEval's checker where that is right, and is not fooled where that is."""

from __future__ import annotations

import contextlib
import json

import pytest

from agentgym.sandbox import SandboxSpec, acquire
from agentgym_envs.code import grading
from agentgym_envs.code.grading import grade
from agentgym_envs.code.problems import Problem

PROMPT = 'def square(x: int) -> int:\n    """ The square of x.\n    >>> square(3)\n    9\n    """\n'
CHECK = """
def check(candidate):
    assert candidate(3) == 9
    assert candidate(-2) == 4
    assert candidate(0) == 0
    assert candidate(12345) == 152399025
"""
SQUARE = Problem(
    names=("square",),
    tests=("check(square)",),
    public=("assert square(3) == 9",),
    prompt=PROMPT,
    setup=f"{PROMPT}\n{CHECK}",
)
QUICK = {"timeout": 1.0, "budget": 2.0}
FORGED = {
    "success": True,
    "passed": 4,
    "total": 4,
    "error": "",
    "failures": [],
    "output": "",
    "slow": False,
    "ended": False,
}

# What HumanEval's checker does, in our words: the program and its test run together in a process of their own, with what could
# harm the machine taken away; it has passed if the end is reached within the time, and whatever is raised is a failure.
REFERENCE = """
import contextlib, io, json, os, resource, shutil, signal, subprocess, sys
program = json.load(sys.stdin)
result = os.dup(1)
resource.setrlimit(resource.RLIMIT_AS, (1 << 28, 1 << 28))
class WriteOnly(io.StringIO):
    def read(self, *args): raise OSError
    readline = readlines = read
    def readable(self): return False
sys.stdin = WriteOnly()
for name in "kill system putenv remove removedirs rmdir fchdir setuid fork forkpty killpg rename truncate unlink".split():
    setattr(os, name, None)
shutil.rmtree = subprocess.Popen = None
def late(*args): raise TimeoutError
signal.signal(signal.SIGALRM, late)
signal.setitimer(signal.ITIMER_REAL, 1.0)
try:
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        exec(program, {})
    verdict = b"passed"
except BaseException:
    verdict = b"failed"
os.write(result, verdict)
"""

RIGHT = {
    "the body alone": "    return x * x\n",
    "the whole function": "def square(x):\n    return x * x\n",
    "with a helper and an import": "import operator\n\ndef twice(x):\n    return operator.mul(x, x)\n\ndef square(x):\n    return twice(x)\n",
    "with a class": "class Number:\n    def __init__(self, n):\n        self.n = n\n\ndef square(x):\n    return Number(x).n ** 2\n",
    "a dataclass": "from dataclasses import dataclass\n@dataclass\nclass N:\n    n: 'int' = 0\n\ndef square(x):\n    return N(x).n ** 2\n",
    "a lambda": "square = lambda x: x * x\n",
    "with state": "seen = []\ndef square(x):\n    seen.append(x)\n    return x * x if seen else 0\n",
    "that prints": "def square(x):\n    print('squaring', x)\n    return x * x\n",
    "that prints nothing more": "import sys\nsys.stdout = sys.stderr = None\ndef square(x):\n    return x * x\n",
    "that gives an int of its own": "class Big(int):\n    pass\n\ndef square(x):\n    return Big(x * x)\n",
    "that gives a float": "def square(x):\n    return float(x * x)\n",
    "with names of the builtins": "def sum(x):\n    return 0\n\nmax = min = len = list = None\n\ndef square(x):\n    return x * x\n",
    "with a main part": "def square(x):\n    return x * x\n\nif __name__ == '__main__':\n    raise ValueError\n",
}
WRONG = {
    "nothing": "",
    "only a comment": "    # to be done\n",
    "pass": "    pass\n",
    "one off": "    return x * x + (x == 12345)\n",
    "right for the example": "    return 9\n",
    "the wrong signature": "def square():\n    return 9\n",
    "the wrong name": "    return None\n\ndef sqare(x):\n    return x * x\n",
    "a syntax error": "def square(x) return x * x\n",
    "a wrong indent": "  return x * x\n      return 1\n",
    "no function": "square = 9\n",
    "that raises": "def square(x):\n    raise ValueError(x)\n",
    "that raises at its start": "1 / 0\ndef square(x):\n    return x * x\n",
    "that raises AssertionError": "def square(x):\n    raise AssertionError\n",
    "endless": "def square(x):\n    while True:\n        pass\n",
    "endless at its start": "while True:\n    pass\n",
    "endless in the last call": "def square(x):\n    while x > 100:\n        pass\n    return x * x\n",
    "asleep": "import time\ndef square(x):\n    time.sleep(60)\n",
    "sys.exit at its start": "import sys\nsys.exit(0)\n",
    "sys.exit in the call": "import sys\ndef square(x):\n    sys.exit(0)\n",
    "SystemExit": "def square(x):\n    raise SystemExit(0)\n",
    "KeyboardInterrupt": "def square(x):\n    raise KeyboardInterrupt\n",
    "exit()": "def square(x):\n    exit(0)\n",
    "os._exit at its start": "import os\nos._exit(0)\n",
    "os._exit in the call": "import os\ndef square(x):\n    os._exit(0)\n",
    "killing itself": "import os\ndef square(x):\n    os.kill(os.getpid(), 9)\n",
    "killing its parent": "import os\ntry:\n    os.kill(os.getppid(), 9)\nfinally:\n    square = lambda x: x + 1\n",
    "killing all": "import os\nos.kill(-1, 9)\nsquare = lambda x: x * x\n",
    "hungry for memory": "def square(x):\n    hoard = []\n    while True:\n        hoard.append(bytearray(10**7))\n",
    "hungry at its start": "hoard = [0] * 10**10\nsquare = lambda x: x * x\n",
    "endless recursion": "def square(x):\n    return square(x)\n",
    "a recursion that breaks the stack": "import sys\nsys.setrecursionlimit(10**9)\ndef square(x):\n    return square(x)\n",
    "reading stdin": "def square(x):\n    return int(input())\n",
    "reading stdin otherwise": "import sys\ndef square(x):\n    return int(sys.stdin.read())\n",
    "printing a verdict": f"def square(x):\n    print({json.dumps(json.dumps(FORGED))})\n    print('passed')\n",
    "that prints without end": "def square(x):\n    while True:\n        print('y' * 10000)\n",
    "that throws its output away": "import sys\nsys.stdout = sys.stderr = None\ndef square(x):\n    return 0\n",
    "that closes all": "import os\nos.closerange(0, 100)\ndef square(x):\n    return 0\n",
    "not equal to anything": "class Never:\n    def __eq__(self, other):\n        return False\n\ndef square(x):\n    return Never()\n",
}
# Programs that the reference takes for right.
FOOLING = {
    "always equal": "class Any:\n    def __eq__(self, other):\n        return True\n\ndef square(x):\n    return Any()\n",
    "an int that is always equal": "class Any(int):\n    def __eq__(self, other):\n        return True\n\ndef square(x):\n    return Any(1)\n",
    "always true": "class Any:\n    def __eq__(self, other):\n        return self\n    def __bool__(self):\n        return True\n\ndef square(x):\n    return Any()\n",
    "reading the caller's constants": (
        "import sys\ndef square(x):\n    numbers = [c for c in sys._getframe(1).f_code.co_consts if type(c) is int]\n"
        "    return numbers[numbers.index(x) + 1] if x else 0\n"
    ),
    "writing where the verdict goes": (
        "import os\nfor fd in range(3, 30):\n    try:\n        os.write(fd, b'passed')\n    except OSError:\n        pass\nos._exit(0)\n"
    ),
}
# Programs that look for the tests, or for the grader. What they try does not work, so the wrong value that they give counts.
SNOOPING = {
    "patching builtins": (
        "import builtins\nbuiltins.AssertionError = Warning\nbuiltins.isinstance = lambda *args: True\n"
        "builtins.type = lambda *args: int\ndef square(x):\n    return 1\n"
    ),
    "patching json": "import json\njson.dumps = lambda *a, **k: '[\"value\",[9,[null],{}]]'\ndef square(x):\n    return 1\n",
    "patching every module": (
        "import sys\nfor module in list(sys.modules.values()):\n    for name in ('grade', 'AssertionCounter', 'main', 'decode', 'hold'):\n"
        "        setattr(module, name, lambda *a, **k: 9)\ndef square(x):\n    return 1\n"
    ),
    "writing a report everywhere": (
        f"import os\nreport = {json.dumps(FORGED)!r}.encode()\nfor pid in os.listdir('/proc'):\n    for fd in range(40):\n"
        "        try:\n            open(f'/proc/{pid}/fd/{fd}', 'wb', 0).write(report)\n        except OSError:\n            pass\n"
        "for fd in range(40):\n    try:\n        os.write(fd, report)\n    except OSError:\n        pass\n"
        "def square(x):\n    return 1\n"
    ),
    "answers in advance": (
        "import os, struct\nbody = b'[\"value\",[9,[null],{}]]'\nfor fd in range(3, 40):\n    try:\n"
        "        os.write(fd, (struct.pack('>I', len(body)) + body) * 9)\n    except OSError:\n        pass\n"
        "def square(x):\n    return 1\n"
    ),
    "stopping the others": (
        "import os, signal\ndef square(x):\n    for pid in filter(str.isdigit, os.listdir('/proc')):\n"
        "        if int(pid) not in (1, os.getpid()):\n            try:\n                os.kill(int(pid), signal.SIGSTOP)\n"
        "            except OSError:\n                pass\n    return 1\n"
    ),
    "a fork that answers too": "import os\nos.fork()\ndef square(x):\n    return 1\n",
    "a fork bomb": "import os\ndef square(x):\n    while True:\n        try:\n            os.fork()\n        except OSError:\n            pass\n",
    "a list that holds itself": "def square(x):\n    a = []\n    a.append(a)\n    return a\n",
    "a value that is too large": "def square(x):\n    return 'x' * (40 << 20)\n",
    "an exception that cannot be shown": (
        "class Odd(Exception):\n    def __str__(self):\n        raise self\n\ndef square(x):\n    raise Odd\n"
    ),
}
READING = """
import gc, os, sys
found = []
def look(x):
    secret = str(int("15239") * 10000 + 9025)
    frame = sys._getframe(1)
    while frame:
        found.append(secret in repr(frame.f_locals) + repr(frame.f_code.co_consts))
        frame = frame.f_back
    found.append(any(secret in repr(o) for o in gc.get_objects() if type(o) in (list, dict, tuple)))
    for pid in filter(str.isdigit, os.listdir("/proc")):
        if int(pid) == os.getpid():
            continue
        for name in ("mem", "environ", "maps", "fd/0", "fd/1", "fd/3"):
            try:
                open(f"/proc/{pid}/{name}", "rb").close()
                found.append(f"{pid} {name} could be opened")
            except OSError:
                pass
        found.append(secret in open(f"/proc/{pid}/cmdline", errors="replace").read())
    try:
        import ctypes
        libc = ctypes.CDLL(None)
        found.append(any(libc.ptrace(16, int(p), 0, 0) == 0 for p in os.listdir("/proc") if p.isdigit()))
    except ImportError:
        pass
    return 0 if not any(found) else found
square = look
"""


@pytest.fixture(
    scope="module",
    params=[pytest.param("bubblewrap", marks=pytest.mark.bubblewrap), pytest.param("docker", marks=pytest.mark.docker)],
)
def backend(request):
    return request.param


def reference(completion, backend=None):
    """Whether HumanEval's checker takes a completion for right. In a sandbox too, since it is no protection itself."""
    program = f"{PROMPT}{completion}\n{CHECK}\ncheck(square)"
    with contextlib.closing(acquire(SandboxSpec(), backend=backend)) as box:
        return box.exec(["python3", "-I", "-c", REFERENCE], stdin=json.dumps(program), timeout=5).stdout.startswith(
            "passed"
        )


class TestAgreement:
    @pytest.mark.sandbox
    @pytest.mark.parametrize("name", RIGHT)
    def test_right_programs_pass_in_both(self, name):
        assert reference(RIGHT[name])
        report = grade(SQUARE, RIGHT[name], SQUARE.tests)
        assert (report.verdict, report.passed, report.total, report.error) == ("passed", 4, 4, "")

    @pytest.mark.sandbox
    @pytest.mark.parametrize("name", WRONG)
    def test_wrong_programs_fail_in_both(self, name):
        assert not reference(WRONG[name])
        report = grade(SQUARE, WRONG[name], SQUARE.tests, **QUICK)
        assert report.verdict in ("wrong", "error", "timeout", "ended")
        assert report.passed < report.total == 4 or report.verdict == "ended"

    @pytest.mark.parametrize("name", FOOLING)
    def test_programs_that_fool_the_reference_fail_here(self, name, backend):
        assert reference(FOOLING[name], backend)
        report = grade(SQUARE, FOOLING[name], SQUARE.tests, backend=backend, **QUICK)
        assert not report.success
        assert report.passed < report.total

    @pytest.mark.parametrize("name", SNOOPING)
    def test_programs_that_go_for_the_grader_fail(self, name, backend, monkeypatch):
        monkeypatch.setattr(grading, "_MARGIN", 3.0)
        report = grade(SQUARE, SNOOPING[name], SQUARE.tests, backend=backend, **QUICK)
        assert not report.success
        assert report.passed < report.total

    def test_the_tests_cannot_be_read_from_where_the_code_runs(self, backend):
        report = grade(SQUARE, READING, SQUARE.tests, backend=backend)
        assert report.failures[0]["what"] == "got 0"
        assert (report.passed, report.total) == (1, 4)  # of 0
