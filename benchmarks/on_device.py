"""Learning in environments that are JAX: steps per second of one compiled program, beside the loop on the host.

    python -m benchmarks.on_device

TD3 on Pendulum and DQN on CartPole, with networks of 64 x 64, batches of 32 and an update after every four steps, for
several numbers of seeds and copies of the environment:

  on the device   `rl.on_device`: acting, learning and the environment are one program
  on the host     `rl.interaction` in gymnasium's version: two compiled calls a step, copies stepped in this process

and what the first is made of, measured alone:

  updates         as many updates of as many seeds in one compiled call, from the same replay: the bound
  environment     steps of the environment with actions drawn uniformly, in one compiled call

A round runs each of them once, and the table holds medians over --repeats rounds. Nothing else should run meanwhile.
The table is printed and stored with every single time in results/benchmarks/on_device-HARDWARE.{json,md}.
"""

from __future__ import annotations

import dataclasses
import itertools
import statistics
from collections.abc import Callable, Mapping
from typing import Any

import jax
from absl import app

from benchmarks import table, timing
from experiments import flags, studies
from rl import agents, buffers, interaction, keys, log, on_device, train
from rl.envs import functional
from rl.envs.stream import Stream
from rl.envs.world import World
from rl.replay import ring
from rl.types import Array, Key
from rl.values import heads

DEVICE, HOST, UPDATES, ENVIRONMENT = "on the device", "on the host", "updates", "environment"
BATCH, RHYTHM, HIDDEN = 32, (1, 4), (64, 64)


@dataclasses.dataclass(frozen=True)
class Settings:
    """What to measure."""

    environments: str = "jax/Pendulum-v1,gymnax/CartPole-v1"  # gymnasium has them by what follows the slash
    seeds: tuple[int, ...] = (1, 8)  # learners at once
    copies: tuple[int, ...] = (1, 64)  # of the environment, for each learner
    head: str = "scalar"  # value representation
    steps: int = 2_000  # steps of every environment per timed call, a multiple of 4
    replay: int = 100_000  # steps that each learner remembers
    repeats: int = 5  # rounds
    host: bool = True  # measure the loop on the host, too, whose copies are stepped one by one
    out: str = ""  # JSON file; by default results/benchmarks/on_device-HARDWARE.json


def run(settings: Settings) -> dict[str, Any]:
    """Measures, writes and returns the results."""
    results: dict[str, Any] = {**log.provenance(), "settings": dataclasses.asdict(settings), "rows": []}
    path = table.place(settings.out, "on_device", results)
    sizes = list(itertools.product(settings.environments.split(","), settings.seeds, settings.copies))
    with log.progress(len(sizes) * (settings.repeats + 1), "rounds") as bar:
        for size in sizes:
            bar.set_postfix_str("{}, {} seeds, {} copies".format(*size))
            calls = cases(settings, *size)
            times = timing.measure(list(calls.values()), settings.repeats, lambda *_: bar.update())
            results["rows"] += [
                dict(zip(("environment", "seeds", "copies", "loop", "seconds"), (*size, *row), strict=True))
                for row in zip(calls, times, strict=True)
            ]
            table.write(path, results, render(results))
    return results


def cases(settings: Settings, environment: str, seeds: int, copies: int) -> dict[str, Callable[[], Any]]:
    """Every loop by its name; a call makes ``settings.steps`` steps of every copy."""
    world = functional.make(environment)
    module = agents.get("dqn" if world.spec.discrete else "td3")
    head = heads.make(settings.head, -2000.0, 500.0, size=51)
    learner = module.make(module.Config(hidden=HIDDEN), world.spec, head)
    replay = buffers.uniform(learner, buffers.steps(environments=copies), settings.replay, BATCH)
    run_keys = keys.seeds(jax.random.key(0), seeds)
    first: dict[str, Any] = {"rhythm": RHYTHM, "learning_starts": BATCH, "random": BATCH}
    here: Any = on_device.Trainer(world, learner, replay, run_keys, **first)
    trainers = {DEVICE: here}
    if settings.host:
        names = [(seed, number) for seed in range(seeds) for number in range(copies)]
        stream = Stream(environment.partition("/")[2], names, 0)
        trainers[HOST] = interaction.Trainer(stream, learner, replay, run_keys, **first)
    loops = {}
    for name, trainer in trainers.items():
        trainer.start()
        # What is timed learns from its first step on, and the replay has a batch for the updates alone.
        trainer.advance(max(settings.steps, -(-BATCH // copies)) * copies)
        loops[name] = lambda trainer=trainer: trainer.advance(trainer.step + settings.steps * copies)
    # Copies, since the loop goes on writing into its own.
    state, memory = jax.tree.map(lambda x: x.copy(), (here.carry.state, here.carry.memory))
    epoch = train.scan_updates(learner.update, ring.sampler(BATCH), settings.steps // RHYTHM[1])
    updates = jax.jit(jax.vmap(epoch, (train.STACKED, ring.STACKED, 0), (train.STACKED, 0)))
    play, begun = walk(world, settings.steps, seeds * copies)
    return {
        **loops,
        UPDATES: lambda: jax.block_until_ready(updates(state, memory, run_keys)),
        ENVIRONMENT: lambda: jax.block_until_ready(play(begun, jax.random.key(0))),
    }


def walk(world: World, steps: int, count: int) -> tuple[Callable[[Any, Key], Array], Any]:
    """A compiled random walk of ``count`` copies, (their states, key) -> rewards, and states to start it from."""
    spec = world.spec

    def draw(key: Key) -> Array:
        if spec.discrete:
            return jax.random.randint(key, (count,), 0, spec.action_size)
        return jax.random.uniform(key, (count, spec.action_size), minval=-1.0, maxval=1.0)

    def step(state: Any, key: Key) -> tuple[Any, Array]:
        outcome = world.step(jax.random.split(key, count), state, draw(key))
        return outcome.state, outcome.reward.sum()

    play = jax.jit(lambda state, key: jax.lax.scan(step, state, jax.random.split(key, steps))[1])
    return play, world.reset(jax.random.split(jax.random.key(0), count))[1]


def render(results: Mapping[str, Any]) -> str:
    """The table as Markdown, with where it is from."""
    steps = results["settings"]["steps"]
    size = lambda row: (row["environment"], row["seeds"], row["copies"])
    medians = {(*size(row), row["loop"]): statistics.median(row["seconds"]) for row in results["rows"]}
    cells = [("environment", "seeds", "copies", "loop", "steps/s", "updates/s", f"x {HOST}", "of its parts")]
    for (environment, seeds, copies, loop), seconds in medians.items():
        of = {name: x for (*where, name), x in medians.items() if where == [environment, seeds, copies]}
        parts = (of[UPDATES] + of[ENVIRONMENT]) / seconds
        cells.append(
            (
                *(environment, str(seeds), str(copies), loop),
                studies.digits(steps * seeds * copies / seconds) if loop != UPDATES else "",
                studies.digits(steps * seeds / RHYTHM[1] / seconds) if loop != ENVIRONMENT else "",
                studies.digits(of[HOST] / seconds) if loop == DEVICE and HOST in of else "",
                studies.digits(parts) if loop == DEVICE else "",
            )
        )
    about = (
        "Steps and updates are those of all seeds together. *Of its parts*: the time that updates and environment take "
        "alone, divided by that of the loop."
    )
    return "\n".join([*table.source(results), "", *table.aligned(cells, texts={0, 3}), "", about]) + "\n"


def main(_: list[str]) -> None:
    print(render(run(flags.read(Settings()))))


if __name__ == "__main__":
    app.run(flags.reporting(main), flags_parser=flags.parser(Settings()))
