"""Faults that were found in review, each with the shortest way to bring it about again."""

from __future__ import annotations

import asyncio
import itertools
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, cast

import pytest
import redis
import redis.asyncio.sentinel
from fleet import HERE, PATIENCE_S, Fleet, Watched, fast, hold
from scriptlab import A, Lab, N
from servers import Server, free_port
from util import wait_until

from coordinator import Room, Settings, Status, Worker
from coordinator.backends import NixlBackend
from coordinator.decide.detector import Detector, Evidence
from coordinator.decide.ledger import Ledger
from coordinator.errors import ConfigError, CoordinatorError, WorkerClosed
from coordinator.runtime import janitor
from coordinator.runtime.probe import Sight
from coordinator.store.client import AsyncStore
from coordinator.store.connect import parse_url
from coordinator.store.embedded import owned_command
from coordinator.store.ops import Op, Ops

ONE, TWO = "127.0.0.1:9001", "127.0.0.1:9002"  # nothing is sent there: the probe is a stub
OK = Sight(Evidence.OK, "", "HTTP 200")
MISCONFIGURED = Sight(Evidence.MISCONFIGURED, "", "HTTP 404")
DEAD = Sight(Evidence.REFUSED, "", "refused")
HOUR_S = 3600


class Stub:
    """A probe that says what the test puts into `say`, and counts its looks by address."""

    def __init__(self) -> None:
        self.say: dict[str, Sight | BaseException] = {}
        self.looks: dict[str, int] = {}

    async def __call__(self, address: str) -> Sight:
        self.looks[address] = self.looks.get(address, 0) + 1
        answer = self.say.get(address, OK)
        if isinstance(answer, BaseException):
            raise answer
        return answer

    async def aclose(self) -> None:
        """Nothing is held."""


@pytest.fixture
def fleet(redis_url: str) -> Iterator[Fleet]:
    with Fleet(redis_url, settings=quick()) as fleet:
        yield fleet


@pytest.fixture
def stub() -> Stub:
    return Stub()


def quick(**given: Any) -> Settings:
    """Shorter than the fleet's: the nodes are stubs."""
    return fast(**{"lease_s": 1.0, "probe_timeout_s": 0.2, **given})


def failed(watched: Watched, address: str, room: int) -> bool:
    return watched.worker.status(address, room) is Status.FAILED


def crashed(fleet: Fleet, address: str, worker: str, room: int) -> None:
    """A worker that had this room open died and was reaped; the room is an orphan."""
    lab = Lab(fleet.redis, settings=fleet.settings)
    lab.open(worker, [room], address=address)
    lab.run(lab.ops.reap_worker(address, worker, "tester", "lease expired", leaving=True))


# -- telling ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [SystemExit, asyncio.CancelledError, KeyboardInterrupt])
def test_a_callback_that_raises_no_exception_does_not_end_telling(
    fleet: Fleet, stub: Stub, error: type[BaseException]
) -> None:
    """SystemExit, CancelledError and the like from one callback are counted, and the next room is still told."""
    told: list[int] = []

    def callback(room: Room, failure: object) -> None:
        told.append(room.id)
        if len(told) == 1:
            raise error

    a = fleet.worker(probe=stub)
    a.worker.on_failure(callback)
    a.join(ONE, [1, 2])
    a.worker.abort(ONE, 1, "first")
    wait_until(lambda: told == [1], PATIENCE_S, "the first room is told")
    a.worker.abort(ONE, 2, "second")
    wait_until(lambda: told == [1, 2], PATIENCE_S, "the second room is told")
    assert a.worker.health()["counters"]["callback_errors"] == 1


def test_a_hook_that_raises_no_exception_does_not_stop_the_verdict(fleet: Fleet, stub: Stub) -> None:
    """SystemExit in an on_node_ended hook: the rooms fail all the same and the worker goes on."""

    def hook(address: str) -> None:
        raise SystemExit(1)

    a = fleet.worker(probe=stub)
    a.worker.on_node_ended(hook)
    a.join(ONE, [1])
    a.worker.fail_node(ONE, timeout_s=PATIENCE_S)
    a.await_told(1)
    a.join(TWO, [2])
    assert a.worker.health()["counters"]["callback_errors"] == 1


def test_no_thread_for_the_delivery_once(fleet: Fleet, stub: Stub, monkeypatch: pytest.MonkeyPatch) -> None:
    """A delivery thread that could not be started raises nothing, and the next failure tells both."""
    a = fleet.worker(probe=stub)
    a.join(ONE, [1, 2])
    start = threading.Thread.start
    refused: list[str] = []

    def once(thread: threading.Thread) -> None:
        if "delivery" in thread.name and not refused:
            refused.append(thread.name)
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", once)
    assert a.worker.abort(ONE, 1, "first")
    assert len(refused) == 1
    assert a.worker.abort(ONE, 2, "second")
    a.await_told(2)
    assert a.told_rooms() == {1: 1, 2: 1}


# -- probing ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [asyncio.CancelledError(), SystemExit(1)])
def test_a_probe_that_raises_no_exception_once(fleet: Fleet, stub: Stub, error: BaseException) -> None:
    """A probe that ends with CancelledError or SystemExit is one failed look: the address is probed again."""
    stub.say[ONE] = error
    a = fleet.worker(probe=stub)
    a.worker.join(ONE, 1)
    wait_until(lambda: a.worker.health()["counters"].get("probe_errors"), PATIENCE_S, "the bad look")
    stub.say[ONE] = DEAD
    wait_until(lambda: failed(a, ONE, 1), PATIENCE_S, "the room fails")


def test_any_answer_ends_unreachable(fleet: Fleet, stub: Stub) -> None:
    """A node that this worker alone gave up on may be joined again when it answers, even if only with 404."""
    stub.say[ONE] = MISCONFIGURED
    a, b = fleet.worker("a", probe=stub), fleet.worker("b", probe=Stub())
    b.join(ONE, [5])
    a.join(ONE, [1])
    wait_until(lambda: stub.looks.get(ONE, 0) > 0, PATIENCE_S, "the first look")
    stub.say[ONE] = DEAD
    wait_until(lambda: a.state(ONE) == "unreachable", PATIENCE_S, "a gives up")
    stub.say[ONE] = MISCONFIGURED
    wait_until(lambda: a.state(ONE) != "unreachable", PATIENCE_S, "a sees that it answers")
    a.join(ONE, [2])
    assert not failed(a, ONE, 2)


@pytest.mark.parametrize("key", ["suspects", "pending"])
def test_a_spoilt_key_does_not_keep_a_dead_node(fleet: Fleet, stub: Stub, key: str) -> None:
    """Where votes or verdicts are refused for good, the worker decides for itself: rooms at a dead node fail."""
    a = fleet.worker(probe=stub)
    a.join(ONE, [1])
    a.join(TWO, [2])
    wait_until(lambda: a.knows(ONE), PATIENCE_S, "a first good look")
    spoilt = getattr(fleet.keys, key)(ONE)
    fleet.redis.delete(spoilt)
    fleet.redis.set(spoilt, "x", ex=HOUR_S)
    stub.say[ONE] = DEAD
    wait_until(lambda: failed(a, ONE, 1), PATIENCE_S, "the room at the dead node fails")
    assert not failed(a, TWO, 2)


def test_a_node_under_suspicion_is_not_probed_with_every_answer(
    fleet: Fleet, stub: Stub, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One vote of another worker asks for a look here once, however many syncs are answered meanwhile."""
    slow = quick(probe_interval_s=30.0)
    a, b = fleet.worker("a", probe=stub, settings=slow), fleet.worker("b", probe=Stub(), settings=slow)
    a.join(ONE, [1])
    b.join(ONE, [1])
    fleet.store.run(Ops(slow).suspect(ONE, b.id, fleet.epoch(ONE), True, "trouble of its own"))
    wait_until(lambda: a.state(ONE) == "suspect", PATIENCE_S, "a hears of it")
    asked: list[Detector] = []
    monkeypatch.setattr(Detector, "ask", lambda detector, address: asked.append(detector))
    for room in range(100, 150):
        a.join(ONE, [room])
    assert a.state(ONE) == "suspect"
    assert asked.count(a.worker._core.detector) <= 2  # the message may come after the state, and a turn may be granted


def test_probing_goes_on_after_the_clock_stepped_back(fleet: Fleet) -> None:
    """A store whose clock is behind the last probe of all grants the next one all the same, once."""
    lab = Lab(fleet.redis, settings=fleet.settings)
    lab.open(A, [1], address=N)
    fleet.redis.hset(lab.keys.node(N), "probe_ms", int((time.time() + HOUR_S) * 1000))
    assert lab.run(lab.batch(A, 2, count=1)).turns == 1
    assert lab.run(lab.batch(A, 3, count=1)).turns == 0


def test_a_vote_that_waited_while_the_node_answered_is_not_cast(fleet: Fleet, stub: Stub) -> None:
    """A vote whose turn comes after the node has answered reaches the store no more."""
    a = fleet.worker(probe=stub)
    a.join(ONE, [1])
    wait_until(lambda: a.knows(ONE), PATIENCE_S, "a first good look")
    book, beat = a.worker._ledger.book(ONE), a.worker._heartbeat
    assert book is not None
    votes = a.worker._thread.run(beat._send_vote(book, True, "late"), PATIENCE_S)
    assert votes is not None
    assert votes.stale
    assert fleet.events(ONE, "vote") == []


# -- the store ----------------------------------------------------------------------------------------------------


class Counting:
    """A client whose pool does not wait; knows how many calls ran at once, and is its own pipeline."""

    def __init__(self) -> None:
        self.now = self.most = self.done = 0

    async def execute(self, raise_on_error: bool = False) -> list[list[str]]:
        self.now += 1
        self.most = max(self.most, self.now)
        await asyncio.sleep(0.001)
        self.now, self.done = self.now - 1, self.done + 1
        return [["DROPPED"]]

    async def execute_command(self, *words: Any) -> list[str]:
        return (await self.execute())[0]

    def pipeline(self, transaction: bool) -> Pipe:
        return Pipe(self)


class Pipe:
    """What is queued in it is one call."""

    def __init__(self, client: Counting) -> None:
        self.execute = client.execute

    def execute_command(self, *words: Any) -> None:
        """Queued."""


def test_the_store_is_never_asked_more_at_once_than_it_has_connections() -> None:
    """Whatever is asked together, three calls run at once: the sync loop's and two others (the fourth listens)."""

    async def crowd() -> Counting:
        client = Counting()
        store = AsyncStore(client)
        op: Op[Any] = Ops(fast()).drain_drop(ONE, "orphans:w", "tester")
        some = [[store.command("HGETALL", "k"), store.run(op), store.many([op]), store.once(op)] for _ in range(20)]
        await asyncio.gather(*itertools.chain.from_iterable(some), *[store.many([op], sync=True) for _ in range(20)])
        return client

    client = asyncio.run(crowd())
    assert client.most == 3
    assert client.done == 100


def test_many_threads_that_ask_do_not_take_the_store_from_the_sync_loop(
    redis_server: Server, fleet: Fleet, stub: Stub, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eight threads in node_info over a pool that does not wait (Sentinel's): no sync fails, nobody gets an error."""

    async def found(*_: object, **__: object) -> tuple[str, int]:
        return "127.0.0.1", redis_server.port

    monkeypatch.setattr(redis.asyncio.sentinel.Sentinel, "discover_master", found)
    a = fleet.worker(probe=stub, url=f"redis+sentinel://127.0.0.1:{free_port()}/mymaster")
    addresses = [f"127.0.0.1:{port}" for port in range(10000, 10030)]
    a.join(ONE, [1])
    errors: list[CoordinatorError] = []

    def ask() -> None:
        for _ in range(50):
            try:
                a.worker.node_info(ONE)
            except CoordinatorError as exc:
                errors.append(exc)

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for room in itertools.count():
        if not any(thread.is_alive() for thread in threads):
            break
        a.worker.join(addresses[room % len(addresses)], room)
        time.sleep(0.001)
    a.flush()
    assert errors == []
    assert a.worker.health()["counters"].get("sync_errors", 0) == 0


def test_close_frees_the_threads_that_wait(stub: Stub) -> None:
    """Threads in flush and fail_node of a worker whose store is away get WorkerClosed when it is closed."""
    url, ended = f"redis://127.0.0.1:{free_port()}/0", cast("dict[str, BaseException]", {})
    worker = Worker(url, settings=fast(retry_s=300.0), probe=stub)

    def wait(name: str, call: Callable[[], object]) -> threading.Thread:
        def run() -> None:
            try:
                call()
            except CoordinatorError as exc:
                ended[name] = exc

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        return thread

    worker.join(ONE, 1)
    threads = [wait("flush", lambda: worker.flush(300)), wait("fail_node", lambda: worker.fail_node(ONE))]
    hold(lambda: all(thread.is_alive() for thread in threads), 0.3, "both wait")
    worker.close()
    wait_until(lambda: not any(thread.is_alive() for thread in threads), PATIENCE_S, "both threads go on")
    assert {name: type(exc) for name, exc in ended.items()} == {"flush": WorkerClosed, "fail_node": WorkerClosed}


def test_goodbye_is_said_where_the_store_can_hear_it(fleet: Fleet, stub: Stub) -> None:
    """One address whose keys the store refuses: close leaves the other one at once."""
    a = fleet.worker(probe=stub, settings=quick(lease_s=60.0, retention_s=300.0))
    a.join(ONE, [1])
    a.join(TWO, [2])
    fleet.redis.delete(fleet.keys.rooms(TWO, a.id))
    fleet.redis.set(fleet.keys.rooms(TWO, a.id), "x", ex=HOUR_S)
    a.worker.join(TWO, 3)
    assert a.id in fleet.listed(ONE)
    a.worker.close()
    assert fleet.listed(ONE) == set()


def test_the_first_room_at_a_new_address_wakes_the_loop(fleet: Fleet, stub: Stub) -> None:
    """A room at an address that was never used reaches the store at once, not with the next tick."""
    a = fleet.worker(probe=stub, settings=quick(tick_s=60.0, lease_s=200.0, retention_s=900.0))
    a.join(ONE, [1])
    book = a.worker._ledger.book(ONE)
    assert book is not None
    wait_until(lambda: book.asleep, PATIENCE_S, "the loop has nothing to do")
    a.worker.join(TWO, 2)
    wait_until(lambda: fleet.rooms(TWO, a.id) == {2}, PATIENCE_S, "the room is stored")


def test_a_verdict_that_another_reached_is_applied_before_fail_node_returns(fleet: Fleet, stub: Stub) -> None:
    """fail_node that finds the node failed already: the rooms here have failed when it returns, message or not."""
    slow = quick(tick_s=15.0, lease_s=60.0, retention_s=300.0)
    a, b = fleet.worker("a", probe=stub, settings=slow), fleet.worker("b", probe=stub, settings=slow)
    a.join(ONE, [1])
    b.join(ONE, [2])
    a.worker._listener.heard = lambda kind, address: None  # the message is lost, which may happen
    assert not b.worker.fail_node(ONE, "operator").already
    assert a.worker.fail_node(ONE, "operator").already
    assert failed(a, ONE, 1)


# -- chores -------------------------------------------------------------------------------------------------------


def test_adoption_sees_past_sixty_four_gone_addresses(fleet: Fleet, stub: Stub) -> None:
    """A crashed worker at an address that nobody uses is reaped, however many older addresses are gone."""
    fleet.store.run(fleet.ops.discover([f"127.0.0.1:{port}" for port in range(20000, 20100)]))
    lab = Lab(fleet.redis, settings=fleet.settings)
    lab.open("dead#00000001", [7], address=TWO)
    fleet.store.run(fleet.ops.discover([TWO]))
    a = fleet.worker(probe=stub)
    a.join(ONE, [1])
    wait_until(lambda: not fleet.rooms(TWO, "dead#00000001"), PATIENCE_S, "the dead worker is reaped")


def test_a_forgotten_address_takes_its_connection_along(
    fleet: Fleet, stub: Stub, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node that restarted while its address was forgotten here is connected to anew."""

    class Engine:
        def connect(self, address: str, room: int, peer: Any) -> str:
            return f"session-to-{peer.instance}"

        def forget(self, endpoint: str) -> None:
            """A session is only a text here."""

        def release(self, *_: object) -> None:
            """Nothing is held."""

        def evidence(self, error: object) -> str:
            return ""

    monkeypatch.setattr(janitor, "FORGET_LEASES", 0.2)
    stub.say[ONE] = Sight(Evidence.OK, "I1", "")
    first = fleet.prefill(ONE, instance="I1")
    assert first.wait_announced(PATIENCE_S)
    a = fleet.worker(probe=stub)
    backend = NixlBackend(a.worker, cast(Any, Engine()))
    room = backend.open(ONE, 1)
    a.flush()
    assert backend.endpoint(ONE) == "session-to-I1"
    room.leave()
    wait_until(lambda: a.worker._ledger.book(ONE) is None, PATIENCE_S, "a forgets the address")
    first.close()
    stub.say[ONE] = Sight(Evidence.OK, "I2", "")
    assert fleet.prefill(ONE, instance="I2").wait_announced(PATIENCE_S)
    backend.open(ONE, 2)
    a.flush()
    wait_until(lambda: backend.endpoint(ONE) == "session-to-I2", PATIENCE_S, "a connection to the new node")


# -- nodes --------------------------------------------------------------------------------------------------------


def test_orphans_that_nobody_asks_for_do_not_stay_pending(fleet: Fleet) -> None:
    """Under a node without on_orphans they can be read for a while, then set and entry are gone."""
    node = fleet.prefill(ONE, settings=quick(lease_s=0.5, retention_s=2.0, linger_s=1.0))
    assert node.wait_announced(PATIENCE_S)
    pending = fleet.keys.pending(ONE)
    crashed(fleet, ONE, "w#00000001", 7)
    assert fleet.redis.hgetall(pending) == {"orphans:w#00000001": "1"}
    wait_until(lambda: fleet.redis.hlen(pending) == 0, PATIENCE_S, "nothing is pending")


def test_orphans_are_told_behind_many_leftovers(fleet: Fleet) -> None:
    """Hundreds of snapshots that nobody acknowledged do not hide an orphan from the node."""
    told: list[str] = []
    node = fleet.prefill(ONE, on_orphans=lambda worker, rooms: told.append(worker))
    assert node.wait_announced(PATIENCE_S)
    pending = fleet.keys.pending(ONE)
    fleet.redis.hset(pending, mapping={f"lost:{n}:gone{n}#{n:08x}": 1 for n in range(1, 601)})
    fleet.redis.expire(pending, HOUR_S)
    workers = {f"w#{number:08x}" for number in range(8)}
    for worker in workers:
        crashed(fleet, ONE, worker, 7)
    wait_until(lambda: set(told) == workers, PATIENCE_S, "every orphan is told")


def test_snapshots_of_owners_that_died_do_not_stay_pending(fleet: Fleet) -> None:
    """An entry that nobody acknowledges goes when its snapshot has expired, while the node lives on."""
    node = fleet.prefill(ONE, settings=quick(lease_s=0.5, retention_s=2.0, linger_s=1.0))
    assert node.wait_announced(PATIENCE_S)
    pending = fleet.keys.pending(ONE)
    fleet.redis.hset(pending, mapping={f"lost:{n}:gone#{n:08x}": 1 for n in range(1, 4)})
    fleet.redis.expire(pending, HOUR_S)
    wait_until(lambda: fleet.redis.hlen(pending) == 0, PATIENCE_S, "nothing is pending")


def test_announcing_does_not_renew_what_is_pending(fleet: Fleet) -> None:
    """A node's announcement leaves the time to live of the pending snapshots alone."""
    lab = Lab(fleet.redis, settings=fleet.settings)
    lab.node()
    fleet.redis.hset(lab.keys.pending(N), "lost:1:gone#00000001", 1)
    fleet.redis.expire(lab.keys.pending(N), 2 * HOUR_S)
    lab.run(lab.register("tick"))
    assert fleet.redis.ttl(lab.keys.pending(N)) > HOUR_S


def test_a_node_aborts_rooms_of_a_worker_that_came_back(
    fleet: Fleet, stub: Stub, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker that left the address for a while is listed as `<id>.N`; abort with its id finds it."""
    monkeypatch.setattr(janitor, "FORGET_LEASES", 0.2)
    node = fleet.prefill(ONE)
    assert node.wait_announced(PATIENCE_S)
    a = fleet.worker(probe=stub)
    a.join(ONE, [1])
    a.worker.leave(ONE, 1)
    wait_until(lambda: a.worker._ledger.book(ONE) is None, PATIENCE_S, "a forgets the address")
    a.join(ONE, [2])
    assert fleet.listed(ONE).isdisjoint({a.id})
    assert node.abort(a.id, 2, "out of memory")
    wait_until(lambda: failed(a, ONE, 2), PATIENCE_S, "the room fails")
    assert not node.abort(a.id, 99, "not open")


HANGING = """
import sys, threading
sys.path.insert(0, sys.argv[2])
from coordinator import PrefillNode
from fleet import fast
asked = threading.Event()
def hang(worker, rooms):
    asked.set()
    threading.Event().wait()
node = PrefillNode("127.0.0.1:9001", sys.argv[1], settings=fast(), on_orphans=hang)
print("up", node.wait_announced(20), flush=True)
print("asked", asked.wait(30), flush=True)
node.close()
print("closed", flush=True)
"""


def test_a_process_ends_although_its_orphan_callback_hangs(fleet: Fleet, redis_url: str) -> None:
    """A callback that never returns keeps neither close() nor the process from ending."""
    command = owned_command([sys.executable, "-c", HANGING, redis_url, str(HERE)])
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(HERE.parent)}
    child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == "up True\n"
        crashed(fleet, ONE, "w#00000001", 7)
        assert child.stdout.readline() == "asked True\n"
        assert child.stdout.readline() == "closed\n"
        assert child.wait(PATIENCE_S) == 0
    finally:
        child.kill()
        child.communicate()


# -- the ledger ---------------------------------------------------------------------------------------------------


def test_a_spelling_entered_while_its_book_is_forgotten() -> None:
    """The loop forgets an address between two steps of a join under another spelling: the next join works."""
    ledger = Ledger("w#00000001", time.monotonic)
    book = ledger.open_book("host:80")

    class Books(dict[str, Any]):
        """Forgets the book just before the other spelling is entered."""

        forgotten = False

        def setdefault(self, key: str, value: Any = None) -> Any:
            if key == "HOST:80" and not self.forgotten:
                self.forgotten = ledger.forget(book)
            return super().setdefault(key, value)

    books = Books(ledger._books)
    ledger._books = books
    assert ledger.join("HOST:80", 1).id == 1
    assert books.forgotten
    assert ledger.join("HOST:80", 2).id == 2
    assert {room.id for room in ledger.rooms("host:80")} == {1, 2}


def test_addresses_that_were_forgotten_leave_nothing_behind() -> None:
    """Nodes come and go for weeks: the ledger holds nothing of them, and no id is used twice at an address."""
    ledger = Ledger("w#00000001", time.monotonic)
    ids = []
    for number in range(500):
        book = ledger.open_book(f"127.0.0.1:{1000 + number % 250}")
        ids.append((book.address, book.worker))
        assert ledger.forget(book)
    assert len(set(ids)) == 500
    sizes = {name: len(value) for name, value in vars(ledger).items() if isinstance(value, (dict, set, list))}
    assert max(sizes.values()) == 0, sizes


@pytest.mark.parametrize("deadline_s", ["5", [], {}, 0, -1.0, float("nan")])
def test_a_deadline_that_is_no_positive_number_is_refused(deadline_s: Any) -> None:
    """A deadline of the wrong type is a ConfigError that names it, not a TypeError."""
    ledger = Ledger("w#00000001", time.monotonic)
    with pytest.raises(ConfigError, match="deadline_s="):
        ledger.join(ONE, 1, deadline_s=deadline_s)
    assert ledger.find(ONE, 1) is None


# -- URLs and scripts ---------------------------------------------------------------------------------------------


def test_no_password_in_the_error_of_a_url_that_cannot_be_read() -> None:
    """A password with a character that urlsplit refuses is not quoted in the error."""
    with pytest.raises(ConfigError) as caught:
        parse_url("redis://u:hunter\u21052@127.0.0.1:6379/0")
    assert "hunter" not in str(caught.value)


@pytest.mark.parametrize("scheme", ["redis", "rediss", "redis+cluster"])
def test_no_password_in_the_repr_of_a_target(scheme: str) -> None:
    """A parsed URL in a log or a traceback does not show its password."""
    target = parse_url(f"{scheme}://u:hunter2@127.0.0.1")
    assert target.password == "hunter2"
    assert "hunter2" not in repr(target)


def test_a_verdict_that_cannot_be_noted_moves_no_rooms(fleet: Fleet) -> None:
    """If the pending hash refuses the entry, the worker's rooms are still where they were."""
    lab = Lab(fleet.redis, settings=fleet.settings)
    lab.open(A, [1, 2], address=N)
    fleet.redis.set(lab.keys.pending(N), "x", ex=HOUR_S)
    with pytest.raises(redis.exceptions.ResponseError):
        lab.run(lab.fail())
    assert fleet.rooms(N, A) == {1, 2}
