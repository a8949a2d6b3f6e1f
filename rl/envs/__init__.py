"""Environments of every family by name, one or many at a time, with one convention for all of them.

An agent sees flat float32 observations (uint8 images keep their shape and type), or dictionaries of these, and acts
in [-1, 1], or with an integer from 0. What an environment needs beyond that convention belongs here; policies and
scores do not. Nor does JAX belong in what this package imports: worker processes must start quickly and hold no
accelerator. The environments that are pure JAX are modules that only their users import: with exact evaluation
`rl.envs.linear_mdp`, `rl.envs.american_put` and `rl.envs.tabular`, without it `rl.envs.minatar`, `rl.envs.pendulum`,
`rl.envs.cartpole_swingup`, `rl.envs.movers` and `rl.envs.plane`; some have names (`rl.envs.functional`). So are those
in words, in NumPy: `rl.envs.double_t_maze`, `rl.envs.wordle` and `rl.envs.programs`, played by `rl.envs.text.play`.
"""

from rl.envs.registry import check_name, draws, first_action, make, spec, user_module
from rl.envs.workers import Step, Vector, WorkerDied, vector

__all__ = [
    "Step",
    "Vector",
    "WorkerDied",
    "check_name",
    "draws",
    "first_action",
    "make",
    "spec",
    "user_module",
    "vector",
]
