"""The exchange: synchronizers, buckets, and what binds them to a model and its optimizer."""
