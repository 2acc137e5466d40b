"""Who is in the world: process identities, leases, heartbeats, and a worker's generation."""
