"""Workers of a launcher of which some may be lost: where they meet, and who goes on."""
