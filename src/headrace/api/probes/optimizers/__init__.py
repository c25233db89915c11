"""What is found out about a job's optimizer."""
