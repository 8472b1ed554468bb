"""Names of this machine, as a `Host` header or a listening address has them."""

from __future__ import annotations

from collections.abc import Collection

LOCAL_HOSTS = ("127.0.0.1", "localhost", "::1")


def is_ours(host: str, allowed: Collection[str] = ()) -> bool:
    """Whether a `Host` header names this machine, by any port: it may be forwarded (`ssh -L`).

    A web page whose name was led to this machine (DNS rebinding) is of the same origin as this server, and its browser sends that
    name. So a server that asks for no token answers under names alone that nobody else can lead elsewhere.

    Args:
        host: the header.
        allowed: further names that are ours, in lower case.
    """
    name = host_name(host)
    return name in LOCAL_HOSTS or name.endswith(".localhost") or name in allowed


def host_name(host: str) -> str:
    """The name in a `Host` header, in lower case, without port and brackets."""
    name = host.partition("]")[0].lstrip("[") if host.startswith("[") else host.partition(":")[0]
    return name.lower().removesuffix(".")
