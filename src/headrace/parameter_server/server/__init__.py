"""The server process: requests, the optimizer over its shards, snapshots."""
