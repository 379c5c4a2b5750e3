"""Preparation of numba at import, only for the server from which workers are forked."""

from omearrow_ds.kernels.compiled import ready

ready()
