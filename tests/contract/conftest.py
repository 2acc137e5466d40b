"""Fixtures that several suites take."""

from tests.harness.data.databases import cache, engine, folder

__all__ = ["cache", "engine", "folder"]
