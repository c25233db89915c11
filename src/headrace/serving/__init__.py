"""Answers requests for the predictions of exported models over HTTP."""
