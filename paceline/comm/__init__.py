"""How bytes travel between ranks."""
