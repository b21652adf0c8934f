"""FP32 masters: the table of masters by parameter, the transfer of values and gradients, clipping.

Files, the first one to read first:

- `record.py`: what is known of one parameter
- `masters.py`: the records of parameters with masters
- `master.py`: the class of masters
- `closed_master.py`: masters without memory of their own
- `on_host.py`: masters on the host under weights on a device: the copies between the two
- `grad_field.py`: the gradient field that autograd fills
- `gradients.py`: gradients of parameters, gathered and given to masters
- `held_gradients.py`: deferred gradients, and those that backward leaves on masters themselves
- `carried_writes.py`: arithmetic on weights, which reaches the masters
- `grad_route.py`: the value of `param.grad`
- `of_optimizer.py`: masters in an optimizer's groups
- `states.py`: `optimizer.state` by the model's parameters
- `clipping.py`: redirection of torch's gradient clipping: given low-precision parameters, it acts on their masters
- `conversions.py`: refusals of `.half()` and similar calls
- `recycled_memory.py`: a buffer of FP32 gradients that is used again
"""
