"""The settings of a server."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agentgym.core.registration import EnvSpec
from agentgym.hosts import LOCAL_HOSTS
from agentgym.service.protocol.frames import ServiceLimits
from agentgym.service.server.bounds import Bounds
from agentgym.service.server.tokens import AccessToken


@dataclass(frozen=True)
class ServeSettings:
    """The settings with which environments are served."""

    envs: Mapping[str, EnvSpec]  # by the id that clients ask for; the first is OpenEnv's at the root
    host: str = "127.0.0.1"
    port: int = 8000  # 0 takes a free one
    max_sessions: int = 256
    max_sessions_per_token: int | None = None  # None: no limit
    workers: int = 2  # processes that are forked in advance
    sessions_per_worker: int = 1  # that may share a process, if their environment runs no programs in sandboxes
    # By name; a plain text has all scopes. Only an address of this machine may go without.
    tokens: Mapping[str, AccessToken | str] = field(default_factory=dict, repr=False)
    token_file: Path | None = None  # is read again when it changes
    allowed_hosts: tuple[str, ...] = ()  # other names that a `Host` header may have if no token is asked for
    cert: str | None = None
    key: str | None = None
    limits: ServiceLimits = field(default_factory=ServiceLimits)
    bounds: Bounds = field(default_factory=Bounds)  # of a session's process; of a shared one, as many times more
    drain_seconds: float = 30.0  # for sessions to end by themselves
    # None, or {"backend": name, "most": `sandbox.served.Most` by field, "total": `Total` by field}.
    sandbox: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        if not self.envs and self.sandbox is None:
            raise ValueError("no environments and no sandboxes: there is nothing to serve")
        if self.host not in LOCAL_HOSTS and not self.tokens:
            raise ValueError(f"listening at {self.host} lets other machines in: that takes a token (--token-file)")
        for name, least in (("max_sessions", 1), ("sessions_per_worker", 1), ("workers", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} is at least {least}, not {getattr(self, name)}")
