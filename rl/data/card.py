"""What a dataset holds, at a glance: returns, lengths and ends of its episodes, and which actions it covers.

Takes what any reader gives; draws nothing (`rl.plot.dataset_card` does) and opens no file.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from rl import nest
from rl.data.steps import Loaded

BINS = 40  # across [-1, 1], for every dimension of a continuous action
_AT_BOUND = 0.99  # an action component beyond this counts as at the bound


class Card(NamedTuple):
    """Statistics of ``E`` episodes and of all their actions."""

    returns: np.ndarray  # [E] undiscounted
    lengths: np.ndarray  # [E]
    terminated: np.ndarray  # [E] bool; the others were cut
    coverage: np.ndarray  # [D, BINS], shares of each dimension's bins; or [A], of each discrete action


def describe(loaded: Loaded) -> Card:
    """The card of a dataset as a reader gives it."""
    transitions, last, _ = loaded.dataset
    choices = loaded.spec.action_size if loaded.spec.discrete else None
    ends = np.flatnonzero(last)
    starts = np.concatenate([[0], ends[:-1] + 1])
    return Card(
        returns=np.add.reduceat(transitions.reward.astype(np.float64), starts),
        lengths=ends - starts + 1,
        terminated=transitions.discount[ends] == 0,
        coverage=_shares(transitions.action, choices),
    )


def text(card: Card, loaded: Loaded) -> str:
    """The card in words, with the returns normalised by the reference of ``loaded`` if it has one."""
    transition = loaded.dataset.transitions
    lines = [
        loaded.source,
        f"  transitions  {len(transition.reward):,}; "
        f"observation {nest.map_structure(list, loaded.spec.observation_shape)}, "
        + (
            f"{loaded.spec.action_size} actions"
            if loaded.spec.discrete
            else f"action [{loaded.spec.action_size}]"
        ),
        f"  episodes     {len(card.lengths):,}: {card.terminated.sum():,} terminated, "
        f"{(~card.terminated).sum():,} cut",
        f"  length       {_quantiles(card.lengths)}",
        f"  return       {_quantiles(card.returns)}",
    ]
    if loaded.reference is not None:
        random, expert = loaded.reference
        score = 100 * (card.returns.mean() - random) / (expert - random)
        lines.append(f"  normalised   mean {score:.1f} (0 is a return of {random:.6g}, 100 of {expert:.6g})")
    lines += _discrete(card) if loaded.spec.discrete else _continuous(card, transition.action)
    if loaded.note:
        lines.append(f"  note         {loaded.note}")
    return "\n".join(lines)


def _shares(action: np.ndarray, choices: int | None) -> np.ndarray:
    if choices is not None:
        return np.bincount(action, minlength=choices) / len(action)
    bins = np.clip(((action + 1) * (BINS / 2)).astype(int), 0, BINS - 1)
    counts = [np.bincount(column, minlength=BINS) for column in bins.T]
    return np.stack(counts) / len(action)


def _quantiles(values: np.ndarray) -> str:
    low, quarter, median, three_quarters, high = np.quantile(values, (0, 0.25, 0.5, 0.75, 1))
    return (
        f"mean {values.mean():.6g}, std {values.std():.4g}; min {low:.6g}, quartiles {quarter:.6g}, {median:.6g}, "
        f"{three_quarters:.6g}, max {high:.6g}"
    )


def _discrete(card: Card) -> list[str]:
    return ["  actions      " + ", ".join(f"{i}: {share:.1%}" for i, share in enumerate(card.coverage))]


def _continuous(card: Card, action: np.ndarray) -> list[str]:
    lines = [f"  actions      dimension    mean     std  at bound  of {BINS} bins visited"]
    for i, (column, share) in enumerate(zip(action.T, card.coverage, strict=True)):
        bound = (np.abs(column) > _AT_BOUND).mean()
        lines.append(
            f"{i:>24}  {column.mean():>6.3f}  {column.std():>6.3f}  {bound:>8.1%}  {(share > 0).sum():>18}"
        )
    return lines
