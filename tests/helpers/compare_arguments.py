"""The arguments of a command line of `compare`."""

from __future__ import annotations

import argparse

from amp_patch.lab.commands.compare_arguments import add_arguments, split


def parsed(*given: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    own, scripts = split([*given])
    return argparse.Namespace(**vars(parser.parse_args(own)), arguments=scripts)
