"""Scripts on a bench: run one Op on any lane, look at everything the store holds, and a catalogue of situations.

`CATALOGUE` names, for every script, the situations that lead to each of its status words. Tests take what they
want to prove from it: that the words are answered, that a repetition is harmless, that keys are declared.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import redis

from coordinator.config import Settings
from coordinator.protocol import Batch, NodeView, Reaped, Registration, Stats, SyncReply, Verdict, Votes
from coordinator.store.client import SyncStore
from coordinator.store.ops import Op, Ops
from coordinator.store.scripts import load

N, M = "10.0.0.5:8998", "10.0.0.5:899"  # M is a prefix of N
A, B, C = "decode-0#aaaaaaaa", "decode-1#bbbbbbbb", "decode-2#cccccccc"
BIG = 8804230600348159981  # past 2**53: no double holds it
#: What a repetition may renew: the server's clock of the last use, nothing else.
CLOCKS = ("seen_ms", "announced_ms")

Dump = dict[str, Any]


class Lab:
    """Runs Ops on one client. With `declared` each script starts with "#!lua", so that the server checks its keys."""

    def __init__(self, client: redis.Redis, declared: bool = False, settings: Settings | None = None) -> None:
        self.client, self.declared = client, declared
        self.ops = Ops(settings or Settings())
        self.keys = self.ops.keys
        self.store = SyncStore(client)

    def raw(self, op: Op[Any]) -> list[Any]:
        """The reply as it came."""
        script = load(op.script)
        if self.declared:
            return cast(list[Any], self.client.eval("#!lua\n" + script.text, len(op.keys), *op.keys, *op.args))
        try:
            return cast(list[Any], self.client.evalsha(script.sha, len(op.keys), *op.keys, *op.args))
        except redis.exceptions.NoScriptError:
            return cast(list[Any], self.client.eval(script.text, len(op.keys), *op.keys, *op.args))

    def run(self, op: Op[Any]) -> Any:
        return op.parse(self.raw(op))

    # -- what a test arranges -----------------------------------------------------------------------------------

    def batch(
        self,
        worker: str = A,
        number: int = 1,
        adds: Sequence[int] = (),
        removes: Sequence[int] = (),
        *,
        mode: str = "delta",
        epoch: int = 1,
        count: int | None = None,
        address: str = N,
        node: NodeView | None = None,
        stats: Stats | None = None,
    ) -> Op[SyncReply]:
        held = len(adds) if count is None else count
        view = node or NodeView(epoch)
        return self.ops.sync(Batch(address, worker, number, mode, view, held, tuple(adds), tuple(removes), stats))

    def open(self, worker: str, rooms: Sequence[int], *, number: int = 1, epoch: int = 1, address: str = N) -> None:
        """These rooms are all that the worker has at the address."""
        reply = self.run(self.batch(worker, number, rooms, mode="reset", epoch=epoch, address=address))
        assert reply.status == "OK", reply

    def register(self, how: str = "start", instance: str = "life-1", **more: Any) -> Op[Registration]:
        call = {"address": N, "epoch": 1, "call": f"{how}:{instance}", "by": "node", **more}
        return self.ops.register_node(how=how, instance=instance, **call)

    def node(self, instance: str = "life-1", **more: Any) -> None:
        outcome = self.run(self.register("start", instance, **more)).outcome
        assert outcome in ("NEW", "SAME", "REPLACED"), outcome

    def fail(self, epoch: int = 1, call: str = "call-1", workers: Sequence[str] | None = None) -> Op[Verdict]:
        """fail_node with the workers that the store lists, unless told others."""
        if workers is None:
            workers = cast(list[str], self.client.zrange(self.keys.workers(N), 0, -1))
        return self.ops.fail_node(N, epoch, call, B, "cable pulled", workers)

    def reap(self, worker: str = A, leaving: bool = False) -> Op[Reaped]:
        return self.ops.reap_worker(N, worker, B, "lease expired", leaving)

    def expire(self, worker: str) -> None:
        """Its lease has run out while others went on."""
        self.client.zadd(self.keys.workers(N), {worker: 1}, xx=True)

    def dump(self) -> Dump:
        """Every key with its whole value; clocks of the last use and lease deadlines are left out."""
        return {key: self._value(key) for key in sorted(cast("list[str]", list(self.client.scan_iter(count=1000))))}

    def _value(self, key: str) -> Any:
        kind = cast(str, self.client.type(key))
        if kind == "hash":
            value = cast("dict[str, str]", self.client.hgetall(key))
            return {name: text for name, text in value.items() if name not in CLOCKS}
        if kind == "set":
            return self.client.smembers(key)
        if kind == "zset":
            return set(cast("list[str]", self.client.zrange(key, 0, -1)))
        if kind == "stream":
            return self.client.xrange(key)
        raise AssertionError(f"{key} is a {kind}")


def timeless(value: Any) -> Any:
    """A typed answer without the ages in it: two calls cannot read the same clock."""
    if isinstance(value, SyncReply):
        value = replace(value, turn_ms=0)
    if isinstance(value, (SyncReply, Verdict, Registration)):
        return replace(value, node=replace(value.node, failed_age_ms=None))
    return replace(value, left_ms=0) if isinstance(value, Reaped) else value


@dataclass(frozen=True)
class Case:
    """One situation: `arrange` brings the store there and gives the Op that answers `status`."""

    script: str
    status: str
    name: str
    arrange: Callable[[Lab], Op[Any]]

    @property
    def id(self) -> str:
        return f"{self.script}-{self.status}-{self.name.replace(' ', '_')}"


CATALOGUE: list[Case] = []


def _case(script: str, status: str, name: str) -> Callable[[Callable[[Lab], Op[Any]]], Callable[[Lab], Op[Any]]]:
    def add(arrange: Callable[[Lab], Op[Any]]) -> Callable[[Lab], Op[Any]]:
        CATALOGUE.append(Case(script, status, name, arrange))
        return arrange

    return add


# -- sync -------------------------------------------------------------------------------------------------------


@_case("sync", "OK", "first batch ever")
def _(lab: Lab) -> Op[SyncReply]:
    return lab.batch(A, 1, (1, 2, BIG), mode="reset", epoch=0, stats=Stats(3, 0, 0, "1:bootstrapping:4"))


@_case("sync", "OK", "adds and removes")
def _(lab: Lab) -> Op[SyncReply]:
    lab.open(A, (1, 2, 3))
    return lab.batch(A, 2, (4, 5), (1,), count=4)


@_case("sync", "OK", "nothing but the lease")
def _(lab: Lab) -> Op[SyncReply]:
    lab.open(A, (1,))
    return lab.batch(A, 2, count=1)


@_case("sync", "OK", "a probe turn is due")
def _(lab: Lab) -> Op[SyncReply]:
    lab.open(A, (1,))
    lab.client.hset(lab.keys.node(N), "probe_ms", 1)
    return lab.batch(A, 2, count=1)


@_case("sync", "OK", "the store fell behind")
def _(lab: Lab) -> Op[SyncReply]:
    lab.open(B, (7,))
    view = NodeView(5, "failed", 40, "node_failed", "cable pulled", B, "life-9")
    return lab.batch(A, 3, (1, 2), mode="reset", node=view)


@_case("sync", "OK", "the store is empty")
def _(lab: Lab) -> Op[SyncReply]:
    return lab.batch(A, 9, (1, 2), mode="reset", node=NodeView(5, "alive", 40, "node_failed", "x", B, "life-9"))


@_case("sync", "OK", "the node has failed")
def _(lab: Lab) -> Op[SyncReply]:
    lab.open(A, (1, 2))
    lab.run(lab.fail())
    return lab.batch(A, 2, (3,), epoch=2)


@_case("sync", "OK", "a vote ran out")
def _(lab: Lab) -> Op[SyncReply]:
    lab.open(A, (1, 2))
    lab.run(lab.ops.suspect(N, A, 1, True, "timeout"))
    lab.client.zadd(lab.keys.suspects(N), {A: 1})
    return lab.batch(A, 2, count=2)


@_case("sync", "OK", "a room was marked")
def _(lab: Lab) -> Op[SyncReply]:
    lab.open(A, (1, 2))
    lab.run(lab.ops.abort_room(N, A, 1, "no memory", "node"))
    return lab.batch(A, 2, count=2)


@_case("sync", "OK", "a marked room leaves")
def _(lab: Lab) -> Op[SyncReply]:
    lab.open(A, (1, 2))
    lab.run(lab.ops.abort_room(N, A, 1, "no memory", "node"))
    return lab.batch(A, 2, (), (1,), count=1)


@_case("sync", "STALE", "the epoch ended")
def _(lab: Lab) -> Op[SyncReply]:
    lab.open(A, (1, 2))
    lab.run(lab.fail())
    return lab.batch(A, 2, (3,), count=3)


@_case("sync", "STALE", "the store still holds rooms of it")
def _(lab: Lab) -> Op[SyncReply]:
    lab.open(A, (1, 2))
    lab.run(lab.batch(B, 1, (7,), mode="reset", epoch=4))
    return lab.batch(A, 2, (3,), count=3)


@_case("sync", "RESYNC", "the batch before is missing")
def _(lab: Lab) -> Op[SyncReply]:
    lab.open(A, (1, 2))
    return lab.batch(A, 3, (3,), count=3)


@_case("sync", "RESYNC", "the store is empty")
def _(lab: Lab) -> Op[SyncReply]:
    return lab.batch(A, 9, (3,), count=3, epoch=4)


@_case("sync", "RESYNC", "a delayed batch")
def _(lab: Lab) -> Op[SyncReply]:
    lab.open(A, (1, 2), number=5)
    return lab.batch(A, 4, (3,), count=3)


@_case("sync", "RESYNC", "the set is not what it should be")
def _(lab: Lab) -> Op[SyncReply]:
    lab.open(A, (1, 2))
    lab.client.srem(lab.keys.rooms(N, A), 2)
    return lab.batch(A, 2, (3,), count=3)


@_case("sync", "FENCED", "it was reaped")
def _(lab: Lab) -> Op[SyncReply]:
    lab.open(A, (1, 2))
    lab.open(B, (1,))
    lab.expire(A)
    lab.run(lab.reap(A))
    return lab.batch(A, 2, (3,), count=3)


# -- fail_node --------------------------------------------------------------------------------------------------


@_case("fail_node", "FAILED", "two workers")
def _(lab: Lab) -> Op[Verdict]:
    lab.node()
    lab.open(A, (1, 2, BIG))
    lab.open(B, (1,))
    lab.open(C, ())
    return lab.fail()


@_case("fail_node", "FAILED", "a suspect")
def _(lab: Lab) -> Op[Verdict]:
    lab.open(A, (1,))
    lab.run(lab.ops.suspect(N, A, 1, True, "timeout"))
    return lab.fail()


@_case("fail_node", "FAILED", "nobody there")
def _(lab: Lab) -> Op[Verdict]:
    lab.node()
    return lab.fail()


@_case("fail_node", "FAILED", "an address nobody used")
def _(lab: Lab) -> Op[Verdict]:
    return lab.fail(epoch=0)


@_case("fail_node", "STALE", "the epoch moved")
def _(lab: Lab) -> Op[Verdict]:
    lab.node()
    lab.open(A, (1,))
    lab.run(lab.fail())
    lab.node("life-2")
    return lab.fail(epoch=1, call="call-2")


@_case("fail_node", "STALE", "it has failed already")
def _(lab: Lab) -> Op[Verdict]:
    lab.open(A, (1,))
    lab.run(lab.fail())
    return lab.fail(epoch=2, call="call-2")


@_case("fail_node", "RETRY", "a worker was not declared")
def _(lab: Lab) -> Op[Verdict]:
    lab.open(A, (1,))
    lab.open(B, (1,))
    return lab.fail(workers=[A])


# -- register_node ----------------------------------------------------------------------------------------------


@_case("register_node", "NEW", "the first")
def _(lab: Lab) -> Op[Registration]:
    return lab.register("start", "life-1", info='{"tp": 2}', draining=False)


@_case("register_node", "NEW", "workers were there before")
def _(lab: Lab) -> Op[Registration]:
    lab.open(A, (1,))
    return lab.register("probe", "life-1")


@_case("register_node", "NEW", "after a failure")
def _(lab: Lab) -> Op[Registration]:
    lab.node()
    lab.open(A, (1,))
    lab.run(lab.fail())
    return lab.register("start", "life-2")


@_case("register_node", "SAME", "it goes on")
def _(lab: Lab) -> Op[Registration]:
    lab.node()
    return lab.register("renew", "life-1", draining=True)


@_case("register_node", "SAME", "it goes on though failed")
def _(lab: Lab) -> Op[Registration]:
    lab.node()
    lab.run(lab.fail())
    return lab.register("renew", "life-1", epoch=2)


@_case("register_node", "SAME", "a probe answers again")
def _(lab: Lab) -> Op[Registration]:
    lab.node()
    lab.open(A, (1,))
    lab.run(lab.fail())
    return lab.register("probe", "life-1", epoch=2)


@_case("register_node", "SAME", "a probe without an instance")
def _(lab: Lab) -> Op[Registration]:
    lab.open(A, (1,))
    lab.run(lab.fail())
    return lab.register("probe", "", epoch=2)


@_case("register_node", "REPLACED", "by itself")
def _(lab: Lab) -> Op[Registration]:
    lab.node()
    lab.open(A, (1, 2))
    lab.open(B, (1,))
    return lab.register("start", "life-2", workers=[A, B])


@_case("register_node", "REPLACED", "by a probe, a vote pending")
def _(lab: Lab) -> Op[Registration]:
    lab.node()
    lab.open(A, (1, 2))
    lab.run(lab.ops.suspect(N, A, 1, True, "timeout"))
    return lab.register("probe", "life-2", workers=[A])


@_case("register_node", "PAST", "it was replaced")
def _(lab: Lab) -> Op[Registration]:
    lab.node()
    lab.open(A, (1,))
    lab.node("life-2", workers=[A])
    return lab.register("renew", "life-1")


@_case("register_node", "STALE", "a probe of an ended epoch")
def _(lab: Lab) -> Op[Registration]:
    lab.node()
    lab.open(A, (1,))
    lab.run(lab.fail())
    return lab.register("probe", "life-1", epoch=1)


@_case("register_node", "STALE", "a probe of what nobody knows")
def _(lab: Lab) -> Op[Registration]:
    return lab.register("probe", "life-1", epoch=0)


@_case("register_node", "RETRY", "a worker was not declared")
def _(lab: Lab) -> Op[Registration]:
    lab.node()
    lab.open(A, (1,))
    lab.open(B, (1,))
    return lab.register("start", "life-2", workers=[A])


@_case("register_node", "RETRY", "another epoch")
def _(lab: Lab) -> Op[Registration]:
    lab.node()
    lab.open(A, (1,))
    return lab.register("start", "life-2", epoch=0, workers=[A])


# -- reap_worker ------------------------------------------------------------------------------------------------


@_case("reap_worker", "REAPED", "the lease ran out")
def _(lab: Lab) -> Op[Reaped]:
    lab.open(A, (1, 2, BIG))
    lab.open(B, (1,))
    lab.run(lab.ops.abort_room(N, A, 1, "no memory", "node"))
    lab.run(lab.ops.suspect(N, A, 1, True, "timeout"))
    lab.expire(A)
    return lab.reap(A)


@_case("reap_worker", "REAPED", "it leaves with rooms")
def _(lab: Lab) -> Op[Reaped]:
    lab.open(A, (1, 2))
    return lab.reap(A, leaving=True)


@_case("reap_worker", "REAPED", "it leaves with none")
def _(lab: Lab) -> Op[Reaped]:
    lab.open(A, ())
    return lab.reap(A, leaving=True)


@_case("reap_worker", "REAPED", "it leaves before it came")
def _(lab: Lab) -> Op[Reaped]:
    return lab.reap(A, leaving=True)


@_case("reap_worker", "ALIVE", "within its lease")
def _(lab: Lab) -> Op[Reaped]:
    lab.open(A, (1,))
    return lab.reap(A)


@_case("reap_worker", "ALIVE", "the store was away")
def _(lab: Lab) -> Op[Reaped]:
    lab.open(A, (1,))
    lab.expire(A)
    lab.client.hset(lab.keys.node(N), "seen_ms", 1)
    return lab.reap(A)


@_case("reap_worker", "UNKNOWN", "never seen")
def _(lab: Lab) -> Op[Reaped]:
    lab.open(B, (1,))
    return lab.reap(A)


# -- suspect ----------------------------------------------------------------------------------------------------


@_case("suspect", "VOTES", "a vote")
def _(lab: Lab) -> Op[Votes]:
    lab.open(A, (1,))
    lab.open(B, (1,))
    return lab.ops.suspect(N, A, 1, True, "timeout")


@_case("suspect", "VOTES", "the second vote, in doubt")
def _(lab: Lab) -> Op[Votes]:
    for worker in (A, B, C):
        lab.open(worker, (1,))
    lab.run(lab.ops.suspect(N, B, 1, True, "timeout"))
    return lab.ops.suspect(N, A, 1, True, "timeout", majority=True)


@_case("suspect", "VOTES", "the vote is withdrawn")
def _(lab: Lab) -> Op[Votes]:
    lab.open(A, (1,))
    lab.run(lab.ops.suspect(N, A, 1, True, "timeout"))
    return lab.ops.suspect(N, A, 1, False, "it answers")


@_case("suspect", "VOTES", "a voter is gone")
def _(lab: Lab) -> Op[Votes]:
    lab.open(A, (1,))
    lab.client.zadd(lab.keys.suspects(N), {C: 9e15})
    lab.client.pexpire(lab.keys.suspects(N), 60_000)
    return lab.ops.suspect(N, A, 1, True, "timeout")


@_case("suspect", "STALE", "the epoch ended")
def _(lab: Lab) -> Op[Votes]:
    lab.open(A, (1,))
    lab.run(lab.fail())
    return lab.ops.suspect(N, A, 1, True, "timeout")


@_case("suspect", "STALE", "it has failed already")
def _(lab: Lab) -> Op[Votes]:
    lab.open(A, (1,))
    lab.run(lab.fail())
    return lab.ops.suspect(N, A, 2, True, "timeout")


@_case("suspect", "STALE", "the voter is not listed")
def _(lab: Lab) -> Op[Votes]:
    lab.open(B, (1,))
    return lab.ops.suspect(N, A, 1, True, "timeout")


# -- abort_room, pass_on, drain, discover -----------------------------------------------------------------------


@_case("abort_room", "OK", "an open room")
def _(lab: Lab) -> Op[bool]:
    lab.open(A, (1, BIG))
    return lab.ops.abort_room(N, A, BIG, "no memory", "node")


@_case("abort_room", "UNKNOWN", "not open")
def _(lab: Lab) -> Op[bool]:
    lab.open(A, (1,))
    return lab.ops.abort_room(N, A, 2, "no memory", "node")


PASSED = [(1, "local at decode-3: no memory"), (BIG, "deadline at decode-3: too late")]


@_case("pass_on", "OK", "two siblings have both")
def _(lab: Lab) -> Op[Any]:
    lab.open(A, (1, 2, BIG))
    lab.open(B, (1, BIG))
    return lab.ops.pass_on(N, C, [A, B], PASSED)


@_case("pass_on", "OK", "one has one, one has none")
def _(lab: Lab) -> Op[Any]:
    lab.open(A, (BIG,))
    lab.open(B, ())
    return lab.ops.pass_on(N, C, [A, B], PASSED)


@_case("pass_on", "OK", "nobody knows them")
def _(lab: Lab) -> Op[Any]:
    return lab.ops.pass_on(N, C, [A], PASSED)


def _lost(lab: Lab) -> str:
    lab.open(A, (1, 2, BIG))
    lab.run(lab.fail())
    return f"lost:1:{A}"


@_case("drain", "ROOMS", "a snapshot")
def _(lab: Lab) -> Op[Any]:
    return lab.ops.drain_read(N, _lost(lab))


@_case("drain", "ROOMS", "no snapshot")
def _(lab: Lab) -> Op[Any]:
    return lab.ops.drain_read(N, f"orphans:{A}")


@_case("drain", "ACKED", "readable for a while")
def _(lab: Lab) -> Op[Any]:
    return lab.ops.drain_ack(N, _lost(lab), A, linger_s=30)


@_case("drain", "ACKED", "freed at once")
def _(lab: Lab) -> Op[Any]:
    return lab.ops.drain_ack(N, _lost(lab), A)


@_case("drain", "DROPPED", "orphans")
def _(lab: Lab) -> Op[Any]:
    lab.open(A, (1, 2))
    lab.run(lab.reap(A, leaving=True))
    return lab.ops.drain_drop(N, f"orphans:{A}", "node")


@_case("discover", "OK", "marks and finds")
def _(lab: Lab) -> Op[Any]:
    now_s = lab.client.time()[0]
    lab.client.zadd(lab.keys.addresses, {"10.0.0.6:1": 1, M: (now_s - 60) * 1000})
    lab.client.pexpire(lab.keys.addresses, 60_000)
    return lab.ops.discover([N])
