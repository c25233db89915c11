"""Memory that the processes of one host share: segments, futexes, barriers, the control page."""
