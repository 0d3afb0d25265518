"""The engines that a job can be handed to. A new one is a file in this folder and a row here."""

from __future__ import annotations

from collections.abc import Mapping

from kernelguard.launch.air import Air
from kernelguard.launch.job import Engine
from kernelguard.launch.kubeflow import Kubeflow
from kernelguard.launch.slurm import Slurm
from kernelguard.launch.torchrun import Torchrun

ENGINES: Mapping[str, Engine] = {engine.name: engine for engine in (Torchrun(), Slurm(), Kubeflow(), Air())}
