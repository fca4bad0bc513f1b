"""Ends the prefill side of rooms whose decode worker is gone: ABORT messages to SGLang's prefill ranks, over ZMQ.

In: the node's orphans, and SGLang's own table of the ranks that have registered. Out: the message that a decode
receiver sends when its request is aborted (`CommonKVReceiver._send_abort_notification`); each backend's bootstrap
thread understands it, marks that room Failed if it has it and has not finished it, and SGLang frees the KV as after
any failed transfer. A rank that does not know the room ignores it, so every rank gets every message.

The message carries a return address for an acknowledgement. Nobody waits for one here, so it names a port that
cannot exist: SGLang's connect fails at once, inside the guard that each version has around it, and no socket is kept.
Leaving the address out would end the bootstrap thread of Mooncake up to 0.5.21, which reads four frames unguarded. No
generation is sent: from 0.5.22 on that means "no deferred acknowledgement".

A room number is all that a sender is known by. So a number that a living worker has open at this address is never
aborted: it may be another rank of the same request, which fails it within moments and leaves it, or the same number
used again. It is looked at again for `patience_s`, then left alone.
"""

from __future__ import annotations

import importlib
import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from ..errors import CoordinatorError, StoreUnavailable

log = logging.getLogger("coordinator")

LOOK_AGAIN_S = 0.1  # pace of looking whether a number that lives elsewhere is free
SEND_S = 2.0  # for connecting to all ranks together
RANK_S = 0.5  # for a rank that is connected and takes no more
LINGER_S = 1.0  # for what is still on its way when the sockets are closed
NOWHERE = (b"127.0.0.1", b"-1")  # return address: ZMQ refuses this port without trying

Rank = tuple[str, int]


class Aborts:
    """What the node calls with orphans. `ranks` gives (ip, port) of each rank, `open_among` the rooms that live on."""

    def __init__(
        self, ranks: Callable[[], list[Rank]], open_among: Callable[[list[int]], set[int]], patience_s: float
    ) -> None:
        self._ranks, self._open_among, self._patience_s = ranks, open_among, patience_s
        self._closed = threading.Event()
        self.counters = dict.fromkeys(("rooms_aborted", "messages_sent", "ranks_missed", "rooms_left"), 0)

    def close(self) -> None:
        """Send nothing any more; a call that waits returns soon. Repeatable."""
        self._closed.set()

    def __call__(self, worker: str, rooms: list[int]) -> None:
        """Abort `rooms` of `worker`, which is gone. Returns when nothing is left to do for them; never raises."""
        try:
            left = self._abort_when_free(worker, rooms)
        except CoordinatorError as exc:  # not trouble that passes: a permission, or the node was closed
            left = len(rooms)
            log.warning("aborts_given_up worker=%s rooms=%d error=%r", worker, left, str(exc))
        except Exception:
            left = len(rooms)
            log.exception("aborts_failed worker=%s rooms=%d", worker, left)
        self.counters["rooms_left"] += left

    def _abort_when_free(self, worker: str, rooms: list[int]) -> int:
        """Abort each room once nobody living has it open. Answers how many were left alone."""
        rest, end_s = list(rooms), time.monotonic() + self._patience_s
        while not self._closed.is_set():
            try:
                living = self._open_among(rest)
            except StoreUnavailable:  # nobody knows who lives: wait for the store, it holds the orphans too
                end_s = time.monotonic() + self._patience_s
                self._closed.wait(LOOK_AGAIN_S)
                continue
            self._send(worker, [room for room in rest if room not in living])
            rest = [room for room in rest if room in living]
            if not rest or time.monotonic() > end_s:
                break
            self._closed.wait(LOOK_AGAIN_S)
        if rest:
            log.warning("orphans_live_on worker=%s rooms=%d: a living worker has them open", worker, len(rest))
        return len(rest)

    def _send(self, worker: str, rooms: list[int]) -> None:
        ranks = self._ranks() if rooms else []
        if not ranks:  # no rank has registered, so none has a sender
            return
        missed = send_aborts(ranks, rooms)
        for (ip, port), error in missed:
            log.warning("abort_not_sent rank=%s:%d worker=%s rooms=%d error=%r", ip, port, worker, len(rooms), error)
        sent = (len(ranks) - len(missed)) * len(rooms)
        self.counters["rooms_aborted"] += len(rooms)
        self.counters["messages_sent"] += sent
        self.counters["ranks_missed"] += len(missed)
        log.warning("orphans_aborted worker=%s rooms=%d ranks=%d messages=%d", worker, len(rooms), len(ranks), sent)


def send_aborts(ranks: Sequence[Rank], rooms: Iterable[int]) -> list[tuple[Rank, str]]:
    """Send one ABORT per room to each rank; answers the ranks that did not take all, with the error. Best effort.

    Waits at most about SEND_S + LINGER_S, and RANK_S for each rank that hangs; leaves nothing open.
    """
    zmq: Any = importlib.import_module("zmq")  # SGLang brings it
    messages = [(b"ABORT", str(room).encode("ascii"), *NOWHERE) for room in rooms]
    missed: list[tuple[Rank, str]] = []
    waiting: dict[Any, Rank] = {}
    context, poller, end_s = zmq.Context(), zmq.Poller(), time.monotonic() + SEND_S
    try:
        for rank in ranks:
            try:
                socket = _connect(context, zmq, rank)
            except zmq.ZMQError as exc:
                missed.append((rank, str(exc)))
            else:
                waiting[socket] = rank
                poller.register(socket, zmq.POLLOUT)
        while waiting and (left_s := end_s - time.monotonic()) > 0:
            for socket, _ in poller.poll(1000 * left_s):  # connected: a rank that is gone keeps no other waiting
                poller.unregister(socket)
                rank = waiting.pop(socket)
                try:
                    for message in messages:
                        socket.send_multipart(message)
                except zmq.ZMQError as exc:
                    missed.append((rank, str(exc)))
    finally:
        context.destroy(linger=round(1000 * LINGER_S))
    return missed + [(rank, f"no connection within {SEND_S:g} s") for rank in waiting.values()]


def _connect(context: Any, zmq: Any, rank: Rank) -> Any:
    """A PUSH socket that takes a message only when it has a connection (IMMEDIATE)."""
    ip, port = rank
    socket = context.socket(zmq.PUSH)
    socket.setsockopt(zmq.LINGER, round(1000 * LINGER_S))
    socket.setsockopt(zmq.SNDTIMEO, round(1000 * RANK_S))
    socket.setsockopt(zmq.IMMEDIATE, 1)
    socket.setsockopt(zmq.IPV6, int(":" in ip))
    socket.connect(f"tcp://[{ip}]:{port}" if ":" in ip else f"tcp://{ip}:{port}")
    return socket
