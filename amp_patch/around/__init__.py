"""Support for DDP, FSDP2, ZeRO, optimizer wrappers, CUDA graphs, and several optimizers in one training.

Files, the first one to read first:

- `ddp.py`: support for torch's DataParallel and DistributedDataParallel: masters and loss scales follow the weights
- `fsdp.py`: `fsdp_policy`, and refusals for `fully_shard` (`support/fsdp.py` reads its state)
- `zero_redundancy.py`: support for torch's ZeroRedundancyOptimizer: each process steps its share of the parameters
- `wrappers.py`: two backward passes before one step, as in SAM
- `shared_backward.py`: trainings with other optimizers, or with parameters in no optimizer
- `captured.py`: a step in a CUDA graph
- `named_states.py`: state dicts of torch.distributed.checkpoint
"""
