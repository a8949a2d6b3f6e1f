"""Pictures of results: curves and final comparisons, as PNG files. They read arrays, never run folders.

Figures are drawn without pyplot: no global state, no display, safe in threads and notebooks.
"""

from __future__ import annotations

from rl.plot.comparisons import bars, lines, lines_in_panels
from rl.plot.curves import learning_curve, learning_curves
from rl.plot.data_card import dataset_card
from rl.plot.scenes import Route, animation, cells, maps, routes, strips

__all__ = [
    "Route",
    "animation",
    "bars",
    "cells",
    "dataset_card",
    "learning_curve",
    "learning_curves",
    "lines",
    "lines_in_panels",
    "maps",
    "routes",
    "strips",
]
