"""Pure decisions: what a worker owns (ledger) and what it believes about nodes (detector). No socket, no clock."""
