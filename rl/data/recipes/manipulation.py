"""Behaviour of the cube, scene and puzzle datasets: OGBench's own scripted oracles, one subtask after another."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from rl.data.recipes.catalogue import Recipe
from rl.data.recipes.episode import Episode, Simulate, buffers, draw_seed, seeded

PLAN_NOISE = 0.1  # of the action range, added to the keyframed plan of 'play'
PLAN_NOISE_SMOOTHING = 0.5  # standard deviation of the Gaussian filter over time, in control steps
MIN_NORM = 0.4  # the closed-loop oracle of 'noisy' lengthens position differences to at least this
MAX_NOISE = 0.1  # closed-loop behaviour draws its noise level from U(0, 0.1) once per episode ...
NOISE_SCALE = (1.0, 1.0, 1.0, 3.0, 10.0)  # ... and scales it for x, y, z, yaw, gripper
STACK_RANGE = {  # an episode's probability that a cube's target is on top of another cube is drawn from this range
    "cube-single-v0": (0.0, 0.0),
    "cube-double-v0": (0.0, 0.25),
    "cube-triple-v0": (0.05, 0.35),
    "cube-quadruple-v0": (0.1, 0.5),
    "cube-octuple-v0": (0.0, 0.35),
}


class Behaviour(NamedTuple):
    """What tells one kind of data from another in the same environment."""

    stack: tuple[float, float] = (0.5, 0.5)  # range of an episode's probability of a target on top of a cube
    random: float = 0.0  # probability that an action is replaced by a uniform one
    noise: tuple[float, ...] = (0.0,) * 5  # scale of the Gaussian noise on x, y, z, yaw, gripper
    push: float = 0.0  # probability that a subtask is a push, whose target is on the table


def behaviour(recipe: Recipe) -> Behaviour:
    """The behaviour of ``play`` and ``noisy`` (OGBench), ``ppp`` and ``stack`` (HECRL, Haramati et al. 2026)."""
    stack = STACK_RANGE.get(recipe.env, (0.5, 0.5))
    softer = (*NOISE_SCALE[:4], 5.0)  # HECRL's, on the gripper
    return {
        "play": Behaviour(stack),
        "noisy": Behaviour(stack, 0.2 if recipe.env.startswith("puzzle") else 0.1, NOISE_SCALE),
        "ppp": Behaviour((0.5, 0.5), 0.1, softer, 0.7),
        "stack": Behaviour((0.9, 0.9), 0.02, softer),
    }[recipe.kind]


def simulator(recipe: Recipe, rows: int) -> Simulate:
    """Return a function that makes one manipulation episode of ``rows`` rows.

    Protocol (OGBench, Park et al. 2025, section on datasets, and the parameters published with its generator):
    the environment draws a subtask, its oracle acts until it says it is done (reached or not), and the next one
    is drawn. ``play`` follows an open-loop plan with temporally smoothed noise; ``noisy`` runs the closed-loop
    oracle, adds Gaussian noise of a level drawn per episode, and with probability 0.1 (puzzle 0.2) replaces the
    action by a uniform one. A scene episode whose cube leaves the camera's view is made again. ``ppp`` mixes pushes
    with the closed-loop oracle, and ``stack`` is that oracle with most targets on top of another cube; noise and
    probabilities are those that HECRL gives.

    What differs from HECRL's code. The push is ours (`rl.data.recipes.pushing`), straight toward the target; theirs
    starts at one of four sides, drawn at random, and moves the cube a little, wherever the target is. The first subtask
    of an episode is never a push here, and a cube that lies on another is picked up, so that 45 % of the subtasks are
    pushes (of 8 episodes with two cubes), not 70 %. Stacks of several cubes come about one target at a time, where
    theirs are planned whole and mended. Cubes and targets may start closer together than 5.7 cm.

    One quirk of the published generator is kept because it shapes the data: the first action of a new subtask is
    chosen from the information of the last step, which still describes the old target. Plans ignore the target
    by then; the closed-loop oracle heads for the old one for one step.
    """
    env = _make_env(recipe.env)
    oracles = _make_oracles(env, recipe)
    restore = _restorer(env)

    def episode(seed: np.random.SeedSequence) -> Episode:
        attempt = 0
        while True:
            restore()
            again = np.random.SeedSequence(seed.entropy, spawn_key=(*seed.spawn_key, attempt))
            with seeded(again) as rng:
                result = _rollout(env, oracles, recipe, rows, rng)
            if recipe.env != "scene-v0" or _cube_is_visible(result.data["qpos"]):
                return result
            attempt += 1

    return episode


def _rollout(
    env: Any, oracles: dict[str, Any], recipe: Recipe, rows: int, rng: np.random.Generator
) -> Episode:
    observation, info = env.reset(seed=draw_seed(rng))
    kind = behaviour(recipe)
    p_stack = rng.uniform(*kind.stack)
    noise = rng.uniform(0, MAX_NOISE) * np.array(kind.noise)
    oracle = oracles[info["privileged/target_task"]]
    oracle.reset(observation, info)

    data = buffers(rows, observation=len(observation), action=5, qpos=env.model.nq, qvel=env.model.nv)
    if "button_states" in info:
        data["button_states"] = np.empty((rows, len(info["button_states"])), np.int64)
    attempts = reached = 0
    for row in range(rows):
        if rng.random() < kind.random:
            # Not env.action_space.sample(): the environment makes a new, unseeded space at every access.
            action = rng.uniform(-1, 1, 5)
        else:
            action = np.asarray(oracle.select_action(observation, info))
            if any(kind.noise):
                action = action + rng.normal(0, noise)
        action = np.clip(action, -1, 1)
        data["observations"][row] = observation
        data["actions"][row] = action
        observation, _, _, _, info = env.step(action)
        data["qpos"][row] = info["prev_qpos"]
        data["qvel"][row] = info["prev_qvel"]
        if "button_states" in data:
            data["button_states"][row] = info["prev_button_states"]
        if oracle.done:
            attempts, reached = attempts + 1, reached + int(info["success"])
            push = kind.push > 0 and rng.random() < kind.push
            new_observation, new_info = env.set_new_target(p_stack=0.0 if push else p_stack)
            push = push and oracles["push"].possible(new_info)
            oracle = oracles["push" if push else new_info["privileged/target_task"]]
            oracle.reset(new_observation, new_info)
    return Episode(data, attempts, reached)


def _cube_is_visible(qpos: np.ndarray) -> bool:
    """Whether the scene's cube stays in view: not too far right, and far left only inside the drawer."""
    y, z = qpos[:, 15], qpos[:, 16]
    return not np.any(y >= 0.29) and not np.any((y <= -0.3) & ((z < 0.06) | (z > 0.08)))


class _DescribedOnce:
    """Mixin: describe each simulator state once. OGBench's step does it three times with the same result."""

    _description: dict[str, Any] | None = None

    def reset(self, *args: Any, **kwargs: Any) -> Any:
        self._description = None
        return super().reset(*args, **kwargs)  # type: ignore[misc]

    def set_new_target(self, *args: Any, **kwargs: Any) -> Any:
        self._description = None
        return super().set_new_target(*args, **kwargs)  # type: ignore[misc]

    def post_step(self) -> None:
        self._description = None
        super().post_step()  # type: ignore[misc]

    def compute_ob_info(self) -> dict[str, Any]:
        if self._description is None:
            self._description = super().compute_ob_info()  # type: ignore[misc]
        return self._description


def _make_env(name: str) -> Any:
    import gymnasium
    import ogbench.manipspace  # noqa: F401  registers the environments
    from gymnasium.envs.registration import load_env_creator

    import rl.envs.heavy_cubes  # noqa: F401  registers more

    spec: Any = gymnasium.spec(name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # MuJoCo's viewer complains that there is no display; none is needed
        stock: Any = load_env_creator(spec.entry_point)
    env_type = type(stock.__name__, (_DescribedOnce, stock), {})
    return env_type(**spec.kwargs, terminate_at_goal=False, mode="data_collection")


def _restorer(env: Any) -> Callable[[], None]:
    """Return a function that undoes what an episode leaves behind in ``env``.

    A reset keeps the previous episode's targets of the subtasks it does not draw, the drawer's and window's
    target sites, and the damping that locks them. Some of it reaches the next episode's data (through the quirk
    described in `simulator`), which would then depend on what the process simulated before. The first reset
    also differs from later ones (it compiles the model), so it is spent here.
    """
    env.reset(seed=0)
    targets = {name: copy.deepcopy(value) for name, value in vars(env).items() if name.startswith("_target_")}
    site_pos, damping = env.model.site_pos.copy(), env.model.dof_damping.copy()

    def restore() -> None:
        for name, value in targets.items():
            setattr(env, name, copy.deepcopy(value))
        env.model.site_pos[:] = site_pos
        env.model.dof_damping[:] = damping

    return restore


def _make_oracles(env: Any, recipe: Recipe) -> dict[str, Any]:
    """Return the oracle of each subtask the environment can draw, by name."""
    options: dict[str, Any]
    if recipe.kind == "play":  # imported here because plans need SciPy, a quarter of a second
        from ogbench.manipspace.oracles.plan.button_plan import ButtonPlanOracle as Button
        from ogbench.manipspace.oracles.plan.cube_plan import CubePlanOracle as Cube
        from ogbench.manipspace.oracles.plan.drawer_plan import DrawerPlanOracle as Drawer
        from ogbench.manipspace.oracles.plan.window_plan import WindowPlanOracle as Window

        options = {"env": env, "noise": PLAN_NOISE, "noise_smoothing": PLAN_NOISE_SMOOTHING}
    else:
        from ogbench.manipspace.oracles.markov.button_markov import ButtonMarkovOracle as Button
        from ogbench.manipspace.oracles.markov.cube_markov import CubeMarkovOracle as Cube
        from ogbench.manipspace.oracles.markov.drawer_markov import DrawerMarkovOracle as Drawer
        from ogbench.manipspace.oracles.markov.window_markov import WindowMarkovOracle as Window

        options = {"env": env, "min_norm": MIN_NORM}
    if recipe.kind == "ppp":
        from rl.data.recipes.pushing import CubePushOracle

        return {"cube": Cube(**options), "push": CubePushOracle(**options)}
    if "cube" in recipe.env:
        return {"cube": Cube(**options)}
    if recipe.env.startswith("puzzle"):
        return {"button": Button(gripper_always_closed=True, **options)}
    return {
        "cube": Cube(**options),
        "button": Button(**options),
        "drawer": Drawer(**options),
        "window": Window(**options),
    }
