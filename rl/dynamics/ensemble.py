"""An ensemble of networks that predict the next observation and the reward.

Chua et al. (2018, PETS) and Janner et al. (2019, MBPO), in the form of RAVL (Sims et al., NeurIPS 2024). Settings
are in `rl.dynamics.config`, the networks and their predictions in `rl.dynamics.network`; what is learned from in
`rl.dynamics.rows`, what is minimised in `rl.dynamics.loss`, and how in `rl.dynamics.fit`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

from rl.dynamics import fit, network
from rl.dynamics.base import Dynamics
from rl.dynamics.config import Config, check
from rl.dynamics.loss import LIKELIHOOD, Loss
from rl.dynamics.network import Model
from rl.types import Key, Spec

__all__ = ["Config", "Ensemble", "Loss", "Model", "make"]


class Ensemble(NamedTuple):
    """An architecture; ``fit`` alone runs on the host."""

    init: Callable[[Key], Model]  # parameters before fitting
    fit: Callable[..., Model]  # see `make`
    # the world as a fitted `Model` has it: answers are those of the elites, [M], and a step is of a random one each
    dynamics: Dynamics


def make(config: Config, spec: Spec, loss: Loss = LIKELIHOOD) -> Ensemble:
    """The ensemble for observations and actions of ``spec``.

    ``fit(data, key, model=None, context=())`` learns it and returns a `Model`:

    - ``data``: a `rl.replay.dataset.Dataset`; or a `rl.replay.ring.Ring` of rows with the fields of a
      `rl.types.Transition`, of which only those that are filled are looked at. With keys [S], a ring may hold rows
      [S, C], of each key its own.
    - ``key``: of the initial parameters, bootstrap samples and batches. With keys [S], S models come from one program.
    - ``model``: where to continue; by default from fresh parameters. The statistics of its inputs become those of the
      new data, and its first layer is changed so that its predictions stay (`network.restandardize`). The first check
      counts as better than what it was, as in MBPO. Adam's moments start from 0.
    - ``context``: what the loss is given, any pytree; with a leading axis [S] for keys [S], which share single numbers.

    All updates between two checks are one compiled call; a progress bar shows the checks. Rows whose episode terminated
    with no successor logged (their own observation stands there) are left out. The compiled programs belong to the
    ensemble: make it once, and a fit of more rows of the same ring, from a model or with another context compiles
    nothing. ``fit`` raises ValueError for rewards that are not finite, too few rows, a model of other shapes, or a
    context that no loss reads; and FloatingPointError if an elite's error was never finite.

    Args:
      config: hyper-parameters.
      spec: of the environment.
      loss: what members minimise and are judged by; by default the Gaussian likelihood, judged by the squared error of
        the means. `rl.dynamics.value_aware` has those that ask a value function.

    Raises:
      ValueError: a configuration without sense, a loss of variances that the ensemble does not predict, or one that
        leaves those it does without a meaning; or observations that are images or dictionaries.
    """
    check(config, spec)
    _check_loss(config, loss)
    return Ensemble(
        init=functools.partial(network.init, config, spec),
        fit=fit.fitter(config, spec, loss),
        dynamics=Dynamics(
            predict=functools.partial(network.predict, config, spec),
            propose=functools.partial(network.propose, config, spec),
            step=functools.partial(network.step, config, spec),
        ),
    )


def _check_loss(config: Config, loss: Loss) -> None:
    """Raises ValueError where the loss and the members disagree about variances."""
    if loss.variances is None or loss.variances != config.deterministic:
        return
    if loss.variances:
        raise ValueError(
            "this model loss is one of predicted variances, which a deterministic ensemble does not have: choose "
            "deterministic=False, or another loss"
        )
    raise ValueError(
        "this model loss says nothing of variances, which a Gaussian ensemble would predict without ever learning "
        "them: choose deterministic=True, or another loss"
    )
