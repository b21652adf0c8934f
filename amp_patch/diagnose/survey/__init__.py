"""The survey: it finds the lines of user code that a level breaks, by rules and by a measurement.

The rules follow one FP32 step operation by operation. The measurement makes a step at each level, and compares its
outputs and gradients with those of FP32.

Words of this package: a *kind of levels* (`Kind`) is the levels that give each tensor the same type, such as O2 and O3.
The *facts* of a tensor (`Facts`) are its type and numbers at each kind. A tensor is *learned* if it depends on a
parameter; only the numbers of other tensors are computed at each kind.

Files:

- `survey.py`: `amp.survey`, and the state that it restores
- `first_step.py`: the survey of a script's first step
- `visit.py`: the mode that follows each tensor
- `kinds.py`: levels that compute alike, and the facts of a tensor at each
- `calls.py`: one call, its line of user code, whether `run` serves it, and what a rule yields for it
- `rules.py`: rules: one function for each
- `ranges.py`: rules on the range of a type
- `masks.py`: masks that are added to scores
- `report.py`: the result of `survey`
- `measured.py`: the measurement of a level: errors beside FP32, and what rounding explains of them
- `steps.py`: one step of a model and its loss, at a level, in FP32 or as an ideal run; errors between two steps
- `attribution.py`: the input, module and line that an error comes from
- `replay.py`: the forward and the loss of a script, as a step to measure
"""
