"""Goal-conditioned behaviour cloning: what was done on the way to a state is how to get there.

Ghosh et al. (2021), Lynch et al. (2020). With goals ``g`` from the future of each step's episode (`rl.replay.goals`):

    max_pi  E_D[ log pi(a | s, g) ]

with a normal policy of deviation 1, so that this is the regression of OGBench's code (Park et al. 2025). Evaluation
acts on its mean. It learns no value: `make` takes a head, as every agent's does, and does not use it; scripts
refuse one. An image and its goal go through an encoder each, where OGBench stacks their channels.
"""

from __future__ import annotations

import dataclasses

import jax
import optax

from rl.agents.augmentation import augmented
from rl.agents.optimisers import Adam, Optimiser, build
from rl.agents.requirements import require_ranges
from rl.agents.state import descend, start
from rl.networks import mlp
from rl.networks.layers import OGBENCH, Architecture
from rl.replay import goals
from rl.replay.goals import GoalBatch, Hindsight
from rl.types import Array, Key, Learner, Metrics, Spec, State
from rl.values.heads import ValueHead

IGNORES_REWARDS = True
"""It has no discount. Its goals are drawn uniformly; geometric ones would be 100 steps away on average."""


@dataclasses.dataclass(frozen=True)
class Config:
    """Hyper-parameters; defaults are OGBench's."""

    learning_rate: float = 3e-4  # Adam
    hidden: tuple[int, ...] = (512, 512, 512)  # widths of the policy's layers
    network: Architecture = OGBENCH  # of every network
    policy_optimiser: Adam = Adam()  # of the policy
    goals: Hindsight = Hindsight()  # which goals a step is relabelled with; those for values are not used

    def __post_init__(self) -> None:
        require_ranges(self)


def make(config: Config, spec: Spec, head: ValueHead, optimiser: Optimiser = optax.adam) -> Learner:
    """The learner of `GoalBatch`; see `rl.types.Learner`. Raises ValueError for a spec without goals."""
    del head
    goals.plain_spec(spec, "gcbc")
    policy = mlp.unit_policy(spec, config.hidden, config.network)
    optimisers = {"policy": build(config.policy_optimiser, config.learning_rate, optimiser)}

    def init(key: Key, batch: GoalBatch) -> State:
        return start({"policy": policy.init(key, batch.value.observation)}, optimisers)

    def update(state: State, batch: GoalBatch, key: Key) -> tuple[State, Metrics]:
        toward = goals.with_goal(batch.value.observation, batch.actor_goal)

        def loss(params):
            return -policy.apply(params["policy"], toward, key=key).log_prob(batch.value.action).mean()

        value, gradients = jax.value_and_grad(loss)(state.params)
        state = descend(state, gradients, optimisers)
        return state._replace(step=state.step + 1), {"policy_loss": value}

    def act(state: State, observation: Array, key: Key) -> Array:
        del key
        return mlp.greedy(policy.apply(state.params["policy"], observation), spec)

    return augmented(Learner(init, update, act), spec, config.network)


def unused(config: Config) -> dict[str, str]:
    """Settings that do nothing; see `rl.agents.unused`."""
    del config
    rewards = dict.fromkeys(goals.OF_REWARDS, "gcbc reads neither rewards nor discounts")
    values = {"goals.value": "gcbc learns no values, and only goals.actor counts"}
    return {**rewards, **values, **goals.NO_SUBGOALS}
