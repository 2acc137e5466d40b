"""The public library: `join`, `parallelize`, `loader`, `launch`, for a script with its own loop."""

from paceline.api.join import join
from paceline.api.launch import launch
from paceline.api.loaders.loader import Loader, loader
from paceline.api.parallelize import parallelize
from paceline.api.world import World
from paceline.config.server import Server
from paceline.update.outer.average import Average
from paceline.update.outer.bmuf import BMUF
from paceline.update.outer.diloco import DiLoCo
from paceline.update.outer.easgd import EASGD
from paceline.update.outer.mean import Mean
from paceline.update.outer.outer_rule import OuterRule
from paceline.update.outer.sparseloco import SparseLoCo

__all__ = [
    "BMUF",
    "EASGD",
    "Average",
    "DiLoCo",
    "Loader",
    "Mean",
    "OuterRule",
    "Server",
    "SparseLoCo",
    "World",
    "join",
    "launch",
    "loader",
    "parallelize",
]
