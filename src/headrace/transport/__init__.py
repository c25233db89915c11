"""How bytes move between workers and servers."""
