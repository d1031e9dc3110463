"""How many threads the work of this process may take."""

import os


def n_threads() -> int:
    """Processors of this process, or fewer where ``OMP_NUM_THREADS`` says so.

    The jobs of a parallel sweep share the machine: its launcher gives each its part by that name,
    which the libraries underneath heed too.
    """
    is_linux = hasattr(os, "sched_getaffinity")
    n = len(os.sched_getaffinity(0)) if is_linux else os.cpu_count() or 1
    asked = os.environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    return min(n, int(asked)) if asked.isdecimal() and int(asked) > 0 else n
