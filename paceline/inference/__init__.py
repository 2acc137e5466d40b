"""Trained models in use: read from a run or a file of weights, evaluated, asked for predictions."""
