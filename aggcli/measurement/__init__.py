"""What a step reports: per-token metrics, correct samples, pass@k, and what an aggregation does to the batch."""
