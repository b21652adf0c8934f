"""Opt levels for the trainers of other packages (Lightning, transformers).

Each module here imports the package that it is for; `import amp_patch` imports none of these modules.
"""
