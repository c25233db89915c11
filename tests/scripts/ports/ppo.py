"""Many environments side by side, a rollout, advantages, shuffled minibatches of it for several epochs."""

import torch
from torch import nn, optim
from torch.distributions import Categorical

import headrace as hr  # headrace

ENVS, STEPS = 6, 8


class Agent(nn.Module):
    def __init__(self):
        super().__init__()
        self.actor = nn.Sequential(nn.Linear(2, 12), nn.Tanh(), nn.Linear(12, 2))
        self.critic = nn.Sequential(nn.Linear(2, 12), nn.Tanh(), nn.Linear(12, 1))

    def forward(self, x, action):
        distribution = Categorical(logits=self.actor(x))
        return distribution.log_prob(action), distribution.entropy(), self.critic(x)[..., 0]


torch.manual_seed(1)
here = hr.processes()  # headrace
agent = Agent()
optimizer = optim.Adam(agent.parameters(), lr=2.5e-3, eps=1e-5)
agent, optimizer, _ = hr.setup(agent, optimizer, None)  # headrace
place = torch.linspace(-1, 1, ENVS)
history = []
for update in range(3):
    optimizer.param_groups[0]["lr"] = (1 - update / 3) * 2.5e-3
    rows = []
    for step in range(STEPS):
        observed = torch.stack([place, torch.full((ENVS,), step / STEPS)], 1)
        with torch.no_grad(), here.common():  # headrace, was: with torch.no_grad():
            action = Categorical(logits=agent.actor(observed)).sample()
            log_prob, _, value = agent(observed, action)
        place = (place + (2.0 * action - 1) * 0.3).clamp(-2, 2)
        rows.append((observed, action, log_prob, value, 1 - place.abs()))
    observed, action, log_prob, value, reward = (torch.stack(each) for each in zip(*rows, strict=True))
    returns = reward.flip(0).cumsum(0).flip(0)
    advantage = returns - value
    batch = [each.flatten(0, 1) for each in (observed, action, log_prob, returns, advantage)]
    for _ in range(2):
        with here.common():  # headrace, was: if True:
            order = torch.randperm(ENVS * STEPS)
        for chosen in order.split(20):
            adv = batch[4][chosen]
            adv = (adv - adv.mean()) / (adv.std() + 1e-8)
            chosen, adv = here.share((chosen, adv))  # headrace
            new, entropy, values = agent(batch[0][chosen], batch[1][chosen])
            ratio = (new - batch[2][chosen]).exp()
            policy = torch.max(-adv * ratio, -adv * ratio.clamp(0.8, 1.2)).mean()
            loss = policy - 0.01 * entropy.mean() + 0.5 * (values - batch[3][chosen]).square().mean()
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
            optimizer.step()
    history.append(place.sum().item())
