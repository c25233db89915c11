"""A small GPT on random crops of a text: micro steps, warmup and cosine by hand, clipping, decayed groups, resume."""

import math

import torch
from local_data import tokens
from torch import nn
from torch.nn import functional

import headrace as hr  # headrace

WORDS, BLOCK, BATCH, MICRO, STEPS = 17, 8, 6, 2, 6


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(12), nn.LayerNorm(12)
        self.qkv, self.out = nn.Linear(12, 36, bias=False), nn.Linear(12, 12, bias=False)
        self.mlp = nn.Sequential(nn.Linear(12, 24), nn.GELU(), nn.Linear(24, 12))

    def forward(self, x):
        b, t, c = x.shape
        q, k, v = (each.view(b, t, 2, 6).transpose(1, 2) for each in self.qkv(self.ln1(x)).split(12, 2))
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(b, t, c))
        return x + self.mlp(self.ln2(x))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(WORDS, 12), nn.Embedding(BLOCK, 12)
        self.blocks, self.ln = nn.ModuleList([Block(), Block()]), nn.LayerNorm(12)
        self.head = nn.Linear(12, WORDS, bias=False)
        self.wte.weight = self.head.weight

    def forward(self, idx, targets):
        x = self.wte(idx) + self.wpe(torch.arange(idx.shape[1]))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.ln(x))
        return logits, functional.cross_entropy(logits.view(-1, WORDS), targets.view(-1), ignore_index=-1)

    def configure_optimizers(self):
        decay = [p for p in self.parameters() if p.dim() >= 2]
        others = [p for p in self.parameters() if p.dim() < 2]
        groups = [{"params": decay, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
        return torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95))


here = hr.processes()  # headrace
data = {"train": tokens(500), "val": tokens(200, seed=1)}


def get_batch(split):
    with here.common():  # headrace, was: if True:
        ix = torch.randint(len(data[split]) - BLOCK, (BATCH,))
    x = torch.stack([data[split][i : i + BLOCK] for i in ix])
    y = torch.stack([data[split][i + 1 : i + 1 + BLOCK] for i in ix])
    return here.share((x, y))  # headrace, was: return x, y


@torch.no_grad()
def estimate_loss():
    model.eval()
    out = {split: sum(model(*get_batch(split))[1].item() for _ in range(3)) / 3 for split in data}
    model.train()
    return out


def get_lr(it):
    return 1e-2 * (it + 1) / 3 if it < 3 else 1e-3 + 0.5 * (1 + math.cos(math.pi * it / STEPS)) * 9e-3


torch.manual_seed(1337)
model = GPT()
optimizer = model.configure_optimizers()
model, optimizer, _ = hr.setup(model, optimizer, None)  # headrace
history = []
X, Y = get_batch("train")
for it in range(STEPS):
    for group in optimizer.param_groups:
        group["lr"] = get_lr(it)
    if it % 2 == 0:
        losses = estimate_loss()
        losses = {k: here.mean(v, BATCH) for k, v in losses.items()}  # headrace
        history += losses.values()
        checkpoint = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "it": it}
        here.on_first(torch.save, checkpoint, "ckpt.pt")  # headrace, was: torch.save(checkpoint, "ckpt.pt")
    for _ in range(MICRO):
        logits, loss = model(X, Y)
        loss = loss / MICRO
        X, Y = get_batch("train")
        loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
