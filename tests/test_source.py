"""rl.replay.source: how many rows come from where, which come first, and shares that follow a schedule."""

from __future__ import annotations

import functools
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rl import train
from rl.agents import iql
from rl.replay import dataset as replay
from rl.replay import ring, source
from rl.replay.dataset import Dataset
from rl.types import State, Transition

KEY = jax.random.key(0)
BATCH = 8


def numbered(first: int, count: int, **fields: Any) -> Dataset:
    """Rows whose every field is their number, from ``first`` on."""
    row = jnp.arange(first, first + count, dtype=jnp.float32)
    steps = Transition(row[:, None], row[:, None], row, row, row[:, None], row[:, None], row, **fields)
    return Dataset(steps, jnp.ones(count, bool))


LOG, MODEL = numbered(0, 50), numbered(100, 50)


def filled() -> ring.Ring:
    rows = MODEL.transitions
    return ring.insert(ring.empty(jax.tree.map(lambda x: x[0], rows), 80), rows)


def drawn(draw: source.Source, data: Any, steps: Any, keys: int = 1) -> Transition:
    """Batches [steps, keys, B] of one compiled program."""

    def at(step: Any, key: Any) -> Any:
        return draw(data, jax.random.fold_in(key, step), step)

    batch = jax.jit(jax.vmap(jax.vmap(at, (None, 0)), (0, None)))(steps, jax.random.split(KEY, keys))
    for field in (batch.observation, batch.action, batch.next_observation, batch.next_action):
        np.testing.assert_array_equal(field[..., 0], batch.reward)  # rows stay whole
    return batch


@pytest.mark.slow
def test_logged_rows_come_first_and_say_where_they_are_from() -> None:
    both = source.concatenated(replay.sampler(3), ring.row_sampler(5))
    batch = drawn(both, (LOG, filled()), jnp.arange(200))
    np.testing.assert_array_equal(batch.origin, np.broadcast_to([0] * 3 + [1] * 5, (200, 1, BATCH)))
    assert batch.origin.dtype == jnp.int32
    np.testing.assert_array_equal(batch.reward >= 100, batch.origin == 1)
    assert set(np.unique(batch.reward)) == {*range(50), *range(100, 150)}  # all rows of both
    assert replay.sampler(3)(LOG, KEY, 0).origin is None  # alone there is nothing to tell apart
    twice = drawn(source.concatenated(replay.sampler(4), replay.sampler(4)), (LOG, LOG), jnp.arange(3))
    assert (twice.reward[..., :4] != twice.reward[..., 4:]).any()  # each source has draws of its own


def test_none_of_one_source_is_all_of_the_other() -> None:
    batch = drawn(
        source.concatenated(replay.sampler(0), ring.row_sampler(BATCH)), (LOG, filled()), jnp.arange(3)
    )
    assert (batch.origin == 1).all() and (batch.reward >= 100).all()


@pytest.mark.slow
def test_whole_batches_come_with_the_probability_that_the_schedule_gives() -> None:
    """5 % of logged batches until update 4, and 60 % from there; never any of share 0."""
    shares = lambda step: jnp.where(step < 4, jnp.array([0.05, 0.95, 0.0]), jnp.array([0.6, 0.0, 0.4]))
    parts = [replay.sampler(BATCH), ring.row_sampler(BATCH), replay.sampler(BATCH)]
    whole = source.whole_batches(*parts, shares=shares)
    batch = drawn(whole, (LOG, filled(), numbered(200, 50)), jnp.arange(8), keys=4000)
    assert (batch.origin == batch.origin[..., :1]).all()  # no batch of two sources
    np.testing.assert_array_equal(batch.reward // 100, batch.origin)
    often = np.stack([(batch.origin[..., 0] == which).mean(1) for which in range(3)], 1)
    np.testing.assert_allclose(often[:4], np.tile([0.05, 0.95, 0], (4, 1)), atol=0.015)
    np.testing.assert_allclose(often[4:], np.tile([0.6, 0, 0.4], (4, 1)), atol=0.03)
    assert (often[:4, 2] == 0).all() and (often[4:, 1] == 0).all()
    chosen = np.asarray(batch.origin[:4, :, 0])
    assert abs(np.corrcoef(chosen[0], chosen[1])[0, 1]) < 0.06  # each update draws anew
    assert len(np.unique(batch.reward[0, :, 0])) > 45  # and what it draws is not the choice again


def test_sources_that_are_joined_keep_the_discount_by_which_they_draw() -> None:
    parts = lambda discount: (ring.row_sampler(4), replay.lambda_sampler(4, 3, discount, 0.5))
    half = lambda step: jnp.array([0.5, 0.5])
    for join in (source.concatenated, functools.partial(source.whole_batches, shares=half)):
        both = join(*parts(0.9))
        with pytest.raises(ValueError, match=r"draws with discount=0.9, and the agent has discount=0.99"):
            train.population(lambda config: None, iql.Config(discount=0.99), both, 1)
        with pytest.raises(ValueError, match=r"different settings, discount=0.9 and discount=0.99"):
            join(*parts(0.9), *parts(0.99))


def test_only_one_source_is_read_for_a_whole_batch() -> None:
    """One seed's program has a branch, and not the work of both."""
    half = lambda step: jnp.array([0.5, 0.5])
    whole = source.whole_batches(replay.sampler(BATCH), ring.row_sampler(BATCH), shares=half)
    program = jax.make_jaxpr(lambda key: whole((LOG, filled()), key, 0))(KEY)
    assert "cond" in {equation.primitive.name for equation in program.eqns}
    assert "gather" not in {equation.primitive.name for equation in program.eqns}


def test_demonstrations_flagged_row_by_row_keep_their_flags() -> None:
    flagged = numbered(0, 50, origin=(jnp.arange(50) % 5 == 0).astype(jnp.int32) * 7)
    both = source.concatenated(replay.sampler(4), ring.row_sampler(4))
    batch = drawn(both, (flagged, filled()), jnp.arange(20))
    np.testing.assert_array_equal(batch.origin[..., :4], np.where(batch.reward[..., :4] % 5 == 0, 7, 0))
    assert (batch.origin[..., 4:] == 1).all()


def test_demonstrations_are_the_rows_of_the_log() -> None:
    """All rows where nothing tells them apart; else those of the first source, however they were flagged."""
    assert source.is_logged(LOG.transitions).tolist() == [True] * 50
    flagged = source.of_origin(LOG.transitions._replace(origin=jnp.arange(50) % 3), source.ONLINE)
    assert source.is_logged(flagged).tolist() == [row % 3 == 0 for row in range(50)]
    assert not source.is_logged(source.of_origin(LOG.transitions, source.ONLINE)).any()
    both = source.concatenated(replay.sampler(3), ring.row_sampler(5))((LOG, filled()), KEY, 0)
    assert source.is_logged(both).tolist() == [True] * 3 + [False] * 5


def test_the_loop_tells_the_source_its_update_and_compiles_once() -> None:
    """An epoch of 5 and one that goes on from there; each batch is its update's number."""

    @chex.assert_max_traces(n=2)  # once for the names of the metrics
    def update(state: State, batch: Any, key: Any) -> tuple[State, Any]:
        return state._replace(step=state.step + 1), {"batch": 1.0 * batch, "last": 1.0 * state.step}

    epoch = jax.jit(train.scan_updates(update, lambda data, key, step: step, 5))
    state = State({}, {}, {}, jnp.zeros((), jnp.int32))
    for expected in (2.0, 7.0):
        state, report = epoch(state, None, KEY)
        np.testing.assert_allclose(report.metrics["batch"], expected, rtol=1e-5)


def test_means_over_a_long_epoch_are_not_rounded_away() -> None:
    """A float32 sum of 300,000 numbers near 0.1 is off by a thousandth, and one of a million by a hundredth."""

    def update(state: State, batch: Transition, key: Any) -> tuple[State, Any]:
        return state._replace(step=state.step + 1), {"constant": jnp.asarray(0.1), "half": state.step % 2}

    state = State({}, {}, {}, jnp.zeros((), jnp.int32))
    _, report = jax.jit(train.scan_updates(update, lambda *_: None, 300_000))(state, None, KEY)
    assert float(report.metrics["constant"]) == pytest.approx(0.1, rel=1e-6)
    assert float(report.metrics["half"]) == pytest.approx(0.5, rel=1e-4)


def test_what_cannot_be_drawn_is_refused() -> None:
    two = replay.sampler(BATCH), ring.row_sampler(BATCH)
    of = lambda shares: source.whole_batches(*two, shares=lambda step: jnp.array(shares))
    with pytest.raises(ValueError, match=r"shares of 2 sources must be \[2\], not \[3\]"):
        of([0.2, 0.3, 0.5])((LOG, filled()), KEY, 0)
    for join in (source.concatenated(*two), of([0.5, 0.5])):
        for data in ((LOG,), LOG.transitions):
            with pytest.raises(ValueError, match="data of 2 sources must be a tuple of that many"):
                join(data, KEY, 0)
