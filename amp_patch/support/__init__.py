"""General tools on torch's objects: patches with undo, generated classes, containers, compiled and distributed code.

Files, the first one to read first:

- `patches.py`: patches: replacements of attributes, in torch mostly, that can be undone exactly
- `generated_class.py`: generated subclasses, which override methods of one instance (a model, an optimizer)
  without rebinding any method
- `tree.py`: nested containers
- `interrupts.py`: functions that Ctrl-C does not interrupt
- `blocks.py`: context managers
- `files.py`: atomic writes
- `compiled.py`: marks for `torch.compile`
- `distributed.py`: helpers for torch.distributed: the local shard of a DTensor, and overflow flags reduced over
  all ranks
- `devices.py`: lists grouped by device, devices without FP64
- `device_sync.py`: reads of device values by the host: which of them sync, and whether a CUDA graph capture
  forbids them
- `fsdp.py`: queries about modules that torch's `fully_shard` (FSDP2) has sharded: their parameters and unreduced
  gradients
- `flat_rnn.py`: weights of recurrent networks in one block
- `tensor_content.py`: hooks when the content is replaced
- `forward_hook.py`: hooks that call a callback when a model's forward begins, for compiled models too
- `imports.py`: callbacks for later imports
- `held_names.py`: replacement of a function in all places that hold it
- `quantized.py`: recognition of tensors with quantized values: integers, FP8, and the types of bitsandbytes and
  torchao
- `random_states.py`: states of the global random generators
- `reach.py`: the leaf tensors that a graph's backward reaches
- `scripts_line.py`: the user's line for warnings
- `words.py`: words of error texts
"""
