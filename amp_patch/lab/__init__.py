"""Tools around a training: diagnosis, recording, comparison, commands, unedited scripts.

No lower floor imports this one: it subscribes to trainings. `amp_patch` imports it when one of its names is first used.
"""
