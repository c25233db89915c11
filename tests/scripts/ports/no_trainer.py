"""A BERT of transformers that classifies sentences: padding to one length, groups without decay, accumulation, metrics."""

import math

import torch
from local_data import tokens
from torch.utils.data import DataLoader
from transformers import BertConfig, BertForSequenceClassification, get_scheduler

import headrace as hr  # headrace


def sentences(count, seed):
    text = tokens(count * 6, 20, seed) + 3
    for i in range(count):
        words, length = text[6 * i : 6 * i + 6], 3 + i % 4
        mask = (torch.arange(6) < length).long()
        yield {"input_ids": words * mask, "attention_mask": mask, "labels": words[0] % 2}


torch.manual_seed(0)
here = hr.processes()  # headrace
train = DataLoader(list(sentences(36, 0)), batch_size=6, shuffle=True)
evaluation = DataLoader(list(sentences(15, 1)), batch_size=4)
config = BertConfig(vocab_size=24, hidden_size=12, num_hidden_layers=2, num_attention_heads=2, intermediate_size=16,
    max_position_embeddings=8, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)  # fmt: skip
model = BertForSequenceClassification(config)
plain = ("bias", "LayerNorm.weight")
named = list(model.named_parameters())
groups = [
    {"params": [p for n, p in named if not n.endswith(plain)], "weight_decay": 0.01},
    {"params": [p for n, p in named if n.endswith(plain)], "weight_decay": 0.0},
]
optimizer = torch.optim.AdamW(groups, lr=1e-3)
model, optimizer, train = hr.setup(model, optimizer, train)  # headrace
model, optimizer, evaluation = hr.setup(model, optimizer, evaluation)  # headrace
accumulate = 2
scheduler = get_scheduler("linear", optimizer, 1, 2 * math.ceil(len(train) / accumulate))
history = []
for epoch in range(2):
    model.train()
    total = 0
    for step, batch in enumerate(train):
        loss = model(**batch).loss
        total += here.mean(loss, len(batch["labels"]))  # headrace, was: total += loss.item()
        (loss / accumulate).backward()
        if step % accumulate == 1 or step == len(train) - 1:
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    model.eval()
    right = seen = 0
    for batch in evaluation:
        with torch.no_grad():
            found = model(**batch).logits.argmax(-1)
        found, labels = here.whole((found, batch["labels"]))  # headrace, was: labels = batch["labels"]
        right, seen = right + (found == labels).sum().item(), seen + len(labels)
    history += [total, right, seen]
