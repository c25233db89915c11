"""A generator and a discriminator with an optimizer each, two half losses in one step, noise in the loop."""

import torch
from local_data import images
from torch import nn, optim
from torch.utils.data import DataLoader, TensorDataset

import headrace as hr  # headrace


def weights_init(m):
    if isinstance(m, nn.Conv2d | nn.ConvTranspose2d):
        nn.init.normal_(m.weight, 0.0, 0.02)


torch.manual_seed(3)
here = hr.processes()  # headrace
dataloader = DataLoader(TensorDataset(*images(44)), batch_size=16, shuffle=True)
netG = nn.Sequential(
    nn.ConvTranspose2d(6, 5, 4), nn.GroupNorm(1, 5), nn.ReLU(), nn.ConvTranspose2d(5, 1, 4, 2, 1), nn.Sigmoid()
)
netD = nn.Sequential(nn.Conv2d(1, 5, 4, 2, 1), nn.LeakyReLU(0.2), nn.Conv2d(5, 1, 4), nn.Sigmoid(), nn.Flatten(0))
netG.apply(weights_init), netD.apply(weights_init)
criterion = nn.BCELoss()
fixed_noise = torch.randn(4, 6, 1, 1)
optimizerD = optim.Adam(netD.parameters(), lr=0.002, betas=(0.5, 0.999))
optimizerG = optim.Adam(netG.parameters(), lr=0.002, betas=(0.5, 0.999))
netD, optimizerD, dataloader = hr.setup(netD, optimizerD, dataloader)  # headrace
netG, optimizerG, _ = hr.setup(netG, optimizerG, dataloader)  # headrace
history = []
for epoch in range(2):
    for data, _ in dataloader:
        netD.zero_grad()
        label = torch.full((len(data),), 1.0)
        output = netD(data)
        errD_real = criterion(output, label)
        errD_real.backward()
        D_x = output.mean().item()
        with here.common():  # headrace, was: if True:
            noise = torch.randn(int(here.sum(len(data))), 6, 1, 1)  # headrace, was: noise = torch.randn(len(data), 6, 1, 1)
        noise = here.share(noise)  # headrace
        fake = netG(noise)
        label.fill_(0.0)
        output = netD(fake.detach())
        errD_fake = criterion(output, label)
        errD_fake.backward()
        errD = errD_real + errD_fake
        optimizerD.step()
        netG.zero_grad()
        label.fill_(1.0)
        output = netD(fake)
        errG = criterion(output, label)
        errG.backward()
        optimizerG.step()
        history += [here.mean(v, len(data)) for v in (errD, errG, D_x)]  # headrace, was: history += [errD.item(), errG.item(), D_x]
    with torch.no_grad():
        history.append(netG(fixed_noise).mean().item())
torch.save(netG.state_dict(), "netG.pth")
