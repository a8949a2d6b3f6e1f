"""The published algorithm of R2PVI and its baselines for the put option, in NumPy and SciPy, one sample at a time.

What a user of the paper's code runs: Python loops over samples, a fresh inverse of the covariance for every value of
Q, and one Nelder-Mead search per factor and step where a dual has no closed form. The faults that changed numbers (the
sign of chi2, KL's shift, the strike) are mended here, since only the time is compared.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from scipy import optimize

from rl.replay.linear import Trajectories

Objective = Callable[[np.ndarray, np.ndarray, float], float]  # (row of Lambda^-1 Phi' [N], values [N], alpha)


def fit(method: str, strength: float, data: Trajectories, beta: float, ridge: float) -> np.ndarray:
    """Weights [H, d] of holding the option; ``strength`` is lambda for tv, kl and chi2, rho for the balls."""
    features, _, following, stopping, _ = map(np.asarray, data)
    horizon, count, size = features.shape
    weights = np.zeros((horizon, size))
    covariance = [ridge * np.eye(size) for _ in range(horizon)]
    for step in reversed(range(horizon)):
        for phi in features[step]:
            covariance[step] += np.outer(phi, phi)
        if step == horizon - 1:
            continue
        value = np.zeros(count)
        for sample in range(count):
            phi = following[step, sample, 0]
            inverse = np.linalg.inv(covariance[step + 1])
            hold = phi @ weights[step + 1] - beta * np.sqrt(phi**2 @ np.diag(inverse))
            value[sample] = max(min(hold, horizon - step - 1), stopping[step, sample])
        inverse = np.linalg.inv(covariance[step])
        weights[step] = _ESTIMATES[method](strength, inverse, features[step], value, horizon)
    return weights


def _tv(scale: float, inverse: np.ndarray, phi: np.ndarray, v: np.ndarray, _: int) -> np.ndarray:
    return inverse @ _summed(phi, np.minimum(v, v.min() + scale))


def _kl(scale: float, inverse: np.ndarray, phi: np.ndarray, v: np.ndarray, horizon: int) -> np.ndarray:
    mean = inverse @ _summed(phi, np.exp(-v / scale))
    return -scale * np.log(np.maximum(mean, np.exp(-horizon / scale)))


def _searched(objective: Callable[[float], Objective], least: float = 0.0) -> Callable[..., np.ndarray]:
    def estimate(
        strength: float, inverse: np.ndarray, phi: np.ndarray, v: np.ndarray, horizon: int
    ) -> np.ndarray:
        of = objective(strength)
        return np.array(
            [
                -optimize.minimize(
                    lambda alpha, row=row: -of(row, v, float(alpha[0])),
                    horizon / 2,
                    method="Nelder-Mead",
                    bounds=[(least, horizon)],
                ).fun
                for row in inverse @ phi.T
            ]
        )

    return estimate


def _chi2(scale: float) -> Objective:
    def objective(row: np.ndarray, v: np.ndarray, alpha: float) -> float:
        cut = np.minimum(v, alpha)
        return float(row @ cut + ((row @ cut) ** 2 - row @ cut**2) / (4 * scale))

    return objective


def _tv_ball(radius: float) -> Objective:
    return lambda row, v, alpha: float(row @ np.minimum(v, alpha) - radius * alpha)


def _kl_ball(radius: float) -> Objective:
    def objective(row: np.ndarray, v: np.ndarray, price: float) -> float:
        mean = 1 + row @ (np.exp(-v / price) - 1)
        return -price * np.log(max(mean, 1e-6)) - price * radius

    return objective


def _summed(phi: np.ndarray, f: np.ndarray) -> np.ndarray:
    total = np.zeros(phi.shape[1])
    for row, value in zip(phi, f, strict=True):
        total += row * value
    return total


_ESTIMATES: dict[str, Callable[..., np.ndarray]] = {
    "tv": _tv,
    "kl": _kl,
    "chi2": _searched(_chi2),
    "tv_ball": _searched(_tv_ball),
    "kl_ball": _searched(_kl_ball, 1e-6),
}
