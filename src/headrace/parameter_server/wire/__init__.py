"""The messages between workers and servers, and the layout of shards."""
