"""Vote on the next generation: pure rules of the acceptors and of a proposer (Paxos)."""
