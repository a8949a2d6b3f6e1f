"""Recipes: datasets of OGBench made on the spot from its own scripted behaviours, where none can be downloaded.

``catalogue`` says what each dataset is, ``pointmaze`` and ``manipulation`` simulate one episode of it as a pure
function of a seed, ``collector`` runs many in parallel processes, ``storage`` writes the files. Nothing here may
import JAX or anything that does (a simulating process must start fast), read a dataset for training, or render.
"""

from rl.data.recipes.catalogue import RECIPES, Recipe, find
from rl.data.recipes.collector import collect, default_folder, read_card

__all__ = ["RECIPES", "Recipe", "collect", "default_folder", "find", "read_card"]
