"""A trained model as files for a server, a phone and a browser."""
