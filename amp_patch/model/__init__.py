"""A training's models: casts, forward, modules and buffers that stay FP32, FSDP2.

Files, the first one to read first:

- `forward.py`: the generated classes
- `joints.py`: the events of a forward, for guests
- `edited_dicts.py`: edits that a forward makes in the dicts and objects that it receives: its cast copies are
  copied back
- `mixed_calls.py`: calls with several floating types in a cast model's methods: they are cast as at O1
  (casts/mixed_operands.py)
- `masks.py`: additive attention masks among a cast model's inputs: their casts saturate, so that no finite number
  becomes -inf
- `type_errors.py`: errors and advice for mixed types
- `tensors.py`: checks, and the cast of weights
- `incoming.py`: models that are not FP32 at `initialize`
- `untouched.py`: models at O0
- `of_model.py`: what is stored with a model
- `keep_fp32.py`: choice of the modules that stay FP32 inside a cast model: by the user's rules, batch norms,
  tables of buffers
- `keep_high.py`: choice of the modules whose products stay 16-bit at the levels with FP8 or FP4: by default first
  layer and head
- `kept_module.py`: the class of modules that stay FP32, which get the model's inputs unrounded
- `kept_result.py`: their results, which the next layer gets rounded, and the model's caller in FP32
- `buffers.py`: buffers of a cast model, and their exact FP32 values
- `ranges.py`: weights and buffers that the type cannot hold
- `copies.py`: copies and pickles of cast models
- `fp32_copies.py`: plain FP32 copies
- `saved_activations.py`: activations in eight bits: what autograd saves in a forward is stored as codes
- `averages.py`: averages of a cast model's weights: torch's AveragedModel reads the FP32 masters, and `lerp`
  promotes mixed types
- `part_loads.py`: loads into a module inside a model
"""
