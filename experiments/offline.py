r"""Train an agent on logged data, several seeds at once, and say how good it is.

    python -m experiments.offline --agent=iql --dataset=cube-single-play-singletask-v0 --head=hl_gauss \
        --agent.expectile=0.9 --seeds=8 --updates=1000000

Action chunking (`rl.replay.chunks`), for any agent with continuous actions: ``--chunk=5``, of which ``--replan_every``
are executed before the next decision. Q-chunking with its published settings:

    python -m experiments.offline --agent=fql --dataset=scene-play-singletask-task2-v0 --preset=ogbench-qc

The run folder holds config.json, metrics.jsonl, TensorBoard events, curve.png, result.json and checkpoints; the
same command continues an interrupted run, to the same bits. ``--agent=NAME --help`` lists an agent's own
hyper-parameters. Datasets that cannot be downloaded are made by ``python -m experiments.collect``.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import jax
import numpy as np
from absl import app
from jax.experimental import multihost_utils

from experiments import checks, common, flags, logged, notes, presets
from experiments.common import Problem
from rl import acting, agents, fitted_q, keys, lifecycle, run_folder, shard, train
from rl.agents import robust
from rl.dynamics import ensemble, termination
from rl.replay import dataset as replay
from rl.replay import images, transform
from rl.settings import require_choice
from rl.types import Key, Learner, Spec, State, Transition
from rl.values.robust import REGULARISED

# Settings that another checkpoint in the same folder must agree on.
IDENTITY = (
    *logged.IDENTITY,
    *("normalize_observations", "reward_scale", "reward_shift", "clip_rewards", "policy_estimates"),
    *("robust", "robust_scale", "robust_updates", "n_step", "chunk", "replan_every"),
)

ESTIMATES = "policy_estimates.json"  # of a run that has ended, by `experiments.trained`


@dataclasses.dataclass(frozen=True)
class Settings(logged.Settings, common.Chunk, common.Returns):
    """Everything about a run that is not the agent's own."""

    agent: str = "iql"  # arsq bc cql cqn deas dqn edac fql ifql iql rebrac sac sac_n td3 td3_bc, or my.agent
    normalize_observations: bool = False  # standardise observations by the dataset's mean and deviation
    reward_scale: str = "1"  # factor on rewards; return_range divides by the range of returns over 1000 (IQL)
    reward_shift: float = 0.0  # added to every reward after scaling; -1 is usual for antmaze
    clip_rewards: bool = False  # clip scaled rewards to [-1, 1]: OGBench's become sparse, -1 until the end
    robust: str = ""  # robust targets: divergence in which the dynamics may shift: tv, kl or chi2; empty: off
    robust_scale: float = 1.0  # lambda of --robust, the weight of the divergence: lower is more robust
    robust_updates: int = 10_000  # updates of the dynamics ensemble that --robust makes targets from
    policy_estimates: int = 0  # updates of fitted Q-evaluation after each epoch: discounted returns; 0: none


def run(settings: Settings, config: Any, sweep: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Trains, evaluates and reports one run; returns what result.json holds.

    Args:
      settings: the run.
      config: the agent's hyper-parameters.
      sweep: {float field of config: values}, all of one length V: trained together, ``settings.seeds`` seeds
        for each. Scores are then in the order of the variants, V * seeds in all.

    A run that is finished is left as it is, and its result is returned.

    Raises:
      ValueError: settings that cannot be run; the message names the flag.
      checkpoint.CheckpointError: the run folder holds another run.
      train.Diverged: a metric stopped being finite; the last checkpoint is of the epoch before.
      train.Interrupted: Ctrl-C or SIGTERM, after a checkpoint.
    """
    check(settings)
    checks.environment(settings)
    sweep = logged.floats(sweep)
    check_sweep(settings, sweep)
    checks.schedules(config, settings.updates)
    checks.terminations(settings, config)
    variants = logged.variants(config, sweep)
    task = problem(settings, variants)
    checks.fit_early(settings, task.loaded, task.loaded.environment)
    batches = common.rows(settings, config, task.dataset)
    with checks.named("--validation, held-out episodes: "):
        held_out = common.rows(settings, config, task.validation)
    if settings.chunk > 1 or settings.n_step > 1:  # `problem` has looked at single steps
        for variant in variants:
            agents.check_data(settings.agent, variant, _as_drawn(settings, batches))
    mesh = shard.mesh(settings.mesh_seed, settings.mesh_data)
    checks.mesh(settings.batch_size, mesh, settings.seeds * len(variants))
    checks.split_data(settings, mesh)
    world = blank_dynamics(settings, task)
    population, run_keys = learners(settings, config, sweep, task, mesh, world)
    this = _run(settings, config, sweep, task, mesh)
    common.check(this)
    example = common.source(settings, config, 2)(batches, jax.random.key(0), 0)  # shapes alone
    state = shard.place_state(jax.jit(population.init)(run_keys, example), mesh)
    start = lifecycle.begin(this, {"state": state, "dynamics": world})
    if start.result is not None:
        return start.result
    if shard.is_main():
        _print_notes(settings, config, task)
    fitting = bool(settings.robust) and not start.resumed
    prepare = functools.partial(fit_dynamics, settings, task) if fitting else None
    with (
        # Of policies, which the model of the dynamics is no part of.
        scorer(settings, task, population, len(run_keys), mesh) as score,
        lifecycle.session(this, start, prepare) as session,
    ):
        if settings.robust:
            world = session.prepared if fitting else start.tree["dynamics"]
            population, _ = learners(settings, config, sweep, task, mesh, world)
        estimate = estimates(settings, task, population, common.discount(config), run_keys, mesh)
        validate = logged.validator(
            settings,
            held_out,
            lambda chosen, wrap: learners(chosen, config, sweep, task, mesh, world, wrap),
            mesh,
            getattr(config, "policy_delay", 1),
        )
        logged.loop(
            settings,
            session,
            start,
            population,
            batches,
            run_keys,
            mesh,
            score,
            lambda state: estimate(state) | validate(state),
            dynamics=world,
        )
        return session.finish(
            source=task.loaded.source,
            transitions=replay.size(task.dataset),
            note=task.loaded.note,
        )


def _run(
    settings: Settings, config: Any, sweep: Mapping[str, list[float]], task: Problem, mesh: jax.sharding.Mesh
) -> run_folder.Run:
    """The run folder, and what its checkpoints must agree on."""
    return common.run(
        settings,
        config,
        settings.updates,
        task=common.dataset_name(settings.dataset),
        identity=IDENTITY,
        card={
            "sweep": sweep,
            "digest": task.loaded.digest,
            "support": task.support,
            # The number of parts, which draws depend on; None is what earlier checkpoints say.
            "split_data": mesh.shape["data"] if settings.split_data else None,
        },
        about={
            "transform": transform.to_json(task.transform),
            "terminates": replay.terminates(task.dataset),
            "preset": presets.stored("offline", settings, config, "dataset"),
            **task.loaded.spec._asdict(),
            "reference": task.loaded.reference,
            "environment": task.loaded.environment,
        },
        alike={"held_out": replay.size(task.validation) if task.validation else 0},
        variants=logged.parameters(sweep),
        leaves=(ESTIMATES,),
    )


def _print_notes(settings: Settings, config: Any, task: Problem) -> None:
    """Prints what there is to know before training begins, of the data and of flags that do nothing."""
    print(f"data: {replay.size(task.dataset):,} transitions of {settings.dataset}", file=sys.stderr)
    notes.show_note(settings, task.loaded)
    notes.note_negated_rewards(settings)
    notes.note_n_step(settings, config, task.loaded.spec)
    notes.note_unused_by_agent("offline", settings, config, "dataset", task.loaded.spec)
    notes.note_unused(settings, "robust", "robust_scale", "robust_updates")
    if settings.robust and _rule(settings, task) is None:
        print(
            "note: no rule is known for where episodes of this task end, so that the adversary of --robust cannot "
            "end one (rl.dynamics.termination)",
            file=sys.stderr,
        )


def _as_drawn(settings: Settings, batches: Any) -> Transition:
    """The steps from which batches start, as batches have them, but for their single actions.

    Those of ``--td_lambda`` are single steps. Images are `images.Rows`: copies may be as large as the data.
    """
    if settings.chunk == 1:
        return batches.transitions
    steps, starts = batches.steps, batches.starts
    return jax.tree.map(lambda x: images.Rows(x, starts) if x.ndim >= 4 else x[starts], steps)


def problem(settings: Settings, configs: Sequence[Any]) -> Problem:
    """The data, as the flags say that the agents see them, with a support that is wide enough for all of them."""

    def target_range(config: Any, spec: Spec, low: float, high: float) -> tuple[float, float]:
        low, high = agents.target_range(settings.agent, config, spec, low, high)
        if not settings.robust:
            return low, high
        proposals = ensemble.Config().elites + 1
        return robust.target_range(settings.robust, settings.robust_scale, proposals, low, high)

    task = common.problem(
        settings,
        configs,
        target_range,
        common.reward_scale(settings.reward_scale),
        settings.reward_shift,
        clip_rewards=settings.clip_rewards,
        normalize_observations=settings.normalize_observations,
        validation=settings.validation,
        begun=common.folder(settings, common.dataset_name(settings.dataset)),
        ends=lambda loaded: (
            bool(settings.robust)
            and termination.known(loaded.environment, settings.dataset) not in (None, termination.never)
        ),
        adversary=bool(settings.robust),
    )
    for config in configs:
        agents.check_data(settings.agent, config, task.dataset.transitions)
    if settings.policy_estimates and replay.is_shuffled(task.dataset):
        raise ValueError(
            f"--policy_estimates={settings.policy_estimates} estimates the value of the first states of episodes, and "
            "the log holds single transitions in no order: leave it out"
        )
    return task


def check(settings: Settings) -> None:
    """Raises ValueError, naming the flag, on numbers that no run can have."""
    logged.check(settings)
    checks.head_of_values(settings, agents.get(settings.agent))
    checks.chunk(settings)
    checks.several_steps(settings)
    checks.not_negative(settings, "policy_estimates")
    common.reward_scale(settings.reward_scale)
    checks.number("reward_shift", str(settings.reward_shift))
    for name, usual in (("chunk", 1), ("robust", "")):
        if settings.n_step > 1 and getattr(settings, name) != usual:
            raise ValueError(
                f"--n_step={settings.n_step} and --{name}={getattr(settings, name)} cannot be combined: leave --n_step "
                f"out, or give --{name}={usual}"
            )
    for name in ("robust", "policy_estimates"):
        if settings.chunk > 1 and getattr(settings, name):
            raise ValueError(
                f"--{name}={getattr(settings, name)} and --chunk={settings.chunk} cannot be combined: it is of single "
                f"steps; leave --{name} out, or give --chunk=1"
            )
    reasons = {
        "chunk": "the actions of a chunk may lie on two devices",
        "td_lambda": "the steps of a return may lie on two devices",
        "robust": "its model is fitted to all of the log, on one device",
        "policy_estimates": "they are fitted to all of the log, on one device",
    }
    for name, reason in reasons.items() if settings.split_data else ():
        if (value := getattr(settings, name)) != getattr(Settings, name):
            raise ValueError(
                f"--split_data and --{name}={value} cannot be combined: {reason}; leave --split_data out, or give "
                f"--{name}={getattr(Settings, name)}"
            )
    if settings.robust:
        require_choice("robust", settings.robust, REGULARISED, prefix="--")
    if settings.robust and (not settings.robust_scale > 0 or settings.robust_updates < 1):
        raise ValueError(
            f"--robust_scale={settings.robust_scale} and --robust_updates={settings.robust_updates} must be positive"
        )


def check_sweep(settings: Settings, sweep: Mapping[str, Any]) -> None:
    """Raises ValueError if several discounts are swept where one must do.

    Values of policies by several could not be compared, and returns over several steps are made with one.
    """
    if "discount" in sweep and settings.policy_estimates:
        raise ValueError(
            "--policy_estimates compares policies by one discount, and the sweep has several: sweep it without them"
        )
    for name in ("chunk", "n_step"):
        if getattr(settings, name) > 1 and {"discount", "chunk_discount"} & set(sweep):
            raise ValueError(
                f"--{name}={getattr(settings, name)}: returns over several steps are made with one discount, and the "
                "sweep has several: train each as a run of its own"
            )


def blank_dynamics(settings: Settings, task: Problem) -> ensemble.Model | None:
    """The dynamics model before it is fitted, as NumPy arrays; None where nothing needs one."""
    if not settings.robust:
        return None
    return jax.device_get(jax.jit(_ensemble(settings, task).init)(jax.random.key(0)))


def fit_dynamics(settings: Settings, task: Problem) -> ensemble.Model:
    """The model that all seeds share, as they share the data; every host holds the main one's, as NumPy arrays.

    It is saved with every checkpoint, so that a resumed run continues with it bit for bit on any machine.
    """
    key = keys.of(jax.random.key(settings.seed), "dynamics")
    model = _ensemble(settings, task).fit(task.dataset, key)
    return jax.device_get(multihost_utils.broadcast_one_to_all(jax.device_get(model)))


def _ensemble(settings: Settings, task: Problem) -> ensemble.Ensemble:
    return ensemble.make(ensemble.Config(updates=settings.robust_updates), task.loaded.spec)


def _rule(settings: Settings, task: Problem) -> termination.Rule | None:
    """Where next states, as agents see them, end an episode; None where no rule is known for the task."""
    rule, scaling = termination.known(task.loaded.environment, settings.dataset), task.transform
    if rule is None or scaling.mean is None:
        return rule
    return lambda observation: rule(scaling.mean + scaling.deviation * observation)


def learners(
    settings: Settings,
    config: Any,
    sweep: Mapping[str, list[float]],
    task: Problem,
    mesh: jax.sharding.Mesh,
    world: ensemble.Model | None = None,
    wrap: Callable[[Learner], Learner] = lambda learner: learner,
) -> tuple[train.Population, Key]:
    """All variants times all seeds as one population, and their keys; every learner is what ``wrap`` makes of it."""

    def make(config: Any) -> Learner:
        learner = common.learner(
            settings.agent, config, task.loaded.spec, task.head, settings.chunk, settings.replan_every
        )
        if world is None:
            return learner
        propose = _ensemble(settings, task).dynamics.propose
        return robust.make(
            learner,
            lambda observation, action, key: propose(world, observation, action, key)[0],
            settings.robust,
            settings.robust_scale,
            common.discount(config),
            _rule(settings, task),
        )

    return logged.population(
        settings,
        config,
        sweep,
        lambda config: wrap(make(config)),
        common.source(settings, config, settings.batch_size),
        mesh,
    )


def scorer(
    settings: Settings,
    task: Problem,
    population: train.Population,
    count: int,
    mesh: jax.sharding.Mesh,
) -> AbstractContextManager[Callable[[State, int], dict[str, np.ndarray]]]:
    """`logged.scorer` of policies that act on observations as in their data.

    Raises:
      ValueError: the environment does not fit the data.
    """
    actor = acting.observing(population.actor, functools.partial(transform.observations, task.transform))
    return logged.scorer(settings, actor, task.loaded.environment, count, task.loaded, mesh)


def estimator(
    settings: Settings, task: Problem, population: train.Population, discount: float, run_keys: Key
) -> Callable[[State], np.ndarray]:
    """Fitted Q-evaluation as the flags say: a function of the state [V * S, ...] -> estimated values [V * S].

    Raises:
      ValueError: observations that are images or dictionaries.
    """
    fit = fitted_q.Config(discount=discount, updates=settings.policy_estimates)
    estimate = fitted_q.estimator(population.act, task.loaded.spec, task.head, fit)
    dataset = jax.device_put(task.dataset)  # once: each estimate would copy it again
    fit_keys = keys.of(run_keys, "fitted_q")
    return lambda state: np.asarray(estimate(state, dataset, fit_keys))


def estimates(
    settings: Settings,
    task: Problem,
    population: train.Population,
    discount: float,
    run_keys: Key,
    mesh: jax.sharding.Mesh,
) -> Callable[[State], dict[str, np.ndarray]]:
    """A function of the state -> {"eval/fitted_q": [S]}, if they are asked for; all hosts call it, one computes."""
    if not settings.policy_estimates:
        return lambda state: {}
    if not shard.is_main():
        return logged.on_main(None, mesh)
    value = estimator(settings, task, population, discount, run_keys)
    return logged.on_main(lambda state: {"eval/fitted_q": value(state)}, mesh)


PUBLISHED = Settings(preset=presets.PAPER)
"""The defaults of the command line, where published settings stand unless a flag says otherwise."""


def main(_: list[str]) -> None:
    shard.initialize()
    result = run(*presets.from_flags("offline", PUBLISHED, common.config, "dataset"))
    if shard.is_main():
        notes.show(result)


if __name__ == "__main__":
    app.run(flags.reporting(main), flags_parser=flags.parser(PUBLISHED, common.config))
