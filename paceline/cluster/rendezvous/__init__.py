"""How machines and processes find each other at a start, and agree on ranks and addresses."""
