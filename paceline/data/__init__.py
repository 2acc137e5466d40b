"""Records, databases, sample order, decoding, augmentation and the loader."""
