"""A plain training script in several processes: what `hr.setup` makes of its model, optimizer and loader."""
