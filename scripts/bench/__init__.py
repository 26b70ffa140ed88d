"""Benchmarks on CPUs. Each prints its table below the command and the machine that made it."""
