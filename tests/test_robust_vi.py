"""rl.agents.robust_vi against NumPy, enumeration of policies, and the laws of robust dynamic programming."""

from __future__ import annotations

import importlib.util
import itertools
import json
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments import studies
from experiments.papers import icu_sepsis, iwocs
from rl.agents import robust_vi
from rl.envs import tabular
from rl.envs.tabular import MDP
from rl.values import robust

pytestmark = pytest.mark.slow

GAMMA = 0.9
STATES, ACTIONS = 6, 3
DIVERGENCES = ("tv", "kl", "chi2")
PRICES = {d: partial(robust_vi.regularised, d) for d in DIVERGENCES}
BALLS = {d: partial(robust_vi.ball, d) for d in DIVERGENCES}
SETS = [*PRICES.values(), *BALLS.values()]
SET_NAMES = [f"{kind}-{d}" for kind in ("price", "ball") for d in DIVERGENCES]
every_set = pytest.mark.parametrize("make", SETS, ids=SET_NAMES)


@pytest.fixture(autouse=True)
def float64() -> Iterator[None]:
    with jax.enable_x64(True):
        yield


# One program each for all models of a shape, all sizes of the adversary's set and all tolerances; without these every
# call would compile its own.
draw = jax.jit(tabular.garnet, static_argnums=(1, 2, 3))
evaluate = jax.jit(tabular.evaluate, static_argnums=2)
worst_case = jax.jit(robust.worst_case, static_argnums=0)
Set = Callable[[float | np.ndarray], robust_vi.Backup]


@partial(jax.jit, static_argnames=("make", "gamma", "evaluations"))
def planned(
    mdp: MDP, make: Set, size: float | np.ndarray, tolerance=1e-6, gamma: float = GAMMA, evaluations: int = 20
) -> robust_vi.Solution:
    """Robust value iteration against the set of this size."""
    return robust_vi.value_iteration(mdp, gamma, make(size), tolerance=tolerance, evaluations=evaluations)


@partial(jax.jit, static_argnames=("make", "gamma"))
def judged(mdp: MDP, policy: np.ndarray, make: Set, size: float, gamma: float = GAMMA) -> jax.Array:
    """The policy's robust value [S], to 1e-12: what it earns where the adversary sees its action."""
    mdp, backup = jax.tree.map(jnp.asarray, mdp), make(size)

    def sweep(value: jax.Array) -> jax.Array:
        arriving = (mdp.discount * value)[mdp.successor]
        return (policy * (mdp.reward + gamma * backup.dual(arriving, mdp.transition, backup.size))).sum(-1)

    unsettled = lambda values: jnp.abs(values[1] - values[0]).max() > 1e-12
    start = jnp.zeros(mdp.discount.shape)
    return jax.lax.while_loop(unsettled, lambda values: (values[1], sweep(values[1])), (start, sweep(start)))[
        1
    ]


def nominal(size: float) -> robust_vi.Backup:
    return robust_vi.NOMINAL


def member(size: float) -> robust_vi.Backup:
    return robust_vi.MEMBER


@cache
def garnet(seed: int = 0, branching: int = 4) -> MDP:
    return jax.device_get(draw(jax.random.key(seed), STATES, ACTIONS, branching))


@cache
def family(seed: int, members: int, states: int, actions: int) -> MDP:
    """Random models that share their rewards."""
    drawn = [
        jax.device_get(draw(key, states, actions)) for key in jax.random.split(jax.random.key(seed), members)
    ]
    mdps = jax.tree.map(lambda *x: np.stack(x), *drawn)
    return mdps._replace(reward=np.broadcast_to(mdps.reward[0], mdps.reward.shape))


def hull(mdps: MDP) -> MDP:
    """What the adversary of `MEMBER` chooses from."""
    return jax.tree.map(lambda x: x[0], mdps)._replace(transition=mdps.transition)


def policies(states: int, actions: int) -> np.ndarray:
    """All deterministic ones, [P, S, A]."""
    return np.eye(actions)[list(itertools.product(range(actions), repeat=states))]


def solve(mdp: MDP, policy: np.ndarray, gamma: float) -> np.ndarray:
    chain = np.einsum("sa,sat->st", policy, mdp.transition) * mdp.discount
    return np.linalg.solve(np.eye(len(chain)) - gamma * chain, (policy * mdp.reward).sum(1))


def iterate(mdp: MDP, worst, gamma: float = GAMMA) -> np.ndarray:
    """Plain value iteration in NumPy; ``worst(values, p)`` of one state and action."""
    value = np.zeros(len(mdp.reward))
    for _ in range(400):
        value = np.array(
            [
                max(
                    mdp.reward[s, a] + gamma * worst(value * mdp.discount, mdp.transition[s, a])
                    for a in range(ACTIONS)
                )
                for s in range(STATES)
            ]
        )
    return value


# ---- value iteration ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("evaluations", [0, 1, 20])
def test_nominal_is_the_best_of_all_policies(evaluations: int) -> None:
    mdp = garnet()
    best = np.max([solve(mdp, policy, GAMMA) for policy in policies(STATES, ACTIONS)], axis=0)
    solution = planned(mdp, nominal, 0.0, 1e-12, evaluations=evaluations)
    np.testing.assert_allclose(solution.value, best, rtol=1e-10)
    np.testing.assert_allclose(evaluate(mdp, robust_vi.greedy(solution.q), GAMMA), best, rtol=1e-10)
    assert solution.change <= 1e-12


@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_no_adversary_left_is_ordinary_value_iteration(divergence: str) -> None:
    mdp = garnet()
    plain = iterate(mdp, lambda values, p: p @ values)
    for make, size in ((BALLS[divergence], 0.0), (PRICES[divergence], 1e9)):
        value = planned(mdp, make, size, 1e-9).value
        np.testing.assert_allclose(value, plain, rtol=1e-6)


@pytest.mark.parametrize(
    ("make", "size"),
    [(BALLS["tv"], 1.0), (PRICES["tv"], 1e-12), (PRICES["kl"], 1e-9)],
    ids=["ball", "price-tv", "price-kl"],
)
def test_the_strongest_adversary_picks_the_worst_possible_state(make: Set, size: float) -> None:
    mdp = garnet()
    worst = iterate(mdp, lambda values, p: values[p > 0].min())
    np.testing.assert_allclose(planned(mdp, make, size).value, worst, atol=1e-5)


@every_set
def test_the_value_is_a_fixed_point_and_the_operator_contracts(make) -> None:
    mdp, rng = garnet(), np.random.default_rng(0)
    dual, size = make(0.3)
    operator = jax.jit(lambda v: (mdp.reward + GAMMA * dual(v, mdp.transition, size)).max(-1))
    value = planned(mdp, make, 0.3, 1e-10).value
    np.testing.assert_allclose(operator(value), value, atol=1e-9)
    for one, other in rng.normal(0, 5, (30, 2, STATES)):
        apart = np.abs(operator(one) - operator(other)).max()
        assert apart <= GAMMA * np.abs(one - other).max() + 1e-9


@every_set
def test_a_stronger_adversary_is_never_better(make) -> None:
    mdp = garnet()
    plan = jax.jit(jax.vmap(lambda size: robust_vi.value_iteration(mdp, GAMMA, make(size)).value))
    values = np.asarray(plan(np.array([0.02, 0.1, 0.5, 2.0])))
    steps = np.diff(values, axis=0) * (1 if make.func is robust_vi.regularised else -1)
    assert steps.min() > -1e-5 and np.max(values - planned(mdp, nominal, 0.0).value) < 1e-5
    assert np.ptp(values, axis=0).min() > 0.05  # and it matters


@every_set
def test_sizes_may_differ_between_actions(make) -> None:
    """Each row of a sweep is that of its own size; the cheap sweeps must pick the same."""
    mdp = garnet()
    sizes = np.random.default_rng(0).uniform(0.05, 0.5, (STATES, ACTIONS))
    dual = make(0.1).dual
    value = np.zeros(STATES)
    rowwise = jax.jit(lambda v, p, size: dual(v, p, size))
    for _ in range(150):
        rows = [
            [rowwise(value, mdp.transition[s, a], sizes[s, a]) for a in range(ACTIONS)] for s in range(STATES)
        ]
        value = (mdp.reward + GAMMA * np.array(rows)).max(-1)
    actual = planned(mdp, make, sizes).value
    np.testing.assert_allclose(actual, value, atol=1e-5)


@every_set
def test_next_states_may_be_listed(make) -> None:
    mdp = garnet(branching=3)
    order = np.argsort(-mdp.transition, axis=-1)[..., :3]
    listed = mdp._replace(transition=np.take_along_axis(mdp.transition, order, -1), successor=order)
    one, other = (planned(m, make, 0.2) for m in (mdp, listed))
    np.testing.assert_allclose(one.q, other.q, atol=1e-5)


@every_set
def test_no_nan_where_nothing_varies(make) -> None:
    """Equal values, certain transitions, and ends; float32, no discount."""
    mdp = MDP(
        transition=np.array(
            [[[0, 1, 0], [0.5, 0.5, 0]], [[0, 0, 1], [0, 0, 1]], [[0, 0, 1]] * 2], np.float32
        ),
        successor=np.arange(3),
        reward=np.array([[0, 0], [1, 0], [0, 0]], np.float32),
        discount=np.array([1, 1, 0], np.float32),
        start=np.array([1, 0, 0], np.float32),
        allowed=np.array([[True, True], [True, True], [True, False]]),
    )
    solution = planned(mdp, make, np.float32(0.5), gamma=1.0)
    assert solution.value.dtype == np.float32
    np.testing.assert_allclose(solution.value, [1, 1, 0], atol=1e-6)
    still = planned(mdp._replace(reward=np.zeros((3, 2), np.float32)), make, np.float32(0.5), gamma=1.0)
    np.testing.assert_array_equal(still.value, 0)


def test_only_allowed_actions_are_chosen() -> None:
    mdp = garnet()
    allowed = np.random.default_rng(3).random((STATES, ACTIONS)) < 0.5
    allowed[~allowed.any(1), 1] = True
    solution = planned(mdp._replace(allowed=allowed), nominal, 0.0, 1e-12)
    best = np.max([solve(mdp, p, GAMMA) for p in policies(STATES, ACTIONS) if allowed[p > 0].all()], axis=0)
    np.testing.assert_allclose(solution.value, best, rtol=1e-10)
    assert allowed[np.asarray(robust_vi.greedy(solution.q)) > 0].all()


def test_a_floor_holds_penalties_back() -> None:
    mdp = garnet()
    punished = mdp._replace(reward=mdp.reward - np.where(np.arange(ACTIONS) == 0, 0.5, 100))
    plan = jax.jit(lambda: robust_vi.value_iteration(punished, GAMMA, low=0.0, tolerance=1e-12).value)
    expected = np.zeros(STATES)
    for _ in range(400):
        expected = np.maximum(punished.reward + GAMMA * mdp.transition @ expected, 0).max(1)
    value = plan()
    np.testing.assert_allclose(value, expected, atol=1e-9)
    assert (value >= 0).all()


def test_one_compilation_serves_every_size_and_seed() -> None:
    mdps = jax.tree.map(lambda *x: np.stack(x), *map(garnet, range(3)))
    plan = lambda mdp, scale: planned(mdp, PRICES["kl"], scale).value
    grid = jax.jit(jax.vmap(jax.vmap(plan, (None, 0)), (0, None)))(mdps, np.array([0.1, 1.0]))
    alone = plan(garnet(2), 1.0)
    np.testing.assert_allclose(grid[2, 1], alone, atol=1e-5)


# ---- policy evaluation -------------------------------------------------------------------------------------------


def test_evaluation_without_an_adversary_is_exact() -> None:
    mdp, policy = garnet(), np.random.default_rng(0).dirichlet(np.ones(ACTIONS), STATES)
    value = judged(mdp, policy, nominal, 0.0)
    np.testing.assert_allclose(value, solve(mdp, policy, GAMMA), rtol=1e-10)


@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_no_kernel_is_worse_for_a_policy_than_its_robust_value(divergence: str) -> None:
    """The worst kernel at the fixed point attains it, price included; a hundred others do not go below."""
    mdp, rng, scale = garnet(), np.random.default_rng(0), 0.2
    policy = rng.dirichlet(np.ones(ACTIONS), STATES)
    value = np.asarray(judged(mdp, policy, PRICES[divergence], scale))

    def distance(q: np.ndarray, p: np.ndarray) -> np.ndarray:
        p, ratio = np.where(p > 0, p, 1), np.where(p > 0, q, 0) / np.where(p > 0, p, 1)
        each = {
            "tv": np.abs(ratio - 1) / 2,
            "kl": ratio * np.log(np.where(ratio > 0, ratio, 1)),
            "chi2": (ratio - 1) ** 2,
        }[divergence]
        return (mdp.transition * each).sum(-1)

    def earned(q: np.ndarray) -> np.ndarray:
        price = GAMMA * scale * distance(q, mdp.transition)
        return solve(mdp._replace(transition=q, reward=mdp.reward + price), policy, GAMMA)

    worst = np.asarray(worst_case(divergence, value, mdp.transition, scale)[0])
    np.testing.assert_allclose(earned(worst), value, rtol=1e-6)
    for mix in rng.uniform(0, 1, 100):
        other = mdp.transition * rng.dirichlet(np.ones(STATES), (STATES, ACTIONS))
        other = (1 - mix) * worst + mix * other / other.sum(-1, keepdims=True)
        assert (earned(other) >= value - 1e-9).all()


# ---- IWOCS ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(12))
def test_iwocs_between_its_bounds(seed: int) -> None:
    """Robust value of the rectangular hull <= best static worst case, which lies between worst and promise."""
    mdps = family(seed, members=4, states=4, actions=2)
    members = [jax.tree.map(lambda x, m=m: x[m], mdps) for m in range(4)]
    worst_of = lambda policy: min(mdp.start @ solve(mdp, policy, GAMMA) for mdp in members)
    best = max(map(worst_of, policies(4, 2)))
    result = robust_vi.iwocs(mdps, GAMMA)
    rectangular = planned(hull(mdps), member, 0.0)
    assert mdps.start[0] @ rectangular.value <= best + 1e-6
    assert result.worst[-1] - 1e-9 <= best <= result.promised[-1] + 1e-4
    assert (np.diff(result.q, axis=0) <= 0).all() and (result.q[-1] >= rectangular.q - 1e-4).all()
    assert len(set(result.member)) == len(result.member) <= 4
    for policy, worst in zip(result.policy, result.worst, strict=True):
        np.testing.assert_allclose(worst, worst_of(policy), rtol=1e-9)
    gap = result.promised[-1] - result.worst[-1]
    if result.converged:
        assert gap <= 1e-3 and abs(result.worst[-1] - best) <= 1e-3
    else:
        last = np.argmin([mdp.start @ solve(mdp, result.policy[-1], GAMMA) for mdp in members])
        assert gap > 1e-3 and last in result.member


def test_iwocs_can_be_stuck_and_says_so() -> None:
    assert {robust_vi.iwocs(family(seed, 4, 4, 2), GAMMA).converged for seed in range(12)} == {True, False}


def test_the_promise_of_iwocs_is_no_bound_where_episodes_start_in_several_states() -> None:
    """The least Q of each start is of another member: the first action, which it avoids, is better in both members."""
    to_the_end = np.zeros((4, 4, 2, 4))  # a shape that other tests have compiled: each member is there twice
    to_the_end[..., 3] = 1.0
    paid = np.array([[[1, 0.4], [0, 0.4], [0, 0], [0, 0]], [[0, 0.4], [1, 0.4], [0, 0], [0, 0]]])
    mdps = MDP(
        transition=to_the_end,
        successor=np.tile(np.arange(4), (4, 1)),
        reward=np.tile(paid, (2, 1, 1)),
        discount=np.tile([1.0, 1.0, 1.0, 0.0], (4, 1)),
        start=np.tile([0.5, 0.5, 0.0, 0.0], (4, 1)),
        allowed=np.ones((4, 4, 2), bool),
    )
    result = robust_vi.iwocs(mdps, GAMMA)
    assert result.converged and result.member == [0, 1]
    np.testing.assert_allclose([result.promised[-1], result.worst[-1]], 0.4)
    always_first = np.eye(2)[np.zeros(4, int)]
    members = [jax.tree.map(lambda x, m=m: x[m], mdps) for m in range(4)]
    np.testing.assert_allclose([mdp.start @ solve(mdp, always_first, GAMMA) for mdp in members], 0.5)


@pytest.mark.slow
def test_iwocs_on_the_windy_walk() -> None:
    """Two rounds: no wind, then the strongest; its policy is the robust one of the same 25 models."""
    mdps = jax.device_get(jax.jit(jax.vmap(tabular.windy_walk))(np.linspace(0, 0.5, 25)))
    result = robust_vi.iwocs(mdps, 0.95)
    assert result.member == [0, 24] and result.converged
    members = [jax.tree.map(lambda x, m=m: x[m], mdps) for m in range(25)]
    for policy, worst in zip(result.policy, result.worst, strict=True):
        earned = [mdp.start @ solve(mdp, policy, 0.95) for mdp in members]
        np.testing.assert_allclose(min(earned), worst, rtol=1e-9)
    rectangular = planned(hull(mdps), member, 0.0, gamma=0.95)
    np.testing.assert_allclose(result.q[-1].max(-1), rectangular.value, atol=1e-4)


# ---- bad input --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: robust_vi.regularised("tv", 0.0), "the scale must be positive, not 0"),
        (lambda: robust_vi.regularised("tv", np.array([0.1, np.nan])), "the scale must be positive, not nan"),
        (lambda: robust_vi.ball("kl", -0.1), r"the radius must be 0 or more, not -0\.1"),
        (lambda: robust_vi.ball("hellinger", 0.1), "divergence='hellinger': choose one of tv, kl, chi2"),
        (lambda: robust_vi.value_iteration(garnet(), 1.1), r"gamma must be in \[0, 1\], not 1\.1"),
        (lambda: robust_vi.iwocs(garnet(), GAMMA), r"a leading axis on every field; this reward is \(6, 3\)"),
        (lambda: robust_vi.iwocs(family(0, 2, 3, 2), GAMMA, first=2), "no member 2 in a family of 2"),
    ],
)
def test_errors_say_what_is_wrong(make, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


# ---- the studies ------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_iwocs_study(tmp_path: Path) -> None:
    iwocs.run(iwocs.Settings(families=2, out=str(tmp_path / "new" / "folder")))
    result = json.loads((tmp_path / "new" / "folder" / "result.json").read_text())
    assert [row["alpha"] for row in result["windy_walk"]["rounds"]] == [0.0, 0.5]
    assert result["windy_walk"]["rvi"]["largest_difference_of_v"] < 1e-9
    assert {"windy_walk.png", "table.md"} <= {path.name for path in (tmp_path / "new" / "folder").iterdir()}


def test_the_adversary_of_the_icu_study_attains_the_robust_value() -> None:
    """Its policy iteration ends at the kernel that sweeps of the robust backup find."""
    mdp = garnet()
    mdp = mdp._replace(discount=np.array([1.0] * 5 + [0.0]), reward=mdp.reward * (np.arange(6) < 5)[:, None])
    policy, price = np.random.default_rng(0).dirichlet(np.ones(ACTIONS), STATES), 0.7
    value = np.asarray(judged(mdp, policy, PRICES["kl"], price, gamma=1.0))
    kernel, _ = worst_case("kl", value * mdp.discount, mdp.transition, price)
    expected = mdp.start @ solve(mdp._replace(transition=np.asarray(kernel)), policy, 1.0)
    np.testing.assert_allclose(icu_sepsis._earned(mdp, policy, price), expected, rtol=1e-6)
    np.testing.assert_allclose(icu_sepsis._earned(mdp, policy, np.inf), mdp.start @ solve(mdp, policy, 1.0))


def test_the_icu_report_compares_every_method_within_logs() -> None:
    """Those that are robust and pessimistic with what is pessimistic alone, all others with clinicians and nominal."""
    stored = studies.load(Path(icu_sepsis.__file__).parents[2] / "results/papers/icu_sepsis/result.json")
    tables = [block for block in icu_sepsis.report(stored) if block.startswith("| policy |")]
    labels = [line.split(" | ")[0].removeprefix("| ") for line in tables[1].split("\n")[2:]]
    compared = {label.partition(" over ")[0] for label in labels}
    assert compared == set(icu_sepsis.METHODS) and len(set(labels)) == len(labels) == 25
    beside = [label.partition(" over ")[2] for label in labels if label.startswith(icu_sepsis.PESSIMISTIC)]
    assert beside == ["clinicians", "nominal"]


@pytest.mark.long
@pytest.mark.skipif(
    importlib.util.find_spec("icu_sepsis") is None, reason="the package icu-sepsis is not installed"
)
def test_the_icu_study(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    few = {"nominal", icu_sepsis.PESSIMISTIC, "kl, price 0.3"}
    monkeypatch.setattr(icu_sepsis, "METHODS", {name: icu_sepsis.METHODS[name] for name in few})
    monkeypatch.setattr(icu_sepsis, "WORLDS", {kind: sizes[:2] for kind, sizes in icu_sepsis.WORLDS.items()})
    monkeypatch.setattr(icu_sepsis, "DRAWN", ("clinicians", *few))
    with jax.enable_x64(False):
        survival = icu_sepsis.run(icu_sepsis.Settings(replications=2, episodes=200, out=str(tmp_path)))[
            "survival"
        ]
    assert abs(survival["as logged"]["clinicians"]["mean"] - 0.78) < 0.005
    assert abs(survival["as logged"]["optimum of the true model"]["mean"] - 0.88) < 0.006
    for name in few:
        assert survival["adversary 1"][name]["mean"] < survival["adversary 0.5"][name]["mean"] < 0.75
        assert survival["sicker 0.02"][name]["mean"] < survival["as logged"][name]["mean"]
    assert {f"{kind}.png" for kind in icu_sepsis.WORLDS} < {path.name for path in tmp_path.iterdir()}
