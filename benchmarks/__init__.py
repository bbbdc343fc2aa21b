"""Benchmarks of the engine alone: latency, throughput, and the machine's ceilings."""
