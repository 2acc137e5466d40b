"""Transport of windows: connecting and authentication, sockets, the event loop."""
