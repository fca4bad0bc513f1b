"""A store client that goes wrong on purpose: wraps a redis.asyncio client and counts its calls.

    plan = Plan(lambda k: ConnectionError("cut") if k == 3 else None)     # the third call of this client fails
    Worker(client=lambda: Faulty(redis.asyncio.Redis...(), plan))

A call is one `execute` of a pipeline, one `execute_command`, one subscribe. `late=True`: the server has executed it
and the reply is lost. What `garble(reply)` returns is handed out instead of each reply, if it is given.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any


@dataclass
class Plan:
    """What goes wrong. Any thread may change it."""

    fault: Callable[[int], BaseException | None] = lambda k: None
    late: bool = False
    garble: Callable[[Any], Any] | None = None
    calls: int = 0
    faults: int = 0

    async def call(self, work: Callable[[], Awaitable[Any]]) -> Any:
        """Do `work`, or what the plan makes of it."""
        self.calls += 1
        error = self.fault(self.calls)
        if error is not None:
            self.faults += 1
            if self.late:
                await work()
            raise error
        reply = await work()
        return reply if self.garble is None else self.garble(reply)


class Faulty:
    """Behaves as the client it wraps, but for the plan."""

    def __init__(self, client: Any, plan: Plan) -> None:
        self._client, self._plan = client, plan
        self.connection_pool = client.connection_pool

    async def execute_command(self, *words: Any) -> Any:
        return await self._plan.call(lambda: self._client.execute_command(*words))

    def pipeline(self, **options: Any) -> _Pipe:
        return _Pipe(self._client.pipeline(**options), self._plan)

    def pubsub(self, **options: Any) -> _PubSub:
        return _PubSub(self._client.pubsub(**options), self._plan)

    async def aclose(self) -> None:
        await self._client.aclose()


class _Pipe:
    def __init__(self, pipe: Any, plan: Plan) -> None:
        self._pipe, self._plan = pipe, plan

    def execute_command(self, *words: Any) -> None:
        self._pipe.execute_command(*words)

    async def execute(self, **options: Any) -> Any:
        return await self._plan.call(lambda: self._pipe.execute(**options))


class _PubSub:
    def __init__(self, pubsub: Any, plan: Plan) -> None:
        self._pubsub, self._plan = pubsub, plan

    async def subscribe(self, *channels: str) -> None:
        await self._plan.call(lambda: self._pubsub.subscribe(*channels))

    async def get_message(self, **options: Any) -> Any:
        return await self._pubsub.get_message(**options)

    async def aclose(self) -> None:
        await self._pubsub.aclose()
