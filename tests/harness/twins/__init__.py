"""In-process twins of the communicator and of the window: ranks are threads."""
