"""Captured decode steps: a step that runs once with its operators taken down, then without Python.

On an NPU the device's own graphs do that; on a CPU the compiled kernels are recorded with their
arguments. Both read and write memory at fixed addresses.
"""
