"""Recipes: datasets of OGBench made on the spot from its own scripted behaviours, where none can be downloaded.

``catalogue`` says what each dataset is, ``pointmaze`` and ``manipulation`` simulate one episode of it as a pure
function of a seed, ``worker`` makes a few of them and ``pool`` runs many workers, ``collector`` plans, resumes and
publishes, ``storage`` writes files. Nothing here may import JAX or anything that does (a simulating process must
start fast), read a dataset for training, or render.
"""

from rl.data.recipes.catalogue import RECIPES, Recipe, find
from rl.data.recipes.collector import collect, default_folder, read_card

__all__ = ["RECIPES", "Recipe", "collect", "default_folder", "find", "read_card"]
