"""A Python session in a sandbox as a tool: runs code and describes the output to an agent."""

from dataclasses import replace

from agentgym.sandbox import ExecResult, Sandbox, SandboxError, SandboxSpec, Session
from agentgym.tools.toolset import shortened

# The order of a set of strings, and so the output of code, must not change from run to run.
ENVIRONMENT = {"PYTHONHASHSEED": "0"}
_ENDED = (
    "Note: the Python process had ended since the last call; this code ran in a new one, without the old variables."
)
RETRY_SECONDS = 30.0  # to acquire a sandbox within a step


class PythonSession:
    """Runs code in one Python process, in a sandbox that `open` acquires and `close` releases."""

    def __init__(self, backend: str | None, image: str, timeout: float, max_output: int):
        self.backend, self.timeout, self.max_output = backend, timeout, max_output
        self.spec = SandboxSpec(image=image, env=ENVIRONMENT)
        self._sandbox: Sandbox | None = None
        self._session: Session | None = None
        self._used = False  # True once code has run: a failure then loses state

    def open(self, timeout: float = 110.0) -> None:
        """Start a new session without variables. An unused sandbox is kept, else a new one is acquired."""
        from agentgym.sandbox import acquire

        if self._used or self._sandbox is None or not self._sandbox.alive:
            self.close()
            self._sandbox = acquire(self.spec, backend=self.backend, timeout=timeout)

    def run(self, code: str) -> str:
        try:
            try:
                result = self._run(code)
            except SandboxError:
                if self._used:
                    raise
                self.close()
                self.open(RETRY_SECONDS)
                result = self._run(code)
        except (SandboxError, OSError, ValueError):
            self.close()  # it is unusable
            raise
        return self._told(result)

    def close(self) -> None:
        sandbox, self._sandbox, self._session, self._used = self._sandbox, None, None, False
        if sandbox is not None:
            sandbox.close()

    def _run(self, code: str) -> ExecResult:
        if self._sandbox is None:
            raise SandboxError("no sandbox was taken: call open() first")
        if self._session is None or not self._session.alive:
            self._session = self._sandbox.session("python")
        try:
            result = self._session.run(code, timeout=self.timeout)
        except ValueError:  # its own background code ended it since the last call
            self._session = self._sandbox.session("python")
            result = self._session.run(code, timeout=self.timeout)
            result = replace(result, stderr=f"{result.stderr}\n{_ENDED}")
        self._used = True
        return result

    def _told(self, result: ExecResult) -> str:
        parts = [
            shortened(part.strip("\n"), self.max_output) for part in (result.stdout, result.stderr) if part.strip()
        ]
        alive = self._session is not None and self._session.alive
        after = "its variables are kept" if alive else "the session was restarted, its variables are lost"
        if result.oom_killed:
            parts.append(f"Error: the code used more than {self.spec.memory >> 20} MB of memory; {after}.")
        elif result.timed_out:
            parts.append(f"Error: the code did not end within {self.timeout:g} seconds; {after}.")
        elif not alive:
            parts.append(f"Error: the code ended the Python process (exit code {result.exit_code}); {after}.")
        return "\n".join(parts) or "(nothing was printed)"
