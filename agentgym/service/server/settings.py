"""How a server is started."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agentgym.core.registration import EnvSpec
from agentgym.hosts import LOCAL_HOSTS
from agentgym.service.protocol.frames import ServiceLimits
from agentgym.service.server.bounds import Bounds
from agentgym.service.server.tokens import Token


@dataclass(frozen=True)
class ServeSettings:
    """How environments are served.

    Attributes:
        envs: by the id that clients ask for; the first is OpenEnv's at the root.
        port: 0 takes a free one.
        max_sessions_per_token: None: no limit.
        workers: processes that are forked in advance.
        sessions_per_worker: how many sessions may share a process, if their environment runs no programs in sandboxes.
        tokens: by name; a plain text has all scopes. Only an address of this machine may go without.
        token_file: is read again when it changes.
        allowed_hosts: names besides this machine's own that a `Host` header may have if no token is asked for.
        bounds: of a session's process; of a shared one, times `sessions_per_worker`.
        drain_seconds: for sessions to end by themselves.
        sandbox: None, or {"backend": name, "most": `sandbox.served.Most` by field, "total": `Total` by field}.
    """

    envs: Mapping[str, EnvSpec]
    host: str = "127.0.0.1"
    port: int = 8000
    max_sessions: int = 256
    max_sessions_per_token: int | None = None
    workers: int = 2
    sessions_per_worker: int = 1
    tokens: Mapping[str, Token | str] = field(default_factory=dict, repr=False)
    token_file: Path | None = None
    allowed_hosts: tuple[str, ...] = ()
    cert: str | None = None
    key: str | None = None
    limits: ServiceLimits = field(default_factory=ServiceLimits)
    bounds: Bounds = field(default_factory=Bounds)
    drain_seconds: float = 30.0
    sandbox: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        if not self.envs and self.sandbox is None:
            raise ValueError("no environments and no sandboxes: there is nothing to serve")
        if self.host not in LOCAL_HOSTS and not self.tokens:
            raise ValueError(f"listening at {self.host} lets other machines in: that takes a token (--token-file)")
        for name, least in (("max_sessions", 1), ("sessions_per_worker", 1), ("workers", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} is at least {least}, not {getattr(self, name)}")
