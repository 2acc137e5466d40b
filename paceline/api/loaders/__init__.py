"""Loaders of a script: a world's batches, to train and to evaluate."""
