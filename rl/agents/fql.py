"""Flow Q-learning (FQL: Park, Li & Levine, ICML 2025): a policy of one step, distilled from a cloned flow.

With critics ``Q_i``, their slow copies ``Q'_i``, noise z, z' ~ N(0, I) and time t ~ U[0, 1]:

    L_Q  = E_D[ sum_i loss_Qi(r + gamma d agg_i Q'_i(s', pi(s', z'))) ],   agg: the mean, or the minimum
    L_v  = E_D[ (v(s, x_t, t) - (a - z))^2 ],   x_t = (1 - t) z + t a
    L_pi = E_D[ alpha (pi(s, z) - flow(s, z))^2 - mean_i Q_i(s, pi(s, z)) ]

where ``loss`` is the head's: squared error in the paper; flow(s, z) is where ``v`` carries z in 10 steps
(`rl.networks.flow`), and has no gradient. The flow clones the data, and is never driven by a critic; the policy stays
close to it for each z, and acts with a fresh one.

Paper and code. Where they differ this is the code: squared distances are means over action dimensions, which alpha has
been tuned for (the paper's are sums); flow(s, z) is clipped to the box, and pi(s, z) where a critic sees it, but not in
the distance; the policy ascends the mean of the critics also where targets
take the minimum; targets follow the critics *before* each update. ``normalize_q`` divides Q by its mean size, as the
code offers, and advises for tasks without a tuned alpha (0.03 to 10 then).

Q-chunking (QC: Li, Zhou & Levine 2025) is this agent on chunks of actions (``--chunk=5``, `rl.replay.chunks`). Its own
version has no policy of one step (``extraction=best_of``): pi(s) is the best of N draws of the flow, by the
critics' ``aggregation``, both where it acts and in L_Q, where critics choose and their slow copies value what is
chosen. ``alpha``, ``normalize_q`` and ``policy_optimiser`` are not used then. With the distilled policy it is QC-FQL.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import optax

from rl import nest
from rl.agents.optimisers import Adam, Optimiser, build
from rl.agents.state import augmented, descend, follow, require, require_ranges, start
from rl.networks import flow, mlp
from rl.networks.base import ensemble
from rl.networks.layers import OGBENCH, Architecture, require_choices
from rl.types import Array, Key, Learner, Metrics, Params, Spec, State, Transition
from rl.values import bellman, losses
from rl.values.heads import ValueHead

EXTRACTIONS = ("distilled", "best_of")


@dataclasses.dataclass(frozen=True)
class Config:
    """Hyper-parameters; defaults are those of the authors' code."""

    discount: float = 0.99  # gamma
    alpha: float = 10.0  # weight of distillation against Q, to be tuned for each task
    aggregation: str = "mean"  # of the critics in targets, and for best_of: mean or min
    extraction: str = "distilled"  # of the policy from the flow: distilled, or best_of, the best of its draws
    candidates: int = 32  # N, draws of the flow where extraction is best_of
    normalize_q: bool = False  # divide Q by its mean size over the batch: alpha is then without a unit
    flow_steps: int = 10  # that carry noise to an action
    integrator: str = "euler"  # of the flow: euler or midpoint
    target_rate: float = 0.005  # Polyak step of the critics' slow copy
    learning_rate: float = 3e-4  # Adam, all networks
    critics: int = 2  # members of the critic ensemble
    hidden: tuple[int, ...] = (512, 512, 512, 512)  # widths of every network's layers
    layer_norm: bool = True  # in the critics
    network: Architecture = OGBENCH  # of every network
    critic_optimiser: Adam = Adam()  # of the critics
    flow_optimiser: Adam = Adam()  # of the flow
    policy_optimiser: Adam = Adam()  # of the policy of one step

    def __post_init__(self) -> None:
        require_ranges(self)
        require_choices(self, {"aggregation": bellman.MEMBERS, "extraction": EXTRACTIONS})
        flow.require_candidates(self.candidates)
        flow.require_steps(self.flow_steps, self.integrator)


def make(config: Config, spec: Spec, head: ValueHead, optimiser: Optimiser = optax.adam) -> Learner:
    """The learner; see `rl.types.Learner`. Raises ValueError for integer actions."""
    require(spec, "fql", discrete=False)
    member = mlp.critic(spec, head.size, config.hidden, config.layer_norm, config.network)
    critic = ensemble(member, config.critics)
    velocity = flow.velocity(spec, config.hidden, config.network)
    policy = flow.one_step(spec, config.hidden, config.network)
    distilled = config.extraction == "distilled"
    optimisers = {
        "critic": build(config.critic_optimiser, config.learning_rate, optimiser),
        "flow": build(config.flow_optimiser, config.learning_rate, optimiser),
    }
    if distilled:
        optimisers["policy"] = build(config.policy_optimiser, config.learning_rate, optimiser)

    def init(key: Key, batch: Transition) -> State:
        keys = jax.random.split(key, 3)
        params = {
            "critic": critic.init(keys[0], batch.observation, batch.action),
            "flow": velocity.init(keys[1], batch.observation, batch.action),
        }
        if distilled:
            params["policy"] = policy.init(keys[2], batch.observation, batch.action)
        return start(params, optimisers, targets=["critic"])

    def bootstrap(state: State, observation: Array, key: Key) -> Array:
        """The outputs [..., K] with which a target continues."""
        q = critic.apply(state.target["critic"], observation, act(state, observation, key))
        return bellman.MEMBERS[config.aggregation](head, q)

    def update(state: State, batch: Transition, key: Key) -> tuple[State, Metrics]:
        next_key, flow_key, noise_key, *dropout_keys = jax.random.split(key, 5)
        backup = (
            batch.reward,
            config.discount * batch.discount,
            bootstrap(state, batch.next_observation, next_key),
        )
        target = head.target(*backup)

        def loss(params):
            q = critic.apply(params["critic"], batch.observation, batch.action)
            critic_loss = losses.critics(head, q, target)

            field = velocity.apply(params["flow"], batch.observation, key=dropout_keys[0])
            flow_loss = flow.loss(field, batch.action, flow_key).mean()

            policy_loss, of_policy = improvement(params, state, batch, noise_key, dropout_keys[1])
            metrics = {
                "critic_loss": critic_loss,
                "flow_loss": flow_loss,
                "q": head.value(q).mean(),
                "clipped": head.clipped(*backup).mean(),
                **of_policy,
            }
            return critic_loss + flow_loss + policy_loss, metrics

        gradients, metrics = jax.grad(loss, has_aux=True)(state.params)
        state = descend(follow(state, config.target_rate), gradients, optimisers)
        return state._replace(step=state.step + 1), metrics

    def improvement(
        params: Params, state: State, batch: Transition, noise_key: Key, dropout_key: Key
    ) -> tuple[Array | float, Metrics]:
        """The loss of the distilled policy, if there is one, and what to report of it."""
        if not distilled:
            return 0.0, {}
        noise = jax.random.normal(noise_key, batch.action.shape)
        field = velocity.apply(state.params["flow"], batch.observation)
        cloned = jnp.clip(flow.sample(field, noise, config.flow_steps, config.integrator), -1.0, 1.0)
        action = policy.apply(params["policy"], batch.observation, key=dropout_key)(noise)
        distillation = flow.distillation(action, cloned).mean()
        q = critics(state, batch.observation, jnp.clip(action, -1.0, 1.0)).mean(0)
        scale = losses.q_scale(q) if config.normalize_q else 1.0
        loss = config.alpha * distillation - scale * q.mean()
        return loss, {"policy_loss": loss, "distillation": distillation, "policy_q": q.mean()}

    def act(state: State, observation: Array, key: Key) -> Array:
        shape = (*nest.leading(observation, spec.observation_shape), spec.action_size)
        if not distilled:
            field = velocity.apply(state.params["flow"], observation)
            actions = flow.draws(field, key, config.candidates, shape, config.flow_steps, config.integrator)
            q = critics(state, observation, actions)
            return flow.best_of(actions, bellman.aggregate_values(q, config.aggregation, 0.0))
        noise = jax.random.normal(key, shape)
        return jnp.clip(policy.apply(state.params["policy"], observation)(noise), -1.0, 1.0)

    def value(state: State, observation: Array, key: Key) -> Array:
        return head.value(bootstrap(state, observation, key))

    def critics(state: State, observation: Array, action: Array) -> Array:
        return head.value(critic.apply(state.params["critic"], observation, action))

    learner = Learner(init, update, act, value, explore=act, critics=critics)
    return augmented(learner, spec, config.network)
