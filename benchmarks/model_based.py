"""How fast is model-based training, offline and online, beside the same in PyTorch and beside its matrix products?

    python -m benchmarks.model_based

An epoch is 50,000 rollouts of 5 steps in an ensemble of seven networks and 1,000 updates of RAVL (batch 256, ten
critics) on halfcheetah's sizes; ``fit`` is an epoch of the ensemble's own training: one pass over the training rows of
a log of 1,024,000 in batches of 256, and a check on the fifth that is held out. Of the online loop (`rl.mbpo`, MBPO, in
HalfCheetah, two critics): ``steps`` is 250 steps of the environment with 20 updates each, as `experiments.mbpo` makes
them; ``updates`` these updates alone, of batches from either ring; and ``retraining`` is what comes between two such
periods, a fit of 20 epochs on 5,000 steps and 100,000 rollouts of one step. Three programs do each, in rounds:

  ours      as the library trains: one compiled call
  products  the matrix products of it and nothing else: the limit
  torch     `benchmarks.model_based_peer`: one update per Python step, indices drawn on the host, where torch is there

Only --part of the work is timed (rollouts, updates, and rows to fit alike), except of a retraining, and the table gives
whole ones. It also says how often our programs were compiled in the timed rounds, which is never: after a retraining
nothing is compiled again. Several seeds are one program for ours, and one after another for torch. Nothing else should
run meanwhile.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import re
import statistics
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import app
from tqdm.auto import tqdm

from benchmarks import cases, products, table, timing
from experiments import flags, interaction, studies
from experiments import mbpo as online
from rl import envs, log, mbpo, model_based, train
from rl import online as examples
from rl.agents import sac, sac_n
from rl.dynamics import ensemble, loss, rollout, termination
from rl.dynamics import fit as fitting
from rl.dynamics import rows as learnable
from rl.interaction import Trainer
from rl.replay import dataset as replay
from rl.values import heads

EPOCH_UPDATES, EPOCH_ROLLOUTS, LENGTH = 1000, 50_000, 5
FIT_BLOCKS, BLOCK = 200, 5120  # of rows to fit: 16 batches, and 1024 rows that are held out
STEPS, UPDATES_PER_STEP = 250, 20  # between two retrainings
SHARE = 0.95  # of batches that are the model's
PEER_BATCH = 256  # rows of an update in PyTorch
ENVIRONMENT = "HalfCheetah-v5"  # of the sizes of `cases.SPEC`
# What there is of each work in a second
UNITS = {"epoch": (1, "epochs"), "fit": (1, "fits"), "retraining": (1, "retrainings")}
UNITS |= {"steps": (STEPS, "steps"), "updates": (STEPS * UPDATES_PER_STEP, "updates")}
WHOLE = ("retraining",)  # of which no part is timed: what a fit begins with does not shrink with the rest


@dataclasses.dataclass(frozen=True)
class Settings:
    """What to measure."""

    critics: int = 10  # N
    diversity: float = 1.0  # eta
    seeds: tuple[int, ...] = (1,)  # trained at once; each number is a block of the table
    part: float = 0.02  # of the work that is timed, a multiple of 0.005
    transitions: int = 100_000  # logged rows that updates draw from
    steps: int = 5_000  # of the environment that a retraining learns from
    fit_epochs: int = 20  # of its fit
    rollouts: int = 100_000  # that follow it
    repeats: int = 3  # timed rounds
    out: str = ""  # JSON file; by default results/benchmarks/model_based-HARDWARE.json
    no_torch: bool = False  # leave PyTorch out even where it is installed


Programs = dict[str, Callable[[], Any]]


def run(settings: Settings) -> dict[str, Any]:
    """Measures, writes and returns the results.

    Raises:
      ValueError: a part that is no share, nothing to time, or fewer rows than a batch of PyTorch's.
    """
    if not 0 < settings.part <= 1 or min(settings.seeds, default=0) < 1 or settings.repeats < 1:
        raise ValueError("--part must be in (0, 1], --seeds and --repeats at least 1")
    results: dict[str, Any] = {**log.provenance(), "settings": dataclasses.asdict(settings), "rows": []}
    results["torch"] = _torch_version() if not settings.no_torch else None
    few = min(settings.transitions, settings.steps, settings.rollouts) < PEER_BATCH
    if results["torch"] and (few or _scaled(EPOCH_ROLLOUTS, settings) * LENGTH < PEER_BATCH):
        raise ValueError(
            f"PyTorch draws {PEER_BATCH} different rows for a batch: give --transitions, --steps and --rollouts of at "
            f"least {PEER_BATCH} and a --part of at least 0.002, or --no_torch"
        )
    path = table.place(settings.out, "model_based", results)
    torch = {epoch: _torch_epoch, fit: _torch_fit, steps: _torch_steps, updates: _torch_updates}
    torch |= {retraining: _torch_retraining}
    blocks = [(work, seeds) for seeds in settings.seeds for work in torch]
    with log.progress(len(blocks) * (1 + settings.repeats), "benchmark") as bar:
        for work, seeds in blocks:
            programs = work(settings, seeds)
            if results["torch"] and seeds == settings.seeds[0]:
                programs["torch"] = torch[work](settings)
            part = 1.0 if work.__name__ in WHOLE else settings.part
            row = {"work": work.__name__, "seeds": seeds, **_measure(programs, settings, part, bar.update)}
            results["rows"].append(row)
            table.write(path, results, render(results))
    return results


def _measure(
    programs: Programs, settings: Settings, part: float, finished: Callable[[int], Any]
) -> dict[str, Any]:
    """{program: seconds of every round, of the whole work}; a first round warms up. And what was compiled after it."""
    compiled: dict[str, list[str]] = {name: [] for name in programs}

    def noting(name: str) -> None:
        with compilations() as names:
            programs[name]()
        compiled[name] += names

    def after(number: int, _: timing.Seconds) -> None:
        if not number:
            compiled["ours"].clear()
        finished(1)

    measured = timing.measure([functools.partial(noting, name) for name in programs], settings.repeats, after)
    seconds = {name: [x / part for x in times] for name, times in zip(programs, measured, strict=True)}
    return {**seconds, "compilations": len(compiled["ours"])}


@contextlib.contextmanager
def compilations() -> Iterator[list[str]]:
    """The names of the functions that JAX compiles meanwhile, in their order."""
    names: list[str] = []

    class Collect(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            match = re.match(r"Compiling (?:jit\()?([\w<>]+)", record.getMessage())
            names.extend(match.groups() if match else ())

    logger, collect = logging.getLogger("jax"), Collect()
    handlers, propagates = logger.handlers, logger.propagate
    logger.handlers, logger.propagate = [collect], False
    try:
        with jax.log_compiles():
            yield names
    finally:
        logger.handlers, logger.propagate = handlers, propagates


def _scaled(whole: int, settings: Settings) -> int:
    return max(1, round(whole * settings.part))


# ---- ours, and the products in it ---------------------------------------------------------------------------


def epoch(settings: Settings, seeds: int) -> Programs:
    """Rollouts, insertion and updates."""
    config = sac_n.Config(critics=settings.critics, diversity=settings.diversity)
    learner = sac_n.make(config, cases.SPEC, heads.scalar())
    network = ensemble.make(ensemble.Config(), cases.SPEC)
    dynamics = network.dynamics
    loop_config = model_based.Config(
        rollouts=_scaled(EPOCH_ROLLOUTS, settings), length=LENGTH, updates=_scaled(EPOCH_UPDATES, settings)
    )
    loop = model_based.make(loop_config, learner, dynamics, termination.never)
    dataset = jax.device_put(cases.synthetic(settings.transitions))
    keys = jax.random.split(jax.random.key(0), seeds)
    source = model_based.Inputs(dataset, jax.jit(jax.vmap(network.init))(keys))
    step = jax.jit(
        model_based.over_seeds(loop.epoch, batched=jax.default_backend() != "cpu"), donate_argnums=0
    )
    carry = jax.jit(jax.vmap(loop.init, (0, None), model_based.STACKED))(keys, dataset)

    def ours() -> None:
        nonlocal carry
        carry, _ = jax.block_until_ready(step(carry, source, keys))

    batch = replay.take(dataset, jnp.arange(loop_config.batch_size))
    state = jax.eval_shape(learner.init, keys[0], batch)
    model = jax.eval_shape(network.init, keys[0])
    starts = jax.ShapeDtypeStruct((loop_config.rollouts, *cases.SPEC.observation_shape), np.float32)

    def roll(state: Any, model: Any, observation: Any, key: Any) -> Any:
        act = lambda observation, key: learner.explore(state, observation, key)  # type: ignore[misc]
        return rollout.roll(dynamics, termination.never, act, 1, model, observation, key)

    update = products.find(learner.update, state, batch, keys[0])
    one_step = products.find(roll, state, model, starts, keys[0])
    parts = [_limit(update, loop_config.updates * seeds), _limit(one_step, LENGTH * seeds)]
    return {"ours": ours, "products": lambda: [part() for part in parts]}


def fit(settings: Settings, seeds: int) -> Programs:
    """One pass of the ensemble's networks over their own training rows, and a check on the held-out ones."""
    config = ensemble.Config()
    steps = cases.synthetic(_scaled(FIT_BLOCKS, settings) * BLOCK).transitions
    programs = fitting.programs(config, cases.SPEC)
    columns = steps.observation, steps.action, steps.reward, steps.discount, steps.next_observation
    data = programs.prepare(*columns, np.int32(len(steps.reward)))
    sizes = learnable.sizes(config, data)
    keys = jax.random.split(jax.random.key(0), seeds)
    state, sample, keys = programs.begin(programs.init(keys), data, sizes, (), keys)

    def ours() -> None:
        nonlocal state
        state = jax.block_until_ready(programs.advance(state, data, sample, sizes, (), keys))

    parts = _fit_limit(config, data.rows, sizes, seeds)
    return {"ours": ours, "products": lambda: [part() for part in parts]}


# ---- online -------------------------------------------------------------------------------------------------


@functools.lru_cache(1)
def _trainer(settings: Settings, seeds: int) -> tuple[Trainer, mbpo.Loop]:
    """MBPO in the environment, after as many random steps as a retraining learns from, a retraining and one step."""
    config = sac.Config(hidden=(256, 256, 256))
    chosen = online.Settings(
        env=ENVIRONMENT,
        env_processes=0,
        seeds=seeds,
        utd=float(UPDATES_PER_STEP),
        learning_starts=settings.steps,
        replay=2 * settings.steps,
        model_share=str(SHARE),
        rollout_length="1",
        rollouts=settings.rollouts,
        model_replay=4 * settings.rollouts,
        model_batch_size=256,
        model_max_epochs=settings.fit_epochs,
        model_patience=settings.fit_epochs,  # all of them
        retrain_every=10**9,  # not while steps are timed
    )
    stream = interaction.stepper(chosen)
    loop = online.make_loop(chosen, config, stream.spec, termination.of_environment(ENVIRONMENT))
    trainer = online.make_trainer(chosen, stream, loop)
    trainer.start(None)
    trainer.advance(settings.steps + 1, tqdm(disable=True), [])
    return trainer, loop


def steps(settings: Settings, seeds: int) -> Programs:
    """Steps of the environment, and the updates that come with them."""
    trainer, loop = _trainer(settings, seeds)
    count = _scaled(STEPS, settings)

    def ours() -> None:
        trainer.advance(trainer.step + count, tqdm(disable=True), [])
        jax.block_until_ready(trainer.carry.state)

    return {"ours": ours, "products": _update_limit(trainer, loop, count * UPDATES_PER_STEP)}


def updates(settings: Settings, seeds: int) -> Programs:
    """Updates alone."""
    trainer, loop = _trainer(settings, seeds)
    count = _scaled(STEPS, settings) * UPDATES_PER_STEP
    axes = loop.replay.axes
    learn = jax.jit(
        jax.vmap(loop.replay.learn(count), (train.STACKED, axes, None, None, 0), (train.STACKED, None, 0))
    )
    run_keys = jax.random.split(jax.random.key(0), seeds)

    def ours() -> None:
        jax.block_until_ready(learn(trainer.carry.state, trainer.carry.memory, None, None, run_keys))

    return {"ours": ours, "products": _update_limit(trainer, loop, count)}


def retraining(settings: Settings, seeds: int) -> Programs:
    """A fit that goes on from the last, and rollouts."""
    trainer, loop = _trainer(settings, seeds)
    config = online.model_config(
        online.Settings(
            model_batch_size=256, model_max_epochs=settings.fit_epochs, model_patience=settings.fit_epochs
        )
    )

    def ours() -> None:
        trainer.carry, _ = loop.retraining.run(trainer.carry, settings.steps + 10**9)
        jax.block_until_ready(trainer.carry.memory)

    memory = jax.tree.map(lambda x: x[0], trainer.carry.memory._replace(environment=(), newest=()))
    state = train.member(trainer.carry.state, 0)
    rows = jax.tree.map(lambda x: x[0, : settings.steps], trainer.carry.memory.environment.rows)
    network = ensemble.make(config, cases.SPEC)
    observation, action, reward, discount, after = rows[:5]
    filled = jnp.int32(settings.steps)
    data = learnable.prepare(cases.SPEC, observation, action, reward, discount, after, filled)
    parts = _fit_limit(config, data.rows, learnable.sizes(config, data), seeds * settings.fit_epochs)
    starts = jnp.zeros((settings.rollouts, *cases.SPEC.observation_shape))
    explore = loop.learner.explore or loop.learner.act
    act = lambda observation, key: explore(state, observation, key)
    step = rollout.step(network.dynamics, termination.never, act)
    ongoing = rollout.RolloutState(starts, jnp.ones(len(starts), bool))
    parts.append(_limit(products.find(step, memory.model, ongoing, jax.random.key(0)), seeds))
    return {"ours": ours, "products": lambda: [part() for part in parts]}


def _update_limit(trainer: Trainer, loop: mbpo.Loop, count: int) -> Callable[[], Any]:
    """The products of this many updates of every seed."""
    state = train.member(trainer.carry.state, 0)._replace(step=jnp.zeros((), jnp.int32))
    batch = jax.tree.map(
        lambda x: jnp.zeros((256, *x.shape[1:]), x.dtype), examples.example(cases.SPEC)
    )._replace(origin=jnp.ones(256, jnp.int32))
    matmuls = products.find(loop.learner.update, state, batch, jax.random.key(0))
    return _limit(matmuls, count * trainer.carry.first.shape[0])


# ---- limits -------------------------------------------------------------------------------------------------


def _fit_limit(
    config: ensemble.Config, rows: learnable.Rows, sizes: learnable.Sizes, seeds: int
) -> list[Callable[[], Any]]:
    """The products of the updates, and those of the check."""
    model = jax.eval_shape(ensemble.make(config, cases.SPEC).init, jax.random.key(0))
    params = {"members": model.members, "bounds": model.bounds}

    def batch(*shape: int) -> learnable.Rows:
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct((*shape, *x.shape[1:]), x.dtype), rows)

    def update(params: Any, batch: Any) -> Any:
        return jax.grad(loss.objective, 2)(config, loss.LIKELIHOOD, params, batch, (), jax.random.key(0))

    def check(params: Any, batch: Any) -> Any:
        return loss.judged(loss.LIKELIHOOD, params, batch, (), jax.random.key(0))

    chunk = learnable.chunk_rows(config, len(rows.inputs))
    return [
        _limit(
            products.find(update, params, batch(config.members, config.batch_size)),
            int(sizes.updates) * seeds,
        ),
        _limit(products.find(check, params, batch(chunk)), int(sizes.chunks) * seeds),
    ]


def _limit(matmuls: list[products.Product], steps: int) -> Callable[[], Any]:
    operands = products.operands(matmuls, jax.random.key(0))
    program = jax.jit(products.program(matmuls, steps))
    return lambda: jax.block_until_ready(program(operands))


# ---- PyTorch ------------------------------------------------------------------------------------------------


def _torch_version() -> str | None:
    try:
        import torch
    except ImportError:
        return None
    return str(torch.__version__)


def _torch_epoch(settings: Settings) -> Callable[[], Any]:
    import torch

    from benchmarks import model_based_peer as peer

    device = "cuda" if torch.cuda.is_available() else "cpu"
    rollouts, updates = _scaled(EPOCH_ROLLOUTS, settings), _scaled(EPOCH_UPDATES, settings)
    agent = peer.Agent(cases.SPEC, settings.critics, settings.diversity, 256, device)
    model = peer.Model(cases.SPEC, device)
    logged = peer.Buffer(cases.SPEC, settings.transitions, device)
    steps = cases.synthetic(settings.transitions).transitions
    tensor = lambda x: torch.as_tensor(np.asarray(x), device=device)
    rewards = tensor(steps.reward)[:, None]
    observation, action, following = map(tensor, (steps.observation, steps.action, steps.next_observation))
    logged.add(observation, action, rewards, following, torch.zeros_like(rewards))
    imagined = peer.Buffer(cases.SPEC, rollouts * LENGTH * 5, device)

    def call() -> None:
        peer.rollouts(agent, model, imagined, logged.sample(rollouts)[0], LENGTH)
        peer.updates(agent, logged, imagined, updates, PEER_BATCH, 0.05)
        if device == "cuda":
            torch.cuda.synchronize()

    return call


def _torch_fit(settings: Settings) -> Callable[[], Any]:
    import torch

    from benchmarks import model_based_peer as peer

    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = peer.Model(cases.SPEC, device)
    rng = np.random.default_rng(0)
    rows = _scaled(FIT_BLOCKS, settings) * BLOCK
    held = rows // 5
    draw = lambda *shape: torch.as_tensor(rng.standard_normal(shape, np.float32), device=device)
    size = cases.SPEC.observation_shape[0]
    widths = size + cases.SPEC.action_size, size + 1
    # Each network's bootstrap sample is a copy of the training rows, as in the published code.
    inputs, outputs = (draw(7, rows - held, width) for width in widths)
    holdout = [draw(held, width) for width in widths]

    def call() -> None:
        for chosen in rng.permutation(rows - held).reshape(-1, 256):
            model.update(inputs[:, chosen], outputs[:, chosen])
        model.errors(*holdout)

    return call


def _torch_online(settings: Settings) -> tuple[Any, Any, Any, Any]:
    """Agent, model, steps of the environment, rows of rollouts."""
    import torch

    from benchmarks import model_based_peer as peer

    device = "cuda" if torch.cuda.is_available() else "cpu"
    agent, model = peer.Agent(cases.SPEC, 2, 0.0, 256, device), peer.Model(cases.SPEC, device)
    taken, imagined = (
        peer.Buffer(cases.SPEC, size, device) for size in (2 * settings.steps, 4 * settings.rollouts)
    )
    peer.explore(envs.make(ENVIRONMENT, seed=0), taken, settings.steps)
    peer.rollouts(agent, model, imagined, taken.sample(min(settings.rollouts, settings.steps))[0], 1)
    return agent, model, taken, imagined


def _torch_steps(settings: Settings) -> Callable[[], Any]:
    from benchmarks import model_based_peer as peer

    agent, _, taken, imagined = _torch_online(settings)
    env, count = envs.make(ENVIRONMENT, seed=1), _scaled(STEPS, settings)
    return lambda: peer.steps(env, agent, taken, imagined, count, UPDATES_PER_STEP, SHARE)


def _torch_updates(settings: Settings) -> Callable[[], Any]:
    from benchmarks import model_based_peer as peer

    agent, _, taken, imagined = _torch_online(settings)
    count = _scaled(STEPS, settings) * UPDATES_PER_STEP
    return lambda: peer.whole_batches(agent, taken, imagined, count, SHARE)


def _torch_retraining(settings: Settings) -> Callable[[], Any]:
    import torch

    from benchmarks import model_based_peer as peer

    agent, model, taken, imagined = _torch_online(settings)

    def call() -> None:
        peer.refit(model, taken, settings.fit_epochs)
        starts = taken.columns[0][taken.rng.integers(0, taken.count, settings.rollouts)]
        peer.rollouts(agent, model, imagined, starts, 1)
        if torch.cuda.is_available():
            torch.cuda.synchronize()

    return call


# ---- the table ----------------------------------------------------------------------------------------------


def render(results: Mapping[str, Any]) -> str:
    """The table as Markdown, with where it is from."""
    rows = [
        ("work", "seeds", "ours, s", "products, s", "of limit", "torch, s", "x torch", "ours in a second")
    ]
    torch = {row["work"]: statistics.median(row["torch"]) for row in results["rows"] if "torch" in row}
    for row in results["rows"]:
        ours, limit = statistics.median(row["ours"]), statistics.median(row["products"])
        theirs, (count, unit) = torch.get(row["work"]), UNITS[row["work"]]
        rows.append(
            (
                row["work"],
                str(row["seeds"]),
                studies.digits(ours),
                studies.digits(limit),
                f"{limit / ours:.2f}",
                studies.digits(theirs) if theirs else "",
                studies.digits(theirs * row["seeds"] / ours) if theirs else "",
                f"{studies.digits(count * row['seeds'] / ours)} {unit}",
            )
        )
    settings = results["settings"]
    note = (
        f"epoch: {EPOCH_ROLLOUTS:,} rollouts of {LENGTH} steps and {EPOCH_UPDATES:,} updates, N = "
        f"{settings['critics']}, eta = {settings['diversity']:g}; fit: {FIT_BLOCKS * BLOCK * 4 // 5:,} rows once "
        f"through each of seven networks, in batches of 256, and a check on {FIT_BLOCKS * BLOCK // 5:,} more. "
        f"Online, {ENVIRONMENT}, N = 2: steps: {STEPS} of the environment, {UPDATES_PER_STEP} updates each; updates: "
        f"these alone; retraining: {settings['fit_epochs']} epochs on {settings['steps']:,} steps, and "
        f"{settings['rollouts']:,} rollouts of one step. All networks of agents have three layers of 256. "
        f"A share of {settings['part']:g} was timed, and whole retrainings. Our programs were compiled "
        f"{sum(row['compilations'] for row in results['rows'])} times in the timed rounds."
    )
    versions = {"torch": results["torch"]} if results["torch"] else None
    return "\n".join([*table.source(results, versions), "", note, "", *table.aligned(rows)]) + "\n"


def main(_: list[str]) -> None:
    print(render(run(flags.read(Settings()))))


if __name__ == "__main__":
    app.run(flags.reporting(main), flags_parser=flags.parser(Settings()))
