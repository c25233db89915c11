"""Workers that change parameters while others train with them: in pairs, or all of them one copy."""
