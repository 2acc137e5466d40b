"""Writing a new database: it appears under its final name whole or not at all."""
