"""Flow Q-learning (FQL: Park, Li & Levine, ICML 2025): a policy of one step, distilled from a cloned flow.

With critics ``Q_i``, target critics ``Q'_i``, noise z, z' ~ N(0, I) and time t ~ U[0, 1]:

    L_Q  = E_D[ sum_i loss_Qi(r + gamma d agg_i Q'_i(s', pi(s', z'))) ],   agg: the mean, or the minimum
    L_v  = E_D[ (v(s, x_t, t) - (a - z))^2 ],   x_t = (1 - t) z + t a
    L_pi = E_D[ alpha (pi(s, z) - flow(s, z))^2 - mean_i Q_i(s, pi(s, z)) ]

where ``loss`` is the head's: squared error in the paper; flow(s, z) is where ``v`` carries z in 10 steps. The flow
clones the data, and is never driven by a critic; the policy stays close to it for each z, and acts with a fresh one.

Paper and code. Where they differ this is the code: see `rl.agents.flow_policy`, which has the last two losses; and
targets follow the critics *before* each update. Its critics' loss is their mean, here it is their sum: with Adam the
same.

Q-chunking (QC: Li, Zhou & Levine 2025) is this agent on chunks of actions (``--chunk=5``, `rl.replay.chunks`). Its own
version has no policy of one step (``extraction=best_of``): pi(s) is the best of N draws of the flow, by the
critics' ``aggregation``, both where it acts and in L_Q, where critics choose and target critics value what is
chosen. ``alpha``, ``normalize_q`` and ``policy_optimiser`` are not used then. With the distilled policy it is QC-FQL.
"""

from __future__ import annotations

import dataclasses

import jax
import optax

from rl.agents import flow_policy
from rl.agents.augmentation import augmented
from rl.agents.optimisers import Adam, Optimiser, build
from rl.agents.requirements import require, require_ranges
from rl.agents.state import descend, follow, start
from rl.networks import mlp
from rl.networks.base import ensemble
from rl.networks.layers import OGBENCH, Architecture
from rl.settings import require_choices
from rl.types import Array, Key, Learner, Metrics, Spec, State, Transition
from rl.values import bellman, losses
from rl.values.heads import ValueHead


@dataclasses.dataclass(frozen=True)
class Config:
    """Hyper-parameters; defaults are those of the authors' code."""

    discount: float = 0.99  # gamma, the weight of a reward that comes one step later
    alpha: float = 10.0  # weight of distillation against Q, to be tuned for each task
    aggregation: str = "mean"  # of the critics in targets, and for best_of: mean or min
    extraction: str = "distilled"  # the policy from the flow: distilled, or best_of, the best of its draws
    candidates: int = 32  # N, draws of the flow where extraction is best_of
    normalize_q: bool = False  # divide Q by its mean size over the batch: alpha is then without a unit
    flow_steps: int = 10  # steps of the flow from noise to an action
    integrator: str = "euler"  # integrator of the flow: euler or midpoint
    target_rate: float = 0.005  # Polyak step of the target critics
    learning_rate: float = 3e-4  # Adam, all networks
    critics: int = 2  # members of the critic ensemble
    hidden: tuple[int, ...] = (512, 512, 512, 512)  # widths of every network's layers
    layer_norm: bool = True  # LayerNorm in the critics
    network: Architecture = OGBENCH  # of every network
    critic_optimiser: Adam = Adam()  # of the critics
    flow_optimiser: Adam = Adam()  # of the flow
    policy_optimiser: Adam = Adam()  # of the policy of one step

    def __post_init__(self) -> None:
        require_ranges(self)
        require_choices(self, {"aggregation": bellman.MEMBERS})
        flow_policy.require(self)


def make(config: Config, spec: Spec, head: ValueHead, optimiser: Optimiser = optax.adam) -> Learner:
    """The learner; see `rl.types.Learner`. Raises ValueError for integer actions."""
    require(spec, "fql", discrete=False)
    member = mlp.critic(spec, head.size, config.hidden, config.layer_norm, config.network)
    critic = ensemble(member, config.critics)
    policy = flow_policy.make(config, spec, optimiser, config.aggregation)
    optimisers = {
        "critic": build(config.critic_optimiser, config.learning_rate, optimiser),
        **policy.optimisers,
    }

    def init(key: Key, batch: Transition) -> State:
        critic_key, policy_key = jax.random.split(key)
        params = {
            "critic": critic.init(critic_key, batch.observation, batch.action),
            **policy.init(policy_key, batch),
        }
        return start(params, optimisers, targets=["critic"])

    def bootstrap(state: State, observation: Array, key: Key) -> Array:
        """The outputs [..., K] with which a target continues."""
        q = critic.apply(state.target["critic"], observation, act(state, observation, key))
        return bellman.MEMBERS[config.aggregation](head, q)

    def update(state: State, batch: Transition, key: Key) -> tuple[State, Metrics]:
        next_key, policy_key = jax.random.split(key)
        backup = (
            batch.reward,
            config.discount * batch.discount,
            bootstrap(state, batch.next_observation, next_key),
        )
        target = head.target(*backup)

        def loss(params):
            q = critic.apply(params["critic"], batch.observation, batch.action)
            critic_loss = losses.critics(head, q, target)
            values = lambda action: critics(state, batch.observation, action)
            policy_loss, policy_metrics = policy.loss(params, state, batch, policy_key, values)
            metrics = {
                "critic_loss": critic_loss,
                "q": head.value(q).mean(),
                "clipped": head.clipped(*backup).mean(),
                **policy_metrics,
            }
            return critic_loss + policy_loss, metrics

        gradients, metrics = jax.grad(loss, has_aux=True)(state.params)
        state = descend(follow(state, config.target_rate), gradients, optimisers)
        return state._replace(step=state.step + 1), metrics

    def act(state: State, observation: Array, key: Key) -> Array:
        return policy.act(state, observation, key, lambda action: critics(state, observation, action))

    def value(state: State, observation: Array, key: Key) -> Array:
        return head.value(bootstrap(state, observation, key))

    def critics(state: State, observation: Array, action: Array) -> Array:
        return head.value(critic.apply(state.params["critic"], observation, action))

    learner = Learner(init, update, act, value, explore=act, critics=critics)
    return augmented(learner, spec, config.network)


unused = flow_policy.unused
