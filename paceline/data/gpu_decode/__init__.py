"""Batches that are decoded, augmented and normalised on the GPU, by the CPU's plans."""
