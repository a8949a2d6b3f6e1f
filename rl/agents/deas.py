"""DEAS (ICLR 2026, arXiv 2510.07730): IQL on chunks of actions with two discounts and a distributional value.

For chunks of H actions (``--chunk=H``), critics ``Q_i``, target critics ``Q'_i``, expectile ``tau``:

    R    = sum_k g_1^k r_k                                              rewards within the chunk
    L_Q  = E_D[ sum_i CE( HLG(R + g_2^H d V(s_H)), p_Qi ) ]
    L_V  = E_D[ - |tau - 1(u < 0)| sum_j p_Q'(j) log p_V(j) ],          u = Q'(s, a) - V(s)
    L_pi = E_D[ (v(s, x_t, t) - (a - z))^2 ],   x_t = (1 - t) z + t a   flow, which clones chunks

    a(s) = argmax_j min_i Q_i(s, a_j),   a_1, ..., a_N: draws of the flow v

``Q'`` is the slow critic of smaller value, ``p`` a categorical distribution, and ``HLG`` HL-Gauss with a deviation of
0.75 bins: published with ``--head=hl_gauss``. Any head will do here: the target of V is what the slow critic says, a
distribution where the head has one and else a value (`rl.values.heads.same_distribution`). V is detached from the
policy: it is fitted to logged chunks, and no action of the policy enters a target.

A small ``g_1`` keeps the returns within a chunk short, and with them the support of the head, while ``g_2`` near 1
looks far ahead. With single actions g_1 has no effect. All else is `rl.agents.ifql`.

The authors have published two programs, which were read in part. That for robots (DEAS-Isaac-GR00T) takes the smaller
critic, 101 atoms, and an expectile of 0.7 or 0.9. That for OGBench (DEAS-FQL) has FQL's distilled policy in place of
the best of N, with an ``alpha`` of 300 (``extraction=distilled``, ``alpha=300``; which mean of the critics it ascends
was not read, and is FQL's here), and ``g_2`` = 0.99 on cube-double; its ``tau`` and the sizes of its networks were not
read, and are IFQL's here.
"""

from __future__ import annotations

import dataclasses

import optax

from rl.agents import ifql
from rl.agents.optimisers import Optimiser
from rl.agents.requirements import require
from rl.types import Learner, Spec
from rl.values import heads
from rl.values.heads import ValueHead


@dataclasses.dataclass(frozen=True)
class Config(ifql.Config):
    """Hyper-parameters; discounts are the paper's, all else IFQL's."""

    discount: float = 0.999  # g_2, of one step, from chunk to chunk
    chunk_discount: float = 0.9  # g_1, of rewards within a chunk: batches are made with it


def make(config: Config, spec: Spec, head: ValueHead, optimiser: Optimiser = optax.adam) -> Learner:
    """The learner; see `rl.types.Learner`. Raises ValueError for integer actions."""
    require(spec, "deas", discrete=False)
    return ifql.learner(config, spec, head, optimiser, heads.same_distribution)


unused = ifql.unused
