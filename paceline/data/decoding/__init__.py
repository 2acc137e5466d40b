"""Decode processes: records become pixels in memory that this process and they share."""
