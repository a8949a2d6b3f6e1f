"""Convolutions over images [..., H, W, C] of uint8, and their random shifts. Pixels are divided by 255."""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp

from rl.networks import layers
from rl.types import Array, Key


class Nature(nn.Module):
    """The convolutions of Mnih et al. (2015): image [..., H, W, C] -> features [..., F].

    Padded, as in Dopamine's JAX code, whose protocol the presets for Atari follow: 84 x 84 pixels become 11 x 11 x 64
    features. In the paper, without padding, they become 7 x 7 x 64.
    """

    initialiser: str

    @nn.compact
    def __call__(self, image: Array) -> Array:
        x = image.astype(jnp.float32) / 255.0
        for features, size, stride in ((32, 8, 4), (64, 4, 2), (64, 3, 1)):
            x = nn.relu(_conv(x, features, size, self.initialiser, stride))
        return x.reshape(*x.shape[:-3], -1)


class Impala(nn.Module):
    """The residual convolutions of Espeholt et al. (2018), figure 3: image [..., H, W, C] -> features [..., F]."""

    initialiser: str

    @nn.compact
    def __call__(self, image: Array) -> Array:
        x = image.astype(jnp.float32) / 255.0
        for features in (16, 32, 32):
            x = _conv(x, features, 3, self.initialiser)
            x = nn.max_pool(x, (3, 3), (2, 2), padding="SAME")
            for _ in range(2):
                y = _conv(nn.relu(x), features, 3, self.initialiser)
                x = x + _conv(nn.relu(y), features, 3, self.initialiser)
        return nn.relu(x).reshape(*x.shape[:-3], -1)


def _conv(x: Array, features: int, size: int, initialiser: str, stride: int = 1) -> Array:
    """Call it in a compact module only."""
    kernel, bias = layers.start(initialiser, size * size * x.shape[-1])
    return nn.Conv(features, (size, size), stride, kernel_init=kernel, bias_init=bias)(x)


def random_shift(images: Array, key: Key, pad: int) -> Array:
    """Each image moved by up to ``pad`` pixels along both axes, all directions alike; edges are repeated.

    The augmentation of DrQ (Kostrikov, Yarats & Fergus, 2021), with ``pad`` 4 there.

    Args:
      images: [B, H, W, C]; all channels of an image move together.
      key: of the draws.
      pad: pixels.
    """
    offsets = jax.random.randint(key, (len(images), 2), 0, 2 * pad + 1)
    padded = jnp.pad(images, ((0, 0), (pad, pad), (pad, pad), (0, 0)), mode="edge")

    def crop(image: Array, offset: Array) -> Array:
        return jax.lax.dynamic_slice(image, (offset[0], offset[1], 0), images.shape[1:])

    return jax.vmap(crop)(padded, offsets)
