"""Fixtures that several suites take."""

from tests.harness.databases import cache, engine, folder

__all__ = ["cache", "engine", "folder"]
