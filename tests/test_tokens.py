"""The token MDP, on episodes whose every number is worked out by hand or by plain loops."""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rl.networks import token_heads
from rl.replay import tokens as replay
from rl.replay.tokens import Episode, Turn, episode
from rl.types import TokenBatch
from rl.values import heads, tokens
from rl.values.heads import ValueHead

# Two questions and two answers, the game goes on after the second; and one that ends with its only answer.
CUT = episode(
    [Turn([1, 2]), Turn([3, 4], True, -1.0), Turn([5]), Turn([6, 7], True, -2.0), Turn([8])],
    terminated=False,
)
OVER = episode([Turn([9]), Turn([1, 2, 3], True, 5.0)], terminated=True, imitate=0.5)


def packed() -> TokenBatch:
    return replay.pack([CUT, OVER], 14)


# ---- building ----------------------------------------------------------------------------------------------------


def test_a_row_by_hand() -> None:
    batch = packed()
    expected = {
        "tokens": [1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2, 3, 0, 0],
        "segment": [1, 1, 1, 1, 1, 1, 1, 1, 2, 2, 2, 2, 0, 0],
        "is_action": [0, 0, 1, 1, 0, 1, 1, 0, 0, 1, 1, 1, 0, 0],
        "reward": [0, 0, 0, -1, 0, 0, -2, 0, 0, 0, 0, 5, 0, 0],
        "discount": [1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 0, 1, 1],
        "imitate": [0, 0, 1, 1, 0, 1, 1, 0, 0, 0.5, 0.5, 0.5, 0, 0],
    }
    for name, row in expected.items():
        np.testing.assert_array_equal(getattr(batch, name), [row], err_msg=name)
    # What the environment says after the last action is not what ends the episode.
    said = episode([Turn([9]), Turn([1, 2], True, 5.0), Turn([3, 4])], terminated=True)
    np.testing.assert_array_equal(replay.pack([said], 6).discount, [[1, 1, 0, 1, 1, 1]])


def test_packing_keeps_every_episode_whole() -> None:
    generator = np.random.RandomState(0)
    episodes = [
        episode([Turn([n]), Turn(generator.randint(1, 9, size), True, float(n))], terminated=bool(n % 2))
        for n, size in enumerate(generator.randint(1, 12, 40), 1)
    ]
    batch = replay.pack(episodes, 16, bounds=(1, 40))
    unpacked = []
    for row in range(len(batch.tokens)):
        for number in range(1, batch.segment[row].max() + 1):
            here = batch.segment[row] == number
            one = TokenBatch(*(x[row][here] for x in batch))
            unpacked.append((one.tokens.tolist(), one.reward.sum(), bool(one.discount[-1] == 0)))
    wanted = [(e.tokens.tolist(), e.reward.sum(), e.terminated) for e in episodes]
    assert sorted(unpacked) == sorted(wanted)
    total = sum(len(e.tokens) for e in episodes)
    assert len(batch.tokens) <= 1.2 * total / 16  # nearly full
    alone = replay.pack(episodes, 16, together=False)
    assert len(alone.tokens) == 40
    np.testing.assert_array_equal(alone.tokens[:, 0], np.arange(1, 41))


@pytest.mark.parametrize(
    ("turns", "message"),
    [
        ([], "an episode without turns"),
        ([Turn([1]), Turn([2])], "no action tokens"),
        ([Turn([1], True)], "starts with an action"),
        ([Turn([1]), Turn([], True)], "turn 1 is the agent's and has no tokens"),
        ([Turn([1], reward=1.0), Turn([2], True)], "turn 0 is the environment's and has reward 1.0"),
        ([Turn([1]), Turn([2], True, float("nan"))], "not finite"),
    ],
)
def test_episodes_that_make_no_sense(turns: list[Turn], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        episode(turns, terminated=True)


def test_episodes_that_cannot_be_packed() -> None:
    with pytest.raises(ValueError, match="episode 0 has 8 tokens, more than the rows' 7"):
        replay.pack([CUT], 7)
    with pytest.raises(ValueError, match=r"episode 1 has a reward of 5\.0, outside the stated \[-2, 1\]"):
        replay.pack([CUT, OVER], 14, bounds=(-2, 1))
    nothing = episode([Turn([9]), Turn([1, 2], True)], terminated=True)
    with pytest.raises(ValueError, match=r"episode 1 has a reward of 0\.0, outside the stated \[1, 40\]"):
        replay.pack([OVER, nothing], 14, bounds=(1, 40))
    with pytest.raises(ValueError, match=r"episode 1 has the token 9, outside the vocabulary \[0, 9\)"):
        replay.pack([CUT, OVER], 14, vocabulary=9)
    with pytest.raises(ValueError, match="episode 0 has the token -1, outside"):
        replay.pack([nothing._replace(tokens=nothing.tokens - 2)], 14)
    replay.pack([CUT, OVER], 14, vocabulary=10, bounds=(-2, 5))
    silent = Episode(np.ones(3, np.int32), np.zeros(3, bool), np.zeros(3, np.float32), True)
    with pytest.raises(ValueError, match="episode 1 has no action tokens"):
        replay.pack([CUT, silent], 14)
    with pytest.raises(ValueError, match="no episodes"):
        replay.pack([], 14)


def test_sampling_draws_whole_rows() -> None:
    data = jax.device_put(replay.pack([CUT, OVER], 8, together=False))
    batch = replay.sampler(64)(data, jax.random.key(0))
    which = np.asarray(batch.tokens[:, 0] == 9).astype(int)
    assert 10 < which.sum() < 54
    jax.tree.map(lambda x, all_rows: np.testing.assert_array_equal(x, all_rows[which]), batch, data)


def rewarded(*rewards: float, terminated: bool = True) -> Episode:
    """An episode of as many turns of the agent, of two tokens each, as rewards."""
    turns = [[Turn([1]), Turn([2, 3], True, reward)] for reward in rewards]
    return episode([turn for pair in turns for turn in pair], terminated)


def test_returns_of_an_episode_and_the_bounds_of_values_by_hand() -> None:
    assert replay.returns_to_go(rewarded(-1.0, 2.0), 0.5).tolist() == [-0.25, -0.5, 1.0, 2.0]
    # One verdict at the end bounds all values; games lose at most as often as the longest did, and win nothing.
    assert replay.value_bounds([rewarded(-1.0), rewarded(1.0)], 0.9) == (-1.0, 1.0)
    assert replay.value_bounds([rewarded(-1.0, -1.0, -1.0), rewarded(0.0)], 1.0) == (-3.0, 0.0)
    # Twice the span of the returns that there were, where rewards would allow more.
    low, high = replay.value_bounds([rewarded(*[1.0, -1.0] * 10), rewarded(2.0)], 1.0)
    assert (low, high) == (-1.0 - 3.0, 2.0 + 3.0)
    assert replay.value_bounds([rewarded(0.0)], 1.0) == (-0.5, 0.5)


def test_bounds_hold_values_of_an_episode_that_was_cut_off_and_goes_on() -> None:
    """They were those of its returns as if nothing followed, which no such value is near."""
    cut = rewarded(-1.0, -1.0, -1.0, terminated=False)
    # After the cut -0.5 a token for ever is -5, and its last action is worth -1 - 0.9 * 5.
    returns = replay.returns_to_go(cut, 0.9, bootstrap=-0.5)
    np.testing.assert_allclose(returns[-2:], [-0.9 * 5.5, -5.5], rtol=1e-12)
    assert replay.returns_to_go(cut, 0.9)[-1] == -1.0
    low, high = replay.value_bounds([cut], 0.9)
    # What the same turns for ever are worth, at either token of a turn.
    assert low < -1 / (1 - 0.81) < -0.9 / (1 - 0.81) < high
    # However many episodes end with nothing; and no values are below the worst reward for ever.
    assert replay.value_bounds([cut, *[rewarded(0.0)] * 50], 0.9) == pytest.approx((-10.0, 0.0))
    assert replay.value_bounds([rewarded(-1.0, 1.0, terminated=False), rewarded(9.0)], 0.5) == (-2.0, 18.0)
    # The same log of episodes that end has the bounds that it had, and without a discount nothing bounds the other.
    assert replay.value_bounds([cut._replace(terminated=True), rewarded(0.0)], 0.9)[0] == -3.0
    assert replay.value_bounds([cut, rewarded(0.0)], 1.0) == (-math.inf, 0.0)
    assert replay.value_bounds([rewarded(0.0, terminated=False)], 1.0) == (-0.5, 0.5)


def test_answers_to_one_problem_are_held_out_together_and_games_one_by_one() -> None:
    def log(prompts: list[int]) -> list[Episode]:
        return [
            episode([Turn([1, prompt]), Turn([number], True, 0.0)], True)
            for number, prompt in enumerate(prompts)
        ]

    def sides(prompts: list[int], share: float) -> list[list[tuple[int, int]]]:
        return [
            [(one.tokens[1], one.tokens[2]) for one in side] for side in replay.split(log(prompts), share, 3)
        ]

    prompts = [5, 6, 5, 7, 8, 9, 6, 5, 9, 4]
    learned, held_out = sides(prompts, 0.4)
    assert sorted(learned + held_out) == sorted(zip(prompts, range(10), strict=True)) and len(held_out) == 4
    assert not {prompt for prompt, _ in learned} & {prompt for prompt, _ in held_out}
    order = np.random.default_rng(3).permutation(10).tolist()
    for each in ([2] * 10, [2, 3] * 5, list(range(10))):  # openings; no two alike
        assert [[number for _, number in side] for side in sides(each, 0.3)] == [order[3:], order[:3]]
    assert sides(prompts, 0.0)[1] == []
    # Every problem has more answers than are to be held out: the smallest is, whole.
    for each, smallest in (([2] * 4 + [3] * 3 + [4] * 4, [3] * 3), ([2, 3, 4] * 5, None)):
        learned, held_out = sides(each, 0.1)
        held = [prompt for prompt, _ in held_out]
        assert held == (smallest or held[:1] * 5) and len(learned) + len(held) == len(each)
        assert not {prompt for prompt, _ in learned} & set(held)
    # What the episodes do not say themselves any more.
    learned, held_out = replay.split(log(list(range(12))), 0.25, 0, problems=list("abcd") * 3)
    assert len(held_out) == 3 and len({one.tokens[2] % 4 for one in held_out}) == 1


def test_the_best_episodes() -> None:
    def weights(share: float, *returns: float) -> list[float]:
        episodes = [OVER._replace(reward=np.float32([0, r])) for r in returns or (1, 3, 3, 2)]
        return [one.imitate for one in replay.best(episodes, share)]

    assert weights(0.25) == [0, 1, 1, 0]  # equals stay together
    assert weights(0.75) == [0, 1, 1, 1]
    assert weights(1.0) == [1, 1, 1, 1]
    assert weights(0.5, 0, 0, 1, 0) == [0, 0, 1, 0]  # no failures, of which there are more than that
    assert weights(0.5, 2, 2, 2) == [1, 1, 1]
    whole = [OVER._replace(reward=np.float32([0, r])) for r in (1, 3)]
    assert [one.imitate for one in replay.best(whole, 0.5, returns=[-1, -2])] == [1, 0]
    rounded = [float(np.float32(x).sum()) for x in ((0.1, 0.7, 0.1), (0.9,))]
    assert rounded[0] != rounded[1] and [one.imitate for one in replay.best(whole, 0.5, rounded)] == [1, 1]
    with pytest.raises(ValueError, match="above 0 and at most 1"):
        weights(0.0)


# ---- decisions ---------------------------------------------------------------------------------------------------


def test_steps_by_hand() -> None:
    """State i is where token i + 1 is the action; it leads to the state of the next action, past what is read."""
    steps = tokens.steps(packed())
    taken = [1, 2, 4, 5, 8, 9, 10]  # actions at 2, 3, 5, 6 and 9, 10, 11
    np.testing.assert_array_equal(np.flatnonzero(steps.taken[0]), taken)
    np.testing.assert_array_equal(steps.action[0, np.array(taken)], [3, 4, 6, 7, 1, 2, 3])
    # After the cut episode's last action comes the state at its end (index 7), where no action was logged.
    np.testing.assert_array_equal(steps.next[0, np.array(taken)], [2, 4, 5, 7, 9, 10, 11])
    np.testing.assert_array_equal(steps.has_next[0, np.array(taken)], [1, 1, 1, 0, 1, 1, 0])
    np.testing.assert_array_equal(steps.discount[0, np.array(taken)], [1, 1, 1, 1, 1, 1, 0])
    np.testing.assert_array_equal(steps.reward[0, np.array(taken)], [0, -1, 0, -2, 0, 0, 5])


def random_batch(rows: int = 6, length: int = 20) -> TokenBatch:
    """Random words in random segments, any token an action: what no recipe would make."""
    generator = np.random.RandomState(0)
    segment = np.cumsum(generator.rand(rows, length) < 0.2, 1)
    return TokenBatch(
        tokens=generator.randint(0, 9, (rows, length)).astype(np.int32),
        segment=segment.astype(np.int32),
        is_action=generator.rand(rows, length) < 0.4,
        reward=generator.randn(rows, length).astype(np.float32),
        discount=(generator.rand(rows, length) < 0.8).astype(np.float32),
        imitate=np.ones((rows, length), np.float32),
    )


def test_steps_against_a_search() -> None:
    batch, length = random_batch(), 20
    steps = tokens.steps(batch)
    for row, column in np.ndindex(6, length - 1):
        segment = batch.segment[row]
        inside = segment[column] == segment[column + 1] > 0
        assert steps.taken[row, column] == (inside and batch.is_action[row, column + 1])
        if not steps.taken[row, column]:
            continue
        state = column + 1
        while (
            state + 1 < length
            and segment[state + 1] == segment[state]
            and not batch.is_action[row, state + 1]
        ):
            state += 1
        assert steps.next[row, column] == state
        has_next = state + 1 < length and segment[state + 1] == segment[state]
        assert steps.has_next[row, column] == has_next


def test_returns_by_hand_and_against_a_loop() -> None:
    returns = tokens.returns_to_go(tokens.steps(packed()), 0.5)
    # -1 comes one action later, -2 three actions later: every action token discounts, what is read does not.
    expected = {1: 0.5 * -1 + 0.125 * -2, 2: -1 + 0.25 * -2, 4: -1.0, 5: -2.0, 8: 1.25, 9: 2.5, 10: 5.0}
    for column in range(13):
        assert float(returns[0, column]) == pytest.approx(expected.get(column, 0.0))

    batch = random_batch()
    steps = tokens.steps(batch)
    returns = tokens.returns_to_go(steps, 0.9)
    for row, column in zip(*np.nonzero(steps.taken), strict=True):
        total, weight, at = 0.0, 1.0, column
        while True:
            total += weight * steps.reward[row, at]
            weight *= 0.9 * steps.discount[row, at]
            if not steps.has_next[row, at]:
                break
            at = steps.next[row, at]
        assert float(returns[row, column]) == pytest.approx(float(total), abs=1e-5)


def test_sums_per_episode() -> None:
    batch = packed()
    np.testing.assert_array_equal(tokens.per_episode(batch.reward, batch.segment, 3), [[-3, 5, 0]])


# ---- over a vocabulary -------------------------------------------------------------------------------------------

A, D = 11, 6
FEATURES = np.random.RandomState(0).randn(3, 10, D).astype(np.float32)
ROWS = np.random.RandomState(1).randn(A, D).astype(np.float32)
CHOSEN = np.random.RandomState(2).randint(0, A, (3, 10)).astype(np.int32)


@pytest.mark.parametrize("chunk", [4, 16])
def test_vocabulary_stats_equal_the_plain_form(chunk: int) -> None:
    def ours(rows: Any, features: Any) -> tokens.VocabularyStats:
        return tokens.vocabulary_stats(
            lambda x: x @ rows.T, features, np.stack([CHOSEN, 0 * CHOSEN], -1), chunk
        )

    def plain(rows: Any, features: Any) -> tokens.VocabularyStats:
        logits = features @ rows.T
        one = (jnp.arange(A) == CHOSEN[..., None]) @ jnp.eye(A)  # [B, T, A], as the naive form has it
        chosen = jnp.stack([(one * logits).sum(-1), logits[..., 0]], -1)
        return tokens.VocabularyStats(chosen, logits.max(-1), logits.argmax(-1), jax.nn.logsumexp(logits, -1))

    def loss(form: Any) -> Any:
        def total(rows: Any, features: Any) -> Any:
            stats = form(rows, features)
            return stats.chosen.sum() - 2 * stats.top.sum() + jnp.square(stats.total).sum(), stats

        return jax.jit(jax.value_and_grad(total, (0, 1), has_aux=True))(ROWS, FEATURES)

    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=2e-4), loss(ours), loss(plain))


NEEDED = np.random.RandomState(3).rand(3, 10) < [[0.5], [0.2], [0.0]]


@pytest.mark.parametrize("chunk", [1, 4, 16])
def test_only_columns_that_are_needed_are_computed(chunk: int) -> None:
    """Values and gradients are those of the plain form, and pieces beyond the fullest row's are left out."""
    widths: list[int] = []

    def look(rows: Any, features: Any) -> Any:
        outputs = jnp.tanh(features @ rows.T)
        jax.debug.callback(lambda x: widths.append(x.shape[1]), outputs)
        return outputs

    def ours(rows: Any, features: Any) -> Any:
        return tokens.in_chunks(functools.partial(look, rows), chunk, features, needed=NEEDED)

    def total(form: Any, rows: Any, features: Any) -> tuple[Any, Any]:
        outputs = jnp.where(NEEDED[..., None], form(rows, features), 0.0)
        return jnp.square(outputs).sum(), outputs

    result = jax.jit(functools.partial(total, ours))(ROWS, FEATURES)
    jax.block_until_ready(result)
    jax.effects_barrier()
    assert sum(widths) == min(10, chunk * -(-NEEDED.sum(1).max() // chunk) if chunk < 10 else 10)
    step = functools.partial(jax.jit, static_argnums=0)(jax.value_and_grad(total, (1, 2), has_aux=True))
    expected = step(lambda rows, features: jnp.tanh(features @ rows.T), ROWS, FEATURES)
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, atol=1e-5), step(ours, ROWS, FEATURES), expected
    )


def test_states_that_a_loss_asks_about() -> None:
    """Those before an action token, and the end of the episode that was cut off."""
    visited = tokens.visited(tokens.steps(packed()))
    np.testing.assert_array_equal(visited, [[0, 1, 1, 0, 1, 1, 0, 1, 1, 1, 1, 0, 0, 0]])


def test_the_vocabulary_is_held_for_one_chunk_alone() -> None:
    rows, length, size, chunk = 2, 512, 4096, 32

    def loss(table: Any, form: Any) -> Any:
        features = jnp.ones((rows, length, 4))
        return form(lambda x: x @ table.T, features)

    def ours(logits: Any, features: Any) -> Any:
        return tokens.vocabulary_stats(logits, features, jnp.zeros((rows, length, 1), int), chunk).total.sum()

    def plain(logits: Any, features: Any) -> Any:
        return jax.nn.logsumexp(logits(features), -1).sum()

    def peak(form: Any) -> int:
        step = jax.jit(jax.grad(loss), static_argnums=1)
        return step.lower(jnp.ones((size, 4)), form).compile().memory_analysis().temp_size_in_bytes

    everything = rows * length * size * 4
    assert peak(plain) >= everything
    assert peak(ours) <= 4 * everything * chunk / length


# ---- heads -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_values_of_a_token_equal_those_of_all() -> None:
    q = token_heads.vocabulary_values(A, 3, 8, members=2, bias=-4.0)
    params = q.init(jax.random.key(0), FEATURES)
    every = q.all(params, FEATURES)
    assert every.shape == (2, 3, 10, A, 3)
    assert float(every.mean()) == pytest.approx(-4.0, abs=0.3)
    assert not np.allclose(every[0], every[1])
    expected = np.take_along_axis(every, CHOSEN[None, ..., None, None], -2)[..., 0, :]
    np.testing.assert_allclose(q.at(params, FEATURES, CHOSEN), expected, atol=1e-5)

    def gradient(pick: Any) -> Any:
        return jax.jit(jax.grad(lambda p: jnp.square(pick(p)).sum()))(params)

    one = gradient(lambda p: q.at(p, FEATURES, CHOSEN))
    other = gradient(lambda p: jnp.take_along_axis(q.all(p, FEATURES), CHOSEN[None, ..., None, None], -2))
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-3), one, other)


@pytest.mark.slow
def test_values_are_float32_on_bfloat16_features() -> None:
    half = FEATURES.astype(jnp.bfloat16)
    q, v = token_heads.vocabulary_values(A, 3, 8), token_heads.state_values(3, 8, bias=2.0)
    assert q.at(q.init(jax.random.key(0), half), half, CHOSEN).dtype == jnp.float32
    values = v.apply(v.init(jax.random.key(0), half), half)
    assert values.dtype == jnp.float32
    assert values.shape == (3, 10, 3)


# ---- dueling -----------------------------------------------------------------------------------------------------

HEADS = {name: heads.make(name, -3.0, 3.0, 25) for name in heads.NAMES}


def draw(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.RandomState(seed).randn(*shape).astype(np.float32)


def test_dueling_with_a_scalar_head_has_the_gradient_of_the_squared_error() -> None:
    head = HEADS["scalar"]
    v, a, r, d, following = (
        draw(7, 1),
        -np.abs(draw(7, seed=1)),
        draw(7, seed=2),
        draw(7, seed=3),
        draw(7, 1, seed=4),
    )

    def ours(v: Any, a: Any) -> Any:
        return tokens.dueling_loss(head, v, a, r, d, following).sum()

    def paper(v: Any, a: Any) -> Any:
        return jnp.square(a + v[..., 0] - r - d * following[..., 0]).sum()

    one, other = (jax.value_and_grad(form, (0, 1))(v, a) for form in (ours, paper))
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5), one, other)


@pytest.mark.parametrize("name", heads.NAMES)
def test_dueling_with_any_head_finds_the_value_and_the_advantage(name: str) -> None:
    """Two actions of one state, worth 1 and -1, of which the first has advantage 0 by construction."""
    head: ValueHead = HEADS[name]
    reward, gone = jnp.array([1.0, -1.0]), jnp.zeros(2)
    after = jnp.zeros((2, head.size))

    def loss(params: dict[str, Any]) -> Any:
        outputs = jnp.broadcast_to(params["v"], (2, head.size))
        advantage = jnp.stack([jnp.zeros(()), params["a"]])
        return tokens.dueling_loss(head, outputs, advantage, reward, gone, after).sum()

    import optax

    optimiser = optax.adam(0.05)
    params = {"v": jnp.zeros(head.size), "a": jnp.zeros(())}

    @jax.jit
    def fit(params: Any) -> Any:
        def one(carry: Any, _: None) -> Any:
            params, moments = carry
            updates, moments = optimiser.update(jax.grad(loss)(params), moments)
            return (optax.apply_updates(params, updates), moments), None

        return jax.lax.scan(one, (params, optimiser.init(params)), None, length=1000)[0][0]

    params = fit(params)
    assert float(head.value(params["v"])) == pytest.approx(1.0, abs=0.05)
    assert float(params["a"]) == pytest.approx(-2.0, abs=0.05)


def test_dueling_targets_carry_no_gradient() -> None:
    for head in (HEADS["scalar"], HEADS["hl_gauss"]):
        gradient = jax.grad(
            lambda following, head=head: tokens.dueling_loss(
                head, draw(7, head.size), -np.ones(7, np.float32), draw(7), np.ones(7, np.float32), following
            ).sum()
        )(jnp.asarray(draw(7, head.size, seed=5)))
        assert not np.any(gradient)
