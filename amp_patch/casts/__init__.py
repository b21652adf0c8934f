"""O1: the casts around torch's functions, with their op lists, rules, wrappers and regions.

Files, the first one to read first:

- `oplists.py`: the op lists, which give the cast rule of each torch function at O1: owner -> rule -> names
- `apex_oplists.py`: the op lists that `Policy.op_lists="apex"` selects, as differences from OPLISTS (oplists.py)
- `rules.py`: the cast rules that the op lists name: for each rule a function that casts the arguments of one call
  and makes it
- `wrappers.py`: the wrappers that replace torch's functions while casts are installed: C callables, or Python
  functions
- `install.py`: installation of O1's casts: it replaces torch's functions by wrappers, and restores them
- `regions.py`: regions: context managers that make one policy's casts act on this thread
- `state.py`: the policy whose casts act on this thread, the process default, and the cached casts of weights
- `thread_state.py`: state of one thread: the regions that it is in, and the torch.autocasts around them
- `autocast.py`: `amp.autocast` and `amp.disable_casts`: the casts of O1, on or off, in regions that user code
  enters
- `functions.py`: decorators and custom_fwd for users' functions
- `cpu_half.py`: emulation on a CPU
- `low_sums.py`: sums that torch makes in low precision there
- `low_bit.py`: emulated products in FP8 and FP4 (O6, O7): both operands are rounded by a recipe (formats.py), sums
  are in FP32
- `formats.py`: rounding of tensors to FP8 and FP4 for the emulated products of O6 and O7: formats, recipes and
  scales
- `upcast.py`: FP32 computation for which autograd saves the low operands
- `mixed_operands.py`: O1's rules for calls that mix types
- `in_fp32.py`: calls in FP32 of functions whose low-precision kernels give wrong results or sums (`normalize`, for
  example)
- `lean_loss.py`: `cross_entropy` of FP16 and BF16 logits, in FP32 and without FP32 copies of the logits
- `dynamo.py`: the casts inside torch.compile: while Dynamo traces, the casts of patched functions become nodes of
  its graph
- `traced_calls.py`: calls of wrapped functions in code that torch.compile traces: Dynamo traces the wrapper's rule
  and the original
- `traced_regions.py`: regions in code that torch.compile traces
"""
