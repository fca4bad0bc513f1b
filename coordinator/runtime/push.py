"""The listener: hears that something happened at an address and hurries. Speed only: every message may be lost,
doubled or late, and nothing changes but the time at which the next sync says the same.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from ..store.client import classify
from .core import log

READ_S = 0.5  # shorter than any socket timeout: a quiet channel is not an error
AGAIN_S = 1.0


@dataclass(slots=True)
class Listener:
    """Subscribes to one channel and calls `heard(kind, address)`."""

    client: object
    channel: str
    heard: Callable[[str, str], object]
    beat: Callable[[], object]
    connected: bool = False

    async def run(self) -> None:
        """Turn for ever; the supervisor restarts it after an error."""
        pubsub = self.client.pubsub(ignore_subscribe_messages=True)  # type: ignore[attr-defined]
        try:
            await pubsub.subscribe(self.channel)
            self.connected = True
            while True:
                self.beat()
                message = await pubsub.get_message(timeout=READ_S)
                if message is not None and message.get("type") == "message":
                    kind, _, address = str(message["data"]).partition(" ")
                    self.heard(kind, address)
        except Exception as exc:
            if self.connected:
                log.warning("push_lost error=%r", str(classify(exc)))
            self.connected = False
            await asyncio.sleep(AGAIN_S)
        finally:
            closer = getattr(pubsub, "aclose", None) or pubsub.close
            await closer()
