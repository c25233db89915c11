"""rehearse: the loss curve of many workers, computed here."""
