"""Chunks of actions: ``H`` steps as one decision of an agent that knows of single ones alone.

A chunk is an action of ``H * D`` numbers, one action after another. Its reward is the discounted return over its steps,
and its discount what is left of the value after them, so that the one-step backup of any agent makes the exact target

    r_0 + g r_1 + ... + g^(H-1) r_(H-1) + g^H d V(s_H)

The backup of a chunk of *logged* actions has no bias from what else the policy would have done within it, as n-step
returns without chunks have (Li, Zhou & Levine 2025, "Reinforcement learning with action chunking").

| within the H steps | the chunk | its target |
|---|---|---|
| nothing ends | is drawn | as above |
| a termination (a discount of 0) | is drawn | the return up to there, without a value |
| a time limit, or the end of the log | is never drawn (weight 0) | |

Actions after a termination change no return. They are the logged ones where the log goes on, as OGBench's does after a
success; where it does not, the last action again. Chunks never reach into another episode.

Everything is index arithmetic: a batch of ``B`` chunks reads ``B * H`` actions and ``B`` observations. Of a ring
`rl.replay.ring.action_chunks` reads them; `rl.acting.in_chunks` lets such an agent act.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from rl.replay import dataset as replay
from rl.replay import images, traces
from rl.replay.dataset import Dataset, Returns
from rl.replay.source import Source
from rl.types import Array, Key, Spec, Transition


class Chunks(NamedTuple):
    """A dataset of ``N`` steps, read in chunks from ``M`` of its rows on."""

    steps: Transition  # [N, ...] over H steps (`rl.replay.dataset.n_step`), but for their single actions
    starts: Any  # [M] int32: rows whose chunks are whole, or end by termination
    last: Any  # [N] int32: the last row of each one's episode
    returns: Returns  # what they were made with, the number of their actions included


def spec(spec: Spec, length: int) -> Spec:
    """What an agent is told of an environment in which it decides on ``length`` actions at once.

    Raises:
      ValueError: integer actions.
    """
    if length == 1:
        return spec
    if spec.discrete:
        raise ValueError(
            f"--chunk={length}: chunks are of continuous actions, and these are integers: leave it out "
            "(length=1)"
        )
    return spec._replace(action_size=length * spec.action_size)


def make(dataset: Dataset, length: int, discount: float, reward_discount: float | None = None) -> Chunks:
    """The chunks of ``length`` actions of a dataset, on the host.

    Args:
      dataset: of single steps.
      length: actions in each, ``H``, at least 1.
      discount: the agent's gamma, of one step.
      reward_discount: of rewards within a chunk; by default ``discount``.

    Raises:
      ValueError: no episode is so long, ``length`` is below 1, or the steps are no single ones.
    """
    ends = _ends(dataset, length)
    start, steps = np.arange(replay.size(dataset)), dataset.transitions
    end = replay.reach(dataset, length)
    drawn = (end - start == length - 1) | (np.asarray(steps.discount)[end] == 0)
    over = replay.n_step(dataset, length, discount, reward_discount).transitions
    following = np.minimum(end + 1, len(start) - 1)
    # Where a log has no next observations, the step that a time limit cut is left out, and the one before it, the last
    # that is left, still knows its next action: there is no chunk after it all the same.
    after = (end - start == length - 1) & ~np.isin(end, ends)
    known = (over.has_next_action > 0) & after & drawn[following]
    over = over._replace(action=steps.action, next_action=steps.action, has_next_action=np.float32(known))
    last = ends[np.searchsorted(ends, start)]
    within = discount if reward_discount is None else reward_discount
    return Chunks(
        over,
        np.flatnonzero(drawn).astype(np.int32),
        last.astype(np.int32),
        Returns(length, discount, within, True),
    )


def _ends(dataset: Dataset, length: int) -> np.ndarray:
    """The last rows of the episodes. Raises ValueError where none of them is ``length`` steps long, or none ends, or
    if steps are no single ones.
    """
    traces.check_steps(length)
    replay.require_single_steps(dataset, "chunks")
    ends = replay.episode_ends(dataset)
    longest = np.diff(ends, prepend=-1).max()
    if length > longest:
        raise ValueError(
            f"--chunk={length} is longer than every episode of the data: the longest has {longest} steps; give at "
            f"most that (length={longest})"
        )
    return ends


def take(chunks: Chunks, rows: Array) -> Transition:
    """The chunks of ``H`` actions from ``rows`` [...] on, with those leading axes; actions are [..., H * D].

    ``next_action`` is the chunk that was logged next, where that may be drawn, too.
    """
    steps, length = images.take(chunks.steps, rows), chunks.returns.steps
    last = chunks.last[rows][..., None]

    def actions(start: Array) -> Array:
        place = jnp.minimum(start[..., None] + jnp.arange(length), last)
        return chunks.steps.action[place].reshape(*rows.shape, -1)

    action, known = actions(rows), steps.has_next_action[..., None] > 0
    return steps._replace(action=action, next_action=jnp.where(known, actions(rows + length), action))


def sampler(batch_size: int) -> Source:
    """The source of ``batch_size`` chunks of `Chunks`, uniform over those that may be drawn."""

    def sample(chunks: Chunks, key: Key, step: Array | int = 0) -> Transition:
        del step
        index = jax.random.randint(key, (batch_size,), 0, chunks.starts.shape[0])
        return take(chunks, chunks.starts[index])

    return sample


def value_bounds(
    dataset: Dataset, length: int, discount: float, reward_discount: float
) -> tuple[float, float]:
    """As `rl.replay.dataset.value_bounds`, where rewards within a chunk have a discount of their own.

    With one discount for both, the values of chunks are those of single steps, and so are their bounds.

    Raises:
      ValueError: no episode is so long, or ``discount`` is 1 and one does not terminate.
    """
    ends = _ends(dataset, length)
    replay.require_finite_values(dataset, discount)
    # In float64: what float32 rounds off the discounts is divided by what is left of 1.
    reward, alive = (
        np.asarray(x, np.float64) for x in (dataset.transitions.reward, dataset.transitions.discount)
    )
    start, end = np.arange(len(reward)), replay.reach(dataset, length)
    continuation, weights = discount**length, sum(reward_discount**k for k in range(length))
    # where a time limit cuts
    tail = replay.for_ever(reward.mean() * weights, continuation) if discount < 1 else 0.0
    cut = np.isin(end, ends) & (alive[end] > 0)
    whole = (end - start == length - 1).tolist()
    within = lambda k: np.where(start + k <= end, reward[np.minimum(start + k, end)], 0.0)
    total = np.zeros(len(reward))
    for k in range(length):
        total += reward_discount**k * within(k)
    gain = total.tolist()  # Python numbers, as in `rl.replay.dataset.returns_to_go`
    left = (discount ** (end - start + 1) * alive[end]).tolist()
    stops, after = cut.tolist(), np.minimum(end + 1, len(end) - 1).tolist()
    returns = [tail] * len(gain)
    for row in reversed(range(len(gain))):
        if whole[row] or not stops[row]:
            returns[row] = gain[row] + left[row] * (tail if stops[row] else returns[after[row]])
    floor, ceiling = (
        replay.for_ever(bound * weights, continuation)
        for bound in (min(reward.min(), 0.0), max(reward.max(), 0.0))
    )
    return replay.widened(np.array(returns), floor, ceiling)
