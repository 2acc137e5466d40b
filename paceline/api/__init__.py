"""The public library: `join`, `parallelize`, `loader`, `launch`, for a script with its own loop."""

from paceline.api.join import join
from paceline.api.launch import launch
from paceline.api.loader import Loader, loader
from paceline.api.parallelize import parallelize
from paceline.api.world import World

__all__ = ["Loader", "World", "join", "launch", "loader", "parallelize"]
