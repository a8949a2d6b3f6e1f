"""Do our agents make d3rlpy's updates when they are trained? From the same weights, on the same batches, without noise.

    python -m benchmarks.parity_steps --tiers=walker2d-medium-regen-v5

`benchmarks.parity` compares two trainings from their first update on. Once rounding and noise have grown, only their
means can be compared, over few seeds. Here ours are trained for a while (``--updates``). Both libraries then start from
these weights, with target networks equal to them and new optimisers, and make ``--steps`` updates. What differs only
where policies have left the data, values are large or features are dead shows at once: how far the libraries' weights
are from one another, as a share of how far they have moved. Float32 alone gives some 1e-5, and a single weight whose
gradient is rounding some 1e-3, because Adam's first step is as long for a small gradient as for a large one.

TD3+BC and ReBRAC take no noise into their targets here. CQL draws actions in each update, and is left out. What is
adapted in d3rlpy's learners stands in `benchmarks.d3rlpy_peer`. About four minutes for each agent on one core.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import parity, peers
from experiments import checks, studies
from rl import keys, train
from rl.data import recipes
from rl.replay import dataset as replay
from rl.settings import require_at_least_one
from rl.types import Params, State

AGENTS = ("iql", "td3_bc", "rebrac")
NOISY = ("td3_bc", "rebrac")  # of which the noise of targets is a setting
_POINTS = (1, 2, 5, 10, 20)  # steps that are reported, and the last


@dataclasses.dataclass(frozen=True)
class Settings(studies.RowSettings):
    """What can be chosen about the comparison."""

    agents: str = ",".join(AGENTS)  # which, comma-separated
    tiers: str = "hopper-medium-regen-v5,walker2d-medium-regen-v5"  # datasets of locomotion, comma-separated
    updates: int = 10_000  # of ours, before both go on; a multiple of 500
    steps: int = 50  # updates of both
    hidden: tuple[int, ...] = ()  # widths of all layers; none: the published ones
    set: str = ""  # flags of experiments.offline over the published ones, comma-separated: batch_size=64
    seed: int = 0  # of weights and batches
    data_folder: str = ""  # where the tiers lie, if not in their usual folder
    out: str = "results/benchmarks/parity_steps"


def run(settings: Settings) -> dict[str, Any]:
    """Trains what is missing, and writes result.json and the report; returns what result.json holds.

    Raises:
      ValueError: a flag that cannot be used, or d3rlpy is not installed.
    """
    names, tiers = check(settings)
    cells = {(agent, tier): f"{tier}, {agent}" for tier in tiers for agent in names}
    earlier = studies.stored(settings, ("agent", "tier"), words=["set"])
    versions = peers.versions()
    variants = {
        name: studies.Variant(
            functools.partial(compare, of_agent(settings, cell[0]), *cell),
            {
                **studies.chosen(of_agent(settings, cell[0]), "agents", "tiers", "data_folder"),
                "data": parity.data_digest(settings, cell[1]),
                **versions,
            },
        )
        for cell, name in cells.items()
        if cell not in earlier.rows
    }
    rows = [({"agent": agent, "tier": tier}, name) for (agent, tier), name in cells.items()]
    return studies.train_rows(
        settings,
        variants,
        rows,
        report,
        lambda result: (),
        earlier,
        "agents",
        d3rlpy=sorted(map(" ".join, versions.items())),
    )


def check(settings: Settings) -> tuple[list[str], list[str]]:
    """The agents and the tiers. Raises ValueError, naming the flag, on what cannot be compared."""
    if message := peers.missing():
        raise ValueError(f"nothing to compare with: {message}")
    names = studies.names("agents", settings.agents, AGENTS)
    tiers = studies.names("tiers", settings.tiers, recipes.LOCOMOTION)
    require_at_least_one(settings, "updates", "steps", prefix="--")
    if settings.updates % parity.PART:
        raise ValueError(f"--updates={settings.updates} must be a multiple of {parity.PART}")
    from benchmarks import d3rlpy_peer as peer

    for agent in names:
        for tier in tiers:
            peer.check(agent, parity.resolved(of_parity(of_agent(settings, agent)), agent, tier)[1])
    checks.not_negative(settings, "seed")
    return names, tiers


def of_agent(settings: Settings, agent: str) -> Settings:
    """The settings with targets without noise, where the agent has one."""
    without_noise = "agent.policy_noise=0.0"
    words = [word for word in (settings.set, without_noise if agent in NOISY else "") if word]
    return dataclasses.replace(settings, set=",".join(words))


def of_parity(settings: Settings) -> parity.Settings:
    """Those of the comparison from the first update on, whose functions make agents and batches here, too."""
    return parity.Settings(
        agents="",
        tiers="",
        out="",
        seeds=2,
        updates=settings.updates,
        eval_every=settings.updates,
        hidden=settings.hidden,
        set=settings.set,
        data_folder=settings.data_folder,
    )


def compare(settings: Settings, agent: str, tier: str, work: studies.Work) -> dict[str, Any]:
    """How far the libraries are apart after some updates from the weights of ours, as a share of how far ours moved.

    Returns:
      ``steps`` [P], ``apart`` {network: [P]}, and ``losses``, the largest share by which a loss differs.
    """
    from benchmarks import d3rlpy_peer as peer

    of = parity.subject(of_parity(settings), agent, tier)
    run_keys = keys.seeds(jax.random.key(settings.seed), 1)
    state = jax.jit(of.population.init)(run_keys, replay.sampler(2)(of.rows, jax.random.key(0), 0))
    for _ in range(parity.PARTS):
        state, outcome = of.epoch(state, of.rows, run_keys)
        train.check_finite(outcome)
    start = jax.device_get(train.member(state, 0).params)
    ours = restarted(of, start)
    theirs = peer.learner(agent, of.config, of.problem.loaded.spec, of.settings.batch_size, settings.seed)
    peer.load(theirs, start)
    update = jax.jit(of.learner.update)
    steps = sorted({*(point for point in _POINTS if point < settings.steps), settings.steps})
    apart: dict[str, list[float]] = {name: [] for name in start if not name.startswith("log_")}
    batches = [
        jax.device_get(of.draw(of.rows, run_keys[0], settings.updates + first))
        for first in range(0, settings.steps, parity.DRAWN)
    ]
    largest = 0.0
    for step in range(settings.steps):
        batch = jax.tree.map(lambda x, i=step % parity.DRAWN: x[i], batches[step // parity.DRAWN])
        ours, metrics = update(ours, batch, jax.random.key(step))
        for name, loss in peer.update(theirs, agent, of.config, batch).items():
            # Ours is scaled where the policy does not move in every update (`rl.agents.state.delayed`).
            scale = 1 if name == "critic_loss" else getattr(of.config, "policy_delay", 1)
            largest = max(largest, abs(float(metrics[name]) / scale / loss - 1))
        if step + 1 in steps:
            weights, now = peer.weights(theirs, start), jax.device_get(ours.params)
            for name, shares in apart.items():
                moved = distance(now[name], start[name])
                shares.append(distance(weights[name], now[name]) / moved if moved else 0.0)
    work.progress(1)
    return {"steps": steps, "apart": apart, "losses": largest}


def restarted(of: parity.Subject, params: Params) -> State:
    """The state of an agent of these parameters that has not made an update: targets are equal to them."""
    example = replay.take(of.rows, np.arange(2))
    fresh = jax.jit(of.learner.init)(jax.random.key(0), example)
    return fresh._replace(
        params=params, target={name: params[name] for name in fresh.target}, step=jnp.zeros_like(fresh.step)
    )


def distance(one: Params, other: Params) -> float:
    """The Euclidean distance between two networks' weights."""
    squares = jax.tree.map(lambda x, y: np.square(np.subtract(x, y, dtype=np.float64)).sum(), one, other)
    return float(np.sqrt(sum(jax.tree.leaves(squares))))


def report(result: Mapping[str, Any]) -> Iterator[str]:
    """The blocks of Markdown on a result."""
    settings = result["settings"]
    yield "# The same updates as d3rlpy, from a trained agent on"
    trained = f"{settings['updates']:,} updates"
    yield (
        f"{studies.origin(result)} {' and '.join(result['d3rlpy'])}. Ours were trained for {trained}. Both then start "
        "from these weights. The table shows the distance between the libraries' weights, as a share of how far ours "
        "have moved since."
    )
    if not result["rows"]:
        yield "Nothing is finished yet."
        return
    steps = result["rows"][0]["steps"]
    yield studies.table(
        (
            "agent",
            "tier",
            "network",
            *(f"{step} updates" if step > 1 else "1 update" for step in steps),
            "losses",
        ),
        [
            (f"`{row['agent']}`", row["tier"], name, *(f"{x:.0e}" for x in shares), f"{row['losses']:.0e}")
            for row in result["rows"]
            for name, shares in row["apart"].items()
        ],
    )
    yield "*losses*: the largest share by which a loss of one of these updates differs."


if __name__ == "__main__":
    studies.main(Settings(), run)
