"""What the event files of a run say: summary, tables, one page, progress, TensorBoard. Reads files alone."""
