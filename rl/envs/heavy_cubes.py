"""OGBench's cubes, 6.5 times as heavy: the environment of HECRL's PPP-Cube and Stack-Cube (Haramati et al. 2026).

A cube of the density that OGBench gives it slides away from a gripper that pushes it; a heavy one stays in touch.
Importing this module registers ``heavy-cube-single-v0`` and its siblings, whose episodes are as long as in the authors'
code. Sizes, tasks and observations are OGBench's.
"""

from __future__ import annotations

from typing import Any

import gymnasium
from ogbench.manipspace.envs.cube_env import CubeEnv

DENSITY = 8000.0  # kg/m^3; 1240 in OGBench
STEPS = {"single": 500, "double": 800, "triple": 1000, "quadruple": 1200}  # of an episode


class HeavyCubeEnv(CubeEnv):
    """OGBench's environment with cubes of the density `DENSITY`."""

    def add_objects(self, arena_mjcf: Any) -> None:
        """Adds the cubes to the model before it is compiled."""
        super().add_objects(arena_mjcf)
        for geoms in self._cube_geoms_list:
            for geom in geoms:
                geom.density = DENSITY


for _number, _steps in STEPS.items():
    gymnasium.register(
        f"heavy-cube-{_number}-v0",
        "rl.envs.heavy_cubes:HeavyCubeEnv",
        max_episode_steps=_steps,
        kwargs={"env_type": _number},
    )
