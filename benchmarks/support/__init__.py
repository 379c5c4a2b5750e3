"""Support of benchmarks: data, workloads, references, controls, and the recorder of results."""
