"""The address of a served environment: servers, id, token and certificates."""

import os
import re
import ssl
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote, unquote, urlsplit

from agentgym.core.registration import EnvSpec, UnknownEnvError

TOKEN_VARIABLE = "AGENTGYM_TOKEN"
REMOTE_ENV = "agentgym.service.client.remote_env:remote_env"  # makes environments that are served
REMOTE_TASKS = "agentgym.service.client.remote_env:remote_tasks"
SCHEMES = ("http://", "https://")
_ID = re.compile(r"[A-Za-z0-9_.-]+(/[A-Za-z0-9_.-]+)?")


class RemoteError(RuntimeError):
    """A failure of a served environment. The message names the server, the environment and a remedy."""


class Unavailable(RemoteError):
    """No server can be used: none answers, all are full, or they refuse the client."""


class Full(Unavailable):
    """All sessions of a server stayed in use for too long."""


class SessionLost(RemoteError):
    """The session has ended, and its episode with it. `code`: one of `frames.CODES`, or "" if the server gave none."""

    def __init__(self, message: str, code: str = ""):
        super().__init__(message)
        self.code = code


class RemoteEnvError(RemoteError):
    """The environment raised on the server. Its session continues."""


@dataclass(frozen=True)
class Address:
    """One environment on one or several servers."""

    servers: tuple[str, ...]  # `http://host:port` of each, in the order they were given
    env: str  # its id there
    token_file: str | None = None  # holds the bearer token in its first line; None: $AGENTGYM_TOKEN, which may be empty
    ca_file: str | None = None  # certificates to trust beside the system's, for https
    service: str = ""  # the URL of the service that a server was found behind: requests and certificates have its name

    @property
    def server_hostname(self) -> str | None:
        """The host name of the certificate; None: the one in the server's URL."""
        return urlsplit(self.service).hostname if self.service.startswith("https:") else None

    @property
    def path(self) -> str:
        return f"/envs/{quote(self.env)}"

    def headers(self) -> dict[str, str]:
        """The headers of every request. Raises `Unavailable` if the token cannot be read, or is malformed."""
        token = os.environ.get(TOKEN_VARIABLE, "").strip()
        if self.token_file is not None:
            try:
                token = (Path(self.token_file).expanduser().read_text(encoding="utf-8").splitlines() or [""])[0].strip()
            except (OSError, UnicodeDecodeError) as error:
                raise Unavailable(f"token_file={self.token_file}: cannot be read: {error}") from error
        lacks = self.token_file is not None and not token
        if lacks or not token.isascii() or not token.isprintable() or " " in token:
            where = f"token_file={self.token_file}" if self.token_file else f"${TOKEN_VARIABLE}"
            form = "letters, digits and signs without spaces, on one line, without its name in the server's file"
            raise Unavailable(f"{where} holds no token: it must be {form}")
        host = {"Host": urlsplit(self.service).netloc} if self.service else {}
        return {**host, **({"Authorization": f"Bearer {token}"} if token else {})}

    def tls(self) -> ssl.SSLContext | None:
        """The TLS settings of https; None: the system's. Raises `Unavailable` if the certificates cannot be read."""
        if self.ca_file is None:
            return None
        context = ssl.create_default_context()
        try:
            context.load_verify_locations(Path(self.ca_file).expanduser())
        except (OSError, ssl.SSLError) as error:
            raise Unavailable(f"ca_file={self.ca_file}: no certificates can be read from it: {error}") from error
        return context

    def __str__(self) -> str:
        return f"{self.env} at {', '.join(self.servers)}"


def is_url(id: str) -> bool:
    """True if an environment's id is the URL of a served one."""
    return id.startswith(SCHEMES)


def parse(url: str | Sequence[str], token_file: str | None = None, ca_file: str | None = None) -> Address:
    """Parse one or several URLs: `http://host:8000/gsm8k`, several joined by commas or in a list. Raises ValueError."""
    urls = [part.strip() for one in ([url] if isinstance(url, str) else url) for part in str(one).split(",")]
    found = [_parsed(one) for one in urls if one]
    if not found:
        raise ValueError("no URL: write http://HOST:PORT/ENV")
    envs = list(dict.fromkeys(env for _, env in found))
    if len(envs) > 1:
        which = f"{envs[0]!r} and {envs[1]!r}"
        raise ValueError(f"the URLs name different environments, {which}: give several servers of one environment")
    return Address(tuple(dict.fromkeys(server for server, _ in found)), envs[0], token_file, ca_file)


def spec_of(url: str) -> EnvSpec:
    """The spec of a served environment. No server is asked. Raises `UnknownEnvError` for a malformed URL."""
    try:
        address = parse(url)
    except ValueError as error:
        raise UnknownEnvError(str(error)) from error
    urls = ",".join(f"{server}/{address.env}" for server in address.servers)
    told = f"{address.env}, served"
    return EnvSpec(id=urls, entry_point=REMOTE_ENV, kwargs={"url": urls}, description=told, task_source=REMOTE_TASKS)


def server_of(url: str) -> Address:
    """The address of a server alone, `http://host:8000`; its `env` is "". Raises ValueError."""
    if not is_url(url):
        raise ValueError(f"bad URL {url!r}: write http://HOST:PORT or https://HOST:PORT")
    server, env = _parsed(f"{url.rstrip('/')}/_")
    if env != "_":
        raise ValueError(f"{url!r} names an environment: write {server}")
    return Address((server,), "")


def _parsed(url: str) -> tuple[str, str]:
    if not is_url(url):
        raise ValueError(f"bad URL {url!r}: write http://HOST:PORT/ENV or https://HOST:PORT/ENV")
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise ValueError(f"bad URL {url!r}: {error}") from error
    if parts.username or parts.password:
        # An address is written into runs and logs, a secret must not be.
        raise ValueError(f"a URL must not hold a secret: put the token of {host} into ${TOKEN_VARIABLE} or token_file=")
    if not host or parts.query or parts.fragment:
        raise ValueError(f"bad URL {url!r}: write {parts.scheme}://HOST:PORT/ENV, and nothing after it")
    env = unquote(parts.path).strip("/")
    if not env:
        bare = url.rstrip("/")
        raise ValueError(f"{url!r} names no environment: write {bare}/ENV; {bare}/envs lists them")
    if not _ID.fullmatch(env):
        raise ValueError(f"bad URL {url!r}: {env!r} is no environment's id")
    shown = f"[{host}]" if ":" in host else host
    return f"{parts.scheme}://{shown}:{port}" if port else f"{parts.scheme}://{shown}", env
