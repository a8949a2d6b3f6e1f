"""How fast do offline agents train here, how far is that from the hardware's limit, and what memory does it take?

    python -m benchmarks.offline

IQL, CQL and EDAC-10, one seed and eight at once, in three loops:

  scan      as the library trains: many updates in one compiled call, the dataset on the device
  unroll    the same with --unroll updates per iteration of the compiled loop
  host      one compiled update per Python call, on a batch that NumPy sampled, as most codebases do

and beside them, in the same rounds:

  products  the matrix products of the update, with its shapes, and nothing else: the limit
  d3rlpy    its IQL and CQL with the same sizes, where it is installed (`make bench` installs it)

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
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
from absl import app

from benchmarks import cases, peers, table
from experiments import flags
from rl import agents, log
from rl.replay.dataset import Dataset


@dataclasses.dataclass(frozen=True)
class Settings:
    """What to measure."""

    agents: str = "iql,cql,edac"  # agents with their own default sizes, comma-separated
    seeds: tuple[int, ...] = (1, 8)  # seeds trained at once; each number is a block of the table
    modes: str = "scan,unroll,host"  # loops, comma-separated, of those above
    batch_size: int = 256  # transitions per update
    updates: int = 0  # updates per timed call; 0: as many as take the products alone a second
    unroll: int = 4  # updates per iteration of the compiled loop, in the mode unroll
    repeats: int = 5  # timed rounds
    transitions: int = 1_000_000  # rows of the synthetic dataset
    out: str = ""  # .json to write, with a .md beside it; default: results/benchmarks/offline-HARDWARE.json
    no_d3rlpy: bool = False  # leave d3rlpy out even where it is installed


def run(settings: Settings) -> dict[str, Any]:
    """Measures what ``settings`` ask for; writes the results after every block of the table, and returns them.

    Raises:
      ValueError: an unknown agent or mode, or a number too small; the message names the flag.
    """
    names, modes = _check(settings)
    results: dict[str, Any] = {
        **log.provenance(),
        "environment": _environment(),
        "settings": dataclasses.asdict(settings),
        "agents": {name: dataclasses.asdict(agents.get(name).Config()) for name in names},
        "d3rlpy": "d3rlpy was left out" if settings.no_d3rlpy else peers.missing() or peers.versions(),
        "rows": [],
    }
    path = Path(settings.out or f"results/benchmarks/offline-{table.slug(results['hardware'])}.json")
    path.parent.mkdir(parents=True, exist_ok=True)
    data = cases.synthetic(settings.transitions)
    with_peer = set(names) & set(peers.AGENTS) if isinstance(results["d3rlpy"], dict) else set()
    buffer = peers.buffer(data) if with_peer else None
    on_device = jax.device_put(data)

    blocks = [(name, seeds) for name in names for seeds in settings.seeds]
    with log.progress(len(blocks) * (1 + settings.repeats), "benchmark") as bar:
        for name, seeds in blocks:
            bar.set_postfix_str(f"{name}, seeds at once: {seeds}")
            block = _block(name, seeds, modes, settings, data, on_device)
            if name in with_peer and seeds == settings.seeds[0]:
                hidden = agents.get(name).Config().hidden
                block += cases.peer(name, hidden, settings.batch_size, block[0].updates, buffer)
            rows = cases.measure(block, settings.repeats, bar.update)
            results["rows"] += [{"agent": name, **row} for row in rows]
            # Of all blocks so far; backends that do not count, the CPU's for one, have none.
            memory = jax.local_devices()[0].memory_stats() or {}
            results["device_peak_bytes"] = memory.get("peak_bytes_in_use")
            log.write_json(path, results)
            with log.replacing(path.with_suffix(".md")) as partial:
                partial.write_text(table.render(results))
    return results


def _block(
    name: str, seeds: int, modes: Sequence[str], settings: Settings, data: Dataset, on_device: Dataset
) -> list[cases.Case]:
    """An agent in every mode, after the products of its update."""
    agent, batch_size = agents.get(name), settings.batch_size
    limit = cases.limit(agent, seeds, batch_size, settings.updates, settings.unroll)
    compiled = functools.partial(cases.scan, agent, seeds, batch_size, limit.updates, on_device)
    make = {
        "scan": functools.partial(compiled, "scan", 1),
        "unroll": functools.partial(compiled, "unroll", settings.unroll),
        "host": functools.partial(cases.host, agent, seeds, batch_size, limit.updates, data),
    }
    return [limit, *(make[mode]() for mode in modes)]


def _check(settings: Settings) -> tuple[list[str], list[str]]:
    """The names of the agents and the modes in ``settings``, after looking at all of it."""
    names, modes = settings.agents.split(","), [mode for mode in settings.modes.split(",") if mode]
    for name in names:
        agents.get(name)
    for mode in modes:
        if mode not in cases.LOOPS:
            raise ValueError(f"--modes has no {mode!r}: choose from {', '.join(cases.LOOPS)}")
    for flag in ("batch_size", "unroll", "repeats", "transitions"):
        if getattr(settings, flag) < 1:
            raise ValueError(f"--{flag}={getattr(settings, flag)} must be at least 1")
    if not settings.seeds or min(settings.seeds) < 1:
        raise ValueError("--seeds needs numbers of at least 1")
    if settings.updates < 0:
        raise ValueError(f"--updates={settings.updates} must not be negative")
    return names, modes


def _environment() -> dict[str, Any]:
    """What outside the code decides speed and memory."""
    names = (
        "XLA_FLAGS",
        "XLA_PYTHON_CLIENT_PREALLOCATE",
        "XLA_PYTHON_CLIENT_MEM_FRACTION",
        "OMP_NUM_THREADS",
    )
    return {
        **{name: os.environ.get(name) for name in names},
        "matmul_precision": jax.config.jax_default_matmul_precision,
        "load_average": os.getloadavg()[0],
    }


def main(_: list[str]) -> None:
    # A program that comes from the cache on disk would have compiled in no time.
    jax.config.update("jax_enable_compilation_cache", False)
    load, cores = os.getloadavg()[0], log.hardware()["cores"]
    if load > cores / 2:
        print(f"Times will not mean much: other programs are busy here (load {load:.1f}).", file=sys.stderr)
    try:
        results = run(flags.read(Settings()))
    except ValueError as error:
        print(error, file=sys.stderr)
        raise SystemExit(2) from None
    print(table.render(results))
    if any(row["retraces"] for row in results["rows"]):
        raise SystemExit("A program was traced again after its first epoch: see the column retraces.")


if __name__ == "__main__":
    app.run(main, flags_parser=flags.parser(Settings()))
