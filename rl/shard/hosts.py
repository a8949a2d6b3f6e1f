"""The processes of one run: how they find each other, and which one writes."""

from __future__ import annotations

import contextlib
import os

import jax

# How launchers that `jax.distributed` can read say that they started several processes.
_PROCESS_COUNTS = ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE")


def initialize() -> None:
    """Joins this process to the others of its run; does nothing where there is only one.

    Call it first, before anything asks JAX for a device. Found without help: TPU pods (every host runs the
    same command), ``srun`` and ``mpirun`` (one process per accelerator, unless ``JAX_LOCAL_DEVICE_IDS`` says
    otherwise). Anywhere else set ``JAX_COORDINATOR_ADDRESS`` (host:port of process 0),
    ``JAX_NUM_PROCESSES`` and ``JAX_PROCESS_ID`` for each process.

    Raises:
      ValueError: if only some of the three variables are set, or one is not a number.
    """
    if jax.distributed.is_initialized():
        return
    address = os.environ.get("JAX_COORDINATOR_ADDRESS")
    if address:
        jax.distributed.initialize(address, _number("JAX_NUM_PROCESSES"), _number("JAX_PROCESS_ID"))
    elif any(int(os.environ.get(name, 1)) > 1 for name in _PROCESS_COUNTS):
        jax.distributed.initialize()
    elif "tpu" in (getattr(jax.config, "jax_platforms", None) or ""):  # JAX writes it where it finds TPUs
        with contextlib.suppress(ValueError):  # a TPU in no cluster, as in a notebook
            jax.distributed.initialize()


def _number(variable: str) -> int:
    value = os.environ.get(variable, "")
    if not value.isdigit():
        raise ValueError(
            f"JAX_COORDINATOR_ADDRESS is set, so {variable} must be a number, not {value!r}: set it for every "
            "process, or unset JAX_COORDINATOR_ADDRESS to run a single one"
        )
    return int(value)


def is_main() -> bool:
    """True in the one process that writes logs and result files."""
    return jax.process_index() == 0
