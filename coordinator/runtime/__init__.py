"""What acts: the event loop's thread, the sync loop, the heartbeat, probes, delivery. Decides nothing by itself."""
