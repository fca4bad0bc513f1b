"""The demo: real processes and real sockets that live through faults, and an audit of what they recorded.

Reading order: trace (what is asked for), wire (how a room's bytes travel), facts (what every process writes
down), node and worker (the processes), faults (what is done to them), audit (what came of it), fleet, watch and
table (starting, looking, showing), run (all of it in time order).
"""
