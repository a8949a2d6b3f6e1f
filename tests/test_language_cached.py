"""A model on cached activations starts as the model that was cached, and learns."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.special import log_softmax
from small_models import CONFIGS, random_params

from rl import train
from rl.agents import bcoder, lm_bc
from rl.language import cached, model
from rl.language.cached import Batch, Store
from rl.replay import tokens as replay
from rl.values import heads

PROMPT = [3, 1, 4, 1, 5]
ANSWERS = [[9, 2, 6], [5, 3, 5, 8, 9, 7, 9], [3], [2, 3, 8, 4], [6, 2, 6]]


@functools.cache
def readings(name: str) -> list[cached.Reading]:
    read = cached.reader(model.make(CONFIGS[name]), rows=3, lengths=(4, 8), depths=(1,))
    return read(random_params(CONFIGS[name]), PROMPT, ANSWERS)


@pytest.mark.parametrize("depth", [0, -1, 9])
def test_a_depth_that_the_model_does_not_have_is_refused(depth: int) -> None:
    with pytest.raises(ValueError, match=rf"depths=\({depth},\) must lie between 1 and the model's"):
        cached.reader(model.make(next(iter(CONFIGS.values()))), depths=(depth,))


@functools.cache
def stored(name: str) -> tuple[Batch, list[int]]:
    """All answers as one batch over the whole vocabulary, one in each row, and their lengths."""
    config, params = CONFIGS[name], random_params(CONFIGS[name])
    token = np.concatenate([[PROMPT[-1], *answer] for answer in ANSWERS]).astype(np.int32)
    activation = np.concatenate([one.activation for one in readings(name)]).astype(np.float32)
    store = Store(token, activation, params["embedding" if config.tied else "unembedding"])
    sizes = [len(answer) + 1 for answer in ANSWERS]
    ends = np.cumsum(sizes)
    episodes = []
    for number, (end, size) in enumerate(zip(ends, sizes, strict=True)):
        reward = np.zeros(size, np.float32)
        reward[-1] = 1.0 if number == 1 else -1.0
        place = np.arange(end - size, end, dtype=np.int32)
        episodes.append(replay.Episode(place, np.arange(size) > 0, reward, True, float(number == 1)))
    return jax.jit(cached.gather)(replay.pack(episodes, 8, together=False), store), sizes


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_reading_is_that_of_the_whole_text(name: str) -> None:
    config, params = CONFIGS[name], random_params(CONFIGS[name])
    lm = model.make(config)
    rows = np.zeros((len(ANSWERS), 12), np.int32)
    for row, answer in zip(rows, ANSWERS, strict=True):
        row[: len(PROMPT) + len(answer)] = PROMPT + answer
    logits = jax.jit(lambda p, x: lm.logits(p, lm.features(p, x, jnp.ones_like(x))))(params, rows)
    log_p = log_softmax(logits, -1)
    # What the lower depth keeps is what the model without its upper block makes, but for the norm's weights.
    short = model.make(dataclasses.replace(config, shape=dataclasses.replace(config.shape, layers=1)))
    below = {**params, "blocks": jax.tree.map(lambda x: x[:1], params["blocks"])}
    features = jax.jit(short.features)(below, rows, np.ones_like(rows))
    lower = (features - params["norm"].get("bias", 0.0)) / params["norm"]["scale"]
    for row, (answer, reading) in enumerate(zip(ANSWERS, readings(name), strict=True)):
        first = len(PROMPT) - 1
        expected = [log_p[row, first + i, token] for i, token in enumerate(answer)]
        np.testing.assert_allclose(reading.log_prob, expected, atol=1e-4)
        assert reading.activation.shape == (len(answer) + 1, 2, config.shape.width)
        expected = lower[row, first : first + len(answer) + 1]
        np.testing.assert_allclose(reading.activation[:, 0], expected, atol=4e-3)
        np.testing.assert_array_equal(reading.best, log_p[row, first : first + len(answer) + 1].argmax(-1))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_it_starts_as_the_frozen_model(name: str) -> None:
    batch, sizes = stored(name)
    build = cached.on_top(CONFIGS[name], random_params(CONFIGS[name]), blocks=2, inner=12, depths=2)
    params = jax.jit(build(batch).init)(jax.random.key(0))
    log_prob = np.asarray(jax.jit(functools.partial(cached.log_probabilities, build))(params, batch))
    for row, (size, reading) in enumerate(zip(sizes, readings(name), strict=True)):
        np.testing.assert_allclose(log_prob[row, 1:size], reading.log_prob, atol=2e-2)  # kept in 16 bits
    assert jax.tree.leaves(params["blocks"])[0].shape[0] == 2


def trained(make: Any, batch: Batch, updates: int) -> Any:
    learner = cached.learner(make, cached.on_top(CONFIGS["llama"], random_params(CONFIGS["llama"]), 1, 12, 2))
    state = jax.jit(learner.init)(jax.random.key(0), batch)
    epoch = jax.jit(train.scan_updates(learner.update, lambda data, key, step: data, updates))
    return epoch(state, batch, jax.random.key(1))[0]


def test_a_store_keeps_the_rows_that_are_needed() -> None:
    table = np.arange(20.0).reshape(10, 2)
    store = cached.store(np.array([7, 3, 7]), np.zeros((3, 1, 2)), np.array([3, 9, 3]), table)
    np.testing.assert_array_equal(store.unembedding, table[[3, 7, 9]])
    np.testing.assert_array_equal(store.token, [1, 0, 1])


@pytest.mark.slow
def test_agents_learn_on_it() -> None:
    batch, sizes = stored("llama")
    config = lm_bc.Config(learning_rate=1e-2)
    state = trained(lambda lm: lm_bc.make(config, lm, heads.scalar()), batch, 100)
    build = cached.on_top(CONFIGS["llama"], random_params(CONFIGS["llama"]), 1, 12, 2)
    log_probabilities = jax.jit(functools.partial(cached.log_probabilities, build))
    log_prob = np.asarray(log_probabilities(state.params["policy"], batch))
    assert log_prob[1, 1 : sizes[1]].mean() > -0.2 > readings("llama")[1].log_prob.mean()

    values = bcoder.Config(alpha=0.0, value_updates=1000, value_learning_rate=1e-2, inner=16)
    state = trained(lambda lm: bcoder.make(values, lm, heads.scalar()), batch, 250)
    judge = jax.jit(
        lambda state: bcoder.token_values(values, build(batch), heads.scalar())(state, batch.tokens).v
    )
    v = np.asarray(judge(state))
    last = [v[row, size - 1] for row, size in enumerate(sizes)]
    # The third answer is one token: its state is the prompt, from which one of five answers earns 1.
    np.testing.assert_allclose(last, [-1.0, 1.0, -0.6, -1.0, -1.0], atol=0.1)


@pytest.mark.slow
def test_texts_that_fit_are_read_where_their_padding_does_not_fit() -> None:
    read = cached.reader(model.make(CONFIGS["llama"]), rows=1, lengths=(4, 64))
    most = CONFIGS["llama"].context - 3
    [one] = read(random_params(CONFIGS["llama"]), [1] * most, [[2, 3, 4]])
    assert one.log_prob.shape == (3,)


@pytest.mark.slow
def test_what_it_cannot_do_is_said() -> None:
    read = cached.reader(model.make(CONFIGS["llama"]), lengths=(4,))
    for answer in ([], [1] * 5):
        with pytest.raises(ValueError, match="answers must have from 1 to 4 tokens"):
            read(random_params(CONFIGS["llama"]), PROMPT, [answer])
    batch, _ = stored("llama")
    build = cached.on_top(CONFIGS["llama"], random_params(CONFIGS["llama"]), 1, 12, 2)
    learner = cached.learner(lambda lm: lm_bc.make(lm_bc.Config(), lm, heads.scalar()), build)
    with pytest.raises(NotImplementedError, match="can neither act nor generate"):
        learner.act(None, None, None)  # type: ignore[arg-type]
    assert batch.activation.shape == (5, 8, 2, 16)
