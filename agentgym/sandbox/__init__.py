"""Sandboxes run programs that a model wrote. `api` has the contract; `acquire` returns a sandbox."""

from agentgym.sandbox.api import PRIVATE as PRIVATE
from agentgym.sandbox.api import WORKSPACE as WORKSPACE
from agentgym.sandbox.api import BackendDown as BackendDown
from agentgym.sandbox.api import Command as Command
from agentgym.sandbox.api import ExecResult as ExecResult
from agentgym.sandbox.api import Sandbox as Sandbox
from agentgym.sandbox.api import SandboxError as SandboxError
from agentgym.sandbox.api import SandboxSpec as SandboxSpec
from agentgym.sandbox.api import SandboxSpoiled as SandboxSpoiled
from agentgym.sandbox.api import Session as Session
from agentgym.sandbox.backends.select import acquire as acquire
from agentgym.sandbox.backends.select import choose as choose
from agentgym.sandbox.backends.select import describe as describe
from agentgym.sandbox.backends.select import prepare as prepare
