"""Storage formats for FP32 values other than FP32 tensors: split and stochastic masters, 8-bit optimizer state.

Files, the first one to read first:

- `split_master.py`: FP32 masters stored in two halves: the BF16 weight is the high half, an int16 tensor holds the
  low 16 bits
- `stochastic_master.py`: masters that are stored only as their BF16 weights: a value written into one is rounded
  stochastically to BF16
- `coded_state.py`: a tensor in eight bits
- `coder.py`: the state of an optimizer as such tensors
- `coded_steps.py`: the strategy that steps such state
- `compressed_states.py`: checkpoints with codes
- `host_masters.py`: masters on the host: what the option refuses, and copies of gradients that backward queues
"""
