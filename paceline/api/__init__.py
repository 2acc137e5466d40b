"""The library: a world, a model on all its ranks, and a loader, for a loop of one's own."""

from paceline.api.joining import join
from paceline.api.loading import Loader, loader
from paceline.api.replication import parallelize
from paceline.api.world import World

__all__ = ["Loader", "World", "join", "loader", "parallelize"]
