"""A fixed dataset as a pytree of arrays, and uniform sampling from it inside compiled code.

The same type holds NumPy arrays (as readers return it) and device arrays (as the loop uses it):
`jax.device_put` moves one to the other.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from rl import masks, nest
from rl.replay import images, traces
from rl.replay.source import Configured, Source
from rl.settings import require_share
from rl.types import Array, Key, Transition


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Returns:
    """What transitions over several steps were made with.

    It is no array but a part of their structure, so that compiled code, too, can compare it with an agent's settings
    (`rl.train.population`).
    """

    steps: int  # over so many
    discount: float  # gamma, of what follows the steps
    within: float  # the discount of rewards within the steps
    are_chunks: bool = False  # each is a decision on as many actions (`rl.replay.chunks`)


class Dataset(NamedTuple):
    """``N`` logged steps in the order they were logged, episodes one after another."""

    transitions: Transition  # [N, ...]
    last: Any  # [N] bool: the last logged step of its episode, by termination or by time limit
    returns: Returns | None = None  # of transitions over several steps (`n_step`)


def size(dataset: Dataset) -> int:
    """Number of transitions ``N``."""
    if isinstance(dataset, Transition):
        raise ValueError(
            "a Transition does not say where episodes end: give the Dataset of it, Dataset(transitions, last)"
        )
    return dataset.transitions.reward.shape[0]


def require_single_steps(dataset: Dataset, what: str) -> None:
    """Raises ValueError, saying ``what`` is of single steps, if the transitions are of several (`n_step`)."""
    if size(dataset) and dataset.returns is not None and dataset.returns.steps > 1:
        raise ValueError(
            f"{what} of transitions over {dataset.returns.steps} steps, which would count rewards more than once: take "
            "the dataset of single steps, and make its n-step returns last"
        )


def take(dataset: Dataset, index: Array | np.ndarray) -> Transition:
    """The transitions at ``index`` [...], as a batch with those leading axes."""
    return images.take(dataset.transitions, index)


def sampler(batch_size: int) -> Source:
    """The source of ``batch_size`` rows of a `Dataset`, uniform with replacement."""

    def sample(dataset: Dataset, key: Key, step: Array | int = 0) -> Transition:
        del step
        if size(dataset) == 0 < batch_size:
            raise ValueError("a dataset without transitions: there is nothing to draw")
        return take(dataset, jax.random.randint(key, (batch_size,), 0, size(dataset)))

    return sample


def episode_ends(dataset: Dataset) -> np.ndarray:
    """The last row of every episode, [episodes]. A log that stops inside one was cut there, as by a time limit.

    Raises:
      ValueError: no row is marked as the last one of an episode.
    """
    last = np.array(dataset.last, bool)
    if not last.any():
        raise ValueError(
            f"no episode ends in {len(last)} rows: mark the last logged step of every episode (Dataset.last)"
        )
    last[-1] = True
    return np.flatnonzero(last)


def reach(dataset: Dataset, n: int) -> np.ndarray:
    """The last row [N] of the ``n`` steps from each row on, fewer where the episode ends (`episode_ends`).

    A discount of 0 inside an episode ends them, too: nothing after it counts.
    """
    over = np.asarray(dataset.transitions.discount) == 0
    over[episode_ends(dataset)] = True
    ends, start = np.flatnonzero(over), np.arange(size(dataset))
    return np.minimum(start + n - 1, ends[np.searchsorted(ends, start)])


def n_step(dataset: Dataset, n: int, discount: float, reward_discount: float | None = None) -> Dataset:
    """The dataset with transitions over ``n`` steps, up to their `reach`, as `rl.replay.ring.transitions`.

    Args:
      dataset: of single steps, on the host.
      n: steps, at least 1.
      discount: the agent's gamma.
      reward_discount: of rewards within the steps; by default ``discount``.

    Raises:
      ValueError: no episode ends, ``n`` is below 1, or the steps are no single ones.
    """
    traces.check_steps(n)
    require_single_steps(dataset, "n-step returns")
    if n == 1:
        return dataset
    within = discount if reward_discount is None else reward_discount
    start, end, steps = np.arange(size(dataset)), reach(dataset, n), dataset.transitions
    powers = lambda gamma: np.cumprod(np.append(1.0, np.full(n - 1, gamma)), dtype=np.float32)
    weight = powers(within)
    reward = np.array(steps.reward, np.float32)
    for k in range(1, n):
        later = np.minimum(start + k, end)
        reward += np.where(start + k <= end, weight[k] * steps.reward[later], 0)
    known = steps.has_next_action[end] > 0
    # Of what is kept alone: observations may be large.
    at_end = lambda column: jax.tree.map(lambda x: x[end], column)
    return dataset._replace(
        transitions=steps._replace(
            reward=reward,
            discount=powers(discount)[end - start] * at_end(steps.discount),
            next_observation=at_end(steps.next_observation),
            next_action=np.where(
                known.reshape(-1, *(1,) * (steps.action.ndim - 1)), at_end(steps.next_action), steps.action
            ),
            has_next_action=at_end(steps.has_next_action),
        ),
        returns=Returns(n, discount, within),
    )


def lambda_sampler(batch_size: int, n: int, discount: float, td_lambda: float) -> Source:
    """The source of ``batch_size`` transitions of a `Dataset` of single steps for TD(lambda): see `rl.replay.traces`.

    Args:
      batch_size: how many.
      n: the most steps in one, at least 1. They end with their episode, as those of `n_step`.
      discount: the agent's gamma.
      td_lambda: lambda.

    Raises:
      ValueError: lambda outside of [0, 1], or ``n`` below 1.
    """
    traces.check(td_lambda)
    traces.check_steps(n)

    def draw(dataset: Dataset, key: Key, step: Array | int = 0) -> Transition:
        row_key, length_key = jax.random.split(key)
        rows = jax.random.randint(row_key, (batch_size,), 0, size(dataset))
        return over_steps(dataset, rows, traces.lengths(length_key, batch_size, n, td_lambda), n, discount)

    return Configured(draw, (("discount", discount),))


def over_steps(dataset: Dataset, rows: Array, lengths: Array, n: int, discount: float) -> Transition:
    """The transitions [B] from ``rows`` [B] over ``lengths`` [B] steps, at most ``n``; the rest is as in `n_step`."""
    require_single_steps(dataset, "lambda-returns")
    steps = dataset.transitions
    following = jnp.minimum(rows[:, None] + jnp.arange(n), size(dataset) - 1)
    over = dataset.last[following] | (steps.discount[following] == 0) | (following == size(dataset) - 1)
    reached = jnp.cumsum(over, 1) - over == 0  # no end before the step
    taken = reached & traces.within(lengths, n)
    count = taken.sum(1)
    end = rows + count - 1
    action, known = steps.action[rows], steps.has_next_action[end] > 0
    first, last = images.take(steps, rows), images.take(steps, end)
    weight = jnp.where(taken, discount ** jnp.arange(n, dtype=jnp.float32), 0.0)
    return first._replace(
        reward=(weight * steps.reward[following]).sum(1),
        discount=discount ** (count - 1).astype(jnp.float32) * last.discount,
        next_observation=last.next_observation,
        next_action=jnp.where(masks.expand(known, action), last.next_action, action),
        has_next_action=last.has_next_action,
    )


def is_shuffled(dataset: Dataset) -> bool:
    """Whether most steps that did not terminate are cut off at once, as in a log of single transitions in no order: no
    returns can be computed from it.
    """
    alive = np.asarray(dataset.transitions.discount) > 0
    return bool(alive.any() and np.asarray(dataset.last)[alive].mean() > 0.5)


def without_successor(steps: Transition) -> np.ndarray:
    """Which rows [N] terminated without a logged successor: their own observation stands there (`rl.data.steps`)."""
    missing = np.asarray(steps.discount) == 0
    rows = np.flatnonzero(missing)
    for one, following in zip(
        nest.leaves(steps.observation), nest.leaves(steps.next_observation), strict=True
    ):
        same = np.equal(one[rows], following[rows])
        missing[rows] &= same.all(tuple(range(1, same.ndim)))
    return missing


def returns_to_go(dataset: Dataset, discount: float, bootstrap: float = 0.0) -> np.ndarray:
    """Discounted return from every logged step to the end of its episode, [N] float64, on the host.

    An episode cut by a time limit continues with ``bootstrap`` reward per step for ever, so that the
    ends of long tasks are not mistaken for bad states.

    Raises:
        ValueError: ``discount`` is 1 and there is a reward that goes on for ever, or the steps are no single ones.
    """
    require_single_steps(dataset, "returns")
    if bootstrap != 0 and discount >= 1:
        raise ValueError(f"a bootstrap of {bootstrap} per step for ever has no value at discount {discount}")
    tail = bootstrap / (1.0 - discount) if bootstrap != 0 else 0.0
    # Python numbers: a loop over them is several times faster than over the elements of an array.
    reward = np.asarray(dataset.transitions.reward, np.float64).tolist()
    alive = np.asarray(dataset.transitions.discount, np.float64).tolist()
    last = np.asarray(dataset.last).tolist()
    result, future = [], tail
    for r, a, end in zip(reversed(reward), reversed(alive), reversed(last), strict=True):
        future = r + discount * a * (tail if end else future)
        result.append(future)
    return np.array(result[::-1])


def episode_returns(dataset: Dataset) -> np.ndarray:
    """Undiscounted return of every logged episode, [episodes] float64, on the host.

    Raises:
      ValueError: as `episode_ends`, or the steps are no single ones.
    """
    require_single_steps(dataset, "returns")
    totals = np.cumsum(np.asarray(dataset.transitions.reward, np.float64))[episode_ends(dataset)]
    return np.diff(totals, prepend=0.0)


def terminates(dataset: Dataset) -> bool:
    """Whether an episode in the data ends by itself, and not by a time limit."""
    return bool((np.asarray(dataset.transitions.discount) == 0).any())


def always_terminates(dataset: Dataset) -> bool:
    """Whether every logged episode ends by itself: with a discount of 1 others have no finite value."""
    return bool((np.asarray(dataset.transitions.discount)[episode_ends(dataset)] == 0).all())


def require_finite_values(dataset: Dataset, discount: float, prefix: str = "") -> None:
    """Raises ValueError if ``discount`` is 1 and an episode does not terminate: its rewards would go on for ever; or if
    it does not lie between 0 and 1.

    The message names the discount after the ``prefix``, as in its flag.
    """
    require_share("discount", discount, prefix)
    if discount == 1 and not always_terminates(dataset):
        raise ValueError(
            f"{prefix}discount={discount:g}: episodes that a time limit cuts go on for ever, and have no value with "
            "it: give less than 1"
        )


def for_ever(reward: float, discount: float) -> float:
    """What this reward in every step adds up to."""
    if discount < 1:
        return reward / (1 - discount)
    return math.copysign(math.inf, reward) if reward else 0.0


def value_bounds(
    dataset: Dataset, discount: float, ends: bool = False, adversary: bool = False
) -> tuple[float, float]:
    """A support for categorical value heads: no policy's value on this data lies far outside it.

    The returns-to-go in the data, widened by their own span on either side for policies better or
    worse than the logged one, but never beyond the bound that rewards alone give,
    ``[min r, max r] / (1 - discount)`` (with a reward alone included where episodes terminate). Of steps in no order no
    returns are known (`is_shuffled`): it is that bound itself.

    Args:
      dataset: the data.
      discount: gamma; 1 only where every episode terminates.
      ends: whether targets end episodes, too, as those from a model do: a step that is the last one is worth its
        reward alone, which no return in the data may be near if none of their episodes terminates.
      adversary: whether targets are of the worst of many dynamics. How low their values are no return in the data
        tells, so that the lower end is the bound itself; with a discount of 1 and rewards below 0 there is none
        (-inf), as episodes may be prolonged for ever.

    Raises:
      ValueError: ``discount`` is 1, and an episode does not terminate, or the steps are no single ones.
    """
    require_finite_values(dataset, discount)
    reward = np.asarray(dataset.transitions.reward, np.float64)
    returns = returns_to_go(dataset, discount, bootstrap=float(reward.mean()) if discount < 1 else 0.0)
    floor, ceiling = for_ever(reward.min(), discount), for_ever(reward.max(), discount)
    shown = terminates(dataset)
    if ends or shown:
        floor, ceiling = min(floor, reward.min()), max(ceiling, reward.max())
    if ends and not shown:
        returns = np.append(returns, [reward.min(), reward.max()])
    low, high = widened(np.array([floor, ceiling]) if is_shuffled(dataset) else returns, floor, ceiling)
    return (min(low, float(floor)) if adversary else low), high


def widened(returns: np.ndarray, floor: float, ceiling: float) -> tuple[float, float]:
    """A support: the logged returns, widened by their own span on either side, but not beyond floor and ceiling."""
    span = np.ptp(returns)
    low, high = max(floor, returns.min() - span), min(ceiling, returns.max() + span)
    if high - low < 1e-6:  # constant returns: any support with an interior will do
        low, high = low - 0.5, high + 0.5
    return float(low), float(high)
