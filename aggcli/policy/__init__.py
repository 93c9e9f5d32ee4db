"""The policies that `run` and `compare` train: a small transformer with a leading run axis, its sampler, its warm start."""
