"""What many test files share: where the development data lies, and compiled programs from one run to the next."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import hashlib
import math
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

XLA_FLAGS = (
    # XLA's older code generator for CPUs, up to JAX 0.10: it compiles these small programs in a third of the time.
    "--xla_cpu_use_fusion_emitters=false",
    # Programs in one piece, not in 32 for as many threads: the workers keep the cores busy.
    "--xla_cpu_parallel_codegen_split_count=1",
)
CACHE_BYTES = 2 * 2**30
RESIDENT_BYTES = 1.25 * 2**30


def pytest_configure(config: pytest.Config) -> None:
    """Sets up the compiler, through the environment: processes that tests start, and xdist's workers, share it."""
    if not hasattr(config, "workerinput"):
        if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
            folder = programs()
            with contextlib.suppress(OSError):  # where it cannot be written, everything is compiled each time
                folder.mkdir(parents=True, exist_ok=True)
                trim(folder, CACHE_BYTES)
                os.environ["JAX_COMPILATION_CACHE_DIR"] = str(folder)
        os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
        # Most programs here run for less time than XLA would take to optimise them.
        os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
        # On a GPU products of float32 are rounded to TF32 by default, which no tolerance here allows for.
        if Path("/dev/nvidia0").exists():
            os.environ.setdefault("JAX_DEFAULT_MATMUL_PRECISION", "highest")
            os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # xdist's workers share it
        if "XLA_FLAGS" not in os.environ:
            os.environ["XLA_FLAGS"] = " ".join(flag for flag in XLA_FLAGS if accepts(flag))
    # Tracing makes many objects that live long, which the collector would visit again and again.
    gc.set_threshold(100_000, 20, 100)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--first-case", action="store_true", help="of every parametrised test only its first case"
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--first-case"):
        first: dict[str, pytest.Item] = {}
        for item in items:
            first.setdefault(item.nodeid.partition("[")[0], item)
        chosen = set(first.values())
        config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
        items[:] = [item for item in items if item in chosen]


def programs() -> Path:
    """The folder of compiled programs, outside the checkout; each kind of processor has one, as they are native."""
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    features = [line for line in lines if line.startswith(("flags", "Features", "model name"))][:2]
    processor = hashlib.sha256("".join([platform.machine(), *features]).encode()).hexdigest()[:12]
    return home / "headway" / "jax" / processor


def trim(folder: Path, limit: int) -> None:
    """Deletes the programs that were not read for longest, until the rest takes at most ``limit`` bytes.

    JAX can bound its cache itself, but then looks at every file whenever it adds one.
    """
    files = sorted(((path, path.stat()) for path in folder.iterdir()), key=lambda file: -file[1].st_atime)
    total = 0
    for path, stat in files:
        total += stat.st_size
        if total > limit:
            path.unlink(missing_ok=True)


def accepts(flag: str) -> bool:
    """Whether XLA knows the flag: it ends the process where it does not."""
    start = [sys.executable, "-c", "from jaxlib import xla_client; xla_client.make_cpu_client()"]
    return subprocess.run(start, env={**os.environ, "XLA_FLAGS": flag}, capture_output=True).returncode == 0


@pytest.fixture(scope="module", autouse=True)
def forget_programs() -> Iterator[None]:
    """Drops compiled programs after a module where they take much memory, or a process would come to hold them all."""
    yield
    if "jax" in sys.modules and resident_bytes() > RESIDENT_BYTES:
        sys.modules["jax"].clear_caches()
        gc.collect()
        libc = ctypes.CDLL(None)
        if hasattr(
            libc, "malloc_trim"
        ):  # glibc keeps memory that was freed, where it lies between other memory
            libc.malloc_trim(0)


def resident_bytes() -> float:
    """What this process holds of the machine's memory; infinite where the system does not say."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return math.inf


@pytest.fixture(autouse=True)
def blank_pictures(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pictures are drawn, but rendered in tests marked ``rendered`` alone: most runs end with one, of 0.3 seconds."""
    if request.node.get_closest_marker("rendered") is None:
        from rl.plot import style

        monkeypatch.setattr(style, "save", lambda figure, path: Path(path).write_bytes(b"\x89PNG"))


@pytest.fixture(autouse=True)
def optimise(request: pytest.FixtureRequest) -> Iterator[None]:
    """Tests marked ``optimised`` run for long enough to be worth XLA's optimisations."""
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
