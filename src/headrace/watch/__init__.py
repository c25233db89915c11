"""Runs as they happen, in a browser: event files are followed, added up, and sent as they change."""
