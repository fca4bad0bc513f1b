"""What the commands share: the store they talk to, and how they speak."""

from __future__ import annotations

import json
import os
import socket
import sys
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

from ..config import Settings
from ..errors import CoordinatorError, StoreNotFound

if TYPE_CHECKING:
    import redis

    from ..store.keys import Keys


class Unknown(CoordinatorError):
    """The store knows nothing about this address."""

    def __init__(self, address: str) -> None:
        super().__init__(f"the store knows no node {address}: `coordinator status` lists those that it knows")


class Session:
    """The settings of one command line and, once it is asked for, one client."""

    tracebacks: ClassVar[bool] = False

    def __init__(self, url: str = "", namespace: str = "") -> None:
        self.given_url = url
        self._given = {"url": url or None, "namespace": namespace or None}

    @cached_property
    def settings(self) -> Settings:
        """From the options, else from the environment."""
        return Settings.load(**self._given)

    @cached_property
    def url(self) -> str:
        """The URL given, else that of this user's running embedded store. Starts nothing; StoreNotFound without one."""
        if self.settings.url:
            return self.settings.url
        from ..store.embedded import EmbeddedServer

        if running := EmbeddedServer.running():
            return running.url
        raise StoreNotFound(
            "no store: COORDINATOR_URL is not set and no embedded store of this user is running; pass --url "
            "redis://host:6379/0, or run `coordinator store`"
        )

    @property
    def shown_url(self) -> str:
        """The URL without its password."""
        from ..store.connect import redact

        return redact(self.url)

    @cached_property
    def client(self) -> redis.Redis:
        """A blocking client."""
        from ..inspect import answering
        from ..store.connect import sync_client

        with answering():  # a cluster client asks for the layout when it is made
            client: redis.Redis = sync_client(self.url, self.settings)
        return client

    @property
    def keys(self) -> Keys:
        """The keys of the namespace."""
        from ..store.keys import Keys

        return Keys(self.settings.namespace)


def say_json(value: Any, indent: int | None = None) -> None:
    """Print one JSON value, on one line unless it is indented."""
    print(json.dumps(value, ensure_ascii=False, indent=indent))


def complain(text: str) -> None:
    """Print one `error:` line on stderr."""
    print("error:", " ".join(text.split()), file=sys.stderr)


def operator() -> str:
    """Who acts, for the audit trail: "operator:user@host", without what nobody can tell."""
    from ..protocol import clean_text

    user = os.environ.get("SUDO_USER") or os.environ.get("USER") or str(os.getuid())
    return clean_text(f"operator:{user}@{socket.gethostname()}")
