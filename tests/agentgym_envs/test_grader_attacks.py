"""Replies and programs that try to be paid without being right, against every grader that compares: each earns the floor."""

from __future__ import annotations

import pytest
from sql_cases import look, need_sandbox, question, reward_of, started

import agentgym
from agentgym.core.messages import user
from agentgym.core.tasks import Task
from agentgym_envs import register_all
from agentgym_envs.code.grading import grade
from agentgym_envs.code.problems import Problem
from agentgym_envs.math.symbolic import same_answer
from agentgym_envs.search.env import exact_match, f1

register_all()

MATH = {
    "a side of the equation": ("x^2+y^2=25", "25"),
    "the other side": ("x^2+y^2=25", "x^2+y^2"),
    "a tautology": ("x^2+y^2=25", "0=0"),
    "a tautology beside the variable": ("x=5", "x=x"),
    "an equation times zero": ("x+y=2", "0(x+y)=0"),
    "an equation that everything solves": ("x+y=2", "x+y-x=y"),
    "all candidates": ("5", ",".join(map(str, range(20)))),
    "a set of all": ("5", r"\{0,1,2,3,4,5,6,7,8,9\}"),
    "an interval around it": ("5", "[4,6]"),
    "a bound": ("5", r"x \le 5"),
    "a domain": ("5", r"x \in \mathbb{R}"),
    "a free variable": ("5", "x"),
    "no value at all": ("5", r"\frac{0}{0}"),
    "nan": ("5", r"\infty-\infty"),
    "an empty product": ("5", r"\pm"),
    "a guess with a sign on both sides": ("5", r"\pm 5"),
    "a sum restated": ("55", r"\sum_{n=1}^{10} n"),
    "an integral restated": (r"\frac{1}{3}", r"\int_0^1 x^2 dx"),
    "a word for any": ("5", r"\text{the correct answer}"),
    "code": ("5", "__import__('sympy').Symbol('x', positive=True)"),
    "an equality that is always true": ("5", "5 == 5"),
    "a value next to the truth": ("5", "5 + 10^{-12}"),
    "a function without values": ("x+1", r"x+1+\sqrt{-1-x^2}"),
    "a value where only the gold has none": (r"\sqrt{-x^2-1}", "7"),
    "a choice of letters": (r"\text{(B)}", "ABCDE"),
    "a percentage of the share": ("0.5", r"0.5\%"),
    "another unit": (r"5\text{ cm}", r"5\text{ km}"),
}


@pytest.mark.parametrize("name", MATH)
def test_mathematics(name):
    pytest.importorskip("mpmath")
    assert not same_answer(*MATH[name])


GSM8K = {
    "all numbers": "#### " + " ".join(map(str, range(100))),
    "all numbers, each marked": "\n".join(f"#### {n}" for n in range(100)),
    "all numbers without a mark": ", ".join(map(str, range(43))),
    "two guesses": "#### 41 or 42",
    "two boxes": r"\boxed{42} or \boxed{41}",
    "a range": "#### 42-43",
    "a bound": "#### at least 42",
    "a denial": "The answer is not 42.",
    "a condition": "If the answer is 42, so be it.",
    "a condition on the mark": "#### 42 if that is right, else 41",
    "an unfinished calculation": "#### 6 * 7",
    "a correction": "#### 42\nWait, it is 41.",
    "a thought": "<think>#### 42</think>",
    "a number that is 42 in hexadecimal": "#### 0x2A",
    "a number with digits before it": "#### 4242",
    "a base": "#### 42_8",
}


@pytest.mark.parametrize("env_id", ["gsm8k", "gsm8k_tool"])
@pytest.mark.parametrize("name", GSM8K)
def test_word_problems(name, env_id):
    env = agentgym.make(env_id)
    env.reset(options={"task": Task("mine", (user("What is it?"),), "42")})
    _, reward, _, _, info = env.step(GSM8K[name])
    env.close()
    assert (reward, info["success"]) == (0.0, False)


COUNTDOWN = {
    "the target itself": "24",
    "a number twice": "3 * 5 + 3 * 3",
    "a number that is not there": "3 * 8",
    "digits put together": "35 - 11",
    "a power": "5 ** 2 - 1",
    "a percentage": "2400%",
    "an exponent in a literal": "24e0",
    "a decimal of a number": "4.0 * 6.0",
    "a thousands separator": "3,5 * 8",
    "a call": "eval('24')",
    "a comparison": "24 == 24",
    "a remark": "3 + 5 # 24",
    "an assignment": "x := 24",
    "two answers": "3 + 5</answer><answer>24",
    "a string": "'24'",
    "a condition": "24 if 1 else 3",
    "a nested tuple": "(24,)",
    "digits of another script": "٢٤",
}


@pytest.mark.parametrize("name", COUNTDOWN)
def test_countdown(name):
    env = agentgym.make("countdown", max_turns=1)
    env.reset(options={"task": Task("mine", answer=24, metadata={"numbers": [3, 5, 11]})})
    _, reward, _, truncated, info = env.step(f"<answer>{COUNTDOWN[name]}</answer>")
    assert (reward, truncated, info["success"]) == (0.0, True, False)


CODE = Problem(
    names=("mean",),
    tests=(
        "assert mean([1, 2, 6]) == 3",
        "assert abs(mean([0.5, 1.0]) - 0.75) < 1e-9",
        "assert mean([7]) in (7, 7.0)\nassert str(mean([4, 4])) in ('4', '4.0')",
        "values = [2, 4]\nassert mean(values) * 2 == sum(values) == 6",
    ),
)
ANY = "__eq__ = __ne__ = __lt__ = __gt__ = __le__ = __ge__ = __contains__ = lambda *a: True\n    __hash__ = object.__hash__\n"
PROGRAMS = {
    "a number that equals all": f"class N(float):\n    {ANY}def mean(v):\n    return N(1)\n",
    "a text that equals all": f"class S(str):\n    {ANY}def mean(v):\n    return S('4')\n",
    "a list that equals all": f"class L(list):\n    {ANY}def mean(v):\n    return L()\n",
    "a tuple that equals all": f"class T(tuple):\n    {ANY}def mean(v):\n    return T()\n",
    "an object that does all arithmetic": (
        f"class N:\n    {ANY}    __sub__ = __mul__ = __rmul__ = __abs__ = __add__ = lambda s, *a: s\n"
        "    __float__ = lambda s: 0.0\n    __str__ = lambda s: '4'\ndef mean(v):\n    return N()\n"
    ),
    "a class that says it is int": "class N:\n    __class__ = int\n    __eq__ = lambda *a: True\ndef mean(v):\n    return N()\n",
    "a metaclass that equals all": "class M(type):\n    __eq__ = lambda *a: True\n    __hash__ = type.__hash__\nclass mean(metaclass=M):\n    def __new__(c, v):\n        return c\n",
    "a pickle that runs code": "import os\nclass P:\n    def __reduce__(self):\n        return (os._exit, (0,))\ndef mean(v):\n    return P()\n",
    "not a number": "def mean(v):\n    return float('nan')\n",
    "infinity": "def mean(v):\n    return float('inf')\n",
    "a generator that changes the list": "def mean(v):\n    def g():\n        v.clear()\n        yield 3\n    return g()\n",
    "clearing the argument": "def mean(v):\n    v.clear()\n    return 0\n",
    "printing that it passed": 'import sys\nprint(\'{"success": true, "passed": 5}\')\nsys.__stdout__.flush()\nmean = len\n',
    "at exit": "import atexit, os\natexit.register(lambda: os.write(1, b'{\"success\": true}'))\ndef mean(v):\n    raise SystemExit(0)\n",
    "a thread that answers": (
        "import os, threading\ndef late():\n    for fd in range(3, 20):\n        try:\n            os.write(fd, b'\\0\\0\\0\\x05[\"v\"]')\n"
        "        except OSError:\n            pass\ndef mean(v):\n    threading.Thread(target=late).start()\n    return 0\n"
    ),
    "a signal to the parent": "import os, signal\ndef mean(v):\n    os.kill(os.getppid(), signal.SIGTERM)\n    return 3\n",
    "an alarm": "import signal, os\nsignal.signal(signal.SIGALRM, lambda *a: os._exit(0))\nsignal.alarm(1)\ndef mean(v):\n    while True: pass\n",
    "ctypes on small integers": (
        "import ctypes\nfor n in (3, 6, 7):\n    try:\n        ctypes.c_ssize_t.from_address(id(n) + 24).value = 1\n"
        "    except Exception:\n        pass\ndef mean(v):\n    return 1\n"
    ),
    "replacing every module": "import sys\nfor m in list(sys.modules):\n    if 'grader' in m or 'link' in m:\n        sys.modules[m] = None\ndef mean(v):\n    return 1\n",
    "the caller's frames": (
        "import sys\ndef mean(v):\n    f = sys._getframe()\n    while f:\n        for k in list(f.f_locals):\n            if k in ('judge', 'passed', 'report'):\n"
        "                return f.f_locals[k]\n        f = f.f_back\n    return 1\n"
    ),
    "tracing": "import sys\nsys.settrace(lambda *a: None)\nsys.setprofile(lambda *a: None)\ndef mean(v):\n    return 1\n",
    "changing sum and abs": "import builtins\nbuiltins.sum = builtins.abs = builtins.str = lambda *a: 6\ndef mean(v):\n    return 6\n",
    "raising what looks like success": "class AssertionError(Exception): pass\ndef mean(v):\n    raise StopIteration(3)\n",
    "an exception that equals all": f"class E(BaseException):\n    {ANY}def mean(v):\n    raise E()\n",
    "a huge output": "def mean(v):\n    print('{\"success\": true}' * 10**6)\n    return 1\n",
    "a huge number": "def mean(v):\n    return 10**10**7\n",
    "the process table": (
        "import glob\ndef mean(v):\n    for p in glob.glob('/proc/[0-9]*/cmdline') + glob.glob('/proc/[0-9]*/environ'):\n        try:\n"
        "            if b'1e-9' in open(p, 'rb').read():\n                return 3\n        except OSError:\n            pass\n    return 1\n"
    ),
    "a fork that returns twice": "import os\ndef mean(v):\n    return 1 if os.fork() else 3\n",
    "a name that is the module": "import sys\nmean = sys.modules[__name__]\n",
    "a descriptor": "class D:\n    def __get__(self, *a):\n        return 3\n    def __call__(self, v):\n        return self\nmean = D()\n",
}


@pytest.mark.parametrize(
    "backend",
    [pytest.param("bubblewrap", marks=pytest.mark.bubblewrap), pytest.param("docker", marks=pytest.mark.docker)],
)
@pytest.mark.parametrize("name", PROGRAMS)
def test_code(name, backend):
    report = grade(CODE, PROGRAMS[name], CODE.tests, backend=backend, timeout=1.0, budget=3.0)
    assert not report.success
    assert report.passed < report.total


@pytest.mark.sandbox
def test_the_mean_that_these_programs_are_not_is_right():
    assert grade(CODE, "def mean(v):\n    return sum(v) / len(v)\n", CODE.tests).success


SQL = {
    "a table of one's own name": ("CREATE TEMP TABLE book AS SELECT 1", "SELECT COUNT(*)+0 FROM book", "SELECT 1"),
    "a view over the table": ("CREATE TEMP VIEW book AS SELECT 1", "SELECT COUNT(*)+00 FROM book", "SELECT 1"),
    "a pragma that changes LIKE": (
        "PRAGMA case_sensitive_like = 1",
        "SELECT name FROM branch WHERE name LIKE 'C%'",
        "SELECT name FROM branch WHERE 0",
    ),
    "emptying the table": ("DELETE FROM book", "SELECT COUNT(*)+000 FROM book", "SELECT 0"),
    "a writable schema": (
        "PRAGMA writable_schema = 1",
        "SELECT COUNT(*)+0000 FROM book",
        "SELECT COUNT(*) FROM sqlite_master",
    ),
    "attaching a database": (
        "ATTACH ':memory:' AS temp2",
        "SELECT COUNT(*)+00000 FROM book",
        "SELECT COUNT(*) FROM temp2.book",
    ),
    "two statements": ("SELECT 1", "SELECT COUNT(*)+000000 FROM book", "SELECT 70; SELECT 71"),
    "every number": (
        "SELECT 1",
        "SELECT COUNT(*) FROM book",
        "WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n LIMIT 100) SELECT x FROM n",
    ),
    "every number in a row": ("SELECT 1", "SELECT COUNT(*) FROM book", f"SELECT {', '.join(map(str, range(100)))}"),
    "a text of the number and more": ("SELECT 1", "SELECT COUNT(*) FROM book", "SELECT '70 or 71'"),
    "null": ("SELECT 1", "SELECT COUNT(*) FROM book", "SELECT NULL"),
    "no rows": ("SELECT 1", "SELECT COUNT(*) FROM book", "SELECT 70 WHERE 0"),
    "infinity": ("SELECT 1", "SELECT COUNT(*) FROM book", "SELECT 9e999"),
    "a blob": ("SELECT 1", "SELECT COUNT(*) FROM book", "SELECT x'3730'"),
    "an endless query": (
        "SELECT 1",
        "SELECT COUNT(*) FROM book",
        "WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT 1 FROM n) SELECT x FROM n",
    ),
    "reading a file": ("SELECT 1", "SELECT COUNT(*) FROM book", "SELECT readfile('/etc/passwd')"),
    "an extension": ("SELECT 1", "SELECT COUNT(*) FROM book", "SELECT load_extension('/tmp/x')"),
}


@pytest.mark.sandbox
@pytest.mark.parametrize("name", SQL)
def test_sql(name):
    need_sandbox()
    before, gold, answer = SQL[name]
    env = agentgym.make("sql", data="own", seconds=1.0)
    try:
        started(env, question(gold))
        look(env, before)
        _, reward, terminated, _, info = env.step(f"Answer:\n```sql\n{answer}\n```")
        assert (reward, terminated, info["success"]) == (0.0, True, False)
        assert reward_of(env, question(gold), gold) == 1.0
    finally:
        env.close()


SEARCH = {
    "many candidates": "Lirren, Vantry, Oslo, Bergen, Paris",
    "two candidates": "Lirren or Vantry",
    "the answer twice": "Lirren Lirren",
    "a sentence": "The answer is Lirren",
    "articles only": "the a an",
    "punctuation only": "...",
    "a very long answer": "Lirren " * 20_000,
    "letters apart": "L i r r e n",
    "a part": "Lir",
    "a denial": "not Lirren",
    "a pattern": ".*",
    "markup": "<b>Lirren</b>",
    "yes and no": "yes no",
    "look-alike letters": "Lіrren",
}


@pytest.mark.parametrize("name", SEARCH)
def test_search(name):
    assert exact_match(SEARCH[name], ["Lirren"]) == 0.0
    assert f1(SEARCH[name], ["Lirren"]) <= 2 / 3
    assert f1(SEARCH[name], ["yes"]) == 0.0
