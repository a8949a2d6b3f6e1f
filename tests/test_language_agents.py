"""B-Coder, ILQL and behaviour cloning of tokens, on a tree of two tokens whose values are known."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from scipy.special import log_softmax, softmax

from rl import checkpoint, train
from rl.agents import bcoder, ilql, lm_bc
from rl.agents.optimisers import Adam
from rl.language import generate, model, ranking
from rl.language.model import LM, Config
from rl.networks import token_heads
from rl.networks.transformer import Shape
from rl.replay import tokens as replay
from rl.replay.tokens import Turn, episode
from rl.types import State, TokenBatch
from rl.values import heads, tokens

# A text is the prompt 0 and two actions out of 1, 2, 3. Only 1 2 earns something; 3 at the end is a cheap mistake.
REWARDS = {(1, 1): -0.5, (1, 2): 1.0, (1, 3): -0.3, (2, 1): -1.0, (2, 2): -1.0, (2, 3): -0.3}
CONFIG = Config(5, 8, Shape(width=16, layers=1, heads=2, kv_heads=2, head_size=8, inner=32))
MODULES = (bcoder, ilql, lm_bc)
HEAD_NAMES = [pytest.param("scalar", marks=pytest.mark.long), "hl_gauss"]


def head(name: str) -> heads.ValueHead:
    return heads.make(name, -2.0, 1.0, 31)


def data(repeats: int = 1) -> TokenBatch:
    episodes = [
        episode([Turn([0]), Turn([a, b], True, reward)], terminated=True, imitate=float(reward == 1.0))
        for (a, b), reward in REWARDS.items()
    ]
    return replay.pack(episodes * repeats, 4, together=False)


@functools.cache
def language_model() -> LM:
    lm = model.make(CONFIG)
    return model.pretrained(lm, jax.jit(lm.init)(jax.random.key(3)))


@jax.jit
def compiled_logits(params: Any, text: Any) -> Any:
    lm = model.make(CONFIG)
    return lm.logits(params, lm.features(params, text, jnp.ones_like(text)))


def logits_of(params: Any, text: Any) -> np.ndarray:
    return np.asarray(compiled_logits(params, text))


def run(learner: Any, updates: int, batch: TokenBatch) -> tuple[State, dict[str, float]]:
    """Full-batch updates, compiled together."""
    state = jax.jit(learner.init)(jax.random.key(0), batch)
    epoch = jax.jit(train.scan_updates(learner.update, lambda data, key, step: data, updates))
    state, report = epoch(state, batch, jax.random.key(1))
    return state, {name: float(value) for name, value in report.metrics.items()}


def texts(*rows: list[int]) -> np.ndarray:
    return np.array(rows, np.int32)


# ---- behaviour cloning -------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_cloning_gives_the_frequencies_and_filtered_cloning_the_best() -> None:
    config = lm_bc.Config(learning_rate=1e-2)
    lm, batch = language_model(), data()
    learner = lm_bc.make(config, lm, head("scalar"))
    state, _ = run(learner, 300, batch)
    logits = logits_of(state.params["policy"], texts([0, 1]))
    assert jax.jit(learner.act)(state, texts([0], [0]), None).tolist() == [1, 1]
    assert softmax(logits, -1)[0, 1, 2] > 0.99

    everything = batch._replace(imitate=batch.is_action.astype(np.float32))
    state, _ = run(lm_bc.make(config, lm, head("scalar")), 300, everything)
    logits = logits_of(state.params["policy"], texts([0, 1]))
    np.testing.assert_allclose(softmax(logits, -1)[0, 0], [0, 1 / 2, 1 / 2, 0, 0], atol=0.06)
    np.testing.assert_allclose(softmax(logits, -1)[0, 1], [0, 1 / 3, 1 / 3, 1 / 3, 0], atol=0.06)


# ---- B-Coder -----------------------------------------------------------------------------------------------------

FAST = bcoder.Config(discount=0.9, alpha=0.5, value_updates=0, inner=16, weight_decay=0.0)


@functools.cache
def bcoder_start() -> tuple[State, tokens.TokenValues]:
    learner = bcoder.make(FAST, language_model(), head("scalar"))
    state = jax.jit(learner.init)(jax.random.key(0), data())
    judge = jax.jit(bcoder.token_values(FAST, language_model(), head("scalar")))
    return jax.device_get((state, judge(state, data())))


@pytest.mark.slow
def test_bcoder_starts_as_the_language_model() -> None:
    state, judged = bcoder_start()
    batch = data()
    assert all(jax.tree.leaves(jax.tree.map(np.array_equal, state.params["policy"], state.target["policy"])))
    assert all(
        jax.tree.leaves(jax.tree.map(np.array_equal, state.params["policy"], state.params["value"]["lm"]))
    )
    assert (judged.q <= judged.v).all()  # A <= 0
    assert (judged.q <= 1).all()
    # Q / alpha are the model's logits up to a constant: differences of Q are differences of logits.
    params = state.params["policy"]
    logits = logits_of(params, batch.tokens)
    best = logits.max(-1)[:, 1]
    chosen = np.take_along_axis(logits[:, 1], batch.tokens[:, 2:3], -1)[:, 0]
    np.testing.assert_allclose((judged.q - judged.v)[:, 2], 0.5 * (chosen - best), atol=1e-5)


def test_the_bound_is_met_at_zero() -> None:
    x = np.float32([-40, 0, 40])
    np.testing.assert_allclose(jax.jit(bcoder.soft_abs)(x), [20 - np.log(2), 0, 20 - np.log(2)], rtol=1e-6)


def test_judged_rewards_are_the_inverse_of_the_bellman_operator() -> None:
    _, judged = bcoder_start()
    batch = data()
    np.testing.assert_allclose(judged.score[:, 1], judged.q[:, 1] - 0.9 * judged.v[:, 2], atol=1e-6)
    np.testing.assert_allclose(judged.score[:, 2], judged.q[:, 2], atol=1e-6)  # nothing follows the end
    assert (judged.score[:, [0, 3]] == 0).all()
    scores = jax.jit(tokens.per_episode, static_argnums=2)(judged.score, batch.segment, 1)
    np.testing.assert_allclose(np.asarray(scores)[:, 0], judged.score.sum(1), rtol=1e-6)


@jax.jit
def plain_values(value: Any, batch: TokenBatch) -> Any:
    lm, body = language_model(), token_heads.state_values(1, FAST.inner)
    raw = body.apply(value["head"], lm.features(value["lm"], batch.tokens, batch.segment))[..., 0]
    return 1.0 - bcoder.soft_abs(raw)


def plain_metrics(state: State, batch: TokenBatch, operator: str, stage: str) -> dict[str, float]:
    """L_Q written out with all of Q [B, T, A], as in the paper, for the scalar head, and what else is reported."""
    checkpoint = logits_of(state.target["policy"], batch.tokens)
    logits = checkpoint if stage == "value" else logits_of(state.params["policy"], batch.tokens)
    v = np.asarray(plain_values(state.params["value"], batch))
    q = FAST.alpha * (logits - logits.max(-1, keepdims=True)) + v[..., None]
    log_prob = log_softmax(logits, -1)
    rows = []
    for row in range(len(batch.tokens)):
        for t in (1, 2):
            here = float(q[row, t - 1, batch.tokens[row, t]])
            following = 0.0
            if t == 1:
                token = {
                    "conservative": checkpoint[row, t].argmax(),
                    "max": logits[row, t].argmax(),
                    "sarsa": batch.tokens[row, t + 1],
                }[operator]
                following = float(q[row, t, token])
            error = float(batch.reward[row, t]) + 0.9 * following - here
            imitated = float(batch.imitate[row, t]) * (stage == "policy")
            anchors = (here - v[row, t - 1], log_prob[row, t - 1, batch.tokens[row, t]])
            rows.append((error**2, here, v[row, t - 1], *(-imitated * x for x in anchors), imitated))
    *columns, weight = np.array(rows).T
    names = ("critic_loss", "q", "v", "advantage_loss", "imitation_loss")
    counts = [len(rows)] * 3 + [max(weight.sum(), 1.0)] * 2
    return {name: x.sum() / n for name, x, n in zip(names, columns, counts, strict=True)}


@pytest.mark.slow
def test_td_loss_and_what_is_reported_equal_the_plain_form() -> None:
    state, batch = bcoder_start()[0], data()
    # Away from the start, where the policy and the checkpoint are one.
    noise = lambda x: (0.3 * np.random.RandomState(0).randn(*x.shape)).astype(x.dtype)
    moved = jax.tree.map(lambda x: x + noise(x), state.params["policy"])
    state = state._replace(params={**state.params, "policy": moved})
    cases = [(operator, stage) for operator in bcoder.OPERATORS for stage in ("value", "policy")]

    @jax.jit
    def reported(state: State) -> list[Any]:
        metrics = []
        for operator, stage in cases:
            config = dataclasses.replace(
                FAST, operator=operator, value_updates=int(stage == "value"), chunk=1
            )
            learner = bcoder.make(config, language_model(), head("scalar"))
            metrics.append(learner.update(state, batch, jax.random.key(0))[1])
        return metrics

    for (operator, stage), metrics in zip(cases, jax.device_get(reported(state)), strict=True):
        expected = plain_metrics(state, batch, operator, stage)
        plain = {name: float(metrics[name]) for name in expected}
        assert plain == pytest.approx(expected, rel=1e-4, abs=1e-6), (operator, stage)


@pytest.mark.slow
@pytest.mark.parametrize("name", HEAD_NAMES)
def test_bcoder_learns_values_policy_and_ranking(name: str) -> None:
    config = dataclasses.replace(FAST, value_updates=300, value_learning_rate=1e-2, learning_rate=1e-2)
    lm, batch = language_model(), data()
    learner = bcoder.make(config, lm, head(name), optax.adam)
    state, metrics = run(learner, 600, batch)

    @jax.jit
    def answers(state: State) -> tuple[Any, ...]:
        first, second = (learner.act(state, text, None) for text in (texts([0], [0]), texts([0, 1])))
        judged = bcoder.token_values(config, lm, head(name))(state, batch)
        return judged, first, second, learner.value(state, texts([0, 1]), None)

    judged, first, second, value = jax.device_get(answers(state))
    order = np.array(list(REWARDS.values()))
    assert judged.score.sum(1).argmax() == order.argmax()
    assert judged.v[0, 2] == pytest.approx(1.0, abs=0.2)  # after 1, the best is 1.0
    assert first.tolist() == [1, 1] and second.tolist() == [2]
    np.testing.assert_allclose(value, judged.v[0, 2], atol=1e-3)
    # What is frozen has not moved.
    start = jax.jit(learner.init)(jax.random.key(0), batch)
    jax.tree.map(np.testing.assert_array_equal, state.target, start.target)
    assert np.isfinite(list(metrics.values())).all()


def moved(after: State, before: State) -> set[str]:
    """The names of the parameters of which anything has changed."""
    after, before = jax.device_get((after, before))
    same = jax.tree.map(np.array_equal, after.params, before.params)
    return {name for name in same if not all(jax.tree.leaves(same[name]))}


@pytest.mark.slow
def test_stages_train_what_is_theirs_and_continue_from_a_checkpoint_to_the_bit(tmp_path: Path) -> None:
    batch = data()
    learner = bcoder.make(dataclasses.replace(FAST, value_updates=1), language_model(), head("scalar"))
    run = jax.jit(train.scan_updates(learner.update, replay.sampler(4), 1))
    start, key = jax.jit(learner.init)(jax.random.key(0), batch), jax.random.key(1)
    between, _ = run(start, batch, key)
    assert moved(between, start) == {"value"}
    checkpoint.save(tmp_path, 1, between, {})
    last, _ = run(between, batch, key)
    assert moved(last, between) == {"policy", "residual"}
    restored, _ = checkpoint.restore(tmp_path, start, {})  # type: ignore[misc]
    jax.tree.map(np.testing.assert_array_equal, run(restored, batch, key)[0], last)


@pytest.mark.parametrize(
    ("operator", "trunk"),
    [
        pytest.param("conservative", True, marks=pytest.mark.long),
        ("conservative", False),
        pytest.param("sarsa", False, marks=pytest.mark.long),
    ],
)
def test_rows_read_once_change_no_bit_of_either_stage(operator: str, trunk: bool) -> None:
    """All rows are read by a program of its own, in the other order, and drawn afterwards."""
    config = dataclasses.replace(FAST, value_updates=1, operator=operator, chunk=2)
    lm, batch = language_model() if trunk else without_trunk(), data()
    learner = bcoder.make(config, lm, head("hl_gauss"))
    start, key = jax.jit(learner.init)(jax.random.key(0), batch), jax.random.key(0)
    update = jax.jit(learner.update)
    between, first = update(start, batch, key)
    last, second = update(between, batch, key)

    turned = jax.tree.map(lambda x: x[::-1], batch)
    values = jax.jit(functools.partial(bcoder.value_rows, config, lm))(start, turned)
    final = jax.jit(functools.partial(bcoder.policy_rows, config, lm, head("hl_gauss")))(between, turned)
    assert values.advantage.shape == (6, 4) and final.outputs.shape == (6, 4, 31)
    assert (final.best is None) == (operator == "sarsa")
    values, final = jax.tree.map(lambda x: x[::-1], (values, final))
    middle, one = update(start, values, key)
    assert moved(middle, start) == {"value"}
    ends, other = update(between, final, key)
    assert moved(ends, between) == {"policy", "residual"}
    jax.tree.map(np.testing.assert_array_equal, (middle, one, ends, other), (between, first, last, second))


@pytest.mark.parametrize(
    ("make", "fields", "message"),
    [
        *(
            (module.Config, {"chunk": n}, f"chunk={n} must be at least 1")
            for module in MODULES
            for n in (0, -1)
        ),
        *(
            (module.Config, {"weight_decay": -1.0}, "weight_decay=-1.0 must be at least 0")
            for module in MODULES
        ),
        *((module.Config, {"inner": 0}, "inner=0 must be at least 1") for module in (bcoder, ilql)),
        (ilql.Config, {"cql_weight": -1.0}, "cql_weight=-1.0 must be at least 0"),
        (ilql.Config, {"bc_weight": float("nan")}, "bc_weight=nan must be at least 0"),
        (ilql.Config, {"steering": float("nan")}, "steering=nan must be finite"),
        (ilql.Config, {"bias": float("inf")}, "bias=inf must be finite"),
        (bcoder.Config, {"imitation_weight": -1.0}, "imitation_weight=-1.0 must be at least 0"),
        (bcoder.Config, {"advantage_weight": -1.0}, "advantage_weight=-1.0 must be at least 0"),
        (bcoder.Config, {"alpha": -1.0}, "alpha=-1.0 must be at least 0"),
        (bcoder.Config, {"value_updates": -7}, "value_updates=-7 must be at least 0, or -1 for all updates"),
    ],
)
def test_settings_that_mean_nothing_are_refused(make: Any, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(**fields)


@pytest.mark.slow
@pytest.mark.parametrize("module", [ilql, bcoder, lm_bc])
def test_every_float_can_be_swept(module: Any) -> None:
    """No field is used as a number where the program is built: each survives being a tracer."""
    config = dataclasses.replace(module.Config(), **({} if module is lm_bc else {"inner": 16}))
    names = [field.name for field in dataclasses.fields(config) if train.can_be_swept(config, field.name)]
    sweep = {name: [getattr(config, name) or 0.5] * 2 for name in names}  # no 0, which is a switch
    lm = language_model()  # cached, and so never made while a program is traced
    make = lambda config: module.make(config, lm, head("scalar"))
    runs = train.population(make, config, lambda dataset, key, step: dataset, 1, sweep=sweep)
    keys = jax.random.split(jax.random.key(0), 2)
    jax.eval_shape(runs.epoch, jax.eval_shape(runs.init, keys, data()), data(), keys)


def test_unknown_operators() -> None:
    with pytest.raises(ValueError, match="operator='soft': choose one of conservative"):
        bcoder.make(dataclasses.replace(FAST, operator="soft"), language_model(), head("scalar"))


def test_a_bias_of_all_logits_is_refused() -> None:
    with pytest.raises(ValueError, match=r"bias=-4 would be added to every logit .*--head_start"):
        ilql.make(ilql.Config(bias=-4.0), language_model(), head("hl_gauss"))


@pytest.mark.slow
def test_values_are_bounded_by_the_largest_return_or_by_the_support() -> None:
    """The heads' outputs are made enormous, so that values come to their bounds."""
    config, lm = dataclasses.replace(FAST, maximum=0.3), without_trunk()

    @jax.jit
    def values() -> dict[str, Any]:
        v = {}
        for name in heads.NAMES:
            learner = bcoder.make(config, lm, head(name))
            state = learner.init(jax.random.key(7), data())
            params = state.params["value"] | {
                "head": jax.tree.map(lambda x: 1e3 * x, state.params["value"]["head"])
            }
            state = state._replace(params=state.params | {"value": params})
            v[name] = learner.value(state, texts([0, 1], [0, 2], [1, 3], [3, 4]), jax.random.key(0))
        return v

    v = jax.device_get(values())
    for name in ("scalar", "quantile"):
        assert (v[name] <= 0.3).all() and v[name].min() < -1, name
    for name in ("two_hot", "hl_gauss", "c51"):  # from -2 to 1
        assert 0.3 < v[name].max() < 1.5, name


# ---- ILQL --------------------------------------------------------------------------------------------------------

QUICK = ilql.Config(
    discount=0.9, learning_rate=1e-2, target_rate=0.1, inner=16, cql_weight=1e-3, expectile=0.9, bias=0.0
)


@pytest.mark.long
@pytest.mark.parametrize("name", ["scalar", "hl_gauss"])
def test_ilql_finds_the_values_of_the_data(name: str) -> None:
    """After 1 the tokens earn -0.5, 1, -0.3 and after 2 they earn -1, -1, -0.3; V is their expectile."""
    lm, batch = language_model(), data()
    batch = batch._replace(imitate=batch.is_action.astype(np.float32))
    learner = ilql.make(QUICK, lm, head(name), optax.adam)
    state, metrics = run(learner, 800, batch)

    @jax.jit
    def answers(state: State) -> tuple[Any, ...]:
        after = texts([0, 1], [0, 2])
        first, second = (learner.act(state, text, None) for text in (texts([0], [0]), after))
        judged = ilql.token_values(QUICK, lm, head(name))(state, batch)
        scores = tokens.per_episode(judged.score, batch.segment, 1)[:, 0]
        return learner.value(state, after, None), first, second, scores

    v, first, second, scores = jax.device_get(answers(state))
    expected = [_expectile([-0.5, 1.0, -0.3], 0.9), _expectile([-1.0, -1.0, -0.3], 0.9)]
    np.testing.assert_allclose(v, expected, atol=0.12)
    assert first.tolist() == [1, 1] and second.tolist() == [2, 3]
    assert np.isfinite(list(metrics.values())).all()
    # The best text has the highest score.
    assert list(REWARDS)[ranking.best_of(scores[None], 1)[0, 0]] == (1, 2)
    # Sampling goes where acting does.
    sample = generate.generator(ilql.decoder(QUICK, lm, head(name)), 2, temperature=0.0)
    generated = sample(ilql.decoder_params(state), *generate.pad_left([[0]]), jax.random.key(0))
    assert generated.tokens.tolist() == [[1, 2]]


def _expectile(values: list[float], level: float) -> float:
    low, high = min(values), max(values)
    for _ in range(60):
        middle = (low + high) / 2
        slope = sum((level if v > middle else 1 - level) * (v - middle) for v in values)
        low, high = (middle, high) if slope > 0 else (low, middle)
    return low


@pytest.mark.slow
def test_ilql_losses_equal_the_plain_form() -> None:
    """All of Q [B, T, A] at once, one-hot selectors, as LMRL-Gym's code has it."""
    lm, batch, value_head = language_model(), data(), head("scalar")
    q_net = token_heads.vocabulary_values(5, 1, 16)
    v_net = token_heads.state_values(1, 16)
    state = jax.device_get(jax.jit(ilql.make(QUICK, lm, value_head).init)(jax.random.key(0), batch))
    slow = jax.tree.map(lambda x: 0.7 * x, state.target)
    state = state._replace(target=slow)

    @jax.jit
    def ours(state: State) -> tuple[list[Any], tokens.TokenValues, Any]:
        configs = [dataclasses.replace(QUICK, backup=backup, chunk=1) for backup in ilql.BACKUPS]
        learners = [ilql.make(config, lm, value_head) for config in configs]
        metrics = [learner.update(state, batch, jax.random.key(0))[1] for learner in learners]
        chooser, text = ilql.decoder(QUICK, lm, value_head), batch.tokens[:, :2]
        params, cache = ilql.decoder_params(state), chooser.cache(*text.shape)
        played = chooser.extend(params, text, jnp.ones_like(text), cache)[0].logits
        key = jax.random.key(0)
        asked = learners[0].value(state, text, key), learners[0].act(state, text, key)
        return metrics, ilql.token_values(QUICK, lm, value_head)(state, batch), played, asked

    @jax.jit
    def values(params: Any, slow: Any) -> tuple[Any, ...]:
        features = lm.features(params["trunk"], batch.tokens, batch.segment)
        slow_features = lm.features(slow["trunk"], batch.tokens, batch.segment)
        q_all = q_net.all(params["q"], features)[:, :, :2, :, 0]
        slow_all = q_net.all(slow["q"], slow_features)[:, :, :2, :, 0]
        return q_all, slow_all, v_net.apply(params["v"], features)[:, :2, 0]

    q_all, slow_all, v = map(np.asarray, values(state.params, slow))
    one_hot = np.eye(5)[np.asarray(batch.tokens[:, 1:3])]
    q, q_slow = (q_all * one_hot).sum(-1), (slow_all * one_hot).sum(-1).min(0)
    reward = np.asarray(batch.reward[:, 1:3])
    losses, judged, played, (value, action) = ours(state)
    np.testing.assert_allclose(value, v[:, 1], rtol=1e-5)  # not by the targets, which are others
    np.testing.assert_array_equal(action, played.argmax(-1))
    policy = np.log(softmax(logits_of(state.params["policy"], batch.tokens)[:, :2], -1))
    np.testing.assert_allclose(played, policy[:, 1] + 4.0 * slow_all.min(0)[:, 1], rtol=1e-4, atol=1e-4)
    cloned = np.asarray(batch.imitate[:, 1:3])  # of one text: the mean is of its tokens alone
    for mine, plain in zip(judged, (q_slow - v, q_slow, v), strict=True):
        np.testing.assert_allclose(mine, np.pad(plain, ((0, 0), (1, 1))), atol=1e-5)
    for backup, metrics in zip(ilql.BACKUPS, losses, strict=True):
        following = {"expectile": v[:, 1], "sarsa": q_slow[:, 1], "mc": reward[:, 1]}[backup]
        target = np.stack([reward[:, 0] + 0.9 * following, reward[:, 1]], 1)
        weight = np.where(q_slow > v, 0.9, 0.1)
        expected = {
            "critic_loss": np.square(q - target).sum(0).mean(),
            "value_loss": (weight * np.square(v - q_slow)).mean(),
            "cql": (np.log(np.exp(q_all).sum(-1)) - q).sum(0).mean(),
            "policy_loss": -(cloned * (policy * one_hot).sum(-1)).sum() / cloned.sum(),
            "q": q.mean(),
            "v": v.mean(),
            "advantage": (q_slow - v).mean(),
        }
        for name, value in expected.items():
            assert float(metrics[name]) == pytest.approx(float(value), rel=1e-4), (backup, name)
    with pytest.raises(ValueError, match="backup='td': choose"):
        ilql.make(dataclasses.replace(QUICK, backup="td"), lm, value_head)


@pytest.mark.slow
def test_targets_beyond_the_support_are_counted() -> None:
    """Of B-Coder's V, which must make up for advantages below 0, and of ILQL's Q: `clipped` by hand."""
    batch, lm, learners = data(), language_model(), {}
    returns = np.stack([batch.reward[:, 1] + 0.9 * batch.reward[:, 2], batch.reward[:, 2]], 1)
    for high in (0.5, 40.0):
        bounded = heads.make("two_hot", -high, high, 11)
        for backup in ("expectile", "mc"):
            config = dataclasses.replace(QUICK, backup=backup)
            learners[f"{backup} {high}"] = ilql.make(config, lm, bounded)
        learners[f"bcoder {high}"] = bcoder.make(FAST, lm, bounded)

    @jax.jit
    def update() -> dict[str, Any]:
        key = jax.random.key(0)
        return {
            name: learner.update(learner.init(key, batch), batch, key)[1]["clipped"]
            for name, learner in learners.items()
        }

    clipped = update()
    for name in ("expectile", "mc", "bcoder"):
        assert clipped[f"{name} 40.0"] == 0
    assert clipped["mc 0.5"] == pytest.approx((np.abs(returns) > 0.5).mean())
    last = (
        np.abs(batch.reward[:, 2]) > 0.5
    ).mean() / 2  # of all decisions; V of an untrained head is about 0
    assert clipped["expectile 0.5"] == pytest.approx(last)
    judged = bcoder_start()[
        1
    ]  # alpha times the distance to the best logit is what V's target lies above the reward
    above = batch.reward[:, [1, 2]] + (judged.v - judged.q)[:, [1, 2]]
    assert clipped["bcoder 0.5"] == pytest.approx((np.abs(above) > 0.5).mean())


@pytest.mark.slow
def test_terms_that_are_off_leave_their_parameters() -> None:
    config = dataclasses.replace(QUICK, bc_weight=0.0, cql_weight=0.0, weight_decay=0.1)
    learner = ilql.make(config, language_model(), head("scalar"))
    start = jax.jit(learner.init)(jax.random.key(0), data())
    after = jax.jit(lambda state: learner.update(state, data(), jax.random.key(0))[0].params["policy"])(start)
    jax.tree.map(np.testing.assert_array_equal, after, start.params["policy"])
    metrics = jax.eval_shape(learner.update, start, data(), jax.random.key(0))[1]
    assert not {"cql", "policy_loss"} & set(metrics)


# ---- without a trunk, which is what takes time to compile --------------------------------------------------------


def without_trunk(vocabulary: int = 5) -> LM:
    """A language model that sees the last token alone."""
    shape = dataclasses.replace(CONFIG.shape, layers=0)

    def init(key: Any) -> Any:
        return {"embedding": 0.3 * jax.random.normal(key, (vocabulary, shape.width))}

    def features(params: Any, tokens: Any, segment: Any) -> Any:
        del segment
        return params["embedding"][tokens]

    def logits(params: Any, features: Any) -> Any:
        return features @ params["embedding"].T

    return LM(Config(vocabulary, 512, shape), init, features, logits, None, None, None)  # type: ignore[arg-type]


@pytest.mark.slow
def test_ilqls_value_loss_moves_the_trunk() -> None:
    """After one step for each of two expectiles, which no other loss knows."""

    @jax.jit
    def after(key: Any) -> list[State]:
        states = []
        for expectile in (0.5, 0.9):
            config = dataclasses.replace(QUICK, expectile=expectile)
            learner = ilql.make(config, without_trunk(), head("scalar"), optax.sgd)
            states.append(learner.update(learner.init(key, data()), data(), key)[0])
        return states

    assert moved(*after(jax.random.key(0))) == {"trunk", "v"}


@pytest.mark.slow
def test_sarsa_leaves_out_the_last_action_of_an_episode_that_was_cut() -> None:
    """Nobody knows what it would have continued with: its reward makes no difference."""
    lm, every = without_trunk(), data()
    cut = every._replace(discount=np.ones_like(every.discount))
    paid = cut._replace(reward=cut.reward + np.float32([0, 0, 7, 0]))
    learners = (
        bcoder.make(dataclasses.replace(FAST, operator="sarsa"), lm, head("scalar")),
        bcoder.make(dataclasses.replace(FAST, operator="sarsa", value_updates=-1), lm, head("scalar")),
        ilql.make(dataclasses.replace(QUICK, backup="sarsa"), lm, head("scalar")),
    )

    @jax.jit
    def losses(key: Any) -> list[list[Any]]:
        starts = [learner.init(key, every) for learner in learners]
        loss = lambda learner, start, batch: learner.update(start, batch, key)[1]["critic_loss"]
        return [[loss(*pair, x) for x in (cut, paid)] for pair in zip(learners, starts, strict=True)]

    for one, other in losses(jax.random.key(0)):
        assert one == other > 0


@pytest.mark.slow
def test_bcoders_anchors_pull_to_what_is_imitated() -> None:
    """With one of them alone and large, a step makes its loss smaller."""

    @jax.jit
    def losses(key: Any) -> dict[str, list[Any]]:
        found = {}
        for name in ("advantage", "imitation"):
            weights = {"advantage_weight": 0.0, "imitation_weight": 0.0, f"{name}_weight": 100.0}
            config = dataclasses.replace(FAST, **weights, learning_rate=1e-3)
            learner = bcoder.make(config, without_trunk(), head("scalar"), optax.sgd)
            state, first = learner.update(learner.init(key, data()), data(), key)
            second = learner.update(state, data(), key)[1]
            found[name] = [metrics[f"{name}_loss"] for metrics in (first, second)]
        return found

    for name, (before, after) in losses(jax.random.key(0)).items():
        assert after < before - 1e-3, name


# Of a first step: the agent, in which stage, its optimisers by field, and the parameters that each of them moves.
STEPS = [
    (lm_bc, 0, {"policy_optimiser": ["policy"]}),
    (bcoder, 0, {"value_optimiser": ["value"]}),
    (bcoder, 1, {"policy_optimiser": ["policy", "residual"]}),
    (
        ilql,
        0,
        {
            "trunk_optimiser": ["trunk"],
            "critic_optimiser": ["q"],
            "value_optimiser": ["v"],
            "policy_optimiser": ["policy"],
        },
    ),
]


def first_steps(configs: list[Any], batch: TokenBatch) -> list[tuple[State, State]]:
    """Of every entry of `STEPS`, the state before and after it."""
    stage = {"value_updates": 1}
    learners = [
        module.make(
            dataclasses.replace(config, **(stage if module is bcoder else {})),
            without_trunk(),
            head("scalar"),
        )
        for config, (module, *_) in zip(configs, STEPS, strict=True)
    ]

    @jax.jit
    def run(key: Any) -> list[tuple[State, State]]:
        starts = [
            learner.init(key, batch)._replace(step=jnp.int32(step))
            for learner, (_, step, _) in zip(learners, STEPS, strict=True)
        ]
        return [
            (start, learner.update(start, batch, key)[0])
            for learner, start in zip(learners, starts, strict=True)
        ]

    return jax.device_get(run(jax.random.key(0)))


@pytest.mark.slow
def test_weights_decay_as_the_settings_say_and_the_residual_does_not() -> None:
    """Without any gradient: V_r is the difference of two heads of which one learns, and must stay 0."""
    idle = data()._replace(is_action=np.zeros_like(data().is_action))
    rates = {"weight_decay": 0.3, "learning_rate": 0.1}
    configs = [
        module.Config(**rates, **({"value_learning_rate": 0.1} if module is bcoder else {}))
        for module, *_ in STEPS
    ]
    for (module, _, fields), (before, after) in zip(STEPS, first_steps(configs, idle), strict=True):
        for name in itertools.chain(*fields.values()):
            for path, leaf in jax.tree.leaves_with_path(after.params[name]):
                was = functools.reduce(lambda tree, part: tree[part.key], path, before.params[name])
                keeps = name == "residual" or path[-1].key.endswith(("bias", "scale"))
                np.testing.assert_allclose(
                    leaf, was * (1.0 if keeps else 0.97), rtol=1e-5, err_msg=f"{module} {name}"
                )
        if "residual" in after.target:
            jax.tree.map(np.testing.assert_array_equal, after.params["residual"], after.target["residual"])


@pytest.mark.slow
def test_every_network_has_the_optimiser_of_its_field() -> None:
    """Rate, clipping and epsilon: where epsilon outweighs all gradients, a step is as long as what is clipped."""
    every = data()._replace(imitate=data().is_action.astype(np.float32))
    configs, wanted = [], []
    for module, _, fields in STEPS:
        sizes = {field: float(number) for number, field in enumerate(fields, start=1)}
        adam = {
            field: Adam(clip=1e-3, epsilon=1e3, learning_rate=1e4 * size) for field, size in sizes.items()
        }
        configs.append(module.Config(weight_decay=0.0, **adam))
        wanted.append({name: 1e-2 * sizes[field] for field, names in fields.items() for name in names})
    for (before, after), lengths in zip(first_steps(configs, every), wanted, strict=True):
        for name, length in lengths.items():
            step = jax.tree.map(np.subtract, after.params[name], before.params[name])
            squares = [np.square(leaf).sum() for leaf in jax.tree.leaves(step)]
            assert np.sqrt(sum(squares)) == pytest.approx(length, rel=0.02), name


def test_q_and_v_of_ilql_start_at_its_bias() -> None:
    """What their layers add to it starts small."""
    learner = ilql.make(dataclasses.replace(QUICK, bias=-4.0), without_trunk(), head("scalar"))
    first = lambda key: learner.update(learner.init(key, data()), data(), key)[1]
    metrics = jax.jit(first)(jax.random.key(0))
    for name in ("q", "v"):
        assert metrics[name] == pytest.approx(-4, abs=0.5), name


# scalar and HL-Gauss train elsewhere, and two-hot's and C51's loss is HL-Gauss's
RARE = {"scalar": "slow", "hl_gauss": "slow", "two_hot": "long", "c51": "long"}
ALL_HEADS = [
    pytest.param(name, marks=[getattr(pytest.mark, RARE[name])] if name in RARE else [])
    for name in heads.NAMES
]


@pytest.mark.parametrize("name", ALL_HEADS)
def test_every_head_trains_everything(name: str) -> None:
    lm, every = without_trunk(), data()
    batch = every._replace(imitate=every.is_action.astype(np.float32))
    config = dataclasses.replace(FAST, value_updates=1)
    coder, values = (
        bcoder.make(config, lm, head(name), optax.sgd),
        ilql.make(QUICK, lm, head(name), optax.sgd),
    )

    starts = jax.jit(lambda: [one.init(jax.random.key(0), batch) for one in (coder, values)])
    code, ask = (jax.jit(one.update) for one in (coder, values))
    of_coder, of_values = jax.device_get(starts())
    for update, start, names in (
        (code, of_coder, {"value"}),
        (code, of_coder._replace(step=np.int32(1)), {"policy", "residual"}),  # the second stage
        (ask, of_values, {"trunk", "q", "v", "policy"}),
    ):
        after, metrics = jax.device_get(update(start, batch, jax.random.key(0)))
        assert moved(after, start) == names
        assert np.isfinite(list(metrics.values())).all()
        assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(after.params))


@pytest.mark.slow
def test_memory_is_that_of_a_chunk_and_linear_in_the_tokens() -> None:
    """What an update of ILQL holds beside its arguments, by XLA's account, where the vocabulary takes most of it."""
    rows, length, vocabulary = 2, 128, 8192
    learner = ilql.make(ilql.Config(inner=4, chunk=8), without_trunk(vocabulary), heads.scalar())

    def peak(length: int) -> int:
        one = episode([Turn([0]), Turn([1] * (length - 1), True)], True)
        batch = replay.pack([one] * rows, length)
        state = jax.eval_shape(learner.init, jax.random.key(0), batch)
        compiled = jax.jit(learner.update).lower(state, batch, jax.random.key(0)).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    once, twice = peak(length), peak(2 * length)
    everything = (
        2 * rows * 2 * length * vocabulary * 4
    )  # Q of both members; the plain form holds several like it
    assert twice <= 2.2 * once
    assert 3 * twice < everything
