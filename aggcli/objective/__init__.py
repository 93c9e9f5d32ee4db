"""The objective: advantages, per-token losses, and the weight of each token."""
