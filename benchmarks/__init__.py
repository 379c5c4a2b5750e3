"""pytest benchmarks/: the benchmarks, and what turns their results into tables and figures."""
