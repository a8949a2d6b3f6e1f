"""The published numbers: reproduced exactly where the authors' code and its faults are emulated, in tests only."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from experiments import studies
from experiments.papers import r2pvi as paper
from experiments.papers import r2pvi_reference as reference
from rl.agents import drpvi, linear, pevi, r2pvi
from rl.envs import linear_mdp
from rl.replay.linear import Trajectories

PUT = {"beta": 0.1, "ridge": 1.0}
MDP = {"beta": 1.0, "ridge": 0.1}


@pytest.fixture(autouse=True)
def double() -> Iterator[None]:
    with jax.enable_x64(True):
        yield


# ---- the simulated linear MDP ----------------------------------------------------------------------------


@functools.cache
def mdp(xi_norm: float) -> tuple[linear_mdp.LinearMDP, list[Trajectories]]:
    env = linear_mdp.make(0.3, xi_norm)
    return env, [reference.mdp_data(env, seed) for seed in range(20)]


def library_q(module: Any, config: Any, data: Trajectories) -> reference.Q:
    """The library's fit, for the reference's loops."""
    fit = jax.tree.map(np.asarray, compiled(module, config)(data))
    return numpy_q(config, fit)


@functools.cache
def compiled(module: Any, config: Any) -> Callable[[Trajectories], linear.Fit]:
    return jax.jit(lambda data: module.fit(config, data))


def numpy_q(config: Any, fit: linear.Fit) -> reference.Q:
    def q(step: int, phi: np.ndarray) -> np.ndarray:
        if config.penalty == "ellipsoid":
            width = np.sqrt(np.einsum("...i,ij,...j", phi, fit.uncertainty[step], phi))
        else:
            width = np.sqrt(phi**2 @ fit.uncertainty[step])
        bound = len(fit.weights) - step
        return np.minimum(phi @ fit.weights[step] - config.beta * width, bound)

    return q


def published_mdp(xi_norm: float, q_of: Callable[[Trajectories], reference.Q]) -> np.ndarray:
    """Average rewards at perturbations 0, 0.5 and 1, from their 20 datasets and test episodes."""
    env, datasets = mdp(xi_norm)
    tests = [linear_mdp.perturbed(env, q) for q in (0.0, 0.5, 1.0)]
    agents = [q_of(data) for data in datasets]
    return np.array(
        [np.mean([reference.mdp_return(test, q, seed) for seed, q in enumerate(agents)]) for test in tests]
    )


MDP_LIBRARY = [  # what the authors' code prints, run by us; the library without any fault
    (0.2, pevi, pevi.Config(), (1.5423, 1.1433, 0.7343)),
    (0.2, r2pvi, r2pvi.Config("tv", 0.1), (1.4002, 1.1972, 0.9943)),
    (0.3, r2pvi, r2pvi.Config("tv", 0.3), (1.656, 1.272, 0.865)),
    (0.2, r2pvi, r2pvi.Config("kl", 0.1, estimate="plain"), (1.4802, 1.1743, 0.8453)),
    (0.2, r2pvi, r2pvi.Config("kl", 0.1, estimate="shifted"), (1.3255, 1.2205, 1.1195)),
    (0.2, r2pvi, r2pvi.Config("kl", 0.3, estimate="shifted"), (1.3802, 1.2033, 1.0283)),
    (0.2, r2pvi, r2pvi.Config("chi2", 0.1, estimate="plain"), (1.5123, 1.1563, 0.7853)),
]


@pytest.mark.parametrize(("xi_norm", "module", "config", "expected"), MDP_LIBRARY)
def test_the_library_is_the_authors_code_on_their_random_streams(
    xi_norm: float, module: Any, config: Any, expected: tuple[float, ...]
) -> None:
    ours = published_mdp(xi_norm, functools.partial(library_q, module, config))
    digits = 1e-4 if xi_norm == 0.2 else 6e-4
    np.testing.assert_allclose(ours, expected, atol=digits)


def test_minimising_chi2_is_their_curve() -> None:
    """Pitfall 1. Figure 1(a)'s curve is within sampling of it, and is far from the maximum."""
    fault = reference.nelder_mead(reference.chi2_objective(0.1), minimise=True)
    ours = published_mdp(0.2, lambda data: reference.fit(data, fault, **MDP))
    np.testing.assert_allclose(ours, (1.3255, 1.2205, 1.1195), atol=1e-4)
    published = np.array(paper.FIGURE_A["R2PVI-chi2"])[[0, 5, 10]]
    correct = np.array(MDP_LIBRARY[-1][-1])
    assert np.abs(published - ours).max() < 0.04 < np.abs(published - correct).max()


@pytest.mark.slow
def test_plain_kl_is_optimistic_where_there_is_no_data() -> None:
    """Pitfall 2: a factor that was never seen is worth the most there is, or nothing."""
    data = mdp(0.2)[1][0]
    data = data._replace(features=data.features.at[..., 1].set(0.0))
    unseen = {
        kind: compiled(r2pvi, r2pvi.Config("kl", 0.1, estimate=kind))(data).weights[0, 1]
        for kind in r2pvi.ESTIMATES
    }
    assert unseen == {"plain": pytest.approx(3), "normalised": pytest.approx(0), "shifted": pytest.approx(0)}


@pytest.mark.slow
def test_figure_1c_is_at_perturbation_09() -> None:
    """Its DRPVI curve is that of perturbation 0.9, at which the authors' last notebook stands, and not of 1."""
    env, datasets = mdp(0.2)
    published = np.array(paper.FIGURE_C["DRPVI"])[[0, 4, 9]]
    returns = {}
    for q in (0.9, 1.0):
        test = linear_mdp.perturbed(env, q)
        returns[q] = [
            np.mean(
                [
                    reference.mdp_return(
                        test, library_q(drpvi, drpvi.Config(radius=float(radius)), data), seed
                    )
                    for seed, data in enumerate(datasets)
                ]
            )
            for radius in paper.SWEEP[[0, 4, 9]]
        ]
    np.testing.assert_allclose(returns[0.9], published, atol=0.02)
    assert np.abs(np.array(returns[1.0]) - published).min() > 0.03


# ---- the put option --------------------------------------------------------------------------------------


def published_put(q_of: Callable[[Trajectories], reference.Q], count: int = 100, believed: float = 100.0):
    """Average payoffs at `paper.RISES`, from their three datasets and test episodes."""
    return reference.put_returns(q_of, paper.RISES, count, believed)


PUT_LIBRARY = [
    (pevi, pevi.Config(**PUT), paper.FIGURE_D["PEVI", 0.0]),
    *(
        (r2pvi, r2pvi.Config("tv", s, **PUT), paper.FIGURE_D["R2PVI-TV", s])
        for s in (1.0, 2.0, 3.0, 4.0, 5.0)
    ),
    (r2pvi, r2pvi.Config("kl", 1.0, estimate="plain", **PUT), (6.011, 4.710, 2.119, 0.234, 0)),
    (r2pvi, r2pvi.Config("kl", 5.0, estimate="plain", **PUT), (11.848, 7.627, 1.321, 0.032, 0)),
]

PRINTED = {config for _, config, _ in PUT_LIBRARY[-2:]}  # known to three decimals only


@pytest.mark.parametrize(("module", "config", "expected"), PUT_LIBRARY)
def test_put_rows_with_one_test_start(module: Any, config: Any, expected: tuple[float, ...]) -> None:
    """Pitfall 4 emulated: all tests begin at 99.17, with the same moves for every replication."""
    ours = published_put(functools.partial(library_q, module, config))
    np.testing.assert_allclose(ours, expected, atol=6e-4 if config in PRINTED else 1.5e-4)


SEARCHED = [  # published, or printed by their code to three decimals
    *(
        pytest.param(
            reference.tv_ball_objective(r),
            0.0,
            paper.FIGURE_D["DRPVI", r],
            marks=[pytest.mark.long] * (r < 0.2),
        )
        for r in (0.025, 0.1, 0.2)
    ),
    (reference.kl_ball_objective(0.1), 1e-6, (5.992, 4.044, 2.046, 0.577, 0)),
    pytest.param(reference.chi2_objective(1.0), 0.0, (4.181, 3.732, 2.200, 0.709, 0), marks=pytest.mark.long),
    pytest.param(reference.chi2_objective(5.0), 0.0, (5.183, 4.578, 2.194, 0.403, 0), marks=pytest.mark.long),
]


@pytest.mark.parametrize(("objective", "least", "expected"), SEARCHED)
@pytest.mark.slow
def test_put_rows_of_the_searched_agents_are_those_of_nelder_mead(
    objective: Callable, least: float, expected: tuple[float, ...]
) -> None:
    """Where the library's maximum is larger, as in most of these, the search had stopped in a local one."""
    search = reference.nelder_mead(objective, least=least)
    ours = published_put(lambda data: reference.fit(data, search, **PUT))
    np.testing.assert_allclose(ours, expected, atol=1e-3)


@pytest.mark.parametrize(
    ("plain", "value", "estimate"),
    [
        ("R2PVI-TV", 1.0, reference.tv(1.0)),
        ("DRPVI", 0.2, reference.nelder_mead(reference.tv_ball_objective(0.2))),
    ],
)
def test_the_authors_variance_aware_code_earns_the_plain_rows(
    plain: str, value: float, estimate: reference.Estimate
) -> None:
    """Their variances change values, but no decision in their tests.

    So the published variance-aware rows are of other code or settings: they are the only ones in Figure 1(d) that
    nothing here reproduces.
    """
    ours = published_put(lambda data: reference.fit(data, estimate, untrained_variance=True, **PUT))
    np.testing.assert_allclose(ours, paper.FIGURE_D[plain, value], atol=1e-3)
    assert np.abs(ours - paper.FIGURE_D[f"VA-{plain}", value]).max() > 0.5


def test_strike_is_the_number_of_trajectories() -> None:
    """Pitfall 3: with 1000 trajectories the strike is 1000, and exercising at once always looks best."""
    config = r2pvi.Config("tv", 1.0, **PUT)
    ours = published_put(functools.partial(library_q, r2pvi, config), count=1000, believed=1000.0)
    np.testing.assert_allclose(ours, 0.8298, atol=1e-4)


# ---- the script ------------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.command
def test_the_script_makes_every_figure_and_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At a small size: fewer replications, one timing, two put rows."""
    put_rows = (("R2PVI-TV", 1.0), ("DRVI-L", 0.1))
    monkeypatch.setattr(paper, "TIMES", {(1000, 30): paper.TIMES[1000, 30]})
    monkeypatch.setattr(paper, "TIMED", ("PEVI", "DRPVI"))
    monkeypatch.setattr(paper, "FIGURE_D", {row: paper.FIGURE_D[row] for row in put_rows})
    settings = paper.Settings(out=str(tmp_path), replications=20, many=40, many_put=20, timing_repeats=1)
    result = paper.run(settings)
    names = {path.name for path in tmp_path.iterdir()}
    figures = {"figure_1a", "figure_1b", "figure_1c", "figure_1d", "time_N", "time_d"}
    figures |= {"shift_first_step", "shift_every_step", "shift_slippery_chain"}
    assert names == {f"{name}.png" for name in figures} | {
        "result.json",
        "comparison.md",
        "points.md",
        "variants",
    }
    saved = json.loads((tmp_path / "result.json").read_text())
    assert {"command", "commit", "versions", "hardware", "settings", "seconds"} <= saved.keys()
    np.testing.assert_allclose(saved["1a"][0]["ours"], result["1a"][0]["ours"])
    for curve in result["1a"][:2]:  # PEVI and TV, without a fault, are the paper's
        np.testing.assert_allclose(curve["ours_100_episodes"], curve["ours"], atol=0.06)
        np.testing.assert_allclose(curve["published"], curve["many"], atol=0.06)
        assert not curve["off"].any()
    text = "".join((tmp_path / name).read_text() for name in ("comparison.md", "points.md"))
    assert "| 1a | R2PVI-TV | q = 0.50 | 1.2075 |" in text
    assert "which minimises the chi2 dual" in text and "not published" in text
    assert "| R2PVI-KL | 31: 0.001 to 1 |" in text
    assert "| first step (the paper's) | 0.00 |" in text and "| R2PVI-chi2, plain | " in text
    verdicts = {row["claim"]: row["verdict"] for row in result["claims"]}
    assert verdicts["1a, PEVI: published values within sampling of ours (99.9 %)"] == "holds"
    emulated = "1d, R2PVI-TV lambda = 1: the authors' code, emulated, gives the published values (to 0.001)"
    assert verdicts[emulated] == "holds"


def test_the_page_has_a_row_for_each_curve_and_a_file_every_value() -> None:
    stored = Path(paper.__file__).parents[2] / "results/papers/r2pvi"
    result = studies.load(stored / "result.json")
    curves = [curve for figure in paper.FIGURES for curve in result[figure]]
    first_table = next(block for block in paper.report(result) if block.startswith("|")).splitlines()
    assert len(first_table) == 3 + len(curves) < 40
    assert "| 1a | PEVI | 11 of 11 | 11 of 11 | 0.0219 | 0.0262 |  |" in first_table
    published = [curve for curve in curves if "published" in curve]
    within = [sum(np.sum(np.abs(paper.deviations(c)) <= bound) for c in published) for bound in (1.96, 3.3)]
    assert f"| all |  | {within[0]} of 163 | {within[1]} of 163 |  |  |  |" == first_table[-1]
    assert within[1] == sum(np.sum(np.asarray(curve["off"]) == 0) for curve in published)
    assert any(
        "on a laptop's i5-11300H; ours: on 2 cores, AMD EPYC" in block for block in paper.report(result)
    )
    values = next(block for block in paper.points(result) if block.startswith("|")).splitlines()
    assert len(values) == 2 + sum(len(curve["ours"]) for curve in curves) > 100
    assert (stored / "points.md").read_text() == "\n\n".join(paper.points(result)) + "\n"


def test_the_stored_emulation_is_figure_1d_but_for_the_variance_aware_rows() -> None:
    """And the fault in chi2 gives its curve of 1a at lambda 0.1, while nothing of theirs gives that of KL there.

    Of either curve lambda is not published. At another one the authors' estimates give it. Ours, which are nearer the
    exact worst values wherever lambda is not large, give KL's, too, but not chi2's.
    """
    result = studies.load(Path(paper.__file__).parents[2] / "results/papers/r2pvi/result.json")
    curves = {
        (figure, curve["label"]): np.abs(paper.emulated_difference(result, curve)).max()
        for figure in paper.FIGURES
        for curve in result[figure]
        if "published" in curve
    }
    far = {label for (figure, label), x in curves.items() if figure == "1d" and x > 2e-4}
    assert far == {"VA-R2PVI-TV lambda = 1", "VA-DRPVI rho = 0.2"}
    assert curves["1a", "R2PVI-chi2"] < 0.04 and curves["1a", "R2PVI-KL"] > 0.1
    near = {name: paper.nearest(by_lambda) for name, by_lambda in result["prices"].items()}
    fits = {name: np.abs(paper.deviations(curve)).max() < paper.SAMPLING for name, curve in near.items()}
    assert fits == {name: name != "R2PVI-chi2" for name in paper.CANDIDATES}
    errors = {name: np.asarray(of) for name, of in result["errors"].items()}
    for name, of in errors.items():
        assert (errors[name.partition(",")[0]] <= of * np.where(paper.ERROR_PRICES > 1, 1.03, 1)).all()
    np.testing.assert_allclose(
        result["emulated"]["1d"]["VA-DRPVI rho = 0.2"], paper.FIGURE_D["DRPVI", 0.2], atol=1e-3
    )
    assert all(
        low > 1 for pair in paper.SEARCHED.items() for low, _ in paper.time_ratios(result, *pair).values()
    )


def test_times_are_compared_where_both_were_measured() -> None:
    row = lambda name, ours, published: {"N": 1, "d": 2, "method": name, "ours": ours, "published": published}
    result = {"time": [row("DRPVI", 6.0, 3.0), row("R2PVI-TV", 2.0, 2.0), row("DRVI-L", 1.0, 1.0)]}
    assert paper.time_ratios(result, "DRPVI", "R2PVI-TV") == {(1, 2): (1.5, 3.0)}
    assert paper.time_ratios(result, "DRVI-L", "R2PVI-KL") == {}


def test_too_few_replications() -> None:
    with pytest.raises(ValueError, match="replications must be between 2 and many"):
        paper.run(paper.Settings(replications=20, many=10))
