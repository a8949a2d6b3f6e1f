"""How fast do offline agents train here, how far is that from the hardware's limit, and what memory does it take?

    python -m benchmarks.offline

IQL, CQL and EDAC-10, one seed and eight at once, in two loops:

  scan      as the library trains: many updates in one compiled call, the dataset on the device
  host      one compiled update per Python call, on a batch that NumPy sampled, as most codebases do
  act       actions for one observation, and for 64, in one compiled call each (not by default)

and beside them, in the same rounds:

  products  the matrix products of the update, with its shapes, and nothing else: the limit
  d3rlpy    its IQL and CQL with the same sizes, where it is installed (`make bench` installs it)
  torch     the update of ARSQ, CQN, FQL, QC and DEAS in PyTorch, one per Python call in the manner of published code
            (benchmarks/coarse_peer.py, benchmarks/proposals_peer.py), where PyTorch is installed

ARSQ and CQN cut actions into levels of bins: --grids=1x41,2x7,3x5 makes a block of the table for each, of
T = levels x dimensions tokens. QC (FQL on chunks, the best of 32 draws of its flow) and DEAS decide on --chunk actions
at once: --agents=fql,qc,deas --modes=scan,host,act.

A round calls each of them once, and the table holds medians over --repeats rounds: what slows the machine slows all
of them. Nothing else should run meanwhile. benchmarks/README.md explains the table.

Examples:

  Everything, on a CPU (minutes):     python -m benchmarks.offline
  Everything, on a GPU (minutes):     python -m benchmarks.offline --updates=200 --repeats=3
  One question (seconds):             python -m benchmarks.offline --agents=iql --seeds=1 --modes=scan --no_d3rlpy
"""

from __future__ import annotations

import dataclasses
import functools
import os
import re
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import jax
from absl import app

from benchmarks import cases, coarse_peer, peers, proposals_peer, table
from experiments import flags
from rl import agents, log
from rl.replay.dataset import Dataset
from rl.settings import require_at_least_one
from rl.values import heads

TORCH = {  # where an agent's update stands in PyTorch
    **dict.fromkeys(coarse_peer.AGENTS, coarse_peer),
    **dict.fromkeys(proposals_peer.AGENTS, proposals_peer),
}
CHUNKED = ("qc", "deas")
QC = {"extraction": "best_of"}  # what makes it of FQL


@dataclasses.dataclass(frozen=True)
class Settings:
    """What to measure."""

    agents: str = "iql,cql,edac"  # agents with their own default sizes, comma-separated
    grids: str = ""  # LEVELSxBINS, comma-separated, of agents that cut actions (arsq, cqn); "": their own
    chunk: int = 5  # actions in each decision of qc and deas
    head: str = "scalar"  # value head of all agents: scalar, two_hot, hl_gauss, c51 or quantile
    head_size: int = 51  # outputs of the head, whose support is [-100, 100]
    seeds: tuple[int, ...] = (1, 8)  # seeds trained at once; each number is a block of the table
    modes: str = "scan,host"  # loops, comma-separated, of those above
    batch_size: int = 256  # transitions per update
    updates: int = 0  # updates per timed call; 0: as many as take the products alone a second
    repeats: int = 5  # timed rounds
    transitions: int = 1_000_000  # rows of the synthetic dataset
    out: str = ""  # .json to write, with a .md beside it; default: results/benchmarks/offline-HARDWARE.json
    profile: bool = False  # list the kernels of each compiled loop too, on a GPU
    no_d3rlpy: bool = False  # leave d3rlpy and PyTorch out even where they are installed


def run(settings: Settings) -> dict[str, Any]:
    """Measures what ``settings`` ask for; writes the results after every block of the table, and returns them.

    Raises:
      ValueError: an unknown agent or mode, or a number too small; the message names the flag.
    """
    names, modes = _check(settings)
    subjects = _subjects(settings, names)
    results: dict[str, Any] = {
        **log.provenance(),
        "environment": environment(),
        "settings": dataclasses.asdict(settings),
        "agents": {label: dataclasses.asdict(of_one.config) for label, (_, of_one) in subjects.items()},
        "tokens": {
            label: of_one.config.levels * cases.SPEC.action_size
            for label, (name, of_one) in subjects.items()
            if name in coarse_peer.AGENTS
        },
        "d3rlpy": "d3rlpy was left out" if settings.no_d3rlpy else peers.missing() or peers.versions(),
        "torch": None if settings.no_d3rlpy else coarse_peer.version(),
        "rows": [],
    }
    path = table.place(settings.out, "offline", results)
    data = cases.synthetic(settings.transitions)
    with_peer = set(names) & set(peers.AGENTS) if isinstance(results["d3rlpy"], dict) else set()
    buffer = peers.buffer(data) if with_peer else None
    blocks = [(label, seeds) for label in subjects for seeds in settings.seeds]
    with log.progress(len(blocks) * (1 + settings.repeats), "benchmark") as bar:
        for label, seeds in blocks:
            bar.set_postfix_str(f"{label}, seeds at once: {seeds}")
            name, subject = subjects[label]
            block = updates(subject, seeds, modes, settings, data)
            if seeds == settings.seeds[0]:
                most = block[0].updates
                if name in with_peer:
                    block += cases.peer(name, subject.config.hidden, settings.batch_size, most, buffer)
                if results["torch"] and name in TORCH and settings.head in TORCH[name].AGENTS[name]:
                    block.append(cases.torch(TORCH[name], name, subject, settings.batch_size, most, data))
                if cases.ACT in modes:
                    block += [cases.act(subject, environments) for environments in cases.ENVIRONMENTS]
            rows = cases.measure(block, settings.repeats, bar.update, settings.profile)
            results["rows"] += [{"agent": label, **row} for row in rows]
            # Of all blocks so far; backends that do not count, the CPU's for one, have none.
            memory = jax.local_devices()[0].memory_stats() or {}
            results["device_peak_bytes"] = memory.get("peak_bytes_in_use")
            table.write(path, results, table.render(results))
    return results


def _subjects(settings: Settings, names: Sequence[str]) -> dict[str, tuple[str, cases.Subject]]:
    """{label in the table: the agent's name and what is trained}."""
    head = heads.make(settings.head, *cases.SUPPORT, settings.head_size)
    grids = [tuple(map(int, grid.split("x"))) for grid in settings.grids.split(",") if grid]
    subjects = {}
    for name in names:
        agent, config = _agent(name)
        if name in CHUNKED:
            of_chunks = cases.subject(agent, config, head, chunk=settings.chunk)
            subjects[f"{name}, chunks of {settings.chunk}"] = (name, of_chunks)
            continue
        if not (grids and name in coarse_peer.AGENTS):
            subjects[name] = (name, cases.subject(agent, config, head))
            continue
        for levels, bins in grids:
            cut = dataclasses.replace(config, levels=levels, bins=bins)
            subjects[f"{name} {levels}x{bins}"] = (name, cases.subject(agent, cut, head))
    return subjects


def _agent(name: str) -> tuple[ModuleType, Any]:
    """The agent called so on the command line, and its own sizes."""
    agent = agents.get("fql" if name == "qc" else name)
    return agent, agent.Config(**QC if name == "qc" else {})


def updates(
    subject: cases.Subject, seeds: int, modes: Sequence[str], settings: Any, data: Dataset
) -> list[cases.Case]:
    """An agent's updates in every mode, after their products."""
    batch_size, rows = settings.batch_size, cases.logged(subject, data)
    limit = cases.limit(subject, seeds, batch_size, settings.updates)
    on_device = jax.device_put(rows)
    make = {
        "scan": functools.partial(cases.scan, subject, seeds, batch_size, limit.updates, on_device),
        "host": functools.partial(cases.host, subject, seeds, batch_size, limit.updates, rows),
    }
    loops = [mode for mode in modes if mode != cases.ACT]
    return [limit, *(cases.unless_too_large(loop, seeds, make[loop]) for loop in loops)]


def _check(settings: Settings) -> tuple[list[str], list[str]]:
    """The names of the agents and the modes in ``settings``, after looking at all of it."""
    names, modes = settings.agents.split(","), [mode for mode in settings.modes.split(",") if mode]
    for name in names:
        _agent(name)
    if set(names) & set(CHUNKED):
        require_at_least_one(settings, "chunk", prefix="--")
    for mode in modes:
        if mode not in cases.LOOPS:
            raise ValueError(f"--modes has no {mode!r}: choose from {', '.join(cases.LOOPS)}")
    for grid in settings.grids.split(",") if settings.grids else ():
        if not re.fullmatch(r"\d+x\d+", grid):
            raise ValueError(f"--grids has {grid!r}: give levels x bins, as in 1x41,2x7,3x5")
    require_at_least_one(settings, "batch_size", "repeats", "transitions", prefix="--")
    if not settings.seeds or min(settings.seeds) < 1:
        raise ValueError("--seeds needs numbers of at least 1")
    if settings.updates < 0:
        raise ValueError(f"--updates={settings.updates} must not be negative")
    return names, modes


def environment() -> dict[str, Any]:
    """What outside the code decides speed and memory."""
    names = (
        "XLA_FLAGS",
        "XLA_PYTHON_CLIENT_PREALLOCATE",
        "XLA_PYTHON_CLIENT_MEM_FRACTION",
        "OMP_NUM_THREADS",
    )
    return {
        **{name: os.environ.get(name) for name in names},
        "matmul_precision": jax.config.jax_default_matmul_precision,  # type: ignore[attr-defined]
        "load_average": os.getloadavg()[0],
    }


def command(
    settings: Any, run: Callable[[Any], dict[str, Any]], render: Callable[[Any], str]
) -> Callable[[list[str]], None]:
    """The command line of a benchmark: reads its flags, runs it, and prints its table.

    Args:
      settings: with the defaults of its flags.
      run: settings -> results.
      render: results -> the table.
    """

    def main(_: list[str]) -> None:
        # A program that comes from the cache on disk would have compiled in no time.
        jax.config.update("jax_enable_compilation_cache", False)
        load, cores = os.getloadavg()[0], log.hardware()["cores"]
        if load > cores / 2:
            print(
                f"Times will not mean much: other programs are busy here (load {load:.1f}).", file=sys.stderr
            )
        try:
            results = run(flags.read(settings))
        except ValueError as error:
            print(error, file=sys.stderr)
            raise SystemExit(2) from None
        print(render(results))
        if any(row["retraces"] for row in results["rows"]):
            raise SystemExit("A program was traced again after its first epoch: see the column retraces.")

    return main


if __name__ == "__main__":
    app.run(command(Settings(), run, table.render), flags_parser=flags.parser(Settings()))
