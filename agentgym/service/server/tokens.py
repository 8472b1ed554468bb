"""Bearer tokens: their names and scopes, and the file that they come from, which is read again when it changes."""

import hashlib
import hmac
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

METRICS, PLAY, SANDBOXES = "metrics", "play", "sandboxes"
SCOPES = (METRICS, PLAY, SANDBOXES)
SHORTEST = 16
_log = logging.getLogger("agentgym.service")


@dataclass(frozen=True)
class AccessToken:
    """ "metrics" allows `/metrics`, "sandboxes" allows `/sandboxes`, and "play" all other paths."""

    secret: str
    scopes: frozenset[str] = frozenset(SCOPES)


class TokenFileError(ValueError):
    """A token file, or a line of it, cannot be read."""


def read_tokens(path: Path) -> dict[str, AccessToken]:
    """The tokens of a file, by name. A line is TOKEN, NAME TOKEN, or NAME TOKEN SCOPE,SCOPE (default: all scopes)."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not text"
        raise TokenFileError(f"{path}: cannot be read ({why})") from error
    tokens: dict[str, AccessToken] = {}
    for number, line in enumerate(lines, 1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        name, secret = (words[0], words[1]) if len(words) > 1 else (f"line {number}", words[0])
        if len(words) > 3 or len(secret) < SHORTEST or not secret.isascii():
            form = f"TOKEN, NAME TOKEN, or NAME TOKEN SCOPES, a token of {SHORTEST} letters (ASCII) or more"
            raise TokenFileError(f"{path}:{number}: a line is {form}")
        scopes = frozenset(words[2].split(",")) if len(words) == 3 else frozenset(SCOPES)
        if unknown := scopes - set(SCOPES):
            known = f"there are {', '.join(SCOPES)}, joined by commas"
            raise TokenFileError(f"{path}:{number}: no scope {min(unknown)!r}; {known}")
        if name in tokens or secret in {token.secret for token in tokens.values()}:
            raise TokenFileError(f"{path}:{number}: this name or token was there before")
        tokens[name] = AccessToken(secret, scopes)
    if not tokens:
        raise TokenFileError(f"{path}: there is no token in it")
    return tokens


class AccessTokens:
    """The tokens that a server accepts; none: it asks for none."""

    def __init__(self, tokens: Mapping[str, AccessToken | str], path: Path | None = None):
        self._path = path
        self._state = _state_of(path)
        self._take({name: AccessToken(token) if isinstance(token, str) else token for name, token in tokens.items()})

    def _take(self, tokens: Mapping[str, AccessToken]) -> None:
        self._digests = {name: (digest_of(token.secret), token.scopes) for name, token in tokens.items()}

    def owner_of(self, authorization: str) -> str | None:
        """The name of the token in an `Authorization` header; "" without tokens; None if wrong or missing."""
        if not self._digests:
            return ""
        scheme, _, given = authorization.partition(" ")
        digest = digest_of(given.strip())
        # All of them, each in constant time: how long it takes tells nothing.
        found = [name for name, (known, _) in self._digests.items() if hmac.compare_digest(known, digest)]
        return found[0] if found and scheme.lower() == "bearer" else None

    def why_not(self, owner: str, path: str) -> str:
        """Why a token is not allowed for a path; "": it is allowed."""
        scope = METRICS if path == "/metrics" else SANDBOXES if path.startswith("/sandboxes") else PLAY
        scopes = self._digests[owner][1] if owner in self._digests else frozenset(SCOPES)
        if scope in scopes:
            return ""
        return f"this token is for {', '.join(sorted(scopes))}, and {path:.100} takes one for {scope}"

    def look(self) -> None:
        """Read the file again if it has changed. A file with an error is logged, and the old tokens stay."""
        state = _state_of(self._path)
        if self._path is None or state == self._state:
            return
        self._state = state
        try:
            tokens = read_tokens(self._path)
        except TokenFileError as error:
            _log.error("agentgym serve: --token-file changed, and the tokens from before stay: %s", error)
            return
        self._take(tokens)
        _log.warning("agentgym serve: --token-file changed; tokens now: %s", ", ".join(tokens))


def _state_of(path: Path | None) -> tuple[int, int, int] | None:
    if path is None:
        return None
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino


def digest_of(token: str) -> bytes:
    return hashlib.sha256(token.encode(errors="replace")).digest()
