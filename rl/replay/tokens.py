"""Logged dialogues and programs as rows of tokens: built on the host, sampled on the device.

The data is one `rl.types.TokenBatch` of [N, T] arrays, NumPy while it is built; `jax.device_put` moves it. Every
sampled batch is one gather. For a stream of new episodes, `rl.replay.ring` keeps rows like these.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Hashable, Sequence
from typing import NamedTuple

import jax
import numpy as np

from rl.replay.dataset import for_ever, widened
from rl.replay.source import Source
from rl.types import Array, Key, TokenBatch


class Turn(NamedTuple):
    """A piece of an episode, said by the agent or by its environment."""

    tokens: Sequence[int]
    is_action: bool = False
    reward: float = 0.0  # of an agent's turn: what all of it earned, paid on its last token


class Episode(NamedTuple):
    """One episode; rows like those of `TokenBatch`, [L]."""

    tokens: np.ndarray
    is_action: np.ndarray
    reward: np.ndarray
    terminated: bool  # over by itself; False: cut off by a limit, and its last state still has a value
    imitate: float = 1.0  # weight of its actions in likelihood losses


def episode(turns: Sequence[Turn], terminated: bool, imitate: float = 1.0) -> Episode:
    """Joins turns to an episode.

    Raises:
      ValueError: there are no turns, the agent's first token has nothing before it, an agent's turn is empty, the
        environment has a reward, or a reward is not finite.
    """
    if not turns:
        raise ValueError("an episode without turns: it needs at least a prompt and an answer")
    for number, turn in enumerate(turns):
        if turn.is_action and not len(turn.tokens):
            raise ValueError(f"turn {number} is the agent's and has no tokens: give it at least a stop token")
        if turn.reward and not turn.is_action:
            raise ValueError(
                f"turn {number} is the environment's and has reward {turn.reward}: give it to the agent's turn "
                "before it"
            )
    tokens = np.concatenate([np.asarray(turn.tokens, np.int32) for turn in turns])
    lengths = [len(turn.tokens) for turn in turns]
    is_action = np.repeat([turn.is_action for turn in turns], lengths)
    reward = np.zeros(len(tokens), np.float32)
    for end, turn in zip(np.cumsum(lengths), turns, strict=True):
        if turn.is_action:
            reward[end - 1] = turn.reward
    whole = Episode(tokens, is_action, reward, terminated, imitate)
    _check(whole, "the episode")
    return whole


def pack(
    episodes: Sequence[Episode],
    length: int,
    *,
    together: bool = True,
    bounds: tuple[float, float] | None = None,
    vocabulary: int | None = None,
) -> TokenBatch:
    """Rows of ``length`` tokens that hold the episodes, as NumPy arrays [N, length].

    Args:
      episodes: whole; none is split over rows.
      length: at most the model's context.
      together: several episodes in a row where they fit, each into the fullest row with room for it, the
        longest first; no episode sees another. False: one in each row, in the order given.
      bounds: the smallest and largest reward that a turn of the agent may earn, 0 too. Where episodes have one such
        turn, these are the bounds of what values must represent: a categorical head's support, and at most
        `rl.agents.bcoder.Config.maximum`. Where they have several, values are sums of rewards and reach further.
      vocabulary: rows of the model's embedding (``lm.config.vocabulary``). What a token beyond them stands for is an
        accident of the device, and no error there.

    Raises:
      ValueError: an episode that is longer than ``length``, has no action, starts with one, or has a reward that is
        not finite or outside ``bounds``, or a token below 0 or outside the vocabulary; or no episodes at all.
    """
    if not episodes:
        raise ValueError("there are no episodes to pack")
    for number, one in enumerate(episodes):
        _check(one, f"episode {number}", length, bounds, vocabulary)
    rows = _best_fit(episodes, length) if together else [[number] for number in range(len(episodes))]
    shape = (len(rows), length)
    batch = TokenBatch(
        tokens=np.zeros(shape, np.int32),
        segment=np.zeros(shape, np.int32),
        is_action=np.zeros(shape, bool),
        reward=np.zeros(shape, np.float32),
        discount=np.ones(shape, np.float32),
        imitate=np.zeros(shape, np.float32),
    )
    for row, numbers in enumerate(rows):
        start = 0
        for segment, number in enumerate(numbers, 1):
            one = episodes[number]
            here = np.s_[row, start : start + len(one.tokens)]
            batch.tokens[here] = one.tokens
            batch.segment[here] = segment
            batch.is_action[here] = one.is_action
            batch.reward[here] = one.reward
            batch.imitate[here] = one.imitate * one.is_action
            if one.terminated:
                batch.discount[row, start + np.flatnonzero(one.is_action)[-1]] = 0.0
            start += len(one.tokens)
    return batch


def sampler(batch_size: int) -> Source:
    """The source of ``batch_size`` rows of a `TokenBatch`, or of what holds one, uniform with replacement."""

    def sample(data: TokenBatch, key: Key, step: Array | int = 0) -> TokenBatch:
        del step
        return take(data, jax.random.randint(key, (batch_size,), 0, jax.tree.leaves(data)[0].shape[0]))

    return sample


def take(data: TokenBatch, index: Array) -> TokenBatch:
    """The rows at ``index`` [...]."""
    return jax.tree.map(lambda x: x[index], data)


def best(episodes: Sequence[Episode], share: float, returns: Sequence[float] | None = None) -> list[Episode]:
    """The episodes with ``imitate`` 1 for the ``share`` of highest return and 0 for the others: filtered cloning.

    Episodes whose return equals the lowest of the chosen ones are chosen too, but never those of the lowest return of
    all, unless all are equal: where fewer episodes succeed than ``share`` asks for, failures are not imitated.

    Args:
      episodes: of the log.
      share: above 0 and at most 1.
      returns: what each episode earned; by default the sum of its rewards, of which none must then be cut off.

    Raises:
      ValueError: ``share`` is not above 0 and at most 1.
    """
    if not 0 < share <= 1:
        raise ValueError(f"share must be above 0 and at most 1, not {share}")
    sums = np.array([one.reward.sum() for one in episodes] if returns is None else returns, np.float64)
    # Those of float32 may be equal but for rounding.
    totals: np.ndarray = np.round(sums / (np.abs(sums).max() or 1.0), 6)
    chosen = totals >= np.sort(totals)[::-1][max(round(share * len(totals)), 1) - 1]
    if share < 1 and chosen.all() and (totals > totals.min()).any():
        chosen = totals > totals.min()
    return [one._replace(imitate=float(good)) for one, good in zip(episodes, chosen, strict=True)]


def prompt(one: Episode) -> bytes:
    """The tokens before its first action, as a key."""
    return np.asarray(one.tokens[: int(np.argmax(one.is_action))], np.int64).tobytes()


def split(
    episodes: Sequence[Episode], share: float, seed: int, problems: Sequence[Hashable] | None = None
) -> tuple[list[Episode], list[Episode]]:
    """The episodes to learn from, and about ``share`` of them held out, both in random order.

    Answers to one problem stay on one side: values of a problem that was learned from say nothing of new ones. If every
    problem has more answers than are to be held out, the smallest is held out whole. But a prompt of half of the
    episodes or more, as a game's first line, is no problem, and its episodes are held out one by one.

    Args:
      episodes: of the log.
      share: at least 0 and below 1.
      seed: of the order.
      problems: what each episode is an answer to; by default its `prompt`, which must then be whole.
    """
    answers: dict[Hashable, list[int]] = {}
    for number, problem in enumerate(map(prompt, episodes) if problems is None else problems):
        answers.setdefault(problem, []).append(number)
    groups = sorted(
        group
        for same in answers.values()
        for group in ([same] if 2 * len(same) < len(episodes) else [[number] for number in same])
    )
    order = [groups[index] for index in np.random.default_rng(seed).permutation(len(groups))]
    apart, size, chosen = round(share * len(episodes)), 0, set()
    for place, group in enumerate(order):
        if size + len(group) <= apart:
            size += len(group)
            chosen.add(place)
    if apart and not chosen:
        chosen = {min(range(len(order)), key=lambda place: len(order[place]))}
    learned, held_out = (
        [
            episodes[number]
            for place, group in enumerate(order)
            if (place in chosen) == held
            for number in group
        ]
        for held in (False, True)
    )
    return learned, held_out


def returns_to_go(one: Episode, discount: float, bootstrap: float = 0.0) -> np.ndarray:
    """The discounted return from each of its actions to its end, [actions].

    An episode that was cut off goes on with ``bootstrap`` reward per action for ever; with 0 nothing follows.
    """
    tail = 0.0 if one.terminated else for_ever(bootstrap, discount)
    backwards = one.reward[one.is_action][::-1].tolist()
    totals = itertools.accumulate(backwards, lambda total, reward: reward + discount * total, initial=tail)
    return np.array(list(totals)[1:])[::-1]


def value_bounds(episodes: Sequence[Episode], discount: float) -> tuple[float, float]:
    """A support for categorical value heads: no policy's value on these data lies far outside it.

    The returns of the log, widened by their own span on either side for policies better or worse than the logged one,
    but never beyond as many of the smallest or largest rewards as any episode has rewards: a single verdict at the end
    bounds every value by itself.

    Where an episode was cut off, values reach further, because targets continue with the state after it. It counts as
    if it went on with the mean reward per action of all that were cut off, and the bound is that of
    `rl.replay.dataset.value_bounds`, ``[min r, max r] / (1 - discount)``. At a discount of 1 nothing else is known: an
    end is infinite where a reward could go on for ever.
    """
    rewards = np.concatenate([one.reward for one in episodes])
    cut = [one for one in episodes if not one.terminated]
    if not cut:
        most = max(np.count_nonzero(one.reward) for one in episodes)
        returns = np.concatenate([returns_to_go(one, discount) for one in episodes])
        return widened(returns, most * rewards.min(), most * rewards.max())
    floor, ceiling = (for_ever(float(bound), discount) for bound in (rewards.min(), rewards.max()))
    if discount >= 1:
        return widened(np.array([floor, ceiling]), floor, ceiling)
    mean = float(np.concatenate([one.reward[one.is_action] for one in cut]).mean(dtype=np.float64))
    returns = np.concatenate([returns_to_go(one, discount, mean) for one in episodes])
    return widened(returns, floor, ceiling)


def _best_fit(episodes: Sequence[Episode], length: int) -> list[list[int]]:
    """Which episodes share a row: the longest first, each into the fullest row that has room for it."""
    rows: list[list[int]] = []
    room: list[tuple[int, int]] = []  # (tokens left, row), sorted
    for number in sorted(range(len(episodes)), key=lambda n: -len(episodes[n].tokens)):
        size = len(episodes[number].tokens)
        place = bisect.bisect_left(room, (size, 0))
        if place == len(room):
            left, row = length, len(rows)
            rows.append([])
        else:
            left, row = room.pop(place)
        rows[row].append(number)
        bisect.insort(room, (left - size, row))
    return rows


def _check(
    one: Episode,
    what: str,
    length: int | None = None,
    bounds: tuple[float, float] | None = None,
    vocabulary: int | None = None,
) -> None:
    if length is not None and len(one.tokens) > length:
        raise ValueError(
            f"{what} has {len(one.tokens)} tokens, more than the rows' {length}: shorten it or lengthen the rows"
        )
    if not one.is_action.any():
        raise ValueError(f"{what} has no action tokens: nothing can be learned from it, leave it out")
    if one.is_action[0]:
        raise ValueError(f"{what} starts with an action: put a prompt, or the model's first token, before it")
    if not np.isfinite(one.reward).all():
        raise ValueError(f"{what} has a reward that is not finite")
    top = np.inf if vocabulary is None else vocabulary
    strange = one.tokens[(one.tokens < 0) | (one.tokens >= top)]
    if len(strange):
        raise ValueError(
            f"{what} has the token {strange[0]}, outside the vocabulary [0, {top}): use the model's own tokenizer"
        )
    if bounds is None:
        return
    # Of a turn, or of several without an answer between.
    last = one.is_action & ~np.append(one.is_action[1:], False)
    beyond = one.reward[(last | (one.reward != 0)) & (one.reward != np.clip(one.reward, *bounds))]
    if len(beyond):
        raise ValueError(f"{what} has a reward of {beyond[0]}, outside the stated {list(bounds)}")
