"""Model-based policy optimisation online: MBPO's loop (Janner et al., NeurIPS 2019), with any loss of its model.

    every step of the environment:      remember it; every `retrain_every` steps, first of all
                                          fit the model on all steps, from where the last fit ended
                                          start `rollouts` rollouts of `k` steps from steps that are remembered
                                        G updates of the agent, the batch of each wholly of the environment's steps
                                          or, with probability p, wholly of the model's rows
    k, p                                schedules of the environment's steps

VaGraM (Voelcker et al., ICLR 2022) is this loop with another loss (`rl.dynamics.value_aware`). The environments are
stepped by `rl.interaction.Trainer` and the updates are those of `rl.online`: what is here is the memory with its two
rings and the model (`Memory`), batches from either, and what happens between two steps (`make`).

Every program compiles once. The schedules move inside compiled code: the share is a function of the number of the
update, rollouts are a loop over a length that the program is given, and each of their steps goes into the ring at once.
A run that was stopped goes on to the same bits, since the model is part of the memory, and the keys of a retraining
depend on its number alone.

Differences from the published code (pairlab/vagram, on mbrl-lib): SAC's sampled actions are taken in the environment,
where it takes the policy's mean; an episode that a time limit cuts is worth what follows, where its real batches count
that as a termination, and it starts a new episode with every epoch; schedules are straight lines in steps, where it
holds epoch e at the value of e + 1 (a share that grows over few epochs is behind it by half an epoch to one); the
critics are updated after temperature and policy (`rl.agents.sac_n`), there before them, and its temperature's loss has
a factor alpha; the initial steps are uniformly random instead of an untrained policy's; the first fit, and with it the
first update, comes right after them instead of ``retrain_every`` steps later; there is one ring for rollouts of all
lengths (`Memory.newest`) instead of a larger one for longer rollouts; Adam's moments start from 0 in every fit, and
each member goes back to its own best check, not all to one; the bounds of log-variances are learned, and fixed there;
and the weight decay of VaGraM's model is that of a sum over members, where a mean makes it seven times as strong, and
on biases, too. Observations are not normalised for the agent; the model standardises its own inputs.
"""

from __future__ import annotations

import dataclasses
import functools
import warnings
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from rl import buffers, keys, train
from rl.buffers import Replay
from rl.dynamics import rollout, termination, value_aware
from rl.dynamics.ensemble import Ensemble, Model
from rl.dynamics.rollout import RolloutState
from rl.dynamics.termination import Rule
from rl.interaction import Retraining
from rl.online import Carry
from rl.replay import ring, source
from rl.settings import require_at_least_one
from rl.types import Array, Key, Learner, Metrics, State, Transition

# (stacked state [S] of the learners, environment steps since learning began) -> context of the model's loss, [S]
Context = Callable[[State, int], Any]


@dataclasses.dataclass(frozen=True)
class Schedule:
    """A number that changes on a straight line between two steps and is constant before and after them.

    Steps are environment steps of one seed, counted from where learning begins (after ``learning_starts``).
    """

    start: int  # up to here it is `first`
    end: int  # from here on, `last`
    first: float
    last: float


def value(schedule: Schedule, step: Any, numpy: Any = np) -> Any:
    """The schedule's value [...] at ``step`` [...]; ``numpy`` is NumPy, or `jax.numpy` for its arrays."""
    if schedule.end > schedule.start:
        part = numpy.clip((step - schedule.start) / (schedule.end - schedule.start), 0.0, 1.0)
    else:
        part = 1.0 * (step >= schedule.end)
    return schedule.first + (schedule.last - schedule.first) * part


def rollout_length(schedule: Schedule, step: int) -> int:
    """The whole number of steps of rollouts that start at ``step``."""
    return int(value(schedule, step) + 1e-9)  # 3 is 2.999... in floats


@dataclasses.dataclass(frozen=True)
class Config:
    """The loop's hyper-parameters; defaults are VaGraM's for Hopper.

    The rings take the device's memory, and that of every checkpoint: ``model_replay`` rows for each seed are 250 MB of
    Hopper's at the defaults.
    """

    # Environment steps that are remembered, and that the model learns from: all of a run, 10,000 random ones and
    # 250,000 more. VaGraM's code has room for `num_steps` = 250,000, so that its last steps overwrite the first ones.
    replay: int = 260_000
    batch_size: int = 256  # rows per update
    retrain_every: int = 250  # environment steps between two fits
    rollouts: int = 100_000  # started after each
    rollout_length: Schedule = Schedule(20_000, 150_000, 1, 5)  # k
    model_share: Schedule = Schedule(0, 20_000, 0.0, 0.95)  # p, of batches that are the model's
    # Rows of rollouts that are kept when these are longest. While they are shorter, so are fewer rows in proportion,
    # so that rows are as old as later: those of the same number of retrainings.
    model_replay: int = 2_000_000


class Memory(NamedTuple):
    """What one learner remembers, and its model."""

    environment: Any  # `ring.Ring` of `ring.Row`
    rollouts: Any  # `ring.Ring` of `Transition`, the rows of the model's rollouts
    newest: Any  # [] int32, of which this many, those written last, are drawn
    model: Any  # `Model`


# Axes over seeds: all write their steps together; of the rollouts, some end early.
STACKED = Memory(environment=ring.STACKED, rollouts=0, newest=None, model=0)


class Loop(NamedTuple):
    """What `rl.interaction.Trainer` is given."""

    learner: Learner
    replay: Replay
    retraining: Retraining


class Rhythm(NamedTuple):
    """When updates are made; see `rl.interaction.Trainer`."""

    updates: int
    period: int  # ``updates`` updates after every ``period`` steps of the environments together
    environments: int  # of each seed, stepped together
    learning_starts: int  # steps of each seed after which learning begins: first a fit, then updates


def make(
    config: Config,
    learner: Learner,
    network: Ensemble,
    terminates: Rule,
    run_keys: Key,
    rhythm: Rhythm,
    context: Context | None = None,
) -> Loop:
    """The loop.

    Args:
      config: its settings.
      learner: any that acts without memory; it must know how to explore.
      network: the model.
      terminates: which next observations end an episode (`rl.dynamics.termination`).
      run_keys: [S], one for each seed (`rl.keys.seeds`).
      rhythm: when updates are made.
      context: what the model's loss is given at each fit; None where it asks for nothing.

    Raises:
      ValueError: a setting without sense; the message names it.
    """
    check(config)
    check_rhythm(config, rhythm)
    if learner.explore is None or learner.actor is not None:
        raise ValueError(
            "this agent cannot act in rollouts: it has no explore, or it acts with memory; choose sac, td3 or dqn, say"
        )
    learner = _counting(learner)
    retraining = Retraining(
        due=lambda step: (
            step >= rhythm.learning_starts and (step - rhythm.learning_starts) % config.retrain_every == 0
        ),
        run=_retrain(config, learner, network, terminates, run_keys, rhythm, context),
        check=check_rollouts,
    )
    return Loop(learner, replay(config, learner, network, rhythm), retraining)


def value_context(run_keys: Key, observation_size: int, plain_steps: int) -> Context:
    """What losses that ask a value function are given: the learners as they are now, without their optimisers.

    Args:
      run_keys: [S], of the seeds.
      observation_size: O.
      plain_steps: environment steps from where learning begins in which plain error is added (VaGraM's first epoch).
    """
    seeds = len(run_keys)
    permutation = value_aware.permutations(keys.of(run_keys, "permutation"), observation_size)

    def context(state: State, learned: int) -> value_aware.Context:
        each = state._replace(optimiser={}, step=jnp.broadcast_to(state.step, (seeds,)))
        return value_aware.Context(each, np.full(seeds, learned < plain_steps, np.float32), permutation)

    return context


# ---- batches --------------------------------------------------------------------------------------------------


def replay(config: Config, learner: Learner, network: Ensemble, rhythm: Rhythm) -> Replay:
    """The memory: steps of the environment go into one ring, and each batch is drawn from one of the two."""
    view = buffers.steps(environments=rhythm.environments)

    def of_environment(memory: Memory, key: Key, step: Array | int) -> Transition:
        del step
        slots = view.draw(memory.environment, key, config.batch_size)
        batch = view.transitions(memory.environment, slots, key)
        return source.of_origin(batch, source.ONLINE)

    def of_model(memory: Memory, key: Key, step: Array | int) -> Transition:
        del step
        slots = ring.draw(memory.rollouts, key, config.batch_size, memory.newest)
        return source.of_origin(ring.take(memory.rollouts, slots), source.MODEL)

    def shares(update: Array | int) -> Array:
        share = value(config.model_share, _steps_learned(rhythm, update), jnp)
        return jnp.stack([1 - share, share])

    def empty(row: ring.Row) -> Memory:
        model = jax.eval_shape(network.init, jax.random.key(0))
        nothing = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), model)
        return Memory(
            environment=ring.empty(row, config.replay),
            rollouts=ring.empty(ring.placeholder(row), config.model_replay),
            newest=jnp.ones((), jnp.int32),
            model=nothing,
        )

    return Replay(
        empty=empty,
        insert=lambda memory, rows: memory._replace(environment=ring.insert(memory.environment, rows)),
        split=lambda memory: (memory, None),
        join=lambda memory, priorities: memory,
        learn=buffers.reading_only(
            learner,
            source.whole_batches(of_environment, of_model, shares=shares),
            lambda log, memory: (memory, memory),
        ),
        axes=STACKED,
        view=view,
    )


def _steps_learned(rhythm: Rhythm, update: Array | int) -> Array | int:
    """Environment steps since learning began, at which the update of that number, counted from 0, is made."""
    period = rhythm.period * rhythm.environments
    first = period - rhythm.learning_starts % period
    return first + update // rhythm.updates * period


def _counting(learner: Learner) -> Learner:
    """``learner``, which says which share of its batches was the model's."""

    def update(state: State, batch: Transition, key: Key) -> tuple[State, Metrics]:
        state, metrics = learner.update(state, batch, key)
        return state, {**metrics, "model_share": (batch.origin == source.MODEL).mean()}

    return learner._replace(update=update)


# ---- between two steps ----------------------------------------------------------------------------------------


def _retrain(
    config: Config,
    learner: Learner,
    network: Ensemble,
    terminates: Rule,
    run_keys: Key,
    rhythm: Rhythm,
    context: Context | None,
) -> Callable[[Carry, int], tuple[Carry, dict[str, np.ndarray]]]:
    """`Retraining.run`: fits the model and fills the ring of rollouts."""
    fit_keys, rollout_keys = keys.of(run_keys, "dynamics"), keys.of(run_keys, "rollout")
    fold = jax.jit(jax.vmap(jax.random.fold_in, (0, None)))
    axes = (0, ring.STACKED, 0, train.STACKED, 0, None)
    imagine: Any = jax.jit(
        jax.vmap(imagination(config, learner, network, terminates), axes), donate_argnums=0
    )

    def run(carry: Carry, step: int) -> tuple[Carry, dict[str, np.ndarray]]:
        learned = step - rhythm.learning_starts
        number = np.int32(learned // config.retrain_every)
        memory: Memory = carry.memory
        if not number:
            _warn_of_ends(memory.environment, terminates)
        try:
            model = network.fit(
                memory.environment,
                fold(fit_keys, number),
                memory.model if number else None,
                context(carry.state, learned) if context else (),
            )
        except FloatingPointError as error:
            raise FloatingPointError(f"at environment step {step}: {error}") from error
        length = rollout_length(config.rollout_length, learned)
        rollouts, metrics = imagine(
            memory.rollouts,
            memory.environment,
            model,
            carry.state,
            fold(rollout_keys, number),
            np.int32(length),
        )
        newest = config.model_replay * length // longest(config)
        memory = memory._replace(rollouts=rollouts, newest=jnp.int32(newest), model=model)
        metrics["error"] = model.error[:, 0]  # on held-out rows, of the best member
        named = {name: np.asarray(x, np.float64) for name, x in metrics.items()}
        return carry._replace(memory=memory), named

    return run


def _warn_of_ends(steps: ring.Ring, terminates: Rule) -> None:
    """Warns where the steps so far, of all seeds, say other ends of episodes than rollouts are to have."""
    count = int(steps.count)
    seen, discount = jax.device_get((steps.rows.next_observation[:, :count], steps.rows.discount[:, :count]))
    if against := termination.contradicted(
        terminates, seen.reshape(-1, seen.shape[-1]), discount.ravel() == 0
    ):
        warnings.warn(against, stacklevel=2)


def imagination(
    config: Config, learner: Learner, network: Ensemble, terminates: Rule
) -> Callable[[ring.Ring, ring.Ring, Model, State, Key, Array], tuple[ring.Ring, dict[str, Array]]]:
    """(ring of rollouts, ring of steps, model, state, key, length []) -> ring with their rows, metrics [].

    It costs as many steps as ``length`` says, which is a number and no shape. Rows after the end of an episode are not
    written, and neither are those that are not finite; ``lost`` is the share of these.
    """
    explore = learner.explore
    assert explore is not None

    def imagine(
        rollouts: ring.Ring, steps: ring.Ring, model: Model, state: State, key: Key, length: Array
    ) -> tuple[ring.Ring, dict[str, Array]]:
        start_key, key = jax.random.split(key)
        starts = steps.rows.observation[ring.draw(steps, start_key, config.rollouts)]
        one = rollout.step(network.dynamics, terminates, functools.partial(explore, state))

        def body(number: Array, carry: Any) -> Any:
            ongoing, rollouts, reward, written, lost = carry
            ongoing, rolled = one(model, ongoing, jax.random.fold_in(key, number))
            (rows, usable), lost_now = rollout.without_lost(rolled)
            return (
                ongoing,
                ring.insert(rollouts, rows, usable),
                reward + jnp.where(usable, rows.reward, 0.0).sum(),
                written + usable.sum(),
                lost + lost_now,
            )

        none = jnp.zeros((), jnp.int32)
        carry = RolloutState(starts, jnp.ones(config.rollouts, bool)), rollouts, jnp.zeros(()), none, none
        _, rollouts, reward, written, lost = jax.lax.fori_loop(0, length, body, carry)
        metrics = {
            "rollout_reward": reward / jnp.maximum(1, written),
            "rollout_length": written / config.rollouts,
            "lost": lost / jnp.maximum(1, written + lost),
        }
        return rollouts, metrics

    return imagine


def check_rollouts(metrics: Mapping[str, np.ndarray], step: int) -> None:
    """Raises FloatingPointError if too many rows of the rollouts were not finite (`rl.dynamics.rollout.check_lost`)."""
    remedy = "lower the model's learning rate, or shorten rollout_length"
    rollout.check_lost(metrics["lost"], f"at environment step {step}", remedy)


# ---- what is refused --------------------------------------------------------------------------------------------


def longest(config: Config) -> int:
    """The most steps that any rollout has."""
    return int(max(config.rollout_length.first, config.rollout_length.last))


def check(config: Config) -> None:
    """Raises ValueError, naming the field, on settings without sense."""
    require_at_least_one(config, "replay", "batch_size", "retrain_every", "rollouts", "model_replay")
    for name in ("rollout_length", "model_share"):
        schedule: Schedule = getattr(config, name)
        if schedule.end < schedule.start:
            raise ValueError(
                f"{name}: the schedule runs backwards, from step {schedule.start} to step {schedule.end}: "
                "its numbers are start, end, first value, last value"
            )
    share, length = config.model_share, config.rollout_length
    if not (0 <= share.first <= 1 and 0 <= share.last <= 1):
        raise ValueError(f"model_share: {share.first:g} and {share.last:g} must be shares between 0 and 1")
    if min(length.first, length.last) < 1:
        raise ValueError("rollout_length: rollouts must have at least 1 step, at either end of the schedule")
    rows = config.rollouts * longest(config)
    if config.model_replay < rows:
        raise ValueError(
            f"model_replay={config.model_replay} cannot hold the {config.rollouts} rollouts of {longest(config)} steps "
            f"that start after one fit: give at least {rows}, or fewer rollouts"
        )


def check_rhythm(config: Config, rhythm: Rhythm) -> None:
    """Raises ValueError, naming the field, if fits would not come after whole steps of all environments."""
    if rhythm.learning_starts < 2:
        raise ValueError(
            f"learning_starts={rhythm.learning_starts}: a model needs 2 steps or more to learn from"
        )
    for name, steps in {
        "learning_starts": rhythm.learning_starts,
        "retrain_every": config.retrain_every,
    }.items():
        if steps % rhythm.environments:
            raise ValueError(
                f"{name}={steps} must be a multiple of the {rhythm.environments} environments of a seed"
            )
