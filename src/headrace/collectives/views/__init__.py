"""Groups of workers of which some may be lost, join and leave while the others go on."""
