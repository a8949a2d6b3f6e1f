"""Convolutional networks over images [..., H, W, C] of uint8."""

from __future__ import annotations

from collections.abc import Sequence

import flax.linen as nn
import jax.numpy as jnp

from rl.networks.base import Network, from_linen
from rl.networks.mlp import MLP
from rl.types import Array, Spec


class Nature(nn.Module):
    """The convolutions of Mnih et al. (2015), then an `MLP`; pixels are divided by 255."""

    hidden: Sequence[int]
    outputs: int

    @nn.compact
    def __call__(self, image: Array) -> Array:
        x = image.astype(jnp.float32) / 255.0
        for features, kernel, stride in ((32, 8, 4), (64, 4, 2), (64, 3, 1)):
            x = nn.relu(
                nn.Conv(features, (kernel, kernel), stride, kernel_init=nn.initializers.xavier_uniform())(x)
            )
        return MLP(self.hidden, self.outputs)(x.reshape(*x.shape[:-3], -1))


def action_values(spec: Spec, outputs: int, hidden: Sequence[int]) -> Network:
    """Q of every discrete action: image [..., H, W, C] -> head outputs [..., A, K]; the paper's hidden is (512,)."""
    body = from_linen(Nature(hidden, spec.action_size * outputs))

    def apply(params, image: Array) -> Array:
        flat = body.apply(params, image)
        return flat.reshape((*flat.shape[:-1], spec.action_size, outputs))

    return Network(body.init, apply)
