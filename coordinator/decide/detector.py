"""Who is dead. Evidence in, verdict out; pure: the time comes in, nothing is waited for, no socket is known.

The rules, in the order in which they are asked:

1. Evidence from a time when this worker's own loop was late is dropped, and the probe is made again; but a refused
   connection is not a silence that this worker may have overslept.
2. An answer clears the misses, whatever its status says about configuration (401, 404). 503 before the first
   success is a node that warms up. Everything else that is not an answer is a miss.
3. `max_misses` misses in a row make a vote. A refused or reset connection is tried again within milliseconds; a
   time-out or a bad status waits for the next interval.
4. A node is failed for everybody when enough workers agree. If most of the addresses seem dead at once, the
   worker doubts itself and wants a majority; with nobody else to ask it fails only its own rooms. To know in time,
   the first silence of one address makes it look at all others at once.
5. With the store away, or alone with its opinion for longer than `alone_s`, a worker fails only its own rooms.
   Without the store there is nobody to agree with, and without agreement nothing happens to others.

The suspicion follows the shape of SWIM (Das, Gupta, Motivala 2002) with the self-doubt of Lifeguard (Dadgar,
Phillips, Currey 2018): local health first, then peers, then the verdict.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from ..config import Settings
from ..protocol import Votes

RECHECK_S = 0.03  # between two tries of a refused connection
URGENT_GAP_S = 0.05  # transfer errors come in floods; the address is probed once per gap
OWN_INTERVALS, OWN_ROUNDS = 5, 3  # without a turn for so long a worker looks for itself; a round is a turn for each
SWEEP_LEAD = 0.1  # of an interval: how far a look at everything is ahead of the second look at the first silent one
MASS_LEAST = 3  # fewer addresses than this say nothing about the worker's own network


class Evidence(StrEnum):
    """What one probe saw."""

    OK = "ok"
    MISCONFIGURED = "misconfigured"  # it answered 4xx: alive, but this is not its health path
    UNREADY = "unready"  # it answered 503
    BAD_STATUS = "bad_status"  # it answered another 5xx
    REFUSED = "refused"  # connection refused or reset: somebody is at that host, and not the node
    TIMEOUT = "timeout"  # no answer in time
    UNREACHABLE = "unreachable"  # no route, no such name


ANSWERS = (Evidence.OK, Evidence.MISCONFIGURED)


class Act(StrEnum):
    """What the caller has to do now."""

    NOTHING = "nothing"
    AGAIN = "again"  # probe again at once
    VOTE = "vote"  # record this worker's vote, then ask `counted`
    WITHDRAW = "withdraw"  # take the vote back
    FAIL = "fail"  # fail the node for everybody
    GIVE_UP = "give_up"  # fail this worker's own rooms there, refuse joins until a probe answers


@dataclass(slots=True)
class Watch:
    """What is known of one address. Times are the caller's monotonic seconds."""

    misses: int = 0
    ever_ok: bool = False
    last_probe_s: float | None = None
    last_ok_s: float | None = None
    last: Evidence | None = None
    late: int = 0  # probes in a row that were dropped because this worker was late
    reason: str = ""
    voted_s: float | None = None
    given_up: bool = False
    urgent: bool = False
    again_s: float | None = None  # when a refused connection is tried again
    turns: list[float] = field(default_factory=list)  # when the granted ones are, in order
    watchers: int = 0  # workers that share the turns
    since_s: float | None = None  # when the first look at it was in question
    failed: bool = False  # for everybody, when last looked at
    probing: bool = False


@dataclass(slots=True)
class Detector:
    """Decides for one worker. One thread calls it."""

    settings: Settings
    watches: dict[str, Watch] = field(default_factory=dict)
    dropped_late: int = 0
    swept_s: float = float("-inf")  # when a silence last made this worker look at all addresses

    @property
    def alone_s(self) -> float:
        """How long a vote waits for others: the time another worker needs to see the same, and one interval."""
        s = self.settings
        return s.max_misses * (s.probe_interval_s + s.probe_timeout_s) + s.probe_interval_s

    def watch(self, address: str) -> Watch:
        """The watch of an address, made if needed."""
        return self.watches.setdefault(address, Watch())

    def forget(self, address: str) -> None:
        """The address is no longer in use."""
        self.watches.pop(address, None)

    def renew(self, address: str) -> None:
        """Another epoch or instance: old misses, votes and successes say nothing about it."""
        old, new = self.watch(address), Watch()
        new.last_probe_s, new.since_s, new.probing = old.last_probe_s, old.since_s, old.probing
        new.turns, new.watchers = old.turns, old.watchers
        self.watches[address] = new

    # -- when to probe ------------------------------------------------------------------------------------------

    def ask(self, address: str) -> None:
        """Probe soon: others suspect the node, or a transfer from it broke."""
        self.watch(address).urgent = True

    def turn(self, address: str, at_s: float, count: int = 1) -> None:
        """Turns were granted: `count`, one interval apart, the first at `at_s`."""
        turns = self.watch(address).turns
        turns += [at_s + i * self.settings.probe_interval_s for i in range(count)]
        turns.sort()

    def claim(self, address: str, now: float) -> int:
        """How many ticks ahead this worker takes a turn. Everybody comes by within one tick, so who takes it two
        ahead has the first choice: those that have waited for a round. Who looks every interval anyhow takes none."""
        watch, s = self.watch(address), self.settings
        if self._restless(watch):
            return 0
        last = watch.turns[-1] if watch.turns else watch.last_probe_s
        return 2 if last is None or now - last >= self._round_s(watch) - 2 * s.tick_s else 1

    def due(self, now: float, store_away: bool) -> list[str]:
        """Addresses to probe now. Those returned count as being probed until `observe`."""
        found = []
        for address, watch in self.watches.items():
            if watch.since_s is None:
                watch.since_s = now
            if not watch.probing and self._due_s(watch, store_away) <= now:
                watch.probing, watch.urgent, watch.again_s, watch.last_probe_s = True, False, None, now
                watch.turns = [turn_s for turn_s in watch.turns if turn_s > now]
                found.append(address)
        return found

    def next_due_s(self, store_away: bool) -> float | None:
        """When the next address becomes due."""
        return min((self._due_s(w, store_away) for w in self.watches.values() if not w.probing), default=None)

    def _due_s(self, watch: Watch, store_away: bool) -> float:
        last, interval = watch.last_probe_s, self.settings.probe_interval_s
        if watch.again_s is not None:
            return watch.again_s
        soon = 0.0 if last is None else last + URGENT_GAP_S
        if watch.urgent or (last is None and store_away):
            return soon
        pause = max(OWN_INTERVALS * interval, OWN_ROUNDS * self._round_s(watch))
        own = (watch.since_s or 0.0) if last is None else last
        own += interval if store_away or self._restless(watch) else pause
        return min(own, max(soon, watch.turns[0])) if watch.turns else own

    def _round_s(self, watch: Watch) -> float:
        """How long it takes until each worker had a turn. One that comes by less often takes several at once."""
        return watch.watchers * max(self.settings.probe_interval_s, self.settings.tick_s)

    def _restless(self, watch: Watch) -> bool:
        """Whether this worker looks every interval: to be sure, or because it alone refuses joins there."""
        return (watch.misses > 0 or watch.given_up) and not watch.failed

    def heard(self, address: str) -> None:
        """The node answered something else than a probe of this process: what was missed before is void. Probe, too:
        a vote is taken back when an answer to a probe says so to everybody."""
        watch = self.watches.get(address)
        if watch is not None and (watch.misses or watch.given_up):
            watch.misses, watch.urgent = 0, True

    def abandon(self, address: str) -> None:
        """The probe itself was at fault: it says nothing about the node."""
        self.watch(address).probing = False

    # -- what it means ------------------------------------------------------------------------------------------

    def observe(
        self,
        address: str,
        evidence: Evidence,
        now: float,
        *,
        reason: str = "",
        late: bool = False,
        store_away: bool = False,
        failed: bool = False,
    ) -> Act:
        """One probe has ended. `failed`: the node has failed for everybody already."""
        watch = self.watch(address)
        watch.probing = False
        if late and evidence is not Evidence.REFUSED:  # which needs no time, and is looked at again before it counts
            self.dropped_late += 1
            # Each time a longer pause: a starved process must not starve itself further with repeated probes.
            watch.again_s = now + min(RECHECK_S * 2**watch.late, self.settings.probe_interval_s)
            watch.late = min(watch.late + 1, 16)
            return Act.AGAIN
        watch.last, watch.late, watch.failed = evidence, 0, failed
        if evidence in ANSWERS:
            return self._answered(watch, evidence, now)
        if evidence is Evidence.UNREADY and not watch.ever_ok:
            return Act.NOTHING
        watch.misses += 1
        watch.reason = reason or str(evidence)
        if watch.misses == 1 and evidence is not Evidence.REFUSED:
            self._sweep(now)
            # The others' answers, or their silence, must be in before the next miss of this one makes a vote.
            interval = self.settings.probe_interval_s
            watch.again_s = max((watch.last_probe_s or now) + interval, now + SWEEP_LEAD * interval)
        if watch.misses < self.settings.max_misses:
            if evidence is Evidence.REFUSED:
                watch.again_s = now + RECHECK_S
                return Act.AGAIN
            return Act.NOTHING
        if failed or store_away:
            return self._give_up(watch)
        watch.voted_s = now if watch.voted_s is None else watch.voted_s
        return Act.VOTE

    def _sweep(self, now: float) -> None:
        """Look at every address, once an interval at most: is it one node that is silent, or my own network?"""
        interval = self.settings.probe_interval_s
        if now - self.swept_s < interval:
            return
        self.swept_s = now
        for watch in self.watches.values():
            watch.urgent = True

    def _answered(self, watch: Watch, evidence: Evidence, now: float) -> Act:
        voted = watch.voted_s is not None
        watch.misses, watch.voted_s, watch.reason, watch.given_up = 0, None, "", False
        if evidence is Evidence.OK:
            watch.ever_ok, watch.last_ok_s = True, now
        return Act.WITHDRAW if voted else Act.NOTHING

    def counted(self, address: str, votes: Votes, now: float) -> Act:
        """The vote was recorded and counted."""
        watch = self.watch(address)
        if votes.stale or watch.voted_s is None or not watch.misses:  # it has answered since
            return Act.NOTHING
        if votes.votes >= votes.needed:
            if self.doubtful() and votes.watchers <= 1:
                return self._give_up(watch)
            return Act.FAIL
        return self._give_up(watch) if now - watch.voted_s >= self.alone_s else Act.NOTHING

    def uncounted(self, address: str) -> Act:
        """The vote could not be recorded: the store is away."""
        return self._give_up(self.watch(address))

    def doubtful(self) -> bool:
        """Whether so many addresses seem dead at once that this worker's own network is the likelier cause."""
        used = [w for w in self.watches.values() if w.ever_ok or w.misses]
        dead = sum(w.misses > 0 for w in used)
        return dead >= MASS_LEAST and 2 * dead > len(used)

    def _give_up(self, watch: Watch) -> Act:
        if watch.given_up:
            return Act.NOTHING
        watch.given_up = True
        return Act.GIVE_UP
