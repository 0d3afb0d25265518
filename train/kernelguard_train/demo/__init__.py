"""A tiny Qwen3.5 and a small chat set, made on the spot: what `make demo-train` trains."""
