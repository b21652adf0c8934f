"""Support for DDP, FSDP2, ZeRO, optimizer wrappers, CUDA graphs, and several optimizers in one training."""
