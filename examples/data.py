"""The two data sets of the examples, from packages that are installed anyway: nothing is downloaded.

The splits are fixed; a seed given to an example moves its weights and batches, never what is held out.
"""

from __future__ import annotations

import pydoc_data.topics

import torch
from torch import Tensor

Split = tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]


def digits(device: str = "cpu") -> Split:
    """1797 handwritten digits, 8 x 8 grey values in [0, 1]: (images, labels) for training, the same held out."""
    from sklearn.datasets import load_digits  # here, because it takes two seconds that the text need not wait for

    pixels, labels = load_digits(return_X_y=True)
    images = torch.tensor(pixels / 16, dtype=torch.float32, device=device).view(-1, 1, 8, 8)
    targets = torch.tensor(labels, device=device)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0)).to(device)
    held_out, train = order[:450], order[450:]
    return (images[train], targets[train]), (images[held_out], targets[held_out])


def topics(device: str = "cpu") -> tuple[Tensor, Tensor, int]:
    """Python's own reference manual as character codes: the training text, the held-out text, the vocabulary's size.

    Every tenth topic is held out, whole.
    """
    texts = [text for _, text in sorted(pydoc_data.topics.topics.items())]
    code = {character: i for i, character in enumerate(sorted(set("".join(texts))))}
    train = "\n".join(text for i, text in enumerate(texts) if i % 10)
    held_out = "\n".join(texts[::10])
    encode = [torch.tensor([code[character] for character in text], device=device) for text in (train, held_out)]
    return encode[0], encode[1], len(code)
