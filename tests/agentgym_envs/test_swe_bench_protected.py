"""swe_bench: which changes of a patch are left out, since they belong to what judges it."""

import pytest
from swe_bench_cases import MODIFIED, instance

from agentgym_envs.swe_bench.patches import parse_patch
from agentgym_envs.swe_bench.protected import dropped, is_protected

PATH = "src/one.py"


def modified(path):
    return MODIFIED.replace(PATH, path)


def new(path):
    return f"diff --git a/{path} b/{path}\nnew file mode 100644\n--- /dev/null\n+++ b/{path}\n@@ -0,0 +1 @@\n+x = 1\n"


@pytest.mark.parametrize(
    "path",
    [
        *("tests/runtests.py", "tests/admin/models.py", "sympy/core/tests/x.txt", "django/test/runner.py"),
        *("pkg/test_one.py", "pkg/one_test.py", "conftest.py", "a/conftest.py", "pytest.ini", "tox.ini", "setup.cfg"),
        *("pyproject.toml", "sitecustomize.py", "src/usercustomize.py", "evil.pth", "bin/test", ".gitattributes"),
        *("x.egg-info/entry_points.txt", "x-1.dist-info/entry_points.txt", "Tests/a.py", "testing/x.py", "tests"),
        *("src/a.test.js", "src/a.spec.tsx", "src/A.tests.mjs", "pkg/__tests__/a.ts", "a/__snapshots__/a.snap"),
        *("jest.config.js", "pkg/vitest.config.mts", "karma.conf.cjs", ".mocharc", ".mocharc.yml", "jasmine.json"),
        *("packages/a/package.json", "jest.setup.js", "node_modules/jest/index.js", "spec/unit/a.js", "spec/a.rb"),
        *("binding/form_test.go", "src/test/java/AImpl.java", "core/GsonTest.java", "src/ATests.kt", "ParserTest.php"),
        *("lib/a_spec.rb", "lib/a_test.rb", ".rspec", "phpunit.xml.dist", "src/parse_test.rs"),
    ],
)
def test_what_judges_is_protected(path):
    assert is_protected(path)
    assert dropped(instance(), parse_patch(modified(path))) == (path,)


@pytest.mark.parametrize(
    "path",
    [
        *("django/db/models.py", "setup.py", "docs/testing.txt", "pkg/latest.py", "contest.py"),
        *("src/latest.js", "src/Latest.java", "spec/models.py", "specs/a.md", "src/test.js", "pkg/testing.go"),
        *("karma.js", "config.js", "Gruntfile.js", "go.mod", "Cargo.toml", "pom.xml", "jest/config.ts"),
    ],
)
def test_the_rest_is_the_patch_s_own(path):
    assert not is_protected(path)
    assert dropped(instance(), parse_patch(modified(path))) == ()


def test_what_the_gold_patch_changes_may_be_changed():
    gold = instance(patch=modified("setup.cfg"))
    assert dropped(gold, parse_patch(modified("setup.cfg") + modified("tox.ini"))) == ("tox.ini",)


def test_the_files_of_the_test_patch_never():
    both = instance(patch=modified("a/data.txt"), test_patch=modified("a/data.txt"))
    assert dropped(both, parse_patch(modified("a/data.txt"))) == ("a/data.txt",)


@pytest.mark.parametrize("path", ["json.py", "unittest/case.py", "src/re.py", "pytest.py", "lib/pluggy/__init__.py"])
def test_a_new_module_may_not_take_the_place_of_an_installed_one(path):
    assert dropped(instance(), parse_patch(new(path)), ["pytest", "pluggy"], ["flask"]) == (path,)


def test_in_another_language_it_may():
    javascript = instance(repo="vuejs/core")
    assert dropped(javascript, parse_patch(new("src/types.ts") + new("json/index.js")), [], []) == ()


def test_one_of_the_repository_s_own_may():
    own = new("src/_pytest/more.py") + new("pytest/more.py") + new("flask/json.py") + new("fresh.py")
    assert dropped(instance(), parse_patch(own), ["_pytest", "pytest", "flask"], ["_pytest", "pytest", "flask"]) == ()
    assert dropped(instance(), parse_patch(modified("types.py")), [], ["types"]) == ()
    assert dropped(instance(), parse_patch(new("src") + new("lib")), ["pytest"], []) == ()
