"""Seconds of one fit of R2PVI and its baselines against N and d, beside the published algorithm in NumPy.

    python -m benchmarks.robust

The data are the paper's put option: N price paths of 20 decisions, d hat features. ``tv`` and ``kl`` have closed forms;
``chi2`` and the balls search for a dual variable in every factor and step. Sizes that take the machine's memory or
patience are cut by --largest; the NumPy version runs for the sample sizes in --peer_samples only. The table is printed
and stored with every single time in results/benchmarks/robust-HARDWARE.{json,md}.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from absl import app

from benchmarks import linear_peer, table, timing
from experiments import flags, studies
from rl import log
from rl.agents import drpvi, linear, r2pvi
from rl.envs import american_put
from rl.replay.linear import Trajectories

BETA, RIDGE = 0.1, 1.0  # the paper's for the option

# lambda, or rho.
STRENGTHS = {"tv": 1.0, "kl": 1.0, "chi2": 1.0, "tv_ball": 0.1, "kl_ball": 0.1}


@dataclasses.dataclass(frozen=True)
class Settings:
    """What to measure."""

    methods: str = ",".join(STRENGTHS)  # comma-separated
    samples: tuple[int, ...] = (1_000, 10_000, 100_000, 1_000_000)  # N, at 30 features
    sizes: tuple[int, ...] = (30, 120, 512, 1024, 4096)  # d, at 1000 samples
    largest: float = 2e9  # features in one data set, H N d, above which a size is left out
    peer_samples: tuple[int, ...] = (1_000,)  # N at which the NumPy version is timed, at 30 features
    repeats: int = 3  # timed fits of each kind, after one that is not counted
    horizon: int = 20  # decisions
    out: str = ""  # JSON file; by default results/benchmarks/robust-HARDWARE.json


def run(settings: Settings) -> dict[str, Any]:
    """Measures, writes and returns the results; sizes are visited one after another, so that one fits in memory.

    Raises:
      ValueError: an unknown method.
    """
    methods = settings.methods.split(",")
    if unknown := set(methods) - set(STRENGTHS):
        raise ValueError(f"--methods: {', '.join(sorted(unknown))} is none of {', '.join(STRENGTHS)}")
    sizes = dict.fromkeys([(n, 30) for n in settings.samples] + [(1_000, d) for d in settings.sizes])
    chosen = [(n, d) for n, d in sizes if settings.horizon * n * d <= settings.largest]
    results: dict[str, Any] = {**log.provenance(), "settings": dataclasses.asdict(settings), "rows": []}
    path = table.place(settings.out, "robust", results)
    with log.progress(len(chosen) * len(methods), "fits") as bar:
        for count, size in chosen:
            env = american_put.make(horizon=settings.horizon, factors=size)
            data = american_put.collect(env, jax.random.key(0), count, jnp.asarray(100.0))
            for method in methods:
                bar.set_postfix_str(f"{method}, N={count}, d={size}")
                results["rows"].append(_row(settings, method, count, size, data))
                table.write(path, results, render(results))
                bar.update()
            del data
    return results


def fitter(method: str) -> Callable[[Trajectories], linear.Fit]:
    """The library's fit, to be jitted."""
    strength = STRENGTHS[method]
    if method.endswith("_ball"):
        ball = drpvi.Config(method.removesuffix("_ball"), radius=strength, beta=BETA, ridge=RIDGE)
        return lambda data: drpvi.fit(ball, data)
    price = r2pvi.Config(method, scale=strength, estimate="plain", beta=BETA, ridge=RIDGE)  # as published
    return lambda data: r2pvi.fit(price, data)


def _row(settings: Settings, method: str, count: int, size: int, data: Trajectories) -> dict[str, Any]:
    compiled = jax.jit(fitter(method)).lower(data).compile()
    (times,) = timing.measure([lambda: jax.block_until_ready(compiled(data))], settings.repeats)
    row = {"method": method, "N": count, "d": size, "seconds": times}
    if count in settings.peer_samples and size == 30:
        strength = STRENGTHS[method]
        (row["peer_seconds"],) = timing.measure(
            [lambda: linear_peer.fit(method, strength, data, BETA, RIDGE)], 1
        )
    return row


def render(results: Mapping[str, Any]) -> str:
    """The table as Markdown, with where it is from."""
    closed = {
        (row["N"], row["d"]): statistics.median(row["seconds"])
        for row in results["rows"]
        if row["method"] == "tv"
    }
    rows = [("method", "N", "d", "seconds", "x tv", "NumPy seconds", "x faster")]
    for row in results["rows"]:
        seconds, tv = statistics.median(row["seconds"]), closed.get((row["N"], row["d"]))
        theirs = statistics.median(row["peer_seconds"]) if "peer_seconds" in row else None
        rows.append(
            (
                row["method"],
                f"{row['N']:,}",
                str(row["d"]),
                studies.digits(seconds),
                f"{seconds / tv:.2f}" if tv else "",
                studies.digits(theirs) if theirs else "",
                studies.digits(theirs / seconds) if theirs else "",
            )
        )
    return "\n".join([*table.source(results), "", *table.aligned(rows), "", *_totals(results)]) + "\n"


def _totals(results: Mapping[str, Any]) -> list[str]:
    """One line for each size at which NumPy was timed, of all methods together."""
    pairs: dict[int, list[tuple[float, float]]] = {}
    for row in results["rows"]:
        if "peer_seconds" in row:
            times = statistics.median(row["seconds"]), statistics.median(row["peer_seconds"])
            pairs.setdefault(row["N"], []).append(times)
    totals = {count: [sum(times) for times in zip(*both, strict=True)] for count, both in pairs.items()}
    return [
        f"All {len(pairs[count])} at N = {count:,}: {studies.digits(ours)} s, NumPy {studies.digits(theirs)} s, "
        f"{studies.digits(theirs / ours)} times faster."
        for count, (ours, theirs) in totals.items()
    ]


def main(_: list[str]) -> None:
    print(render(run(flags.read(Settings()))))


if __name__ == "__main__":
    app.run(flags.reporting(main), flags_parser=flags.parser(Settings()))
