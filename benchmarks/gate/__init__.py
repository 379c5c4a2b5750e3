"""The gate: is head slower than base? It runs a suite of benchmarks, and imports nothing of it."""
