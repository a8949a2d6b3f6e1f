"""How fast do goal-conditioned agents train here, how far is that from the limit, and how fast are they evaluated?

    python -m benchmarks.goals

OGBench's six agents and HECRL with their own sizes (HECRL on sets of four entities), batches of 256 and 1024, one seed
and eight at once, in two loops of `benchmarks.offline`, beside the matrix products of their updates, the limit:

  scan      as the library trains: goals are drawn, and many updates made, in one compiled call, data on the device
  host      one compiled update per Python call, on batches whose goals NumPy draws: the loop of OGBench's own code

Peak memory tells whether an episode was gathered: with a million steps and batches of 1024 it is the data's and the
networks'. Below the table stand how long HECRL's diffusion draws 256 candidates for a subgoal and how long it takes to
plan with them, and the steps per second of an evaluation, of an untrained policy, workers included.

Nothing else should run meanwhile. benchmarks/README.md explains the table.

Examples:

  Everything, on a CPU (half an hour):  python -m benchmarks.goals
  Everything, on a GPU (minutes):       python -m benchmarks.goals --updates=200 --repeats=3
  One question (seconds):               python -m benchmarks.goals --agents=gciql --batches=256 --seeds=1
"""

from __future__ import annotations

import dataclasses
import functools
import statistics
import time
from typing import Any

import jax
from absl import app

from benchmarks import cases, offline, table, timing
from experiments import flags, studies
from rl import agents, envs, evaluate, log
from rl.agents import gcbc, hecrl
from rl.envs.goals import TASKS
from rl.networks import mlp
from rl.settings import require_at_least_one
from rl.types import Array, Key

AGENTS = ("crl", "gcbc", "gciql", "gcivl", "hiql", "qrl", "hecrl")
PLANS = (1, 64)  # environments that HECRL plans for at once
MODES = ("scan", "host")
EPISODES, COPIES = 20, 10  # of an evaluation that is timed


@dataclasses.dataclass(frozen=True)
class Settings:
    """What to measure."""

    agents: str = ",".join(AGENTS)  # comma-separated
    batches: tuple[int, ...] = (256, 1024)  # rows per update
    seeds: tuple[int, ...] = (1, 8)  # seeds trained at once
    environments: str = "TwoRooms-v0,pointmaze-medium-v0"  # to evaluate in, comma-separated; "": none
    updates: int = 0  # updates per timed call; 0: as many as take the products alone a second
    repeats: int = 3  # timed rounds
    transitions: int = 1_000_000  # rows of the synthetic dataset
    out: str = ""  # .json to write, with a .md beside it; default: results/benchmarks/goals-HARDWARE.json


def run(settings: Settings) -> dict[str, Any]:
    """Measures what ``settings`` ask for; writes the results after every block of the table, and returns them.

    Raises:
      ValueError: an agent without goals, an unknown environment, or a number too small; the message names the flag.
    """
    subjects = _subjects(settings)
    results: dict[str, Any] = {
        **log.provenance(),
        "environment": offline.environment(),
        "settings": dataclasses.asdict(settings),
        "agents": {label: dataclasses.asdict(subject.config) for label, (subject, _) in subjects.items()},
        "d3rlpy": "host is the loop of OGBench's code around the same update: its package has no agents",
        "device_peak_bytes": None,
        "rows": [],
        "plans": [
            _planning(count, settings.repeats) for count in PLANS if "hecrl" in settings.agents.split(",")
        ],
        "evaluations": [_evaluation(name) for name in settings.environments.split(",") if name],
    }
    path = table.place(settings.out, "goals", results)
    data = functools.cache(functools.partial(cases.synthetic, settings.transitions))
    blocks = [(label, seeds) for label in subjects for seeds in settings.seeds]
    with log.progress(len(blocks) * (1 + settings.repeats), "benchmark") as bar:
        for label, seeds in blocks:
            bar.set_postfix_str(f"{label}, seeds at once: {seeds}")
            subject, batch_size = subjects[label]
            sizes = offline.Settings(batch_size=batch_size, updates=settings.updates)
            block = offline.updates(subject, seeds, MODES, sizes, data(subject.shape))
            rows = cases.measure(block, settings.repeats, bar.update)
            results["rows"] += [{"agent": label, **row} for row in rows]
            memory = jax.local_devices()[0].memory_stats() or {}
            results["device_peak_bytes"] = memory.get("peak_bytes_in_use")
            table.write(path, results, render(results))
    return results


def _subjects(settings: Settings) -> dict[str, tuple[cases.Subject, int]]:
    """{label in the table: what is trained, with which batches}, after looking at all of the settings."""
    names = studies.names("agents", settings.agents, AGENTS)
    for flag in ("batches", "seeds"):
        if not getattr(settings, flag) or min(getattr(settings, flag)) < 1:
            raise ValueError(f"--{flag} needs numbers of at least 1")
    require_at_least_one(settings, "repeats", "transitions", prefix="--")
    if settings.updates < 0:
        raise ValueError(f"--updates={settings.updates} must not be negative")
    return {
        f"{name}, batches of {batch_size}": (_subject(name), batch_size)
        for name in names
        for batch_size in settings.batches
    }


def _subject(name: str) -> cases.Subject:
    agent = agents.get(name)
    return cases.subject(agent, shape=cases.ENTITIES) if name == "hecrl" else cases.subject(agent)


def _planning(environments: int, repeats: int) -> dict[str, Any]:
    """Seconds of one draw of HECRL's candidates, and of a plan, for this many environments at once, compiled before."""
    subject = _subject("hecrl")
    state, key = cases._start(subject, 1)
    nets = hecrl.networks(subject.config, cases._spec(subject), subject.head)
    proposal = nets.proposal
    assert proposal is not None
    s = cases.synthetic(environments, subject.shape).transitions.observation
    draw = jax.jit(lambda state, s, g, key: proposal.draw(state.params["subgoal"], s, g, key))
    plan = jax.jit(
        lambda state, s, g, key: (
            hecrl.plan(subject.config, nets, subject.head, state.params, s, g, key).subgoal
        )
    )
    call = lambda program: jax.block_until_ready(program(state, s, s[::-1], key))
    draws, plans = timing.measure([lambda: call(draw), lambda: call(plan)], repeats)
    seconds = {"draw": draws, "plan": plans}
    return {"environments": environments, "candidates": subject.config.candidates, "seconds": seconds}


def _evaluation(name: str) -> dict[str, Any]:
    """Steps per second of one evaluation of an untrained policy, after one that is not counted."""
    env = envs.make(f"{TASKS}{name}")
    spec, observation, tasks = envs.spec(env), env.reset(seed=0)[0], env.get_wrapper_attr("num_tasks")
    env.close()
    policy = mlp.unit_policy(spec, gcbc.Config.hidden, gcbc.Config.network)
    one_seed = jax.tree.map(lambda x: x[None], policy.init(jax.random.key(0), observation))

    def act(params: Any, observations: Any, keys: Key) -> Array:
        return jax.vmap(lambda theta, seen: mlp.greedy(policy.apply(theta, seen), spec))(params, observations)

    options = [{"task_id": i + 1} for i in range(tasks)]
    rates = []
    with evaluate.evaluator(
        act, f"{TASKS}{name}", seeds=1, episodes=EPISODES, copies=COPIES, options=options
    ) as episodes:
        for index in range(2):
            start = time.perf_counter()
            steps = int(episodes(one_seed, index)["length"].sum())
            rates.append(steps / (time.perf_counter() - start))
    return {"environment": name, "environments": COPIES, "steps_per_second": rates[-1]}


def render(results: dict[str, Any]) -> str:
    """The table, how much the compiled loop gains, and the evaluations."""
    lines = [table.render(results).rstrip()]
    rates = {
        (row["agent"], row["seeds"], row["loop"]): row["updates_per_second"]
        for row in results["rows"]
        if "left_out" not in row
    }
    for (agent, seeds, loop), rate in rates.items():
        if loop == "scan" and (agent, seeds, "host") in rates:
            gain = rate / rates[agent, seeds, "host"]
            lines.append(f"- {agent}, {seeds} at once: scan does {gain:.2f} times the updates of host")
    for row in results["plans"]:
        draw, plan = (
            studies.digits(1e3 * statistics.median(row["seconds"][name])) for name in ("draw", "plan")
        )
        lines.append(
            f"- hecrl: {row['candidates']} candidates for each of {row['environments']} at once take {draw} ms, a plan "
            f"with them {plan} ms"
        )
    lines += [
        f"- evaluation in {row['environment']}, {row['environments']} at once: "
        f"{studies.digits(row['steps_per_second'])} steps/s"
        for row in results["evaluations"]
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    app.run(offline.command(Settings(), run, render), flags_parser=flags.parser(Settings()))
