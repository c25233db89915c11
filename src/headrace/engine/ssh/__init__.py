"""Workers on several hosts that are reached by ssh: one agent a host, which starts its processes and ends them."""
