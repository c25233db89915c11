"""Adapters of peft on a frozen model; the adapter is saved and loaded."""

import torch
from local_data import images
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import headrace as hr  # headrace


class Body(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two, self.head = nn.Linear(64, 16), nn.Linear(16, 16), nn.Linear(16, 4)

    def forward(self, x):
        return self.head(torch.relu(self.two(torch.relu(self.one(x.flatten(1))))))


torch.manual_seed(0)
loader = DataLoader(TensorDataset(*images(45)), batch_size=10, shuffle=True)
config = LoraConfig(r=2, lora_alpha=4, target_modules=["one", "two"], modules_to_save=["head"], lora_dropout=0.0)
model = get_peft_model(Body(), config).double()
optimizer = torch.optim.AdamW((each for each in model.parameters() if each.requires_grad), lr=1e-2)
model, optimizer, loader = hr.setup(model, optimizer, loader)  # headrace
history = []
for epoch in range(2):
    for pictures, target in loader:
        loss = nn.functional.cross_entropy(model(pictures), target)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
history.append(sum(each.sum().item() for each in get_peft_model_state_dict(model).values()))
hr.processes().on_first(model.save_pretrained, "adapter")  # headrace, was: model.save_pretrained("adapter")
