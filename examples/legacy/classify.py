"""Digit classification in the manner of Apex's ImageNet template, which hundreds of repositories started from.

For a GPU, as such scripts are. Shows: the template's block of imports, options that stay strings all the way into
amp.initialize, a prefetcher on a side stream, checkpoints with amp.state_dict().
"""

# ruff: noqa: F403, F405
from __future__ import annotations

import argparse
import json
import os
import time

import torch
import torch.backends.cudnn as cudnn
import torch.nn as nn
import torch.optim
import torch.utils.data
from sklearn.datasets import load_digits

try:
    from apex import amp, optimizers  # noqa: F401
    from apex.fp16_utils import *
    from apex.multi_tensor_apply import multi_tensor_applier  # noqa: F401
    from apex.parallel import DistributedDataParallel as DDP
except ImportError:
    raise ImportError("Please install apex from https://www.github.com/nvidia/apex to run this example.")


def parse():
    parser = argparse.ArgumentParser(description="PyTorch digits training")
    parser.add_argument("--steps", default=63, type=int, metavar="N", help="iterations over all epochs")
    parser.add_argument("-b", "--batch-size", default=64, type=int, metavar="N", help="mini-batch size per process")
    parser.add_argument("--lr", default=0.1, type=float, help="initial learning rate for a batch of 256")
    parser.add_argument("--momentum", default=0.9, type=float)
    parser.add_argument("--weight-decay", "--wd", default=1e-4, type=float)
    parser.add_argument("--print-freq", "-p", default=10, type=int)
    parser.add_argument("--resume", default="", type=str, metavar="PATH", help="checkpoint to go on from")
    parser.add_argument("--checkpoint", default="", type=str, metavar="PATH", help="written after every epoch")
    parser.add_argument("--seed", default=0, type=int)
    parser.add_argument("--local_rank", default=int(os.environ.get("LOCAL_RANK", 0)), type=int)
    parser.add_argument("--opt-level", type=str, default="O1")
    parser.add_argument("--keep-batchnorm-fp32", type=str, default=None)
    parser.add_argument("--loss-scale", type=str, default=None)
    parser.add_argument("--curve", default="", type=str, metavar="PATH", help="the losses, one line of JSON")
    return parser.parse_args()


class Net(nn.Module):
    def __init__(self, num_classes=10):
        super(Net, self).__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1, bias=False),
            nn.BatchNorm2d(16),
            nn.ReLU(inplace=True),
            nn.Conv2d(16, 32, 3, padding=1, bias=False),
            nn.BatchNorm2d(32),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(2),
        )
        self.classifier = nn.Linear(32 * 4 * 4, num_classes)

    def forward(self, x):
        x = self.features(x)
        return self.classifier(x.view(x.size(0), -1))


def datasets():
    pixels, labels = load_digits(return_X_y=True)
    images = torch.from_numpy(pixels).float().view(-1, 1, 8, 8)
    labels = torch.from_numpy(labels).long()
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    val, train = order[:450], order[450:]
    return (torch.utils.data.TensorDataset(images[part], labels[part]) for part in (train, val))


def main():
    global args
    args = parse()
    print("opt_level = {}".format(args.opt_level))
    print("keep_batchnorm_fp32 = {}".format(args.keep_batchnorm_fp32), type(args.keep_batchnorm_fp32))
    print("loss_scale = {}".format(args.loss_scale), type(args.loss_scale))

    cudnn.benchmark = False
    cudnn.deterministic = True
    torch.manual_seed(args.seed)
    torch.cuda.manual_seed_all(args.seed)

    args.world_size = int(os.environ.get("WORLD_SIZE", 1))
    args.distributed = args.world_size > 1
    args.gpu = args.local_rank
    if args.distributed:
        torch.cuda.set_device(args.gpu)
        torch.distributed.init_process_group(backend="nccl", init_method="env://")

    assert torch.backends.cudnn.enabled, "Amp requires cudnn backend to be enabled."

    model = Net().cuda()
    args.lr = args.lr * float(args.batch_size * args.world_size) / 256.0
    optimizer = torch.optim.SGD(model.parameters(), args.lr, momentum=args.momentum, weight_decay=args.weight_decay)

    # Amp accepts values or strings for its options: what argparse gives goes straight through.
    model, optimizer = amp.initialize(
        model,
        optimizer,
        opt_level=args.opt_level,
        keep_batchnorm_fp32=args.keep_batchnorm_fp32,
        loss_scale=args.loss_scale,
    )
    # After amp.initialize, which may change the parameters' types under DDP's hooks.
    if args.distributed:
        model = DDP(model, delay_allreduce=True)

    criterion = nn.CrossEntropyLoss().cuda()

    curve, start_epoch = [], 0
    if args.resume:
        print("=> loading checkpoint '{}'".format(args.resume))
        checkpoint = torch.load(args.resume, map_location=lambda storage, loc: storage.cuda(args.gpu))
        start_epoch, curve = checkpoint["epoch"], checkpoint["curve"]
        model.load_state_dict(checkpoint["state_dict"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        amp.load_state_dict(checkpoint["amp"])

    train_dataset, val_dataset = datasets()
    sampler = torch.utils.data.distributed.DistributedSampler(train_dataset) if args.distributed else None
    train_loader = torch.utils.data.DataLoader(
        train_dataset,
        batch_size=args.batch_size,
        shuffle=(sampler is None),
        sampler=sampler,
        pin_memory=True,
        drop_last=True,
    )
    val_loader = torch.utils.data.DataLoader(val_dataset, batch_size=150, shuffle=False, pin_memory=True)

    prec1 = 0.0
    epoch = start_epoch
    while len(curve) < args.steps:
        torch.manual_seed(args.seed + epoch)  # a resumed run draws the batches that the first would have drawn
        if sampler is not None:
            sampler.set_epoch(epoch)
        train(train_loader, model, criterion, optimizer, epoch, curve)
        prec1 = validate(val_loader, model, criterion)
        epoch += 1
        if args.checkpoint and args.local_rank == 0:
            state = {
                "epoch": epoch,
                "curve": curve,
                "state_dict": model.state_dict(),
                "optimizer": optimizer.state_dict(),
                "amp": amp.state_dict(),
            }
            torch.save(state, args.checkpoint)

    if args.local_rank == 0:
        result = {"opt_level": args.opt_level, "losses": curve, "prec1": prec1}
        print(json.dumps({"opt_level": args.opt_level, "loss": curve[-1], "prec1": prec1}))
        if args.curve:
            with open(args.curve, "w") as f:
                f.write(json.dumps(result) + "\n")


class data_prefetcher:
    """Copies the next batch to the GPU, and normalizes it there, while the model works on this one."""

    def __init__(self, loader):
        self.loader = iter(loader)
        self.stream = torch.cuda.Stream()
        self.mean = torch.tensor([4.9]).cuda().view(1, 1, 1, 1)
        self.std = torch.tensor([6.0]).cuda().view(1, 1, 1, 1)
        self.preload()

    def preload(self):
        try:
            self.next_input, self.next_target = next(self.loader)
        except StopIteration:
            self.next_input = None
            self.next_target = None
            return
        with torch.cuda.stream(self.stream):
            self.next_input = self.next_input.cuda(non_blocking=True)
            self.next_target = self.next_target.cuda(non_blocking=True)
            self.next_input = self.next_input.float().sub_(self.mean).div_(self.std)

    def next(self):
        torch.cuda.current_stream().wait_stream(self.stream)
        input, target = self.next_input, self.next_target
        if input is not None:
            input.record_stream(torch.cuda.current_stream())
            target.record_stream(torch.cuda.current_stream())
        self.preload()
        return input, target


def train(train_loader, model, criterion, optimizer, epoch, curve):
    losses, top1 = AverageMeter(), AverageMeter()
    model.train()
    end = time.time()

    prefetcher = data_prefetcher(train_loader)
    input, target = prefetcher.next()
    i = 0
    while input is not None and len(curve) < args.steps:
        i += 1
        adjust_learning_rate(optimizer, epoch, i, len(train_loader))

        output = model(input)
        loss = criterion(output, target)

        optimizer.zero_grad()
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()

        prec1 = accuracy(output.data, target)
        reduced_loss = reduce_tensor(loss.data) if args.distributed else loss.data
        losses.update(to_python_float(reduced_loss), input.size(0))
        top1.update(to_python_float(prec1), input.size(0))
        curve.append(losses.val)
        if i % args.print_freq == 0 and args.local_rank == 0:
            torch.cuda.synchronize()
            speed = args.world_size * args.print_freq * args.batch_size / (time.time() - end)
            end = time.time()
            print(
                "Epoch: [{0}][{1}/{2}]\tSpeed {3:.0f}\tLoss {loss.val:.6f} ({loss.avg:.4f})\t"
                "Prec@1 {top1.val:.3f} ({top1.avg:.3f})".format(
                    epoch, i, len(train_loader), speed, loss=losses, top1=top1
                )
            )
        input, target = prefetcher.next()


def validate(val_loader, model, criterion):
    losses, top1 = AverageMeter(), AverageMeter()
    model.eval()
    prefetcher = data_prefetcher(val_loader)
    input, target = prefetcher.next()
    while input is not None:
        with torch.no_grad():
            output = model(input)
            loss = criterion(output, target)
        losses.update(to_python_float(loss.data), input.size(0))
        top1.update(to_python_float(accuracy(output.data, target)), input.size(0))
        input, target = prefetcher.next()
    print(" * Loss {loss.avg:.4f} Prec@1 {top1.avg:.3f}".format(loss=losses, top1=top1))
    return top1.avg


class AverageMeter(object):
    """Computes and stores the average and current value"""

    def __init__(self):
        self.val = self.avg = self.sum = self.count = 0

    def update(self, val, n=1):
        self.val = val
        self.sum += val * n
        self.count += n
        self.avg = self.sum / self.count


def adjust_learning_rate(optimizer, epoch, step, len_epoch):
    """A tenth after two epochs; a linear warm-up over the first."""
    lr = args.lr * (0.1 ** (epoch // 2))
    if epoch < 1:
        lr = lr * float(1 + step + epoch * len_epoch) / len_epoch
    for param_group in optimizer.param_groups:
        param_group["lr"] = lr


def accuracy(output, target):
    pred = output.argmax(1)
    return pred.eq(target).float().sum(0).mul(100.0 / target.size(0))


def reduce_tensor(tensor):
    rt = tensor.clone()
    torch.distributed.all_reduce(rt)
    rt /= args.world_size
    return rt


if __name__ == "__main__":
    main()
