"""A critic with a penalty on the gradients of its inputs, several of its steps to one of the generator."""

import torch
from local_data import images
from torch import autograd, nn, optim
from torch.utils.data import DataLoader, TensorDataset

import headrace as hr  # headrace

torch.manual_seed(0)
here = hr.processes()  # headrace
dataloader = DataLoader(TensorDataset(*images(46)), batch_size=10, shuffle=True)
generator = nn.Sequential(nn.Linear(5, 16), nn.LeakyReLU(0.2), nn.Linear(16, 64), nn.Sigmoid())
discriminator = nn.Sequential(nn.Linear(64, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1))
optimizer_G = optim.Adam(generator.parameters(), lr=1e-3, betas=(0.5, 0.9))
optimizer_D = optim.Adam(discriminator.parameters(), lr=1e-3, betas=(0.5, 0.9))
discriminator, optimizer_D, dataloader = hr.setup(discriminator, optimizer_D, dataloader)  # headrace
generator, optimizer_G, _ = hr.setup(generator, optimizer_G, dataloader)  # headrace


def compute_gradient_penalty(real, fake, alpha):
    between = (alpha * real + (1 - alpha) * fake).requires_grad_(True)
    scores = discriminator(between)
    ones = torch.ones_like(scores)
    gradients = autograd.grad(scores, between, ones, create_graph=True, retain_graph=True, only_inputs=True)[0]
    return ((gradients.norm(2, dim=1) - 1) ** 2).mean()


history = []
for epoch in range(2):
    for i, (real, _) in enumerate(dataloader):
        real = real.flatten(1)
        with here.common():  # headrace, was: if True:
            count = int(here.sum(len(real)))  # headrace, was: count = len(real)
            z, alpha = torch.randn(count, 5), torch.rand(count, 1)
        z, alpha = here.share((z, alpha))  # headrace
        optimizer_D.zero_grad()
        fake = generator(z)
        penalty = compute_gradient_penalty(real, fake.detach(), alpha)
        d_loss = -discriminator(real).mean() + discriminator(fake.detach()).mean() + 10 * penalty
        d_loss.backward()
        optimizer_D.step()
        optimizer_G.zero_grad()
        if i % 2 == 0:
            g_loss = -discriminator(generator(z)).mean()
            g_loss.backward()
            optimizer_G.step()
            history.append(here.mean(g_loss, len(real)))  # headrace, was: history.append(g_loss.item())
