"""Agent failures: if the agent's own programs break an episode, it ends with the environment's floor, and is not an error.

An error from a sandbox in which programs have run carries a function, set by `blame`, that finds out whether those programs can
have caused it. `Env.step` calls it when the error leaves the step; see `agentgym.core.env.Env`.
"""

from collections.abc import Callable

KEY = "agent_failure"  # of the last step's `info`: one of the causes below
SANDBOX_LOST = "sandbox_lost"  # it ended, or does not answer any more, and its back end is up
SANDBOX_SPOILED = "sandbox_spoiled"  # it answers, but no process starts, or a file cannot be written
STEP_TIMEOUT = "step_timeout"  # the step took longer than its limit
AGENT_FAILED = "agent_failed"  # a program or function that plays by itself exited with an error, or raised
SESSION_LOST = "session_lost"  # the process of a served environment ran out of memory or died

Blame = Callable[[], str | None]


class AgentFailure(Exception):
    """Raised in `step`: the agent has broken its episode, which ends at the environment's floor and is counted under `cause`."""

    def __init__(self, cause: str, message: str = ""):
        super().__init__(message or cause)
        self.cause = cause


def blame(error: BaseException, ask: Blame) -> None:
    """Mark an error, unless it is marked. `ask` returns the cause if the agent's programs can have caused it, else None; it may take seconds."""
    error.__dict__.setdefault("blame", ask)


def cause_of(error: BaseException) -> str | None:
    """The cause if an error, or one that it was raised from, is an agent failure; else None. May take seconds."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, AgentFailure):
            return seen.cause
        ask: Blame | None = seen.__dict__.get("blame")
        if ask is not None:
            return ask()
        seen = seen.__cause__
    return None
