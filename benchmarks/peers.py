"""The same algorithms, of the same sizes, in the library that a user would pick instead.

d3rlpy is no dependency of this project: it pins gymnasium 1.0.0. What is timed here runs with the current one.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import io
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from rl.replay.dataset import Dataset

AGENTS = ("iql", "cql")


def missing() -> str | None:
    """Why d3rlpy cannot be timed here and how to change that, or None if it can."""
    try:
        with _quiet():
            import d3rlpy  # noqa: F401
    except ImportError as error:
        return f"d3rlpy is left out ({error}); `make bench` installs it"
    return None


def versions() -> dict[str, str]:
    """Versions of what is timed here."""
    return {name: importlib.metadata.version(name) for name in ("d3rlpy", "torch")}


def buffer(dataset: Dataset) -> Any:
    """The dataset of NumPy arrays as a replay buffer of d3rlpy."""
    import d3rlpy

    steps = dataset.transitions
    with _quiet():
        return d3rlpy.dataset.MDPDataset(
            steps.observation,
            steps.action,
            steps.reward,
            terminals=np.float32(steps.discount == 0),
            timeouts=np.float32(dataset.last & (steps.discount > 0)),  # it refuses steps that are both
            action_space=d3rlpy.ActionSpace.CONTINUOUS,
        )


def updates(agent: str, hidden: Sequence[int], batch_size: int, data: Any) -> dict[str, Callable[[], Any]]:
    """{name in the table: one update that is finished when it returns}.

    ``d3rlpy`` samples and updates, as ``fit`` does; its ``fit`` also keeps books. ``d3rlpy, one batch`` repeats the
    update on the same batch. Where torch finds a GPU it is used, and ``d3rlpy, CUDA graph`` has ``compile_graph`` on.

    Args:
      agent: one of `AGENTS`.
      hidden: widths of every network's layers.
      batch_size: transitions per update.
      data: from `buffer`.
    """
    import torch

    device = "cuda:0" if torch.cuda.is_available() else "cpu"
    with _quiet():
        learner = _learner(agent, hidden, batch_size, data, device, compile_graph=False)
        batch = data.sample_transition_batch(batch_size)
        calls = {
            "d3rlpy": lambda: learner.update(data.sample_transition_batch(batch_size)),
            "d3rlpy, one batch": lambda: learner.update(batch),
        }
        if device != "cpu":
            graph = _learner(agent, hidden, batch_size, data, device, compile_graph=True)
            calls["d3rlpy, CUDA graph"] = lambda: graph.update(data.sample_transition_batch(batch_size))
    return calls


def _learner(
    agent: str, hidden: Sequence[int], batch_size: int, data: Any, device: str, *, compile_graph: bool
) -> Any:
    import d3rlpy

    encoder = d3rlpy.models.VectorEncoderFactory(hidden_units=list(hidden))
    common = {
        "batch_size": batch_size,
        "actor_encoder_factory": encoder,
        "critic_encoder_factory": encoder,
        "compile_graph": compile_graph,
    }
    if agent == "iql":
        config = d3rlpy.algos.IQLConfig(value_encoder_factory=encoder, **common)
    else:
        # Without the Lagrange multiplier, which is off here by default too.
        config = d3rlpy.algos.CQLConfig(alpha_learning_rate=0.0, **common)
    learner = config.create(device=device)
    learner.build_with_dataset(data)
    return learner


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keeps what d3rlpy logs, and what gym says of its own age, out of the table."""
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        yield
