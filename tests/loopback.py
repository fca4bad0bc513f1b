"""Tests talk to this machine only: a connection or a look-up that would leave it is stopped and fails the test."""

from __future__ import annotations

import ipaddress
import sys
from typing import Any

#: What was stopped since the list was last emptied.
stopped: list[str] = []


def watch() -> None:
    """Install the guard in this process, for good (audit hooks cannot be taken out)."""
    sys.addaudithook(_guard)


def _guard(event: str, args: tuple[Any, ...]) -> None:
    if event == "socket.connect":
        address = args[1]
        host = address[0] if isinstance(address, tuple) else None  # a text is a unix socket
    elif event == "socket.getaddrinfo":
        host = args[0]
    else:
        return
    if host is not None and not _is_local(host):
        stopped.append(f"{event} {host!r}")
        raise PermissionError(f"tests do not leave this machine: {host!r}")


def _is_local(host: str | bytes) -> bool:
    text = host.decode("ascii", "replace") if isinstance(host, bytes) else host
    if text in ("", "localhost"):
        return True
    try:
        return ipaddress.ip_address(text).is_loopback
    except ValueError:
        return False
