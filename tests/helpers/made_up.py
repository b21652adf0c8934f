"""Artificial runs with round figures, for tests of code that reads runs."""

from __future__ import annotations

from typing import Any

from amp_patch.lab.recording.run import PARTS, Look, Run


def made_up_run(
    level: str = "O0", seed: int = 0, steps: int = 40, *, final: float = 1.0, ms: float = 10.0, **fields: Any
) -> Run:
    """Return a run whose loss falls from 4 to `final`. Each step takes `ms` milliseconds, half in backward."""
    run = Run(level, seed, dtype=None if level == "O0" else "float16", policy=level, device="cuda")
    shares = dict(zip(PARTS, (0.05, 0.25, 0.5, 0.05, 0.15), strict=True))
    for step in range(steps):
        loss = final + (4 - final) * max(0.0, 1 - step / (0.75 * steps))
        seconds = ms / 1000
        parts = {part: seconds * share for part, share in shares.items()}
        scaled = level in ("O1", "O2")
        run.add(
            {
                "event": "step",
                "loss": loss,
                "seconds": seconds,
                "parts": parts,
                "scale": 65536.0 if scaled else 1.0,
                "skipped": scaled and step == 0,
                "samples": 8,
            }
        )
    run.weights, run.masters, run.gradients, run.state, run.peak_memory = 4000, 0, 4000, 8000, 2**20
    for name, value in fields.items():
        setattr(run, name, value)
    return run


def made_up_look(step: int = 1) -> Look:
    """Return an inspection of gradients from 2**-30 to 2**-6; FP16 loses a quarter of them at scale 1."""
    exponents = {str(e): 100 for e in range(-30, -5)}
    counts = {"zeros": 10, "not_finite": 0, "exponents": exponents}
    return Look(
        step,
        scale=65536.0,
        best_scale=2.0**21,
        counts=dict.fromkeys(("weights", "activations", "gradients", "activation_gradients"), counts),
        flushed={"first.weight": [0.0, 0.25, 0.0], "last.weight": [0.1, 0.6, 0.0]},
        overflowed={"first.weight": [0.0, 0.0, 0.0], "last.weight": [0.0, 0.0, 0.0]},
        errors={"first": 1e-3, "last": 0.2},
        not_finite=None,
        keep_fp32=["last"],
    )
