"""What each dataset is made of: environment, behaviour, and how much of it was published."""

from __future__ import annotations

import difflib
from typing import NamedTuple


class Recipe(NamedTuple):
    """One dataset of OGBench (Park et al., 2025), or in its layout, that scripted behaviour can make.

    That of antmaze needs a trained walker besides (`rl.data.recipes.pointmaze`).

    The sizes are those of the command list published with the benchmark, or of the paper that it is from. A file
    stores one row more per episode than ``steps``: the last state has an action but no successor.
    """

    dataset: str  # name that ``ogbench.make_env_and_datasets`` knows
    env: str  # gymnasium id of the environment
    kind: str  # navigate, stitch or explore (mazes); play, noisy, ppp or stack (manipulation)
    episodes: int  # training episodes; a tenth as many are added for validation
    steps: int  # transitions per episode

    @property
    def family(self) -> str:
        """The folder, under the one of all datasets, where this kind is kept."""
        return "ogbench"

    @property
    def is_walked(self) -> bool:
        """Whether it takes a trained walker to make it."""
        return self.env.startswith("antmaze")

    @property
    def file(self) -> str:
        """The name of the training file."""
        return f"{self.dataset}.npz"


_PUBLISHED = (
    # environment, kinds, training episodes, transitions per episode
    ("pointmaze-medium", ("navigate",), 1000, 1000),
    ("pointmaze-large", ("navigate",), 1000, 1000),
    ("pointmaze-giant", ("navigate",), 500, 2000),
    ("pointmaze-teleport", ("navigate",), 1000, 1000),
    ("pointmaze-medium", ("stitch",), 5000, 200),
    ("pointmaze-large", ("stitch",), 5000, 200),
    ("pointmaze-giant", ("stitch",), 5000, 200),
    ("pointmaze-teleport", ("stitch",), 5000, 200),
    ("antmaze-medium", ("navigate",), 1000, 1000),
    ("antmaze-large", ("navigate",), 1000, 1000),
    ("antmaze-giant", ("navigate",), 500, 2000),
    ("antmaze-teleport", ("navigate",), 1000, 1000),
    *((f"antmaze-{maze}", ("stitch",), 5000, 200) for maze in ("medium", "large", "giant", "teleport")),
    *((f"antmaze-{maze}", ("explore",), 10000, 500) for maze in ("medium", "large", "teleport")),
    ("cube-single", ("play", "noisy"), 1000, 1000),
    ("cube-double", ("play", "noisy"), 1000, 1000),
    ("cube-triple", ("play", "noisy"), 3000, 1000),
    ("cube-quadruple", ("play", "noisy"), 5000, 1000),
    # Published as play only, in a hundred shards of this size. Noisy follows the rule of the other cubes.
    ("cube-octuple", ("play", "noisy"), 1000, 1000),
    ("scene", ("play", "noisy"), 1000, 1000),
    ("puzzle-3x3", ("play", "noisy"), 1000, 1000),
    ("puzzle-4x4", ("play", "noisy"), 1000, 1000),
    ("puzzle-4x5", ("play", "noisy"), 3000, 1000),
    ("puzzle-4x6", ("play", "noisy"), 5000, 1000),
    # PPP-Cube and Stack-Cube of HECRL (Haramati et al. 2026), published for three cubes.
    *(
        (f"heavy-cube-{number}", ("ppp",), 7500, 400)
        for number in ("single", "double", "triple", "quadruple")
    ),
    *((f"heavy-cube-{number}", ("stack",), 3000, 1000) for number in ("double", "triple", "quadruple")),
)

RECIPES = {
    recipe.dataset: recipe
    for env, kinds, episodes, steps in _PUBLISHED
    for kind in kinds
    for recipe in [Recipe(f"{env}-{kind}-v0", f"{env}-v0", kind, episodes, steps)]
}


class Locomotion(NamedTuple):
    """One tier of locomotion data, made by the protocol of D4RL (Fu et al., 2020) on a current environment."""

    dataset: str
    env: str  # gymnasium id of the environment
    tier: str

    @property
    def family(self) -> str:
        """The folder, under the one of all datasets, where this kind is kept."""
        return "locomotion"

    @property
    def file(self) -> str:
        """The name of the file."""
        return f"{self.dataset}.hdf5"


TIERS = ("random", "medium", "medium-replay", "medium-expert", "expert")

LOCOMOTION = {
    recipe.dataset: recipe
    for env in ("Hopper-v5", "HalfCheetah-v5", "Walker2d-v5")
    for tier in TIERS
    for recipe in [Locomotion(f"{env.removesuffix('-v5').lower()}-{tier}-regen-v5", env, tier)]
}


def instead(tier: str) -> str:
    """How to make what stands in for a published tier, ``hopper-medium`` say, in words; '' where nothing does."""
    name = f"{tier}-regen-v5"
    if name not in LOCOMOTION:
        return ""
    return (
        f"make one like it on this machine: python -m experiments.collect --dataset={name}, and use that name"
    )


def find(dataset: str) -> Recipe | Locomotion:
    """Return the recipe called ``dataset``.

    Raises:
      ValueError: no such recipe; the message suggests the nearest names.
    """
    known: dict[str, Recipe | Locomotion] = {**RECIPES, **LOCOMOTION}
    if dataset in known:
        return known[dataset]
    if near := difflib.get_close_matches(dataset, known, n=3, cutoff=0.5):
        raise ValueError(f"No recipe makes {dataset!r}. Did you mean {' or '.join(near)}?")
    raise ValueError(f"No recipe makes {dataset!r}. There are {', '.join(known)}")
