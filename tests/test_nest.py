"""rl.nest: trees of dicts alone, whatever their leaves are; and who refuses them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from rl import fitted_q, model_based, nest
from rl.dynamics import ensemble
from rl.replay import frames, ring
from rl.types import Spec
from rl.values import heads

SHAPE = {"state": {"position": (3,), "goal": (2,)}, "image": (8, 8, 1)}
SPEC = Spec({"state": (3,)}, 2)  # as many entries as a vector has axes


def test_shapes_are_leaves_and_keys_are_sorted() -> None:
    arrays = nest.map_structure(lambda shape: np.zeros((4, 5, *shape)), SHAPE)
    assert list(arrays) == ["image", "state"] and arrays["state"]["goal"].shape == (4, 5, 2)
    assert nest.leaves(SHAPE) == [(8, 8, 1), (2,), (3,)]
    assert nest.leading(arrays, SHAPE) == nest.leading(arrays["image"], (8, 8, 1)) == (4, 5)
    assert list(nest.named("o", SHAPE)) == ["o['image']", "o['state']['goal']", "o['state']['position']"]
    assert nest.map_structure(lambda *shapes: shapes, (3,), (2,)) == ((3,), (2,))
    twice = nest.concatenate(arrays, arrays)
    assert nest.leading(twice, SHAPE) == (8, 5)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (
            lambda: fitted_q.estimator(lambda *_: None, SPEC, heads.scalar()),
            "fitted-Q evaluation takes one array .* dictionary of state: .*FlattenObservation.*flatten_observations",
        ),
        (lambda: ensemble.make(ensemble.Config(), SPEC), "a dynamics ensemble takes one array"),
        (
            lambda: model_based.target_range(
                model_based.Config(uncertainty="aleatoric", penalty=1.0), 0.9, SPEC, 0.0, 1.0
            ),
            "a dynamics ensemble takes one array",
        ),
        (
            lambda: frames.compress(
                ring.Row({"screen": np.zeros((8, 8, 4), np.uint8)}, 0, 0, 0, {}, True), 4
            ),
            "not of the dictionary screen: keep whole steps",
        ),
    ],
)
def test_what_reads_one_array_refuses_dictionaries(build: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build()
