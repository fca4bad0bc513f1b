"""Which topology a URL means and how to connect to it; nothing else in the package builds a Redis client.

    redis://[user:password@]host:port/db      rediss://...      unix:///path?db=0
    redis+sentinel://[user:password@]host:port,host:port/service[/db]
    redis+cluster://[user:password@]host:port,host:port

Every client has explicit timeouts, no driver retries (client.py retries, with a deadline), RESP2 and decoded
replies. The number of connections is small and fixed.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from inspect import signature
from typing import Any
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

from ..config import Settings
from ..errors import ConfigError

SCHEMES = ("redis", "rediss", "unix", "redis+sentinel", "redis+cluster")
_IN_QUERY = re.compile(r"(password=)[^&]*")
CONNECTIONS = 4  # sync batches, verdicts and votes, probes' registrations, one spare; the listener


@dataclass(frozen=True, slots=True)
class Target:
    """A parsed URL. `hosts` is empty for unix sockets, `service` is set for Sentinel only."""

    scheme: str
    url: str = field(repr=False)
    hosts: tuple[tuple[str, int], ...] = ()
    service: str = ""
    db: int = 0
    username: str | None = None
    password: str | None = field(default=None, repr=False)

    @property
    def shown(self) -> str:
        """The URL without its password, for logs and messages."""
        return redact(self.url)


def redact(url: str) -> str:
    """`url` with the password replaced by ***."""
    url = _IN_QUERY.sub(r"\1***", url)
    head, at, tail = url.rpartition("@")
    scheme, sep, user = head.partition("://")
    return f"{scheme}{sep}{user.partition(':')[0]}:***@{tail}" if at and ":" in user else url


def parse_url(url: str) -> Target:
    """Parse a store URL; raise ConfigError naming what is wrong and the forms that work."""
    try:
        parts = _split(url)
        if parts.scheme not in SCHEMES:
            raise ValueError(f"the scheme must be one of {', '.join(s + '://' for s in SCHEMES)}")
        if parts.scheme != "unix" and "@" in parts.path + parts.query + parts.fragment:
            # Part of the password would be read, and shown, as a host or a path.
            raise ValueError("percent-encode '/', '?', '#' and '@' in the user and the password")
        _check_query(parts)
        if parts.scheme == "unix":
            if not parts.path:
                raise ValueError("write unix:///path/to/socket")
            return Target("unix", url, db=_db(dict(parse_qsl(parts.query)).get("db", "0")))
        return _network(parts, url)
    except ValueError as exc:
        raise ConfigError(f"store URL {redact(url)!r}: {exc}") from None


def _split(url: str) -> SplitResult:
    try:
        return urlsplit(url)
    except ValueError:  # its text may quote the password
        raise ValueError("it cannot be read as a URL: percent-encode what is unusual in it") from None


def _check_query(parts: SplitResult) -> None:
    """The driver would take any of its options from here, its timeouts too."""
    for name, _ in parse_qsl(parts.query, keep_blank_values=True):
        if name != "db" and not (parts.scheme == "rediss" and name.startswith("ssl_")):
            raise ValueError(f"{name!r} cannot be set here: only db, and ssl_... with rediss://")


def _db(text: str) -> int:
    if not text.isascii() or not text.isdigit():
        raise ValueError("the database is a whole number from 0")
    return int(text)


def _network(parts: SplitResult, url: str) -> Target:
    user, _, hostlist = parts.netloc.rpartition("@")
    name, _, password = user.partition(":")
    usual = 26379 if parts.scheme == "redis+sentinel" else 6379
    hosts = tuple(_host(item, usual) for item in hostlist.split(",") if item)
    if not hosts:
        raise ValueError("it names no host")
    path = [p for p in parts.path.split("/") if p]
    service = ""
    if parts.scheme == "redis+sentinel":
        if not path:
            raise ValueError("name the service: redis+sentinel://host:26379/mymaster")
        service = unquote(path.pop(0))
    elif len(hosts) > 1 and parts.scheme != "redis+cluster":
        raise ValueError("several hosts need redis+sentinel:// or redis+cluster://")
    query_db = dict(parse_qsl(parts.query)).get("db")
    db = _db(query_db or (path[0] if path else "0"))  # as the driver does
    if parts.scheme == "redis+cluster" and db:
        raise ValueError("a cluster has database 0 only")
    return Target(parts.scheme, url, hosts, service, db, unquote(name) or None, unquote(password) or None)


def _host(item: str, usual_port: int) -> tuple[str, int]:
    split = urlsplit(f"//{item}")
    if not split.hostname or split.port == 0:
        raise ValueError(f"{item!r} is not host:port")
    return split.hostname, split.port or usual_port


def async_client(url: str, settings: Settings) -> Any:
    """A redis.asyncio client for `url`. Nothing is sent before the first command. Raises ConfigError."""
    import redis.asyncio as driver
    from redis.asyncio.retry import Retry
    from redis.asyncio.sentinel import Sentinel
    from redis.backoff import NoBackoff

    def pool(common: dict[str, Any]) -> Any:
        kind: Any = driver.BlockingConnectionPool
        return kind.from_url(url, max_connections=CONNECTIONS, timeout=settings.call_timeout_s, **common)

    return _client(url, settings, driver, Sentinel, Retry(NoBackoff(), 0), pool)


def sync_client(url: str, settings: Settings) -> Any:
    """A blocking redis.Redis client for `url`, for tools and threads. Nothing is sent before the first command.

    Raises ConfigError; for a cluster, whose driver connects at once, StoreUnavailable and StoreRefused too.
    """
    import redis as driver
    from redis.backoff import NoBackoff
    from redis.exceptions import RedisClusterException, RedisError
    from redis.retry import Retry
    from redis.sentinel import Sentinel

    from .client import classify

    def pool(common: dict[str, Any]) -> Any:
        kind: Any = driver.ConnectionPool
        return kind.from_url(url, max_connections=CONNECTIONS, **common)

    try:
        return _client(url, settings, driver, Sentinel, Retry(NoBackoff(), 0), pool)
    except (RedisClusterException, RedisError, OSError) as exc:
        raise classify(exc) from exc


def _client(url: str, settings: Settings, driver: Any, sentinel: Any, no_retry: Any, pool: Any) -> Any:
    """The client of either kind: `driver` is redis or redis.asyncio, the rest are its parts."""
    target = parse_url(url)
    common: dict[str, Any] = {
        "socket_timeout": settings.call_timeout_s,
        "socket_connect_timeout": settings.call_timeout_s,
        "decode_responses": True,
        "encoding_errors": "replace",  # a reason that somebody wrote by hand must not make an address unreadable
        "protocol": 2,
        "retry": no_retry,
    }
    auth = {"username": target.username, "password": target.password}
    if target.scheme == "redis+cluster":
        nodes = [driver.cluster.ClusterNode(host, port) for host, port in target.hosts]
        return driver.RedisCluster(startup_nodes=nodes, **auth, **common)
    if target.scheme == "redis+sentinel":
        common |= _nameless(driver)
        watch = sentinel(list(target.hosts), sentinel_kwargs=dict(common), **common)
        return watch.master_for(target.service, db=target.db, max_connections=CONNECTIONS, **auth)
    return driver.Redis(connection_pool=pool({**common, **_nameless(driver)}))


def _nameless(driver: Any) -> dict[str, None]:
    """No CLIENT SETINFO on connect: least privilege forbids it, and each refusal fills the server's ACL log."""
    known = signature(driver.connection.AbstractConnection.__init__).parameters
    return {"driver_info": None} if "driver_info" in known else {"lib_name": None, "lib_version": None}
