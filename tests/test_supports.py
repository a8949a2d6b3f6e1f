"""Supports of categorical heads hold all that targets hold: not rewards alone, but bonuses, penalties and prices."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments import common, logged, offline
from rl import agents, model_based
from rl.agents import arsq, dqn, rebrac, robust, sac_n
from rl.data.steps import from_steps
from rl.dynamics import base, ensemble
from rl.replay import dataset as replay
from rl.types import Spec
from rl.values.robust import worst_case

HOPPER = Spec((11,), 3)
LOW, HIGH = -2.0, 5.0


def endless(reward: float, extra: float, discount: float) -> float:
    """The fixed point of ``y = r + gamma (y + extra)``, by iteration."""
    y = 0.0
    for _ in range(5000):
        y = reward + discount * (y + extra)
    return y


@pytest.mark.parametrize("discount", [0.9, 0.99])
def test_the_entropy_bonus_and_the_critics_penalty_of_every_step_are_within(discount: float) -> None:
    low, high = LOW * (1 - discount), HIGH * (1 - discount)  # rewards whose values are LOW and HIGH
    uniform = 3 * math.log(2.0)
    floor, ceiling = agents.target_range("sac_n", sac_n.Config(discount=discount), HOPPER, LOW, HIGH)
    assert ceiling == pytest.approx(endless(high, uniform, discount))
    assert floor == pytest.approx(endless(low, -3.0, discount))
    config = rebrac.Config(discount=discount, critic_cloning=0.5)
    floor, ceiling = agents.target_range("rebrac", config, HOPPER, LOW, HIGH)
    # The distance from one corner of the action box to the opposite one.
    assert floor == pytest.approx(endless(low, -0.5 * np.square(np.ones(3) - -np.ones(3)).sum(), discount))
    assert ceiling == HIGH


def test_the_entropy_bonus_of_all_bins_is_within_from_the_first_step_on() -> None:
    """A soft value of uniform bins, at rewards of 1: ``V = 1 + bonus + gamma V``, by iteration."""
    config = arsq.Config(temperature=0.1, levels=2, bins=7, discount=0.9)
    v, bonus = 0.0, 0.1 * math.log(float(7 ** (2 * 3)))  # the entropy of 7^6 equally likely actions
    for _ in range(500):
        v = 1.0 + bonus + 0.9 * v
    assert agents.target_range("arsq", config, HOPPER, 0.0, 10.0) == (0.0, pytest.approx(v))


def test_the_entropy_of_a_soft_maximum_is_within() -> None:
    """Of uniform actions, from the next step on: ``V = 1 + gamma (V + bonus)``, by iteration."""
    config, v = dqn.Config(temperature=0.3, discount=0.9), 0.0
    for _ in range(500):
        v = 1.0 + 0.9 * (v + 0.3 * math.log(5.0))
    assert agents.target_range("dqn", config, Spec((3,), 5, True), 0.0, 10.0) == (0.0, pytest.approx(v))
    assert agents.target_range("dqn", dqn.Config(discount=1.0), HOPPER, 0.0, 10.0) == (0.0, 10.0)
    soft = dqn.Config(discount=1.0, temperature=0.3)
    assert agents.target_range("dqn", soft, HOPPER, 0.0, 10.0) == (0.0, math.inf)


def test_what_munchausen_takes_off_rewards_is_within() -> None:
    """The floor in every step, as little entropy as none: ``V = -1 + 0.9 * -0.5 + gamma V``, by iteration."""
    config, v = dqn.Config(temperature=0.3, munchausen=0.9, munchausen_floor=-0.5, discount=0.9), 0.0
    for _ in range(500):
        v = -1.0 - 0.45 + 0.9 * v
    assert agents.target_range("dqn", config, Spec((3,), 5, True), -10.0, 0.0)[0] == pytest.approx(v)


def test_what_ones_own_agent_computes_with_jax_is_a_pair_of_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    own = SimpleNamespace(target_range=lambda config, spec, low, high: (low, high + jnp.log(2.0)))
    monkeypatch.setitem(agents.AGENTS, "own", own)
    assert len({*agents.target_range("own", None, HOPPER, LOW, HIGH)}) == 2


def test_who_widens_and_who_does_not() -> None:
    config = {name: module.Config() for name, module in agents.AGENTS.items() if name not in agents.GOALS}
    wider = {n for n in config if agents.target_range(n, config[n], HOPPER, LOW, HIGH) != (LOW, HIGH)}
    assert wider == {"arsq", "sac", "sac_n", "edac", "rebrac"}
    soft = agents.get("cql").Config(backup_entropy=True)
    assert agents.target_range("cql", soft, HOPPER, LOW, HIGH)[1] > HIGH
    hard = agents.get("sac").Config(backup_entropy=False)
    assert agents.target_range("sac", hard, HOPPER, LOW, HIGH) == (LOW, HIGH)


@pytest.mark.parametrize("divergence", ["tv", "kl", "chi2"])
@pytest.mark.parametrize("scale", [0.01, 1.0, 100.0])
def test_no_adversary_pays_more_than_the_bound_on_its_price(divergence: str, scale: float) -> None:
    rng = np.random.default_rng(0)
    values = rng.uniform(LOW, HIGH, (2000, 6)).astype(np.float32)
    values[:1000] = np.where(rng.random((1000, 6)) < 0.5, LOW, HIGH)  # the hardest: all at one of the ends
    _, price = worst_case(divergence, values, np.full(6, 1 / 6, np.float32), scale)
    low, high = robust.target_range(divergence, scale, 6, LOW, HIGH)
    assert low == LOW
    assert price.max() <= high - HIGH + 1e-4


def test_penalties_of_model_rows_are_within() -> None:
    config = model_based.Config(uncertainty="aleatoric", penalty=0.5)
    low, high = model_based.target_range(config, 0.9, HOPPER, LOW, HIGH)
    network = ensemble.make(ensemble.Config(members=3, elites=3, hidden=(8,), decay=(0.0, 0.0)), HOPPER)
    model = network.init(jax.random.key(0))
    observation, action = jnp.full((1, 11), 1e3), jnp.ones((1, 3))
    # However far a member's raw output is, its deviation has the bound that it starts with.
    loud = model._replace(members=jax.tree.map(lambda x: x + 1e3, model.members))
    doubt = base.aleatoric(*network.dynamics.predict(loud, observation, action))
    assert doubt.item() == pytest.approx((LOW - low) * (1 - 0.9) / 0.5, rel=1e-3)
    assert high == HIGH
    assert model_based.target_range(model_based.Config(), 0.9, HOPPER, LOW, HIGH) == (LOW, HIGH)


def test_the_support_of_a_run_is_wide_enough_for_every_member_of_a_sweep(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """From the flags down to the head: a robust soft agent, and the larger penalty of two."""
    plain = offline.Settings(agent="iql", head="hl_gauss", workdir=str(tmp_path))
    low, high = offline.problem(plain, [agents.get("iql").Config()]).support
    soft = offline.Settings(agent="edac", head="hl_gauss", robust="kl", robust_scale=2.0)
    task = offline.problem(soft, [agents.get("edac").Config()])
    size = task.loaded.spec.action_size
    soft_high = high + 99 * size * math.log(2.0)
    assert task.support == pytest.approx((low - 99 * size, soft_high + 2 * math.log(6)), rel=1e-5)
    rebracs = logged.variants(rebrac.Config(), {"critic_cloning": [0.01, 0.5]})
    swept = offline.problem(offline.Settings(agent="rebrac", head="hl_gauss"), rebracs).support
    assert swept == pytest.approx((low - 4 * size * 0.5 * 99, high), rel=1e-5)
    assert "2 runs of the sweep" in capsys.readouterr().err


def test_an_adversarys_values_reach_below_those_of_any_logged_return(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rewards of -1 and 1 by turns, whose returns are all near 0; the worst dynamics give -1 for ever."""
    reward = np.where(np.arange(2000) % 2, 1.0, -1.0).astype(np.float32)
    rows = np.float32(np.arange(2000) % 500)[:, None]
    ends = np.arange(2000) % 500 == 499
    steps = from_steps(rows, 0 * rows, reward, np.zeros(2000, bool), ends, rows + 1, source="by hand")
    low, high = replay.value_bounds(steps, 0.99)
    assert -5 < low < high < 5
    assert replay.value_bounds(steps, 0.99, adversary=True) == pytest.approx((-100, high))
    chosen = []
    monkeypatch.setattr(common, "value_bounds", lambda *x: chosen.append(x[-1]) or (LOW, HIGH))
    for name, head in (("", "c51"), ("tv", "c51"), ("tv", "quantile")):
        offline.problem(offline.Settings(agent="iql", robust=name, head=head), [agents.get("iql").Config()])
    assert chosen == [False, True, False]


def test_no_support_holds_an_adversary_that_prolongs_episodes_for_ever() -> None:
    rows, reward = np.zeros((8, 1), np.float32), np.full(8, -1, np.float32)
    steps = from_steps(rows, rows, reward, np.arange(8) % 4 == 3, np.zeros(8, bool), source="by hand")
    assert replay.value_bounds(steps, 1.0)[0] > -9
    assert replay.value_bounds(steps, 1.0, adversary=True) == (-math.inf, replay.value_bounds(steps, 1.0)[1])
