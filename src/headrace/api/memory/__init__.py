"""What memory a run will take, before anything is built."""
