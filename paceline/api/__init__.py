"""The public library for a script with its own loop, such as `join`, `parallelize`, `loader`."""

from paceline.api.join import join as join
from paceline.api.launch import launch as launch
from paceline.api.loaders.loader import Loader as Loader
from paceline.api.loaders.loader import loader as loader
from paceline.api.parallelize import parallelize as parallelize
from paceline.api.stages import stages as stages
from paceline.api.tensor_parallel import tensor_parallel as tensor_parallel
from paceline.api.world import World as World
from paceline.config.server import Server as Server
from paceline.parallel.deferred import deferred_init as deferred_init
from paceline.update.outer.average import Average as Average
from paceline.update.outer.bmuf import BMUF as BMUF
from paceline.update.outer.diloco import DiLoCo as DiLoCo
from paceline.update.outer.easgd import EASGD as EASGD
from paceline.update.outer.mean import Mean as Mean
from paceline.update.outer.outer_rule import OuterRule as OuterRule
from paceline.update.outer.sparseloco import SparseLoCo as SparseLoCo
