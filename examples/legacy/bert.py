"""Masked-character pretraining of a small BERT on Python's own manual, in the manner of NVIDIA's run_pretraining.py.

For a GPU, as such scripts are. Shows: FusedLAMB and FusedLayerNorm, an initial loss scale written into Amp's state,
accumulation with delay_unscale, gradients flattened, averaged, unscaled and checked through amp_C and apex_C by hand,
a step skipped by hand, checkpoints with the master weights and the `_amp_stash` idiom that loads them.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import pydoc_data.topics

import amp_C
import apex_C
import torch
import torch.nn as nn
from apex import amp
from apex.amp import _amp_state
from apex.multi_tensor_apply import multi_tensor_applier
from apex.normalization import FusedLayerNorm as BertLayerNorm
from apex.optimizers import FusedLAMB

MASK, PAD = 0, 1


def parse_arguments():
    parser = argparse.ArgumentParser()
    parser.add_argument("--hidden_size", type=int, default=64)
    parser.add_argument("--num_hidden_layers", type=int, default=2)
    parser.add_argument("--num_attention_heads", type=int, default=4)
    parser.add_argument("--max_seq_length", type=int, default=32)
    parser.add_argument("--train_batch_size", type=int, default=16, help="sequences in a step, accumulated ones too")
    parser.add_argument("--gradient_accumulation_steps", type=int, default=2)
    parser.add_argument("--learning_rate", type=float, default=1e-2)
    parser.add_argument("--warmup_proportion", type=float, default=0.1)
    parser.add_argument("--max_steps", type=int, default=60, help="length of the schedule")
    parser.add_argument("--steps", type=int, default=None, help="stop after so many steps, the whole schedule if unset")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--opt-level", type=str, default="O2")
    parser.add_argument("--loss_scale", type=float, default=0.0, help="0: dynamic")
    parser.add_argument("--init_loss_scale", type=int, default=2**14)
    parser.add_argument("--resume_from_checkpoint", type=str, default=None)
    parser.add_argument("--output", type=str, default=None, help="where the checkpoint goes")
    parser.add_argument("--log_freq", type=int, default=10)
    parser.add_argument("--curve", type=str, default="", help="where the losses go, one line of JSON")
    parser.add_argument("--local_rank", type=int, default=int(os.environ.get("LOCAL_RANK", 0)))
    args = parser.parse_args()
    if args.train_batch_size % args.gradient_accumulation_steps:
        raise ValueError("train_batch_size should be divisible by gradient_accumulation_steps")
    args.steps = args.steps or args.max_steps
    return args


def gelu(x):
    return x * 0.5 * (1.0 + torch.erf(x / math.sqrt(2.0)))


class BertLayer(nn.Module):
    def __init__(self, hidden_size, num_heads):
        super(BertLayer, self).__init__()
        self.num_heads = num_heads
        self.query = nn.Linear(hidden_size, hidden_size)
        self.key = nn.Linear(hidden_size, hidden_size)
        self.value = nn.Linear(hidden_size, hidden_size)
        self.attention_output = nn.Linear(hidden_size, hidden_size)
        self.attention_norm = BertLayerNorm(hidden_size, eps=1e-5)
        self.intermediate = nn.Linear(hidden_size, 4 * hidden_size)
        self.output = nn.Linear(4 * hidden_size, hidden_size)
        self.output_norm = BertLayerNorm(hidden_size, eps=1e-5)

    def transpose_for_scores(self, x):
        return x.view(x.size(0), x.size(1), self.num_heads, -1).permute(0, 2, 1, 3)

    def forward(self, hidden_states, attention_mask):
        query = self.transpose_for_scores(self.query(hidden_states))
        key = self.transpose_for_scores(self.key(hidden_states))
        value = self.transpose_for_scores(self.value(hidden_states))
        attention_scores = torch.matmul(query, key.transpose(-1, -2)) / math.sqrt(query.size(-1))
        attention_probs = nn.functional.softmax(attention_scores + attention_mask, dim=-1)
        context = torch.matmul(attention_probs, value).permute(0, 2, 1, 3).contiguous()
        context = self.attention_output(context.view(hidden_states.size()))
        hidden_states = self.attention_norm(context + hidden_states)
        output = self.output(gelu(self.intermediate(hidden_states)))
        return self.output_norm(output + hidden_states)


class BertForMaskedLM(nn.Module):
    def __init__(self, args, vocab_size):
        super(BertForMaskedLM, self).__init__()
        self.word_embeddings = nn.Embedding(vocab_size, args.hidden_size)
        self.position_embeddings = nn.Embedding(args.max_seq_length, args.hidden_size)
        self.embedding_norm = BertLayerNorm(args.hidden_size, eps=1e-5)
        self.layers = nn.ModuleList(
            [BertLayer(args.hidden_size, args.num_attention_heads) for _ in range(args.num_hidden_layers)]
        )
        self.bias = nn.Parameter(torch.zeros(vocab_size))
        self.apply(self.init_weights)

    def init_weights(self, module):
        if isinstance(module, (nn.Linear, nn.Embedding)):
            module.weight.data.normal_(mean=0.0, std=0.12)
        elif isinstance(module, BertLayerNorm):
            module.bias.data.zero_()
            module.weight.data.fill_(1.0)
        if isinstance(module, nn.Linear) and module.bias is not None:
            module.bias.data.zero_()

    def forward(self, input_ids, input_mask):
        mask = input_mask.unsqueeze(1).unsqueeze(2)
        mask = mask.to(dtype=next(self.parameters()).dtype)  # fp16 compatibility
        mask = (1.0 - mask) * -10000.0
        position_ids = torch.arange(input_ids.size(1), dtype=torch.long, device=input_ids.device)
        hidden_states = self.word_embeddings(input_ids) + self.position_embeddings(position_ids)
        hidden_states = self.embedding_norm(hidden_states)
        for layer in self.layers:
            hidden_states = layer(hidden_states, mask)
        # The decoder's weights are the embedding's.
        return nn.functional.linear(hidden_states, self.word_embeddings.weight) + self.bias


def load_text():
    text = "\n".join(topic for _, topic in sorted(pydoc_data.topics.topics.items()))
    index = {character: i for i, character in enumerate(sorted(set(text)), start=PAD + 1)}
    return torch.tensor([index[character] for character in text]), len(index) + 2


def get_batch(text, vocab_size, args):
    """Characters with holes, which of them are no padding, and what was in the holes (-1 elsewhere)."""
    starts = torch.randint(len(text) - args.max_seq_length, (args.train_batch_size, 1))
    input_ids = text[starts + torch.arange(args.max_seq_length)]
    lengths = torch.randint(3 * args.max_seq_length // 4, args.max_seq_length + 1, (args.train_batch_size, 1))
    input_mask = (torch.arange(args.max_seq_length) < lengths).long()
    input_ids[input_mask == 0] = PAD
    masked = (torch.rand(input_ids.shape) < 0.15) & (input_mask == 1)
    labels = torch.where(masked, input_ids, torch.full_like(input_ids, -1))
    input_ids[masked] = MASK
    return [t.cuda() for t in (input_ids, input_mask, labels)]


def prepare_model_and_optimizer(args, vocab_size):
    model = BertForMaskedLM(args, vocab_size)
    checkpoint, global_step = None, 0
    if args.resume_from_checkpoint:
        checkpoint = torch.load(args.resume_from_checkpoint, map_location="cpu")
        global_step = checkpoint["step"]
        model.load_state_dict(checkpoint["model"], strict=False)
    model.cuda()

    no_decay = ["bias", "norm"]
    named = list(model.named_parameters())
    optimizer_grouped_parameters = [
        {"params": [p for n, p in named if not any(nd in n for nd in no_decay)], "weight_decay": 0.01},
        {"params": [p for n, p in named if any(nd in n for nd in no_decay)], "weight_decay": 0.0},
    ]
    # eps: LAMB's own 1e-6 is nearly zero in FP16, where O3 keeps its state.
    optimizer = FusedLAMB(optimizer_grouped_parameters, lr=args.learning_rate, eps=1e-4)

    if args.loss_scale == 0:
        model, optimizer = amp.initialize(model, optimizer, opt_level=args.opt_level, loss_scale="dynamic")
        amp._amp_state.loss_scalers[0]._loss_scale = args.init_loss_scale
    else:
        model, optimizer = amp.initialize(model, optimizer, opt_level=args.opt_level, loss_scale=args.loss_scale)

    if checkpoint is not None:
        optimizer.load_state_dict(checkpoint["optimizer"])
        # Restore AMP master parameters
        optimizer._lazy_init_maybe_master_weights()
        optimizer._amp_stash.lazy_init_called = True
        optimizer.load_state_dict(checkpoint["optimizer"])
        for param, saved_param in zip(amp.master_params(optimizer), checkpoint["master params"]):
            param.data.copy_(saved_param.data)
        amp.load_state_dict(checkpoint["amp"])
    return model, optimizer, checkpoint, global_step


def adjust_learning_rate(args, optimizer, global_step):
    warmup = max(1.0, args.warmup_proportion * args.max_steps)
    scale = min((global_step + 1) / warmup, (1.0 - global_step / args.max_steps) ** 0.5)
    for param_group in optimizer.param_groups:
        param_group["lr"] = args.learning_rate * scale


def take_optimizer_step(args, optimizer, model, overflow_buf, global_step):
    """Average the gradients of all ranks by hand, look for overflows once, step or skip. Gives the gradients' norm."""
    scaler = _amp_state.loss_scalers[0]
    world_size = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    # 1. an uninitialized buffer for all gradients, flattened
    master_grads = [p.grad for p in amp.master_params(optimizer) if p.grad is not None]
    flat_raw = torch.empty(sum(g.numel() for g in master_grads), device="cuda", dtype=torch.float32)
    # 2. unflattened views of it; scaled once more, against underflow, and divided beforehand
    allreduced_views = apex_C.unflatten(flat_raw, master_grads)
    overflow_buf.zero_()
    amp_C.multi_tensor_scale(
        65536,
        overflow_buf,
        [master_grads, allreduced_views],
        scaler.loss_scale() / (world_size * args.gradient_accumulation_steps),
    )
    # 3. the sum over the ranks is their mean
    if world_size > 1:
        torch.distributed.all_reduce(flat_raw)
    # 4. unscale into the master gradients
    overflow_buf.zero_()
    amp_C.multi_tensor_scale(65536, overflow_buf, [allreduced_views, master_grads], 1.0 / scaler.loss_scale())
    # 5. update the loss scale by what that saw
    old_overflow_buf = scaler._overflow_buf
    scaler._overflow_buf = overflow_buf
    had_overflow = scaler.update_scale()
    scaler._overflow_buf = old_overflow_buf
    # 6. step, or skip
    norm_buf = torch.cuda.IntTensor([0])
    grad_norm, _ = multi_tensor_applier(amp_C.multi_tensor_l2norm, norm_buf, [master_grads], False)
    if had_overflow == 0:
        optimizer.step()
        global_step += 1
    else:
        if args.local_rank == 0:
            print("Gradient overflow.  Skipping step, reducing loss scale to {}".format(scaler.loss_scale()))
        if _amp_state.opt_properties.master_weights:
            for param in optimizer._amp_stash.all_fp32_from_fp16_params:
                param.grad = None
    for param in model.parameters():
        param.grad = None
    return global_step, grad_norm.item()


def main():
    args = parse_arguments()
    assert torch.cuda.is_available()
    device = torch.device("cuda", args.local_rank)
    torch.cuda.set_device(device)
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        torch.distributed.init_process_group(backend="nccl", init_method="env://")

    torch.manual_seed(args.seed)
    text, vocab_size = load_text()
    model, optimizer, checkpoint, global_step = prepare_model_and_optimizer(args, vocab_size)
    criterion = nn.CrossEntropyLoss(ignore_index=-1)
    overflow_buf = torch.cuda.IntTensor([0])

    losses = checkpoint["losses"] if checkpoint else []
    norms = checkpoint["norms"] if checkpoint else []
    skipped_steps = 0
    model.train()
    while global_step < args.steps:
        # Of the step alone, so that a resumed run sees the batches that the first would have seen.
        torch.manual_seed(args.seed + len(losses))
        batch = get_batch(text, vocab_size, args)
        adjust_learning_rate(args, optimizer, global_step)
        average_loss = 0.0
        micro_batches = zip(*(t.chunk(args.gradient_accumulation_steps) for t in batch))
        for micro_step, (input_ids, input_mask, labels) in enumerate(micro_batches, start=1):
            logits = model(input_ids, input_mask)
            loss = criterion(logits.view(-1, vocab_size), labels.view(-1))
            # Unscaled once for the whole step, and left to take_optimizer_step to check.
            delay_unscale = micro_step < args.gradient_accumulation_steps
            with amp.scale_loss(loss, optimizer, delay_unscale=delay_unscale, delay_overflow_check=True) as scaled_loss:
                scaled_loss.backward()
            average_loss += loss.item() / args.gradient_accumulation_steps

        before = global_step
        global_step, grad_norm = take_optimizer_step(args, optimizer, model, overflow_buf, global_step)
        skipped_steps += global_step == before
        losses.append(average_loss)
        norms.append(grad_norm)
        if args.local_rank == 0 and global_step % args.log_freq == 0:
            print(
                "step {} loss {:.4f} norm {:.3f} skipped {}".format(global_step, losses[-1], grad_norm, skipped_steps)
            )

    if args.local_rank == 0:
        if args.output:
            state = {
                "step": global_step,
                "model": model.state_dict(),
                "optimizer": optimizer.state_dict(),
                "master params": list(amp.master_params(optimizer)),
                "amp": amp.state_dict(),
                "losses": losses,
                "norms": norms,
            }
            torch.save(state, args.output)
        print(json.dumps({"opt_level": args.opt_level, "loss": losses[-1], "skipped": skipped_steps}))
        if args.curve:
            result = {"opt_level": args.opt_level, "losses": losses, "norms": norms, "skipped": skipped_steps}
            with open(args.curve, "w") as f:
                f.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
