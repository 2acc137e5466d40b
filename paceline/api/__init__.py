"""The library: a world, a model on all its ranks, and a loader, for a loop of one's own."""

from paceline.api.join import join
from paceline.api.loader import Loader, loader
from paceline.api.parallelize import parallelize
from paceline.api.world import World

__all__ = ["Loader", "World", "join", "loader", "parallelize"]
