"""Offline model-based training: roll the policy out in a world, remember, update; one epoch is one compiled call.

MBPO's loop (Janner et al. 2019) on logged data alone, as RAVL (Sims et al., NeurIPS 2024) uses it. An epoch starts
rollouts of ``k`` steps from logged observations, adds their rows to a ring buffer on the device, and updates the agent
on batches of logged and model rows. Methods of the field are settings of this loop and of its soft actor-critic:

| method | critics N | diversity eta | rewards of model rows |
|---|---|---|---|
| base (MBPO, offline) | 2 | 0 | as the model says |
| MOPO | 2 | 0 | less ``lambda u(s, a)``, u the model's deviation, or its members' disagreement |
| MOBILE | 2 | 0 | less ``lambda`` times the deviation of the next value over members (`rl.agents.mobile`) |
| RAVL | 10 or more | above 0 | as the model says |
| SAC-N, EDAC | 10 or more | 0, above 0 | there are none: ``real`` is 1 |

Paper and code. Loop and agent are those of RAVL's code (anyasims/edge-of-reach), whose agent is CORL's EDAC: its
results are what a run here is compared with, and its defaults are those of `Config`. Which N, eta, k and r it had on
which dataset is in the paper's table alone. MOPO and MOBILE run in the same loop, as in OfflineRL-Kit (Sun 2023,
MOBILE's author) and not as in MOPO's code from 2020: so methods differ in what the table says and in nothing else, and
published lengths and penalties (``--preset=paper``) were tuned in it. MOPO's penalty is the paper's, and
``disagreement`` the ensemble penalty that the paper tries too. Critics start as in EDAC's code. RAVL's stores their
hidden weights transposed, so that they are U(+-1/sqrt(outputs)), which is not copied. The part ``start`` of
`experiments.papers.edge_of_reach` compares both, and there the difference decides. What else differs from these codes
is said where it is: `rl.agents.sac_n`, `rl.agents.mobile`, `rl.dynamics.fit`, and with each preset (``missing`` in
experiments/presets.yaml).

What goes wrong in truncated rollouts is measured in `diagnosis` and ends a run in `check_values`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from rl import keys, nest, train
from rl.agents import mobile
from rl.dynamics import rollout
from rl.dynamics.base import UNCERTAINTY, Dynamics, aleatoric
from rl.dynamics.rollout import Rollouts
from rl.dynamics.termination import Rule
from rl.replay import dataset as replay
from rl.replay import ring, source
from rl.replay.dataset import Dataset
from rl.settings import require_at_least_one, require_choice
from rl.types import Array, Key, Learner, Metrics, Spec, State, Transition

PENALTIES = (*UNCERTAINTY, "bellman")
_DIAGNOSED = 2048  # rows of an epoch's rollouts that a diagnosis looks at
# Rollouts of an epoch that a diagnosis needs: some to look at, and two halves to compare them with.
DIAGNOSABLE = 3


@dataclasses.dataclass(frozen=True)
class Config:
    """The loop's hyper-parameters; defaults are those of RAVL's code.

    No environment is known here: with a ``length`` beyond its time limit rollouts go on where episodes would have been
    cut. `experiments.model_based` refuses that where it can, which is not where a log names no environment. The buffer
    takes ``rollouts * length * retain`` rows of the device's memory and of every checkpoint.
    """

    rollouts: int = 50_000  # rollouts started per epoch
    length: int = 5  # k, steps of a rollout
    retain: int = 5  # epochs of full rollouts that the buffer holds
    updates: int = 1000  # updates per epoch
    batch_size: int = 256  # rows per update
    real: float = 0.05  # r, share of logged rows in a batch, rounded down to whole rows; 1: no model
    uncertainty: str = ""  # by what model rows are penalised: aleatoric, disagreement, bellman, or nothing
    penalty: float = 0.0  # lambda, weight of --agent.uncertainty


# Settings of `rl.agents.sac_n` and of the loop.
METHODS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "base": ({"critics": 2}, {}),
    "mopo": ({"critics": 2}, {"uncertainty": "aleatoric", "penalty": 0.5}),
    "mopo_disagreement": ({"critics": 2}, {"uncertainty": "disagreement", "penalty": 0.5}),
    "mobile": ({"critics": 2}, {"uncertainty": "bellman", "penalty": 0.5}),
    "ravl": ({"critics": 10, "diversity": 1.0}, {}),
    "sac_n": ({"critics": 10}, {"real": 1.0}),
    "edac": ({"critics": 10, "diversity": 1.0}, {"real": 1.0}),
}


class Carry(NamedTuple):
    """What one epoch hands to the next."""

    learner: State
    buffer: Any  # a `ring.Ring` of model rows; () where there is no model


# Axes over seeds, as `rl.train.STACKED`.
STACKED = Carry(train.STACKED, buffer=0)


class Inputs(NamedTuple):
    """What an epoch reads and does not change."""

    dataset: Dataset
    world: Any  # parameters of the dynamics


class Loop(NamedTuple):
    """Training as two pure functions of one seed; of several, `over_seeds` and ``init`` with `STACKED` for out_axes."""

    init: Callable[[Key, Dataset], Carry]
    epoch: Callable[[Carry, Inputs, Key], tuple[Carry, train.Report]]  # for `rl.train.epochs`


# (learner's state, parameters of the world, fresh rollouts, key) -> metrics
Diagnose = Callable[[State, Any, Rollouts, Key], Metrics]


class RunawayQ(train.Diverged):
    """Values grew beyond anything that rewards allow."""


def make(
    config: Config,
    learner: Learner,
    dynamics: Dynamics,
    terminates: Rule,
    diagnose: Diagnose | None = None,
) -> Loop:
    """The loop for one learner in one world.

    Args:
      config: the loop's settings.
      learner: any with ``explore``; ``int(real * batch_size)`` rows of its batches are logged ones, of origin 0, and
        the others, of origin 1, the world's.
      dynamics: where rollouts happen.
      terminates: which next observations end an episode; see `rl.dynamics.termination`.
      diagnose: metrics of an epoch's rollouts, after its updates.

    Raises:
      ValueError: a setting without sense; the message names it.
    """
    _check(config)
    if learner.explore is None:
        raise ValueError("this agent cannot draw actions for rollouts (it has no explore): choose another")
    explore = learner.explore
    logged = int(config.real * config.batch_size + 1e-9)  # 0.29 of 100 is 28.999... in floats
    from_rollouts = config.batch_size - logged
    penalise = UNCERTAINTY.get(config.uncertainty)
    capacity = config.rollouts * config.length * config.retain
    sample = replay.sampler(logged)
    if from_rollouts:
        sample = source.concatenated(sample, ring.row_sampler(from_rollouts))

    def init(key: Key, dataset: Dataset) -> Carry:
        example = replay.take(dataset, jnp.arange(2))
        row = jax.tree.map(lambda x: x[0], example._replace(origin=None))  # rollouts have none of their own
        return Carry(
            learner.init(keys.of(key, "init"), example), ring.empty(row, capacity) if from_rollouts else ()
        )

    def roll(state: State, inputs: Inputs, key: Key) -> Rollouts:
        start_key, key = jax.random.split(key)
        starts = jax.random.randint(start_key, (config.rollouts,), 0, replay.size(inputs.dataset))
        return rollout.roll(
            dynamics,
            terminates,
            lambda observation, key: explore(state, observation, key),
            config.length,
            inputs.world,
            inputs.dataset.transitions.observation[starts],
            key,
            (lambda *prediction: config.penalty * penalise(*prediction)) if penalise else None,
        )

    def update(world: Any) -> Callable[[State, Transition, Key], tuple[State, Metrics]]:
        if config.uncertainty != "bellman":
            return learner.update
        predict = lambda observation, action: dynamics.predict(world, observation, action)
        return mobile.make(learner, predict, config.penalty).update

    def epoch(carry: Carry, inputs: Inputs, key: Key) -> tuple[Carry, train.Report]:
        state, buffer = carry
        roll_key, diagnose_key = jax.random.split(jax.random.fold_in(keys.of(key, "rollout"), state.step))
        metrics: dict[str, Array] = {}
        if from_rollouts:
            rolled, lost = rollout.without_lost(roll(state, inputs, roll_key))
            flat = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), rolled)
            buffer = ring.insert(buffer, flat.transitions, flat.valid)
            written = rolled.valid.sum()
            metrics = {
                "rollout_length": written / config.rollouts,
                "rollout_reward": _average(rolled.transitions.reward, rolled.valid),
                "lost": lost / jnp.maximum(1, written + lost),
            }
        data: Any = (inputs.dataset, buffer) if from_rollouts else inputs.dataset
        state, report = train.scan_updates(update(inputs.world), sample, config.updates)(state, data, key)
        if from_rollouts and diagnose:
            metrics |= diagnose(state, inputs.world, rolled, diagnose_key)
        return Carry(state, buffer), report._replace(metrics={**report.metrics, **metrics})

    return Loop(init, epoch)


def target_range(config: Config, discount: float, spec: Spec, low: float, high: float) -> tuple[float, float]:
    """The range [low, high] of values, lowered by the penalty of all steps to come.

    MOPO's is at most ``lambda |deviation|``, and no deviation of the ensemble starts above ``exp(0.25)`` in each of the
    ``O + 1`` predicted numbers; the members' disagreement is taken to be no larger. MOBILE's is a deviation of values,
    at most half their range: one whole range is added, for what a penalty of every step would add (``1 / (1 - gamma)``
    of it) leaves a categorical head no resolution. The metric ``clipped`` tells whether this is enough.
    """
    if not config.uncertainty:
        return low, high
    if config.uncertainty == "bellman":
        return low - (high - low), high
    nest.require_array(spec.observation_shape, "a dynamics ensemble")
    largest = math.exp(0.25) * math.sqrt(math.prod(spec.observation_shape) + 1)
    return low - replay.for_ever(config.penalty * largest, discount), high


def over_seeds(
    epoch: Callable[[Carry, Inputs, Key], tuple[Carry, train.Report]], *, batched: bool
) -> Callable[[Carry, Inputs, Key], tuple[Carry, train.Report]]:
    """``epoch`` of carries (`STACKED`), worlds [S, ...] and keys [S], on one dataset.

    ``batched`` advances seeds together, as accelerators want it; otherwise one after another in the same program.
    """
    if batched:
        axes: Any = Inputs(None, 0)  # type: ignore[arg-type]
        return jax.vmap(epoch, (STACKED, axes, 0), (STACKED, 0))

    def one_by_one(carry: Carry, inputs: Inputs, run_keys: Key) -> tuple[Carry, train.Report]:
        def one(carry: Carry, key: Key, world: Any) -> tuple[Carry, train.Report]:
            return epoch(carry, inputs._replace(world=world), key)

        return train.in_turn(one)(carry, run_keys, inputs.world)

    return one_by_one


# ---- what goes wrong -------------------------------------------------------------------------------------


def out_of_distribution(following: Array, final: Array, trained: Array) -> Array:
    """An estimate of which states are edge-of-reach where nobody knows: final ones unlike any that was trained.

    A state is unlike them if its nearest neighbour in the first half of ``trained``, each dimension in units of its
    deviation, is farther away than that of 99 % of the second half. The halves must be of different rollouts, so that
    neither has seen more steps than the other.
    """
    deviation = trained.std(0)
    scale = jnp.where(deviation > 1e-6, deviation, 1.0)  # a constant dimension has no unit of its own
    half = len(trained) // 2
    known = trained[:half] / scale

    def distance(points: Array) -> Array:
        nearest = lambda point: jnp.square(point / scale - known).sum(-1).min()
        return jax.lax.map(nearest, points, batch_size=64)

    return final & (distance(following) > jnp.quantile(distance(trained[half:]), 0.99))


def diagnosis(
    learner: Learner,
    critics: Callable[[State, Array, Array], Array],
    dynamics: Dynamics,
    edge: Callable[[Array], Array] | None = None,
    truth: Dynamics | None = None,
) -> Diagnose:
    """Metrics of the edge-of-reach problem, on some 2,048 rows of an epoch's rollouts.

    ``edge_share``: share of next states that are edge-of-reach. ``edge_q`` and ``elsewhere_q``: the value with which
    targets continue there, and at all others; none does from where an episode ended. ``spread``: deviation of Q(s, a)
    over critics, RAVL's effective penalty. ``aleatoric``: MOPO's penalty. ``spread_aleatoric``: their correlation.
    ``reward_error``: mean distance of the rewards that the world draws, before any penalty, from those of ``truth``, if
    that is given (a world without parameters).

    Args:
      learner: the one that is trained; it must have a ``value``.
      critics: (state, observations [B, O], actions) -> values [E, B].
      dynamics: where rollouts happen.
      edge: next observations [B, O] -> bool [B], which are edge-of-reach; None: as `out_of_distribution` estimates,
        beside twice as many other rollouts. To its own rollout a next state is near, as it is a step away from it.
      truth: the world as it is.

    Raises:
      ValueError: when it is traced, there are fewer than `DIAGNOSABLE` rollouts to estimate it from.
    """
    assert learner.value is not None
    value = learner.value

    def diagnose(state: State, world: Any, rolled: Rollouts, key: Key) -> Metrics:
        length, count = rolled.valid.shape
        chosen = min(max(1, _DIAGNOSED // length), count if edge else count // DIAGNOSABLE)
        if not chosen:
            raise ValueError(f"rollouts={count} of an epoch cannot be diagnosed: give at least {DIAGNOSABLE}")
        final = jnp.zeros(rolled.valid.shape, bool).at[-1].set(rolled.transitions.discount[-1] > 0)
        part = jax.tree.map(lambda x: x[:, :chosen].reshape(-1, *x.shape[2:]), (rolled, final))
        (steps, valid), final = part
        if edge:
            at_edge = edge(steps.next_observation) & valid
        else:
            others = _trained(rolled, 2 * chosen)
            at_edge = out_of_distribution(steps.next_observation, final, others) & valid
        value_key, reward_key = jax.random.split(key)
        q = value(state, steps.next_observation, value_key)
        continues = valid & (steps.discount > 0)
        spread = critics(state, steps.observation, steps.action).std(0)
        penalty = aleatoric(*dynamics.predict(world, steps.observation, steps.action))
        metrics = {
            "edge_share": _average(at_edge, valid),
            "edge_q": _average(q, at_edge & continues),
            "elsewhere_q": _average(q, continues & ~at_edge),
            "spread": _average(spread, valid),
            "aleatoric": _average(penalty, valid),
            "spread_aleatoric": _correlation(spread, penalty, valid),
        }
        if truth:
            # The keys that rollouts were drawn with are spent: these draws are others, from the same distribution.
            drawn, true = (
                place.step(params, steps.observation, steps.action, reward_key)[1]
                for place, params in ((dynamics, world), (truth, ()))
            )
            metrics["reward_error"] = _average(jnp.abs(drawn - true), valid)
        return metrics

    return diagnose


class Largest(NamedTuple):
    """What no policy's value exceeds: ``reward + alpha * entropy``, alpha being the temperature."""

    reward: float  # max |r| / (1 - gamma)
    entropy: float  # D ln 2 / (1 - gamma): that of uniform actions in [-1, 1]^D at every step


def largest_value(dataset: Dataset, discount: float) -> Largest:
    """The bound if the logged rewards are all there are; actions [N, D].

    Raises:
      ValueError: a reward is not finite, or ``discount`` is 1, with which nothing bounds a value.
    """
    if discount >= 1:
        raise ValueError(
            f"discount={discount:g}: values of rollouts, which are cut, have no bound: give less than 1"
        )
    reward, action = (np.asarray(x) for x in (dataset.transitions.reward, dataset.transitions.action))
    bad = np.flatnonzero(~np.isfinite(reward))
    if bad.size:
        raise ValueError(
            f"{bad.size} rewards of the dataset are not finite, the first in row {bad[0]}: mend or drop these rows"
        )
    horizon = 1 / (1 - discount)
    return Largest(float(np.abs(reward).max()) * horizon, action.shape[-1] * float(np.log(2)) * horizon)


def check_values(report: train.Report, largest: Largest, factor: float = 10.0) -> None:
    """Raises `RunawayQ` if the mean Q of an epoch exceeds ``factor`` times the ``largest`` value there can be.

    Call it on the reports of `rl.train.epochs`; a study of the phenomenon leaves it out. Metrics without ``alpha`` are
    of an agent without an entropy bonus, those without ``rollout_length`` of one without a model. Below 0 there is no
    limit: penalties are no part of the logged rewards.
    """
    q = np.atleast_1d(np.asarray(report.metrics["q"]))
    limit = np.broadcast_to(largest.reward + report.metrics.get("alpha", 0.0) * largest.entropy, q.shape)
    seeds = np.flatnonzero(~(q <= factor * limit) | ~np.isfinite(q))
    if seeds.size:
        first = seeds[0]
        cause = (
            "targets continue from states that rollouts reach at their last step alone, whose values nothing corrects. "
            "More critics or diversity (RAVL) hold them down; longer rollouts reach them"
            if "rollout_length" in report.metrics
            else "targets continue with actions that the data do not have, whose values nothing corrects. More critics "
            "or diversity (EDAC) hold them down"
        )
        raise RunawayQ(
            f"Q averages {q[first]:.3g}, and rewards and entropy allow at most {limit[first]:.3g} (seeds "
            f"{seeds.tolist()}): {cause}"
        )


def check_rollouts(report: train.Report, epoch: int) -> None:
    """Raises `train.Diverged` if too many rows of the rollouts were not finite (`rl.dynamics.rollout.check_lost`).

    Reports of loops without a model have no such rows.
    """
    if "lost" in report.metrics:
        remedy = "shorten rollouts (--agent.length), or fit the model longer"
        lost = np.atleast_1d(np.asarray(report.metrics["lost"]))
        rollout.check_lost(lost, f"in epoch {epoch}", remedy, train.Diverged)


def _trained(rolled: Rollouts, count: int) -> Array:
    """Observations [N, O] of the last ``count`` rollouts, one rollout after another; an ended one repeats its first."""
    observation = rolled.transitions.observation[:, -count:]
    observation = jnp.where(rolled.valid[:, -count:, None], observation, observation[0])
    return observation.swapaxes(0, 1).reshape(-1, observation.shape[-1])


def _average(x: Array, where: Array) -> Array:
    """Mean over ``where``; 0 where there is nothing."""
    return jnp.where(where, x, 0.0).sum() / jnp.maximum(1, where.sum())


def _correlation(x: Array, y: Array, where: Array) -> Array:
    """Pearson's, over ``where``; 0 where one of the two is constant."""
    x, y = x - _average(x, where), y - _average(y, where)
    product = jnp.sqrt(_average(x * x, where) * _average(y * y, where))
    return jnp.where(product > 0, _average(x * y, where) / jnp.maximum(product, 1e-30), 0.0)


def _check(config: Config) -> None:
    """Raises ValueError, naming the field, on settings without sense."""
    require_at_least_one(config, "rollouts", "length", "retain", "updates", "batch_size")
    if not 0 <= config.real <= 1:
        raise ValueError(f"real={config.real} must be a share between 0 and 1")
    if config.uncertainty:
        require_choice("uncertainty", config.uncertainty, PENALTIES)
    if config.real == 1 and config.uncertainty:
        raise ValueError(
            f"real=1 leaves no model rows that uncertainty={config.uncertainty!r} could penalise: give a share below "
            "1, or no uncertainty and penalty 0"
        )
    if not 0 <= config.penalty < math.inf:
        raise ValueError(f"penalty={config.penalty} must be a finite number that is not negative")
    if bool(config.uncertainty) != (config.penalty > 0):
        raise ValueError(
            f"uncertainty={config.uncertainty!r} and penalty={config.penalty}: give both, or neither of them"
        )
