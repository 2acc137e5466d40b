"""Paceline: distributed training of PyTorch models on ordinary machines."""
