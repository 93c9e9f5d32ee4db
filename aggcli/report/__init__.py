"""Records -> figures, in one visual language. Nothing here imports torch or computes what a run should have recorded."""
