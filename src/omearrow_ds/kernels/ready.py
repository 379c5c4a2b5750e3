"""Makes numba ready where it is imported, which the server does that workers are forked from, and nothing else."""

from omearrow_ds.kernels.compiled import ready

ready()
