"""A member's ballots on the next generation, and its links to the acceptors."""
