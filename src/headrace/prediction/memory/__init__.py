"""What each process of a run will hold, found before anything is built."""
