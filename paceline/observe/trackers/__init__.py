"""Trackers: recorders that pass a run's values to TensorBoard, W&B or MLflow, on rank 0."""
