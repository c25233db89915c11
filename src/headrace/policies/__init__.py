"""Pure functions and state that decide: no torch, clock or socket."""
