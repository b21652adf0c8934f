"""Training of unedited scripts, which use torch alone, at an opt level. Start with `script.py`."""
