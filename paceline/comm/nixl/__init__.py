"""One-sided puts through NIXL: RDMA where the network has it, TCP elsewhere."""
