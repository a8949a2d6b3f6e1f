"""Where batches come from: one notion for logged data, replay and rows of a model, alone or together.

A source is a function of (data, key, step) that draws one batch; ``step`` counts updates, so that what is drawn can
follow a schedule inside compiled code. `rl.replay.dataset.sampler`, `rl.replay.ring.sampler` and
`rl.replay.tokens.sampler` make sources of one kind of data. The functions here join sources; the data of what they
return is a tuple with the data of each. Every `rl.types.Transition` then says in ``origin`` which source it came from,
counted from 0 in the order given. Rows that have an ``origin`` keep it: a dataset whose demonstrations are flagged row
by row, say.

By convention logged data is the first: its rows have the origin `LOGGED`, 0. The rows that a model made have 1 in
`rl.model_based`. Those that the learner collected itself have `ONLINE`, also where nothing else is drawn (`rl.online`),
and the model's beside them `MODEL` (`rl.mbpo`): below 0, which no flag of a dataset's rows should be. Agents that treat
demonstrations differently ask `is_logged`.

| | a batch is | shares |
|---|---|---|
| `concatenated` | all rows of one batch of each source | fixed by their sizes |
| `whole_batches` | one batch of one source, chosen at random (MBPO, Janner et al. 2019) | may change with the step |
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from rl.types import Array, Key, Transition

LOGGED = 0  # the `Transition.origin` of logged data: demonstrations
ONLINE = -1  # that of the learner's own experience
MODEL = -2  # that of a model's rows beside it

# (data, key, number of the update [] int32) -> batch
Source = Callable[[Any, Key, Array | int], Any]


@dataclasses.dataclass(frozen=True)
class Configured:
    """A source whose draws depend on settings of the agent. It names them, for `rl.train.population` to compare."""

    draw: Source
    settings: tuple[tuple[str, Any], ...]  # (name in the agent's config, value): "discount", "goals.negative"

    def __call__(self, data: Any, key: Key, step: Array | int = 0) -> Any:
        return self.draw(data, key, step)


def with_settings_of(sources: Sequence[Source], draw: Source) -> Source:
    """``draw``, which asks ``sources``: `Configured` where one of them is.

    Raises:
      ValueError: they draw by different settings.
    """
    settings: dict[str, Any] = {}
    for source in sources:
        for name, value in source.settings if isinstance(source, Configured) else ():
            if settings.setdefault(name, value) != value:
                raise ValueError(
                    f"the sources draw by different settings, {name}={settings[name]} and {name}={value}: give all of "
                    "them that of the agent"
                )
    return Configured(draw, tuple(settings.items())) if settings else draw


def is_logged(batch: Transition) -> Array:
    """Which rows [...] are logged data (demonstrations): those of origin `LOGGED`, or all where none has an origin."""
    if batch.origin is None:  # of a fixed dataset
        return jnp.ones(batch.reward.shape, bool)
    return batch.origin == LOGGED


def of_origin(batch: Transition, origin: int) -> Transition:
    """``batch`` with this origin in every row that has none."""
    if batch.origin is not None:
        return batch
    return batch._replace(origin=jnp.full(batch.reward.shape, origin, jnp.int32))


def concatenated(*sources: Source) -> Source:
    """All rows that ``sources`` draw, in their order; it costs what they cost.

    Raises:
      ValueError: they draw by different settings (`Configured`).
    """

    def draw(data: Any, key: Key, step: Array | int) -> Any:
        _check_data(data, sources)
        keys = jax.random.split(key, len(sources))
        batches = [_flagged(source(data[i], keys[i], step), i) for i, source in enumerate(sources)]
        return jax.tree.map(lambda *x: jnp.concatenate(x), *batches)

    return with_settings_of(sources, draw)


def whole_batches(*sources: Source, shares: Callable[[Array | int], Array]) -> Source:
    """Each batch is that of one source, chosen at random; never one of share 0.

    Under `jax.vmap` over keys every source draws, and one of the batches is kept.

    Args:
      sources: K of them.
      shares: step -> [K] the probability of each; their sum is 1.

    Raises:
      ValueError: the sources draw by different settings; when a batch is drawn, shares that are not one for each.
    """

    def draw(data: Any, key: Key, step: Array | int) -> Any:
        choice_key, draw_key = jax.random.split(key)
        _check_data(data, sources)
        share = shares(step)
        if share.shape != (len(sources),):
            raise ValueError(
                f"shares of {len(sources)} sources must be [{len(sources)}], not {list(share.shape)}"
            )
        branches = [
            lambda index=index: _flagged(sources[index](data[index], draw_key, step), index)
            for index in range(len(sources))
        ]
        return jax.lax.switch(jax.random.categorical(choice_key, jnp.log(share)), branches)

    return with_settings_of(sources, draw)


def _flagged(batch: Any, index: int) -> Any:
    """``batch`` with the number of its source; token batches have no place for it."""
    return of_origin(batch, index) if isinstance(batch, Transition) else batch


def _check_data(data: Any, sources: Sequence[Source]) -> None:
    if not isinstance(data, tuple) or len(data) != len(sources):
        raise ValueError(f"the data of {len(sources)} sources must be a tuple of that many, not {type(data)}")
