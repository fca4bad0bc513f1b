"""Everything that knows Redis: keys, scripts, operations, connections, the embedded server."""
