"""Binds a model to a synchronizer: hooks, read tracing, trained parameters, guards."""
