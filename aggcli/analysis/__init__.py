"""Records -> frames and statistics. Nothing here imports torch, so tables and figures can be made anywhere."""
