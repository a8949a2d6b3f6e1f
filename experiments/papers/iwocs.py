"""IWOCS (Zouitine, Geist & Rachelson 2024) on its tabular demonstration, against robust value iteration.

    python -m experiments.papers.iwocs

The windy walk with the paper's 25 winds (alpha from 0 to 0.5), gamma 0.95 and tolerance 1e-3: which members IWOCS
solves, what it promises after each, and what its policies earn under every wind, beside robust value iteration over
the same family. The paper reports that the worst case is found in two iterations and that the values agree. Policies
are evaluated exactly here, by 300 rollouts there; the layout of the walls is ours, for the paper only draws it.

Beyond the paper: how often that happy end is the rule. On random families, small enough to try every deterministic
policy, what does IWOCS reach of the best static worst case, and what does the rectangular adversary cost?
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments import studies
from rl import log, plot, statistics
from rl.agents import robust_vi
from rl.envs import tabular
from rl.envs.tabular import MDP
from rl.types import Array, Key

WINDS = np.linspace(0, 0.5, 25)
GAMMA, TOLERANCE = 0.95, 1e-3
MEMBERS, STATES, ACTIONS = 6, 5, 3
REPORT = "table.md"


@dataclasses.dataclass(frozen=True)
class Settings(studies.Settings):
    """What can be chosen about this study."""

    families: int = 500  # random families
    seed: int = 0  # of the random families
    out: str = "results/papers/iwocs"


def run(settings: Settings) -> dict[str, Any]:
    """Both studies, written to ``settings.out``; returns what result.json holds."""
    variants = {
        "windy_walk": studies.Variant(windy_walk, {}),
        "random_families": studies.Variant(partial(random_families, settings), studies.chosen(settings)),
    }
    trained = studies.train(settings, variants, "parts")
    outcomes = {"wall_seconds": trained.seconds, **trained.outcomes}
    result = studies.finish(settings, outcomes, report, claims, REPORT, trained)
    walk = trained.outcomes["windy_walk"]
    curves = {
        f"IWOCS, round {number}: alpha {row['alpha']:g}": earned
        for number, (row, earned) in enumerate(zip(walk["rounds"], walk["earned"], strict=True), 1)
    }
    same = np.allclose(walk["rvi"]["earned"], walk["earned"][-1])
    curves[f"robust value iteration{', the same' if same else ''}"] = walk["rvi"]["earned"]
    none = np.full(len(WINDS), np.nan)
    plot.lines(
        Path(settings.out) / "windy_walk.png",
        {label: (WINDS, value, none, none) for label, value in curves.items()},
        xlabel="alpha, the wind in the north corridor",
        ylabel="discounted return from the start",
        title="Windy walk: policies under every wind",
        note="exact",
    )
    return result


def windy_walk(work: studies.Work) -> dict[str, Any]:
    """IWOCS and robust value iteration on the paper's family."""
    with jax.enable_x64(True):
        family = jax.vmap(tabular.windy_walk)(jnp.asarray(WINDS))
        iwocs = robust_vi.iwocs(family, GAMMA, tolerance=TOLERANCE)
        robust = _rectangular(family)
        earned = partial(_earned, family)
        of_robust = earned(robust_vi.greedy(robust.q))
        return {
            "alpha": WINDS,
            "rounds": [
                {"alpha": WINDS[member], "promised": promised, "worst": worst}
                for member, promised, worst in zip(iwocs.member, iwocs.promised, iwocs.worst, strict=True)
            ],
            "converged": iwocs.converged,
            "earned": [np.asarray(earned(policy)) for policy in iwocs.policy],
            "rvi": {
                "value": float(family.start[0] @ robust.value),
                "earned": np.asarray(of_robust),
                "worst": float(of_robust.min()),
                "largest_difference_of_v": float(np.abs(iwocs.q[-1].max(-1) - robust.value).max()),
            },
        }


def random_families(settings: Settings, work: studies.Work) -> dict[str, Any]:
    """IWOCS, robust value iteration and the first member's optimum against the best policy for a static worst case.

    Worst cases are given as what they fall short of the best one by, in units of what the first member's optimal
    policy falls short by on average; the best is over all deterministic policies.
    """
    policies = np.eye(ACTIONS)[list(product(range(ACTIONS), repeat=STATES))]

    @jax.jit
    def exact(key: Key) -> tuple[MDP, Array, Array, Array]:
        family = _random_family(key)
        best = jax.lax.map(lambda policy: _earned(family, policy).min(), policies, batch_size=81).max()
        robust = _rectangular(family)
        return (
            family,
            best,
            family.start[0] @ robust.value,
            _earned(family, robust_vi.greedy(robust.q)).min(),
        )

    rows = []
    keys = jax.random.split(jax.random.key(settings.seed), settings.families)
    with jax.enable_x64(True), log.progress(settings.families, "random families") as bar:
        for key in keys:
            family, best, value, worst = exact(key)
            iwocs = robust_vi.iwocs(family, GAMMA, tolerance=TOLERANCE)
            shortfalls = best - iwocs.worst[0], best - iwocs.worst[-1], best - worst
            bounds = iwocs.promised[-1] - best, best - value
            rows.append((*shortfalls, *bounds, iwocs.converged, len(iwocs.member)))
            bar.update()
    columns = np.array(rows, float).T
    names = ("first member", "IWOCS", "robust VI")
    return {
        "unit": columns[0].mean(),
        "shortfall": {name: _in_units(x, columns[0]) for name, x in zip(names, columns[:3], strict=True)},
        "optimal": {name: float((x <= TOLERANCE).mean()) for name, x in zip(names, columns[:3], strict=True)},
        "iwocs_promises_too_much": _in_units(columns[3], columns[0]),
        "rvi_promises_too_little": _in_units(columns[4], columns[0]),
        "iwocs_converged": float(columns[5].mean()),
        "iwocs_rounds": float(columns[6].mean()),
    }


def _random_family(key: Key) -> MDP:
    """Models that share their rewards."""
    family = jax.vmap(lambda key: tabular.garnet(key, STATES, ACTIONS))(jax.random.split(key, MEMBERS))
    return family._replace(reward=jnp.broadcast_to(family.reward[0], family.reward.shape))


def _rectangular(family: MDP) -> robust_vi.Solution:
    hull = jax.tree.map(lambda x: x[0], family)._replace(transition=family.transition)
    return robust_vi.value_iteration(hull, GAMMA, robust_vi.MEMBER)


def _earned(family: MDP, policy: Array) -> Array:
    return jax.vmap(lambda mdp: mdp.start @ tabular.evaluate(mdp, policy, GAMMA))(family)


def _in_units(values: np.ndarray, unit: np.ndarray) -> dict[str, Any]:
    """The mean of values over that of ``unit``, which was measured on the same families."""
    return {"mean": values.mean() / unit.mean(), "ci95": list(statistics.ratio_interval(values, unit))}


def claims(result: Mapping[str, Any]) -> Iterator[studies.Claim]:
    """What the paper reports of its demonstration."""
    walk, source = result["windy_walk"], "IWOCS (Zouitine, Geist & Rachelson 2024)"
    two = studies.every(lambda x: x == 2)
    yield studies.Claim(
        "windy walk: the worst case is found in two rounds", source, [len(walk["rounds"])], two
    )
    yield studies.Claim(
        "windy walk: values are those of robust value iteration (largest difference)",
        source,
        [walk["rvi"]["largest_difference_of_v"]],
        studies.every(lambda x: x <= TOLERANCE),
    )


def report(result: Mapping[str, Any]) -> Iterator[str]:
    """The blocks of a Markdown report."""
    walk, study = result["windy_walk"], result["random_families"]
    yield "# IWOCS and robust value iteration"
    yield f"## Windy walk: {len(WINDS)} winds, gamma {GAMMA}"
    yield studies.table(
        ("round of IWOCS", "solved for alpha", "promised", "worst case of its policy"),
        [
            (number, f"{row['alpha']:.3f}", f"{row['promised']:.4f}", f"{row['worst']:.4f}")
            for number, row in enumerate(walk["rounds"], 1)
        ],
    )
    yield (
        f"IWOCS {'converged' if walk['converged'] else 'did not converge'} after {len(walk['rounds'])} rounds "
        f"(paper: 2). Robust value iteration: {walk['rvi']['value']:.4f}, and its policy earns "
        f"{walk['rvi']['worst']:.4f} in its worst case. The values of the two differ by at most "
        f"{walk['rvi']['largest_difference_of_v']:.1e} in any state (paper: they match)."
    )
    shape = f"{MEMBERS} models of {STATES} states and {ACTIONS} actions"
    yield f"## Random families: {shape} that share their rewards"
    yield (
        "Shortfall of the static worst case from that of the best deterministic policy, in units of what the first "
        f"member's optimal policy falls short by on average ({study['unit']:.3f}); 95 % intervals of the ratio "
        "over families (Fieller's)."
    )
    yield studies.table(
        ("policy", "shortfall", f"within {TOLERANCE:g} of the best"),
        [
            (name, studies.between(x, ".3f"), f"{study['optimal'][name]:.0%}")
            for name, x in study["shortfall"].items()
        ],
    )
    yield (
        f"IWOCS converged on {study['iwocs_converged']:.0%} of the families; elsewhere it stopped with its worst "
        f"member already solved. It took {study['iwocs_rounds']:.2f} rounds on average. Its promise is above the best "
        f"static worst case by {study['iwocs_promises_too_much']['mean']:.3f} units, the value of robust value "
        f"iteration below it by {study['rvi_promises_too_little']['mean']:.3f}."
    )


if __name__ == "__main__":
    studies.main(Settings(), run, REPORT)
