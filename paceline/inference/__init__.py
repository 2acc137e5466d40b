"""What one does with a trained model: it is read from its run, and predicts classes of images."""
