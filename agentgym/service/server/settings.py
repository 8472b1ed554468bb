"""How environments are served."""

from __future__ import annotations

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
        envs: what is served, by the id that clients ask for; the first is OpenEnv's at the root.
        sandbox: how sandboxes are served: {"backend": name, "most": `sandbox.served.Most` by field, "total": `Total`}; None: they are not.
        host, port: where to listen; port 0 takes a free one.
        max_sessions: at a time.
        max_sessions_per_token: at a time; None: as many as there are.
        workers: processes that are forked ahead, and kept ready for the next sessions.
        sessions_per_worker: how many sessions may share a process: those of environments that run no programs in sandboxes.
            They share its fate, too: one that breaks a limit of a call ends them all.
        tokens: by a name for each; none: anybody may come, from this machine. A text alone is good for all.
        token_file: where they were read from, to be read again when it changes; None: they stay.
        allowed_hosts: names beside this machine's own that a `Host` header may have where no token is asked for.
        cert, key: files of TLS; none: no TLS.
        limits: of a session.
        bounds: of its process; of one that many share, so many times as much.
        drain_seconds: for sessions to end by themselves.
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
        if self.max_sessions < 1:
            raise ValueError(f"max_sessions is at least 1, not {self.max_sessions}")
        if self.sessions_per_worker < 1:
            raise ValueError(f"sessions_per_worker is at least 1, not {self.sessions_per_worker}")
        if self.workers < 0:
            raise ValueError(f"workers is at least 0, not {self.workers}")
