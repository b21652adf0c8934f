"""A training's models: casts, forward, modules and buffers that stay FP32, FSDP2."""
