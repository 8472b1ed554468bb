"""An instance: an issue, its repository, the gold patch and the tests that tell if it is resolved."""

from collections.abc import Mapping
from dataclasses import dataclass, field


class InstanceError(ValueError):
    """A record that is no instance; says where it stands, which field is wrong, and what to do."""


@dataclass(frozen=True)
class Instance:
    """One issue to resolve. Patches are git diffs with names from the repository's root.

    Args:
        id: unique in its data set: "django__django-10914".
        repo: "django/django"; chooses log parser and test command.
        base_commit: the commit that the agent starts from.
        version: of the repository, for the test command; "" if unknown.
        problem_statement: the issue's text.
        patch: the gold patch; "" if it is not published, or if `bug_patch` is to be applied in reverse.
        test_patch: brings the tests that tell; "" if the image has them.
        fail_to_pass: tests that the gold patch makes pass.
        pass_to_pass: tests that pass before and after it.
        image: published name of the image with the repository; None if there is none.
        test_command: shell command that runs the tests; None: `commands.command_of` knows it by repository.
        build_command: shell command that builds the patched repository before `test_command`; "" if there is none.
        log_parser: SWE-bench's name of the parser, for a repository that `logs.py` lacks; "" if unknown.
        eval_type: "fail_only" if the log names failed tests alone; "" if unknown.
        sdist: source release that the repository can be rebuilt from ("Django==3.0a1"); None if unknown.
        bug_patch: patch that puts the bug into the repository of the published image; "" if it is there.
        expected: the status that each test must have, in place of the two lists (R2E-Gym); None: the lists say it.
    """

    id: str
    repo: str
    base_commit: str
    problem_statement: str
    version: str = ""
    patch: str = ""
    test_patch: str = ""
    fail_to_pass: tuple[str, ...] = ()
    pass_to_pass: tuple[str, ...] = ()
    image: str | None = None
    test_command: str | None = None
    sdist: str | None = None
    bug_patch: str = ""
    expected: Mapping[str, str] | None = field(default=None, hash=False)
    build_command: str = ""
    log_parser: str = ""
    eval_type: str = ""
