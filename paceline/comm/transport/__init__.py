"""The transport: sockets, the event loop that moves bytes, and what a connection starts with."""
