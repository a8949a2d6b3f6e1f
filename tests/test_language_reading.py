"""rl.language.reading: scores, returns and errors of three texts by hand, read two at a time."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rl.language import model, reading
from rl.language.model import Config
from rl.networks.transformer import Shape
from rl.replay import tokens as replay
from rl.replay.tokens import Turn, episode
from rl.types import State, TokenBatch
from rl.values.tokens import TokenValues


@pytest.mark.slow
def test_texts_are_scored_and_compared_with_what_followed() -> None:
    rewards = [1.0, -1.0, 0.5]
    rows = replay.pack(
        [episode([Turn([0]), Turn([1, 2], True, reward)], True, 1.0) for reward in rewards],
        4,
        together=False,
    )
    lm = model.make(Config(5, 8, Shape(width=8, layers=1, heads=1, kv_heads=1, head_size=8, inner=8)))
    state = State({"policy": jax.jit(lm.init)(jax.random.key(0))}, {}, {}, jnp.zeros((), jnp.int32))

    def judge(state: State, batch: TokenBatch) -> TokenValues:
        return TokenValues(*(jnp.full(batch.tokens.shape, x) for x in (0.125, 0.5, 0.25)))

    arrays = reading.in_batches(reading.reader(lm, judge, discount=0.5), state, rows, 2)
    assert {name: x.shape for name, x in arrays.items()} == dict.fromkeys(arrays, (3, 4))  # no row of padding
    np.testing.assert_array_equal(arrays["taken"], [[False, True, True, False]] * 3)
    returns = np.array([[reward / 2, reward] for reward in rewards])
    np.testing.assert_allclose(arrays["returns"][:, 1:3], returns)
    np.testing.assert_allclose(arrays["score"][:, 1:3], 0.125)  # what the agent says
    compared = reading.against_returns(arrays)
    assert compared["value_error"] == pytest.approx(np.sqrt(np.mean((0.5 - returns) ** 2)))
    assert compared["return_deviation"] == pytest.approx(returns.std())
    assert compared["log_probability"] == pytest.approx(arrays["log_probability"][:, 1:3].mean())
    logits = lm.logits(state.params["policy"], lm.features(state.params["policy"], rows.tokens, rows.segment))
    by_hand = jax.nn.log_softmax(logits)[:, [0, 1], [1, 2]]
    np.testing.assert_allclose(arrays["log_probability"][:, 1:3], by_hand, rtol=1e-5)
    alone = reading.reader(lm)(
        state, rows
    )  # what has no values is ranked by what it would have said, prompts apart
    np.testing.assert_allclose(
        alone["score"], np.where(arrays["taken"], arrays["log_probability"], 0), rtol=1e-6
    )


@pytest.mark.parametrize("long", [[], [100], [1, 40, 100, 100]])
def test_short_texts_are_read_without_most_of_their_padding(long: list[int]) -> None:
    """The same as at full length, in the same places, and no more work than at that."""
    rng, read = np.random.default_rng(0), []
    texts = [
        episode([Turn([0]), Turn(rng.integers(5, size=n).tolist(), True, 1.0)], True)
        for n in [3, 4, 5, 3] * 3 + [*long, 2]
    ]
    rows = replay.pack(texts, 128, together=False)

    def function(scale: float, batch: TokenBatch) -> dict[str, np.ndarray]:
        read.append(batch.tokens.shape)
        taken = batch.segment > 0
        return {"sum": scale * np.cumsum(batch.tokens, 1) * taken, "reward": batch.reward}

    expected = reading.in_batches(function, 2.0, rows, 2)
    whole = sum(count * length for count, length in read)
    read.clear()
    for name, array in reading.by_length(function, 2.0, rows, 2).items():
        np.testing.assert_array_equal(array, expected[name], err_msg=name)
    assert sum(count * length for count, length in read) <= whole / 2
    read.clear()
    reading.by_length(function, 2.0, jax.tree.map(lambda x: x[12:-1], rows) if long[3:] else rows, 2)
    assert {length for _, length in read} == ({128} if long[3:] else {32, 128} if long else {32})
