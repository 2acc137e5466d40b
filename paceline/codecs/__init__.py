"""Codecs: how gradients are coded while they travel, as pure functions over flat tensors."""
