"""What many test files share: where the development data lies, and compiled programs from one run to the next."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def pytest_configure(config: pytest.Config) -> None:
    # Through the environment, before JAX is imported, so that processes which tests start share it too.
    if getattr(config, "cache", None) is not None:
        os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(config.cache.mkdir("jax")))
        os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
    # Most programs here run for less time than XLA would take to optimise them.
    os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")


@pytest.fixture(autouse=True)
def optimise(request: pytest.FixtureRequest) -> Iterator[None]:
    """Tests marked ``optimised`` train for long enough to be compiled as users' programs are."""
    if request.node.get_closest_marker("optimised") is None:
        yield
        return
    import jax

    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", before)


@pytest.fixture(scope="session")
def data_file() -> Callable[[str], Path]:
    """Finds a file of the development data by its name there; the test is skipped where it is absent.

    It is looked for in the folder ``HEADWAY_DATA``, or else in ``../shared/data`` beside the repository.
    """
    folder = Path(os.environ.get("HEADWAY_DATA", ROOT.parent / "shared" / "data"))

    def find(name: str) -> Path:
        path = folder / name
        if not path.exists():
            pytest.skip(f"no development data {name!r} in {folder} (set HEADWAY_DATA)")
        return path

    return find
