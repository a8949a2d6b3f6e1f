"""The model itself, and generation against decoding without a cache."""

from __future__ import annotations

import dataclasses
import functools
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.special import log_softmax
from small_models import CONFIGS, LLAMA, random_params

from rl.language import generate, model
from rl.language.model import LM
from rl.networks import rotary, transformer
from rl.networks.layers import vocabulary_product
from rl.networks.rotary import Rope
from rl.types import Array, Key


@functools.cache
def build(name: str, **options: Any) -> tuple[LM, Any]:
    """One model for all tests, as its compiled programs are."""
    return model.make(CONFIGS[name], **options), random_params(CONFIGS[name])


@functools.partial(jax.jit, static_argnums=0)
def compiled_logits(lm: LM, params: Any, tokens: Array, segment: Array) -> Array:
    return lm.logits(params, lm.features(params, tokens, segment))


def logits(lm: LM, params: Any, tokens: Array, segment: Array) -> np.ndarray:
    return np.asarray(compiled_logits(lm, params, tokens, segment))


def tokens(*shape: int) -> np.ndarray:
    return np.random.RandomState(0).randint(0, 61, shape).astype(np.int32)


# ---- the trunk ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_features_know_the_past_of_their_own_segment_only(name: str) -> None:
    lm, params = build(name)
    x = np.repeat(tokens(1, 12), 12, 0)
    segment = np.repeat([[1] * 5 + [2] * 4 + [0] * 3], 12, 0).astype(np.int32)
    changed = x.copy()
    changed[np.arange(12), np.arange(12)] += 1
    changed %= 61
    difference = np.abs(logits(lm, params, changed, segment) - logits(lm, params, x, segment)).max(-1)
    row, column = np.indices((12, 12))  # row r has column r changed
    reaches = (column >= row) & (segment == segment[0][row])
    np.testing.assert_array_equal(difference > 1e-6, reaches)


def test_packed_texts_are_read_as_if_alone() -> None:
    lm, params = build("gpt2")
    x = tokens(1, 12)
    segment = np.array([[1] * 5 + [2] * 4 + [0] * 3], np.int32)
    together = logits(lm, params, x, segment)
    for start, stop in ((0, 5), (5, 9)):
        alone = logits(lm, params, x[:, start:stop], np.ones((1, stop - start), np.int32))
        np.testing.assert_allclose(together[:, start:stop], alone, atol=1e-5)


def test_positions_restart_with_every_segment() -> None:
    segment = np.array([[1, 1, 1, 2, 2, 0, 0], [0, 0, 1, 1, 1, 1, 2]], np.int32)
    expected = [[0, 1, 2, 0, 1, 0, 1], [0, 1, 0, 1, 2, 3, 0]]
    np.testing.assert_array_equal(jax.jit(transformer.positions)(segment), expected)


def test_rotation_depends_on_distance_alone() -> None:
    shape = dataclasses.replace(LLAMA, rope=Rope(100.0, 4.0, 1.0, 4.0, 16))
    query, key = np.random.RandomState(0).randn(2, 1, 1, 1, 8).astype(np.float32)

    @jax.jit
    def turn(x: Array, position: int) -> Array:
        return rotary.rotate(x, rotary.rotations(shape.rope, shape.head_size, jnp.array([[position]])))

    def product(one: int, other: int) -> float:
        return float((np.asarray(turn(query, one)) * turn(key, other)).sum())

    assert product(3, 1) == pytest.approx(product(13, 11), rel=1e-4)
    assert product(3, 1) != pytest.approx(product(1, 3), rel=1e-2)


@pytest.mark.slow
def test_remat_and_bfloat16_change_the_numbers_as_little_as_they_must() -> None:
    x, segment = tokens(2, 12), np.ones((2, 12), np.int32)

    def loss_and_gradient(**options: Any) -> tuple[Array, Any]:
        lm, params = build("llama", **options)

        def loss(params: Any) -> Array:
            out = lm.logits(params, lm.features(params, x, segment))
            assert out.dtype == jnp.float32
            return jnp.square(out).mean()

        return jax.device_get(jax.jit(jax.value_and_grad(loss))(params))

    value, gradient = loss_and_gradient()
    for options, tolerance in (({"remat": True}, 1e-6), ({"dtype": jnp.bfloat16}, 0.05)):
        other, other_gradient = loss_and_gradient(**options)
        assert float(other) == pytest.approx(float(value), rel=tolerance)
        scale = np.abs(gradient["blocks"]["query"]["kernel"]).max()
        for one, two in zip(jax.tree.leaves(gradient), jax.tree.leaves(other_gradient), strict=True):
            assert two.dtype == np.float32
            np.testing.assert_allclose(one, two, atol=3 * tolerance * max(scale, np.abs(one).max()))


def test_logits_of_bfloat16_are_summed_in_float32() -> None:
    """Products and gradients have inputs of 16 bits, sums and outputs of 32: against NumPy on the rounded numbers."""
    generator = np.random.default_rng(0)
    features, cotangent = (
        np.asarray(generator.normal(size=size), jnp.bfloat16) for size in ((3, 64), (3, 5))
    )
    rows = generator.normal(size=(5, 64)).astype(np.float32)

    @jax.jit
    def ask(features: Array, rows: Array, cotangent: Array) -> Any:
        products, back = jax.vjp(vocabulary_product, features, rows)
        return products, back(cotangent.astype(jnp.float32))

    products, (to_features, to_rows) = ask(features, rows, cotangent)
    assert (products.dtype, to_features.dtype, to_rows.dtype) == (jnp.float32, jnp.bfloat16, jnp.float32)
    x, w, g = (np.asarray(np.asarray(one, jnp.bfloat16), np.float64) for one in (features, rows, cotangent))
    np.testing.assert_allclose(products, x @ w.T, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(np.asarray(to_features, np.float64), g @ w, rtol=2**-8, atol=1e-6)
    np.testing.assert_allclose(to_rows, g.T @ x, rtol=1e-5, atol=1e-5)
    text = jax.jit(vocabulary_product).lower(features, rows).as_text()
    assert "(tensor<3x64xbf16>, tensor<5x64xbf16>) -> tensor<3x5xf32>" in text


def test_log_probabilities() -> None:
    lm, params = build("gpt2")
    x, segment = tokens(2, 12), np.ones((2, 12), np.int32)
    ours = np.asarray(jax.jit(functools.partial(model.log_probabilities, lm))(params, x, segment))
    log_p = log_softmax(logits(lm, params, x, segment), -1)
    assert (ours[:, 0] == 0).all()
    for b, t in np.ndindex(2, 11):
        np.testing.assert_allclose(ours[b, t + 1], log_p[b, t, x[b, t + 1]], rtol=1e-5)


def test_a_model_is_too_short_or_impossible() -> None:
    lm, params = build("llama")
    with pytest.raises(ValueError, match="65 tokens are more than the model's context of 64"):
        lm.features(params, tokens(1, 65), np.ones((1, 65), np.int32))
    with pytest.raises(ValueError, match="4 heads cannot share 3"):
        dataclasses.replace(LLAMA, kv_heads=3)
    with pytest.raises(ValueError, match="even head size"):
        dataclasses.replace(LLAMA, head_size=7)


# ---- generation --------------------------------------------------------------------------------------------------

PROMPTS = [[3, 1, 4, 1, 5], [9, 2], [6]]
STOP = (7, 11)


choose = jax.jit(generate.choose, static_argnames=("temperature", "top_p"))


def uncached(lm: LM, params: Any, steps: int, key: Key, **sampling: float) -> tuple[list, list]:
    """Every step reads its whole text again, alone in its row, without padding."""
    rows, chances = [list(prompt) for prompt in PROMPTS], [[] for _ in PROMPTS]
    over = [False] * len(rows)
    for step in range(steps):
        every = []
        for row in rows:
            x = np.zeros((1, 24), np.int32)
            x[0, : len(row)] = row
            every.append(logits(lm, params, x, np.ones((1, 24), np.int32))[0, len(row) - 1])
        chosen = choose(np.stack(every), jax.random.fold_in(key, step), **sampling)
        for number, token in enumerate(chosen.tolist()):
            if not over[number]:
                rows[number].append(token)
                chances[number].append(log_softmax(every[number])[token])
                over[number] = token in STOP
    return [row[len(prompt) :] for row, prompt in zip(rows, PROMPTS, strict=True)], chances


@pytest.mark.parametrize(
    ("name", "sampling"),
    [("gpt2", {"temperature": 0.0}), ("smollm3", {"temperature": 0.8, "top_p": 0.9})],  # whose layers differ
)
@pytest.mark.slow
def test_generation_equals_decoding_without_a_cache(name: str, sampling: dict[str, float]) -> None:
    lm, params = build(name)
    run = generate.generator(generate.decoder(lm), 12, stop=STOP, **sampling)
    lengths = set()
    for seed in range(3):
        key = jax.random.key(seed)
        texts = run(params, *generate.pad_left(PROMPTS), key)
        expected, chances = uncached(lm, params, 12, key, **sampling)
        for row, text in enumerate(expected):
            assert texts.length[row] == len(text)
            assert texts.tokens[row].tolist() == text + [0] * (12 - len(text))
            np.testing.assert_allclose(texts.log_prob[row, : len(text)], chances[row], atol=1e-4)
            lengths.add(len(text))
    if sampling["temperature"]:
        assert min(lengths) < 12  # a stop token was met


def test_top_p_keeps_the_smallest_sufficient_set() -> None:
    logits = np.log(np.float32([[0.1, 0.4, 0.2, 0.3]]))
    keys = jax.random.split(jax.random.key(0), 200)
    for top_p, expected in ((0.3, {1}), (0.5, {1, 3}), (0.75, {1, 3, 2}), (1.0, {0, 1, 2, 3})):
        drawn = jax.jit(jax.vmap(lambda key, p=top_p: generate.choose(logits, key, top_p=p)))(keys)
        assert set(np.unique(drawn).tolist()) == expected
    # Of equally likely tokens no more than it takes, from the front.
    ties = jnp.zeros((1, 4))
    for top_p, count in ((0.25, 1), (0.3, 2), (0.5, 2), (0.51, 3), (1.0, 4)):
        drawn = jax.jit(jax.vmap(lambda key, p=top_p: generate.choose(ties, key, top_p=p)))(keys)
        assert set(np.unique(drawn).tolist()) == set(range(count))


def test_a_steered_choice_keeps_the_nucleus_of_the_policy() -> None:
    """And not that of the sum, which a token without data may be all of: what is drawn beside NumPy's probabilities."""
    policy, values = np.float32([0.9, 0.099, 0.001]), np.float32([0.0, 0.0, 2.5])
    logits = np.log(policy) + 4 * values
    cases = [(t, p) for t in (1.0, 0.5) for p in (0.5, 0.95, 1.0)]

    @jax.jit
    def draws(key: Any) -> Any:
        rows = lambda x: jnp.tile(jnp.asarray(x), (4000, 1))
        unscaled = rows(np.log(policy) + 3.0)  # logits, which are no log-probabilities
        drawn = [generate.choose(rows(logits), key, *case, unscaled) for case in cases]
        greedy = [generate.choose(logits[None], key, 0.0, p, unscaled[:1])[0] for p in (0.5, 0.95, 1.0)]
        return drawn, greedy, generate.choose(rows(logits), key, 1.0, 0.95)

    drawn, greedy, of_the_sum = draws(jax.random.key(0))
    for (temperature, top_p), tokens in zip(cases, drawn, strict=True):
        kept = np.cumsum(policy) - policy < top_p  # they are in order
        chance = np.where(kept, np.exp(logits / temperature), 0.0)
        frequency = np.bincount(tokens, minlength=3) / len(tokens)
        np.testing.assert_allclose(
            frequency, chance / chance.sum(), atol=0.02, err_msg=f"{temperature} {top_p}"
        )
        assert (frequency[~kept] == 0).all()
    assert [int(token) for token in greedy] == [0, 0, 2]
    assert (of_the_sum == 2).all()  # a plain decoder's, whose logits are its policy


def test_temperature_sharpens() -> None:
    logits = np.float32([[0, 1]])
    keys = jax.random.split(jax.random.key(0), 4000)
    for temperature in (0.5, 2.0):
        drawn = jax.jit(jax.vmap(lambda key, t=temperature: generate.choose(logits, key, t)))(keys)
        assert np.asarray(drawn).mean() == pytest.approx(1 / (1 + np.exp(-1 / temperature)), abs=0.03)


@pytest.mark.slow
def test_steering_adds_the_advantage_to_the_log_policy() -> None:
    lm, params = build("llama")
    other = build("gpt2")[1]
    values = generate.decoder(model.make(CONFIGS["gpt2"]))
    steered = generate.steered(generate.decoder(lm), values, 2.0)
    prompts, segment = generate.pad_left(PROMPTS)

    @functools.partial(jax.jit, static_argnums=0)
    def choices(decoder: generate.Decoder, params: Any) -> Array:
        return decoder.extend(params, prompts, segment, decoder.cache(3, 8))[0].logits

    both = choices(steered, (params, other))
    one, two = choices(generate.decoder(lm), params), choices(values, other)
    np.testing.assert_allclose(both, log_softmax(one, -1) + 2 * np.asarray(two), atol=1e-5)
    # What is generated at a temperature of 0 from a nucleus of the policy that is one token is the policy's own text.
    alone = generate.generator(generate.decoder(lm), 3, temperature=0.0)
    nucleus = generate.generator(generate.steered(generate.decoder(lm), values, 50.0), 3, top_p=1e-6)
    texts = alone(params, prompts, segment, jax.random.key(0)).tokens
    np.testing.assert_array_equal(nucleus((params, other), prompts, segment, jax.random.key(0)).tokens, texts)
    # Both caches go on: each token is that of the whole text before it, read anew.
    written = generate.generator(steered, 3, temperature=0.0)(
        (params, other), prompts, segment, jax.random.key(0)
    )
    read = jax.jit(
        lambda params, text, of: steered.extend(params, text, of, steered.cache(*text.shape))[0].logits
    )
    whole, mine = prompts, segment
    for step in range(3):
        chances = log_softmax(np.asarray(read((params, other), whole, mine)), -1)
        np.testing.assert_array_equal(written.tokens[:, step], chances.argmax(-1))
        np.testing.assert_allclose(written.log_prob[:, step], chances.max(-1), atol=1e-4)
        whole = np.concatenate([whole, chances.argmax(-1)[:, None]], 1).astype(np.int32)
        mine = np.concatenate([mine, np.ones((3, 1), np.int32)], 1)


def test_bad_requests() -> None:
    lm, params = build("llama")
    run = generate.generator(generate.decoder(lm), 60)
    with pytest.raises(ValueError, match="65 tokens are more than the model's context of 64"):
        run(params, *generate.pad_left(PROMPTS), jax.random.key(0))
    for settings in ({"steps": 0}, {"steps": 1, "temperature": -1.0}, {"steps": 1, "top_p": 0.0}):
        with pytest.raises(ValueError, match="generation needs"):
            generate.generator(generate.decoder(lm), **settings)
    with pytest.raises(ValueError, match="at least one token"):
        generate.pad_left([[1], []])
    with pytest.raises(ValueError, match="5 tokens does not fit into 4"):
        generate.pad_left(PROMPTS, 4)


def test_texts_without_their_stop_token() -> None:
    class Words:
        def encode(self, text: str, **_: bool) -> SimpleNamespace:
            return SimpleNamespace(ids=list(range(len(text))))

        def decode_batch(self, rows: list[list[int]]) -> list[str]:
            return [" ".join(map(str, row)) for row in rows]

    texts = generate.Texts(jnp.array([[5, 7, 0], [5, 6, 5]]), jnp.array([2, 3]), jnp.zeros((2, 3)))
    assert generate.texts(texts, Words(), STOP) == ["5", "5 6 5"]
