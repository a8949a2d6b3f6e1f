"""How an agent sees rewards and observations: the same in its data, in its environment and where it goes on learning.

A run stores its transformation with its checkpoints, as numbers, so that a run which continues from it (fine-tuning)
sees the same rewards and the same observations.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from rl import nest
from rl.replay import dataset as replay
from rl.replay.dataset import Dataset

ENTITY_CLIP = 5.0  # of standardised features of entities
RETURN_RANGE = "return_range"  # in place of a scale: 1000 over the range of the returns in the data


class Transform(NamedTuple):
    """Rewards become ``clip(scale * r + shift)``, observations, or each array of a dict, ``(o - mean) / deviation``."""

    reward_scale: float = 1.0
    reward_shift: float = 0.0
    clip_rewards: bool = False  # to [-1, 1]
    # [*observation] float32, or the last of these axes, or a dict of such for observations that are dicts; None leaves
    # observations, or one array of a dict, as they are
    mean: Any = None
    deviation: Any = None
    clip_observations: float = 0.0  # standardised ones, to [-c, c]; 0: any


def fit(
    dataset: Dataset,
    reward_scale: float | str = 1.0,
    reward_shift: float = 0.0,
    *,
    clip_rewards: bool = False,
    normalize_observations: bool = False,
    entities: bool = False,
) -> Transform:
    """The transformation with everything that depends on the data as numbers.

    Args:
      dataset: the logged data.
      reward_scale: factor on rewards, or `RETURN_RANGE`, the recipe of IQL (Kostrikov et al. 2022, appendix B):
        returns then span 1000.
      reward_shift: added to every reward after scaling.
      clip_rewards: to [-1, 1] after that. Rewards of minus one for each open part of a task become sparse: minus one
        until all is done.
      normalize_observations: with mean 0 and deviation 1 in each dimension of the data. 1e-3 is added to the deviation,
        as in TD3+BC, so that a constant dimension stays finite. Images [H, W, C] of uint8 stay as they are: networks
        scale them.
      entities: observations are sets of entities [N, F], or dicts of such: each feature has the moments of all
        entities, so that their number and order do not matter, and ends at `ENTITY_CLIP`, as in HECRL (2026). A feature
        that never varied, the id of an object that no episode had, would otherwise be huge.

    Raises:
      ValueError: ``entities``, and an observation is no set of vectors; or `RETURN_RANGE` of steps in no
        order, or of episodes that all return the same.
    """
    if reward_scale == RETURN_RANGE:
        if replay.is_shuffled(dataset):
            raise ValueError(
                f"--reward_scale={RETURN_RANGE} is that of the returns of episodes, and the log holds single "
                "transitions in no order: give a number (reward_scale=1.0, say)"
            )
        reward_scale = 1000.0 / _range(replay.episode_returns(dataset))
    mean = deviation = None
    if normalize_observations:
        observation = dataset.transitions.observation
        is_image = lambda x: x.dtype == np.uint8 and x.ndim > 3
        if entities:
            for name, x in nest.named("observation", observation).items():
                if x.ndim != 3:
                    raise ValueError(
                        f"{name} of shape {x.shape[1:]} is no set of entities [N, F]: leave entities out"
                    )

        def moment(of: Any, x: np.ndarray) -> Any:
            # A sum in float32 over a million rows loses much of what is added last.
            return of(x, (0, 1) if entities else 0, np.float64).astype(np.float32)

        mean = nest.map_structure(lambda x: None if is_image(x) else moment(np.mean, x), observation)
        deviation = nest.map_structure(
            lambda x: None if is_image(x) else moment(np.std, x) + np.float32(1e-3), observation
        )
    clip = ENTITY_CLIP if entities and normalize_observations else 0.0
    return Transform(float(reward_scale), reward_shift, clip_rewards, mean, deviation, clip)


def _range(returns: np.ndarray) -> float:
    """The largest return of an episode less the smallest. Raises ValueError if it is nothing but rounding."""
    width = float(np.ptp(returns))
    if not width > 1e-6 * max(1.0, float(np.abs(returns).max())):
        raise ValueError(
            f"--reward_scale={RETURN_RANGE}: the {len(returns)} episodes of the log all have a return of "
            f"{float(returns[0]):.6g}, which has no range: give a number (reward_scale=1.0, say)"
        )
    return width


def rewards(transform: Transform, reward: Any) -> np.ndarray:
    """Rewards [...] as the agent sees them, float32, on the host."""
    return np.asarray(scaled(transform, np.asarray(reward)), np.float32)


def scaled(transform: Transform, reward: Any) -> Any:
    """Rewards [...] as the agent sees them: an array of NumPy or JAX, as it came."""
    moved = transform.reward_scale * reward + transform.reward_shift
    return moved.clip(-1, 1) if transform.clip_rewards else moved


def observations(transform: Transform, observation: Any) -> Any:
    """Observations [..., *observation] as the agent sees them: NumPy arrays or JAX's, as they came."""
    if transform.mean is None:
        return observation

    def standardized(mean: Any, deviation: Any, array: Any) -> Any:
        if mean is None:
            return array
        scaled, limit = (array - mean) / deviation, transform.clip_observations
        return scaled.clip(-limit, limit) if limit else scaled

    return nest.map_structure(standardized, transform.mean, transform.deviation, observation)


def restored(transform: Transform, observation: Any) -> Any:
    """The inverse of `observations`, but for what that clipped."""
    if transform.mean is None:
        return observation

    def raw(mean: Any, deviation: Any, array: Any) -> Any:
        return array if mean is None else array * deviation + mean

    return nest.map_structure(raw, transform.mean, transform.deviation, observation)


def apply(transform: Transform, dataset: Dataset) -> Dataset:
    """The dataset as the agent sees it. Raises ValueError if its steps are no single ones."""
    replay.require_single_steps(dataset, "rewards")
    steps = dataset.transitions
    return dataset._replace(
        transitions=steps._replace(
            observation=observations(transform, steps.observation),
            next_observation=observations(transform, steps.next_observation),
            reward=rewards(transform, steps.reward),
        )
    )


def to_json(transform: Transform) -> dict[str, Any]:
    """As JSON, from which `from_json` makes the same numbers again."""
    as_list = lambda x: None if x is None else np.asarray(x).tolist()
    fields = transform._asdict()
    return fields | {name: nest.map_structure(as_list, fields[name]) for name in ("mean", "deviation")}


def from_json(fields: Mapping[str, Any]) -> Transform:
    """What `to_json` wrote."""
    as_array = lambda x: None if x is None else np.asarray(x, np.float32)
    arrays = {name: nest.map_structure(as_array, fields[name]) for name in ("mean", "deviation")}
    return Transform(**{**fields, **arrays})
