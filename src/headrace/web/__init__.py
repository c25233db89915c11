"""What servers for browsers share: where they listen, who may ask, and how they end."""
