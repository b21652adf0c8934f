"""The microscope: what happens to the numbers of one training.

It sees the frontend, the observers and `watch/questions.py`, not the stash, the step or the masters.

Files:

- `inspect.py`: `amp.inspect`: statistics of numbers during training, and the call that made the first non-finite one
- `inspection.py`: the result of `inspect`
- `call_log.py`: the base class of logs of calls, each with the module whose forward makes the call
- `culprit.py`: the search in the log of one step for the call that made the first non-finite number
- `histogram.py`: counts of numbers by their exponent
- `module_error.py`: the error of a module's output against FP32
- `lost_updates.py`: the share of updates that low-precision weights lose
- `found_scaler.py`: the GradScaler of an inspected training
- `explain.py`: `amp.explain`: the types of each call in one forward, and their reason
- `explanation.py`: the result of `explain`
- `find_loss_scale.py`: `amp.find_loss_scale`
- `output_distance.py`: `amp.compare_outputs`
- `trial_forward.py`: a forward that leaves no trace in the model
- `text_table.py`: columns of text for the terminal
- `tables.py`: reports of tables and lines, as text or HTML
- `wording.py`: numbers and names in words, for all three rooms
- `survey/`: `amp.survey`: the lines of user code that a level breaks
- `recording/`: `amp.record` and `amp.log`: the records of a training
"""
