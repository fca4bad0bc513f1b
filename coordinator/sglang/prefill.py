"""The prefill side of the plug-in: SGLang's bootstrap server announces itself as a PrefillNode.

One hook, on `_setup_routes`: the application exists and is not frozen yet. All else hangs on its signals: the node is
created once the server listens (never before: a second server that finds the port taken must not end the first one's
epoch), every /health answer carries the instance id, and the node is closed with the server. Nothing here may stop
SGLang from starting or serving: trouble is one log line, and SGLang as it always was.

Which address. Decode processes know a node by the text `<bootstrap_host>:<bootstrap_port>` of the request, and the
router takes the host from the URL that it was given for this prefill. The two must be the same text: "localhost",
"127.0.0.1" and a host name are three nodes. Announced is the host that the server was given with --host; for a wildcard
(0.0.0.0, ::, nothing) SGLang's own guess of this machine's address; COORDINATOR_ADDRESS ("host", or "host:port") says
otherwise. When they differ, rooms still fail with their node, and a restart is still seen, one probe later, by the
instance id in /health; what is lost: a restart noticed without a probe, and orphans aborted at this side.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import importlib.metadata
import logging
import os
import re
import secrets
import threading
from collections.abc import Callable
from typing import Any

from ..address import canonical
from ..config import Settings
from ..errors import ConfigError, CoordinatorError, InvalidAddress
from .aborts import Aborts, Rank

log = logging.getLogger("coordinator")

ADDRESS = "COORDINATOR_ADDRESS"
WILDCARDS = ("", "0.0.0.0", "::", "[::]")
LOOK_S = 0.02  # pace of looking whether the server listens
CLOSE_S = 1.0  # SGLang gives its server 2 s to end
_HEADER = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+", re.ASCII)  # a token of RFC 9110

Hook = tuple[str, Callable[..., Any], str]


def hooks() -> list[Hook]:
    """What to register with SGLang's HookRegistry: (target, hook, type)."""
    return [("sglang.srt.disaggregation.common.conn.CommonKVBootstrapServer._setup_routes", setup_routes, "around")]


def setup_routes(original: Callable[..., Any], server: Any, *args: Any, **kwargs: Any) -> Any:
    """SGLang's own, then the signals of the application. Never raises anything of ours; nothing without a URL."""
    result = original(server, *args, **kwargs)
    try:
        settings = Settings.load()
        if settings.url:
            Announcer(server, settings).install(server.app)
    except CoordinatorError as exc:
        _not_announced(str(exc))
    except Exception as exc:
        _not_announced(repr(exc))
    return result


def _not_announced(error: str) -> None:
    log.warning("prefill_not_announced error=%r: SGLang serves as without the plug-in", error)


class Announcer:
    """Ties a PrefillNode to one bootstrap server. `instance` is its own; `node` is None until announced."""

    def __init__(self, server: Any, settings: Settings) -> None:
        if not _HEADER.fullmatch(settings.instance_header):
            raise ConfigError(f"instance_header {settings.instance_header!r} cannot be the name of an HTTP header")
        self.instance = secrets.token_hex(8)
        self.node: Any = None
        self.aborts: Aborts | None = None
        self._server, self._settings = server, settings
        self._paths = {"/health", settings.health_path}
        self._task: asyncio.Task[None] | None = None
        self._closed, self._lock = False, threading.Lock()

    def install(self, app: Any) -> None:
        """Hang on the signals of an aiohttp application that is not frozen."""
        app.on_response_prepare.append(self._stamp)
        app.on_startup.append(self._start)
        app.on_cleanup.append(self._stop)

    async def _stamp(self, request: Any, response: Any) -> None:
        if request.path in self._paths:
            response.headers[self._settings.instance_header] = self.instance

    async def _start(self, app: Any) -> None:
        self._task = asyncio.get_running_loop().create_task(self._announce())

    async def _announce(self) -> None:
        try:
            while not self._server._runner.addresses:  # noqa: ASYNC110 - SGLang tells nobody when its port is bound
                await asyncio.sleep(LOOK_S)
            await asyncio.to_thread(self._create)  # imports the driver: not on the server's loop
        except CoordinatorError as exc:
            _not_announced(str(exc))
        except Exception as exc:
            _not_announced(repr(exc))

    def _create(self) -> None:
        from ..node import PrefillNode

        address = announced_address(self._server.host, self._server.port)
        self.aborts = Aborts(lambda: ranks_of(self._server), self._open_among, self._settings.lease_s)
        with self._lock:
            if self._closed:
                return
            self.node = PrefillNode(
                address, self._settings.url, instance=self.instance, info=_info(self._server),
                settings=self._settings, on_orphans=self.aborts,
            )  # fmt: skip
        log.info("prefill_address address=%s: routers must pass exactly this host and port", self.node.address)

    def _open_among(self, rooms: list[int]) -> set[int]:
        with self._lock:  # the node may tell of orphans before its constructor has returned
            node = self.node
        living: set[int] = node.open_among(rooms)
        return living

    async def _stop(self, app: Any) -> None:
        try:
            if self._task is not None:
                self._task.cancel()
            await asyncio.wait_for(asyncio.to_thread(self.close), 1.5 * CLOSE_S)
        except Exception as exc:
            log.warning("prefill_close_incomplete error=%r: the node is announced until this process ends", exc)

    def close(self) -> None:
        """Stop announcing; rooms that are open go on. Repeatable."""
        if self.aborts is not None:
            self.aborts.close()
        with self._lock:
            self._closed = True
        if self.node is not None:
            self.node.close(CLOSE_S)


def announced_address(host: str, port: int) -> str:
    """The address to announce for a server that was given `host` and `port`. Raises InvalidAddress."""
    given = os.environ.get(ADDRESS, "").strip()
    if given:
        return _override(given, port)
    if (host or "") in WILDCARDS:
        try:
            host = importlib.import_module("sglang.srt.utils.network").get_local_ip_auto()
        except Exception as exc:
            raise InvalidAddress(
                f"the server listens on every interface and SGLang finds no address of this machine ({exc}): "
                f"set {ADDRESS} to the host that the router uses for it"
            ) from exc
    return canonical(_joined(host, port))


def _override(given: str, port: int) -> str:
    """`given` with its own port, or else with the server's."""
    try:
        with contextlib.suppress(InvalidAddress):
            return canonical(given)
        return canonical(_joined(given, port))
    except InvalidAddress as exc:
        raise InvalidAddress(f'{ADDRESS}={given!r} is neither a host nor "host:port": {exc}') from None


def _joined(host: str, port: int) -> str:
    return f"[{host}]:{port}" if host.count(":") > 1 and not host.startswith("[") else f"{host}:{port}"


def ranks_of(server: Any) -> list[Rank]:
    """(ip, port) of each rank that has registered with a bootstrap server. Safe from any thread."""
    found: dict[Rank, None] = {}
    for by_cp in list(server.prefill_port_table.values()):
        for by_tp in list(by_cp.values()):
            for by_pp in list(by_tp.values()):
                found |= {(str(rank.rank_ip), int(rank.rank_port)): None for rank in list(by_pp.values())}
    return list(found)


def _info(server: Any) -> dict[str, Any]:
    """For people who look at the node in the store."""
    try:
        version = importlib.metadata.version("sglang")
    except importlib.metadata.PackageNotFoundError:
        version = "unknown"
    return {"engine": "sglang", "version": version, "server": type(server).__name__, "pid": os.getpid()}
