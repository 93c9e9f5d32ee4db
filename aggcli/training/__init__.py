"""Training: the loop on one page, one step, and checkpoints."""
