"""Leases: how a registration shows that its process is alive, and how others see its end."""
