"""Parameter servers: processes that own parameters, and update them by the workers' gradients."""
