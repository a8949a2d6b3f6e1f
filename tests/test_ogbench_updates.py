"""Three updates of OGBench's goal agents, beside those that its own code makes from the same parameters and batch.

It alone sees that losses, networks, the order of targets and Adam's steps are OGBench's together; other tests look at
each against a formula. `ogbench_updates.npz` holds numbers alone, named and ordered as here. They were made by
OGBench's implementations (impls/agents, as forks of 2025 hold them) with layers of 6, Adam at 1e-3, and parameters that
were moved at random from their first values.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree

from rl import agents
from rl.replay import goals
from rl.types import Spec, Transition
from rl.values import heads

NUMBERS = np.load(Path(__file__).with_name("ogbench_updates.npz"))
OBSERVATIONS, ACTIONS, CHOICES, UPDATES = 3, 2, 4, 3
# {case: agent, what it sets}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "gcbc": ("gcbc", {}),
    "gcivl": ("gcivl", {}),
    "gciql": ("gciql", {"alpha": 0.3}),
    "gciql-awr-discrete": ("gciql", {"extraction": "awr", "alpha": 3.0}),
    "crl": ("crl", {"latent": 8}),
    "qrl": ("qrl", {"latent": 8}),
    "hiql": ("hiql", {"representation": 4}),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.slow
def test_updates_are_those_of_ogbenchs_code(case: str) -> None:
    read = lambda name: NUMBERS[f"{case}/{name}"]
    agent, chosen = CASES[case]
    module, discrete = agents.get(agent), case.endswith("discrete")
    config = module.Config(hidden=(6, 6), learning_rate=1e-3, **chosen)
    plain = Spec((OBSERVATIONS,), CHOICES if discrete else ACTIONS, discrete)
    learner = module.make(config, goals.conditioned_spec(plain), heads.make("scalar"))
    batch = logged(read)
    shapes = jax.eval_shape(learner.init, jax.random.key(0), batch)
    state = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), shapes)  # Adam's too, before its first step
    fill = lambda tree, values: ravel_pytree(tree)[1](values)
    state = state._replace(
        params=fill(state.params, read("start/params")), target=fill(state.target, read("start/target"))
    )
    update, metrics = jax.jit(learner.update), []
    for number in range(UPDATES):
        state, report = update(state, batch, jax.random.key(number))
        metrics.append(report)
    names = [name.rpartition("/")[2] for name in NUMBERS if name.startswith(f"{case}/metrics/")]
    assert names
    for name in names:
        np.testing.assert_allclose([report[name] for report in metrics], read(f"metrics/{name}"), 1e-4, 1e-6)
    # Three steps of 1e-3, and 0.005 of the way for targets.
    np.testing.assert_allclose(ravel_pytree(state.params)[0], read("end/params"), atol=2e-6)
    np.testing.assert_allclose(ravel_pytree(state.target)[0], read("end/target"), atol=1e-7)


def logged(read: Any) -> goals.GoalBatch:
    """The batch, of which some goals are reached."""
    see = lambda name: goals.conditioned(read(f"batch/{name}"), read("batch/value_goal"))
    action, known = read("batch/action"), np.ones(len(read("batch/reward")), np.float32)
    value = Transition(
        see("observation"),
        action,
        read("batch/reward"),
        read("batch/discount"),
        see("next_observation"),
        action,
        known,
    )
    rest = (read(f"batch/{name}") for name in ("actor_goal", "subgoal", "actor_subgoal"))
    return goals.GoalBatch(value, *rest)
