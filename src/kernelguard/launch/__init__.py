"""Hand over to torchrun, Slurm, Kubeflow, ...: an admission becomes a job of an engine that people already use."""
