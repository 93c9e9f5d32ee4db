"""What a command does, without a word printed: a job tells whoever listens, and returns a result."""
