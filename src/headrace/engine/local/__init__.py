"""Workers as processes of this host."""
