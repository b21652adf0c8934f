"""Opt levels for the trainers of other packages (Lightning, transformers).

Each module here imports the package that it is for; `import amp_patch` imports none of these modules.

Files, the first one to read first:

- `opt_level.py`: the hooks of Lightning's `Precision` plugin, shared by the plugins for `lightning` and
  `pytorch_lightning`
- `lightning.py`: an opt level for Lightning's Trainer, of the package `lightning`
- `pytorch_lightning.py`: the same as `amp_patch.integrations.lightning`, for scripts that import
  `pytorch_lightning` instead of `lightning`
- `transformers.py`: a `transformers.Trainer` that trains at an opt level
"""
