"""Recordings of trainings: `record`, `log`, and their files and tables.

Words of this package: an *event* is a dict, one line of JSON in a file. A *sink* receives events. A *body* is the block
of one `scale_loss`. A *look* inspects one step, or counts the bytes that autograd saves in it. *Samples* are counted in
the model's first input tensor.
"""

from __future__ import annotations

from amp_patch.casts import dynamo

dynamo.never_trace("lab.recording")  # compiled forwards call a recorder's hooks
