"""Rollouts: the batch type, and where batches come from."""
