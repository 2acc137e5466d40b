"""Processes that own what they compute no gradients for, such as the averaging server."""
