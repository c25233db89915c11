"""Workers as processes that Ray starts on the nodes of its cluster: one actor a rank, which starts and ends it."""
