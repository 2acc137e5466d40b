"""What outlives a step: weights and checkpoints."""
