"""The R2PVI paper's algorithms in NumPy, sample by sample as its authors wrote them, with their faults on request.

An independent oracle for `rl.agents.linear` in tests, and what `experiments.papers.r2pvi` emulates published numbers
by. The data and the test episodes are drawn in the order of the authors' ``np.random`` calls, so that their numbers
come out exactly.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import jax.numpy as jnp
import numpy as np
from scipy import optimize

from rl.envs import american_put
from rl.envs.american_put import AmericanPut
from rl.envs.linear_mdp import LinearMDP
from rl.replay.linear import Trajectories

Estimate = Callable[
    [np.ndarray, np.ndarray, float], np.ndarray
]  # (Lambda^-1 Phi' [d, N], values [N], H) -> [d]
Q = Callable[[int, np.ndarray], np.ndarray]  # (step, features [..., d]) -> [...]


def fit(
    data: Trajectories,
    estimate: Estimate | None,
    *,
    beta: float,
    ridge: float,
    penalty: str = "diagonal",
    untrained_variance: bool = False,
) -> Q:
    """The backward pass; without an estimate PEVI, which regresses the reward too.

    ``untrained_variance`` is how the authors weigh samples in the put option's VA agents: the variance of the next
    value is regressed before this step's data has entered the covariance, with the ridge alone.
    """
    features, reward, following, stopping, theta = map(np.asarray, data)
    horizon, _, size = features.shape
    weights, inverse = np.zeros((horizon, size)), np.zeros((horizon, size, size))

    def q(step: int, phi: np.ndarray) -> np.ndarray:
        if penalty == "ellipsoid":
            width = np.sqrt(np.einsum("...i,ij,...j", phi, inverse[step], phi))
        elif penalty == "theory":
            width = phi @ np.sqrt(np.diag(inverse[step]))
        else:
            width = np.sqrt(phi**2 @ np.diag(inverse[step]))
        return np.minimum(phi @ weights[step] - beta * width, horizon - step)

    for step in reversed(range(horizon)):
        phi, last = features[step], step == horizon - 1
        value = (
            np.zeros(len(phi)) if last else np.maximum(q(step + 1, following[step]).max(-1), stopping[step])
        )
        weight = np.ones(len(phi))
        if untrained_variance and not last:
            first, second = (phi @ (phi.T @ f) / ridge for f in (value, value**2))
            weight = 1 / np.maximum(1, np.clip(second, 0, horizon**2) - np.clip(first, 0, horizon) ** 2)
        weighted = phi * weight[:, None]
        inverse[step] = np.linalg.inv(weighted.T @ phi + ridge * np.eye(size))
        rows = inverse[step] @ weighted.T
        if estimate is None:
            weights[step] = rows @ (reward[step] + value)
        else:
            weights[step] = theta[step] + (0 if last else estimate(rows, value, horizon))
    return q


# ---- the factors' estimates ------------------------------------------------------------------------------


def tv(scale: float) -> Estimate:
    return lambda rows, v, _: rows @ np.minimum(v, v.min() + scale)


def kl(scale: float, kind: str = "plain") -> Estimate:
    """``plain`` is the authors', ``shifted`` as they have it for the ball; ``normalised`` is ours."""

    def estimate(rows: np.ndarray, v: np.ndarray, horizon: float) -> np.ndarray:
        mass = rows.sum(-1)
        if kind == "shifted":
            mean = 1 + rows @ np.expm1(-v / scale)
        else:
            mean = rows @ np.exp(-v / scale) / (mass if kind == "normalised" else 1)
        worst = -scale * np.log(np.maximum(mean, np.exp(-horizon / scale)))
        return np.minimum(mass * worst, rows @ v) if kind == "normalised" else worst

    return estimate


def chi2_objective(scale: float, kind: str = "plain") -> Callable:
    """As `kl`, without the bound that ``normalised`` has there."""

    def objective(row: np.ndarray, v: np.ndarray, cut: np.ndarray) -> np.ndarray:
        clipped, mass = np.minimum(v, cut), row.sum() if kind == "normalised" else 1
        mean, square = clipped @ row, clipped**2 @ row
        return mean + (mean**2 / mass - square) / (4 * scale)

    return objective


def tv_ball_objective(radius: float) -> Callable:
    return lambda row, v, cut: np.minimum(v, cut) @ row - radius * np.asarray(cut)[..., 0]


def kl_ball_objective(radius: float) -> Callable:
    def objective(row: np.ndarray, v: np.ndarray, price: np.ndarray) -> np.ndarray:
        mean = 1 + np.expm1(-v / price) @ row
        return -price[..., 0] * (np.log(np.maximum(mean, 1e-6)) + radius)

    return objective


def nelder_mead(objective: Callable, *, minimise: bool = False, least: float = 0.0) -> Estimate:
    """The authors' search from H / 2, which stops in local maxima; and their fault for chi2, the wrong direction."""
    sign = 1.0 if minimise else -1.0

    def estimate(rows: np.ndarray, v: np.ndarray, horizon: float) -> np.ndarray:
        minima = [
            optimize.minimize(
                lambda cut, row=row: sign * float(objective(row, v, np.atleast_1d(cut))),
                horizon / 2,
                method="Nelder-Mead",
                bounds=[(least, horizon)],
            ).fun
            for row in rows
        ]
        return sign * np.array(minima)

    return estimate


# ---- the authors' random streams -------------------------------------------------------------------------


def mdp_data(env: LinearMDP, seed: int, count: int = 100) -> Trajectories:
    """What their collection draws for this seed: an action, a next state, an action, ..."""
    features, kernel = np.asarray(env.features), np.asarray(env.kernel)
    random = np.random.RandomState(seed)
    state, action = np.zeros((4, count), int), np.zeros((3, count), int)
    for n, h in np.ndindex(count, 3):
        action[h, n] = random.randint(0, features.shape[1], size=1)[0]
        phi = features[state[h, n], action[h, n]]
        state[h + 1, n] = _following(phi, kernel[h], last=h == 2)(random.random_sample())
    phi, theta = features[state[:3], action], np.asarray(env.theta)
    following = np.where(np.asarray(env.worthless)[:, None, None], 0, features)[state[1:3]]
    stopping = np.full(following.shape[:2], -np.inf)
    return Trajectories(*map(jnp.asarray, (phi, (phi * theta[:, None]).sum(-1), following, stopping, theta)))


def mdp_return(env: LinearMDP, q: Q, seed: int, episodes: int = 100) -> float:
    """The mean return of their test episodes for this seed."""
    features, kernel, theta = (np.asarray(x) for x in (env.features, env.kernel, env.theta))
    action = [q(h, features).argmax(-1) for h in range(3)]
    random, total = np.random.RandomState(seed), 0.0
    for _ in range(episodes):
        state = 0
        for h in range(3):
            phi = features[state, action[h][state]]
            total += phi @ theta[h]
            state = _following(phi, kernel[h], last=h == 2)(random.random_sample())
    return total / episodes


def _following(phi: np.ndarray, kernel: np.ndarray, *, last: bool) -> Callable[[float], int]:
    # Their last step draws x4 and x5 in proportion to the last two features, whatever follows.
    distribution = np.array([0, 0, phi[2], phi[3]]) if last else (phi @ kernel)[1:]
    cumulative = np.cumsum(distribution)
    return lambda draw: 1 + int((cumulative / cumulative[-1]).searchsorted(draw, side="right"))


def put_start(seed: int) -> float:
    """The price that their environment draws once, when it is made."""
    return float(np.random.RandomState(seed).uniform(95, 105))


def put_rises(env: AmericanPut, count: int) -> np.ndarray:
    """The moves [H-1, count] of their collection, whose seed is 1 for every replication."""
    horizon = len(env.time)
    return np.random.RandomState(1).random_sample((count, horizon)).T[: horizon - 1] < 0.5


@functools.cache
def put_data(count: int = 100, strike: float = 100.0) -> tuple[AmericanPut, list[Trajectories]]:
    """Their three datasets: one start for each, the same moves for all."""
    env = american_put.make(strike=strike)
    rises = jnp.asarray(put_rises(env, count))
    starts = [jnp.full(count, put_start(seed)) for seed in range(3)]
    return env, [american_put.trajectories(env, american_put.path(env, start, rises)) for start in starts]


def put_returns(
    q_of: Callable[[Trajectories], Q],
    rises: Sequence[float] | np.ndarray,
    count: int = 100,
    believed: float = 100.0,
) -> np.ndarray:
    """Average payoffs of three agents at these probabilities of a rise, from their datasets and test episodes."""
    env, datasets = put_data(count, believed)
    anchors, width = np.asarray(env.anchors), float(env.width)
    features = lambda price: np.maximum(0, 1 - np.abs(price - anchors) / width)
    agents = [q_of(data) for data in datasets]
    return np.array([np.mean([put_return(q, features, p, believed=believed) for q in agents]) for p in rises])


def put_return(
    q: Q, features: Callable, probability: float, strike: float = 100.0, believed: float | None = None
):
    """The mean payoff of their 100 test episodes, all from the price of seed 1 and with one stream of moves.

    ``believed`` is the strike that the agent compares with: the number of its trajectories, in their code.
    """
    random = np.random.RandomState(1)
    start = random.uniform(95, 105)
    believed = strike if believed is None else believed
    total, horizon = 0.0, 20
    hold: dict[tuple[int, int], float] = {}
    for _ in range(100):
        rises, alive = 0, True
        for h in range(horizon):
            price = start * 1.02**rises * 0.98 ** (h - rises)
            if alive and (h, rises) not in hold:
                hold[h, rises] = float(q(h, features(price)))
            if alive and max(0.0, believed - price) > hold[h, rises]:
                total, alive = total + max(0.0, strike - price), False
            else:
                rises += random.random_sample() < probability
    return total / 100
