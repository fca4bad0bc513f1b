"""Ranks: workers of one group open the same rooms; a room that one of them fails by itself fails in all of them."""

from __future__ import annotations

import pytest
from scriptlab import A, Lab, N
from servers import Server


def test_thousands_of_marks_all_reach_their_owner(real_server: Server) -> None:
    """4,500 marks are read in pieces until none is left, however the server lays out the hash that empties."""
    with real_server.sync_client() as client:
        lab, rooms = Lab(client), list(range(4500))
        for start in range(0, len(rooms), 500):
            mode = "delta" if start else "reset"
            adds = rooms[start : start + 500]
            lab.run(lab.batch(A, start // 500 + 1, adds, mode=mode, count=start + 500))
        for room in rooms:
            lab.run(lab.ops.abort_room(N, A, room, "no memory", "node"))
        left, gone, number = set(rooms), [], 10
        while left:
            left.difference_update(gone)
            reply = lab.run(lab.batch(A, number, (), gone, count=len(left)))
            gone, number = [room for room, _ in reply.aborted], number + 1
            assert len(gone) <= 400, "one answer stays small"
            assert gone or not left, f"{len(left)} marks were never told"
