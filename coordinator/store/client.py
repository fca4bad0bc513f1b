"""Runs Ops. Two short runners, one for threads and one for asyncio, over one classification of errors.

Every Op is idempotent, so one outer retry is enough: exponential back-off with full jitter until a deadline on
the monotonic clock. The driver never retries by itself.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

from ..errors import CoordinatorError, ScriptFault, StoreRefused, StoreUnavailable
from .ops import Op
from .scripts import load

T = TypeVar("T")

#: First words of error replies that pass by themselves: the server loads, fails over, is full or is busy.
TRANSIENT = (
    "LOADING",
    "READONLY",
    "MISCONF",
    "OOM",
    "CLUSTERDOWN",
    "MASTERDOWN",
    "TRYAGAIN",
    "NOREPLICAS",
    "BUSY",
    "UNBLOCKED",
    "MOVED",
    "ASK",
    "NOMASTERLINK",
)
STRIPPED = {
    "OutOfMemoryError": "OOM",
    "ReadOnlyError": "READONLY",
    "BusyLoadingError": "LOADING",
    "ClusterDownError": "CLUSTERDOWN",
    "MasterDownError": "MASTERDOWN",
    "TryAgainError": "TRYAGAIN",
    "MovedError": "MOVED",
    "AskError": "ASK",
}
CALLS = 2  # at once, beside one of the sync loop; with the listener they are connect.CONNECTIONS
FIRST_DELAY_S, LONGEST_DELAY_S = 0.02, 0.5


def driver_errors() -> tuple[type[Exception], ...]:
    """What the driver raises when the store is in trouble. A cluster that cannot be reached is no RedisError to it."""
    import redis.exceptions as rex

    return (TimeoutError, OSError, rex.RedisError, rex.RedisClusterException)


def classify(exc: BaseException) -> CoordinatorError:
    """What a driver's exception means for the caller: StoreUnavailable (retry), StoreRefused or ScriptFault."""
    import redis.exceptions as rex

    if isinstance(exc, CoordinatorError):
        return exc
    text = str(exc).strip()
    # The driver turns some first words into classes and strips them from the text.
    first = STRIPPED.get(type(exc).__name__) or text.removeprefix("ERR ").partition(" ")[0].rstrip(":")
    if isinstance(exc, (rex.AuthenticationError, rex.NoPermissionError, rex.AuthorizationError)):
        return StoreRefused(f"the store refused: {text}")
    if first in ("NOPERM", "NOAUTH", "WRONGPASS", "WRONGTYPE"):
        return StoreRefused(f"the store refused: {text}")
    passing = (rex.ConnectionError, rex.TimeoutError, rex.ClusterDownError, rex.RedisClusterException, OSError)
    if isinstance(exc, passing) or first in TRANSIENT or any(f"-{word}" in text for word in TRANSIENT):
        word = first if first in TRANSIENT else ""  # a socket's error has a text too
        return StoreUnavailable(f"the store does not answer: {text or type(exc).__name__}", word)
    if isinstance(exc, rex.RedisError):
        return ScriptFault(f"the store answered an error: {text}")
    return ScriptFault(f"{type(exc).__name__}: {text}")


def delays() -> Callable[[], float]:
    """Back-off: each call gives the next pause in seconds, uniform in [0, 2 * the last bound], capped."""
    bound = FIRST_DELAY_S

    def pause() -> float:
        nonlocal bound
        chosen = random.uniform(0, bound)
        bound = min(2 * bound, LONGEST_DELAY_S)
        return chosen

    return pause


class SyncStore:
    """Runs Ops from a thread. One runner may be shared by threads (the client is a pool)."""

    def __init__(self, client: Any, retry_s: float = 5.0) -> None:
        self.client, self.retry_s = client, retry_s

    def run(self, op: Op[T]) -> T:
        """Run `op`, repeating it for `retry_s` while the store is away.

        Raises StoreUnavailable, StoreRefused, ScriptFault.
        """
        return retry_blocking(lambda: self.once(op), self.retry_s)

    def once(self, op: Op[T]) -> T:
        """One attempt."""
        import redis.exceptions as rex

        script = load(op.script)
        try:
            try:
                reply: Any = self.client.execute_command("EVALSHA", script.sha, len(op.keys), *op.keys, *op.args)
            except rex.NoScriptError:
                reply = self.client.execute_command("EVAL", script.text, len(op.keys), *op.keys, *op.args)
        except driver_errors() as exc:
            _after_error_sync(self.client, exc)
            raise classify(exc) from exc
        return op.parse(reply)


def retry_blocking(call: Callable[[], T], retry_s: float) -> T:
    """Repeat an idempotent call while it raises StoreUnavailable, until `retry_s` have passed."""
    deadline, pause = time.monotonic() + retry_s, delays()
    while True:
        try:
            return call()
        except StoreUnavailable:
            wait = pause()
            if time.monotonic() + wait >= deadline:
                raise
            time.sleep(wait)


class AsyncStore:
    """Runs Ops on one event loop."""

    def __init__(self, client: Any, retry_s: float = 5.0) -> None:
        self.client, self.retry_s = client, retry_s
        self._pipelines = not hasattr(client, "nodes_manager")  # a cluster client routes each call by itself
        # Not every pool waits for a free connection; and whatever else goes on, sync has one.
        self._slots = asyncio.Semaphore(CALLS if self._pipelines else CALLS + 1)
        self._sync_slot = asyncio.Semaphore(1) if self._pipelines else self._slots

    async def run(self, op: Op[T]) -> T:
        """Run `op`, repeating it for `retry_s` while the store is away.

        Raises StoreUnavailable, StoreRefused, ScriptFault.
        """
        return await self.retry(lambda: self.once(op))

    async def retry(self, call: Callable[[], Awaitable[T]]) -> T:
        """Repeat an idempotent call while it raises StoreUnavailable, until `retry_s` have passed."""
        deadline, pause = time.monotonic() + self.retry_s, delays()
        while True:
            try:
                return await call()
            except StoreUnavailable:
                wait = pause()
                if time.monotonic() + wait >= deadline:
                    raise
                await asyncio.sleep(wait)

    async def once(self, op: Op[T]) -> T:
        """One attempt."""
        result = (await self.many([op]))[0]
        if isinstance(result, CoordinatorError):
            raise result
        return result

    async def command(self, *words: Any) -> Any:
        """One plain read command, one attempt, errors classified."""
        try:
            async with self._slots:
                return await self.client.execute_command(*words)
        except driver_errors() as exc:
            await self._after_error(exc)
            raise classify(exc) from exc

    async def commands(self, calls: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Plain read commands, in one round trip where the topology allows it, one attempt, errors classified."""
        if not self._pipelines:
            return [await self.command(*words) for words in calls]
        pipe = self.client.pipeline(transaction=False)
        for words in calls:
            pipe.execute_command(*words)
        try:
            async with self._slots:
                return list(await pipe.execute())
        except driver_errors() as exc:
            await self._after_error(exc)
            raise classify(exc) from exc

    async def many(self, ops: Sequence[Op[T]], *, sync: bool = False) -> list[T | CoordinatorError]:
        """One attempt for each op, in one round trip where the topology allows it; errors are values here.

        `sync`: over the connection that is kept for the sync loop.
        """
        if not ops:
            return []
        if not self._pipelines:
            return list(await asyncio.gather(*[self._single(op) for op in ops]))
        slot = self._sync_slot if sync else self._slots
        replies = await self._pipeline(ops, slot, by_sha=True)
        missing = [i for i, reply in enumerate(replies) if _is_noscript(reply)]
        if missing:
            again = await self._pipeline([ops[i] for i in missing], slot, by_sha=False)
            for i, reply in zip(missing, again, strict=True):
                replies[i] = reply
        results: list[T | CoordinatorError] = []
        for op, reply in zip(ops, replies, strict=True):
            result = await self._result(op, reply)
            results.append(result)
        return results

    async def _pipeline(self, ops: Sequence[Op[T]], slot: asyncio.Semaphore, by_sha: bool) -> list[Any]:
        pipe = self.client.pipeline(transaction=False)
        for op in ops:
            pipe.execute_command(*_command(op, by_sha))
        try:
            async with slot:
                return list(await pipe.execute(raise_on_error=False))
        except driver_errors() as exc:
            return [exc] * len(ops)

    async def _single(self, op: Op[Any]) -> Any:
        import redis.exceptions as rex

        reply: Any
        try:
            try:
                async with self._slots:
                    reply = await self.client.execute_command(*_command(op, True))
            except rex.NoScriptError:
                async with self._slots:
                    reply = await self.client.execute_command(*_command(op, False))
        except driver_errors() as exc:
            reply = exc
        return await self._result(op, reply)

    async def _result(self, op: Op[T], reply: Any) -> T | CoordinatorError:
        if isinstance(reply, BaseException):
            await self._after_error(reply)
            return classify(reply)
        try:
            return op.parse(reply)
        except ScriptFault as exc:
            return exc

    async def _after_error(self, exc: BaseException) -> None:
        """A server that became a replica keeps its connections: drop them, so that the primary is found anew."""
        from redis.exceptions import ReadOnlyError

        if isinstance(exc, ReadOnlyError) and self._pipelines:
            await self.client.connection_pool.disconnect(inuse_connections=False)

    async def aclose(self) -> None:
        """Close every connection."""
        closer = getattr(self.client, "aclose", None) or self.client.close
        await closer()
        if self._pipelines:
            await self.client.connection_pool.disconnect()


def _command(op: Op[Any], by_sha: bool) -> tuple[Any, ...]:
    script = load(op.script)
    head = ("EVALSHA", script.sha) if by_sha else ("EVAL", script.text)
    return (*head, len(op.keys), *op.keys, *op.args)


def _is_noscript(reply: Any) -> bool:
    import redis.exceptions as rex

    return isinstance(reply, rex.NoScriptError) or (isinstance(reply, rex.ResponseError) and "NOSCRIPT" in str(reply))


def _after_error_sync(client: Any, exc: BaseException) -> None:
    from redis.exceptions import ReadOnlyError

    if isinstance(exc, ReadOnlyError) and hasattr(client, "connection_pool"):
        client.connection_pool.disconnect()
