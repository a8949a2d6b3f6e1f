"""Goal-conditioned implicit Q-learning (Kostrikov et al. 2022, with goals as in OGBench, Park et al. 2025).

With twin critics ``Q_i``, target critics ``Q'_i``, goals ``g`` (`rl.replay.goals`), rewards ``r``, discounts ``d``
that are 0 at the goal, and expectile ``tau``:

    L_V  = E[ |tau - 1(u < 0)| loss_V(min_i Q'_i(s, a, g)) ],   u = min_i Q'_i(s, a, g) - V(s, g)
    L_Q  = E[ sum_i loss_Qi(r + gamma d V(s', g)) ]
    L_pi = - lambda E[ min_i Q_i(s, pi(s, g), g) ] - alpha E[ log pi(a | s, g) ],  lambda = 1 / E |min_i Q_i|    ddpg_bc
           - E[ min(exp(alpha A), 100) log pi(a | s, g) ],  A = min_i Q_i(s, a, g) - V(s, g)                     awr

where ``loss`` is the head's: squared error in the paper. ``L_pi`` has goals of its own. With ``gumbel`` V is the soft
maximum of X-QL (`rl.agents.iql`).

Paper and code. This is OGBench's code: its policies are normal with deviation 1, ``ddpg_bc`` acts with their mean,
clipped to the box, and targets follow the critics *before* each update. Here an image and its goal go through an
encoder each, where OGBench stacks their channels.
"""

from __future__ import annotations

import dataclasses

import jax
import optax

from rl.agents import extraction, gcivl, iql
from rl.agents.augmentation import augmented
from rl.agents.optimisers import Adam, Optimiser, build
from rl.agents.requirements import require_ranges
from rl.agents.state import descend, follow, start
from rl.networks import mlp
from rl.networks.base import ensemble
from rl.networks.layers import OGBENCH, Architecture
from rl.replay import goals
from rl.replay.goals import GoalBatch, Hindsight
from rl.settings import require_choices
from rl.types import Array, Key, Learner, Metrics, Spec, State
from rl.values.heads import ValueHead


@dataclasses.dataclass(frozen=True)
class Config:
    """Hyper-parameters; defaults are OGBench's."""

    discount: float = 0.99  # gamma, the weight of a reward that comes one step later
    expectile: float = 0.9  # tau: 0.5 is SARSA, towards 1 the maximum over logged actions
    gumbel: float = 0.0  # b > 0: X-QL's soft maximum at this temperature, without an expectile; 0: IQL
    extraction: str = "ddpg_bc"  # how the policy is extracted: ddpg_bc or awr (the one for integer actions)
    alpha: float = 0.3  # weight of cloning in ddpg_bc; inverse temperature in awr
    target_rate: float = 0.005  # Polyak step of the target critics
    learning_rate: float = 3e-4  # Adam, all networks
    hidden: tuple[int, ...] = (512, 512, 512)  # widths of every network's layers
    layer_norm: bool = True  # LayerNorm in critics and value
    network: Architecture = OGBENCH  # of every network
    critic_optimiser: Adam = Adam()  # of the critics
    value_optimiser: Adam = Adam()  # of the value
    policy_optimiser: Adam = Adam()  # of the policy
    goals: Hindsight = Hindsight()  # which goals a step is relabelled with

    def __post_init__(self) -> None:
        require_ranges(self)
        require_choices(self, {"extraction": extraction.EXTRACTIONS})


def make(config: Config, spec: Spec, head: ValueHead, optimiser: Optimiser = optax.adam) -> Learner:
    """The learner of `GoalBatch`; see `rl.types.Learner`.

    Raises:
      ValueError: a spec without goals, or an extraction that cannot handle integer actions.
    """
    goals.plain_spec(spec, "gciql")
    extraction.require(config, spec)
    member = mlp.critic(spec, head.size, config.hidden, config.layer_norm, config.network)
    critic = ensemble(member, 2)
    value = mlp.state_value(head.size, config.hidden, config.layer_norm, config.network, spec)
    policy = mlp.unit_policy(spec, config.hidden, config.network)
    optimisers = {
        "critic": build(config.critic_optimiser, config.learning_rate, optimiser),
        "value": build(config.value_optimiser, config.learning_rate, optimiser),
        "policy": build(config.policy_optimiser, config.learning_rate, optimiser),
    }

    def init(key: Key, batch: GoalBatch) -> State:
        keys, steps = jax.random.split(key, 3), batch.value
        params = {
            "critic": critic.init(keys[0], steps.observation, steps.action),
            "value": value.init(keys[1], steps.observation),
            "policy": policy.init(keys[2], steps.observation),
        }
        return start(params, optimisers, targets=["critic"])

    def smallest(state: State, observation, action) -> Array:
        """The smaller critic's value [...]."""
        return head.value(critic.apply(state.params["critic"], observation, action)).min(0)

    def values(state: State, observation) -> Array:
        return head.value(value.apply(state.params["value"], observation))

    def update(state: State, batch: GoalBatch, key: Key) -> tuple[State, Metrics]:
        steps = batch.value
        toward = goals.with_goal(steps.observation, batch.actor_goal)

        def loss(params):
            critic_and_value_loss, _, metrics = iql.value_losses(
                config, head, critic, value, params, state, steps
            )
            policy_loss, measured = extraction.policy_loss(
                config,
                spec,
                policy.apply(params["policy"], toward, key=key),
                steps.action,
                q=lambda action: smallest(state, toward, action),
                advantage=lambda: smallest(state, toward, steps.action) - values(state, toward),
            )
            return critic_and_value_loss + policy_loss, {**measured, **metrics}

        gradients, metrics = jax.grad(loss, has_aux=True)(state.params)
        state = descend(follow(state, config.target_rate), gradients, optimisers)
        return state._replace(step=state.step + 1), metrics

    def act(state: State, observation: Array, key: Key) -> Array:
        del key
        return mlp.greedy(policy.apply(state.params["policy"], observation), spec)

    def continuation(state: State, observation: Array, key: Key) -> Array:
        del key
        return values(state, observation)

    def critics(state: State, observation: Array, action: Array) -> Array:
        return head.value(critic.apply(state.params["critic"], observation, action))

    return augmented(Learner(init, update, act, continuation, critics=critics), spec, config.network)


target_range = gcivl.target_range


def unused(config: Config) -> dict[str, str]:
    """Settings that do nothing; see `rl.agents.unused`."""
    return goals.NO_SUBGOALS | iql.unused(config)
