"""Measurements, each one command: python -m benchmarks.NAME. Ratios of runs that alternate in one process, medians."""
