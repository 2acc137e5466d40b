"""One-sided puts over NIXL: RDMA where the network has it, TCP elsewhere."""
