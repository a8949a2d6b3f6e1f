"""What there is to know of the machine without asking JAX."""

from __future__ import annotations

import os


def usable_cores() -> int:
    """The processor's cores that this process may run on, which a container or a cluster may have limited."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
