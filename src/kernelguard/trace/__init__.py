"""What did the GPU really run? Profiler traces -> TraceFacts, for the whole project."""

from kernelguard.trace.names import fast_paths, load_names
from kernelguard.trace.read import read_trace
from kernelguard.trace.values import FastPathTrace, KernelRun, TraceFacts

__all__ = ["FastPathTrace", "KernelRun", "TraceFacts", "fast_paths", "load_names", "read_trace"]
