"""timm's models, loader, optimizer, scheduler, EMA and scaler, with a short last window at the end of an epoch:

python timm_train.py --model resnet10t -b {micro_batch} --grad-accum-steps {iter_size} --device cpu
"""
import argparse
from contextlib import suppress
from functools import partial

import torch
from PIL import Image
from timm import create_model, utils
from timm.data import Mixup, create_loader
from timm.loss import SoftTargetCrossEntropy
from timm.optim import create_optimizer_v2
from timm.scheduler import create_scheduler_v2

parser = argparse.ArgumentParser(description="PyTorch ImageNet Training")
parser.add_argument("--model", default="resnet10t")
parser.add_argument("-b", "--batch-size", type=int, default=8)
parser.add_argument("--grad-accum-steps", type=int, default=1)
parser.add_argument("--img-size", type=int, default=64)
parser.add_argument("--images", type=int, default=160)
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--opt", default="sgd")
parser.add_argument("--lr", type=float, default=0.05)
parser.add_argument("--clip-grad", type=float, default=None)
parser.add_argument("--mixup", type=float, default=0.2)
parser.add_argument("--amp", action="store_true")
parser.add_argument("--no-prefetcher", action="store_true")
parser.add_argument("--device", default="cuda")
parser.add_argument("-j", "--workers", type=int, default=1)
parser.add_argument("--seed", type=int, default=42)


class FakeImages(torch.utils.data.Dataset):
    def __init__(self, count):
        self.count, self.transform = count, None

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        image = Image.new("RGB", (80, 80), (index % 256, 64, 128))
        return self.transform(image), index % 10


def main():
    args = parser.parse_args()
    args.prefetcher = not args.no_prefetcher and args.device != "cpu"
    device = torch.device(args.device)
    utils.random_seed(args.seed, 0)
    model = create_model(args.model, pretrained=False, num_classes=10).to(device)
    model_ema = utils.ModelEmaV3(model, decay=0.99)
    optimizer = create_optimizer_v2(model, opt=args.opt, lr=args.lr, momentum=0.9, weight_decay=2e-5)
    amp_autocast, loss_scaler = suppress, None
    if args.amp:
        amp_autocast = partial(torch.autocast, device_type=device.type, dtype=torch.float16)
        loss_scaler = utils.NativeScaler(device=device.type)
    loader = create_loader(
        FakeImages(args.images), input_size=(3, args.img_size, args.img_size), batch_size=args.batch_size,
        is_training=True, use_prefetcher=args.prefetcher, num_workers=args.workers, device=device,
        pin_memory=device.type == "cuda",
    )
    mixup_fn = Mixup(mixup_alpha=args.mixup, num_classes=10)
    loss_fn = SoftTargetCrossEntropy().to(device)
    updates_per_epoch = (len(loader) + args.grad_accum_steps - 1) // args.grad_accum_steps
    scheduler, num_epochs = create_scheduler_v2(
        optimizer, sched="cosine", num_epochs=args.epochs, warmup_epochs=0, updates_per_epoch=updates_per_epoch)
    for epoch in range(num_epochs):
        train_one_epoch(epoch, model, model_ema, loader, optimizer, loss_fn, loss_scaler, amp_autocast, mixup_fn,
                        scheduler, updates_per_epoch, device, args)
        scheduler.step(epoch + 1)


def train_one_epoch(epoch, model, model_ema, loader, optimizer, loss_fn, loss_scaler, amp_autocast, mixup_fn,
                    scheduler, updates_per_epoch, device, args):
    losses = utils.AverageMeter()
    model.train()
    accum_steps = args.grad_accum_steps
    last_accum_steps = len(loader) % accum_steps or accum_steps
    last_batch_idx_to_accum = len(loader) - last_accum_steps
    num_updates = epoch * updates_per_epoch
    optimizer.zero_grad()
    for batch_idx, (input, target) in enumerate(loader):
        need_update = batch_idx == len(loader) - 1 or (batch_idx + 1) % accum_steps == 0
        if batch_idx >= last_batch_idx_to_accum:
            accum_steps = last_accum_steps
        input, target = input.to(device), target.to(device)
        input, target = mixup_fn(input, target)
        with amp_autocast():
            loss = loss_fn(model(input), target)
        if accum_steps > 1:
            loss /= accum_steps
        if loss_scaler is not None:
            loss_scaler(loss, optimizer, clip_grad=args.clip_grad, parameters=model.parameters(),
                        need_update=need_update)
        else:
            loss.backward()
            if need_update:
                if args.clip_grad is not None:
                    utils.dispatch_clip_grad(model.parameters(), value=args.clip_grad)
                optimizer.step()
        losses.update(loss.item() * accum_steps, input.size(0))
        if not need_update:
            continue
        num_updates += 1
        optimizer.zero_grad()
        model_ema.update(model, step=num_updates)
        scheduler.step_update(num_updates=num_updates, metric=losses.avg)
        print(f"Train: {epoch} [{batch_idx:>4d}/{len(loader)}] Loss: {losses.val:#.3g} ({losses.avg:#.3g})")


if __name__ == "__main__":
    main()
