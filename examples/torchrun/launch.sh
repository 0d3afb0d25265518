#!/bin/bash
# What `kernelguard launch LOCK --on torchrun --dry-run` prints, and writes into the run directory with the
# ticket of a real job. Made by tools/launch_examples.py.
exec /shared/env/bin/python /shared/runs/qwen-sft/site/kernelguard/launch/supervisor.py --ticket /shared/runs/qwen-sft/ticket.json --node-rank 0 --nnodes 1 --stop-within 600 -- /shared/env/bin/python -m torch.distributed.run --nproc-per-node 8 --max-restarts 0 --standalone -m kernelguard.guard -- train.py --lr 1e-5
