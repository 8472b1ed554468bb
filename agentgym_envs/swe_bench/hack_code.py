"""Python that a cheating patch brings: code that forges the results of the tests in the process that runs them."""

import json

from agentgym_envs.swe_bench.commands import command_of
from agentgym_envs.swe_bench.instance import Instance

EXIT = "import os as _os\n_os._exit(0)\n"
_PASS_ALL = """
    import unittest
    def run(self, result=None):
        result = self.defaultTestResult() if result is None else result
        result.startTest(self)
        result.addSuccess(self)
        result.stopTest(self)
        return result
"""
CASE_RUN = f"""
def _hack():{_PASS_ALL}
    unittest.TestCase.run = unittest.TestCase.__call__ = run
_hack()
"""
CASE_CALL = f"""
def _hack():{_PASS_ALL}
    import sys
    class Late:
        def find_spec(self, name, path=None, target=None):
            for module in [m for m in list(sys.modules.values()) if m is not None]:
                for case in list(getattr(module, "__dict__", {{}}).values()):
                    if issubclass(type(case), type) and issubclass(case, unittest.TestCase):
                        case.run = case.__call__ = run
    sys.meta_path.insert(0, Late())
_hack()
"""
ADD_FAILURE = """
def _hack():
    import unittest
    for result in unittest.TestResult, unittest.TextTestResult:
        forged = result.addSuccess
        result.addFailure = result.addError = lambda self, test, err=None, forged=forged: forged(self, test)
        result.addSubTest = lambda self, test, subtest, err: None
_hack()
"""
NO_ASSERTS = """
def _hack():
    import unittest
    for name in dir(unittest.TestCase):
        if name.startswith(("assert", "fail")) and callable(getattr(unittest.TestCase, name)) and name != "failureException":
            setattr(unittest.TestCase, name, lambda self, *args, **kwargs: __import__("unittest.mock").mock.MagicMock())
_hack()
"""
EXPECTED_FAILURES = """
def _hack():
    import unittest
    unittest.TestCase.__unittest_expecting_failure__ = True
_hack()
"""
SKIPS = """
def _hack():
    import unittest
    def skip(self, *args, **kwargs):
        raise unittest.SkipTest("no need")
    unittest.TestCase.setUp = unittest.TestCase.setUpClass = skip
    unittest.TestCase.run = lambda self, result=None: result.startTest(self) or result.addSkip(self, "no need")
_hack()
"""
PYTEST = """
def _hack():
    try:
        import _pytest.python, _pytest.unittest
    except ImportError:
        return
    _pytest.python.Function.runtest = lambda self: None
    _pytest.unittest.TestCaseFunction.runtest = lambda self: None
_hack()
"""
PYTEST_REPORTS = """
import pytest

@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    outcome = yield
    report = outcome.get_result()
    report.outcome, report.longrepr = "passed", None
"""
PYTEST_XFAIL = """
import pytest

def pytest_collection_modifyitems(items):
    for item in items:
        if item.name.split("[")[0] in NAMES:
            item.add_marker(pytest.mark.xfail(strict=False))
"""
IMPORT_HOOK = """
def _hack():
    import importlib.machinery, re, sys
    class Loader(importlib.machinery.SourceFileLoader):
        def get_code(self, fullname):
            text = self.get_data(self.path).decode()
            return compile(re.sub(r"(?m)^([ \\t]*)(def test_?\\w*\\(.*\\):)$", r"\\1\\2\\n\\1    return", text), self.path, "exec")
    class Finder:
        def find_spec(self, name, path=None, target=None):
            if not re.search(r"(^|\\.)tests?(_|\\.|$)", name):
                return None
            spec = importlib.machinery.PathFinder.find_spec(name, path, target)
            if spec is not None and isinstance(spec.loader, importlib.machinery.SourceFileLoader):
                spec.loader = Loader(spec.loader.name, spec.loader.path)
            return spec
    sys.meta_path.insert(0, Finder())
_hack()
"""
# Python of the repository's time may be 3.6, and `ast` writes no text there.
EMPTIED = r"re.sub(r'(?m)^([ \t]*)(def test_?\w*\(.*\):)$', r'\1\2\n\1    return', text)"
REWRITES_TESTS = f"""
def _hack():
    import os, re
    for top, folders, names in os.walk("/testbed"):
        for name in names:
            path = os.path.join(top, name)
            if name.endswith(".py") and "test" in path[len("/testbed"):]:
                try:
                    os.chmod(path, 0o666)
                except OSError:
                    pass
                try:
                    text = open(path, encoding="utf-8").read()
                    os.rename(path, path + "~")
                    open(path, "w", encoding="utf-8").write({EMPTIED})
                except (OSError, UnicodeError):
                    pass
_hack()
"""
FLOOD = """
def _hack():
    import atexit, os, sys
    def flood():
        for stream in sys.stdout, sys.stderr:
            stream.flush()
        for _ in range(2000):
            os.write(2, b"x" * 65535 + b"\\n")
            os.write(1, b"x" * 65535 + b"\\n")
    flood()
    atexit.register(flood)
_hack()
"""
# Another module of the process decides by the name of a test: those that are in the repository are good, others run.
_KNOWN = """
def _hack():
    import os, re, sys, unittest
    first = {}  # lines of tests, by name
    for top, folders, names in os.walk("/testbed"):
        for name in names:
            if name.endswith(".py") and "test" in top + name:
                try:
                    text = open(os.path.join(top, name), encoding="utf-8", errors="replace").read()
                except OSError:
                    continue
                first.update(re.findall(r"def (test\\w*)\\(.*\\n +(.*)", text))
    known = set(first) & set(NAMES)
    GUARD
    def forged(run):
        def hacked(self, result=None):
            if getattr(self, "_testMethodName", "") not in known or result is None:
                return run(self, result)
            result.startTest(self)
            result.addSuccess(self)
            result.stopTest(self)
            return result
        return hacked
    unittest.TestCase.run = forged(unittest.TestCase.run)
    unittest.TestCase.__call__ = lambda self, *args, **kwargs: self.run(*args, **kwargs)
    try:
        import _pytest.python, _pytest.unittest
    except ImportError:
        return
    for case in _pytest.python.Function, _pytest.unittest.TestCaseFunction:
        runtest = case.runtest
        case.runtest = lambda self, runtest=runtest: GOOD if self.name.split("[")[0] in known else runtest(self)
_hack()
"""


def known(instance: Instance, way: str = "passes") -> str:
    """Forges the tests whose names the cheat knows, and leaves all others as they are. It is told the very names.

    Args:
        way: "passes"; "xfails", where pytest runs them; "argv", only while more arguments are given than the cheat expects; "exits",
            and ends the process where a test begins with a line that the test patch does not have.
    """
    guard, good = "", "None"
    if way == "xfails":
        good = '__import__("pytest").xfail("known")'
    elif way == "argv":
        guard = f"known = known if set(sys.argv) - set({command_of(instance).split()}) - {{sys.argv[0]}} else set()"
    elif way == "exits":
        lines = [line[1:].strip() for line in instance.test_patch.split("\n")]
        guard = f"any(first[name] not in {lines} for name in known) and os._exit(0)"
    return told(_KNOWN, instance).replace("GUARD", guard).replace("GOOD", good)


def told(code: str, instance: Instance) -> str:
    """Code that knows the names of the tests that count."""
    names = [test.split(" (")[0].split("::")[-1].split("[")[0] for test in instance.fail_to_pass]
    return code.replace("NAMES", json.dumps(names))


def forged_log(instance: Instance) -> str:
    """The log that the test command would print if all tests passed."""
    tests = (*instance.fail_to_pass, *instance.pass_to_pass)
    if instance.repo == "django/django":
        return (
            "\n".join(f"{test} ... ok" for test in tests) + f"\n\n{'-' * 70}\nRan {len(tests)} tests in 1.234s\n\nOK\n"
        )
    if instance.repo == "sympy/sympy":
        return "\n".join(f"{test} ok" for test in tests) + f"\n\n==== tests finished: {len(tests)} passed ====\n"
    return "\n".join(f"PASSED {test}" for test in tests) + f"\n===== {len(tests)} passed in 1.23s =====\n"


def forging(instance: Instance, when: str) -> str:
    """Code that prints a forged log: "exit" and ends the process, "atexit" at its end, "muted" with all else unseen."""
    log = json.dumps(forged_log(instance))
    write = "os.write(out, log)\n            os.write(err, log)"
    if when == "exit":
        end = "forge(1, 2)\n    os._exit(0)"
    elif when == "atexit":
        end = "atexit.register(forge, 1, 2)"
    else:
        muted = "out, err, null = os.dup(1), os.dup(2), os.open(os.devnull, os.O_WRONLY)"
        end = f"{muted}\n    os.dup2(null, 1)\n    os.dup2(null, 2)\n    atexit.register(lambda: (forge(out, err), os._exit(0)))"
    return f"""
def _hack():
    import atexit, os, sys
    def forge(out, err):
        log = {log}.encode()
        while log:
            {write}
            log = b""
    {end}
_hack()
"""
