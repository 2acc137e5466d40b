"""Codecs: how gradients are encoded while they travel, pure functions over flat tensors."""
