"""How processes find each other, start and end: stores, rendezvous, launching, supervising."""
