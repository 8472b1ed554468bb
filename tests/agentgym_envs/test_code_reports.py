"""What a grading tells, what tests may do with a submission, and what happens when a sandbox fails under it."""

from __future__ import annotations

import contextlib
import json
import math
import subprocess
import sys
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

import agentgym
from agentgym import sandbox as sandboxes
from agentgym.sandbox import SandboxError, choose
from agentgym_envs.code import grading
from agentgym_envs.code.grading import LONGEST_CODE, grade
from agentgym_envs.code.inside import values
from agentgym_envs.code.problems import Problem

pytestmark = pytest.mark.sandbox

PROMPT = 'def square(x: int) -> int:\n    """ The square of x. """\n'
CHECK = (
    "def check(candidate):\n    assert candidate(3) == 9\n    assert candidate(0) == 0\n    assert candidate(-1) == 1\n"
)
SQUARE = Problem(("square",), ("check(square)",), ("assert square(3) == 9",), PROMPT, f"{PROMPT}\n{CHECK}")
RIGHT = "    return x * x\n"
NODE = """
class Node:
    def __init__(self, value, next=None):
        self.value, self.next = value, next

def values(node):
    while node:
        yield node.value
        node = node.next
"""


def graded(name, code, *tests, **more):
    return grade(Problem((name,), tests), code, tests, **more)


class TestReport:
    def test_a_failed_assertion_is_told_with_what_was_there_instead(self):
        report = grade(SQUARE, "    return x + 6\n", SQUARE.public)
        assert (report.verdict, report.passed, report.total) == ("passed", 1, 1)
        report = grade(SQUARE, "    return [x] * 3\n", SQUARE.public)
        assert report.failures == [{"test": "assert square(3) == 9", "what": "got [3, 3, 3]"}]
        assert (report.verdict, report.passed, report.total) == ("wrong", 0, 1)

    def test_an_error_is_told_with_the_lines_that_led_to_it(self):
        code = "def half(x):\n    return x / 0\n\n\ndef square(x):\n    return half(x)\n"
        what = (
            "ZeroDivisionError: division by zero\n  line 6, in square: return half(x)\n  line 2, in half: return x / 0"
        )
        assert grade(SQUARE, code, SQUARE.public).failures[0]["what"] == what
        body = "    y = x\n    return y / 0\n"
        what = "ZeroDivisionError: division by zero\n  line 2, in square: return y / 0"
        assert grade(SQUARE, body, SQUARE.public).failures[0]["what"] == what

    @pytest.mark.parametrize(
        ("code", "error"),
        [
            ("def square(x) return x", "SyntaxError: expected ':'\n  line 1: def square(x) return x"),
            ("import nowhere", "ModuleNotFoundError: No module named 'nowhere'\n  line 1: import nowhere"),
            ("raise SystemExit(3)", "SystemExit: 3\n  line 1: raise SystemExit(3)"),
            ("x" * (LONGEST_CODE + 1), f"The code is longer than {LONGEST_CODE:,} characters."),
        ],
    )
    def test_code_that_does_not_load_is_told_why(self, code, error):
        report = grade(SQUARE, code, SQUARE.public)
        assert (report.verdict, report.passed, report.total) == ("error", 0, 1)
        assert report.error == error

    @pytest.mark.parametrize("code", ["\0", "\ud800", "x = '\ud800'", "(" * 9999, "-" * 9999 + "1", "\x0c\t\x0b"])
    def test_any_text_may_be_code(self, code):
        report = grade(SQUARE, code, SQUARE.public)
        assert not report.success
        (report.error + str(report.failures)).encode()

    def test_what_the_code_prints_is_shown_up_to_a_limit(self):
        code = "import sys\nprint('one')\nsys.stderr.write('two\\n')\ndef square(x):\n    print(x)\n    return 9\n"
        assert grade(SQUARE, code, SQUARE.public).output == "one\ntwo\n3\n"
        code = "import os\nos.system('echo from the shell')\nprint('z' * 10**6)\nsquare = lambda x: 9\n"
        report = grade(SQUARE, code, SQUARE.public)
        assert report.success
        assert report.output.startswith("from the shell\nzzz")
        assert len(report.output) < 5000

    def test_the_worst_of_outputs_does_not_break_the_report(self):
        code = (
            "import os\nfor _ in range(3000):\n    os.write(1, b'\\xff\\x00\\x1b')\n"
            "def square(x):\n    raise ValueError('\\x00\\ud800' * 9999)\n"
        )
        report = graded("square", code, *["assert square(1) == 1 # " + "\x7f漢" * 999] * 5)
        assert (report.verdict, report.passed, report.total) == ("wrong", 0, 5)

    def test_one_slow_or_ending_test_does_not_cost_the_others(self):
        tests = [f"assert f({n}) == {n}" for n in (1, 2, 3)]
        slow = "def f(n):\n    while n == 2: pass\n    return n\n"
        report = graded("f", slow, *tests, timeout=1.0, budget=8.0)
        assert (report.verdict, report.passed, report.total) == ("timeout", 2, 3)
        report = graded("f", "import os\ndef f(n):\n    if n == 2: os._exit(0)\n    return n\n", *tests)
        assert (report.verdict, report.passed, report.total) == ("wrong", 2, 3)

    def test_all_calls_share_a_limit(self):
        code = "import time\ndef f(n):\n    time.sleep(0.4)\n    return n\n"
        report = graded("f", code, *(f"assert f({n}) == {n}" for n in range(50)), timeout=1.5, budget=2.0)
        assert report.verdict == "timeout"
        assert report.failures  # the grader itself ended it, and told
        assert report.passed < 6

    def test_assertions_that_are_not_reached_count_as_failed(self):
        code = "import os\ndef square(x):\n    if x == 0: os._exit(0)\n    return x * x\n"
        report = grade(SQUARE, code, SQUARE.tests)
        assert (report.passed, report.total) == (1, 3)


class TestWhatTestsMayDo:
    """Tests see the submission's functions as if they were their own."""

    @pytest.mark.parametrize(
        ("code", "test"),
        [
            ("def f(x):\n    x.append(4)\n    x[0].pop()\n", "x = [[1, 2], 3]\ninner = x[0]\nf(x)\nassert (x, inner) == ([[1], 3, 4], [1])"),
            ("def f(d):\n    d['a'] = {1}\n    del d['b']\n", "d = {'b': 0}\nf(d)\nassert d == {'a': {1}}"),
            ("def f(*, d):\n    d.add(2)\n", "d = {1}\nf(d=d)\nassert d == {1, 2}"),
            ("def f(g, x):\n    return [g(g(n)) for n in x]", "assert f(lambda n: n + 1, [1, 2]) == [3, 4]"),
            ("def f(g):\n    try:\n        g()\n    except KeyError as e:\n        return e.args", "assert f(lambda: {}['k']) == ('k',)"),
            ("def f(g):\n    return g", "g = lambda: 7\nassert f(g) is g"),
            ("def f(n):\n    return lambda m: n + m", "assert f(2)(3) == 5"),
            ("def f(n):\n    while True:\n        n += 1\n        yield n", "from itertools import islice\nassert list(islice(f(0), 3)) == [1, 2, 3]"),
            ("f = [1, (2, {3: None})]", "assert f == [1, (2, {3: None})]"),
            ("class f:\n    def __init__(self, n):\n        self.n = n\n    def __len__(self):\n        return self.n\n", "x = f(3)\nx.n += 1\nassert (len(x), x.n, f(1).n) == (4, 4, 1)"),
            ("class f(dict):\n    pass\n", "x = f()\nassert x == {}"),
            ("class f:\n    def __init__(self):\n        self.d = {}\n    def __getitem__(self, k):\n        return self.d[k]\n    def __setitem__(self, k, v):\n        self.d[k] = v\n", "x = f()\nx[2] = 5\nassert x[2] == 5"),
            ("import re\nf = lambda t: re.match('a', t)", "assert f('ab')\nassert not f('b')\nassert f('ab').group() == 'a'"),
            ("from collections import Counter, defaultdict, namedtuple\ndef f():\n    return Counter('aab'), defaultdict(list, a=[1]), namedtuple('P', 'x y')(1, 2)", "assert f() == ({'a': 2, 'b': 1}, {'a': [1]}, (1, 2))"),
            ("from enum import Enum, IntEnum\nclass C(str, Enum):\n    RED = 'red'\nclass N(IntEnum):\n    TWO = 2\ndef f():\n    return C.RED, N.TWO", "assert f() == ('red', 2)"),
            ("from datetime import timedelta\nfrom decimal import Decimal\ndef f(d):\n    return d + timedelta(days=1), Decimal('0.10')", "from datetime import datetime\nfrom decimal import Decimal\nassert f(datetime(2024, 2, 28, 7)) == (datetime(2024, 2, 29, 7), Decimal('0.1'))"),
            ("def f(x):\n    raise LookupError('no', x)", "try:\n    f(1)\nexcept LookupError as e:\n    got = e.args\nassert got == ('no', 1)"),
            ("class Own(KeyError):\n    pass\ndef f(x):\n    raise Own(x)", "try:\n    f(1)\nexcept KeyError:\n    got = True\nassert got"),
            ("def f(x):\n    return type(x)", "assert f(True) is bool\nassert f(1.0) is float\nassert f(b'') is bytes"),
            ("def f(x):\n    return x", "import math\nassert math.isnan(f(math.nan))\nassert f(math.inf) == math.inf\nassert f(10**400) == 10**400\nassert f('\\ud800') == '\\ud800'"),
        ],
    )  # fmt: skip
    def test_as_in_one_process(self, code, test):
        report = graded("f", code, test)
        assert report.success, report
        exec(f"{code}\n{test}", {})  # it holds there too

    def test_objects_of_the_submission_are_made_in_the_setup_and_passed_back(self):
        setup = "root = Node(1)\nroot.next = Node(2, Node(3))"
        tests = ("assert list(values(root)) == [1, 2, 3]", "assert root.next.value == 2")
        problem = Problem(("Node", "values"), tests, setup=setup)
        assert grade(problem, NODE, tests).success
        assert grade(problem, NODE.replace("= value, next", "= next, value"), tests).passed == 0

    def test_the_setup_runs_again_for_a_new_process(self):
        tests = ("assert f(root) == 1", "f(None)", "assert f(root) == 1")
        problem = Problem(("Node", "f"), tests, setup="root = Node(1)")
        report = grade(
            problem, f"{NODE}\nimport os\ndef f(node):\n    return node.value if node else os._exit(1)\n", tests
        )
        assert (report.passed, report.total) == (2, 3)

    def test_an_object_that_is_not_plain_is_equal_to_itself_only(self):
        code = (
            "class E:\n    __eq__ = __lt__ = lambda a, b: True\n    __sub__ = __abs__ = lambda *a: 0\n    __hash__ = None\n"
            "e = E()\ndef f(x):\n    return e if x else E()\n"
        )
        assert graded("f", code, "assert f(1) == f(1)").success
        for test in ("f(0) == f(1)", "f(1) in [1, 2, 3]", "f(1) < 3", "abs(f(1) - 3) < 1", "f(1) is True", "3 == f(1)"):
            assert not graded("f", code, f"assert {test}").success

    def test_a_helper_of_the_prompt_is_the_tests_own(self):
        prompt = 'def area(r):\n    return 3 * r * r\n\ndef radius(a):\n    """ The r whose area is a. """\n'
        problem = Problem(("radius",), ("assert area(radius(12)) == 12",), prompt=prompt, setup=prompt)
        assert grade(problem, "    return (a / 3) ** 0.5\n", problem.tests).success
        assert not grade(
            problem, "def area(r):\n    return 12\n\ndef radius(a):\n    return 0\n", problem.tests
        ).success

    def test_chance_is_the_same_each_time(self):
        code = "def f(x):\n    print(x, {'a', 'b', 'c', 'd', 'e'})\n"
        outputs = [graded("f", code, "import random\nassert f(random.random()) is None").output for _ in range(2)]
        assert outputs[0] == outputs[1] != ""

    def test_assertions_that_say_nothing_are_not_counted(self):
        tests = ("assert True, 'fine'\nassert f() == 1", "f()")
        report = graded("f", "def f():\n    return 1\n", *tests)
        assert (report.verdict, report.passed, report.total) == ("passed", 2, 2)
        assert graded("f", "def f():\n    return 2\n", *tests).passed == 1


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary() | st.complex_numbers(allow_nan=False),
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.dictionaries(st.text() | st.integers(), inner)
        | st.sets(st.integers() | st.text())
        | st.frozensets(st.integers())
    ),
    max_leaves=20,
)  # fmt: skip
TAGS = [*values._SERIES, *values._PAIRS, *values._BY_MODULE, "int", "bytes", "bytearray", "type", "object"]
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: (
        st.lists(inner) | st.dictionaries(st.text(), inner) | st.tuples(st.sampled_from(TAGS), inner).map(list)
    ),
)


def refuse(data):
    raise values.Foreign(str(data))


class TestValues:
    @given(PLAIN)
    def test_plain_data_comes_back_equal_and_of_its_types(self, value):
        frame = values.frame_of(values.encode(value, refuse))
        back = values.decode(values.json.loads(frame[4:]), refuse)
        assert (back, repr(back)) == (value, repr(value)) or isinstance(value, set | frozenset) or "{" in repr(value)
        assert type(back) is type(value)

    @given(JSON)
    def test_what_is_no_value_is_refused_and_nothing_worse(self, data):
        with contextlib.suppress(values.Foreign):
            values.decode(data, refuse)

    def test_not_a_number_comes_back(self):
        assert math.isnan(
            values.decode(values.json.loads(values.frame_of(values.encode(math.nan, refuse))[4:]), refuse)
        )


class Lost:
    """A sandbox that fails in the middle of its next command: it is ended under it."""

    def __init__(self, box):
        self.box = box

    def exec(self, *args, **kwargs):
        threading.Timer(0.2, self.box.box.close).start()
        return self.box.exec(["sleep", "30"], timeout=30)

    def close(self):
        self.box.close()


class TestSandboxFailure:
    @pytest.fixture
    def losing(self, monkeypatch):
        """Make the next so many sandboxes fail when they are used; the list of all that were acquired."""
        acquire, acquired, left = sandboxes.acquire, [], [0]

        def lend(spec, backend=None, **kwargs):
            box = acquire(spec, backend=backend, **kwargs)
            acquired.append(box)
            left[0] -= 1
            return Lost(box) if left[0] >= 0 else box

        monkeypatch.setattr(sandboxes, "acquire", lend)

        def lose(count):
            left[0] = count
            return acquired

        return lose

    def test_a_step_is_repeated_on_a_fresh_sandbox(self, losing):
        acquired = losing(1)
        assert grade(SQUARE, RIGHT, SQUARE.tests).success
        assert len(acquired) == 2

    def test_two_failures_in_a_row_pass(self, losing):
        acquired = losing(2)
        with pytest.raises(SandboxError):
            grade(SQUARE, RIGHT, SQUARE.tests)
        assert len(acquired) == 2

    def test_two_in_a_row_are_the_codes_doing_where_the_back_end_is_up(self, losing):
        env = agentgym.make("code_humaneval", data="own")
        env.reset(seed=0)
        losing(2)
        _, reward, terminated, _, info = env.step(env.unwrapped.expert_action())
        assert (reward, terminated, info) == (0.0, True, {"success": False, "agent_failure": "sandbox_lost"})
        env.reset(seed=0)
        assert env.step(env.unwrapped.expert_action())[1] == 1.0

    def test_a_submission_that_ends_its_grading_is_tried_twice_and_fails(self, losing):
        acquired = losing(0)
        report = grade(SQUARE, "import os\nos.kill(-1, 9)\n", SQUARE.tests)
        assert (report.verdict, report.passed, report.total) == ("ended", 0, 1)
        assert len(acquired) == 2

    def test_an_episode_ends_with_an_error_and_no_reward_where_there_is_no_sandbox(self, monkeypatch):
        env = agentgym.make("code_humaneval", data="own")
        env.reset(seed=0)

        def none(*args, **kwargs):
            raise SandboxError("no sandbox within 30 s")

        monkeypatch.setattr(sandboxes, "acquire", none)
        with pytest.raises(SandboxError, match="within 30 s"):
            env.step(env.unwrapped.expert_action())
        monkeypatch.undo()
        env.reset(seed=0)
        assert env.step(env.unwrapped.expert_action())[1] == 1.0

    def test_a_sandbox_that_cannot_run_the_grader_is_an_error(self, monkeypatch):
        monkeypatch.setattr(grading, "grader_program", lambda: f"raise SystemExit({values.NOT_STARTED})")
        with pytest.raises(SandboxError, match="cannot run the grader"):
            grade(SQUARE, RIGHT, SQUARE.tests)

    def test_the_grader_does_not_run_outside_a_sandbox(self):
        """A fork bomb that it held would outlive it there: nothing ends the processes of a whole machine."""
        ended = subprocess.run(
            [sys.executable, "-s", "-S", "-c", grading.grader_program(), "1000000000"],
            input=json.dumps({"code": "import os\nos.abort()"}),
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
        )
        assert (ended.returncode, ended.stdout) == (values.NOT_STARTED, "")
        assert "the grader runs in a sandbox only" in ended.stderr

    def test_an_unknown_back_end_is_refused(self):
        with pytest.raises(ValueError, match="podman"):
            grade(SQUARE, RIGHT, SQUARE.tests, backend="podman")
        assert choose().name in ("docker", "bubblewrap")
