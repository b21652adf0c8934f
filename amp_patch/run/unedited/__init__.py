"""Training of unedited scripts, which use torch alone, at an opt level.

Files:

- `script.py`: replaces `backward` and `step` of the script's optimizers; start here
- `source.py`: scripts that choose their precision by amp_patch or Apex
- `refusal.py`: the error, with the lines to add; optimizers whose closure cannot be run before `step()`
- `native.py`: torch.autocast and GradScaler of the script: disabled or kept; state dicts of disabled GradScalers
- `called_alone.py`: calls that mix FP32 with low-precision weights
- `direct_forwards.py`: direct calls of `module.forward(x)`
- `decisions.py`: FP32 for NumPy arrays of outputs, binary_cross_entropy and averages of weights
- `loose_tensors.py`: trained tensors outside of any model
- `pickles.py`: files that the script saves
- `empty_loaders.py`: loaders without a batch
- `exports.py`: exports of a model in training
- `handmade.py`: updates without an optimizer
- `processes.py`: child processes, and memory that processes share
"""
