"""Checks that observe a training and warn or raise, without changing its numbers.

Files, the first one to read first:

- `left_out.py`: a warning about optimizers that step cast weights and were not given to `initialize`
- `averages.py`: the search for averages and copies of trained modules inside of a model
- `first_inputs.py`: checks of the inputs of a cast model's first calls: an error or a warning for inputs that the
  cast would ruin
- `rounded_features.py`: how much of an input's variation rounding removes, feature by feature
- `tables.py`: a warning about tables of frequencies that the cast of a model rounds, so that sinusoids of
  positions are wrong
- `saturated.py`: a warning, given once, for a binary cross entropy whose probabilities low precision has rounded
  to 0 or 1
- `written_buffers.py`: running averages in low precision
- `rounded_saves.py`: warnings about saves that round
- `thawed.py`: parameters that were frozen in low precision at `initialize`, and are unfrozen later
- `slips.py`: mistakes in a training loop
- `questions.py`: what diagnose/, run/ and comparison/ ask about an optimizer
- `small_eps.py`: a warning about an `eps` that is 0 in the type of the parameters
- `captured_rates.py`: a warning about learning rates of the host in a CUDA graph
- `scaler_mixtures.py`: refusal of gradients that belong to another GradScaler, or to `scale_loss`
- `scaler_events.py`: notifies observers of the calls of GradScalers
"""
