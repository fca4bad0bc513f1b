"""Probes: how one address is looked at. Pluggable; the default asks HTTP /health.

A probe answers what it saw and never raises for a dead node. Proxies of the environment are not used.
"""

from __future__ import annotations

import asyncio
import errno
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from ..config import Settings
from ..decide.detector import Evidence

if TYPE_CHECKING:
    import aiohttp

BODY_LIMIT = 65536
INSTANCE_LIMIT = 128


@dataclass(frozen=True, slots=True)
class Sight:
    """What a probe saw: evidence, the instance id if it read one, and a short text for people."""

    evidence: Evidence
    instance: str = ""
    detail: str = ""


class Probe(Protocol):
    """Looks at one address. Called concurrently on the worker's loop; bounded by the caller's time-out."""

    async def __call__(self, address: str) -> Sight:
        """Look once. May raise OSError or TimeoutError, which count as such."""
        ...

    async def aclose(self) -> None:
        """Release what the probe holds."""
        ...


class HttpProbe:
    """GET http://<address><health_path>; the instance id comes from a header, else from a JSON field."""

    def __init__(self, settings: Settings) -> None:
        import aiohttp  # noqa: F401  0.3 s of CPU: here, not at the first probe, on the loop that also syncs

        self._settings = settings
        self._session: aiohttp.ClientSession | None = None

    async def __call__(self, address: str) -> Sight:
        """Look once: a new connection each time, so that what answers is who listens there now."""
        import aiohttp

        if self._session is None:
            connector = aiohttp.TCPConnector(limit=0, force_close=True)
            self._session = aiohttp.ClientSession(connector=connector, trust_env=False)
        s = self._settings
        timeout = aiohttp.ClientTimeout(total=s.probe_timeout_s)
        try:
            async with self._session.get(
                f"http://{address}{s.health_path}", timeout=timeout, allow_redirects=False
            ) as reply:
                instance = clean_instance(reply.headers.get(s.instance_header, "")) if s.instance_header else ""
                if not instance and s.instance_field and reply.status == 200:
                    instance = read_field(await _body(reply), s.instance_field)
                return Sight(from_status(reply.status), instance, f"HTTP {reply.status}")
        except aiohttp.ClientError as exc:
            return from_client_error(exc)

    async def aclose(self) -> None:
        """Close the session."""
        if self._session is not None:
            await self._session.close()
            self._session = None


async def _body(reply: aiohttp.ClientResponse) -> bytes:
    """The first BODY_LIMIT bytes of a body, however many pieces it comes in."""
    body = bytearray()
    async for piece in reply.content.iter_any():
        body += piece
        if len(body) >= BODY_LIMIT:
            break
    return bytes(body[:BODY_LIMIT])


def from_status(status: int) -> Evidence:
    """What an HTTP status says: 2xx and 3xx answer, 4xx is a wrong path or a missing right, 503 is not ready."""
    if status < 400:
        return Evidence.OK
    if status < 500:
        return Evidence.MISCONFIGURED
    return Evidence.UNREADY if status == 503 else Evidence.BAD_STATUS


def from_client_error(exc: Exception) -> Sight:
    """What an aiohttp error says."""
    import aiohttp

    if isinstance(exc, aiohttp.ServerTimeoutError):
        return Sight(Evidence.TIMEOUT, detail=str(exc))
    if isinstance(exc, aiohttp.ServerDisconnectedError):
        return Sight(Evidence.REFUSED, detail="connection closed without an answer")
    if isinstance(exc, OSError):
        return from_os_error(exc)
    return Sight(Evidence.BAD_STATUS, detail=f"no HTTP: {exc}")


def from_os_error(exc: OSError) -> Sight:
    """What an errno says."""
    refused = (errno.ECONNREFUSED, errno.ECONNRESET, errno.EPIPE, errno.ECONNABORTED)
    number = exc.errno or getattr(getattr(exc, "os_error", None), "errno", None)
    if number in refused or isinstance(exc, ConnectionError):
        return Sight(Evidence.REFUSED, detail="connection refused or reset")
    return Sight(Evidence.UNREACHABLE, detail=str(exc)[:200])


def read_field(body: bytes, path: str) -> str:
    """The text at `path` ("a.b") of a JSON object, or ""."""
    try:
        value: Any = json.loads(body)
        for name in path.split("."):
            value = value[name]
    except (ValueError, KeyError, TypeError):
        return ""
    return clean_instance(str(value)) if isinstance(value, (str, int)) else ""


def clean_instance(text: str) -> str:
    """An instance id as the store keeps it: printable ASCII without spaces, at most 128 characters."""
    text = text.strip()[:INSTANCE_LIMIT]
    return text if text.isascii() and text.isprintable() and " " not in text else ""


async def look(probe: Probe, address: str, timeout_s: float) -> Sight:
    """One look, bounded in time; whatever the probe raises becomes evidence."""
    try:
        async with asyncio.timeout(timeout_s):
            return await probe(address)
    except TimeoutError:
        return Sight(Evidence.TIMEOUT, detail=f"no answer within {timeout_s:g} s")
    except OSError as exc:
        return from_os_error(exc)
