"""A character-level LSTM on Python's own manual: PyTorch's word_language_model, with Amp as speech and language
repositories added it.

Shows: hidden states carried and detached from segment to segment, clipping over amp.master_params, the clipped norm as
the sign of an overflow, gradients cleared through the model.
"""

from __future__ import annotations

import argparse
import json
import math
import pydoc_data.topics

import torch
import torch.nn as nn
from apex import amp

parser = argparse.ArgumentParser(description="LSTM language model")
parser.add_argument("--emsize", type=int, default=32, help="size of the embeddings")
parser.add_argument("--nhid", type=int, default=64, help="hidden units per layer")
parser.add_argument("--nlayers", type=int, default=2, help="number of layers")
parser.add_argument("--lr", type=float, default=1e-2, help="initial learning rate")
parser.add_argument("--clip", type=float, default=0.25, help="gradient clipping")
parser.add_argument("--steps", type=int, default=100, help="segments to train on")
parser.add_argument("--batch_size", type=int, default=16, metavar="N")
parser.add_argument("--bptt", type=int, default=24, help="sequence length")
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--log-interval", type=int, default=20, metavar="N")
parser.add_argument("--opt-level", type=str, default="O2")
parser.add_argument("--init-loss-scale", type=float, default=0.0, help="0: Amp's own")
parser.add_argument("--curve", type=str, default="", help="where the losses go, one line of JSON")
args = parser.parse_args()

torch.manual_seed(args.seed)
device = "cuda" if torch.cuda.is_available() else "cpu"


class RNNModel(nn.Module):
    """An embedding, a recurrent module, and a decoder."""

    def __init__(self, ntoken, ninp, nhid, nlayers):
        super(RNNModel, self).__init__()
        self.encoder = nn.Embedding(ntoken, ninp)
        self.rnn = nn.LSTM(ninp, nhid, nlayers)
        self.decoder = nn.Linear(nhid, ntoken)
        self.nhid = nhid
        self.nlayers = nlayers

    def forward(self, input, hidden):
        emb = self.encoder(input)
        output, hidden = self.rnn(emb, hidden)
        decoded = self.decoder(output.view(output.size(0) * output.size(1), output.size(2)))
        return decoded.view(output.size(0), output.size(1), decoded.size(1)), hidden

    def init_hidden(self, bsz):
        weight = next(self.parameters()).data  # of its type: half at O2
        return (weight.new_zeros(self.nlayers, bsz, self.nhid), weight.new_zeros(self.nlayers, bsz, self.nhid))


def repackage_hidden(h):
    """Wraps hidden states in new tensors, to detach them from their history."""
    if isinstance(h, torch.Tensor):
        return h.detach()
    return tuple(repackage_hidden(v) for v in h)


def batchify(data, bsz):
    nbatch = data.size(0) // bsz
    return data.narrow(0, 0, nbatch * bsz).view(bsz, -1).t().contiguous().to(device)


def get_batch(source, i):
    seq_len = min(args.bptt, len(source) - 1 - i)
    return source[i : i + seq_len], source[i + 1 : i + 1 + seq_len].view(-1)


text = "\n".join(topic for _, topic in sorted(pydoc_data.topics.topics.items()))
characters = sorted(set(text))
index = {character: i for i, character in enumerate(characters)}
train_data = batchify(torch.tensor([index[character] for character in text]), args.batch_size)
ntokens = len(characters)

model = RNNModel(ntokens, args.emsize, args.nhid, args.nlayers).to(device)
criterion = nn.CrossEntropyLoss()
# eps: 1e-8 is zero in FP16, where O3 keeps the optimizer's state.
optimizer = torch.optim.Adam(model.parameters(), lr=args.lr, eps=1e-4)
model, optimizer = amp.initialize(model, optimizer, opt_level=args.opt_level)
if args.init_loss_scale:
    amp._amp_state.loss_scalers[0]._loss_scale = args.init_loss_scale

model.train()
losses, norms, overflows, total_loss = [], [], [], 0.0
hidden = model.init_hidden(args.batch_size)
for batch in range(args.steps):
    i = (batch * args.bptt) % (train_data.size(0) - 1 - args.bptt)
    data, targets = get_batch(train_data, i)
    hidden = repackage_hidden(hidden)
    model.zero_grad()
    output, hidden = model(data, hidden)
    loss = criterion(output.view(-1, ntokens), targets)

    with amp.scale_loss(loss, optimizer) as scaled_loss:
        scaled_loss.backward()
    grad_norm = torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), args.clip)
    is_overflow = math.isnan(grad_norm) or math.isinf(grad_norm)
    optimizer.step()

    if is_overflow:
        overflows.append(batch)
    losses.append(loss.item())
    norms.append(float(grad_norm))
    total_loss += loss.item()
    if (batch + 1) % args.log_interval == 0:
        cur_loss = total_loss / args.log_interval
        print(
            "| {:5d}/{:5d} batches | lr {:.4f} | loss {:5.2f} | bpc {:5.2f} | grad {:.3f}".format(
                batch + 1, args.steps, args.lr, cur_loss, cur_loss / math.log(2), float(grad_norm)
            )
        )
        total_loss = 0.0

print(json.dumps({"opt_level": args.opt_level, "loss": losses[-1], "overflows": overflows}))
if args.curve:
    with open(args.curve, "w") as f:
        result = {"opt_level": args.opt_level, "losses": losses, "norms": norms, "overflows": overflows}
        f.write(json.dumps(dict(result, amp=amp.state_dict())) + "\n")
