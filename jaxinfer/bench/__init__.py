"""Measuring the engine: fixed workloads in, figures with everything that they depend on out.

Knows the faces of the engine (`LLM`, the HTTP API, the scheduler) and changes nothing in them. Each
module is one benchmark or one ingredient; the command line is in `jaxinfer.cli_bench`.
"""
