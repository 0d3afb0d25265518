"""The bundled FSDP2 trainer: supervised fine-tuning of causal transformers models, readable top to bottom.

Start with `train.py`. It reads like a table of contents; every other module answers one question that it asks.
Nothing here imports kernelguard: the trainer works alone.
"""
