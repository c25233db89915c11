"""Guards of a run: what would make it train something else, without a word, ends it."""
